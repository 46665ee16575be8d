"""Adapt backends to call the checked callable instead of a case's program.

`Checked` is a backend that runs one callable, whatever the case; it only reads the case's plan. So
the same judge decides as in a run, including known findings.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any

import msgspec
import torch

from amp_fuzz import reference
from amp_fuzz.backends import Availability, Backend, imitation
from amp_fuzz.backends.base import Call, Calls, facts_of, kernels_of
from amp_fuzz.backends.determinism import Kernels, Trace
from amp_fuzz.backends.harness import Observation, Runtime
from amp_fuzz.backends.reference import ReferenceRuntime, following, surrounded, within
from amp_fuzz.backends.torch_state import chosen_dtypes
from amp_fuzz.cases.case import Case, Plan, inferring
from amp_fuzz.cases.program import Autocast, Program, Ref, Statement, TensorSpec
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.interfaces.check.call import Names, call, outputs_of
from amp_fuzz.interfaces.check.intermediates import Inside
from amp_fuzz.interfaces.check.stale import casting_again
from amp_fuzz.interfaces.check.subject import Subject
from amp_fuzz.interfaces.check.trace import followed
from amp_fuzz.interfaces.check.trees import mapped
from amp_fuzz.oracle.compare import same
from amp_fuzz.reference import load_table
from amp_fuzz.reference.shadow.band import Band
from amp_fuzz.reference.shadow.mode import Promise, Reach, Shadow
from amp_fuzz.reference.shadow.written import calling

__all__ = ["Checked", "case_of", "earlier", "refusal"]


def refusal(backend: Any, subject: Subject) -> str:
    """Return why a backend cannot call a callable, or ""."""
    if not isinstance(backend, Calls):
        return "it runs cases, not callables: make it an amp_fuzz.backends TorchBackend"
    if reason := backend.refuses(subject.modules):
        return reason
    if not _alike(type(backend)):
        return "it runs cases in its own way and cannot call a callable"
    return ""


def _alike(kind: type) -> bool:
    """Return whether no class overrides how cases run without overriding how callables run."""
    makes = [vars(c).keys() for c in kind.__mro__]
    called = next(i for i, names in enumerate(makes) if "called" in names)
    return not any(names & {"run", "observe"} for names in makes[:called])


@dataclass(slots=True)
class Checked:
    """A backend that calls a subject.

    names: the names of its values. seen: by plan, the last observations of it and its reference.
    bands: the bands of shadows. casts: whether it has a cast to 16 bits that the backend must not
    leave out. again: whether the reference casts a weight again after it changed; see `stale`.
    later: whether another call comes before each call of the backend; see `earlier`.
    """

    subject: Subject
    inner: Any
    names: Names = field(default_factory=Names)
    seen: dict[Plan, dict[str, Observation]] = field(default_factory=dict)
    bands: dict[Any, tuple[Observation, dict[str, Band]]] = field(default_factory=dict)
    casts: bool = False
    again: bool = False
    later: bool = False

    @property
    def name(self) -> str:
        """The name of the backend."""
        return str(self.inner.name)

    @property
    def device(self) -> str:
        """Its device type."""
        return str(self.inner.device)

    @property
    def trains(self) -> bool:
        """Whether backward passes run."""
        return bool(self.inner.trains)

    @property
    def values(self) -> bool:
        """Whether results have values."""
        return bool(self.inner.values)

    @property
    def exact(self) -> bool:
        """Whether it runs the reference's kernels."""
        return bool(self.inner.exact)

    @property
    def repeats(self) -> bool:
        """Whether it repeats its results."""
        return bool(self.inner.repeats)

    def availability(self) -> Availability:
        """Return whether it can be used here."""
        found: Availability = self.inner.availability()
        return found

    def supports(self, op: str, form: str) -> bool:
        """Return True: a callable's ops are not checked."""
        return True

    def fit(self, case: Case) -> Case:
        """Return the case, without a backward pass if the backend has none."""
        infers = self.inner.infers(self.subject.function)
        return inferring(case) if infers or not self.trains else case

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Call the subject under the plan of each case."""
        return [self._observe(case) for case in cases]

    def ladder(self) -> Sequence[Backend]:
        """Return the backends that do less than this one."""
        rungs = self.inner.ladder()
        return [Checked(self.subject, rung, self.names, later=self.later) for rung in rungs]

    def reference(self) -> CheckedReference:
        """Return the reference, which calls the same subject."""
        runtime = self.inner.reference().runtime
        return CheckedReference(casting_again(runtime) if self.again else runtime, self)

    def kernels(self) -> Kernels:
        """Return the kernels that are documented as nondeterministic."""
        return kernels_of(self.inner)

    def shadows(self) -> CheckedReference:
        """Return the reference: a callable cannot be moved to the CPU."""
        return self.reference()

    def earlier(self, plan: Plan) -> Plan | None:
        """Return the plan of the call before that of a plan, or None.

        What is compiled in that call must not serve the next one.
        """
        contexts = earlier(self.device, plan.contexts)
        if not (self.later and contexts and facts_of(self.inner).reenters):
            return None
        return msgspec.structs.replace(plan, contexts=contexts, backward="none")

    def _observe(self, case: Case) -> Observation:
        plan = case.plan
        before = self.earlier(plan)
        found = None if before is None else self._second(before, plan)
        if found is None:
            found = self._invoked(plan, lambda runtime, made: self.called(runtime, plan, made))
        self.saw("observed", found, plan)
        return found

    def _second(self, before: Plan, plan: Plan) -> Observation | None:
        """Call the subject under two plans. Return what the second call does.

        None if the first one raises: that says nothing of the second.
        """
        apart = replace(self, names=Names())
        raised = False

        def calls(runtime: Runtime, made: Any) -> Observation:
            nonlocal raised
            seen = apart.called(runtime, before, made)
            raised = seen.raised is not None
            return seen if raised else self.called(runtime, plan, made)

        found = self._invoked(plan, calls)
        return None if raised else found

    def _invoked(self, plan: Plan, calls: Call) -> Observation:
        found: Observation = self.inner.called(self.subject.function, plan, calls)
        return found

    def called(self, runtime: Runtime, plan: Plan, invoke: Any = None) -> Observation:
        """Call the subject under one implementation; without values, observe inner results too."""
        run = partial(
            call,
            self.subject,
            runtime,
            plan,
            self.names,
            numbers=self.values,
            redirect=runtime.autocast is not torch.autocast,
        )
        if self.values:
            return run(invoke=invoke)
        with followed(self.subject, lambda *call: None) as stack:
            inside = Inside(stack)

            def watched(*args: Any, **kwargs: Any) -> Any:
                with inside:
                    return self.subject.function(*args, **kwargs)

            seen = run(invoke=watched)
        own = {self.names.label("i", name): t for name, t in inside.results.items()}
        seen.values = {**own, **seen.values}
        return seen

    def saw(self, side: str, found: Observation, plan: Plan) -> None:
        """Keep the observation of a side, and drop values that only the other side may lack.

        Inner results are compared up to the first that only one side has. From there the code takes
        another path, and the same name may belong to another call.
        """
        sides = self.seen.setdefault(plan, {})
        sides[side] = found
        for seen in sides.values():
            self.names.complete(seen)
        inside = [[k for k in seen.values if k[0] == "i"] for seen in sides.values()]
        rows = takewhile(lambda row: len({*row}) == 1, zip(*inside, strict=False))
        shared = {row[0] for row in rows}
        self.names.dropped.update(*inside)
        self.names.dropped -= shared
        for seen in sides.values():
            seen.values = {k: v for k, v in seen.values.items() if k[0] != "i" or k in shared}


@dataclass(frozen=True, slots=True)
class CheckedReference(ReferenceRuntime):
    """The reference, calling a subject."""

    checked: Checked

    def run(self, case: Case) -> Observation:
        """Call the subject under the reference."""
        checked, inner = self.checked, self.checked.inner
        with reference.log_kernels() as kernels, self._calling() as casts:
            seen = checked.called(self._runtime(), self._plan(case), self._wrapped(case))
        seen.kernels = kernels
        checked.casts |= bool(casts)
        checked.saw("expected", seen, case.plan)
        assert inner is not None
        return seen

    def casts(self, case: Case) -> bool:
        """Return whether the subject writes a cast whose rounding must not be left out."""
        return self.checked.casts

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
        """Call the subject with shadows; return a band for each value on which the sides differ.

        No backend of `check` has a wider band: `loose` says nothing here.
        """
        wanted = _differing(self.checked.seen[case.plan])
        key = (
            case.plan,
            samples,
            seed,
            reach,
            promise,
            imitation.current().names,
            frozenset(wanted),
        )
        if key not in self.checked.bands:
            mode = Shadow(samples, seed, reach, promise=promise)
            self.checked.bands[key] = self._followed(case, mode, wanted)
        return self.checked.bands[key]

    def _followed(
        self, case: Case, mode: Shadow, wanted: set[str]
    ) -> tuple[Observation, dict[str, Band]]:
        bands: dict[str, Band] = {}

        def note(label: str, tensor: torch.Tensor) -> None:
            if label in wanted:
                if label in self.checked.names.numbers:
                    mode.forget(tensor)
                bands[label] = mode.band(tensor)

        base = self._runtime()

        @contextmanager
        def scope() -> Iterator[None]:
            with mode, base.scope():
                yield

        runtime = replace(base, scope=scope, noted=note, follow=following(scope))
        with self._calling():
            return self.checked.called(runtime, self._plan(case), self._wrapped(case)), bands

    def traced(self, case: Case, kernels: Kernels) -> Trace:
        """Call the subject, and return what is computed from the results of some kernels.

        On a device, no shadow can follow it: nothing can be said of these values.
        """
        trace = Trace(kernels)
        runtime = replace(within(self._runtime(), lambda: trace), noted=trace.note)
        with self._calling():
            self.checked.called(runtime, self._plan(case), self._wrapped(case))
        if self.checked.exact:
            trace.spread = dict.fromkeys(trace.spread, "any")
        return trace

    def _calling(self) -> AbstractContextManager[list[torch.dtype]]:
        """Return a context that tracks the casts that a backend must not leave out."""
        promise = self.checked.inner.reference().promise
        return nullcontext([]) if promise == "none" else calling()

    def _runtime(self) -> Runtime:
        return surrounded(self.runtime)

    def _plan(self, case: Case) -> Plan:
        return imitation.current().rewrite(case).plan

    def _wrapped(self, case: Case) -> Callable[..., Any] | None:
        """Return a call that imitates what the backend makes of a program."""
        current = imitation.current()
        if not current.wraps():
            return None
        return imitated(self.checked.subject.function, lambda made: current.wrap(made, case))


def imitated(function: Callable[..., Any], traced: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs as the backend traces it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        box: list[Any] = []

        def program() -> tuple[torch.Tensor, ...]:
            box.append(function(*args, **kwargs))
            return tuple(t for _, t in outputs_of(box[0], numbers=False))

        outputs = list(traced(program)())
        plain = [t for _, t in outputs_of(box[0], numbers=False)]
        changed = any(a is not b for a, b in zip(outputs, plain, strict=True))
        if not changed:
            return box[0]
        made = iter(outputs)
        return mapped(lambda t: next(made) if isinstance(t, torch.Tensor) else t, box[0])

    return run


def _differing(seen: Mapping[str, Observation]) -> set[str]:
    """Return the labels of the values on which the two sides differ in a bit."""
    expected, observed = seen["expected"].values, seen["observed"].values
    found = set()
    for label, want in expected.items():
        got = observed.get(label)
        if want is None or got is None or (want.dtype, want.shape) != (got.dtype, got.shape):
            continue
        if not same(want, got):
            found.add(label)
    return found


def earlier(device: str, contexts: tuple[Autocast, ...]) -> tuple[Autocast, ...]:
    """Return the contexts of a call whose compiled code must not serve a call under others.

    Autocast is on there, in the 16-bit dtype that the other call does not have: results in 16 bits
    differ in their dtype, whatever their values. (Without autocast, results would mostly differ by
    less than the rounding of the other call.) Empty if the device has no such dtype.
    """
    default = str(chosen_dtypes().get(device, load_table(device).default_dtype))
    dtype = (contexts[-1].dtype if contexts else None) or default.removeprefix("torch.")
    halves = [d for d in ("float16", "bfloat16") if d in load_table(device).supported_dtypes]
    return next(((Autocast(dtype=half),) for half in halves if half != dtype), ())


# -- the case that stands for a call --------------------------------------------------------------


def case_of(plan: Plan, expected: Observation, seed: int, called: Collection[str] = ()) -> Case:
    """Return a case that represents a call for the judge.

    The judge needs two facts from it. The dependencies: all outputs depend on all inputs, in one
    statement without a catalogue op. And the ops, for known entries that name some: those whose
    autocast kernels were reached, and those that the called functions name.
    """
    numbers = {label.partition(".")[0][1:] for label in expected.values if label[0] == "w"}
    weights = [TensorSpec(f"w{n}", (), "float32", role="weight") for n in sorted(numbers)]
    made = tuple(label for label in expected.values if label[0] in "vb")
    reached = {k.overload for k in expected.kernels}
    names = {name.rstrip("_") for name in called}
    ops = (
        name
        for name, op in CATALOGUE.items()
        if reached.intersection(o.removeprefix("aten::") for o in op.overloads)
        or not names.isdisjoint((name.partition(".")[0], name.replace(".", "_")))
    )
    body = (
        Statement("?", "function", tuple(Ref(spec.name) for spec in weights), (), made),
        *(Statement(name, "function", ()) for name in ops),
    )
    return Case(Program(tuple(weights), body, made), plan, seed)
