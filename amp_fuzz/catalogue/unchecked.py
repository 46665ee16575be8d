"""Ops that do not check the shapes of their inputs, and the shapes that are documented.

Torch raises for most shapes that do not fit. The kernels of these ops read past what they were
given instead: the process dies, or computes from whatever stands there. Programs are never drawn
so; a candidate of the minimiser may be (see docs/findings/recurrent-cell-shapes.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

__all__ = ["UNCHECKED", "Shape"]

Shape: TypeAlias = tuple[int, ...]


def _cell(x: Shape, state: Any, *weights: Any) -> bool:
    """Return whether a cell is given a batch of inputs and of states, as ``torch.nn`` calls it."""
    return all(len(shape) == 2 for shape in (x, *_shapes(state)))


def _layer(gates: int) -> Callable[..., bool]:
    def fits(x: Shape, state: Any, weights: Any, *flags: Any) -> bool:
        if isinstance(weights, tuple) or not _shapes(state):  # a packed sequence: it is not drawn
            return True
        hidden = _shapes(state)[0][-1:]
        tall = all(w[:1] == tuple(gates * h for h in hidden) for w in weights)
        return tall and all(len(shape) == 3 for shape in (x, *_shapes(state)))

    return fits


def _onednn(x: Shape, *args: Any) -> bool:
    weights, state, hidden = args[:4], args[4:6], args[9]
    return (
        len(x) == 3
        and all(w[:1] == (4 * hidden,) for w in weights)
        and all(len(s) == 2 for s in state)
    )


def _weight_norm(v: Shape, g: Shape, dim: int = 0) -> bool:
    return 0 not in v and g == tuple(size if i == dim else 1 for i, size in enumerate(v))


def _shapes(state: Any) -> Sequence[Shape]:
    return state if isinstance(state, list) else (state,)


UNCHECKED: Mapping[str, Callable[..., bool]] = {
    "lstm_cell": _cell,
    "gru_cell": _cell,
    "lstm": _layer(4),
    "gru": _layer(3),
    "mkldnn_rnn_layer": _onednn,
    "_weight_norm": _weight_norm,
}
"""By the name of torch's function: whether it is given shapes that it is documented for.

It takes the function's arguments, with a shape in the place of each tensor.
"""
