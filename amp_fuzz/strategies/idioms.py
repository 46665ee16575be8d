"""Idioms: sequences of ops as in the programs that people run under autocast.

If all ops are drawn alike, three given ones hardly ever follow each other. Half of the programs
therefore follow an idiom: their statements go through stages in turn, each with its own ops. The
idioms are the ingredients that public reports share (docs/internals/ingredients.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from amp_fuzz.cases.program import Domain
from amp_fuzz.catalogue import Op, select

__all__ = ["IDIOMS", "Idiom", "stages"]


@dataclass(frozen=True, slots=True)
class Idiom:
    """A sequence of stages.

    stages: names or globs of ops, for each stage. islands: half of its autocast regions turn
    autocast off, as networks do around layers that must stay float32. floats, domains: the dtypes
    and value domains of its inputs, one of each per program; empty means any.
    """

    stages: tuple[tuple[str, ...], ...]
    islands: bool = False
    floats: tuple[tuple[str, ...], ...] = ()
    domains: tuple[tuple[Domain, ...], ...] = ()


_CASTS = ("to.dtype", "type_as", "float", "half", "bfloat16")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_ARITHMETIC = ("add", "sub", "mul", "div", "add.scalar", "mul.scalar", "div.scalar")

IDIOMS: tuple[Idiom, ...] = (
    # Scales and scores: values that were just rounded, their extremes, and comparisons.
    Idiom(
        (
            (*_ARITHMETIC, "half", "bfloat16", "exp", "tanh", "sigmoid", "softmax"),
            ("amax", "amin", "aminmax", "max", "min", "max.dim", "min.dim"),
            (*_COMPARISONS, "sub", "div", "maximum", "clamp.Tensor"),
            ("sum", "sum.dim", "mean.dim", "where", "masked_fill", "mul", "float", "half"),
        ),
        floats=(
            *(("bfloat16",), ("float16",), ("bfloat16", "float32"), ("float16", "float32")),
            *(("float32", "bfloat16", "float16"), ("float32", "bfloat16", "float16", "float64")),
        ),
    ),
    # Masks and positions: constants that are counted and compared.
    Idiom(
        (
            ("zeros_like", "ones_like", "full_like", "new_full", "new_zeros", "new_ones"),
            ("cumsum", "cumprod", "cummax", "sum.dim"),
            (*_COMPARISONS, *_ARITHMETIC, "logical_not", "logical_and", "any.dim", "triu"),
            ("where", "masked_fill", "mul", "cumsum", "sum.dim", "float", "to.dtype", "type_as"),
        )
    ),
    # A network, to its loss.
    Idiom(
        (
            ("linear", "matmul", "addmm", "bmm", "conv1d", "conv2d", "einsum", "embedding"),
            ("*layer_norm", "batch_norm*", "group_norm", "instance_norm", "rms_norm"),
            (
                *("relu", "gelu", "silu", "sigmoid", "softmax", "dropout", "dropout.training"),
                *("add", "cat", "transpose"),
            ),
            (
                *("cross_entropy", "mse_loss", "binary_cross_entropy*", "nll_loss", "kl_div"),
                *("mean", "sum"),
            ),
        ),
        islands=True,
    ),
    # Products in 16 bits, and ops that combine them with other values.
    Idiom(
        (
            ("mm", "mv", "linear", "matmul", "addmm", "baddbmm", "einsum", "conv1d"),
            (
                *("cat", "stack", "addcmul", "addcdiv", "atan2", "cross", "dot", "tensordot"),
                *("bilinear", "index_put", "scatter_add", "lerp", "where", *_ARITHMETIC, *_CASTS),
            ),
        ),
        islands=True,
    ),
    # Scaled losses: large 16-bit values that continue in a wider dtype.
    Idiom(
        (
            ("half", "to.dtype", "type_as", "mm", "linear", "mul", "div.scalar"),
            ("mul", "mul.scalar", "div", "add", "exp", "pow.Tensor_Scalar", "addcmul", "cumsum"),
            ("float", "to.dtype", "type_as", "mul.scalar", "div.scalar", "div", "sub"),
            ("sum", "mean", "sum.dim", "mean.dim", "mse_loss", "where", "clamp", "tanh"),
        ),
        floats=(
            *(("float16",), ("float16", "float32"), ("float32", "float16")),
            ("float32", "bfloat16", "float16"),
        ),
        domains=(("normal",), ("overflow",), ("normal", "overflow"), ("overflow", "normal")),
    ),
    # Numbers in two parts: the part that a cast rounds off, and checks whether it rounded.
    Idiom(
        (
            ("half", "bfloat16", "to.dtype", "type_as"),
            ("float", "type_as", "to.other", "to.dtype"),
            ("sub", "eq", "ne", "lt", "ge", "div", "maximum"),
            ("half", "bfloat16", "sum.dim", "where", "argmax", "amax", "mean.dim", "add", "mul"),
        ),
        floats=(("float32",), ("float32", "float16"), ("float32", "bfloat16")),
        domains=(("normal",), ("uniform",), ("normal", "ties"), ("cancelling", "normal")),
    ),
)


@lru_cache(maxsize=16)
def _names(idiom: int) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(op.name for op in select(stage)) for stage in IDIOMS[idiom].stages)


def stages(pool: Sequence[Op], idiom: int) -> list[Sequence[Op]]:
    """Return the ops of each stage that are in a pool, or nothing if some stage has none."""
    ops = {op.name: op for op in pool}
    found = [[ops[name] for name in names if name in ops] for names in _names(idiom)]
    return [*found] if all(found) else []
