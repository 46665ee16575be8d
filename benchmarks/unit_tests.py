"""Run tests_for_pytorch/ on several torches, beside what `amp-fuzz known check` says of each.

    python benchmarks/unit_tests.py .venv .venvs/torch-2.7.1-python3 ...

Each argument is the folder of an environment (`make test-torch` makes one); the tests use its torch
alone. benchmarks/known has a file for each torch. The result file has for each torch how the tests
ended, and each bug of which the two say something else. The exit code is 1 if the tests call a bug
gone that is there, or there that is gone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.findings.known_tests import bug_of, run
from amp_fuzz.findings.presence import State
from benchmarks.common import Row, arguments, read, write

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests_for_pytorch" / "test_autocast_findings.py"


def by_bug(ended: dict[str, State]) -> dict[str, list[State]]:
    """Return the states that the tests of each bug tell."""
    found: dict[str, list[State]] = {}
    for name, state in ended.items():
        found.setdefault(bug_of(name), []).append(state)
    return found


def state_of(states: list[State]) -> State:
    """Return the state of a bug: it is gone if no test fails, and there if one does."""
    return "there" if "there" in states else "cannot tell" if "cannot tell" in states else "gone"


def measured(environment: Path) -> tuple[str, Row]:
    """Return a version of torch, and how the tests ended there."""
    python = [str(environment.absolute() / "bin" / "python"), "-W", "ignore", "-I"]
    asked = [*python, "-c", "from importlib.metadata import version; print(version('torch'))"]
    torch = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    torch = torch.partition("+")[0]
    folder = environment.absolute() / "unit-tests"
    folder.mkdir(exist_ok=True)  # the compiler leaves files where it fails
    tests = by_bug(run(python, FILE, folder))
    counts = Counter(state for states in tests.values() for state in states)
    told = {name: state_of(states) for name, states in tests.items()}
    known = json.loads((ROOT / "benchmarks" / "known" / f"{torch}.json").read_text())["bugs"]
    other = {
        name: {"tests": state, "known check": known[name]["state"]}
        for name, state in told.items()
        if state != known[name]["state"]
    }
    return torch, {
        "tests": counts.total(),
        **{state: counts[state] for state in ("there", "gone", "cannot tell")},
        "bugs gone": sorted(name for name, state in told.items() if state == "gone"),
        "otherwise": other,
    }


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("environments", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    given = parser.parse_args()
    data = read(given.output)
    wrong = False
    for environment in given.environments:
        torch, row = measured(environment)
        data[torch] = row
        write(given.output, data)
        print(torch, json.dumps(row), flush=True)
        wrong |= any(set(one.values()) == {"there", "gone"} for one in row["otherwise"].values())
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
