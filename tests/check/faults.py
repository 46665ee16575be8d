"""One fault for each model: kernels of torch on the CPU that are wrong, and the place to name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from amp_fuzz.backends.eager import EagerBackend
from amp_fuzz.harness import Runtime
from tests.faults.corrupted import wrong_kernels

__all__ = ["FAULTS", "Broken", "Fault", "kernels"]

Kernels = Mapping[str, Callable[..., Any]]


class Fault(NamedTuple):
    """Wrong kernels by name, and the submodule and op that a check of the model has to name."""

    kernels: Kernels
    module: str
    op: str


@dataclass(frozen=True)
class Broken(EagerBackend):
    """Eager on the CPU in a torch that is patched while it runs."""

    device: str = "cpu"
    patches: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext, compare=False)

    def runtime(self, **more: Any) -> Runtime:
        return EagerBackend.runtime(self, **{"scope": self.patches, **more})


def kernels(wrong: Kernels) -> Callable[[], AbstractContextManager[Any]]:
    """Return what patches torch with these kernels for a block."""
    return lambda: wrong_kernels(wrong)


def _gain(op: Any, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs) * 1.01


def _gained(op: Any, *args: Any, **kwargs: Any) -> Any:
    first, *rest = op(*args, **kwargs)
    return first * 1.01, *rest


def _gained_of_16(op: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    return (_gained if x.shape[1] == 16 else lambda op, *a, **k: op(*a, **k))(
        op, x, *args, **kwargs
    )


def _deep_convolution(op: Any, x: Any, w: Any, b: Any, *args: Any) -> Any:
    out = op(x, w, b, *args)
    return out * 1.01 if tuple(w.shape) == (16, 16, 3, 3) else out


def _product_to(width: int) -> Callable[..., Any]:
    def addmm(op: Any, bias: Any, a: Any, b: Any, **kwargs: Any) -> Any:
        out = op(bias, a, b, **kwargs)
        return out * 1.01 if b.shape[1] == width else out

    return addmm


_CONVOLUTIONS = ("aten.convolution.default", "aten.mkldnn_convolution.default")
FAULTS: dict[str, Fault] = {
    "checkpoint": Fault({"aten.gelu.default": _gain}, "blocks.0.2", "gelu"),
    "cnn": Fault({"aten.native_batch_norm.default": _gained_of_16}, "features.5", "batch_norm"),
    "custom-function": Fault({"aten.relu.default": _gain}, "", "relu"),
    "encoder-decoder": Fault(
        {"aten.relu.default": _gain}, "transformer.encoder.layers.0", "torch.nn.functional.relu"
    ),
    "gpt": Fault({"aten.silu.default": _gain}, "layers.0.mlp", "silu"),
    "gru-tagger": Fault({"aten.embedding.default": _gain}, "embed", "embedding"),
    "moe": Fault({"aten.index_add.default": _gain}, "", "index_add"),
    "resnet": Fault(dict.fromkeys(_CONVOLUTIONS, _deep_convolution), "stages.1.conv2", "conv2d"),
    "scaler": Fault({"aten.relu.default": _gain}, "model.1", "torch.nn.functional.relu"),
    "tagger": Fault({"aten.embedding.default": _gain}, "embed", "embedding"),
    "unet": Fault({"aten.native_group_norm.default": _gained_of_16}, "deep.body.1", "group_norm"),
    "vit": Fault({"aten.addmm.default": _product_to(64)}, "encoder.layers.0.linear1", "linear"),
    "weight-norm": Fault(
        {"aten._weight_norm_interface.default": _gained},
        "conv.parametrizations.weight.0",
        "_weight_norm",
    ),
}
