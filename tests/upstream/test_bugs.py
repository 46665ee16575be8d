"""The guarantees of every known bug, over the records of `amp_fuzz.upstream`.

An example diverges without its bug, and is explained by it alone. A fault beside it, and a wrong
kernel of the op that it is about, are still reported.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, get_args

import msgspec
import pytest
from packaging.specifiers import SpecifierSet

from amp_fuzz import upstream
from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import Observation, quiet
from amp_fuzz.cases.build import BF16, call, under, x
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import FP8, regions, statements
from amp_fuzz.oracle.compare import Kind
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.upstream import BUGS, shipped
from amp_fuzz.upstream.bug import Bug, Example
from amp_fuzz.upstream.explain import judge_of
from amp_fuzz.upstream.harm import HARMS, harm_of
from amp_fuzz.upstream.known import Known, Part
from amp_fuzz.upstream.registry import FILES
from tests.helpers import WrongKernel, needs_torch

# `make test` judges the examples of torch's own bugs, and the first example of these.
BRIEF = {
    "compile-context-leak",
    "export-region-cache",
    "te-recipe-change",
    "torchao-mxfp8-autocast",
    "torchax-promote",
    "torchscript-autodiff",
    "xla-tanh",
}


class Shown(NamedTuple):
    """A bug and one of its examples."""

    bug: Bug
    example: Example

    def __str__(self) -> str:
        return self.bug.id


@dataclass(frozen=True)
class Remembered(WrongKernel):
    """A backend that runs each case once, and a kernel of which may be wrong."""

    seen: dict[Case, Observation] = field(default_factory=dict, compare=False)

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        return [self._wrong(case, self._run(case)) for case in cases]

    def _run(self, case: Case) -> Observation:
        if case not in self.seen:
            (self.seen[case],) = self.inner.run([case])
        kept = copy.copy(self.seen[case])
        kept.values = dict(kept.values)
        return kept


def backend_of(shown: Shown) -> WrongKernel:
    """Return the backend of an example. If its runs cost much, it runs each case once.

    It does not if the bug goes without a part of torch, since the case runs again without it. Nor
    if runs are cheap: they show results that change from run to run.
    """
    bug, example = shown
    cheap = example.backend.startswith(("eager-", "fake-", "privateuse1"))
    kind = WrongKernel if bug.without or cheap else Remembered
    # Without autocast too, where layers of FP8 are tested as autocast is.
    recipes = any(isinstance(context, FP8) for context in regions(example.case.program.body))
    return kind(backends()[example.backend], "", always=recipes)


def beside(case: Case, *, autocast: bool = False) -> Case:
    """Return the case with an unrelated call before it, whose result is returned too.

    autocast: around the call: if it is wrong, that is no bug of the backend alone.
    """
    made = case.program
    neg = call("neg", "x90", to="v90")
    return case.with_program(
        inputs=(*made.inputs, x("x90", 2)),
        body=(under(BF16, neg) if autocast and not case.plan.contexts else neg, *made.body),
        outputs=("v90", *made.outputs),
    )


def refused(shown: Shown) -> bool:
    """Return whether nothing can be compared: the reference raises, and imitates nothing."""
    if shown.bug.imitation is not None:
        return False
    with quiet():
        seen = backends()[shown.example.backend].reference().run(shown.example.case)
    return seen.raised is not None and not seen.values


def wrong_op(example: Example) -> str:
    """Return the op of an example whose wrong kernel must be reported; "" if there is none."""
    if example.wrong is not None:
        return example.wrong
    *_, last = statements(example.case.program.body)
    return last.op


def verdicts(shown: Shown, known: Sequence[Known]) -> Mapping[str, tuple[str, Verdict]]:
    """Return, for each guarantee of an example, the outcome that keeps it and the verdict."""
    bug, example = shown
    backend: WrongKernel = backend_of(shown)

    def judged(case: Case, known: Sequence[Known], wrong: str = "") -> Verdict:
        with quiet():
            return judge_of(replace(backend, op=wrong), known, "all").judge(case)

    if bug.own:
        return {
            "the example is the backend's own": ("backend", judged(example.case, ())),
            "it is beside an unrelated call": ("backend", judged(beside(example.case), ())),
        }
    others = [entry for entry in known if entry.id != bug.id]
    both = beside(example.case)
    found = {
        "the example is explained by its bug": ("known", judged(example.case, known)),
        "no other bug explains it": ("diverged", judged(example.case, others)),
        "it is explained beside an unrelated call": ("known", judged(both, known)),
    }
    if refused(shown):
        return found
    fault = judged(beside(example.case, autocast=True), known, "neg")
    found["a fault beside it is reported"] = "diverged", fault
    op = wrong_op(example)
    if op in {call.op for call in backend.calls(example.case)}:
        found[f"a wrong kernel of {op} is reported"] = "diverged", judged(example.case, known, op)
    return found


def unkept(shown: Shown, known: Sequence[Known]) -> dict[str, str]:
    """Return the guarantees that an example does not keep, each with the verdict that shows it."""
    found = verdicts(shown, known)
    missed = {
        guarantee: f"{verdict.outcome} {verdict.known} {verdict.divergence}"
        for guarantee, (outcome, verdict) in found.items()
        if verdict.outcome != outcome
        or (outcome == "known" and shown.bug.id not in verdict.known.split("+"))
    }
    plain = next(verdict for outcome, verdict in found.values() if outcome != "known")
    if not does_its_harm(shown.bug, plain):
        missed["its record names its harm"] = f"{shown.bug.harm} {plain.divergence}"
    return missed


def does_its_harm(bug: Bug, verdict: Verdict) -> bool:
    """Return whether an example does the harm of the record, as far as this processor can show it.

    One of several may do less. So may one that raises on the reference too.
    """
    if verdict.divergence is None or verdict.seen is None:
        return True  # another guarantee says so
    harm = harm_of(verdict.divergence)
    less = len(bug.examples) > 1 or verdict.seen.raised is not None
    return harm == bug.harm or (less and HARMS.index(harm) > HARMS.index(bug.harm))


def needed(shown: Shown) -> None:
    """Skip a bug that the installed torch does not have, or whose backend is not installed."""
    bug, example = shown
    needs_torch(bug.torch)
    needs_torch(example.torch)
    if lacks := example.lacks():
        pytest.skip(lacks)
    if backends()[example.backend].availability().status != "ready":
        pytest.skip(f"{example.backend} is not installed")


def family(bug: Bug) -> str:
    """Return the folder of `amp_fuzz/upstream` whose file has a bug, or that of its page."""
    if bug.own:
        return bug.page.partition("/")[0]
    (name,) = (file.__name__ for file in FILES if bug in file.BUGS)
    return name.split(".")[-2]


def examples() -> Iterator[pytest.param]:
    """Yield every example, by backend. Most are thorough."""
    every = [Shown(bug, example) for bug in BUGS.values() for example in bug.examples]
    for shown in sorted(every, key=lambda shown: (shown.example.backend, shown.bug.id)):
        first = shown.bug.id in BRIEF and shown.example == shown.bug.examples[0]
        brief = first or family(shown.bug) == "torch"
        yield pytest.param(shown, id=str(shown), marks=[] if brief else pytest.mark.thorough)


@pytest.mark.parametrize("shown", [*examples()])
def test_an_example_is_explained_by_its_bug_alone_and_hides_no_fault(shown: Shown) -> None:
    needed(shown)
    assert not unkept(shown, shipped())


def test_a_guarantee_that_an_example_does_not_keep_is_named() -> None:
    """Each is broken once: by a list without the bug, one with a twin, and a wrong kernel."""
    bug = BUGS["promote-foreign-half"]
    shown = Shown(bug, bug.examples[0])
    own = [entry for entry in shipped() if entry.id == bug.id]
    twin = [*own, msgspec.structs.replace(own[0], id="twin")]
    all_of_it = Known("all", "all", "all", kinds=get_args(Kind), ops=("*",))
    assert not unkept(shown, own)
    for harm in ("silent dtype", "refuses"):
        misnamed = shown._replace(bug=replace(bug, harm=harm))
        assert list(unkept(misnamed, own)) == ["its record names its harm"]
    assert list(unkept(shown, ())) == [
        "the example is explained by its bug",
        "it is explained beside an unrelated call",
    ]
    assert list(unkept(shown, twin)) == ["no other bug explains it"]
    assert [*unkept(shown, [*own, all_of_it])][-2:] == [
        "a fault beside it is reported",
        f"a wrong kernel of {wrong_op(shown.example)} is reported",
    ]


def test_the_brief_examples_are_of_every_family() -> None:
    shown = {family(BUGS[name]) for name in BRIEF if BUGS[name].examples}
    assert shown == {family(bug) for bug in BUGS.values()} - {"torch"}


@pytest.mark.parametrize("bug", BUGS.values(), ids=lambda bug: bug.id)
def test_its_record_is_whole(bug: Bug) -> None:
    assert bug.examples or bug.unshown
    assert bug.imitation is not None or (bug.kinds and bug.ops)
    SpecifierSet(bug.torch)
    assert all(SpecifierSet(example.torch) is not None for example in bug.examples)
    assert set(bug.kinds) <= set(get_args(Kind))
    assert bug.without in get_args(Part)
    re.compile(bug.expected)
    re.compile(bug.observed)
    assert [name for name in backends() if bug.entry.on(name)]


def test_no_file_of_a_folder_is_forgotten() -> None:
    """A file has bugs, or is imported by one that has."""
    folder = Path(upstream.__file__).parent
    files = {path for path in folder.glob("*/*.py") if path.name != "__init__.py"}
    having = {Path(str(file.__file__)) for file in FILES}
    texts = "".join(path.read_text("utf-8") for path in folder.rglob("*.py"))
    names = {path: ".".join(path.relative_to(folder).with_suffix("").parts) for path in files}
    others = files - having
    used = {path: names[path].rpartition(".") for path in others}
    assert not [
        str(path)
        for path, (family, _, name) in used.items()
        if f"amp_fuzz.upstream.{family}.{name} import" not in texts
        and not re.search(rf"amp_fuzz\.upstream\.{family} import .*\b{name}\b", texts)
    ]
    assert not list(folder.glob("*/*/*.py")), "a folder in a folder is not looked into"
    assert all((path.parent / "__init__.py").exists() for path in files)
