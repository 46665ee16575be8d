"""Since which torch a finding is there, and until which: the regression range.

A script that `amp-fuzz repro` writes runs in several environments, in the order of their torch, or
of another package. It needs nothing but what it imports. One environment that has the bug is known;
a binary search towards each end finds its neighbours that do not. So a bug that went and came back
is seen only as far as the search meets it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from filelock import FileLock
from packaging.version import InvalidVersion, Version

from amp_fuzz.findings.repro.trial import Tried, tried
from amp_fuzz.runs.policies import InterpreterError, python_of

__all__ = [
    "Environment",
    "EnvironmentMissing",
    "Range",
    "Step",
    "bisect",
    "environment",
    "search",
]

State: TypeAlias = Literal["there", "gone", "cannot tell"]

_MOST = 5  # runs of a script that once reproduces and once does not


# -- environments ---------------------------------------------------------------------------------


class EnvironmentMissing(Exception):
    """An environment could not be made. The message says why."""


@dataclass(frozen=True, slots=True)
class Environment:
    """An interpreter. name: what the user calls it. version: of the package that is asked about."""

    name: str
    python: str
    version: str

    @property
    def order(self) -> Version:
        """What environments are sorted by."""
        return Version(self.version)


# Without the current folder: a checkout of torch there has metadata of its own, and a module there
# must not replace one of the standard library's.
_ASK = """\
import sys
sys.path = [folder for folder in sys.path if folder]
from importlib.metadata import version
print(version({!r}))
"""
_SECONDS = 600  # for an interpreter's answer


def environment(name: str, cache: Path, package: str = "torch") -> Environment:
    """Return the environment of a path, or of requirements as pip takes them.

    name: an interpreter, the folder of an environment, or requirements such as ``torch==2.9.1``. An
    environment of requirements is made once, by uv or else by venv and pip, and kept in the folder
    `cache`. package: the one whose version counts. Raises `InterpreterError` for a path that is no
    interpreter, and `EnvironmentMissing` if requirements cannot be installed.
    """
    if _requires(name):
        try:
            python = _made(name, cache)
        except OSError as error:
            raise EnvironmentMissing(f"{name}: {cache}: {error.strerror or error}") from error
    else:
        python = _existing(name)
    said = _run([python, "-c", _ASK.format(package)], InterpreterError, name, _SECONDS).strip()
    try:
        Version(said)
    except InvalidVersion as error:
        raise InterpreterError(f"{name}: {said[:80]!r} is no version of {package}") from error
    return Environment(name, python, said)


def _requires(name: str) -> bool:
    """Return whether it is requirements: options, a URL, a wheel, or no path at all."""
    first = name.split(" ")[0]
    if first.startswith("-") or "://" in first or first.endswith(".whl"):
        return True
    paths = os.sep in first.partition("==")[0] or re.fullmatch(r"python[\d.]*", name)
    return bool(name.strip()) and not paths and not Path(name).exists()


def _existing(name: str) -> str:
    """Return the interpreter of a path, or of a command such as ``python3.12``."""
    command = shutil.which(name) if name and not Path(name).is_dir() else None
    try:
        found = python_of(command or name)
    except RuntimeError:  # ~nobody
        found = Path(name)
    if not found.is_file():
        raise InterpreterError(f"{name}: no such interpreter or environment")
    return str(found)


def _made(requirements: str, cache: Path) -> str:
    """Return the interpreter of an environment with these requirements."""
    try:
        words = shlex.split(requirements)
    except ValueError as error:
        raise InterpreterError(f"{requirements}: {error}") from error
    plain = re.sub(r"[^\w.=-]+", "-", requirements)[:60].strip("-")
    key = hashlib.sha256(f"{sys.version_info[:2]} {words}".encode()).hexdigest()[:8]
    folder = cache.absolute() / f"{plain}-{key}"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{folder.name}.lock"):
        python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        if (folder / ".complete").exists():
            return str(python)
        shutil.rmtree(folder, ignore_errors=True)
        for command in _making(folder, str(python), words):
            _run(command, EnvironmentMissing, requirements)
        (folder / ".complete").touch()
    return str(python)


def _making(folder: Path, python: str, words: Sequence[str]) -> Iterator[list[str]]:
    uv = shutil.which("uv")
    if uv is not None:
        yield [uv, "venv", "--quiet", "--python", sys.executable, str(folder)]
        yield [uv, "pip", "install", "--quiet", "--python", python, *words]
        return
    # -I: a module in the current folder is not one of pip's.
    yield [sys.executable, "-I", "-m", "venv", str(folder)]
    quiet = ("--quiet", "--no-input", "--disable-pip-version-check")
    yield [python, "-I", "-m", "pip", "install", *quiet, *words]


def _run(
    command: list[str], error: type[Exception], name: str, timeout: float | None = None
) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            check=False,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=timeout,
        )
    except OSError as failed:
        raise error(f"{name}: {command[0]}: {failed.strerror}") from failed
    except subprocess.TimeoutExpired as failed:
        raise error(f"{name}: no answer after {timeout} s") from failed
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise error(f"{name}: {lines[-1].strip()}")
    return done.stdout


# -- one environment ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """What a script says in one environment. runs: of the script; bad: those that reproduce.

    detail: why it cannot tell, or why what reproduces is no bug.
    """

    state: State
    runs: int = 1
    bad: int = 0
    detail: str = ""


def step(run: Callable[[], Tried], least: int) -> Step:
    """Run a script at least so often, and more often if it does not always say the same."""
    codes: list[Tried] = []
    while len(codes) < least or (_differ(codes) and len(codes) < _MOST):
        codes.append(run())
        if codes[-1].code not in (0, 1):  # 125, or it died
            break
    bad = sum(one.reproduces for one in codes)
    if not bad and codes[-1].code != 0:
        return Step("cannot tell", len(codes), detail=str(codes[-1]))
    return Step("there" if bad else "gone", len(codes), bad)


def _differ(codes: Sequence[Tried]) -> bool:
    return len({one.reproduces for one in codes}) > 1


def _compared(found: Step, eager: Tried) -> Step:
    """Return a step whose script reproduces, after the same program ran in eager."""
    if eager.code == 0:
        return found
    if eager.reproduces:
        return Step("gone", found.runs, detail="eager does the same")
    return Step("cannot tell", found.runs, detail=f"eager does not do what it expects: {eager}")


# -- the search -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Range:
    """Where a finding is there, by position in the order of environments.

    first, last: the oldest and the newest that are known to have it. before, after: the nearest
    that are known not to; None if there is none. Those between were skipped.
    """

    first: int
    last: int
    before: int | None
    after: int | None


def search(count: int, bad: int, ask: Callable[[int], State]) -> Range:
    """Search from an environment that has the bug towards both ends of `count` environments."""
    first, before = _edge([*range(bad, -1, -1)], ask)
    last, after = _edge([*range(bad, count)], ask)
    return Range(first, last, before, after)


def _edge(order: Sequence[int], ask: Callable[[int], State]) -> tuple[int, int | None]:
    """Return the last with the bug, and the first without, if that is so at the far end."""
    there, gone, skipped = 0, len(order), set[int]()
    asked = iter(range(len(order) - 1, 0, -1))  # the far end first
    for i in asked:
        state = ask(order[i])
        if state == "there":
            return order[i], None
        if state == "gone":
            gone = i
            break
    else:
        return order[0], None
    while left := [i for i in range(there + 1, gone) if i not in skipped]:
        i = min(left, key=lambda i: abs(2 * i - there - gone))
        state = ask(order[i])
        if state == "there":
            there = i
        elif state == "gone":
            gone = i
        else:
            skipped.add(i)
    return order[there], order[gone]


def bisect(
    script: str,
    environments: Sequence[Environment],
    likely: Environment,
    *,
    environ: Mapping[str, str],
    least: int,
    timeout: float,
    memory: float,
    said: Callable[[Environment, Step], None],
    eager: str = "",
) -> Range | None:
    """Search for the range of a script's finding in environments that are sorted; None: nowhere.

    likely: an environment that should have it; if not, the others are asked, newest first. environ:
    the variables of the scripts. least: how often a script runs, at least; once a step was flaky,
    the following ones run more often. timeout: CPU seconds of a run. memory: GiB. said: is told of
    each step. eager: the script of the same program in eager. Where that does not do what is
    expected either, torch has changed, and what the script shows is no bug of the compiler.
    """
    steps: dict[int, Step] = {}

    def plainly(python: str) -> Tried:
        return tried(eager, environ, python, timeout=timeout, memory=memory)

    # It says something if it does here what the script expects.
    asks_eager = bool(eager) and plainly(likely.python).code == 0

    def ask(position: int) -> State:
        if position not in steps:
            one = environments[position]

            def run() -> Tried:
                return tried(script, environ, one.python, timeout=timeout, memory=memory)

            flaky = any(0 < known.bad < known.runs for known in steps.values())
            found = step(run, max(least, _MOST) if flaky else least)
            if found.state == "there" and asks_eager and one != likely:
                found = _compared(found, plainly(one.python))
            steps[position] = found
            said(one, found)
        return steps[position].state

    start = environments.index(likely)
    newest_first = range(len(environments) - 1, -1, -1)
    for position in dict.fromkeys([start, *newest_first]):
        if ask(position) == "there":
            return search(len(environments), position, ask)
    return None
