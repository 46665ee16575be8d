"""torchax[autograd]: torch's own backward pass on torchax's tensors, its findings, and faults."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.backends.process import Apart
from amp_fuzz.backends.torchax.backend import Mode, TorchaxBackend, lacking
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import (
    Autocast,
    Checkpoint,
    InferenceMode,
    NoGrad,
    regions,
    statements,
)
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.findings.repro.script import repro
from amp_fuzz.runs.engine import Settings, Task, draw
from amp_fuzz.upstream import BUGS, shipped
from amp_fuzz.upstream.explain import judge_of
from tests.backends.test_torchax import judged, judged_with, needs_jax
from tests.helpers import BF16, F16, call, case, under, x

pytestmark = pytest.mark.thorough

NAME = "torchax[autograd]"

SQUARES = [x("x0", 2, 2), x("w1", 2, 2)]
MM = case(SQUARES, call("mm", "x0", "w1"))


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TorchaxBackend, Path]]:
    """Return the backend, and the file that says which fault it has."""
    file = tmp_path_factory.mktemp("torchax") / "fault"
    file.write_text("")
    mode = Mode(autograd=True)
    process = Apart("tests.faults.torchax:Faulty", mode, str(file))
    yield TorchaxBackend(mode, process), file
    process.close()


@pytest.fixture
def backend(seeded: tuple[TorchaxBackend, Path]) -> TorchaxBackend:
    """Return it without a fault."""
    seeded[1].write_text("")
    return seeded[0]


# -- without JAX ----------------------------------------------------------------------------------


def test_what_torchs_autograd_knows_stays_in_a_case() -> None:
    """Autocast around a backward pass, no_grad and checkpoints; not double, nor inference_mode."""
    one = case(
        SQUARES,
        under(NoGrad(), call("mm", "x0", "w1")),
        under(Checkpoint(), call("exp", "v0", to="v1")),
        under(InferenceMode(), call("neg", "v0", to="v2")),
        backward="under",
        backward_context=F16,
        second="double",
        checkpoint="reentrant",
        entry="custom_fwd",
    )
    fitted = backends()[NAME].fit(one)
    assert [type(c) for c in regions(fitted.program.body)] == [NoGrad, Checkpoint]
    assert len(list(statements(fitted.program.body))) == 3
    plan = fitted.plan
    assert (plan.backward, plan.backward_context, plan.checkpoint) == ("under", F16, "reentrant")
    assert (plan.second, plan.entry) == ("retain", "context")
    assert fitted.program.outputs == ("v0", "v1", "v2")
    assert backends()[NAME].fit(fitted) == fitted


def test_what_has_no_derivative_there_is_left_out_of_this_mode_alone() -> None:
    more = lacking(backward=True).keys() - lacking().keys()
    assert {name.partition(":")[0] for name in more} <= set(CATALOGUE)
    assert all(f in CATALOGUE[op].forms for op, _, f in (n.partition(":") for n in more) if f)
    assert not backends()[NAME].supports("conv2d", "function")
    assert backends()["torchax"].supports("conv2d", "function")
    assert not backends()[NAME].supports("conv_tbc", "function")


# -- honest ---------------------------------------------------------------------------------------


@needs_jax
@pytest.mark.parametrize(
    "one",
    [
        case(SQUARES, call("mm", "x0", "w1"), backward="inside"),
        case(SQUARES, call("mm", "x0", "w1"), contexts=(F16,), backward="inside"),
        case(SQUARES, call("mm", "x0", "w1"), contexts=()),
        case(SQUARES, call("mm", "x0", "w1"), contexts=(BF16, Autocast(enabled=False))),
        case(SQUARES, call("mm", "x0", "w1"), backward="under", backward_context=BF16),
        case(
            SQUARES, call("mm", "x0", "w1"), steps=2, loop="inside", scaler=True, backward="inside"
        ),
        case(SQUARES, call("mm", "x0", "w1"), second="retain", backward="inside"),
        case(SQUARES, call("mm", "x0", "w1"), thread="inside"),
        case(SQUARES, call("mm", "x0", "w1"), first_pass="no_grad", backward="inside"),
        case(SQUARES, call("exp", "w1"), interrupted=True, entry="decorator"),
        case(SQUARES, under(Checkpoint(), call("exp", "w1"))),
        case(SQUARES, call("exp", "w1"), under(NoGrad(), call("tanh", "v0", to="v1"))),
        case(
            [x("w0", 2, 2, dtype="complex64"), x("x1", 2, 2, dtype="complex64")],
            call("mul", "w0", "x1"),
        ),
        case(SQUARES, call("argmax", "w1"), call("tanh", "w1", to="v1")),
    ],
    ids=str,
)
def test_a_plan_means_what_it_means_in_torch(backend: TorchaxBackend, one: Case) -> None:
    assert judged(backend, one) == ("agreed", "")


@needs_jax
def test_what_is_returned_twice_has_both_gradients(backend: TorchaxBackend) -> None:
    one = case(
        SQUARES, call("neg", "w1"), call("add", "v0", "x0", form="inplace", to="v1"), contexts=()
    )
    seen, expected = backend.run([one])[0], backend.reference().run(one)
    assert seen.raised is None
    got, want = seen.values["w1.grad"], expected.values["w1.grad"]
    assert got is not None
    assert want is not None
    torch.testing.assert_close(got, want)


@needs_jax
def test_honest_draws_are_explained(backend: TorchaxBackend) -> None:
    judge = judge_of(backend, shipped())
    ops = ("mm", "exp", "mul", "linear", "tanh", "flatten", "transpose")
    settings = Settings(backends=(backend.name,), ops=ops, max_statements=4)
    outcomes: Counter[str] = Counter()
    with quiet():
        for one in draw(Task(backend.name, "all", (), 8, 1), settings):
            verdict = judge.judge(one)
            outcomes[verdict.outcome] += 1
            assert verdict.outcome != "diverged", f"{verdict.divergence}\n{one}"
    assert outcomes["agreed"]


# -- faults ---------------------------------------------------------------------------------------

FAULTY = {
    "tanh-backward-too-large": case(SQUARES, call("tanh", "w1"), contexts=()),
    "gradients-halved-by-autograd": case(SQUARES, call("mm", "x0", "w1"), backward="inside"),
    "gradients-forgotten": case(SQUARES, call("mm", "x0", "w1"), backward="inside"),
    "mm-without-policy": MM,
}


@needs_jax
@pytest.mark.parametrize("name", FAULTY)
def test_a_wrong_gradient_is_found(seeded: tuple[TorchaxBackend, Path], name: str) -> None:
    policy = name == "mm-without-policy"
    found = judged_with(name, seeded, FAULTY[name])
    assert found == (("diverged", "dtype") if policy else ("backend", "backend"))
    assert judged_with("", seeded, FAULTY[name])[0] != "diverged"


# -- repros ---------------------------------------------------------------------------------------


@needs_jax
@pytest.mark.parametrize("name", ["torchax-checkpoint", "torchax-cut-graph"])
def test_a_repro_needs_only_torch_and_torchax(
    backend: TorchaxBackend, tmp_path: Path, name: str
) -> None:
    one = BUGS[name].examples[0].case
    with quiet():
        verdict = judge_of(backend).judge(one)
    script = repro(one, backend, verdict.finding(""))
    assert "amp_fuzz" not in script
    path = tmp_path / "repro.py"
    path.write_text(script)
    done = subprocess.run([sys.executable, "-I", path], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (1, "")
