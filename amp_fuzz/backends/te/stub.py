"""The Python code of Transformer Engine on a CPU, over an extension that is a stub.

Transformer Engine's wheel is Python alone; its kernels are in another package, which needs CUDA.
With a stub in its place, and CPU tensors where it asks for CUDA's, the real modules run: their
autograd functions, argument dataclasses, saved tensors and global state. `install` changes its
process permanently, so a backend does it in a process of its own.

The stub has the kernels of `amp_fuzz.backends.te.kernels`. Delayed scales are updated by
Transformer Engine's own code in Python, not by its fused kernel.
"""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import inspect
import os
import shlex
import sys
import sysconfig
import textwrap
import types
from functools import partial
from pathlib import Path
from typing import Any

import torch

from amp_fuzz.backends.te.kernels import KERNELS

__all__ = ["VERSION", "folder", "how", "install"]

VERSION = "2.20.2"
"""The version that the changes below fit: they name lines of it."""


def folder() -> Path:
    """Return the folder of the code in this environment, which is on no path.

    Packages that find Transformer Engine among the installed ones import its kernels: without
    them, ``import peft`` raises.
    """
    shared = Path(sysconfig.get_path("data"), "share", "amp-fuzz")
    return shared / f"transformer-engine-{VERSION}"


def how() -> str:
    """Return the command that fills the folder."""
    target = shlex.quote(f"--target={folder()}")
    return f"pip install --no-deps {target} transformer-engine=={VERSION}"


# Packages that need triton, ONNX or einops, and that a linear layer never calls.
_UNUSED = (
    "transformer_engine.common.triton",
    "transformer_engine.pytorch.attention",
    "transformer_engine.pytorch.onnx_extensions",
    "transformer_engine.pytorch.triton",
)
# Those whose numbers count: they are indices.
_ENUMERATIONS = {
    "DType": "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1",
    "FP8FwdTensors": " ".join(
        f"GEMM{i}_{role}" for i in (1, 2, 3) for role in ("INPUT", "WEIGHT", "OUTPUT")
    ),
    "FP8BwdTensors": " ".join(f"GRAD_{role}{i}" for i in (1, 2, 3) for role in ("OUTPUT", "INPUT")),
}


class _Enumeration(type):
    """A class whose attributes are numbers, made when they are first read."""

    @property
    def __members__(cls) -> dict[str, int]:
        return {name: value for name, value in vars(cls).items() if isinstance(value, int)}

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, len(cls.__members__))
        return getattr(cls, name)  # type: ignore[no-any-return]


class _Stub(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _Enumeration(name, (), {}))
        return getattr(self, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stubs of the packages that are not used."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if any(name == root or name.startswith(f"{root}.") for root in _UNUSED):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> Any:
    """Return ``transformer_engine.pytorch``, with the CPU in the place of CUDA.

    Raises ImportError if the code is not there, or not as expected.
    """
    code = folder() / "transformer_engine"
    if not code.is_dir():
        raise ImportError(f"te-python needs the code of Transformer Engine: {how()}")
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # do not load the core library
    os.environ["NVTE_UNFUSED_FP8_UPDATE"] = "1"
    os.environ["NVTE_TORCH_COMPILE"] = "0"  # not for rules of one line
    # Without its __init__, which imports every framework and their extensions.
    package = types.ModuleType("transformer_engine")
    package.__path__ = [str(code)]
    sys.modules["transformer_engine"] = package
    extension: Any = _Stub("transformer_engine_torch")
    for name, members in _ENUMERATIONS.items():
        setattr(extension, name, enum.IntEnum(name, members, start=0))
    for kernel in KERNELS:
        setattr(extension, kernel.__name__, kernel)
    sys.modules["transformer_engine_torch"] = extension
    sys.meta_path.insert(0, _Finder())
    from transformer_engine import common

    common.load_framework_extension = lambda framework: None
    import transformer_engine.pytorch as te

    _on_the_cpu()
    return te


def _on_the_cpu() -> None:
    from transformer_engine.pytorch import distributed, quantization, utils
    from transformer_engine.pytorch.cpp_extensions import gemm
    from transformer_engine.pytorch.module import base
    from transformer_engine.pytorch.tensor.storage import float8_tensor_storage as storage

    module = base.TransformerEngineBaseModule
    torch.cuda.is_available = lambda: True
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    utils._get_device_compute_capability = lambda device: (9, 0)
    _revise(base, module, "prepare_forward", "if not inp.is_cuda:", "if False:")
    _revise(
        base,
        module,
        "set_activation_dtype",
        "torch.is_autocast_enabled()",
        'torch.is_autocast_enabled("cpu")',
    )
    base.torch_get_autocast_gpu_dtype = lambda: torch.get_autocast_dtype("cpu")
    gemm.get_cublas_workspace_size_bytes = lambda: 1
    gemm.get_cublas_workspace.cache_clear()
    quantization._FP8_SUPPORT = True, ""
    state = quantization.RecipeState
    state.create = staticmethod(partial(state.create, device=torch.device("cpu")))
    # A checkpoint moves the state of the CPU's generator itself.
    distributed._get_cuda_rng_state = lambda graph_safe: None
    distributed._set_cuda_rng_state = lambda state, graph_safe: None
    utils._empty_tensor = storage._empty_tensor = lambda: torch.tensor([])


def _revise(module: Any, owner: Any, name: str, old: str, new: str) -> None:
    """Replace a line of a method, which must be there."""
    text = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    if text.count(old) != 1:
        raise ImportError(f"{owner.__name__}.{name} does not have the line {old!r}")
    made: dict[str, Any] = {}
    exec(compile(text.replace(old, new), module.__file__, "exec"), vars(module), made)
    setattr(owner, name, made[name])
