"""Where XLA's results differ from torch's, seen through JAX.

Seen with jax 0.10.2 on the CPU, by `amp-fuzz run --backends='jax*'`. The casts are the reference's
own, so no bug here is about autocast. The examples need only JAX and NumPy.

## xla-depthwise: one NaN makes all channels NaN

Imitated; op by op and compiled, float64 only. If each group of a convolution has one channel, the
CPU backend turns it into a convolution without groups, in which the weights of the other groups
are 0. Zero times an infinity or NaN in one channel is NaN in all other channels. float32 and 16
bits are right. The gradient of the input has the same bug if each group has one output. We know of
no report.

```python
import os

os.environ["JAX_ENABLE_X64"] = "true"
import jax.numpy as jnp
from jax import lax

x = jnp.ones((1, 2, 3)).at[0, 0].set(jnp.nan)
w = jnp.ones((2, 1, 1))
for dtype in ("float32", "float64"):
    made = lax.conv_general_dilated(
        x.astype(dtype), w.astype(dtype), (1,), "VALID", feature_group_count=2
    )
    print(dtype, made[0, 1])  # float32 [1. 1. 1.], float64 [nan nan nan]
```

## xla-fast-tanh: tanh is inexact near 1

Imitated; op by op and compiled. On CPUs, XLA computes tanh of float32 as a quotient of polynomials
(`EmitFastTanh`). It is off by up to 4.3 units of 2^-24 near 1 (torch's by 0.5), and is 1 from
7.9988 on. If the processor has fused multiply-add, the reference that imitates it has the same
bits. The error shows in later ops: in comparisons, and in the `1 + tanh` of `gelu` with
`approximate="tanh"`. XLA uses the same approximation in `gelu` and `mish`.

```python
import jax.numpy as jnp, numpy as np

x = jnp.float32(8.2)
print(jnp.tanh(x) < 1, np.tanh(np.float32(8.2)) < 1)  # False True
```

## xla-gamma: lgamma and digamma are inexact where they are small

Imitated; op by op and compiled. XLA computes both by Lanczos' approximation (g = 7), whose large
terms cancel near 1 and 2, where lgamma is 0. The reference that imitates it computes the same
formula, so the rounding errors of the formula set the tolerance. An integer argument has no
rounding error of its own. There torch's value is exact and XLA's is not:

```python
import jax.numpy as jnp
from jax.scipy.special import gammaln

print(gammaln(jnp.array([1.0, 2.0, 3.0], jnp.float32)))  # not exactly 0, 0: some 5e-7 away
```

## xla-masked-products: a product with a mask is 0 where the mask is off

Imitated; compiled only. The algebraic simplifier replaces a product with a converted predicate by a
select, so infinities and NaN vanish:

```python
import jax, jax.numpy as jnp

masked = lambda a, mask: a * mask.astype(a.dtype)
a, mask = jnp.array([jnp.nan, jnp.inf]), jnp.array([False, False])
print(masked(a, mask), jax.jit(masked)(a, mask))  # [nan nan] [0. 0.]

largest = lambda x, g: jax.vjp(jnp.max, x)[1](g)[0]
x, g = jnp.array([1.0, 2.0, 2.0]), jnp.float32("nan")
print(largest(x, g), jax.jit(largest)(x, g))  # [nan nan nan] [ 0. nan nan]
```

The second example is how it was found. The derivative of a maximum multiplies by the mask of the
maximum, so a compiled backward pass hides a NaN loss. We know of no report.

## xla-range: beyond the range of a dtype

Listed: kind `range` only, and only if the divergence names an op whose results, or sums of some of
its terms, left the range of their dtype. XLA adds in another order than the reference's kernels,
so other partial sums overflow. A compiled program also fuses a product with the sum that uses it
(inside `linalg.cross` and `vdot`, too). Then one product is rounded to infinity and the other is
not: `a * a - b * b` is infinite where torch has NaN. The order of a sum:

```python
import jax.numpy as jnp, numpy as np

a, b = np.array([[3e38, 3e38, -3e38, -3e38]], np.float32), np.ones((4, 1), np.float32)
print(jnp.matmul(a, b), np.matmul(a, b))  # [[inf]] [[0.]], and the other way round for others
```

XLA divides a Fourier transform by its size last. It also takes a factor out of a sum if the factor
is a power of 2. So the mean of two numbers beyond half of the range, as in `interpolate` with
`mode="linear"`, is infinite in a compiled program:

```python
import jax, jax.numpy as jnp

mean, x = lambda a, b: a * 0.5 + b * 0.5, jnp.float32(3e38)
print(mean(x, x), jax.jit(mean)(x, x))  # 3e+38 inf
```

## xla-tanh: tanh of float32 is 1 from 8.0 on

XLA's approximation for CPUs clamps its argument at 7.999, where it is off by 3.8 units of 2^-24.
The error shows if many elements are off to the same side. On the backends `jax*`, the reference
imitates it: [xla-fast-tanh].

## xla-fft-layout: a Fourier transform before a decomposition does not run

Listed: kind `raise`, with XLA's whole message; compiled only. LAPACK's input is column-major. XLA
propagates that layout to the transform before it, which supports only row-major. The same error
was reported in 2024 in another place ([#22484](https://github.com/jax-ml/jax/issues/22484),
closed). The entry hides every other bug in such a program.

```python
import jax, jax.numpy as jnp

values = lambda x: jnp.linalg.svd(jnp.fft.irfft(x, n=2), compute_uv=False)
print(values(jnp.ones((2, 2))))  # [1.4142135 0.       ]
try:
    jax.jit(values)(jnp.ones((2, 2)))
except jax.errors.JaxRuntimeError as error:
    print(str(error)[:30])  # INTERNAL: RET_CHECK failure
```

## xla-log1p: log1p and atanh of float64 lose digits near -0.41

Listed: kind `value` of fewer than 1,000 units, at these ops in float64, if the result is from -0.54
to -0.43 (`log1p`) or from 0.36 to 0.45 on either side of 0 (`atanh`). Known upstream:
[#39707](https://github.com/jax-ml/jax/issues/39707).

XLA's approximation on CPUs is off by up to 241 units of 2^-53 for arguments of `log1p` from -0.4142
to -0.357, and by up to 147 for arguments of `atanh` from 0.362 to 0.4142 on either side of 0.
Elsewhere both are off by at most 5.1 units. torch's are off by at most 1.3 everywhere. (jax 0.10.2,
2,000,000 uniform arguments in each of eight intervals, compared with 80-bit arithmetic.)

```python
import os

os.environ["JAX_ENABLE_X64"] = "true"
import jax.numpy as jnp, numpy as np

print(jnp.log1p(-0.414207) / np.log1p(-0.414207) - 1)  # -2.7e-14
```

The entry also hides any other bug of these two functions that is as small and in the same range.

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
