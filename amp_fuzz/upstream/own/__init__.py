"""Bugs of backends that autocast has no part in: data, one file for each family of backends.

A record explains nothing. It names a group of divergences that a backend shows without autocast
too. Its examples tell which torch has the bug: one, unless some versions need another.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import resources

import msgspec

from amp_fuzz.cases.case import Case, loads
from amp_fuzz.upstream.bug import Bug, Example
from amp_fuzz.upstream.harm import Harm

__all__ = ["looks_like", "own_bugs"]


class _Example(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    backend: str
    case: str
    torch: str = ""
    processor: str = ""


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One bug. page: below docs/findings. kinds, ops: of the divergences that look like it."""

    id: str
    what: str
    why: str
    seen: str
    harm: Harm
    page: str
    kinds: tuple[str, ...]
    ops: tuple[str, ...]
    backends: tuple[str, ...]
    torch: str = ">=2.7"
    link: str = ""
    unshown: str = ""
    example: tuple[_Example, ...] = ()


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bug: tuple[_Record, ...]


@cache
def own_bugs() -> tuple[Bug, ...]:
    """Return the record of every bug that is a backend's own."""
    return tuple(_bug(record) for record in _records())


def looks_like(backend: str, kind: str, op: str) -> str:
    """Return the id of the first record that speaks of a divergence of a backend, or "".

    A record of every op says too little to name one.
    """
    found = (bug.entry for bug in own_bugs() if "*" not in bug.ops and bug.entry.on(backend))
    return next((one.id for one in found if one.explains(kind, (op,))), "")


def _records() -> Iterator[_Record]:
    for path in sorted(resources.files(__name__).iterdir(), key=lambda path: path.name):
        if path.name.endswith(".toml"):
            yield from msgspec.convert(tomllib.loads(path.read_text("utf-8")), _File).bug


def _bug(record: _Record) -> Bug:
    examples = tuple(_example(one, f"{record.id}: case") for one in record.example)
    fields = {name: getattr(record, name) for name in record.__struct_fields__ if name != "example"}
    return Bug(**fields, examples=examples, own=True)


def _example(one: _Example, where: str) -> Example:
    case: Case = loads(one.case, where)
    return Example(one.backend, case, torch=one.torch, processor=one.processor)  # type: ignore[arg-type]
