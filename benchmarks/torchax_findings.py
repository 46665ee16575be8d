"""How small the minimiser makes what torchax_hunt.py met, and whether the scripts show it.

    python benchmarks/torchax_findings.py [--records=DIR] [--seconds=120] [--only=ID,...]

For each known entry, the first case of the records that it explains alone is minimised, with the
other entries in the list, and written as a script that imports torch, jax and torchax only. Of an
entry without one it is the example of the tests. The script runs in a fresh process, isolated from
everything else (``python -I``): it must end with 1. Writes torchax_findings.json beside it; with
``--only`` the other rows stay as they are.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.backends import backends
from amp_fuzz.cases.case import Case, loads
from amp_fuzz.cases.program import statements
from amp_fuzz.findings.repro.script import ReproError, repro
from amp_fuzz.findings.supervision.supervisor import Journal, minimise
from amp_fuzz.findings.supervision.worker import Done, Job
from amp_fuzz.records.schema import DivergenceRecord
from amp_fuzz.upstream import BUGS, shipped
from benchmarks.common import arguments, read, write

OUT = Path(__file__).with_suffix(".json")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--records", type=Path, default=Path(".amp-fuzz/torchax-hunt"))
    parser.add_argument("--seconds", type=float, default=120, help="for each")
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = read(OUT)
    only = set(given.only.split(",")) - {""}
    for name, line in first(given.records).items():
        if (only and name not in only) or (not only and name in rows):
            continue
        row = minimised(name, line, given.seconds)
        print(name, json.dumps(row, indent=1), flush=True)
        rows[name] = row
        write(OUT, dict(sorted(rows.items())))


def first(records: Path) -> dict[str, dict[str, Any]]:
    """Return the first line that each entry explains alone, op by op and jitted programs first."""
    found: dict[str, dict[str, Any]] = {}
    ids = {entry.id for entry in shipped()}
    for path in sorted(records.glob("*.jsonl"), key=lambda p: ("+" in p.name, p.name)):
        for line in map(json.loads, path.read_text().splitlines()):
            if line["known"] in ids:
                found.setdefault(line["known"], line)
    for name, backend, case in examples():
        if name in ids and name not in found:
            said = {"id": "", "backend": backend, "known": name}
            found[name] = {**said, "case": msgspec.to_builtins(case)}
    return found


def examples() -> Iterator[tuple[str, str, Case]]:
    """Yield the examples of the known bugs: the entry, the backend, the case."""
    for bug in BUGS.values():
        for example in bug.examples:
            if example.backend.startswith("torchax"):
                yield bug.id, example.backend, example.case


def minimised(name: str, line: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Minimise the case of a line without the entry, and run the script of what is left.

    Each candidate runs in a process that is watched: torchax dies of some.
    """
    case, found = loads(json.dumps(line["case"])), {"case": line["id"], "backend": line["backend"]}
    known = tuple(entry for entry in shipped() if entry.id != name)
    journal = Journal()
    *_, last = minimise(Job(case, line["backend"], known), seconds=seconds, journal=journal)
    if not isinstance(last, Done):
        return {**found, "outcome": str(last)}
    record = last.record
    small = record.minimised or record.case
    return {
        **found,
        "statements": [_count(case), _count(small)],
        "kind": record.kind,
        "op": record.op,
        "tried": last.tried,
        "died": sum(answer.said == "crash" for answer in journal.answers.values()),
        "seconds": round(last.seconds, 1),
        "reason": last.reason,
        "confirmed": last.confirmed,
        "program": str(small).splitlines()[1:],
        "expected": record.expected,
        "observed": record.observed,
        "script": shown(record, small),
    }


def _count(case: Case) -> int:
    return len(list(statements(case.program.body)))


def shown(record: DivergenceRecord, small: Case) -> dict[str, Any]:
    """Run the script of a divergence where nothing of amp-fuzz can be imported."""
    try:
        text = repro(small, backends()[record.backend], record)
    except ReproError as error:
        return {"error": str(error)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "repro.py"
        path.write_text(text)
        words = [sys.executable, "-I", str(path)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    said: dict[str, Any] = {"lines": len(text.splitlines()), "ends with": done.returncode}
    if done.returncode not in (0, 1):
        said["error"] = (done.stderr or done.stdout).strip()[-300:]
    return said | {"imports amp_fuzz": "amp_fuzz" in text.replace("amp-fuzz", "")}


if __name__ == "__main__":
    main()
