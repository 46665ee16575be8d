"""Run a recording on JAX: op by op, or compiled as a whole, with its gradients by ``jax.vjp``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from jax import lax

from amp_fuzz.backends.jax.lowerings import (
    indexing,
    layers,
    linear,
    pointwise,
    products,
    reductions,
    sampling,
)
from amp_fuzz.backends.jax.lowerings.table import Array, cast, derived, find, spread
from amp_fuzz.backends.jax.recording import Place, Read, Recording, Step, dense

__all__ = ["LoweringError", "array", "labelled", "prepared", "pure", "replay", "tensor"]

# Importing them registers their lowerings.
TABLES = (indexing, layers, linear, pointwise, products, reductions, sampling)


class LoweringError(RuntimeError):
    """An op has no lowering, or its lowering returned another shape. The message says which."""


def replay(recording: Recording, *, jit: bool) -> dict[str, torch.Tensor | None]:
    """Return the results of a recording's program on JAX by label, gradients as ``w1.grad``."""
    return prepared(recording, jit=jit)()


def prepared(
    recording: Recording, *, jit: bool, strict: bool = False
) -> Callable[[], dict[str, torch.Tensor | None]]:
    """Return a function that runs a recording; if jitted, it compiles at the first call.

    strict: no excess precision, whatever XLA's flags.
    """
    run, given = pure(recording)
    options = {"xla_allow_excess_precision": False} if strict else None
    made = jax.jit(run, compiler_options=options) if jit else run
    return lambda: labelled(recording, made(*given))


def pure(recording: Recording) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a recording as a function of arrays, and the arrays.

    The function returns the observed values, and the gradients by label.
    """
    function = _program(recording)
    initial = {i: m.initial for i, m in enumerate(recording.memories) if m.initial is not None}
    trained = {i for i in initial if recording.starts and recording.memories[i].weight}
    weights = {i: array(t) for i, t in initial.items() if i in trained}
    others = {i: array(t) for i, t in initial.items() if i not in trained}
    drawn = [[array(t) for t in s.drawn] for s in recording.steps if s.drawn is not None]
    cotangents = [array(c) for _, c in recording.starts]

    def run(weights: Any, others: Any, drawn: Any, cotangents: Any) -> Any:
        if not recording.starts:
            return function(weights, others, drawn)[1], {}
        _, back, seen = jax.vjp(lambda w: function(w, others, drawn), weights, has_aux=True)
        # A complex gradient in torch is the conjugate of JAX's.
        pulled = jax.tree.map(_conjugate, back(list(map(_conjugate, cotangents)))[0])
        # Read here: outside, each reshape would be a separate compilation.
        gradients = {w: _read({at.memory: pulled[at.memory]}, at) for w, at in recording.weights}
        return seen, gradients

    return run, (weights, others, drawn, cotangents)


def labelled(recording: Recording, made: Any) -> dict[str, torch.Tensor | None]:
    """Return the results of the function of `pure` as tensors by label."""
    seen, gradients = made
    labels = (label for label, _ in recording.observed)
    found: dict[str, torch.Tensor | None] = dict(zip(labels, map(tensor, seen), strict=True))
    return found | {f"{label}.grad": tensor(g) for label, g in gradients.items()}


def _conjugate(x: Array) -> Array:
    return jnp.conj(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x


def _program(recording: Recording) -> Callable[..., Any]:
    """Return the program as a pure function of backward's starts and the observed values."""

    def program(weights: Any, others: Any, drawn: Any) -> Any:
        held: dict[int, Any] = {**others, **weights}
        turn = iter(drawn)
        for step in recording.steps:
            _take(recording, step, held, turn)
        starts = [_read(held, place) for place, _ in recording.starts]
        return starts, [_read(held, place) for _, place in recording.observed]

    return program


def _take(recording: Recording, step: Step, held: dict[int, Any], turn: Any) -> None:
    """Run one step."""
    if step.drawn is not None:
        results = next(turn)
    else:
        lowering = find(step.op)
        if lowering is None:
            raise LoweringError(f"aten::{step.op} has no lowering")

        def read(given: Read) -> Array:
            value = _read(held, given.place)
            trains = recording.memories[given.place.memory].trains
            return lax.stop_gradient(value) if given.stops and trains else value

        made = lowering(*_given(step.args, read), **_given(_meant(step.kwargs), read))
        results = list(made) if isinstance(made, (tuple, list)) else [made]
    for place, value in zip(step.writes, results, strict=False):
        if step.casts:
            memory = recording.memories[place.memory]
            value = _over(place, value, memory.dtype)
            if step.quiet and memory.trains and memory.dtype.is_floating_point:
                value = _unseen(_read(held, place), value)
        if tuple(value.shape) != place.shape:
            raise LoweringError(
                f"aten::{step.op} is lowered to {list(value.shape)}, not {list(place.shape)}"
            )
        _write(recording, held, place, value)


# Autograd does not see this: the new value has the derivative of the old one.
_unseen = derived(
    lambda old, new: new, lambda r, *_: jnp.ones_like(r), lambda r, *_: jnp.zeros_like(r)
)


def _over(place: Place, value: Array, dtype: torch.dtype) -> Array:
    """Return a value as it is written over an existing tensor."""
    value = cast(value, name_of(dtype))
    small = math.prod(value.shape) == math.prod(place.shape)
    return value.reshape(place.shape) if small else spread(value, place.shape)


_NOTHING = frozenset(
    ("layout", "device", "pin_memory", "memory_format", "non_blocking", "generator")
)


def _meant(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        n: v for n, v in kwargs.items() if n not in _NOTHING and not (n == "dtype" and v is None)
    }


def _given(tree: Any, read: Callable[[Read], Array]) -> Any:
    if isinstance(tree, Read):
        return read(tree)
    if isinstance(tree, tuple):
        return tuple(_given(part, read) for part in tree)
    if isinstance(tree, list):
        return [_given(part, read) for part in tree]
    if isinstance(tree, dict):
        return {name: _given(part, read) for name, part in tree.items()}
    return name_of(tree) if isinstance(tree, torch.dtype) else tree


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype, which NumPy shares."""
    return str(dtype).removeprefix("torch.")


# -- memory -------------------------------------------------------------------------------------
# A memory holds (value, place) if it was written whole, or else a flat array.


def _read(held: Mapping[int, Any], place: Place) -> Array:
    kept = held[place.memory]
    if not math.prod(place.shape):
        dtype = (kept[0] if isinstance(kept, tuple) else kept).dtype
        return jnp.zeros(place.shape, dtype)
    if isinstance(kept, tuple):
        value, at = kept
        if (at.shape, at.strides) == (place.shape, place.strides):
            return _turned(value, place, at)
        kept = _flat(value, at)
    order = dense(place, kept.size)
    if order is not None:
        value = kept.reshape([place.shape[d] for d in order])
        if order != tuple(range(len(order))):
            value = jnp.transpose(value, np.argsort(order).tolist())
        return _turned(value, place, None)
    # Dimensions of stride 0 repeat elements, whose gradients are summed.
    plain = [1 if s == 0 else n for n, s in zip(place.shape, place.strides, strict=True)]
    index = _elements(place, plain)
    return _turned(spread(kept[jnp.asarray(index)], place.shape), place, None)


def _elements(place: Place, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    index = np.full(shape, place.offset, np.int32)
    for axis, (size, stride) in enumerate(zip(shape, place.strides, strict=True)):
        steps = np.arange(size, dtype=np.int32) * stride
        index = index + steps.reshape([-1 if d == axis else 1 for d in range(len(shape))])
    return index


def _turned(value: Array, place: Place, at: Place | None) -> Array:
    """Return a place's value from its memory's: conjugated, negated, or unchanged."""
    conjugated = place.conjugated != (at.conjugated if at else False)
    negated = place.negated != (at.negated if at else False)
    value = jnp.conj(value) if conjugated else value
    return -value if negated else value


def _flat(value: Array, at: Place) -> Array:
    value = _turned(value, at, None)
    order = dense(at, value.size)
    assert order is not None
    return jnp.transpose(value, order).reshape(-1)


def _write(recording: Recording, held: dict[int, Any], place: Place, value: Array) -> None:
    memory = recording.memories[place.memory]
    if not math.prod(place.shape) and place.memory in held:
        return
    if dense(place, memory.count) is not None or not math.prod(place.shape):
        held[place.memory] = (value, place)
        return
    before = held.get(place.memory)
    if before is None:
        before = jnp.zeros((memory.count,), value.dtype)
    elif isinstance(before, tuple):
        before = _flat(*before)
    value = _turned(value, place, None)
    index = _elements(place, place.shape)
    held[place.memory] = before.at[jnp.asarray(index)].set(cast(value, before.dtype.name))


# -- arrays and tensors -------------------------------------------------------------------------

_SAME_BITS = {torch.bfloat16: (torch.int16, ml_dtypes.bfloat16)}


def array(tensor: torch.Tensor) -> Array:
    """Return a torch tensor as a JAX array, bit for bit."""
    bits, dtype = _SAME_BITS.get(tensor.dtype, (tensor.dtype, None))
    plain = tensor.resolve_conj().resolve_neg().contiguous().view(bits).numpy()
    # Not `jnp.asarray`: it compiles a copy for each new shape.
    return jax.device_put(plain if dtype is None else plain.view(dtype))


def tensor(array: Array) -> torch.Tensor:
    """Return a JAX array as a torch tensor, bit for bit."""
    plain = np.array(array)
    for dtype, (bits, same) in _SAME_BITS.items():
        if plain.dtype == same:
            return torch.from_numpy(plain.view(np.int16)).view(bits).view(dtype)
    return torch.from_numpy(plain)
