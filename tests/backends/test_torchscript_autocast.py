"""TorchScript's autocast pass, written again: compared with torch's own, op by op."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from amp_fuzz.backends.harness import quiet
from amp_fuzz.backends.torchscript_autocast import (
    FULL,
    REDUCED,
    Ambient,
    ScriptPolicyError,
    inline,
    load_policies,
    write_casts,
)

BF16 = Ambient(cpu=torch.bfloat16)
CURRENT = {"cpu": torch.bfloat16, "cuda": torch.float16}


def schemas() -> Iterator[Any]:
    """Yield every overload of ATen that takes a tensor: torch's pass dies of some of the others."""
    for schema in torch._C._jit_get_all_schemas():
        takes = any(str(a.type) == "Tensor" for a in schema.arguments)
        if schema.name.startswith("aten::") and takes:
            yield schema


def graph_of(schema: Any, *, none: bool) -> Any:
    """Return a graph of one call; `none` passes None where a number or dtype is optional."""
    graph = torch._C.Graph()
    values = []
    for argument in schema.arguments:
        if none and str(argument.type).startswith("Optional[int"):
            node = graph.create("prim::Constant", 1)
            node.output().setType(torch._C.NoneType.get())
            graph.insertNode(node)
            values.append(node.output())
        else:
            value = graph.addInput()
            value.setType(argument.type)
            values.append(value)
    node = graph.create(schema.name, values, len(schema.returns))
    graph.insertNode(node)
    for output, result in zip(node.outputs(), schema.returns, strict=True):
        output.setType(result.type)
    return graph


def casts(graph: Any) -> list[str]:
    """Return what the inputs of a graph's last call were cast to."""
    last = list(graph.nodes())[-1]
    return [v.node().kind() if v.node().kind() in (FULL, REDUCED) else "" for v in last.inputs()]


def outcome(write: Any, graph: Any) -> list[str] | str:
    try:
        write(graph)
    except (RuntimeError, ScriptPolicyError) as error:
        return str(error).strip()
    return casts(graph)


def test_every_overload_is_cast_as_torch_casts_it() -> None:
    compared, cast, wrong = 0, 0, []
    for schema in schemas():
        for none in (False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                expected = outcome(torch._C._jit_pass_autocast, graph_of(schema, none=none))
            observed = outcome(lambda g: write_casts(g, BF16, CURRENT), graph_of(schema, none=none))
            compared += 1
            cast += any(expected)
            if expected != observed:
                wrong.append(f"{schema.name}.{schema.overload_name}: {expected}, {observed}")
    assert not wrong
    assert compared > 3000
    assert cast > 150


@pytest.mark.thorough
def test_a_missing_op_of_the_list_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    policies = {op: policy for op, policy in load_policies().items() if op != "exp"}
    monkeypatch.setattr("amp_fuzz.backends.torchscript_autocast.load_policies", lambda: policies)
    with pytest.raises(AssertionError, match="aten::exp"):
        test_every_overload_is_cast_as_torch_casts_it()


def scripted(body: str) -> tuple[Any, frozenset[int]]:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    unit = torch._C.CompilationUnit()
    source = f"def program(x, y):\n{lines}"
    with quiet():  # torch.jit.script is deprecated
        unit.define(source, {"torch": torch}.get)  # type: ignore[attr-defined]
    graph = unit.find_function("program").graph.copy()  # type: ignore[attr-defined]
    inlined = inline(graph)
    torch._C._jit_pass_constant_propagation_immutable_types(graph)  # type: ignore[attr-defined]
    return graph, inlined


def count(graph: Any, kind: str) -> int:
    return str(graph).count(kind)


def lowered(body: str, ambient: Ambient = Ambient()) -> Any:  # noqa: B008 (frozen)
    graph, inlined = scripted(body)
    write_casts(graph, ambient, CURRENT, inlined)
    return graph


def test_nothing_is_cast_where_nothing_is_on() -> None:
    assert count(lowered("return torch.mm(x, y)"), "_autocast_to") == 0


def test_regions_nest() -> None:
    body = """\
with torch.autocast("cpu", dtype=torch.float16):
    a = torch.mm(x, y)
    with torch.autocast("cpu", enabled=False):
        b = torch.mm(x, y)
    c = torch.mm(x, y)
return a, b, c"""
    graph = lowered(body)
    assert count(graph, REDUCED) == 4
    assert "prim::Constant[value=5]" in str(graph)  # float16


def test_a_region_of_another_device_leaves_the_cpu_as_it_is() -> None:
    body = 'with torch.autocast("cuda", dtype=torch.float16):\n    a = torch.mm(x, y)\nreturn a'
    assert count(lowered(body, BF16), REDUCED) == 2


def test_a_context_without_a_dtype_takes_the_current_one() -> None:
    body = 'with torch.autocast("cpu"):\n    a = torch.mm(x, y)\nreturn a'
    assert count(lowered(body), REDUCED) == 2


def test_a_value_that_stands_twice_is_cast_once() -> None:
    assert count(lowered("return torch.mm(x, x)", BF16), REDUCED) == 1


def test_promotion_casts_where_a_dtype_is_not_known() -> None:
    assert count(lowered("return x * y", BF16), FULL) == 2


def test_promotion_goes_by_types_that_tracing_saw() -> None:
    low, wide = torch.ones(2, dtype=torch.bfloat16), torch.ones(2)
    for other, casts_made in ((low, 0), (wide, 2)):
        with quiet():
            traced = torch.jit.trace(torch.mul, (low, other), check_trace=False)
        graph = traced.graph.copy()
        write_casts(graph, BF16, CURRENT)
        assert count(graph, FULL) == casts_made


def test_an_explicit_dtype_is_left_alone() -> None:
    assert count(lowered("return torch.sum(x, dtype=torch.float16)", BF16), FULL) == 0
    assert count(lowered("return torch.sum(x)", BF16), FULL) == 1


def test_a_called_function_is_cast_by_what_is_on_around_the_program() -> None:
    off = 'with torch.autocast("cpu", enabled=False):\n    a = {}\nreturn a'
    assert count(lowered(off.format("torch.nn.functional.softsign(x)"), BF16), FULL) == 3
    assert count(lowered(off.format("x / y"), BF16), FULL) == 0


def test_an_operator_that_torchscript_writes_itself_is_cast_where_it_stands() -> None:
    off = 'with torch.autocast("cpu", enabled=False):\n    a = 1 - x\nreturn a, 1 - x'
    assert count(lowered(off, BF16), FULL) == 1


def test_what_is_unsafe_is_refused() -> None:
    with pytest.raises(ScriptPolicyError, match="Unsafe to autocast"):
        lowered("return torch.nn.functional.binary_cross_entropy(x, y)", BF16)
