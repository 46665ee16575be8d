"""Ways through the ops, as the programs take them that people run under autocast.

Drawn from all ops alike, three given ones hardly ever follow each other. Half of the programs are
therefore of an idiom: stages that the statements go through in turn, each with its ops. The idioms
are the ingredients that public reports have in common (docs/ingredients.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from amp_fuzz.catalogue import Op, select

__all__ = ["IDIOMS", "stages"]

_CASTS = ("to.dtype", "type_as", "float", "half", "bfloat16")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_ARITHMETIC = ("add", "sub", "mul", "div", "add.scalar", "mul.scalar", "div.scalar")

IDIOMS: tuple[tuple[tuple[str, ...], ...], ...] = (
    # Scales and scores: values that were just rounded, their extremes, what compares the two.
    (
        (*_CASTS, *_ARITHMETIC, "exp", "tanh", "sigmoid", "softmax", "pow.Tensor_Scalar"),
        ("amax", "amin", "aminmax", "max", "min", "max.dim", "min.dim"),
        (*_COMPARISONS, "sub", "div", "maximum", "clamp.Tensor"),
        ("sum", "sum.dim", "mean.dim", "where", "masked_fill", "mul", "float", "half"),
    ),
    # Masks and positions: constants that are counted and compared.
    (
        ("zeros_like", "ones_like", "full_like", "new_full", "new_zeros", "new_ones"),
        ("cumsum", "cumprod", "cummax", "sum.dim", "triu", "add", "to.dtype"),
        (*_COMPARISONS, "logical_not", "logical_and", "sub", "any.dim"),
        ("where", "masked_fill", "mul", "cumsum", "sum.dim", "float", "to.dtype", "type_as"),
    ),
    # A network, to its loss.
    (
        ("linear", "matmul", "addmm", "bmm", "conv1d", "conv2d", "einsum", "embedding"),
        ("*layer_norm", "batch_norm*", "group_norm", "instance_norm", "rms_norm"),
        ("relu", "gelu", "silu", "sigmoid", "softmax", "dropout", "add", "cat", "transpose"),
        ("cross_entropy", "mse_loss", "binary_cross_entropy*", "nll_loss", "kl_div", "mean", "sum"),
    ),
    # Products in 16 bits, and what takes them along with other values.
    (
        ("mm", "mv", "linear", "matmul", "addmm", "baddbmm", "einsum", "conv1d"),
        (
            *("cat", "stack", "addcmul", "addcdiv", "atan2", "cross", "dot", "tensordot"),
            *("bilinear", "index_put", "scatter_add", "lerp", "where", *_ARITHMETIC, *_CASTS),
        ),
    ),
)


@lru_cache(maxsize=16)
def _names(idiom: int) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(op.name for op in select(stage)) for stage in IDIOMS[idiom])


def stages(pool: Sequence[Op], idiom: int) -> list[Sequence[Op]]:
    """Return the ops of each stage of an idiom that are in a pool; of none, where one has none."""
    ops = {op.name: op for op in pool}
    found = [[ops[name] for name in names if name in ops] for names in _names(idiom)]
    return [*found] if all(found) else []
