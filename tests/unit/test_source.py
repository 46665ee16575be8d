"""The source of a case says what its plan says, and no text of a case file becomes code."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
import torch

from amp_fuzz import catalogue
from amp_fuzz.backends.source import argument, case_source, driver_source, program_source
from amp_fuzz.cases.case import Update, loads
from amp_fuzz.cases.program import (
    Autocast,
    AutocastDType,
    Checkpoint,
    DType,
    Float,
    InferenceMode,
    Items,
    NoGrad,
    ProgramError,
    Ref,
    Statement,
)
from amp_fuzz.catalogue import CATALOGUE
from tests.helpers import BF16, F16, call, case, drawn, eager, program, under, x

INPUTS = [x("x0", 2, 2), x("w1", 2, 2), x("b2", 2, 2)]


# -- programs ------------------------------------------------------------------------------------


def test_a_program_is_a_function_of_its_inputs() -> None:
    text = program_source(
        program(
            INPUTS,
            call("mm", "x0", "w1"),
            call("relu", "b2", to="v1", form="inplace"),
            under(
                Autocast(device="cpu", dtype="float16", enabled=False, cache_enabled=True),
                under(NoGrad(), call("add", "v0", 0.5, to="v2", form="operator")),
                under(InferenceMode(), call("max.dim", "v0", -1, to="v3 _")),
            ),
            call("split", "v0", 1, to="v4 v5"),
            call("chunk", "v0", 1, to="v6"),
        )
    )
    assert (
        text
        == """\
def program(x0, w1, b2):
    v0 = torch.mm(x0, w1)
    v1 = b2.relu_()
    with autocast('cpu', dtype=torch.float16, enabled=False, cache_enabled=True):
        with torch.no_grad():
            v2 = v0 + 0.5
        with torch.inference_mode():
            v3, _ = torch.max(v0, -1)
    v4, v5 = torch.split(v0, 1)
    v6, = torch.chunk(v0, 1)
    return v0, v1, v2, v3, v4, v5, v6
"""
    )


def test_a_checkpoint_is_a_function_that_is_given_all_that_it_reads() -> None:
    text = program_source(
        program(
            INPUTS,
            call("mm", "x0", "w1"),
            under(
                Checkpoint(use_reentrant=True),
                call("mm", "v0", "w1", to="v1"),
                under(BF16, call("add", "v1", "v0", to="v2")),
                under(Checkpoint(), call("relu", "v2", to="v3")),
            ),
            under(Checkpoint(selective=True), call("relu", "v3", to="v4")),
        )
    )
    assert (
        text
        == """\
def program(x0, w1, b2):
    v0 = torch.mm(x0, w1)
    def block0(v0, w1):
        v1 = torch.mm(v0, w1)
        with autocast(device, dtype=torch.bfloat16):
            v2 = torch.add(v1, v0)
        def block1(v2):
            v3 = torch.relu(v2)
            return v3,
        v3, = checkpoint(block1, v2, use_reentrant=False)
        return v1, v2, v3
    v1, v2, v3 = checkpoint(block0, v0, w1, use_reentrant=True)
    def block2(v3):
        v4 = torch.relu(v3)
        return v4,
    v4, = checkpoint(block2, v3, use_reentrant=False, context_fn=saving_products)
    return v0, v1, v2, v3, v4
"""
    )


def test_marks_number_the_statements() -> None:
    text = program_source(
        program(INPUTS, call("mm", "x0", "w1"), under(BF16, call("relu", "v0", to="v1"))),
        marks=True,
    )
    assert re.findall(r"mark\((\d+), locals\(\)\)\n +(v\d)", text) == [("0", "v0"), ("1", "v1")]


@pytest.mark.parametrize(
    ("arg", "text"),
    [
        (Ref("v3"), "v3"),
        (DType("bfloat16"), "torch.bfloat16"),
        (Items((Ref("x0"), 1, Items((2,)))), "[x0, 1, [2]]"),
        (True, "True"),
        (None, "None"),
        (-3, "-3"),
        ("ij,jk->ik", "'ij,jk->ik'"),
        (Float((0.1).hex()), "0.1"),
        (Float((-0.0).hex()), "-0.0"),
        (Float("nan"), 'float("nan")'),
        (Float("-inf"), 'float("-inf")'),
        (Float((5e-324).hex()), "5e-324"),
    ],
)
def test_an_argument_is_written_like_this(arg: Any, text: str) -> None:
    assert argument(arg) == text


# -- plans ---------------------------------------------------------------------------------------

DRIVERS: list[tuple[dict[str, Any], str]] = [
    (
        {},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    with autocast(device, dtype=torch.bfloat16):
        outputs = program(x0, w1, b2.clone())
        observe("v0", outputs[0])
    starts = trains(outputs)
    cotangents = [cotangent(o) for o in starts]
    if starts: torch.autograd.backward(starts, cotangents)
    observe("w1.grad", w1.grad)
""",
    ),
    (
        {"contexts": ()},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    outputs = program(x0, w1, b2.clone())
    observe("v0", outputs[0])
    starts = trains(outputs)
    cotangents = [cotangent(o) for o in starts]
    if starts: torch.autograd.backward(starts, cotangents)
    observe("w1.grad", w1.grad)
""",
    ),
    (
        {
            "contexts": (
                F16,
                Autocast(device="cpu", dtype="bfloat16", enabled=False, cache_enabled=False),
            )
        },
        """\
def drive(x0, w1, b2):
    weights = [w1]
    with autocast(device, dtype=torch.float16):
        with autocast('cpu', dtype=torch.bfloat16, enabled=False, cache_enabled=False):
            outputs = program(x0, w1, b2.clone())
            observe("v0", outputs[0])
    starts = trains(outputs)
    cotangents = [cotangent(o) for o in starts]
    if starts: torch.autograd.backward(starts, cotangents)
    observe("w1.grad", w1.grad)
""",
    ),
    (
        {"entry": "decorator"},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    entered = autocast(device, dtype=torch.bfloat16)(program)
    outputs = entered(x0, w1, b2.clone())
    observe("v0", outputs[0])
    starts = trains(outputs)
    cotangents = [cotangent(o) for o in starts]
    if starts: torch.autograd.backward(starts, cotangents)
    observe("w1.grad", w1.grad)
""",
    ),
    *(
        (
            {"entry": entry},
            f"""\
def drive(x0, w1, b2):
    weights = [w1]
    with autocast(device, dtype=torch.bfloat16):
        entered = {made}
        outputs = entered(x0, w1, b2.clone())
        observe("v0", outputs[0])
    starts = trains(outputs)
    cotangents = [cotangent(o) for o in starts]
    if starts: torch.autograd.backward(starts, cotangents)
    observe("w1.grad", w1.grad)
""",
        )
        for entry, made in (
            ("custom_fwd", "as_function(program, device, custom_fwd, custom_bwd)"),
            ("cast_inputs", "as_function(program, device, custom_fwd, custom_bwd, torch.float32)"),
            ("setup_context", "as_function_apart(program, device, custom_fwd, custom_bwd)"),
            ("custom_op", "as_custom_op(program, device, custom_op)"),
            ("register_autocast", "as_custom_op(program, device, custom_op, torch.float32)"),
        )
    ),
    (
        {"entry": "custom_op", "calls": 2, "backward": "none"},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    with autocast(device, dtype=torch.bfloat16):
        entered = as_custom_op(program, device, custom_op)
        outputs = entered(x0, w1, b2.clone())
        observe("call0.v0", outputs[0])
        outputs = program(x0, w1, b2.clone())
        observe("call1.v0", outputs[0])
""",
    ),
    (
        {"backward": "none"},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    with autocast(device, dtype=torch.bfloat16):
        outputs = program(x0, w1, b2.clone())
        observe("v0", outputs[0])
""",
    ),
    (
        {"backward": "inside"},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    with autocast(device, dtype=torch.bfloat16):
        outputs = program(x0, w1, b2.clone())
        observe("v0", outputs[0])
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        if starts: torch.autograd.backward(starts, cotangents)
        observe("w1.grad", w1.grad)
""",
    ),
    (
        {"backward": "under", "backward_context": F16},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    with autocast(device, dtype=torch.bfloat16):
        outputs = program(x0, w1, b2.clone())
        observe("v0", outputs[0])
    with autocast(device, dtype=torch.float16):
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        if starts: torch.autograd.backward(starts, cotangents)
        observe("w1.grad", w1.grad)
""",
    ),
    (
        {"second": "retain"},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    with autocast(device, dtype=torch.bfloat16):
        outputs = program(x0, w1, b2.clone())
        observe("v0", outputs[0])
    starts = trains(outputs)
    cotangents = [cotangent(o) for o in starts]
    if starts: torch.autograd.backward(starts, cotangents, retain_graph=True)
    observe("w1.grad", w1.grad)
    w1.grad = None
    if starts: torch.autograd.backward(starts, cotangents)
    observe("again.w1.grad", w1.grad)
""",
    ),
    (
        {"second": "double"},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    with autocast(device, dtype=torch.bfloat16):
        outputs = program(x0, w1, b2.clone())
        observe("v0", outputs[0])
    starts = trains(outputs)
    cotangents = [cotangent(o) for o in starts]
    grads = torch.autograd.grad(starts, weights, cotangents, create_graph=True, allow_unused=True) if starts else [None] * len(weights)
    observe("w1.grad", grads[0])
    seconds = trains([g for g in grads if g is not None])
    if seconds: torch.autograd.backward(seconds, [cotangent(g) for g in seconds])
    observe("second.w1.grad", w1.grad)
""",  # noqa: E501
    ),
    (
        {"steps": 2},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    with autocast(device, dtype=torch.bfloat16):
        outputs = program(x0, w1, b2.clone())
        observe("step0.v0", outputs[0])
    starts = trains(outputs)
    cotangents = [cotangent(o) for o in starts]
    if starts: torch.autograd.backward(starts, cotangents)
    observe("step0.w1.grad", w1.grad)
    nudge(weights)
    w1.grad = None
    with autocast(device, dtype=torch.bfloat16):
        outputs = program(x0, w1, b2.clone())
        observe("step1.v0", outputs[0])
    starts = trains(outputs)
    cotangents = [cotangent(o) for o in starts]
    if starts: torch.autograd.backward(starts, cotangents)
    observe("step1.w1.grad", w1.grad)
    nudge(weights)
    w1.grad = None
""",
    ),
    (
        {"steps": 2, "loop": "inside", "backward": "inside"},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    with autocast(device, dtype=torch.bfloat16):
        outputs = program(x0, w1, b2.clone())
        observe("step0.v0", outputs[0])
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        if starts: torch.autograd.backward(starts, cotangents)
        observe("step0.w1.grad", w1.grad)
        nudge(weights)
        w1.grad = None
        outputs = program(x0, w1, b2.clone())
        observe("step1.v0", outputs[0])
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        if starts: torch.autograd.backward(starts, cotangents)
        observe("step1.w1.grad", w1.grad)
        nudge(weights)
        w1.grad = None
""",
    ),
    (
        {"micro_batches": 2, "steps": 2},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    with autocast(device, dtype=torch.bfloat16):
        outputs = program(x0, w1, b2.clone())
        observe("step0.batch0.v0", outputs[0])
    starts = trains(outputs)
    cotangents = [cotangent(o) for o in starts]
    if starts: torch.autograd.backward(starts, cotangents)
    observe("step0.batch0.w1.grad", w1.grad)
    x0 = halved(x0)
    b2 = halved(b2)
    with autocast(device, dtype=torch.bfloat16):
        outputs = program(x0, w1, b2.clone())
        observe("step0.batch1.v0", outputs[0])
    starts = trains(outputs)
    cotangents = [cotangent(o) for o in starts]
    if starts: torch.autograd.backward(starts, cotangents)
    observe("step0.batch1.w1.grad", w1.grad)
    nudge(weights)
    w1.grad = None
    with autocast(device, dtype=torch.bfloat16):
        outputs = program(x0, w1, b2.clone())
        observe("step1.batch0.v0", outputs[0])
    starts = trains(outputs)
    cotangents = [cotangent(o) for o in starts]
    if starts: torch.autograd.backward(starts, cotangents)
    observe("step1.batch0.w1.grad", w1.grad)
    x0 = halved(x0)
    b2 = halved(b2)
    with autocast(device, dtype=torch.bfloat16):
        outputs = program(x0, w1, b2.clone())
        observe("step1.batch1.v0", outputs[0])
    starts = trains(outputs)
    cotangents = [cotangent(o) for o in starts]
    if starts: torch.autograd.backward(starts, cotangents)
    observe("step1.batch1.w1.grad", w1.grad)
    nudge(weights)
    w1.grad = None
""",
    ),
    (
        {"micro_batches": 2, "loop": "inside", "backward": "inside"},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    with autocast(device, dtype=torch.bfloat16):
        outputs = program(x0, w1, b2.clone())
        observe("batch0.v0", outputs[0])
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        if starts: torch.autograd.backward(starts, cotangents)
        observe("batch0.w1.grad", w1.grad)
        x0 = halved(x0)
        b2 = halved(b2)
        outputs = program(x0, w1, b2.clone())
        observe("batch1.v0", outputs[0])
        starts = trains(outputs)
        cotangents = [cotangent(o) for o in starts]
        if starts: torch.autograd.backward(starts, cotangents)
        observe("batch1.w1.grad", w1.grad)
""",
    ),
    (
        {"hook": "tensor", "second": "retain"},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    watched = [with_hook(w1)]
    with autocast(device, dtype=torch.bfloat16):
        outputs = program(x0, w1, b2.clone())
        observe("v0", outputs[0])
    starts = trains(outputs)
    cotangents = [cotangent(o) for o in starts]
    if starts: torch.autograd.backward(starts, cotangents, retain_graph=True)
    observe("hook.w1.grad", watched[0][0])
    observe("w1.grad", w1.grad)
    w1.grad = None
    if starts: torch.autograd.backward(starts, cotangents)
    observe("again.hook.w1.grad", watched[0][0])
    observe("again.w1.grad", w1.grad)
""",
    ),
    (
        {"hook": "accumulated"},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    watched = [with_post_hook(w1)]
    with autocast(device, dtype=torch.bfloat16):
        outputs = program(x0, w1, b2.clone())
        observe("v0", outputs[0])
    starts = trains(outputs)
    cotangents = [cotangent(o) for o in starts]
    if starts: torch.autograd.backward(starts, cotangents)
    observe("hook.w1.grad", watched[0][0])
    observe("w1.grad", w1.grad)
""",
    ),
    (
        {"first_pass": "no_grad"},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    with autocast(device, dtype=torch.bfloat16):
        with torch.no_grad():
            program(x0, w1, b2.clone())
        outputs = program(x0, w1, b2.clone())
        observe("v0", outputs[0])
    starts = trains(outputs)
    cotangents = [cotangent(o) for o in starts]
    if starts: torch.autograd.backward(starts, cotangents)
    observe("w1.grad", w1.grad)
""",
    ),
    (
        {"first_pass": "inference_mode"},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    with autocast(device, dtype=torch.bfloat16):
        with torch.inference_mode():
            program(x0, w1, b2.clone())
        outputs = program(x0, w1, b2.clone())
        observe("v0", outputs[0])
    starts = trains(outputs)
    cotangents = [cotangent(o) for o in starts]
    if starts: torch.autograd.backward(starts, cotangents)
    observe("w1.grad", w1.grad)
""",
    ),
    (
        {"calls": 2},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    with autocast(device, dtype=torch.bfloat16):
        outputs = program(x0, w1, b2.clone())
        observe("call0.v0", outputs[0])
        outputs = program(x0, w1, b2.clone())
        observe("call1.v0", outputs[0])
    starts = trains(outputs)
    cotangents = [cotangent(o) for o in starts]
    if starts: torch.autograd.backward(starts, cotangents)
    observe("w1.grad", w1.grad)
""",
    ),
    (
        {"checkpoint": "reentrant"},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    with autocast(device, dtype=torch.bfloat16):
        outputs = checkpoint(program, x0, w1, b2.clone(), use_reentrant=True)
        observe("v0", outputs[0])
    starts = trains(outputs)
    cotangents = [cotangent(o) for o in starts]
    if starts: torch.autograd.backward(starts, cotangents)
    observe("w1.grad", w1.grad)
""",
    ),
    (
        {"checkpoint": "non_reentrant"},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    with autocast(device, dtype=torch.bfloat16):
        outputs = checkpoint(program, x0, w1, b2.clone(), use_reentrant=False)
        observe("v0", outputs[0])
    starts = trains(outputs)
    cotangents = [cotangent(o) for o in starts]
    if starts: torch.autograd.backward(starts, cotangents)
    observe("w1.grad", w1.grad)
""",
    ),
    (
        {"checkpoint": "selective"},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    with autocast(device, dtype=torch.bfloat16):
        outputs = checkpoint(program, x0, w1, b2.clone(), use_reentrant=False, context_fn=saving_products)
        observe("v0", outputs[0])
    starts = trains(outputs)
    cotangents = [cotangent(o) for o in starts]
    if starts: torch.autograd.backward(starts, cotangents)
    observe("w1.grad", w1.grad)
""",  # noqa: E501
    ),
    (
        {"thread": "inside"},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    with autocast(device, dtype=torch.bfloat16):
        outputs = in_thread(program, x0, w1, b2.clone())
        observe("v0", outputs[0])
    starts = trains(outputs)
    cotangents = [cotangent(o) for o in starts]
    if starts: torch.autograd.backward(starts, cotangents)
    observe("w1.grad", w1.grad)
""",
    ),
    (
        {"thread": "whole"},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    with autocast(device, dtype=torch.bfloat16):
        outputs = program(x0, w1, b2.clone())
        observe("v0", outputs[0])
    starts = trains(outputs)
    cotangents = [cotangent(o) for o in starts]
    if starts: torch.autograd.backward(starts, cotangents)
    observe("w1.grad", w1.grad)
""",
    ),
    (
        {"interrupted": True},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    try:
        with autocast(device, dtype=torch.bfloat16):
            program(x0, w1, b2.clone())
            raise Interrupted
    except Interrupted:
        pass
    nudge(weights)
    with autocast(device, dtype=torch.bfloat16):
        outputs = program(x0, w1, b2.clone())
        observe("v0", outputs[0])
    starts = trains(outputs)
    cotangents = [cotangent(o) for o in starts]
    if starts: torch.autograd.backward(starts, cotangents)
    observe("w1.grad", w1.grad)
""",
    ),
    (
        {"scaler": True},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    optimizer = torch.optim.SGD(weights, lr=0.125)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    with autocast(device, dtype=torch.bfloat16):
        outputs = program(x0, w1, b2.clone())
        observe("v0", outputs[0])
    scaled = [scaler.scale(o) for o in trains(outputs)]
    starts = trains(scaled)
    cotangents = [cotangent(o) for o in starts]
    if starts: torch.autograd.backward(starts, cotangents)
    observe("w1.grad", w1.grad)
    if any(w.grad is not None for w in weights):
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    observe("w1.updated", w1)
    w1.grad = None
""",
    ),
    (
        {"transform": "vmap"},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    with autocast(device, dtype=torch.bfloat16):
        entered = vmap(program, in_dims=(0, None, 0), randomness="same")
        outputs = entered(twice(x0), w1, twice(b2))
        observe("v0", outputs[0])
    starts = trains(outputs)
    cotangents = [cotangent(o) for o in starts]
    if starts: torch.autograd.backward(starts, cotangents)
    observe("w1.grad", w1.grad)
""",
    ),
    (
        {"transform": "grad"},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    def loss(*inputs):
        with autocast(device, dtype=torch.bfloat16):
            outputs = program(*inputs)
            return total(outputs), outputs
    entered = grad(loss, argnums=(1,), has_aux=True)
    grads, outputs = entered(x0, w1, b2.clone())
    observe("v0", outputs[0])
    observe("w1.grad", grads[0])
""",
    ),
    (
        {"transform": "vmap_grad", "backward": "inside"},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    with autocast(device, dtype=torch.bfloat16):
        def loss(*inputs):
            outputs = program(*inputs)
            return total(outputs), outputs
        entered = grad(loss, argnums=(1,), has_aux=True)
        entered = vmap(entered, in_dims=(0, None, 0), randomness="same")
        grads, outputs = entered(twice(x0), w1, twice(b2))
        observe("v0", outputs[0])
        observe("w1.grad", grads[0])
""",
    ),
    (
        {"transform": "functionalize"},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    with autocast(device, dtype=torch.bfloat16):
        entered = functionalize(program)
        outputs = entered(x0, w1, b2.clone())
        observe("v0", outputs[0])
    starts = trains(outputs)
    cotangents = [cotangent(o) for o in starts]
    if starts: torch.autograd.backward(starts, cotangents)
    observe("w1.grad", w1.grad)
""",
    ),
    (
        {"transform": "jvp"},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    def function(w1):
        with autocast(device, dtype=torch.bfloat16):
            outputs = program(x0, w1, b2.clone())
            return outputs
    results, tangents = jvp(function, (w1,), (cotangent(w1),))
    observe("v0", results[0])
    observe("tangent.v0", tangents[0])
""",
    ),
    (
        {"transform": "forward_ad", "backward": "inside"},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    with autocast(device, dtype=torch.bfloat16):
        def function(w1):
            outputs = program(x0, w1, b2.clone())
            return outputs
        results, tangents = forward_ad(function, (w1,), (cotangent(w1),))
        observe("v0", results[0])
        observe("tangent.v0", tangents[0])
""",
    ),
    (
        {"transform": "jacrev"},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    def function(w1):
        with autocast(device, dtype=torch.bfloat16):
            outputs = program(x0, w1, b2.clone())
            return sums(outputs), outputs
    derivatives, results = jacrev(function, argnums=(0,), has_aux=True)(w1)
    observe("v0", results[0])
    observe("w1.grad", derivatives[0])
""",
    ),
    (
        {"transform": "jacfwd", "backward": "inside"},
        """\
def drive(x0, w1, b2):
    weights = [w1]
    with autocast(device, dtype=torch.bfloat16):
        def function(w1):
            outputs = program(x0, w1, b2.clone())
            return sums(outputs), outputs
        derivatives, results = jacfwd(function, argnums=(0,), has_aux=True, randomness="same")(w1)
        observe("v0", results[0])
        observe("w1.grad", derivatives[0])
""",
    ),
]


@pytest.mark.parametrize(("plan", "text"), DRIVERS, ids=[str(d) or "plain" for d, _ in DRIVERS])
def test_each_field_of_a_plan_has_its_text(plan: dict[str, Any], text: str) -> None:
    assert driver_source(case(INPUTS, call("mm", "x0", "w1"), **plan)) == text


def test_every_plan_compiles() -> None:
    for one in drawn(500, statements=1):
        compile(case_source(one), "case", "exec")


def test_a_case_without_weights_has_no_backward() -> None:
    text = driver_source(case([x("x0", 2, 2)], call("relu", "x0"), steps=2, second="retain"))
    assert "backward" not in text
    assert "nudge" not in text


@pytest.mark.parametrize(
    ("update", "lines"),
    [
        ("in_place", ["nudge(weights)", "w1.grad = None"]),
        ("copied", ["copy_halves(weights)", "w1.grad = None"]),
        ("data", ["set_data(weights)", "w1.grad = None"]),
        ("cast", ["recast(weights)", "w1.grad = None"]),
        ("replaced", ["w1 = renewed(w1)", "weights = [w1]"]),
        ("frozen", ["freeze(weights)", "w1.grad = None"]),
    ],
)
def test_a_step_ends_with_an_update_of_the_weights(update: Update, lines: list[str]) -> None:
    one = case([x("x0", 2, 2), x("w1", 2, 2)], call("mm", "x0", "w1"), steps=2, update=update)
    text = [line.strip() for line in driver_source(one).splitlines()]
    first = text.index('observe("step0.w1.grad", w1.grad)')
    assert text[first + 1 : first + 3] == text[-2:] == lines


def test_without_weights_nothing_is_differentiated() -> None:
    text = driver_source(case([x("x0", 2, 2)], call("relu", "x0"), transform="vmap_grad"))
    assert "vmap(program, in_dims=(0,)" in text
    assert "loss" not in text


@pytest.mark.parametrize("transform", ["jvp", "forward_ad", "jacrev", "jacfwd"])
def test_without_weights_the_program_of_a_derivative_is_called(transform: str) -> None:
    text = driver_source(case([x("x0", 2, 2)], call("relu", "x0"), transform=transform))
    assert "outputs = program(x0)" in text
    assert "function" not in text


def test_if_all_inputs_are_weights_each_copy_has_its_own() -> None:
    text = driver_source(case([x("w0", 2, 2)], call("relu", "w0"), transform="vmap_grad"))
    assert "vmap(entered, in_dims=(0,)" in text


# -- nothing of a file is executed ---------------------------------------------------------------

HOSTILE = [
    "');import os;os.abort();('",
    '");import os;os.abort();("',
    "\\');os.abort()#",
    "\\",
    "'",
    '"""',
    "\n    os.abort()",
    "\r\n\x00\x1b[2J",
    "{0}",
    "{args}",
    "{made}",
    "%s",
    "\u2028os.abort()",
    "\N{RIGHT-TO-LEFT OVERRIDE}",
    "__import__('os').abort()",
]


def names_of(text: str) -> tuple[set[str], set[str]]:
    """Return the names and the attributes that a source uses."""
    nodes = list(ast.walk(ast.parse(text)))
    names = {n.id for n in nodes if isinstance(n, ast.Name)}
    return names, {n.attr for n in nodes if isinstance(n, ast.Attribute)}


HONEST = case([x("x0", 2, 2)], call("einsum", "ij,jk->ik", ["x0", "x0"]))


@pytest.mark.parametrize("text", HOSTILE)
def test_text_in_an_argument_stays_text(text: str) -> None:
    hostile = case([x("x0", 2, 2)], call("einsum", text, ["x0", "x0"]))
    read = loads(hostile.json())
    assert names_of(case_source(read)) == names_of(case_source(HONEST))
    constants = [n.value for n in ast.walk(ast.parse(case_source(read))) if hasattr(n, "value")]
    assert text in constants
    seen = eager().run([read])[0]
    assert seen.raised is not None  # an equation that einsum refuses, and nothing more


@pytest.mark.parametrize("text", HOSTILE)
def test_text_in_a_keyword_argument_stays_text(text: str) -> None:
    hostile = case([x("x0", 2, 2)], call("gelu", "x0", approximate=text))
    honest = case([x("x0", 2, 2)], call("gelu", "x0", approximate="none"))
    assert names_of(case_source(hostile)) == names_of(case_source(honest))
    seen = eager().run([loads(hostile.json())])[0]
    assert seen.raised is not None


@pytest.mark.parametrize("text", [*HOSTILE, "", " ", "a b", "a=1", "class", "é", "**", "1a"])
def test_no_text_becomes_a_keyword(text: str) -> None:
    statement = Statement("mm", "function", (Ref("x0"), Ref("x0")), ((text, 1),), ("v0",))
    with pytest.raises(ProgramError, match="not a keyword"):
        eager().run([case([x("x0", 2, 2)], statement)])


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("place", ["op", "form"])
def test_no_text_becomes_an_op(text: str, place: str) -> None:
    fields: dict[str, Any] = {"op": "mm", "form": "function", place: text}
    statement = Statement(**fields, args=(Ref("x0"), Ref("x0")), outputs=("v0",))
    with pytest.raises(ProgramError):
        eager().run([case([x("x0", 2, 2)], statement)])


def test_a_form_that_needs_a_tensor_takes_no_literal() -> None:
    for literal in (5, True, "x", 1.5, ["x0"]):
        with pytest.raises(ProgramError, match="must name a tensor"):
            catalogue.check(program([x("x0", 2)], call("abs", literal, form="method")))


def test_drawn_cases_name_nothing_but_values_and_what_the_catalogue_names() -> None:
    """The names and attributes in a program come from templates, never from literals."""
    templates = [t for op in CATALOGUE.values() for t in (*op.forms.values(), op.setup)]
    words = {w for t in templates for w in re.findall(r"[A-Za-z_]\w*", t)}
    own = {"autocast", "checkpoint", "device", "torch", "no_grad", "inference_mode", "float", "_",
           "saving_products"}  # fmt: skip
    dtypes = {"bfloat16", "float16", "float32", "float64", "complex64", "complex128", "int64",
              "int32", "uint8", "bool"}  # fmt: skip
    for one in drawn(400):
        names, attributes = names_of(program_source(one.program))
        made = {n for n in names if re.fullmatch(r"[xwbv]\d+|block\d+", n)}
        assert names - made <= words | own
        assert attributes <= words | own | dtypes


def test_the_case_runs_what_the_source_says() -> None:
    seen = eager().run([case([x("x0", 2, 2)], call("mm", "x0", "x0"), contexts=(F16,))])[0]
    value = seen.values["v0"]
    assert value is not None
    assert value.dtype == torch.float16


def test_each_later_call_is_in_its_own_contexts() -> None:
    later = (Autocast(enabled=False),), (NoGrad(), AutocastDType("float16"))
    one = case([x("w0", 2, 2), x("b1", 2, 2)], call("mm", "w0", "w0"), contexts=(F16,), later=later)
    assert (
        driver_source(one)
        == """\
def drive(w0, b1):
    weights = [w0]
    with autocast(device, dtype=torch.float16):
        outputs = program(w0, b1.clone())
        observe("v0", outputs[0])
    with autocast(device, enabled=False):
        later0 = program(w0, b1.clone())
        observe("later0.v0", later0[0])
    with torch.no_grad():
        with autocast_dtype(device, torch.float16):
            later1 = program(w0, b1.clone())
            observe("later1.v0", later1[0])
    outputs = (*outputs, *later0, *later1)
    starts = trains(outputs)
    cotangents = [cotangent(o) for o in starts]
    if starts: torch.autograd.backward(starts, cotangents)
    observe("w0.grad", w0.grad)
"""
    )
    whole = driver_source(one.with_plan(reuse="region", later=later[:1]))
    assert (
        """
    entered = region(program)
    def calls(w0, b1):
        with autocast(device, dtype=torch.float16):
            outputs = entered(w0, b1.clone())
        with autocast(device, enabled=False):
            later0 = entered(w0, b1.clone())
        return outputs, later0
    outputs, later0 = graph(calls)(w0, b1)
    observe("v0", outputs[0])
    observe("later0.v0", later0[0])
"""
        in whole
    )
