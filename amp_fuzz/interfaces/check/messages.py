"""The sentences of a check: how much was compared, or why nothing was, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch

from amp_fuzz.backends.base import kernels_of
from amp_fuzz.backends.harness import Raised
from amp_fuzz.interfaces.check.adapters import Checked
from amp_fuzz.interfaces.check.call import AFTER
from amp_fuzz.interfaces.check.judging import Judged
from amp_fuzz.interfaces.check.subject import Subject
from amp_fuzz.oracle.compare import same
from amp_fuzz.reports.printable import plural
from amp_fuzz.upstream.known import Known

__all__ = [
    "AGAIN",
    "BESIDE",
    "BETWEEN",
    "DEBUG",
    "DIED",
    "DIES",
    "FIX",
    "LEAVE",
    "NONE",
    "ONCE",
    "REPEAT",
    "RETURN",
    "SHARE",
    "SOUGHT",
    "TOO",
    "WAITS",
    "Share",
    "agreement",
    "dtypes",
    "first_line",
    "left",
    "listed",
    "nothing",
    "raised",
    "share_of",
    "without_values",
    "written",
]


def left(found: Judged) -> str:
    """Return what state a callable leaves changed, in torch's words if it has any."""
    parts = f"{found.observed.leaked or ''}; {found.expected.leaked}".split("; ")
    ours = ("", "dispatch keys", "autocast of the reference", "nesting")
    plain = [part for part in dict.fromkeys(parts) if part.partition(":")[0] not in ours]
    return "; ".join(plain) or "it enters a context of torch.autocast and does not leave it"


def dtypes(names: Sequence[str]) -> str:
    """Return what to do if autocast does not support a dtype."""
    said = " or ".join(f"torch.{name}" for name in sorted(names, key=_USUAL.__ne__))
    return f"Give a dtype that its autocast supports: autocast={said}."


_USUAL = "bfloat16"


@dataclass(frozen=True, slots=True)
class Share:
    """How many of a call's values were judged.

    of: all values, gradients, tensors written and inner results of both sides. lost: those that
    differ in a bit where no shadow could follow. void: those that are empty, NaN or infinite
    throughout. apart: inner results that one side alone computed, which are no part of `of`.
    """

    judged: int = 0
    of: int = 0
    lost: int = 0
    void: int = 0
    apart: int = 0

    @property
    def enough(self) -> bool:
        """Whether at least half were judged: otherwise most of the callable is unknown."""
        return 2 * self.judged >= self.of

    def __add__(self, other: Share) -> Share:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Share(*(a + b for a, b in pairs))

    def __str__(self) -> str:
        return f"{self.judged} of {plural(self.of, 'value')} judged"


NONE = Share()
SHARE = (
    "Return fewer values that depend on what cannot be followed, or check on eager-cpu, which "
    "compares every bit."
)
AGAIN = "it agrees if a weight is cast again after it changed"
LEAVE = "Leave each context that the callable enters, and reset each switch that it sets."
DIED = "isolate=False calls it in this process, for a debugger."
BESIDE = "when called for notes, without autocast or with the policies of other devices"
SOUGHT = "while searching for further divergences and their cause"
BETWEEN = "but neither on the backend alone nor under the reference alone"
ONCE = "an earlier process died in the same call, because of the machine or by chance"
WAITS = (
    "Pass isolate=False to call it in this process: a fork has none of the threads of this "
    "process, and waits forever for one that it needs."
)
DEBUG = "Pass isolate=False to call it in this process, for a debugger."
FIX = "Fix the callable or its inputs first: it raises without autocast too."
TOO = "under the reference too"
DIES = "Fix the callable or its inputs first: it kills its process under the reference too."
REPEAT = "Make the callable do the same in every call (no counters, seeded generators)."
RETURN = "Return the tensors to compare, and give inputs for which they are finite."


def listed(entry: Known) -> str:
    """Return the id, the summary and the link of a known finding."""
    return f"{entry.id}: {entry.what}" + (f" ({entry.link})" if entry.link else "")


def without_values(subject: Subject, error: Raised) -> str:
    """Return why a callable that raises this error cannot run on a fake device."""
    said = raised(error)
    if "convert all Tensors to FakeTensors" in said or "same device" in said:
        names = ", ".join(list(subject.tensors)[:3])
        held = f" ({names})" if names else ""
        return (
            "it mixes devices: parameters, buffers and inputs move to the fake one, but other "
            f"tensors that it holds or makes{held} do not"
        )
    return f"it raises on tensors without values: {said}"


def raised(error: Raised) -> str:
    """Return an error in short, with the user's line that raised it."""
    at = f" ({error.text})" if error.text else ""
    return f"{error.kind}: {first_line(error.message)}{at}"


def first_line(message: str) -> str:
    """Return the first line of an error in short."""
    return message.strip().partition("\n")[0][:200]


def written(checked: Checked, found: Judged) -> int:
    """Return how many of its own tensors and inputs a call writes."""
    subject = checked.subject
    before = {**subject.inputs(), **subject.state()}
    count = 0
    for label, after in found.expected.values.items():
        if label[0] == "b" and after is not None:
            tensor = before.get(checked.names(label).removesuffix(AFTER))
            count += tensor is not None and _changed(tensor.detach(), after)
    return count


def _changed(before: torch.Tensor, after: torch.Tensor) -> bool:
    if (before.shape, before.dtype) != (after.shape, after.dtype):
        return True
    return after.device == before.device and not same(before.to_dense(), after)


def _void(value: torch.Tensor | None) -> bool:
    """Return whether a tensor has no element worth comparing: empty, or all NaN or infinite."""
    if value is None or not value.numel():
        return True
    return (value.is_floating_point() or value.is_complex()) and not bool(value.isfinite().any())


def share_of(checked: Checked, found: Judged) -> Share:
    """Return how many of a call's values were judged."""
    values = {label: v for label, v in found.expected.values.items() if v is not None}
    told = [v for label, v in values.items() if label[0] in "vw"]
    void = sum(map(_void, told)) if checked.values else 0
    inside = sum(label[0] == "i" for label in values)
    apart, lost = len(checked.names.dropped), found.verdict.unjudged
    compared = len(told) + written(checked, found)
    judged = compared - lost - void
    judged = judged + inside if judged > 0 else 0  # inner results alone are no result
    return Share(judged, compared + inside, lost, void, apart)


def nothing(found: Judged, share: Share) -> str:
    """Return why nothing was compared."""
    if share.lost:
        return f"no shadow could follow any of {share.lost} values that differ"
    if share.void:
        return (
            "all that it returned, and every gradient, is empty, NaN or infinite: give other inputs"
        )
    return "it returned no tensor: return the tensors to compare, in tuples, dicts or dataclasses"


def agreement(checked: Checked, found: Judged, share: Share, values: int, gradients: int) -> str:
    """Return how much agreed, and how it was compared."""
    words = [plural(values, "value")]
    words += [plural(gradients, "gradient")] if gradients else []
    count = written(checked, found)
    words += [plural(count, "tensor") + " written"] if count else []
    inside = sum(label[0] == "i" for label in found.observed.values)  # those of both sides
    words += [plural(inside, "result") + " inside"] if inside else []
    how = "bit for bit" if checked.exact else "within their rounding"
    if not checked.values:
        how = "dtypes and shapes"
    text = f"{share}: " if share.judged < share.of else ""
    text += f"{', '.join(words)}, {how}"
    if found.observed.graphs is not None:
        text += f", {plural(found.observed.graphs, 'graph')}"
    if found.observed.breaks:
        text += f"; the rest ran as eager: {found.observed.breaks[0]}"
    text += f"; no shadow could follow {share.lost} that differ" if share.lost else ""
    if share.lost and kernels_of(checked.inner).draws:
        text += " (it draws random numbers of its own: their dtypes and shapes were compared)"
    text += f"; {share.void} empty, NaN or infinite throughout" if share.void else ""
    text += f"; {plural(share.apart, 'result')} inside of one side only" if share.apart else ""
    return text
