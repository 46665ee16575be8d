"""Ops of a forward and of its backward pass belong to statements of the user's code."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_fuzz.interfaces.check.subject import Subject
from amp_fuzz.interfaces.check.trace import followed
from amp_fuzz.interfaces.precision.sites import Place, Places
from amp_fuzz.interfaces.precision.watch import Watch


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        z = torch.sin(y)
        return z * torch.cos(y)


class Recomputed(Model):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return made


def _ops(model: Model) -> list[tuple[str, Place, bool]]:
    x = torch.ones(2, 3)
    with followed(Subject.of(model, (x,)), lambda *called: None) as stack:
        watch = Watch(Places(stack), frozenset())
        with watch.twin:
            model(x).sum().backward()
    return [
        (op, place, backward)
        for (place, backward), tally in watch.tallies.items()
        for op in tally.ops
    ]


def _line(text: str) -> int:
    lines, first = inspect.getsourcelines(Model.forward)
    return next(first + i for i, line in enumerate(lines) if text in line)


def test_an_op_is_of_the_submodule_and_line_that_calls_it() -> None:
    forward = {name: place for name, place, backward in _ops(Model()) if not backward}
    assert forward["addmm"] == Place("inner", __file__, _line("self.inner"))
    assert forward["sin"] == Place("", __file__, _line("sin"))


def test_an_op_of_the_backward_pass_is_of_the_statement_whose_gradient_it_computes() -> None:
    """It notices if autograd's private numbers of nodes mean something else."""
    backward = [(name, place.line) for name, place, backward in _ops(Model()) if backward]
    assert ("neg", _line("torch.cos")) in backward
    assert ("cos", _line("torch.sin")) in backward
    assert ("mm", _line("self.inner")) in backward
    assert ("mm", _line("torch.sin")) not in backward


def test_what_a_checkpoint_computes_again_is_of_its_own_statement() -> None:
    again = [(name, place.line) for name, place, backward in _ops(Recomputed()) if backward]
    assert ("addmm", _line("self.inner")) in again
    assert ("cos", _line("torch.sin")) in again
