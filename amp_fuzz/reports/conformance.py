"""The conformance matrix: what `amp_fuzz.runs.audit` finds, as tables and text.

Cells are plain data, and nothing here imports torch.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

from amp_fuzz.cases.program import FLOAT_DTYPES
from amp_fuzz.config import judging_options
from amp_fuzz.records.outputs import StoreError, write_whole
from amp_fuzz.records.schema import DivergenceRecord
from amp_fuzz.records.store import write_finding
from amp_fuzz.reports.printable import plural

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "AUTOCAST_DTYPES",
    "STATUSES",
    "Audit",
    "Cell",
    "Status",
    "audited",
    "compared",
    "counted",
    "describe",
    "differences",
    "frame",
    "markdown",
    "matrix",
    "missing",
    "not_judged",
    "replay_command",
    "summary",
    "write",
]

Status: TypeAlias = Literal["agree", "raise", "own", "known", "differs"]

STATUSES: tuple[Status, ...] = get_args(Status)
AUTOCAST_DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Cell:
    """One call of one op on one backend.

    overload: the first autocast kernel that the op reaches on some device, "" if no table lists
    one. policy: its policy in the device's table, or "none". call: its source. shapes: of its
    inputs. input_dtypes: of the floating inputs, in order. expected, observed: the result dtypes
    under the reference and under the backend (``float32``, ``float32, int64``), or
    ``raises RuntimeError``. status: ``agree`` on a result, ``raise`` if both raise the same,
    ``own`` if it differs in the same way without autocast.
    kind: the kind of divergence, "" if there is none. known: the known entries that explain it.
    finding: the divergence, for replay and repro.
    """

    device: str
    backend: str
    op: str
    overload: str
    policy: str
    call: str
    shapes: str
    autocast_dtype: str
    input_dtypes: tuple[str, ...]
    expected: str
    observed: str
    status: Status
    kind: str
    known: str
    case_id: str
    finding: DivergenceRecord | None = None


_ROW = ["op", "overload", "policy"]
_CALL = ["op", "overload", "call", "shapes", "autocast_dtype", "inputs"]


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
    call = cell.call, cell.shapes
    return cell.op, cell.backend, *call, AUTOCAST_DTYPES.index(cell.autocast_dtype), dtypes


def matrix(cells: Iterable[Cell]) -> pd.DataFrame:
    """Return the conformance matrix: op, overload and policy by backend.

    An entry counts cells by status: ``20 agree, 12 raise``, or ``18 agree, 12 raise, 2 known``.
    "" if the op has no kernel on the device, or another policy.
    """
    table = frame(cells)
    shown = table.groupby([*_ROW, "backend"])["status"].agg(_share)
    return shown.unstack("backend").fillna("")


def _share(statuses: pd.Series[str]) -> str:
    counts = Counter(statuses)
    return ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])


def differences(cells: Iterable[Cell]) -> pd.DataFrame:
    """Return the calls whose results differ between backends: facts, not faults.

    Rows are calls with their dtypes, one dtype or several. Columns are backends, with the result
    dtype or the error, or "" if the backend has no such cell. A fake device has no kernels, so it
    does not raise where a real one lacks a kernel for the dtype. If it raises because it is fake,
    the entry is "".
    """
    return _differences(frame(cells))


def _differences(table: pd.DataFrame) -> pd.DataFrame:
    import pandas as pd

    unknown = table["observed"].isin(_FAKE_ERRORS) & table["backend"].str.startswith("fake-")
    wide = table.assign(observed=table["observed"].mask(unknown))
    wide = wide.pivot(index=_CALL, columns="backend", values="observed")
    wide = wide.reindex(pd.MultiIndex.from_frame(table[_CALL].drop_duplicates()))
    return wide[wide.nunique(axis=1) > 1].fillna("")


# The errors of fake tensors if an op needs values, or has no fake kernel.
_FAKE_ERRORS = (
    "raises AssertionError",
    "raises DataDependentOutputException",
    "raises DynamicOutputShapeException",
    "raises FakeTensorDeviceMismatchError",
    "raises NotImplementedError",
)


def compared(cells: Sequence[Cell]) -> pd.DataFrame:
    """Return a summary of `differences`: a row for each op and combination of results.

    Under one autocast dtype, separately for inputs of one dtype and of several, a row has the
    number of such calls, and the first. Ops that raise on one device and run on another come first.
    """
    return _compared(frame(cells))


def _compared(table: pd.DataFrame) -> pd.DataFrame:
    import pandas as pd

    found = _differences(table)
    under = next((d for d in AUTOCAST_DTYPES if (table["autocast_dtype"] == d).any()), "")
    rows: dict[tuple[object, ...], dict[str, object]] = {}
    for key, outcomes in zip(found.index, found.to_numpy().tolist(), strict=True):
        call = dict(zip(_CALL, key, strict=True))
        if call["autocast_dtype"] != under:
            continue
        mixed = len(set(call["inputs"].split(", "))) > 1
        shown = {"op": call["op"], "call": call["call"], "inputs": call["inputs"], "calls": 0}
        way = call["op"], mixed, *outcomes
        row = rows.setdefault(way, shown | dict(zip(found.columns, outcomes, strict=True)))
        row["calls"] = int(str(row["calls"])) + 1
    ordered = sorted(rows.items(), key=lambda item: (not _portable(item[0][2:]), item[0][:2]))
    ways = pd.DataFrame([row for _, row in ordered], columns=[*_SHOWN_CALL, *found.columns])
    return ways.set_index(["op", "call"])


_SHOWN_CALL = ["op", "call", "inputs", "calls"]


def _portable(outcomes: Iterable[object]) -> bool:
    """Return whether one backend raises where another has a result."""
    said = [str(outcome).startswith("raises ") for outcome in outcomes if outcome]
    return any(said) and not all(said)


def not_judged(cells: Iterable[Cell]) -> dict[str, list[str]]:
    """Return, for each backend, the ops that raise on both sides in every cell.

    A banned op must raise, so it is judged.
    """
    judged: dict[tuple[str, str], bool] = {}
    for cell in cells:
        key = cell.backend, cell.op
        says = cell.status != "raise" or cell.policy == "banned"
        judged[key] = judged.get(key, False) or says
    found: dict[str, list[str]] = {}
    for (backend, op), said in judged.items():
        if not said:
            found.setdefault(backend, []).append(op)
    return {backend: sorted(ops) for backend, ops in found.items()}


class Call(NamedTuple):
    """A way in which the calls of an op come out, under one autocast dtype.

    call, inputs: the first such call, and the dtypes of its inputs. calls: how many come out so.
    results: the dtype or the error on each backend; "" if it has no such call.
    """

    op: str
    call: str
    inputs: str
    calls: int
    results: tuple[str, ...]


class Audit(NamedTuple):
    """The conformance matrix of an audit. made: the day of its file, in ISO 8601.

    columns: backend and autocast dtype. totals: the calls by status, for each column. rows: an op
    with its calls by status, for each column; those that differ first. backends: those that have a
    call whose results differ. apart: these calls; those that raise on one backend only first.
    differ: how many calls that are, of how many ops.
    """

    made: str
    columns: tuple[tuple[str, str], ...]
    totals: tuple[Counter[str], ...]
    rows: tuple[tuple[str, tuple[Counter[str], ...]], ...]
    backends: tuple[str, ...] = ()
    apart: tuple[Call, ...] = ()
    differ: tuple[int, int] = (0, 0)


def audited(folder: Path) -> Audit | None:
    """Return the matrix of the audit that was written to a folder, or None if there is none."""
    import pandas as pd

    path, fields = folder / "audit.csv", ["backend", "status", "observed", *_CALL]
    try:
        table = pd.read_csv(path, usecols=fields, dtype=str, keep_default_na=False)[fields]
        made = datetime.fromtimestamp(path.stat().st_mtime, UTC).date().isoformat()
    except (OSError, ValueError):  # none, or another program's
        return None
    columns = tuple(sorted({*zip(table["backend"], table["autocast_dtype"], strict=True)}))
    found: dict[str, dict[tuple[str, str], Counter[str]]] = {}
    cells = table[["op", "backend", "autocast_dtype", "status"]]
    for op, backend, dtype, status in cells.itertuples(index=False, name=None):
        found.setdefault(op, {c: Counter() for c in columns})[backend, dtype][status] += 1
    rows = [(op, tuple(cells.values())) for op, cells in found.items()]
    totals = tuple(
        sum(of, Counter[str]()) for of in zip(*(cells for _, cells in rows), strict=True)
    )
    ways, differ = _compared(table).reset_index(), _differences(table)
    apart = [
        Call(op, call, inputs, int(calls), tuple(results))
        for op, call, inputs, calls, *results in ways.to_numpy().tolist()
    ]
    return Audit(
        made,
        columns,
        totals,
        tuple(sorted(rows, key=_worst)),
        tuple(ways.columns[4:]),
        tuple(apart),
        (len(differ), int(differ.index.get_level_values("op").nunique())),
    )


def counted(counts: Mapping[str, int]) -> str:
    """Return calls by status, the worst first: ``1 differs, 1 agree``; "" for none."""
    order = ("differs", "known", "own", "agree", "raise")
    return ", ".join(f"{counts[status]:,} {status}" for status in order if counts[status])


def _worst(row: tuple[str, tuple[Counter[str], ...]]) -> tuple[int, int, str]:
    op, cells = row
    return -sum(c["differs"] for c in cells), -sum(c["known"] for c in cells), op


def summary(cells: Sequence[Cell], folder: Path, notes: Iterable[str] = ()) -> str:
    """Return the terminal text: counts, known cells, cells that differ, and the next command.

    folder: where `write` put the tables. notes: lines on the ops without a cell.
    """
    names = list(dict.fromkeys(c.backend for c in cells))
    width = max(map(len, names), default=0)
    lines = [f"{'':{width}}    cells    agree  both raise      own    known   differ"]
    for name in names:
        row = _counts(c for c in cells if c.backend == name)
        agree, both, *rest = row
        line = f"{sum(row):9,}{agree:9,}{both:12,}" + "".join(f"{n:9,}" for n in rest)
        lines.append(f"{name:{width}}{line}")
    agree, both, own, explained, differ = _counts(cells)
    ops = len({c.op for c in cells})
    lines.append(
        f"{plural(len(cells), 'cell')} of {plural(ops, 'op')}: {agree:,} agree, {both:,} raise "
        f"the same on both sides, {own:,} own, {explained:,} known, "
        f"{differ:,} differ"
    )
    lines += [
        f"not judged on {name}: {_listed(ops)}: both sides raise in every cell"
        for name, ops in not_judged(cells).items()
    ]
    lines += notes
    for title, groups in (
        ("without autocast too", _by_op(cells, "own")),
        ("known", _by_entry(cells)),
        ("differs", _by_op(cells)),
    ):
        for name, group in groups[:_SHOWN]:
            lines.append(f"{title}: {name} ({plural(len(group), 'cell')})")
            lines.append(f"{' ' * len(title)}  {replay_command(group[0], folder)}")
        if len(groups) > _SHOWN:
            lines.append(f"and {len(groups) - _SHOWN:,} more, all in the tables")
    lines.append(f"tables: {folder / 'audit.md'}, {folder / 'audit.csv'}")
    return "\n".join(lines)


_SHOWN = 20
_NAMED = 6


def _listed(ops: Sequence[str]) -> str:
    """Return the number of ops, and the names of the first few."""
    more = f" and {len(ops) - _NAMED:,} more" if len(ops) > _NAMED else ""
    return f"{plural(len(ops), 'op')} ({', '.join(ops[:_NAMED])}{more})"


def missing(backend: str, reasons: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line for each reason why ops have no cell on a backend."""
    return [f"no cell on {backend}: {_listed(ops)}: {why}" for why, ops in reasons.items()]


def _by_entry(cells: Iterable[Cell]) -> list[tuple[str, list[Cell]]]:
    return sorted(_grouped((c.known, c) for c in cells if c.status == "known").items())


def _by_op(cells: Iterable[Cell], status: Status = "differs") -> list[tuple[str, list[Cell]]]:
    """Group the cells that differ by backend, op and kind; the first cell names the group."""
    found = _grouped((f"{c.backend} {c.op} {c.kind}", c) for c in cells if c.status == status)
    return [(describe(group[0]), group) for group in found.values()]


def _grouped(pairs: Iterable[tuple[str, Cell]]) -> dict[str, list[Cell]]:
    found: dict[str, list[Cell]] = {}
    for name, cell in pairs:
        found.setdefault(name, []).append(cell)
    return found


def _counts(cells: Iterable[Cell]) -> tuple[int, ...]:
    """Return how many cells have each status, in the order of `STATUSES`."""
    counts = Counter(c.status for c in cells)
    return tuple(counts[status] for status in STATUSES)


def replay_command(cell: Cell, folder: Path) -> str:
    """Return the command that judges a cell again."""
    path = os.fspath(cell_path(cell, folder))
    return shlex.join(["amp-fuzz", "replay", path, *judging_options()])


def cell_path(cell: Cell, folder: Path) -> Path:
    """Return the file of a cell that does not agree. Backends share the ids of cases."""
    return folder / "cells" / f"{cell.backend}-{cell.case_id}.json"


def describe(cell: Cell) -> str:
    """Return a cell that does not agree as one line."""
    inputs = ", ".join(cell.input_dtypes) or "no floating input"
    what = f"{cell.expected} expected, {cell.observed} observed"
    if cell.expected == cell.observed:
        what = f"{cell.kind}, {cell.observed}"
    return f"{cell.backend} {cell.op}({inputs}) under {cell.autocast_dtype}: {what}"


def markdown(cells: Sequence[Cell], folder: Path, notes: Sequence[str] = ()) -> str:
    """Return the summary, the matrix and the comparison of devices as a Markdown page."""
    found = differences(cells)
    silent = not_judged(cells)
    names = sorted({cell.backend for cell in cells})
    return _PAGE.format(
        torch=version("torch"),
        summary=summary(cells, folder, notes),
        matrix=_table_text(matrix(cells)),
        silent="\n".join(f"- {name}: {', '.join(ops)}" for name, ops in silent.items())
        or "None: each op has a cell with a result.",
        compared=_COMPARED.format(
            calls=plural(len(found), "call"),
            ops=plural(found.index.get_level_values("op").nunique(), "op"),
            table=_table_text(compared(cells)),
        )
        if len(names) > 1
        else f"Only {names[0] if names else 'nothing'} was audited: name more with `--backends`.",
    )


_PAGE = """\
# Conformance of autocast, torch {torch}

```text
{summary}
```

A cell is one call with one combination of input dtypes. `agree`: the reference and the backend have
the same dtypes, shapes and bits. `raise`: both raise the same error. `own`: they differ, and in the
same way without autocast. `known`: they differ, and an entry of the known list explains it.
`differs`: they differ, and nothing explains it. audit.csv has a row for each cell; for a cell that
does not agree, its column `replay` has the command that runs it again.

## Matrix

Cells by status, for each op and backend. Empty: no kernel, or another policy, on that device.

{matrix}

## Not judged

Both sides raise in every cell of these ops: their policies are not tested there. A fake device
raises where an op needs values or has no fake kernel.

{silent}

## Devices compared

{compared}
"""

_COMPARED = """\
{calls} of {ops} come out otherwise on one device than on another. These are facts about the
devices, not faults of them: a program that makes such a call is not portable. Cast the inputs of
the call yourself, or run it with autocast disabled, and it does the same everywhere.

A row is an op and one way to come out under the first autocast dtype, apart for inputs of one dtype
and of several: the first call that comes out so, and how many do. Ops that raise on one device and
run on another come first. audit.csv has every call. A fake device has no kernels, so it does not
raise where a real one lacks a kernel for a dtype; where it raises because it is fake, the entry is
empty.

{table}"""


def _table_text(table: pd.DataFrame) -> str:
    names = [str(name) for name in (*table.index.names, *table.columns)]
    lines = [names, ["---"] * len(names)]
    lines += [
        [*map(str, key), *map(str, row)] for key, row in zip(table.index, table.values, strict=True)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(cells: Sequence[Cell], folder: Path, notes: Sequence[str] = ()) -> tuple[Path, Path]:
    """Write audit.md, audit.csv (a row for each cell), and a file for each that does not agree.

    Raises `StoreError`.
    """
    page, table = folder / "audit.md", folder / "audit.csv"
    odd = [cell for cell in cells if cell.finding is not None]
    try:
        (folder / "cells" if odd else folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{folder}: cannot make the folder ({error.strerror})") from error
    for cell in odd:
        if cell.finding is not None:
            write_finding(cell_path(cell, folder), cell.finding)
    rows = frame(cells)
    commands = {(c.backend, c.case_id): replay_command(c, folder) for c in odd}
    keys = zip(rows["backend"], rows["case_id"], strict=True)
    rows["replay"] = [commands.get(key, "") for key in keys]
    write_whole(page, markdown(cells, folder, notes).encode())
    write_whole(table, rows.to_csv(index=False).encode())
    return page, table
