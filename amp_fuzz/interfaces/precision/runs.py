"""Run a subject once: under autocast with exact copies, without autocast, or with parts exempted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import msgspec
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from amp_fuzz.backends import prelude
from amp_fuzz.backends.harness import Runtime, quiet
from amp_fuzz.backends.torch_state import restoring
from amp_fuzz.cases.case import Plan
from amp_fuzz.cases.program import Autocast
from amp_fuzz.interfaces.check.call import AFTER, entered, outputs_of
from amp_fuzz.interfaces.check.redirect import contexts_of, threads_following
from amp_fuzz.interfaces.check.subject import Subject
from amp_fuzz.interfaces.check.trace import followed
from amp_fuzz.interfaces.precision.in_float32 import run_in_float32
from amp_fuzz.interfaces.precision.sites import Place, Places, place_here
from amp_fuzz.interfaces.precision.watch import Watch
from amp_fuzz.patching import patched
from amp_fuzz.reference.shadow.twin import Redraw, TwinError, is_followed
from amp_fuzz.reference.shadow.written import calling

__all__ = ["Exempt", "Loss", "Runs", "Seen"]

Loss: TypeAlias = Callable[[Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Exempt:
    """What runs in float32 with autocast off.

    modules: the paths of submodules, whose own statements are meant and not their children's.
    lines: statements.
    """

    modules: frozenset[str] = frozenset()
    lines: frozenset[Place] = frozenset()


@dataclass(slots=True)
class Seen:
    """What one run came to: values by name, in their own dtypes; gradients end with ``.grad``.

    raised: the error of the callable, or None.
    """

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    raised: Exception | None = None


@dataclass(slots=True)
class Runs:
    """Runs of one subject under the reference.

    contexts: around the call. loss: makes of what the callable returns what the backward pass
    starts from; None: its scalar outputs, or else every output, each with small numbers.
    """

    subject: Subject
    runtime: Runtime
    contexts: tuple[Autocast, ...]
    backward: bool
    loss: Loss | None = None
    drawn: Sequence[Any] = ()

    # -- kinds of runs ----------------------------------------------------------------------------

    def watched(self) -> tuple[Seen, dict[str, torch.Tensor], Watch]:
        """Run under autocast with exact copies; return them by name, and what was watched."""
        state = [t for t in self.subject.state().values() if is_followed(t)]
        exact: dict[str, torch.Tensor] = {}
        with followed(self.subject, lambda *called: None) as stack:
            watch = Watch(Places(stack), frozenset(t.untyped_storage()._cdata for t in state))

            def note(name: str, tensor: torch.Tensor) -> None:
                if tensor.is_floating_point() and is_followed(tensor):
                    exact[name] = watch.twin.exact(tensor)

            with _by_hand(watch, stack):
                seen = self._run(self.contexts, note=note, mode=lambda: watch.twin)
        self.drawn = watch.twin.drawn
        watch.twin.forget()
        return seen, exact, watch

    def plain(self) -> Seen:
        """Run without autocast: contexts of the callable's own cast nothing either."""
        return self._run((), off=True, mode=self._redraw() if self.drawn else None)

    def tried(
        self, exempt: Exempt = Exempt(), *, dtype: torch.dtype | None = None, scale: float = 1.0
    ) -> Seen:
        """Run under autocast with parts exempted, in another dtype, or with a scaled loss."""
        contexts = self.contexts
        if dtype is not None:
            name = str(dtype).removeprefix("torch.")
            contexts = tuple(msgspec.structs.replace(c, dtype=name) for c in contexts)
        with ExitStack() as stack:
            stack.enter_context(self._without(exempt.modules))
            mode = self._redraw()
            if exempt.lines:
                paths = stack.enter_context(followed(self.subject, lambda *called: None))
                stack.enter_context(_Lines(exempt.lines, paths, self.runtime.device))
            return self._run(contexts, scale=scale, mode=mode)

    def _redraw(self) -> Callable[[], Any]:
        return lambda: Redraw(self.drawn)

    @contextmanager
    def _without(self, names: frozenset[str]) -> Iterator[None]:
        """Exempt submodules for a block."""
        with ExitStack() as stack:
            for prefix, root in self.subject.modules.items():
                inside = names_within(prefix, names)
                if inside:
                    stack.callback(run_in_float32(root, inside, self.runtime.device))  # type: ignore[no-untyped-call]
            yield

    # -- a run ------------------------------------------------------------------------------------

    def _run(
        self,
        contexts: tuple[Autocast, ...],
        *,
        off: bool = False,
        scale: float = 1.0,
        note: Callable[[str, torch.Tensor], None] | None = None,
        mode: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> Seen:
        subject, runtime = self.subject, self.runtime
        kept, seen, restore = subject.kept(), Seen(), restoring()
        autocast = _disabled(runtime.autocast) if off else runtime.autocast
        try:
            with ExitStack() as stack:
                stack.enter_context(quiet())
                stack.enter_context(contexts_of(autocast, asked=True))
                stack.enter_context(threads_following(runtime.follow))
                stack.enter_context(runtime.scope())
                kept.begin(subject.seed)
                args, kwargs = subject.fresh(lambda tensor: tensor.detach().clone())
                if mode is not None:
                    stack.enter_context(mode())
                try:
                    self._drive(args, kwargs, contexts, scale, seen, note)
                except TwinError:
                    raise
                except Exception as error:  # the callable's own; an interrupt passes
                    seen.raised = error
        finally:
            restore()
            kept.restore()
        return seen

    def _drive(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        contexts: tuple[Autocast, ...],
        scale: float,
        seen: Seen,
        note: Callable[[str, torch.Tensor], None] | None,
    ) -> None:
        subject = self.subject

        def observe(name: str, tensor: torch.Tensor, by: float = 1.0) -> None:
            if tensor.layout is not torch.strided:
                tensor = tensor.to_dense()
            own = tensor.detach()
            if by != 1:
                own = own / by
            elif not name.endswith(".grad"):  # those are of this run alone
                own = own.clone()
            seen.values[name] = own
            if note is not None:
                note(name, tensor)

        given = Subject(subject.function, args, kwargs).inputs()
        with entered(self.runtime, Plan(contexts=contexts)):
            result = subject.function(*args, **kwargs)
        outputs = outputs_of(result, numbers=False)
        for name, tensor in outputs:
            observe(name, tensor)
        tensors = {**given, **subject.state()}
        if self.backward:
            starts = [t for _, t in outputs if t.requires_grad and t.is_floating_point()]
            if self.loss is not None:
                starts = [self.loss(result)]
            elif scalars := [t for t in starts if t.dim() == 0]:
                starts = scalars
            if starts:
                cotangents = [
                    (torch.ones_like(t) if t.dim() == 0 else prelude.cotangent(t)) * scale  # type: ignore[no-untyped-call]
                    for t in starts
                ]
                torch.autograd.backward(starts, cotangents, retain_graph=bool(subject.computed))
        for name, tensor in tensors.items():
            if tensor.is_leaf and tensor.requires_grad and tensor.grad is not None:
                observe(f"{name}.grad", tensor.grad, scale)
        for name, tensor in tensors.items():
            if not tensor.requires_grad:
                observe(f"{name}{AFTER}", tensor)


def names_within(prefix: str, names: frozenset[str]) -> frozenset[str]:
    """Return those paths that are below a prefix, without it."""
    if not prefix:
        return names
    start = f"{prefix}."
    return frozenset(n.removeprefix(start) for n in names if n.startswith(start)) | frozenset(
        "" for n in names if n == prefix
    )


def _disabled(autocast: Callable[..., Any]) -> Callable[..., Any]:
    def off(device: str, dtype: Any = None, enabled: bool = True, cache: Any = None) -> Any:
        return autocast(device, dtype, False, cache)

    return off


_METHODS = ("double", "float", "to", "type", "type_as")


@contextmanager
def _by_hand(watch: Watch, stack: Sequence[str]) -> Iterator[None]:
    """Have the watch know what the user's code casts to float32, also where that changes nothing.

    Methods are exchanged: under a `TorchFunctionMode` torch's modules leave their fast paths.
    """
    with ExitStack() as exits:
        for name in _METHODS:
            honest = getattr(torch.Tensor, name)

            def method(self: Any, *args: Any, _honest: Any = honest, **kwargs: Any) -> Any:
                made = _honest(self, *args, **kwargs)
                place = place_here(stack)
                if place is not None and place.file:
                    watch.wide(made, place)
                return made

            exits.enter_context(patched(torch.Tensor, name, method))
        exits.enter_context(calling())  # around them: it looks at who calls
        yield


class _Lines(TorchFunctionMode):
    """Run the calls of torch of some statements with autocast off, in float32."""

    def __init__(self, lines: frozenset[Place], stack: Sequence[str], device: str) -> None:
        super().__init__()
        self.lines, self.stack, self.device = lines, stack, device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        place = place_here(self.stack)
        if place not in self.lines or getattr(func, "__name__", "") in ("__get__", "backward"):
            return func(*args, **kwargs)

        def wide(leaf: Any) -> Any:
            low = isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float16, torch.bfloat16)
            return leaf.float() if low else leaf

        args, kwargs = tree_map(wide, (args, kwargs))
        with torch.autocast(self.device, enabled=False):
            return func(*args, **kwargs)
