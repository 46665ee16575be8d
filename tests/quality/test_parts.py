"""One fault of a compiler is one group, whatever it shows as; two faults in one run stay two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from amp_fuzz.backends.compile import CompileBackend
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case
from amp_fuzz.findings.examination import Met, Step, examine
from amp_fuzz.findings.groups import Groups
from amp_fuzz.findings.judge_again import happens
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.records.baseline import entry_of
from amp_fuzz.records.fingerprint import Fingerprint, fingerprint, title
from amp_fuzz.records.schema import DivergenceRecord
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from tests.helpers import BF16, call, case, x

pytestmark = pytest.mark.thorough

Wrong = Callable[[str, float], None]

RECORD = DivergenceRecord(
    backend="compile[inductor]",
    kind="value",
    where="v0",
    op="tanh",
    policy="none",
    dtypes="float32",
    expected="1.0",
    observed="2.0",
    known="",
    case=case([x("x0", 3)], call("tanh", "x0"), contexts=(), backward="none"),
    stage="compile[inductor]",
    part="lowerings: tanh",
)
GROUP = Fingerprint(
    *("part", "compile[inductor]", "compile[inductor]", "lowerings: tanh", "*", ()), ""
)


@pytest.mark.parametrize("kind", ["value", "grad-value", "nonfinite", "range", "dtype", "shape"])
@pytest.mark.parametrize("contexts", [(), (BF16,)], ids=["bare", "autocast"])
def test_wrong_results_of_one_lowering_have_one_fingerprint(
    kind: str, contexts: tuple[Any, ...]
) -> None:
    shown = case([x("x0", 3)], call("tanh", "x0"), contexts=contexts)
    record = msgspec.structs.replace(RECORD, kind=kind, op="", case=shown)
    assert fingerprint(record) == GROUP


@pytest.mark.parametrize(
    "other",
    [
        {"part": "lowerings: sin"},
        {"part": "emulate_precision_casts"},  # an option names no one fault
        {"part": ""},
        {"kind": "raise", "expected": "no error", "observed": "RuntimeError: no"},
        {"backend": "compile[inductor+casts]"},
    ],
    ids=str,
)
def test_other_parts_errors_and_backends_keep_fingerprints_of_their_own(
    other: dict[str, str],
) -> None:
    assert fingerprint(msgspec.structs.replace(RECORD, **other)) != GROUP


def test_a_part_is_named_in_the_title() -> None:
    assert title(RECORD) == "lowerings: tanh is wrong, as value at tanh"


# -- with seeded faults ---------------------------------------------------------------------------


@pytest.fixture
def gain() -> Iterator[Wrong]:
    """Make a lowering of Inductor too large by a factor."""
    from torch._inductor.lowering import lowerings

    with pytest.MonkeyPatch.context() as patch:

        def wrong(name: str, by: float) -> None:
            overload = getattr(torch.ops.aten, name).default
            honest, times = lowerings[overload], lowerings[torch.ops.aten.mul.Tensor]
            patch.setitem(lowerings, overload, lambda *args: times(honest(*args), by))

        yield wrong


def found_by(judge: Judge, example: Case) -> DivergenceRecord:
    """Return the last record of the one cause that a case shows."""
    with quiet():
        verdict = judge.judge(example)
        assert verdict.outcome == "backend", example
        steps: list[Step | Met] = list(examine(judge, verdict, Groups(), seconds=0.5))
    (record,) = [s.record for s in steps if isinstance(s, Step) and s.last]
    return record


def shows(op: str, **plan: Any) -> Case:
    """Return a case of one op."""
    return case([x("x0", 4, 3)], call(op, "x0"), **plan)


WAYS = {
    "bare": shows("tanh", contexts=(), backward="none"),
    "autocast": shows("tanh", contexts=(BF16,), backward="none"),
    "gradient": case(
        [x("w0", 4, 3)], call("tanh", "w0"), call("mul", "v0", "v0", to="v1"), contexts=()
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_one_wrong_lowering_comes_to_its_group(gain: Wrong, way: str) -> None:
    gain("tanh", 1.5)
    gain("sin", 1.5)  # which has no part in it
    record = found_by(judge_of(CompileBackend("inductor"), shipped(), "none"), WAYS[way])
    assert (record.part, record.fingerprint) == ("lowerings: tanh", GROUP.hash)


@pytest.mark.slow
def test_another_wrong_lowering_beside_it_is_a_group_of_its_own(gain: Wrong) -> None:
    gain("tanh", 1.5)
    gain("sin", 1.5)
    example = shows("sin", contexts=(), backward="none")
    record = found_by(judge_of(CompileBackend("inductor"), shipped(), "none"), example)
    assert record.part == "lowerings: sin"
    assert record.fingerprint != GROUP.hash


@pytest.mark.slow
def test_a_baseline_knows_a_wrong_lowering_by_its_part(gain: Wrong) -> None:
    entry = entry_of(RECORD, (), reason="waits")
    judge, example = judge_of(CompileBackend("inductor")), RECORD.case
    with quiet():
        assert not happens(judge, entry, judge.judge(example))
        gain("tanh", 1.5)
        assert happens(judge, entry, judge.judge(example))
        other = msgspec.structs.replace(RECORD, part="lowerings: sin")
        assert not happens(judge, entry_of(other, (), reason="waits"), judge.judge(example))
