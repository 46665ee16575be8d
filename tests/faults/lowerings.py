"""Faults of the JAX backend: ways in which a lowering, or what runs it, could be wrong.

They live in the process that has JAX, which puts on the one whose name stands in a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from amp_fuzz.backends.harness import Observation
from amp_fuzz.backends.jax.backend import Program
from amp_fuzz.cases.case import Case

__all__ = ["FAULTS", "Faulty"]

Change = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextmanager
def _changed(changes: Mapping[str, Change]) -> Iterator[None]:
    """Put other functions into the table of lowerings for a block."""
    from amp_fuzz.backends.jax.lowerings import table as core

    before = dict(core.LOWERINGS)
    for name, change in changes.items():
        core.LOWERINGS[name] = change(before[name])
    core.find.cache_clear()
    try:
        yield
    finally:
        core.LOWERINGS.update(before)
        core.find.cache_clear()


def _narrow(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Compute in bfloat16 inside."""

    def narrow(x: Any, *args: Any, **kwargs: Any) -> Any:
        if x.dtype != "float32":
            return lowering(x, *args, **kwargs)
        return lowering(x.astype("bfloat16"), *args, **kwargs).astype(x.dtype)

    return narrow


def _unbiased(lowering: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, a, b, **kwargs: lowering(x * 0, a, b, **kwargs)


def _gain(lowering: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: lowering(*args, **kwargs) * 1.01


def _turned(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Change the sign of the gradient."""

    def turned(x: Any) -> Any:
        from jax import lax

        made = lowering(x)
        return lax.stop_gradient(made + made).astype(made.dtype) - made

    return turned


def _uncast(lowering: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *args, **kwargs: x


def _element(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Get the first element wrong."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        made = lowering(*args, **kwargs)
        return made.reshape(-1).at[:1].multiply(2).reshape(made.shape) if made.size else made

    return wrong


def _detached(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Lose the gradient of the second operand."""

    def detached(a: Any, b: Any, **kwargs: Any) -> Any:
        from jax import lax

        return lowering(a, lax.stop_gradient(b) if hasattr(b, "dtype") else b, **kwargs)

    return detached


FAULTS: Mapping[str, tuple[str, Callable[[], AbstractContextManager[None]]]] = {
    "narrow-softmax": (
        "softmax of float32 computes in bfloat16 inside",
        lambda: _changed({"_softmax": _narrow}),
    ),
    "narrow-sum": (
        "sums of float32 are taken in bfloat16",
        lambda: _changed({"sum": _narrow}),
    ),
    "dropped-bias": ("addmm forgets its bias", lambda: _changed({"addmm": _unbiased})),
    "gain": ("mm is 1 % too large", lambda: _changed({"mm": _gain})),
    "gradient-sign": (
        "the gradient of tanh has the wrong sign",
        lambda: _changed({"tanh": _turned}),
    ),
    "lost-gradient": (
        "mul gives its second operand no gradient",
        lambda: _changed({"mul": _detached}),
    ),
    "missing-cast": ("no cast is made", lambda: _changed({"_to_copy": _uncast})),
    "element": ("the first element of cat is doubled", lambda: _changed({"cat": _element})),
}
"""By name: what is wrong, in one line, and a context in which it is."""


class Faulty:
    """JAX with the fault whose name stands in a file; with none if it is empty."""

    def __init__(self, file: str, *args: Any) -> None:
        self.file, self.honest = Path(file), Program(*args)
        self.said, self.exclusive = self.honest.said, self.honest.exclusive

    def observe(self, case: Case) -> Observation:
        """Run a case under the fault."""
        name = self.file.read_text()
        if not name:
            return self.honest.observe(case)
        with FAULTS[name][1]():
            return self.honest.observe(case)

    def expect(self, case: Case) -> Observation:
        """Run a case under the reference."""
        return self.honest.expect(case)
