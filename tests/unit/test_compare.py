"""Two runs side by side: what chance explains is no difference, and what it does not is one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from amp_fuzz.interfaces.cli.compare import compare as command
from amp_fuzz.records.schema import BackendRecord, CaseRecord, Outcome, Record, RunRecord
from amp_fuzz.records.store import Store, StoreError, find_run
from amp_fuzz.reports import read
from amp_fuzz.reports.compare import Comparison, _chance, compare, conditions, failing
from tests.helpers import leading
from tests.unit.test_reports import BIG, CAT, MM, case, found, kernel, ran

GROUP = "0123456789"
BACKEND = BackendRecord("eager-cpu", "cpu", "torch 2.13.0", (CAT, MM))


def run_of(
    store: Store,
    name: str,
    records: Sequence[Record],
    seed: int = 7,
    torch: str = "2.13.0",
    command: str = "",
) -> None:
    started = "2026-01-02T03:04:05Z"
    store.begin(RunRecord(name, seed, "dev", (BACKEND,), {"torch": torch}, started, command))
    writer = store.writer(name, "0")
    for record in records:
        writer.write(record)
    writer.close()


def drawn(
    agreed: int, new: int = 0, known: int = 0, seconds: float = 0.5, group: str = GROUP
) -> list[Record]:
    """Return the records of so many cases, and of the divergence of those that diverged."""
    spent = {"backend": seconds}
    records: list[Record] = [replace(ran(), seconds=spent) for _ in range(agreed)]
    diverged = ran("diverged", case=BIG, kind="dtype", op=CAT, kernels=(kernel(CAT),), at=0)
    records += [replace(diverged, groups=(group,), seconds=spent) for _ in range(new)]
    if new:
        records.append(replace(found(BIG), fingerprint=group))
    told = replace(diverged, outcome="known", known="promote-foreign-half", seconds=spent)
    records += [told for _ in range(known)]
    if known:
        records.append(found(BIG, known="promote-foreign-half"))
    return records


def compared(path: Path, one: Sequence[Record], other: Sequence[Record]) -> Comparison:
    store = Store(path / ".amp-fuzz")
    run_of(store, "r1", one)
    run_of(store, "r2", other, seed=8, torch="2.15.0")
    return compare(read(store, "r1"), read(store, "r2"))


def states(comparison: Comparison) -> list[tuple[str, bool, int, int]]:
    return [(c.state, c.known, c.before, c.after) for c in comparison.changes]


@pytest.mark.parametrize(
    ("before", "after", "state"),
    leading(
        [
            ((200, 0), (200, 1), "new"),
            ((200, 1), (200, 0), "not seen"),
            ((200, 20), (200, 0), "gone"),
            ((200, 20), (5, 0), "not seen"),
            ((200, 2), (200, 60), "more"),
            ((200, 60), (200, 2), "fewer"),
            ((200, 20), (200, 30), ""),
            ((200, 20), (20, 2), ""),
            ((200, 0), (200, 0), ""),
        ],
        3,
    ),
)
def test_a_cause(
    tmp_path: Path, before: tuple[int, int], after: tuple[int, int], state: str
) -> None:
    seen = compared(tmp_path, drawn(*before), drawn(*after))
    assert states(seen) == ([(state, False, before[1], after[1])] if state else [])
    if state:
        assert seen.changes[0].id == GROUP
        assert seen.changes[0].of_before == sum(before)


@pytest.mark.thorough
def test_two_causes_are_two(tmp_path: Path) -> None:
    seen = compared(tmp_path, drawn(100, 20), drawn(100, 20, group="9876543210"))
    assert states(seen) == [("new", False, 0, 20), ("gone", False, 20, 0)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("before", "after", "state"), [(0, 1, ""), (0, 20, "new"), (20, 0, "gone"), (1, 0, "")]
)
def test_a_known_bug(tmp_path: Path, before: int, after: int, state: str) -> None:
    seen = compared(tmp_path, drawn(200, known=before), drawn(200, known=after))
    assert states(seen) == ([(state, True, before, after)] if state else [])


def test_a_finding_whose_case_agrees_now_is_fixed(tmp_path: Path) -> None:
    """Whatever the numbers say: the case itself was judged again."""
    again = CaseRecord(BIG.id, "eager-cpu", "findings", "agreed", (CAT,), (), {"backend": 0.1})
    seen = compared(tmp_path, drawn(200, 1), [*drawn(200), again])
    assert states(seen) == [("fixed", False, 1, 0)]
    assert seen.backends[0].cases == (201, 200)  # those drawn
    other = replace(again, id=case(MM, seed=99).id)
    seen = compared(tmp_path / "other", drawn(200, 1), [*drawn(200), other])
    assert states(seen) == [("not seen", False, 1, 0)]


def again(outcome: Outcome, id_: str = BIG.id, known: str = "") -> CaseRecord:
    """Return the record of a finding of the store that a run judged again."""
    kind = "dtype" if outcome in ("known", "diverged") else ""
    spent = {"backend": 0.1}
    return CaseRecord(
        id_, "eager-cpu", "findings", outcome, (CAT,), (), spent, kind, CAT, known=known
    )


@pytest.mark.thorough
def test_nondeterminism_that_does_not_show_is_not_fixed(tmp_path: Path) -> None:
    before = [*drawn(200), replace(found(BIG, kind="nondeterminism"), fingerprint=GROUP)]
    seen = compared(tmp_path, before, [*drawn(200), again("agreed")])
    assert states(seen) == [("not seen", False, 1, 0)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("outcome", "known"), [("known", "promote-foreign-half"), ("diverged", "")]
)
def test_a_finding_that_diverges_in_another_way_now_is_not_gone(
    tmp_path: Path, outcome: Outcome, known: str
) -> None:
    """Its fingerprint is not in the second run: the bug got a record, or torch changed."""
    still = replace(again(outcome, known=known), groups=("9876543210",) if not known else ())
    seen = compared(tmp_path, drawn(200, 40), [*drawn(240), still])
    assert ("changed", False, 40, 0) in states(seen)
    assert not {"gone", "fixed"} & {state for state, *_ in states(seen)}


@pytest.mark.thorough
def test_cases_that_are_judged_again_do_not_count(tmp_path: Path) -> None:
    """A store of forty findings of one cause is judged again by each run: the cause is no rarer."""
    many = [
        replace(again("diverged", f"{i:016x}"), groups=(GROUP,)) for i in range(40)
    ]  # one cause, met by one drawn case of the first run, and by none of the second
    cause = replace(found(BIG), fingerprint=GROUP)
    seen = compared(tmp_path, drawn(200, 1), [*drawn(200), *many, cause])
    assert states(seen) == []
    seen = compared(tmp_path / "more", drawn(200, 1), [*drawn(200, 2), *many])
    assert states(seen) == []


@pytest.mark.thorough
def test_a_cause_whose_op_was_not_called_is_not_gone(tmp_path: Path) -> None:
    """As with ``--ops`` of the second run."""
    other = [replace(one, ops=(MM,)) for one in drawn(200) if isinstance(one, CaseRecord)]
    assert states(compared(tmp_path, drawn(200, 40), other)) == [("not seen", False, 40, 0)]


@pytest.mark.thorough
def test_the_commands_differ(tmp_path: Path) -> None:
    store = Store(tmp_path / ".amp-fuzz")
    for name, command_ in (
        ("r1", "amp-fuzz run --seed=1"),
        ("r2", "amp-fuzz run --seed=2 --ops=mm"),
    ):
        run_of(store, name, drawn(10), command=command_)
    seen = compare(read(store, "r1"), read(store, "r2"))
    assert seen.differ == ("command: amp-fuzz run -> amp-fuzz run --ops=mm",)


def test_the_chance_is_that_of_a_binomial_distribution() -> None:
    assert _chance(3, 0, (100, 100)) == pytest.approx(1 / 8)
    assert _chance(0, 3, (100, 300)) == pytest.approx(27 / 64)
    exact = sum(math.comb(50, i) * 0.2**i * 0.8 ** (50 - i) for i in range(5))
    assert _chance(46, 4, (400, 100)) == pytest.approx(exact)
    assert _chance(5, 0, (100, 0)) == 1


@pytest.mark.thorough
def test_what_else_differs_is_said(tmp_path: Path) -> None:
    seen = compared(tmp_path, drawn(10), drawn(10))
    assert seen.differ == ("torch: 2.13.0 -> 2.15.0", "seed: 7 -> 8")


def test_conditions() -> None:
    assert [c.name for c in conditions("new, more,fewer-kernels,slower:20%")] == [
        "new",
        "more",
        "fewer-kernels",
        "slower",
    ]
    assert conditions("slower:2.5")[0].percent == 2.5
    assert conditions("") == ()
    with pytest.raises(ValueError, match="'older': use new, more, fewer-kernels, slower:PERCENT"):
        conditions("new,older")


@pytest.mark.parametrize(
    ("other", "wanted", "said"),
    leading(
        [
            (drawn(100, 3), "new", "1 cause is new"),
            (drawn(100), "new", ""),
            (drawn(100, known=50), "new,more", ""),
            (drawn(100, seconds=2.0), "slower:50", "eager-cpu is 75 % slower"),
            (drawn(100, seconds=2.0), "slower:80", ""),
            (drawn(100), "slower:1", ""),
            (
                [replace(ran(), kernels=(), seconds={"backend": 0.5})],
                "fewer-kernels",
                "eager-cpu reaches 1 kernel fewer",
            ),
        ],
        2,
    ),
)
def test_what_fails(tmp_path: Path, other: list[Record], wanted: str, said: str) -> None:
    seen = compared(tmp_path, drawn(100), other)
    assert ", ".join(failing(seen, conditions(wanted))) == said


@pytest.mark.thorough
def test_more_fails(tmp_path: Path) -> None:
    seen = compared(tmp_path, drawn(200, 2), drawn(200, 60))
    assert list(failing(seen, conditions("new,more"))) == ["1 cause is met more often"]


@pytest.mark.thorough
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store(tmp_path / ".amp-fuzz")
    run_of(store, "r1", drawn(100))
    run_of(store, "r2", drawn(100, 30), torch="2.15.0")
    invoke = CliRunner().invoke
    plain = invoke(command, ["latest~1"])
    assert "torch: 2.13.0 -> 2.15.0" in plain.output
    assert "B r2: torch 2.15.0, seed 7, 130 cases, did not end\n" in plain.output
    assert f"new: dtype at cat on eager-cpu [{GROUP}]: 0 of 100 -> 30 of 130 cases" in plain.output
    assert "amp-fuzz replay " in plain.output
    other = tmp_path / "elsewhere"
    run_of(Store(other), "r9", drawn(100))
    for one in (str(other), str(other / "runs" / "r9")):
        assert invoke(command, [one, "r2"]).output.startswith("A r9: torch 2.13.0")


@pytest.mark.thorough
def test_a_run_is_named_by_its_branch(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for name, branch in (("r1", "main"), ("r2", "main"), ("r3", "mine"), ("r4", "")):
        run_of(store, name, drawn(2))
        store.begin(replace(store.run(name), branch=branch))
    for said, run in {"latest": "r4", "latest~1": "r3", "latest:main": "r2"}.items():
        assert find_run(store, said) == (store, run)
    assert find_run(store, "latest:main~1") == (store, "r1")
    for said in ("latest:other", "latest:main~2", "latest~4"):
        with pytest.raises(StoreError, match=f"there is no {said} of 4 runs: see amp-fuzz list"):
            find_run(store, said)
    found = compare(read(store, "r2"), read(store, "r3"))
    assert "branch: main -> mine" in found.differ
    assert compare(read(store, "r4"), read(store, "r3")).differ == ()  # of an earlier amp-fuzz


@pytest.mark.thorough
def test_what_did_not_run_again_fails_if_anything_may(tmp_path: Path) -> None:
    two = [*drawn(10), ran(backend="fake-cuda")]
    seen = compared(tmp_path, two, drawn(10))
    assert (seen.missing, seen.added) == (("fake-cuda",), ())
    assert list(failing(seen, conditions(""))) == []
    assert list(failing(seen, conditions("slower:90"))) == ["fake-cuda ran in A and not in B"]
    other = compared(tmp_path / "other", drawn(10), two)
    assert (other.missing, other.added) == ((), ("fake-cuda",))
    assert list(failing(other, conditions("slower:90"))) == []


def test_its_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    from amp_fuzz.interfaces.cli import main

    store = Store(tmp_path / ".amp-fuzz")
    run_of(store, "r1", drawn(100))
    run_of(store, "r2", drawn(100, 30))
    run_of(store, "r3", [])
    assert main(["compare", "r1", "r2"]) == 0
    assert main(["compare", "r1", "r2", "--fail-on=new"]) == 1
    assert main(["compare", "r2", "r1", "--fail-on=new"]) == 0
    assert main(["compare", "r1", "r3"]) == 5  # nothing ran in both
    assert main(["compare", "r1", "latest~3"]) == 2
    assert main(["compare", "r", "r2"]) == 2
    assert main(["compare", "r1", "r2", "--fail-on=never"]) == 2


@pytest.mark.thorough
def test_a_quiet_line_for_each_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_of(Store(tmp_path / ".amp-fuzz"), "r1", drawn(3))
    done = CliRunner().invoke(command, ["latest", "latest"])
    assert "causes: nothing changed" in done.output
    assert "known bugs: nothing changed" in done.output


@pytest.mark.thorough
def test_settings_machines_and_commits_that_differ_are_said(tmp_path: Path) -> None:
    store = Store(tmp_path / ".amp-fuzz")
    for name, value in (("r1", "False"), ("r2", "True"), ("r0", "")):
        run_of(store, name, drawn(2))
        if value:
            flags = {"torch.backends.cudnn.allow_tf32": value, "same": "x"}
            commits = (
                {"project": value * 10, "amp-fuzz": "a"}
                if value == "True"
                else {"project": "b" * 40}
            )
            head = replace(store.run(name), flags=flags, machine={"cpu": value}, commits=commits)
            store.begin(head)
    assert compare(read(store, "r1"), read(store, "r2")).differ == (
        "cpu: False -> True",
        "torch.backends.cudnn.allow_tf32: False -> True",
        "commit of project: bbbbbbbbbbbb -> TrueTrueTrue",
    )
    assert compare(read(store, "r0"), read(store, "r2")).differ == ()  # of an earlier amp-fuzz
