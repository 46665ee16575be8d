"""JAX: the program with the reference's casts, lowered to ``jax.numpy``, on XLA's platform.

This tests XLA's numerics: kernels, the roundings of fusion, and derivatives. It does not test
autocast, since every cast is the reference's, written out. The policies are CUDA's by default,
under which most programs run.

JAX runs in a separate process, because XLA reads its flags only once.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from amp_fuzz.backends import harness, prelude
from amp_fuzz.backends.base import Availability, Backend, Facts
from amp_fuzz.backends.harness import Observation, Raised
from amp_fuzz.backends.jax.lowerings.missing import NOT_LOWERED
from amp_fuzz.backends.jax.numerics import DRAWN, numerics_of
from amp_fuzz.backends.jax.platforms import PlatformError, configure, found, here, multiplying
from amp_fuzz.backends.jax.recording import Recorder
from amp_fuzz.backends.process import Apart
from amp_fuzz.backends.reference import ReferenceRuntime, reference_runtime
from amp_fuzz.backends.torch_base import TorchBackend
from amp_fuzz.cases.case import Case, Precision
from amp_fuzz.cases.program import (
    Branch,
    Checkpoint,
    InferenceMode,
    Node,
    NoGrad,
    Region,
    Uncompiled,
    transform,
    unwrapped,
)
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.policies.tables import DEVICES, load_table
from amp_fuzz.reference import as_device

__all__ = ["JaxBackend", "Program", "backends"]

_DEFAULT = "cuda"
_KEPT = 100  # cases after which compiled code is freed: up to 12 MiB each op by op


@dataclass(frozen=True, slots=True)
class JaxBackend(TorchBackend):
    """The program on JAX, under the casts of the policy table of `device`.

    jit: as one ``jax.jit``. excess: XLA may keep more precision than the program asks for.
    """

    device: str = _DEFAULT
    exact: bool = False
    jit: bool = False
    excess: bool = False
    process: Apart = field(compare=False, kw_only=True)

    @property
    def name(self) -> str:
        """``jax``, ``jax[jit]``, ``jax[jit+excess]``, ``jax[cpu]``, ..."""
        words = ["jit"] * self.jit + ["excess"] * self.excess
        words += [self.device] if self.device != _DEFAULT else []
        return f"jax[{'+'.join(words)}]" if words else "jax"

    def availability(self) -> Availability:
        """Return whether JAX is installed, and the platform that it finds.

        Another process imports JAX, so that this one does not take the platform.
        """
        if importlib.util.find_spec("jax") is None:
            return Availability("missing", "pip install 'amp-fuzz[jax]'")
        try:
            platform = found()
        except PlatformError as error:
            return Availability("broken", str(error))
        lowered = f"{len(CATALOGUE.keys() - NOT_LOWERED)} of {len(CATALOGUE)} ops lowered"
        return Availability("ready", f"{platform}; the casts of {self.device}, {lowered}")

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """The precisions of products, each as often as it is drawn."""
        return DRAWN

    @property
    def settings(self) -> tuple[str, ...]:
        """None: torch's settings are not JAX's."""
        return ()

    def alone(self) -> bool:
        """Return whether the platform takes only one process."""
        return found().exclusive

    def supports(self, op: str, form: str) -> bool:
        """Return whether an op is lowered."""
        return op not in NOT_LOWERED

    def fit(self, case: Case) -> Case:
        """Return the case without what JAX programs cannot do."""
        return case.with_program(body=_plain(case.program.body)).with_plan(
            entry="decorator" if case.plan.entry == "decorator" else "context",
            backward="none" if case.plan.backward == "none" else "outside",
            backward_context=None,
            second="none",
            steps=1,
            loop="outside",
            first_pass="none",
            checkpoint="none",
            thread="none",
            interrupted=False,
            scaler=False,
            transform="none",
            later=(),
            reuse="calls",
            micro_batches=1,
            hook="none",
            update="in_place",
        )

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Run cases in the JAX process."""
        return [self.process.run(case) for case in cases]

    def reference(self) -> ReferenceRuntime:
        """Return the reference on CPU tensors, which it treats as the device's."""
        found = partial(numerics_of, self.process)
        return replace(_reference(self.device), found=found)

    def facts(self) -> Facts:
        """Return the promise that JAX must keep."""
        return Facts(
            promise="[JAX](https://docs.jax.dev): a lowered program computes what eager computes.",
            library="JAX",
            installs="amp-fuzz[jax]",
            implements=(),
        )

    def refuses(self, modules: Mapping[str, torch.nn.Module]) -> str:
        """Return the reason: only programs are lowered."""
        return "it lowers only programs of the catalogue's ops to JAX, no callables"


def _reference(device: str) -> ReferenceRuntime:
    table = load_table(device)

    @contextmanager
    def scope() -> Iterator[None]:
        with as_device(device, table, tensors="cpu"):
            yield

    found = reference_runtime(device, scope=scope)
    return ReferenceRuntime(replace(found.runtime, place=lambda tensor: tensor))


def _plain(body: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return a body without checkpoints, and with ``no_grad`` for ``inference_mode``."""

    def plain(node: Region, inner: tuple[Node, ...]) -> tuple[Region]:
        inference = isinstance(node.context, InferenceMode)
        return (Region(NoGrad() if inference else node.context, inner),)

    return transform(unwrapped(body, (Checkpoint, Uncompiled, Branch)), region=plain)


class Program:
    """JAX in this process: cases are recorded under the reference and replayed on JAX."""

    def __init__(self, device: str, jit: bool, excess: bool) -> None:
        configure(f"--xla_allow_excess_precision={str(excess).lower()}")
        os.environ.setdefault("JAX_ENABLE_X64", "true")
        from amp_fuzz.backends.jax import compiling, replay

        compiling.frugal()
        self.device, self.jit, self.excess = device, jit, excess
        self.prepared = replay.prepared
        self.said = here()
        self.exclusive = self.said.exclusive
        self.platform = self.said.name
        self.cases = 0

    def observe(self, case: Case) -> Observation:
        """Record a case under the reference, and replay the recording on JAX."""
        seen, recorder = record(case, _reference(self.device))
        self.tidy()
        try:
            if recorder.failed is not None:
                raise recorder.failed
            with multiplying(case.plan.precision):
                made = self.prepared(recorder.recording, jit=self.jit)()
                if self.excess:
                    strict = self.prepared(recorder.recording, jit=self.jit, strict=True)()
                    seen.elided = _changed(made, strict)
        except Exception as error:  # ours or XLA's: the reference ran
            raised = Raised(type(error).__name__, str(error), 0, "")
            return Observation(raised=raised, platform=self.platform)
        seen.values = {label: made.get(label) for label in seen.values}
        seen.platform = self.platform
        return seen

    def tidy(self) -> None:
        """Free compiled kernels from time to time: most shapes occur once."""
        self.cases += 1
        if self.cases % _KEPT == 0:
            import jax

            from amp_fuzz.backends.jax import compiling

            jax.clear_caches()
            compiling.tidy()

    def expect(self, case: Case) -> Observation:
        """Run a case under the reference."""
        return _reference(self.device).run(case)


def _changed(
    made: Mapping[str, torch.Tensor | None], strict: Mapping[str, torch.Tensor | None]
) -> tuple[str, ...]:
    """Return the labels of values that differ in a bit."""

    def same(label: str) -> bool:
        a, b = made[label], strict[label]
        if a is None or b is None:
            return a is b
        return bool(torch.equal(harness.bits(a), harness.bits(b)))

    return tuple(label for label in made if not same(label))


def record(case: Case, reference: ReferenceRuntime) -> tuple[Observation, Recorder]:
    """Run a case under the reference; return what was observed, and a recorder of its forward."""
    recorder = Recorder()
    base = reference.of(case)

    @contextmanager
    def scope() -> Iterator[None]:
        with recorder, base.scope():
            yield

    def driver(names: Mapping[str, Any]) -> dict[str, Any]:
        drive = names["program"]

        def program(*inputs: torch.Tensor) -> Any:
            if not recorder.recording.weights:
                for spec, tensor in zip(case.program.inputs, inputs, strict=True):
                    if spec.requires_grad:
                        recorder.weight(spec.name, tensor)
            return drive(*inputs)

        def trains(outputs: Any) -> Any:
            found: list[torch.Tensor] = prelude.trains(outputs)
            recorder.stop()
            for output in found:
                start = prelude.cotangent(output.detach())
                recorder.start(output, start)
            return found

        return {"program": program, "trains": trains}

    def place(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    runtime = replace(base, scope=scope, noted=recorder.observe, driver=driver, place=place)
    return harness.run(case, runtime), recorder


def backends() -> list[Backend]:
    """Return JAX op by op, jitted, and jitted with excess precision; then other policies."""
    ways = [(False, False), (True, False), (True, True)]
    found: list[Backend] = [_backend(_DEFAULT, *way) for way in ways]
    return found + [_backend(d, False, False) for d in DEVICES if d != _DEFAULT]


def _backend(device: str, jit: bool, excess: bool) -> JaxBackend:
    process = Apart(f"{__name__}:Program", device, jit, excess)
    # Jitted, both calls of a case are one program: XLA may fuse each in its own way.
    return JaxBackend(device=device, jit=jit, excess=excess, repeats=not jit, process=process)
