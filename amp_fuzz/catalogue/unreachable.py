"""Autocast kernels that no drawn program can reach, each with its reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from amp_fuzz.versions import holds

__all__ = ["UNREACHABLE", "Unreachable", "unreachable"]


@dataclass(frozen=True, slots=True)
class Unreachable:
    """Kernels, by overload, and why no program reaches them.

    torch: the versions that have them. everywhere: whether all builds of these versions do.
    """

    overloads: tuple[str, ...]
    why: str
    torch: str = ""
    everywhere: bool = True


LISTED = (
    Unreachable(
        (
            "cumprod.dimname",
            "cumsum.dimname",
            "index_copy.dimname",
            "log_softmax.Dimname",
            "norm.names_ScalarOpt_dim",
            "prod.dim_Dimname",
            "softmax.Dimname",
            "sum.dim_DimnameList",
        ),
        "it takes named dimensions, which torch 2.13 removed; no program has them",
        torch="<2.13",
    ),
    Unreachable(
        ("_cudnn_rnn",), "only builds with cuDNN have it, and only a GPU meets it", everywhere=False
    ),
)


def unreachable(torch: str | None = None) -> Iterator[tuple[str, str]]:
    """Yield each overload that no program reaches in a torch, by default the installed, and why."""
    for entry in LISTED:
        if holds(entry.torch, torch):
            yield from ((overload, entry.why) for overload in entry.overloads)


UNREACHABLE: Mapping[str, str] = MappingProxyType(dict(unreachable()))
"""Those of the installed torch."""
