"""The contract of a backward's autocast state: it is that of its forward, wherever it is called."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from amp_fuzz.backends.harness import Observation
from amp_fuzz.cases.program import Autocast
from amp_fuzz.interfaces.check import messages
from amp_fuzz.interfaces.check_op.passes import Pass
from amp_fuzz.interfaces.check_op.tried import Broken, Skipped, Tried, Unjudged
from amp_fuzz.oracle import compare
from amp_fuzz.reports.printable import plural

__all__ = ["placed"]


def placed(tried: Tried) -> str:
    """Judge each backward of the user's own: it returns the same wherever it is called."""
    want = _Backward.of(tried, ())
    if want.forward.raised is not None:
        raise Unjudged(f"it raises: {messages.raised(want.forward.raised)}")
    if not want.calls and want.seen.raised is None:
        raise Skipped("it has no backward of its own")
    for name, contexts in _placements(tried.contexts):
        got = _Backward.of(tried, contexts)
        if want.seen.raised is not None and got.seen.raised is None:
            said = messages.raised(want.seen.raised)
            raise Broken(
                f"after the context, where autocast is off, backward raises {said}; "
                f"{name} it does not",
                want.seen.raised.text,
            )
        if want.seen.raised is None and got.seen.raised is not None:
            said = messages.raised(got.seen.raised)
            raise Broken(f"{name}, backward raises {said}", got.seen.raised.text)
        for first, then in zip(want.calls, got.calls, strict=False):
            if said := first.unlike(then):
                raise Broken(f"{name}, {first.name}.backward gives {said}", first.name)
    if want.seen.raised is not None:
        raise Unjudged(f"its backward raises: {messages.raised(want.seen.raised)}")
    return f"{plural(len(want.calls), 'backward')} of its own, the same wherever it runs"


def _placements(contexts: tuple[Autocast, ...]) -> Iterator[tuple[str, tuple[Autocast, ...]]]:
    if contexts:
        yield "inside the context", contexts
    ours = {c.dtype for c in contexts if c.enabled}
    for dtype in ("bfloat16", "float16"):
        if dtype not in ours:
            yield f"under {dtype} autocast", (Autocast(dtype=dtype),)


@dataclass(slots=True)
class _NodeCall:
    """One call of a user's backward: the gradients that it got, and those that it returned."""

    name: str
    given: tuple[torch.Tensor | None, ...] = ()
    made: tuple[torch.Tensor | None, ...] = ()

    def unlike(self, other: _NodeCall) -> str:
        """Return how it returns something else for the same gradients, or ""."""
        if any(map(_differ, self.given, other.given)):
            return ""  # the op behind it differs
        for number, (want, got) in enumerate(zip(self.made, other.made, strict=False)):
            if said := _differ(want, got):
                return f"another gradient {number}: {said}"
        return ""


def _differ(want: torch.Tensor | None, got: torch.Tensor | None) -> str:
    found = compare(Observation({"": want}), Observation({"": got}))
    return f"{found.observed}, after the context {found.expected}" if found else ""


@dataclass(frozen=True, slots=True)
class _Backward:
    """A backward pass with the calls of Python functions in it."""

    forward: Observation
    seen: Observation
    calls: tuple[_NodeCall, ...]

    @classmethod
    def of(cls, tried: Tried, under: tuple[Autocast, ...]) -> _Backward:
        with tried.passes.calling() as one:
            forward = one.forward()
            if forward.raised is not None:
                return cls(forward, Observation(), ())
            calls = tuple(map(_watched, _own_nodes(one)))
            return cls(forward, one.backward(under=under), calls)


def _own_nodes(one: Pass) -> list[Any]:
    """Return the nodes of the graph whose backward the user wrote, in the order of a search."""
    found: dict[Any, None] = {}
    ahead = [t.grad_fn for t in one.outputs.values() if t.grad_fn is not None]
    while ahead:
        node = ahead.pop()
        if node in found:
            continue
        found[node] = None
        ahead += [n for n, _ in node.next_functions if n is not None]
    return [node for node in found if _users(node)]


def _users(node: Any) -> bool:
    """Return whether a node is a user's: an autograd.Function, or register_autograd's."""
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return False
    module = str(getattr(node._forward_cls, "__module__", ""))  # type: ignore[attr-defined]
    return module.partition(".")[0] != "torch" or module.startswith("torch._library")


def _watched(node: Any) -> _NodeCall:
    """Return a record of a node's call, which its hooks fill."""
    call = _NodeCall(type(node).__name__.removesuffix("Backward"))

    def before(given: tuple[torch.Tensor | None, ...]) -> None:
        call.given = _copies(given)

    def after(made: tuple[torch.Tensor | None, ...], given: Any) -> None:
        call.made = _copies(made)

    node.register_prehook(before)
    node.register_hook(after)
    return call


def _copies(tensors: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if t is None else t.detach().clone() for t in tensors)
