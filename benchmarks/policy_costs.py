"""What policies cost: the digits that ops keep, lowered and in float32.

    make models                                                # the environment
    .venvs/models/bin/python benchmarks/policy_costs.py        # 25 real models, then three seeds
    .venvs/models/bin/python benchmarks/policy_costs.py --models=bert,vit --seeds=

Each model, and each seed of drawn programs, has a process of its own; those that
benchmarks/policy_costs.json has are not made again (`--again`). The models are those of
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


def measured(name: str, kind: str, seed: int) -> Row:
    """Return the costs of a model, or of drawn programs."""
    tables = {device: load_table(device) for device in DEVICES}
    if kind == "drawn":
        return costs_of_draws(tables, draws=DRAWS, seed=seed).as_dict()
    model, args, kwargs = made(name)
    return costs_of_callable(tables, model, args, kwargs, seed=seed, loss=loss_of).as_dict()


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
    parser.add_argument("--kind", default="model", help="(a process of its own)")
    parser.add_argument("checks", nargs="*", help="(a process of its own)")
    given = parser.parse_args()
    if given.serve:
        torch.set_num_threads(1)
        for check in given.checks:
            row = measured(given.serve, given.kind, int(check))
            print("row", json.dumps([check, row]), flush=True)
        return 0
    asked = [("model", name, "0") for name in given.models.split(",") if name]
    asked += [("drawn", "programs", seed) for seed in given.seeds.split(",") if seed]
    found: dict[str, list[Row]] = {"model": [], "drawn": []}
    failed = False
    for kind, name, seed in asked:
        part = given.parts / f"{kind}-{name}-{seed}.json"
        if given.again or not part.exists():
            for _, row in rows_apart(__file__, name, kind, [seed]):
                write(part, row)
        row = read(part)
        if "tallies" not in row:
            print(name, row.get("verdict"), flush=True)
            part.unlink()
            failed = True
            continue
        found[kind].append(row)
        print(name, seed, sum(row["calls"].values()), "calls", flush=True)
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
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
