"""`amp_fuzz.check_op`: the contracts of a custom op under autocast."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from amp_fuzz.backends import Backend
from amp_fuzz.backends.base import Calls
from amp_fuzz.backends.harness import Observation, Runtime, quiet
from amp_fuzz.cases.case import Plan
from amp_fuzz.cases.program import Autocast
from amp_fuzz.config import Options
from amp_fuzz.interfaces.check.arguments import (
    Context,
    caller_of,
    check_arguments,
    check_surroundings,
    chosen_backends,
    context_list,
)
from amp_fuzz.interfaces.check.custom_ops import declare_custom_ops
from amp_fuzz.interfaces.check.fork import Died
from amp_fuzz.interfaces.check.messages import DEBUG, WAITS
from amp_fuzz.interfaces.check.steps import Asked, Call, survived, unsupported
from amp_fuzz.interfaces.check.subject import CheckError
from amp_fuzz.interfaces.check_op.contracts import RULES, Rule
from amp_fuzz.interfaces.check_op.passes import Passes, contexts_shown
from amp_fuzz.interfaces.check_op.result import Contract, OpResult, State
from amp_fuzz.interfaces.check_op.target import Target
from amp_fuzz.interfaces.check_op.tried import Broken, Skipped, Tried, Unjudged
from amp_fuzz.runs.setup import known_of

__all__ = ["CONTRACTS", "OP_BACKENDS", "check_op"]

OP_BACKENDS = ("eager-cpu", "compile[aot_eager]", "export")
"""The default backends of `check_op`. The first that runs eager's kernels judges the contracts."""

CONTRACTS: tuple[str, ...] = tuple(RULES)
"""The names of the contracts."""


def check_op(
    op: Any,
    /,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    contracts: Collection[str] = CONTRACTS,
    backends: Iterable[str | Backend] | str | Backend = OP_BACKENDS,
    autocast: Context | Sequence[Context] = torch.bfloat16,
    in_dims: Any = None,
    seed: int = 0,
    known: Iterable[str | Path] = (),
    seconds: float = 60.0,
    store: str | Path | None = ".amp-fuzz",
    isolate: bool | None = None,
) -> OpResult:
    """Check what an op promises to those who call it under autocast.

    `amp_fuzz.check` compares it on each backend with the reference: outputs and gradients, eager,
    compiled and exported. Then each contract is judged with autocast off and in each context:

    - ``retain``: a second backward pass with ``retain_graph=True`` gives the same gradients.
    - ``modified``: after an input, an output or a weight is written in place, backward raises, or
      its gradients do not change.
    - ``needs``: each gradient is the same if no other input requires one.
    - ``gradcheck``: each gradient is the derivative that the op's values have, at the inputs and at
      others of many sizes, in float64 if the op runs in it. The bound for their difference comes
      from the values: how far a polynomial through those beside a point is from them.
    - ``double``: the second derivative is right (`torch.autograd.gradgradcheck` in float64), or
      refused with a RuntimeError.
    - ``placement``: a backward of its own gives the same gradients after the context, inside it and
      under another one: it misses no state of its forward.
    - ``state``: autocast's state and the grad modes are as before, after the call and after
      backward.
    - ``alias``: no output shares memory with an input or another output, unless the schema says so.
    - ``fake``: on fake tensors it returns the dtypes, shapes and strides of the real call.
    - ``vmap``: `torch.vmap` gives what one call after another gives, if it declares a rule.
    - ``opcheck``: `torch.library.opcheck` passes.

    Args:
        op: a `torch.library.custom_op`, an op of ``torch.ops``, a subclass of
            `torch.autograd.Function`, a `torch.nn.Module`, or any callable.
        inputs: its arguments; tensors are copied. Those that require grad are differentiated. If
            none does, all floating ones are, if the op is differentiable.
        kwargs: its keyword arguments.
        contracts: the names of the contracts to judge; ``-name`` leaves one of all out.
        backends, autocast, seed, known, seconds, store, isolate: as in `amp_fuzz.check`. One of the
            backends must run eager's kernels, such as ``eager-cpu``.
        in_dims: as in `torch.vmap`: judges ``vmap`` for an op that declares no rule, or for these
            dimensions.

    Returns the result. It is true if `ok`, and its `raise_if_failed` raises otherwise.

    Raises:
        CheckError: the op or an argument cannot be checked, or it is called within a context.
        BackendError, MissingBackend: a backend is unknown, or a named one cannot be used here.
    """
    check_arguments(kwargs=kwargs, backward=True, seed=seed)
    check_surroundings(backward=True)
    rules = _rules(contracts)
    target = Target.of(op, inputs, kwargs, seed, in_dims)
    declare_custom_ops()
    chosen = chosen_backends(backends)
    call, remarks = caller_of(isolate, chosen)
    eager = _eager(chosen)
    contexts = context_list(autocast)
    entries = known_of(Options(known=tuple(map(Path, known))))
    if (trained := _trained(call, target, eager)) is not None:
        target, remarks = trained, (*remarks, _TRAINED)
    threads, kept = torch.get_num_threads(), target.subject.kept()
    torch.set_num_threads(1)  # as in a run: some kernels sum in another order on several threads
    try:
        runs = []
        for backend in chosen:
            subject = target.subject_for(backend)
            runs += [
                survived(call, Asked(subject, backend, context, entries, True, seconds, store))
                for context in contexts
            ]
        usable = [c for c in contexts if c and not unsupported(eager, c)]
        asked = _Contracts(target, eager, ((), *usable))
        judged = tuple(asked.judged(call, name, rule) for name, rule in rules.items())
    finally:
        torch.set_num_threads(threads)
        kept.restore()
    return OpResult(target.name, target.form, tuple(runs), judged, seed, remarks)


def _rules(names: Collection[str]) -> dict[str, Rule]:
    given = [names] if isinstance(names, str) else list(names)
    if unknown := [name for name in given if name.removeprefix("-") not in RULES]:
        raise CheckError(f"contracts has {unknown[0]!r}: use {', '.join(RULES)}")
    wanted = [name for name in given if name in RULES]
    if len(wanted) < len(given):
        wanted = [name for name in wanted or RULES if f"-{name}" not in given]
    return {name: rule for name, rule in RULES.items() if name in wanted}


_TRAINED = "None of its inputs requires grad: the floating ones were made to."


def _trained(call: Call, target: Target, eager: Backend) -> Target | None:
    """Return a target whose floating inputs require grad, if none does and it has a derivative."""
    if (trained := target.trained()) is None:
        return None
    try:
        (differentiable,) = call(_differentiable, trained, eager)
    except Died:  # the contracts say so
        return None
    return trained if differentiable else None


def _differentiable(target: Target, eager: Backend) -> Iterator[bool]:
    """Yield whether a target has a gradient without autocast."""
    runtime = _runtime_of(eager, target.subject.function)
    seen = Passes(target.subject, runtime, ()).plain()
    yield seen.raised is None and any(
        value is not None for label, value in seen.values.items() if label[0] == "w"
    )


def _eager(backends: Sequence[Backend]) -> Backend:
    for backend in backends:
        if backend.exact and backend.values and backend.trains and isinstance(backend, Calls):
            return backend
    names = ", ".join(b.name for b in backends)
    raise CheckError(f"backends={names}: none runs eager's kernels; add eager-cpu")


@dataclass(frozen=True, slots=True)
class _Contracts:
    """The contracts of a target in some contexts."""

    target: Target
    backend: Backend
    contexts: Sequence[tuple[Autocast, ...]]

    def judged(self, call: Call, name: str, rule: Rule) -> Contract:
        """Return one contract, even if a process died."""
        if reason := rule.lacks(self.target):
            return Contract(name=name, state="skipped", detail=reason)
        found: list[Contract] = []
        try:
            found.extend(call(self.each, name, rule))
        except Died as died:
            under = self.contexts[len(found)] if rule.everywhere else ()
            state: State = "unjudged" if died.waits else "broken"
            found.append(
                Contract(
                    name=name,
                    state=state,
                    detail=str(died),
                    autocast=contexts_shown(under),
                    where=died.line,
                    advice=WAITS if died.waits else DEBUG,
                )
            )
        return _summed(found)

    def each(self, name: str, rule: Rule) -> Iterator[Contract]:
        """Yield the contract in each context."""
        for contexts in self.contexts if rule.everywhere else self.contexts[:1]:
            yield self._one(name, rule, contexts)

    def _one(self, name: str, rule: Rule, contexts: tuple[Autocast, ...]) -> Contract:
        runtime = _runtime_of(self.backend, self.target.subject.function)
        tried = Tried(self.target, self.backend, Passes(self.target.subject, runtime, contexts))
        under = contexts_shown(contexts)
        try:
            with quiet():
                detail = rule.judge(tried)
        except Broken as broken:
            return Contract(
                name=name,
                state="broken",
                detail=str(broken),
                autocast=under,
                where=broken.where,
                advice=rule.advice,
            )
        except Skipped as skipped:
            return Contract(name=name, state="skipped", detail=str(skipped), autocast=under)
        except Unjudged as unjudged:
            return Contract(
                name=name, state="unjudged", detail=str(unjudged), autocast=under, advice=_FIX
            )
        return Contract(name=name, state="kept", detail=detail, autocast=under)


_FIX = "Fix what it raises first, or give inputs and contexts with which it runs and repeats."


def _summed(found: Sequence[Contract]) -> Contract:
    """Return the worst of a contract's results; the first context is without autocast."""
    for state in ("broken", "unjudged", "kept", "skipped"):
        for one in found:
            if one.state == state:
                plain = state in ("kept", "skipped")
                return replace(one, autocast="") if plain else one
    raise AssertionError("a contract has at least one result")


def _runtime_of(backend: Any, function: Any) -> Runtime:
    """Return the implementation of autocast under which a backend calls a callable."""
    found: list[Runtime] = []

    def call(runtime: Runtime, invoke: Any) -> Observation:
        found.append(runtime)
        return Observation()

    backend.called(function, Plan(), call)
    return found[0]
