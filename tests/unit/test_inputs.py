"""Input values: the same bits for ever, and truly what their domain promises."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from amp_fuzz.backends.harness import bits
from amp_fuzz.cases import inputs
from amp_fuzz.cases.inputs import array, strides, tensor
from amp_fuzz.cases.program import DTYPES, FLOAT_DTYPES, LAYOUTS, TensorSpec
from tests.helpers import x

# Of input x0 under seed 5: shape [3], but [2, 2] for psd and bound 7 for index. A case in an issue
# must show the same values years from now, so none of these may ever change.
BITS = {
    ("normal", "float16"): "ac0f 3b5f bd67",
    ("normal", "bfloat16"): "bd82 3f6c bfad",
    ("normal", "float32"): "bd81d64c 3f6be442 bface75b",
    ("normal", "float64"): "bfb03ac9779bf340 3fed7c884764cc50 bff59ceb5b2c9da0",
    ("normal", "complex64"): "bd81d64c 3dfec9f8 3f6be442 3e3e5881 bface75b 3c31d52c",
    ("normal", "complex128"): (
        "bfb03ac9779bf340 3fbfd93ef07acf00 3fed7c884764cc50 3fc7cb1021e38f40 "
        "bff59ceb5b2c9da0 3f863aa576408c00"
    ),
    ("normal", "int64"): "fffffffffffffffe 0000000000000002 ffffffffffffffff",
    ("normal", "int32"): "fffffffe 00000002 ffffffff",
    ("normal", "uint8"): "01 02 03",
    ("normal", "bool"): "01 00 00",
    ("uniform", "float16"): "bf53 38f6 2aee",
    ("uniform", "bfloat16"): "bfea 3f1f 3d5e",
    ("uniform", "float32"): "bfea6770 3f1eb05f 3d5db5b5",
    ("uniform", "float64"): "bffd4cedf0051bac 3fe3d60bee3d3540 3fabb6b6a3e3f9c0",
    ("integers", "float16"): "c000 4000 bc00",
    ("integers", "bfloat16"): "c000 4000 bf80",
    ("integers", "float32"): "c0000000 40000000 bf800000",
    ("integers", "float64"): "c000000000000000 4000000000000000 bff0000000000000",
    ("positive", "float16"): "3688 416a 405a",
    ("positive", "bfloat16"): "3ed1 402d 400b",
    ("positive", "float32"): "3ed0fc1e 402d3156 400b3f69",
    ("positive", "float64"): "3fda1f83bbecd83b 4005a62acbd6587b 400167ed2ce696e8",
    ("positive", "int64"): "0000000000000003 0000000000000003 0000000000000001",
    ("positive", "int32"): "00000003 00000003 00000001",
    ("positive", "uint8"): "03 03 01",
    ("unit", "float16"): "2966 393d 381c",
    ("unit", "bfloat16"): "3d2d 3f28 3f03",
    ("unit", "float32"): "3d2cc484 3f27ac18 3f0376d7",
    ("unit", "float64"): "3fa598907fd722a0 3fe4f582fb8f4d50 3fe06edada8f8fe7",
    ("overflow", "float16"): "db53 54f5 46ed",
    ("overflow", "bfloat16"): "df6a 5e9e 5cdd",
    ("overflow", "float32"): "df6a676f 5e9eb05f 5cddb5b5",
    ("overflow", "float64"): "df11e6f8f0bf14cd 5ef83d3e627efb24 5ec0eec794cc7214",
    ("subnormal", "float16"): "8753 027b 0037",
    ("subnormal", "bfloat16"): "80ea 004f 0007",
    ("subnormal", "float32"): "80ea6770 004f5830 0006edae",
    ("subnormal", "float64"): "801d4cedf0051bac 0009eb05f71e9aa0 0000ddb5b51f1fce",
    ("ties", "float16"): "3d74 bd54 3d64",
    ("ties", "bfloat16"): "3fae bfaa 3fac",
    ("ties", "float32"): "3fa08000 bfebf000 3fc31000",
    ("ties", "float64"): "3ff4100000000000 bffd7e0000000000 3ff8620000000000",
    ("cancelling", "float16"): "3817 475f b80f",
    ("cancelling", "bfloat16"): "3f03 40ec bf02",
    ("cancelling", "float32"): "3f02d9f8 40ebe442 bf01d64c",
    ("cancelling", "float64"): "3fe05b3f0a8b2b26 401d7c884764cc50 bfe03ac9779bf340",
    ("zeros", "float16"): "8000 0000 0000",
    ("zeros", "bfloat16"): "8000 0000 0000",
    ("zeros", "float32"): "80000000 00000000 00000000",
    ("zeros", "float64"): "8000000000000000 0000000000000000 0000000000000000",
    ("zeros", "int64"): "0000000000000000 0000000000000000 0000000000000000",
    ("zeros", "int32"): "00000000 00000000 00000000",
    ("zeros", "uint8"): "00 00 00",
    ("index", "int64"): "0000000000000005 0000000000000001 0000000000000006",
    ("index", "int32"): "00000005 00000001 00000006",
    ("index", "uint8"): "05 01 06",
    ("psd", "float16"): "4200 bc00 bc00 4700",
    ("psd", "bfloat16"): "4040 bf80 bf80 40e0",
    ("psd", "float32"): "40400000 bf800000 bf800000 40e00000",
    ("psd", "float64"): "4008000000000000 bff0000000000000 bff0000000000000 401c000000000000",
}


def hex_bits(t: torch.Tensor) -> str:
    """Return the bits of each element (of each part, if complex), in order."""
    width = t.element_size() * (1 if t.is_complex() else 2)
    mask = (1 << 4 * width) - 1
    return " ".join(f"{int(v) & mask:0{width}x}" for v in bits(t).reshape(-1).tolist())


def values(domain: Any, dtype: str, *shape: int, seed: int = 5, **fields: Any) -> torch.Tensor:
    return tensor(x("x0", *shape, dtype=dtype, domain=domain, **fields), seed)


@pytest.mark.parametrize(("domain", "dtype"), BITS)
def test_values_never_change(domain: str, dtype: str) -> None:
    shape = (2, 2) if domain == "psd" else (3,)
    bound = 7 if domain == "index" else 0
    found = values(domain, dtype, *shape, bound=bound)
    assert hex_bits(found) == BITS[domain, dtype]


def test_values_depend_on_seed_and_name_and_on_nothing_else() -> None:
    first = values("normal", "float32", 8)
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002  (the global state that must not matter)
    assert torch.equal(values("normal", "float32", 8), first)
    assert not torch.equal(values("normal", "float32", 8, seed=6), first)
    assert not torch.equal(tensor(x("x1", 8), 5), first)


def test_a_tensor_is_fresh_each_time() -> None:
    values("normal", "float32", 3).zero_()
    assert values("normal", "float32", 3).abs().sum() > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 1, 3)])
def test_every_dtype_has_every_shape(dtype: str, shape: tuple[int, ...]) -> None:
    found = values("normal", dtype, *shape)
    assert tuple(found.shape) == shape
    assert found.dtype == getattr(torch, dtype)
    assert not found.requires_grad


# -- rounding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_a_value_is_rounded_to_nearest(dtype: str) -> None:
    spec = x("x0", 4096, dtype=dtype, domain="uniform")
    exact = array(spec, 5)
    got = tensor(spec, 5).double().numpy()
    step = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 0.0}[dtype]
    assert (np.abs(got - exact) <= step * np.maximum(np.abs(exact), 2.0**-14)).all()
    if dtype in ("float16", "float32"):
        assert (got == exact.astype(dtype).astype(np.float64)).all()


@pytest.mark.parametrize(("dtype", "mantissa"), [("float16", 10), ("bfloat16", 7)])
def test_a_value_next_to_a_tie_is_rounded_once(
    dtype: str, mantissa: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By way of float32, the next float64 above a tie would become the tie, and round down."""
    tie, up = 1.0 + 2.0 ** -(mantissa + 1), 1.0 + 2.0**-mantissa
    made = [tie, np.nextafter(tie, 2), np.nextafter(tie, 1), -np.nextafter(tie, 2), -0.0, 1e-60]
    monkeypatch.setattr(inputs, "array", lambda spec, seed: np.array(made))
    found = tensor(x("x0", 6, dtype=dtype), seed=987_654)
    assert found.tolist() == [1.0, up, 1.0, -up, 0.0, 0.0]
    assert torch.signbit(found).tolist() == [False, False, False, True, True, False]


# -- domains -------------------------------------------------------------------------------------


def ties(t: torch.Tensor, low: str) -> torch.Tensor:
    """Return which values lie exactly between two neighbours of a 16-bit dtype."""
    steps = (t.double().abs() - 1) * 2.0 ** {"bfloat16": 7, "float16": 10}[low]
    return steps - steps.floor() == 0.5


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_ties_are_ties_of_one_16_bit_dtype_or_the_other(dtype: str) -> None:
    found = values("ties", dtype, 256)
    bfloat16, float16 = ties(found, "bfloat16"), ties(found, "float16")
    assert (bfloat16 ^ float16).all()
    assert bfloat16.sum() > 64
    assert float16.sum() > 64
    assert (found > 0).any()
    assert (found < 0).any()


def test_ties_of_float16_are_ties_of_bfloat16() -> None:
    assert ties(values("ties", "float16", 256), "bfloat16").all()


def test_ties_are_rounded_to_even_and_half_of_them_up() -> None:
    found = values("ties", "float32", 256)
    for low in (torch.bfloat16, torch.float16):
        mine = found[ties(found, str(low).removeprefix("torch."))]
        up = mine.to(low).double().abs() > mine.double().abs()
        assert 0.25 < up.double().mean() < 0.75


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_overflow_is_near_the_largest_value_and_finite(dtype: str) -> None:
    found = values("overflow", dtype, 512)
    top = min(torch.finfo(found.dtype).max, 1e300)
    assert torch.isfinite(found).all()
    assert found.double().abs().max() > top / 8
    assert (found.double().abs() < top**0.5).any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_sums_of_overflow_values_overflow(dtype: str) -> None:
    found = values("overflow", dtype, 512)
    assert torch.isinf(found * 4).any()


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_subnormal_has_subnormals_and_the_normals_next_to_them(dtype: str) -> None:
    found = values("subnormal", dtype, 512)
    tiny = torch.finfo(found.dtype).tiny
    size = found.abs()
    assert ((size > 0) & (size < tiny)).sum() > 100
    assert (size >= tiny).any()
    assert (size <= 4 * tiny).all()


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_zeros_have_both_signs(dtype: str) -> None:
    found = values("zeros", dtype, 64)
    assert (found == 0).all()
    assert 0 < torch.signbit(found).sum() < 64


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_integers_are_small_and_exact(dtype: str) -> None:
    found = values("integers", dtype, 64)
    assert set(found.tolist()) <= set(map(float, range(-4, 5)))
    assert len(set(found.tolist())) == 9


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_cancelling_values_nearly_cancel(dtype: str) -> None:
    found = values("cancelling", dtype, 64).double()
    assert found.sum().abs() < found.abs().sum() / 64
    assert found.sum() != 0


def test_positive_unit_and_uniform_keep_their_bounds() -> None:
    positive, unit = values("positive", "float64", 256), values("unit", "float64", 256)
    uniform = values("uniform", "float64", 256)
    assert ((positive >= 0.25) & (positive < 4)).all()
    assert ((unit >= 0) & (unit < 1)).all()
    assert ((uniform >= -2) & (uniform < 2)).all()


def test_normal_is_nearly_normal() -> None:
    found = values("normal", "float64", 20_000)
    assert abs(found.mean().item()) < 0.03
    assert abs(found.std().item() - 1) < 0.03
    assert found.abs().max() < 6


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
def test_index_values_are_below_their_bound(dtype: str) -> None:
    found = values("index", dtype, 256, bound=7)
    assert set(found.tolist()) == set(range(7))


def test_psd_is_symmetric_positive_definite_and_exact() -> None:
    found = values("psd", "float64", 3, 5, 5)
    assert torch.equal(found, found.mT)
    assert torch.equal(found, found.round())
    assert (torch.linalg.eigvalsh(found) > 0).all()


def test_bool_is_both() -> None:
    assert set(values("normal", "bool", 64).tolist()) == {True, False}


def test_complex_parts_differ() -> None:
    found = values("normal", "complex64", 16)
    assert not torch.equal(found.real, found.imag)


# -- layouts -------------------------------------------------------------------------------------

LAYOUT_CASES = list(itertools.product(LAYOUTS, [(), (4,), (2, 3), (2, 1, 3), (0, 3)]))


@pytest.mark.parametrize(("layout", "shape"), LAYOUT_CASES)
def test_a_layout_changes_no_value(layout: Any, shape: tuple[int, ...]) -> None:
    plain = tensor(TensorSpec("x0", shape, "float32"), 5)
    laid = tensor(TensorSpec("x0", shape, "float32", layout=layout), 5)
    assert torch.equal(plain, laid)
    assert laid.shape == plain.shape


@pytest.mark.parametrize(("layout", "shape"), LAYOUT_CASES)
def test_strides_are_those_announced(layout: Any, shape: tuple[int, ...]) -> None:
    """Fake devices make their inputs from the announced strides alone."""
    spec = TensorSpec("x0", shape, "float32", layout=layout)
    if 0 not in shape:
        assert tensor(spec, 5).stride() == strides(spec)


def test_layouts_are_what_they_are_called() -> None:
    made = {name: values("normal", "float32", 2, 3, layout=name) for name in LAYOUTS}
    assert made["contiguous"].stride() == (3, 1)
    assert made["transposed"].stride() == (1, 2)
    assert made["strided"].stride() == (6, 2)
    assert made["offset"].stride() == (3, 1)
    assert made["offset"].storage_offset() == 3
    assert made["offset"]._is_view()
    assert [n for n, t in made.items() if t._is_view()] == ["offset"]
    assert [n for n, t in made.items() if t.is_contiguous()] == ["contiguous", "offset"]
