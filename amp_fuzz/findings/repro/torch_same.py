"""The verdict of torch's own comparison, which PyTorch's form asks fuzzers for."""

from __future__ import annotations

import torch

__all__ = ["accepts"]


def accepts(
    expected: torch.Tensor | None, observed: torch.Tensor | None, exact: torch.Tensor | None
) -> bool | None:
    """Return what ``torch._dynamo.utils.same`` says of two values, with its default tolerances.

    exact: the float64 result, its ``fp64_ref``; None: `expected` is. None if a side has no value,
    or if it cannot compare them.
    """
    if expected is None or observed is None:
        return None
    import torch._dynamo.utils

    try:
        return bool(
            torch._dynamo.utils.same(
                expected, observed, fp64_ref=exact, log_error=lambda *_, **__: None
            )
        )
    except (AssertionError, RuntimeError, TypeError):
        return None
