"""Device against device shows what a count by hand gives, and marks what chance cannot explain."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from amp_fuzz.records.compaction import compact
from amp_fuzz.records.schema import EndRecord, Record
from amp_fuzz.reports import frames, html
from amp_fuzz.reports.conformance import audited
from amp_fuzz.reports.devices import MOST, Apart, Devices, Pair, devices, uneven

from .test_pictures import AUDIT, bad, one, store_of
from .test_reports import CAT, COS, MM, Page, kernel, view_of


def of(path: Path, records: list[Record]) -> Devices:
    return devices(frames.load(store_of(path, [*records, EndRecord("", "", 1, 1.0)]), "r1"))


def several(count: int, first: int = 0, **more: object) -> list[Record]:
    return [one(first + i, **more) for i in range(count)]


# script: mm in 40 cases, of which 20 raise; eager-cpu: mm in 30. cat on both, cosh on one.
RUN: list[Record] = [
    *several(19, excess=0.5, by=MM),
    *several(20, 100, outcome="raised"),
    bad(200, MM, known="k", excess=3.0, by=MM),
    *several(30, 300, backend="eager-cpu", excess=0.1, by=MM),
    one(400, ops=(CAT,), excess=0.25, by=CAT),
    one(401, "eager-cpu", ops=(CAT,), excess=0.25, by=CAT),
    one(402, ops=(COS,), excess=0.25, by=COS),
]


@pytest.mark.parametrize("compacted", [False, True])
def test_two_backends_are_compared_by_kernel_and_dtypes(tmp_path: Path, compacted: bool) -> None:
    store = store_of(tmp_path, [*RUN, EndRecord("", "", 1, 1.0)])
    if compacted:
        pytest.importorskip("pyarrow")
        compact(store, "r1")
    found = devices(frames.load(store, "r1"))
    assert found.columns == ("script", "eager-cpu")
    (mm,) = found.mixes  # nothing of cat diverged or raised
    assert (mm.op, mm.dtypes, mm.policies, mm.pairs) == (MM, "float32", ("fp32",), ((0, 1),))
    assert [side and side.text for side in mm.sides] == ["1 dtype, 20 raised alike of 40", "30"]
    assert mm.sides[0] is not None
    assert (mm.sides[0].diverged, mm.sides[0].share) == (1, 21 / 40)
    assert (found.shared, found.uneven, found.differ) == (2, 1, 1)
    assert found.pair(1, 0) == found.pair(0, 1) == Pair(mixes=2, differ=1, ops=2, apart=1)
    assert found.apart == (Apart(MM, (3.0, 0.1), 3.0 / 0.1), Apart(CAT, (0.25, 0.25), 1.0))
    assert found.measured == 2


def test_a_pair_has_the_mixes_that_both_reached(tmp_path: Path) -> None:
    both, cat = (MM, CAT), (CAT,)
    found = of(tmp_path, [one(1, ops=both), one(2, "eager-cpu"), one(3, "trace", ops=cat)])
    assert found.columns == ("script", "eager-cpu", "trace")
    assert found.shared == 2
    assert {pair: own.mixes for pair, own in found.pairs.items()} == {
        (0, 1): 1,
        (0, 2): 1,
        (1, 2): 0,
    }


def test_what_chance_explains_is_uneven_and_does_not_differ(tmp_path: Path) -> None:
    found = of(tmp_path, [*several(5), bad(9, MM), *several(5, 20, backend="eager-cpu")])
    assert (found.uneven, found.differ) == (1, 0)
    assert found.mixes[0].pairs == ()
    assert found.mixes[0].chance == pytest.approx(6 / 11)  # that the one that diverged is of six
    assert found.pair(0, 1).differ == 0


def test_the_more_is_compared_the_more_a_difference_takes(tmp_path: Path) -> None:
    """Of many rows, some are uneven by chance: together they mark one in 1 of 100 reports."""
    rows = [*(bad(i, MM) for i in range(7)), *several(7, 20, backend="eager-cpu")]
    assert of(tmp_path / "one", rows).differ == 1
    others: list[Record] = []
    for i in range(60):
        dtypes = f"float32,{i}"
        others += [
            replace(bad(100 + i, MM), kernels=(kernel(MM, "fp32", dtypes),)),
            replace(one(300 + i, "eager-cpu"), kernels=(kernel(MM, "fp32", dtypes),)),
        ]
    many = of(tmp_path / "many", [*rows, *others])
    assert (many.shared, many.differ) == (61, 0)


def test_the_kind_of_a_divergence_counts_by_itself(tmp_path: Path) -> None:
    raises = [bad(100 + i, MM, kind="raise", backend="eager-cpu") for i in range(12)]
    found = of(tmp_path, [*(bad(i, MM) for i in range(12)), *raises])
    assert [side and side.text for side in found.mixes[0].sides] == [
        "12 dtype of 12",
        "12 raise of 12",
    ]
    assert found.differ == 1


def test_all_cases_of_both_that_diverge_are_alike(tmp_path: Path) -> None:
    found = of(tmp_path, [bad(1, MM), bad(2, MM, backend="eager-cpu")])
    assert (found.shared, found.uneven) == (1, 0)


def test_policies_that_differ_are_all_named(tmp_path: Path) -> None:
    promoted = replace(bad(9, MM, backend="eager-cpu"), kernels=(kernel(MM, "promote", "float32"),))
    found = of(tmp_path, [*several(3), promoted])
    assert found.mixes[0].policies == ("fp32", "promote")


def test_one_backend_is_compared_with_none(tmp_path: Path) -> None:
    shown = view_of(store_of(tmp_path, [one(1), EndRecord("", "", 1, 1.0)]))
    assert shown.pictures.devices == Devices()
    pages = html.pages(shown)
    assert "devices.html" not in pages
    assert "No table: fewer than two backends ran." in Page(pages["report.html"]).text


def test_an_excess_of_nothing_is_any_times_smaller(tmp_path: Path) -> None:
    records = [one(1, excess=0.0, by=MM), one(2, "eager-cpu", excess=0.5, by=MM)]
    records += [one(3, excess=0.0, by=CAT), one(4, "eager-cpu", excess=0.0, by=CAT)]
    found = of(tmp_path, records)
    assert [(row.op, row.ratio) for row in found.apart] == [(MM, math.inf), (CAT, 1.0)]
    assert found.pair(0, 1)[2:] == (2, 1)


@pytest.mark.parametrize(
    ("numbers", "chance"),
    [
        ((0, 0, 5, 5), 1.0),
        ((5, 0, 5, 5), 1 / 252),
        ((0, 5, 5, 5), 1 / 252),
        ((1, 0, 1, 1), 0.5),
        ((3, 1, 4, 4), (16 + 1) / 70),  # the lady tasting tea
        ((2, 2, 4, 4), (1 + 16 + 36) / 70),
        ((1, 3, 4, 400), None),
    ],
)
def test_the_chance_is_that_of_fishers_test(numbers: tuple[int, ...], chance: float | None) -> None:
    some, others, of_some, of_others = numbers
    total, whole = some + others, of_some + of_others

    def ways(k: int) -> int:
        return math.comb(of_some, k) * math.comb(of_others, total - k)

    few = some * whole <= total * of_some
    tail = range(some + 1) if few else range(some, min(total, of_some) + 1)
    expected = sum(map(ways, tail)) / math.comb(whole, total)
    assert uneven(*numbers) == pytest.approx(expected)
    assert chance is None or expected == pytest.approx(chance)


def test_large_numbers_take_no_longer() -> None:
    assert uneven(500_000, 480_000, 10**7, 10**7) == pytest.approx(7.6e-94, rel=0.01)


def test_the_tables_have_a_bound_and_say_how_many_there_are(tmp_path: Path) -> None:
    records: list[Record] = []
    for i in range(MOST + 5):
        kernels = (kernel(MM, "fp32", f"float32,{i}"),)
        records += [
            replace(bad(i, MM), kernels=kernels),
            replace(one(1000 + i, "eager-cpu"), kernels=kernels),
            one(2000 + i, excess=0.5, by=f"op{i}"),
            one(4000 + i, "eager-cpu", excess=0.1, by=f"op{i}"),
        ]
    shown = view_of(store_of(tmp_path, [*records, EndRecord("", "", 1, 1.0)]))
    found = shown.pictures.devices
    assert (len(found.mixes), len(found.apart)) == (MOST, MOST)
    assert (found.uneven, found.measured) == (MOST + 5, MOST + 5)
    page = Page(html.pages(shown)["devices.html"]).text
    assert f"The most uneven {MOST} of {MOST + 5} rows." in page
    assert f"The most different {MOST} of {MOST + 5} ops." in page


def test_the_page_says_what_the_numbers_say(tmp_path: Path) -> None:
    shown = view_of(store_of(tmp_path, [*RUN, EndRecord("", "", 1, 1.0)]))
    pages = html.pages(shown)
    page = Page(pages["devices.html"]).text
    for said in (
        "1 row of 2 differs; 0 more are uneven, which chance may explain.",
        "1 dtype, 20 raised alike of 40",
        "script and eager-cpu",
        "1/2 excess 1/2",
        "30.0",
        "no audit in the folder of this report",
    ):
        assert said in page
    assert "1/2 excess 1/2" in Page(pages["report.html"]).text
    rows = re.findall(r'<th scope="row"', pages["devices.html"])
    assert len(rows) == 2 + 1 + 2  # each table's rows have a head that a screen reader says


def test_what_a_record_holds_is_escaped(tmp_path: Path) -> None:
    nasty = "<img src=x onerror=alert(2)>\"'&amp;{{ 7919*7907 }}"
    wrong = replace(bad(1, nasty, excess=1.0, by=nasty), kernels=(kernel(nasty, nasty, nasty),))
    other = replace(one(2, nasty, excess=0.1, by=nasty), kernels=(kernel(nasty, nasty, nasty),))
    shown = view_of(store_of(tmp_path, [wrong, other, EndRecord("", "", 1, 1.0)]))
    page = Page(html.pages(shown)["devices.html"])
    assert "img" not in page.tags
    assert page.text.count(nasty) >= 8
    assert "62615533" not in page.text


def test_the_calls_of_an_audit_are_beside_it(tmp_path: Path) -> None:
    (tmp_path / "audit.csv").write_text(AUDIT)
    audit = audited(tmp_path)
    assert audit is not None
    assert audit.backends == ("eager-cpu", "fake-cuda")
    assert [tuple(call) for call in audit.apart] == [
        ("mm", "mm(x0)", "float32", 1, ("bfloat16", "float16"))
    ]
    assert audit.differ == (1, 1)
    shown = view_of(store_of(tmp_path, [*RUN, EndRecord("", "", 1, 1.0)]))
    page = Page(html.pages(shown, audit)["devices.html"]).text
    assert "1 call of 1 op comes out otherwise on one backend than on another" in page
    assert "mm mm(x0) float32 1 bfloat16 float16" in page
    alike = audit._replace(apart=())
    assert "comes out alike on all backends" in Page(html.pages(shown, alike)["devices.html"]).text
