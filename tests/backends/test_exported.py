"""torch.export: programs are really exported, and what decomposes later is judged too."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from amp_fuzz.backends import backends, prelude
from amp_fuzz.backends.export import ExportBackend
from amp_fuzz.backends.harness import Observation, quiet
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.literals import bits_of
from amp_fuzz.cases.program import Autocast, Checkpoint, Context, InferenceMode, Node, NoGrad, Ref
from amp_fuzz.findings.minimize.target import stage_of
from amp_fuzz.findings.repro.script import repro
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.runs.engine import Settings, Task, draw
from amp_fuzz.upstream import quirks, shipped
from amp_fuzz.upstream.explain import judge_of
from tests.helpers import BF16, Run, WrongKernel, call, case, under, x

INPUTS = [x("x0", 6, 8), x("w1", 8, 6)]
BODY = (call("mm", "x0", "w1"), call("softmax", "v0", -1, to="v1"))
PLAIN, DECOMPOSED = ExportBackend(), ExportBackend(decomposed=True)


def judge(backend: ExportBackend, example: Case) -> Verdict:
    with quiet():
        return judge_of(backend, shipped()).judge(example)


def test_they_are_found() -> None:
    assert [b.name for b in backends().values() if isinstance(b, ExportBackend)] == [
        "export",
        "export[decomposed]",
    ]


def test_regions_are_in_the_graph() -> None:
    island = under(Autocast(enabled=False), call("mm", "x0", "w1"))
    for backend in (PLAIN, DECOMPOSED):
        assert judge(backend, case(INPUTS, island)).outcome == "agreed"


def test_the_program_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    export = prelude.exported

    def spy(program: Any, inputs: Any, decomposed: bool) -> Any:
        made.append(decomposed)
        found = export(program, inputs, decomposed)
        assert decomposed or isinstance(found, torch.fx.GraphModule)
        return found

    monkeypatch.setattr("amp_fuzz.backends.prelude.exported", spy)
    PLAIN.run([case(INPUTS, *BODY, steps=2)])
    DECOMPOSED.run([case(INPUTS, *BODY, backward="none")])
    assert made == [False, True]


def test_what_an_export_gets_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decomposition that is a third too small, which only the decomposed export calls."""
    run = torch.export.ExportedProgram.run_decompositions
    wrong = {torch.ops.aten.silu.default: lambda x: x * torch.sigmoid(x) / 1.5}
    monkeypatch.setattr(
        torch.export.ExportedProgram, "run_decompositions", lambda self: run(self, wrong)
    )
    example = case([x("x0", 6, 8)], call("silu", "x0"), backward="none")
    judge_ = judge_of(DECOMPOSED, ())
    with quiet():
        verdict = judge_.judge(example)
        assert verdict.divergence is not None
        assert (verdict.divergence.kind, verdict.divergence.where) == ("value", "v0")
        assert stage_of(judge_, verdict) == "export[decomposed]"
        assert judge_of(PLAIN, ()).judge(example).outcome == "agreed"


def test_programs_of_the_generator_run() -> None:
    outcomes = []
    for example in draw(Task("export", "all", (), 20, 5), Settings(("export",))):
        outcomes.append(judge(PLAIN, example).outcome)
    assert outcomes.count("agreed") > 10
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_composite_op_loses_its_region_when_it_is_decomposed(run_script: Run) -> None:
    """docs/findings/export.md; pytorch#137274. If torch mends it, the page is to be changed."""
    inputs = [x("x0", 3, 2, 2), x("x1", 1, 2, 3), *(x(f"w{i}", 3, 2 + (i == 3)) for i in (2, 3))]
    rnn = call("rnn_tanh", "x0", "x1", ["w2", "w3"], False, 1, 0.0, False, False, False, to="v0 v1")
    region = under(Autocast(dtype="bfloat16"), rnn)
    example = case(inputs, region, contexts=(), backward="none")
    verdict = judge(DECOMPOSED, example)
    assert verdict.divergence is not None
    assert (verdict.known, verdict.divergence.kind) == ("export-composites", "dtype")
    assert judge(PLAIN, example).outcome == "agreed"
    with quiet():
        text = repro(verdict.case, DECOMPOSED, verdict.finding("all"))
    code, printed, _ = run_script(text)
    assert code == 1, printed


def test_what_is_converted_must_have_the_dtype_that_it_was_exported_with() -> None:
    """An export asserts it, and raises where a composite op that lost its region has another."""
    inputs = [x("x0", 2, 3), x("x1", 3, 2), x("x2", 2)]
    product = call("einsum", "ij,jk->ik", "x0", "x1")
    for op in ("float", "neg"):
        used = call(op, "v0", form="method", to="v1")
        verdict = judge(DECOMPOSED, case(inputs, product, used, backward="none"))
        assert verdict.known == "export-composites"
        assert verdict.divergence is not None
        assert ("dtype mismatch" in verdict.divergence.observed) == (op == "float")
    with quirks(["export-composites"]):
        seen = DECOMPOSED.reference().run(case(inputs, product, backward="none"))
    assert [call.overload for call in seen.kernels or ()] == []  # of no run that it makes besides
    # what is converted is right where no composite op made it
    before = call("float", "x2", form="method"), call("sin", "v0", to="v1")
    assert judge(DECOMPOSED, case(inputs, *before, backward="none")).outcome == "agreed"


def test_l1_loss_forgets_its_weight() -> None:
    """As wherever a mode of torch functions is on."""
    inputs = [x("x0", 3), x("x1", 3), x("x2", 3, domain="positive")]
    loss = call("l1_loss", "x0", "x1", weight=Ref("x2"), reduction="none")
    example = case(inputs, loss, contexts=(), backward="none")
    with quiet():
        verdict = judge_of(ExportBackend(), shipped()).judge(example)
    assert (verdict.outcome, verdict.known) == ("known", "compile-functions")


def test_what_is_before_a_checkpoint_in_inference_mode_has_its_gradient() -> None:
    """Inference mode is forgotten; without grad are the checkpoint, and what comes after it."""
    again = under(Checkpoint(use_reentrant=True), call("mul", "x0", "w1"))
    example = case(
        [x("x0", 2), x("w1", 2)],
        under(InferenceMode(), call("exp", "w1", to="v1"), again),
        call("sin", "w1", to="v2"),
        contexts=(),
    )
    with quiet():
        verdict = judge_of(ExportBackend(), shipped()).judge(example)
    assert verdict.outcome == "known", verdict.divergence
    assert set(verdict.known.split("+")) == {"export-checkpoint", "export-inference-mode"}


BIG = bits_of([-(2.0**127), -(2.0**127)], "float32")
DECOMPOSITIONS = {
    "compile-full-overflow": case(
        [
            x("x0", 1, dtype="float16"),
            x("x1", 1, dtype="bool"),
            x("x2", values=bits_of([65536.0], "float32")),
        ],
        call("masked_fill", "x0", "x1", "x2"),
        contexts=(),
        backward="none",
    ),
    "compile-kernels": case(
        [x("x0", 1, 1)],
        call("linalg.pinv.hermitian", "x0", hermitian=True),
        contexts=(BF16,),
        backward="none",
    ),
    "compile-mixed-cross": case(
        [x("x0", 3, dtype="bfloat16"), x("x1", 3)],
        call("cross", "x0", "x1"),
        contexts=(),
        backward="none",
    ),
    "compile-mixed-mv": case(
        [x("x0", 2, 3, dtype="bfloat16"), x("x1", 3)],
        call("mv", "x0", "x1"),
        contexts=(),
        backward="none",
    ),
    "compile-matrix-rank": case(
        [x("x0", 3, 3), x("b1", dtype="int64", values=bits_of([7], "int64"))],
        under(InferenceMode(), call("linalg.matrix_rank", "x0", form="out", out="b1")),
        contexts=(),
        backward="none",
    ),
    "compile-promotion": case(
        [x("x0", 3), x("x1", 3, dtype="float64")],
        call("soft_margin_loss", "x0", "x1"),
        contexts=(),
        backward="none",
    ),
    "compile-out": case(
        [x("x0", 4, 4), x("x1", 4, 4), x("b2", 4, 4)],
        call("matmul", "x0", "x1", form="out", out="b2"),
        contexts=(BF16,),
        backward="none",
    ),
    "compile-range": case(
        [x("x0", 2, values=BIG), x("x1", values=bits_of([2.0**65], "float32"))],
        call("add", "x0", "x0"),
        call("addcmul", "v0", "x1", "x1", to="v1"),
        contexts=(),
        backward="none",
    ),
    "compile-std": case(
        [x("x0", 2, values=bits_of([2.0**-100, 0.0], "float32"))],
        call("std_mean", "x0", to="v0 v1"),
        contexts=(),
        backward="none",
    ),
    "compile-zero-dim-loss": case(
        [x("x0", 3), x("x1", dtype="int64", domain="index", bound=3), x("x2", 2, 3)],
        call("multi_margin_loss", "x0", "x1", reduction="none"),
        contexts=(),
        backward="none",
    ),
    "export-embedding-bag": case(
        [x("w0", 3, 2), x("x1", 2, 2, dtype="int64", domain="index", bound=3)],
        call("mul", "w0", 2.0),
        call("embedding_bag", "v0", "x1", mode="sum", to="v1"),
        contexts=(),
        backward="none",
    ),
    "export-layer-norm": case(
        [x("x0", 2, 3, dtype="bfloat16"), x("x1", 3)],
        call("native_layer_norm", "x0", [3], None, "x1", 1.0, to="_ _ v0"),
        call("silu", "v0", to="v1"),
        contexts=(),
        backward="none",
    ),
    "export-promotion": case(
        [x("x0", 2, dtype="bfloat16"), x("x1")],
        call("select_scatter", "x0", "x1", 0, 0),
        contexts=(),
        backward="none",
    ),
    "compile-promotion of addr": case(
        [x("x0"), *(x(f"x{i}", 2, dtype="bfloat16") for i in (1, 2))],
        call("addr", "x0", "x1", "x2"),
        contexts=(),
        backward="none",
    ),
    "export-take": case(
        [x("x0"), x("x1", dtype="int64", domain="index", bound=1)],
        call("take", "x0", "x1"),
        contexts=(),
        backward="none",
    ),
}


@pytest.mark.parametrize("name", DECOMPOSITIONS)
def test_what_a_decomposition_does_otherwise_is_known(name: str) -> None:
    """And not explained by another entry; before it is decomposed, the program agrees."""
    example, name = DECOMPOSITIONS[name], name.partition(" ")[0]
    verdict = judge(DECOMPOSED, example)
    assert (verdict.outcome, verdict.known) == ("known", name), verdict.divergence
    others = tuple(k for k in shipped() if k.id != name)
    with quiet():
        assert judge_of(DECOMPOSED, others).judge(example).outcome == "diverged"
    assert judge(PLAIN, example).outcome in ("agreed", "raised")


def test_what_a_checkpoint_returns_as_it_was_is_a_view_without_a_gradient() -> None:
    """So a backward pass raises, though it is said to need a gradient."""
    same = call("float", "w0", form="method")
    product = call("mul", "w0", "w0", to="v1")
    example = case(
        [x("w0", 2), x("w1", 2)],
        under(Checkpoint(use_reentrant=True), same, product),
        call("exp", "w1", to="v2"),
        contexts=(),
    )
    verdict = judge(PLAIN, example)
    assert verdict.divergence is not None
    assert verdict.divergence.kind == "raise", verdict.divergence
    assert verdict.known == "export-checkpoint"


@pytest.mark.parametrize("entry", ["custom_fwd", "cast_inputs"])
def test_a_program_that_is_exported_without_grad_forgets_where_it_is_off(entry: Any) -> None:
    """The forward of an autograd.Function runs without; what recomputes it does not."""
    example = case(
        [x("x0", 2), x("w1", 2)],
        under(NoGrad(), call("mul", "x0", "w1")),
        call("exp", "w1", to="v1"),
        contexts=(),
        entry=entry,
    )
    verdict = judge(PLAIN, example)
    assert (verdict.outcome, verdict.known.split("+")[-1]) == ("known", "export-no-grad")
    plain = case([x("x0", 2), x("w1", 2)], call("mul", "x0", "w1"), contexts=(), entry=entry)
    assert judge(PLAIN, plain).outcome == "agreed"


def _nested(rng: random.Random, names: Iterator[str], depth: int = 0) -> list[Node]:
    contexts = (NoGrad(), InferenceMode(), Autocast(dtype="bfloat16", enabled=False))
    contexts += tuple(Checkpoint(use_reentrant=again) for again in (True, False))
    body: list[Node] = []
    for _ in range(rng.randint(1, 3)):
        if depth < 3 and rng.random() < 0.6:
            body.append(under(rng.choice(contexts), *_nested(rng, names, depth + 1)))
        else:
            body.append(call("mul", "w0", "w1", to=next(names)))
    return body


def test_grad_modes_of_nested_regions_are_imitated() -> None:
    rng = random.Random(7)
    outcomes = []
    for _ in range(40):
        body = _nested(rng, (f"v{i}" for i in itertools.count()))
        outcomes.append(judge(PLAIN, case([x("w0", 2), x("w1", 2)], *body, contexts=())).outcome)
    assert set(outcomes) == {"agreed", "known"}
    assert outcomes.count("known") > 10


def test_a_dtype_that_fake_tensors_remember_wrong_is_not_that_of_a_layer_norm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without promised statistics the cache of fake tensors is cleared, which heals more."""
    honest = ExportBackend.observe

    def observe(self: ExportBackend, one: Case) -> Observation:
        seen = honest(self, one)
        if "stale" in FakeTensorMode.cache:
            seen.values["v0"] = torch.zeros(3, dtype=torch.float16)
        return seen

    monkeypatch.setattr(ExportBackend, "observe", observe)
    monkeypatch.setitem(FakeTensorMode.cache, "stale", None)
    example = case([x("x0", 3)], call("sin", "x0"), contexts=(), backward="none")
    assert judge(DECOMPOSED, example).outcome == "diverged"


def test_an_error_without_grad_leaves_grad_off() -> None:
    example = case(
        [x("x0", 3, dtype="bfloat16"), x("x1", 3)],
        under(NoGrad(), call("cross", "x0", "x1")),
        contexts=(),
        backward="none",
    )
    verdict = judge(PLAIN, example)
    assert verdict.divergence is not None
    assert (verdict.divergence.kind, verdict.known) == ("state", "export-grad-mode-left")


LEFT = "weight cache: True became False"


@pytest.mark.parametrize(
    ("region", "more"), [(None, ""), (None, LEFT), (NoGrad(), LEFT)], ids=["", "more", "region"]
)
def test_an_error_elsewhere_or_another_state_that_is_left_is_reported(
    monkeypatch: pytest.MonkeyPatch, region: Context | None, more: str
) -> None:
    honest = ExportBackend.observe

    def observe(self: ExportBackend, one: Case) -> Observation:
        seen = honest(self, one)
        seen.leaked = "; ".join(filter(None, ("grad mode: True became False", more)))
        return seen

    monkeypatch.setattr(ExportBackend, "observe", observe)
    cross = call("cross", "x0", "x1", to="v1")
    inputs = [x("x0", 3, dtype="bfloat16"), x("x1", 3)]
    body = (under(region, cross),) if region else (nested(NoGrad(), after=call("sin", "x0")), cross)
    verdict = judge(PLAIN, case(inputs, *body, contexts=(), backward="none"))
    assert verdict.divergence is not None
    assert (verdict.outcome, verdict.divergence.kind) == ("diverged", "state")
    assert torch.is_grad_enabled()


OFF, AGAIN, ONCE = Autocast(enabled=False), Checkpoint(use_reentrant=True), Checkpoint()
SIN, COS, EXP = (call(op, "w0", to=f"v{i}") for i, op in enumerate(("sin", "cos", "exp")))
MM = call("mm", "w0", "w0", to="v3")


def nested(*contexts: Context, after: Node = SIN) -> Node:
    """Return a node in regions, the first outermost."""
    for context in reversed(contexts):
        after = under(context, after)
    return after


@pytest.mark.parametrize(
    ("body", "known"),
    [
        # A region of no_grad is kept, and forgotten in one of autocast, wherever that stands.
        ((nested(NoGrad()), EXP), ""),
        ((under(NoGrad(), nested(NoGrad()), COS), EXP), ""),
        ((nested(NoGrad(), OFF), EXP), ""),
        ((nested(OFF, NoGrad()), EXP), "no-grad"),
        ((nested(OFF, ONCE, NoGrad()), EXP), "no-grad"),
        ((nested(NoGrad(), OFF, NoGrad()), EXP), "no-grad"),
        ((under(NoGrad(), nested(OFF, NoGrad()), COS), EXP), "no-grad"),
        ((under(OFF, nested(NoGrad(), NoGrad()), COS), EXP), "no-grad"),
        # A checkpoint, and what is after it, up to where a grad mode is set.
        ((nested(AGAIN),), "checkpoint"),
        ((nested(AGAIN), nested(OFF, after=COS), EXP), "checkpoint"),
        ((nested(AGAIN), nested(BF16, after=MM), EXP), "checkpoint"),
        ((nested(AGAIN), nested(ONCE, after=COS), EXP), "checkpoint"),
        ((nested(AGAIN), nested(NoGrad(), after=COS), EXP), "checkpoint"),
        ((under(AGAIN, nested(NoGrad()), COS), EXP), "checkpoint"),
        ((nested(NoGrad(), AGAIN), EXP), ""),
        ((under(NoGrad(), nested(AGAIN), COS), EXP), ""),
        ((nested(OFF, NoGrad()), nested(NoGrad(), AGAIN, after=COS), EXP), "no-grad"),
        # In a region of autocast that is forgotten, too, and ends what began before.
        ((nested(OFF, AGAIN), EXP), ""),
        ((nested(AGAIN), nested(OFF, AGAIN, after=COS), EXP), "no-grad checkpoint"),
        ((nested(AGAIN), nested(OFF, NoGrad(), after=COS), EXP), "no-grad checkpoint"),
        ((under(AGAIN, nested(OFF, NoGrad()), COS), EXP), "no-grad checkpoint"),
        # One that is not reentrant, in another such one.
        ((nested(ONCE), EXP), ""),
        ((nested(ONCE), nested(ONCE, after=COS), EXP), ""),
        ((under(ONCE, SIN, nested(ONCE, after=COS)), EXP), "checkpoint"),
        ((nested(ONCE, OFF, ONCE), EXP), ""),
        ((nested(NoGrad(), ONCE, ONCE), EXP), ""),
        ((nested(ONCE, AGAIN), EXP), "checkpoint"),
        ((nested(AGAIN), nested(NoGrad(), after=COS), nested(ONCE, OFF, after=EXP)), "checkpoint"),
        # Inference mode is none in the graph, and while that is traced.
        ((nested(InferenceMode()), EXP), "inference-mode"),
        ((nested(OFF, InferenceMode()), EXP), "inference-mode"),
        ((nested(InferenceMode(), NoGrad()), EXP), "inference-mode"),
        ((nested(ONCE, InferenceMode(), ONCE), EXP), "inference-mode"),
        ((nested(OFF, InferenceMode(), NoGrad()), EXP), "no-grad inference-mode"),
        (
            (
                nested(AGAIN),
                nested(NoGrad(), after=COS),
                nested(InferenceMode(), ONCE, ONCE, after=EXP),
            ),
            "checkpoint inference-mode",
        ),
    ],
)
def test_grad_modes_are_those_of_an_export(body: tuple[Node, ...], known: str) -> None:
    """And another fault beside them is seen."""
    example = case([x("w0", 2, 2)], *body, contexts=())
    assert PLAIN.reference().meant(example) == example
    verdict = judge(PLAIN, example)
    assert verdict.outcome in ("agreed", "known"), verdict.divergence
    assert set(filter(None, verdict.known.split("+"))) == {f"export-{k}" for k in known.split()}
    with quiet():
        wrong = judge_of(WrongKernel(PLAIN, "sin"), shipped()).judge(example)
    assert wrong.outcome == "diverged"


def test_a_checkpoint_that_gives_zeros_back_is_named_beside_another_bug() -> None:
    """Zeros for a weight that nothing depends on; an export has none of it."""
    body = call("le", "x1", "w2", to="v3"), call("add", "x1", "x1", to="v4")
    inputs = [x("w0", 2, 2), x("x1", 2), x("w2", 2)]
    example = case(inputs, nested(OFF, NoGrad()), EXP, under(AGAIN, *body), contexts=())
    assert set(judge(PLAIN, example).known.split("+")) == {"export-no-grad", "export-checkpoint"}
