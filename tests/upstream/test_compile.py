"""What no example of a known bug of torch.compile shows: faults beside it, and imitations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import Observation, quiet
from amp_fuzz.backends.imitation import current
from amp_fuzz.cases.case import Case, uses_autocast
from amp_fuzz.cases.program import Statement
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.reference import autocast
from amp_fuzz.upstream import BUGS, quirks, shipped
from amp_fuzz.upstream.bug import Example
from amp_fuzz.upstream.compile.functional import without_out
from amp_fuzz.upstream.explain import judge_of
from amp_fuzz.upstream.known import Known
from tests.helpers import BF16, WrongKernel, call, case, needs_torch, x

pytestmark = pytest.mark.thorough

AOT = "compile[aot_eager]"


def judged(example: Example, known: Sequence[Known], *, wrong: str = "") -> Verdict:
    backend = backends()[example.backend]
    with quiet():
        return judge_of(WrongKernel(backend, wrong) if wrong else backend, known).judge(
            example.case
        )


# -- bugs that explain a case together -----------------------------------------------------------


PLAIN = case([x("x0", 2)], call("neg", "x0", to="v9"))


_LAYER = {
    "self_attn.in_proj_weight": x("x1", 12, 4),
    "self_attn.in_proj_bias": x("x2", 12, dtype="bfloat16"),
    "self_attn.out_proj.weight": x("x3", 4, 4, dtype="bfloat16"),
    "self_attn.out_proj.bias": x("x4", 4),
    "linear1.weight": x("x5", 3, 4),
    "linear1.bias": x("x6", 3),
    "linear2.weight": x("x7", 4, 3, dtype="bfloat16"),
    "linear2.bias": x("x8", 4),
    "norm1.weight": x("x9", 4, dtype="bfloat16"),
    "norm1.bias": x("x10", 4, dtype="bfloat16"),
    "norm2.weight": x("x11", 4, dtype="bfloat16"),
    "norm2.bias": x("x12", 4, dtype="bfloat16"),
}
_MODULE: Any = {
    "embedding": 4,
    "heads": 2,
    "wide": 3,
    "activation": "relu",
    "first": True,
    "training": False,
    "mask": None,
}

# The ids that explain each together.
TOGETHER: Sequence[tuple[str, Example]] = (
    (
        # One kernel, in which nothing is cast. A mode of torch functions would keep away from it.
        "compile-kernels+query-asks-cuda",
        Example(
            AOT,
            case(
                [x("x0", 2, 3, 4, dtype="bfloat16"), *_LAYER.values()],
                call(
                    "TransformerEncoderLayer",
                    "x0",
                    form="module",
                    names=list(_LAYER),
                    weights=[spec.name for spec in _LAYER.values()],
                    **_MODULE,
                ),
                contexts=(BF16,),
                backward="none",
            ),
            wrong="",
        ),
    ),
)


@pytest.mark.parametrize(("known", "example"), TOGETHER, ids=[known for known, _ in TOGETHER])
def test_an_example_is_known_and_a_fault_beside_it_is_reported(
    known: str, example: Example
) -> None:
    verdict = judged(example, shipped())
    assert sorted(verdict.known.split("+")) == sorted(known.split("+")), verdict.divergence
    others = [entry for entry in shipped() if entry.id not in known.split("+")]
    assert judged(example, others).outcome == "diverged"
    wrong = example.case.program.body[-1] if example.wrong is None else example.wrong
    if wrong := wrong.op if isinstance(wrong, Statement) else str(wrong):
        assert judged(example, shipped(), wrong=wrong).outcome == "diverged"


# -- faults beside known bugs ----------------------------------------------------------------------


def test_an_out_of_other_strides_is_written_in_its_own_order() -> None:
    """Eager's kernel writes memory in order; and below autocast, which would cast the op."""
    pool: Any = getattr(torch._C._nn, "adaptive_avg_pool3d")  # noqa: B009
    given = torch.arange(12.0).reshape(2, 1, 2, 3).half()
    outs = [torch.empty_strided((2, 2, 3, 1), (1, 2, 4, 12), dtype=torch.float16) for _ in "ab"]
    pool(given, [2, 3, 1], out=outs[0])
    with quirks(["compile-out"]), autocast("cpu"):
        current().wrap(lambda: (pool(given, [2, 3, 1], out=outs[1]),), PLAIN)()
    right = pool(given, [2, 3, 1])
    assert not torch.equal(outs[0], right), "torch is mended: change the page"
    assert torch.equal(outs[1], right)


def test_an_out_that_overlaps_what_is_read_is_refused() -> None:
    """Each kernel looks for it, and so has what is compiled to."""
    square = torch.arange(4.0).reshape(2, 2)
    with quirks(["compile-out"]), pytest.raises(RuntimeError, match="refer to a single memory"):
        current().wrap(lambda: (torch.mul(square, square.t(), out=square.t()),), PLAIN)()


def test_what_may_be_done_once_only_is_left_as_it_is() -> None:
    """It draws random numbers, writes statistics, or writes a list."""
    aten = torch.ops.aten
    for op in (aten.bernoulli.out, aten._native_batch_norm_legit.out, aten.split_copy.Tensor_out):
        assert without_out(op) == (None, ())
    assert without_out(aten.kthvalue.values) == (aten.kthvalue.default, ("values", "indices"))


def test_an_out_that_torch_does_not_write_is_not_written() -> None:
    given, outs = torch.ones(1), [torch.full((1,), 7, dtype=torch.complex64) for _ in "ab"]
    torch.fft.ihfftn(given, out=outs[0])
    with quirks(["compile-out"]), autocast("cpu", torch.float16):
        current().wrap(lambda: (torch.fft.ihfftn(given, out=outs[1]),), PLAIN)()
    assert outs[0].equal(outs[1])


@dataclass(frozen=True)
class WrongGradient(WrongKernel):
    """Gets the gradients of the weights wrong under autocast: each element by half of itself."""

    def _wrong(self, case: Case, seen: Observation) -> Observation:
        if not uses_autocast(case):
            return seen
        for label, value in seen.values.items():
            if label.endswith(".grad") and value is not None:
                seen.values[label] = value * 1.5
        return seen


def lstm(*, layers: int = 1, both: bool = False, bias: bool = False, first: bool = False) -> Case:
    """Return a case of an LSTM with states of float32, whose input requires grad."""
    sides = 1 + both
    inputs = [x("w0", 2, 3, 4)]
    inputs += [x(n, layers * sides, 2 if first else 3, 2) for n in ("x1", "x2")]
    for layer in range(layers):
        for _ in range(sides):
            shapes = [(8, 2 * sides if layer else 4), (8, 2), *[(8,)] * (2 * bias)]
            inputs += [x(f"w{len(inputs) + k}", *s) for k, s in enumerate(shapes)]
    weights = [spec.name for spec in inputs[3:]]
    flags = (bias, layers, 0.0, False, both, first)
    return case(inputs, call("lstm", "w0", ["x1", "x2"], weights, *flags, to="v0 v1 v2"))


@pytest.mark.parametrize(
    "options",
    [{}, {"layers": 2}, {"both": True, "bias": True}, {"layers": 2, "both": True, "first": True}],
)
def test_an_lstm_whose_input_is_trained_is_computed_by_cells(options: Any) -> None:
    needs_torch(">=2.13")
    example = Example(AOT, lstm(**options))
    assert judged(example, shipped()).known == "compile-lstm"
    assert judged(example, shipped(), wrong="lstm").outcome == "diverged"
    with quiet():
        wrong = judge_of(WrongGradient(backends()[AOT], ""), shipped()).judge(example.case)
    assert wrong.outcome == "diverged"


def test_the_gradients_of_a_weight_that_is_used_twice_are_added_in_float32() -> None:
    """In eager both uses share a cast, and its gradient has 16 bits."""
    values = "bda6c404"  # beside a gradient of -1.5, bfloat16 cannot hold the sum
    example = case(
        [x("x0", 1, 1, values="3f800000"), x("w1", 1, 1, 1), x("x2", 1, 1, 1, values=values)],
        call("conv1d", "x0", "w1"),
        call("conv1d", "w1", "x2", to="v1"),
    )
    verdict = judged(Example(AOT, example), shipped())
    assert (verdict.outcome, verdict.known) == ("known", "compile-weight-cache")


@pytest.mark.parametrize("observed", ["True became False", "False became True by us"])
def test_a_guard_that_is_deleted_turns_inference_mode_on_and_nothing_else(observed: str) -> None:
    entry = BUGS["compile-inference-guard"].entry
    said = f"inference mode: {observed}"
    assert not entry.explains("state", ["neg"], where="after an error", observed=said)
