"""Settings of torch that change numbers: what applies them, and the bands under them.

Without a GPU, the bands are proven on a device that is as narrow as CUDA may be: `tests.coarse`. A
process can have one such device, so each check of it runs in a fork.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from amp_fuzz.backends import Configurable, backends, fake, privateuse1, vendor
from amp_fuzz.backends.eager import EagerBackend
from amp_fuzz.backends.harness import Observation, quiet
from amp_fuzz.backends.numerics import numerics
from amp_fuzz.backends.settings import _precisions, applied
from amp_fuzz.cases.case import Case, CaseError, loads
from amp_fuzz.cases.settings import SETTINGS, Setting, drawn_on
from amp_fuzz.findings.minimize.plans import plans
from amp_fuzz.findings.repro.as_test import pytest_form
from amp_fuzz.findings.repro.issue import _driven
from amp_fuzz.findings.repro.script import repro
from amp_fuzz.oracle.compare import Divergence
from amp_fuzz.upstream.explain import judge_of
from tests.devices import check_on
from tests.helpers import brief, call, case, drawn, x

EAGER = EagerBackend("cpu")
NO_FLASH = "torch.backends.cuda.enable_flash_sdp(False)"
SHAPE = (2, 2, 16, 8)
ATTENTION = case(
    tuple(x(f"x{i}", *SHAPE) for i in range(3)),
    call("scaled_dot_product_attention", "x0", "x1", "x2"),
    backward="none",
)


def now(setting: Setting) -> object:
    return eval(setting.get, {"torch": torch})


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_a_setting_is_applied_and_set_back(setting: Setting) -> None:
    assert now(setting) == setting.usual, "torch has another default"
    with applied([setting.line]):
        assert now(setting) == setting.value
    assert now(setting) == setting.usual


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_a_setting_is_applied_where_flags_are_frozen(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing torch's own test utilities freezes them (`disable_global_flags`)."""
    flags: dict[str, Any] = torch.backends.flags_frozen.__globals__
    monkeypatch.setitem(flags, "__allow_nonbracketed_mutation_flag", False)
    with pytest.raises(RuntimeError, match="not allowed to set"):
        torch.backends.cudnn.benchmark = True
    with applied([setting.line]):
        assert now(setting) == setting.value
    assert now(setting) == setting.usual


def test_fake_cuda_leaves_cudnn_out_where_flags_are_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a torch with CUDA and no GPU, once its own test utilities are imported."""
    monkeypatch.setattr(fake, "_lacks_gpu", lambda device: True)
    flags: dict[str, Any] = torch.backends.flags_frozen.__globals__
    monkeypatch.setitem(flags, "__allow_nonbracketed_mutation_flag", False)
    with fake.fake_tensors("cuda"):
        assert not torch.backends.cudnn.enabled
    assert torch.backends.cudnn.enabled


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_no_other_precision_is_left_behind(setting: Setting) -> None:
    before = _precisions()
    with applied([setting.line]):
        pass
    assert _precisions() == before


@pytest.mark.skipif(not _precisions(), reason="torch has no fp32_precision")
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_a_user_may_have_set_precisions_one_by_one(setting: Setting) -> None:
    """Then torch refuses to say what its older settings are."""
    own = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = [owner.fp32_precision for owner in own]
    try:
        for owner, precision in zip(own, ("tf32", "ieee"), strict=True):
            owner.fp32_precision = precision
        chosen = _precisions()
        products = numerics("cuda").products
        assert products is not None
        aten = torch.ops.aten
        assert products("default", aten.mm.default) is not None
        assert products("default", aten.convolution.default) is None
        with applied([setting.line]):
            pass
        assert _precisions() == chosen
    finally:
        for owner, precision in zip(own, before, strict=True):
            owner.fp32_precision = precision


def test_what_the_user_set_is_set_back() -> None:
    setting = SETTINGS[NO_FLASH]
    with applied([setting.line]):
        with applied([setting.line]):
            pass
        assert now(setting) is False


def test_a_setting_is_set_back_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), applied([NO_FLASH]):
        _ = 1 / 0
    assert torch.backends.cuda.flash_sdp_enabled()


def test_a_plan_without_settings_has_the_json_that_it_had() -> None:
    assert b"settings" not in case((x("x0", 2),), call("sin", "x0")).json()


def test_a_plan_with_settings_is_read_again_and_shown() -> None:
    one = ATTENTION.with_plan(settings=(NO_FLASH,))
    assert loads(one.json()) == one
    assert f"settings=({NO_FLASH})" in str(one.plan)


def test_an_unknown_setting_is_refused_and_never_run() -> None:
    text = ATTENTION.with_plan(settings=(NO_FLASH,)).json()
    wrong = text.replace(NO_FLASH.encode(), b"torch.evil()")
    with pytest.raises(CaseError, match=r"\$\.settings has 'torch\.evil\(\)': use torch"):
        loads(wrong)


def test_a_setting_reaches_both_sides() -> None:
    plain, without = (EAGER.observe(ATTENTION.with_plan(settings=s)) for s in ((), (NO_FLASH,)))
    assert any(
        not torch.equal(value, without.values[label])  # type: ignore[arg-type]
        for label, value in plain.values.items()
        if value is not None
    ), "the setting changes nothing here"
    one = ATTENTION.with_plan(settings=(NO_FLASH,))
    assert judge_of(EAGER).judge(one).outcome == "agreed"


def test_a_backend_that_ignores_a_setting_is_found() -> None:
    class Ignoring(EagerBackend):
        def observe(self, case: Case) -> Observation:
            return EagerBackend.observe(self, case.with_plan(settings=()))

    found = judge_of(Ignoring("cpu")).judge(ATTENTION.with_plan(settings=(NO_FLASH,)))
    assert found.divergence is not None
    assert found.divergence.kind == "bitwise"


def test_a_script_sets_what_the_case_sets() -> None:
    (label, *_) = EAGER.observe(ATTENTION).values
    found = Divergence("bitwise", label, "1", "2")
    one = ATTENTION.with_plan(settings=(NO_FLASH,))
    assert f"\n{NO_FLASH}\n" in repro(one, EAGER, found)
    text = pytest_form(one, EAGER, found)
    names: dict[str, Any] = {}
    exec(compile(text, "test", "exec"), names)
    (test,) = (value for name, value in names.items() if name.startswith("test_"))
    fixture = names["as_before"].__wrapped__ if hasattr(names["as_before"], "__wrapped__") else None
    assert fixture is not None
    around = fixture()
    next(around)
    test(None)
    assert not torch.backends.cuda.flash_sdp_enabled()
    assert next(around, "ended") == "ended"
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.thorough
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_all_settings_of_a_device_are_drawn(device: str) -> None:
    made = [one.plan for one in drawn(1500, device, settings=drawn_on(device), statements=1)]
    seen = Counter(line for plan in made for line in plan.settings)
    assert seen.keys() == set(drawn_on(device))
    some = sum(bool(plan.settings) for plan in made) / len(made)
    assert 0.08 < some < 0.18
    assert any(len(plan.settings) == 2 for plan in made)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        *((name, "cpu") for name in ("eager-cpu", "compile[inductor]", "script", "privateuse1")),
        *(("eager-cuda", "cuda"), ("compile[inductor]@cuda", "cuda")),
        *((name, "") for name in ("fake-cuda", "jax", "torchax")),
    ],
)
def test_a_backend_has_the_settings_of_its_kernels(name: str, device: str) -> None:
    backend = backends()[name]
    found = backend.settings if isinstance(backend, Configurable) else ()
    assert tuple(found) == drawn_on(device)


def test_without_cudnn_a_convolution_is_a_product_of_cublas() -> None:
    cuda, func = numerics("cuda"), torch.ops.aten.convolution.default
    assert cuda.products is not None
    assert cuda.products("default", func) is not None
    assert not cuda.adds(func, torch.float16)
    with applied(["torch.backends.cudnn.enabled = False"]):
        assert cuda.products("default", func) is None
        assert cuda.adds(func, torch.float16)


def test_a_plainer_plan_has_fewer_settings() -> None:
    both = NO_FLASH, "torch.backends.mkldnn.enabled = False"
    found = {one.plan.settings for one in plans(ATTENTION.with_plan(settings=both))}
    assert {(), (both[0],), (both[1],)} <= found


def test_an_issue_names_the_setting() -> None:
    assert _driven(ATTENTION.with_plan(settings=(NO_FLASH,))) == f"`{NO_FLASH}`"


def test_two_settings_of_a_plan_are_of_different_things() -> None:
    for one in drawn(1500, "cpu", settings=drawn_on("cpu"), statements=1):
        names = [SETTINGS[line].get for line in one.plan.settings]
        assert len(set(names)) == len(names)


def test_the_rest_of_a_case_does_not_depend_on_settings() -> None:
    with_some = drawn(40, "cpu", settings=(NO_FLASH,), statements=3)
    for i, one in enumerate(with_some):
        (first, *_) = drawn(1, "cpu", seed=i, statements=3)
        (second, *_) = drawn(1, "cpu", seed=i, statements=3, settings=(NO_FLASH,))
        assert first == second.with_plan(settings=())
        assert one.plan.settings in ((), (NO_FLASH,))


# -- a device that is as narrow as CUDA may be ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Faulty(vendor.VendorBackend):
    """The device, narrower than it may be, but not under the reference."""

    wrong: str = ""

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        from tests import coarse

        with coarse.faulty(self.wrong) if self.wrong else quiet():
            return vendor.VendorBackend.run(self, cases)


def judged(one: Case, wrong: str = "") -> str:
    """Return what a case comes to on the device, compared with the CPU by shadow arithmetic."""
    from amp_fuzz.backends.devices import policies_of
    from amp_fuzz.policies.tables import adopt
    from tests import coarse

    table = policies_of(coarse.DEVICE, "cuda")
    adopt(table)
    backend = Faulty(device=coarse.DEVICE, table=table, exact=False, wrong=wrong)
    with quiet():
        found = judge_of(backend, []).judge(one)
    return found.divergence.kind if found.divergence else found.outcome


def product(dtype: str, op: str, *shapes: tuple[int, ...], settings: Sequence[str] = ()) -> Case:
    inputs = tuple(x(f"x{i}", *shape, dtype=dtype) for i, shape in enumerate(shapes))
    names = [f"x{i}" for i in range(len(shapes))]
    plan: dict[str, Any] = {"contexts": (), "backward": "none", "settings": tuple(settings)}
    return case(inputs, call(op, *names), **plan)


MATRICES = ((24, 33), (33, 24))
IMAGES = ((2, 3, 9, 9), (8, 3, 3, 3))
HIGH = "torch.set_float32_matmul_precision('high')"
NO_TF32 = "torch.backends.cudnn.allow_tf32 = False"
MATMUL = "torch.backends.cuda.matmul"
WHOLE16 = f"{MATMUL}.allow_fp16_reduced_precision_reduction = False"
WHOLE_B16 = f"{MATMUL}.allow_bf16_reduced_precision_reduction = False"
NARROW16 = f"{MATMUL}.allow_fp16_accumulation = True"


def what_a_setting_allows_is_no_finding() -> None:
    for settings in ((), (HIGH,)):
        assert judged(product("float32", "mm", *MATRICES, settings=settings)) == "agreed"
    for settings in ((), (NO_TF32,)):
        assert judged(product("float32", "conv2d", *IMAGES, settings=settings)) == "agreed"
    for settings in ((), (WHOLE16,), (NARROW16,)):
        assert judged(product("float16", "mm", *MATRICES, settings=settings)) == "agreed"
    for settings in ((), (WHOLE_B16,)):
        assert judged(product("bfloat16", "mm", *MATRICES, settings=settings)) == "agreed"


def what_no_setting_allows_is_found() -> None:
    assert judged(product("float32", "mm", *MATRICES), "tf32 in products") == "value"
    one = product("float32", "conv2d", *IMAGES, settings=(NO_TF32,))
    assert judged(one, "tf32 in convolutions") == "value"


def halves_that_leave_the_range_are_no_finding() -> None:
    """Partial sums may be infinite, where the whole sum is a number."""
    for seed in range(3):
        inputs = tuple(
            x(f"x{i}", *shape, dtype="float16", domain="overflow")
            for i, shape in enumerate(MATRICES)
        )
        one = case(inputs, call("mm", "x0", "x1"), contexts=(), backward="none", seed=seed)
        assert judged(one) == "agreed"
        assert judged(one.with_plan(settings=(WHOLE16,)), "halves of float16") == "range"


def more_than_a_setting_allows_is_found() -> None:
    one = product("float32", "mm", *MATRICES, settings=(HIGH,))
    assert judged(one, "bfloat16 instead of tf32") == "value"
    one = product("float32", "conv2d", *IMAGES)
    assert judged(one, "bfloat16 instead of tf32") == "value"


def sums_of_sixteen_bits_that_are_rounded_are_found() -> None:
    one = product("float16", "mm", *MATRICES, settings=(WHOLE16,))
    assert judged(one, "halves of float16") == "value"
    assert judged(one, "float16 one by one") == "value"
    one = product("bfloat16", "mm", *MATRICES, settings=(WHOLE_B16,))
    assert judged(one, "halves of bfloat16") == "value"


CHECKS = (
    what_a_setting_allows_is_no_finding,
    what_no_setting_allows_is_found,
    halves_that_leave_the_range_are_no_finding,
    more_than_a_setting_allows_is_found,
    sums_of_sixteen_bits_that_are_rounded_are_found,
)


@pytest.mark.skipif(not privateuse1.supported(), reason="needs torch 2.10")
@pytest.mark.parametrize("check", brief(CHECKS, CHECKS[-1]), ids=lambda check: check.__name__)
def test_on_a_device_that_is_coarse(check: Callable[[], None], tmp_path: Path) -> None:
    check_on("coarse", check, tmp_path)
