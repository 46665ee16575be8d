"""Plainer calls: the function form, fewer arguments, plainer literals."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import Arg, Float, Items, Ref, Statement, statements
from amp_fuzz.catalogue import CATALOGUE, FORMS
from amp_fuzz.findings.minimize.edit import replace_statement

__all__ = ["arguments", "forms"]


def forms(case: Case) -> Iterator[Case]:
    """Yield the case with calls in a plainer form, which writes nothing.

    `FORMS` is sorted, plainest first. A checkpoint, for example, must contain no writes.
    """
    for i, statement in enumerate(statements(case.program.body)):
        op = CATALOGUE[statement.op]
        for form in FORMS[: FORMS.index(statement.form)]:
            if form not in op.forms or form in ("inplace", "out"):
                continue
            kwargs = tuple((k, a) for k, a in statement.kwargs if k != "out")
            plainer = msgspec.structs.replace(statement, form=form, kwargs=kwargs)
            yield _with(case, i, plainer)


def arguments(case: Case) -> Iterator[Case]:
    """Yield the case with one argument fewer, or a plainer one."""
    for i, statement in enumerate(statements(case.program.body)):
        for plainer in _calls(statement):
            yield _with(case, i, plainer)


def _calls(statement: Statement) -> Iterator[Statement]:
    kwargs, args = statement.kwargs, statement.args
    if any(_names(arg) for arg in (*args, *(a for _, a in kwargs))):
        # A module with parameters by name: without one of them it would compute with
        # uninitialised memory.
        return
    if len(kwargs) > 1:
        yield msgspec.structs.replace(statement, kwargs=())
    for j in range(len(kwargs)):
        yield msgspec.structs.replace(statement, kwargs=kwargs[:j] + kwargs[j + 1 :])
    if len(args) > 1:
        yield msgspec.structs.replace(statement, args=args[:-1])
    for j, arg in enumerate(args):
        for new in _plainer(arg):
            yield msgspec.structs.replace(statement, args=(*args[:j], new, *args[j + 1 :]))
    for j, (name, arg) in enumerate(kwargs):
        for new in _plainer(arg):
            changed = (*kwargs[:j], (name, new), *kwargs[j + 1 :])
            yield msgspec.structs.replace(statement, kwargs=changed)


def _plainer(arg: Arg) -> Iterator[Arg]:
    """Yield strictly plainer arguments, so this terminates."""
    if isinstance(arg, Ref):
        yield None
    elif arg is True:
        yield False
    elif isinstance(arg, Float):
        if arg.value not in (0.0, 1.0):
            yield from (Float((1.0).hex()), Float((0.0).hex()))
    elif isinstance(arg, Items):
        items = arg.items
        for j in range(len(items)):
            if len(items) > 1:
                yield Items(items[:j] + items[j + 1 :])
        for j, item in enumerate(items):
            if not isinstance(item, Ref):
                for new in _plainer(item):
                    yield Items((*items[:j], new, *items[j + 1 :]))
    elif isinstance(arg, int) and not isinstance(arg, bool):
        yield from (n for n in (0, 1, -1, arg // 2) if abs(n) < abs(arg) or (arg == -1 and n >= 0))


def _names(arg: Arg) -> bool:
    return isinstance(arg, Items) and any(isinstance(item, str) for item in arg.items)


def _with(case: Case, number: int, statement: Statement) -> Case:
    program = replace_statement(case.program, number, statement)
    return msgspec.structs.replace(case, program=program)
