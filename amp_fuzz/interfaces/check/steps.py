"""Check a callable on one backend under one autocast, step by step.

Each step is a generator that yields the result so far; the last one counts. If a fork dies, the
earlier results are kept.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import msgspec

from amp_fuzz.backends import Backend, facts_of
from amp_fuzz.backends.harness import Raised, quiet
from amp_fuzz.backends.refusals import ORIGIN
from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.program import Autocast, Program
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.config import judging_options
from amp_fuzz.findings.explicit_form import explicit_form
from amp_fuzz.findings.guilty import fingerprint
from amp_fuzz.interfaces.check import messages, stale
from amp_fuzz.interfaces.check.adapters import Checked, refusal
from amp_fuzz.interfaces.check.fork import Died
from amp_fuzz.interfaces.check.judging import Judged, judged, others
from amp_fuzz.interfaces.check.locate import Place, locate, locate_crash
from amp_fuzz.interfaces.check.not_finite import not_finite
from amp_fuzz.interfaces.check.notes import not_restored, notes_of, raising, stale_notes
from amp_fuzz.interfaces.check.remedy import remedy, runs_without
from amp_fuzz.interfaces.check.result import Diverged, Ran, Status
from amp_fuzz.interfaces.check.subject import Subject
from amp_fuzz.records.schema import OWN, listed
from amp_fuzz.records.store import Store
from amp_fuzz.reference import load_table
from amp_fuzz.upstream.known import Known

__all__ = ["Asked", "Call", "survived", "unsupported"]

Call: TypeAlias = Callable[..., Iterator[Any]]
"""Runs a generator with arguments: in a fork, which raises `Died`, or here."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One backend under one autocast, with the arguments of the check."""

    subject: Subject
    backend: Backend
    contexts: tuple[Autocast, ...]
    known: Sequence[Known]
    backward: bool
    seconds: float
    store: str | Path | None

    @property
    def shown(self) -> str:
        """The autocast, for people."""
        return _shown(self.contexts)

    @property
    def plan(self) -> Plan:
        """The contexts and the backward pass."""
        backward = "outside" if self.backward else "none"
        return msgspec.structs.replace(Plan(), contexts=self.contexts, backward=backward)

    def case(self, checked: Checked) -> Case:
        """Return the case that stands for the call."""
        return checked.fit(Case(Program((), (), ()), self.plan, self.subject.seed))

    def ran(self, status: Status, detail: str = "", **more: Any) -> Ran:
        """Return a result of this backend."""
        return Ran(
            backend=self.backend.name, autocast=self.shown, status=status, detail=detail, **more
        )


def _shown(contexts: tuple[Autocast, ...]) -> str:
    if not contexts:
        return "no context"
    (context,) = contexts
    words = [context.dtype or "default dtype"]
    words += [] if context.enabled else ["enabled=False"]
    words += [] if context.cache_enabled is None else [f"cache_enabled={context.cache_enabled}"]
    return " ".join(words)


def survived(call: Call, asked: Asked) -> Ran:
    """Return the result of a backend, even if a process died."""
    ran, died = _last(call(_run, asked))
    if ran is not None:
        return ran if died is None else _cut_short(ran, died)
    assert died is not None  # it yields a result, or dies before
    if died.waits:
        return asked.ran("nothing", str(died), advice=messages.WAITS)
    return _examined(call, asked, died)


def _last(said: Iterable[Any]) -> tuple[Any, Died | None]:
    """Return the last result, or None, and what ended it early."""
    words: list[Any] = [None]
    try:
        words.extend(said)
    except Died as died:
        return words[-1], died
    return words[-1], None


def _cut_short(ran: Ran, died: Died) -> Ran:
    """Return the result known before a process died after the verdict."""
    if ran.divergence is None:
        return replace(ran, detail=f"{ran.detail}; {messages.BESIDE}: {died}")
    notes = (*ran.divergence.notes, f"{messages.SOUGHT}: {died}")
    return replace(ran, divergence=replace(ran.divergence, notes=notes))


def _examined(call: Call, asked: Asked, first: Died) -> Ran:
    """Find the cause of a death: the backend, the callable itself, or neither."""
    _, died = _last(call(_on_backend, asked))
    if died is None:
        ran, again = _last(call(_run, asked))
        if ran is None and again is not None:
            ran = _second(call, asked, again)
            if ran is not None:
                return ran
            return asked.ran("nothing", f"{again}, {messages.BETWEEN}", advice=messages.DEBUG)
        ran = replace(ran, detail=f"{ran.detail}; {messages.ONCE}: {first}")
        return ran if again is None else _cut_short(ran, again)
    expected, under = _last(call(_on_reference, asked))
    for one in filter(None, (died, under)):
        if one.waits:
            return asked.ran("nothing", str(one), advice=messages.WAITS)
    at = f" at {died.line}" if died.line else ""
    if under is not None:
        return asked.ran("raised", f"{died}{at}, {messages.TOO}", advice=messages.DIES)
    found = Diverged(
        backend=asked.backend.name,
        autocast=asked.shown,
        kind="crash",
        where=died.line,
        expected=expected,
        observed=str(died),
        notes=(messages.DIED,),
    )
    placed, ended = _last(call(_crash_placed, asked, found))
    ran = asked.ran("diverged", "crash", divergence=placed or found)
    return ran if ended is None else _cut_short(ran, ended)


def _second(call: Call, asked: Asked, died: Died) -> Ran | None:
    """Return the result of a backend that dies only if another call comes before.

    If it dies in that call, nothing is said of the next one. None if it dies in other ways.
    """
    checked = Checked(asked.subject, asked.backend, later=True)
    before = checked.earlier(asked.plan)
    if before is None:
        return None
    ran, _ = _last(call(partial(_run, later=False), asked))
    _, alone = _last(call(_on_backend, replace(asked, contexts=before.contexts)))
    if ran is None or alone is not None:
        return ran  # type: ignore[no-any-return]
    found = Diverged(
        backend=asked.backend.name,
        autocast=asked.shown,
        kind="crash",
        where=died.line,
        expected="an answer",
        observed=str(died),
        after=_shown(before.contexts),
        notes=(messages.DIED,),
    )
    return asked.ran("diverged", _said(found), divergence=found)


def _said(found: Diverged) -> str:
    return found.kind + (f", only after a call under {found.after}" if found.after else "")


def _on_backend(asked: Asked) -> Iterator[None]:
    """Call it on the backend alone."""
    checked = Checked(asked.subject, asked.backend)
    with quiet():
        checked.run([asked.case(checked)])
    yield None


def _on_reference(asked: Asked) -> Iterator[str]:
    """Call it under the reference alone, and yield how that ends."""
    checked = Checked(asked.subject, asked.backend)
    with quiet():
        raised = checked.reference().run(asked.case(checked)).raised
    yield "an answer" if raised is None else f"{raised.kind}: {messages.first_line(raised.message)}"


def _crash_placed(asked: Asked, found: Diverged) -> Iterator[Diverged]:
    checked = Checked(asked.subject, asked.backend)
    place = locate_crash(checked, asked.case(checked).plan, asked.seconds)
    yield _placed(found, place, checked, asked.store)


def _run(asked: Asked, *, later: bool = True) -> Iterator[Ran]:
    """Call it on the backend and under the reference, and compare."""
    checked = Checked(asked.subject, asked.backend, later=later)
    for ran in _compared(asked, checked):
        yield replace(ran, notes=(*ran.notes, *not_restored(checked)))


def _compared(asked: Asked, checked: Checked) -> Iterator[Ran]:
    if reason := refusal(asked.backend, asked.subject):
        yield asked.ran("skipped", reason)
        return
    if reason := unsupported(asked.backend, asked.contexts):
        dtypes = load_table(asked.backend.device).supported_dtypes
        yield asked.ran("skipped", reason, advice=messages.dtypes(dtypes))
        return
    found = judged(checked, asked.plan, asked.known)
    notes = tuple(stale_notes(checked, found))
    for ran in _told(asked, checked, found):
        yield replace(ran, notes=(*notes, *ran.notes))


def _told(asked: Asked, checked: Checked, found: Judged) -> Iterator[Ran]:
    """Yield the result of a call that was judged."""
    if found.verdict.divergence is not None:
        yield from _divergence(asked, checked, found)
        return
    if said := _unsteady(found):
        yield asked.ran("nothing", said, advice=messages.REPEAT)
        return
    ran = asked.ran("nothing")
    for ran in _alike(asked, checked, found):
        yield replace(ran, notes=(*found.verdict.notes, *ran.notes))
    yield replace(ran, notes=(*notes_of(checked, found), *ran.notes))


def _unsteady(found: Judged) -> str:
    """Return what a callable raised in only one of two calls under the reference, or ""."""
    first, then = found.before.raised, found.expected.raised
    if first is not None and then is None:
        return f"it raised in one call and not in the next: {messages.raised(first)}"
    if first is None and then is not None:
        return f"it raised, but not in the call before: {messages.raised(then)}"
    return ""


def _alike(asked: Asked, checked: Checked, found: Judged) -> Iterator[Ran]:
    """Yield the result of a call without a divergence."""
    raised, verdict = found.expected.raised, found.verdict
    if raised is not None and found.observed.raised is not None:
        yield from _raising(asked, checked, found)
        return
    if found.expected.leaked is not None:
        yield asked.ran("leaked", messages.left(found), advice=messages.LEAVE)
        return
    if verdict.uncompiled:
        why = f": {found.observed.breaks[0]}" if found.observed.breaks else ""
        yield asked.ran("skipped", f"the compiler made no graph of it and ran it as eager{why}")
        return
    counts, share = _counts(found), messages.share_of(checked, found)
    note = not_finite(checked, found.expected, asked.contexts, backward=asked.backward)
    if not share.judged:
        if note is not None:
            why, advice = f"{note.message} ({note.where})", note.advice
        else:
            why, advice = messages.nothing(found, share), messages.RETURN
        yield asked.ran("nothing", why, advice=advice, share=share, **counts)
        return
    text = messages.agreement(checked, found, share, **counts)
    notes = () if note is None else (note,)
    if share.enough:
        yield asked.ran("agreed", text, share=share, notes=notes, **counts)
    else:
        more = {"advice": messages.SHARE, "share": share, "notes": notes}
        yield asked.ran("unjudged", text, **more, **counts)


def _counts(found: Judged) -> dict[str, int]:
    """Return how many values were compared; gradients that neither side has do not count."""
    labels = [label for label, value in found.expected.values.items() if value is not None]
    return {
        "values": sum(label[0] == "v" for label in labels),
        "gradients": sum(label.endswith(".grad") for label in labels),
    }


def _raising(asked: Asked, checked: Checked, found: Judged) -> Iterator[Ran]:
    """Yield the result of a call that raises on both sides, and whether autocast is the reason."""
    raised = found.expected.raised
    assert raised is not None
    said = messages.raised(raised)
    yield asked.ran("raised", f"{said}, {messages.TOO}", advice=messages.DEBUG)
    if runs_without(checked, asked.plan):
        with quiet():
            advice, devices = remedy(checked, asked.plan, found.expected)
        note = raising(checked, raised, advice, devices)
        yield asked.ran("fails", f"{said}; it runs without autocast", advice=advice, notes=(note,))
    elif not asked.backend.values and ORIGIN not in raised.message:
        yield asked.ran("skipped", messages.without_values(asked.subject, raised))
    else:
        where = f"{messages.TOO.removesuffix(' too')} and without autocast too"
        about = where if asked.contexts else messages.TOO
        yield asked.ran("raised", f"{said}, {about}", advice=messages.FIX)


def _divergence(asked: Asked, checked: Checked, found: Judged) -> Iterator[Ran]:
    """Yield the divergence, then with the others, then with its place."""
    divergence, verdict, counts = _diverged(asked, checked, found), found.verdict, _counts(found)
    if found.stale and not found.after and _casts_again(asked, checked):
        yield asked.ran("stale", messages.AGAIN, advice=stale.ADVICE, **counts)
        return
    if listed(verdict.known):
        ids = verdict.known.split("+")
        told = tuple(messages.listed(entry) for entry in asked.known if entry.id in ids)
        divergence = replace(divergence, told=told)
        yield asked.ran("known", verdict.known, divergence=divergence, **counts)
        return
    partial = facts_of(asked.backend).partial
    if partial and (said := _raised_alone(asked, found)):
        yield asked.ran("skipped", f"{partial} raises without autocast too: {said}")
        return
    if said := _valueless(asked, found):
        yield asked.ran("skipped", said)
        return
    if verdict.known == OWN:
        raised = found.observed.raised
        if raised is not None and found.expected.raised is not None:
            yield from _raising(asked, checked, found)
            return
        if raised is not None:
            said = messages.first_line(raised.message)
            yield asked.ran("skipped", f"it raises without autocast too: {said}")
            return

    def ran() -> Ran:
        if verdict.known == OWN:
            said = f"not autocast's ({divergence.kind})"
            return asked.ran("backend", said, divergence=divergence, **counts)
        return asked.ran("diverged", _said(divergence), divergence=divergence, **counts)

    yield ran()
    first = found.verdict.divergence
    every = (d.where for d in others(checked, found) if first and d.where != first.where)
    divergence = replace(divergence, also=tuple(map(checked.names, every)))
    yield ran()
    if divergence.kind not in ("state", "nondeterminism"):
        place = locate(checked, found, asked.known, divergence.kind, asked.seconds)
        divergence = _placed(divergence, place, checked, asked.store)
        yield ran()


def _casts_again(asked: Asked, checked: Checked) -> bool:
    """Return whether all values agree if the reference casts a weight again after it changed.

    An exact backend keeps casts as the reference does: one that does not, diverges.
    """
    if checked.exact:
        return False
    again = Checked(asked.subject, asked.backend, again=True)
    verdict = judged(again, asked.plan, asked.known, confirm=False).verdict
    return verdict.outcome in ("agreed", "known", "backend") and not verdict.unjudged


def _diverged(asked: Asked, checked: Checked, found: Judged) -> Diverged:
    divergence = found.verdict.divergence
    assert divergence is not None
    return Diverged(
        backend=checked.name,
        autocast=asked.shown,
        kind=divergence.kind,
        where=checked.names(divergence.where),
        expected=divergence.expected,
        observed=divergence.observed,
        known=found.verdict.known,
        after=_shown(found.after) if found.after else "",
    )


def _raised_alone(asked: Asked, found: Judged) -> str:
    """Return the error that the backend alone raises with and without autocast, or ""."""
    raised = found.observed.raised
    if found.expected.raised is not None or raised is None:
        return ""
    bare = _without_autocast(asked, found).observed.raised
    return "" if bare is None else messages.first_line(raised.message)


def _valueless(asked: Asked, found: Judged) -> str:
    """Return why a callable cannot run without values, if the two sides' errors differ.

    Both raise at one line, also without autocast: code that looks at values may raise anything.
    """
    raised, expected = found.observed.raised, found.expected.raised
    if asked.backend.values or not _at_one_place(raised, expected):
        return ""
    bare = _without_autocast(asked, found)
    if not _at_one_place(bare.observed.raised, bare.expected.raised):
        return ""
    return messages.without_values(asked.subject, raised)


def _at_one_place(one: Raised | None, other: Raised | None) -> TypeGuard[Raised]:
    return one is not None and other is not None and one.text == other.text


def _without_autocast(asked: Asked, found: Judged) -> Judged:
    plan = msgspec.structs.replace(found.case.plan, contexts=())
    return judged(Checked(asked.subject, asked.backend), plan, asked.known, confirm=False)


def unsupported(backend: Backend, contexts: tuple[Autocast, ...]) -> str:
    """Return why a backend's device does not support these contexts, or ""."""
    supported = load_table(backend.device).supported_dtypes
    for context in contexts:
        if context.enabled and context.dtype is not None and context.dtype not in supported:
            return f"autocast for {backend.device} does not support {context.dtype}"
    return ""


def _placed(
    divergence: Diverged, place: Place, checked: Checked, store: str | Path | None
) -> Diverged:
    """Return a divergence with its place, and keep its case."""
    notes = [*divergence.notes, *place.notes]
    case, path, policy = None, None, ""
    commands: tuple[str, ...] = ()
    op = place.op
    if place.verdict is not None:
        record = place.verdict.finding("check", op=op)
        explicit = _explicit(checked, place.verdict.case)
        record = msgspec.structs.replace(record, stage=place.stage, explicit=explicit)
        record = msgspec.structs.replace(record, fingerprint=fingerprint(record).hash)
        case, policy = place.verdict.case, record.policy
        if store is not None:
            kept = Store(store)
            path = kept.save(record)
            store_option = [] if kept.root == Path(".amp-fuzz") else [f"--store={kept.root}"]
            more = shlex.join([record.id, *judging_options(), *store_option])
            commands = (f"amp-fuzz minimize {more}", f"amp-fuzz repro {more} > repro.py")
    elif op and op not in CATALOGUE:
        notes.append(f"{op} is not in the catalogue (amp_fuzz.register_op adds your own ops)")
    return replace(
        divergence,
        module=place.module,
        module_type=place.kind,
        op=op,
        policy="" if policy == "none" else policy,
        dtypes=place.dtypes,
        stage=place.stage,
        case=case,
        path=path,
        commands=commands,
        notes=tuple(notes),
    )


def _explicit(checked: Checked, case: Any) -> str:
    try:
        with quiet():
            return explicit_form(case, checked.inner.reference())
    except Exception as error:  # it is optional; it must not cost the finding
        return f"# no explicit form: {type(error).__name__}: {error}"
