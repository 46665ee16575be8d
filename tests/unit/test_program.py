"""Programs: data that is checked, compared, printed, and never more than data."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given

from amp_fuzz import catalogue
from amp_fuzz.cases.program import (
    DTYPES,
    MAX_DEPTH,
    Autocast,
    Checkpoint,
    DType,
    Float,
    InferenceMode,
    Items,
    Node,
    NoGrad,
    Program,
    ProgramError,
    Ref,
    Region,
    Statement,
    TensorSpec,
    refs,
    regions,
    statements,
    transform,
    unwrapped,
)
from amp_fuzz.strategies import programs
from tests.helpers import BF16, STEADY, call, one_line, program, under, x

SMALL = program(
    [x("x0", 2, 3), x("w1", 3, 2, dtype="bfloat16", domain="ties", layout="strided")],
    call("mm", "x0", "w1"),
    under(
        Autocast(device="cpu", dtype="float16", cache_enabled=False),
        call("add", "v0", "v0", to="v1", alpha=0.5),
        under(Checkpoint(use_reentrant=True), call("relu", "v1", to="v2", form="inplace")),
    ),
    under(NoGrad(), call("max.dim", "v2", -1, True, to="v3 _")),
    under(InferenceMode(), call("cat", ["v0", "v1"], dim=0, out=None, to="v4")),
)


def without(path: str, to: Any) -> Program:
    """Return a small program with one thing wrong."""
    fields = {"inputs": (x("x0", 2, 2),), "body": (call("mm", "x0", "x0"),), "outputs": ("v0",)}
    return Program(**{**fields, path: to})  # type: ignore[arg-type]


# -- check ---------------------------------------------------------------------------------------

BAD = {
    "unknown dtype": (
        without("inputs", (x("x0", 2, dtype="float8"),)),
        "$.inputs[0].dtype='float8' is unknown: use one of float16, ",
    ),
    "negative size": (without("inputs", (x("x0", -2),)), "$.inputs[0].shape=[-2] has a negative"),
    "too many elements": (
        without("inputs", (x("x0", 2**12, 2**12),)),
        "$.inputs[0].shape=[4096, 4096] has more than 4194304 elements",
    ),
    "weight of integers": (
        without("inputs", (x("w0", 2, dtype="int64"),)),
        "$.inputs[0].role='weight' needs a floating or complex dtype",
    ),
    "index without bound": (
        without("inputs", (x("x0", 2, dtype="int64", domain="index"),)),
        "$.inputs[0].bound=0: use 1 to",
    ),
    "input twice": (
        without("inputs", (x("x0", 2), x("x0", 2))),
        "$.inputs[1].name='x0' is defined twice",
    ),
    "output twice": (
        without("body", (call("mm", "x0", "x0"), call("mm", "x0", "x0"))),
        "$.body[1].outputs[0]='v0' is defined twice",
    ),
    "output over input": (
        without("body", (call("mm", "x0", "x0", to="x0"),)),
        "$.body[0].outputs[0]='x0' is defined twice",
    ),
    "use before definition": (
        without("body", (call("mm", "x0", "v0"),)),
        "$.body[0] uses 'v0', which is not defined before it",
    ),
    "use in a list": (without("body", (call("cat", ["x0", "v7"]),)), "$.body[0] uses 'v7'"),
    "use by keyword": (without("body", (call("mm", "x0", mat2="v7"),)), "$.body[0] uses 'v7'"),
    "use inside regions": (
        without("body", (call("relu", "x0"), under(BF16, under(NoGrad(), call("mm", "x0", "v8"))))),
        "$.body[1].body[0].body[0] uses 'v8'",
    ),
    "empty region": (without("body", (Region(BF16, ()),)), "$.body[0].body is empty"),
    "no outputs": (without("outputs", ()), "$.outputs is empty"),
    "undefined output": (without("outputs", ("v0", "v1")), "$.outputs[1]='v1' is not defined"),
    "unknown dtype literal": (
        without("body", (Statement("to", "method", (Ref("x0"), DType("os")), (), ("v0",)),)),
        "$.body[0] has dtype 'os'",
    ),
    "bad float": (
        without("body", (Statement("add", "function", (Ref("x0"), Float("0x1.8q")), (), ("v0",)),)),
        "$.body[0] has float '0x1.8q': write it as float.hex() does",
    ),
    "region of an unknown dtype": (
        without("body", (under(Autocast(dtype="int8"), call("relu", "x0")),)),
        "$.body[0].context.dtype='int8': use one of float16",
    ),
    "region of an unknown device": (
        without("body", (under(Autocast(device="tpu"), call("relu", "x0")),)),
        "$.body[0].context.device='tpu': use one of cpu",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_check_names_the_place(name: str) -> None:
    bad, said = BAD[name]
    with pytest.raises(ProgramError) as caught:
        bad.check()
    assert str(caught.value).startswith(said)
    assert one_line(caught.value)


def test_check_takes_what_is_well_formed() -> None:
    SMALL.check()


def nested(depth: int) -> Program:
    body: Any = call("relu", "x0")
    for _ in range(depth):
        body = under(BF16, body)
    return program([x("x0", 2)], body)


def test_regions_nest_as_deep_as_python_compiles_and_no_deeper() -> None:
    from amp_fuzz.backends.source import program_source

    nested(MAX_DEPTH).check()
    compile(program_source(nested(MAX_DEPTH)), "program", "exec")
    with pytest.raises(ProgramError, match=f"nests more than {MAX_DEPTH} regions"):
        nested(MAX_DEPTH + 1).check()


SMUGGLED = [
    "import os", "__import__", "x0;import os", "x0\n", "x0 ", " x0", "x", "0", "x0.y", "x0[0]",
    "lambda", "None", "v0, v1", "ｘ0", "x٣", "x²", "_", "__class__", "y0", "x-1", "x1_0", "X0",
    "x" + "1" * 40,
]  # fmt: skip


@pytest.mark.parametrize("name", SMUGGLED)
def test_no_text_becomes_a_name(name: str) -> None:
    """Names stand in the generated source as they are, so nothing but a name may pass."""
    with pytest.raises(ProgramError):
        without("inputs", (TensorSpec(name, (2,), "float32"),)).check()
    if name != "_":
        with pytest.raises(ProgramError):
            without("body", (Statement("relu", "function", (Ref("x0"),), (), (name,)),)).check()


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (
            call("matmull", "x0"),
            "$.body[0].op='matmull' is not in the catalogue: did you mean 'matmul'",
        ),
        (call("__import__", "x0"), "$.body[0].op='__import__' is not in the catalogue"),
        (call("mm", "x0", "x0", form="eval"), "$.body[0].form='eval': mm has function"),
        (call("mm", "x0", "x0", to=""), "$.body[0].outputs is empty"),
        (
            Statement("mm", "function", (Ref("x0"),), (("a=1, b", 1),), ("v0",)),
            "$.body[0].kwargs has 'a=1, b', which is not a keyword",
        ),
        (
            Statement("mm", "function", (Ref("x0"),), (("lambda", 1),), ("v0",)),
            "$.body[0].kwargs has 'lambda', which is not a keyword",
        ),
        (
            Statement("mm", "function", (Ref("x0"),), (("a", 1), ("a", 2)), ("v0",)),
            "$.body[0].kwargs names a keyword twice",
        ),
        (call("mm", form="method"), "$.body[0].args has 0: mm needs more"),
        (call("mm", 5, "x0", form="method"), "$.body[0].args[0]=5 must name a tensor"),
        (call("Conv1d", "x0", "x0", None, form="module"), "$.body[0].kwargs lacks 'inner'"),
    ],
)
def test_the_catalogue_refuses_what_it_cannot_write(statement: Statement, said: str) -> None:
    bad = msgspec.structs.replace(without("body", (statement,)), outputs=("x0",))
    with pytest.raises(ProgramError) as caught:
        catalogue.check(bad)
    assert str(caught.value).startswith(said)


# -- JSON, equality, hash ------------------------------------------------------------------------


@given(programs(max_statements=8))
@STEADY
def test_programs_round_trip_through_json(drawn: Program) -> None:
    text = msgspec.json.encode(drawn)
    again = msgspec.json.decode(text, type=Program)
    assert again == drawn
    assert hash(again) == hash(drawn)
    assert msgspec.json.encode(again) == text
    assert str(again) == str(drawn)


def test_programs_are_compared_by_value() -> None:
    again = msgspec.json.decode(msgspec.json.encode(SMALL), type=Program)
    assert {SMALL: 1}[again] == 1
    assert msgspec.structs.replace(SMALL, outputs=("v0",)) != SMALL


def test_minus_zero_and_zero_are_two_literals() -> None:
    assert Float((0.0).hex()) != Float((-0.0).hex())


def test_programs_do_not_change() -> None:
    with pytest.raises(AttributeError):
        SMALL.outputs = ()  # type: ignore[misc]


# -- walking and printing ------------------------------------------------------------------------


def test_statements_come_in_the_order_of_execution() -> None:
    assert [s.op for s in statements(SMALL.body)] == ["mm", "add", "relu", "max.dim", "cat"]


def test_regions_come_outer_before_inner() -> None:
    kinds = [type(c) for c in regions(SMALL.body)]
    assert kinds == [Autocast, Checkpoint, NoGrad, InferenceMode]


def test_refs_are_found_in_lists_of_lists() -> None:
    assert list(refs(Items((Ref("x0"), 1, Items((Ref("v1"), None)))))) == ["x0", "v1"]


def test_a_program_prints_like_this() -> None:
    assert (
        str(SMALL)
        == """\
x0: float32[2, 3] normal
w1: bfloat16[3, 2] ties strided weight
v0 = mm(x0, w1)
autocast(cpu, float16, cache_enabled=False):
    v1 = add(v0, v0, alpha=0.5)
    checkpoint(reentrant):
        v2 = relu[inplace](v1)
no_grad:
    v3, _ = max.dim(v2, -1, True)
inference_mode:
    v4 = cat([v0, v1], dim=0, out=None)
return v0, v1, v2, v3, v4"""
    )


def test_literals_print_as_python_writes_them() -> None:
    literals = call("add", "x0", -0.0, float("nan"), float("inf"), True, "a'b\n", None, [1, [2.5]])
    dtyped = msgspec.structs.replace(literals, args=(*literals.args, DType("bfloat16")))
    (line,) = str(program([x("x0")], dtyped)).splitlines()[1:-1]
    assert line == """v0 = add(x0, -0.0, nan, inf, True, "a'b\\n", None, [1, [2.5]], bfloat16)"""


def test_every_dtype_can_be_an_input() -> None:
    for dtype in DTYPES:
        without("inputs", (x("x0", 2, dtype=dtype),)).check()


def test_a_transformed_body_has_its_regions_and_statements_replaced_in_order() -> None:
    one, two, three = (call("abs", "x0", to=f"v{i}") for i in range(3))
    body = (one, Region(NoGrad(), (two, Region(BF16, (three,)))))
    assert transform(body) == body
    seen: list[str] = []

    def statement(node: Statement) -> list[Node]:
        seen.extend(node.outputs)
        return [] if node is one else [node, node]

    def region(node: Region, inner: tuple[Node, ...]) -> list[Node]:
        seen.append(type(node.context).__name__)
        return [Region(InferenceMode(), inner)]

    found = transform(body, region=region, statement=statement)
    inner = Region(InferenceMode(), (three, three))
    assert found == (Region(InferenceMode(), (two, two, inner)),)
    assert seen == ["v0", "v1", "v2", "Autocast", "NoGrad"]


def test_a_body_without_some_regions_keeps_what_stood_in_them() -> None:
    one, two = call("abs", "x0"), call("abs", "v0", to="v1")
    body = (one, Region(NoGrad(), (Region(BF16, (Region(NoGrad(), (two,)),)),)))
    assert unwrapped(body, (NoGrad,)) == (one, Region(BF16, (two,)))
    assert unwrapped(body, (NoGrad, Autocast)) == (one, two)
