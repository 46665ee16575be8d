"""Follow the records of a sweep's runs while they are written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from amp_fuzz.records.schema import CaseRecord, DivergenceRecord, IncidentRecord, Record
from amp_fuzz.records.store import Store

__all__ = ["Follower"]

_decoder = msgspec.json.Decoder(Record)
_KINDS = (b'{"type":"case"', b'{"type":"divergence"', b'{"type":"incident"')


class Follower:
    """Reads the lines that were added to a run since it last looked."""

    def __init__(self, store: Store, run: str) -> None:
        self.store, self.run = store, run
        self._read: dict[Path, int] = {}

    def new(self) -> Iterator[CaseRecord | DivergenceRecord | IncidentRecord]:
        """Yield the new records of cases, divergences and incidents; the last line if it is whole.

        A line that cannot be read is left to the report of the run.
        """
        for path in self.store.lines(self.run):
            at = self._read.get(path, 0)
            try:
                if path.stat().st_size <= at:
                    continue
                with path.open("rb") as file:
                    file.seek(at)
                    text = file.read()
            except OSError:  # it is being compacted
                continue
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path] = at + len(whole)
            for line in whole.splitlines():
                if line.startswith(_KINDS):
                    try:
                        record = _decoder.decode(line)
                    except msgspec.MsgspecError:
                        continue
                    if isinstance(record, CaseRecord | DivergenceRecord | IncidentRecord):
                        yield record
