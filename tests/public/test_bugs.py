"""Public bugs show in torch 2.13, amp-fuzz says of what kind they are, and they are told apart."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch

from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from benchmarks.rediscovery import JSON, PAGE, table
from tests.public.bugs import BUGS, Bug

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="bugs of torch 2.13, mended later or not there"
)
BRIEF = {bug.backend: bug for bug in reversed(BUGS)}.values()
"""The first of each backend is in the first tier."""


def mark(bug: Bug) -> list[pytest.MarkDecorator]:
    if "inductor" in bug.backend:
        return [pytest.mark.slow]
    return [] if bug in BRIEF else [pytest.mark.thorough]


PARAMS = [pytest.param(bug, id=bug.name, marks=mark(bug)) for bug in BUGS]
# The second is told as the first, too: it is an instance of it, or the same error.
ALIKE = {
    ("pytorch#157104", "pytorch#153044"),
    ("pytorch#157104", "pytorch#179804"),
    ("pytorch#63552", "pytorch#84092"),
    ("pytorch#84092", "pytorch#63552"),
    ("functorch#305", "pytorch#105682"),
}


@cache
def verdict(backend: str, example: Case) -> Verdict:
    with quiet():
        return judge_of(backends()[backend], shipped()).judge(example)


def recognised(bug: Bug, example: Case) -> bool:
    with quiet():
        return bug.recognise(verdict(bug.backend, example))


@pytest.mark.parametrize("bug", PARAMS)
def test_the_bug_is_reported_and_recognised(bug: Bug) -> None:
    found = verdict(bug.backend, bug.example).divergence
    assert found is not None
    assert found.kind == bug.kind
    assert recognised(bug, bug.example)


@pytest.mark.parametrize("bug", PARAMS)
def test_what_lacks_an_ingredient_is_another_thing(bug: Bug) -> None:
    assert bug.near
    for near in bug.near:
        assert not recognised(bug, near), near


@pytest.mark.parametrize("bug", PARAMS)
def test_no_other_bug_is_taken_for_it(bug: Bug) -> None:
    for other in BUGS:
        if other.backend == bug.backend and other is not bug:
            alike = (bug.name, other.name) in ALIKE
            assert recognised(bug, other.example) == alike, other.name


def test_the_page_says_what_was_measured() -> None:
    assert PAGE.read_text().endswith("\n\n" + table(json.loads(JSON.read_text())))
