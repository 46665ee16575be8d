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

from amp_fuzz.cases.build import call, case, x
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]

BUGS = (
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
)
