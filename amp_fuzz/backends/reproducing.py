"""Pieces of source that show a case on torch's own backends and import only torch.

See `amp_fuzz.backends.base.Repros`. These fit a backend that runs a program unchanged, under
``torch.autocast``; other backends override some.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Set

import torch

from amp_fuzz.backends.source import program_source
from amp_fuzz.cases.case import Case, unbroken
from amp_fuzz.cases.program import TensorSpec

__all__ = ["TorchRepros", "opaque", "source_of"]


class TorchRepros:
    """The pieces of a script for a backend that runs programs unchanged."""

    __slots__ = ()

    device: str

    def setup(self, names: Set[str]) -> list[str]:
        """Return the name of the device, and the number of torch's threads."""
        text = f'device = "{self.device}"'
        if self.device == "cpu":
            # The number of threads decides the last bits of a sum.
            text += f"\ntorch.set_num_threads({torch.get_num_threads()})"
        return [text]

    def configuration(self, case: Case) -> str:
        """Return nothing: torch is not configured."""
        return ""

    def source(self, case: Case) -> str:
        """Return the program, without the functions that only compilers leave to eager."""
        return program_source(unbroken(case).program)

    def driver(self, text: str, case: Case) -> str:
        """Return the driver unchanged, but for what only a compiler is given."""
        return text.replace("region(program)", "program").replace("graph(calls)", "calls")

    def placed(self, text: str, spec: TensorSpec) -> str:
        """Return the source of a tensor on the device."""
        return text if self.device == "cpu" else f"{text}.to(device)"

    def cleanup(self) -> list[str]:
        """Return nothing: a run leaves nothing behind."""
        return []


def opaque(driver: str, made: Callable[[str], str]) -> str:
    """Return a driver with its custom op, whose body is the plain program, converted."""
    pattern = r"entered = as_custom_op\(program, (.*)\)"
    return re.sub(pattern, lambda m: f"entered = {made(f'as_custom_op(plain, {m[1]})')}", driver)


def source_of(thing: type | Callable[..., object]) -> str:
    """Return the source of a function or class, for a script."""
    return re.sub(r"  # type: ignore\[[^]]*\]", "", inspect.getsource(thing)).rstrip()
