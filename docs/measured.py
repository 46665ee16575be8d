"""Write docs/evidence/honest.md, policy-costs.md and unseen.md from the results of benchmarks.

    python docs/measured.py [--check]

--check writes nothing, and exits with 1 if a page is not what was measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from amp_fuzz.interfaces.policy_costs import Costs
from amp_fuzz.interfaces.policy_costs.measure import DTYPES
from amp_fuzz.interfaces.policy_costs.tally import ARRIVALS
from amp_fuzz.interfaces.policy_costs.view import Loss, View
from amp_fuzz.interfaces.policy_costs.view import page as costs_page

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "docs" / "evidence"

TEXT = """\
# Honest runs

<!-- Written by `make pages` from benchmarks/matrix.json, custom_functions.json and fp8.json. -->

Cases of a torch that nobody broke, as a run draws them: up to 12 statements, with backward passes.
A case that diverges is the backend's own, which shows the same without autocast
([Attribution](../internals/attribution.md)), or a known bug, or not explained. A new draw may meet
another bug, which counts as new until a list names it. What the package lists as
[open](../guide/triage.md#open-findings) counts as not explained.

## Compilers, TorchScript and others

Seeds are fresh: nobody looked at them before. `benchmarks/matrix.py` writes
[matrix.json](../../benchmarks/matrix.json).

{compilers}
## Custom functions and ops alone

These and the next are older than the outcome `backend`: what is the backend's own counts as known.

`benchmarks/custom_functions.py` writes
[custom_functions.json](../../benchmarks/custom_functions.json).

{custom}
## FP8 layers

Cases with a layer in an FP8 region, at most 6 statements. `benchmarks/fp8.py` writes
[fp8.json](../../benchmarks/fp8.json); [FP8](../guide/fp8.md) says which bugs are met.

{fp8}
## Others

[Torch versions](torch-versions.md) has eager and the fake devices on each torch, and the tests.
[JAX](../guide/jax.md#what-was-measured), [torchax](../guide/torchax.md#what-was-measured) and
[your own device](../guide/your-device.md#what-was-measured) have theirs, and [models](models.md)
those of `amp_fuzz.check`.
"""
COSTS = """\
# What a policy costs

<!-- Written by `make pages` from benchmarks/policy_costs.json. -->

Which ops belong on which list of autocast? This page shows what each list costs: the digits that an
op keeps if it is lowered, and those that it keeps in float32. It says nothing about speed.

- *Drawn*: {drawn} calls, {draws} of each op in the catalogue from each of {seeds} seeds. A call is
  at the end of a program of up to three statements. Operands are normal or uniform, 8 to 33 wide,
  and at most 16. An op is named here only if that holds for each seed.
- *Met*: {met} calls that {models} models of transformers, timm, diffusers and peft make (small,
  random weights), each with the gradient that its result gets there. Of an op with the same shapes,
  up to four calls of a model count.

All ran on one CPU with torch {torch}, by the tables of all devices. An op of 16 bits is
computed in float32 and rounded once, forward and backward. So tables are compared, and not kernels:
a kernel that adds in 16 bits costs more. Gradients are scaled to 1, as a `GradScaler` would.

`amp-fuzz policies --cost` measures your torch, and `amp-fuzz policies --cost FILE.py:NAME` the
calls of your model. `benchmarks/policy_costs.py` writes
[policy_costs.json](../../benchmarks/policy_costs.json).

## What the data say

The number of ops that tables lower, and of those that they keep in float32; and how many amplify,
or would if they were lowered: from operands in float32, or from operands that arrive in 16 bits.

{claims}"""

UNSEEN = """\
# Causes not seen yet

<!-- Written by `make pages` from benchmarks/residual.json. -->

A report says how likely it is that more cases of the same draw show a cause that no case has shown
([report](../reference/reports.md#causes-not-seen-yet)). Does that come true?

`benchmarks/residual.py` splits the drawn cases of {pairs} pairs of a run and a backend ({cases}
cases) {splits} times each. It estimates from the first part, and counts what the second shows. In
the column *held out*, half: as many cases; tenth: a tenth as many. Observed is what the second
parts showed, over all splits. Splits of a pair share its cases, so these numbers are about {pairs}
draws, not {whole}.

{estimates}
- *New causes*: those that only the second part shows. *New cases*: cases of it that show one.
- *Splits with one*: those whose second part shows any.
- *Bounds*: the sum of the upper bounds of that chance, over the splits in which the bound is less
  than 99.5 %, and so says something. Observed must be below it.
- *Own* is the backend's own, which is counted apart.

The runs are of torch {torch}; [residual.json](../../benchmarks/residual.json) has a row for the
first split of each pair.
"""


COLUMNS = ("backend", "cases", "agreed", "raised alike", "known", "not explained")
RUNS = (
    *("torch", "backend", "seed", "cases", "agreed", "raised alike", "backend's own", "known"),
    "not explained",
)


def main() -> None:
    """Write the pages, or check them."""
    check = "--check" in sys.argv[1:]
    stale = False
    for path, write in PAGES.items():
        text = write()
        if not path.exists() or path.read_text() != text:
            stale = True
            sys.stdout.write(f"{path.relative_to(ROOT)}\n")
            if not check:
                path.write_text(text)
    sys.exit(1 if check and stale else 0)


def honest_runs() -> str:
    """Return the page of honest runs."""
    runs = [row for row in result("matrix")["runs"] if "own" in row]
    return TEXT.format(
        compilers=table(RUNS, map(run, runs)),
        custom=table(COLUMNS, map(counts, result("custom_functions")["backends"].items())),
        fp8=table(("backend", "recipe", *COLUMNS[1:]), layers()),
    )


def run(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the row of a run of one backend."""
    new = ", ".join(f"{count} `{what}`" for what, count in row["unexplained"].items()) or "0"
    counted = (f"{row[key]:,}" for key in ("seed", "cases", "agreed", "raised", "own", "known"))
    return row["torch"], f"`{row['backend']}`", *counted, new


def unseen() -> str:
    """Return the page of estimates of what was not seen."""
    found = result("residual")
    halves = [row for row in found["runs"] if row["part"] == "half"]
    pairs = {(row["run"], row["backend"]): row["cases"] + row["held_out"] for row in halves}
    return UNSEEN.format(
        pairs=len(pairs),
        cases=f"{sum(pairs.values()):,}",
        splits=found["splits"],
        whole=f"{found['splits'] * len(pairs):,}",
        torch=", ".join(sorted({row["torch"] for row in halves})),
        estimates=table(ESTIMATES, map(estimated, found["whole"])),
    )


ESTIMATES = (
    *("causes", "held out", "splits", "new causes: predicted", "observed"),
    *("new cases: predicted", "observed", "splits with one: predicted", "observed"),
    *("bounds", "observed"),
)


def estimated(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the row of what was predicted and observed."""
    names = ("new_causes", "cases_with_new", "splits_with_new", "bounded")
    both = [row[name][side] for name in names for side in ("predicted", "observed")]
    return row["causes"], row["held_out"], *(f"{number:,}" for number in (row["splits"], *both))


def policy_costs() -> str:
    """Return the page of what policies cost."""
    found = result("policy_costs")
    drawn, met = (Costs.from_dict(found[name]) for name in ("drawn", "met"))
    view = View(drawn, met, found["seeds"])
    return costs_page(
        view,
        COSTS.format(
            torch=found["torch"],
            draws=found["draws"],
            seeds=len(found["seeds"]),
            models=found["models"],
            drawn=f"{drawn.calls.total():,}",
            met=f"{met.calls.total():,}",
            claims="\n".join(claims(view)),
        ),
    )


def claims(view: View) -> Iterator[str]:
    """Yield what the numbers say of the lists: a table, then sentences. None is about one seed."""
    sources = {
        "drawn": View(drawn=view.drawn, stable=view.stable),
        "met": View(met=view.met),
    }
    rows, named = [], []
    for where, own in sources.items():
        costs, ops = own.costs, own.ops()
        lowered, kept = ([op for op in ops if has(op)] for has in (costs.lowers, costs.keeps))
        named.append([loss.op for loss in own.losses(lowered)])
        for dtype in DTYPES:
            worse = [
                [op for op in found if own.amplifies(Loss(op, dtype, arrival))]
                for found in (lowered, kept)
                for arrival in ARRIVALS
            ]
            spared = [op for op in kept if own.needless(op, dtype)]
            numbers = (lowered, *worse[:2], kept, *worse[2:], spared)
            rows.append((where, dtype, *(str(len(found)) for found in numbers)))
    yield table(CLAIMS, iter(rows))
    drawn, met = map(_named, named)
    yield (
        f"Lowered ops that amplify are {drawn} among drawn calls, and {met} among those met. Drawn "
        "operands are not\nscaled as layers scale their weights.\n"
    )
    own = sources["drawn"]
    for one, other in (("cuda", "cpu"), ("cpu", "cuda")):
        keeps = {op: own.costs.keeps(op) for op in own.ops()}
        only = [op for op, devices in keeps.items() if one in devices and other not in devices]
        amplify = [loss.op for loss in own.losses(only, ("16 bits",))]
        yield (
            f"The table of {one} has {len(only)} of the judged ops in float32 that the table of "
            f"{other} has not. From operands\nin 16 bits {len(amplify)} of them amplify when "
            f"drawn: {_named(sorted(amplify))}.\n"
        )
    costs = sources["met"].costs
    for op in sources["met"].ops():
        tally = costs.lowered(op, "float16", "float32")
        if costs.keeps(op) and tally is not None and tally.overflowed:
            yield (
                f"In the models, `{op}` or its gradient is not finite in float16 in "
                f"{tally.overflowed} of {costs.calls[op]} calls.\n"
            )


CLAIMS = (
    *("calls", "dtype", "lowered", "amplify", "from 16 bits", "in float32"),
    *("would amplify", "from 16 bits", "without need"),
)


def _named(ops: list[str]) -> str:
    return ", ".join(f"`{op}`" for op in ops) or "none"


def result(name: str) -> dict[str, Any]:
    """Return what a benchmark wrote."""
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())
    return found


def counts(item: tuple[str, Any]) -> tuple[str, ...]:
    """Return the row of a backend."""
    name, row = item
    return f"`{name}`", *numbers(row["cases"], row["outcomes"])


def numbers(cases: int, outcomes: dict[str, int]) -> Iterator[str]:
    """Yield the cases of a row, by outcome."""
    yield f"{cases:,}"
    for outcome in ("agreed", "raised", "known", "diverged"):
        yield f"{outcomes.get(outcome, 0):,}"


def layers() -> Iterator[tuple[str, ...]]:
    """Yield a row for each backend and recipe of FP8."""
    for backend, row in result("fp8")["honest"].items():
        for recipe, outcomes in row["cases"].items():
            yield f"`{backend}`", recipe, *numbers(sum(outcomes.values()), outcomes)


def table(columns: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    """Return a Markdown table whose cells are numbers, but for names in code."""
    right = (*COLUMNS[1:], *RUNS[2:], *CLAIMS[2:], *ESTIMATES[2:])
    lines = [columns, tuple("---:" if c in right else "---" for c in columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


PAGES = {
    EVIDENCE / "honest.md": honest_runs,
    EVIDENCE / "policy-costs.md": policy_costs,
    EVIDENCE / "unseen.md": unseen,
}

if __name__ == "__main__":
    main()
