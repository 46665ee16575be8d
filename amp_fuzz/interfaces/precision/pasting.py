"""The code that applies a remedy: the user's own statements, with autocast off and in float32."""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from types import FrameType
from typing import Any

import torch

from amp_fuzz.interfaces.precision import in_float32
from amp_fuzz.interfaces.precision.sites import Place
from amp_fuzz.reference.shadow.written import SIXTEEN

__all__ = ["code_of", "names_within", "narrow_names", "statement_at"]


def code_of(
    lines: Sequence[Place],
    modules: Sequence[str],
    device: str,
    narrow: Mapping[Place, Collection[str]],
    roots: Collection[str] = ("",),
) -> str:
    """Return the code to paste: a block in place of each statement, and a call for submodules.

    narrow: the names in a statement that hold 16-bit tensors. roots: the names of the modules that
    the paths of submodules begin with; "" is the callable itself. A statement that no block can
    take the place of (a condition, a lambda, an unknown source) is a comment.
    """
    parts = [_block(place, device, narrow.get(place, ())) for place in lines]
    if modules:
        text = inspect.getsource(in_float32)
        body = text[text.index("def run_in_float32") :]
        parts.append(body.replace("  # type: ignore[no-untyped-def]", "").strip())
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


def _block(place: Place, device: str, narrow: Collection[str]) -> str:
    head = f'with torch.autocast("{device}", enabled=False):  # {place.text}'
    node = statement_at(place.file, place.line)
    if node is None or isinstance(node, _COMPOUND) or _in_lambda(node, place.line):
        text = "" if node is None else f": {_header(place, node)}"
        return f"# {place.text}: compute this in float32, with autocast off{text}"
    return f"{head}\n{textwrap.indent(_widened(place.file, node, narrow), '    ')}"


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


@lru_cache(maxsize=64)
def _tree(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except SyntaxError:
        return None


@lru_cache(maxsize=4096)
def statement_at(file: str, line: int) -> ast.stmt | None:
    """Return the innermost statement on a line of a file; None if it cannot be read."""
    tree = _tree("".join(linecache.getlines(file)))
    found: ast.stmt | None = None
    for node in ast.walk(tree) if tree else ():  # outer ones come first
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            found = node
    return found


def _widened(file: str, node: ast.stmt, narrow: Collection[str]) -> str:
    """Return the source of a statement, with ``.float()`` after the names that are given."""
    if isinstance(node, ast.AugAssign) and ast.unparse(node.target) in narrow:
        # ``x += y`` would round to 16 bits again.
        value = ast.BinOp(_loaded(node.target), node.op, node.value)
        text = ast.unparse(ast.fix_missing_locations(ast.Assign([node.target], value)))
        return _floated(
            f"{text}\n".encode().splitlines(keepends=True), ast.parse(text).body[0], narrow
        )
    lines = [line.encode() for line in linecache.getlines(file)[node.lineno - 1 : node.end_lineno]]
    return _floated(lines, node, narrow)


def _loaded(target: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(target), mode="eval").body


def _floated(lines: list[bytes], node: ast.stmt, narrow: Collection[str]) -> str:
    read = [part for part in _loads(node) if ast.unparse(part) in narrow]
    ends = [(part.end_lineno or 0, part.end_col_offset or 0) for part in read]
    lines[-1] = lines[-1][: node.end_col_offset]
    for number, column in sorted(set(ends), reverse=True):  # columns are of UTF-8
        at = number - node.lineno
        lines[at] = lines[at][:column] + b".float()" + lines[at][column:]
    first = lines[0][node.col_offset :]
    indent = len(lines[0]) - len(lines[0].lstrip())
    rest = [line[indent:] if not line[:indent].strip() else line for line in lines[1:]]
    return b"".join([first, *rest]).decode().rstrip()


def _loads(node: ast.stmt) -> Iterator[ast.expr]:
    """Yield the names, and the attributes of names, whose values a statement reads."""
    passed = _targets(node)
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr in _ABOUT:
            passed.add(id(part.value))
        if isinstance(part, ast.Name | ast.Attribute) and isinstance(part.ctx, ast.Load):
            if id(part) not in passed and _dotted(part):
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


def narrow_names(frame: FrameType) -> set[str]:
    """Return what the statement that runs in a frame reads and is a 16-bit tensor now."""
    node = statement_at(frame.f_code.co_filename, frame.f_lineno)
    found = set()
    for part in _loads(node) if node is not None else ():
        first, *rest = _dotted(part)
        value: Any = frame.f_locals.get(first, frame.f_globals.get(first))
        for name in rest:  # no property of the user's runs for this
            if isinstance(value, torch.nn.Module):
                held = {**value._parameters, **value._buffers, **value._modules, **vars(value)}
                value = held.get(name)
            else:
                value = getattr(value, "__dict__", {}).get(name)
        if isinstance(value, torch.Tensor) and value.dtype in SIXTEEN:
            found.add(ast.unparse(part))
    return found
