"""Metamorphic relations: how a backend must agree with itself.

There are two kinds. Some compare labels of one observation (`within`): a second call repeats the
first, a second backward over a retained graph repeats the first. The others run an equivalent
variant of the case (`RELATIONS`).

Both variants must raise or not, and have the same dtypes and shapes. Bits are another matter: how
long the cache keeps a cast decides in which order, and in which dtype, the gradients of a weight
are added. No documentation promises that order; the reference predicts it. See `Trial.related`,
and docs/relations.md for what each relation promises.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice

from amp_fuzz.backends.harness import Observation, Raised
from amp_fuzz.cases.case import CUSTOM_OPS, Case, bare, map_autocast, uses_autocast
from amp_fuzz.cases.program import (
    FP8,
    Autocast,
    Checkpoint,
    NoGrad,
    Ref,
    Region,
    Statement,
    regions,
    returning_all,
    statements,
)
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.oracle.compare import Divergence, Judgement, compare, differ

__all__ = ["RELATIONS", "WITHIN", "Relation", "check_relation", "within"]


@dataclass(frozen=True, slots=True)
class Relation:
    """A relation between two variants of a case.

    pair: returns the two cases whose results must agree, or None if the relation does not apply.
    promises: the ids of those that it follows from, in `amp_fuzz/reference/promises.toml`.
    forward: it holds only for values, not for gradients. together: it is about cases that raise: an
    error of the second variant must also be raised by the first, or by a bare one.
    """

    name: str
    pair: Callable[[Case], tuple[Case, Case] | None]
    promises: tuple[str, ...]
    forward: bool = False
    together: bool = False


def within(
    case: Case,
    seen: Observation,
    *,
    values: bool = True,
    judge: Callable[[str], Judgement] = lambda first: differ,
    skip: Container[str] = (),
) -> Divergence | None:
    """Check the relations that hold inside one observation.

    Values of layers with delayed scales or kept weights, and random numbers, depend on earlier
    passes: they are not compared. judge: returns what decides on values that differ in a bit, by
    the first one's label. skip: labels of which nothing is asked.
    """
    if _delays(case) or _keeps(case) or _draws(case):
        values = False
    for name, first, second in _repeated(case, seen):
        if first in skip or second in skip:
            continue
        a = Observation(values={second: seen.values[first]})
        b = Observation(values={second: seen.values[second]})
        found = compare(a, b, values=values, varied=judge(first))
        if found is not None:
            return _rename(found, name)
    return None


def _repeated(case: Case, seen: Observation) -> Iterator[tuple[str, str, str]]:
    """Yield the name of a relation, and the labels of two values that it says are equal."""
    if case.plan.calls > 1 and case.plan.entry not in CUSTOM_OPS:  # a custom op is called once
        for first in seen.values:
            if "call0." in first and (second := first.replace("call0.", "call1.")) in seen.values:
                yield "second call", first, second
    if case.plan.second == "retain":
        for second in seen.values:
            if "again." in second and (first := second.replace("again.", "", 1)) in seen.values:
                yield "retained graph", first, second


def _rename(found: Divergence, name: str) -> Divergence:
    return Divergence("relation", f"{name}: {found.where}", found.expected, found.observed)


def _cache(case: Case) -> tuple[Case, Case] | None:
    """Cache on = cache off, in forward, unless weights change inside the outermost context."""
    if not uses_autocast(case) or case.plan.loop == "inside" or case.plan.steps > 1:
        return None
    # The default is on, so a case that never turns it off is its own first variant.
    on = map_autocast(case, cache_enabled=True) if _turns_cache_off(case) else case
    return on, map_autocast(case, cache_enabled=False)


def _turns_cache_off(case: Case) -> bool:
    contexts = [c for c in (*case.plan.contexts, case.plan.backward_context) if c is not None]
    contexts += [c for c in regions(case.program.body) if isinstance(c, Autocast)]
    return any(c.cache_enabled is False for c in contexts)


def _disabled(case: Case) -> tuple[Case, Case] | None:
    """``enabled=False`` everywhere = no autocast at all."""
    if not uses_autocast(case) or case.plan.entry != "context" or case.plan.loop == "inside":
        return None
    return map_autocast(case, enabled=False), bare(case)


def _entry(case: Case) -> tuple[Case, Case] | None:
    """Compare a context object with a decorator, and ``custom_fwd`` with a context object.

    The forward of a function runs without grad, where some kernels (eigvalsh) compute differently.
    So the context runs under ``no_grad`` too. ``cast_inputs`` and ``register_autocast`` are not
    equivalent to a context.
    """
    plan = case.plan
    if not plan.contexts or plan.loop == "inside" or plan.first_pass != "none":
        return None
    if plan.checkpoint != "none" or plan.thread == "inside":
        return None
    if plan.entry in ("cast_inputs", "register_autocast"):
        return None
    if plan.transform != "none" or plan.backward == "inside" or plan.later:
        return None  # a decorated function is left before the backward pass
    later = plan.passes > 1 or plan.calls > 1
    if plan.entry in _FUNCTIONS and later and (_delays(case) or _keeps(case)):
        return None  # their bodies may also run with grad mode on, which changes what layers keep
    if plan.entry in _FUNCTIONS:
        # Their gradients would differ in an optimiser step: leave the optimiser out.
        function = case.with_plan(scaler=False) if plan.scaler else case
        body = Region(NoGrad(), case.program.body)
        return function, function.with_program(body=(body,)).with_plan(entry="context")
    other = "decorator" if plan.entry == "context" else "context"
    return case, case.with_plan(entry=other)


def _checkpoint(case: Case) -> tuple[Case, Case] | None:
    """Compare a non-reentrant checkpoint with none, including gradients."""
    plan = case.plan
    if plan.entry != "context" or plan.loop == "inside" or plan.second == "double":
        return None
    if plan.backward == "none":
        return None  # nothing is recomputed
    if plan.transform != "none" or plan.later:
        return None
    if plan.checkpoint not in ("none", "non_reentrant") or plan.thread == "inside":
        return None
    if any(isinstance(c, Checkpoint) and c.selective for c in regions(case.program.body)):
        return None  # it may be computed again only in the forward's own context
    if _writes(case):
        return None  # a recomputed in-place write happens twice
    if _keeps(case):
        return None  # in a checkpoint both copies are kept: what is made anew without one is not
    return case.with_plan(checkpoint="non_reentrant"), case.with_plan(checkpoint="none")


def _transform(case: Case) -> tuple[Case, Case] | None:
    """Compare a transform under autocast with autocast alone, if the transform alone runs."""
    if case.plan.transform == "none" or not uses_autocast(case):
        return None
    return case.with_plan(transform="none"), case


def _delays(case: Case) -> bool:
    """Return whether FP8 scales depend on earlier steps."""
    contexts = regions(case.program.body)
    return any(isinstance(c, FP8) and c.enabled and c.recipe == "delayed" for c in contexts)


def _keeps(case: Case) -> bool:
    """Return whether an FP8 layer keeps its quantised weight."""
    return any("is_first_microbatch" in dict(s.kwargs) for s in statements(case.program.body))


def _draws(case: Case) -> bool:
    """Return whether a call of the program draws random numbers."""
    ops = (CATALOGUE.get(s.op) for s in statements(case.program.body))
    return any(op is not None and op.random for op in ops)


def _writes(case: Case) -> bool:
    return any(spec.role == "buffer" for spec in case.program.inputs)


_FUNCTIONS = ("custom_fwd", "setup_context", "custom_op")

WITHIN: Mapping[str, tuple[str, ...]] = {
    "second call": ("autocast.cpu-inference", "autocast.cache"),
    "retained graph": ("autograd.retained", "autograd.saved"),
}
"""The relations inside one observation, and the promises that each follows from."""

RELATIONS: Mapping[str, Relation] = {
    r.name: r
    for r in (
        Relation("cache", _cache, ("autocast.cache-off", "autocast.cache-default")),
        Relation("disabled", _disabled, ("autocast.enabled", "autocast.off-dtype")),
        Relation("entry", _entry, ("autocast.decorator", "custom.current", "library.body")),
        Relation("checkpoint", _checkpoint, ("checkpoint.same", "checkpoint.autocast")),
        Relation("transform", _transform, ("autocast.no-mismatch",), together=True),
    )
}


def check_relation(
    relation: Relation,
    case: Case,
    run: Callable[[Case], Observation],
    *,
    values: bool = True,
    judge: Callable[[Case, Case], Judgement] = lambda first, second: differ,
) -> Divergence | None:
    """Run the two variants and compare them, or return None if the relation does not apply.

    judge: returns what decides on values of the two variants that differ in a bit.
    """
    pair = relation.pair(case)
    if pair is None:
        return None
    if relation.together:
        return _together(relation.name, *pair, run)
    forward = relation.forward or any(one.plan.entry in _FUNCTIONS for one in pair)
    first, second = run(pair[0]), run(pair[1])
    if forward:
        first, second = _forward(first), _forward(second)
    else:
        # The two sources have different lines: compare whether they raise, not where.
        first, second = _lineless(first), _lineless(second)
    found = compare(first, second, values=values, varied=judge(*pair))
    return None if found is None else _rename(found, relation.name)


def _together(
    name: str, apart: Case, case: Case, run: Callable[[Case], Observation]
) -> Divergence | None:
    """Find the statement or value for which a case raises, but neither of its halves does.

    This is the statement that raises. If the backward pass raises, it is the first value whose own
    backward pass does, alone or times a mapped input; or the first such output.
    """
    raised = run(case).raised
    if raised is None or run(apart).raised or run(bare(case)).raised:
        return None
    values = {n for s in statements(case.program.body) for n in s.outputs}  # returned or not
    made = [n for n in raised.text.partition(" = ")[0].split(", ") if n in values]
    # In the backward pass: the first value, returned or not, whose own backward pass raises for it.
    said, every = _line(raised), returning_all(case.program).outputs
    ways = (_only, _times)
    alone = (n for n in every if any(_says(run(way(case, n)), said) for way in ways))
    outputs = (n for i, n in enumerate(case.program.outputs) if run(_until(case, i)).raised)
    made = made or list(islice(chain(alone, outputs), 1))
    where = made[0] if made else raised.text
    return Divergence("relation", f"{name}: {where}", "no error", f"{raised.kind}: {_line(raised)}")


def _only(case: Case, name: str) -> Case:
    return case.with_program(outputs=(name,))


def _times(case: Case, name: str) -> Case:
    """Return the case with a value times an input, so vmap maps at least over its cotangent."""
    specs = [s for s in case.program.inputs if not s.dtype.startswith("complex")]
    if not specs:
        return _only(case, name)
    spec = min(specs, key=lambda spec: spec.requires_grad)  # vmap does not map over weights
    last = max(int(n[1:]) for n in returning_all(case.program).outputs)
    total, scaled = f"v{last + 1}", f"v{last + 2}"
    body = (
        *case.program.body,
        Statement("sum", "function", (Ref(spec.name),), outputs=(total,)),
        Statement("mul", "function", (Ref(name), Ref(total)), outputs=(scaled,)),
    )
    return case.with_program(body=body, outputs=(scaled,))


def _says(seen: Observation, line: str) -> bool:
    return seen.raised is not None and _line(seen.raised) == line


def _until(case: Case, last: int) -> Case:
    return case.with_program(outputs=case.program.outputs[: last + 1])


def _line(raised: Raised) -> str:
    return raised.message.strip().partition("\n")[0][:300]


def _forward(seen: Observation) -> Observation:
    values = {k: v for k, v in seen.values.items() if not k.endswith((".grad", ".updated"))}
    return Observation(values=values)


def _lineless(seen: Observation) -> Observation:
    raised = seen.raised and type(seen.raised)(seen.raised.kind, seen.raised.message, 0, "")
    return Observation(values=seen.values, raised=raised)
