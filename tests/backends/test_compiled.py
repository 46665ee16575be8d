"""torch.compile: programs are really compiled, plans keep their meaning, bugs get a stage."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.guards
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_fuzz.backends import backends, choose
from amp_fuzz.backends import compile as compiled
from amp_fuzz.backends.base import unsupported
from amp_fuzz.backends.compile import LADDER, CompileBackend
from amp_fuzz.backends.harness import Observation, quiet
from amp_fuzz.cases.case import FUNCTIONS, Case
from amp_fuzz.cases.program import Autocast, Checkpoint, DType, InferenceMode, Uncompiled
from amp_fuzz.findings.minimize.target import part_of, stage_of
from amp_fuzz.findings.repro.script import repro
from amp_fuzz.oracle import Divergence, Kind
from amp_fuzz.oracle.errors import raised
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.upstream import quirks, shipped
from amp_fuzz.upstream.explain import judge_of
from amp_fuzz.upstream.registry import IMITATIONS
from tests.helpers import BF16, Run, call, case, drawn, needs_torch, under, x

pytestmark = pytest.mark.thorough

INPUTS = [x("x0", 6, 8), x("w1", 8, 6)]
BODY = (call("mm", "x0", "w1"), call("softmax", "v0", -1, to="v1"))
AOT = CompileBackend("aot_eager")


def judge(backend: CompileBackend, example: Case) -> Any:
    with quiet():
        return judge_of(backend, shipped()).judge(example)


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"backward": "inside"},
        {"backward": "under", "backward_context": Autocast(dtype="float16")},
        {"thread": "whole"},
        {"thread": "whole", "backward": "inside"},
    ],
    ids=str,
)
def test_a_backward_pass_is_traced_under_what_will_surround_it(plan: dict[str, Any]) -> None:
    """The forward of a float32 island casts nothing; its backward is cast where autocast is on."""
    if plan.get("backward") != "inside":
        needs_torch(">=2.9")  # before, no autocast can be told
    island = under(Autocast(enabled=False), call("mm", "x0", "w1"))
    verdict = judge(AOT, case(INPUTS, island, **plan))
    assert verdict.outcome == "agreed", verdict.divergence


def test_a_backward_context_without_a_dtype_has_the_default() -> None:
    needs_torch(">=2.9")  # before, no autocast can be told
    body = call("bmm", "x0", "w1"), call("mul.scalar", "v0", 65536.0, to="v1")  # inf in float16
    plan = {"contexts": (Autocast(dtype="float16"),), "backward_context": Autocast()}
    example = case(
        [x("x0", 1, 1, 1), x("w1", 1, 1, 1)],
        under(Autocast(enabled=False), *body),
        backward="under",
        **plan,
    )
    verdict = judge(AOT, example)
    assert verdict.outcome == "agreed", verdict.divergence


def test_a_backward_pass_after_a_break_in_a_decorated_function_is_outside_of_its_context() -> None:
    needs_torch(">=2.9")
    broken = under(Uncompiled(), call("neg", "x2"))
    island = under(Autocast(enabled=False), call("mm", "x0", "w1", to="v1"))
    example = case([x("x0", 2, 2), x("w1", 2, 2), x("x2")], broken, island, entry="decorator")
    verdict = judge(AOT, example.with_plan(backward="inside"))
    assert verdict.outcome == "agreed", verdict.divergence


@pytest.mark.parametrize("entry", [entry for entry in FUNCTIONS if entry != "setup_context"])
def test_a_function_of_one_s_own_runs_back_under_what_it_runs_again_under(entry: Any) -> None:
    island = under(Autocast(enabled=False), call("mm", "x0", "w1"))
    for backward in ("outside", "inside"):
        verdict = judge(AOT, case(INPUTS, island, entry=entry, backward=backward))
        assert verdict.outcome == "agreed", verdict.divergence


def test_a_gradient_without_the_rounding_of_a_cast_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is nearer to the exact gradient, by less than the casts of the reference round."""
    needs_torch(">=2.9")
    island = under(Autocast(enabled=False), call("mm", "x0", "w1"))
    example = case(INPUTS, island, backward="inside")
    monkeypatch.setattr(compiled, "_backward_context", lambda *_: "off")
    found = judge(AOT, example).divergence
    assert found is not None
    assert (found.kind, found.where) == ("precision", "w1.grad")


def test_guards_are_checked_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo would call it once for each graph: a torch that has it otherwise shows here."""
    timed: list[object] = []
    times = torch._dynamo.guards.profile_guard_manager

    def noting(*of: Any) -> float:
        timed.append(of)
        return times(*of)

    monkeypatch.setattr(torch._dynamo.guards, "profile_guard_manager", noting)
    assert AOT.run([case(INPUTS, *BODY)])[0].graphs == 1
    assert timed == []
    assert torch._dynamo.guards.profile_guard_manager is noting
    monkeypatch.setattr(compiled, "untimed", nullcontext)
    assert AOT.run([case(INPUTS, *BODY)])[0].graphs == 1
    assert len(timed) == 1


def test_guards_are_timed_again_whoever_is_done_last() -> None:
    times = torch._dynamo.guards.profile_guard_manager
    first, second = compiled.untimed(), compiled.untimed()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch._dynamo.guards.profile_guard_manager is not times
    second.__exit__(None, None, None)
    assert torch._dynamo.guards.profile_guard_manager is times


def test_a_graph_that_cannot_be_partitioned_is_written_nowhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Torch writes it into the working folder."""
    needs_torch(">=2.11,<2.15")
    example = case(
        [x("x0", 3), x("w1", 1)],
        call("topk", "x0", 1, to="v0 v1"),
        under(Checkpoint(), call("topk", "x0", 1, to="v2 v3"), call("mul", "v2", "w1", to="v4")),
    )
    monkeypatch.chdir(tmp_path)
    assert AOT.run([example])[0].raised is not None
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(compiled, "unwritten", nullcontext)
    assert AOT.run([example])[0].raised is not None
    assert [path.suffix for path in tmp_path.iterdir()] == [".txt"]


def test_a_case_that_is_left_to_eager_is_not_passed_in_silence() -> None:
    """Dynamo makes no graph of a program whose only op looks at values, and runs it in eager."""
    left = judge(AOT, case([x("x0", 3, 4)], call("corrcoef", "x0"), backward="none"))
    assert (left.outcome, left.uncompiled) == ("agreed", True)
    assert left.record("statistics").uncompiled
    made = judge(AOT, case(INPUTS, *BODY))
    assert (made.outcome, made.uncompiled) == ("agreed", False)


def test_a_backward_pass_beside_a_bare_thread_is_traced_under_its_own_contexts() -> None:
    """The forward sees no autocast in its thread; torch is told what surrounds the backward."""
    needs_torch(">=2.9")
    example = case(
        [x("w0", 4, 4), x("w1", 4, 4, dtype="float16")],
        call("softmax", "w0", 0, dtype=DType("float16")),
        call("mm", "v0", "w1", to="v1"),
        backward="inside",
        thread="inside",
    )
    verdict = judge(AOT, example)
    assert verdict.outcome == "agreed", verdict.divergence
    # Told that it is off there, it mixes the dtypes of both.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("amp_fuzz.backends.compile._backward_context", lambda *_: "off")
        assert judge(AOT, example).outcome == "diverged"


@pytest.mark.parametrize("rung", LADDER)
def test_every_rung_compiles(rung: str) -> None:
    backend = CompileBackend(rung)
    if backend.availability().status != "ready":
        pytest.skip(backend.availability().detail)
    torch._dynamo.utils.counters.clear()
    verdict = judge(backend, case(INPUTS, *BODY))
    assert verdict.outcome == "agreed", verdict.divergence
    assert torch._dynamo.utils.counters["frames"]["ok"] >= 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_the_decorator_is_compiled_with_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[str] = []

    def spy(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
        graphs.append(graph.code)
        return graph.forward

    def compile_(self: CompileBackend, function: Any) -> Any:
        return torch.compile(function, backend=spy)

    monkeypatch.setattr(CompileBackend, "compiled", compile_)
    backend = CompileBackend("eager")
    backend.run([case(INPUTS, *BODY, entry="decorator")])
    assert any("_enter_autocast" in code for code in graphs)
    graphs.clear()
    backend.run([case(INPUTS, *BODY)])
    assert graphs
    assert not any("_enter_autocast" in code for code in graphs)


def test_what_a_failed_compilation_leaves_on_its_thread_harms_nothing() -> None:
    """AOTAutograd left fake tensor modes behind (torch 2.13); a thread of its own has no heirs."""
    names: list[str] = []

    def note(*args: Any) -> None:
        names.append(threading.current_thread().name)
        raise RuntimeError("not compiled")

    backend = CompileBackend("eager")
    seen = Observation()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("amp_fuzz.backends.compile.harness.run", note)
            backend.run([case(INPUTS, *BODY)])
    except RuntimeError:
        pass
    assert names != [threading.current_thread().name]
    assert seen.raised is None


@pytest.mark.parametrize("name", ["compile[aot_eager]", "export"])
def test_the_thread_that_calls_enters_a_fake_tensor_mode_first(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In torch 2.11 a guard belongs to the first thread that enters one; a case's thread ends."""
    threads: list[str] = []
    enter = FakeTensorMode.__enter__

    def note(mode: FakeTensorMode) -> FakeTensorMode:
        threads.append(threading.current_thread().name)
        return enter(mode)

    monkeypatch.setattr(FakeTensorMode, "__enter__", note)
    choose([name])[0].run([case(INPUTS, *BODY)])
    assert threads[0] == threading.current_thread().name
    assert len(set(threads)) > 1


def test_double_backward_is_left_out_where_it_is_not_supported() -> None:
    example = case(INPUTS, *BODY, second="double")
    assert AOT.fit(example).plan.second == "retain"
    assert CompileBackend("eager").fit(example) == example


@pytest.mark.parametrize(("rung", "known"), [("eager", ""), ("aot_eager", "compile-weight-cache")])
def test_the_weight_cache_is_kept_where_nothing_is_traced(rung: str, known: str) -> None:
    """In one context a stale cast lives on in eager; AOTAutograd's graphs cast anew."""
    verdict = judge(CompileBackend(rung), case(INPUTS, *BODY, steps=2, loop="inside"))
    assert verdict.known == known
    assert verdict.outcome == ("known" if known else "agreed")


def test_a_wrong_rung_is_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rung from one on is wrong; the first of them is named."""
    honest = CompileBackend.run

    def run(self: CompileBackend, cases: Sequence[Case]) -> list[Observation]:
        seen = honest(CompileBackend("eager"), cases)
        if LADDER.index(self.rung) >= 2:
            for observed in seen:
                value = observed.values["v0"]
                assert value is not None
                observed.values["v0"] = value * 1.5
        return seen

    monkeypatch.setattr(CompileBackend, "run", run)
    judge_ = judge_of(CompileBackend("inductor", "casts"))
    verdict = judge_.judge(case(INPUTS, *BODY, backward="none"))
    assert verdict.divergence is not None
    assert verdict.divergence.kind == "value"
    assert stage_of(judge_, verdict) == "compile[aot_eager_decomp_partition]"


def test_a_fault_in_a_decomposition_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong kernel that only the compiler calls: silu's decomposition without its sigmoid."""
    from torch._decomp import decomposition_table

    wrong = {**decomposition_table, torch.ops.aten.silu.default: lambda x: x * 0.5}
    monkeypatch.setattr("torch._dynamo.backends.debugging.aot_eager_decomp_partition", None)
    monkeypatch.setattr(
        CompileBackend,
        "compiled",
        lambda self, function: torch.compile(
            function,
            backend=torch._dynamo.backends.common.aot_autograd(
                fw_compiler=lambda graph, inputs: graph.forward, decompositions=wrong
            ),
        ),
    )
    verdict = judge(CompileBackend("aot_eager"), case([x("x0", 6, 8)], call("silu", "x0")))
    assert verdict.divergence is not None
    assert (verdict.divergence.kind, verdict.divergence.where) == ("value", "v0")


@pytest.mark.parametrize("plan", [{}, {"entry": "decorator"}], ids=str)
def test_frozen_weights_are_constants(plan: dict[str, Any], run_script: Run) -> None:
    """Inductor's freezing is reached, with the weight and not the input; a repro does the same."""
    with quiet():  # torch.utils.mkldnn, which it imports, is deprecated
        from torch._inductor import freezing

    constants: list[int] = []
    freeze = freezing.freeze

    def spy(*args: Any) -> Any:
        graph, preserved = freeze(*args)
        constants.append(len(args[2]) - len(preserved))
        return graph, preserved

    backend = backends()["compile[inductor+freezing]"]
    assert isinstance(backend, CompileBackend)
    example = case(INPUTS, *BODY, **plan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(freezing, "freeze", spy)
        verdict = judge(backend, example)
    assert verdict.outcome == "agreed", verdict.divergence
    assert constants == [1]
    assert backend.fit(backend.fit(example)) == backend.fit(example)
    assert str(verdict.case).count("no_grad") == 1
    _runs(run_script, repro(verdict.case, backend, Divergence("value", "v1", "", "")))


def test_the_bisector_names_the_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    """One lowering among several is wrong, and so says the finding."""
    from torch._inductor.lowering import lowerings

    overload = torch.ops.aten.sin.default
    cosine = lowerings[torch.ops.aten.cos.default]
    monkeypatch.setitem(lowerings, overload, cosine)
    example = case([x("x0", 6, 8)], call("exp", "x0"), call("sin", "v0", to="v1"), backward="none")
    judge_ = judge_of(CompileBackend("inductor"))
    with quiet():
        verdict = judge_.judge(example)
        assert verdict.outcome == "backend"
        assert part_of(judge_, verdict, "compile[inductor]") == "lowerings: sin"
        assert part_of(judge_, verdict, "compile[aot_eager]") == ""


def test_the_bisector_names_the_decomposition(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import decomposition

    wrong = {
        **decomposition.select_decomp_table(),
        torch.ops.aten.silu.default: lambda x: x * torch.sigmoid(x) * 1.5,
    }
    monkeypatch.setattr("torch._inductor.compile_fx.select_decomp_table", lambda: wrong)
    monkeypatch.setattr("torch._inductor.decomposition.select_decomp_table", lambda: wrong)
    judge_ = judge_of(CompileBackend("aot_eager_decomp_partition"))
    example = case([x("x0", 6, 8)], call("silu", "x0"), backward="none", contexts=())
    stage = "compile[aot_eager_decomp_partition]"
    with quiet():
        verdict = judge_.judge(example)
        assert verdict.outcome == "backend"
        assert part_of(judge_, verdict, stage).startswith("decomposition")


def test_a_bisector_that_fails_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(rung: str, agrees: Any) -> str:
        raise RuntimeError("it is private")

    monkeypatch.setattr("amp_fuzz.backends.bisection.blame", fail)
    judge_ = judge_of(CompileBackend("inductor"))
    found = Divergence("value", "v0", "", "")
    verdict = Verdict(case(INPUTS, *BODY), "compile[inductor]", "diverged", found)
    assert part_of(judge_, verdict, "compile[inductor]") == ""


def test_programs_of_the_generator_run(request: pytest.FixtureRequest) -> None:
    """Whatever comes of them: they have an outcome, and state does not spread."""
    backend = CompileBackend("eager")
    taken = [one for one in drawn(24, seed="compile") if not unsupported(one, backend)]
    with quiet():
        for example in taken[:12]:
            verdict = judge_of(backend, shipped()).judge(example)
            assert verdict.outcome in ("agreed", "raised", "known", "backend", "diverged")
    assert len(taken) >= 12
    assert torch._C._len_torch_dispatch_stack() == 0


# -- repros --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "kind", "where"),
    [
        ({}, "value", "v1"),
        ({"entry": "decorator"}, "dtype", "v0"),
        ({"backward": "inside"}, "grad-value", "w1.grad"),
    ],
    ids=str,
)
def test_a_repro_compiles_as_the_backend_does(
    plan: dict[str, Any], kind: Kind, where: str, run_script: Run
) -> None:
    text = repro(case(INPUTS, *BODY, **plan), AOT, Divergence(kind, where, "", ""))
    assert 'backend="aot_eager"' in text
    _runs(run_script, text, 0 if kind == "dtype" else 1)


def _runs(run_script: Run, text: str, wrong: int = 1) -> None:
    """Run a repro: it ends with 0, and with `wrong` if what is compiled were another program."""
    other = text.replace("def program(x0, w1):", "def program(x0, w1):\n    w1 = w1 * 1.5\n")
    for source, expected in ((text, 0), (other, wrong)):
        code, printed, _ = run_script(source)
        assert code == expected, printed + source


def test_a_repro_of_integers_compares_them_exactly() -> None:
    example = case([x("x0", 6, 8)], call("argmax", "x0", -1), backward="none")
    assert "def differs" in repro(example, AOT, Divergence("value", "v0", "", ""))


def test_regions_inside_the_program_are_compiled() -> None:
    example = case(INPUTS, call("mm", "x0", "w1"), under(BF16, call("mm", "x0", "w1", to="v1")))
    assert judge(AOT, example).outcome == "agreed"


def test_names() -> None:
    names = [b.name for b in choose(["compile*"])]
    assert set(names) <= backends().keys()
    assert "compile[aot_eager]" in names
    assert "compile[inductor+casts]" in backends()


def test_an_error_that_dynamo_quotes_is_the_known_one() -> None:
    halves = [x("x0", 2, dtype="float16"), x("x1", 2)]
    example = case(halves, call("concat", ["x0", "x1"], 0), backward="none")
    verdict = judge_of(backends()["compile[aot_eager]"], shipped()).judge(example)
    assert (verdict.outcome, verdict.known) == ("known", "promote-foreign-half")


SURROUND = [name for name, made in sorted(IMITATIONS.items()) if made.surrounds()]


@pytest.mark.parametrize("quirk", SURROUND)
def test_what_imitates_one_op_leaves_the_casts_in_other_kernels(quirk: str) -> None:
    """A dispatch mode runs with autocast excluded: a kernel that calls others would lose it."""
    pinv = case([x("x0", 3, 3)], call("linalg.pinv", "x0"), backward="none")
    with quirks([quirk]):
        seen = backends()["compile[inductor]"].reference().run(pinv)
    assert seen.values["v0"] is not None
    # torchax casts nothing in an op that is made of others.
    nothing = quirk == "torchax-composites"
    assert seen.values["v0"].dtype == (torch.float32 if nothing else torch.bfloat16)


class Restoring:
    """A cycle that turns grad mode off when it is deleted, as the guard of a region does."""

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        torch.set_grad_enabled(False)


def test_what_a_collection_does_to_the_state_of_the_thread_is_told() -> None:
    backend = CompileBackend("aot_eager")
    gc.disable()
    try:
        Restoring()
        assert backend.undone() == "grad mode: True became False by a garbage collection"
        torch.set_grad_enabled(True)
        assert backend.undone() is None
    finally:
        torch.set_grad_enabled(True)
        gc.enable()


def test_it_is_asked_where_an_inference_region_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only such a compilation leaves a guard behind; a collection costs milliseconds."""
    monkeypatch.setattr(CompileBackend, "undone", lambda self: "undone")
    region = under(InferenceMode(), call("unsqueeze", "x0", -1, form="method"))
    failing = case([x("x0", 2, 2)], region, contexts=(), backward="none")
    plain = case([x("x0", 2, 2)], call("neg", "x0"), contexts=(), backward="none")
    first, second = CompileBackend("aot_eager").run([failing, plain])
    assert first.raised is not None
    assert str(first.leaked).endswith("undone")
    assert second.leaked is None


@pytest.mark.skipif(
    not hasattr(torch._functorch.config, "backward_pass_autocast"), reason="needs torch 2.9"
)
@pytest.mark.parametrize(
    ("trains", "backward", "said"),
    [(True, "outside", True), (True, "inside", False), (False, "none", False)],
)
def test_a_script_says_what_surrounds_the_backward_pass_only_if_it_matters(
    trains: bool, backward: str, said: bool
) -> None:
    """A torch that does not know the option refuses the line, and its script could not tell."""
    weight = x("w1" if trains else "x1", 3, 2)
    one = case([x("x0", 2, 3), weight], call("mm", "x0", weight.name), backward=backward)
    text = CompileBackend("aot_eager").configuration(one)
    assert ("backward_pass_autocast = 'off'" in text) == ("backward_pass_autocast" in text) == said


def test_a_case_that_runs_again_ends_as_it_did() -> None:
    # Which results of fake tensors are views is in a cache that outlives a reset of dynamo.
    example = case(
        [x("x0", 2, 4, 1, 2)],
        call("channel_shuffle", "x0", 1),
        backward="none",
        later=((), ()),
        reuse="region",
    )
    FakeTensorMode.cache_clear()
    first, second = (AOT.run([example])[0] for _ in range(2))
    assert raised(first) == raised(second)
