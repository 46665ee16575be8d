"""Write known bugs as unit tests: each example that shows one here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import connection
from pathlib import Path

from amp_fuzz.backends.base import facts_of
from amp_fuzz.backends.harness import quiet
from amp_fuzz.backends.registry import backends
from amp_fuzz.findings.presence import State, preload, tell
from amp_fuzz.findings.repro.parts import Found, ReproError
from amp_fuzz.findings.repro.unit_tests import Method, method_of
from amp_fuzz.findings.supervision.supervisor import Dead, talk
from amp_fuzz.findings.supervision.worker import prepared
from amp_fuzz.oracle import Divergence
from amp_fuzz.upstream.bug import Bug, Example
from amp_fuzz.upstream.explain import judge_of
from amp_fuzz.upstream.registry import BUGS

__all__ = ["bug_of", "ended", "failing", "methods", "run"]


def methods(
    bugs: Iterable[Bug], *, timeout: float, memory: float
) -> Iterator[tuple[Bug, list[Method], str]]:
    """Yield each bug with its tests, or why it has none: one for each example that shows it here.

    Each example runs in a process that may die.
    """
    bugs = tuple(bugs)
    preload(bugs)
    for bug in bugs:
        found, why = [], bug.unshown or "it has no case"
        for number, example in enumerate(bug.examples):
            made = _apart(bug, number, example, timeout, memory)
            if isinstance(made, Method):
                found.append(made)
            else:
                why = made
        yield bug, found, why


def _apart(bug: Bug, number: int, example: Example, timeout: float, memory: float) -> Method | str:
    """Return the test of an example, written by another process, or why there is none."""
    if library := facts_of(backends()[example.backend]).library:
        return f"it needs {library}"
    made: Method | str
    try:
        (made,) = talk(timeout, _answer, bug.id, number, memory=memory)
    except Dead as dead:
        if dead.kind not in bug.kinds:
            return str(dead)
        made = _method(bug, number, Divergence(dead.kind, "", "an answer", str(dead)))
    if isinstance(made, Method) and "from amp_fuzz" in "".join([made.body, *made.helpers]):
        return "it needs amp-fuzz"
    return made


def _answer(pipe: connection.Connection, name: str, number: int) -> None:
    prepared()
    pipe.send(_made(BUGS[name], number))
    pipe.send(None)


def _made(bug: Bug, number: int) -> Method | str:
    example = bug.examples[number]
    seen = tell(bug, example)
    if seen.state != "there":
        return f"{seen.state} here{f': {seen.detail}' if seen.detail else ''}"
    backend = backends()[example.backend]
    with quiet():
        found = judge_of(backend, (), relations="all").judge(example.case).divergence
    if found is None:
        return "agrees at a second run"
    return _method(bug, number, found)


def _method(bug: Bug, number: int, found: Found) -> Method | str:
    example = bug.examples[number]
    name = f"test_{bug.id.replace('-', '_')}{f'_{number + 1}' * bool(number)}"
    note = [bug.what, *([bug.link] if bug.link else [])]
    on = backends()[example.backend]
    try:
        return method_of(example.case, on, found, name=name, note=note)
    except ReproError as error:
        return str(error)


def bug_of(test: str) -> str:
    """Return the id of the bug that a test is about; those of further examples have numbers."""
    name = test.removeprefix("test_").replace("_", "-")
    return name if name in BUGS else re.sub(r"-\d+$", "", name)


def failing(text: str) -> set[str]:
    """Return the names of the tests of a module that fail as expected."""
    with tempfile.TemporaryDirectory(prefix="amp-fuzz-") as folder:
        path = Path(folder) / "test_findings.py"
        path.write_text(text, encoding="utf-8")
        states = run([sys.executable, "-W", "ignore"], path, Path(folder))
    return {name for name, state in states.items() if state == "there"}


def run(python: Sequence[str], path: Path, folder: Path) -> dict[str, State]:
    """Run a module of tests in a folder; return what each tells, by its name.

    Raises `ReproError`, with what it printed, if it ends before its last test.
    """
    # where CI is set, PyTorch's `run_tests` wants a package to write XML with
    env = {name: value for name, value in os.environ.items() if name != "CI"}
    command = [*python, str(path), "-v"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    states = ended(done.stderr)
    wanted = set(re.findall(r"^    def (test_\w+)\(self", path.read_text("utf-8"), re.MULTILINE))
    if states.keys() != wanted or not re.search(r"^Ran \d+ tests? in ", done.stderr, re.MULTILINE):
        code, printed = done.returncode, (done.stdout + done.stderr)[-2000:]
        raise ReproError(
            f"{len(states)} of {len(wanted)} tests ran, then exit code {code}:\n{printed}"
        )
    return states


def ended(printed: str) -> dict[str, State]:
    """Return what each test tells, by its name, from what unittest prints with ``-v``."""
    parts = re.split(r"^(test_\w+) \(.*?\) \.\.\. ", printed.partition("\n======")[0], flags=re.M)[
        1:
    ]
    return {name: _state(rest) for name, rest in zip(parts[::2], parts[1::2], strict=True)}


def _state(rest: str) -> State:
    """Return what the words after the name of a test tell; a warning may stand before them."""
    words: dict[str, State] = {"expected failure": "there", "unexpected success": "gone"}
    return next((state for word, state in words.items() if word in rest), "cannot tell")
