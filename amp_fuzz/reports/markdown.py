"""The summary as Markdown, for the job summary of a CI run or the body of an issue."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape

from amp_fuzz.reports.conformance import Audit, counted
from amp_fuzz.reports.devices import Devices
from amp_fuzz.reports.pictures import Heat, Pictures, Tested, excess_text
from amp_fuzz.reports.printable import plural
from amp_fuzz.reports.promised import ENOUGH, Promised, totals
from amp_fuzz.reports.trend import Numbers, Trend
from amp_fuzz.reports.unseen import AHEAD
from amp_fuzz.reports.view import FindingView, KnownView, View, clean, rate, short_dtypes, time_of

__all__ = ["render"]

# GitHub shows at most 1 MiB of a job summary.
MOST_FINDINGS, MOST_ROWS, LONGEST_BLOCK = 30, 40, 6000

_SIGNS = {
    "good": "\N{WHITE HEAVY CHECK MARK}",
    "warn": "\N{WARNING SIGN}",
    "bad": "\N{CROSS MARK}",
}


def render(view: View, audit: Audit | None = None) -> str:
    """Return the Markdown. Programs and errors are in code, so they stay unchanged.

    audit: the conformance matrix in the folder of the report.
    """
    shown = view.pictures
    parts = [_head(view), _backends(view), _missing(view), _new(view)]
    parts += [_own(view), _noted(view), _baseline(view), _known(view)]
    parts += [_heat("Divergences by op and backend", _DIVERGED, shown.divergences)]
    parts += [*_devices(shown.devices), _spreads(shown)]
    parts += [_heat("Largest excess by op and backend", _EXCESS, shown.excess)]
    parts += [
        _unseen(view),
        _promised(view.promised),
        _tested(shown.tested),
        _trend(view.trend),
        *_conformance(audit),
        _summary(view),
    ]
    return "\n\n".join("\n".join(lines) for part in parts if (lines := list(part))) + "\n"


def _head(view: View) -> Iterator[str]:
    yield f"## {_SIGNS[view.tone]} amp_fuzz: {text(view.verdict.sentence)}"
    yield ""
    facts = [f"run {code(view.run_id)}", f"seed {view.seed}", f"profile {code(view.profile)}"]
    facts += [text(view.started)] if view.started else []
    facts += [time_of(view.took)] if view.took else []
    facts += [f"{text(name)} {text(version)}" for name, version in view.versions]
    yield ", ".join([*facts, f"store {code(view.store)}"])
    if view.own_sentence:
        yield ""
        yield text(f"{view.own_sentence.partition(' (')[0]}.")
    if view.stopped:
        yield ""
        yield text(f"{view.stopped[0].upper()}{view.stopped[1:]}.")
    for note in view.notes:
        yield ""
        yield f"> **Note:** {text(note)}"
    yield ""
    yield from _block(view.follow_up, "sh")


def _backends(view: View) -> Iterator[str]:
    yield "### Backends"
    yield ""
    if not view.backends:
        yield "None."
        return
    header = (
        "backend", "version", "cases", "agreed", "raised alike", "own", "known", "new",
        "cases/s a worker", "ops", "autocast kernels reached",
    )  # fmt: skip
    rows = [
        (
            code(b.name),
            text(b.detail),
            f"{b.cases:,}" if b.cases else "**0: nothing ran**",
            f"{b.agreed:,}",
            f"{b.raised:,}",
            f"{b.own:,}",
            f"{b.known:,}",
            f"**{b.new:,}**" if b.new else "0",
            rate(b.rate),
            f"{b.ops:,}",
            b.coverage,
        )
        for b in view.backends
    ]
    yield from _table(header, rows, right=range(2, 10))


def _missing(view: View) -> Iterator[str]:
    short = [b for b in view.backends if b.cases and (b.missing or b.unreachable)]
    if not short:
        return
    yield from _open("Autocast kernels not reached")
    for b in short:
        if b.missing:
            names = ", ".join(code(n) for n in b.missing)
            yield f"- {code(b.name)}, {len(b.missing)} that could be: {names}"
        for name, why in b.unreachable:
            reason = f": {text(why)}" if why else ""
            yield f"- {code(b.name)}, {code(name)} by no caller{reason}"
    yield from _close()


def _new(view: View) -> Iterator[str]:
    if not view.new:
        return
    yield f"### New findings ({len(view.new)}, grouped by cause)"
    yield from _findings(view.new)


def _own(view: View) -> Iterator[str]:
    if not view.own:
        return
    groups, cases = plural(len(view.own), "group"), plural(view.own_cases, "case")
    yield from _open(f"{escape(view.own_title, quote=False)} ({groups}, {cases})")
    yield "The backend differs in the same way without autocast. This fails a run only with"
    yield "`--fail-on=backend`."
    yield from _findings(view.own)
    yield from _close()


def _findings(findings: Sequence[FindingView]) -> Iterator[str]:
    for finding in findings[:MOST_FINDINGS]:
        yield ""
        yield from _finding(finding)
    if len(findings) > MOST_FINDINGS:
        yield ""
        yield f"And {len(findings) - MOST_FINDINGS} more in the HTML report."


def _finding(finding: FindingView) -> Iterator[str]:
    r = finding.record
    yield f"#### {text(finding.title)} on {code(r.backend)}: {finding.counted}"
    yield ""
    yield from _block("\n".join(finding.short), "")
    yield ""
    sides = (
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
    )
    rows = [(name, code(words)) for name, words in sides if words]
    yield from _table(("", ""), rows)
    yield ""
    yield from _block(f"{finding.replay}\n{finding.repro}", "sh")
    yield ""
    yield from _open("The case, and its casts written out")
    yield from _block(finding.program, "")
    if finding.explicit:
        yield ""
        yield from _block(finding.explicit, "python")
    yield from _close()


def _noted(view: View) -> Iterator[str]:
    if not view.noted:
        return
    yield f"### Notes ({plural(len(view.noted), 'group')})"
    yield ""
    yield "Neither agreement nor divergence. They fail a run if `--fail-on` names their kind."
    header = ("op", "statement", "what happens", "what to do", "cases", "on", "replay")
    for title, notes in view.noted_by_kind:
        yield ""
        yield from _open(f"{text(title)} ({plural(len(notes), 'group')})")
        rows = [
            (
                code(n.note.op),
                code(n.note.where),
                text(n.note.message),
                text(n.note.advice),
                f"{n.cases:,}",
                text(n.on),
                code(n.replay),
            )
            for n in notes[:MOST_ROWS]
        ]
        yield from _table(header, rows, right=(4,))
        if len(notes) > MOST_ROWS:
            yield ""
            yield f"And {len(notes) - MOST_ROWS} more in the HTML report."
        yield from _close()


def _baseline(view: View) -> Iterator[str]:
    if not view.baseline:
        return
    yield f"### Baseline ({plural(len(view.baseline), 'entry')})"
    yield ""
    rows = [
        (code(e.id), text(e.title), text(e.reason), code(e.backend), text(e.sentence or e.state))
        for e in view.baseline
    ]
    yield from _table(("id", "what", "reason", "on", "in this run"), rows)


def _known(view: View) -> Iterator[str]:
    if not view.known:
        return
    yield f"### Known findings ({plural(view.known_cases, 'case')})"
    yield ""
    header = ("id", "what", "why", "cases", "on")
    rows = [(_named(k), text(k.what), text(k.why), f"{k.cases:,}", _on(k)) for k in view.known]
    yield from _table(header, rows, right=(3,))


def _named(k: KnownView) -> str:
    return f"[{code(k.id)}](<{k.url}>)" if k.url else code(k.id)


def _on(k: KnownView) -> str:
    return ", ".join(f"{code(name)} {n:,}" for name, n in k.backends)


def _summary(view: View) -> Iterator[str]:
    if not view.summary:
        return
    yield from _open(f"op x policy x dtypes x backend x kind ({plural(len(view.summary), 'row')})")
    rows = [
        (
            code(r.op or "(none)"),
            text(r.policy),
            text(short_dtypes(r.dtypes) or "-"),
            code(r.backend),
            text(r.what),
            f"{r.cases:,}",
            f"{r.calls:,}",
        )
        for r in view.summary[:MOST_ROWS]
    ]
    header = ("op", "policy", "dtypes", "backend", "kind", "cases", "calls")
    yield from _table(header, rows, right=(5, 6))
    if len(view.summary) > MOST_ROWS:
        yield ""
        yield f"And {plural(len(view.summary) - MOST_ROWS, 'row')} more in `summary.csv`."
    yield from _close()


# -- pictures -------------------------------------------------------------------------------------

_DIVERGED = "Cases that diverged first at the op, of those that call it."
_EXCESS = "Of a value that the op computed, in any case."


def _heat(title: str, lead: str, heat: Heat) -> Iterator[str]:
    if not heat.rows:
        return
    yield from _open(f"{title} ({plural(len(heat.rows), 'op')})")
    yield lead
    yield ""
    rows = [(_op(op), *(cell.text for cell in cells)) for op, cells in heat.rows[:MOST_ROWS]]
    yield from _listed(("op", *map(code, heat.columns)), rows, len(heat.rows), "op")
    yield from _close()


def _devices(found: Devices) -> Iterator[Iterator[str]]:
    if found.columns:
        yield _pairs(found)
    if found.mixes:
        yield _mixes(found)


def _pairs(found: Devices) -> Iterator[str]:
    yield from _open("Device against device")
    yield "Of the kernels with a mix of dtypes that both backends reached, those on which outcomes"
    yield "differ more than chance explains."
    if found.measured:
        yield "excess: of the ops measured on both, those whose largest excess is more than twice"
        yield "as large on one."
    yield ""
    columns = range(len(found.columns))
    pairs = [[found.pair(i, j) if i != j else None for j in columns] for i in columns]
    rows = [
        (code(name), *(" ".join(filter(None, [p.text, p.excess])) if p else "" for p in own))
        for name, own in zip(found.columns, pairs, strict=True)
    ]
    yield from _table(("backend", *map(code, found.columns)), rows)
    yield from _close()


def _mixes(found: Devices) -> Iterator[str]:
    yield from _open(
        f"Outcomes that are uneven ({plural(found.uneven, 'kernel')} with dtypes, of which "
        f"{found.differ:,} differ more than chance explains)"
    )
    rows = [
        (
            code(mix.op),
            text(short_dtypes(mix.dtypes)),
            *(text(side.text) if side else "" for side in mix.sides),
            text(found.between(mix, 3)),
        )
        for mix in found.mixes[:MOST_ROWS]
    ]
    header = ("kernel", "dtypes", *map(code, found.columns), "differs between")
    yield from _listed(header, rows, found.uneven, "row")
    yield from _close()


def _spreads(shown: Pictures) -> Iterator[str]:
    if not shown.spreads:
        return
    yield from _open("Excess: how near rounding came to a divergence")
    yield "Cases by their largest excess."
    yield ""
    bins = (*(f"≤ {excess_text(edge)}" for edge in shown.edges), "more") if shown.threshold else ()
    rows = [
        (
            code(s.backend),
            f"{s.measured:,}",
            *map(excess_text, (s.median, s.most_of_all, s.largest)),
            *((f"{s.over:,}", *(f"{n:,}" for n in s.counts)) if bins else ()),
        )
        for s in shown.spreads
    ]
    header = ["backend", "cases", "median", "99 %", "largest"]
    header += [f"over {excess_text(shown.threshold)}", *bins] if bins else []
    yield from _table(header, rows, right=range(1, len(header)))
    yield from _close()


def _unseen(view: View) -> Iterator[str]:
    if not view.unseen:
        return
    yield from _open("Not seen yet")
    yield f"The chance that {AHEAD:,} more cases of the same draw show a cause that no case has"
    yield "shown, and how many such causes they show on average."
    yield ""
    header = ("backend", "chance", "causes", "computed from")
    rows = [
        (code(u.backend) + ", its own" * u.own, u.likely, u.expected, u.counted)
        for u in view.unseen
    ]
    yield from _table(header, rows, right=(2,))
    if view.untried_anywhere:
        yield ""
        yield f"No case had: {', '.join(map(code, view.untried_anywhere))}."
    yield from _close()


def _promised(found: Sequence[Promised]) -> Iterator[str]:
    if not found:
        return
    none = [p.promise.id for p in found if not p.cases]
    yield from _open(f"Promises of torch's documents ({len(none):,} of {len(found):,} untested)")
    yield "How many promises so many cases could have falsified."
    yield ""
    header = ("document", "promises", f"by {ENOUGH} cases or more", "by fewer", "by none")
    rows = [(text(t.document), *(f"{n:,}" for n in t[1:])) for t in totals(found)]
    yield from _table(header, rows, right=range(1, 5))
    yield ""
    least = sorted(found, key=lambda p: p.cases)
    few = [p for p in least if p.cases]
    rows = [(code(p.promise.id), text(p.promise.says), f"{p.cases:,}") for p in few[:MOST_ROWS]]
    yield from _listed(("promise", "what it says", "cases"), rows, len(few), "promise")
    if none:
        yield ""
        yield f"No case could have falsified: {', '.join(map(code, none))}."
    yield from _close()


def _tested(found: Tested) -> Iterator[str]:
    if not found.rows:
        return
    yield from _open(f"What was tested ({found.empty:,} of {found.size:,} cells are empty)")
    yield "Kernels of a policy that were compared with inputs of a dtype, and under an ingredient"
    yield "of a plan."
    yield ""
    header = ["with", *(f"{text(p) or 'not compared'} ({n:,})" for p, n, _ in found.policies)]
    rows = [
        (code(name), *(f"{counts[at]:,}" for *_, counts in found.policies))
        for at, name in enumerate((*found.dtypes, *found.plans))
    ]
    yield from _table(header, rows, right=range(1, len(header)))
    yield from _close()


def _trend(trend: Trend) -> Iterator[str]:
    if len(trend.points) < 2:
        return
    yield from _open(f"Trend ({plural(len(trend.points), 'run')})")
    names = trend.backends
    rows = [
        (
            code(point.run),
            text(point.torch),
            *(f"{n:,}" for n in (point.new, point.fixed, point.back, point.open)),
            *(_kept(point.backends.get(name)) for name in names),
        )
        for point in reversed(trend.points)
    ]
    header = ("run", "torch", "new", "fixed", "back", "open", *map(code, names))
    yield from _table(header, rows, right=range(2, 6))
    yield ""
    yield "Under a backend: autocast kernels reached, and cases a second of one worker."
    yield from _close()


def _kept(numbers: Numbers | None) -> str:
    if numbers is None:
        return "-"
    return f"{numbers.coverage}, {rate(numbers.rate)}"


def _conformance(audit: Audit | None) -> Iterator[Iterator[str]]:
    if audit is not None:
        yield _audited(audit)
        if audit.apart:
            yield _apart(audit)


def _audited(audit: Audit) -> Iterator[str]:
    yield from _open(f"Conformance: the audit of {audit.made} ({plural(len(audit.rows), 'op')})")
    header = ("op", *(f"{code(backend)} {text(dtype)}" for backend, dtype in audit.columns))
    rows = [("all", *map(counted, audit.totals))]
    rows += [(code(op), *map(counted, cells)) for op, cells in audit.rows[:MOST_ROWS]]
    yield from _listed(header, rows, len(audit.rows) + 1, "op")
    yield from _close()


def _apart(audit: Audit) -> Iterator[str]:
    calls, ops = audit.differ
    yield from _open(
        f"Calls that come out otherwise on another backend ({plural(calls, 'call')} of "
        f"{plural(ops, 'op')})"
    )
    header = ("op", "first call", "inputs", "calls", *map(code, audit.backends))
    rows = [
        (code(c.op), code(c.call), text(c.inputs), f"{c.calls:,}", *map(text, c.results))
        for c in audit.apart[:MOST_ROWS]
    ]
    yield from _listed(header, rows, len(audit.apart), "row")
    yield from _close()


def _op(op: str) -> str:
    return code(op or "(none)")


def _listed(
    header: Sequence[str], rows: Sequence[Sequence[str]], whole: int, noun: str
) -> Iterator[str]:
    """Yield a table, and how many more rows the HTML report or ``report.json`` has."""
    yield from _table(header, rows)
    if whole > len(rows):
        yield ""
        yield f"And {plural(whole - len(rows), noun)} more in the HTML report."


# -- Markdown -------------------------------------------------------------------------------------


def text(words: str) -> str:
    """Return text that Markdown shows unchanged, on one line."""
    words = clean(words).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]#|~])", r"\\\1", words)


def code(words: str) -> str:
    """Return a code span, on one line."""
    words = clean(words) or " "
    fence = "`" * (_longest(words) + 1)
    pad = " " if words.startswith("`") or words.endswith("`") else ""
    return f"{fence}{pad}{words}{pad}{fence}"


def _longest(words: str) -> int:
    return max((len(run) for run in re.findall(r"`+", words)), default=0)


def _block(lines: str, language: str) -> Iterator[str]:
    if len(lines) > LONGEST_BLOCK:
        lines = lines[:LONGEST_BLOCK] + "\n... (cut here; the HTML report has all of it)"
    fence = "`" * max(3, _longest(lines) + 1)
    yield fence + language
    yield from lines.splitlines()
    yield fence


def _open(title: str) -> Iterator[str]:
    yield f"<details><summary>{title}</summary>"
    yield ""


def _close() -> Iterator[str]:
    yield ""
    yield "</details>"


def _table(
    header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()
) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'|'.join('---:' if i in right else '---' for i in range(len(header)))}|"
    for row in rows:
        yield f"| {' | '.join(map(_cell, row))} |"


def _cell(words: str) -> str:
    """Escape words for a cell: a bare pipe would end it, even in a code span."""
    return re.sub(r"(?<!\\)\|", r"\|", words)
