"""The audit: every op, every mix of floating dtypes, every device, one call each.

A cell of the conformance matrix is one call of one op under autocast, with one combination of
input dtypes, on one backend. It says what dtype comes out under the reference and under the real
implementation, or that they raise, and whether the two agree in all that `amp_fuzz.oracle.compare`
compares. Each cell is a case, so it can be replayed.

Where `amp_fuzz.engine` draws at random, nothing here is: the same cells, with the same case ids,
on every machine.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from multiprocessing import connection, get_context

import msgspec

from amp_fuzz.backends import Backend, backends
from amp_fuzz.case import Case, Plan
from amp_fuzz.catalogue import CATALOGUE, Op
from amp_fuzz.conformance import (
    AUTOCAST_DTYPES,
    Cell,
    describe,
    differences,
    frame,
    markdown,
    matrix,
    summary,
    write,
)
from amp_fuzz.harness import Observation
from amp_fuzz.judge import Judge, Verdict, quiet, unsupported
from amp_fuzz.known import Known
from amp_fuzz.oracle import Divergence, compare
from amp_fuzz.plugins import inherited
from amp_fuzz.processes import end, no_interrupts, start
from amp_fuzz.program import FLOAT_DTYPES, Autocast, Program
from amp_fuzz.records import DivergenceRecord
from amp_fuzz.reference import PolicyTable, load_table
from amp_fuzz.strategies.builder import Palette, ProgramBuilder
from amp_fuzz.strategies.drawing import usable

__all__ = [
    "AUTOCAST_DTYPES",
    "Cell",
    "audit",
    "audit_op",
    "combinations",
    "count",
    "describe",
    "differences",
    "frame",
    "markdown",
    "matrix",
    "summary",
    "write",
]

_EXHAUSTIVE = 3  # floating inputs: 64 combinations
_DRAWS = 24
# Not fork: torch has threads by now.
_SPAWN = get_context("spawn")


# -- cases ----------------------------------------------------------------------------------------


def combinations(floats: int) -> tuple[tuple[str, ...], ...]:
    """Return the combinations of dtypes of so many floating inputs.

    All 4^k of them up to three inputs. Beyond, those with one dtype for all and those in which one
    input has another dtype than the rest: 4 + 12 k.
    """
    if floats <= _EXHAUSTIVE:
        return tuple(itertools.product(FLOAT_DTYPES, repeat=floats))
    found = {(dtype,) * floats: None for dtype in FLOAT_DTYPES}
    for most, odd in itertools.permutations(FLOAT_DTYPES, 2):
        for i in range(floats):
            found[tuple(odd if j == i else most for j in range(floats))] = None
    return tuple(found)


@cache
def template(name: str) -> Program:
    """Return the one call of an op that is audited, in its first form, with float32 inputs.

    Of a fixed number of draws, those that run without autocast and without an empty tensor; of
    these, the first with the most floating inputs, so that biases and states are there.
    """
    op = CATALOGUE[name]
    drawn = [_draw(op, seed) for seed in range(_DRAWS)]
    drawn = [p for p in drawn if all(0 not in spec.shape for spec in p.inputs)] or drawn
    drawn.sort(key=lambda p: -len(_floating(p)))
    device = "cpu" if op.devices is None or "cpu" in op.devices else op.devices[0]
    backend = backends()["eager-cpu" if device == "cpu" else f"fake-{device}"]
    bare = Plan(contexts=(), backward="none")
    runs = (p for p in drawn if backend.run([Case(p, bare)])[0].raised is None)
    return next(runs, drawn[0])


def _draw(op: Op, seed: int) -> Program:
    rng = random.Random(f"{op.name}/{seed}")
    builder = ProgramBuilder(rng.randbytes, {}, Palette(floats=("float32",)))
    statement = builder.statement(op, next(iter(op.forms)))
    # Nothing trains here: weights are inputs.
    inputs = tuple(
        msgspec.structs.replace(spec, role="input") if spec.requires_grad else spec
        for spec in builder.inputs
    )
    return Program(inputs, (statement,), tuple(n for n in statement.outputs if n != "_"))


def _floating(program: Program) -> list[int]:
    return [i for i, spec in enumerate(program.inputs) if spec.dtype in FLOAT_DTYPES]


def case_of(op: Op, autocast_dtype: str, input_dtypes: Sequence[str]) -> Case:
    """Return the case of a cell."""
    program = template(op.name)
    inputs = list(program.inputs)
    for i, dtype in zip(_floating(program), input_dtypes, strict=True):
        inputs[i] = msgspec.structs.replace(inputs[i], dtype=dtype)
    program = msgspec.structs.replace(program, inputs=tuple(inputs))
    return Case(program, Plan(contexts=(Autocast(dtype=autocast_dtype),), backward="none"))


def _dtypes(device: str) -> tuple[str, ...]:
    supported = _table(device).supported_dtypes
    return tuple(dtype for dtype in AUTOCAST_DTYPES if dtype in supported)


@cache
def _table(device: str) -> PolicyTable:
    return load_table(device)


def count(chosen: Iterable[Backend], ops: Iterable[Op]) -> int:
    """Return how many pairs of op and backend an audit goes through: the lists it yields."""
    ops = tuple(ops)
    return sum(len(_able(backend, ops)) for backend in chosen)


def _able(backend: Backend, ops: Iterable[Op]) -> list[Op]:
    """Return the ops whose template a backend can run, if it has a dtype to audit them in."""
    if not _dtypes(backend.device):
        return []
    able = usable(ops, backend.device)
    return [op for op in able if unsupported(Case(template(op.name)), backend) is None]


# -- judging --------------------------------------------------------------------------------------


def audit_op(
    backend: Backend, op: Op, known: Sequence[Known] = (), part: slice = slice(None)
) -> list[Cell]:
    """Return the cells of one op on one backend, or a part of them, run in this process."""
    with quiet():
        return [_judged(backend, op, known, case) for case in _cases(backend, op)[part]]


def _cases(backend: Backend, op: Op) -> list[Case]:
    mixes = combinations(len(_floating(template(op.name))))
    return [case_of(op, dtype, mix) for dtype in _dtypes(backend.device) for mix in mixes]


def _judged(backend: Backend, op: Op, known: Sequence[Known], case: Case) -> Cell:
    case = backend.fit(case)
    expected = backend.reference().run(case)
    observed = backend.run([case])[0]
    record: DivergenceRecord | None = None
    if compare(expected, observed, values=backend.values) is not None:
        verdict = Judge(backend, known, relations="none").judge(case)
        record = verdict.finding(op.family) if verdict.divergence is not None else None
    return _cell(backend, op, case, _outcome(expected), _outcome(observed), record)


def _outcome(seen: Observation) -> str:
    if seen.raised is not None:
        return f"raises {seen.raised.kind}"
    return ", ".join(
        str(t.dtype).removeprefix("torch.") for t in seen.values.values() if t is not None
    )


def _cell(
    backend: Backend,
    op: Op,
    case: Case,
    expected: str,
    observed: str,
    record: DivergenceRecord | None,
) -> Cell:
    names = [name.removeprefix("aten::") for name in op.overloads]
    rules = _table(backend.device).rules
    program = case.program
    return Cell(
        device=backend.device,
        backend=backend.name,
        op=op.name,
        overload=names[0] if names else "",
        policy=next((rules[n].policy.value for n in names if n in rules), "none"),
        autocast_dtype=case.plan.contexts[0].dtype or "",
        input_dtypes=tuple(program.inputs[i].dtype for i in _floating(program)),
        expected=expected,
        observed=observed,
        status="agree" if record is None else "known" if record.known else "differs",
        kind="" if record is None else record.kind,
        known="" if record is None else record.known,
        case_id=case.id,
        finding=None if record is None or record.known else record,
    )


# -- many processes -------------------------------------------------------------------------------


def audit(
    chosen: Sequence[Backend],
    ops: Sequence[Op],
    *,
    known: Sequence[Known] = (),
    workers: int = 1,
) -> Generator[list[Cell]]:
    """Audit ops on backends over worker processes; yield the cells of each pair as they come.

    A worker that dies costs the cell that it died of: that one differs, with kind ``crash``.
    Closing the iterator (an interrupt) ends the workers.
    """
    known = tuple(known)
    waiting = deque((b.name, op.name) for b in chosen for op in _able(b, ops))
    while waiting:
        running: dict[Future[list[Cell]], tuple[str, str]] = {}
        lost: list[tuple[str, str]] = []
        with ProcessPoolExecutor(workers, _SPAWN) as pool:
            try:
                while (waiting or running) and not lost:
                    while waiting and len(running) < 2 * workers and not lost:
                        pair = waiting.popleft()
                        try:
                            with no_interrupts():  # the first ones start the workers
                                running[pool.submit(_work, *pair, known)] = pair
                        except BrokenProcessPool:
                            lost.append(pair)
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        pair = running.pop(future)
                        try:
                            yield future.result()
                        except BrokenProcessPool:
                            lost.append(pair)
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
        # A worker died, and the pool with it, of one of the pairs that were at hand.
        for name, op in (*lost, *running.values()):
            yield _alone(backends()[name], CATALOGUE[op], known)


def _alone(backend: Backend, op: Op, known: tuple[Known, ...]) -> list[Cell]:
    """Run a pair in a process of its own, and in a new one after each cell that ends it."""
    cases = _cases(backend, op)
    cells: list[Cell] = []
    while len(cells) < len(cases):
        ours, theirs = connection.Pipe(duplex=False)
        process = start(_send, theirs, backend.name, op.name, known, len(cells))
        theirs.close()
        try:
            while len(cells) < len(cases):
                cells.append(ours.recv())
        except EOFError:
            cells.append(_crash(backend, op, cases[len(cells)]))
        end(process, patience=5)
    return cells


def _send(
    pipe: connection.Connection, backend: str, op: str, known: tuple[Known, ...], start: int
) -> None:
    inherited()
    for i in range(start, len(_cases(backends()[backend], CATALOGUE[op]))):
        pipe.send(_work(backend, op, known, slice(i, i + 1))[0])


def _crash(backend: Backend, op: Op, case: Case) -> Cell:
    found = Divergence("crash", "", "an answer", "the process died")
    verdict = Verdict(case, backend.name, "diverged", found)
    return _cell(backend, op, case, found.expected, found.observed, verdict.finding(op.family))


def _work(backend: str, op: str, known: tuple[Known, ...], part: slice = slice(None)) -> list[Cell]:
    import torch

    torch.set_num_threads(1)
    inherited()
    return audit_op(backends()[backend], CATALOGUE[op], known, part)
