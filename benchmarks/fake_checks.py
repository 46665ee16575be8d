"""Compare what fake kernels accept with what the CPU's kernels refuse, over ops and dtypes.

    python benchmarks/fake_checks.py [--ops='index_*'] [--cases=2000] [--output=FILE]

Calls of aten are recorded while PyTorch's operator database and drawn cases of the catalogue run
on the CPU. Each is called again with other floating dtypes, argument by argument, and with numbers
that no 16-bit dtype, or no float32, can hold. `amp_fuzz/backends/refused.toml` has to list each
call that fake tensors accept and the CPU refuses, unless `UNLISTED` says why not. It may list no
call that the CPU accepts, unless `ACCEPTED` says why. Otherwise the exit code is 1.
"""

from __future__ import annotations

import fnmatch
import itertools
import multiprocessing
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.backends import backends, refusals
from amp_fuzz.backends.fake import fake_tensors
from amp_fuzz.backends.harness import quiet
from amp_fuzz.patching import patched
from amp_fuzz.reference.dispatch import is_composite
from amp_fuzz.runs.engine import Settings, Task, draw
from benchmarks.common import ROOT, Row, arguments, machine, versions, write

JSON = ROOT / "benchmarks" / "fake_checks.json"
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
NUMBERS = (-1e9, 1e39)
SAMPLES = 12  # of an entry of the database
CHUNK = 50  # calls of one process, which may die
LACKS = "the CPU lacks the kernel"
FLOAT32 = "CUDA's kernel computes the number in float32"
TRAINS = "only in training, with noise of the same dtype"

UNLISTED = {
    "not implemented|not yet supported|Could not run|MKL|not support": LACKS,
    "[Uu]nsupported d(ata )?type|primitive descriptor": LACKS,
    "_amp_": "tensors of the scaler, which are float32",
    "_native_multi_head|_transformer_encoder": "no part of a program under autocast",
    "log_sigmoid|multilabel": "a buffer that only the CPU's kernel writes",
    "softmax|with_logits|complex: .*'out'": "another dtype of out= may be asked for",
    "convolution:|conv_tbc:|solve_triangular:": "a check of one of the CPU's kernels",
    "_for_cpu:": "an op of the CPU alone",
    "norm.*: (mixed dtype|expected scalar type)": "CUDA's kernels mix other dtypes",
    "_with_update: |_legit: ": "CUDA's kernels mix other dtypes",
    "rrelu": TRAINS,
    "backward": "no fake device runs a backward pass",
    "uniform_|smooth_l1|dropout": "a range of numbers, whatever the dtypes",
    "linspace|scalar_tensor|histc|segment_reduce": "takes no tensor that autocast casts",
    r"addr_: \dD": "a shape, whatever the dtypes",
    "cannot be converted": FLOAT32,
}
"""Patterns of an op and its error, each with why the list leaves it out."""

ACCEPTED = {
    "fill_|full": "the CPU alone writes one number as it is",
    "index_put": "the CPU alone takes one number from a tensor",
}
"""Patterns of ops that the CPU accepts although they are listed, each with why."""

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def main() -> int:
    """Measure, and return an exit code."""
    parser = arguments(__doc__)
    parser.add_argument("--ops", default="*", help="entries of the operator database")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=JSON)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = measured(list(recorded(given.ops, given.cases).values()))
    where = {"versions": versions("torch"), "machine": machine()}
    write(given.output, {**where, "ops": given.ops, "cases": given.cases, **found})
    for name in ("calls", "refused by the CPU alone", "listed", "unlisted", "missing", "wrong"):
        print(f"{name}: {found[name]}")
    return int(bool(found["missing"] or found["wrong"]))


# -- calls ----------------------------------------------------------------------------------------


class Recording(TorchDispatchMode):
    """Keeps the first call of each overload with each kind of arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[Any, Call] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        own = func.namespace == "aten" and not is_composite(func)
        if own and all(map(_plain, tree_leaves((args, kwargs)))):
            key = (func, *map(_kind, tree_leaves((args, kwargs))))
            if key not in self.calls:
                self.calls[key] = func, *copied((args, kwargs))
        return func(*args, **kwargs)


def copied(given: Any) -> Any:
    """Return arguments with copies of their tensors."""
    return tree_map_only(torch.Tensor, lambda x: x.detach().clone(), given)


def _plain(value: object) -> bool:
    strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return strided or not isinstance(value, torch.Tensor)


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        sort = "float" if value.is_floating_point() else str(value.dtype)
        return f"{sort}{min(value.dim(), 1)}"
    return type(value).__name__


def recorded(ops: str, cases: int) -> dict[Any, Call]:
    """Return the calls that the operator database and drawn cases make."""
    from torch.testing._internal.common_methods_invocations import op_db

    recording = Recording()
    for entry in op_db:
        if not fnmatch.fnmatchcase(entry.name, ops):
            continue
        try:
            torch.manual_seed(0)
            samples = list(itertools.islice(entry.sample_inputs("cpu", DTYPES[0]), SAMPLES))
        except Exception:  # the entry has none of this dtype
            continue
        for sample in samples:
            for function in filter(None, (entry.op, entry.inplace_variant)):
                value, args, kwargs = copied((sample.input, sample.args, sample.kwargs))
                _error(lambda: _recorded(recording, function, value, *args, **kwargs))  # noqa: B023
    backend = backends()["eager-cpu"]
    with quiet():
        for case in draw(Task("eager-cpu", "*", (), cases, 0), Settings(backends=("eager-cpu",))):
            _recorded(recording, backend.run, [case])
    return recording.calls


def _recorded(recording: Recording, function: Any, *args: Any, **kwargs: Any) -> None:
    with recording:
        function(*args, **kwargs)


def variants(call: Call) -> Iterator[Call]:
    """Yield a call with other dtypes, and with other numbers."""
    func, args, kwargs = call
    schema = func._schema.arguments
    given = {**dict(zip((a.name for a in schema), args, strict=False)), **kwargs}
    floats = [n for n, x in given.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    places = [n for n, x in given.items() if type(x) in (int, float) and _number(schema, n)]
    mixes: Iterator[tuple[torch.dtype, ...]] = itertools.product(DTYPES, repeat=len(floats))
    if len(floats) > 3:  # one differs from the rest
        pairs = itertools.product(DTYPES, DTYPES, range(len(floats)))
        mixes = iter([(a,) * i + (b,) + (a,) * (len(floats) - i - 1) for a, b, i in pairs])
    for dtypes in mixes:
        for place, number in itertools.product(places, NUMBERS) if len({*dtypes}) < 2 else ():
            yield func, (), _cast({**given, place: number}, floats, dtypes)
        yield func, (), _cast(given, floats, dtypes)


def _number(schema: Any, name: str) -> bool:
    return any(a.name == name and "number" in str(a.type).lower() for a in schema)


def _cast(given: Mapping[str, Any], names: list[str], dtypes: Any) -> dict[str, Any]:
    return {**given, **{n: given[n].to(d) for n, d in zip(names, dtypes, strict=True)}}


# -- what comes of them ---------------------------------------------------------------------------


def measured(calls: list[Call]) -> Row:
    """Return what the list has, lacks, leaves out, and has wrongly."""
    counts: Counter[str] = Counter()
    rows: dict[str, Counter[str]] = {n: Counter() for n in ("listed", "unlisted", "words", "wrong")}
    missing: dict[str, str] = {}
    for op, sort, what in outcomes(calls):
        counts[sort] += 1
        if sort == "unlisted":
            why = next((w for p, w in UNLISTED.items() if re.search(p, f"{op}: {what}")), None)
            if why is None:
                missing.setdefault(op, what)
            rows[sort][why or "?"] += 1
        elif sort == "wrong" and any(re.search(pattern, op) for pattern in ACCEPTED):
            counts["accepted"] += 1
        elif sort in rows:
            rows[sort][op] += 1
            rows["words"][f"{op}: {what}"] += bool(sort == "listed" and what)
    return {
        "calls": counts.total(),
        "refused by the CPU alone": counts["listed"] + counts["unlisted"],
        "listed": counts["listed"],
        "unlisted": dict(rows["unlisted"]),
        "missing": missing,
        "wrong": dict(rows["wrong"]),
        "listed, by op": dict(sorted(rows["listed"].items())),
        "in other words": sorted(+rows["words"]),
        "accepted": counts["accepted"],
        "died": counts["died"],
    }


def outcomes(calls: list[Call]) -> Iterator[tuple[str, str, str]]:
    """Yield an op, how the two sides compare, and the CPU's error, for each variant of each call.

    Calls run in processes that may die.
    """
    context = multiprocessing.get_context("fork")
    start = 0
    while start < len(calls):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=_outcomes, args=(calls[start : start + CHUNK], writer))
        process.start()
        writer.close()
        done = 0
        try:
            while True:
                yield from reader.recv()
                done += 1
        except EOFError:
            process.join()
        if process.exitcode:
            yield str(calls[start + done][0]), "died", ""
            done += 1
        start += done


def _outcomes(calls: list[Call], writer: Any) -> None:
    for call in calls:
        writer.send([outcome(variant) for variant in variants(call)])


def outcome(call: Call) -> tuple[str, str, str]:
    """Return the op, how the two sides compare, and the CPU's error, or "" if its words are listed.

    ``listed`` and ``unlisted``: the CPU refuses it and a fake kernel does not; ``wrong``: the list
    refuses it, and the CPU does not; ``alike``: anything else.
    """
    func, _, given = call
    op = func.overloadpacket.__name__
    said = refusals.refusal(func, (), given)
    error = _error(lambda: func(**copied(given)))
    if error is None:
        return op, "wrong" if said else "alike", ""
    words = str(error).partition("\n")[0]
    with patched(refusals, "refusal", lambda *call: ""), fake_tensors("cuda"):
        fakes = tree_map_only(torch.Tensor, _faked, given)
        if _error(lambda: func(**fakes)) is not None:
            return op, "alike", ""
    if said:
        return op, "listed", "" if words.startswith(said) else words
    return op, "unlisted", words


def _faked(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")


def _error(call: Any) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


if __name__ == "__main__":
    sys.exit(main())
