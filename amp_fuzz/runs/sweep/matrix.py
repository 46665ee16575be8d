"""The plan of a sweep: which runs ``sweep.toml`` asks for, and what each needs of a node.

A shard is one run of one backend, or pattern of backends, in one environment with one seed.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from amp_fuzz.config import OPTIONS, ConfigError, as_path, as_place, did_you_mean, resolve

__all__ = ["Plan", "Shard", "load"]

# What the sweep sets itself, for each shard.
_OWN = ("backends", "seed", "store", "report")
# Options that `amp-fuzz run` does not have, or that a shard has another way to say.
_VARIED = tuple(name for name in OPTIONS if name not in (*_OWN, "require"))

_Natural = Annotated[int, msgspec.Meta(ge=0)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Amount = Annotated[float, msgspec.Meta(ge=0)]
_Some = msgspec.Meta(min_length=1)  # a list without an entry would ask for no shard
_Words = Annotated[tuple[str, ...], _Some]
_Seeds = _Positive | Annotated[tuple[_Natural, ...], _Some]

# Needs of which Ray has another name, or none for a custom resource.
_RESERVED = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "", "object_store_memory": ""}


class _Entry(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    backends: _Words
    environments: _Words | None = None
    seeds: _Seeds | None = None
    needs: dict[str, _Amount] = {}
    options: dict[str, Any] = {}
    vary: dict[str, Annotated[list[Any], _Some]] = {}


class _File(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    matrix: Annotated[tuple[_Entry, ...], _Some]
    store: str = ".amp-fuzz"
    seconds: _Amount = 0
    seeds: _Seeds = 1
    retries: _Natural = 3
    environments: dict[str, str] = {}
    options: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Shard:
    """One run of a sweep.

    number: its place in the plan. environment: its name, and `python` its interpreter. backend: a
    name or a pattern. needs: what Ray calls ``num_cpus``, ``num_gpus`` and custom resources, in
    amounts. options: of ``amp-fuzz run``, as words. varied: those that other shards have in another
    value. cases: to draw on each backend. first: whether it judges the store's findings again.
    """

    number: int
    environment: str
    python: str
    backend: str
    seed: int
    needs: Mapping[str, float]
    options: tuple[str, ...]
    varied: tuple[str, ...]
    cases: int
    first: bool

    @property
    def words(self) -> tuple[str, ...]:
        """The arguments of ``amp-fuzz run``."""
        return (f"--backends={self.backend}", f"--seed={self.seed}", *self.options)

    @property
    def row(self) -> str:
        """What it is called in progress and in the summary, together with those like it."""
        return " ".join([self.environment, self.backend, *self.varied])

    @property
    def named(self) -> bool:
        """Whether it must be possible: a pattern stands for backends that are ready."""
        return self.backend != "all" and "*" not in self.backend


@dataclass(frozen=True, slots=True)
class Plan:
    """A sweep.

    store: a folder or a URL. seconds: after which it stops; 0 is never. retries: of a shard whose
    process died.
    """

    path: Path
    store: Path | str
    seconds: float
    retries: int
    shards: tuple[Shard, ...]


def load(path: Path, python: str, seed: int) -> Plan:
    """Read a sweep's file.

    python: the interpreter of this process, which is the environment ``here``. seed: the first of
    the seeds that the file does not list. Raises `ConfigError` with the place and what to write.
    """
    try:
        text = path.read_text("utf-8")
        file = msgspec.convert(tomllib.loads(text), _File)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
    folder = path.absolute().parent
    shards = tuple(_shards(file, path, folder, python, seed))
    store = as_place(file.store, folder)
    return Plan(path.absolute(), store, file.seconds, file.retries, shards)


def _shards(file: _File, path: Path, folder: Path, python: str, seed: int) -> Iterator[Shard]:
    if "here" in file.environments:
        raise ConfigError(f"{path}: environments.here is the Python of the command: rename yours")
    pythons = {"here": python} | {
        name: _python(text, folder, f"{path}: environments.{name}")
        for name, text in file.environments.items()
    }
    shared = _options(file.options, folder, f"{path}: options")
    number = 0
    for place, entry in enumerate(file.matrix):
        where = f"{path}: matrix[{place}]"
        names = entry.environments
        names = (tuple(file.environments) or ("here",)) if names is None else names
        for name in names:
            if name not in pythons:
                hint = did_you_mean(name, pythons) or f": use {', '.join(pythons)}"
                raise ConfigError(f"{where}: environments: {name!r} is not in [environments]{hint}")
        for need in entry.needs.keys() & _RESERVED:
            hint = f"write {_RESERVED[need]}" if _RESERVED[need] else "use a custom resource"
            raise ConfigError(f"{where}.needs: {need!r} cannot be asked for: {hint}")
        own = shared | _options(entry.options, folder, f"{where}.options")
        seeds = _seeds(file.seeds if entry.seeds is None else entry.seeds, seed)
        varieties = [
            [(name, _option(name, value, folder, f"{where}.vary")) for value in values]
            for name, values in entry.vary.items()
        ]
        for at, name, backend, *more in itertools.product(
            range(len(seeds)), names, entry.backends, *varieties
        ):
            options = own | dict(more)
            options.setdefault("workers", max(1, int(entry.needs.get("num_cpus", 1))))
            yield Shard(
                number=number,
                environment=name,
                python=pythons[name],
                backend=backend,
                seed=seeds[at],
                needs={"num_cpus": 1.0} | entry.needs,
                options=_words(options.items()),
                varied=_words(more),
                cases=int(resolve(options, start=folder).options.cases),
                first=at == 0
                and all(one == some[0] for one, some in zip(more, varieties, strict=True)),
            )
            number += 1


def _words(options: Iterable[tuple[str, Any]]) -> tuple[str, ...]:
    return tuple(word for name, value in options for word in OPTIONS[name].words(value))


def _python(text: str, folder: Path, where: str) -> str:
    """Return the interpreter of an environment: a command, a path, or the folder of one."""
    if not text:
        raise ConfigError(f"{where} is empty: write the path of an interpreter")
    if "/" not in text and "\\" not in text:
        return text
    return str(folder / as_path(text))


def _seeds(seeds: int | tuple[int, ...], first: int) -> tuple[int, ...]:
    return tuple(range(first, first + seeds)) if isinstance(seeds, int) else seeds


def _options(table: Mapping[str, Any], folder: Path, where: str) -> dict[str, Any]:
    return {name: _option(name, value, folder, where) for name, value in table.items()}


def _option(name: str, value: Any, folder: Path, where: str) -> Any:
    """Return an option's value. Raises `ConfigError`."""
    if name in _OWN:
        raise ConfigError(f"{where}: {name!r} is the sweep's own: leave it out here")
    if name not in _VARIED:
        hint = did_you_mean(name, _VARIED) or f": use one of {', '.join(_VARIED)}"
        raise ConfigError(f"{where}: unknown option {name!r}{hint}")
    try:
        return OPTIONS[name].convert(value, folder)
    except ConfigError as error:
        raise ConfigError(f"{where}: {name}: {error}") from None
