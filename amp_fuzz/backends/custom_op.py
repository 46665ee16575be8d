"""Custom ops that are defined again and again under one name.

`torch.library.custom_op` lets a definition replace an earlier one of the name, as every case with
the entry ``custom_op`` does. It is not safe: what is left of the earlier library takes
``torch.ops.ns.name`` away when it is collected, which may be long after, and with it the OpOverload
that the dispatcher points to and does not hold. The next call under a dispatch mode reads freed
memory (docs/findings/custom-op-defined-again.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch._library.custom_ops

__all__ = ["custom_op"]


def custom_op(name: str, body: Callable[..., Any], *, mutates_args: Iterable[str]) -> Any:
    """Define an op as `torch.library.custom_op` does; the earlier one of the name is gone for good.

    All that are defined under a name have one schema: what torch remembers of it besides stays.
    What the earlier one's library has defined is not public: without those names, in another
    torch, the op is defined as torch does it.
    """
    libraries: Any = getattr(torch._library.custom_ops, "OPDEF_TO_LIB", {})
    if (earlier := libraries.pop(name, None)) is not None:
        earlier._destroy()
        getattr(earlier, "_op_defs", set()).clear()
    return torch.library.custom_op(name, body, mutates_args=mutates_args)
