"""Run a case's source under one implementation of autocast and write down what happened.

The reference and every eager backend go through `run`: the same text, the same inputs, and only the
names `autocast`, `checkpoint`, `custom_fwd` and `custom_bwd` mean something else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, TracebackType
from typing import Any

import torch

from amp_fuzz import catalogue, inputs, prelude
from amp_fuzz.case import Case
from amp_fuzz.program import TensorSpec
from amp_fuzz.reference import KernelCall
from amp_fuzz.source import case_source

__all__ = ["Observation", "Raised", "Runtime", "run"]

FILENAME = "<amp-fuzz case>"


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception of a case: its type, message, and the line of the case's source it came from."""

    kind: str
    message: str
    line: int
    text: str


@dataclass(slots=True)
class Observation:
    """What one implementation did with a case.

    values: label -> a detached copy of the tensor observed there, or None for a missing gradient,
    in the order of observation. state: the autocast state after, if it is not what it was before.
    kernels: the autocast kernels reached, where the implementation can tell.
    """

    values: dict[str, torch.Tensor | None] = field(default_factory=dict)
    raised: Raised | None = None
    leaked: str | None = None
    kernels: list[KernelCall] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Runtime:
    """One implementation of autocast on one device.

    state: returns the implementation's whole autocast state, comparable. reset: puts it back to
    that of a fresh thread, after a case that left it otherwise. scope: a context for the whole run
    (fake tensors). fake: tensors have no values.
    """

    device: str
    autocast: Callable[..., Any]
    checkpoint: Callable[..., Any]
    custom_fwd: Callable[..., Any]
    custom_bwd: Callable[..., Any]
    state: Callable[[], tuple[object, ...]]
    reset: Callable[[], None]
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    fake: bool = False

    def names(self) -> dict[str, Any]:
        """Return the globals of the case's source, all but `observe`."""
        return {
            "torch": torch,
            "device": self.device,
            "autocast": self.autocast,
            "checkpoint": self.checkpoint,
            "custom_fwd": self.custom_fwd,
            "custom_bwd": self.custom_bwd,
            "Interrupted": prelude.Interrupted,
            "as_function": prelude.as_function,
            "cotangent": prelude.cotangent,
            "in_thread": prelude.in_thread,
            "nudge": prelude.nudge,
            "trains": prelude.trains,
        }


@lru_cache(maxsize=256)
def compiled(case: Case) -> tuple[str, CodeType]:
    """Return a case's source and its code. Raises `ProgramError` for what the catalogue lacks."""
    catalogue.check(case.program)
    text = case_source(case)
    return text, compile(text, FILENAME, "exec")


def run(case: Case, runtime: Runtime) -> Observation:
    """Run a case and return what was observed; exceptions of the case are part of it."""
    return _run(case, runtime, *compiled(case), {})


def run_marked(
    case: Case, runtime: Runtime, mark: Callable[[int, dict[str, Any]], None]
) -> Observation:
    """Run a case and call `mark` with number and local names before each statement."""
    catalogue.check(case.program)
    text = case_source(case, marks=True)
    return _run(case, runtime, text, compile(text, FILENAME, "exec"), {"mark": mark})


def _run(
    case: Case, runtime: Runtime, text: str, code: CodeType, more: Mapping[str, Any]
) -> Observation:
    seen = Observation()
    before = runtime.state()
    start = time.perf_counter()
    with runtime.scope():
        names = {**runtime.names(), **more}
        names["observe"] = _observer(seen.values, fake=runtime.fake)
        exec(code, names)
        tensors = [_materialise(spec, case.seed, runtime) for spec in case.program.inputs]
        torch.default_generator.manual_seed(case.seed)
        try:
            if case.plan.thread == "whole":
                prelude.in_thread(names["drive"], *tensors)
            else:
                names["drive"](*tensors)
        except Exception as error:  # the case's own; an interrupt passes
            seen.raised = _raised(error, text)
    seen.seconds = time.perf_counter() - start
    after = runtime.state()
    if after != before:
        seen.leaked = f"{before} became {after}"
        runtime.reset()
    return seen


def _observer(
    values: dict[str, torch.Tensor | None], *, fake: bool
) -> Callable[[str, torch.Tensor | None], None]:
    def observe(label: str, tensor: torch.Tensor | None) -> None:
        if tensor is None:
            values[label] = None
        else:
            # A copy: a later in-place op must not change what was seen here.
            values[label] = tensor.detach() if fake else tensor.detach().clone()

    return observe


def _materialise(spec: TensorSpec, seed: int, runtime: Runtime) -> torch.Tensor:
    if runtime.fake:
        strides, dtype = inputs.strides(spec), getattr(torch, spec.dtype)
        fake = torch.empty_strided(spec.shape, strides, dtype=dtype, device=runtime.device)
        return fake.requires_grad_() if spec.requires_grad else fake
    tensor = inputs.tensor(spec, seed)
    if runtime.device != "cpu":
        tensor = tensor.to(runtime.device)
    return tensor.requires_grad_() if spec.requires_grad else tensor


def _raised(error: Exception, text: str) -> Raised:
    line = 0
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == FILENAME:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    lines = text.splitlines()
    source = lines[line - 1].strip() if line else ""
    return Raised(type(error).__name__, str(error), line, source)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as integers of the same width (complex as pairs)."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_floating_point():
        return tensor.view(_INTEGERS[tensor.element_size()])
    return tensor


_INTEGERS: Mapping[int, torch.dtype] = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}
