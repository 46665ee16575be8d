"""TorchScript: ``torch.jit.script``, ``torch.jit.trace`` and ``torch.jit.freeze`` on the CPU.

The program is scripted, or traced, and called three times before its results count: the first call
profiles, the second optimises, and only then the optimised graph runs. The plan's contexts are
around the scripted program; its regions, and the context of the ``decorator`` entry, are inside it.
TorchScript adds casts by its own list, which is documented
(`amp_fuzz.backends.torchscript_autocast`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias

import torch
import torch.backends.opt_einsum
from torch.autograd import profiler

from amp_fuzz.backends import harness, imitation, prelude
from amp_fuzz.backends.base import Availability, Backend, Facts, documentation
from amp_fuzz.backends.export import HOOKED
from amp_fuzz.backends.graph_ops import graph_op
from amp_fuzz.backends.harness import Observation, Runtime
from amp_fuzz.backends.reference import ReferenceRuntime
from amp_fuzz.backends.reproducing import TorchRepros
from amp_fuzz.backends.source import program_source, setup_source
from amp_fuzz.backends.torch_base import TorchBackend, numbers, under
from amp_fuzz.backends.torchscript_autocast import (
    Ambient,
    decompose_addmm,
    fallback_of,
    inline,
    name_values,
    shown_casts,
    write_casts,
    write_casts_again,
)
from amp_fuzz.backends.torchscript_unit import fresh_unit, usable
from amp_fuzz.cases.case import CUSTOM_OPS, Case, inferring, uses_autocast
from amp_fuzz.cases.program import (
    Autocast,
    Branch,
    Checkpoint,
    InferenceMode,
    NoGrad,
    Uncompiled,
    statements,
    unwrapped,
)
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.reference.autocast import snapshot, torch_answers
from amp_fuzz.versions import holds

__all__ = ["ScriptBackend", "backends", "script_source"]

Names: TypeAlias = Mapping[str, Any]
Mode: TypeAlias = Literal["script", "trace"]
PROBED = 3  # calls until a graph is optimised

_MADE: Mapping[Mode, str] = {"script": "scripted", "trace": "traced"}

# A scripted function cannot create a module, and torch rejects tracing a module that is called
# with weights other than its own.
_UNSAYABLE_CALLS: Mapping[Mode, re.Pattern[str]] = {
    "script": re.compile(r"torch\.nn\.[A-Z]"),
    "trace": re.compile(r"functional_call"),
}
# TorchScript needs several out= as keywords with their own names.
_SEVERAL_OUT = (
    "aminmax cummax cummin geqrf kthvalue linalg.cholesky_ex linalg.eig linalg.eigh linalg.inv_ex "
    "linalg.ldl_factor linalg.lstsq linalg.lu linalg.lu_factor linalg.qr linalg.solve_ex "
    "linalg.svd max max.dim median.dim min min.dim mode nanmedian.dim qr slogdet sort svd topk "
    "triangular_solve"
)
# Its language also lacks methods, comprehensions, ellipses with tensors, function arguments.
_REFUSED = frozenset(
    {
        *((op, "out") for op in _SEVERAL_OUT.split()),
        ("bfloat16", "method"),
        ("bool", "method"),
        ("ctc_loss.lists", "function"),
        *(() if holds("<2.10") else [("gaussian_nll_loss", "function")]),
        ("getitem.last", "operator"),
        ("linear_cross_entropy", "function"),
        ("lu", "method"),
        ("sparse.sum", "function"),
        ("triplet_margin_with_distance_loss", "function"),
    }
)


@dataclass(frozen=True, slots=True)
class ScriptBackend(TorchRepros, TorchBackend):
    """``torch.jit.script(program)`` or ``torch.jit.trace(program, inputs)`` on the CPU.

    calls: the call whose results count; with 1 no call runs an optimised graph, however often the
    plan calls. freeze: the program is a frozen module with the weights as its parameters; its plans
    only infer. check: a module with the weights as its parameters is traced, and a second trace
    checks the first, as `torch.jit.trace` does by default.
    """

    mode: Mode
    calls: int = 3
    freeze: bool = False
    check: bool = False
    exact: bool = field(default=False, kw_only=True)

    @property
    def name(self) -> str:
        """``script``, ``trace``, ``script[freeze]``, ``script[first-call]``, ..."""
        labels = {"freeze": self.freeze, "check": self.check, "first-call": self.calls == 1}
        label = "+".join(name for name, on in labels.items() if on)
        return f"{self.mode}[{label}]" if label else self.mode

    @property
    def saves(self) -> bool:
        """Whether a program can be saved and loaded: a module's weights would be others."""
        return not self.check and self.calls > 1

    def availability(self) -> Availability:
        """Return whether TorchScript can compile independent programs here."""
        problem = usable()
        if problem:
            return Availability("broken", problem)
        return TorchBackend.availability(self)

    def supports(self, op: str, form: str) -> bool:
        """Return whether a call can be traced, or expressed in TorchScript's language."""
        if CATALOGUE[op].family == "control_flow":
            return False
        if self.mode == "script" and CATALOGUE[op].setup and not _is_custom_op(op):
            return False  # a custom function is Python
        if op in HOOKED:
            return False
        if _UNSAYABLE_CALLS[self.mode].search(CATALOGUE[op].forms.get(form, "")):
            return False
        return self.mode == "trace" or (op, form) not in _REFUSED

    def fit(self, case: Case) -> Case:
        """Return the case without what TorchScript cannot express.

        A scripted function supports neither ``torch.inference_mode`` nor checkpoints, and a trace
        keeps neither grad modes nor the context of a checkpoint's body: such regions are replaced
        by their bodies. A non-reentrant checkpoint ends its recomputation by an exception, which
        TorchScript turns into another, so checkpoints are reentrant here. Function transforms are
        left out. A frozen module has no gradients, and keeps the casts of the thread that froze it.
        A trace keeps the dtypes of its weights, and a traced module its weights. It is saved
        without Python functions.
        """
        body = unwrapped(case.program.body, _UNSAYABLE[self.mode])
        case = case.with_program(body=body).with_plan(transform="none", later=(), reuse="calls")
        if (self.freeze or self.check) and case.plan.entry == "cast_inputs":
            case = case.with_plan(entry="context")  # its weights are copies
        if case.plan.checkpoint in ("non_reentrant", "selective"):
            case = case.with_plan(checkpoint="reentrant")
        python = any(CATALOGUE[s.op].setup and not _is_custom_op(s.op) for s in statements(body))
        case = case.with_plan(saved=case.plan.saved and self.saves and not python)
        if case.plan.update == "cast" and self.mode == "trace":
            case = case.with_plan(update="data")
        if case.plan.update == "replaced" and self.check:
            case = case.with_plan(update="data")
        if self.freeze:
            thread = "whole" if case.plan.thread == "whole" else "none"
            case = inferring(case).with_plan(thread=thread)
            case = under(case, NoGrad())  # its weights are constants
        return case

    def observe(self, case: Case) -> Observation:
        """Script and run one case."""

        def driver(names: Names) -> dict[str, Any]:
            return _driver(case, names, _Scripted(self, case, names))

        return harness.run(case, self.runtime(driver=driver))

    def facts(self) -> Facts:
        """Return what TorchScript promises."""
        link = documentation("jit.html")
        return Facts(
            area=f"torch.jit.{self.mode}",
            made=f"{_MADE[self.mode]} with `torch.jit.{self.mode}`",
            promise=f"[TorchScript]({link}): a scripted program computes what eager computes.",
            saves=self.saves,
            implements=(f"backend={self.mode}",),
        )

    def refuses(self, modules: Mapping[str, torch.nn.Module]) -> str:
        """Return that callables are not judged."""
        return "TorchScript's own casts can be told from bugs only in drawn cases"

    def source(self, case: Case) -> str:
        """Return the source of the program and of its scripting, for a repro."""
        if case.plan.entry == "decorator":
            case = under(case, case.plan.contexts[-1])
        text = program_source(case.program)
        if self.mode == "script":
            setup = setup_source(case.program)
            text = (setup and f"{setup}\n\n\n") + script_source(case)
        if case.plan.entry in CUSTOM_OPS and self.mode == "script":
            text += "\n\n" + opaque_source(case).replace("program(", "opaque(", 1)
        return f"{text}\n\nplain = program\nprogram = {self.expression('plain', case)}\n"

    def expression(self, function: str, case: Case) -> str:
        """Return the source that scripts or traces a function at its first call, for a repro."""
        weights, buffers = numbers(case, "weight"), numbers(case, "buffer")
        made = f"torch.jit.script({function})"
        if self.mode == "trace":
            made = f"torch.jit.trace({function}, tuple(inputs), check_trace=False)"
        if self.check:
            made = f"traced({function}, inputs, {weights})"
        elif self.freeze:
            saved = ", True" if case.plan.saved else ""
            made = f"frozen({made}, inputs, {weights}{saved})"
        elif case.plan.saved:
            made = f"reloaded(torch.jit, {made})"
        return f"optimised(lambda inputs: {made}, {buffers}, {self.calls})"

    def opaque(self, case: Case) -> str:
        """Return the source that compiles a call of the custom op ``called``, for a repro."""
        return self.expression("opaque" if self.mode == "script" else "called", case)

    def driver(self, text: str, case: Case) -> str:
        """Return the source of the driver, for a repro.

        The decorator's context is already a region of the program. For a custom op, the call is
        scripted.
        """
        text = re.sub(r"entered = autocast\(.*\)\(program\)", "entered = program", text)
        lines = rf"\1called = \2(plain, \3)\n\1entered = {self.opaque(case)}"
        return re.sub(r"( *)entered = (as_custom_op)\(program, (.*)\)", lines, text)

    def explicit(self, case: Case) -> str:
        """Return the casts that TorchScript's own pass adds to a scripted program, or ""."""
        if self.mode != "script":
            return ""
        program = _Scripted(self, case, self.runtime().names())
        with ExitStack() as stack:
            function = program.compiled(())
            for context in case.plan.contexts:
                dtype = None if context.dtype is None else getattr(torch, context.dtype)
                device = context.device or self.device
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=context.enabled))
            graph = function.graph.copy()
            torch._C._jit_pass_inline(graph)
            torch._C._jit_pass_autocast(graph)  # type: ignore[attr-defined]
            return "\n".join(["# the casts of TorchScript's own pass:", *shown_casts(graph)])

    def ladder(self) -> Sequence[Backend]:
        """Return the backend of the unoptimised graph, which the first call runs and profiles."""
        return () if self.calls == 1 else [replace(self, calls=1, freeze=False, check=False)]

    def reference(self) -> ReferenceRuntime:
        """Return the reference on the same device; it runs TorchScript's graph if asked to."""
        return _Reference(TorchBackend.reference(self).runtime, self)


@dataclass(frozen=True, slots=True)
class _Reference(ReferenceRuntime):
    """The reference, whose program can be TorchScript's own graph, with our casts in it."""

    backend: ScriptBackend

    def ways(self, case: Case) -> Callable[[], AbstractContextManager[None]] | None:
        """Return the context in which the casts are those of TorchScript's documented pass.

        The reference then runs TorchScript's own graph. A case without autocast has no casts.
        """
        if not uses_autocast(case):
            return None
        return partial(imitation.imitating, imitation.NOTHING.beside({"pass": _PASS}))

    def of(self, case: Case) -> Runtime:
        """Return the runtime for a case."""

        def driver(names: Names) -> dict[str, Any]:
            return _driver(case, names, _Read(self.backend, case, names))

        return replace(self.runtime, driver=driver)


# No shadow follows it: a dispatch mode around TorchScript's interpreter corrupts the heap.
_PASS = imitation.Imitation(
    wrap=lambda program, case: program.lowered(casts=True),  # type: ignore[attr-defined]
    follows=False,
)


@dataclass(frozen=True, slots=True)
class Lowering:
    """What TorchScript does to a graph that the reference does too; nothing by default.

    casts: it writes casts after its own list. formulas: the graph is optimised, and its gradients
    are those of TorchScript's formulas. again: after `casts`, fallback functions are cast once
    more. cached: a checked trace is made twice in one weight cache. loaded: a graph that the plan
    saves is what is loaded.
    """

    casts: bool = False
    formulas: bool = False
    again: bool = False
    cached: bool = False
    loaded: bool = False

    def __bool__(self) -> bool:
        return self.casts or self.formulas or self.cached


@dataclass(frozen=True)
class _Read:
    """The program as the reference runs it in place of TorchScript. Imitations of bugs change it.

    lowering: what is done to the graph; if anything is, the program is its graph. A custom op is
    what it is in Python.
    """

    backend: ScriptBackend
    case: Case
    names: Names
    lowering: Lowering = Lowering()

    def lowered(self, **parts: bool) -> _Read:
        """Return the program as a graph to which more is done."""
        return replace(self, lowering=replace(self.lowering, **parts))

    def __call__(self, *inputs: torch.Tensor) -> Any:
        return self.made(*inputs)

    @property
    def is_graph(self) -> bool:
        """Whether a graph runs, and not Python."""
        return bool(self.lowering)

    @cached_property
    def made(self) -> Callable[..., Any]:
        """What is called."""
        if self.is_graph:
            return _Imitated(self.backend, self.case, self.names, self.lowering)
        return self.python()

    def decorated(self, context: Autocast) -> _Read:
        """Return the graph with all of its body under a context."""
        return replace(self, case=under(self.case, context))

    def python(self) -> Callable[..., Any]:
        """Return the program as Python; a frozen module's weights need no grad."""
        program: Callable[..., Any] = self.names["program"]
        if self.backend.mode == "script" and self.case.plan.entry not in CUSTOM_OPS:
            program = _in_order(program)
        weights = numbers(self.case, "weight") if self.backend.freeze else ()
        if not weights:
            return program

        def frozen(*inputs: torch.Tensor) -> Any:
            return program(*(x.detach() if i in weights else x for i, x in enumerate(inputs)))

        return frozen


def _in_order(program: Callable[..., Any]) -> Callable[..., Any]:
    """Return a program whose einsums contract from left to right, as those of TorchScript do.

    In Python they take the path that opt_einsum finds, if that is installed: documented of
    ``torch.einsum``.
    """

    def called(*inputs: torch.Tensor) -> Any:
        with torch.backends.opt_einsum.flags(enabled=False):
            return program(*inputs)

    return called


def _driver(case: Case, names: Names, program: _Scripted | _Read) -> dict[str, Any]:
    """Return what the driver calls by these names: the program, and its decorator."""
    base: Any = names["autocast"]

    class around(base):  # type: ignore[misc]
        """A context; as a decorator of a scripted program it is scripted with it."""

        def __call__(self, function: Callable[..., Any]) -> Any:
            if not getattr(function, "is_graph", False):
                return super().__call__(function)
            return function.decorated(case.plan.contexts[-1])  # type: ignore[attr-defined]

    def opaque(program: _Scripted | _Read, *how: Any) -> Any:
        if isinstance(program, _Read):
            return prelude.as_custom_op(program.python(), *how)
        return program.calling(prelude.as_custom_op(program.plain(), *how))

    return {"program": program, "autocast": around, "as_custom_op": opaque}


class _Scripted:
    """The program, scripted or traced at its first call and called until it is optimised.

    opaque: the custom op with the program as its body; a call of the op is scripted or traced.
    """

    is_graph = True

    def __init__(
        self, backend: ScriptBackend, case: Case, names: Names, opaque: Any = None
    ) -> None:
        self.backend, self.case, self.names, self.opaque = backend, case, names, opaque
        self.units: list[Any] = []  # a graph does not keep its functions alive
        self.call = _optimised(self.make, numbers(case, "buffer"), backend.calls)

    def __call__(self, *inputs: torch.Tensor) -> Any:
        return self.call(*inputs)

    def decorated(self, context: Autocast) -> _Scripted:
        """Return the program with its whole body under a context."""
        return type(self)(self.backend, under(self.case, context), self.names)

    def calling(self, opaque: Any) -> Any:
        """Return a scripted call of a custom op whose body is the program."""
        return _Scripted(self.backend, self.case, self.names, opaque)

    def make(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Return the scripted program."""
        weights = numbers(self.case, "weight")
        made = None if self.backend.check else self.compiled(inputs)
        saved = self.case.plan.saved and self.backend.saves
        if not (self.backend.check or self.backend.freeze):
            return prelude.reloaded(torch.jit, made) if saved else made
        with fresh_unit() as unit:
            self.units.append(unit)
            if self.backend.check:
                return prelude.traced(self.plain(), inputs, weights)
            return prelude.frozen(made, inputs, weights, saved)

    def compiled(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Return the program as a `torch.jit.ScriptFunction`."""
        if self.backend.mode == "script":
            self.units.append(self.define(self.text()))
            return self.units[-1].find_function("program")
        with fresh_unit() as unit:
            self.units.append(unit)
            return torch.jit.trace(self.plain(), tuple(inputs), check_trace=False)

    def text(self) -> str:
        """Return the program in TorchScript's language; its custom ops are defined before."""
        if self.opaque is not None:
            return opaque_source(self.case)
        names = {**self.names}
        exec(setup_source(self.case.program), names)
        ops = (s.op for s in statements(self.case.program.body) if _is_custom_op(s.op))
        return script_source(self.case, {op: names[op]._opoverload for op in ops})

    def define(self, text: str) -> Any:
        """Return a unit in which a text is compiled."""
        return _defined(text)

    def plain(self) -> Any:
        """Return the program as Python, under the tested implementation of autocast."""
        if self.opaque is not None:
            return self.opaque
        names = {**self.names, "__name__": "program"}  # the tracer needs a module
        exec(program_source(self.case.program), names)
        return names["program"]


# The text that was compiled last, and where. Of what is imitated only the graph is taken, which
# stays as it was compiled, however often it ran.
_last: list[tuple[str, Any]] = []


def _defined(text: str) -> Any:
    with fresh_unit() as unit, torch_answers():
        unit.define(text, {"torch": torch}.get)
    _last[:] = [(text, unit)]
    return unit


def _defined_once(text: str) -> Any:
    last = next((unit for known, unit in _last if known == text), None)
    return _defined(text) if last is None else last


def script_source(case: Case, ops: Mapping[str, Any] | None = None) -> str:
    """Return the program in TorchScript's language, with explicit devices and overloads.

    ops: the overloads that its custom ops are, by name: without them, those that torch defines.
    """
    _, _, text = program_source(case.program).rpartition("def program(")
    text = f"def program({text}".replace("autocast(device", 'autocast("cpu"')
    text = text.replace("autocast(", "torch.autocast(")
    text = re.sub(r"torch\.ops\.aten\.(\w+)\.\w+\(", r"torch.ops.aten.\1(", text)
    for op in {s.op for s in statements(case.program.body) if _is_custom_op(s.op)}:
        name = ops[op].name() if ops is not None else f"amp_fuzz::{op}"
        text = text.replace(f" = {op}(", f" = torch.ops.{name.replace('::', '.')}(")
    return text


def _is_custom_op(op: str) -> bool:
    """Return whether an op is a custom op, which a graph can name."""
    return "custom_op" in CATALOGUE[op].setup


def opaque_source(case: Case) -> str:
    """Return a call of the custom op of `prelude.as_custom_op` in TorchScript's language."""
    names = [spec.name for spec in case.program.inputs]
    first, second, rest = names[0], [*names[1:2], "None"][0], ", ".join(names[2:])
    rest = f"[{rest}]" if rest else f"[{first}][1:]"  # an empty list has to be one of tensors
    call = f"torch.ops.amp_fuzz.program({first}, {second}, {rest})"
    return f"def program({', '.join(names)}):\n    return {call}\n"


_UNSAYABLE: Mapping[Mode, tuple[type, ...]] = {
    "script": (Checkpoint, InferenceMode, Uncompiled, Branch),
    "trace": (NoGrad, InferenceMode, Checkpoint, Uncompiled, Branch),
}


def _optimised(make: Callable[..., Any], buffers: Sequence[int], calls: int) -> Any:
    """Return what `prelude.optimised` does, but never optimised with one call.

    A plan that calls the program again would have the graph optimised by its own calls: each runs
    a copy, which was not called before. What `make` returns is a function with a graph.
    """
    if calls > 1:
        return prelude.optimised(make, buffers, calls)

    def first(inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        graph = make(inputs).graph
        create = torch._C._create_function_from_graph
        return lambda *given: create("forward", graph.copy())(*given)

    return prelude.optimised(first, buffers, 1)


class _Imitated(_Scripted):
    """The program as TorchScript's pass should make it: its graph, the casts written by us.

    A graph has a custom op whole. What is around the graph goes on inside it: the op's own rule is
    asked where the graph runs. That is a trace's only with the casts of the pass: the reference can
    also trace what is in the op.
    """

    def __init__(self, backend: ScriptBackend, case: Case, names: Names, how: Lowering) -> None:
        whole = how.casts or backend.mode == "script"
        super().__init__(backend, case, {**names, "custom_op": graph_op} if whole else names)
        self.how = how
        # From the third call on, gradients come from TorchScript's own formulas.
        self.calls = backend.calls if how.formulas else 1
        self.function: Any = None
        self.functions: dict[object, Any] = {}
        self.graphs: dict[object, Any] = {}
        self.probes: dict[object, Any] = {}

    def __call__(self, *inputs: torch.Tensor) -> Any:
        grad = torch.is_grad_enabled() and not self.backend.freeze
        with _without_pass(), torch.set_grad_enabled(grad):
            key = snapshot().contexts
            if key not in self.functions:
                random = torch.get_rng_state()
                self.functions[key] = self.lowered(inputs)
                torch.set_rng_state(random)
            if self.how.casts and self.how.again:
                return self.falling_back(key, inputs)(*inputs)
            return self.functions[key](*inputs)

    def define(self, text: str) -> Any:
        """Return a unit in which a text is compiled, which may have been before."""
        return _defined_once(text)

    def falling_back(self, key: object, inputs: Sequence[torch.Tensor]) -> Any:
        """Return the program with the casts of the fallback functions that run for these inputs."""
        random = torch.get_rng_state()
        written = numbers(self.case, "buffer")

        def probe() -> None:
            self.probes[key](*(x.clone() if i in written else x for i, x in enumerate(inputs)))

        probe()  # from now on it is optimised
        ran = _fallbacks(probe)
        torch.set_rng_state(random)
        fallback = fallback_of(torch._C._last_executed_optimized_graph(), ran)
        if not fallback:
            return self.functions[key]
        if (key, fallback) not in self.functions:
            graph = self.graphs[key].copy()
            write_casts_again(graph, _ambient(), fallback)
            self.functions[key, fallback] = self.optimised(graph, self.calls)
        return self.functions[key, fallback]

    def optimised(self, graph: Any, calls: int) -> Any:
        """Return a graph as a function that is called so often."""
        made = torch._C._create_function_from_graph("forward", graph)
        return _optimised(lambda _: made, numbers(self.case, "buffer"), calls)

    def lowered(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Return the program with our casts for the state around it."""
        if self.function is None:  # what is traced keeps the state of its first call
            written = numbers(self.case, "buffer")
            given = [x.clone() if i in written else x for i, x in enumerate(inputs)]
            if self.backend.check and self.how.cached:
                prelude.traced(self.plain(), given, numbers(self.case, "weight"))  # it may raise
            self.function = self.compiled(given)
        graph = self.function.graph.copy()
        if self.how.loaded and self.case.plan.saved:
            graph = prelude.reloaded(torch.jit, self.function).graph.copy()
            graph.eraseInput(0)  # the module around it
        if self.backend.freeze:  # which forgets the dtypes that tracing saw
            torch._C._jit_pass_erase_shape_information(graph)
            if self.backend.mode == "trace":  # where a weight is a constant, and says its own
                for i in numbers(self.case, "weight"):
                    list(graph.inputs())[i].inferTypeFrom(inputs[i].detach())
        if self.backend.check:  # nothing is known of a module's parameters
            for i in numbers(self.case, "weight"):
                list(graph.inputs())[i].setType(torch._C.TensorType.get())
        inlined = inline(graph)
        for prepare in _BEFORE:
            prepare(graph)
        if self.how.casts:
            current = {device: dtype for device, dtype, *_ in snapshot("cuda").contexts}
            write_casts(graph, _ambient(), current, inlined)
        if self.how.casts and self.how.again:
            key = snapshot().contexts
            name_values(graph)
            probe = graph.copy()
            decompose_addmm(probe)  # optimising does, and leaves its values without names
            self.graphs[key], self.probes[key] = graph, self.optimised(probe, PROBED)
        return self.optimised(graph.copy(), self.calls)


def _ambient() -> Ambient:
    """Return which autocast of the reference is on."""
    on = {device: dtype for device, dtype, enabled, *_ in snapshot("cuda").contexts if enabled}
    return Ambient(on.get("cpu"), on.get("cuda"))


# What the interpreter says that it runs, of a part of a graph that is optimised for what requires
# grad, and instead of it.
_PART, _FALLBACK = "<forward op>", "fallback_function"


def _fallbacks(call: Callable[[], Any]) -> list[bool]:
    """Return whether a fallback ran, of each such part of the graph that is called, in order."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler writes to stderr that it starts
    with profiler.profile() as seen:
        call()
    parts = [e for e in seen.function_events if e.name in (_PART, _FALLBACK)]
    parts = [e for e in parts if not any(_within(e, outer) for outer in parts)]
    parts.sort(key=lambda e: e.time_range.start)
    return [e.name == _FALLBACK for e in parts]


def _within(event: Any, other: Any) -> bool:
    """Return whether an event is a part of another one; none is of itself."""
    inner, outer = event.time_range, other.time_range
    return event is not other and outer.start <= inner.start and inner.end <= outer.end


# What TorchScript does to an inlined graph before its autocast pass.
_BEFORE: tuple[Callable[[Any], Any], ...] = (
    lambda graph: torch._C._jit_pass_peephole(graph, True),
    torch._C._jit_pass_constant_propagation_immutable_types,  # type: ignore[attr-defined]
)


@contextmanager
def _without_pass() -> Iterator[None]:
    before = torch._C._jit_set_autocast_mode(False)
    try:
        yield
    finally:
        torch._C._jit_set_autocast_mode(before)


def backends() -> list[Backend]:
    """Return script and trace, plain and frozen, and the checked trace."""
    return [
        ScriptBackend("script"),
        ScriptBackend("script", freeze=True),
        ScriptBackend("trace"),
        ScriptBackend("trace", freeze=True),
        ScriptBackend("trace", check=True),
    ]
