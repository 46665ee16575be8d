"""Ranges of torch versions, as pip writes them: `">=2.13"`, `"<2.14"`, `""` for all."""

from __future__ import annotations

import importlib.metadata
from functools import cache

from packaging.specifiers import SpecifierSet
from packaging.version import Version

__all__ = ["holds", "installed"]


@cache  # reading a distribution's metadata takes milliseconds
def installed() -> str:
    """Return the installed torch's version without its build: ``2.13.0`` for ``2.13.0+cpu``."""
    return Version(importlib.metadata.version("torch")).base_version


@cache
def holds(versions: str, torch: str | None = None) -> bool:
    """Return whether a version of torch, by default the installed one, is in a range.

    A nightly or a source build has what its release will have. Raises `InvalidSpecifier` for a
    range that pip would not take, and `InvalidVersion` for such a version.
    """
    return Version(Version(torch or installed()).base_version) in SpecifierSet(versions)
