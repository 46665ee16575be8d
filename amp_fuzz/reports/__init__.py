"""Reports of a run: records -> DataFrames -> text, Markdown, one offline HTML page, CI formats.

Reports read only records, of any run and on any machine. Nothing here imports torch, and pandas is
imported only when a report is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from amp_fuzz.records.outputs import write_whole
from amp_fuzz.records.store import Store, StoreError

if TYPE_CHECKING:
    from amp_fuzz.reports.frames import RunData
    from amp_fuzz.reports.view import Bug, View

__all__ = ["Report", "read", "terminal", "write", "written"]


def read(store: Store, run_id: str, *, known: Sequence[Bug] = ()) -> Report:
    """Read a run once, for all reports of it.

    known: bugs to name in addition to those in the record of the run. Raises `StoreError` if the
    run is missing or its head unreadable; damaged records are left out and mentioned.
    """
    from amp_fuzz.reports.frames import load
    from amp_fuzz.reports.view import view

    data = load(store, run_id)
    return Report(data, view(data, known))


@dataclass(frozen=True, slots=True)
class Report:
    """A run at the time that it was read."""

    data: RunData
    view: View

    def terminal(self, *, width: int | None = None, rows: int = 10) -> str:
        """Return the summary as plain text, to print when the run ends.

        width: in columns, by default the terminal's. rows: of the op x policy x dtypes x backend x
        kind table.
        """
        from amp_fuzz.reports.text import render

        return render(self.view, width=width, rows=rows)

    def write(self, folder: Path = Path("amp-fuzz-report")) -> tuple[Path, ...]:
        """Write the report to a folder in each format and return the paths, report.html first.

        The HTML page is one file that needs no network. docs/reports.md describes the others.
        Raises `StoreError` if the folder cannot be written.
        """
        from amp_fuzz.reports import html, machine, markdown
        from amp_fuzz.reports.frames import summary

        texts = {
            "report.html": html.render(self.view),
            "report.md": markdown.render(self.view),
            "report.json": machine.as_json(self.view),
            "summary.csv": summary(self.data).to_csv(index=False),
            "junit.xml": machine.junit(self.view),
            "code-quality.json": machine.code_quality(self.view),
            "annotations.txt": "".join(f"{line}\n" for line in machine.annotations(self.view)),
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"{folder}: cannot make the report's folder ({error.strerror}): give another"
            ) from error
        for name, text in texts.items():
            write_whole(folder / name, text.encode())
        return tuple(folder / name for name in texts)


def terminal(
    store: Store,
    run_id: str,
    *,
    known: Sequence[Bug] = (),
    width: int | None = None,
    rows: int = 10,
) -> str:
    """`read` a run, and return its summary as `Report.terminal` does."""
    return read(store, run_id, known=known).terminal(width=width, rows=rows)


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
    """Return a line that names the files of a report: the path of the first, then names."""
    first, *others = paths
    with suppress(ValueError):  # it is not below the current folder
        first = first.absolute().relative_to(Path.cwd())
    return f"report: {', '.join([str(first), *(path.name for path in others)])}"
