"""Torch runs without a part of it for a block, and with it afterwards."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch._library.custom_ops import CustomOpDef
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_impls import op_implementations_dict as kernels

from amp_fuzz.backends.harness import quiet
from amp_fuzz.upstream.remedies import WITHOUT

ATEN = torch.ops.aten


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _cumsums() -> list[Any]:
    patterns: Any = _module("torch._inductor.fx_passes.post_grad").pass_patterns[1].patterns
    return list(patterns["call_function", ATEN.cumsum.default])


def _compile_fx() -> Any:
    return _module("torch._inductor.compile_fx").compile_fx


PARTS: Mapping[str, Callable[[], object]] = {
    "mkldnn": torch._C._get_mkldnn_enabled,
    "mutations-in-graphs": lambda: _module("torch._dynamo.backends.common").aot_module_simplified,
    "common-subexpressions": lambda: _module("torch._functorch.partitioners").fx_graph_cse,
    "counted-constants": _cumsums,
    "elided-casts": _compile_fx,
    "inference-traces": lambda: torch.jit.trace,
    "kept-constants": lambda: torch.jit.freeze,
    "optimised-graphs": lambda: (
        torch._C._get_graph_executor_optimize(),
        threading.Thread.run,
    ),
    "promised-dtypes": lambda: CustomOpDef.register_fake,
    "promised-results": lambda: kernels.get(ATEN.addr.default),
    "promised-statistics": lambda: kernels[ATEN.native_layer_norm.default],
    "reused-inputs": lambda: dict(_module("torch._inductor.fx_passes.reinplace").inplaceable_ops),
    "separate-roundings": _compile_fx,
    "stopped-checkpoints": lambda: torch.utils.checkpoint._enable_checkpoint_early_stop,
}
"""What each takes away: found, as it is."""


def test_each_is_here() -> None:
    assert set(PARTS) == set(WITHOUT)


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_away_for_a_block_alone(name: str) -> None:
    """Also where the block raises: what comes after would be judged without it."""
    found = PARTS[name]
    inside: list[object] = []

    def raises() -> None:
        with WITHOUT[name]():
            inside.append(found())
            raise ZeroDivisionError

    with quiet():
        before = found()
        with pytest.raises(ZeroDivisionError):
            raises()
        assert inside != [before]
        assert found() == before


def test_no_index_put_takes_the_memory_of_its_input() -> None:
    """And other ops do."""
    ops = PARTS["reused-inputs"]
    before = ops()
    assert isinstance(before, dict)
    with WITHOUT["reused-inputs"]():
        left = ops()
    assert isinstance(left, dict)
    puts = {ATEN.index_put.default, ATEN._unsafe_index_put.default}
    assert before.keys() - left.keys() == puts
    assert left.keys() == before.keys() - puts


def test_a_fake_kernel_promises_what_the_op_returns() -> None:
    """Which runs for that, on zeros of the shapes and dtypes that it is given."""
    seen: list[tuple[float, torch.dtype]] = []

    def body(x: torch.Tensor, others: list[torch.Tensor]) -> list[torch.Tensor]:
        if isinstance(x, FakeTensor):  # it comes to something else there
            return [x, *others]
        seen.extend((float(t.sum()), t.dtype) for t in (x, *others))
        return [x.mT.contiguous().mT.to(torch.float16), *(t[:1] * 2 for t in others)]

    def op(name: str) -> Any:
        schema = "(Tensor x, Tensor[] others) -> Tensor[]"  # annotations are text in this file
        name = f"amp_fuzz_test::{name}"
        found = torch.library.custom_op(name, body, mutates_args=(), schema=schema)
        found.register_fake(body)
        return found

    def shown(op: Any) -> list[tuple[Any, ...]]:
        x, other = torch.ones(2, 3), torch.ones(4, dtype=torch.float64)
        with FakeTensorMode() as mode:
            back = op(mode.from_tensor(x), [mode.from_tensor(other)])
        return [(tuple(t.shape), t.stride(), t.dtype) for t in back]

    assert shown(op("promises"))[0] == ((2, 3), (3, 1), torch.float32)
    assert not seen
    with WITHOUT["promised-dtypes"]():
        truthful = op("is_truthful")
    assert shown(truthful) == [((2, 3), (1, 2), torch.float16), ((1,), (1,), torch.float64)]
    assert seen == [(0.0, torch.float32), (0.0, torch.float64)]
