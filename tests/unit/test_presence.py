"""``amp-fuzz known check``: what it says of a bug, and that it never says *gone* by mistake.

Each test that expects *cannot tell* seeds one way in which both sides agree without proving that
the bug is gone.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version

import pytest

from amp_fuzz.backends import backends
from amp_fuzz.backends.base import Availability
from amp_fuzz.backends.harness import Observation
from amp_fuzz.cases.build import call, case, x
from amp_fuzz.cases.case import Case
from amp_fuzz.findings import presence as core
from amp_fuzz.findings.presence import Presence, presence, tell
from amp_fuzz.upstream import BUGS
from amp_fuzz.upstream.bug import Bug, Example
from tests.helpers import WrongKernel, needs_fork

HERE = version("torch")

BUG = BUGS["cache-ignores-dtype"]
EXAMPLE = BUG.examples[0]
LIMITS = {"timeout": 60.0, "memory": 4.0}


class Mended(WrongKernel):
    """A torch without any bug: it does what the reference does."""

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        return [self.inner.reference().run(case) for case in cases]


class Moody(Mended):
    """A torch that has its bugs at one run only."""

    runs, at = 0, 0

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        Moody.runs += EXAMPLE.case in cases  # and not a variant of it
        return self.inner.run(cases) if Moody.runs == Moody.at else Mended.run(self, cases)


class Missing(Mended):
    def availability(self) -> Availability:
        return Availability("missing", "pip install it")


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> type[Mended]:
    """Judge on a mended torch."""
    monkeypatch.setattr(core, "choose_backends", lambda names: [Mended(backends()[names[0]], "")])
    return Mended


def told(bug: Bug, example: Example) -> tuple[str, str]:
    found = tell(bug, example)
    return found.state, found.detail


def test_a_bug_of_the_installed_torch_is_there() -> None:
    assert tell(BUG, EXAMPLE) == Presence("there", "eager-cpu", EXAMPLE.case.id)


def test_a_bug_of_a_mended_torch_is_gone(use: object) -> None:
    assert told(BUG, EXAMPLE) == ("gone", "")


def test_a_case_that_does_not_show_the_bug_proves_nothing(use: object) -> None:
    example = Example("eager-cpu", case([x("x0", 2)], call("exp", "x0")))
    why = "both sides agree, and imitating the bug changes nothing here"
    assert told(BUG, example) == ("cannot tell", why)


def test_a_case_that_raises_on_both_sides_proves_nothing(use: object) -> None:
    """The imitation disagrees, but so would any other reference that does not raise."""
    example = Example("eager-cpu", case([x("x0", 2, 3), x("x1", 2, 3)], call("mm", "x0", "x1")))
    state, why = told(BUG, example)
    assert state == "cannot tell"
    assert why.startswith("both sides raise RuntimeError: ")
    assert "mat1 and mat2 shapes cannot be mult" in why


def test_an_error_that_the_record_expects_proves_that_both_sides_are_right(use: object) -> None:
    case_ = case([x("x0", 2, 3), x("x1", 2, 3)], call("mm", "x0", "x1"))
    listed = replace(
        BUG, imitation=None, kinds=("raise",), ops=("mm",), expected="^RuntimeError: .*mat1"
    )
    assert told(listed, Example("eager-cpu", case_)) == ("gone", "")
    other = replace(listed, expected="^RuntimeError: another")
    assert told(other, Example("eager-cpu", case_))[0] == "cannot tell"


@pytest.mark.parametrize(
    ("seeded", "why"),
    [
        ({"unjudged": 2}, "both sides agree, but 2 values cannot be judged"),
        ({"uncompiled": True}, "both sides agree, but the compiler made no graph of it"),
    ],
)
def test_what_was_not_judged_or_not_compiled_proves_nothing(
    use: object, monkeypatch: pytest.MonkeyPatch, seeded: dict[str, object], why: str
) -> None:
    judged = core._judged
    monkeypatch.setattr(core, "_judged", lambda *args: replace(judged(*args), **seeded))
    assert told(BUG, EXAMPLE) == ("cannot tell", why)


def test_another_divergence_is_not_the_bug() -> None:
    example = BUGS["custom-op-body-off"].examples[0]
    state, why = told(BUG, example)
    assert (state, why) == ("cannot tell", "its case shows custom-op-body-off here")


@pytest.mark.thorough
def test_a_nondeterministic_bug_is_tried_ten_times(monkeypatch: pytest.MonkeyPatch) -> None:
    moody = Moody(backends()["eager-cpu"], "")
    monkeypatch.setattr(core, "choose_backends", lambda names: [moody])
    changing = replace(BUG, kinds=("nondeterminism",))
    assert told(changing, EXAMPLE)[0] == "gone"
    monkeypatch.setattr(Moody, "at", Moody.runs - Moody.runs // 4)  # late in the same runs
    monkeypatch.setattr(Moody, "runs", 0)
    assert told(changing, EXAMPLE)[0] != "gone"


def test_a_missing_backend_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {**backends(), "eager-cpu": Missing(backends()["eager-cpu"], "")}
    monkeypatch.setattr("amp_fuzz.backends.registry.backends", lambda: missing)
    why = "backend eager-cpu is missing here: pip install it"
    assert told(BUG, EXAMPLE) == ("cannot tell", why)


def test_a_case_that_kills_its_process_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_fork()
    monkeypatch.setattr(core, "tell", lambda *_: os.kill(os.getpid(), signal.SIGSEGV))
    ((bug, found),) = presence([BUG], **LIMITS)
    assert bug is BUG
    why = "crash: the process died of SIGSEGV"
    assert found == Presence("cannot tell", "eager-cpu", EXAMPLE.case.id, why)


def test_a_bug_whose_cases_disagree_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gone on its first case, and unknown on its second."""
    states = iter(["gone", "cannot tell", "gone", "there"])
    answers = lambda *_, **__: [Presence(next(states))]  # noqa: E731
    monkeypatch.setattr(core, "talk", answers)
    two = replace(BUG, examples=(EXAMPLE, EXAMPLE))
    found = [seen.state for _, seen in presence([two, two], **LIMITS)]
    assert found == ["cannot tell", "there"]


def test_a_bug_without_a_case_cannot_be_told() -> None:
    ((_, found),) = presence([replace(BUG, examples=(), unshown="it hangs")], **LIMITS)
    assert found == Presence("cannot tell", detail="it has no case: it hangs")


def test_a_case_of_another_processor_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    at, why = ("eager-cpu", EXAMPLE.case.id), "it takes a processor with AVX-512"
    wide = replace(EXAMPLE, processor="AVX-512")
    assert core.tell(BUG, wide) == Presence("cannot tell", *at, why)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    assert core.tell(BUG, wide) == core.tell(BUG, EXAMPLE) != Presence("cannot tell", *at, why)


def test_a_case_that_two_torches_tell_in_two_ways_is_of_the_bug_of_this_one() -> None:
    """One assertion, which had no words before torch 2.11."""
    both = [BUGS["compile-saved-tensors-unnamed"], BUGS["compile-saved-tensors"]]
    (mine,), (other,) = ([b for b in both if b.entry.holds(HERE) is has] for has in (True, False))
    assert tell(mine, mine.examples[0]).state == "there"
    seen = tell(other, other.examples[0])
    assert (seen.state, seen.detail) == ("cannot tell", f"its case shows {mine.id} here")
