"""One call of an op and its backward passes, step by step: a contract decides what comes between.

Each pass starts from the same state, with fresh copies of the inputs, and restores all that the op
may change, as `amp_fuzz.check` does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch

from amp_fuzz.backends import prelude
from amp_fuzz.backends.harness import Observation, Runtime, changes, quiet
from amp_fuzz.backends.torch_state import restoring, torch_state
from amp_fuzz.cases.case import Plan
from amp_fuzz.cases.program import Autocast
from amp_fuzz.interfaces.check.call import Names, copier_of, entered, outputs_of, raised_by
from amp_fuzz.interfaces.check.subject import Subject

__all__ = ["Pass", "Passes", "contexts_shown"]

Contexts = tuple[Autocast, ...]


def contexts_shown(contexts: Contexts) -> str:
    """Return contexts for people."""
    words = (("disabled" if not c.enabled else c.dtype or "default dtype") for c in contexts)
    return ", ".join(words) or "no context"


@dataclass(slots=True)
class Pass:
    """One call of a subject.

    tensors: its inputs and what it holds, by name. outputs: what it returned, by name. state: what
    of the thread's state the call, inside the contexts, or a backward pass changed.
    """

    subject: Subject
    runtime: Runtime
    contexts: Contexts
    names: Names
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    state: str | None = None

    def forward(self) -> Observation:
        """Call it in its contexts."""
        seen = Observation()

        def run() -> None:
            with self.within(self.contexts):
                before = torch_state(self.runtime.device)
                try:
                    result = self.subject.function(*self.args, **self.kwargs)
                finally:
                    self.state = self.state or changes(before, torch_state(self.runtime.device))
            self.outputs = dict(outputs_of(result, numbers=False))

        _observed(seen, run)
        for name, tensor in self.outputs.items():
            seen.values[self.names.label("v", name)] = _copy(tensor)
        return seen

    def backward(self, *, under: Contexts = (), keep: bool = False) -> Observation:
        """Run a backward pass from every output, and return the gradients.

        under: the contexts around it. keep: retain the graph.
        """
        seen = Observation()
        for tensor in self.tensors.values():
            if tensor.is_leaf:
                tensor.grad = None
        starts = prelude.trains(self.outputs.values())  # type: ignore[no-untyped-call]
        cotangents = [prelude.cotangent(t) for t in starts]  # type: ignore[no-untyped-call]

        def run() -> None:
            with self.within(under):
                before = torch_state(self.runtime.device)
                try:
                    torch.autograd.backward(starts, cotangents, retain_graph=keep)
                finally:
                    self.state = self.state or changes(before, torch_state(self.runtime.device))

        if starts:
            _observed(seen, run)
        for name in self.leaves():
            label = self.names.label("w", f"{name}.grad", ".grad")
            seen.values[label] = _copy(self.tensors[name].grad)
        return seen

    def leaves(self) -> list[str]:
        """Return the names of its tensors that collect a gradient."""
        return [n for n, t in self.tensors.items() if t.requires_grad and t.is_leaf]

    def within(self, contexts: Contexts) -> Any:
        """Return a context manager that enters autocast contexts."""
        return entered(self.runtime, msgspec.structs.replace(Plan(), contexts=contexts))


@dataclass(frozen=True, slots=True)
class Passes:
    """Makes the passes of a subject under one autocast of a backend."""

    subject: Subject
    runtime: Runtime
    contexts: Contexts
    names: Names = field(default_factory=Names)

    @contextmanager
    def calling(
        self,
        *,
        trained: Collection[str] | None = None,
        copied: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Iterator[Pass]:
        """Prepare a call for a block, and restore everything after it.

        trained: the names of the tensors that require a gradient; None: those that do. copied:
        copies the inputs, instead of a plain copy.
        """
        subject, kept, restore = self.subject, self.subject.kept(), restoring()
        copy = copied or copier_of(self.runtime)
        with ExitStack() as stack:
            stack.callback(kept.restore)
            stack.callback(restore)
            stack.enter_context(quiet())
            held = subject.state().values()
            if copied is not None or any(t.device.type != self.runtime.device for t in held):
                stack.enter_context(subject.moved(copy))
            kept.begin(subject.seed)
            args, kwargs = subject.fresh(copy)
            given = Subject(subject.function, args, kwargs).inputs()
            tensors = {**given, **subject.state()}
            if trained is not None:
                for name, tensor in tensors.items():
                    if tensor.is_leaf and tensor.requires_grad:
                        tensor.requires_grad_(name in trained)
            yield Pass(subject, self.runtime, self.contexts, self.names, args, kwargs, tensors)

    def plain(self, *, under: Contexts = ()) -> Observation:
        """Return the outputs and the gradients of one call."""
        with self.calling() as one:
            return joined(one.forward(), lambda: one.backward(under=under))

    def bare(self) -> Passes:
        """Return the passes without a context."""
        return replace(self, contexts=())


def joined(first: Observation, then: Callable[[], Observation]) -> Observation:
    """Return both observations as one; the second is made only if the first did not raise."""
    if first.raised is not None:
        return first
    second = then()
    values: Mapping[str, torch.Tensor | None] = {**first.values, **second.values}
    return Observation(dict(values), second.raised)


def _observed(seen: Observation, run: Callable[[], None]) -> None:
    try:
        run()
    except Exception as error:  # the op's own; an interrupt passes
        seen.raised = raised_by(error)


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None:
        return None
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.detach().clone()
