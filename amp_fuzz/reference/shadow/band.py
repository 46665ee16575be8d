"""The band of a value: what rounding can make of it, and how far another value is from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["THRESHOLD", "UNIT_ROUNDOFF", "Band", "Distance", "distance", "fewness", "leans", "unit"]

UNIT_ROUNDOFF: dict[torch.dtype, float] = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
    torch.complex32: 2.0**-11,
    torch.complex64: 2.0**-24,
    torch.complex128: 2.0**-53,
}


REAL: dict[torch.dtype, torch.dtype] = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


THRESHOLD = 4.0
"""How many units a value may be off: see `amp_fuzz.oracle.rounding`."""


@dataclass(frozen=True, slots=True)
class Band:
    """What rounding can make of one tensor.

    nominal: the value itself, in its own dtype. clean: float64 (complex128; the dtype itself for
    integers and bool), same shape. samples: ``[K, *shape]``, the perturbed copies. known: False
    where an op could not be followed, so that nothing can be said. left: the ops before it whose
    results their dtype could not hold; an implementation that keeps float32 in between may.
    """

    nominal: torch.Tensor
    clean: torch.Tensor
    samples: torch.Tensor
    known: bool
    left: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a value is from a band.

    excess: the largest distance of an element from the clean value, in units of what rounding
    explains there. bias: the mean signed distance over the tensor, in units of what the samples
    have. index: the worst element; expected, observed, scale: the clean value there, the value, and
    one unit.
    """

    excess: float
    bias: float
    index: tuple[int, ...] = ()
    expected: float = 0.0
    observed: float = 0.0
    scale: float = 0.0


def _bias(own: torch.Tensor, theirs: torch.Tensor, sign: Any, few: float) -> float:
    """Return the mean of the distances, each times a sign, in units of what the samples come to.

    Distances that have the sign of what they are added to are a gain.
    """
    lean = (theirs * sign).mean(1).abs().amax()
    return float((own * sign).mean().abs() / (lean + few))


def fewness(clean: torch.Tensor) -> float:
    """Return how large a mean over such elements is of itself, beside one of them.

    One over the square root of their number, where they differ; a kernel rounds equal elements
    alike, so these are as one (Kish's effective sample size).
    """
    _, counts = torch.unique(clean, return_counts=True)
    return float((counts / clean.numel()).square().sum().sqrt())


def unit(band: Band, *, own: bool = True) -> torch.Tensor:
    """Return what rounding explains of each element, as `distance` counts it.

    Same shape as the band, float64; complex tensors as pairs. own: with what the nominal value is
    off by.
    """
    clean, samples, nominal = band.clean, band.samples, band.nominal.to(band.clean.dtype)
    if clean.is_complex():
        clean, samples = torch.view_as_real(clean), torch.view_as_real(samples)
        nominal = torch.view_as_real(nominal)
    limits = torch.finfo(REAL.get(band.nominal.dtype, band.nominal.dtype))
    u = UNIT_ROUNDOFF[band.nominal.dtype]
    spread = (samples - clean).abs().amax(0)
    finite = torch.isfinite(clean) & torch.isfinite(spread)
    floor = 0.1 * _usual(spread[finite])
    # Among float64's subnormal numbers u of one is nothing: the smallest number is their unit.
    least = (u * clean.abs().clamp(min=limits.tiny)).clamp(min=math.ulp(0.0))
    scale = spread.clamp(min=floor) + least
    if own:
        off = (nominal - clean).abs()
        scale = scale + torch.where(torch.isfinite(off), off, 0.0)
    return scale


def _usual(spread: torch.Tensor) -> float:
    """Return what the samples of an element usually spread by, for those whose samples agree.

    The mean, or the median of those that spread at all, whichever is less: one large element would
    be a licence for all small ones beside it, and a few that spread at all for many that are known,
    such as the zeros of a mask, or the gradients of rows that nothing looked up.
    """
    some = spread[spread > 0]
    return float(torch.minimum(spread.mean(), some.median())) if some.numel() else 0.0


def leans(band: Band) -> tuple[float, float]:
    """Return what `distance` divides a bias by, without and with the sign of the clean value."""
    clean, samples = band.clean, band.samples
    if clean.is_complex():
        clean, samples = torch.view_as_real(clean), torch.view_as_real(samples)
    off = samples - clean
    finite = torch.isfinite(clean) & torch.isfinite(off).all(0)
    theirs = torch.where(finite & (off != 0), off / unit(band), 0.0).reshape(len(off), -1)
    plain, signed = theirs.mean(1), (theirs * clean.sign().flatten()).mean(1)
    return float(plain.abs().amax()), float(signed.abs().amax())


def distance(band: Band, value: torch.Tensor, among: torch.Tensor | None = None) -> Distance:
    """Return how far a value is from a band; both of one dtype and shape.

    among: bool, of that shape (complex numbers as pairs): the elements that are looked at.

    What the nominal value is off by is allowed to others too: some kernels are not backward stable
    (gelu far from 0, interpolation), and no other implementation need be better than torch's own.
    `Band.nominal` itself is measured without that allowance.

    Elements whose clean value or whose samples are not finite have no distance: `oracle` compares
    these exactly. A value that is not finite where these and the nominal value are is infinitely
    far. Where the band is not known, excess and bias are nan.

    Raises:
        ValueError: another dtype or shape than the band's.
    """
    if (value.dtype, value.shape) != (band.nominal.dtype, band.nominal.shape):
        raise ValueError(
            f"value is {value.dtype}{list(value.shape)}, the band of "
            f"{band.nominal.dtype}{list(band.nominal.shape)}"
        )
    if not band.known:
        return Distance(float("nan"), float("nan"))
    if not value.numel():
        return Distance(0.0, 0.0)
    clean, samples, given = band.clean, band.samples, value
    value = value.detach().to(clean.dtype)
    if band.nominal.dtype not in UNIT_ROUNDOFF:
        # Integers and bool: one of the values that the samples came to, or torch itself.
        unlike = (value != clean) & (samples != value).all(0)
        if band.nominal is not given:
            unlike &= value != band.nominal
        if among is not None:
            unlike &= among
        if not unlike.any():
            return Distance(0.0, 0.0)
        index = tuple(int(i) for i in torch.nonzero(unlike)[0])
        return Distance(float("inf"), 0.0, index, float(clean[index]), float(value[index]), 0.0)
    if clean.is_complex():
        clean, samples = torch.view_as_real(clean), torch.view_as_real(samples)
        value = torch.view_as_real(value)
    nominal = band.nominal.detach().to(band.clean.dtype)
    nominal = torch.view_as_real(nominal) if nominal.is_complex() else nominal
    off = samples - clean
    finite = torch.isfinite(clean) & torch.isfinite(off).all(0)
    if among is not None:
        finite &= among
    lost = finite & torch.isfinite(nominal) & ~torch.isfinite(value)
    if lost.any():
        where = tuple(int(i) for i in torch.nonzero(lost)[0])
        return Distance(float("inf"), 0.0, where, float(clean[where]), float(value[where]))
    finite &= torch.isfinite(value)
    if not finite.any():
        return Distance(0.0, 0.0)
    scale = unit(band, own=band.nominal is not given)
    away = torch.where(finite & (value != clean), (value - clean) / scale, 0.0)
    worst = int(away.abs().argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), away.shape))
    theirs = torch.where(finite & (off != 0), off / scale, 0.0).reshape(len(off), -1)
    few, signs = fewness(clean), (1.0, clean.sign().flatten())
    bias = max(_bias(away.flatten(), theirs, sign, few) for sign in signs)
    return Distance(
        float(away.abs().max()),
        bias,
        index,
        float(clean[index]),
        float(value[index]),
        float(scale[index]),
    )
