"""Every run judges what the store keeps and the corpus first, and says what is fixed."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from amp_fuzz.backends import choose
from amp_fuzz.backends.harness import quiet
from amp_fuzz.records.schema import CaseRecord, DivergenceRecord
from amp_fuzz.records.store import Store
from amp_fuzz.runs.corpus import CorpusError, fixed, folder_cases, kept_findings
from amp_fuzz.upstream.explain import judge_of
from tests.helpers import GOOD, KNOWN, eager

pytestmark = pytest.mark.thorough

Command = Callable[..., Any]

RUN = ("run", "--backends=eager-cpu", "--ops=abs", "--cases=3", "--seed=1", "--workers=1")


def finding() -> DivergenceRecord:
    with quiet():
        return judge_of(eager(), ()).judge(KNOWN).finding("", KNOWN)


def test_findings_come_first_and_what_is_fixed_is_said(amp_fuzz: Command, tmp_path: Path) -> None:
    store = Store(tmp_path / ".amp-fuzz")
    store.save(finding())
    store.save(msgspec.structs.replace(finding(), case=GOOD, minimised=GOOD))
    done = amp_fuzz(*RUN)
    assert (done.code, done.err) == (0, "")
    lines, path = done.out.splitlines(), f".amp-fuzz/findings/{GOOD.id}.json"
    assert "judged first: 2 findings of the store" in lines
    assert [line for line in lines if line.startswith("fixed: ")] == [
        f"fixed: {GOOD.id} on eager-cpu (raise at mm): remove it: rm {path}"
    ]
    (run,) = store.runs()
    judged = [r for r in store.records(run) if isinstance(r, CaseRecord)]
    assert [(r.id, r.outcome) for r in judged[:2]] == sorted(
        [(KNOWN.id, "known"), (GOOD.id, "agreed")]
    )
    assert [r.family for r in judged[:2]] == ["findings", "findings"]


def test_a_finding_that_is_still_there_fails_the_next_run(
    amp_fuzz: Command, tmp_path: Path
) -> None:
    wrong = ("run", "--backends=lying-cpu", "--ops=abs", "--cases=2", "--seed=1", "--workers=1")
    assert amp_fuzz(*wrong).code == 1
    done = amp_fuzz(*wrong, "--ops=relu", "--minimize=0")
    assert "judged first: 1 finding of the store" in done.out
    assert done.code == 1
    assert "fixed: " not in done.out


def test_a_corpus_is_judged_first(amp_fuzz: Command, tmp_path: Path) -> None:
    folder = tmp_path / "cases" / "deeper"
    folder.mkdir(parents=True)
    (folder / "good.json").write_bytes(GOOD.json())
    (tmp_path / "amp-fuzz.toml").write_text('corpus = "cases"\n')
    done = amp_fuzz(*RUN, "-v")
    assert (done.code, done.err) == (0, "")
    assert "judged first: 1 case of cases\n" in done.out
    assert re.search(r"^  eager-cpu +4 +4 ", done.out, re.MULTILINE)


def test_a_bad_file_of_a_corpus_ends_the_run(amp_fuzz: Command, tmp_path: Path) -> None:
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "bad.json").write_text('{"program": 3}')
    done = amp_fuzz(*RUN, "--corpus=cases")
    assert done.error == ("amp-fuzz: cases/bad.json: Expected `object`, got `int` - at `$.program`")
    assert done.code == 2


def test_a_finding_that_cannot_be_read_ends_no_run(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(finding())
    (store.root / "findings" / "00.json").write_text("{")
    found, trouble = kept_findings(store, choose(["eager-cpu"]))
    assert [k.case for k in found] == [KNOWN]
    assert len(trouble) == 1
    assert "00.json" in trouble[0]


def test_a_finding_of_another_backend_is_left_alone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(finding())
    assert kept_findings(store, choose(["fake-cuda"])) == ([], [])


def test_a_nondeterministic_finding_is_not_called_fixed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(msgspec.structs.replace(finding(), kind="nondeterminism"))
    found, _ = kept_findings(store, choose(["eager-cpu"]))
    with quiet():
        agreed = judge_of(eager(), ()).judge(GOOD).record("findings")
    record = msgspec.structs.replace(agreed, id=KNOWN.id)
    assert fixed(found, [record]) == []
    store.save(finding())
    found, _ = kept_findings(store, choose(["eager-cpu"]))
    assert [k.name for k in fixed(found, [record])] == [KNOWN.id]


def test_a_corpus_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CorpusError, match="is a file: give the folder"):
        list(folder_cases([tmp_path / "file"], ()))
