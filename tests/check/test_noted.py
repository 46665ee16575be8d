"""Notes of a check: facts beside its verdict, which they do not change."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import amp_fuzz
from tests.helpers import OTHERS

X = torch.randn(3, 3)


def product(x: Tensor) -> Tensor:
    return torch.tensordot(x @ x, x, dims=1)


def rounded(x: Tensor) -> Tensor:
    return (x @ x).exp()


def test_a_call_that_raises_under_autocast_alone_says_so_and_where_it_runs() -> None:
    result = amp_fuzz.check(product, X, backends="eager-cpu", store=None)
    assert not result.ok
    (note,) = result.notes
    assert (note.kind, note.device) == ("autocast-raises", OTHERS.replace(" ", ""))
    assert note.where.startswith("test_noted.py:")
    assert note.advice.startswith(f"Run {note.where} under autocast(enabled=False)")
    assert note.advice in " ".join(str(result).split())


def test_a_call_that_raises_without_autocast_too_has_no_note() -> None:
    result = amp_fuzz.check(lambda x: x @ x[:2], X, backends="eager-cpu", store=None)
    assert (result.ok, result.notes) == (False, ())


def test_an_output_whose_dtype_depends_on_the_device_is_noted_and_the_check_passes() -> None:
    result = amp_fuzz.check(rounded, X, backends=["eager-cpu", "fake-cuda"], store=None)
    assert result.ok
    (note,) = result.notes
    assert (note.kind, note.where) == ("portability", "output")
    assert note.message == f"bfloat16 on cpu; float32 on {OTHERS}"
    assert "note, portability" in str(result)


def test_an_honest_module_has_no_notes() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    assert amp_fuzz.check(model, X, backends="eager-cpu", store=None).notes == ()
    assert amp_fuzz.check(rounded, X, backends="eager-cpu", autocast=None, store=None).notes == ()
