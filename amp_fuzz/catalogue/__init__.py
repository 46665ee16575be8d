"""Which ops exist and how they may be called: one file a family, one entry an op.

``CATALOGUE`` maps an op's name to its entry; it has the ops of the installed torch. `check` looks
up everything that a program names, so that a program which passes can be turned into source.
"""

from __future__ import annotations

import difflib
import importlib
import keyword
import pkgutil
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from amp_fuzz.cases.program import Node, Program, ProgramError, Ref, Region, Statement, show_arg
from amp_fuzz.catalogue import places
from amp_fuzz.catalogue.core import FORMS, REGISTRY, Builder, Call, Op, Out, Value, out
from amp_fuzz.versions import holds, installed

__all__ = [
    "CATALOGUE",
    "FORMS",
    "Builder",
    "Call",
    "Op",
    "Out",
    "Value",
    "adopt",
    "check",
    "families",
    "out",
    "select",
]

for _module in pkgutil.iter_modules(__path__):
    if _module.name != "core":
        importlib.import_module(f"{__name__}.{_module.name}")

_OPS: dict[str, Op] = {}
CATALOGUE: Mapping[str, Op] = MappingProxyType(_OPS)


def adopt() -> None:
    """Take in what was registered since: ops of the user's."""
    _OPS.clear()
    _OPS.update((name, op) for name, op in sorted(REGISTRY.items()) if holds(op.torch))


adopt()


def families(ops: Iterable[Op] | None = None) -> tuple[str, ...]:
    """Return the names of the families (of all ops, or of those given), sorted."""
    return tuple(sorted({op.family for op in (CATALOGUE.values() if ops is None else ops)}))


def select(patterns: Iterable[str]) -> tuple[Op, ...]:
    """Return the ops that any of the patterns matches, in the order of the catalogue.

    A pattern is an op name, a family, or a glob over op names (``"conv*"``). A pattern that
    matches nothing raises `ProgramError` with the nearest names.
    """
    import fnmatch

    chosen: set[str] = set()
    for pattern in patterns:
        hits = {
            name
            for name, op in CATALOGUE.items()
            if op.family == pattern or fnmatch.fnmatchcase(name, pattern)
        }
        if not hits:
            raise ProgramError(
                _lacks(pattern)
                or f"no op or family matches {pattern!r}{_hint(pattern, [*CATALOGUE, *families()])}"
            )
        chosen |= hits
    return tuple(op for name, op in CATALOGUE.items() if name in chosen)


def check(program: Program) -> None:
    """Raise `ProgramError` unless the program is well formed and the catalogue knows all of it."""
    program.check()
    _check_body(program.body, "$.body")
    if (found := places.refused_in(program, CATALOGUE)) is not None:
        call, name = found
        raise ProgramError(
            f"$.inputs: {name!r} is on the CPU, where {call.op} does not take it: leave out its "
            "device, or put all that meets it on the CPU too"
        )


def _check_body(body: tuple[Node, ...], where: str) -> None:
    for i, node in enumerate(body):
        if isinstance(node, Region):
            _check_body(node.body, f"{where}[{i}].body")
        else:
            _check_statement(node, f"{where}[{i}]")


def _check_statement(statement: Statement, where: str) -> None:
    op = CATALOGUE.get(statement.op)
    if op is None:
        lacks = _lacks(statement.op)
        raise ProgramError(
            f"{where}.op: {lacks}"
            if lacks
            else f"{where}.op={statement.op!r} is not in the catalogue{_way_out(statement.op)}"
        )
    if statement.form not in op.forms:
        raise ProgramError(f"{where}.form={statement.form!r}: {op.name} has {', '.join(op.forms)}")
    if not statement.outputs:
        raise ProgramError(f"{where}.outputs is empty: name at least one output")
    names = [name for name, _ in statement.kwargs]
    for name in names:
        if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name):
            raise ProgramError(f"{where}.kwargs has {name!r}, which is not a keyword")
    if len(set(names)) < len(names):
        raise ProgramError(f"{where}.kwargs names a keyword twice: {', '.join(names)}")
    for hole, is_object in op.holes(statement.form):
        if hole.isdigit() and int(hole) >= len(statement.args):
            raise ProgramError(f"{where}.args has {len(statement.args)}: {op.name} needs more")
        if not hole.isdigit() and hole not in names:
            raise ProgramError(f"{where}.kwargs lacks {hole!r}, which {op.name} needs")
        if is_object and hole.isdigit():
            arg = statement.args[int(hole)]
            if not (arg is None or isinstance(arg, Ref)):
                raise ProgramError(f"{where}.args[{hole}]={show_arg(arg)} must name a tensor")


def _lacks(name: str) -> str:
    """Return why the installed torch lacks an op that another has; empty if none has it."""
    op = REGISTRY.get(name)
    return f"{name} needs torch {op.torch}, and {installed()} is installed" if op else ""


def _way_out(name: str) -> str:
    root = name.partition(".")[0]
    if "." not in name or any(known.partition(".")[0] == root for known in CATALOGUE):
        return _hint(name, CATALOGUE)
    return (
        f": if it is your own op, name the module that registers it, as in "
        f"--plugins={root if root.isidentifier() else 'MODULE'} (docs/guide/your-op.md)"
    )


def _hint(word: str, words: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(words), n=1)
    return f": did you mean {near[0]!r}?" if near else ""
