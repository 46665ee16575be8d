"""Ops that a compiler computes otherwise than eager's kernels: imitated for `quirks`.

Each function here is what a decomposition or a lowering of torch makes of one op, written again
from what it does, so that shadows follow its own roundings and its own mistakes. A divergence is
explained if it is what that comes to; another wrong value of the same op is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from amp_fuzz.backends.imitated import active_quirks
from amp_fuzz.backends.imitations import interpolation, xla
from amp_fuzz.backends.imitations.written_casts import Elided
from amp_fuzz.reference import dispatch
from amp_fuzz.reference.custom_ops import in_body
from amp_fuzz.reference.shadow.run import either, forget

__all__ = ["QUIRKS", "lowered"]

_aten = torch.ops.aten
_16_BIT = (torch.bfloat16, torch.float16)
# Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: off by up to 1.5e-7.
_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def lowered() -> AbstractContextManager[Any]:
    """Return a context for a whole run, backward passes too, that imitates the active quirks."""
    every = (*_LOWERINGS.items(), *_OTHERS.items())
    active = {op: how for op, how in every if how.quirk in active_quirks()}
    if "xla-excess-precision" in active_quirks():
        return _both(_Lowered(active), xla.Excess())
    if "compile-written-casts" in active_quirks():
        return _both(_Lowered(active), Elided(either))
    return _Lowered(active) if active else nullcontext()


@contextmanager
def _both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[Any]:
    with first, second:
        yield


class _Lowering(NamedTuple):
    """What an op is made into. function: returns None where the op is left as it is."""

    quirk: str
    function: Callable[..., Any]

    def applies(self) -> bool:
        """Return whether what is compiled is where the op is called."""
        return not (in_body() and self.quirk.startswith(("compile-", "export-")))


class _Lowered(TorchDispatchMode):
    def __init__(self, active: Mapping[Any, _Lowering]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.active = active

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (lowering := self.active.get(func)) is not None and lowering.applies():
            with dispatch.exclude():
                made = lowering.function(*args, **kwargs)
            if made is not None:
                return made
        with dispatch.kept():
            if func in _COMPOSITE:  # inference_mode brings these here whole
                with self:
                    return func.decompose(*args, **kwargs)
            return func(*args, **kwargs)


def _any(overload: Any) -> Callable[..., Any]:
    def truth(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """Return a bool where eager returns uint8."""
        if x.dtype != torch.uint8:
            return None
        found: torch.Tensor = overload(x, *args, **kwargs)
        return found.bool()

    return truth


def _erf(x: torch.Tensor) -> torch.Tensor | None:
    """Return erf by the polynomial of the vectorised kernel, which cancels near 0."""
    if x.dtype not in (torch.float32, *_16_BIT):
        return None
    wide = x.float().clamp(-6.0, 6.0)  # where float32 has reached 1; nothing leaves the range
    t = 1.0 / (wide.abs() * 0.3275911 + 1.0)
    total = torch.zeros_like(t)
    for factor in _ERF:
        total = (total + factor) * t
    made = torch.copysign(1.0 - total * torch.exp(-wide * wide), wide)
    return either(made, torch.erf(wide)).to(x.dtype)


def _half_erf(x: torch.Tensor) -> torch.Tensor | None:
    """Return the normal distribution function by that polynomial, as gelu is made of it."""
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
    wide = x.float()
    density = torch.exp(wide * wide * -0.5) / math.sqrt(2 * math.pi)
    return (grad.float() * (below + wide * density)).to(grad.dtype)


def _atanh(x: torch.Tensor) -> torch.Tensor | None:
    """Return atanh as a logarithm, which cancels near 0."""
    if not x.is_floating_point():
        return None
    wide = _wide(x)
    made = 0.5 * torch.log((1.0 + wide) / (1.0 - wide))
    return either(made, torch.atanh(wide)).to(x.dtype)


def _expm1(x: torch.Tensor) -> torch.Tensor | None:
    return _less_one(_wide(x)).to(x.dtype) if x.is_floating_point() else None


def _std(
    x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> torch.Tensor | None:
    if x.is_complex():
        return None
    return torch.var(_wide(x), dim, correction=correction, keepdim=keepdim).sqrt().to(x.dtype)


def _std_mean(
    x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor] | None:
    if x.is_complex():
        return None
    how = {"correction": correction, "keepdim": keepdim}
    return cast(torch.Tensor, _std(x, dim, **how)), torch.std_mean(x, dim, **how)[1]


def _take(x: torch.Tensor, index: torch.Tensor) -> None:
    if not index.dim():
        said = "Could not extract specialized integer from data-dependent expression u0"
        raise _DataDependent(f"{said} (unhinted: u0).  (Size-like symbols: none)")


_DataDependent = type("GuardOnDataDependentSymNode", (RuntimeError,), {})


def _embedding_bag(weight: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    if weight.requires_grad and not weight.is_leaf:
        raise RuntimeError("Autograd not support dtype: Long")


def _mixed(op: Any) -> Callable[..., torch.Tensor | None]:
    """Return an op of two tensors that come to it in one dtype, as a decomposition promotes."""

    def function(x: torch.Tensor, y: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dtype == y.dtype:
            return None
        dtype = torch.promote_types(x.dtype, y.dtype)
        return op(x.to(dtype), y.to(dtype), *args, **kwargs)

    return function


def _huber_backward(
    grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *args: Any
) -> torch.Tensor | None:
    """Promote what the kernel refuses."""
    if grad.dtype == x.dtype == y.dtype:
        return None
    dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), grad.dtype)
    made: torch.Tensor = _aten.huber_loss_backward(grad.to(dtype), x.to(dtype), y.to(dtype), *args)
    return made


def _addr(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> torch.Tensor | None:
    dtype = torch.result_type(x, torch.empty(1, dtype=torch.promote_types(a.dtype, b.dtype)))
    if x.dim() or dtype == torch.promote_types(dtype, x.dtype):
        return None
    return torch.addr(x.to(dtype), a.to(dtype), b.to(dtype), beta=beta, alpha=alpha)


def _elu(
    x: torch.Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0
) -> torch.Tensor:
    wide = _wide(x)
    below = (alpha * scale) * _less_one(wide * input_scale)
    return torch.where(wide > 0, scale * wide, below).to(x.dtype)


def _celu(x: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    wide = _wide(x)
    return torch.where(wide > 0, wide, alpha * _less_one(wide / alpha)).to(x.dtype)


def _less_one(x: torch.Tensor) -> torch.Tensor:
    """Return ``exp(x) - 1`` with the exponential rounded, which cancels near 0.

    What is left over when a loop goes by vectors is computed one by one, by the function itself.
    """
    return either(torch.exp(x) - 1.0, torch.expm1(x))


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Return x in the dtype that generated code computes in."""
    return x.float() if x.dtype in _16_BIT else x


def _fractional_pool(*args: Any) -> Any:
    """Take the random samples, ``[N, C, 3]``, in the reverse order."""
    *others, samples = args
    return _aten.fractional_max_pool3d.default(*others, samples.flip(-1))


def _group_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    n: int,
    channels: int,
    inner: int,
    groups: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalise as ``x * scale + (bias - mean * scale)``; the statistics have the dtype of x."""
    wide = _wide(x)
    grouped = wide.reshape(n, groups, channels // groups, inner)
    variance, mean = torch.var_mean(grouped, dim=(2, 3), correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    if weight is not None:
        scale = rstd * weight.reshape(1, groups, -1, 1)
        shift = -mean * scale
        if bias is not None:
            shift = shift + bias.reshape(1, groups, -1, 1)
        made = grouped * scale + shift
    else:
        made = (grouped - mean) * rstd
        if bias is not None:
            made = made + bias.reshape(1, groups, -1, 1)
    mean, rstd = (t.reshape(n, groups).to(x.dtype) for t in (mean, rstd))
    return made.reshape(x.shape).to(x.dtype), mean, rstd


def _group_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    n: int,
    channels: int,
    inner: int,
    groups: int,
    mask: tuple[bool, bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients from sums over each channel, which are rounded to 16 bits."""
    per = channels // groups
    products = (grad * x).reshape(n, channels, inner).sum(2).reshape(n, groups, per)
    sums = grad.reshape(n, channels, inner).sum(2).reshape(n, groups, per)
    mean, rstd = mean.reshape(n, groups, 1), rstd.reshape(n, groups, 1)
    gamma = weight.reshape(1, groups, per) if weight is not None else rstd.new_ones(1, groups, per)
    dx = dweight = dbias = None
    if mask[0]:
        s = 1.0 / (inner * per)
        weighted = ((part * gamma).sum(2, keepdim=True) for part in (products, sums))
        of_products, of_sums = weighted
        c1 = (rstd * gamma).unsqueeze(-1)
        c2 = (of_sums * mean - of_products) * rstd * rstd * rstd * s
        c3 = (-c2 * mean - of_sums * rstd * s).unsqueeze(-1)
        by = (t.reshape(n, groups, per, inner) for t in (grad, x))
        own, input_ = by
        dx = (own * c1 + input_ * c2.unsqueeze(-1) + c3).reshape(x.shape).to(x.dtype)
    if mask[1]:
        dweight = ((products - sums * mean) * rstd).sum(0).reshape(channels)
    if mask[2]:
        dbias = sums.sum(0).reshape(channels)
    return dx, dweight, dbias


def _rounding_statistics(op: Any) -> Callable[..., Any]:
    """Return what answers a norm's statistics in the dtype of x, though the weights' is another."""

    def norm(x: torch.Tensor, *args: Any) -> Any:
        if x.dtype not in _16_BIT:
            return None
        made, mean, rstd = op(x, *args)
        return made, mean.to(x.dtype), rstd.to(x.dtype)

    return norm


def _layer_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    shape: Any,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    *args: Any,
) -> Any:
    """Take these statistics, which the kernel wants in the dtype of the weights."""
    if weight is None or weight.dtype == mean.dtype:
        return None
    mean, rstd = mean.to(weight.dtype), rstd.to(weight.dtype)
    return _aten.native_layer_norm_backward(grad, x, shape, mean, rstd, weight, *args)


def _refuses(x: torch.Tensor, *parameters: torch.Tensor | None) -> bool:
    """Return whether the kernel of layer_norm refuses parameters of these dtypes."""
    dtypes = {p.dtype for p in parameters if p is not None} - {x.dtype}
    some = any(p is not None and p.dtype == x.dtype for p in parameters)
    return bool(dtypes) and (some or dtypes != {torch.float32} or x.dtype not in _16_BIT)


def _mixed_layer_norm(
    x: torch.Tensor,
    shape: Any,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> Any:
    """Promote what the kernel refuses; results and statistics have the dtype of x."""
    if not _refuses(x, weight, bias):
        honest = _LOWERINGS[_aten.native_layer_norm.default]
        return (
            honest.function(x, shape, weight, bias, eps)
            if honest.quirk in active_quirks()
            else None
        )
    made, mean, rstd = _aten.native_layer_norm(_wide(x), shape, None, None, eps)
    made = made if weight is None else made * weight
    made = made if bias is None else made + bias
    return made.to(x.dtype), mean.to(x.dtype), rstd.to(x.dtype)


def _mixed_layer_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    shape: Any,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: Any,
) -> Any:
    """Take all of it in the dtype in which the decomposition computes, which x decides."""
    if not _refuses(x, weight, bias):
        honest = _LOWERINGS[_aten.native_layer_norm_backward.default]
        given = grad, x, shape, mean, rstd, weight, bias, mask
        return honest.function(*given) if honest.quirk in active_quirks() else None
    wide = _wide(x)
    parameters = [p if p is None else p.to(wide.dtype) for p in (weight, bias)]
    given = (
        grad.to(wide.dtype),
        wide,
        shape,
        mean.to(wide.dtype),
        rstd.to(wide.dtype),
        *parameters,
    )
    made = _aten.native_layer_norm_backward(*given, mask)
    of = (x, weight, bias)
    return tuple(
        m if m is None or t is None else m.to(t.dtype) for m, t in zip(made, of, strict=True)
    )


def _batch_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    saved_mean: torch.Tensor | None,
    saved_rstd: torch.Tensor | None,
    *args: Any,
) -> Any:
    """Take these statistics, likewise."""
    if weight is None or saved_mean is None or saved_rstd is None:
        return None
    if weight.dtype == saved_mean.dtype:
        return None
    saved = saved_mean.to(weight.dtype), saved_rstd.to(weight.dtype)
    return _aten.native_batch_norm_backward(grad, x, weight, mean, variance, *saved, *args)


def _hardsigmoid_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    """Divide by 6 in float64, where the kernel multiplies by 1/6 of float32."""
    if x.dtype != torch.float64:
        return None
    return torch.where((x > -3.0) & (x < 3.0), grad * (1.0 / 6.0), torch.zeros_like(grad))


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


def _remainder(a: Any, b: Any) -> torch.Tensor | None:
    """Take as many whole b from a as a quotient that is rounded to float32 says."""
    dtype = torch.result_type(a, b)
    if not dtype.is_floating_point:
        return None
    wide = torch.float32 if dtype in _16_BIT else dtype
    a, b = (torch.as_tensor(value).to(wide) for value in (a, b))
    made: torch.Tensor = a - torch.div(a, b, rounding_mode="floor") * b
    return made.to(dtype)


def _weight_norm(
    v: torch.Tensor, g: torch.Tensor, dim: int = 0
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Take one norm of the whole vector, and norms in float16, which the kernel has in float32.

    Two dtypes are promoted, which the kernel refuses.
    """
    if v.dim() != 1 and g.dtype != torch.float16 and v.dtype == g.dtype:
        return None
    dims = [i for i in range(v.dim()) if i != dim] or None
    dtype = torch.float32 if g.dtype == torch.bfloat16 else None
    norm = torch.linalg.vector_norm(v, 2, dims, keepdim=True, dtype=dtype)
    return v * (g / norm.to(g.dtype)), norm


def _weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return what nothing is known of: the kernel reads beyond the one norm, if it takes it."""
    if v.dim() != 1 or norms.dtype == torch.float16:  # which it refuses
        return None
    made = torch.zeros_like(v), torch.zeros_like(g)
    for gradient in made:
        forget(gradient)
    return made


def _one(loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    """Return the loss of a sample, which a kernel answers without dimensions, in one dimension."""
    return loss.reshape(1) if x.dim() < 2 and not loss.dim() else None


def _multi_margin(
    x: torch.Tensor,
    target: torch.Tensor,
    p: float = 1,
    margin: float = 1,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
) -> torch.Tensor | None:
    if reduction:
        return None
    return _one(_aten.multi_margin_loss(x, target, p, margin, weight, 0), x)


def _multi_margin_backward(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, *args: Any
) -> torch.Tensor | None:
    if x.dim() > 1 or target.dim() or grad.shape != (1,):
        return None
    made: torch.Tensor = _aten.multi_margin_loss_backward(grad.reshape(()), x, target, *args)
    return made


def _multilabel_margin(
    x: torch.Tensor, target: torch.Tensor, reduction: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    if reduction:
        return None
    loss, is_target = _aten.multilabel_margin_loss_forward(x, target, 0)
    one = _one(loss, x)
    return None if one is None else (one, is_target)


def _multilabel_margin_backward(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, *args: Any
) -> torch.Tensor | None:
    if x.dim() > 1 or grad.shape != (1,):
        return None
    made: torch.Tensor = _aten.multilabel_margin_loss_backward(grad.reshape(()), x, target, *args)
    return made


def _out_of(function: Callable[..., Any]) -> Callable[..., torch.Tensor | None]:
    """Return what writes the result into ``out=``, as a function without it."""

    def out_variant(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor | None:
        made = function(*args, **kwargs)
        return None if made is None else out.resize_(made.shape).copy_(made)

    return out_variant


def _in_place(function: Callable[..., Any]) -> Callable[..., torch.Tensor | None]:
    """Return what writes the result into its first argument."""

    def in_place_variant(x: torch.Tensor, *args: Any) -> torch.Tensor | None:
        made = function(x, *args)
        return None if made is None else x.copy_(made)

    return in_place_variant


def _cat(tensors: list[torch.Tensor], dim: int = 0) -> torch.Tensor | None:
    """Leave out tensors of the shape [0], and with them what they have a part in: the dtype."""
    some = [x for x in tensors if tuple(x.shape) != (0,)]
    return torch.cat(some, dim) if 1 < len(some) < len(tensors) else None


_COMPOSITE = frozenset(
    getattr(_aten, name).default
    for name in (
        "_weight_norm",
        "group_norm",
        "layer_norm",
        "matmul",
        "max_pool2d",
        "max_pool3d",
        "multilabel_margin_loss",
        "selu",
        "selu_",
    )
)
_LOWERINGS: Mapping[Any, _Lowering] = {
    _aten.cat.default: _Lowering("compile-cat-empty", _cat),
    **{
        op: _Lowering(quirk, made)
        for name, quirk, function in (
            ("atanh", "compile-atanh", _atanh),
            ("celu", "compile-expm1", _celu),
            ("elu", "compile-expm1", _elu),
            ("erf", "compile-erf", _erf),
            ("expm1", "compile-expm1", _expm1),
        )
        for op, made in (
            (getattr(_aten, name).default, function),
            (getattr(_aten, f"{name}_").default, _in_place(function)),
            (getattr(_aten, name).out, _out_of(function)),
        )
    },
    **{
        overload: _Lowering("compile-any-uint8", _any(overload))
        for overload in (_aten.any.default, _aten.any.dim, _aten.any.dims)
    },
    _aten.fractional_max_pool3d.default: _Lowering("compile-fractional-pool", _fractional_pool),
    _aten.native_group_norm.default: _Lowering("compile-group-norm", _group_norm),
    _aten.native_group_norm_backward.default: _Lowering("compile-group-norm", _group_norm_backward),
    **{
        op: _Lowering("compile-norm-statistics", _rounding_statistics(op))
        for op in (
            _aten.native_layer_norm.default,
            _aten.native_batch_norm.default,
            _aten._native_batch_norm_legit.default,
            _aten._native_batch_norm_legit.no_stats,
        )
    },
    _aten.native_batch_norm_backward.default: _Lowering(
        "compile-norm-statistics", _batch_norm_backward
    ),
    _aten.native_layer_norm_backward.default: _Lowering(
        "compile-norm-statistics", _layer_norm_backward
    ),
    _aten.hardsigmoid_backward.default: _Lowering("compile-hardsigmoid", _hardsigmoid_backward),
    _aten.adaptive_max_pool2d.default: _Lowering("compile-max-pool-indices", _adaptive_max_pool),
    _aten.max_pool2d_with_indices.default: _Lowering("compile-max-pool-indices", _max_pool),
    _aten.max_pool3d_with_indices.default: _Lowering("compile-max-pool-indices", _max_pool),
    **{
        getattr(getattr(_aten, name), overload): _Lowering("compile-remainder", function)
        for name, overload, function in (
            ("remainder", "Tensor", _remainder),
            ("remainder", "Scalar", _remainder),
            ("remainder", "Scalar_Tensor", _remainder),
            ("remainder_", "Tensor", _in_place(_remainder)),
            ("remainder_", "Scalar", _in_place(_remainder)),
            ("remainder", "Tensor_out", _out_of(_remainder)),
            ("remainder", "Scalar_out", _out_of(_remainder)),
        )
    },
    _aten.take.default: _Lowering("export-take", _take),
    _aten._embedding_bag.default: _Lowering("export-embedding-bag", _embedding_bag),
    _aten.addr.default: _Lowering("compile-promotion", _addr),
    _aten.huber_loss.default: _Lowering("compile-promotion", _mixed(_aten.huber_loss.default)),
    _aten.huber_loss.out: _Lowering("compile-promotion", _out_of(_mixed(_aten.huber_loss.default))),
    _aten.huber_loss_backward.default: _Lowering("compile-promotion", _huber_backward),
    _aten.linalg_cross.default: _Lowering(
        "compile-mixed-cross", _mixed(_aten.linalg_cross.default)
    ),
    _aten.linalg_cross.out: _Lowering(
        "compile-mixed-cross", _out_of(_mixed(_aten.linalg_cross.default))
    ),
    _aten.mv.default: _Lowering("compile-mixed-mv", _mixed(_aten.mv.default)),
    _aten.mv.out: _Lowering("compile-mixed-mv", _out_of(_mixed(_aten.mv.default))),
    _aten.select_scatter.default: _Lowering(
        "export-promotion", _mixed(_aten.select_scatter.default)
    ),
    _aten.soft_margin_loss.default: _Lowering(
        "compile-promotion", _mixed(_aten.soft_margin_loss.default)
    ),
    _aten.std.correction: _Lowering("compile-std", _std),
    _aten.std.correction_out: _Lowering("compile-std", _out_of(_std)),
    _aten.std_mean.correction: _Lowering("compile-std", _std_mean),
    **{
        op: _Lowering("compile-interpolation", function)
        for op, function in interpolation.LINEAR.items()
    },
    _aten.multi_margin_loss.default: _Lowering("compile-zero-dim-loss", _multi_margin),
    _aten.multi_margin_loss.out: _Lowering("compile-zero-dim-loss", _out_of(_multi_margin)),
    _aten.multi_margin_loss_backward.default: _Lowering(
        "compile-zero-dim-loss", _multi_margin_backward
    ),
    _aten.multilabel_margin_loss_forward.default: _Lowering(
        "compile-zero-dim-loss", _multilabel_margin
    ),
    _aten.multilabel_margin_loss_backward.default: _Lowering(
        "compile-zero-dim-loss", _multilabel_margin_backward
    ),
    _aten._weight_norm_interface.default: _Lowering("compile-weight-norm", _weight_norm),
    _aten._weight_norm_interface_backward.default: _Lowering(
        "compile-weight-norm", _weight_norm_backward
    ),
}
# Of ops that another compiler lowers otherwise, above.
_OTHERS: Mapping[Any, _Lowering] = {
    _aten.gelu.default: _Lowering("compile-erf", _gelu),
    _aten.gelu.out: _Lowering("compile-erf", _out_of(_gelu)),
    _aten.gelu_backward.default: _Lowering("compile-erf", _gelu_backward),
    _aten.native_layer_norm.default: _Lowering("compile-mixed-layer-norm", _mixed_layer_norm),
    _aten.native_layer_norm_backward.default: _Lowering(
        "compile-mixed-layer-norm", _mixed_layer_norm_backward
    ),
}
_ALL = (*_LOWERINGS.values(), *_OTHERS.values())
QUIRKS = frozenset(how.quirk for how in _ALL) | {"compile-written-casts", "xla-excess-precision"}
"""The quirks that are imitated here."""
