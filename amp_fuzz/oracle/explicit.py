"""The explicit program of a case: the casts that autocast makes are statements, autocast is gone.

It is built from the log of the reference. It is used only as far as it proves itself: a label
counts if the reference computes the same bits for it in both programs. A statement whose casts are
inside it (a module, a composite op, a custom function) gets casts of its inputs instead, if the
reference then gives the same values. Otherwise that statement alone stays under autocast.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from amp_fuzz import reference
from amp_fuzz.backends import harness
from amp_fuzz.backends.harness import Observation
from amp_fuzz.backends.reference import ReferenceRuntime, surrounded
from amp_fuzz.cases.case import Case, unentered, uses_autocast
from amp_fuzz.cases.program import (
    FLOAT_DTYPES,
    Autocast,
    DType,
    Node,
    ProgramError,
    Ref,
    Region,
    Statement,
    returning_all,
    statements,
    substituted,
    transform,
    uses,
)
from amp_fuzz.catalogue import CATALOGUE, check
from amp_fuzz.oracle.compare import compare
from amp_fuzz.oracle.labels import named
from amp_fuzz.reference import KernelCall

if TYPE_CHECKING:
    from amp_fuzz.oracle.trial import Trial

__all__ = ["Explicit", "calls_of", "explicit"]

_TRIES = (
    24  # reference runs for one case; each removes one statement from those that are written out
)


@dataclass(frozen=True, slots=True)
class Explicit:
    """A case without autocast that computes the same, as far as it goes.

    case: the explicit program. expected: what the reference makes of it. kept: the names of values
    that statements under autocast compute, because their casts cannot be written.
    """

    case: Case
    expected: Observation
    kept: frozenset[str] = frozenset()


_Calls = Mapping[int, tuple[Mapping[int, str], list[KernelCall]]]


def calls_of(case: Case, runtime: ReferenceRuntime, dtypes: dict[str, str] | None = None) -> _Calls:
    """Return, for each statement's first run, the names of tensors by id and its kernel calls.

    dtypes: gets the dtype of each value that a statement finds.
    """
    found: dict[int, tuple[dict[int, str], list[KernelCall]]] = {}
    starts: list[tuple[int, int]] = []
    with reference.log_kernels() as log:

        def mark(i: int, names: dict[str, Any]) -> None:
            starts.append((i, len(log)))
            if i not in found:
                found[i] = ({id(value): name for name, value in names.items()}, [])
            if dtypes is not None:
                tensors = {n: v for n, v in names.items() if isinstance(v, torch.Tensor)}
                dtypes.update({n: str(v.dtype).removeprefix("torch.") for n, v in tensors.items()})

        harness.run_marked(case, surrounded(runtime.runtime), mark)
    ends = [n for _, n in starts[1:]] + [len(log)] if starts else []
    for (i, start), end in reversed(list(zip(starts, ends, strict=True))):
        found[i][1][:] = log[start:end]
    return found


def explicit(trial: Trial, changing: Set[str] = frozenset()) -> Explicit | None:
    """Return the explicit program of a trial's case, or None if there is none.

    There is none for a case without autocast, or whose autocast stays around every statement, or
    for one that stands for a callable, or whose calls are cast in different ways. changing: names
    of values that change from run to run, in the reference too: these prove nothing.
    """
    case = trial.case
    if case.plan.later:
        return None
    plain = _unwrapped(case)
    if plain is None or any(s.op not in CATALOGUE for s in statements(case.program.body)):
        return None
    dtypes: dict[str, str] = {}
    with trial.within_scope():
        calls = calls_of(case, trial.backend.reference(), dtypes)
    whole = trial.refer(_all(case))
    writer = _Writer(case, plain, calls, dtypes)
    for _ in range(_TRIES):
        made = writer.case()
        try:
            check(made.program)
        except ProgramError:  # too many contexts in one another
            return None
        again, values = trial.refer(_all(made)), trial.backend.values
        wrong = _unlike(whole, again, writer, changing, values=values)
        if wrong is None:
            return Explicit(made, trial.refer(made), writer.kept())
        if not writer.give_up(wrong):
            return None
    return None


def _all(case: Case) -> Case:
    """Return a case that returns all values, but those that only the explicit program has."""
    program = returning_all(case.program)
    mine = tuple(n for n in program.outputs if not n.startswith(_FRESH))
    return msgspec.structs.replace(case, program=msgspec.structs.replace(program, outputs=mine))


def _unwrapped(case: Case) -> Case | None:
    """Return a case with the plan of one without autocast, its program as it is; None: no such."""
    if not uses_autocast(case):
        return None
    return unentered(case).with_program(body=case.program.body)


_FRESH = "v9000"


def _unlike(
    whole: Observation, made: Observation, writer: _Writer, changing: Set[str], *, values: bool
) -> int | None:
    """Return the number of the first statement whose value differs or that raises, or None."""

    def skipped(label: str) -> bool:
        return label.endswith(".grad") or named(label) in changing

    found = compare(whole, made, values=values, skip=skipped)
    if found is not None and found.kind not in ("raise", "state"):
        return writer.made.get(named(found.where), -1)
    if made.raised is None or whole.raised is not None:
        return None
    return writer.made.get(re.split(" = |, ", made.raised.text)[0], -1)


@dataclass(slots=True)
class _Writer:
    """Writes the explicit program. how: for each statement, how far its ways have been tried."""

    of: Case
    plain: Case
    calls: _Calls
    dtypes: Mapping[str, str]
    how: dict[int, int] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: iter(()))
    _fresh: Iterator[int] = field(default_factory=lambda: iter(()))
    _cached: dict[tuple[str, str], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for i, s in enumerate(statements(self.of.program.body)):
            self.made |= dict.fromkeys((n for n in s.outputs if n != "_"), i)

    def give_up(self, number: int) -> bool:
        """Write a statement in the next way; whether there was one."""
        if number < 0:
            return False
        body = list(statements(self.of.program.body))
        ways = self.ways(number, body[number])
        at = self.how.get(number, 0)
        if at >= len(ways):
            return False
        self.how[number] = at + 1
        return True

    def kept(self) -> frozenset[str]:
        """Return the names of the values of the statements that stay under autocast."""
        body = list(statements(self.of.program.body))
        names = set()
        for i, at in self.how.items():
            if at >= len(self.ways(i, body[i])):
                names |= {n for n in body[i].outputs if n != "_"}
        return frozenset(names)

    def case(self) -> Case:
        """Return the explicit program as it is written now."""
        self._numbers, self._fresh = iter(range(10**6)), iter(range(10**4))
        self._cached = {}
        plan = self.of.plan
        around = () if plan.thread == "inside" else plan.contexts
        body = self._body(self.of.program.body, around)
        return self.plain.with_program(body=self._entered(body))

    def _entered(self, body: tuple[Node, ...]) -> tuple[Node, ...]:
        """Return a body after casts of the inputs that are cast where the program is entered."""
        given = {spec.name: spec.dtype for spec in self.of.program.inputs}
        casts = {n: self.dtypes[n] for n in given if self.dtypes.get(n, given[n]) != given[n]}
        names = {name: f"{_FRESH}{next(self._fresh):04}" for name in casts}
        before = [_to(name, dtype, names[name]) for name, dtype in casts.items()]
        return (*before, *transform(body, statement=lambda node: (substituted(node, names),)))

    def _body(self, body: tuple[Node, ...], contexts: tuple[Autocast, ...]) -> tuple[Node, ...]:
        nodes: list[Node] = []
        for node in body:
            if isinstance(node, Statement):
                nodes += self._statement(next(self._numbers), node, contexts)
            elif isinstance(node.context, Autocast):
                nodes += self._body(node.body, (*contexts, node.context))
            else:
                nodes.append(Region(node.context, self._body(node.body, contexts)))
        return tuple(nodes)

    def _statement(
        self, number: int, node: Statement, contexts: tuple[Autocast, ...]
    ) -> list[Node]:
        ways = self.ways(number, node)
        at = self.how.get(number, 0)
        if at < len(ways):
            return [*ways[at](node)]
        kept: Node = node
        for context in reversed(contexts):
            kept = Region(context, (kept,))
        return [kept]

    def ways(self, number: int, node: Statement) -> list[Callable[[Statement], list[Statement]]]:
        """Return the ways in which a statement may be written without autocast, likeliest first."""
        names, log = self.calls.get(number, ({}, []))
        touched = [c for c in log if c.casts or c.sets_dtype]
        if not touched:
            return [lambda s: [s]]
        ways: list[Callable[[Statement], list[Statement]]] = []
        given = set(uses(node))
        dtypes = Counter(str(c.new) for call in touched for c in call.casts)
        tried = [d for d, _ in dtypes.most_common()] or ["torch.float32"]
        if CATALOGUE[node.op].family == "control_flow":  # it casts in the function that it is given
            inside = DType(tried[0].removeprefix("torch."))
            ways.append(lambda s: [msgspec.structs.replace(s, kwargs=(("dtype", inside),))])
        old = {str(c.old).removeprefix("torch.") for call in touched for c in call.casts}
        cached = {
            names[c.source]
            for call in touched
            for c in call.casts
            if c.cached and c.source in names
        }
        for dtype in tried:
            casts = {n: (dtype, n in cached) for n in given if self._castable(n, old)}
            ways.append(lambda s, casts=casts: self._cast(s, casts))  # type: ignore[misc]
        return ways

    def _cast(self, node: Statement, casts: Mapping[str, tuple[str, bool]]) -> list[Statement]:
        """Return a statement after casts of some of its inputs."""
        before: list[Statement] = []
        names: dict[str, str] = {}
        for name in dict.fromkeys(uses(node)):
            dtype, cached = casts.get(name, ("", False))
            dtype = dtype.removeprefix("torch.")
            if not dtype:
                continue
            if cached and (name, dtype) in self._cached:
                names[name] = self._cached[name, dtype]
                continue
            names[name] = f"{_FRESH}{next(self._fresh):04}"
            before.append(_to(name, dtype, names[name]))
            if cached:
                self._cached[name, dtype] = names[name]
        return [*before, substituted(node, names)]

    def _castable(self, name: str, old: Set[str]) -> bool:
        """Return whether a name is of a tensor that is cast: of these dtypes, or eligible."""
        return self.dtypes.get(name) in {*FLOAT_DTYPES[:3], *old}


def _to(name: str, dtype: str, made: str) -> Statement:
    return Statement("to.dtype", "method", (Ref(name), DType(dtype)), outputs=(made,))
