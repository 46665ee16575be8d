"""Seed faults, minimise what finds them, and count what is left.

    python benchmarks/minimize.py [--sections=LIST] [--only=GLOBS] [--seed=N] [--again] [--report]

Each fault of tests/faults/numeric*.py is looked for along the way of benchmarks/numeric_faults.py,
then in programs with the op that it is called after: in eager's kernels, in the same kernels under
TorchScript, and in what compilers make of programs. So is each fault of tests/faults/contexts.py
that leaves state behind. The case that finds it is minimised and written as a script, which is run
in a fresh process twice: with the fault, where it must end with 1, and without, where it must end
with 0. Last come the bugs of torch that amp_fuzz/upstream knows: the first case that
shows each of them alone, among so many that the engine draws for a backend; their scripts must end
with 1. Writes ``benchmarks/minimize.json`` after each fault, and ``docs/evidence/minimize.md``.
What is not run is kept. Seconds are CPU seconds of one core, those of the C++ compiler included,
and so are the limits of the search.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.backends import backends, unsupported
from amp_fuzz.backends.harness import Observation, quiet
from amp_fuzz.backends.torchscript import ScriptBackend
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import statements
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.findings.guilty import fingerprint, guilty
from amp_fuzz.findings.minimize import capture
from amp_fuzz.findings.minimize.target import (
    Memory,
    Shrunk,
    Target,
    answer_of,
    asker,
    confirmed,
    paired,
    shrink,
    stage_of,
    working,
)
from amp_fuzz.findings.repro.script import ReproError, repro
from amp_fuzz.findings.wrong_policy import general
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.runs.engine import Settings, Task, draw
from amp_fuzz.upstream import BUGS, shipped
from amp_fuzz.upstream.explain import judge_of
from benchmarks.common import (
    ROOT,
    Row,
    arguments,
    commit,
    conditions,
    cpu_seconds,
    named,
    read,
    write,
)
from benchmarks.minimize_page import JSON, PAGE, SECONDS, page
from tests.faults.corrupted import Corrupted, Patches
from tests.faults.fault import Fault, NumericFault
from tests.faults.faults import FAULTS
from tests.faults.numeric import COMPILED, EAGER, NUMERIC
from tests.faults.numeric_hunt import (
    KINDS,
    Step,
    backend_of,
    counts,
    hunt,
    way,
)

HUNTS = ROOT / "benchmarks" / "numeric_faults.json"

# How many cases are drawn to find a fault.
CASES = {"eager": 3300, "state": 400, "script": 1500, "compiled": 500}
# For each backend, how many cases are drawn to meet the bugs that are known.
DRAWN = {
    "eager-cpu": 3000,
    "script": 600,
    "trace": 400,
    "export": 150,
    "compile[aot_eager]": 150,
    "compile[inductor]": 40,
}
# Kernels that TorchScript calls too: a value each of several sorts, and gradients.
SCRIPTED = (
    *("exp-float16", "softmax-bfloat16", "convolution-no-bias", "sum-last", "cumsum-last"),
    *("tanh-gain", "log1p-log", "gelu-tanh", "neg-backward", "softplus-backward-sign"),
)
# A fault that none of these shows is looked for in programs with the op that it is called after.
FOCUSED = 60


def main() -> int:
    """Run what the command line asks for and return 1 if a repro does not do what it must."""
    parser = arguments(__doc__)
    parser.add_argument("--sections", default=",".join(SECONDS), help="all, unless named")
    parser.add_argument(
        "--only", metavar="GLOBS", default="*", help="only these faults or known bugs"
    )
    parser.add_argument("--backends", metavar="GLOBS", default="*", help="of the findings")
    parser.add_argument("--new", action="store_true", help="only those not found so far")
    parser.add_argument(
        "--again", action="store_true", help="known bugs by the cases that they were found by"
    )
    parser.add_argument("--cases", type=int, default=0, help="drawn for each fault, at most")
    parser.add_argument("--seed", type=int, default=0, help="of the engine's draws (default 0)")
    parser.add_argument("--report", action="store_true", help="only write the page again")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    result = read(JSON)
    sections = [] if options.report else options.sections.split(",")
    for section in sections:
        if section == "findings":
            continue
        faults, rows = FAULTS_OF[section], result.setdefault(section, {})
        chosen = [f for f in faults if named(f.name, options.only)]
        if options.new:
            chosen = [f for f in chosen if not rows.get(f.name, {}).get("found")]
        result["run"] = conditions(options.seed, SECONDS[section])
        steps = list(way(options.cases or CASES[section], seed=options.seed))
        for number, fault in enumerate(chosen, 1):
            rows[fault.name] = one(fault, steps, section)
            result[section] = {f.name: rows[f.name] for f in faults if f.name in rows}
            rows = result[section]
            write(JSON, result)
            print(f"{number:3}/{len(chosen)} {_told(fault.name, rows[fault.name])}", flush=True)
    if "findings" in sections:
        result["run"] = conditions(options.seed, SECONDS["findings"])
        rows = result.setdefault("findings", {})
        told = options.seed, options.backends, options.only
        for name, row in again(*told, rows) if options.again else findings(*told):
            rows[name] = row
            write(JSON, result)
            print(_told(name, row), flush=True)
    PAGE.write_text(page(result))
    print(f"written: {PAGE.relative_to(ROOT)}")
    rows = [r for s in SECONDS for r in result.get(s, {}).values()]
    return int(any(r["found"] and r["repro"] not in ([1, 0], [1]) for r in rows))


FAULTS_OF: dict[str, Sequence[Fault]] = {
    "eager": EAGER,
    "state": [f for f in FAULTS.values() if "state" in f.kinds],
    "script": [NUMERIC[name] for name in SCRIPTED],
    "compiled": COMPILED,
}


@dataclass(frozen=True)
class Scripted(ScriptBackend):
    """TorchScript in a torch whose kernels are replaced."""

    patches: Patches = field(default=nullcontext, compare=False)

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Script and run cases in the patched torch."""
        with self.patches():
            return ScriptBackend.run(self, cases)


def judge_of_fault(fault: Fault, section: str) -> Judge:
    """Return the judge of the backend in which a fault is seeded."""
    if section == "script":
        return judge_of(Scripted("script", patches=fault.corrupt), shipped(), "none")
    if section == "state":
        return judge_of(Corrupted(patches=fault.corrupt), shipped(), "none")
    assert isinstance(fault, NumericFault)
    return judge_of(backend_of(fault), shipped(), "none")


def _told(name: str, row: Row) -> str:
    if not row["found"]:
        return f"{name:32} not found"
    return (
        f"{name:32} {row['statements'][0]:2} -> {row['statements'][1]} statements, "
        f"{row['elements'][1]} elements, {row['tried']} tried, {row['seconds']:.0f} s "
        f"({row['reason']}), {row['before']['op']} -> {row['after']['op']}, repro {row['repro']}"
    )


def one(fault: Fault, steps: Sequence[Step], section: str) -> Row:
    """Find a fault, minimise the case, and run its script."""
    judge = judge_of_fault(fault, section)
    if isinstance(fault, NumericFault) and section != "script":
        verdict = found(fault, steps)
    else:
        verdict = first(fault, judge, steps)
        if verdict is None and isinstance(fault, NumericFault) and (op := named_after(fault)):
            verdict = first(fault, judge, way(FOCUSED, focus=(op,)))
    if verdict is None:
        return {"found": False}
    with quiet():
        return {"found": True, **minimised(fault.name, judge, verdict, SECONDS[section])}


def first(fault: Fault, judge: Judge, steps: Iterable[Step]) -> Verdict | None:
    """Return the first divergence that shows a fault: of a kind that is its own, and new."""
    wanted = frozenset(fault.reached) if isinstance(fault, NumericFault) else frozenset()
    kinds = KINDS if isinstance(fault, NumericFault) else ("state",)
    honest = replace(judge, backend=replace(judge.backend, patches=nullcontext))  # type: ignore[type-var]
    for step in steps:
        if wanted and not wanted & step.reached:
            continue
        case = judge.backend.fit(step.case)
        if unsupported(case, judge.backend):
            continue
        with quiet():
            verdict = judged(judge, case)
            if verdict is None or verdict.outcome != "diverged" or verdict.divergence is None:
                continue
            if verdict.divergence.kind not in kinds:
                continue
            if honest.judge(case).outcome in ("agreed", "raised"):
                return verdict
    return None


def judged(judge: Judge, case: Case) -> Verdict | None:
    """Return the verdict, or None where no shadows follow the case."""
    try:
        return judge.judge(case)
    except RuntimeError as error:
        if "the shadows did not come" not in str(error):
            raise
        return None


def findings(seed: int, backends_: str, entries: str) -> Iterator[tuple[str, Row]]:
    """Yield a row for each known bug and backend: the first drawn case that shows it alone.

    Of those that no draw shows so, on any backend, the example of the tests. backends_, entries:
    globs over what to look for.
    """
    done: set[str] = set()
    for name, count in DRAWN.items():
        if not named(name, backends_):
            continue
        judge = judge_of(backends()[name], shipped(), "none")
        task = Task(name, "all", (), count, seed)
        for case in draw(task, Settings(backends=(name,), seed=seed)):
            yield from finding(judge, case, entries, done)
    met = {bug.partition(" on ")[0] for bug in done}
    for entry, (name, case) in examples().items():
        if entry not in met and named(name, backends_) and named(entry, entries):
            judge = judge_of_entry(name, entry)
            rows = dict(finding(judge, case, entry, done))
            rows = rows or dict(finding(judge, case, entry, done, among=entry))
            yield from (rows or {f"{entry} on {name}": {"found": False}}).items()


def again(seed: int, backends_: str, entries: str, rows: Row) -> Iterator[tuple[str, Row]]:
    """Yield the rows of known bugs anew, each of the case that it was found by; see `findings`.

    Those of which no case was found so far are asked for by the example of the tests.
    """
    made = {(name, case.id): entry for entry, (name, case) in examples().items()}
    met = {row["id"] for row in rows.values() if row["found"]}
    wanted = {key: entry for key, entry in made.items() if entry not in met}
    wanted |= {(row["backend"], row["case"]): row["id"] for row in rows.values() if row["found"]}
    wanted = {k: e for k, e in wanted.items() if named(k[0], backends_) and named(e, entries)}
    drawn: list[tuple[str, Case]] = list(examples().values())
    for name, count in DRAWN.items():
        if any(key[0] == name and key not in made for key in wanted):
            task = Task(name, "all", (), count, seed)
            drawn += [(name, c) for c in draw(task, Settings(backends=(name,), seed=seed))]
    for name, case in drawn:
        if entry := wanted.pop((name, case.id), ""):
            judge = judge_of_entry(name, entry)
            yield from finding(judge, case, entry, set(), among=entry)
    if wanted:
        raise SystemExit(f"not drawn any more, run without --again: {sorted(wanted.values())}")


def finding(
    judge: Judge, case: Case, entries: str, done: set[str], *, among: str = ""
) -> Iterator[tuple[str, Row]]:
    """Yield the row of the known bug that a case shows alone, if it shows one and it is a new one.

    among: the bug that it may show together with others, which minimising has to keep, too.
    """
    with quiet():
        verdict = judged(judge, case)
        if verdict is None:
            return
        ids = verdict.known.split("+")
        entry = among if among in ids else verdict.known
        bug = f"{entry} on {judge.backend.name}"
        if (len(ids) > 1 and entry != among) or not entry or bug in done:
            return
        if not named(entry, entries):
            return
        done.add(bug)
        row = minimised("", judge, verdict, SECONDS["findings"])
    others = {"with": [i for i in ids if i != entry]} if len(ids) > 1 else {}
    yield bug, {"found": True, "id": entry, "backend": judge.backend.name, **others, **row}


def examples() -> Mapping[str, tuple[str, Case]]:
    """Return the smallest example of each known bug of torch's own: a backend, and a case."""
    smallest = {name: bug.examples[0] for name, bug in BUGS.items() if bug.examples}
    found = {name: (example.backend, example.case) for name, example in smallest.items()}
    found |= _more_examples()
    # Of a GRU on fake tensors torch dies of candidates, which are judged here without a supervisor.
    others = ("torchax-", "xla-", "any-query-misses-devices")
    mine = {known.id for known in shipped() if not known.id.startswith(others)}
    return {name: example for name, example in found.items() if name in mine}


def _more_examples() -> dict[str, tuple[str, Case]]:
    """Return cases of tests that are about one known bug each."""
    from tests.backends.test_custom_op import REGISTERED

    plan = msgspec.structs.replace(REGISTERED.plan, backward="none")
    return {"register-autocast-key": ("fake-mtia", msgspec.structs.replace(REGISTERED, plan=plan))}


def judge_of_entry(backend: str, entry: str) -> Judge:
    """Return the judge to which a known bug shows."""
    (known,) = (k for k in shipped() if k.id == entry)
    relations: Literal["none", "all"] = "all" if "relation" in known.kinds else "none"
    return judge_of(backends()[backend], shipped(), relations)


def found(fault: NumericFault, steps: Sequence[Step]) -> Verdict | None:
    """Return the divergence that shows a fault: that of the last hunt, if it is still drawn."""
    judge = judge_of(backend_of(fault), shipped(), "none")
    hunts = read(HUNTS)
    sections = [hunts[name]["faults"] for name in SECONDS if name in hunts]
    old = [r for rows in sections for r in rows if r["name"] == fault.name and r["found"]]
    with quiet():
        for row in old:
            if row["cases"] <= len(steps):
                case = judge.backend.fit(steps[row["cases"] - 1].case)
                if case.id == row["case"]:
                    verdict = judge.judge(case)
                    if counts(verdict):
                        return verdict
        case_ = hunt(fault, steps, seconds=300).case
        if case_ is None and (op := named_after(fault)):
            case_ = hunt(fault, list(way(FOCUSED, focus=(op,))), seconds=300).case
        return None if case_ is None else judge.judge(case_)


def named_after(fault: NumericFault) -> str:
    """Return the op of the catalogue that a fault is called after, or ""."""
    name = fault.name.replace("-", "_")
    names = [op for op in CATALOGUE if name.startswith(op)]
    return max(names, key=len, default="")


def minimised(fault: str, judge: Judge, verdict: Verdict, seconds: float) -> Row:
    """Minimise a divergence, and say what was and what is. fault: its name, "" of torch's own."""
    start, wall = cpu_seconds(), time.monotonic()
    stage = stage_of(judge, verdict)
    target = replace(Target.of(verdict), stage=stage)
    ask, reference, memory = asker(judge, target), judge.backend.reference(), Memory()

    def shows(case: Case) -> bool:
        return replace(target, op="").reply(memory.of(ask, case)) == "same"

    pairs = paired(judge.backend, verdict.case)
    values = capture(verdict.case, reference)
    before = guilty(verdict.case, values, shows, guess=target.op, pairs=pairs)
    events = shrink(
        *(verdict.case, target, ask, reference),
        seconds=seconds,
        pairs=pairs,
        memory=memory,
        clock=working(),
    )
    *_, last = events
    assert isinstance(last, Shrunk)
    final = confirmed(judge, target, last.chain) or verdict
    spent = round(cpu_seconds() - start, 1), round(time.monotonic() - wall, 1)
    small = final.case
    record = final.finding("", small, op=last.op if small == last.case else "")
    again = stage_of(judge, final)
    # What any op shows in the place of the guilty one is no fault of an op.
    anyone = general(small, judge.backend.device, shows)
    # A gradient names no op by itself: so does `shrink`.
    label = "" if target.kind.startswith("grad") else target.op
    was = answer_of(verdict).kind, stage, "*" if anyone else before.op or label
    stays = answer_of(final).kind, again, "*" if anyone else last.op
    return {
        "commit": commit(),
        "case": verdict.case.id,
        "statements": [_statements(verdict.case), _statements(small)],
        "elements": [_elements(verdict.case), _elements(small)],
        "inputs": len(small.program.inputs),
        "before": dict(zip(("kind", "stage", "op"), was, strict=True)),
        "after": dict(zip(("kind", "stage", "op"), stays, strict=True)),
        "fingerprint": str(fingerprint(record)),
        "tried": last.tried,
        "reason": last.reason,
        "seconds": spent[0],
        "wall": spent[1],
        "confirmed": small == last.case,
        "repro": ends(fault, judge, final),
        "program": str(small).splitlines()[1:],
    }


def _statements(case: Case) -> int:
    return sum(1 for _ in statements(case.program.body))


def _elements(case: Case) -> int:
    return sum(math.prod(s.shape) for s in case.program.inputs)


_SEEDED = """\
sys.path.insert(0, "{root}")
from tests.faults.many import seeded

fault = seeded("{name}")
fault.__enter__()
"""


def ends(fault: str, judge: Judge, verdict: Verdict) -> list[int | str]:
    """Return how the script ends in a fresh process with the fault, if there is one, and without.

    A bug of torch's own has nothing but torch.
    """
    assert verdict.divergence is not None
    codes: list[int | str] = []
    seeds = [_SEEDED.format(root=ROOT, name=fault)] if fault else []
    for prefix in (*seeds, ""):
        try:
            text = repro(verdict.case, judge.backend, verdict.divergence, prefix=prefix)
        except ReproError as error:
            return [str(error)]
        codes.append(fresh(seeded=bool(prefix) or "import privateuse1" in text).run(text))
    return codes


_FORKING = """
import os, runpy, sys
import torch, torch._dynamo, torch._subclasses.fake_tensor
sys.modules["amp_fuzz"] = None
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        if sys.argv[1:]:
            del sys.modules["amp_fuzz"]
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1), os.dup2(null, 2)
        code = 99
        try:
            sys.argv = [line.strip()]
            runpy.run_path(sys.argv[0], run_name="__main__")
            code = 0
        except SystemExit as error:
            code = int(error.code or 0)
        finally:
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class _Fresh:
    """Runs scripts, each in a process that has done nothing but import torch.

    It is a copy of one that waits: importing torch takes longer than most scripts.
    """

    def __init__(self, *, seeded: bool) -> None:
        self.folder = tempfile.TemporaryDirectory()
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        # What another fault made of the same program is no answer to this one.
        environment["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
        environment["TORCHINDUCTOR_CACHE_DIR"] = self.folder.name
        environment.pop("PYTHONPATH", None)
        # A fault is seeded by this project's tests, and a device in Python is this project's; any
        # other script finds no amp_fuzz.
        environment |= {"PYTHONPATH": str(ROOT)} if seeded else {}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _FORKING, *["seeded"] * seeded],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=self.folder.name,
        )

    def run(self, text: str) -> int:
        """Return the exit code of a script."""
        path = Path(self.folder.name) / "repro.py"
        path.write_text(text)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@lru_cache(maxsize=2)
def fresh(*, seeded: bool) -> _Fresh:
    return _Fresh(seeded=seeded)


if __name__ == "__main__":
    sys.exit(main())
