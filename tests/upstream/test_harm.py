"""The harm of a known bug is told from its divergence, and orders the bugs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from amp_fuzz.cases.build import call, case, x
from amp_fuzz.oracle import Divergence, Kind
from amp_fuzz.upstream import BUGS
from amp_fuzz.upstream.bug import Example
from amp_fuzz.upstream.harm import HARMS, gravest, harm_of


@pytest.mark.parametrize(
    ("kind", "where", "expected", "harm"),
    [
        ("value", "v0", "1.0", "silent value"),
        ("range", "step0.v0", "1.0", "silent value"),
        ("relation", "autocast-disabled: step1.w1.grad", "1.0", "silent gradient"),
        ("bitwise", "w1.grad", "1.0", "silent gradient"),
        ("grad-dtype", "w1.grad", "float32", "silent gradient"),
        ("dtype", "v0", "float32", "silent dtype"),
        ("state", "after the case", "state as before", "state"),
        ("raise", "v0 = torch.cat([x0], 0)", "no error", "raises"),
        ("raise", "v0 = torch.cat([x0], 0)", "RuntimeError: no", "refuses"),
        ("relation", "checkpoint: ", "no error", "raises"),
        ("crash", "", "", "raises"),
    ],
)
def test_the_harm_of_a_divergence(kind: Kind, where: str, expected: str, harm: str) -> None:
    assert harm_of(Divergence(kind, where, expected, "another")) == harm


def test_the_gravest_bug_is_first() -> None:
    """By harm, then autocast's own, then unreported, then small: each beats all that follow."""
    calls = [call("exp", "x0", to=f"v{i}") for i in range(3)]
    small, large = (
        (Example("eager-cpu", case([x("x0", 2)], *some)),) for some in (calls[:1], calls)
    )
    bug = replace(BUGS["cache-ignores-dtype"], harm="state", own=False, link="", examples=small)
    order = [
        replace(bug, id="value", harm="silent value", own=True, link="https://", examples=large),
        replace(bug, id="autocast", link="https://", examples=large),
        replace(bug, id="unreported", own=True, examples=large),
        replace(bug, id="small", own=True, link="https://"),
        replace(bug, id="large", own=True, link="https://", examples=large),
        replace(bug, id="unshown", own=True, link="https://", examples=()),
        *(replace(bug, id=harm, harm=harm) for harm in HARMS[4:]),
    ]
    assert [one.id for one in gravest(reversed(order))] == [one.id for one in order]
