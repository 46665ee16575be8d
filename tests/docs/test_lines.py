"""Every line of the README and of the guide does what it says."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from amp_fuzz.config import OPTIONS
from amp_fuzz.interfaces.cli import _commands, main
from amp_fuzz.pytest_plugin import pytest_addoption
from tests.docs.blocks import OURS, PAGES, ROOT, WITH_PYTHON, Block, blocks, commands, program
from tests.forks import Done, forked
from tests.unit.test_reports import small_run, store_of

README = ROOT / "README.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SLOW = ("your-model", "jax")  # the README has a part of the first
SMALL = {"BACKENDS": "eager-cpu", "CASES": "20", "AIMED": "0", "WORKERS": "1"}


def each(keep: Callable[[Block], bool]) -> list[object]:
    """Return the blocks of all pages that are kept, as parameters named after page and line."""
    return [
        pytest.param(block, id=f"{page.stem}:{block.line}")
        for page in PAGES
        for block in blocks(page)
        if keep(block)
    ]


# -- Python ---------------------------------------------------------------------------------------


def executed(arguments: list[str]) -> int:
    """Run the Python of a page, under its name and with its lines."""
    page = Path(arguments[0])
    exec(compile(program(page), str(page), "exec"), {"__name__": "page"})
    return 0


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Done]:
    def run(entry: Callable[[list[str]], int], *arguments: str) -> Done:
        (tmp_path / "empty").mkdir(exist_ok=True)
        small = {f"AMP_FUZZ_{name}": value for name, value in SMALL.items()}
        environment = {**os.environ, **small, "PYTHONPATH": str(ROOT)}
        return forked(
            entry, arguments, folder=tmp_path / "empty", environment=environment, files=tmp_path
        )

    return run


def marks(page: Path) -> list[pytest.MarkDecorator]:
    """Return the tier of a page: `make test` runs the README."""
    if page.stem in SLOW:
        return [pytest.mark.slow]
    return [] if page.stem == "README" else [pytest.mark.thorough]


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=marks(page)) for page in WITH_PYTHON],
)
def test_the_python_of_a_page_runs(run: Callable[..., Done], page: Path, tmp_path: Path) -> None:
    store_of(tmp_path / "empty", small_run())  # as after a first run
    done = run(executed, str(page))
    assert done.code == 0, done.err


def test_a_wrong_line_of_python_is_noticed(run: Callable[..., Done], tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(
        "text\n```python\nimport amp_fuzz\namp_fuzz.no_such_name\n```\n"
    )
    done = run(executed, str(tmp_path / "page.md"))
    assert done.code != 0
    assert 'page.md", line 4' in done.err


def test_the_first_snippet_prints_what_the_readme_says(run: Callable[..., Done]) -> None:
    snippet, printed, *_ = blocks(README)
    assert sum(bool(line.strip()) for line in snippet.text.splitlines()) <= 10
    assert run(_snippet).out == printed.text


def _snippet(_: list[str]) -> int:
    exec(next(blocks(README)).text, {})
    return 0


# -- commands -------------------------------------------------------------------------------------


class Declared:
    """Takes the place of pytest's parser, and keeps the names of the options."""

    def __init__(self) -> None:
        self.names = {"-n", "-m", "-k", "-x"}
        pytest_addoption(self)  # type: ignore[arg-type]

    def getgroup(self, *_: str) -> Declared:
        return self

    def addoption(self, name: str, **_: object) -> None:
        self.names.add(name)

    def addini(self, *_: object, **__: object) -> None:
        pass


def amp_fuzz(words: list[str]) -> None:
    """Parse the words of a command, as the command does."""
    command: click.Command = _commands
    while isinstance(command, click.Group) and words:
        command = command.commands[words.pop(0)]
    context = click.Context(command)
    _, given, _ = command.make_parser(context).parse_args(list(words))
    arguments = [p for p in given if p is not None]
    assert arguments is not None


def pytest_(words: list[str]) -> None:
    """Hold each option against those that the plugin declares."""
    known = Declared().names
    for word in words:
        if word.startswith("-"):
            assert word.partition("=")[0] in known


def make(words: list[str]) -> None:
    """Hold each target against the Makefile, and each variable."""
    text = (ROOT / "Makefile").read_text()
    for word in words:
        name, is_variable, _ = word.partition("=")
        pattern = rf"^{name} +\?=" if is_variable else rf"^{name}:"
        assert re.search(pattern, text, re.M) or name == "PYTHON", word


def pip(words: list[str]) -> None:
    """Hold each extra of ours against pyproject.toml."""
    for extra in re.findall(r"amp-fuzz\[([\w,]+)\]", " ".join(words)):
        assert extra in PROJECT["optional-dependencies"]


ASKED = dict(zip(OURS, (amp_fuzz, pytest_, make, pip), strict=True))


@pytest.mark.parametrize("block", each(lambda block: block.is_shell))
def test_a_command_is_one_that_exists(block: Block) -> None:
    for name, *words in commands(block):
        if name in ASKED:
            ASKED[name](words)


@pytest.mark.parametrize(
    "line",
    [
        "amp-fuzz run --backend=eager-cpu",
        "amp-fuzz walk",
        "pytest --amp-fuzz-cases-of=3",
        "make bread",
        "make gpu DEVISE=npu",
        "pip install 'amp-fuzz[gold]'",
    ],
)
def test_a_wrong_command_is_noticed(line: str) -> None:
    block = Block("", line, 1, None)
    assert block.is_shell
    with pytest.raises((KeyError, AssertionError, click.ClickException)):
        test_a_command_is_one_that_exists(block)


def test_amp_fuzz_run_runs_as_the_readme_writes_it(run: Callable[..., Done]) -> None:
    done = run(main, "run")
    assert done.code in (0, 1), done.err  # 1: it found something, which is not this test's matter
    assert "eager-cpu" in done.out


def test_the_finding_of_the_readme_is_what_explain_prints(run: Callable[..., Done]) -> None:
    case = ROOT / "docs" / "findings" / "issue-cache-ignores-dtype.json"
    printed = run(main, "explain", str(case)).out
    for page in (README, ROOT / "docs" / "guide" / "first-run.md"):
        (shown,) = (b.text for b in blocks(page) if b.text.startswith("# under autocast"))
        for part in shown.split("\n\n"):
            assert part.rstrip("\n") in printed


# -- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", each(lambda block: block.language == "toml"))
def test_a_toml_block_can_be_read(block: Block) -> None:
    table = tomllib.loads(block.text).get("tool", {}).get("amp-fuzz", {})
    assert set(table) <= {*OPTIONS, "profiles"}


@pytest.mark.parametrize("block", each(lambda block: block.why is not None))
def test_a_block_that_does_not_run_is_python_at_least(block: Block) -> None:
    compile(block.text, f"line {block.line}", "exec")


def test_few_blocks_are_not_run() -> None:
    assert sum(block.why is not None for page in PAGES for block in blocks(page)) <= 5


def test_each_block_has_a_language_that_is_asked_about() -> None:
    assert {b.language for page in PAGES for b in blocks(page)} <= {"", "python", "toml"} | SHOWN


SHOWN = {"{toctree}", "dockerfile"}


# -- links ----------------------------------------------------------------------------------------


def test_each_page_links_to_files_that_exist() -> None:
    pages = [p for p in (ROOT / "docs").rglob("*.md") if "node_modules" not in p.parts]
    pages += [README, ROOT / "CONTRIBUTING.md"]
    gone = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages
        for link in links(page)
        if not (page.parent / link.partition("#")[0]).exists()
    ]
    assert gone == []


def test_the_readme_links_to_places_that_exist() -> None:
    found = links(README)
    assert found
    for path, _, anchor in (link.partition("#") for link in found):
        assert not anchor or f'<a id="{anchor}">' in (ROOT / path).read_text(), path


def links(page: Path) -> list[str]:
    """Return the links of a page to files and to its own places."""
    text = re.sub(r"(?ms)^```.*?^```$|`[^`]*`", "", page.read_text())
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"\w+:", link)]


def test_the_readme_fits_a_screen() -> None:
    assert len(README.read_text().split()) <= 900
