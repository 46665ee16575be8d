"""Known bugs of torch.compile are explained by their entry, and another bug beside them is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import pytest

from amp_fuzz.backends import backends
from amp_fuzz.case import Case
from amp_fuzz.judge import Judge, Verdict, quiet
from amp_fuzz.known import Known, shipped
from amp_fuzz.program import Checkpoint, InferenceMode
from tests.helpers import BF16, WrongKernel, call, case, under, x

AOT, DECOMPOSED = "compile[aot_eager]", "compile[aot_eager_decomp_partition]"
NEG = call("neg", "x0", to="v9")
INFERENCE = under(InferenceMode(), call("unsqueeze", "x0", -1, form="method"))


class Example(NamedTuple):
    """A case that shows a bug; `op` is the op at which another may hide."""

    case: Case
    op: str
    backend: str = AOT


EXAMPLES: Mapping[str, Example] = {
    "compile-checkpoint-random": Example(
        case(
            [x("x0", 4)],
            NEG,
            under(Checkpoint(use_reentrant=True), call("dropout", "x0", p=0.5, training=True)),
        ),
        "dropout",
    ),
    "compile-context-leak": Example(
        case([x("x0", 2, 2)], NEG, under(BF16, INFERENCE), backward="none"), "unsqueeze"
    ),
    "compile-grid-sampler-fallback": Example(
        case(
            [x("x0", 1, 1, 5, 1), x("x1", 1, 2, 3, 2)],
            NEG,
            call("_grid_sampler_2d_cpu_fallback", "x0", "x1", 0, 0, True),
            backward="none",
        ),
        "_grid_sampler_2d_cpu_fallback",
    ),
    "compile-inference-guard": Example(
        case([x("x0", 2, 2)], NEG, INFERENCE, contexts=(), backward="none"), "unsqueeze"
    ),
    "compile-inference-tensors": Example(
        case([x("x0", 2, 2)], NEG, INFERENCE, backward="none"), "unsqueeze"
    ),
    "compile-mixed-dtype": Example(
        case(
            [x("x0", 2, 3, dtype="bfloat16"), *(x(n, 3, dtype="float16") for n in ("x1", "x2"))],
            NEG,
            call("layer_norm", "x0", [3], "x1", "x2"),
            contexts=(),
            backward="none",
        ),
        "",  # eager raises, and shows no value in which another bug could be seen
        DECOMPOSED,
    ),
    "compile-mutated-saved": Example(
        case([x("x0", 2), x("b1", 2), x("w2", 2)], NEG, call("mul", "b1", "w2", form="inplace")),
        "mul",
    ),
    "compile-mixed-mutations": Example(
        case(
            [x("x0", 2), x("b1", 3), x("b2", 2), x("w3", 2)],
            NEG,
            call("sqrt", "b1", form="inplace"),
            call("add", "b2", "w3", form="inplace", to="v1"),
        ),
        "add",
    ),
    "compile-norm-statistics": Example(
        case(
            [x("x0", 2, 3, dtype="bfloat16"), x("w1", 3), x("w2", 3)],
            NEG,
            call("native_layer_norm", "x0", [3], "w1", "w2", 1e-5, to="v0 v1 v2"),
            contexts=(),
            backward="none",
        ),
        "native_layer_norm",
        DECOMPOSED,
    ),
    "compile-out-dtype": Example(
        case(
            [x("x0", 2), x("x1", 2), x("b2", 2, dtype="float16")],
            call("neg", "x1", to="v9"),
            call(
                "binary_cross_entropy_with_logits",
                "x0",
                "x1",
                form="out",
                weight=None,
                reduction=0,
                out="b2",
            ),
            backward="none",
        ),
        "",
    ),
    "compile-zero-dim-loss": Example(
        case(
            [x("x0", 3), x("x1", dtype="int64", domain="index", bound=3), x("x2", 2, 3)],
            NEG,
            call("multi_margin_loss", "x0", "x1", reduction="none"),
            backward="none",
        ),
        "neg",
    ),
}


def judged(example: Example, known: tuple[Known, ...], *, wrong: str = "") -> Verdict:
    backend = backends()[example.backend]
    with quiet():
        return Judge(WrongKernel(backend, wrong) if wrong else backend, known).judge(example.case)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_entry_explains_its_bug(name: str) -> None:
    verdict = judged(EXAMPLES[name], shipped())
    assert verdict.outcome == "known", verdict.divergence
    assert name in verdict.known.split("+")


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_other_entry_explains_it(name: str) -> None:
    others = tuple(k for k in shipped() if k.id != name)
    assert judged(EXAMPLES[name], others).outcome == "diverged"


@pytest.mark.parametrize("name", [name for name, example in EXAMPLES.items() if example.op])
def test_another_bug_of_the_same_op_is_not_explained(name: str) -> None:
    verdict = judged(EXAMPLES[name], shipped(), wrong=EXAMPLES[name].op)
    assert verdict.outcome == "diverged"


def test_a_bug_of_the_same_op_elsewhere_in_the_program_is_not_explained() -> None:
    """The listed call has the shape that is listed; the other call of the op is wrong."""
    example = EXAMPLES["compile-zero-dim-loss"]
    more = call("multi_margin_loss", "x2", "v1", reduction="none", to="v2")
    index = call("argmin", "x2", -1, to="v1")
    program = example.case.program
    both = case(program.inputs, *program.body, index, more, backward="none")
    assert judged(Example(both, ""), shipped()).known == "compile-zero-dim-loss"
    verdict = judged(Example(both, ""), shipped(), wrong="multi_margin_loss")
    assert verdict.outcome == "diverged"
    assert verdict.divergence is not None
    assert verdict.divergence.where == "v2"


def test_a_wrong_result_of_the_listed_shape_is_not_hidden_where_eager_agrees_without() -> None:
    """An entry with `bare` asks torch for the same divergence without autocast."""
    entry = next(k for k in shipped() if k.id == "compile-norm-statistics")
    under_autocast = msgspec.structs.replace(entry, bare="agrees")
    example = EXAMPLES["compile-norm-statistics"]
    assert judged(example, (under_autocast,)).outcome == "diverged"
    assert judged(example, (entry,)).outcome == "known"


@pytest.mark.parametrize(
    ("name", "kind", "expected", "observed"),
    [
        ("compile-range", "range", "0 not finite of float32[2]: x left the range", "2 not finite"),
        (
            "compile-saved-tensors",
            "raise",
            "no error",
            "AssertionError: expected all tensors_saved_with_vc_check to be Tensors, got",
        ),
    ],
)
def test_an_entry_that_no_small_case_shows_speaks_of_its_own_text_only(
    name: str, kind: str, expected: str, observed: str
) -> None:
    (entry,) = (k for k in shipped() if k.id == name)
    assert entry.explains(kind, ["lstm"], expected=expected, observed=observed)
    assert not entry.explains("value", ["lstm"], expected=expected, observed=observed)
    assert not entry.explains(kind, ["lstm"], expected="1.5", observed="AssertionError: no")
    assert entry.on("compile[inductor]")
    assert not entry.on("compile[eager]")


UNSHOWN = {"compile-range", "compile-saved-tensors"}


def test_each_listed_entry_of_a_compiler_is_shown_here() -> None:
    listed = {k.id for k in shipped() if k.id.startswith("compile-") and not k.quirk}
    assert listed == EXAMPLES.keys() | UNSHOWN
