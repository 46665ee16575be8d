"""TorchScript: programs are really scripted and optimised, and its own list explains the rest."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch._jit_internal import FunctionModifiers
from torch.jit import frontend
from torch.utils._pytree import tree_map

from amp_fuzz import reference
from amp_fuzz.backends import BackendError, backends, torchscript
from amp_fuzz.backends.harness import Observation, Raised, quiet
from amp_fuzz.backends.imitations import formulas
from amp_fuzz.backends.imitations.merged import merged
from amp_fuzz.backends.reference import ReferenceRuntime
from amp_fuzz.backends.torchscript import _REDUCTIONS, ScriptBackend, _reduced, script_source
from amp_fuzz.backends.torchscript_autocast import Fallen
from amp_fuzz.backends.torchscript_unit import fresh_unit, usable
from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.literals import bits_of
from amp_fuzz.cases.program import (
    Autocast,
    Checkpoint,
    DType,
    InferenceMode,
    NoGrad,
    Program,
    Ref,
    Statement,
    regions,
    statements,
)
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.findings.minimize.target import stage_of
from amp_fuzz.findings.repro.script import repro
from amp_fuzz.oracle import Divergence, compare
from amp_fuzz.oracle.errors import complaints
from amp_fuzz.oracle.trial import Trial
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.runs.audit import audit_op, count
from amp_fuzz.runs.engine import Settings, Task, draw, runnable
from amp_fuzz.strategies.drawing import draw_program
from amp_fuzz.upstream import active_quirks, quirks, shipped
from amp_fuzz.upstream.evidence import Listed
from amp_fuzz.upstream.explain import judge_of
from amp_fuzz.upstream.known import Known
from amp_fuzz.upstream.remedies import WITHOUT
from tests.helpers import BF16, Run, WrongKernel, call, case, drawn, under, x

SCRIPT, TRACE = ScriptBackend("script"), ScriptBackend("trace")
ALL = [b for b in backends().values() if isinstance(b, ScriptBackend)]
INPUTS = [x("x0", 6, 8), x("w1", 8, 6)]
BODY = (call("mm", "x0", "w1"), call("mm", "v0", "v0", to="v1"))
OFF = Autocast(enabled=False)


def judge(backend: ScriptBackend, example: Case, *, known: bool = True) -> Verdict:
    with quiet():
        return judge_of(backend, shipped() if known else ()).judge(example)


def test_they_are_found() -> None:
    names = [b.name for b in ALL]
    assert names == ["script", "script[freeze]", "trace", "trace[freeze]", "trace[check]"]
    assert all(b.availability().status == "ready" for b in ALL)


@pytest.mark.parametrize("backend", ALL, ids=lambda b: b.name)
def test_honest_draws_are_explained(backend: ScriptBackend) -> None:
    settings = Settings(backends=(backend.name,))
    found: list[Verdict] = []
    outcomes: Counter[str] = Counter()
    for example in draw(Task(backend.name, "all", (), 150, 77), settings):
        verdict = judge(backend, example)
        outcomes[verdict.outcome] += 1
        found += [verdict] if verdict.outcome == "diverged" else []
    assert not found, [(v.divergence, str(v.case)) for v in found]
    assert outcomes["agreed"] > 65
    assert outcomes["known"] > 10


def test_what_trace_cannot_do_without_autocast_either_is_known_by_its_error() -> None:
    trace = ScriptBackend("trace")
    example = case([x("x0", 3, dtype="int64")], call("full_like", "x0", True))
    assert judge(trace, example).known == "trace-bool-scalar"
    assert judge(trace, case([x("x0", 3)], call("full_like", "x0", 0.5))).outcome == "agreed"


def test_max_of_all_elements_with_out_is_traced_as_another_op() -> None:
    inputs = [x("x0", 2, 3), x("b1")]
    trace = ScriptBackend("trace")
    wrong = call("max", "x0", form="out", out="b1")
    assert judge(trace, case(inputs, wrong)).known == "trace-max-out"
    one = case([x("x0", 1), x("b1")], wrong)  # the shape is right, the number is not
    assert judge(trace, one).known == "trace-max-out"
    narrow = case([*inputs, x("x2", 3, 3)], wrong, call("mul", "v0", "x2", to="v1"))
    verdict = judge(trace, narrow)
    assert verdict.divergence is not None
    assert (verdict.divergence.kind, verdict.known) == ("raise", "trace-max-out")
    again = call("min", "x0", form="out", out="b1", to="v1")
    after = case(inputs, wrong, again, call("neg", "b1", to="v2"), call("abs", "v0", to="v3"))
    assert judge(trace, after).known == "trace-max-out"
    lost = msgspec.structs.replace(wrong, outputs=("_",))
    assert judge(trace, case(inputs, lost, call("neg", "b1"))).known == "trace-max-out"
    other = call("abs", "x0", to="_")
    assert judge(trace, case(inputs, lost, lost, other, call("neg", "b1"))).known == "trace-max-out"
    least = call("min", "x0", form="out", out="b3", to="_")
    two = case([*inputs, x("b3")], lost, least, call("neg", "b1"), call("abs", "b3", to="v1"))
    assert judge(trace, two).known == "trace-max-out"
    # Another op with out=, and max without, are what they are.
    into = call("neg", "x0", form="out", out="b2", to="v1")
    beside = case([*inputs, x("b2", 2, 3)], wrong, into, call("max", "x0", to="v2"))
    assert judge(trace, beside).known == "trace-max-out"


@pytest.mark.parametrize("name", ["script[freeze]", "trace[freeze]"])
def test_what_a_frozen_program_writes_to_its_constants_stays(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To each; a wrong value in the same program, which freezing it again leaves, is seen."""
    (frozen,) = (b for b in ALL if b.name == name)
    example = case(
        [x("w0", 2), x("x1", 2), x("w2", 2)],
        call("add", "w0", "w0"),
        call("type_as", "v0", "x1", form="method", to="v1"),
        call("cumsum", "v1", -1, form="inplace", to="v2"),
        call("neg", "x1", to="v3"),
        call("add", "w2", "w2", to="v4"),
        call("type_as", "v4", "x1", form="method", to="v5"),
        call("cumsum", "v5", -1, form="inplace", to="v6"),
        contexts=(),
        backward="none",
    )
    assert judge(frozen, example).known == "freeze-kept-constants"
    assert judge(ScriptBackend("script"), example).outcome == "agreed"
    honest = ScriptBackend.run

    def run(self: ScriptBackend, cases: Sequence[Case]) -> list[Observation]:
        seen = honest(self, cases)
        for one in seen:
            for label in ("v0", "v3"):
                value = one.values[label]
                assert value is not None
                one.values[label] = value * 3
        return seen

    monkeypatch.setattr(ScriptBackend, "run", run)
    assert judge(frozen, example).outcome == "diverged"


@pytest.mark.parametrize("name", ["script[freeze]", "trace[freeze]"])
def test_a_fault_of_a_frozen_module_that_ran_before_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of the graph that is optimised; it goes where each call has a module of its own."""
    honest = torch.jit.freeze

    class Wrong:
        def __init__(self, *args: Any) -> None:
            self.module, self.calls = honest(*args), 0
            self.graph = self.module.graph

        def __call__(self, *args: Any) -> Any:
            self.calls += 1
            return tree_map(lambda v: v * 3 if self.calls > 2 else v, self.module(*args))

    (frozen,) = (b for b in ALL if b.name == name)
    example = case(
        [x("w0", 2), x("x1", 2)],
        call("type_as", "w0", "x1", form="method"),
        call("exp", "x1", to="v1"),
        contexts=(),
        backward="none",
    )
    assert judge(frozen, example).outcome == "agreed"
    monkeypatch.setattr(torch.jit, "freeze", Wrong)
    assert judge(frozen, example).outcome == "diverged"


@pytest.mark.parametrize("op", ["add", "sub", "mul", "div"])
def test_a_frozen_weight_without_dimensions_forgets_its_dtype(op: str) -> None:
    frozen = ScriptBackend("trace", freeze=True)
    inputs = [x("x0", 3, dtype="int64"), x("w1", dtype="float16")]
    body = under(NoGrad(), call(op, "x0", "w1"))
    for contexts in ((), (Autocast(),)):
        wrong = case(inputs, body, backward="none", contexts=contexts)
        assert judge(frozen, wrong).known == "freeze-scalar-weight"
        assert judge(TRACE, wrong).outcome == "agreed"
    entry = shipped_entry("freeze-scalar-weight")
    assert entry.explains("dtype", [op], expected="float16", observed="float32")
    assert not entry.explains("dtype", [op], expected="float32", observed="float16")
    for other in ("mm", "addmm", "addcmul", "multi_head_attention_forward"):
        assert not entry.explains("dtype", [other], expected="float16", observed="float32")


def test_a_frozen_weight_is_explained_where_it_is_wrong_without_autocast_only() -> None:
    """Here it is autocast that makes 16 bits: the entry must not speak of what it got wrong."""
    frozen = ScriptBackend("trace", freeze=True)
    inputs = [x("x0", 3, 3), x("w1", 3, 3)]
    body = under(NoGrad(), call("mm", "x0", "w1"), call("add", "v0", "v0", to="v1"))
    honest = case(inputs, body, backward="none")
    entries = tuple(e for e in shipped() if e.id == "freeze-scalar-weight")
    found = Divergence("dtype", "v1", "bfloat16", "float32")
    with quiet():
        assert not Listed(entries).explains(Trial.of(honest, frozen), found)


def test_a_frozen_weight_explains_no_other_value() -> None:
    """Beside it another value is wrong under autocast only, of an op that the entry lists."""
    frozen = ScriptBackend("trace", freeze=True)
    inputs = [x("x0", 3, dtype="int64"), x("w1", dtype="float16"), x("x2", 3, 3)]
    calls = call("mm", "x2", "x2", to="v1"), call("add", "v1", "v1", to="v2")  # v2 is float32
    both = case(inputs, under(NoGrad(), call("mul", "x0", "w1"), *calls), backward="none")
    with quiet():
        assert judge_of(frozen, (shipped_entry("freeze-scalar-weight"),)).judge(both).known == ""
    assert judge(frozen, both).known == "torchscript-pass+freeze-scalar-weight"
    honest = case(inputs, under(NoGrad(), call("mul", "x0", "w1"), *calls[:1]), backward="none")
    assert judge(frozen, honest).known == "freeze-scalar-weight"


def test_what_was_optimised_with_gradients_raises_in_inference_mode() -> None:
    inputs = [x("x0", 1, 1), x("w1", 1, 1)]
    body = call("mm", "x0", "w1"), call("exp", "v0", to="v1")
    plan: dict[str, Any] = {"first_pass": "inference_mode", "interrupted": True}
    bare = case(inputs, *body, backward="none", contexts=(), **plan)
    assert judge(TRACE, bare).known == "torchscript-inference-saved"
    # TorchScript's pass is explained beside it, and without it the error is new.
    both = case(inputs, *body, backward="none", **plan)
    assert judge(TRACE, both).known == "torchscript-pass+torchscript-inference-saved"
    assert judge(TRACE, bare, known=False).outcome == "diverged"


def shipped_entry(name: str) -> Known:
    (entry,) = [entry for entry in shipped() if entry.id == name]
    return entry


def test_its_own_list_is_a_known_finding_and_nothing_else_is() -> None:
    example = case([x("x0", 4, dtype="bfloat16")], call("exp", "x0"))
    verdict = judge(SCRIPT, example)
    assert verdict.divergence is not None
    assert (verdict.divergence.kind, verdict.known) == ("dtype", "torchscript-pass")
    verdict = judge(SCRIPT, example, known=False)
    assert verdict.outcome == "diverged"
    with quiet():
        assert stage_of(judge_of(SCRIPT, ()), verdict) == "script[first-call]"


def test_formulas_of_torchscript_that_are_wrong_in_any_program_are_known() -> None:
    inputs = [x("x0", 4), x("w1", 4)]
    for op, *given in (("clamp.Tensor", "v0", None, "w1"), ("linear", "v0", "w1", None)):
        entry = {"clamp.Tensor": "torchscript-clamp-bounds"}.get(op, "torchscript-linear-vector")
        for second in ("none", "double"):
            body = call("mul", "x0", "x0"), call(op, *given, to="v1")
            assert judge(SCRIPT, case(inputs, *body, second=second)).known == entry
        once = case(inputs, *body, backward="none")
        assert judge(SCRIPT, once).outcome == "agreed"
    rows = case([x("x0", 2, 3, 4), x("w1", 4)], call("mul", "x0", "x0"), call(
        "linear", "v0", "w1", None, to="v1"))  # fmt: skip
    assert judge(SCRIPT, rows).known == "torchscript-linear-vector"


@pytest.mark.parametrize("plan", [Plan(calls=2), Plan(steps=3)], ids=["calls", "steps"])
@pytest.mark.parametrize("backend", [SCRIPT, TRACE], ids=lambda b: b.name)
def test_a_plan_that_calls_again_leaves_the_first_rung_as_it_is(
    backend: ScriptBackend, plan: Plan
) -> None:
    """The graph is optimised from its second call on, and there the formula of linear is wrong."""
    body = call("mul", "x0", "x0"), call("linear", "v0", "w1", None, to="v1")
    again = msgspec.structs.replace(case([x("x0", 4), x("w1", 4)], *body), plan=plan)
    judge_ = judge_of(backend, shipped())
    with quiet():
        verdict = judge_.judge(again)
        assert verdict.known == "torchscript-linear-vector"
        assert stage_of(judge_, verdict) == backend.name


NORM = (
    [x("x0", 3, 4), x("w1", 3, 4, dtype="bfloat16"), x("x2", 4), x("x3", 4, domain="positive")],
    call("batch_norm", "w1", "x2", "x3"),
    call("add", "x0", "v0", to="v1"),
)


def test_a_norm_that_gets_a_gradient_of_another_dtype_is_known_by_its_error() -> None:
    example = case(*NORM, contexts=())
    verdict = judge(SCRIPT, example)
    assert verdict.known == "torchscript-mixed-gradients"
    inputs, norm, _ = NORM
    assert judge(SCRIPT, case(inputs, norm, contexts=())).outcome == "agreed"
    told = "raise", ["batch_norm"], "if starts: torch.autograd.backward(starts, cotangents)"
    said = {
        "expected": "no error",
        "observed": "RuntimeError: expected scalar type Half but found Float",
    }
    entry = shipped_entry("torchscript-mixed-gradients")
    assert entry.explains(*told, **said)
    assert not entry.explains("raise", ["mul"], told[2], **said)
    assert not entry.explains(*told[:2], "outputs = program(x0)", **said)
    assert not entry.explains(*told, **{**said, "observed": "RuntimeError: shape mismatch"})


MATRIX = [x("x0", 3, 4, dtype="float16"), x("w1", 4, dtype="float16")]
SOFTMAX = call("softmax", "v0", 0, dtype=DType("float64"), to="v1")
RAISING = {
    "torchscript-mixed-gradients": case(*NORM, contexts=()),
    "torchscript-mixed-vectors": case(MATRIX, call("mv", "x0", "w1"), SOFTMAX, contexts=()),
    "torchscript-saved": case(
        [x("x0", 2), x("w1", 2), x("x2", 2)],
        call("mul", "w1", "x0"),
        call("clamp", "v0", None, 1.0, to="v1"),
        call("type_as", "v1", "x2", form="method", to="v2"),
        call("cumsum", "v2", -1, form="inplace", to="v3"),
        contexts=(),
    ),
    "torchscript-clamp-raises": case(
        [x("w0", 1, domain="zeros"), x("x1", 2, values="bf800000" * 2), x("w2"), x("x3")],
        call("mul", "w2", "x3"),
        call("clamp.Tensor", "w0", "x1", "v0", to="v1"),
        contexts=(),
    ),
}
"""What raises in a backward pass, on one side."""


@pytest.mark.parametrize("name", RAISING)
def test_an_error_of_a_backward_pass_is_known_by_its_text_there(name: str) -> None:
    """Elsewhere, of another op, beside an error of the other side, or another: it is new."""
    verdict = judge(SCRIPT, RAISING[name])
    found = verdict.divergence
    assert found is not None
    assert verdict.known == name
    entry = shipped_entry(name)
    ops = {s.op for s in statements(RAISING[name].program.body)}
    told = {"expected": found.expected, "observed": found.observed}
    assert entry.explains("raise", ops, found.where, **told)
    assert not entry.explains("nondeterminism", ops, found.where, **told)
    assert not entry.explains("raise", ops, "outputs = program(*inputs)", **told)
    assert entry.explains("raise", ["neg"], found.where, **told) == (name == "torchscript-saved")
    for side in told:
        for other in ("no error", "RuntimeError: of something else"):
            if other != told[side]:
                assert not entry.explains("raise", ops, found.where, **{**told, side: other})


@pytest.mark.parametrize("where", ["autocast", "first-call"])
@pytest.mark.parametrize("name", RAISING)
def test_the_same_error_is_new_where_it_comes_of_something_else(
    name: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of autocast; or of what is there without optimised graphs."""
    found = judge(SCRIPT, RAISING[name]).divergence
    assert found is not None
    eager = found.observed == "no error"
    said = Raised(
        "RuntimeError", (found.expected if eager else found.observed)[14:], 9, found.where
    )
    kind: Any = ReferenceRuntime if eager else ScriptBackend
    honest = kind.run

    def run(self: Any, given: Any) -> Any:
        made = honest(self, given)
        for seen, one in [(made, given)] if eager else zip(made, given, strict=True):
            acts = torch._C._get_graph_executor_optimize() and one.plan.contexts
            if where == "first-call" or acts:
                seen.raised = said
        return made

    inputs = [x("x0", 2), x("x1", 2), x("x2", 2, 2)]
    calls = {
        "torchscript-mixed-gradients": call("softmax", "x0", 0),
        "torchscript-mixed-vectors": call("mv", "x2", "x0"),
        "torchscript-saved": call("sin", "x0"),
        "torchscript-clamp-raises": call("clamp.Tensor", "x0", "x1", None),
    }
    plain = case(inputs, calls[name], contexts=(Autocast(enabled=False),))
    assert judge(SCRIPT, plain).outcome == "agreed"
    monkeypatch.setattr(kind, "run", run)
    assert judge(SCRIPT, plain).outcome == "diverged"


def test_a_product_and_a_softmax_that_get_a_gradient_of_another_dtype_are_known() -> None:
    inputs = [x("w0", 2, 2, dtype="float16"), x("w1", 2, 2, dtype="float16"), x("x2", 2, 2)]
    square = call("mul", "w0", "w1")
    for first in (call("mm", "w0", "w1", to="v1"), call("softmax", "v0", 0, to="v1")):
        body = square, first, call("mul", "v1", "x2", to="v2")
        assert (
            judge(SCRIPT, case(inputs, *body, contexts=())).known == "torchscript-mixed-gradients"
        )


def test_linear_of_two_vectors_of_other_sizes_is_known_by_its_error() -> None:
    entry = shipped_entry("torchscript-linear-vector")
    where = "if starts: torch.autograd.backward(starts, cotangents)"
    said = (
        "RuntimeError: inconsistent tensor size, expected tensor [4] and src [3] to have the same"
    )
    told = {"expected": "no error", "observed": f"{said} number of elements, but got 4 and 3"}
    assert entry.explains("raise", ["linear"], where, **told)
    assert not entry.explains("raise", ["dot"], where, **told)


@pytest.mark.parametrize("second", ["none", "double"])
def test_a_product_with_a_vector_that_gets_a_gradient_of_another_dtype_is_known(
    second: str,
) -> None:
    """The graph is optimised from its second call on, after which its gradients are formulas."""
    inputs = [x("x0", 3, 4, dtype="float16"), x("w1", 4, dtype="float16")]
    body = call("mv", "x0", "w1"), call("softmax", "v0", 0, dtype=DType("float64"), to="v1")
    verdict = judge(SCRIPT, case(inputs, *body, contexts=(), second=second))
    assert verdict.divergence is not None
    assert "addmv" in verdict.divergence.observed
    assert verdict.known == "torchscript-mixed-vectors"
    other = verdict.divergence.observed.replace("addmv input", "addmm input")
    entry = shipped_entry("torchscript-mixed-vectors")
    told = {"expected": "no error", "observed": other}
    assert not entry.explains("raise", ["mv"], verdict.divergence.where, **told)


def test_a_second_backward_pass_of_a_norm_under_autocast_is_known_by_its_error() -> None:
    statistics = call("batch_norm.batch_statistics", "w1", None, None, "x2", "x3", True)
    body = statistics, call("sigmoid", "v0", to="v1")
    under_it = {"contexts": (), "backward": "under", "backward_context": BF16}
    twice = judge(SCRIPT, case(NORM[0], *body, **under_it, second="double"))
    assert twice.known == "torchscript-backward-pass"
    assert judge(SCRIPT, case(NORM[0], *body, **under_it)).known != "torchscript-backward-pass"


def test_formulas_that_are_wrong_beside_the_pass_are_both_named() -> None:
    """The gradient of a square root at 0 is masked by a relu before it."""
    body = call("relu", "w1"), call("pow.Tensor_Scalar", "v0", 0.5, to="v1")
    example = case([x("x0", 4, dtype="bfloat16"), x("w1", 8)], *body, call("exp", "x0", to="v2"))
    assert (
        judge(SCRIPT, example).known == "torchscript-pass+torchscript-autodiff+torchscript-formulas"
    )


def test_what_a_formula_does_not_need_may_be_written_afterwards() -> None:
    """The dividend, where the divisor needs no gradient; the factor that needs one, of addcmul."""
    body = (
        call("relu", "w1"),
        call("pow.Tensor_Scalar", "v0", 0.5, to="v1"),
        call("mul.scalar", "v1", 2.0, to="v2"),
        call("div", "v2", "x0", to="v3"),
        call("addcmul", "x0", "v2", "x0", value=2.0, to="v4"),
        call("mul.scalar", "v2", 3.0, form="inplace", to="v5"),
    )
    example = case([x("x0", 8), x("w1", 8)], *body, contexts=())
    assert judge(SCRIPT, example).known == "torchscript-formulas"


@pytest.mark.parametrize("op", ["relu", "clamp", "where", "addcmul", "div", "softplus"])
def test_a_formula_that_is_wrong_otherwise_is_not_explained(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is needed, and none explains more than it computes."""
    examples = {
        "relu": (call("relu", "w1"), call("pow.Tensor_Scalar", "v0", 0.5, to="v1")),
        "clamp": (call("clamp", "w1", 0.0, None), call("pow.Tensor_Scalar", "v0", 0.5, to="v1")),
        "where": (
            call("gt", "x0", "w1"),
            call("where", "w1", "v0", "x2", to="v1"),
            call("mul.scalar", "v1", 1000.0, to="v2"),
            call("exp", "v2", to="v3"),
        ),
        "addcmul": (
            call("mul.scalar", "x2", 1e-20),
            call("addcmul", "x0", "w1", "v0", value=1e20, to="v1"),
            call("mul.scalar", "v1", 1e20, to="v2"),
        ),
        "div": (
            call("mul.scalar", "x0", 5e37),
            call("mul.scalar", "w1", 5e19, to="v1"),
            call("div", "v0", "v1", to="v2"),
        ),
        "softplus": (call("neg", "w1"), call("softplus", "v0", threshold=0.5, to="v1")),
    }
    inputs = [x("x0", 8), x("w1", 8), x("x2", 8)]
    example = case(inputs, *examples[op], contexts=())
    assert judge(SCRIPT, example).known == "torchscript-formulas"
    if op == "softplus":
        twice = case(inputs, *examples[op], second="double", contexts=())
        assert judge(SCRIPT, twice).known == "torchscript-formulas"
    kept = tuple(f for f in formulas._FORMULAS if f[1] not in (op, f"__true{op}__"))
    assert len(kept) < len(formulas._FORMULAS)
    monkeypatch.setattr(formulas, "_FORMULAS", kept)
    assert judge(SCRIPT, example).outcome == "diverged"


def test_a_trace_that_is_made_in_inference_mode_is_known_by_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = call("mm", "w0", "w0"), call("mul.scalar", "v0", 2.0, form="inplace", to="v1")
    example = case([x("w0", 2, 2)], *body, first_pass="inference_mode", contexts=())
    assert judge(TRACE, example).known == "trace-inference-constants"
    written = call("mm", "x1", "x1", form="out", out="b2", to="v2")
    inputs = [x("w0", 2, 2), x("x1", 2, 2), x("b2", 2, 2)]
    buffer = case(inputs, *body, written, first_pass="inference_mode", contexts=())
    assert judge(TRACE, buffer).known == "trace-inference-constants"
    monkeypatch.setitem(WITHOUT, "inference-traces", quiet)
    assert judge(TRACE, example).outcome == "diverged"


def test_an_optional_argument_of_a_called_function_is_not_cast() -> None:
    inputs = [x("x0", 4, dtype="bfloat16")]
    example = case(inputs, under(OFF, call("layer_norm", "x0", [4], "x0")))
    assert judge(SCRIPT, example).known == "torchscript-pass"


def test_the_weights_of_a_frozen_module_need_no_grad() -> None:
    """Which kernel matmul takes depends on it, and with it in which order infinities are added."""
    seen: list[bool] = []
    backend = ScriptBackend("trace", freeze=True)
    honest = torch.matmul
    example = backend.fit(case([x("w0", 2, 2)], call("matmul", "w0", "w0")))

    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append(a.requires_grad)
        return honest(a, b)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "matmul", matmul)
        backend.reference().run(example)
        TRACE.reference().run(example)
    assert seen == [False, True]


@pytest.mark.parametrize(
    "second",
    [
        call("div.scalar", "v0", -1.5, form="operator", to="v1"),
        call("layer_norm", "v0", [2], form="module", to="v1"),  # taken apart where it is optimised
    ],
    ids=lambda second: second.op,
)
def test_what_falls_back_is_cast_a_second_time(second: Statement) -> None:
    """Of what needs no grad in the region, but is a weight."""
    body = call("mm", "x0", "w1"), second
    inputs = [x("x0", 2, 2), x("w1", 2, 2), x("w2", 2)]
    region = under(NoGrad(), under(OFF, *body))
    example = case(inputs, call("atan2", "w2", "w2", to="v2"), region)
    assert judge(SCRIPT, example).known == "torchscript-pass+torchscript-fallback"
    fewer = tuple(k for k in shipped() if k.id != "torchscript-fallback")
    with quiet():
        assert judge_of(SCRIPT, fewer).judge(example).outcome == "diverged"


def test_a_fallback_knows_the_dtypes_of_what_it_takes() -> None:
    """A product of two of bfloat16 is not cast to float32 there; what is made of one is."""
    inputs = [*(x(name, 2, 2, dtype="bfloat16") for name in ("x0", "w1")), x("w2", 2)]
    body = (
        call("mul", "x0", "w1"),
        call("mm", "v0", "w1", to="v1"),
        call("div.scalar", "v1", -1.5, form="operator", to="v3"),
    )
    region = under(NoGrad(), under(OFF, *body))
    example = case(inputs, call("atan2", "w2", "w2", to="v2"), region)
    assert judge(SCRIPT, example).known == "torchscript-pass+torchscript-fallback"


def test_nothing_falls_back_in_the_body_of_a_custom_op() -> None:
    """It is Python: no graph takes its addmm apart."""
    body = under(Autocast(dtype="bfloat16"), call("addmm", "x1", "x2", "w0"))
    inputs = [x("w0", 3, 3), x("x1", 3, dtype="bfloat16"), x("x2", 3, 3)]
    example = case(inputs, body, entry="register_autocast", backward="none")
    honest = SCRIPT.reference().run(example)
    with quirks(["torchscript-pass", "torchscript-autodiff", "torchscript-fallback"]):
        imitated = SCRIPT.reference().run(example)
    assert compare(honest, imitated) is None


def test_what_falls_back_and_is_cast_otherwise_is_not_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = call("mm", "x0", "w1"), call("div.scalar", "v0", -1.5, form="operator", to="v1")
    inputs = [x("x0", 2, 2), x("w1", 2, 2), x("w2", 2)]
    region = under(NoGrad(), under(OFF, *body))
    example = case(inputs, call("atan2", "w2", "w2", to="v2"), region)
    monkeypatch.setattr(
        "amp_fuzz.backends.torchscript.fallen", lambda *_: Fallen(frozenset({"v0"}))
    )
    assert judge(SCRIPT, example).outcome == "diverged"


WITHOUT_AUTOCAST = {
    "addmm": case(
        [x("x0", 1, 1, dtype="float16", values="7800"),
         x("x1", 1, 1, dtype="float16", values="4000"),
         x("x2", 1, dtype="float16", values="dc00")],
        call("addmm", "x2", "x0", "x1"),  # 32768 * 2 - 256
        backward="none",
        contexts=(),
    ),
    "cat-empty": case(
        [x("w0", 4, 17), x("w1", 0)],
        call("cat", ["w0", "w1"], -2),
        call("mul.scalar", "v0", 2.0, to="v1"),
        contexts=(),
    ),
    "clamp-broadcast": case(
        [x("w0", domain="zeros"), x("x1", 2, values="3f800000" * 2)],
        call("clamp.Tensor", "w0", "x1"),
        call("div", "w0", "v0", to="v1"),
        contexts=(),
    ),
    "clamp-raises": case(
        [x("w0", 1), x("x1", 2), x("w2")],
        call("mul", "w0", "w0"),
        call("clamp.Tensor", "v0", "x1", "w2", to="v1"),
        call("mul", "v1", "v1", to="v2"),
        contexts=(),
    ),
    "linear-inplace": case(
        [x("w0", 1), x("x1", 1, 1)],
        call("tanh", "w0"),
        call("linear", "v0", "x1", "w0", to="v1"),
        call("exp", "v1", to="v2", form="inplace"),
        backward="none",
        contexts=(),
    ),
    "no-grad": case(
        [x("w0", 1, 1), x("x1"), x("w2", 1), x("x3", dtype="bool", domain="zeros")],
        call("addmm", "x1", "w0", "w0"),
        under(
            NoGrad(), call("cat", ["w2"], to="v1"), call("where", "x1", "x3", "v1", to="v2")
        ),
        contexts=(),
    ),
    "saved": case(
        [x("w0", 2), x("x1", 2)],
        call("mul", "w0", "x1"),
        call("clamp", "v0", None, 1.0, to="v1"),
        call("type_as", "v1", "x1", to="v2", form="method"),
        call("cumsum", "v2", -1, to="v3", form="inplace"),
        contexts=(),
    ),
    "scalar-out": case(
        [x("x0", 2), x("b1", 2, dtype="bfloat16")],
        call("mul.scalar", "x0", 2.0, form="out", out="b1"),
        backward="none",
        contexts=(),
    ),
    "mul-scalar": case(
        [x("x0", 2, dtype="float16", values="b800" * 2)],
        call("neg", "x0"),
        call("mul.scalar", "v0", 65536.0, form="inplace", to="v1"),
        backward="none",
        contexts=(),
    ),
    "range": case(
        [x("w0", 1, 3, 8, dtype="float16"), x("x1", 1, 3, 8, domain="overflow")],
        call("mul", "x1", "w0", form="operator"),
        call("mul", "v0", "w0", to="v1"),
        contexts=(),
    ),
}  # fmt: skip


def test_attention_weights_may_be_computed_with() -> None:
    """They are an optional tensor, which TorchScript asks to be checked."""
    attention = call(
        "multi_head_attention_forward",
        *("x0", "x0", "x0", 1, 1, "x1", None, None, None, False, 0.0, "x2", None),
        to="v0 v1",
    )
    inputs = [x("x0", 1, 1, 1), x("x1", 3, 1), x("x2", 1, 1)]
    example = case(inputs, attention, call("exp", "v1", to="v2"), backward="none", contexts=())
    assert judge(SCRIPT, example, known=False).outcome == "agreed"


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("dtype", [None, "float16", "bfloat16"])
def test_an_addmm_that_is_taken_apart_is_known_under_autocast_too(
    dtype: str | None, grad: bool
) -> None:
    """Under no_grad it falls back, since a weight requires grad, and its sum is float32."""
    near = ([-2048.0], "float16"), ([2048.0, 1.0], "float16"), ([1.0, 1.0], "float16")
    shapes = {"x0": (1, 1), "x1": (1, 2), "w2": (2, 1)}
    inputs = [
        x(name, *shape, dtype="float16", values=bits_of(*given))
        for (name, shape), given in zip(shapes.items(), near, strict=True)
    ]
    product = call("addmm", "x0", "x1", "w2")
    body = product if grad else under(NoGrad(), product)
    contexts = () if dtype is None else (Autocast(dtype=dtype),)
    inputs += [x("x3", 1), x("w4", 1)]
    example = case(inputs, body, call("mul", "x3", "w4", to="v1"), contexts=contexts)
    assert "torchscript-addmm" in judge(SCRIPT, example).known.split("+")
    fewer = tuple(k for k in shipped() if k.id != "torchscript-addmm")
    with quiet():
        assert judge_of(SCRIPT, fewer).judge(example).outcome == "diverged"


@pytest.mark.parametrize(
    ("bias", "shape"), [("float32", (2, 2)), ("int64", (2, 2)), ("float16", (3, 2, 2))]
)
def test_an_addmm_of_what_eager_refuses_is_a_sum(bias: str, shape: tuple[int, ...]) -> None:
    inputs = [x("x0", *shape, dtype=bias), *(x(f"x{i}", 2, 2, dtype="float16") for i in (1, 2))]
    body = call("neg", "x1", to="v9"), call("addmm", "x0", "x1", "x2")
    example = case(inputs, *body, contexts=(), backward="none")
    verdict = judge(SCRIPT, example)
    assert verdict.divergence is not None
    assert (verdict.divergence.kind, verdict.known) == ("raise", "torchscript-addmm")
    with quiet():
        assert judge_of(WrongKernel(SCRIPT, "neg"), shipped()).judge(example).outcome == "diverged"


def test_only_an_addmm_without_factors_is_taken_apart() -> None:
    """A product of 2049 is 2048 in float16; one call rounds the sum alone."""
    x, w = torch.tensor([[2048.0, 1.0]]).half(), torch.ones(2, 1).half()
    bias, out = torch.tensor([[-2048.0]]).half(), torch.zeros(1, 1).half()
    given = bias, x, w
    with formulas.QUIRKS["torchscript-addmm"]():
        assert torch.addmm(*given).item() == 0
        assert bias.addmm(x, w, beta=1, alpha=1).item() == 0
        assert torch.addmm(*given, alpha=2).item() == 2050
        assert torch.addmm(*given, beta=2).item() == -2047
        assert torch.addmm(*given, out=out) is out
    assert out.item() == 1
    assert torch.addmm(*given).item() == 1


@pytest.mark.parametrize(
    ("dtype", "autocast", "made", "value"),
    [
        ("float32", True, "float16", -2048.0),  # of 2049, cast
        ("float32", False, "float32", -2049.0),
        ("bfloat16", True, "float16", -2048.0),
        ("float64", True, "float64", -2049.0),
        ("complex64", True, "complex64", -2049.0),
    ],
)
def test_the_bias_is_cast_as_the_pass_casts_it(
    dtype: str, autocast: bool, made: str, value: float
) -> None:
    bias = torch.tensor([[-2049.0]]).to(getattr(torch, dtype))
    x, w = torch.zeros(1, 1).half(), torch.ones(1, 1).half()
    context = reference.autocast("cpu", dtype=torch.float16, enabled=autocast)
    with context, formulas.QUIRKS["torchscript-addmm"]():
        found = torch.addmm(bias, x, w)
    assert (found.dtype, found.item()) == (getattr(torch, made), value)


@pytest.mark.parametrize("name", WITHOUT_AUTOCAST)
def test_what_torchscript_does_without_autocast_is_known(name: str) -> None:
    example = WITHOUT_AUTOCAST[name]
    assert judge(SCRIPT, example).known == f"torchscript-{name}"
    fewer = tuple(k for k in shipped() if k.id != f"torchscript-{name}")
    with quiet():
        assert judge_of(SCRIPT, fewer).judge(example).outcome == "diverged"


def test_what_a_no_grad_region_has_made_before_requires_no_grad() -> None:
    """The transpose of the weight, which is returned: the backward pass raises for it."""
    example = case(
        [x("w0", 1, 1, domain="zeros"), x("x1", values="3f800000"), x("x2", 1, 1)],
        under(NoGrad(), call("einsum", "ij->ji", "w0")),
        under(OFF, call("atan2", "x1", "v0", to="v1"), call("addmm", "x1", "v1", "x2", to="v2")),
        call("float", "v2", to="v3", form="method"),
        call("einsum", "ij->ji", "w0", to="v4"),
    )
    program = msgspec.structs.replace(example.program, outputs=("v3", "v4"))
    example = msgspec.structs.replace(example, program=program)
    assert judge(SCRIPT, example).known == "torchscript-pass+torchscript-common-subexpressions"
    fewer = tuple(k for k in shipped() if k.id != "torchscript-common-subexpressions")
    with quiet():
        assert judge_of(SCRIPT, fewer).judge(example).outcome == "diverged"


def changed(patch: pytest.MonkeyPatch, label: str, times: float, *, imitated: bool = False) -> None:
    """Have a value multiplied of the backend, under autocast, or of the reference's imitation."""
    kind: Any = ReferenceRuntime if imitated else ScriptBackend
    honest = kind.run

    def run(self: Any, given: Any) -> Any:
        made = honest(self, given)
        for seen, one in [(made, given)] if imitated else zip(made, given, strict=True):
            value = seen.values.get(label)
            acts = "torchscript-pass" in active_quirks() if imitated else one.plan.contexts
            if value is not None and acts:
                seen.values[label] = value * times
        return made

    patch.setattr(kind, "run", run)


def doubted(patch: pytest.MonkeyPatch, label: str) -> None:
    """Have shadows say nothing of a value."""
    honest = ReferenceRuntime.shadowed

    def shadowed(self: ReferenceRuntime, *how: Any) -> Any:
        seen, bands = honest(self, *how)
        bands[label] = replace(bands[label], known=False)
        return seen, bands

    patch.setattr(ReferenceRuntime, "shadowed", shadowed)


BESIDE = case(
    [x("x0", 2, dtype="bfloat16", domain="integers"), x("w1", 2)],
    call("exp", "x0"),
    call("exp", "w1", to="v1"),
)


@pytest.mark.parametrize("imitated", [False, True], ids=["backend", "imitation"])
@pytest.mark.parametrize(("times", "outcome"), [(1 + 2.0**-22, "known"), (1.01, "diverged")])
def test_beside_a_known_bug_a_rounding_is_none_and_a_fault_is_one(
    times: float, outcome: str, imitated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What imitates the pass is compared bit for bit, since no shadows can follow it.

    Of either: a bug that acts at one value, and not at another where it should, is another bug.
    """
    assert judge(SCRIPT, BESIDE).known == "torchscript-pass"
    changed(monkeypatch, "w1.grad", times, imitated=imitated)
    verdict = judge(SCRIPT, BESIDE)
    assert (verdict.outcome, verdict.known) == (outcome, "torchscript-pass" * (outcome == "known"))


def test_beside_a_known_bug_what_shadows_do_not_know_is_compared_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    doubted(monkeypatch, "w1.grad")
    assert judge(SCRIPT, BESIDE).known == "torchscript-pass"
    changed(monkeypatch, "w1.grad", 1 + 2.0**-22)
    assert judge(SCRIPT, BESIDE).outcome == "diverged"


def test_what_shadows_do_not_know_of_one_value_is_no_matter_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first differs by the rounding that the pass does without; the last, by another one."""
    one = case(
        [x("x0", 2, dtype="bfloat16", values="3fa03fc0"), x("w1", 2)],
        call("exp", "x0"),
        call("float", "v0", form="method", to="v1"),
        call("exp", "x0", to="v2"),
        call("exp", "w1", to="v3"),
    )
    program = msgspec.structs.replace(one.program, outputs=("v1", "v2", "v3"))
    one = msgspec.structs.replace(one, program=program)
    doubted(monkeypatch, "v1")
    changed(monkeypatch, "w1.grad", 1 + 2.0**-22)
    verdict = judge(SCRIPT, one)
    assert verdict.divergence is not None
    assert (verdict.divergence.where, verdict.known, verdict.unjudged) == (
        "v2",
        "torchscript-pass",
        1,
    )


def test_a_fault_beside_a_range_that_torchscript_leaves_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is there without optimised graphs, too."""
    honest = ScriptBackend.run

    def run(self: ScriptBackend, cases: Sequence[Case]) -> list[Observation]:
        seen = honest(self, cases)
        for one in seen:
            if (value := one.values.get("v0")) is not None:
                one.values["v0"] = torch.full_like(value, torch.inf)
        return seen

    monkeypatch.setattr(ScriptBackend, "run", run)
    assert judge(SCRIPT, WITHOUT_AUTOCAST["range"]).outcome == "diverged"


def test_what_requires_grad_in_an_optimised_graph_alone_is_known_by_its_error() -> None:
    (entry,) = (k for k in shipped() if k.id == "torchscript-requires-grad")
    where = "if starts: torch.autograd.backward(starts, cotangents)"
    said = "RuntimeError: derivative for aten::mul is not implemented"
    assert entry.explains("raise", ["mul"], where, expected="no error", observed=said)
    said = "RuntimeError: element 1 of tensors does not require grad and does not have a grad_fn"
    assert not entry.explains("raise", ["mul"], where, expected="no error", observed=said)


def test_an_op_with_out_of_what_requires_grad_in_an_optimised_graph_alone_is_known() -> None:
    example = case(
        [x("x0", 1, 1), x("w1"), x("b2", 1, 1)],
        call("mm", "x0", "x0"),
        call("div", "v0", "w1", to="v1"),
        call("sub", "v0", "x0", form="out", out="b2", to="v2"),
        backward="none",
        contexts=(),
    )
    example = msgspec.structs.replace(
        example, program=msgspec.structs.replace(example.program, outputs=("v1",))
    )
    assert judge(SCRIPT, example).known == "torchscript-requires-grad"
    fewer = tuple(k for k in shipped() if k.id != "torchscript-requires-grad")
    with quiet():
        assert judge_of(SCRIPT, fewer).judge(example).outcome == "diverged"


EXP, ANOTHER = call("exp", "w1"), call("exp", "w1", to="v1")


@pytest.mark.parametrize(
    ("body", "outputs", "known"),
    [
        ((under(NoGrad(), EXP), ANOTHER), ("v2", "v3"), True),
        ((EXP, under(NoGrad(), ANOTHER)), ("v2", "v3"), True),
        ((under(NoGrad(), EXP), ANOTHER), ("v0", "v3"), True),
        ((under(NoGrad(), EXP), ANOTHER), ("v0", "v1", "v3"), False),
        ((under(NoGrad(), EXP), call("exp", "x0", to="v1")), ("v2", "v3"), False),
    ],
    ids=["none", "other-order", "one-returned", "both-returned", "another-call"],
)
def test_what_is_computed_in_two_grad_modes_is_computed_in_the_first(
    body: tuple[Any, ...], outputs: tuple[str, ...], known: bool
) -> None:
    after = call("mul", "v0", "x0", to="v2"), call("add", "v1", "x0", to="v3")
    example = case([x("x0", 2), x("w1", 2), x("w4", 2)], *body, *after, contexts=())
    program = msgspec.structs.replace(example.program, outputs=outputs)
    verdict = judge(SCRIPT, msgspec.structs.replace(example, program=program))
    entry = "torchscript-common-subexpressions"
    assert (verdict.known == entry) if known else (verdict.outcome in ("agreed", "raised"))


def test_what_is_written_is_computed_again() -> None:
    inputs = [x("x0", 2), x("b1", 2), x("b2", 2)]
    written = call("mul", "b1", "x0", form="inplace", to="v1")
    out = call("exp", "x0", form="out", out="b2", to="v4")
    body = call("exp", "b1"), written, call("exp", "b1", to="v2"), call("neg", "b2", to="v3"), out
    example = case(inputs, *body, call("neg", "b2", to="v5"), call("neg", "x0", to="v6"))
    assert merged(example.program) == example.program
    twice = case(inputs, *example.program.body, call("neg", "x0", to="v7"))
    program = msgspec.structs.replace(twice.program, outputs=("v7",))
    assert merged(program) == msgspec.structs.replace(example.program, outputs=("v6",))


WRITTEN, AGAIN = (call("mul", "b5", "x0", form="inplace", to=name) for name in ("v4", "v6"))


@pytest.mark.parametrize(
    ("body", "same"),
    [
        ((under(BF16, EXP), ANOTHER), False),
        ((EXP, under(BF16, ANOTHER)), False),
        ((under(BF16, under(NoGrad(), EXP)), ANOTHER), False),
        ((under(BF16, EXP), under(OFF, ANOTHER)), False),
        ((under(BF16, EXP, under(OFF, ANOTHER)),), False),
        ((under(BF16, EXP, ANOTHER),), True),
        ((under(BF16, EXP, under(NoGrad(), ANOTHER)),), True),
        ((call("sum", "w1", dim=[0]), call("sum", "w1", to="v1")), False),
        ((call("sum", "w1", dim=[0]), call("sum", "w1", to="v1", dim=[0])), True),
        ((call("neg", "w1"), ANOTHER), False),
        ((EXP, call("mul", "v0", "x0", form="inplace", to="v4"), ANOTHER), False),
        ((WRITTEN, call("exp", "v4"), AGAIN, call("exp", "v4", to="v1")), False),
    ],
)
def test_what_is_called_in_another_way_is_computed_again(body: tuple[Any, ...], same: bool) -> None:
    """Under another autocast context, with other options, by another name, or after a write."""
    after = call("mul", "v0", "x0", to="v2"), call("add", "v1", "x0", to="v3")
    program = case([x("x0", 2), x("w1", 2), x("b5", 2)], *body, *after).program
    program = msgspec.structs.replace(program, outputs=("v2", "v3"))
    found = merged(program)
    assert (found != program) is same
    if same:
        assert [s.outputs for s in statements(found.body)] == [("v0",), ("v2",), ("v3",)]
        assert next(s for s in statements(found.body) if s.op == "add").args[0] == Ref("v0")


def test_what_is_returned_in_place_of_another_is_returned() -> None:
    """So that a third call, which is returned too, is made again."""
    third = call("exp", "w1", to="v2")
    program = case([x("x0", 2), x("w1", 2)], EXP, ANOTHER, third).program
    program = msgspec.structs.replace(program, outputs=("v1", "v2"))
    want = case([x("x0", 2), x("w1", 2)], EXP, third).program
    assert merged(program) == want


def test_nothing_is_merged_in_the_body_of_a_custom_op() -> None:
    after = call("mul", "v0", "x0", to="v2"), call("add", "v1", "x0", to="v3")
    body = under(NoGrad(), EXP), ANOTHER, *after
    example = case([x("x0", 2), x("w1", 2)], *body, entry="custom_op", contexts=())
    program = msgspec.structs.replace(example.program, outputs=("v2", "v3"))
    example = msgspec.structs.replace(example, program=program)
    honest = SCRIPT.reference().run(example)
    with quirks(["torchscript-common-subexpressions"]):
        assert compare(honest, SCRIPT.reference().run(example)) is None
    plan = msgspec.structs.replace(example.plan, entry="context")
    plainly = msgspec.structs.replace(example, plan=plan)
    honest = SCRIPT.reference().run(plainly)
    with quirks(["torchscript-common-subexpressions"]):
        assert compare(honest, SCRIPT.reference().run(plainly)) is not None


@pytest.mark.parametrize("first", [False, True], ids=["optimised", "always"])
def test_a_gradient_in_spite_of_no_grad_is_known_where_graphs_are_optimised_alone(
    first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is optimised it cannot be told apart; what makes it without that is no such graph."""
    example = WITHOUT_AUTOCAST["no-grad"]
    honest = ScriptBackend.run

    def run(self: ScriptBackend, cases: Sequence[Case]) -> list[Observation]:
        seen = honest(self, cases)
        for one in seen:
            if first:
                one.values["w2.grad"] = torch.ones(1)
        return seen

    monkeypatch.setattr(ScriptBackend, "run", run)
    assert judge(SCRIPT, example).outcome == ("diverged" if first else "known")


@pytest.mark.parametrize("bare", [False, True], ids=["autocast", "bare"])
def test_a_wrong_gradient_beside_one_that_clamp_broadcast_is_seen(
    bare: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a weight that has nothing to do with it; before it another value differs."""
    example = case(
        [x("w0", domain="zeros"), x("x1", 2, values="3f800000" * 2), x("x6", 2, 2), x("w5", 2, 2),
         x("b7", 2, dtype="float16", values="b800" * 2)],
        call("mul.scalar", "b7", 65536.0, form="inplace", to="v3"),
        call("clamp.Tensor", "w0", "x1"),
        call("div", "w0", "v0", to="v1"),
        call("mm", "x6", "w5", to="v2"),
        contexts=(),
    )  # fmt: skip
    honest = ScriptBackend.run

    def run(self: ScriptBackend, cases: Sequence[Case]) -> list[Observation]:
        seen = honest(self, cases)
        for one, given in zip(seen, cases, strict=True):
            value = one.values.get("w5.grad")
            if value is not None and (bare or given.plan.contexts):
                one.values["w5.grad"] = value * 3
        return seen

    known = {"torchscript-clamp-broadcast", "torchscript-mul-scalar"}
    assert set(judge(SCRIPT, example).known.split("+")) == known
    if not bare:
        plan = msgspec.structs.replace(example.plan, contexts=(Autocast(),))
        example = msgspec.structs.replace(example, plan=plan)
    monkeypatch.setattr(ScriptBackend, "run", run)
    assert judge(SCRIPT, example).outcome == "diverged"


@pytest.mark.skipif(not torch.backends.opt_einsum.is_available(), reason="needs opt_einsum")
def test_einsum_contracts_from_left_to_right() -> None:
    """Not along the path that opt_einsum finds: w5 with x3 first."""
    example = case(
        [x("x3", 3, 2, dtype="float16", values="7800" * 6),
         x("w4", 2, 4, 1, dtype="float16", values="4000" * 8),
         x("w5", 3, 4, dtype="float16", values="0400" * 12)],
        call("einsum", "bi,ijk,bj->bk", ["x3", "w4", "w5"]),
        backward="none",
        contexts=(),
    )  # fmt: skip
    verdict = judge(SCRIPT, example)
    assert verdict.outcome == "agreed", verdict.divergence


def test_a_wrong_gradient_is_seen_where_another_value_differs_before_it_without_autocast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The product is bfloat16 under autocast; without, it leaves float16 in TorchScript alone."""
    example = case(
        [x("x0", 1, 1, dtype="float16", values="b800"),
         x("x1", 1, 1, dtype="float16", values="3c00"),
         x("w0", 2), x("x2", 2, values="3f800000" * 2)],
        call("mm", "x0", "x1", to="v2"),
        call("mul.scalar", "v2", 65536.0, form="inplace", to="v3"),
        call("clamp.Tensor", "w0", "x2"),
        call("div", "w0", "v0", to="v1"),
    )  # fmt: skip
    honest = ScriptBackend.run

    def run(self: ScriptBackend, cases: Sequence[Case]) -> list[Observation]:
        seen = honest(self, cases)
        for one in seen:
            if (value := one.values.get("w0.grad")) is not None:
                one.values["w0.grad"] = value * 3
        return seen

    assert judge(SCRIPT, example).outcome == "agreed"
    bare = msgspec.structs.replace(example.plan, contexts=())
    bare = msgspec.structs.replace(example, plan=bare)
    assert judge(SCRIPT, bare).known == "torchscript-mul-scalar"
    monkeypatch.setattr(ScriptBackend, "run", run)
    assert judge(SCRIPT, example).outcome == "diverged"


@pytest.mark.parametrize("thread", ["none", "inside", "whole"])
def test_graphs_are_not_optimised_in_the_threads_of_a_plan(thread: str) -> None:
    example = case(
        [x("w0", domain="zeros"), x("x1", 2, values="3f800000" * 2)],
        call("clamp.Tensor", "w0", "x1"),
        call("div", "w0", "v0", to="v1"),
        contexts=(),
        thread=thread,
    )
    assert judge(SCRIPT, example).known == "torchscript-clamp-broadcast"


def test_what_differentiable_graphs_make_is_taken_by_the_next_as_a_weight() -> None:
    """It falls back, and is cast again but for what it takes in 16 bits."""
    low = Autocast(dtype="bfloat16")
    body = (
        under(low, call("prelu", "x0", "w1"), call("add", "x2", "x0", to="v1")),
        call("prelu", "v1", "x0", to="v2"),
        under(OFF, call("add", "x0", "v2", to="v3"), call("mean", "v3", to="v4")),
    )
    example = case([x("x0"), x("w1"), x("x2", 1)], *body, backward="none")
    program = msgspec.structs.replace(example.program, outputs=("v0", "v4"))
    example = msgspec.structs.replace(example, program=program)
    assert judge(SCRIPT, example).known == "torchscript-pass+torchscript-fallback"


def test_what_a_function_is_given_twice_is_cast_twice() -> None:
    """So that its gradients are added in another order."""
    zero = "00000000"
    values = zero * 2 + "3fdf4000" + "bea00000" + zero * 4
    others = "3f400000" + zero + "3f3ac000" + zero * 5
    example = case(
        [x("w0", 2, 2, 2, values=values), x("x1", 2, 2, 2, values=others),
         x("x2", domain="zeros")],
        call("baddbmm", "x2", "w0", "x1", alpha=-1),
        call("tensordot", "v0", "v0", dims=3, to="v1"),
    )  # fmt: skip
    assert judge(SCRIPT, example).known == "torchscript-pass"


def test_what_only_autocast_lets_run_is_compared_in_float32_without_it() -> None:
    """The sum of two dtypes raises without autocast, but not in TorchScript, which needs it not."""
    body = (
        under(OFF, call("addmm", "x2", "x0", "x1")),
        call("float", "v0", to="v1", form="method"),
        call("addmm", "x3", "x0", "x0", to="v2"),
    )
    inputs = [x("x0", 1, 1), x("x1", 1, 1), x("x2"), x("x3", dtype="bfloat16")]
    example = case(inputs, *body, backward="none")
    program = msgspec.structs.replace(example.program, outputs=("v1",))
    example = msgspec.structs.replace(example, program=program)
    assert judge(SCRIPT, example).known == "torchscript-pass"


def test_a_listed_bug_without_autocast_does_not_stand_in_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pass is explained beside clamp's bounds, which lose their gradients in any program."""
    example = case(
        [x("x0", 4, dtype="bfloat16"), x("w1", 4), x("x2", 4)],
        call("exp", "x0"),
        call("mul", "x2", "x2", to="v1"),
        call("clamp.Tensor", "v1", None, "w1", to="v2"),
    )
    assert judge(SCRIPT, example).known == "torchscript-pass+torchscript-clamp-bounds"
    monkeypatch.setattr("amp_fuzz.backends.torchscript.write_casts", lambda *_: None)
    assert judge(SCRIPT, example).outcome == "diverged"


def test_an_operator_that_torchscript_writes_itself_is_cast_where_it_stands() -> None:
    example = case(
        [x("x0", 4, dtype="float16")],
        call("exp", "x0"),
        under(OFF, call("mul.scalar", "x0", -1.5, form="operator", to="v1")),
    )
    assert judge(SCRIPT, example).known == "torchscript-pass"


def test_a_frozen_trace_knows_the_dtypes_of_its_weights_alone() -> None:
    """So that its pass casts what it need not for other values, and not for weights."""
    frozen = {name: backends()[name] for name in ("trace[freeze]", "script[freeze]")}
    body = call("cross", "w1", "w1"), call("cross", "x0", "x0", to="v1")
    inputs = [x("x0", 4, 3, dtype="bfloat16"), x("w1", 4, 3, dtype="bfloat16")]
    for name, where in (("trace[freeze]", "v1"), ("script[freeze]", "v0")):
        backend = frozen[name]
        assert isinstance(backend, ScriptBackend)
        verdict = judge(backend, case(inputs, *body, backward="none"))
        assert verdict.known == "torchscript-pass"
        assert verdict.divergence is not None
        assert verdict.divergence.where == where


def test_a_pass_that_is_wrong_is_not_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The imitation casts exp; if torch's pass did not, or did otherwise, that would be new."""
    example = case([x("x0", 4, dtype="bfloat16")], call("exp", "x0"))
    monkeypatch.setattr("amp_fuzz.backends.torchscript.write_casts", lambda *_: None)
    assert judge(SCRIPT, example).outcome == "diverged"


def test_the_optimised_graph_is_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the third call is found, and is no fault of the first."""
    calls: list[int] = []

    def faulty(make: Any, buffers: Any, count: int) -> Any:
        def run(*inputs: torch.Tensor) -> Any:
            calls.append(count)
            outputs = make(list(inputs))(*inputs)
            return tuple(o * 1.5 for o in outputs) if count == 3 else outputs

        return run

    monkeypatch.setattr("amp_fuzz.backends.prelude.optimised", faulty)
    with quiet():
        verdict = judge_of(SCRIPT, ()).judge(case(INPUTS, *BODY, backward="none"))
        assert verdict.divergence is not None
        assert verdict.divergence.kind == "value"
        assert stage_of(judge_of(SCRIPT, ()), verdict) == "script"
    assert set(calls) == {1, 3}


def test_a_trace_is_checked_with_the_weights_as_parameters() -> None:
    checked = ScriptBackend("trace", check=True)
    example = case(INPUTS, *BODY)
    verdict = judge(checked, example)
    assert (verdict.outcome, verdict.known) == ("known", "trace-weight-cache")
    uncached = (Autocast(dtype="bfloat16", cache_enabled=False),)
    assert judge(checked, case(INPUTS, *BODY, contexts=uncached)).outcome == "agreed"


def test_plans_and_regions_are_fitted() -> None:
    for context in (InferenceMode(), Checkpoint(), NoGrad()):
        example = case(INPUTS, under(context, under(OFF, BODY[0])), BODY[1])
        kept = {type(c) for c in regions(SCRIPT.fit(example).program.body)}
        assert kept == {Autocast, *([NoGrad] if context == NoGrad() else [])}
        assert {type(c) for c in regions(TRACE.fit(example).program.body)} == {Autocast}
    frozen = ScriptBackend("script", freeze=True).fit(case(INPUTS, *BODY, steps=2, scaler=True))
    assert (frozen.plan.backward, frozen.plan.steps, frozen.plan.scaler) == ("none", 1, False)
    frozen.plan.check()


def test_what_it_cannot_say_is_what_it_refuses() -> None:
    """Each form of each op, drawn bare: TorchScript takes it if and only if `supports` says so."""
    wrong = []
    for op in CATALOGUE.values():
        if op.devices is not None and "cpu" not in op.devices:
            continue
        for form in op.forms:
            source = random.Random(f"{op.name}/{form}").randbytes
            program = draw_program(
                source, "cpu", plan=Plan(contexts=()), ops=[op], focus=[op], forms=form,
                statements=1,
            )  # fmt: skip
            text = script_source(SCRIPT.fit(Case(program)))
            with quiet(), fresh_unit() as unit:
                try:
                    unit.define(text, {"torch": torch}.get)
                    takes = True
                except Exception:
                    takes = False
            if takes != SCRIPT.supports(op.name, form):
                wrong.append(f"{op.name}[{form}]: {'taken' if takes else 'refused'}")
    assert not wrong


def test_only_what_it_can_say_is_drawn() -> None:
    for backend in (SCRIPT, TRACE):
        ops = runnable(CATALOGUE.values(), backend)
        assert 500 < len(ops) <= len(CATALOGUE)
        assert all(backend.supports(op.name, form) for op in ops for form in op.forms)
        kept = {op.name: op.forms for op in ops}
        for example in draw(Task(backend.name, "all", (), 50, 1), Settings((backend.name,))):
            body = example.program.body
            assert all(s.form in kept[s.op] for s in _calls(body))


def _calls(body: Any) -> Any:
    from amp_fuzz.cases.program import statements

    return statements(body)


def test_a_case_that_it_cannot_say_is_an_error_that_says_so() -> None:
    example = case([x("x0", 4)], call("relu", "x0", form="module"))
    with pytest.raises(BackendError, match="script cannot express relu as module"):
        judge(SCRIPT, example)


def test_units_know_nothing_of_each_other() -> None:
    """A function of torch's that one case scripted is not the function of the next."""
    assert usable() == ""
    known = torch.jit._state._python_cu
    found = []
    for _ in range(2):
        with quiet(), fresh_unit() as unit:
            source = "def program(x):\n    return torch.nn.functional.softsign(x)\n"
            unit.define(source, {"torch": torch}.get)
            found.append(torch.jit._state._try_get_jit_cached_function(
                torch.nn.functional.softsign
            ))  # fmt: skip
            assert torch.jit._state._python_cu is unit
    assert torch.jit._state._python_cu is known
    assert None not in found
    assert found[0].graph is not found[1].graph


def test_trees_of_torch_are_made_once_and_again_of_what_is_patched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    functional, own = torch.nn.functional, torch.autocast

    def trees() -> list[Any]:
        with fresh_unit():
            names = "softsign", "silu", "tanhshrink", "hardtanh"
            made = [frontend.get_jit_def(getattr(functional, n), n) for n in names]
            return [*made, frontend.get_jit_class_def(own, "autocast")]

    def kept() -> list[bool]:
        return [a is b for a, b in zip(first, trees(), strict=True)]

    first = trees()
    assert kept() == [True] * 5
    with monkeypatch.context() as patch:
        patch.setattr(functional, "softsign", functional.mish)
        patch.setattr(functional.silu, "__code__", functional.hardswish.__code__)
        unused = FunctionModifiers.UNUSED
        patch.setattr(functional.hardtanh, "_torchscript_modifier", unused, raising=False)
        patch.setattr(own, "__exit__", torch.nn.Module.extra_repr)
        assert kept() == [False, False, True, False, False]
    first = trees()
    with monkeypatch.context() as patch:
        patch.setattr(own, "other", staticmethod(len), raising=False)
        assert kept() == [True] * 4 + [False]


def test_trees_of_modules_are_not_kept() -> None:
    module = torch.nn.Linear(2, 2)
    with quiet(), fresh_unit():
        torch.jit.script(module)
    alive = weakref.ref(module)
    del module
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    "backend",
    [pytest.param(b, marks=[] if b in (SCRIPT, TRACE) else pytest.mark.slow) for b in ALL],
    ids=lambda b: b.name,
)
def test_memory_does_not_grow(backend: ScriptBackend) -> None:
    plan = {"backward": "none"} if backend.freeze else {}
    uncached = (Autocast(dtype="bfloat16", cache_enabled=False),)
    body = (*BODY, call("softsign", "v1", to="v2"))
    example = backend.fit(case(INPUTS, *body, contexts=uncached, **plan))
    functions = len(torch.jit._state._python_cu.get_functions())
    with quiet():
        for _ in range(40):
            backend.run([example])
        gc.collect()
        before = resident()
        for _ in range(200):
            backend.run([example])
    gc.collect()
    assert resident() - before < 12  # MiB, in 200 runs
    assert len(torch.jit._state._python_cu.get_functions()) == functions


def resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


@pytest.mark.parametrize(
    ("right", "wrong"), [("torch.exp(", "torch.expm1("), ("torch.mm(", "torch.mm(0.5*")]
)
@pytest.mark.parametrize("contexts", [(), (BF16,)], ids=["bare", "autocast"])
def test_a_frontend_that_is_wrong_is_not_explained_by_its_list(
    right: str, wrong: str, contexts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The imitation shares the frontend: what is wrong without autocast is no matter of casts."""
    text = "amp_fuzz.backends.torchscript.script_source"
    monkeypatch.setattr(text, lambda example: script_source(example).replace(right, wrong))
    example = case([x("x0", 4, 4)], call("mm", "x0", "x0"), call("exp", "v0", to="v1"),
                   contexts=contexts)  # fmt: skip
    assert judge(SCRIPT, example).outcome == "diverged"


def test_a_graph_that_is_imitated_is_that_of_its_own_text() -> None:
    """Whatever was compiled before, and under whatever autocast it ran."""
    inputs = [x("x0", 2, 2), x("w1", 2, 2)]
    products = [call("mm", "x0", "w1"), call("mm", "w1", "x0")]
    one, other, plain = (
        case(inputs, body, contexts=contexts)
        for body, contexts in zip([*products, products[0]], [(BF16,), (BF16,), ()], strict=True)
    )
    with quiet(), quirks(["torchscript-pass"]):
        SCRIPT.run([one])
        first = SCRIPT.reference().run(one)
        SCRIPT.run([other])
        assert compare(first, SCRIPT.reference().run(one)) is None
        SCRIPT.run([plain])
        assert compare(first, SCRIPT.reference().run(one)) is None
        assert compare(first, SCRIPT.reference().run(other)) is not None


@pytest.mark.parametrize(
    ("op", "dtype", "runs"),
    [
        (
            "exp",
            "bfloat16",
            [("bfloat16", "pass", "float32"), ("bfloat16", "autodiff", "bfloat16")],
        ),
        ("mm", "float32", [(low, "pass", low) for low in ("bfloat16", "float16", "bfloat16")]),
    ],
    ids=["pass", "dtype"],
)
def test_a_graph_has_the_casts_of_what_is_imitated_alone(
    op: str, dtype: str, runs: list[tuple[str, str, str]]
) -> None:
    """Not those of what was imitated before of the same text: each is written into a copy."""
    given = ("x0", "x1")[: 1 + (op == "mm")]
    for context, quirk, made in runs:
        inputs = [x(name, 2, 2, dtype=dtype) for name in given]
        example = case(inputs, call(op, *given), contexts=(Autocast(dtype=context),))
        with quiet(), quirks([f"torchscript-{quirk}"]):
            value = SCRIPT.reference().run(example).values["v0"]
        assert value is not None
        assert value.dtype is getattr(torch, made)


def test_what_is_tested_is_compiled_each_time_and_what_is_imitated_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What ran was profiled, and optimised for what it met: of that nothing may be left."""
    made: list[str] = []
    honest = torchscript._defined
    monkeypatch.setattr(torchscript, "_defined", lambda text: made.append(text) or honest(text))
    one, other = (case([x("x0", 4, dtype="bfloat16")], call(op, "x0")) for op in ("exp", "log"))
    with quiet(), quirks(["torchscript-pass"]):
        for count in (1, 2):
            SCRIPT.run([one])
            assert len(made) == count
        for example, count in ((one, 2), (other, 3), (other, 3), (one, 4)):
            SCRIPT.reference().run(example)
            assert len(made) == count


def test_a_context_of_another_device_is_left_alone() -> None:
    other = under(Autocast(device="cuda", dtype="float16"), call("mm", "x0", "w1"))
    example = case(INPUTS, other, contexts=())
    assert "torch.autocast('cuda'" in script_source(example)
    assert judge(SCRIPT, example).outcome == "agreed"


@pytest.mark.parametrize("backend", ALL, ids=lambda b: b.name)
def test_fitting_twice_is_fitting_once(backend: ScriptBackend) -> None:
    for example in draw(Task(backend.name, "all", (), 60, 8), Settings((backend.name,))):
        fitted = backend.fit(example)
        assert backend.fit(fitted) == fitted


def test_two_errors_of_a_trace_s_check_are_two() -> None:
    head = "Tracing failed sanity checks!\n"
    quoted = (
        head + "encountered an exception while running the trace with test inputs.\nException:\n"
    )
    texts = (head + "Graphs differed across invocations!", quoted + "\tone", quoted + "\ttwo")
    found = [
        complaints(Observation(raised=Raised("TracingCheckError", text, 1, ""))) for text in texts
    ]
    assert found == [{"Graphs differed across invocations!"}, {"one"}, {"two"}]


def test_the_explicit_form_shows_both_sides() -> None:
    example = case([x("x0", 4, 4, dtype="bfloat16"), x("x1", 4, 4)], call("exp", "x0"),
                   call("mm", "v0", "x1", to="v1"))  # fmt: skip
    text = SCRIPT.explicit(example).splitlines()
    assert text == [
        "# the casts of TorchScript's own pass:",
        "v0 = aten::exp(cast[float32](x0))",
        "v1 = aten::mm(cast[bfloat16](v0), cast[bfloat16](x1))",
    ]


def test_an_audit_leaves_out_what_it_cannot_say() -> None:
    ops = [CATALOGUE["mm"], CATALOGUE["Conv2d"]]
    assert count([SCRIPT], ops) == 1
    cells = audit_op(SCRIPT, CATALOGUE["exp"], shipped())
    assert {cell.status for cell in cells} - {"raise"} == {"agree", "known"}


@pytest.mark.parametrize(
    ("backend", "plan"),
    [
        (SCRIPT, {}),
        (SCRIPT, {"entry": "decorator"}),
        (TRACE, {}),
        (ScriptBackend("script", freeze=True), {"backward": "none"}),
        (ScriptBackend("trace", check=True), {"contexts": (BF16,)}),
    ],
    ids=lambda v: v.name if isinstance(v, ScriptBackend) else str(v),
)
def test_a_repro_shows_it(backend: ScriptBackend, plan: dict[str, Any], run_script: Run) -> None:
    inputs = [x("x0", 4, 4, dtype="bfloat16"), x("w1", 4, 4)]
    example = case(inputs, call("exp", "x0"), call("mm", "v0", "w1", to="v1"), **plan)
    verdict = judge(backend, example, known=False)
    assert verdict.outcome == "diverged"
    with quiet():
        text = repro(verdict.case, backend, verdict.finding("all"))
    assert "amp_fuzz" not in text
    code, printed, _ = run_script(text)
    assert code == 1, printed


@pytest.mark.parametrize("op", sorted(_REDUCTIONS))
def test_a_loss_that_says_no_reduction_is_a_mean_by_its_schema_and_not_in_python(op: str) -> None:
    """What is said, by name or number, is the same for both."""
    number = _REDUCTIONS[op]
    schema = getattr(torch.ops.aten, op.partition(".")[0])
    schema = getattr(schema, schema.overloads()[0])._schema
    argument = schema.arguments[number]
    assert (argument.name, argument.default_value) == ("reduction", 1)

    def saying(drawn: Case, **reduction: int) -> Case:
        call, *_ = statements(drawn.program.body)
        said = {k: v for k, v in call.kwargs if k != "reduction"} | reduction
        call = Statement(op, "overload", call.args[:number], tuple(said.items()), ("v0",))
        program = msgspec.structs.replace(drawn.program, body=(call,), outputs=("v0",))
        return Case(program, Plan(contexts=(), backward="none"))

    met = set[str]()
    for made in drawn(60, ops=[op], seed=op):
        if next(statements(made.program.body)).form == "overload":
            unsaid, said = judge(SCRIPT, saying(made)), judge(SCRIPT, saying(made, reduction=1))
            assert unsaid.outcome != "diverged", unsaid  # of no dimensions all are alike
            assert said.outcome in ("agreed", "raised"), said
            met.add(unsaid.known)
    assert "torchscript-reduction" in met


def test_what_is_said_of_a_reduction_stays() -> None:
    def body(**reduction: int) -> tuple[Any, ...]:
        losses = [
            call("kl_div", "x0", "x1", to=f"v{n}", form="overload", **reduction) for n in "01"
        ]
        return losses[0], under(NoGrad(), losses[1])

    by_number = call("kl_div", "x0", "x1", 2, form="overload")
    function = call("kl_div", "x0", "x1")
    for said in (body(reduction=0), (by_number,), (function,)):
        assert _reduced(Program((), said, ())).body == said
    assert _reduced(Program((), body(), ())).body == body(reduction=1)


def test_a_loss_without_reduction_beside_what_was_computed_before() -> None:
    example = case(
        [x("x0", 2), x("w1", 2)],
        under(NoGrad(), EXP, call("mul", "v0", "x0", to="v2")),
        ANOTHER,
        call("kl_div", "v1", "x0", form="overload", to="v3", log_target=True),
        contexts=(),
    )
    program = msgspec.structs.replace(example.program, outputs=("v2", "v3"))
    known = judge(SCRIPT, msgspec.structs.replace(example, program=program)).known.split("+")
    assert {"torchscript-common-subexpressions", "torchscript-reduction"} <= set(known)


@pytest.mark.parametrize("said", ["first", "second"])
def test_a_loss_without_reduction_is_the_same_as_one_of_the_mean(said: str) -> None:
    """It is merged with one of the other grad mode that says what the schema does."""
    one, other = (
        call("kl_div", "w1", "x0", form="overload", to=to, **named)
        for to, named in (
            ("v0", {"reduction": 1} if said == "first" else {}),
            ("v1", {"reduction": 1} if said == "second" else {}),
        )
    )
    after = call("mul", "v0", "x0", to="v2"), call("add", "v1", "x0", to="v3")
    example = case([x("x0", 2), x("w1", 2)], under(NoGrad(), one), other, *after, contexts=())
    program = msgspec.structs.replace(example.program, outputs=("v2", "v3"))
    known = judge(SCRIPT, msgspec.structs.replace(example, program=program)).known.split("+")
    assert {"torchscript-common-subexpressions", "torchscript-reduction"} <= set(known)
