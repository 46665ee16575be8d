"""A known bug: what it is, which versions have it, how it is told, and its smallest example."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.case import Case
from amp_fuzz.upstream.harm import Harm
from amp_fuzz.upstream.known import Known, Part

__all__ = ["Bug", "Example"]


@dataclass(frozen=True, slots=True)
class Example:
    """The smallest case that shows a bug, on one backend.

    wrong: the op whose wrong kernel must be reported in the same case. None: the op of the last
    statement. "": there is none, since nothing of the case can be compared.
    processor: the instructions that the processor must have, or must not; "" is any processor.
    torch: the versions on which the case shows this bug alone; "" is all that have it. On others
    the case raises first, or shows another bug beside it.
    """

    backend: str
    case: Case
    wrong: str | None = None
    processor: Literal["", "AVX-512", "no AMX"] = ""
    torch: str = ""

    def lacks(self) -> str:
        """Return what this processor lacks to show the bug, or ""."""
        match self.processor:
            case "AVX-512" if torch.backends.cpu.get_cpu_capability() != "AVX512":
                return "it takes a processor with AVX-512"
            case "no AMX" if _multiplies_tiles():
                return "it takes a processor without AMX"
        return ""


@cache
def _multiplies_tiles() -> bool:
    """Return whether the processor has AMX for bfloat16, as far as Linux says."""
    try:
        return " amx_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """A bug of torch, of a compiler or of a library.

    id, what, why: a name, what goes wrong, and why, a line each. link: the upstream issue.
    torch: the versions that have it. seen: the last version on which it was seen.
    harm: the gravest that its examples show, or would show (`amp_fuzz.upstream.harm`).
    backends: globs over the names of the backends that show it; those after a ``!`` do not.
    ops: globs over ops; with an imitation: only programs with such an op can show it.
    examples: smallest first. unshown: why there is none.
    rank: entries are tried in this order; those that explain most come first.

    own: it is the backend's own, which shows it without autocast too. Such a record is data, in
    `amp_fuzz/upstream/own`. It explains nothing: it names what attribution has found
    (`amp_fuzz.oracle.attribution`). page: the page of such a record, below docs/findings.

    A bug of autocast is told in one of three ways. imitation: the reference that imitates it
    agrees with the backend on the whole case. without: both sides agree once that part of torch is
    off. Else it is listed: kinds, ops, where, expected and observed say which divergences it is.
    `amp_fuzz.upstream.known.Known` explains each field.
    """

    id: str
    what: str
    why: str
    link: str = ""
    torch: str
    seen: str
    harm: Harm
    backends: tuple[str, ...] = ("*",)
    ops: tuple[str, ...] = ()
    imitation: Imitation | None = None
    kinds: tuple[str, ...] = ()
    where: str = "*"
    expected: str = ""
    observed: str = ""
    without: Part = ""
    examples: tuple[Example, ...] = ()
    unshown: str = ""
    rank: int = 50
    own: bool = False
    page: str = ""
    entry: Known = field(init=False, compare=False)

    def __post_init__(self) -> None:
        names = {f.name for f in fields(self)} & set(Known.__struct_fields__)
        values = {name: getattr(self, name) for name in names}
        quirk = self.id if self.imitation is not None else ""
        object.__setattr__(self, "entry", Known(**values, quirk=quirk))
