"""The causes that a run has met, and which divergences count with them.

The first case of a look is minimised and gets the fingerprint of its cause; the others are counted
with it. Once two looks with the same traits led to one cause, other looks with these traits are
counted with it too. Some are minimised anyway, since two causes may look alike.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from amp_fuzz.cases.case import Case
from amp_fuzz.findings.looks import Look
from amp_fuzz.findings.wrong_rule import ABOUT
from amp_fuzz.records.fingerprint import fingerprint, special
from amp_fuzz.records.schema import DivergenceRecord, Note

__all__ = ["PLAN", "Groups"]

# The cases of a look, by number, that are minimised too.
_AGAIN = {4**n for n in range(1, 16)}

PLAN = "plan: "
"""Before the unusual part of a plan, in `Groups.as_if`, in the place of a kernel."""


@dataclass(slots=True)
class Groups:
    """The causes that a run has met: plain data, so processes can share it.

    looks: fingerprints by look. traits: fingerprints by traits. as_if: by backend and kernel, the
    policies that explain every case of a cause so far, and its fingerprint; for contexts, by
    backend and the unusual part of the plan, the settings that they act as. left: by backend and
    ``leaves=weight cache``, the fingerprint of contexts that do not restore this. loose: findings
    that no policy explains so far. asked: policies that were tried on loose findings.
    known: by fingerprint, the entry of the baseline. signatures: of listed divergences.
    seen: how often a look or traits were met. deadly: ids of candidates that killed a process; they
    do not run again. minimised: how many looks of a backend, kind and op were minimised. notes: by
    backend and group of a note, the size of its smallest case. elsewhere: see
    `amp_fuzz.findings.notes.Memory`.
    """

    looks: dict[Look, tuple[str, ...]] = field(default_factory=dict)
    traits: dict[Look, tuple[str, ...]] = field(default_factory=dict)
    as_if: dict[tuple[str, str], tuple[tuple[str, ...], str]] = field(default_factory=dict)
    left: dict[tuple[str, str], str] = field(default_factory=dict)
    loose: dict[str, DivergenceRecord] = field(default_factory=dict)
    asked: set[tuple[str, str]] = field(default_factory=set)
    known: dict[str, str] = field(default_factory=dict)
    signatures: set[Look] = field(default_factory=set)
    seen: Counter[Look] = field(default_factory=Counter)
    deadly: set[str] = field(default_factory=set)
    minimised: Counter[Look] = field(default_factory=Counter)
    notes: dict[tuple[str, ...], int] = field(default_factory=dict)
    elsewhere: dict[tuple[str, ...], str] = field(default_factory=dict)

    def counted(self, look: Look, traits: Look) -> tuple[str, ...]:
        """Return the fingerprints of a divergence that need not be minimised, or ()."""
        self.seen[look] += 1
        self.seen[traits] += 1
        if self.seen[look] > 1 and look in self.looks:
            return () if self.seen[look] in _AGAIN else self.looks[look]
        found = self.traits.get(traits, ())
        if len(found) < 2 or len(set(found)) > 1 or self.seen[traits] in _AGAIN:
            return ()
        return found[:1]

    def take(self, record: DivergenceRecord, entry: str = "") -> bool:
        """Add the cause of a final record, and return whether it is new.

        entry: the baseline entry that accepts it.
        """
        if record.as_if:
            about = record.as_if[0].partition("=")[0]
            words = "+".join(sorted(special(record.minimised or record.case)))
            words = about if about in ABOUT else words
            key = record.backend, PLAN + words if record.general else record.overload
            self.as_if[key] = record.as_if, record.fingerprint
        if (cause := fingerprint(record)).kind == "state":
            self.left[record.backend, cause.ingredient] = record.fingerprint
        new = record.fingerprint not in self.known
        if new:
            self.known[record.fingerprint] = entry
            if not entry and not record.as_if and cause.kind != "state":
                self.loose[record.fingerprint] = record
        return new

    def join(self, loose: str, cause: str) -> None:
        """Count further cases of a loose finding with the cause that explains it."""
        del self.loose[loose]
        for known in (self.looks, self.traits):
            for key, names in known.items():
                if loose in names:
                    known[key] = tuple(cause if name == loose else name for name in names)

    def smallest(self, note: Note, case: Case) -> bool:
        """Add a note, and return whether its case is the smallest of the group."""
        key, size = (note.backend, *note.group), len(case.json())
        smaller = size < self.notes.get(key, size + 1)
        if smaller:
            self.notes[key] = size
        return smaller

    def update(self, other: Groups) -> None:
        """Add the causes that another process has met."""
        self.looks |= other.looks
        self.traits |= other.traits
        self.as_if |= other.as_if
        self.left |= other.left
        self.loose |= other.loose
        self.asked |= other.asked
        self.known |= other.known
        self.signatures |= other.signatures
        self.deadly |= other.deadly
        self.elsewhere |= other.elsewhere
        for key, size in other.notes.items():
            self.notes[key] = min(size, self.notes.get(key, size))
        for mine, theirs in ((self.seen, other.seen), (self.minimised, other.minimised)):
            for look, count in theirs.items():
                mine[look] = max(mine[look], count)
