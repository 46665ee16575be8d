"""FP8 layers of torch alone: its casts to FP8, and `torch.nn.functional.scaled_mm`.

The layer is written as its users write it, in a `torch.autograd.Function`. It tests torch's casts,
the function, and the kernel of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from amp_fuzz.backends.base import Availability, Backend, Facts
from amp_fuzz.backends.eager import has_device
from amp_fuzz.backends.quantising import QuantisingBackend
from amp_fuzz.backends.reproducing import source_of
from amp_fuzz.cases.program import FP8
from amp_fuzz.reference import fp8 as reference
from amp_fuzz.versions import holds

__all__ = ["ScaledBackend", "backends", "scaled_linear"]


def scaled_linear() -> Any:
    """Return a linear layer of torch's FP8 casts and products, as a recipe says."""
    from torch.nn.functional import ScalingType, scaled_mm

    def quantised(x: Any, dim: int, dtype: Any, rows: bool) -> Any:
        largest = torch.finfo(dtype).max
        amax = x.abs().amax(dim, keepdim=True) if rows else x.abs().max()
        scale = (largest / amax.double().clamp(min=1e-12)).float()
        if rows:
            scale = scale.double().log2().floor().exp2().float()
        return (x.float() * scale).clamp(-largest, largest).to(dtype), scale.reciprocal()

    def product(a: Any, b: Any, dtype: Any, rows: bool) -> Any:
        (left, one), (right, other) = a, b
        scaling = ScalingType.RowWise if rows else ScalingType.TensorWise
        left, right = left.contiguous(), right.t().contiguous().t()
        one, other = (s.clone(memory_format=torch.contiguous_format) for s in (one, other))
        return scaled_mm(left, right, one, scaling, other, scaling, output_dtype=dtype)

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, dtype: Any, forward: Any, *how: Any) -> Any:
            ctx.save_for_backward(x, weight)
            ctx.how = forward, *how
            _, rows = how
            a = quantised(x.reshape(-1, x.shape[-1]), 1, forward, rows)
            (b, scale) = quantised(weight, 1, forward, rows)
            y = product(a, (b.t(), scale.t()), dtype, rows)
            return y.reshape(*x.shape[:-1], weight.shape[0])

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x, weight = ctx.saved_tensors
            forward, backward, rows = ctx.how
            flat, g = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
            a, b = quantised(g, 1, backward, rows), quantised(weight, 0, forward, rows)
            dx = product(a, b, grad.dtype, rows)
            (a, scale), b = quantised(g, 0, backward, rows), quantised(flat, 0, forward, rows)
            dw = product((a.t(), scale.t()), b, grad.dtype, rows)
            return dx.reshape(x.shape), dw, None, None, None, None

    def linear(x: Any, weight: Any, bias: Any, layer: int, recipe: str, **options: Any) -> Any:
        device, form = x.device.type, options.get("format", "HYBRID")
        if torch.is_autocast_enabled(device) and x.dtype is not torch.float64:
            x = x.to(torch.get_autocast_dtype(device))
        forward = torch.float8_e5m2 if form == "E5M2" else torch.float8_e4m3fn
        backward = torch.float8_e4m3fn if form == "E4M3" else torch.float8_e5m2
        apply: Any = Linear.apply
        y = apply(x, weight, x.dtype, forward, backward, recipe == "rowwise")
        return y if bias is None else y + bias.to(y.dtype)

    return linear


@dataclass(frozen=True, slots=True)
class ScaledBackend(QuantisingBackend):
    """Layers of torch's casts and `scaled_mm`, on the CPU or CUDA."""

    @property
    def name(self) -> str:
        """``scaled_mm``, ``scaled_mm@cuda``."""
        return "scaled_mm" if self.device == "cpu" else f"scaled_mm@{self.device}"

    @property
    def recipes(self) -> Sequence[FP8]:
        """The scalings that `scaled_mm` has on every device, and all formats."""
        tensorwise = (FP8(), FP8(), FP8(format="E4M3"), FP8(format="E5M2"))
        return (*tensorwise, FP8("rowwise"), FP8("rowwise", format="E4M3"))

    def availability(self) -> Availability:
        """Return whether this torch has the function, and the device."""
        if not has_device(self.device):
            return Availability("missing", f"no {self.device} device is visible to torch here")
        needs = "2.13" if self.device == "cpu" else "2.11"  # 2.11 has no kernel of the CPU
        if not holds(f">={needs}"):
            return Availability("missing", f"needs torch {needs}: pip install 'torch>={needs}'")
        return QuantisingBackend.availability(self)

    def linear(self) -> Callable[..., Any]:
        """Return the layer."""
        return scaled_linear()  # type: ignore[no-any-return]

    def linear_source(self) -> tuple[str, str]:
        """Return the source of the layer, and the call that makes it."""
        return source_of(scaled_linear), "scaled_linear()"

    def convention(self) -> reference.Convention:
        """Return what the layer does."""
        return reference.Convention(product=reference.functional_scaled_mm, again=False)

    def facts(self) -> Facts:
        """Return facts for issues."""
        return Facts(
            area="float8",
            made="with `torch.nn.functional.scaled_mm`",
            implements=("backend=scaled_mm",),
        )


def backends() -> list[Backend]:
    """Return the layers on the CPU and on CUDA."""
    return [ScaledBackend("cpu"), ScaledBackend("cuda")]
