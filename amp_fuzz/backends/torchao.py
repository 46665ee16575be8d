"""torchao's float8 training: linear layers converted by ``convert_to_float8_training``, MXFP8 ones.

In an FP8 region, a call of ``fp8_linear`` is a call of a converted `torch.nn.Linear`, with the
recipe of the region and the weight and bias of the call. ``torchao[emulate]`` multiplies matrices
that it dequantised. Without ``emulate``, the products are those of `torch._scaled_mm`.
``torchao[mxfp8]`` calls an ``MXFP8Linear`` instead, whose products are emulated too.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from amp_fuzz.backends.base import Availability, Backend, Facts
from amp_fuzz.backends.eager import has_device
from amp_fuzz.backends.quantising import QuantisingBackend
from amp_fuzz.backends.reproducing import source_of
from amp_fuzz.cases.case import Case, retyped
from amp_fuzz.cases.program import FP8
from amp_fuzz.reference import fp8 as reference

__all__ = ["TorchaoBackend", "backends", "torchao_linear"]

_NEEDS = "pip install 'amp-fuzz[fp8]'"


def torchao_linear(emulate: bool) -> Any:
    """Return a linear layer that quantises by torchao, as a recipe says."""
    from torchao.float8 import CastConfig, Float8LinearConfig, convert_to_float8_training
    from torchao.float8.config import ScalingGranularity, e4m3_dtype, e5m2_dtype

    layers: dict[Any, Any] = {}

    def config(recipe: str, **options: Any) -> Any:
        rows, form = recipe == "rowwise", options.get("format", "HYBRID")
        scaling = ScalingGranularity.AXISWISE if rows else ScalingGranularity.TENSORWISE
        forward = e5m2_dtype if form == "E5M2" else e4m3_dtype
        backward = e4m3_dtype if form == "E4M3" else e5m2_dtype
        return Float8LinearConfig(
            cast_config_input=CastConfig(scaling_granularity=scaling, target_dtype=forward),
            cast_config_weight=CastConfig(scaling_granularity=scaling, target_dtype=forward),
            cast_config_grad_output=CastConfig(scaling_granularity=scaling, target_dtype=backward),
            round_scales_to_power_of_2=rows,
            emulate=emulate,
        )

    def linear(x: Any, weight: Any, bias: Any, layer: int, recipe: str, **options: Any) -> Any:
        n, k = weight.shape
        key = (layer, n, k, bias is None, recipe, *options.values())
        if key not in layers:
            plain = torch.nn.Linear(k, n, bias=bias is not None, device="meta")
            layers[key] = convert_to_float8_training(plain, config=config(recipe, **options))
        given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        return torch.func.functional_call(layers[key], given, (x,))

    return linear


def mxfp8_linear() -> Any:
    """Return a linear layer that quantises to MXFP8 by torchao."""
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    layers: dict[Any, Any] = {}

    def linear(x: Any, weight: Any, bias: Any, layer: int, recipe: str, **options: Any) -> Any:
        n, k = weight.shape
        key = layer, n, k, bias is None
        if key not in layers:
            emulated = {"kernel_preference": KernelPreference.EMULATED}
            layers[key] = MXFP8Linear(k, n, bias=bias is not None, device="meta", **emulated)
        given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        return torch.func.functional_call(layers[key], given, (x,))

    return linear


@dataclass(frozen=True, slots=True)
class TorchaoBackend(QuantisingBackend):
    """Layers of torchao, on the CPU or an accelerator."""

    emulate: bool = False

    @property
    def name(self) -> str:
        """``torchao``, ``torchao[emulate]``, ``torchao@cuda``, ..."""
        name = "torchao[emulate]" if self.emulate else "torchao"
        return name if self.device == "cpu" else f"{name}@{self.device}"

    @property
    def recipes(self) -> Sequence[FP8]:
        """The recipes of `Float8LinearConfig`, and the formats that it can be given."""
        tensorwise = (FP8(), FP8(), FP8(format="E4M3"), FP8(format="E5M2"))
        rowwise = (FP8("rowwise", format="E4M3"), FP8("rowwise", format="E4M3"))
        return (*tensorwise, *rowwise, FP8("rowwise"))

    def availability(self) -> Availability:
        """Return whether torchao is here, and the device."""
        if not has_device(self.device):
            return Availability("missing", f"no {self.device} device is visible to torch here")
        try:
            found = version("torchao")
        except PackageNotFoundError:
            return Availability("missing", _NEEDS)
        logging.getLogger("torchao").setLevel(logging.ERROR)  # it lists kernels of other devices
        # It registers enums in a way that torch deprecates.
        trees = logging.getLogger("torch.utils._pytree")
        level = trees.level
        trees.setLevel(logging.ERROR)
        try:
            # Its strings have escapes that Python warns of when it first compiles them.
            with warnings.catch_warnings(action="ignore"):
                import torchao.float8  # noqa: F401
        except Exception as error:
            return Availability("broken", f"torchao {found}: {type(error).__name__}: {error}")
        finally:
            trees.setLevel(level)
        return Availability("ready", f"torchao {found}, torch {torch.__version__}")

    def linear(self) -> Callable[..., Any]:
        """Return torchao's layer for one run."""
        return torchao_linear(self.emulate)  # type: ignore[no-any-return]

    def layer_source(self, recipe: str, sizes: str) -> tuple[str, str]:
        """Return the imports and the call of `convert_to_float8_training`, for its own recipes."""
        made = {
            "'tensorwise'": f"Float8LinearConfig(emulate={self.emulate})",
            "'rowwise', format='E4M3'": 'Float8LinearConfig.from_recipe_name("rowwise")',
        }
        if recipe not in made:
            return "", ""
        config = made[recipe]
        if self.emulate and "rowwise" in recipe:
            config = f"dataclasses.replace({config}, emulate=True)"
        module = f"torch.nn.Linear({sizes}, bias=False)"
        imports = (
            "import dataclasses\n"
            "from torchao.float8 import Float8LinearConfig, convert_to_float8_training"
        )
        return imports, f"convert_to_float8_training({module}, config={config})"

    def linear_source(self) -> tuple[str, str]:
        """Return the source of the layer, and the call that makes it."""
        return source_of(torchao_linear), f"torchao_linear({self.emulate})"

    def convention(self) -> reference.Convention:
        """Return what torchao documents, with the kernel of its products."""
        product = reference.dequantised if self.emulate else reference.scaled_mm
        return reference.Convention(product=product)

    def facts(self) -> Facts:
        """Return facts for issues."""
        return Facts(
            area="float8",
            made="with linear layers converted by `convert_to_float8_training`",
            library="torchao",
            installs="amp-fuzz[fp8]",
            implements=("backend=torchao",),
        )


@dataclass(frozen=True, slots=True)
class MxBackend(TorchaoBackend):
    """MXFP8 layers of torchao, emulated: on the CPU or an accelerator."""

    @property
    def name(self) -> str:
        """``torchao[mxfp8]``, ``torchao[mxfp8]@cuda``, ..."""
        return "torchao[mxfp8]" if self.device == "cpu" else f"torchao[mxfp8]@{self.device}"

    @property
    def recipes(self) -> Sequence[FP8]:
        """The recipe, in the format that torchao fixes."""
        return (FP8("mxfp8", format="E4M3"),)

    def fit(self, case: Case) -> Case:
        """Return the case with bfloat16 inputs for those of float16, "not supported yet"."""
        case = QuantisingBackend.fit(self, case)
        inputs = case.program.inputs
        fitting = (retyped(i, "bfloat16") if i.dtype == "float16" else i for i in inputs)
        return case.with_program(inputs=tuple(fitting))

    def linear(self) -> Callable[..., Any]:
        """Return torchao's layer for one run."""
        return mxfp8_linear()  # type: ignore[no-any-return]

    def layer_source(self, recipe: str, sizes: str) -> tuple[str, str]:
        """Return the imports and the call of `MXFP8Linear`."""
        imports = (
            "from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear\n"
            "from torchao.quantization.quantize_.common.kernel_preference import KernelPreference"
        )
        kernels = "kernel_preference=KernelPreference.EMULATED"
        return imports, f"MXFP8Linear({sizes}, bias=False, {kernels})"

    def linear_source(self) -> tuple[str, str]:
        """Return the source of the layer, and the call that makes it."""
        return source_of(mxfp8_linear), "mxfp8_linear()"

    def convention(self) -> reference.Convention:
        """Return what torchao documents."""
        return reference.TORCHAO_MXFP8

    def facts(self) -> Facts:
        """Return facts for issues."""
        return Facts(
            area="mx",
            made="with `MXFP8Linear`",
            library="torchao",
            installs="amp-fuzz[fp8]",
            implements=("backend=torchao",),
        )


def backends() -> list[Backend]:
    """Return torchao with and without emulation, and its MXFP8, on the CPU and on CUDA."""
    return [
        *(TorchaoBackend(d, emulate=e) for d in ("cpu", "cuda") for e in (False, True)),
        *(MxBackend(d) for d in ("cpu", "cuda")),
    ]
