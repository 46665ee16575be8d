"""The facts about a case from which follows what it could have falsified.

A fact is a word, such as ``cast`` or ``entry=decorator``; `amp_fuzz/reference/promises.toml` names
them. The words of a plan and its regions are those of `amp_fuzz.records.fingerprint.ingredient`.
A fact about a value is only a fact if the value was compared. Nothing here needs torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.program import (
    FLOAT_DTYPES,
    FP8,
    Autocast,
    AutocastDType,
    Checkpoint,
    DType,
    Items,
    Node,
    Ref,
    Statement,
    regions,
    statements,
    uses,
)
from amp_fuzz.records.fingerprint import ingredient
from amp_fuzz.records.promises import Kernels, Promise, promises

__all__ = ["FACTS", "Reached", "Seen", "facts", "listed", "place", "within_reach"]

FACTS: Mapping[str, str] = {
    # -- the run of the case
    "raised": "both sides raised the same error",
    "trains": "gradients of weights were compared",
    "infers": "no gradient was compared",
    "constant": "no input requires grad",
    "outputs": "the program has several outputs",
    "random": "a call draws random numbers",
    "entered anew": "the outermost context is entered more than once",
    "overflow": "a gradient was infinite or NaN, and a scaler was asked",
    "finite": "no gradient was, and a scaler was asked",
    "told": "a compiler is told which autocast surrounds the backward pass",
    "untold": "it is not",
    # -- contexts of the device under test
    "bare": "there is no context",
    "on": "the innermost context of the plan is on",
    "context=bfloat16": "a context that is on names bfloat16",
    "context=float16": "a context that is on names float16",
    "context=default": "a context that is on names no dtype, and none is around it",
    "default inside": "a context names no dtype inside one that does, and calls are cast in it",
    "default set": "a context names no dtype after the default was set",
    "refused": "a context of a dtype that it does not take: a listed op is called in it",
    "context elsewhere": "a listed op is called in a context of another device type alone",
    "region": "a context stands in the program",
    "nested region": "a context stands in another one in the program",
    "off": "a listed op is called where a context is disabled, and its result shows it",
    "off inside": "and that context stands in one that is on",
    "on again": "after that, a call is cast in the outer context",
    "other thread": "a listed op is called in a thread without the context, as its result shows",
    "body off": "a listed op is called in a body without autocast, as its result shows",
    "left": "a value of 16 bits is used behind the context in which it was made",
    # -- calls that autocast handles
    "cast": "a tensor was cast, or a dtype set, where it matters, and the result was compared",
    "cast=bfloat16": "a tensor was cast to bfloat16",
    "cast=float16": "a tensor was cast to float16",
    "cast=float32": "a tensor was cast to float32",
    "banned": "a call was refused",
    "mixed": "a call had tensors of float32 and of 16 bits",
    "foreign": "a tensor of one 16-bit dtype was cast to the other",
    "float64": "a call had a float64 tensor",
    "integer": "a call had a tensor of integers or booleans",
    "complex": "a call had a complex tensor",
    "promote=low": "an op that promotes had tensors of the low dtype alone, two or more",
    "promote=float32": "an op that promotes had tensors of float32 and 16 bits",
    "set ineligible": "an op whose dtype is set had a first input that is not eligible",
    "cached": "a cast was one that the weight cache holds",
    "served": "the weight cache served a cast again",
    "uncached": "the cast of a weight was made with the cache off",
    "made twice": "a tensor that the cache does not hold was cast twice to one dtype",
    "listed tensors": "a call with a list of tensors was cast",
    "arguments": "a call with arguments that are no tensors was cast",
    "form=function": "a function call was cast",
    "form=method": "a method call was cast",
    "form=operator": "an operator was cast",
    "form=overload": "a call of an overload was cast",
    "form=module": "a module's call was cast",
    "namespace": "a function of torch.linalg, torch.special or torch.sparse was cast",
    "inplace": "an in-place call of a listed op was not cast, and its result shows it",
    "out": "a call of a listed op with out= was not cast, and its result shows it",
    "dtype argument": "a listed op was called with a dtype that autocast would not choose",
    # -- calls that autocast leaves alone
    "unlisted": "an op that is not listed ran in the dtype of its inputs",
    "downstream": "it had a value of 16 bits that a listed op made",
    "native": "an op that is not listed promoted float32 and 16 bits itself",
    "no-op cast": "a value of a context that is float32 was cast to float32",
    # -- what a program consists of
    "half input": "an input has 16 bits",
    "integer input": "an input is no floating tensor",
    "functions": "it calls a custom function",
    "once": "it calls a custom function that is differentiable once",
    "ops": "it calls a custom op",
    "attention": "it calls a module with attention",
}
"""What each fact means, apart from those of plans, backends, device types, policies and lists."""

HALVES = ("bfloat16", "float16")
_FLOATING = ("float", "bfloat", "complex")
_PROMOTES = ("add", "add.mixed", "sub", "mul", "mul.mixed", "div", "maximum", "maximum.mixed")
_ATTENTION = ("MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer")
_ELSEWHERE = ("linalg", "special", "sparse")
_CASTS_INPUTS = ("cast_inputs", "register_autocast")


class Reached(NamedTuple):
    """A call that reached an autocast kernel: what it was, and what was cast.

    casts: of each cast, a key of the tensor, the old and the new dtype, and whether the weight
    cache holds it. sets: whether the op's ``dtype=`` was set instead.
    """

    device: str
    overload: str
    policy: str
    dtypes: tuple[str, ...]
    casts: tuple[tuple[int, str, str, bool], ...] = ()
    sets: bool = False

    @property
    def matters(self) -> bool:
        """Whether the call would be another one without autocast."""
        return bool(self.casts) or (self.sets and self.dtypes[:1] in (("bfloat16",), ("float16",)))


@dataclass(frozen=True, slots=True)
class Seen:
    """A case that ran on a backend.

    implements: the facts by which promises are about the backend. ruled: of each op of the program,
    the policies of the kernels that it may reach on the device, by overload. dtypes: of inputs, and
    of those values that were observed. overflow: whether a gradient is infinite or NaN.
    """

    case: Case
    device: str
    implements: Sequence[str] = ()
    reached: Sequence[Reached] = ()
    ruled: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    raised: bool = False
    random: bool = False
    overflow: bool = False


def facts(seen: Seen) -> frozenset[str]:
    """Return the facts about a case."""
    seen = replace(seen, reached=_observed(seen))
    return frozenset(
        (
            *ingredient(seen.case).split("+"),
            *_run(seen),
            *_contexts(seen),
            *_kernels(seen),
            *_calls(seen),
            *listed(seen.reached, {s.op for s in statements(seen.case.program.body)}),
        )
    )


def _observed(seen: Seen) -> list[Reached]:
    """Return the calls of ops that have a floating result which was compared, or that raised.

    Of a value that is only computed with, later roundings may hide what it was. In-place calls and
    those with ``out=`` reach kernels only inside the op.
    """
    shown = {
        overload
        for call, stack in _walk(seen.case.program.body, _around(seen.case.plan))
        if _enabled(stack, seen.device) and call.form not in ("inplace", "out")
        if any(seen.dtypes.get(name, "").startswith(_FLOATING) for name in call.outputs)
        for overload in seen.ruled.get(call.op, ())
    }
    return [one for one in seen.reached if one.overload in shown or one.policy == "banned"]


def listed(reached: Sequence[Reached], ops: Collection[str]) -> Iterator[str]:
    """Yield the names in the documents' lists, ``cpu:mm``, of calls for which casting mattered."""
    for one in reached:
        if one.matters:
            for name in {one.overload, one.overload.partition(".")[0]}:
                yield from (
                    promise
                    for promise, by in _listings().get((one.device, name), ())
                    if not by or not by.isdisjoint(ops)
                )


@cache
def _listings() -> Mapping[tuple[str, str], list[tuple[str, frozenset[str]]]]:
    """Return, by device and overload or its name, the promises of lists, each with its ops."""
    found: dict[tuple[str, str], list[tuple[str, frozenset[str]]]] = {}
    for one in promises().lists:
        for op in one.ops:
            kernels = promises().kernels.get(op, Kernels((op,)))
            for name in kernels.reaches:
                listing = f"{one.device}:{op}", frozenset(kernels.by)
                found.setdefault((one.device, name), []).append(listing)
    return found


_PLACES = ("backend=", "device=", "told", "untold")


def within_reach(promise: Promise, places: Sequence[Collection[str]]) -> bool:
    """Return whether a case could falsify a promise at all.

    places: of each backend, the facts about where its cases run: see `place`.
    """
    if promise.devices and not any(f"device={d}" in p for d in promise.devices for p in places):
        return False
    needed = ({f for f in w if f.startswith(_PLACES)} for w in promise.when)
    return any(facts.issubset(place) for facts in needed for place in places)


def place(device: str, implements: Sequence[str]) -> tuple[str, ...]:
    """Return the facts about where a case runs."""
    return (f"device={device}", *implements)


def _run(seen: Seen) -> Iterator[str]:
    """Yield the facts about how a case ran."""
    plan, program = seen.case.plan, seen.case.program
    yield from (*place(seen.device, seen.implements), f"entry={plan.entry}")
    weights = any(spec.requires_grad for spec in program.inputs)
    trains = weights and (plan.backward != "none" or plan.differentiates)
    yield "trains" if trains else "infers"
    if trains and plan.scaler:
        yield "overflow" if seen.overflow else "finite"
    anew = plan.loop == "outside" and plan.passes > 1
    truths = {
        "raised": seen.raised,
        "constant": not weights,
        "outputs": len(program.outputs) > 1,
        "random": seen.random,
        "entered anew": anew,
        "half input": any(spec.dtype in HALVES for spec in program.inputs),
        "integer input": any(spec.dtype not in FLOAT_DTYPES for spec in program.inputs),
    }
    yield from (name for name, true in truths.items() if true)


def _contexts(seen: Seen) -> Iterator[str]:
    """Yield the facts about the contexts of a case."""
    plan, body = seen.case.plan, seen.case.program.body
    own = [c for c in plan.contexts if _own(c, seen.device)]
    inner = list(regions(body))
    after = [c for around in plan.later for c in around]
    every = [c for c in (*plan.contexts, plan.backward_context, *inner, *after) if c]
    if not any(isinstance(c, Autocast) for c in every):
        yield "bare"
    if _enabled(plan.contexts, seen.device):
        yield "on"
    if own and not own[-1].enabled and plan.entry in _CASTS_INPUTS:
        yield "off"
    if not own and any(c.enabled for c in plan.contexts) and plan.entry in _CASTS_INPUTS:
        yield "context elsewhere"
    named = False
    for context in (*own, *(c for c in inner if isinstance(c, Autocast) and _own(c, seen.device))):
        if _on(context, seen.device):
            inherits = "default inside" if named else "context=default"
            yield f"context={context.dtype}" if context.dtype else inherits
        named |= context.dtype is not None
    if any(isinstance(c, AutocastDType) for c in after):
        yield "default set"
    if any(isinstance(c, Autocast) for c in inner):
        yield "region"
    if any(len(stack) > 1 for _, stack in _walk(body)):
        yield "nested region"
    yield from (f"fp8={c.recipe}" for c in inner if isinstance(c, FP8) and c.enabled)


def _kernels(seen: Seen) -> Iterator[str]:
    """Yield the facts about the calls that reached an autocast kernel."""
    plan = seen.case.plan
    kept, made = Counter[tuple[int, str]](), Counter[tuple[int, str]]()
    for one in seen.reached:
        halves = [dtype for dtype in one.dtypes if dtype in HALVES]
        mixed = bool(halves) and "float32" in one.dtypes
        if one.policy == "banned":
            yield "banned"
        if one.matters:
            yield from ("cast", f"policy={one.policy}")
        for source, old, new, cached in one.casts:
            yield f"cast={new}"
            if old in HALVES and new in HALVES:
                yield "foreign"
            (kept if cached else made)[source, new] += 1
        if mixed and one.casts:
            yield "mixed"
        if one.policy == "promote" and (mixed or (len(halves) > 1 and not one.casts)):
            yield "promote=float32" if mixed else "promote=low"
        if one.policy == "fp32_set_opt_dtype" and not one.sets:
            yield "set ineligible"
        for dtype in one.dtypes:
            if dtype not in FLOAT_DTYPES:
                yield "complex" if dtype.startswith("complex") else "integer"
            elif dtype == "float64":
                yield "float64"
    contexts = (*plan.contexts, *regions(seen.case.program.body))
    entered = _entered(plan, contexts)
    if kept:
        yield "cached"
    if max(kept.values(), default=0) > entered:
        yield "served"
    if max(made.values(), default=0) > entered:
        yield "made twice"
    off = any(isinstance(c, Autocast) and c.cache_enabled is False for c in contexts)
    lowers = any(one.policy == "lower_precision_fp" and one.casts for one in seen.reached)
    if off and lowers and not kept and any(s.requires_grad for s in seen.case.program.inputs):
        yield "uncached"


def _entered(plan: Plan, contexts: Collection[object]) -> int:
    """Return how often the outermost context is entered at most: each time casts weights anew."""
    again = plan.checkpoint != "none" or any(isinstance(c, Checkpoint) for c in contexts)
    recomputes = again or plan.entry not in ("context", "decorator")
    calls = plan.calls if plan.entry == "decorator" else 1
    passes = 1 if plan.loop == "inside" else plan.passes
    return passes * calls * (1 + recomputes) + len(plan.later) + plan.interrupted


def _calls(seen: Seen) -> Iterator[str]:
    """Yield the facts about the statements of a program."""
    plan, device, dtypes = seen.case.plan, seen.device, seen.dtypes
    cast = {one.overload for one in seen.reached if one.matters}
    around = _around(plan)
    entered = not around and _enabled(plan.contexts, device)
    made, lowered, left = set[str](), set[str](), False
    for call, stack in _walk(seen.case.program.body, around):
        own = [c for c in stack if _own(c, device)]
        ruled, read = seen.ruled.get(call.op, {}), set(uses(call))
        given = [dtypes[n] for n in read if n in dtypes]
        results = [dtypes[n] for n in call.outputs if n in dtypes]
        shows = _uncast(ruled, results)
        within = any(_on(c, device) for c in own[:-1])
        yield from _kinds(call.op)
        if not ruled and results and results[0] in FLOAT_DTYPES:
            yield from _native(call, given, results[0])
        if (call.op == "float" or DType("float32") in call.args[1:]) and any(
            dtypes.get(n) == "float32" for n in made & read
        ):
            yield "no-op cast"
        if not _enabled(stack, device):
            left |= within
            if any(dtypes.get(n) in HALVES for n in made & read):
                yield "left"
            if shows and not own and entered:
                yield "other thread" if plan.thread == "inside" else "body off"
            elif shows:
                yield from _off(own, within=within, elsewhere=any(c.enabled for c in stack))
            continue
        made.update(call.outputs)
        hit = not cast.isdisjoint(ruled)
        yield from _handled(call, ruled, results, hit=hit, shows=shows)
        if hit and left:
            yield "on again"
        if hit and not {*HALVES}.isdisjoint(results):
            lowered.update(call.outputs)
        if not ruled and results and results[0] in FLOAT_DTYPES and results[0] in given:
            yield "unlisted"
            if lowered & read:
                yield "downstream"


def _off(own: Sequence[Autocast], *, within: bool, elsewhere: bool) -> Iterator[str]:
    """Yield the facts about a call of a listed op that was not cast, as its result shows.

    own: the contexts of the device. within: whether one around the innermost is on. elsewhere:
    whether any context is enabled.
    """
    if not own and elsewhere:
        yield "context elsewhere"
    elif own and own[-1].enabled:
        yield "refused"
    elif own:
        yield "off"
        if within:
            yield "off inside"


def _native(call: Statement, given: Sequence[str], result: str) -> Iterator[str]:
    """Yield whether an op that is not listed has promoted its inputs."""
    mixed = "float32" in given and not {*HALVES}.isdisjoint(given)
    if mixed and result == "float32" and call.op in _PROMOTES:
        yield "native"


def _handled(
    call: Statement, ruled: Mapping[str, str], results: Sequence[str], *, hit: bool, shows: bool
) -> Iterator[str]:
    """Yield the facts about a call in a context that is on."""
    options = dict(call.kwargs)
    if hit:
        yield f"form={call.form}"
        if call.op.partition(".")[0] in _ELSEWHERE:
            yield "namespace"
        every = (*call.args, *options.values())
        if any(
            isinstance(arg, Items) and any(isinstance(a, Ref) for a in arg.items) for arg in every
        ):
            yield "listed tensors"
        if not all(isinstance(arg, Ref) for arg in every):
            yield "arguments"
    if shows and call.form in ("inplace", "out"):
        yield call.form
    dtype = options.get("dtype")
    if ruled and isinstance(dtype, DType) and dtype.name != "float32" and dtype.name in results:
        yield "dtype argument"


def _kinds(op: str) -> Iterator[str]:
    """Yield what kind of op one is, by its name."""
    if op.endswith("_function"):
        yield "functions"
    if op == "once_function":
        yield "once"
    if op.endswith("_op"):
        yield "ops"
    if op in _ATTENTION:
        yield "attention"


def _uncast(ruled: Mapping[str, str], results: Sequence[str]) -> bool:
    """Return whether results have a dtype that autocast would not have given them."""
    policy = next(iter(ruled.values()), "")
    if policy == "lower_precision_fp":
        return "float32" in results
    return policy.startswith("fp32") and any(dtype in HALVES for dtype in results)


def _walk(
    body: Sequence[Node], stack: tuple[Autocast, ...] = ()
) -> Iterator[tuple[Statement, tuple[Autocast, ...]]]:
    """Yield each statement with the autocast contexts around it, outermost first."""
    for node in body:
        if isinstance(node, Statement):
            yield node, stack
        elif isinstance(node.context, Autocast):
            yield from _walk(node.body, (*stack, node.context))
        else:
            yield from _walk(node.body, stack)


def _around(plan: Plan) -> tuple[Autocast, ...]:
    """Return the contexts that a program sees: none in another thread, or in a body without."""
    bare = plan.thread == "inside" or plan.entry in _CASTS_INPUTS
    return () if bare else plan.contexts


def _enabled(stack: Sequence[Autocast], device: str) -> bool:
    """Return whether autocast of a device is on inside these contexts."""
    own = [c for c in stack if _own(c, device)]
    return bool(own) and _on(own[-1], device)


def _own(context: Autocast, device: str) -> bool:
    return context.device in (None, device)


def _on(context: Autocast, device: str) -> bool:
    """Return whether a context of the device is on: it takes 16 bits, CUDA's takes any dtype."""
    return context.enabled and (device == "cuda" or context.dtype in (None, *HALVES))
