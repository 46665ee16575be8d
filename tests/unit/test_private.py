"""Every private name of torch that the package uses is one of the installed torch.

A torch that lacks one is named here, with the files that use it, before a run fails in the middle.
"""

from __future__ import annotations

import ast
import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

PACKAGE = Path(__file__).parents[2] / "amp_fuzz"


def private(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names below torch of which a part is private."""
    inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            names = [ast.unparse(node)]
        for name in names:
            parts = name.split(".")
            hidden = [p for p in parts if p.startswith("_") and not p.endswith("__")]
            if parts[0] == "torch" and all(p.isidentifier() for p in parts) and hidden:
                yield name


def used() -> dict[str, list[str]]:
    """Return the private names that the package uses, and in which files."""
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in private(ast.parse(path.read_text("utf-8"))):
            found.setdefault(name, []).append(str(path.relative_to(PACKAGE)))
    return found


def exists(name: str) -> bool:
    """Return whether a dotted name is a module, or an attribute of one."""
    parts = name.split(".")
    here: object = torch
    for depth, part in enumerate(parts[1:], start=2):
        try:
            here = getattr(here, part)
        except AttributeError:
            try:
                here = importlib.import_module(".".join(parts[:depth]))
            except ImportError:
                return False
    return True


def test_private_names_that_are_used_are_there() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of modules of torch, as they are imported
        gone = {name: files for name, files in used().items() if not exists(name)}
    assert not gone


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("torch._C._gone(1)", ["torch._C._gone"]),
        ("from torch._dynamo import reset", ["torch._dynamo.reset"]),
        ("import torch._inductor.config", ["torch._inductor.config"]),
        ("torch.mm(x, y); torch.__version__", []),
    ],
)
def test_the_search_sees_private_names(text: str, names: list[str]) -> None:
    assert list(private(ast.parse(text))) == names


def test_a_name_that_torch_lacks_is_seen() -> None:
    assert not exists("torch._C._no_such_name")
    assert exists("torch._C._jit_pass_inline")
