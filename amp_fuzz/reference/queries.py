"""Answer questions about autocast's state, and clear its cache, while the reference is in force.

Some modules of torch ask whether autocast is on and choose a path by the answer (the fast path of
`torch.nn.TransformerEncoderLayer`, for one). Under the reference torch's own autocast is off, so
the public query functions are wrapped for as long as any thread is inside a reference context:
they answer for the reference, in threads that are inside one. So is `torch.clear_autocast_cache`,
with which code drops casts of weights that it changes inside a context.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from amp_fuzz.reference.state import State

__all__ = ["Queries", "any_enabled", "enabled"]

_NAMES = (
    "is_autocast_enabled",
    "get_autocast_dtype",
    "is_autocast_cpu_enabled",
    "clear_autocast_cache",
)
# Private, and asked by torch.nn.RNNBase before it compares dtypes.
_ANY = "_is_any_autocast_enabled"
_DYNAMO = "torch._dynamo"


# torch's own autocast asks for what it will restore. A checkpoint that is recomputed under the
# reference would otherwise leave torch's autocast on for the rest of the backward pass.
_SAVES = torch.autocast.__enter__.__code__
_LEAVES = torch.autocast.__exit__.__code__


def enabled(state: State, device: str | None) -> bool:
    """Return whether autocast is on; without a device, whether any is.

    Modules ask without a device where their documentation says "autocast is disabled"
    (`torch.nn.MultiheadAttention`, conditions of the fast path).
    """
    return any_enabled(state) if device is None else state.enabled.get(device, False)


def any_enabled(state: State) -> bool:
    """Return whether the autocast of any device is on."""
    return any(state.enabled.values())


class Queries:
    """Wraps torch's query functions while `enter` was called more often than `leave`.

    state: returns that of this thread. dtype: the autocast dtype of a device type there. clear:
    clears the reference's cache.
    """

    def __init__(
        self,
        state: Callable[[], State],
        dtype: Callable[[str], torch.dtype],
        clear: Callable[[], None],
    ) -> None:
        self._state, self._dtype, self._clear_cache = state, dtype, clear
        self._lock = threading.Lock()
        self._depth = 0
        self._originals: dict[str, Any] = {}
        self._original_any: Callable[[], bool] | None = None

    def enter(self) -> None:
        """Start answering; calls nest."""
        with self._lock:
            self._depth += 1
            if self._depth > 1:
                return
            if _DYNAMO not in sys.modules and self not in sys.meta_path:
                sys.meta_path.insert(0, self)
            self._originals = {name: getattr(torch, name) for name in _NAMES}
            torch.is_autocast_enabled = self._is_enabled
            torch.get_autocast_dtype = self._get_dtype
            torch.is_autocast_cpu_enabled = lambda: self._is_enabled("cpu")
            torch.clear_autocast_cache = self._clear
            self._original_any = getattr(torch._C, _ANY, None)
            if self._original_any is not None:
                setattr(torch._C, _ANY, self._is_any_enabled)

    def leave(self) -> None:
        """Stop answering, at the outermost call."""
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                for name, function in self._originals.items():
                    setattr(torch, name, function)
                if self._original_any is not None:
                    setattr(torch._C, _ANY, self._original_any)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Put torch's own functions back for a block: TorchScript compiles calls of these only."""
        wrapped = {name: getattr(torch, name) for name in self._originals}
        for name, function in self._originals.items():
            setattr(torch, name, function)
        wrapped_any = getattr(torch._C, _ANY, None)
        if self._original_any is not None:
            setattr(torch._C, _ANY, self._original_any)
        try:
            yield
        finally:
            for name, function in wrapped.items():
                setattr(torch, name, function)
            if self._original_any is not None:
                setattr(torch._C, _ANY, wrapped_any)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> ModuleSpec | None:
        """Have dynamo imported with torch's own functions, since it keeps those that it meets.

        The first checkpoint, optimizer or transform of a process imports it. A finder of modules
        (`sys.meta_path`) is asked with these arguments.
        """
        if name != _DYNAMO:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            with self.suspended():
                execute(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _inside(self, *askers: Any) -> bool:
        """Return whether this thread is inside a reference context, and torch's own does not ask.

        A context of torch's own, as in the backward pass of a reentrant checkpoint, must restore
        torch's state, not the reference's. askers: the code of other functions that get torch's
        answer.
        """
        state = self._state()
        if not (state.nesting > 0 and state.answers):
            return False
        asker = sys._getframe(2).f_code  # of whoever called the function that calls this
        return asker is not torch.autocast.__enter__.__code__ and asker not in askers

    def _is_enabled(self, device_type: str | None = None) -> bool:
        if not self._inside(_SAVES):
            original = self._originals["is_autocast_enabled"]
            return bool(original() if device_type is None else original(device_type))
        state = self._state()
        return state.semantics.enabled(state, device_type)

    def _clear(self) -> None:
        if not self._inside(_LEAVES):
            self._originals["clear_autocast_cache"]()
        else:
            self._clear_cache()

    def _is_any_enabled(self) -> bool:
        if not self._inside() and self._original_any is not None:
            return bool(self._original_any())
        state = self._state()
        return state.semantics.any_enabled(state)

    def _get_dtype(self, device_type: str) -> torch.dtype:
        if not self._inside(_SAVES):
            original: Callable[[str], torch.dtype] = self._originals["get_autocast_dtype"]
            return original(device_type)
        return self._dtype(device_type)
