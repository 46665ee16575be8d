"""A rounding that a program writes as a cast may not be left out, and where it is, it is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import msgspec
import pytest
import torch

from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import Observation, quiet
from amp_fuzz.backends.reference import ReferenceRuntime
from amp_fuzz.backends.source import cast_lines, program_source
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import DType, Program, Statement
from amp_fuzz.oracle import Divergence, Rounding, compare
from amp_fuzz.oracle.judge import Explanation
from amp_fuzz.oracle.labels import guilty_op
from amp_fuzz.oracle.trial import Trial
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.patching import patched
from amp_fuzz.reference.shadow.mode import Shadow
from amp_fuzz.reference.shadow.written import casting, written
from amp_fuzz.upstream import quirks, roundings, shipped
from amp_fuzz.upstream.explain import Explainer, judge_of
from tests.helpers import BF16, WrongKernel, call, case, needs_torch, x

pytestmark = pytest.mark.thorough

WIDE = "xla-excess-precision"
AOT, INDUCTOR, EMULATING = "compile[aot_eager]", "compile[inductor]", "compile[inductor+casts]"


def half(value: str, to: str) -> Statement:
    return call("half", value, form="method", to=to)


def wide(value: str, to: str) -> Statement:
    return call("float", value, form="method", to=to)


def plain(*body: Statement, last: bool = False) -> Case:
    made = case([x("x0", 4, 64)], *body, backward="none", contexts=())
    program = msgspec.structs.replace(made.program, outputs=made.program.outputs[-1:])
    return msgspec.structs.replace(made, program=program) if last else made


THERE_AND_BACK = (half("x0", "v0"), wide("v0", "v1"))
EQUAL = plain(
    *THERE_AND_BACK,
    call("eq", "x0", "v1", to="v2"),
    call("sum.dim", "v2", -1, to="v3"),
    last=True,
)
REST = plain(*THERE_AND_BACK, call("sub", "x0", "v1", to="v2"), last=True)
PARTS = plain(*THERE_AND_BACK, call("sub", "x0", "v1", to="v2"), half("v2", "v3"), last=True)
LARGEST = plain(
    *THERE_AND_BACK,
    call("sub", "x0", "v1", to="v2"),
    call("argmax", "v2", -1, to="v3"),
    last=True,
)


def to(dtype: str, value: str, name: str) -> Statement:
    return call("to.dtype", value, DType(dtype), form="method", to=name)  # type: ignore[arg-type]


# Inductor leaves out one rounding of each, and makes another.
STORED = {
    "float64": plain(
        *THERE_AND_BACK,
        call("sum.dim", "v1", -1, to="v2"),
        half("v2", "v3"),
        to("float64", "v3", "v4"),
    ),
    "kernel": plain(*THERE_AND_BACK, call("cumsum", "v0", -1, to="v2"), wide("v2", "v3")),
    "other cast": plain(*THERE_AND_BACK, to("bfloat16", "v0", "v2"), wide("v2", "v3")),
}
PROGRAMS = {"equal": EQUAL, "rest": REST, "parts": PARTS, "largest": LARGEST}


@dataclasses.dataclass(frozen=True)
class Forgetful(WrongKernel):
    """A backend that leaves out roundings, as the reference imitates it under these quirks."""

    quirks: tuple[str, ...] = (WIDE,)

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        with quirks(self.quirks):
            return [backends()[INDUCTOR].reference().run(one) for one in cases]


def forgetful(name: str) -> Forgetful:
    return Forgetful(backends()[name], "")


def rounding(name: str) -> Forgetful:
    """Return a backend that makes every rounding."""
    return Forgetful(backends()[name], "", quirks=())


def judged(name: str, one: Case) -> Verdict:
    with quiet():
        return judge_of(backends()[name], shipped()).judge(one)


@pytest.mark.parametrize("one", [*PROGRAMS.values(), *STORED.values()], ids=[*PROGRAMS, *STORED])
def test_inductor_leaves_out_a_written_cast_without_autocast_too(one: Case) -> None:
    verdict = judged(INDUCTOR, one)
    assert verdict.divergence is not None
    assert (verdict.divergence.kind, verdict.outcome) == ("precision", "backend")


@pytest.mark.parametrize("backend", ["eager-cpu", AOT, EMULATING])
def test_who_makes_the_rounding_agrees(backend: str) -> None:
    if backend == EMULATING:
        needs_torch(">=2.13")
    assert judged(backend, EQUAL).outcome == "agreed"


PRODUCT = case(
    [x("x0", 8, 8, dtype="bfloat16"), x("x1", 8, 8, dtype="bfloat16")],
    call("mul", "x0", "x1"),
    wide("v0", "v1"),
    backward="none",
    contexts=(),
)


def test_a_rounding_that_nobody_writes_is_a_note() -> None:
    with quiet():
        verdict = judge_of(forgetful(INDUCTOR), shipped()).judge(PRODUCT)
        rounded = judge_of(rounding(INDUCTOR), shipped()).judge(PRODUCT)
    assert verdict.outcome == rounded.outcome == "agreed"
    assert rounded.notes == ()
    (note,) = verdict.notes
    assert (note.kind, note.op, note.where) == ("precision", "float", "v1 = v0.float()")
    assert note.message == "the rounding to 16 bits after mul is left out"
    # The option was tried on this compiler, which leaves the rounding out all the same.
    assert note.advice == "Compare with eager's result within the rounding of 16 bits."


def test_an_option_is_advised_where_it_makes_the_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the option is one that makes the backend forget nothing."""

    def obeying() -> AbstractContextManager[None]:
        honest: Any = backends()[INDUCTOR].reference().run
        return patched(Forgetful, "run", lambda self, cases: [honest(one) for one in cases])

    monkeypatch.setattr(roundings, "WITHOUT", {"elided-casts": obeying})
    with quiet():
        verdict = judge_of(forgetful(INDUCTOR), shipped()).judge(PRODUCT)
    (note,) = verdict.notes
    assert note.advice.startswith("Set torch._inductor.config.emulate_precision_casts")


def test_a_rounding_that_an_option_promises_is_a_finding() -> None:
    with quiet():
        verdict = judge_of(forgetful(EMULATING), shipped()).judge(PRODUCT)
    assert verdict.divergence is not None
    assert (verdict.outcome, verdict.divergence.kind) == ("diverged", "precision")
    with quiet():
        assert judge_of(rounding(EMULATING), shipped()).judge(PRODUCT).outcome == "agreed"


def test_another_rounding_is_none_that_is_left_out() -> None:
    """A kernel that rounds on the way is off by a unit, which no rounding less explains."""
    backend = backends()[EMULATING]
    reference = backend.reference()
    with quiet():
        expected = reference.run(PRODUCT)
        first = expected.values["v0"]
        assert first is not None
        other = torch.nextafter(first, torch.full_like(first, torch.inf))
        observed = Observation({"v0": other, "v1": other.float()})
        strict = Rounding(
            partial(reference.shadowed, PRODUCT),
            promised=partial(reference.shadowed, PRODUCT, promise="all"),
        )
        off = compare(expected, observed, rounding=strict)
        assert off is not None
        assert off.kind == "precision"
        assert Explainer().left_out(Trial(PRODUCT, backend, expected, observed)) == Explanation()


def test_a_cast_near_the_middle_of_two_numbers_may_round_either_way() -> None:
    """A sum is known up to its own rounding, and so is which way it goes from the middle."""
    middle = 1 + 2.0**-11
    below, above = (torch.tensor([middle * (1 + e)]) for e in (-1e-7, 1e-7))
    with Shadow(64, 0, promise="all") as mode:
        x0 = torch.tensor([middle / 7.0]) * 7.0
        found = x0.half()
        known = torch.tensor([1 + 2.0**-13]).half()
    assert below.half() != above.half()
    samples = {float(v) for v in mode.band(found).samples.flatten()}
    assert samples == {float(below.half()), float(above.half())}
    assert {float(v) for v in mode.band(known).samples.flatten()} == {1.0}


def test_casts_are_told_from_those_that_autocast_makes() -> None:
    """The line that runs is a cast of the program's, or it is another op's."""
    one = case([x("x0", 2, 2)], half("x0", "v0"), call("mm", "x0", "x0", to="v1"), contexts=(BF16,))
    lines = cast_lines(one.program)
    source = program_source(one.program).splitlines()
    assert [source[number - 1].strip() for number in lines] == ["v0 = x0.half()"]
    assert not written()
    names = {"written": written}
    with casting({"<here>": {1: False}}):
        exec(compile("a = written()\nb = written()", "<here>", "exec"), names)
    assert (names["a"], names["b"]) == (True, False)  # type: ignore[comparison-overlap]
    exec(compile("c = written()", "<here>", "exec"), names)
    assert names["c"] is False  # type: ignore[comparison-overlap]


def test_a_cast_of_a_cast_that_nothing_else_takes_is_used_once() -> None:
    one = plain(half("x0", "v0"), to("bfloat16", "v0", "v1"), last=True)
    assert list(cast_lines(one.program).values()) == [True, False]
    kept = msgspec.structs.replace(one.program, outputs=("v0", "v1"))
    assert list(cast_lines(kept).values()) == [False, False]


def test_the_guilty_op_is_the_last_cast_before_a_value() -> None:
    found = Divergence("precision", "v3", "0", "64")
    whole = Program(EQUAL.program.inputs, EQUAL.program.body, EQUAL.program.outputs)
    assert guilty_op(msgspec.structs.replace(EQUAL, program=whole), found) == "half"


def test_nothing_is_promised_of_a_program_without_casts() -> None:
    reference: ReferenceRuntime = backends()[INDUCTOR].reference()
    assert not reference.casts(plain(call("neg", "x0")))
    assert reference.casts(EQUAL)
    assert not backends()["eager-cpu"].reference().casts(EQUAL)


def test_a_cpu_emulates_casts_from_2_13_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the option does nothing there (2.11.0) or raises (2.9.1)."""
    monkeypatch.setattr("amp_fuzz.backends.compile.holds", lambda versions: versions == "<2.13")
    emulating, plain = (backends()[name].availability() for name in (EMULATING, INDUCTOR))
    assert (emulating.status, plain.status) == ("missing", "ready")
    assert emulating.detail.startswith("needs torch 2.13")
