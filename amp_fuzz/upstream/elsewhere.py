"""Bugs whose imitation, or a part of it, stands in the module of a backend so far.

That module asks `amp_fuzz.backends.imitated.active_quirks`. Each name has a page in docs/findings/.

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
"""

from __future__ import annotations

__all__ = ["NAMES"]

NAMES = (
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
)
