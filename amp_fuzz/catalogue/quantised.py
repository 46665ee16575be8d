"""Layers that quantise in an FP8 region, in the manner of Transformer Engine and torchao.

Each backend supplies ``fp8_linear`` itself, as it supplies ``autocast``. Outside of FP8 regions it
is `torch.nn.functional.linear`.
"""

from __future__ import annotations

from amp_fuzz.catalogue.core import Builder, Call, op, out

# Kernels of accelerators take multiples of 16 only.
_SIZES = (16, 32, 16, 48)
_LAYERS = 256


@op(
    "fp8_linear",
    function="fp8_linear",
    mixed="raises",
    floats=("float32", "bfloat16", "float16"),
    fp8=True,
)
def _fp8_linear(g: Builder) -> Call:
    rows, k, n, batched, biased, layer = g.digits(*[len(_SIZES)] * 3, 4, 3, _LAYERS)
    m, inner, outer = _SIZES[rows], _SIZES[k], _SIZES[n]
    lead = (m,) if batched < 3 else (2, m // 2)
    x = g.tensor((*lead, inner))
    weight = g.tensor((outer, inner), weight=True)
    bias = g.tensor((outer,), weight=True) if biased else None
    return Call((x, weight, bias), out((*lead, outer), dtype=x.dtype), {"layer": layer})
