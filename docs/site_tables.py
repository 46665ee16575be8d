"""Tables of the site that are made from the code: options, profiles, exit codes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from amp_fuzz.config import OPTIONS, Option, shown_value
from amp_fuzz.profiles import PROFILES


def setup(app: Sphinx) -> dict[str, Any]:
    """Tell Sphinx."""
    app.add_config_value("source_repository", "", "env")
    app.add_config_value("known_bugs", frozenset(), "env")
    app.add_directive("options-table", OptionsTable)
    app.add_directive("profiles-table", ProfilesTable)
    return {"parallel_read_safe": True}


class Table(SphinxDirective):
    """A Markdown table."""

    columns: ClassVar[tuple[str, ...]]

    def rows(self) -> Iterable[tuple[str, ...]]:
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        lines = [self.columns, ("---",) * len(self.columns), *self.rows()]
        text = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in r)} |" for r in lines]
        parent = nodes.Element()
        self.state.nested_parse(StringList(text, source="amp_fuzz/config.py"), 0, parent)
        return parent.children


class OptionsTable(Table):
    """Each option with its value, what it means, and its default."""

    columns = ("option", "meaning")

    def rows(self) -> Iterable[tuple[str, ...]]:
        for name, option in OPTIONS.items():
            yield f"`{name}={option.metavar}`", f"{option.help}{_default(option)}"


def _default(option: Option) -> str:
    if option.name == "workers" or option.default in (None, ()):
        return ""  # which the help says
    yes_or_no = {True: "yes", False: "no"}
    value = option.default
    return f" Default: `{yes_or_no[value] if isinstance(value, bool) else shown_value(value)}`."


class ProfilesTable(Table):
    """The options that each profile sets."""

    columns = ("profile", *next(iter(PROFILES.values())))

    def rows(self) -> Iterable[tuple[str, ...]]:
        for name, values in PROFILES.items():
            yield f"`{name}`", *(shown_value(value) for value in values.values())
