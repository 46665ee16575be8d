"""TorchScript: programs are really scripted and optimised, and its own list explains the rest."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch._jit_internal import FunctionModifiers
from torch.jit import frontend

from amp_fuzz.backends import BackendError, backends, torchscript
from amp_fuzz.backends.harness import Observation, Raised, quiet
from amp_fuzz.backends.source import setup_source
from amp_fuzz.backends.torchscript import ScriptBackend, script_source
from amp_fuzz.backends.torchscript_unit import fresh_unit, usable
from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.program import (
    Autocast,
    Checkpoint,
    InferenceMode,
    NoGrad,
    regions,
    statements,
)
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.findings.minimize.target import stage_of
from amp_fuzz.findings.repro.script import repro
from amp_fuzz.oracle import compare
from amp_fuzz.oracle.errors import complaints
from amp_fuzz.oracle.trial import Trial
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.runs.audit import audit_op, count
from amp_fuzz.runs.engine import Settings, Task, draw, runnable
from amp_fuzz.strategies.drawing import draw_program
from amp_fuzz.upstream import quirks, shipped
from amp_fuzz.upstream.explain import judge_of
from tests.helpers import BF16, Run, call, case, under, x

pytestmark = pytest.mark.thorough

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


def test_its_own_list_is_what_it_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    example = case([x("x0", 4, dtype="bfloat16")], call("exp", "x0"))
    assert judge(SCRIPT, example, known=False).outcome == "agreed"
    monkeypatch.setattr("amp_fuzz.backends.torchscript.write_casts", lambda *_: None)
    verdict = judge(SCRIPT, example, known=False)
    assert verdict.divergence is not None
    assert (verdict.outcome, verdict.divergence.kind) == ("diverged", "dtype")
    with quiet():
        assert stage_of(judge_of(SCRIPT, ()), verdict) == "script[first-call]"


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
        assert verdict.divergence is not None
        assert stage_of(judge_, verdict) == backend.name


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
        assert verdict.divergence.kind == "bitwise"
        assert stage_of(judge_of(SCRIPT, ()), verdict) == "script"
    assert set(calls) == {1, 3}


def test_a_trace_is_checked_with_the_weights_as_parameters() -> None:
    checked = ScriptBackend("trace", check=True)
    example = case(INPUTS, *BODY)
    verdict = judge(checked, example)
    assert (verdict.outcome, verdict.known) == ("known", "trace-weight-cache")
    uncached = (Autocast(dtype="bfloat16", cache_enabled=False),)
    assert judge(checked, case(INPUTS, *BODY, contexts=uncached)).outcome == "agreed"


def test_a_trace_s_reference_draws_no_random_number_while_it_is_made() -> None:
    draws = (call("gumbel_softmax", "x0"), call("normal.mean", "v0", 1.0, to="v1"))
    one = case([x("x0", 2, 8, dtype="bfloat16")], *draws, contexts=(BF16,), backward="none")
    assert judge(TRACE, one).outcome == "agreed"


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
        if op.fp8 or (op.devices is not None and "cpu" not in op.devices):
            continue
        for form in op.forms:
            source = random.Random(f"{op.name}/{form}").randbytes
            program = draw_program(
                source, "cpu", plan=Plan(contexts=()), ops=[op], focus=[op], forms=form,
                statements=1,
            )  # fmt: skip
            text = script_source(SCRIPT.fit(Case(program)))
            exec(setup_source(program), SCRIPT.runtime().names())  # it defines custom ops
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
def test_a_frontend_that_is_wrong_is_the_backends(
    right: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "amp_fuzz.backends.torchscript.script_source"
    monkeypatch.setattr(text, lambda example: script_source(example).replace(right, wrong))
    example = case([x("x0", 4, 4)], call("mm", "x0", "x0"), call("exp", "v0", to="v1"),
                   contexts=())  # fmt: skip
    assert judge(SCRIPT, example).outcome == "backend"


def passing(one: Case) -> AbstractContextManager[None]:
    """Return the context in which the reference casts as the documented pass does."""
    ways = SCRIPT.reference().ways(one)
    assert ways is not None
    return ways()


def test_a_graph_that_is_imitated_is_that_of_its_own_text() -> None:
    """Whatever was compiled before, and under whatever autocast it ran."""
    inputs = [x("x0", 2, 2), x("w1", 2, 2)]
    products = [call("mm", "x0", "w1"), call("mm", "w1", "x0")]
    one, other, plain = (
        case(inputs, body, contexts=contexts)
        for body, contexts in zip([*products, products[0]], [(BF16,), (BF16,), ()], strict=True)
    )
    with quiet(), passing(one):
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
        with quiet(), passing(example) if quirk == "pass" else quirks([f"torchscript-{quirk}"]):
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
    with quiet(), passing(one):
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
    assert {cell.status for cell in cells} - {"raise"} == {"agree"}


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
    body = call("exp", "x0"), call("mm", "v0", "w1", to="v1")
    example = backend.fit(case(inputs, *body, **plan))
    with quiet():
        found = Trial.of(example, backend).compare()  # with eager: by what is documented, it agrees
        assert found is not None
        text = repro(example, backend, found)
    assert "amp_fuzz" not in text
    code, printed, _ = run_script(text)
    assert code == 1, printed
