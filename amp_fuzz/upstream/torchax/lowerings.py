"""Single ops that torchax lacks or computes wrongly: matched by the text of the divergence.

Seen with torchax 0.0.13 and jax 0.10.2 on the CPU. The scripts start with the lines that
[torchax](../torchax.md) shows.

## torchax-lacks: missing lowerings and arguments

torchax has no lowering of some ops (`OperatorNotFound`), and lacks arguments of others.
`amp_fuzz/backends/torchax/lacks.toml` lists these ops and forms, and no drawn program has them.
This entry covers ops that call one of them, ops that JAX cannot differentiate
(`linalg.householder_product`), and composite ops in `inference_mode`, where torch does not
decompose them (`rms_norm`, `cross`, `prelu`, `hstack`, ...).

## torchax-traced: ops that read values cannot be traced

Ops that read values (`cov` branches on one) raise in a trace: `TracerBoolConversionError` and
others.

## torchax-16-bit: 16-bit linear algebra and transforms raise

torch casts these ops, but torchax leaves them in 16 bits ([torchax-composites]), for which JAX has
no kernels: `fft.*`, most of `linalg`, `quantile`. Convolutions keep inputs of two dtypes, which
`lax.conv_general_dilated` rejects.

## torchax-16-bit-kernels, torchax-unchecked: torchax runs what torch rejects

torchax runs 16-bit ops for which the CPU has no kernel (`linalg.det`). It also runs programs that
fail a check of torch's, where JAX needs no check: an in-place write to a tensor that a gradient
needs, results that do not fit `out=`, targets of `binary_cross_entropy` beyond 1, singular values
of a matrix with infinities (NaN in JAX). The reference raises there, and nothing after the error
is compared.

## torchax-sizes: `x.transpose_()` changes `x.shape`, but not `x.size()`

The method assigns another array to the tensor, but the tensor keeps its own sizes. With
`batch_first=True`, a recurrent module calls it last. So `size()` of the output has the sizes from
before the transposition, and the next module makes its initial state from them.

```python
with env:
    a = torch.ones(2, 3).to("jax")
    a.transpose_(0, 1)
    print(a.shape, a.size())  # [3, 2], [2, 3]
    b = torch.nn.GRU(3, 3, batch_first=True).to("jax")(torch.ones(2, 8, 3).to("jax"))[0]
    torch.nn.GRU(3, 3).to("jax")(b)  # TypeError: add got incompatible shapes
```

## torchax-lowerings-shape, torchax-lowerings-dtype, torchax-lowerings-nonfinite, torchax-cumulative-indices, torchax-clamp-dtype, torchax-stft, torchax-masked-rows, torchax-singular, torchax-singular-info, torchax-raises: single ops

These bugs also show without autocast. Each was found in the matrix of all ops or in random
programs.

| op | what it does | entry |
|---|---|---|
| `copy_` | takes the shape of its source instead of broadcasting it | `torchax-lowerings-shape` |
| `svd(some=)`, `linalg.svd(full_matrices=)`, `qr`, `linalg.qr(mode=)`, `fft.irfftn(s=)` and similar transforms of several dimensions, `max_unpool*`, `quantile(keepdim=)`, `matrix_power(0)` | return other shapes than requested | the same |
| `stft` with a window that is shorter than the transform | returns zeros | `torchax-stft` |
| `cummax`, `cummin` after a NaN | the index moves on to the last element; torch keeps the NaN's index | `torchax-cumulative-indices` |
| `linalg.cond` of a subnormal matrix, `linalg.ldl_factor` | `cond` is infinite; `ldl_factor` gives NaN or other pivots | `torchax-lowerings-nonfinite` |
| `linalg.inv_ex`, `triangular_solve` of a singular matrix | infinity and NaN are in other elements, with OpenBLAS's kernels for processors without AVX-512 | `torchax-singular` |
| `linalg.inv_ex` of a singular matrix | `info` is 0 | `torchax-singular-info` |
| `scaled_dot_product_attention` of a fully masked row | NaN; torch gives 0 | `torchax-masked-rows` |
| `linalg.cross`, complex `vdot` beyond the range of float64 | NaN and infinities are in other places, because XLA fuses a product and a difference | `torchax-range` |
| `cummax`, `cummin`, `col2im`, `cholesky_solve` of a batch, `logcumsumexp` of a negative dim, `searchsorted` of two dimensions, `renorm` of bfloat16, `linalg.solve(left=)`, `_upsample_*_aa`, `interpolate(scale_factor=0.5, antialias=True)`, `slice_scatter` of a negative dim and another size, `linear` of a vector, `rms_norm` in inference_mode | raise | `torchax-raises` |
| `linear_cross_entropy` in chunks | runs outside the torchax environment in a thread, and raises | the same |
| `lu_unpack`, `_native_batch_norm_legit_functional` of 16 bits | return float32 | `torchax-lowerings-dtype` |
| `floor_divide` by a number | returns float64 | the same |
| `clamp`, `clamp_min`, `clamp_max` of integers by a float | return float64; torch: float32 | `torchax-clamp-dtype` |
| `slogdet`, `logdet` | see below | not drawn |

**`slogdet` sometimes kills the process.** `_linalg_slogdet` has four results, but torchax's
lowering returns two, and torch's C++ still reads four. The result is `RuntimeError: Expected
Tensor but got InvalidTag(-1266544648)`, with another number each time, or a crash: SIGSEGV in one
of 1,308 cases, and a second crash that was not investigated. A run cannot go on after a crash, so
`lacks.toml` lists both ops.

```python
with env:
    torch.slogdet(x.to("jax"))
```

## torchax-range: values beyond the range of their dtype

If values leave the range of their dtype, the order of a sum decides between NaN and infinity. The
entry covers only the kind `range`. Subnormal numbers count as 0 ([what its kernels may
do](../../guide/jax.md#what-its-kernels-may-do)).
"""

from __future__ import annotations

import math

from amp_fuzz.cases.build import call, case, x
from amp_fuzz.cases.literals import bits_of
from amp_fuzz.upstream.bug import Bug, Example
from amp_fuzz.upstream.torchax.examples import GRU_INPUTS, gru

__all__ = ["BUGS"]

BUGS = (
    Bug(
        id="torchax-lacks",
        what="torchax has no lowering of an op, or lacks an argument of it",
        why="torchax implements only a part of ATen and raises OperatorNotFound or rejects the argument; in inference_mode composite ops reach it undecomposed",
        torch=">=2.7",
        seen="2.13.0",
        backends=("torchax*",),
        ops=("*",),
        kinds=("raise",),
        expected="^no error$",
        observed="^OperatorNotFound: Operator with name aten::[\\w.]+ has no lowering$|^NotImplementedError: Differentiation rule for 'householder_product' not implemented|^NotImplementedError: Singular value decomposition JVP not implemented for full matrices$|^TypeError: _aten__linalg_svd\\(\\) takes from 1 to 2 positional arguments|^TypeError: (_aten_\\w+|linalg_solve)\\(\\) got an unexpected keyword argument '(right|sorter|side|out_int32|left|out)'$",
        examples=(
            Example(
                "torchax",
                case([x("w0", 3, 2), x("x1", 2)], call("linalg.householder_product", "w0", "x1")),
                wrong="",
            ),
        ),
    ),
    Bug(
        id="torchax-traced",
        what="ops whose lowering reads values raise under jax.jit and jax.vjp",
        why="a traced array has no values",
        torch=">=2.7",
        seen="2.13.0",
        backends=("torchax*",),
        ops=("*",),
        kinds=("raise",),
        observed="^(Tracer\\w+|ConcretizationType|NonConcreteBooleanIndex|UnexpectedTracer)Error|^IndexError: Slice entries must be static integers. Got slice\\(None, JitTracer|^TypeError: As of JAX v0.7, parameters to jaxpr equations must have __hash__",
        examples=(Example("torchax[jit]", case([x("w0", 2, 3)], call("cov", "w0")), wrong=""),),
    ),
    Bug(
        id="torchax-16-bit",
        what="fft, linalg and quantile raise for 16-bit inputs, and convolutions for inputs of several dtypes",
        why="torchax does not find their policies (torchax-composites), and JAX has no such kernels in 16 bits",
        torch=">=2.7",
        seen="2.13.0",
        backends=("torchax*",),
        ops=("*",),
        kinds=("raise",),
        expected="^no error$",
        observed="^TypeError: lax.conv_general_dilated requires arguments to have the same dtypes|^NotImplementedError: \\(KeyError.*Unsupported dtype (bfloat16|float16)|^RuntimeError: Unsupported dtype (BFloat16|Half)|^RuntimeError: quantile\\(\\) input tensor must be either float or double dtype|^RuntimeError: This function doesn't handle types other than float and double|^ValueError: I?R?FFT input must be float32 or float64, got (bfloat16|float16)|does not support dtype (bfloat16|float16)|^RuntimeError: Attempting to convert unknown type: torch.complex32 to jax type|^RuntimeError: Input type \\(c10::\\w+\\) and bias type \\(c10::\\w+\\) should be the same",
        examples=(
            Example(
                "torchax",
                case([x("x0", 4, dtype="float16")], call("fft.rfft", "x0"), backward="none"),
                wrong="",
            ),
        ),
    ),
    Bug(
        id="torchax-16-bit-kernels",
        what="torchax runs ops on 16-bit inputs for which the CPU has no kernel",
        why="JAX computes in float32 if it has no narrower kernel; a missing CPU kernel says nothing about torchax",
        torch=">=2.7",
        seen="2.13.0",
        backends=("torchax*",),
        ops=("*",),
        kinds=("raise",),
        expected="^(RuntimeError|NotImplementedError): \"[\\w: ]+\" not implemented for '(BFloat16|Half)'$|^RuntimeError: (linalg[\\w.]+|torch.linalg[\\w.]+): Low precision dtypes not supported. Got (BFloat16|Half)$",
        observed="^no error$",
        unshown="torch refuses the program, so nothing beside it is compared",
    ),
    Bug(
        id="torchax-unchecked",
        what="torchax runs what torch rejects: results that do not fit the tensor they are written to, targets out of range, in-place writes to tensors that a gradient needs, inverses of singular matrices, singular values of matrices with infinities",
        why="its lowerings check less, and JAX's arrays are never written to",
        torch=">=2.7",
        seen="2.13.0",
        backends=("torchax*",),
        ops=("*",),
        kinds=("raise",),
        expected="result type \\w+ can't be cast to the desired output type|modified by an inplace operation|all elements of (target|input) should be between 0 and 1|cannot be converted to type [\\w:]+ without overflow|functions with out=... arguments don't support automatic differentiation|derivative for [\\w:]+ is not implemented|is not differentiable with respect to argument|Autograd not support dtype: |^_LinAlgError: (linalg\\.)?inv: (\\(Batch element \\d+\\): )?The diagonal element \\d+ is zero, the inversion could not be completed because the input matrix is singular.$|^_LinAlgError: linalg.svd: (\\(Batch element \\d+\\): )?The algorithm failed to converge because the input matrix (is ill-conditioned|contained non-finite values)|^RuntimeError: (Index put requires the source and destination dtypes match|(index|scatter|gather)\\w*\\(\\): ([Ss]elf|Expected self.dtype))",
        observed="^no error$",
        unshown="torch refuses the program, so nothing beside it is compared",
    ),
    Bug(
        id="torchax-sizes",
        what="size() does not change after transpose_: a recurrent module after one with batch_first raises",
        why="transpose_ assigns another array to the tensor; x.shape is the shape of the array, but x.size() that of the tensor",
        torch=">=2.7",
        seen="2.13.0",
        backends=("torchax*",),
        ops=("rnn_tanh", "rnn_relu", "gru", "lstm"),
        kinds=("raise",),
        expected="^no error$",
        observed="^TypeError: \\w+ got incompatible shapes for broadcasting: \\(\\d+, \\d+\\), \\(\\d+, \\d+\\)",
        bare="diverges",
        examples=(
            Example(
                "torchax",
                case(
                    GRU_INPUTS,
                    gru(first=True),
                    gru(given="v0", to="v2 v3"),
                    contexts=(),
                ),
                wrong="",
            ),
        ),
    ),
    Bug(
        id="torchax-lowerings-shape",
        what="single ops return another shape than torch, also without autocast",
        why="bugs of single lowerings: the page has a line for each op",
        torch=">=2.7",
        seen="2.13.0",
        backends=("torchax*",),
        ops=(
            "copy_",
            "fft.hfft2",
            "fft.hfftn",
            "fft.irfft2",
            "fft.irfftn",
            "linalg.matrix_power",
            "matrix_power",
            "quantile*",
            "nanquantile*",
            "linalg.qr",
            "linalg.svd",
            "max_unpool1d",
            "max_unpool2d",
            "qr",
            "svd",
        ),
        kinds=("shape",),
        bare="diverges",
        examples=(
            Example(
                "torchax",
                case([x("x0", 1, 1)], call("fft.irfftn", "x0", s=[1, 1]), contexts=()),
                wrong="",
            ),
        ),
    ),
    Bug(
        id="torchax-stft",
        what="stft with a window that is shorter than the transform returns zeros",
        why="torch writes the window into the middle of zeros, and torchax loses this write to a view",
        torch=">=2.7",
        seen="2.13.0",
        backends=("torchax*",),
        ops=("stft", "stft.center"),
        kinds=("value", "grad-value"),
        observed="^-?0: ",
        bare="diverges",
        examples=(
            Example(
                "torchax",
                case(
                    [x("x0", 2, values=bits_of([1.0, 0.0], "float32"))],
                    call(
                        "stft.center",
                        "x0",
                        form="overload",
                        n_fft=2,
                        hop_length=1,
                        win_length=1,
                        return_complex=True,
                    ),
                    contexts=(),
                ),
                wrong="",
            ),
        ),
    ),
    Bug(
        id="torchax-lowerings-nonfinite",
        what="linalg.cond of a subnormal matrix is infinite, and that of float64 is computed in float32; linalg.ldl_factor gives other pivots or NaN",
        why="bugs of single lowerings: the page has a line for each op",
        torch=">=2.7",
        seen="2.13.0",
        backends=("torchax*",),
        ops=("linalg.cond*", "linalg.ldl_factor*"),
        kinds=("nonfinite", "value"),
        bare="diverges",
        examples=(
            Example(
                "torchax",
                case(
                    [x("x0", 1, 1, values=bits_of([-1.0], "float32"))],
                    call("linalg.ldl_factor", "x0", to="v0 _"),
                    contexts=(),
                ),
                wrong="",
            ),
        ),
    ),
    Bug(
        id="torchax-singular",
        what="linalg.inv_ex and triangular_solve of a singular matrix have infinity and NaN in other elements",
        why="the inverse does not exist: each side returns the result of its own substitution, which divides by 0",
        torch=">=2.7",
        seen="2.13.0",
        backends=("torchax*",),
        ops=("linalg.inv_ex", "triangular_solve"),
        kinds=("nonfinite",),
        expected="^[1-9]\\d* not finite of ",
        observed="^[1-9]\\d* not finite",
        bare="diverges",
        unshown="it shows with OpenBLAS's kernels for processors without AVX-512",
    ),
    Bug(
        id="torchax-singular-info",
        what="info of linalg.inv_ex is 0 for a singular matrix",
        why="the lowering checks nothing and returns zeros as info",
        torch=">=2.7",
        seen="2.13.0",
        backends=("torchax*",),
        ops=("linalg.inv_ex",),
        kinds=("value",),
        expected="^[1-9]\\d* \\+- 0 at \\[.*\\], int32$",
        observed="^0: ",
        bare="diverges",
        examples=(
            Example(
                "torchax",
                case(
                    [x("x0", 2, 2, domain="zeros")],
                    call("linalg.inv_ex", "x0", to="_ v0"),
                    contexts=(),
                ),
                wrong="",
            ),
        ),
    ),
    Bug(
        id="torchax-masked-rows",
        what="scaled_dot_product_attention of a fully masked row is NaN",
        why="torchax divides 0 by 0 there; torch's attention gives 0",
        torch=">=2.7",
        seen="2.13.0",
        backends=("torchax*",),
        ops=("scaled_dot_product_attention",),
        kinds=("nonfinite", "grad-nonfinite"),
        expected="^0 not finite",
        bare="diverges",
        examples=(
            Example(
                "torchax",
                case(
                    [
                        x("x0", 1, 2, 3),
                        x("x1", 1, 3, 3),
                        x("x2", 1, 3, 3),
                        x(
                            "x3",
                            2,
                            3,
                            dtype="bool",
                            values=bits_of([False] * 3 + [True] * 3, "bool"),
                        ),
                    ],
                    call("scaled_dot_product_attention", "x0", "x1", "x2", attn_mask="x3"),
                    contexts=(),
                ),
                wrong="",
            ),
        ),
    ),
    Bug(
        id="torchax-cumulative-indices",
        what="the indices of cummax and cummin after a NaN point to other elements",
        why="the lowering compares with NaN, which is neither larger nor smaller, and takes the later element; torch keeps the NaN",
        torch=">=2.7",
        seen="2.13.0",
        backends=("torchax*",),
        ops=("cummax", "cummin"),
        kinds=("value",),
        expected="\\d+ \\+- 0 at \\[.*\\], int64$",
        bare="diverges",
        examples=(
            Example(
                "torchax",
                case(
                    [x("x0", 2, dtype="float32", values=bits_of([math.nan, 0.0], "float32"))],
                    call("cummin", "x0", 0, to="_ v0"),
                    contexts=(),
                ),
                wrong="",
            ),
        ),
    ),
    Bug(
        id="torchax-raises",
        what="single ops raise for arguments that torch accepts, also without autocast",
        why="bugs of single lowerings: the page has a line for each op",
        torch=">=2.7",
        seen="2.13.0",
        backends=("torchax*",),
        ops=(
            "_upsample_*_aa",
            "cholesky_solve",
            "slice_scatter",
            "col2im",
            "cummax",
            "cummin",
            "linalg.solve*",
            "linear",
            "linear_cross_entropy*",
            "logcumsumexp",
            "renorm",
            "rms_norm",
            "searchsorted",
            "linalg.matrix_exp",
            "logdet",
            "slogdet",
        ),
        kinds=("raise",),
        expected="^no error$",
        observed="'tuple' object is not callable|inconsistent size for core dimension|can't contain negative values|Cannot broadcast to shape with fewer dimensions|do not allow negative axes|Einstein sum subscript 'ba'|can only do math within the torchax environment|a should be 1-dimensional|Incompatible types for broadcasting|Expected Tensor but got InvalidTag|^AssertionError: $|^IndexError: tuple index out of range$|^TypeError: 'float' object is not subscriptable$",
        bare="diverges",
        examples=(
            Example("torchax", case([x("x0", 2, 3)], call("logcumsumexp", "x0", -1)), wrong=""),
        ),
    ),
    Bug(
        id="torchax-lowerings-dtype",
        what="single ops return float32 or float64 for 16-bit inputs, also without autocast",
        why="they compute in another dtype and do not cast back",
        torch=">=2.7",
        seen="2.13.0",
        backends=("torchax*",),
        ops=("_native_batch_norm_legit_functional", "floor_divide*", "lu_unpack"),
        kinds=("dtype",),
        expected="^(bfloat16|float16)$",
        observed="^(float32|float64)$",
        bare="diverges",
        examples=(
            Example(
                "torchax",
                case(
                    [
                        x("x0", 2, 2, dtype="float16"),
                        x("x1", 2, dtype="int32", values=bits_of([1, 2], "int32")),
                    ],
                    call("lu_unpack", "x0", "x1", to="v0 v1 v2"),
                ),
            ),
        ),
    ),
    Bug(
        id="torchax-clamp-dtype",
        what="clamp of integers by a float returns float64",
        why="JAX promotes 64-bit integers and a float to float64; torch gives the default dtype",
        torch=">=2.7",
        seen="2.13.0",
        backends=("torchax*",),
        ops=("clamp", "clamp_min", "clamp_max"),
        kinds=("dtype",),
        expected="^float32$",
        observed="^float64$",
        examples=(
            Example(
                "torchax",
                case(
                    [x("x0", 2, dtype="int64", values=bits_of([1, 5], "int64"))],
                    call("clamp", "x0", 0.5, 2.5),
                    contexts=(),
                ),
                wrong="",
            ),
        ),
    ),
    Bug(
        id="torchax-range",
        what="if intermediate values leave the range of their dtype, the result may be finite on one side only",
        why="XLA's kernels add in another order, and fused programs in yet another",
        torch=">=2.7",
        seen="2.13.0",
        backends=("torchax*",),
        ops=("*",),
        kinds=("range",),
        expected="left the range",
        unshown="the smallest case is a random program: it hangs on the order of a sum",
    ),
)
