"""The contract of `torch.vmap`: it gives what one call after another gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from amp_fuzz.interfaces.check import messages
from amp_fuzz.interfaces.check.subject import Subject
from amp_fuzz.interfaces.check_op.target import Target, tensor_dims
from amp_fuzz.interfaces.check_op.tried import Broken, Tried, Unjudged
from amp_fuzz.oracle import compare
from amp_fuzz.reports.printable import plural

__all__ = ["vectorised"]


def vectorised(tried: Tried) -> str:
    """Judge `torch.vmap` of the op, by the rounding of one call after another."""
    target, subject = tried.target, tried.target.subject
    count = 0
    for dims in _in_dims(target):
        given = pytree.tree_map(
            lambda leaf, dim: leaf if dim is None else _pair(leaf, dim), subject.args, dims
        )
        looped = Subject.of(_loop(subject, dims), given, None, subject.seed)
        batched = Subject.of(_vmap(subject, dims), given, None, subject.seed)
        want = replace(tried.passes, subject=looped).plain()
        if want.raised is not None:
            raise Unjudged(f"it raises: {messages.raised(want.raised)}")
        got = replace(tried.passes, subject=batched).plain()
        rounding = tried.rounding(looped, want, got)
        if found := compare(want, got, rounding=rounding):
            if got.raised is not None and found.kind == "raise":
                said = messages.raised(got.raised)
                raise Broken(f"under vmap with in_dims={dims} it raises {said}", got.raised.text)
            where = tried.passes.names(found.where)
            raise Broken(f"under vmap with in_dims={dims}, {tried.said(found)}", where)
        count += 1
    return f"{plural(count, 'choice')} of in_dims, as one call after another"


def _in_dims(target: Target) -> Iterator[Any]:
    """Yield the dims to map: the caller's, or all tensors, then the first tensor alone."""
    if target.in_dims is not None:
        yield target.in_dims
        return
    every = tensor_dims(target.subject.args)
    yield every
    leaves, spec = pytree.tree_flatten(every, is_leaf=lambda leaf: leaf is None)
    first = leaves.index(0)
    if leaves.count(0) > 1:
        alone = [0 if i == first else None for i in range(len(leaves))]
        yield pytree.tree_unflatten(alone, spec)


def _pair(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    both = [tensor.detach(), tensor.detach().flip(tuple(range(tensor.dim())))]
    return torch.stack(both, dim).requires_grad_(tensor.requires_grad)


def _loop(subject: Subject, dims: Any) -> Callable[..., Any]:
    function, kwargs = subject.function, dict(subject.kwargs)

    def loop(*args: Any) -> Any:
        def one(number: int) -> Any:
            return function(
                *pytree.tree_map(
                    lambda leaf, dim: leaf if dim is None else leaf.select(dim, number), args, dims
                ),
                **kwargs,
            )

        return pytree.tree_map(lambda *outs: torch.stack(outs), one(0), one(1))

    return loop


def _vmap(subject: Subject, dims: Any) -> Callable[..., Any]:
    function, kwargs = subject.function, dict(subject.kwargs)

    def batched(*args: Any) -> Any:
        return torch.vmap(lambda *one: function(*one, **kwargs), in_dims=tuple(dims))(*args)

    return batched
