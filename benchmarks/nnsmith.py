"""How many programs a second amp-fuzz judges beside NNSmith, a fuzzer of deep-learning compilers.

    python -m venv /tmp/nnsmith && echo SITE-PACKAGES-OF-THIS-TORCH > /tmp/nnsmith/lib/.../torch.pth
    /tmp/nnsmith/bin/pip install nnsmith==0.1.0 z3-solver==4.12.2.0
    python benchmarks/nnsmith.py /tmp/nnsmith/bin/python [--seconds=60] [--backends=torchjit]

Forward only, 5 ops, one core, in CPU seconds with those of g++, generation included; what comes
before the first program is not counted. NNSmith 0.1.0, the newest release, has TorchScript (traced,
frozen) and no torch.compile, which its repository has had since: ten lines here give it one. Its
programs are float models of valid shapes, and it compares outputs with eager by a tolerance; ours
have autocast plans, mixed dtypes, layouts and special values, and are compared with the reference
in dtypes, bits, shadows and state. Writes ``benchmarks/nnsmith.json``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import arguments, cpu_seconds, machine, versions, write

JSON = Path(__file__).with_suffix(".json")
PAIRS = {"torchjit": "trace[freeze]", "compile": "compile[inductor]"}

THEIRS = """
import os, sys, time
import torch
torch.set_num_threads(1)
from multipledispatch import dispatch
from nnsmith.backends.factory import BackendFactory
from nnsmith.backends.torchjit import TorchJITFactory
from nnsmith.materialize.torch import TorchModel
from nnsmith.cli import fuzz

init = BackendFactory.init

class Compile(TorchJITFactory):
    @property
    def system_name(self):
        return "torch.compile"

    @dispatch(TorchModel)
    def make_backend(self, model):
        torch._dynamo.reset()
        net = model.torch_model.to(self.device).eval()
        compiled = torch.compile(net)

        def closure(inputs):
            with torch.no_grad():
                output = compiled(*(torch.from_numpy(v) for v in inputs.values()))
            names = net.output_like
            return {k: v.detach().resolve_conj().numpy() for k, v in zip(names, output)}

        return closure

def made(name, **kwargs):
    return Compile(**kwargs) if name == "compile" else init(name, **kwargs)

BackendFactory.init = staticmethod(made)

# Which dtypes each op takes is found by compiling it with each: of Inductor that is an hour, before
# the first program. The answer for TorchScript is that of eager too.
opset = fuzz.auto_opset
fuzz.auto_opset = lambda model, factory, **how: opset(model, init("torchjit", target="cpu"), **how)
run = fuzz.FuzzingLoop.run

def timed(self):
    start = sum(os.times()[:4])
    run(self)
    spent = sum(os.times()[:4]) - start
    print("RESULT", self.status.n_testcases, spent, self.status.n_bugs, flush=True)

fuzz.FuzzingLoop.run = timed
fuzz.main()
"""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("python", help="of the environment that NNSmith is in")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--backends", default=",".join(PAIRS), help="NNSmith's")
    args = parser.parse_args()
    result: dict[str, Any] = {"seconds": args.seconds, "seed": args.seed, "backends": {}}
    for theirs in args.backends.split(","):
        ours = PAIRS[theirs]
        found = {
            f"NNSmith, {theirs}": nnsmith(args.python, theirs, args.seconds, args.seed),
            f"amp-fuzz, {ours}": judged(ours, args.seconds, args.seed),
        }
        print(found, flush=True)
        result["backends"] |= found
    result["versions"] = versions("torch", "amp-fuzz") | {"nnsmith": "0.1.0"}
    result["machine"] = machine()
    write(JSON, result)


def nnsmith(python: str, backend: str, seconds: int, seed: int) -> dict[str, Any]:
    """Return what NNSmith's own loop did in so many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        driver = Path(folder) / "driver.py"
        driver.write_text(THEIRS)
        options = ["model.type=torch", f"backend.type={backend}", "mgen.max_nodes=5"]
        options += [f"fuzz.time={seconds}s", f"fuzz.root={folder}/out", f"fuzz.seed={seed}"]
        caches = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [python, str(driver), *options],
            cwd=folder,
            env={**os.environ, **caches, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if not lines:
        sys.exit(f"NNSmith, {backend}: {done.stderr[-2000:]}")
    cases, spent, bugs = lines[-1].split()[1:]
    return of(int(cases), float(spent)) | {"reported as bugs": int(bugs)}


def judged(name: str, seconds: int, seed: int) -> dict[str, Any]:
    """Return how many drawn cases we judge in so many seconds."""
    import msgspec
    import torch

    from amp_fuzz.backends import backends
    from amp_fuzz.backends.harness import quiet
    from amp_fuzz.runs.engine import Settings, Task, draw
    from amp_fuzz.upstream import shipped
    from amp_fuzz.upstream.explain import judge_of

    torch.set_num_threads(1)
    settings = Settings((name,), max_statements=5)
    judge = judge_of(backends()[name], shipped())
    cases, new = 0, 0
    start, deadline = cpu_seconds(), time.monotonic() + seconds
    with quiet():
        for case in draw(Task(name, "all", (), sys.maxsize, seed), settings):
            if case.plan.transform == "none":  # else `backward` says where the contexts stand
                plan = msgspec.structs.replace(case.plan, backward="none")
                case = msgspec.structs.replace(case, plan=plan)
            verdict = judge.judge(case)
            new += verdict.outcome == "diverged"
            cases += 1
            if time.monotonic() > deadline:
                break
    return of(cases, cpu_seconds() - start) | {"new divergences": new}


def of(cases: int, spent: float) -> dict[str, Any]:
    """Return a rate."""
    return {"cases": cases, "CPU seconds": round(spent, 1), "cases/s": round(cases / spent, 2)}


if __name__ == "__main__":
    main()
