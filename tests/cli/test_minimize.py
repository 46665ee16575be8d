"""``amp-fuzz minimize``: from any case to a small one, whatever its candidates do to a process."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from amp_fuzz.backends import backends
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import FP8, statements
from amp_fuzz.findings.minimize.target import Answer
from amp_fuzz.findings.supervision.worker import Job
from amp_fuzz.interfaces.cli.minimize import _journal
from amp_fuzz.records.store import Store
from tests.cli.conftest import Done
from tests.helpers import BF16, call, case, under, x

pytestmark = pytest.mark.thorough

BIG = case(
    [x("x0", 3, 4), x("w1", 4, 5), x("x2", 3, 5, domain="ties", layout="strided")],
    call("mm", "x0", "w1", to="v0"),
    call("relu", "x2", to="v1"),
    call("add", "v0", "v1", to="v2"),
    call("softmax", "v2", -1, to="v3"),
    call("abs", "v3", to="v4"),
    seed=5,
    contexts=(BF16,),
    steps=2,
)

# Bad: a case with a softmax of more than one element. It notes each case that it is asked about.
CHECK = """#!/bin/sh
echo "$1" >> asked.txt
grep -q '"op":"softmax"' "$1" || exit 1
grep -q '"shape":\\[[^]]*[2-9]' "$1" || exit 1
"""


@pytest.fixture
def big(tmp_path: Path) -> Path:
    path = tmp_path / "case.json"
    path.write_bytes(BIG.json())
    return path


@pytest.fixture
def checked(big: Path, tmp_path: Path) -> tuple[str, str]:
    """Return the arguments of a call that asks a command."""
    script = tmp_path / "check.sh"
    script.write_text(CHECK)
    script.chmod(0o755)
    return str(big), f"--check={script}"


def kept(folder: Path, done: Done) -> Case:
    """Return the case that a call has kept, by the id that it says."""
    (found,) = re.findall(r"^([0-9a-f]{16}) on", done.out, re.MULTILINE)
    record = Store(folder / ".amp-fuzz").finding(found)
    assert record.minimised is not None
    assert record.case == BIG
    return record.minimised


def ops(case: Case) -> list[str]:
    return [s.op for s in statements(case.program.body)]


def test_a_case_that_the_backend_would_not_draw_is_minimised_as_it_runs(
    amp_fuzz: Callable[..., Done], tmp_path: Path
) -> None:
    """A layer of NVFP4 runs without its bias, so no smaller case has it either."""
    if backends()["te-python"].availability().status != "ready":
        pytest.skip("te-python is not installed")
    path = tmp_path / "case.json"
    kept = {"is_first_microbatch": False}
    biased = case(
        [x("x0", 32, 32), x("w1", 32, 32), x("x2", 32)],
        call("cos", "x0", to="v0"),
        under(
            FP8("nvfp4"),
            call("fp8_linear", "v0", "w1", "x2", to="v1", **kept),
            call("fp8_linear", "v0", "w1", "x2", to="v2", **kept),
        ),
        contexts=(),
    )
    path.write_bytes(biased.json())
    done = amp_fuzz("minimize", path, "--backend=te-python", "--seconds=60")
    assert done.code == 0, done.err
    assert re.search(r"^  3 statements, [\d,]+ elements -> 2 statements", done.out, re.MULTILINE)


def test_a_finding_becomes_small_and_is_kept_with_its_fingerprint(
    amp_fuzz: Callable[..., Done], big: Path, tmp_path: Path
) -> None:
    done = amp_fuzz("minimize", big, "--backend=lying-cpu", "--seconds=60")
    assert done.code == 0, done.err
    small = kept(tmp_path, done)
    assert len(ops(small)) == 1
    assert len(small.plan.contexts) == 1  # it lies under autocast only
    assert "5 statements, 47 elements -> 1 statement, 1 element" in done.out
    assert re.search(r"fingerprint [0-9a-f]{10}: dtype \| lying-cpu", done.out)
    assert "NOT confirmed" not in done.out
    assert f"amp-fuzz repro {small.id}" in done.out
    # What it says to do next works.
    assert amp_fuzz("replay", small.id).code == 1


def test_a_command_says_which_cases_are_bad(
    amp_fuzz: Callable[..., Done], checked: tuple[str, str], tmp_path: Path
) -> None:
    done = amp_fuzz("minimize", *checked, "--seconds=60")
    assert done.code == 0, done.err
    small = kept(tmp_path, done)
    assert ops(small) == ["softmax"]
    (spec,) = small.program.inputs
    assert spec.shape == (2,)
    assert "the nearest case that agrees:" in done.out


def test_a_call_that_was_cut_short_is_continued(
    amp_fuzz: Callable[..., Done], checked: tuple[str, str], tmp_path: Path
) -> None:
    asked = tmp_path / "asked.txt"
    first = amp_fuzz("minimize", *checked, "--seconds=0")
    assert first.code == 0, first.err
    assert "time is up; to continue: amp-fuzz minimize" in first.out
    before = asked.read_text().splitlines()
    second = amp_fuzz("minimize", *checked, "--seconds=60")
    assert ops(kept(tmp_path, second)) == ["softmax"]
    third = amp_fuzz("minimize", *checked, "--seconds=60")
    assert third.out.partition(" in ")[0] == second.out.partition(" in ")[0]
    after = [Path(p).stem for p in asked.read_text().splitlines()]
    # The case itself and what was kept are asked about again, and no candidate.
    again = {case for case in after if after.count(case) > 1}
    assert again <= {BIG.id, kept(tmp_path, first).id, kept(tmp_path, second).id}
    assert len(after) > len(before)


def test_a_journal_of_older_answers_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that they lack would be its default, and mean something else."""
    store, job = Store(tmp_path / "store"), Job(BIG, "eager-cpu")
    _journal(store, job, again=False).add("0123", Answer("agreed"))
    assert _journal(store, job, again=False).answers == {"0123": Answer("agreed")}
    other = msgspec.defstruct("Answer", [("said", str), ("colour", str, "")])
    with monkeypatch.context() as patch:
        patch.setattr("amp_fuzz.findings.minimize.target.Answer", other)
        assert not _journal(store, job, again=False).answers
    assert not _journal(store, job, again=True).answers


@pytest.mark.slow
def test_a_candidate_that_kills_the_process_costs_only_itself(
    amp_fuzz: Callable[..., Done], big: Path, tmp_path: Path
) -> None:
    done = amp_fuzz("minimize", big, "--backend=dying-cpu", "--seconds=80")
    assert done.code == 0, done.err
    assert re.search(r"on dying-cpu: crash$", done.out, re.MULTILINE)
    assert len(ops(kept(tmp_path, done))) == 1
    assert "NOT confirmed" not in done.out


# A kernel that takes a GiB and more, under the reference too.
GREEDY = """
import os, time, torch

def takes(*args):
    held = [bytearray(os.urandom(1) * 2**26) for _ in range(24)]
    time.sleep(60)

library = torch.library.Library("aten", "IMPL")
library.impl("asinh", takes, "CPU")
"""


@pytest.mark.slow
def test_a_case_that_takes_too_much_memory_on_both_sides_becomes_smaller(
    amp_fuzz: Callable[..., Done], tmp_path: Path
) -> None:
    (tmp_path / "greedy.py").write_text(GREEDY)
    calls = call("asinh", "x0", to="v0"), call("relu", "x0", to="v1")
    (tmp_path / "case.json").write_bytes(case([x("x0", 2)], *calls).json())
    options = ("--plugins=greedy", "--memory=0.5")
    done = amp_fuzz("minimize", "case.json", *options, "--seconds=25")
    assert done.code == 0, done.err
    assert re.search(r"on eager-cpu: crash$", done.out, re.MULTILINE)
    (found,) = re.findall(r"^([0-9a-f]{16}) on", done.out, re.MULTILINE)
    small = Store(tmp_path / ".amp-fuzz").finding(found).minimised
    assert small is not None
    assert ops(small) == ["asinh"]
    assert "NOT confirmed" not in done.out
    done = amp_fuzz("replay", "case.json", *options)
    assert done.code == 1
    assert "it held more than --memory=0.5 GiB" in done.out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "agrees with the reference on eager-cpu: nothing to minimise"),
        (("--backend=broken-cpu",), 4, "broken on purpose"),
        (("--check=./missing",), 2, "check: ./missing: No such file"),
        (("--check=sh -c 'exit 3'",), 2, "the command ended with exit code 3"),
        (("--check=sh -c 'exit 1'",), 2, "does not report the case itself as bad"),
        (("--match=kind,colour",), 2, "--match: 'colour' is not one of kind, op, stage, where"),
    ],
    ids=["agrees", "missing", "no command", "odd command", "good", "match"],
)
def test_a_case_that_cannot_be_minimised_is_one_line(
    amp_fuzz: Callable[..., Done], big: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = amp_fuzz("minimize", big, *arguments)
    assert done.code == code
    assert message in done.error
