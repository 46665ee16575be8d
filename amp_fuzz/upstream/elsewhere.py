"""Bugs whose imitation, or a part of it, stands in the module of a backend so far.

That module asks `amp_fuzz.backends.imitated.active_quirks`. Each name has a page in docs/findings/.

compile-backward-autocast: the backward pass of a compiled program runs under what surrounded
    its forward, wherever it stands.
compile-any-uint8, compile-atanh, compile-erf, compile-expm1, compile-fractional-pool,
    compile-group-norm, compile-hardsigmoid, compile-max-pool-indices, compile-mixed-cross,
    compile-mixed-layer-norm, compile-mixed-mv, compile-promotion, compile-remainder,
    compile-std, compile-weight-norm, export-promotion: an op is computed as a decomposition or
    a lowering does it (`amp_fuzz.backends.imitations.lowered`).
compile-dropout: a dropout that drops nothing returns a copy, where eager returns its input.
compile-functions: a Python function of torch that modes may override is called again from what
    it hands on to them; `torch.nn.functional.l1_loss` does not hand on its weights, and
    `torch.chain_matmul` not its ``out=``.
compile-kernels: autocast decides about the ops that a graph consists of, not about what their
    kernels call; in an ``inference_mode`` region composite ops are kernels too.
compile-lstm: an LSTM whose input requires grad, or with a tensor of another dtype than float32
    and bfloat16, is computed cell by cell.
compile-out: a composite op with an ``out=`` is called without it, so that autocast casts for
    it, and its result is copied; so is any op whose ``out=`` has another dtype.
compile-views: a view that is made under ``no_grad`` in a program and returned from it
    has a ``grad_fn``.
compile-weight-cache: a compiled program neither sees nor leaves a cast in the weight cache.
compile-written-casts: what is computed from a float32 that the program casts to 16 bits takes
    it as it was before, but for ops that are kernels by themselves
    (`amp_fuzz.reference.shadow.written`).
export-checkpoint: in an exported program a reentrant checkpoint is its body under ``no_grad``,
    under which what comes after it is, too, and so is one in another that is not reentrant.
export-grad-mode-left: in an exported program an error in a ``no_grad`` region leaves gradients
    off.
export-embedding-bag, export-loss-out, export-take: a call raises as it does where it is
    exported, or the export decomposed.
export-inference-mode: in an exported program an inference mode region is its body.
export-no-grad: in an exported program a ``no_grad`` region inside an autocast region is its
    body, and gradients are on after it; a checkpoint's is, too.
torchscript-addmm: an addmm without factors is a product, which is rounded, and a sum
    (`amp_fuzz.backends.imitations.formulas`).
torchscript-autodiff: from the third call on, the gradients of a scripted program come from
    TorchScript's own formulas, which cast and round elsewhere.
torchscript-common-subexpressions: of two calls with the same arguments one is made, though the
    other stands in another grad mode (`amp_fuzz.backends.imitations.merged`).
torchscript-fallback: beside torchscript-pass, what was profiled as needing no grad, and is
    given what does, is cast once more; an addmm there is a product, and a sum in float32.
torchscript-formulas: the gradients of relu, clamp, where, addcmul, div and softplus are
    computed as TorchScript does, without autocast too (`amp_fuzz.backends.imitations.formulas`).
torchscript-mul-scalar: a number beyond the range of float16 is infinite where a float16 tensor
    is multiplied with it in place (`amp_fuzz.backends.imitations.formulas`).
torchscript-pass: a scripted or traced program is cast after TorchScript's own list, on top of
    the autocast around it (`amp_fuzz.backends.torchscript_autocast`).
torchscript-reduction: losses that are called by their overload without `reduction` take the
    mean, as their schema says.
trace-grad-modes: the functions of `torch.nn.functional` know no ``no_grad``.
trace-max-out: max and min of all elements with ``out=`` are those of two tensors, element by
    element; what they should write to is taken for the result from there on.
trace-weight-cache: a cast that stands in the weight cache when a trace begins is a constant of
    the trace.
xla-excess-precision: what is computed from a 16-bit result takes it as it was before it was
    rounded (`amp_fuzz.backends.imitations.xla`).
"""

from __future__ import annotations

__all__ = ["NAMES"]

NAMES = (
    "compile-addcdiv",
    "compile-any-uint8",
    "compile-atanh",
    "compile-backward-autocast",
    "compile-cat-empty",
    "compile-dropout",
    "compile-erf",
    "compile-expm1",
    "compile-fractional-pool",
    "compile-functions",
    "compile-group-norm",
    "compile-hardsigmoid",
    "compile-interpolation",
    "compile-kernels",
    "compile-lstm",
    "compile-matrix-rank",
    "compile-max-pool-indices",
    "compile-mixed-cross",
    "compile-mixed-layer-norm",
    "compile-mixed-mv",
    "compile-norm-statistics",
    "compile-out",
    "compile-promotion",
    "compile-remainder",
    "compile-std",
    "compile-traced-backward",
    "compile-views",
    "compile-weight-cache",
    "compile-weight-norm",
    "compile-written-casts",
    "compile-zero-dim-loss",
    "export-checkpoint",
    "export-embedding-bag",
    "export-grad-mode-left",
    "export-inference-mode",
    "export-loss-out",
    "export-no-grad",
    "export-promotion",
    "export-take",
    "torchscript-addmm",
    "torchscript-autodiff",
    "torchscript-common-subexpressions",
    "torchscript-fallback",
    "torchscript-formulas",
    "torchscript-mul-scalar",
    "torchscript-pass",
    "torchscript-reduction",
    "trace-grad-modes",
    "trace-max-out",
    "trace-weight-cache",
    "xla-excess-precision",
)
