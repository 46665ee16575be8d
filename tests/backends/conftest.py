"""What tests of several backends share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from amp_fuzz.backends.apart import Apart
from amp_fuzz.backends.torchax import Mode, TorchaxBackend


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TorchaxBackend, Path]]:
    """Return torchax, and the file that says which fault it has."""
    file = tmp_path_factory.mktemp("torchax") / "fault"
    file.write_text("")
    process = Apart("tests.faults.torchax:Faulty", Mode(), str(file))
    yield TorchaxBackend(Mode(), process), file
    process.close()
