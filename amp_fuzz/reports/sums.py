"""The tables of a compacted run, summed up as its JSON lines are: by Arrow, not row by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pandas as pd

from amp_fuzz.records.schema import DIVERGING, Note

if TYPE_CHECKING:
    from amp_fuzz.records.tables import Tables
    from amp_fuzz.reports.frames import Tally

__all__ = ["joined", "summed"]

_KERNEL = ("op", "policy", "dtypes", "outcome", "kind")
_notes = msgspec.json.Decoder(tuple[Note, ...])


def summed(tables: Tables, tally: Tally, columns: Sequence[str]) -> pd.DataFrame | None:
    """Add all but the cases to a tally, and return the cases, or None if there are none.

    The cases have these columns, and the order that `Tally` gives them: first those that agreed.
    """
    for record in tables.others():
        tally.add(record)
    frames, notes = [], []
    for path in tables.files["kernels"]:
        _add_kernels(tables, path, tally)
    for path in tables.files["cases"]:
        _add_cases(tables, path, tally)
        _add_plans(tables, path, tally)
        notes += _notes_of(tables, path)
        frames.append(tables.read(path, ("row", *columns)).to_pandas())
    for _, text, backend, count in sorted(notes):
        tally.annotate(_notes.decode(text), backend, count)
    if not frames:
        return None
    cases = joined(frames)
    late = cases["outcome"].isin(DIVERGING).to_numpy()
    order = np.lexsort((cases.pop("row").to_numpy(), late))
    return cases.iloc[order].reset_index(drop=True)


def joined(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return frames as one, whose categories are those of all, sorted. The frames are used up.

    A column of numbers that a frame lacks is NaN there.
    """
    columns: dict[str, Any] = {}
    sizes = [len(frame) for frame in frames]
    for name in dict.fromkeys(name for frame in frames for name in frame.columns):
        parts = [
            frame.pop(name) if name in frame else pd.Series(np.full(size, np.nan))
            for frame, size in zip(frames, sizes, strict=True)
        ]
        if isinstance(parts[0].dtype, pd.CategoricalDtype):
            columns[str(name)] = pd.api.types.union_categoricals(parts, sort_categories=True)
        else:
            columns[str(name)] = pd.concat(parts, ignore_index=True)
    return pd.DataFrame(columns, copy=False)


def _add_kernels(tables: Tables, path: Path, tally: Tally) -> None:
    table = tables.read(path, ("backend", *_KERNEL, "calls"))
    sums = table.group_by(["backend", *_KERNEL]).aggregate([("calls", "sum"), ([], "count_all")])
    for row in sums.to_pylist():
        of = (row["op"], row["policy"], row["dtypes"], row["backend"], row["outcome"], row["kind"])
        tally.kernels[of] += row["count_all"]
        tally.calls[of] += row["calls_sum"]


def _add_cases(tables: Tables, path: Path, tally: Tally) -> None:
    counted = ("unjudged", "varied", "uncompiled", "excess", "excess_op", "hits")
    for group in tables.groups(path, ("backend", "ops", "seconds", "plan", "promises", *counted)):
        backend = group["backend"][0].as_py()
        plan = group["plan"].combine_chunks()
        cases_of = np.bincount(plan.indices.to_numpy(), minlength=len(plan.dictionary)).tolist()
        for text, number in zip(plan.dictionary.to_pylist(), cases_of, strict=True):
            tally.had[backend, text] += number
        _add_excess(backend, group, tally)
        for op, cases in _called(group["ops"].combine_chunks()):
            tally.ops[backend, op] += cases
        for promise, cases in _called(group["promises"].combine_chunks()):
            tally.promised[backend, promise] += cases
        seconds = group["seconds"].combine_chunks()
        parts, spent = seconds.keys.dictionary_encode(), seconds.items.to_numpy()
        codes = parts.indices.to_numpy()
        for code, part in enumerate(parts.dictionary.to_pylist()):
            tally.parts[backend, part].frombytes(spent[codes == code].tobytes())
        for name in ("unjudged", "varied", "hits"):
            sums = getattr(tally, name)
            values = group[name].to_numpy()
            if some := int(np.count_nonzero(values)):
                before = sums.get(backend, (0, 0))
                sums[backend] = before[0] + int(values.sum()), before[1] + some
        if some := int(np.count_nonzero(group["uncompiled"].to_numpy())):
            tally.uncompiled[backend] += some


def _add_excess(backend: str, group: Any, tally: Tally) -> None:
    excess, ops = group["excess"].to_numpy(), group["excess_op"].combine_chunks()
    measured = excess >= 0
    if not measured.any():
        return
    tally.excess[backend].frombytes(excess[measured].tobytes())
    most = np.full(len(ops.dictionary), -1.0)
    np.maximum.at(most, ops.indices.to_numpy()[measured], excess[measured])
    for op, value in zip(ops.dictionary.to_pylist(), most.tolist(), strict=True):
        if value >= 0:
            tally.reach(backend, op, value)


def _add_plans(tables: Tables, path: Path, tally: Tally) -> None:
    """Count the kernels of a file's cases by plan: a kernel names the row of its case."""
    reached = tables.folder / "kernels" / path.name
    if reached not in tables.files["kernels"]:
        return
    cases = tables.read(path, ("row", "plan"))
    kernels = tables.read(reached, ("case", "at", "op", "policy", "outcome"))
    from amp_fuzz.reports.frames import plan_parts  # which imports this module

    plan = cases["plan"].combine_chunks()
    at = np.searchsorted(cases["row"].to_numpy(), kernels["case"].to_numpy())
    op, policy, outcome = (kernels[n].combine_chunks() for n in ("op", "policy", "outcome"))
    compared = ~np.isin(np.array(outcome.dictionary.to_pylist(), dtype=object), ["elsewhere"])
    kept = compared[outcome.indices.to_numpy()] & (kernels["at"].to_numpy() >= 0)
    ops, policies = op.dictionary.to_pylist(), policy.dictionary.to_pylist()
    keys = op.indices.to_numpy().astype(np.int64) * len(policies) + policy.indices.to_numpy()
    pairs = keys * len(plan.dictionary) + plan.indices.to_numpy()[at]
    found, counts = np.unique(pairs[kept], return_counts=True)
    of, plans = np.divmod(found, len(plan.dictionary))
    parts = [plan_parts(text) for text in plan.dictionary.to_pylist()]
    for word in frozenset[str]().union(*parts):
        has = np.array([word in own for own in parts])[plans]
        sums = np.bincount(of[has], weights=counts[has])
        for key in np.flatnonzero(sums).tolist():
            tally.words[ops[key // len(policies)], policies[key % len(policies)], word] += int(
                sums[key]
            )


def _called(ops: Any) -> Iterator[tuple[str, int]]:
    """Yield each op of a column of lists, with the number of lists that have it."""
    flat = ops.flatten().dictionary_encode()  # which changes nothing that is encoded
    names = flat.dictionary.to_pylist()
    rows = np.repeat(np.arange(len(ops)), np.diff(ops.offsets.to_numpy()))
    keys = np.sort(rows * len(names) + flat.indices.to_numpy())  # faster than `np.unique`
    once = keys[np.diff(keys, prepend=-1) > 0] % max(len(names), 1)
    yield from zip(names, np.bincount(once, minlength=len(names)).tolist(), strict=True)


def _notes_of(tables: Tables, path: Path) -> list[tuple[int, str, str, int]]:
    """Return the different notes of cases: the first row, the text, the backend, the cases."""
    frame = tables.read(path, ("row", "notes", "backend")).filter(tables.valid("notes")).to_pandas()
    found = frame.groupby("notes", sort=False).agg(
        row=("row", "min"), backend=("backend", "first"), cases=("row", "size")
    )
    return [(int(r.row), str(r.Index), str(r.backend), int(r.cases)) for r in found.itertuples()]
