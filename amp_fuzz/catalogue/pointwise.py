"""Elementwise functions with a pole or a wide range: most devices compute them in float32."""

from __future__ import annotations

from amp_fuzz.catalogue.arithmetic import EITHER, pair, receiver_kind, torch_forms
from amp_fuzz.catalogue.core import Builder, Call, op, out

# -- one tensor -----------------------------------------------------------------------------------


def _unary(g: Builder) -> Call:
    x = g.receiver(kind=receiver_kind(g, "real"), empty=True)
    return Call((x,), out(x.shape))


for _name in (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2"),
    *("reciprocal", "rsqrt", "sinh", "tan"),
):
    op(_name, f"aten::{_name}", **torch_forms(_name))(_unary)

# Composite ops over the same kernels.
for _name, _kernel in (("arccos", "acos"), ("arcsin", "asin")):
    op(_name, f"aten::{_kernel}", **torch_forms(_name))(_unary)
for _name in ("erfinv", "expm1", "log1p"):
    op(f"special.{_name}", f"aten::{_name}", **torch_forms(f"special.{_name}", "fo"))(_unary)


@op("rdiv", "aten::reciprocal", operator="{0} / {1}")
def _rdiv(g: Builder) -> Call:
    # Tensor.__rdiv__ is reciprocal, then mul: it is how most code calls reciprocal.
    x = g.tensor(kind="real")
    return Call((g.scalar(), x), out(x.shape))


@op(
    "softplus",
    "aten::softplus",
    function="torch.nn.functional.softplus",
    out="torch._C._nn.softplus",
)
def _softplus(g: Builder) -> Call:
    x = g.tensor(empty=True)
    return Call((x,), out(x.shape), g.options(beta=(1, 2.0), threshold=(20, 1)))


@op(
    "fake_quantize_per_tensor_affine",
    "aten::fake_quantize_per_tensor_affine",
    function="torch.fake_quantize_per_tensor_affine",
)
def _fake_quantize(g: Builder) -> Call:
    x = g.tensor(empty=True)
    low, high = g.choice(((-128, 127), (0, 255), (-8, 7)))
    # A scale that is a power of two rounds nothing by itself.
    return Call((x, g.choice((0.125, 0.1, 1.0)), g.choice((0, 3)), low, high), out(x.shape))


@op(
    "local_response_norm",
    "aten::pow.Tensor_Scalar",
    function="torch.nn.functional.local_response_norm",
)
def _local_response_norm(g: Builder) -> Call:
    x = g.tensor(rank=3)  # of more dimensions it goes to avg_pool3d: local_response_norm.image
    return Call((x, g.int(1, 3)), out(x.shape), g.options(alpha=(1e-4, 1.0), beta=(0.75, 0.5)))


# -- powers and two or three tensors --------------------------------------------------------------


@op("atan2", "aten::atan2", **torch_forms("atan2"), cpu_scalars=EITHER)
@op("arctan2", "aten::atan2", **torch_forms("arctan2"), cpu_scalars=EITHER)
def _atan2(g: Builder) -> Call:
    a, b, shape = pair(g)
    return Call((a, b), out(shape))


@op(
    "pow.Tensor_Tensor",
    "aten::pow.Tensor_Tensor",
    **torch_forms("pow", operator="{0} ** {1}"),
    cpu_scalars=EITHER,
)
def _pow(g: Builder) -> Call:
    a, b, shape = pair(g, "float", "float")
    return Call((a, b), out(shape))


@op("pow.Tensor_Scalar", "aten::pow.Tensor_Scalar", **torch_forms("pow", operator="{0} ** {1}"))
def _pow_scalar(g: Builder) -> Call:
    # Most of these exponents have code of their own in the kernels.
    x = g.receiver()
    return Call((x, g.choice((2, 3, 0.5, -1, -2, -0.5, 1, 0, 1.7))), out(x.shape))


@op("pow.Scalar", "aten::pow.Scalar", **torch_forms("pow", "fo", operator="({0}) ** {1}"))
def _pow_of_scalar(g: Builder) -> Call:
    x = g.tensor()
    return Call((g.choice((2, 1, 0.5, 10.0, -1.5, 0)), x), out(x.shape))


@op("float_power", "aten::pow.Tensor_Scalar", **torch_forms("float_power", "fm"))
def _float_power(g: Builder) -> Call:
    # It casts to float64 before it calls pow: autocast leaves that alone.
    x = g.tensor(kind="real")
    return Call((x, g.choice((2, 0.5, 3, -1.5))), out(x.shape, dtype="float64"))


@op("addcmul", "aten::addcmul", **torch_forms("addcmul"), cpu_scalars=(2,))
@op("addcdiv", "aten::addcdiv", **torch_forms("addcdiv"))
def _ternary(g: Builder) -> Call:
    x = g.receiver()
    a, b = g.broadcastable(x.shape), g.broadcastable(x.shape)
    return Call((x, a, b), out(x.shape), g.options(value=(1, 0.5, -2)))
