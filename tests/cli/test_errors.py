"""Bad input: one line on stderr that names the thing and the way out, the right exit code."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import Program, Ref, Statement, TensorSpec
from amp_fuzz.interfaces.cli.common import Exit

Command = Callable[..., Any]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rum"], "amp-fuzz: unknown command 'rum': did you mean 'run'?"),
        (
            ["run", "--bakends=all"],
            "amp-fuzz run: unknown option '--bakends': did you mean '--backends'?",
        ),
        (["run", "--cases=x"], "amp-fuzz run: --cases: 'x' is not a whole number"),
        (["run", "--cases=0"], "amp-fuzz run: --cases: 0 is too small: use 1 or more"),
        (["run", "--seconds=nan"], "amp-fuzz run: --seconds: nan is not finite"),
        (
            ["run", "--relations=al"],
            "amp-fuzz run: --relations: 'al' is not a valid value: did you",
        ),
        (["run", "--profile=nightli"], "unknown profile 'nightli': did you mean 'nightly'?"),
        (
            ["run", "--ops=conw2d"],
            "amp-fuzz: no op or family matches 'conw2d': did you mean 'conv2d'?",
        ),
        (["run", "--known=nope.toml"], "amp-fuzz: nope.toml: No such file or directory"),
        (
            ["run", "--store=/dev/null"],
            "amp-fuzz: /dev/null: cannot make the store (Not a directory)",
        ),
        (["run", "--report=/dev/null"], "amp-fuzz: report: /dev/null is a file: give a folder"),
        (["run", "surplus"], "amp-fuzz run: Got unexpected extra argument (surplus)"),
        (["audit", "--ops=nope"], "amp-fuzz: no op or family matches 'nope'"),
        (["replay"], "amp-fuzz replay: missing argument ID|PATH..."),
        (["replay", "123"], "amp-fuzz: .amp-fuzz: no finding has the id '123' (kept: none yet)"),
        (["replay", "."], "amp-fuzz: .: Is a directory: give the path of a case file"),
        (
            ["repro", "no.json"],
            "amp-fuzz: no.json: No such file or directory: give the path of a ca",
        ),
        (["report"], "amp-fuzz: .amp-fuzz: no runs yet: see amp-fuzz list runs"),
        (["report", "2020"], "amp-fuzz: .amp-fuzz: no run's id starts with '2020'"),
        (
            ["report", "--store=/dev/null"],
            "amp-fuzz: /dev/null: not a folder: give another with --st",
        ),
        (["list", "op"], "amp-fuzz list: cannot list 'op': did you mean 'ops'?"),
        (
            ["list", "--store=/dev/null"],
            "amp-fuzz: /dev/null: not a folder: give another with --sto",
        ),
    ],
)
def test_usage(command: Command, arguments: list[str], said: str) -> None:
    done = command(*arguments)
    assert said in done.error
    assert done.code == 2
    assert done.out == ""


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (
            ["--backends=eager-cup"],
            2,
            "unknown backend 'eager-cup': did you mean 'eager-cpu'?",
        ),
        (
            ["--backends=broken-cpu"],
            4,
            "backend broken-cpu is broken here: it is broken on purpose",
        ),
        (["--backends=eager-cpu", "--require=broken-cpu"], 4, "backend broken-cpu is broken here"),
    ],
)
def test_backends(amp_fuzz: Command, arguments: list[str], code: int, said: str) -> None:
    done = amp_fuzz("run", *arguments)
    assert said in done.error
    assert done.code == code


def test_a_known_list_that_is_wrong(command: Command, tmp_path: Path) -> None:
    (tmp_path / "k.toml").write_text("[[known]]\nid = 'x'\nwhat = 'y'\nwhy = 'z'\nquirks = 'w'\n")
    done = command("run", "--known=k.toml")
    assert done.error.startswith("amp-fuzz: k.toml: ")
    assert "quirks" in done.error
    assert done.code == 2


def test_configuration(command: Command, tmp_path: Path) -> None:
    (tmp_path / "amp-fuzz.toml").write_text("casess = 1\n")
    done = command("list")
    assert done.error.endswith("amp-fuzz.toml: unknown key 'casess': did you mean 'cases'?")
    assert done.code == 2


def test_a_variable(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMP_FUZZ_CASES", "many")
    assert command("list").error == "amp-fuzz: AMP_FUZZ_CASES: 'many' is not a whole number"


# -- case files -----------------------------------------------------------------------------------

CASE = Case(
    Program(
        inputs=(TensorSpec("x0", (2, 3), "float32"),),
        body=(Statement("abs", "function", (Ref("x0"),), outputs=("v0",)),),
        outputs=("v0",),
    )
)


def changed(path: str, value: object) -> str:
    """Return the case with the value at a path (``program.inputs.0.dtype``) changed."""
    case = json.loads(CASE.json())
    place: Any = case
    *parts, last = (int(p) if p.isdigit() else p for p in path.split("."))
    for part in parts:
        place = place[part]
    place[last] = value
    return json.dumps(case)


BAD_CASES = {
    "unknown op": (
        changed("program.body.0.op", "abz"),
        "$.body[0].op='abz' is not in the catalogue",
    ),
    "code as op": (
        changed("program.body.0.op", "__import__('os').system"),
        "$.body[0].op=\"__import__('os').system\" is not in the catalogue",
    ),
    "unknown form": (changed("program.body.0.form", "eval"), "$.body[0].form='eval': abs has func"),
    "code as name": (
        changed("program.body.0.outputs", ["v0;f()"]),
        "$.body[0].outputs[0]='v0;f()' is not a name",
    ),
    "wrong dtype": (
        changed("program.inputs.0.dtype", "float31"),
        "$.inputs[0].dtype='float31' is un",
    ),
    "wrong type": (changed("seed", "7"), "Expected `int`, got `str` - at `$.seed`"),
    "unknown field": (changed("sead", 7), "unknown field `sead`"),
    "truncated": (CASE.json().decode()[:-9], "not JSON, or cut short"),
    "empty": ("", "not JSON, or cut short"),
    "NaN": (changed("seed", float("nan")), "not JSON, or cut short"),
    "no float": (
        changed("program.body.0.kwargs", [["alpha", {"type": "float", "hex": "NaN!"}]]),
        "$.body[0] has float 'NaN!': write it as float.hex() does",
    ),
    "from the future": (changed("version", 99), "$.version=99 was written by a newer amp-fuzz"),
    "a list": ("[]", "Expected `object`, got `array`"),
    "nested too deep": ("[" * 100_000, "not JSON, or cut short"),
}


@pytest.mark.parametrize("what", BAD_CASES)
@pytest.mark.parametrize("name", ["replay", "repro"])
def test_case_files(command: Command, tmp_path: Path, name: str, what: str) -> None:
    text, said = BAD_CASES[what]
    (tmp_path / "case.json").write_text(text)
    done = command(name, "case.json")
    assert done.error.startswith("amp-fuzz: case.json: ")
    assert said in done.error
    assert done.code == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": 3}, "Expected `str`, got `int` - at `$.kind`"),
        ({"case": json.loads(changed("version", 99))}, "case: $.version=99 was written by a newer"),
        (
            {"case": json.loads(changed("program.inputs.0.dtype", "f"))},
            "$.inputs[0].dtype='f' is un",
        ),
        (
            {"minimised": json.loads(changed("program.outputs", []))},
            "minimised: $.outputs is empty",
        ),
        (
            {"minimised": json.loads(changed("program.body.0.op", "abz"))},
            "'abz' is not in the catal",
        ),
    ],
)
def test_findings(command: Command, tmp_path: Path, change: dict[str, object], said: str) -> None:
    finding = dict.fromkeys(
        ("backend", "kind", "where", "op", "policy", "dtypes", "expected", "observed", "known"), ""
    )
    record = finding | {"type": "divergence", "case": json.loads(CASE.json())} | change
    (tmp_path / "finding.json").write_text(json.dumps(record))
    done = command("replay", "finding.json")
    assert done.error.startswith("amp-fuzz: finding.json: ")
    assert said in done.error
    assert done.code == 2


def test_a_case_for_a_backend_that_does_not_exist(amp_fuzz: Command, tmp_path: Path) -> None:
    (tmp_path / "case.json").write_bytes(CASE.json())
    done = amp_fuzz("replay", "case.json", "--backend=eager-cup")
    assert done.error == (
        "amp-fuzz: case.json: unknown backend 'eager-cup': did you mean 'eager-cpu'? "
        "(a device that you have installed is named by --device=cup)"
    )
    assert done.code == 2
    done = amp_fuzz("replay", "case.json", "--backend=broken-cpu")
    assert done.error == (
        "amp-fuzz: case.json: backend broken-cpu is broken here: it is broken on purpose"
    )
    assert done.code == 4


# -- start-up -------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--help"], ["list"]])
def test_what_needs_no_torch_does_not_import_it(arguments: list[str], tmp_path: Path) -> None:
    code = (
        f"import sys; from amp_fuzz.interfaces.cli import main; code = main({arguments}); "
        "print(*sys.modules, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert not {"torch", "numpy", "pandas", "hypothesis"} & set(done.stderr.split())


def test_help_names_every_command_and_exit_code(command: Command) -> None:
    done = command("--help")
    assert done.code == 0
    commands = ("run", "audit", "replay", "repro", "report", "list", "doctor")
    codes = (*(f"{code.value} " for code in Exit), "130 interrupted")
    for word in (*commands, *codes):
        assert f" {word}" in " ".join(done.out.split())


def test_no_command_shows_help_and_is_an_error(command: Command) -> None:
    done = command()
    assert done.code == 2
    assert "Start with: amp-fuzz run" in done.err


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    code = "import sys; from amp_fuzz.interfaces.cli import main; sys.exit(main())"
    done = subprocess.run(
        f'"{sys.executable}" -c "{code}" list ops | head -n 1',
        shell=True,
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout.split() == ["op", "family", "forms"]
    assert done.stderr == ""


def test_an_error_of_ours_asks_to_be_reported(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("amp_fuzz.records.store.Store.runs", fail)
    done = command("list")
    assert done.code == 3
    assert "ZeroDivisionError: a bug" in done.err
    assert done.err.splitlines()[-1].startswith("amp-fuzz 0.1.0: internal error: please report it")
