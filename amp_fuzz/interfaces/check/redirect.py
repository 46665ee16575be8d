"""Replace ``torch.autocast`` by another implementation for a block, in its threads too.

Checked code may open its own contexts. Under the reference, and on a missing device, these must be
contexts of that implementation. Other modules hold the class itself, so its methods are replaced.
"""

from __future__ import annotations

import mmap
import sys
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._jit_internal import is_scripting
from torch.amp.autocast_mode import autocast

from amp_fuzz.patching import patched
from amp_fuzz.policies.tables import DEVICES

__all__ = ["contexts_of", "forget_warnings", "threads_following"]


@contextmanager
def contexts_of(implementation: Callable[..., Any], *, asked: bool) -> Iterator[None]:
    """Make every context of `torch.autocast` one of an implementation, in every thread.

    asked: use the settings that the code asked for, even if torch would disable the context for a
    missing device; otherwise use torch's settings. Contexts of devices without a table stay
    torch's.
    """
    init: Any = autocast.__init__
    enter: Any = autocast.__enter__
    leave: Any = autocast.__exit__
    inner: dict[int, list[Any]] = {}
    own = implementation if isinstance(implementation, type) else ()  # it may be one of torch's

    def __init__(self: Any, device_type: str, dtype: Any = None, enabled: bool = True,
                 cache_enabled: bool | None = None) -> None:  # fmt: skip
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            init(self, device_type, dtype, enabled, cache_enabled)
        for warning in said if not asked else ():
            _warn_once(warning)
        self._asked = (dtype, enabled, cache_enabled)

    def __enter__(self: Any) -> Any:
        if isinstance(self, own) or self.device not in DEVICES or is_scripting():
            return enter(self)
        options = (self.fast_dtype, self._enabled, self._cache_enabled)
        if asked:
            options = getattr(self, "_asked", options)
        context = implementation(self.device, *options)
        context.__enter__()
        inner.setdefault(id(self), []).append(context)
        return self

    def __exit__(self: Any, *error: Any) -> Any:
        if not inner.get(id(self)):
            return leave(self, *error)
        return inner[id(self)].pop().__exit__(*error)

    changed: dict[str, Any] = {"__init__": __init__, "__enter__": __enter__, "__exit__": __exit__}
    with ExitStack() as stack:
        for name, method in changed.items():
            stack.enter_context(patched(autocast, name, method))
        yield


# Forks share it: a warning that one of them gave is not given again.
_warned = mmap.mmap(-1, 256)
_NOT_THEIRS = tuple(f"{folder}/" for folder in (Path(__file__).parents[2], *torch.__path__))


def forget_warnings() -> None:
    """Let each warning of torch's contexts be given once more."""
    _warned[:] = bytes(len(_warned))


def _warn_once(warning: warnings.WarningMessage) -> None:
    """Give a warning at the innermost line that is neither torch's nor ours, the first time."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THEIRS):
        frame = frame.f_back
    place = zlib.crc32(str(warning.message).encode()) % len(_warned)
    if frame is not None and not _warned[place]:
        _warned[place] = 1
        filename, line = frame.f_code.co_filename, frame.f_lineno
        with warnings.catch_warnings():
            warnings.simplefilter("default")  # the harness ignores those of checked code
            warnings.warn_explicit(str(warning.message), warning.category, filename, line)


@contextmanager
def threads_following(follow: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Have the threads that checked code starts follow its run: see `Runtime.follow`.

    A pool keeps its threads, maybe from one run to the next: there each task follows its own run.
    """
    start, submit, pools = threading.Thread.start, ThreadPoolExecutor.submit, threading.local()

    def started(self: threading.Thread) -> None:
        if not getattr(pools, "submitting", False):
            self.run = follow(self.run)  # type: ignore[method-assign]
        start(self)

    def submitted(self: Any, task: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        pools.submitting = True
        try:
            return submit(self, follow(task), *args, **kwargs)
        finally:
            pools.submitting = False

    with (
        patched(threading.Thread, "start", started),
        patched(ThreadPoolExecutor, "submit", submitted),
    ):
        yield
