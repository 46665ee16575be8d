"""A fault for each model on each kind of backend, and the place that a check has to name.

Eager and ``compile[aot_eager]`` run a wrong kernel of the CPU, a fake device an autocast kernel
that casts to another dtype, and Inductor a wrong lowering.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from amp_fuzz.backends import Backend
from amp_fuzz.backends.compile import CompileBackend
from amp_fuzz.backends.eager import EagerBackend
from amp_fuzz.backends.fake import FakeBackend
from amp_fuzz.backends.harness import Observation, Runtime
from amp_fuzz.cases.case import Case, Plan
from tests.faults.corrupted import wrong_kernels
from tests.faults.wrapper import overload_of

__all__ = [
    "COMPILED",
    "FAKED",
    "FAULTS",
    "LOWERED",
    "Broken",
    "BrokenCompiler",
    "BrokenFake",
    "Fault",
    "Named",
    "kernels",
    "lowering",
]

Kernels = Mapping[str, Callable[..., Any]]


class Fault(NamedTuple):
    """Wrong kernels by name, and the submodule and op that a check of the model has to name."""

    kernels: Kernels
    module: str
    op: str


class Named(NamedTuple):
    """An op of ATen that is wrong, and the submodule and op that a check has to name."""

    wrong: str
    module: str
    op: str


@dataclass(frozen=True)
class Broken(EagerBackend):
    """Eager on the CPU in a torch that is patched while it runs."""

    device: str = "cpu"
    patches: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext, compare=False)

    def runtime(self, **more: Any) -> Runtime:
        return EagerBackend.runtime(self, **{"scope": self.patches, **more})


@dataclass(frozen=True)
class BrokenUnderAutocast(Broken):
    """The same in a torch that is patched only while autocast is around the call."""

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        return [seen for case in cases for seen in self._under(case.plan).run([case])]

    def called(self, function: Callable[..., Any], plan: Plan, call: Any) -> Observation:
        return self._under(plan).called(function, plan, call)

    def _under(self, plan: Plan) -> EagerBackend:
        return Broken(patches=self.patches) if plan.contexts else EagerBackend("cpu")


@dataclass(frozen=True)
class BrokenCompiler(CompileBackend):
    """A rung of torch.compile in a torch that is patched while it runs, as are those below."""

    patches: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext, compare=False)

    def runtime(self, **more: Any) -> Runtime:
        return CompileBackend.runtime(self, **{"scope": self.patches, **more})

    def ladder(self) -> list[Backend]:
        rungs = CompileBackend.ladder(self)
        return [replace(self, rung=r.rung) for r in rungs if isinstance(r, CompileBackend)]


@dataclass(frozen=True)
class BrokenFake(FakeBackend):
    """A fake device whose autocast casts the inputs of one op, ``conv2d``, to float32."""

    device: str = "cuda"
    op: str = ""

    def runtime(self, **more: Any) -> Runtime:
        return FakeBackend.runtime(self, **{"scope": self.patched, **more})

    @contextmanager
    def patched(self) -> Iterator[None]:
        key: Any = getattr(torch._C.DispatchKey, f"Autocast{self.device.upper()}")
        op: Any = overload_of(self.op)

        def wide(value: Any) -> Any:
            floating = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.float() if floating else value

        def entry(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
                return op(*tree_map(wide, args), **kwargs)

        library = torch.library.Library("aten", "IMPL")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "Overriding a previously registered kernel"
                library.impl(self.op, entry, key.name)
            with FakeBackend.scope(self):
                yield
        finally:
            library._destroy()


def kernels(wrong: Kernels) -> Callable[[], AbstractContextManager[Any]]:
    """Return what patches torch with these kernels for a block."""
    return lambda: wrong_kernels(wrong)


def _times(gain: float) -> Callable[..., Any]:
    return lambda op, *args, **kwargs: op(*args, **kwargs) * gain


def _first_times(gain: float, where: Callable[..., bool] = lambda *args: True) -> Any:
    """Return a kernel whose first result is wrong for the arguments that `where` takes."""

    def wrong(op: Any, *args: Any, **kwargs: Any) -> Any:
        first, *rest = op(*args, **kwargs)
        return first * gain if where(*args) else first, *rest

    return wrong


def _only_times(gain: float, where: Callable[..., bool]) -> Callable[..., Any]:
    def wrong(op: Any, *args: Any, **kwargs: Any) -> Any:
        made = op(*args, **kwargs)
        return made * gain if where(*args) else made

    return wrong


def _of_16(x: Any, *args: Any) -> bool:
    return bool(x.shape[1] == 16)


def _deep(x: Any, w: Any, *args: Any) -> bool:
    return tuple(w.shape) == (16, 16, 3, 3)


def _to_64(bias: Any, a: Any, b: Any, *args: Any) -> bool:
    return bool(b.shape[1] == 64)


# AOTAutograd has an op of its own for the one, whose buffers are results.
_BATCH_NORMS = ("aten.native_batch_norm.default", "aten._native_batch_norm_legit.default")
_CONVOLUTIONS = ("aten.convolution.default", "aten.mkldnn_convolution.default")


def _wrong_by(gain: float) -> dict[str, Fault]:
    """Return a fault for each model: a kernel whose result is so many times what it should be."""
    times, first = _times(gain), _first_times(gain)
    of_16 = _first_times(gain, _of_16)
    return {
        "checkpoint": Fault({"aten.gelu.default": times}, "blocks.0.2", "gelu"),
        "cnn": Fault(dict.fromkeys(_BATCH_NORMS, of_16), "features.5", "batch_norm"),
        "custom-function": Fault({"aten.relu.default": times}, "", "relu"),
        "encoder-decoder": Fault(
            {"aten.relu.default": times},
            "transformer.encoder.layers.0",
            "relu",
        ),
        "gpt": Fault({"aten.silu.default": times}, "layers.0.mlp", "silu"),
        "gru-tagger": Fault({"aten.embedding.default": times}, "embed", "embedding"),
        "moe": Fault({"aten.index_add.default": times}, "", "index_add"),
        "resnet": Fault(
            dict.fromkeys(_CONVOLUTIONS, _only_times(gain, _deep)), "stages.1.conv2", "conv2d"
        ),
        "scaler": Fault({"aten.relu.default": times}, "model.1", "relu"),
        "tagger": Fault({"aten.embedding.default": times}, "embed", "embedding"),
        "unet": Fault({"aten.native_group_norm.default": of_16}, "deep.body.1", "group_norm"),
        "vit": Fault(
            {"aten.addmm.default": _only_times(gain, _to_64)}, "encoder.layers.0.linear1", "linear"
        ),
        "weight-norm": Fault(
            {"aten._weight_norm_interface.default": first},
            "conv.parametrizations.weight.0",
            "_weight_norm",
        ),
    }


FAULTS = _wrong_by(1.01)
"""For eager, whose bits are the reference's."""

COMPILED = _wrong_by(1.5)
"""For compilers: a hundredth more is within the rounding of bfloat16."""

_ATTENTION = "multi_head_attention_forward"
FAKED = {
    "checkpoint": Named("linear", "blocks.0.1", "linear"),
    "cnn": Named("conv2d", "features.0", "conv2d"),
    "custom-function": Named("mm", "", "mm"),
    "encoder-decoder": Named("linear", "transformer.encoder.layers.0.self_attn", _ATTENTION),
    "gpt": Named("scaled_dot_product_attention", "layers.0.attn", "scaled_dot_product_attention"),
    "moe": Named("linear", "experts.0.0", "linear"),
    "resnet": Named("conv2d", "stem.0", "conv2d"),
    "tagger": Named("linear", "out", "linear"),
    "unet": Named("conv_transpose2d.input", "up", "conv_transpose2d"),
    "vit": Named("conv2d", "patch", "conv2d"),
    "weight-norm": Named("conv1d", "conv", "conv1d"),
}
"""For cuda's autocast on fake tensors. PyTorch's GRU and GradScaler ask for a real device."""

LOWERED = {
    "checkpoint": Named("erf.default", "blocks.0.2", "gelu"),
    "cnn": Named("relu.default", "features.2", "relu"),
    "custom-function": Named("relu.default", "", "relu"),
    "encoder-decoder": Named("relu.default", "transformer.encoder.layers.0", "relu"),
    "gpt": Named("sigmoid.default", "layers.0.mlp", "silu"),
    "moe": Named("erf.default", "experts.0.1", "gelu"),
    "resnet": Named("relu.default", "stem.2", "relu"),
    "unet": Named("sigmoid.default", "enter.body.2", "silu"),
    "vit": Named("erf.default", "encoder.layers.0", "gelu"),
    "weight-norm": Named("tanh.default", "", "tanh"),
}
"""For Inductor. Dynamo leaves modules with an RNN to eager, and the model of `scaler`'s steps."""


def lowering(op: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return what makes Inductor's results of an op half as large again for a block."""

    @contextmanager
    def corrupt() -> Iterator[None]:
        from torch._inductor.lowering import lowerings

        overload: Any = overload_of(op)
        honest, times = lowerings[overload], lowerings[torch.ops.aten.mul]
        lowerings[overload] = lambda *args, **kwargs: times(honest(*args, **kwargs), 1.5)
        try:
            yield
        finally:
            lowerings[overload] = honest

    return corrupt
