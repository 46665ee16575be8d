"""What a check found: values that tests assert on, and the text that people read."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from amp_fuzz.case import Case
from amp_fuzz.oracle import Kind
from amp_fuzz.records import Note

__all__ = ["CheckFailed", "CheckResult", "Diverged", "Ran"]

Status: TypeAlias = Literal["agreed", "known", "diverged", "raised", "leaked", "nothing", "skipped"]

_WIDTH = 100


class CheckFailed(AssertionError):
    """A check that did not pass. Its text is the result's; `result` is the result itself."""

    def __init__(self, result: CheckResult) -> None:
        super().__init__(f"\n{result}")
        self.result = result


@dataclass(frozen=True, slots=True, kw_only=True)
class Diverged:
    """One divergence: what differs, where it comes from, and what to do next.

    kind: as in `amp-fuzz run`. where: the output, parameter or input (``output['loss']``,
    ``encoder.layers.3.attn.qkv.weight.grad``), or the line that raised. expected, observed: both
    sides, short. also: the names of what differs beside it. known: the ids of the known findings
    that explain it, joined by ``+``, or "".
    module: path of the guilty submodule, "" where it is the whole; module_type: its class. op: the
    guilty op of the catalogue or function of torch, "" if none diverges alone; dtypes: of its
    tensors. policy: what autocast does with it. stage: of a compiler, the first rung that diverges.
    case: a self-contained case with the real values, where one could be cut; path: its file, and
    commands: what to type. notes: what a reader should know beside.
    """

    backend: str
    autocast: str
    kind: Kind
    where: str
    expected: str
    observed: str
    also: tuple[str, ...] = ()
    known: str = ""
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
        if self.also:
            more = f" and {len(self.also) - 4} more" if len(self.also) > 4 else ""
            rows.append(("also", ", ".join(self.also[:4]) + more))
        if self.known:
            rows.append(("known as", self.known))
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
            lines += _row(name, text, whole=name in ("next", "case"))
        return "\n".join(lines)


def _row(name: str, text: str, *, whole: bool) -> list[str]:
    if whole:  # to be copied
        return [f"  {name:<9} {text}"]
    return textwrap.wrap(text, _WIDTH, initial_indent=f"  {name:<9} ", subsequent_indent=" " * 12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What one backend came to under one autocast.

    status: ``agreed``; ``known``: all that differs is explained; ``diverged``; ``raised``: the
    callable raises, on both sides alike; ``leaked``: it leaves torch's
    state changed, on both sides; ``nothing``: there was nothing to compare; ``skipped``:
    the backend cannot call it. values, gradients: how many were compared. detail: one line more.
    notes: facts beside the status, which do not change it.
    """

    backend: str
    autocast: str
    status: Status
    detail: str = ""
    values: int = 0
    gradients: int = 0
    divergence: Diverged | None = None
    notes: tuple[Note, ...] = ()

    def __str__(self) -> str:
        return f"{self.backend}, {self.autocast}: {_WORDS[self.status]}" + (
            f": {self.detail}" if self.detail else ""
        )


_WORDS = {
    "agreed": "agrees",
    "known": "known",
    "diverged": "DIVERGES",
    "raised": "RAISES",
    "leaked": "LEAVES STATE CHANGED",
    "nothing": "COMPARED NOTHING",
    "skipped": "skipped",
}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What `amp_fuzz.check` found.

    True if `ok`. Its text says what ran, what agreed, and of each divergence where it comes from.
    """

    name: str
    runs: tuple[Ran, ...]
    seed: int = 0

    @property
    def ok(self) -> bool:
        """Whether something was compared, and nothing diverged in a new way or only raised."""
        good = [run for run in self.runs if run.status in ("agreed", "known")]
        return bool(good) and all(run.status == "skipped" or run in good for run in self.runs)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def divergences(self) -> tuple[Diverged, ...]:
        """The divergences that no known finding explains."""
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
    def notes(self) -> tuple[Note, ...]:
        """Facts beside agreement and divergence; `ok` does not depend on them."""
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
        counts = {status: sum(r.status == status for r in self.runs) for status in _WORDS}
        said = ", ".join(f"{n} {status}" for status, n in counts.items() if n)
        verdict = "ok" if self.ok else "FAILED"
        return f"<amp_fuzz.check of {self.name}: {verdict}: {said or 'nothing ran'}>"

    def __str__(self) -> str:
        head = f"amp_fuzz.check of {self.name}, seed {self.seed}: {self._verdict()}"
        names = [f"{run.backend}, {run.autocast}" for run in self.runs]
        width = max(map(len, names), default=0)
        lines = [head]
        for name, run in zip(names, self.runs, strict=True):
            detail = f": {run.detail}" if run.detail else ""
            lines.append(f"  {name:<{width}}  {_WORDS[run.status]}{detail}")
        for run in self.runs:
            if run.divergence is not None:
                lines += ["", str(run.divergence)]
        for run in self.runs:
            for note in run.notes:
                lines += ["", f"{run.backend}, {run.autocast}: note, {note.kind}"]
                for name, text in (
                    ("where", note.where),
                    ("what", note.message),
                    ("next", note.advice),
                ):
                    lines += _row(name, text, whole=False)
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.ok:
            return "ok"
        if self.divergences:
            return "DIVERGES"
        if any(run.status == "raised" for run in self.runs):
            return "RAISES"
        if any(run.status == "leaked" for run in self.runs):
            return "LEAVES STATE CHANGED"
        return "NOTHING WAS COMPARED"
