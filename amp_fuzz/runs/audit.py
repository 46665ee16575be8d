"""The audit: every op, every mix of floating dtypes, every device, one call each.

A cell of the conformance matrix is one call of one op under autocast, with one combination of
input dtypes, on one backend. It has the result dtype under the reference and under the real
implementation, or their errors, and whether `amp_fuzz.oracle.compare` finds a difference. Each cell
is a case, so it can be replayed.

Unlike `amp_fuzz.runs.engine`, nothing here is random: the cells and their case ids are the same on
every machine.
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

from amp_fuzz.backends import Backend, backends, unsupported
from amp_fuzz.backends.accelerator import DeviceFailure, or_ends
from amp_fuzz.backends.harness import Observation, quiet
from amp_fuzz.backends.source import statement_source
from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.program import (
    FLOAT_DTYPES,
    Autocast,
    DType,
    Program,
    Statement,
    refs,
    statements,
)
from amp_fuzz.catalogue import CATALOGUE, Op
from amp_fuzz.findings.supervision.processes import death, end, no_interrupts, start
from amp_fuzz.oracle import Divergence, compare
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.plugins import inherited
from amp_fuzz.records.schema import DivergenceRecord, Outcome, outcome_of
from amp_fuzz.reference import PolicyTable, load_table
from amp_fuzz.reports.conformance import (
    AUTOCAST_DTYPES,
    Cell,
    Status,
    describe,
    differences,
    frame,
    markdown,
    matrix,
    missing,
    summary,
    write,
)
from amp_fuzz.strategies.builder import Palette, ProgramBuilder
from amp_fuzz.strategies.drawing import usable
from amp_fuzz.upstream.explain import judge_of
from amp_fuzz.upstream.known import Known

__all__ = [
    "AUTOCAST_DTYPES",
    "Cell",
    "audit",
    "audit_op",
    "calls",
    "case_of",
    "cases_of",
    "combinations",
    "count",
    "describe",
    "differences",
    "frame",
    "judged",
    "left_out",
    "markdown",
    "matrix",
    "missing",
    "run_cells",
    "samples",
    "summary",
    "traits",
    "write",
]

_EXHAUSTIVE = 3  # floating inputs: 64 combinations
_DRAWS = 24
# Not fork: torch has threads by now.
_SPAWN = get_context("spawn")


# -- cases ----------------------------------------------------------------------------------------


def combinations(floats: int) -> tuple[tuple[str, ...], ...]:
    """Return the combinations of dtypes of a number of floating inputs.

    Up to three inputs, all 4^k. With more, those with one dtype for all and those in which one
    input has a different dtype: 4 + 12 k.
    """
    if floats <= _EXHAUSTIVE:
        return tuple(itertools.product(FLOAT_DTYPES, repeat=floats))
    found = {(dtype,) * floats: None for dtype in FLOAT_DTYPES}
    for most, odd in itertools.permutations(FLOAT_DTYPES, 2):
        for i in range(floats):
            found[tuple(odd if j == i else most for j in range(floats))] = None
    return tuple(found)


def samples(floats: int) -> tuple[tuple[str, ...], ...]:
    """Return a few combinations: one dtype for all, or a different one for the first input.

    Of two dtypes one is float32, which is enough to tell whether an op promotes.
    """
    found = [(dtype,) * floats for dtype in FLOAT_DTYPES[: None if floats else 1]]
    if floats > 1:
        halves = (d for d in FLOAT_DTYPES if d != "float32")
        for half in halves:
            found += [("float32", *(half,) * (floats - 1)), (half, *("float32",) * (floats - 1))]
    return tuple(found)


@cache
def calls(name: str) -> tuple[Program, ...]:
    """Return the calls of an op that are audited, with float32 inputs.

    The first has the op's first form, names no dtype if the op allows that, and has the most
    floating inputs, so biases and states are present. Each further one has a new trait (`traits`):
    autocast may see other kernels, or another argument.
    """
    op = CATALOGUE[name]
    drawn = [_draw(op, form, seed) for form in op.forms for seed in range(_DRAWS)]
    drawn = [p for p in drawn if all(0 not in spec.shape for spec in p.inputs)] or drawn
    # For each form, first those with useful values: not a matrix of one element or one row.
    drawn.sort(key=lambda p: ([*op.forms].index(_call(p).form), _is_small(p)))
    first = [p for p in drawn if _call(p).form == next(iter(op.forms))]
    first.sort(key=lambda p: ("dtype" in dict(_call(p).kwargs), -len(_floating(p))))
    chosen = [next(filter(_runs, first), (first or drawn)[0])]
    seen = set(traits(chosen[0]))
    for program in drawn:
        if not traits(program) <= seen and _runs(program):
            chosen.append(program)
            seen |= traits(program)
    return tuple(chosen)


def traits(program: Program) -> frozenset[tuple[object, ...]]:
    """Return the traits that may decide which kernels a call reaches and which arguments are cast.

    These are its form, its keywords, the values of flags, words and dtypes, and the number of
    dimensions of its floating inputs.
    """
    statement = _call(program)
    found: set[tuple[object, ...]] = {("form", statement.form)}
    written: set[str] = set()
    for name, arg in (*enumerate(statement.args), *statement.kwargs):
        if name == "out":
            written = set(refs(arg))
        else:
            told = arg if arg is None or isinstance(arg, (bool, str, DType)) else type(arg).__name__
            found.add(("argument", name, str(told)))
    read = [program.inputs[i] for i in _floating(program)]
    ranks = [min(len(spec.shape), 3) for spec in read if spec.name not in written]
    found.update(("rank", i, rank) for i, rank in enumerate(ranks[:_EXHAUSTIVE]))
    found.add(("scalars", *(rank == 0 for rank in ranks[:_EXHAUSTIVE])))
    return frozenset(found)


def _draw(op: Op, form: str, seed: int) -> Program:
    rng = random.Random(f"{op.name}/{seed}")
    builder = ProgramBuilder(rng.randbytes, {}, Palette(floats=("float32",)))
    statement = builder.statement(op, form)
    # Nothing trains here: weights are inputs.
    inputs = tuple(
        msgspec.structs.replace(spec, role="input") if spec.role == "weight" else spec
        for spec in builder.inputs
    )
    return Program(inputs, (statement,), tuple(n for n in statement.outputs if n != "_"))


def _runs(program: Program) -> bool:
    """Return whether a call runs without autocast, if its op can run."""
    op = CATALOGUE[_call(program).op]
    device = "cpu" if op.devices is None or "cpu" in op.devices else op.devices[0]
    backend = backends()["eager-cpu" if device == "cpu" else f"fake-{device}"]
    return backend.run([Case(program, Plan(contexts=(), backward="none"))])[0].raised is None


def _is_small(program: Program) -> bool:
    return any(1 in program.inputs[i].shape for i in _floating(program))


def _call(program: Program) -> Statement:
    (statement,) = statements(program.body)
    return statement


def _floating(program: Program) -> list[int]:
    return [i for i, spec in enumerate(program.inputs) if spec.dtype in FLOAT_DTYPES]


def case_of(program: Program, autocast_dtype: str, input_dtypes: Sequence[str]) -> Case:
    """Return the case of a cell: a call of `calls` with these dtypes for its floating inputs."""
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
    """Return the number of pairs of op and backend in an audit: the lists that it yields."""
    ops = tuple(ops)
    return sum(len(_able(backend, ops)) for backend in chosen)


def left_out(backend: Backend, ops: Iterable[Op]) -> dict[str, list[str]]:
    """Return the ops that have no cell on a backend, by reason."""
    ops = tuple(ops)
    if not _dtypes(backend.device):
        low = " or ".join(AUTOCAST_DTYPES)
        return {f"{backend.device} does not autocast to {low}": [op.name for op in ops]}
    here = {op.name for op in usable(ops, backend.device, fp8=True)}
    able = {op.name for op in _able(backend, ops)}
    found = {
        f"other devices have them, {backend.device} does not": [
            op.name for op in ops if op.name not in here
        ],
        f"{backend.name} cannot express them": [
            op.name for op in ops if op.name in here and op.name not in able
        ],
    }
    return {why: names for why, names in found.items() if names}


def _able(backend: Backend, ops: Iterable[Op]) -> list[Op]:
    """Return the ops that a backend can call, if it has a dtype to audit them in."""
    if not _dtypes(backend.device):
        return []
    return [op for op in usable(ops, backend.device, fp8=True) if _said(backend, op)]


def _said(backend: Backend, op: Op) -> list[Program]:
    """Return the calls of an op that a backend can express."""
    return [p for p in calls(op.name) if not unsupported(Case(p), backend)]


# -- judging --------------------------------------------------------------------------------------


def cases_of(backend: Backend, op: Op) -> list[Case]:
    """Return the cells of an op on a backend, as cases.

    The first call has every combination of dtypes under every autocast dtype. The others have a few
    under the first autocast dtype.
    """
    dtypes = _dtypes(backend.device)
    found: list[Case] = []
    for n, program in enumerate(_said(backend, op)):
        floats = len(_floating(program))
        mixes, under = (samples(floats), dtypes[:1]) if n else (combinations(floats), dtypes)
        found += [case_of(program, dtype, mix) for dtype in under for mix in mixes]
    return found


def audit_op(backend: Backend, op: Op, known: Sequence[Known] = ()) -> list[Cell]:
    """Return the cells of one op on one backend, run in this process."""
    return judged(backend, cases_of(backend, op), known)


def judged(backend: Backend, cases: Iterable[Case], known: Sequence[Known] = ()) -> list[Cell]:
    """Run the cases of cells on a backend, in this process, and return the cells."""
    with quiet():
        return [_judged(backend, known, case) for case in cases]


def _judged(backend: Backend, known: Sequence[Known], case: Case) -> Cell:
    case = backend.fit(case)
    try:
        expected = backend.reference().run(case)
        observed = backend.run([case])[0]
    except DeviceFailure as failure:
        if failure.kind != "memory":
            raise
        return _cell(backend, case, *("raises OutOfMemoryError",) * 2, None)
    record: DivergenceRecord | None = None
    if compare(expected, observed, values=backend.values) is not None:
        verdict = judge_of(backend, known, relations="none").judge(case)
        if verdict.divergence is not None:
            record = verdict.finding(CATALOGUE[_call(case.program).op].family)
    return _cell(backend, case, _outcome(expected), _outcome(observed), record)


_STATUSES: dict[Outcome, Status] = {"backend": "own", "known": "known", "diverged": "differs"}


def _outcome(seen: Observation) -> str:
    if seen.raised is not None:
        return f"raises {seen.raised.kind}"
    return ", ".join(
        str(t.dtype).removeprefix("torch.") for t in seen.values.values() if t is not None
    )


def _cell(
    backend: Backend,
    case: Case,
    expected: str,
    observed: str,
    record: DivergenceRecord | None,
) -> Cell:
    program = case.program
    statement = _call(program)
    op = CATALOGUE[statement.op]
    names = [name.removeprefix("aten::") for name in op.overloads]
    rules = _table(backend.device).rules
    status: Status = "raise" if observed.startswith("raises ") else "agree"
    if record is not None:
        status = _STATUSES[outcome_of(record.known)]
    return Cell(
        device=backend.device,
        backend=backend.name,
        op=op.name,
        overload=names[0] if names else "",
        policy=next((rules[n].policy.value for n in names if n in rules), "none"),
        call=statement_source(statement).partition(" = ")[2],
        shapes=" ".join(f"{spec.name}{list(spec.shape)}" for spec in program.inputs),
        autocast_dtype=case.plan.contexts[0].dtype or "",
        input_dtypes=tuple(program.inputs[i].dtype for i in _floating(program)),
        expected=expected,
        observed=observed,
        status=status,
        kind="" if record is None else record.kind,
        known="" if record is None else record.known,
        case_id=case.id,
        finding=record,
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

    If a worker dies, only its cell is lost: it differs, with kind ``crash``.
    Closing the iterator (an interrupt) ends the workers.
    """
    known = tuple(known)
    able = [(b.name, {op.name for op in _able(b, ops)}) for b in chosen]
    # Op after op: an audit that is cut short has compared the same ops on all backends.
    waiting = deque((name, op.name) for op in ops for name, own in able if op.name in own)
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
        # One of the running pairs killed a worker, and the pool with it.
        for name, op in (*lost, *running.values()):
            yield _alone(backends()[name], CATALOGUE[op], known)


def _alone(backend: Backend, op: Op, known: tuple[Known, ...]) -> list[Cell]:
    """Run a pair in a separate process, and in a new one after each cell that kills it."""
    cases = cases_of(backend, op)
    cells: list[Cell] = []
    while len(cells) < len(cases):
        ours, theirs = connection.Pipe(duplex=False)
        process = start(_send, theirs, backend.name, cases[len(cells) :], known)
        theirs.close()
        try:
            while len(cells) < len(cases):
                cells.append(ours.recv())
        except EOFError:
            cells.append(_crash(backend, cases[len(cells)], death(process)))
        end(process, patience=5)
    return cells


def _send(
    pipe: connection.Connection, backend: str, cases: list[Case], known: tuple[Known, ...]
) -> None:
    for case in cases:
        pipe.send(run_cells(backend, [case], known)[0])


def _crash(backend: Backend, case: Case, how: str) -> Cell:
    found = Divergence("crash", "", "an answer", f"the process died {how}")
    verdict = Verdict(case, backend.name, "diverged", found)
    record = verdict.finding(CATALOGUE[_call(case.program).op].family)
    return _cell(backend, case, found.expected, found.observed, record)


def _work(backend: str, op: str, known: tuple[Known, ...]) -> list[Cell]:
    inherited()
    return run_cells(backend, cases_of(backends()[backend], CATALOGUE[op]), known)


def run_cells(backend: str, cases: Sequence[Case], known: tuple[Known, ...] = ()) -> list[Cell]:
    """Run the cases of cells on the backend of that name, in a worker process."""
    import torch

    torch.set_num_threads(1)
    inherited()
    with or_ends():
        return judged(backends()[backend], cases, known)
