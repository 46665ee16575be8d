"""The scripts in benchmarks/ start in any folder, on the modules of the checkout they stand in."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HEAD = "sys.path.insert(0, str(Path(__file__).resolve().parents[1]))"


def too_early(source: str) -> list[str]:
    """Return which lines import of the checkout before the script has put that on the path."""
    tree = ast.parse(source)
    start = next((s.lineno for s in tree.body if ast.unparse(s) == HEAD), math.inf)
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom)) and node.lineno < start and _ours(node)
    ]


def _ours(node: ast.Import | ast.ImportFrom) -> bool:
    names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    return any(name.partition(".")[0] in ("amp_fuzz", "benchmarks", "tests") for name in names)


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.name)
def test_a_script_imports_from_its_own_checkout(path: Path) -> None:
    source = path.read_text()
    if '__name__ == "__main__"' in source:
        assert not too_early(source), f"needs this line before: {HEAD}"


@pytest.mark.parametrize(
    "source",
    [
        "import amp_fuzz\n",
        f"import amp_fuzz.cases.case\n{HEAD}\n",
        f"from benchmarks.hunting import hunted\n{HEAD}\n",
        "def main():\n    from tests import helpers\n",
    ],
)
def test_a_script_that_does_not_is_named(source: str) -> None:
    assert too_early(source) == [source.removesuffix(f"{HEAD}\n").splitlines()[-1].strip()]
    assert not too_early(f"{HEAD}\n{source}")
