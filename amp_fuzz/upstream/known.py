"""The list of known findings: divergences that are explained, and do not fail a run.

An entry says what diverges, why, and where it is discussed. Most name a *quirk* of the reference:
an upstream bug that the reference can imitate; the entry explains a divergence only if imitating
it makes the two sides agree on the whole case. So an entry never hides another bug of the same op.
"""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from amp_fuzz.config import did_you_mean
from amp_fuzz.versions import holds

__all__ = ["MEASURED", "Known", "KnownError", "Part", "load_known"]

Part: TypeAlias = Literal[
    "",
    "elided-casts",
    "islands",
    "nested-regions",
    "promised-dtypes",
    "stopped-checkpoints",
    "unentered-regions",
    "weight-cache",
]
"""A part of a compiler that torch can run without."""


MEASURED = ("2.7.1", "2.9.1", "2.11.0", "2.13.0", "2.15.0")
"""The versions of torch on which each bug was looked for: those of benchmarks/known."""


class KnownError(ValueError):
    """A known list that cannot be read. The message names the file and the place."""


class Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry.

    id: a name for it, the file name of its page in docs/findings/. what, why: one line each.
    link: the upstream issue, if there is one. quirk: the quirk that must make the case agree.
    With `ops` beside it, only programs with such an op are tried.
    Without one, `kinds` and `ops` say which divergences it explains: all of a kind, at an op (or a
    glob over ops; ``*`` is also none); `where` is a glob over what the divergence names, `expected`
    and `observed` are regular expressions that are found in what it says of the two sides. It
    explains that divergence alone: the rest of the case must agree, or be explained. without: the
    part of a compiler (``stopped-checkpoints``) whose fault it is: the entry explains only programs
    with such an op that agree, again and again, when torch runs without it.
    backends: globs over backend names; those after a ``!`` are left out. torch: the versions that
    have it.
    """

    id: str
    what: str
    why: str
    link: str = ""
    quirk: str = ""
    kinds: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    where: str = "*"
    expected: str = ""
    observed: str = ""
    without: Part = ""
    backends: tuple[str, ...] = ("*",)
    torch: str = ">=2.7"

    def on(self, backend: str) -> bool:
        """Return whether the entry speaks of a backend."""
        return _speaks(self.backends, backend)

    def holds(self, torch: str) -> bool:
        """Return whether a version of torch has it; a nightly has what its release will have."""
        return holds(self.torch, torch)

    @property
    def general(self) -> bool:
        """Whether it names no backends, but perhaps some that it leaves out."""
        return all(pattern == "*" or pattern.startswith("!") for pattern in self.backends)

    def tries(self, ops: Iterable[str]) -> bool:
        """Return whether an entry with a quirk speaks of a program of such ops."""
        return bool(self.quirk) and (not self.ops or _any(ops, self.ops))

    def explains(
        self,
        kind: str,
        ops: Iterable[str],
        where: str = "",
        *,
        expected: str = "",
        observed: str = "",
    ) -> bool:
        """Return whether an entry without a quirk speaks of a divergence of a kind at such ops."""
        if self.quirk or kind not in self.kinds:
            return False
        if not fnmatch.fnmatchcase(where, self.where):
            return False
        if not (re.search(self.expected, expected) and re.search(self.observed, observed)):
            return False
        return _any(ops, self.ops)


@cache  # each divergence asks every entry
def _speaks(backends: tuple[str, ...], name: str) -> bool:
    # Names of compiled backends have brackets, which are no character classes here.
    patterns = [pattern.replace("[", "[[]") for pattern in backends]
    left_out = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    named = [pattern for pattern in patterns if not pattern.startswith("!")] or ["*"]
    return _matches(name, named) and not _matches(name, left_out)


def _any(ops: Iterable[str], patterns: Iterable[str]) -> bool:
    patterns = tuple(patterns)
    return any(_matches(op, patterns) for op in ops)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    known: tuple[Known, ...] = ()


def load_known(path: Path) -> tuple[Known, ...]:
    """Read a user's own list. Raises `KnownError`."""
    try:
        return _parse(path.read_text(), str(path))
    except OSError as error:
        raise KnownError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise KnownError(f"{path}: not UTF-8 ({error}): write the file again") from error


def _parse(text: str, where: str) -> tuple[Known, ...]:
    try:
        known = msgspec.convert(tomllib.loads(text), _File).known
    except tomllib.TOMLDecodeError as error:
        raise KnownError(f"{where}: {error}") from error
    except msgspec.ValidationError as error:
        unknown = re.search("unknown field `(.*?)`", str(error))
        fields = [*Known.__struct_fields__, "known"]
        hint = did_you_mean(unknown[1], fields) if unknown else ""
        raise KnownError(f"{where}: {error}{hint}") from error
    for entry in known:
        if not entry.quirk and not (entry.kinds and entry.ops):
            raise KnownError(f"{where}: {entry.id}: give a quirk, or kinds and ops")
        for name in ("expected", "observed"):
            try:
                re.compile(getattr(entry, name))
            except re.error as error:
                raise KnownError(
                    f"{where}: {entry.id}: {name}={getattr(entry, name)!r} is no regular "
                    f"expression ({error}): write a \\ before what is meant as it stands"
                ) from error
    return known
