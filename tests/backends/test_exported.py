"""torch.export: programs are really exported, and what decomposes later is judged too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from amp_fuzz import prelude
from amp_fuzz.backends import backends
from amp_fuzz.backends.exported import ExportBackend
from amp_fuzz.case import Case
from amp_fuzz.engine import Settings, Task, draw
from amp_fuzz.judge import Judge, Verdict, quiet
from amp_fuzz.known import shipped
from amp_fuzz.program import Autocast, Checkpoint, Context, InferenceMode, Node, NoGrad, Ref
from amp_fuzz.repro import repro
from amp_fuzz.shrink import stage_of
from tests.helpers import BF16, Run, WrongKernel, call, case, under, x

INPUTS = [x("x0", 6, 8), x("w1", 8, 6)]
BODY = (call("mm", "x0", "w1"), call("softmax", "v0", -1, to="v1"))
PLAIN, DECOMPOSED = ExportBackend(), ExportBackend(decomposed=True)


def judge(backend: ExportBackend, example: Case) -> Verdict:
    with quiet():
        return Judge(backend, shipped()).judge(example)


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

    monkeypatch.setattr("amp_fuzz.prelude.exported", spy)
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
    judge_ = Judge(DECOMPOSED, ())
    with quiet():
        verdict = judge_.judge(example)
        assert verdict.divergence is not None
        assert (verdict.divergence.kind, verdict.divergence.where) == ("value", "v0")
        assert stage_of(judge_, verdict) == "export[decomposed]"
        assert Judge(PLAIN, ()).judge(example).outcome == "agreed"


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
    assert (verdict.outcome, verdict.divergence.kind) == ("diverged", "dtype")
    assert judge(PLAIN, example).outcome == "agreed"
    with quiet():
        text = repro(verdict.case, DECOMPOSED, verdict.finding("all"))
    code, printed, _ = run_script(text)
    assert code == 1, printed


def test_l1_loss_forgets_its_weight() -> None:
    """As wherever a mode of torch functions is on."""
    inputs = [x("x0", 3), x("x1", 3), x("x2", 3, domain="positive")]
    loss = call("l1_loss", "x0", "x1", weight=Ref("x2"), reduction="none")
    example = case(inputs, loss, contexts=(), backward="none")
    with quiet():
        verdict = Judge(ExportBackend(), shipped()).judge(example)
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
        verdict = Judge(ExportBackend(), shipped()).judge(example)
    assert verdict.outcome == "known", verdict.divergence
    assert set(verdict.known.split("+")) == {"export-checkpoint", "export-inference-mode"}


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
        wrong = Judge(WrongKernel(PLAIN, "sin"), shipped()).judge(example)
    assert wrong.outcome == "diverged"


def test_a_checkpoint_that_gives_zeros_back_is_named_beside_another_bug() -> None:
    """Zeros for a weight that nothing depends on; an export has none of it."""
    body = call("le", "x1", "w2", to="v3"), call("add", "x1", "x1", to="v4")
    inputs = [x("w0", 2, 2), x("x1", 2), x("w2", 2)]
    example = case(inputs, nested(OFF, NoGrad()), EXP, under(AGAIN, *body), contexts=())
    assert set(judge(PLAIN, example).known.split("+")) == {"export-no-grad", "export-checkpoint"}
