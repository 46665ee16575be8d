"""Every private name of torch that the package uses is one of the installed torch.

A torch that lacks one is named here, with the files that use it, before a run fails in the middle.
So is a module of torch that a file uses without importing it, if ``import torch`` does not either.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

PACKAGE = Path(__file__).parents[2] / "amp_fuzz"


def dotted(node: ast.AST) -> str:
    """Return the text of a name or an attribute of one, or "" (`ast.unparse`, 50 times faster)."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


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
            names = [dotted(node)]
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
                return importable(name)
    return True


def importable(name: str) -> bool:
    """Return whether ``from`` finds a name in a module that a function of its name hides."""
    module, _, last = name.rpartition(".")
    try:
        return hasattr(importlib.import_module(module), last)
    except ImportError:
        return False


@pytest.mark.thorough
def test_private_names_that_are_used_are_there() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of modules of torch, as they are imported
        gone = {name: files for name, files in used().items() if not exists(name)}
    assert not gone


def unimported(tree: ast.AST) -> set[str]:
    """Return the dotted names below torch that a file uses and does not import."""
    imported: set[str] = set()
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and (name := dotted(node)).startswith("torch."):
            used.add(name)
    below = tuple(f"{name}." for name in imported - {"torch"})
    return {name for name in used - imported if not name.startswith(below)}


def absent(names: set[str]) -> set[str]:
    """Return the names that a process lacks which has only imported torch."""
    script = (
        "import operator, sys, torch\n"
        "for name in sys.stdin.read().split():\n"
        "    try: operator.attrgetter(name.removeprefix('torch.'))(torch)\n"
        "    except AttributeError: print(name)\n"
    )
    run = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(run, input=" ".join(names), capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.thorough
def test_modules_of_torch_are_imported_where_they_are_used() -> None:
    """``torch.backends.opt_einsum`` comes with ``import torch`` in 2.13, and not in 2.7."""
    used = {path: unimported(ast.parse(path.read_text("utf-8"))) for path in PACKAGE.rglob("*.py")}
    gone = absent(set().union(*used.values()))
    found = {str(p.relative_to(PACKAGE)): names & gone for p, names in used.items() if names & gone}
    assert not found


@pytest.mark.thorough
def test_the_search_sees_modules_that_are_not_imported() -> None:
    text = "import torch.utils.bottleneck\ntorch.utils.bottleneck.f, torch.utils.tensorboard.g"
    names = unimported(ast.parse(text))
    assert names == {"torch.utils", "torch.utils.tensorboard", "torch.utils.tensorboard.g"}
    assert absent(names) == {"torch.utils.tensorboard", "torch.utils.tensorboard.g"}


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
