"""`pytest --amp-fuzz` from a user's project: whole sessions, each a process of its own."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from amp_fuzz.cases.case import load
from amp_fuzz.interfaces.cli import main
from amp_fuzz.records.fingerprint import title
from amp_fuzz.records.schema import CaseRecord, DivergenceRecord, EndRecord, IncidentRecord, Record
from amp_fuzz.records.store import Store
from tests.forks import forked
from tests.helpers import BF16, OTHERS, brief, call, case, x

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.usefixtures("forking")

SMALL = ("--amp-fuzz", "--amp-fuzz-ops=mm,relu", "--amp-fuzz-cases=20", "--amp-fuzz-seed=1")
CPU = "--amp-fuzz-backends=eager-cpu"

# A conftest that puts a Python kernel over torch's own autocast kernel of mm.
FAULT = """
import os
import shutil
import signal
import torch
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard

library = torch.library.Library("aten", "IMPL")

def mm(a, b):
    {first}
    with _ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastCPU)):
        return torch.mm(a, b)  # no cast

library.impl("mm", mm, "AutocastCPU")
"""
QUIET = "ignore:(?s).*Overriding a previously registered kernel:UserWarning"


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Make a project with two tests of its own."""
    for name in [name for name in os.environ if name.startswith("AMP_FUZZ_")]:
        monkeypatch.delenv(name)
    pytester.makepyfile("def test_one(): pass\ndef test_two(): pass")
    return pytester


def records(run: str | None = None) -> list[Record]:
    """Return the records of the only run."""
    store = Store()
    if run is None:
        (run,) = store.runs()
    return list(store.records(run))


def cases(run: str | None = None) -> list[tuple[str, str, str]]:
    return sorted((r.backend, r.family, r.id) for r in records(run) if isinstance(r, CaseRecord))


def said(result: pytest.RunResult) -> str:
    return result.stdout.str()


@pytest.mark.thorough
def test_a_session_says_what_changed_since_a_run(project: pytest.Pytester) -> None:
    def session(*more: str) -> pytest.RunResult:
        return project.runpytest_subprocess(*SMALL, CPU, *more)

    unknown = session("--amp-fuzz-compare=latest:main", "--amp-fuzz-store=other")
    assert unknown.ret == 4
    unknown.stderr.fnmatch_lines(
        ["*--amp-fuzz-compare: *: no runs yet: see amp-fuzz list runs --store=*"]
    )
    assert session().ret == 0
    changed = session("--amp-fuzz-compare=latest", "-n", "1", "--amp-fuzz-relations=none")
    assert changed.ret == 0
    lines = ["A *torch *", "B *torch *", "*command: *", "*eager-cpu*20 -> 20*", "causes: nothing *"]
    changed.stdout.fnmatch_lines(lines)


@pytest.mark.thorough
def test_a_session_passes_and_is_the_same_under_xdist(project: pytest.Pytester) -> None:
    backends = "--amp-fuzz-backends=eager-cpu,fake-cuda"
    # Warnings are errors in many a project: those of torch's ops are not the project's.
    alone = project.run(
        *(sys.executable, "-m", "pytest", "--basetemp=temporary"),
        *(*SMALL, backends, "-W", "error", "--junitxml=out.xml"),
    )
    assert alone.ret == 0, said(alone)
    alone.assert_outcomes(passed=2 + 6)
    alone.stdout.fnmatch_lines(
        [
            "amp-fuzz: seed 1, profile dev, 20 cases a backend, at most 4 of them *",
            "amp-fuzz: eager-cpu (torch *), fake-cuda (torch *, no values)",
            "collected 8 items",
            "amp-fuzz ......*",
            "*= amp-fuzz =*",
            "report: amp-fuzz-report/report.html*",
            "again: pytest * --amp-fuzz-seed=1 *",
        ]
    )
    names = {
        (case.get("classname"), case.get("name"))
        for case in ElementTree.parse("out.xml").iter("testcase")
    }
    assert ("amp-fuzz.eager-cpu", "matmul") in names
    assert ("amp-fuzz.fake-cuda", "coverage") in names
    assert Path("amp-fuzz-report/report.html").stat().st_size > 1000
    (first,) = Store().runs()
    ended = {(r.backend, r.family): r for r in records() if isinstance(r, EndRecord)}
    assert len(ended) == 6 + 1  # the run's own
    assert {r.reason for r in ended.values()} == {"done"}
    assert len(cases()) == 40  # --amp-fuzz-cases of each backend, aimed ones included
    assert 0 < len([c for c in cases() if c[1] == "coverage"]) <= 2 * 4

    shutil.rmtree(".amp-fuzz/findings")  # the next session would judge them first
    spread = project.runpytest_subprocess(*SMALL, backends, "-n", "2")
    assert spread.ret == 0, said(spread)
    spread.assert_outcomes(passed=2 + 6)
    (second,) = set(Store().runs()) - {first}
    assert cases(second) == cases(first)
    head = Store().run(second)
    assert (head.seed, [b.name for b in head.backends]) == (1, ["eager-cpu", "fake-cuda"])
    # One summary, from the controller, of all workers.
    assert said(spread).count("= amp-fuzz =") == 1
    (line,) = [line for line in spread.outlines if line.startswith("workers: ")]
    assert sum(map(int, re.findall(r"gw\d (\d+) cases", line))) == len(cases(second))
    assert not list(Path(".amp-fuzz").rglob("current-*"))


@pytest.mark.thorough
def test_a_drawn_seed_is_printed_and_runs_the_same_again(project: pytest.Pytester) -> None:
    args = (*SMALL[:-1], CPU, "amp-fuzz::eager-cpu::matmul")
    # Even with -q, which leaves the header out.
    drawn = project.runpytest_subprocess(*args, "-q")
    drawn.assert_outcomes(passed=1)
    (again,) = [line for line in drawn.outlines if line.startswith("again: ")]
    seed = again.split()[-1]
    assert seed.startswith("--amp-fuzz-seed=")
    project.runpytest_subprocess(*args, seed).assert_outcomes(passed=1)
    first, second = Store().runs()
    assert cases(first) == cases(second)
    assert len(cases(first)) == 9


def test_a_wrong_kernel_fails_with_what_to_do_next(project: pytest.Pytester) -> None:
    project.makeconftest(FAULT.format(first=""))
    result = project.runpytest_subprocess(*SMALL, CPU, "-W", QUIET, "amp-fuzz::eager-cpu::matmul")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(failed=1)
    found = [r for r in records() if isinstance(r, DivergenceRecord) and not r.known]
    assert found
    assert {r.op for r in found} == {"mm"}
    for record in found:
        assert Store().finding(record.id) == record
        assert record.minimised is not None
        result.stdout.fnmatch_lines(
            [
                f"eager-cpu: {title(record)} (*)",
                f"  kind      {record.kind} at *",
                "  expected  *",
                "  observed  *",
                f"  case {record.id} *",
                "  * = mm*",
                f"amp-fuzz replay {record.id}",
                f"amp-fuzz repro {record.id} > repro.py",
            ]
        )
    count = "1 new finding" if len(found) == 1 else f"{len(found)} new findings"
    result.stdout.fnmatch_lines([f"{count}: * (9 cases, seed 1)", "FAILED amp-fuzz::eager-cpu::*"])
    assert "Traceback" not in said(result)


@pytest.mark.thorough
def test_an_item_fails_for_what_another_item_found_first(project: pytest.Pytester) -> None:
    """Whether an item passes must not depend on what ran before it in its process."""
    project.makeconftest(FAULT.format(first=""))
    args = (*SMALL, CPU, "-W", QUIET, "--amp-fuzz-store=kept", "--tb=short")
    result = project.runpytest_subprocess(*args, "amp-fuzz::eager-cpu")
    cases = [r for r in records_of("kept", -1) if isinstance(r, CaseRecord)]
    met = {r.family for r in cases if r.outcome == "diverged"}
    assert len(met) > 1  # an item of few cases may have no mm
    result.assert_outcomes(failed=len(met), passed=3 - len(met))
    others = [
        line for line in result.outlines if re.match(r"\d+ cases? of (mm behaves|.* at mm)", line)
    ]
    assert others
    for line in others:
        assert re.search(r": amp-fuzz replay [0-9a-f]{16} --store=kept$", line), line

    stopped = project.runpytest_subprocess(*args, "-x")
    stopped.assert_outcomes(passed=2, failed=1)
    ends = [r for r in records_of("kept", -1) if isinstance(r, EndRecord) and not r.backend]
    assert [(r.reason, r.cases) for r in ends] == [("stopped", 1)]
    stopped.stdout.fnmatch_lines(["1 new finding: *"])


def records_of(folder: str, number: int) -> list[Record]:
    store = Store(folder)
    return list(store.records(sorted(store.runs(), key=lambda r: store.run(r).started)[number]))


SPREAD = pytest.mark.parametrize("spread", [(), ("-n", "2")], ids=["alone", "xdist"])
ENDS = {
    "SIGSEGV": "os.kill(os.getpid(), signal.SIGSEGV)",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "abort": "os.abort()",
    "exit": "os._exit(3)",
    "endless": "while True: pass",
    "memory": "held = bytearray(b'1') * (3 * 2**28); import time; time.sleep(60)",
}


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@SPREAD
@pytest.mark.parametrize("end", brief(ENDS, "SIGSEGV"))
def test_a_kernel_that_ends_its_process_costs_no_more_than_its_cases(
    project: pytest.Pytester, end: str, spread: tuple[str, ...]
) -> None:
    """The session goes on to its report, and the user's own tests run."""
    project.makeconftest(FAULT.format(first=ENDS[end]))
    seconds = 2 if end == "endless" else 30  # the memory itself takes seconds to fill
    limits = (f"--amp-fuzz-timeout={seconds}", "--amp-fuzz-memory=0.5")
    limits += ("--amp-fuzz-cases=6", "--amp-fuzz-aimed=0")
    args = (*SMALL, CPU, "-W", QUIET, *limits, *spread)
    result = project.runpytest_subprocess(*args)
    assert result.ret == pytest.ExitCode.TESTS_FAILED, said(result)
    assert result.parseoutcomes()["passed"] >= 2
    found = [r for r in records() if isinstance(r, DivergenceRecord) and not r.known]
    assert found
    assert {r.kind for r in found} == {"timeout" if end == "endless" else "crash"}
    # Of deaths in one op the store keeps the first, and those smaller than all before.
    causes: dict[str, list[DivergenceRecord]] = {}
    for record in found:
        causes.setdefault(record.fingerprint if record.op else record.id, []).append(record)
    for same in causes.values():
        smallest = min(same, key=lambda r: len(r.case.json()))
        assert Store().finding(smallest.id) == smallest
    shown = "\n".join(result.outlines)
    assert any(f"amp-fuzz replay {record.id}" in shown for record in found)
    ids = [r.id for r in records() if isinstance(r, CaseRecord) and r.family != "coverage"]
    lost = {r.case.id for r in found if r.family != "coverage"}
    assert len(ids) == len(set(ids))
    assert len(ids) + len(lost) == 6
    (whole,) = (r for r in records() if isinstance(r, EndRecord) and not r.backend)
    assert whole.cases == 6
    result.stdout.fnmatch_lines(
        ["*eager-cpu: *", "amp-fuzz replay *", "*= amp-fuzz =*", "again: pytest *"]
    )
    assert not list(Path(".amp-fuzz").rglob("current-*"))


ONCE = FAULT.format(
    first="""if not os.path.exists("met"):
        open("met", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)"""
).replace("torch.mm(a, b)  # no cast", "torch.mm(a.bfloat16(), b.bfloat16())")


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_process_that_somebody_else_ended_is_an_incident(project: pytest.Pytester) -> None:
    project.makeconftest(ONCE)
    result = project.runpytest_subprocess(*SMALL, CPU, "-W", QUIET, "amp-fuzz::eager-cpu::matmul")
    assert [r for r in records() if isinstance(r, IncidentRecord)]
    assert not [r for r in records() if getattr(r, "kind", "") == "crash" and not is_incident(r)]
    result.stdout.fnmatch_lines(["note: incident: the worker died of SIGKILL, case *"])


def is_incident(record: object) -> bool:
    return isinstance(record, IncidentRecord)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_without_isolation_a_case_runs_in_the_session_process(project: pytest.Pytester) -> None:
    project.makeconftest(FAULT.format(first="os.kill(os.getpid(), signal.SIGSEGV)"))
    args = (*SMALL, CPU, "-W", QUIET, "-p", "no:faulthandler", "--amp-fuzz-isolate=never")
    died = project.runpytest_subprocess(*args, "amp-fuzz::eager-cpu::matmul")
    assert died.ret == -signal.SIGSEGV
    (left,) = Path(".amp-fuzz").rglob("current-*.json")
    load(left)


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_session_that_was_killed_says_so_in_its_report(
    project: pytest.Pytester, tmp_path: Path
) -> None:
    project.makeconftest(
        "import os, signal\ndef pytest_sessionfinish(): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    died = project.runpytest_subprocess(*SMALL, CPU, "amp-fuzz::eager-cpu::matmul")
    assert died.ret == -signal.SIGKILL
    done = forked(
        main, ("report",), folder=project.path, environment=dict(os.environ), files=tmp_path
    )
    assert done.code == 6, done.out
    assert "THE RUN DID NOT END: nothing new so far, of 9 cases" in done.out


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("spread", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_an_interrupt_keeps_the_records_and_sums_up(
    project: pytest.Pytester, spread: tuple[str, ...]
) -> None:
    args = (*SMALL, CPU, "--amp-fuzz-cases=100000", *spread, "amp-fuzz::eager-cpu")
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a terminal interrupts all processes of a session
    )
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and process.poll() is None:
        # In the item of 100,000 cases: between two items, pytest 9.2 itself may fail, since on
        # Python 3.11 an interrupt can come in no line, and its traceback needs one.
        found = Path(".amp-fuzz").rglob("records-*.jsonl")
        if sum(path.read_text().count("\n") for path in found) > 6:
            break
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, out
    # A case that diverged may have been told before it was recorded.
    told = {(r.backend, r.case.id) for r in records() if isinstance(r, DivergenceRecord)}
    kept = {(r.backend, r.id) for r in records() if isinstance(r, CaseRecord)}
    assert kept
    assert "= amp-fuzz =" in out
    assert f" {len(kept | told)} " in out.partition("= amp-fuzz =")[2], out
    assert not list(Path(".amp-fuzz").rglob("current-*"))


@pytest.mark.thorough
def test_a_backend_that_is_missing_is_skipped_with_the_reason(project: pytest.Pytester) -> None:
    result = project.runpytest_subprocess("--amp-fuzz", "-k", "availability", "-rs")
    assert result.ret == 0
    if result.parseoutcomes().get("skipped"):
        result.stdout.fnmatch_lines(["SKIPPED * eager-* is missing: no * device *"])
    result.stdout.fnmatch_lines(["amp-fuzz: no case ran"])


@pytest.mark.thorough
def test_a_session_whose_time_is_over_says_how_far_it_came(project: pytest.Pytester) -> None:
    result = project.runpytest_subprocess(*SMALL, CPU, "--amp-fuzz-seconds=0.001", "-rs")
    assert result.ret == 0
    result.assert_outcomes(passed=2, skipped=3)
    result.stdout.fnmatch_lines(
        [
            "stopped after *: 0 of 20 cases",
            "SKIPPED * no case ran: the 0.001 s of amp-fuzz had passed before",
        ]
    )


@pytest.mark.thorough
def test_a_session_fails_that_reached_too_few_kernels(project: pytest.Pytester) -> None:
    more = ("--amp-fuzz-require-coverage=95", "amp-fuzz::eager-cpu")
    result = project.runpytest_subprocess(*SMALL, CPU, *more)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["*FAILS: eager-cpu reached * of * autocast*"])


@pytest.mark.thorough
def test_a_baseline_is_judged_first_and_an_expired_entry_fails(
    project: pytest.Pytester, tmp_path: Path
) -> None:
    project.makeconftest(FAULT.format(first=""))
    args = (*SMALL, CPU, "-W", QUIET, "amp-fuzz::eager-cpu")
    first = project.runpytest_subprocess(*args).parseoutcomes()
    assert first["failed"] > 1  # an item of few cases may have no mm
    assert first["failed"] + first.get("passed", 0) == 3
    update = ("baseline", "update", "--reason=a fault of ours", "--expires=2999-01-01")
    done = forked(main, update, folder=project.path, environment=dict(os.environ), files=tmp_path)
    assert done.code == 0, done.err
    known = project.runpytest_subprocess(*args)
    known.assert_outcomes(passed=5)  # with the baseline's item, and that of the store's findings
    assert known.ret == 0, said(known)
    known.stdout.fnmatch_lines(["amp-fuzz .....*", "baseline: * (* there)"])
    path = Path("amp-fuzz-baseline.toml")
    path.write_text(path.read_text().replace("2999-01-01", "2020-01-01"))
    late = project.runpytest_subprocess(*args)
    assert late.ret == pytest.ExitCode.TESTS_FAILED
    late.stdout.fnmatch_lines(
        ["EXPIRED: * was accepted until 2020-01-01: *", "FAILED amp-fuzz::eager-cpu::baseline*"]
    )
    path.write_text("[[finding]]\n")
    broken = project.runpytest_subprocess(*args)
    assert broken.ret == pytest.ExitCode.USAGE_ERROR
    broken.stderr.fnmatch_lines(["ERROR: amp-fuzz: *amp-fuzz-baseline.toml: *missing required*"])


NOTED = ("--amp-fuzz-cases=2", "--amp-fuzz-seed=1", "--amp-fuzz-corpus=corpus")


@pytest.mark.thorough
def test_a_note_fails_its_item_if_the_session_was_told_to(project: pytest.Pytester) -> None:
    exp = case([x("x0", 2, dtype="bfloat16")], call("exp", "x0"), contexts=(BF16,), backward="none")
    Path("corpus").mkdir()
    Path("corpus/exp.json").write_bytes(exp.json())
    options = ("--amp-fuzz", "--amp-fuzz-backends=eager-cpu", "--amp-fuzz-ops=abs", *NOTED)
    plain = project.runpytest_subprocess(*options, "--amp-fuzz-notes=portability", "-v")
    assert plain.ret == 0, said(plain)
    assert "16 bits on cpu; float32 on cuda" in said(plain)
    for more in ((), ("-n", "2")):
        told = project.runpytest_subprocess(*options, "--amp-fuzz-fail-on=portability", *more)
        assert told.ret == 1, said(told)
        told.stdout.fnmatch_lines(
            [
                "*1 note of the kinds of --amp-fuzz-fail-on",
                f"*portability: exp: 16 bits on cpu; float32 on {OTHERS} (1 case)",
                f"*amp-fuzz replay {exp.id} --backend=eager-cpu",
            ]
        )


# A conftest in which eager's values are wrong, whatever autocast does.
OWN = """
from amp_fuzz.backends.eager import EagerBackend

honest = EagerBackend.run

def run(self, cases):
    seen = honest(self, cases)
    for observation in seen:
        for label, value in observation.values.items():
            if value is not None and value.is_floating_point():
                observation.values[label] = value + 1
    return seen

EagerBackend.run = run
"""


@pytest.mark.thorough
@pytest.mark.parametrize(("more", "code"), [((), 0), (("--amp-fuzz-fail-on=backend",), 1)])
def test_what_shows_without_autocast_too_passes_unless_asked(
    project: pytest.Pytester, more: tuple[str, ...], code: int
) -> None:
    project.makeconftest(OWN)
    small = ("--amp-fuzz", "--amp-fuzz-ops=relu", "--amp-fuzz-cases=3", "--amp-fuzz-seed=1")
    done = project.runpytest_subprocess(*small, CPU, "--amp-fuzz-isolate=never", *more)
    assert done.ret == code
    said = " ".join(done.stdout.str().split())
    line = r"\d cases? differs? in the same way without autocast: the backend's own"
    assert re.search(line, said)
    assert ("--fail-on=backend says" in said) == bool(code)
    assert {r.known for r in records() if isinstance(r, DivergenceRecord)} == {"backend"}
