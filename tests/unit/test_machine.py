"""Reports for other programs: valid, complete, bounded, and never green where nothing ran."""

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest

from amp_fuzz.records.schema import BackendRecord, BaselineRecord, Record
from amp_fuzz.records.store import Store
from amp_fuzz.reports import machine
from amp_fuzz.reports.view import View

from .test_reports import CAT, case, found, ran, small_run, store_of, view_of


def suites(view: View) -> dict[str, ET.Element]:
    return {str(suite.get("name")): suite for suite in ET.fromstring(machine.junit(view))}


def counts(element: ET.Element) -> tuple[int, ...]:
    names = ("tests", "failures", "errors", "skipped")
    return tuple(int(element.attrib[name]) for name in names)


def test_json_has_the_numbers_of_the_report(tmp_path: Path) -> None:
    view = view_of(store_of(tmp_path, small_run()))
    facts = json.loads(machine.as_json(view))
    assert (facts["format"], facts["run"], facts["verdict"]) == (1, "r1", "new")
    assert [b["cases"] for b in facts["backends"]] == [b.cases for b in view.backends]
    assert [(f["title"], f["cases"]) for f in facts["new"]] == [
        (f.title, f.cases) for f in view.new
    ]
    assert {k["id"]: k["cases"] for k in facts["known"]} == {k.id: k.cases for k in view.known}
    assert facts["new"][0]["replay"].startswith("amp-fuzz replay ")


def test_a_rate_without_seconds_is_0(tmp_path: Path) -> None:
    quick = msgspec.structs.replace(ran(), seconds={"reference": 0.0})
    facts = json.loads(machine.as_json(view_of(store_of(tmp_path, [quick]))))
    assert {backend["rate"] for backend in facts["backends"]} == {0.0}


def test_a_suite_fails_once_for_each_cause(tmp_path: Path) -> None:
    view = view_of(store_of(tmp_path, small_run()))
    suite = suites(view)["amp-fuzz eager-cpu"]
    causes = [f for f in view.new if f.record.backend == "eager-cpu"]
    assert counts(suite)[:2] == (len(causes) + 1, len(causes) + 1)  # and the cases as a whole
    names = [test.get("name") for test in suite.findall("testcase")]
    assert names == ["cases", *(f"{f.title} [{f.id}]" for f in causes)]
    failure = suite.findall("testcase/failure")[1]
    assert failure.get("type") == "dtype"
    assert causes[0].program in str(failure.text)


def test_a_backend_that_ran_nothing_is_an_error(tmp_path: Path) -> None:
    backends = tuple(BackendRecord(name, "cpu", "needs g++") for name in ("eager-cpu", "idle"))
    shown = suites(view_of(store_of(tmp_path, [ran()], backends=backends)))
    assert counts(shown["amp-fuzz eager-cpu"]) == (1, 0, 0, 0)
    assert counts(shown["amp-fuzz idle"]) == (1, 0, 1, 0)
    error = shown["amp-fuzz idle"].find("testcase/error")
    assert error is not None
    assert error.get("message") == "nothing ran: needs g++"


def test_a_diverging_case_without_a_record_fails_too(tmp_path: Path) -> None:
    lost = [ran("diverged", kind="dtype", op=CAT)]
    suite = suites(view_of(store_of(tmp_path, lost)))["amp-fuzz eager-cpu"]
    assert counts(suite) == (1, 1, 0, 0)


def test_an_accepted_finding_is_skipped_until_it_expires(tmp_path: Path) -> None:
    store = store_of(tmp_path, [ran()])
    head = store.run("r1")
    entries = [
        BaselineRecord(
            name, "0123456789", "eager-cpu", "dtype", "c0", "dtype at cat", "waits", expired=late
        )
        for name, late in (("held", False), ("late", True))
    ]
    store.begin(msgspec.structs.replace(head, entries=tuple(entries)))
    suite = suites(view_of(store))["amp-fuzz eager-cpu"]
    assert counts(suite) == (3, 1, 0, 1)


def test_control_characters_leave_the_xml_readable(tmp_path: Path) -> None:
    bad = case(CAT)
    records: list[Record] = [
        ran("diverged", case=bad, kind="raise", op=CAT),
        found(bad, kind="raise", observed="\x1b[31m<b>&\x00]]>\ufffe"),
    ]
    suite = suites(view_of(store_of(tmp_path, records)))["amp-fuzz eager-cpu"]
    failure = suite.find(".//failure[@type]")
    assert failure is not None
    assert str(failure.get("message")).endswith("observed <b>& ]]>")


def test_gitlab_knows_a_cause_by_its_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    view = view_of(store_of(tmp_path, small_run()))
    issues = json.loads(machine.code_quality(view))
    assert len(issues) == len(view.new)
    for issue, finding in zip(issues, view.new, strict=True):
        assert issue["fingerprint"] == (finding.record.fingerprint or finding.id)
        assert issue["location"] == {
            "path": f".amp-fuzz/findings/{finding.id}.json",
            "lines": {"begin": 1},
        }


def test_annotations_are_at_most_ten_lines(tmp_path: Path) -> None:
    few = view_of(store_of(tmp_path / "few", small_run()))
    lines = list(machine.annotated(few))
    assert len(lines) == len(few.new)
    title, text = lines[0].removeprefix("::error title=").split("::")
    assert ":" not in title
    assert "," not in title
    assert "%0A" in text
    assert text.endswith(few.new[0].replay)

    many = [found(case(f"op{i}"), op=f"op{i}") for i in range(25)]
    lines = list(machine.annotated(view_of(store_of(tmp_path / "many", many))))
    assert len(lines) == 10
    assert lines[-1] == "::error title=amp-fuzz::16 more causes: see the report"


def test_a_run_of_nothing_warns(tmp_path: Path) -> None:
    [line] = machine.annotated(view_of(store_of(tmp_path, [])))
    assert line.startswith("::warning title=amp-fuzz::NOTHING RAN")


def test_a_clean_run_says_nothing(tmp_path: Path) -> None:
    backends = (BackendRecord("eager-cpu", "cpu", "torch 2.13.0"),)
    view = view_of(store_of(tmp_path, [ran()], backends=backends))
    assert list(machine.annotated(view)) == []
    assert json.loads(machine.code_quality(view)) == []
    assert Store(tmp_path / ".amp-fuzz").runs() == ["r1"]


def test_commands_and_files_name_the_finding_of_their_own_backend(tmp_path: Path) -> None:
    first = msgspec.structs.replace(found(case(CAT)), fingerprint="0123456789")
    other = msgspec.structs.replace(first, backend="fake-cuda", fingerprint="9876543210")
    groups = {one.backend: (one.fingerprint,) for one in (first, other)}
    cases = [
        msgspec.structs.replace(
            ran("diverged", case=case(CAT), kind="dtype", op=CAT), backend=name, groups=of
        )
        for name, of in groups.items()
    ]
    store = store_of(tmp_path, [*cases, first, other])
    store.save(first)
    store.save(other)
    view = view_of(store)
    names = {"eager-cpu": first.id, "fake-cuda": f"{first.id}@fake-cuda"}
    assert {f.record.backend: f.replay.split()[2] for f in view.new} == names
    files = [issue["location"]["path"] for issue in json.loads(machine.code_quality(view))]
    assert sorted(Path(file).stem for file in files) == sorted(names.values())


def test_a_crash_blocks_a_merge_request(tmp_path: Path) -> None:
    crash = msgspec.structs.replace(found(case(CAT)), kind="crash")
    issues = json.loads(machine.code_quality(view_of(store_of(tmp_path, [*small_run(), crash]))))
    severities = {issue["check_name"]: issue["severity"] for issue in issues}
    assert severities["amp-fuzz/dtype"] == "major"
    assert severities["amp-fuzz/crash"] == "blocker"


def test_foreign_text_is_no_command_of_github(tmp_path: Path) -> None:
    odd = msgspec.structs.replace(found(case(CAT)), op="a,b::c%0A", fingerprint="0123456789")
    of = {"kind": "dtype", "op": CAT, "groups": ("0123456789",)}
    record = msgspec.structs.replace(ran("diverged", case=case(CAT)), **of)
    [line] = machine.annotated(view_of(store_of(tmp_path, [record, odd])))
    head, _, text = line.removeprefix("::").partition("::")
    assert head == "error title=amp-fuzz%3A dtype at a%2Cb%3A%3Ac%250A on eager-cpu"
    assert text.startswith("1 case%0A")
