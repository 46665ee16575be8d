"""Where XLA's results differ from torch's, seen through JAX.

Seen with jax 0.10.2 on the CPU, by `amp-fuzz run --backends='jax*'`. The casts are the reference's
own, so no bug here is about autocast. The examples need only JAX and NumPy.

## xla-excess-precision: the rounding of a 16-bit result is left out

On `jax[jit+excess]` only. `xla_allow_excess_precision` is on by default in XLA. If XLA compiles a
cast to 16 bits together with the cast back, it drops both. So `(a @ b).astype(float32) + c` of
bfloat16 `a` and `b` adds the unrounded product. This is documented and not a bug.
[JAX](../../guide/jax.md#excess-precision) has an example and explains how it is recognised.
"""

from __future__ import annotations

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import call, case, x
from amp_fuzz.upstream.bug import Bug, Example
from amp_fuzz.upstream.xla.excess import Excess

__all__ = ["BUGS"]

BUGS = (
    Bug(
        id="xla-excess-precision",
        what="a 16-bit result is not rounded if the next op computes in float32",
        why="xla_allow_excess_precision, XLA's default, lets it drop a cast to 16 bits and the cast back",
        link="https://docs.jax.dev/en/latest/xla_flags.html",
        torch=">=2.7",
        seen="2.13.0",
        harm="silent value",
        backends=("jax[jit+excess*",),
        imitation=Imitation(around=Excess),
        examples=(
            Example(
                "jax[jit+excess]",
                case(
                    [
                        x("x0", 8, 8, dtype="bfloat16"),
                        x("x1", 8, 8, dtype="bfloat16"),
                        x("x2", 8, 8),
                    ],
                    call("mm", "x0", "x1"),
                    call("float", "v0", form="method", to="v1"),
                    call("add", "v1", "x2", to="v2"),
                    backward="none",
                    contexts=(),
                ),
            ),
        ),
    ),
)
