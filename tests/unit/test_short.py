"""A short script exits as the full one does, and reads as a person would have written it."""

from __future__ import annotations

import ast
import sys
from typing import Any

import msgspec
import pytest
import torch

from amp_fuzz.backends import Backend, backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases import inputs
from amp_fuzz.cases.case import Case
from amp_fuzz.findings.repro.plain import plain
from amp_fuzz.findings.repro.short import short
from amp_fuzz.findings.repro.simpler import Seen, counting, sevenths, simpler
from amp_fuzz.oracle import Divergence
from amp_fuzz.upstream.explain import judge_of
from tests.helpers import BF16, F16, FAULT, Run, call, case, under, x

MM = case([x("x0", 2, 3), x("w1", 3, 2)], call("mm", "x0", "w1"), contexts=(BF16,))
FORWARD = MM.with_plan(backward="none")
NESTED = case(
    [x("x0", 2, 2), x("w1", 2, 2)],
    call("mm", "x0", "w1"),
    under(F16, call("mm", "x0", "w1", to="v1")),
    contexts=(BF16,),
    backward="none",
)
CACHED = case(
    [x("w1", 2, 2)],
    call("mm", "w1", "w1"),
    under(F16, call("mm", "w1", "w1", to="v1")),
    contexts=(BF16,),
    backward="none",
)


def backend(name: str) -> Backend:
    return backends()[name]


# -- exit codes -----------------------------------------------------------------------------------

AT = "1 at [0, 1], 2 of 4 differ, bfloat16"
BAND = "1 +- 0.01 at [0, 1], bfloat16"
FAR = "900: excess 90000, bias 3"


@pytest.mark.parametrize(
    ("kind", "where", "expected", "observed", "body", "name"),
    [
        ("dtype", "v0", "bfloat16", "float32", "y = y.float()", "eager-cpu"),
        ("shape", "v0", "[2, 2]", "[4]", "y = y.reshape(-1)", "eager-cpu"),
        ("grad-missing", "w1.grad", "float32[3, 2]", "None", "y = y.detach()", "eager-cpu"),
        ("bitwise", "v0", AT, AT, "y = y * 1.01", "eager-cpu"),
        ("grad-bitwise", "w1.grad", AT, AT, "y = y * 2", "eager-cpu"),
        ("nonfinite", "v0", AT, "inf at [0, 1]", "y = y / 0", "eager-cpu"),
        ("nonfinite", "v0", AT, "nan at [0, 1]", "y = y * float('nan')", "compile[eager]"),
        ("value", "v0", BAND, FAR, "y = y * 900", "compile[eager]"),
        ("value", "v0", BAND, FAR, "y = y * float('nan')", "compile[eager]"),
        ("range", "v0", BAND, FAR, "y = y * 900", "compile[eager]"),
        (
            "raise",
            "v0",
            "no error",
            "ValueError: seeded",
            "raise ValueError('seeded')",
            "eager-cpu",
        ),
        (
            "raise",
            "v0",
            "no error",
            "Odd: seeded",
            "raise type('Odd', (Exception,), {})('seeded')",
            "eager-cpu",
        ),
        (
            "state",
            "after the case",
            "",
            "nesting: 0 became 1",
            "torch.autocast_increment_nesting()",
            "eager-cpu",
        ),
        (
            "state",
            "after the case",
            "",
            "grad mode: True became False",
            "torch.set_grad_enabled(False)",
            "eager-cpu",
        ),
        (
            "state",
            "after an error",
            "",
            "nesting: 0 became 1",
            "torch.autocast_increment_nesting(); raise ValueError('e')",
            "eager-cpu",
        ),
    ],
)
def test_every_kind(
    run_script: Run, kind: Any, where: str, expected: str, observed: str, body: str, name: str
) -> None:
    finding = Divergence(kind, where, expected, observed)
    of = MM if where.endswith("grad") else FORWARD
    honest = short(of, backend(name), finding)
    assert run_script(honest).code == 0, honest
    faulty = short(of, backend(name), finding, prefix=FAULT.format(body=body))
    code, printed, _ = run_script(faulty)
    assert code == 1, faulty
    assert printed.splitlines()[-1].startswith(f"torch {torch.__version__} expected: ")
    missing = honest.replace("torch.mm(", "torch.no_such_op(")
    assert run_script(missing).code == (0 if where == "after an error" else 125), missing


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("", 1),
        ("raise RuntimeError('this is banned here')", 0),
        ("raise RuntimeError('of other words')", 125),
        ("raise ValueError('x')", 125),
    ],
)
@pytest.mark.parametrize("observed", ["no error", "TypeError: another"])
def test_an_error_that_must_be_raised(run_script: Run, body: str, code: int, observed: str) -> None:
    finding = Divergence("raise", "v0", "RuntimeError: this is banned here", observed)
    if observed != "no error":
        body, code = body or "raise TypeError('another')", code
    script = short(FORWARD, backend("eager-cpu"), finding, prefix=body and FAULT.format(body=body))
    assert run_script(script).code == code, script


def test_where_one_element_cannot_tell_all_are_compared() -> None:
    """An element that is not far off, in a result whose mean is."""
    x0, w1 = (inputs.tensor(spec, FORWARD.seed) for spec in FORWARD.program.inputs)
    near = float((x0 @ w1)[0, 1])
    finding = Divergence("value", "v0", "1 +- 1 at [0, 1], bfloat16", f"{near}: excess 1, bias 9")
    assert "\nunit = " in short(FORWARD, backend("compile[eager]"), finding)


def test_an_index_outside_is_not_read() -> None:
    finding = Divergence("bitwise", "v0", "1 at [7, 7], 1 of 4 differ, bfloat16", "2")
    assert "def differs" in short(FORWARD, backend("eager-cpu"), finding)


# -- how it reads ---------------------------------------------------------------------------------


def test_a_script_is_what_a_person_would_write() -> None:
    with quiet():
        found = judge_of(backend("eager-cpu"), ()).judge(CACHED).divergence
    assert found is not None
    text = short(CACHED, backend("eager-cpu"), found, named="0123456789abcdef")
    assert (
        text
        == """\
# found by amp-fuzz 0.1.0, case 0123456789abcdef on eager-cpu
# dtype: v1
# expected: float16
# observed: bfloat16
import sys

# `git bisect run` skips what exits with 125: another error than the finding's.
sys.excepthook = lambda t, *e: sys.__excepthook__(t, *e) or sys.exit(\
130 if t is KeyboardInterrupt else 125)

import torch
from torch import autocast

w1 = torch.tensor([[-0.6375701, -1.360778], [-0.48281416, 1.0008749]]).requires_grad_()

with autocast("cpu", dtype=torch.bfloat16):
    v0 = torch.mm(w1, w1)
    with autocast("cpu", dtype=torch.float16):
        v1 = torch.mm(w1, w1)
print("torch", torch.__version__, "expected:", torch.float16, "observed:", v1.dtype)
sys.exit(v1.dtype != torch.float16)
"""
    )


def test_a_backward_pass_and_a_compiler_take_a_line_each() -> None:
    finding = Divergence("grad-dtype", "w1.grad", "", "")
    text = short(MM, backend("compile[aot_eager]"), finding)
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines[-7:] == [
        "def program(x0, w1):",
        "    return torch.mm(x0, w1)",
        'with autocast("cpu", dtype=torch.bfloat16):',
        '    v0 = torch.compile(program, backend="aot_eager")(x0, w1)',
        "v0.backward((torch.arange(v0.numel()) % 4 - 1.5).reshape(v0.shape).to(v0.dtype))",
        'print("torch", torch.__version__, "expected:", torch.float32, "observed:", w1.grad.dtype)',
        "sys.exit(w1.grad.dtype != torch.float32)",
    ]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("x0 = torch.full((2,), 1.0, dtype=torch.float32)", "x0 = torch.ones(2)"),
        (
            "x0 = torch.full((2,), 1, dtype=torch.float32)",
            "x0 = torch.full((2,), 1, dtype=torch.float32)",
        ),
        ("x0 = torch.zeros((2, 0), dtype=torch.float32)", "x0 = torch.zeros(2, 0)"),
        ("x0 = torch.tensor(1.5, dtype=torch.float32)", "x0 = torch.tensor(1.5)"),
        (
            "x0 = torch.tensor([1, 2], dtype=torch.float32)",
            "x0 = torch.tensor([1, 2], dtype=torch.float32)",
        ),
        (
            "x0 = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16)",
            "x0 = torch.arange(1.0, 5, dtype=torch.bfloat16)",
        ),
        (
            "x0 = torch.tensor([[True]], dtype=torch.bool)",
            "x0 = torch.tensor([[True]], dtype=torch.bool)",
        ),
        (
            "x0 = torch.tensor([nan, 1.0, -0.0], dtype=torch.float32)",
            "x0 = torch.tensor([nan, 1.0, -0.0])",
        ),
    ],
)
def test_tensors_are_made_by_the_shortest_call(code: str, text: str) -> None:
    assert plain(f"{code}\nprint(x0)").splitlines()[0] == text


@pytest.mark.parametrize("fill", [torch.ones, counting, sevenths])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_shortest_call_makes_the_same_elements(fill: Any, dtype: torch.dtype) -> None:
    from amp_fuzz.findings.repro.parts import literal

    value = fill((3, 4)).to(dtype)
    text = plain(f"x0 = {literal(value)}\nprint(x0)").splitlines()[0]
    assert "tensor(" not in text
    made = eval(text.removeprefix("x0 = "), {"torch": torch})
    assert made.dtype is dtype
    assert torch.equal(made, value)


def test_what_nothing_reads_goes_with_its_comment() -> None:
    code = (
        "# why\ndef unread():\n    return 1\n\n\nx0 = torch.ones(2)\nx1 = torch.ones(2)\nprint(x1)"
    )
    assert plain(code) == "x1 = torch.ones(2)\nprint(x1)".replace("\nprint", "\n\nprint")


def test_an_effect_that_nothing_reads_stays() -> None:
    code = "x0 = torch.ones(2)\noutputs = program(x0)\nfirst = x0.add_(1)"
    assert "program(x0)" in plain(code)
    assert "x0.add_(1)" in plain(code)


def test_a_helper_is_not_inlined_where_names_clash() -> None:
    code = (
        "def helper(a):\n    v0 = a + 1\n    return v0\n\n\nv0 = 3\nv1 = helper(v0)\nprint(v0, v1)"
    )
    names: dict[str, Any] = {}
    exec(plain(code).replace("print(v0, v1)", "told = (v0, v1)"), names)
    assert names["told"] == (3, 4)


def test_comments_stay() -> None:
    assert plain("# a\nprint('b')  # c\n") == '# a\n# c\nprint("b")'


# -- simpler cases --------------------------------------------------------------------------------


FOUND = Seen("dtype", "v1", "a", "b")


def judged(of: Case) -> Seen | None:
    """Return that a product of weights is off."""
    outputs = of.program.outputs
    return Seen("dtype", "v1", "a", "b") if "v1" in outputs and of.program.inputs else None


def test_a_simpler_case_has_one_output_no_gradients_and_ones() -> None:
    small, _ = simpler(NESTED, FOUND, judged, lambda _: "known")
    assert small.program.outputs == ("v1",)
    assert [s.role for s in small.program.inputs] == ["input", "input"]
    assert torch.equal(inputs.tensor(small.program.inputs[0], 0), torch.ones(2, 2))
    assert len(small.program.body) == 1


def test_a_case_is_kept_where_a_simpler_one_is_another_bug() -> None:
    found = simpler(NESTED, FOUND, judged, lambda of: of.id)
    assert found == (NESTED, FOUND)


def test_a_step_that_hides_the_finding_is_not_taken() -> None:
    def needs_gradients(of: Case) -> Seen | None:
        needs = any(s.requires_grad for s in of.program.inputs)
        return Seen("dtype", "v1", "a", "b") if needs else None

    found = simpler(NESTED, FOUND, needs_gradients, lambda _: "")
    assert any(s.requires_grad for s in found[0].program.inputs)
    assert found[0].program.outputs == ("v1",)


@pytest.mark.parametrize(
    ("kind", "where", "observed"), [("shape", "v1", "b"), ("dtype", "v0", "b")]
)
def test_another_divergence_is_not_the_finding(kind: str, where: str, observed: str) -> None:
    def other(of: Case) -> Seen | None:
        return Seen(kind, where, "a", observed)

    assert simpler(NESTED, FOUND, other, lambda _: "") == (NESTED, FOUND)


def test_a_case_that_agrees_now_has_no_simpler_one() -> None:
    assert simpler(NESTED, FOUND, lambda _: None, lambda _: "") == (NESTED, FOUND)


def test_only_torch_is_imported() -> None:
    for name in ("eager-cpu", "fake-cuda", "compile[aot_eager]", "export", "script"):
        text = short(FORWARD, backend(name), Divergence("dtype", "v0", "this", "that"))
        nodes = list(ast.walk(ast.parse(text)))
        names = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)}
        assert {n.partition(".")[0] for n in names} <= {"torch", *sys.stdlib_module_names}


@pytest.mark.parametrize("name", ["script", "trace", "export", "export[decomposed]", "fake-cuda"])
def test_honest_backends_exit_0(run_script: Run, name: str) -> None:
    on = backend(name)
    plan = msgspec.structs.replace(FORWARD.plan, thread="none")
    of = msgspec.structs.replace(FORWARD, plan=plan)
    script = short(of, on, Divergence("dtype", "v0", "this", "that"))
    code, printed, complained = run_script(script)
    assert code == 0, script + printed + complained
    after = script[script.index("\nx0 = ") :]  # what sets a fake device up depends on the build
    assert len([line for line in after.splitlines() if line]) <= 11, script


def test_a_name_with_two_meanings_stays() -> None:
    lines = "observed = w1.grad\nobserved = observed + 1\nsys.exit(differs(observed))"
    code = f"def differs(observed):\n    return observed\n\n\n{lines}"
    assert "observed = w1.grad\nobserved = observed + 1" in plain(code)
