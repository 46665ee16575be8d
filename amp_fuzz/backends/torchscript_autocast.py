"""TorchScript's autocast pass, written again over the same graph.

TorchScript does not run `torch.autocast` inside a scripted function: before it optimises a graph, a
pass writes casts into it, after a list of its own, which is neither the CPU's nor quite CUDA's.
What the pass means is documented (torch/csrc/jit/JIT-AUTOCAST.md): promotion is injected where
dtypes are not known, the ``fp32_append_dtype`` policy is missing, and eager autocast around a
scripted function goes on inside it, whatever the function says.
"""

from __future__ import annotations

import tomllib
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import resources
from itertools import compress
from typing import Any

import torch

__all__ = [
    "Ambient",
    "Fallback",
    "decompose_addmm",
    "fallback_of",
    "inline",
    "load_policies",
    "name_values",
    "shown_casts",
    "write_casts",
    "write_casts_again",
]

REDUCED = "aten::_autocast_to_reduced_precision"
FULL = "aten::_autocast_to_full_precision"
_DEVICES = ("cuda", "cpu")  # in the order of the casts' arguments
_DTYPES = {torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}  # c10
_BY_NUMBER = {number: dtype for dtype, number in _DTYPES.items()}


class ScriptPolicyError(RuntimeError):
    """What the pass refuses: an op that is unsafe under autocast. The text is torch's."""


@dataclass(frozen=True, slots=True)
class Ambient:
    """Which autocast is on, by device type: its dtype, or None where it is off."""

    cpu: torch.dtype | None = None
    cuda: torch.dtype | None = None

    def __bool__(self) -> bool:
        return self.cpu is not None or self.cuda is not None


@cache
def load_policies() -> Mapping[str, str]:
    """Return TorchScript's list, `backends/torchscript.toml`: by op name, without ``aten::``."""
    text = (resources.files("amp_fuzz.backends") / "torchscript.toml").read_text()
    table = tomllib.loads(text)["policies"]
    return {op: policy for policy, ops in table.items() for op in ops}


def inline(graph: Any) -> frozenset[int]:
    """Inline the functions that a graph calls, in place; return which values they make.

    By ``Value.unique()``. Operators that TorchScript writes in its own language (``1 - x``) are
    in a graph as soon as it is compiled: no function is called for them.
    """
    if not any(graph.findAllNodes(kind) for kind in ("prim::CallFunction", "prim::CallMethod")):
        return frozenset()

    def made() -> frozenset[int]:
        return frozenset(v.unique() for node in _nodes(graph) for v in node.outputs())

    before = made()
    torch._C._jit_pass_inline(graph)
    return made() - before


def write_casts(
    graph: Any,
    ambient: Ambient,
    current: Mapping[str, torch.dtype],
    inlined: Container[int] = (),
) -> None:
    """Write casts into a `torch._C.Graph` whose calls are inlined, as the pass should.

    ambient: what is on where the graph is called. current: the autocast dtype of each device there,
    on or off: what a context without a dtype takes. inlined: the values that `inline` returned.
    Raises `ScriptPolicyError` for an op that is unsafe to autocast.
    """
    writer = _Writer(graph, current)
    if ambient:
        # A function that the program calls is a graph of its own: it gets its casts before it is
        # inlined, from the contexts around the program, not around the call. An argument for an
        # optional parameter is an optional tensor there, and not cast. An argument that is passed
        # twice is two values there, each of which is cast.
        for node in [n for n in _nodes(graph) if any(v.unique() in inlined for v in n.outputs())]:
            passed = {i for i, v in enumerate(node.inputs()) if v.unique() not in inlined}
            writer.node(node, ambient, passed.intersection(_optional(node)), passed)
    if ambient or any(_is_context(node, "prim::Enter") for node in _nodes(graph)):
        writer.block(graph, ambient)


@dataclass(frozen=True, slots=True)
class Fallback:
    """The values of a graph's fallback functions, by name.

    made: those that they return. given: those that they take, each with its dtype.
    """

    made: frozenset[str] = frozenset()
    given: frozenset[tuple[str, torch.dtype | None]] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.made)


def write_casts_again(graph: Any, ambient: Ambient, fallback: Fallback) -> None:
    """Write the casts of the pass once more into fallback functions, as TorchScript does.

    There the pass knows the dtypes of their arguments and no others, and no contexts but those
    around the program.
    """
    if not ambient:
        return
    writer = _Writer(graph, {}, known=dict(fallback.given))
    decompose_addmm(graph, fallback.made)
    for node in list(_nodes(graph)):
        if any(_name_of(value) in fallback.made for value in node.outputs()):
            writer.node(node, ambient)


def name_values(graph: Any) -> None:
    """Give each value of a graph a name of its own, by which it is found in an optimised copy.

    A trace gives one name to a value and its casts, and none to what it returns.
    """
    made = (value for node in _nodes(graph) for value in node.outputs())
    for value in [*graph.inputs(), *made]:
        value.setDebugName(f"value_{value.unique()}")


def decompose_addmm(graph: Any, names: Container[str] | None = None) -> None:
    """Make a product and a sum of each addmm without factors, in place, as TorchScript does.

    It does so where it optimises. names: of the results of those to decompose, by default all.
    """
    for node in [n for n in _nodes(graph) if n.kind() == "aten::addmm"]:
        bias, *pair, beta, alpha = node.inputs()
        name = _name_of(node.output())
        skipped = names is not None and name not in names
        if skipped or (beta.toIValue(), alpha.toIValue()) != (1, 1):
            continue
        product = graph.create("aten::mm", pair, 1).insertBefore(node).output()
        total = graph.create("aten::add", [bias, product, beta], 1).insertBefore(node).output()
        node.output().replaceAllUsesWith(total)
        node.destroy()
        product.setDebugName(f"{name}_product")
        total.setDebugName(name)


def fallback_of(graph: Any, ran: Sequence[bool]) -> Fallback:
    """Return the fallback functions of an optimised graph that ran.

    ran: for each part of it that is optimised for what requires grad, in order, whether the
    fallback ran instead, because something else requires grad than when it was profiled. If the
    graph has another number of such parts, none.
    """
    checks = [node for node in graph.nodes() if node.kind() == "prim::RequiresGradCheck"]
    checks = list(compress(checks, ran)) if len(checks) == len(ran) else []
    given = (
        (_name_of(value), output.type().dtype())
        for check in checks
        for value, output in zip(check.inputs(), check.outputs(), strict=False)  # then its answer
    )
    return Fallback(frozenset().union(*map(_grouped, checks)), frozenset(given))


def _grouped(check: Any) -> set[str]:
    """Return the names of the values that are made if a check of what requires grad succeeds."""
    *_, answer = check.outputs()
    parts = [
        node
        for use in answer.uses()
        for inner in use.user.blocks()
        for node in _nodes(inner)
        if node.kind() == "prim::DifferentiableGraph"
    ]
    made = [n for part in parts for n in _nodes(part.g("Subgraph"))]
    # Inside, an op that is decomposed (layer_norm) makes values that the program does not name.
    return {_name_of(v) for node in [*parts, *made] for v in node.outputs()} - {""}


def _name_of(value: Any) -> str:
    """Return the name that a program gives a value, or "" if it has none."""
    name = str(value.debugName()).partition(".")[0]
    return "" if name.isdigit() else name


def shown_casts(graph: Any) -> Iterator[str]:
    """Yield the calls of a graph that have casts among their arguments, one a line."""
    casts: dict[int, str] = {}

    def name(value: Any) -> str:
        return casts.get(value.unique(), str(value.debugName()).partition(".")[0])

    for node in _nodes(graph):
        if node.kind() in (REDUCED, FULL):
            given = list(node.inputs())
            low = given[4].toIValue() if node.kind() == REDUCED else _DTYPES[torch.float32]
            dtype = str(_BY_NUMBER[low]).removeprefix("torch.")
            casts[node.output().unique()] = f"cast[{dtype}]({name(given[0])})"
            continue
        tensors = [v for v in node.inputs() if isinstance(v.type(), torch._C.TensorType)]
        if any(v.unique() in casts for v in tensors):
            made = ", ".join(map(name, node.outputs()))
            yield f"{made} = {node.kind()}({', '.join(map(name, tensors))})"


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


def _is_context(node: Any, end: str) -> bool:
    """Return whether a node enters, or exits, a context of autocast."""
    if node.kind() != end or not isinstance(kind := node.input().type(), torch._C.ClassType):
        return False
    return str(kind.qualified_name()).endswith(".autocast")


class _Writer:
    """Writes casts. known: the dtypes of values, by name, in place of those that the graph says."""

    def __init__(
        self,
        graph: Any,
        current: Mapping[str, torch.dtype],
        *,
        known: Mapping[str, torch.dtype | None] | None = None,
    ) -> None:
        self.graph, self.current, self.policies = graph, current, load_policies()
        self.known = known

    def block(self, block: Any, outer: Ambient) -> None:
        stack: list[Ambient] = []
        for node in list(block.nodes()):
            state = stack[-1] if stack else outer
            if _is_context(node, "prim::Enter"):
                stack.append(self.entered(node.input(), state))
            elif _is_context(node, "prim::Exit"):
                stack.pop()
            elif state:
                self.node(node, state)
            for inner in node.blocks():
                self.block(inner, state)

    def entered(self, instance: Any, outer: Ambient) -> Ambient:
        """Return what is on in ``with autocast(...)``: its attributes are set by its maker."""
        given: dict[str, Any] = {}
        for use in instance.uses():
            if use.user.kind() == "prim::SetAttr":
                given[use.user.s("name")] = use.user.inputsAt(1).toIValue()
        device, dtype = given["device"], given.get("fast_dtype")
        if device not in _DEVICES:
            return outer
        chosen = self.current[device] if dtype is None else _BY_NUMBER[dtype]
        return replace(outer, **{device: chosen if given["_enabled"] else None})

    def node(
        self, node: Any, state: Ambient, skip: Container[int] = (), apart: Container[int] = ()
    ) -> None:
        """Cast the arguments of a node as its policy says.

        skip, apart: the numbers of those that are not cast, and of those that share no cast.
        """
        name = str(node.kind()).removeprefix("aten::")
        policy = self.policies.get(name)
        if policy is None or not node.kind().startswith("aten::"):
            return
        if policy == "banned":
            raise ScriptPolicyError("Unsafe to autocast")
        given = policy == "fp32_set_opt_dtype" and _has_dtype(node)
        low = policy == "promote" and not any(self.may_be_float32(v) for v in node.inputs())
        if not (_writes(node) or given or low):
            kind = REDUCED if policy == "lower_precision_fp" else FULL
            self.cast(node, kind, state, skip, apart)

    def cast(
        self, node: Any, kind: str, state: Ambient, skip: Container[int], apart: Container[int]
    ) -> None:
        """Cast each tensor argument; one value that is passed twice is cast once, but apart."""
        dtypes = [getattr(state, device) for device in _DEVICES]
        casts: dict[int, Any] = {}
        for i, value in enumerate(list(node.inputs())):
            tensor = isinstance(value.type(), torch._C.TensorType)
            if not tensor or value.node().kind() == kind or i in skip:
                continue
            if value.unique() not in casts or i in apart:
                arguments = [value, *(self.constant(node, d is not None) for d in dtypes)]
                if kind == REDUCED:
                    arguments += [self.constant(node, _DTYPES[d or torch.half]) for d in dtypes]
                made = self.graph.create(kind, arguments, 1)
                made.insertBefore(node)
                casts[value.unique()] = made.output()
            node.replaceInput(i, casts[value.unique()])

    def may_be_float32(self, value: Any) -> bool:
        kind = value.type()
        if not isinstance(kind, torch._C.TensorType):
            return False
        says = self.known is None or value.node().kind() == "prim::Constant"  # a number
        dtype = kind.dtype() if says else (self.known or {}).get(_name_of(value))
        return dtype in (None, torch.float32)

    def constant(self, node: Any, value: bool | int) -> Any:
        made = self.graph.create("prim::Constant", 1)
        made.i_("value", int(value))
        made.output().setType(
            torch._C.BoolType.get() if isinstance(value, bool) else torch._C.IntType.get()
        )
        made.insertBefore(node)
        return made.output()


@lru_cache(maxsize=4096)
def _schema(text: str) -> Any:
    return torch._C.parse_schema(text)


@lru_cache(maxsize=4096)
def _optional_in(text: str) -> tuple[int, ...]:
    arguments = _schema(text).arguments
    return tuple(i for i, a in enumerate(arguments) if isinstance(a.type, torch._C.OptionalType))


def _writes(node: Any) -> bool:
    return bool(_schema(node.schema()).is_mutable)


def _optional(node: Any) -> Sequence[int]:
    """Return which arguments of a node are optional tensors, by the schema."""
    return _optional_in(node.schema()) if node.kind().startswith("aten::") else ()


def _has_dtype(node: Any) -> bool:
    """Return whether an explicit ``dtype`` is given."""
    for argument, value in zip(_schema(node.schema()).arguments, node.inputs(), strict=True):
        if argument.name == "dtype":
            return not isinstance(value.type(), torch._C.NoneType)
    return False
