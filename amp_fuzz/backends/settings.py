"""The settings of a plan, while its case runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, cast

import torch

from amp_fuzz.cases.settings import SETTINGS, Setting

__all__ = ["applied"]


@contextmanager
def applied(lines: Sequence[str]) -> Iterator[None]:
    """Apply settings during a block, then set what was there before."""
    with ExitStack() as stack:
        for line in lines:
            stack.enter_context(_applied(SETTINGS[line]))
        yield


@contextmanager
def _applied(setting: Setting) -> Iterator[None]:
    names: dict[str, Any] = {"torch": torch}
    own = _precisions()
    try:
        before = eval(setting.get, names)
    except RuntimeError:  # the user chose a `fp32_precision`: torch does not mix the two APIs
        before = setting.usual
    with _mutable():
        exec(setting.line, names)
    try:
        yield
    finally:
        with _mutable():
            exec(setting.put.format(repr(before)), names)
            for owner, precision in own:
                owner.fp32_precision = precision


def _mutable() -> AbstractContextManager[None]:
    """Allow changes of flags that `torch.backends.disable_global_flags` forbids elsewhere."""
    allow = getattr(torch.backends, "__allow_nonbracketed_mutation", nullcontext)
    return cast("AbstractContextManager[None]", allow())


def _precisions() -> list[tuple[Any, str]]:
    """Return what has a precision of float32, and this precision: since torch 2.9.

    The older settings set several of them, and not back to ``none``.
    """
    backends: Any = torch.backends
    parts = [(backends.cuda, "matmul"), (backends.mkldnn, "matmul")]
    parts += [(backends.cudnn, "conv"), (backends.cudnn, "rnn")]
    owners: list[Any] = [getattr(backend, name, None) for backend, name in parts]
    return [(o, o.fp32_precision) for o in owners if hasattr(o, "fp32_precision")]
