"""What a backend does without autocast too is told apart, and fails a run only if asked."""

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from amp_fuzz.records.schema import CaseRecord, DivergenceRecord
from amp_fuzz.records.store import Store
from tests.forks import Done

Command = Callable[..., Done]
RUN = ("run", "--backends=moody-cpu", "--ops=abs", "--cases=4", "--seed=1", "--aimed=0")


def outcomes(folder: Path) -> set[str]:
    store = Store(folder / ".amp-fuzz")
    records = store.records(store.runs()[-1])
    return {r.outcome for r in records if isinstance(r, CaseRecord)} - {"agreed"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mood", "more", "code", "outcome"),
    [
        ("always-value", (), 0, "backend"),
        pytest.param(
            "always-value", ("--fail-on=backend",), 1, "backend", marks=pytest.mark.thorough
        ),
        ("value", (), 1, "diverged"),
        pytest.param("value", ("--fail-on=backend",), 1, "diverged", marks=pytest.mark.thorough),
    ],
)
def test_a_wrong_kernel_fails_a_run_if_autocast_has_a_part_in_it_or_if_asked(
    amp_fuzz: Command, tmp_path: Path, mood: str, more: tuple[str, ...], code: int, outcome: str
) -> None:
    (tmp_path / "moods.txt").write_text(f"abs {mood}\n")
    done = amp_fuzz(*RUN, *more)
    assert (done.code, outcomes(tmp_path)) == (code, {outcome}), done.out
    said = " ".join(done.out.split())
    own = "differ in the same way without autocast: the backend's own (1 group;" in said
    assert own == (outcome == "backend")
    assert ("FAILS: 4 cases of the backend's own" in said) == (own and code == 1)


@pytest.mark.thorough
def test_it_is_minimised_once_a_group_and_told_everywhere(
    amp_fuzz: Command, tmp_path: Path
) -> None:
    (tmp_path / "moods.txt").write_text("abs always-value\n")
    done = amp_fuzz(*RUN, "-v")
    assert done.code == 0
    assert re.search(
        r"^moody-cpu, without autocast's doing: 1 group, 4 cases$", done.out, re.MULTILINE
    )
    store = Store(tmp_path / ".amp-fuzz")
    found = [r for r in store.records(store.runs()[-1]) if isinstance(r, DivergenceRecord)]
    assert [r.known for r in found] == ["backend"]
    assert found[0].minimised is not None
    assert found[0].fingerprint
    again = amp_fuzz("replay", found[0].id)
    assert again.code == 0
    said = "the backend's own: it differs in the same way without autocast: bitwise"
    assert f"{found[0].id} on moody-cpu: {said}" in again.out
    explained = amp_fuzz("explain", found[0].id)
    assert (explained.code, said in explained.out) == (0, True)
    listed = amp_fuzz("list", "findings")
    assert re.search(rf"^ *{found[0].id} .* backend ", listed.out, re.MULTILINE), listed.out
    (tmp_path / "large.json").write_bytes(found[0].case.json())
    smaller = amp_fuzz("minimize", "large.json", "--backend=moody-cpu", "--seconds=5")
    assert smaller.code == 0, smaller.err
    assert {store.finding(name).known for name in store.findings()} == {"backend"}
    next_run = amp_fuzz(*RUN)
    assert "judged first" not in next_run.out
    assert next_run.code == 0


@pytest.mark.thorough
def test_a_new_divergence_does_not_shrink_into_one_of_the_backends_own(
    amp_fuzz: Command, tmp_path: Path
) -> None:
    (tmp_path / "moods.txt").write_text("abs value\nneg always-value\n")
    done = amp_fuzz(*RUN[:2], "--ops=abs,neg", *RUN[3:], "--cases=12")
    assert done.code == 1
    store = Store(tmp_path / ".amp-fuzz")
    report = msgspec.json.decode((tmp_path / "amp-fuzz-report" / "report.json").read_bytes())
    assert {f["op"] for f in report["new"]} == {"abs"}
    assert {f["op"] for f in report["own"]} == {"neg"}
    for name in store.findings():
        finding = store.finding(name)
        assert (finding.known == "backend") == (finding.op == "neg")


@pytest.mark.thorough
def test_an_old_store_has_none_and_still_reads(amp_fuzz: Command, tmp_path: Path) -> None:
    """A finding that a run without this outcome kept is told as the backend's own now."""
    (tmp_path / "moods.txt").write_text("abs value\n")
    assert amp_fuzz(*RUN).code == 1
    (tmp_path / "moods.txt").write_text("abs always-value\n")
    done = amp_fuzz("run", *RUN[1:3], "--cases=1", "--seed=2", "--aimed=0")
    assert done.code == 0
    assert "judged first: 1 finding of the store" in done.out
