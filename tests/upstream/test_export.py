"""Bugs of torch.export, beyond their examples: what they do not explain, and their imitations."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import torch

from amp_fuzz.backends.export import ExportBackend
from amp_fuzz.backends.harness import Observation, quiet
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import Autocast, Checkpoint, Context, Node, NoGrad
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.upstream import composed, quirks, shipped
from amp_fuzz.upstream.explain import judge_of
from tests.helpers import WrongKernel, call, case, needs_torch, under, x

pytestmark = pytest.mark.thorough

PLAIN, DECOMPOSED = ExportBackend(), ExportBackend(decomposed=True)


def judge(backend: ExportBackend, example: Case) -> Verdict:
    with quiet():
        return judge_of(backend, shipped()).judge(example)


def test_an_imitated_export_leaves_no_trace_of_its_first_call() -> None:
    """It runs the program once more, to see what is converted."""
    inputs = [x("x0", 2, 3), x("x1", 3, 2)]
    example = case(inputs, call("einsum", "ij,jk->ik", "x0", "x1"), backward="none")
    with quirks(["export-composites"]):
        seen = DECOMPOSED.reference().run(example)
    assert [call.overload for call in seen.kernels or ()] == []


def test_a_function_of_a_user_is_left_as_it_is() -> None:
    example = case([x("x0", 2)], call("neg", "x0"))
    made = composed(frozenset({"export-composites"}))
    assert made.wrap(judge, example) is judge


def test_a_conversion_of_a_value_that_no_composite_op_made_is_right() -> None:
    body = call("float", "x2", form="method"), call("sin", "v0", to="v1")
    assert judge(DECOMPOSED, case([x("x2", 2)], *body, backward="none")).outcome == "agreed"


def _nested(rng: random.Random, names: Iterator[str], depth: int = 0) -> list[Node]:
    contexts = NoGrad(), OFF
    body: list[Node] = []
    for _ in range(rng.randint(1, 3)):
        if depth < 3 and rng.random() < 0.6:
            body.append(under(rng.choice(contexts), *_nested(rng, names, depth + 1)))
        else:
            body.append(call("mul", "w0", "w1", to=next(names)))
    return body


def test_grad_modes_of_nested_regions_are_imitated() -> None:
    needs_torch(">=2.9")
    rng = random.Random(7)
    outcomes = set()
    for _ in range(20):
        body = _nested(rng, (f"v{i}" for i in itertools.count()))
        outcomes.add(judge(PLAIN, case([x("w0", 2), x("w1", 2)], *body, contexts=())).outcome)
    assert outcomes == {"agreed", "known"}


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


def nested(*contexts: Context, after: Node = SIN) -> Node:
    """Return a node in regions, the first outermost."""
    for context in reversed(contexts):
        after = under(context, after)
    return after


@pytest.mark.parametrize(
    ("body", "known"),
    [
        # A region of no_grad is kept, and forgotten in one of autocast, wherever that stands.
        ((nested(NoGrad(), OFF), EXP), ""),
        ((under(NoGrad(), nested(OFF), COS), EXP), ""),
        ((nested(OFF, NoGrad()), EXP), "export-no-grad"),
        ((nested(OFF, ONCE, NoGrad()), EXP), "export-no-grad"),
        ((nested(NoGrad(), OFF, NoGrad()), EXP), "export-no-grad"),
        ((under(NoGrad(), nested(OFF, NoGrad()), COS), EXP), "export-no-grad"),
        ((under(OFF, nested(NoGrad(), NoGrad()), COS), EXP), "export-no-grad"),
        ((nested(OFF, AGAIN), EXP), ""),
        ((nested(ONCE, OFF, ONCE), EXP), ""),
    ],
)
def test_grad_modes_are_those_of_an_export(body: tuple[Node, ...], known: str) -> None:
    """And another fault beside them is seen."""
    needs_torch(">=2.9")
    example = case([x("w0", 2, 2)], *body, contexts=())
    verdict = judge(PLAIN, example)
    assert verdict.outcome in ("agreed", "known"), verdict.divergence
    assert verdict.known == known
    with quiet():
        wrong = judge_of(WrongKernel(PLAIN, "sin"), shipped()).judge(example)
    assert wrong.outcome == "diverged"


def test_a_bug_beside_the_exporters_own_is_named_beside_it() -> None:
    """What comes after a checkpoint has no gradient, without autocast too."""
    needs_torch(">=2.9")
    one = case([x("w0", 2, 2)], nested(AGAIN), nested(OFF, NoGrad(), after=COS), EXP, contexts=())
    assert judge(PLAIN, one).known == "export-no-grad+backend"
