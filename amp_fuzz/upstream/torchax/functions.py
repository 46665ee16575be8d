"""Single ops in torch, computed in the steps that torchax takes.

Autograd and the shadows run these steps, so they take the roundings and gradients of torchax. The
functions replace ops above autograd, where autocast casts, whether autocast is on or off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from amp_fuzz.reference import dispatch

__all__ = ["CUTS", "OPAQUE", "QUIRKS", "Cutting", "made", "names"]

OPAQUE = (
    "cdist",
    "corrcoef",
    "einsum",
    "linalg_matrix_power",
    "linalg_pinv.atol_rtol_tensor",
    "linalg_solve",
    "linalg_svd",
    "linalg_tensorsolve",
    "linear",
    "lu_solve",
    "pad",
    "svd",
)
"""Ops that torchax 0.0.13 implements as torch functions, without decomposing them.

Source: torchax/ops/jtorch.py.
"""


Function = Callable[..., Any]
"""A replacement of an op. Its first argument is the function that it replaces."""

# -- torch's own autograd ------------------------------------------------------------------------

CUTS = (
    *(torch.angle, torch.argsort, torch.cdist, torch.corrcoef, torch.diag, torch.einsum),
    *(torch.isclose, torch.allclose, torch.logdet, torch.lu, torch.lu_solve, torch.svd),
    *(torch.linalg.det, torch.linalg.matrix_power, torch.linalg.slogdet, torch.linalg.solve),
    *(torch.linalg.solve_ex, torch.linalg.svd, torch.linalg.tensorsolve, torch.tensor_split),
    *(torch.nn.functional.linear, torch.nn.functional.max_pool2d, torch.nn.functional.one_hot),
    *(torch.nn.functional.pad, torch.unravel_index, torch._C._nn.pad_sequence),
    *(torch.Tensor.__getitem__, torch.Tensor.flatten, torch.Tensor.repeat_interleave),
)
"""Functions that torchax 0.0.13 computes in JAX as soon as they are called, above autograd.

The functions in torchax/ops/jtorch.py, except those that take only sizes, and methods of torchax's
tensor class.
"""


_aten = torch.ops.aten
CUT_OVERLOADS = (
    *(_aten.convolution, _aten.max_unpool2d, _aten.max_unpool3d, _aten.native_layer_norm),
    _aten._native_batch_norm_legit_functional,
)
"""ATen overloads that torchax also computes above autograd if a program calls them by name."""


class Cutting(TorchFunctionMode):
    """Cut the graph where torchax does: at functions that it computes above torch's autograd.

    Functions called inside another function do not cut it: torchax's mode is off there.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in CUTS or getattr(func, "overloadpacket", func) in CUT_OVERLOADS:
            with torch.no_grad():  # so a checkpoint sees no tensors saved for the backward pass
                return _detached(func(*args, **kwargs))
        made = func(*args, **kwargs)
        if func is torch.Tensor.to:
            return made if made.dtype is args[0].dtype else made.detach()
        return made


def _detached(made: Any) -> Any:
    return tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, made)


_16_BIT = (torch.bfloat16, torch.float16)


def _added(x: torch.Tensor, product: torch.Tensor, beta: Any, alpha: Any) -> torch.Tensor:
    """Return `beta * x + alpha * product`. A beta of 0 leaves out x."""
    product = alpha * product
    return product if beta == 0 else beta * x + product


# -- torchax-sums ---------------------------------------------------------------------------------


def _linear(
    plain: Function, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Any:
    product = torch.einsum("...a,ba->...b", x, weight)
    return product if bias is None else product + bias


def _split(product: Callable[..., torch.Tensor]) -> Function:
    def added(
        plain: Function,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        beta: Any = 1,
        alpha: Any = 1,
    ) -> Any:
        return _added(x, product(a, b), beta, alpha)

    return added


def _inexact(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


# -- torchax-promotion ----------------------------------------------------------------------------


def _promoting(plain: Function, *args: Any, **kwargs: Any) -> Any:
    """Promote all tensors to one dtype. 0-d tensors count like any others."""
    return plain(*_alike(args), **kwargs)


def _multiplying(first: int) -> Function:
    """Return a replacement that promotes the two factors to one dtype, but not the addend."""

    def multiplied(plain: Function, *args: Any, **kwargs: Any) -> Any:
        factors = _alike(args[first : first + 2])
        return plain(*args[:first], *factors, *args[first + 2 :], **kwargs)

    return multiplied


def _weighing(
    plain: Function,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignored: int,
) -> Any:
    """Promote the input and the class weights. The divisor of a mean keeps the weights' dtype."""
    if weight is None:
        return plain(x, target, weight, reduction, ignored)
    x, alike = _alike([x, weight])
    if reduction != 1 or alike.dtype is weight.dtype:
        return plain(x, target, alike, reduction, ignored)
    counted = target[target != ignored]
    total = weight[counted].sum()
    return plain(x, target, alike, 2, ignored)[0] / total, total.to(x.dtype)


def _choosing(plain: Function, condition: torch.Tensor, *args: Any) -> Any:
    return plain(condition, *_alike(args))


def _alike(args: Sequence[Any]) -> list[Any]:
    dtypes = [a.dtype for a in args if isinstance(a, torch.Tensor)]
    if len(set(dtypes)) < 2:
        return list(args)
    dtype = functools.reduce(torch.promote_types, dtypes)
    return [a.to(dtype) if isinstance(a, torch.Tensor) else a for a in args]


def _addr(
    plain: Function,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    beta: Any = 1,
    alpha: Any = 1,
) -> Any:
    """Compute as torch._refs does: in float32 if torch promotes to 16 bits."""
    dtype = torch.result_type(x, torch.empty(1, dtype=torch.promote_types(a.dtype, b.dtype)))
    x, a, b = (t.to(torch.float32 if dtype in _16_BIT else dtype) for t in (x, a, b))
    return _added(x, torch.outer(a, b), beta, alpha).to(dtype)


def _from_float32(plain: Function, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Convert x to float32 before promotion, if it holds integers."""
    integers = not _inexact(x) and x.dtype not in (torch.bool, torch.uint8)
    return plain(*_alike((x.float() if integers else x, y)))


def _as_torch_promotes(plain: Function, *args: Any, **kwargs: Any) -> Any:
    """Compute in the dtype that torch promotes to. torch's own kernel rejects two dtypes."""
    given = [a for a in args if isinstance(a, torch.Tensor)]
    dtypes = [a.dtype for a in given if a.dim()] or [a.dtype for a in given]
    dtype = functools.reduce(torch.promote_types, dtypes)
    return plain(*(a.to(dtype) if isinstance(a, torch.Tensor) else a for a in args), **kwargs)


_PROMOTING = (
    *("add.Tensor", "sub.Tensor", "rsub.Tensor", "mul.Tensor", "div.Tensor", "div.Tensor_mode"),
    *("pow.Tensor_Tensor", "maximum", "minimum", "fmax", "fmin", "hypot", "dist"),
    *("copysign.Tensor", "fmod.Tensor", "remainder.Tensor", "floor_divide", "logaddexp"),
    *("logaddexp2", "nextafter", "clamp.Tensor", "clamp_min.Tensor", "clamp_max.Tensor"),
    *("igamma", "igammac", "huber_loss", "soft_margin_loss", "dot", "vdot", "mv", "mm", "bmm"),
    "special_zeta",
)


def _all_alike(plain: Function, equation: str, tensors: Sequence[Any], **kwargs: Any) -> Any:
    return plain(equation, _alike(tensors), **kwargs)


# -- torchax-scalars ------------------------------------------------------------------------------


def _rounding_numbers(plain: Function, x: Any, *others: Any, **kwargs: Any) -> Any:
    """Round Python numbers to the tensor's 16-bit dtype before the op."""
    tensors = [a for a in (x, *others) if isinstance(a, torch.Tensor)]
    dtype = tensors[0].dtype
    if dtype not in _16_BIT:
        return plain(x, *others, **kwargs)

    def rounded(value: Any) -> Any:
        return torch.tensor(value, dtype=dtype).item() if isinstance(value, float) else value

    return plain(
        *map(rounded, (x, *others)), **{name: rounded(value) for name, value in kwargs.items()}
    )


_WITH_NUMBERS = (
    *("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "div.Tensor_mode", "rsub.Scalar"),
    *("add.Scalar", "sub.Scalar", "mul.Scalar", "div.Scalar", "pow.Tensor_Scalar", "clamp"),
    *("clamp_min", "clamp_max", "fmod.Scalar", "remainder.Scalar", "floor_divide.Scalar"),
)


# -- torchax-dtype-argument -----------------------------------------------------------------------


def _without_dtype(plain: Function, x: torch.Tensor, *args: Any, dtype: Any = None) -> Any:
    return plain(x, *args)


# -- torchax-norms --------------------------------------------------------------------------------


def _standardized(x: torch.Tensor, dims: list[int], eps: float) -> tuple[torch.Tensor, ...]:
    mean = x.mean(dims, keepdim=True)
    rstd = torch.rsqrt(x.var(dims, correction=0, keepdim=True) + eps)
    return (x - mean) * rstd, mean, rstd


def _layer_norm(
    plain: Function,
    x: torch.Tensor,
    shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> Any:
    made, mean, rstd = _standardized(x, list(range(-len(shape), 0)), eps)
    made = made if weight is None else made * weight
    made = made if bias is None else made + bias
    return made, mean, rstd


def _group_norm(
    plain: Function,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    n: int,
    channels: int,
    inner: int,
    groups: int,
    eps: float,
) -> Any:
    if not x.numel():
        return plain(x, weight, bias, n, channels, inner, groups, eps)
    grouped, mean, rstd = _standardized(x.reshape(n * groups, -1), [1], eps)
    made = grouped.reshape(x.shape)
    each = (1, -1, *[1] * (x.dim() - 2))
    made = made if weight is None else made * weight.reshape(each)
    made = made if bias is None else bias.reshape(each) + made
    return made, mean.reshape(n, groups), rstd.reshape(n, groups)


def _batch_norm(
    plain: Function,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Normalise step by step, without an update of the running statistics."""
    each = (1, -1, *[1] * (x.dim() - 2))
    if training:
        made, own, rstd = _standardized(x, [0, *range(2, x.dim())], eps)
        saved = own.flatten(), rstd.flatten()
    else:
        assert mean is not None
        assert variance is not None
        made = (x - mean.reshape(each)) * torch.rsqrt(variance.reshape(each) + eps)
        saved = x.new_empty(0), x.new_empty(0)
    made = made if weight is None else made * weight.reshape(each)
    made = made if bias is None else made + bias.reshape(each)
    return made, *saved


# -- all ------------------------------------------------------------------------------------------

QUIRKS: Mapping[str, Mapping[str, Function]] = {
    "torchax-sums": {
        "addbmm": _split(lambda a, b: torch.einsum("bxy, byz -> xz", a, b)),
        "addmm": _split(torch.mm),
        "addmv": _split(torch.mv),
        "baddbmm": _split(torch.bmm),
        "linear": _linear,
    },
    "torchax-norms": {
        "native_batch_norm": _batch_norm,
        "native_group_norm": _group_norm,
        "native_layer_norm": _layer_norm,
    },
    "torchax-dtype-argument": dict.fromkeys(("sum", "sum.dim_IntList"), _without_dtype),
    "torchax-scalars": dict.fromkeys(_WITH_NUMBERS, _rounding_numbers),
    "torchax-promotion": {
        **dict.fromkeys(_PROMOTING, _promoting),
        **dict.fromkeys(("addbmm", "addmm", "addmv", "baddbmm"), _multiplying(1)),
        "linear": _multiplying(0),
        "addr": _addr,
        "atan2": _from_float32,
        "binary_cross_entropy": _promoting,
        "einsum": _all_alike,
        "linalg_cross": _promoting,
        "linalg_solve": _multiplying(0),
        "linalg_tensorsolve": _multiplying(0),
        "lu_solve": _multiplying(0),
        "heaviside": _as_torch_promotes,
        "nll_loss2d_forward": _weighing,
        "nll_loss_forward": _weighing,
        "lerp.Scalar": _as_torch_promotes,
        "lerp.Tensor": _as_torch_promotes,
        "mse_loss": _promoting,
        "where.self": _choosing,
    },
}
"""Replacements of ops, by quirk. If several quirks replace an op, the last is called first."""

_IN_PLACE = {
    f"{name.partition('.')[0]}_.{name.partition('.')[2]}".removesuffix("."): name
    for name in (
        *("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "div.Tensor_mode", "clamp"),
        *("pow.Tensor_Scalar", "clamp.Tensor", "clamp_min", "remainder.Tensor", "floor_divide"),
    )
}
_IN_PLACE["pow_.Scalar"] = _IN_PLACE.pop("pow_.Tensor_Scalar")


# The in-place form passes numbers, which the overload remainder.Tensor rejects.
_TAKING: Mapping[str, Function] = {"remainder.Tensor": torch.remainder}


@functools.cache
def names(quirks: frozenset[str]) -> tuple[str, ...]:
    """Return the overloads that these quirks replace."""
    found = [name for quirk, table in QUIRKS.items() if quirk in quirks for name in table]
    found += [name for name, plain in _IN_PLACE.items() if plain in found]
    return (*found, *(OPAQUE if "torchax-composites" in quirks else ()))


@functools.cache
def made(name: str, quirks: frozenset[str]) -> Function | None:
    """Return the replacement of an overload under these quirks, or None."""
    plain = _IN_PLACE.get(name)
    if plain is not None and (function := made(plain, quirks)) is not None:
        return functools.partial(_written, function)
    called: Function | None = None
    for quirk, table in QUIRKS.items():
        if quirk in quirks and name in table:
            plainly = _TAKING.get(name) or dispatch.overload_of(name)
            called = functools.partial(table[name], called or plainly)
    return called


def _written(function: Function, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return x.copy_(function(x, *args, **kwargs))
