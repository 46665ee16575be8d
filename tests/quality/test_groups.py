"""Several faults at once come out as as many groups; benchmarks/groups.json has ten of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from amp_fuzz.backends.eager import EagerBackend
from amp_fuzz.backends.harness import Observation
from amp_fuzz.cases.case import Case
from amp_fuzz.findings.groups import Groups
from amp_fuzz.records.fingerprint import title
from amp_fuzz.records.schema import CaseRecord
from amp_fuzz.runs import engine
from amp_fuzz.runs.engine import Finding, Settings, Task, draw, explore
from amp_fuzz.upstream import shipped
from tests.faults.many import counts, seeded
from tests.helpers import eager

pytestmark = pytest.mark.thorough

FAULTS = ("linear:fp32", "cat:lower_precision_fp", "mm:none", "cache-flag-not-restored")
OPS = ("linear", "cat", "mm", "relu", "stack", "abs")


@dataclass(frozen=True)
class Wrong(EagerBackend):
    """Eager in a torch with these faults."""

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        with seeded(*FAULTS):
            return EagerBackend.run(self, cases)


@pytest.mark.slow
def test_each_of_four_faults_is_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(("eager-cpu",), ops=OPS, known=shipped(), relations="none")
    task = Task("eager-cpu", "all", ("linear", "cat", "mm"), 100, 3)
    given = tuple(filter(counts, draw(task, settings)))
    monkeypatch.setattr(engine, "backends", lambda: {"eager-cpu": Wrong("cpu")})
    groups, found, cases = Groups(), [], Counter[str]()
    for event in explore(
        Task("eager-cpu", "all", (), len(given), 3, given), settings, groups=groups
    ):
        if isinstance(event, Finding) and event.new:
            found.append(event.record)
        elif isinstance(event, CaseRecord):
            cases.update(event.groups)
    assert sorted(title(r).partition(" as if")[0] for r in found) == [
        "cat behaves",
        "linear behaves",
        "mm behaves",
        "state: weight cache not restored",
    ], [str(r.minimised) for r in found]
    for name, policy in (("cat", "lower_precision_fp"), ("linear", "fp32"), ("mm", "none")):
        (record,) = [r for r in found if r.overload == name]
        assert policy in record.as_if
    assert set(cases) == {r.fingerprint for r in found}
    assert min(cases.values()) >= 2
    # Nearly all are counted, not minimised.
    assert sum(groups.minimised.values()) < sum(cases.values()) / 2


@pytest.mark.slow
def test_honest_torch_has_no_group() -> None:
    settings = Settings(("eager-cpu",), ops=OPS, known=shipped(), relations="none")
    task = Task("eager-cpu", "all", ("linear", "cat", "mm"), 60, 3)
    assert eager().exact
    events = list(explore(task, settings))
    assert not [e for e in events if isinstance(e, Finding) and e.new]
    assert {g for e in events if isinstance(e, CaseRecord) for g in e.groups} == set()
