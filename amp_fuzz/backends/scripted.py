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
from amp_fuzz.program import Autocast, Checkpoint, InferenceMode, Node, NoGrad, Region, TensorSpec
from amp_fuzz.reference.autocast import active_quirks, snapshot, torch_answers
from amp_fuzz.reference.torchscript import Ambient, write_casts
from amp_fuzz.source import program_source

__all__ = ["QUIRK", "ScriptBackend", "backends", "script_source"]

Names: TypeAlias = Mapping[str, Any]
Mode: TypeAlias = Literal["script", "trace"]
QUIRK, CACHE_QUIRK = "torchscript-pass", "trace-weight-cache"

# A scripted function cannot make a module; these write the module's call as an expression.
_EXPRESSIONS = frozenset(
    "binary_cross_entropy concat group_norm layer_norm log_softmax max_pool3d rms_norm rrelu "
    "softmax view view_as_complex".split()
)
# Modules that are called with weights that are not their own, which torch refuses to trace.
_STATELESS = frozenset(
    "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d MultiheadAttention "
    "TransformerDecoderLayer TransformerEncoderLayer bilinear gru gru_cell linear "
    "linear_cross_entropy.chunked lstm lstm_cell prelu rnn_relu rnn_relu_cell rnn_tanh "
    "rnn_tanh_cell".split()
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
    parameters, frozen; its plans only infer. check: the trace is checked by a second one, as it is
    by default: a cast that the first left in the weight cache is a constant to the second.
    """

    mode: Mode
    calls: int = 3
    freeze: bool = False
    check: bool = False
    device: str = "cpu"
    trains: bool = True
    values: bool = True
    exact: bool = False

    @property
    def name(self) -> str:
        """``script``, ``trace``, ``script[freeze]``, ``script[first-call]``, ..."""
        labels = {"freeze": self.freeze, "check": self.check, "first-call": self.calls == 1}
        label = "+".join(name for name, on in labels.items() if on)
        return f"{self.mode}[{label}]" if label else self.mode

    def availability(self) -> Availability:
        """Say whether TorchScript can compile programs here that know nothing of each other."""
        problem = usable()
        if problem:
            return Availability("broken", problem)
        return Availability("ready", f"torch {torch.__version__}")

    def supports(self, op: str, form: str) -> bool:
        """Return whether a call can be traced, or TorchScript's language has words for it."""
        if self.mode == "trace":
            return form != "module" or op not in _STATELESS
        return (form != "module" or op in _EXPRESSIONS) and (op, form) not in _REFUSED

    def fit(self, case: Case) -> Case:
        """Return the case without what TorchScript cannot say.

        A scripted function knows neither ``torch.inference_mode`` nor checkpoints, and a trace
        keeps no grad mode: the bodies of such regions stand where they stood. A checkpoint that is not reentrant ends its
        recomputation by an exception, which TorchScript turns into another: such a one is
        reentrant here. A frozen module has no gradients.
        """
        body = _without(case.program.body, _UNSAYABLE[self.mode])
        program = msgspec.structs.replace(case.program, body=body)
        case = msgspec.structs.replace(case, program=program)
        if case.plan.checkpoint == "non_reentrant":
            plan = msgspec.structs.replace(case.plan, checkpoint="reentrant")
            case = msgspec.structs.replace(case, plan=plan)
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
            # Its weights are constants: no gradient is asked for anywhere.
            body = (Region(NoGrad(), case.program.body),)
            program = msgspec.structs.replace(case.program, body=body)
            case = msgspec.structs.replace(case, plan=plan, program=program)
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
        return () if self.calls == 1 else [replace(self, calls=1, freeze=False, check=False)]

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
        if active_quirks().isdisjoint((QUIRK, CACHE_QUIRK)):
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
        random = torch.get_rng_state()
        if self.function is None:
            self.function = self.make(inputs)
            torch.set_rng_state(random)
        state = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *self.ambient())
        while self.seen.setdefault(state, 0) < self.backend.calls - 1:
            self.seen[state] += 1
            # A checkpoint around the call would count what these save.
            with torch.autograd.graph.saved_tensors_hooks(_same, _same):
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
        with fresh_unit() as unit:
            self.units.append(unit)
            if self.backend.mode == "trace":
                given = tuple(self.copies(inputs))
                return torch.jit.trace(self.plain(), given, check_trace=self.checks())
            with torch_answers():
                unit.define(script_source(self.case), {"torch": torch}.get)
            return unit.find_function("program")

    def checks(self) -> bool:
        """Return whether a trace is checked."""
        return self.backend.check

    def plain(self) -> Callable[..., Any]:
        """Return the program as Python, under the implementation of autocast that is tested."""
        names = {**self.names, "__name__": "program"}  # the tracer asks for a module
        exec(program_source(self.case.program), names)
        return names["program"]  # type: ignore[no-any-return]

    def frozen(self, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        specs = self.case.program.inputs
        weights = [i for i, s in enumerate(specs) if s.role == "weight"]
        others = [i for i in range(len(specs)) if i not in weights]
        module = _module(self.graph_of(inputs), specs, inputs)
        frozen = torch.jit.freeze(module)
        return lambda *given: frozen(*(given[i] for i in others))


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def script_source(case: Case) -> str:
    """Return the program in TorchScript's language: devices written out, overloads by name."""
    text = program_source(map_autocast(case, device="cpu").program)
    text = text.replace("autocast(", "torch.autocast(")
    return re.sub(r"torch\.ops\.aten\.(\w+)\.\w+\(", r"torch.ops.aten.\1(", text)
_UNSAYABLE: Mapping[Mode, tuple[type, ...]] = {
    "script": (Checkpoint, InferenceMode),
    "trace": (NoGrad, InferenceMode),
}


def _without(body: tuple[Node, ...], kinds: tuple[type, ...]) -> tuple[Node, ...]:
    """Return a body without the regions of some kinds; what stood in them stays."""
    nodes: list[Node] = []
    for node in body:
        if not isinstance(node, Region):
            nodes.append(node)
        elif isinstance(node.context, kinds):
            nodes += _without(node.body, kinds)
        else:
            nodes.append(Region(node.context, _without(node.body, kinds)))
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
        self.freezes = backend.freeze
        self.functions: dict[tuple[object, ...], Any] = {}

    def ambient(self) -> tuple[object, ...]:
        return snapshot().contexts

    def checks(self) -> bool:
        return self.backend.check and CACHE_QUIRK in active_quirks()

    def __call__(self, *inputs: torch.Tensor) -> Any:
        with _without_pass():
            key = self.ambient()
            if key not in self.functions:
                graph = self.graph_of(inputs).graph.copy()
                if self.freezes:  # which forgets the dtypes that tracing saw
                    torch._C._jit_pass_erase_shape_information(graph)
                torch._C._jit_pass_inline(graph)
                torch._C._jit_pass_peephole(graph, True)
                torch._C._jit_pass_constant_propagation_immutable_types(graph)
                states = snapshot("cuda").contexts
                on = {device: dtype for device, dtype, enabled, *_ in states if enabled}
                current = {device: dtype for device, dtype, *_ in states}
                if QUIRK in active_quirks():
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
    """Return script and trace, as they are and frozen, and the trace that is checked."""
    return [
        ScriptBackend("script"),
        ScriptBackend("script", freeze=True),
        ScriptBackend("trace"),
        ScriptBackend("trace", freeze=True),
        ScriptBackend("trace", check=True),
    ]
