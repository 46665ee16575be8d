"""The result of `check_op`: values for tests to assert on, and text for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from amp_fuzz.interfaces.check.result import WORDS, CheckFailed, Diverged, Outcome, Ran, row

__all__ = ["Contract", "OpResult", "State"]

State: TypeAlias = Literal["kept", "broken", "skipped", "unjudged"]

_STATES = {"kept": "kept", "broken": "BROKEN", "skipped": "not judged", "unjudged": "NOT JUDGED"}
_HEADS = {"agrees": "keeps its contracts", "diverges": "BREAKS", "unjudged": "CANNOT BE JUDGED"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """One contract of an op, and whether the op keeps it.

    name: as in `amp_fuzz.check_op`'s ``contracts=``. state: ``kept``; ``broken``; ``skipped``: it
    does not apply, or torch refuses clearly; ``unjudged``: the op raises before it can be told. The
    text calls both "not judged".
    detail: what was seen. autocast: the context in which it was broken, or could not be judged.
    where: the output, gradient or tensor, or the line that raised. advice: what to do.
    """

    name: str
    state: State
    detail: str
    autocast: str = ""
    where: str = ""
    advice: str = ""

    @property
    def short(self) -> str:
        """One line; what was broken or could not be judged is told elsewhere."""
        if self.state in ("broken", "unjudged"):
            return f"{_STATES[self.state]} ({self.autocast})"
        return f"{_STATES[self.state]}: {self.detail}"

    def __str__(self) -> str:
        under = f" ({self.autocast})" if self.autocast else ""
        return f"{self.name}: {_STATES[self.state]}{under}: {self.detail}"


@dataclass(frozen=True, slots=True)
class OpResult:
    """The result of `amp_fuzz.check_op`.

    True if `ok`. form: ``custom op``, ``operator``, ``autograd.Function``, ``module`` or
    ``callable``. runs: the op on each backend, as `amp_fuzz.check` compares it. contracts: the
    others. remarks: on how the op was called.
    """

    name: str
    form: str
    runs: tuple[Ran, ...]
    contracts: tuple[Contract, ...]
    seed: int = 0
    remarks: tuple[str, ...] = ()

    @property
    def verdict(self) -> Outcome:
        """``agrees``, ``diverges`` or ``unjudged``.

        ``diverges``: a contract is broken, or a backend differs from the reference, which no known
        finding explains and which it does not do without autocast too. ``unjudged``: neither, but a
        contract or a backend could not be judged, or none of the contracts applies, or nothing was
        compared.
        """
        ran = {run.status for run in self.runs if run.status != "skipped"}
        states = {contract.state for contract in self.contracts}
        if "diverged" in ran or "broken" in states:
            return "diverges"
        if "unjudged" in states or not ran <= {"agreed", "known", "backend"}:
            return "unjudged"
        return "agrees" if "kept" in states or (ran and not states) else "unjudged"

    @property
    def ok(self) -> bool:
        """Whether the verdict is ``agrees``."""
        return self.verdict == "agrees"

    @property
    def broken(self) -> tuple[Contract, ...]:
        """The contracts that the op breaks."""
        return tuple(c for c in self.contracts if c.state == "broken")

    @property
    def divergences(self) -> tuple[Diverged, ...]:
        """The divergences that no known finding explains, and in which autocast has a part."""
        return tuple(r.divergence for r in self.runs if r.status == "diverged" and r.divergence)

    def __bool__(self) -> bool:
        return self.ok

    def raise_if_failed(self) -> None:
        """Raise `CheckFailed`, an AssertionError with the whole text, unless `ok`."""
        if not self.ok:
            raise CheckFailed(self)

    def __repr__(self) -> str:
        return f"<amp_fuzz.check_op of {self.name}: {self.verdict}>"

    def __str__(self) -> str:
        head = f"amp_fuzz.check_op of {self.name}, {self.form}, seed {self.seed}: "
        lines = [head + self._said()]
        names = [f"{r.backend}, {r.autocast}" for r in self.runs] + [c.name for c in self.contracts]
        width = max(map(len, names), default=0)
        for run in self.runs:
            text = WORDS[run.status] + (f": {run.detail}" if run.detail else "")
            lines += _line(f"{run.backend}, {run.autocast}", text, width)
        for one in self.contracts:
            lines += _line(one.name, one.short, width)
        for remark in self.remarks:
            lines += row("note", remark)
        told = [c for c in self.contracts if c.state in ("broken", "unjudged")]
        for same in _alike(told):
            one = same[0]
            lines += ["", f"{', '.join(c.name for c in same)}: {one.short}"]
            lines += row("where", one.where) if one.where else []
            lines += [*row("what", one.detail), *row("to do", one.advice)]
        for run in self.runs:
            if run.divergence is not None:
                lines += ["", str(run.divergence)]
            elif run.advice:
                lines += ["", f"{run.backend}, {run.autocast}: {WORDS[run.status]}"]
                lines += row("to do", run.advice)
        return "\n".join(lines)

    def _said(self) -> str:
        names = [c.name for c in self.broken]
        names += dict.fromkeys(d.backend for d in self.divergences)
        head = " ".join(filter(None, [_HEADS[self.verdict], ", ".join(names)]))
        words = ("kept", "broken", "not judged")
        counts = Counter(_STATES[c.state].lower() for c in self.contracts)
        told = ", ".join(f"{counts[word]} {word}" for word in words if counts[word])
        return f"{head} ({told})" if told else head


def _alike(contracts: Sequence[Contract]) -> list[list[Contract]]:
    """Return the contracts in groups that one text can tell."""
    groups: dict[Contract, list[Contract]] = {}
    for one in contracts:
        groups.setdefault(replace(one, name=""), []).append(one)
    return list(groups.values())


def _line(name: str, text: str, width: int) -> list[str]:
    return [f"  {name:<{width}}  {text}"]
