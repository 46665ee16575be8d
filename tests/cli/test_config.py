"""Options: one place that says what they are, and the order in which values are looked for."""

import dataclasses
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path

import pytest

from amp_fuzz.config import NOTE_KINDS, OPTIONS, ConfigError, Options, find_config, resolve
from amp_fuzz.profiles import PROFILES


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(text: str, name: str = "amp-fuzz.toml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def options(start: Path, explicit: dict[str, object] | None = None, **environ: str) -> Options:
    return resolve(explicit, environ=environ, start=start).options


def refused(start: Path, explicit: dict[str, object] | None = None, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(explicit, environ=environ, start=start)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- the table of options -------------------------------------------------------------------------


def test_each_field_has_an_option_of_its_type_and_the_other_way_round() -> None:
    types = typing.get_type_hints(Options)
    kinds = {
        "integer": int,
        "number": float,
        "flag": bool,
        "word": str,
        "choice": str,
        "path": Path,
        "list": tuple[str, ...],
        "paths": tuple[Path, ...],
        "place": Path | str,
    }
    assert [o.field for o in OPTIONS.values()] == [f.name for f in dataclasses.fields(Options)]
    for name, option in OPTIONS.items():
        assert option.name == name
        assert types[option.field] in (kinds[option.kind], kinds[option.kind] | None)
        assert option.help.endswith(".")
        assert option.help[0].isupper()


def test_defaults_are_those_of_the_default_profile(tmp_path: Path) -> None:
    for name, value in PROFILES["dev"].items():
        assert OPTIONS[name].default == value
    assert options(tmp_path) == Options()


def test_a_profile_holds_values_that_its_options_take() -> None:
    for profile in PROFILES.values():
        assert set(profile) == set(PROFILES["dev"])
        for name, value in profile.items():
            assert OPTIONS[name].convert(value, Path()) == value


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("cases", "12", 12),
        ("seconds", "1.5", 1.5),
        ("fail-fast", "yes", True),
        ("fail-fast", "0", False),
        ("relations", "all", "all"),
        ("ops", "conv*, losses", ("conv*", "losses")),
        ("store", "here", Path("here")),
        ("store", "s3://bucket/here", "s3://bucket/here"),
        ("known", "a.toml", (Path("a.toml"),)),
    ],
)
def test_texts_become_values(name: str, text: str, value: object) -> None:
    assert OPTIONS[name].parse(text) == value


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("cases", "x", "'x' is not a whole number"),
        ("cases", "1.5", "'1.5' is not a whole number"),
        ("cases", "0", "0 is too small: use 1 or more"),
        ("cases", "-3", "-3 is too small: use 1 or more"),
        ("aimed", "101", "101 is too large: use 100 or less"),
        ("aimed", "-1", "-1 is too small: use 0 or more"),
        ("seconds", "nan", "nan is not finite"),
        ("seconds", "inf", "inf is not finite"),
        ("seconds", "-1", "-1.0 is too small: use 0 or more"),
        ("fail-fast", "maybe", "'maybe' is neither yes nor no"),
        ("relations", "al", "'al' is not a valid value: did you mean 'all'?"),
        ("relations", "???", "'???' is not a valid value: use none, one, all"),
        ("ops", "a,,b", "an item of the list is empty"),
        ("ops", "", "an item of the list is empty"),
        ("store", "", "'' is not a path"),
        ("store", "~no-such-user/x", "'~no-such-user/x' is not a path: no such home folder"),
        ("profile", "", "the value is empty"),
    ],
)
def test_texts_that_do_not_fit_are_refused(name: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OPTIONS[name].parse(text)
    assert str(caught.value) == said


def test_the_module_imports_nothing_slow() -> None:
    code = "import sys, amp_fuzz.config; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    slow = {"torch", "numpy", "hypothesis", "pandas", "click", "rich", "msgspec"}
    assert not slow & set(done.stdout.split())


# -- precedence -----------------------------------------------------------------------------------


def test_command_line_beats_environment_beats_profile_beats_table_beats_default(
    tmp_path: Path, write: Callable[..., Path]
) -> None:
    file = write("cases = 3\nworkers = 3\nseconds = 3\nmax-statements = 3\n[profile.ci]\ncases = 4")
    found = resolve(
        {"cases": 1, "profile": "ci"},
        environ={"AMP_FUZZ_CASES": "2", "AMP_FUZZ_WORKERS": "2"},
        start=tmp_path,
    )
    assert (found.options.cases, found.sources["cases"]) == (1, "--cases")
    assert (found.options.workers, found.sources["workers"]) == (2, "AMP_FUZZ_WORKERS")
    assert found.sources["profile"] == "--profile"
    assert found.sources["seed"] == "default"
    assert found.files == (file,)
    # Of a chosen profile, the built-in part outranks the table, and its table in the file both.
    assert (found.options.max_statements, found.sources["max-statements"]) == (12, "profile ci")
    without = resolve({"profile": "ci"}, environ={}, start=tmp_path)
    assert without.options.cases == 4
    assert without.sources["cases"] == f"profile ci in {file}"


def test_a_profile_that_nobody_chose_does_not_outrank_the_table(
    tmp_path: Path, write: Callable[..., Path]
) -> None:
    write("cases = 3")
    assert options(tmp_path).cases == 3
    assert options(tmp_path, {"profile": "dev"}).cases == PROFILES["dev"]["cases"]
    assert options(tmp_path, AMP_FUZZ_PROFILE="nightly").cases == PROFILES["nightly"]["cases"]


def test_the_table_of_the_default_profile_counts_without_being_chosen(
    tmp_path: Path, write: Callable[..., Path]
) -> None:
    write("cases = 3\n[profile.dev]\ncases = 4")
    assert options(tmp_path).cases == 4


def test_a_file_may_define_profiles_of_its_own(tmp_path: Path, write: Callable[..., Path]) -> None:
    write('[profile.gpu]\nbackends = ["eager-cuda"]\ncases = 5')
    found = options(tmp_path, {"profile": "gpu"})
    assert (found.backends, found.cases, found.profile) == (("eager-cuda",), 5, "gpu")


def test_a_file_may_choose_the_profile(tmp_path: Path, write: Callable[..., Path]) -> None:
    write('profile = "ci"')
    assert options(tmp_path).cases == PROFILES["ci"]["cases"]


def test_none_and_an_empty_variable_count_as_not_given(tmp_path: Path) -> None:
    assert options(tmp_path, {"cases": None}, AMP_FUZZ_CASES="") == Options()


# -- files ----------------------------------------------------------------------------------------


def test_the_nearest_file_above_counts(tmp_path: Path, write: Callable[..., Path]) -> None:
    write("cases = 1")
    near = write("[tool.amp-fuzz]\ncases = 2", "a/pyproject.toml")
    write("[tool.other]\ncases = 3", "a/b/pyproject.toml")
    deep = tmp_path / "a" / "b" / "c"
    deep.mkdir()
    assert find_config(deep) == near
    assert options(deep).cases == 2


def test_paths_are_relative_to_the_file_that_holds_them(
    tmp_path: Path, write: Callable[..., Path]
) -> None:
    write('store = "s"\nreport = "/r"\nknown = ["k.toml"]')
    inner = tmp_path / "inner"
    inner.mkdir()
    found = options(inner)
    assert (found.store, found.report) == (tmp_path / "s", Path("/r"))
    assert found.known == (tmp_path / "k.toml",)
    assert options(inner, AMP_FUZZ_STORE="t").store == Path("t")
    write('store = "gs://bucket/s"')
    assert options(inner).store == "gs://bucket/s"


def test_several_known_lists_in_a_variable(tmp_path: Path) -> None:
    assert options(tmp_path, AMP_FUZZ_KNOWN="a.toml:b.toml").known == (
        Path("a.toml"),
        Path("b.toml"),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("casess = 1", "unknown key 'casess': did you mean 'cases'?"),
        ("max_statements = 1", "unknown key 'max_statements': did you mean 'max-statements'?"),
        ("[profile.ci]\ncasess = 1", "unknown key 'profile.ci.casess': did you mean 'cases'?"),
        ("[profile.ci]\nprofile = 'dev'", "unknown key 'profile.ci.profile'"),
        ("cases = '1'", "cases: '1' is a string: write a whole number, as in 200"),
        ("cases = true", "cases: True is a boolean: write a whole number, as in 200"),
        ("cases = 0", "cases: 0 is too small: use 1 or more"),
        ("seconds = nan", "seconds: nan is not finite"),
        ("fail-fast = 1", "fail-fast: 1 is a whole number: write true or false"),
        ("ops = 'conv*'", "ops: 'conv*' is a string: write a list of strings"),
        ("ops = [1]", "ops: [1] is a list: write a list of strings"),
        ("ops = []", "ops: an item of the list is empty"),
        ("seed = 2026-01-01", "seed: datetime.date(2026, 1, 1) is a date: write a whole number"),
        ("relations = 'al'", "relations: 'al' is not a valid value: did you mean 'all'?"),
        ("profile = 'cii'", "unknown profile 'cii': did you mean 'ci'?"),
        ("profile.ci = 1", "profile.ci=1 is a whole number: write a table"),
        ("cases =\n", "not TOML: Invalid value (at line 1, column 8)"),
    ],
)
def test_invalid_values_in_a_file(
    tmp_path: Path, write: Callable[..., Path], text: str, said: str
) -> None:
    file = write(text)
    message = refused(tmp_path)
    assert message.startswith(str(file))
    assert said in message


def test_one_folder_has_one_configuration(tmp_path: Path, write: Callable[..., Path]) -> None:
    write("cases = 1")
    write("[tool.amp-fuzz]\ncases = 2", "pyproject.toml")
    assert "keep one of them" in refused(tmp_path)


def test_a_file_that_is_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / "amp-fuzz.toml").write_bytes(b"\xff\xfe")
    assert "not TOML" in refused(tmp_path)


# -- variables ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        (
            "AMP_FUZZ_CASE",
            "1",
            "no option uses this environment variable: did you mean 'AMP_FUZZ_CAS",
        ),
        ("AMP_FUZZ_CASES", "x", "'x' is not a whole number"),
        ("AMP_FUZZ_PROFILE", "cii", "unknown profile 'cii': did you mean 'ci'?"),
        ("AMP_FUZZ_FAIL_FAST", "x", "'x' is neither yes nor no"),
    ],
)
def test_invalid_values_in_a_variable(tmp_path: Path, variable: str, text: str, said: str) -> None:
    assert refused(tmp_path, **{variable: text}).startswith(f"{variable}: {said}")


def test_the_kinds_of_notes_are_those_of_the_records() -> None:
    from amp_fuzz.records import schema as records

    assert NOTE_KINDS == records.NOTE_KINDS
