"""Inexact backends: what rounding explains agrees, what it does not is a divergence of its kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from amp_fuzz.backends import imitation
from amp_fuzz.backends.eager import EagerBackend
from amp_fuzz.backends.harness import Observation, Raised
from amp_fuzz.backends.reference import ReferenceRuntime
from amp_fuzz.cases import inputs
from amp_fuzz.cases.case import Case, uses_autocast
from amp_fuzz.cases.literals import bits_of
from amp_fuzz.oracle import Rounding
from amp_fuzz.oracle.rounding import THRESHOLD
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.records.schema import MOST_EXCESS
from amp_fuzz.reference import Band, distance, shadow
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from tests.helpers import BF16, F16, call, case, x

Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Inexact(EagerBackend):
    """Changes what eager gives at one label, as a compiler with other kernels may.

    bare: without autocast too.
    """

    device: str = "cpu"
    exact: bool = False
    label: str = "v0"
    change: Change = torch.clone
    bare: bool = True

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        seen = EagerBackend.run(self, cases)
        for one, observed in zip(cases, seen, strict=True):
            value = observed.values.get(self.label)
            if value is not None and (self.bare or uses_autocast(one)):
                observed.values[self.label] = self.change(value)
        return seen


MM = case([x("x0", 6, 8), x("w1", 8, 6)], call("mm", "x0", "w1"))


def judged(change: Change, example: Case = MM, label: str = "v0") -> Verdict:
    return judge_of(Inexact(label=label, change=change)).judge(example)


def kind(verdict: Verdict) -> str:
    return verdict.divergence.kind if verdict.divergence else ""


def nextafter(value: torch.Tensor) -> torch.Tensor:
    return torch.nextafter(value, torch.full_like(value, float("inf")))


@pytest.mark.parametrize("label", ["v0", "w1.grad"])
def test_another_rounding_agrees(label: str) -> None:
    assert judged(nextafter, label=label).outcome == "agreed"
    # Were the backend exact, the same would be a divergence.
    exact = judge_of(Inexact(exact=True, label=label, change=nextafter), relations="none").judge(MM)
    assert exact.outcome == "backend"


@pytest.mark.parametrize(("label", "expected"), [("v0", "value"), ("w1.grad", "grad-value")])
@pytest.mark.parametrize("change", [lambda v: v * 1.1, lambda v: -v, lambda v: v + 0.5])
def test_more_than_rounding_is_a_divergence(label: str, expected: str, change: Change) -> None:
    verdict = judged(change, label=label)
    assert (verdict.outcome, kind(verdict)) == ("backend", expected)
    assert verdict.divergence is not None
    assert verdict.divergence.where == label
    assert "excess" in verdict.divergence.observed


@pytest.mark.parametrize("label", ["v0", "w1.grad"])
@pytest.mark.parametrize("change", [nextafter, lambda v: v * 1.1])
def test_the_record_has_the_excess_that_was_judged_and_the_op_of_its_value(
    label: str, change: Change
) -> None:
    verdict = judged(change, label=label)
    record = verdict.record("all")
    assert (record.excess_op, record.plan) == ("mm", "autocast+backward=outside")
    if verdict.divergence is None:
        assert 0 < record.excess <= THRESHOLD
    else:
        assert f"excess {record.excess:.3g}," in verdict.divergence.observed


def test_equal_values_have_no_excess() -> None:
    record = judged(torch.clone).record("all")
    assert (record.outcome, record.excess, record.excess_op) == ("agreed", -1.0, "")


def test_an_infinite_excess_can_be_written_as_json() -> None:
    verdict = replace(judged(torch.clone), farthest=(float("inf"), "v0"))
    assert verdict.record("all").excess == MOST_EXCESS


def test_dtypes_and_shapes_stay_exact() -> None:
    assert kind(judged(lambda v: v.float())) == "dtype"
    assert kind(judged(lambda v: v[:1])) == "shape"


def test_new_infinities_are_a_divergence() -> None:
    def spoil(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        value[0, 0] = float("inf")
        return value

    assert kind(judged(spoil)) == "nonfinite"


@pytest.mark.parametrize(
    ("samples", "got", "found"),
    [
        ([torch.inf, torch.nan], torch.inf, ""),
        ([torch.nan, torch.nan], torch.inf, "nonfinite"),
        ([torch.inf, torch.nan], 1.0, "nonfinite"),
        ([torch.inf, torch.nan, 1.0], 1.0, ""),
    ],
)
def test_nan_and_infinity_are_told_apart_where_the_samples_do(
    samples: list[float], got: float, found: str
) -> None:
    """A power of what may be 0, of either sign, is NaN or infinite; where they agree it is one."""
    band = Band(
        torch.tensor([torch.nan]),
        torch.tensor([torch.nan], dtype=torch.float64),
        torch.tensor(samples * 8, dtype=torch.float64)[:, None],
        True,
        (),
    )
    rounding = Rounding(lambda *_: (Observation(), {"v0": band}))
    seen = rounding("v0", band.nominal, torch.tensor([got]))
    assert (seen.kind if seen else "") == found


@pytest.mark.parametrize(("left", "expected"), [(0.3, ""), (0.5, "nonfinite")])
def test_a_cancellation_may_be_exactly_0_and_its_reciprocal_infinite(
    left: float, expected: str
) -> None:
    """0.1 * 3 and the number behind 0.3 differ by a rounding that another order may not make."""
    ours, theirs = torch.tensor([0.1]), nextafter(torch.tensor([left]))
    values = [bits_of([float(t)], "float32") for t in (ours, theirs)]
    example = case(
        [x("x0", 1, values=values[0]), x("x1", 1, values=values[1])],
        call("mul.scalar", "x0", 3.0),
        call("sub", "v0", "x1", to="v1"),
        call("reciprocal", "v1", to="v2"),
        contexts=(),
        backward="none",
    )
    spoilt = judged(lambda v: torch.full_like(v, float("inf")), example, "v2")
    assert kind(spoilt) == expected


def test_finite_values_are_measured_beside_infinities_in_doubt() -> None:
    """An overflow that some samples share is in doubt; what stands beside it is not."""
    top = torch.finfo(torch.float32).max
    nominal = torch.tensor([1.0, 2.0, 3.0, float("inf")])
    clean = torch.tensor([1.0, 2.0, 3.0, top], dtype=torch.float64)
    samples = clean.repeat(4, 1)
    samples[0, 3] = float("inf")
    rounding = Rounding(
        lambda n, seed: (Observation(), {"v0": Band(nominal, clean, samples, True, ())})
    )
    assert rounding("v0", nominal, torch.tensor([1.0, 2.0, 3.0, top])) is None
    found = rounding("v0", nominal, torch.tensor([100.0, 200.0, 300.0, top]))
    assert found is not None
    assert found.kind == "value"


def test_nothing_is_said_where_the_shadows_do_not_come() -> None:
    """Under a dispatch mode torch.gru takes another path, and may raise there."""
    rounding = Rounding(lambda n, seed: (Observation(), {}))
    assert rounding("v0", torch.zeros(2), torch.ones(2)) is None
    assert rounding.unjudged == {"v0"}


def test_nothing_is_said_where_the_shadows_compute_something_else() -> None:
    """Bilinear casts what it calls; a mode sees the kernel whole, and so do the shadows."""
    shapes = {"x0": (3, 4), "x1": (3, 5), "x2": (2, 4, 5)}
    inputs_ = [x(name, *shape) for name, shape in shapes.items()]
    example = case(inputs_, call("bilinear", *shapes), backward="none", contexts=(BF16,))
    verdict = judged(nextafter, example)
    assert (verdict.outcome, verdict.unjudged) == ("agreed", 1)
    plain = case(inputs_, call("bilinear", *shapes), backward="none", contexts=())
    verdict = judged(lambda v: v * 1.02, plain)
    assert (kind(verdict), verdict.unjudged) == ("value", 0)


@pytest.mark.parametrize("nominal", [torch.zeros(3), torch.zeros(2, dtype=torch.bfloat16)])
def test_nothing_is_said_where_the_shadows_have_another_type(nominal: torch.Tensor) -> None:
    clean = nominal.double()
    band = Band(nominal, clean, clean.expand(8, *clean.shape), True, ())
    rounding = Rounding(lambda n, seed: (Observation(), {"v0": band}))
    assert rounding("v0", torch.zeros(2), torch.ones(2)) is None
    assert rounding.unjudged == {"v0"}


def test_a_reference_that_is_finite_by_chance_says_nothing_of_nan() -> None:
    """float16 matrix_exp near overflow is finite in torch, and NaN in float64."""
    nominal, got = torch.tensor([1.0, 2.0]), torch.tensor([torch.nan, 2.0])
    clean = got.double()
    band = Band(nominal, clean, clean.expand(8, 2), True, ())
    assert Rounding(lambda n, seed: (Observation(), {"v0": band}))("v0", nominal, got) is None


def test_bands_do_not_depend_on_what_ran_before() -> None:
    """Inputs are made outside the shadows: they are exact, cached or not."""
    example = case([x("x0", 4, 4, dtype="bfloat16")], call("float", "x0", form="method"))
    inputs._values.cache_clear()
    _, bands = EagerBackend("cpu").reference().shadowed(example, 8, 0)
    assert torch.equal(bands["v0"].samples[0], bands["v0"].clean)


def test_a_value_that_left_its_range_is_a_case_of_its_own() -> None:
    """A fusing compiler may keep float32 where float16 overflows."""
    example = case(
        [x("x0", 4, 4, dtype="float16", domain="overflow")],
        call("mul", "x0", "x0"),
        call("float", "v0", to="v1", form="method"),
        contexts=(F16,),
        backward="none",
    )
    verdict = judged(lambda v: torch.where(v.isinf(), 2.5e7, v), example, "v1")
    assert kind(verdict) == "range"
    assert verdict.divergence is not None
    assert "left the range" in verdict.divergence.expected


OVERFLOWS = case(  # v2 has 300 * 300, which float16 has not, and 2 * 2; v4 is one times both
    [
        x("x0", 2, dtype="float16", values=bits_of([300.0, 2.0], "float16")),
        x("x1", 2, dtype="float16", values=bits_of([3.0, 5.0], "float16")),
    ],
    call("mul", "x0", "x0"),
    call("div", "x1", "x1", to="v1"),
    call("mul", "v0", "x1", to="v2"),
    call("sum", "v2", to="v3"),
    call("mul", "v3", "v1", to="v4"),
    contexts=(),
    backward="none",
)


@pytest.mark.parametrize(
    ("change", "label", "found"),
    [
        (lambda v: torch.tensor([270000.0, 20.0]).to(v.dtype), "v2", ""),
        (lambda v: torch.tensor([60000.0, 20.0]).to(v.dtype), "v2", "range"),
        (lambda v: torch.tensor([torch.nan, 20.0]).to(v.dtype), "v2", "range"),
        (lambda v: torch.tensor([torch.inf, torch.inf]).to(v.dtype), "v2", "nonfinite"),
        (lambda v: torch.tensor([60000.0, torch.nan]).to(v.dtype), "v2", "nonfinite"),
        (lambda v: torch.tensor([60000.0, 21.0]).to(v.dtype), "v2", "value"),
        (lambda v: torch.tensor([torch.inf, 21.0]).to(v.dtype), "v2", "value"),
        (lambda v: torch.tensor([torch.inf, torch.inf]).to(v.dtype), "v1", "nonfinite"),
        (lambda v: torch.tensor([4.0, 5.0]).to(v.dtype), "v4", "range"),
    ],
)
def test_only_what_depends_on_an_overflow_may_come_out_otherwise(
    change: Change, label: str, found: str
) -> None:
    """Beside an element that left its range, each other one is judged as ever."""
    assert kind(judged(change, OVERFLOWS, label)) == found


def test_a_cancellation_beside_an_overflow_leaves_other_values_judged() -> None:
    """150 * 150 is beyond the early end: only with the whole range there is a 0 to cancel to."""
    values = [[300.0, 150.0, 1.25], [0.0, 22496.0, 0.25]]
    example = case(
        [
            x(f"x{i}", 3, dtype="float16", values=bits_of(v, "float16"))
            for i, v in enumerate(values)
        ],
        call("mul", "x0", "x0"),
        call("sub", "v0", "x1", to="v1"),
        call("mul.scalar", "v1", 0.3, to="v2"),
        contexts=(),
        backward="none",
    )
    for label in ("v1", "v2"):
        spoilt = judged(lambda v: v.index_fill(0, torch.tensor(2), 1000.0), example, label)
        assert kind(spoilt) == "value"


def test_two_errors_agree_whatever_they_say() -> None:
    example = case([x("x0", 2, 3), x("x1", 2, 3)], call("mm", "x0", "x1"), backward="none")

    @dataclass(frozen=True)
    class Wraps(Inexact):
        def run(self, cases: Sequence[Case]) -> list[Observation]:
            seen = EagerBackend.run(self, cases)
            for observed in seen:
                observed.raised = Raised("TorchRuntimeError", "wrapped", 1, "def program")
            return seen

    assert judge_of(Wraps()).judge(example).outcome == "raised"
    verdict = judge_of(Wraps()).judge(MM)
    assert kind(verdict) == "raise"


def test_shadows_run_only_where_a_bit_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amp_fuzz.backends.reference.Shadow", None)
    assert judged(torch.clone).outcome == "agreed"


@pytest.mark.parametrize("thread", ["inside", "whole"])
def test_shadows_follow_into_threads(thread: str) -> None:
    example = case([x("x0", 6, 8), x("w1", 8, 6)], call("mm", "x0", "w1"), thread=thread)
    assert judged(nextafter, example).outcome == "agreed"
    assert kind(judged(lambda v: v * 1.1, example)) == "value"


@pytest.mark.parametrize(
    "plan",
    [
        {"checkpoint": "reentrant"},
        {"checkpoint": "non_reentrant"},
        {"entry": "custom_fwd"},
        {"second": "double"},
        {"steps": 2},
        {"scaler": True},
    ],
)
def test_shadows_follow_through_plans(plan: dict[str, object]) -> None:
    example = case([x("x0", 6, 8), x("w1", 8, 6)], call("mm", "x0", "w1"), contexts=(BF16,), **plan)
    reference = EagerBackend("cpu").reference()
    expected = reference.run(example)
    seen, bands = reference.shadowed(example, 8, 0)
    assert seen.raised is None
    assert {n for n, v in expected.values.items() if v is not None} == bands.keys()
    for label, value in expected.values.items():
        if value is not None:
            assert torch.equal(bands[label].nominal, value), label
            # GradScaler's kernels take float32 only.
            assert bands[label].known or label.endswith(".updated")


def test_a_fault_is_found_where_torch_itself_is_off() -> None:
    """The tail of gelu is far outside its band; what torch is off by is allowed, and no more."""
    reference = EagerBackend("cpu").reference()
    found = []
    for seed in range(40):
        seeded = case([x("x0", 256)], call("gelu", "x0"), seed=seed, backward="none")
        band = reference.shadowed(seeded, 64, 64)[1]["v0"]
        if distance(band, band.nominal).excess > 4:
            found.append(seeded)
    assert len(found) >= 3
    for seeded in found:
        assert judged(nextafter, seeded).outcome == "agreed"
        assert kind(judged(lambda v: v * 1.02, seeded)) == "value"


def test_the_largest_of_some_values_is_one_of_them() -> None:
    """However they are rounded (pytorch/pytorch#195214); a kernel that finds it nowhere is off."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()

    def found() -> torch.Tensor:
        scaled = x * 0.3
        return scaled == scaled.amax(-1, True)

    seen = shadow(found)
    band = seen.band(seen.result)
    assert band.known
    assert band.samples.any(-1).all()
    assert distance(band, seen.result).excess == 0
    assert distance(band, torch.zeros_like(seen.result)).excess == float("inf")


def test_the_shadows_of_a_case_are_run_once_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is compared with them; those under a quirk are others."""
    runs: list[tuple[object, ...]] = []
    honest = ReferenceRuntime.shadowed

    def counted(self: ReferenceRuntime, example: Case, *how: Any) -> Any:
        runs.append((example.id, imitation.current().names, *how))
        return honest(self, example, *how)

    monkeypatch.setattr(ReferenceRuntime, "shadowed", counted)
    judge = judge_of(Inexact(change=lambda v: v * 1.5, bare=False), shipped())
    example = case([x("x0", 4, 4), x("w1", 4, 4)], call("mm", "x0", "w1"))
    assert judge.judge(example).outcome == "diverged"
    assert len({quirks for _, quirks, *_ in runs}) > 1
    assert len(runs) == len(set(runs)) > 1
    first = len(runs)
    judge.judge(example)  # torch may be another one by now
    assert len(runs) == 2 * first


def test_values_of_bool_are_near_where_the_samples_differ() -> None:
    """A comparison of what rounding moves; torch subtracts no bool."""
    off, on = torch.tensor([False, False]), torch.tensor([True, False])
    samples = torch.tensor([[True, False], [False, False]]).repeat(4, 1)
    band = Band(off, off, samples, known=True, left=())
    rounding = Rounding(lambda *of: (Observation(values={"v0": off}), {"v0": band}))
    assert rounding.near("v0", off, on)
    assert not rounding.near("v0", off, ~on)
    assert not rounding.near("v0", torch.tensor([False, True]), off)  # the samples move with it
