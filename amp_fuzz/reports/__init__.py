"""Reports of a run: records -> DataFrames -> text, Markdown, one offline HTML page, CI formats.

Reports read only records, of any run and on any machine. Nothing here imports torch, and pandas is
imported only when a report is made.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from amp_fuzz.records.lives import history
from amp_fuzz.records.outputs import write_whole
from amp_fuzz.records.store import Store, StoreError

if TYPE_CHECKING:
    import pandas as pd

    from amp_fuzz.records.rows import Table
    from amp_fuzz.records.schema import DivergenceRecord
    from amp_fuzz.reports.frames import RunData
    from amp_fuzz.reports.trend import Numbers
    from amp_fuzz.reports.view import Bug, FindingView, View

__all__ = ["Report", "load", "read", "terminal", "write", "written"]


def load(path: str | Path, table: Table = "cases") -> pd.DataFrame:
    """Return a run, or all runs of a store, as one DataFrame.

    Reads JSON lines, and what `amp-fuzz store compact` made of them, alike. Parquet needs pyarrow
    (``pip install 'amp-fuzz[parquet]'``). docs/reference/store.md documents each column.

    Args:
        path: the folder of a run (``.amp-fuzz/runs/ID``) or of a store (``.amp-fuzz``), or a URL of
            one that fsspec reads (``s3://``, ``gs://``, ``memory://``), with its package installed.
            Only the files that the table needs are copied, into a temporary folder.
        table: ``cases``: one row for each case and backend. ``kernels``: one row for each autocast
            kernel that a case reached; `case` is the `row` of the case in its run. ``findings``:
            one row for each divergence, note, incident, end and unreadable line, with its whole
            record as JSON.

    Returns:
        The rows in the order of runs, then of records. Words with few values (``run``, ``backend``,
        ``family``, ``outcome``, ``kind``, ``op``, ``policy``, ``dtypes``, ``known``, ``groups``,
        ``platform``, ``type``, ``fingerprint``) are categories, which are sorted; other text is
        ``str`` (``object`` before pandas 3); numbers are ``int64``, flags ``bool``. ``seconds`` and
        ``seconds_PART`` are ``float64`` seconds of wall time, NaN where a part did not run. ""
        stands for what a row has not. A store without runs gives no rows.

    Raises:
        StoreError: there is no such table, run or store; a URL or file cannot be read; a run or a
            table was written by a newer amp-fuzz; pyarrow or fsspec is missing. One line.
    """
    from amp_fuzz.reports.loading import load

    return load(path, table)


def read(store: Store, run_id: str, *, known: Sequence[Bug] = ()) -> Report:
    """Read a run once, for all reports of it.

    known: bugs to name in addition to those in the record of the run. Raises `StoreError` if the
    run is missing or its head unreadable; damaged records are left out and mentioned.
    """
    from amp_fuzz.reports.frames import load
    from amp_fuzz.reports.trend import trend
    from amp_fuzz.reports.view import view

    data = load(store, run_id)
    seen = view(data, known)
    unread: list[str] = []
    causes = [*_findings(store), *(f.record for f in (*seen.new, *seen.own))]
    steps, told = history(store, causes, until=run_id, unread=unread)
    runs = trend(store, steps, run_id, _numbers(seen))

    def lived(findings: Sequence[FindingView]) -> tuple[FindingView, ...]:
        lives = [told.get((f.record.backend, f.id)) for f in findings]
        return tuple(
            replace(f, life=str(life)) if life is not None and life.first.run != run_id else f
            for f, life in zip(findings, lives, strict=True)
        )

    new, own = lived(seen.new), lived(seen.own)
    left_out = f"earlier runs that cannot be read: {len(unread)}: {unread[0]}" if unread else ""
    notes = (*seen.notes, left_out) if left_out else seen.notes
    return Report(data, replace(seen, new=new, own=own, notes=notes, trend=runs))


def _findings(store: Store) -> Iterator[DivergenceRecord]:
    for name in store.findings():
        with suppress(StoreError):  # damaged, or of a newer amp-fuzz: `list findings` says so
            yield store.finding(name)


@dataclass(frozen=True, slots=True)
class Report:
    """A run at the time that it was read."""

    data: RunData
    view: View

    def terminal(self, *, width: int | None = None, rows: int = 10, verbose: bool = False) -> str:
        """Return the summary as plain text, to print when the run ends.

        width: in columns, by default the terminal's. verbose: with kernels, known findings, notes
        and a table of op x policy x dtypes x backend x kind, of so many rows.
        """
        from amp_fuzz.reports.text import render

        return render(self.view, width=width, rows=rows, verbose=verbose)

    def write(self, folder: Path = Path("amp-fuzz-report")) -> tuple[Path, ...]:
        """Write the report to a folder in each format and return the paths, report.html first.

        The HTML pages need no network; those that report.html links to are not among the paths.
        docs/reference/reports.md describes the others. The numbers for the trend of later reports
        are kept in the folder of a run that has ended.
        Raises `StoreError` if the folder cannot be written.
        """
        from amp_fuzz.reports import html, machine, markdown
        from amp_fuzz.reports.conformance import audited
        from amp_fuzz.reports.frames import summary
        from amp_fuzz.reports.trend import keep

        audit = audited(folder)
        pages = html.pages(self.view, audit)
        texts = {
            "report.html": pages.pop("report.html"),
            "report.md": markdown.render(self.view, audit),
            "report.json": machine.as_json(self.view, audit),
            "summary.csv": summary(self.data).to_csv(index=False),
            "junit.xml": machine.junit(self.view),
            "code-quality.json": machine.code_quality(self.view),
            "annotations.txt": "".join(f"{line}\n" for line in machine.annotated(self.view)),
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"{folder}: cannot make the report's folder ({error.strerror}): give another"
            ) from error
        for name, text in (texts | pages).items():
            write_whole(folder / name, text.encode())
        for path in folder.glob("*.html"):  # side pages of an earlier report
            if re.fullmatch(_SIDE, path.name) and path.name not in pages:
                path.unlink()
        if self.data.state == "ended":
            keep(self.data.store, self.data.run.id, _numbers(self.view))
        return tuple(folder / name for name in texts)


def _numbers(seen: View) -> dict[str, Numbers]:
    """Return what a later report shows of the backends that ran."""
    from amp_fuzz.reports.trend import Numbers

    ran = [b for b in seen.backends if b.cases]
    return {b.name: Numbers(b.cases, b.rate, b.reached, b.reachable) for b in ran}


_SIDE = r"(?:ops|tested|promises|devices|conformance|findings-\d+)\.html"


def terminal(
    store: Store,
    run_id: str,
    *,
    known: Sequence[Bug] = (),
    width: int | None = None,
    rows: int = 10,
    verbose: bool = False,
) -> str:
    """`read` a run, and return its summary as `Report.terminal` does."""
    return read(store, run_id, known=known).terminal(width=width, rows=rows, verbose=verbose)


def write(
    store: Store,
    run_id: str,
    folder: Path = Path("amp-fuzz-report"),
    *,
    known: Sequence[Bug] = (),
) -> tuple[Path, ...]:
    """`read` a run, and write its report as `Report.write` does."""
    return read(store, run_id, known=known).write(folder)


def written(paths: Sequence[Path]) -> str:
    """Return a line that names the first file of a report."""
    first = paths[0]
    with suppress(ValueError):  # it is not below the current folder
        first = first.absolute().relative_to(Path.cwd())
    return f"report: {first} (and for CI: report.md, report.json, junit.xml, ...)"
