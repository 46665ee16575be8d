"""What a part of torch makes change goes away without it, or leaves what is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any, cast

import pytest

from amp_fuzz.backends.harness import Observation
from amp_fuzz.backends.reference import ReferenceRuntime
from amp_fuzz.cases.case import Case
from amp_fuzz.oracle import Divergence
from amp_fuzz.oracle.trial import Trial
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.evidence import Remedied
from amp_fuzz.upstream.explain import Explainer
from amp_fuzz.upstream.known import Known
from tests.helpers import WrongKernel, call, case, eager, x

CASE = case([x("x0", 4, 4)], call("neg", "x0"), contexts=())
CHANGES = Divergence("nondeterminism", "v0", "1.0", "2.0")
(GAP,) = (known for known in shipped() if known.id == "compile-custom-op-promise")


@dataclass(frozen=True)
class Changing(WrongKernel):
    """A backend that is wrong in some of its runs, without a part of torch too."""

    wrong: Iterator[bool] = field(kw_only=True)

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        runs = WrongKernel.run if next(self.wrong) else lambda _, cases: self.inner.run(cases)
        return runs(self, cases)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([False, False, False], "compile-custom-op-promise"),
        ([False, True, True], "compile-custom-op-promise+other"),
        ([False, True, False], ""),
        ([False, False, True], ""),
    ],
    ids=str,
)
def test_what_is_left_without_a_part_must_repeat_and_be_known(wrong: list[bool], said: str) -> None:
    backend = Changing(eager(), "neg", always=True, wrong=chain(wrong, repeat(False)))
    remedied = Remedied(GAP, lambda trial, found: "other")
    assert remedied.explains(Trial.of(CASE, backend), CHANGES) == said


def test_what_is_left_without_a_part_and_not_known_is_not_explained() -> None:
    wrong = chain([False, True, True], repeat(False))
    backend = Changing(eager(), "neg", always=True, wrong=wrong)
    assert not Remedied(GAP, lambda trial, found: "").explains(Trial.of(CASE, backend), CHANGES)


def test_what_is_left_without_a_part_may_be_the_backend_s_own() -> None:
    backend = Changing(eager(), "neg", always=True, wrong=chain([False], repeat(True)))
    said = Remedied(GAP, lambda trial, found: "").explains(Trial.of(CASE, backend), CHANGES)
    assert said == "compile-custom-op-promise+backend"


def test_a_part_without_which_the_divergence_is_left_explains_nothing() -> None:
    """Though without autocast the backend diverges, too."""
    trial = Trial.of(CASE, WrongKernel(eager(), "neg", always=True))
    found = trial.compare()
    assert found is not None
    assert not Remedied(GAP, lambda trial, found: "").explains(trial, found)


@pytest.mark.parametrize("reuse", ["graph", "region"])
def test_a_part_that_a_case_does_not_have_explains_nothing(reuse: str) -> None:
    """Run again, it may agree by chance."""
    entry = Known("gap", "a bug", "why", kinds=("bitwise",), ops=("*",), without="nested-regions")
    wrong = chain([True], repeat(False))
    one = case([x("x0", 4, 4)], call("neg", "x0"), contexts=(), later=((),), reuse=reuse)
    trial = Trial.of(one, Changing(eager(), "neg", always=True, wrong=wrong))
    found = trial.compare()
    assert found is not None
    known = Explainer((entry,))(trial, found, confirmed=True).known
    assert known == ("gap" if reuse == "region" else "")


@dataclass(frozen=True)
class Doubtful(WrongKernel):
    """A backend whose reference is another in some of its runs."""

    other: Iterator[bool] = field(kw_only=True)

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        return self.inner.run(cases)

    def reference(self) -> ReferenceRuntime:
        honest = self.inner.reference()
        if not next(self.other):
            return honest
        run = WrongKernel(self.inner, self.op, always=True).run
        wrong: Any = SimpleNamespace(run=lambda case: run([case])[0])
        return cast(ReferenceRuntime, wrong)


@pytest.mark.parametrize("other", [[False, False, False], [False, False, True]], ids=str)
def test_the_reference_must_repeat_too(other: list[bool]) -> None:
    backend = Doubtful(eager(), "neg", always=True, other=iter(other))
    said = Remedied(GAP, lambda trial, found: "other").explains(Trial.of(CASE, backend), CHANGES)
    assert said == ("" if any(other) else "compile-custom-op-promise")
