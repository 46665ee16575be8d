"""A report for other programs: JSON, JUnit XML, GitLab's code quality, GitHub's annotations."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from amp_fuzz.config import is_url
from amp_fuzz.reports.numbers import numbers
from amp_fuzz.reports.printable import clean, plural
from amp_fuzz.reports.unseen import AHEAD
from amp_fuzz.reports.view import BackendView, BaselineView, FindingView, View

if TYPE_CHECKING:
    from amp_fuzz.reports.conformance import Audit

__all__ = ["FORMAT", "annotated", "as_json", "code_quality", "junit"]

FORMAT = 1  # of the JSON report

MOST_ANNOTATIONS = 10  # GitHub shows no more of one kind for a step


def as_json(view: View, audit: Audit | None = None) -> str:
    """Return the facts of a run as one JSON object, described in docs/reference/reports.md.

    audit: the conformance matrix in the folder of the report.
    """
    facts = {
        "format": FORMAT,
        "run": view.run_id,
        "seed": view.seed,
        "profile": view.profile,
        "started": view.started,
        "seconds": view.took,
        "command": view.command,
        "versions": dict(view.versions),
        "verdict": view.verdict.kind,
        "sentence": view.verdict.sentence,
        "notes": [view.stopped] * bool(view.stopped) + [*view.notes],
        "backends": [_of(b, _BACKEND) for b in view.backends],
        "new": [_finding(f) for f in view.new],
        "own": [_finding(f) for f in view.own],
        "known": [{**_of(k, _KNOWN), "backends": dict(k.backends)} for k in view.known],
        "baseline": [_of(entry, _BASELINE) for entry in view.baseline],
        "unseen": _unseen(view),
        "promises": [{"id": p.promise.id, "cases": p.backends} for p in view.promised],
        "pictures": numbers(view, audit),
    }
    return json.dumps(facts, indent=1, allow_nan=False) + "\n"


_BACKEND = (
    "name", "device", "detail", "cases", "agreed", "raised", "own", "known", "new", "rate",
    "ops", "reachable", "reached", "missing",
)  # fmt: skip
_RECORD = (
    "fingerprint", "kind", "backend", "where", "op", "overload", "policy", "dtypes", "expected",
    "observed", "stage", "part", "like", "bare", "platform",
)  # fmt: skip
_KNOWN = ("id", "what", "link", "cases", "replay")
_BASELINE = ("id", "title", "backend", "reason", "link", "expires", "state")


def _of(source: object, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def _finding(finding: FindingView) -> dict[str, Any]:
    return {
        **_of(finding, ("title", "id", "cases", "also", "life", "replay", "repro", "program")),
        **_of(finding.record, _RECORD),
    }


def _unseen(view: View) -> dict[str, Any]:
    names = ("backend", "own", "cases", "causes", "once", "twice")
    rows = [{**_of(u, names), "ahead": {"cases": AHEAD, **u.ahead._asdict()}} for u in view.unseen]
    return {"causes": rows, "ingredients": view.untried}


# -- JUnit ----------------------------------------------------------------------------------------


def junit(view: View) -> str:
    """Return the run as JUnit XML: a suite for each backend.

    Its tests are the cases as a whole, each new cause (a failure), each that shows in the same way
    without autocast (skipped, unless the run fails on them), and each entry of the baseline (a
    failure if it has expired). A backend on which nothing ran is an error, never a pass.
    """
    root = ET.Element("testsuites", name="amp-fuzz", time=f"{view.took:.3f}")
    names = dict.fromkeys([*(b.name for b in view.backends), *(e.backend for e in view.baseline)])
    backends = {b.name: b for b in view.backends}
    for name in names:
        _suite(root, view, name, backends.get(name))
    for count in ("tests", "failures", "errors", "skipped"):
        root.set(count, str(sum(int(suite.get(count, "0")) for suite in root)))
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _suite(root: ET.Element, view: View, name: str, backend: BackendView | None) -> None:
    suite = ET.SubElement(root, "testsuite", name=f"amp-fuzz {name}", timestamp=view.started)
    facts: Mapping[str, object] = {"run": view.run_id, "seed": view.seed, **dict(view.versions)}
    properties = ET.SubElement(suite, "properties")
    for key, value in facts.items():
        ET.SubElement(properties, "property", name=key, value=clean(str(value)))
    if backend is not None:
        _cases(suite, backend)
    for finding in (*view.new, *view.own):
        if finding.record.backend == name:
            _cause(suite, finding, fails=finding in view.failing)
    for entry in view.baseline:
        if entry.backend == name:
            _accepted(suite, entry)
    for tag, count in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(count, str(len(suite.findall(f"testcase/{tag}"))))
    suite.set("tests", str(len(suite.findall("testcase"))))


def _test(suite: ET.Element, name: str) -> ET.Element:
    where = str(suite.get("name")).replace(" ", ".", 1)
    return ET.SubElement(suite, "testcase", classname=where, name=clean(name))


def _cases(suite: ET.Element, backend: BackendView) -> None:
    test = _test(suite, "cases")
    test.set("time", f"{sum(seconds for _, seconds in backend.seconds):.3f}")
    if not backend.cases:
        ET.SubElement(test, "error", message=clean(f"nothing ran: {backend.detail}"))
        return
    counts = f"{plural(backend.cases, 'case')}: {backend.agreed:,} agreed, {backend.raised:,} "
    counts += f"raised alike, {backend.own:,} without autocast too, {backend.known:,} known, "
    counts += f"{backend.new:,} new"
    if backend.new:  # also if a record is lost, and so no cause below fails
        ET.SubElement(test, "failure", message=counts)
    ET.SubElement(test, "system-out").text = f"{counts}; kernels reached: {backend.coverage}"


def _cause(suite: ET.Element, finding: FindingView, *, fails: bool) -> None:
    record = finding.record
    test = _test(suite, f"{finding.title} [{record.fingerprint or finding.id}]")
    said = f"{finding.counted}: expected {record.expected}, observed"
    said = clean(f"{said} {record.observed}")
    if not fails:
        message = f"the backend's own: it differs in the same way without autocast: {said}"
        ET.SubElement(test, "skipped", message=message)
        return
    failure = ET.SubElement(test, "failure", type=record.kind, message=said)
    failure.text = "\n".join([said, "", finding.program, "", finding.replay, finding.repro])


def _accepted(suite: ET.Element, entry: BaselineView) -> None:
    test = _test(suite, f"baseline: {entry.title} [{entry.id}]")
    if entry.state == "expired":
        ET.SubElement(test, "failure", type="expired", message=clean(entry.sentence))
        return
    why = entry.sentence or f"{entry.state}: {entry.reason}"
    ET.SubElement(test, "skipped", message=clean(why))


# -- services -------------------------------------------------------------------------------------


def code_quality(view: View) -> str:
    """Return the causes that fail the run as GitLab's code quality report, a JSON list.

    GitLab tells by the fingerprints which causes a merge request adds. It wants a file of the
    project for each: the file of the finding, in the store.
    """
    issues = [
        {
            "check_name": f"amp-fuzz/{f.record.kind}",
            "description": clean(f"{f.title} on {f.record.backend}: {f.counted}; {f.replay}"),
            "fingerprint": f.record.fingerprint or f.id,
            "severity": "blocker" if f.record.kind in ("crash", "timeout") else "major",
            "location": {"path": _file(f), "lines": {"begin": 1}},
        }
        for f in view.failing
    ]
    return json.dumps(issues, indent=1) + "\n"


def _file(finding: FindingView) -> str:
    return finding.file if is_url(finding.file) else os.path.relpath(finding.file)


def annotated(view: View) -> Iterator[str]:
    """Yield the causes that fail the run as GitHub's workflow commands, at most ten.

    GitHub shows them on the pull request if a step prints them.
    """
    causes = view.failing
    most = MOST_ANNOTATIONS - (len(causes) > MOST_ANNOTATIONS)
    for finding in causes[:most]:
        title = f"amp-fuzz: {finding.title} on {finding.record.backend}"
        text = "\n".join([finding.counted, *finding.short, finding.replay])
        yield f"::error title={_property(title)}::{_escaped(text)}"
    if len(causes) > most:
        yield f"::error title=amp-fuzz::{len(causes) - most} more causes: see the report"
    if view.own_sentence and not view.own_fails:
        yield f"::notice title=amp-fuzz::{_escaped(view.own_sentence)}"
    if view.verdict.kind in ("new", "nothing", "unended") and not causes:
        yield f"::warning title=amp-fuzz::{_escaped(clean(view.verdict.sentence))}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _escaped(clean(text)).replace(":", "%3A").replace(",", "%2C")
