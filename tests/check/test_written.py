"""A cast that a callable writes asks for a rounding, and a check tells where it is left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import amp_fuzz
from amp_fuzz.backends import backends
from amp_fuzz.backends.compile import CompileBackend
from amp_fuzz.reference.shadow.written import calling, written
from tests.check.faults import BrokenCompiler, lowering
from tests.helpers import needs_torch

pytestmark = pytest.mark.thorough

INDUCTOR, EMULATING = "compile[inductor]", "compile[inductor+casts]"


def equal(x: Tensor) -> Tensor:
    return (x == x.half().float()).sum(-1)


def parts(x: Tensor) -> tuple[Tensor, ...]:
    """Inductor stores one cast, for the product and to return it, and writes to none."""
    stored, moved = x.half(), x.half().add_(1)
    return stored, x - stored.float(), stored.float() @ x.T, x + 1 - moved.float(), x.relu()


@contextmanager
def forgetting() -> Iterator[None]:
    """Let Inductor take a cast back to float32 for what was cast to 16 bits before."""
    from torch._inductor import lowering

    cast: Any = torch.ops.prims.convert_element_type.default
    honest, kept = lowering.lowerings[cast], []

    def convert(x: Any, dtype: torch.dtype) -> Any:
        for made, given in kept:
            if made is x and given.get_dtype() is dtype:
                return given
        kept.append((honest(x, dtype), x))
        return kept[-1][0]

    with mock.patch.dict(lowering.lowerings, {cast: convert}):
        yield


def test_inductor_leaves_a_cast_out_and_so_without_autocast() -> None:
    result = amp_fuzz.check(equal, torch.randn(4, 64), backends=INDUCTOR, autocast=None)
    (found,) = result.own
    assert (found.kind, result.ok) == ("precision", True)


def test_casts_that_are_stored_and_written_to_are_left_out_without_autocast_too() -> None:
    result = amp_fuzz.check(parts, torch.randn(4, 64), backends=INDUCTOR, autocast=None)
    assert [run.detail for run in result.runs] == ["not autocast's (precision)"], result


def test_a_wrong_op_beside_a_cast_that_is_left_out_is_told() -> None:
    wrong = BrokenCompiler("inductor", patches=lowering("relu.default"))
    x = torch.randn(4, 64)
    result = amp_fuzz.check(parts, x, backends=wrong, autocast=None, store=None, seconds=0)
    assert ([run.status for run in result.runs], result.divergences) == (["backend"], ()), result


@pytest.mark.parametrize("backend", ["compile[aot_eager]", EMULATING])
def test_who_makes_the_rounding_agrees(backend: str) -> None:
    if backend == EMULATING:
        needs_torch(">=2.13")
    result = amp_fuzz.check(equal, torch.randn(4, 64), backends=backend, autocast=None)
    assert [run.status for run in result.runs] == ["agreed"], result


def test_a_lowering_that_drops_a_cast_is_told() -> None:
    needs_torch(">=2.13")
    honest = backends()[EMULATING]
    assert isinstance(honest, CompileBackend)
    options = {f.name: getattr(honest, f.name) for f in dataclasses.fields(honest)}
    wrong = BrokenCompiler(**options, patches=forgetting)
    result = amp_fuzz.check(equal, torch.randn(4, 64), backends=wrong, autocast=None, store=None)
    (found,) = result.own
    assert (found.kind, found.where, result.ok) == ("precision", "output", True)


def test_casts_of_torchs_own_are_not_the_callables() -> None:
    """As those of ``custom_fwd(cast_inputs=...)``, which amp's own code makes."""
    seen: list[bool] = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: object, types: object, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is torch.ops.aten._to_copy.default:
                seen.append(written())
            return func(*args, **(kwargs or {}))  # type: ignore[operator]

    x, honest = torch.randn(4), torch.Tensor.half
    with calling() as met, Spy():
        x.half()
        torch.amp.autocast_mode._cast((x,), "cpu", torch.bfloat16)
        x.to(torch.float64)
    assert (seen, met) == ([True, False, True], [torch.float16])
    assert torch.Tensor.half is honest
    assert not written()
