"""Write docs/evidence/shadow-operators.md: every operator over the threshold, explained.

    python benchmarks/shadow_table.py

Reads what shadow.py measured (shadow.json) and what is known of each kernel (shadow_kernels.toml).
A kind is not an opinion: it holds only if its experiment says so (`PROOF`), and a row without one
is an error here, as is a kernel without a sentence.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "evidence" / "shadow-operators.md"
THRESHOLD = 4.0
# What the threshold allows the largest element: 4 times the 4 roundoffs of an input and the one of
# the output. A kernel that cancels is off by no more than that in the others too.
FEW = THRESHOLD * (4 + 1)

Experiments = Mapping[str, float]


def _under(name: str) -> Callable[[Experiments], bool]:
    return lambda e: e.get(name, float("inf")) <= THRESHOLD


PROOF: dict[str, Callable[[Experiments], bool]] = {
    "few samples": _under("alone"),
    "what came in": _under("alone"),
    "free choice": _under("magnitudes"),
    "16 bits inside": _under("in float32"),
    "range": _under("scaled"),
    "special input": _under("random input"),
    "numbers": _under("numbers"),
    "cancellation": lambda e: e.get("of the largest", float("inf")) <= FEW,
    # By argument, not by experiment: torch is wrong, or nothing is right.
    "fault": lambda e: True,
    "not determined": lambda e: True,
}
SAID = {
    "few samples": "the kernel alone is honest, and so is the value with 64 samples instead of 8",
    "what came in": "the kernel alone is honest; its inputs were already off, within their bands",
    "free choice": "the absolute values agree; signs or phases are free",
    "16 bits inside": "with the inputs held in float32 and the result rounded once, it agrees",
    "range": "with inputs scaled to about 1 it agrees: overflow or subnormal numbers inside",
    "special input": "on normal random inputs it agrees",
    "numbers": "with Python numbers, scales and positions perturbed as float32 inputs, it agrees",
    "cancellation": "off by a few roundoffs of the largest element, not of each",
    "fault": "torch is wrong, by argument",
    "not determined": "by argument: the inputs leave the result open",
    "unexplained": "no experiment shows why; the evidence column says what is known",
}


class Unexplained(Exception):
    """A row has no sentence, or a kind that its experiments do not bear out."""


def load() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what was measured and what is known of the kernels."""
    known = tomllib.loads((HERE / "shadow_kernels.toml").read_text())
    return json.loads((HERE / "shadow.json").read_text()), known


def kind(row: Mapping[str, Any], known: Mapping[str, Any]) -> tuple[str, str]:
    """Return the kind of a row, and the sentence about its kernel.

    Raises:
        Unexplained: there is none, or the experiments contradict it.
    """
    name = f"{row['kernel']}, {row['result']}"
    found: Experiments = row["experiments"]
    entries = known.get(row["kernel"].partition(".")[0], [])
    if PROOF["what came in"](found):  # whatever the kernel is, it is not to blame
        said = "what came in" if row["values with 64 samples"] else "few samples"
        own = [e["why"] for e in [*entries, *known["_honest"]] if e["kind"] == said]
        return said, own[0]
    for entry in entries:
        if entry["kind"] not in PROOF:
            raise Unexplained(f"shadow_kernels.toml: {name}: no such kind: {entry['kind']!r}")
        its = row["kernel"].endswith(entry.get("overload", ""))
        if its and PROOF[entry["kind"]](found):
            return entry["kind"], entry["why"]
    raise Unexplained(f"shadow_kernels.toml explains no {name}: {dict(found)}")


OPEN = "unexplained"
PARTS = ("operator database", "random cases")


def explained(row: Mapping[str, Any], known: Mapping[str, Any]) -> tuple[str, str]:
    """Return the kind of a row; what no experiment bears out is said to be open.

    Raises:
        Unexplained: it is a row of the operator database, and `_open` does not have it.
    """
    try:
        return kind(row, known)
    except Unexplained:
        if "operator" not in row:
            said = f"{row['observed']:.3g} for {row['expected']:.3g}, case `{row['example']}`"
            return OPEN, said
        for entry in known["_open"]:
            if entry["part"] == PARTS[0] and _named(row) in entry["kernels"]:
                return OPEN, entry["why"]
        raise


def left_open(measured: Mapping[str, Any], known: Mapping[str, Any], part: str) -> list[str]:
    """Return the kernels and dtypes of a part that no experiment explains."""
    rows = measured[part]["over the threshold"]
    return sorted(_named(r) for r in rows if explained(r, known)[0] == OPEN)


def page(measured: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    """Return the text of docs/evidence/shadow-operators.md."""
    database, cases = measured["operator database"], measured.get("random cases", {})
    lines = [INTRODUCTION.format(few=f"{FEW:g}"), _summary(database, cases), ""]
    lines += ["| kind | what the experiment shows |", "|---|---|"]
    lines += [f"| {k} | {SAID[k]} |" for k in (*PROOF, OPEN)]
    lines += ["", "## PyTorch's operator database", "", _heading(database), ""]
    lines += [
        "| operator | inputs | | kernel | excess | kind | evidence |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(database["over the threshold"], key=lambda r: (r["operator"], r["dtype"])):
        said, why = explained(row, known)
        lines.append(
            f"| `{row['operator']}` | {row['dtype']} | {row['direction']} | `{_short(row)}` "
            f"| {row['excess']:.3g} | {said} | {_shown(row, said)}; {why} |"
        )
    if not cases:
        return "\n".join(lines) + "\n"
    lines += ["", "## Random cases", "", _heading(cases), "", *_kinds(cases, known), ""]
    lines += [
        "| kernel | result | cases | values | excess | kind | evidence |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(cases["over the threshold"], key=lambda r: (-r["values"], r["kernel"])):
        said, why = explained(row, known)
        lines.append(
            f"| `{_short(row)}` | {row['result']} | {row['runs']} | {row['values']} "
            f"| {row['excess']:.3g} | {said} | {_shown(row, said)}; {why} |"
        )
    return "\n".join(lines) + "\n"


INTRODUCTION = """# Operators over the threshold, one by one

`benchmarks/shadow_table.py` writes this page from `benchmarks/shadow.json`; a test compares the
two.

The tables measure torch's own kernels against their bands, *without* the allowance that a
comparison has ([shadows](../internals/shadow.md)). If a result is over the threshold of 4, the
first kernel that goes over it is called again alone: as it is, with 16-bit inputs held in float32,
with scaled inputs, on random input, with its numbers perturbed too, and up to signs. A row gets a
kind only if an experiment brings the excess under 4 (for a cancellation: an error of at most {few}
roundoffs of the largest element). [`benchmarks/shadow.csv`](../../benchmarks/shadow.csv) has the
distribution of every operator and dtype.
"""


def _summary(database: Mapping[str, Any], cases: Mapping[str, Any]) -> str:
    rows = ["| | comparisons | over 4 | median | 90 % | 99 % | 99.9 % | largest |"]
    rows.append("|---|---|---|---|---|---|---|---|")
    for title, part in (("operator database", database), ("random cases", cases)):
        if not part:
            continue
        excess, over = part["excess"], part["over the threshold, of them"]
        rows.append(f"| {title} | {part['comparisons']:,} | {over:,} | {_row(excess)} |")
        for dtype in ("float32", "bfloat16", "float16"):
            for direction in ("forward", "gradient"):
                found = part["by dtype"].get(f"{dtype}, {direction}")
                if found:
                    rows.append(
                        f"| {dtype}, {direction} | {found['comparisons']:,} | | {_row(found)} |"
                    )
    return "\n".join(rows)


def _row(excess: Mapping[str, float]) -> str:
    names = ("median", "90 %", "99 %", "99.9 %", "largest")
    return " | ".join(f"{excess[n]:.3g}" for n in names)


def _heading(part: Mapping[str, Any]) -> str:
    rows = part["over the threshold"]
    over = sum(r["values"] for r in rows)
    still = sum(r["values with 64 samples"] for r in rows)
    if "operators" in part:
        own = len({r["operator"] for r in rows})
        first = f"{own} of {part['operators']} operators are over the threshold: "
    else:
        some = part["cases with a value over the threshold"]
        first = f"{some} of {part['cases']:,} cases have a value over the threshold: "
    return (
        f"{first}{over} of {part['comparisons']:,} values with 8 samples. With 64 "
        f"samples, as a divergence requires, {still} are."
    )


def _kinds(cases: Mapping[str, Any], known: Mapping[str, Any]) -> list[str]:
    counts: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for row in cases["over the threshold"]:
        count = counts[explained(row, known)[0]]
        for i, n in enumerate((1, row["runs"], row["values"], row["values with 64 samples"])):
            count[i] += n
    lines = [
        "| kind | kernels and dtypes | cases | values | with 64 samples |",
        "|---|---|---|---|---|",
    ]
    kinds = [k for k in (*PROOF, OPEN) if k in counts]
    return lines + [f"| {k} | {' | '.join(map(str, counts[k]))} |" for k in kinds]


def _short(row: Mapping[str, Any]) -> str:
    return str(row["kernel"]).removesuffix(".default")


def _named(row: Mapping[str, Any]) -> str:
    return f"{_short(row)} {row['result']}"


def _shown(row: Mapping[str, Any], said: str) -> str:
    """Return the number that makes a kind."""
    names = {
        "free choice": "magnitudes",
        "16 bits inside": "in float32",
        "range": "scaled",
        "special input": "random input",
        "numbers": "numbers",
        "cancellation": "of the largest",
    }
    name = names.get(said, "alone")
    number = row["experiments"].get(name)
    if number is None:
        return "cannot be called alone"
    return f"{name} {number:.2g}" + (" roundoffs" if said == "cancellation" else "")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page(*load()))
