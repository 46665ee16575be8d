"""Numeric faults in what a compiler makes of a program.

Three places, each first run at its own rung: AOTAutograd's graph (the joint graph of forward and
backward), a decomposition, which ``aot_eager_decomp_partition`` and Inductor share, and Inductor's
lowerings and C++ templates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from tests.faults.fault import NumericFault, patched

__all__ = ["COMPILED"]

AOT, DECOMPOSED, INDUCTOR = (
    "compile[aot_eager]",
    "compile[aot_eager_decomp_partition]",
    "compile[inductor]",
)

_FOUND: list[NumericFault] = []
_aten = torch.ops.aten

Tensor = torch.Tensor
Node = Any
Rewrite = Callable[[Any, Node], Node | None]
"""Given the graph and a node of it: makes the node in its place, or None to leave it."""


def _add(
    name: str,
    mechanism: str,
    what: str,
    stage: str,
    reached: tuple[str, ...],
    corrupt: Callable[[], AbstractContextManager[Any]],
) -> None:
    _FOUND.append(
        NumericFault(name, what, (), corrupt, mechanism=mechanism, stage=stage, reached=reached)
    )


# -- AOTAutograd's graph --------------------------------------------------------------------------


def _graph(
    name: str, mechanism: str, what: str, *ops: str, backward: bool = False, single: bool = False
) -> Callable[[Rewrite], Rewrite]:
    """Make a fault that rewrites the calls of these ops in the graph that AOTAutograd traces.

    backward: only those of the backward pass. single: it acts on float32 only.
    """

    def register(rewrite: Rewrite) -> Rewrite:
        targets = {f"aten.{op}" for op in ops}
        where = "backward:" * backward + "float32:" * single
        reached = tuple(f"{where}{t}" for t in sorted(targets))

        def changed(module: torch.fx.GraphModule) -> None:
            for node in list(module.graph.nodes):
                if node.op != "call_function" or str(node.target) not in targets:
                    continue
                if backward and not _is_backward(node):
                    continue
                users = list(node.users)
                with module.graph.inserting_after(node):
                    made = rewrite(module.graph, node)
                for user in users:
                    if made is not None:
                        user.replace_input_with(node, made)
            module.graph.lint()
            module.recompile()

        _add(name, mechanism, what, AOT, reached, lambda: _rewritten(changed))
        return rewrite

    return register


@contextmanager
def _rewritten(change: Callable[[torch.fx.GraphModule], None]) -> Iterator[None]:
    """Change each graph that AOTAutograd traces, with a backward pass and without."""
    from torch._functorch._aot_autograd import graph_compile

    def after(trace: Callable[..., Any]) -> Callable[..., Any]:
        def traced(*args: Any, **kwargs: Any) -> Any:
            made = trace(*args, **kwargs)
            change(made[0])
            return made

        return traced

    names = ("aot_dispatch_autograd_graph", "aot_dispatch_base_graph")
    wrong = {n: after(getattr(graph_compile, n)) for n in names}
    with patched(graph_compile, **wrong):
        yield


def _is_backward(node: Node) -> bool:
    return str(node.meta.get("partitioner_tag", "")).endswith("backward")


def _made(graph: Any, like: Node, target: Any, *args: Any, dtype: Any = None) -> Node:
    """Add a call of a shape, and of the pass, of another node."""
    node = graph.call_function(target, args)
    node.meta = dict(like.meta)
    if dtype is not None:
        node.meta["val"] = like.meta["val"].to(dtype)
    return node


@_graph(
    "graph-mm-bfloat16",
    "narrower type inside",
    "mm of float32 runs in bfloat16",
    "mm.default",
    single=True,
)
def _graph_mm_bfloat16(graph: Any, node: Node) -> Node | None:
    return _narrowed(graph, node)


def _narrowed(graph: Any, node: Node) -> Node | None:
    """Add the product of the operands in bfloat16; None for what is not float32."""
    if node.meta["val"].dtype is not torch.float32:
        return None
    low: list[Node] = []
    convert = torch.ops.prims.convert_element_type.default
    for operand in reversed(node.args):
        low.insert(0, _made(graph, operand, convert, operand, torch.bfloat16, dtype=torch.bfloat16))
        low[0].meta["partitioner_tag"] = node.meta.get("partitioner_tag")
    with graph.inserting_after(low[-1]):
        product = _made(graph, node, node.target, *low, dtype=torch.bfloat16)
    with graph.inserting_after(product):
        return _made(graph, node, convert, product, torch.float32)


@_graph("graph-mm-gain", "gain", "mm is 1 % too large", "mm.default")
def _graph_mm_gain(graph: Any, node: Node) -> Node:
    return _made(graph, node, _aten.mul.Tensor, node, 1.01)


@_graph(
    "graph-mul-gain", "gain", "products in backward are 1 % too large", "mul.Tensor", backward=True
)
def _graph_mul_gain(graph: Any, node: Node) -> Node:
    return _made(graph, node, _aten.mul.Tensor, node, 1.01)


@_graph("graph-neg-backward", "sign", "neg is lost in backward", "neg.default", backward=True)
def _graph_neg(graph: Any, node: Node) -> Node:
    return node.args[0]


@_graph(
    "graph-accumulation",
    "dropped term",
    "the sum of two gradients loses one of them",
    "add.Tensor",
    backward=True,
)
def _graph_accumulation(graph: Any, node: Node) -> Node | None:
    a, b = node.args[:2]
    if not isinstance(b, torch.fx.Node) or a.meta["val"].shape != node.meta["val"].shape:
        return None
    return a if a.meta["val"].dtype is node.meta["val"].dtype else None


@_graph("graph-sum-last", "one element wrong", "sum leaves out the last element", "sum.dim_IntList")
def _graph_sum_last(graph: Any, node: Node) -> Node | None:
    x, dims = node.args[:2]
    if not dims or x.meta["val"].dim() == 0 or x.meta["val"].shape[dims[-1]] < 2:
        return None
    size = x.meta["val"].shape[dims[-1]] - 1
    part = _made(graph, x, _aten.slice.Tensor, x, dims[-1], 0, size)
    part.meta["val"] = x.meta["val"].narrow(dims[-1], 0, size)
    part.meta["partitioner_tag"] = node.meta.get("partitioner_tag")
    with graph.inserting_after(part):
        made = graph.call_function(node.target, (part, *node.args[1:]), dict(node.kwargs))
    made.meta = dict(node.meta)
    return made


def _saved(name: str, what: str, op: str) -> None:
    """Make a fault in which the backward pass is given the input of an op for its output."""

    @_graph(name, "wrong saved tensor", what, op)
    def rewrite(graph: Any, node: Node) -> None:
        saved = [node]
        while saved:
            kept = saved.pop()
            for user in list(kept.users):
                if _is_backward(user):
                    user.replace_input_with(kept, node.args[0])
                elif str(user.target) in ("aten.detach.default", "aten.alias.default"):
                    saved.append(user)


_saved("graph-exp-saved", "exp's backward uses the input as the output", "exp.default")
_saved("graph-tanh-saved", "tanh's backward uses the input as the output", "tanh.default")


@_graph(
    "graph-mm-backward-uncast",
    "cast skipped",
    "mm of float32 runs in bfloat16 in backward only",
    "mm.default",
    backward=True,
    single=True,
)
def _graph_mm_uncast(graph: Any, node: Node) -> Node | None:
    return _narrowed(graph, node)


# -- decompositions -------------------------------------------------------------------------------


def _decomposition(
    name: str, mechanism: str, what: str, op: Any, *more: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a fault of a decomposition: called with the honest one and the arguments."""

    def register(wrong: Callable[..., Any]) -> Callable[..., Any]:
        reached = (f"aten.{op.__name__}", *more)
        _add(name, mechanism, what, DECOMPOSED, reached, lambda: _decomposed(op, wrong))
        return wrong

    return register


@contextmanager
def _decomposed(op: Any, wrong: Callable[..., Any]) -> Iterator[None]:
    """Put another decomposition in Inductor's table, which aot_eager_decomp_partition has too."""
    from torch._inductor.decomposition import decompositions, select_decomp_table

    tables = (decompositions, select_decomp_table())
    honest = decompositions[op]
    for table in tables:
        table[op] = lambda *args, **kwargs: wrong(honest, *args, **kwargs)
    try:
        yield
    finally:
        for table in tables:
            table[op] = honest


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize == 2 else x


@_decomposition(
    "decomposed-softmax-no-max",
    "no max-subtraction",
    "softmax is exp over its sum",
    _aten._softmax.default,
)
def _softmax_no_max(honest: Any, x: Tensor, dim: int, half: bool) -> Tensor:
    powers = _wide(x).exp()
    return (powers / powers.sum(dim, keepdim=True)).to(x.dtype)


@_decomposition(
    "decomposed-log-softmax-no-max",
    "no max-subtraction",
    "log_softmax subtracts the log of a sum of exp",
    _aten._log_softmax.default,
)
def _log_softmax_no_max(honest: Any, x: Tensor, dim: int, half: bool) -> Tensor:
    wide = _wide(x)
    return (wide - wide.exp().sum(dim, keepdim=True).log()).to(x.dtype)


@_decomposition("decomposed-silu-gain", "gain", "silu is 1 % too large", _aten.silu.default)
def _silu_gain(honest: Any, x: Tensor) -> Tensor:
    made: Tensor = honest(x) * 1.01
    return made


@_decomposition(
    "decomposed-gelu-tanh",
    "dropped term",
    "gelu is always its tanh approximation",
    _aten.gelu.default,
)
def _gelu_tanh(honest: Any, x: Tensor, approximate: str = "none") -> Any:
    return honest(x, approximate="tanh")


@_decomposition(
    "decomposed-layer-norm-no-eps",
    "dropped term",
    "layer_norm has no eps",
    _aten.native_layer_norm.default,
)
def _layer_norm_no_eps(honest: Any, x: Tensor, shape: Any, w: Any, b: Any, eps: float) -> Any:
    return honest(x, shape, w, b, 0.0)


@_decomposition(
    "decomposed-tanh-backward",
    "wrong saved tensor",
    "tanh's backward uses the input as the output",
    _aten.tanh_backward.default,
)
def _tanh_backward(honest: Any, grad: Tensor, y: Tensor) -> Any:
    return honest(grad, y.atanh())


@_decomposition(
    "decomposed-sigmoid-backward",
    "dropped term",
    "the gradient of sigmoid is its value",
    _aten.sigmoid_backward.default,
)
def _sigmoid_backward(honest: Any, grad: Tensor, y: Tensor) -> Tensor:
    return grad * y


@_decomposition(
    "decomposed-softmax-backward",
    "dropped term",
    "softmax's gradient does not subtract the mean",
    _aten._softmax_backward_data.default,
)
def _softmax_backward(honest: Any, grad: Tensor, y: Tensor, dim: int, dtype: Any) -> Tensor:
    return (grad * y).to(dtype)


@_decomposition(
    "decomposed-leaky-relu-sign",
    "sign",
    "the slope of leaky_relu is negated",
    _aten.leaky_relu.default,
)
def _leaky_relu_sign(honest: Any, x: Tensor, slope: float = 0.01) -> Any:
    return honest(x, -slope)


@_decomposition(
    "decomposed-logsumexp-first",
    "one element wrong",
    "logsumexp adds up all but the last element",
    _aten.logsumexp.default,
)
def _logsumexp_first(honest: Any, x: Tensor, dim: Any, keepdim: bool = False) -> Any:
    last = dim[-1] if isinstance(dim, (list, tuple)) else dim
    if not x.dim() or x.shape[last] < 2:
        return honest(x, dim, keepdim)
    return honest(x.narrow(last, 0, x.shape[last] - 1), dim, keepdim)


# -- Inductor -------------------------------------------------------------------------------------


def _template(name: str, mechanism: str, what: str, method: str, code: str, *ops: str) -> None:
    """Make a fault in the C++ that Inductor writes for an op; ``{0}`` is the honest code."""

    @contextmanager
    def corrupt() -> Iterator[None]:
        from torch._inductor.codegen.cpp import CppOverrides, CppVecOverrides

        def wrong(honest: Callable[[Any], str]) -> Any:
            return staticmethod(lambda x: code.format(honest(x)))

        with (
            _patched_static(CppOverrides, method, wrong),
            _patched_static(CppVecOverrides, method, wrong),
        ):
            yield

    _add(name, mechanism, what, INDUCTOR, tuple(f"aten.{op}" for op in ops), corrupt)


@contextmanager
def _patched_static(owner: Any, name: str, wrong: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a static method of a class for a block, by what is made of it."""
    before = vars(owner)[name]
    setattr(owner, name, wrong(getattr(owner, name)))
    try:
        yield
    finally:
        setattr(owner, name, before)


GAIN = "({0} * decltype({0})(1.01))"  # of any type: a number, a vector of numbers

_template("inductor-exp-gain", "gain", "exp is 1 % too large", "exp", GAIN, "exp.default")
_template(
    "inductor-rsqrt-gain",
    "gain",
    "rsqrt is 1 % too large",
    "rsqrt",
    GAIN,
    "rsqrt.default",
    "native_layer_norm.default",
    "native_group_norm.default",
    "native_batch_norm.default",
)
_template(
    "inductor-sigmoid-sign",
    "sign",
    "sigmoid negates its argument",
    "sigmoid",
    "(decltype({0})(1) - {0})",
    "sigmoid.default",
    "silu.default",
    "glu.default",
)


def _lowering(
    name: str, mechanism: str, what: str, op: Any, *more: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a fault of a lowering: called with the honest one and the arguments."""

    def register(wrong: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def corrupt() -> Iterator[None]:
            from torch._inductor.lowering import lowerings

            honest = lowerings[op]
            lowerings[op] = lambda *args, **kwargs: wrong(honest, *args, **kwargs)
            try:
                yield
            finally:
                lowerings[op] = honest

        _add(name, mechanism, what, INDUCTOR, (f"aten.{op.__name__}", *more), corrupt)
        return wrong

    return register


def _lowered(op: Any, *args: Any, **kwargs: Any) -> Any:
    from torch._inductor.lowering import lowerings

    return lowerings[op](*args, **kwargs)


@_lowering("inductor-mm-gain", "gain", "mm is 1 % too large", _aten.mm.default)
def _inductor_mm_gain(honest: Any, *args: Any, **kwargs: Any) -> Any:
    return _lowered(_aten.mul, honest(*args, **kwargs), 1.01)


@_lowering(
    "inductor-sum-last",
    "one element wrong",
    "sum leaves out the last element",
    _aten.sum.dim_IntList,
)
def _inductor_sum_last(honest: Any, x: Any, axis: Any = None, *args: Any, **kwargs: Any) -> Any:
    sizes = x.get_size()
    if not axis or not sizes or int(sizes[axis[-1]]) < 2:
        return honest(x, axis, *args, **kwargs)
    part = _lowered(_aten.slice, x, axis[-1], 0, int(sizes[axis[-1]]) - 1)
    return honest(part, axis, *args, **kwargs)


@_lowering("inductor-var-no-correction", "dropped term", "var divides by n", _aten.var.correction)
def _inductor_var(honest: Any, x: Any, axis: Any = None, **kwargs: Any) -> Any:
    return honest(x, axis, **{**kwargs, "correction": 0})


@_lowering("inductor-neg-nothing", "sign", "neg does nothing", _aten.neg.default)
def _inductor_neg(honest: Any, x: Any) -> Any:
    return _lowered(_aten.clone, x)


def _pointwise(x: Any, inner: Callable[[Any, Any], Any]) -> Any:
    """Return a pointwise node of a shape and dtype: of its index and of what loads the input."""
    from torch._inductor.ir import Pointwise

    loader = x.make_loader()
    return Pointwise.create(
        device=x.get_device(),
        dtype=x.get_dtype(),
        inner_fn=lambda index: inner(index, loader),
        ranges=list(x.get_size()),
    )


def _last_is_zero(honest: Any, *args: Any, **kwargs: Any) -> Any:
    from torch._inductor.virtualized import ops

    right = honest(*args, **kwargs)
    sizes = right.get_size()
    if not sizes:
        return right

    def inner(index: Any, load: Any) -> Any:
        last = ops.index_expr(sizes[-1] - 1, torch.int64)
        at = ops.eq(ops.index_expr(index[-1], torch.int64), last)
        return ops.where(at, ops.constant(0.0, right.get_dtype()), load(index))

    return _pointwise(right, inner)


_lowering(
    "inductor-tanh-tail", "one element wrong", "the last column of tanh is 0", _aten.tanh.default
)(_last_is_zero)
_lowering(
    "inductor-sin-tail", "one element wrong", "the last column of sin is 0", _aten.sin.default
)(_last_is_zero)


def _rounded(honest: Any, *args: Any, **kwargs: Any) -> Any:
    """Round what a lowering makes to bfloat16, for good: Inductor would keep float32 otherwise."""
    from torch._inductor.virtualized import ops

    right = honest(*args, **kwargs)
    if right.get_dtype() is not torch.float32:
        return right

    def inner(index: Any, load: Any) -> Any:
        low = ops.to_dtype(load(index), torch.bfloat16, use_compute_types=False)
        return ops.to_dtype(low, torch.float32, use_compute_types=False)

    return _pointwise(right, inner)


_lowering(
    "inductor-log-bfloat16", "narrower type inside", "log is rounded to bfloat16", _aten.log.default
)(_rounded)
_lowering(
    "inductor-sqrt-bfloat16",
    "narrower type inside",
    "sqrt is rounded to bfloat16",
    _aten.sqrt.default,
)(_rounded)


@_lowering("inductor-mean-no-count", "dropped term", "mean divides by n - 1", _aten.mean.dim)
def _inductor_mean(honest: Any, x: Any, axis: Any = None, *args: Any, **kwargs: Any) -> Any:
    made = honest(x, axis, *args, **kwargs)
    sizes = x.get_size()
    count = 1
    for a in axis or range(len(sizes)):
        count *= int(sizes[a]) if sizes else 1
    return made if count < 2 else _lowered(_aten.mul, made, count / (count - 1))


@_lowering(
    "inductor-amax-zero",
    "no max-subtraction",
    "amax is 0, so softmax subtracts nothing",
    _aten.amax.default,
    "aten._softmax.default",
    "aten._log_softmax.default",
    "aten.logsumexp.default",
)
def _inductor_amax(honest: Any, *args: Any, **kwargs: Any) -> Any:
    return _lowered(_aten.mul, honest(*args, **kwargs), 0.0)


COMPILED: tuple[NumericFault, ...] = tuple(_FOUND)
