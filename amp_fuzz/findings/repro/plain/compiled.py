"""A program is compiled, scripted, exported or made a custom op in the statement that calls it."""

from __future__ import annotations

import ast
import re

from amp_fuzz.findings.repro.plain.tree import (
    assigned,
    called,
    expression,
    function_of,
    loads,
    names_of,
    put,
    sites_of,
    tuple_of,
    value_of,
)

__all__ = ["compiled", "custom_op"]


def compiled(tree: ast.Module) -> None:
    """Compile a program in the statement that calls it, if one does."""
    for made in [n for n in tree.body if assigned(n) == "program"]:
        value = value_of(made)
        if called(value) == "torch.compile" and function_of(tree, "program"):
            assert isinstance(value, ast.Call)
            tree.body.remove(made)
            sites, others = sites_of(tree, "program")
            if len(sites) == 1 and not others and loads(sites[0][1])["program"] == 1:
                words = [k for k in value.keywords if ast.unparse(k) != "dynamic=False"]
                value.keywords = words or value.keywords
                block, node = sites[0]
                block[block.index(node)] = put(node, {"program": value})  # type: ignore[call-overload]
            else:
                value.args = value.args[1:]
                function = function_of(tree, "program")
                assert function is not None
                function.decorator_list.append(value)
        elif called(value) == "optimised":
            assert isinstance(value, ast.Call)
            make, _, times = value.args
            if isinstance(make, ast.Lambda) and isinstance(times, ast.Constant):
                _made(tree, made, make.body, int(str(times.value)))


def _made(tree: ast.Module, made: ast.stmt, make: ast.expr, times: int) -> None:
    """Make what is compiled where it is called first, and call it so many times."""
    before = list(tree.body)
    tree.body[:] = [n for n in before if n is not made and assigned(n) != "plain"]
    sites, others = sites_of(tree, "program")
    calls = [n for _, node in sites for n in ast.walk(node) if called(n) == "program"]
    once = len(sites) == len(calls) and (len(calls) == 1 or (calls and times == 1))
    if not once or others or loads(tree)["plain"]:
        tree.body[:] = before
        return
    (block, node), call = sites[0], calls[0]
    assert isinstance(call, ast.Call)
    given = {"plain": expression("program"), "inputs": ast.List(call.args, ast.Load())}
    make = _untupled(put(make, given))
    if called(make) == "exported":
        assert isinstance(make, ast.Call)
        make = _exported(tree, make, inside=block is not tree.body)
    if times == 1 and len(calls) == 1:
        call.func = make
        return
    for one in calls:
        assert isinstance(one, ast.Call)
        one.func = expression("compiled")
    at = block.index(node)
    if times > 1:
        counted = ast.Name("_", ast.Store()), expression(f"range({times})")
        block[at] = ast.For(*counted, [node], [], lineno=0)
    block.insert(at, ast.Assign([ast.Name("compiled", ast.Store())], make, lineno=0))


def _untupled(node: ast.expr) -> ast.expr:
    """Return an expression with tuples of lists as tuples."""

    class Untuple(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.expr:
            self.generic_visit(node)
            if called(node) == "tuple" and isinstance(node.args[0], ast.List):
                return tuple_of(node.args[0].elts)
            return node

    return Untuple().visit(node)  # type: ignore[no-any-return]


def _exported(tree: ast.Module, made: ast.Call, *, inside: bool) -> ast.expr:
    """Return a call of `torch.export.export`; the program becomes the module that it wants."""
    function = function_of(tree, "program")
    _, inputs, decomposed = made.args
    assert function is not None
    assert isinstance(inputs, ast.List)
    strict = ast.unparse(made.keywords[0].value) if made.keywords else "False"
    function.name = "forward"
    function.args.args.insert(0, ast.arg("self"))
    module = ast.ClassDef("Module", [expression("torch.nn.Module")], [], [function], [])
    tree.body[tree.body.index(function)] = module
    text = f"torch.export.export(Module(), INPUTS, strict={strict})"
    if ast.unparse(decomposed) == "False":
        text = f"{text}.module()"
    else:
        text = f"{text}.run_decompositions().module()"
        text = f'torch.autocast("cpu", enabled=False)({text})' if inside else text
    return expression(text, INPUTS=tuple_of(inputs.elts))


def custom_op(tree: ast.Module) -> None:
    """Make a custom op of a program by torch's own function, if no backward pass needs more."""
    program = function_of(tree, "program")
    sites, _ = sites_of(tree, "as_custom_op")
    whole = ast.unparse(
        ast.Module([n for n in tree.body if not isinstance(n, ast.FunctionDef)], [])
    )
    if program is None or len(sites) != 1 or ".backward(" in whole or len(names_of(tree)) != 1:
        return
    block, node = sites[0]
    match = re.fullmatch(
        r"entered = as_custom_op\(program, (.+?), custom_op(?:, (.+))?\)", ast.unparse(node)
    )
    if match is None:
        return
    for arg in program.args.args:
        arg.annotation = expression("torch.Tensor")
    program.returns = expression("torch.Tensor")
    lines = ['op = custom_op("amp_fuzz::program", program, mutates_args=())']
    lines.append("op.register_fake(program)")
    lines += [f"op.register_autocast({match[1]}, {match[2]})"] if match[2] else []
    block[block.index(node)] = ast.parse(lines[0]).body[0]
    at = block.index(next(n for n in block if assigned(n) == "op"))
    block[at + 1 : at + 1] = [n for line in lines[1:] for n in ast.parse(line).body]
    tree.body[:] = [put(n, {"entered": expression("op")}) for n in tree.body]  # type: ignore[misc]
