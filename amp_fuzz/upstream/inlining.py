"""Call the functions of a program otherwise than `torch.autograd.Function.apply` does.

Tracers take an autograd.Function apart, each in its own way: for the imitations of their bugs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias
from unittest import mock

import torch

from amp_fuzz.backends import custom_functions

__all__ = ["Apply", "applied_by", "inlined", "of_a_program"]

Apply: TypeAlias = Callable[..., Any]
"""Calls a function: given what calls it otherwise, the function's class, and the arguments."""

_OURS = "amp_fuzz"


def of_a_program(cls: type) -> bool:
    """Return whether a function is of a program, or a user's: not torch's, nor of the harness."""
    if cls.__module__ == custom_functions.__name__:
        return True
    return cls.__module__.partition(".")[0] not in ("torch", _OURS)


class _Context(torch.autograd.function.FunctionCtx):
    """The ``ctx`` of a forward that is called without its function: nobody reads it."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.needs_input_grad = tuple(isinstance(a, torch.Tensor) and a.requires_grad for a in args)


def inlined(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a function's forward, called as a plain function."""
    apart = cls.setup_context is not torch.autograd.Function.setup_context
    return cls.forward(*(() if apart else (_Context(args),)), *args, **kwargs)


@contextmanager
def applied_by(apply: Apply) -> Iterator[None]:
    """Call the functions of a program by another function for a block."""
    owners = (vars(c) for c in torch.autograd.Function.__mro__ if "apply" in vars(c))
    honest = next(owners)["apply"]  # the class method itself, of Python or of C++

    def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        own = honest.__get__(None, cls)
        return apply(own, cls, *args, **kwargs) if of_a_program(cls) else own(*args, **kwargs)

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(call)):
        yield
