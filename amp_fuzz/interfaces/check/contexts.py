"""The autocast contexts that checked code enters, and what is to be known of them.

They are observed in the run under the reference that finds the code's own casts.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.amp.autocast_mode import autocast

from amp_fuzz.backends import Backend
from amp_fuzz.backends.torch_state import chosen_dtypes
from amp_fuzz.cases.program import Autocast
from amp_fuzz.findings.contexts import Fact, by_dtype, without_dtype, without_tensors
from amp_fuzz.interfaces.check.result import Ran
from amp_fuzz.interfaces.check.trees import leaves_of
from amp_fuzz.patching import patched
from amp_fuzz.reference import load_table
from amp_fuzz.reference.state import here

__all__ = ["Entered", "Opened", "around", "noted"]

_MOST = 3  # lines of a note


@dataclass(frozen=True, slots=True)
class Opened:
    """A fact of a context, and the line that enters it. device: of the call's tensors."""

    device: str
    where: str
    fact: Fact


@dataclass(slots=True)
class Entered:
    """Takes in the contexts that code enters in one run under the reference, in one thread.

    device: of the run. line: returns the user's line that runs now, "" for code of torch's own.
    inside: the contexts for other devices that are not left yet. tensors: by device and line of
    such a context, where the tensors in it are.
    """

    device: str
    line: Callable[[], str]
    found: dict[Opened, None] = field(default_factory=dict)
    inside: list[tuple[Any, tuple[str, str]]] = field(default_factory=list)
    tensors: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    thread: int = field(default_factory=threading.get_ident)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take in the contexts of a block, in which they are the reference's already."""
        init: Any = autocast.__init__
        enter: Any = autocast.__enter__
        leave: Any = autocast.__exit__

        def __init__(context: Any, device_type: str, dtype: Any = None, *args: Any,
                     **more: Any) -> None:  # fmt: skip
            init(context, device_type, dtype, *args, **more)
            chosen = {**chosen_dtypes(), **here().dtypes}
            context._is_default = dtype is None and device_type not in chosen

        def __enter__(context: Any) -> Any:
            if threading.get_ident() == self.thread:
                self._enter(context)
            return enter(context)

        def __exit__(context: Any, *error: Any) -> Any:
            if threading.get_ident() == self.thread:
                self._leave(context)
            return leave(context, *error)

        changed = {"__init__": __init__, "__enter__": __enter__, "__exit__": __exit__}
        with ExitStack() as stack:
            for name, method in changed.items():
                stack.enter_context(patched(autocast, name, method))
            yield

    def _enter(self, context: Any) -> None:
        line = _decorated() or self.line()
        # One that was made before this run, as a decorator is, does not say what it was asked for.
        asked = getattr(context, "_asked", None)
        dtype, enabled, _ = asked or (context.fast_dtype, context._enabled, None)
        if not line:
            return
        if context.device != self.device:
            # With enabled=False, it says nothing where no autocast is on.
            if enabled or asked is None or here().devices():
                key = context.device, line
                self.tensors.setdefault(key, set())
                self.inside.append((context, key))
            return
        fact = None
        if enabled and dtype is not None:
            fact = by_dtype(self.device, str(dtype).removeprefix("torch."))
        elif enabled and getattr(context, "_is_default", False):
            fact = without_dtype(self.device)
        if fact is not None:
            self.found[Opened(self.device, line, fact)] = None

    def _leave(self, context: Any) -> None:
        """Forget a context, which a generator may leave before one that was entered later."""
        for entry in reversed(self.inside):
            if entry[0] is context:
                self.inside.remove(entry)
                return

    def meet(self, *trees: Any) -> None:
        """Take in the tensors of a call of torch."""
        if self.inside:
            leaves = (leaf for tree in trees for _, leaf in leaves_of(tree))
            devices = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
            for _, key in self.inside:
                self.tensors[key] |= devices

    def opened(self) -> list[Opened]:
        """Return the facts of the contexts that were entered."""
        idle = [
            Opened(self.device, line, without_tensors(device, ", ".join(sorted(seen))))
            for (device, line), seen in self.tensors.items()
            if seen and device not in seen
        ]
        return [*self.found, *idle]


def _decorated() -> str:
    """Return the line of the function that is called, if a context that decorates it is entered."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name == "__enter__":
        frame = frame.f_back
    if frame is None or frame.f_code.co_name != "decorate_autocast":
        return ""
    code = getattr(frame.f_locals.get("func"), "__code__", None)
    return "" if code is None else f"{Path(code.co_filename).name}:{code.co_firstlineno}"


def around(context: Autocast, devices: Sequence[str]) -> Iterator[Opened]:
    """Yield the facts of the context around the call, on the devices where it runs."""
    where = "the context around the call"
    chosen = chosen_dtypes()
    for device in devices if context.enabled else ():
        if context.dtype is not None:
            fact = by_dtype(device, context.dtype)
        else:
            defaults = {load_table(d).default_dtype for d in devices if d not in chosen}
            fact = without_dtype(device) if len(defaults) > 1 else None
        if fact is not None:
            yield Opened(device, where, fact)


def noted(
    runs: Sequence[Ran], backends: Iterable[Backend], opened: Iterable[Opened]
) -> tuple[Ran, ...]:
    """Return the results, with a note for each fact, at the first that is of its device."""
    devices = {backend.name: backend.device for backend in backends}
    places: dict[str, dict[Opened, None]] = {}
    for one in opened:
        places.setdefault(one.fact.message, {})[one] = None
    made = list(runs)
    for found in places.values():
        facts = {one.device: one.fact for one in found}
        own = [i for i, run in enumerate(made) if devices[run.backend] in facts]
        at = min(own, key=lambda i: made[i].status == "skipped")
        lines = list(dict.fromkeys(one.where for one in found))
        more = f" and {len(lines) - _MOST} more" if len(lines) > _MOST else ""
        fact = facts[devices[made[at].backend]]
        note = fact.note(made[at].backend, ", ".join(lines[:_MOST]) + more)
        made[at] = replace(made[at], notes=(*made[at].notes, note))
    return tuple(made)
