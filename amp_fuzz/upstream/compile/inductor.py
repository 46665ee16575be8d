"""Ops that Inductor computes otherwise than eager's kernels.

Each stands at the stage inductor and needs no autocast.

## compile-fractional-pool: random samples in reverse

`fractional_max_pool3d` with samples `[1, 0, 0]` pools as eager does with `[0, 0, 1]`
([#183628](https://github.com/pytorch/pytorch/pull/183628)).

## compile-max-pool-indices: of a transposed input

The indices of `max_pool2d(x, 2, return_indices=True)` of a `[1, 2, 2]` tensor with strides
`[4, 1, 2]` are transposed ([#197434](https://github.com/pytorch/pytorch/issues/197434)). The
gradient goes to another element with them. It happens where the result has one element: Inductor
then walks the window in the order of the strides. Fourteen other shapes, layouts and windows with
more results all agreed.

## compile-any-uint8: any of uint8 is bool

`torch.any` of uint8 is uint8, as documented, and bool where Inductor compiles it
([#198081](https://github.com/pytorch/pytorch/issues/198081)). `torch.all` stays uint8.

## compile-erf: no digits near 0

Vectorised, `erf(1e-8)` of float32 is 0 and `erf(1e-4)` is 1.12889e-4 instead of 1.12838e-4
([#198183](https://github.com/pytorch/pytorch/issues/198183)). It is the polynomial 7.1.26 of
Abramowitz and Stegun. `gelu` is computed from it and cancels: at -3.25445 it is -1.848923e-3
instead of -1.848732e-3. That depends on the machine: on one with AVX512, 1 of 500 cases that had
agreed on another diverged.

## compile-atanh, compile-expm1: no digits near 0

Vectorised, `atanh(x)` is `log((1 + x) / (1 - x)) / 2` and `expm1(x)` is `exp(x) - 1` ("decompose
for a better performance", `torch/_inductor/codegen/cpp.py`). `1 + x` and `exp(x)` are rounded.
`elu`, `celu` and `selu` are computed from `expm1`. Of float32:

| x | `atanh(x)` | compiled | `elu(-x)` | compiled |
|---|---|---|---|---|
| 1e-4 | 1.0000000e-4 | 1.0002660e-4 | -9.9994999e-5 | -1.0001659e-4 |
| 2.2e-38 | 2.2e-38 | 0 | -2.2e-38 | 0 |

Elements behind the last whole vector are computed one by one with `std::atanh` and `std::expm1`,
and are right. Depending on the program, so are small tensors. The imitation allows either value in
each element. We found no report.

## compile-remainder: of large numbers

Vectorised, `remainder(x, 300.0)` is `x - floor(x / 300) * 300` with each step rounded
([#198057](https://github.com/pytorch/pytorch/issues/198057)). Of float32 1e38 it is 0, or 2.5e30,
instead of 28. Such elements are hardly judged. A tensor whose quotients float32 holds exactly is
judged as usual. The reference computes the remainder the same way, which also explains every value
computed from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import call, case, x
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.literals import bits_of
from amp_fuzz.reference.shadow.run import either
from amp_fuzz.upstream.bug import Bug, Example
from amp_fuzz.upstream.lowering import HALVES, Lowerings, in_place, kernels, out_of, wide

__all__ = ["BUGS"]

INDUCTOR = "compile[inductor]"

_aten = torch.ops.aten


def _fractional_pool(*args: Any) -> Any:
    """Take the random samples, ``[N, C, 3]``, in the reverse order."""
    *others, samples = args
    return _aten.fractional_max_pool3d.default(*others, samples.flip(-1))


# -- max pooling ---------------------------------------------------------------------------------


def _max_pool(
    x: torch.Tensor,
    kernel: list[int],
    stride: list[int] | tuple[()] = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Misread the index of a window of which there is one: its axes go by the strides of x."""
    n = 2 if len(kernel) < 3 else 3
    op: Any = _aten.max_pool2d_with_indices if n == 2 else _aten.max_pool3d_with_indices
    out, indices = op.default(x, kernel, stride, padding, dilation, ceil_mode)
    size, gap, pad = (_each(value, n) for value in (kernel, dilation, padding))
    order = sorted(range(n), key=lambda axis: -x.stride(axis - n))
    if out.numel() != 1 or order == list(range(n)) or any(pad):
        return None
    window = x.reshape(x.shape[-n:])[
        tuple(slice(0, k * g, g) for k, g in zip(size, gap, strict=True))
    ]
    if list(window.shape) != size:
        return None
    flat = window.permute(order).reshape(-1).argmax()
    index = torch.zeros_like(flat)
    for axis in range(n):
        step = math.prod(size[axis + 1 :])
        index = index * x.shape[axis - n] + flat // step % size[axis] * gap[axis]
    return out, index.reshape(indices.shape)


def _each(value: int | list[int], n: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * n if len(values) == 1 else values


def _adaptive_max_pool(
    x: torch.Tensor, size: list[int]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    return _max_pool(x, list(x.shape[-2:])) if list(size) == [1, 1] else None


_POOLS: Lowerings = {
    _aten.adaptive_max_pool2d.default: _adaptive_max_pool,
    _aten.max_pool2d_with_indices.default: _max_pool,
    _aten.max_pool3d_with_indices.default: _max_pool,
}


# -- any -----------------------------------------------------------------------------------------


def _any(overload: Any) -> Callable[..., Any]:
    def truth(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """Return a bool where eager returns uint8."""
        if x.dtype != torch.uint8:
            return None
        found: torch.Tensor = overload(x, *args, **kwargs)
        return found.bool()

    return truth


# -- functions that cancel -----------------------------------------------------------------------

# Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: off by up to 1.5e-7.
_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def _erf(x: torch.Tensor) -> torch.Tensor | None:
    """Return erf by the polynomial of the vectorised kernel, which cancels near 0."""
    if x.dtype not in (torch.float32, *HALVES):
        return None
    limited = x.float().clamp(-6.0, 6.0)  # where float32 has reached 1; nothing leaves the range
    t = 1.0 / (limited.abs() * 0.3275911 + 1.0)
    total = torch.zeros_like(t)
    for factor in _ERF:
        total = (total + factor) * t
    made = torch.copysign(1.0 - total * torch.exp(-limited * limited), limited)
    return either(made, torch.erf(limited)).to(x.dtype)


def _half_erf(x: torch.Tensor) -> torch.Tensor | None:
    """Return the normal distribution function by that polynomial: gelu is computed from it."""
    erf = _erf(x.float() * math.sqrt(0.5))
    return None if erf is None or x.dtype is torch.float64 else (erf + 1.0) * 0.5


def _gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor | None:
    below = _half_erf(x) if approximate == "none" else None
    return None if below is None else (x.float() * below).to(x.dtype)


def _gelu_backward(
    grad: torch.Tensor, x: torch.Tensor, *, approximate: str = "none"
) -> torch.Tensor | None:
    below = _half_erf(x) if approximate == "none" else None
    if below is None:
        return None
    given = x.float()
    density = torch.exp(given * given * -0.5) / math.sqrt(2 * math.pi)
    return (grad.float() * (below + given * density)).to(grad.dtype)


def _atanh(x: torch.Tensor) -> torch.Tensor | None:
    """Return atanh as a logarithm, which cancels near 0."""
    if not x.is_floating_point():
        return None
    given = wide(x)
    made = 0.5 * torch.log((1.0 + given) / (1.0 - given))
    return either(made, torch.atanh(given)).to(x.dtype)


def _expm1(x: torch.Tensor) -> torch.Tensor | None:
    return _less_one(wide(x)).to(x.dtype) if x.is_floating_point() else None


def _elu(
    x: torch.Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0
) -> torch.Tensor:
    given = wide(x)
    below = (alpha * scale) * _less_one(given * input_scale)
    return torch.where(given > 0, scale * given, below).to(x.dtype)


def _celu(x: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    given = wide(x)
    return torch.where(given > 0, given, alpha * _less_one(given / alpha)).to(x.dtype)


def _less_one(x: torch.Tensor) -> torch.Tensor:
    """Return ``exp(x) - 1`` with the exponential rounded, which cancels near 0.

    An element behind the last whole vector is computed by the function itself.
    """
    return either(torch.exp(x) - 1.0, torch.expm1(x))


def _remainder(a: Any, b: Any) -> torch.Tensor | None:
    """Take as many whole b from a as a quotient rounded to float32 says."""
    dtype = torch.result_type(a, b)
    if not dtype.is_floating_point:
        return None
    computed = torch.float32 if dtype in HALVES else dtype
    a, b = (torch.as_tensor(value).to(computed) for value in (a, b))
    made: torch.Tensor = a - torch.div(a, b, rounding_mode="floor") * b
    return made.to(dtype)


def _variants(op: Any, lowering: Callable[..., Any]) -> Lowerings:
    """Return the lowering of a unary op, of its method in place and of its ``out=``."""
    written = getattr(_aten, f"{op.__name__}_")
    return {
        op.default: lowering,
        written.default: in_place(lowering),
        op.out: out_of(lowering),
    }


_ERFS: Lowerings = {
    **_variants(_aten.erf, _erf),
    _aten.gelu.default: _gelu,
    _aten.gelu.out: out_of(_gelu),
    _aten.gelu_backward.default: _gelu_backward,
}
_EXPONENTIALS: Lowerings = {
    **_variants(_aten.expm1, _expm1),
    **_variants(_aten.elu, _elu),
    _aten.celu.default: _celu,
    _aten.celu_.default: in_place(_celu),
    _aten.celu.out: out_of(_celu),
}
_REMAINDERS: Lowerings = {
    _aten.remainder.Tensor: _remainder,
    _aten.remainder.Scalar: _remainder,
    _aten.remainder.Scalar_Tensor: _remainder,
    _aten.remainder.Tensor_out: out_of(_remainder),
    _aten.remainder.Scalar_out: out_of(_remainder),
    _aten.remainder_.Tensor: in_place(_remainder),
    _aten.remainder_.Scalar: in_place(_remainder),
}


def _small(op: str) -> Case:
    """Call an op on numbers near 0, without autocast; one stands behind the last vector."""
    given = x("x1", 17, domain="subnormal")
    return case([given], call(op, "x1"), contexts=(), backward="none")


BUGS = (
    Bug(
        id="compile-fractional-pool",
        what="fractional_max_pool3d takes its random samples in the reverse order when Inductor compiles it",
        why="the lowering reads width, height, depth; the kernel depth, height, width",
        link="https://github.com/pytorch/pytorch/pull/183628",
        torch=">=2.9",
        seen="2.15.0",
        backends=("compile[inductor*",),
        ops=("fractional_max_pool3d*",),
        imitation=Imitation(
            kernels=kernels({_aten.fractional_max_pool3d.default: _fractional_pool})
        ),
        examples=(
            Example(
                INDUCTOR,
                case(
                    [x("x0", 1, 5, 3, 5), x("x1", 1, 1, 3, domain="unit")],
                    call("fractional_max_pool3d", "x0", [1, 2, 2], [3, 1, 3], "x1", to="v0 v1"),
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="compile-max-pool-indices",
        what="max pooling of a transposed input answers transposed indices, and its gradient goes elsewhere",
        why="Inductor reorders the window by the strides of the input, and reads the index as if it had not",
        link="https://github.com/pytorch/pytorch/issues/197434",
        torch=">=2.7,<2.15",
        seen="2.13.0",
        backends=("compile[inductor*",),
        ops=(
            "max_pool2d*",
            "max_pool3d*",
            "adaptive_max_pool2d*",
        ),
        imitation=Imitation(kernels=kernels(_POOLS)),
        examples=(
            Example(
                INDUCTOR,
                case(
                    [
                        x("x0"),
                        x(
                            "x1",
                            *(1, 2, 2),
                            layout="transposed",
                            values=bits_of([0.0, 1.0, 0.0, 0.0], "float32"),
                        ),
                    ],
                    call("max_pool2d_with_indices", "x1", kernel_size=2, to="v0 v1"),
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="compile-any-uint8",
        what="any of uint8 is bool when Inductor compiles it, and uint8 in eager",
        why="Inductor's lowering returns the truth; eager keeps uint8, as the documentation says",
        link="https://github.com/pytorch/pytorch/issues/198081",
        torch=">=2.7",
        seen="2.15.0",
        backends=("compile[inductor*",),
        ops=("any*",),
        imitation=Imitation(
            kernels=kernels(
                {op: _any(op) for op in (_aten.any.default, _aten.any.dim, _aten.any.dims)}
            )
        ),
        examples=(
            Example(
                INDUCTOR,
                case(
                    [x("x0", 3), x("x1", 3, dtype="uint8")],
                    call("any", "x1"),
                    call("any.dim", "x1", 0, to="v1"),
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="compile-erf",
        what="erf of small float32 numbers has few digits, or none, when Inductor compiles it; so has gelu of numbers near -3",
        why="the vectorised kernel has an absolute error of 4.5e-7",
        link="https://github.com/pytorch/pytorch/issues/198183",
        torch=">=2.7",
        seen="2.15.0",
        backends=("compile[inductor*",),
        ops=(
            "erf",
            "gelu",
            "Transformer*Layer",
        ),
        imitation=Imitation(kernels=kernels(_ERFS)),
        examples=(Example(INDUCTOR, _small("erf")),),
    ),
    Bug(
        id="compile-atanh",
        what="atanh of small numbers has few digits, or none, when Inductor compiles it",
        why="the vectorised kernel is log((1 + x) / (1 - x)) / 2, and 1 + x is rounded",
        torch=">=2.7",
        seen="2.15.0",
        backends=("compile[inductor*",),
        ops=(
            "atanh",
            "arctanh",
        ),
        imitation=Imitation(kernels=kernels(_variants(_aten.atanh, _atanh))),
        examples=(Example(INDUCTOR, _small("atanh")),),
    ),
    Bug(
        id="compile-expm1",
        what="expm1, elu, celu and selu of small numbers have few digits, or none, when Inductor compiles them",
        why="the vectorised kernel of expm1 is exp(x) - 1, and the exponential is rounded",
        torch=">=2.7",
        seen="2.13.0",
        backends=("compile[inductor*",),
        ops=(
            "expm1",
            "special.expm1",
            "elu",
            "celu",
            "selu",
        ),
        imitation=Imitation(kernels=kernels(_EXPONENTIALS)),
        examples=(Example(INDUCTOR, _small("celu"), torch="<2.15"),),
    ),
    Bug(
        id="compile-remainder",
        what="the remainder of large numbers is wrong by as much as they are rounded when Inductor compiles it",
        why="the vectorised kernel multiplies a rounded quotient back",
        link="https://github.com/pytorch/pytorch/issues/198057",
        torch=">=2.7",
        seen="2.15.0",
        backends=("compile[inductor*",),
        ops=("remainder*",),
        imitation=Imitation(kernels=kernels(_REMAINDERS)),
        examples=(
            Example(
                INDUCTOR,
                case(
                    [x("x0", 16), x("x1", 16, values=bits_of([float(2**100)] * 16, "float32"))],
                    call("remainder.scalar", "x1", 300.0),
                    call("remainder.scalar", "x0", 300.0, to="v1"),
                    contexts=(),
                    backward="none",
                ),
            ),
            Example(
                INDUCTOR,
                case(
                    [x("x0", 16, values=bits_of([float(2**100)] * 16, "float32")), x("x1", 16)],
                    call("remainder.scalar", "x0", 300.0),
                    call("mul", "v0", "x1", to="v1"),
                    call("exp", "x1", to="v2"),
                    returns=("v1", "v2"),  # what is computed from a remainder, and another value
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
)
