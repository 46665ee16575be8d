"""Change the package at random, a small change each time, and record which tests notice.

    python benchmarks/mutations.py [--count=30] [--seed=0] [--near] [--out=mutations.json]

Each mutation is one change of the syntax of a function of `amp_fuzz/`: a comparison turned round, a
condition negated, a number or a truth value changed, a statement left out, two arguments exchanged,
a returned value replaced by None. The first ones are in a room each. It is made in a copy of the
checkout, where `make test` runs until a test fails, those that name the module first; if none
does, so do the thorough tests. With `--near` only the 20 nearest files of each tier run: others may
notice a mutation that these do not. A mutation that no test can run (docstrings, messages of
errors, types, `__repr__`) is not drawn. Each is written when it is done, and a second call
continues.

The tests of the copy without a mutation must pass: `--check` runs them.
"""

from __future__ import annotations

import ast
import copy
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import ROOT, Row, arguments, commit, machine, read, versions, write

PACKAGE = ROOT / "amp_fuzz"
TIERS = {"make test": "not thorough and not slow", "make test-rest": "thorough and not slow"}

# The folders of tests that are about a room.
ABOUT = {
    "backends": "backends",
    "check": "check",
    "findings": "quality",
    "interfaces": "cli",
    "oracle": "oracle",
    "policies": "reference",
    "reference": "reference",
    "upstream": "upstream",
}
_TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True, slots=True)
class Mutation:
    """A change of one statement: its file, line, kind, and the text before and after."""

    path: str
    line: int
    kind: str
    before: str
    after: str

    @property
    def room(self) -> str:
        """The folder of the package that it is in; "root" for a file of its own."""
        parts = Path(self.path).parts
        return parts[1] if len(parts) > 2 else "root"


def compared(node: ast.AST) -> ast.AST | None:
    """Turn a comparison round."""
    if not isinstance(node, ast.Compare) or type(node.ops[0]) not in _TURNED:
        return None
    made = copy.deepcopy(node)
    made.ops[0] = _TURNED[type(node.ops[0])]()
    return made


def negated(node: ast.AST) -> ast.AST | None:
    """Negate a condition."""
    if not isinstance(node, (ast.If, ast.IfExp, ast.While)):
        return None
    made = copy.deepcopy(node)
    made.test = ast.UnaryOp(ast.Not(), made.test)
    return made


def counted(node: ast.AST) -> ast.AST | None:
    """Change a number by one, or a truth value."""
    if not isinstance(node, ast.Constant) or not isinstance(node.value, (bool, int, float)):
        return None
    return ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)


def dropped(node: ast.AST) -> ast.AST | None:
    """Leave a statement out."""
    acts = isinstance(node, (ast.Assign, ast.AugAssign)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await))
    )
    return ast.Pass() if acts else None


def exchanged(node: ast.AST) -> ast.AST | None:
    """Exchange the first two arguments of a call."""
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return None
    first, second, *rest = node.args
    if ast.dump(first) == ast.dump(second) or isinstance(first, ast.Starred):
        return None
    made = copy.deepcopy(node)
    made.args = [second, first, *rest]
    return made


def returned(node: ast.AST) -> ast.AST | None:
    """Return None instead of a value."""
    if not isinstance(node, ast.Return) or node.value is None:
        return None
    if isinstance(node.value, ast.Constant) and node.value.value is None:
        return None
    return ast.Return(ast.Constant(None))


KINDS: dict[str, Callable[[ast.AST], ast.AST | None]] = {
    "comparison turned": compared,
    "condition negated": negated,
    "constant changed": counted,
    "statement dropped": dropped,
    "arguments exchanged": exchanged,
    "return replaced": returned,
}

_SILENT = ("__repr__", "__str__", "__post_init__")


def running(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of functions that run: no docstrings, types, messages, asserts."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name not in _SILENT:
            for statement in function.body:
                yield from _within(statement)


def _within(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, (ast.Raise, ast.Assert, ast.FunctionDef, ast.ClassDef, ast.JoinedStr)):
        return  # inner functions come by themselves
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _within(child)


@dataclass(frozen=True, slots=True)
class Place:
    """A node of a file that a kind of mutation can change."""

    path: Path
    node: ast.expr | ast.stmt
    kind: str

    def mutated(self) -> tuple[Mutation, str]:
        """Return the mutation, and the text of the file that has it."""
        source = self.path.read_text(encoding="utf-8")
        made = KINDS[self.kind](self.node)
        assert made is not None
        before = (ast.get_source_segment(source, self.node) or "").splitlines()[0]
        name = str(self.path.relative_to(ROOT))
        after = ast.unparse(ast.fix_missing_locations(made)).splitlines()[0]
        changed = _replaced(source, self.node, made)
        ast.parse(changed)
        return Mutation(name, self.node.lineno, self.kind, before, after), changed


def places(path: Path) -> list[Place]:
    """Return the places of a file."""
    nodes = running(ast.parse(path.read_text(encoding="utf-8")))
    return [
        Place(path, node, kind)
        for node in nodes
        if isinstance(node, (ast.expr, ast.stmt))
        for kind, change in KINDS.items()
        if change(node) is not None
    ]


def _replaced(source: str, node: ast.expr | ast.stmt, made: ast.AST) -> str:
    """Return a source in which one node is another; the rest stays as it is written."""
    lines = source.splitlines(keepends=True)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    first, last = lines[node.lineno - 1].encode(), lines[node.end_lineno - 1].encode()
    indent = " " * node.col_offset
    text = ast.unparse(ast.fix_missing_locations(made)).replace("\n", f"\n{indent}")
    if isinstance(node, ast.expr):
        text = f"({text})"
    head = first[: node.col_offset].decode()
    tail = last[node.end_col_offset :].decode()
    return "".join([*lines[: node.lineno - 1], head + text + tail, *lines[node.end_lineno :]])


def drawn(seed: int) -> Iterator[tuple[Mutation, str]]:
    """Yield mutations at random, without end: one of each room, then one of each again."""
    rng = random.Random(seed)
    rooms: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        rooms.setdefault(parts[0] if len(parts) > 1 else "root", []).append(path)
    every = {room: [one for path in paths for one in places(path)] for room, paths in rooms.items()}
    seen = set[Mutation]()
    while True:
        order = sorted(room for room, found in every.items() if found)
        rng.shuffle(order)
        for room in order:
            kind = rng.choice(sorted({place.kind for place in every[room]}))
            found = rng.choice([one for one in every[room] if one.kind == kind]).mutated()
            if found[0] not in seen:
                seen.add(found[0])
                yield found


def copied(folder: Path) -> Path:
    """Copy the checkout to a folder, without its history and environments."""
    left_out = shutil.ignore_patterns(
        ".git", ".venv", ".venvs", ".amp-fuzz", "__pycache__", ".*_cache"
    )
    return Path(shutil.copytree(ROOT, folder / "tree", ignore=left_out))


def near_and_far(tree: Path, mutation: Mutation) -> tuple[list[str], list[str]]:
    """Return the 20 files of tests nearest to a mutation, and the others.

    Nearest are those that name the module, then those that name a function or class around the
    place, then those that import from the package; among equals, those of the room.
    """
    module = mutation.path.removesuffix(".py").replace("/", ".")
    package, _, own = module.rpartition(".")
    words = "|".join(enclosing(tree / mutation.path, mutation.line))
    signs = (rf"{module}\b|from {package} import .*\b{own}\b", rf"\b({words})\b")
    about = ABOUT.get(mutation.room, "unit")

    def distance(path: Path) -> tuple[int, bool, Path]:
        text = path.read_text(encoding="utf-8")
        found = (bool(re.search(sign, text)) for sign in (*signs, f"from {package} import"))
        nearest = next((at for at, is_there in enumerate(found) if is_there), len(signs) + 1)
        return nearest, path.parent.name != about, path

    files = sorted((tree / "tests").rglob("test_*.py"), key=distance)
    named = [str(path.relative_to(tree)) for path in files]
    return named[:20], named[20:]


def enclosing(path: Path, line: int) -> list[str]:
    """Return the names of the functions and classes around a line."""
    kinds = ast.FunctionDef | ast.ClassDef
    found = [n for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, kinds)]
    return [n.name for n in found if n.lineno <= line <= (n.end_lineno or n.lineno)]


def tested(tree: Path, tier: str, jobs: int, *parts: list[str]) -> Row:
    """Run parts of a tier in a tree until a test fails; return that test, and the seconds."""
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    words += [f"-n{jobs}", "--dist=load", "--maxschedchunk=8", "-m", TIERS[tier], "-rfE"]
    row: Row = {"noticed": False, "by": "", "seconds": 0.0}
    for files in filter(None, parts):
        start = time.monotonic()
        done = subprocess.run(
            [*words, "--no-header", "--tb=no", *files],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        row["seconds"] = round(row["seconds"] + time.monotonic() - start, 1)
        heads = ("FAILED ", "ERROR ")
        failed = [line for line in done.stdout.splitlines() if line.startswith(heads)]
        if done.returncode not in (0, 5):
            row |= {"noticed": True, "by": failed[0][:200] if failed else done.stdout[-200:]}
            break
    return row


def judged(mutation: Mutation, text: str, tree: Path, jobs: int, *, near: bool) -> Row:
    """Return which tier notices a mutation, and which test first.

    near: run only the 20 nearest files of tests.
    """
    path = tree / mutation.path
    before = path.read_text(encoding="utf-8")
    row: Row = {**asdict(mutation), "room": mutation.room, "noticed": ""}
    try:
        path.write_text(text, encoding="utf-8")
        for tier in TIERS:
            parts = near_and_far(tree, mutation)
            row[tier] = tested(tree, tier, jobs, *parts[: 1 if near else 2])
            if row[tier]["noticed"]:
                row["noticed"] = tier
                break
    finally:
        path.write_text(before, encoding="utf-8")
    return row


def main() -> None:
    """Judge the mutations that the file does not have yet."""
    parser = arguments(__doc__)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes that share the tests")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--list", action="store_true", help="print the mutations, and judge none")
    parser.add_argument("--near", action="store_true", help="run the 20 nearest files only")
    parser.add_argument("--check", action="store_true", help="run the tests without a mutation")
    given = parser.parse_args()
    chosen = list(islice(drawn(given.seed), given.count))
    if given.list:
        for one, _ in chosen:
            print(f"{one.path}:{one.line}: {one.kind}: {one.before} -> {one.after}")
        return
    result = read(given.out)
    same = {"seed": given.seed, "commit": commit(), "near": given.near}
    if {key: result.get(key) for key in same} != same:
        result = {
            **same,
            "mutations": [],
            "versions": versions("torch", "pytest"),
            "machine": machine(f"{given.jobs} jobs"),
        }
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = copied(Path(folder))
        if given.check:
            print({tier: tested(tree, tier, given.jobs, ["tests"]) for tier in TIERS})
            return
        for mutation, text in chosen[len(result["mutations"]) :]:
            row = judged(mutation, text, tree, given.jobs, near=given.near)
            result["mutations"].append(row)
            write(given.out, result)
            by = row["noticed"] or ("NO NEAR TEST" if given.near else "NO TEST")
            print(f"{mutation.path}:{mutation.line}: {mutation.kind}: {by}", flush=True)
    noticed = [row["noticed"] for row in result["mutations"]]
    print({tier or "nothing": noticed.count(tier) for tier in (*TIERS, "")})


if __name__ == "__main__":
    main()
