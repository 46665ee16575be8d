"""``torch.export``: the program is exported at its first call, and runs unlifted.

With the entry ``custom_op``, a call of the op is exported; the graph only knows its body by name.
The contexts around the program at that call are already in the graph; the same contexts surround
the exported module when it runs. With ``decomposed``, composite ops in the graph are decomposed
after the export, so torch must remember which autocast they were under. The result has casts and no
regions, and runs with autocast off.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from amp_fuzz.backends import harness, imitation, prelude
from amp_fuzz.backends.base import Backend, Call, Facts, documentation
from amp_fuzz.backends.harness import Observation, Runtime
from amp_fuzz.backends.imitated import active_quirks
from amp_fuzz.backends.imitations import aot
from amp_fuzz.backends.imitations.lowered import lowered
from amp_fuzz.backends.prelude import in_thread
from amp_fuzz.backends.reference import ReferenceRuntime
from amp_fuzz.backends.reproducing import TorchRepros, opaque
from amp_fuzz.backends.source import program_source
from amp_fuzz.backends.torch_base import TorchBackend, numbers
from amp_fuzz.backends.torch_state import in_thread_alike
from amp_fuzz.cases.case import Case, Entry, Plan, inferring
from amp_fuzz.cases.program import (
    Autocast,
    Checkpoint,
    Context,
    InferenceMode,
    Node,
    NoGrad,
    Region,
)
from amp_fuzz.patching import patched

__all__ = ["DATA_DEPENDENT", "ExportBackend", "backends"]

NO_GRAD_QUIRK, CHECKPOINT_QUIRK = "export-no-grad", "export-checkpoint"
INFERENCE_QUIRK, COMPOSITES_QUIRK = "export-inference-mode", "export-composites"
LEFT_QUIRK, LOSS_QUIRK = "export-grad-mode-left", "export-loss-out"
_QUIRKS = {NO_GRAD_QUIRK, CHECKPOINT_QUIRK, INFERENCE_QUIRK}

# As for a compiled program.
_TRACED = ("compile-functions", "compile-kernels", "compile-matrix-rank", "compile-out")

# The program is the forward of an autograd.Function.
_FUNCTIONS: tuple[Entry, ...] = ("custom_fwd", "cast_inputs", "setup_context")

# Their shapes or branches depend on input values, or they need real memory.
DATA_DEPENDENT = (
    "_grid_sampler_2d_cpu_fallback",
    "corrcoef",
    "cov",
    "ctc_loss",
    "ctc_loss.lists",
    "gaussian_nll_loss",
    "linalg.lstsq",
)


@dataclass(frozen=True, slots=True)
class ExportBackend(TorchRepros, TorchBackend):
    """``torch.export.export(program, inputs).module()`` on the CPU.

    decomposed: ``run_decompositions`` comes between the two.
    """

    decomposed: bool = False
    exact: bool = field(default=False, kw_only=True)

    @property
    def name(self) -> str:
        """``export`` or ``export[decomposed]``."""
        return "export[decomposed]" if self.decomposed else "export"

    def supports(self, op: str, form: str) -> bool:
        """Return whether a call can be exported: it must not depend on values."""
        return op not in DATA_DEPENDENT

    def fit(self, case: Case) -> Case:
        """Return the case without what an exported program cannot do.

        It holds one graph, for the thread and grad mode of its first call: no first pass under
        another mode, no other thread, no function transforms. Decomposed, it only infers.
        """
        case = inferring(case) if self.decomposed else case
        return case.with_plan(first_pass="none", transform="none", thread="none")

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Run cases one by one, each in a separate thread: a failed export leaves modes behind."""
        return [in_thread(self.observe, case) for case in cases]

    def observe(self, case: Case) -> Observation:
        """Run one case."""

        def driver(names: Mapping[str, Any]) -> dict[str, Any]:
            def export(program: Callable[..., Any]) -> Any:
                def make(inputs: Sequence[torch.Tensor]) -> Any:
                    return prelude.exported(program, inputs, self.decomposed)

                return prelude.optimised(make, numbers(case, "buffer"), 1)

            program = names["program"]
            return {
                "program": export(program),
                "as_custom_op": lambda _, *how: export(prelude.as_custom_op(program, *how)),
            }

        with _unlogged():
            return harness.run(case, self.runtime(driver=driver))

    def infers(self, function: Callable[..., Any]) -> bool:
        """Return whether no backward pass runs.

        Everything that a plain function holds is a constant of its export.
        """
        return self.decomposed or not isinstance(function, torch.nn.Module)

    def called(self, function: Callable[..., Any], plan: Plan, call: Call) -> Observation:
        """Export a callable at its call, and call the result, in a separate thread."""
        module = function if isinstance(function, torch.nn.Module) else _Function(function)

        def invoke(*args: Any, **kwargs: Any) -> Any:
            random = torch.get_rng_state()
            found = torch.export.export(module, args, kwargs)
            torch.set_rng_state(random)
            if self.decomposed:
                run = torch.autocast("cpu", enabled=False)(found.run_decompositions().module())
                return run(*args, **kwargs)
            return found.module()(*args, **kwargs)

        def run() -> Observation:
            with _unlogged():
                return call(self.runtime(), invoke)

        return in_thread_alike(run)  # type: ignore[no-any-return]

    def facts(self) -> Facts:
        """Return what `torch.export` promises."""
        link = documentation("export.html")
        return Facts(
            area="torch.export",
            made="exported with `torch.export`",
            promise=f"[`torch.export`]({link}): an exported program computes what eager computes.",
            partial="torch.export",
        )

    def source(self, case: Case) -> str:
        """Return the source of the program and of its export, for a repro."""
        call = self.expression("plain", case)
        return f"{program_source(case.program)}\n\nplain = program\nprogram = {call}\n"

    def expression(self, function: str, case: Case) -> str:
        """Return the source that exports a function at its first call, for a repro."""
        made = f"exported({function}, inputs, {self.decomposed})"
        return f"optimised(lambda inputs: {made}, {numbers(case, 'buffer')}, 1)"

    def driver(self, text: str, case: Case) -> str:
        """Return the source of the driver, with a call of a custom op exported, for a repro."""
        return opaque(text, lambda function: self.expression(function, case))

    def reference(self) -> ReferenceRuntime:
        """Return the reference on the CPU; it imitates what an export makes of a program."""
        return _Exported(replace(TorchBackend.reference(self).runtime, scope=lowered))

    def ladder(self) -> Sequence[Backend]:
        """Return the export without decompositions, for that with them."""
        return [ExportBackend()] if self.decomposed else []


@contextmanager
def _unlogged() -> Iterator[None]:
    """Silence torch's logs: it logs much about programs that cannot be exported."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)


class _Function(torch.nn.Module):
    """A function as a module, for `torch.export`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class _Exported(ReferenceRuntime):
    """The reference; under a quirk the program is what an exported one does."""

    def meant(self, case: Case) -> Case:
        """Return the case as an export has it, where that is another program."""
        if active_quirks().isdisjoint(_QUIRKS):
            return case
        body = _Modes().body(case.program.body, inside=_without_grad(case))
        return case.with_program(body=body)

    def run(self, case: Case) -> Observation:
        """Run one case, and go back to the grad mode of before."""
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            return ReferenceRuntime.run(self, case)

    def of(self, case: Case) -> Runtime:
        """Return the runtime for a case: an export is made under a mode of torch functions."""
        runtime = self.runtime
        if LEFT_QUIRK in active_quirks():
            runtime = _under(runtime, _left_without_grad)
        if LOSS_QUIRK in active_quirks():
            runtime = _under(runtime, _Losses)
        if CHECKPOINT_QUIRK in active_quirks():
            runtime = _traced_through(runtime)
        for name in _TRACED:
            if name in active_quirks():
                runtime = _under(runtime, aot.QUIRKS[name])
        if COMPOSITES_QUIRK not in active_quirks():
            return runtime
        exported = _Conversions()
        with imitation.imitating(imitation.current().without(COMPOSITES_QUIRK)):
            harness.run(self.meant(case), _under(runtime, lambda: exported))
        return _under(runtime, lambda: _Conversions(exported.dtypes))


def _without_grad(case: Case) -> bool:
    """Return whether the first call of a program, which exports it, is made without grad."""
    return case.plan.entry in _FUNCTIONS or case.plan.checkpoint == "reentrant"


def _traced_through(runtime: Runtime) -> Runtime:
    """Return a runtime whose programs have, for a reentrant checkpoint, what a trace has of it.

    That is its function, and what that returns as it was given it is a view (`_Modes`).
    """
    honest = runtime.checkpoint

    def checkpoint(function: Any, *args: Any, use_reentrant: bool) -> Any:
        if not use_reentrant:
            return honest(function, *args, use_reentrant=False)
        outputs = function(*args)
        with torch.no_grad():
            return tuple(o.view_as(o) if any(o is a for a in args) else o for o in outputs)

    def driver(names: Mapping[str, Any]) -> dict[str, Any]:
        return {"checkpoint": honest}

    return replace(runtime, checkpoint=checkpoint, driver=driver)


def _under(runtime: Runtime, context: Callable[[], Any]) -> Runtime:
    """Return a runtime whose programs run in a context besides."""
    base = runtime.scope

    @contextmanager
    def scope() -> Iterator[None]:
        with base(), context():
            yield

    return replace(runtime, scope=scope)


def _left_without_grad() -> AbstractContextManager[None]:
    """Let an error that leaves a ``no_grad`` region leave gradients off."""
    honest = torch.no_grad.__exit__

    def leave(self: torch.no_grad, kind: Any, value: Any, traceback: Any) -> None:
        if kind is None:
            honest(self, kind, value, traceback)

    return patched(torch.no_grad, "__exit__", leave)


class _Losses(TorchFunctionMode):
    """Raises for a margin loss of one sample with an ``out=``, which its fake kernel resizes."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        name = getattr(func, "__name__", "").partition(".")[0]
        writes = given.get("out") is not None and given.get("reduction") == 0
        if name in _LOSSES and writes and args[0].dim() < 2:
            raise IndexError("list index out of range")
        return func(*args, **given)


_LOSSES = {"multi_margin_loss", "multilabel_margin_loss"}


class _Conversions(TorchFunctionMode):
    """Notes the dtype of what is converted to another, or asserts that it is what it was.

    An export asserts so before each conversion, and says so where it is decomposed.
    """

    def __init__(self, exported: Sequence[torch.dtype] | None = None) -> None:
        self.exported = exported
        self.dtypes: list[torch.dtype] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _CONVERSIONS:
            got, n = args[0].dtype, len(self.dtypes)
            self.dtypes.append(got)
            expected = self.exported[n] if self.exported and n < len(self.exported) else got
            if got != expected:
                raise AssertionError(f"Tensor dtype mismatch! Expected: {expected}, Got: {got}")
        return func(*args, **(kwargs or {}))


_CONVERTING = ["bfloat16", "bool", "byte", "char", "double", "float", "half", "int", "long", "to"]
_CONVERSIONS = {getattr(torch.Tensor, name) for name in _CONVERTING}


class _Modes:
    """Gives a body the grad modes of an export, which has a mode for what is between two switches.

    The body of a reentrant checkpoint (`_traced_through`) is without grad, and so is what comes
    after it, up to the next switch: the checkpoint goes back to its grad mode where an export does
    not look. So is the body of a checkpoint of the other kind in one of that kind: what it saves
    goes through the outer one's hook, which switches. A switch in an autocast region is forgotten,
    and ends the mode that was; in a program that is exported without grad there are none. Of
    inference mode an export knows nothing.
    """

    def __init__(self) -> None:
        self.off = False

    def body(
        self,
        body: tuple[Node, ...],
        *,
        inside: bool = False,
        grad: bool = True,
        again: bool = False,
    ) -> tuple[Node, ...]:
        """Return a body.

        inside: whether switches are forgotten in it. grad: whether it is meant to have gradients.
        again: whether it is in a checkpoint that is not reentrant.
        """
        nodes: list[Node] = []
        for node in body:
            if isinstance(node, Region):
                nodes += self.region(node.context, node.body, inside, grad, again)
            else:
                nodes.append(Region(NoGrad(), (node,)) if self.off else node)
        return tuple(nodes)

    def region(
        self, context: Context, body: tuple[Node, ...], inside: bool, grad: bool, again: bool
    ) -> tuple[Node, ...]:
        """Return what is in the place of a region."""
        names = active_quirks()
        forgets = inside and NO_GRAD_QUIRK in names
        if isinstance(context, NoGrad):
            if inside and not forgets:
                return (Region(context, self.body(body, inside=True, grad=False, again=again)),)
            self.off = not forgets
            inner = self.body(body, inside=inside, grad=False, again=again)
            self.off = not (grad or forgets)
            return inner
        if isinstance(context, InferenceMode) and INFERENCE_QUIRK in names:
            return self.body(body, inside=inside, grad=False, again=again)
        inside |= isinstance(context, Autocast)
        reentrant = isinstance(context, Checkpoint) and context.use_reentrant
        switches = CHECKPOINT_QUIRK in names and isinstance(context, Checkpoint)
        if switches and (reentrant or (again and grad)):
            self.off = not forgets
        again |= isinstance(context, Checkpoint) and not reentrant
        grad = grad and not (switches and reentrant)
        off = self.off
        inner = self.body(body, inside=inside, grad=grad, again=again)
        if switches and reentrant:
            self.off = not forgets
        elif off and isinstance(context, Checkpoint):
            return inner  # it saves nothing
        return (Region(context, inner),)


def backends() -> list[Backend]:
    """Return the export, plain and decomposed."""
    return [ExportBackend(), ExportBackend(decomposed=True)]
