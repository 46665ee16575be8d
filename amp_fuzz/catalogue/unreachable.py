"""Autocast kernels that no caller can reach, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["UNREACHABLE"]

UNREACHABLE: Mapping[str, str] = {}
