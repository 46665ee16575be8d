"""Show where a case first diverges, by how much, and which decision of autocast is to blame.

If the program still diverges when it returns all its values, every statement is shown (a compiler
may fuse values that are not returned). Then the reference runs again without the weight cache, with
one cast left out, or with one call under another policy. If such a run agrees with the backend, it
shows what the backend did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from typing import Any

import msgspec
import torch

from amp_fuzz.backends import Backend, BackendError
from amp_fuzz.backends.base import mixes, shadows_of
from amp_fuzz.backends.flips import UNCACHED, Decision, Flip, deciding, flips
from amp_fuzz.backends.harness import Observation, bits, quiet
from amp_fuzz.backends.registry import MissingBackend, choose_backends
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import returning_all
from amp_fuzz.findings.explicit_form import explicit_form
from amp_fuzz.findings.notes import notes_of
from amp_fuzz.findings.supervision.supervisor import Dead, talk
from amp_fuzz.findings.supervision.worker import prepared
from amp_fuzz.oracle import Divergence, Rounding, compare, differ
from amp_fuzz.oracle.compare import describe, real, same
from amp_fuzz.oracle.rounding import CONFIRM, THRESHOLD
from amp_fuzz.oracle.trial import Trial
from amp_fuzz.records.schema import Note
from amp_fuzz.reference.shadow.band import Band, distance
from amp_fuzz.reference.shadow.mode import Promise, Reach
from amp_fuzz.upstream.explain import judge_of
from amp_fuzz.upstream.known import Known

__all__ = ["Explained", "Value", "explained"]

MOST = 60


@dataclass(frozen=True, slots=True)
class Value:
    """One value on both sides. said: how the sides compare. differs: whether they diverge."""

    label: str
    expected: str
    observed: str
    said: str
    differs: bool


@dataclass(frozen=True, slots=True)
class Explained:
    """The explanation of a case.

    whole: whether every value of the program is shown, or only the returned ones. values: in the
    order of execution. first: the label of the first that diverges, or "". explicit: a comment,
    then one line for each statement. flips: the changed decisions that make the reference agree.
    tried, of: how many flips were tried, and how many there are. why: the reason if the case cannot
    run. notes: the notes of the case.
    """

    case: Case
    backend: str
    outcome: str = ""
    kind: str = ""
    where: str = ""
    expected: str = ""
    observed: str = ""
    known: str = ""
    whole: bool = True
    values: tuple[Value, ...] = ()
    first: str = ""
    explicit: str = ""
    flips: tuple[str, ...] = ()
    tried: int = 0
    of: int = 0
    why: str = ""
    missing: bool = False
    notes: tuple[Note, ...] = ()


def explained(
    case: Case, backend: str, known: tuple[Known, ...], *, timeout: float, memory: float
) -> Explained:
    """Explain a case in a supervised process.

    timeout: seconds without a sign of life. memory: GiB that the process may hold.
    """
    try:
        for message in talk(timeout, _explain, case, backend, known, memory=memory):
            if isinstance(message, Explained):
                return message
    except Dead as dead:
        return Explained(case, backend, "diverged", dead.kind, "", "an answer", str(dead))
    raise RuntimeError("the process ended without an answer")


def _explain(pipe: connection.Connection, case: Case, name: str, known: tuple[Known, ...]) -> None:
    prepared()
    try:
        (backend,) = choose_backends([name])
        with quiet():
            pipe.send(explain(case, backend, known, alive=lambda: pipe.send("alive")))
    except MissingBackend as error:
        pipe.send(Explained(case, name, why=str(error), missing=True))
    except BackendError as error:
        pipe.send(Explained(case, name, why=str(error)))
    pipe.send(None)


def explain(
    case: Case,
    backend: Backend,
    known: tuple[Known, ...] = (),
    *,
    alive: Callable[[], None] = lambda: None,
) -> Explained:
    """Explain a case in this process. alive: called after each run."""
    judge = judge_of(backend, known, relations="all")
    verdict = judge.judge(case)
    notes = notes_of(judge, verdict)
    alive()
    found = verdict.divergence
    full = msgspec.structs.replace(case, program=returning_all(case.program))
    whole = full == case or found is None
    if not whole:
        assert found is not None
        again = judge.judge(full).divergence
        whole = again is not None and again.kind == found.kind
        alive()
    looked = full if whole else case
    expected = backend.reference().run(looked)
    observed = backend.run([looked])[0]
    alive()
    promise: Promise = "none"
    if found is not None and found.kind == "precision":
        promise = backend.reference().promise
    values = tuple(_values(looked, backend, expected, observed, promise))
    first = next((v.label for v in values if v.differs), "")
    removes: list[str] = []
    tried = of = 0
    if found is not None and found.kind not in ("nondeterminism", "relation", "state"):
        removes, tried, of = _removing(looked, backend, observed, alive)
    return Explained(
        looked,
        backend.name,
        verdict.outcome,
        *(_told(found) if found else ("", "", "", "")),
        verdict.known,
        whole,
        values,
        first,
        explicit_form(looked, backend.reference()),
        tuple(removes),
        tried,
        of,
        notes=notes,
    )


def _told(found: Divergence) -> tuple[str, str, str, str]:
    return found.kind, found.where, found.expected, found.observed


# -- values ---------------------------------------------------------------------------------------


def _values(
    case: Case, backend: Backend, expected: Observation, observed: Observation, promise: Promise
) -> Iterator[Value]:
    bands: dict[str, Band] = {}
    runtime, varying = shadows_of(backend), set[str]()
    if (trial := Trial(case, backend, expected, observed)).varied_judge() is not None:
        varying = set(trial.varying())
    follows = runtime.follows() and not case.program.mixed
    if backend.values and (varying or not backend.exact) and follows:
        _, bands = runtime.shadowed(case, CONFIRM, CONFIRM, promise=promise)
    for label, want in expected.values.items():
        if label not in observed.values:
            break
        got = observed.values[label]
        band = bands.get(label) if label in varying or not backend.exact else None
        said, differs = _compared(want, got, band, backend)
        places = ["", ""]
        if mixes(backend):
            places = [side.devices.get(label, "") for side in (expected, observed)]
            if all(places) and places[0] != places[1]:
                said, differs = "another device", True
            if not (differs or case.program.mixed):
                places = ["", ""]
        shown = (_shown(value, at) for value, at in zip((want, got), places, strict=True))
        yield Value(label, next(shown), next(shown), said, differs)
    for side, seen in (("the reference", expected), (backend.name, observed)):
        if seen.raised is not None:
            first = seen.raised.message.strip().partition("\n")[0]
            text = f"{seen.raised.kind}: {first}"
            both = expected.raised is not None and observed.raised is not None
            where = seen.raised.text
            yield Value(where, "", "", f"{side} raises {text}", not both)


def _shown(value: torch.Tensor | None, place: str) -> str:
    return f"{describe(value)} on {place}" if place and value is not None else describe(value)


def _compared(
    want: torch.Tensor | None, got: torch.Tensor | None, band: Band | None, backend: Backend
) -> tuple[str, bool]:
    if want is None or got is None:
        return ("none on either side", False) if want is got else ("only one side has it", True)
    if (want.dtype, want.shape) != (got.dtype, got.shape):
        return ("another dtype" if want.dtype != got.dtype else "another shape"), True
    if not backend.values:
        return "no values: a fake tensor", False
    if same(want, got):
        return "the same bits", False
    if band is not None:
        if (band.nominal.dtype, band.nominal.shape) != (want.dtype, want.shape) or not band.known:
            return f"{_bitwise(want, got)}; no shadow could follow", False
        away = distance(band, got)
        if away.excess == float("inf"):
            return _bitwise(want, got), True
        over = away.excess > THRESHOLD or away.bias > THRESHOLD
        place = f"worst at {list(away.index)}: {away.expected:.9g}, observed {away.observed:.9g}"
        unit = f"one unit of rounding {away.scale:.2g}"
        off = f"{away.excess:.3g} units off, {away.bias:.3g} on the whole"
        verdict = "more than rounding" if over else "rounding"
        return f"{verdict}: {place}, {unit}: {off} (over {THRESHOLD:g} diverges)", over
    return _bitwise(want, got), True


def _bitwise(want: torch.Tensor, got: torch.Tensor) -> str:
    """Say how many elements differ in a bit, and which differ most."""
    a, b = real(want), real(got)
    differs = bits(want) != bits(got)
    if a.is_floating_point():
        differs &= ~(torch.isnan(a) & torch.isnan(b))
    away = (a.double() - b.double()).abs().nan_to_num(nan=torch.inf)
    away = torch.where(differs, away, -1.0)
    index = tuple(int(i) for i in torch.unravel_index(away.argmax(), away.shape))
    place = f"most at {list(index)}: {a[index].item()!r}, observed {b[index].item()!r}"
    return f"{int(differs.sum())} of {a.numel()} differ, {place}"


# -- casts ----------------------------------------------------------------------------------------


def _removing(
    case: Case, backend: Backend, observed: Observation, alive: Callable[[], None]
) -> tuple[list[str], int, int]:
    """Return the flips that make the reference agree, how many were tried, and of how many."""
    runtime = backend.reference()
    with deciding() as plain:
        seen = runtime.run(case)
    wanted = [*([UNCACHED] if _shares(seen) else []), *flips(plain.decisions)]
    found = []
    for flip in wanted[:MOST]:
        if _agrees(case, backend, observed, flip):
            found.append(_words(plain.decisions, flip))
        alive()
    return found, min(len(wanted), MOST), len(wanted)


def _shares(seen: Observation) -> bool:
    """Return whether a cast of a weight may have been used twice."""
    casts = [(c.source, c.new) for call in seen.kernels for c in call.casts if c.cached]
    return len(casts) > len({*casts})


def _agrees(case: Case, backend: Backend, observed: Observation, flip: Flip) -> bool:
    runtime = backend.reference()

    def shadowed(
        samples: int, seed: int, reach: Reach = "nominal", promise: Promise = "none"
    ) -> tuple[Observation, dict[str, Band]]:
        with deciding(flip):
            return runtime.shadowed(case, samples, seed, reach, promise=promise)

    unjudged: set[str] = set()
    with deciding(flip):
        expected = runtime.run(case)
    rounding = None
    if not backend.exact:
        rounding = Rounding(shadowed, unjudged) if runtime.follows() else differ
        if isinstance(rounding, Rounding) and runtime.casts(case):
            rounding.promised = partial(shadowed, promise="written")
    trial = Trial(case, backend, expected, observed, scope=partial(deciding, flip))
    varied = trial.varied_judge(rounding)
    how: dict[str, Any] = {"values": backend.values, "devices": mixes(backend)}
    found = compare(expected, observed, rounding=rounding, varied=varied, **how)
    return found is None and not unjudged and not trial.unjudged


def _words(decisions: list[Decision], flip: Flip) -> str:
    if flip == UNCACHED:
        return "without the weight cache: each use of a weight casts it again"
    decision = decisions[flip.call]
    of = [i for i, d in enumerate(decisions) if d.overload == decision.overload]
    number = f", call {of.index(flip.call) + 1} of {len(of)}" if len(of) > 1 else ""
    name = f"{decision.overload}{number}"
    if flip.cast >= 0:
        old, new = (str(d).removeprefix("torch.") for d in decision.casts[flip.cast])
        return f"{name}: without its cast {flip.cast + 1} of {len(decision.casts)}, {old} to {new}"
    own = decision.policy.value if decision.policy else "no policy"
    if flip.other:
        return f"{name}: casts to the other 16-bit dtype, not its context's"
    if flip.policy is None:
        return f"{name}: without its casts ({own})"
    return f"{name}: treated as {flip.policy.value} (its own: {own})"
