"""The FP8 state of a program: the regions it is in, and what each of its layers remembers.

A region `fp8(recipe)` says how the layers in it quantise, as ``te.autocast(recipe=...)`` does: the
innermost one counts, and a disabled one turns FP8 off. A layer is a module: it is named by a
number, its sizes and dtype, and whether it has a bias. With delayed scaling it remembers the
largest magnitudes of its last steps.

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

__all__ = ["Checkpointed", "Delayed", "Layers", "Module", "Region", "Scales", "Workspace"]


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
        scale = self.format.max / amax / 2.0**self.region.margin  # a rounded reciprocal, times
        if amax.isfinite() and amax > 0:
            self.scale = scale.clamp(max=torch.finfo(torch.float32).max)


@dataclass(slots=True)
class Workspace:
    """The quantised weight that a layer keeps for later microbatches, by the dimension summed over.

    both: whether it can also be used for the gradient of the input. It is refreshed in place, so a
    backward pass reads what it holds then.
    """

    both: bool
    copies: dict[int, Quantised] = field(default_factory=dict)

    def refresh(self, quantise: Quantiser, weight: torch.Tensor) -> None:
        """Quantise a weight [N, K] anew."""
        with torch.no_grad():
            for dim in (0, 1):
                self.copies[dim] = quantise(weight.t(), dim, "weight")


Scales = dict[Role, torch.Tensor]
Module = tuple[int, int, int, torch.dtype, bool]
"""A layer: its number, N, K, the dtype of its weight, and whether it has no bias."""


@dataclass(slots=True)
class _Scaled:
    """The quantiser of one call with delayed scaling.

    scales: of its forward pass. again: whether that is a recomputation, which records nothing.
    forward: whether it is not over.
    """

    states: dict[Role, Delayed]
    scales: Scales
    again: bool
    forward: bool = True

    def __call__(self, x: torch.Tensor, dim: int, role: Role) -> Quantised:
        state = self.states[role]
        if role == "grad_output" or (self.forward and not self.again):
            state.record(x)
        return scaling.given(x, self.scales.get(role, state.scale), state.format)


@dataclass(slots=True)
class Checkpointed:
    """What a checkpoint knows of its first run, and the scales of that, in the order of its layers.

    first: whether its next layer was the first of the outermost region. reentrant: whether it is a
    reentrant checkpoint.
    """

    regions: list[Region]
    first: bool
    reentrant: bool
    scales: list[Scales] = field(default_factory=list)


class Layers:
    """The FP8 regions and layers of one run of a program, in whatever thread it runs."""

    def __init__(self, convention: Convention) -> None:
        self.convention = convention
        self.regions: list[Region] = []
        self.delayed: dict[tuple[Module, Region], dict[Role, Delayed]] = {}
        self.first = False  # whether the next layer is the first of the outermost region
        self.kept: list[Scales] | None = None  # scales of a checkpoint, in the order of its layers
        self.again = False  # whether these are used, instead of noted
        self.trains = False  # whether it is the first run of a checkpoint
        self.workspaces: dict[Module, Workspace] = {}
        self.entered: dict[Module, Region] = {}  # where each module first had its recipe

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
            trains = torch.is_grad_enabled() or self.trains
            if region.enabled and not self.regions and trains and not self.again:
                self._update("input", "weight")

    def linear(
        self,
        x: Any,
        weight: Any,
        bias: Any = None,
        *,
        layer: int = 0,
        is_first_microbatch: bool | None = None,
    ) -> torch.Tensor:
        """Return a linear layer of `x` [..., K], `weight` [N, K] and `bias` [N].

        It quantises as the innermost region says, and not at all outside of regions.
        is_first_microbatch: True keeps the quantised weight, and False uses the one that is kept,
        even if the weight has changed since. Source: ``Linear.forward`` and ``quantize_weight`` of
        Transformer Engine 2.20.
        """
        region = self.regions[-1] if self.regions else None
        if region is None or not region.enabled:
            return torch.nn.functional.linear(x, weight, bias)
        module = layer, *weight.shape, weight.dtype, bias is None
        region = self._entered(module, region)
        scaled = self._scaled(module, region) if RECIPES[region.recipe].delayed else None
        quantise = self._wrapped(
            module, scaled or _stateless(region), x, weight, is_first_microbatch
        )
        finished, dtype = self._finished(x, weight, bias), self._dtype(module, x)
        y = linear(x, weight, bias, quantise, self.convention, finished, dtype)
        if scaled is not None:
            scaled.forward = False
        return y

    def _finished(self, *tensors: Any) -> Callable[[], None] | None:
        """Return what happens at the end of the backward pass of a call, or None.

        The first layer of an outermost region that has one updates the scales of gradients.
        """
        needed = any(tensor is not None and tensor.requires_grad for tensor in tensors)
        if not (self.first and needed and torch.is_grad_enabled()):
            return None
        self.first = False
        return lambda: self._update("grad_output")

    def _dtype(self, module: Module, x: Any) -> torch.dtype | None:
        """Return the dtype of the result of a call, or None: that of autocast, or of `x`."""
        return None

    def _entered(self, module: Module, region: Region) -> Region:
        """Note the region of a module's call, and return it.

        A kept weight of another recipe is dropped. Source: ``init_fp8_metadata``.
        """
        before = self.entered.get(module)
        if before is None or before.recipe != region.recipe:
            self.workspaces.pop(module, None)
            self.entered[module] = region
        return region

    def _wrapped(
        self, module: Module, quantise: Quantiser, x: Any, weight: Any, first: bool | None
    ) -> Quantiser:
        """Return the quantiser of a call; if it has a first microbatch, with the kept weight.

        A workspace that was made where no gradient of the input was needed is made anew where one
        is. Source: ``_is_weight_workspace_valid``.
        """
        if first is None:
            return quantise
        checkpointed = self.kept is not None and not self.again
        both = checkpointed or (torch.is_grad_enabled() and x.requires_grad)
        held = self.workspaces.get(module)
        if held is None or (both and not held.both):
            held, first = Workspace(both), True
            self.workspaces[module] = held
        if first:
            held.refresh(quantise, weight)
        copies = held.copies
        return lambda value, dim, role: (
            copies[dim] if role == "weight" else quantise(value, dim, role)
        )

    def checkpoint(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """Return a checkpoint whose recomputation is in the regions of the first computation.

        It uses the scales of that, and records nothing. Source: ``te.checkpoint``,
        ``copy_forward_fp8_meta_tensors_for_recompute``.
        """

        def call(function: Callable[..., Any], *args: Any, use_reentrant: bool) -> Any:
            tensors = (arg for arg in args if isinstance(arg, torch.Tensor))
            wanted = not use_reentrant or any(tensor.requires_grad for tensor in tensors)
            if not (wanted and torch.is_grad_enabled()):  # it will not be recomputed
                return checkpoint(function, *args, use_reentrant=use_reentrant)
            runs = 0
            held = Checkpointed(list(self.regions), self.first, use_reentrant)

            def body(*args: Any) -> Any:
                nonlocal runs
                runs += 1
                with self._run(held, again=runs > 1):
                    return function(*args)

            return checkpoint(body, *args, use_reentrant=use_reentrant)

        return call

    @contextmanager
    def _run(self, held: Checkpointed, *, again: bool) -> Iterator[None]:
        """Have the regions of a checkpoint for a run of it, the first one or again."""
        before = self.regions, self.kept, self.again, self.trains
        self.regions, self.kept = list(held.regions), list(held.scales) if again else held.scales
        self.again, self.trains = again, not again
        later, self.first = self.first, held.first
        try:
            yield
        finally:
            self.regions, self.kept, self.again, self.trains = before
            if again:
                self.first = later

    # -- delayed scaling --------------------------------------------------------------------------

    def _scaled(self, module: Module, region: Region) -> _Scaled:
        if (module, region) not in self.delayed:
            with torch.inference_mode(False):  # it outlives an inference mode around the first call
                self.delayed[module, region] = self._fresh(module, region)
        states = self.delayed[module, region]
        return _Scaled(states, self._scales(module, region), self.again)

    def _fresh(self, module: Module, region: Region) -> dict[Role, Delayed]:
        """Return the state of a module that has delayed scaling in a region for the first time."""
        roles: tuple[Role, ...] = ("input", "weight", "grad_output")
        return {role: Delayed(region, format_of(region.format, role)) for role in roles}

    def _scales(self, module: Module, region: Region) -> Scales:
        """Return the scales of a forward pass; in a checkpoint again, those of its first run."""
        if self.again and self.kept:
            return self.kept.pop(0)
        states = self.delayed[module, region]
        scales: Scales = {role: states[role].scale for role in ("input", "weight")}
        if self.kept is not None:
            self.kept.append(scales)
        return scales

    def _update(self, *roles: Role) -> None:
        for states in self.delayed.values():
            for role in roles:
                states[role].update()


def _stateless(region: Region) -> Quantiser:
    recipe = RECIPES[region.recipe]

    def quantise(x: torch.Tensor, dim: int, role: Role) -> Quantised:
        return recipe.quantise(x, dim, role, format_of(region.format, role))

    return quantise
