"""Known bugs of torch.compile are explained by their entry, and another bug beside them is not."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import Observation, quiet
from amp_fuzz.backends.imitation import current
from amp_fuzz.backends.imitations.functions import handed_on
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.literals import bits_of
from amp_fuzz.cases.program import Checkpoint, DType, InferenceMode, NoGrad, Statement, TensorSpec
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.reference import autocast
from amp_fuzz.reference.custom_ops import opaque
from amp_fuzz.upstream import BUGS, quirks, shipped
from amp_fuzz.upstream.compile.functional import without_out
from amp_fuzz.upstream.compile.mixed import refuses
from amp_fuzz.upstream.explain import judge_of
from amp_fuzz.upstream.known import Known
from amp_fuzz.upstream.lowering import kernels
from tests.helpers import BF16, WrongKernel, call, case, under, x

AOT, DECOMPOSED, INDUCTOR = (
    "compile[aot_eager]",
    "compile[aot_eager_decomp_partition]",
    "compile[inductor]",
)
NEG = call("neg", "x0", to="v9")
I0 = 0.207339879295116  # the series in i0 cancels here
INFERENCE = under(InferenceMode(), call("unsqueeze", "x0", -1, form="method"))


def _onto_itself() -> Case:
    """Put a value into its own other places, where nothing else needs it."""
    places = x("x1", 3, dtype="int64", values=bits_of([2, 0, 1], "int64"))
    made = case(
        [x("x0", 3, 3), places],
        call("mm", "x0", "x0", to="v1"),
        call("index_put", "v1", "x1", "v1", False),
        contexts=(),
        backward="none",
    )
    program = msgspec.structs.replace(made.program, outputs=("v0",))
    return msgspec.structs.replace(made, program=program)


class Example(NamedTuple):
    """A case that shows a bug; `op` is the op at which another may hide. Returns: if not all."""

    case: Case
    op: str
    backend: str = AOT
    returns: tuple[str, ...] = ()


RNN_SIZES = {"w0": (4, 4, 3), "w1": (8, 3), "x2": (8, 2), "x3": (8,), "x4": (4, 2), "x5": (3,)}


def rnn_layer(checkpoint: bool) -> Example:
    """Return an RNN layer whose gates and workspace are no tensors, beside a call."""
    layer = call(
        "mkldnn_rnn_layer",
        *("w0", "w1", "x2", "x3", "x3", "x4", "x4"),
        *(False, [], 2, 2, 1, True, False, False, True),
        form="overload",
        to="v0 v1 v2 v3",
    )
    body = [call("neg", "x5", to="v9"), under(Checkpoint(), layer) if checkpoint else layer]
    inputs = [x(name, *size) for name, size in RNN_SIZES.items()]
    return Example(case(inputs, *body, contexts=()), "neg", returns=("v9", "v0"))


EXAMPLES: Mapping[str, Example] = {
    "compile-any-out": Example(
        case(
            [x("x0", 3), x("x1", 2, 3, dtype="uint8"), x("b2", 2, dtype="bool")],
            NEG,
            call("any.dim", "x1", 1, form="out", out="b2"),
            contexts=(),
            backward="none",
        ),
        "",  # an error is the end of a program
        "compile[eager]",
    ),
    "compile-checkpoint-cse": Example(
        case(
            [x("x0", 3), x("w1", 1)],
            call("topk", "x0", 1, to="v0 v1"),
            under(
                Checkpoint(),
                call("topk", "x0", 1, to="v2 v3"),
                call("mul", "v2", "w1", to="v4"),
            ),
            contexts=(),
        ),
        "mul",
        "compile[aot_eager]",
    ),
    "compile-checkpoint-dead": Example(
        case(
            [x("x0"), x("w1")],
            NEG,
            under(
                Checkpoint(use_reentrant=True),
                call("logaddexp", "w1", "w1"),
                call("add", "x0", "x0", to="v1"),
            ),
            checkpoint="reentrant",
            contexts=(),
        ),
        "neg",
        "compile[eager]",
        ("v9", "v1"),
    ),
    "compile-checkpoint-random": Example(
        case(
            [x("x0", 4)],
            NEG,
            under(Checkpoint(use_reentrant=True), call("dropout", "x0", p=0.5, training=True)),
        ),
        "dropout",
    ),
    "compile-context-fallback": Example(
        case(
            [x("x0"), x("x1", dtype="int64", domain="zeros")],
            NEG,
            under(BF16, call("take", "x0", "x1")),
            contexts=(),
            backward="none",
        ),
        "neg",
        DECOMPOSED,
    ),
    "compile-context-leak": Example(
        case([x("x0", 2, 2)], NEG, under(BF16, INFERENCE), backward="none"), "unsqueeze"
    ),
    "compile-custom-op-promise": Example(
        case(
            [x("x0", 3), x("x1", 17, 4), x("w2", 4, 9)],
            NEG,
            under(BF16, call("tensordot", "x1", "w2", dims=[[1], [0]])),
            entry="register_autocast",
            backward="outside",
        ),
        "neg",
        INDUCTOR,
    ),
    "compile-custom-op-strides": Example(
        case(
            [x("x0", 3), x("x1", 3, 4, layout="transposed")],
            NEG,
            call("logsigmoid", "x1"),
            entry="custom_op",
            backward="none",
        ),
        "",
        INDUCTOR,
    ),
    "compile-clamp-broadcast": Example(
        case(
            [x("x0", 1), x("x1", 3), x("w2", 1)],
            call("clamp.Tensor", "x0", "x1", "w2"),
            contexts=(),
        ),
        "",
    ),
    "compile-conv-strides": Example(
        case(
            [x("w1", 2, 2, 2, 9), x("x2", 2, 2, 3, 3), x("x3")],
            call(
                "Conv2d",
                *("w1", "x2", None),
                form="module",
                stride=[1, 1],
                padding=[2, 0],
                dilation=[1, 2],
                inner=2,
                made=2,
                groups=1,
                mode="replicate",
            ),
            call("neg", "x3", to="v9"),
            contexts=(),
        ),
        "neg",
        INDUCTOR,
    ),
    "compile-index-put-alias": Example(_onto_itself(), "index_put", INDUCTOR),
    "compile-contraction": Example(
        case(
            [x("x0", 1, dtype="float64", values=bits_of([I0], "float64"))],
            NEG,
            call("i0", "x0"),
            contexts=(),
            backward="none",
        ),
        "neg",
        INDUCTOR,
    ),
    "compile-counted-constant": Example(
        case(
            [x("x0", 4)],
            NEG,
            call("ones_like", "x0", dtype=DType("bool")),
            call("cumsum", "v0", 0, dtype=DType("bfloat16"), to="v1"),
            contexts=(),
            backward="none",
        ),
        "neg",
        INDUCTOR,
    ),
    "compile-eig-gauge": Example(
        case(
            [x("x0"), x("w1", 2, 2, values=bits_of([0.0, 1.0, -1.0, 0.0], "float32"))],
            NEG,
            call("linalg.eig", "w1", to="v0 v1"),
            contexts=(),
        ),
        "neg",
    ),
    "compile-elided-casts": Example(
        case(
            [x("x0", 4, 64, dtype="bfloat16")],
            call("div.scalar", "x0", 300.0),
            call("amax", "v0", -1, True, to="v1"),
            call("eq", "v0", "v1", to="v2"),
            call("sum.dim", "v2", -1, to="v3"),
            call("neg", "x0", to="v9"),
            contexts=(),
            backward="none",
        ),
        "neg",
        INDUCTOR,
        ("v3", "v9"),
    ),
    "compile-full-overflow": Example(
        case(
            [x("x0", 2, dtype="float16")],
            call("full_like", "x0", 65536.0),
            contexts=(),
            backward="none",
        ),
        "",
        INDUCTOR,
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
    "compile-inference-index": Example(
        case(
            [x("x0"), x("x1", 1), x("x2", dtype="int64", domain="zeros")],
            NEG,
            under(InferenceMode(), call("getitem.tensor", "x1", "x2", form="operator")),
            contexts=(),
            backward="none",
        ),
        "",
    ),
    "compile-inference-saved": Example(
        case(
            [x("x0", 1, 1), x("x1", 1, 1, 1), x("w2", 1, 1, 1)],
            call("neg", "x0", to="v9"),
            under(InferenceMode(), call("conv1d.padding", "x0", "x1")),
            call("conv1d.padding", "v0", "w2", to="v1"),
            contexts=(),
            backward="none",
        ),
        "",  # eager raises, and shows no value in which another bug could be seen
    ),
    "compile-inference-tensors": Example(
        case([x("x0", 2, 2)], NEG, INFERENCE, backward="none"), "unsqueeze"
    ),
    "compile-saved-tensors": rnn_layer(checkpoint=False),
    "compile-rnn-workspace": rnn_layer(checkpoint=True),
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
    "compile-out-strides": Example(
        case(
            [x("x0", 2, 2, values="3f800000" + "00000000" * 2 + "3f800000"), x("b1", 2, 2)],
            call("neg", "x0", to="v9"),
            call("linalg.cholesky", "x0", form="out", out="b1"),
            call("view", "v0", [4], form="method", to="v1"),
            contexts=(),
            backward="none",
        ),
        "",
        "compile[aot_eager]",
    ),
    "compile-promised-dtype": Example(
        case(
            [x("x0"), x("x1", 3, dtype="bfloat16")],
            NEG,
            call("addr", "x0", "x1", "x1"),
            call("rms_norm", "v0", [3], to="v1"),
            contexts=(),
            backward="none",
        ),
        "addr",
    ),
    "compile-probability-checks": Example(
        case(
            [
                x("x0", 2),
                x("x1", 2, domain="unit"),
                x("x2", 2, values=bits_of([1.5, 0.5], "float32")),
            ],
            NEG,
            call("binary_cross_entropy", "x1", "x2"),
            contexts=(),
            backward="none",
        ),
        "",
        DECOMPOSED,
    ),
}


def judged(example: Example, known: tuple[Known, ...], *, wrong: str = "") -> Verdict:
    backend, one = backends()[example.backend], example.case
    if example.returns:
        program = msgspec.structs.replace(one.program, outputs=example.returns)
        one = msgspec.structs.replace(one, program=program)
    with quiet():
        return judge_of(WrongKernel(backend, wrong) if wrong else backend, known).judge(one)


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


def test_a_convolution_in_another_layout_leaves_the_range_in_another_order() -> None:
    """Inductor gives torch's kernel channels last; what stays in the range is still compared."""
    inputs = [
        x("x0", 1, 6, 6, 4, dtype="bfloat16", domain="overflow"),
        x("w1", 12, 1, 3, 3, dtype="bfloat16"),
        x("x2", 1, 6, 6, 4, dtype="bfloat16"),
    ]
    body = [
        call("conv2d.padding", f"x{i}", "w1", None, padding="same", groups=6, to=f"v{i}")
        for i in (0, 2)
    ]
    one = case(inputs, *body, contexts=(), backward="none")
    example = Example(one, "", INDUCTOR)
    verdict = judged(example, shipped())
    assert verdict.divergence is not None
    assert (verdict.divergence.kind, verdict.divergence.where) == ("range", "v0")
    assert verdict.known == "compile-range"
    wrong = judged(example, shipped(), wrong="conv2d.padding")
    assert wrong.divergence is not None
    assert (wrong.divergence.kind, wrong.divergence.where) == ("value", "v2")


PLAIN = case([x("x0", 2)], NEG)


def test_a_loss_of_statistics_that_are_promised_to_be_float32_is_explained() -> None:
    """They are not, and nothing casts them; nothing else of that loss is explained."""
    norm = call(
        "_native_batch_norm_legit_functional",
        *("x0", None, None, "x1", "x1", True, 0.5, 1e-05),
        form="overload",
        to="v0 v1 v2 v3 v4",
    )
    inputs = [
        x("x0", 3, 4, 2, dtype="float16"),
        x("x1", 4, dtype="float16", domain="unit"),
        x("x2", dtype="float16"),
    ]
    body = norm, under(BF16, call("kl_div", "v4", "x2", reduction=2, form="overload", to="v5"))
    one = case(inputs, *body, contexts=(), backward="none")
    example = Example(one, "kl_div", returns=("v5",))
    assert judged(example, shipped()).known == "compile-promised-dtype"
    assert judged(example, shipped(), wrong="kl_div").outcome == "diverged"


@pytest.mark.parametrize("out", [False, True])
def test_a_loss_that_is_promised_to_be_wider_is_explained(out: bool) -> None:
    """With an ``out=`` eager refuses it; in the graph that has the dtype of the loss."""
    inputs = [x("x0", 3, dtype="bfloat16"), x("x1", 3), x("b2")]
    op = "soft_margin_loss"
    loss = call(op, "x0", "x1", form="out", out="b2") if out else call(op, "x0", "x1")
    body = NEG, loss, call("float", "v0", form="method", to="v1"), call("mul", "v1", "v1", to="v2")
    example = Example(case(inputs, *body, contexts=(), backward="none"), op)
    assert "compile-promised-dtype" in judged(example, shipped()).known.split("+")
    assert judged(example, shipped(), wrong=op).outcome == "diverged"


def test_layer_norm_statistics_that_are_promised_in_16_bits_are_explained() -> None:
    """They are float32; a cast of them to bfloat16 is left out of the graph."""
    body = (
        call("native_layer_norm", "x2", [3], None, "x1", 1e-5, to="_ _ v0"),
        call("bfloat16", "v0", form="method", to="v1"),
        call("type_as", "v1", "v0", form="method", to="v2"),
        call("add", "x0", "v2", to="v3"),
    )
    inputs = [x("x0", 3), x("x1", 3), x("x2", 2, 3, dtype="bfloat16")]
    example = Example(case(inputs, NEG, *body, contexts=(), backward="none"), "neg")
    assert judged(example, shipped()).known == "compile-promised-dtype"
    assert judged(example, shipped(), wrong="neg").outcome == "diverged"
    assert judged(example, shipped(), wrong="native_layer_norm").outcome == "diverged"
    others = [k for k in shipped() if k.id != "compile-promised-dtype"]
    assert judged(example, others).outcome == "diverged"


def test_a_view_that_an_inference_mode_region_makes_of_a_weight_is_explained() -> None:
    """It is no inference tensor in eager, which may save it; what eager refuses to save is not."""
    region = under(InferenceMode(), call("broadcast_to", "w1", [2, 3]))
    used = call("fmax", "v0", "w1", to="v1")
    example = Example(case([x("w1", 2, 3)], region, used, contexts=(), backward="none"), "")
    assert judged(example, shipped()).known == "compile-inference-tensors"
    others = [k for k in shipped() if k.id != "compile-inference-tensors"]
    assert judged(example, others).outcome == "diverged"


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
    example = Example(one, "", INDUCTOR)
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


def test_a_fast_path_is_imitated_beside_functions_that_forget() -> None:
    """One kernel, in which nothing is cast. A mode of torch functions would keep away from it."""
    layer = call(
        "TransformerEncoderLayer", "x0", form="module",
        embedding=4, heads=2, wide=3, activation="relu", first=True, training=False,
        names=list(_LAYER), weights=[spec.name for spec in _LAYER.values()], mask=None,
    )  # fmt: skip
    inputs = [x("x0", 2, 3, 4, dtype="bfloat16"), *_LAYER.values()]
    one = case(inputs, layer, contexts=(BF16,), backward="none")
    assert judged(Example(one, ""), shipped()).known == "compile-kernels+query-asks-cuda"


def test_a_weight_norm_of_float16_cannot_be_trained_compiled() -> None:
    inputs = [x("w0", 4, 3, dtype="float16"), x("w1", 4, 1, dtype="float16")]
    one = case(inputs, call("_weight_norm", "w0", "w1", 0), contexts=())
    example = Example(one, "_weight_norm", DECOMPOSED)
    assert judged(example, shipped()).known == "compile-weight-norm"
    with quirks(["compile-weight-norm"]):
        seen = backends()[DECOMPOSED].reference().run(one)
    assert seen.raised is not None
    assert seen.raised.message == "expected scalar type Float but found Half"


FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_layer_norm_refuses_is_what_its_kernelrefuses(dtype: torch.dtype) -> None:
    for weight, bias in itertools.product((*FLOATS, None), repeat=2):
        parameters = [p if p is None else torch.ones(2, dtype=p) for p in (weight, bias)]
        given = torch.ones(3, 2, dtype=dtype)
        try:
            torch.native_layer_norm(given, [2], *parameters, 1e-5)
            refused = False
        except RuntimeError:
            refused = True
        assert refuses(given, *parameters) is refused


def test_norms_of_both_kinds_are_imitated_in_one_program() -> None:
    """One that eager refuses, and one whose statistics are rounded."""
    inputs = [x("w0", 4, 3, dtype="bfloat16"), x("w1", 3), x("w2", 3, dtype="float16")]
    one = case(
        inputs,
        call("layer_norm", "w0", [3], "w1", "w2"),
        call("native_layer_norm", "w0", [3], "w1", "w1", 1e-5, to="v1 v2 v3"),
        contexts=(),
    )
    expected = "compile-norm-statistics+compile-mixed-layer-norm"
    found = judged(Example(one, "", DECOMPOSED), shipped()).known
    assert sorted(found.split("+")) == sorted(expected.split("+"))


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
    one = case(
        [x("x0", 6), x("x1", 6)],
        call("_weight_norm", "x0", "x1", 0),
        entry="custom_op",
        calls=2,
        contexts=(),
        backward="none",
    )
    assert judged(Example(one, "", DECOMPOSED), shipped()).known == "compile-weight-norm"
    once = msgspec.structs.replace(one, plan=msgspec.structs.replace(one.plan, calls=1))
    assert judged(Example(once, "", DECOMPOSED), shipped()).outcome == "agreed"


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
        case(
            [x("w0", 4, 3, dtype="bfloat16"), x("w1", 3, dtype="float16"), x("w2", 3)],
            call("layer_norm", "w0", [3], "w1", "w2"),
            contexts=(),
        ),
        "",
        DECOMPOSED,
    ),
    "compile-mixed-mv": Example(
        case(
            [x("x0", 3, dtype="float16"), x("w1", 2, dtype="float16"), x("w2", 3)],
            call("addr", "x0", "w1", "w2"),
            contexts=(),
        ),
        "",
        DECOMPOSED,
    ),
    "compile-norm-statistics": Example(
        case(
            [x("w0", 2, 3, dtype="bfloat16"), x("w1", 3), x("w2", 3)],
            call("native_layer_norm", "w0", [3], "w1", "w2", 1e-5, to="v0 v1 v2"),
            contexts=(),
        ),
        "",
        DECOMPOSED,
    ),
    "compile-norm-statistics, layer norm": Example(
        case(
            [x("x0", 6, 4, dtype="bfloat16"), x("w1", 6, 4), x("x2", 6, 4)],
            call("layer_norm", "x0", [6, 4], "w1", "x2"),
            contexts=(),
        ),
        "",
        DECOMPOSED,
    ),
    "compile-norm-statistics, batch norm": Example(
        case(
            [x("w0", 4, 3, 2, dtype="bfloat16"), x("w1", 3)],
            call("batch_norm.batch_statistics", "w0", None, None, "w1", None, True),
            contexts=(),
        ),
        "",
        DECOMPOSED,
    ),
    "compile-group-norm": Example(
        case(
            [x("x0", 3, 2, dtype="bfloat16"), x("w1", 2)],
            call("group_norm", "x0", 1, "w1"),
            contexts=(),
            seed=1,
        ),
        "",
        DECOMPOSED,
    ),
    "compile-hardsigmoid": Example(
        case([x("w1", 4, dtype="float64")], call("hardsigmoid", "w1"), contexts=()),
        "",
        DECOMPOSED,
    ),
    "compile-max-pool-indices": Example(
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
        "",
        INDUCTOR,
    ),
}


def test_gradients_of_a_cross_of_two_dtypes_are_judged() -> None:
    """compile.md: Inductor has them wrong. If torch mends it, the page is to be changed."""
    inputs = [x("x0", 2, 3, dtype="float16"), x("w1", 2, 3)]
    one = case(inputs, call("cross", "x0", "w1"), contexts=())
    assert judged(Example(one, "cross", DECOMPOSED), shipped()).known == "compile-mixed-cross"
    assert judged(Example(one, "cross", INDUCTOR), shipped()).outcome == "diverged"


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_that_is_wrong_in_another_way_is_not_explained(name: str) -> None:
    example = GRADIENTS[name]
    verdict = judged(example, shipped())
    with quiet():
        wrong = judge_of(WrongGradient(backends()[example.backend], ""), shipped()).judge(
            example.case
        )
    assert (verdict.outcome, wrong.outcome) == ("known", "diverged"), verdict.divergence
    assert verdict.known == name.partition(",")[0]


HIDDEN = case(
    [x("x0", 2, 2, dtype="bfloat16"), x("x1", 2, dtype="bfloat16"), x("x2", 2)],
    call(
        "_native_batch_norm_legit_functional",
        *("x0", None, None, "x1", "x1", False, 1.0, 1.0),
        form="overload",
        to="v0 v1 v2 v3 v4",
    ),
    call("abs", "v3", to="v5"),
    call("exp", "x2", to="v6"),
    contexts=(),
    backward="none",
)


def test_what_a_listed_bug_has_a_part_in_is_explained_where_its_own_value_is_not_returned() -> None:
    """The dtype of statistics is listed at the norm, and shows at what is computed from them."""
    example = Example(HIDDEN, "", DECOMPOSED, ("v5", "v6"))
    verdict = judged(example, shipped())
    assert verdict.divergence is not None
    assert (verdict.divergence.kind, verdict.divergence.where) == ("dtype", "v5")
    assert verdict.known == "compile-batch-norm-statistics"
    assert judged(example, shipped(), wrong="exp").outcome == "diverged"
    others = tuple(k for k in shipped() if k.id != "compile-batch-norm-statistics")
    assert judged(example, others).outcome == "diverged"


def test_a_listed_bug_elsewhere_in_the_program_explains_no_value_that_is_not_its_own() -> None:
    """Returned or not: the norm has no part in the wrong value."""
    example = Example(HIDDEN, "", DECOMPOSED, ("v0", "v6"))
    assert judged(example, shipped()).outcome == "agreed"
    verdict = judged(example, shipped(), wrong="exp")
    assert (verdict.outcome, verdict.known) == ("diverged", "")


def test_a_variance_that_float32_cannot_hold_is_explained() -> None:
    one = case(
        [x("x0", 2, 1, values=bits_of([2.0**126, 0.0], "float32")), x("x1", 2)],
        call("batch_norm.batch_statistics", "x0", None, None, None, None, True),
        call("exp", "x1", to="v1"),
        contexts=(),
    )
    example = Example(one, "", INDUCTOR)
    verdict = judged(example, shipped())
    assert verdict.divergence is not None
    assert (verdict.divergence.kind, verdict.known) == ("range", "compile-range")
    assert judged(example, shipped(), wrong="exp").outcome == "diverged"


def test_memory_that_nobody_wrote_is_all_that_is_not_judged() -> None:
    """Nothing is known of the gradient of a vector's _weight_norm, but of its neighbour's all."""
    both = case(
        [x("w1", 8), x("w2", 8)],
        call("_weight_norm", "w1", "w1", 0),
        call("exp", "w2", to="v1"),
        contexts=(),
    )
    example = Example(both, "", DECOMPOSED)
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
    one = case(inputs, loss, call("exp", "v0", to="v1"), contexts=())
    example = Example(one, "", returns=("v1",) if hidden else ("v0", "v1"))
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
    assert judged(Example(both, ""), shipped()).known == "compile-zero-dim-loss"
    verdict = judged(Example(both, ""), shipped(), wrong="multi_margin_loss")
    assert verdict.outcome == "diverged"


@pytest.mark.parametrize(
    ("constant", "kind"),
    [
        (call("full_like", "x0", 2, dtype=DType("bool")), "value"),
        (call("full_like", "x0", 0.5, dtype=DType("int64")), "dtype"),
        (call("new_ones", "x0", [], form="method"), "raise"),
    ],
    ids=["value", "dtype", "raise"],
)
def test_a_counted_constant_is_explained_however_it_shows(constant: Statement, kind: str) -> None:
    counted = call("cumsum", "v0", 0, to="v1")
    example = Example(case([x("x0", 4)], constant, counted, contexts=()), "", INDUCTOR)
    verdict = judged(example, shipped())
    assert verdict.divergence is not None
    assert (verdict.divergence.kind, verdict.known) == (kind, "compile-counted-constant")


def test_what_a_later_stage_rounds_otherwise_is_not_explained_by_an_earlier_one() -> None:
    """Without writes in its graph Inductor fuses otherwise, and a bug of its own goes away."""
    body = (
        call("div.scalar", "b0", 300.0, form="inplace"),
        call("amax", "v0", -1, True, to="v1"),
        call("eq", "v0", "v1", to="v2"),
        call("sum.dim", "v2", -1, to="v3"),
    )
    inputs = [x("b0", 4, 64, dtype="bfloat16")]
    example = Example(case(inputs, *body, contexts=()), "", INDUCTOR, ("v3",))
    (entry,) = (k for k in shipped() if k.id == "compile-mixed-mutations")
    assert judged(example, (entry,)).outcome == "diverged"
    anywhere = msgspec.structs.replace(entry, stage="")
    assert judged(example, (anywhere,)).outcome == "known"


@pytest.mark.parametrize("contexts", [(), (BF16,)])
def test_so_it_is_of_a_custom_op_whose_backward_pass_raises(contexts: Any) -> None:
    """A view without history is a result that requires grad, and that cannot be differentiated."""
    body = [call("neg", "x1", to="v9"), under(NoGrad(), call("t", "w0"))]
    plan: Any = {"entry": "custom_op", "contexts": contexts, "backward": "none"}
    example = Example(case([x("w0", 3), x("x1", 3)], *body, **plan), "")
    assert judged(example, shipped()).known == "compile-traced-backward"
    others = [k for k in shipped() if k.id != "compile-traced-backward"]
    assert judged(example, others).outcome == "diverged"
    fine = case([x("w0", 3), x("x1", 3)], call("neg", "x1", to="v9"), call("t", "w0"), **plan)
    assert judged(Example(fine, ""), shipped()).outcome == "agreed"
    assert judged(Example(fine, ""), shipped(), wrong="neg").outcome == "diverged"


def lstm(
    *, trained: bool, layers: int = 1, both: bool = False, bias: bool = False, first: bool = False
) -> Case:
    """Return a case of an LSTM with states of float32; trained: its input requires grad."""
    given, sides = "w0" if trained else "x0", 1 + both
    inputs = [x(given, 2, 3, 4)]
    inputs += [x(n, layers * sides, 2 if first else 3, 2) for n in ("x1", "x2")]
    for layer in range(layers):
        for _ in range(sides):
            shapes = [(8, 2 * sides if layer else 4), (8, 2), *[(8,)] * (2 * bias)]
            inputs += [x(f"w{len(inputs) + k}", *s) for k, s in enumerate(shapes)]
    weights = [spec.name for spec in inputs[3:]]
    flags = (bias, layers, 0.0, False, both, first)
    return case(inputs, call("lstm", given, ["x1", "x2"], weights, *flags, to="v0 v1 v2"))


@pytest.mark.parametrize(
    "options",
    [{}, {"layers": 2}, {"both": True, "bias": True}, {"layers": 2, "both": True, "first": True}],
)
def test_an_lstm_whose_input_is_trained_is_computed_by_cells(options: Any) -> None:
    example = Example(lstm(trained=True, **options), "lstm")
    assert judged(example, shipped()).known == "compile-lstm"
    assert judged(example, shipped(), wrong="lstm").outcome == "diverged"
    with quiet():
        wrong = judge_of(WrongGradient(backends()[AOT], ""), shipped()).judge(example.case)
    assert wrong.outcome == "diverged"


def test_an_lstm_that_is_one_kernel_in_a_graph_too_is_left_to_that() -> None:
    """What it saves for a backward pass is another entry's."""
    example = Example(lstm(trained=False), "")
    assert judged(example, shipped()).known == "compile-saved-tensors"


def test_a_cumsum_that_is_wrong_without_the_pass_too_is_not_explained() -> None:
    body = (call("neg", "x0"), call("cumsum", "v0", 0, to="v1"))
    example = Example(case([x("x0", 4)], *body, contexts=(), backward="none"), "", INDUCTOR)
    verdict = judged(example, shipped(), wrong="cumsum")
    assert (verdict.outcome, verdict.known) == ("diverged", "")


def test_what_is_listed_is_not_hidden_where_it_should_agree_without_autocast() -> None:
    """An entry with `bare` asks torch for the same divergence without autocast."""
    entry = next(k for k in shipped() if k.id == "compile-full-overflow")
    under_autocast = msgspec.structs.replace(entry, bare="agrees")
    example = EXAMPLES["compile-full-overflow"]
    assert judged(example, (under_autocast,)).outcome == "diverged"
    assert judged(example, (entry,)).outcome == "known"


def test_an_entry_explains_its_bug_beside_a_call_that_needs_autocast() -> None:
    """Without autocast the call raises for two dtypes before the bug can show."""
    example = EXAMPLES["compile-mutated-saved"]
    inputs = [*example.case.program.inputs, x("x3", 2, 2), x("x4", 2, 2, dtype="bfloat16")]
    both = case(inputs, call("mm", "x3", "x4", to="v8"), *example.case.program.body)
    assert judged(Example(both, ""), shipped()).known == "compile-mutated-saved"


@pytest.mark.parametrize(
    ("name", "kind", "expected", "observed"),
    [
        ("compile-range", "range", "0 not finite of float32[2]: x left the range", "2 not finite"),
        (
            "compile-randperm-index",
            "raise",
            "no error",
            "RuntimeError: Not all inputs to pattern found in match.kwargs. argname=slice_shape",
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


UNSHOWN = {
    "compile-not-implemented",
    "compile-onednn-descriptor",
    "compile-randperm-index",
    "compile-range",
    "compile-rnn-layer",
}


def test_zeros_that_come_back_from_a_reentrant_checkpoint_alone_are_explained() -> None:
    """Nothing else is: neither another wrong value nor a gradient that something depends on."""
    region = under(
        Checkpoint(use_reentrant=True),
        call("logaddexp", "w1", "w1"),
        call("add", "x0", "x0", to="v1"),
    )
    inputs = [x("x0"), x("w1")]
    one = case(inputs, NEG, region, contexts=())
    example = Example(one, "neg", "compile[eager]", ("v9", "v1"))
    verdict = judged(example, shipped())
    assert verdict.divergence is not None
    assert (verdict.divergence.kind, verdict.known) == ("grad-missing", "compile-checkpoint-zeros")
    assert judged(example, shipped(), wrong="neg").outcome == "diverged"
    used = case(inputs, NEG, region, contexts=())
    lost = Example(used, "logaddexp", "compile[eager]", ("v9", "v0"))
    assert judged(lost, shipped()).outcome == "agreed"
    assert judged(lost, shipped(), wrong="logaddexp").outcome == "diverged"


def test_a_guard_in_a_guard_turns_inference_mode_on() -> None:
    """What is deleted is the inner region's guard: inference mode was on when it was made."""
    body = under(
        InferenceMode(),
        under(InferenceMode(), call("binary_cross_entropy", "x0", "x0", weight="x0")),
    )
    example = Example(case([x("x0")], body, contexts=(), backward="none"), "")
    verdict = judged(example, shipped())
    assert verdict.divergence is not None
    assert "inference mode: False became True" in verdict.divergence.observed
    assert "compile-inference-guard" in verdict.known.split("+")
    (entry,) = [e for e in shipped() if e.id == "compile-inference-guard"]
    for other in ("inference mode: True became False", "inference mode: False became True by us"):
        assert not entry.explains("state", ["neg"], where="after an error", observed=other)


def test_each_listed_entry_of_a_compiler_is_shown_here() -> None:
    listed = {k.id for k in shipped() if k.id.startswith("compile-") and k.id not in BUGS}
    assert listed == EXAMPLES.keys() | UNSHOWN
