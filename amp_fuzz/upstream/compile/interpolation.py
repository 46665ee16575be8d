"""Linear interpolation as a compiler computes it.

## compile-interpolation: the difference of neighbours

Stage aot_eager, without autocast too. Linear, bilinear and trilinear interpolation is
`a + (b - a) * part` in the decomposition (`torch._decomp.decompositions._upsample_linear`), along
each dimension, the last first. Eager's kernels compute `a * (1 - part) + b * part`. Between large
numbers of unlike signs the difference leaves the range of float32, in which 16 bits are computed,
too. Where `part` is 0, the result is NaN:

```python
x = torch.tensor([[[3e38, -3e38, 3e38]]], dtype=torch.bfloat16)
torch.nn.functional.interpolate(x, scale_factor=2.0, mode="linear")
# 3e38, 1.5e38, -1.5e38, -1.5e38, 1.5e38, 3e38; nan, -inf, -inf, inf, inf, 3e38 when compiled
```

We found no report.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import call, case, x
from amp_fuzz.cases.literals import bits_of
from amp_fuzz.upstream.bug import Bug, Example
from amp_fuzz.upstream.lowering import Lowerings, kernels, out_of

__all__ = ["BUGS", "LINEAR"]

AOT = "compile[aot_eager]"

_aten = torch.ops.aten


def _linear(
    x: torch.Tensor, size: Sequence[int], align_corners: bool, *scales: float | None
) -> torch.Tensor | None:
    """Interpolate in float32, or in float64 what has it; None for integers."""
    if not x.is_floating_point():
        return None
    wide = x.double() if x.dtype is torch.float64 else x.float()
    count = len(size)
    given = [*scales, *[None] * count][:count]
    taken = [
        _positions(length, made, align_corners, scale, wide.dtype)
        for length, made, scale in zip(x.shape[2:], size, given, strict=True)
    ]
    corners = []
    for high in product((0, 1), repeat=count):
        corner = wide
        for d, (which, (low, above, _)) in enumerate(zip(high, taken, strict=True)):
            corner = corner.index_select(d + 2, above if which else low)
        corners.append(corner)
    for d in reversed(range(count)):
        part = taken[d][2].reshape(-1, *[1] * (count - 1 - d))
        corners = [a + (b - a) * part for a, b in zip(corners[::2], corners[1::2], strict=True)]
    return corners[0].to(x.dtype)


def _positions(
    length: int, made: int, align_corners: bool, scale: float | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the neighbours of each element that is made, and its part of the way between them."""
    if align_corners:
        step = (length - 1.0) / (made - 1.0) if made > 1 else 0.0
        at = step * torch.arange(made).to(dtype)
    else:
        step = 1.0 / scale if scale else length / made
        at = step * (torch.arange(made).to(dtype) + 0.5) - 0.5
    at = at.clamp(min=0.0)
    low = at.to(torch.int64)
    return low, (low + 1).clamp(max=length - 1), (at - low).clamp(0.0, 1.0)


LINEAR: Lowerings = {
    getattr(getattr(_aten, name), overload): function
    for name in ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")
    for overload, function in (("default", _linear), ("out", out_of(_linear)))
}
"""The overloads that are decomposed, and what they come to."""

BUGS = (
    Bug(
        id="compile-interpolation",
        what="linear interpolation between large numbers of unlike signs is infinite or NaN when compiled",
        why="the decomposition takes the difference of neighbours, and adds a part of it to one of them",
        torch=">=2.7",
        seen="2.15.0",
        backends=(
            "compile[*",
            "!compile[eager]",
            "export[decomposed]",
        ),
        ops=(
            "upsample_linear1d",
            "upsample_bilinear2d",
            "upsample_trilinear3d",
        ),
        imitation=Imitation(kernels=kernels(LINEAR)),
        examples=(
            Example(
                AOT,
                case(
                    [
                        x("x0", 2),
                        x(
                            "x1",
                            1,
                            1,
                            4,
                            values=bits_of([1.0, 2.0, 2.0**127, -(2.0**127)], "float32"),
                        ),
                    ],
                    call("upsample_linear1d", "x1", mode="linear", size=[7]),
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
)
