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
from typing import Any

import torch

__all__ = [
    "Ambient",
    "Fallen",
    "ScriptPolicies",
    "fallen",
    "inline",
    "load_policies",
    "shown_casts",
    "take_apart",
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


@dataclass(frozen=True, slots=True)
class ScriptPolicies:
    """Policy by op name, without ``aten::``; an op in none is not in the list."""

    of: Mapping[str, str]


@cache
def load_policies() -> ScriptPolicies:
    """Return TorchScript's list, `backends/torchscript.toml`."""
    text = (resources.files("amp_fuzz.backends") / "torchscript.toml").read_text()
    table = tomllib.loads(text)["policies"]
    return ScriptPolicies({op: policy for policy, ops in table.items() for op in ops})


def inline(graph: Any) -> frozenset[int]:
    """Inline the functions that a graph calls, in place, and say which values they make.

    By ``Value.unique()``. Operators that TorchScript writes in its own language (``1 - x``) are
    in a graph as soon as it is compiled: no function is called for them.
    """
    if not any(graph.findAllNodes(kind) for kind in ("prim::CallFunction", "prim::CallMethod")):
        return frozenset()
    before = set(_made(graph))
    torch._C._jit_pass_inline(graph)
    return frozenset(_made(graph)) - before


def write_casts(
    graph: Any,
    ambient: Ambient,
    current: Mapping[str, torch.dtype],
    called: Container[int] = (),
) -> None:
    """Write casts into a `torch._C.Graph` whose calls are inlined, as the pass should.

    ambient: what is on where the graph is called. current: the autocast dtype of each device there,
    on or off: what a context without a dtype takes. called: the values that `inline` returned.
    Raises `ScriptPolicyError` for an op that is unsafe to autocast.
    """
    writer = _Writer(graph, current)
    if ambient:
        # Functions that the program calls are graphs of their own: they get theirs before they are
        # inlined, from what is on around the program, not around the call. What they are given for
        # an optional parameter is no tensor there, but an optional one: it is not cast. And what
        # they are given twice is two values there, each of which is cast.
        for node in [n for n in _nodes(graph) if any(v.unique() in called for v in n.outputs())]:
            given = {i for i, v in enumerate(node.inputs()) if v.unique() not in called}
            writer.node(node, ambient, given.intersection(_optional(node)), given)
    if ambient or any(_is_context(node) for node in _nodes(graph)):
        writer.block(graph, ambient)


@dataclass(frozen=True, slots=True)
class Fallen:
    """What an optimised graph leaves to fallback functions: names of values.

    made: those that they make. given: those that they take, each with its dtype.
    """

    made: frozenset[str] = frozenset()
    given: frozenset[tuple[str, torch.dtype | None]] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.made)


def write_casts_again(graph: Any, ambient: Ambient, left: Fallen) -> None:
    """Write the casts of the pass once more for what is left to fallbacks, as it does there.

    There it knows the dtypes of what they take and no others, and no contexts but those around the
    program.
    """
    if not ambient:
        return
    writer = _Writer(graph, {}, known=dict(left.given))
    take_apart(graph, left.made)
    for node in list(_nodes(graph)):
        if any(_name_of(value) in left.made for value in node.outputs()):
            writer.node(node, ambient)


def take_apart(graph: Any, left: Container[str] | None = None) -> None:
    """Make a product and a sum of each addmm without factors, in place, as TorchScript does.

    It does so where it optimises. left: only those whose results have these names. Results without
    a name get one.
    """
    for number, node in enumerate([n for n in _nodes(graph) if n.kind() == "aten::addmm"]):
        if not _name_of(node.output()):
            node.output().setDebugName(f"addmm_{number}")
        bias, *pair, beta, alpha = node.inputs()
        name = _name_of(node.output())
        if (beta.toIValue(), alpha.toIValue()) != (1, 1) or (left is not None and name not in left):
            continue
        product = graph.create("aten::mm", pair, 1).insertBefore(node).output()
        total = graph.create("aten::add", [bias, product, beta], 1).insertBefore(node).output()
        node.output().replaceAllUsesWith(total)
        node.destroy()
        product.setDebugName(f"{name}_product")
        total.setDebugName(name)


def fallen(graph: Any, fell: Sequence[bool]) -> Fallen:
    """Return what an optimised graph left to its fallback functions.

    fell: of each part of it that is optimised for what requires grad, in order, whether a fallback
    function ran in its place, as it does where something else requires grad than when it was
    profiled. A graph that has another number of such parts leaves nothing.
    """
    checks = [node for node in graph.nodes() if node.kind() == "prim::RequiresGradCheck"]
    if len(checks) != len(fell):
        return Fallen()
    back = [check for check, whether in zip(checks, fell, strict=True) if whether]
    given = (
        (_name_of(value), output.type().dtype())
        for check in back
        for value, output in zip(check.inputs(), check.outputs(), strict=False)  # then its answer
    )
    return Fallen(frozenset().union(*map(_grouped, back)), frozenset(given))


def _nodes_in(node: Any) -> Iterator[Any]:
    for inner in node.blocks():
        yield from _nodes(inner)


def _grouped(check: Any) -> set[str]:
    """Return the names of the values that are made if a check of what requires grad succeeds."""
    *_, answer = check.outputs()
    parts = [
        node
        for use in answer.uses()
        for node in _nodes_in(use.user)
        if node.kind() == "prim::DifferentiableGraph"
    ]
    made = [n for part in parts for n in _nodes(part.g("Subgraph"))]
    # Inside, an op that is taken apart (layer_norm) makes values that the program does not name.
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


def _made(graph: Any) -> Iterator[int]:
    """Yield what the values of a graph's nodes are known by."""
    for node in _nodes(graph):
        yield from (value.unique() for value in node.outputs())


def _is_context(node: Any) -> bool:
    return node.kind() == "prim::Enter" and _class_of(node.input()).endswith(".autocast")


def _class_of(value: Any) -> str:
    kind = value.type()
    return str(kind.qualified_name()) if isinstance(kind, torch._C.ClassType) else ""


class _Writer:
    """Writes casts. known: the dtypes of values, by name, in place of those that the graph says."""

    def __init__(
        self,
        graph: Any,
        current: Mapping[str, torch.dtype],
        *,
        known: Mapping[str, torch.dtype | None] | None = None,
    ) -> None:
        self.graph, self.current, self.policies = graph, current, load_policies().of
        self.known = known

    def block(self, block: Any, outer: Ambient) -> None:
        stack: list[Ambient] = []
        for node in list(block.nodes()):
            state = stack[-1] if stack else outer
            if _is_context(node):
                stack.append(self.entered(node.input(), state))
            elif node.kind() == "prim::Exit" and _class_of(node.input()).endswith(".autocast"):
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
        self, node: Any, state: Ambient, left: Container[int] = (), apart: Container[int] = ()
    ) -> None:
        """Cast the arguments of a node as its policy says.

        By their number: those that are left, and those that are cast apart from others.
        """
        name = str(node.kind()).removeprefix("aten::")
        policy = self.policies.get(name)
        if policy is None or not node.kind().startswith("aten::"):
            return
        if policy == "banned":
            raise ScriptPolicyError("Unsafe to autocast")
        if _writes(node):
            return
        if policy == "lower_precision_fp":
            self.cast(node, REDUCED, state, left, apart)
        elif policy == "fp32_set_opt_dtype":
            if not _has_dtype(node):
                self.cast(node, FULL, state, left, apart)
        elif policy == "fp32" or any(self.may_be_float32(v) for v in node.inputs()):
            self.cast(node, FULL, state, left, apart)

    def cast(
        self, node: Any, kind: str, state: Ambient, left: Container[int], apart: Container[int]
    ) -> None:
        """Cast each tensor argument; one value that stands twice is cast once, but apart."""
        dtypes = [getattr(state, device) for device in _DEVICES]
        casts: dict[int, Any] = {}
        for i, value in enumerate(list(node.inputs())):
            if not isinstance(value.type(), torch._C.TensorType) or value.node().kind() == kind:
                continue
            if i in left:
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
        dtype = kind.dtype() if self.known is None else self.known.get(_name_of(value))
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
