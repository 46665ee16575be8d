"""The profiles that come with the package: how much a run does when nothing more is said.

A profile holds values of options by name. No Hypothesis profile has a part in a run: under
``CI=true`` one would derandomise, and a nightly run would repeat itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

__all__ = ["DEFAULT_PROFILE", "PROFILES"]

DEFAULT_PROFILE = "dev"


def _profile(
    cases: int, *, relations: str = "one", minimize: float = 20.0, max_statements: int = 12
) -> Mapping[str, Any]:
    return MappingProxyType(
        {
            "cases": cases,
            "seconds": 0.0,
            "relations": relations,
            "minimize": minimize,
            "max-statements": max_statements,
        }
    )


PROFILES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "dev": _profile(200),
        "ci": _profile(2000),
        "nightly": _profile(20_000, relations="all", minimize=60.0),
    }
)
