"""TorchScript's own gradient formulas, some of which are wrong.

They stand in `torch/csrc/jit/runtime/symbolic_script.cpp`, and no autocast is needed.

## torchscript-formulas: masks that multiply, a divisor that is squared, a threshold of the result

From the second call on, the gradients of `relu`, `clamp`, `where`, `addcmul`, `div` and
`softplus` are TorchScript's. The reference computes them the same way.

- `relu`, `clamp` and `where` multiply the gradient by a mask, where autograd selects. An infinite
  gradient becomes NaN, not 0. The gradient of `lp_pool1d` at 0 does too.
- The gradient of a divisor is `-grad * x / (y * y)`. `y * y` may leave the range where `x / y / y`
  does not.
- `addcmul` multiplies the gradient by `value` first, which may leave the range.
- `softplus` is linear where `x * beta` is over its threshold. The formula compares the result,
  which is greater. Where only the result is over it, the gradient is that of `x`.
- The bounds of `clamp` get none: [torchscript-clamp-bounds]. Where autograd raises for them
  ("output with shape [] doesn't match the broadcast shape [6]") a scripted program does not.

```python
import torch


@torch.jit.script
def root(w):
    return torch.relu(w).pow(0.5)


@torch.jit.script
def quotient(x, w):
    return x / (w * 5e19)


@torch.jit.script
def soft(w):
    return torch.nn.functional.softplus(w * 2, threshold=1.0)


w, x = torch.tensor([-1.0, 4.0], requires_grad=True), torch.tensor([1e38])
for _ in range(2):
    print(torch.autograd.grad(root(w).sum(), w)[0])  # [0, 0.25], then [nan, 0.25]
w = torch.tensor([1.0], requires_grad=True)
for _ in range(2):
    print(torch.autograd.grad(quotient(x, w).sum(), w)[0])  # [-2e18], then [-0.]
w = torch.tensor([0.45], requires_grad=True)
for _ in range(2):
    print(torch.autograd.grad(soft(w).sum(), w)[0])  # [1.4219], then [2.]
```
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import call, case, x
from amp_fuzz.cases.program import Statement
from amp_fuzz.upstream.bug import Bug, Example
from amp_fuzz.upstream.torchscript.programs import Replaced, replaced, within

__all__ = ["BUGS"]

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
_FORMULAS: Replaced = (
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


def _shown(*body: Statement, wrong: str | None = None, **plan: Any) -> Example:
    inputs = [x("x0", 8), x("w1", 8), x("x2", 8)]
    return Example("script", case(inputs, *body, contexts=(), **plan), wrong)


ROOT = call("pow.Tensor_Scalar", "v0", 0.5, to="v1")
SOFTPLUS = call("neg", "w1"), call("softplus", "v0", threshold=0.5, to="v1")

BUGS = (
    Bug(
        id="torchscript-formulas",
        what="gradients at relu, clamp, where, addcmul, div and softplus of a scripted program, where something is not finite, a bound is a tensor or a threshold is near",
        why="TorchScript's formulas multiply by a mask where autograd selects, square a divisor, give bounds none, and compare softplus's result with its threshold",
        torch=">=2.7",
        seen="2.15.0",
        backends=("script*", "trace*"),
        ops=("addcmul", "clamp*", "div", "lp_pool*", "relu", "softplus", "where"),
        imitation=Imitation(wrap=within(lambda: replaced(_FORMULAS))),
        examples=(
            _shown(call("relu", "w1"), ROOT),
            _shown(call("clamp", "w1", 0.0, None), ROOT),
            _shown(
                call("gt", "x0", "w1"),
                call("where", "w1", "v0", "x2", to="v1"),
                call("mul.scalar", "v1", 1000.0, to="v2"),
                call("exp", "v2", to="v3"),
                wrong="where",
            ),
            _shown(
                call("mul.scalar", "x2", 1e-20),
                call("addcmul", "x0", "w1", "v0", value=1e20, to="v1"),
                call("mul.scalar", "v1", 1e20, to="v2"),
            ),
            _shown(
                call("mul.scalar", "x0", 5e37),
                call("mul.scalar", "w1", 5e19, to="v1"),
                call("div", "v0", "v1", to="v2"),
            ),
            _shown(*SOFTPLUS),
            _shown(*SOFTPLUS, second="double"),
            # The dividend, and a factor of addcmul, are not saved, and may be written.
            _shown(
                call("relu", "w1"),
                ROOT,
                call("mul.scalar", "v1", 2.0, to="v2"),
                call("div", "v2", "x0", to="v3"),
                call("addcmul", "x0", "v2", "x0", value=2.0, to="v4"),
                call("mul.scalar", "v2", 3.0, form="inplace", to="v5"),
            ),
        ),
    ),
)
