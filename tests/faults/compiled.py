"""Faults of autocast inside compilers, and the hand-made cases that show them.

Four places: the graph that dynamo captures, with autocast's contexts as nodes (every rung runs what
is made of it); the code that dynamo writes around a graph break, and its guards; AOTAutograd's
trace, in which autocast becomes casts; and what `torch.export` makes of contexts. Each is wrong
only while a backend runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from amp_fuzz.backends import Backend
from amp_fuzz.backends.export import ExportBackend
from amp_fuzz.backends.harness import Observation
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import Autocast, Checkpoint, NoGrad
from tests.faults.contexts import FAULTS as CONTEXTS
from tests.faults.corrupted import Patches, Seeded
from tests.faults.fault import Fault, patched
from tests.helpers import BF16, F16, call, case, under, x

__all__ = [
    "AOT",
    "CASES",
    "COMPILED",
    "EAGER",
    "CompiledFault",
    "backend_of",
    "beside",
    "own_difference",
]

EAGER, AOT, INDUCTOR = "eager", "aot_eager", "inductor"
EXPORT, DECOMPOSED = "export", "export[decomposed]"

Node = Any
Change = Callable[["Captured"], None]


@dataclass(frozen=True, slots=True)
class CompiledFault(Fault):
    """One way in which a compiler could get autocast wrong.

    place: the rung of ``torch.compile``, or the export, on which it is looked for.
    """

    place: str = EAGER


_FOUND: list[CompiledFault] = []


def _add(name: str, what: str, place: str, corrupt: Patches) -> None:
    _FOUND.append(CompiledFault(name, what, (), corrupt, place=place))


# -- the graph that dynamo captures ---------------------------------------------------------------

_enter: Any = torch.amp.autocast_mode._enter_autocast
_exit: Any = torch.amp.autocast_mode._exit_autocast
_Autocast: Any = torch.amp.autocast_mode.autocast
_enabled: Any = torch.is_autocast_enabled
_dtype_of: Any = torch.get_autocast_dtype

# What the CPU's table lists, by the names that a captured graph has.
_LOW = {"mm", "matmul", "linear", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d"}


@dataclass(slots=True)
class Captured:
    """A captured graph: which settings each node runs under.

    outside: whether autocast is on where the graph starts, and its dtype.
    """

    graph: fx.Graph
    outside: tuple[bool, torch.dtype]

    def contexts(self) -> list[tuple[Node, Node]]:
        """Return the nodes that enter a context, with those that leave it, outermost first."""
        left = {n.args[0]: n for n in self.graph.nodes if n.target is _exit}
        return [(n, left[n]) for n in self.graph.nodes if n.target is _enter and n in left]

    def calls(self) -> Iterator[tuple[Node, bool, torch.dtype]]:
        """Yield each call, with whether autocast is on there, and its dtype."""
        stack = [self.outside]
        for node in list(self.graph.nodes):
            if node.target is _enter:
                _, dtype, enabled, _ = node.args
                known = dtype in (None, torch.bfloat16, torch.float16)
                stack.append((enabled and known, dtype or stack[-1][1]))
            elif node.target is _exit:
                stack.pop()
            elif node.op in ("call_function", "call_method"):
                yield node, *stack[-1]

    def low(self) -> Iterator[tuple[Node, torch.dtype]]:
        """Yield the calls that autocast runs in 16 bits, with their dtype."""
        for node, enabled, dtype in self.calls():
            if enabled and name_of(node) in _LOW:
                yield node, dtype

    def around(self, node: Node, dtype: Any, enabled: bool, cache: Any = None) -> None:
        """Put a context of its own around a node."""
        with self.graph.inserting_before(node):
            entered = self.graph.call_function(_enter, ("cpu", dtype, enabled, cache))
        with self.graph.inserting_after(node):
            self.graph.call_function(_exit, (entered,))

    def cast(self, node: Node, change: Callable[[Node, torch.Tensor], Node | None]) -> None:
        """Replace the floating-point tensors that a call is given; None leaves one."""

        def changed(given: Node) -> Node:
            value = given.meta.get("example_value")
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                return given
            made = change(given, value)
            if made is None:
                return given
            made.meta = dict(given.meta)
            return made

        with self.graph.inserting_before(node):
            node.args = fx.node.map_arg(node.args, changed)
            node.kwargs = fx.node.map_arg(node.kwargs, changed)

    def to(self, given: Node, *dtypes: torch.dtype) -> Node:
        """Add casts of a value, one after another."""
        for dtype in dtypes:
            given = self.graph.call_method("to", (given, dtype))
        return given


def name_of(node: Node) -> str:
    """Return the name of what a node calls: ``mm``."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


@contextmanager
def _rewriting(change: Change) -> Iterator[None]:
    """Change each graph that dynamo captures before the backend gets it."""
    from torch._dynamo.output_graph import OutputGraph

    honest: Any = OutputGraph.call_user_compiler

    def compiler(self: Any, module: fx.GraphModule, inputs: Any) -> Any:
        outside = _enabled("cpu"), _dtype_of("cpu")
        for part in module.modules():
            if isinstance(part, fx.GraphModule):
                change(Captured(part.graph, outside))
                part.graph.lint()
                part.recompile()
        return honest(self, module, inputs)

    with patched(OutputGraph, call_user_compiler=compiler):
        yield


def _graph(name: str, what: str, place: str = EAGER) -> Callable[[Change], Change]:
    """Make a fault that changes captured graphs."""

    def register(change: Change) -> Change:
        _add(name, what, place, lambda: _rewriting(change))
        return change

    return register


def _said(name: str, what: str, says: Callable[..., Sequence[Any]], place: str = EAGER) -> None:
    """Make a fault that enters contexts with other arguments.

    says: is given a context's dtype, enabled and cache_enabled, and returns what is entered.
    """

    @_graph(name, what, place)
    def change(captured: Captured) -> None:
        for entered, _ in captured.contexts():
            entered.args = ("cpu", *says(*entered.args[1:]))


for _place in (EAGER, INDUCTOR):
    _said(
        "disabled-ignored" + "-inductor" * (_place == INDUCTOR),
        "compiled programs ignore enabled=False",
        lambda dtype, enabled, cache: (dtype, True, cache),
        _place,
    )
    _said(
        "inner-dtype-lost" + "-inductor" * (_place == INDUCTOR),
        "compiled programs ignore the dtype of an inner context",
        lambda dtype, enabled, cache: (None, enabled, cache),
        _place,
    )
_said(
    "dtype-swapped",
    "float16 contexts run in bfloat16",
    lambda dtype, enabled, cache: (
        torch.bfloat16 if dtype is torch.float16 else dtype,
        enabled,
        cache,
    ),
)
_said(
    "default-dtype",
    "a context that names no dtype runs in float16",
    lambda dtype, enabled, cache: (dtype or torch.float16, enabled, cache),
)
_said(
    "unsupported-dtype",
    "a context with a dtype that autocast lacks runs in bfloat16",
    lambda dtype, enabled, cache: (
        torch.bfloat16 if dtype is torch.float32 else dtype,
        enabled,
        cache,
    ),
)
_said(
    "cache-flag-ignored",
    "cache_enabled=False is ignored",
    lambda dtype, enabled, cache: (dtype, enabled, True),
)
_said(
    "cache-off",
    "no weight is cached in a compiled context",
    lambda dtype, enabled, cache: (dtype, enabled, False),
)
_said(
    "always-disabled",
    "contexts in compiled programs are disabled",
    lambda dtype, enabled, cache: (dtype, False, cache),
    AOT,
)


@_graph("regions-dropped", "contexts in compiled programs are not entered")
def _regions_dropped(captured: Captured) -> None:
    for entered, left in captured.contexts():
        captured.graph.erase_node(left)
        captured.graph.erase_node(entered)


@_graph("inner-dropped", "a context inside another one is not entered")
def _inner_dropped(captured: Captured) -> None:
    depth = 0
    for node in list(captured.graph.nodes):
        depth += node.target is _enter
        if node.target is _enter and depth > 1:
            left = next(n for n in node.users if n.target is _exit)
            captured.graph.erase_node(left)
            captured.graph.erase_node(node)
            depth -= 1
        depth -= node.target is _exit and node.graph is captured.graph and not node._erased


def _calls_of(captured: Captured) -> list[Node]:
    return [n for n in captured.graph.nodes if n.op in ("call_function", "call_method")]


@_graph("late-start", "a region starts after its first statement")
def _late_start(captured: Captured) -> None:
    for entered, left in captured.contexts():
        first = entered.next
        if first is not left and first.target not in (_enter, _exit):
            first.append(entered)


@_graph("early-end", "a region ends before its last statement")
def _early_end(captured: Captured) -> None:
    for entered, left in captured.contexts():
        last = left.prev
        if last is not entered and last.target not in (_enter, _exit):
            last.prepend(left)


@_graph("late-end", "a region ends after the statement that follows it")
def _late_end(captured: Captured) -> None:
    for _, left in captured.contexts():
        after = left.next
        if after.op in ("call_function", "call_method") and after.target not in (_enter, _exit):
            after.append(left)


@_graph("never-left", "a region lasts to the end of the graph")
def _never_left(captured: Captured) -> None:
    (output,) = (n for n in captured.graph.nodes if n.op == "output")
    for _, left in reversed(captured.contexts()):
        output.prepend(left)


@_graph("off-afterwards", "what follows a region inside another one is not cast")
def _off_afterwards(captured: Captured) -> None:
    ends = [left for _, left in captured.contexts()]
    for left in ends:
        after = left.next
        if after.op in ("call_function", "call_method") and after.target not in (_enter, _exit):
            captured.around(after, None, enabled=False)


@_graph("nested-merged", "an outer context gets the settings of the one inside it")
def _nested_merged(captured: Captured) -> None:
    contexts = captured.contexts()
    for (outer, end), (inner, _) in pairwise(contexts):
        if inner in _between(outer, end):
            outer.args = inner.args


def _between(first: Node, last: Node) -> Iterator[Node]:
    while (first := first.next) is not last:
        yield first


@_graph("second-region-lost", "of two regions, the second is not entered")
def _second_lost(captured: Captured) -> None:
    for entered, left in captured.contexts()[1:]:
        if entered.prev.target is _exit or entered.prev.op != "placeholder":
            captured.graph.erase_node(left)
            captured.graph.erase_node(entered)


@_graph("cache-cleared", "the weight cache is cleared after each statement")
def _cache_cleared(captured: Captured) -> None:
    for node, _ in list(captured.low()):
        with captured.graph.inserting_after(node):
            captured.graph.call_function(torch.clear_autocast_cache)


@_graph("cache-of-all", "a weight's cast is kept until the graph ends, past its region")
def _cache_kept(captured: Captured) -> None:
    if not captured.contexts():
        return
    (output,) = (n for n in captured.graph.nodes if n.op == "output")
    first = next(n for n in captured.graph.nodes if n.op != "placeholder")
    with captured.graph.inserting_before(first):
        captured.graph.call_function(torch.autocast_increment_nesting)
    with captured.graph.inserting_before(output):
        captured.graph.call_function(torch.autocast_decrement_nesting)


def _uncast(name: str, what: str, op: str, place: str = EAGER) -> None:
    """Make a fault in which the functional list of ops lacks one."""

    @_graph(name, what, place)
    def change(captured: Captured) -> None:
        for node, enabled, _ in list(captured.calls()):
            if enabled and name_of(node) == op:
                captured.around(node, None, enabled=False)


_uncast("mm-not-listed", "mm is not cast in compiled programs", "mm")
_uncast("linear-not-listed", "linear is not cast in compiled programs", "linear", AOT)
_uncast("mse-loss-not-listed", "mse_loss stays in 16 bits in compiled programs", "mse_loss")
_uncast("cat-not-listed", "index_copy does not promote in compiled programs", "index_copy")


def _cast(name: str, what: str, op: str, *dtypes: torch.dtype | None, place: str = EAGER) -> None:
    """Make a fault in which the list has an op too many; None stands for the context's dtype."""

    @_graph(name, what, place)
    def change(captured: Captured) -> None:
        for node, enabled, dtype in list(captured.calls()):
            if enabled and name_of(node) == op:
                made = [dtype if d is None else d for d in dtypes]
                captured.cast(node, lambda given, value, made=made: captured.to(given, *made))


_cast("mul-listed", "mul is cast to 16 bits in compiled programs", "mul", None)
_cast("softmax-listed", "softmax is cast to float32 in compiled programs", "softmax", torch.float32)
_cast("abs-listed-aot", "abs is cast to 16 bits in compiled programs", "abs", None, place=AOT)


def _low(
    name: str,
    what: str,
    change: Callable[[Captured, Node, Node, torch.Tensor, torch.dtype], Node | None],
    place: str = EAGER,
) -> None:
    """Make a fault of what ops that run in 16 bits are given."""

    @_graph(name, what, place)
    def rewrite(captured: Captured) -> None:
        for node, dtype in list(captured.low()):
            captured.cast(
                node,
                lambda given, value, node=node, dtype=dtype: change(
                    captured, node, given, value, dtype
                ),
            )


_low(
    "cast-twice",
    "casts to bfloat16 go through float16",
    lambda captured, node, given, value, dtype: (
        captured.to(given, torch.float16, torch.bfloat16)
        if value.dtype is torch.float32 and dtype is torch.bfloat16
        else None
    ),
)
_low(
    "float64-cast",
    "float64 is cast too",
    lambda captured, node, given, value, dtype: (
        captured.to(given, dtype) if value.dtype is torch.float64 else None
    ),
)
_low(
    "cast-detached",
    "no gradient flows through a cast",
    lambda captured, node, given, value, dtype: (
        captured.graph.call_method("detach", (given,)) if value.dtype is torch.float32 else None
    ),
)
_low(
    "cast-detached-aot",
    "no gradient flows through a cast of AOTAutograd",
    lambda captured, node, given, value, dtype: (
        captured.graph.call_method("detach", (given,)) if value.dtype is torch.float32 else None
    ),
    AOT,
)


@_graph("other-half-not-cast", "a 16-bit tensor that is not of the autocast dtype is not cast")
def _other_half(captured: Captured) -> None:
    for node, dtype in list(captured.low()):
        values = [n.meta.get("example_value") for n in node.all_input_nodes]
        if all(v.dtype in (torch.float32, dtype) for v in values if isinstance(v, torch.Tensor)):
            continue
        captured.cast(
            node,
            lambda given, value, dtype=dtype: (
                captured.to(given, dtype) if value.dtype is torch.float32 else None
            ),
        )
        captured.around(node, None, enabled=False)


@_graph("first-call-only", "only the first call of a graph is cast")
def _first_only(captured: Captured) -> None:
    for node, _ in list(captured.low())[1:]:
        captured.around(node, None, enabled=False)


@_graph("result-widened", "results of 16-bit ops are cast back to float32")
def _widened(captured: Captured) -> None:
    for node, _ in list(captured.low()):
        users = list(node.users)
        with captured.graph.inserting_after(node):
            made = captured.to(node, torch.float32)
        for user in users:
            user.replace_input_with(node, made)


@_graph("bias-not-cast", "the bias of linear is added in float32")
def _bias(captured: Captured) -> None:
    for node, _ in list(captured.low()):
        if name_of(node) == "linear" and len(node.args) > 2 and node.args[2] is not None:
            bias = node.args[2]
            node.args = node.args[:2]
            users = list(node.users)
            with captured.graph.inserting_after(node):
                made = captured.graph.call_function(torch.add, (node, bias))
            for user in users:
                user.replace_input_with(node, made)


@_graph("grad-mode", "nothing is cast under no_grad in compiled programs")
def _no_grad(captured: Captured) -> None:
    off = False
    for node, enabled, _ in list(captured.calls()):
        if node.target is torch._C._set_grad_enabled:
            off = node.args[0] is False
        elif off and enabled and name_of(node) in _LOW:
            captured.around(node, None, enabled=False)


# -- code around a graph break, and guards --------------------------------------------------------


def _resumed(name: str, what: str, says: Callable[..., tuple[Any, ...]], place: str) -> None:
    """Make a fault of the context that dynamo enters again after a graph break."""

    @contextmanager
    def corrupt() -> Iterator[None]:
        from torch._dynamo import symbolic_convert

        honest = symbolic_convert.ReenterWith

        def reenter(index: int, values: tuple[Any, ...] | None = None) -> Any:
            if values and len(values) == 4 and values[0] == "cpu":
                values = ("cpu", *says(*values[1:]))
            return honest(index, values)

        with patched(symbolic_convert, ReenterWith=reenter):
            yield

    _add(name, what, place, corrupt)


_resumed(
    "break-ends-region",
    "a region ends at a graph break",
    lambda dtype, enabled, cache: (dtype, False, cache),
    EAGER,
)
_resumed(
    "break-loses-dtype",
    "after a graph break a region has the default dtype",
    lambda dtype, enabled, cache: (torch.bfloat16, enabled, cache),
    AOT,
)
_resumed(
    "break-enables",
    "after a graph break a disabled region is enabled",
    lambda dtype, enabled, cache: (dtype, True, cache),
    EAGER,
)


@contextmanager
def _forgetful() -> Iterator[None]:
    """Let graphs be used again under another autocast state, but not in another grad mode.

    A tensor's guard has the dispatch keys of the state, autocast's among them.
    """
    from torch._dynamo.guards import GuardBuilder

    def guard(self: Any, guard: Any) -> None:
        mode = torch.is_grad_enabled()
        self.check_fn_manager.global_state = self.check_fn_manager.output_graph.global_state_guard
        self.guard_manager.root.add_lambda_guard(
            lambda _: torch.is_grad_enabled() == mode, ["grad mode"], guard.user_stack
        )

    with patched(GuardBuilder, GLOBAL_STATE=guard, TENSOR_MATCH=lambda self, *of, **how: None):
        yield


_add(
    "guards-forget",
    "a graph is used again under another autocast state",
    AOT,
    _forgetful,
)


# -- AOTAutograd's trace --------------------------------------------------------------------------


def _traced(
    name: str, what: str, state: Callable[[], AbstractContextManager[Any]], place: str = AOT
) -> None:
    """Make a fault of the state in which AOTAutograd traces a graph."""

    @contextmanager
    def corrupt() -> Iterator[None]:
        from torch._functorch._aot_autograd import graph_compile

        def under_state(trace: Callable[..., Any]) -> Callable[..., Any]:
            def traced(*args: Any, **kwargs: Any) -> Any:
                with state():
                    return trace(*args, **kwargs)

            return traced

        names = ("aot_dispatch_autograd_graph", "aot_dispatch_base_graph")
        wrong = {n: under_state(getattr(graph_compile, n)) for n in names}
        with patched(graph_compile, **wrong):
            yield

    _add(name, what, place, corrupt)


def _while_on(**said: Any) -> AbstractContextManager[Any]:
    return _Autocast("cpu", **said) if _enabled("cpu") else nullcontext()


def _backward_as(value: Any) -> AbstractContextManager[Any]:
    made: AbstractContextManager[Any] = torch._functorch.config.patch(backward_pass_autocast=value)
    return made


def _backward_default() -> AbstractContextManager[Any]:
    said = torch._functorch.config.backward_pass_autocast
    if not isinstance(said, list):
        return nullcontext()
    return _backward_as([s | {"dtype": torch.bfloat16} for s in said])


_traced(
    "ambient-ignored",
    "AOTAutograd traces without the autocast around the call",
    lambda: _while_on(enabled=False),
)
_traced(
    "ambient-dtype",
    "AOTAutograd traces under the default dtype",
    lambda: _while_on(dtype=torch.bfloat16),
)
_traced(
    "ambient-dtype-inductor",
    "Inductor's graph is traced under the default dtype",
    lambda: _while_on(dtype=torch.bfloat16),
    INDUCTOR,
)
_traced(
    "backward-as-forward",
    "the backward pass is traced under the forward's autocast",
    lambda: _backward_as("same_as_forward"),
)
_traced(
    "backward-off",
    "the backward pass is traced without autocast",
    lambda: _backward_as("off"),
)
_traced(
    "backward-dtype",
    "the backward pass is traced under the default dtype",
    _backward_default,
)


def _runs_again() -> AbstractContextManager[None]:
    return patched(torch._C, _is_any_autocast_enabled=lambda: False)


_add(
    "cast-again",
    "a traced graph runs under autocast, which casts what the trace has cast",
    AOT,
    _runs_again,
)


# -- what compiled programs call ------------------------------------------------------------------

_BORROWED = (
    "checkpoint-off",
    "checkpoint-ambient",
    "checkpoint-dtype",
    "custom-fwd-off",
    "custom-fwd-forgets",
    "custom-bwd-ambient",
    "decorator-does-nothing",
    "decorator-dtype",
    "thread-inherits",
)
_by_name = {f.name: f for f in CONTEXTS}
for _name in _BORROWED:
    _add(_name, f"{_by_name[_name].what}, in compiled programs", EAGER, _by_name[_name].corrupt)


def _no_cast_inputs() -> AbstractContextManager[None]:
    honest: Any = torch.amp.custom_fwd

    def custom_fwd(*, device_type: str, cast_inputs: Any = None) -> Any:
        return honest(device_type=device_type)

    return patched(torch.amp, custom_fwd=custom_fwd)


def _cast_inputs_to_half() -> AbstractContextManager[None]:
    honest: Any = torch.amp.custom_fwd

    def custom_fwd(*, device_type: str, cast_inputs: Any = None) -> Any:
        cast = None if cast_inputs is None else torch.bfloat16
        return honest(device_type=device_type, cast_inputs=cast)

    return patched(torch.amp, custom_fwd=custom_fwd)


_add("cast-inputs-ignored", "custom_fwd ignores cast_inputs", AOT, _no_cast_inputs)
_add("cast-inputs-dtype", "custom_fwd casts inputs to bfloat16", EAGER, _cast_inputs_to_half)


# -- exports --------------------------------------------------------------------------------------


def _exported(name: str, what: str, says: Callable[..., tuple[Any, ...]], place: str) -> None:
    """Make a fault of the contexts that an exported program enters."""

    @contextmanager
    def corrupt() -> Iterator[None]:
        from torch._higher_order_ops.wrap import WrapWithAutocast

        honest: Any = WrapWithAutocast.__call__

        def wrap(self: Any, device: str, dtype: Any, enabled: bool, cache: Any, *args: Any) -> Any:
            return honest(self, device, *says(dtype, enabled, cache), *args)

        with patched(WrapWithAutocast, __call__=wrap):
            yield

    _add(name, what, place, corrupt)


for _place in (EXPORT, DECOMPOSED):
    _exported(
        f"disabled-ignored-{_place}",
        "exported programs ignore enabled=False",
        lambda dtype, enabled, cache: (dtype, True, cache),
        _place,
    )
_exported(
    "dtype-lost-export",
    "exported contexts have the default dtype",
    lambda dtype, enabled, cache: (torch.bfloat16, enabled, cache),
    EXPORT,
)
_exported(
    "always-disabled-export",
    "exported contexts are disabled",
    lambda dtype, enabled, cache: (dtype, False, cache),
    EXPORT,
)

COMPILED: Mapping[str, CompiledFault] = {fault.name: fault for fault in _FOUND}


# -- backends -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SeededExport(ExportBackend):
    """``torch.export`` in a torch that is patched while it runs."""

    patches: Patches = field(default=nullcontext, compare=False)

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Export and run cases in the patched torch."""
        with self.patches():
            return ExportBackend.run(self, cases)

    def ladder(self) -> Sequence[Backend]:
        """Return the export without decompositions, patched too, for that with them."""
        return [SeededExport(patches=self.patches)] if self.decomposed else []


@contextmanager
def own_difference() -> Iterator[None]:
    """Make a compiler compute tanh 1 % too large: a difference in which autocast has no part."""

    def change(captured: Captured) -> None:
        for node in _calls_of(captured):
            if name_of(node) == "tanh":
                users = list(node.users)
                with captured.graph.inserting_after(node):
                    made = captured.graph.call_function(torch.mul, (node, 1.01))
                made.meta = dict(node.meta)
                for user in users:
                    user.replace_input_with(node, made)

    with _rewriting(change), _exporting_wrong():
        yield


@contextmanager
def _exporting_wrong() -> Iterator[None]:
    """As `own_difference`, in exported programs."""
    from torch.export import ExportedProgram

    honest: Any = ExportedProgram.module

    def module(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = honest(self, *args, **kwargs)
        for node in list(made.graph.nodes):
            if str(node.target) == "aten.tanh.default":
                users = list(node.users)
                with made.graph.inserting_after(node):
                    gain = made.graph.call_function(torch.ops.aten.mul.Tensor, (node, 1.01))
                gain.meta = dict(node.meta)
                for user in users:
                    user.replace_input_with(node, gain)
        made.recompile()
        return made

    with patched(ExportedProgram, module=module):
        yield


def backend_of(fault: CompiledFault | None, place: str, *, differs: bool = False) -> Backend:
    """Return the backend of a place, with a fault or without.

    differs: whether it also has a difference of its own, in which autocast has no part.
    """

    @contextmanager
    def patches() -> Iterator[None]:
        with ExitStack() as stack:
            if fault is not None:
                stack.enter_context(fault.corrupt())
            if differs:
                stack.enter_context(own_difference())
            yield

    if place in (EXPORT, DECOMPOSED):
        return SeededExport(decomposed=place == DECOMPOSED, patches=patches)
    return Seeded(place, patches=patches)


# -- cases ----------------------------------------------------------------------------------------

_OFF = Autocast(enabled=False)
_W = [x("x0", 3, 8), x("w1", 8, 8)]
_two = [*_W, x("w2", 8, 8)]  # a weight that two contexts share is cached for the first
_twice = [*_W, x("x2", 5, 8)]
_shared = call("mm", "x2", "w1", to="v1")
_mm, _again = call("mm", "x0", "w1"), call("mm", "x0", "w1", to="v1")
_other, _third = call("mm", "x0", "w2", to="v1"), call("mm", "x0", "w1", to="v2")
_BREAK = [x("x2", 3, 4), x("x3", 3, 4), x("x4", 3, 4, domain="positive")]
_breaks = call("gaussian_nll_loss", "x2", "x3", "x4", to="v9")

CASES: Mapping[str, Case] = {
    "disabled": case(_W, _mm, under(_OFF, _again)),
    "disabled-inside": case(_W, _mm, under(_OFF, _again), backward="inside"),
    "inner-dtype": case(_two, _mm, under(F16, _other), _third),
    "inner-bfloat16": case(_two, _mm, under(BF16, _other), contexts=(F16,)),
    "regions": case(
        _W,
        _mm,
        under(BF16, _again, call("mm", "v1", "w1", to="v2")),
        call("mm", "x0", "w1", to="v3"),
        contexts=(),
    ),
    "two-regions": case(_W, under(BF16, _mm), _again, under(F16, _third), contexts=()),
    "nested": case(_two, under(BF16, _mm, under(F16, _other), _third), contexts=()),
    "nested-off": case(_W, under(BF16, _mm, under(_OFF, _again), _third), contexts=()),
    "default": case(_W, under(Autocast(), _mm), contexts=()),
    "unsupported": case(_W, under(Autocast(dtype="float32"), _mm), contexts=()),
    "uncached": case(
        _twice, under(Autocast(dtype="bfloat16", cache_enabled=False), _mm, _shared), contexts=()
    ),
    "cached": case(_twice, under(BF16, _mm, _shared), contexts=()),
    "cached-around": case(_twice, _mm, _shared),
    "plain": case(_W, _mm),
    "plain-float16": case(_W, _mm, contexts=(F16,)),
    "checkpoint": case(_W, under(Checkpoint(), _mm, call("mm", "v0", "w1", to="v1"))),
    "checkpoint-float16": case(
        _W, under(Checkpoint(), _mm, call("mm", "v0", "w1", to="v1")), contexts=(F16,)
    ),
    "plan-checkpoint": case(
        _W, _mm, call("mm", "v0", "w1", to="v1"), contexts=(F16,), checkpoint="non_reentrant"
    ),
    "linear": case([x("x0", 3, 8), x("w1", 4, 8), x("w2", 4)], call("linear", "x0", "w1", "w2")),
    "mse": case(
        [x("x0", 3, 8), x("w1", 8, 8), x("x2", 3, 8, dtype="bfloat16")],
        _mm,
        call("mse_loss", "v0", "x2", to="v1"),
    ),
    "mul": case(_W, call("mul", "x0", "x0")),
    "abs": case([x("w0", 3, 8)], call("abs", "w0")),
    "softmax": case(_W, _mm, call("softmax", "v0", -1, to="v1")),
    "float64": case([x("x0", 3, 8, dtype="float64"), x("w1", 8, 8, dtype="float64")], _mm),
    "no-grad": case(_W, under(NoGrad(), _mm)),
    "backward-under": case(_W, under(_OFF, _mm), backward="under", backward_context=F16),
    "backward-outside": case(_W, under(_OFF, _mm), call("mm", "v0", "w1", to="v1")),
    "custom-fwd": case(_W, _mm, contexts=(F16,), entry="custom_fwd"),
    "cast-inputs": case(_W, _mm, contexts=(F16,), entry="cast_inputs"),
    "function": case(_W, _mm, entry="function"),
    "decorator": case(_W, _mm, contexts=(F16,), entry="decorator"),
    "thread": case(_W, _mm, thread="inside"),
    "break": case([*_W, *_BREAK], under(F16, _mm, _breaks, _again), contexts=()),
    "break-off": case([*_W, *_BREAK], under(_OFF, _breaks, _mm)),
    "break-same": case(
        [x("x2", 3, 4, dtype="float64"), x("x3", 3, 4), x("x4", 3, 4, domain="positive")],
        _breaks,
        under(_OFF, call("gaussian_nll_loss", "x2", "x3", "x4", to="v8")),
    ),
    "index-copy": case(
        [
            x("x0", 3, 8),
            x("w1", 8, 8),
            x("x2", 2, dtype="int64", domain="index", bound=3),
            x("x3", 2, 8),
        ],
        _mm,
        call("index_copy", "v0", 0, "x2", "x3", to="v1"),
    ),
    "other-half": case([x("x0", 3, 8, dtype="float16"), x("w1", 8, 8)], _mm),
    "large": case([x("x0", 3, 8, domain="overflow"), x("w1", 8, 8)], _mm),
    "loop": case(_W, _mm, steps=2, loop="inside"),
    "loop-region": case(_W, under(BF16, _mm), steps=2, loop="inside"),
    "loop-uncached": case(
        _W, under(Autocast(dtype="bfloat16", cache_enabled=False), _mm), steps=2, loop="inside"
    ),
    "custom-fwd-mixed": case(
        [x("x0", 3, 8, dtype="float16"), x("w1", 8, 8)], _mm, contexts=(F16,), entry="custom_fwd"
    ),
    "backward-large": case(
        [x("x0", 3, 8, domain="overflow"), x("w1", 8, 8)],
        under(_OFF, _mm),
        contexts=(F16,),
        backward="inside",
    ),
    "backward-under-large": case(
        [x("x0", 3, 8, domain="overflow"), x("w1", 8, 8)],
        under(_OFF, _mm),
        backward="under",
        backward_context=F16,
    ),
    "two-states": case(_W, _mm, entry="function", first_pass="no_grad", thread="inside"),
    "steps": case(_W, under(BF16, _mm), under(BF16, _again), contexts=(), steps=2),
}
"""By name, the cases that are tried on each fault, in this order."""


def beside(case: Case) -> Case:
    """Return a case with a statement more, which `own_difference` gets wrong."""
    other = x("x99", 4, 4)
    body = (*case.program.body, call("tanh", "x99", to="v99"))
    inputs = (*case.program.inputs, other)
    return case.with_program(inputs=inputs, body=body, outputs=(*case.program.outputs, "v99"))
