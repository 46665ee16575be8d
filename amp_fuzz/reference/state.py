"""The autocast state of a thread, and the rules that it follows.

State is what torch's is: enabled and dtype for each device type, and whether casts of weights are
cached, all thread-local; the cache itself is one for the process and is cleared when the outermost
context of a thread ends.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from amp_fuzz.policies.tables import DEVICES, PolicyTable, load_table
from amp_fuzz.reference import dispatch
from amp_fuzz.reference.casts import aliased
from amp_fuzz.reference.semantics import DOCUMENTED, Semantics

if TYPE_CHECKING:
    from amp_fuzz.reference.calls import KernelCall, Supposed

__all__ = [
    "ForwardState",
    "State",
    "as_device",
    "default_dtype",
    "default_dtypes",
    "enabled_devices",
    "has_table",
    "here",
    "is_elsewhere",
    "log_kernels",
    "own_table",
    "restore",
    "table_of",
]


class ForwardState(NamedTuple):
    """The autocast state under which the operations of a forward ran."""

    dtype: torch.dtype
    enabled: bool
    table: PolicyTable | None


class State:
    """The autocast state of a thread, and of those of autograd that work for it.

    semantics: the rules that hold. supposed: policies that replace those of the tables, by
    overload. flips: is told each decision, and may change it. answers: whether torch's questions
    are answered for it. intercepts: in how many blocks calls of ops without a policy come to the
    kernels, with autocast or without.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.semantics: Semantics = DOCUMENTED
        self.supposed: Mapping[str, Supposed] = {}
        self.flips: Any = None
        self.enabled: dict[str, bool] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.tables: dict[str, PolicyTable] = {}
        self.cache_enabled = True
        self.nesting = 0
        self.resets = 0
        self.answers = True
        self.intercepts = 0
        self.log: list[KernelCall] | None = None

    def dtype(self, device: str) -> torch.dtype:
        """Return the autocast dtype of a device type."""
        return self.dtypes.get(device) or default_dtype(table_of(device))

    def on(self) -> bool:
        """Return whether calls have to come to the kernels."""
        extra = self.nesting and self.semantics.extra()
        return bool(extra or self.intercepts) or any(self.enabled.values())

    def devices(self) -> list[str]:
        """Return the device types whose autocast is on, accelerators first, as in torch's keys."""
        found = [device for device, on in self.enabled.items() if on]
        found.sort(key="cpu".__eq__)
        return found

    @contextmanager
    def having(self, **fields: Any) -> Iterator[None]:
        """Give the state other values of some fields for a block."""
        before = {name: getattr(self, name) for name in fields}
        for name, value in fields.items():
            setattr(self, name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)


_KEY = "amp_fuzz.reference.autocast"


def here() -> State:
    """Return the state of this thread.

    A backward pass of an accelerator's tensors runs in a thread of autograd's own, under the state
    of the thread that called it. torch carries the dispatch keys there, and with them whatever an
    extension stashed; Python's thread-local storage stays behind.
    """
    found: State | None = dispatch.stashed(_KEY)
    if found is None:
        found = State()
        dispatch.stash(_KEY, found)
    elif found.thread != threading.get_ident():
        return found.semantics.in_autograd_thread(found)
    return found


# Tables that device types were given for a block: see `as_device`.
_given: dict[str, PolicyTable] = {}
# Device types whose autocast is not torch's own.
_elsewhere: list[str] = []


@contextmanager
def as_device(
    device_type: str, table: PolicyTable, *, tensors: str = "", elsewhere: bool = False
) -> Iterator[None]:
    """Give a device type a policy table for a block, in every thread.

    It may be any name: of a device that came with no table, or of one that is not here, as which
    the tensors of another device type are taken, by `tensors`: then these are cast where they
    would be if they were of `device_type`. elsewhere: whether the kernels of its autocast are not
    torch's own.
    """
    before, others = _given.get(device_type), list(_elsewhere)
    _given[device_type] = table
    _elsewhere.extend([device_type] * elsewhere)
    try:
        with aliased(tensors or device_type, device_type):
            yield
    finally:
        restore(_given, device_type, before)
        _elsewhere[:] = others


def is_elsewhere(device: str) -> bool:
    """Return whether the kernels of a device's autocast are not torch's own."""
    return device in _elsewhere


def has_table(device: str) -> bool:
    """Return whether a device type has a policy table."""
    return device in DEVICES or device in _given


def table_of(device: str) -> PolicyTable:
    """Return the policy table of a device type."""
    return _given.get(device) or own_table(device)


@functools.cache
def own_table(device: str) -> PolicyTable:
    """Return the table that a device type came with, and the rules that users declared for it."""
    return load_table(device)


def default_dtype(table: PolicyTable) -> torch.dtype:
    """Return the autocast dtype that a device type has at first."""
    return cast(torch.dtype, getattr(torch, table.default_dtype))


def restore(mapping: dict[str, Any], key: str, value: Any) -> None:
    """Put a value back, or take the key out if there was none."""
    if value is None:
        mapping.pop(key, None)
    else:
        mapping[key] = value


def enabled_devices() -> list[str]:
    """Return the device types whose autocast is on in this thread, accelerators first."""
    return here().devices()


@contextmanager
def log_kernels() -> Iterator[list[KernelCall]]:
    """Collect every call that reaches a kernel of the reference in this thread."""
    log: list[KernelCall] = []
    with here().having(log=log):
        yield log


@contextmanager
def default_dtypes(dtypes: Mapping[str, torch.dtype]) -> Iterator[None]:
    """Let contexts without a dtype take these, by device, for a block outside of any context.

    `torch.set_autocast_dtype` does so for torch's own.
    """
    with here().having(dtypes={**here().dtypes, **dtypes}):
        yield
