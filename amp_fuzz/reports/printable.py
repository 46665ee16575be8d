"""Text that people read: numbers with nouns, and foreign text without control characters.

Error messages and case files contain line breaks, colours and worse, which must not reach a
terminal, a script or a page.
"""

from __future__ import annotations

import re

__all__ = ["clean", "clean_lines", "plural"]

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def clean(text: str) -> str:
    """Return text as one line without control characters."""
    return " ".join(clean_lines(text).split())


def clean_lines(text: str) -> str:
    """Return lines without control characters, with their indentation."""
    lines = _ESCAPE.sub("", text).split("\n")
    return "\n".join("".join(c if c.isprintable() else " " for c in line) for line in lines)


def plural(n: int, what: str) -> str:
    """Return a number with its noun: ``1 case``, ``3,220 cases``, ``2 entries``."""
    words = what if n == 1 else f"{what[:-1]}ies" if what.endswith("try") else f"{what}s"
    return f"{n:,} {words}"
