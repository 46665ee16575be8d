"""What a run came to: records -> DataFrames -> terminal text, Markdown, one offline HTML page.

Reports read records only, of any run and on any machine: nothing here imports torch, and pandas is
imported when a report is made, not before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from amp_fuzz.known import Known, shipped
from amp_fuzz.store import Store, StoreError, write_whole

__all__ = ["terminal", "write"]


def terminal(
    store: Store,
    run_id: str,
    *,
    known: Sequence[Known] | None = None,
    width: int | None = None,
    rows: int = 10,
) -> str:
    """Return the summary of a run as plain text, to print when it ends.

    known: the list that explains known findings, by default the one that is shipped. width: in
    columns, by default the terminal's. rows: of the op x policy x dtypes x backend x kind table.
    Raises `StoreError` if the run is missing or its head unreadable; damaged records are left out
    and mentioned.
    """
    from amp_fuzz.reports.frames import load
    from amp_fuzz.reports.text import render
    from amp_fuzz.reports.view import view

    return render(view(load(store, run_id), _or_shipped(known)), width=width, rows=rows)


def write(
    store: Store,
    run_id: str,
    folder: Path = Path("amp-fuzz-report"),
    *,
    known: Sequence[Known] | None = None,
) -> tuple[Path, ...]:
    """Write report.html, report.md and summary.csv of a run to a folder and return their paths.

    The HTML page is one file that needs no network. Raises `StoreError` if the run cannot be read
    or the folder not be written.
    """
    from amp_fuzz.reports import html, markdown
    from amp_fuzz.reports.frames import load, summary
    from amp_fuzz.reports.view import view

    data = load(store, run_id)
    seen = view(data, _or_shipped(known))
    texts = {
        "report.html": html.render(seen),
        "report.md": markdown.render(seen),
        "summary.csv": summary(data).to_csv(index=False),
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


def _or_shipped(known: Sequence[Known] | None) -> Sequence[Known]:
    return shipped() if known is None else known
