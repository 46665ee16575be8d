"""Notes of a check: calls that raise only under autocast, dtypes that depend on the device."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from amp_fuzz.backends.harness import Observation, quiet
from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.program import Program
from amp_fuzz.findings.notes import under_policies
from amp_fuzz.interfaces.check.adapters import Checked
from amp_fuzz.interfaces.check.judging import Judged
from amp_fuzz.interfaces.check.messages import first_line
from amp_fuzz.records.schema import Note
from amp_fuzz.reference import load_table, tabled_devices

__all__ = ["not_restored", "notes_of"]


def notes_of(checked: Checked, found: Judged) -> tuple[Note, ...]:
    """Return the notes of a call that did not diverge, its verdict's notes first."""
    own, plan = found.verdict.notes, found.case.plan
    if not plan.contexts or not checked.values or not checked.exact:
        return own
    if found.expected.raised is not None:
        return (*own, *_raising(checked, found))
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


def _raising(checked: Checked, found: Judged) -> Iterator[Note]:
    plan, raised = found.case.plan, found.expected.raised
    assert raised is not None
    plain = msgspec.structs.replace(plan, contexts=())
    with quiet():
        if checked.reference().run(_case(plain)).raised is not None:
            return
    runs = [other for other, seen in _elsewhere(checked, plan) if seen.raised is None]
    there = f"; with the policies of {', '.join(runs)} it runs unchanged" if runs else ""
    yield Note(
        "autocast-raises",
        checked.name,
        "",
        raised.text or checked.subject.name,
        f"{raised.kind}: {first_line(raised.message)}",
        f"Call this part under autocast(enabled=False): without autocast it runs{there}.",
        ",".join(runs),
    )


def _differing(checked: Checked, found: Judged) -> Iterator[Note]:
    """Yield a note for each output whose dtype depends on the device.

    A device is ignored if the call raises here under its policies: the device may have the kernel.
    """
    here = _dtypes(found.expected)
    told: dict[str, dict[str, list[str]]] = {}
    plan = msgspec.structs.replace(found.case.plan, backward="none")
    for other, seen in _elsewhere(checked, plan):
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


def _elsewhere(checked: Checked, plan: Plan) -> Iterator[tuple[str, Observation]]:
    """Yield each other device, and what the call does here under its policies."""
    for other in tabled_devices():
        table = load_table(other)
        dtypes = {c.dtype or load_table(checked.device).default_dtype for c in plan.contexts}
        if other != checked.device and dtypes <= set(table.supported_dtypes):
            with quiet():
                lent = under_policies(checked.reference(), table, checked.device)
                yield other, lent.run(_case(plan))


def _dtypes(seen: Observation) -> dict[str, str]:
    return {
        label: str(value.dtype).removeprefix("torch.")
        for label, value in seen.values.items()
        if label.startswith("v") and value is not None and value.is_floating_point()
    }


def _case(plan: Plan) -> Case:
    return Case(Program((), (), ()), plan)
