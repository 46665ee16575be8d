"""The blocks of code in Markdown, and what each must be.

A block of ``python`` runs. A block without a language is a shell's if it begins with a command, and
otherwise what a command prints. ``<!-- not run: why -->`` above a block says that it does not run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md")))
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<why>.+?) -->\n+)?^```(?P<language>[\w-]*)\n(?P<text>.*?)^```$",
    re.M | re.S,
)
# What is asked of each command is in test_lines.py; the others are not ours.
OURS = ("amp-fuzz", "pytest", "make", "pip")
OTHERS = ("$", "python", "cp", "ray", "helm", "kubectl", "duckdb", "JAX_PLATFORMS=cpu")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code: its language, its text, its line in the page, and why it does not run."""

    language: str
    text: str
    line: int
    why: str | None

    @property
    def is_shell(self) -> bool:
        """Whether it is a shell's."""
        return not self.language and self.text.split(maxsplit=1)[0] in (*OURS, *OTHERS)


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page."""
    text = page.read_text()
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("text"))
        yield Block(found["language"], found["text"], line, found["why"])


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the words of each command: without its prompt, variables, comment and redirections."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if block.text.startswith("$") and not line.startswith("$ "):
            continue  # what the command printed
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        ends = [i for i, word in enumerate(words) if word in (">", "|", "&&")]
        words = words[: min(ends, default=None)]
        if words:
            yield words


def program(page: Path) -> str:
    """Return the Python of a page, with the lines that it has there."""
    lines: list[str] = []
    for block in blocks(page):
        if block.language == "python" and block.why is None:
            lines += [""] * (block.line - len(lines)) + block.text.splitlines()
    return "\n".join(lines) + "\n"


WITH_PYTHON = tuple(page for page in PAGES if program(page).strip())
