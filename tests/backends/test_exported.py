"""torch.export: programs are really exported, and what decomposes later is judged too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from amp_fuzz.backends import backends, prelude
from amp_fuzz.backends.export import ExportBackend
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.literals import bits_of
from amp_fuzz.cases.program import Autocast, Checkpoint, regions
from amp_fuzz.findings.minimize.target import stage_of
from amp_fuzz.findings.repro.script import repro
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.runs.engine import Settings, Task, draw
from amp_fuzz.upstream import BUGS, shipped
from amp_fuzz.upstream.explain import judge_of
from tests.helpers import BF16, Run, call, case, under, x

pytestmark = pytest.mark.thorough

INPUTS = [x("x0", 6, 8), x("w1", 8, 6)]
BODY = (call("mm", "x0", "w1"), call("softmax", "v0", -1, to="v1"))
PLAIN, DECOMPOSED = ExportBackend(), ExportBackend(decomposed=True)
STRICT = ExportBackend(strict=True)


def judge(backend: ExportBackend, example: Case) -> Verdict:
    with quiet():
        return judge_of(backend, shipped()).judge(example)


def test_they_are_found() -> None:
    assert [b.name for b in backends().values() if isinstance(b, ExportBackend)] == [
        "export",
        "export[decomposed]",
        "export[strict]",
    ]


def test_regions_are_in_the_graph() -> None:
    island = under(Autocast(enabled=False), call("mm", "x0", "w1"))
    for backend in (PLAIN, DECOMPOSED, STRICT):
        assert judge(backend, case(INPUTS, island)).outcome == "agreed"


def test_the_program_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[bool, bool, bool]] = []
    export = prelude.exported

    def spy(program: Any, inputs: Any, decomposed: bool, strict: bool, saved: bool) -> Any:
        made.append((decomposed, strict, saved))
        found = export(program, inputs, decomposed, strict, saved)
        assert decomposed or isinstance(found, torch.fx.GraphModule)
        return found

    monkeypatch.setattr("amp_fuzz.backends.prelude.exported", spy)
    PLAIN.run([case(INPUTS, *BODY, steps=2)])
    DECOMPOSED.run([case(INPUTS, *BODY, backward="none")])
    STRICT.run([case(INPUTS, *BODY)])
    PLAIN.run([case(INPUTS, *BODY, saved=True)])
    assert made == [
        *((False, False, False), (True, False, False), (False, True, False)),
        (False, False, True),
    ]


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


def test_a_region_that_dynamo_enters_enabled_is_found_in_a_strict_export_alone(
    monkeypatch: pytest.MonkeyPatch, run_script: Run
) -> None:
    from torch._dynamo.variables.ctx_manager import AutocastModeVariable

    honest: Any = AutocastModeVariable.enter

    def enter(self: Any, tx: Any) -> Any:
        device, dtype, _, cache = self.target_values
        self.target_values = [device, dtype, True, cache]
        return honest(self, tx)

    example = case(INPUTS, under(Autocast(enabled=False), call("mm", "x0", "w1")))
    monkeypatch.setattr(AutocastModeVariable, "enter", enter)
    verdict = judge(STRICT, example)
    assert verdict.divergence is not None
    assert (verdict.divergence.kind, verdict.divergence.where) == ("dtype", "v0")
    assert judge(PLAIN, example).outcome == "agreed"
    with quiet():
        text = repro(verdict.case, STRICT, verdict.finding("all"))
    assert "strict=True" in text
    code, printed, _ = run_script(text)
    assert code == 0, printed  # there is no fault in the script's torch


def test_a_strict_export_has_no_checkpoints() -> None:
    body = (under(Checkpoint(use_reentrant=False), call("mm", "x0", "w1")),)
    example = STRICT.fit(case(INPUTS, *body, checkpoint="non_reentrant"))
    assert example.plan.checkpoint == "none"
    assert list(regions(example.program.body)) == []
    assert judge(STRICT, example).outcome == "agreed"


@pytest.mark.parametrize("backend", [PLAIN, STRICT], ids=lambda b: b.name)
def test_programs_of_the_generator_run(backend: ExportBackend) -> None:
    outcomes = []
    for example in draw(Task(backend.name, "all", (), 20, 5), Settings((backend.name,))):
        outcomes.append(judge(backend, example).outcome)
    assert outcomes.count("agreed") > 10
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_repro_shows_it(run_script: Run) -> None:
    example = BUGS["export-composites"].examples[1].case
    verdict = judge(DECOMPOSED, example)
    assert verdict.divergence is not None
    assert verdict.divergence.kind == "dtype"
    assert judge(PLAIN, example).outcome == "agreed"
    with quiet():
        text = repro(verdict.case, DECOMPOSED, verdict.finding("all"))
    code, printed, _ = run_script(text)
    assert code == 1, printed


BIG = bits_of([-(2.0**127), -(2.0**127)], "float32")
DECOMPOSITIONS = {
    "compile-kernels": case(
        [x("x0", 1, 1)],
        call("linalg.pinv.hermitian", "x0", hermitian=True),
        contexts=(BF16,),
        backward="none",
    ),
    "compile-out": case(
        [x("x0", 4, 4), x("x1", 4, 4), x("b2", 4, 4)],
        call("matmul", "x0", "x1", form="out", out="b2"),
        contexts=(BF16,),
        backward="none",
    ),
}


@pytest.mark.parametrize("name", DECOMPOSITIONS)
def test_what_a_decomposition_does_otherwise_is_known(name: str) -> None:
    """And not explained by another entry; before it is decomposed, the program agrees."""
    example = DECOMPOSITIONS[name]
    verdict = judge(DECOMPOSED, example)
    assert (verdict.outcome, verdict.known) == ("known", name), verdict.divergence
    others = tuple(k for k in shipped() if k.id != name)
    with quiet():
        assert judge_of(DECOMPOSED, others).judge(example).outcome == "diverged"
    assert judge(PLAIN, example).outcome in ("agreed", "raised")
