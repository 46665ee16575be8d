"""Give torch's own minifier the cases of benchmarks/minimize.py, and say what it yields.

    python benchmarks/torch_minifier.py [--cases=N] [--limit=SECONDS] [--report]

The cases are those as drawn, for faults in Inductor's lowerings, then in AOTAutograd's graphs. Each
is written as a script that imports only torch and runs with ``TORCHDYNAMO_REPRO_LEVEL=4`` (look at
accuracy) and ``TORCHDYNAMO_REPRO_AFTER`` ``aot``, then ``dynamo``. The fault is seeded by a
``sitecustomize`` on ``PYTHONPATH``, since the minifier compiles in processes of its own. What the
script writes for the minifier is run, and what that leaves is run once more with the fault and once
without. Writes
``benchmarks/torch_minifier.json`` after each, and a part of ``docs/evidence/minimize.md``. Seconds
are CPU seconds, those of children included.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Case
from amp_fuzz.findings.repro.script import repro
from amp_fuzz.runs.engine import Settings, draw
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from benchmarks.common import ROOT, Row, arguments, read, write
from benchmarks.minimize import CASES, FOCUSED, named_after
from benchmarks.minimize_page import AFTER, JSON, PAGE, THEIRS, page
from tests.faults.numeric import NUMERIC
from tests.faults.numeric_hunt import backend_of, tasks

_SITE = """\
import sys

sys.path.insert(0, {root!r})
from tests.faults.numeric import NUMERIC

fault = NUMERIC[{name!r}].corrupt()
fault.__enter__()
"""


def main() -> int:
    """Run what the command line asks for."""
    parser = arguments(__doc__)
    parser.add_argument("--cases", type=int, default=10)
    parser.add_argument("--limit", type=float, default=600.0, help="of each process, on the clock")
    parser.add_argument("--report", action="store_true", help="only write the page again")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    ours = read(JSON)
    rows = read(THEIRS)
    # Those of Inductor's own stage first: all of them are faults of what Inductor computes.
    found = sorted(
        ((name, row) for name, row in ours["compiled"].items() if row["found"]),
        key=lambda pair: pair[1]["before"]["stage"] != "compile[inductor]",
    )
    for name, row in found[: 0 if options.report else options.cases]:
        if rows.get(name, {}).get("case") == row["case"]:
            continue
        case = drawn(name, row["case"], ours["run"]["seed"])
        rows[name] = {"case": row["case"], "ops": row["statements"][0]}
        for after in AFTER:
            rows[name][after] = theirs(name, case, after, options.limit)
            print(name, after, rows[name][after], flush=True)
        write(THEIRS, rows)
    PAGE.write_text(page(ours))
    return 0


def drawn(name: str, identity: str, seed: int) -> Case:
    """Draw the case again that a fault was found by."""
    backend = backend_of(NUMERIC[name])
    op = named_after(NUMERIC[name])
    for made in (tasks(CASES["compiled"], seed), tasks(FOCUSED, 0, (op,)) if op else ()):
        for task in made:
            for case in draw(task, Settings(backends=("eager-cpu",), cases=CASES["compiled"])):
                fitting = backend.fit(case)
                if identity in (case.id, fitting.id):
                    return fitting
    raise SystemExit(f"{name}: case {identity} is not drawn any more: run minimize.py first")


def theirs(name: str, case: Case, after: str, limit: float) -> Row:
    """Run a case for torch's minifier, and the minifier, and say what is left.

    code: how the script ended. launched: whether it wrote anything for the minifier. nodes: calls
    in the graph before and after. again: how what is left ends, with the fault and without.
    """
    judge = judge_of(backend_of(NUMERIC[name]), shipped(), "none")
    with quiet():
        verdict = judge.judge(case)
        assert verdict.divergence is not None
        text = repro(case, judge.backend, verdict.divergence)
    with tempfile.TemporaryDirectory(prefix="amp-fuzz-") as place:
        folder = Path(place)
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(_SITE.format(root=str(ROOT), name=name))
        (folder / "case.py").write_text(text)
        before = _seconds()
        first = _run(folder, [folder / "case.py"], limit, after)
        row: Row = {"code": first[0], "said": first[1], "launched": False}
        launchers = sorted(folder.rglob("minifier_launcher.py"))
        if launchers:
            launcher = launchers[0]
            row |= {"launched": True, "graph": _calls(launcher)}
            code, said = _run(folder, [launcher], limit)
            row |= {"minifier": code, "minifier_said": said}
            left = [p for p in folder.rglob("repro.py") if p != launcher] or sorted(
                folder.rglob("checkpoints/*.py"), key=lambda p: p.stat().st_mtime
            )
            if left:
                row["left"] = _calls(left[-1])
                seeded, honest = (
                    _run(folder, [left[-1]], limit, seeded=with_fault)[0]
                    for with_fault in (True, False)
                )
                row["again"] = [seeded, honest]
        row["seconds"] = round(_seconds() - before, 1)
        return row


def _run(
    folder: Path, command: list[Path], limit: float, after: str = "", *, seeded: bool = True
) -> tuple[int | str, str]:
    """Return how a script ends, and the last line that speaks of an error."""
    more = {
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "TORCH_COMPILE_DEBUG_DIR": str(folder),
        "OMP_NUM_THREADS": "1",
    }
    if after:
        more |= {"TORCHDYNAMO_REPRO_AFTER": after, "TORCHDYNAMO_REPRO_LEVEL": "4"}
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | more
    if seeded:
        environment["PYTHONPATH"] = str(folder / "site")
    try:
        done = subprocess.run(
            [sys.executable, *map(str, command)],
            cwd=folder,
            env=environment,
            timeout=limit,
            capture_output=True,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return "timeout", ""
    lines = [line for line in done.stderr.splitlines() if re.search(r"\w(Error|Exception)\b", line)]
    return done.returncode, lines[-1][-160:] if lines else ""


def _calls(path: Path) -> int:
    """Return how many calls of ops the graph of a script has."""
    return len(re.findall(r"= torch\.(?:ops\.|nn\.functional\.|_C\._nn\.|\w+\()", path.read_text()))


def _seconds() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


if __name__ == "__main__":
    raise SystemExit(main())
