"""A result of `amp_fuzz.precision` as an HTML page."""

from __future__ import annotations

import linecache
import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from amp_fuzz.interfaces.precision.pasting import statement_at
from amp_fuzz.interfaces.precision.result import (
    PrecisionResult,
    Statement,
    Value,
    digits_in,
    reasons,
    remedies,
    said_of,
)
from amp_fuzz.interfaces.precision.sites import Place
from amp_fuzz.reports.html import rendered
from amp_fuzz.reports.pictures import LEVELS, Cell

__all__ = ["page"]

_MOST = 200  # rows of a table
_NONE = Cell("", 0, "not measured")


def page(result: PrecisionResult) -> str:
    """Return the page: verdict, remedy, values, modules by digits, statements. It loads nothing."""
    values = sorted(result.values, key=lambda v: (not v.harm, v.digits))
    return rendered(
        "precision.html",
        result=result,
        torch=torch.__version__,
        tone=_TONES.get(result.verdict, "bad"),
        sentence=_sentence(result),
        reasons=reasons(result),
        remedies=remedies(result),
        values=[(v, _said(v, result), _digits(v.digits, v.of, result.digits)) for v in values],
        rows=_modules(result),
        columns=_COLUMNS,
        statements=[_Row.of(s, result) for s in result.statements],
        most=_MOST,
        text=_text,
    )


_TONES = {"harmless": "good", "loses digits": "warn", "casts nothing": "warn"}
_COLUMNS = ("forward", "its own", "backward", "its own", "out of range", "become 0")


def _sentence(result: PrecisionResult) -> str:
    count = len(result.harmed)
    harmed = f"{count:,} of {len(result.values):,} values {'is' if count == 1 else 'are'} harmed"
    return {
        "harmless": f"Autocast is harmless: every value keeps {result.digits:.1f} digits",
        "casts nothing": "Autocast casts nothing here",
        "loses digits": f"Autocast loses digits: {harmed}",
    }.get(
        result.verdict,
        f"It breaks under autocast{': ' + harmed if count and not result.raised else ''}",
    )


def _said(value: Value, result: PrecisionResult) -> str:
    return said_of(value, result.digits).removeprefix(value.name).strip()


def _text(digits: float) -> str:
    return "exact" if math.isinf(digits) else f"{digits:.1f}"


def _digits(digits: float, of: float, asked: float) -> Cell:
    """Return a cell: the darker, the fewer digits; red if they are fewer than asked."""
    said = f"{_text(digits)} of {of:.1f} digits" if math.isfinite(digits) else "no error"
    if digits < asked:
        return Cell(_text(digits), LEVELS if digits < asked / 2 else 2, said, over=True)
    lost = 1 - min(digits, of) / of
    level = 0 if math.isinf(digits) else min(LEVELS, 1 + int(LEVELS * lost))
    return Cell(_text(digits), level, said)


def _number(count: int, of: int) -> Cell:
    if not count:
        return Cell("0", 0, "none")
    return Cell(f"{count:,}", LEVELS, f"{count:,} of {of:,} elements", over=True)


def _modules(result: PrecisionResult) -> list[tuple[str, tuple[Cell, ...]]]:
    """Return a row for each submodule, by path: the worst of its statements."""
    names = {s.place.module for s in result.statements}
    of = digits_in(getattr(torch, result.dtype))
    rows = []
    for name in sorted(names, key=_natural):
        own = [s for s in result.statements if s.place.module == name]
        cells: list[Cell] = []
        for backward in (False, True):
            some = [s for s in own if s.backward is backward]
            for kind in ("result", "made"):
                worst = min((getattr(s, kind) for s in some), default=None)
                cells.append(_NONE if worst is None else _digits(worst, of, result.digits))
        total = sum(s.of for s in own)
        cells.append(_number(sum(s.overflowed for s in own), total))
        cells.append(_number(sum(s.flushed for s in own), total))
        rows.append((name or result.name, tuple(cells)))
    return rows


def _natural(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.split(".")]


@dataclass(frozen=True, slots=True)
class _Row:
    """A statement of the table, with its source."""

    statement: Statement
    source: str
    given: Cell
    made: Cell
    result: Cell

    @classmethod
    def of(cls, s: Statement, result: PrecisionResult) -> _Row:
        most, asked = digits_in(getattr(torch, result.dtype)), result.digits
        cells = [_digits(d, most, asked) for d in (s.given, s.made, s.result)]
        return cls(s, _source(s.place), *cells)


@lru_cache(maxsize=512)
def _source(place: Place) -> str:
    node = statement_at(place.file, place.line) if place.file else None
    if node is None:
        return ""
    return " ".join(linecache.getline(place.file, node.lineno).split())
