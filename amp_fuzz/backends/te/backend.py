"""``te``: `te.Linear` of Transformer Engine on CUDA. ``te-python``: its Python code on the CPU.

The values of ``te`` come from NVIDIA's kernels, and are compared within rounding. Those of
``te-python`` come from Transformer Engine's own reference quantisers and `torch._scaled_mm`, and
are compared bit for bit. It shows the control flow of `te.Linear`: what it saves and frees, its
dataclasses of arguments, the global state of its regions. See `amp_fuzz.backends.te.stub`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import msgspec
import torch

from amp_fuzz.backends import harness
from amp_fuzz.backends.base import Availability, Backend, Facts
from amp_fuzz.backends.eager import has_device
from amp_fuzz.backends.harness import Observation, Runtime
from amp_fuzz.backends.process import REFUSES, Apart
from amp_fuzz.backends.quantising import QuantisingBackend
from amp_fuzz.backends.reproducing import TorchRepros, source_of
from amp_fuzz.backends.te.layers import python_recipe, te_layers, te_recipe
from amp_fuzz.backends.te.stub import VERSION, folder, how, install
from amp_fuzz.backends.torch_base import TorchBackend
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import FP8, Node, Region
from amp_fuzz.reference import fp8 as reference

__all__ = ["Python", "PythonBackend", "TeBackend", "backends"]

_NAMES = ("fp8", "fp8_linear", "checkpoint")


@dataclass(frozen=True, slots=True)
class _Linear(QuantisingBackend):
    """`te.Linear`, with kernels or without."""

    @property
    def caches(self) -> bool:
        """Whether a layer can keep its quantised weight."""
        return True

    def convention(self) -> reference.Convention:
        """Return what Transformer Engine documents."""
        return reference.TRANSFORMER_ENGINE

    def facts(self) -> Facts:
        """Return facts for issues."""
        return Facts(
            area="Transformer Engine",
            made="with `te.Linear`",
            library="Transformer Engine",
            installs="amp-fuzz[fp8]",
            implements=("backend=te",),
        )

    def setup(self, names: Set[str]) -> list[str]:
        """Return the name of the device, and the source of the layers."""
        lines = TorchRepros.setup(self, names)
        return [*lines, *self.layers_source()] if names & {"fp8", "fp8_linear"} else lines

    def layers_source(self) -> list[str]:
        """Return the source that makes the regions and the layer."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class TeBackend(_Linear):
    """`te.Linear` with NVIDIA's kernels."""

    device: str = "cuda"
    name: str = "te"
    exact: bool = field(default=False, kw_only=True)

    @property
    def recipes(self) -> Sequence[FP8]:
        """The recipes of the GPU's compute capability; none without a GPU."""
        if not has_device(self.device):
            return ()
        capability = torch.cuda.get_device_capability()
        delayed = FP8("delayed", history=4), FP8("delayed", history=2, algorithm="most_recent")
        found = [(8, 9, r) for r in (FP8("current"), FP8("current", format="E4M3"), *delayed)]
        found += [(9, 0, FP8("blockwise", format="E4M3"))]
        found += [(10, 0, FP8("mxfp8", format="E4M3")), (10, 0, FP8("nvfp4"))]
        return [recipe for *needs, recipe in found if capability >= tuple(needs)]

    def availability(self) -> Availability:
        """Return whether Transformer Engine, its extension and a GPU for it are here."""
        missing = [
            name
            for name in ("transformer-engine", "transformer-engine-torch")
            if _version(name) is None
        ]
        if not has_device(self.device):
            missing.append("a CUDA device that torch sees")
        elif not self.recipes:
            missing.append("a GPU of compute capability 8.9")
        if missing:
            how = "pip install --no-build-isolation 'transformer-engine[pytorch]'"
            return Availability("missing", f"needs {', '.join(missing)} ({how})")
        try:
            with warnings.catch_warnings(action="ignore"):  # the user's filters are not for it
                import transformer_engine.pytorch  # noqa: F401
        except Exception as error:
            return Availability("broken", f"{type(error).__name__}: {error}")
        return Availability("ready", f"transformer-engine {_version('transformer-engine')}")

    def runtime(self, **more: Any) -> Runtime:
        """Return torch's autocast, and `te.Linear`."""

        def layers(checkpoint: Callable[..., Any]) -> Mapping[str, Any]:
            import transformer_engine.pytorch as te

            made = te_layers(te, te_recipe, self.device)
            return dict(zip(_NAMES, made, strict=True))

        return TorchBackend.runtime(self, **{"fp8": layers, **more})

    def layers_source(self) -> list[str]:
        """Return the source that makes the regions and the layer."""
        regions = "fp8, fp8_linear, checkpoint = te_layers(te, te_recipe, device)"
        imported = "import transformer_engine.pytorch as te"
        return [imported, source_of(te_layers), source_of(te_recipe), regions]


@dataclass(frozen=True, slots=True)
class PythonBackend(_Linear):
    """`te.Linear` without the kernels of Transformer Engine, in a process of its own."""

    process: Apart = field(compare=False, kw_only=True)
    name: str = "te-python"

    @property
    def recipes(self) -> Sequence[FP8]:
        """The recipes whose kernels the stub has, or Transformer Engine in Python."""
        delayed = FP8("delayed", history=4), FP8("delayed", history=2, algorithm="most_recent")
        return FP8("current"), FP8("current", format="E4M3"), *delayed, FP8("nvfp4"), FP8("nvfp4")

    def fit(self, case: Case) -> Case:
        """Return the case without biases in NVFP4: "Bias is not supported in NVFP4QuantizerRef"."""
        case = _Linear.fit(self, case)
        return case.with_program(body=_unbiased(case.program.body, ""))

    def convention(self) -> reference.Convention:
        """Return what Transformer Engine documents, with the products of its references."""
        return replace(reference.TRANSFORMER_ENGINE, product=reference.te_reference)

    def availability(self) -> Availability:
        """Return whether the code that the stub fits is in its folder, and what it imports."""
        extra = [] if find_spec("pydantic") else ["pip install 'amp-fuzz[fp8]'"]
        code = [] if folder().is_dir() else [how()]
        if extra or code:
            return Availability("missing", " && ".join(extra + code))
        return Availability("ready", f"transformer-engine {VERSION} without its kernels")

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Run cases in a process where Transformer Engine takes the CPU for CUDA."""
        return [self.process.run(case) for case in cases]

    def refuses(self, modules: Mapping[str, torch.nn.Module]) -> str:
        """Return the reason: callables stay in their process."""
        return REFUSES

    def layers_source(self) -> list[str]:
        """Return the source that makes the regions and the layer, over the stub."""
        regions = "fp8, fp8_linear, checkpoint = te_layers(install(), python_recipe, device)"
        imported = "from amp_fuzz.backends.te.stub import install"
        return [imported, *(source_of(layer) for layer in _LAYERS), regions]

    def short(self, code: str) -> str:
        """Return a script that imports the layers too: it needs amp-fuzz anyway, for the stub."""
        first, *others = (source_of(layer) for layer in _LAYERS)
        for source in others:
            code = code.replace(source, "")
        imported = "from amp_fuzz.backends.te.layers import python_recipe, te_layers"
        return code.replace(first, imported)


_LAYERS = (te_layers, te_recipe, python_recipe)


def _unbiased(body: tuple[Node, ...], recipe: str) -> tuple[Node, ...]:
    """Return a body in a region of a recipe, or in none, without biases in NVFP4."""
    nodes: list[Node] = []
    for node in body:
        if isinstance(node, Region):
            context = node.context
            inner = recipe
            if isinstance(context, FP8):
                inner = context.recipe if context.enabled else ""
            nodes.append(Region(context, _unbiased(node.body, inner)))
        elif node.op == "fp8_linear" and recipe == "nvfp4":
            nodes.append(msgspec.structs.replace(node, args=node.args[:2]))
        else:
            nodes.append(node)
    return tuple(nodes)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class Python:
    """Both sides in a process where Transformer Engine takes the CPU for CUDA."""

    def __init__(self) -> None:
        te = install()
        self._backend = PythonBackend(process=Apart(""))

        def layers(checkpoint: Callable[..., Any]) -> Mapping[str, Any]:
            return dict(zip(_NAMES, te_layers(te, python_recipe, "cpu"), strict=True))

        self._runtime = self._backend.runtime(fp8=layers)

    def observe(self, case: Case) -> Observation:
        """Run a case with `te.Linear`."""
        return harness.run(case, self._runtime)

    def expect(self, case: Case) -> Observation:
        """Run a case under the reference."""
        return self._backend.reference().run(case)


def backends() -> list[Backend]:
    """Return Transformer Engine with its kernels, and its Python code."""
    return [TeBackend(), PythonBackend(process=Apart(f"{__name__}:Python"))]
