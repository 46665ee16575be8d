"""Decide whether rounding alone explains that two values differ: the oracle of inexact backends.

No tolerance: the band comes from the case itself, by shadow arithmetic under the reference
(`amp_fuzz.reference.shadows`). One threshold for all ops and dtypes, on the largest excess of an
element and on the bias of a tensor; benchmarks/shadow.json has what honest kernels come to. What is
over it is measured again with many more samples before it is called a divergence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from amp_fuzz.harness import Observation
from amp_fuzz.oracle.compare import Divergence, describe, nonfinite_differs, real, same
from amp_fuzz.reference.shadows import Band, Distance, distance

__all__ = ["CONFIRM", "SCREEN", "THRESHOLD", "Rounding"]

THRESHOLD = 4.0
SCREEN, CONFIRM = 8, 64  # samples

Shadowed = Callable[[int, int], tuple[Observation, Mapping[str, Band]]]
"""Runs the case under the reference with so many samples and a seed; a band for each label."""


@dataclass(slots=True)
class Rounding:
    """Judges the values of one case. The shadows are run when the first value differs.

    run: runs the case with shadows. unjudged: labels of values of which nothing could be said.
    """

    run: Shadowed
    unjudged: set[str] = field(default_factory=set)
    _bands: dict[int, Mapping[str, Band]] = field(default_factory=dict)

    def __call__(self, label: str, want: torch.Tensor, got: torch.Tensor) -> Divergence | None:
        """Return a divergence of two tensors of one dtype and shape that differ in a bit."""
        band = self._band(label, SCREEN)
        if band is None or not band.known:
            self.unjudged.add(label)  # an op that cannot be followed: nothing can be said
            return None
        if self._elsewhere(label, band, want):
            self.unjudged.add(label)
            return None
        if nonfinite_differs(want, got):
            found_ = self._nonfinite(label, band, want, got)
            if found_ is not None:
                return found_
        if not _over(distance(band, got)):
            return None
        band = self._band(label, CONFIRM)
        if band is None or not band.known:
            return None
        found = distance(band, got)
        if not _over(found):
            return None
        grad = label.endswith(".grad")
        if band.left:
            return Divergence("range", label, *_said(found, want, band))
        return Divergence("grad-value" if grad else "value", label, *_said(found, want, band))

    def _elsewhere(self, label: str, band: Band, want: torch.Tensor) -> bool:
        """Return whether the shadows follow another computation than the reference's own.

        Composite kernels take another way for tensors that a mode can see (``isTensorSubclassLike``
        in ATen); that of ``matrix_rank`` forgets its ``out=`` there. It shows in the nominal value,
        if that is not the reference's and the reference's is not among the samples.
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
        # There is none where torch raises under a dispatch mode and not without: torch.gru does for
        # weights of another dtype, since it takes another path then.
        return self._bands[samples].get(label)

    def _nonfinite(
        self, label: str, band: Band, want: torch.Tensor, got: torch.Tensor
    ) -> Divergence | None:
        """Return how NaN and infinities differ, if the samples do not differ in that way too."""
        a, b = real(want.detach()), real(got.detach())
        clean, samples = real(band.clean), real(band.samples)
        differs = (torch.isfinite(a) != torch.isfinite(b)) | (
            ~torch.isfinite(a) & (a != b) & ~(torch.isnan(a) & torch.isnan(b))
        )
        said = (
            f"{int((~torch.isfinite(a)).sum())} not finite of {describe(want)}",
            f"{int((~torch.isfinite(b)).sum())} not finite, {int(differs.sum())} differ",
        )
        if band.left:
            left = ", ".join(band.left)
            return Divergence("range", label, f"{said[0]}: {left} left the range", said[1])
        unsure = ~torch.isfinite(samples).all(0) & torch.isfinite(clean)
        unsure |= torch.isfinite(samples).any(0) & ~torch.isfinite(clean)
        unsure |= torch.isfinite(a) != torch.isfinite(clean)  # the reference itself is a chance
        if not bool((differs & ~unsure).any()):
            return None
        kind = "grad-nonfinite" if label.endswith(".grad") else "nonfinite"
        return Divergence(kind, label, *said)  # type: ignore[arg-type]


def _over(found: Distance) -> bool:
    return found.excess > THRESHOLD or found.bias > THRESHOLD


def _said(found: Distance, want: torch.Tensor, band: Band) -> tuple[str, str]:
    dtype = str(want.dtype).removeprefix("torch.")
    left = f", {', '.join(band.left)} left the range" if band.left else ""
    return (
        f"{found.expected:.9g} +- {found.scale:.2g} at {list(found.index)}, {dtype}{left}",
        f"{found.observed:.9g}: excess {found.excess:.3g}, bias {found.bias:.3g}",
    )
