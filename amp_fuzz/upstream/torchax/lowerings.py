"""Single ops that torchax lacks or computes wrongly: matched by the text of the divergence.

Seen with torchax 0.0.13 and jax 0.10.2 on the CPU. The scripts start with the lines that
[torchax](../torchax.md) shows.

## torchax-16-bit: 16-bit linear algebra and transforms raise

torch casts these ops, but torchax leaves them in 16 bits ([torchax-composites]), for which JAX has
no kernels: `fft.*`, most of `linalg`, `quantile`. Convolutions keep inputs of two dtypes, which
`lax.conv_general_dilated` rejects.
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
        harm="raises",
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
