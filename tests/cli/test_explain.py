"""`amp-fuzz explain` names the first divergent statement, by how much, and what is to blame."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from amp_fuzz.backends.eager import EagerBackend
from amp_fuzz.backends.flips import UNCACHED, Flip, deciding, flips
from amp_fuzz.backends.harness import Observation, quiet
from amp_fuzz.cases.case import Case
from amp_fuzz.findings.explanation import explain, explained
from amp_fuzz.findings.explicit_form import explicit_form
from amp_fuzz.interfaces.cli.explain import told
from amp_fuzz.policies.tables import Policy
from amp_fuzz.versions import holds
from tests.helpers import F16, call, case, eager, under, x

Command = Callable[..., Any]

FINDINGS = Path(__file__).parents[2] / "docs" / "findings"
FIRST = "  <- the first that diverges"
SAME = "the backend's own: it differs in the same way without autocast"
LAYER = case(
    [x("x0", 2, 3), x("w1", 3, 2)],
    call("mm", "x0", "w1"),
    call("abs", "v0", to="v1"),
    call("cat", ["v1", "v1"], to="v2"),
    backward="none",
)


def flipped(flip: Flip) -> EagerBackend:
    """Return a backend that does what the reference does, but for one decision."""

    class Deciding(EagerBackend):
        name = "deciding-cpu"

        def run(self, cases: Sequence[Case]) -> list[Observation]:
            found = []
            for one in cases:
                with deciding(flip):
                    found.append(self.reference().run(one))
            return found

    return Deciding("cpu")


def text_of(flip: Flip, case_: Case = LAYER) -> str:
    with quiet():
        return told(explain(case_, flipped(flip)))


def test_an_explanation() -> None:
    assert (
        text_of(Flip(0, policy=Policy.FP32))
        == f"""\
plan: autocast(device, bfloat16), backward=none
{LAYER.id} on deciding-cpu: DIVERGES: dtype at v0
  expected  bfloat16
  observed  float32

# under autocast(device, bfloat16)
v0 = torch.mm(cast[bfloat16](x0), cast[bfloat16](w1))  # mm: lower_precision_fp
  > v0  bfloat16[2, 2], observed float32[2, 2]: another dtype  <- the first that diverges
v1 = torch.abs(v0)
  ! v1  bfloat16[2, 2], observed float32[2, 2]: another dtype
v2 = torch.cat([v1, v1])  # cat: promote, autocast_promote(bfloat16, bfloat16)
  ! v2  bfloat16[4, 2], observed float32[4, 2]: another dtype

the reference agrees with the backend if (2 of 8 tried)
  - mm: without its casts (lower_precision_fp)
  - mm: treated as fp32 (its own: lower_precision_fp)
"""[:-1]
    )


def test_each_statement_stands_below_the_contexts_that_it_runs_under() -> None:
    nested = case(
        [x("x0", 2, 2), x("x1", 2, 2)],
        call("mm", "x0", "x1"),
        under(F16, call("mm", "x0", "x1", to="v1")),
        call("abs", "v0", to="v2"),
        backward="none",
    )
    bare, thread = (
        msgspec.structs.replace(nested, plan=msgspec.structs.replace(nested.plan, **changes))
        for changes in ({"contexts": ()}, {"thread": "inside"})
    )
    inner, outer = "autocast(device, float16)", "autocast(device, bfloat16)"
    wanted = (
        (nested, [outer, f"{outer} > {inner}", outer]),
        (bare, ["no autocast", inner, "no autocast"]),
        (thread, ["no autocast", inner, "no autocast"]),
    )
    for case_, contexts in wanted:
        text = explicit_form(case_, eager().reference())
        assert re.findall(r"^# under (.*)$", text, re.MULTILINE) == contexts
        with quiet():
            shown = told(explain(case_, eager()))
        assert re.findall(r"^# under (.*)$", shown, re.MULTILINE) == contexts


def test_an_error_is_shown_in_its_words() -> None:
    wrong = case([x("x0", 2, 3), x("x1", 2, 3)], call("mm", "x0", "x1"), backward="none")
    with quiet():
        text = told(explain(wrong, eager()))
    own = "" if holds("<2.15") else "mm: "  # it names the op
    said = f"RuntimeError: {own}mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)"
    assert f"the reference raises {said}" in " ".join(text.split())


def test_every_decision_that_is_flipped_is_named() -> None:
    """A backend makes each of these mistakes: what agrees with it must hold that very run."""
    with quiet(), deciding() as plain:
        eager().reference().run(LAYER)
    wanted = list(flips(plain.decisions))
    assert len(wanted) == 8
    said = []
    for flip in wanted:
        with quiet():
            found = explain(LAYER, flipped(flip))
        if found.kind:
            assert found.flips, flip
            said.append(found.flips)
        else:
            assert found.outcome in ("agreed", "raised")
    assert len(said) >= 5


def test_a_backend_without_the_weight_cache_is_named() -> None:
    twice = case([x("x0", 2, 2), x("w1", 2, 2)], call("mm", "x0", "w1"), steps=2, loop="inside")
    text = text_of(UNCACHED, twice)
    assert "DIVERGES: bitwise at step1.v0" in text
    assert "\n  - without the weight cache: each use of a weight casts it again" in text
    assert (
        "weight cache" not in text_of(Flip(0, policy=Policy.FP32), twice).partition("agrees if")[2]
    )


def test_values_that_differ_name_the_worst_element() -> None:
    with quiet():
        text = told(explain(LAYER, _Off("cpu")))
    assert re.search(
        r"> v1  bfloat16\[2, 2\]: 1 of 4 differ, most at \[1, 0\]: \S+, observed", text
    )
    assert "no single cast explains it: 8 runs of the reference" in text
    assert "    v0  bfloat16[2, 2]: the same bits\n" in text


class _Off(EagerBackend):
    """Doubles one element of what abs gives."""

    name = "off-cpu"

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        seen = EagerBackend.run(self, cases)
        for one in seen:
            value = one.values["v1"]
            assert isinstance(value, torch.Tensor)
            value[1, 0] *= 2
        return seen


def test_lines_fit_a_terminal() -> None:
    wide = case(
        [x(f"x{i}", 2, 3) for i in range(9)],
        call("cat", [f"x{i}" for i in range(9)]),
        call("stack", [f"x{i}" for i in range(9)], to="v1"),
        backward="none",
    )
    text = text_of(Flip(0, policy=Policy.LOWER_PRECISION_FP), wide)
    assert "DIVERGES" in text
    assert max(map(len, text.splitlines())) <= 96


def test_a_case_that_agrees_is_shown_to_agree() -> None:
    with quiet():
        found = explain(LAYER, eager())
    assert (found.kind, found.first, found.flips) == ("", "", ())
    assert f"{LAYER.id} on eager-cpu: agrees with the reference\n" in told(found)


@pytest.mark.parametrize(
    ("name", "backend", "lines"),
    [
        (
            "issue-cache-ignores-dtype",
            "eager-cpu",
            [
                f"  > v1  float16[1, 1], observed bfloat16[1, 1]: another dtype{FIRST}",
                "the reference agrees with the backend if it imitates cache-ignores-dtype",
                "  - mm, call 2 of 2: casts to the other 16-bit dtype, not its context's",
            ],
        ),
        (
            "issue-matrix-rank-out",
            "compile[aot_eager]",
            [
                f"8dbb89ea975ffa54 on compile[aot_eager]: {SAME}: value at v0",
                f"  > v0  int64[]: 1 of 1 differ, most at []: 2, observed -1{FIRST}",
            ],
        ),
    ],
)
def test_findings_are_explained(
    amp_fuzz: Command, name: str, backend: str, lines: list[str]
) -> None:
    done = amp_fuzz("explain", FINDINGS / f"{name}.json", f"--backend={backend}")
    assert (done.code, done.err) == (0, "")
    for line in lines:
        assert line in done.out.splitlines()
    assert done.out.splitlines()[-1].startswith("as an issue: amp-fuzz repro ")


def test_a_case_that_kills_its_process(amp_fuzz: Command) -> None:
    path = FINDINGS / "issue-cache-ignores-dtype.json"
    done = amp_fuzz("explain", path, "--backend=dying-cpu")
    assert done.code == 1
    assert "DIVERGES: crash\n  expected  an answer\n" in done.out
    assert "observed  the process died of SIGSEGV" in done.out


def test_a_backend_that_cannot_explain_says_why() -> None:
    said = explained(LAYER, "eager-cpuu", (), timeout=300, memory=8)
    assert (said.case, said.backend, said.missing) == (LAYER, "eager-cpuu", False)
    assert said.why.startswith("unknown backend 'eager-cpuu': did you mean 'eager-cpu'?")
