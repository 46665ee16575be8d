"""The baseline: findings that a project accepts, keyed by fingerprint, in a file that it commits.

``amp-fuzz-baseline.toml`` has one ``[[finding]]`` table for each, with its case. So anyone can
check on a fresh clone, and with another torch, whether it still happens. The file is read as TOML
and edited as text: comments and everything else stay unchanged.
"""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from amp_fuzz.cases.case import Case, CaseError, loads
from amp_fuzz.records.fingerprint import Fingerprint, fingerprint, title
from amp_fuzz.records.schema import DivergenceRecord
from amp_fuzz.versions import holds

__all__ = ["Baseline", "BaselineError", "Entry", "added", "entry_of", "match", "read", "removed"]

_HEAD = """\
# Findings of amp-fuzz that this project knows of: they do not fail a run. Each has a reason, and
# the case by which `amp-fuzz baseline check` tells whether it still happens. Written by
# `amp-fuzz baseline update`; reasons, links, dates and comments are yours to edit.
"""


class BaselineError(ValueError):
    """A baseline that cannot be used. One line: the file, the entry, and the way out."""


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """An accepted finding.

    id: a name for it. fingerprint: ten hex digits, of the fields from `kind` to `ingredient`.
    as_if: for a wrong policy, the policies it behaves as. reason: why it is accepted. link: where
    it is discussed. expires: the last day on which it is accepted. torch: the versions it applies
    to, a PEP 440 range; "" is any. title, program: for readers. case: its canonical JSON.
    """

    id: str
    fingerprint: str
    kind: str
    backend: str
    reason: str
    case: str
    title: str = ""
    stage: str = ""
    op: str = ""
    policy: str = ""
    dtypes: tuple[str, ...] = ()
    ingredient: str = ""
    as_if: tuple[str, ...] = ()
    link: str = ""
    expires: datetime.date | None = None
    torch: str = ""
    program: str = ""

    @property
    def parts(self) -> Fingerprint:
        """The fields of the fingerprint."""
        return Fingerprint(
            *(self.kind, self.backend, self.stage, self.op, self.policy),
            *(self.dtypes, self.ingredient),
        )

    def load(self) -> Case:
        """Return its case. Raises `CaseError`."""
        return loads(self.case, f"finding {self.id}: case")

    def expired(self, today: datetime.date) -> bool:
        """Return whether its last day has passed."""
        return self.expires is not None and self.expires < today

    def holds(self, torch: str) -> bool:
        """Return whether it applies to a version of torch."""
        return holds(self.torch, torch)


@dataclass(frozen=True, slots=True)
class Baseline:
    """A file with its entries; no entries if there is no file."""

    path: Path
    text: str = ""
    entries: tuple[Entry, ...] = ()


class _File(msgspec.Struct, forbid_unknown_fields=True):
    finding: tuple[Entry, ...] = ()


def read(path: Path, *, missing: bool = True) -> Baseline:
    """Read a baseline. missing: whether the file may be missing. Raises `BaselineError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if missing:
            return Baseline(path)
        raise BaselineError(f"{path}: no such file: `amp-fuzz baseline update` makes it") from None
    except UnicodeDecodeError as error:
        raise BaselineError(f"{path}: not UTF-8 ({error}): write the file again") from error
    except OSError as error:
        raise BaselineError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        entries = msgspec.convert(tomllib.loads(text), _File).finding
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise BaselineError(f"{path}: {error}") from error
    _check(path, entries)
    return Baseline(path, text, entries)


def _check(path: Path, entries: Sequence[Entry]) -> None:
    seen: dict[str, str] = {}
    for entry in entries:
        where = f"{path}: finding {entry.id!r}"
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", entry.id):
            raise BaselineError(f"{where}: an id consists of letters, digits, -, _ and .")
        if entry.id in seen:
            raise BaselineError(f"{where} appears twice: give each entry a separate id")
        seen[entry.id] = entry.fingerprint
        if not entry.reason.strip():
            raise BaselineError(f"{where}: the reason is empty: say why it is accepted")
        if entry.parts.hash != entry.fingerprint:
            raise BaselineError(
                f"{where}: fingerprint={entry.fingerprint!r} is not that of its fields "
                f"({entry.parts.hash}): leave kind to ingredient as `baseline update` wrote them"
            )
        try:
            SpecifierSet(entry.torch)
        except InvalidSpecifier as error:
            raise BaselineError(f"{where}: torch={entry.torch!r}: write it as '>=2.13'") from error
        try:
            entry.load()
        except CaseError as error:
            raise BaselineError(f"{path}: {error}") from error


def match(entries: Iterable[Entry], record: DivergenceRecord) -> Entry | None:
    """Return the entry that accepts a finding, or None.

    If the entry of a crash names no op, it accepts only its own case: another process may have died
    of something else. For a wrong policy, torch must still behave as one that the entry names.
    """
    ids = {record.case.id, record.id}
    for entry in entries:
        if record.kind in ("crash", "timeout") and not entry.op:
            same = (entry.kind, entry.backend) == (record.kind, record.backend)
            if same and entry.load().id in ids:
                return entry
            continue
        if entry.fingerprint != record.fingerprint:
            continue
        if entry.kind == "policy" and not set(entry.as_if) & set(record.as_if):
            continue
        return entry
    return None


# -- writing --------------------------------------------------------------------------------------


def entry_of(
    record: DivergenceRecord,
    taken: Iterable[str],
    *,
    reason: str,
    link: str = "",
    expires: datetime.date | None = None,
    torch: str = "",
) -> Entry:
    """Return a new entry for a finding, with an id that is not taken."""
    parts, case = fingerprint(record), record.minimised or record.case
    words = [parts.op.replace("*", ""), parts.kind, parts.backend]
    name = re.sub(r"[^a-z0-9]+", "-", "-".join(filter(None, words)).lower()).strip("-")
    taken = set(taken)
    name = name if name not in taken else f"{name}-{parts.hash}"
    return Entry(
        id=name,
        fingerprint=parts.hash,
        title=title(record),
        kind=parts.kind,
        backend=parts.backend,
        stage=parts.stage,
        op=parts.op,
        policy=parts.policy,
        dtypes=parts.dtypes,
        ingredient=parts.ingredient,
        as_if=record.as_if,
        reason=reason,
        link=link,
        expires=expires,
        torch=torch,
        program="\n".join(str(case).splitlines()[1:]),
        case=case.json().decode(),
    )


def added(baseline: Baseline, entries: Iterable[Entry]) -> str:
    """Return the text of the file with more entries at its end."""
    blocks = [_block(entry) for entry in entries]
    text = baseline.text.rstrip("\n")
    return "\n\n".join(filter(None, [text or _HEAD.rstrip("\n"), *blocks])) + "\n"


def removed(baseline: Baseline, ids: Iterable[str]) -> str:
    """Return the text of the file without some entries; everything else is unchanged.

    A comment directly above an entry is removed with it.
    """
    gone, lines = set(ids), baseline.text.splitlines(keepends=True)
    starts = [i for i, line in enumerate(lines) if line.strip() == "[[finding]]"]
    ends = [*starts[1:], len(lines)]
    dropped: set[int] = set()
    for entry, start, end in zip(baseline.entries, starts, ends, strict=True):
        if entry.id in gone:
            dropped |= set(range(_above(lines, start), _above(lines, end)))
    return "".join(line for i, line in enumerate(lines) if i not in dropped)


def _above(lines: Sequence[str], start: int) -> int:
    """Return the first line of the comment directly above a line."""
    if start == len(lines):
        return start
    while start > 0 and lines[start - 1].lstrip().startswith("#"):
        start -= 1
    return start


def _block(entry: Entry) -> str:
    lines = ["[[finding]]"]
    for name, value in msgspec.structs.asdict(entry).items():
        if name not in ("program", "case") and value not in ("", (), None):
            lines.append(f"{name} = {_value(value)}")
    lines.append(f"program = {_lines(entry.program)}")
    lines.append(f"case = {_literal(entry.case)}")
    return "\n".join(lines)


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, datetime.date):
        return value.isoformat()
    return _quoted(str(value))


def _quoted(text: str) -> str:
    """Return a basic string of TOML. All escapes of JSON are escapes of TOML."""
    return msgspec.json.encode(text).decode().replace("\x7f", "\\u007f")


def _literal(text: str) -> str:
    return f"'{text}'" if "'" not in text else _quoted(text)


def _lines(text: str) -> str:
    if "'''" in text or any(ord(c) < 32 and c != "\n" for c in text):
        return _quoted(text)
    return f"'''\n{text}'''"
