"""Notes of a check: raising under autocast alone, old casts, dtypes that depend on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from amp_fuzz.backends.harness import Observation, Raised
from amp_fuzz.interfaces.check.adapters import Checked
from amp_fuzz.interfaces.check.judging import Judged
from amp_fuzz.interfaces.check.messages import first_line
from amp_fuzz.interfaces.check.remedy import elsewhere
from amp_fuzz.interfaces.check.stale import ADVICE, stale_casts
from amp_fuzz.records.schema import Note

__all__ = ["not_restored", "notes_of", "raising", "stale_notes"]


def notes_of(checked: Checked, found: Judged) -> tuple[Note, ...]:
    """Return the notes of a call that did not diverge, its verdict's notes first."""
    own, plan = found.verdict.notes, found.case.plan
    if not plan.contexts or not checked.values or not checked.exact or found.expected.raised:
        return own
    return (*own, *_differing(checked, found))


def not_restored(checked: Checked) -> Iterator[Note]:
    """Yield a note for each state that a call may have changed and that cannot be restored."""
    for name in checked.names.lost:
        yield Note(
            "not-restored",
            checked.name,
            "",
            name.partition(" (")[0],
            f"{name} cannot be saved or restored: later calls may see what a call left there",
            "Pass a fresh copy of the callable to each check, or keep this state outside it.",
        )


def stale_notes(checked: Checked, found: Judged) -> Iterator[Note]:
    """Yield a note for each line that changes weights of which old casts are used then."""
    if found.stale:
        runtime = checked.reference().runtime
        for one in stale_casts(checked.subject, runtime, found.case.plan):
            where = one.used or one.changed or checked.subject.name
            yield Note("stale-cast", checked.name, "", where, str(one), ADVICE)


def raising(checked: Checked, raised: Raised, advice: str, devices: Sequence[str]) -> Note:
    """Return the note of a call that raises under autocast alone. devices: see `remedy`."""
    return Note(
        "autocast-raises",
        checked.name,
        "",
        raised.text or checked.subject.name,
        f"{raised.kind}: {first_line(raised.message)}",
        advice,
        ",".join(devices),
    )


def _differing(checked: Checked, found: Judged) -> Iterator[Note]:
    """Yield a note for each output whose dtype depends on the device.

    A device is ignored if the call raises here under its policies: the device may have the kernel.
    """
    here = _dtypes(found.expected)
    told: dict[str, dict[str, list[str]]] = {}
    plan = msgspec.structs.replace(found.case.plan, backward="none")
    for other, seen in elsewhere(checked, plan):
        for label, dtype in _dtypes(seen).items() if seen.raised is None else ():
            if dtype != here.get(label, dtype):
                told.setdefault(label, {}).setdefault(dtype, []).append(other)
    for label, sides in told.items():
        words = [f"{dtype} on {', '.join(others)}" for dtype, others in sides.items()]
        yield Note(
            "portability",
            checked.name,
            "",
            checked.names(label),
            "; ".join([f"{here[label]} on {checked.device}", *words]),
            "Cast it to the dtype that later code expects.",
            ",".join(sorted(other for others in sides.values() for other in others)),
        )


def _dtypes(seen: Observation) -> dict[str, str]:
    return {
        label: str(value.dtype).removeprefix("torch.")
        for label, value in seen.values.items()
        if label.startswith("v") and value is not None and value.is_floating_point()
    }
