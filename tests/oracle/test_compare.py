"""The comparison names each kind of difference, exactly, and nothing else."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import pytest
import torch

from amp_fuzz.backends.harness import Observation, Raised
from amp_fuzz.oracle import Divergence, compare, describe

NAN, INF = math.nan, math.inf
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def kind(want: torch.Tensor | None, got: torch.Tensor | None, label: str = "v0") -> str | None:
    """Return the kind of divergence between two values at a label."""
    found = compare(Observation(values={label: want}), Observation(values={label: got}))
    return None if found is None else found.kind


def one(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def payload(bits: int) -> torch.Tensor:
    """Return a float32 NaN of these bits."""
    return torch.frombuffer(bytearray(struct.pack("<I", bits)), dtype=torch.float32)


# -- equal ---------------------------------------------------------------------------------------

SAME: dict[str, Callable[[], torch.Tensor]] = {
    "0-d": lambda: torch.tensor(1.5),
    "0-d bool": lambda: torch.tensor(True),
    "empty": lambda: torch.empty(0, 3),
    "int64": lambda: torch.arange(4),
    "uint8": lambda: torch.arange(4, dtype=torch.uint8),
    "bool": lambda: torch.tensor([True, False]),
    "complex64": lambda: torch.tensor([1 + 2j, complex(NAN, INF)]),
    "complex128, conjugated": lambda: torch.tensor([1 + 2j], dtype=torch.complex128).conj(),
    "NaN": lambda: one(NAN, 1.0),
    "infinities": lambda: one(INF, -INF),
    "zeros of both signs": lambda: one(0.0, -0.0),
    "not contiguous": lambda: torch.arange(6.0).reshape(2, 3).t(),
}


@pytest.mark.parametrize("name", SAME)
def test_a_value_equals_itself(name: str) -> None:
    assert kind(SAME[name](), SAME[name]()) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_equals_nan_in_each_dtype(dtype: torch.dtype) -> None:
    assert kind(one(NAN, dtype=dtype), one(-NAN, dtype=dtype)) is None


def test_the_payload_of_a_nan_is_the_librarys_choice() -> None:
    assert kind(payload(0x7FC00000), payload(0xFFC00001)) is None
    assert kind(payload(0x7FC00000), payload(0x7F800001)) is None


def test_strides_are_no_difference() -> None:
    a = torch.arange(6.0).reshape(2, 3)
    assert kind(a, a.t().contiguous().t()) is None


def test_missing_on_both_sides_agrees() -> None:
    assert kind(None, None, "w0.grad") is None


# -- different -----------------------------------------------------------------------------------

DIFFERENT: dict[str, tuple[torch.Tensor | None, torch.Tensor | None, str]] = {
    "last bit": (one(1.0), one(1.0 + 2**-23), "bitwise"),
    "last bit of bfloat16": (
        one(1.0, dtype=torch.bfloat16),
        one(1.0 + 2**-7, dtype=torch.bfloat16),
        "bitwise",
    ),
    "sign of zero": (one(0.0), one(-0.0), "bitwise"),
    "sign of zero, 0-d": (torch.tensor(0.0), torch.tensor(-0.0), "bitwise"),
    "subnormal for zero": (one(5e-45), one(0.0), "bitwise"),
    "bool": (torch.tensor([True]), torch.tensor([False]), "bitwise"),
    "int64": (torch.tensor([2**53]), torch.tensor([2**53 + 1]), "bitwise"),
    "complex": (torch.tensor([1 + 2j]), torch.tensor([1 + 3j]), "bitwise"),
    "complex, sign of zero": (
        torch.tensor([complex(1, 0.0)]),
        torch.tensor([complex(1, -0.0)]),
        "bitwise",
    ),
    "NaN for a number": (one(1.0, 2.0), one(1.0, NAN), "nonfinite"),
    "a number for NaN": (one(NAN), one(1.0), "nonfinite"),
    "infinity for a number": (one(3e38), one(INF), "nonfinite"),
    "sign of infinity": (one(INF), one(-INF), "nonfinite"),
    "NaN for infinity": (one(INF), one(NAN), "nonfinite"),
    "NaN elsewhere": (one(NAN, 1.0), one(1.0, NAN), "nonfinite"),
    "NaN in an imaginary part": (
        torch.tensor([1 + 2j]),
        torch.tensor([complex(1, NAN)]),
        "nonfinite",
    ),
    "dtype": (one(1.0), one(1.0, dtype=torch.bfloat16), "dtype"),
    "two 16-bit dtypes": (
        one(1.0, dtype=torch.float16),
        one(1.0, dtype=torch.bfloat16),
        "dtype",
    ),
    "shape": (torch.ones(2, 3), torch.ones(3, 2), "shape"),
    "shape of empties": (torch.ones(0, 3), torch.ones(3, 0), "shape"),
    "0-d for 1-d": (torch.tensor(1.0), torch.tensor([1.0]), "shape"),
    "nothing": (torch.tensor(1.0), None, "shape"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_difference_has_its_kind(name: str) -> None:
    want, got, expected = DIFFERENT[name]
    assert kind(want, got) == expected


@pytest.mark.parametrize(
    ("want", "got", "expected"),
    [
        (None, torch.zeros(2), "grad-missing"),  # None and zeros are not the same to an optimiser
        (torch.zeros(2), None, "grad-missing"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16), "grad-dtype"),
        (torch.zeros(2), torch.zeros(1), "grad-shape"),
        (one(1.0), one(2.0), "grad-bitwise"),
        (one(1.0), one(INF), "grad-nonfinite"),
        (one(0.0), one(-0.0), "grad-bitwise"),
    ],
)
def test_a_gradient_has_kinds_of_its_own(
    want: torch.Tensor | None, got: torch.Tensor | None, expected: str
) -> None:
    assert kind(want, got, "step0.again.w1.grad") == expected


def test_the_message_holds_both_values_the_place_and_how_many() -> None:
    want, got = torch.zeros(2, 3), torch.zeros(2, 3)
    got[1, 1:] = 2.0
    found = compare(Observation(values={"v0": want}), Observation(values={"v0": got}))
    assert found == Divergence(
        "bitwise",
        "v0",
        "0.0 at [1, 1], 2 of 6 differ, float32",
        "2.0 at [1, 1], 2 of 6 differ, float32",
    )


def test_equal_nans_are_not_counted_as_differences() -> None:
    found = compare(
        Observation(values={"v0": torch.cat([payload(0x7FC00000), one(1.0)])}),
        Observation(values={"v0": torch.cat([payload(0xFFC00001), one(2.0)])}),
    )
    assert found is not None
    assert found.expected == "1.0 at [1], 1 of 2 differ, float32"


def test_a_value_is_described_by_its_type() -> None:
    assert describe(torch.ones(2, 3, dtype=torch.bfloat16)) == "bfloat16[2, 3]"
    assert describe(None) == "None"


# -- values that do not exist --------------------------------------------------------------------


def test_without_values_only_types_are_compared() -> None:
    def types(want: torch.Tensor, got: torch.Tensor) -> Divergence | None:
        sides = (Observation(values={"v0": t}) for t in (want, got))
        return compare(*sides, values=False)

    assert types(one(1.0), one(NAN)) is None
    assert types(torch.empty(2, device="meta"), torch.empty(2, device="meta")) is None
    found = types(torch.empty(2, device="meta"), torch.empty(3, device="meta"))
    assert found is not None
    assert found.kind == "shape"


# -- order, errors, state ------------------------------------------------------------------------


def raised(error: str, line: int = 3, message: str = "no") -> Raised:
    return Raised(error, message, line, f"v{line} = torch.mm(x0, x0)")


def test_the_first_difference_in_the_order_of_execution_counts() -> None:
    want = Observation(values={"v0": one(1.0), "v1": one(1.0)}, raised=raised("RuntimeError"))
    got = Observation(values={"v0": one(1.0), "v1": one(2.0)})
    found = compare(want, got)
    assert found is not None
    assert (found.kind, found.where) == ("bitwise", "v1")


def test_the_same_error_at_the_same_line_agrees_whatever_its_text() -> None:
    assert compare(
        Observation(raised=raised("RuntimeError", message="one thing")),
        Observation(raised=raised("RuntimeError", message="another")),
    ) is None  # fmt: skip


@pytest.mark.parametrize(
    ("want", "got"),
    [
        (None, raised("RuntimeError")),
        (raised("RuntimeError"), None),
        (raised("RuntimeError"), raised("TypeError")),
        (raised("RuntimeError", 3), raised("RuntimeError", 4)),
    ],
)
def test_another_error_is_a_divergence(want: Raised | None, got: Raised | None) -> None:
    found = compare(Observation(raised=want), Observation(raised=got))
    assert found is not None
    assert found.kind == "raise"
    assert found.where == (got or want).text  # type: ignore[union-attr]
    assert {"no error", "RuntimeError: no", "TypeError: no"} >= {found.expected, found.observed}


def test_an_error_before_a_value_is_a_divergence_of_the_error() -> None:
    found = compare(Observation(values={"v0": one(1.0)}), Observation(raised=raised("TypeError")))
    assert found is not None
    assert found.kind == "raise"


def test_only_the_first_line_of_an_error_is_shown() -> None:
    got = Observation(raised=raised("RuntimeError", message="first\nsecond"))
    found = compare(Observation(), got)
    assert found is not None
    assert found.observed == "RuntimeError: first"


def test_state_left_behind_is_a_divergence_only_if_the_backend_alone_left_it() -> None:
    clean, leaky = Observation(), Observation(leaked="(False,) became (True,)")
    found = compare(clean, leaky)
    assert found is not None
    assert (found.kind, found.observed) == ("state", "(False,) became (True,)")
    assert compare(leaky, leaky) is None
    assert compare(leaky, clean) is None


@pytest.mark.parametrize(
    ("gradient", "kind"), [([0.0, -0.0], None), ([0.0, 1e-45], "grad-missing")]
)
def test_a_compiler_may_answer_zeros_where_there_is_no_gradient(
    gradient: list[float], kind: str | None
) -> None:
    """AOTAutograd does so for what is used but has no part in the result; eager never does."""
    none, zeros = Observation(), Observation()
    none.values["w0.grad"], zeros.values["w0.grad"] = None, torch.tensor(gradient)
    inexact = compare(none, zeros, rounding=lambda label, want, got: None)
    assert (inexact.kind if inexact else None) == kind
    exact = compare(none, zeros)
    assert exact is not None
    assert exact.kind == "grad-missing"
