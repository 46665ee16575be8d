"""Entries of the known list explain their own bug on the whole case, and never another one's."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from amp_fuzz.backends import backends, harness, imitation
from amp_fuzz.backends.determinism import Kernels
from amp_fuzz.backends.eager import EagerBackend
from amp_fuzz.backends.harness import Observation, Raised, quiet
from amp_fuzz.backends.reference import ReferenceRuntime
from amp_fuzz.cases.case import Case, uses_autocast
from amp_fuzz.cases.program import (
    downstream,
    statements,
)
from amp_fuzz.config import Options
from amp_fuzz.oracle import Divergence
from amp_fuzz.oracle.errors import complaints
from amp_fuzz.oracle.labels import guilty_op
from amp_fuzz.oracle.trial import Trial
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.runs.setup import known_of
from amp_fuzz.upstream import BUGS, registry, shipped
from amp_fuzz.upstream.evidence import Imitated, Left
from amp_fuzz.upstream.explain import Explainer, judge_of
from amp_fuzz.upstream.known import Known, KnownError, load_known
from amp_fuzz.upstream.remedies import WITHOUT
from tests.helpers import (
    BF16,
    F16,
    WrongKernel,
    call,
    case,
    eager,
    needs_torch,
    one_line,
    program,
    under,
    x,
)


class Example(NamedTuple):
    """The smallest case that shows an upstream bug, after a call that has nothing to do with it."""

    backend: str
    case: Case


NEG = call("neg", "x0", to="v9")
GONE = Known("gone", "a bug of before", "why", quirk="any-query-misses-devices", ops=("neg",))


_LAYER = {
    "self_attn.in_proj_weight": x("x1", 12, 4, dtype="float16", domain="integers"),
    "self_attn.in_proj_bias": x("x2", 12, dtype="float16", domain="integers"),
    "self_attn.out_proj.weight": x("x3", 4, 4, dtype="float16"),
    "self_attn.out_proj.bias": x("x4", 4, dtype="float16"),
    "linear1.weight": x("x5", 3, 4, dtype="float16"),
    "linear1.bias": x("x6", 3, dtype="float16", domain="integers"),
    "linear2.weight": x("x7", 4, 3, dtype="float16"),
    "linear2.bias": x("x8", 4, dtype="float16"),
    "norm1.weight": x("x10", 4, dtype="float16"),
    "norm1.bias": x("x11", 4, dtype="float16"),
    "norm2.weight": x("x12", 4, dtype="float16"),
    "norm2.bias": x("x13", 4, dtype="float16"),
}


def of(name: str) -> Example:
    """Return the example of a bug, beside a call that has nothing to do with it."""
    (shown,) = BUGS[name].examples
    made = shown.case.program
    body, outputs = (NEG, *made.body), ("v9", *made.outputs)
    return Example(shown.backend, shown.case.with_program(body=body, outputs=outputs))


def judged(example: Example, known: tuple[Known, ...], *, wrong: str = "") -> Verdict:
    backend = backends()[example.backend]
    with quiet():
        return judge_of(WrongKernel(backend, wrong) if wrong else backend, known).judge(
            example.case
        )


def test_what_agrees_by_chance_is_not_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody wrote may look like any bug once; it does not look so twice."""
    example = case([x("x0", 2)], call("neg", "x0"), backward="none")
    turns = iter(range(100))

    def changing(self: EagerBackend, one: Case) -> Observation:
        seen = harness.run(one, self.runtime())
        value = seen.values["v0"]
        assert value is not None
        seen.values["v0"] = value + next(turns) * uses_autocast(one)
        return seen

    monkeypatch.setattr(EagerBackend, "observe", changing)
    monkeypatch.setattr(Explainer, "ids", lambda *args: "promote-foreign-half")
    next(turns)
    verdict = judged(Example("eager-cpu", example), shipped())
    assert verdict.divergence is not None
    assert (verdict.outcome, verdict.divergence.kind) == ("diverged", "nondeterminism")


def test_what_changes_at_every_other_call_is_nondeterminism() -> None:
    """Of either side: it never shows where the two are called in turn."""
    library = torch.library.Library("aten", "IMPL")
    calls: list[torch.Tensor] = []

    def neg(of: torch.Tensor) -> torch.Tensor:
        calls.append(of)
        return torch.zeros_like(of).sub(of) * (1 + len(calls) % 2)

    library.impl("neg", neg, "CPU")
    try:
        trial = Trial.of(case([x("x0", 2)], NEG, contexts=(), backward="none"), eager())
        assert trial.changed() is not None
    finally:
        library._destroy()
    assert len(calls) > 4


@pytest.mark.parametrize("side", ["backend", "reference"])
def test_what_changes_on_one_side_is_nondeterminism(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the fourth call on, as a confirmation has it: two are alike before."""
    kind: Any = EagerBackend if side == "backend" else ReferenceRuntime
    honest, turns = kind.run, iter(range(100))
    example = case([x("x0", 2)], NEG)

    def run(self: Any, given: Any) -> Any:
        made = honest(self, given)
        if given in (example, [example]):
            seen = made[0] if isinstance(made, list) else made
            seen.values["v9"] = torch.full((2,), 7.0 + (next(turns) > 2))
        return made

    monkeypatch.setattr(kind, "run", run)
    found = judge_of(eager(), (), "none").judge(example).divergence
    assert found is not None
    assert found.kind == "nondeterminism"


@pytest.mark.parametrize("times", [1, 100])
def test_a_relation_that_holds_the_next_time_is_nondeterminism(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = case([x("x0", 2)], NEG, backward="none")
    honest, left = EagerBackend.observe, iter(range(times))

    def observe(self: EagerBackend, one: Case) -> Observation:
        seen = honest(self, one)
        if one.id != example.id and next(left, None) is not None:
            seen.values["v9"] = torch.full((2,), 7.0)
        return seen

    monkeypatch.setattr(EagerBackend, "observe", observe)
    found = judge_of(eager(), (), "all").judge(example).divergence
    assert found is not None
    assert found.kind == ("nondeterminism" if times == 1 else "relation")


@pytest.mark.parametrize("imitated", [True, False])
def test_a_relation_is_explained_by_a_bug_that_breaks_it_alone(
    imitated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same way, where the reference imitates the bug, and in no other."""
    gone = GONE
    example = case([x("x0", 2)], NEG, backward="none")
    honest, run = EagerBackend.observe, ReferenceRuntime.run

    def wrong(one: Case, seen: Observation) -> Observation:
        if one.id != example.id:
            seen.values["v9"] = torch.full((2,), 7.0)
        return seen

    def imitating(self: ReferenceRuntime, one: Case) -> Observation:
        seen = run(self, one)
        return wrong(one, seen) if imitated and gone.quirk in imitation.current().names else seen

    monkeypatch.setattr(EagerBackend, "observe", lambda self, one: wrong(one, honest(self, one)))
    monkeypatch.setattr(ReferenceRuntime, "run", imitating)
    verdict = judge_of(eager(), (gone,), "all").judge(example)
    assert verdict.divergence is not None
    assert verdict.divergence.kind == "relation"
    assert verdict.known == ("gone" if imitated else "")


def entry(name: str) -> Known:
    return next(k for k in shipped() if k.id == name)


def two_bugs() -> Example:
    layer = BUGS["query-asks-cuda"].examples[0].case
    *_, transformer = layer.program.body
    both = case(
        [*layer.program.inputs, x("w20", 2, 2)],
        call("mm", "w20", "w20"),
        under(BF16, call("mm", "w20", "w20", to="v1")),
        msgspec.structs.replace(transformer, outputs=("v2",)),
        contexts=(F16,),
        backward="none",
    )
    return Example("eager-cpu", both)


def test_two_bugs_in_one_case_are_explained_together() -> None:
    example = two_bugs()
    one, other = entry("cache-ignores-dtype"), entry("query-asks-cuda")
    assert judged(example, (one, other)).known == "cache-ignores-dtype+query-asks-cuda"
    assert judged(example, (one,)).outcome == "diverged"
    assert judged(example, (other,)).outcome == "diverged"


def test_what_the_reference_does_not_ask_for_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is, where it asks for it under another quirk only."""
    nested = BUGS["cache-ignores-dtype"].examples[0].case
    asked = backends()["eager-cpu"].reference().asked(nested)
    assert asked is not None
    assert "cache-ignores-dtype" in asked
    assert asked.isdisjoint({"custom-fwd-setup-context", "func-grad-ambient-backward"})

    tried: list[set[str]] = []
    left = Imitated.left

    def noted(self: Imitated, trial: Trial, found: Divergence) -> Left:
        tried.append(set(self.names))
        return left(self, trial, found)

    monkeypatch.setattr(Imitated, "left", noted)
    example = Example("eager-cpu", nested)
    others = tuple(k for k in shipped() if k.id != "cache-ignores-dtype")
    assert judged(example, shipped()).known == "cache-ignores-dtype"
    assert judged(example, others).outcome == "diverged"
    assert tried
    assert set().union(*tried) <= asked

    monkeypatch.setattr(ReferenceRuntime, "asked", lambda self, case: {"query-asks-cuda"})
    tried.clear()
    both = judged(two_bugs(), shipped()).known.split("+")
    assert sorted(both) == ["cache-ignores-dtype", "query-asks-cuda"]
    assert tried[0] == {"query-asks-cuda"}


@dataclass
class Imagined:
    """Bugs that are said, not imitated: notes which are tried, each set of them.

    rest: what is left of a divergence under some. asks: of which others the reference asks there.
    """

    rest: Callable[[set[str]], str]
    asks: Callable[[set[str]], str] = lambda names: ""
    tried: list[set[str]] = field(default_factory=list)

    def known(self, patch: pytest.MonkeyPatch, entries: str, first: str = "") -> list[str]:
        """Return the entries that explain a wrong value, of these. first: asked for at once.

        Those in capitals speak of the backend alone.
        """
        quirk = dict(zip("abcd", ["any-query-misses-devices", *_OTHERS], strict=True))
        names = {quirk[k.lower()]: k for k in entries}
        noted: list[set[str]] = []

        @contextmanager
        def asking() -> Iterator[set[str]]:
            noted.append(set())
            yield noted[-1]

        def left(chosen: Imitated, trial: Trial, found: Divergence) -> Left:
            under = {names[name] for name in chosen.names}
            self.tried.append(under)
            noted[-1].update(quirk[name.lower()] for name in self.asks(under))
            rest = self.rest(under)
            return Left(replace(found, where=rest) if rest else None)

        listed = [
            Known(
                name, "a bug", "why", quirk=quirk[name.lower()],
                backends=("eager-cpu",) if name.isupper() else ("*",),
            )
            for name in entries
        ]  # fmt: skip
        asked = {quirk[name.lower()] for name in first or entries}
        with patch.context() as inner:
            inner.setattr(Imitated, "left", left)
            inner.setattr("amp_fuzz.upstream.explain.asking", asking)
            inner.setattr(ReferenceRuntime, "asked", lambda *_: asked)
            verdict = judge_of(Off(labels=("v0",)), listed, "none").judge(TWICE)
        return verdict.known.split("+") if verdict.known else []


_OTHERS = ("cache-ignores-dtype", "custom-fwd-setup-context", "query-asks-cuda")


def test_what_is_asked_for_under_what_is_asked_for_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first makes the reference ask for the second; both of them, for the third."""
    chain = Imagined(
        lambda names: "" if {"a", "b", "c"} <= names else "v0",
        lambda names: "c" if {"a", "b"} <= names else "b" if "a" in names else "",
    )
    assert chain.known(monkeypatch, "abcd", first="a") == ["a", "b", "c"]
    assert not any("d" in names for names in chain.tried)


def test_what_changes_something_alone_is_tried_together_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two = Imagined(lambda names: {0: "v0", 1: "v1", 2: ""}[len(names & {"b", "C"})])
    assert two.known(monkeypatch, "abCd") == ["C", "b"]
    assert max(map(len, two.tried)) == 2
    assert len(two.tried) == len({frozenset(names) for names in two.tried})  # each once
    # Alone it may change nothing, and be needed.
    hidden = Imagined(lambda names: "" if {"b", "C"} <= names else "v0")
    assert hidden.known(monkeypatch, "abCd") == ["C", "b"]
    some = Imagined(
        lambda names: "" if {"a", "b", "d"} <= names else "v1" if names & {"a", "b"} else "v0"
    )
    assert some.known(monkeypatch, "abCd") == ["a", "b", "d"]


def test_bugs_of_the_backend_explain_before_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    either = Imagined(lambda names: "" if {"B", "C"} <= names or {"a", "d"} <= names else "v0")
    assert either.known(monkeypatch, "aBCd") == ["B", "C"]
    assert either.known(monkeypatch, "abcd") == ["a", "d"]


def test_an_honest_case_needs_no_explanation() -> None:
    verdict = judged(Example("eager-cpu", case([x("x0", 2)], NEG)), shipped())
    assert (verdict.outcome, verdict.known) == ("agreed", "")


def test_an_entry_without_a_quirk_explains_a_kind_at_an_op_and_nothing_else() -> None:
    listed = Known("neg-is-off", "neg is off", "a test", kinds=("bitwise",), ops=("neg",))
    example = Example("eager-cpu", case([x("x0", 2)], NEG, call("abs", "x0")))
    assert judged(example, (listed,), wrong="neg").known == "neg-is-off"
    assert judged(example, (listed,), wrong="abs").outcome == "diverged"
    assert not listed.explains("dtype", ["neg"])


@dataclass(frozen=True)
class Unsteady(EagerBackend):
    """Gets `op` wrong under autocast, differently each time.

    part: without it, it does not. steady: the label of a value that is wrong each time. error,
    leaked: what it does at the end.
    """

    device: str = "cpu"
    op: str = ""
    part: Part | None = None
    steady: str = ""
    error: str = ""
    leaked: str | None = None

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        seen = EagerBackend.run(self, cases)
        for one, observed in zip(cases, seen, strict=True):
            if not uses_autocast(one):
                continue
            if self.part is None or self.part.there:
                for statement in statements(one.program.body):
                    if statement.op == self.op:
                        observed.values[statement.outputs[0]] = torch.full((2,), random.random())
            if self.steady:
                observed.values[self.steady] = torch.full((2,), 7.0)
            if self.error:
                observed.raised = Raised("RuntimeError", self.error, 4, "v3 = torch.exp(v2)")
            observed.leaked = self.leaked
        return seen


@dataclass
class Part:
    """A part of a compiler, without which torch can run."""

    there: bool = True

    @contextmanager
    def without(self) -> Iterator[None]:
        self.there = False
        yield
        self.there = True


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Part:
    made = Part()
    monkeypatch.setitem(WITHOUT, "promised-dtypes", made.without)
    return made


def test_an_entry_may_name_a_compiled_backend() -> None:
    listed = Known("a", "b", "c", kinds=("dtype",), ops=("mm",), backends=("compile[aot_eager]",))
    assert listed.on("compile[aot_eager]")
    assert not listed.on("compile[eager]")
    assert Known("a", "b", "c", backends=("compile*",)).on("compile[eager]")


LIB = Known("lib", "neg is off", "a test", kinds=("nondeterminism", "value"), ops=("ne*",),
            without="promised-dtypes")  # fmt: skip


def test_an_entry_with_a_part_explains_only_what_goes_away_without_it(part: Part) -> None:
    example = case([x("x0", 2)], NEG)
    assert judge_of(Unsteady(op="neg", part=part), (LIB,)).judge(example).known == "lib"
    assert judge_of(Unsteady(op="neg"), (LIB,)).judge(example).known == ""
    assert judge_of(Unsteady(op="neg", part=part), ()).judge(example).known == ""
    other = case([x("x0", 2)], call("abs", "x0"))
    verdict = judge_of(Unsteady(op="abs", part=part), (LIB,)).judge(other)
    assert (verdict.outcome, verdict.known) == ("diverged", "")
    assert verdict.divergence is not None
    assert verdict.divergence.kind == "nondeterminism"


@dataclass(frozen=True)
class Gaining(EagerBackend):
    """Rounds otherwise; is five times too large while a part is there, and `gain` times else."""

    device: str = "cpu"
    exact: bool = False
    gain: float = 1.0
    part: Part = field(default_factory=Part)

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        seen = EagerBackend.run(self, cases)
        gain = 5.0 if self.part.there else self.gain
        for one, observed in zip(cases, seen, strict=True):
            value = observed.values["v9"]
            assert value is not None
            observed.values["v9"] = gain * value if uses_autocast(one) else value
        return seen


def test_what_rounding_explains_without_a_part_is_measured_without_it(part: Part) -> None:
    """The part is wrong in the reference too: what it is off by is no allowance without it."""
    library = torch.library.Library("aten", "IMPL")

    def neg(of: torch.Tensor) -> torch.Tensor:
        wrong = of.dtype == torch.float32 and part.there
        return (1.5 if wrong else 1.0) * torch.zeros_like(of).sub(of)

    library.impl("neg", neg, "CPU")
    try:
        example = case([x("x0", 16)], NEG, backward="none")
        with quiet():
            assert judge_of(Gaining(part=part), (LIB,)).judge(example).known == "lib"
            off = Gaining(part=part, gain=1.3)
            assert judge_of(off, (LIB,)).judge(example).outcome == "diverged"
    finally:
        library._destroy()


@pytest.mark.parametrize(
    ("where", "op"),
    [
        ("v0", "mm"),
        ("w1.grad", "mm"),
        ("relation: second.w1.grad", "mm"),
        ("x0.grad", ""),
        ("v1", "relu"),
    ],
)
def test_a_gradient_names_the_one_statement_that_uses_the_leaf(where: str, op: str) -> None:
    example = case(
        [x("x0", 2, 2), x("w1", 2, 2)], call("mm", "x0", "w1"), call("relu", "x0", to="v1")
    )
    assert guilty_op(example, Divergence("bitwise", where, "", "")) == op


def test_what_names_the_backend_explains_before_what_speaks_of_all() -> None:
    """Where either quirk explains a case, whatever their order in the list."""
    example = of("promote-foreign-half")
    of_all = Known("of-all", "what", "why", quirk="promote-foreign-half")
    most = msgspec.structs.replace(of_all, id="of-most", backends=("!fake-*",))
    own = msgspec.structs.replace(of_all, id="own", backends=(example.backend,))
    assert judged(example, (of_all, most)).known == "of-all"
    assert judged(example, (of_all, most, own)).known == "own"


def test_an_entry_speaks_of_its_backends_only() -> None:
    listed = Known("neg", "what", "why", kinds=("bitwise",), ops=("neg",), backends=("fake-*",))
    assert listed.on("fake-cuda")
    assert not listed.on("eager-cpu")
    example = Example("eager-cpu", case([x("x0", 2)], NEG))
    assert judged(example, (listed,), wrong="neg").outcome == "diverged"


# -- the list ------------------------------------------------------------------------------------


def test_only_bugs_that_the_installed_torch_has_are_shipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A known bug that torch has mended explains nothing: should it come back, that is new."""
    assert "cache-ignores-grad-mode" in BUGS
    monkeypatch.setattr(registry, "version", lambda name: "2.13.0")
    pinned = {known.id for known in registry.shipped.__wrapped__()}
    assert "cache-ignores-grad-mode" not in pinned
    monkeypatch.setattr(registry, "version", lambda name: "2.7.1")
    old = {known.id for known in registry.shipped.__wrapped__()}
    assert "cache-ignores-grad-mode" in old


def test_each_shipped_entry_has_an_example() -> None:
    # An entry without a quirk is about a result that changes from run to run, an error's text, or
    # what goes away with a part of torch.
    # One that torch has mended is in tests/reference/test_autocast.py.
    # A `Bug` has its example: tests/upstream/test_bugs.py.
    entries = [
        k
        for k in known_of(Options())
        if k.id not in BUGS and not k.id.startswith(("torchax-", "xla-"))
    ]
    assert not [k.id for k in entries if k.quirk]
    said = [k for k in entries if not (k.quirk or k.observed or k.without)]
    assert {k.kinds[0] for k in said} <= {"nondeterminism"}


@pytest.mark.parametrize(
    ("prefix", "speaks"),
    [
        ("torchscript-", r"script.*|trace.*"),
        ("trace-", r"trace.*"),
        ("export-", r"export(\[(decomposed|strict)\])?"),
        ("compile-", r"compile\[.*|export.*|torchax.*"),
        ("torchax-", r"torchax.*"),
        ("xla-", r"jax.*|torchax.*"),
    ],
)
def test_an_entry_named_after_a_backend_speaks_of_no_other(prefix: str, speaks: str) -> None:
    """What looks like its bug elsewhere is another one, and no quirk of it is tried there."""
    names = {b for k in shipped() if k.id.startswith(prefix) for b in backends() if k.on(b)}
    assert names
    assert not [name for name in names if not re.fullmatch(speaks, name)]


def test_an_entry_may_say_where() -> None:
    listed = Known("a", "b", "c", kinds=("relation",), ops=("mm",), where="transform: *")
    assert listed.explains("relation", ["mm"], "transform: v0")
    assert not listed.explains("relation", ["mm"], "entry: v0")


def test_an_entry_may_say_what_both_sides_show() -> None:
    listed = Known(
        "a", "b", "c", kinds=("raise",), ops=("*",), expected="^no error$", observed="bad.*luck"
    )
    assert listed.explains("raise", ["mm"], expected="no error", observed="bad old luck")
    assert listed.explains("raise", [""], expected="no error", observed="bad luck")
    assert not listed.explains("raise", ["mm"], expected="no error", observed="good luck")
    assert not listed.explains("raise", ["mm"], expected="an error", observed="bad luck")


# -- a listed divergence is explained, and nothing beside it ---------------------------------------


@dataclass(frozen=True)
class Off(EagerBackend):
    """Doubles values by label under autocast; may raise, too."""

    device: str = "cpu"
    labels: tuple[str, ...] = ()
    error: str = ""

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        seen = EagerBackend.run(self, cases)
        for example, observed in zip(cases, seen, strict=True):
            if not uses_autocast(example):
                continue
            for label in self.labels:
                value = observed.values[label]
                assert value is not None
                observed.values[label] = value * 2 + 1
            if self.error:
                observed.raised = Raised("RuntimeError", self.error, 2, "v0 = -x0")
        return seen


NEG_IS_OFF = Known("neg-is-off", "neg is off", "a test", kinds=("bitwise",), ops=("neg",))
TWICE = case(
    [x("x0", 2), x("x1", 2)],
    call("neg", "x0"),
    call("exp", "v0", to="v1"),
    call("neg", "x1", to="v2"),
    call("exp", "v2", to="v3"),
)


def test_what_a_listed_divergence_has_a_part_in_needs_no_entry() -> None:
    verdict = judge_of(Off(labels=("v0", "v1")), (NEG_IS_OFF,), "none").judge(TWICE)
    assert (verdict.outcome, verdict.known) == ("known", "neg-is-off")


def test_what_it_has_no_part_in_does() -> None:
    verdict = judge_of(Off(labels=("v0", "v3")), (NEG_IS_OFF,), "none").judge(TWICE)
    assert verdict.outcome == "diverged"
    assert verdict.divergence is not None
    assert verdict.divergence.where == "v3"


def test_an_error_behind_a_listed_divergence_is_not_explained() -> None:
    verdict = judge_of(Off(labels=("v0",), error="no"), (NEG_IS_OFF,), "none").judge(TWICE)
    assert verdict.outcome == "diverged"
    assert verdict.divergence is not None
    assert verdict.divergence.kind == "raise"


def test_what_is_new_is_named_where_a_known_bug_comes_first() -> None:
    """Otherwise minimising keeps the known bug, and leaves the new one in what is around it."""
    example = case(
        [x("x0", 2), x("w1", 2, 2)],
        call("mm", "w1", "w1"),
        under(F16, call("mm", "w1", "w1", to="v1")),
        call("exp", "x0", to="v2"),
        call("neg", "v2", to="v3"),
    )
    assert judge_of(Off(), shipped(), "none").judge(example).known == "cache-ignores-dtype"
    verdict = judge_of(Off(labels=("v2", "v3")), shipped(), "none").judge(example)
    assert verdict.divergence is not None
    assert (verdict.outcome, verdict.divergence.where) == ("diverged", "v2")


def test_so_is_an_error_that_comes_after_a_known_bug() -> None:
    example = case(
        [x("x0", 2), x("w1", 2, 2)],
        call("mm", "w1", "w1"),
        under(F16, call("mm", "w1", "w1", to="v1")),
        call("exp", "x0", to="v2"),
    )
    verdict = judge_of(Off(error="brand new"), shipped(), "none").judge(example)
    assert verdict.divergence is not None
    assert (verdict.outcome, verdict.divergence.kind) == ("diverged", "raise")


@dataclass(frozen=True)
class Leaving(Off):
    """Leaves autocast on, too."""

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        seen = super().run(cases)
        for one, observed in zip(cases, seen, strict=True):
            if uses_autocast(one):
                observed.leaked = "autocast enabled: False -> True"
        return seen


def test_a_bug_that_the_backend_has_not_hides_no_value_behind_an_error_or_a_state() -> None:
    """The imitation differs from the backend, which agrees there with the reference."""
    gone = Known(
        "gone", "a bug of before", "why", quirk="any-query-misses-devices", ops=("sigmoid",)
    )
    example = case(
        [x("x0", 8, dtype="bfloat16")],
        call("sigmoid", "x0"),
        call("neg", "x0", to="v1"),
        call("exp", "x0", to="v2"),
    )
    for backend in (Off(labels=("v1",), error="later"), Leaving(labels=("v1",))):
        for known in ((), (gone,)):
            verdict = judge_of(backend, known, "none", confirm=False).judge(example)
            assert verdict.divergence is not None
            assert (verdict.outcome, verdict.divergence.where) == ("diverged", "v1")


def test_nor_one_that_it_puts_in_doubt_and_does_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """The imitation changes another value, and what is known of the shadows of this one."""
    gone = GONE
    run, shadowed = ReferenceRuntime.run, ReferenceRuntime.shadowed

    def runs(self: ReferenceRuntime, one: Case) -> Observation:
        seen = run(self, one)
        if gone.quirk in imitation.current().names:
            seen.values["v3"] = torch.full((2,), 7.0)
        return seen

    def doubts(self: ReferenceRuntime, *how: Any, **named: Any) -> Any:
        seen, bands = shadowed(self, *how, **named)
        if gone.quirk in imitation.current().names:
            bands["v0"] = replace(bands["v0"], known=False)
        return seen, bands

    monkeypatch.setattr(ReferenceRuntime, "run", runs)
    monkeypatch.setattr(ReferenceRuntime, "shadowed", doubts)
    backend = Off(labels=("v0", "v2"), exact=False)
    for known in ((), (gone,)):
        verdict = judge_of(backend, known, "none", confirm=False).judge(TWICE)
        assert verdict.divergence is not None
        assert (verdict.outcome, verdict.divergence.where) == ("diverged", "v0")


@pytest.mark.parametrize("varied", [False, True])
@pytest.mark.parametrize("always", [False, True], ids=["under the bug", "without it too"])
def test_an_imitation_under_which_nothing_is_judged_explains_nothing(
    varied: bool, always: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes v3 what the backend makes it. Of v1, which is wrong too, nothing is known under it.

    varied: because of a kernel that varies, on an exact backend; else because no shadow follows.
    always: without the bug too: then v1 is no divergence.
    """
    run, shadowed, traced = (getattr(ReferenceRuntime, n) for n in ("run", "shadowed", "traced"))

    def doubtful() -> bool:
        return always or GONE.quirk in imitation.current().names

    def runs(self: ReferenceRuntime, one: Case) -> Observation:
        seen = run(self, one)
        if GONE.quirk in imitation.current().names and uses_autocast(one):
            assert seen.values["v3"] is not None
            seen.values["v3"] = seen.values["v3"] * 2 + 1
        return seen

    def doubts(self: ReferenceRuntime, *how: Any, **named: Any) -> Any:
        seen, bands = shadowed(self, *how, **named)
        if doubtful():
            bands["v1"] = replace(bands["v1"], known=False)
        return seen, bands

    def traces(self: ReferenceRuntime, *how: Any) -> Any:
        trace = traced(self, *how)
        if doubtful():
            trace.spread["v1"] = "any"
        return trace

    monkeypatch.setattr(ReferenceRuntime, "run", runs)
    monkeypatch.setattr(ReferenceRuntime, "shadowed", doubts)
    monkeypatch.setattr(ReferenceRuntime, "traced", traces)
    if varied:
        monkeypatch.setattr("amp_fuzz.oracle.trial.kernels_of", lambda backend: Kernels({"": ()}))
    backend = Off(labels=("v1", "v3"), exact=varied)
    verdict = judge_of(backend, (GONE,), "none", confirm=False).judge(TWICE)
    if always:
        assert (verdict.outcome, verdict.known) == ("known", "gone")
    else:
        assert verdict.divergence is not None
        assert (verdict.outcome, verdict.divergence.where) == ("diverged", "v1")


def test_what_the_imitation_alone_changes_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does what the backend does at one value, and at another what the backend does not."""
    gone = GONE
    honest = ReferenceRuntime.run

    def run(self: ReferenceRuntime, one: Case) -> Observation:
        seen = honest(self, one)
        if gone.quirk in imitation.current().names:
            assert seen.values["v1"] is not None
            seen.values |= {"v0": torch.full((2,), 7.0), "v1": seen.values["v1"] * 2 + 1}
        return seen

    monkeypatch.setattr(ReferenceRuntime, "run", run)
    found = judge_of(Off(labels=("v1",)), (gone,), "none").judge(TWICE).divergence
    assert found is not None
    assert found.where == "v1"


def _said(message: str, kind: str = "RuntimeError") -> Observation:
    return Observation(raised=Raised(kind, message, 1, ""))


def test_errors_are_compared_without_what_fake_kernels_say_otherwise() -> None:
    """A fake kernel names its own op first, and writes dtypes as Python does."""
    eager = complaints(_said("linalg.inv: Low precision dtypes not supported. Got Half"))
    fake = "linalg.inv_ex: Low precision dtypes not supported. Got torch.float16"
    assert eager == complaints(_said(fake))
    assert eager == complaints(_said(f"while tracing\nRuntimeError: {fake}", "InductorError"))
    assert eager.isdisjoint(complaints(_said(fake.replace("float16", "bfloat16"))))
    said = "Input type (CPUBFloat16Type) and weight type (torch.HalfTensor) should be the same"
    more = " or input should be a MKLDNN tensor and weight is a dense tensor"
    fake = "Input type (torch.bfloat16) and weight type (torch.float16) should be the same"
    assert complaints(_said(said + more)) == complaints(_said(fake))
    assert complaints(_said(said + more)) != complaints(_said(fake.replace("bfloat", "float")))
    assert eager.isdisjoint(complaints(_said(fake.replace("Low", "No"))))
    assert complaints(Observation()) == set()
    saved = "must be Tensors, got [<class 'torch.Tensor'>, <class 'NoneType'>{}]"
    longer = _said(saved.format(", <class 'torch.Tensor'>"))
    assert complaints(longer) == complaints(_said(saved.format("")))  # another program saves others


def test_errors_are_compared_without_addresses() -> None:
    """As torch 2.12 prints a reference to a storage, from another place at each run."""
    one, other = (
        "<weakref at 0x7ffa3ecf5df0; to a storage>",
        "<weakref at 0x7f3e21dd; to a storage>",
    )
    assert complaints(_said(one)) == complaints(_said(other))
    assert complaints(_said(one)).isdisjoint(complaints(_said("<weakref at 0x1f; to a tensor>")))


def test_errors_are_compared_without_lines_of_made_source() -> None:
    """As export says it of the graph that it wrote, which has other lines with casts."""
    one, other, third = (
        complaints(_said(f"{what} (proxy_tensor.py:1738 in wrapped, line {line})", "SyntaxError"))
        for what, line in (
            ("invalid syntax", 6),
            ("invalid syntax", 11),
            ("unmatched ')'", 6),
        )
    )
    assert one == other
    assert one.isdisjoint(third)


def test_products_refuse_two_dtypes_in_other_words() -> None:
    """What a layer is made of decides which product is the first that refuses them."""
    told = complaints(
        _said("expected m1 and m2 to have the same dtype, but got: c10::Half != float")
    )
    for other in (
        "expected scalar type torch.float16 but found torch.float32",
        "mat1 and mat2 must have the same dtype, but got Float and Half",
        "addmv input tensors must have the same dtype, but got Float, Half, and Float",
    ):
        assert told == complaints(_said(other))
    for other in (
        "expected scalar type Double but found Float",
        "scatter(): Expected self.dtype to be equal to src.dtype",
        "expected two dtypes to be one: Half, Float",
    ):
        assert told.isdisjoint(complaints(_said(other)))


def test_an_imitated_bug_explains_the_error_that_it_raises_and_no_other() -> None:
    """A compiler may wrap an error; that both sides raise is not enough."""
    example = of("custom-fwd-setup-context")

    @dataclass(frozen=True)
    class Says(EagerBackend):
        device: str = "cpu"
        exact: bool = False
        message: str = ""

        def run(self, cases: Sequence[Case]) -> list[Observation]:
            seen = EagerBackend.run(self, cases)
            for observed in seen:
                if observed.raised is not None and self.message:
                    observed.raised = Raised("InductorError", self.message, 1, "elsewhere")
            return seen

    same = EagerBackend("cpu").run([example.case])[0].raised
    assert same is not None
    wrapped = f"It failed.\n{same.kind}: {same.message}"
    with quiet():
        known = [
            judge_of(Says(message=message), shipped(), "none").judge(example.case).known
            for message in (wrapped, "It failed.\nRuntimeError: of something else")
        ]
    assert known == ["custom-fwd-setup-context", ""]


def test_where_a_program_writes_in_place_what_shares_memory_is_downstream() -> None:
    pure = program([x("x0", 2), x("x1", 2)], call("neg", "x0"), call("exp", "x1", to="v1"))
    assert downstream(pure, "v0") == {"v0"}
    written = program(
        [x("x0", 2), x("b1", 2)], call("neg", "x0"), call("exp", "b1", form="inplace", to="v1"),
        call("mul", "b1", "v0", form="inplace", to="v2"),
    )  # fmt: skip
    assert downstream(written, "v0") == {"x0", "b1", "v0", "v1", "v2"}


def test_a_list_reads_as_written(tmp_path: Path) -> None:
    path = tmp_path / "known.toml"
    path.write_text(
        '[[known]]\nid = "a"\nwhat = "b"\nwhy = "c"\nkinds = ["bitwise"]\nops = ["mm"]\n'
    )
    assert load_known(path) == (Known("a", "b", "c", kinds=("bitwise",), ops=("mm",)),)
    path.write_text("")
    assert load_known(path) == ()


HEAD = '[[known]]\nid = "a"\nwhat = "b"\nwhy = "c"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[known", "Expected"),
        ("[[know]]", "unknown field `know`: did you mean 'known'?"),
        (HEAD + 'obseved = "x"', "`$.known[0]`: did you mean 'observed'?"),
        ('[[known]]\nid = "a"', "required field `what`"),
        (HEAD + 'colour = "red"', "unknown field `colour`"),
        (HEAD + "ops = 5", "$.known[0].ops"),
        (HEAD, "a: give a quirk, or kinds and ops"),
        (HEAD + 'kinds = ["bitwise"]', "a: give a quirk, or kinds and ops"),
        (HEAD + 'kinds = ["raise"]\nops = ["*"]\nobserved = "f("', "a: observed='f('"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_a_bad_list_is_one_line_that_names_the_place(
    text: str | bytes, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "known.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(KnownError) as caught:
        load_known(path)
    assert one_line(caught.value)
    assert str(caught.value).startswith(str(path))
    assert said in str(caught.value)


def test_a_list_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(KnownError, match=r"none\.toml: No such file"):
        load_known(tmp_path / "none.toml")


def chosen(tmp_path: Path, text: str) -> list[str]:
    """Return the ids of the entries of a user's list that a run would take."""
    path = tmp_path / "known.toml"
    path.write_text(HEAD + text)
    return [k.id for k in known_of(Options(known=(path,))) if k not in shipped()]


@pytest.mark.parametrize(("versions", "ids"), [(">=2.7", ["a"]), ("<2.7", [])])
def test_a_run_takes_the_entries_of_its_torch_only(
    versions: str, ids: list[str], tmp_path: Path
) -> None:
    text = f'quirk = "cache-ignores-dtype"\ntorch = "{versions}"'
    assert chosen(tmp_path, text) == ids


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('quirk = "cache-ignore-dtype"', "did you mean 'cache-ignores-dtype'"),
        ('quirk = "zzz"', "use one of any-query"),
        ('torch = "soon"\nquirk = "cache-ignores-dtype"', "a: torch='soon'"),
    ],
)
def test_a_run_refuses_an_entry_that_it_cannot_use(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(KnownError, match=said) as caught:
        chosen(tmp_path, text)
    assert one_line(caught.value)


CHANGES = Known("changes", "neg", "a test", kinds=("nondeterminism",), ops=("neg",))
AROUND = case(
    [x("x0", 2), x("x1", 2)],
    call("abs", "x1"),
    call("neg", "x0", to="v1"),
    call("exp", "v1", to="v2"),
    call("sin", "x1", to="v3"),
    backward="none",
)


@pytest.mark.parametrize("steady", ["", "v2"])
def test_what_changes_and_what_comes_of_it_is_known(steady: str) -> None:
    backend = Unsteady(op="neg", steady=steady)
    assert judge_of(backend, (CHANGES,), "none").judge(AROUND).known == "changes"


@pytest.mark.parametrize("steady", ["v0", "v3"])
def test_what_does_not_come_of_it_is_seen_before_it_and_after_it(steady: str) -> None:
    backend = Unsteady(op="neg", steady=steady)
    verdict = judge_of(backend, (CHANGES,), "none").judge(AROUND)
    assert verdict.divergence is not None
    assert (verdict.outcome, verdict.divergence.where) == ("diverged", steady)
    assert verdict.divergence.kind == "bitwise"
    # What is listed itself is known beside it.
    at = msgspec.structs.replace(CHANGES, id="at", kinds=("bitwise",), ops=("abs", "sin"))
    assert judge_of(backend, (CHANGES, at), "none").judge(AROUND).known == "changes+at"
    # Of what is not known to change that is said, and nothing of what is wrong.
    verdict = judge_of(backend, (at,), "none").judge(AROUND)
    assert verdict.divergence is not None
    assert (verdict.outcome, verdict.divergence.kind) == ("diverged", "nondeterminism")


def test_of_two_that_change_each_is_asked_for() -> None:
    one = case(
        [x("x0", 2), x("x1", 2)],
        call("neg", "x0"),
        call("neg", "x1", to="v1"),
        backward="none",
    )
    at = msgspec.structs.replace(CHANGES, where="v0")
    backend = Unsteady(op="neg")
    assert judge_of(backend, (CHANGES,), "none").judge(one).known == "changes"
    verdict = judge_of(backend, (at,), "none").judge(one)
    assert verdict.divergence is not None
    assert (verdict.outcome, verdict.divergence.where) == ("diverged", "v1")
    assert verdict.divergence.kind == "nondeterminism"


def test_a_state_that_is_left_behind_at_times_hides_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is no value that could be left out, and is met each time that is looked again."""
    any_ = Known("any", "a", "b", kinds=("nondeterminism",), ops=("*",), observed="autocast")
    honest, turns = EagerBackend.observe, iter(range(1000))

    def observe(self: EagerBackend, one: Case) -> Observation:
        seen = honest(self, one)
        if uses_autocast(one):
            seen.values["v0"] = torch.full((2,), 7.0)
            seen.leaked = "autocast enabled: False -> True" if next(turns) else None
        return seen

    monkeypatch.setattr(EagerBackend, "observe", observe)
    assert judge_of(eager(), (any_,), "none").judge(AROUND).outcome == "diverged"


def test_an_error_may_come_of_what_changes_and_a_state_does_not() -> None:
    raises = Unsteady(op="neg", error="not a number")
    assert judge_of(raises, (CHANGES,), "none").judge(AROUND).known == "changes"
    leaves = Unsteady(op="neg", leaked="autocast enabled: False -> True")
    verdict = judge_of(leaves, (CHANGES,), "none").judge(AROUND)
    assert verdict.divergence is not None
    assert (verdict.outcome, verdict.divergence.kind) == ("diverged", "state")


@pytest.mark.parametrize(("release", "tried"), [("2.12.1", False), ("2.13.0.dev2+cpu", True)])
def test_an_entry_of_other_versions_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, release: str, tried: bool
) -> None:
    """A nightly counts as its release: scaled-mm-autocast is there from 2.13 on."""
    needs_torch(">=2.13")
    monkeypatch.setattr("amp_fuzz.runs.setup.version", lambda _: release)
    assert ("scaled-mm-autocast" in {entry.id for entry in known_of(Options())}) == tried


def test_an_asserted_dtype_is_explained_at_ops_that_fake_tensors_do_not_cast() -> None:
    """At any other op, what an export was traced under may be wrong."""
    entry = next(k for k in shipped() if k.id == "export-asserted-dtypes")
    said = {"expected": "no error", "observed": "RuntimeError: Tensor dtype mismatch! Expected"}
    assert entry.explains("raise", ["lstm"], **said)
    assert not entry.explains("raise", ["mm", "float"], **said)
