"""Where an excess arises, and what kind it is: experiments on one call of a kernel.

`Traced` follows a computation as `Shadow` does and keeps, for each kernel whose own result goes
over the threshold, the call's inputs. `probe` runs that call alone:

- alone: on its inputs as they are, with many samples. Under the threshold, the kernel is honest
  and what came in is the cause: several roundings together, or too few samples.
- in float32: on 16-bit inputs held in float32, the result rounded once. Under the threshold, the
  kernel computes in its 16-bit dtype.
- own dtype: with inputs perturbed by the 16-bit dtype's own roundoff instead of float32's. Under
  the threshold, the kernel is backward stable in its 16-bit dtype.
- scaled: with floating inputs scaled by a power of 2 to a largest of about 1. Under the threshold,
  an intermediate left the range of the dtype, or was subnormal.
- magnitudes: of absolute values. Under the threshold, only a sign or a phase differs.
- random input: normal random numbers in the place of all floating inputs, up to magnitudes. Under
  the threshold, it is the input that is special: degenerate, cancelling, or at a jump.
- numbers: with what the shadows take for exact among the numbers of the call off by up to 4 u of
  float32, too: each Python number that float32 does not hold, the scale of a resampling kernel (a
  quotient of two sizes), and a coordinate of a grid as the position made of it (``4 u (1 + |x|)``,
  for ``(x + 1) * size / 2`` rounds the sum). Under the threshold, the kernel is backward stable in
  them. Left out where there are none: with a scale of 2 each position is exact.
- of the largest: how far the worst element is off, in roundoffs of the tensor's largest element.
  Small, the error is one of a cancellation: as large as the largest element's own rounding.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from amp_fuzz.reference.shadow.band import UNIT_ROUNDOFF, Band, distance
from amp_fuzz.reference.shadow.call import Call
from amp_fuzz.reference.shadow.copies import no_modes, tensors_in
from amp_fuzz.reference.shadow.mode import Shadow
from amp_fuzz.reference.shadow.schemas import bound

THRESHOLD = 4.0
MANY = 64
LARGE = 100_000
PERTURBED = 4 * 2.0**-24  # what the shadows perturb a float32 input by
NARROW = (torch.bfloat16, torch.float16)


@dataclass
class Cause:
    """A result of a kernel that is over the threshold, though none of its inputs is."""

    kernel: str
    output: int
    dtype: str
    excess: float
    bias: float
    call: tuple[Any, Any, Any]
    worst: tuple[float, float, float]

    @property
    def size(self) -> float:
        return max(self.excess, self.bias)


class Traced(Shadow):
    """Shadows that note where an excess arises."""

    def __init__(self, samples: int = 8, seed: int = 0, threshold: float = THRESHOLD) -> None:
        super().__init__(samples, seed)
        self.threshold = threshold
        self.causes: list[Cause] = []
        self._over: dict[int, Any] = {}
        self._given: Any = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with no_modes():
            self._given = _copied((args, kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _follow(
        self,
        call: Call,
        before: Sequence[Any],
        out: Any,
        *,
        exact: torch.Tensor | None,
    ) -> None:
        inherited = any(t.untyped_storage()._cdata in self._over for t in call.tensors)
        super()._follow(call, before, out, exact=exact)
        for number, t in enumerate(call.written(tensors_in(out))):
            band = self.band(t)
            if not band.known or not t.numel():
                continue
            found = distance(band, band.nominal)
            if max(found.excess, found.bias) <= self.threshold:
                continue
            storage = t.untyped_storage()
            self._over[storage._cdata] = storage  # kept, so that its address is not used again
            if not inherited:
                cause = Cause(
                    str(call.func).removeprefix("aten."),
                    number,
                    str(t.dtype).removeprefix("torch."),
                    found.excess,
                    found.bias,
                    (call.func, *self._given),
                    (found.expected, found.observed, found.scale),
                )
                self.causes.append(cause)


class _Loose(Shadow):
    """Shadows that perturb 16-bit inputs by their own roundoff."""

    def _perturbed(
        self,
        copies: torch.Tensor,
        nominal: torch.Tensor,
        narrow: float = 0.0,
        rough: bool = False,
    ) -> torch.Tensor:
        if nominal.dtype not in NARROW:
            return super()._perturbed(copies, nominal, narrow, rough)
        u = UNIT_ROUNDOFF[nominal.dtype]
        return torch.cat([copies[:1], copies[1:] * (1 + 4 * u * self._noise(copies[1:]))])


class _Placed(Shadow):
    """Shadows that perturb a grid's coordinates as the positions made of them are rounded."""

    grid: torch.Tensor | None = None

    def _perturbed(
        self,
        copies: torch.Tensor,
        nominal: torch.Tensor,
        narrow: float = 0.0,
        rough: bool = False,
    ) -> torch.Tensor:
        if self.grid is None or nominal.data_ptr() != self.grid.data_ptr():
            return super()._perturbed(copies, nominal, narrow, rough)
        off = PERTURBED * (1 + copies[1:].abs()) * self._noise(copies[1:])
        return torch.cat([copies[:1], copies[1:] + off])


def probe(cause: Cause) -> dict[str, float]:
    """Return what the experiments give; an experiment that does not apply is left out."""
    func, args, kwargs = cause.call
    many = enough((args, kwargs))
    floating = [t for t in tensors_in((args, kwargs)) if t.is_floating_point() or t.is_complex()]
    band = _band(Shadow(many), func, args, kwargs, cause.output)
    found = {"alone": _excess(band)}
    if band.nominal.dtype in UNIT_ROUNDOFF:
        found["of the largest"] = _of_the_largest(band)
        found["magnitudes"] = _excess(_magnitudes(band))
    if band.nominal.dtype in NARROW or any(t.dtype in NARROW for t in floating):
        found["own dtype"] = _excess(_band(_Loose(many), func, args, kwargs, cause.output))
        wide = tree_map_only(torch.Tensor, _wide, (args, kwargs))
        result = _try(func, wide[0], wide[1], cause.output)
        if result is not None and result.shape == band.nominal.shape:
            value = result.to(band.nominal.dtype)
            found["in float32"] = _excess(replace(band, nominal=value))
    with contextlib.suppress(NoNumbers, RuntimeError):  # some kernels refuse other numbers
        found["numbers"] = _excess(_with_numbers(band, many, cause))
    largest = max(
        (float(t.abs().nan_to_num(0, 0, 0).max()) for t in floating if t.numel()), default=0
    )
    if largest:
        power = 2.0 ** -round(math.log2(largest))
        scaled = tree_map_only(torch.Tensor, lambda t: _scaled(t, power), (args, kwargs))
        with contextlib.suppress(Exception):  # some kernels refuse other values
            found["scaled"] = _excess(_band(Shadow(many), func, scaled[0], scaled[1], cause.output))
    generator = torch.Generator().manual_seed(0)
    other = tree_map_only(torch.Tensor, lambda t: _random(t, generator), (args, kwargs))
    with contextlib.suppress(Exception):
        band = _band(Shadow(many), func, other[0], other[1], cause.output)
        found["random input"] = min(_excess(band), _excess(_magnitudes(band)))
    return {k: float(f"{v:.3g}") for k, v in found.items()}


class NoNumbers(Exception):
    """A call has no number that could be off: it computes in float64, or they are all exact."""


def _with_numbers(band: Band, many: int, cause: Cause) -> Band:
    """Return the band of a call whose numbers are perturbed, too.

    Raises:
        NoNumbers: there are none.
    """
    func, args, kwargs = cause.call
    given = bound(func, args, kwargs)
    inexact, grid = _inexact(given), "grid" in given
    if any(t.dtype is torch.float64 for t in tensors_in(given)) or not (inexact or grid):
        raise NoNumbers(str(func))
    order = [a.name for a in func._schema.arguments if not a.kwarg_only]
    generator = torch.Generator().manual_seed(0)
    found = []
    # A Python number is the same in all copies of one run, so that each run has one of its own.
    for seed in range(many if inexact else 1):
        off = {k: v * (1 + PERTURBED * _between(generator)) for k, v in inexact.items()}
        mine = _copied(given | off)
        mode = _Placed(1 if inexact else many, seed)
        mode.grid = mine.get("grid")
        named = {k: v for k, v in mine.items() if k not in order}
        call = Call(func, tuple(mine[k] for k in order), named)
        with mode:
            out = func(*call.args, **call.kwargs)
        found.append(mode.band(call.written(tensors_in(out))[cause.output]).samples)
    return replace(band, samples=torch.cat(found))


def _inexact(given: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a call, by name, that float32 rounds; scales that are not given too."""
    numbers = {k: v for k, v in given.items() if isinstance(v, float) and math.isfinite(v)}
    found = {k: v for k, v in numbers.items() if not k.startswith("scales") and _rounded(v)}
    scales = [k for k in given if k.startswith("scales")]
    if not scales or given.get("align_corners") or given.get("output_size") is None:
        return found
    image = given.get("self", given.get("input"))
    sizes = given["input_size"] if image is None else image.shape
    dims = range(-len(scales), 0)  # depth, height, width, as the schemas have them
    factors = {
        k: given[k] or given["output_size"][d] / sizes[d] for k, d in zip(scales, dims, strict=True)
    }
    return found | {k: v for k, v in factors.items() if _rounded(1 / v)}


def _rounded(number: float) -> bool:
    return float(torch.tensor(number, dtype=torch.float32)) != number


def _between(generator: torch.Generator) -> float:
    return float(torch.empty((), dtype=torch.float64).uniform_(-1, 1, generator=generator))


def enough(tree: Any) -> int:
    """Return how many samples confirm: fewer for large tensors, whose copies fill the memory."""
    return MANY if sum(t.numel() for t in tensors_in(tree)) < LARGE else MANY // 4


def _largest(t: torch.Tensor) -> float:
    return float(t.abs().nan_to_num(0.0, 0.0, 0.0).max())


def _copied(tree: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t.detach().clone(), tree)


def _wide(t: torch.Tensor) -> torch.Tensor:
    return t.float() if t.dtype in NARROW else t


def _scaled(t: torch.Tensor, power: float) -> torch.Tensor:
    if not (t.is_floating_point() or t.is_complex()):
        return t
    return (t.to(torch.complex128 if t.is_complex() else torch.float64) * power).to(t.dtype)


def _random(t: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not (t.is_floating_point() or t.is_complex()):
        return t
    return torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype)


def _magnitudes(band: Band) -> Band:
    """Return the band of the absolute values: a complex element's phase is lost too."""
    return replace(
        band, nominal=band.nominal.abs(), clean=band.clean.abs(), samples=band.samples.abs()
    )


def _try(func: Any, args: Any, kwargs: Any, output: int) -> torch.Tensor | None:
    try:
        args, kwargs = _copied((args, kwargs))
        call = Call(func, args, kwargs)
        out = func(*args, **kwargs)
        return call.written(tensors_in(out))[output]
    except Exception:
        return None


def _band(mode: Shadow, func: Any, args: Any, kwargs: Any, output: int) -> Band:
    args, kwargs = _copied((args, kwargs))
    call = Call(func, args, kwargs)
    with mode:
        out = func(*args, **kwargs)
    return mode.band(call.written(tensors_in(out))[output])


def _excess(band: Band) -> float:
    found = distance(band, band.nominal)
    return max(found.excess, found.bias)


def _of_the_largest(band: Band) -> float:
    clean, off = band.clean, (band.nominal.to(band.clean.dtype) - band.clean).abs()
    largest = _largest(clean)
    return _largest(off) / (UNIT_ROUNDOFF[band.nominal.dtype] * largest or math.ulp(0.0))
