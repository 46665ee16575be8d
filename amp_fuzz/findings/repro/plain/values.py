"""Tensors by the shortest call that makes them."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

import torch

from amp_fuzz.findings.repro.plain.tree import called, expression
from amp_fuzz.findings.repro.simpler import counting, sevenths

__all__ = ["values"]


def values(tree: ast.Module) -> None:
    """Write tensors by the shortest call that makes them."""

    class Shorter(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.expr:
            self.generic_visit(node)
            name = called(node)
            if name in ("torch.tensor", "torch.full", "torch.zeros", "torch.empty"):
                return _shorter(node, name)
            return node

    Shorter().visit(tree)


def _shorter(node: ast.Call, name: str) -> ast.expr:
    words = [ast.unparse(k) for k in node.keywords]
    words = [w for w in words if w != "dtype=torch.float32"]
    if name == "torch.tensor":
        return _filled(node, words)
    sizes = ", ".join(map(str, ast.literal_eval(node.args[0]))) or "()"
    if name != "torch.full":
        return expression(f"{name}({', '.join([sizes, *words])})")
    number = ast.unparse(node.args[1])
    if number in ("1.0", "0.0"):
        made = {"1.0": "ones", "0.0": "zeros"}[number]
        return expression(f"torch.{made}({', '.join([sizes, *words])})")
    given = [*map(ast.unparse, node.args), *(words if _is_float(number) else _words(node))]
    return expression(f"torch.full({', '.join(given)})")


def _words(node: ast.Call) -> list[str]:
    return [ast.unparse(k) for k in node.keywords]


def _is_float(text: str) -> bool:
    return bool(re.search(r"\d[.e]|\binf\b|\bnan\b", text))


def _filled(node: ast.Call, words: Sequence[str]) -> ast.expr:
    """Return the call that makes a tensor with these elements."""
    given = ast.unparse(node.args[0])
    shape, numbers = _flat(node.args[0])
    sizes, count = ", ".join(map(str, shape)), len(numbers)
    if not _is_float(given):
        return node  # the dtype is not the default one
    dtype = next((k.value for k in node.keywords if k.arg == "dtype"), None)
    if count and dtype is not None and shape:
        name = ast.unparse(dtype).removeprefix("torch.")
        wanted = torch.tensor(numbers, dtype=getattr(torch, name))
        to = f".to(torch.{name})" if words else ""
        shaped = f".reshape({sizes})" if len(shape) > 1 else ""
        for fill, text in (
            (torch.ones, f"torch.ones({', '.join([sizes, *words])})"),
            (counting, f"torch.arange({', '.join(['1.0', str(count + 1), *words])}){shaped}"),
            (sevenths, f"((torch.arange(1.0, {count + 1}) % 7 - 3) / 7){shaped}{to}"),
        ):
            filled = fill(shape).reshape(-1).to(wanted.dtype)
            if count > (2 if fill is not torch.ones else 0) and torch.equal(filled, wanted):
                return expression(text)
    return expression(f"torch.tensor({', '.join([given, *words])})")


def _flat(node: ast.expr) -> tuple[list[int], list[object]]:
    """Return the shape of nested lists, and their numbers; no numbers if one is none."""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return [], []
    shape: list[int] = []
    found = [value]
    while found and isinstance(found[0], list):
        shape.append(len(found[0]))
        found = [item for part in found for item in part]
    return shape, found
