"""What tests share: short ways to write programs, honest draws, and a backend that is wrong."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, settings
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from amp_fuzz.backends import Availability, Backend, backends
from amp_fuzz.backends.base import caches, recipes_of
from amp_fuzz.backends.dispatcher import has_autocast
from amp_fuzz.backends.harness import Observation, Raised, bits, compiled
from amp_fuzz.backends.reference import ReferenceRuntime
from amp_fuzz.cases.build import BF16, F16, call, case, program, under, x
from amp_fuzz.cases.case import Case, load
from amp_fuzz.cases.program import FP8, Autocast, Node, Region, Statement, statements
from amp_fuzz.catalogue import CATALOGUE, select
from amp_fuzz.findings.supervision.processes import unforkable
from amp_fuzz.plugins import inherited
from amp_fuzz.strategies import drawing

__all__ = [
    "BF16",
    "F16",
    "OTHERS",
    "STEADY",
    "WrongKernel",
    "accelerator",
    "brief",
    "call",
    "case",
    "drawn",
    "eager",
    "lstm_of_bfloat16",
    "minimal",
    "needs_fork",
    "needs_torch",
    "one_line",
    "program",
    "stored",
    "under",
    "wait_until",
    "x",
]

# As workers do: small tensors lose by threads, most of all where processes share a core.
torch.set_num_threads(1)

# The same examples in every run, and none from a database.
STEADY = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=100,
    suppress_health_check=list(HealthCheck),
)


def stored(folder: str) -> dict[str, Case]:
    """Return the case files of a folder of tests/cases, by their names."""
    paths = (Path(__file__).parent / "cases" / folder).glob("*.json")
    return {path.stem: load(path) for path in sorted(paths)}


def accelerator() -> str:
    """Return the device type of the accelerator that torch sees here, or ""."""
    inherited()  # the environment may name a module that installs one
    found = torch.accelerator.current_accelerator(check_available=True)
    return "" if found is None else found.type


def eager() -> Backend:
    """Return the backend that every machine has."""
    return backends()["eager-cpu"]


OTHERS = ", ".join(d for d in ("cuda", "maia", "mps", "mtia", "xpu") if has_autocast(d))
"""The devices other than the CPU for which this torch has autocast: 2.7 has none for maia."""


def wait_until(holds: Callable[[], object], what: str) -> None:
    """Wait until a condition holds. The limit only ends what hangs: machines are busy at times."""
    deadline = time.monotonic() + 600
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.02)


def brief(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Return values to parametrise over, of which `make test` takes only these."""
    thorough = pytest.mark.thorough
    return [v if v in kept else pytest.param(v, marks=thorough) for v in values]


def leading(values: Iterable[Any], count: int = 1) -> list[Any]:
    """Return values, or tuples of them, to parametrise over: `make test` takes so many."""
    tuples = [v if isinstance(v, tuple) else (v,) for v in values]
    return [
        pytest.param(*t, marks=[pytest.mark.thorough] * (n >= count)) for n, t in enumerate(tuples)
    ]


def needs_torch(versions: str) -> None:
    """Skip the test on other versions of torch (``">=2.9,<2.15"``)."""
    installed = Version(torch.__version__).base_version
    if installed not in SpecifierSet(versions):
        pytest.skip(f"it shows on torch {versions}, not on {installed}")


def needs_fork() -> None:
    """Skip the test where workers are no forks, to which what it replaces does not come."""
    if why := unforkable():
        pytest.skip(why)


def drawn(
    count: int,
    device: str = "cpu",
    *,
    ops: Iterable[str] | None = None,
    focus: Iterable[str] = (),
    seed: int | str = 0,
    **options: Any,
) -> Iterator[Case]:
    """Draw cases as the strategies do, but with Python's random numbers: many and fast."""
    rng = random.Random(f"{device}/{seed}")
    pool = drawing.usable(CATALOGUE.values() if ops is None else select(ops), device)
    focused = drawing.usable(select(focus), device) if focus else ()

    def draw() -> Case:
        return drawing.draw_case(rng.randbytes, device, ops=pool, focus=focused, **options)

    return islice(iter(draw, None), count)


def minimal(
    strategy: Any, condition: Callable[[Any], bool] = lambda _: True, *, seed: int | None = None
) -> Any:
    """Return what an example that meets a condition shrinks to. seed: where Hypothesis begins."""
    # Without the phase that explains: it tries variations last, and `find` returns what came last.
    phases = [Phase.generate, Phase.shrink]
    chosen = settings(STEADY, max_examples=5000, phases=phases, derandomize=seed is None)
    start = None if seed is None else random.Random(seed)
    return find(strategy, condition, settings=chosen, random=start)


def one_line(error: BaseException) -> bool:
    """Return whether an error's text is one line that says something."""
    text = str(error)
    return "\n" not in text and len(text) > 10


@dataclass(frozen=True)
class WrongKernel:
    """A backend that gets one op wrong: the lowest bit of each output's first element.

    Where results may round otherwise it doubles that element.
    Where results have no values it gets the dtype wrong, and in a case that raises it raises there.
    It does so where autocast is around the call only; else it would be the backend's own. always:
    everywhere.
    """

    inner: Backend
    op: str
    always: bool = False

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def device(self) -> str:
        return self.inner.device

    @property
    def trains(self) -> bool:
        return self.inner.trains

    @property
    def values(self) -> bool:
        return self.inner.values

    @property
    def exact(self) -> bool:
        return self.inner.exact

    @property
    def repeats(self) -> bool:
        return self.inner.repeats

    @property
    def recipes(self) -> Sequence[FP8]:
        return recipes_of(self.inner)

    @property
    def caches(self) -> bool:
        return caches(self.inner)

    def availability(self) -> Availability:
        return self.inner.availability()

    def supports(self, op: str, form: str) -> bool:
        return self.inner.supports(op, form)

    def fit(self, case: Case) -> Case:
        return self.inner.fit(case)

    def ladder(self) -> Sequence[Backend]:
        return ()

    def reference(self) -> ReferenceRuntime:
        return self.inner.reference()

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        return [self._wrong(c, seen) for c, seen in zip(cases, self.inner.run(cases), strict=True)]

    def _wrong(self, case: Case, seen: Observation) -> Observation:
        calls = [s for s in self.calls(case) if s.op == self.op]
        made = {n for s in calls for n in s.outputs}
        if seen.raised is not None:
            seen.raised = self._raised(case, calls, seen.raised)
        for label, value in seen.values.items():
            if label.rpartition(".")[2] in made and value is not None and value.numel():
                seen.values[label] = self._off(value)
        return seen

    def calls(self, case: Case) -> Iterator[Statement]:
        """Yield the calls in which a kernel may be wrong."""
        body, plan = case.program.body, case.plan
        if self.always or plan.contexts or plan.backward_context:
            return statements(body)
        return (s for inner in _autocast(body) for s in statements(inner))

    def _raised(self, case: Case, calls: Sequence[Statement], raised: Raised) -> Raised:
        # What a program made before it raised is not observed: a wrong kernel shows as an error.
        lines = {", ".join(s.outputs) for s in calls}
        for number, text in enumerate(compiled(case).program.splitlines(), start=1):
            if text.strip().partition(" = ")[0] in lines:
                return Raised("ArithmeticError", "a wrong kernel", number, text.strip())
        return raised

    def _off(self, value: torch.Tensor) -> torch.Tensor:
        if not self.values:
            return value.to("meta").to(torch.int16)
        value = value.clone(memory_format=torch.contiguous_format)
        if value.dtype == torch.bool:
            return ~value
        if not self.exact and value.is_floating_point():
            value.view(-1)[0] = value.view(-1)[0] * 2 + 1  # one bit would be rounding
            return value
        flat = bits(value).view(-1)
        flat[0] ^= 1
        return value


def _autocast(body: Sequence[Node]) -> Iterator[Sequence[Node]]:
    """Yield the bodies of the outermost regions of autocast."""
    for node in body:
        if isinstance(node, Region):
            inside = isinstance(node.context, Autocast)
            yield from [node.body] if inside else _autocast(node.body)


# A kernel over torch's own for mm under autocast; {body} is what it does with the result `y`.
FAULT = """
import warnings
warnings.simplefilter("ignore")
library = torch.library.Library("aten", "IMPL")
key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
calls = []


def wrong(a, b):
    calls.append(1)
    with torch._C._ExcludeDispatchKeyGuard(key):
        y = torch.mm(a.bfloat16(), b.bfloat16())
        {body}
        return y


library.impl("mm", wrong, "AutocastCPU")
"""


# What runs each script that it is told of in a fork of itself, and answers how that ended.
_FORKS = """
import json, os, sys

sys.modules["amp_fuzz"] = None
for line in sys.stdin:
    path = line.strip()
    child = os.fork()
    if child == 0:
        for number, name in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(path + name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        code = run(path)
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps([code, open(path + ".out").read(), open(path + ".err").read()]), flush=True)
"""


class Ran(NamedTuple):
    """How a script ended: its exit code, and what it wrote to standard output and error."""

    code: int
    printed: str
    complained: str


Run = Callable[[str], Ran]  # from the text of a script


@contextmanager
def runner(
    program: str, folder: Path, stem: str, environment: Mapping[str, str] | None = None
) -> Iterator[Run]:
    """Start a Python process that has imported what is slow, and runs scripts in forks of itself.

    program: what it imports, and a function ``run`` from the path of a script to an exit code. The
    scripts cannot import `amp_fuzz`. stem: how their files are called, before a number.
    """
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", program + _FORKS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    to, back, numbers = process.stdin, process.stdout, count(1)

    def run(text: str) -> Ran:
        path = folder / f"{stem}{next(numbers)}.py"
        path.write_text(text)
        to.write(f"{path}\n")
        to.flush()
        return Ran(*json.loads(back.readline()))

    yield run
    to.close()
    back.close()
    assert process.wait(timeout=600) == 0


# Two cases for stores and suites: one agrees, one is known as cache-ignores-dtype.
GOOD = case([x("x0", 2, 3), x("w1", 3, 2)], call("mm", "x0", "w1"))
KNOWN = case(
    [x("x0", 2, 2), x("w1", 2, 2)],
    call("mm", "x0", "w1"),
    under(F16, call("mm", "x0", "w1", to="v1")),
    backward="none",
)


@cache
def lstm_of_bfloat16() -> bool:
    """Return whether `torch.autocast` can run one here: not on processors with AVX2 alone."""
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.nn.LSTM(8, 8)(torch.ones(2, 8))
    except RuntimeError:
        return False
    return True
