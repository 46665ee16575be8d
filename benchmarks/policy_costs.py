"""What policies cost: the digits that ops keep, lowered and in float32.

    make models                                                # the environment
    .venvs/models/bin/python benchmarks/policy_costs.py        # 25 real models, then three seeds
    .venvs/models/bin/python benchmarks/policy_costs.py --models=bert,vit --seeds=

What is in build/policy_costs is not measured again (`--again`). The models are those of
benchmarks/real_models.py, without dropout. Their forward and backward passes run in float32.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from amp_fuzz.interfaces.policy_costs import Costs, costs_of_callable, costs_of_draws
from amp_fuzz.reference import DEVICES, load_table
from benchmarks.architectures import ARCHITECTURES
from benchmarks.common import Row, arguments, machine, read, rows_apart, write
from benchmarks.precision_harms import loss_of, made

FILE = Path(__file__).with_suffix(".json")
DRAWS = 8
SEEDS = ("0", "1", "2")


def measured(kind: str, name: str) -> Row:
    """Return the costs of a model, or of programs drawn from a seed."""
    tables = {device: load_table(device) for device in DEVICES}
    if kind == "drawn":
        return costs_of_draws(tables, draws=DRAWS, seed=int(name)).as_dict()
    model, args, kwargs = made(name)
    return costs_of_callable(tables, model, args, kwargs, seed=0, loss=loss_of).as_dict()


def merged(rows: list[Row]) -> Row:
    """Return the costs of all of these."""
    total = Costs()
    for row in rows:
        total.merge(Costs.from_dict(row))
    return total.as_dict()


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--models", default=",".join(ARCHITECTURES))
    parser.add_argument("--seeds", default=",".join(SEEDS))
    parser.add_argument("--again", action="store_true", help="measure what the file has again")
    parser.add_argument("--parts", type=Path, default=Path("build/policy_costs"))
    parser.add_argument("--output", type=Path, default=FILE)
    parser.add_argument("--serve", help="(a process of its own)")
    parser.add_argument("--kind", help="(a process of its own)")
    parser.add_argument("checks", nargs="*", help="(a process of its own)")
    given = parser.parse_args()
    if given.serve:
        torch.set_num_threads(1)
        for name in given.checks:
            print("row", json.dumps([name, measured(given.kind, name)]), flush=True)
        return 0
    found: dict[str, list[Row]] = {}
    for kind, text in (("model", given.models), ("drawn", given.seeds)):
        names = [name for name in text.split(",") if name]
        parts = {name: given.parts / f"{kind}-{name}.json" for name in names}
        todo = [name for name in names if given.again or not parts[name].exists()]
        for name, row in rows_apart(__file__, "all", kind, todo) if todo else ():
            if "tallies" not in row:
                print(name, row["verdict"])
                return 1
            write(parts[name], row)
            print(name, sum(row["calls"].values()), "calls", flush=True)
        found[kind] = [read(part) for part in parts.values()]
    result = {
        "torch": torch.__version__,
        "machine": machine(),
        "draws": DRAWS,
        "seeds": [Costs.from_dict(row).verdicts() for row in found["drawn"]],
        "models": len(found["model"]),
        "drawn": merged(found["drawn"]),
        "met": merged(found["model"]),
    }
    write(given.output, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
