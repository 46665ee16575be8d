"""Torch runs without a part of it for a block, and with it afterwards."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch._library.custom_ops import CustomOpDef
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

from amp_fuzz.backends import control_flow
from amp_fuzz.backends.harness import quiet
from amp_fuzz.upstream.remedies import WITHOUT

PARTS: Mapping[str, Callable[[], object]] = {
    "elided-casts": lambda: importlib.import_module("torch._inductor.compile_fx").compile_fx,
    "islands": lambda: control_flow.product_in,
    "nested-regions": lambda: getattr(torch.compiler, "nested_compile_region", None),
    "promised-dtypes": lambda: CustomOpDef.register_fake,
    "stopped-checkpoints": lambda: torch.utils.checkpoint._enable_checkpoint_early_stop,
    "unentered-regions": lambda: PreDispatchTorchFunctionMode.__torch_function__,
    "weight-cache": lambda: torch.autocast("cpu")._cache_enabled,
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


def test_a_context_that_asks_for_the_weight_cache_has_it() -> None:
    with WITHOUT["weight-cache"]():
        asked = torch.autocast("cpu", cache_enabled=True)
    assert asked._cache_enabled
