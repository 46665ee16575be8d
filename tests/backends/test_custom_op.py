"""Faults of custom ops are seen on every backend that calls one, and honest torch has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import msgspec
import pytest
import torch
import torch._dynamo  # these define custom ops themselves, before faults are seeded
import torch._inductor.inductor_prims
from torch._library import custom_ops

from amp_fuzz.backends import backends, torch_base
from amp_fuzz.backends.compile import CompileBackend
from amp_fuzz.backends.harness import quiet
from amp_fuzz.backends.vendor import VendorBackend
from amp_fuzz.cases.case import Case, CaseError, loads
from amp_fuzz.cases.program import Autocast, Checkpoint, regions
from amp_fuzz.findings.repro.script import repro
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.reference import custom_ops as reference_custom_ops
from amp_fuzz.reference import load_table
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from amp_fuzz.versions import holds
from tests.faults.fault import patched
from tests.helpers import Run, brief, call, case, leading, needs_torch, under, x

Op: Any = custom_ops.CustomOpDef
_register_autocast, _register_autograd = Op.register_autocast, Op.register_autograd

# The first input is the op's tensor, the second its optional one, and the others are its list.
INPUTS = [
    x("x0", 4, 4, dtype="bfloat16"),
    x("x1", 4, 4),
    x("x2", 4, 4, dtype="float64"),
    x("w3", 4, 4, dtype="float16"),
]
REGISTERED = case(
    INPUTS,
    call("mm", "x0", "w3", to="v0"),
    call("mm", "x1", "x1", to="v1"),
    call("neg", "x2", to="v2"),
    entry="register_autocast",
)
INPUTS_2 = [x("x0", 4, 4), x("w1", 4, 4)]
PLAIN = case(INPUTS_2, call("mm", "x0", "w1"), entry="custom_op")


def judged(name: str, example: Case) -> Verdict:
    with quiet():
        return judge_of(backends()[name], shipped()).judge(example)


def _ignored() -> AbstractContextManager[None]:
    return patched(Op, register_autocast=lambda *args: None)


def _wrong_dtype() -> AbstractContextManager[None]:
    def register(op: Any, device: str, cast_inputs: torch.dtype) -> None:
        _register_autocast(op, device, torch.bfloat16)

    return patched(Op, register_autocast=register)


def _casting(casts: Callable[[torch.Tensor], bool]) -> AbstractContextManager[None]:
    def cast(value: Any, device: str, dtype: torch.dtype) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(cast(v, device, dtype) for v in value)
        return value.to(dtype) if isinstance(value, torch.Tensor) and casts(value) else value

    return patched(custom_ops, _cast=cast)


def _float64_too() -> AbstractContextManager[None]:
    return _casting(lambda t: t.is_floating_point())


def _not_in_lists() -> AbstractContextManager[None]:
    honest = custom_ops._cast

    def cast(value: Any, device: str, dtype: torch.dtype) -> Any:
        return value if isinstance(value, list) else honest(value, device, dtype)

    return patched(custom_ops, _cast=cast)


def _body(**state: Any) -> AbstractContextManager[None]:
    """Make the body of every op run under a state of autocast."""

    def definition(name: str, body: Any, *, mutates_args: Any) -> Any:
        op = _custom_op(name, body, mutates_args=mutates_args)
        op._backend_fns[None] = torch.autocast("cpu", **state)(op._backend_fns[None])
        return op

    return patched(torch.library, custom_op=definition)


_custom_op: Any = torch.library.custom_op


def _on_inside() -> AbstractContextManager[None]:
    return _body(dtype=torch.bfloat16)


@contextmanager
def _on_where_cast() -> Iterator[None]:
    """Make the body of every op whose inputs are cast run under autocast."""
    honest, casts = custom_ops._cast, list[bool]()

    def cast(value: Any, device: str, dtype: torch.dtype) -> Any:
        casts[:] = [True]
        return honest(value, device, dtype)

    def definition(name: str, body: Any, *, mutates_args: Any) -> Any:
        op = _custom_op(name, body, mutates_args=mutates_args)
        inner = op._backend_fns[None]

        def called(*args: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16) if casts else nullcontext():
                casts.clear()
                return inner(*args)

        op._backend_fns[None] = called
        return op

    with patched(custom_ops, _cast=cast), patched(torch.library, custom_op=definition):
        yield


def _off_inside() -> AbstractContextManager[None]:
    return _body(enabled=False)


def _backward_on() -> AbstractContextManager[None]:
    def register(op: Any, backward: Any, **more: Any) -> None:
        _register_autograd(op, torch.autocast("cpu", dtype=torch.bfloat16)(backward), **more)

    return patched(Op, register_autograd=register)


def _never_off() -> AbstractContextManager[None]:
    """Cast the inputs wherever the op is called."""
    casts: dict[Any, tuple[str, torch.dtype]] = {}

    def register(op: Any, device: str, cast_inputs: torch.dtype) -> None:
        casts[op] = device, cast_inputs

    def called(op: Any, *args: Any) -> Any:
        return op._opoverload(*custom_ops._cast(args, *casts[op]))

    return patched(Op, register_autocast=register, __call__=called)


BACKENDS = ("eager-cpu", "compile[aot_eager]", "script", "trace", "export")
OFF = msgspec.structs.replace(
    REGISTERED, plan=msgspec.structs.replace(REGISTERED.plan, contexts=(Autocast(enabled=False),))
)
OUTSIDE = msgspec.structs.replace(
    PLAIN, plan=msgspec.structs.replace(PLAIN.plan, contexts=(Autocast(enabled=False),))
)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("honest", brief([REGISTERED, OFF, OUTSIDE], REGISTERED))
def test_honest_custom_ops_agree(name: str, honest: Case) -> None:
    assert judged(name, honest).outcome == ("raised" if honest is OFF else "agreed")


@pytest.mark.parametrize("name", brief(BACKENDS, "eager-cpu", "compile[aot_eager]"))
@pytest.mark.parametrize(
    ("corrupt", "wrong"),
    leading(
        [
            (_ignored, REGISTERED),
            (_never_off, OFF),
            (_wrong_dtype, REGISTERED),
            (_float64_too, REGISTERED),
            (_not_in_lists, REGISTERED),
            (_on_where_cast, REGISTERED),
        ],
        2,
    ),
)
def test_every_fault_of_a_custom_op_is_seen(name: str, corrupt: Any, wrong: Case) -> None:
    if corrupt is _never_off and (name == "script" or (name == "export" and holds("<2.9"))):
        pytest.skip("this program calls the op itself, past the Python that is corrupted")
    with corrupt():
        assert judged(name, wrong).outcome == "diverged"


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["eager-cpu", "compile[aot_eager]", "script", "trace", "export"])
@pytest.mark.parametrize(
    ("corrupt", "one"),
    [(_on_inside, OUTSIDE), (_backward_on, OUTSIDE), (_on_inside, REGISTERED)],
)
def test_autocast_that_is_on_in_a_program_without_is_the_backends(
    name: str, corrupt: Any, one: Case
) -> None:
    with corrupt():
        assert judged(name, one).outcome == "backend"


@pytest.mark.parametrize("corrupt", [_off_inside, _backward_on])
def test_what_an_op_without_a_rule_runs_under_is_seen(corrupt: Any) -> None:
    assert judged("eager-cpu", PLAIN).outcome == "agreed"
    with corrupt():
        assert judged("eager-cpu", PLAIN).outcome == "diverged"


@pytest.mark.thorough
@pytest.mark.parametrize("device", ["cuda", "xpu", "mps"])
def test_fake_devices_see_a_rule_that_is_ignored(device: str) -> None:
    if device != "cuda":
        needs_torch(">=2.12")  # before, register_autocast takes no other device
    plan = msgspec.structs.replace(REGISTERED.plan, backward="none")
    forward = msgspec.structs.replace(REGISTERED, plan=plan)
    assert judged(f"fake-{device}", forward).outcome == "agreed"
    with _ignored():
        assert judged(f"fake-{device}", forward).outcome == "diverged"


@pytest.mark.parametrize("device", ["mtia", "maia"])
def test_a_key_that_torch_lacks_is_a_known_finding(device: str) -> None:
    needs_torch(">=2.12")  # before, register_autocast takes no such device
    plan = msgspec.structs.replace(REGISTERED.plan, backward="none")
    forward = msgspec.structs.replace(REGISTERED, plan=plan)
    assert judged(f"fake-{device}", forward).known == "register-autocast-key"


@pytest.mark.thorough
@pytest.mark.parametrize("device", ["cuda", "xpu", "mps", "mtia", "maia"])
def test_a_context_in_a_body_leaves_a_fake_device_as_it_was(device: str) -> None:
    """Autocast is off where a fake kernel runs: what the context finds there is not what is around.

    The op runs twice, and it is the second of its calls that shows what the first has left.
    """
    if device == "maia":
        needs_torch(">=2.8")
    body = (call("mm", "x0", "x0", to="v0"), under(Autocast(), call("neg", "x0", to="v1")))
    twice = case([x("x0", 2, 2)], *body, entry="custom_op", backward="none", calls=2)
    assert judged(f"fake-{device}", twice).known == "custom-op-body-off"


# -- what a backend cannot say ---------------------------------------------------------------------


def test_a_graph_has_no_op_whose_fake_kernel_would_look_at_values() -> None:
    looks = case([x("x0", 3, 4)], call("cov", "x0"), entry="custom_op")
    assert CompileBackend("aot_eager").fit(looks).plan.entry == "context"
    assert backends()["eager-cpu"].fit(looks) == looks


def test_a_graph_has_no_backward_with_reentrant_checkpoints() -> None:
    region = under(Checkpoint(use_reentrant=True), call("mm", "x0", "w1"))
    fitted = CompileBackend("aot_eager").fit(case(INPUTS_2, region, entry="custom_op"))
    assert fitted.plan.entry == "custom_op"
    assert list(regions(fitted.program.body)) == [Checkpoint(use_reentrant=False)]


@pytest.mark.parametrize("thread", ["inside", "whole"])
def test_a_fake_kernel_brings_its_mode_to_another_thread(
    thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cast to another tensor's device needs the mode, where there is no such device."""
    inputs = [x("x0", 3, dtype="float64"), x("x1", 3, dtype="float64")]
    body = call("to.other", "x0", "x1", form="method")
    apart = case(inputs, body, entry="custom_op", thread=thread, backward="none")
    assert judged("fake-cuda", apart).outcome == "agreed"
    monkeypatch.setattr(reference_custom_ops, "_fake_mode", lambda args: None)
    assert judged("fake-cuda", apart).outcome == "backend"


def test_a_custom_op_may_not_write_its_inputs() -> None:
    writes = case([x("b0", 2)], call("neg", "b0", form="inplace"), entry="custom_op")
    with pytest.raises(CaseError, match=r"\$.plan.entry='custom_op' .* b0"):
        loads(writes.json())


# -- repros ----------------------------------------------------------------------------------------

IGNORED = "torch._library.custom_ops.CustomOpDef.register_autocast = lambda *args: None\n"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        *brief(["eager-cpu", "compile[aot_eager]", "script"], "eager-cpu"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("trace", "export", "script[freeze]", "trace[check]")
        ),
    ],
)
def test_a_repro_shows_a_fault_and_only_that(name: str, run_script: Run) -> None:
    with _ignored():
        verdict = judged(name, REGISTERED)
    assert verdict.divergence is not None
    for prefix, expected in ((IGNORED, 1), ("", 0)):
        text = repro(verdict.case, backends()[name], verdict.divergence, prefix=prefix)
        code, printed, _ = run_script(text)
        assert code == expected, printed


# -- what an op leaves behind ----------------------------------------------------------------------


def test_ops_replace_each_other() -> None:
    for _ in range(3):
        judged("eager-cpu", REGISTERED)
        judged("eager-cpu", PLAIN)
    assert [name for name in custom_ops.OPDEF_TO_LIB if name.startswith("amp_fuzz::program")] == [
        "amp_fuzz::program"
    ]
    assert dir(torch.ops.amp_fuzz).count("program") <= 1


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_autocast_is_registered_for_devices_that_this_torch_documents(device: str) -> None:
    """Until torch 2.11: "Valid `device_type` include: "cpu" and "cuda"."."""
    one = case(INPUTS_2, call("mm", "x0", "x1"), entry="register_autocast", backward="none")
    fitted = backends()[f"fake-{device}"].fit(one)
    only = device != "cuda" and holds("<2.12")
    assert fitted.plan.entry == ("custom_op" if only else "register_autocast")
    assert backends()["eager-cpu"].fit(one) == one


@pytest.mark.parametrize("old", [False, True])
def test_an_installed_device_is_no_exception(old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_base, "holds", lambda versions: old)
    one = case(INPUTS_2, call("mm", "x0", "x1"), entry="register_autocast", backward="none")
    for backend in (VendorBackend("npu", load_table("cuda")), backends()["privateuse1"]):
        assert backend.fit(one).plan.entry == ("custom_op" if old else "register_autocast")
