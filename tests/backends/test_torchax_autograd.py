"""torchax[autograd]: torch's own backward pass on torchax's tensors, its findings, and faults."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from amp_fuzz.upstream.torchax.functions import CUTS

from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.backends.process import Apart
from amp_fuzz.backends.torchax.backend import Mode, TorchaxBackend, lacking
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import (
    Autocast,
    Checkpoint,
    DType,
    InferenceMode,
    NoGrad,
    regions,
    statements,
)
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.findings.repro.script import repro
from amp_fuzz.runs.engine import Settings, Task, draw
from amp_fuzz.upstream import BUGS, quirks, shipped
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


def test_a_graph_is_cut_by_what_torchax_computes_above_autograd() -> None:
    reference = backends()[NAME].reference()
    cut = case(SQUARES, call("linear", "x0", "w1"), contexts=())
    same = case(SQUARES, call("to.dtype", "w1", DType("float32"), form="method"), contexts=())
    wide = case(SQUARES, call("to.dtype", "w1", DType("float64"), form="method"), contexts=())
    for one, missing in ((cut, True), (same, False), (wide, True), (MM, False)):
        assert reference.run(one).values["w1.grad"] is not None
        with quirks(["torchax-cut-graph"]):
            assert (reference.run(one).values["w1.grad"] is None) == missing


TABLE = """
import torch
from amp_fuzz.backends.torchax import compat
from amp_fuzz.upstream.torchax.functions import CUTS

torchax = compat.load()
from torchax.ops import ops_registry

made = {f for f, op in ops_registry.all_torch_functions.items() if op.is_jax_function}
made -= set(torchax.tensor.TENSOR_CONSTRUCTORS) | {torch.nn.functional.interpolate}
made = {f for f in made if not isinstance(f, torch._ops.OpOverloadPacket)}
made |= {torch.Tensor.__getitem__, torch.Tensor.flatten}
print(*sorted(f.__name__ for f in made ^ set(CUTS)), len(made))
"""


@needs_jax
def test_the_functions_that_cut_are_those_that_torchax_lists() -> None:
    done = subprocess.run([sys.executable, "-c", TABLE], capture_output=True, text=True)
    assert done.stdout.split() == [str(len(CUTS))], done.stdout + done.stderr


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


# -- findings -------------------------------------------------------------------------------------

FINDINGS = {
    name: BUGS[name].examples[0].case
    for name in (
        "torchax-checkpoint",
        "torchax-cut-graph",
        "torchax-backward-sizes",
        "torchax-backward-raises",
        "torchax-layer-norm-backward",
    )
}

OTHERWISE = {
    "torchax-checkpoint": ("mm-too-large", "value"),
    "torchax-cut-graph": ("exp-a-bit-too-large", "value"),
    "torchax-layer-norm-backward": ("layer-norm-too-large", "value"),
    "torchax-backward-sizes": ("mm-too-large", "value"),
    "torchax-backward-raises": ("div-mode-too-large", "value"),
}
"""A fault beside what an entry names, and what kind of divergence it is."""

TANH = call("tanh", "w1", to="v1")
FLATTENED = case(SQUARES, call("flatten", "w1", form="method"), TANH)
NORMED = FINDINGS["torchax-layer-norm-backward"]

GRADIENTS = [
    ("torchax-cut-graph", FLATTENED, "tanh-backward-too-large", "grad-value"),
    ("torchax-cut-graph", FLATTENED, "gradients-forgotten", "grad-missing"),
    ("torchax-checkpoint", FINDINGS["torchax-checkpoint"], "backward-raises-otherwise", "raise"),
    ("torchax-layer-norm-backward", NORMED, "backward-raises-otherwise", "raise"),
    ("torchax-layer-norm-backward", NORMED, "layer-norm-raises-forward", "raise"),
    (
        "torchax-backward-sizes",
        FINDINGS["torchax-backward-sizes"],
        *("backward-raises-otherwise", "raise"),
    ),
    (
        "torchax-backward-raises",
        FINDINGS["torchax-backward-raises"],
        *("backward-raises-otherwise", "raise"),
    ),
]
"""A fault of gradients beside what an entry names. Where that raises there are none to be wrong:
the error is another one, or is raised elsewhere.
"""

UNRAISED = [
    (
        case([x("x0", 2, 2), x("w1", 2, 2)], call("layer_norm", "x0", [2]), TANH, contexts=()),
        "tanh-backward-too-large",
    ),
    (
        case(SQUARES, call("matmul", "x0", "w1"), contexts=()),
        "gradients-halved-by-autograd",
    ),
    (
        case(
            SQUARES,
            under(NoGrad(), call("div.mode", "w1", "x0", rounding_mode="floor")),
            TANH,
            contexts=(),
        ),
        "tanh-backward-too-large",
    ),
]
"""Ops whose derivatives raise, where they are not asked for them, and another gradient's fault."""


@needs_jax
def test_a_derivative_that_is_wrong_is_new(backend: TorchaxBackend) -> None:
    """No entry lists wrong gradients: it would hide others behind the same op."""
    wrong = case([x("w0", 2, 5)], call("diagonal", "w0", -1, 1, 0), contexts=())
    assert judged(backend, wrong) == ("diverged", "grad-value")


@needs_jax
@pytest.mark.parametrize("name", OTHERWISE)
def test_an_entry_hides_no_other_fault(seeded: tuple[TorchaxBackend, Path], name: str) -> None:
    fault, kind = OTHERWISE[name]
    one = FINDINGS[name]
    if name == "torchax-cut-graph":
        one = case(SQUARES, call("flatten", "w1", form="method"), call("exp", "x0", to="v1"))
        assert judged_with("", seeded, one) == ("known", name)
    assert judged_with(fault, seeded, one) == ("diverged", kind)


@needs_jax
@pytest.mark.parametrize(("name", "one", "fault", "kind"), GRADIENTS)
def test_an_entry_hides_no_fault_of_gradients(
    seeded: tuple[TorchaxBackend, Path], name: str, one: Case, fault: str, kind: str
) -> None:
    assert judged_with("", seeded, one) == ("known", name)
    assert judged_with(fault, seeded, one) == ("diverged", kind)


@needs_jax
@pytest.mark.parametrize(("one", "fault"), UNRAISED)
def test_what_raises_elsewhere_hides_no_wrong_gradient(
    seeded: tuple[TorchaxBackend, Path], one: Case, fault: str
) -> None:
    assert judged_with("", seeded, one) == ("agreed", "")
    assert judged_with(fault, seeded, one) == ("diverged", "grad-value")


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
    kinds = {"mm-without-policy": "dtype", "gradients-forgotten": "grad-missing"}
    found = judged_with(name, seeded, FAULTY[name])
    assert found == ("diverged", kinds.get(name, "grad-value"))
    assert judged_with("", seeded, FAULTY[name])[0] != "diverged"


# -- repros ---------------------------------------------------------------------------------------


@needs_jax
@pytest.mark.parametrize("name", FINDINGS)
def test_a_repro_needs_only_torch_and_torchax(
    backend: TorchaxBackend, tmp_path: Path, name: str
) -> None:
    one = FINDINGS[name]
    with quiet():
        verdict = judge_of(backend).judge(one)
    script = repro(one, backend, verdict.finding(""))
    assert "amp_fuzz" not in script
    path = tmp_path / "repro.py"
    path.write_text(script)
    done = subprocess.run([sys.executable, "-I", path], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (1, "")
