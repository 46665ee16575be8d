"""JAX's platforms: what is found and recorded, and a TPU's products, simulated on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch

from amp_fuzz.backends import Alone, Precise, backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.backends.jax import platforms
from amp_fuzz.backends.jax.backend import JaxBackend
from amp_fuzz.backends.jax.numerics import numerics
from amp_fuzz.backends.jax.platforms import Platform, PlatformError, found
from amp_fuzz.backends.process import Apart
from amp_fuzz.backends.torchax.backend import Mode, TorchaxBackend, installed
from amp_fuzz.cases.case import Case, Precision, loads
from amp_fuzz.config import Options
from amp_fuzz.findings.minimize.plans import plans
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.reference.shadow.products import Products
from amp_fuzz.runs.engine import Settings, Task, draw
from amp_fuzz.runs.setup import prepare
from tests.faults.tpu import FAULTS
from tests.helpers import call, case, x

pytestmark = pytest.mark.thorough

needs_jax = pytest.mark.skipif(not installed(), reason="needs JAX: pip install 'amp-fuzz[jax]'")

TPU = Platform("tpu", "TPU v5e", versions="jax 0.10.2, jaxlib 0.10.2")
H100 = Platform("gpu", "NVIDIA H100", 2, capability="9.0", versions="jax 0.10.2, jaxlib 0.10.2")
CPU = Platform("cpu", "cpu", versions="jax 0.10.2, jaxlib 0.10.2")


# -- what is found: no JAX ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "text"),
    [
        (CPU, "jax 0.10.2, jaxlib 0.10.2 on cpu"),
        (TPU, "jax 0.10.2, jaxlib 0.10.2 on tpu (TPU v5e), one process at a time"),
        (H100, "jax 0.10.2, jaxlib 0.10.2 on gpu (2 x NVIDIA H100)"),
        (
            Platform("cpu", "cpu", precision="high", versions="jax 1", flags="--xla_x=1"),
            "jax 1 on cpu, matmul precision high, XLA_FLAGS=--xla_x=1",
        ),
    ],
)
def test_a_platform_is_shown_in_one_line(platform: Platform, text: str) -> None:
    assert str(platform) == text


@pytest.mark.parametrize(
    ("platform", "digits"),
    [
        (CPU, {}),
        (TPU, {"default": (8, 1), "high": (8, 3)}),
        (H100, {"default": (11, 1), "high": (11, 1)}),
        (Platform("gpu", "V100", capability="7.0"), {}),
        (Platform("gpu", "MI300", capability="gfx942"), {"default": (11, 1), "high": (11, 1)}),
        (Platform("tpu", "TPU v5e", precision="high"), {"default": (8, 3), "high": (8, 3)}),
        (Platform("tpu", "TPU v5e", precision="highest"), {"high": (8, 3)}),
    ],
)
def test_products_round_as_the_platform_documents(
    platform: Platform, digits: dict[str, tuple[int, int]]
) -> None:
    products = numerics(platform).products
    assert products is not None
    made = {name: products(name, torch.ops.aten.mm.default) for name in get_args(Precision)}
    assert {name: (p.digits, p.passes) for name, p in made.items() if p} == digits


def test_roundoffs_are_those_of_the_documented_formats() -> None:
    roundoffs = [p.roundoff for p in (Products(digits=8), Products(digits=8, passes=3))]
    assert roundoffs == [2.0**-8, 1.5 * 2.0**-16]


def test_a_gpu_keeps_subnormal_numbers() -> None:
    assert [numerics(p).flushes for p in (CPU, H100, TPU)] == [True, False, True]


def test_a_case_has_a_precision_and_keeps_its_id_without_one() -> None:
    plain = case([x("x0", 2, 2)], call("mm", "x0", "x0"), backward="none")
    chosen = plain.with_plan(precision="high")
    assert b"precision" not in plain.json()
    assert loads(chosen.json()) == chosen
    assert "precision=high" in str(chosen)
    assert plain in list(plans(chosen))  # the minimiser leaves it out where it does not matter


def test_the_precision_is_drawn_last() -> None:
    """Only for a backend that has one: what others draw is the same."""
    settings = Settings(("eager-cpu", "jax"), max_statements=2)
    drawn = list(draw(Task("jax", "all", (), 40, 0), settings))
    assert {c.plan.precision for c in drawn} == {"default", "high", "highest"}
    others = list(draw(Task("eager-cpu", "all", (), 40, 0), settings))
    assert {c.plan.precision for c in others} == {"default"}


# -- what JAX finds here --------------------------------------------------------------------------


@needs_jax
def test_doctor_and_records_name_the_platform_and_the_versions() -> None:
    for name in ("jax", "torchax"):
        backend = backends()[name]
        assert isinstance(backend, Precise)
        assert isinstance(backend, Alone)
        assert backend.availability().detail.startswith(f"{found()}; ")
        assert not backend.alone()


@needs_jax
def test_jax_is_not_started_where_it_can_only_find_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is said without it is what it says."""
    for name in [n for n in os.environ if n.startswith(("JAX_", "XLA_", "TPU_"))]:
        monkeypatch.delenv(name)
    if platforms._plugins():
        pytest.skip("a plugin of JAX is installed")
    honest = platforms._asked
    said = honest(())
    monkeypatch.setattr(platforms, "_asked", lambda settings: f"asked with {settings}")
    assert found() == said
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "anywhere")
    assert found() == said
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(PlatformError, match="asked with"):
        found()
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(platforms, "_plugins", lambda: True)
    with pytest.raises(PlatformError, match="asked with"):
        found()


@needs_jax
def test_settings_that_change_numbers_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "tensorfloat32")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    platform = found()
    assert (platform.precision, platform.flags) == ("high", "--xla_cpu_enable_fast_math=false")


@needs_jax
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("JAX_PLATFORMS", "cuda", "set JAX_PLATFORMS=cpu"),
        ("JAX_DEFAULT_MATMUL_PRECISION", "BF16_BF16_F32", "use one of default, bfloat16, high"),
        ("JAX_DEFAULT_MATMUL_PRECISION", "quick", "JAX does not start"),
    ],
)
def test_a_platform_that_cannot_be_used_is_broken(
    name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    state = backends()["jax"].availability()
    assert state.status == "broken"
    assert message in state.detail
    with pytest.raises(PlatformError):
        found()


def test_a_process_leaves_memory_of_a_gpu_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--a")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    platforms.configure("--b")
    assert platforms.os.environ["XLA_FLAGS"] == "--a --b"
    assert platforms.os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


# -- a TPU's products -----------------------------------------------------------------------------


class Other:
    """A process that is said to have found another platform."""

    def __init__(self, process: Apart, platform: Platform) -> None:
        self.run, self._platform = process.run, platform

    def said(self) -> object:
        return self._platform


@pytest.fixture(scope="module", params=["jax", "torchax"])
def tpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tpu]:
    file = tmp_path_factory.mktemp("tpu") / "fault"
    file.write_text("")
    own = ("cuda", False, False) if request.param == "jax" else (Mode(),)
    process = Apart("tests.faults.tpu:Simulated", str(file), request.param, *own)
    yield Tpu(process, file)
    process.close()


class Tpu:
    """A backend on a simulated TPU, and the file that says which fault it has."""

    def __init__(self, process: Apart, file: Path) -> None:
        self.process, self.file = process, file

    def judged(self, one: Case, platform: Platform | None = None, fault: str = "") -> str:
        """Return the kind of a case's divergence, or ""."""
        process = self.process if platform is None else Other(self.process, platform)
        jax = self.process.args[1] == "jax"
        backend = JaxBackend(process=process) if jax else TorchaxBackend(Mode(), process)  # type: ignore[arg-type]
        self.file.write_text(fault)
        with quiet():
            verdict = Judge(backend).judge(one)
        self.file.write_text("")
        assert verdict.platform == "tpu"
        return verdict.divergence.kind if verdict.divergence else ""


def products(precision: str) -> Case:
    """Return a product of float32, outside of autocast, and what follows it."""
    made = case(
        [x("x0", 6, 9), x("w1", 9, 5), x("x2", 5)],
        call("mm", "x0", "w1"),
        call("mul", "v0", "x2", to="v1"),
        contexts=(),
    )
    return made.with_plan(precision=precision)


@needs_jax
@pytest.mark.parametrize("precision", ["default", "high"])
def test_the_rounding_of_products_is_explained_by_the_platform(tpu: Tpu, precision: str) -> None:
    one = products(precision)
    assert tpu.judged(one) == ""
    assert tpu.judged(one, CPU) == "value"


@needs_jax
def test_the_highest_precision_has_the_band_of_float32(tpu: Tpu) -> None:
    one = products("highest")
    assert tpu.judged(one, CPU) == ""
    assert tpu.judged(one, fault="highest-one-pass") == "value"


@needs_jax
@pytest.mark.parametrize(
    ("fault", "precision"),
    [
        ("missing-pass", "high"),
        ("one-pass", "high"),
        ("narrow-high", "high"),
        ("float8", "default"),
    ],
)
def test_a_wrong_product_beside_the_rounding_is_found(tpu: Tpu, fault: str, precision: str) -> None:
    assert fault in FAULTS
    assert tpu.judged(products(precision), fault=fault) == "value"


# -- a device of one process ----------------------------------------------------------------------


def test_the_process_of_an_exclusive_device_ends_when_another_starts() -> None:
    first, second = Apart("tests.faults.tpu:Exclusive"), Apart("tests.faults.tpu:Exclusive")
    assert first.said() == "exclusive"
    assert second.said() == "exclusive"
    one = products("default")
    second.run(one)
    assert (first._process, second._process is None) == (None, False)
    first.run(one)
    assert (first._process is None, second._process) == (False, None)
    first.close()


@needs_jax
@pytest.mark.parametrize(("alone", "workers"), [(True, 1), (False, 4)])
def test_a_device_of_one_process_has_a_run_of_one_worker(
    alone: bool, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JaxBackend, "alone", lambda self: alone)
    options = Options(backends=("jax", "eager-cpu"), workers=4, seed=0)
    assert prepare(options).settings.workers == workers
