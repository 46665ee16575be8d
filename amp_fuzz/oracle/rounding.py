"""Decide whether rounding alone explains a difference: the oracle of inexact backends.

There is no tolerance: the band comes from the case itself, by shadow arithmetic under the reference
(`amp_fuzz.reference.shadow.mode`). One threshold for all ops and dtypes limits the largest excess
of an element and the bias of a tensor. benchmarks/shadow.json shows what honest kernels reach. A
value over the threshold is measured again with many more samples before it is a divergence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from amp_fuzz.backends.harness import Observation
from amp_fuzz.oracle.compare import Divergence, describe, nonfinite_differs, real, same
from amp_fuzz.reference.shadow.band import THRESHOLD, Band, Distance, distance
from amp_fuzz.reference.shadow.mode import Reach

__all__ = ["CONFIRM", "SCREEN", "THRESHOLD", "Rounding"]

SCREEN, CONFIRM = 8, 64  # samples

Shadowed = Callable[..., tuple[Observation, Mapping[str, Band]]]
"""Runs the case under the reference with a number of samples, a seed and a reach (as in `Shadow`),
and returns a band for each label."""


@dataclass(slots=True)
class Rounding:
    """Judges the values of one case. The shadows are run when the first value differs.

    run: runs the case with shadows. unjudged: labels of values that could not be judged. promised:
    runs it with the roundings that must not be left out, or None. far: the largest excess of each
    label that was measured, confirmed where it is over the threshold.
    """

    run: Shadowed
    unjudged: set[str] = field(default_factory=set)
    promised: Shadowed | None = None
    far: dict[str, float] = field(default_factory=dict)
    _bands: dict[int, Mapping[str, Band]] = field(default_factory=dict)
    _ends: dict[int, Sequence[Mapping[str, Band]]] = field(default_factory=dict)
    _strict: dict[int, Mapping[str, Band]] = field(default_factory=dict)

    def __call__(self, label: str, want: torch.Tensor, got: torch.Tensor) -> Divergence | None:
        """Return a divergence of two tensors of one dtype and shape that differ in a bit."""
        band = self._band(label, SCREEN)
        if band is None or not band.known:
            self.unjudged.add(label)  # no shadow could follow an op
            return None
        if self._elsewhere(label, band, want):
            self.unjudged.add(label)
            return None
        sure = self._sure(label, band, SCREEN)
        if nonfinite_differs(want, got):
            found_ = self._nonfinite(label, band, want, got, sure)
            if found_ is not None:
                return found_
        found = self._far(label, band, got, sure)
        grad = label.endswith(".grad")
        if found is not None:
            return Divergence("grad-value" if grad else "value", label, *_said(found, want, band))
        if sure is None:
            return self._left_out(label, want, got)
        if nonfinite_differs(want, got):
            return Divergence("range", label, *_unlike(want, got, band))
        found = self._far(label, band, got, None)
        return None if found is None else Divergence("range", label, *_said(found, want, band))

    def near(self, label: str, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Return whether two values are as near as rounding, wherever both are.

        The band of the label is moved to the first of them. False if no shadow could follow.
        """
        band = self._band(label, CONFIRM)
        if band is None or not band.known or band.nominal.dtype != one.dtype:
            return False
        center, clean = one.detach().to(band.clean.dtype), band.clean
        boolean = clean.dtype == torch.bool  # which torch does not subtract
        samples = band.samples ^ (center ^ clean) if boolean else band.samples + (center - clean)
        moved = replace(band, nominal=one, clean=center, samples=samples)
        return not _over(distance(moved, other))

    def _far(
        self, label: str, band: Band, got: torch.Tensor, sure: torch.Tensor | None
    ) -> Distance | None:
        """Return the distance of a value that rounding does not explain, or None."""
        found = distance(band, got, sure)
        if _over(found):
            confirmed = self._band(label, CONFIRM)
            if confirmed is None or not confirmed.known:
                self.unjudged.add(label)
                return None
            if sure is not None:
                sure = self._sure(label, confirmed, CONFIRM)
            found = distance(confirmed, got, sure)
        self.far[label] = max(found.excess, self.far.get(label, 0.0))
        return found if _over(found) else None

    def _left_out(self, label: str, want: torch.Tensor, got: torch.Tensor) -> Divergence | None:
        """Return a divergence of a value if only a missing rounding explains it.

        If the reference's own value is too far off, the shadows do not follow it.
        """
        if self.promised is None or self._off(label, want, got, SCREEN) is None:
            return None
        band = self._off(label, want, got, CONFIRM)
        if band is None:
            return None
        return Divergence("precision", label, *_said(distance(band, got), want, band))

    def _off(self, label: str, want: torch.Tensor, got: torch.Tensor, samples: int) -> Band | None:
        """Return the band with promised roundings, if a value is outside it; else None."""
        if samples not in self._strict:
            assert self.promised is not None
            _, self._strict[samples] = self.promised(samples, samples)
        band = self._strict[samples].get(label)
        if band is None or not band.known or band.left or not same(band.nominal, want):
            return None
        over = _over(distance(band, got)) and not _over(distance(band, band.nominal))
        return band if over else None

    def _sure(self, label: str, band: Band, samples: int) -> torch.Tensor | None:
        """Return which elements depend on no value that left its dtype's range; None means all.

        Complex elements are pairs. The copies are computed twice, without a range and with a
        smaller range. If all are equal, no intermediate precision can make a difference.
        """
        if not band.left:
            return None
        reaches: tuple[Reach, ...] = ("unbounded", "bounded")
        if samples not in self._ends:
            self._ends[samples] = [self.run(samples, samples, reach)[1] for reach in reaches]
        first, second = (bands.get(label) for bands in self._ends[samples])
        if first is None or second is None or not (first.known and second.known):
            return torch.zeros_like(real(band.clean), dtype=torch.bool)
        a, b = (torch.cat([band.clean[None], band.samples]) for band in (first, second))
        a, b = real(a), real(b)
        return ((a == b) | (torch.isnan(a) & torch.isnan(b))).all(0)

    def _elsewhere(self, label: str, band: Band, want: torch.Tensor) -> bool:
        """Return whether the shadows follow another computation than the reference's own.

        Composite kernels take another path for tensors that a mode can see
        (``isTensorSubclassLike`` in ATen); that of ``matrix_rank`` forgets its ``out=`` there. It
        shows if the nominal value is not the reference's, and the reference's is not among the
        samples.
        """
        nominal = band.nominal
        if (nominal.dtype, nominal.shape) != (want.dtype, want.shape):
            return True
        if same(nominal, want) or not _over(distance(band, want)):
            return False
        confirmed = self._band(label, CONFIRM)
        return confirmed is None or not confirmed.known or _over(distance(confirmed, want))

    def _band(self, label: str, samples: int) -> Band | None:
        if samples not in self._bands:
            _, self._bands[samples] = self.run(samples, samples)
        # There is no band if torch raises only under a dispatch mode: torch.gru does for weights of
        # another dtype, since it takes another path then.
        return self._bands[samples].get(label)

    def _nonfinite(
        self,
        label: str,
        band: Band,
        want: torch.Tensor,
        got: torch.Tensor,
        sure: torch.Tensor | None,
    ) -> Divergence | None:
        """Return how NaN and infinities differ, unless the samples differ in the same way."""
        if not bool(_wrong(band, want, got, sure).any()):
            return None
        confirmed = self._band(label, CONFIRM)
        if confirmed is None or not confirmed.known:
            self.unjudged.add(label)
            return None
        sure = self._sure(label, confirmed, CONFIRM)
        if not bool(_wrong(confirmed, want, got, sure).any()):
            return None
        kind = "grad-nonfinite" if label.endswith(".grad") else "nonfinite"
        return Divergence(kind, label, *_unlike(want, got, band))  # type: ignore[arg-type]


def _wrong(
    band: Band, want: torch.Tensor, got: torch.Tensor, sure: torch.Tensor | None
) -> torch.Tensor:
    """Return where all samples agree that a value is finite, infinite or NaN, and it is not.

    Complex values are pairs. If some samples are infinite and others NaN, only a number is wrong.
    """
    limit = torch.finfo(band.nominal.dtype).max  # samples are in float64
    hows = [_how(real(t.detach()), limit) for t in (band.clean, band.samples, want, got)]
    wrong = torch.zeros_like(hows[0], dtype=torch.bool)
    for clean, samples, wanted, found in (hows, [how != 0 for how in hows]):
        # The reference itself may be finite by chance.
        wrong |= (samples == clean).all(0) & (wanted == clean) & (found != clean)
    return wrong if sure is None else wrong & sure


def _how(value: torch.Tensor, limit: float) -> torch.Tensor:
    """Return 0 for numbers within a limit, 1 and -1 for those beyond it, 2 for NaN."""
    beyond = value.sign() * (value.abs() > limit)
    return torch.where(value.isnan(), 2.0, beyond.double())


def _unlike_at(want: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """Return where NaN and infinities differ, complex as pairs."""
    a, b = real(want.detach()), real(got.detach())
    return (torch.isfinite(a) != torch.isfinite(b)) | (
        ~torch.isfinite(a) & (a != b) & ~(torch.isnan(a) & torch.isnan(b))
    )


def _unlike(want: torch.Tensor, got: torch.Tensor, band: Band) -> tuple[str, str]:
    count = [int((~torch.isfinite(real(t.detach()))).sum()) for t in (want, got)]
    left = f": {', '.join(band.left)} left the range" if band.left else ""
    return (
        f"{count[0]} not finite of {describe(want)}{left}",
        f"{count[1]} not finite, {int(_unlike_at(want, got).sum())} differ",
    )


def _over(found: Distance) -> bool:
    return found.excess > THRESHOLD or found.bias > THRESHOLD


def _said(found: Distance, want: torch.Tensor, band: Band) -> tuple[str, str]:
    dtype = str(want.dtype).removeprefix("torch.")
    left = f", {', '.join(band.left)} left the range" if band.left else ""
    return (
        f"{found.expected:.9g} +- {found.scale:.2g} at {list(found.index)}, {dtype}{left}",
        f"{found.observed:.9g}: excess {found.excess:.3g}, bias {found.bias:.3g}",
    )
