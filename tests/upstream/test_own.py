"""Records of bugs that are a backend's own name a group, and explain nothing."""

from __future__ import annotations

from amp_fuzz.upstream import BUGS, shipped
from amp_fuzz.upstream.own import looks_like, own_bugs


def test_a_group_is_named_by_its_backend_kind_and_op() -> None:
    assert looks_like("compile[inductor]", "value", "erf") == "compile-erf"
    assert looks_like("compile[inductor]", "raise", "erf") == ""
    assert looks_like("eager-cpu", "value", "erf") == ""


def test_no_record_of_a_backend_alone_explains_a_case() -> None:
    own = {bug.id for bug in own_bugs()}
    assert own < set(BUGS)
    assert own.isdisjoint(entry.id for entry in shipped())
    assert not [bug.id for bug in own_bugs() if bug.imitation is not None]
