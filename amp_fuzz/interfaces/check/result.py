"""The result of a check: values for tests to assert on, and text for people."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from amp_fuzz.cases.case import Case
from amp_fuzz.interfaces.check.messages import NONE, REPEAT, Share
from amp_fuzz.oracle import Kind
from amp_fuzz.records.schema import Note, listed

if TYPE_CHECKING:
    from amp_fuzz.interfaces.check_op.result import OpResult

__all__ = [
    "WORDS",
    "CheckFailed",
    "CheckResult",
    "Diverged",
    "Outcome",
    "OwnCast",
    "Ran",
    "Status",
    "row",
]

Outcome: TypeAlias = Literal["agrees", "diverges", "raises", "stale", "unjudged"]
Status: TypeAlias = Literal[
    "agreed",
    "known",
    "backend",
    "diverged",
    "fails",
    "stale",
    "unjudged",
    "raised",
    "leaked",
    "nothing",
    "skipped",
]

_WIDTH = 88


class CheckFailed(AssertionError):
    """A check did not pass. The message is the text of `result`."""

    def __init__(self, result: CheckResult | OpResult) -> None:
        super().__init__(f"\n{result}")
        self.result = result


@dataclass(frozen=True, slots=True, kw_only=True)
class Diverged:
    """One divergence: what differs, where it comes from, and what to do next.

    kind: as in `amp-fuzz run`. where: the output, parameter or input (``output['loss']``,
    ``encoder.layers.3.attn.qkv.weight.grad``), or the line that raised. expected, observed: both
    sides in short. after: the autocast of an earlier call, without which it agrees, or "".
    also: the names of other values that differ. known: the ids of the known
    findings that explain it, joined by ``+``, ``backend``, or "". told: for each of them its id,
    its summary, and the link to its discussion, if there is one. module: path of the guilty
    submodule, "" for the whole. module_type: its class. op: the guilty op of the catalogue or
    function of torch, "" if none diverges alone. dtypes: of its tensors. policy: what autocast does
    with it. stage: for a compiler, the first rung that diverges. case: a self-contained case with
    the real values, if one could be extracted. path: its file. commands: what to type. notes:
    further remarks.
    """

    backend: str
    autocast: str
    kind: Kind
    where: str
    expected: str
    observed: str
    after: str = ""
    also: tuple[str, ...] = ()
    known: str = ""
    told: tuple[str, ...] = ()
    module: str = ""
    module_type: str = ""
    op: str = ""
    policy: str = ""
    dtypes: str = ""
    stage: str = ""
    case: Case | None = None
    path: Path | None = None
    commands: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        at = f" at {self.where}" if self.where else ""
        rows = [("expected", self.expected), ("observed", self.observed)]
        if self.after:
            rows.append(("only", _ONLY.format(self.after)))
        if self.also:
            more = f" and {len(self.also) - 4} more" if len(self.also) > 4 else ""
            rows.append(("also", ", ".join(self.also[:4]) + more))
        if listed(self.known):
            rows += [("known as", line) for line in self.told or (self.known,)]
        if self.module or self.module_type:
            kind = f" ({self.module_type})" if self.module_type else ""
            rows.append(("module", f"{self.module or 'the whole'}{kind}"))
        if self.op:
            policy = f", policy {self.policy}" if self.policy else ""
            rows.append(("op", f"{self.op} of {self.dtypes}{policy}"))
        rows += [("stage", self.stage)] if self.stage else []
        rows += [("case", str(self.path))] if self.path else []
        rows += [("note", note) for note in self.notes]
        rows += [("next", command) for command in self.commands]
        lines = [f"{self.backend}, {self.autocast}: {self.kind}{at}"]
        for name, text in rows:
            lines += row(name, text, whole=name in ("next", "case"))
        return "\n".join(lines)


def row(name: str, text: str, *, whole: bool = False) -> list[str]:
    """Return the lines of one row: its name, and its text, wrapped unless it is `whole`."""
    if whole:  # to be copied
        return [f"  {name:<9} {text}"]
    return textwrap.wrap(text, _WIDTH, initial_indent=f"  {name:<9} ", subsequent_indent=" " * 12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The result of one backend under one autocast.

    status: ``agreed``; ``known``: every difference is explained; ``backend``: it differs in the
    same way without autocast; ``diverged``; ``fails``: it raises alike on both sides under
    autocast, and runs without; ``stale``: it differs because a weight changes inside a context and
    is used through its old cast; ``unjudged``: less than half of its values could be judged;
    ``raised``: it raises alike on both sides, without autocast too; ``leaked``: it leaves torch's
    state changed on both sides; ``nothing``: there was nothing to compare; ``skipped``: the backend
    cannot call it. values, gradients: how many were compared. share: how many of its values were
    judged. detail: one more line. notes: facts that do not affect the status. advice: one sentence
    of what to do, if nothing agreed and nothing diverged.
    """

    backend: str
    autocast: str
    status: Status
    detail: str = ""
    values: int = 0
    gradients: int = 0
    share: Share = NONE
    divergence: Diverged | None = None
    notes: tuple[Note, ...] = ()
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.backend}, {self.autocast}: {WORDS[self.status]}" + (
            f": {self.detail}" if self.detail else ""
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCast:
    """Something that the callable does against autocast's policy. It does not affect the verdict.

    kind: ``cast``: to a 16-bit dtype that is not autocast's; ``lowered``: of a result that autocast
    keeps in float32; ``region``: a context nested in one of the other 16-bit dtype; ``function``: a
    `torch.autograd.Function` whose forward meets autocast without `torch.amp.custom_fwd`, or
    without `custom_bwd`.
    line: ``model.py:12``, in the user's code. module: path of the submodule, "" for the whole. op:
    the function that casts, the context, or the Function's name. given, made: dtypes before and
    after; "" for a Function. text: one sentence about it. advice: what to do.
    devices: the device types under whose autocast it happens.
    """

    kind: Literal["cast", "lowered", "region", "function"]
    line: str
    module: str
    op: str
    given: str
    made: str
    text: str
    advice: str
    devices: tuple[str, ...] = ()

    def __str__(self) -> str:
        at = " in ".join(filter(None, (self.line, self.module)))
        lines = row("note", f"{at}: {self.text} ({', '.join(self.devices)})")
        return "\n".join([*lines, *row("", self.advice)])


WORDS = {
    "agreed": "agrees",
    "known": "known",
    "backend": "differs without autocast too",
    "diverged": "DIVERGES",
    "fails": "RAISES under autocast",
    "stale": "DEPENDS ON THE WEIGHT CACHE",
    "unjudged": "not judged",
    "raised": "raises",
    "leaked": "leaves state changed",
    "nothing": "compared nothing",
    "skipped": "skipped",
}
_HEADS = {
    "agrees": "agrees",
    "diverges": "DIVERGES",
    "raises": "RAISES UNDER AUTOCAST",
    "stale": "DEPENDS ON THE WEIGHT CACHE",
    "unjudged": "CANNOT BE JUDGED",
}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of `amp_fuzz.check`.

    True if `ok`. Its text shows what ran, what agreed, and the place of each divergence. own_casts:
    what the callable does against autocast's policy; it does not affect the verdict. remarks: on
    how the callable was called.
    """

    name: str
    runs: tuple[Ran, ...]
    seed: int = 0
    own_casts: tuple[OwnCast, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def verdict(self) -> Outcome:
        """``agrees``, ``diverges``, ``raises``, ``stale`` or ``unjudged``.

        ``diverges``: some backend differs from the reference, no known finding explains it, and
        the backend does not differ so without autocast.
        ``raises``: none does, but under some autocast the callable raises on both sides, and it
        runs without autocast. ``stale``: neither, but a weight changes inside an autocast context
        and is used through its old cast, where some backend casts it again. ``unjudged``: none of
        these, but some run raised, left state changed, compared nothing or judged less than half of
        its values, or no backend could call it.
        ``agrees``: every run agreed, is known, or differs without autocast too.
        """
        called = [run.status for run in self.runs if run.status != "skipped"]
        if "diverged" in called:
            return "diverges"
        if "fails" in called:
            return "raises"
        if "stale" in called:
            return "stale"
        return "agrees" if called and {*called} <= {"agreed", "known", "backend"} else "unjudged"

    @property
    def ok(self) -> bool:
        """Whether the verdict is ``agrees``."""
        return self.verdict == "agrees"

    @property
    def advice(self) -> str:
        """One sentence of what to do now."""
        if self.ok:
            return "Nothing to do."
        if self.divergences:
            kinds = {found.kind for found in self.divergences}
            if kinds == {"nondeterminism"}:
                return REPEAT
            if any(found.commands for found in self.divergences):
                return _REPORT
            return _TWICE if any(found.after for found in self.divergences) else _COMPARE
        runs = sorted(self.runs, key=lambda run: (run.status != "fails", run.status != "stale"))
        other = "" if any(run.backend == _ANY for run in runs) else f", such as {_ANY}"
        return next((run.advice for run in runs if run.advice), _CHOOSE.format(other))

    def __bool__(self) -> bool:
        return self.ok

    @property
    def divergences(self) -> tuple[Diverged, ...]:
        """The divergences that no known finding explains, and in which autocast has a part."""
        return tuple(
            run.divergence for run in self.runs if run.status == "diverged" and run.divergence
        )

    @property
    def known(self) -> tuple[Diverged, ...]:
        """The divergences that known findings explain."""
        return tuple(
            run.divergence for run in self.runs if run.status == "known" and run.divergence
        )

    @property
    def own(self) -> tuple[Diverged, ...]:
        """The divergences that the backend shows in the same way without autocast."""
        return tuple(
            run.divergence for run in self.runs if run.status == "backend" and run.divergence
        )

    @property
    def notes(self) -> tuple[Note, ...]:
        """Facts that are neither agreement nor divergence; `ok` does not depend on them."""
        return tuple(note for run in self.runs for note in run.notes)

    @property
    def skipped(self) -> tuple[Ran, ...]:
        """The backends that cannot call it, with the reason in `detail`."""
        return tuple(run for run in self.runs if run.status == "skipped")

    def raise_if_failed(self) -> None:
        """Raise `CheckFailed`, an AssertionError with the whole text, unless `ok`."""
        if not self.ok:
            raise CheckFailed(self)

    def __repr__(self) -> str:
        counts = {status: sum(r.status == status for r in self.runs) for status in WORDS}
        said = ", ".join(f"{n} {status}" for status, n in counts.items() if n)
        return f"<amp_fuzz.check of {self.name}: {self.verdict}: {said or 'nothing ran'}>"

    def __str__(self) -> str:
        head = f"amp_fuzz.check of {self.name}, seed {self.seed}: {_HEADS[self.verdict]}"
        share = sum((run.share for run in self.runs), NONE)
        head += f", {share}" if self.ok and share.judged < share.of else ""
        names = [f"{run.backend}, {run.autocast}" for run in self.runs]
        width = max(map(len, names), default=0)
        lines = [head]
        for name, run in zip(names, self.runs, strict=True):
            detail = f": {run.detail}" if run.detail else ""
            lines.append(f"  {name:<{width}}  {WORDS[run.status]}{detail}")
        lines += [] if self.ok else row("to do", self.advice)
        for remark in self.remarks:
            lines += row("note", remark)
        for run in self.runs:
            if run.divergence is not None:
                lines += ["", str(run.divergence)]
        said: set[tuple[str, str, str]] = set()
        for run in self.runs:
            for note in run.notes:
                text = (note.kind, note.where, note.message)
                if text in said or note.kind == "autocast-raises":  # the lines above have it
                    continue
                said.add(text)
                lines += ["", f"{run.backend}, {run.autocast}: note, {note.kind}"]
                for name, words in (
                    ("where", note.where),
                    ("what", note.message),
                    ("next", note.advice),
                ):
                    lines += row(name, words)
        if self.own_casts:
            lines += ["", "The callable's own casts, which do not affect the verdict:"]
            lines += map(str, self.own_casts)
        return "\n".join(lines)


_REPORT = "Run the commands after `next`: they shrink the case and write a script for a bug report."
_ONLY = (
    "after a call under {}: that call's compiled code, or something else that it left, is used. "
    "Compiled anew, it agrees."
)
_COMPARE = (
    "Call the code named below by hand, with and without that backend, and report the difference."
)
_TWICE = (
    "Compile the code named below once, call it under both autocasts, the one after `only` first, "
    "and report what the second call does."
)
_ANY = "eager-cpu"
_CHOOSE = "Choose a backend that can call it{}: the lines above say why others cannot."
