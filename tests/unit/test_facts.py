"""A case counts for a promise that it could have falsified, and for no other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.program import (
    Autocast,
    Checkpoint,
    DType,
    Float,
    Items,
    Node,
    Program,
    Ref,
    Region,
    Statement,
    TensorSpec,
    statements,
)
from amp_fuzz.records.facts import Reached, Seen, facts
from amp_fuzz.records.promises import promises

X, W = TensorSpec("x0", (2, 2), "float32"), TensorSpec("w1", (2, 2), "float32", role="weight")
H = TensorSpec("x2", (2, 2), "bfloat16")
MM = Statement("mm", "function", (Ref("x0"), Ref("w1")), outputs=("v0",))
LOWER, SETS = {"mm": "lower_precision_fp"}, {"softmax.int": "fp32_set_opt_dtype"}
RULED = {"mm": LOWER, "softmax": SETS, "softmin": SETS, "cat": {"cat": "promote"}}
BF16, OFF = Autocast(dtype="bfloat16"), Autocast(enabled=False)


def reached(*dtypes: str, cached: bool = False, policy: str = "lower_precision_fp") -> Reached:
    """Return a call of mm that casts its float32 tensors to bfloat16."""
    casts = [(i, d, "bfloat16", cached) for i, d in enumerate(dtypes) if d == "float32"]
    return Reached("cpu", "mm", policy, dtypes, tuple(casts))


CAST = reached("float32", "float32")


def case(*body: Node, **plan: Any) -> Case:
    outputs = tuple(n for node in body if isinstance(node, Statement) for n in node.outputs)
    whole = Plan(**{"contexts": (BF16,), "backward": "none", **plan})
    return Case(Program((X, W, H), body or (MM,), outputs or ("v0",)), whole)


def seen(
    one: Case,
    *kernels: Reached,
    implements: Sequence[str] = ("backend=torch",),
    device: str = "cpu",
    values: Mapping[str, str] | None = None,
    ruled: Mapping[str, Mapping[str, str]] | None = None,
    **more: bool,
) -> frozenset[str]:
    made = {name: "float32" for call in statements(one.program.body) for name in call.outputs}
    dtypes = {spec.name: spec.dtype for spec in one.program.inputs} | (values or made)
    rules = RULED if ruled is None else ruled
    return facts(Seen(one, device, implements, kernels, rules, dtypes, **more))


def counted(*args: Any, **kwargs: Any) -> set[str]:
    return {*promises().falsifiable(seen(*args, **kwargs))}


def test_a_cast_could_have_falsified_the_op_of_its_device_alone() -> None:
    found = counted(case(), CAST)
    assert "cpu:mm" in found
    assert "autocast.op-dtype" in found
    assert not {"cuda:mm", "xpu:mm", "cpu:bmm"} & found


def test_a_call_that_is_the_same_without_autocast_counts_for_nothing() -> None:
    """A seeded fault: counting each kernel that is reached would count this one."""
    found = counted(case(), reached("bfloat16", "bfloat16"))
    assert not {"cpu:mm", "autocast.op-dtype", "aten.lower"} & found


@pytest.mark.parametrize("values", [{"v1": "float32"}, {"v0": "int64"}, {"v0": "bool"}])
def test_a_value_that_is_not_compared_as_a_float_counts_for_nothing(values: Any) -> None:
    """A seeded fault: what is only computed with may be rounded again before it is seen."""
    assert "cpu:mm" not in counted(case(), CAST, values=values)
    assert "cpu:mm" in counted(case(), CAST, values={"v0": "bfloat16"})


def test_a_kernel_counts_where_the_program_calls_its_op_under_autocast() -> None:
    """In another thread, say, only the backward pass reaches it."""
    assert "cpu:mm" not in counted(case(thread="inside"), CAST)
    assert "cpu:mm" not in counted(case(msgspec.structs.replace(MM, form="out")), CAST)
    assert "cpu:mm" not in counted(case(), CAST, ruled={"mm": {"matmul": "lower_precision_fp"}})


def test_setting_a_dtype_matters_for_16_bits_alone() -> None:
    half = Reached("cuda", "softmax.int", "fp32_set_opt_dtype", ("bfloat16",), sets=True)
    full = half._replace(dtypes=("float32",))
    one = case(Statement("softmax", "function", (Ref("x2"),), outputs=("v0",)))
    assert "cuda:softmax" in counted(one, half, device="cuda")
    assert "cuda:softmax" not in counted(one, full, device="cuda")


def test_a_name_that_stands_for_some_calls_only_needs_the_call() -> None:
    kernel = Reached("cuda", "softmax.int", "fp32_set_opt_dtype", ("bfloat16",), sets=True)
    ops = {
        op: counted(
            case(Statement(op, "function", (Ref("x2"),), outputs=("v0",))), kernel, device="cuda"
        )
        for op in ("softmax", "softmin")
    }
    assert "cuda:softmin" in ops["softmin"]
    assert "cuda:softmin" not in ops["softmax"]


def test_a_case_that_raised_counts_for_promises_about_errors_alone() -> None:
    found = counted(case(), CAST, raised=True)
    assert found == {"autocast-code.restored"}
    banned = Reached("cuda", "binary_cross_entropy", "banned", ("float32", "float32"))
    assert "amp.banned" in counted(case(), banned, device="cuda", raised=True)
    assert "amp.banned" not in counted(case(), CAST, device="cuda", raised=True)


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        ({"entry": "decorator"}, "autocast.decorator"),
        ({"thread": "whole"}, "autocast.thread-own"),
        ({"entry": "custom_fwd", "backward": "outside"}, "custom.backward"),
        ({"checkpoint": "reentrant", "backward": "outside"}, "checkpoint.no-grad"),
        ({"scaler": True, "backward": "outside"}, "scaler.step"),
        ({"backward": "outside", "second": "retain"}, "autograd.retained"),
        ({"contexts": (Autocast(),)}, "autocast.default-cpu"),
        ({"contexts": (BF16, Autocast())}, "autocast.default-asked"),
    ],
)
def test_an_ingredient_of_the_plan_is_needed(plan: Any, name: str) -> None:
    assert name in counted(case(**plan), CAST)
    assert name not in counted(case(), CAST)


def test_without_a_cast_the_ingredient_shows_nothing() -> None:
    one = case(entry="decorator")
    assert "autocast.decorator" not in counted(one, reached("bfloat16", "bfloat16"))


def test_gradients_need_a_weight_and_a_backward_pass() -> None:
    trained = case(backward="outside")
    assert "autocast.backward-dtype" in counted(trained, CAST)
    bare = trained.with_program(inputs=(X, msgspec.structs.replace(W, role="input"), H))
    assert "autocast.backward-dtype" not in counted(bare, CAST)
    assert "autocast.backward-dtype" not in counted(case(), CAST)


# -- regions --------------------------------------------------------------------------------------

INNER = Statement("mm", "function", (Ref("x0"), Ref("w1")), outputs=("v1",))
NESTED = case(MM, Region(OFF, (INNER,)))


def test_a_disabled_block_counts_if_its_result_shows_that_nothing_was_cast() -> None:
    shown = counted(NESTED, CAST, values={"v0": "bfloat16", "v1": "float32"})
    assert {"autocast.nested-off", "autocast.off-dtype", "autocast.enabled"} <= shown
    same = counted(NESTED, CAST, values={"v0": "bfloat16", "v1": "bfloat16"})
    assert not {"autocast.nested-off", "autocast.enabled"} & same
    unseen = counted(NESTED, CAST, values={"v0": "bfloat16"})  # no output, so no dtype is known
    assert "autocast.nested-off" not in unseen


def test_the_outer_block_is_on_again_only_behind_the_inner_one() -> None:
    after = Statement("mm", "function", (Ref("x0"), Ref("w1")), outputs=("v2",))
    assert "autocast.on-again" in counted(case(MM, Region(OFF, (INNER,)), after), CAST)
    assert "autocast.on-again" not in counted(NESTED, CAST)


def test_a_value_of_16_bits_is_used_behind_the_block() -> None:
    add = Statement("add", "function", (Ref("v0"), Ref("x0")), outputs=("v1",))
    one = case(Region(BF16, (MM,)), add, contexts=())
    values = {"v0": "bfloat16", "v1": "float32"}
    assert {"autocast.after", "amp.cpu-native"} <= counted(one, CAST, values=values)
    assert "autocast.after" not in counted(one, CAST, values={**values, "v0": "float32"})


def test_a_context_of_another_device_casts_nothing_here() -> None:
    one = case(contexts=(Autocast(device="cuda", dtype="float16"),))
    assert "autocast.device-type" in counted(one, values={"v0": "float32"})
    assert "autocast.device-type" not in counted(case(), CAST, values={"v0": "bfloat16"})


def test_a_dtype_that_a_context_refuses_leaves_it_off() -> None:
    one = case(contexts=(Autocast(dtype="float64"),))
    assert "autocast-code.other-dtype" in counted(one, values={"v0": "float32"})
    assert "refused" not in seen(one, CAST, device="cuda", values={"v0": "float64"})


# -- forms and calls ------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["inplace", "out"])
def test_a_form_that_is_not_cast_shows_in_its_result(form: str) -> None:
    one = case(msgspec.structs.replace(MM, form=form))
    assert f"amp.{form}" in counted(one, values={"v0": "float32"})
    assert f"amp.{form}" not in counted(one, values={"v0": "bfloat16"})
    assert f"amp.{form}" not in counted(case(), CAST, values={"v0": "float32"})


def test_a_form_that_is_cast() -> None:
    method = case(msgspec.structs.replace(MM, form="method"))
    assert {"amp.methods", "amp.cpu-methods"} <= counted(method, CAST)
    assert not {"amp.functions", "amp.cpu-functions", "amp.cuda-methods"} & counted(method, CAST)


def test_a_dtype_argument_counts_if_autocast_would_choose_another() -> None:
    def total(dtype: str) -> set[str]:
        call = Statement("prod", "function", (Ref("x0"),), (("dtype", DType(dtype)),), ("v0",))
        return counted(case(call), values={"v0": dtype}, ruled={"prod": {"prod": "fp32"}})

    assert "amp.dtype-argument" in total("float64")
    assert "amp.dtype-argument" not in total("float32")


def test_an_op_that_is_not_listed_runs_in_the_dtype_of_its_inputs() -> None:
    sin = Statement("sin", "function", (Ref("v0"),), outputs=("v1",))
    values = {"v0": "bfloat16", "v1": "bfloat16"}
    found = counted(case(MM, sin), CAST, values=values)
    assert {"amp.cpu-unlisted", "amp.cpu-downstream", "aten.fallthrough"} <= found
    assert "amp.cpu-unlisted" not in counted(case(MM, sin, contexts=()), values=values)


def test_dtypes_of_the_tensors_that_a_kernel_was_given() -> None:
    assert "autocast.mixed-inputs" in counted(case(), reached("float32", "bfloat16"))
    assert "autocast.mixed-inputs" not in counted(case(), CAST)
    assert "amp.float64" in counted(case(), reached("float64", "float32"))
    assert "amp.not-floating" in counted(case(), reached("int64", "float32"))


def test_what_promotes_depends_on_the_inputs() -> None:
    low = Reached("cpu", "cat", "promote", ("bfloat16", "bfloat16"))
    wide = Reached(
        "cpu", "cat", "promote", ("bfloat16", "float32"), ((0, "bfloat16", "float32", False),)
    )
    one = case(Statement("cat", "function", (Items((Ref("x2"), Ref("x0"))),), outputs=("v0",)))
    assert "amp.cpu-promote-low" in counted(one, low)
    assert "amp.cpu-promote-float32" not in counted(one, low)
    assert {"amp.cpu-promote-float32", "cpu:cat", "aten.optional"} <= counted(one, wide)


def test_the_cache_serves_only_what_is_cast_twice_in_one_block() -> None:
    weight = reached("bfloat16", "float32", cached=True)
    assert "autocast.cache" in counted(case(), weight, weight)
    assert "autocast.cache" not in counted(case(), weight)
    anew = case(steps=2, backward="outside")
    assert "autocast.cache" not in counted(anew, weight, weight)
    assert "aten.cleared" in counted(anew, weight, weight)
    inside = case(steps=2, backward="outside", loop="inside")
    assert "autocast.cache" in counted(inside, weight, weight)
    again = case(checkpoint="reentrant", backward="outside")
    assert "autocast.cache" not in counted(again, weight, weight)
    assert "autocast.cache" in counted(again, weight, weight, weight)
    decorated = case(entry="decorator", calls=2)
    assert "autocast.cache" not in counted(decorated, weight, weight)


def test_a_scaler_skips_only_if_a_gradient_overflows() -> None:
    one = case(scaler=True, backward="outside")
    assert "scaler.skip" in counted(one, CAST, overflow=True)
    assert "scaler.skip" not in counted(one, CAST)


def test_a_backend_counts_for_its_own_promises() -> None:
    one = case(backward="outside")
    assert "compile.off" in counted(one, CAST, implements=("backend=compile", "told"))
    assert "compile.off" not in counted(one, CAST, implements=("backend=compile", "untold"))
    assert "compile.off" not in counted(one, CAST)
    assert "export.eager" in counted(one, CAST, implements=("backend=export",))


def test_a_checkpoint_in_the_program_counts() -> None:
    one = case(Region(Checkpoint(), (MM,)), backward="outside").with_program(outputs=("v0",))
    assert "checkpoint.autocast" in counted(one, CAST)


def test_arguments_that_are_no_tensors() -> None:
    call = Statement(
        "addmm",
        "function",
        (Ref("x0"), Ref("x0"), Ref("w1")),
        (("beta", Float("0x1p+1")),),
        ("v0",),
    )
    assert "arguments" in seen(case(call), CAST, ruled={"addmm": LOWER})
    assert "arguments" not in seen(case(), CAST)


# -- bodies without autocast ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        ({"thread": "inside"}, "autocast.thread"),
        ({"entry": "cast_inputs"}, "custom.disabled"),
        ({"entry": "register_autocast"}, "register.disabled"),
    ],
)
def test_a_body_without_autocast_shows_in_its_result(plan: Any, name: str) -> None:
    assert name in counted(case(**plan), values={"v0": "float32"})
    assert name not in counted(case(**plan), values={"v0": "bfloat16"})
    assert name not in counted(case(**plan, contexts=(OFF,)), values={"v0": "float32"})
    assert name not in counted(case(), CAST, values={"v0": "float32"})


def test_inputs_are_cast_where_an_input_has_16_bits() -> None:
    one = case(entry="register_autocast")
    assert {"register.casts", "register.result"} <= counted(one)
    wide = one.with_program(inputs=(X, W))
    assert "register.casts" not in counted(wide)
    off = case(entry="register_autocast", contexts=(OFF,))
    assert "register.outside" in counted(off)
    assert "register.casts" not in counted(off)
    other = case(entry="register_autocast", contexts=(Autocast(device="cuda"),))
    assert "register.device" in counted(other)
    assert "register.device" not in counted(one)
