"""Ops that draw random numbers, from the generator that is seeded with the case's seed.

What draws in 16 bits draws other numbers than in float32, and one number more or less changes all
that come after it: in a checkpoint, in a function that runs again, in a compiled program.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from amp_fuzz.cases.program import FLOAT_DTYPES, DType
from amp_fuzz.catalogue.core import Build, Builder, Call, out
from amp_fuzz.catalogue.core import op as registered

_F = "torch.nn.functional"

op = partial(registered, random=True)


# -- dropout ----------------------------------------------------------------------------------


def _dropout(rank: int | tuple[int, int]) -> Build:
    def build(g: Builder) -> Call:
        x = g.receiver(rank=rank)
        return Call((x,), out(x.shape, dtype=x.dtype), {"p": g.choice((0.5, 0.1, 0.9))})

    return build


for _name, _module, _rank in (
    ("dropout", "Dropout", (0, 3)),
    ("alpha_dropout", "AlphaDropout", (1, 3)),
    ("dropout1d", "Dropout1d", (2, 3)),
    ("dropout2d", "Dropout2d", 4),
    ("feature_alpha_dropout", "FeatureAlphaDropout", (2, 3)),
):
    op(
        f"{_name}.training",
        function=f"{_F}.{_name}({{args}}, training=True)",
        inplace=f"{_F}.{_name}({{args}}, training=True, inplace=True)",
        module=f"torch.nn.{_module}(p={{p}})({{0}})",
    )(_dropout(_rank))


@op("native_dropout.training", function="torch.native_dropout")
def _native_dropout(g: Builder) -> Call:
    x = g.tensor()
    outputs = (*out(x.shape, dtype=x.dtype), *out(x.shape, dtype="bool"))
    return Call((x, g.choice((0.5, 0.1)), True), outputs)


@op(
    "rrelu.training",
    function="torch.rrelu({args}, training=True)",
    inplace="torch.rrelu_({args}, training=True)",
    module="torch.nn.RReLU({lower}, {upper})({0})",
)
def _rrelu(g: Builder) -> Call:
    x = g.receiver()
    lower, upper = g.choice(((0.125, 1 / 3), (0.25, 0.5)))
    return Call((x,), out(x.shape, dtype=x.dtype), {"lower": lower, "upper": upper})


@op("gumbel_softmax", function=f"{_F}.gumbel_softmax")
def _gumbel_softmax(g: Builder) -> Call:
    x = g.tensor(rank=(1, 3))
    options = g.options(tau=(1.0, 0.5), hard=(False, True))
    return Call((x,), out(x.shape, dtype=x.dtype), {**options, "dim": g.dimension(x.rank)})


# -- draws from a distribution ----------------------------------------------------------------


def _normal_tensors(g: Builder) -> Call:
    mean = g.tensor(grad=False)
    std = g.tensor(mean.shape, domain="positive", grad=False)
    return Call((mean, std), out(mean.shape, dtype=mean.dtype))


def _normal_mean(g: Builder) -> Call:
    mean = g.tensor(grad=False)
    return Call((mean, g.choice((1.0, 0.5))), out(mean.shape, dtype=mean.dtype))


def _normal_std(g: Builder) -> Call:
    std = g.tensor(domain="positive", grad=False)
    return Call((g.choice((0.0, 2.0)), std), out(std.shape, dtype=std.dtype))


op("normal", function="torch.normal", out="torch.normal")(_normal_tensors)
op("normal.mean", function="torch.normal", out="torch.normal")(_normal_mean)
op("normal.std", function="torch.normal", out="torch.normal")(_normal_std)


@op("bernoulli", function="torch.bernoulli", method="bernoulli", out="torch.bernoulli")
def _bernoulli(g: Builder) -> Call:
    x = g.tensor(domain="unit", grad=False)
    return Call((x,), out(x.shape, dtype=x.dtype))


@op("poisson", function="torch.poisson")
def _poisson(g: Builder) -> Call:
    x = g.tensor(domain="positive", grad=False)
    return Call((x,), out(x.shape, dtype=x.dtype))


@op("multinomial", function="torch.multinomial", method="multinomial")
def _multinomial(g: Builder) -> Call:
    count = g.int(1, 3)
    x = g.tensor((*g.shape(0, 1, empty=False), count + 1), domain="positive", grad=False)
    shape = (*x.shape[:-1], count)
    return Call((x, count, g.flag()), out(shape, dtype="int64"))


def _like(*args: Any) -> Build:
    def build(g: Builder) -> Call:
        x = g.tensor(kind="real")
        floats = x.dtype in FLOAT_DTYPES
        dtype = g.choice((*([None] if floats or args else []), *FLOAT_DTYPES))
        options = {} if dtype is None else {"dtype": DType(dtype)}
        return Call((x, *args), out(x.shape, dtype=dtype or x.dtype), options)

    return build


op("rand_like", function="torch.rand_like")(_like())
op("randn_like", function="torch.randn_like")(_like())
op("randint_like", function="torch.randint_like")(_like(2, 9))


# -- in place ---------------------------------------------------------------------------------


def _fill(*options: tuple[Any, ...]) -> Build:
    def build(g: Builder) -> Call:
        x = g.receiver()
        return Call((x, *g.choice(options)), out(x.shape, dtype=x.dtype))

    return build


for _name, _options in {
    "bernoulli_": ((0.5,), (0.25,)),
    "normal_": ((), (1.0, 0.5)),
    "uniform_": ((), (-1.0, 1.0)),
    "exponential_": ((), (2.0,)),
    "log_normal_": ((), (0.0, 0.5)),
    "cauchy_": ((), (1.0, 0.5)),
    "geometric_": ((0.5,), (0.25,)),
    "random_": ((0, 8), (3,)),
}.items():
    op(_name, inplace=_name)(_fill(*_options))
