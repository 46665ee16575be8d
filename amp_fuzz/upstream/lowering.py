"""Kernels that a compiler has in place of eager's, written as functions of an op's arguments.

Such a function is what a decomposition or a lowering makes of one op. Shadows follow it: its own
roundings and its own mistakes. Another wrong value of the same op stays a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from amp_fuzz.backends.imitation import Kernel
from amp_fuzz.reference.custom_ops import in_body

__all__ = ["Lowerings", "kernels"]

Lowering: TypeAlias = Callable[..., Any]
"""Computes an op from its arguments. None: it leaves the op as it is."""

Lowerings: TypeAlias = Mapping[Any, Lowering]
"""By overload."""


def kernels(lowerings: Lowerings, *, bodies: bool = False) -> dict[Any, Kernel]:
    """Return kernels for `Imitation`, by overload.

    bodies: compute so in the body of a custom op, too. A graph calls a custom op by its name, and
    a compiler does not see its body.
    """
    return {op: _kernel(lowering, bodies) for op, lowering in lowerings.items()}


def _kernel(lowering: Lowering, bodies: bool) -> Kernel:
    def kernel(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if in_body() and not bodies:
            return NotImplemented
        made = lowering(*args, **kwargs)
        return NotImplemented if made is None else made

    return kernel
