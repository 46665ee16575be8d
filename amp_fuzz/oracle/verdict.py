"""The verdict on a case on a backend, and its records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from amp_fuzz.backends.harness import Observation
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import statements
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.oracle import Divergence
from amp_fuzz.oracle.attribution import NONE, Own
from amp_fuzz.oracle.labels import guilty_op
from amp_fuzz.oracle.promised import falsifiable
from amp_fuzz.records.fingerprint import ingredient
from amp_fuzz.records.schema import (
    MOST_EXCESS,
    CaseRecord,
    DivergenceRecord,
    KernelRecord,
    Note,
    Outcome,
)
from amp_fuzz.reference import KernelCall

__all__ = ["Verdict"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a case on a backend.

    known: the ids of the entries that explain the divergence, joined by +. unjudged: how many
    values differ that cannot be judged. varied: how many differ as kernels do that torch documents
    as nondeterministic. uncompiled: it agreed, but the compiler made no graph of
    it. platform: see `Observation`. notes: facts that do not affect the outcome;
    `amp_fuzz.findings.notes` finds more of them later. farthest: the largest excess that was
    measured, and its label; -1 if none was. seen: what the reference did. own: how the backend
    differs without autocast too, if that is not all. hits: see `Observation`. device,
    implements: of the backend.
    """

    case: Case
    backend: str
    outcome: Outcome
    divergence: Divergence | None = None
    known: str = ""
    kernels: Sequence[KernelCall] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    unjudged: int = 0
    varied: int = 0
    uncompiled: bool = False
    platform: str = ""
    notes: tuple[Note, ...] = ()
    farthest: tuple[float, str] = (-1.0, "")
    seen: Observation | None = field(default=None, repr=False, compare=False)
    own: Own = NONE
    hits: int = 0
    device: str = ""
    implements: tuple[str, ...] = ()

    def record(self, family: str) -> CaseRecord:
        """Return the record of the case."""
        counts = Counter(_key(k) for k in self.kernels)
        op = guilty_op(self.case, self.divergence) if self.divergence else ""
        kernel = _kernel_of(op, self.kernels)
        excess, label = self.farthest
        return CaseRecord(
            id=self.case.id,
            backend=self.backend,
            family=family,
            outcome=self.outcome,
            ops=tuple(s.op for s in statements(self.case.program.body)),
            kernels=tuple(KernelRecord(*key, count) for key, count in counts.items()),
            seconds={k: round(v, 6) for k, v in self.seconds.items()},
            kind=self.divergence.kind if self.divergence else "",
            op=op,
            known=self.known,
            at=list(counts).index(_key(kernel)) if kernel else -1,
            unjudged=self.unjudged,
            varied=self.varied,
            uncompiled=self.uncompiled,
            platform=self.platform,
            notes=self.notes,
            plan=ingredient(self.case),
            excess=min(float(f"{excess:.6g}"), MOST_EXCESS),
            excess_op=guilty_op(self.case, Divergence("value", label, "", "")) if label else "",
            hits=self.hits,
            promises=self._falsifiable(kernel),
        )

    def _falsifiable(self, guilty: KernelCall | None) -> tuple[str, ...]:
        """Return the promises that the case could have falsified. guilty: where it diverged."""
        if self.seen is None or not self.implements:
            return ()
        kernels = self.kernels if self.divergence is None else [guilty] if guilty else []
        of = self.case, self.device, self.implements, self.outcome
        return falsifiable(*of, self.seen, kernels)

    def finding(
        self, family: str, minimised: Case | None = None, *, op: str = ""
    ) -> DivergenceRecord:
        """Return the record of the divergence. op: the guilty op, if known."""
        assert self.divergence is not None
        d = self.divergence
        op = op or guilty_op(minimised or self.case, d)
        kernel = _kernel_of(op.partition("+")[0], self.kernels)
        return DivergenceRecord(
            backend=self.backend,
            kind=d.kind,
            where=d.where,
            op=op,
            policy=kernel.policy.value if kernel else "none",
            dtypes=",".join(str(t).removeprefix("torch.") for t in kernel.dtypes) if kernel else "",
            expected=d.expected,
            observed=d.observed,
            known=self.known,
            case=self.case,
            minimised=minimised,
            family=family,
            platform=self.platform,
        )


def _key(kernel: KernelCall) -> tuple[str, str, str]:
    dtypes = ",".join(str(d).removeprefix("torch.") for d in kernel.dtypes)
    return kernel.overload, kernel.policy.value, dtypes


def _kernel_of(op: str, kernels: Sequence[KernelCall]) -> KernelCall | None:
    entry = CATALOGUE.get(op)
    wanted = {o.removeprefix("aten::") for o in entry.overloads} if entry else set()
    return next((k for k in kernels if k.overload in wanted), None)
