"""What AOTAutograd makes of a program, where autocast shows it: imitated for `quirks`.

AOTAutograd runs a program once under modes of its own and keeps a graph of the ops that reach
them, without those that write. What follows, the reference can do as well: autocast decides about
those ops alone, and their kernels run without it; ``out=`` is a copy of a result; the weight cache
is not the one around the program; and Python functions that torch overrides for modes are called
again from what they handed on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from amp_fuzz.backends.imitated import active_quirks
from amp_fuzz.reference import dispatch
from amp_fuzz.reference.cache import own_cache

__all__ = ["QUIRKS", "differentiated", "traced"]


class _Kernels(TorchDispatchMode):
    """Run the kernel of every op that is dispatched without autocast.

    Autocast has decided about the op before a mode sees it. A kernel that calls other ops (the
    pseudo-inverse: ``matmul``) is cast inside in eager, and is one node of a graph. In inference
    mode ops that are made of others reach a mode whole.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with dispatch.exclude():
            return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    """Call every function again from what it hands on to a mode, which may be less than it got."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def _ranks() -> Iterator[None]:
    """Leave the ``out=`` of ``matrix_rank`` as it is, and return it."""
    honest: Callable[..., torch.Tensor] = torch.linalg.matrix_rank

    def matrix_rank(*args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        if out is None:
            return honest(*args, **kwargs)
        honest(*args, out=torch.empty_like(out), **kwargs)  # it may raise
        return out

    torch.linalg.matrix_rank = matrix_rank
    try:
        yield
    finally:
        torch.linalg.matrix_rank = honest


@contextmanager
def _dropouts() -> Iterator[None]:
    """Copy what a dropout leaves as it is, as its decomposition does; eager returns that itself."""
    honest: Callable[..., torch.Tensor] = torch.dropout

    def dropout(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = honest(x, *args, **kwargs)
        return made.clone() if made is x else made

    with (
        patch.object(torch, "dropout", dropout),
        patch.object(torch._VF, "dropout", dropout),  # what torch.nn.functional calls
    ):
        yield


@contextmanager
def _layers() -> Iterator[None]:
    """Compute ``torch.lstm`` cell by cell where its decomposition does and eager's kernel does not.

    Eager asks about the dtype of the input alone before it takes oneDNN's layer, which autocast
    casts. The decomposition wants every tensor of float32 or bfloat16, and an input without grad
    (``select_one_layer_lstm_function`` in ``torch/_decomp/decompositions.py``).
    """
    honest: Callable[..., Any] = torch.lstm

    def lstm(*args: Any) -> Any:
        x, state, weights, _, _, dropout, *_ = args
        if not isinstance(state, (list, tuple)) or dropout or state[0].shape != state[1].shape:
            return honest(*args)
        dtypes = {t.dtype for t in (x, *state, *weights)}
        fused = dtypes <= {torch.float32, torch.bfloat16} and not x.requires_grad
        return honest(*args) if fused else _by_cells(*args)

    with patch.object(torch, "lstm", lstm):
        yield


def _by_cells(
    x: torch.Tensor,
    state: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    bias: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    first: bool,
) -> tuple[torch.Tensor, ...]:
    """Return what ``torch.lstm`` does, of its arguments, by products and pointwise ops."""
    x = x.transpose(0, 1) if first else x
    size, directions = 4 if bias else 2, 1 + bidirectional
    last: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in range(layers):
        made: list[torch.Tensor] = []
        for k in range(layer * directions, (layer + 1) * directions):
            own = weights[k * size : (k + 1) * size]
            steps, kept = _steps(x, state[0][k], state[1][k], *own, reverse=len(made) == 1)
            made.append(steps)
            last.append(kept)
        x = torch.cat(made, -1) if bidirectional else made[0]
    hidden, cells = zip(*last, strict=True)
    return x.transpose(0, 1) if first else x, torch.stack(hidden), torch.stack(cells)


def _steps(
    x: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor,
    of_input: torch.Tensor,
    of_hidden: torch.Tensor,
    *biases: torch.Tensor,
    reverse: bool,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Return the steps of one direction of one layer, and the states after the last of them."""
    linear = torch.nn.functional.linear
    hidden, cell = hidden.unsqueeze(0), cell.unsqueeze(0)
    given = linear(x, of_input, *biases[:1])
    steps = []
    for step in given.flip(0) if reverse else given:
        gates = linear(hidden, of_hidden, *biases[1:]) + step
        enter, forget, new, leave = gates.chunk(4, 2)
        cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
        hidden = leave.sigmoid() * cell.tanh()
        steps.append(hidden)
    if reverse:
        steps.reverse()
    return torch.cat(steps, 0), (hidden.squeeze(0), cell.squeeze(0))


@contextmanager
def _fractions() -> Iterator[None]:
    """Compute ``addcdiv(x, a, b, value=v)`` as ``x + (a / b) * v``, each step rounded.

    Dynamo writes the function so, and the methods ``addcdiv_`` and ``addcmul_``, whose sum it
    copies into ``x``; each only where it is given a `value`
    (``torch._dynamo.config.enable_dynamo_decompositions``).
    """
    honest: Callable[..., torch.Tensor] = torch.addcdiv

    def addcdiv(*args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) != 3 or kwargs.keys() != {"value"}:
            return honest(*args, **kwargs)
        x, a, b = args
        return torch.add(x, torch.mul(torch.div(a, b), kwargs["value"]))

    with ExitStack() as stack:
        for name, first in (("addcdiv_", torch.div), ("addcmul_", torch.mul)):
            stack.enter_context(patch.object(torch.Tensor, name, _in_place(name, first)))
        stack.enter_context(patch.object(torch, "addcdiv", addcdiv))
        yield


def _in_place(name: str, first: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    honest = getattr(torch.Tensor, name)

    def method(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) != 2 or kwargs.keys() != {"value"}:
            return cast(torch.Tensor, honest(x, *args, **kwargs))
        return x.copy_(first(*args) * kwargs["value"] + x)

    return method


@contextmanager
def _functions() -> Iterator[dict[int, torch.Tensor]]:
    """Imitate what the functions do that forget an argument.

    ``chain_matmul`` forgets its ``out=``. What is computed from its result is right, and dynamo
    returns the ``out=`` all the same: that is what is yielded, by the id of the result. Modules
    that leave their fast path where a mode is on do not see this one: dynamo calls them in none.
    """
    honest: Callable[..., torch.Tensor] = torch.chain_matmul
    forgotten: dict[int, torch.Tensor] = {}

    def chain_matmul(*matrices: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        product = honest(*matrices)
        if out is not None:
            forgotten[id(product)] = out
        return product

    def has_torch_function(tensors: Iterable[Any]) -> bool:
        plain = (torch.Tensor, torch.nn.Parameter)
        return any(isinstance(t, torch.Tensor) and type(t) not in plain for t in tensors)

    with (
        patch.object(torch, "chain_matmul", chain_matmul),
        patch.object(torch.overrides, "has_torch_function", has_torch_function),
        _Functions(),
    ):
        yield forgotten


class _Copied(TorchDispatchMode):
    """Copy a result into an ``out=`` of whatever dtype and strides.

    Kernels refuse other dtypes, which is no error here, and memory that overlaps, which is one.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = dict(kwargs or {})
        functional, names = _without_out(func)
        if functional is None:
            with dispatch.kept():
                return func(*args, **given)
        outs = [given.pop(name) for name in names]
        made = functional(*args, **given)
        results = [made] if len(names) == 1 else made
        if all(o.dtype == r.dtype for o, r in zip(outs, results, strict=True)):
            with dispatch.kept():
                func(*args, **(kwargs or {}))  # it refuses memory that overlaps
        copies = [o.resize_(r.shape).copy_(r) for o, r in zip(outs, results, strict=True)]
        return copies[0] if len(names) == 1 else tuple(copies)


@functools.cache
def _without_out(overload: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the overload of the same arguments but ``out=``, and the names of those.

    None: it has none that are tensors, or does what may be done once only: it writes something
    else, or draws random numbers.
    """
    arguments = overload._schema.arguments
    written = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    outs = tuple(a.name for a in written if a.is_out and str(a.type) == "Tensor")
    random = torch.Tag.nondeterministic_seeded in overload.tags
    if not outs or len(outs) < len(written) or random:
        return None, ()
    kept = [(a.name, str(a.type)) for a in arguments if not a.is_out]
    packet = overload._overloadpacket
    for name in packet.overloads():
        found = getattr(packet, name)
        if [(a.name, str(a.type)) for a in found._schema.arguments] == kept:
            return found, outs
    return None, ()


@contextmanager
def _out() -> Iterator[None]:
    """Call an op that has an ``out=`` without it, and copy the result, as functionalisation does.

    Autocast leaves ``out=`` variants alone, but of a composite op not the op itself. An ``out=`` of
    another dtype is no error, and none has strides that a kernel overlooks.
    """
    for name in _composite_outs():
        _register(name)
    with _Copied():  # type: ignore[no-untyped-call]
        yield


@functools.cache
def _composite_outs() -> tuple[str, ...]:
    """Return the composite ops that have one ``out=``, as ``matmul.out``."""
    schemas: Any = torch._C._jit_get_all_schemas()
    names = [s.name[6:] for s in schemas if s.name[:6] == "aten::" and s.overload_name == "out"]
    found = [f"{n}.out" for n in names if dispatch.overload_of(n) is not None]
    overloads = [dispatch.overload_of(n) for n in found]
    return tuple(
        name
        for name, overload in zip(found, overloads, strict=True)
        if overload is not None
        and dispatch.is_composite(overload)
        and len(overload._schema.returns) == 1
    )


@functools.cache
def _register(name: str) -> None:
    overload, functional = dispatch.overload_of(name), dispatch.overload_of(name[:-4])
    assert overload is not None
    assert functional is not None

    def kernel(keyset: Any, *args: Any, out: torch.Tensor, **kwargs: Any) -> Any:
        if "compile-out" not in active_quirks():
            return overload.redispatch(dispatch.after(keyset), *args, out=out, **kwargs)
        result = functional(*args, **kwargs)
        with torch.no_grad():
            return out.resize_(result.shape).copy_(result)

    dispatch.register(name, kernel)


QUIRKS: dict[str, Callable[[], Any]] = {
    "compile-addcdiv": _fractions,
    "compile-dropout": _dropouts,
    "compile-functions": _functions,
    "compile-kernels": _Kernels,
    "compile-lstm": _layers,
    "compile-matrix-rank": _ranks,
    "compile-out": _out,
    "compile-weight-cache": own_cache,
}
"""The quirks for which a program runs in a context, and that context."""


def traced(program: Callable[..., Any], *, backward: bool = True) -> Callable[..., Any]:
    """Return a program that runs as a graph of AOTAutograd does, in what the quirks ask for.

    backward: whether a backward pass follows; else one is traced all the same.
    """

    def run(*inputs: torch.Tensor) -> Any:
        with ExitStack() as stack:
            names = sorted(active_quirks() & QUIRKS.keys())
            entered = {name: stack.enter_context(QUIRKS[name]()) for name in names}
            outputs = program(*inputs)
            forgotten = entered.get("compile-functions", {})
            outputs = tuple(forgotten.get(id(o), o) for o in outputs)
            if not backward:
                _differentiate(inputs, outputs)
        viewed = "compile-views" in active_quirks() and torch.is_grad_enabled()
        return tuple(map(_again, outputs)) if viewed else outputs

    return run


def differentiated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose backward pass is traced when it is called, if quirks ask for it."""

    def run(*inputs: torch.Tensor) -> Any:
        outputs = function(*inputs)
        _differentiate(inputs, outputs)
        return outputs

    return run


def _differentiate(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    """Run the backward pass of a program, for the error that it may raise."""
    if "compile-traced-backward" not in active_quirks():
        return
    made = [output for output in outputs if output.requires_grad]
    weights = [x for x in inputs if x.requires_grad]
    if made and torch.is_grad_enabled():
        ones = [torch.ones_like(output) for output in made]
        torch.autograd.grad(made, weights, ones, retain_graph=True, allow_unused=True)


def _again(output: torch.Tensor) -> torch.Tensor:
    """Return a view that was made under ``no_grad`` as one that is made under grad."""
    base = output._base
    if base is None or not (output.requires_grad and output.grad_fn is None):
        return output
    return base.as_strided(output.shape, output.stride(), output.storage_offset())
