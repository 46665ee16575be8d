"""Where a compiler rounds, or leaves the range of a dtype, and eager does not.

All of it shows without autocast too.

## compile-range: beyond the range of a dtype

Not a bug: where a value leaves the range of its dtype on the way, a compiler that keeps float32,
or another order of operations, comes to other infinities.

| program | eager | compiled |
|---|---|---|
| `(h * h).float()` of float16 `h` = 5000 ([#183607](https://github.com/pytorch/pytorch/issues/183607)) | inf | 2.5e7 on Inductor |
| `batch_norm` near the largest float32: the kernel accumulates in float64 | finite | NaN |
| a cross product of which both products leave the range: eager rounds one of them | inf | NaN |

**What the entry explains.** Divergences of the kind `range`, on every stage that has kernels of
its own. An element is of that kind only if it depends on a value that left the range: computed
twice in float64, without any range and with one that ends at a quarter, it comes to two values.
Inductor adds in an order of its own, so there a sum also depends on its range if the sum of its
terms' absolute values leaves it. A wrong element beside it in the same tensor is a `value` or
`nonfinite`, and a finding.

## compile-elided-casts: a value is not among itself

**What torch does** (2.13.0), on stage `inductor`. `s = x * 0.3; s == s.amax(-1, True)` of
bfloat16, with `s` not returned, is true once a row in eager, and nearly nowhere compiled. The
largest element has been rounded to 16 bits; `s`, in a kernel with the comparison, has not. The
gradient of `amax`, `amin`, `max` and `min` divides by the number of elements that are found so,
and is infinite or NaN.

**What the entry explains.** A program with such an op that agrees if Inductor rounds
(`torch._inductor.config.emulate_precision_casts`). On a CPU that option does nothing in 2.11.0 and
raises in 2.9.1, so before 2.13 the entry explains nothing there.

**Upstream.** [#195214](https://github.com/pytorch/pytorch/issues/195214).

## compile-contraction: the series of i0

**What torch does** (2.13.0), on stage `inductor`. `i0(0.207339879295116)` of float64 is 8 units
of rounding off eager's result, which is the nearest number or next to it. Both run the same C++
(`calc_i0`, a Chebyshev series). torch's own build lets the compiler fuse a product and a sum into
one rounding; Inductor passes `-ffp-contract=off`.

**What the entry explains.** A program that agrees if Inductor passes `-ffp-contract=fast`
(`torch._inductor.config.cpp.enable_floating_point_contract_flag`).

**Upstream.** Not reported that we know of.
"""

from __future__ import annotations

from amp_fuzz.cases.build import call, case, x
from amp_fuzz.cases.literals import bits_of
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]

_I0 = 0.207339879295116  # the series in i0 cancels here

BUGS = (
    Bug(
        id="compile-range",
        what="values that leave the range of their dtype on the way come out finite on one side only",
        why="a compiler keeps another precision, and another order, for what is never stored",
        torch=">=2.7",
        seen="2.15.0",
        backends=("compile[aot_*", "compile[inductor*", "export[decomposed]"),
        kinds=("range",),
        ops=("*",),
        expected="left the range",
        examples=(
            # A variance that float32 cannot hold.
            Example(
                "compile[inductor]",
                case(
                    [x("x0", 2, 1, values=bits_of([2.0**126, 0.0], "float32")), x("x1", 2)],
                    call("batch_norm.batch_statistics", "x0", None, None, None, None, True),
                    call("exp", "x1", to="v1"),
                    contexts=(),
                ),
            ),
            # Inductor gives torch's kernel channels last, so it adds in another order. The second
            # convolution stays in the range, and its fault is reported.
            Example(
                "compile[inductor]",
                case(
                    [
                        x("x0", 1, 6, 6, 4, dtype="bfloat16", domain="overflow"),
                        x("w1", 12, 1, 3, 3, dtype="bfloat16"),
                        x("x2", 1, 6, 6, 4, dtype="bfloat16"),
                    ],
                    *(
                        call("conv2d.padding", given, "w1", None, padding="same", groups=6, to=to)
                        for given, to in (("x0", "v0"), ("x2", "v1"))
                    ),
                    contexts=(),
                    backward="none",
                ),
                processor="no AMX",
            ),
        ),
    ),
    Bug(
        id="compile-elided-casts",
        what="Inductor looks for the largest or smallest element among values that are not rounded yet, and finds it nowhere",
        why="in a fused kernel a value that another part rounds to 16 bits stays float32",
        link="https://github.com/pytorch/pytorch/issues/195214",
        torch=">=2.7",
        seen="2.15.0",
        backends=("compile[inductor*",),
        kinds=("value", "nonfinite", "grad-value", "grad-nonfinite"),
        ops=("amax", "amin", "aminmax", "max", "max.dim", "min", "min.dim"),
        without="elided-casts",
        examples=(
            Example(
                "compile[inductor]",
                case(
                    [x("x0", 4, 64, dtype="bfloat16")],
                    call("div.scalar", "x0", 300.0),
                    call("amax", "v0", -1, True, to="v1"),
                    call("eq", "v0", "v1", to="v2"),
                    call("sum.dim", "v2", -1, to="v3"),
                    returns=("v3",),
                    contexts=(),
                    backward="none",
                ),
                torch=">=2.13",
            ),
        ),
    ),
    Bug(
        id="compile-contraction",
        what="i0 is up to 8 units of rounding off eager's when Inductor compiles it",
        why="Inductor compiles with -ffp-contract=off; torch's own kernels fuse the products of its series with the sums",
        torch=">=2.7",
        seen="2.15.0",
        backends=("compile[inductor*",),
        kinds=("value", "grad-value"),
        ops=("i0",),
        without="separate-roundings",
        examples=(
            Example(
                "compile[inductor]",
                case(
                    [x("x0", 1, dtype="float64", values=bits_of([_I0], "float64"))],
                    call("i0", "x0"),
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
)
