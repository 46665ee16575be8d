"""Find what a callable does against autocast's policy: casts, contexts, Functions.

The callable runs once more under the reference, and its Python calls of torch are observed. A note
does not say that something is wrong: the author may have meant it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias
from unittest import mock

import msgspec
import torch
from torch.overrides import TorchFunctionMode

import amp_fuzz
from amp_fuzz.backends.harness import quiet
from amp_fuzz.backends.reference import ReferenceRuntime
from amp_fuzz.cases.case import Plan
from amp_fuzz.findings.remedies import lacking
from amp_fuzz.interfaces.check.call import Names, call
from amp_fuzz.interfaces.check.contexts import Entered, Opened
from amp_fuzz.interfaces.check.result import OwnCast
from amp_fuzz.interfaces.check.subject import Subject
from amp_fuzz.interfaces.check.trace import followed
from amp_fuzz.interfaces.check.trees import leaves_of
from amp_fuzz.reference import DEVICES, Policy, log_kernels, snapshot

__all__ = ["lacking", "merged", "own_casts"]

_HALVES = (torch.float16, torch.bfloat16)
_CASTING = ("bfloat16", "half", "to", "type", "type_as")
_KEEPING = (Policy.FP32, Policy.FP32_SET_OPT_DTYPE, Policy.FP32_APPEND_DTYPE)
_OURS = str(Path(amp_fuzz.__file__).parent) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_CONTEXTS = tuple(str(Path(_TORCH, at, "amp", "autocast_mode.py")) for at in ("", "cpu", "cuda"))

_Kind: TypeAlias = Literal["cast", "lowered", "region", "function"]
_ADVICE: dict[str, str] = {
    "cast": "Drop the cast, or cast to torch.get_autocast_dtype(): float16 and bfloat16 differ in "
    "range and digits, and many ops refuse or promote a mix.",
    "lowered": "Keep it in float32: autocast casts it down for the ops that take less.",
    "region": "Open the inner context without dtype=, unless you mean a second 16-bit dtype.",
    "function": "Decorate forward with torch.amp.custom_fwd and backward with "
    "torch.amp.custom_bwd: otherwise autocast is off in the backward pass.",
}


def own_casts(
    subject: Subject, reference: ReferenceRuntime, plan: Plan
) -> tuple[list[OwnCast], list[Opened]]:
    """Return the own casts of a subject's call under the reference, and facts of its contexts."""
    runtime = reference.runtime
    with quiet(), followed(subject, lambda *called: None) as stack:
        watch = _Watch(runtime.device, stack)

        def invoke(*args: Any, **kwargs: Any) -> Any:
            with watch.applied(), watch.entered.watching(), watch:
                return subject.function(*args, **kwargs)

        runtime = replace(runtime, autocast=watch.opened(runtime.autocast))
        forward = _without_backward(plan)
        call(subject, runtime, forward, Names(), invoke=invoke, redirect=True)
    return watch.notes, watch.entered.opened()


def merged(found: Sequence[OwnCast]) -> tuple[OwnCast, ...]:
    """Merge equal notes, and join their devices."""
    devices: dict[OwnCast, dict[str, None]] = {}
    for note in found:
        devices.setdefault(replace(note, devices=()), {}).update(dict.fromkeys(note.devices))
    return tuple(replace(note, devices=tuple(names)) for note, names in devices.items())


def _without_backward(plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, backward="none")


class _Watch(TorchFunctionMode):
    """Observes calls of torch. stack: the paths of the submodules being called."""

    def __init__(self, device: str, stack: Sequence[str]) -> None:
        super().__init__()
        self.device, self.stack = device, stack
        self.entered = Entered(device, _line)
        self.notes: list[OwnCast] = []
        self.kept: dict[int, torch.Tensor] = {}
        self.reached = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with log_kernels() as log:
            made = func(*args, **(kwargs or {}))
        self.reached += len(log)
        self.entered.meet(args, kwargs, made)
        name = str(getattr(func, "__name__", ""))
        if name in _CASTING and args and isinstance(args[0], torch.Tensor):
            self._cast(name, args[0], made)
        elif log and log[-1].policy in _KEEPING:
            self.kept |= {
                id(leaf): leaf
                for _, leaf in leaves_of(made)
                if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float32
            }
        return made

    def _cast(self, name: str, given: torch.Tensor, made: Any) -> None:
        low = _autocast(given.device.type)
        if low is None or not isinstance(made, torch.Tensor) or made.dtype not in _HALVES:
            return
        if made.dtype == given.dtype or not given.is_floating_point():
            return
        dtypes = _short(given.dtype), _short(made.dtype)
        if made.dtype != low:
            text = f".{name}() casts {dtypes[0]} to {dtypes[1]} under {_short(low)} autocast"
            self._note("cast", name, *dtypes, text)
        elif id(given) in self.kept:
            text = f".{name}() casts to {dtypes[1]} what autocast keeps in float32"
            self._note("lowered", name, *dtypes, text)

    def opened(self, implementation: Callable[..., Any]) -> Callable[..., Any]:
        """Return an implementation of autocast that notes the contexts of the user's code."""

        def autocast(device: str, *args: Any, **kwargs: Any) -> Any:
            context, outer = implementation(device, *args, **kwargs), _autocast(device)
            if context.enabled and outer in _HALVES and context.dtype in _HALVES:
                given, made = _short(outer), _short(context.dtype)
                text = f"a context of {made} is opened under {given} autocast"
                if given != made:
                    self._note("region", "torch.autocast", given, made, text)
            return context

        return autocast

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Note the autograd Functions of the user's code that meet autocast undecorated."""
        # Until 2.13 it is a class method in Python, since 2.15 one in C++.
        honest = torch.autograd.Function.__dict__["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            before = self.reached
            with log_kernels() as log:
                made = honest.__get__(None, cls)(*args, **kwargs)
            self.reached += len(log)
            wanted = " and ".join(lacking(cls))
            if self.reached > before and wanted and cls.__module__.partition(".")[0] != "torch":
                text = f"the forward of {cls.__qualname__} meets autocast without {wanted}"
                self._note("function", cls.__qualname__, "", "", text)
            return made

        with mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)):
            yield

    def _note(self, kind: _Kind, op: str, given: str, made: str, text: str) -> None:
        if line := _line():
            module = self.stack[-1] if self.stack else ""
            found = OwnCast(
                kind=kind,
                line=line,
                module=module,
                op=op,
                given=given,
                made=made,
                text=text,
                advice=_ADVICE[kind],
                devices=(self.device,),
            )
            self.notes.append(found)


def _autocast(device: str) -> torch.dtype | None:
    """Return the dtype of the reference's autocast for a device, or None if it is off."""
    if device not in DEVICES:
        return None
    _, dtype, enabled, *_ = snapshot(device).contexts[0]
    return dtype if enabled else None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _line() -> str:
    """Return the line of the user's code that calls torch now, ``model.py:12``; "" for torch's own.

    Methods of contexts, and of contextlib, are skipped.
    """
    frame: Any = sys._getframe()
    files = (_OURS, *_CONTEXTS, contextlib.__file__, "<")
    while frame is not None and frame.f_code.co_filename.startswith(files):
        if frame.f_code is call.__code__:  # the contexts of the plan
            return ""
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_TORCH):
        return ""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
