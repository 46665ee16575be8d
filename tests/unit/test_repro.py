"""A repro imports only torch, and exits 1 at the divergence, 0 without it, else 125."""

from __future__ import annotations

import ast
import itertools
import math
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from amp_fuzz.backends import Backend, backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.backends.reproducing import TorchRepros
from amp_fuzz.cases import inputs
from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.program import Arg, Autocast, Items, Program, Ref, Region, Statement, TensorSpec
from amp_fuzz.findings.explicit_form import explicit_form
from amp_fuzz.findings.repro.parts import ReproError, literal
from amp_fuzz.findings.repro.script import repro
from amp_fuzz.oracle import Divergence
from amp_fuzz.oracle.compare import same
from amp_fuzz.strategies.drawing import draw_case
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from amp_fuzz.upstream.registry import BUGS
from tests.helpers import FAULT, Run, needs_torch

BFLOAT16 = Autocast(dtype="bfloat16")
FORWARD = Plan(contexts=(BFLOAT16,), backward="none")

# -- cases ----------------------------------------------------------------------------------------


def tensor(name: str, shape: tuple[int, ...], dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, shape, dtype, role="weight" if name[0] == "w" else "input")


def call(output: str, op: str, *args: Arg) -> Statement:
    return Statement(op, "function", args, (), (output,))


CAT = Case(
    Program(
        (tensor("x0", (2, 3), "float16"), tensor("x1", (2, 3), "float16")),
        (call("v0", "cat", Items((Ref("x0"), Ref("x1")))),),
        ("v0",),
    ),
    FORWARD,
)
NESTED = Case(
    Program(
        (tensor("x0", (2, 3)), tensor("w1", (3, 2))),
        (
            call("v0", "mm", Ref("x0"), Ref("w1")),
            Region(Autocast(dtype="float16"), (call("v1", "mm", Ref("x0"), Ref("w1")),)),
        ),
        ("v0", "v1"),
    ),
    FORWARD,
)
BILINEAR = Case(
    Program(
        (
            tensor("x0", (2, 3), "bfloat16"),
            tensor("x1", (2, 4), "bfloat16"),
            tensor("x2", (5, 3, 4), "bfloat16"),
            tensor("x3", (5,)),
        ),
        (call("v0", "bilinear", Ref("x0"), Ref("x1"), Ref("x2"), Ref("x3")),),
        ("v0",),
    ),
    FORWARD,
)
MM = Case(
    Program(
        (tensor("x0", (2, 3)), tensor("w1", (3, 2))),
        (call("v0", "mm", Ref("x0"), Ref("w1")),),
        ("v0",),
    ),
    Plan(contexts=(BFLOAT16,)),
)

LINEAR = Case(
    Program(
        (tensor("x0", (2, 3)), tensor("x1", (4, 3)), tensor("x2", (4,))),
        (call("v0", "linear", Ref("x0"), Ref("x1"), Ref("x2")),),
        ("v0",),
    ),
    msgspec.structs.replace(FORWARD, transform="vmap"),
)


def planned(**changes: Any) -> Case:
    return msgspec.structs.replace(MM, plan=msgspec.structs.replace(MM.plan, **changes))


def backend(name: str) -> Backend:
    found = backends()[name]
    state = found.availability()
    if state.status == "missing":
        pytest.skip(f"{name} {state.detail}")
    assert state.status == "ready"
    return found


# -- known upstream bugs --------------------------------------------------------------------------


REUSED = ("compile-region-state", "compile-default-dtype")


@pytest.mark.parametrize(
    ("known", "case", "name"),
    [
        ("promote-foreign-half", CAT, "eager-cpu"),
        ("cache-ignores-dtype", NESTED, "eager-cpu"),
        *(
            pytest.param(*one, marks=pytest.mark.thorough)
            for one in (
                ("custom-fwd-setup-context", planned(entry="setup_context"), "eager-cpu"),
                ("custom-op-weight-cache", planned(entry="custom_op", calls=2), "eager-cpu"),
                *((name, BUGS[name].examples[0].case, "compile[aot_eager]") for name in REUSED),
                ("custom-op-body-off", planned(entry="custom_op"), "compile[aot_eager]"),
                ("custom-op-body-off", planned(entry="custom_op", backward="none"), "fake-cuda"),
                ("transform-before-autocast", LINEAR, "eager-cpu"),
                ("promote-skips-optional", BILINEAR, "fake-cuda"),
            )
        ),
    ],
)
def test_known_bugs_reproduce_with_only_torch(
    run_script: Run, known: str, case: Case, name: str
) -> None:
    if name.startswith("compile"):
        needs_torch(">=2.9")  # before, compile-backward-untold acts too
    on = backend(name)
    with quiet():
        verdict = judge_of(on, shipped()).judge(case)
    assert verdict.known == known
    finding = msgspec.structs.replace(
        verdict.finding("test"), explicit=explicit_form(case, on.reference())
    )
    code, printed, complained = run_script(repro(case, on, finding))
    assert (code, complained) == (1, ""), printed
    assert printed.splitlines()[-1].startswith(f"torch {torch.__version__} expected: ")
    assert " observed: " in printed


def test_script_reads_like_an_issue() -> None:
    on = backend("eager-cpu")
    finding = msgspec.structs.replace(
        judge_of(on, shipped()).judge(CAT).finding("test"),
        explicit=explicit_form(CAT, on.reference()),
    )
    assert (
        repro(CAT, on, finding)
        == f"""\
# found by amp-fuzz 0.1.0, case {CAT.id} on eager-cpu
# raise: v0 = torch.cat([x0, x1])
# expected: no error
# observed: RuntimeError: Unexpected floating ScalarType in at::autocast::prioritize
import sys

# `git bisect run` skips what exits with 125: another error than the finding's.
sys.excepthook = lambda t, *e: sys.__excepthook__(t, *e) or sys.exit(\
130 if t is KeyboardInterrupt else 125)

import torch
from torch import autocast

x0 = torch.tensor([[0.001611, -0.3523, 0.9824], [-0.3037, -1.343, -0.62]], dtype=torch.float16)
x1 = torch.tensor([[2.281, -1.34, 0.931], [-1.515, -2.467, 1.55]], dtype=torch.float16)

# The program with autocast's casts written out:
# under autocast(device, bfloat16)
# v0 = torch.cat([x0, x1])  # cat: promote, autocast_promote(float16, float16)
observed = "no error"
try:
    with autocast("cpu", dtype=torch.bfloat16):
        v0 = torch.cat([x0, x1])
except Exception as error:
    observed = " ".join(f"{{type(error).__name__}}: {{error}}".split())
print("torch", torch.__version__, "expected:", "no error", "observed:", observed[:300])
right = observed == "no error"
wrong = observed.startswith("RuntimeError:") and "Unexpected floating ScalarType in" in observed
sys.exit(0 if right else 1 if wrong else 125)
"""
    )


# -- every kind, with a fault seeded into the script ----------------------------------------------


@pytest.mark.parametrize(
    ("kind", "where", "body", "case"),
    [
        ("raise", "v0 = torch.mm(x0, w1)", "raise ValueError('seeded')", MM),
        ("dtype", "v0", "y = y.float()", MM),
        ("shape", "v0", "y = y.reshape(-1)", MM),
        ("bitwise", "v0", "y = y * 1.01", MM),
        ("nonfinite", "v0", "y = y / 0", MM),
        ("grad-missing", "w1.grad", "y = y.detach()", MM),
        ("grad-bitwise", "w1.grad", "y = y * 2", MM),
        ("grad-nonfinite", "w1.grad", "y = y * float('nan')", MM),
        ("state", "after the case", "torch.autocast_increment_nesting()", MM),
        (
            "state",
            "after an error",
            "torch.autocast_increment_nesting(); raise ValueError('e')",
            MM,
        ),
        ("nondeterminism", "v0", "y = y + len(calls)", MM),
        ("nondeterminism", "v0 = torch.mm(x0, w1)", "assert len(calls) < 9", MM),
        ("relation", "second call: call1.v0", "y = y + len(calls)", planned(calls=2)),
        (
            "relation",
            "retained graph: again.w1.grad",
            "y.register_hook(lambda g: g * (calls.append(1) or len(calls)))",
            planned(second="retain"),
        ),
        (
            "relation",
            "cache: v0",
            "y = y + torch.is_autocast_cache_enabled()",
            planned(backward="none"),
        ),
        ("relation", "entry: v0", "y = y + len(calls)", planned(backward="none")),
        ("relation", "entry: v0", "y = y + len(calls)", planned(entry="custom_fwd", scaler=True)),
        ("relation", "disabled: v0", "", planned()),
        ("relation", "checkpoint: w1.grad", "y = y * len(calls)", planned()),
        ("relation", "transform: v0", "raise ValueError('seeded')", planned(transform="vmap_grad")),
        ("grad-bitwise", "w1.grad", "y = y * 2", planned(transform="grad")),
        ("grad-bitwise", "w1.grad", "y = y * 2", planned(transform="jacrev")),
        ("grad-bitwise", "w1.grad", "y = y * 2", planned(transform="jacfwd")),
        ("grad-bitwise", "w1.grad", "y = y * 2", planned(transform="functionalize")),
        ("bitwise", "tangent.v0", "y = y * 2", planned(transform="jvp")),
        ("bitwise", "tangent.v0", "y = y * 2", planned(transform="forward_ad")),
        ("dtype", "tangent.v0", "y = y.double()", planned(transform="jvp", backward="inside")),
        pytest.param("crash", "", "import os; os.abort()", MM, marks=pytest.mark.thorough),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, in jvp
def test_every_kind(run_script: Run, kind: Any, where: str, body: str, case: Case) -> None:
    raised = re.search(r"raise (\w+)\('(\w+)'\)|assert", body)
    observed = "that" if raised is None else f"{raised[1] or 'AssertionError'}: {raised[2] or ''}"
    finding = Divergence(kind, where, "no error" if raised else "this", observed)
    on = backend("eager-cpu")
    assert run_script(repro(case, on, finding)).code == 0, "honest torch"
    if body:
        fault = FAULT.format(body=body)
        assert run_script(repro(case, on, finding, prefix=fault)).code == 1, "faulty torch"


@pytest.mark.thorough
def test_timeouts_are_told_from_answers(run_script: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amp_fuzz.findings.repro.script.TIMEOUT", 1)
    fault = FAULT.format(body="import time; time.sleep(60)")
    script = repro(MM, backend("eager-cpu"), Divergence("timeout", "", "", ""), prefix=fault)
    code, printed, _ = run_script(script)
    assert code == 1
    assert "observed: no answer for 1 s" in printed


@dataclass
class Altered(TorchRepros):
    """A backend with a reference that expects something else."""

    inner: Backend
    label: str
    change: Callable[[torch.Tensor], torch.Tensor | None]
    device: str = "cpu"
    name: str = "eager-cpu"
    trains: bool = True
    values: bool = True
    exact: bool = True
    repeats: bool = True

    def reference(self) -> Any:
        return self

    def run(self, case: Case) -> Any:
        seen = self.inner.reference().run(case)
        value = seen.values[self.label]
        assert value is not None
        seen.values[self.label] = self.change(value)
        return seen


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("grad-dtype", lambda t: t.double()),
        ("grad-shape", lambda t: t[0]),
        ("grad-missing", lambda t: None),
        ("grad-bitwise", lambda t: t.nextafter(t + 1)),
        ("grad-bitwise", lambda t: t.fill_(-0.0)),
    ],
)
def test_gradients_that_the_reference_has_otherwise(
    run_script: Run, kind: Any, change: Callable[[torch.Tensor], torch.Tensor | None]
) -> None:
    finding = Divergence(kind, "w1.grad", "", "")
    altered: Any = Altered(backend("eager-cpu"), "w1.grad", change)
    assert run_script(repro(MM, altered, finding)).code == 1
    assert run_script(repro(MM, backend("eager-cpu"), finding)).code == 0


@pytest.mark.thorough
@pytest.mark.parametrize(("dtype", "domain"), [("complex64", "normal"), ("float32", "overflow")])
@pytest.mark.parametrize("observed", ["2: excess 90, bias 3", "2: excess 1, bias 9"])
def test_how_far_numbers_are_off(run_script: Run, dtype: str, domain: Any, observed: str) -> None:
    """The same with and without the mean; infinite and NaN ones are not compared."""
    inputs = (tensor("x0", (2, 3), dtype), tensor("x1", (3, 2), dtype))
    inputs = (msgspec.structs.replace(inputs[0], domain=domain), inputs[1])
    one = Case(Program(inputs, (call("v0", "mm", Ref("x0"), Ref("x1")),), ("v0",)), FORWARD, 3)
    on, finding = backend("compile[eager]"), Divergence("value", "v0", "1", observed)
    assert run_script(repro(one, on, finding)).code == 0, "honest torch"
    for body in ("y = y * 2", "y = y * float('nan')") * (dtype == "float32"):
        fault = FAULT.format(body=body)
        assert run_script(repro(one, on, finding, prefix=fault)).code == 1, body


def test_a_mean_that_is_off_where_no_element_is_far_off(run_script: Run) -> None:
    inputs = (tensor("x0", (16, 16)), tensor("x1", (16, 16)))
    one = Case(Program(inputs, (call("v0", "mm", Ref("x0"), Ref("x1")),), ("v0",)), FORWARD)
    finding = Divergence("value", "v0", "1", "2: excess 1, bias 9")
    on = backend("compile[eager]")
    assert run_script(repro(one, on, finding)).code == 0, "honest torch"
    fault = FAULT.format(body="y = (y.double() * (1 + 2**-6)).bfloat16()")
    seen = run_script(repro(one, on, finding, prefix=fault))
    assert seen.code == 1
    largest = re.search("off by ([0-9.]+) units at most", seen.printed)
    assert largest is not None
    assert float(largest[1]) < 4, "no element alone is too far off"


@pytest.mark.parametrize(("body", "code"), [("", 0), ("y = y.float()", 1)])
def test_a_case_that_runs_in_a_thread_does_so_in_a_script(
    run_script: Run, body: str, code: int
) -> None:
    finding = Divergence("dtype", "v0", "", "")
    fault = FAULT.format(body=body)
    script = repro(planned(thread="whole"), backend("eager-cpu"), finding, prefix=fault)
    assert "in_thread(drive, " in script
    assert run_script(script).code == code


@pytest.mark.parametrize(("op", "seeded"), [("dropout", True), ("relu", False)])
@pytest.mark.parametrize(("kind", "threads"), [("bitwise", True), ("dtype", False)])
def test_a_script_sets_what_its_case_needs(op: str, seeded: bool, kind: Any, threads: bool) -> None:
    one = Case(Program((tensor("x0", (2, 3)),), (call("v0", op, Ref("x0")),), ("v0",)), FORWARD)
    script = repro(one, backend("eager-cpu"), Divergence(kind, "v0", "", ""))
    assert ("manual_seed" in script) is seeded
    assert ("set_num_threads" in script) is threads


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("observed", "body"),
    [("0 not finite", "y = y / 0"), ("2: excess 90, bias 3", "y = y * 2")],
)
def test_a_range_is_left_by_infinities_or_by_numbers(
    run_script: Run, observed: str, body: str
) -> None:
    """Where both sides are finite, how far they are off is what the script compares."""
    finding = Divergence("range", "v0", "1 +- 0.1, mm.default left the range", observed)
    on = backend("compile[eager]")
    assert run_script(repro(MM, on, finding)).code == 0, "honest torch"
    fault = FAULT.format(body=body)
    assert run_script(repro(MM, on, finding, prefix=fault)).code == 1, "faulty torch"


def test_something_else_in_the_way_is_neither(run_script: Run) -> None:
    finding = Divergence("dtype", "v0", "float32", "bfloat16")
    fault = FAULT.format(body="raise ValueError('seeded')")
    code, _, complained = run_script(repro(MM, backend("eager-cpu"), finding, prefix=fault))
    assert code == 125
    assert complained.endswith("ValueError: seeded\n")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("", 0),
        ("raise ValueError('seeded 12 times')", 1),
        ("raise ValueError('seeded 3 times')", 1),
        ("raise ValueError('of other words')", 125),
        ("raise TypeError('seeded 12 times')", 125),
        ("torch.no_such_op(x)", 125),
        ("import no_such_module", 125),
        ("raise KeyboardInterrupt", 130),
    ],
)
def test_the_error_of_a_finding_is_told_from_all_others(
    run_script: Run, body: str, code: int
) -> None:
    observed = "ValueError: seeded 12 times"
    finding = Divergence("raise", "v0 = torch.mm(x0, w1)", "no error", observed)
    script = repro(MM, backend("eager-cpu"), finding, prefix=body and FAULT.format(body=body))
    assert run_script(script).code == code


@pytest.mark.parametrize(("body", "code"), [("", 1), ("raise ValueError('x')", 125)])
def test_a_missing_error_is_told_from_another(run_script: Run, body: str, code: int) -> None:
    """The reference raises here, in the finding, and torch does not."""
    finding = Divergence("raise", "v0", "RuntimeError: banned", "no error")
    script = repro(MM, backend("eager-cpu"), finding, prefix=body and FAULT.format(body=body))
    assert run_script(script).code == code
    raises = FAULT.format(body="raise RuntimeError('this is banned')")
    assert run_script(repro(MM, backend("eager-cpu"), finding, prefix=raises)).code == 0


@pytest.mark.parametrize(
    ("kind", "where", "case"),
    [
        ("bitwise", "v0", MM),
        ("grad-dtype", "w1.grad", MM),
        ("state", "after the case", MM),
        ("state", "after an error", MM),
        ("nondeterminism", "v0", MM),
        ("relation", "cache: v0", planned(backward="none")),
        ("relation", "second call: call1.v0", planned(calls=2)),
        pytest.param("crash", "", MM, marks=pytest.mark.thorough),
        pytest.param("timeout", "", MM, marks=pytest.mark.thorough),
    ],
)
def test_a_missing_op_is_not_the_finding(
    run_script: Run, kind: Any, where: str, case: Case
) -> None:
    script = repro(case, backend("eager-cpu"), Divergence(kind, where, "this", "that"))
    script = script.replace("torch.mm(", "torch.no_such_op(")
    code, _, complained = run_script(script)
    assert code == 125
    assert "AttributeError: module 'torch' has no attribute 'no_such_op'" in complained


@pytest.mark.parametrize("kind", ["dtype", "crash"])
def test_a_missing_torch_is_not_the_finding(run_script: Run, tmp_path: Path, kind: Any) -> None:
    script = repro(MM, backend("eager-cpu"), Divergence(kind, "v0", "this", "that"))
    path = tmp_path / "repro.py"
    path.write_text(script)
    # Without the site's packages there is no torch.
    done = subprocess.run(
        [sys.executable, "-I", "-S", path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 125
    assert "No module named 'torch'" in done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("observed", "body", "code"),
    [
        ("the process died of SIGSEGV", "import os; os.abort()", 1),
        ("the process died of SIGSEGV", "import os; os.kill(os.getpid(), 9)", 125),
        ("the process died of SIGKILL", "import os; os.kill(os.getpid(), 9)", 1),
        ("the process died of SIGSEGV", "raise RuntimeError('as it should')", 0),
        ("the process died of SIGSEGV", "raise AttributeError('no such op')", 125),
    ],
)
def test_a_crash_is_told_from_an_error_and_from_a_kill(
    run_script: Run, observed: str, body: str, code: int
) -> None:
    finding = Divergence("crash", "", "an answer", observed)
    script = repro(MM, backend("eager-cpu"), finding, prefix=FAULT.format(body=body))
    assert run_script(script).code == code


def test_error_at_another_line_is_told_by_the_line(run_script: Run) -> None:
    program = Program(
        (tensor("x0", (2, 3)), tensor("x1", (2, 3))),
        (call("v0", "mm", Ref("x0"), Ref("x1")),),
        ("v0",),
    )
    case = Case(program, FORWARD)
    honest = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)"
    finding = Divergence("raise", "v0 = torch.mm(x0,  x1)", honest, honest)
    script = repro(case, backend("eager-cpu"), finding)
    code, printed, _ = run_script(script)
    assert code == 0
    assert "(2x3 and 2x3) at v0 = torch.mm(x0, x1)" in printed
    moved = script.replace("    v0 = torch.mm(x0, x1)\n", "    v0 = torch.mm(x0,  x1)\n")
    assert run_script(moved).code == 1
    assert run_script(script.replace("torch.mm(", "torch.no_such_op(")).code == 125


def test_a_label_that_is_never_observed_is_an_error() -> None:
    with pytest.raises(ReproError, match="observes nothing at 'v9'"):
        repro(MM, backend("eager-cpu"), Divergence("dtype", "v9", "", ""))


# -- any case -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eager-cpu", "fake-cuda", "fake-maia"])
def test_drawn_cases_that_agree_exit_0(run_script: Run, name: str) -> None:
    on = backend(name)
    tried = 0
    for seed in range(6):
        rng = random.Random(f"{name}/{seed}")
        case = draw_case(rng.randbytes, on.device, trains=on.trains)
        if judge_of(on, relations="none").judge(case).outcome != "agreed":
            continue
        expected = on.reference().run(case)
        label = rng.choice([n for n, value in expected.values.items() if value is not None])
        for kind in ("raise", "state", *(("bitwise",) if on.values else ("dtype", "shape"))):
            finding = Divergence(kind, label, "no error", "ValueError: seeded")  # type: ignore[arg-type]
            script = repro(case, on, finding)
            assert imported(script) <= {"torch", *sys.stdlib_module_names}
            assert run_script(script).code == 0, script
            tried += 1
    assert tried >= 6


def imported(script: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(script)))
    names = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
    names += [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "offset"])
def test_inputs_are_exact_and_lie_alike_in_memory(layout: Any) -> None:
    specs = tuple(
        TensorSpec(f"x{i}", (3, 4), dtype, domain, layout)
        for i, (dtype, domain) in enumerate(
            itertools.product(("float16", "bfloat16", "float32"), ("overflow", "subnormal", "ties"))
        )
    )
    outputs = tuple(spec.name for spec in specs)
    case = Case(Program(specs, (call("v0", "mm", Ref("x0"), Ref("x0")),), outputs), FORWARD)
    script = repro(case, backend("eager-cpu"), Divergence("raise", "", "", ""))
    tree = ast.parse(script)
    kept = [n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom, ast.Assign))]
    tree.body = [n for n in kept if not re.search("observed|excepthook", ast.unparse(n))]
    names: dict[str, Any] = {}
    exec(compile(tree, "repro", "exec"), names)
    for spec in specs:
        want, got = inputs.tensor(spec, case.seed), names[spec.name]
        assert same(want, got)
        assert (want.stride(), want.storage_offset()) == (got.stride(), got.storage_offset())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.tensor(1 / 3, dtype=torch.bfloat16), "torch.tensor(0.334, dtype=torch.bfloat16)"),
        (torch.tensor([1.0, 1.0]), "torch.full((2,), 1.0, dtype=torch.float32)"),
        (torch.tensor([0.0, -0.0]), "torch.tensor([0.0, -0.0], dtype=torch.float32)"),
        (torch.zeros(2, 0), "torch.zeros((2, 0), dtype=torch.float32)"),
        (torch.tensor([[True], [False]]), "torch.tensor([[True], [False]], dtype=torch.bool)"),
        (
            torch.tensor([complex(-0.0, 1), complex(math.inf, math.nan)]),
            "torch.tensor([complex(-0.0, 1.0), complex(inf, nan)], dtype=torch.complex64)",
        ),
        (
            torch.tensor([0.1, 5e-324], dtype=torch.float64),
            "torch.tensor([0.1, 5e-324], dtype=torch.float64)",
        ),
    ],
)
def test_literals_are_short_and_exact(value: torch.Tensor, text: str) -> None:
    assert literal(value) == text
    again = eval(text, {"torch": torch, "inf": math.inf, "nan": math.nan})
    assert again.dtype == value.dtype
    assert same(again, value)
