"""What torchax makes of single ops, written again from what it does, for `quirks`.

Autograd and shadows follow these, so that their own roundings and their own gradients are theirs.
They stand where autocast does, above autograd, with autocast or without.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from amp_fuzz.reference import dispatch

__all__ = ["OPAQUE", "QUIRKS", "TAKEN_APART", "made", "names", "numbers"]

OPAQUE = (
    "cdist",
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
"""What torchax 0.0.13 computes where it is called, as torch functions (torchax/ops/jtorch.py)."""


Function = Callable[..., Any]
"""What is called in the place of an op, with what it would call as its first argument."""

_16_BIT = (torch.bfloat16, torch.float16)


# -- torchax-composites ---------------------------------------------------------------------------


def _baddbmm_out(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    beta: Any = 1,
    alpha: Any = 1,
    out: torch.Tensor,
) -> torch.Tensor:
    made = alpha * torch.bmm(a, b)
    made = made if beta == 0 else beta * x + made
    with torch.no_grad():
        return out.resize_(made.shape).copy_(made)


TAKEN_APART: Mapping[str, Callable[..., Any]] = {"baddbmm.out": _baddbmm_out}
"""Ops without a policy that torchax makes of others, which have theirs."""


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
        made = alpha * product(a, b)
        return made if beta == 0 else beta * x + made

    return added


def _convolution(
    plain: Function,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *others: Any,
) -> Any:
    made = torch.ops.aten.convolution(x, weight, None, *others)
    return made if bias is None else made + bias.reshape(-1, *[1] * (made.dim() - 2))


def _after_alpha(plain: Function, x: Any, y: Any, *, alpha: Any = 1) -> Any:
    """Multiply first; integers times a number that is none are float64."""
    if isinstance(alpha, float) and isinstance(y, torch.Tensor) and not _inexact(y):
        y = y.double()
    return plain(x, y if alpha == 1 else y * alpha)


def _inexact(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _trilinear(
    plain: Function,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    *others: Any,
) -> Any:
    """Round the product of all three before it is added up."""
    for dims, i in zip(others[:3], range(3), strict=True):
        for dim in sorted(dims):
            a, b, c = (t.unsqueeze(dim) if n == i else t for n, t in enumerate((a, b, c)))
    return (a * b * c).sum(others[3])


# -- torchax-promotion ----------------------------------------------------------------------------


def _promoting(plain: Function, *args: Any, **kwargs: Any) -> Any:
    """Give all tensors the dtype that they promote to, those of no dimension like any others."""
    return plain(*_alike(args), **kwargs)


def _multiplying(first: int) -> Function:
    """Return what gives the two factors one dtype; what is added has its own."""

    def multiplied(plain: Function, *args: Any, **kwargs: Any) -> Any:
        factors = _alike(args[first : first + 2])
        return plain(*args[:first], *factors, *args[first + 2 :], **kwargs)

    return multiplied


def _weighing(
    plain: Function, x: torch.Tensor, target: torch.Tensor, weight: Any, *others: Any
) -> Any:
    """Give the input and the weights of classes one dtype."""
    if weight is None:
        return plain(x, target, weight, *others)
    x, weight = _alike([x, weight])
    return plain(x, target, weight, *others)


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
    """Compute it as torch._refs does: in float32 where torch promotes to 16 bits."""
    dtype = torch.result_type(x, torch.empty(1, dtype=torch.promote_types(a.dtype, b.dtype)))
    x, a, b = (t.to(torch.float32 if dtype in _16_BIT else dtype) for t in (x, a, b))
    made = alpha * torch.outer(a, b)
    return (made if beta == 0 else beta * x + made).to(dtype)


def _from_float32(plain: Function, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Take an integer for a float32 before anything is promoted."""
    integers = not _inexact(x) and x.dtype not in (torch.bool, torch.uint8)
    return plain(*_alike((x.float() if integers else x, y)))


def _as_torch_promotes(plain: Function, *args: Any, **kwargs: Any) -> Any:
    """Compute in the dtype that torch promotes to, where its own kernel refuses two dtypes."""
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
    """Give Python numbers the dtype of the tensor before they are computed with."""
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


def _without_dtype_of_one(plain: Function, x: torch.Tensor, dim: int, *, dtype: Any = None) -> Any:
    """Return a tensor of no dimension as it is."""
    return plain(x, dim, dtype=dtype) if x.dim() else x


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
    """Leave the running statistics as they are, too."""
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


def _weight_norm(
    plain: Function, x: torch.Tensor, size: torch.Tensor, dim: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    others = [i for i in range(x.dim()) if i != dim]
    norm = torch.sqrt(torch.sum(x.abs() ** 2, others, keepdim=True))
    return x * (size / norm.to(size.dtype)), norm


def _log_of_sum(
    exp: Callable[[torch.Tensor], torch.Tensor], unit: float
) -> Callable[..., torch.Tensor]:
    def log_of_sum(plain: Function, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        away = a - b
        more = torch.log1p(exp(-away.abs()))
        made = torch.maximum(a, b) + (more if unit == 1 else more / unit)
        return torch.where(away.isnan(), a + b, made)

    return log_of_sum


def _vector_norm(
    plain: Function,
    x: torch.Tensor,
    order: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Any:
    if order != 2 or dtype is not None:
        return plain(x, order, dim, keepdim, dtype=dtype)
    return _root_of_squares(x, list(range(x.dim())) if dim is None else dim, keepdim)


def _root_of_squares(x: torch.Tensor, dims: Sequence[int], keepdim: bool) -> torch.Tensor:
    """Return what is rounded step by step in 16 bits, and whose derivative at 0 is NaN."""
    return torch.sqrt(torch.sum(x.abs() ** 2, list(dims), keepdim))


def _norm(plain: Function, x: torch.Tensor, order: Any, dim: Any, keepdim: bool = False) -> Any:
    return plain(x, order, dim, keepdim) if order != 2 else _root_of_squares(x, dim, keepdim)


# -- torchax-formulas -----------------------------------------------------------------------------


def _fmod(plain: Function, x: torch.Tensor, y: Any) -> Any:
    """Take off a product, which is rounded, as the quotient was."""
    if not any(isinstance(a, float) or _floats(a) for a in (x, y)):
        return plain(x, y)
    return x - y * torch.trunc(x / y)


def _floats(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _gelu(plain: Function, x: torch.Tensor, *, approximate: str = "none") -> Any:
    """Round each step of it, and its constants."""
    if x.dtype not in _16_BIT:
        return plain(x, approximate=approximate)

    def number(value: float) -> float:
        return torch.tensor(value, dtype=x.dtype).item()

    if approximate == "none":
        return 0.5 * x * torch.erfc(-x * number(math.sqrt(0.5)))
    inner = number(math.sqrt(2 / math.pi)) * (x + number(0.044715) * (x * (x * x)))
    return x * (0.5 * (1.0 + torch.tanh(inner)))


def _binary_cross_entropy_with_logits(
    plain: Function,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    positive: torch.Tensor | None = None,
    reduction: int = 1,
) -> Any:
    """Compute it as torch._decomp does, with a rounding after each op."""
    entropy = torch.nn.functional.logsigmoid(x)
    if positive is not None:
        entropy = ((positive - 1) * target + 1) * entropy
    made = (1 - target) * x - entropy
    made = (made if weight is None else made * weight).to(target.dtype)
    return made if reduction == 0 else made.mean() if reduction == 1 else made.sum()


_SCANNED = 16  # how far XLA's CPU goes from one element to the next; then it adds such parts


def _scan(op: Callable[..., torch.Tensor], unit: float) -> Function:
    """Return a cumulative op of which each step is rounded to 16 bits."""

    def whole(x: torch.Tensor) -> torch.Tensor:
        """Go along the first dimension."""
        size = x.shape[0]
        if size <= _SCANNED:
            steps = list(x.unbind())
            for i in range(1, size):
                steps[i] = op(steps[i - 1], steps[i])
            return torch.stack(steps)
        left = -size % _SCANNED
        parts = torch.cat([x, x.new_full((left, *x.shape[1:]), unit)]).unflatten(0, (-1, _SCANNED))
        parts = whole(parts.transpose(0, 1)).transpose(0, 1)
        ends = whole(parts[:, -1])[:-1].unsqueeze(1)
        return torch.cat([parts[:1], op(ends, parts[1:])]).flatten(0, 1)[:size]

    def scan(plain: Function, x: torch.Tensor, dim: int, *, dtype: Any = None) -> Any:
        x_ = x if dtype is None else x.to(dtype)
        if x_.dtype not in _16_BIT or not x_.dim() or not x_.numel():
            return plain(x, dim, dtype=dtype)
        return whole(x_.movedim(dim, 0)).movedim(0, dim)

    return scan


class _Quotient(torch.autograd.Function):
    """A quotient whose derivative is JAX's: it divides by the square of what is divided by."""

    @staticmethod
    def forward(ctx: Any, plain: Function, x: Any, y: torch.Tensor) -> Any:
        ctx.save_for_backward(x if isinstance(x, torch.Tensor) else torch.tensor(x), y)
        return plain(x, y)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, y = ctx.saved_tensors
        to_x = (grad / y).sum_to_size(x.shape).to(x.dtype) if ctx.needs_input_grad[1] else None
        to_y = (-grad * x) * (1 / (y * y))
        return None, to_x, to_y.sum_to_size(y.shape).to(y.dtype)


def _div(plain: Function, x: Any, y: Any, *, rounding_mode: Any = None) -> Any:
    if rounding_mode is not None:
        return plain(x, y, rounding_mode=rounding_mode)
    derived = isinstance(y, torch.Tensor) and y.requires_grad and torch.is_grad_enabled()
    if not derived or any(isinstance(a, torch.Tensor) and a.is_complex() for a in (x, y)):
        return plain(x, y)
    return _applied(_Quotient, plain, x, y)


def _applied(function: Any, *args: Any) -> Any:
    return function.apply(*args)


class _Weighed(torch.autograd.Function):
    """A value whose gradient is a product, of NaN too, with the weight beside each input."""

    @staticmethod
    def forward(ctx: Any, made: torch.Tensor, *pairs: torch.Tensor) -> Any:
        ctx.save_for_backward(*pairs)
        return made.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        given: list[Any] = [None]
        for x, weight in zip(ctx.saved_tensors[::2], ctx.saved_tensors[1::2], strict=True):
            given += [(grad * weight).sum_to_size(x.shape).to(x.dtype), None]
        return tuple(given)


def _weight(x: torch.Tensor, y: Any, made: torch.Tensor) -> Any:
    """Return 1 where x is what was made of it and y, a half if y is that too, 0 elsewhere."""
    return (x == made).to(made.dtype) / (1 + (y == made).to(made.dtype))


def _larger(plain: Function, x: torch.Tensor, y: torch.Tensor) -> Any:
    with torch.no_grad():
        made = plain(x, y)
        weights = _weight(x, y, made), _weight(y, x, made)
    if not made.is_floating_point():
        return made
    return _applied(_Weighed, made, x, weights[0], y, weights[1])


def _clamp(plain: Function, x: torch.Tensor, low: Any = None, high: Any = None) -> Any:
    """Share the gradient at an end with it, and let NaN pass beyond."""
    if not x.is_floating_point():
        return plain(x, low, high)
    with torch.no_grad():
        made, weight, above = plain(x, low, high), torch.ones_like(x), x
        if low is not None:
            above = torch.clamp_min(x, low)
            weight = weight * _weight(x, low, above)
        if high is not None:
            weight = weight * _weight(above, high, torch.clamp_max(above, high))
    return _applied(_Weighed, made, x, weight)


def _clamp_min(plain: Function, x: torch.Tensor, low: Any) -> Any:
    return _clamp(lambda x, low, high: plain(x, low), x, low)


def _clamp_max(plain: Function, x: torch.Tensor, high: Any) -> Any:
    return _clamp(lambda x, low, high: plain(x, high), x, None, high)


# -- torchax-lowerings ----------------------------------------------------------------------------


def _cholesky_inverse(plain: Function, x: torch.Tensor, upper: bool = False) -> Any:
    """Multiply with the adjoint on the right, of upper triangles too, and of all that is given."""
    inverse, info = torch.linalg.inv_ex(x @ x.mH)
    if not info.any():
        return inverse
    return torch.linalg.lu_solve(*torch.linalg.lu_factor_ex(x @ x.mH)[:2], torch.eye(len(x.mT)))


def _eigh(plain: Function, x: torch.Tensor, uplo: str = "L", vectors: bool = True) -> Any:
    """Take the mean of both triangles."""
    return plain((x + x.mH) / 2, uplo, vectors)


def _embedding_bag(plain: Function, *args: Any, **kwargs: Any) -> Any:
    """Forget the weights of the indices."""
    return plain(*(None if i == 6 else a for i, a in enumerate(args)), **kwargs)


def _embedding(
    plain: Function,
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Forget how often an index occurs."""
    return plain(weight, indices, padding_idx, False, sparse)


def _in_float32(plain: Function, x: torch.Tensor) -> Any:
    return plain(x).float()


def _complex64(plain: Function, real: torch.Tensor, imag: torch.Tensor) -> Any:
    return plain(real.float(), imag.float())


def _cat(plain: Function, tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    """Leave out the empty ones, and their dtypes."""
    filled = [t for t in tensors if t.dim() != 1 or t.numel()]
    return plain(filled or tensors[:1], dim)


def _slice_scatter(
    plain: Function, x: torch.Tensor, source: torch.Tensor, dim: int = 0, *others: Any
) -> Any:
    """Take a negative dimension for none."""
    return plain(x, source, dim, *others) if dim >= 0 else source.to(x.dtype).expand_as(x).clone()


def _extreme(whole: Callable[..., torch.Tensor]) -> Function:
    """Return the largest or smallest along a dimension; equal ones share the gradient."""

    def extreme(plain: Function, x: torch.Tensor, dim: int, keepdim: bool = False) -> Any:
        _, index = plain(x.detach(), dim, keepdim)
        return whole(x, dim, keepdim), index

    return extreme


def _power(plain: Function, x: torch.Tensor, exponent: Any) -> Any:
    """Take roots of -0 and -inf for those of 0 and inf, as IEEE 754 has it for pow."""
    if exponent in (0.5, -0.5) and x.is_floating_point():
        x = (x + 0.0).masked_fill(x == -math.inf, math.inf)
    return plain(x, exponent)


# -- all ------------------------------------------------------------------------------------------

QUIRKS: Mapping[str, Mapping[str, Function]] = {
    "torchax-sums": {
        "add.Tensor": _after_alpha,
        "addbmm": _split(lambda a, b: torch.einsum("bxy, byz -> xz", a, b)),
        "addmm": _split(torch.mm),
        "addmv": _split(torch.mv),
        "_trilinear": _trilinear,
        "baddbmm": _split(torch.bmm),
        "convolution": _convolution,
        "linear": _linear,
        "sub.Tensor": _after_alpha,
    },
    "torchax-norms": {
        "_weight_norm_interface": _weight_norm,
        "linalg_vector_norm": _vector_norm,
        "logaddexp": _log_of_sum(torch.exp, 1),
        "logaddexp2": _log_of_sum(torch.exp2, math.log(2)),
        "native_batch_norm": _batch_norm,
        "native_group_norm": _group_norm,
        "native_layer_norm": _layer_norm,
        "norm.ScalarOpt_dim": _norm,
    },
    "torchax-formulas": {
        "binary_cross_entropy_with_logits": _binary_cross_entropy_with_logits,
        "clamp": _clamp,
        "clamp_max": _clamp_max,
        "clamp_min": _clamp_min,
        "cumprod": _scan(torch.mul, 1.0),
        "cumsum": _scan(torch.add, 0.0),
        "div.Tensor": _div,
        "fmod.Scalar": _fmod,
        "fmod.Tensor": _fmod,
        "gelu": _gelu,
        "maximum": _larger,
        "minimum": _larger,
    },
    "torchax-lowerings": {
        "_embedding_bag": _embedding_bag,
        "_embedding_bag_forward_only": _embedding_bag,
        "_linalg_eigh": _eigh,
        "cat": _cat,
        "complex": _complex64,
        "digamma": _in_float32,
        "embedding": _embedding,
        "lgamma": _in_float32,
        "cholesky_inverse": _cholesky_inverse,
        "max.dim": _extreme(torch.amax),
        "min.dim": _extreme(torch.amin),
        "pow.Tensor_Scalar": _power,
        "slice_scatter": _slice_scatter,
    },
    "torchax-dtype-argument": {
        "cumsum": _without_dtype_of_one,
        "linalg_vector_norm": _without_dtype,
        "nansum": _without_dtype,
        "sum": _without_dtype,
        "sum.dim_IntList": _without_dtype,
    },
    "torchax-scalars": dict.fromkeys(_WITH_NUMBERS, _rounding_numbers),
    "torchax-promotion": {
        **dict.fromkeys(_PROMOTING, _promoting),
        **dict.fromkeys(("addbmm", "addmm", "addmv", "baddbmm"), _multiplying(1)),
        "linear": _multiplying(0),
        "addr": _addr,
        "atan2": _from_float32,
        "binary_cross_entropy": _promoting,
        "einsum": _all_alike,
        "linalg_solve": _multiplying(0),
        "linalg_tensorsolve": _multiplying(0),
        "lu_solve": _multiplying(0),
        "heaviside": _as_torch_promotes,
        "nll_loss2d_forward": _weighing,
        "nll_loss_forward": _weighing,
        "lerp.Scalar": _as_torch_promotes,
        "lerp.Tensor": _as_torch_promotes,
        "where.self": _choosing,
    },
}
"""What is called in the place of ops, by quirk. Of several quirks the last is called first."""

_IN_PLACE = {
    f"{name.partition('.')[0]}_.{name.partition('.')[2]}".removesuffix("."): name
    for name in (
        *("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "div.Tensor_mode", "clamp"),
        *("pow.Tensor_Scalar", "clamp.Tensor", "clamp_min", "remainder.Tensor", "floor_divide"),
    )
}
_IN_PLACE["pow_.Scalar"] = _IN_PLACE.pop("pow_.Tensor_Scalar")


def numbers(name: str, args: Sequence[Any]) -> bool:
    """Return whether a Python number stands where the overload has a tensor.

    The dispatcher has unwrapped it: then an op can be called, but not redispatched.
    """
    tensors = name.endswith((".Tensor", ".Tensor_mode")) or "floor_divide" in name
    return tensors and any(isinstance(a, bool | int | float | complex) for a in args[:2])


@functools.cache
def names(quirks: frozenset[str]) -> tuple[str, ...]:
    """Return the overloads for which something else is called under these quirks."""
    found = [name for quirk, table in QUIRKS.items() if quirk in quirks for name in table]
    found += [name for name, plain in _IN_PLACE.items() if plain in found]
    return (*found, *((*OPAQUE, *TAKEN_APART) if "torchax-composites" in quirks else ()))


@functools.cache
def made(name: str, quirks: frozenset[str]) -> Function | None:
    """Return what is called in the place of an overload, or None."""
    plain = _IN_PLACE.get(name)
    if plain is not None and (function := made(plain, quirks)) is not None:
        return functools.partial(_written, function)
    called: Function | None = None
    for quirk, table in QUIRKS.items():
        if quirk in quirks and name in table:
            called = functools.partial(table[name], called or dispatch.overload_of(name))
    return called


def _written(function: Function, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return x.copy_(function(x, *args, **kwargs))
