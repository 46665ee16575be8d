"""Who may import whom.

Data flows one way: strategies, case, reference and backends, oracle, records, reports. A module
that reaches back is caught here by its source, wherever in the module the import stands, and by
what importing the leaf modules loads in a fresh interpreter.
"""

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "amp_fuzz"


@dataclass(frozen=True, slots=True)
class Rule:
    """What one layer, a module or a package with all that it holds, may not use.

    A forbidden module stands for its submodules too. `but` is the part of the layer that the
    rule is not for.
    """

    layer: str
    forbidden: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    but: str = ""


# Each is one real backend, or a part of one. What backends differ in is asked by the protocols of
# `amp_fuzz.backends.base`, so that a new backend is one file.
CONCRETE = tuple(
    f"amp_fuzz.backends.{name}"
    for name in (
        *("bisection", "compile", "device_guards", "eager", "export", "fake", "jax"),
        *("quantising", "scaled_mm", "te", "torchao"),
        *(
            "privateuse1",
            "torch_base",
            "torchax",
            "torchscript",
            "torchscript_autocast",
            "torchscript_unit",
            "vendor",
        ),
    )
)

# The rooms, from the ground up. Each imports only itself and those before it.
ROOMS = (
    "amp_fuzz.cases",
    "amp_fuzz.catalogue",
    "amp_fuzz.records",
    "amp_fuzz.reports",
    "amp_fuzz.policies",
    "amp_fuzz.reference",
    "amp_fuzz.strategies",
    "amp_fuzz.backends",
    "amp_fuzz.oracle",
    "amp_fuzz.upstream",
    "amp_fuzz.findings",
    "amp_fuzz.runs",
    "amp_fuzz.interfaces",
)
# Modules at the root on which every room may stand.
GROUND = tuple(
    f"amp_fuzz.{name}" for name in ("config", "patching", "plugins", "profiles", "versions")
)

RULES = (
    Rule("amp_fuzz", forbidden=CONCRETE, but="amp_fuzz.backends"),
    *(Rule(module, forbidden=ROOMS) for module in GROUND),
    *(Rule(room, forbidden=ROOMS[number + 1 :]) for number, room in enumerate(ROOMS)),
    # Plain data: readable by a tool that has neither.
    Rule("amp_fuzz.cases.program", forbidden=("torch", "hypothesis")),
    Rule("amp_fuzz.cases.case", forbidden=("torch", "hypothesis")),
    # Independent of what it judges: written from the documentation, so it reads neither the
    # dispatcher's list of autocast kernels nor the lists in PyTorch's test suite.
    *(
        Rule(
            room,
            forbidden=("torch.testing",),
            names=(
                "_dispatch_dump",
                "_dispatch_dump_table",
                "_dispatch_get_all_op_names",
                "_dispatch_get_registrations_for_dispatch_key",
                "_dispatch_has_kernel_for_dispatch_key",
            ),
        )
        for room in ("amp_fuzz.policies", "amp_fuzz.reference")
    ),
    # It knows no bug: who does, is given to it.
    Rule(
        "amp_fuzz.oracle",
        names=("quirks", "active_quirks", "asking", "supposing", "noting"),
    ),
    # Records of any run, on any machine, can be read where torch is not installed.
    Rule("amp_fuzz.records", forbidden=("torch", "hypothesis")),
    Rule("amp_fuzz.reports", forbidden=("torch", "hypothesis")),
)


def inside(module: str, layer: str) -> bool:
    return module == layer or module.startswith(layer + ".")


def imports(tree: ast.AST, module: str, *, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the line and the absolute name of everything that `tree` imports.

    `from a import b` yields `a.b`, since `b` may be a module; as a prefix it says `a` as well.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            up = node.level - is_package
            base = parts[: len(parts) - up] if node.level else []
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                yield node.lineno, ".".join([*base, alias.name])


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each identifier, imported name and whole string (getattr)."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                yield node.lineno, name
            case ast.Constant(value=str(name)):
                yield node.lineno, name
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                for alias in aliases:
                    yield node.lineno, alias.name.rpartition(".")[2]


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Return `module:line: reason` for each rule that `source`, as `module`, breaks."""
    tree = ast.parse(source)
    imported = sorted(set(imports(tree, module, is_package=is_package)))
    used = sorted(set(names(tree)))
    found = []
    for rule in RULES:
        if not inside(module, rule.layer) or (rule.but and inside(module, rule.but)):
            continue
        for line, target in imported:
            if any(inside(target, banned) for banned in rule.forbidden):
                found.append(f"{module}:{line}: {rule.layer} may not import {target}")
        found += [
            f"{module}:{line}: {rule.layer} may not use {name}"
            for line, name in used
            if name in rule.names
        ]
    if not inside(module, "amp_fuzz.backends"):
        found += [
            f"{module}:{line}: what a backend is called says nothing of what it does"
            for line in sorted(guesses(tree))
        ]
    return found


STARTS = re.compile(r"(eager|fake)-?$|(compile|script|trace|export|jax|torchax|privateuse1)(\[|$)")


def guesses(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that ask what the name of a backend begins with."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="str"))):
                pass  # a column of records, which know a backend by its name alone
            case ast.Call(func=ast.Attribute(attr="startswith"), args=[start, *_]):
                texts = (n.value for n in ast.walk(start) if isinstance(n, ast.Constant))
                if any(isinstance(text, str) and STARTS.match(text) for text in texts):
                    yield node.lineno
            case ast.Call(
                func=ast.Attribute(
                    attr="partition" | "split" | "removeprefix" | "startswith",
                    value=ast.Attribute(
                        attr="name",
                        value=ast.Name(id="backend" | "rung") | ast.Attribute(attr="backend"),
                    ),
                )
            ):
                yield node.lineno


def top_level_imports(source: str, module: str) -> set[str]:
    """Return the top packages that importing `source` imports at once.

    Not those inside a function, nor those under `if TYPE_CHECKING`. Any other block runs.
    """

    def running(body: list[ast.stmt]) -> Iterator[ast.stmt]:
        for node in body:
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    pass
                case ast.If(
                    test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")
                ):
                    yield from running(node.orelse)
                case ast.Import() | ast.ImportFrom():
                    yield node
                case _:
                    for block in ("body", "orelse", "finalbody"):
                        yield from running(getattr(node, block, []))
                    for handler in getattr(node, "handlers", []):
                        yield from running(handler.body)

    found = running(ast.parse(source).body)
    return {target.partition(".")[0] for node in found for _, target in imports(node, module)}


def modules() -> Iterator[tuple[Path, str, bool]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        yield path, ".".join(parts[:-1] if is_package else parts), is_package


def exists(module: str) -> bool:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


@pytest.mark.thorough
def test_no_module_reaches_back() -> None:
    broken = [
        line
        for path, module, is_package in modules()
        for line in violations(path.read_text("utf-8"), module, is_package=is_package)
    ]
    assert not broken, "\n".join(["imports against the layers:", *broken])


@pytest.mark.parametrize(
    ("module", "source", "said"),
    [
        ("amp_fuzz.cases.program", "import torch", "may not import torch"),
        ("amp_fuzz.cases.program", "def f():\n    import torch.nn", "may not import torch.nn"),
        ("amp_fuzz.cases.case", "from hypothesis import given", "may not import hypothesis.given"),
        (
            "amp_fuzz.catalogue.matmul",
            "from amp_fuzz import reference",
            "may not import amp_fuzz.reference",
        ),
        (
            "amp_fuzz.catalogue.matmul",
            "from ..oracle import x",
            "may not import amp_fuzz.oracle.x",
        ),
        (
            "amp_fuzz.policies.tables",
            "import amp_fuzz.backends.base as b",
            "may not import amp_fuzz.backends.base",
        ),
        (
            "amp_fuzz.policies.tables",
            "from torch.testing._internal import autocast_test_lists",
            "may not import torch.testing._internal.autocast_test_lists",
        ),
        (
            "amp_fuzz.policies.tables",
            "import torch\ntorch._C._dispatch_get_all_op_names()",
            "tables:2: amp_fuzz.policies may not use _dispatch_get_all_op_names",
        ),
        (
            "amp_fuzz.policies.tables",
            "getattr(c, '_dispatch_dump')",
            "may not use _dispatch_dump",
        ),
        (
            "amp_fuzz.policies.tables",
            "from torch._C import _dispatch_has_kernel_for_dispatch_key as has",
            "may not use _dispatch_has_kernel_for_dispatch_key",
        ),
        ("amp_fuzz.backends.eager", "import amp_fuzz.oracle", "may not import amp_fuzz.oracle"),
        (
            "amp_fuzz.findings.repro.script",
            "from amp_fuzz.backends.compile import CompileBackend",
            "amp_fuzz may not import amp_fuzz.backends.compile.CompileBackend",
        ),
        (
            "amp_fuzz.findings.repro.issue",
            "name.startswith('script')",
            "says nothing of what it does",
        ),
        (
            "amp_fuzz.findings.repro.issue",
            "name.startswith(('eager', 'of'))",
            "says nothing of what it does",
        ),
        (
            "amp_fuzz.findings.repro.issue",
            "judge.backend.name.partition('[')",
            "says nothing of what it does",
        ),
        (
            "amp_fuzz.reference.kernels",
            "from amp_fuzz import upstream",
            "may not import amp_fuzz.upstream",
        ),
        (
            "amp_fuzz.backends.process",
            "def f():\n    from amp_fuzz.upstream import quirks",
            "may not import amp_fuzz.upstream.quirks",
        ),
        (
            "amp_fuzz.oracle.compare",
            "import amp_fuzz.upstream.torch",
            "may not import amp_fuzz.upstream.torch",
        ),
        (
            "amp_fuzz.oracle.judge",
            "from amp_fuzz.upstream.explain import judge_of",
            "may not import amp_fuzz.upstream.explain.judge_of",
        ),
        (
            "amp_fuzz.oracle.trial",
            "from amp_fuzz.reference import quirks",
            "trial:1: amp_fuzz.oracle may not use quirks",
        ),
        ("amp_fuzz.reports.html", "import torch", "may not import torch"),
        (
            "amp_fuzz.reports.html",
            "from amp_fuzz.runs import engine",
            "may not import amp_fuzz.runs.engine",
        ),
    ],
)
def test_the_checker_sees(module: str, source: str, said: str) -> None:
    (line,) = violations(source, module)
    assert line.endswith(said)


def test_the_checker_resolves_relative_imports_of_a_package() -> None:
    (line,) = violations("from ..oracle import x", "amp_fuzz.backends", is_package=True)
    assert line == "amp_fuzz.backends:1: amp_fuzz.backends may not import amp_fuzz.oracle.x"


def test_the_oracle_names_no_known_bug() -> None:
    from amp_fuzz.upstream import shipped

    text = "".join(path.read_text("utf-8") for path in (PACKAGE / "oracle").glob("*.py"))
    assert [entry.id for entry in shipped() if re.search(rf"\b{entry.id}\b", text)] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "amp_fuzz.cases.program",
            "import torchlight, numpy",
        ),  # a prefix of letters is not a package
        ("amp_fuzz.runs.engine", "import torch, hypothesis, amp_fuzz.oracle"),
        ("amp_fuzz.policies.tables", "import torch\nfrom amp_fuzz import catalogue"),
        ("amp_fuzz.policies.tables", "'''Not by _dispatch_dump: see DESIGN.'''"),
        ("amp_fuzz.reports.html", "import pandas\nfrom amp_fuzz.records.store import Store"),
        ("amp_fuzz.reports.html", "from . import frames"),
        ("amp_fuzz.findings.repro.script", "from amp_fuzz.backends.base import Repros"),
        ("amp_fuzz.backends.jax.backend", "from amp_fuzz.backends.torch_base import TorchBackend"),
        (
            "amp_fuzz.findings.repro.issue",
            "value.name.startswith('v') or line.startswith('scripted by')",
        ),
    ],
)
def test_the_checker_lets_pass(module: str, source: str) -> None:
    assert violations(source, module) == []


def test_the_plugin_imports_only_pytest_and_the_standard_library() -> None:
    """Every pytest run in every project that has amp_fuzz installed pays for these."""
    if not exists("amp_fuzz.pytest_plugin"):
        pytest.skip("amp_fuzz.pytest_plugin is not written yet")
    source = (PACKAGE / "pytest_plugin.py").read_text("utf-8")
    found = top_level_imports(source, "amp_fuzz.pytest_plugin")
    assert found - sys.stdlib_module_names <= {"pytest", "_pytest", "amp_fuzz"}
    beside = {
        module for module in loaded_by("amp_fuzz.pytest_plugin") if inside(module, "amp_fuzz")
    }
    assert beside == {
        "amp_fuzz",
        "amp_fuzz.interfaces",
        "amp_fuzz.interfaces.plugin",
        "amp_fuzz.interfaces.plugin.options",
        "amp_fuzz.pytest_plugin",
    }


def test_top_level_imports_are_those_that_run_on_import() -> None:
    source = """
from __future__ import annotations
import json, os.path
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import pandas
else:
    import numpy
try:
    import click
except ImportError:
    import rich
class C:
    import jinja2
    def f(self):
        import torch
from . import engine
"""
    found = top_level_imports(source, "amp_fuzz.pytest_plugin")
    assert found == {
        "__future__", "json", "os", "typing", "numpy", "click", "rich", "jinja2", "amp_fuzz",
    }  # fmt: skip


def loaded_by(module: str) -> set[str]:
    """Return the names of all modules loaded once a fresh interpreter has imported `module`."""
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("module", "never"),
    [
        ("amp_fuzz", {"torch", "pandas", "hypothesis", "numpy"}),
        ("amp_fuzz.pytest_plugin", {"torch", "pandas", "hypothesis", "numpy"}),
        ("amp_fuzz.cases.program", {"torch", "hypothesis"}),
        ("amp_fuzz.cases.case", {"torch", "hypothesis"}),
        ("amp_fuzz.reports", {"torch"}),
    ],
)
def test_importing_a_leaf_loads_no_heavy_library(module: str, never: set[str]) -> None:
    """The imports of imports count too, and so does `amp_fuzz/__init__.py`, which all run."""
    if not exists(module):
        pytest.skip(f"{module} is not written yet")
    assert loaded_by(module) & never == set()


def test_a_heavy_library_would_be_seen() -> None:
    assert importlib.util.find_spec("numpy") is not None
    assert "numpy" in loaded_by("numpy")
