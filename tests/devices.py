"""Devices in Python that compute as CUDA may, for tests.

A process can have one such device, so each check on it runs in a fork.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import amp_fuzz
from amp_fuzz.backends import privateuse1
from amp_fuzz.backends.privateuse1 import tensor
from tests.forks import forked

__all__ = ["check_on", "install"]


def install(name: str, kernel: Callable[..., Any]) -> None:
    """Make a device this process's PrivateUse1: CUDA's policies, and other kernels than the CPU's.

    Nothing happens if this torch supports no device in Python.
    """
    if not privateuse1.supported():
        return
    privateuse1.install("cuda", device=name)
    module: Any = getattr(torch, name)
    module.computes_as = lambda: "cuda"
    tensor.kernel = kernel


def check_on(name: str, check: Callable[[], None], folder: Path) -> None:
    """Run a check in a fork that has the device of ``tests.NAME``."""
    root = Path(amp_fuzz.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root), "AMP_FUZZ_DEVICE": name}
    environment |= {"AMP_FUZZ_POLICIES": "cuda", "AMP_FUZZ_PLUGINS": f"tests.{name}"}
    words = (name, check.__module__, check.__name__)
    place: dict[str, Any] = {"folder": folder, "environment": environment, "files": folder}
    done = forked(_run, words, **place, seconds=300)
    assert done.code == 0, done.out + done.err


def _run(words: list[str]) -> int:
    name, module, check = words
    importlib.import_module(f"tests.{name}")
    getattr(importlib.import_module(module), check)()
    return 0
