"""Import torchax on a torch without overloads that it names.

torch 2.13 removed named tensors, and with them overloads such as ``aten::prod.dim_Dimname``.
torchax up to 0.0.13 names 22 of these: two as keys of its autocast policies, at import, and 20 in
its list of decompositions, when its environment is created. The first raises AttributeError
(google/torchax#101, fixed in 0.0.14). No tensor can reach a missing overload, so each of these
names may stand for any object that equals nothing else.
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
    """The stand-in names would replace existing overloads, or nobody asks for them."""


class Removed:
    """A removed overload of named tensors, equal only to itself."""

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
    """Make the removed overloads nameable for a block, and yield those that were named.

    Raises `CompatError`, and changes nothing, if this is not `needed`; and after the block if no
    name was used.
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
        raise CompatError("torchax named no overload that torch lacks: compat is no longer needed")


def load() -> Any:
    """Import torchax, create its environment and return the module.

    It renames PrivateUse1 to ``jax`` in this process, permanently.
    """
    if not needed():
        return _load()
    with named():
        return _load()


def _load() -> Any:
    import torchax

    torchax.default_env()
    return torchax
