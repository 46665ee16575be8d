"""The FP8 state of a program: the regions it is in, and what each of its layers remembers.

A region `fp8(recipe)` says how the layers in it quantise, as ``te.autocast(recipe=...)`` does: the
innermost one counts, and a disabled one turns FP8 off. A layer is named by a number. With delayed
scaling it remembers the largest magnitudes of its last steps.

Source: Transformer Engine 2.20, ``pytorch/quantization.py`` (``FP8GlobalStateManager``), and
https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from amp_fuzz.reference.fp8 import scaling
from amp_fuzz.reference.fp8.formats import Format
from amp_fuzz.reference.fp8.linear import Convention, Quantiser, linear
from amp_fuzz.reference.fp8.recipes import RECIPES, Role, format_of
from amp_fuzz.reference.fp8.scaling import Quantised

__all__ = ["Delayed", "Layers", "Region"]


@dataclass(frozen=True, slots=True)
class Region:
    """An FP8 context: its recipe, and the options of delayed scaling."""

    recipe: str = "tensorwise"
    format: str = "HYBRID"
    enabled: bool = True
    history: int = 16
    algorithm: str = "max"
    margin: int = 0


@dataclass(slots=True)
class Delayed:
    """The delayed scale of one tensor of a layer: 1 at first, with a history of zeros.

    The largest magnitude of a step goes to slot 0. `update` takes the largest of the history (or
    slot 0, if the algorithm is ``most_recent``), then rolls the history by -1 and clears slot 0.
    The new scale is ``max / amax / 2**margin``. It stays as it was if that magnitude is 0, infinite
    or NaN, and is the largest float32 if it would overflow.

    Source: ``_default_get_amax_and_update_history`` and ``_default_sf_compute`` of Transformer
    Engine's ``pytorch/quantization.py``.
    """

    region: Region
    format: Format
    scale: torch.Tensor = field(default_factory=lambda: torch.ones(()))
    history: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.history = torch.zeros(self.region.history)

    def record(self, x: torch.Tensor) -> None:
        """Take note of the largest magnitude of a tensor."""
        self.history[0] = torch.maximum(self.history[0], x.abs().max().float())

    def update(self) -> None:
        """Take the next scale from the history, at the end of a step."""
        most = self.region.algorithm == "max"
        amax = self.history.max() if most else self.history[0].clone()
        self.history = self.history.roll(-1)
        self.history[0] = 0.0
        scale = torch.full_like(amax, self.format.max) / amax / 2.0**self.region.margin
        if amax.isfinite() and amax > 0:
            self.scale = scale.clamp(max=torch.finfo(torch.float32).max)


Scales = dict[Role, torch.Tensor]


class Layers:
    """The FP8 regions and layers of one run of a program, in whatever thread it runs."""

    def __init__(self, convention: Convention) -> None:
        self.convention = convention
        self.regions: list[Region] = []
        self.delayed: dict[tuple[int, Region], dict[Role, Delayed]] = {}
        self.first = False  # whether the next layer is the first of the outermost region
        self.kept: list[Scales] | None = None  # scales of a checkpoint, in the order of its layers
        self.again = False  # whether these are used, instead of noted

    def names(self) -> dict[str, Any]:
        """Return the names of a case's source that stand for FP8."""
        return {"fp8": self.fp8, "fp8_linear": self.linear}

    @contextmanager
    def fp8(self, recipe: str = "tensorwise", **options: Any) -> Iterator[None]:
        """Enter a region. options: the other fields of `Region`."""
        region = Region(recipe, **options)
        self.first = self.first or not self.regions
        self.regions.append(region)
        try:
            yield
        finally:
            self.regions.pop()
            if region.enabled and not self.regions and torch.is_grad_enabled() and not self.again:
                self._update("input", "weight")

    def linear(self, x: Any, weight: Any, bias: Any = None, *, layer: int = 0) -> torch.Tensor:
        """Return a linear layer of `x` [..., K], `weight` [N, K] and `bias` [N].

        It quantises as the innermost region says, and not at all outside of regions.
        """
        region = self.regions[-1] if self.regions else None
        if region is None or not region.enabled:
            return torch.nn.functional.linear(x, weight, bias)
        if not RECIPES[region.recipe].delayed:
            return linear(x, weight, bias, _stateless(region), self.convention)
        return self._delayed(x, weight, bias, region, layer)

    def checkpoint(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """Return a checkpoint whose recomputation is in the regions of the first computation.

        It uses the scales of that, and records nothing. Source: ``te.checkpoint``,
        ``copy_forward_fp8_meta_tensors_for_recompute``.
        """

        def call(function: Callable[..., Any], *args: Any, use_reentrant: bool) -> Any:
            regions, kept = list(self.regions), list[Scales]()
            runs = 0

            def body(*args: Any) -> Any:
                nonlocal runs
                runs += 1
                before = self.regions, self.kept, self.again
                noted = kept if runs == 1 else list(kept)
                self.regions, self.kept, self.again = list(regions), noted, runs > 1
                try:
                    return function(*args)
                finally:
                    self.regions, self.kept, self.again = before

            return checkpoint(body, *args, use_reentrant=use_reentrant)

        return call

    # -- delayed scaling --------------------------------------------------------------------------

    def _delayed(self, x: Any, weight: Any, bias: Any, region: Region, layer: int) -> torch.Tensor:
        roles: tuple[Role, ...] = ("input", "weight", "grad_output")
        states = self.delayed.setdefault(
            (layer, region), {r: Delayed(region, format_of(region.format, r)) for r in roles}
        )
        trains = any(t is not None and t.requires_grad for t in (x, weight, bias))
        first, again = self.first and trains, self.again
        if trains and not again:
            self.first = False
        if again and self.kept:
            scales = self.kept.pop(0)
        else:
            scales = {r: states[r].scale for r in roles[:2]}
            if self.kept is not None:
                self.kept.append(scales)
        forward = True

        def quantise(value: torch.Tensor, dim: int, role: Role) -> Quantised:
            state = states[role]
            if role == "grad_output" or (forward and not again):
                state.record(value)
            scale = scales.get(role, state.scale)
            return scaling.given(value, scale, state.format)

        done = (lambda: self._update("grad_output")) if first else None
        y = linear(x, weight, bias, quantise, self.convention, done)
        forward = False
        return y

    def _update(self, *roles: Role) -> None:
        for states in self.delayed.values():
            for role in roles:
                states[role].update()


def _stateless(region: Region) -> Quantiser:
    recipe = RECIPES[region.recipe]

    def quantise(x: torch.Tensor, dim: int, role: Role) -> Quantised:
        return recipe.quantise(x, dim, role, format_of(region.format, role))

    return quantise
