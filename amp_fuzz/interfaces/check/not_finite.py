"""Whether autocast is the reason for NaN, infinity and vanished values of a checked call."""

from __future__ import annotations

from amp_fuzz.backends.harness import Observation
from amp_fuzz.cases.program import Autocast
from amp_fuzz.interfaces.check.adapters import Checked
from amp_fuzz.interfaces.check.messages import first_line
from amp_fuzz.records.schema import Note
from amp_fuzz.reports.printable import plural

__all__ = ["not_finite"]

_SECONDS = 10.0  # of the search for what to exempt


def not_finite(
    checked: Checked, seen: Observation, contexts: tuple[Autocast, ...], *, backward: bool
) -> Note | None:
    """Return a note if values are not finite under autocast, and finite without it; or None.

    seen: the call under the reference. The diagnosis runs only if a value is not finite.
    """
    if not checked.values or seen.raised is not None or not any(map(_gone, seen.values.items())):
        return None
    from amp_fuzz.interfaces.precision.api import diagnose  # it is built on this package

    try:
        found = diagnose(
            checked.subject, checked.device, contexts, backward=backward, seconds=_SECONDS
        )
    except Exception as error:  # it is optional; it must not cost the verdict
        text = f"not found out whether autocast is the reason: {first_line(str(error))}"
        return Note("not-finite", checked.name, "", checked.subject.name, text, "")
    lost = [v for v in found.harmed if v.harm in ("not finite", "vanishes")]
    if not lost:
        return None
    reason = next((e for e in found.events if e.kind != "lowered"), None)
    text = f"{lost[0].name} {'is 0 everywhere' if lost[0].harm == 'vanishes' else 'is not finite'}"
    text += f" (and {plural(len(lost) - 1, 'other value')})" if len(lost) > 1 else ""
    text += " under autocast, and is fine without"
    where = reason.place.text if reason is not None else checked.subject.name
    text += f": {reason.text}" if reason is not None else ""
    advice = f"{found.advice} amp_fuzz.precision says more.".strip()
    return Note("not-finite", checked.name, "", where, text, advice)


def _gone(item: tuple[str, object]) -> bool:
    import torch

    label, value = item
    if label[0] not in "vw" or not isinstance(value, torch.Tensor):
        return False
    return value.is_floating_point() and not bool(value.isfinite().all())
