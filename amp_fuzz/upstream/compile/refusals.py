"""What eager refuses, and a compiled program computes.

Each entry asks for the text of eager's error. All of it shows without autocast too.

## compile-eig-gauge: an ill-defined gradient of linalg.eig

**What torch does** (2.13.0), from stage `aot_eager` on. Complex eigenvectors are defined up to a
factor. If a gradient depends on that factor, eager raises. Its check looks at values, which the
fake tensors of a trace do not have.

**Upstream.** Not reported that we know of.

## compile-probability-checks: binary_cross_entropy of what is no probability

**What torch does** (2.13.0), from stage `aot_eager_decomp_partition` on. Eager raises "all
elements of input should be between 0 and 1". The decomposition has no such check.

**Upstream.** [#193757](https://github.com/pytorch/pytorch/issues/193757).

## compile-not-implemented: ops that eager lacks for a dtype

**What torch does** (2.13.0), from stage `aot_eager` on. Eager raises `NotImplementedError`, of
`multilabel_margin_loss` of bfloat16 for instance. The decomposition consists of ops that have the
dtype.

**Upstream.** Not reported that we know of.

## compile-linalg-checks: a singular matrix is not refused

    torch.compile(torch.linalg.inv, backend="aot_eager")(torch.zeros(2, 2))

**What torch does** (2.7.1, 2.9.1, 2.11.0), from stage `aot_eager` on. Eager raises `_LinAlgError`.
The compiled program answers NaN: AOTAutograd drops `_linalg_check_errors`, which has no output.
`linalg.cholesky`, `linalg.solve`, `linalg.tensorinv` and others are the same.

**Upstream.** [#151309](https://github.com/pytorch/pytorch/issues/151309), mended by
[#184111](https://github.com/pytorch/pytorch/pull/184111): torch 2.13.0 raises.

## compile-full-overflow: infinite, and not refused

**What torch does** (2.9.1 to 2.15.0), on stage `inductor`; `masked_fill` since 2.7.1, from
`aot_eager_decomp_partition` on. `torch.full([2], 65536.0, dtype=torch.float16)` raises "value
cannot be converted to type c10::Half without overflow" in eager. Compiled it is inf.

**Upstream.** Not reported that we know of.

## compile-clamp-broadcast: the gradient of a narrow maximum

**What torch does** (2.13.0), from stage `aot_eager` on. The gradient of `clamp(x, min=m, max=w)`,
with `m` of shape `[3]` and a weight `w` of shape `[1]`, raises "output with shape [1] doesn't
match the broadcast shape [3]" in eager. The compiled program answers it.

**Upstream.** Not reported that we know of.
"""

from __future__ import annotations

from amp_fuzz.cases.build import call, case, x
from amp_fuzz.cases.literals import bits_of
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]

BUGS = (
    Bug(
        id="compile-eig-gauge",
        what="the gradient of linalg.eig that is ill-defined raises in eager, and is a number when compiled",
        why="the check looks at values, and fake tensors have none",
        torch=">=2.7",
        seen="2.15.0",
        backends=("compile[aot_*", "compile[inductor*"),
        kinds=("raise",),
        ops=("*",),
        expected="^RuntimeError: linalg_eig_backward: The eigenvectors in the complex case are specified up to",
        observed="^no error$",
        examples=(
            Example(
                "compile[aot_eager]",
                case(
                    [x("w0", 2, 2, values=bits_of([0.0, 1.0, -1.0, 0.0], "float32"))],
                    call("linalg.eig", "w0", to="v0 v1"),
                    contexts=(),
                ),
                wrong="",
            ),
        ),
    ),
    Bug(
        id="compile-probability-checks",
        what="binary_cross_entropy of what is no probability raises in eager, and is a number when compiled",
        why="the decomposition has no checks",
        link="https://github.com/pytorch/pytorch/issues/193757",
        torch=">=2.7",
        seen="2.15.0",
        backends=("compile[aot_eager_decomp_partition]", "compile[inductor*", "export[decomposed]"),
        kinds=("raise",),
        ops=("binary_cross_entropy*",),
        expected="^RuntimeError: all elements of (input|target) should be between 0 and 1$",
        observed="^no error$",
        examples=(
            Example(
                "compile[aot_eager_decomp_partition]",
                case(
                    [
                        x("x0", 2, domain="unit"),
                        x("x1", 2, values=bits_of([1.5, 0.5], "float32")),
                    ],
                    call("binary_cross_entropy", "x0", "x1"),
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="compile-not-implemented",
        what="ops that eager's kernels lack for a dtype run in a compiled program",
        why="decompositions are made of ops that have it",
        torch=">=2.7",
        seen="2.15.0",
        backends=("compile[aot_*", "compile[inductor*"),
        kinds=("raise",),
        ops=("*",),
        expected="^(?:NotImplemented|Runtime)Error: \"\\w+\" not implemented for '\\w+'$",
        observed="^no error$",
        examples=(
            Example(
                "compile[aot_eager]",
                case(
                    [
                        x("x0", 3, dtype="bfloat16"),
                        x("x1", 3, dtype="int64", domain="index", bound=3),
                    ],
                    call("multilabel_margin_loss", "x0", "x1"),
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="compile-linalg-checks",
        what="linalg functions that refuse a matrix in eager answer NaN or garbage when compiled",
        why="AOTAutograd drops _linalg_check_errors, which has no output",
        link="https://github.com/pytorch/pytorch/issues/151309",
        torch=">=2.7,<2.13",
        seen="2.11.0",
        backends=("compile[aot_*", "compile[inductor*"),
        kinds=("raise",),
        ops=("*",),
        expected="^_LinAlgError: ",
        observed="^no error$",
        examples=(
            Example(
                "compile[aot_eager]",
                case(
                    [x("x0", 2, 2, values=bits_of([0.0] * 4, "float32"))],
                    call("linalg.inv", "x0"),
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="compile-full-overflow",
        what="a number that float16 cannot hold is refused in eager, and infinite when compiled",
        why="generated code, and the decomposition of masked_fill, convert it without a check",
        torch=">=2.7",
        seen="2.15.0",
        backends=("compile[aot_eager_decomp_partition]", "compile[inductor*", "export[decomposed]"),
        kinds=("raise",),
        ops=("*",),
        expected="^RuntimeError: value cannot be converted to type .* without overflow",
        observed="^no error$",
        bare="diverges",
        examples=(
            Example(
                "compile[inductor]",
                case(
                    [x("x0", 2, dtype="float16")],
                    call("full_like", "x0", 65536.0),
                    contexts=(),
                    backward="none",
                ),
                torch=">=2.9",
            ),
            Example(
                "compile[aot_eager_decomp_partition]",
                case(
                    [
                        x("x0", 1, dtype="float16"),
                        x("x1", 1, dtype="bool"),
                        x("x2", values=bits_of([65536.0], "float32")),
                    ],
                    call("masked_fill", "x0", "x1", "x2"),
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="compile-clamp-broadcast",
        what="the gradient of clamp's max raises in eager where min is the wider of the two, and not when compiled",
        why="eager's formula writes in place to a tensor of the narrower shape; AOTAutograd makes no write of it",
        torch=">=2.7,<2.15",
        seen="2.13.0",
        backends=("compile[aot_*", "compile[inductor*"),
        kinds=("raise",),
        ops=("*",),
        where="*backward*",
        expected=r"^RuntimeError: output with shape \[.*\] doesn't match the broadcast shape \[",
        observed="^no error$",
        bare="diverges",
        examples=(
            Example(
                "compile[aot_eager]",
                case(
                    [x("x0", 1), x("x1", 3), x("w2", 1)],
                    call("clamp.Tensor", "x0", "x1", "w2"),
                    contexts=(),
                ),
            ),
        ),
    ),
)
