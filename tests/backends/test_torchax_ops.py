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


_GRU = BUGS["torchax-rnn-dtypes"].examples[0].case
_SVD = call("linalg.svd", "x0", full_matrices=True, to="v0 v1 v2")


MADE = {
    "gru of two dtypes": Made(
        _GRU,
        "torchax-rnn-dtypes",
        "sigmoid-too-large",
        case([x("x0", 8, 2, 3), *_GRU.program.inputs[1:]], *_GRU.program.body, contexts=()),
    ),
    "corrcoef": Made(
        case([x("x0", 2, 5, dtype="float16")], call("corrcoef", "x0"), contexts=(BF16,)),
        "torchax-composites",
        "corrcoef-too-large",
    ),
    "linear inside of a loss": Made(
        BUGS["torchax-linear-inside"].examples[0].case,
        "torchax-linear-inside",
        "mm-too-large",
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
    assert outcome not in ("agreed", "raised"), why


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
    assert judged_with(fault, faulty, one)[0] in ("diverged", "backend")


def test_what_draws_from_a_generator_of_its_own_is_not_drawn() -> None:
    assert not backends()["torchax"].supports("rand_like", "function")


def test_each_entry_has_a_name_of_its_own() -> None:
    assert {made.known.partition("+")[0] for made in MADE.values()} <= {k.id for k in shipped()}
    assert backends()["torchax"].name == "torchax"
