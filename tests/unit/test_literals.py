"""Values that a case holds itself: every bit survives, and nothing wrong is read."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch

from amp_fuzz.cases.case import Case, CaseError, loads
from amp_fuzz.cases.inputs import bits_text, tensor
from amp_fuzz.cases.literals import WIDTHS, bits_of, numbers
from amp_fuzz.cases.program import DTYPES, LAYOUTS, ProgramError, TensorSpec
from tests.helpers import call, case, eager, x


def held(t: torch.Tensor, **fields: object) -> TensorSpec:
    dtype = str(t.dtype).removeprefix("torch.")
    return TensorSpec("x0", tuple(t.shape), dtype, values=bits_text(t), **fields)  # type: ignore[arg-type]


def test_every_dtype_has_a_width() -> None:
    assert set(WIDTHS) == set(DTYPES)
    for name in DTYPES:
        assert WIDTHS[name] == getattr(torch, name).itemsize


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_dtype_comes_back_bit_for_bit(dtype: str) -> None:
    wide = torch.tensor([[0.0, 1.0, 3.0], [2.0, 5.0, 1.0]], dtype=torch.float64)
    values = wide.to(getattr(torch, dtype))
    if values.is_complex():
        values = values * (1 - 2j)
    assert torch.equal(tensor(held(values), 0), values)
    assert numbers(bits_text(values), dtype) == values.reshape(-1).tolist()
    assert bits_of(values.reshape(-1).tolist(), dtype) == bits_text(values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_nan_and_infinities_survive_a_round_trip(dtype: torch.dtype) -> None:
    odd = torch.tensor([math.nan, math.inf, -math.inf, -0.0], dtype=dtype)
    back = tensor(held(odd), 0)
    assert bits_text(back) == bits_text(odd)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_holds_the_same_elements(layout: str) -> None:
    values = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(tensor(held(values, layout=layout), 0), values)
    assert bits_text(tensor(held(values, layout=layout), 0)) == bits_text(values)


def test_a_number_is_never_rounded() -> None:
    with pytest.raises(ValueError, match="bfloat16 has no"):
        bits_of([1.001], "bfloat16")
    with pytest.raises(ValueError, match="uint8 lacks"):
        bits_of([256], "uint8")


HELD = case([held(torch.tensor([1.5, -2.0]))], call("abs", "x0"), backward="none")


def test_a_case_runs_on_what_it_holds_whatever_the_seed() -> None:
    for seed in (0, 7):
        seen = eager().run([msgspec.structs.replace(HELD, seed=seed)])[0]
        value = seen.values["v0"]
        assert value is not None
        assert value.tolist() == [1.5, 2.0]


def test_a_case_that_holds_values_is_read_back() -> None:
    assert loads(HELD.json()) == HELD
    assert "float32[2] [1.5, -2.0]" in str(HELD)


def test_a_case_without_values_has_the_id_that_it_had() -> None:
    plain = case([x("x0", 2)], call("abs", "x0"))
    assert b"values" not in plain.json()
    assert loads(plain.json()).id == plain.id
    # As version 0.1's first cases had it, before inputs could hold values.
    assert plain.id == "411aadbf22e1cba9"


@pytest.mark.parametrize(
    ("dtype", "values", "message"),
    [
        ("float32", "3f80", "has 4 hex digits: 2 elements of float32 need 16"),
        ("float16", "3c003c0G", "is not hex"),
        ("float16", "3C003C00", "is not hex"),
        ("bool", "0002", "neither 00 nor 01"),
    ],
)
def test_wrong_values_are_refused(dtype: str, values: str, message: str) -> None:
    spec = TensorSpec("x0", (2,), dtype, values=values)
    wrong = case([spec], call("abs", "x0"))
    with pytest.raises(ProgramError, match=rf"\$\.inputs\[0\]\.values .*{message}"):
        wrong.program.check()
    with pytest.raises(CaseError, match=r"inputs\[0\]\.values"):
        loads(Case(wrong.program).json())
