"""The commands that look at what a run has left, or at the installation."""

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.program import Autocast, Items, Program, Ref, Statement, TensorSpec
from amp_fuzz.interfaces.cli import common
from amp_fuzz.records.store import Store

Command = Callable[..., Any]

CASE = Case(
    Program(
        inputs=(TensorSpec("x0", (2, 3), "float16"),),
        body=(Statement("abs", "function", (Ref("x0"),), outputs=("v0",)),),
        outputs=("v0",),
    ),
    Plan(contexts=(Autocast(dtype="bfloat16"),), backward="none"),
)


@pytest.mark.thorough
def test_replay_shows_what_was_found(
    amp_fuzz: Command, fuzzed: tuple[Path, Any], identity: str
) -> None:
    done = amp_fuzz("replay", identity[:6], cwd=fuzzed[0])
    assert (done.code, done.err) == (1, "")
    assert done.out.startswith(f"case {identity} seed=")
    assert "the casts that autocast should make:\n  # under " in done.out
    assert re.search(
        rf"{identity} on lying-cpu: DIVERGES: dtype at v\d\n"
        r"  expected  float32\n"
        r"  observed  float64\n"
        rf"as a script for an issue: amp-fuzz repro {identity[:6]}\n\Z",
        done.out,
    )


@pytest.mark.thorough
def test_replay_on_another_backend(
    amp_fuzz: Command, fuzzed: tuple[Path, Any], identity: str
) -> None:
    done = amp_fuzz("replay", identity, "--backend=eager-cpu", cwd=fuzzed[0])
    assert (done.code, done.err) == (0, "")
    assert re.search(
        rf"{identity} on eager-cpu: agrees with the reference\n"
        r"found on lying-cpu as dtype at v\d\n\Z",
        done.out,
    )


def test_replay_of_files_survives_a_crash(amp_fuzz: Command, tmp_path: Path) -> None:
    """Each case after the one that killed the process is still judged."""
    (tmp_path / "a.json").write_bytes(CASE.json())
    done = amp_fuzz("replay", "a.json", "a.json", "--backend=dying-cpu")
    assert done.code == 1
    line = f"{CASE.id} on dying-cpu: DIVERGES: crash\n  expected  an answer\n"
    assert done.out.count(f"{line}  observed  the process died of SIGSEGV\n") == 2
    done = amp_fuzz("replay", "a.json", "a.json")
    assert done.out.count(f"{CASE.id} on eager-cpu: agrees with the reference\n") == 2
    assert done.code == 0


@pytest.mark.thorough
def test_replay_gives_up_on_a_case_that_hangs(amp_fuzz: Command, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(CASE.json())
    done = amp_fuzz("replay", "a.json", "--backend=hanging-cpu", "--timeout=1")
    assert done.code == 1
    said = (
        r"DIVERGES: timeout\n  expected  an answer\n  observed  no answer after \d+ s, \d s of CPU"
    )
    assert re.search(said, done.out)


def test_a_bug_of_ours_in_replay(amp_fuzz: Command, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(CASE.json())
    done = amp_fuzz("replay", "a.json", "--backend=failing-cpu")
    assert done.code == 3
    assert "RuntimeError: the backend itself is wrong" in done.err


@pytest.mark.thorough
def test_a_known_divergence_is_named_and_exits_0(amp_fuzz: Command, tmp_path: Path) -> None:
    # Autocast's promote policy raises here on torch 2.7 to 2.13 (pytorch #132715).
    cat = Statement("cat", "function", (Items((Ref("x0"), Ref("x0"))), 0), outputs=("v0",))
    case = Case(Program(CASE.program.inputs, (cat,), ("v0",)), CASE.plan)
    (tmp_path / "cat.json").write_bytes(case.json())
    done = amp_fuzz("replay", "cat.json")
    assert (done.code, done.err) == (0, "")
    assert f"{case.id} on eager-cpu: known: raise at " in done.out
    assert "\n  known as promote-foreign-half: an op of the promote policy raises" in done.out
    assert done.out.endswith(
        "as a script for an issue: amp-fuzz repro cat.json --backend=eager-cpu\n"
    )

    done = amp_fuzz("repro", "cat.json", "-o", "repro.py")
    assert (done.code, done.out) == (
        0,
        "wrote repro.py, which reproduces the finding; run it: python repro.py\n",
    )
    script = subprocess.run(
        [sys.executable, tmp_path / "repro.py"], capture_output=True, text=True, check=False
    )
    assert script.returncode == 1, script.stderr


def test_repro_of_a_case_that_agrees(amp_fuzz: Command, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(CASE.json())
    done = amp_fuzz("repro", "a.json")
    assert done.error == (
        "amp-fuzz: a.json: agrees with the reference on eager-cpu: no script to write"
    )
    assert done.code == 2


def test_repro_prints_a_script(amp_fuzz: Command, fuzzed: tuple[Path, Any], identity: str) -> None:
    done = amp_fuzz("repro", identity, "--no-run", cwd=fuzzed[0])
    assert (done.code, done.err) == (0, "")
    assert f"case {identity}" in done.out.splitlines()[0]
    compile(done.out, "repro.py", "exec")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("script", "exit code 0: torch .* expected: .* observed: .*"),
        ("pytest", "exit code 0: 1 passed.*"),
    ],
)
def test_repro_says_what_does_not_reproduce(
    amp_fuzz: Command, fuzzed: tuple[Path, Any], identity: str, tmp_path: Path, form: str, said: str
) -> None:
    """The backend of the finding is in this test only: plain torch agrees with the reference."""
    path = tmp_path / "written.py"
    done = amp_fuzz("repro", identity, f"--format={form}", "-o", path, cwd=fuzzed[0])
    assert done.code == 0
    assert done.out.startswith(f"wrote {path}; run it: ")
    what = "test" if form == "pytest" else form
    pattern = f"amp-fuzz: the {what} does not reproduce the finding here: {said}\n"
    assert re.fullmatch(pattern, done.err), done.err
    compile(path.read_text(), "written.py", "exec")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
def test_repro_writes_to_a_device_and_leaves_it(
    amp_fuzz: Command, fuzzed: tuple[Path, Any], identity: str, tmp_path: Path
) -> None:
    null = tmp_path / "null"
    try:
        os.mknod(null, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except OSError as error:
        pytest.skip(f"no device here: {error}")
    done = amp_fuzz("repro", identity, "-o", null, "--no-run", cwd=fuzzed[0])
    assert (done.code, done.out, done.err) == (0, "", "")
    assert null.is_char_device()


def test_an_output_that_cannot_be_written_is_one_line(
    amp_fuzz: Command, fuzzed: tuple[Path, Any], identity: str, tmp_path: Path
) -> None:
    done = amp_fuzz("repro", identity, "-o", tmp_path, cwd=fuzzed[0])
    assert done.error == f"amp-fuzz: {tmp_path}: cannot write (Is a directory)"
    assert done.code == 2


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["script", "pytest"])
def test_a_finding_with_unknown_words_is_one_line_or_has_no_control_characters(
    amp_fuzz: Command, fuzzed: tuple[Path, Any], identity: str, tmp_path: Path, form: str
) -> None:
    kept = json.loads((fuzzed[0] / ".amp-fuzz" / "findings" / f"{identity}.json").read_text())
    odd = "of\x1b[31m words\x07"
    for field, code, said in (
        ("kind", 2, "finding.json: $.kind='of\\x1b[31m words\\x07' is not a kind of divergence"),
        ("backend", 2, "finding.json: unknown backend 'of\\x1b[31m words\\x07'"),
        ("where", 2, "the reference observes nothing at 'of\\x1b[31m words\\x07'"),
        ("expected", 0, ""),
        ("observed", 0, ""),
        ("explicit", 0, ""),
    ):
        (tmp_path / "finding.json").write_text(json.dumps(kept | {field: odd}))
        done = amp_fuzz("repro", "finding.json", f"--format={form}", "--no-run")
        assert done.code == code, done.err
        assert said in done.err
        assert done.err.count("\n") == bool(said)
        assert not re.search(r"[\x00-\x09\x0b-\x1f]", done.out + done.err)
    for kind in ("dtyp", "relation"):
        (tmp_path / "finding.json").write_text(json.dumps(kept | {"kind": kind}))
        done = amp_fuzz("repro", "finding.json", f"--format={form}", "--no-run")
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert ("did you mean 'dtype'?" in done.err) == (kind == "dtyp")


def test_list(command: Command, fuzzed: tuple[Path, Any], identity: str) -> None:
    store = fuzzed[0] / ".amp-fuzz"
    (run,) = Store(store).runs()
    done = command("list", f"--store={store}")
    assert (done.code, done.err) == (0, "")
    lines = [line.split() for line in done.out.splitlines()]
    assert lines[0] == ["run", "profile", "seed", "branch", "torch", "backends"]
    assert lines[1][:3] == [run, "dev", "1"]
    assert lines[2] == f"a run's report: amp-fuzz report {run} --store={store}".split()
    head = "finding backend kind op statements group state first seen last seen"
    assert lines[4] == head.split()
    group, seen = Store(store).finding(identity).fingerprint, Store(store).run(run)
    when = [f"{seen.started[:10]},", seen.versions["torch"]]
    assert lines[5] == [identity, "lying-cpu", "dtype", "abs", "1", group, "new", *when, *when]
    assert lines[6] == f"look at one: amp-fuzz replay {identity} --store={store}".split()


def test_list_of_an_empty_store(command: Command) -> None:
    done = command("list")
    assert done.out == (
        "no runs in .amp-fuzz yet; start one: amp-fuzz run\n\nno findings in .amp-fuzz\n"
    )


def test_list_says_what_is_damaged(
    command: Command, fuzzed: tuple[Path, Any], tmp_path: Path
) -> None:
    store = Store(tmp_path / "copy")
    store.create()
    (store.root / "findings" / "0123456789abcdef.json").write_text("{")
    (store.root / "runs" / "r").mkdir()
    (store.root / "runs" / "r" / "run.json").write_text('{"id": 3}')
    done = command("list", "--store=copy")
    assert done.code == 0
    assert "copy/findings/0123456789abcdef.json: " in done.out
    assert "copy/runs/r/run.json: Expected `str`, got `int` - at `$.id`" in done.out
    done = command("report", "--store=copy")
    assert "the head of the run is damaged" in done.error
    assert done.code == 2


def test_list_ops(command: Command) -> None:
    done = command("list", "ops", "--ops=cat,fft")
    assert done.out.splitlines()[0].split() == ["op", "family", "forms"]
    assert re.search(r"^cat +indexing +function, out$", done.out, re.MULTILINE)
    assert re.search(r"^fft\.fft +fft +", done.out, re.MULTILINE)
    assert "conv1d" not in done.out


def test_list_known(command: Command) -> None:
    done = command("list", "known")
    assert re.search(
        r"^promote-foreign-half +!torchax\* +an op of the promote policy raises",
        done.out,
        re.MULTILINE,
    )
    assert "https://github.com/pytorch/pytorch/issues/132715" in done.out


def test_list_backends(amp_fuzz: Command) -> None:
    done = amp_fuzz("list", "backends")
    assert re.search(r"^eager-cpu +cpu +ready +torch ", done.out, re.MULTILINE)
    assert re.search(r"^broken-cpu +cpu +broken +it is broken on purpose$", done.out, re.MULTILINE)


@pytest.mark.thorough
def test_a_report_of_a_run_that_ended_is_no_failure_whatever_it_found(
    command: Command, fuzzed: tuple[Path, Any], tmp_path: Path
) -> None:
    assert fuzzed[1].code == 1  # it diverges
    store = fuzzed[0] / ".amp-fuzz"
    (run,) = Store(store).runs()
    for given in ([], [run[:8]]):
        done = command("report", *given, f"--store={store}", "--report=out")
        assert (done.code, done.err) == (0, "")
        assert f"amp-fuzz run {run}: seed 1, profile dev" in done.out
        assert done.out.splitlines()[-1].startswith("report: out/report.html (and for CI: ")
        assert (tmp_path / "out" / "report.html").stat().st_size > 1000


def test_doctor(amp_fuzz: Command) -> None:
    done = amp_fuzz("doctor")
    assert (done.code, done.err) == (0, "")
    for pattern in (
        r"ok +amp-fuzz +0\.",
        r"ok +packages +torch 2\.",
        r"ok +configuration +no file",
        r"ok +store +\.amp-fuzz: 0 runs, 0 findings, [\d.]+ GiB free",
        r"ok +backend eager-cpu +torch 2\.",
        r"note +backend broken-cpu +broken: it is broken on purpose",
        r"ok +kernels of cpu +\d+ listed by the dispatcher, \d+ in our table",
    ):
        assert re.search(f"^{pattern}", done.out, re.MULTILINE), pattern
    assert done.out.endswith("\nready; start with: amp-fuzz run\n")


@pytest.mark.thorough
def test_doctor_says_what_is_broken(amp_fuzz: Command, tmp_path: Path) -> None:
    (tmp_path / "amp-fuzz.toml").write_text("casess = 1\n")
    done = amp_fuzz("doctor", "--require=broken-cpu", "--store=/dev/null")
    assert "BROKEN  configuration" in done.out
    assert done.code == 2
    (tmp_path / "amp-fuzz.toml").unlink()
    done = amp_fuzz("doctor", "--require=broken-cpu", "--store=/dev/null")
    assert re.search(r"^BROKEN +store +/dev/null: cannot make the store", done.out, re.MULTILINE)
    assert re.search(r"^BROKEN +backend broken-cpu +broken: it is", done.out, re.MULTILINE)
    assert done.out.endswith("\n2 broken: store, backend broken-cpu\n")
    assert done.code == 4


@pytest.mark.thorough
def test_audit(amp_fuzz: Command, tmp_path: Path) -> None:
    arguments = ("--ops=abs", "--workers=1", "--backends=eager-cpu,lying-cpu")
    done = amp_fuzz("audit", *arguments)
    assert (done.code, done.err) == (1, "")
    assert re.search(r"^eager-cpu +39 +33 +6 +0 +0 +0$", done.out, re.MULTILINE)
    (counts,) = re.findall(r"^lying-cpu +(.*)$", done.out, re.MULTILINE)
    cells, *parts = map(int, counts.split())
    assert cells == sum(parts) == 39
    assert "differs: lying-cpu abs(float16) under bfloat16" in done.out
    assert (tmp_path / "amp-fuzz-report" / "audit.md").exists()
    found = Store(tmp_path / ".amp-fuzz").findings()
    assert len(found) == parts[-1] > 0
    assert any(identity in done.out for identity in found)
    rows = (tmp_path / "amp-fuzz-report" / "audit.csv").read_text()
    assert all(f"lying-cpu-{identity}.json" in rows for identity in found)


@pytest.mark.thorough
def test_an_audit_in_which_both_sides_always_raise_is_no_success(amp_fuzz: Command) -> None:
    done = amp_fuzz("audit", "--ops=cov", "--workers=1", "--backends=fake-cuda")
    assert (done.code, done.err) == (5, "")
    assert "not judged on fake-cuda: 1 op (cov): both sides raise in every cell" in done.out


def test_audit_of_an_honest_backend(amp_fuzz: Command) -> None:
    done = amp_fuzz("audit", "--ops=abs", "--workers=1", "--backends=eager-cpu")
    assert (done.code, done.err) == (0, "")


def test_a_table_is_not_cut_where_it_is_wider_than_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common.console(), "width", 40)
    common.table(
        ("finding", "kind", "last"), [("0123456789abcdef", "grad-nonfinite " * 3, "x y z")]
    )
    (_, shown) = capsys.readouterr().out.splitlines()
    assert shown.startswith(
        "0123456789abcdef  grad-nonfinite grad-nonfinite grad-nonfinite   x y z"
    )
    assert common.console().width == 40
