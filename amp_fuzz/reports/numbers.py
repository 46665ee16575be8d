"""The numbers of a report's pictures, for programs: plain values of JSON, with their columns.

They are those of `amp_fuzz.reports.pictures` and its parts, which the pages and Markdown print.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from amp_fuzz.reports.devices import Devices, Side
from amp_fuzz.reports.pictures import Heat, Pictures, Tested
from amp_fuzz.reports.trend import Trend

if TYPE_CHECKING:
    from amp_fuzz.reports.conformance import Audit
    from amp_fuzz.reports.view import View

__all__ = ["numbers"]


def numbers(view: View, audit: Audit | None) -> dict[str, Any]:
    """Return what the pictures show, by picture. docs/reference/reports.md documents each value.

    audit: the conformance matrix in the folder of the report.
    """
    shown = view.pictures
    return {
        "divergences": _heat(shown.divergences),
        "devices": _devices(shown.devices),
        "excess": _excess(shown),
        "tested": _tested(shown.tested),
        "trend": _trend(view.trend),
        "conformance": _conformance(audit) if audit is not None else None,
    }


def _heat(heat: Heat) -> dict[str, Any]:
    rows = [{"op": op, "cells": [cell.numbers for cell in cells]} for op, cells in heat.rows]
    return {"backends": heat.columns, "rows": rows}


def _devices(found: Devices) -> dict[str, Any]:
    return {
        "backends": found.columns,
        "shared": found.shared,
        "uneven": found.uneven,
        "differ": found.differ,
        "measured": found.measured,
        "pairs": [
            {"backends": [found.columns[i], found.columns[j]], **pair._asdict()}
            for (i, j), pair in found.pairs.items()
        ],
        "mixes": [
            {
                "op": mix.op,
                "dtypes": mix.dtypes,
                "chance": mix.chance,
                "differ": [[found.columns[i], found.columns[j]] for i, j in mix.pairs],
                "cells": [_side(side) if side is not None else None for side in mix.sides],
            }
            for mix in found.mixes
        ],
        "apart": [
            {
                "op": row.op,
                "ratio": row.ratio if math.isfinite(row.ratio) else None,
                "excess": [value if value >= 0 else None for value in row.excess],
            }
            for row in found.apart
        ],
    }


def _side(side: Side) -> dict[str, Any]:
    return side._asdict() | {"kinds": dict(side.kinds)}


def _excess(shown: Pictures) -> dict[str, Any]:
    return {
        "threshold": shown.threshold,
        "edges": shown.edges,
        "backends": [spread._asdict() for spread in shown.spreads],
        "largest": _heat(shown.excess),
    }


def _tested(found: Tested) -> dict[str, Any]:
    return {
        "dtypes": found.dtypes,
        "plans": found.plans,
        "policies": [
            {"policy": policy, "kernels": kernels, "reached": counts}
            for policy, kernels, counts in found.policies
        ],
        "kernels": [
            {"kernel": kernel, "policy": policy, "cases": counts}
            for kernel, policy, counts in found.rows
        ],
    }


def _trend(trend: Trend) -> dict[str, Any]:
    points = [
        point._asdict()
        | {
            "backends": {
                name: {"cases": n.cases, "rate": n.rate, "reached": n.reached,
                       "reachable": n.reachable}
                for name, n in point.backends.items()
            }
        }
        for point in trend.points
    ]  # fmt: skip
    return {"runs": points, "left_out": trend.left_out, "earlier": trend.earlier}


def _conformance(audit: Audit) -> dict[str, Any]:
    return {
        "made": audit.made,
        "columns": [{"backend": backend, "autocast": dtype} for backend, dtype in audit.columns],
        "totals": [dict(counts) for counts in audit.totals],
        "rows": [{"op": op, "cells": [dict(n) for n in cells]} for op, cells in audit.rows],
        "backends": audit.backends,
        "differ": {"calls": audit.differ[0], "ops": audit.differ[1]},
        "apart": [call._asdict() for call in audit.apart],
    }
