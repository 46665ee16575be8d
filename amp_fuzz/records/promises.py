"""What torch's documents promise, as data: ``amp_fuzz/reference/promises.toml``, read.

Each promise says which facts a case must have to falsify it; `amp_fuzz.records.facts` finds them.
Nothing here needs torch.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

import msgspec

__all__ = ["Differs", "Document", "Kernels", "OpList", "Promise", "Promises", "promises"]


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A document that promises something.

    path: in its repository, pytorch/pytorch unless it says otherwise; several are separated by
    semicolons. read: for each of them, the version or commit that was read.
    """

    title: str
    path: str
    read: str


@dataclass(frozen=True, slots=True)
class Promise:
    """A promise: who gives it and where, in our words.

    devices: the device types that it is about; none: all. since: the version of torch; "" if not
    known. when: sets of facts, of one of which a case must have all to falsify it. never: why no
    case of a run could, or "". op: in a list of ops, its name there.
    """

    id: str
    document: str
    at: str
    says: str
    devices: tuple[str, ...] = ()
    since: str = ""
    when: tuple[frozenset[str], ...] = ()
    never: str = ""
    op: str = ""


class OpList(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"document": "in"}):
    """A list of ops in a document: on a device, what their inputs are cast to."""

    document: str
    at: str
    device: str
    to: Literal["lower", "float32", "widest"]
    ops: tuple[str, ...]


class Kernels(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The overloads that a name in a list reaches. by: the ops of the catalogue; none: any."""

    reaches: tuple[str, ...]
    by: tuple[str, ...] = ()


class Differs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ops about which a document's lists and a policy table disagree, and why.

    ops: overloads that only the table has, or names that only a list has; ``*`` without any list.
    """

    device: str
    why: str
    ops: tuple[str, ...]


_CAST = {
    "lower": "its floating inputs are cast to the low dtype.",
    "float32": "it runs in float32, or gives float32.",
    "widest": "its floating inputs are cast to the widest dtype among them.",
}


@dataclass(frozen=True, slots=True)
class Promises:
    """All promises by id, with the documents that give them and the lists that some are from.

    rare: by id, why few cases of a run could falsify a promise.
    """

    documents: Mapping[str, Document]
    by_id: Mapping[str, Promise]
    lists: Sequence[OpList]
    kernels: Mapping[str, Kernels]
    differs: Sequence[Differs]
    rare: Mapping[str, str]

    def falsifiable(self, facts: Collection[str]) -> tuple[str, ...]:
        """Return the ids of the promises that a case with these facts could have falsified.

        If both sides raised alike, no value was compared: only promises about that count.
        """
        raised = "raised" in facts
        return tuple(
            promise.id
            for promise in self.by_id.values()
            if any(w.issubset(facts) and (not raised or "raised" in w) for w in promise.when)
        )


@cache
def promises() -> Promises:
    """Read the promises, once."""
    text = resources.files("amp_fuzz").joinpath("reference/promises.toml").read_text("utf-8")
    return parsed(text)


def parsed(text: str) -> Promises:
    """Return the promises of a TOML text. Raises `ValueError` if it names an id twice."""
    raw = tomllib.loads(text)
    lists = msgspec.convert(raw["list"], tuple[OpList, ...])
    found: dict[str, Promise] = {}
    for promise in (*_prose(raw), *_repeated(raw), *_listed(lists)):
        if promise.id in found:
            raise ValueError(f"promises.toml: id={promise.id!r} is given twice: rename one")
        found[promise.id] = promise
    documents = {
        name: msgspec.convert({k: v for k, v in document.items() if k != "promise"}, Document)
        for name, document in raw["document"].items()
    }
    return Promises(
        documents,
        found,
        lists,
        msgspec.convert(raw["kernels"], dict[str, Kernels]),
        msgspec.convert(raw["differs"], tuple[Differs, ...]),
        raw["rare"],
    )


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    at: str
    says: str
    devices: tuple[str, ...] = ()
    since: str = ""
    when: tuple[str, ...] = ()
    never: str = ""


def _promise(row: _Row, document: str) -> Promise:
    when = tuple(frozenset(words.split("+")) for words in row.when)
    name = f"{document}.{row.id}"
    return Promise(name, document, row.at, row.says, row.devices, row.since, when, row.never)


def _prose(raw: Mapping[str, Any]) -> Iterator[Promise]:
    for name, document in raw["document"].items():
        for row in document.get("promise", ()):
            yield _promise(msgspec.convert(row, _Row), name)


def _repeated(raw: Mapping[str, Any]) -> Iterator[Promise]:
    """Yield what a document says once for each of several device types."""
    for each in raw["each"]:
        for device in each["devices"]:
            for row in each["promise"]:
                when = [words.format(device=device) for words in row["when"]]
                at = each["at"].format(DEVICE=device.upper())
                new = {**row, "id": f"{device}-{row['id']}", "at": at, "when": when}
                yield _promise(msgspec.convert({**new, "devices": [device]}, _Row), each["in"])


def _listed(lists: Sequence[OpList]) -> Iterator[Promise]:
    for one in lists:
        for op in one.ops:
            name = f"{one.device}:{op}"
            when = (frozenset((name,)),)
            says = f"{op}: {_CAST[one.to]}"
            yield Promise(name, one.document, one.at, says, (one.device,), when=when, op=op)
