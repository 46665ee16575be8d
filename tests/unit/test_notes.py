"""Notes: what runs without autocast alone, and what another device's policies treat otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
import torch
from packaging.version import Version

from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.program import Autocast, Region
from amp_fuzz.findings import notes
from amp_fuzz.findings.groups import Groups
from amp_fuzz.findings.notes import Memory, notes_of, under_policies
from amp_fuzz.findings.remedies import Remedy, remedy
from amp_fuzz.policies import tables
from amp_fuzz.records.schema import NOTE_KINDS, CaseRecord, Note, NoteRecord
from amp_fuzz.reference import Policy, PolicyTable, load_table, tabled_devices
from amp_fuzz.runs.engine import Settings, Task, explore
from amp_fuzz.upstream.explain import judge_of
from tests.helpers import BF16, F16, call, case, x

FORWARD = Plan((BF16,), backward="none")
# The devices of this torch, in a column and in a sentence: torch 2.7 has no maia.
OTHERS = ",".join(device for device in tabled_devices() if device != "cpu")
LISTED = OTHERS.replace(",", ", ")
ENTROPY = case(
    [x("x0", 2, domain="unit"), x("x1", 2, domain="unit")], call("binary_cross_entropy", "x0", "x1")
)
SQUARE = [x("x0", 2, 2), x("x1", 2, 2)]


def noted(case: Case, backend: str = "eager-cpu", **more: Any) -> tuple[Note, ...]:
    judge = judge_of(backends()[backend], relations="none")
    with quiet():
        return notes_of(judge, judge.judge(case), **more)


def under(case: Case, plan: Plan = FORWARD) -> Case:
    """Return a case under a plan."""
    return msgspec.structs.replace(case, plan=plan)


# A product in bfloat16 meets a float32 tensor in an op that has no policy on CPUs.
NO_POLICY = under(
    case(SQUARE, call("mm", "x0", "x1"), call("tensordot", "v0", "x1", dims=1, to="v1"))
)


# -- raises under autocast alone ------------------------------------------------------------------


@pytest.fixture
def torch_2_7(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the policy tables of torch 2.7.1, of which maia has none."""
    tables._stock.cache_clear()
    tables._held.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(tables, "_version", lambda version: Version("2.7.1"))
        yield
    tables._stock.cache_clear()
    tables._held.cache_clear()


def test_a_device_that_this_torch_has_no_policies_for_is_left_out(torch_2_7: None) -> None:
    (note,) = noted(NO_POLICY)
    assert note.device == "cuda,mps,mtia,xpu"
    assert {n.kind for n in noted(EXP, kinds=["portability"])} == {"portability"}


def test_a_program_that_raises_under_autocast_alone_is_noted_with_devices_that_run_it() -> None:
    assert noted(NO_POLICY) == (
        Note(
            "autocast-raises",
            "eager-cpu",
            "tensordot",
            "v1 = torch.tensordot(v0, x1, dims=1)",
            "RuntimeError: both inputs should have same dtype",
            "Call it under autocast(enabled=False) on inputs cast to float32; with the policies of "
            f"{LISTED} it runs unchanged.",
            OTHERS,
        ),
    )


def test_statements_after_the_error_do_not_hide_the_note() -> None:
    """Without autocast the program gets further, to a statement that raises anyway."""
    body = [*NO_POLICY.program.body, call("mm", "v1", "x2", to="v2")]
    wrong = msgspec.structs.replace(
        NO_POLICY.program, inputs=(*SQUARE, x("x2", 3, 3)), body=tuple(body)
    )
    (note,) = noted(msgspec.structs.replace(NO_POLICY, program=wrong))
    assert note.op == "tensordot"


@pytest.mark.parametrize(
    "honest",
    [
        pytest.param(
            under(case([x("x0", 2, 3), x("x1", 2, 3)], call("mm", "x0", "x1"))), id="shapes"
        ),
        pytest.param(
            under(case([x("x0", 2, 2), x("x1", 2, 2, dtype="float64")], call("mm", "x0", "x1"))),
            id="dtypes",
        ),
        pytest.param(
            under(case(SQUARE, call("mm", "x0", "x1"), call("bmm", "v0", "x1", to="v1"))),
            id="after a cast",
        ),
        pytest.param(under(NO_POLICY, Plan((), backward="none")), id="no autocast"),
    ],
)
def test_an_error_that_also_occurs_without_autocast_is_not_noted(honest: Case) -> None:
    assert not [n for n in noted(honest) if n.kind == "autocast-raises"]


def test_a_ban_is_not_noted_since_it_says_what_to_do() -> None:
    assert noted(under(ENTROPY), "fake-cuda") == ()


def test_a_fake_kernel_that_loses_the_device_is_not_blamed_on_autocast() -> None:
    """On fake maia, softmax(half, dtype=float32) is on meta, with or without autocast."""
    half = [x("x0", 2, 2, dtype="bfloat16"), x("x1", 2, 2)]
    body = call("softmax", "x0", dim=-1), call("mul", "v0", "x1", to="v1")
    one = under(case(half, *body))
    judge = judge_of(backends()["fake-maia"], relations="none")
    with quiet():
        raised = judge.judge(one).seen
    if raised is None or raised.raised is None:
        pytest.skip("this torch's fake softmax keeps the device")
    assert raised.raised.kind == "FakeTensorDeviceMismatchError"
    assert noted(one, "fake-maia") == ()


def test_another_autocast_dtype_is_advised_if_it_runs_with_it() -> None:
    half = [*SQUARE, x("x2", 2, 2, dtype="bfloat16")]
    small = case(half, call("mm", "x0", "x1"), call("tensordot", "v0", "x2", dims=1, to="v1"))
    runtime = backends()["eager-cpu"].reference()
    small = under(small, msgspec.structs.replace(FORWARD, contexts=(F16,)))
    assert remedy(small, runtime) == Remedy("dtype", "Use bfloat16 as autocast's dtype")


# -- another device differs -----------------------------------------------------------------------

EXP = under(case([x("x0", 2, dtype="bfloat16")], call("exp", "x0")))


def test_a_statement_that_others_promote_is_noted_with_both_dtypes() -> None:
    assert noted(EXP) == (
        Note(
            "portability",
            "eager-cpu",
            "exp",
            "v0 = torch.exp(x0)",
            "16 bits on cpu; float32 on " + LISTED,
            "Cast v0 to the dtype that later statements expect.",
            OTHERS,
        ),
    )


def test_a_context_without_a_dtype_has_that_of_the_one_around_it() -> None:
    """Of float32 both are off, so there is nothing that another device would promote."""
    off = msgspec.structs.replace(FORWARD, contexts=(Autocast(dtype="float32"), Autocast()))
    assert noted(under(EXP, off), kinds=["portability"]) == ()


def test_a_statement_that_others_refuse_is_noted_with_their_error() -> None:
    (note,) = noted(under(ENTROPY))
    assert note.message.startswith("float32 on cpu; ")
    assert f"raises RuntimeError on {LISTED.replace('mps, ', '')}" in note.message
    assert "there it raises RuntimeError: torch.nn.functional.binary_cross" in note.advice


def test_fake_devices_and_the_cpu_differ_the_other_way_round() -> None:
    (note,) = noted(EXP, "fake-cuda")
    assert (note.device, note.message) == ("cpu", "float32 on cuda; 16 bits on cpu")


@pytest.mark.parametrize(
    "honest",
    [
        pytest.param(under(case(SQUARE, call("mm", "x0", "x1"))), id="one policy everywhere"),
        pytest.param(under(case([x("x0", 2)], call("relu", "x0"))), id="no policy anywhere"),
        pytest.param(under(case([x("x0", 2)], call("exp", "x0"))), id="one dtype everywhere"),
        pytest.param(under(EXP, Plan((), backward="none")), id="no autocast"),
        pytest.param(
            under(EXP, Plan((msgspec.structs.replace(BF16, enabled=False),), backward="none")),
            id="off",
        ),
        pytest.param(
            under(EXP, msgspec.structs.replace(FORWARD, thread="inside")), id="in another thread"
        ),
    ],
)
def test_equal_dtypes_on_all_devices_are_not_noted(honest: Case) -> None:
    assert noted(honest) == ()


def test_a_kernel_that_only_the_cpu_lacks_is_not_said_to_raise_elsewhere() -> None:
    """CUDA's policies leave bfloat16 to svdvals, which no kernel of the CPU takes."""
    (note,) = noted(under(case([x("x0", 2, 2, dtype="bfloat16")], call("linalg.svdvals", "x0"))))
    assert note.message == "float32 on cpu; 16 bits on " + LISTED


def test_notes_come_from_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeded: CUDA's table gives mm another policy, and none has one for exp."""

    def lying(device: str) -> PolicyTable:
        table = load_table(device)
        rules = {name: rule for name, rule in table.rules.items() if name != "exp"}
        if device == "cuda":
            rules["mm"] = replace(rules["mm"], policy=Policy.FP32)
        return replace(table, rules=MappingProxyType(rules))

    product = under(case(SQUARE, call("mm", "x0", "x1")))
    assert noted(product) == ()
    monkeypatch.setattr(notes, "load_table", lying)
    assert noted(EXP) == ()
    (note,) = noted(product)
    assert (note.op, note.message, note.device) == ("mm", "16 bits on cpu; float32 on cuda", "cuda")


def test_a_signature_that_was_met_runs_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    memory: Memory = {}
    first = noted(EXP, memory=memory)
    assert memory
    monkeypatch.setattr(notes, "_elsewhere", None)
    again = msgspec.structs.replace(EXP, seed=5)
    assert noted(again, memory=memory) == first


def test_tensors_of_the_cpu_do_not_borrow_what_the_devices_do() -> None:
    """Autocast for CUDA leaves them alone: float16 on cuda, and float16 on cpu."""
    own = x("x0", 2, dtype="float16")
    plan = Plan((F16,), backward="none")
    ours = case([own], call("exp", "x0"))
    away = msgspec.structs.replace(own, device="cpu")
    memory: Memory = {}
    (note,) = noted(under(ours, plan), "fake-cuda", kinds=["portability"], memory=memory)
    assert note.message == "float32 on cuda; 16 bits on cpu"
    theirs = under(ours.with_program(inputs=(away,)), plan)
    assert noted(theirs, "fake-cuda", kinds=["portability"], memory=memory) == ()


@pytest.mark.parametrize("kind", NOTE_KINDS)
def test_only_kinds_that_are_asked_for_are_looked_for(kind: str) -> None:
    for one, own in ((NO_POLICY, "autocast-raises"), (EXP, "portability")):
        assert {n.kind for n in noted(one, kinds=(kind,))} == {own} & {kind}


# -- contexts that do something else elsewhere ----------------------------------------------------

SINE = call("sin", "x0")
F32 = Autocast(dtype="float32")
DEFAULT = Autocast()
FOR_XPU = Autocast(device="xpu", dtype="bfloat16")


ADVICE = (
    "For float32 on every device, write autocast(enabled=False) and cast the operands with "
    ".float()."
)


def contexts(*around: Autocast, body: Any = SINE, backend: str = "eager-cpu") -> list[Note]:
    one = under(case([x("x0", 2)], body), Plan(around, backward="none"))
    return [*noted(one, backend, kinds=["context"])]


def test_a_context_of_a_dtype_that_only_some_devices_take_is_noted_on_both_sides() -> None:
    message = (
        "a context of float32: on cuda it casts 16-bit operands of products up to float32; on "
        f"{', '.join(d for d in tabled_devices() if d != 'cuda')} it warns and is off, so 16-bit "
        "operands stay"
    )
    for backend, devices in (("eager-cpu", "cuda"), ("fake-cuda", OTHERS.replace("cuda", "cpu"))):
        (note,) = contexts(F32, backend=backend)
        assert (note.backend, note.where) == (backend, "autocast(device, dtype=torch.float32)")
        assert (note.message, note.device.split(",")) == (message, sorted(devices.split(",")))
        assert note.advice == ADVICE


def test_a_context_of_the_default_dtype_is_noted_if_none_around_it_gives_one() -> None:
    (note,) = contexts(DEFAULT)
    assert note.where == "autocast(device)"
    assert note.message.startswith("a context without a dtype is bfloat16 on cpu")
    assert note.advice.startswith("Give it a dtype: ")
    region = Region(DEFAULT, (SINE,))
    assert contexts(BF16, body=region) == []
    assert contexts(BF16, body=Region(DEFAULT, (region,))) == []
    assert contexts(BF16, DEFAULT) == []
    assert [n.where for n in contexts(FOR_XPU, body=region)] == [
        "autocast('xpu', dtype=torch.bfloat16)",
        "autocast(device)",
    ]


def test_a_context_around_the_backward_pass_is_noted() -> None:
    plan = Plan((BF16,), backward="under", backward_context=F32)
    (note,) = noted(under(case([x("x0", 2)], SINE), plan), kinds=["context"])
    assert note.advice == ADVICE


def test_a_context_of_a_program_that_raises_is_noted() -> None:
    (note,) = contexts(F32, body=call("mm", "x0", "x0"))  # of one dimension
    assert note.advice == ADVICE


def test_a_context_for_a_device_without_tensors_is_noted_once() -> None:
    (note,) = contexts(FOR_XPU, FOR_XPU, body=Region(FOR_XPU, (SINE,)))
    assert note.message == "a context for xpu changes nothing: every tensor in it is on cpu"


def test_a_context_for_a_device_with_a_tensor_is_not_noted() -> None:
    own = [x("x0", 2), msgspec.structs.replace(x("x1", 2), device="cpu")]
    body = (SINE, Region(Autocast(device="cpu", dtype="bfloat16"), (call("cos", "x1", to="v1"),)))
    one = under(case(own, *body))
    assert noted(one, "fake-cuda", kinds=["context"]) == ()


@pytest.mark.parametrize(
    "context", [BF16, F16, Autocast(dtype="float32", enabled=False), Autocast(enabled=False)]
)
def test_a_context_that_is_alike_everywhere_is_not_noted(context: Autocast) -> None:
    assert contexts(context) == []


# -- in a run -------------------------------------------------------------------------------------


def explored(*cases: Case, groups: Groups | None = None, **settings: Any) -> list[Any]:
    task = Task("eager-cpu", "all", (), len(cases), 0, cases)
    return list(explore(task, Settings(("eager-cpu",), **settings), groups=groups))


def test_a_run_notes_what_it_was_told_to_and_fails_on() -> None:
    def kinds(**settings: Any) -> set[str]:
        found = [e for e in explored(NO_POLICY, EXP, **settings) if isinstance(e, CaseRecord)]
        return {note.kind for record in found for note in record.notes}

    assert kinds() == {"autocast-raises"}
    assert kinds(notes=("portability",)) == {"portability"}
    assert kinds(notes=(), fail_on=("portability",)) == {"portability"}


def test_the_smallest_case_of_a_group_is_kept_for_replay() -> None:
    large = under(
        case([x("x0", 64, dtype="bfloat16")], call("neg", "x0"), call("exp", "v0", to="v1"))
    )
    groups = Groups()
    events = explored(large, EXP, large, EXP, groups=groups, notes=("portability",))
    kept = [e for e in events if isinstance(e, NoteRecord)]
    assert [record.case for record in kept] == [large, EXP]
    counted = [e for e in events if isinstance(e, CaseRecord)]
    assert all(len(record.notes) == 1 for record in counted)


def test_another_devices_policies_can_be_those_of_torchscripts_reference() -> None:
    """It derives a class from the runtime's autocast."""
    for name in ("eager-cpu", "script"):
        runtime = under_policies(backends()[name].reference(), load_table("cuda"), "cpu")
        with quiet():
            assert runtime.run(NO_POLICY).raised is None
            assert runtime.run(EXP).values["v0"].dtype == torch.float32
