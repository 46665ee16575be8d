"""``amp-fuzz bisect``: in which versions of torch a finding is there."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_fuzz.findings.repro.trial import Tried
from amp_fuzz.runs.bisect import EnvironmentMissing, Range, environment, search, step
from amp_fuzz.runs.policies import InterpreterError

Command = Callable[..., Any]
FINDINGS = Path(__file__).parents[2] / "docs" / "findings"

# -- the search -----------------------------------------------------------------------------------


@given(st.lists(st.sampled_from("...?"), min_size=1, max_size=40), st.data())
def test_a_search_finds_the_neighbours_and_asks_few(marks: list[str], data: st.DataObject) -> None:
    count = len(marks)
    first = data.draw(st.integers(0, count - 1), label="first")
    last = data.draw(st.integers(first, count - 1), label="last")
    bad = data.draw(st.sampled_from(range(first, last + 1)), label="bad")
    marks[bad] = "."
    states = [
        "cannot tell" if m == "?" else "there" if first <= i <= last else "gone"
        for i, m in enumerate(marks)
    ]
    asked: list[int] = []

    def ask(i: int) -> Any:
        asked.append(i)
        return states[i]

    found = search(count, bad, ask)
    there = [i for i, state in enumerate(states) if state == "there"]
    older = [i for i in range(there[0]) if states[i] == "gone"]
    newer = [i for i in range(there[-1], count) if states[i] == "gone"]
    assert found == Range(there[0], there[-1], max(older, default=None), min(newer, default=None))
    if "?" not in marks:
        assert len(asked) <= 2 * (1 + count.bit_length())


def runs(*codes: int | None) -> Callable[[], Tried]:
    coming = iter(codes)
    return lambda: Tried(next(coming), "a line")


def test_a_step_repeats_what_is_flaky() -> None:
    assert step(runs(1, 1), 2).state == "there"
    assert step(runs(0, 0), 2).state == "gone"
    flaky = step(runs(0, 1, 0, 0, 0), 2)
    assert (flaky.state, flaky.bad, flaky.runs) == ("there", 1, 5)


@pytest.mark.parametrize("code", [125, -11, None, 2])
def test_a_step_that_ends_in_another_way_cannot_tell(code: int | None) -> None:
    found = step(runs(0, code), 2)
    assert found.state == "cannot tell"
    assert "a line" in found.detail


# -- environments ---------------------------------------------------------------------------------


def interpreter(folder: Path, version: str, code: int, said: str = "torch") -> Path:
    """Write a program that has a torch of this version, in which every script ends like this."""
    python = folder / version / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then echo {version}; else echo "{said}"; exit {code}; fi\n'
    )
    python.chmod(0o755)
    return python.parents[1]


def test_requirements_are_installed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # without uv: pip needs no network here
    wheel = tmp_path / "torch-2.9.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("torch.py", "")
        info = "torch-2.9.1.dist-info"
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.9.1\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    wanted = f"torch==2.9.1 --no-index --find-links={tmp_path}"
    cache = tmp_path / "cache"
    found = environment(wanted, cache)
    assert (found.version, found.name) == ("2.9.1", wanted)
    assert found.python.startswith(str(cache))
    wheel.unlink()
    assert environment(wanted, cache) == found  # nothing is installed again
    with pytest.raises(EnvironmentMissing, match="No matching distribution found for torch"):
        environment(f"torch==2.9.2 --no-index --find-links={tmp_path}", cache)
    assert [folder.name for folder in cache.iterdir() if (folder / ".complete").exists()] == [
        Path(found.python).parents[1].name
    ]


def test_a_path_that_is_no_interpreter() -> None:
    with pytest.raises(InterpreterError, match="no such interpreter or environment"):
        environment("envs/none", Path("unused"))


# -- the command ----------------------------------------------------------------------------------


def test_a_range(amp_fuzz: Command, tmp_path: Path) -> None:
    path = FINDINGS / "issue-cache-ignores-dtype.json"  # this torch has the bug
    others = [
        interpreter(tmp_path, "2.0", 0),
        interpreter(tmp_path, "2.1", 125, "No module named torch.amp"),
        interpreter(tmp_path, "2.2", 1),
        interpreter(tmp_path, "2.3", 1),
        interpreter(tmp_path, "97.0", 1),
        interpreter(tmp_path, "98.0", 0),
        interpreter(tmp_path, "99.0", 0),
    ]
    done = amp_fuzz("bisect", path, *[f"--with={other}" for other in others])
    assert (done.code, done.err) == (0, "")
    head, *lines, said = done.out.splitlines()
    assert head.endswith(" on eager-cpu")
    steps = {line.split()[1]: " ".join(line.split()[2:]) for line in lines}
    for version, wanted in {
        "2.0": f"agrees ({others[0]})",
        "2.1": f"cannot tell: exit code 125: No module named torch.amp ({others[1]})",
        "2.2": f"reproduces ({others[2]})",
        "97.0": f"reproduces ({others[4]})",
        "98.0": f"agrees ({others[5]})",
        "99.0": f"agrees ({others[6]})",
    }.items():
        assert steps[version] == wanted
    assert said == (
        "began after 2.0, at the latest in 2.2; mended after 97.0, at the latest in 98.0"
    )


def test_a_finding_that_is_nowhere(
    amp_fuzz: Command, fuzzed: tuple[Path, Any], identity: str, tmp_path: Path
) -> None:
    """The backend of the finding is in this test only: plain torch agrees with the reference."""
    other = interpreter(tmp_path, "2.0", 0)
    done = amp_fuzz("bisect", identity, f"--with={other}", cwd=fuzzed[0])
    assert (done.code, done.err) == (5, "")
    assert done.out.endswith("it reproduces in none of them\n")
    assert done.out.count("agrees") == 2


def test_what_cannot_be_installed_is_said(amp_fuzz: Command, tmp_path: Path) -> None:
    path = FINDINGS / "issue-cache-ignores-dtype.json"
    wanted = "torch==1.2.3 --no-index"
    done = amp_fuzz("bisect", path, f"--with={wanted}", f"--cache={tmp_path / 'envs'}")
    assert done.code == 0
    assert f"skipped: {wanted}: " in done.out
    assert done.out.splitlines()[-1].startswith("there since ")


@pytest.mark.parametrize("other", ["envs/none", os.devnull])
def test_no_interpreter(amp_fuzz: Command, other: str) -> None:
    path = FINDINGS / "issue-cache-ignores-dtype.json"
    done = amp_fuzz("bisect", path, f"--with={other}")
    assert done.code == 2
    assert done.error.startswith(f"amp-fuzz: {other}: ")
