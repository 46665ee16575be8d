"""Helpers of a script stand where they are called, and what nothing reads goes."""

from __future__ import annotations

import ast
import re
from collections import Counter

from amp_fuzz.findings.repro.plain.tree import (
    COMMENT,
    TYPED,
    Block,
    assigned,
    assignments,
    blocks,
    called,
    function_of,
    is_comment,
    is_load,
    loads,
    put,
    sites_of,
    value_of,
)

__all__ = ["decided", "device", "inlined", "undocumented", "unread"]


def undocumented(tree: ast.Module) -> None:
    """Leave out annotations; a docstring's first line becomes a comment above its function."""
    for block in blocks(tree.body, functions=True):
        for node in list(block):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            if (text := ast.get_docstring(node)) is not None:
                node.body = node.body[1:] or [ast.Pass()]
                line = ast.Constant(f"# {text.splitlines()[0]}")
                note = ast.Expr(ast.Call(ast.Name(COMMENT, ast.Load()), [line], []))
                block.insert(block.index(node), note)
            if isinstance(node, ast.FunctionDef) and node.name in TYPED:
                continue  # a custom op has its schema from them, TorchScript its types
            if isinstance(node, ast.FunctionDef):
                node.returns = None
                for arg in (*node.args.args, *node.args.kwonlyargs):
                    arg.annotation = None
                for more in (node.args.vararg, node.args.kwarg):
                    if more is not None:
                        more.annotation = None
                for inner in blocks(node.body):
                    inner[:] = [_unannotated(n) for n in inner]


def _unannotated(node: ast.stmt) -> ast.stmt:
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        return ast.Assign([node.target], node.value, lineno=0)
    return node


def device(tree: ast.Module) -> None:
    """Write the name of the device where it is read."""
    made = [n for n in tree.body if assigned(n) == "device"]
    if len(made) != 1 or not isinstance(value_of(made[0]), ast.Constant):
        return
    names, left = {"device": value_of(made[0])}, False
    for i, node in enumerate(tree.body):
        functions = [n for n in ast.walk(node) if isinstance(n, ast.FunctionDef)]
        if any(arg.arg == "device" for f in functions for arg in f.args.args):
            left |= isinstance(node, ast.ClassDef)
        elif node is not made[0]:
            tree.body[i] = put(node, names)  # type: ignore[call-overload]
    if not left:
        tree.body.remove(made[0])


def inlined(tree: ast.Module) -> None:
    """Put the body of a helper in the place of its one call."""
    for helper in [n for n in tree.body if isinstance(n, ast.FunctionDef)]:
        if helper.name in TYPED or helper.decorator_list or helper.args.vararg or helper.args.kwarg:
            continue
        reads = loads(ast.Module([n for n in tree.body if n is not helper], []))[helper.name]
        sites, _ = sites_of(tree, helper.name)
        if reads != 1 or len(sites) != 1:
            continue
        block, node = sites[0]
        value = node.value if isinstance(node, ast.Assign | ast.Expr) else None
        bound = _bound(helper, value) if value and called(value) == helper.name else None
        if bound is None or _clashes(tree, helper, bound):
            continue
        body: Block = [put(n, bound) for n in helper.body]  # type: ignore[misc]
        if isinstance(body[-1], ast.Return):
            last = body.pop()
            assert isinstance(last, ast.Return)
            if isinstance(node, ast.Assign) and last.value is not None:
                body += assignments(node.targets[0], last.value)
        elif isinstance(node, ast.Assign):
            continue
        at = block.index(node)
        block[at : at + 1] = body
        # What the comment above it says is true of the lines.
        i = tree.body.index(helper)
        noted = i > 0 and is_comment(tree.body[i - 1])
        del tree.body[i - noted : i + 1]


def _bound(helper: ast.FunctionDef, call: ast.AST | None) -> dict[str, ast.expr] | None:
    """Return the arguments of a call by the helper's parameters, or None if it has others."""
    assert isinstance(call, ast.Call)
    returns = [n for b in blocks(helper.body) for n in b if isinstance(n, ast.Return)]
    names = [arg.arg for arg in helper.args.args]
    simple = all(isinstance(a, ast.Name | ast.Constant | ast.Attribute) for a in call.args)
    if call.keywords or not simple or returns not in ([], helper.body[-1:]):
        return None
    defaults = dict(zip(reversed(names), reversed(helper.args.defaults), strict=False))
    found = dict(zip(names, call.args, strict=False))
    found = {**{k: v for k, v in defaults.items() if k not in found}, **found}
    return found if len(found) == len(names) else None


def _clashes(tree: ast.Module, helper: ast.FunctionDef, bound: dict[str, ast.expr]) -> bool:
    """Return whether a name that a helper assigns has another meaning in the script."""
    stored = {n.id for n in ast.walk(helper) if isinstance(n, ast.Name) and not is_load(n)}
    stored |= {
        n.name
        for n in ast.walk(helper)
        if isinstance(n, ast.FunctionDef | ast.ClassDef) and n is not helper
    }
    others = ast.Module([n for n in tree.body if n is not helper], [])
    taken = {n.id for n in ast.walk(others) if isinstance(n, ast.Name)}
    taken |= {n.name for n in ast.walk(others) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    parameters = {
        arg.arg
        for n in ast.walk(helper)
        if isinstance(n, ast.FunctionDef) and n is not helper
        for arg in n.args.args
    }
    # `put` knows no scopes: an inner function must not have a parameter of the helper's name.
    return bool(stored & taken or parameters & bound.keys())


def decided(tree: ast.Module) -> None:
    """Leave out branches and loops that a constant decides."""
    lists = {
        assigned(n): value_of(n).elts  # type: ignore[attr-defined]
        for b in blocks(tree.body)
        for n in b
        if assigned(n) and isinstance(value_of(n), ast.List)
    }
    for block in list(blocks(tree.body)):
        for node in list(block):
            if isinstance(node, ast.If) and isinstance(taken := _truth(node.test), bool):
                at = block.index(node)
                block[at : at + 1] = node.body if taken else node.orelse
            elif isinstance(node, ast.For) and isinstance(node.iter, ast.Name):
                items = lists.get(node.iter.id)
                if items is not None and len(items) == 1 and isinstance(node.target, ast.Name):
                    name, at = node.target.id, block.index(node)
                    block[at : at + 1] = [put(n, {name: items[0]}) for n in node.body]  # type: ignore[misc]


def _truth(test: ast.expr) -> bool | None:
    """Return what a condition on a constant is, or None."""
    match = re.fullmatch(r"(.+) is (not )?None", ast.unparse(test))
    if match and (match[1] == "None" or re.fullmatch(r"torch\.\w+", match[1])):
        return (match[1] == "None") != bool(match[2])
    return None


def unread(tree: ast.Module) -> None:
    """Leave out parameters, inputs, helpers and names that nothing reads."""
    _unread_parameters(tree)
    while True:
        read = loads(tree)
        kept = [n for n in tree.body if not _is_unread(n, read)]
        if len(kept) == len(tree.body):
            break
        # A comment above what goes is about that.
        tree.body[:] = [
            n
            for n, after in zip(tree.body, [*tree.body[1:], None], strict=True)
            if n in kept and not (is_comment(n) and after is not None and after not in kept)
        ]


_MAKES = re.compile(
    r"torch\.(tensor|full|zeros|ones|empty|empty_strided|arange)|make_\w+"
    r"|.*\.(requires_grad_|reshape|to|copy_|view)"
)
"""What a call calls that only makes a tensor, or a function of a program."""


def _is_unread(node: ast.stmt, read: Counter[str]) -> bool:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name not in read
    name = assigned(node)
    calls = [called(n) for n in ast.walk(node) if isinstance(n, ast.Call)]
    made = all(_MAKES.fullmatch(call) for call in calls)
    return bool(name) and name not in read and made


def _unread_parameters(tree: ast.Module) -> None:
    function = function_of(tree, "program")
    if function is None or function.args.vararg is not None:
        return
    calls = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.Call)
        and (called(n) == "program" or re.match(r"torch\.compile\(program\b", called(n)))
    ]
    reads = loads(tree)["program"]
    names = [arg.arg for arg in function.args.args]
    if reads != len(calls) or any(len(c.args) != len(names) for c in calls):
        return
    read = loads(function)
    for i in reversed(range(len(names))):
        if names[i] not in read:
            del function.args.args[i]
            for call in calls:
                del call.args[i]
