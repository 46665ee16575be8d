"""Judge the cases of a baseline again, in processes that may die."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from multiprocessing import connection
from typing import Literal

from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import ProgramError
from amp_fuzz.catalogue import check
from amp_fuzz.findings.judge_again import TRIES, happens, still
from amp_fuzz.findings.supervision.supervisor import Dead, talk
from amp_fuzz.findings.supervision.worker import prepared
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.records.baseline import Entry
from amp_fuzz.records.schema import OPEN, OWN
from amp_fuzz.upstream.explain import judge_of
from amp_fuzz.upstream.known import Known

__all__ = ["Came", "recheck"]


@dataclass(frozen=True, slots=True)
class Came:
    """The result of an entry's case.

    state: ``there``; ``fixed``, it agrees; ``changed``, it diverges in another way; ``listed``, a
    known list explains it, or, if the package lists it, the backend without autocast; ``not seen``,
    it is nondeterministic and did not occur; ``cannot``, it cannot run here. detail: for the last
    four, what or why.
    """

    state: Literal["there", "fixed", "changed", "listed", "not seen", "cannot"]
    detail: str = ""


def recheck(
    entries: Sequence[Entry], known: tuple[Known, ...], *, torch: str, timeout: float, memory: float
) -> Iterator[tuple[Entry, Came]]:
    """Yield the result of each entry, in order. torch: the installed version."""
    left = list(entries)
    while left:
        if not left[0].holds(torch):
            entry = left.pop(0)
            yield entry, Came("cannot", f"it is of torch {entry.torch}, here is {torch}")
            continue
        together = tuple(takewhile(lambda e: e.holds(torch), left))
        try:
            for came in talk(timeout, _judge_all, together, known, memory=memory):
                yield left.pop(0), came
        except Dead as dead:
            entry = left.pop(0)
            same = entry.kind == dead.kind
            yield entry, Came("there") if same else Came("changed", f"{dead.kind}: {dead}")


def _judge_all(
    pipe: connection.Connection, entries: Sequence[Entry], known: tuple[Known, ...]
) -> None:
    prepared()
    for entry in entries:
        pipe.send(_came(entry, known))
    pipe.send(None)


def _came(entry: Entry, known: tuple[Known, ...]) -> Came:
    from amp_fuzz.backends import BackendError
    from amp_fuzz.backends.registry import MissingBackend, choose_backends

    case = entry.load()
    try:
        check(case.program)
        (backend,) = choose_backends([entry.backend])
        with quiet():
            return _judged(judge_of(backend, known), entry, case)
    except (BackendError, MissingBackend, ProgramError) as error:
        return Came("cannot", str(error))


def _judged(judge: Judge, entry: Entry, case: Case) -> Came:
    verdict = still(judge, entry, case)
    if verdict.known == OWN and entry.id.startswith(OPEN):
        return Came("listed", "the backend does the same without autocast")
    if happens(judge, entry, verdict):
        return Came("there")
    found = verdict.divergence
    if found is None and entry.kind == "nondeterminism":
        return Came("not seen", f"in {TRIES} runs: it may be nondeterministic")
    if found is None:
        return Came("fixed")
    if verdict.known == OWN:
        return Came("changed", f"{found.kind} that shows in the same way without autocast")
    if verdict.known:
        return Came("listed", f"the known list explains it as {verdict.known}")
    return Came("changed", f"{found.kind} at {found.where}" if found.where else found.kind)
