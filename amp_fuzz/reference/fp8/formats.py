"""Eight-bit and four-bit formats, and how a number is rounded to one.

A rounded value stays in float32, where every value of these formats is exact: nothing here depends
on a cast of torch. A cast of torch 2.13 saturates, one of torch 2.9 gives NaN beyond the range of
E4M3, and one of JAX does so today. `rounded` therefore says what happens there: it saturates.

Source of the formats: Micikevicius et al. 2022, "FP8 formats for deep learning",
https://arxiv.org/abs/2209.05433, and the "OCP Microscaling Formats (MX) Specification" v1.0,
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["E2M1", "E4M3", "E5M2", "FORMATS", "Format", "power_below", "power_up", "rounded"]


@dataclass(frozen=True, slots=True)
class Format:
    """A floating-point format: its bits of mantissa, smallest normal exponent, and largest value.

    dtype: torch's, or None where torch has none that it can cast to.
    """

    name: str
    mantissa: int
    lowest: int
    max: float
    dtype: torch.dtype | None


E4M3 = Format("E4M3", 3, -6, 448.0, torch.float8_e4m3fn)
E5M2 = Format("E5M2", 2, -14, 57344.0, torch.float8_e5m2)
E2M1 = Format("E2M1", 1, 0, 6.0, None)
FORMATS = {f.name: f for f in (E4M3, E5M2, E2M1)}


def rounded(x: torch.Tensor, to: Format) -> torch.Tensor:
    """Return the nearest values of a format, as float32, ties to even.

    Whatever lies beyond the largest value, infinities included, becomes that value with its sign:
    it saturates. NaN stays NaN, and a zero keeps its sign. (E5M2 has infinities. They are not used:
    Micikevicius et al. 2022, section 3.2, saturating mode.) Subnormal numbers are kept.
    """
    wide = x.double()
    _, above = torch.frexp(wide)  # x = f * 2**above with f in [1/2, 1)
    exponent = (above - 1).clamp(min=to.lowest) - to.mantissa
    step = torch.ldexp(torch.ones_like(wide), exponent)
    nearest = torch.where(wide.isfinite(), (wide / step).round() * step, wide)
    return nearest.clamp(-to.max, to.max).float()


def power_below(x: torch.Tensor) -> torch.Tensor:
    """Return the largest power of two that is not above a positive float32: its mantissa dropped.

    NaN, infinity and 0 stay what they are.
    """
    _, above = torch.frexp(x.double())
    power = torch.ldexp(torch.ones_like(x, dtype=torch.float64), above - 1)
    return torch.where(x.isfinite() & (x > 0), power, x.double()).float()


def power_up(x: torch.Tensor) -> torch.Tensor:
    """Return the smallest power of two of E8M0, 2**-127 to 2**127, that is not below a float32.

    0 becomes 2**-127, infinity 2**127, and NaN stays NaN, as E8M0 has no sign, no 0 and no
    infinity (MX specification, section 5.4.1).
    """
    fraction, above = torch.frexp(x.double())
    exponent = torch.where(fraction == 0.5, above - 1, above).clamp(-127, 127)
    power = torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent)
    power = torch.where(x == 0, 2.0**-127, power)
    power = torch.where(x == torch.inf, 2.0**127, power)
    return torch.where(x.isnan(), x.double(), power).float()
