"""`check` says whether autocast is the reason for values that are not finite, and where."""

from __future__ import annotations

import torch
from torch import Tensor

import amp_fuzz
from amp_fuzz.records.schema import Note

weight = torch.full((8, 4), 0.25).requires_grad_()


def logarithm(x: Tensor) -> Tensor:
    y = x @ weight
    return torch.log(y + 1e-8)


def _notes(x: Tensor, dtype: torch.dtype) -> list[Note]:
    result = amp_fuzz.check(logarithm, x, autocast=dtype, backends="eager-cpu", isolate=False)
    (run,) = result.runs
    return [note for note in run.notes if note.kind == "not-finite"]


def test_a_value_that_is_finite_without_autocast_is_told_with_its_line() -> None:
    x = torch.ones(5, 8)
    x[0] = 0
    (note,) = _notes(x, torch.float16)
    assert note.where.startswith("test_not_finite.py:")
    assert "output is not finite" in note.message
    assert "1e-08 is 0 in float16" in note.message
    assert note.advice.startswith("Run test_not_finite.py:")


def test_finite_values_are_not_diagnosed() -> None:
    assert not _notes(torch.ones(5, 8), torch.float16)


def test_a_value_that_is_not_finite_without_autocast_either_is_no_note() -> None:
    assert not _notes(torch.full((5, 8), -1.0), torch.float16)


def test_where_nothing_is_finite_the_advice_is_what_to_exempt() -> None:
    result = amp_fuzz.check(
        logarithm, torch.zeros(5, 8), autocast=torch.float16, backends="eager-cpu", isolate=False
    )
    (run,) = result.runs
    assert run.status == "nothing"
    assert "is fine without" in run.detail
    assert run.advice.startswith("Run test_not_finite.py:")


def test_where_nothing_is_finite_without_autocast_either_other_inputs_are_asked_for() -> None:
    x = torch.full((5, 8), torch.nan)
    result = amp_fuzz.check(logarithm, x, backends="eager-cpu", isolate=False)
    (run,) = result.runs
    assert run.status == "nothing"
    assert "give inputs for which they are finite" in run.advice
