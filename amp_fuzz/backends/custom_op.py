"""Define custom ops repeatedly under one name.

`torch.library.custom_op` lets a definition replace an earlier one of the same name, as every case
with the entry ``custom_op`` does. This is not safe. When the earlier library is collected, maybe
much later, it removes ``torch.ops.ns.name``, and with it the OpOverload that the dispatcher points
to without owning it. The next call under a dispatch mode reads freed memory
(docs/findings/custom-op-defined-again.md).

The dispatcher also keeps that pointer through a new definition if any kernel of the op stays
registered, such as one of the reference. So no OpOverload is ever freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch._library.custom_ops

__all__ = ["custom_op", "definitions"]


_kept: list[Any] = []


def custom_op(name: str, body: Callable[..., Any], *, mutates_args: Iterable[str]) -> Any:
    """Define an op like `torch.library.custom_op`, and remove the earlier one of the name for good.

    All definitions of a name have one schema, so torch's other records of it can stay. The earlier
    library is not public. If its private names are missing, in another torch, the op is defined as
    torch does it.
    """
    libraries: Any = getattr(torch._library.custom_ops, "OPDEF_TO_LIB", {})
    if (earlier := libraries.pop(name, None)) is not None:
        earlier._destroy()
        getattr(earlier, "_op_defs", set()).clear()
    op: Any = torch.library.custom_op(name, body, mutates_args=mutates_args)
    _kept.append(op._opoverload)
    return op


def definitions() -> Mapping[str, Any]:
    """Return the definition of each custom op of this process, by its name ``ns::op``."""
    return dict(getattr(torch._library.custom_ops, "OPDEFS", {}))
