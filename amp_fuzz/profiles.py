"""The built-in profiles: how much a run does by default.

A profile holds values of options by name. Each sets a time, so it takes no longer on a slow
machine, and a number of cases, which a fast machine reaches.

Hypothesis profiles do not affect a run: under ``CI=true`` one would derandomise, and nightly runs
would repeat themselves.
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
    relations: str = "one",
    minimize: float = 20.0,
    max_statements: int = 12,
) -> Mapping[str, Any]:
    return MappingProxyType(
        {
            "cases": cases,
            "seconds": seconds,
            "relations": relations,
            "minimize": minimize,
            "max-statements": max_statements,
        }
    )


PROFILES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "dev": _profile(1000, seconds=90.0),
        "ci": _profile(2000, seconds=170.0),
        "nightly": _profile(20_000, seconds=3600.0, relations="all", minimize=60.0),
    }
)
