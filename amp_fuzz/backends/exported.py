"""``torch.export``: the program is exported at its first call, and runs unlifted.

The entry ``custom_op`` exports a call of the op, whose body the graph knows by name only.
What surrounds the program at that call is in the graph already; the same surrounds the exported
module when it runs. With ``decomposed``, composite ops that stood in the graph whole are decomposed
after the export, by when torch has to remember which autocast they stood under; the result has
casts and no regions, and runs with autocast off.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch

from amp_fuzz import harness, prelude
from amp_fuzz.backends.base import Backend
from amp_fuzz.backends.reference import ReferenceRuntime
from amp_fuzz.backends.torchbackend import TorchBackend, inferring, numbers
from amp_fuzz.case import Case
from amp_fuzz.harness import Observation, Runtime
from amp_fuzz.prelude import in_thread
from amp_fuzz.program import Autocast, Checkpoint, Context, InferenceMode, Node, NoGrad, Region
from amp_fuzz.reference import aot
from amp_fuzz.reference.autocast import active_quirks
from amp_fuzz.source import program_source

__all__ = ["DATA_DEPENDENT", "ExportBackend", "backends"]

NO_GRAD_QUIRK, CHECKPOINT_QUIRK = "export-no-grad", "export-checkpoint"
INFERENCE_QUIRK, FUNCTIONS_QUIRK = "export-inference-mode", "compile-functions"
_QUIRKS = {NO_GRAD_QUIRK, CHECKPOINT_QUIRK, INFERENCE_QUIRK}

# They look at their inputs' values to decide on shapes or branches, or need memory to look at.
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
class ExportBackend(TorchBackend):
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
        """Return whether a call can be exported: what it does must not hang on values."""
        return op not in DATA_DEPENDENT

    def fit(self, case: Case) -> Case:
        """Return the case without what an exported program cannot be asked for.

        It holds one graph, of the thread and the grad mode of its first call: no first pass under
        another mode, no other thread, no function transforms. Decomposed, it only infers.
        """
        case = inferring(case) if self.decomposed else case
        plan = msgspec.structs.replace(
            case.plan, first_pass="none", transform="none", thread="none"
        )
        return msgspec.structs.replace(case, plan=plan)

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Run cases one by one, each in its own thread: a failed export leaves modes behind."""
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

        disabled = logging.root.manager.disable
        logging.disable(logging.CRITICAL)  # what cannot be exported is logged at length
        try:
            return harness.run(case, self.runtime(driver=driver))
        finally:
            logging.disable(disabled)

    def source(self, case: Case) -> str:
        """Return the source of the program and of its export, for a repro."""
        call = self.expression("plain", case)
        return f"{program_source(case.program)}\n\nplain = program\nprogram = {call}\n"

    def expression(self, function: str, case: Case) -> str:
        """Return the source that exports a function at its first call, for a repro."""
        made = f"exported({function}, inputs, {self.decomposed})"
        return f"optimised(lambda inputs: {made}, {numbers(case, 'buffer')}, 1)"

    def reference(self) -> ReferenceRuntime:
        """Return the reference on the CPU; it imitates what an export makes of grad modes."""
        return _Exported(TorchBackend.reference(self).runtime)

    def ladder(self) -> Sequence[Backend]:
        """Return the export without decompositions, for that with them."""
        return [ExportBackend()] if self.decomposed else []


@dataclass(frozen=True, slots=True)
class _Exported(ReferenceRuntime):
    """The reference; under a quirk the program is what an exported one does."""

    def meant(self, case: Case) -> Case:
        """Return the case as an export has it, where that is another program."""
        if active_quirks().isdisjoint(_QUIRKS):
            return case
        body = _Modes().body(case.program.body)
        program = msgspec.structs.replace(case.program, body=body)
        return msgspec.structs.replace(case, program=program)

    def of(self, case: Case) -> Runtime:
        """Return the runtime for a case: an export is made under a mode of torch functions."""
        if FUNCTIONS_QUIRK not in active_quirks():
            return self.runtime
        return replace(self.runtime, scope=aot.QUIRKS[FUNCTIONS_QUIRK])


class _Modes:
    """Gives a body the grad modes of an export.

    A graph is cut where a grad mode is set, and a part is without grad if it begins with that. One
    that begins in an autocast region begins with the region, and the mode is forgotten
    (``torch._export.passes.replace_set_grad_with_hop_pass``). A `no_grad` region ends with the mode
    of before. A reentrant checkpoint is its body, and `no_grad` about it and after it: what goes
    back to the mode of before is not in the graph. One that is not, in another one that is not,
    begins with what that saves of it under `no_grad`. Of inference mode nothing is in the graph.
    """

    def __init__(self) -> None:
        self.names = active_quirks()
        self.off = False

    def body(self, body: tuple[Node, ...], around: tuple[Context, ...] = ()) -> tuple[Node, ...]:
        """Return a body. around: the regions that it stands in."""
        nodes: list[Node] = []
        for node in body:
            if isinstance(node, Region):
                nodes += self.region(node, around)
            else:
                nodes.append(Region(NoGrad(), (node,)) if self.off else node)
        return tuple(nodes)

    def region(self, node: Region, around: tuple[Context, ...]) -> tuple[Node, ...]:
        """Return what is in the place of a region."""
        context = node.context
        grad = not any(map(self.stops, around))  # while it is traced
        sets = self.stops(context) and not isinstance(context, InferenceMode)
        if sets or (grad and self.saves(context) and any(map(self.saves, around))):
            self.set(False, around)
        off = self.off
        inner = self.body(node.body, (*around, context))
        if sets:
            self.set(grad and isinstance(context, NoGrad), around)
        # A checkpoint that saves nothing is its body, too.
        if self.stops(context) or (off and isinstance(context, Checkpoint)):
            return inner
        return (Region(context, inner),)

    def set(self, grad: bool, around: tuple[Context, ...]) -> None:
        """Begin a part of the graph."""
        forgotten = NO_GRAD_QUIRK in self.names and any(isinstance(c, Autocast) for c in around)
        self.off = not (grad or forgotten)

    def stops(self, context: Context) -> bool:
        """Return whether a region is its body, which is traced without grad."""
        if isinstance(context, Checkpoint):
            return context.use_reentrant and CHECKPOINT_QUIRK in self.names
        if isinstance(context, InferenceMode):
            return INFERENCE_QUIRK in self.names
        return isinstance(context, NoGrad)

    def saves(self, context: Context) -> bool:
        """Return whether a region saves, with grad, what checkpoints in it are given."""
        return isinstance(context, Checkpoint) and CHECKPOINT_QUIRK in self.names


def backends() -> list[Backend]:
    """Return the export, as it is and decomposed."""
    return [ExportBackend(), ExportBackend(decomposed=True)]
