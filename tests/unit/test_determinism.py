"""What torch documents as nondeterministic, as data, and which results of a case it reaches."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest
import torch

from amp_fuzz.backends.determinism import (
    EXACT,
    Trace,
    algorithms,
    applying,
    listed,
    prepare_cuda,
    sentences,
)
from amp_fuzz.backends.eager import EagerBackend
from amp_fuzz.cases.case import Case, Plan, loads
from amp_fuzz.cases.program import Items
from amp_fuzz.findings.repro.script import repro
from amp_fuzz.oracle.compare import Divergence
from amp_fuzz.reference import Shadow, distance
from tests.helpers import call, case, eager, x

CUDA = listed("cuda")
ADDED = (x("x0", 4), x("x1", 4, dtype="int64", domain="index", bound=2), x("x2", 4))


def documented(on: str) -> set[str]:
    """Return the sentences of the installed torch, of its list of that name."""
    text = torch.use_deterministic_algorithms.__doc__ or ""
    head = {"deterministic": "operations will act", "raises": "operations will throw a"}[on]
    found: list[list[str]] = []
    for line in text[text.index(head) :].partition(":\n")[2].splitlines():
        if re.match(r" {8}\* ", line):
            found.append([line.strip()[2:]])
        elif line.startswith(" " * 10) and found:
            found[-1].append(line.strip())
        elif line.strip() and found:
            break
    return {re.sub(r":\w+:`([^`]*)`|`+", r"\1", " ".join(parts)) for parts in found}


@pytest.mark.parametrize("on", ["deterministic", "raises"])
def test_the_sentences_are_those_of_the_installed_torch(on: str) -> None:
    devices = ("cpu", "cuda", "mps")
    ours = (one for one in sentences() if one.on == on and any(map(one.about, devices)))
    assert {said for one in ours for said in one.says} == documented(on)


def test_each_kernel_is_one_of_the_installed_torch() -> None:
    for device in ("cpu", "cuda", "mps"):
        for name in listed(device).by_name:
            op, _, overload = name.partition(".")
            packet = getattr(torch.ops.aten, op)
            assert not overload or overload in packet.overloads()


@pytest.mark.parametrize("form", ["index_add.default", "index_add_.default", "index_add.out"])
def test_a_kernel_is_found_in_all_its_forms(form: str) -> None:
    op, _, overload = form.partition(".")
    assert CUDA.adding(getattr(getattr(torch.ops.aten, op), overload))
    assert not CUDA.of(torch.ops.aten.add.Tensor)
    assert not listed("npu")


# -- what a trace follows -------------------------------------------------------------------------


def spread(one: Case) -> dict[str, str]:
    return dict(eager().reference().traced(one, CUDA).spread)


def test_a_trace_follows_what_is_computed_from_a_kernel() -> None:
    body = (
        call("index_add", "x0", 0, "x1", "x2"),
        call("mul", "v0", "v0", to="v1"),
        call("mul", "x0", "x0", to="v2"),
        call("zeros_like", "v0", to="v3"),
    )
    assert spread(case(ADDED, *body)) == {"v0": "rounding", "v1": "rounding"}


def test_a_trace_follows_gradients() -> None:
    """The backward pass of `index_select` is an `index_add_`."""
    inputs = (x("w0", 4), ADDED[1], x("w2", 4))
    body = (call("index_select", "w0", 0, "x1"), call("mul", "v0", "w2", to="v1"))
    assert spread(case(inputs, *body)) == {"w0.grad": "rounding"}


def test_a_trace_follows_a_view_and_what_is_written() -> None:
    trace = Trace(CUDA)
    index = torch.tensor([0, 0])
    with trace:
        a, b = torch.zeros(3), torch.zeros(3)
        a.view(3).index_add_(0, index, torch.ones(2))
        b.copy_(a)
        for label, tensor in (("a", a), ("b", b), ("c", torch.zeros(3))):
            trace.note(label, tensor)
    assert trace.spread == {"a": "rounding", "b": "rounding"}
    assert trace.ran == {"index_add_.default"}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_trace_sees_what_composite_ops_call(mode: type) -> None:
    """In inference mode they come to a mode whole."""
    trace = Trace(CUDA)
    with mode(), trace:
        trace.note("a", torch.nn.functional.nll_loss(torch.zeros(2, 3), torch.tensor([0, 1])))
        trace.note("b", torch.nn.functional.mse_loss(torch.zeros(2), torch.ones(2)))
    assert trace.spread == {"a": "rounding"}


@pytest.mark.parametrize(
    ("index", "found"), [([0, 1, 2], {}), ([0, 1, 0], {"a": "any"}), ([0, 1, -3], {"a": "any"})]
)
def test_only_an_element_that_is_written_twice_is_a_choice(
    index: list[int], found: dict[str, str]
) -> None:
    for write in (
        lambda a, i: a.index_put((i,), torch.ones(3)),
        lambda a, i: a.put(i, torch.ones(3)),
        lambda a, i: a.scatter(0, i % 3, torch.ones(3)),
        lambda a, i: a.index_copy(0, i % 3, torch.ones(3)),
    ):
        trace = Trace(CUDA)
        with trace:
            trace.note("a", write(torch.zeros(3), torch.tensor(index)))
        assert trace.spread == found


def test_maxima_of_overlapping_windows_are_a_choice() -> None:
    for indices, found in (([0, 3], {}), ([3, 3], {"a": "any"})):
        trace = Trace(CUDA)
        at = torch.tensor(indices).reshape(1, 1, 1, 2)
        with trace:
            unpooled = torch.ops.aten.max_unpool2d(torch.ones(1, 1, 1, 2), at, [2, 2])
            trace.note("a", unpooled)
        assert trace.spread == found


@pytest.mark.parametrize(
    ("op", "args", "varies"),
    [
        ("cumsum", (torch.ones(3), 0), True),
        ("cumsum", (torch.ones(3, dtype=torch.int64), 0), False),
        ("bincount", (torch.tensor([0, 0]), torch.ones(2)), True),
        ("bincount", (torch.tensor([0, 0]),), False),
    ],
)
def test_the_arguments_decide(op: str, args: tuple[object, ...], varies: bool) -> None:
    assert bool(applying(CUDA, getattr(torch.ops.aten, op).default, args, {})) == varies


def test_of_a_median_only_the_indices_vary() -> None:
    trace = Trace(CUDA)
    with trace:
        values, indices = torch.median(torch.tensor([1.0, 1.0]), 0)
        trace.note("values", values)
        trace.note("indices", indices)
    assert trace.spread == {"indices": "any"}


def test_the_cpu_stays_exact() -> None:
    assert listed("cpu")
    assert EagerBackend("cpu").kernels() is EXACT
    assert EagerBackend("cuda").kernels() is CUDA


# -- bands ----------------------------------------------------------------------------------------


def test_a_band_holds_sums_in_any_order_of_the_result_s_dtype() -> None:
    """Bands of sums that are rounded once would not."""
    torch.manual_seed(3)
    index, source = torch.zeros(40, dtype=torch.int64), torch.randn(40).bfloat16()
    worst = {}
    for adding in (None, lambda func, dtype: CUDA.adding(func)):
        mode = Shadow(16, adding=adding)
        with mode:
            band = mode.band(torch.zeros(1).bfloat16().index_add(0, index, source))
        found = []
        for _ in range(50):
            total = torch.zeros(1).bfloat16()
            for i in torch.randperm(40):
                total += source[i]
            found.append(distance(band, total).excess)
        worst[adding is None] = max(found)
    assert worst[False] < 4 < worst[True]


# -- the plan -------------------------------------------------------------------------------------


def test_a_plan_without_it_is_written_as_before() -> None:
    one = case(ADDED, call("mul", "x0", "x2"))
    assert b"deterministic" not in one.json()
    asks = one.with_plan(deterministic=True)
    assert b'"deterministic":true' in asks.json()
    assert loads(asks.json()) == asks
    assert asks.id != one.id
    Plan(transform="vmap", deterministic=True).check()


@pytest.fixture
def unchanged() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def test_torch_is_asked_for_a_case_and_left_as_it_was(unchanged: None) -> None:
    unpool = call("max_unpool2d", "x0", 2, Items((4, 4)))
    raises = case((x("x0", 1, 1, 4, 4),), unpool)
    for before in (False, True):
        torch.use_deterministic_algorithms(before, warn_only=before)
        for asks in (False, True):
            seen = eager().run([raises.with_plan(deterministic=asks)])[0]
            assert (seen.raised is not None) == asks
            assert torch.are_deterministic_algorithms_enabled() == before
            assert torch.is_deterministic_algorithms_warn_only_enabled() == before


def test_memory_is_filled_under_deterministic_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    with algorithms(True):
        assert torch.empty(3).isnan().all()
    assert torch.utils.deterministic.fill_uninitialized_memory is False


def test_cublas_gets_the_workspace_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    prepare_cuda()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_a_script_asks_too() -> None:
    one = case(ADDED, call("mul", "x0", "x2")).with_plan(deterministic=True)
    text = repro(one, eager(), Divergence("bitwise", "v0", "1", "2"))
    assert "torch.use_deterministic_algorithms(True)\n" in text
    assert "CUBLAS" not in text
