"""``amp-fuzz baseline``, and real runs with one: what is known passes, what is new fails."""

from __future__ import annotations

import datetime
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from amp_fuzz.interfaces.cli import main
from amp_fuzz.records.schema import CaseRecord
from amp_fuzz.records.store import Store
from tests.forks import Done, forked

RUN = (
    *("run", "--backends=moody-cpu", "--ops=abs,neg", "--cases=12", "--seed=1"),
    *("--workers=1", "--relations=none", "--minimize=5"),
)
# For what a few cases show as well; the case that was found first is judged in any run.
FEW = (*RUN, "--cases=4")
FILE = "amp-fuzz-baseline.toml"
Command = Callable[..., Done]


@pytest.fixture
def moods(tmp_path: Path) -> Callable[..., None]:
    """Say what is wrong with the backend: ``abs="dtype"``."""

    def say(**ops: str) -> None:
        lines = [f"{op} {mood}\n" for op, mood in ops.items()]
        (tmp_path / "moods.txt").write_text("".join(lines))

    say()
    return say


@pytest.fixture(scope="module")
def first(installed: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fuzz once for all tests, where abs returns another dtype; return the folder."""
    folder, files = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("outputs")
    (folder / "moods.txt").write_text("abs dtype\n")
    done = forked(main, RUN, folder=folder, environment=installed, files=files)
    assert done.code == 1
    return folder


@pytest.fixture
def found(first: Path, tmp_path: Path, moods: Callable[..., None]) -> None:
    """Start from a folder where a run has found that abs returns another dtype."""
    shutil.copytree(first, tmp_path, dirs_exist_ok=True)


def accepted(amp_fuzz: Command, *more: str) -> Done:
    """Take what was found into the baseline."""
    done = amp_fuzz("baseline", "update", "--reason=waits for upstream", *more)
    assert (done.code, done.err) == (0, "")
    return done


def entries(folder: Path, name: str = FILE) -> list[dict[str, object]]:
    found: list[dict[str, object]] = tomllib.loads((folder / name).read_text())["finding"]
    return found


@pytest.mark.thorough
def test_an_accepted_finding_passes(amp_fuzz: Command, found: None, tmp_path: Path) -> None:
    accepted(amp_fuzz)
    done = amp_fuzz(*RUN, "-v")
    assert (done.code, done.err) == (0, "")
    assert f"baseline {FILE}: 1 known finding" in done.out
    assert "baseline: 1 entry (1 there)" in done.out
    (entry,) = entries(tmp_path)
    assert f"  {entry['id']}: " in done.out  # among the known findings, with its cases
    assert "in the project's baseline: dtype at " in done.out
    store = Store(tmp_path / ".amp-fuzz")
    judged = store.records(store.runs()[-1])
    known = [r for r in judged if isinstance(r, CaseRecord) and r.outcome == "known"]
    assert {r.known for r in known} == {entry["id"]}
    assert len(known) > 2


LISTING = """
from pathlib import Path
from amp_fuzz.records.baseline import read
from amp_fuzz.runs import setup
setup.open_findings = lambda: read(Path("open.toml"))
"""


def test_an_open_finding_of_the_package_passes_and_is_told_as_not_explained(
    amp_fuzz: Command, found: None, tmp_path: Path
) -> None:
    accepted(amp_fuzz)
    file = (tmp_path / FILE).rename(tmp_path / "open.toml")
    (entry,) = entries(tmp_path, file.name)
    file.write_text(file.read_text().replace(f'id = "{entry["id"]}"', 'id = "open-abs"'))
    (tmp_path / "listing.py").write_text(LISTING)
    done = amp_fuzz(*FEW, "-v", "--plugins=listing")
    assert (done.code, done.err) == (0, "")
    assert "baseline" not in done.out
    said = " ".join(done.out.split())
    assert "1 known finding covers them all, which nobody has explained" in said
    told = r"(\d+) cases, \1 not explained open-abs: \1 cases \(moody-cpu \1\) waits for upstream"
    assert re.search(told, said), said
    file.write_text("")
    assert amp_fuzz(*FEW, "--plugins=listing").code == 1  # the list is all that keeps it quiet


@pytest.mark.thorough
def test_a_new_one_fails_though_another_of_the_op_is_known(
    amp_fuzz: Command, found: None, moods: Command
) -> None:
    accepted(amp_fuzz)
    moods(abs="value")
    done = amp_fuzz(*RUN)
    assert done.code == 1
    assert "new: bitwise at abs on moody-cpu" in done.out
    assert "changed: the case of " in done.out


@pytest.mark.thorough
def test_a_new_one_in_the_same_cases_fails(amp_fuzz: Command, found: None, moods: Command) -> None:
    accepted(amp_fuzz)
    moods(abs="dtype", neg="dtype")
    done = amp_fuzz(*RUN)
    assert done.code == 1
    assert "new: dtype at neg on moody-cpu" in done.out
    assert "dtype at abs" not in done.out.partition("new findings: ")[2]
    assert "baseline: 1 entry (1 there)" in done.out


@pytest.mark.thorough
def test_a_fixed_entry_is_reported(
    amp_fuzz: Command, found: None, moods: Command, tmp_path: Path
) -> None:
    accepted(amp_fuzz)
    (entry,) = entries(tmp_path)
    moods()
    done = amp_fuzz(*RUN)
    assert done.code == 0
    words = f"fixed: {entry['id']} on moody-cpu no longer happens: remove it"
    assert words in " ".join(done.out.split())
    checked = amp_fuzz("baseline", "check")
    assert checked.code == 1
    assert f"  {entry['id']} on moody-cpu: FIXED: remove it\n" in checked.out
    assert amp_fuzz("baseline", "prune", "--dry-run").out.startswith("would remove")
    assert len(entries(tmp_path)) == 1
    pruned = amp_fuzz("baseline", "prune")
    assert pruned.code == 0
    assert f"removed {entry['id']}: fixed\n" in pruned.out
    assert "finding" not in tomllib.loads((tmp_path / FILE).read_text())
    assert amp_fuzz("baseline", "check").out == f"{FILE}: no findings\n"


@pytest.mark.thorough
def test_an_expired_entry_fails(
    amp_fuzz: Command, found: None, moods: Command, tmp_path: Path
) -> None:
    today = datetime.datetime.now(datetime.UTC).date()
    accepted(amp_fuzz, f"--expires={today}")
    assert amp_fuzz(*FEW).code == 0
    path = tmp_path / FILE
    late = today - datetime.timedelta(days=1)
    path.write_text(path.read_text().replace(f"expires = {today}", f"expires = {late}"))
    done = amp_fuzz(*FEW)
    assert done.code == 1
    assert "1 known finding, 1 of them EXPIRED" in done.out
    assert "EXPIRED: 1 entry of the baseline." in " ".join(done.out.split())
    assert f"was accepted until {late}" in " ".join(done.out.split())
    checked = amp_fuzz("baseline", "check")
    assert checked.code == 1
    assert f"EXPIRED on {late}, still there" in checked.out
    moods()
    assert amp_fuzz(*FEW).code == 1  # until somebody looks at it


@pytest.mark.thorough
def test_a_nondeterministic_finding_can_be_accepted(amp_fuzz: Command, moods: Command) -> None:
    moods(abs="coin")
    assert amp_fuzz(*RUN).code == 1
    done = accepted(amp_fuzz)
    assert "added abs-nondeterminism-moody-cpu: nondeterminism at abs on moody-cpu" in done.out
    assert amp_fuzz(*RUN).code == 0
    assert amp_fuzz("baseline", "check").code == 0
    moods()
    checked = amp_fuzz("baseline", "check")
    assert checked.code == 0
    assert "not seen in 10 runs: it may be nondeterministic" in checked.out
    assert "nothing to remove" in amp_fuzz("baseline", "prune").out


@pytest.mark.thorough
def test_a_crash_is_known_of_its_own_case_only(amp_fuzz: Command) -> None:
    crashing = ("run", "--backends=dying-cpu", "--ops=abs", "--workers=1", "--seed=1")
    assert amp_fuzz(*crashing, "--cases=1").code == 1
    assert amp_fuzz("baseline", "update", "--reason=known").code == 0
    assert amp_fuzz(*crashing, "--cases=1").code == 0
    assert amp_fuzz(*crashing, "--cases=2").code == 1
    assert "still there" in amp_fuzz("baseline", "check").out


@pytest.mark.thorough
def test_update_adds_and_leaves_the_rest(
    amp_fuzz: Command, found: None, moods: Command, tmp_path: Path
) -> None:
    accepted(amp_fuzz, "--link=https://example.org/1")
    path = tmp_path / FILE
    path.write_text(path.read_text() + "# a thought of mine\n")
    again = amp_fuzz("baseline", "update", "--reason=again")
    assert again.code == 0
    assert "is already in the baseline, as " in again.out
    assert f"{FILE}: nothing to add\n" in again.out
    before = path.read_text()
    moods(neg="value")
    assert amp_fuzz(*RUN).code == 1
    assert amp_fuzz("baseline", "update", "--reason=more").code == 0
    assert path.read_text().startswith(before.rstrip("\n"))
    first, second = entries(tmp_path)
    assert (first["reason"], first["link"]) == ("waits for upstream", "https://example.org/1")
    assert second["title"] == "bitwise at neg"


def test_a_reason_is_asked_for(amp_fuzz: Command, found: None) -> None:
    done = amp_fuzz("baseline", "update")
    assert done.code == 2
    assert done.error.endswith(
        "no reason: say why it is accepted: "
        "amp-fuzz baseline update --reason='waits for pytorch#...'"
    )


@pytest.mark.thorough
def test_an_entry_that_cannot_run_here_says_why(
    amp_fuzz: Command, found: None, tmp_path: Path
) -> None:
    accepted(amp_fuzz, "--torch=>=99")
    checked = amp_fuzz("baseline", "check")
    assert checked.code == 5
    assert "cannot run here: it is of torch >=99, here is 2." in checked.out
    assert "kept " in amp_fuzz("baseline", "prune").out
    assert amp_fuzz(*FEW).code == 1  # it says nothing of this torch
    path = tmp_path / FILE
    path.write_text(path.read_text().replace(">=99", ""))
    assert amp_fuzz(*FEW).code == 0


@pytest.mark.thorough
def test_a_baseline_is_found_from_below_and_by_option(
    amp_fuzz: Command, found: None, tmp_path: Path
) -> None:
    accepted(amp_fuzz)
    below = tmp_path / "below"
    below.mkdir()
    (below / "moods.txt").write_text("abs dtype\n")
    assert amp_fuzz(*FEW, cwd=below).code == 0
    (tmp_path / FILE).rename(below / "mine.toml")
    assert amp_fuzz(*FEW, cwd=below).code == 1
    assert amp_fuzz(*FEW, "--baseline=mine.toml", cwd=below).code == 0
    (below / "amp-fuzz.toml").write_text('baseline = "mine.toml"\n')
    assert amp_fuzz(*FEW, cwd=below).code == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("finding = 3", "amp-fuzz-baseline.toml: Expected `array`, got `int` - at `$.finding`"),
        ("[[finding]]\nid = 'a'", "missing required field `fingerprint`"),
        ("not toml", "amp-fuzz-baseline.toml: Expected"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(
    command: Command, tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / FILE).write_text(text)
    for words in (("baseline", "check"), ("baseline", "prune"), ("baseline", "update")):
        done = command(*words)
        assert done.code == 2
        assert said in done.error or words[1] == "update"


def test_no_file_is_one_line_and_so_is_no_run(command: Command) -> None:
    done = command("baseline", "check")
    assert (done.code, done.out) == (2, "")
    assert done.error == f"amp-fuzz: {FILE}: no such file: `amp-fuzz baseline update` makes it"
    assert command("baseline", "update").error.endswith("no run yet: amp-fuzz run")
    assert "is not a date: write it like" in command("baseline", "update", "--expires=soon").error
    assert "is in the past" in command("baseline", "update", "--expires=2020-01-01").error
    assert "is not a version range" in command("baseline", "update", "--torch=two").error
