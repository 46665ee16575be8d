"""What JAX keeps on the disk, and the context that modules share, change no bit."""

from __future__ import annotations

import os
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from amp_fuzz.backends.harness import Observation, bits
from amp_fuzz.backends.jax import compiling
from amp_fuzz.backends.jax.backend import Program
from amp_fuzz.backends.process import Apart
from amp_fuzz.backends.torchax.backend import Mode, Torchax, installed
from amp_fuzz.cases.case import Case
from tests.helpers import BF16, call, case, under, x

pytestmark = pytest.mark.thorough

needs_jax = pytest.mark.skipif(not find_spec("jax"), reason="needs JAX")
CASE = case(
    [x("w0", 3, 5), x("x1", 5, 3), x("x2", 3)],
    under(BF16, call("mm", "w0", "x1"), call("add", "v0", "x2", to="v1")),
    call("tanh", "v1", to="v2"),
    backward="outside",
)


class Counting(Program):
    """JAX that says what it found: the platform is ``cpu, 3 asked, 3 found``."""

    def __init__(self, jit: bool, excess: bool, apart: bool) -> None:
        super().__init__("cuda", jit, excess)
        import jax
        from jax._src.interpreters import mlir

        if apart:  # each module in a context of its own, as JAX has it
            mlir.make_ir_context = mlir.make_ir_context.made_by
        self.counts: Counter[str] = Counter()
        jax.monitoring.register_event_listener(
            lambda event, **_: self.counts.update([event.rpartition("/")[2]])
        )

    def observe(self, case: Case) -> Observation:
        self.counts.clear()
        seen = super().observe(case)
        asked, found = self.counts["compile_requests_use_cache"], self.counts["cache_hits"]
        seen.platform = f"{asked} asked, {found} found"
        return seen


def observed(jit: bool = False, excess: bool = False, apart: bool = False) -> tuple[int, int, dict]:  # type: ignore[type-arg]
    process = Apart(f"{__name__}:Counting", jit, excess, apart)
    try:
        seen = process.run(CASE)
    finally:
        process.close()
    assert seen.raised is None
    asked, found = (int(part.split()[0]) for part in seen.platform.split(", "))
    values = {n: bits(v).tolist() if v is not None else None for n, v in seen.values.items()}
    assert "w0.grad" in values
    return asked, found, values


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [n for n in os.environ if n.startswith(("JAX_COMP", "JAX_PERS", "JAX_ENABLE_C"))]:
        monkeypatch.delenv(name)
    for name in ("XDG_CACHE_HOME", "HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(name, str(tmp_path))
    return compiling.folder()


@needs_jax
@pytest.mark.parametrize("jit", [False, True])
def test_what_is_found_on_the_disk_has_the_bits_of_what_was_compiled(
    kept: Path, monkeypatch: pytest.MonkeyPatch, jit: bool
) -> None:
    asked, found, made = observed(jit)
    assert asked > 0
    entries = list(kept.glob("*-cache"))
    assert len(entries) == asked - found
    assert observed(jit) == (asked, asked, made)
    for entry in entries:  # as a process that was killed leaves it
        entry.write_bytes(entry.read_bytes()[: entry.stat().st_size // 2])
    assert observed(jit) == (asked, 0, made)
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")
    assert observed(jit) == (0, 0, made)


@needs_jax
def test_a_module_in_a_shared_context_is_the_module_that_jax_makes(kept: Path) -> None:
    asked, found, made = observed(apart=True)
    assert found < asked
    assert observed(apart=False) == (asked, asked, made)


@needs_jax
def test_other_flags_are_another_key(kept: Path) -> None:
    asked, _, _ = observed(jit=True)
    assert observed(jit=True)[1] == asked
    assert observed(jit=True, excess=True)[1] == 0


@needs_jax
def test_a_folder_that_cannot_be_made_costs_nothing_else(kept: Path) -> None:
    made = observed(jit=True)[2]
    for entry in kept.iterdir():
        entry.unlink()
    kept.rmdir()
    kept.write_text("")
    assert observed(jit=True)[1:] == (0, made)


@needs_jax
def test_the_users_folder_stands(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "theirs"))
    observed(jit=True)
    assert list((tmp_path / "theirs").glob("*-cache"))
    assert not kept.exists()


class CountingTorchax(Torchax):
    """torchax that says how many compilations it asked for."""

    def __init__(self) -> None:
        super().__init__(Mode(jitted=True))
        import jax

        self.counts: Counter[str] = Counter()
        jax.monitoring.register_event_listener(
            lambda event, **_: self.counts.update([event.rpartition("/")[2]])
        )

    def observe(self, case: Case) -> Observation:
        seen = super().observe(case)
        seen.platform = str(self.counts["compile_requests_use_cache"])
        return seen


@pytest.mark.skipif(not installed(), reason="needs torchax")
def test_jitted_on_torchax_the_program_alone_is_compiled(kept: Path) -> None:
    """Forward and backward: not the arrays, narrow ones too, that go in and come out."""
    process = Apart(f"{__name__}:CountingTorchax")
    narrow = [x("x0", 4, 6, dtype="bfloat16"), x("w1", 4, 6, dtype="bfloat16"), x("x2", 1, 6)]
    try:
        body = call("add", "x0", "w1"), call("mul", "v0", "x2", to="v1")
        seen = process.run(case(narrow, *body, backward="outside"))
    finally:
        process.close()
    assert seen.raised is None
    assert seen.values["v0"].dtype == torch.bfloat16  # type: ignore[union-attr]
    assert seen.platform in ("1", "2")


def test_the_oldest_files_go_when_there_is_too_much(tmp_path: Path) -> None:
    for age in range(8):
        (tmp_path / str(age)).write_bytes(b"x" * 100)
        os.utime(tmp_path / str(age), (age, age))
    compiling.trim(tmp_path, 800)
    assert len(list(tmp_path.iterdir())) == 8
    compiling.trim(tmp_path, 799)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3", "4", "5", "6", "7"]


def test_a_context_is_shared_by_so_many_modules() -> None:
    made: list[object] = []

    def make() -> object:
        made.append(object())
        return made[-1]

    context = compiling.shared(make, 2)
    given = [context() for _ in range(5)]
    assert [made.index(one) for one in given] == [0, 0, 1, 1, 2]
    assert compiling.shared(context) is context


def test_it_is_in_the_users_folder_of_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/u")
    assert compiling.folder() == Path("/home/u/.cache/amp-fuzz/jax")
