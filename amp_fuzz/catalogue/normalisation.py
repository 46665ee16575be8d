"""Normalisation over layers, groups, batches and instances."""

from __future__ import annotations

from amp_fuzz.catalogue.core import Builder, Call, Out, Shape, Value, op, out

_F = "torch.nn.functional"


def _affine(g: Builder, shape: Shape) -> tuple[Value | None, Value | None]:
    """Draw weight and bias: both, none, the weight alone, or, as often as these, both in float32.

    Kernels of norms take float32 parameters for a 16-bit input, which is what autocast leads to.
    """
    how = g.int(0, 5)
    dtype = "float32" if how > 2 else None
    weight = g.tensor(shape, weight=True, dtype=dtype) if how != 1 else None
    return weight, g.tensor(shape, weight=True, dtype=dtype) if how not in (1, 2) else None


# -- layer, RMS and group -------------------------------------------------------------------------


def _normalised(g: Builder) -> tuple[Value, Shape]:
    """Draw a tensor and the trailing part of its shape that is normalised."""
    x = g.tensor(rank=(1, 3))
    return x, x.shape[-g.int(1, min(x.rank, 2)) :]


@op(
    "layer_norm",
    "aten::layer_norm",
    function=f"{_F}.layer_norm",
    module="torch.layer_norm",
    mixed="raises",
)
def _layer_norm(g: Builder) -> Call:
    x, shape = _normalised(g)
    args = (x, list(shape), *_affine(g, shape))
    return Call(args, out(x.shape), g.options(eps=(1e-5, 0.5)))


@op(
    "native_layer_norm",
    "aten::native_layer_norm",
    function="torch.native_layer_norm",
    overload="native_layer_norm",
    mixed="raises",
)
def _native_layer_norm(g: Builder) -> Call:
    x, shape = _normalised(g)
    stats = (*x.shape[: x.rank - len(shape)], *[1] * len(shape))
    args = (x, list(shape), *_affine(g, shape), g.choice((1e-5, 0.5)))
    return Call(args, out(x.shape, stats, stats))


# MPS lists what it is made of instead. The result has the dtype of x, whatever the weight's.
@op(
    "rms_norm",
    "aten::rms_norm",
    "aten::pow.Tensor_Scalar",
    "aten::rsqrt",
    function=f"{_F}.rms_norm",
    module="torch.rms_norm",
    mixed="raises",
)
def _rms_norm(g: Builder) -> Call:
    x, shape = _normalised(g)
    weight = None if g.flag() else g.tensor(shape, weight=True)
    # Without eps it is that of the dtype in which it computes, so a cast shows.
    return Call((x, list(shape), weight), out(x.shape), g.options(eps=(None, 0.5)))


@op(
    "group_norm",
    "aten::group_norm",
    function=f"{_F}.group_norm",
    module="torch.group_norm",
    mixed="raises",
)
def _group_norm(g: Builder) -> Call:
    groups = g.int(1, 3)
    channels = groups * g.int(1, 3)
    x = g.tensor((g.int(2, 3), channels, *g.shape(0, 2, empty=False)))
    return Call((x, groups, *_affine(g, (channels,))), out(x.shape), g.options(eps=(1e-5, 0.5)))


# -- batch and instance ---------------------------------------------------------------------------


def _batch(g: Builder, low: int = 0) -> Value:
    """Draw samples, two or more, with channels: one value a channel has no variance, and raises."""
    space: tuple[Shape, ...] = ((3,), (2, 2), (4, 1), ())
    return g.tensor((g.int(2, 4), g.int(1, 4), *g.choice(space[: 4 - low])))


def _running(g: Builder, x: Value) -> tuple[Value, Value]:
    shape = x.shape[1:2]
    mean = g.tensor(shape, domain="normal", grad=False)
    return mean, g.tensor(shape, domain="positive", grad=False)


# Training updates the running statistics in place: the call gets copies, so that a program may be
# run or checkpointed again. `_native_batch_norm_legit_functional` shows the updated ones.
_COPIES = "{0}, {1}.clone(), {2}.clone(), {args3}"


@op(
    "batch_norm",
    "aten::batch_norm",
    function=f"{_F}.batch_norm({_COPIES})",
    mixed="raises",
)
def _batch_norm(g: Builder) -> Call:
    x = _batch(g)
    args = (x, *_running(g, x), *_affine(g, x.shape[1:2]), not g.flag())
    return Call(args, out(x.shape), g.options(momentum=(0.1, 0.5), eps=(1e-5, 0.5)))


@op("batch_norm.batch_statistics", "aten::batch_norm", function=f"{_F}.batch_norm", mixed="raises")
def _batch_norm_batch(g: Builder) -> Call:
    x = _batch(g)
    args = (x, None, None, *_affine(g, x.shape[1:2]), True)
    return Call(args, out(x.shape), g.options(eps=(1e-5, 0.5)))


# instance_norm repeats its parameters for each sample; on CPU that reaches cat.
@op(
    "instance_norm",
    "aten::batch_norm",
    "aten::cat",
    function=f"{_F}.instance_norm({_COPIES})",
    mixed="raises",
)
def _instance_norm(g: Builder) -> Call:
    x = _batch(g, 1)
    args = (x, *_running(g, x), *_affine(g, x.shape[1:2]), not g.flag())
    return Call(args, out(x.shape), g.options(momentum=(0.1, 0.5), eps=(1e-5, 0.5)))


@op(
    "instance_norm.batch_statistics",
    "aten::batch_norm",
    "aten::cat",
    function=f"{_F}.instance_norm",
    mixed="raises",
)
def _instance_norm_batch(g: Builder) -> Call:
    x = _batch(g, 1)
    args = (x, None, None, *_affine(g, x.shape[1:2]))
    return Call(args, out(x.shape), g.options(eps=(1e-5, 0.5)))


@op(
    "_native_batch_norm_legit_functional",
    overload="_native_batch_norm_legit_functional",
    mixed="raises",
)
def _native_batch_norm(g: Builder) -> Call:
    x = _batch(g)
    channels = x.shape[1:2]
    args = (x, *_affine(g, channels), *_running(g, x), True, g.choice((0.1, 0.5)), 1e-5)
    return Call(args, (Out(x.shape), *out(*[channels] * 4)))
