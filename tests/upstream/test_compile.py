"""What no example of a known bug of torch.compile shows: faults beside it, and imitations."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
from amp_fuzz.upstream.compile.mixed import refuses

from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import Observation, quiet
from amp_fuzz.backends.imitation import current
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.literals import bits_of
from amp_fuzz.cases.program import Checkpoint, NoGrad, Statement, TensorSpec
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.reference import autocast
from amp_fuzz.reference.custom_ops import opaque
from amp_fuzz.upstream import BUGS, quirks, shipped
from amp_fuzz.upstream.bug import Example
from amp_fuzz.upstream.compile.functional import without_out
from amp_fuzz.upstream.compile.handed_on import handed_on
from amp_fuzz.upstream.explain import judge_of
from amp_fuzz.upstream.known import Known
from amp_fuzz.upstream.lowering import kernels
from tests.helpers import BF16, WrongKernel, call, case, needs_torch, under, x

pytestmark = pytest.mark.thorough

EAGER, AOT, DECOMPOSED, INDUCTOR = (
    "compile[eager]",
    "compile[aot_eager]",
    "compile[aot_eager_decomp_partition]",
    "compile[inductor]",
)


def judged(example: Example, known: Sequence[Known], *, wrong: str = "") -> Verdict:
    backend = backends()[example.backend]
    with quiet():
        return judge_of(WrongKernel(backend, wrong) if wrong else backend, known).judge(
            example.case
        )


# -- bugs that explain a case together -----------------------------------------------------------


NEG = call("neg", "x0", to="v9")
FORWARD: Any = {"contexts": (), "backward": "none"}
PLAIN = case([x("x0", 2)], NEG)


def _reentrant(op: str, *more: Statement, **fields: Any) -> Case:
    """Return a case in which only a reentrant checkpoint makes results require grad."""
    body = call(op, *(("x0", "w1") if op == "le" else ("w1", "w1")))
    region = under(Checkpoint(use_reentrant=True), body, call("add", "x0", "x0", to="v1"))
    return case([x("x0"), x("w1")], *more[:1], region, *more[1:], contexts=(), **fields)


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
    (
        "compile-norm-statistics+compile-mixed-layer-norm",  # eager refuses the first
        Example(
            DECOMPOSED,
            case(
                [x("w0", 4, 3, dtype="bfloat16"), x("w1", 3), x("w2", 3, dtype="float16")],
                call("layer_norm", "w0", [3], "w1", "w2"),
                call("native_layer_norm", "w0", [3], "w1", "w1", 1e-5, to="v1 v2 v3"),
                contexts=(),
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


def test_a_gradient_that_something_depends_on_is_not_lost_in_a_reentrant_checkpoint() -> None:
    example = Example(EAGER, _reentrant("logaddexp", NEG, returns=("v9", "v0")))
    assert judged(example, shipped()).outcome == "agreed"
    assert judged(example, shipped(), wrong="logaddexp").outcome == "diverged"


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


def test_a_gelu_is_made_of_the_vectorised_erf() -> None:
    """Where it cancels; by how much depends on the machine."""
    values = bits_of([-2.5 - i / 64 for i in range(128)], "float32")
    one = case([x("x0", 128, values=values), x("w1", 2)], call("gelu", "x0"), contexts=())
    example = Example(INDUCTOR, one)
    verdict = judged(example, shipped())
    assert (verdict.outcome, verdict.known) in (("agreed", ""), ("known", "compile-erf"))
    assert judged(example, shipped(), wrong="gelu").outcome == "diverged"


def test_what_may_be_done_once_only_is_left_as_it_is() -> None:
    """It draws random numbers, writes statistics, or writes a list."""
    aten = torch.ops.aten
    for op in (aten.bernoulli.out, aten._native_batch_norm_legit.out, aten.split_copy.Tensor_out):
        assert without_out(op) == (None, ())
    assert without_out(aten.kthvalue.values) == (aten.kthvalue.default, ("values", "indices"))


def test_mixed_dtypes_are_explained_at_the_ops_that_refuse_them_only() -> None:
    (mixed,) = [k for k in shipped() if k.id == "compile-mixed-dtype"]
    said = "RuntimeError: mixed dtype (CPU): expect parameter to have scalar type of Float"
    for op, explained in (
        ("instance_norm", True),
        ("batch_norm", True),
        ("mv", False),
        ("", False),
    ):
        assert mixed.explains("raise", [op], expected=said, observed="no error") is explained


def test_a_weight_norm_of_float16_cannot_be_trained_compiled() -> None:
    needs_torch(">=2.9,<2.15")
    inputs = [x("w0", 4, 3, dtype="float16"), x("w1", 4, 1, dtype="float16")]
    one = case(inputs, call("_weight_norm", "w0", "w1", 0), contexts=())
    example = Example(DECOMPOSED, one)
    assert judged(example, shipped()).known == "compile-weight-norm"
    with quirks(["compile-weight-norm"]):
        seen = backends()[DECOMPOSED].reference().run(one)
    assert seen.raised is not None
    assert seen.raised.message == "expected scalar type Float but found Half"


FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", FLOATS)
def test_layer_norm_refuses_what_its_kernel_refuses(dtype: torch.dtype) -> None:
    for weight, bias in itertools.product((*FLOATS, None), repeat=2):
        parameters = [p if p is None else torch.ones(2, dtype=p) for p in (weight, bias)]
        given = torch.ones(3, 2, dtype=dtype)
        try:
            torch.native_layer_norm(given, [2], *parameters, 1e-5)
            refused = False
        except RuntimeError:
            refused = True
        assert refuses(given, *parameters) is refused


def test_functions_that_forget_hide_no_tensor_that_overrides_them() -> None:
    """Modules ask it before they take a fast path; the mode alone is not to be seen."""

    class Other(torch.Tensor):
        pass

    weight = torch.nn.Parameter(torch.ones(2))
    for functions in (handed_on, nullcontext):
        with functions():
            seen = [torch.overrides.has_torch_function((t,)) for t in (weight, weight.data)]
            assert seen == [False, False]
            assert torch.overrides.has_torch_function((weight, weight.data.as_subclass(Other)))


def test_a_function_that_is_given_one_tensor_twice_gives_the_gradient_of_its_last_place() -> None:
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: torch.Tensor) -> torch.Tensor:
            return sum(given)  # type: ignore[return-value]

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            return g, 10 * g, 100 * g

    one, two = (torch.ones((), requires_grad=True) for _ in range(2))
    with quirks(["compile-function-twice"]), current().around():
        made: Any = Sum.apply(one, two, one)
    assert torch.autograd.grad(made, (one, two)) == (100, 10)


def test_a_custom_op_hides_what_compilers_do_only() -> None:
    def zero(made: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(made)

    op, one = torch.ops.aten.neg.default, torch.ones(2)
    compiled, anywhere = (kernels({op: zero}, bodies=b)[op] for b in (False, True))
    with opaque():
        assert compiled(op, one) is NotImplemented
        assert torch.equal(anywhere(op, one), zero(one))
    assert torch.equal(compiled(op, one), zero(one))


def test_the_body_of_a_custom_op_is_not_decomposed() -> None:
    """The op stands in the graph; when it is called again by itself, the program is compiled."""
    needs_torch("<2.15")
    one = case(
        [x("x0", 6), x("x1", 6)],
        call("_weight_norm", "x0", "x1", 0),
        entry="custom_op",
        calls=2,
        contexts=(),
        backward="none",
    )
    assert judged(Example(DECOMPOSED, one), shipped()).known == "compile-weight-norm"
    once = msgspec.structs.replace(one, plan=msgspec.structs.replace(one.plan, calls=1))
    assert judged(Example(DECOMPOSED, once), shipped()).outcome == "agreed"


@dataclass(frozen=True)
class WrongGradient(WrongKernel):
    """Gets the gradients of the weights wrong: each element by half of itself."""

    def _wrong(self, case: Case, seen: Observation) -> Observation:
        for label, value in seen.values.items():
            if label.endswith(".grad") and value is not None:
                seen.values[label] = value * 1.5
        return seen


GRADIENTS: Mapping[str, Example] = {
    "compile-mixed-layer-norm": Example(
        DECOMPOSED,
        case(
            [x("w0", 4, 3, dtype="bfloat16"), x("w1", 3, dtype="float16"), x("w2", 3)],
            call("layer_norm", "w0", [3], "w1", "w2"),
            contexts=(),
        ),
    ),
    "compile-mixed-mv": Example(
        DECOMPOSED,
        case(
            [x("x0", 3, dtype="float16"), x("w1", 2, dtype="float16"), x("w2", 3)],
            call("addr", "x0", "w1", "w2"),
            contexts=(),
        ),
    ),
    "compile-norm-statistics": Example(
        DECOMPOSED,
        case(
            [x("w0", 2, 3, dtype="bfloat16"), x("w1", 3), x("w2", 3)],
            call("native_layer_norm", "w0", [3], "w1", "w2", 1e-5, to="v0 v1 v2"),
            contexts=(),
        ),
    ),
    "compile-norm-statistics, layer norm": Example(
        DECOMPOSED,
        case(
            [x("x0", 6, 4, dtype="bfloat16"), x("w1", 6, 4), x("x2", 6, 4)],
            call("layer_norm", "x0", [6, 4], "w1", "x2"),
            contexts=(),
        ),
    ),
    "compile-norm-statistics, batch norm": Example(
        DECOMPOSED,
        case(
            [x("w0", 4, 3, 2, dtype="bfloat16"), x("w1", 3)],
            call("batch_norm.batch_statistics", "w0", None, None, "w1", None, True),
            contexts=(),
        ),
    ),
    "compile-group-norm": Example(
        DECOMPOSED,
        case(
            [x("x0", 3, 2, dtype="bfloat16"), x("w1", 2)],
            call("group_norm", "x0", 1, "w1"),
            contexts=(),
            seed=1,
        ),
    ),
    "compile-hardsigmoid": Example(
        DECOMPOSED,
        case([x("w1", 4, dtype="float64")], call("hardsigmoid", "w1"), contexts=()),
    ),
    "compile-max-pool-indices": Example(
        INDUCTOR,
        case(
            [
                x(
                    "w1",
                    1,
                    2,
                    2,
                    layout="transposed",
                    values=bits_of([0.0, 1.0, 0.0, 0.0], "float32"),
                )
            ],
            call("max_pool2d_with_indices", "w1", kernel_size=2, to="v0 _"),
            contexts=(),
        ),
        torch=">=2.13,<2.15",
    ),
}


def test_gradients_of_a_cross_of_two_dtypes_are_judged() -> None:
    """compile.md: Inductor has them wrong. If torch mends it, the page is to be changed."""
    inputs = [x("x0", 2, 3, dtype="float16"), x("w1", 2, 3)]
    one = case(inputs, call("cross", "x0", "w1"), contexts=())
    assert judged(Example(DECOMPOSED, one), shipped()).known == "compile-mixed-cross"
    assert judged(Example(INDUCTOR, one), shipped()).outcome == "diverged"


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_that_is_wrong_in_another_way_is_not_explained(name: str) -> None:
    example = GRADIENTS[name]
    needs_torch(example.torch)
    verdict = judged(example, shipped())
    with quiet():
        wrong = judge_of(WrongGradient(backends()[example.backend], ""), shipped()).judge(
            example.case
        )
    assert (verdict.outcome, wrong.outcome) == ("known", "diverged"), verdict.divergence
    assert verdict.known == name.partition(",")[0]


def hidden(*returns: str) -> Case:
    """Return what is computed from the statistics of a norm, beside a call."""
    norm = call(
        "_native_batch_norm_legit_functional",
        *("x0", None, None, "x1", "x1", False, 1.0, 1.0),
        form="overload",
        to="v0 v1 v2 v3 v4",
    )
    inputs = [x("x0", 2, 2, dtype="bfloat16"), x("x1", 2, dtype="bfloat16"), x("x2", 2)]
    body = norm, call("abs", "v3", to="v5"), call("exp", "x2", to="v6")
    return case(inputs, *body, returns=returns, **FORWARD)


def test_what_a_listed_bug_has_a_part_in_is_explained_where_its_own_value_is_not_returned() -> None:
    """The dtype of statistics is listed at the norm, and shows at what is computed from them."""
    example = Example(DECOMPOSED, hidden("v5", "v6"))
    verdict = judged(example, shipped())
    assert verdict.divergence is not None
    assert (verdict.divergence.kind, verdict.divergence.where) == ("dtype", "v5")
    assert verdict.known == "compile-batch-norm-statistics"
    assert judged(example, shipped(), wrong="exp").outcome == "diverged"
    others = tuple(k for k in shipped() if k.id != "compile-batch-norm-statistics")
    assert judged(example, others).outcome == "diverged"


def test_a_listed_bug_elsewhere_in_the_program_explains_no_value_that_is_not_its_own() -> None:
    """Returned or not: the norm has no part in the wrong value."""
    example = Example(DECOMPOSED, hidden("v0", "v6"))
    assert judged(example, shipped()).outcome == "agreed"
    verdict = judged(example, shipped(), wrong="exp")
    assert (verdict.outcome, verdict.known) == ("diverged", "")


def test_memory_that_nobody_wrote_is_all_that_is_not_judged() -> None:
    """Nothing is known of the gradient of a vector's _weight_norm, but of its neighbour's all."""
    needs_torch("<2.15")
    both = case(
        [x("w1", 8), x("w2", 8)],
        call("_weight_norm", "w1", "w1", 0),
        call("exp", "w2", to="v1"),
        contexts=(),
    )
    example = Example(DECOMPOSED, both)
    verdict = judged(example, shipped())
    assert (verdict.outcome, verdict.known) == ("known", "compile-weight-norm")
    with quiet():
        wrong = judge_of(WrongGradient(backends()[DECOMPOSED], ""), shipped()).judge(both)
    assert wrong.outcome == "diverged"


NEAR = x("w0", 3, values=bits_of([0.0, 0.25, 0.5], "float32"))
ONE_SAMPLE = [NEAR, x("x1", dtype="int64", domain="index", bound=3), x("x2", 2, 3)]
ONE_LABEL = [NEAR, x("x1", 3, dtype="int64", domain="index", bound=3), x("x2", 2, 3)]


@pytest.mark.parametrize(
    ("inputs", "op"),
    [(ONE_SAMPLE, "multi_margin_loss"), (ONE_LABEL, "multilabel_margin_loss")],
)
@pytest.mark.parametrize("hidden", [False, True])
def test_the_loss_of_one_sample_is_explained_and_what_is_made_of_it(
    inputs: list[TensorSpec], op: str, hidden: bool
) -> None:
    loss = call(op, "w0", "x1", reduction="none")
    returns = ("v1",) if hidden else ("v0", "v1")
    one = case(inputs, loss, call("exp", "v0", to="v1"), returns=returns, contexts=())
    example = Example(AOT, one)
    assert judged(example, shipped()).known == "compile-zero-dim-loss"
    assert judged(example, shipped(), wrong="exp").outcome == "diverged"
    with quiet():
        wrong = judge_of(WrongGradient(backends()[AOT], ""), shipped()).judge(one)
    # No shadow follows the gradient of the other: its kernel refuses flags that are not 0 or 1.
    assert wrong.outcome == ("diverged" if op == "multi_margin_loss" else "known")


def test_a_bug_of_the_same_op_elsewhere_in_the_program_is_not_explained() -> None:
    """One call has a sample, which is imitated; the other call of the op is wrong."""
    loss = call("multi_margin_loss", "w0", "x1", reduction="none")
    index = call("argmin", "x2", -1, to="v1")
    more = call("multi_margin_loss", "x2", "v1", reduction="none", to="v2")
    both = case(ONE_SAMPLE, loss, index, more, backward="none")
    assert judged(Example(AOT, both), shipped()).known == "compile-zero-dim-loss"
    verdict = judged(Example(AOT, both), shipped(), wrong="multi_margin_loss")
    assert verdict.outcome == "diverged"


def test_what_a_later_stage_rounds_otherwise_is_not_explained_by_an_earlier_one() -> None:
    """Without writes in its graph Inductor fuses otherwise, and a bug of its own goes away."""
    body = (
        call("div.scalar", "b0", 300.0, form="inplace"),
        call("amax", "v0", -1, True, to="v1"),
        call("eq", "v0", "v1", to="v2"),
        call("sum.dim", "v2", -1, to="v3"),
    )
    inputs = [x("b0", 4, 64, dtype="bfloat16")]
    example = Example(INDUCTOR, case(inputs, *body, returns=("v3",), contexts=()))
    entry = BUGS["compile-mixed-mutations"].entry
    assert judged(example, (entry,)).outcome == "diverged"
    anywhere = msgspec.structs.replace(entry, stage="")
    assert judged(example, (anywhere,)).outcome == "known"


@pytest.mark.parametrize("contexts", [(), (BF16,)])
def test_so_it_is_of_a_custom_op_whose_backward_pass_raises(contexts: Any) -> None:
    """A view without history is a result that requires grad, and that cannot be differentiated."""
    body = [call("neg", "x1", to="v9"), under(NoGrad(), call("t", "w0"))]
    plan: Any = {"entry": "custom_op", "contexts": contexts, "backward": "none"}
    example = Example(AOT, case([x("w0", 3), x("x1", 3)], *body, **plan))
    assert judged(example, shipped()).known == "compile-traced-backward"
    others = [k for k in shipped() if k.id != "compile-traced-backward"]
    assert judged(example, others).outcome == "diverged"
    fine = case([x("w0", 3), x("x1", 3)], call("neg", "x1", to="v9"), call("t", "w0"), **plan)
    assert judged(Example(AOT, fine), shipped()).outcome == "agreed"
    assert judged(Example(AOT, fine), shipped(), wrong="neg").outcome == "diverged"


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


def test_a_cumsum_that_is_wrong_without_the_pass_too_is_not_explained() -> None:
    body = (call("neg", "x0"), call("cumsum", "v0", 0, to="v1"))
    example = Example(INDUCTOR, case([x("x0", 4)], *body, **FORWARD))
    verdict = judged(example, shipped(), wrong="cumsum")
    assert (verdict.outcome, verdict.known) == ("diverged", "")


def test_what_is_listed_is_not_hidden_where_it_should_agree_without_autocast() -> None:
    """An entry with `bare` asks torch for the same divergence without autocast."""
    bug = BUGS["compile-full-overflow"]
    example, entry = bug.examples[-1], bug.entry
    under_autocast = msgspec.structs.replace(entry, bare="agrees")
    assert judged(example, (under_autocast,)).outcome == "diverged"
    assert judged(example, (entry,)).outcome == "known"


def test_an_entry_that_no_small_case_shows_speaks_of_its_own_text_only() -> None:
    entry = BUGS["compile-randperm-index"].entry
    said = "RuntimeError: Not all inputs to pattern found in match.kwargs. argname=slice_shape"
    assert entry.explains("raise", ["lstm"], expected="no error", observed=said)
    assert not entry.explains("value", ["lstm"], expected="no error", observed=said)
    assert not entry.explains("raise", ["lstm"], expected="1.5", observed="AssertionError: no")
    assert entry.on(INDUCTOR)
    assert not entry.on(EAGER)


@pytest.mark.parametrize("observed", ["True became False", "False became True by us"])
def test_a_guard_that_is_deleted_turns_inference_mode_on_and_nothing_else(observed: str) -> None:
    entry = BUGS["compile-inference-guard"].entry
    said = f"inference mode: {observed}"
    assert not entry.explains("state", ["neg"], where="after an error", observed=said)
