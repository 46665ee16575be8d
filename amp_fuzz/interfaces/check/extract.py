"""Cut a case out of a model: calls of torch's functions as a program of the catalogue's ops.

Its inputs hold the real values, bit for bit. Calls that the catalogue lacks are left out, and their
results become inputs of the following calls.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from amp_fuzz import catalogue
from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.inputs import bits_text, strides
from amp_fuzz.cases.program import (
    DTYPES,
    MAX_ELEMENTS,
    Arg,
    Autocast,
    DType,
    Float,
    Items,
    Node,
    NoGrad,
    Program,
    ProgramError,
    Ref,
    Region,
    Role,
    Statement,
    TensorSpec,
    statements,
)
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.interfaces.check.trace import FunctionCall

__all__ = ["Unsayable", "Word", "cut", "sayable"]


class Unsayable(ValueError):
    """A call that no case can hold. The message says why."""


@dataclass(frozen=True, slots=True)
class Word:
    """A function of torch in the catalogue: op, form, and where each argument goes."""

    op: str
    form: str
    order: tuple[int, ...] = ()


def sayable(call: FunctionCall) -> Word | None:
    """Return the catalogue's op for a call, or None.

    If several ops call one function, it is the one whose autocast kernel was reached.
    """
    try:
        words = _index().get(call.function, ())
    except TypeError:  # not hashable
        return None
    for word in words:
        overloads = {o.removeprefix("aten::") for o in CATALOGUE[word.op].overloads}
        if overloads.intersection(call.kernels):
            return word
    return words[0] if words else None


def cut(
    calls: Sequence[FunctionCall],
    contexts: tuple[Autocast, ...],
    *,
    backward: bool,
    values: bool,
    seed: int = 0,
) -> Case:
    """Return calls as a case under contexts; a call under other contexts goes into a region.

    values: whether the inputs hold the tensors' values. Raises `Unsayable` if a case can hold none
    of the calls, or not an input.
    """
    writer = _Writer(values=values)
    body: list[Node] = []
    for call in calls:
        try:
            node: Node = writer.statement(call)
        except Unsayable:
            if len(calls) == 1:
                raise
            continue
        if not call.grad and any(t.requires_grad for t in call.tensors):
            node = Region(NoGrad(), (node,))
        if call.contexts != contexts:
            inner = call.contexts or (Autocast(enabled=False),)
            for context in reversed(inner):
                node = Region(context, (node,))
        body.append(node)
    made = tuple(name for s in statements(tuple(body)) for name in s.outputs if name != "_")
    if not made:
        raise Unsayable("none of its calls is in the catalogue")
    trains = backward and any(spec.requires_grad for spec in writer.specs)
    plan = Plan(contexts=contexts, backward="outside" if trains else "none")
    case = Case(Program(tuple(writer.specs), tuple(body), made), plan, seed)
    try:
        catalogue.check(case.program)
        case.plan.check()
    except ProgramError as error:
        raise Unsayable(str(error)) from error
    return case


class _Writer:
    """Writes calls as statements; gives names to tensors by identity."""

    def __init__(self, *, values: bool) -> None:
        self.values = values
        self.specs: list[TensorSpec] = []
        self.names: dict[int, str] = {}
        self.count = 0

    def statement(self, call: FunctionCall) -> Statement:
        word = sayable(call)
        if word is None:
            raise Unsayable(f"{call.name} is not in the catalogue")
        if len(call.args) < len(word.order):
            raise Unsayable(f"{call.name} has keyword arguments that {word.op} takes by position")
        before = list(self.specs), dict(self.names)
        originals = iter(zip(call.given, call.tensors, strict=True))
        try:
            given = [
                self.argument(a, originals, receiver=word.form == "inplace" and i == 0)
                for i, a in enumerate(call.args)
            ]
            args = [*given]
            for here, there in enumerate(word.order):
                args[there] = given[here]
            kwargs = tuple((k, self.argument(a, originals)) for k, a in call.kwargs.items())
            outputs = self.outputs(call)
        except Unsayable:
            self.specs, self.names = before
            raise
        return Statement(word.op, word.form, tuple(args), kwargs, outputs)

    def argument(self, value: Any, tensors: Any, *, receiver: bool = False) -> Arg:
        if isinstance(value, torch.Tensor):
            original, copy = next(tensors)
            if id(original) not in self.names:
                self.names[id(original)] = self.input(copy, receiver=receiver)
            return Ref(self.names[id(original)])
        if isinstance(value, bool) or value is None or isinstance(value, (int, str)):
            return value
        if isinstance(value, float):
            return Float(value.hex())
        if isinstance(value, torch.dtype):
            name = str(value).removeprefix("torch.")
            if name in DTYPES:
                return DType(name)
        if isinstance(value, (tuple, list)):
            return Items(tuple(self.argument(item, tensors) for item in value))
        raise Unsayable(f"a case cannot hold the argument {type(value).__name__} {value!r}")

    def input(self, tensor: torch.Tensor, *, receiver: bool) -> str:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise Unsayable(f"an input is {dtype}, which cases do not have")
        if tensor.numel() > MAX_ELEMENTS:
            raise Unsayable(
                f"an input has {tensor.numel()} elements, a case {MAX_ELEMENTS} at most: check a "
                "smaller configuration"
            )
        role: Role = "buffer" if receiver else "weight" if tensor.requires_grad else "input"
        name = f"{ {'buffer': 'b', 'weight': 'w', 'input': 'x'}[role] }{len(self.specs)}"
        spec = TensorSpec(
            name,
            tuple(tensor.shape),
            dtype,
            role=role,
            values=bits_text(tensor) if self.values else "",
        )
        for layout in ("transposed", "strided"):
            other = TensorSpec(
                name, spec.shape, dtype, layout=layout, role=role, values=spec.values
            )
            if strides(other) == tensor.stride() != strides(spec):
                spec = other
        self.specs.append(spec)
        return name

    def outputs(self, call: FunctionCall) -> tuple[str, ...]:
        if call.raised:
            self.count += 1
            return (f"v{self.count - 1}",)
        result = call.result
        made = list(result) if isinstance(result, (tuple, list)) else [result]
        if not all(isinstance(t, torch.Tensor) for t in made):
            raise Unsayable(f"{call.name} returned more than tensors")
        names = []
        for tensor in made:
            name = f"v{self.count}"
            self.count += 1
            self.names[id(tensor)] = name
            names.append(name)
        return tuple(names)


_CALLABLE = re.compile(r"([a-zA-Z_][\w.]*)\((.*)\)")
_METHOD = re.compile(r"\{0\}\.(\w+)\(\{args1\}\)")
_NUMBER = re.compile(r"\{(\d+)\}")
_OPERATOR = re.compile(r"\{0\} (\S+) \{1\}")
_OPERATORS = {"@": "__matmul__", "+": "__add__", "-": "__sub__", "*": "__mul__", "/": "__truediv__"}


@lru_cache(maxsize=2)
def _built(count: int) -> dict[Any, list[Word]]:
    found: dict[Any, list[Word]] = {}
    for name in sorted(CATALOGUE, key=lambda n: ("." in n, len(n), n)):
        for form, template in CATALOGUE[name].forms.items():
            if form == "out":
                continue
            for function, order in _functions(template):
                found.setdefault(function, []).append(Word(name, form, order))
    return found


def _index() -> dict[Any, list[Word]]:
    return _built(len(CATALOGUE))  # rebuilt after an op was registered


def _functions(template: str) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """Yield the functions that a template calls, with the order of the arguments.

    Calls with anything besides the arguments are left out.
    """
    if match := _METHOD.fullmatch(template):
        yield from _attribute(torch.Tensor, match[1])
    elif match := _OPERATOR.fullmatch(template):
        yield from _attribute(torch.Tensor, _OPERATORS.get(match[1], ""))
    elif match := _CALLABLE.fullmatch(template):
        *first, last = (hole.strip().removesuffix(".clone()") for hole in match[2].split(","))
        numbers = [_NUMBER.fullmatch(hole) for hole in first]
        order = tuple(int(n[1]) for n in numbers if n)
        rest = "{args}" if not first else f"{{args{len(first)}}}"
        if last == rest and sorted(order) == list(range(len(first))):
            for function in _resolved(match[1]):
                yield function, () if list(order) == sorted(order) else order


def _attribute(owner: Any, name: str) -> Iterator[tuple[Any, tuple[int, ...]]]:
    if name and hasattr(owner, name):
        yield getattr(owner, name), ()


def _resolved(path: str) -> Iterator[Any]:
    """Yield the object of a dotted path; for an overload, also the op without it."""
    root, *parts = path.split(".")
    owner: Any = sys.modules.get(root)
    for part in parts:
        owner = getattr(owner, part, None)
    if owner is not None and parts:
        yield owner
        if isinstance(owner, torch._ops.OpOverload):
            yield owner._overloadpacket
