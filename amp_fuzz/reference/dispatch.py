"""The one place that touches torch's private dispatcher API.

The reference puts Python kernels on an autocast dispatch key that stock torch leaves empty,
``AutocastIPU``, with a fallthrough for every other op, and switches the key on for a block through
the thread-local included and excluded key sets. The same kernels stand on ``PreDispatch``, which
comes before the function transforms; that key is switched on inside those alone.
`tests/reference/test_dispatch.py` would notice a change of any name used here.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "FIRST",
    "OWN",
    "Mode",
    "after",
    "below_autograd",
    "exclude",
    "excluded",
    "excluding",
    "first",
    "is_below_autograd",
    "is_composite",
    "kept",
    "overload_of",
    "register",
    "stash",
    "stashed",
    "switch",
    "transform_depth",
]

OWN, FIRST = "AutocastIPU", "PreDispatch"
_KEY, _FIRST_KEY = (getattr(torch._C.DispatchKey, key) for key in (OWN, FIRST))
_KEYSET = torch._C.DispatchKeySet(_KEY) | torch._C.DispatchKeySet(_FIRST_KEY)
_AFTER = {
    OWN: torch._C._dispatch_keyset_full_after(_KEY),
    FIRST: torch._C._dispatch_keyset_full_after(_FIRST_KEY),
}

# Libraries keep their registrations alive; dropping them would unregister.
_fallback: torch.library.Library | None = None
_libraries: dict[str, torch.library.Library] = {}
_temporary: dict[str, torch.library.Library] = {}


def register(
    name: str, kernel: Callable[..., Any], key: str = OWN, *, temporary: bool = False
) -> None:
    """Put a Python kernel for an op on one of the keys; it gets the key set first.

    ``addmm`` is ``aten::addmm``. temporary: until `unregister`.
    """
    _fall_through()
    namespace, _, own = name.rpartition("::")
    namespace = namespace or "aten"
    libraries = _temporary if temporary else _libraries
    if namespace not in libraries:
        libraries[namespace] = torch.library.Library(namespace, "IMPL")
    libraries[namespace].impl(own, kernel, key, with_keyset=True)


def _fall_through() -> None:
    """Let ops without a kernel on the key pass it; without this they raise where it is on."""
    global _fallback
    if _fallback is None:
        _fallback = torch.library.Library("_", "IMPL")
        _fallback.fallback(torch.library.fallthrough_kernel, OWN)


def unregister() -> None:
    """Unregister the temporary kernels: a library that nobody holds goes."""
    _temporary.clear()


def overload_of(name: str) -> Any | None:
    """Return the OpOverload of ``addmm`` or ``sum.dim_IntList``, or None if this torch lacks it.

    An op of another namespace is written with it: ``mylib::foo``.
    """
    namespace, _, own = name.rpartition("::")
    base, _, overload = own.partition(".")
    packet = getattr(getattr(torch.ops, namespace or "aten"), base, None)
    return None if packet is None else getattr(packet, overload or "default", None)


def is_composite(overload: Any) -> bool:
    """Return whether an op is made of others, which autocast sees one by one."""
    return bool(overload._can_decompose())


def switch(on: bool) -> None:
    """Include the key in, or exclude it from, every dispatch of this thread."""
    if on:  # there may be no kernel yet
        _fall_through()
    torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, not on)
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, on)


def is_on() -> bool:
    """Return whether the key is included in this thread."""
    return bool(torch._C._dispatch_tls_is_dispatch_key_included(_KEY))


@contextmanager
def first() -> Iterator[None]:
    """Call the kernels before the function transforms, too."""
    before = torch._C._dispatch_tls_is_dispatch_key_included(_FIRST_KEY)
    torch._C._dispatch_tls_set_dispatch_key_included(_FIRST_KEY, True)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(_FIRST_KEY, before)


class exclude:
    """A context in which the keys are excluded: what runs inside is not autocast again."""

    __slots__ = ("guard",)

    def __enter__(self) -> None:
        self.guard = torch._C._ExcludeDispatchKeyGuard(_KEYSET)
        self.guard.__enter__()
        _excluding.depth += 1

    def __exit__(self, *error: object) -> None:
        _excluding.depth -= 1
        self.guard.__exit__(*error)


class excluding:
    """A context in which the autocast of one device type is off, and that of others is not.

    Autocast's kernel of a device excludes the key of that device alone: a call with tensors of two
    devices comes to the kernels of both, one after the other.
    """

    __slots__ = ("before", "device")

    def __init__(self, device: str) -> None:
        self.device = device

    def __enter__(self) -> None:
        self.before = _excluding.devices
        _excluding.devices = {**self.before, self.device: transform_depth()}

    def __exit__(self, *error: object) -> None:
        _excluding.devices = self.before


def excluded() -> Mapping[str, int]:
    """Return the device types whose autocast is off in the kernels under way in this thread.

    Each with the depth of function transforms at which it went off.
    """
    return _excluding.devices


def transform_depth() -> int:
    """Return in how many function transforms the op that is under way still is."""
    depth: int = torch._C._functorch.get_dynamic_layer_stack_depth()
    return depth


class _Excluding(threading.local):
    depth = 0
    devices: Mapping[str, int] = MappingProxyType({})


_excluding = _Excluding()


@contextmanager
def kept() -> Iterator[None]:
    """Include the key again, for a block in a dispatch mode, as it is without the mode.

    A mode runs with all autocast keys excluded, so that a kernel that it calls (the pseudo-inverse:
    ``matmul``) would not be cast inside. What one of the reference's kernels excluded stays so.
    """
    if _excluding.depth or not is_on():
        yield
        return
    before = torch._C._dispatch_tls_is_dispatch_key_excluded(_KEY)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, False)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, before)


class Mode(TorchDispatchMode):
    """A dispatch mode that is no reason to import dynamo.

    torch has each mode import it, with sympy, at its first op, so that no compiler traces the
    method: 2 CPU seconds, 10 where nothing is compiled to bytecode yet. Nothing can trace it where
    the program has not imported dynamo.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        return super().__new__(_untraced(cls) if "torch._dynamo" in sys.modules else cls)  # type: ignore[arg-type]


@functools.cache
def _untraced(kind: type[Any]) -> type[Any]:
    method = torch._disable_dynamo(kind.__torch_dispatch__)  # type: ignore[attr-defined]
    return type(kind.__name__, (kind,), {"__torch_dispatch__": method})


def stash(name: str, value: object) -> None:
    """Keep an object for this thread, and for the threads of autograd that work for it.

    torch takes over a reference that it expects to own. Before pytorch#173568 (2.13) it does not
    count that one, and the object dies while it is stashed: count it here.
    """
    before = sys.getrefcount(value)
    torch._C._stash_obj_in_tls(name, value)
    if sys.getrefcount(value) == before:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def stashed(name: str) -> Any | None:
    """Return the object that this thread keeps under a name, or None."""
    return torch._C._get_obj_in_tls(name) if torch._C._is_key_in_tls(name) else None


def below_autograd() -> AbstractContextManager[None]:
    """Return a context in which autograd records nothing, whatever the grad mode says."""
    guard: AbstractContextManager[None] = torch._C._AutoDispatchBelowAutograd()
    return guard


def is_below_autograd() -> bool:
    """Return whether autograd records nothing here because this runs below it.

    In a function transform autograd is left out, too, and records what the transform hands on.
    """
    below = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradOther)
    return bool(below) and not transform_depth()


def after(keyset: Any, key: str = OWN) -> Any:
    """Return the keys of a dispatch that come after one of these, as a fallthrough sees them."""
    return keyset & _AFTER[key]
