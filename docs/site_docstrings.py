"""What docstrings and the help of commands become on the site.

Docstrings describe fields as ``name: text``, a paragraph for several; the site shows a list. Globs
in the help of commands (``compile*``) are no emphasis.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

FIELD = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*): (?=\S)")
IN_LINE = re.compile(r"(?<=[.;]) ([a-z_]\w*(?:, [a-z_]\w*)*): (?=\S)")


def setup(app: Sphinx) -> dict[str, Any]:
    """Tell Sphinx."""
    app.connect("autodoc-process-docstring", fields, priority=400)  # before napoleon
    for part in ("description", "options", "arguments", "epilog"):
        app.connect(f"sphinx-click-process-{part}", globs)
    return {"parallel_read_safe": True}


def fields(
    app: Sphinx, what: str, name: str, item: object, options: object, lines: list[str]
) -> None:
    """Write paragraphs of fields as lists."""
    blocks = "\n".join(lines).split("\n\n")
    lines[:] = "\n\n".join(_listed(b) if FIELD.match(b) else b for b in blocks).split("\n")


def _listed(block: str) -> str:
    text = " ".join(line.strip() for line in block.splitlines())
    items = IN_LINE.sub(r"\n\1: ", text).splitlines()
    return "\n".join("* " + FIELD.sub(r"``\1``: ", item) for item in items)


def globs(app: Sphinx, context: object, lines: list[str]) -> None:
    """Escape what is no emphasis."""
    lines[:] = [re.sub(r"(?<![\\`])\*(?!\*)", r"\\*", line) for line in lines]
