"""The findings that the package lists as open can be used, and accept no more than they name."""

from __future__ import annotations

import pytest

from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.program import statements
from amp_fuzz.catalogue import check
from amp_fuzz.catalogue.core import REGISTRY
from amp_fuzz.findings import recheck
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.records.baseline import Entry
from amp_fuzz.records.schema import OPEN
from amp_fuzz.runs.setup import open_findings
from amp_fuzz.versions import holds
from tests.helpers import WrongKernel, call, case, eager, x

ENTRIES = open_findings().entries


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)
def test_each_open_finding_names_an_op_and_a_backend_that_there_is(entry: Entry) -> None:
    assert entry.id.startswith(OPEN)
    assert entry.op.strip("*")
    assert entry.kind not in ("context", "policy", "state")  # of these the plan matters, not the op
    assert entry.backend in backends()
    program = entry.load().program
    if all(holds(REGISTRY[s.op].torch) for s in statements(program.body)):
        check(program)


@pytest.mark.parametrize(
    ("name", "always", "said"),
    [(f"{OPEN}neg", False, "there"), (f"{OPEN}neg", True, "listed"), ("neg", True, "there")],
)
def test_what_the_backend_does_without_autocast_too_need_not_be_listed_as_open(
    name: str, always: bool, said: str
) -> None:
    """A baseline of the user's may accept it: `--fail-on=backend` reports it."""
    one = case([x("x0", 4, 4)], call("neg", "x0"))
    entry = Entry(name, "", "value", "eager-cpu", "nobody knows", one.json().decode())
    with quiet():
        came = recheck._judged(Judge(WrongKernel(eager(), "neg", always=always)), entry, one)
    assert came.state == said
