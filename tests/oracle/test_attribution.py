"""What a backend does without autocast too is its own; all else is autocast's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, TypeAlias

import msgspec
import pytest
import torch

from amp_fuzz.backends import backends
from amp_fuzz.backends.eager import EagerBackend
from amp_fuzz.backends.harness import Observation, Raised, bits, quiet
from amp_fuzz.cases.case import CUSTOM_OPS, Case, bare, uses_autocast
from amp_fuzz.cases.program import (
    Autocast,
    AutocastDType,
    NoGrad,
    Region,
    Statement,
    returning_all,
    statements,
)
from amp_fuzz.oracle import attribution
from amp_fuzz.oracle.attribution import Own, own
from amp_fuzz.oracle.explicit import Explicit
from amp_fuzz.oracle.trial import Trial
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.upstream import quirks
from amp_fuzz.upstream.explain import judge_of
from amp_fuzz.upstream.known import Known
from tests.faults.corrupted import wrong_kernels
from tests.helpers import BF16, call, case, eager, under, x

Fault: TypeAlias = Callable[[Case, Observation], None]

SQUARES = [x("x0", 2, 2), x("w1", 2, 2)]
MM, NEG = call("mm", "x0", "w1"), call("neg", "v0", to="v1")
ONE = case(SQUARES, MM, backward="none")


@dataclass(frozen=True, slots=True)
class Faulty(EagerBackend):
    """Eager, with a fault in what each run observes."""

    fault: Fault = field(kw_only=True)

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Run cases."""
        seen = [EagerBackend.observe(self, one) for one in cases]
        for one, made in zip(cases, seen, strict=True):
            self.fault(one, made)
        return seen


def times(factor: float, *labels: str) -> Fault:
    """Return a fault that multiplies values."""

    def fault(one: Case, seen: Observation) -> None:
        for label in labels:
            value = seen.values.get(label)
            if value is not None:
                seen.values[label] = value * factor

    return fault


def raising(message: str, text: str = "v0 = mm(x0, w1)") -> Fault:
    """Return a fault that ends every run in an error at a line."""

    def fault(one: Case, seen: Observation) -> None:
        seen.values, seen.raised = {}, Raised("RuntimeError", message, 1, text)

    return fault


def leaving(*parts: str) -> Fault:
    """Return a fault that leaves a state."""

    def fault(one: Case, seen: Observation) -> None:
        seen.leaked = "; ".join(filter(None, (seen.leaked, *parts)))

    return fault


def under_autocast(fault: Fault, otherwise: Fault = lambda one, seen: None) -> Fault:
    """Return a fault that shows under autocast only."""

    def either(one: Case, seen: Observation) -> None:
        (fault if uses_autocast(one) else otherwise)(one, seen)

    return either


def both(*faults: Fault) -> Fault:
    """Return several faults at once."""

    def fault(one: Case, seen: Observation) -> None:
        for each in faults:
            each(one, seen)

    return fault


def judged(
    fault: Fault, one: Case = ONE, known: Sequence[Known] = (), *, exact: bool = True
) -> Verdict:
    return judge_of(Faulty("cpu", exact=exact, fault=fault), known, "all").judge(one)


def known(op: str) -> Known:
    return Known("bug", "a bug", "of a kernel", kinds=("value", "bitwise"), ops=(op,))


MODE, CACHE = "grad mode: True became False", "weight cache: True became False"


@pytest.mark.parametrize(
    "fault",
    [
        times(2, "v0"),
        raising("no kernel"),
        leaving(MODE),
        both(times(2, "v0"), leaving(MODE)),
    ],
    ids=["value", "error", "state", "value and state"],
)
def test_a_fault_is_the_backends_if_it_shows_without_autocast_too(fault: Fault) -> None:
    verdict = judged(fault)
    assert (verdict.outcome, verdict.known) == ("backend", "backend")
    assert verdict.divergence is not None
    assert judged(under_autocast(fault)).outcome == "diverged"


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (under_autocast(times(2, "v0"), times(3, "v0")), "bitwise"),
        (under_autocast(raising("no kernel"), raising("no memory")), "raise"),
        (under_autocast(raising("no kernel"), raising("no kernel", "v1 = neg(v0)")), "raise"),
        (under_autocast(leaving(MODE, CACHE), leaving(MODE)), "state"),
        (under_autocast(raising("no kernel"), times(2, "v0")), "raise"),
        (under_autocast(times(2, "v0"), raising("no kernel")), "bitwise"),
    ],
    ids=["value", "error", "error elsewhere", "state", "error or value", "value or error"],
)
def test_another_fault_without_autocast_explains_none(fault: Fault, kind: str) -> None:
    verdict = judged(fault)
    assert verdict.divergence is not None
    assert (verdict.outcome, verdict.divergence.kind) == ("diverged", kind)


def test_an_error_of_the_case_without_autocast_is_the_backends_though_written_casts_avoid_it() -> (
    None
):
    """An op that is cast inside checks its inputs first: those of the explicit program are cast."""

    def fault(one: Case, seen: Observation) -> None:
        if all(s.op != "to.dtype" for s in statements(one.program.body)):
            raising("both inputs should have same dtype")(one, seen)

    assert judged(fault).outcome == "backend"
    assert judged(under_autocast(fault)).outcome == "diverged"


def layer_of_two_dtypes() -> Case:
    """Return a case of a module in which eager refuses a norm of float32 with float16 weights."""
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.in_proj_weight": (6, 2),
        "self_attn.in_proj_bias": (6,),
        "self_attn.out_proj.weight": (2, 2),
        "self_attn.out_proj.bias": (2,),
        "linear1.weight": (3, 2),
        "linear1.bias": (3,),
        "linear2.weight": (2, 3),
        "linear2.bias": (2,),
    }
    shapes |= {f"norm{i}.{name}": (2,) for i in (1, 2) for name in ("weight", "bias")}
    inputs = [x(f"x{i}", *shape, dtype="float16") for i, shape in enumerate(shapes.values())]
    layer = call(
        *("TransformerEncoderLayer", "x12"),
        form="module",
        embedding=2,
        heads=1,
        wide=3,
        activation="relu",
        first=False,
        training=True,
        names=list(shapes),
        mask=None,
        weights=[spec.name for spec in inputs],
    )
    return case([*inputs, x("x12", 1, 3, 2, dtype="float16")], layer, backward="none")


def test_what_eager_refuses_inside_a_module_is_the_backends_if_it_takes_that_call_alone() -> None:
    one = layer_of_two_dtypes()

    def taking(one: Case, seen: Observation) -> None:
        if seen.raised and "mixed dtype (CPU)" in seen.raised.message:
            seen.raised = None

    assert "mixed dtype (CPU)" in str(eager().run([one])[0].raised)
    assert judged(taking, one).outcome == "backend"
    verdict = judged(under_autocast(taking), one)
    assert verdict.divergence is not None
    assert (verdict.outcome, verdict.divergence.kind) == ("diverged", "raise")


def test_a_call_whose_inputs_no_case_holds_is_not_asked_alone() -> None:
    """Those of fake tensors have no values."""
    inputs = [x("x0", 2, 2), x("x1", 2, dtype="float16")]
    norm = call("native_layer_norm", "x0", [2], "x1", None, 1.0, to="v0 v1 v2")
    one = case(inputs, norm, contexts=(), backward="none")
    alone = Trial.of(one, eager()).raising()
    assert alone is not None
    assert alone.program.outputs == ("v0", "v1", "v2")
    assert Trial.of(one, backends()["fake-cuda"]).raising() is None
    for name in ("vmap", "grad", "jvp", "jacfwd", "functionalize"):
        Trial.of(one.with_plan(transform=name, backward="outside"), eager()).raising()


@pytest.mark.parametrize("why", ["it agrees", "it cannot be said"])
def test_a_call_that_does_not_raise_alone_or_cannot_be_said_clears_nothing(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = layer_of_two_dtypes()

    def taking(one: Case, seen: Observation) -> None:
        if seen.raised and "mixed dtype (CPU)" in seen.raised.message:
            seen.raised = None

    if why == "it agrees":
        monkeypatch.setattr(Trial, "raising", lambda trial: case(SQUARES, MM, contexts=()))
    else:
        monkeypatch.setattr(attribution, "unsupported", lambda *case: "native_layer_norm")
    assert judged(taking, one).outcome == "diverged"


def test_an_error_of_what_is_cast_without_contexts_too_is_autocasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a callable that enters autocast itself: the bare program shows nothing."""
    honest = Trial.bare

    def cast(trial: Trial) -> Trial:
        made = honest(trial)
        kernels = trial.refer(trial.case).kernels
        assert kernels
        return replace(made, expected=replace(made.expected, kernels=kernels))

    def fault(one: Case, seen: Observation) -> None:
        if all(s.op != "to.dtype" for s in statements(one.program.body)):
            raising("no kernel")(one, seen)

    monkeypatch.setattr(Trial, "bare", cast)
    assert judged(fault).outcome == "diverged"


def test_of_a_state_autocasts_part_is_reported() -> None:
    verdict = judged(both(leaving(MODE), under_autocast(leaving(CACHE))))
    assert verdict.divergence is not None
    assert (verdict.outcome, verdict.divergence.observed) == ("diverged", CACHE)


def test_of_a_case_with_both_autocasts_part_is_reported() -> None:
    one = case(SQUARES, MM, NEG, backward="none")
    mine = times(2, "v0")
    fault = both(mine, under_autocast(times(2, "v1")))
    verdict = judged(fault, one)
    assert verdict.divergence is not None
    assert (verdict.outcome, verdict.divergence.where) == ("diverged", "v1")
    verdict = judged(fault, one, [known("neg")])
    assert (verdict.outcome, verdict.known) == ("known", "bug+backend")
    assert judged(fault, one, [known("mm")]).outcome == "diverged"
    assert judged(mine, one, [known("mm")]).outcome == "backend"


def test_of_what_an_imitated_bug_leaves_all_may_be_the_backends() -> None:
    """Its own part shows at one value at first, and at another once the bug is imitated."""
    how: dict[str, Any] = {"stride": [1], "padding": [0], "dilation": [1], "groups": 1}
    layer = call("Conv1d", "x0", "w1", None, form="module", inner=1, made=1, mode="zeros", **how)
    one = case(
        [x("x0", 1, 1, 3), x("w1", 1, 1, 2), x("x2", 2)],
        layer,
        call("neg", "x2", to="v1"),
        backward="none",
    )

    def fault(one: Case, seen: Observation) -> None:
        seen.values["v0"] = EagerBackend("cpu").observe(bare(one)).values["v0"]
        times(2, "v0", "v1")(one, seen)

    bug = Known("bug", "a bug", "of a composite op", quirk="torchax-composites")
    verdict = judged(fault, one, [bug])
    assert (verdict.outcome, verdict.known) == ("known", "bug+backend")
    assert judged(under_autocast(fault), one, [bug]).outcome == "diverged"


def test_several_imitated_bugs_may_be_beside_the_backends_own() -> None:
    """The second bug shows first where the first is imitated, too."""
    double = x("x2", 2, 2, dtype="float64")
    one = case(
        [x("x0", 2, 2), x("x1", 2, 2), double],
        call("linear", "x0", "x1"),
        call("mm", "x2", "x2", to="v1"),
        call("neg", "v1", to="v2"),
        backward="none",
    )
    names = ["torchax-composites", "torchax-float64"]

    def buggy(one: Case, seen: Observation) -> None:
        with quirks(names):
            seen.values = dict(EagerBackend("cpu").reference().run(one).values)

    bugs = [Known(name, "a bug", "of two", quirk=name) for name in names]
    verdict = judged(both(buggy, times(2, "v2")), one, bugs)
    assert (verdict.outcome, verdict.known) == ("known", "+".join([*names, "backend"]))
    assert judged(both(buggy, under_autocast(times(2, "v2"))), one, bugs).outcome == "diverged"


def test_a_call_that_an_imitated_bug_makes_torch_reject_may_be_the_backends() -> None:
    """It goes on with operands of two dtypes, and raises later."""
    halves = x("w1", 2, 2, dtype="float16")
    body = call("neg", "x0"), call("linear", "v0", "w1", to="v1")
    one = case([x("x0", 2, 2), halves], *body, scaler=True)
    with quiet():
        late = EagerBackend("cpu").observe(one).raised
    assert late is not None
    assert "unscale" in late.message

    def fault(before: torch.dtype) -> Fault:
        def goes_on(one: Case, seen: Observation) -> None:
            if not any(s.op == "to.dtype" for s in statements(one.program.body)):
                seen.values, seen.raised = {"v0": torch.ones(2, 2, dtype=before)}, late

        return goes_on

    bug = Known("bug", "a bug", "of a composite op", quirk="torchax-composites")
    verdict = judged(fault(torch.float32), one, [bug], exact=False)
    assert (verdict.outcome, verdict.known) == ("known", "bug+backend")
    caused = under_autocast(fault(torch.float32))
    assert judged(caused, one, [bug], exact=False).outcome == "diverged"
    # What it had before is not what it has with the bug.
    assert judged(fault(torch.float16), one, [bug], exact=False).outcome == "diverged"


def test_a_gradient_is_a_label_of_its_own() -> None:
    one = case([*SQUARES, x("w2", 2, 2)], MM, call("neg", "w2", to="v1"))
    fault = both(times(2, "w1.grad"), under_autocast(times(2, "w2.grad")))
    verdict = judged(fault, one)
    assert verdict.divergence is not None
    assert (verdict.outcome, verdict.divergence.where) == ("diverged", "w2.grad")
    assert judged(times(2, "w1.grad"), one).outcome == "backend"


@dataclass(frozen=True, slots=True)
class Returning(Faulty):
    """Returns every value."""

    def fit(self, case: Case) -> Case:
        """Return the case as it is run."""
        return msgspec.structs.replace(case, program=returning_all(case.program))


def test_a_gradient_is_asked_of_a_backend_that_returns_every_value() -> None:
    """Without casts the case raises."""
    cast = call("bfloat16", "x0", form="method")
    one = case(SQUARES, cast, call("mm", "v0", "w1", to="v1"))
    verdict = judge_of(Returning("cpu", fault=times(2, "w1.grad"))).judge(one)
    assert verdict.outcome == "backend"


def test_a_case_without_autocast_is_the_backends() -> None:
    assert judged(times(2, "v0"), bare(ONE)).outcome == "backend"
    disabled = case(SQUARES, under(Autocast(enabled=False), MM), contexts=(), backward="none")
    assert judged(times(2, "v0"), disabled).outcome == "backend"
    assert judged(under_autocast(times(2, "v0")), disabled).outcome == "diverged"


def test_a_call_that_stays_under_autocast_is_asked_in_the_case_without() -> None:
    """In the explicit program its fault shows in any case."""
    one = case(SQUARES, call("linear_op", "x0", "w1", None, 1.0), NEG, backward="none")
    for fault in (times(2, "v0"), times(2, "v1"), times(2, "v0", "v1")):
        assert judged(fault, one).outcome == "backend"
    for fault in (times(2, "v0"), times(2, "v0", "v1")):
        assert judged(under_autocast(fault), one).outcome == "diverged"


@pytest.mark.parametrize(
    "fault",
    [times(2, "w1.grad"), leaving(MODE), raising("no kernel")],
    ids=["gradient", "state", "error"],
)
def test_a_call_that_stays_under_autocast_may_be_wrong_beside_its_value(fault: Fault) -> None:
    one = case(SQUARES, call("linear_op", "x0", "w1", None, 1.0))
    assert judged(fault, one).outcome == "backend"
    assert judged(under_autocast(fault), one).outcome == "diverged"


@dataclass(frozen=True, slots=True)
class Late(EagerBackend):
    """Ends a region of autocast after what follows it."""

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Run cases."""
        seen = []
        for one in cases:
            first, *rest = one.program.body
            if isinstance(first, Region) and isinstance(first.context, Autocast):
                body = (Region(first.context, (*first.body, *rest)),)
                one = one.with_program(body=body)
            seen.append(EagerBackend.observe(self, one))
        return seen


def test_a_region_that_ends_late_is_autocasts_where_a_call_in_it_stays_too() -> None:
    """The explicit program has the region, and what follows it."""
    for inner in (MM, call("linear_op", "x0", "w1", None, 1.0)):
        after = call("mm", "x0", "w1", to="v1")
        one = case(SQUARES, under(BF16, inner), after, contexts=(), backward="none")
        verdict = judge_of(Late("cpu"), (), "none").judge(one)
        assert verdict.divergence is not None
        assert (verdict.outcome, verdict.divergence.where) == ("diverged", "v1")


def test_a_gradient_that_the_explicit_program_has_otherwise_is_asked_in_the_case_without() -> None:
    """Of a custom op: in its body the casts have no gradients, but as statements they round."""
    one = case(SQUARES, MM, entry="custom_op")
    assert judged(times(2, "w1.grad"), one).outcome == "backend"
    assert judged(under_autocast(times(2, "w1.grad")), one).outcome == "diverged"


@dataclass(frozen=True, slots=True)
class Deaf(EagerBackend):
    """Ignores autocast."""

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Run cases without it."""
        return [EagerBackend.observe(self, bare(one)) for one in cases]


def test_a_program_that_computes_something_else_clears_no_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without casts the backend agrees with itself, but the reference does not."""

    def careless(trial: Trial, *changing: object) -> Explicit:
        plain = bare(trial.case)
        return Explicit(plain, trial.refer(plain))

    judge = judge_of(Deaf("cpu"), (), "none")
    assert judge.judge(ONE).outcome == "diverged"
    monkeypatch.setattr("amp_fuzz.oracle.trial.explicit", careless)
    assert judge.judge(ONE).outcome == "diverged"
    monkeypatch.setattr(attribution._Asked, "_says", lambda *_: True)
    assert judge.judge(ONE).outcome == "backend", "the proof is not what prevents it"


def changing(fault: Fault) -> Fault:
    """Return a fault that shows in every other run."""
    runs = count()
    return lambda one, seen: None if next(runs) % 2 else fault(one, seen)


@pytest.mark.parametrize("op", ["mm", "linear_op"], ids=["written out", "stays"])
def test_what_changes_from_run_to_run_without_autocast_is_the_backends(op: str) -> None:
    more = () if op == "mm" else (None, 1.0)
    one = case(SQUARES, call(op, "x0", "w1", *more), backward="none")
    for given in (one, bare(one)):
        assert judged(changing(times(2, "v0")), given).outcome == "backend"
    verdict = judged(under_autocast(changing(times(2, "v0"))), one)
    assert verdict.divergence is not None
    assert (verdict.outcome, verdict.divergence.kind) == ("diverged", "nondeterminism")


@pytest.mark.parametrize("form", ["function", "module"])
def test_what_changes_in_the_reference_too_is_the_backends(form: str) -> None:
    """As a convolution of bfloat16 that reads memory that nobody wrote: not the case's float16."""
    runs = count()

    def noisy(op: Any, *args: Any) -> Any:
        made = op(*args)
        return made * (1 + next(runs) % 7) if made.dtype is torch.bfloat16 else made

    given = [x("x0", 3, 4, dtype="float16"), x("w1", 5, 4, dtype="float16")]
    how = ("x0", "w1") if form == "function" else ("x0", "w1", None)
    one = case(given, call("linear", *how, form=form), backward="none")
    with wrong_kernels({"aten.mm.default": noisy}):
        verdict = judge_of(EagerBackend("cpu"), ()).judge(one)
    assert verdict.divergence is not None
    assert (verdict.outcome, verdict.divergence.kind) == ("backend", "nondeterminism")


def test_what_changes_may_change_what_is_computed_from_it_alone() -> None:
    one = case(SQUARES, MM, NEG, call("sin", "x0", to="v2"), backward="none")
    mine = times(2, "v0", "v1")
    assert judged(changing(mine), one).outcome == "backend"
    fault = under_autocast(times(2, "v2"))
    verdict = judged(both(changing(mine), fault), one)
    assert verdict.divergence is not None
    assert (verdict.outcome, verdict.divergence.where) == ("diverged", "v2")


@pytest.mark.parametrize(
    "body", [MM, call("linear_op", "x0", "w1", None, 1.0)], ids=["written out", "stays"]
)
@pytest.mark.parametrize("always", [True, False])
def test_a_relation_that_holds_nowhere_is_the_backends(always: bool, body: Statement) -> None:
    """A second call gives another value, in a run that is right at first."""
    one = case(SQUARES, body, calls=2, backward="none")
    fault = times(2, "call1.v0")

    def second(given: Case, seen: Observation) -> None:
        if always or uses_autocast(given):
            fault(given, seen)

    backend = Faulty("cpu", fault=second)
    trial = Trial.of(one, backend)
    found = trial.within()
    assert found is not None
    assert own(trial, found).relation == (found.where if always else "")


def test_a_value_of_the_backends_own_breaks_no_relation_of_autocasts() -> None:
    one = case(SQUARES, MM, NEG, calls=2, backward="none")
    mine = times(2, "call1.v0")
    assert judged(mine, one).outcome == "backend"
    trial = Trial.of(one, Faulty("cpu", fault=both(mine, times(2, "call1.v1"))))
    found = replace(trial, own=Own(frozenset(["call1.v0"]))).within()
    assert found is not None
    assert found.where == "second call: call1.v1"


def off(seen: Observation, label: str) -> None:
    """Change the last bit of a value's first element."""
    value = seen.values.get(label)
    if value is not None:
        seen.values[label] = value = value.clone()
        bits(value).view(-1)[0] ^= 1


def rounding(fault: Fault) -> Fault:
    """Return a fault after which the last bit is another one."""

    def fault_and_rounding(one: Case, seen: Observation) -> None:
        fault(one, seen)
        off(seen, "v0")

    return fault_and_rounding


@pytest.mark.parametrize(
    ("otherwise", "outcome"),
    [
        (rounding(times(2, "v0")), "backend"),
        (rounding(lambda one, seen: None), "diverged"),
        (times(-2, "v0"), "diverged"),
    ],
    ids=["it rounds otherwise", "it is right", "it is wrong in another way"],
)
def test_where_bits_need_not_repeat_rounding_must_explain_the_rest(
    otherwise: Fault, outcome: str
) -> None:
    fault = under_autocast(times(2, "v0"), otherwise)
    assert judged(fault, exact=False).outcome == outcome
    assert judged(fault).outcome == "diverged", "where they must, all else is autocast's"


def test_a_gradient_that_is_missing_in_both_is_the_backends() -> None:
    def missing(one: Case, seen: Observation) -> None:
        if "w1.grad" in seen.values:
            seen.values["w1.grad"] = None

    one = case(SQUARES, MM)
    assert judged(missing, one).outcome == "backend"
    assert judged(under_autocast(missing), one).outcome == "diverged"


def test_a_dtype_without_values_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where results have no values, dtypes and shapes are all that is compared."""

    def wide(one: Case, seen: Observation) -> None:
        value: Any = seen.values["v0"]
        seen.values["v0"] = torch.zeros_like(value, dtype=torch.float64)

    for fault, outcome in ((wide, "backend"), (under_autocast(wide), "diverged")):
        backend = replace(Faulty("cpu", fault=fault), values=False)
        assert judge_of(backend, (), "none").judge(ONE).outcome == outcome
    assert BF16 in ONE.plan.contexts


def test_a_transform_that_refuses_two_dtypes_without_autocast_too_is_the_backends_own() -> None:
    """Under vmap, group norm promotes; the values before it are not returned, since it raises."""
    half = {"dtype": "float16"}
    normed = case(
        [
            *(
                x("x0", 1, 2, **half),
                x("x1", 2, 2, **half),
                x("x2", 2, dtype="int64", domain="zeros"),
            ),
            *(x("w3", 2, 2), x("x4", 2, **half), x("x5", 1, **half)),
        ],
        call("nll_loss", "x1", "x2", reduction="none"),
        call("prelu", "v0", "x5", form="module", to="v1"),
        call("group_norm", "x0", 2, "v0", "v0", form="module", to="v2"),
        call("nll_loss", "w3", "x2", to="v3"),
        call("linalg.multi_dot", ["v2", "x4"], to="v4"),
        transform="vmap_grad",
        returns=["v0"],
    )
    with quiet():
        verdict = judge_of(eager(), relations="all").judge(normed)
    assert verdict.outcome == "backend"
    assert verdict.divergence is not None
    assert verdict.divergence.where == "transform: v4"


# -- several calls, each under contexts of its own ------------------------------------------------

AROUND = ((Autocast(enabled=False),), (NoGrad(), BF16), (AutocastDType("float16"), Autocast()))
SEVERAL = case(SQUARES, MM, NEG, later=AROUND)


@dataclass(frozen=True, slots=True)
class Stale(EagerBackend):
    """Eager, but each later call is under the contexts of the first one."""

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Run cases."""
        stale = [
            one.with_plan(later=tuple(one.plan.contexts for _ in one.plan.later)) for one in cases
        ]
        return [EagerBackend.observe(self, one) for one in stale]


@pytest.mark.parametrize("around", AROUND, ids=str)
def test_a_call_under_the_autocast_of_an_earlier_one_is_autocasts(around: Any) -> None:
    verdict = judge_of(Stale("cpu"), ()).judge(case(SQUARES, MM, later=(around,)))
    assert verdict.divergence is not None
    grad = NoGrad() in around  # a grad mode is not autocast's
    said = ("backend", "w1.grad") if grad else ("diverged", "later0.v0")
    assert (verdict.outcome, verdict.divergence.where) == said


LABELS = ["v1", "later0.v1", "later1.v1", "later2.v1"]


@pytest.mark.parametrize("label", LABELS)
def test_a_call_that_is_wrong_alone_and_without_autocast_too_is_the_backends(label: str) -> None:
    """The explicit program of the call alone says so, also where it is not wrong in float32."""
    everywhere = both(times(2, "v1"), times(2, *LABELS[1:]))
    assert judged(everywhere, SEVERAL).outcome == "backend"
    assert judged(under_autocast(times(2, label)), SEVERAL).outcome == "diverged"


def test_a_call_that_is_wrong_only_after_another_is_autocasts() -> None:
    def fault(one: Case, seen: Observation) -> None:
        if one.plan.later and uses_autocast(one):
            times(2, "later0.v1")(one, seen)

    assert judged(fault, SEVERAL).outcome == "diverged"


def test_an_error_of_several_calls_is_the_backends_if_they_end_so_without_autocast() -> None:
    assert judged(raising("no kernel"), SEVERAL).outcome == "backend"
    assert judged(under_autocast(raising("no kernel")), SEVERAL).outcome == "diverged"
    assert judged(leaving(MODE), SEVERAL).outcome == "backend"
    assert judged(under_autocast(leaving(MODE)), SEVERAL).outcome == "diverged"


def test_a_gradient_of_several_calls_is_the_backends_if_it_is_that_of_one_of_them() -> None:
    one = case(SQUARES, MM, later=AROUND)
    assert judged(times(2, "w1.grad"), one).outcome == "backend"
    assert judged(under_autocast(times(2, "w1.grad")), one).outcome == "diverged"


def of_several(several: Fault, alone: Fault) -> Own:
    """Return what is the backend's own of `SEVERAL`, with faults in it and in each call alone."""

    def fault(one: Case, seen: Observation) -> None:
        if not one.plan.later:
            alone(one, seen)
        elif uses_autocast(one):
            several(one, seen)

    trial = Trial.of(SEVERAL, Faulty("cpu", fault=fault))
    found = trial.compare()
    assert found is not None
    return own(trial, found)


def test_a_call_that_is_wrong_alone_must_be_wrong_in_the_same_bits() -> None:
    label = "later0.v1"
    assert of_several(times(2, label), times(2, "v1")).labels == {label}
    assert of_several(times(3, label), times(2, "v1")) == attribution.NONE


def test_an_error_of_one_call_may_be_that_of_all() -> None:
    assert of_several(raising("no kernel"), raising("no kernel")).raises
    assert not of_several(raising("no kernel"), raising("no memory")).raises


def test_a_gradient_is_one_calls_own_only_if_each_value_is_what_its_call_gives() -> None:
    one = case(SQUARES, MM, later=AROUND)
    gradient = times(2, "w1.grad")

    def own_of(several: Fault) -> frozenset[str]:
        def fault(one: Case, seen: Observation) -> None:
            (several if one.plan.later and uses_autocast(one) else gradient)(one, seen)
            if one.plan.later and not uses_autocast(one):
                times(0.5, "w1.grad")(one, seen)

        trial = Trial.of(one, Faulty("cpu", fault=fault))
        found = trial.compare()
        assert found is not None
        return own(trial, found).labels

    assert own_of(gradient) == {"w1.grad"}
    assert own_of(both(gradient, times(2, "later0.v0"))) == frozenset()


def test_what_only_calls_in_a_row_show_is_the_backends_if_they_do_without_autocast() -> None:
    """A compiler that is given one function with all calls gets wrong what no call has alone."""
    row = times(2, "later0.v1", "v710001")

    def together(fault: Fault) -> Fault:
        def in_one_graph(one: Case, seen: Observation) -> None:
            if one.plan.later or len(list(statements(one.program.body))) > 2:
                if one.plan.later and not uses_autocast(one):  # the bare case
                    return
                fault(one, seen)

        return in_one_graph

    graph = SEVERAL.with_plan(reuse="graph")
    for fault in (row, raising("no kernel")):
        assert judged(together(fault), graph).outcome == "backend"
        assert judged(under_autocast(together(fault)), graph).outcome == "diverged"
        assert judged(together(fault), SEVERAL).outcome == "diverged", "each call is a graph"
    assert judged(together(both(row, times(2, "later1.v1"))), graph).outcome == "diverged"
    other = both(times(2, "later0.v1"), times(3, "v710001"))
    assert judged(together(other), graph).outcome == "diverged", "in other bits"

    def otherwise(one: Case, seen: Observation) -> None:
        raising("no kernel" if one.plan.later else "no memory")(one, seen)

    assert judged(together(otherwise), graph).outcome == "diverged", "in another error"


def test_without_autocast_a_custom_op_stays_one() -> None:
    """Its calls have inputs of two dtypes, so there is no explicit program."""
    half = x("x0", 2, 2, dtype="float16")
    one = case([half], call("relu", "x0"), entry="register_autocast", calls=2, backward="none")

    def in_op(one: Case, seen: Observation) -> None:
        if one.plan.entry in CUSTOM_OPS:
            times(2, "call1.v0")(one, seen)

    assert Trial.of(one, eager()).explicit() is None
    assert judged(in_op, one).outcome == "backend"
    assert judged(under_autocast(in_op), one).outcome == "diverged"


def test_what_does_not_depend_on_what_stays_under_autocast_is_asked_without_it() -> None:
    inverse = call("matrix_power.negative", "w2", -2)
    one = case([x("w1", 2, 2), x("w2", 2, 2)], inverse, call("neg", "w1", to="v1"))

    def but_bare(*labels: str, alone: bool = True) -> Fault:
        def fault(one: Case, seen: Observation) -> None:
            apart = [s.op for s in statements(one.program.body)] == ["neg"]
            if uses_autocast(one) or (apart and alone):
                times(2, *labels)(one, seen)

        return fault

    explicit = Trial.of(one, eager()).explicit()
    assert explicit is not None
    assert explicit.kept == {"v0"}
    assert judged(but_bare("w1.grad"), one).outcome == "backend"
    assert judged(but_bare("w1.grad", alone=False), one).outcome == "diverged"
    assert judged(but_bare("w2.grad"), one).outcome == "diverged", "through what stays"


def test_an_error_of_calls_in_one_graph_may_come_with_the_casts_of_the_first() -> None:
    graph = SEVERAL.with_plan(reuse="graph")

    def several(one: Case, seen: Observation) -> None:
        cast = any(s.op == "to.dtype" for s in statements(one.program.body))
        if one.plan.later and (cast or uses_autocast(one)):
            raising("no kernel")(one, seen)

    assert judged(several, graph).outcome == "backend"
    assert judged(under_autocast(several), graph).outcome == "diverged"

    inverse = call("matrix_power.negative", "w1", -2)  # stays under autocast
    kept = case([x("w1", 2, 2)], inverse, later=AROUND, reuse="graph")
    assert judged(under_autocast(several), kept).outcome == "diverged"


def test_a_gradient_that_should_not_be_there_need_not_have_the_same_bits() -> None:
    one = case([x("x0", 2, 2), x("w1", 2, 2)], call("neg", "x0"), call("mm", "x0", "x0", to="v1"))

    def there(factor: float) -> Fault:
        def fault(one: Case, seen: Observation) -> None:
            seen.values["w1.grad"] = torch.full((2, 2), factor)

        return fault

    assert judged(under_autocast(there(1), there(2)), one).outcome == "backend"
    assert judged(under_autocast(there(1)), one).outcome == "diverged"
