"""What torchax makes of single ops, written again from what it does, for `quirks`.

Autograd and shadows follow these, so that their own roundings and their own gradients are theirs.
They stand where autocast does, above autograd, with autocast or without.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from amp_fuzz.backends.imitations.xla import note
from amp_fuzz.reference import dispatch

__all__ = [
    "CUTS",
    "OPAQUE",
    "QUIRKS",
    "TAKEN_APART",
    "Cutting",
    "Unlisted",
    "differentiated",
    "inside",
    "is_opaque",
    "is_product",
    "made",
    "names",
    "numbers",
    "torchs_derivatives",
]

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
"""What torchax 0.0.13 computes where it is called, as torch functions (torchax/ops/jtorch.py)."""

_inside: ContextVar[bool] = ContextVar("inside", default=False)


@contextmanager
def inside() -> Iterator[None]:
    """Take what is called in a block for what another torch function calls.

    torchax sees a function where it is called first; the mode by which it does is off in it.
    """
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


def is_opaque(name: str) -> bool:
    """Return whether torchax computes an overload as a torch function, called from here."""
    return name in OPAQUE and not _inside.get()


Function = Callable[..., Any]
"""What is called in the place of an op, with what it would call as its first argument."""

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
"""The functions that torchax 0.0.13 computes in JAX where they are called, above autograd.

All of torchax/ops/jtorch.py, which takes more than sizes, and methods of its class of tensors.
"""


_aten = torch.ops.aten
CUT_OVERLOADS = (
    *(_aten.convolution, _aten.max_unpool2d, _aten.max_unpool3d, _aten.native_layer_norm),
    _aten._native_batch_norm_legit_functional,
)
"""Overloads of ATen of which the same is true where a program calls them by that name."""


class Cutting(TorchFunctionMode):
    """Cut the graph where torchax does: at functions that it computes above torch's autograd.

    A function that another one calls is none of them: the mode by which it sees them is off there.
    cast: says to which dtype autocast casts the arguments of an overload, by name, or None: what a
    program calls by that name is cast by `torch.Tensor.to`, above autograd, unless it is composite.
    """

    def __init__(self, cast: Callable[[str], torch.dtype | None]) -> None:
        super().__init__()
        self.cast = cast

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if isinstance(func, torch._ops.OpOverload) and not dispatch.is_composite(func):
            name = func.name().removeprefix("aten::").removesuffix(".default")
            args, kwargs = _given(self.cast(name), (args, kwargs))
        kwargs = kwargs or {}
        cuts = func in CUTS or getattr(func, "overloadpacket", func) in CUT_OVERLOADS
        if cuts or _is_bicubic(func, kwargs):
            with torch.no_grad():  # nor does a checkpoint see what these would keep for a gradient
                made = func(*args, **kwargs)
            return _detached(made)
        made = func(*args, **kwargs)
        if func is torch.Tensor.to:
            return made if made.dtype is args[0].dtype else made.detach()
        return made


class Unlisted(TorchFunctionMode):
    """Call what is named without an overload, ``torch.ops.aten.max_unpool2d``, without its policy.

    torchax's list has overloads; a composite op comes to it in parts, as overloads. off: returns a
    context without autocast.
    """

    def __init__(self, off: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.off = off

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = isinstance(func, torch._ops.OpOverloadPacket) and "default" in func.overloads()
        with self.off() if named and not dispatch.is_composite(func.default) else nullcontext():
            return func(*args, **(kwargs or {}))


def _is_bicubic(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether that is the one interpolation that is computed so."""
    named = func is torch.nn.functional.interpolate and kwargs.get("mode") == "bicubic"
    return named and not kwargs.get("antialias") and kwargs.get("size") is not None


def _given(to: torch.dtype | None, given: Any) -> Any:
    """Detach what is not of a dtype yet, and would be cast to it."""

    def one(x: Any) -> Any:
        casts = isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype is not to
        return x.detach() if casts else x

    return given if to is None else tree_map(one, given)


def _detached(made: Any) -> Any:
    return tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, made)


_torchs: ContextVar[bool] = ContextVar("torchs", default=False)


@contextmanager
def torchs_derivatives() -> Iterator[None]:
    """Give what is imitated in a block the derivatives of torch's own formulas, not of JAX's."""
    token = _torchs.set(True)
    try:
        yield
    finally:
        _torchs.reset(token)


class _As(torch.autograd.Function):
    """A value that has the history of another one."""

    @staticmethod
    def forward(ctx: Any, history: torch.Tensor, made: torch.Tensor) -> Any:
        ctx.dtype = history.dtype
        return made.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.to(ctx.dtype), None


def _by_formula(function: Function, plain: Function, *args: Any, **kwargs: Any) -> Any:
    """Compute what an imitation does, and differentiate what torch does.

    Where torch's kernel refuses what is given, the imitation is differentiated.
    """
    given = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    if not (torch.is_grad_enabled() and any(a.requires_grad for a in given)):
        return function(plain, *args, **kwargs)
    try:
        history = plain(*args, **kwargs)
    except RuntimeError:
        return function(plain, *args, **kwargs)
    with torch.no_grad():
        made = function(plain, *args, **kwargs)

    def joined(old: Any, new: Any) -> Any:
        derived = isinstance(old, torch.Tensor) and old.requires_grad and _inexact(new)
        return _applied(_As, old, new) if derived else new

    if isinstance(history, torch.Tensor):
        return joined(history, made)
    return tuple(joined(old, new) for old, new in zip(history, made, strict=True))


class _Product(torch.autograd.Function):
    """A product whose gradients are products with what was given, not with its casts.

    JAX promotes the two factors of each; autocast around the backward pass casts them.
    """

    @staticmethod
    def forward(ctx: Any, made: torch.Tensor, x: Any, a: Any, b: Any, beta: Any, alpha: Any) -> Any:
        # In torch's order, and no more than it keeps: a checkpoint tells tensors by their number.
        kept = [(b, ctx.needs_input_grad[2]), (a, ctx.needs_input_grad[3])]
        kept = kept if x is None else kept[::-1]
        ctx.save_for_backward(*(factor for factor, needed in kept if needed))
        ctx.x, ctx.beta, ctx.alpha = x, beta, alpha
        ctx.shape, ctx.dtypes = (*a.shape[:-1], b.shape[-1]), (a.dtype, b.dtype)
        return made.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _, to_x, to_a, to_b, *_ = ctx.needs_input_grad
        saved = list(ctx.saved_tensors)
        saved = saved if ctx.x is None else saved[::-1]
        part = grad * ctx.alpha if ctx.alpha != 1 else grad
        part = part.expand(ctx.shape)
        product = torch.mm if len(ctx.shape) == 2 else torch.bmm
        x = (grad * ctx.beta).sum_to_size(ctx.x.shape).to(ctx.x.dtype) if to_x else None
        first = product(*_alike([part, saved.pop(0).mH])).to(ctx.dtypes[0]) if to_a else None
        second = product(*_alike([saved.pop(0).mH, part])).to(ctx.dtypes[1]) if to_b else None
        return None, x, first, second, None, None


_PRODUCTS = ("mm", "bmm")
_ADDED_PRODUCTS = ("addmm", "addbmm", "baddbmm")


def is_product(name: str, args: Sequence[Any]) -> bool:
    """Return whether a call is a product, or a sum with one, that has gradients."""
    derived = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    return name in (*_PRODUCTS, *_ADDED_PRODUCTS) and derived and torch.is_grad_enabled()


def differentiated(name: str, made: torch.Tensor, args: Sequence[Any], kwargs: Any) -> Any:
    """Return what autocast made of a product with the gradients that it has below autograd.

    There autocast has cast nothing yet: they are made of what was given.
    """
    x, a, b = args[:3] if name in _ADDED_PRODUCTS else (None, *args[:2])
    if any(factor.dtype is not made.dtype for factor in (a, b)):
        note([name])
    factors = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    return _applied(_Product, made, x, a, b, *factors)


_16_BIT = (torch.bfloat16, torch.float16)


def _added(x: torch.Tensor, product: torch.Tensor, beta: Any, alpha: Any) -> torch.Tensor:
    """Add a product to what it is to be added to, which a beta of 0 leaves out."""
    product = alpha * product
    return product if beta == 0 else beta * x + product


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
    made = _added(x, torch.bmm(a, b), beta, alpha)
    with torch.no_grad():
        return out.resize_(made.shape).copy_(made)


def _matmul(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Make of a vector and several matrices one matrix and a vector, whatever the strides are.

    torch folds in this way what is contiguous, and its C++ takes a torchax tensor for that.
    """
    vector, many = (x, y.mT) if x.dim() == 1 else (y, x)
    if vector.dim() != 1 or many.dim() < 3:
        return NotImplemented
    return torch.mv(many.reshape(-1, many.shape[-1]), vector).reshape(many.shape[:-1])


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Compute it in the steps of torchax/ops/jtorch.py, of which the products have policies."""
    if dropout:
        return NotImplemented
    size = query.shape[-2], key.shape[-2]
    bias = query.new_zeros(size)
    if causal:
        later = bias.new_ones(size, dtype=torch.bool).triu(1)
        bias = bias.masked_fill(later, -torch.inf)
    if mask is not None and mask.dtype is torch.bool:
        bias = bias.masked_fill(mask.logical_not(), -torch.inf)
    elif mask is not None:
        bias = (bias + mask).to(bias.dtype)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    weight = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    return torch.softmax((weight + bias).to(weight.dtype), -1) @ value


def _in_cpp(name: str) -> Callable[..., Any]:
    """Return what calls an op, whose C++ calls others that are no torch functions there."""

    def called(*args: Any, **kwargs: Any) -> Any:
        overload = dispatch.overload_of(name)
        if overload is None or _inside.get():
            return NotImplemented
        with inside():
            return overload(*args, **kwargs)

    return called


_CELLS = ("gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell")

TAKEN_APART: Mapping[str, Callable[..., Any]] = {
    "baddbmm.out": _baddbmm_out,
    "matmul": _matmul,
    "scaled_dot_product_attention": _attention,
    **{name: _in_cpp(name) for name in _CELLS},
}
"""Ops without a policy that torchax makes of others, which have theirs.

NotImplemented: not of these arguments.
"""


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
    plain: Function,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignored: int,
) -> Any:
    """Give the input and the weights of classes one dtype; what divides a mean has the weights'."""
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
    """Compute it as torch._refs does: in float32 where torch promotes to 16 bits."""
    dtype = torch.result_type(x, torch.empty(1, dtype=torch.promote_types(a.dtype, b.dtype)))
    x, a, b = (t.to(torch.float32 if dtype in _16_BIT else dtype) for t in (x, a, b))
    return _added(x, torch.outer(a, b), beta, alpha).to(dtype)


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


def _softmax(plain: Function, x: torch.Tensor, dim: int, half_to_float: bool = False) -> Any:
    """Take integers for numbers of the width that JAX gives them; torch has no such kernel."""
    if not _inexact(x) and x.dtype is not torch.bool:
        x = x.to(torch.float64 if x.dtype is torch.int64 else torch.float32)
    return plain(x, dim, half_to_float)


def _remainder(plain: Function, x: torch.Tensor, y: Any) -> Any:
    """Take integers for float64 beside a number that is none, whatever the default dtype is."""
    return plain(x.double() if isinstance(y, float) and not _inexact(x) else x, y)


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


def _cumprod_of_one(plain: Function, x: torch.Tensor, dim: int, *, dtype: Any = None) -> Any:
    """Return a tensor of no dimension as it is, but in the dtype that is asked for."""
    return plain(x, dim, dtype=dtype) if x.dim() or dtype is not None else x


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


def _batch_norm_functional(
    plain: Function,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    variance: torch.Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Compute it as torch._decomp does off the CPU, with statistics in float32 of 16 bits."""
    each = (1, -1, *[1] * (x.dim() - 2))
    wide = x.float() if x.dtype in _16_BIT else x
    if training:
        dims = [0, *range(2, x.dim())]
        spread, own = torch.var_mean(wide, dims, correction=0, keepdim=True)
        rstd = torch.rsqrt(spread + eps)
        made = (x - own) * rstd
        saved = own.flatten(), rstd.flatten()
        count = x.numel() / x.shape[1]
        unbiased = spread.flatten() * (count / (count - 1))
        statistics = (
            momentum * saved[0] + (1 - momentum) * mean,
            momentum * unbiased + (1 - momentum) * variance,
        )
    else:
        statistics = mean.to(wide.dtype), variance.to(wide.dtype)
        saved = statistics[0], 1 / torch.sqrt(statistics[1] + eps)
        made = (x - saved[0].reshape(each)) * saved[1].reshape(each)
    made = made if weight is None else made * weight.reshape(each)
    made = made if bias is None else made + bias.reshape(each)
    return made.to(x.dtype), *saved, *statistics


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
    return _reduced((made if weight is None else made * weight).to(target.dtype), reduction)


def _binary_cross_entropy(
    plain: Function,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
) -> Any:
    """Compute it as torch._decomp does, in float32 of 16 bits; its derivative at 0 and 1 is NaN."""
    dtype = x.dtype
    x, target = _widened(x), _widened(target)
    least = x.new_full((), -100)
    made = (target - 1) * _larger(torch.maximum, torch.log1p(-x), least)
    made = made - target * _larger(torch.maximum, torch.log(x), least)
    return _reduced(made if weight is None else made * _widened(weight), reduction).to(dtype)


def _mse_loss(plain: Function, x: torch.Tensor, target: torch.Tensor, reduction: int = 1) -> Any:
    """Square as torch._decomp does: twice the difference is taken before it is divided."""
    if not _floats(x) or not _floats(target):
        return plain(x, target, reduction)
    return _reduced((_widened(x) - _widened(target)) ** 2, reduction).to(x.dtype)


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in _16_BIT else x


def _reduced(x: torch.Tensor, reduction: int) -> torch.Tensor:
    return x if reduction == 0 else x.mean() if reduction == 1 else x.sum()


def _log_softmax(plain: Function, x: torch.Tensor, dim: int, half_to_float: bool = False) -> Any:
    """Round each step of it, as `jax.nn.log_softmax` does, and of its derivative."""
    if x.dtype not in _16_BIT or not x.dim() or not x.numel():
        return plain(x, dim, half_to_float)
    shifted = x - x.detach().amax(dim, keepdim=True)
    return shifted - torch.log(torch.sum(torch.exp(shifted), dim, keepdim=True))


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
        saved = ctx.saved_tensors  # which a checkpoint makes once
        for x, weight in zip(saved[::2], saved[1::2], strict=True):
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


def _clamp_by_tensors(plain: Function, x: torch.Tensor, low: Any = None, high: Any = None) -> Any:
    made = x if low is None else _larger(torch.maximum, x, low)
    return made if high is None else _larger(torch.minimum, made, high)


def _clamp_min(plain: Function, x: torch.Tensor, low: Any) -> Any:
    return _clamp(lambda x, low, high: plain(x, low), x, low)


def _clamp_max(plain: Function, x: torch.Tensor, high: Any) -> Any:
    return _clamp(lambda x, low, high: plain(x, high), x, None, high)


class _Logistic(torch.autograd.Function):
    """A sigmoid of 16 bits, of which each step is rounded, and 0 where exp(-x) is infinite."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        made = 1 / (1 + torch.exp(-x))
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (made,) = ctx.saved_tensors
        return grad * (made * (1 - made))


def _sigmoid(plain: Function, x: torch.Tensor) -> Any:
    return _applied(_Logistic, x) if x.dtype in _16_BIT else plain(x)


def _exp2(plain: Function, x: torch.Tensor) -> Any:
    """Round the product with the logarithm of 2, and that."""
    if x.dtype not in _16_BIT:
        return plain(x)
    return torch.exp(x * torch.tensor(math.log(2), dtype=x.dtype).item())


class _Angle(torch.autograd.Function):
    """An atan2 whose derivative is JAX's: a quotient that is NaN at 0 and 0."""

    @staticmethod
    def forward(ctx: Any, plain: Function, y: torch.Tensor, x: torch.Tensor) -> Any:
        ctx.save_for_backward(y, x)
        return plain(y, x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        y, x = ctx.saved_tensors
        squares = x * x + y * y
        to_y, to_x = grad * (x / squares), grad * (-y / squares)
        return None, to_y.sum_to_size(y.shape).to(y.dtype), to_x.sum_to_size(x.shape).to(x.dtype)


def _atan2(plain: Function, y: torch.Tensor, x: torch.Tensor) -> Any:
    return _applied(_Angle, plain, y, x) if _floats(y) and _floats(x) else plain(y, x)


class _Cholesky(torch.autograd.Function):
    """A factor whose derivative is JAX's, which is not made symmetric."""

    @staticmethod
    def forward(ctx: Any, plain: Function, x: torch.Tensor, upper: bool) -> Any:
        factor, info = plain(x, upper=upper)
        ctx.upper = upper
        ctx.save_for_backward(factor.mH if upper else factor)
        ctx.mark_non_differentiable(info)
        return factor, info

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        (factor,) = ctx.saved_tensors
        inner = (factor.mH @ (grad.mH if ctx.upper else grad)).tril()
        inner = inner - torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1)) / 2
        left = torch.linalg.solve_triangular(factor.mH, inner, upper=True)
        made = torch.linalg.solve_triangular(factor, left, upper=False, left=False)
        return None, made.mH if ctx.upper else made, None


def _cholesky(
    plain: Function, x: torch.Tensor, *, upper: bool = False, check_errors: bool = False
) -> Any:
    if check_errors:
        return plain(x, upper=upper, check_errors=True)
    return _applied(_Cholesky, plain, x, upper)


def _whole(extreme: Callable[..., torch.Tensor]) -> Function:
    """Return the largest or smallest of all, whose gradient at NaN is NaN everywhere."""

    def whole(plain: Function, x: torch.Tensor) -> Any:
        return extreme(x) if _floats(x) and x.numel() else plain(x)

    return whole


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


def _cdist(plain: Function, x: torch.Tensor, y: torch.Tensor, p: float = 2.0, *more: Any) -> Any:
    """Take the root of a sum of powers where the order is infinite, too: 1, of any finite ones."""
    if p != math.inf:
        return plain(x, y, p, *more)
    apart = (x.float().unsqueeze(-2) - y.float().unsqueeze(-3)).abs()
    return apart.pow(p).sum(-1) ** (1 / p)


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
        "_native_batch_norm_legit_functional": _batch_norm_functional,
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
        "_log_softmax": _log_softmax,
        "atan2": _atan2,
        "binary_cross_entropy": _binary_cross_entropy,
        "binary_cross_entropy_with_logits": _binary_cross_entropy_with_logits,
        "clamp": _clamp,
        "clamp.Tensor": _clamp_by_tensors,
        "clamp_max": _clamp_max,
        "clamp_min": _clamp_min,
        "cumprod": _scan(torch.mul, 1.0),
        "cumsum": _scan(torch.add, 0.0),
        "div.Tensor": _div,
        "exp2": _exp2,
        "fmod.Scalar": _fmod,
        "fmod.Tensor": _fmod,
        "gelu": _gelu,
        "linalg_cholesky_ex": _cholesky,
        "max": _whole(torch.amax),
        "maximum": _larger,
        "min": _whole(torch.amin),
        "minimum": _larger,
        "mse_loss": _mse_loss,
        "sigmoid": _sigmoid,
    },
    "torchax-lowerings": {
        "_embedding_bag": _embedding_bag,
        "_embedding_bag_forward_only": _embedding_bag,
        "_linalg_eigh": _eigh,
        "cat": _cat,
        "cdist": _cdist,
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
        "cumprod": _cumprod_of_one,
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
        "_log_softmax": _softmax,
        "_softmax": _softmax,
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
        "remainder.Scalar": _remainder,
        "where.self": _choosing,
    },
}
"""What is called in the place of ops, by quirk. Of several quirks the last is called first."""

_IN_PLACE = {
    f"{name.partition('.')[0]}_.{name.partition('.')[2]}".removesuffix("."): name
    for name in (
        *("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "div.Tensor_mode", "clamp"),
        *("pow.Tensor_Scalar", "clamp.Tensor", "clamp_min", "remainder.Tensor", "floor_divide"),
        *("exp2", "sigmoid"),
    )
}
_IN_PLACE["pow_.Scalar"] = _IN_PLACE.pop("pow_.Tensor_Scalar")


# This overload takes no number in a tensor's place, and is called for one in place.
_TAKING: Mapping[str, Function] = {"remainder.Tensor": torch.remainder}


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
            plainly = _TAKING.get(name) or dispatch.overload_of(name)
            function = table[name]
            if quirk in _DERIVED:
                derived = _derived_in_steps if name in _WITH_STATISTICS else _derived
                own = name in _OWN_DERIVATIVES
                function = function if own else functools.partial(derived, function)
            called = functools.partial(function, called or plainly)
    return called


# Quirks whose functions have the derivatives of JAX.
_DERIVED = ("torchax-formulas", "torchax-lowerings", "torchax-norms")


# torch's formulas call what is wrong, or take what it made.
_OWN_DERIVATIVES = ("_linalg_eigh", "cat", "cholesky_inverse", "complex", "slice_scatter")

# Their formulas take the statistics, which were rounded step by step.
_WITH_STATISTICS = ("native_batch_norm", "native_group_norm", "native_layer_norm")


def _derived_in_steps(function: Function, plain: Function, *args: Any, **kwargs: Any) -> Any:
    made = function(plain, *args, **kwargs)
    return (made[0], *_detached(made[1:])) if _torchs.get() else made


def _derived(function: Function, plain: Function, *args: Any, **kwargs: Any) -> Any:
    if _torchs.get():
        return _by_formula(function, plain, *args, **kwargs)
    return function(plain, *args, **kwargs)


def _written(function: Function, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return x.copy_(function(x, *args, **kwargs))
