"""TorchScript: ``torch.jit.script``, ``torch.jit.trace`` and ``torch.jit.freeze`` on the CPU.

The program is scripted, or traced, and called three times before what it returns counts: the first
call profiles, the second optimises, and only then does the optimised graph run. The plan's contexts
stand around the scripted program; its regions, and the context of the ``decorator`` entry, stand
inside it. TorchScript writes casts after a list of its own (`amp_fuzz.reference.torchscript`):
where that documented difference explains a divergence, the quirk ``torchscript-pass`` says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import msgspec
import torch
import torch.utils.checkpoint

from amp_fuzz import harness
from amp_fuzz.backends.base import Availability, Backend
from amp_fuzz.backends.reference import ReferenceRuntime, reference_runtime
from amp_fuzz.backends.scriptunit import fresh_unit, usable
from amp_fuzz.backends.torchstate import reset_state, torch_state
from amp_fuzz.case import Case, map_autocast
from amp_fuzz.harness import Observation, Runtime
from amp_fuzz.program import Autocast, Checkpoint, InferenceMode, Node, Region, TensorSpec
from amp_fuzz.reference.autocast import active_quirks, snapshot, torch_answers
from amp_fuzz.reference.torchscript import Ambient, write_casts
from amp_fuzz.source import program_source

__all__ = ["QUIRK", "ScriptBackend", "backends", "script_source"]

Names: TypeAlias = Mapping[str, Any]
Mode: TypeAlias = Literal["script", "trace"]
QUIRK = "torchscript-pass"

# A scripted function cannot make a module; these write the module's call as an expression.
_EXPRESSIONS = frozenset(
    "binary_cross_entropy concat group_norm layer_norm log_softmax max_pool3d rms_norm rrelu "
    "softmax view view_as_complex".split()
)
# TorchScript wants several out= as keywords of their own names.
_SEVERAL_OUT = (
    "aminmax cummax cummin geqrf kthvalue linalg.cholesky_ex linalg.eig linalg.eigh linalg.inv_ex "
    "linalg.ldl_factor linalg.lstsq linalg.lu linalg.lu_factor linalg.qr linalg.solve_ex "
    "linalg.svd max max.dim median.dim min min.dim mode nanmedian.dim qr slogdet sort svd topk "
    "triangular_solve"
)
# What else its language lacks: methods, comprehensions, ellipses with tensors, function arguments.
_REFUSED = frozenset(
    {
        *((op, "out") for op in _SEVERAL_OUT.split()),
        ("bfloat16", "method"),
        ("bool", "method"),
        ("ctc_loss.lists", "function"),
        ("gaussian_nll_loss", "function"),
        ("getitem.last", "operator"),
        ("linear_cross_entropy", "function"),
        ("lu", "method"),
        ("triplet_margin_with_distance_loss", "function"),
    }
)


@dataclass(frozen=True, slots=True)
class ScriptBackend:
    """``torch.jit.script(program)`` or ``torch.jit.trace(program, inputs)`` on the CPU.

    calls: the call whose results count. freeze: the program is a module whose weights are its
    parameters, frozen; its plans only infer.
    """

    mode: Mode
    calls: int = 3
    freeze: bool = False
    device: str = "cpu"
    trains: bool = True
    values: bool = True
    exact: bool = False

    @property
    def name(self) -> str:
        """``script``, ``trace``, ``script[freeze]``, ``script[first-call]``, ..."""
        label = "[freeze]" if self.freeze else "[first-call]" if self.calls == 1 else ""
        return self.mode + label

    def availability(self) -> Availability:
        """Say whether TorchScript can compile programs here that know nothing of each other."""
        problem = usable()
        if problem:
            return Availability("broken", problem)
        return Availability("ready", f"torch {torch.__version__}")

    def supports(self, op: str, form: str) -> bool:
        """Return whether TorchScript's language has words for a call."""
        if self.mode == "trace":
            return True
        return (form != "module" or op in _EXPRESSIONS) and (op, form) not in _REFUSED

    def fit(self, case: Case) -> Case:
        """Return the case without what TorchScript cannot say.

        A scripted function knows neither ``torch.inference_mode`` nor checkpoints: the bodies of
        such regions stand where they stood. A frozen module has no gradients.
        """
        if self.mode == "script":
            body = _without(case.program.body)
            program = msgspec.structs.replace(case.program, body=body)
            case = msgspec.structs.replace(case, program=program)
        if self.freeze:
            plan = msgspec.structs.replace(
                case.plan,
                backward="none",
                backward_context=None,
                second="none",
                steps=1,
                loop="outside",
                scaler=False,
                interrupted=False,
            )
            case = msgspec.structs.replace(case, plan=plan)
        return case

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Run cases one by one."""
        return [self._run(case) for case in cases]

    def _run(self, case: Case) -> Observation:
        runtime = Runtime(
            device=self.device,
            autocast=torch.autocast,
            checkpoint=torch.utils.checkpoint.checkpoint,
            custom_fwd=torch.amp.custom_fwd,
            custom_bwd=torch.amp.custom_bwd,
            state=lambda: torch_state(self.device),
            reset=lambda: reset_state(self.device),
            driver=lambda names: _driver(case, names, _Scripted(self, case, names)),
        )
        return harness.run(case, runtime)

    def ladder(self) -> Sequence[Backend]:
        """Return the graph before it is optimised: what the first call runs, and profiles."""
        return () if self.calls == 1 else [replace(self, calls=1, freeze=False)]

    def reference(self) -> ReferenceRuntime:
        """Return the reference on the same device; it imitates TorchScript's pass if asked to."""
        plain = reference_runtime(self.device)
        return _ImitatingReference(plain.runtime, self)


@dataclass(frozen=True, slots=True)
class _ImitatingReference(ReferenceRuntime):
    """The reference; under the quirk, the program is a graph with the casts of TorchScript's list.

    The graph is TorchScript's own, run without its pass; the casts are those of
    `reference.torchscript`, and what surrounds the program is the reference's autocast.
    """

    backend: ScriptBackend

    def of(self, case: Case) -> Runtime:
        """Return the runtime for a case."""
        if QUIRK not in active_quirks():
            return self.runtime
        return replace(
            self.runtime,
            driver=lambda names: _driver(case, names, _Imitated(self.backend, case, names)),
        )


def _driver(case: Case, names: Names, program: _Scripted) -> dict[str, Any]:
    """Return what the driver calls by these names: the scripted program, and its decorator."""

    class around(names["autocast"]):  # type: ignore[misc]
        """A context; as a decorator of the program it is scripted with it."""

        def __call__(self, function: Callable[..., Any]) -> Any:
            if function is not program:
                return super().__call__(function)
            return program.decorated(case.plan.contexts[-1])

    return {"program": program, "autocast": around}


class _Scripted:
    """The program, scripted or traced at its first call and called often enough to be optimised."""

    def __init__(self, backend: ScriptBackend, case: Case, names: Names) -> None:
        self.backend, self.case, self.names = backend, case, names
        self.function: Callable[..., Any] | None = None
        self.units: list[Any] = []  # a graph does not keep the functions alive that it calls
        self.seen: dict[tuple[object, ...], int] = {}

    def decorated(self, context: Autocast) -> _Scripted:
        """Return the program with all of its body under a context."""
        body = (Region(context, self.case.program.body),)
        program = msgspec.structs.replace(self.case.program, body=body)
        case = msgspec.structs.replace(self.case, program=program)
        return type(self)(self.backend, case, self.names)

    def __call__(self, *inputs: torch.Tensor) -> Any:
        if self.function is None:
            self.function = self.make(inputs)
        state = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *self.ambient())
        random = torch.get_rng_state()
        while self.seen.setdefault(state, 0) < self.backend.calls - 1:
            self.seen[state] += 1
            self.function(*self.copies(inputs))
            torch.set_rng_state(random)
        return self.function(*inputs)

    def copies(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the inputs for a call that must leave them as they are."""
        specs = self.case.program.inputs
        pairs = zip(specs, inputs, strict=True)
        return [t.clone() if spec.role == "buffer" else t for spec, t in pairs]

    def ambient(self) -> tuple[object, ...]:
        """Return the autocast state around the program: TorchScript optimises for each apart."""
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def make(self, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """Return the scripted program."""
        if self.backend.freeze:
            return self.frozen(inputs)
        return self.graph_of(inputs)

    def graph_of(self, inputs: Sequence[torch.Tensor]) -> Any:
        if self.backend.mode == "script":
            with fresh_unit() as unit:
                self.units.append(unit)
                with torch_answers():
                    unit.define(script_source(self.case), {"torch": torch}.get)
                return unit.find_function("program")
        return torch.jit.trace(self.plain(), tuple(self.copies(inputs)), check_trace=False)

    def plain(self) -> Callable[..., Any]:
        """Return the program as Python, under the implementation of autocast that is tested."""
        names = dict(self.names)
        exec(program_source(self.case.program), names)
        return names["program"]  # type: ignore[no-any-return]

    def frozen(self, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        specs = self.case.program.inputs
        weights = [i for i, s in enumerate(specs) if s.role == "weight"]
        others = [i for i in range(len(specs)) if i not in weights]
        module = _module(self.graph_of(inputs), specs, inputs)
        frozen = torch.jit.freeze(module)
        return lambda *given: frozen(*(given[i] for i in others))


def script_source(case: Case) -> str:
    """Return the program in TorchScript's language: devices written out, overloads by name."""
    text = program_source(map_autocast(case, device="cpu").program)
    text = text.replace("autocast(", "torch.autocast(")
    return re.sub(r"torch\.ops\.aten\.(\w+)\.\w+\(", r"torch.ops.aten.\1(", text)
def _without(body: tuple[Node, ...]) -> tuple[Node, ...]:
    nodes: list[Node] = []
    for node in body:
        if not isinstance(node, Region):
            nodes.append(node)
        elif isinstance(node.context, Checkpoint | InferenceMode):
            nodes += _without(node.body)
        else:
            nodes.append(Region(node.context, _without(node.body)))
    return tuple(nodes)


def _module(program: Any, specs: Sequence[TensorSpec], inputs: Sequence[torch.Tensor]) -> Any:
    """Return a scripted module in eval mode that calls a program; its weights are parameters."""
    holder = torch.nn.Module()
    holder.program = program
    for spec, tensor in zip(specs, inputs, strict=True):
        if spec.role == "weight":
            holder.register_parameter(spec.name, torch.nn.Parameter(tensor.detach()))
    module = torch.jit.script(holder.eval())
    given = ", ".join(s.name for s in specs if s.role != "weight")
    passed = ", ".join(f"self.{s.name}" if s.role == "weight" else s.name for s in specs)
    comma = ", " if given else ""
    module.define(f"def forward(self{comma}{given}):\n    return self.program({passed})\n")
    return module


class _Imitated(_Scripted):
    """The program as TorchScript's pass should make it: its graph, the casts written by us."""

    def __init__(self, backend: ScriptBackend, case: Case, names: Names) -> None:
        super().__init__(replace(backend, calls=1, freeze=False), case, names)
        self.functions: dict[tuple[object, ...], Any] = {}

    def ambient(self) -> tuple[object, ...]:
        return snapshot().contexts

    def __call__(self, *inputs: torch.Tensor) -> Any:
        with _without_pass():
            key = self.ambient()
            if key not in self.functions:
                graph = self.graph_of(inputs).graph.copy()
                torch._C._jit_pass_inline(graph)
                torch._C._jit_pass_peephole(graph, True)
                torch._C._jit_pass_constant_propagation_immutable_types(graph)
                states = snapshot("cuda").contexts
                on = {device: dtype for device, dtype, enabled, *_ in states if enabled}
                current = {device: dtype for device, dtype, *_ in states}
                write_casts(graph, Ambient(on.get("cpu"), on.get("cuda")), current)
                self.functions[key] = torch._C._create_function_from_graph("forward", graph)
            return self.functions[key](*inputs)


@contextmanager
def _without_pass() -> Iterator[None]:
    before = torch._C._jit_set_autocast_mode(False)
    try:
        yield
    finally:
        torch._C._jit_set_autocast_mode(before)


def backends() -> list[Backend]:
    """Return script and trace, as they are and frozen."""
    modes: tuple[Mode, ...] = ("script", "trace")
    return [ScriptBackend(mode, freeze=freeze) for mode in modes for freeze in (False, True)]
