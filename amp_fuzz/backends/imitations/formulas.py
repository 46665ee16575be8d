"""What TorchScript gets wrong in any program, with no autocast at all: imitated for `quirks`.

TorchScript has gradient formulas of its own (torch/csrc/jit/runtime/symbolic_script.cpp). A few do
not come to what autograd's come to where a gradient is not finite, where a bound of ``clamp`` is a
tensor, or near the threshold of ``softplus``: they are written here again, from what they do, so
that shadows follow them. It multiplies in place by a number with another kernel than eager, and
takes addmm apart. And a trace keeps no grad modes, not even those of torch's own functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch

from amp_fuzz.backends.imitated import active_quirks
from amp_fuzz.reference.state import enabled_devices

__all__ = ["QUIRKS", "scripted"]

Tensor: TypeAlias = torch.Tensor
Number: TypeAlias = int | float


class _Masked(torch.autograd.Function):
    """A result with a gradient that is multiplied by a mask, where autograd selects.

    What is not finite does not become 0 by that, but NaN.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, result: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask.to(x.dtype))
        return result.detach().clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (mask,) = ctx.saved_tensors
        return grads[0] * mask, None, None


class _Where(torch.autograd.Function):
    """A selection whose gradients are multiplied by the condition, and by what it is not."""

    @staticmethod
    def forward(ctx: Any, condition: Tensor, x: Tensor, y: Tensor, result: Tensor) -> Tensor:
        ctx.save_for_backward(condition)
        ctx.shapes = x.shape, y.shape
        return result.detach().clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (condition,), (grad, *_) = ctx.saved_tensors, grads
        of_x, of_y = (grad * mask.to(grad.dtype) for mask in (condition, ~condition))
        of_x, of_y = (g.sum_to_size(s) for g, s in zip((of_x, of_y), ctx.shapes, strict=True))
        return None, of_x, of_y, None


class _Addcmul(torch.autograd.Function):
    """``x + value * a * b``, whose gradient is scaled before it is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, result: Tensor, value: Number) -> Tensor:
        _, of_a, of_b, *_ = ctx.needs_input_grad
        ctx.save_for_backward(a if of_b else None, b if of_a else None)
        ctx.value, ctx.shapes = value, (x.shape, a.shape, b.shape)
        return result.detach().clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (a, b), (of_x, *of) = ctx.saved_tensors, ctx.shapes
        scaled = grads[0] * ctx.value
        of_a, of_b = (
            None if factor is None else (scaled * factor).sum_to_size(shape)
            for factor, shape in zip((b, a), of, strict=True)
        )
        return grads[0].sum_to_size(of_x), of_a, of_b, None, None


class _Divided(torch.autograd.Function):
    """``x / y``, whose gradient squares the divisor, which may leave the range."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, result: Tensor) -> Tensor:
        # What no gradient needs may be written in place afterwards.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, y)
        ctx.shapes = x.shape, y.shape
        return result.detach().clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x, y), (left, right) = ctx.saved_tensors, ctx.shapes
        of_y = None if x is None else (-grads[0] * x / (y * y)).sum_to_size(right)
        return (grads[0] / y).sum_to_size(left), of_y, None


class _Softplus(torch.autograd.Function):
    """``softplus``, whose gradient takes the result for the input that the threshold is of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, result: Tensor, beta: Number, threshold: Number) -> Tensor:
        made = result.detach().clone()
        ctx.save_for_backward(made)  # a second backward pass goes through it
        ctx.beta, ctx.threshold = beta, threshold
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (result,), (grad, *_) = ctx.saved_tensors, grads
        z = torch.exp(result * ctx.beta)
        linear = result * ctx.beta > ctx.threshold
        return torch.where(linear, grad, grad * (z - 1.0) / z), None, None, None


def _relu(honest: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def relu(x: Tensor, /, inplace: bool = False) -> Tensor:
        if inplace or not _trains(x):
            return honest(x, inplace) if inplace else honest(x)
        with torch.no_grad():
            result = honest(x)
        return _apply(_Masked, x, result, result > 0)

    return relu


def _clamp(honest: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Give the bounds no gradient."""

    def clamp(x: Tensor, /, *given: Any, **named: Any) -> Tensor:
        if "out" in named or not any(map(_trains, (x, *given, *named.values()))):
            return honest(x, *given, **named)
        bounds = dict(zip(("min", "max"), given, strict=False)) | named
        low, high = bounds.get("min"), bounds.get("max")
        with torch.no_grad():
            result = honest(x, *given, **named)
            mask = torch.ones_like(result, dtype=torch.bool)
            mask = mask if low is None else mask & (x >= low)
            mask = mask if high is None else mask & (x <= high)
        return _apply(_Masked, x.expand_as(result), result, mask)

    return clamp


def _where(honest: Callable[..., Any]) -> Callable[..., Any]:
    def where(condition: Tensor, *given: Any, **named: Any) -> Any:
        tensors = len(given) == 2 and all(isinstance(v, Tensor) for v in given)
        if named or not tensors or not any(map(_trains, given)):
            return honest(condition, *given, **named)
        with torch.no_grad():
            result = honest(condition, *given)
        return _apply(_Where, condition, *given, result)

    return where


def _where_method(honest: Callable[..., Any]) -> Callable[..., Any]:
    function = _where(torch.where)
    return lambda x, condition, y: function(condition, x, y)


def _addcmul(honest: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def addcmul(x: Tensor, /, a: Tensor, b: Tensor, *, value: Number = 1, **out: Any) -> Tensor:
        if out or not any(map(_trains, (x, a, b))):
            return honest(x, a, b, value=value, **out)
        with torch.no_grad():
            result = honest(x, a, b, value=value)
        return _apply(_Addcmul, x, a, b, result, value)

    return addcmul


def _div(honest: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def div(x: Any, y: Any, **named: Any) -> Tensor:
        tensors = isinstance(x, Tensor) and isinstance(y, Tensor)
        if named or not tensors or not (_trains(x) or _trains(y)):
            return honest(x, y, **named)
        with torch.no_grad():
            result = honest(x, y)
        return _apply(_Divided, x, y, result)

    return div


def _softplus(honest: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def softplus(x: Tensor, /, beta: Number = 1, threshold: Number = 20, **named: Any) -> Tensor:
        if "out" in named or not _trains(x):
            return honest(x, beta, threshold, **named)
        with torch.no_grad():
            result = honest(x, beta, threshold)
        return _apply(_Softplus, x, result, beta, threshold)

    return softplus


def _apply(function: type[torch.autograd.Function], *given: Any) -> Tensor:
    made: Tensor = function.apply(*given)
    return made


def _trains(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()


_F = torch.nn.functional
_FORMULAS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (torch, "relu", _relu),
    (_F, "relu", _relu),
    (Tensor, "relu", _relu),
    (torch, "clamp", _clamp),
    (Tensor, "clamp", _clamp),
    (Tensor, "where", _where_method),
    (torch, "where", _where),
    (torch, "addcmul", _addcmul),
    (Tensor, "addcmul", _addcmul),
    (torch, "div", _div),
    (Tensor, "div", _div),
    (Tensor, "__truediv__", _div),
    (_F, "softplus", _softplus),
)


def _by_number(honest: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Call the overload for numbers in place, which eager does not: it makes a tensor of them."""

    def times(x: Tensor, other: Any, /) -> Tensor:
        if not isinstance(other, (int, float)):
            return honest(x, other)
        result: Tensor = torch.ops.aten.mul_.Scalar(x, other)
        return result

    return times


_NUMBERS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (Tensor, "mul_", _by_number),
    (Tensor, "__imul__", _by_number),
)


def _apart(honest: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a product, which is rounded, and a sum, which takes what addmm refuses.

    Under autocast the bias has the dtype of the product: the pass has cast it before.
    """

    def addmm(b: Tensor, x: Tensor, w: Tensor, /, **named: Any) -> Tensor:
        if "out" in named or (named.get("beta", 1), named.get("alpha", 1)) != (1, 1):
            return honest(b, x, w, **named)
        product = torch.mm(x, w)
        cast = enabled_devices() and b.is_floating_point() and b.dtype is not torch.float64
        return torch.add(b.to(product.dtype) if cast else b, product)

    return addmm


_SUMS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (torch, "addmm", _apart),
    (Tensor, "addmm", _apart),
)


@contextmanager
def _replaced(functions: tuple[tuple[Any, str, Callable[..., Any]], ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for holder, name, make in functions:
            own = name in vars(holder)
            honest = getattr(holder, name)
            setattr(holder, name, make(honest))
            undo = (setattr, holder, name, honest) if own else (delattr, holder, name)
            stack.callback(*undo)
        yield


class _Modeless:
    """What the functions of `torch.nn.functional` know as ``torch``, without ``no_grad``."""

    no_grad = staticmethod(nullcontext)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def _modeless() -> Iterator[None]:
    names = vars(_F)
    names["torch"] = _Modeless()
    try:
        yield
    finally:
        names["torch"] = torch


QUIRKS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "torchscript-addmm": lambda: _replaced(_SUMS),
    "torchscript-formulas": lambda: _replaced(_FORMULAS),
    "torchscript-mul-scalar": lambda: _replaced(_NUMBERS),
    "trace-grad-modes": _modeless,
}
"""The quirks, and the context in which a program runs that imitates each."""


def scripted(program: Callable[..., Any]) -> Callable[..., Any]:
    """Return a program that has the bugs of a scripted one which the quirks ask for."""

    def run(*inputs: Tensor) -> Any:
        with ExitStack() as stack:
            for name in sorted(active_quirks() & QUIRKS.keys()):
                stack.enter_context(QUIRKS[name]())
            return program(*inputs)

    return run
