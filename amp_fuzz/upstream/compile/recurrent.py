"""What compilers make of oneDNN's RNN layer, ``mkldnn_rnn_layer``.

## compile-saved-tensors: an assertion about saved tensors

**What torch does** (2.13.0), from stage `aot_eager` on, without autocast too. An optional output
that is None, as the layer has them, is saved for the backward pass. The program raises
"AssertionError: expected all tensors_saved_with_vc_check to be Tensors".

**Upstream.** Not reported that we know of.

## compile-saved-tensors-unnamed: the same assertion in older torches

**What torch does** (2.7.1, 2.9.1). The assertion of compile-saved-tensors has no text there, so the
entry asks more: an RNN layer of oneDNN in the program, and the same error without autocast.

**Upstream.** Not reported that we know of.

## compile-rnn-workspace: a layer in a checkpoint

**What torch does** (2.13.0), from stage `aot_eager` on, without autocast too. In a checkpoint the
layer runs again, and gives no workspace there. Its backward op refuses that: "Expected a proper
Tensor but got None (or an undefined Tensor in C++) for argument #22 'workspace'".

**Upstream.** Not reported that we know of.

## compile-rnn-layer: Inductor does not lower the layer

**What torch does** (2.13.0), on stage `inductor`. A program that trains the layer raises
"TypeError: expected Tensor() for op: torch.ops.aten.mkldnn_rnn_layer.default"; 2.7.1 does not name
the op.

**Upstream.** Not reported that we know of.
"""

from __future__ import annotations

from amp_fuzz.cases.build import call, case, under, x
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import Checkpoint
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]

_SIZES = {"w0": (4, 4, 3), "w1": (8, 3), "x2": (8, 2), "x3": (8,), "x4": (4, 2)}
_LAYER = call(
    "mkldnn_rnn_layer",
    *("w0", "w1", "x2", "x3", "x3", "x4", "x4"),
    *(False, [], 2, 2, 1, True, False, False, True),
    form="overload",
    to="v0 v1 v2 v3",
)


def _layer(*, checkpoint: bool = False) -> Case:
    """Return a layer whose gates and workspace are no tensors."""
    body = under(Checkpoint(), _LAYER) if checkpoint else _LAYER
    inputs = [x(name, *size) for name, size in _SIZES.items()]
    return case(inputs, body, returns=("v0",), contexts=())


def _lstm() -> Case:
    """Return an LSTM that is one layer when it is compiled, too: its input is not trained."""
    inputs = [
        x("x0", 2, 3, 4),
        *(x(n, 1, 3, 2) for n in ("x1", "x2")),
        x("w3", 8, 4),
        x("w4", 8, 2),
    ]
    flags = (False, 1, 0.0, False, False, False)
    return case(inputs, call("lstm", "x0", ["x1", "x2"], ["w3", "w4"], *flags, to="v0 v1 v2"))


BUGS = (
    Bug(
        id="compile-saved-tensors",
        what="a compiled program raises an AssertionError about tensors_saved_with_vc_check",
        why="AOTAutograd saves what is no tensor (None, an int) among the tensors for the backward pass",
        torch=">=2.11",
        seen="2.15.0",
        backends=("compile[aot_*", "compile[inductor*"),
        kinds=("raise",),
        ops=("*",),
        expected="^no error$",
        observed="^AssertionError: expected all tensors_saved_with_vc_check to be Tensors",
        examples=(
            Example("compile[aot_eager]", _layer()),
            Example("compile[aot_eager]", _lstm(), processor="AVX-512"),
        ),
    ),
    Bug(
        id="compile-saved-tensors-unnamed",
        what="a compiled program with an RNN layer of oneDNN raises an AssertionError that says nothing",
        why="AOTAutograd saves what is no tensor (None, an int) among the tensors for the backward pass",
        torch=">=2.7,<2.11",
        seen="2.9.1",
        backends=("compile[aot_*", "compile[inductor*"),
        kinds=("raise",),
        ops=("lstm", "mkldnn_rnn_layer"),
        expected="^no error$",
        observed="^AssertionError: ?$",
        bare="diverges",
        examples=(
            Example("compile[aot_eager]", _layer()),
            Example("compile[aot_eager]", _lstm(), processor="AVX-512"),
        ),
    ),
    Bug(
        id="compile-rnn-workspace",
        what="the backward pass of an RNN layer in a compiled checkpoint raises: its workspace is None",
        why="AOTAutograd runs mkldnn_rnn_layer again without a workspace, and gives what it got to mkldnn_rnn_layer_backward",
        torch=">=2.7",
        seen="2.15.0",
        backends=("compile[aot_*", "compile[inductor*"),
        kinds=("raise",),
        ops=("*",),
        expected="^no error$",
        observed=r"^RuntimeError: Expected a proper Tensor but got None \(or an undefined Tensor in C\+\+\) for argument #22 'workspace'$",
        examples=(Example("compile[aot_eager]", _layer(checkpoint=True)),),
    ),
    Bug(
        id="compile-rnn-layer",
        what="an LSTM on oneDNN cannot be lowered by Inductor",
        why="one of the layer's outputs is None, and the lowering expects a tensor",
        torch=">=2.7",
        seen="2.15.0",
        backends=("compile[inductor*",),
        kinds=("raise",),
        ops=("lstm", "mkldnn_rnn_layer"),
        expected="^no error$",
        observed=r"TypeError: expected Tensor\(\)(?:$| for op: torch\.ops\.aten\.mkldnn_rnn_layer)",
        examples=(Example("compile[inductor]", _layer()),),
    ),
)
