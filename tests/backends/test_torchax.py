"""torchax: what it takes to import it, its autocast, gradients, findings, and seeded faults."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import amp_fuzz
from amp_fuzz.backends import backends, choose
from amp_fuzz.backends.harness import Observation, quiet
from amp_fuzz.backends.process import Apart
from amp_fuzz.backends.torchax import backend as torchax
from amp_fuzz.backends.torchax import compat
from amp_fuzz.backends.torchax.backend import MODES, TorchaxBackend, lacking
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import (
    Autocast,
    Checkpoint,
    NoGrad,
    regions,
    statements,
)
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.config import Options
from amp_fuzz.findings.repro.script import repro
from amp_fuzz.interfaces.cli import main
from amp_fuzz.reference import load_table
from amp_fuzz.runs.engine import Settings, Task, draw
from amp_fuzz.upstream import BUGS, quirks, shipped
from amp_fuzz.upstream.explain import judge_of
from tests.helpers import BF16, F16, call, case, under, x

pytestmark = pytest.mark.thorough

INSTALLED = torchax.installed()
needs_jax = pytest.mark.skipif(
    not INSTALLED, reason="torchax is not installed: pip install 'amp-fuzz[jax]'"
)

MM = case([x("x0", 2, 3), x("w1", 3, 2)], call("mm", "x0", "w1"))
# The same shapes throughout: XLA compiles an op once for each.
SQUARES = [x("x0", 2, 2), x("w1", 2, 2)]


@pytest.fixture
def backend(faulty: tuple[TorchaxBackend, Path]) -> TorchaxBackend:
    """Return torchax without a fault: a process costs seconds, and one is enough."""
    faulty[1].write_text("")
    return faulty[0]


@pytest.fixture(scope="module")
def jitted() -> Iterator[TorchaxBackend]:
    found = backends()["torchax[jit]"]
    assert isinstance(found, TorchaxBackend)
    yield found
    found.process.close()


def judged(backend: TorchaxBackend, one: Case) -> tuple[str, str]:
    """Return the outcome, and the kind of divergence or the known entry."""
    with quiet():
        verdict = judge_of(backend, shipped()).judge(one)
    kind = verdict.divergence.kind if verdict.divergence else ""
    return verdict.outcome, verdict.known or kind


def judged_with(fault: str, faulty: tuple[TorchaxBackend, Path], one: Case) -> tuple[str, str]:
    """Return how a case is judged where torchax has a fault; "" is none."""
    backend, file = faulty
    file.write_text(fault)
    try:
        return judged(backend, one)
    finally:
        file.write_text("")


# -- without JAX ----------------------------------------------------------------------------------


def test_without_jax_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torchax, "installed", lambda: False)
    monkeypatch.chdir(tmp_path)
    state = backends()["torchax"].availability()
    assert (state.status, state.detail) == ("missing", "pip install 'amp-fuzz[jax]'")
    code = main(["doctor", "--require=torchax"])
    lines = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()]
    rows = {row[2]: (row[0], row[3]) for row in lines if len(row) == 4 and row[1] == "backend"}
    assert rows["torchax"] == ("BROKEN", "missing: pip install 'amp-fuzz[jax]'")
    assert rows["torchax[jit]"] == ("note", "missing: pip install 'amp-fuzz[jax]'")
    assert code == 4


def test_what_it_lacks_is_counted_and_not_drawn() -> None:
    names = {name.partition(":")[0] for name in lacking()}
    assert names - {"cholesky", "qr"} <= set(CATALOGUE)  # torch 2.15 lacks these two
    forms = {tuple(name.split(":")) for name in lacking() if ":" in name}
    assert all(form in CATALOGUE[op].forms for op, form in forms if op in CATALOGUE)
    assert not backends()["torchax"].supports("conv_tbc", "function")
    assert backends()["torchax"].supports("mm", "function")
    if INSTALLED:
        assert f"of {len(CATALOGUE)} ops" in backends()["torchax"].availability().detail


def test_a_run_without_names_does_not_use_it() -> None:
    assert not [b.name for b in choose(Options().backends) if b.name.startswith("torchax")]


def test_what_jax_does_not_know_is_taken_out() -> None:
    """Gradients are those of jax.vjp, which knows neither torch's grad modes nor autocast."""
    one = case(
        SQUARES,
        under(NoGrad(), call("mm", "x0", "w1")),
        under(Checkpoint(), call("exp", "v0", to="v1")),
        backward="inside",
        second="double",
        entry="custom_fwd",
    )
    fitted = backends()["torchax"].fit(one)
    assert [type(c) for c in regions(fitted.program.body)] == [Checkpoint]
    assert len(list(statements(fitted.program.body))) == 2
    plan = fitted.plan
    assert (plan.backward, plan.second, plan.entry) == ("outside", "retain", "context")
    assert backends()["torchax"].fit(fitted) == fitted


@needs_jax
def test_a_model_is_not_run_on_the_cpu_instead() -> None:
    result = amp_fuzz.check(torch.nn.Linear(2, 2), torch.ones(1, 2), backends="torchax", store=None)
    assert not result.ok


# -- the names that torch lost --------------------------------------------------------------------


@pytest.mark.parametrize(("version", "has"), [("0.0.14", False), ("0.0.13", True)])
def test_names_do_not_stand_in_where_none_is_missing(
    monkeypatch: pytest.MonkeyPatch, version: str, has: bool
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.setattr(compat, "_has_names", lambda: has)
    plain = torch._ops.OpOverloadPacket.__getattr__
    assert not compat.needed()
    with pytest.raises(compat.CompatError, match="needs no names"), compat.named():
        pass
    assert torch._ops.OpOverloadPacket.__getattr__ is plain


def test_only_overloads_of_named_tensors_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.13")
    monkeypatch.setattr(compat, "_has_names", lambda: False)
    plain = torch._ops.OpOverloadPacket.__getattr__
    with compat.named() as found:
        one, other = torch.ops.aten.add.no_Dimname, torch.ops.aten.add.no_Dimname
        assert len({one, other, torch.ops.aten.add.Tensor}) == 3
        with pytest.raises(AttributeError):
            _ = torch.ops.aten.add.no_such_overload
    assert found == ["aten.add.no_Dimname"] * 2
    assert torch._ops.OpOverloadPacket.__getattr__ is plain
    with pytest.raises(compat.CompatError, match="no longer needed"), compat.named():
        pass  # names nothing
    assert torch._ops.OpOverloadPacket.__getattr__ is plain


# -- the table ------------------------------------------------------------------------------------


def test_its_table_is_the_cpus() -> None:
    """As its source says; a difference from CUDA is none from its own list."""
    for version in ("2.12.0", "2.13.0"):
        own, cpu = (load_table(name, torch_version=version) for name in ("torchax", "cpu"))
        # Custom ops, which other tests registered, have policies on the CPU.
        listed = {n: r.policy for n, r in cpu.rules.items() if "::" not in n}
        assert {n: r.policy for n, r in own.rules.items()} == listed


TABLE = """
from amp_fuzz.backends.torchax import compat
from amp_fuzz.reference import load_table

table = compat.load().amp.autocast_policy
names = {}
for op, policy in table.items():
    if not isinstance(op, compat.Removed):
        names[op.name().removeprefix("aten::").removesuffix(".default")] = policy.name.lower()
ours = {n: r.policy.value for n, r in load_table("torchax").rules.items()}
print(names == ours, len(names), len(table) - len(names))
"""


@needs_jax
def test_its_table_is_what_it_lists() -> None:
    done = subprocess.run([sys.executable, "-c", TABLE], capture_output=True, text=True)
    assert done.stdout.split() == ["True", str(len(load_table("torchax").rules)), "2"], done.stderr


# -- honest ---------------------------------------------------------------------------------------


@needs_jax
def test_values_and_gradients_come_back(backend: TorchaxBackend) -> None:
    seen, expected = backend.run([MM])[0], backend.reference().run(MM)
    assert list(seen.values) == ["v0", "w1.grad"]
    for label, value in seen.values.items():
        want = expected.values[label]
        assert value is not None
        assert want is not None
        assert (value.dtype, value.shape) == (want.dtype, want.shape)
        torch.testing.assert_close(value, want, rtol=0.05, atol=0.05)


@needs_jax
def test_the_platform_is_in_every_record(backend: TorchaxBackend) -> None:
    with quiet():
        verdict = judge_of(backend).judge(MM)
    assert verdict.record("matmul").platform in ("cpu", "gpu", "tpu")


@needs_jax
@pytest.mark.parametrize(
    "one",
    [
        MM,
        case(SQUARES, call("mm", "x0", "w1"), contexts=(F16,), backward="inside"),
        case(SQUARES, call("mm", "x0", "w1"), contexts=(BF16, Autocast(enabled=False))),
        case(SQUARES, call("mm", "x0", "w1"), contexts=(F16, Autocast())),
        case(SQUARES, call("mm", "x0", "w1"), contexts=(Autocast(dtype="float32"),)),
        case(SQUARES, under(F16, call("mm", "x0", "w1"))),
        case(SQUARES, call("mm", "x0", "w1"), entry="decorator"),
        case(SQUARES, call("mm", "x0", "w1"), thread="inside"),
        case(SQUARES, call("mm", "x0", "w1"), interrupted=True, second="retain"),
        case(SQUARES, call("mm", "x0", "w1"), steps=2, scaler=True),
        case(SQUARES, under(Checkpoint(), call("mm", "x0", "w1")), first_pass="inference_mode"),
        case(
            [x("w0", 2, 2, dtype="complex64"), x("x1", 2, 2, dtype="complex64")],
            call("mul", "w0", "x1"),
        ),
        case(SQUARES, call("argmax", "w1"), call("mm", "x0", "w1", to="v1")),
        case([x("w0", 2, 2), x("x1", 2, 2)], call("gt", "w0", "x1")),
    ],
    ids=str,
)
def test_a_plan_means_what_it_means_in_torch(backend: TorchaxBackend, one: Case) -> None:
    assert judged(backend, one) == ("agreed", "")


@needs_jax
def test_a_checkpoint_that_draws_leaves_no_tracer(backend: TorchaxBackend) -> None:
    """A module draws its first weights on torchax, even on the meta device."""
    how: dict[str, Any] = {"stride": [1], "padding": [0], "dilation": [1], "groups": 1}
    how["mode"] = "zeros"
    layer = call("Conv1d", "x0", "x1", None, form="module", inner=1, made=1, **how)
    inputs = [x("x0", 1, 1, 3), x("x1", 1, 1, 2)]
    one = case(inputs, under(Checkpoint(), layer), contexts=(), steps=2)
    assert [seen.raised for seen in backend.run([one, one])] == [None, None]


@needs_jax
def test_a_weight_has_no_cached_cast(backend: TorchaxBackend) -> None:
    """Its gradient is summed in float32, as the reference has it without a cache."""
    one = case(SQUARES, call("mm", "x0", "w1"), call("mm", "v0", "w1", to="v1"))
    assert judged(backend, one) == ("agreed", "")
    casts = [c for k in backend.reference().run(one).kernels for c in k.casts]
    assert casts
    assert not any(c.cached for c in casts)


@needs_jax
def test_honest_draws_are_explained(backend: TorchaxBackend) -> None:
    """Of few ops, so that little is compiled; benchmarks/torchax_cost.json has what a run draws."""
    judge = judge_of(backend, shipped())
    ops = ("mm", "exp", "relu", "mul", "linear", "cat", "softmax", "tanh")
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
    "torchax-16-bit-kernels": case(
        [x("x0", 2, 2, dtype="bfloat16")], call("linalg.det", "x0"), backward="none"
    ),
    "torchax-unchecked": case(
        [x("x0", 2, 2, domain="unit"), x("x1", 2, 2, domain="positive")],
        call("binary_cross_entropy", "x0", "x1"),
        contexts=(),
    ),
}
"""Those in which torch refuses the program; tests/upstream has the examples of the others."""

OTHERWISE = {
    "torchax-16-bit": (case([x("x0", 4)], call("fft.fft", "x0")), "fft-too-large"),
    "torchax-promote": (
        case([x("x0", 2), x("x1", 2)], call("cat", ["x0", "x1"]), contexts=()),
        "cat-too-large",
    ),
}
"""A call of an op that an entry names, and a fault of it, which the entry must not explain."""


@needs_jax
@pytest.mark.parametrize("name", OTHERWISE)
def test_an_entry_hides_no_other_fault_of_its_op(
    faulty: tuple[TorchaxBackend, Path], name: str
) -> None:
    one, fault = OTHERWISE[name]
    assert judged_with(fault, faulty, one)[0] == "backend"


@needs_jax
@pytest.mark.parametrize("name", FINDINGS)
def test_a_finding_is_its_own(backend: TorchaxBackend, name: str) -> None:
    assert judged(backend, FINDINGS[name]) == ("backend", "backend")


@needs_jax
def test_subnormal_numbers_may_count_as_0(faulty: tuple[TorchaxBackend, Path]) -> None:
    one = case([x("w0", 2, domain="subnormal"), x("x1", 2)], call("mul", "w0", "x1"))
    assert judged(faulty[0], one) == ("agreed", "")
    assert judged_with("mul-too-large", faulty, one)[0] == "backend"


@needs_jax
def test_a_finding_hides_no_other(faulty: tuple[TorchaxBackend, Path]) -> None:
    backend, file = faulty
    one = case(SQUARES, call("linear", "x0", "w1"), call("mm", "x0", "w1", to="v1"))
    file.write_text("")
    assert judged(backend, one) == ("known", "torchax-composites")
    file.write_text("mm-without-policy")
    assert judged(backend, one)[0] == "diverged"


def test_the_reference_casts_nothing_under_the_quirk_of_torch_autocast() -> None:
    reference = backends()["torchax[torch.autocast]"].reference()
    dtypes = []
    for names in ((), ("torchax-torch-autocast",)):
        with quirks(names):
            value = reference.run(MM).values["v0"]
        assert value is not None
        dtypes.append(value.dtype)
    assert dtypes == [torch.bfloat16, torch.float32]


# -- torch's own autograd -------------------------------------------------------------------------

AUTOGRAD = """
import torch
from amp_fuzz.backends.torchax import compat

torchax = compat.load()
env = torchax.default_env()
F = torch.nn.functional


def on_jax(*shape):
    return torch.linspace(-1, 1, 12).reshape(shape).to("jax").requires_grad_()


def error(run):
    try:
        run()
    except Exception as found:
        return type(found).__name__
    return "none"


def gradient(inside):
    a, b = on_jax(3, 4), on_jax(4, 3)
    with torchax.amp.autocast("jax", torch.bfloat16):
        loss = (a @ b).sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return a.grad.cpu()


def on_the_cpu():
    a, b = (torch.linspace(-1, 1, 12).reshape(s).requires_grad_() for s in ((3, 4), (4, 3)))
    with torch.autocast("cpu", torch.bfloat16):
        loss = (a @ b).sum()
    loss.backward()
    return a.grad


with env:
    x = on_jax(3, 4)
    cut = {
        "linear": F.linear(x, on_jax(3, 4)),
        "einsum": torch.einsum("ij->ji", x),
        "to": x.to(torch.bfloat16),
        "flatten": x.flatten(),
        "index": x[0],
        "mm": x @ on_jax(4, 3),
    }
    print("cut", *[name for name, value in cut.items() if not value.requires_grad])
    print("layer_norm", error(lambda: F.layer_norm(x, [4]).sum().backward()))
    print("inside", torch.equal(gradient(True), on_the_cpu()))
    print("outside", torch.equal(gradient(False), on_the_cpu()))
    with torchax.amp.autocast("jax", torch.bfloat16):
        print("enabled", torch.is_autocast_enabled("jax"))
    print("argument", error(lambda: torchax.amp.autocast("jax", enabled=False)))
"""


@needs_jax
def test_gradients_of_torchs_own_autograd_are_what_the_page_says() -> None:
    """Graphs are cut, and a backward pass outside of the context differs: `torchax[autograd]`."""
    words = [sys.executable, "-W", "ignore", "-c", AUTOGRAD]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines() == [
        "cut linear einsum to flatten index",
        "layer_norm TypeError",
        "inside True",
        "outside False",
        "enabled False",
        "argument TypeError",
    ], done.stderr


# -- faults ---------------------------------------------------------------------------------------

FAULTY = {
    "mm-without-policy": (MM, "dtype"),
    "mm-in-float32": (MM, "dtype"),
    "prod-in-lower-precision": (case([x("x0", 3)], call("prod", "x0")), "dtype"),
    "exp-a-bit-too-large": (case([x("x0", 2, 2)], call("exp", "x0")), "backend"),
    "exp-in-float32": (case([x("x0", 2, 2, dtype="bfloat16")], call("exp", "x0")), "backend"),
    "gradients-halved": (MM, "backend"),
    "context-stays-on": (MM, "state"),
}


@needs_jax
@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_is_found(faulty: tuple[TorchaxBackend, Path], name: str) -> None:
    backend, file = faulty
    one, kind = FAULTY[name]
    file.write_text(name)
    try:
        assert judged(backend, one) == ("backend" if kind == "backend" else "diverged", kind)
    finally:
        file.write_text("")
    assert judged(backend, one)[0] == "agreed"


# -- repros ---------------------------------------------------------------------------------------


@needs_jax
def test_a_repro_needs_only_torch_and_torchax(backend: TorchaxBackend, tmp_path: Path) -> None:
    one = BUGS["torchax-composites"].examples[0].case
    with quiet():
        verdict = judge_of(backend).judge(one)
    script = repro(one, backend, verdict.finding(""))
    assert "amp_fuzz" not in script
    path = tmp_path / "repro.py"
    path.write_text(script)
    done = subprocess.run([sys.executable, "-I", path], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (1, "")
    assert "observed: torch.float32" in done.stdout


class Counting:
    """Says how many cases it has run."""

    def __init__(self) -> None:
        self.count = 0

    def observe(self, case: Case) -> Observation:
        self.count += 1
        return Observation(seconds=self.count)


def test_a_process_may_be_replaced_after_some_cases() -> None:
    """What XLA compiled stays in its memory."""
    process = Apart("tests.backends.test_torchax:Counting", lives=2)
    try:
        assert [process.run(MM).seconds for _ in range(3)] == [1, 2, 1]
    finally:
        process.close()


def test_each_mode_has_a_name_of_its_own() -> None:
    assert len({mode.name for mode in MODES}) == len(MODES)
    assert {mode.name for mode in MODES} <= set(backends())


@needs_jax
def test_an_observation_that_is_wrong_in_dtype_is_no_rounding(backend: TorchaxBackend) -> None:
    class Wider(TorchaxBackend):
        """Returns float32 for each 16-bit value."""

        def run(self, cases: list[Case]) -> list[Observation]:  # type: ignore[override]
            seen = TorchaxBackend.run(self, cases)
            for one in seen:
                one.values = {n: v.float() if v is not None else v for n, v in one.values.items()}
            return seen

    wrong = Wider(backend.mode, backend.process)
    assert judged(replace(wrong), MM) == ("backend", "backend")


@needs_jax
def test_signs_of_singular_vectors_that_a_jitted_program_does_not_return(
    jitted: TorchaxBackend,
) -> None:
    one = case(
        [x("x0", 3, 5)],
        call("linalg.svd", "x0", full_matrices=False, to="v0 v1 v2"),
        call("exp", "v0", to="v3"),
        contexts=(),
        backward="none",
    )
    program = msgspec.structs.replace(one.program, outputs=("v3",))
    one = msgspec.structs.replace(one, program=program)
    assert judged(jitted, one) == ("agreed", "")
