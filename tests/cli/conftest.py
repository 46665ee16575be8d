"""Running ``amp-fuzz`` as users do: in a process of its own, in a folder of its own.

`command` runs it in this process, for what ends before torch is imported; `amp_fuzz` in another,
where some more backends are installed, each of them wrong in its own way. Importing torch would be
half of what a command costs: the processes of `amp_fuzz` are forks of one that has done it.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from amp_fuzz.cli import main

# Takes a command a line, and runs it in a fork that ends as any process does.
FORKS = """
import json, os, resource, sys
import torch
import amp_fuzz.cli, amp_fuzz.judge, amp_fuzz.reports, amp_fuzz.session

for line in sys.stdin:
    pid = os.fork()
    if pid:
        print(pid, flush=True)
        status = os.waitpid(pid, 0)[1]
        print(os.waitstatus_to_exitcode(status), flush=True)
        continue
    told = json.loads(line)
    os.setsid()
    files = [os.open(os.devnull, os.O_RDONLY)]
    files += [os.open(told[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name in ("out", "err")]
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(told["environment"])
    os.chdir(told["folder"])
    sys.argv[1:] = told["arguments"]
    if told["limit"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (told["limit"],) * 2)
    sys.exit(amp_fuzz.cli.main())
"""
PROGRAM = (sys.executable, "-c", "import sys; from amp_fuzz.cli import main; sys.exit(main())")

# Each does to real results what its name says.
BACKENDS = '''
import os
import itertools
import signal
import subprocess
import time

import torch

from amp_fuzz.backends.base import Availability
from amp_fuzz.backends.eager import EagerBackend
from amp_fuzz.program import statements


class Lying(EagerBackend):
    """Says float64 of the first value."""

    name = "lying-cpu"

    def run(self, cases):
        seen = EagerBackend.run(self, cases)
        for observation in seen:
            for label, value in observation.values.items():
                if value is not None and value.is_floating_point():
                    observation.values[label] = value.double()
                    break
        return seen


class Dying(EagerBackend):
    name = "dying-cpu"

    def run(self, cases):
        os.kill(os.getpid(), signal.SIGSEGV)


class Hanging(EagerBackend):
    name = "hanging-cpu"

    def run(self, cases):
        subprocess.run(["sleep", "600"])  # as a compiler that waits for another


class Failing(EagerBackend):
    """Has a bug of its own, which is not the case's."""

    name = "failing-cpu"

    def run(self, cases):
        raise RuntimeError("the backend itself is wrong")


TURNS = itertools.count()


class Moody(EagerBackend):
    """Does to ops what stands in moods.txt: ``abs dtype``, ``neg value``, ``abs coin``."""

    name = "moody-cpu"

    def run(self, cases):
        moods = dict(line.split() for line in open("moods.txt"))
        seen = EagerBackend.run(self, cases)
        for case, observation in zip(cases, seen):
            calls = statements(case.program.body)
            made = {n: moods[s.op] for s in calls if s.op in moods for n in s.outputs}
            for label, value in observation.values.items():
                mood = made.get(label.rpartition(".")[2])
                if mood and value is not None and value.is_floating_point():
                    observation.values[label] = self.changed(mood, value)
        return seen

    def changed(self, mood, value):
        if mood == "dtype":
            return value.to(torch.float64 if value.dtype != torch.float64 else torch.float32)
        return value + (1 if mood == "value" else 1 + next(TURNS) % 120)


class Broken(EagerBackend):
    name = "broken-cpu"

    def availability(self):
        return Availability("broken", "it is broken on purpose")


def backends():
    return [kind("cpu") for kind in (Lying, Dying, Hanging, Failing, Moody, Broken)]
'''


@dataclass(frozen=True, slots=True)
class Done:
    """What came of a command."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line on stderr; the test fails if there is another, or a traceback."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        return lines[0]


class Running:
    """A run in a session of its own, like a terminal's foreground job."""

    def __init__(self, folder: Path, environment: dict[str, str], *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*PROGRAM, "run", "--ops=abs,matmul", "--cases=100000", *arguments],
            cwd=folder,
            env=environment | {"PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []

    def wait_for(self, pattern: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if re.search(pattern, line):
                return
        raise AssertionError(f"no line like {pattern!r} in {self.lines}: {self.process.stderr}")

    def end(self) -> Done:
        out, err = self.process.communicate(timeout=120)
        return Done(self.process.returncode, "".join(self.lines) + out, err)

    def leaves_nothing(self) -> None:
        """Fail unless all processes of the session end, now that the first one has."""
        deadline = time.monotonic() + 10
        while left := self._processes():
            assert time.monotonic() < deadline, left
            time.sleep(0.05)

    def _processes(self) -> list[str]:
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                text = stat.read_text()
            except OSError:  # it has just ended
                continue
            state, _, _, session = text.rpartition(")")[2].split()[:4]
            if int(session) == self.process.pid and state != "Z":
                found.append(text)
        return found


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Done]:
    """Run the command line here and return what came of it."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Done:
        capsys.readouterr()
        code = main([str(a) for a in arguments])
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Install the wrong backends where only processes with this environment find them."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "wrong_backends.py").write_text(BACKENDS)
    about = folder / "wrong_backends-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong-backends\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[amp_fuzz.backends]\nwrong = wrong_backends:backends\n"
    )
    ours = {k: v for k, v in os.environ.items() if not k.startswith("AMP_FUZZ_")}
    # What a developer puts in front (a worktree) stays in front of what is installed.
    before = filter(None, [os.environ.get("PYTHONPATH")])
    return ours | {"PYTHONPATH": os.pathsep.join([str(folder), *before])}


def run_in(folder: Path, environment: dict[str, str], *arguments: str) -> Done:
    """Run a command in a process that nothing was done for before."""
    done = subprocess.run(
        [*PROGRAM, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    return Done(done.returncode, done.stdout, done.stderr)


class Forks:
    """A process that has imported torch and ``amp_fuzz``, and what runs commands in its forks."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", FORKS],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, folder: Path, environment: dict[str, str], *arguments: str, limit: int) -> Done:
        told: dict[str, Any] = {"folder": str(folder), "environment": environment, "limit": limit}
        told |= {name: str(self.folder / name) for name in ("out", "err")}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(told | {"arguments": arguments}) + "\n")
        self.process.stdin.flush()
        pid = int(self.process.stdout.readline())
        watch = threading.Timer(240, os.killpg, (pid, signal.SIGKILL))
        watch.start()
        code = int(self.process.stdout.readline())
        watch.cancel()
        return Done(code, *((self.folder / name).read_text() for name in ("out", "err")))

    def end(self) -> None:
        self.process.communicate("", timeout=60)


@pytest.fixture(scope="session")
def forks(installed: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Start the process whose forks run commands."""
    made = Forks(installed, tmp_path_factory.mktemp("forks"))
    yield made
    made.end()


@pytest.fixture
def environment(installed: dict[str, str]) -> dict[str, str]:
    """Return the environment of `amp_fuzz`'s processes; a test may add to it."""
    return dict(installed)


@pytest.fixture
def amp_fuzz(forks: Forks, environment: dict[str, str], tmp_path: Path) -> Callable[..., Done]:
    """Run the command line in a process of its own, with the wrong backends installed."""

    def run(*arguments: object, cwd: Path = tmp_path, limit: int = 0) -> Done:
        return forks.run(cwd, environment, *map(str, arguments), limit=limit)

    return run


@pytest.fixture(scope="session")
def fuzzed(
    installed: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Done]:
    """Fuzz once for all tests; return the folder, and what came of the command."""
    folder = tmp_path_factory.mktemp("fuzzed")
    arguments = ("--backends=lying-cpu", "--ops=abs", "--cases=6", "--seed=1", "--minimize=2")
    return folder, run_in(folder, installed, "run", *arguments)


@pytest.fixture
def start(environment: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Start a run that a test interrupts; what is left of it is killed after the test."""
    started: list[Running] = []

    def run(*arguments: str) -> Running:
        started.append(Running(tmp_path, environment, *arguments))
        return started[-1]

    yield run
    for running in started:
        if running.process.poll() is None:
            os.killpg(running.process.pid, signal.SIGKILL)
            running.process.communicate()
