"""Find where a divergence comes from: the submodule, the op in it, and a case that shows it.

The search goes inward: to the first submodule whose output diverges on the reference's inputs, and
recursively inside it. Then it takes the first function of torch called there that diverges on the
reference's values.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from amp_fuzz.backends import BackendError
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.program import Autocast
from amp_fuzz.findings.supervision.supervisor import Dead, ask
from amp_fuzz.interfaces.check.adapters import Checked, earlier
from amp_fuzz.interfaces.check.extract import Unsayable, cut, sayable
from amp_fuzz.interfaces.check.judging import Judged, judged
from amp_fuzz.interfaces.check.subject import Subject
from amp_fuzz.interfaces.check.trace import FunctionCall, ModuleCall, function_calls, module_calls
from amp_fuzz.oracle import Divergence, Kind
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.records.schema import OWN
from amp_fuzz.upstream.explain import judge_of
from amp_fuzz.upstream.known import Known

__all__ = ["Place", "locate", "locate_crash"]


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a divergence, as far as it was found.

    module: the path of the submodule, "" for the whole; kind: its class. op: the op of the
    catalogue, or the function of torch, "" if none diverges alone. dtypes: of its tensors. verdict:
    of the extracted case, if there is one. notes: further remarks. known: the ids of the known
    findings that explain what the op alone does.
    """

    module: str = ""
    kind: str = ""
    op: str = ""
    dtypes: str = ""
    stage: str = ""
    verdict: Verdict | None = None
    notes: tuple[str, ...] = ()
    known: str = ""


@dataclass(slots=True)
class _Search:
    """A search on one backend, with the time that it may take.

    own: whether it is for what the backend does without autocast too. later: whether for what it
    does only after an earlier call. explained: submodules whose divergence a known finding
    explains. died: how processes died of
    extracted cases.
    """

    checked: Checked
    plan: Plan
    known: Sequence[Known]
    kind: Kind
    until: float
    own: bool = False
    later: bool = False
    late: bool = False
    explained: set[Any] = field(default_factory=set)
    died: list[str] = field(default_factory=list)

    def over(self) -> bool:
        self.late = self.late or time.monotonic() > self.until
        return self.late

    def at(self, contexts: tuple[Autocast, ...]) -> Plan:
        return msgspec.structs.replace(self.plan, contexts=contexts)

    def diverges(self, subject: Subject, plan: Plan) -> Judged | None:
        if self.kind == "crash":  # it would kill this process; a case has a separate one
            return None
        checked = Checked(subject, self.checked.inner, later=self.later)
        found = judged(checked, plan, self.known, confirm=False)
        return found if self.same(found) and self.alike(found.verdict) else None

    def same(self, found: Judged) -> bool:
        """Return whether a call diverges, with or without a part of autocast in it."""
        return found.verdict.outcome == ("backend" if self.own else "diverged")

    def alike(self, verdict: Verdict) -> bool:
        """Return whether a divergence is an error or a crash, if that is searched for, or neither.

        The other kinds turn into one another: a wrong dtype inside gives other bits later.
        """
        found = verdict.divergence
        return found is not None and all(
            (found.kind == kind) == (self.kind == kind) for kind in ("raise", "crash")
        )


def locate(
    checked: Checked, found: Judged, known: Sequence[Known], kind: Kind, seconds: float
) -> Place:
    """Return the place of a call's divergence of a kind. seconds: the most for the search."""
    until, own = time.monotonic() + seconds, found.verdict.known == OWN
    plan = found.case.plan
    search = _Search(checked, plan, known, kind, until, own, bool(found.after))
    with quiet():
        path, subject, inner = _submodule(search)
        place = _op(search, subject, inner)
        explained = path, subject, inner, place
        # A known divergence may hide an unknown one: search elsewhere too.
        while place.known and subject is not checked.subject and not search.over():
            search.explained.add(subject.function)
            path, subject, inner = _submodule(search)
            place = _op(search, subject, inner)
        if not (place.op or place.verdict):
            path, subject, inner, place = explained
        stage = _stage(search, subject, inner)
        # A part alone may be within its rounding although an op in it is not.
        path = ".".join(filter(None, (path, place.module)))
        name = _class(search.checked.subject, path)
    notes = (*place.notes, *dict.fromkeys(search.died), *_late(search, seconds))
    return Place(path, name, place.op, place.dtypes, stage, place.verdict, notes)


def locate_crash(checked: Checked, plan: Plan, seconds: float) -> Place:
    """Return the op of a call that kills its process. seconds: the most for the search."""
    search = _Search(checked, plan, (), "crash", time.monotonic() + seconds)
    with quiet():
        place = _op(search, checked.subject, plan)
    return replace(
        place,
        kind=_class(checked.subject, place.module) if place.op else "",
        notes=(*place.notes, *_late(search, seconds)),
    )


def _late(search: _Search, seconds: float) -> tuple[str, ...]:
    said = f"the search ended after {seconds:g} s: seconds= gives it more"
    return (said,) if search.late else ()


def _class(subject: Subject, path: str) -> str:
    for prefix, root in subject.modules.items():
        for name, module in root.named_modules():
            if ".".join(filter(None, (prefix, name))) == path:
                return type(module).__name__
    return ""


def _submodule(search: _Search) -> tuple[str, Subject, Plan]:
    """Return the innermost submodule that diverges: path, call and the plan around it."""
    subject, plan, path = search.checked.subject, search.plan, ""
    reference = search.checked.inner.reference()
    while True:
        deeper = next(_diverging(search, module_calls(subject, reference, plan), subject), None)
        if deeper is None:
            return path, subject, plan
        call, subject = deeper
        plan = search.at(call.contexts)
        path = ".".join(filter(None, (path, call.path)))


def _diverging(
    search: _Search, calls: Iterable[ModuleCall], outer: Subject
) -> Iterator[tuple[ModuleCall, Subject]]:
    for call in calls:
        if search.over():
            return
        if call.module in search.explained:
            continue
        subject = Subject.of(call.module, call.args, call.kwargs, outer.seed)
        if search.diverges(subject, search.at(call.contexts)):
            yield call, subject


def _stage(search: _Search, subject: Subject, plan: Plan) -> str:
    """Return the first rung of the backend's ladder on which it diverges, or ""."""
    rungs = Checked(subject, search.checked.inner, later=search.later).ladder()
    for rung in rungs:  # only a few, and worth it even when the time is up
        assert isinstance(rung, Checked)
        if search.same(judged(rung, plan, search.known, confirm=False)):
            return rung.name
    return search.checked.name if rungs else ""


def _op(search: _Search, subject: Subject, plan: Plan) -> Place:
    calls = function_calls(subject, search.checked.inner.reference(), plan)
    explained: Place | None = None
    for call in calls:
        if search.over():
            return explained or Place()
        found = _guilty(search, call, subject.seed)
        if found is not None and found.known:
            explained = explained or found
        elif found is not None:
            return found
    if explained is not None:
        return explained
    try:
        whole = _cut(search, calls, plan.contexts, subject.seed)
    except Unsayable as why:
        return Place(notes=(f"none of its calls diverges alone, and no case can be cut: {why}",))
    verdict = _judge(search, whole)
    if verdict is None:
        return Place(notes=("none of its calls diverges alone, nor do all that a case can hold",))
    return Place(verdict=verdict, notes=("no op diverges alone: the case holds all of its calls",))


def _guilty(search: _Search, call: FunctionCall, seed: int) -> Place | None:
    """Return a call as the guilty place, if it diverges alone on the reference's values."""
    dtypes = ", ".join(str(t.dtype).removeprefix("torch.") for t in call.tensors)
    known = sayable(call)
    notes: tuple[str, ...] = ()
    try:
        verdict = _judge(search, _cut(search, [call], call.contexts, seed))
        if verdict is not None:
            op, ids = known.op if known else "", verdict.known
            note = (f"{ids} explains the op alone, but not the whole",)
            if ids == OWN:
                ids = "" if search.own else ids
                note = ("the op alone differs without autocast too, but not the whole",)
            return Place(
                module=call.path,
                op=op,
                dtypes=dtypes,
                verdict=verdict,
                notes=note if ids else (),
                known=ids,
            )
        if known is not None:
            return None
    except Unsayable as why:
        notes = (f"no case was cut: {why}",)
    subject = Subject(call.function, call.args, call.kwargs, seed)
    if not search.diverges(subject, search.at(call.contexts)):
        return None
    op = known.op if known else call.name
    return Place(module=call.path, op=op, dtypes=dtypes, notes=notes)


def _cut(
    search: _Search, calls: Sequence[FunctionCall], contexts: tuple[Autocast, ...], seed: int
) -> Case:
    case = cut(
        calls,
        contexts,
        backward=search.plan.backward != "none" and search.checked.trains,
        values=search.checked.values,
        seed=seed,
    )
    if not search.later:
        return case
    return case.with_plan(contexts=earlier(search.checked.device, contexts), later=(contexts,))


def _judge(search: _Search, case: Case) -> Verdict | None:
    """Return the confirmed verdict on a case, if it diverges in the searched way.

    An extracted case runs in a separate process: nobody wrote it, and it may crash torch.
    """
    judge = judge_of(search.checked.inner, search.known, "none")
    daemonic = (
        multiprocessing.current_process().daemon
    )  # it cannot start one: run here, like the callable
    try:
        verdict: Verdict = (
            _verdict(judge, case) if daemonic else ask(_TIMEOUT, _verdict, judge, case)
        )
    except BackendError:  # it cannot express the op
        return None
    except Dead as dead:
        if dead.kind == search.kind:
            died = Divergence("crash", "", "an answer", str(dead))
            return Verdict(case, search.checked.name, "diverged", died)
        search.died.append(f"{dead} when it ran case {case.id}, cut out of this call")
        return None
    steady = verdict.divergence is not None and verdict.divergence.kind != "nondeterminism"
    return verdict if steady and search.alike(verdict) else None


_TIMEOUT = 120.0  # CPU seconds for a case


def _verdict(judge: Judge, case: Case) -> Verdict:
    with quiet():
        return replace(judge.judge(case), seen=None)  # fake tensors do not pickle
