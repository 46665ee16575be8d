"""The options: their names, types, defaults and help, and where their values come from.

The rest of the package reads the record `Options`. `OPTIONS` describes its fields. The command line
and the pytest plugin build their options from it, so names, types, defaults and help cannot drift
apart. `resolve` fills the record: explicit values first, then ``AMP_FUZZ_*`` variables, the
profile, the table of the configuration file, the defaults.

This module imports neither torch nor any other slow module.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from amp_fuzz.profiles import DEFAULT_PROFILE, PROFILES

__all__ = [
    "OPTIONS",
    "ConfigError",
    "Option",
    "Options",
    "Resolved",
    "as_path",
    "as_place",
    "cache_folder",
    "did_you_mean",
    "find_config",
    "folder_of",
    "is_url",
    "judging_options",
    "resolve",
    "shown_value",
]

# As in `amp_fuzz.records.schema`, which is slow to import.
NOTE_KINDS = ("precision", "autocast-raises", "portability", "context")

Kind: TypeAlias = Literal[
    "integer", "number", "flag", "word", "choice", "list", "path", "paths", "place"
]


class ConfigError(ValueError):
    """An invalid option. One line: where it is set, its value, and what to write instead."""


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return ``": did you mean 'x'?"`` for the nearest of the words, or "" if none is near."""
    near = difflib.get_close_matches(word, list(words), n=1)
    return f": did you mean {near[0]!r}?" if near else ""


def shown_value(value: object) -> str:
    """Return an option's value as written on a command line."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:.15g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its name, its values, and its help.

    name: kebab-case, as on the command line and in configuration files. default: the value if
    nothing else sets one. metavar: the placeholder of the value in help. minimum, maximum:
    inclusive.
    """

    name: str
    kind: Kind
    default: Any
    help: str
    metavar: str
    choices: tuple[str, ...] = ()
    minimum: float = -math.inf
    maximum: float = math.inf

    @property
    def field(self) -> str:
        """The name as a Python identifier: the field of `Options`."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return f"AMP_FUZZ_{self.field.upper()}"

    def words(self, value: Any) -> list[str]:
        """Return the words of a command line that give it a value."""
        if self.kind == "paths":
            return [f"--{self.name}={path}" for path in value]
        if self.kind == "flag":
            return [f"--{self.name}" if value else f"--no-{self.name}"]
        return [f"--{self.name}={shown_value(value)}"]

    def parse(self, text: str) -> Any:
        """Parse the text of a value, as on a command line.

        Raises `ConfigError` without the option's name, which the caller adds.
        """
        match self.kind:
            case "integer":
                return self._bounded(_number(text, int, "a whole number"))
            case "number":
                return self._bounded(_number(text, float, "a number"))
            case "flag":
                return _flag(text)
            case "list":
                return self._items(part.strip() for part in text.split(","))
            case "path":
                return as_path(text)
            case "place":
                return as_place(text)
            case "paths":
                return (as_path(text),)
            case _:
                return self._word(text)

    def convert(self, value: object, folder: Path) -> Any:
        """Convert a TOML value; paths are relative to `folder`.

        Raises `ConfigError` without the option's name, as `parse` does.
        """
        match self.kind, value:
            case ("integer", int()) if not isinstance(value, bool):
                return self._bounded(value)
            case ("number", int() | float()) if not isinstance(value, bool):
                return self._bounded(float(value))
            case ("flag", bool()):
                return value
            case ("word" | "choice", str()):
                return self._word(value)
            case ("path", str()):
                return folder / as_path(value)
            case ("place", str()):
                return as_place(value, folder)
            case ("list", list()) if all(isinstance(item, str) for item in value):
                return self._items(value)
            case ("paths", str()):
                return (folder / as_path(value),)
            case ("paths", list()) if all(isinstance(item, str) for item in value):
                return tuple(folder / as_path(item) for item in value)
        raise ConfigError(f"{_show(value)} is {_type_of(value)}: write {_EXAMPLES[self.kind]}")

    def _bounded(self, value: Any) -> Any:
        if not math.isfinite(value):
            raise ConfigError(f"{value} is not finite")
        if value < self.minimum:
            raise ConfigError(f"{value} is too small: use {self.minimum:g} or more")
        if value > self.maximum:
            raise ConfigError(f"{value} is too large: use {self.maximum:g} or less")
        return value

    def _word(self, text: str) -> str:
        if not text:
            raise ConfigError("the value is empty")
        if self.choices and text not in self.choices:
            hint = did_you_mean(text, self.choices) or f": use {', '.join(self.choices)}"
            raise ConfigError(f"{text!r} is not a valid value{hint}")
        return text

    def _items(self, parts: Iterable[str]) -> tuple[str, ...]:
        items = tuple(parts)
        if not items or not all(items):
            raise ConfigError("an item of the list is empty")
        return tuple(map(self._word, items))


def _number(text: str, kind: type[int] | type[float], what: str) -> int | float:
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not {what}") from None


_FLAGS = {"1": True, "true": True, "yes": True, "on": True}
_FLAGS |= {"0": False, "false": False, "no": False, "off": False}


def _flag(text: str) -> bool:
    if text.lower() not in _FLAGS:
        raise ConfigError(f"{text!r} is neither yes nor no")
    return _FLAGS[text.lower()]


def as_path(text: str) -> Path:
    """Return a user's path, with ``~`` expanded. Raises `ConfigError`."""
    if not text or "\0" in text:
        raise ConfigError(f"{text!r} is not a path")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # ~name of nobody
        raise ConfigError(f"{text!r} is not a path: no such home folder") from error


def is_url(text: str) -> bool:
    """Return whether a text is a URL that fsspec reads: ``s3://bucket``, ``zip://::FILE``."""
    return re.match(r"[\w+.-]+(?:://|::)", text) is not None


def as_place(text: str, folder: Path = Path()) -> Path | str:
    """Return a user's URL, or a path in a folder, as `as_path` does. Raises `ConfigError`."""
    return text if is_url(text) else folder / as_path(text)


def folder_of(place: Path | str, what: str) -> Path:
    """Return the place of a store, which must be a folder. Raises `ConfigError` for a URL.

    what: needs it.
    """
    if isinstance(place, Path):
        return place
    raise ConfigError(
        f"store: {place}: {what} needs a folder: give another, and copy a store there with "
        f"`amp-fuzz store merge {place}`"
    )


def cache_folder() -> Path:
    """Return the folder of what amp-fuzz can make again."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "amp-fuzz"


_EXAMPLES: Mapping[str, str] = {
    "integer": "a whole number, as in 200",
    "number": "a number, as in 1.5",
    "flag": "true or false",
    "word": 'a string, as in "ci"',
    "choice": 'a string, as in "one"',
    "path": 'a string, as in "some/folder"',
    "place": 'a string, as in "some/folder" or "s3://bucket/folder"',
    "list": 'a list of strings, as in ["conv*", "losses"]',
    "paths": 'a list of strings, as in ["known.toml"]',
}


def _type_of(value: object) -> str:
    names = {bool: "a boolean", int: "a whole number", float: "a number", str: "a string"}
    names |= {list: "a list", dict: "a table"}
    return names.get(type(value), f"a {type(value).__name__}")


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _option(
    kind: Kind,
    default: Any,
    metavar: str,
    text: str,
    *,
    choices: tuple[str, ...] = (),
    minimum: float = -math.inf,
    maximum: float = math.inf,
) -> Any:
    about = {
        "kind": kind,
        "metavar": metavar,
        "help": text,
        "choices": choices,
        "minimum": minimum,
        "maximum": maximum,
    }
    return field(default=default, metadata=about)


_CPUS = os.process_cpu_count() if hasattr(os, "process_cpu_count") else os.cpu_count()
_DEFAULTS = PROFILES[DEFAULT_PROFILE]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a run. Each field has its help; `OPTIONS` has them as data."""

    backends: tuple[str, ...] = _option(
        "list",
        ("eager-*", "fake-*"),
        "NAME,...",
        "Backends to test; * and all mean every backend that is ready here.",
    )
    ops: tuple[str, ...] = _option(
        "list", ("*",), "PATTERN,...", "Ops to draw from: names, families, globs over names."
    )
    cases: int = _option(
        "integer",
        _DEFAULTS["cases"],
        "N",
        "Draw at most N cases for each backend, including aimed ones.",
        minimum=1,
    )
    aimed: int = _option(
        "integer",
        20,
        "PERCENT",
        "Aim at most this share of the cases at autocast kernels not yet reached; 0: none.",
        minimum=0,
        maximum=100,
    )
    seed: int | None = _option(
        "integer",
        None,
        "N",
        "Seed of the cases; by default random, and printed.",
        minimum=0,
    )
    profile: str = _option(
        "word",
        DEFAULT_PROFILE,
        "NAME",
        f"A set of options: {', '.join(PROFILES)}, or one from the configuration file.",
    )
    workers: int = _option(
        "integer", _CPUS or 1, "N", "Worker processes; by default one for each CPU.", minimum=1
    )
    seconds: float = _option(
        "number",
        _DEFAULTS["seconds"],
        "S",
        "End all cases and all minimising after S seconds, then report; 0 means never.",
        minimum=0,
    )
    relations: str = _option(
        "choice",
        _DEFAULTS["relations"],
        "none|one|all",
        "Metamorphic relations to check on each case.",
        choices=("none", "one", "all"),
    )
    store: Path | str = _option(  # noqa: RUF009  (a Path is immutable)
        "place", Path(".amp-fuzz"), "FOLDER", "Where records and findings are kept."
    )
    report: Path = _option(  # noqa: RUF009
        "path",
        Path("amp-fuzz-report"),
        "FOLDER",
        "Where the report goes; it replaces the last one.",
    )
    known: tuple[Path, ...] = _option(
        "paths",
        (),
        "FILE",
        "A list of explained divergences, in addition to the one in the package.",
    )
    baseline: Path = _option(  # noqa: RUF009
        "path",
        Path("amp-fuzz-baseline.toml"),
        "FILE",
        "The findings that the project accepts; by default found here or in a parent folder.",
    )
    corpus: tuple[Path, ...] = _option(
        "paths", (), "FOLDER", "Case files that every run judges first: a regression suite."
    )
    max_statements: int = _option(
        "integer",
        _DEFAULTS["max-statements"],
        "N",
        "Draw programs of at most N statements.",
        minimum=1,
    )
    timeout: float = _option(
        "number",
        120.0,
        "S",
        "CPU seconds that a case may take; the wall-clock limit is 5 times that.",
        minimum=1,
    )
    memory: float = _option(
        "number", 8.0, "GIB", "Memory limit for the process of a case, in GiB.", minimum=0.5
    )
    isolate: str = _option(
        "choice",
        "auto",
        "auto|always|never",
        "Run cases in worker processes: always, never, or auto (not under pytest's --pdb).",
        choices=("auto", "always", "never"),
    )
    minimize: float = _option(
        "number",
        _DEFAULTS["minimize"],
        "S",
        "Seconds of work to shrink each new finding; 0 keeps it as drawn.",
        minimum=0,
    )
    plugins: tuple[str, ...] = _option(
        "list",
        (),
        "MODULE,...",
        "Modules to import first, such as those that register your own ops.",
    )
    device: str | None = _option(
        "word",
        None,
        "NAME",
        "An installed device, for the backends eager-NAME and eager-NAME[shadow].",
    )
    policies: str | None = _option(
        "word",
        None,
        "TABLE",
        "The device's policy table: cuda (the default), cpu, xpu, ..., or a TOML file.",
    )
    fail_fast: bool = _option("flag", False, "yes|no", "Stop at the first new divergence.")
    notes: tuple[str, ...] = _option(
        "list",
        ("precision", "autocast-raises"),
        "KIND,...",
        f"Kinds of notes to look for: {', '.join(NOTE_KINDS)}.",
        choices=NOTE_KINDS,
    )
    fail_on: tuple[str, ...] = _option(
        "list",
        (),
        "KIND,...",
        f"What else fails a run: {', '.join(NOTE_KINDS)}, incident, backend.",
        choices=(*NOTE_KINDS, "incident", "backend"),
    )
    require: tuple[str, ...] = _option(
        "list", (), "NAME,...", "Backends that must be ready; otherwise exit with code 4."
    )
    require_coverage: float = _option(
        "number",
        0.0,
        "PERCENT",
        "Fail if a backend reached less of its device's autocast kernels; 0: never.",
        minimum=0,
        maximum=100,
    )


OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        name: Option(name=name, default=item.default, **item.metadata)
        for item in dataclasses.fields(Options)
        for name in [item.name.replace("_", "-")]
    }
)


@dataclass(frozen=True, slots=True)
class Resolved:
    """Options and their sources.

    sources: option name -> ``--cases``, ``AMP_FUZZ_CASES``, ``profile ci``, a file, or ``default``.
    files: the configuration files that were read.
    """

    options: Options
    sources: Mapping[str, str]
    files: tuple[Path, ...]


def resolve(
    explicit: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    start: Path | None = None,
    prefix: str = "--",
) -> Resolved:
    """Return the options in force.

    A built-in profile outranks the table of the file if it was chosen, but not if it is only the
    default. A profile table of the file outranks the table.

    Args:
        explicit: option name -> value of the option's type, as `Option.parse` returns; None values
            count as not given.
        environ: replaces ``os.environ``.
        start: the folder where the search for configuration starts, upwards; by default the current
            one.
        prefix: the prefix of explicit options in messages (``--amp-fuzz-`` under pytest).

    Raises:
        ConfigError: an unknown key, variable or profile, or an invalid value.
    """
    given = {name: value for name, value in (explicit or {}).items() if value is not None}
    variables = _variables(os.environ if environ is None else environ)
    path = find_config(Path.cwd() if start is None else start)
    table, profiles = _read(path) if path else ({}, {})

    def tell(name: str) -> Mapping[str, str]:
        return {"given": f"{prefix}{name}", "variables": OPTIONS[name].variable, "table": str(path)}

    # The highest rank first.
    outer = {"given": given, "variables": variables}
    chosen = next((k for k, v in {**outer, "table": table}.items() if "profile" in v), "")
    profile = str({**outer, "table": table}[chosen]["profile"]) if chosen else DEFAULT_PROFILE
    names = list(dict.fromkeys([*PROFILES, *profiles]))
    if profile not in names:
        hint = did_you_mean(profile, names) or f": use {', '.join(names)}"
        raise ConfigError(f"{tell('profile')[chosen]}: unknown profile {profile!r}{hint}")
    own = {f"profile {profile} in {path}": profiles.get(profile, {})}
    shipped = {f"profile {profile}" if chosen else "default": PROFILES.get(profile, {})}
    below = {**shipped, "table": table} if chosen else {"table": table, **shipped}
    ranks: Mapping[str, Mapping[str, Any]] = {**outer, **own, **below}

    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, option in OPTIONS.items():
        rank = next((r for r, table in ranks.items() if name in table), "default")
        values[option.field] = ranks.get(rank, {}).get(name, option.default)
        sources[name] = tell(name).get(rank, rank)
    return Resolved(Options(**values), MappingProxyType(sources), (path,) if path else ())


def _variables(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of ``AMP_FUZZ_*`` variables; an empty one counts as not set."""
    known = {option.variable: option for option in OPTIONS.values()}
    values = {}
    for variable, text in sorted(environ.items()):
        if not variable.startswith("AMP_FUZZ_") or not text:
            continue
        option = known.get(variable)
        if option is None:
            hint = did_you_mean(variable, known) or f": use one of {', '.join(known)}"
            raise ConfigError(f"{variable}: no option uses this environment variable{hint}")
        try:
            if option.kind == "paths":
                values[option.name] = tuple(as_path(part) for part in text.split(os.pathsep))
            else:
                values[option.name] = option.parse(text)
        except ConfigError as error:
            raise ConfigError(f"{variable}: {error}") from None
    return values


def find_config(start: Path) -> Path | None:
    """Return the nearest configuration file in a folder or those above it, or None.

    This is an ``amp-fuzz.toml``, or a ``pyproject.toml`` with a table ``[tool.amp-fuzz]``. Raises
    `ConfigError` if a folder has both.
    """
    for folder in (start, *start.absolute().parents):
        own, shared = folder / "amp-fuzz.toml", folder / "pyproject.toml"
        has_table = shared.is_file() and "amp-fuzz" in _tool(shared)
        if own.is_file():
            if has_table:
                raise ConfigError(f"{own}: {shared.name} has [tool.amp-fuzz] too: keep one of them")
            return own
        if has_table:
            return shared
    return None


def _tool(path: Path) -> Mapping[str, Any]:
    """Return the ``[tool]`` table of a pyproject.toml."""
    tool = _toml(path).get("tool", {})
    return tool if isinstance(tool, dict) else {}


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def _read(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return a configuration file's options, and its profiles by name."""
    table: object = _toml(path)
    if path.name == "pyproject.toml":
        table = _tool(path)["amp-fuzz"]
    if not isinstance(table, dict):
        raise ConfigError(
            f"{path}: tool.amp-fuzz={_show(table)} is {_type_of(table)}: write a table"
        )
    table = dict(table)
    profiles: dict[str, dict[str, Any]] = {}
    # `profile` is an option if it is a string, and holds the profiles if it is a table. TOML does
    # not allow both. With profile tables, change `dev`, the default.
    if isinstance(table.get("profile"), dict):
        for name, values in table.pop("profile").items():
            where = f"{path}: profile.{name}"
            if not isinstance(values, dict):
                raise ConfigError(f"{where}={_show(values)} is {_type_of(values)}: write a table")
            profiles[name] = _values(values, path, f"profile.{name}.", without="profile")
    return _values(table, path, ""), profiles


def _values(
    table: Mapping[str, object], path: Path, place: str, without: str = ""
) -> dict[str, Any]:
    values = {}
    names = [name for name in OPTIONS if name != without]
    for key, value in table.items():
        if key not in names:
            hint = did_you_mean(key, names) or f": use one of {', '.join(names)}"
            raise ConfigError(f"{path}: unknown key {place + key!r}{hint}")
        try:
            values[key] = OPTIONS[key].convert(value, path.parent)
        except ConfigError as error:
            raise ConfigError(f"{path}: {place}{key}: {error}") from None
    return values


def judging_options() -> list[str]:
    """Return the options of this process that affect how a case is judged."""
    names = ("device", "policies", "plugins")
    found = {name: os.environ.get(OPTIONS[name].variable, "") for name in names}
    return [f"--{name}={value}" for name, value in found.items() if value]
