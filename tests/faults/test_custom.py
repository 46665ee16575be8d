"""Faults of custom functions and ops are found, and minimised to one or two statements."""

from __future__ import annotations

import pytest

from amp_fuzz.cases.program import statements
from tests.faults.custom import CUSTOM, hunted


@pytest.mark.slow
@pytest.mark.parametrize("name", CUSTOM)
def test_a_fault_of_a_custom_function_is_found_and_gets_small(name: str) -> None:
    found = hunted(CUSTOM[name])
    assert found is not None
    small = list(statements(found.small.program.body))
    assert 1 <= len(small) <= 2
    assert CUSTOM[name].op in {statement.op for statement in small}
