"""Transforms of several dimensions, as fake tensors see them.

## compile-fft-order: dimensions in another order than the tensor's

    torch.compile(torch.fft.fft2, backend="eager")(torch.ones(6, 2), dim=(1, 0))

**What torch does** (2.7.1, 2.9.1, 2.11.0), from stage `eager` on, without autocast too. The meta kernel of
`_fft_c2c` computes wrong strides and raises "setStorage: sizes [6, 2], strides [6, 1], ... are out of
bounds". Eager computes the transform. `ifft2`, `fftn` and `ifftn` are the same.

**Upstream.** [#106623](https://github.com/pytorch/pytorch/issues/106623) has other wrong strides of
these meta kernels. torch 2.13.0 computes it.
"""

from __future__ import annotations

from amp_fuzz.cases.build import call, case, x
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]

BUGS = (
    Bug(
        id="compile-fft-order",
        what="fft2, ifft2, fftn and ifftn over dimensions in another order raise when compiled",
        why="the meta kernel of _fft_c2c computes wrong strides",
        link="https://github.com/pytorch/pytorch/issues/106623",
        torch=">=2.7,<2.13",
        seen="2.11.0",
        backends=("compile*",),
        kinds=("raise",),
        ops=("*",),
        expected="^no error$",
        observed="fft_i?fft[2n].*setStorage: sizes ",
        examples=(
            Example(
                "compile[eager]",
                case(
                    [x("x0", 6, 2)],
                    call("fft.fft2", "x0", dim=(1, 0)),
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
)
