"""Shared by the commands: exit codes, options from `amp_fuzz.config`, consoles, tables."""

from __future__ import annotations

import dataclasses
import enum
import importlib.metadata
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from amp_fuzz.backends.devices import with_device
from amp_fuzz.config import (
    OPTIONS,
    ConfigError,
    Option,
    Resolved,
    judging_options,
    resolve,
    shown_value,
)
from amp_fuzz.reports.printable import clean_lines

if TYPE_CHECKING:
    from rich.console import Console

    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType  # generic in later versions only

__all__ = [
    "Exit",
    "Internal",
    "Stopped",
    "command_line",
    "console",
    "duration",
    "options",
    "resolve_options",
    "say",
    "speed",
    "table",
    "version",
    "waiting",
]


class Exit(enum.IntEnum):
    """The exit codes. An interrupt is 128 and the signal's number: 130 (Ctrl-C), 143 (SIGTERM)."""

    OK = 0
    DIVERGED = 1
    USAGE = 2
    INTERNAL = 3
    MISSING = 4
    NOTHING = 5
    UNENDED = 6


class Stopped(Exception):
    """A command cannot go on. `message` is one line for stderr, `code` the exit code."""

    def __init__(self, message: str, code: int = Exit.USAGE) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class Internal(Exception):
    """An internal error in another process. The message is its traceback."""


def version(package: str = "amp-fuzz") -> str:
    """Return the version of an installed package, or ``not installed``."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


# -- options --------------------------------------------------------------------------------------


class _Value(_ParamType):
    """A click type that parses with `Option.parse`."""

    def __init__(self, option: Option) -> None:
        self.option = option
        self.name = option.kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.option.parse(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


_Command = TypeVar("_Command", bound=Callable[..., Any])

_REPEATABLE = ("list", "paths")


def options(*names: str) -> Callable[[_Command], _Command]:
    """Give a command these options of `amp_fuzz.config`, in this order.

    They arrive as keyword arguments, None if not given; see `resolve_options`.
    """

    def decorate(command: _Command) -> _Command:
        for name in reversed(names):
            command = _click_option(OPTIONS[name])(command)
        return command

    return decorate


def _click_option(option: Option) -> Callable[[_Command], _Command]:
    text = f"{option.help}{_default(option)}"
    if option.kind == "flag":
        return click.option(f"--{option.name}/--no-{option.name}", default=None, help=text)
    return click.option(
        f"--{option.name}",
        type=_Value(option),
        metavar=option.metavar,
        multiple=option.kind in _REPEATABLE,
        help=text,
    )


def _default(option: Option) -> str:
    if option.default is None or option.default == () or option.kind == "flag":
        return ""
    return f"  [default: {shown_value(option.default)}]"


def resolve_options(given: Mapping[str, Any]) -> Resolved:
    """Return the options in force, from those that a command was given. Raises `ConfigError`."""
    explicit: dict[str, object] = {}
    for name, option in OPTIONS.items():
        value = given.get(option.field)
        if option.kind in _REPEATABLE and value is not None:
            value = tuple(item for part in value for item in part) or None
        explicit[name] = value
    resolved = resolve(explicit)
    if "plugins" in given:
        from amp_fuzz.plugins import load_plugins

        source = resolved.sources["plugins"]
        load_plugins(resolved.options.plugins, source)
        resolved = dataclasses.replace(resolved, options=with_device(resolved))
    folder = resolved.options.report
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"report: {folder} is a file: give a folder")
    return resolved


# -- text -----------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def console() -> Console:
    """Return the console of stdout. Outside a terminal, lines are long and not cut."""
    from rich.console import Console

    wide = None if sys.stdout.isatty() else 200
    return Console(highlight=False, markup=False, emoji=False, width=wide)


def say(text: str = "") -> None:
    """Print lines to stdout, whatever their length: commands and paths in them are copied."""
    console().print(clean_lines(text), soft_wrap=True)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show in a terminal what the user is waiting for."""
    if not sys.stdout.isatty():  # without importing rich
        yield
        return
    with console().status(f"{what} ..."):
        yield


_LAST = 24  # columns that the last column of a table has at least


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table. The last column folds; the others are never cut, since people copy them."""
    from rich.cells import cell_len
    from rich.table import Table

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns[:-1]:
        grid.add_column(column, no_wrap=True, overflow="ignore")
    grid.add_column(columns[-1], overflow="fold")
    cells = [tuple(map(clean_lines, row)) for row in rows]
    for row in cells:
        grid.add_row(*row)
    # rich cuts columns if the terminal is too narrow for all.
    longest = (max(map(cell_len, cells)) for cells in zip(columns, *cells, strict=True))
    least = sum(width + 2 for width in list(longest)[:-1]) + _LAST
    wide = console()
    with wide.capture() as capture:
        own, wide.width = wide.width, max(wide.width, least)
        wide.print(grid)
        wide.width = own
    # rich fills each line up with spaces.
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def duration(seconds: float) -> str:
    """Return a time as people read it: ``0.4 s``, ``38 s``, ``4 min 05 s``, ``2 h 03 min``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def speed(value: float) -> str:
    """Return a rate with two or three significant digits, as reports do."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def command_line(*words: str, store: Path | str | None = None) -> str:
    """Return an ``amp-fuzz`` command to copy and paste, with the store if it is not the default.

    Commands that judge cases again also name the user's device and plugins.
    """
    more = [] if store in (None, OPTIONS["store"].default) else [f"--store={store}"]
    judges = "explain", "minimize", "replay", "repro"
    if words[0] in judges or words[:2] in (("baseline", "check"), ("baseline", "prune")):
        more = [*judging_options(), *more]
    return shlex.join(["amp-fuzz", *words, *more])
