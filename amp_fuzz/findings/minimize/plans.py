"""Plainer plans: fewer steps, fewer contexts, nothing unnecessary around the program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from amp_fuzz.cases.case import Case, Plan, Transform
from amp_fuzz.cases.program import Autocast

__all__ = ["contexts", "plans"]


def plans(case: Case) -> Iterator[Case]:
    """Yield the case under plainer plans, the plainest first."""
    for plan in _plans(case.plan):
        yield msgspec.structs.replace(case, plan=plan)


def _plans(plan: Plan) -> Iterator[Plan]:
    default = Plan()
    yield Plan(contexts=plan.contexts, backward="none")
    if plan.backward != "none":
        yield Plan(contexts=plan.contexts)
    yield from _calls(plan)
    for backward in ("none", "outside"):  # the plainer first
        if plan.backward == backward:
            break
        yield msgspec.structs.replace(plan, backward=backward, backward_context=None)
    for field in msgspec.structs.fields(Plan):
        if field.name in ("contexts", "backward", "backward_context", "later"):
            continue
        value = getattr(default, field.name)
        if getattr(plan, field.name) != value:
            alone = {"update": default.update} if field.name == "steps" else {}
            yield msgspec.structs.replace(plan, **{field.name: value, **alone})
    for line in plan.settings if len(plan.settings) > 1 else ():
        yield msgspec.structs.replace(plan, settings=(line,))
    for name in ("steps", "calls", "micro_batches"):
        if getattr(plan, name) > 2:
            yield msgspec.structs.replace(plan, **{name: 2})
    for name in _PARTS.get(plan.transform, ()):
        yield msgspec.structs.replace(plan, transform=name)
    if plan.checkpoint == "selective":
        yield msgspec.structs.replace(plan, checkpoint="non_reentrant")
    if plan.backward_context is not None:
        for context in contexts(plan.backward_context):
            yield msgspec.structs.replace(plan, backward_context=context)
    for i in range(len(plan.contexts)):
        yield msgspec.structs.replace(plan, contexts=plan.contexts[:i] + plan.contexts[i + 1 :])
    for i, context in enumerate(plan.contexts):
        for plainer in contexts(context):
            others = (*plan.contexts[:i], plainer, *plan.contexts[i + 1 :])
            yield msgspec.structs.replace(plan, contexts=others)


# The transforms that one is made of, the plainest first.
_PARTS: Mapping[str, Sequence[Transform]] = {
    "vmap_grad": ("vmap", "grad"),
    "jvp": ("forward_ad",),
    "jacrev": ("grad",),
    "jacfwd": ("forward_ad", "jvp"),
}


def _calls(plan: Plan) -> Iterator[Plan]:
    """Yield plans with fewer later calls, and with less around them."""
    if not plan.later:
        return
    for i, call in enumerate(plan.later):
        others = plan.later[:i], plan.later[i + 1 :]
        alone = {"later": (), "reuse": "calls"}
        fewer = {"later": others[0] + others[1]} if len(plan.later) > 1 else alone
        yield msgspec.structs.replace(plan, **fewer)
        if all(isinstance(context, Autocast) for context in call):
            yield msgspec.structs.replace(plan, contexts=call, **fewer)
        plainer = [call[:j] + call[j + 1 :] for j in range(len(call))]
        plainer += [
            (*call[:j], other, *call[j + 1 :])
            for j, context in enumerate(call)
            if isinstance(context, Autocast)
            for other in contexts(context)
        ]
        for one in plainer:
            yield msgspec.structs.replace(plan, later=(*others[0], one, *others[1]))
    if plan.reuse == "region":
        yield msgspec.structs.replace(plan, reuse="graph")


def contexts(context: Autocast) -> Iterator[Autocast]:
    """Yield a plainer autocast context; bfloat16 is the plainest dtype."""
    if context.cache_enabled is not None:
        yield msgspec.structs.replace(context, cache_enabled=None)
    if context.device is not None:
        yield msgspec.structs.replace(context, device=None)
    if context.dtype != "bfloat16":
        yield msgspec.structs.replace(context, dtype="bfloat16")
