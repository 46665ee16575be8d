"""Autocast, written again in Python, at the same place of the dispatcher.

``autocast`` is a context manager and decorator like `torch.autocast`, driven by a policy table. It
sees what torch's autocast sees: composite ops decompose through it, backward passes run under it,
and it works on any module. It never asks torch's own autocast what to do.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar, cast

import torch

from amp_fuzz.policies.tables import DEVICES, Does, PolicyTable
from amp_fuzz.reference import cache, dispatch, kernels
from amp_fuzz.reference.queries import Queries
from amp_fuzz.reference.state import default_dtype, has_table, here, restore, table_of

__all__ = ["Snapshot", "autocast", "reset", "snapshot", "state", "torch_answers"]

F = TypeVar("F", bound=Callable[..., Any])

_queries = Queries(
    here,
    lambda d: here().dtype(d) if has_table(d) else torch.float16,
    lambda: cache.clear_cache(),
)

torch_answers = _queries.suspended


# Whether the device of this machine lacks a dtype that others of its type have. Only bfloat16 may
# be lacking.
_LACKING: dict[str, Callable[[], bool]] = {
    "cuda": lambda: torch.cuda.is_available() and not torch.cuda.is_bf16_supported(),
    "mps": lambda: (
        torch.backends.mps.is_available() and not torch.backends.mps.is_macos_or_newer(14, 0)
    ),
}


class _Saved(threading.local):
    """What one context will restore, in each thread: a decorated function may run in several."""

    def __init__(self) -> None:
        self.states: list[tuple[Any, ...]] = []


class autocast:
    """Run a block, or a function, under the reference's autocast.

    Args:
        device_type: the device type whose tensors are cast: "cpu", "cuda", "xpu", "mps", "mtia",
            "maia", or whatever `table` is for.
        dtype: what ``lower_precision_fp`` ops run in; None is the current autocast dtype of the
            device, at first its default. The device's table says whether it is taken, warns and
            disables, or raises, as `torch.autocast` does.
        enabled: False disables autocast in the block.
        cache_enabled: whether casts of float32 leaves that require grad are cached; None keeps the
            current setting.
        table: a policy table to use instead of the one shipped for the device type.

    Raises:
        ValueError: the device type has no policy table.
        RuntimeError: the device raises for this dtype, as a GPU without bfloat16 does. A device
            that is not here is simulated, and lacks no dtype.

    Example::

        with amp_fuzz.reference.autocast("cpu", dtype=torch.bfloat16):
            output = model(input)

    Source of the behaviour: https://docs.pytorch.org/docs/stable/amp.html.
    """

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        table: PolicyTable | None = None,
    ) -> None:
        if table is None and not has_table(device_type):
            raise ValueError(
                f"device_type={device_type!r} has no policy table: use one of "
                f"{', '.join(DEVICES)}, or give table="
            )
        self.device = device_type
        self.table = table or table_of(device_type)
        self.dtype = dtype or here().dtypes.get(device_type) or default_dtype(self.table)
        self.cache_enabled = here().cache_enabled if cache_enabled is None else cache_enabled
        does = self._does() if enabled else Does.ON
        if does is Does.RAISES:
            raise RuntimeError(f"the {device_type} of this machine does not support {self.dtype}")
        if does is Does.OFF:
            warnings.warn(
                f"autocast for {device_type} supports {', '.join(self.table.supported_dtypes)}, "
                f"not {self.dtype}: disabled",
                stacklevel=2,
            )
            enabled = False
        self.enabled = enabled
        self._saved = _Saved()

    def _does(self) -> Does:
        """Return what the table says of the dtype, on the device of this machine if it is here."""
        rule = self.table.context(str(self.dtype).removeprefix("torch."))
        if rule.lacking is not None and _LACKING.get(self.device, bool)():
            return rule.lacking
        return rule.does

    def __enter__(self) -> autocast:
        s, d = here(), self.device
        passing = kernels.register(self.table.rules)
        lent = kernels.temporary() if passing else nullcontext()
        lent.__enter__()
        kernels.register_temporarily((*s.semantics.extra(), *passing))
        before = s.enabled.get(d, False), s.dtypes.get(d), s.tables.get(d), s.cache_enabled
        self._saved.states.append((lent, s.resets, *before))
        s.enabled[d], s.dtypes[d], s.tables[d] = self.enabled, self.dtype, self.table
        s.cache_enabled = self.cache_enabled
        s.nesting += 1
        _queries.enter()
        dispatch.switch(s.on())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        s, d = here(), self.device
        lent, resets, enabled, dtype, table, cache_enabled = self._saved.states.pop()
        lent.__exit__(None, None, None)
        if s.resets != resets:  # it was left behind, and what it had set is gone
            return
        _queries.leave()
        s.nesting -= 1
        if s.nesting == 0:
            cache.clear_cache()
        s.enabled[d], s.cache_enabled = enabled, cache_enabled
        restore(s.dtypes, d, dtype)
        restore(s.tables, d, table)
        dispatch.switch(s.on())

    def __call__(self, function: F) -> F:
        @functools.wraps(function)
        def decorated(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return cast(F, decorated)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The autocast state of a thread at one moment."""

    contexts: tuple[tuple[str, torch.dtype, bool, bool, PolicyTable | None], ...]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Enter the same state again, as a new nested context."""
        with ExitStack() as stack:
            for device, dtype, enabled, cache, table in self.contexts:
                stack.enter_context(autocast(device, dtype, enabled, cache, table=table))
            yield

    def disabled(self) -> AbstractContextManager[None]:
        """Enter the same state with autocast disabled for these devices."""
        contexts = ((d, dtype, False, cache, table) for d, dtype, _, cache, table in self.contexts)
        return Snapshot(tuple(contexts)).restored()


def snapshot(*devices: str) -> Snapshot:
    """Return the state of these devices, and of the CPU."""
    s = here()
    return Snapshot(
        tuple(
            (d, s.dtype(d), s.enabled.get(d, False), s.cache_enabled, s.tables.get(d))
            for d in dict.fromkeys((*devices, "cpu"))
        )
    )


def state() -> tuple[object, ...]:
    """Return the whole state of this thread, comparable: for the check that it is restored."""
    s = here()
    return (
        tuple(sorted((d, on) for d, on in s.enabled.items() if on)),
        tuple(sorted((d, str(t)) for d, t in s.dtypes.items())),
        s.cache_enabled,
        s.nesting,
        dispatch.is_on(),
        cache.size(),
    )


def reset() -> None:
    """Put the state of this thread back to that of a fresh one, and clear the cache."""
    s = here()
    s.enabled.clear()
    s.dtypes.clear()
    s.tables.clear()
    for _ in range(s.nesting):
        _queries.leave()
    s.cache_enabled, s.nesting, s.resets = True, 0, s.resets + 1
    dispatch.switch(on=False)
    cache.clear_cache()
