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
export-embedding-bag, export-take: a call raises as it does where it is
    exported, or the export decomposed.
torchax-backward-dtypes: autocast casts what products are given below autograd: their gradients
    are products with what was given, not with its casts.
torchax-checkpoint: a checkpoint is recomputed under whatever surrounds the backward pass.
torchax-checkpoint-functions: what a checkpoint recomputes torchax does not see as functions,
    but as the ops that these are made of (the backend's part).
torchax-composites: a composite op has no policy, the ops that it is made of have theirs; those
    that torchax computes whole (`OPAQUE`) have none, nor has what they are made of, unless
    another function calls them.
torchax-cut-graph: what torchax computes above autograd has no history: what functions of
    `amp_fuzz.backends.imitations.torchax.CUTS` return, and casts by ``to`` (the backend's part).
torchax-dtype-argument: sum, nansum and vector norms know no ``dtype=``, nor does cumsum of a
    tensor of no dimension; cumprod gives such integers back
    (`amp_fuzz.backends.imitations.torchax`).
torchax-float64: float64 tensors are cast like any others.
torchax-formulas: cumsum, cumprod, fmod, gelu, sigmoid, exp2, log_softmax and
    binary_cross_entropy_with_logits round each step of other formulas in 16 bits; derivatives
    of quotients, maxima, clamp, atan2, Cholesky factors and two losses are JAX's.
torchax-lowerings: slice_scatter of a negative dimension writes everywhere, embedding_bag has no
    weights, cholesky_inverse is that of ``x @ x.mH``, eigh of the mean of both triangles; the
    largest of a dimension gives its gradient to all that are equal; pow takes roots of -inf for
    those of inf; lgamma and digamma give float32, complex complex64; embedding does not scale
    gradients by frequency; empty tensors have no say in what cat gives; cdist of order inf is
    a root of a sum of powers.
torchax-norms: layer, group and batch norms, vector and weight norms, and logaddexp are computed
    step by step in the dtype of their input, and statistics have gradients; that of a norm of
    zeros is NaN.
torchax-out: what is given as ``out=`` to some ops becomes what they return, with its dtype and
    shape; other ops do not write it (the backend's part).
torchax-promotion: a tensor of no dimension takes part in type promotion as any other, and
    kernels that refuse inputs of two dtypes promote them; softmax takes integers.
torchax-scalars: a Python number is rounded to the 16-bit dtype of the tensor it meets.
torchax-softmax-dtype: softmax knows no ``dtype=`` in a program whose first call is a pass in
    inference_mode (the backend's part).
torchax-stale-jit: a program runs under the autocast of its first call (the backend's part).
torchax-sums: addmm, linear, convolutions and others round their product before they add to it.
torchax-torch-autocast: a context casts nothing.
torchax-type-as: ``x.type_as(y)`` changes x itself, and returns it (the backend's part).
xla-depthwise: a convolution of float64 in which each group has one channel also multiplies the
    channels of the others, with 0 (`amp_fuzz.backends.imitations.xla`).
xla-excess-precision: what is computed from a 16-bit result takes it as it was before it was
    rounded (`amp_fuzz.backends.imitations.xla`).
xla-fast-tanh: tanh of float32, also in gelu and mish, is a quotient of polynomials, off by up
    to 4.3 units of 2^-24 where it is near 1 (`amp_fuzz.backends.imitations.xla`).
xla-gamma: lgamma and digamma are computed by Lanczos' approximation, which cancels near 1 and 2
    (`amp_fuzz.backends.imitations.xla`).
xla-masked-products: a product with a mask is 0 where the mask is off, whatever the other factor
    is: a program that XLA compiles selects (`amp_fuzz.backends.imitations.lowered`).
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
    "export-embedding-bag",
    "export-promotion",
    "export-take",
    "torchax-backward-dtypes",
    "torchax-checkpoint",
    "torchax-checkpoint-functions",
    "torchax-composites",
    "torchax-cut-graph",
    "torchax-dtype-argument",
    "torchax-float64",
    "torchax-formulas",
    "torchax-lowerings",
    "torchax-norms",
    "torchax-out",
    "torchax-promotion",
    "torchax-scalars",
    "torchax-softmax-dtype",
    "torchax-stale-jit",
    "torchax-sums",
    "torchax-torch-autocast",
    "torchax-type-as",
    "xla-depthwise",
    "xla-excess-precision",
    "xla-fast-tanh",
    "xla-gamma",
    "xla-masked-products",
)
