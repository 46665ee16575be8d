"""The file of a baseline: what is written is read again, and the rest of the text stays."""

from __future__ import annotations

import datetime
from pathlib import Path

import msgspec
import pytest

from amp_fuzz.records.baseline import (
    Baseline,
    BaselineError,
    Entry,
    added,
    entry_of,
    match,
    read,
    removed,
)
from amp_fuzz.records.fingerprint import fingerprinted
from amp_fuzz.records.schema import DivergenceRecord, unanswered
from tests.helpers import BF16, call, case, x

CASE = case([x("x0", 2)], call("abs", "x0"), contexts=(BF16,), backward="none")
RECORD = fingerprinted(
    DivergenceRecord(
        *("eager-cpu", "dtype", "v0", "abs", "none", "float32", "float32", 'it\'s "float64"\n\x1b'),
        *("", CASE),
    )
)


def entry(name: str = "a", **changes: object) -> Entry:
    return msgspec.structs.replace(entry_of(RECORD, (), reason="why"), id=name, **changes)


def written(path: Path, *entries: Entry) -> Baseline:
    path.write_text(added(Baseline(path), entries))
    return read(path)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    whole = entry(
        reason="it's known\nto \"all\" \\ of us", link="https://example.org",
        expires=datetime.date(2027, 3, 31), torch=">=2.7,<3",
    )  # fmt: skip
    file = written(tmp_path / "b.toml", whole, entry("b"))
    assert file.entries == (whole, entry("b"))
    assert file.entries[0].load() == CASE
    assert file.text.startswith("# Findings of amp-fuzz")


def test_an_entry_has_a_name_that_is_not_taken() -> None:
    first = entry_of(RECORD, (), reason="why")
    assert first.id == "abs-dtype-eager-cpu"
    assert (
        entry_of(RECORD, [first.id], reason="why").id == f"abs-dtype-eager-cpu-{first.fingerprint}"
    )


def test_taking_out_leaves_all_else_as_it_was(tmp_path: Path) -> None:
    file = written(tmp_path / "b.toml", entry("a"), entry("b"), entry("c"))
    text = file.text.replace('[[finding]]\nid = "b"', '# of b\n[[finding]]\nid = "b"')
    text = text.replace('[[finding]]\nid = "c"', '# of c\n[[finding]]\nid = "c"  # kept')
    text = "# mine\n\n" + text + "# the end\n"
    (tmp_path / "b.toml").write_text(text)
    file = read(tmp_path / "b.toml")
    left = removed(file, ["b"])
    assert "# of b" not in left
    assert left == text[: text.index("# of b")] + text[text.index("# of c") :]
    assert removed(file, []) == text
    (tmp_path / "b.toml").write_text(removed(file, ["a", "b", "c"]))
    assert read(tmp_path / "b.toml").entries == ()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reason": " "}, "finding 'a': the reason is empty: say why it is accepted"),
        ({"op": "neg"}, "is not that of its fields"),
        ({"torch": "two"}, "torch='two': write it as '>=2.13'"),
        ({"case": "{}"}, "finding a: case"),
        ({"id": "a b"}, "an id consists of letters"),
    ],
)
def test_what_cannot_be_used_is_one_line(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    path = tmp_path / "b.toml"
    whole = entry(**changes) if "id" not in changes else entry(str(changes["id"]))
    path.write_text(added(Baseline(path), [whole]))
    with pytest.raises(BaselineError) as caught:
        read(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_id_stands_once(tmp_path: Path) -> None:
    with pytest.raises(BaselineError, match="twice"):
        written(tmp_path / "b.toml", entry(), entry())


def test_an_entry_knows_its_fingerprint_and_nothing_else() -> None:
    assert match([entry()], RECORD) == entry()
    for changes in ({"kind": "bitwise"}, {"op": "neg"}, {"dtypes": "float16"}, {"stage": "s"}):
        other = fingerprinted(msgspec.structs.replace(RECORD, **changes))
        assert match([entry()], other) is None


def test_of_a_wrong_policy_torch_must_still_behave_as_it_did() -> None:
    wrong = {"overload": "abs", "policy": "fp32"}
    seen = fingerprinted(msgspec.structs.replace(RECORD, as_if=("none", "promote"), **wrong))
    known = entry_of(seen, (), reason="why")
    fewer = fingerprinted(msgspec.structs.replace(seen, as_if=("none",)))
    other = fingerprinted(msgspec.structs.replace(seen, as_if=("banned",)))
    assert known.fingerprint == other.fingerprint
    assert match([known], fewer) == known
    assert match([known], other) is None


def died(op: str, how: str = "SIGSEGV", seed: int = 0) -> DivergenceRecord:
    one = msgspec.structs.replace(CASE, seed=seed)
    return fingerprinted(
        unanswered("eager-cpu", "crash", one, f"the worker died of {how}", "all", op)
    )


def test_a_crash_in_no_known_op_is_known_of_its_case() -> None:
    known = entry_of(died(""), (), reason="why")
    assert match([known], died("")) == known
    assert died("", seed=4).fingerprint == died("").fingerprint
    assert match([known], died("", seed=4)) is None


def test_a_crash_in_an_op_is_known_of_all_cases_that_die_in_it_so() -> None:
    known = entry_of(died("bmm"), (), reason="why")
    assert match([known], died("bmm", seed=4)) == known
    for other in (died("mm"), died("bmm", "SIGABRT"), died("")):
        assert match([known], other) is None


def test_an_entry_of_a_crash_from_before_ops_were_known_still_knows_its_case() -> None:
    known = entry_of(died(""), (), reason="why")
    assert match([known], died("bmm")) == known
    assert match([known], died("bmm", seed=4)) is None


def test_the_last_day_counts() -> None:
    day = datetime.date(2027, 3, 31)
    assert not entry(expires=day).expired(day)
    assert entry(expires=day).expired(day + datetime.timedelta(days=1))
    assert not entry().expired(day)


def test_an_entry_holds_for_its_versions() -> None:
    assert entry(torch="").holds("2.13.0+cpu")
    assert entry(torch=">=2.13").holds("2.13.0a0+git1234")
    assert not entry(torch="<2.13").holds("2.13.0+cpu")
