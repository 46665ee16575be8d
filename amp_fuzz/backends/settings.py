"""The settings of a plan, while its case runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from amp_fuzz.cases.settings import SETTINGS, Setting

__all__ = ["applied"]


@contextmanager
def applied(lines: Sequence[str]) -> Iterator[None]:
    """Apply settings during a block, then set what was there before."""
    with ExitStack() as stack:
        for line in lines:
            stack.enter_context(_applied(SETTINGS[line]))
        yield


@contextmanager
def _applied(setting: Setting) -> Iterator[None]:
    names: dict[str, Any] = {"torch": torch}
    before = eval(setting.get, names)
    exec(setting.line, names)
    try:
        yield
    finally:
        exec(setting.put.format(repr(before)), names)
