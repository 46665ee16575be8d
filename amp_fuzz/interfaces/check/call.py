"""Call the subject once, under one implementation of autocast, and observe the results."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

import amp_fuzz
from amp_fuzz.backends import prelude
from amp_fuzz.backends.harness import Observation, Raised, Runtime, changes
from amp_fuzz.backends.torch_state import chosen_dtypes, restoring, torch_state
from amp_fuzz.cases.case import Plan
from amp_fuzz.interfaces.check.redirect import contexts_of, threads_following
from amp_fuzz.interfaces.check.subject import Subject
from amp_fuzz.interfaces.check.trees import leaves_of
from amp_fuzz.reference.state import default_dtypes

__all__ = ["AFTER", "Names", "call", "copier_of", "entered", "outputs_of", "raised_by", "user_line"]

Invoke = Callable[..., Any]
AFTER = " after the call"


@dataclass(slots=True)
class Names:
    """The names of a call's values in reports, by label.

    Labels are as in a case: ``v3`` is an output, ``w2.grad`` the gradient of an input or of a
    tensor that the callable holds, ``b2`` such a tensor after the call; ``i4`` is an inner result.
    A name has the same label in every call, so values are compared by name. lost: the state that a
    call may have changed and that cannot be restored, each with the reason. numbers: the labels of
    Python numbers, which no shadow follows. dropped: those of inner results that only one side has.
    """

    of: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    lost: dict[str, None] = field(default_factory=dict)
    numbers: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)

    def label(self, letter: str, name: str, ending: str = "") -> str:
        """Return the label of a name, creating one if needed. ending: of the label."""
        if name not in self.labels:
            self.labels[name] = f"{letter}{self.counts[letter]}{ending}"
            self.of[self.labels[name]] = name
            self.counts[letter] += 1
        return self.labels[name]

    def complete(self, seen: Observation) -> None:
        """Mark outputs that another call returned, but this one did not, as missing."""
        if seen.raised is None:
            inside = {label: t for label, t in seen.values.items() if label.startswith("i")}
            outputs = {label: None for label in self.of if label.startswith("v")}
            seen.values = {**inside, **outputs, **seen.values}

    def __call__(self, label: str) -> str:
        """Return the name of a label."""
        return self.of.get(label, label)


def outputs_of(result: Any, *, numbers: bool) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that a call returned, by name; Python numbers too, if asked."""
    return [(name, tensor) for name, tensor, _ in _outputs(result, numbers=numbers)]


def _outputs(result: Any, *, numbers: bool) -> list[tuple[str, torch.Tensor, bool]]:
    """Return the tensors that a call returned, each with its name and whether it was a number."""
    found = []
    for path, leaf in leaves_of(result):
        number = isinstance(leaf, (bool, int, float))
        if numbers and number:
            leaf = torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else None)
        if isinstance(leaf, torch.Tensor):
            found.append((f"output{path}", leaf, number))
    return found


def call(
    subject: Subject,
    runtime: Runtime,
    plan: Plan,
    names: Names,
    *,
    invoke: Invoke | None = None,
    numbers: bool = False,
    redirect: bool = False,
) -> Observation:
    """Call a subject in the contexts of a plan, and its backward pass after them.

    invoke: replaces the call of the callable. redirect: ``torch.autocast`` in its own code becomes
    the runtime's too, and the threads that it starts follow. The subject's
    state is restored afterwards.
    """
    with default_dtypes(chosen_dtypes()):
        return _called(subject, runtime, plan, names, invoke, numbers, redirect)


def _called(
    subject: Subject,
    runtime: Runtime,
    plan: Plan,
    names: Names,
    invoke: Invoke | None,
    numbers: bool,
    redirect: bool,
) -> Observation:
    kept = subject.kept()
    seen = Observation()
    # Code may use torch's own switches under the reference too.
    before, restore = _state(runtime), restoring()
    start = time.perf_counter()
    copy = copier_of(runtime)
    try:
        with ExitStack() as stack:
            held = subject.state().values()
            moved = runtime.fake or any(t.device.type != runtime.device for t in held)
            inputs = None if runtime.fake else subject.fresh(copy)
            if redirect:
                stack.enter_context(contexts_of(runtime.autocast, asked=runtime.fake))
                stack.enter_context(threads_following(runtime.follow))
            stack.enter_context(runtime.scope())
            if moved:
                with _disable_current_modes() if not runtime.fake else nullcontext():
                    stack.enter_context(subject.moved(copy))
            kept.begin(subject.seed)
            args, kwargs = inputs or subject.fresh(copy)
            try:
                _drive(subject, runtime, plan, names, seen, (args, kwargs), invoke, numbers)
            except Exception as error:  # the callable's own; an interrupt passes
                seen.raised = raised_by(error)
        seen.leaked = changes(before, _state(runtime))
        if seen.leaked:
            runtime.reset()
    finally:
        restore()
        names.lost |= dict.fromkeys(kept.restore())
    seen.seconds = time.perf_counter() - start
    return seen


def _state(runtime: Runtime) -> dict[str, object]:
    return {**torch_state(runtime.device), **runtime.state()}


def _drive(
    subject: Subject,
    runtime: Runtime,
    plan: Plan,
    names: Names,
    seen: Observation,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    invoke: Invoke | None,
    numbers: bool,
) -> None:
    args, kwargs = inputs
    given = Subject(subject.function, args, kwargs).inputs()

    def observe(label: str, tensor: torch.Tensor | None) -> None:
        if tensor is None:
            seen.values[label] = None
            return
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        value = tensor.detach()
        seen.values[label] = value if runtime.fake else value.clone()
        if runtime.noted is not None:
            runtime.noted(label, tensor)

    with entered(runtime, plan):
        result = (subject.function if invoke is None else invoke)(*args, **kwargs)
    outputs = []
    for name, tensor, number in _outputs(result, numbers=numbers):
        label = names.label("v", name)
        names.numbers |= {label} if number else set()
        observe(label, tensor)
        outputs.append(tensor)
    tensors = {**given, **subject.state()}
    if runtime.fake:  # tensors that are not on the device are not compared there
        tensors = {n: t for n, t in tensors.items() if isinstance(t, FakeTensor)}
    if plan.backward != "none":
        starts = prelude.trains(outputs)  # type: ignore[no-untyped-call]
        if starts:
            cotangents = [prelude.cotangent(t) for t in starts]  # type: ignore[no-untyped-call]
            torch.autograd.backward(starts, cotangents, retain_graph=bool(subject.computed))
    for name, tensor in tensors.items():
        # The callable may have run backward itself, whatever the plan.
        trained = tensor.requires_grad and tensor.is_leaf
        if trained and (plan.backward != "none" or tensor.grad is not None):
            observe(names.label("w", f"{name}.grad", ".grad"), tensor.grad)
    for name, tensor in tensors.items():
        observe(names.label("b", f"{name}{AFTER}"), tensor)


@contextmanager
def entered(runtime: Runtime, plan: Plan) -> Iterator[None]:
    """Enter the contexts of a plan."""
    with ExitStack() as stack:
        for context in plan.contexts:
            dtype = None if context.dtype is None else getattr(torch, context.dtype)
            stack.enter_context(
                runtime.autocast(
                    context.device or runtime.device,
                    dtype=dtype,
                    enabled=context.enabled,
                    cache_enabled=context.cache_enabled,
                )
            )
        yield


def copier_of(runtime: Runtime) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that copies a tensor: with its strides, to the device, without history."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if runtime.fake:
            return torch.empty_strided(
                tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=runtime.device
            )
        tensor = tensor.detach()
        return tensor.clone() if tensor.device.type == runtime.device else tensor.to(runtime.device)

    return copy


_OURS = str(Path(amp_fuzz.__file__).parent)
_TORCH = str(Path(torch.__file__).parent)


def user_line() -> str:
    """Return the innermost line of the user's code in this call, ``model.py:12``, or ""."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code is not call.__code__:
        file = frame.f_code.co_filename
        if not file.startswith((_OURS, _TORCH, contextlib.__file__, "<")):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def raised_by(error: Exception) -> Raised:
    """Return an error, with the last line of the user's own code."""
    line, text = 0, ""
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not file.startswith((_OURS, _TORCH, "<")):
            line, text = traceback.tb_lineno, f"{Path(file).name}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return Raised(type(error).__name__, str(error), line, text)
