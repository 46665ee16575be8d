"""What holds for every known bug, over the records of `amp_fuzz.upstream`.

Its example diverges without it, and with it is explained by it; a fault beside it, and a wrong
kernel of the op that it is about, are reported all the same.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, get_args

import pytest
from packaging.specifiers import SpecifierSet

from amp_fuzz import upstream
from amp_fuzz.backends import backends
from amp_fuzz.backends.base import Backend
from amp_fuzz.backends.harness import Observation, quiet
from amp_fuzz.cases.build import call, x
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import statements
from amp_fuzz.oracle.compare import Kind
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.upstream import BUGS, shipped
from amp_fuzz.upstream.bug import Bug, Example
from amp_fuzz.upstream.explain import judge_of
from amp_fuzz.upstream.known import Known, Part, Stage
from amp_fuzz.upstream.registry import FILES
from tests.helpers import WrongKernel, needs_torch


class Shown(NamedTuple):
    """A bug and one of its examples."""

    bug: Bug
    example: Example

    def __str__(self) -> str:
        return self.bug.id


class Remembered(WrongKernel):
    """A backend that runs each case once, and a kernel of which may be wrong.

    Not for a bug that goes without a part of torch: its cases run again without it. Nor where a run
    costs little: results that change from run to run are seen there.
    """

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        found = [_run(self.inner.name, case) for case in cases]
        return [self._wrong(case, seen) for case, seen in zip(cases, found, strict=True)]


def _run(name: str, case: Case) -> Observation:
    kept = _observed(name, case)
    seen = copy.copy(kept)
    seen.values = dict(kept.values)
    return seen


@cache
def _observed(name: str, case: Case) -> Observation:
    (seen,) = backends()[name].run([case])
    return seen


def shown() -> Iterator[Shown]:
    for bug in BUGS.values():
        for example in bug.examples:
            yield Shown(bug, example)


EXAMPLES = sorted(shown(), key=lambda shown: (shown.example.backend, shown.bug.id))
every = pytest.mark.parametrize("shown", EXAMPLES, ids=str)


@pytest.fixture(autouse=True)
def installed(request: pytest.FixtureRequest) -> None:
    """Skip a bug that the installed torch does not have, or whose backend is not installed."""
    if "shown" not in request.fixturenames:
        return
    bug, example = request.getfixturevalue("shown")
    needs_torch(bug.torch)
    needs_torch(example.torch)
    if lacks := example.lacks():
        pytest.skip(lacks)
    if backends()[example.backend].availability().status != "ready":
        pytest.skip(f"{example.backend} is not installed")


def judged(
    shown: Shown, known: Sequence[Known], *, wrong: str = "", case: Case | None = None
) -> Verdict:
    bug, example = shown
    cheap = example.backend.startswith(("eager-", "fake-", "privateuse1"))
    kind = WrongKernel if bug.without or cheap else Remembered
    backend: Backend = kind(backends()[example.backend], wrong)
    with quiet():
        return judge_of(backend, known, "all").judge(case or example.case)


def beside(case: Case) -> Case:
    """Return the case with a call before it that has nothing to do with it, and is returned."""
    made = case.program
    return case.with_program(
        inputs=(*made.inputs, x("x90", 2)),
        body=(call("neg", "x90", to="v90"), *made.body),
        outputs=("v90", *made.outputs),
    )


def refused(shown: Shown) -> bool:
    """Return whether nothing can be compared: the reference raises, and imitates nothing."""
    if shown.bug.imitation is not None:
        return False
    with quiet():
        seen = backends()[shown.example.backend].reference().run(shown.example.case)
    return seen.raised is not None and not seen.values


@every
def test_its_example_is_explained_by_it(shown: Shown) -> None:
    verdict = judged(shown, shipped())
    assert verdict.outcome == "known", verdict.divergence
    assert shown.bug.id in verdict.known.split("+")


@every
def test_its_example_is_explained_by_no_other(shown: Shown) -> None:
    others = [entry for entry in shipped() if entry.id != shown.bug.id]
    assert judged(shown, others).outcome == "diverged"


@every
def test_a_fault_beside_it_is_reported(shown: Shown) -> None:
    case = beside(shown.example.case)
    assert judged(shown, shipped(), case=case).outcome == "known"
    if refused(shown):
        pytest.skip("the reference raises: there is nothing to compare")
    assert judged(shown, shipped(), case=case, wrong="neg").outcome == "diverged"


@every
def test_a_wrong_kernel_of_its_op_is_reported(shown: Shown) -> None:
    wrong = shown.example.wrong
    if wrong is None:
        *_, last = statements(shown.example.case.program.body)
        wrong = last.op
    if not wrong or refused(shown):
        pytest.skip("there is nothing to compare")
    assert judged(shown, shipped(), wrong=wrong).outcome == "diverged"


@pytest.mark.parametrize("bug", BUGS.values(), ids=lambda bug: bug.id)
def test_its_record_is_whole(bug: Bug) -> None:
    assert bug.examples or bug.unshown
    assert bug.imitation is not None or (bug.kinds and bug.ops)
    SpecifierSet(bug.torch)
    assert all(SpecifierSet(example.torch) is not None for example in bug.examples)
    assert set(bug.kinds) <= set(get_args(Kind))
    assert bug.without in get_args(Part)
    assert bug.stage in get_args(Stage)
    assert bug.bare in ("", "agrees", "diverges")
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
