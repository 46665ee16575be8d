"""Running ``amp-fuzz`` as users do: in a process of its own, in a folder of its own.

`command` runs it in this process, for what ends before torch is imported; `amp_fuzz` in another,
where some more backends are installed, each of them wrong in its own way: a fork (`tests.forks`).
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from amp_fuzz.interfaces.cli import main
from amp_fuzz.records.store import Store
from tests.forks import Done, forked
from tests.helpers import wait_until

PROGRAM = (
    sys.executable,
    "-c",
    "import sys; from amp_fuzz.__main__ import main; sys.exit(main())",
)

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
from amp_fuzz.cases.program import Autocast, regions, statements


def under_autocast(case):
    contexts = (*case.plan.contexts, *regions(case.program.body))
    return any(isinstance(c, Autocast) and c.enabled for c in contexts)


class Lying(EagerBackend):
    """Says float64 of the first value under autocast."""

    name = "lying-cpu"

    def run(self, cases):
        seen = EagerBackend.run(self, cases)
        for case, observation in zip(cases, seen):
            if not under_autocast(case):
                continue
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
    """Does to ops under autocast what stands in moods.txt: ``abs dtype``, ``neg value``.

    ``coin`` changes from run to run. ``abs always-dtype``: without autocast too.
    """

    name = "moody-cpu"

    def run(self, cases):
        moods = dict(line.split() for line in open("moods.txt"))
        seen = EagerBackend.run(self, cases)
        for case, observation in zip(cases, seen):
            calls = statements(case.program.body)
            made = {n: moods[s.op] for s in calls if s.op in moods for n in s.outputs}
            for label, value in observation.values.items():
                mood = made.get(label.rpartition(".")[2], "")
                kind = mood.removeprefix("always-")
                if kind == mood and not under_autocast(case):
                    continue
                if mood and value is not None and value.is_floating_point():
                    observation.values[label] = self.changed(kind, value)
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
        out, err = self.process.communicate(timeout=600)
        return Done(self.process.returncode, "".join(self.lines) + out, err)

    def leaves_nothing(self) -> None:
        """Fail unless all processes of the session end, now that the first one has."""
        wait_until(lambda: not self._processes(), "the end of the session's processes")

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
        timeout=600,
    )
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def environment(installed: dict[str, str]) -> dict[str, str]:
    """Return the environment of `amp_fuzz`'s processes; a test may add to it."""
    return dict(installed)


@pytest.fixture
def amp_fuzz(
    environment: dict[str, str], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Done]:
    """Run the command line in a process of its own, with the wrong backends installed."""
    files = tmp_path_factory.mktemp("outputs")

    def run(*arguments: object, cwd: Path = tmp_path, limit: int = 0) -> Done:
        words = tuple(map(str, arguments))
        return forked(main, words, folder=cwd, environment=environment, files=files, limit=limit)

    return run


@pytest.fixture(scope="session")
def fuzzed(
    installed: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Done]:
    """Fuzz once for all tests; return the folder, and what came of the command."""
    folder = tmp_path_factory.mktemp("fuzzed")
    arguments = (
        "--backends=lying-cpu",
        "--ops=abs",
        "--cases=6",
        "--seed=1",
        "--minimize=2",
        "--workers=1",
    )
    return folder, run_in(folder, installed, "run", *arguments)


@pytest.fixture(scope="session")
def identity(fuzzed: tuple[Path, Done]) -> str:
    """Return the id of what `fuzzed` found."""
    (found,) = Store(fuzzed[0] / ".amp-fuzz").findings()
    return found


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
