"""How long the scripts of known bugs are, and whether they reproduce.

    python benchmarks/repro_scripts.py [ID ...] [--scripts=FOLDER] [--no-run]

Writes the script of each known bug that has a case, as `amp-fuzz repro ID` tries it first, in a
process of its own, then runs it in another: a fork of one that has imported torch. lines: those
that are neither an import, nor empty, nor a comment. code: the script's exit code: 1 if it
reproduces, null if it had to be ended. Where it is not 1, `repro` writes the next script.

Writes ``benchmarks/repro_scripts.json``. With ids, only their rows are measured again.
"""

from __future__ import annotations

import os
import random
import runpy
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.config import Options
from amp_fuzz.findings.presence import preload
from amp_fuzz.interfaces.cli.common import Stopped
from amp_fuzz.interfaces.cli.replay import Job, job_of
from amp_fuzz.interfaces.cli.repro import script_of
from amp_fuzz.records.remote import store_at
from amp_fuzz.upstream.bug import Bug
from amp_fuzz.upstream.registry import BUGS
from benchmarks.common import ROOT, Row, arguments, commit, machine, read, versions, write

JSON = ROOT / "benchmarks" / "repro_scripts.json"
SHORT, LONG = 12, 25


def counted(script: str) -> int:
    """Return how many lines of a script are neither an import, nor empty, nor a comment."""
    lines = [line.strip() for line in script.splitlines()]
    return sum(bool(line) and not line.startswith(("#", "import ", "from ")) for line in lines)


def row(bug: Bug, job: Job, folder: Path | None, *, run: bool) -> Row:
    """Return how long the script of a bug is, and how it ended."""
    found: Row = {"backend": bug.examples[0].backend}
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
            script = pool.submit(script_of, job, Options()).result()
    except (Stopped, BrokenProcessPool) as error:
        return {**found, "error": str(error)}
    if folder is not None:
        (folder / f"{bug.id}.py").write_text(script)
    found |= {"lines": counted(script), "imports amp_fuzz": "from amp_fuzz" in script}
    if run:
        found["code"] = ended(script)
    return found


def ended(script: str) -> int | None:
    """Return the exit code of a script, or None if it died or did not answer."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "repro.py"
        path.write_text(script)
        process = get_context("fork").Process(target=_run, args=(path,))
        process.start()
        process.join(300)
        code = process.exitcode
        if code is None:
            process.kill()
    return code if code is not None and code >= 0 else None


def _run(path: Path) -> None:
    """Run a script as Python does, and end with its exit code."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        sys.argv = [str(path)]
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit:
        raise
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)


def summed(rows: Sequence[Row]) -> Row:
    """Return the median, the 90th percentile, and how many are short."""
    lines = sorted(row["lines"] for row in rows if "lines" in row)
    if not lines:
        return {}
    return {
        "scripts": len(lines),
        "median": statistics.median(lines),
        "90%": lines[-(-len(lines) * 9 // 10) - 1],
        f"at most {SHORT}": sum(n <= SHORT for n in lines),
        f"at most {LONG}": sum(n <= LONG for n in lines),
        "longest": lines[-1],
        "reproduce": sum(row.get("code") == 1 for row in rows),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("ids", nargs="*")
    parser.add_argument("--scripts", type=Path, help="a folder for the scripts")
    parser.add_argument("--no-run", dest="run", action="store_false")
    parser.add_argument("--output", type=Path, default=JSON)
    given = parser.parse_args()
    bugs = [b for b in BUGS.values() if b.examples and (not given.ids or b.id in given.ids)]
    if given.scripts is not None:
        given.scripts.mkdir(parents=True, exist_ok=True)
    preload(bugs)
    random.Random(0).shuffle(bugs)  # so that an early end leaves a sample
    store = store_at(given.output.parent / "no-store")
    rows = read(given.output).get("bugs", {}) if given.ids else {}
    about = {"code": commit(), "versions": versions("torch"), "machine": machine()}
    for bug in bugs:
        rows[bug.id] = row(bug, job_of(bug.id, store, None), given.scripts, run=given.run)
        print(bug.id, rows[bug.id], flush=True)
        write(given.output, {**about, **summed(list(rows.values())), "bugs": rows})
    result = {**about, **summed(list(rows.values())), "bugs": dict(sorted(rows.items()))}
    write(given.output, result)
    print({name: value for name, value in result.items() if name != "bugs"})


if __name__ == "__main__":
    main()
