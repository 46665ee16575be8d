"""Faults of torchax: ways in which its policies, gradients and state could be wrong.

They live in torchax's own process, which puts on the one whose name stands in a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from amp_fuzz.backends.harness import Observation
from amp_fuzz.backends.torchax.backend import Mode, Torchax
from amp_fuzz.cases.case import Case
from tests.faults.fault import patched

__all__ = ["FAULTS", "Faulty"]

Around = Callable[[Any], AbstractContextManager[Any]]


def _policy(op: Any, name: str | None) -> Around:
    """Return what gives an op another policy, or none."""

    @contextmanager
    def around(torchax: Any) -> Iterator[None]:
        table = torchax.amp.autocast_policy
        before = table.pop(op)
        if name is not None:
            table[op] = torchax.amp.CastPolicy[name]
        try:
            yield
        finally:
            table[op] = before

    return around


def _lowering(op: Any, change: Callable[[Any], Any]) -> Around:
    """Return what changes the result of an op's lowering."""

    @contextmanager
    def around(torchax: Any) -> Iterator[None]:
        operator = torchax.default_env()._get_op_or_decomp(op)
        plain = operator.func
        operator.func = lambda *args, **kwargs: change(plain(*args, **kwargs))
        try:
            yield
        finally:
            operator.func = plain

    return around


def _too_large(op: Any) -> Around:
    """Return what makes the first result of an op 5 % too large."""

    def larger(made: Any) -> Any:
        return (made[0] * 1.05, *made[1:]) if isinstance(made, tuple) else made * 1.05

    return _lowering(op, larger)


def _stays_on(torchax: Any) -> AbstractContextManager[Any]:
    """Leave the dtype of a context behind."""

    @contextmanager
    def autocast(device: str, dtype: torch.dtype | None = torch.bfloat16) -> Iterator[None]:
        torchax.default_env().param.autocast_dtype = dtype
        yield

    return patched(torchax.amp, autocast=autocast)


def _half_of_the_gradient(torchax: Any) -> AbstractContextManager[Any]:
    import jax

    plain = jax.vjp

    def vjp(*args: Any, **kwargs: Any) -> Any:
        values, back, *more = plain(*args, **kwargs)
        return values, lambda cotangents: [g / 2 for g in back(cotangents)], *more

    return patched(jax, vjp=vjp)


def _at_leaves(change: Callable[[Any], Any]) -> Around:
    """Return what changes what torch's own autograd leaves at torchax's tensors."""

    def around(torchax: Any) -> AbstractContextManager[Any]:
        plain = torch.autograd.backward

        def backward(ends: Any, grad_tensors: Any = None, **kwargs: Any) -> None:
            starts = list(grad_tensors or ())
            if isinstance(ends[0], torchax.tensor.Tensor):
                starts = [change(start) for start in starts]
            if None not in starts:
                plain(ends, starts, **kwargs)

        return patched(torch.autograd, backward=backward)

    return around


_aten = torch.ops.aten

FAULTS: Mapping[str, Around] = {
    "mm-without-policy": _policy(_aten.mm.default, None),
    "mm-in-float32": _policy(_aten.mm.default, "FP32"),
    "prod-in-lower-precision": _policy(_aten.prod.default, "LOWER_PRECISION_FP"),
    "exp-a-bit-too-large": _lowering(_aten.exp, lambda y: y * 1.05),
    "exp-in-float32": _lowering(_aten.exp, lambda y: y.astype("float32")),
    "corrcoef-too-large": _too_large(torch.corrcoef),
    "svd-too-large": _too_large(torch.linalg.svd),
    "svd-of-another-sign": _lowering(torch.linalg.svd, lambda made: (-made[0], *made[1:])),
    "cat-too-large": _too_large(_aten.cat),
    "fft-too-large": _too_large(_aten._fft_r2c),
    "mul-too-large": _too_large(_aten.mul.Tensor),
    "sigmoid-too-large": _too_large(_aten.sigmoid),
    "gradients-halved": _half_of_the_gradient,
    "gradients-halved-by-autograd": _at_leaves(lambda start: start / 2),
    "gradients-forgotten": _at_leaves(lambda start: None),
    "tanh-backward-too-large": _too_large(_aten.tanh_backward.default),
    "mm-too-large": _too_large(_aten.mm),
    "context-stays-on": _stays_on,
}


class Faulty(Torchax):
    """torchax with the fault whose name stands in a file; an empty file: none."""

    def __init__(self, mode: Mode, file: str) -> None:
        super().__init__(mode)
        self._file = Path(file)

    def observe(self, case: Case) -> Observation:
        """Run a case with the fault."""
        fault = FAULTS.get(self._file.read_text())
        if fault is None:
            return super().observe(case)
        with fault(self.torchax):
            return super().observe(case)
