"""The one place that touches torch's private dispatcher API.

The reference puts Python kernels on an autocast dispatch key that stock torch leaves empty,
``AutocastIPU``, with a fallthrough for every other op, and switches the key on for a block through
the thread-local included and excluded key sets. `tests/reference/test_dispatch.py` would notice a
change of any name used here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

__all__ = ["after", "exclude", "overload_of", "register", "switch"]

_KEY: Any = getattr(torch._C.DispatchKey, "AutocastIPU")  # noqa: B009 - not in torch's stubs
_KEYSET = torch._C.DispatchKeySet(_KEY)
_AFTER = torch._C._dispatch_keyset_full_after(_KEY)

# Libraries keep their registrations alive; dropping them would unregister.
_fallback: torch.library.Library | None = None
_library: torch.library.Library | None = None


def register(name: str, kernel: Callable[..., Any]) -> None:
    """Put a Python kernel for ``aten::name`` on the reference's key; it gets the key set first."""
    global _fallback, _library
    if _library is None:
        _fallback = torch.library.Library("_", "IMPL")
        _fallback.fallback(torch.library.fallthrough_kernel, "AutocastIPU")
        _library = torch.library.Library("aten", "IMPL")
    _library.impl(name, kernel, "AutocastIPU", with_keyset=True)


def overload_of(name: str) -> Any | None:
    """Return the OpOverload of ``addmm`` or ``sum.dim_IntList``, or None if this torch lacks it."""
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base, None)
    return None if packet is None else getattr(packet, overload or "default", None)


def switch(on: bool) -> None:
    """Include the key in, or exclude it from, every dispatch of this thread."""
    torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, not on)
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, on)


def is_on() -> bool:
    """Return whether the key is included in this thread."""
    return bool(torch._C._dispatch_tls_is_dispatch_key_included(_KEY))


def exclude() -> AbstractContextManager[None]:
    """Return a context in which the key is excluded: what runs inside is not autocast again."""
    guard: AbstractContextManager[None] = torch._C._ExcludeDispatchKeyGuard(_KEYSET)
    return guard


def after(keyset: Any) -> Any:
    """Return the keys of a dispatch that come after the reference's, as a fallthrough sees them."""
    return keyset & _AFTER
