"""Remove control characters from foreign text before it reaches a terminal, a script or a page.

Error messages and case files contain line breaks, colours and worse.
"""

from __future__ import annotations

import re

__all__ = ["clean", "clean_lines"]

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def clean(text: str) -> str:
    """Return text as one line without control characters."""
    return " ".join(clean_lines(text).split())


def clean_lines(text: str) -> str:
    """Return lines without control characters, with their indentation."""
    lines = _ESCAPE.sub("", text).split("\n")
    return "\n".join("".join(c if c.isprintable() else " " for c in line) for line in lines)
