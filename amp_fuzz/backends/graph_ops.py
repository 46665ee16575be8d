"""Custom ops of the reference that TorchScript's graphs have whole, as they do torch's.

A graph names a custom op: it runs with its own autocast rule wherever the graph runs. The
reference's custom ops are Python, so here each is the kernel of an op of the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from amp_fuzz.reference.custom_ops import CustomOp

__all__ = ["graph_op"]

_NAMESPACE = "amp_fuzz_graphs"
_library: list[torch.library.Library] = []
_names: dict[tuple[str, str], str] = {}  # of an op and its schema
_latest: dict[str, _GraphOp] = {}

_running = ContextVar("whether the kernel of such an op is running", default=False)


class _GraphOp(CustomOp):
    """A custom op of the reference whose calls are calls of an op of the dispatcher.

    That has the name that it has in torch's own ops.
    """

    def __init__(self, body: Callable[..., Any], overload: Any) -> None:
        super().__init__(body)
        self._opoverload = overload

    def _differentiable(self, args: Sequence[Any]) -> Any:
        return super()._differentiable(args) if _running.get() else self._opoverload(*args)


def graph_op(name: str, body: Callable[..., Any], *, mutates_args: Iterable[str]) -> CustomOp:
    """Like `amp_fuzz.reference.custom_op`, for a program that becomes a graph.

    The latest op of a name and schema is the one that graphs run.
    """
    schema = torch.library.infer_schema(body, mutates_args=tuple(mutates_args))
    own = _defined(name, schema)
    made = _GraphOp(body, getattr(getattr(torch.ops, _NAMESPACE), own).default)
    _latest[own] = made
    return made


def _defined(name: str, schema: str) -> str:
    """Return the name of an op of the dispatcher, which is defined at the first call."""
    if (own := _names.get((name, schema))) is None:
        own = _names[name, schema] = f"{name.replace('::', '_')}_{len(_names)}"
        if not _library:
            _library.append(torch.library.Library(_NAMESPACE, "DEF"))
        _library[0].define(own + schema)
        _library[0].impl(own, _kernel(own), "CompositeImplicitAutograd")
    return own


def _kernel(name: str) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        with _run():
            return _latest[name](*args)

    return kernel


@contextmanager
def _run() -> Iterator[None]:
    token = _running.set(True)
    try:
        yield
    finally:
        _running.reset(token)
