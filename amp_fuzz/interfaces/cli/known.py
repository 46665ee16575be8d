"""``amp-fuzz known``: which known bugs the installed torch has."""

from __future__ import annotations

import fnmatch
import json
import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from amp_fuzz.config import did_you_mean
from amp_fuzz.interfaces.cli.common import (
    Exit,
    Stopped,
    command_line,
    duration,
    options,
    resolve_options,
    say,
    version,
    waiting,
)
from amp_fuzz.interfaces.cli.progress import Board
from amp_fuzz.records.outputs import write_whole
from amp_fuzz.reports.printable import plural

if TYPE_CHECKING:
    from amp_fuzz.findings.presence import Presence
    from amp_fuzz.upstream.bug import Bug

__all__ = ["known"]

_TOP = 10


@click.group(short_help="Ask which known bugs this torch has.")
def known() -> None:
    """Ask which of the known bugs that come with amp-fuzz the installed torch has.

    docs/evidence/known-by-version.md shows what this command measured on several versions of torch.
    """


@known.command(short_help="Run each bug's own case: there, gone, or cannot tell.")
@click.argument("patterns", nargs=-1, metavar="[ID...]")
@click.option(
    "--backends", metavar="NAME,...", help="Only bugs whose cases run on these; * is any text."
)
@click.option("--top", is_flag=True, help="Only the ten gravest that can be run here.")
@click.option("-o", "--output", metavar="FILE", help="Write the result to this file, as JSON.")
@options("timeout", "memory", "plugins", "device", "policies")
def check(
    patterns: tuple[str, ...],
    backends: str | None,
    top: bool,
    output: str | None,
    **given: Any,
) -> int:
    """Run the smallest cases of each known bug on the installed torch, and show which are there.

    ID is the id of a bug, or a glob. Each case runs in a process of its own. A bug is gone only if
    both sides agree on all its cases and the cases would show it. What cannot be told has a reason:
    its backend is missing, its case raises on both sides, or another bug stands in the way.

    --top runs the ten gravest bugs that torch alone shows, in a minute, and says what each does. A
    silent wrong value is the gravest. With --backends, those of these backends.

    Exit codes: 0 the bugs were checked, whatever the result: one that is gone is news, not a
    failure; 2 no bug has such an id or backend; 5 nothing could be told.
    """
    chosen = resolve_options(given).options
    with waiting("importing torch"):
        import torch

        from amp_fuzz.findings.presence import presence
        from amp_fuzz.upstream import BUGS

    bugs = _on(_named(BUGS, patterns), backends)
    if top:
        bugs = _gravest(bugs, libraries=backends is not None)
    board = Board()
    row = board.row("bugs")
    row.total = len(bugs)
    say(f"{plural(len(bugs), 'known bug')}, torch {torch.__version__}")
    found: dict[str, Presence] = {}
    news: list[str] = []
    for bug, seen in presence(bugs, timeout=chosen.timeout, memory=chosen.memory):
        found[bug.id] = seen
        board.add("bugs", 1)
        say(f"{_harm(bug, seen) if top else _line(bug, seen)}{_left(board)}")
        news += _news(bug, seen)
    counts = Counter(seen.state for seen in found.values())
    say("\n".join(["", *news]))
    told = counts["there"] + counts["gone"]
    say(
        f"torch {torch.__version__}: {counts['there']} there, {counts['gone']} gone, "
        f"{counts['cannot tell']} cannot be told"
    )
    if top and (there := next((name for name in found if found[name].state == "there"), "")):
        say(f"see one as a script: {command_line('repro', there)}")
    if output is not None:
        write_whole(Path(output), _json(found, torch.__version__).encode())
        say(f"wrote {output}")
    return Exit.OK if told else Exit.NOTHING


@known.command(short_help="Write the bugs of this torch as PyTorch's unit tests.")
@click.argument("patterns", nargs=-1, metavar="[ID...]")
@click.option(
    "-o", "--output", metavar="FILE", default="test_autocast_findings.py", show_default=True
)
@options("timeout", "memory")
def tests(patterns: tuple[str, ...], output: str, **given: Any) -> int:
    """Write a unit test in PyTorch's own style for each known bug that the installed torch has.

    ID is the id of a bug, or a glob. The tests need torch alone, and run under any torch:
    python FILE -v. A test is expected to fail while its bug is there, an unexpected success is a
    bug that is gone, and a skipped test cannot tell.

    Exit codes: 0 the file was written; 2 no bug has such an id; 5 no test could be written.
    """
    chosen = resolve_options(given).options
    with waiting("importing torch"):
        import torch

        from amp_fuzz.findings.known_tests import failing, methods
        from amp_fuzz.findings.repro.parts import ReproError
        from amp_fuzz.findings.repro.unit_tests import Method, unit_tests
        from amp_fuzz.upstream import BUGS

    bugs = _named(BUGS, patterns)
    board = Board()
    row = board.row("bugs")
    row.total = len(bugs)
    found: list[Method] = []
    for bug, made, why in methods(bugs, timeout=chosen.timeout, memory=chosen.memory):
        board.add("bugs", 1)
        found += made
        said = plural(len(made), "test") if made else f"no test: {why}"
        say(f"  {bug.id}: {said}{_left(board)}")
    if not found:
        say("no test could be written")
        return Exit.NOTHING
    doc = _TESTS.format(torch.__version__)
    try:
        with waiting("running the tests"):
            failed = failing(unit_tests(found, doc=doc))
    except ReproError as error:
        raise Stopped(f"no test was written: {error}", Exit.NOTHING) from error
    for method in found:
        if method.name not in failed:
            say(f"  left out: {method.name} does not fail here as expected")
    kept = [method for method in found if method.name in failed]
    if not kept:
        say("no test fails here as expected")
        return Exit.NOTHING
    write_whole(Path(output), unit_tests(kept, doc=doc).encode())
    say(f"wrote {output}: {plural(len(kept), 'test')}; run it: python {output} -v")
    return Exit.OK


_TESTS = """\
Bugs of autocast, and of compilers under autocast, that amp-fuzz found on torch {}.

Written by `amp-fuzz known tests`. A test is expected to fail while its bug is there: an unexpected
success is a bug that is gone, and a skipped test cannot tell.
"""


def _named(bugs: Mapping[str, Bug], patterns: Iterable[str]) -> list[Bug]:
    """Return the bugs of these ids or globs, all without any. Raises `Stopped` for an unknown."""
    patterns = list(patterns) or ["*"]
    for pattern in patterns:
        if not fnmatch.filter(bugs, pattern):
            hint = did_you_mean(pattern, bugs) or ": see amp-fuzz list known"
            raise Stopped(f"no known bug has the id {pattern!r}{hint}")
    return [b for b in bugs.values() if any(fnmatch.fnmatchcase(b.id, p) for p in patterns)]


def _on(bugs: list[Bug], names: str | None) -> list[Bug]:
    """Return the bugs that have a case on these backends, with only these cases."""
    if names is None:
        return bugs
    from dataclasses import replace

    used = dict.fromkeys(example.backend for bug in bugs for example in bug.examples)
    chosen: set[str] = set()
    for name in names.split(","):
        # Only * is special: the names of compiled backends have brackets.
        matched = fnmatch.filter(used, name.strip().replace("[", "[[]"))
        if not matched:
            hint = did_you_mean(name, used) or f": use {', '.join(used)}"
            raise Stopped(f"backends: no known bug has a case on {name!r}{hint}")
        chosen |= set(matched)
    kept = ((bug, tuple(e for e in bug.examples if e.backend in chosen)) for bug in bugs)
    return [replace(bug, examples=examples) for bug, examples in kept if examples]


def _gravest(bugs: list[Bug], *, libraries: bool) -> list[Bug]:
    """Return the ten gravest that this torch has by their records, and whose cases can run here.

    libraries: also those whose backends need another library than torch.
    """
    from amp_fuzz.backends import backends, facts_of
    from amp_fuzz.upstream.harm import gravest

    ready = {
        name
        for name, backend in backends().items()
        if (libraries or not facts_of(backend).library) and backend.availability().status == "ready"
    }
    has = (bug for bug in bugs if bug.entry.holds(version("torch")))
    can = (b for b in has if any(e.backend in ready and not e.lacks() for e in b.examples))
    return gravest(can)[:_TOP]


def _harm(bug: Bug, seen: Presence) -> str:
    more = f" ({seen.detail})" if seen.detail else ""
    return f"  {bug.harm}, {bug.id} on {seen.backend}: {seen.state}{more}: {bug.what}"


def _line(bug: Bug, seen: Presence) -> str:
    on = f" on {seen.backend}" if seen.backend else ""
    more = f": {seen.detail}" if seen.detail else ""
    return f"  {bug.id}{on}: {seen.state}{more}"


def _left(board: Board) -> str:
    """Return how many bugs are left, and how long they take at the rate so far."""
    row = board.row("bugs")
    if not row.left:
        return ""
    seconds = board.left([row])
    return f"  ({row.left} left{'' if seconds is None else f', about {duration(seconds)}'})"


def _news(bug: Bug, seen: Presence) -> list[str]:
    """Return a line if the record does not say what was seen."""
    there = seen.state == "there"
    if seen.state == "cannot tell" or there == bug.entry.holds(version("torch")):
        return []
    asked = "" if there else ": fixed in your torch?"
    return [f"NEW: {bug.id} is {seen.state}, and its record says torch {bug.torch}{asked}"]


def _json(found: Mapping[str, Presence], torch: str) -> str:
    """Return what was found, a line for each bug, so that files of two versions compare well."""
    head = {
        "torch": torch,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    rows = {
        name: {k: v for k in ("state", "backend", "case", "detail") if (v := getattr(seen, k))}
        for name, seen in sorted(found.items())
    }
    lines = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in head.items()]
    bugs = ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in rows.items())
    return "{\n" + ",\n".join([*lines, '  "bugs": {\n' + bugs + "\n  }"]) + "\n}\n"
