"""Short ways to write a case by hand, as the examples of known bugs and the tests do.

``case([x("x0", 2, 3), x("w1", 3, 2)], call("mm", "x0", "w1"))`` is a program of one statement,
``v0 = torch.mm(x0, w1)``, under the plainest plan: autocast around it, one backward pass.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.program import (
    Arg,
    Autocast,
    Float,
    Items,
    Node,
    Program,
    Ref,
    Region,
    Statement,
    TensorSpec,
    statements,
)

__all__ = ["BF16", "F16", "argument", "call", "case", "program", "under", "x"]

BF16 = Autocast(dtype="bfloat16")
F16 = Autocast(dtype="float16")

_NAME = re.compile(r"[xwbv]\d+")


def x(name: str, *shape: int, dtype: str = "float32", **fields: Any) -> TensorSpec:
    """Return an input. Its role follows from its name: x0 an input, w0 a weight, b0 a buffer."""
    role: Any = {"x": "input", "w": "weight", "b": "buffer"}[name[0]]
    return TensorSpec(name, shape, dtype, role=role, **fields)


def argument(value: Any) -> Arg:
    """Return a program's argument: ``"x0"`` is a reference, other text is a literal."""
    if isinstance(value, str) and _NAME.fullmatch(value):
        return Ref(value)
    if isinstance(value, float):
        return Float(value.hex())
    if isinstance(value, (list, tuple)):
        return Items(tuple(argument(v) for v in value))
    return value  # type: ignore[no-any-return]


def call(op: str, *args: Any, to: str = "v0", form: str = "function", **kwargs: Any) -> Statement:
    """Return one call. `to` names its outputs, separated by spaces."""
    named = tuple((k, argument(v)) for k, v in kwargs.items())
    return Statement(op, form, tuple(map(argument, args)), named, tuple(to.split()))


def under(context: Any, *body: Node) -> Region:
    """Return a region: these nodes under a context."""
    return Region(context, body)


def program(inputs: Sequence[TensorSpec], *body: Node) -> Program:
    """Return a program that returns every value that it makes."""
    made = [n for s in statements(body) for n in s.outputs if n != "_"]
    return Program(tuple(inputs), body, tuple(made))


def case(
    inputs: Sequence[TensorSpec],
    *body: Node,
    seed: int = 0,
    returns: Sequence[str] | None = None,
    **plan: Any,
) -> Case:
    """Return a case of such a program.

    returns: the values that it returns; None: all. plan: fields of the plan that are not the
    default.
    """
    made = program(inputs, *body)
    if returns is not None:
        made = Program(made.inputs, made.body, tuple(returns))
    return Case(made, Plan(**plan), seed)
