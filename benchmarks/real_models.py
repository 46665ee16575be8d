"""Check 25 architectures of other people, honest and each with three faults, and print tables.

    make models                                            # the environment, then all of it
    .venvs/models/bin/python benchmarks/real_models.py --models=bert,vit --backends=eager-cpu
    .venvs/models/bin/python benchmarks/real_models.py --faults

Each model has a process of its own; benchmarks/real_models.json has a row for each check, which is
not made again (`--again`). Without `--faults` it exits with 1 unless every honest check agrees or
says what `Architecture.but` has; with it unless the guilty module of every fault is named.

A fault is of eager-cpu alone, in torch's autocast of one layer: its op is wrong by a tenth, its
arguments are not cast, or its weight is the cast of an older one.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import amp_fuzz
from benchmarks.architectures import ARCHITECTURES
from benchmarks.common import Row, arguments, read, rows_apart, write
from tests.check.faults import Broken
from tests.faults.wrapper import KEYSET, Kernel, Wrapper, installed

BACKENDS = ("eager-cpu", "fake-cuda", "compile[aot_eager]", "compile[inductor]")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
FILE = Path(__file__).with_suffix(".json")


# -- honest models --------------------------------------------------------------------------------


def asked(name: str, backends: Sequence[str]) -> list[str]:
    """Return the honest checks of a model: ``eager-cpu, bfloat16``."""
    mine = [b for b in backends if b != "compile[inductor]" or ARCHITECTURES[name].inductor]
    return [f"{backend}, {dtype}" for backend in mine for dtype in DTYPES]


def made(name: str) -> tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]:
    """Return a model and the arguments of a call, the same each time."""
    torch.manual_seed(0)
    given = ARCHITECTURES[name]
    return given.model(), *given.inputs()


def checked(name: str, backend: Any, dtype: str) -> tuple[amp_fuzz.CheckResult, Row]:
    """Check a model; return the result, and what it took."""
    model, inputs, kwargs = made(name)
    start, before = time.perf_counter(), _cpu()
    result = amp_fuzz.check(
        model, *inputs, kwargs=kwargs, backends=[backend], autocast=DTYPES[dtype], store=None
    )
    text = str(result)
    taken = {
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(_cpu() - before, 1),
        "lines": len(text.splitlines()),
        "characters": len(text),
    }
    return result, taken


def honest(name: str, check: str) -> Row:
    """Return the row of an honest check."""
    backend, dtype = check.split(", ")
    try:
        result, taken = checked(name, backend, dtype)
    except Exception as error:  # an exception is a result here
        return {"verdict": f"{type(error).__name__}: {error}"}
    (run,) = result.runs
    but = ARCHITECTURES[name].but.get(backend)
    verdict = "expected" if but and not result.ok and but in _unwrapped(result) else result.verdict
    said = "" if verdict == "agrees" else str(result)
    known = run.divergence.known if run.divergence else ""
    return {"verdict": verdict, "detail": run.detail, "known": known, "said": said, **taken}


def _unwrapped(result: amp_fuzz.CheckResult) -> str:
    return " ".join(str(result).split())


def _cpu() -> float:
    """Return the CPU seconds of this process and of those that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


# -- faults ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Planted(Wrapper):
    """Torch's autocast with one op that is wrong: each that gets this weight.

    Every weight of a model is drawn, so its shape and values tell it from the others.
    """

    weight: torch.Tensor

    def call(self, kernel: Kernel, keys: Any, args: Sequence[Any], kwargs: Any) -> Any:
        if any(map(self.guilty, tree_leaves((args, kwargs)))):
            return self.wrong(kernel, keys, args, kwargs)
        return Wrapper.call(self, kernel, keys, args, kwargs)

    def guilty(self, value: Any) -> bool:
        """Return whether a value is the weight."""
        here = isinstance(value, torch.Tensor) and value.shape == self.weight.shape
        return here and torch.equal(value, self.weight)

    def wrong(self, kernel: Kernel, keys: Any, args: Any, kwargs: Any) -> Any:
        """Run the guilty call."""
        raise NotImplementedError


class WrongKernel(Planted):
    """The op's result is a tenth too large."""

    def wrong(self, kernel: Kernel, keys: Any, args: Any, kwargs: Any) -> Any:
        return Wrapper.call(self, kernel, keys, args, kwargs) * 1.1


class LostCast(Planted):
    """The op computes in float32."""

    def wrong(self, kernel: Kernel, keys: Any, args: Any, kwargs: Any) -> Any:
        def wide(value: Any) -> Any:
            floating = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.float() if floating else value

        with torch._C._ExcludeDispatchKeyGuard(KEYSET):
            return kernel.overload(*tree_map(wide, args), **tree_map(wide, kwargs))


class StaleCache(Planted):
    """The op gets the cast of the weight before its last step."""

    def wrong(self, kernel: Kernel, keys: Any, args: Any, kwargs: Any) -> Any:
        def stale(value: Any) -> Any:
            return value + 0.1 * value.detach() if self.guilty(value) else value

        return Wrapper.call(self, kernel, keys, tree_map(stale, args), tree_map(stale, kwargs))


FAULTS: Mapping[str, type[Planted]] = {
    "wrong kernel": WrongKernel,
    "lost cast": LostCast,
    "stale cache": StaleCache,
}


@dataclass(frozen=True)
class Watching(Wrapper):
    """Honest autocast that notes which of these weights its ops get."""

    weights: Mapping[int, str]
    seen: list[str] = field(default_factory=list)

    def call(self, kernel: Kernel, keys: Any, args: Sequence[Any], kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        self.seen.extend(self.weights[id(v)] for v in given if id(v) in self.weights)
        return Wrapper.call(self, kernel, keys, args, kwargs)


def layers(name: str) -> list[str]:
    """Return the paths of the layers whose weight autocast casts, and that use it themselves."""
    model, inputs, kwargs = made(name)
    modules = dict(model.named_modules())
    weights = {
        id(m.weight): path
        for path, m in modules.items()
        if isinstance(getattr(m, "weight", None), nn.Parameter) and m.weight.dim() > 1
    }
    watching, called = Watching(weights), list[str]()
    for path in weights.values():
        modules[path].register_forward_hook(lambda *_, path=path: called.append(path))
    with installed(watching), torch.autocast("cpu"):
        model(*inputs, **kwargs)
    return [path for path in dict.fromkeys(watching.seen) if path in called]


def broken(name: str, fault: str) -> Row:
    """Return the row of a model with a fault in its first, middle or last layer."""
    paths = layers(name)
    place = {"wrong kernel": len(paths) // 2, "lost cast": len(paths) - 1, "stale cache": 0}[fault]
    path = paths[place]
    weight = made(name)[0].get_submodule(path).weight
    assert isinstance(weight, torch.Tensor)
    planted = FAULTS[fault](weight=weight.detach())
    backend = Broken(patches=lambda: installed(planted))
    try:
        result, taken = checked(name, backend, "bfloat16")
    except Exception as error:
        return {"planted": path, "named": f"{type(error).__name__}: {error}", "right": False}
    found = next(iter(result.divergences), None)
    named = found.module if found else result.verdict
    op = found.op if found else ""
    said = "" if named == path else str(result)
    return {
        "planted": path,
        "named": named,
        "op": op,
        "right": named == path,
        "said": said,
        **taken,
    }


# -- all of them ----------------------------------------------------------------------------------


def serve(name: str, kind: str, checks: Sequence[str]) -> None:
    """Print a row for each check of one model, as JSON."""
    torch.set_num_threads(1)
    run: Callable[[str, str], Row] = honest if kind == "honest" else broken
    for check in checks:
        print("row", json.dumps([check, run(name, check)]), flush=True)


def table(data: Row) -> str:
    """Return the honest checks as a table, in Markdown: the verdict, and what each took."""
    lines = ["| model | backend | bfloat16 | float16 | seconds | CPU seconds | characters |"]
    lines.append("|---|---|---|---|---:|---:|---:|")
    for name, rows in data["honest"].items():
        for backend in BACKENDS:
            mine = [rows.get(f"{backend}, {dtype}", {}) for dtype in DTYPES]
            if any(mine):
                verdicts = [row.get("verdict", "").splitlines()[:1] for row in mine]
                took = [
                    " / ".join(str(row.get(key, "")) for row in mine)
                    for key in ("seconds", "cpu_seconds", "characters")
                ]
                cells = [name, f"`{backend}`", *("".join(v)[:60] for v in verdicts), *took]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def faults_table(data: Row) -> str:
    """Return the faults as a table, in Markdown: where each was planted, and what was named."""
    lines = ["| model | fault | planted in | named | op |", "|---|---|---|---|---|"]
    for name, rows in data["faults"].items():
        for fault, row in rows.items():
            same = (
                "the same" if row.get("right") else str(row.get("named", row.get("verdict")))[:60]
            )
            cells = [name, fault, f"`{row.get('planted')}`", same, row.get("op", "")]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--models", default=",".join(ARCHITECTURES))
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--again", action="store_true", help="make checks that the file has again")
    parser.add_argument("--output", type=Path, default=FILE)
    parser.add_argument("--serve", help="(a process of its own)")
    parser.add_argument("--kind", default="honest", help="(a process of its own)")
    parser.add_argument("checks", nargs="*", help="(a process of its own)")
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.kind, given.checks)
        return 0
    data = {"torch": torch.__version__, "honest": {}, "faults": {}, **read(given.output)}
    kind = "faults" if given.faults else "honest"
    wanted: list[Row] = []
    for name in given.models.split(","):
        checks = list(FAULTS) if given.faults else asked(name, given.backends.split(","))
        rows = data[kind].setdefault(name, {})
        todo = [check for check in checks if given.again or check not in rows]
        for check, row in rows_apart(__file__, name, kind, todo) if todo else ():
            rows[check] = row
            write(given.output, data)
            print(name, check, row.get("verdict", row.get("named")), row.get("seconds"), flush=True)
        wanted += [rows[check] for check in checks]
    print(faults_table(data) if given.faults else table(data))
    good = [
        r.get("right") if given.faults else r["verdict"] in ("agrees", "expected") for r in wanted
    ]
    what = "named" if given.faults else "agree, or say what is expected"
    print(f"{sum(map(bool, good))} of {len(good)} {what}")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
