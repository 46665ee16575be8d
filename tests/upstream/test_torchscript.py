"""Bugs of TorchScript, beyond their examples: what they do not explain, and their imitations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from amp_fuzz.upstream.torchscript.overloads import REDUCTIONS, SUMS, reduced
from amp_fuzz.upstream.torchscript.subexpressions import merged
from torch.utils._pytree import tree_map

from amp_fuzz import reference
from amp_fuzz.backends import backends, imitation
from amp_fuzz.backends.base import Backend
from amp_fuzz.backends.harness import Observation, Raised, quiet
from amp_fuzz.backends.reference import ReferenceRuntime
from amp_fuzz.backends.torchscript import ScriptBackend
from amp_fuzz.backends.torchscript_autocast import Fallen
from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.program import Autocast, NoGrad, Program, Ref, Statement, statements
from amp_fuzz.oracle import Divergence, compare
from amp_fuzz.oracle.trial import Trial
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.upstream import BUGS, quirks, shipped
from amp_fuzz.upstream.evidence import Listed
from amp_fuzz.upstream.explain import judge_of
from amp_fuzz.upstream.known import Known
from amp_fuzz.upstream.torchscript import formulas
from amp_fuzz.upstream.torchscript.programs import replaced
from tests.helpers import BF16, call, case, drawn, needs_torch, under, x

pytestmark = pytest.mark.thorough

SCRIPT = ScriptBackend("script")
OFF = Autocast(enabled=False)
RAISING = (
    "torchscript-mixed-gradients",
    "torchscript-mixed-vectors",
    "torchscript-saved",
    "torchscript-clamp-raises",
)
"""What raises in a backward pass, on one side."""


def judge(backend: Backend, example: Case) -> Verdict:
    with quiet():
        return judge_of(backend, shipped()).judge(example)


def case_of(name: str) -> Case:
    return BUGS[name].examples[0].case


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

    frozen = backends()[name]
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


def shipped_entry(name: str) -> Known:
    (entry,) = [entry for entry in shipped() if entry.id == name]
    return entry


@pytest.mark.parametrize("name", RAISING)
def test_an_error_of_a_backward_pass_is_known_by_its_text_there(name: str) -> None:
    """Elsewhere, of another op, beside an error of the other side, or another: it is new."""
    needs_torch(BUGS[name].examples[0].torch)
    verdict = judge(SCRIPT, case_of(name))
    found = verdict.divergence
    assert found is not None
    assert verdict.known == name
    entry = shipped_entry(name)
    ops = {s.op for s in statements(case_of(name).program.body)}
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
    found = judge(SCRIPT, case_of(name)).divergence
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


def test_linear_of_two_vectors_of_other_sizes_is_known_by_its_error() -> None:
    entry = shipped_entry("torchscript-linear-vector")
    where = "if starts: torch.autograd.backward(starts, cotangents)"
    said = (
        "RuntimeError: inconsistent tensor size, expected tensor [4] and src [3] to have the same"
    )
    told = {"expected": "no error", "observed": f"{said} number of elements, but got 4 and 3"}
    assert entry.explains("raise", ["linear"], where, **told)
    assert not entry.explains("raise", ["dot"], where, **told)


def test_formulas_that_are_wrong_beside_the_pass_are_both_named() -> None:
    """The gradient of a square root at 0 is masked by a relu before it."""
    body = call("relu", "w1"), call("pow.Tensor_Scalar", "v0", 0.5, to="v1")
    example = case([x("x0", 4, dtype="bfloat16"), x("w1", 8)], *body, call("exp", "x0", to="v2"))
    assert (
        judge(SCRIPT, example).known == "torchscript-pass+torchscript-autodiff+torchscript-formulas"
    )


@pytest.mark.parametrize("op", ["relu", "clamp", "where", "addcmul", "div", "softplus"])
def test_a_formula_that_is_wrong_otherwise_is_not_explained(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is needed, and none explains more than it computes."""
    examples = (one.case for one in BUGS["torchscript-formulas"].examples)
    example = next(e for e in examples if op in {s.op for s in statements(e.program.body)})
    kept = tuple(f for f in formulas._FORMULAS if f[1] not in (op, f"__true{op}__"))
    assert len(kept) < len(formulas._FORMULAS)
    monkeypatch.setattr(formulas, "_FORMULAS", kept)
    assert judge(SCRIPT, example).outcome == "diverged"


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


def test_only_an_addmm_without_factors_is_taken_apart() -> None:
    """A product of 2049 is 2048 in float16; one call rounds the sum alone."""
    x, w = torch.tensor([[2048.0, 1.0]]).half(), torch.ones(2, 1).half()
    bias, out = torch.tensor([[-2048.0]]).half(), torch.zeros(1, 1).half()
    given = bias, x, w
    with replaced(SUMS):
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
    with context, replaced(SUMS):
        found = torch.addmm(bias, x, w)
    assert (found.dtype, found.item()) == (getattr(torch, made), value)


def changed(patch: pytest.MonkeyPatch, label: str, times: float, *, imitated: bool = False) -> None:
    """Have a value multiplied of the backend, under autocast, or of the reference's imitation."""
    kind: Any = ReferenceRuntime if imitated else ScriptBackend
    honest = kind.run

    def run(self: Any, given: Any) -> Any:
        made = honest(self, given)
        for seen, one in [(made, given)] if imitated else zip(made, given, strict=True):
            value = seen.values.get(label)
            acts = (
                "torchscript-pass" in imitation.current().names if imitated else one.plan.contexts
            )
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
    assert judge(SCRIPT, case_of("torchscript-range")).outcome == "diverged"


def test_what_requires_grad_in_an_optimised_graph_alone_is_known_by_its_error() -> None:
    (entry,) = (k for k in shipped() if k.id == "torchscript-requires-grad")
    where = "if starts: torch.autograd.backward(starts, cotangents)"
    said = "RuntimeError: derivative for aten::mul is not implemented"
    assert entry.explains("raise", ["mul"], where, expected="no error", observed=said)
    said = "RuntimeError: element 1 of tensors does not require grad and does not have a grad_fn"
    assert not entry.explains("raise", ["mul"], where, expected="no error", observed=said)


EXP, ANOTHER = call("exp", "w1"), call("exp", "w1", to="v1")


@pytest.mark.parametrize(
    ("first", "outputs"),
    [(EXP, ("v0", "v1", "v3")), (call("exp", "x0"), ("v2", "v3"))],
    ids=["both-returned", "another-call"],
)
def test_nothing_is_merged_that_is_returned_or_another_call(
    first: Statement, outputs: tuple[str, ...]
) -> None:
    after = call("mul", "v0", "x0", to="v2"), call("add", "v1", "x0", to="v3")
    body = under(NoGrad(), first), ANOTHER, *after
    example = case([x("x0", 2), x("w1", 2)], *body, contexts=(), returns=outputs)
    assert judge(SCRIPT, example).outcome in ("agreed", "raised")


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
    example = case_of("torchscript-no-grad")
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


def test_a_pass_that_is_wrong_is_not_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The imitation casts exp; if torch's pass did not, or did otherwise, that would be new."""
    example = case([x("x0", 4, dtype="bfloat16")], call("exp", "x0"))
    monkeypatch.setattr("amp_fuzz.backends.torchscript.write_casts", lambda *_: None)
    assert judge(SCRIPT, example).outcome == "diverged"


@pytest.mark.slow
@pytest.mark.parametrize("op", sorted(REDUCTIONS))
def test_a_loss_that_says_no_reduction_is_a_mean_by_its_schema_and_not_in_python(op: str) -> None:
    """What is said, by name or number, is the same for both."""
    number = REDUCTIONS[op]
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
        assert reduced(Program((), said, ())).body == said
    assert reduced(Program((), body(), ())).body == body(reduction=1)


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
