"""Honest runs and the tests on one torch: what each divergence is, or that nothing explains it.

    python benchmarks/matrix.py ENV 'eager-cpu:10000' 'fake-*:2000' ... [--seed=2511]
    python benchmarks/matrix.py ENV --tests tests/unit -n 2

ENV is the folder of an environment that has a torch and what the package needs, as
`make test-torch` makes it (``.venvs/torch-2.9.1-python3``). Each argument is a pattern of backends
and how many cases of each. `amp-fuzz run` draws and judges them there, from this checkout. A run
that ended earlier with the same backends, cases and seed is read again from ``.amp-fuzz/matrix``.

``--tests`` runs pytest there with the rest of the arguments, and keeps its last line.

The result file has a row for each torch, Python and backend, and for each run of the tests.
``--page`` writes the tables of docs/evidence/torch-versions.md from the file.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from packaging.version import Version

from amp_fuzz.records.schema import GIVEN, OPEN, CaseRecord, DivergenceRecord, EndRecord, RunRecord
from amp_fuzz.records.store import Store
from benchmarks.common import ROOT, Row, arguments, commit, read, write

RESULT = ROOT / "benchmarks" / "matrix.json"
PAGE = ROOT / "docs" / "evidence" / "torch-versions.md"
STORE = ROOT / ".amp-fuzz" / "matrix"
START = "<!-- Below: written by benchmarks/matrix.py --page. -->\n"
RUN = "import sys; from amp_fuzz.interfaces.cli import main; sys.exit(main())"
KEYS = ("torch", "python", "backend")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("env", nargs="?", type=Path)
    parser.add_argument("what", nargs="*", help="BACKENDS:CASES")
    parser.add_argument("--seed", type=int, default=2511)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--tests", nargs=argparse.REMAINDER, help="arguments for pytest")
    args = parser.parse_args()
    result = read(args.output)
    if args.env is not None:
        python = args.env / "bin" / "python"
        if not python.exists():
            parser.error(f"{python} is missing: make test-torch TORCH=VERSION makes such a folder")
        for what in args.what:
            backends, _, cases = what.rpartition(":")
            run = honest(python, backends, int(cases), args.seed, args.workers)
            for row in rows(Store(STORE), run):
                put(result, "runs", row)
                write(args.output, result)
        if args.tests is not None:
            put(result, "tests", tested(python, args.tests))
            write(args.output, result)
    if args.page:
        text = PAGE.read_text()
        PAGE.write_text(text[: text.index(START)] + START + page(result))


def put(result: Row, part: str, row: Row) -> None:
    """Add a row to a part of a result, in place of an earlier one of the same name and torch."""
    same = [key for key in (*KEYS, "folders") if key in row]
    kept = [r for r in result.get(part, ()) if any(r.get(key) != row[key] for key in same)]
    result[part] = sorted([*kept, row], key=_order)


def _order(row: Row) -> tuple[Version, Version, str]:
    of = row.get("backend") or row["folders"]
    return Version(row["torch"]), Version(row["python"]), of


def honest(python: Path, backends: str, cases: int, seed: int, workers: int) -> str:
    """Return the id of a run that has ended: one of the store, or a new one."""
    asked = [f"--backends={backends}", f"--cases={cases}", f"--seed={seed}"]
    torch, _ = about(python)
    if (run := ended(torch, asked)) is not None:
        return run
    more = ["--seconds=0", "--minimize=0", f"--workers={workers}", f"--store={STORE}"]
    command = [str(python), "-c", RUN, "run", *asked, *more, f"--report={STORE / 'report'}"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    run = ended(torch, asked)
    if run is None:
        raise SystemExit(f"the run of {backends} on torch {torch} did not end: see above")
    return run


def ended(torch: str, asked: list[str]) -> str | None:
    """Return a run on a torch that ended and was asked for in these words, if there is one."""
    store = Store(STORE)
    for name in store.runs():
        run = store.run(name)
        if (
            run.versions["torch"] == torch
            and set(asked) <= set(shlex.split(run.command))
            and any(isinstance(record, EndRecord) for record in store.records(name))
        ):
            return name
    return None


def rows(store: Store, name: str) -> Iterator[Row]:
    """Yield what came of each backend of a run."""
    run: RunRecord = store.run(name)
    found: list[CaseRecord | DivergenceRecord] = [
        r for r in store.records(name) if isinstance(r, CaseRecord) and r.family not in GIVEN
    ]
    recorded = {(r.backend, r.id) for r in found}
    # A case that ended its process has a divergence and no record of its own.
    for key, divergence in store.found(name).items():
        if key not in recorded and divergence.family not in GIVEN:
            found.append(divergence)
    for backend in dict.fromkeys(b.name for b in run.backends):
        mine = [record for record in found if record.backend == backend]
        outcomes = Counter(map(_outcome, mine))
        new = Counter(f"{r.kind} {r.op}".strip() for r in mine if _outcome(r) == "diverged")
        yield {
            "torch": run.versions["torch"],
            "python": run.versions["python"],
            "backend": backend,
            "seed": run.seed,
            "cases": len(mine),
            "agreed": outcomes["agreed"],
            "raised": outcomes["raised"],
            "own": outcomes["backend"],
            "known": outcomes["known"],
            "unexplained": dict(new.most_common()),
        }


def _outcome(record: CaseRecord | DivergenceRecord) -> str:
    """Return what came of a case; what the package only lists as open is not explained."""
    if any(name.startswith(OPEN) for name in record.known.split("+")):
        return "diverged"
    if isinstance(record, CaseRecord):
        return record.outcome
    return "known" if record.known else "diverged"


def about(python: Path) -> tuple[str, str]:
    """Return an environment's torch and Python."""
    asked = (
        "import platform; from importlib.metadata import version; "
        "print(version('torch'), platform.python_version())"
    )
    done = subprocess.run([str(python), "-c", asked], capture_output=True, text=True, check=True)
    torch, version = done.stdout.split()
    return torch, version


def tested(python: Path, words: list[str]) -> Row:
    """Return the last line of a pytest session, which tests failed, and why others were skipped."""
    torch, version = about(python)
    command = [str(python), "-m", "pytest", "-q", "-rfEs", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    return {
        "torch": torch,
        "python": version,
        "folders": " ".join(word for word in words if word.startswith("tests")),
        "result": re.sub(r"=+ ?| in [\d.]+s.*", "", lines[-1]),
        "failed": [w.split()[1] for w in lines if re.match("(FAILED|ERROR) tests", w)],
        "skipped": [w.removeprefix("SKIPPED ") for w in lines if w.startswith("SKIPPED")],
        "code": commit(),
    }


def page(result: Row) -> str:
    """Return the tables of the page."""
    lines = ["\n## Honest runs\n"]
    columns = "torch | Python | backend | cases | agreed | raised | own | known | unexplained"
    lines.append(f"| {columns} |")
    lines.append("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | --- |")
    for row in result.get("runs", ()):
        new = ", ".join(f"{count} `{what}`" for what, count in row["unexplained"].items()) or "0"
        outcomes = ("cases", "agreed", "raised", "own", "known")
        numbers = [f"{row[key]:,}" if key in row else "" for key in outcomes]
        cells = [row["torch"], row["python"], f"`{row['backend']}`", *numbers, new]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["\n## Tests\n", "| torch | Python | tests | result | failed |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for row in result.get("tests", ()):
        failed = ", ".join(f"`{name}`" for name in row["failed"]) or "none"
        cells = [row["torch"], row["python"], f"`{row['folders']}`", row["result"], failed]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
