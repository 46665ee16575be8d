"""Suppose that one rule of autocast does not hold, as another case in which it is not used.

What a compiler makes of a program may break a rule wherever it is used: it ignores every
``enabled=False``, or traces the backward pass under the wrong state. A case in which the program's
contexts say something else, or stand elsewhere, does under autocast what that compiler does with
the case itself. So the reference needs nothing new, and the backend does not run again.

A name is ``about=how``: two of one `about` may be the same mistake, seen in different cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeGuard

import msgspec

from amp_fuzz.backends import Backend
from amp_fuzz.backends.base import facts_of
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import Autocast, Node, Region

__all__ = ["ABOUT", "RULES", "broken_rules", "without"]

Body = tuple[Node, ...]
Rewrite = Callable[[Case], Case]


def broken_rules(backend: Backend, case: Case) -> Iterator[str]:
    """Yield the names of the rules that a case uses, if the backend may break one.

    One that promises nothing beside autocast runs the program as it is: only the context around it
    can be special.
    """
    if facts_of(backend).promise:
        yield from (name for name in RULES if without(case, name) not in (case, _inside(case)))


def without(case: Case, name: str) -> Case:
    """Return the case that does, under autocast, what a case does where a rule does not hold."""
    return RULES[name](_inside(case) if "in the program" in name else case)


def _inside(case: Case) -> Case:
    """Return a case with the decorator's context in the program: what is compiled has it."""
    if case.plan.entry != "decorator":
        return case
    *around, inner = case.plan.contexts
    within = case.with_program(body=(Region(inner, case.program.body),))
    return within.with_plan(contexts=tuple(around), entry="context")


# -- contexts of the program ----------------------------------------------------------------------


def _saying(case: Case, **fields: object) -> Case:
    """Return a case whose program's contexts have other settings, where they are set."""

    def said(body: Body) -> Body:
        nodes: list[Node] = []
        for node in body:
            if isinstance(node, Region):
                context = node.context
                if isinstance(context, Autocast):
                    context = msgspec.structs.replace(context, **fields)
                node = Region(context, said(node.body))
            nodes.append(node)
        return tuple(nodes)

    return case.with_program(body=said(case.program.body))


def _naming(case: Case, old: str | None, new: str | None) -> Case:
    """Return a case whose program's contexts of one dtype have another."""
    return _moved(case, partial(_renamed, old, new))


def _renamed(old: str | None, new: str | None, body: Body) -> Iterator[Node]:
    for node in body:
        if isinstance(node, Region) and isinstance(node.context, Autocast):
            said = node.context
            if said.dtype == old and said.enabled:
                node = Region(msgspec.structs.replace(said, dtype=new), node.body)
        yield node


Arrange = Callable[[Body], Iterator[Node]]


def _moved(case: Case, arrange: Arrange) -> Case:
    """Return a case whose bodies, the inner ones first, are arranged in another way."""

    def moved(body: Body) -> Body:
        return tuple(
            arrange(
                tuple(
                    Region(node.context, moved(node.body)) if isinstance(node, Region) else node
                    for node in body
                )
            )
        )

    return case.with_program(body=moved(case.program.body))


def _is_context(node: Node | None) -> TypeGuard[Region]:
    return isinstance(node, Region) and isinstance(node.context, Autocast)


def _gone(body: Body) -> Iterator[Node]:
    for node in body:
        yield from node.body if _is_context(node) else (node,)


def _inner_gone(body: Body) -> Iterator[Node]:
    for node in body:
        yield Region(node.context, tuple(_gone(node.body))) if _is_context(node) else node


def _late(body: Body) -> Iterator[Node]:
    for node in body:
        if _is_context(node) and not isinstance(node.body[0], Region):
            yield node.body[0]
            yield from _region(node, node.body[1:])
        else:
            yield node


def _early(body: Body) -> Iterator[Node]:
    for node in body:
        if _is_context(node) and not isinstance(node.body[-1], Region):
            yield from _region(node, node.body[:-1])
            yield node.body[-1]
        else:
            yield node


def _longer(most: int | None, body: Body) -> Iterator[Node]:
    rest = list(body)
    while rest:
        node = rest.pop(0)
        if _is_context(node):
            taken: list[Node] = []
            while rest and (most is None or len(taken) < most) and not isinstance(rest[0], Region):
                taken.append(rest.pop(0))
            node = Region(node.context, (*node.body, *taken))
        yield node


def _off_after(body: Body) -> Iterator[Node]:
    before: Node | None = None
    for node in body:
        after = _is_context(before) and not isinstance(node, Region)
        yield Region(Autocast(enabled=False), (node,)) if after else node
        before = node


def _merged(body: Body) -> Iterator[Node]:
    for node in body:
        inner = [n for n in node.body if _is_context(n)] if isinstance(node, Region) else []
        if _is_context(node) and inner:
            node = Region(inner[0].context, node.body)
        yield node


def _region(node: Region, body: Body) -> tuple[Node, ...]:
    return (Region(node.context, body),) if body else ()


# -- the plan around it ---------------------------------------------------------------------------


def _around(case: Case, **fields: object) -> Case:
    """Return a case around whose program the innermost context says something else."""
    contexts = case.plan.contexts
    if not contexts:
        return case
    said = msgspec.structs.replace(contexts[-1], **fields)
    return case.with_plan(contexts=(*contexts[:-1], said))


def _backward(case: Case, how: str) -> Case:
    if case.plan.backward == "none" or case.plan.later:  # one backward pass is of several calls
        return case
    return case.with_plan(backward=how, backward_context=None)


def _backward_dtype(case: Case, dtype: str) -> Case:
    context = case.plan.backward_context
    if context is None:
        return case
    return case.with_plan(backward_context=msgspec.structs.replace(context, dtype=dtype))


def _entered(case: Case, old: Sequence[str], new: str) -> Case:
    return case.with_plan(entry=new) if case.plan.entry in old else case


RULES: Mapping[str, Rewrite] = {
    "enabled in the program=True": partial(_saying, enabled=True),
    "enabled in the program=False": partial(_saying, enabled=False),
    "dtype in the program=that of the outer context": partial(_saying, dtype=None),
    "dtype in the program=bfloat16 for float16": partial(_naming, old="float16", new="bfloat16"),
    "dtype in the program=bfloat16 for float32": partial(_naming, old="float32", new="bfloat16"),
    "dtype in the program=float16 by default": partial(_naming, old=None, new="float16"),
    "cache_enabled in the program=True": partial(_saying, cache_enabled=True),
    "cache_enabled in the program=False": partial(_saying, cache_enabled=False),
    "entry of contexts in the program=left out": partial(_moved, arrange=_gone),
    "entry of contexts in the program=left out inside others": partial(_moved, arrange=_inner_gone),
    "settings in the program=those of the inner context": partial(_moved, arrange=_merged),
    "start of contexts in the program=a statement late": partial(_moved, arrange=_late),
    "end of contexts in the program=a statement early": partial(_moved, arrange=_early),
    "end of contexts in the program=a statement late": partial(_moved, arrange=partial(_longer, 1)),
    "end of contexts in the program=that of the body around them": partial(
        _moved, arrange=partial(_longer, None)
    ),
    "what follows contexts in the program=off": partial(_moved, arrange=_off_after),
    "enabled around the program=False": partial(_around, enabled=False),
    "dtype around the program=bfloat16": partial(_around, dtype="bfloat16"),
    "dtype around the program=float16": partial(_around, dtype="float16"),
    "the backward pass=inside": partial(_backward, how="inside"),
    "the backward pass=outside": partial(_backward, how="outside"),
    "dtype around the backward pass=bfloat16": partial(_backward_dtype, dtype="bfloat16"),
    "entry=custom_fwd, not cast_inputs": partial(_entered, old=("cast_inputs",), new="custom_fwd"),
    "entry=function, not custom_fwd": partial(
        _entered, old=("custom_fwd", "cast_inputs"), new="function"
    ),
}
"""By name, the rewriting that stands for a rule that does not hold, in the order they are tried."""

ABOUT = frozenset(name.partition("=")[0] for name in RULES)
"""What the rules are about."""
