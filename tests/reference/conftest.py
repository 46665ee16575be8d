"""Every test here starts with torch's autocast as a fresh thread has it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from amp_fuzz.backends.torch_state import reset_state


@pytest.fixture(autouse=True)
def fresh_autocast() -> Iterator[None]:
    """Reset autocast's state before and after: a worker runs tests of other folders too."""
    reset_state("cpu")
    yield
    reset_state("cpu")
