"""The conformance matrix: what `amp_fuzz.audit` finds, as tables and text.

Cells are plain data, and nothing here imports torch.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from amp_fuzz.devices import judging_options
from amp_fuzz.outputs import StoreError, write_whole
from amp_fuzz.program import FLOAT_DTYPES
from amp_fuzz.records import DivergenceRecord

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "AUTOCAST_DTYPES",
    "Cell",
    "describe",
    "differences",
    "frame",
    "markdown",
    "matrix",
    "silent",
    "summary",
    "write",
]

Status: TypeAlias = Literal["agree", "known", "differs"]

AUTOCAST_DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Cell:
    """One call of one op on one backend.

    overload: the first autocast kernel that the op reaches on some device, "" if no table lists
    one. policy: what the device's table says of it, or "none". input_dtypes: of the floating
    inputs, in order. expected, observed: the dtypes that come out under the reference and under
    the backend (``float32``, ``float32, int64``), or ``raises RuntimeError``. kind: the kind of
    divergence, "" if they agree. known: the known entries that explain it. finding: a divergence
    that none explains, for replay and repro.
    """

    device: str
    backend: str
    op: str
    overload: str
    policy: str
    autocast_dtype: str
    input_dtypes: tuple[str, ...]
    expected: str
    observed: str
    status: Status
    kind: str
    known: str
    case_id: str
    finding: DivergenceRecord | None = None

    @property
    def raises(self) -> bool:
        """Whether the backend raised."""
        return self.observed.startswith("raises ")


_ROW = ["op", "overload", "policy"]
_CALL = ["op", "overload", "autocast_dtype", "inputs"]


def frame(cells: Iterable[Cell]) -> pd.DataFrame:
    """Return a row for each cell, in a fixed order; `inputs` are the input dtypes, joined."""
    import pandas as pd

    fields = [f for f in Cell.__slots__ if f != "finding"]
    ordered = sorted(cells, key=_place)
    table = pd.DataFrame([{f: getattr(c, f) for f in fields} for c in ordered], columns=fields)
    table["input_dtypes"] = table["input_dtypes"].map(", ".join)
    return table.rename(columns={"input_dtypes": "inputs"})


def _place(cell: Cell) -> tuple[object, ...]:
    dtypes = tuple(FLOAT_DTYPES.index(dtype) for dtype in cell.input_dtypes)
    return cell.op, cell.backend, AUTOCAST_DTYPES.index(cell.autocast_dtype), dtypes


def matrix(cells: Iterable[Cell]) -> pd.DataFrame:
    """Return the conformance matrix: op, overload and policy by backend.

    An entry is ``32`` if all of 32 cells agree, ``30/32, 2 known`` if two do not but are explained,
    ``30/32`` if they are not; "" where the op has no kernel, or another policy, on the device.
    """
    table = frame(cells)
    shown = table.groupby([*_ROW, "backend"])["status"].agg(_share)
    return shown.unstack("backend").fillna("")


def _share(statuses: pd.Series[str]) -> str:
    counts = Counter(statuses)
    total, agree, known = len(statuses), counts["agree"], counts["known"]
    if agree == total:
        return str(total)
    return f"{agree}/{total}" + (f", {known} known" if known else "")


def differences(cells: Iterable[Cell]) -> pd.DataFrame:
    """Return the calls that come out otherwise on one backend than on another: facts, not faults.

    Rows are op, overload, autocast dtype and input dtypes; columns are backends, with the dtype
    that came out or what was raised, and "" where the backend has no such cell. A fake device has
    no kernels, so it does not raise where a real one lacks a kernel for the dtype; where it raises
    because it is fake, it says nothing.
    """
    import pandas as pd

    table = frame(cells)
    unknown = table["observed"].isin(_FAKE_ERRORS) & table["backend"].str.startswith("fake-")
    table["observed"] = table["observed"].mask(unknown)
    wide = table.pivot(index=_CALL, columns="backend", values="observed")
    wide = wide.reindex(pd.MultiIndex.from_frame(table[_CALL].drop_duplicates()))
    return wide[wide.nunique(axis=1) > 1].fillna("")


# What fake tensors raise where an op needs values, or has no fake kernel.
_FAKE_ERRORS = (
    "raises AssertionError",
    "raises DataDependentOutputException",
    "raises DynamicOutputShapeException",
    "raises FakeTensorDeviceMismatchError",
    "raises NotImplementedError",
)


def silent(cells: Iterable[Cell]) -> dict[str, list[str]]:
    """Return, for each backend, the ops that raise in every cell, so that no dtype is seen."""
    speaks: dict[tuple[str, str], bool] = {}
    for cell in cells:
        key = cell.backend, cell.op
        speaks[key] = speaks.get(key, False) or not cell.raises
    found: dict[str, list[str]] = {}
    for (backend, op), said in speaks.items():
        if not said:
            found.setdefault(backend, []).append(op)
    return {backend: sorted(ops) for backend, ops in found.items()}


def summary(cells: Sequence[Cell], tables: Path | None = None) -> str:
    """Return what the terminal shows: counts, what is known, what differs, and what to type next.

    tables: where `write` put the tables.
    """
    names = list(dict.fromkeys(c.backend for c in cells))
    width = max(map(len, names), default=0)
    lines = [f"{'':{width}}    cells    agree    raise    known   differ"]
    for name in names:
        row = _counts(c for c in cells if c.backend == name)
        lines.append(f"{name:{width}}" + "".join(f"{n:9,}" for n in (sum(row), *row)))
    agree, both, explained, differ = _counts(cells)
    ops = len({c.op for c in cells})
    lines.append(
        f"{len(cells):,} cells of {ops} ops: {agree:,} agree, {both:,} raise on both sides, "
        f"{explained:,} known, {differ:,} differ"
    )
    known = Counter(c.known for c in cells if c.known)
    lines += [f"known: {name} ({n:,} cells)" for name, n in sorted(known.items())]
    differing = [c for c in cells if c.status == "differs"]
    for cell in differing[:_SHOWN]:
        lines.append(f"differs: {describe(cell)}")
        lines.append(
            f"         {shlex.join(['amp-fuzz', 'repro', cell.case_id, *judging_options()])}"
        )
    if len(differing) > _SHOWN:
        lines.append(f"and {len(differing) - _SHOWN:,} more, all in the tables")
    if tables is None:
        lines.append("for the tables: amp-fuzz audit --report=FOLDER")
    else:
        lines.append(f"tables: {tables / 'audit.md'}, {tables / 'audit.csv'}")
    return "\n".join(lines)


_SHOWN = 20


def _counts(cells: Iterable[Cell]) -> tuple[int, int, int, int]:
    """Return how many agree on a result, raise on both sides, are known, and differ."""
    counts = Counter("raise" if c.status == "agree" and c.raises else c.status for c in cells)
    return counts["agree"], counts["raise"], counts["known"], counts["differs"]


def describe(cell: Cell) -> str:
    """Return a cell that does not agree as one line."""
    inputs = ", ".join(cell.input_dtypes) or "no floating input"
    what = f"{cell.expected} expected, {cell.observed} observed"
    if cell.expected == cell.observed:
        what = f"{cell.kind}, {cell.observed}"
    return f"{cell.backend} {cell.op}({inputs}) under {cell.autocast_dtype}: {what}"


def markdown(cells: Sequence[Cell]) -> str:
    """Return the summary, the matrix and the comparison of devices as a Markdown page."""
    found = differences(cells)
    plain = found[[_is_plain(*key) for key in found.index]]
    ops = found.index.get_level_values("op").nunique()
    return _PAGE.format(
        torch=version("torch"),
        summary=summary(cells, Path()),
        matrix=_table_text(matrix(cells)),
        silent="\n".join(f"- {name}: {', '.join(ops)}" for name, ops in silent(cells).items()),
        compared=f"{len(found):,} calls of {ops} ops",
        plain=_table_text(plain),
    )


_PAGE = """\
# Conformance of autocast, torch {torch}

```text
{summary}
```

## Matrix

Cells that agree with the reference, by backend. `32`: all of 32. `30/32, 2 known`: two do not, and
are explained; `30/32`: two do not. Empty: no kernel, or another policy, on that device.

{matrix}

These ops raise in every cell, so nothing is said of their dtypes. A fake device raises where an op
needs values or has no fake kernel.

{silent}

## Devices compared

{compared} come out otherwise on one device than on another. These are facts, not faults. Here are
those with one dtype for all floating inputs, under bfloat16; audit.csv has all. A fake device has
no kernels, so it does not raise where a real one lacks a kernel for a dtype; where it raises
because it is fake, the entry is empty.

{plain}
"""


def _is_plain(op: str, overload: str, autocast_dtype: str, inputs: str) -> bool:
    return autocast_dtype == "bfloat16" and len(set(inputs.split(", "))) == 1


def _table_text(table: pd.DataFrame) -> str:
    names = [str(name) for name in (*table.index.names, *table.columns)]
    lines = [names, ["---"] * len(names)]
    lines += [
        [*map(str, key), *map(str, row)] for key, row in zip(table.index, table.values, strict=True)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(cells: Sequence[Cell], folder: Path) -> tuple[Path, Path]:
    """Write audit.md and audit.csv, which has a row for each cell. Raises `StoreError`."""
    page, table = folder / "audit.md", folder / "audit.csv"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{folder}: cannot make the folder ({error.strerror})") from error
    write_whole(page, markdown(cells).encode())
    write_whole(table, frame(cells).to_csv(index=False).encode())
    return page, table
