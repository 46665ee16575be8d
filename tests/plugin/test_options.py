"""The plugin's options are those of the command, and cost nothing until `--amp-fuzz` is given."""

import subprocess
import sys
from pathlib import Path

import pytest

from amp_fuzz import config, pytest_plugin
from amp_fuzz.interfaces.cli.run import run as command

pytest_plugins = ["pytester"]

# Options of the command that have no meaning under pytest, or another name there.
ELSEWHERE = {
    "workers": "xdist's -n",
    "fail-fast": "-x",
    "resume": "none: the same seed again",
    "verbose": "-v",
}

HEAVY = {"torch", "pandas", "numpy", "hypothesis", "click", "rich", "amp_fuzz.config"}


def test_the_options_are_those_of_the_command() -> None:
    hidden = {"shard", "until", "before", "ready"}  # a sweep gives them to its runs
    shown = (param for param in command.params if not getattr(param, "hidden", False))
    taken = {param.opts[-1].removeprefix("--") for param in shown}
    assert {param.opts[-1].removeprefix("--") for param in command.params} == taken | hidden
    assert set(pytest_plugin.OPTIONS) == taken - set(ELSEWHERE) - {"help"}
    assert set(ELSEWHERE) <= {*config.OPTIONS, "resume", "verbose"}


@pytest.mark.parametrize("name", pytest_plugin.OPTIONS)
def test_an_option_says_what_the_command_says(name: str) -> None:
    option = config.OPTIONS[name]
    assert pytest_plugin.OPTIONS[name] == (option.metavar, option.help)


@pytest.mark.thorough
def test_every_option_is_in_the_help(pytester: pytest.Pytester) -> None:
    text = pytester.runpytest_subprocess("--amp-fuzz", "--help").stdout.str()
    for name, (metavar, _) in pytest_plugin.OPTIONS.items():
        assert f"--amp-fuzz-{name}={metavar}" in text
    assert "  --amp-fuzz  " in text


def test_nothing_heavy_is_imported_unless_asked(pytester: pytest.Pytester) -> None:
    """Every run of every project that has amp_fuzz installed pays for what is imported here."""
    pytester.makepyfile("def test_mine(): pass")
    pytester.makeconftest(
        """
        import sys
        def pytest_unconfigure():
            print("loaded:", *sys.modules)
        """
    )
    # Hypothesis has a plugin of its own, which imports all of Hypothesis.
    result = pytester.runpytest_subprocess("--collect-only", "-p", "no:hypothesispytest")
    (line,) = [line for line in result.outlines if line.startswith("loaded:")]
    loaded = set(line.split())
    assert "amp_fuzz.pytest_plugin" in loaded
    assert loaded & HEAVY == set()


@pytest.mark.thorough
def test_a_heavy_import_would_be_seen() -> None:
    code = "import sys, amp_fuzz.interfaces.plugin.session; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"torch", "amp_fuzz.config"} <= set(done.stdout.split())


def test_options_without_the_flag_are_said_to_do_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_mine(): pass")
    result = pytester.runpytest_subprocess("--amp-fuzz-cases=3")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["amp-fuzz: off, --amp-fuzz-cases has no effect: add --amp-fuzz"])


@pytest.mark.thorough
@pytest.mark.usefixtures("forking")
def test_a_store_at_a_url_is_refused_in_one_line(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_mine(amp_check): amp_check(abs, -1.0)")
    for words in (["--amp-fuzz"], []):
        result = pytester.runpytest_subprocess(*words, "--amp-fuzz-store=s3://bucket/runs")
        assert result.ret != 0
        text = result.stdout.str() + result.stderr.str()
        assert "amp-fuzz: store: s3://bucket/runs: " in text
        assert "needs a folder" in text
    assert not (pytester.path / "s3:").exists()


@pytest.mark.thorough
def test_the_marker_is_known(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_mine(): pass")
    result = pytester.runpytest_subprocess("--strict-markers", "-m", "not amp_fuzz")
    result.assert_outcomes(passed=1)
    assert not Path(".amp-fuzz").exists()
