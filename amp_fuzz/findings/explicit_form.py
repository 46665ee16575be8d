"""The explicit form: a program with the casts that autocast makes written out.

``cast[bfloat16](x)`` is a cast of one argument; ``autocast_promote(a, b)`` shows the ``promote``
policy over several. It is built from the log of the reference, so it shows what should happen, not
what a backend did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from amp_fuzz.backends.reference import ReferenceRuntime
from amp_fuzz.backends.source import argument
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import Autocast, Items, Node, Ref, Statement, show_context
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.oracle.explicit import calls_of
from amp_fuzz.reference import KernelCall, Policy

__all__ = ["explicit_form"]


def explicit_form(case: Case, runtime: ReferenceRuntime) -> str:
    """Return the case's statements with their casts written out, one a line.

    Runs the case once under the reference. A statement that was not reached is shown unchanged. A
    comment names the contexts of the statements below it, up to the next such comment.
    """
    calls = calls_of(case, runtime)
    lines: list[str] = []
    above = None
    for i, (statement, contexts) in enumerate(_placed(case)):
        if contexts != above:
            lines.append(f"# under {contexts}")
            above = contexts
        lines += _statement(statement, *calls.get(i, ({}, [])))
    return "\n".join(lines)


def _placed(case: Case) -> Iterator[tuple[Statement, str]]:
    """Yield each statement with the autocast contexts that it runs under, outermost first."""
    # Autocast's state is thread-local: another thread starts without it.
    around = () if case.plan.thread == "inside" else case.plan.contexts
    return _under(case.program.body, around)


def _under(
    body: tuple[Node, ...], contexts: tuple[Autocast, ...]
) -> Iterator[tuple[Statement, str]]:
    for node in body:
        if isinstance(node, Statement):
            yield node, " > ".join(map(show_context, contexts)) or "no autocast"
        else:
            more = (node.context,) if isinstance(node.context, Autocast) else ()
            yield from _under(node.body, (*contexts, *more))


def _statement(
    statement: Statement, tensors: Mapping[int, str], calls: list[KernelCall]
) -> list[str]:
    op = CATALOGUE[statement.op]
    wanted = {o.removeprefix("aten::") for o in op.overloads}
    first = next((c for c in calls if c.overload in wanted), None)
    casts: dict[str, str] = {}
    notes: list[str] = []
    if first is not None:
        for cast in first.casts:
            name = tensors.get(cast.source)
            if name is not None:
                casts[name] = str(cast.new).removeprefix("torch.")
        notes.append(_note(first))
    inner = [c for c in calls if c is not first and (c.casts or c.sets_dtype)]
    notes += [f"inside: {_note(c)}" for c in inner[:4]]
    if len(inner) > 4:
        notes.append(f"and {len(inner) - 4} more")
    args = [_argument(a, casts) for a in statement.args]
    kwargs = [(name, _argument(a, casts)) for name, a in statement.kwargs]
    text = f"{', '.join(statement.outputs)} = {op.render(statement.form, args, kwargs)}"
    return [text + (f"  # {'; '.join(n for n in notes if n)}" if any(notes) else "")]


def _argument(arg: Any, casts: dict[str, str]) -> str:
    if isinstance(arg, Ref) and arg.name in casts:
        return f"cast[{casts[arg.name]}]({arg.name})"
    if isinstance(arg, Items):
        return "[" + ", ".join(_argument(a, casts) for a in arg.items) + "]"
    return argument(arg)


def _note(call: KernelCall) -> str:
    dtypes = ", ".join(str(d).removeprefix("torch.") for d in call.dtypes)
    name = f"{call.overload}: {call.policy.value}"
    if call.policy is Policy.PROMOTE:
        return f"{name}, autocast_promote({dtypes})"
    return f"{name}, dtype=float32" if call.sets_dtype else name
