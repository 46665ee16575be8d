"""Find the roundings to 16 bits that a backend left out: its value is nearer to the exact one."""

from __future__ import annotations

from dataclasses import replace

from amp_fuzz.backends.harness import Observation
from amp_fuzz.backends.source import statement_source
from amp_fuzz.cases.program import statements
from amp_fuzz.oracle import Divergence, compare
from amp_fuzz.oracle.judge import Explanation
from amp_fuzz.oracle.labels import guilty_op, named
from amp_fuzz.oracle.trial import Trial
from amp_fuzz.records.schema import Note
from amp_fuzz.reference.shadow.written import SIXTEEN
from amp_fuzz.upstream.imitate import imitated, noting
from amp_fuzz.upstream.remedies import WITHOUT

__all__ = ["EXCESS", "left_out"]

EXCESS = "xla-excess-precision"
"""The bug under which every rounding to 16 bits is left out; Inductor may, too."""


def left_out(trial: Trial, known: str) -> Explanation:
    """Return the divergence in which a backend left out a rounding that it may not leave out.

    One that nobody promises is a note. known: the id of the entry of `EXCESS`, or "".
    """
    found = _elided(trial)
    if found is None:
        off = _unrounded(trial)
        if off is None:
            return Explanation()
        if trial.backend.reference().promise != "all":
            return Explanation(notes=(_note(trial, *off, rounds=_rounds(trial)),))
        found = off[0]
    return Explanation(found, known)


def _elided(trial: Trial) -> Divergence | None:
    """Return where a rounding that the program asks for was left out.

    Nearer to the exact value, it is within what rounding explains. It is one if the reference that
    leaves roundings out agrees with the backend on the whole case, and differs there, by more than
    the rounding of what is left, from the reference that makes them.
    """
    elided = trial.observed.elided
    if not elided:
        return None
    with noting() as names:
        wide = imitated(trial, (EXCESS,))
    if not names or wide.compare() is not None:
        return None
    made = replace(wide, observed=replace(trial.expected, elided=())).compare()
    if made is None or made.where not in elided:
        return None
    rounding = f"the rounding after {', '.join(names)}"
    return Divergence(
        made.kind,
        made.where,
        f"{made.observed.partition(':')[0]}, with {rounding}",
        f"{made.expected}: {rounding} is left out (excess precision)",
    )


def _unrounded(trial: Trial) -> tuple[Divergence, str] | None:
    """Return where a 16-bit result was not rounded, though no cast asks for it, and after what.

    There is one if a value is not what it is after all roundings, and the reference that leaves out
    all agrees. If the backend makes some of them, nothing is said.
    """
    if trial.backend.reference().promise == "none" or not _has_16_bits(trial.expected):
        return None
    promised = trial.shadowed(promise="all")
    rounding = replace(trial.rounding(), promised=promised, _strict={})
    off = compare(trial.expected, trial.observed, rounding=rounding)
    if off is None or off.kind != "precision":
        return None
    with noting() as names:
        wide = imitated(trial, (EXCESS,))
        agrees = bool(names) and wide.compare() is None
    return (off, ", ".join(sorted(names))) if agrees else None


def _rounds(trial: Trial) -> bool:
    """Return whether Inductor's option makes the roundings, as a run with it shows."""
    with WITHOUT["elided-casts"]():
        again = replace(trial, observed=trial.run(trial.case))
    return again.observed.raised is None and _unrounded(again) is None


def _has_16_bits(seen: Observation) -> bool:
    """Return whether any tensor that a kernel took or a program returned has a 16-bit dtype."""
    dtypes = {value.dtype for value in seen.values.values() if value is not None}
    return not SIXTEEN.isdisjoint(dtypes.union(*(kernel.dtypes for kernel in seen.kernels)))


def _note(trial: Trial, off: Divergence, names: str, *, rounds: bool) -> Note:
    """Return a note of roundings that were left out, and that nobody promises.

    rounds: whether an option makes them.
    """
    at, body = named(off.where), statements(trial.case.program.body)
    made = [s for s in body if at in s.outputs]
    return Note(
        "precision",
        trial.backend.name,
        guilty_op(trial.case, off),
        statement_source(made[0]) if made else off.where,
        f"the rounding to 16 bits after {names} is left out",
        "Set torch._inductor.config.emulate_precision_casts if eager's rounding matters."
        if rounds
        else "Compare with eager's result within the rounding of 16 bits.",
    )
