"""Backends whose kernels can be got wrong: torch is patched while they run, and never otherwise.

`Corrupted` is eager with Python kernels registered over torch's own, below autocast and autograd,
and `Seeded` a rung of ``torch.compile``. Both are inexact: their values go to the rounding oracle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amp_fuzz.backends import Backend
from amp_fuzz.backends.base import Call
from amp_fuzz.backends.compile import CompileBackend
from amp_fuzz.backends.eager import EagerBackend
from amp_fuzz.backends.harness import Observation
from amp_fuzz.cases.case import Case, Plan

__all__ = [
    "Corrupted",
    "Kernel",
    "Noting",
    "Patches",
    "Seeded",
    "Wrong",
    "in_backward",
    "own",
    "reached",
    "wrong_kernels",
]

_CPU: Any = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

Wrong = Callable[..., Any]
"""A wrong kernel: called with the right one and the call's arguments, returns what that would."""

Patches = Callable[[], AbstractContextManager[Any]]


def in_backward() -> bool:
    """Return whether a backward pass runs in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


@dataclass(frozen=True, slots=True)
class Kernel:
    """Torch's own kernel of an op on the CPU, whatever is registered over it later.

    parameters: of the op's schema. keys: included and excluded ones of the thread where it stands
    for another, so that autocast is on inside if it is there.
    """

    name: str
    kernel: Any
    parameters: Sequence[Any]
    keys: tuple[Any, Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it. A number that torch gave for a tensor is made one again."""
        pairs = zip(args, self.parameters, strict=False)
        if any(_is_number(a) and str(p.type) == "Tensor" for a, p in pairs):
            made = tuple(
                self._tensor(a, p, args) for a, p in zip(args, self.parameters, strict=False)
            )
            if any(_is_number(a) and not _fits(a, t) for a, t in zip(args, made, strict=True)):
                return self._beyond(args, kwargs)
            args = made
        with torch._C._ForceDispatchKeyGuard(*(self.keys or _keys())):
            return self.kernel.call_boxed(_CPU, *args, **kwargs)

    def _beyond(self, args: Sequence[Any], kwargs: Any) -> Any:
        """Run it on tensors without dimensions and a number beyond their dtype, such as 65536.

        Such a number decides no dtype beside tensors of one dimension.
        """
        wide = [
            torch.tensor(a, dtype=torch.float64)
            if _is_number(a) and str(p.type) == "Tensor"
            else a.reshape(1)
            if isinstance(a, torch.Tensor)
            else a
            for a, p in zip(args, self.parameters, strict=False)
        ]
        with torch._C._ForceDispatchKeyGuard(*(self.keys or _keys())):
            made = self.kernel.call_boxed(_CPU, *wide, **kwargs)
        return args[0] if self.parameters[0].is_write else made.reshape(())

    def _tensor(self, value: Any, parameter: Any, args: Sequence[Any]) -> Any:
        if not _is_number(value) or str(parameter.type) != "Tensor":
            return value
        if not isinstance(value, float):
            return torch.tensor(value)
        given = [a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
        # A number has no say in the dtype of the result; a tensor has none beside larger ones.
        scalars = all(t.dim() == 0 for t in given)
        wide = any(t.dtype is torch.float64 for t in given)
        dtype = given[0].dtype if given and scalars else torch.float64 if wide else torch.float32
        return torch.tensor(value, dtype=dtype)


@contextmanager
def wrong_kernels(kernels: Mapping[str, Wrong]) -> Iterator[None]:
    """Register kernels over torch's own on the CPU for a block; ``aten.mm.default`` is a name."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, wrong in kernels.items():
            library.impl(_qualified(name), _entry(own(name), wrong), "CPU")
        yield
    finally:
        library._destroy()


def own(name: str) -> Kernel:
    """Return the kernel of an op that torch has on the CPU."""
    _, packet, overload = name.split(".")
    schema = getattr(getattr(torch.ops.aten, packet), overload)._schema
    if not hasattr(torch.library, "get_kernel"):
        pytest.skip("torch 2.7 has no torch.library.get_kernel")
    kernel = torch.library.get_kernel(f"aten::{_qualified(name)}", "CPU")
    return Kernel(name, kernel, schema.arguments)


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex))


def _fits(number: Any, made: Any) -> bool:
    """Return whether a number stayed finite where it was made a tensor."""
    if not isinstance(number, float) or not isinstance(made, torch.Tensor):
        return True
    return not math.isfinite(number) or bool(made.isfinite())


def _qualified(name: str) -> str:
    return name.removeprefix("aten.").removesuffix(".default")


def _keys() -> tuple[Any, Any]:
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def _entry(op: Kernel, wrong: Wrong) -> Callable[..., Any]:
    def entry(*args: Any, **kwargs: Any) -> Any:
        here = replace(op, keys=_keys())
        with torch._C._DisableAutocast():  # what a wrong kernel computes itself is not cast
            return wrong(here, *args, **kwargs)

    return entry


class Noting(TorchDispatchMode):
    """Notes which ops run: ``aten.mm.default``, and ``backward:aten.mm.default`` as well.

    Where all tensors that an op is given are float32, also ``float32:aten.mm.default`` and
    ``backward:float32:aten.mm.default``.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reached: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note an op, and run it."""
        names = [str(func)]
        if all(t.dtype is torch.float32 for t in tree_leaves(args) if isinstance(t, torch.Tensor)):
            names.append(f"float32:{func}")
        self.reached.update(names)
        if in_backward():
            self.reached.update(f"backward:{name}" for name in names)
        return func(*args, **(kwargs or {}))


def reached(case: Case) -> frozenset[str]:
    """Return what `Noting` notes of a case on honest eager.

    Modes are of a thread: the case is run in this one. In composite ops a mode makes autocast act
    again, so the dtypes that are noted are not always those of a plain run.
    """
    noting = Noting()
    with noting:
        EagerBackend("cpu").run([replace_plan(case, thread="none")])
    return frozenset(noting.reached)


def replace_plan(case: Case, **changes: Any) -> Case:
    """Return a case with another plan."""
    return msgspec.structs.replace(case, plan=msgspec.structs.replace(case.plan, **changes))


@dataclass(frozen=True)
class Corrupted(EagerBackend):
    """Eager on the CPU in a torch whose kernels are replaced, held to the rounding oracle."""

    device: str = "cpu"
    exact: bool = False
    patches: Patches = field(default=nullcontext, compare=False)

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Run cases one by one in the patched torch."""
        with self.patches():
            return EagerBackend.run(self, cases)


@dataclass(frozen=True)
class Seeded(CompileBackend):
    """A rung of ``torch.compile`` in a torch that is patched while it runs, as are those below."""

    patches: Patches = field(default=nullcontext, compare=False)

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Compile and run cases in the patched torch."""
        with self.patches():
            return CompileBackend.run(self, cases)

    def called(self, function: Callable[..., Any], plan: Plan, call: Call) -> Observation:
        """Compile and call a callable in the patched torch."""
        with self.patches():
            return CompileBackend.called(self, function, plan, call)

    def ladder(self) -> Sequence[Backend]:
        """Return the rungs below this one, patched too."""
        rungs = CompileBackend.ladder(self)
        return [replace(self, rung=r.rung) for r in rungs if isinstance(r, CompileBackend)]
