"""How small the minimiser makes what torchax_hunt.py met, and whether the scripts show it.

    python benchmarks/torchax_findings.py [--records=DIR] [--seconds=40] [--only=ID,...]

For each known entry, the first case of the records that it explains alone is minimised, with the
other entries in the list, and written as a script that imports torch, jax and torchax only. Of an
entry without one it is the example of the tests. The script runs in a fresh process, isolated from
everything else (``python -I``): it must end with 1. Writes torchax_findings.json beside it; with
``--only`` the other rows stay as they are.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from amp_fuzz.backends import backends
from amp_fuzz.case import Case, loads
from amp_fuzz.judge import Judge, Verdict, quiet
from amp_fuzz.known import shipped
from amp_fuzz.program import statements
from amp_fuzz.repro import ReproError, repro
from amp_fuzz.shrink import Shrunk, Target, asker, confirmed, shrink, working

ROOT = Path(__file__).resolve().parent.parent
OUT = Path(__file__).with_suffix(".json")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--records", type=Path, default=Path(".amp-fuzz/torchax-hunt"))
    parser.add_argument("--seconds", type=float, default=40, help="of CPU, for each")
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, Any] = json.loads(OUT.read_text()) if OUT.exists() else {}
    only = set(given.only.split(",")) - {""}
    for name, line in first(given.records).items():
        if (only and name not in only) or (not only and name in rows):
            continue
        with quiet():
            row = minimised(name, line, given.seconds)
        print(name, json.dumps(row, indent=1), flush=True)
        rows[name] = row
        OUT.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")


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
    """Yield the examples of the tests: the entry, the backend, the case."""
    sys.path.insert(0, str(ROOT))
    from tests.backends import test_torchax, test_torchax_autograd, test_torchax_ops

    for name, case in test_torchax.FINDINGS.items():
        yield name, "torchax", case
    for made in test_torchax_ops.MADE.values():
        yield made.known, "torchax", made.one
    for name, case in test_torchax_autograd.FINDINGS.items():
        yield name, "torchax[autograd]", case


def minimised(name: str, line: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Minimise the case of a line without the entry, and run the script of what is left."""
    backend = backends()[line["backend"]]
    judge = Judge(backend, tuple(entry for entry in shipped() if entry.id != name))
    verdict = judge.judge(loads(json.dumps(line["case"])))
    if verdict.divergence is None:
        return {"case": line["id"], "backend": line["backend"], "outcome": verdict.outcome}
    target = Target.of(verdict)
    ask, reference = asker(judge, target), backend.reference()
    *_, last = shrink(verdict.case, target, ask, reference, seconds=seconds, clock=working())
    assert isinstance(last, Shrunk)
    final = confirmed(judge, target, last.chain) or verdict
    backend.process.close()  # type: ignore[attr-defined]
    return {
        "case": line["id"],
        "backend": line["backend"],
        "statements": [_count(verdict), _count(final)],
        "kind": final.divergence.kind if final.divergence else "",
        "op": last.op,
        "tried": last.tried,
        "seconds": round(last.seconds, 1),
        "reason": last.reason,
        "program": str(final.case).splitlines()[1:],
        "expected": final.divergence.expected if final.divergence else "",
        "observed": final.divergence.observed if final.divergence else "",
        "script": shown(judge, final, last.op),
    }


def _count(verdict: Verdict) -> int:
    return len(list(statements(verdict.case.program.body)))


def shown(judge: Judge, verdict: Verdict, op: str) -> dict[str, Any]:
    """Run the script of a divergence where nothing of amp-fuzz can be imported."""
    try:
        text = repro(verdict.case, judge.backend, verdict.finding("", op=op))
    except ReproError as error:
        return {"error": str(error)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "repro.py"
        path.write_text(text)
        words = [sys.executable, "-I", str(path)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    said = {"lines": len(text.splitlines()), "ends with": done.returncode}
    if done.returncode not in (0, 1):
        said["error"] = (done.stderr or done.stdout).strip()[-300:]
    return said | {"imports amp_fuzz": "amp_fuzz" in text.replace("amp-fuzz", "")}


if __name__ == "__main__":
    main()
