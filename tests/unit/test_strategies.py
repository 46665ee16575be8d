"""The strategies: public, legal, and wide enough that everything comes up."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amp_fuzz import catalogue, strategies
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.program import (
    DOMAINS,
    FLOAT_DTYPES,
    LAYOUTS,
    Autocast,
    AutocastDType,
    Checkpoint,
    Float,
    InferenceMode,
    Node,
    NoGrad,
    Program,
    ProgramError,
    Region,
    refs,
    regions,
    returning_all,
    returning_last,
    statements,
    uses,
)
from amp_fuzz.catalogue import CATALOGUE, Op
from amp_fuzz.catalogue.writes import wrongly_written
from amp_fuzz.policies.tables import Policy, load_table
from amp_fuzz.reference import tabled_devices
from amp_fuzz.strategies import drawing
from amp_fuzz.strategies.choices import digits, integer
from amp_fuzz.strategies.drawing import draw_program, usable
from amp_fuzz.strategies.idioms import IDIOMS, stages
from tests.helpers import BF16, F16, STEADY, drawn, eager, one_line


@cache
def many() -> tuple[Case, ...]:
    """Return a few thousand draws, as a run of some seconds makes them."""
    return tuple(drawn(4000, seed="many"))


def find_any(condition: Callable[[Case], bool]) -> Case:
    """Return a draw that meets a condition, or fail."""
    found = next((c for c in many() if condition(c)), None)
    assert found is not None, "none of 4,000 draws"
    return found


# -- public, in anyone's @given ------------------------------------------------------------------


@given(strategies.programs(ops=["mm", "cat", "relu"], max_statements=5))
@STEADY
def test_programs_are_well_formed_and_of_the_ops_asked_for(program: Program) -> None:
    catalogue.check(program)
    calls = list(statements(program.body))
    assert 1 <= len(calls) <= 5
    assert {s.op for s in calls} <= {"mm", "cat", "relu"}


@given(
    st.sampled_from(tabled_devices()).flatmap(
        lambda d: strategies.cases(device=d, max_statements=6)
    )
)
@STEADY
def test_cases_are_well_formed_on_every_device(case: Case) -> None:
    catalogue.check(case.program)
    case.plan.check()


@pytest.mark.thorough
@given(strategies.cases(trains=False))
@STEADY
def test_cases_that_do_not_train_have_no_backward(case: Case) -> None:
    assert case.plan.backward == "none"
    assert Checkpoint(use_reentrant=True) not in regions(case.program.body)


@given(strategies.cases(focus=["addmm"], form="out", max_statements=5))
@STEADY
def test_a_focused_form_is_in_every_case(case: Case) -> None:
    forms = [(s.op, s.form) for s in statements(case.program.body)]
    assert ("addmm", "out") in forms


@given(strategies.tensors(shape=(2, 3), dtype="bfloat16"))
@STEADY
def test_tensors_have_the_shape_and_dtype_asked_for(tensor: torch.Tensor) -> None:
    assert tensor.shape == (2, 3)
    assert tensor.dtype == torch.bfloat16


@given(strategies.tensors(shape=st.just((4,)), dtype=st.sampled_from(["int64", "bool"])))
@STEADY
def test_tensors_take_strategies(tensor: torch.Tensor) -> None:
    assert tensor.shape == (4,)
    assert tensor.dtype in (torch.int64, torch.bool)


@given(strategies.tensors())
@STEADY
def test_tensors_are_floating_on_the_cpu(tensor: torch.Tensor) -> None:
    assert tensor.is_floating_point()
    assert tensor.device.type == "cpu"
    assert tensor.dim() <= 3


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: strategies.programs(ops=["matmull"]), ProgramError, "did you mean 'matmul'"),
        (
            lambda: strategies.cases(focus=["convolutoin"]),
            ProgramError,
            "did you mean 'convolution",
        ),
        (lambda: strategies.cases(ops=["zz*"]), ProgramError, "no op or family matches 'zz*'"),
        (lambda: strategies.cases(device="gpu"), ValueError, "device='gpu' has no policy table"),
        (lambda: strategies.plans(device="tpu"), ValueError, "use one of cpu, cuda"),
        (lambda: strategies.programs(max_statements=0), ValueError, "max_statements=0 must be at"),
        (lambda: strategies.cases(max_statements=-1), ValueError, "max_statements=-1 must be at"),
        (lambda: strategies.tensors(dtype="float8"), ValueError, "dtype='float8' is unknown"),
    ],
)
def test_a_bad_argument_says_what_to_write(
    call: Callable[[], Any], error: type[Exception], said: str
) -> None:
    """At the call, not at the first draw."""
    with pytest.raises(error) as caught:
        call()
    assert said in str(caught.value)
    assert one_line(caught.value)


# -- everything comes up -------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_op_and_nearly_every_form_comes_up(device: str) -> None:
    wanted = {(op.name, form) for op in usable(CATALOGUE.values(), device) for form in op.forms}
    seen = {
        (s.op, s.form) for c in drawn(4000, device) for s in statements(c.program.body)
    }  # about 25,000 calls
    assert {op for op, _ in wanted} == {op for op, _ in seen}
    assert seen <= wanted
    assert len(seen) > 0.97 * len(wanted), sorted(wanted - seen)


@pytest.mark.thorough
@pytest.mark.parametrize("form", catalogue.FORMS)
def test_every_form_comes_up(form: str) -> None:
    find_any(lambda c: any(s.form == form for s in statements(c.program.body)))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [*FLOAT_DTYPES, "int64", "bool", "complex64"])
def test_every_kind_of_dtype_comes_up(dtype: str) -> None:
    find_any(lambda c: any(s.dtype == dtype for s in c.program.inputs))


@pytest.mark.thorough
@pytest.mark.parametrize("domain", DOMAINS)
def test_every_domain_comes_up(domain: str) -> None:
    find_any(lambda c: any(s.domain == domain for s in c.program.inputs))


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_comes_up(layout: str) -> None:
    find_any(lambda c: any(s.layout == layout for s in c.program.inputs))


@pytest.mark.thorough
@pytest.mark.parametrize("role", ["input", "weight", "buffer"])
def test_every_role_comes_up(role: str) -> None:
    find_any(lambda c: any(s.role == role for s in c.program.inputs))


@pytest.mark.thorough
def test_empty_and_0d_inputs_come_up() -> None:
    find_any(lambda c: any(0 in s.shape for s in c.program.inputs))
    find_any(lambda c: any(s.shape == () for s in c.program.inputs))


def test_one_call_of_four_dtypes_comes_up() -> None:
    def mixed(case: Case) -> bool:
        dtypes = {s.name: s.dtype for s in case.program.inputs}
        calls = statements(case.program.body)
        floats = [{dtypes.get(n) for a in s.args for n in refs(a)} for s in calls]
        return any(len(used & set(FLOAT_DTYPES)) >= 3 for used in floats)

    find_any(mixed)


def test_a_weight_is_used_twice() -> None:
    def twice(case: Case) -> bool:
        count = Counter(n for s in statements(case.program.body) for a in s.args for n in refs(a))
        return any(n > 1 for name, n in count.items() if name.startswith("w"))

    find_any(twice)


CONTEXTS = [
    *(Autocast(dtype=d) for d in ("bfloat16", "float16", "float32", None)),
    Autocast(dtype="bfloat16", enabled=False),
    Autocast(dtype="bfloat16", cache_enabled=False),
    Autocast(dtype="bfloat16", cache_enabled=True),
    NoGrad(),
    InferenceMode(),
    Checkpoint(),
    Checkpoint(use_reentrant=True),
]


@pytest.mark.parametrize("context", CONTEXTS, ids=str)
def test_every_kind_of_region_comes_up(context: Any) -> None:
    find_any(lambda c: context in regions(c.program.body))


@pytest.mark.parametrize("outer", [Autocast, NoGrad, InferenceMode, Checkpoint])
@pytest.mark.parametrize("inner", [Autocast, Checkpoint])
def test_regions_of_each_kind_nest(outer: type, inner: type) -> None:
    def nests(body: Any) -> bool:
        found = [n for n in body if isinstance(n, Region)]
        return any(
            (isinstance(n.context, outer) and any(isinstance(c, inner) for c in regions(n.body)))
            or nests(n.body)
            for n in found
        )

    find_any(lambda c: nests(c.program.body))


def test_three_levels_of_regions_come_up() -> None:
    def depth(body: Any) -> int:
        return max((1 + depth(n.body) for n in body if isinstance(n, Region)), default=0)

    find_any(lambda c: depth(c.program.body) == 3)


PLANS = [
    ("entry", "context"), ("entry", "decorator"), ("entry", "custom_fwd"),
    ("entry", "cast_inputs"), ("entry", "setup_context"),
    ("entry", "custom_op"), ("entry", "register_autocast"),
    ("backward", "none"), ("backward", "outside"), ("backward", "inside"), ("backward", "under"),
    ("second", "retain"), ("second", "double"), ("steps", 2), ("loop", "inside"),
    ("first_pass", "no_grad"), ("first_pass", "inference_mode"), ("calls", 2),
    ("checkpoint", "reentrant"), ("checkpoint", "non_reentrant"), ("checkpoint", "selective"),
    ("thread", "inside"),
    ("thread", "whole"), ("interrupted", True), ("scaler", True),
    ("transform", "grad"), ("transform", "vmap"), ("transform", "vmap_grad"),
    ("transform", "functionalize"), ("transform", "jvp"), ("transform", "forward_ad"),
    ("transform", "jacrev"), ("transform", "jacfwd"),
    ("reuse", "graph"), ("reuse", "region"), ("later", ((),)), ("later", ((F16,),)),
    ("later", ((Autocast(enabled=False),),)), ("later", ((NoGrad(), BF16),)),
    ("later", ((AutocastDType("float16"),),)), ("later", ((F16,), (F16,))),
    ("micro_batches", 2), ("hook", "tensor"), ("hook", "accumulated"),
    ("update", "copied"), ("update", "data"), ("update", "cast"), ("update", "replaced"),
    ("update", "frozen"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), PLANS)
def test_every_value_of_a_plan_comes_up(field: str, value: object) -> None:
    find_any(lambda c: getattr(c.plan, field) == value)


def test_every_field_of_a_plan_is_asked_for_here() -> None:
    fields = {f.name for f in msgspec.structs.fields(Plan)}
    rare = {"precision", "deterministic", "settings", "saved"}  # only some backends have a choice
    assert fields - {"contexts", "backward_context"} - rare == {field for field, _ in PLANS}


def test_what_only_some_backends_have_is_drawn_for_them_alone() -> None:
    assert {c.plan.precision for c in many()} == {"default"}
    assert {c.plan.deterministic for c in many()} == {False}
    assert {c.plan.settings for c in many()} == {()}
    assert {c.plan.saved for c in many()} == {False}
    found = list(drawn(60, precisions=("default", "high", "highest"), varies=True, saves=8))
    assert {c.plan.precision for c in found} == {"default", "high", "highest"}
    assert {c.plan.deterministic for c in found} == {False, True}
    assert {c.plan.saved for c in found} == {False, True}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_program_that_is_called_again_has_an_op_that_tells_the_state(device: str) -> None:
    lowered = {op.name for op in usable(CATALOGUE.values(), device) if lowers(op, device)}
    for one in drawn(60, device, again=1):
        assert one.plan.later
        assert lowered & {s.op for s in statements(one.program.body)}
        # A nested region may write nothing that it is given.
        writes = any(spec.role == "buffer" for spec in one.program.inputs)
        assert one.plan.reuse != "region" or not writes
    assert not any(one.plan.later for one in drawn(60, device, again=0))


def lowers(op: Op, device: str) -> bool:
    rules = load_table(device).rules
    names = [name.removeprefix("aten::") for name in op.overloads]
    first = next((rules[name] for name in names if name in rules), None)
    return first is not None and first.policy is Policy.LOWER_PRECISION_FP


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 4])
def test_every_depth_of_contexts_comes_up(depth: int) -> None:
    find_any(lambda c: len(c.plan.contexts) == depth)


# -- idioms --------------------------------------------------------------------------------------


def made_by(case: Case, name: str) -> str:
    """Return the op that makes a value, "" for an input."""
    return next((s.op for s in statements(case.program.body) if name in s.outputs), "")


@pytest.mark.parametrize("device", tabled_devices())
@pytest.mark.parametrize("idiom", range(len(IDIOMS)))
def test_every_stage_of_an_idiom_has_ops_on_every_device(device: str, idiom: int) -> None:
    found = stages(usable(CATALOGUE.values(), device), idiom)
    assert len(found) == len(IDIOMS[idiom].stages)
    assert all(len(ops) > 3 for ops in found)
    assert 8 % len(found) == 0  # the statements of a program share eight ops


def test_ops_that_lack_a_stage_are_drawn_from_without_idioms() -> None:
    for idiom in range(len(IDIOMS)):
        assert stages([CATALOGUE["mm"], CATALOGUE["cumsum"]], idiom) == []
    ops = {s.op for c in drawn(200, ops=["mm", "cumsum"]) for s in statements(c.program.body)}
    assert ops == {"mm", "cumsum"}


def test_a_value_is_compared_with_its_extreme() -> None:
    def compared(case: Case) -> bool:
        calls = list(statements(case.program.body))
        extremes = {n: set(uses(s)) for s in calls if s.op in ("amax", "amin") for n in s.outputs}
        return any(
            s.op in ("eq", "ge", "le")
            and any(extremes.get(n, set()) & set(uses(s)) for n in uses(s))
            for s in calls
        )

    find_any(compared)


def test_a_constant_is_counted_in_a_dtype_that_is_asked_for() -> None:
    def counted(case: Case) -> bool:
        sums = [s for s in statements(case.program.body) if s.op == "cumsum"]
        sums = [s for s in sums if "dtype" in dict(s.kwargs)]
        return any(
            made_by(case, n) in ("ones_like", "zeros_like", "full_like")
            for s in sums
            for n in uses(s)
        )

    find_any(counted)


def test_a_norm_follows_a_layer() -> None:
    def follows(case: Case) -> bool:
        norms = [s for s in statements(case.program.body) if s.op == "layer_norm"]
        return any(made_by(case, n) in ("linear", "matmul") for s in norms for n in uses(s))

    find_any(follows)


def islands(case: Case) -> Iterator[Region]:
    def walk(body: Sequence[Node]) -> Iterator[Region]:
        for node in body:
            if isinstance(node, Region):
                if isinstance(node.context, Autocast) and not node.context.enabled:
                    yield node
                yield from walk(node.body)

    return walk(case.program.body)


def test_a_layer_has_a_float32_weight_in_an_island_that_is_entered_with_a_cast() -> None:
    def kept_in_float32(case: Case) -> bool:
        weights = {
            s.name for s in case.program.inputs if (s.role, s.dtype) == ("weight", "float32")
        }
        return any(
            calls[0].op == "float"
            and any(s.op in ("linear", "matmul", "mm") and set(uses(s)) & weights for s in calls)
            for island in islands(case)
            for calls in [list(statements(island.body))]
        )

    find_any(kept_in_float32)


@pytest.mark.thorough
def test_an_island_draws_no_cast_that_was_not_asked_for() -> None:
    ops = sorted({name for stage in stages(list(CATALOGUE.values()), 2) for name in names(stage)})
    cases = list(drawn(300, ops=ops, fused=True))
    assert any(True for case in cases for _ in islands(case))
    assert {s.op for case in cases for s in statements(case.program.body)} <= set(ops)


def names(ops: Sequence[Op]) -> list[str]:
    return [op.name for op in ops]


def test_a_value_of_16_bits_is_scaled_as_losses_are() -> None:
    def scaled(case: Case) -> bool:
        halves = {n for s in statements(case.program.body) if s.op == "half" for n in s.outputs}
        halves |= {s.name for s in case.program.inputs if s.dtype == "float16"}
        calls = [s for s in statements(case.program.body) if s.op == "mul.scalar"]
        return any(s.args[1] == Float((65536.0).hex()) and set(uses(s)) & halves for s in calls)

    find_any(scaled)


def test_an_idiom_has_the_dtypes_and_values_that_it_is_about() -> None:
    for idiom in IDIOMS:
        assert {d for palette in idiom.floats for d in palette} <= set(FLOAT_DTYPES)
        assert {d for domains in idiom.domains for d in domains} <= set(DOMAINS)
    rounded = IDIOMS[0].floats
    assert all(set(palette) & {"bfloat16", "float16"} for palette in rounded)


@pytest.mark.thorough
def test_backends_that_fuse_get_more_chains_and_fewer_outputs() -> None:
    def last_only(cases: list[Case]) -> int:
        return sum(c.program != returning_all(c.program) for c in cases)

    def of_idioms(cases: list[Case]) -> int:
        ops = {
            op.name
            for i in range(len(IDIOMS))
            for s in stages(list(CATALOGUE.values()), i)
            for op in s
        }
        return sum({s.op for s in statements(c.program.body)} <= ops for c in cases)

    plain, fused = list(drawn(400)), list(drawn(400, fused=True))
    assert last_only(fused) > 1.4 * last_only(plain)
    assert of_idioms(fused) > 1.2 * of_idioms(plain)


# -- what is drawn runs --------------------------------------------------------------------------


@pytest.mark.thorough
def test_most_draws_run_to_their_end() -> None:
    raised: Counter[str] = Counter()
    with quiet():
        for case in many()[:300]:
            seen = eager().run([case])[0]
            if seen.raised is not None:
                raised[seen.raised.text[:60]] += 1
    assert sum(raised.values()) < 75, raised.most_common(10)


def test_a_custom_op_in_a_thread_of_its_own_writes_none_of_its_inputs() -> None:
    """It declares that it does not, and a case that says otherwise cannot be read again."""
    for entry in ("custom_op", "register_autocast"):
        plan = Plan(contexts=(Autocast(),), entry=entry, thread="inside")  # type: ignore[arg-type]
        for seed in range(40):
            source = random.Random(seed).randbytes
            program = draw_program(source, "cpu", plan=plan, focus=[CATALOGUE["abs"]])
            assert all(spec.role != "buffer" for spec in program.inputs), seed


def test_drawn_programs_write_only_buffers_and_values_of_their_own() -> None:
    cases = [*drawn(300), *drawn(300, focus=["einsum", "getitem.tensor", "getitem.last", "exp"])]
    assert not [c.id for c in cases if wrongly_written(c.program, CATALOGUE)]
    assert any(s.form == "inplace" for c in cases for s in statements(c.program.body))


def test_draws_depend_on_the_seed_alone() -> None:
    assert [c.id for c in drawn(20)] == [c.id for c in drawn(20)]
    assert [c.id for c in drawn(20)] != [c.id for c in drawn(20, seed=1)]


@pytest.mark.thorough
def test_some_programs_return_only_what_nothing_reads() -> None:
    """A compiler may keep the others as it likes. Most return all, which shows where a bug is."""
    programs = [case.program for case in drawn(400)]
    partial = [p for p in programs if p != returning_all(p)]
    assert 40 < len(partial) < 140
    for program in partial:
        read = {name for s in statements(program.body) for name in uses(s)}
        assert not read & set(program.outputs)
        assert program == returning_last(returning_all(program))


def test_an_op_that_this_torch_lacks_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = [CATALOGUE["mm"], CATALOGUE["prod"]]
    assert drawing.usable(ops, "cpu") == tuple(ops)
    monkeypatch.delattr(torch, "mm")
    drawing._torch_has.cache_clear()
    try:
        assert [op.name for op in drawing.usable(ops, "cpu")] == ["prod"]
    finally:
        drawing._torch_has.cache_clear()


def test_a_choice_is_in_proportion_to_its_bytes_and_takes_none_where_there_is_no_choice() -> None:
    asked: list[int] = []

    def source(count: int) -> bytes:
        asked.append(count)
        return bytes(range(250, 250 + count))

    assert digits(source, 1, 2, 256, 257, 1, 65536) == [0, 1, 251, 253, 0, 0xFEFF]
    assert [integer(source, n) for n in (1, 2, 257)] == [0, 1, 250 * 257 + 251 >> 8]
    assert asked == [6, 0, 1, 2]
