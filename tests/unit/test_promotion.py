"""The promotion rule of the catalogue is that of ``torch.result_type``."""

from __future__ import annotations

import itertools

import pytest
import torch

from amp_fuzz.cases.program import DTYPES
from amp_fuzz.catalogue.core import Value
from amp_fuzz.catalogue.promotion import floating, promote_types, result_type

SHAPES = ((2,), ())
NUMBERS = (True, 2, 0.5)
OPERANDS = [*(Value("x0", shape, dtype) for dtype in DTYPES for shape in SHAPES), *NUMBERS]


def made(operand: Value | bool | int | float) -> torch.Tensor | bool | int | float:
    if isinstance(operand, Value):
        return torch.ones(operand.shape, dtype=getattr(torch, operand.dtype))
    return operand


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("a", DTYPES)
@pytest.mark.parametrize("b", DTYPES)
def test_promote_types_is_torchs(a: str, b: str) -> None:
    assert promote_types(a, b) == name(torch.promote_types(getattr(torch, a), getattr(torch, b)))


def test_two_operands_promote_as_in_torch() -> None:
    for a, b in itertools.product(OPERANDS, OPERANDS):
        want = name(torch.result_type(made(a), made(b)))
        assert result_type(a, b) == want, (a, b)


def test_three_operands_promote_as_in_a_pointwise_op() -> None:
    # clamp has no kernel for complex numbers, nor for bool alone.
    tensors = [v for v in OPERANDS if isinstance(v, Value) and not v.dtype.startswith("complex")]
    for operands in itertools.product(tensors, repeat=3):
        if {v.dtype for v in operands} != {"bool"}:
            want = name(torch.clamp(*map(made, operands)).dtype)
            assert result_type(*operands) == want, operands


@pytest.mark.parametrize("dtype", DTYPES)
def test_floating_is_what_sqrt_computes_in(dtype: str) -> None:
    assert floating(dtype) == name(torch.ones(2, dtype=getattr(torch, dtype)).sqrt().dtype)


def test_no_operand_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        result_type()
