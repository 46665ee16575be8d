"""What backends with FP8 layers share: regions, and the reference beside them.

A backend gives one layer for a run, ``linear(x, weight, bias, layer, recipe, **options)``. The
regions of a case's source say with which recipe it is called.
"""

from __future__ import annotations

import contextlib
import re
import textwrap
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import torch

from amp_fuzz.backends.harness import Runtime
from amp_fuzz.backends.reference import ReferenceRuntime
from amp_fuzz.backends.reproducing import TorchRepros, source_of
from amp_fuzz.backends.torch_base import TorchBackend
from amp_fuzz.cases.case import Case, unselective
from amp_fuzz.reference import fp8
from amp_fuzz.reference.state import here

__all__ = ["QuantisingBackend", "fp8_regions"]


def fp8_regions(linear: Any, checkpoint: Any) -> Any:
    """Return FP8 regions, a layer that quantises in them, and a checkpoint that restores them."""
    regions: list[Any] = []

    @contextlib.contextmanager
    def fp8(recipe: Any, enabled: bool = True, **options: Any) -> Any:
        regions.append({"recipe": recipe, **options} if enabled else None)
        try:
            yield
        finally:
            regions.pop()

    def fp8_linear(x: Any, weight: Any, bias: Any = None, layer: int = 0) -> Any:
        region = regions[-1] if regions else None
        if region is None:
            return torch.nn.functional.linear(x, weight, bias)
        return linear(x, weight, bias, layer, **region)

    def restoring(function: Any, *args: Any, use_reentrant: bool) -> Any:
        inner = list(regions)

        def body(*args: Any) -> Any:
            outer = list(regions)
            regions[:] = inner
            try:
                return function(*args)
            finally:
                regions[:] = outer

        return checkpoint(body, *args, use_reentrant=use_reentrant)

    return fp8, fp8_linear, restoring


@dataclass(frozen=True, slots=True)
class QuantisingBackend(TorchRepros, TorchBackend):
    """A backend under torch's own autocast, whose linear layers quantise in FP8 regions."""

    device: str = "cpu"

    @property
    def caches(self) -> bool:
        """Whether a layer can keep its quantised weight: it quantises it in each call."""
        return False

    def linear(self) -> Callable[..., Any]:
        """Return the layer for one run: a new one, so nothing is left of the last run."""
        raise NotImplementedError

    def linear_source(self) -> tuple[str, str]:
        """Return the source of a function that makes the layer, and its call."""
        raise NotImplementedError

    def convention(self) -> fp8.Convention:
        """Return what the implementation documents of its layers."""
        raise NotImplementedError

    def fit(self, case: Case) -> Case:
        """Return the case without function transforms, double backward and selective checkpoints.

        The layers are `torch.autograd.Function`s that save what they quantise. They have neither a
        rule for vmap nor a backward that can be differentiated. A checkpoint restores their
        regions, and takes no other contexts.
        """
        case = unselective(TorchBackend.fit(self, case)).with_plan(transform="none")
        return case.with_plan(second="retain") if case.plan.second == "double" else case

    def runtime(self, **more: Any) -> Runtime:
        """Return torch's autocast, and the FP8 layers of this backend."""
        return TorchBackend.runtime(self, **{"fp8": self._fp8, **more})

    def _fp8(self, checkpoint: Callable[..., Any]) -> Mapping[str, Any]:
        names = ("fp8", "fp8_linear", "checkpoint")
        return dict(zip(names, fp8_regions(self.linear(), checkpoint), strict=True))

    def reference(self) -> ReferenceRuntime:
        """Return the reference on the same device, with FP8 layers as documented."""
        found = TorchBackend.reference(self)
        convention = self.convention()

        def layers(checkpoint: Callable[..., Any]) -> Mapping[str, Any]:
            made = here().semantics.layers(fp8.Layers)(convention)
            return {**made.names(), "checkpoint": made.checkpoint(checkpoint)}

        return replace(found, runtime=replace(found.runtime, fp8=layers))

    # -- scripts ----------------------------------------------------------------------------------

    def setup(self, names: Set[str]) -> list[str]:
        """Return the name of the device, and the FP8 layers where a script uses them."""
        lines = TorchRepros.setup(self, names)
        if not names & {"fp8", "fp8_linear"}:
            return lines
        source, call = self.linear_source()
        regions = f"fp8, fp8_linear, checkpoint = fp8_regions({call}, checkpoint)"
        return [*lines, source_of(fp8_regions), source, regions]

    def layer_source(self, recipe: str, sizes: str) -> tuple[str, str]:
        """Return imports, and a call that makes a layer of one recipe; "" if it is no module.

        recipe: the arguments of a region. sizes: the source of its sizes, the inputs' first.
        """
        return "", ""

    def short(self, code: str) -> str:
        """Return a script with a module of the library in the place of regions and layers."""
        regions, calls = re.findall(_REGION, code, re.MULTILINE), re.findall(_CALLED, code)
        if len(regions) != 1 or len(calls) != 1:
            return code
        weight = calls[0][1]
        imports, layer = self.layer_source(regions[0][1], f"*{weight}.shape[::-1]")
        if not layer:
            return code
        source, call = self.linear_source()
        helpers = (source, f"fp8, fp8_linear, checkpoint = fp8_regions({call}, checkpoint)")
        for text in helpers:
            code = code.replace(text, "")
        code = code.replace(source_of(fp8_regions), imports)
        called = r'torch.func.functional_call(linear, {"weight": \2}, (\1,))'
        code = re.sub(_CALLED, called, code)
        return re.sub(_REGION, lambda m: _entered(m, layer), code, flags=re.MULTILINE)


_REGION = r"^( *)with fp8\((.*)\):\n((?:\1 {4}.*\n)+)"
_CALLED = r"\bfp8_linear\((\w+), (\w+)\)"


def _entered(match: re.Match[str], layer: str) -> str:
    """Return the lines of a region, after the line that makes its layer."""
    lines = [f"linear = {layer}", *textwrap.dedent(match[3]).splitlines()]
    return "".join(f"{match[1]}{line}\n" for line in lines)
