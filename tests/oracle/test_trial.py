"""A trial runs what it needs once, and keeps what the reference imitates apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import FrozenInstanceError, dataclass, field, replace

import pytest

from amp_fuzz.backends import backends, imitation
from amp_fuzz.backends.eager import EagerBackend
from amp_fuzz.backends.harness import Observation
from amp_fuzz.cases.case import Case, bare, uses_autocast
from amp_fuzz.oracle import Divergence
from amp_fuzz.oracle.judge import Explanation, Judge
from amp_fuzz.oracle.trial import Trial
from amp_fuzz.upstream.imitate import imitated
from tests.helpers import F16, call, case, under, x

CASE = case([x("x0", 2, 2), x("w1", 2, 2)], call("mm", "x0", "w1"), backward="none")
BUG = "cache-ignores-dtype"


@dataclass(frozen=True, slots=True)
class Counting(EagerBackend):
    """Notes the cases that it runs. wrong: returns other numbers under autocast."""

    ran: list[Case] = field(default_factory=list)
    wrong: bool = False

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Run cases."""
        self.ran.extend(cases)
        seen = [EagerBackend.observe(self, one) for one in cases]
        for one, given in zip(seen, cases, strict=True):
            if self.wrong and uses_autocast(given):
                one.values = {k: v if v is None else v + 1 for k, v in one.values.items()}
        return seen


def test_the_case_without_autocast_runs_once_whatever_is_imitated() -> None:
    backend = Counting("cpu")
    trial = Trial.of(CASE, backend)
    plain = trial.bare()
    assert plain.case == bare(CASE)
    assert imitated(trial, [BUG]).bare().imitated == {BUG}
    assert plain.bare().case == plain.case
    assert trial.bare() is plain
    assert backend.ran == [CASE, plain.case]
    again = trial.again()
    assert again.bare().case == plain.case
    assert len(backend.ran) == 4


def test_shadows_are_kept_for_each_set_of_bugs() -> None:
    trial = Trial.of(CASE, replace(Counting("cpu"), exact=False))
    first, other = trial.rounding(), imitated(trial, [BUG]).rounding()
    assert first is trial.rounding()
    assert first is not other
    assert other is imitated(trial, [BUG]).rounding()
    assert first is not trial.again().rounding()


def test_the_reference_imitates_in_its_trial_alone() -> None:
    seen: list[frozenset[str]] = []

    @contextmanager
    def scope() -> Iterator[None]:
        seen.append(imitation.current().names)
        yield

    nested = case([x("w0", 2, 2)], under(F16, call("mm", "w0", "w0")), backward="none")
    trial = Trial.of(nested, Counting("cpu"))
    wrong = imitated(trial, [BUG])
    with wrong.scope():
        assert imitation.current().names == {BUG}
    trial.under("nothing", scope)
    assert seen == [frozenset()]
    assert imitation.current().names == frozenset()


@dataclass(frozen=True, slots=True)
class Saying:
    """Explains what it is told to, and notes what it is asked. wide: what it says of roundings."""

    known: str = ""
    wide: Explanation = field(default_factory=Explanation)
    asked: list[tuple[str, bool]] = field(default_factory=list)

    def __call__(self, trial: Trial, found: Divergence, *, confirmed: bool) -> Explanation:
        """Explain before it was confirmed, if at all."""
        self.asked.append((found.kind, confirmed))
        return Explanation(found, self.known)

    def left_out(self, trial: Trial) -> Explanation:
        """Say what was given."""
        return self.wide


def test_an_explainer_is_asked_before_a_divergence_is_confirmed_and_after() -> None:
    for known, asked in (
        ("bug", [("bitwise", False)]),
        ("", [("bitwise", False), ("bitwise", True)]),
    ):
        explain = Saying(known)
        verdict = Judge(Counting("cpu", wrong=True), explain, "none").judge(CASE)
        assert explain.asked == asked
        assert (verdict.outcome, verdict.known) == ("known" if known else "diverged", known)


def test_left_out_roundings_are_the_verdict_of_a_case_that_agrees() -> None:
    found = Divergence("precision", "v0", "this", "that")
    for known in ("", "bug"):
        explain = Saying(wide=Explanation(found, known))
        verdict = Judge(Counting("cpu"), explain).judge(CASE)
        assert (verdict.divergence, verdict.known) == (found, known)
        assert verdict.outcome == ("known" if known else "diverged")
        assert not explain.asked


def test_a_judge_that_knows_nothing_reports_all() -> None:
    verdict = Judge(Counting("cpu", wrong=True), relations="none").judge(CASE)
    assert (verdict.outcome, verdict.known) == ("diverged", "")
    assert Judge(Counting("cpu")).judge(CASE).outcome == "agreed"
    with pytest.raises(FrozenInstanceError):
        verdict.known = "bug"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "each"),
    [
        ("compile[eager]", True),
        ("compile[aot_eager]", True),
        ("compile[aot_eager_decomp_partition]", False),
        ("compile[inductor+casts]", False),
    ],
)
def test_each_rounding_counts_where_kernels_of_torch_run_one_by_one(name: str, each: bool) -> None:
    one = case([x("x0", 2, 2), x("w1", 2, 2)], call("mm", "x0", "w1"))
    backend = backends()[name]
    seen = backend.reference().run(one)
    assert (Trial(one, backend, seen, seen).rounding().promised is not None) == each
