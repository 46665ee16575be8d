"""Parts that several examples of torchax's bugs share."""

from __future__ import annotations

from amp_fuzz.cases.build import call, x
from amp_fuzz.cases.program import Statement, TensorSpec

__all__ = ["GRU_INPUTS", "gru"]

GRU_INPUTS: list[TensorSpec] = [x("x0", 8, 2, 3), x("w1", 9, 3), x("w2", 9, 3)]
"""The input and the weights of a one-layer GRU module."""


def gru(*, first: bool = False, to: str = "v0 v1", given: str = "x0") -> Statement:
    """Return a call of a one-layer GRU module. first: its `batch_first`."""
    return call(
        "gru",
        given,
        form="module",
        inputs=3,
        hidden=3,
        layers=1,
        bias=False,
        first=first,
        bidirectional=False,
        names=["weight_ih_l0", "weight_hh_l0"],
        weights=["w1", "w2"],
        state=None,
        to=to,
    )
