"""``report.json`` and Markdown have the numbers of the pages' pictures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from amp_fuzz.records.schema import BackendRecord, EndRecord, Record, RunRecord
from amp_fuzz.records.store import Store
from amp_fuzz.reports import html, markdown, read, write
from amp_fuzz.reports.conformance import audited
from amp_fuzz.reports.machine import as_json
from amp_fuzz.reports.trend import Numbers, keep

from .test_lives import ran
from .test_lives import store_of as days_of
from .test_pictures import AUDIT, RUN, bad, one, store_of
from .test_reports import CAT, COS, MM, Page, kernel, view_of

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "reports.md"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Return the folder of a report with all pictures."""
    folder = tmp_path / "report"
    folder.mkdir()
    (folder / "audit.csv").write_text(AUDIT)
    more = one(99, "eager-cpu", ops=(CAT,), excess=2.0, by=CAT)
    write(store_of(tmp_path, [*RUN, more]), "r1", folder)
    return folder


@pytest.fixture
def shown(written: Path) -> dict[str, Any]:
    pictures: dict[str, Any] = json.loads((written / "report.json").read_text())["pictures"]
    return pictures


def test_the_heat_map_has_its_numbers(shown: dict[str, Any]) -> None:
    assert shown["divergences"] == {
        "backends": ["script", "eager-cpu"],
        "rows": [
            {
                "op": CAT,
                "cells": [
                    {"own": 0, "known": 1, "new": 1, "called": 3},
                    {"own": 0, "known": 0, "new": 0, "called": 1},
                ],
            },
            {
                "op": MM,
                "cells": [
                    {"own": 0, "known": 1, "new": 0, "called": 4},
                    {"own": 0, "known": 0, "new": 1, "called": 2},
                ],
            },
        ],
    }


def test_device_against_device_has_its_numbers(shown: dict[str, Any]) -> None:
    devices = shown["devices"]
    assert devices["pairs"] == [
        {"backends": ["script", "eager-cpu"], "mixes": 2, "differ": 0, "ops": 1, "apart": 1}
    ]
    (cat,) = (mix for mix in devices["mixes"] if mix["op"] == CAT)
    assert cat["differ"] == []
    side = {
        "policies": ["fp32"],
        "cases": 1,
        "raised": 0,
        "own": 0,
        "known": 0,
        "new": 0,
        "kinds": {},
    }
    both = side | {"cases": 4, "known": 1, "new": 1, "kinds": {"dtype": 2}}
    assert cat["cells"] == [both, side]
    assert devices["apart"] == [{"op": CAT, "ratio": 1e9 / 2, "excess": [1e9, 2.0]}]


def test_an_excess_that_was_not_measured_is_null(tmp_path: Path) -> None:
    two = [one(1, excess=0.5, by=MM), one(2, "trace", excess=0.5, by=MM)]
    store = store_of(tmp_path, [*two, one(3, "eager-cpu"), EndRecord("", "", 3, 1.0)])
    devices = json.loads(as_json(view_of(store)))["pictures"]["devices"]
    assert devices["backends"] == ["script", "eager-cpu", "trace"]
    assert devices["apart"] == [{"op": MM, "ratio": 1.0, "excess": [0.5, None, 0.5]}]


def test_the_excess_has_its_numbers(shown: dict[str, Any]) -> None:
    excess = shown["excess"]
    assert excess["threshold"] == 4.0
    assert excess["edges"] == [0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    script, eager = excess["backends"]
    assert (script["measured"], script["over"], script["largest"]) == (6, 2, 1e9)
    assert script["counts"] == [1, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1]
    assert (eager["backend"], eager["median"]) == ("eager-cpu", 2.0)
    assert excess["largest"]["rows"] == [
        {"op": CAT, "cells": [{"excess": 1e9}, {"excess": 2.0}]},
        {"op": COS, "cells": [{"excess": 0.3}, None]},
        {"op": MM, "cells": [{"excess": 0.25}, None]},
    ]


def test_what_was_tested_has_its_numbers(shown: dict[str, Any]) -> None:
    tested = shown["tested"]
    at = tested["dtypes"].index("float32")
    assert {(r["kernel"], r["policy"]): r["cases"][at] for r in tested["kernels"]} == {
        (CAT, "fp32"): 5,
        (COS, "fp32"): 1,
        (MM, "fp32"): 5,
    }
    assert [(p["policy"], p["kernels"], p["reached"][at]) for p in tested["policies"]] == [
        ("fp32", 3, 3)
    ]


def test_the_conformance_matrix_has_its_numbers(shown: dict[str, Any]) -> None:
    found = shown["conformance"]
    assert found["columns"][0] == {"backend": "eager-cpu", "autocast": "bfloat16"}
    assert found["totals"] == [{"agree": 3, "differs": 1}, {"raise": 1}, {"known": 1}]
    assert found["rows"][0] == {"op": "cat", "cells": [{"agree": 1, "differs": 1}, {}, {}]}
    assert found["differ"] == {"calls": 1, "ops": 1}
    assert found["apart"][0]["results"] == ["bfloat16", "float16"]


def test_the_trend_has_its_numbers(tmp_path: Path) -> None:
    store = days_of(tmp_path, [ran()], [ran()])
    keep(store, "r1", {"b": Numbers(10, 2.5, 1, 2)})
    facts = json.loads(as_json(read(store, "r2").view))["pictures"]["trend"]
    one, _ = facts["runs"]
    assert one["backends"] == {"b": {"cases": 10, "rate": 2.5, "reached": 1, "reachable": 2}}
    assert (one["run"], one["new"], one["open"], facts["left_out"]) == ("r1", 0, 0, 0)
    text = markdown.render(read(store, "r2").view)
    assert re.search(r"^\| `r1` \| [\d.]+ \| 0 \| 0 \| 0 \| 0 \|.* 1/2, 2.5 \|", text, re.MULTILINE)


def test_a_picture_without_data_is_empty(tmp_path: Path) -> None:
    facts = json.loads(as_json(view_of(store_of(tmp_path, [EndRecord("", "", 0, 0.0)]))))
    shown = facts["pictures"]
    assert shown["conformance"] is None
    assert shown["divergences"]["rows"] == shown["devices"]["pairs"] == []
    assert shown["excess"]["backends"] == shown["trend"]["runs"] == []


def test_markdown_and_pages_print_the_same_words(written: Path) -> None:
    """Each cell of a table of Markdown is in the page that has the picture."""
    text = (written / "report.md").read_text()
    pages = " ".join(Page(path.read_text()).text for path in written.glob("*.html"))
    titles = re.findall(r"<summary>(.+?)</summary>", text)
    pictures = ("Divergences", "Device", "Outcomes", "Excess", "Largest", "What was", "Conformance",
                "Calls")  # fmt: skip
    assert [t for t in titles if t.startswith(pictures)] == [
        "Divergences by op and backend (2 ops)",
        "Device against device",
        next(t for t in titles if t.startswith("Outcomes that are uneven (2 kernels with dtypes")),
        "Excess: how near rounding came to a divergence",
        "Largest excess by op and backend (3 ops)",
        next(t for t in titles if t.startswith("What was tested")),
        next(t for t in titles if t.startswith("Conformance: the audit of ")),
        "Calls that come out otherwise on another backend (1 call of 1 op)",
    ]
    for title in ("Divergences", "Outcomes", "Excess", "Largest", "Conformance", "Calls"):
        section = text.partition(f"<summary>{title}")[2].partition("</details>")[0]
        rows = [line for line in section.splitlines() if line.startswith("| `")]
        assert rows, title
        for row in rows:
            for cell in row.strip("| ").split(" | "):
                assert cell.replace("`", "").replace("\\", "").strip() in pages, (title, row)


@pytest.mark.thorough
def test_a_summary_of_any_run_is_small_enough_for_github(tmp_path: Path) -> None:
    """30 backends with long names, 500 ops, 6 mixes each, all of them uneven."""
    names = [f"backend-with-a-rather-long-name[{i}]" for i in range(30)]
    store = Store(tmp_path / ".amp-fuzz")
    heads = tuple(BackendRecord(name, "cpu", "torch", (), ()) for name in names)
    store.begin(RunRecord("r1", 7, "dev", heads, {}, "2026-01-02", threshold=4.0))
    writer = store.writer("r1", "0")
    for number, name in enumerate(names):
        for i in range(500):
            op = f"an_operator_with_a_long_name.and_an_overload_{i}"
            kernels = tuple(kernel(op, "fp32", f"float32,float16,bfloat16,{k}") for k in range(6))
            record: Record = one(1000 * number + i, name, excess=1.0 + i + number, by=op)
            if (i + number) % 2:
                record = bad(1000 * number + i, op, backend=name, kind="grad-value")
            writer.write(replace(record, kernels=kernels))  # type: ignore[type-var]
    writer.close()
    audit = tmp_path / "audit.csv"
    lines = [
        f"{name},op{i},o,torch.op{i}(x0),2x2,bfloat16,float32,differs,float{name[-3:-1]}"
        for name in names
        for i in range(300)
    ]
    audit.write_text(AUDIT.partition("\n")[0] + "\n" + "\n".join(lines))
    shown = view_of(store)
    found = audited(tmp_path)
    assert len(markdown.render(shown, found).encode()) < 2**19
    pages = html.pages(shown, found)
    assert len(pages["report.html"]) < 2_000_000
    assert len(pages["devices.html"]) < 2_000_000


def test_the_page_documents_each_picture(shown: dict[str, Any]) -> None:
    section = PAGE.read_text("utf-8").partition("### `pictures`")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert named == list(shown)
    for name, picture in shown.items():
        (line,) = re.findall(rf"^\| `{name}` \| (.+) \|$", section, re.MULTILINE)
        assert set(re.findall(r"`(\w+)`", line)) >= set(picture), name
