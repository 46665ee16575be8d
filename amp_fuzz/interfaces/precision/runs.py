"""Run a subject once: under autocast beside exact copies, without it, or with parts exempted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, TypeAlias

import msgspec
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import DefaultDeviceType

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
from amp_fuzz.interfaces.precision.pasting import Names, names_in, names_within
from amp_fuzz.interfaces.precision.sites import Place, Places, frame_here, place_here, raised_at
from amp_fuzz.interfaces.precision.watch import Watch
from amp_fuzz.patching import patched
from amp_fuzz.reference import log_kernels
from amp_fuzz.reference.shadow.copies import no_modes
from amp_fuzz.reference.shadow.twin import Redraw, Twin, TwinError, is_followed
from amp_fuzz.reference.shadow.written import SIXTEEN, calling

__all__ = ["Exempt", "Loss", "Runs", "Seen", "is_compared"]

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

    raised: the error of the callable, or None. contexts: those that the callable opened itself.
    """

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    raised: Exception | None = None
    contexts: list[Autocast] = field(default_factory=list)


@dataclass(slots=True)
class Runs:
    """Runs of one subject under the reference.

    contexts: around the call. loss: makes of what the callable returns what the backward pass
    starts from; None: its scalar outputs, or else every output, each with small numbers. names:
    what exempted lines read. native: whether runs of `tried` multiply with torch's own kernels of
    16 bits; else in float32, with one rounding, which is as exact and faster on many CPUs.
    """

    subject: Subject
    runtime: Runtime
    contexts: tuple[Autocast, ...]
    backward: bool
    loss: Loss | None = None
    drawn: Sequence[Any] = ()
    names: dict[Place, Names] = field(default_factory=dict)
    native: bool = False

    # -- kinds of runs ----------------------------------------------------------------------------

    def watched(self) -> tuple[Seen, dict[str, torch.Tensor], Watch]:
        """Run under autocast with exact copies; return them by name, and what was watched."""
        state = [t for t in self.subject.state().values() if is_followed(t)]
        exact: dict[str, torch.Tensor] = {}
        with followed(self.subject, lambda *called: None) as stack:
            watch = Watch(Places(stack), frozenset(t.untyped_storage()._cdata for t in state))

            def note(name: str, tensor: torch.Tensor) -> None:
                if is_compared(tensor) and is_followed(tensor):
                    exact[name] = watch.twin.exact(tensor)

            with _by_hand(watch, stack), log_kernels() as log:
                seen = self._run(self.contexts, note=note, mode=lambda: watch.twin)
        watch.casts = sum(len(call.casts) + call.sets_dtype for call in log)
        if seen.raised is not None:
            watch.raised(raised_at(seen.raised, self.subject.paths()), seen.raised)
        self.drawn = watch.twin.drawn
        watch.twin.forget()
        return seen, exact, watch

    def plain(self, *, written: bool = False, exact: dict[str, torch.Tensor] | None = None) -> Seen:
        """Run in float32: contexts of the callable's own cast nothing either.

        written: whether its code itself asks for 16 bits. Then it gets float32. If it raises so (a
        weight may be 16 bits wide), it gets what it asked for. exact: gets exact copies by name;
        they take the way of this run.
        """
        twin = Twin()

        def note(name: str, tensor: torch.Tensor) -> None:
            if exact is not None and is_compared(tensor) and is_followed(tensor):
                exact[name] = twin.exact(tensor)

        @contextmanager
        def around(*, cast: bool) -> Iterator[None]:
            with ExitStack() as stack:
                if self.drawn:
                    stack.enter_context(Redraw(self.drawn))
                if exact is not None:
                    stack.enter_context(twin)
                if not cast:
                    stack.enter_context(_Uncast())
                yield

        seen = self._run((), off=True, note=note, mode=partial(around, cast=not written))
        if written and seen.raised is not None:
            seen = self._run((), off=True, note=note, mode=partial(around, cast=True))
        return seen

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
                stack.enter_context(_Lines(exempt.lines, paths, self.runtime.device, self.names))
            return self._run(contexts, scale=scale, mode=mode)

    def _redraw(self) -> Callable[[], Any]:
        return lambda: Redraw(self.drawn, native=self.native)

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
        autocast = _told(runtime.autocast, seen.contexts, off=off)
        try:
            with ExitStack() as stack:
                stack.enter_context(quiet())
                stack.enter_context(contexts_of(autocast, asked=True))
                stack.enter_context(threads_following(runtime.follow))
                stack.enter_context(runtime.scope())
                stack.enter_context(_taken_for(runtime.device))
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
            with no_modes():  # the ops are not the callable's
                if by != 1:
                    own = own / by
                elif not name.endswith(".grad"):  # those are of this run alone
                    own = own.clone()
            seen.values[name] = own
            if note is not None:
                note(name, tensor)

        given = Subject(subject.function, args, kwargs).inputs()
        before = {name: _written(t) for name, t in {**given, **subject.state()}.items()}
        with entered(self.runtime, Plan(contexts=contexts)):
            result = subject.function(*args, **kwargs)
        outputs = outputs_of(result, numbers=False)
        for name, tensor in outputs:
            observe(name, tensor)
        for name, number in outputs_of(result, numbers=True):
            seen.values.setdefault(name, number)
        tensors = {**given, **subject.state()}
        if self.backward:
            starts = [t for _, t in outputs if t.requires_grad]
            if self.loss is not None:
                starts = [self.loss(result)]
            elif scalars := [t for t in starts if t.dim() == 0]:
                starts = scalars
            if starts:
                with no_modes():
                    cotangents = [_cotangent(t) * scale for t in starts]
                torch.autograd.backward(starts, cotangents, retain_graph=bool(subject.computed))
        for name, tensor in tensors.items():
            if tensor.is_leaf and tensor.requires_grad and tensor.grad is not None:
                observe(f"{name}.grad", tensor.grad, scale)
        for name, tensor in tensors.items():
            if not tensor.requires_grad and before.get(name) != _written(tensor):
                observe(f"{name}{AFTER}", tensor)


def is_compared(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has digits: it is not of whole numbers or booleans."""
    return tensor.is_floating_point() or tensor.is_complex()


def _cotangent(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.ones_like(tensor) if tensor.dim() == 0 else prelude.cotangent(tensor)  # type: ignore[no-untyped-call]
    assert isinstance(made, torch.Tensor)
    return made


def _written(tensor: torch.Tensor) -> tuple[int, int]:
    """Return what is another once a tensor is written to, or exchanged."""
    return id(tensor), 0 if tensor.is_inference() else tensor._version


def _told(autocast: Callable[..., Any], met: list[Autocast], *, off: bool) -> Callable[..., Any]:
    """Return autocast that notes each context that is opened. off: it casts nothing."""

    def context(device: str, dtype: Any = None, enabled: bool = True, cache: Any = None) -> Any:
        name = None if dtype is None else str(dtype).removeprefix("torch.")
        met.append(Autocast(enabled=enabled, dtype=name, device=device))
        return autocast(device, dtype, enabled and not off, cache)

    return context


@contextmanager
def _taken_for(device: str) -> Iterator[None]:
    """Let torch's Python code treat tensors of the CPU as those of a device, if it is another.

    A checkpoint restores the autocast of the device that it infers. Recurrent layers call one op
    of cuDNN, which autocast knows; the CPU's ops have products that it knows, and oneDNN's has not.
    """
    default = DefaultDeviceType.get_device_type()
    with ExitStack() as stack:
        DefaultDeviceType.set_device_type(device)
        stack.callback(DefaultDeviceType.set_device_type, default)
        for name in _RECURRENT if device != "cpu" else ():
            layers = _without_onednn(getattr(torch._VF, name))
            stack.enter_context(patched(torch._VF, name, layers))
        yield


def _without_onednn(layers: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with torch.backends.mkldnn.flags(enabled=False):
            return layers(*args)

    return run


_RECURRENT = ("gru", "lstm", "rnn_relu", "rnn_tanh")
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


class _Uncast(TorchFunctionMode):
    """Have calls of torch that ask for 16 bits give float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("bfloat16", "half"):
            return torch.Tensor.float(*args)
        args, kwargs = tree_map(
            lambda leaf: (
                torch.float32 if isinstance(leaf, torch.dtype) and leaf in SIXTEEN else leaf
            ),
            (args, kwargs or {}),
        )
        return func(*args, **kwargs)


class _Lines(TorchFunctionMode):
    """Run the calls of torch of some statements with autocast off, in float32."""

    def __init__(
        self,
        lines: frozenset[Place],
        stack: Sequence[str],
        device: str,
        names: dict[Place, Names],
    ) -> None:
        super().__init__()
        self.lines, self.stack, self.device, self.names = lines, stack, device, names
        self.met: set[Place] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        place = place_here(self.stack)
        if place not in self.lines or getattr(func, "__name__", "") in ("__get__", "backward"):
            return func(*args, **kwargs)
        frame = frame_here()
        if place not in self.met and isinstance(frame, FrameType):
            self.met.add(place)
            self.names[place] = self.names.get(place, Names()) | names_in(frame)

        def wide(leaf: Any) -> Any:
            low = isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float16, torch.bfloat16)
            return leaf.float() if low else leaf

        args, kwargs = tree_map(wide, (args, kwargs))
        with torch.autocast(self.device, enabled=False):
            return func(*args, **kwargs)
