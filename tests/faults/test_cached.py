"""A key of torch's caches without a part of the state is found, and honest keys agree."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest

from amp_fuzz.backends import backends
from amp_fuzz.backends.compile import CompileBackend, another_state
from amp_fuzz.backends.harness import quiet
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from tests.faults.cached import CACHED, SeededCache


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """Torch warns where it is imported."""
    with quiet():
        yield


@pytest.mark.thorough
@pytest.mark.parametrize("name", CACHED)
def test_a_key_without_a_part_of_the_state_is_found(name: str) -> None:
    patches, case = CACHED[name]
    wrong = judge_of(SeededCache(patches=patches), shipped(), "none").judge(case)
    honest = judge_of(SeededCache(), shipped(), "none").judge(case)
    assert wrong.outcome == ("backend" if name == "grad-mode" else "diverged"), wrong
    assert honest.outcome == "agreed", honest


@pytest.mark.thorough
def test_the_observed_run_loads_what_was_compiled_before() -> None:
    _, case = CACHED["autocast-dtype"]
    seen, plain = SeededCache().run([case])[0], CompileBackend("inductor").run([case])[0]
    assert seen.hits > 0
    assert plain.hits == 0
    assert CompileBackend("aot_eager", cached=True).run([case])[0].hits == 0  # it caches nothing
    verdict = judge_of(SeededCache(), shipped(), "none").judge(case)
    assert verdict.record("").hits == seen.hits


@pytest.mark.thorough
def test_the_caches_of_a_case_are_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(ours))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(theirs))
    first, second = SeededCache().run([CACHED["autocast-dtype"][1]] * 2)
    assert first.hits == second.hits > 0  # the second meets nothing of the first
    assert [*ours.glob("amp-fuzz-*")] == []
    assert not (theirs / "fxgraph").exists()
    assert not (theirs / "aotautograd").exists()


@pytest.mark.parametrize("seed", range(4))
def test_another_state_is_one_that_the_program_has(seed: int) -> None:
    _, one = CACHED["autocast-dtype"]
    infers = msgspec.structs.replace(one.with_plan(backward="none"), seed=seed)
    state, other = another_state(infers, "cpu")
    assert state is nullcontext
    assert other.plan.contexts != one.plan.contexts


def test_it_is_a_backend_that_is_named() -> None:
    assert "compile[inductor+cached]" in backends()
