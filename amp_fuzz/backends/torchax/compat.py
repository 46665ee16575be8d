"""Import torchax where torch has lost overloads that it names.

torch 2.13 took named tensors away, and with them overloads such as ``aten::prod.dim_Dimname``.
torchax up to 0.0.13 names 22 of these: two as keys of its autocast policies, when it is imported,
and 20 in its list of decompositions, when its environment is made; the first raises AttributeError
(google/torchax#101, mended in 0.0.14). No tensor can reach an overload that is not there, so each
of these names may stand for anything that is equal to nothing else.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from packaging.version import Version

from amp_fuzz.patching import patched

__all__ = ["MENDED", "CompatError", "Removed", "load", "named", "needed"]

MENDED = Version("0.0.14")
"""The first torchax that names none of them."""


class CompatError(RuntimeError):
    """The names were to stand in for overloads that are there, or that nobody asks for."""


class Removed:
    """An overload of named tensors that torch no longer has: equal to itself alone."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Removed({self.name!r})"


def needed() -> bool:
    """Return whether this torch lacks overloads that this torchax names."""
    return Version(importlib.metadata.version("torchax")) < MENDED and not _has_names()


def _has_names() -> bool:
    return hasattr(torch.ops.aten.prod, "dim_Dimname")


@contextmanager
def named() -> Iterator[list[str]]:
    """Let the overloads of named tensors be named for a block, and yield those that are.

    Raises `CompatError`, and changes nothing, where `needed` says that it is not; and after the
    block if none was named.
    """
    if not needed():
        version = importlib.metadata.version("torchax")
        raise CompatError(
            f"torch {torch.__version__} with torchax {version} needs no names to stand in"
        )
    packet = torch._ops.OpOverloadPacket
    plain, found = packet.__getattr__, []

    def get(self: Any, name: str) -> Any:
        try:
            return plain(self, name)
        except AttributeError:
            if "imname" not in name and "names" not in name:
                raise
            found.append(f"{self}.{name}")
            return Removed(found[-1])

    with patched(packet, "__getattr__", get):
        yield found
    if not found:
        raise CompatError("torchax named no overload that torch lacks: this is not needed any more")


def load() -> Any:
    """Import torchax, make its environment and return the module.

    It names PrivateUse1 ``jax`` in this process, for good.
    """
    if not needed():
        return _load()
    with named():
        return _load()


def _load() -> Any:
    import torchax

    torchax.default_env()
    return torchax
