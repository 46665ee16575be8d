"""How small things get: what Hypothesis finds is nearly what a person would have written.

Nearly: an argument may be larger than it need be. The engine's own minimiser has tests in
tests/unit/test_minimize.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.program import (
    FLOAT_DTYPES,
    Autocast,
    Checkpoint,
    NoGrad,
    Program,
    regions,
    statements,
    uses,
)
from amp_fuzz.strategies import cases, plans, programs, tensors
from tests.helpers import minimal

pytestmark = pytest.mark.thorough

OPS = ("mm", "relu", "add", "cat", "linear")


def ops(program: Program) -> list[str]:
    return [s.op for s in statements(program.body)]


def elements(program: Program) -> int:
    total = 0
    for spec in program.inputs:
        count = 1
        for size in spec.shape:
            count *= size
        total += count
    return total


def smallest(condition: Callable[[Program], bool]) -> Program:
    """Return the smallest program, from a few ops, that meets a condition."""
    found = minimal(programs(ops=OPS, max_statements=3), condition)
    assert isinstance(found, Program)
    return found


# -- programs ------------------------------------------------------------------------------------


def test_the_smallest_program_is_one_statement() -> None:
    program = minimal(programs())
    assert len(ops(program)) == 1
    assert list(regions(program.body)) == []


@pytest.mark.parametrize("op", OPS)
def test_the_smallest_program_with_an_op_is_one_plain_call_of_it(op: str) -> None:
    program = smallest(lambda p: op in ops(p))
    assert ops(program) == [op]
    assert list(regions(program.body)) == []
    (statement,) = statements(program.body)
    assert statement.form in ("function", "module")
    assert elements(program) <= 24
    for spec in program.inputs:
        assert (spec.dtype, spec.domain, spec.layout) == ("float32", "normal", "contiguous")


def test_two_uses_of_one_weight_are_a_few_small_calls() -> None:
    def twice(program: Program) -> bool:
        count = Counter(n for s in statements(program.body) for n in uses(s))
        return any(n >= 2 for name, n in count.items() if name.startswith("w"))

    program = smallest(twice)
    assert len(ops(program)) <= 3
    assert elements(program) <= 48


def test_a_nested_disabled_region_is_two_regions_around_few_calls() -> None:
    def nested(program: Program) -> bool:
        inner = [
            c
            for node in program.body
            if not hasattr(node, "op") and isinstance(node.context, Autocast)
            for c in regions(node.body)
        ]
        return any(isinstance(c, Autocast) and not c.enabled for c in inner)

    program = smallest(nested)
    assert len(ops(program)) <= 2
    contexts = list(regions(program.body))
    assert len(contexts) == 2
    assert all(isinstance(c, Autocast) for c in contexts)


@pytest.mark.parametrize("context", [NoGrad(), Checkpoint(), Checkpoint(use_reentrant=True)])
def test_a_region_of_a_kind_is_one_of_two_at_most(context: object) -> None:
    program = smallest(lambda p: context in regions(p.body))
    assert len(list(regions(program.body))) <= 2
    assert elements(program) <= 24


def test_a_cat_of_two_dtypes_is_one_call_of_two_inputs() -> None:
    def mixes(program: Program) -> bool:
        dtypes = {s.name: s.dtype for s in program.inputs}
        floats = {name for name, dtype in dtypes.items() if dtype in FLOAT_DTYPES}
        return any(  # an integer is drawn as the second of three only
            s.op == "cat" and len({dtypes[n] for n in uses(s) if n in floats}) > 1
            for s in statements(program.body)
        )

    program = smallest(mixes)
    assert ops(program) == ["cat"]
    assert len(program.inputs) == 2
    assert elements(program) <= 24


@pytest.mark.parametrize("seed", [None, 1, 3, 9, 10, 11])
def test_a_chain_of_two_ops_is_two_calls(seed: int | None) -> None:
    """Wherever Hypothesis begins.

    The number of a value means another when a statement goes: without choices of their own for what
    goes, half of these keep a statement or a region more.
    """

    def chained(program: Program) -> bool:
        made = {n: s.op for s in statements(program.body) for n in s.outputs}
        return any(
            s.op == "relu" and made.get(n) == "mm"
            for s in statements(program.body)
            for n in uses(s)
        )

    strategy = programs(ops=OPS, max_statements=3)
    program = minimal(strategy, chained, seed=seed)
    assert ops(program) == ["mm", "relu"]
    assert list(regions(program.body)) == []


def test_an_odd_layout_is_on_one_small_input() -> None:
    program = smallest(lambda p: any(s.layout == "offset" for s in p.inputs))
    assert len(ops(program)) == 1
    assert elements(program) <= 24


# -- plans ---------------------------------------------------------------------------------------


def test_the_smallest_plan_is_the_default() -> None:
    assert minimal(plans()) == Plan()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("entry", "decorator"),
        ("entry", "custom_fwd"),
        ("entry", "cast_inputs"),
        ("entry", "setup_context"),
        ("entry", "custom_op"),
        ("entry", "register_autocast"),
        ("backward", "inside"),
        ("second", "retain"),
        ("second", "double"),
        ("steps", 2),
        ("micro_batches", 2),
        ("hook", "tensor"),
        ("hook", "accumulated"),
        ("update", "data"),
        ("update", "frozen"),
        ("first_pass", "no_grad"),
        ("first_pass", "inference_mode"),
        ("calls", 2),
        ("checkpoint", "reentrant"),
        ("checkpoint", "non_reentrant"),
        ("checkpoint", "selective"),
        ("thread", "inside"),
        ("thread", "whole"),
        ("interrupted", True),
        ("scaler", True),
        ("transform", "grad"),
        ("transform", "vmap"),
        ("transform", "vmap_grad"),
        ("transform", "functionalize"),
        ("transform", "jvp"),
        ("transform", "forward_ad"),
        ("transform", "jacrev"),
        ("transform", "jacfwd"),
    ],
)
def test_a_plan_with_one_wish_has_one_context_and_at_most_one_other_change(
    field: str, value: object
) -> None:
    plan = minimal(plans(), lambda p: getattr(p, field) == value)
    assert plan.contexts == Plan().contexts
    names = [f.name for f in msgspec.structs.fields(Plan)]
    changed = [name for name in names if getattr(plan, name) != getattr(Plan(), name)]
    assert field in changed
    assert len(changed) <= 2


def test_two_contexts_are_two_plain_contexts() -> None:
    plan = minimal(plans(), lambda p: len(p.contexts) == 2)
    assert plan == Plan(contexts=(Autocast(dtype="bfloat16"),) * 2)


# -- cases and tensors ---------------------------------------------------------------------------


def test_the_smallest_case_is_one_call_under_the_default_plan() -> None:
    case = minimal(cases(ops=["mm"]))
    assert isinstance(case, Case)
    assert (ops(case.program), case.plan, case.seed) == (["mm"], Plan(), 0)


def test_the_smallest_tensor_is_a_float32_scalar() -> None:
    tensor = minimal(tensors())
    assert tensor.shape == ()
    assert str(tensor.dtype) == "torch.float32"
