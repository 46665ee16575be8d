"""Results by the names that the program gives them, and backward passes from these."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from amp_fuzz.findings.repro.plain.tree import (
    WIDTH,
    Block,
    assigned,
    assignments,
    blocks,
    called,
    expression,
    function_of,
    is_load,
    loads,
    names_of,
    put,
    sites_of,
    value_of,
)

__all__ = ["backward", "default_dtype", "forwarded", "in_place", "outputs", "returning", "together"]


def backward(tree: ast.Module) -> None:
    """Start a backward pass from the one output of a program, or from those that have gradients."""
    names = names_of(tree)
    for block in blocks(tree.body):
        for node in list(block):
            if assigned(node) == "starts" and ast.unparse(value_of(node)) == "trains(outputs)":
                _started(tree, block, block.index(node), names)


_COTANGENT = "(torch.arange({o}.numel()) % 4 - 1.5).reshape({o}.shape).to({o}.dtype)"


def _started(tree: ast.Module, block: Block, at: int, names: list[str]) -> None:
    bound = [value_of(n) for b in blocks(tree.body) for n in b if assigned(n) == "outputs"]
    tuples = [v for v in bound if isinstance(v, ast.Tuple)]
    if tuples:
        names = [ast.unparse(e) for e in tuples[0].elts] if len(bound) == 1 else []
    one = len(names) == 1 and _only_backward(tree)
    if not one:
        listed = f"[{_COTANGENT.format(o='o')} for o in starts]"
        block[at] = ast.Assign(
            [ast.Name("starts", ast.Store())],
            expression("[o for o in outputs if o.requires_grad]"),
            lineno=0,
        )
        if assigned(block[at + 1]) == "cotangents":
            block[at + 1] = ast.Assign(
                [ast.Name("cotangents", ast.Store())], expression(listed), lineno=0
            )
    for inner in blocks(tree.body):
        for i, node in enumerate(inner):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "starts":
                inner[i] = node.body[0]
                if one:
                    call = node.body[0].value  # type: ignore[attr-defined]
                    output = ast.unparse(tuples[0].elts[0]) if tuples else "outputs[0]"
                    text = f"{output}.backward({_COTANGENT.format(o=output)})"
                    found = expression(text)
                    assert isinstance(found, ast.Call)
                    found.keywords += call.keywords
                    inner[i] = ast.Expr(found)
                    if "value is None" in ast.unparse(tree.body[-1]):  # it may require no gradient
                        needs = expression(f"{output}.requires_grad")
                        inner[i] = ast.If(needs, [inner[i]], [])
    if one:
        for inner in blocks(tree.body):
            inner[:] = [n for n in inner if assigned(n) not in ("starts", "cotangents")]


def _only_backward(tree: ast.Module) -> bool:
    """Return whether starts and cotangents are only read by plain backward passes."""
    pattern = r"if starts:\n    torch\.autograd\.backward\(starts, cotangents.*\)"
    ifs = [n for b in blocks(tree.body) for n in b if isinstance(n, ast.If)]
    plainly = [n for n in ifs if re.fullmatch(pattern, ast.unparse(n))]
    inside = sum(loads(n)["starts"] for n in plainly)
    in_functions = any("starts" in loads(n) for n in tree.body if isinstance(n, ast.FunctionDef))
    return inside + 1 == loads(tree)["starts"] and not in_functions


_PASSES_ON = (
    *("program", "torch.compile", "torch.jit.script", "torch.jit.trace", "torch.export.export"),
    *("checkpoint", "compiled", "custom_op", "op.register_fake"),
)


def outputs(tree: ast.Module) -> None:
    """Name results as the program does."""
    made = [
        (block, node)
        for block in blocks(tree.body)
        for node in block
        if assigned(node) == "outputs"
    ]
    uses = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.Subscript) and ast.unparse(n.value) == "outputs"
    ]
    at = {ast.unparse(n.slice) for n in uses}
    if not made or len(uses) != loads(tree)["outputs"] or not all(a.isdigit() for a in at):
        return
    values = [value_of(node) for _, node in made]
    names = names_of(tree)
    if not uses:
        for block, node in made:
            i = block.index(node)
            block[i : i + 1] = [ast.Expr(value_of(node))] if called(value_of(node)) else []
        if len(names) == 1:
            _returns_one(tree)
        return
    if not all(isinstance(v, ast.Call) for v in values) or not names:
        return
    if len(names) == 1 and _returns_one(tree):
        _renamed(tree, made, names, whole=True)
    elif (
        len(made) == 1
        and len(at) == 1
        and len(uses) == 1
        and names[int(min(at))] not in _stored(tree)
    ):
        (number,) = at
        block, node = made[0]
        name = names[int(number)]
        value = ast.Subscript(values[0], ast.Constant(int(number)), ast.Load())
        block[block.index(node)] = ast.Assign([ast.Name(name, ast.Store())], value, lineno=0)
        _replace(tree, uses, {number: name})


def _stored(tree: ast.Module) -> set[str]:
    """Return the names that a script assigns outside its functions."""
    return {assigned(n) for b in blocks(tree.body) for n in b}


def _returns_one(tree: ast.Module) -> bool:
    """Let a program return its one result, if nothing but its calls takes it; else do nothing."""
    callers = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            named = [
                a for a in (node.func, *node.args) if ast.unparse(a) in ("program", "Module()")
            ]
            callers += [called(node)] * len(named)
    classes = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Module"]
    reads = loads(tree)["program"] + loads(tree)["Module"]
    bound = {assigned(n) for b in blocks(tree.body) for n in b if "program" in loads(n)}
    bound |= {assigned(n) for b in blocks(tree.body) for n in b if "compiled" in loads(n)}
    if reads != len(callers) or not all(name in _PASSES_ON for name in callers):
        return False
    if not bound <= {"", "outputs", "program", "compiled", "op"}:
        return False  # a result of another name is read by number
    function = classes[0].body[0] if classes else function_of(tree, "program")
    assert isinstance(function, ast.FunctionDef)
    last = function.body[-1]
    assert isinstance(last, ast.Return)
    assert isinstance(last.value, ast.Tuple)
    last.value = last.value.elts[0]
    return True


def _renamed(
    tree: ast.Module, made: Sequence[tuple[Block, ast.stmt]], names: list[str], *, whole: bool
) -> None:
    """Bind results to their names, and read these."""
    assert whole
    for _, node in made:
        assert isinstance(node, ast.Assign)
        node.targets = [ast.Name(names[0], ast.Store())]
    uses = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.Subscript) and ast.unparse(n.value) == "outputs"
    ]
    _replace(tree, uses, {"0": names[0]})


def _replace(tree: ast.Module, uses: Sequence[ast.Subscript], names: dict[str, str]) -> None:
    """Put names in the places of results by number."""

    class Replace(ast.NodeTransformer):
        def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
            if any(node is use for use in uses):
                return ast.Name(names[ast.unparse(node.slice)], ast.Load())
            self.generic_visit(node)
            return node

    Replace().visit(tree)


def default_dtype(tree: ast.Module) -> None:
    """Set autocast's dtype for the rest of a script, if nothing follows that takes it."""
    for i, node in enumerate(tree.body):
        last = all("program" not in loads(n) for n in tree.body[i + 1 :])
        if isinstance(node, ast.With) and last and len(node.items) == 1:
            context = node.items[0].context_expr
            if called(context) == "autocast_dtype":
                assert isinstance(context, ast.Call)
                context.func = expression("torch.set_autocast_dtype")
                tree.body[i : i + 1] = [ast.Expr(context), *node.body]


def in_place(tree: ast.Module) -> None:
    """Put the body of a program in the place of its one call, if nothing else takes it."""
    program = function_of(tree, "program")
    sites, others = sites_of(tree, "program")
    if program is None or program.decorator_list or len(sites) != 1 or others:
        return
    (block, node), last = sites[0], program.body[-1]
    value = node.value if isinstance(node, ast.Assign | ast.Expr) else None
    parameters = ", ".join(arg.arg for arg in program.args.args)
    if value is None or ast.unparse(value) != f"program({parameters})":
        return
    assert isinstance(last, ast.Return)
    assert last.value is not None
    tail = assignments(node.targets[0], last.value) if isinstance(node, ast.Assign) else []
    at = block.index(node)
    block[at : at + 1] = [*program.body[:-1], *tail]
    tree.body.remove(program)


def together(tree: ast.Module) -> None:
    """Enter contexts in one line that are entered one in the other."""
    for block in blocks(tree.body, functions=True):
        for node in block:
            while isinstance(node, ast.With) and len(node.body) == 1:
                inner = node.body[0]
                if not isinstance(inner, ast.With):
                    break
                items = [*node.items, *inner.items]
                if len("with " + ", ".join(map(ast.unparse, items))) > WIDTH - 10:
                    break
                node.items, node.body = items, inner.body


def forwarded(tree: ast.Module) -> None:
    """Write what is compared where it is compared."""
    for name in ("value", "observed"):
        stored = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == name]
        parameters = [n for n in ast.walk(tree) if isinstance(n, ast.arg) and n.arg == name]
        if parameters or sum(not is_load(n) for n in stored) != 1:
            continue  # it has another meaning too
        for block in blocks(tree.body):
            for node in list(block):
                if assigned(node) != name:
                    continue
                value = value_of(node)
                if isinstance(value, ast.Name | ast.Attribute):
                    block.remove(node)
                    tree.body[:] = [put(n, {name: value}) for n in tree.body]  # type: ignore[misc]


def returning(tree: ast.Module) -> None:
    """Return the result of a program's last statement directly."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in ("program", "forward"):
            last = node.body[-1]
            if not isinstance(last, ast.Return) or not isinstance(last.value, ast.Name):
                continue
            block = node.body[:-1]
            inside = block
            while inside and isinstance(inside[-1], ast.With):
                inside = inside[-1].body
            if not block:
                continue
            if inside and assigned(inside[-1]) == last.value.id and loads(node)[last.value.id] == 1:
                inside[-1] = ast.Return(value_of(inside[-1]))
                node.body = block
