"""Ops in torch, computed by XLA's formulas instead of those of torch's kernels.

XLA has one approximation of each function for all of its devices. This module repeats those that
are less exact than torch's, so the shadows include their cancellation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from amp_fuzz.backends.imitation import Kernel

__all__ = ["DEPTHWISE", "GAMMA", "MASKED", "TANH"]

_aten = torch.ops.aten


def _kernels(functions: Mapping[Any, Callable[..., Any]]) -> dict[Any, Kernel]:
    """Return functions as kernels, by overload. A function that returns None leaves the op to torch."""

    def kernel(function: Callable[..., Any]) -> Kernel:
        def computed(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            made = function(*args, **kwargs)
            return NotImplemented if made is None else made

        return computed

    return {overload: kernel(function) for overload, function in functions.items()}


# Lanczos, A Precision Approximation of the Gamma Function, SIAM Series B, 1964, with g = 7 and 9
# terms. XLA lowers lgamma and digamma to it in every precision.
_G = 7.0
_BASE = 0.99999999999980993227684700473478
_TERMS = (
    676.520368121885098567009190444019,
    -1259.13921672240287047156078755283,
    771.3234287776530788486528258894,
    -176.61502916214059906584551354,
    12.507343278686904814458936853,
    -0.13857109526572011689554707,
    9.984369578019570859563e-6,
    1.50563273514931155834e-7,
)


def _shifted(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mask of reflected x, the argument of the series, and t with its logarithm."""
    reflects = x < 0.5
    z = torch.where(reflects, -x, x - 1.0)
    return reflects, z, z + (_G + 0.5), math.log(_G + 0.5) + torch.log1p(z / (_G + 0.5))


def _lgamma(x: torch.Tensor) -> torch.Tensor | None:
    """Return log |gamma(x)|. Its terms cancel near its zeros at 1 and 2."""
    wide = _computed(x)
    if wide is None:
        return None
    reflects, z, t, log_t = _shifted(wide)
    total = torch.full_like(z, _BASE)
    for i, term in enumerate(_TERMS):
        total = total + term / (z + (i + 1.0))
    made = 0.5 * math.log(2 * math.pi) + (z + 0.5 - t / log_t) * log_t + torch.log(total)
    part = wide.abs() - wide.abs().floor()
    part = torch.where(part > 0.5, 1.0 - part, part)
    sine = torch.log(torch.sin(math.pi * part))
    mirrored = torch.where(torch.isfinite(sine), math.log(math.pi) - sine - made, -sine)
    found = torch.where(reflects, mirrored, made)
    return torch.where(torch.isinf(wide), wide.abs(), found).to(_floating(x))


def _digamma(x: torch.Tensor) -> torch.Tensor | None:
    """Return the derivative of `_lgamma`, or torch's digamma of numbers that are not positive."""
    wide = _computed(x)
    if wide is None:
        return None
    reflects, z, t, log_t = _shifted(wide)
    above, below = torch.zeros_like(z), torch.full_like(z, _BASE)
    for i, term in enumerate(_TERMS):
        above = above - term / (z + (i + 1.0)).square()
        below = below + term / (z + (i + 1.0))
    made = log_t + above / below - _G / t
    mirrored = made - math.pi / torch.tan(math.pi * wide)
    found = torch.where(reflects, mirrored, made)
    return torch.where(wide > 0, found, torch.digamma(wide)).to(_floating(x))


def _floating(x: torch.Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else torch.float32


def _computed(x: torch.Tensor) -> torch.Tensor | None:
    """Return x in the dtype in which XLA computes: float32 for 16 bits and integers, or float64."""
    return None if x.is_complex() else x if x.dtype is torch.float64 else x.float()


def _inplace(function: Callable[..., Any]) -> Callable[..., Any]:
    def written(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        made = function(x, *args, **kwargs)
        return None if made is None else x.copy_(made)

    return written


def _out(function: Callable[..., Any]) -> Callable[..., Any]:
    def written(x: torch.Tensor, *, out: torch.Tensor, **kwargs: Any) -> torch.Tensor | None:
        made = function(x, **kwargs)
        return None if made is None else out.resize_(made.shape).copy_(made)

    return written


GAMMA: Mapping[Any, Kernel] = _kernels(
    {
        _aten.lgamma.default: _lgamma,
        _aten.lgamma_.default: _inplace(_lgamma),
        _aten.lgamma.out: _out(_lgamma),
        _aten.digamma.default: _digamma,
        _aten.digamma_.default: _inplace(_digamma),
        _aten.digamma.out: _out(_digamma),
    }
)


# -- tanh ---------------------------------------------------------------------------------------

# XLA's tanh of float32 on a CPU with fused multiply-add: EmitFastTanh in
# xla/service/llvm_ir/math_ops.cc.
_TANH_LIMIT = 7.99881172180175781
_TANH_SMALL = 0.0004
_TANH_ABOVE = (
    -2.76076847742355e-16,
    2.00018790482477e-13,
    -8.60467152213735e-11,
    5.12229709037114e-08,
    1.48572235717979e-05,
    6.37261928875436e-04,
    4.89352455891786e-03,
)
_TANH_BELOW = (
    1.19825839466702e-06,
    1.18534705686654e-04,
    2.26843463243900e-03,
    4.89352518554385e-03,
)


def _fast_tanh(x: torch.Tensor) -> torch.Tensor:
    """Return tanh of float32 as a quotient of polynomials. It is 1 from 7.9988 on."""
    limited = x.clamp(-_TANH_LIMIT, _TANH_LIMIT)
    square = limited * limited
    quotient = limited * _polynomial(square, _TANH_ABOVE) / _polynomial(square, _TANH_BELOW)
    return torch.where(x.abs() < _TANH_SMALL, x, quotient)


def _polynomial(x: torch.Tensor, factors: Sequence[float]) -> torch.Tensor:
    """Return a polynomial of float32 by Horner's rule, with one rounding a step (fused)."""
    rounded = torch.tensor(factors, dtype=torch.float32).double().tolist()
    total = torch.full_like(x, rounded[0])
    for factor in rounded[1:]:
        total = (total.double() * x.double() + factor).float()
    return total


def _tanh(x: torch.Tensor) -> torch.Tensor | None:
    wide = _narrow(x)
    return None if wide is None else _fast_tanh(wide).to(_floating(x))


def _gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor | None:
    wide = _narrow(x)
    if approximate != "tanh" or wide is None:
        return None
    return (0.5 * wide * (1 + _gelu_tanh(wide))).to(x.dtype)


def _gelu_backward(
    grad: torch.Tensor, x: torch.Tensor, *, approximate: str = "none"
) -> torch.Tensor | None:
    wide = _narrow(x)
    if approximate != "tanh" or wide is None:
        return None
    t = _gelu_tanh(wide)
    inner = _GELU * (1 + 3 * _CUBE * wide * wide)
    return (grad.float() * (0.5 * (1 + t) + 0.5 * wide * (1 - t * t) * inner)).to(grad.dtype)


_GELU, _CUBE = math.sqrt(2 / math.pi), 0.044715


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return _fast_tanh(_GELU * (x + _CUBE * x * x * x))


def _mish(x: torch.Tensor) -> torch.Tensor | None:
    wide = _narrow(x)
    return None if wide is None else (wide * _fast_tanh(_softplus(wide))).to(x.dtype)


def _mish_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    wide = _narrow(x)
    if wide is None:
        return None
    t = _fast_tanh(_softplus(wide))
    slope = t + wide * torch.sigmoid(wide) * (1 - t * t)
    return (grad.float() * slope).to(grad.dtype)


def _softplus(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def _narrow(x: torch.Tensor) -> torch.Tensor | None:
    """Return x in float32, or None if XLA computes it by another function."""
    return None if x.dtype is torch.float64 or x.is_complex() else x.float()


TANH: Mapping[Any, Kernel] = _kernels(
    {
        _aten.tanh.default: _tanh,
        _aten.tanh_.default: _inplace(_tanh),
        _aten.tanh.out: _out(_tanh),
        _aten.gelu.default: _gelu,
        _aten.gelu_.default: _inplace(_gelu),
        _aten.gelu.out: _out(_gelu),
        _aten.gelu_backward.default: _gelu_backward,
        _aten.mish.default: _mish,
        _aten.mish_.default: _inplace(_mish),
        _aten.mish.out: _out(_mish),
        _aten.mish_backward.default: _mish_backward,
    }
)


# -- convolutions -------------------------------------------------------------------------------


def _dense(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the weight of a convolution without groups, with zeros between the groups."""
    outer, inner = weight.shape[0] // groups, weight.shape[1]
    parts = weight.new_zeros(groups, outer, groups, inner, *weight.shape[2:])
    for group in range(groups):
        parts[group, :, group] = weight[group * outer : (group + 1) * outer]
    return parts.reshape(groups * outer, groups * inner, *weight.shape[2:])


def _depthwise(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    *_: Any,
) -> torch.Tensor | None:
    """Also add 0 times the channels of all other groups, if float64 groups have one channel."""
    own = weight.shape[0] // groups if transposed else weight.shape[1]
    if x.dtype is not torch.float64 or groups == 1 or own != 1:
        return None
    rest = stride, padding, dilation, transposed, output_padding, 1
    made: torch.Tensor = _aten.convolution(x, _dense(weight, groups), bias, *rest)
    return made


def _depthwise_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    mask: Any,
) -> Any:
    """Do so with the channels of the gradient, if each group has one output."""
    own = weight.shape[1] if transposed else weight.shape[0] // groups
    if x.dtype is not torch.float64 or groups == 1 or own != 1 or not mask[0]:
        return None
    rest = stride, padding, dilation, transposed, output_padding
    dense = _dense(weight, groups)
    dx = _aten.convolution_backward(grad, x, dense, None, *rest, 1, [True, False, False])[0]
    given = grad, x, weight, bias_sizes, *rest, groups, [False, *mask[1:]]
    return (dx, *_aten.convolution_backward(*given)[1:])


DEPTHWISE: Mapping[Any, Kernel] = _kernels(
    {
        _aten.convolution.default: _depthwise,
        _aten._convolution.default: _depthwise,
        _aten.convolution_backward.default: _depthwise_backward,
    }
)


# -- products with masks ------------------------------------------------------------------------


def _masked(a: Any, b: Any) -> torch.Tensor | None:
    """Return 0 where a mask is off, even if the other factor is infinite or NaN."""
    for mask, value in ((a, b), (b, a)):
        masks = isinstance(mask, torch.Tensor) and mask.dtype is torch.bool
        if masks and isinstance(value, torch.Tensor) and value.is_floating_point():
            dtype = torch.result_type(a, b)
            return torch.where(mask, value.to(dtype), torch.zeros((), dtype=dtype))
    return None


MASKED: Mapping[Any, Kernel] = _kernels(
    {_aten.mul.Tensor: _masked, _aten.mul_.Tensor: _inplace(_masked)}
)
