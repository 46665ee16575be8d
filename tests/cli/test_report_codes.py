"""``amp-fuzz report`` ends with 6 for a run that is not whole, and with 0 for one that is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forks import Done
from tests.unit.test_reports import END, ran, records_file, small_run, store_of

Command = Callable[..., Done]


@pytest.mark.parametrize("found", [False, True])
def test_a_whole_run_is_reported_with_0_whatever_it_found(
    command: Command, tmp_path: Path, found: bool
) -> None:
    store_of(tmp_path, small_run() if found else [ran(), END])
    assert command("report").code == 0


def test_a_run_that_was_killed_is_reported_with_6(command: Command, tmp_path: Path) -> None:
    store_of(tmp_path, [ran()], ended=False)
    done = command("report")
    assert done.code == 6
    assert "THE RUN DID NOT END" in done.out


def test_a_run_with_a_record_that_cannot_be_read_is_reported_with_6(
    command: Command, tmp_path: Path
) -> None:
    store = store_of(tmp_path, [ran(), ran()])
    assert command("report").code == 0
    path = records_file(store)
    path.write_bytes(path.read_bytes().replace(b'"type":"case"', b'"type":"cas"', 1))
    done = command("report")
    assert done.code == 6
    assert "INCOMPLETE: 1 record cannot be read" in done.out
