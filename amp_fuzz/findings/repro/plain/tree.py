"""The syntax tree of a script: read, walk, and print it."""

from __future__ import annotations

import ast
import copy
import io
import re
import textwrap
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence

__all__ = [
    "COMMENT",
    "TYPED",
    "WIDTH",
    "Block",
    "assigned",
    "assignments",
    "blocks",
    "called",
    "expression",
    "function_of",
    "is_comment",
    "is_load",
    "loads",
    "names_of",
    "parsed",
    "printed",
    "put",
    "sites_of",
    "tuple_of",
    "value_of",
]

WIDTH = 100


COMMENT = "__comment__"


Block = list[ast.stmt]


def parsed(code: str) -> ast.Module:
    """Parse a script, with its comments as statements where they stand between statements."""
    lines = code.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(code + "\n").readline)
    depth, at = 0, {}
    for token in tokens:
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
        elif token.type == tokenize.COMMENT and depth == 0:
            at[token.start[0]] = token
    found: list[str] = []
    for number, line in enumerate(lines, 1):
        if number not in at:
            found.append(line)
            continue
        before = line[: at[number].start[1]]
        pad = line[: len(line) - len(line.lstrip())]
        if before.strip() and before.lstrip()[0] in ")]}":
            found.append(before.rstrip())
            continue
        found.append(f"{pad}{COMMENT}({at[number].string!r})")
        if before.strip():
            found.append(before.rstrip())
    try:
        return ast.parse("\n".join(found))
    except SyntaxError:
        return ast.parse(code)


def expression(text: str, **names: ast.expr) -> ast.expr:
    """Return an expression, with others in the places of some names."""
    return put(ast.parse(text, mode="eval").body, names)


def put(node: ast.AST, names: dict[str, ast.expr]) -> ast.expr:
    """Return a copy of a node with expressions in the places of names that it reads."""

    class Put(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            loads = isinstance(node.ctx, ast.Load) and node.id in names
            return copy.deepcopy(names[node.id]) if loads else node

    return Put().visit(copy.deepcopy(node))  # type: ignore[no-any-return]


def blocks(body: Block, *, functions: bool = False) -> Iterator[Block]:
    """Yield a block and those inside it; those of functions and classes only if asked to."""
    yield body
    for node in body:
        apart = isinstance(node, ast.FunctionDef | ast.ClassDef)
        if apart and not functions:
            continue
        for name in ("body", "orelse", "finalbody"):
            if inner := getattr(node, name, None):
                yield from blocks(inner, functions=functions)
        for handler in getattr(node, "handlers", ()):
            yield from blocks(handler.body, functions=functions)


def loads(tree: ast.AST) -> Counter[str]:
    """Return how often each name is read, those that a function binds itself aside."""
    found: Counter[str] = Counter()
    for node in ast.iter_child_nodes(tree):
        inner = loads(node)
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            arguments = node.args
            own = (*arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
            stored = [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not is_load(n)]
            for name in [*stored, *(arg.arg for arg in own if arg is not None)]:
                del inner[name]
        found += inner
    if isinstance(tree, ast.Name) and isinstance(tree.ctx, ast.Load):
        found[tree.id] += 1
    return found


def assigned(node: ast.stmt) -> str:
    """Return the one name that a statement assigns, or ""."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
        return target.id if isinstance(target, ast.Name) else ""
    return ""


def value_of(node: ast.stmt) -> ast.expr:
    """Return what an assignment assigns."""
    assert isinstance(node, ast.Assign)
    return node.value


def function_of(tree: ast.Module, name: str) -> ast.FunctionDef | None:
    """Return the one function of a name that a script defines at its outermost level, or None."""
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    return found[0] if len(found) == 1 else None


def called(node: ast.AST) -> str:
    """Return what a call calls, as source, or ""."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def tuple_of(items: Sequence[ast.expr]) -> ast.Tuple:
    """Return a tuple of expressions."""
    return ast.Tuple(list(items), ast.Load())


TYPED = ("program", "plain", "opaque", "body", "forward")


def is_load(node: ast.Name) -> bool:
    """Return whether a name is read, not bound."""
    return isinstance(node.ctx, ast.Load)


def assignments(target: ast.expr, value: ast.expr) -> Block:
    """Return an assignment; of a tuple to a tuple, one each. None to itself."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = zip(target.elts, value.elts, strict=True)
        return [n for t, v in pairs for n in assignments(t, v)]
    if ast.unparse(target) == ast.unparse(value):
        return []
    return [ast.Assign([target], value, lineno=0)]


def sites_of(tree: ast.Module, name: str) -> tuple[list[tuple[Block, ast.stmt]], int]:
    """Return the statements outside functions that read a name, and how often all others read it.

    Only a statement without statements inside it counts.
    """
    found, here = [], 0
    for block in blocks(tree.body):
        for node in block:
            if not hasattr(node, "body") and name in loads(node):
                found.append((block, node))
                here += loads(node)[name]
    return found, loads(tree)[name] - here


def names_of(tree: ast.Module) -> list[str]:
    """Return the names of what the program returns, or none."""
    functions = [function_of(tree, "program")]
    functions += [
        n.body[0]
        for n in tree.body
        if isinstance(n, ast.ClassDef)
        and n.name == "Module"
        and isinstance(n.body[0], ast.FunctionDef)
    ]
    found = [f for f in functions if f is not None]
    if len(found) == 1 and isinstance(found[0].body[-1], ast.Return):
        value = found[0].body[-1].value
        if isinstance(value, ast.Tuple) and all(isinstance(e, ast.Name) for e in value.elts):
            return [ast.unparse(e) for e in value.elts]
    return []


def is_comment(node: ast.stmt) -> bool:
    """Return whether a statement stands for a comment."""
    return isinstance(node, ast.Expr) and called(node.value) == COMMENT


def printed(tree: ast.Module) -> str:
    """Return the source of a script: empty lines between its parts, and lines of usual width."""
    text, before = "", None
    ast.fix_missing_locations(tree)
    for i, node in enumerate(tree.body):
        # A comment belongs to what stands below it.
        about = next((n for n in tree.body[i:] if not is_comment(n)), node)
        if before is not None:
            text += "\n" * _gap(before, about)
        text += _source(node) + "\n"
        before = node
    return text.rstrip("\n")


def _gap(before: ast.stmt, node: ast.stmt) -> int:
    """Return the number of empty lines between two statements."""
    functions = ast.FunctionDef | ast.ClassDef
    if is_comment(before):
        return 0
    if isinstance(before, functions) or isinstance(node, functions):
        return 2
    return int(_kind(before) != _kind(node))


def _kind(node: ast.stmt) -> str:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return "import"
    if isinstance(node, ast.Assign) and re.match(r"[xwb]\d+$", assigned(node)):
        return "input"
    return "step"


def _source(node: ast.stmt) -> str:
    text = ast.unparse(node)
    text = re.sub(
        rf"^( *){COMMENT}\((.*)\)$",
        lambda m: m[1] + str(ast.literal_eval(m[2])),
        text,
        flags=re.MULTILINE,
    )
    text = re.sub(r":\n\n+(?= )", ":\n", text)
    return "\n".join(_wrapped(line) for line in _quoted(text).splitlines())


def _quoted(text: str) -> str:
    """Return source with double quotes around strings."""
    found, lines = [], text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text + "\n").readline):
        plainly = re.fullmatch(r"(f?)'([^'\"\\]*)'", token.string)
        if token.type == tokenize.STRING and plainly:
            found.append((token.start, plainly))
    for (row, column), match in reversed(found):
        line = lines[row - 1]
        end = column + len(match[0])
        lines[row - 1] = f'{line[:column]}{match[1]}"{match[2]}"{line[end:]}'
    return "\n".join(lines)


def _wrapped(line: str) -> str:
    """Break a long line between the items of its lists."""
    pad = line[: len(line) - len(line.lstrip())]
    if len(line) <= WIDTH or not re.match(r" *\w+ = .*torch\.tensor\(\[", line):
        return line
    return textwrap.fill(
        line, WIDTH, subsequent_indent=f"{pad}    ", break_long_words=False, break_on_hyphens=False
    )
