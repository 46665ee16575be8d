"""The covered corpus: for each feature, the smallest known case that agreed.

A feature is an autocast kernel that is reached, an op that is called, or an ingredient of the plan.
Each has one case file, ``.amp-fuzz/covered/eager-cpu/kernel-mm.json``, so there are never more than
kernels, ops and ingredients, and the folder of a backend is a corpus like any other. Files are
replaced by a rename. If several processes write one, the last wins, with a case that is as good.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from amp_fuzz.cases.program import statements
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.records.fingerprint import ingredient
from amp_fuzz.records.outputs import write_whole
from amp_fuzz.records.store import Store, StoreError

__all__ = ["Covered", "features"]


def features(verdict: Verdict) -> Iterator[str]:
    """Yield the features of a case, as file names: ``kernel-mm``, ``op-mm``, ``plan-nested``."""
    yield from {_name("kernel", call.overload) for call in verdict.kernels}
    yield from {_name("op", s.op) for s in statements(verdict.case.program.body)}
    yield from {_name("plan", word) for word in ingredient(verdict.case).split("+") if word}


@cache
def _name(sort: str, word: str) -> str:
    return f"{sort}-{re.sub(r'[^A-Za-z0-9_.=-]', '_', word)}"


class Covered:
    """The covered features of one backend, with the smallest case of each.

    New cases are kept in memory until `write`.
    """

    def __init__(self, store: Store, backend: str) -> None:
        self.folder = store.root / "covered" / backend
        self._sizes = _sizes(self.folder)
        self._new: dict[str, bytes] = {}

    def note(self, verdict: Verdict) -> None:
        """Add a case that agreed, if it is the smallest for one of its features."""
        text = b""
        for name in features(verdict):
            text = text or verdict.case.json()
            if len(text) < _LESS * self._sizes.get(name, _NONE):
                self._sizes[name], self._new[name] = len(text), text

    def write(self) -> None:
        """Write the new cases. Raises `StoreError` if that fails."""
        if not self._new:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{self.folder}: cannot make the folder ({error.strerror})") from error
        here = _sizes(self.folder)  # another process may have found a smaller one
        written: dict[bytes, Path] = {}
        for name, text in self._new.items():
            path = self.folder / f"{name}.json"
            if len(text) >= _LESS * here.get(name, _NONE) or _linked(written.get(text), path):
                continue
            write_whole(path, text)
            written[text] = path
        self._new.clear()


_NONE = 1 << 62
# A case replaces another if it is smaller by this much. Rewriting for less would cost more than
# everything else.
_LESS = 0.9


def _linked(first: Path | None, path: Path) -> bool:
    """Link a file to one that was just written, at a third of the cost of writing it."""
    if first is None:
        return False
    temporary = path.with_suffix(f"{path.suffix}.{os.getpid()}")
    try:
        os.link(first, temporary)
        temporary.replace(path)
    except OSError:  # a file system without links, or the other file was replaced
        temporary.unlink(missing_ok=True)
        return False
    return True


def _sizes(folder: Path) -> dict[str, int]:
    """Return the sizes of the case files in a folder, or nothing without a folder."""
    try:
        with os.scandir(folder) as found:
            files = [(f.name, f.stat().st_size) for f in found if f.name.endswith(".json")]
    except OSError:
        return {}
    # A full disk or a killed machine leaves empty files: any case is better.
    return {name.removesuffix(".json"): size or _NONE for name, size in files}
