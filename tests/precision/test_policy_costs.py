"""What a policy costs is measured call by call, and wrong lists are named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from amp_fuzz import reference
from amp_fuzz.interfaces import policy_costs
from amp_fuzz.interfaces.policy_costs import Costs, costs_of_callable, costs_of_draws
from amp_fuzz.interfaces.policy_costs.measure import (
    DTYPES,
    FLOAT32,
    LOWER,
    Kept,
    Unjudged,
    Way,
    measured,
    parts,
)
from amp_fuzz.interfaces.policy_costs.tally import ARRIVALS, treatment
from amp_fuzz.interfaces.policy_costs.view import View, page
from amp_fuzz.policies.tables import Policy, PolicyTable, Rule
from amp_fuzz.reference import load_table
from amp_fuzz.reference.shadow.once import Once

aten = torch.ops.aten
SINGLE = -math.log10(2.0**-24)


def kept(overload: Any, *args: Any, **options: Any) -> dict[Way, Kept]:
    return dict(measured(overload, args, {}, **options))


def lowered(found: dict[Way, Kept], dtype: str = "bfloat16", arrival: Any = "float32") -> Kept:
    return found[Way(dtype, arrival, LOWER)]


def table(**policies: Policy) -> PolicyTable:
    """Return CUDA's table with these rules alone; two underscores are a dot."""
    names = {name.replace("__", "."): policy for name, policy in policies.items()}
    rules = {name: Rule(name, policy, ">=2.7", "made up") for name, policy in names.items()}
    return replace(load_table("cuda"), device="made_up", rules=rules)


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- one call -------------------------------------------------------------------------------------


def test_a_rounding_loses_what_the_unit_roundoff_says() -> None:
    found = kept(aten.abs.default, torch.tensor([1 + 2.0**-8]))  # rounded to 1
    error = 2.0**-8 / (1 + 2.0**-8)
    assert lowered(found).results == pytest.approx(-math.log10(error), abs=1e-12)
    assert lowered(found).gradients == SINGLE
    assert lowered(found, "float16") == Kept(SINGLE, SINGLE, False, False)  # it has that number
    assert lowered(found, arrival="16 bits") == Kept(SINGLE, SINGLE, False, False)
    assert found[Way("bfloat16", "float32", FLOAT32)].results == SINGLE


def test_overflow_is_counted_and_has_no_digits() -> None:
    found = kept(aten.exp.default, torch.tensor([12.0]))
    assert lowered(found, "float16") == Kept(None, None, True, False)
    assert not lowered(found).overflowed


def test_a_result_that_becomes_0_vanishes() -> None:
    found = kept(aten.exp.default, torch.tensor([-20.0]))
    assert lowered(found, "float16") == Kept(0.0, 0.0, False, True)
    assert not lowered(found).vanished


@pytest.mark.parametrize(
    ("overload", "args", "exact"),
    [
        (aten.mm.default, (torch.ones(1, 4096), torch.ones(4096, 1)), 4096.0),
        (aten.sum.default, (torch.ones(4096),), 4096.0),
        (aten.prod.default, (torch.full((64,), 1.5).div(1.5),), 1.0),
    ],
)
def test_sums_are_in_float32_and_rounded_once(overload: Any, args: Any, exact: float) -> None:
    low = [t.bfloat16() for t in args]
    with Once():
        assert float(overload(*low)) == exact
    assert lowered(kept(overload, *args)).results == SINGLE


def test_a_kernel_that_is_missing_is_emulated() -> None:
    matrix = torch.eye(3) + noise(3, 3) / 8
    with Once() as once:
        inverse = aten.linalg_inv_ex.default(matrix.bfloat16())[0]
    assert once.emulated
    assert torch.equal(inverse, torch.linalg.inv(matrix.bfloat16().float()).bfloat16())
    assert lowered(kept(aten.linalg_inv_ex.default, matrix)).emulated
    assert not lowered(kept(aten.abs.default, matrix)).emulated


def test_what_an_op_writes_in_place_is_rounded_once_too() -> None:
    with Once():
        made = torch.full((3,), 0.1, dtype=torch.bfloat16).mul_(torch.tensor(3.0).bfloat16())
    exact = torch.tensor(0.1).bfloat16().float() * 3
    assert torch.equal(made, exact.bfloat16().expand(3))


def test_statistics_of_a_batch_norm_are_not_written() -> None:
    mean, variance = torch.zeros(4), torch.ones(4)
    args = noise(8, 4), torch.ones(4), torch.zeros(4), mean, variance, True, 0.1, 1e-5, True
    assert kept(aten.batch_norm.default, *args)
    assert torch.equal(mean, torch.zeros(4))
    assert torch.equal(variance, torch.ones(4))


def test_the_gradient_is_that_of_the_cotangent_given() -> None:
    x = torch.tensor([1 + 2.0**-8, 2.0])
    mine = kept(aten.mul.Tensor, x, x, cotangent=torch.tensor([0.0, 1e-30]))
    other = kept(aten.mul.Tensor, x, x, cotangent=torch.tensor([1e-30, 0.0]))
    assert lowered(mine).gradients == SINGLE  # 2 is a number of bfloat16
    assert lowered(other).gradients == pytest.approx(2.41, abs=0.01)


@pytest.mark.parametrize(
    ("overload", "args", "reason"),
    [
        (aten.abs.default, (torch.arange(3),), "no floating operand"),
        (aten.abs.default, (torch.ones(3).double(),), "an operand that autocast does not cast"),
        (aten.abs.default, (torch.tensor([math.inf]),), "an operand that is not finite"),
        (aten.softmax.int, (torch.ones(3), 0, torch.float32), "the call names its dtype"),
        (aten.abs_.default, (torch.ones(3),), "writes in place"),
        (aten.dropout.default, (torch.ones(9), 0.5, True), "draws at random"),
        (aten.fft_fft.default, (noise(4),), "complex results, which have no 16 bits"),
        (aten.sub.Tensor, (torch.ones(3), torch.ones(3)), "float32 keeps less than half of its"),
        (aten.abs.default, (torch.ones(1).expand(2**23),), "more than 4,194,304 elements"),
    ],
)
def test_a_call_that_says_nothing_has_a_reason(overload: Any, args: Any, reason: str) -> None:
    with pytest.raises(Unjudged, match=reason):
        kept(overload, *args)


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
@pytest.mark.parametrize("arrival", ARRIVALS)
@pytest.mark.parametrize(
    "op", ["linear", "softmax.int", "layer_norm", "cat", "addcmul", "mse_loss"]
)
def test_a_policy_is_treated_as_the_reference_has_it(device: str, arrival: Any, op: str) -> None:
    policies = load_table(device)
    x = noise(4, 4).to(torch.float32 if arrival == "float32" else torch.bfloat16)
    args = {"softmax.int": (x, 0), "layer_norm": (x, [4]), "cat": ([x, x],), "addcmul": (x, x, x)}
    rule = policies.rules.get(op)
    with reference.autocast("cpu", torch.bfloat16, table=replace(policies, device="cpu")):
        packet, _, name = op.partition(".")
        made = getattr(getattr(aten, packet), name or "default")(*args.get(op, (x, x)))
    how = treatment(str(rule.policy) if rule else "", arrival)
    assert made.dtype is (torch.bfloat16 if how == LOWER else torch.float32)


def test_an_op_without_a_rule_is_made_in_parts() -> None:
    a, b = noise(4, 4), noise(4, 4, seed=2)
    tables = {"a": table(mm=Policy.LOWER_PRECISION_FP), "b": table(abs=Policy.FP32)}
    found = dict(measured(aten.matmul.default, (a, b), {}, tables))
    assert found[Way("bfloat16", "float32", parts("a"))] == lowered(found)
    assert not any(way.treated == parts("b") for way in found)


def test_the_backward_pass_of_parts_is_not_autocast() -> None:
    tables = {"a": table(mm=Policy.LOWER_PRECISION_FP, mul__Tensor=Policy.LOWER_PRECISION_FP)}
    around = replace(tables["a"], device="cpu")
    given: Any = aten.matmul.default, (noise(4, 4), noise(4, 4, seed=2)), {}, tables
    with reference.autocast("cpu", torch.float16, table=around):
        inside = dict(measured(*given))
    assert inside == dict(measured(*given))


# -- ops that stand on the wrong list -------------------------------------------------------------

LOGITS = 300 + noise(8, 16)
NEAR = noise(8, 16)
WRONG: dict[str, tuple[str, tuple[Any, ...]]] = {
    "a softmax of large logits": ("softmax.int", (LOGITS, -1)),
    "a sum that cancels": ("sum", (torch.cat([LOGITS, -LOGITS + 1e-2]),)),
    "a norm of a distance": ("dist", (NEAR, NEAR + 1e-3)),
    "distances of near points": ("cdist", (NEAR, NEAR[:1] + 1e-2 * noise(8, 16, seed=2))),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WRONG)
def test_an_op_that_amplifies_on_the_lower_list_is_named(name: str, dtype: str) -> None:
    op, args = WRONG[name]
    packet, _, overload = op.partition(".")
    function = getattr(getattr(aten, packet), overload or "default")
    tables = {"made_up": table(**{op.replace(".", "__"): Policy.LOWER_PRECISION_FP})}
    view = View(met=costs_of_callable(tables, function, args, seed=0))
    assert [loss.op for loss in view.lowered()] == [op]
    assert view.costs.amplifies(op, dtype, "float32")
    assert view.unneeded() == {}


@pytest.mark.parametrize("op", ["abs", "relu", "neg"])
def test_an_op_that_only_moves_on_the_float32_list_is_named(op: str) -> None:
    tables = {"made_up": table(**{op: Policy.FP32})}
    met = costs_of_callable(tables, getattr(torch, op), [noise(8, 8)], seed=0)
    assert View(met=met).unneeded() == {op: list(DTYPES)}
    assert View(met=met).lowered() == []


def test_an_op_that_overflows_needs_float32() -> None:
    tables = {"made_up": table(exp=Policy.FP32)}
    met = costs_of_callable(tables, torch.exp, [torch.tensor([12.0, 1.0])], seed=0)
    assert View(met=met).unneeded() == {"exp": ["bfloat16"]}


def test_drawn_calls_name_both() -> None:
    tables = {
        "one": table(cdist=Policy.LOWER_PRECISION_FP),
        "two": table(abs=Policy.FP32, cdist=Policy.FP32),
    }
    costs, other = (costs_of_draws(tables, draws=5, seed=s) for s in (0, 1))
    view = View(drawn=costs)
    assert [loss.op for loss in view.lowered()] == ["cdist"]
    assert view.unneeded() == {"abs": list(DTYPES)}
    assert costs.calls == {"abs": 5, "cdist": 5}
    assert other.as_dict() != costs.as_dict()


def test_a_drawn_call_with_a_large_operand_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_costs.calls, "_ORDINARY", 0.0)
    costs = costs_of_draws({"one": table(abs=Policy.FP32)}, draws=1, seed=0)
    assert not costs.calls
    assert "an operand beyond 0" in costs.left["abs"]


# -- calls of a callable --------------------------------------------------------------------------


def calls(function: Callable[..., Any], *args: Any, **policies: Policy) -> dict[str, int]:
    tables = {"made_up": table(**policies)}
    return dict(costs_of_callable(tables, function, args, seed=0).calls)


def test_calls_are_met_where_autocast_would_meet_them() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            x = x.exp()
        y = torch.nn.functional.linear(x, x)  # mm of it is not met
        return y.softmax(-1) @ x.sum(0)  # neither is that of the backward pass

    x = noise(4, 4).requires_grad_()
    lower = Policy.LOWER_PRECISION_FP
    met = calls(function, x, exp=lower, linear=lower, mm=lower, softmax__int=lower, mv=lower)
    assert met == {"linear": 1, "softmax.int": 1, "mv": 1}
    assert x.grad is not None


def test_calls_run_in_float32() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.mm(x, x)
        seen.append(y)
        return y

    x = noise(4, 4)
    assert calls(function, x, mm=Policy.LOWER_PRECISION_FP) == {"mm": 1}
    assert torch.equal(seen[0], x @ x)


def test_a_call_is_judged_by_what_it_was_given() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        held = x.detach().clone()
        y = torch.add(x, held)
        held.fill_(math.nan)
        return y

    x = noise(8).requires_grad_()
    assert calls(function, x, add__Tensor=Policy.LOWER_PRECISION_FP) == {"add.Tensor": 1}


def test_only_the_first_calls_of_a_shape_are_judged() -> None:
    def function(x: torch.Tensor) -> None:
        for size in (4, 5):
            for _ in range(6):
                torch.abs(x[:size])

    assert calls(function, noise(8), abs=Policy.FP32) == {"abs": 8}


# -- what is said ---------------------------------------------------------------------------------


def made_up() -> Costs:
    costs = Costs.of({"a": table(mm=Policy.LOWER_PRECISION_FP, exp=Policy.FP32), "b": table()})
    for dtype, whole in (("bfloat16", 2.8), ("float16", 3.7)):
        for arrival in ARRIVALS:
            for op, digits in (("mm", whole - 2), ("exp", whole)):
                way = Way(dtype, arrival, LOWER)
                costs.add(op, way, Kept(digits, None, dtype == "float16" and op == "mm", False))
                costs.add(op, way._replace(treated=FLOAT32), Kept(7.0, 6.9, False, False))
    costs.calls.update(mm=5, exp=5)
    return costs


def test_data_come_back() -> None:
    costs = made_up()
    assert Costs.from_dict(costs.as_dict()) == costs


def test_what_a_seed_does_not_say_is_not_said() -> None:
    costs = made_up()
    said = costs.verdicts()
    none: Any = {kind: {key: [] for key in found} for kind, found in said.items()}
    assert View(drawn=costs, stable=[said, said]).lowered()
    assert not View(drawn=costs, stable=[said, none]).lowered()
    assert View(drawn=costs, stable=[said, said]).unneeded()
    assert not View(drawn=costs, stable=[said, none]).unneeded()


def test_a_call_that_is_met_takes_back_what_draws_say() -> None:
    met = made_up()
    met.add("exp", Way("float16", "float32", LOWER), Kept(None, None, True, False))
    assert View(drawn=made_up(), met=met).unneeded() == {"exp": ["bfloat16"]}


def test_the_page() -> None:
    text = page(View(drawn=made_up()), "# Costs\n")
    assert text.partition("## Lowered")[2] == PAGE


PAGE = """\
, though they amplify

| op | dtype | operands | drawn | float32 | policies |
| --- | --- | --- | --- | --- | --- |
| `mm` | bfloat16, 2.4 | 16 bits | 0.8 / 0.8 | 6.9 / 6.9 | lower_precision_fp on a; none on b |

## Kept in float32 without need

Lowered, these keep all but 0.5 digits of the dtype in every call, whether their operands
arrive in float32 or in 16 bits, and all results are finite. An op without a kernel of 16 bits on
the CPU is not among them.

| dtype | policies | ops |
| --- | --- | --- |
| bfloat16, float16 | fp32 on a; none on b | `exp` |

## Kept in float32, and would amplify

None.

## Where tables differ

These compute in float32 on some devices only. On others they compute in 16 bits if their operands
arrive so, and amplify. Ops that differ so without amplifying: 1.

None.

## By device

Ops that compute in 16 bits as a whole, and how many of them amplify: those that a table lowers, and
those that do so if their operands arrive in 16 bits.

| devices | dtype | lowered | amplify | in 16 bits if they arrive so | amplify |
| --- | --- | --- | --- | --- | --- |
| a | bfloat16 | 1 of 2 | 1 | 1 of 2 | 1 |
| a | float16 | 1 of 2 | 1 | 1 of 2 | 1 |
| b | bfloat16 | 0 of 2 | 0 | 2 of 2 | 1 |
| b | float16 | 0 of 2 | 0 | 2 of 2 | 1 |

## Not judged

None.

## Every op

*No kernel*: the CPU has none of 16 bits, and float32 stands in for it.

| op | calls | bfloat16, float32 | bfloat16, 16 bits | float16, float32 | float16, 16 bits | float32 | policies |
| --- | --- | --- | --- | --- | --- | --- | --- |
| `exp` | 5 | 2.8 / 2.8 | 2.8 / 2.8 | 3.7 / 3.7 | 3.7 / 3.7 | 6.9 / 6.9 | fp32 on a; none on b |
| `mm` | 5 | 0.8 / 0.8 | 0.8 / 0.8 | 1.7 / 1.7, 1 not finite | 1.7 / 1.7, 1 not finite | 6.9 / 6.9 | lower_precision_fp on a; none on b |
"""  # noqa: E501
