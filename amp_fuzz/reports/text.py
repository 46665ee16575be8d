"""The summary at the end of a run in a terminal: plain ASCII, except quoted text."""

from __future__ import annotations

import shutil
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from amp_fuzz.reports.printable import plural
from amp_fuzz.reports.promised import ENOUGH, totals
from amp_fuzz.reports.unseen import AHEAD
from amp_fuzz.reports.view import (
    BackendView,
    FindingView,
    KnownView,
    NoteView,
    View,
    clean,
    rate,
    short_dtypes,
    time_of,
)

__all__ = ["layout", "render"]

MOST_FINDINGS, MOST_NOTES = 20, 3
_MIN_WIDTH, _MAX_WIDTH = 40, 120
_LABEL = 10


def render(view: View, *, width: int | None = None, rows: int = 10, verbose: bool = False) -> str:
    """Return the summary, wrapped to `width` columns (by default the terminal's, at most 120).

    The verdict comes first, then the new findings. verbose: with the kernels, the known findings,
    the notes and a table of ops. Commands are never wrapped, so they can be copied. rows: how many
    rows of the table of ops.
    """
    columns = shutil.get_terminal_size().columns if width is None else width
    width = min(max(columns, _MIN_WIDTH), _MAX_WIDTH)
    parts = [_verdict(view, width, verbose), _backends(view.backends, width, verbose=verbose)]
    if verbose:
        parts += [_missing(view.backends, width), _unseen(view, width)]
        parts += [_summary(view, width, rows)]
        parts += [_own(view, width), _known(view, width), _baseline(view, width)]
        parts += [_noted(view, width)]
        parts += [_new(view, width), _head(view, width)]
    else:
        parts += [_new(view, width), *[_own(view, width)] * view.own_fails, _more(view, width)]
    return "\n\n".join("\n".join(lines) for part in parts if (lines := list(part))) + "\n"


def _verdict(view: View, width: int, verbose: bool) -> Iterator[str]:
    ruled = ["!" * width] if view.verdict.kind == "nothing" else []
    yield from ruled
    yield from _wrap(view.verdict.sentence, width)
    yield from ruled
    if not verbose:
        yield from _wrap(view.own_sentence, width)
    if view.stopped:
        yield from _wrap(view.stopped, width)
    for note in view.notes:
        yield from _wrap(f"note: {note}", width)
    if view.verdict.kind not in ("known", "backend", "clean"):
        yield f"next: {view.verdict.next}"


def _more(view: View, width: int) -> Iterator[str]:
    """Yield the baseline, the notes that fail the run, and how many others there are."""
    yield from _baseline(view, width)
    failing = [(title, notes) for title, notes in view.noted_by_kind if notes[0].fails]
    for title, notes in failing:
        yield from _notes(title, notes, width)
    others = [notes for _, notes in view.noted_by_kind if not notes[0].fails]
    if others:
        kinds = "; ".join(f"{n[0].note.kind} {plural(len(n), 'group')}" for n in others)
        yield from _wrap(f"notes: {kinds} (amp-fuzz report -v shows them)", width)


def _head(view: View, width: int) -> Iterator[str]:
    took = [time_of(view.took)] if view.took else []
    facts = [f"seed {view.seed}", f"profile {view.profile}", view.started, *took]
    yield from _wrap(f"amp-fuzz run {view.run_id}: " + ", ".join(filter(None, facts)), width)
    if view.versions:
        yield from _wrap(", ".join(f"{name} {version}" for name, version in view.versions), width)
    yield from _wrap(f"store {view.store}", width)


def _backends(backends: Sequence[BackendView], width: int, *, verbose: bool) -> Iterator[str]:
    if not backends:
        yield "no backends"
        return
    header = (
        *("backend", "cases", "agreed", "raised", "own", "known", "new"),
        *("cases/s", "kernels reached"),
    )
    rows = [
        (
            b.name,
            f"{b.cases:,}",
            f"{b.agreed:,}",
            f"{b.raised:,}",
            f"{b.own:,}",
            f"{b.known:,}",
            f"{b.new:,}",
            rate(b.rate),
            b.coverage if b.cases else "NOTHING RAN",
        )
        for b in backends
    ]
    # The columns that a narrow terminal drops, in this order.
    if not verbose:
        few = [[row[i] for i in (0, 1, 4, 5, 6, 8)] for row in (header, *rows)]
        yield from layout(few[0], few[1:], width, left=(0, 5), drop=(2, 3))
        return
    yield from layout(header, rows, width, left=(0, 8), drop=(7, 2, 3))
    details: dict[str, list[str]] = {}
    for b in backends:
        details.setdefault(b.detail, []).append(b.name)
    for detail, names in details.items():
        yield from _wrap(f"{', '.join(names)}: {detail}", width, indent="  ")
    yield from _wrap(
        "raised: both sides raised alike. own: differs in the same way without autocast. "
        "cases/s: in one worker, including minimising.",
        width,
        indent="  ",
    )


def _missing(backends: Sequence[BackendView], width: int) -> Iterator[str]:
    short = [b for b in backends if b.cases and b.missing]
    if short:
        yield "autocast kernels that no case reached"
    for b in short:
        names = ", ".join(b.missing[:12])
        more = f", and {len(b.missing) - 12} more" if len(b.missing) > 12 else ""
        yield from _wrap(f"{b.name} ({len(b.missing)}): {names}{more}", width, indent="  ")


def _known(view: View, width: int) -> Iterator[str]:
    if not view.known:
        return
    left = sum(k.cases for k in view.known if k.open)
    explained = f"{left:,} not explained" if left else "each explained"
    yield f"known findings: {plural(view.known_cases, 'case')}, {explained}"
    for k in view.known:
        yield from _known_entry(k, width)


def _known_entry(k: KnownView, width: int) -> Iterator[str]:
    on = ", ".join(f"{name} {n:,}" for name, n in k.backends)
    yield from _wrap(f"{k.id}: {plural(k.cases, 'case')} ({on})", width, indent="  ")
    yield from _wrap(k.what, width, indent="    ")
    if k.link:
        yield f"    {clean(k.link)}"


def _baseline(view: View, width: int) -> Iterator[str]:
    if not view.baseline:
        return
    counts = Counter(entry.state for entry in view.baseline)
    states = ", ".join(f"{n} {state}" for state, n in counts.items())
    yield f"baseline: {plural(len(view.baseline), 'entry')} ({states})"
    for entry in view.baseline:
        if entry.sentence:
            yield from _wrap(entry.sentence, width, indent="  ")


def _noted(view: View, width: int) -> Iterator[str]:
    if not view.noted:
        return
    yield "notes: neither agreement nor divergence (--fail-on=KIND,... fails a run on them)"
    for title, notes in view.noted_by_kind:
        yield from _notes(title, notes, width)


def _notes(title: str, notes: Sequence[NoteView], width: int) -> Iterator[str]:
    cases = sum(note.cases for note in notes)
    fails = ", FAILS" if notes[0].fails else ""
    count = f"{plural(len(notes), 'group')}, seen {plural(cases, 'time')}{fails}"
    yield from _wrap(f"{title}: {count}", width, indent="  ")
    for note in notes[:MOST_NOTES]:
        yield from _note(note, width)
    if len(notes) > MOST_NOTES:
        yield f"    and {len(notes) - MOST_NOTES} more in the report"


def _note(view: NoteView, width: int) -> Iterator[str]:
    note = view.note
    yield from _wrap(f"{note.op} ({view.on}): {note.message}", width, indent="    ")
    yield f"      | {_cut(clean(note.where), width - 8)}"
    yield from _wrap(note.advice, width, indent="      ")
    if view.replay:
        yield f"      {view.replay}"


def _unseen(view: View, width: int) -> Iterator[str]:
    if view.unseen:
        yield from _wrap(f"chance that {AHEAD:,} more cases show a cause not seen yet", width)
    for u in view.unseen:
        yield from _wrap(f"{u.name}: {u.likely} ({u.counted})", width, indent="  ")
    if view.untried_anywhere:
        yield from _wrap(f"no case had: {', '.join(view.untried_anywhere)}", width)
    if view.promised:
        *_, t = totals(view.promised)
        said = f"{t.enough:,} by {ENOUGH} cases or more, {t.none:,} by none"
        yield from _wrap(
            f"promises that cases could have falsified, of {t.promises:,}: {said}", width
        )


def _new(view: View, width: int) -> Iterator[str]:
    if view.new:
        yield f"new findings: {len(view.new)}, grouped by cause"
        yield from _findings(view.new, width)


def _own(view: View, width: int) -> Iterator[str]:
    if view.own:
        groups, cases = plural(len(view.own), "group"), plural(view.own_cases, "case")
        yield f"{view.own_title}: {groups}, {cases}"
        yield from _findings(view.own, width)


def _findings(findings: Sequence[FindingView], width: int) -> Iterator[str]:
    for number, finding in enumerate(findings[:MOST_FINDINGS], start=1):
        yield ""
        yield from _finding(number, finding, width)
    if len(findings) > MOST_FINDINGS:
        yield ""
        yield f"  and {len(findings) - MOST_FINDINGS} more in the report"


def _finding(number: int, finding: FindingView, width: int) -> Iterator[str]:
    r = finding.record
    head = f"{number}. {finding.title} on {r.backend}: {finding.counted}"
    yield from _wrap(head, width, indent="  ")
    for line in finding.short:
        yield f"     | {_cut(clean(line), width - 7)}"
    for label, words in (
        ("kind", f"{r.kind} at {r.where}" if r.where else r.kind),
        ("op", finding.at),
        ("expected", r.expected),
        ("observed", r.observed),
        ("stage", r.stage),
        ("part", r.part),
        ("like", r.like),
        ("seen as", finding.shown),
        ("also", "without autocast" if finding.bare else ""),
        ("seen", finding.life),
    ):
        if words:
            yield from _labelled(label, clean(words), width)
    yield f"     {finding.replay}"
    yield f"     {finding.repro}"


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 4] + " ..."


def _labelled(label: str, text: str, width: int) -> list[str]:
    pad = " " * 5
    return textwrap.wrap(
        text,
        width,
        initial_indent=pad + label.ljust(_LABEL),
        subsequent_indent=pad + " " * _LABEL,
        max_lines=4,
        placeholder=" ...",
    )


def _summary(view: View, width: int, rows: int) -> Iterator[str]:
    if not view.summary or rows < 1:
        return
    kinds: Counter[str] = Counter()
    for row in view.summary:
        kinds[row.kind] += row.cases
    yield from _wrap(
        f"op x policy x dtypes x backend x kind: {plural(len(view.summary), 'row')}, kernels by "
        f"the outcome of their cases ({', '.join(f'{k} {n:,}' for k, n in kinds.most_common())})",
        width,
    )
    cells = [
        (
            r.op or "(none)",
            r.policy,
            short_dtypes(r.dtypes) or "-",
            r.backend,
            r.what,
            f"{r.cases:,}",
            f"{r.calls:,}",
        )
        for r in view.summary[:rows]
    ]
    header = ("op", "policy", "dtypes", "backend", "kind", "cases", "calls")
    yield from layout(header, cells, width, left=(0, 1, 2, 3, 4), drop=(6, 1, 3))
    if len(view.summary) > rows:
        yield f"  and {plural(len(view.summary) - rows, 'row')} more in the report"


# -- layout ---------------------------------------------------------------------------------------


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Wrap only between words: a broken path cannot be copied."""
    return textwrap.wrap(
        clean(text),
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def layout(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    *,
    left: Sequence[int],
    drop: Sequence[int],
) -> Iterator[str]:
    """Lay out a table. Drop the columns of `drop`, in that order, until it fits into `width`."""
    rows = [[clean(cell) for cell in row] for row in rows]
    keep = list(range(len(header)))
    wide = [max(len(row[i]) for row in (header, *rows)) for i in keep]
    for gone in drop:
        if sum(wide[i] for i in keep) + 2 * len(keep) <= width:
            break
        keep.remove(gone)
    for row in (header, *rows):
        cells = [row[i].ljust(wide[i]) if i in left else row[i].rjust(wide[i]) for i in keep]
        yield ("  " + "  ".join(cells))[:width].rstrip()
