"""With the defaults a compiler draws its own random numbers: their dtypes must be eager's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout

import amp_fuzz
from amp_fuzz.backends.determinism import DRAWN, EXACT, Trace

pytestmark = pytest.mark.thorough

TOLD, DEFAULT = "compile[inductor]", "compile[inductor+default]"
X = torch.randn(4, 4)


def half_dropped(x: Tensor) -> tuple[Tensor, Tensor]:
    product = x @ x.T
    return dropout(product, 0.5), product + 1


def normal(x: Tensor) -> Tensor:
    return torch.normal(x.bfloat16(), x.abs())


def test_numbers_that_the_compiler_draws_are_compared_by_dtype_and_shape() -> None:
    told, default = amp_fuzz.check(half_dropped, X, backends=[TOLD, DEFAULT], store=None).runs
    assert (told.status, told.share.lost) == ("agreed", 0)
    assert (default.status, default.share.lost) == ("agreed", 1)
    assert "(it draws random numbers of its own: their dtypes and shapes" in default.detail


def test_a_dtype_that_only_the_compilers_own_numbers_have_is_told() -> None:
    result = amp_fuzz.check(normal, X, backends=[TOLD, DEFAULT], store=None)
    assert [run.status for run in result.runs] == ["agreed", "backend"]
    (found,) = result.own
    assert (found.kind, found.expected, found.observed) == ("dtype", "bfloat16", "float32")


@pytest.mark.parametrize(("kernels", "varies"), [(DRAWN, {"a", "b"}), (EXACT, set())])
def test_a_trace_follows_what_was_drawn(kernels: object, varies: set[str]) -> None:
    assert isinstance(kernels, type(EXACT))
    trace = Trace(kernels)
    with trace:
        drawn = dropout(X, 0.5)
        kept = dropout(X, 0.0), dropout(X, 0.5, training=False)
        filled = torch.empty(4).bernoulli_()
    for label, value in {"a": drawn, "b": filled, "c": kept[0], "d": kept[1]}.items():
        trace.note(label, value)
    assert {*trace.spread} == varies
