"""The code that applies a remedy: the user's own statements, with autocast off and in float32."""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Any

import torch

from amp_fuzz.interfaces.precision import in_float32
from amp_fuzz.interfaces.precision.sites import Place
from amp_fuzz.reference.shadow.written import SIXTEEN

__all__ = ["Names", "code_of", "grouped", "names_in", "names_within", "statement_at"]


def code_of(
    lines: Sequence[Place],
    modules: Sequence[str],
    device: str,
    known: Mapping[Place, Names],
    roots: Collection[str] = ("",),
) -> str:
    """Return the code to paste: a block in place of each statement, and a call for submodules.

    known: what each statement reads. roots: the names of the modules that the paths of submodules
    begin with; "" is the callable itself. A statement that no block can take the place of (a
    condition, a lambda, an unknown source) is a comment.
    """
    parts = [_block(name, some, device, known) for name, some in grouped(lines).items()]
    if modules:
        text = inspect.getsource(in_float32)
        parts.append(f"{text[text.index('def run_in_float32') :].strip()}\n")
        for root in roots:
            if names := names_within(root, frozenset(modules)):
                listed = ", ".join(map(repr, sorted(names)))
                parts.append(f'run_in_float32({root or "model"}, {{{listed}}}, "{device}")')
    return "\n\n".join(parts)


def names_within(prefix: str, names: frozenset[str]) -> frozenset[str]:
    """Return those paths that are below a prefix, without it."""
    if not prefix:
        return names
    start = f"{prefix}."
    return frozenset(n.removeprefix(start) for n in names if n.startswith(start)) | frozenset(
        "" for n in names if n == prefix
    )


def grouped(lines: Sequence[Place]) -> dict[str, list[Place]]:
    """Return places by their names in reports: those of one statement together."""
    by_statement: dict[tuple[str, int], list[Place]] = {}
    for place in lines:
        node = statement_at(place.file, place.line)
        at = place.line if node is None or isinstance(node, _COMPOUND) else node.lineno
        by_statement.setdefault((place.file, at), []).append(place)
    return {_named(places): places for places in by_statement.values()}


def _named(places: Sequence[Place]) -> str:
    modules = [*dict.fromkeys(place.module for place in places if place.module)]
    some = f"{', '.join(modules[:3])}{f' and {len(modules) - 3} more' if modules[3:] else ''}"
    return f"{places[0].short}{f' ({some})' if some else ''}"


def _block(name: str, places: Sequence[Place], device: str, known: Mapping[Place, Names]) -> str:
    first = places[0]
    node = statement_at(first.file, first.line)
    if node is None or isinstance(node, _COMPOUND) or _in_lambda(node, first.line):
        text = "" if node is None else f": {_header(first, node)}"
        return f"# {name}: compute this in float32, with autocast off{text}"
    names = Names()
    for place in places:
        names |= known.get(place, Names())
    before, text = _widened(first.file, node, names)
    head = f'with torch.autocast("{device}", enabled=False):  # {name}'
    return "\n".join([*before, head, textwrap.indent(text, "    ")])


_COMPOUND = (
    *(ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match),
    *(ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith),
)


def _header(place: Place, node: ast.stmt) -> str:
    return linecache.getline(place.file, node.lineno).strip()


def _in_lambda(node: ast.AST, line: int) -> bool:
    return any(
        isinstance(inner, ast.Lambda) and inner.lineno <= line <= (inner.end_lineno or 0)
        for inner in ast.walk(node)
    )


def statement_at(file: str, line: int) -> ast.stmt | None:
    """Return the innermost statement on a line of a file; None if it cannot be read."""
    return _by_line("".join(linecache.getlines(file))).get(line)


@lru_cache(maxsize=64)
def _by_line(text: str) -> dict[int, ast.stmt]:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return {}
    found: dict[int, ast.stmt] = {}
    for node in ast.walk(tree):  # outer ones come first
        if isinstance(node, ast.stmt):
            found |= dict.fromkeys(range(node.lineno, (node.end_lineno or 0) + 1), node)
    return found


def _widened(file: str, node: ast.stmt, names: Names) -> tuple[list[str], str]:
    """Return a statement in float32, and the calls of submodules that stand before it."""
    lines = linecache.getlines(file)
    if isinstance(node, ast.AugAssign) and ast.unparse(node.target) in names.narrow:
        # ``x += y`` would round to 16 bits again.
        read = ast.parse(ast.unparse(node.target), mode="eval").body
        value = ast.BinOp(read, node.op, node.value)
        text = ast.unparse(ast.fix_missing_locations(ast.Assign([node.target], value)))
        lines, node = [text], ast.parse(text).body[0]
    source = _Source(lines, node)
    called = list(_called(node, names.modules))
    own = {id(part) for call in called for part in ast.walk(call)}
    edits = [
        (source.end(part), source.end(part), ".float()")
        for part in _loads(node)
        if ast.unparse(part) in names.narrow and id(part) not in own
    ]
    before: list[str] = []
    for call in called:
        made = f"{_dotted(call.func)[-1]}_out"
        if any(line.startswith(f"{made} =") for line in before):
            made += str(len(before) + 1)
        before.append(f"{made} = {ast.unparse(call)}")
        edits.append((source.start(call), source.end(call), f"{made}.float()"))
    return before, source.edited(edits)


class _Source:
    """The text of a statement, to edit by the places of its nodes: columns are of UTF-8."""

    def __init__(self, lines: Sequence[str], node: ast.stmt) -> None:
        held = [line.encode() for line in lines[node.lineno - 1 : node.end_lineno]]
        self.starts = [sum(map(len, held[:i])) for i in range(len(held))]
        self.text, self.node = b"".join(held), node

    def start(self, node: ast.stmt | ast.expr) -> int:
        return self.starts[node.lineno - self.node.lineno] + node.col_offset

    def end(self, node: ast.stmt | ast.expr) -> int:
        line, column = node.end_lineno or node.lineno, node.end_col_offset or 0
        return self.starts[line - self.node.lineno] + column

    def edited(self, edits: Collection[tuple[int, int, str]]) -> str:
        text, first = self.text[: self.end(self.node)], self.start(self.node)
        for start, end, new in sorted(set(edits), reverse=True):
            text = text[:start] + new.encode() + text[end:]
        head, *rest = text[first:].decode().split("\n")
        indent = " " * first
        return "\n".join([head, *(line.removeprefix(indent) for line in rest)])


def _called(node: ast.AST, modules: Collection[str]) -> Iterator[ast.Call]:
    """Yield the calls of submodules that can stand before a statement, and are operands in it.

    Their arguments compute nothing that has to be in float32. Where a call may not happen, or
    makes no tensor, it stays.
    """
    if isinstance(node, _LATER):
        return
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.Call) and _is_operand(node) and _is_plain(part, modules):
            yield part
        else:
            yield from _called(part, modules)


_LATER = (ast.IfExp, ast.BoolOp, ast.Lambda, *(ast.ListComp, ast.SetComp, ast.DictComp),
          ast.GeneratorExp)  # fmt: skip


def _is_operand(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return hasattr(torch.Tensor, node.attr) and not hasattr(tuple, node.attr)
    return isinstance(node, ast.BinOp | ast.UnaryOp)


def _is_plain(call: ast.expr, modules: Collection[str]) -> bool:
    """Return whether an expression only reads names, and calls submodules with them."""
    if isinstance(call, ast.Call):
        called = ast.unparse(call.func) in modules
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        return called and all(_is_plain(part, modules) for part in given)
    return isinstance(call, ast.Constant) or bool(_dotted(call))


def _loads(node: ast.stmt) -> Iterator[ast.expr]:
    """Yield the names, and the attributes of names, whose values a statement reads."""
    passed = _targets(node)
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr in _ABOUT:
            passed.add(id(part.value))
        if not isinstance(part, ast.Name | ast.Attribute) or id(part) in passed:
            continue
        if isinstance(part.ctx, ast.Load) and _dotted(part):
            yield part


_ABOUT = ("device", "dim", "double", "dtype", "float", "ndim", "numel", "shape", "size")


def _targets(node: ast.stmt) -> set[int]:
    """Return what a statement writes to: ``x`` of ``x[0] = y``."""
    written: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        written = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        written = [node.target]
    return {id(part) for target in written for part in ast.walk(target)}


def _dotted(node: ast.expr) -> list[str]:
    """Return the names of ``a.b.c``; empty for another expression."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)):
        return [*before, node.attr]
    return []


@dataclass(frozen=True, slots=True)
class Names:
    """What a statement reads: the names of 16-bit tensors, and of submodules."""

    narrow: frozenset[str] = frozenset()
    modules: frozenset[str] = frozenset()

    def __or__(self, other: Names) -> Names:
        return Names(self.narrow | other.narrow, self.modules | other.modules)


def names_in(frame: FrameType) -> Names:
    """Return what the statement that runs in a frame reads now."""
    node = statement_at(frame.f_code.co_filename, frame.f_lineno)
    narrow, modules = set(), set()
    for part in _loads(node) if node is not None else ():
        value, text = _value(frame, _dotted(part)), ast.unparse(part)
        if isinstance(value, torch.Tensor) and value.dtype in SIXTEEN:
            narrow.add(text)
        elif isinstance(value, torch.nn.Module):
            modules.add(text)
    return Names(frozenset(narrow), frozenset(modules))


def _value(frame: FrameType, path: Sequence[str]) -> Any:
    """Return what a dotted name is in a frame; no property of the user's runs for this."""
    first, *rest = path
    value: Any = frame.f_locals.get(first, frame.f_globals.get(first))
    for name in rest:
        held = dict(getattr(value, "__dict__", {}))
        if isinstance(value, torch.nn.Module):
            held |= {**value._parameters, **value._buffers, **value._modules}
        value = held.get(name)
    return value
