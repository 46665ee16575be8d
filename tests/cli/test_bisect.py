"""``amp-fuzz bisect``: in which versions of torch a finding is there."""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from amp_fuzz.config import Options
from amp_fuzz.findings.repro.script import BITS
from amp_fuzz.findings.repro.trial import Tried
from amp_fuzz.interfaces.cli.bisect import bisect as command
from amp_fuzz.interfaces.cli.replay import Job, job_of
from amp_fuzz.interfaces.cli.repro import scripts_of
from amp_fuzz.records.schema import unanswered
from amp_fuzz.records.store import Store, find_case
from amp_fuzz.runs import bisect as core
from amp_fuzz.runs.bisect import (
    Environment,
    EnvironmentMissing,
    Range,
    Step,
    environment,
    search,
    step,
)
from amp_fuzz.runs.policies import InterpreterError
from amp_fuzz.upstream import BUGS
from tests.helpers import needs_torch

pytestmark = pytest.mark.thorough

Command = Callable[..., Any]
FINDINGS = Path(__file__).parents[2] / "docs" / "findings"
CACHE = FINDINGS / "issue-cache-ignores-dtype.json"  # this torch has the bug

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


@pytest.mark.parametrize("code", [125, -11, None])
def test_one_run_that_reproduces_is_enough(code: int | None) -> None:
    found = step(runs(1, code), 2)
    assert (found.state, found.bad, found.runs) == ("there", 1, 2)


def test_once_a_step_was_flaky_the_others_run_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = {"a": [0, 0, 0, 1, 0], "b": [0, 1, 0, 0, 0]}

    def fake(script: str, environ: Any, python: str, **limits: float) -> Tried:
        return Tried(codes[python].pop(0), "a line")

    monkeypatch.setattr(core, "tried", fake)
    steps: list[Step] = []
    both = [Environment(name, name, version) for name, version in (("a", "1.0"), ("b", "2.0"))]
    limits = {"timeout": 1.0, "memory": 1.0}
    said = lambda one, step: steps.append(step)  # noqa: E731
    found = core.bisect("", both, both[1], environ={}, least=2, said=said, **limits)
    assert found == Range(0, 1, None, None)
    assert [(step.bad, step.runs) for step in steps] == [(1, 5), (1, 5)]


@pytest.mark.parametrize(
    ("here", "found"),
    [
        (0, {"1.0": "cannot tell", "2.0": "gone", "3.0": "there", "4.0": "there"}),
        # Eager does something else where the finding was made, so it is not asked elsewhere.
        (1, {"1.0": "there", "4.0": "there"}),
        (125, {"1.0": "there", "4.0": "there"}),
    ],
)
def test_what_eager_does_too_is_no_bug_of_the_compiler(
    monkeypatch: pytest.MonkeyPatch, here: int, found: dict[str, str]
) -> None:
    eager = {"1.0": 125, "2.0": 1, "3.0": 0, "4.0": here}

    def fake(script: str, environ: Any, python: str, **limits: float) -> Tried:
        return Tried(eager[python] if script == "eager" else 1, "a line")

    monkeypatch.setattr(core, "tried", fake)
    steps: dict[str, Step] = {}
    all_of = [Environment(version, version, version) for version in eager]
    limits = {"timeout": 1.0, "memory": 1.0}
    said = lambda one, step: steps.update({one.version: step})  # noqa: E731
    core.bisect("s", all_of, all_of[3], environ={}, least=1, said=said, eager="eager", **limits)
    assert {version: step.state for version, step in steps.items()} == found


def test_a_compiler_s_finding_has_a_script_in_eager() -> None:
    plain = job_of(str(FINDINGS / "issue-cache-ignores-dtype.json"), Store(), "eager-cpu")
    assert scripts_of(plain, Options())[1] == ""
    needs_torch(BUGS["compile-clamp-broadcast"].torch)
    example = BUGS["compile-clamp-broadcast"].examples[0]
    job = Job("x", example.case, example.backend, None, Path(".amp-fuzz"))
    script, eager = scripts_of(job, Options())
    assert "torch.compile" in script
    assert "torch.compile" not in eager
    last = script[script.index("right =") :]
    assert eager.endswith(last)


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


@pytest.mark.parametrize("name", ["", "envs/none", "~nobody-here/env", "python9.99"])
def test_a_path_that_is_no_interpreter(name: str, tmp_path: Path) -> None:
    with pytest.raises(InterpreterError, match="no such interpreter or environment"):
        environment(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "said"),
    [("/bin/echo", "is no version of torch"), ('torch=="2', "No closing quotation")],
)
def test_what_is_no_environment_is_an_error_of_the_user(
    name: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(InterpreterError, match=said):
        environment(name, tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "--index-url=https://127.0.0.1/none torch",
        "https://127.0.0.1/torch.whl",
        "./torch-2.9.1.whl",
    ],
)
def test_requirements_with_a_slash(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "_made", lambda requirements, cache: f"made of {requirements}")
    monkeypatch.setattr(core, "_run", lambda command, *_: "2.9.1\n")
    assert environment(name, tmp_path).python == f"made of {name}"


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    cache = tmp_path / "file"
    cache.touch()
    with pytest.raises(EnvironmentMissing, match="File exists"):
        environment("torch==2.9.1", cache)


def test_a_checkout_in_the_current_folder_is_not_the_torch_of_an_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "torch.egg-info"
    info.mkdir()
    (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 99.0\n")
    (tmp_path / "csv.py").write_text("raise SystemExit('a module of the current folder ran')\n")
    monkeypatch.chdir(tmp_path)
    assert environment(sys.executable, tmp_path).version == metadata.version("torch")


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


def test_the_range_is_kept_with_a_finding_of_the_store(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(core, "tried", lambda *_, **__: Tried(1, "it reproduces"))
    monkeypatch.setattr(sys.modules[command.callback.__module__], "scripts_of", lambda *_: ("", ""))
    store, (case, _) = Store(tmp_path / "store"), find_case(Store(tmp_path), str(CACHE))
    finding = unanswered("eager-cpu", "dtype", case, "float16", op="mm")
    store.save(finding)
    words = [finding.id, f"--with={interpreter(tmp_path, '97.0', 1)}", f"--store={store.root}"]
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 0, (done.output, done.exception)
    torch = metadata.version("torch")
    assert store.range_of(finding) == f"torch: there since {torch} or earlier; still there in 97.0"
    assert done.output.endswith(store.range_of(finding).removeprefix("torch: ") + "\n")


def test_a_finding_that_is_nowhere(
    amp_fuzz: Command, fuzzed: tuple[Path, Any], identity: str, tmp_path: Path
) -> None:
    """The backend of the finding is in this test only: plain torch agrees with the reference."""
    other = interpreter(tmp_path, "2.0", 0)
    done = amp_fuzz("bisect", identity, f"--with={other}", cwd=fuzzed[0])
    assert (done.code, done.err) == (5, "")
    assert done.out.endswith("it reproduces in none of them\n")
    assert done.out.count("agrees") == 2


def test_a_second_environment_of_a_version_is_named(amp_fuzz: Command, tmp_path: Path) -> None:
    path = FINDINGS / "issue-cache-ignores-dtype.json"
    others = [interpreter(tmp_path, f"97.0+{build}", 1) for build in ("cpu", "cu130")]
    done = amp_fuzz("bisect", path, *[f"--with={other}" for other in others])
    said = f"skipped: {others[1]}: torch 97.0+cu130, and {others[0]} has 97.0+cpu"
    assert said in done.out.splitlines()


def test_environments_that_cannot_tell_are_not_said_to_agree(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(core, "tried", lambda *_, **__: Tried(125, "no module"))
    path = FINDINGS / "issue-cache-ignores-dtype.json"
    words = [str(path), f"--with={interpreter(tmp_path, '97.0', 0)}"]
    done = CliRunner().invoke(command, words)
    assert done.output.endswith("none of them can tell\n")


def test_a_script_runs_as_in_the_shell_of_its_reader(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A backend may change variables. A script that compares bits says so."""

    def scripts_of(*_: Any) -> tuple[str, str]:
        monkeypatch.setenv("AMP_FUZZ_ODD", "1")
        return f"# {BITS}", ""

    seen: list[Any] = []

    def tried(script: str, environ: Any, *_: Any, **limits: Any) -> Tried:
        seen.append(environ)
        return Tried(1, "")

    module = sys.modules["amp_fuzz.interfaces.cli.bisect"]  # the package has a command of its name
    monkeypatch.setattr(module, "scripts_of", scripts_of)
    monkeypatch.setattr(core, "tried", tried)
    path = FINDINGS / "issue-cache-ignores-dtype.json"
    words = [str(path), f"--with={interpreter(tmp_path, '97.0', 0)}"]
    done = CliRunner().invoke(command, words)
    assert "the script compares bits: " in done.output
    assert seen
    assert not any("AMP_FUZZ_ODD" in environ for environ in seen)


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
