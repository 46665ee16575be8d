"""The reference as a runtime, with which every backend is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from amp_fuzz import reference
from amp_fuzz.backends import harness, imitation
from amp_fuzz.backends.determinism import EXACT, Kernels, Trace
from amp_fuzz.backends.harness import Observation, Runtime
from amp_fuzz.backends.imitation import Composed
from amp_fuzz.backends.source import cast_lines
from amp_fuzz.cases.case import Case, Precision
from amp_fuzz.policies.tables import PolicyTable
from amp_fuzz.reference import as_device
from amp_fuzz.reference.autocast import reset, state
from amp_fuzz.reference.shadow.band import Band
from amp_fuzz.reference.shadow.mode import Promise, Reach, Shadow
from amp_fuzz.reference.shadow.products import Products
from amp_fuzz.reference.shadow.written import casting
from amp_fuzz.reference.state import default_dtypes

__all__ = [
    "Numerics",
    "ReferenceRuntime",
    "following",
    "reference_on_cpu",
    "reference_runtime",
    "surrounded",
    "within",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """How a backend computes by its documentation, where eager's kernels do not.

    reorders: it may add in another order. flushes: numbers below the smallest normal one may count
    as 0. in_turn: a sum of float32 may add one term after the other. products: how it may round the
    inputs of an op that is a matrix product or a convolution, by the precision of a case's plan.
    adding: whether an op with inputs of a dtype may add in that dtype. Both are called while the
    settings of the plan are applied. kernels: those that are documented as nondeterministic.
    `Shadow` has what follows. `flushes` and `in_turn` make bands wider, and are used only where a
    value is outside the narrower one.
    """

    reorders: bool = False
    flushes: bool = False
    in_turn: bool = False
    products: Callable[[Precision, Any], Products | None] | None = None
    adding: Callable[[Any, torch.dtype], bool] | None = None
    kernels: Kernels = EXACT

    @property
    def loose(self) -> bool:
        """Whether there is a wider band."""
        return self.flushes or self.in_turn

    def adds(self, func: Any, dtype: torch.dtype) -> bool:
        """Return whether an op with inputs of a dtype may add in it, in any order."""
        also = self.adding is not None and self.adding(func, dtype)
        return also or self.kernels.adding(func)


@dataclass(frozen=True, slots=True)
class ReferenceRuntime:
    """Runs cases under `amp_fuzz.reference.autocast` and logs the kernels that they reach.

    numerics: the arithmetic of the compared backend. found: returns it instead, where only the
    platform that runs the backend can tell; called when a value differs. promise: the
    roundings that the backend must not leave out; see `Shadow`.
    """

    runtime: Runtime
    numerics: Numerics = field(default=Numerics(), kw_only=True)
    found: Callable[[], Numerics] | None = field(default=None, kw_only=True)
    promise: Promise = field(default="none", kw_only=True)

    def arithmetic(self) -> Numerics:
        """Return the arithmetic of the compared backend."""
        return self.numerics if self.found is None else self.found()

    def follows(self) -> bool:
        """Return whether shadows can follow a run."""
        return imitation.current().follows()

    def ways(self, case: Case) -> Callable[[], AbstractContextManager[None]] | None:
        """Return the context in which a case is cast as the backend documents; None: as torch."""
        return None

    def of(self, case: Case) -> Runtime:
        """Return the runtime for a case: the same for all, unless a backend says otherwise."""
        return self.runtime

    def casts(self, case: Case) -> bool:
        """Return whether a case writes a cast whose rounding must not be left out."""
        return self.promise != "none" and bool(cast_lines(case.program))

    def run(self, case: Case) -> Observation:
        """Run one case."""
        meant, runtime = self._imitating(case)  # that may run it, too
        with reference.log_kernels() as kernels, _casting(meant):
            seen = harness.run(meant, runtime)
        seen.kernels = kernels
        return seen

    def _imitating(self, case: Case) -> tuple[Case, Runtime]:
        """Return the case as the backend runs it, and its runtime, under the current imitations."""
        current = imitation.current()
        meant, runtime = current.rewrite(case), surrounded(self.of(case))
        return meant, _wrapping(runtime, current, case) if current.wraps() else runtime

    def asked(self, case: Case) -> set[str] | None:
        """Run one case, and return the bugs, of all backends, that its result depends on.

        None means unknown, because the case runs in another process.
        """
        with imitation.asking() as names:
            self.run(case)
        return names

    def shadowed(
        self,
        case: Case,
        samples: int,
        seed: int,
        reach: Reach = "nominal",
        *,
        promise: Promise = "none",
        loose: bool = False,
    ) -> tuple[Observation, dict[str, Band]]:
        """Run one case with shadows, and return a band for each observed value.

        loose: the wider band that `numerics` allows.
        """
        numerics = self.arithmetic()
        mode = Shadow(
            samples,
            seed,
            reach,
            flushes=loose and numerics.flushes,
            reorders=numerics.reorders,
            in_turn=loose and numerics.in_turn,
            products=numerics.products and partial(numerics.products, case.plan.precision),
            adding=numerics.adds if numerics.kernels or numerics.adding else None,
            promise=promise,
        )
        bands: dict[str, Band] = {}

        def note(label: str, tensor: torch.Tensor) -> None:
            bands[label] = mode.band(tensor)

        meant, base = self._imitating(case)

        @contextmanager
        def scope() -> Iterator[None]:
            with mode, base.scope():
                yield

        runtime = replace(base, scope=scope, noted=note, follow=following(scope))
        with _casting(meant):
            return harness.run(meant, runtime), bands

    def traced(self, case: Case, kernels: Kernels) -> Trace:
        """Run one case, and return what is computed from the results of some kernels."""
        trace = Trace(kernels)
        meant, base = self._imitating(case)
        harness.run(meant, replace(within(base, lambda: trace), noted=trace.note))
        return trace


def _casting(case: Case) -> AbstractContextManager[None]:
    """Return a context that knows which lines of a case are casts."""
    return casting({harness.PROGRAM: cast_lines(case.program)})


def surrounded(runtime: Runtime) -> Runtime:
    """Return a runtime whose runs are in what is around them while bugs are imitated."""
    current = imitation.current()
    return within(runtime, current.around) if current.surrounds() else runtime


def within(runtime: Runtime, context: Callable[[], AbstractContextManager[Any]]) -> Runtime:
    """Return a runtime whose runs are in an additional context, in each of their threads."""
    base = runtime.scope

    @contextmanager
    def scope() -> Iterator[None]:
        with base(), context():
            yield

    return replace(runtime, scope=scope, follow=following(scope))


def _wrapping(runtime: Runtime, composed: Composed, case: Case) -> Runtime:
    base = runtime.driver

    def driver(names: Mapping[str, Any]) -> dict[str, Any]:
        changed = {} if base is None else base(names)
        program = changed.get("program", names["program"])
        return {**changed, "program": composed.wrap(program, case)}

    return replace(runtime, driver=driver)


def following(
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a `Runtime.follow`: another thread enters a context, since modes are thread-local.

    So are the rules of autocast: the other thread inherits them.
    """

    def follow(function: Callable[..., Any]) -> Callable[..., Any]:
        inherited = reference.inherited()

        def followed(*args: Any, **kwargs: Any) -> Any:
            with inherited(), scope():
                return function(*args, **kwargs)

        return followed

    return follow


def reference_runtime(
    device: str,
    *,
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext,
    fake: bool = False,
) -> ReferenceRuntime:
    """Return the reference for one device type's tensors."""
    return ReferenceRuntime(
        Runtime(
            device=device,
            autocast=reference.autocast,
            checkpoint=reference.checkpoint(device),
            custom_fwd=reference.custom_fwd,
            custom_bwd=reference.custom_bwd,
            transforms=reference.transforms(device),
            custom_op=reference.custom_op,
            autocast_dtype=lambda device, dtype: default_dtypes({device: dtype}),
            state=_named,
            reset=reset,
            scope=scope,
            fake=fake,
            follow=following(),
        )
    )


def reference_on_cpu(
    device: str, table: PolicyTable, numerics: Numerics, *, elsewhere: bool = False
) -> ReferenceRuntime:
    """Return the reference on CPU tensors, which it treats as a device's and shadows can follow.

    numerics: the arithmetic of the device. elsewhere: see `as_device`.
    """
    scope = partial(as_device, device, table, tensors="cpu", elsewhere=elsewhere)
    found = reference_runtime(device, scope=scope)
    runtime = replace(found.runtime, place=lambda tensor: tensor)
    return ReferenceRuntime(runtime, numerics=numerics)


def _named() -> dict[str, object]:
    return {
        "autocast of the reference": state(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
    }
