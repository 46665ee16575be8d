"""Contracts of an op's backward: a second pass, a later write, gradients alone, twice derived.

Each returns what was compared, or raises `Broken`, `Skipped` or `Unjudged`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from amp_fuzz.backends import prelude
from amp_fuzz.backends.harness import Observation
from amp_fuzz.interfaces.check import messages
from amp_fuzz.interfaces.check.subject import Subject
from amp_fuzz.interfaces.check.trees import leaves_of, mapped
from amp_fuzz.interfaces.check_op.passes import Passes, joined
from amp_fuzz.interfaces.check_op.tried import Broken, Skipped, Tried, count, gradients
from amp_fuzz.oracle import compare
from amp_fuzz.oracle.compare import same
from amp_fuzz.reports.printable import plural

__all__ = ["double", "doubled", "modified", "needed", "retained", "symmetric"]


def retained(tried: Tried) -> str:
    """Judge a second pass over a retained graph: the same gradients, bit for bit."""
    want = tried.plain()
    with tried.passes.calling() as one:
        one.forward()
        first, second = one.backward(keep=True), one.backward(keep=True)
    for which, got in (("a pass with retain_graph=True", first), ("the second pass", second)):
        if got.raised is not None:
            said = messages.raised(got.raised)
            raise Broken(f"{which} over a retained graph raises {said}", got.raised.text)
        if found := compare(gradients(want), got):
            where = tried.passes.names(found.where)
            raise Broken(f"{which} over a retained graph gives {tried.said(found)}", where)
    return f"{count(want)}, twice over one graph"


def modified(tried: Tried) -> str:
    """Judge a backward pass after a write in place: an error, or the same gradients."""
    want = gradients(tried.plain())
    with tried.passes.calling() as one:
        one.forward()
        names = [*one.tensors, *one.outputs]
    refused = unaffected = 0
    for name in names:
        with tried.passes.calling() as one:
            one.forward()
            if not _write({**one.tensors, **one.outputs}[name]):
                continue
            got = one.backward()
        if got.raised is not None:
            refused += 1
            continue
        if found := compare(want, got):
            where = tried.passes.names(found.where)
            raise Broken(
                f"{name} is written in place before backward, and no error: {where} "
                f"is {found.observed}, expected {found.expected} or an error",
                name,
            )
        unaffected += 1
    if not refused + unaffected:
        raise Skipped("none of its tensors can be written in place")
    written = plural(refused + unaffected, "tensor")
    return f"{written} written in place: {refused} an error, {unaffected} without effect"


def _write(tensor: torch.Tensor) -> bool:
    """Write other values of the same domain in place; return whether any value changed."""
    with torch.no_grad():
        before = tensor.detach().clone()
        flipped = before.flip(tuple(range(before.dim())))
        if tensor.dtype is torch.bool:
            new = ~before
        elif tensor.is_floating_point() or tensor.is_complex():
            new = flipped * -1.5 + 0.25
        else:
            new = flipped  # an index stays in its range
        try:
            tensor.copy_(new)
        except RuntimeError:  # its elements share memory, or it is one of several views
            return False
        return not same(before, tensor.detach())


def needed(tried: Tried) -> str:
    """Judge each gradient with no other input that requires one: the same."""
    want = tried.plain()
    with tried.passes.calling() as one:
        leaves = one.leaves()
    if len(leaves) < 2:
        raise Skipped("only one of its tensors requires a gradient")
    for name in leaves:
        with tried.passes.calling(trained={name}) as one:
            got = joined(one.forward(), one.backward)
        if got.raised is not None:
            raise Broken(
                f"with a gradient for {name} alone it raises {messages.raised(got.raised)}",
                got.raised.text,
            )
        label = tried.passes.names.label("w", f"{name}.grad", ".grad")
        wanted = Observation({label: want.values[label]})
        rounding = tried.rounding(tried.target.subject, want, got)
        if found := compare(wanted, got, rounding=rounding):
            raise Broken(f"with a gradient for {name} alone, {tried.said(found)}", f"{name}.grad")
    return f"{plural(len(leaves), 'gradient')}, each alone and all together"


def double(tried: Tried) -> str:
    """Judge the second derivative in float64: right, or refused with a RuntimeError."""
    subject = doubled(tried.target.subject)
    passes = replace(tried.passes.bare(), subject=subject)
    with passes.calling() as one:
        seen = joined(one.forward(), one.backward)
        if seen.raised is not None:
            raise Skipped(f"it does not run in float64: {messages.raised(seen.raised)}")
        leaves = [n for n in one.leaves() if one.tensors[n].grad is not None]
    if not leaves:
        raise Skipped("it has no gradient")
    if (refusal := _twice(passes)) is not None:
        if isinstance(refusal, RuntimeError):
            return f"refused: {messages.first_line(str(refusal))}"
        said = f"{type(refusal).__name__}: {messages.first_line(str(refusal))}"
        raise Broken(f"it raises {said}, which refuses nothing clearly")
    wrong = ""
    for shift in (0.0, 0.01, 0.02):  # at a kink, a number says nothing
        error = _checked_twice(passes, leaves, shift)
        if error is None:
            return "torch.autograd.gradgradcheck passes, in float64"
        wrong = wrong or messages.first_line(str(error))
    raise Broken(f"torch.autograd.gradgradcheck fails in float64: {wrong}")


def _twice(passes: Passes) -> Exception | None:
    """Return the error of a second backward pass through the first, or None.

    `torch.autograd.grad`, which gradgradcheck calls, goes around the node that refuses for
    `once_differentiable`: it does not lead to the inputs.
    """
    with passes.calling() as one:
        one.forward()
        leaves = [one.tensors[name] for name in one.leaves()]
        starts = prelude.trains(one.outputs.values())  # type: ignore[no-untyped-call]
        cotangents = [torch.ones_like(t, requires_grad=True) for t in starts]
        try:
            grads: Sequence[torch.Tensor | None] = torch.autograd.grad(
                starts, leaves, cotangents, create_graph=True, allow_unused=True
            )
            ends = [g for g in grads if g is not None and g.requires_grad]
            if ends:
                torch.autograd.backward(ends, [torch.ones_like(g) for g in ends])
        except Exception as error:
            return error
    return None


def _checked_twice(passes: Passes, leaves: list[str], shift: float) -> Exception | None:
    """Return the error of gradgradcheck, or None. shift: how far the inputs are moved first."""
    with passes.calling() as one:
        tensors = [one.tensors[name] for name in leaves]
        mirrored = {id(t) for t in tensors if symmetric(t)}
        generator = torch.Generator().manual_seed(passes.subject.seed)
        with torch.no_grad():
            for tensor in tensors:
                noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
                tensor.add_(noise.to(tensor) * shift)
        kept = passes.subject.kept()

        def function(*_: torch.Tensor) -> tuple[torch.Tensor, ...]:
            torch.manual_seed(passes.subject.seed)
            args, kwargs = mapped(
                lambda leaf: (leaf + leaf.mH) / 2 if id(leaf) in mirrored else leaf,
                (one.args, one.kwargs),
            )
            result = passes.subject.function(*args, **kwargs)
            return tuple(
                t for _, t in leaves_of(result) if isinstance(t, torch.Tensor) and t.requires_grad
            )

        try:
            torch.autograd.gradgradcheck(function, tuple(tensors), fast_mode=True)
        except Exception as error:
            return error
        finally:
            kept.restore()
    return None


def symmetric(tensor: torch.Tensor) -> bool:
    """Return whether it may have to stay symmetric, as an input of a Cholesky decomposition."""
    square = tensor.dim() >= 2 and tensor.shape[-1] == tensor.shape[-2]
    return square and torch.equal(tensor, tensor.mH)


def doubled(subject: Subject) -> Subject:
    """Return a subject whose floating inputs, and whose module, are float64."""

    def double(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        return leaf.detach().double().requires_grad_(leaf.requires_grad)

    args, kwargs = mapped(double, (subject.args, dict(subject.kwargs)))
    function = subject.function
    if isinstance(function, torch.nn.Module):
        function = copy.deepcopy(function).double()
    return Subject.of(function, args, kwargs, subject.seed)
