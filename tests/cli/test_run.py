"""``amp-fuzz run`` from start to exit code: divergences, crashes, interrupts, full disks."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from amp_fuzz.interfaces.cli.run import _recorded
from amp_fuzz.profiles import PROFILES
from amp_fuzz.records.compaction import compact
from amp_fuzz.records.schema import CaseRecord, DivergenceRecord, EndRecord, Record, RunRecord
from amp_fuzz.records.store import Store, read_records
from tests.cli.conftest import run_in
from tests.helpers import BF16, OTHERS, call, case, wait_until, x

Command = Callable[..., Any]
DEV = PROFILES["dev"]
NEG = case([x("x0", 2)], call("neg", "x0"))


def records(folder: Path, run: str = "") -> list[Record]:
    store = Store(folder / ".amp-fuzz")
    return list(store.records(run or store.runs()[-1]))


def of(kind: type[Any], found: list[Record]) -> list[Any]:
    return [r for r in found if isinstance(r, kind)]


def whole_run(found: list[Record]) -> EndRecord:
    (end,) = (r for r in found if isinstance(r, EndRecord) and not r.backend)
    return end


def test_an_honest_backend(amp_fuzz: Command, tmp_path: Path) -> None:
    done = amp_fuzz("run", "--backends=eager-cpu", "--ops=abs", "--cases=5", "--seed=1")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert re.fullmatch(r"amp-fuzz \S+, torch \S+, seed 1, profile dev", lines[0])
    aimed = "at most 1 of them aimed at kernels"
    limit = DEV["seconds"]
    longer = rf"\({2 * limit:g} s if a backend's first case takes that long\)"
    limits = rf"at most {limit:g} s {longer}"
    plan = rf"eager-cpu: 5 cases each, {aimed}, {limits}, 1 op, \d+ workers?"
    assert re.fullmatch(plan, lines[1])
    assert re.fullmatch(r"records in \.amp-fuzz/runs/\d{8}-\d{6}-\w{4}", lines[2])
    assert re.search(
        r"^\[[\d.]+ s\] eager-cpu \d/5, own 0, known 0, new 0$", done.out, re.MULTILINE
    )
    assert lines[-1] == ("again:  amp-fuzz run --seed=1 --backends=eager-cpu --ops=abs --cases=5")
    assert lines[-2].startswith("report: amp-fuzz-report/report.html (and for CI: report.md")
    assert len(lines) <= 12
    assert lines[5].startswith("Nothing diverged: 5 cases on 1 backend agreed")
    assert (tmp_path / "amp-fuzz-report" / "report.html").exists()
    assert (tmp_path / ".amp-fuzz" / ".gitignore").read_text().endswith("*\n")

    found = records(tmp_path)
    assert len(of(CaseRecord, found)) == 5
    assert (whole_run(found).cases, whole_run(found).reason) == (5, "done")
    head = Store(tmp_path / ".amp-fuzz").run(Store(tmp_path / ".amp-fuzz").runs()[0])
    assert head.command == lines[-1].removeprefix("again:").strip()
    assert (head.seed, head.profile) == (1, "dev")
    assert len(head.backends[0].kernels) > 100


def test_the_command_to_run_again_draws_the_same_cases(amp_fuzz: Command, tmp_path: Path) -> None:
    (tmp_path / "amp-fuzz.toml").write_text(
        'backends = ["eager-cpu"]\nmax-statements = 3\n[profile.tiny]\ncases = 4\nops = ["abs"]\n'
    )
    first = amp_fuzz("run", "--profile=tiny")
    assert first.code == 0
    again = first.out.splitlines()[-1].removeprefix("again:").split()
    seed = re.search(r"seed (\d+)", first.out)
    assert seed is not None
    assert (
        again
        == (
            f"amp-fuzz run --seed={seed[1]} --backends=eager-cpu --ops=abs --cases=4"
            " --max-statements=3"
        ).split()
    )
    before = {r.id for r in of(CaseRecord, records(tmp_path))}
    (tmp_path / "amp-fuzz.toml").unlink()
    amp_fuzz(*again[1:])
    one, two = Store(tmp_path / ".amp-fuzz").runs()
    # What is known of the first run's cases is in the store, and is judged first.
    drawn = [r for r in of(CaseRecord, records(tmp_path, two)) if r.family != "findings"]
    assert {r.id for r in drawn} == before
    assert {r.id for r in of(CaseRecord, records(tmp_path, one))} == before


@pytest.mark.thorough
def test_the_command_to_run_again_says_a_default_that_was_said(
    amp_fuzz: Command, tmp_path: Path
) -> None:
    (tmp_path / "amp-fuzz.toml").write_text("aimed = 0\n")
    first = amp_fuzz(
        *("run", "--profile=nightly", "--backends=eager-cpu", "--ops=abs", "--cases=3"),
        *("--seconds=90", "--aimed=20", "--relations=one", "--max-statements=12", "--seed=0"),
    )
    assert first.out.splitlines()[-1] == (
        "again:  amp-fuzz run --seed=0 --backends=eager-cpu --ops=abs --cases=3 --aimed=20 "
        "--relations=one --max-statements=12 --seconds=90 --minimize=60"
    )


@pytest.mark.thorough
def test_the_command_to_run_again_says_the_limits_that_were_said(amp_fuzz: Command) -> None:
    limits = "--workers=1 --timeout=30 --memory=4 --minimize=0 --fail-fast"
    given = "--seed=0 --backends=eager-cpu --ops=abs --cases=3"
    first = amp_fuzz("run", *given.split(), *limits.split())
    again = first.out.splitlines()[-1].removeprefix("again:").strip()
    assert again == f"amp-fuzz run {given} {limits}"
    assert amp_fuzz(*again.split()[1:]).out.splitlines()[-1].endswith(again)


@pytest.mark.thorough
def test_a_resumed_run_rejects_options_of_zero_too(amp_fuzz: Command, tmp_path: Path) -> None:
    amp_fuzz("run", "--backends=eager-cpu", "--ops=abs", "--cases=3", "--seed=0")
    (run,) = Store(tmp_path / ".amp-fuzz").runs()
    done = amp_fuzz("run", f"--resume={run}", "--seed=0", "--aimed=0")
    assert done.code == 2
    assert "leave out --seed, --aimed" in done.err


def test_a_new_divergence(fuzzed: tuple[Path, Any]) -> None:
    folder, done = fuzzed
    assert (done.code, done.err) == (1, "")
    (found,) = of(DivergenceRecord, records(folder))
    title = "dtype at any op, as abs"
    assert (
        f"new: {title} on lying-cpu: float32 became float64\n     amp-fuzz replay {found.id}\n"
        in done.out
    )
    assert f"amp-fuzz repro {found.id}" in done.out
    assert Store(folder / ".amp-fuzz").findings() == [found.id]


def test_a_crash_costs_its_case_and_is_a_finding(amp_fuzz: Command, tmp_path: Path) -> None:
    done = amp_fuzz("run", "--backends=dying-cpu", "--ops=abs", "--cases=2", "--workers=1")
    assert done.code == 1
    assert "new: crash on dying-cpu: the worker died of SIGSEGV\n" in done.out
    assert "Traceback" not in done.err
    crashes = of(DivergenceRecord, records(tmp_path))
    assert [c.kind for c in crashes] == ["crash", "crash"]


@pytest.mark.slow
def test_a_hang_ends(amp_fuzz: Command, tmp_path: Path) -> None:
    done = amp_fuzz(
        "run", "--backends=hanging-cpu", "--ops=abs", "--cases=1", "--timeout=2", "--workers=1"
    )
    assert done.code == 1
    said = r"^new: timeout on hanging-cpu: no answer after 1\d s, of which \d s of CPU time$"
    assert re.search(said, done.out, re.MULTILINE)
    assert [c.kind for c in of(DivergenceRecord, records(tmp_path))] == ["timeout"]


COMPILER = """#!/bin/sh
case "$*" in *.main.cpp*) echo $$ >> {calls};; *) exec g++ "$@";; esac
[ $(wc -l < {calls}) -eq 2 ] && {what}
exec g++ "$@"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "said", "new"),
    [
        ("exec sleep 600", "note: incident: no answer after 10", 0),
        ("kill -9 $PPID", "note: incident: the worker died of SIGKILL, case ", 0),
        ("kill -9 $$", "new: nondeterminism on compile[inductor]: InductorError: CppCompileErr", 1),
    ],
    ids=["hangs", "kills", "dies"],
)
def test_a_compiler_that_hangs_or_dies_once_costs_no_other_case(
    environment: dict[str, str], tmp_path: Path, what: str, said: str, new: int
) -> None:
    compiler, calls = tmp_path / "compiler", tmp_path / "calls"
    compiler.write_text(COMPILER.format(calls=calls, what=what))
    compiler.chmod(0o755)
    environment |= {"CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    # No fork: torch reads CXX once, when its configuration is imported.
    done = run_in(
        *(tmp_path, environment, "run", "--backends=compile[inductor]", "--ops=add,mul,exp"),
        *("--cases=6", "--seed=101", "--workers=1", "--timeout=20", "--minimize=0"),
        *("--seconds=400",),
    )
    assert done.code == new, done.out
    assert said in done.out
    assert done.out.count("new: ") == new
    told = records(tmp_path)
    assert sum(not r.known for r in of(DivergenceRecord, told)) == new
    assert sum(r.outcome in ("agreed", "known") for r in of(CaseRecord, told)) == 6 - new
    for pid in map(int, calls.read_text().split()):
        with pytest.raises(ProcessLookupError):  # nothing is left that would wait on
            os.kill(pid, 0)


def test_fail_fast_stops(amp_fuzz: Command, tmp_path: Path) -> None:
    done = amp_fuzz(
        *("run", "--backends=lying-cpu", "--ops=abs", "--cases=5000", "--minimize=0"),
        *("--fail-fast", "--workers=1"),
    )
    assert done.code == 1
    found = records(tmp_path)
    assert len(of(CaseRecord, found)) < 100
    assert whole_run(found).reason == "stopped"


def test_an_error_of_ours_keeps_what_was_done(amp_fuzz: Command) -> None:
    done = amp_fuzz("run", "--backends=failing-cpu", "--ops=abs", "--cases=2", "--workers=1")
    assert done.code == 3
    assert "RuntimeError: the backend itself is wrong" in done.err
    assert "internal error: please report it" in done.err.splitlines()[-1]
    assert "report: " in done.out


@pytest.mark.thorough
def test_nothing_ran(environment: dict[str, str], tmp_path: Path) -> None:
    """A worker that is no fork takes longer to start."""
    arguments = ("--backends=eager-cpu", "--ops=abs", "--seconds=0.001", "--workers=1")
    done = run_in(tmp_path, environment, "run", *arguments)
    assert done.error.startswith("amp-fuzz: nothing ran: no case for eager-cpu: ")
    assert done.code == 5


# -- interrupts -----------------------------------------------------------------------------------


def whole_lines(folder: Path) -> int:
    """Return the number of case records; fail if a line but the last of a file is not whole."""
    store = Store(folder / ".amp-fuzz")
    decoder = msgspec.json.Decoder(Record)
    for path in store.run_path(store.runs()[0]).glob("records-*.jsonl"):
        for line in path.read_bytes().split(b"\n")[:-1]:
            decoder.decode(line)
        list(read_records(path))
    kept = records(folder)
    told = {r.case.id for r in of(DivergenceRecord, kept)} - {r.id for r in of(CaseRecord, kept)}
    return len(of(CaseRecord, kept)) + len(told)


def test_a_divergence_that_was_told_before_its_case_is_counted(tmp_path: Path) -> None:
    """As in the report: the worker was ended between the two records."""
    found = DivergenceRecord(
        "eager-cpu", "dtype", "v0", "neg", "none", "", "bfloat16", "float32", "", NEG
    )
    later = CaseRecord(NEG.id, "eager-cpu", "all", "diverged", (), (), {})
    lines = {"main": [found], "0": [msgspec.structs.replace(later, id="0" * 16)]}
    store = Store(tmp_path)
    store.begin(RunRecord("r1", 3, "dev", (), {}, ""))
    for name, kept in lines.items():
        with closing(store.writer("r1", name)) as writer:
            for record in kept:
                writer.write(record)
    assert _recorded(store, "r1") == 2
    with closing(store.writer("r1", "0")) as writer:
        writer.write(later)
    assert _recorded(store, "r1") == 2


def test_the_cases_of_a_compacted_run_that_goes_on_are_counted_once(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    found = DivergenceRecord(
        "eager-cpu", "dtype", "v0", "neg", "none", "", "bfloat16", "float32", "", NEG
    )
    later = CaseRecord(NEG.id, "eager-cpu", "all", "diverged", (), (), {})
    agreed = CaseRecord("0" * 16, "eager-cpu", "all", "agreed", (), (), {})
    store = Store(tmp_path)
    store.begin(RunRecord("r1", 3, "dev", (), {}, ""))
    for kept in ([found, agreed], [later, agreed], [found]):
        with closing(store.writer("r1", "0")) as writer:
            for record in kept:
                writer.write(record)
        compact(store, "r1")
        with closing(store.writer("r1", "0")) as writer:
            writer.write(agreed)
    # Twice NEG's divergence, told and recorded; `agreed` twice in the lists, and after each.
    assert _recorded(store, "r1") == 1 + 2 + 3


@pytest.mark.thorough
def test_ctrl_c_keeps_all_records_and_prints_the_summary(tmp_path: Path, start: Command) -> None:
    running = start("--backends=eager-cpu", "--workers=2")
    running.wait_for(r"^\[.*eager-cpu [1-9]\d*/100000")
    # A terminal sends it to the workers too; an impatient user sends it again.
    os.killpg(running.process.pid, signal.SIGINT)
    running.wait_for("^stopping: ")
    for _ in range(3):
        os.killpg(running.process.pid, signal.SIGINT)
        time.sleep(0.2)
    done = running.end()
    assert done.code == 130
    assert done.err == ""
    cases = whole_lines(tmp_path)
    assert cases >= 1
    assert re.search(rf"^ *eager-cpu +{cases} ", done.out, re.MULTILINE)
    assert "an interrupt ended the run" in done.out
    again, more = done.out.splitlines()[-2:]
    assert again.startswith("again:  amp-fuzz run --seed=")
    (run,) = Store(tmp_path / ".amp-fuzz").runs()
    assert more == f"go on:  amp-fuzz run --resume={run}"
    assert whole_run(records(tmp_path)).reason == "interrupted"
    assert whole_run(records(tmp_path)).cases == cases
    assert (tmp_path / "amp-fuzz-report" / "report.html").exists()
    running.leaves_nothing()
    assert not list((tmp_path / ".amp-fuzz" / "runs").glob("*/current-*"))


@pytest.mark.thorough
def test_sigterm_does_the_same(tmp_path: Path, start: Command) -> None:
    running = start("--backends=eager-cpu", "--workers=1")
    running.wait_for(r"^\[.*eager-cpu [1-9]\d*/100000")
    running.process.send_signal(signal.SIGTERM)
    done = running.end()
    assert (done.code, done.err) == (143, "")
    assert whole_lines(tmp_path) >= 1
    assert "an interrupt ended the run" in done.out
    running.leaves_nothing()


@pytest.mark.thorough
def test_ctrl_c_while_a_worker_hangs(tmp_path: Path, start: Command) -> None:
    running = start("--backends=hanging-cpu", "--workers=1")
    running.wait_for("^records in ")
    noted = ".amp-fuzz/runs/*/current-*"
    wait_until(lambda: any(p.stat().st_size for p in tmp_path.glob(noted)), "a case that runs")
    os.killpg(running.process.pid, signal.SIGINT)
    done = running.end()
    assert (done.code, done.err) == (130, "")
    running.leaves_nothing()


@pytest.mark.thorough
def test_ctrl_c_while_workers_start(tmp_path: Path, start: Command) -> None:
    running = start("--backends=eager-cpu", "--workers=2")
    running.wait_for("^records in ")
    time.sleep(0.5)
    os.killpg(running.process.pid, signal.SIGINT)
    done = running.end()
    assert (done.code, done.err) == (130, "")
    running.leaves_nothing()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_before_the_run(tmp_path: Path, start: Command) -> None:
    running = start("--backends=eager-cpu")
    maps = Path(f"/proc/{running.process.pid}/maps")
    wait_until(lambda: "libtorch" in maps.read_text(), "the import of torch")
    os.killpg(running.process.pid, signal.SIGINT)
    done = running.end()
    assert done.code == 130
    assert "Traceback" not in done.err


# A signal comes while a module is imported.
INTERRUPTED_IMPORT = """
import os, signal, sys
def hook(event, args):
    if event == "import" and args[0] == {module!r} and not fired:
        fired.append(1)
        os.kill(os.getpid(), {number})
fired = []
sys.addaudithook(hook)
from amp_fuzz.__main__ import main
sys.argv = ["amp-fuzz", *{words}]
code = main()
assert fired
sys.exit(code)
"""
RUN = ["run", "--backends=eager-cpu", "--cases=1"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "module", "number"),
    [
        (RUN, "numpy.dtypes", signal.SIGINT),
        (RUN, "torch.autograd", signal.SIGTERM),
        *(
            pytest.param(command, module, signal.SIGINT, marks=pytest.mark.thorough)
            for command, module in (
                (RUN, "torch._C"),
                (RUN, "amp_fuzz.interfaces.cli.audit"),
                (["doctor"], "numpy.dtypes"),
                (["audit", "--ops=abs"], "numpy.dtypes"),
            )
        ),
    ],
)
def test_a_signal_during_an_import(
    tmp_path: Path, environment: dict[str, str], words: list[str], module: str, number: int
) -> None:
    """An exception there may end the process in SIGABRT, or fail NumPy's import for good."""
    program = INTERRUPTED_IMPORT.format(words=words, module=module, number=int(number))
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (128 + number, "amp-fuzz: interrupted\n")


# -- disks ----------------------------------------------------------------------------------------


def test_a_full_disk_is_one_line(amp_fuzz: Command, tmp_path: Path) -> None:
    """A limit on the size of files stands for it: writing fails in the middle of a record."""
    done = amp_fuzz(
        *("run", "--backends=eager-cpu", "--ops=abs", "--cases=3000", "--workers=1"), limit=48_000
    )
    assert re.match(
        r"amp-fuzz: .*records-0\.jsonl: cannot write \(.*\): free some space", done.error
    )
    assert done.code == 2
    assert whole_lines(tmp_path) > 10
    assert "cases" in done.out  # the summary so far


def test_a_report_that_cannot_be_written(amp_fuzz: Command) -> None:
    done = amp_fuzz(
        "run", "--backends=eager-cpu", "--ops=abs", "--cases=1", "--report=/proc/nowhere"
    )
    assert done.error.startswith("amp-fuzz: /proc/nowhere: cannot make the report's folder")
    assert done.code == 2
    assert "Nothing diverged" in done.out


# -- notes ----------------------------------------------------------------------------------------

EXP = case(
    [x("x0", 2, dtype="bfloat16")], call("exp", "x0"), contexts=(BF16,), backward="none"
)  # rounds on cpu, not on cuda
PLAIN = ("run", "--backends=eager-cpu", "--ops=abs", "--cases=1", "--seed=1", "--corpus=corpus")


@pytest.fixture
def corpus(tmp_path: Path) -> None:
    """Make a corpus whose one case has a note on portability."""
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "exp.json").write_bytes(EXP.json())


@pytest.mark.thorough
@pytest.mark.usefixtures("corpus")
@pytest.mark.parametrize(
    ("options", "code"),
    [
        ((), 0),
        pytest.param(("--notes=portability",), 0, marks=pytest.mark.thorough),
        (("--fail-on=portability",), 1),
        pytest.param(
            ("--notes=portability", "--fail-on=precision,autocast-raises"),
            0,
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_note_fails_a_run_only_if_it_was_told_to(
    amp_fuzz: Command, options: tuple[str, ...], code: int
) -> None:
    done = amp_fuzz(*PLAIN, *options, "-v")
    assert (done.code, done.err) == (code, "")
    told = any("portability" in word for word in options)
    assert (f"16 bits on cpu; float32 on {OTHERS}" in done.out) == told
    failed = "FAILS: 1 note, as --fail-on=portability says." in " ".join(done.out.split())
    assert failed == (code == 1)
    if told:
        replayed = amp_fuzz("replay", EXP.id, "--backend=eager-cpu")
        assert replayed.code == 0
        assert "note, portability: 16 bits on cpu" in replayed.out
        assert "note, portability: 16 bits on cpu" in amp_fuzz("explain", EXP.id).out


def test_an_unknown_kind_of_note_names_the_nearest(amp_fuzz: Command) -> None:
    done = amp_fuzz("run", "--fail-on=portabilty")
    assert done.code == 2
    assert "'portabilty' is not a valid value: did you mean 'portability'?" in done.err
