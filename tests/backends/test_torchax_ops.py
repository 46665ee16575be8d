"""What torchax makes of single ops: each is known, and hides no other fault of the op."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch

from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.backends.reference import reference_runtime
from amp_fuzz.backends.torchax.backend import TorchaxBackend
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.literals import bits_of
from amp_fuzz.cases.program import Checkpoint, TensorSpec
from amp_fuzz.upstream import BUGS, shipped
from amp_fuzz.upstream.explain import judge_of
from amp_fuzz.upstream.torchax.examples import GRU_INPUTS, gru
from tests.backends.test_torchax import judged, judged_with, needs_jax
from tests.helpers import BF16, call, case, under, x

pytestmark = [pytest.mark.thorough, needs_jax]


def of(name: str, dtype: str, *values: float) -> TensorSpec:
    """Return an input of one dimension, of values rounded to its dtype."""
    rounded = torch.tensor(values, dtype=getattr(torch, dtype)).tolist()
    return x(name, len(values), dtype=dtype, values=bits_of(rounded, dtype))


@dataclass(frozen=True)
class Made:
    """A case, the entry that knows it, and a fault of its op that the entry must not hide.

    honest: where the entry lists an error or a dtype, after which there is nothing to see: a case
    of the same op without it.
    """

    one: Case
    known: str
    fault: str
    honest: Case | None = None


ATTENDED = [x("x0", 1, 2, 3), x("x1", 1, 3, 3), x("x2", 1, 3, 3)]
_SVD = call("linalg.svd", "x0", full_matrices=True, to="v0 v1 v2")


def _windowed(length: int) -> Case:
    """Return a transform of two samples by a window of so many."""
    named = {"n_fft": 2, "hop_length": 1, "win_length": length, "return_complex": True}
    inputs = [of("x0", "float32", 1.0, 0.0)]
    return case(inputs, call("stft.center", "x0", form="overload", **named), contexts=())


MADE = {
    "atan2": Made(
        case([x("x0", 3, dtype="int64"), x("x1", 3, dtype="bfloat16")], call("atan2", "x0", "x1")),
        "torchax-promotion",
        "atan2-too-large",
    ),
    "addr": Made(
        case(
            [x("x0", 2, 2), x("w1", 2, dtype="float16"), x("x2", 2, dtype="float16")],
            call("addr", "x0", "w1", "x2", beta=0),
        ),
        "torchax-promotion",
        "mul-too-large",
    ),
    "lu_solve": Made(
        case(
            [
                x("x0", 2, 1, dtype="float64"),
                x("x1", 2, 2),
                of("x2", "int32", 1, 2),
            ],
            call("lu_solve", "x0", "x1", "x2"),
            contexts=(),
        ),
        "torchax-promotion",
        "lu-solve-too-large",
    ),
    "gru of two dtypes": Made(
        BUGS["torchax-rnn-dtypes"].examples[0].case,
        "torchax-rnn-dtypes",
        "sigmoid-too-large",
        case(GRU_INPUTS, gru(), contexts=()),
    ),
    "gru after one with batch_first": Made(
        BUGS["torchax-sizes"].examples[0].case,
        "torchax-sizes",
        "sigmoid-too-large",
        case(GRU_INPUTS, gru(first=True), contexts=()),
    ),
    "svd of what is infinite": Made(
        case(
            [x("x0", 4, 4, values=bits_of([2.0**127] * 16, "float32"))],
            call("mul.scalar", "x0", 4.0),
            call("svd", "v0", to="v1 v2 v3"),
            contexts=(),
            backward="none",
        ),
        "torchax-unchecked",
        "mul-too-large",
        case([x("x0", 2, 2)], call("mul.scalar", "x0", 4.0), contexts=(), backward="none"),
    ),
    "svd of a weight with full matrices": Made(
        case(
            [x("w0", 2, 5)], call("linalg.svd", "w0", to="v0 v1 v2"), contexts=(), backward="none"
        ),
        "torchax-lacks",
        "svd-too-large",
        case([x("x0", 2, 5)], _SVD, contexts=(), backward="none"),
    ),
    "linalg.cross of two dtypes": Made(
        case(
            [x("x0", 3, dtype="float16"), x("x1", 3)], call("linalg.cross", "x0", "x1"), contexts=()
        ),
        "torchax-promotion",
        "mul-too-large",
    ),
    "a mean by weights of 16 bits": Made(
        case(
            [
                x("w0", 2, 4, 3, 2),
                x("x1", 2, 3, 2, dtype="int64", domain="index", bound=4),
                x("x2", 4, dtype="bfloat16"),
            ],
            call("nll_loss2d", "w0", "x1", weight="x2", ignore_index=1, reduction="mean"),
            contexts=(),
        ),
        "torchax-promotion",
        "gradients-halved",
    ),
    "corrcoef": Made(
        case([x("x0", 2, 5, dtype="float16")], call("corrcoef", "x0"), contexts=(BF16,)),
        "torchax-composites",
        "corrcoef-too-large",
    ),
    "the inverse of zeros": Made(
        case([x("x0", 8, 8, domain="zeros")], call("linalg.inv_ex", "x0", to="v0 _"), contexts=()),
        "torchax-singular",
        "inv-too-large",
        case([x("x0", 2, 2, domain="psd")], call("linalg.inv_ex", "x0", to="v0 _"), contexts=()),
    ),
    "whether zeros have an inverse": Made(
        BUGS["torchax-singular-info"].examples[0].case,
        "torchax-singular-info",
        "inv-too-large",
        case([x("x0", 2, 2, domain="psd")], call("linalg.inv_ex", "x0", to="v0 v1"), contexts=()),
    ),
    "a triangle of zeros": Made(
        case(
            [x("x0", 2, 2, 4, domain="integers"), x("x1", 2, 2, 2, domain="integers")],
            call("triangular_solve", "x0", "x1", upper=False, to="v0 _"),
            contexts=(),
            seed=1,
        ),
        "torchax-singular",
        "triangular-solve-too-large",
        case(
            [x("x0", 2, 3), x("x1", 2, 2, domain="psd")],
            call("triangular_solve", "x0", "x1", to="v0 _"),
            contexts=(),
        ),
    ),
    "antialias by a factor": Made(
        case(
            [x("x0", 1, 1, 4, 4)],
            call(
                "_upsample_bilinear2d_aa",
                "x0",
                mode="bilinear",
                align_corners=True,
                antialias=True,
                scale_factor=0.5,
            ),
            contexts=(),
        ),
        "torchax-raises",
        "exp2-too-large",
        case([of("x0", "float16", 2.0)], call("exp2", "x0"), contexts=()),
    ),
    "tensorinv of zeros": Made(
        case([x("x0", 2, 2, domain="zeros")], call("linalg.tensorinv", "x0", ind=1), contexts=()),
        "torchax-unchecked",
        "inv-too-large",
        case([x("x0", 2, 2, domain="psd")], call("linalg.tensorinv", "x0", ind=1), contexts=()),
    ),
    "a clamp of integers": Made(
        BUGS["torchax-clamp-dtype"].examples[0].case,
        "torchax-clamp-dtype",
        "clamp-too-large",
        case([of("x0", "float32", 1.0, 5.0)], call("clamp", "x0", 0.5, 2.5), contexts=()),
    ),
    "attention to nothing": Made(
        BUGS["torchax-masked-rows"].examples[0].case,
        "torchax-masked-rows",
        "mul-too-large",
        case(ATTENDED, call("scaled_dot_product_attention", "x0", "x1", "x2"), contexts=()),
    ),
    "linear inside of a loss": Made(
        BUGS["torchax-linear-inside"].examples[0].case,
        "torchax-linear-inside",
        "mm-too-large",
    ),
    "log1p of float64": Made(
        BUGS["xla-log1p"].examples[0].case,
        "xla-log1p",
        "log1p-too-large",
    ),
    "a window that is short": Made(
        BUGS["torchax-stft"].examples[0].case, "torchax-stft", "fft-too-large", _windowed(2)
    ),
    "the index of a smallest beyond NaN": Made(
        BUGS["torchax-cumulative-indices"].examples[0].case,
        "torchax-cumulative-indices",
        "cummin-too-large",
        case([of("x0", "float32", 1.0, 2.0)], call("cummin", "x0", 0, to="v0 v1"), contexts=()),
    ),
    "the shape of irfftn": Made(
        BUGS["torchax-lowerings-shape"].examples[0].case,
        "torchax-lowerings-shape",
        "irfft-too-large",
        case([x("x0", 2, 2)], call("fft.irfftn", "x0"), contexts=()),
    ),
    "a factor of one element": Made(
        BUGS["torchax-lowerings-nonfinite"].examples[0].case,
        "torchax-lowerings-nonfinite",
        "exp2-too-large",
        case([of("x0", "float16", 2.0)], call("exp2", "x0"), contexts=()),
    ),
    "a weight without a gradient": Made(
        BUGS["torchax-zero-gradients"].examples[0].case,
        "torchax-zero-gradients",
        "gradients-of-one",
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_it_is_known(faulty: tuple[TorchaxBackend, Path], name: str) -> None:
    backend, _ = faulty
    made = MADE[name]
    outcome, why = judged(backend, made.one)
    assert (outcome, why) == ("known", made.known)
    with quiet():
        assert judge_of(backend).judge(made.one).outcome == "diverged"


@pytest.mark.parametrize("name", MADE)
def test_it_hides_no_other_fault(faulty: tuple[TorchaxBackend, Path], name: str) -> None:
    made = MADE[name]
    outcome, why = judged_with(made.fault, faulty, made.honest or made.one)
    assert outcome == "diverged", why


def test_a_checkpoint_is_never_reentrant(faulty: tuple[TorchaxBackend, Path]) -> None:
    """A reentrant one would start from zeros for what has no gradient, and make NaN of them."""
    one = case(
        [of("w0", "float32", 0.0, 2.0)],
        under(
            Checkpoint(use_reentrant=True),
            call("log", "w0"),
            call("add.scalar", "w0", 1.0, to="v1"),
        ),
        call("gt", "v0", "v1", to="v2"),
        contexts=(),
    )
    one = msgspec.structs.replace(
        one, program=msgspec.structs.replace(one.program, outputs=("v1", "v2"))
    )
    reference = backends()["torchax"].reference()
    found = reference.run(one).values["w0.grad"]
    plain = reference_runtime("cpu").run(one).values["w0.grad"]
    assert found is not None
    assert plain is not None
    assert not found.isnan().any()
    assert plain.isnan().any()
    assert judged(faulty[0], one) == ("agreed", "")


@pytest.mark.parametrize("fault", ["svd-too-large", "svd-of-another-sign", "gradients-halved"])
def test_a_choice_of_singular_vectors_is_no_fault_and_hides_none(
    fault: str, faulty: tuple[TorchaxBackend, Path]
) -> None:
    """The documentation leaves it free, but for what U, V and the gradient share."""
    if fault == "gradients-halved":
        body = call("linalg.svd", "w0", full_matrices=False, to="v0 v1 v2")
        one = case([x("w0", 3, 5)], body, contexts=())
    else:
        one = case([x("x0", 2, 5)], _SVD, contexts=(), backward="none")
    assert judged(faulty[0], one) == ("agreed", "")
    assert judged_with(fault, faulty, one)[0] == "diverged"


def test_each_entry_has_a_name_of_its_own() -> None:
    assert {made.known.partition("+")[0] for made in MADE.values()} <= {k.id for k in shipped()}
    assert backends()["torchax"].name == "torchax"
