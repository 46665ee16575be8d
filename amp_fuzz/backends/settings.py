"""The settings of a plan, while its case runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, cast

import torch

from amp_fuzz.cases.settings import SETTINGS, Setting

__all__ = ["applied", "current"]


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


# What else changes numbers: plans do not set TF32 of products by this name, and the others have a
# field of their own or none.
_MORE = (
    "torch.backends.cuda.matmul.allow_tf32",
    "torch.backends.cudnn.benchmark",
    "torch.backends.cudnn.deterministic",
    "torch.are_deterministic_algorithms_enabled()",
)


def current() -> dict[str, str]:
    """Return what torch's settings are now: the expression that reads each, and its value.

    An expression that this torch lacks is left out. Where the user chose a `fp32_precision`, torch
    refuses to say the older setting of the same; the precisions then stand in its place.
    """
    names: dict[str, Any] = {"torch": torch}
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for expression in sorted({*_MORE, *(setting.get for setting in SETTINGS.values())}):
            try:
                found[expression] = str(eval(expression, names))
            except AttributeError:
                continue
            except RuntimeError:
                precisions = ", ".join(sorted({precision for _, precision in _precisions()}))
                found[expression] = f"fp32_precision: {precisions}"
    return found


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
