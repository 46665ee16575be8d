"""The profiles that come with the package: how much a run does when nothing more is said.

A profile holds values of options by name. Each is a time, so that it takes as long on any machine,
with a number of cases that is enough for a fast one and a floor that holds on a slow one.

No Hypothesis profile has a part in a run: under ``CI=true`` one would derandomise, and a nightly
run would repeat itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

__all__ = ["DEFAULT_PROFILE", "PROFILES"]

DEFAULT_PROFILE = "dev"


def _profile(
    cases: int,
    *,
    seconds: float,
    floor: int,
    relations: str = "one",
    minimize: float = 20.0,
    max_statements: int = 12,
) -> Mapping[str, Any]:
    return MappingProxyType(
        {
            "cases": cases,
            "seconds": seconds,
            "floor": floor,
            "relations": relations,
            "minimize": minimize,
            "max-statements": max_statements,
        }
    )


PROFILES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "dev": _profile(1000, seconds=90.0, floor=3),
        "ci": _profile(2000, seconds=170.0, floor=5),
        "nightly": _profile(20_000, seconds=3600.0, floor=50, relations="all", minimize=60.0),
    }
)
