"""Activations and other pointwise functions that no autocast table lists."""

from __future__ import annotations

from typing import Any

from amp_fuzz.catalogue.arithmetic import receiver_kind, torch_forms
from amp_fuzz.catalogue.core import Build, Builder, Call, op, out
from amp_fuzz.catalogue.promotion import floating

_F = "torch.nn.functional"


def _unary(**options: Any) -> Build:
    """Return a build function of one floating tensor, with keyword arguments drawn from options."""

    def build(g: Builder) -> Call:
        x = g.receiver()
        return Call((x,), out(x.shape, dtype=x.dtype), g.options(**options))

    return build


def _number(g: Builder) -> Call:
    # These have no integer kernel: integers become float32.
    x = g.receiver(kind=receiver_kind(g, "real"))
    return Call((x,), out(x.shape, dtype=floating(x.dtype)))


for _name in ("sqrt", "sin", "cos", "atan", "erf", "erfc", "exp2", "sinc", "sigmoid", "tanh"):
    op(_name, **torch_forms(_name))(_number)
for _name in ("lgamma", "digamma", "asinh", "atanh", "i0"):
    op(_name, **torch_forms(_name))(_number)

# Activations stand in three namespaces: torch, torch.nn.functional, torch.nn. Forms are written out
# because few have all, and keyword names differ between them.
op("relu", **torch_forms("relu", "fmi"), module="torch.nn.ReLU()({0})")(_unary())
op("relu6", function=f"{_F}.relu6", module="torch.nn.ReLU6()({0})")(_unary())
op(
    "leaky_relu",
    function=f"{_F}.leaky_relu",
    inplace=f"{_F}.leaky_relu_({{args}})",
    out="torch.ops.aten.leaky_relu.out",
)(_unary(negative_slope=(0.01, 0.2, -0.5)))
op(
    "elu",
    function=f"{_F}.elu",
    inplace=f"{_F}.elu_({{args}})",
    out="torch.ops.aten.elu.out",
)(_unary(alpha=(1.0, 0.5)))
op("selu", function="torch.selu", inplace="torch.selu_({0})")(_unary())
op("celu", function="torch.celu", inplace="torch.celu_({0})")(_unary(alpha=(1.0, 0.5)))
op("gelu", function=f"{_F}.gelu", out="torch.ops.aten.gelu.out")(
    _unary(approximate=("none", "tanh"))
)
for _name, _module in {
    "silu": "SiLU",
    "mish": "Mish",
    "hardswish": "Hardswish",
    "hardsigmoid": "Hardsigmoid",
}.items():
    op(
        _name,
        function=f"{_F}.{_name}",
        inplace=f"{_F}.{_name}({{0}}, inplace=True)",
        out=f"torch.ops.aten.{_name}.out",
        module=f"torch.nn.{_module}()({{0}})",
    )(_unary())
op(
    "hardtanh",
    function=f"{_F}.hardtanh",
    inplace=f"{_F}.hardtanh_({{args}})",
    out="torch.ops.aten.hardtanh.out",
)(_unary(min_val=(-1.0, -0.5), max_val=(1.0, 0.25)))
op(
    "hardshrink",
    function="torch.hardshrink",
    method="hardshrink",
    out="torch.ops.aten.hardshrink.out",
)(_unary(lambd=(0.5, 0.0)))
op("softshrink", function=f"{_F}.softshrink", out="torch.ops.aten.softshrink.out")(
    _unary(lambd=(0.5, 0.25))
)
op("tanhshrink", function=f"{_F}.tanhshrink", module="torch.nn.Tanhshrink()({0})")(_unary())
op("softsign", function=f"{_F}.softsign", module="torch.nn.Softsign()({0})")(_unary())
op("logsigmoid", function=f"{_F}.logsigmoid", out="torch.ops.aten.log_sigmoid.out")(_unary())
op(
    "rrelu",
    function="torch.rrelu",
    module=f"{_F}.rrelu({{args}}, training=False)",
)(_unary(lower=(0.125, 0.25), upper=(1 / 3, 0.5)))


@op(
    "threshold",
    function=f"{_F}.threshold",
    inplace=f"{_F}.threshold_({{args}})",
    out="torch.ops.aten.threshold.out",
)
def _threshold(g: Builder) -> Call:
    x = g.receiver()
    return Call((x, g.choice((0.0, 0.5)), g.scalar()), out(x.shape, dtype=x.dtype))


@op("glu", function=f"{_F}.glu", module="torch.nn.GLU({dim})({0})")
def _glu(g: Builder) -> Call:
    shape = g.shape(1, 3)
    dim = g.dimension(len(shape))
    doubled = list(shape)
    doubled[dim] *= 2
    x = g.tensor(tuple(doubled))
    return Call((x,), out(shape, dtype=x.dtype), {"dim": dim})


# -- dropout that drops nothing ---------------------------------------------------------------

# p=0 in training and any p outside it: the output is the input, as an alias or a copy.
_KEEP: tuple[dict[str, Any], ...] = (
    {"p": 0.5, "training": False},
    {"p": 0.0, "training": True},
)


def _kept(rank: int | tuple[int, int]) -> Build:
    def build(g: Builder) -> Call:
        x = g.tensor(rank=rank)
        return Call((x,), out(x.shape, dtype=x.dtype), g.choice(_KEEP))

    return build


_RANKS: dict[str, int | tuple[int, int]] = {
    "dropout": (0, 3),
    "alpha_dropout": (1, 3),
    "dropout1d": (2, 3),
    "dropout2d": 4,
    "feature_alpha_dropout": (2, 3),
}
for _name, _rank in _RANKS.items():
    op(_name, function=f"{_F}.{_name}", view=True)(_kept(_rank))


@op("feature_dropout", function="torch.feature_dropout", view=True)
def _feature_dropout(g: Builder) -> Call:
    x = g.tensor(rank=(2, 3))
    p, train = g.choice(((0.5, False), (0.0, True)))
    return Call((x, p, train), out(x.shape, dtype=x.dtype))


@op("native_dropout", function="torch.native_dropout")
def _native_dropout(g: Builder) -> Call:
    x = g.tensor()
    return Call((x, 0.0, True), (*out(x.shape, dtype=x.dtype), *out(x.shape, dtype="bool")))
