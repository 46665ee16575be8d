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


def _typed_as_float16(torchax: Any) -> AbstractContextManager[Any]:
    def type_as(self: Any, other: Any) -> Any:
        self._elem = self._elem.astype("float16")
        return self

    return patched(torchax.tensor.Tensor, type_as=type_as)


def _stays_on(torchax: Any) -> AbstractContextManager[Any]:
    """Leave the dtype of a context behind."""

    @contextmanager
    def autocast(device: str, dtype: torch.dtype | None = torch.bfloat16) -> Iterator[None]:
        torchax.default_env().param.autocast_dtype = dtype
        yield

    return patched(torchax.amp, autocast=autocast)


def _ones_for_gradients(torchax: Any) -> AbstractContextManager[Any]:
    import jax

    plain = jax.vjp

    def vjp(*args: Any, **kwargs: Any) -> Any:
        values, back, *more = plain(*args, **kwargs)
        return values, lambda cotangents: [g * 0 + 1 for g in back(cotangents)], *more

    return patched(jax, vjp=vjp)


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


def _raising(kind: type[Exception], text: str) -> Callable[[Any], Any]:
    """Return what raises in the place of a change."""

    def change(made: Any) -> Any:
        raise kind(text)

    return change


# What torchax says of the derivative of layer_norm.
_EIGHT = (
    "_aten_native_layer_norm_backward() takes from 5 to 6 positional arguments but 8 were given"
)

_aten = torch.ops.aten

FAULTS: Mapping[str, Around] = {
    "mm-without-policy": _policy(_aten.mm.default, None),
    "mm-in-float32": _policy(_aten.mm.default, "FP32"),
    "prod-in-lower-precision": _policy(_aten.prod.default, "LOWER_PRECISION_FP"),
    "exp-a-bit-too-large": _lowering(_aten.exp, lambda y: y * 1.05),
    "exp-in-float32": _lowering(_aten.exp, lambda y: y.astype("float32")),
    "add-too-large": _too_large(_aten.add.Tensor),
    "cdist-too-large": _too_large(torch.cdist),
    "corrcoef-too-large": _too_large(torch.corrcoef),
    "exp2-too-large": _too_large(_aten.exp2),
    "inv-too-large": _too_large(_aten.linalg_inv_ex),
    "mv-too-large": _too_large(_aten.mv),
    "remainder-too-large": _too_large(_aten.remainder),
    "atan2-too-large": _too_large(_aten.atan2),
    "complex-too-large": _too_large(_aten.complex),
    "cumprod-too-large": _too_large(_aten.cumprod),
    "cumsum-too-large": _too_large(_aten.cumsum),
    "embedding-too-large": _too_large(_aten.embedding),
    "fmod-too-large": _too_large(_aten.fmod),
    "gelu-too-large": _too_large(_aten.gelu),
    "lgamma-too-large": _too_large(_aten.lgamma),
    "lu-solve-too-large": _too_large(torch.lu_solve),
    "norm-too-large": _too_large(_aten.linalg_vector_norm),
    "lu-unpack-too-large": _too_large(_aten.lu_unpack),
    "pow-too-large": _too_large(_aten.pow),
    "sub-too-large": _too_large(_aten.sub.Tensor),
    "svd-too-large": _too_large(torch.linalg.svd),
    "svd-of-another-sign": _lowering(torch.linalg.svd, lambda made: (-made[0], *made[1:])),
    "trilinear-too-large": _too_large(_aten._trilinear),
    "bce-too-large": _too_large(_aten.binary_cross_entropy),
    "cat-too-large": _too_large(_aten.cat),
    "det-too-large": _too_large(torch.linalg.det),
    "digamma-too-large": _too_large(_aten.digamma),
    "div-too-large": _too_large(_aten.div),
    "fft-too-large": _too_large(_aten._fft_r2c),
    "layer-norm-too-large": _too_large(_aten.native_layer_norm),
    "mul-too-large": _too_large(_aten.mul.Tensor),
    "sigmoid-too-large": _too_large(_aten.sigmoid),
    "softmax-in-float64": _lowering(_aten._softmax, lambda y: y.astype("float64")),
    "softmax-in-bfloat16": _lowering(_aten._softmax, lambda y: y.astype("bfloat16")),
    "slice-scatter-too-large": _too_large(_aten.slice_scatter),
    "sum-too-large": _too_large(_aten.sum),
    "tanh-too-large": _too_large(_aten.tanh),
    "triangular-solve-too-large": _too_large(_aten.triangular_solve),
    "type-as-float16": _typed_as_float16,
    "gradients-of-one": _ones_for_gradients,
    "gradients-halved": _half_of_the_gradient,
    "gradients-halved-by-autograd": _at_leaves(lambda start: start / 2),
    "gradients-forgotten": _at_leaves(lambda start: None),
    "backward-raises-otherwise": _at_leaves(_raising(RuntimeError, "another reason")),
    "layer-norm-raises-forward": _lowering(_aten.native_layer_norm, _raising(TypeError, _EIGHT)),
    "clamp-too-large": _too_large(_aten.clamp),
    "cummin-too-large": _too_large(_aten.cummin),
    "irfft-too-large": _too_large(_aten._fft_c2r),
    "log1p-too-large": _too_large(_aten.log1p),
    "tanh-backward-too-large": _too_large(_aten.tanh_backward.default),
    "mm-too-large": _too_large(_aten.mm),
    "div-mode-too-large": _too_large(_aten.div.Tensor_mode),
    "diagonal-too-large": _too_large(_aten.diagonal),
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
