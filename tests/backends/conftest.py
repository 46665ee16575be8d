"""What tests of several backends share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from amp_fuzz.backends.process import Apart
from amp_fuzz.backends.torchax.backend import Mode, TorchaxBackend


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TorchaxBackend, Path]]:
    """Return torchax, and the file that says which fault it has.

    JAX solves with OpenBLAS, which has kernels for each kind of processor. Where a matrix is
    singular, those for one without AVX-512 have NaN where torch's have infinity.
    """
    file = tmp_path_factory.mktemp("torchax") / "fault"
    file.write_text("")
    process = Apart("tests.faults.torchax:Faulty", Mode(), str(file))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENBLAS_CORETYPE", "Haswell")  # read when the process begins
        yield TorchaxBackend(Mode(), process), file
    process.close()
