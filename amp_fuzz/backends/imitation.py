"""What the reference does otherwise while it imitates a bug: a value, and how several become one.

This module knows no bug. `amp_fuzz.upstream` has the bugs, and says which are imitated.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from types import CodeType, FunctionType
from typing import Any, TypeAlias

from torch.utils._python_dispatch import TorchDispatchMode

from amp_fuzz.cases.case import Case
from amp_fuzz.reference import DOCUMENTED, Semantics, dispatch, under

__all__ = [
    "KNOWN",
    "NOTHING",
    "Composed",
    "Imitation",
    "Kernel",
    "Program",
    "asking",
    "compose",
    "current",
    "imitating",
    "inside",
]

Kernel: TypeAlias = Callable[..., Any]
"""Computes an op: given what computes it otherwise, and the arguments."""

Program: TypeAlias = Callable[..., Any]


def _same(semantics: Semantics) -> Semantics:
    return semantics


def _same_case(case: Case) -> Case:
    return case


def _same_program(program: Program, case: Case) -> Program:
    return program


def _always(case: Case) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Imitation:
    """What the reference does otherwise while it imitates a bug: nothing, where a field is left.

    semantics: the rules of autocast under the bug, from those without it.
    kernels: ops that are computed otherwise below autograd, by overload.
    rewrite: the case that the backend takes a case for.
    around: a context for the whole run, its threads and its backward passes.
    wrap: the program that the backend makes of that of a case.
    applies: False for a case in which it cannot change anything; it costs less than a run.
    follows: whether shadow arithmetic can follow it.
    """

    semantics: Callable[[Semantics], Semantics] = _same
    kernels: Mapping[Any, Kernel] = field(default_factory=dict)
    rewrite: Callable[[Case], Case] = _same_case
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    wrap: Callable[[Program, Case], Program] = _same_program
    applies: Callable[[Case], bool] = _always
    follows: bool = True

    def replaces(self) -> frozenset[str]:
        """Return the names of the rules that are others."""
        made = self.semantics(DOCUMENTED)
        names = (field.name for field in fields(Semantics))
        return frozenset(n for n in names if getattr(made, n) is not getattr(DOCUMENTED, n))

    def wraps(self) -> bool:
        """Return whether a program may become another one."""
        return self.wrap is not _same_program

    def surrounds(self) -> bool:
        """Return whether there is anything to enter for a run."""
        return bool(self.kernels) or self.around is not nullcontext

    def acts(self) -> bool:
        """Return whether it does anything beside replacing rules."""
        return self.wraps() or self.surrounds() or self.rewrite is not _same_case


def inside(
    context: Callable[[], AbstractContextManager[Any]],
) -> Callable[[Program, Case], Program]:
    """Return what makes of a program the same in a context, for `Imitation.wrap`.

    What compilers leave to eager is outside the context: also a checkpoint in which a graph breaks,
    of which dynamo compiles nothing (torch 2.13).
    """

    def wrap(program: Program, case: Case) -> Program:
        names = getattr(inspect.unwrap(program), "__globals__", {})

        def run(*inputs: Any) -> Any:
            with ExitStack() as stack:
                stack.enter_context(context())
                with _leaving(stack, context, names):
                    return program(*inputs)

        return run

    return wrap


@contextmanager
def _leaving(
    stack: ExitStack, context: Callable[[], AbstractContextManager[Any]], names: dict[str, Any]
) -> Iterator[None]:
    """Leave a context for each call of what a compiler leaves to eager, in a block.

    names: of a case's program: ``uncompiled`` and ``checkpoint``, where a graph breaks in it.
    """
    calls = {name: names[name] for name in ("uncompiled", "checkpoint") if "uncompiled" in names}
    outside = False

    def leaving(name: str) -> Program:
        def call(function: Program, *args: Any, **how: Any) -> Any:
            nonlocal outside
            if outside or (name == "checkpoint" and not _breaks(function.__code__)):
                return calls[name](function, *args, **how)
            stack.close()
            outside = True
            try:
                return calls[name](function, *args, **how)
            finally:
                stack.enter_context(context())
                outside = False

        return call

    names.update({name: leaving(name) for name in calls})
    try:
        yield
    finally:
        names.update(calls)


def _breaks(code: CodeType) -> bool:
    """Return whether a compiler ends a graph in a block of a program."""
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return not {"uncompiled", "decided"}.isdisjoint(code.co_names) or any(map(_breaks, inner))


class _Kernels(TorchDispatchMode):
    """Computes ops otherwise below autograd.

    An op that is made of others comes here whole in inference mode, and is taken apart.
    """

    def __init__(self, kernels: Mapping[Any, Kernel]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = kernels

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        kernel = self.kernels.get(func)
        if kernel is not None:
            with dispatch.exclude():
                return kernel(func, *args, **kwargs)
        with dispatch.kept():
            if dispatch.is_composite(func):
                with self:
                    return func.decompose(*args, **kwargs)
            return func(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Composed:
    """Several imitations as one. Another process makes it again, from the names.

    names: the ids of the bugs. by: ``module:function``, which composes imitations of such names.
    others: those that are of no bug; another process does not get them.
    """

    names: frozenset[str]
    parts: Mapping[str, Imitation]
    semantics: Semantics
    kernels: Mapping[Any, Kernel]
    by: str = ""
    others: Mapping[str, Imitation] = field(default_factory=dict)

    def __reduce__(self) -> Any:
        return _again, (self.by, self.names)

    def without(self, name: str) -> Composed:
        """Return the same without one of the bugs."""
        return _again(self.by, self.names - {name}).beside(self.others)

    def beside(self, others: Mapping[str, Imitation]) -> Composed:
        """Return the same with imitations around it that are of no bug."""
        if not others:
            return self
        made = compose({**self.parts, **others}, names=self.names, by=self.by)
        return replace(made, names=self.names, others=others)

    def rewrite(self, case: Case) -> Case:
        """Return the case that the backend takes a case for."""
        for part in self.parts.values():
            case = part.rewrite(case)
        return case

    def wrap(self, program: Program, case: Case) -> Program:
        """Return the program that the backend makes of that of a case.

        `inspect.unwrap` leads from it to the case's own.
        """
        for part in self.parts.values():
            made = part.wrap(program, case)
            if isinstance(made, FunctionType) and made is not program:
                made.__dict__.setdefault("__wrapped__", program)
            program = made
        return program

    def wraps(self) -> bool:
        """Return whether a program may become another one."""
        return any(part.wraps() for part in self.parts.values())

    def surrounds(self) -> bool:
        """Return whether there is anything to enter for a run."""
        return any(part.surrounds() for part in self.parts.values())

    @contextmanager
    def around(self) -> Iterator[None]:
        """Enter what is around a whole run, in each of its threads: the kernels come last."""
        with ExitStack() as stack:
            if self.kernels:
                stack.enter_context(_Kernels(self.kernels))
            for part in self.parts.values():
                stack.enter_context(part.around())
            yield

    def follows(self) -> bool:
        """Return whether shadow arithmetic can follow it."""
        return all(part.follows for part in self.parts.values())


def _again(by: str, names: frozenset[str]) -> Composed:
    module, _, function = by.partition(":")
    made: Composed = getattr(importlib.import_module(module), function)(names) if by else NOTHING
    return made


def compose(
    imitations: Mapping[str, Imitation], *, names: frozenset[str] = frozenset(), by: str = ""
) -> Composed:
    """Return imitations as one: the later stands around the earlier where both say something.

    Of two kernels of one op, the later is called.
    """
    semantics, kernels = DOCUMENTED, dict[Any, Kernel]()
    for imitation in imitations.values():
        semantics = imitation.semantics(semantics)
        kernels |= imitation.kernels
    return Composed(names or frozenset(imitations), imitations, semantics, kernels, by)


KNOWN: dict[str, Imitation] = {}
"""The imitations that may be asked for, by the id of the bug: filled by who has them."""

NOTHING = compose({})
"""Autocast as documented, on a backend without bugs."""

_current = NOTHING
_listener: Callable[[Semantics], Semantics] = _same


def current() -> Composed:
    """Return what is being imitated, in every thread."""
    return _current


@contextmanager
def imitating(composed: Composed) -> Iterator[None]:
    """Imitate for a block; the rules of autocast are of this thread, see `reference.inherited`."""
    global _current
    before, _current = _current, composed
    try:
        with under(_listener(composed.semantics)):
            yield
    finally:
        _current = before


@contextmanager
def asking() -> Iterator[set[str]]:
    """Collect the bugs, of those in `KNOWN`, whose rules the reference asks for in a block.

    It does the same with one that it does not ask for as without it. With them come those that do
    more than replace rules.
    """
    global _listener
    asked = {name for name, imitation in KNOWN.items() if imitation.acts()}
    names: dict[str, set[str]] = {}
    for name, imitation in KNOWN.items():
        for rule in imitation.replaces():
            names.setdefault(rule, set()).add(name)

    def noted(rule: Callable[..., Any], ids: set[str]) -> Callable[..., Any]:
        def asks(*args: Any, **kwargs: Any) -> Any:
            asked.update(ids)
            return rule(*args, **kwargs)

        return asks

    def listening(semantics: Semantics) -> Semantics:
        changes = {rule: noted(getattr(semantics, rule), ids) for rule, ids in names.items()}
        return replace(semantics, **changes)

    before, _listener = _listener, listening
    try:
        with under(listening(_current.semantics)):
            yield asked
    finally:
        _listener = before
