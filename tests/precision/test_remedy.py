"""The least remedy is the least: that of brute force; and what is printed keeps its promise."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_fuzz.interfaces.precision import api, precision
from amp_fuzz.interfaces.precision.remedy import Found, least
from amp_fuzz.interfaces.precision.runs import Runs
from tests.precision import small_models

Sets = frozenset[frozenset[int]]


def never() -> float:
    return time.monotonic() + 1000


def brute(
    parts: Sequence[Any], enough: Callable[[frozenset[Any]], bool], cost: Callable[[Any], float]
) -> tuple[int, float] | None:
    """Return the size of the least set that is enough, and what the cheapest of that size costs."""
    for size in range(len(parts) + 1):
        good = [some for some in map(frozenset, combinations(parts, size)) if enough(some)]
        if good:
            return size, min(sum(map(cost, some)) for some in good)
    return None


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], Sets, bool, list[float]]:
    """Draw parts, sets that are enough, whether larger ones are too, and costs."""
    parts = draw(st.permutations(range(draw(st.integers(0, 6)))))
    some = st.frozensets(st.sampled_from(parts)) if parts else st.just(frozenset[int]())
    enough = draw(st.frozensets(some, max_size=5))
    costs = draw(st.lists(st.sampled_from((0.0, 0.25, 1.0)), min_size=6, max_size=6))
    return list(parts), enough, draw(st.booleans()), costs


def predicate(enough: Sets, monotone: bool, calls: list[Any]) -> Callable[[frozenset[int]], bool]:
    def ask(some: frozenset[int]) -> bool:
        calls.append(some)
        return any(one <= some for one in enough) if monotone else some in enough

    return ask


@given(problems())
def test_the_least_set_is_that_of_brute_force(
    problem: tuple[list[int], Sets, bool, list[float]],
) -> None:
    parts, enough, monotone, costs = problem
    calls: list[Any] = []
    ask = predicate(enough, monotone, calls)
    found = least(parts, ask, costs.__getitem__, never())
    assert len(calls) == len(set(calls))
    if not ask(frozenset(parts)):
        assert found is None
        return
    expected = brute(parts, ask, costs.__getitem__)
    assert found is not None
    assert found.proof == "least"
    assert expected == (len(found.parts), sum(costs[part] for part in found.parts))
    assert found.tried <= len(set(calls))


@given(problems())
def test_without_time_all_parts_are_the_best_so_far(
    problem: tuple[list[int], Sets, bool, list[float]],
) -> None:
    parts, enough, monotone, costs = problem
    calls: list[Any] = []
    ask = predicate(enough, monotone, calls)
    found = least(parts, ask, costs.__getitem__, time.monotonic() - 1)
    assert len(calls) == 1
    if ask(frozenset(parts)):
        assert found == Found(frozenset(parts), "unproven", 1)
    else:
        assert found is None


@given(problems(), st.integers(0, 20))
@settings(deadline=None)
def test_when_the_time_ends_the_set_is_enough_and_the_proof_is_true(
    problem: tuple[list[int], Sets, bool, list[float]], after: int
) -> None:
    parts, enough, monotone, costs = problem
    calls: list[Any] = []
    ask = predicate(enough, monotone, calls)
    clock = iter(range(10**6))

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return float(next(clock))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("amp_fuzz.interfaces.precision.remedy.time", Clock)
        found = least(parts, ask, costs.__getitem__, float(after))
    tried = set(calls)
    if found is None:
        assert not ask(frozenset(parts))
        return
    assert ask(found.parts)
    smaller = {frozenset(s) for n in range(len(found.parts)) for s in combinations(parts, n)}
    if found.proof == "least":
        assert smaller <= tried
        assert not any(map(ask, smaller))
    if found.proof == "minimal":
        assert not any(ask(found.parts - {part}) for part in found.parts)


@given(st.sets(st.integers(0, 39), max_size=4), st.randoms(use_true_random=False))
def test_many_parts_are_reduced_to_those_that_are_needed(needed: set[int], random: Any) -> None:
    parts = list(range(40))
    random.shuffle(parts)
    calls: list[Any] = []

    def ask(some: frozenset[int]) -> bool:
        calls.append(some)
        return needed <= some

    class Clock:
        """Each look at it takes a second: too long to try all pairs, and enough for the rest."""

        now = 0.0

        @classmethod
        def monotonic(cls) -> float:
            cls.now += 1
            return cls.now

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("amp_fuzz.interfaces.precision.remedy.time", Clock)
        found = least(parts, ask, lambda part: 0.0, 900.0)
    assert found is not None
    assert found.parts == needed
    assert found.proof == ("least" if len(needed) < 2 else "minimal")
    assert len(calls) < 400


# -- from end to end ------------------------------------------------------------------------------


def diagnosed(seed: int, patch: pytest.MonkeyPatch) -> tuple[str, str, str]:
    """Diagnose a small model, hold its remedy against brute force; return what to run elsewhere."""
    small = small_models.written(seed)
    dtype = ("bfloat16", "float16")[seed % 2]
    model, x = small_models.built(small.source, f"/small/model_{seed}.py")
    searches: list[tuple[Any, ...]] = []

    def recorded(parts: Any, enough: Any, cost: Any, deadline: float) -> Any:
        ask = functools.cache(enough)  # each run once, for both searches
        found = least(parts, ask, cost, deadline)
        if not searches:  # of modules; those of their lines follow
            best = brute(parts, ask, cost)
            searches.append((parts, found, cost, best))
        return found

    patch.setattr(api, "least", recorded)
    result = precision(model, x, autocast=getattr(torch, dtype), seconds=1000)
    assert result.verdict == "loses digits", (seed, str(result))
    ((parts, found, cost, best),) = searches
    assert {part.module for part in parts} == set(small.modules)
    assert found.proof == "least"
    assert best == (len(found.parts), sum(map(cost, found.parts))), seed
    assert {part.module for part in found.parts} <= set(small.harmed), seed
    assert result.remedy is not None
    return small.source, result.remedy.code, dtype


def keep_their_promise(given: list[tuple[str, str, str]]) -> None:
    script = Path(small_models.__file__)
    done = subprocess.run(
        [sys.executable, str(script)], input=json.dumps(given), stdout=-1, text=True, check=True
    )
    without = [small_models.digits(source, "", dtype) for source, _, dtype in given]
    for (_, code, dtype), kept, before in zip(given, json.loads(done.stdout), without, strict=True):
        asked = {"bfloat16": 1.2, "float16": 1.65}[dtype]
        assert min(before) < asked, code
        assert min(kept) >= asked, code


def test_a_remedy_is_enough_with_the_products_of_torch_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search multiplies in float32, where sums may be luckier."""
    model, x = small_models.built(small_models.written(1).source, "/small/model_1.py")

    def remedy() -> Any:
        found = precision(model, x, autocast=torch.float16, seconds=1000).remedy
        assert found is not None
        return found.modules, found.lines, found.dtype, found.scale

    honest, expected = Runs.tried, remedy()
    tried: list[bool] = []

    def lucky(runs: Runs, *exempt: Any, **other: Any) -> Any:
        tried.append(runs.native)
        return honest(runs, *exempt, **other) if runs.native else runs.plain()

    monkeypatch.setattr(Runs, "tried", lucky)
    assert remedy() == expected
    assert {*tried} == {False, True}


@pytest.mark.thorough
def test_the_least_remedy_is_that_of_brute_force_and_holds_when_pasted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep_their_promise([diagnosed(seed, monkeypatch) for seed in (1, 4)])


@pytest.mark.slow
def test_the_least_remedies_of_20_models_are_those_of_brute_force(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep_their_promise([diagnosed(seed, monkeypatch) for seed in range(20)])
