"""Layers that quantise in an FP8 region, in the manner of Transformer Engine and torchao.

Each backend supplies ``fp8_linear`` itself, as it supplies ``autocast``. Outside of FP8 regions it
is `torch.nn.functional.linear`. ``is_first_microbatch`` is Transformer Engine's: True keeps the
quantised weight of a layer, False uses the kept one.
"""

from __future__ import annotations

from typing import Any

from amp_fuzz.catalogue.core import Builder, Call, op, out

# Kernels of accelerators take multiples of 16 only, MXFP8 those of 32.
_BLOCKS = (1, 2, 1, 3)
_LAYERS = 256


@op(
    "fp8_linear",
    function="fp8_linear",
    mixed="raises",
    floats=("float32", "bfloat16", "float16"),
    fp8=True,
)
def _fp8_linear(g: Builder) -> Call:
    rows, k, n, batched, biased, layer = g.digits(*[len(_BLOCKS)] * 3, 4, 3, _LAYERS)
    m, inner, outer = (g.block * _BLOCKS[i] for i in (rows, k, n))
    first = g.choice((None, None, True, False)) if g.caches else None
    options: dict[str, Any] = {"layer": layer}
    if first is not None:
        # Few layers of one size, so that calls of a program meet in one cache.
        inner = outer = g.block
        options = {"layer": layer % 2, "is_first_microbatch": first}
    lead = (m,) if batched < 3 else (2, m // 2)
    x = g.tensor((*lead, inner))
    weight = g.tensor((outer, inner), weight=True)
    bias = g.tensor((outer,), weight=True) if biased else None
    return Call((x, weight, bias), out((*lead, outer), dtype=x.dtype), options)
