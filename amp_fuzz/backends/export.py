"""``torch.export``: the program is exported at its first call, and runs unlifted.

With the entry ``custom_op``, a call of the op is exported; the graph only knows its body by name.
The contexts around the program at that call are already in the graph; the same contexts surround
the exported module when it runs. With ``decomposed``, composite ops in the graph are decomposed
after the export, so torch must remember which autocast they were under. The result has casts and no
regions, and runs with autocast off. With ``strict``, dynamo first makes a graph of the program, and
the export traces that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from amp_fuzz.backends import control_flow, harness, prelude
from amp_fuzz.backends.base import Backend, Call, Facts, documentation
from amp_fuzz.backends.harness import Observation
from amp_fuzz.backends.reference import ReferenceRuntime
from amp_fuzz.backends.reproducing import TorchRepros, opaque
from amp_fuzz.backends.source import program_source
from amp_fuzz.backends.torch_base import TorchBackend, numbers
from amp_fuzz.backends.torch_state import in_compiling_thread, in_thread_alike
from amp_fuzz.cases.case import Case, Plan, inferring, unbroken, unselective
from amp_fuzz.cases.program import Checkpoint, unwrapped

__all__ = ["DATA_DEPENDENT", "HOOKED", "ExportBackend", "backends"]

HOOKED = ("hooked",)
"""Ops that register a hook on a value. Exported programs and traces have no hooks."""
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

    decomposed: ``run_decompositions`` comes between the two. strict: dynamo traces the program's
    bytecode, with ``strict=True``; else Python runs it on fake tensors.
    """

    decomposed: bool = False
    strict: bool = False
    exact: bool = field(default=False, kw_only=True)

    @property
    def name(self) -> str:
        """``export``, ``export[decomposed]`` or ``export[strict]``."""
        return f"export[{self.mode}]" if self.mode else "export"

    @property
    def mode(self) -> str:
        """What distinguishes it from the plain export: ``decomposed``, ``strict`` or nothing."""
        return "decomposed" if self.decomposed else "strict" if self.strict else ""

    def supports(self, op: str, form: str) -> bool:
        """Return whether a call can be exported: not if it depends on values, or adds a hook."""
        return op not in (*DATA_DEPENDENT, *HOOKED)

    def fit(self, case: Case) -> Case:
        """Return the case without what an exported program cannot do.

        It holds one graph, for the thread, the grad mode and the autocast of its first call: no
        first or later call under another mode, no other thread, no function transforms, and no pass
        that is interrupted outside of a function that disables autocast. Decomposed, it only
        infers. A selective checkpoint's modes would see the export, or be traced in it. Strict, it
        has no checkpoints: their graphs are not traced again (``_checkpoint_context_fn``). It takes
        weights of the dtypes of its first call.
        """
        case = unselective(case)
        case = inferring(case) if self.decomposed else case
        if self.strict:
            body = unwrapped(case.program.body, (Checkpoint,))
            case = case.with_program(body=body).with_plan(checkpoint="none")
        if case.plan.entry == "cast_inputs":
            case = case.with_plan(interrupted=False)
        case = case.with_plan(first_pass="none", transform="none", thread="none")
        if case.plan.update == "cast":
            case = case.with_plan(update="data")
        return unbroken(case.with_plan(later=(), reuse="calls"))

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Run cases one by one, each in a separate thread: a failed export leaves modes behind."""
        return [in_compiling_thread(self.observe, case) for case in cases]

    def observe(self, case: Case) -> Observation:
        """Run one case."""

        def driver(names: Mapping[str, Any]) -> dict[str, Any]:
            def export(program: Callable[..., Any]) -> Any:
                def make(inputs: Sequence[torch.Tensor]) -> Any:
                    how = self.decomposed, self.strict, case.plan.saved
                    return prelude.exported(program, inputs, *how)

                return prelude.optimised(make, numbers(case, "buffer"), 1)

            program = names["program"]
            return {
                "program": export(program),
                "as_custom_op": lambda _, *how: export(prelude.as_custom_op(program, *how)),
            }

        with _unlogged():
            control = control_flow.of_torch()
            return harness.run(case, self.runtime(driver=driver, control=control))

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
            found = torch.export.export(module, args, kwargs, strict=self.strict)
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
            saves=True,
            imports=("torch._dynamo.repro.after_dynamo", "torch.export._trace"),
            implements=("backend=export",),
        )

    def source(self, case: Case) -> str:
        """Return the source of the program and of its export, for a repro."""
        call = self.expression("plain", case)
        return f"{program_source(case.program)}\n\nplain = program\nprogram = {call}\n"

    def expression(self, function: str, case: Case) -> str:
        """Return the source that exports a function at its first call, for a repro."""
        strict = ", strict=True" if self.strict else ""
        saved = ", saved=True" if case.plan.saved else ""
        made = f"exported({function}, inputs, {self.decomposed}{strict}{saved})"
        return f"optimised(lambda inputs: {made}, {numbers(case, 'buffer')}, 1)"

    def driver(self, text: str, case: Case) -> str:
        """Return the source of the driver, with a call of a custom op exported, for a repro."""
        return opaque(text, lambda function: self.expression(function, case))

    def reference(self) -> ReferenceRuntime:
        """Return the reference on the CPU; it imitates what an export makes of a program."""
        return _Exported(TorchBackend.reference(self).runtime)

    def ladder(self) -> Sequence[Backend]:
        """Return the plain export, for the others."""
        return [ExportBackend()] if self.mode else []


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
    """The reference. A bug may leave another grad mode behind."""

    def run(self, case: Case) -> Observation:
        """Run one case, and go back to the grad mode of before."""
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            return ReferenceRuntime.run(self, case)


def backends() -> list[Backend]:
    """Return the export: plain, decomposed and strict."""
    return [ExportBackend(), ExportBackend(decomposed=True), ExportBackend(strict=True)]
