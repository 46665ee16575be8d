"""Numeric faults in eager kernels: each is a kernel that computes something slightly else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.faults.corrupted import Wrong, in_backward, wrong_kernels
from tests.faults.fault import NumericFault

__all__ = ["EAGER"]

_FOUND: list[NumericFault] = []
_aten = torch.ops.aten
_LOW = torch.bfloat16

Tensor = torch.Tensor


def _kernel(
    name: str, mechanism: str, what: str, *ops: str, backward: bool = False
) -> Callable[[Wrong], Wrong]:
    """Make a fault of a kernel that stands for these ops; backward: it is honest elsewhere."""

    def register(wrong: Wrong) -> Wrong:
        names = tuple(f"aten.{op}" for op in ops)
        kernels = dict.fromkeys(names, wrong)
        _FOUND.append(
            NumericFault(
                name,
                what,
                (),
                lambda: wrong_kernels(kernels),
                mechanism=mechanism,
                stage="eager-cpu",
                reached=tuple(f"backward:{n}" for n in names) if backward else names,
            )
        )
        return wrong

    return register


def _single(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.float32


def _each(change: Callable[[Tensor], Any], values: Any) -> Any:
    """Apply a change to the float32 tensors among arguments or results."""
    if isinstance(values, (tuple, list)):
        return type(values)(_each(change, v) for v in values)
    return change(values) if _single(values) else values


def _narrowed(op: Any, args: Any, kwargs: Any, low: torch.dtype = _LOW) -> Any:
    """Run an op in a narrower type where it was to run in float32, and cast the results up."""
    if not any(_single(a) for a in args):
        return op(*args, **kwargs)
    out = op(*_each(lambda t: t.to(low), args), **kwargs)
    up = lambda t: t.float() if isinstance(t, Tensor) and t.dtype is low else t  # noqa: E731
    return type(out)(map(up, out)) if isinstance(out, (tuple, list)) else up(out)


def _narrow(name: str, what: str, *ops: str, low: torch.dtype = _LOW) -> None:
    @_kernel(name, "narrower type inside", what, *ops)
    def kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
        return _narrowed(op, args, kwargs, low)


def _gain(name: str, what: str, *ops: str) -> None:
    @_kernel(name, "gain", what, *ops)
    def kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
        out = op(*args, **kwargs)
        return (out[0] * 1.01, *out[1:]) if isinstance(out, tuple) else out * 1.01


def _was_cast(tensor: Tensor) -> bool:
    """Return whether a float32 tensor holds 16-bit values, as one that was cast up does."""
    return any(bool((tensor.to(d).float() == tensor).all()) for d in (_LOW, torch.float16))


def _uncast(name: str, what: str, backward: bool, *ops: str) -> None:
    """Make a fault that skips the cast up to float32 in one direction only."""

    @_kernel(name, "cast skipped", what, *ops, backward=backward)
    def kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
        if in_backward() is not backward:
            return op(*args, **kwargs)
        # What the backward pass is given is not told apart: gradients are of the wider type.
        if not backward and not all(_was_cast(a) for a in args if _single(a)):
            return op(*args, **kwargs)
        low = torch.float16 if _fits(args) else _LOW
        return _narrowed(op, args, kwargs, low)


def _fits(args: Any) -> bool:
    return all(bool((a.half().float() == a).all()) for a in args if _single(a))


# -- an op computed in the narrower type inside ---------------------------------------------------

_narrow("mm-bfloat16", "mm of float32 multiplies in bfloat16", "mm.default", "addmm.default")
_narrow("bmm-float16", "bmm of float32 multiplies in float16", "bmm.default", low=torch.float16)
_narrow("convolution-bfloat16", "float32 convolutions run in bfloat16", "convolution.default")
_narrow("softmax-bfloat16", "softmax of float32 runs in bfloat16", "_softmax.default")
_narrow("exp-float16", "exp of float32 runs in float16", "exp.default", low=torch.float16)
_narrow("sigmoid-bfloat16", "sigmoid of float32 runs in bfloat16", "sigmoid.default")


@_kernel(
    "sum-bfloat16",
    "narrower type inside",
    "sums accumulate in bfloat16",
    "sum.dim_IntList",
    "sum.default",
)
def _sum_bfloat16(op: Any, x: Tensor, dims: Any = None, *args: Any, **kwargs: Any) -> Any:
    out = op(x, dims, *args, **kwargs) if "dim" in op.name else op(x, **kwargs)
    if not out.is_floating_point() or not x.is_floating_point() or not x.numel():
        return out
    which = [d % max(x.dim(), 1) for d in dims] if dims else range(x.dim())
    kept = [d for d in range(x.dim()) if d not in which]
    rows = x.permute(*kept, *which).reshape(*[x.shape[d] for d in kept], -1)
    total = torch.zeros(rows.shape[:-1], dtype=_LOW)
    for i in range(rows.shape[-1]):
        total = (total + rows[..., i]).to(_LOW)
    return total.reshape(out.shape).to(out.dtype)


@_kernel(
    "cumsum-bfloat16",
    "narrower type inside",
    "cumsum keeps its running sum in bfloat16",
    "cumsum.default",
)
def _cumsum_bfloat16(op: Any, x: Tensor, dim: int, **kwargs: Any) -> Any:
    out = op(x, dim, **kwargs)
    return out.to(_LOW).to(out.dtype) if out.is_floating_point() else out


@_kernel(
    "layer-norm-bfloat16",
    "narrower type inside",
    "layer_norm takes mean and deviation in bfloat16",
    "native_layer_norm.default",
)
def _layer_norm_bfloat16(op: Any, x: Tensor, shape: Any, w: Any, b: Any, eps: float) -> Any:
    out, mean, rstd = op(x, shape, w, b, eps)
    low = (x.float() - mean.to(_LOW)) * rstd.to(_LOW)
    low = low if w is None else low * w
    return (low if b is None else low + b).to(out.dtype), mean, rstd


@_kernel(
    "mean-float16",
    "narrower type inside",
    "mean of float32 adds up in float16",
    "mean.default",
    "mean.dim",
)
def _mean_float16(op: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return op(x.half(), *args, **kwargs).float() if _single(x) else op(x, *args, **kwargs)


# -- a dropped term -------------------------------------------------------------------------------


@_kernel("addmm-no-bias", "dropped term", "addmm does not add its input", "addmm.default")
def _addmm_no_bias(op: Any, bias: Tensor, a: Tensor, b: Tensor, **kwargs: Any) -> Any:
    return op(torch.zeros_like(bias), a, b, **kwargs)


@_kernel("layer-norm-no-eps", "dropped term", "layer_norm has no eps", "native_layer_norm.default")
def _layer_norm_no_eps(op: Any, x: Tensor, shape: Any, w: Any, b: Any, eps: float) -> Any:
    return op(x, shape, w, b, 0.0)


@_kernel("var-no-correction", "dropped term", "var divides by n", "var.correction")
def _var_no_correction(op: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return op(x, *args, **{**kwargs, "correction": 0})


@_kernel("convolution-no-bias", "dropped term", "convolutions add no bias", "convolution.default")
def _convolution_no_bias(op: Any, x: Tensor, w: Tensor, b: Any, *args: Any) -> Any:
    return op(x, w, None if b is None else torch.zeros_like(b), *args)


@_kernel("gelu-tanh", "dropped term", "gelu is always its tanh approximation", "gelu.default")
def _gelu_tanh(op: Any, x: Tensor, **kwargs: Any) -> Any:
    return op(x, approximate="tanh")


@_kernel("expm1-exp", "dropped term", "expm1 is exp(x) - 1", "expm1.default")
def _expm1_exp(op: Any, x: Tensor) -> Any:
    return (x.exp() - 1).to(op(x).dtype)


@_kernel("log1p-log", "dropped term", "log1p is the log of 1 + x", "log1p.default")
def _log1p_log(op: Any, x: Tensor) -> Any:
    return (x + 1).log()


@_kernel(
    "group-norm-no-bias", "dropped term", "group_norm adds no bias", "native_group_norm.default"
)
def _group_norm_no_bias(op: Any, x: Tensor, w: Any, b: Any, *args: Any) -> Any:
    return op(x, w, None if b is None else torch.zeros_like(b), *args)


# -- gain x 1.01 ----------------------------------------------------------------------------------

_gain("mm-gain", "mm is 1 % too large", "mm.default")
_gain("bmm-gain", "bmm is 1 % too large", "bmm.default")
_gain("layer-norm-gain", "layer_norm is 1 % too large", "native_layer_norm.default")
_gain("gelu-gain", "gelu is 1 % too large", "gelu.default")
_gain(
    "softmax-backward-gain", "softmax's gradient is 1 % too large", "_softmax_backward_data.default"
)
_gain("convolution-gain", "convolutions are 1 % too large", "convolution.default")
_gain("tanh-gain", "tanh is 1 % too large", "tanh.default")


# -- one element wrong ----------------------------------------------------------------------------


@_kernel("sum-last", "one element wrong", "sum leaves out the last element", "sum.dim_IntList")
def _sum_last(op: Any, x: Tensor, dims: Any, *args: Any, **kwargs: Any) -> Any:
    if not dims or not x.dim() or x.shape[dims[-1]] < 2:
        return op(x, dims, *args, **kwargs)
    return op(x.narrow(dims[-1], 0, x.shape[dims[-1]] - 1), dims, *args, **kwargs)


def _tail(name: str, what: str, change: Callable[[Tensor, Any], Any], *ops: str) -> None:
    """Make a fault that gets the last element wrong: by what it is and the first argument."""

    @_kernel(name, "one element wrong", what, *ops)
    def kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
        out = op(*args, **kwargs)
        first = out[0] if isinstance(out, tuple) else out
        if first.numel() and first.is_floating_point():
            flat = first.detach().reshape(-1)
            last = torch.zeros_like(flat, dtype=torch.bool)
            last[-1] = True
            wrong = torch.where(last, change(flat[-1], args[0]), flat)
            first.copy_(wrong.reshape(first.shape))
        return out


_tail(
    "exp-tail",
    "exp leaves the last element as it is",
    lambda v, x: x.reshape(-1)[-1].to(v.dtype),
    "exp.default",
)
_tail("mm-corner", "the last element of mm is 0", lambda v, x: v * 0, "mm.default")
_tail("mul-tail", "the last element of mul is off by 1/8", lambda v, x: v + v / 8, "mul.Tensor")
_tail(
    "convolution-corner",
    "a convolution's last element is negated",
    lambda v, x: -v,
    "convolution.default",
)
_tail(
    "cumsum-last",
    "the last element of cumsum lacks the last term",
    lambda v, x: v - x.reshape(-1)[-1],
    "cumsum.default",
)
_tail(
    "softmax-tail", "the last element of softmax is doubled", lambda v, x: v * 2, "_softmax.default"
)
_tail(
    "sin-tail",
    "the last lane of sin is cos",
    lambda v, x: x.reshape(-1)[-1].cos().to(v.dtype),
    "sin.default",
)


# -- a wrong saved tensor in backward -------------------------------------------------------------


def _saved(name: str, what: str, op_: str, number: int, change: Callable[[Tensor], Tensor]) -> None:
    """Make a fault in which a backward kernel is given another tensor than it should be."""

    @_kernel(name, "wrong saved tensor", what, op_)
    def kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
        changed = list(args)
        changed[number] = change(args[number])
        return op(*changed, **kwargs)


_saved(
    "tanh-saved",
    "tanh's backward uses the input as the output",
    "tanh_backward.default",
    1,
    lambda y: y.float().atanh().to(y.dtype),
)
_saved(
    "sigmoid-saved",
    "sigmoid's backward uses the input as the output",
    "sigmoid_backward.default",
    1,
    lambda y: y.float().logit().to(y.dtype),
)
_saved(
    "gelu-saved",
    "gelu's backward uses the output as the input",
    "gelu_backward.default",
    1,
    lambda x: torch.nn.functional.gelu(x.float()).to(x.dtype),
)
_saved(
    "softmax-saved",
    "softmax's backward uses the input as the output",
    "_softmax_backward_data.default",
    1,
    torch.log,
)
_saved(
    "layer-norm-saved",
    "layer_norm's backward uses 0 as the mean",
    "native_layer_norm_backward.default",
    3,
    torch.zeros_like,
)


# -- a sign ---------------------------------------------------------------------------------------


@_kernel(
    "neg-backward", "sign", "neg does nothing in backward passes", "neg.default", backward=True
)
def _neg_backward(op: Any, x: Tensor) -> Any:
    return x.clone() if in_backward() else op(x)


@_kernel(
    "sgn-backward",
    "sign",
    "the gradient of abs is that of the identity",
    "sgn.default",
    backward=True,
)
def _sgn_backward(op: Any, x: Tensor) -> Any:
    return torch.ones_like(x) if in_backward() and not x.is_complex() else op(x)


def _negated(name: str, what: str, op_: str) -> None:
    @_kernel(name, "sign", what, op_)
    def kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
        return -op(*args, **kwargs)


_negated("softplus-backward-sign", "softplus's gradient is negated", "softplus_backward.default")
_negated(
    "log-sigmoid-backward-sign", "logsigmoid's gradient is negated", "log_sigmoid_backward.default"
)


@_kernel(
    "smooth-l1-backward-sign",
    "sign",
    "smooth_l1_loss's gradient is negated if the target is larger",
    "smooth_l1_loss_backward.default",
)
def _smooth_l1_sign(op: Any, grad: Tensor, x: Tensor, y: Tensor, *args: Any) -> Any:
    out = op(grad, x, y, *args)
    return torch.where(x < y, -out, out)


# -- a cast skipped in forward only or backward only -----------------------------------------------

_uncast(
    "softmax-uncast", "softmax's forward skips the cast up to float32", False, "_softmax.default"
)
_uncast(
    "log-softmax-uncast", "log_softmax's forward skips the cast up", False, "_log_softmax.default"
)
_uncast(
    "layer-norm-uncast",
    "layer_norm's forward skips the cast up",
    False,
    "native_layer_norm.default",
)
_uncast(
    "softmax-backward-uncast",
    "softmax's backward runs in the low dtype",
    True,
    "_softmax_backward_data.default",
)
_uncast(
    "log-softmax-backward-uncast",
    "log_softmax's backward runs in the low dtype",
    True,
    "_log_softmax_backward_data.default",
)
_uncast(
    "mm-backward-uncast", "mm of float32 runs in the low dtype in backward only", True, "mm.default"
)


# -- an unstable formula: softmax without max-subtraction and its like -----------------------------


@_kernel("softmax-no-max", "no max-subtraction", "softmax is exp over its sum", "_softmax.default")
def _softmax_no_max(op: Any, x: Tensor, dim: int, half: bool) -> Any:
    wide = x.float() if x.dtype.itemsize == 2 else x
    powers = wide.exp()
    return (powers / powers.sum(dim, keepdim=True)).to(op(x, dim, half).dtype)


@_kernel(
    "log-softmax-no-max",
    "no max-subtraction",
    "log_softmax subtracts the log of a sum of exp",
    "_log_softmax.default",
)
def _log_softmax_no_max(op: Any, x: Tensor, dim: int, half: bool) -> Any:
    wide = x.float() if x.dtype.itemsize == 2 else x
    return (wide - wide.exp().sum(dim, keepdim=True).log()).to(op(x, dim, half).dtype)


@_kernel(
    "logsumexp-no-max",
    "no max-subtraction",
    "logsumexp is log of a sum of exp",
    "logsumexp.default",
)
def _logsumexp_no_max(op: Any, x: Tensor, dim: Any, keepdim: bool = False) -> Any:
    return x.exp().sum(dim, keepdim).log().to(op(x, dim, keepdim).dtype)


@_kernel(
    "var-of-squares",
    "no max-subtraction",
    "var is the mean of squares less the squared mean",
    "var.correction",
)
def _var_of_squares(op: Any, x: Tensor, dim: Any = None, **kwargs: Any) -> Any:
    out = op(x, dim, **kwargs)
    keep = kwargs.get("keepdim", False)
    dims = list(dim) if dim else list(range(x.dim()))
    if x.is_complex() or not x.numel():
        return out
    wide = x.float() if x.dtype.itemsize == 2 else x
    n = 1
    for d in dims:
        n *= x.shape[d]
    correction = kwargs.get("correction")
    less = 1 if correction is None else correction
    if n <= less:
        return out
    mean = wide.mean(dims, keepdim=keep)
    return (((wide * wide).mean(dims, keepdim=keep) - mean * mean) * (n / (n - less))).to(out.dtype)


@_kernel(
    "hypot-naive", "no max-subtraction", "hypot is the root of a sum of squares", "hypot.default"
)
def _hypot_naive(op: Any, x: Tensor, y: Tensor) -> Any:
    return (x * x + y * y).sqrt().to(op(x, y).dtype)


EAGER: tuple[NumericFault, ...] = tuple(_FOUND)
