"""Replace an attribute of torch for a block: the one place that does so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

__all__ = ["patched"]


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give a module or class another attribute of a name for as long as a thread is in the block.

    Blocks may nest, and those of several threads may overlap: the attribute is that of the block
    entered last of those that are left, and the owner's own when none is. A value that wraps the
    attribute wraps what it finds, so a wrapper may be called twice while blocks overlap. An owner
    without the attribute stays without: private names of torch come and go.
    """
    key, block = (id(owner), name), [value]  # a list of its own: values may be equal
    if not hasattr(owner, name):
        yield
        return
    with _lock:
        own = vars(owner).get(name, _INHERITED)
        blocks = _entered.setdefault(key, [[own]])
        blocks.append(block)
        setattr(owner, name, value)
    try:
        yield
    finally:
        with _lock:
            del blocks[next(i for i, other in enumerate(blocks) if other is block)]
            (latest,) = blocks[-1]
            if latest is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, latest)
            if len(blocks) == 1:
                del _entered[key]


_INHERITED: Any = object()
_lock = Lock()
_entered: dict[tuple[int, str], list[list[Any]]] = {}
"""By owner and name: what it had before, and the value of each block that is entered."""
