"""Backends whose kernels can be got wrong: eager by a dispatch mode, compilers by patches.

Only the backend under test is corrupted, never the reference: `Corrupted` enters the mode around
the runs of its own cases, in their threads too, and `Seeded` patches torch around those of a rung.
Both are inexact, so that their values go to the rounding oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amp_fuzz import harness, prelude
from amp_fuzz.backends import Backend
from amp_fuzz.backends.compiled import CompileBackend
from amp_fuzz.backends.eager import EagerBackend
from amp_fuzz.backends.torchstate import reset_state, torch_state
from amp_fuzz.case import Case
from amp_fuzz.harness import Observation, Runtime

__all__ = ["Corrupted", "Noting", "Seeded", "Wrong", "WrongKernels", "in_backward"]

Wrong = Callable[..., Any]
"""A wrong kernel: called with the op and the call's arguments, returns what the op would."""

Modes = Callable[[], AbstractContextManager[Any]]


def in_backward() -> bool:
    """Return whether a backward pass runs in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


class WrongKernels(TorchDispatchMode):
    """Calls other kernels for some ops, named as in ``aten.mm.default``; honest without any."""

    def __init__(self, kernels: Mapping[str, Wrong]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = kernels

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an op by the kernel in its place."""
        kernel = self.kernels.get(str(func))
        if kernel is None:
            return func(*args, **(kwargs or {}))
        with torch._C._DisableAutocast():  # what a kernel calls inside is not cast
            return kernel(func, *args, **(kwargs or {}))


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


@dataclass(frozen=True)
class Corrupted(EagerBackend):
    """Eager on the CPU under a dispatch mode, and held to the rounding oracle."""

    device: str = "cpu"
    exact: bool = False
    mode: Modes = field(default=nullcontext, compare=False)

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Run cases one by one; the mode is around each."""

        def in_thread(function: Callable[..., Any], *args: Any) -> Any:
            def follow() -> Any:
                with self.mode():  # modes are of a thread
                    return function(*args)

            return prelude.in_thread(follow)

        runtime = Runtime(
            device=self.device,
            autocast=torch.autocast,
            checkpoint=torch.utils.checkpoint.checkpoint,
            custom_fwd=torch.amp.custom_fwd,
            custom_bwd=torch.amp.custom_bwd,
            state=lambda: torch_state(self.device),
            reset=lambda: reset_state(self.device),
            scope=self.mode,
            thread=in_thread,
        )
        return [harness.run(case, runtime) for case in cases]


@dataclass(frozen=True)
class Seeded(CompileBackend):
    """A rung of ``torch.compile`` in a torch that is patched while it runs, as are those below."""

    patches: Modes = field(default=nullcontext, compare=False)

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Compile and run cases in the patched torch."""
        with self.patches():
            return CompileBackend.run(self, cases)

    def ladder(self) -> Sequence[Backend]:
        """Return the rungs below this one, patched too."""
        rungs = CompileBackend.ladder(self)
        return [replace(self, rung=r.rung) for r in rungs if isinstance(r, CompileBackend)]
