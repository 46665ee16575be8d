"""What `pytest --amp-fuzz` collects, and what it refuses. Nothing is run here.

These sessions run in this process: torch is imported once.
"""

from pathlib import Path

import pytest

import amp_fuzz.interfaces.plugin.session  # noqa: F401  (before pytester takes stock of sys.modules)
from amp_fuzz.backends import choose

pytest_plugins = ["pytester"]


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Make a project with two tests of its own."""
    monkeypatch.delenv("AMP_FUZZ_SEED", raising=False)
    pytester.mkdir("tests")
    Path("tests/test_mine.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    return pytester


def collected(result: pytest.RunResult) -> list[str]:
    return [line for line in result.outlines if "::" in line]


def collect(project: pytest.Pytester, *args: str) -> list[str]:
    result = project.runpytest_inprocess("--amp-fuzz", "--collect-only", "-q", *args)
    assert result.ret == 0, result.stdout.str()
    return collected(result)


def test_one_item_for_each_backend_and_family_beside_the_projects_tests(
    project: pytest.Pytester,
) -> None:
    args = ("--amp-fuzz-ops=mm,relu", "--amp-fuzz-backends=eager-cpu,fake-cuda")
    assert collect(project, *args) == [
        "tests/test_mine.py::test_one",
        "tests/test_mine.py::test_two",
        "amp-fuzz::eager-cpu::coverage",
        "amp-fuzz::fake-cuda::coverage",
        "amp-fuzz::eager-cpu::activation",
        "amp-fuzz::eager-cpu::matmul",
        "amp-fuzz::fake-cuda::activation",
        "amp-fuzz::fake-cuda::matmul",
    ]


def test_by_default_every_backend_is_there_ready_or_not(project: pytest.Pytester) -> None:
    found = collect(project, "--amp-fuzz-ops=mm")
    ready = [backend.name for backend in choose(["eager-*", "fake-*"])]
    assert [i for i in found if i.endswith("::matmul")] == [
        f"amp-fuzz::{name}::matmul" for name in ready
    ]
    assert any(i.endswith("::availability") for i in found)


def test_collecting_writes_nothing(project: pytest.Pytester) -> None:
    collect(project, "--amp-fuzz-ops=mm")
    assert sorted(p.name for p in Path().iterdir() if "amp-fuzz" in p.name) == []


def test_the_count_that_pytest_prints_is_right(project: pytest.Pytester) -> None:
    args = ("--amp-fuzz", "--collect-only", "--amp-fuzz-ops=mm", "--amp-fuzz-backends=eager-cpu")
    result = project.runpytest_inprocess(*args, "-k", "matmul")
    result.stdout.fnmatch_lines(["collected 4 items / 3 deselected / 1 selected"])


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["-k", "matmul"], ["amp-fuzz::eager-cpu::matmul"]),
        (["-m", "not amp_fuzz"], ["tests/test_mine.py::test_one", "tests/test_mine.py::test_two"]),
        (["-m", "amp_fuzz", "-k", "not coverage"], ["amp-fuzz::eager-cpu::matmul"]),
        # The ids that pytest prints are good for its command line.
        (["amp-fuzz::eager-cpu::matmul"], ["amp-fuzz::eager-cpu::matmul"]),
        (
            ["amp-fuzz::eager-cpu"],
            ["amp-fuzz::eager-cpu::coverage", "amp-fuzz::eager-cpu::matmul"],
        ),
        (
            ["tests/test_mine.py::test_two", "amp-fuzz::eager-cpu::coverage"],
            ["tests/test_mine.py::test_two", "amp-fuzz::eager-cpu::coverage"],
        ),
    ],
)
def test_items_are_chosen_as_others_are(
    project: pytest.Pytester, args: list[str], expected: list[str]
) -> None:
    options = ("--amp-fuzz-ops=mm", "--amp-fuzz-backends=eager-cpu")
    assert collect(project, *options, *args) == expected


@pytest.mark.parametrize(
    "args",
    [
        ["--amp-fuzz", "tests/test_mine.py::test_one"],
        ["--amp-fuzz", "--amp-fuzz-ops=mm", "tests/test_mine.py::test_one"],
        ["--amp-fuzz", "--amp-fuzz-ops", "mm", "tests/test_mine.py::test_one"],
    ],
)
def test_no_option_swallows_a_path(project: pytest.Pytester, args: list[str]) -> None:
    result = project.runpytest_inprocess(*args, "--collect-only", "-q", "-m", "not amp_fuzz")
    assert collected(result) == ["tests/test_mine.py::test_one"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ["--amp-fuzz-backends=eager-cpuu"],
            "unknown backend 'eager-cpuu': did you mean 'eager-cpu'? (name an *",
        ),
        (["--amp-fuzz-ops=matmull"], "no op or family matches 'matmull': did you mean 'matmul'?"),
        (["--amp-fuzz-cases=some"], "--amp-fuzz-cases: 'some' is not a whole number"),
        (["--amp-fuzz-cases=0"], "--amp-fuzz-cases: 0 is too small: use 1 or more"),
        (["--amp-fuzz-relations=al"], "--amp-fuzz-relations: 'al' is not a valid value*"),
        (["--amp-fuzz-profile=cl"], "--amp-fuzz-profile: unknown profile 'cl'*"),
        (["--amp-fuzz-known=nowhere.toml"], "nowhere.toml: No such file or directory"),
        (["--amp-fuzz-report=a_file"], "--amp-fuzz-report: a_file is a file: give a folder"),
        (
            ["--amp-fuzz-store=a_file"],
            "*a_file: cannot make the store (Not a directory): give another with --amp-fuzz-store",
        ),
        (
            ["--amp-fuzz-ops=mm", "amp-fuzz::eager-cpu::matmull"],
            "unknown item 'amp-fuzz::eager-cpu::matmull': did you mean '*::matmul'?",
        ),
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_4(
    project: pytest.Pytester, args: list[str], said: str
) -> None:
    Path("a_file").touch()
    result = project.runpytest_inprocess("--amp-fuzz", *args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: amp-fuzz: {said.replace('[', '[[]')}"])
    assert "Traceback" not in result.stderr.str() + result.stdout.str()


def test_an_option_without_a_value_is_refused(project: pytest.Pytester) -> None:
    result = project.runpytest_inprocess("--amp-fuzz", "--amp-fuzz-cases")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*error: argument --amp-fuzz-cases: expected one argument"])


def test_a_backend_that_is_named_must_be_here(project: pytest.Pytester) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("has CUDA")
    result = project.runpytest_inprocess("--amp-fuzz", "--amp-fuzz-backends=eager-cuda")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: amp-fuzz: backend eager-cuda is missing here: *"])


def test_options_come_from_the_projects_configuration_too(project: pytest.Pytester) -> None:
    project.makepyprojecttoml('[tool.amp-fuzz]\nops = ["mm"]\nbackends = ["eager-cpu"]\n')
    assert collect(project, "-m", "amp_fuzz") == [
        "amp-fuzz::eager-cpu::coverage",
        "amp-fuzz::eager-cpu::matmul",
    ]
