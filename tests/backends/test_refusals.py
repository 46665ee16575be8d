"""A fake device raises what real kernels raise where fake kernels of torch skip a check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import amp_fuzz
from amp_fuzz.backends import backends, refusals
from amp_fuzz.backends.fake import fake_tensors
from amp_fuzz.findings.repro.script import repro
from amp_fuzz.interfaces.check.result import CheckResult
from amp_fuzz.oracle import Divergence
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.patching import patched
from amp_fuzz.upstream.explain import judge_of
from benchmarks.fake_checks import measured
from tests.helpers import BF16, call, case, x

F16, F32, B16 = torch.float16, torch.float32, torch.bfloat16
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
Made = Callable[..., torch.Tensor]


@contextmanager
def without_the_list() -> Iterator[None]:
    """Fake kernels alone, as torch has them."""
    with patched(refusals, "refusal", lambda *call: ""):
        yield


REFUSED: dict[str, Callable[[Made], object]] = {
    "mm": lambda t: t(2, 2, dtype=F16) @ t(2, 2, dtype=F32),
    "index_add": lambda t: t(2, 2, dtype=B16).index_add(
        0, t(2, dtype=torch.int64), t(2, 2, dtype=F32)
    ),
    "index_put": lambda t: t(2, dtype=F16).index_put_((t(2, dtype=torch.int64),), t(2, dtype=F32)),
    "masked_fill": lambda t: t(2, dtype=F16).masked_fill(t(2, dtype=torch.bool), -1e9),
    "masked_fill_": lambda t: t(2, dtype=B16).masked_fill_(t(2, dtype=torch.bool), 1e39),
    "full_like": lambda t: torch.full_like(t(2, dtype=F32), 1e9, dtype=F16),
    "layer_norm": lambda t: torch.nn.functional.layer_norm(
        t(2, 2, dtype=F32), (2,), t(2, dtype=F32), t(2, dtype=F16)
    ),
    "sort.values": lambda t: torch.sort(
        t(2, dtype=F32), out=(t(2, dtype=F16), t(2, dtype=torch.int64))
    ),
    "atan2_": lambda t: t(2, 1, dtype=F32).atan2_(t(2, 2, dtype=F32)),
}


def raised(function: Callable[[Made], object], device: str) -> str:
    with pytest.raises(RuntimeError) as caught:
        function(lambda *shape, dtype: torch.zeros(shape, dtype=dtype, device=device))
    return str(caught.value).partition("\n")[0]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", REFUSED)
def test_a_fake_device_refuses_as_the_cpu_does(name: str) -> None:
    real = raised(REFUSED[name], "cpu")
    with fake_tensors("cuda"):
        fake = raised(REFUSED[name], "cuda")
    words = fake.removesuffix(f" ({refusals.ORIGIN})")
    assert words != fake
    assert real.startswith(words)
    with without_the_list(), fake_tensors("cuda"):
        REFUSED[name](lambda *shape, dtype: torch.zeros(shape, dtype=dtype, device="cuda"))


ACCEPTED: dict[str, Callable[[Made], object]] = {
    "infinity": lambda t: t(2, dtype=F16).masked_fill(t(2, dtype=torch.bool), -float("inf")),
    "nan": lambda t: t(2, dtype=F16).masked_fill(t(2, dtype=torch.bool), float("nan")),
    "in range": lambda t: t(2, dtype=B16).masked_fill(t(2, dtype=torch.bool), -1e9),
    "one dtype": lambda t: t(2, 2, dtype=F16) @ t(2, 2, dtype=F16),
    "layer_norm": lambda t: torch.nn.functional.layer_norm(
        t(2, 2, dtype=F16), (2,), t(2, dtype=F32), t(2, dtype=F32)
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_fake_device_accepts_as_the_cpu_does(name: str) -> None:
    for device in ("cpu", "cuda"):
        with fake_tensors("cuda") if device == "cuda" else torch.no_grad():
            ACCEPTED[name](lambda *shape, dtype: torch.zeros(shape, dtype=dtype, device=device))  # noqa: B023


def test_a_number_on_the_cpu_may_have_another_dtype() -> None:
    """``x[mask] = torch.tensor(0.0)`` fills a tensor on a device."""
    with fake_tensors("cuda"):
        target = torch.zeros(4, dtype=F16, device="cuda")
        target[target > 0] = torch.tensor(0.0)


# -- a check, and a run ---------------------------------------------------------------------------


def adds(values: torch.Tensor) -> torch.Tensor:
    square = values @ values.t()
    index = torch.tensor([0], device=values.device)
    return square.index_add(0, index, torch.ones_like(values[:1, :4]))


def fills(values: torch.Tensor) -> torch.Tensor:
    square = values @ values.t()
    return square.masked_fill(square > 0, -1e9)


def fills_half(values: torch.Tensor) -> torch.Tensor:
    return values.half().masked_fill(values > 0, -1e9)


def checked(function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> CheckResult:
    return amp_fuzz.check(function, X, backends="fake-cuda", autocast=dtype, store=None)


@pytest.mark.parametrize(("function", "dtype"), [(adds, B16), (fills, F16)])
def test_check_does_not_agree_with_what_real_kernels_refuse(
    function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    result = checked(function, dtype)
    assert result.verdict == "raises", str(result)
    (note,) = result.notes
    assert note.kind == "autocast-raises"
    assert note.where.startswith("test_refusals.py:")
    assert note.message.endswith(f"({refusals.ORIGIN})")
    with without_the_list():  # without the list, the fake device agrees
        assert checked(function, dtype).verdict == "agrees"


def test_check_says_that_a_call_raises_without_autocast_too() -> None:
    result = checked(fills_half, F16)
    assert result.verdict == "unjudged"
    (run,) = result.runs
    assert run.status == "raised"
    assert f"({refusals.ORIGIN})" in run.detail


def judged() -> Verdict:
    """Return the verdict on a product of two dtypes, with autocast off."""
    inputs = (x("x0", 2, 2), x("x1", 2, 2, dtype="float16"))
    one = case(inputs, call("mm", "x0", "x1"), contexts=(BF16,))
    off = one.with_plan(backward="none", contexts=())
    return judge_of(backends()["fake-cuda"], []).judge(off)


def test_a_case_with_such_a_call_raises_on_both_sides() -> None:
    verdict = judged()
    assert verdict.outcome == "raised"
    assert verdict.seen is not None
    assert verdict.seen.raised is not None
    assert refusals.ORIGIN in verdict.seen.raised.message
    with without_the_list():
        assert judged().outcome == "agreed"


def test_the_script_of_such_a_divergence_runs_amp_fuzz() -> None:
    """Torch's fake kernels alone would accept the call."""
    one = case((x("x0", 2, 2),), call("mm", "x0", "x0"))
    found = Divergence("raise", "v0", "no error", f"RuntimeError: refused ({refusals.ORIGIN})")
    text = repro(one, backends()["fake-cuda"], found)
    assert "# needs: amp-fuzz\n" in text
    assert "judge_of(backends()" in text


# -- the list -------------------------------------------------------------------------------------


def test_the_script_sees_what_the_list_lacks_and_has_wrongly() -> None:
    product = torch.ops.aten.mm.default, (torch.zeros(2, 2), torch.zeros(2, 2)), {}
    found = measured([product])
    assert (found["missing"], found["wrong"]) == ({}, {})
    assert found["listed"] > 0
    with without_the_list():
        assert list(measured([product])["missing"]) == ["mm"]
    with patched(refusals, "refusal", lambda *call: "anything"):
        assert list(measured([product])["wrong"]) == ["mm"]


def test_each_record_is_about_ops_of_torch_and_their_arguments() -> None:
    for record in refusals.listed():
        for name in record.ops:
            op, _, overload = name.partition(".")
            packet = getattr(torch.ops.aten, op)
            named = {overload} if overload else {*packet.overloads()}
            schemas = [getattr(packet, one)._schema for one in named]
            known = {argument.name for schema in schemas for argument in schema.arguments}
            asked = {*record.differ, *record.overflows, *record.broadcasts}
            assert not asked or asked & known, name
