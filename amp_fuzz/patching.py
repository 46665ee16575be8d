"""Replace an attribute of torch for a block: the one place that does so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

__all__ = ["patched"]


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module or class while any thread is in the block.

    Blocks may nest, and blocks of several threads may overlap. The attribute is that of the block
    that was entered last and is still open, or else the owner's own. A wrapper wraps the value that
    it finds, so it may be called twice while blocks overlap. If the owner lacks the attribute,
    nothing is set: private names of torch come and go.
    """
    key, block = (id(owner), name), [value]  # a separate list: values may be equal
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
"""By owner and name: the original value, and the value of each open block."""
