"""Run a case's source under one implementation of autocast, and observe the results.

The reference and every eager backend use `run`, with the same text and the same inputs. Only the
names `autocast`, `checkpoint`, `custom_fwd`, `custom_bwd`, `custom_op`, `autocast_dtype` and those
of `TRANSFORMS` have other values.
"""

from __future__ import annotations

import importlib
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import CodeType, TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from amp_fuzz import catalogue
from amp_fuzz.backends import accelerator, control_flow, custom_functions, prelude
from amp_fuzz.backends.custom_op import custom_op
from amp_fuzz.backends.determinism import algorithms
from amp_fuzz.backends.residents import Residents
from amp_fuzz.backends.settings import applied
from amp_fuzz.backends.source import driver_source, imports_of, program_source
from amp_fuzz.cases import inputs
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import Program, TensorSpec
from amp_fuzz.reference import KernelCall
from amp_fuzz.reference.casts import is_aliased

__all__ = ["Observation", "Raised", "Runtime", "quiet", "run"]

PROGRAM = "<amp-fuzz program>"
DRIVER = "<amp-fuzz driver>"


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
    in the order of observation. leaked: the changed state; see `changes`. kernels: the autocast
    kernels reached, if the implementation can tell. graphs: how many graphs a compiler made; None
    without a compiler. hits: how many artefacts came from a compiler's caches. platform: for an
    implementation that chooses one itself: ``cpu``, ``gpu`` or ``tpu`` for JAX. elided: the labels
    of values that differ because a compiler may keep more precision than the program asks for.
    breaks: why a compiler left parts to eager, in its words. devices: label -> the type of the
    device that the tensor was on.
    """

    values: dict[str, torch.Tensor | None] = field(default_factory=dict)
    raised: Raised | None = None
    leaked: str | None = None
    kernels: list[KernelCall] = field(default_factory=list)
    seconds: float = 0.0
    graphs: int | None = None
    hits: int = 0
    platform: str = ""
    elided: tuple[str, ...] = ()
    breaks: tuple[str, ...] = ()
    devices: dict[str, str] = field(default_factory=dict)


_CUSTOM = {
    name: getattr(module, name)
    for module in (custom_functions, control_flow)
    for name in module.__all__
}


TRANSFORMS: Mapping[str, Callable[..., Any]] = {
    "functionalize": torch.func.functionalize,
    "grad": torch.func.grad,
    "jacfwd": torch.func.jacfwd,
    "jacrev": torch.func.jacrev,
    "jvp": torch.func.jvp,
    "vmap": torch.func.vmap,
}
"""Torch's own transforms of functions."""


def _itself(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _without_fp8(checkpoint: Callable[..., Any]) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class Runtime:
    """One implementation of autocast on one device.

    state: returns the implementation's whole state of the thread, by name. reset: resets it to the
    state of a fresh thread, after a case that changed it. scope: a context for the whole run (fake
    tensors). fake: tensors have no values. driver: takes the program's globals and returns names
    with other values for the plan's code (the compiled program). noted: called with each observed
    tensor. fp8: returns what stands for FP8 in one run: ``fp8``, ``fp8_linear``, and a checkpoint
    of the one that it is given. follow: called in the thread that starts another, returns a
    function as that thread has to run it: modes and rules are thread-local. place: moves a CPU
    input to where the program works; by default it is copied to `device`. autocast_dtype: a
    context that sets the dtype of contexts that name none. uncompiled: calls a function that a
    compiler leaves to eager. transforms: those of functions, by name. control: the higher-order
    ops; by default what they are documented to be in Python.
    """

    device: str
    autocast: Callable[..., Any]
    checkpoint: Callable[..., Any]
    custom_fwd: Callable[..., Any]
    custom_bwd: Callable[..., Any]
    state: Callable[[], Mapping[str, object]]
    reset: Callable[[], None]
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    fake: bool = False
    noted: Callable[[str, torch.Tensor], None] | None = None
    follow: Callable[[Callable[..., Any]], Callable[..., Any]] = _itself
    driver: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    transforms: Mapping[str, Callable[..., Any]] = field(default_factory=lambda: TRANSFORMS)
    custom_op: Callable[..., Any] = custom_op
    place: Callable[[torch.Tensor], torch.Tensor] | None = None
    autocast_dtype: Callable[..., AbstractContextManager[Any]] = prelude.autocast_dtype
    uncompiled: Callable[..., Any] = prelude.uncompiled
    fp8: Callable[[Callable[..., Any]], Mapping[str, Any]] = _without_fp8
    control: Mapping[str, Any] = field(default_factory=lambda: control_flow.PLAIN)

    def thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in a new thread of the run, and return or raise what it does."""
        return prelude.in_thread(self.follow(function), *args)

    def names(self) -> dict[str, Any]:
        """Return the globals of the case's source, except `observe`."""
        return {
            **_CUSTOM,
            "torch": torch,
            "device": self.device,
            "autocast": self.autocast,
            "checkpoint": self.checkpoint,
            "custom_fwd": self.custom_fwd,
            "custom_bwd": self.custom_bwd,
            **self.transforms,
            "custom_op": self.custom_op,
            "Interrupted": prelude.Interrupted,
            "autocast_dtype": self.autocast_dtype,
            "uncompiled": self.uncompiled,
            "graph": _itself,
            "region": _itself,
            "as_custom_op": prelude.as_custom_op,
            "as_function": prelude.as_function,
            "as_function_apart": prelude.as_function_apart,
            "copy_halves": prelude.copy_halves,
            "cotangent": prelude.cotangent,
            "decided": prelude.decided,
            "forward_ad": prelude.forward_ad,
            "freeze": prelude.freeze,
            "halved": prelude.halved,
            "in_thread": self.thread,
            "nudge": prelude.nudge,
            "recast": prelude.recast,
            "renewed": prelude.renewed,
            "saving_products": prelude.saving_products,
            "set_data": prelude.set_data,
            "sums": prelude.sums,
            "total": prelude.total,
            "trains": prelude.trains,
            "twice": prelude.twice,
            "undecorated": prelude.undecorated,
            "with_hook": prelude.with_hook,
            "with_post_hook": prelude.with_post_hook,
            **self.fp8(self.checkpoint),
            **self.control,
        }


@dataclass(frozen=True, slots=True)
class Compiled:
    """The source of a case, and the code of its program and its driver.

    They are compiled separately because the variants of a relation share a program.
    """

    program: str
    driver: str
    codes: tuple[CodeType, CodeType]
    imports: tuple[str, ...] = ()

    def line(self, filename: str, number: int) -> tuple[int, str] | None:
        """Return the line in the whole source, program first, and its text.

        None: the source has no such line. Code that dynamo makes of a program may have lines of
        other files under the program's name (seen on torch 2.7).
        """
        text = self.program if filename == PROGRAM else self.driver
        before = 0 if filename == PROGRAM else self.program.count("\n") + 2
        lines = text.splitlines()
        return (before + number, lines[number - 1].strip()) if 0 < number <= len(lines) else None


@lru_cache(maxsize=256)
def _program(program: Program) -> tuple[str, CodeType, tuple[str, ...]]:
    catalogue.check(program)
    text = program_source(program)
    return text, _code(text, PROGRAM), imports_of(program)


@lru_cache(maxsize=256)
def compiled(case: Case) -> Compiled:
    """Return a case's source and code. Raises `ProgramError` if the catalogue lacks something."""
    program, code, modules = _program(case.program)
    driver = driver_source(case)
    return Compiled(program, driver, (code, _code(driver, DRIVER)), modules)


def _code(text: str, filename: str) -> CodeType:
    with warnings.catch_warnings():
        # A minimiser may try calls that Python itself warns about: None[0].
        warnings.simplefilter("ignore", SyntaxWarning)
        return compile(text, filename, "exec")


def run(case: Case, runtime: Runtime) -> Observation:
    """Run a case and return the observation, which includes exceptions of the case.

    Values of an accelerator are fetched to the CPU. Raises `accelerator.DeviceFailure` if the
    accelerator fails.
    """
    return _run(case, runtime, compiled(case), {})


def run_marked(
    case: Case, runtime: Runtime, mark: Callable[[int, dict[str, Any]], None]
) -> Observation:
    """Run a case and call `mark` with number and local names before each statement."""
    catalogue.check(case.program)
    program, driver = program_source(case.program, marks=True), driver_source(case)
    codes = _code(program, PROGRAM), _code(driver, DRIVER)
    source = Compiled(program, driver, codes, imports_of(case.program))
    return _run(case, runtime, source, {"mark": mark})


def _run(case: Case, runtime: Runtime, source: Compiled, more: Mapping[str, Any]) -> Observation:
    seen = Observation()
    before = runtime.state()
    start = time.perf_counter()
    plan = case.plan
    with algorithms(plan.deterministic), applied(plan.settings), runtime.scope():
        names = {**runtime.names(), **more, **_imported(source.imports)}
        names["observe"] = _observer(seen, runtime)
        program, driver = source.codes
        exec(program, names)
        if runtime.driver is not None:
            names = {**names, **runtime.driver(names)}
        exec(driver, names)
        away = not runtime.fake and accelerator.computes(runtime.device)
        with accelerator.checked(runtime.device) if away else nullcontext():
            tensors = _inputs(case, runtime)
        (torch if away else torch.default_generator).manual_seed(case.seed)
        try:
            with _staying(case, tensors, names, runtime.thread) as thread:
                if case.plan.thread == "whole":
                    thread(names["drive"], *tensors)
                else:
                    names["drive"](*tensors)
        except Exception as error:  # the case's own; an interrupt passes
            if away:
                accelerator.check(runtime.device, error)
            seen.raised = _raised(error, source)
        if away:
            seen.values = _fetched(seen, runtime)
    seen.seconds = time.perf_counter() - start
    seen.leaked = changes(before, runtime.state())
    if seen.leaked:
        runtime.reset()
    return seen


@contextmanager
def _staying(
    case: Case,
    tensors: Sequence[torch.Tensor],
    names: dict[str, Any],
    thread: Callable[..., Any],
) -> Iterator[Callable[..., Any]]:
    """Follow a case's CPU tensors where all CPU tensors are taken for another device's.

    Returns `thread`, which runs a function in another thread, as that then has to be.
    """
    if not (case.program.mixed and is_aliased("cpu")):
        yield thread
        return
    specs = case.program.inputs
    own = Residents(x for x, s in zip(tensors, specs, strict=True) if s.device)
    cotangent = names["cotangent"]

    def entered(function: Callable[..., Any], *args: Any) -> Any:
        with own:  # modes are thread-local
            return function(*args)

    names["in_thread"] = partial(thread, entered)
    names["cotangent"] = lambda output: own.like(cotangent(output), output)
    with own.followed():
        yield names["in_thread"]


def _fetched(seen: Observation, runtime: Runtime) -> dict[str, torch.Tensor | None]:
    """Return the observed values on the CPU."""
    with _disable_current_modes(), accelerator.checked(runtime.device):  # not part of the case
        return accelerator.fetched(runtime.device, seen.values)


def changes(before: Mapping[str, object], after: Mapping[str, object], how: str = "") -> str | None:
    """Return the changes of a state as text, joined by ``; ``, or None if there are none."""
    parts = [f"{n}: {before[n]} became {after[n]}{how}" for n in before if before[n] != after[n]]
    return "; ".join(parts) or None


def _imported(modules: Iterable[str]) -> dict[str, Any]:
    """Import modules; return the names that ``import`` binds."""
    for module in modules:
        importlib.import_module(module)
    return {root: sys.modules[root] for root in (module.partition(".")[0] for module in modules)}


def _observer(seen: Observation, runtime: Runtime) -> Callable[[str, torch.Tensor | None], None]:
    values = seen.values

    def observe(label: str, tensor: torch.Tensor | None) -> None:
        if tensor is None:
            values[label] = None
        else:
            # A copy: a later in-place op must not change what was observed. (It changes neither
            # dtype nor shape, which is all that a fake tensor has.) Without its history, which may
            # hold this very dictionary through a Python function: no collector sees that cycle.
            # No mode follows the copy: nothing is computed from it.
            with nullcontext() if runtime.noted is None else _disable_current_modes():
                value = tensor.detach()
                values[label] = value if runtime.fake else value.clone()
            seen.devices[label] = tensor.device.type
            if runtime.noted is not None:
                runtime.noted(label, tensor)

    return observe


def _inputs(case: Case, runtime: Runtime) -> list[torch.Tensor]:
    specs = case.program.inputs
    if runtime.fake:
        tensors = [_fake(spec, spec.device or runtime.device) for spec in specs]
    else:
        with _disable_current_modes():  # creating inputs is not part of the case
            tensors = [inputs.tensor(spec, case.seed) for spec in specs]
        place = runtime.place or (lambda x: x.to(runtime.device))
        if runtime.place is not None or runtime.device != "cpu":
            tensors = [x if s.device else place(x) for x, s in zip(tensors, specs, strict=True)]
    return [x.requires_grad_(s.requires_grad) for x, s in zip(tensors, specs, strict=True)]


def _fake(spec: TensorSpec, device: str) -> torch.Tensor:
    strides, dtype = inputs.strides(spec), getattr(torch, spec.dtype)
    return torch.empty_strided(spec.shape, strides, dtype=dtype, device=device)


def _raised(error: Exception, source: Compiled) -> Raised:
    place = 0, ""
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if filename in (PROGRAM, DRIVER):
            place = source.line(filename, traceback.tb_lineno) or place
        traceback = traceback.tb_next
    return Raised(type(error).__name__, _said(error), *place)


def _said(error: Exception) -> str:
    """Return the message of an error as text that can be written, whatever a user's op raises."""
    try:
        text = str(error)
    except Exception as other:
        text = f"({type(other).__name__} in the text of the error)"
    return text.encode(errors="backslashreplace").decode()


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


@contextmanager
def quiet() -> Iterator[Mapping[str, int]]:
    """Silence the warnings of cases: deprecations of the ops themselves are not findings."""
    warn = getattr(torch._C._functorch, "_set_vmap_fallback_warning_enabled")  # noqa: B009
    warn(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield {}
        finally:
            warn(True)
