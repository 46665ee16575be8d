"""What is checked: a callable, its inputs, and all state that a call of it may change.

A call gets fresh copies of its inputs and starts from the same state each time: parameters,
buffers, gradients, attributes of modules, train or eval mode, random generators. Afterwards all of
it is as it was before.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

__all__ = ["CheckError", "Subject", "leaves_of"]


class CheckError(ValueError):
    """What cannot be checked as it was given. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A callable with its inputs.

    modules: those that it holds, by the prefix of their parameters' names. tensors: those outside
    modules that it closes over. The names are what a report calls them.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    modules: Mapping[str, torch.nn.Module] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> Subject:
        """Return what to check. Raises `CheckError` for what is compiled already, or lazy."""
        _check(function)
        modules: dict[str, torch.nn.Module] = {}
        tensors: dict[str, torch.Tensor] = {}
        if isinstance(function, torch.nn.Module):
            modules[""] = function
        else:
            _gather(function, modules, tensors)
        kwargs = dict(kwargs or {})
        for path, leaf in leaves_of((tuple(args), kwargs)):
            if isinstance(leaf, torch.nn.Module):
                modules[f"input{path}"] = leaf
        for name, module in modules.items():
            lazy = [n for n, t in _members(module) if torch.nn.parameter.is_lazy(t)]
            if lazy:
                raise CheckError(
                    f"{name or type(module).__name__}.{lazy[0]} has no shape yet: call the lazy "
                    "module once before it is checked"
                )
        return cls(function, tuple(args), kwargs, seed, modules, tensors)

    @property
    def name(self) -> str:
        """Its name, as a report calls it."""
        if isinstance(self.function, torch.nn.Module):
            return type(self.function).__name__
        inner = self.function
        while isinstance(inner, functools.partial):
            inner = inner.func
        return str(getattr(inner, "__qualname__", type(inner).__name__))

    def state(self) -> dict[str, torch.Tensor]:
        """Return every parameter, buffer and tensor that it holds, each once, by name."""
        found: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for prefix, module in self.modules.items():
            for name, tensor in _members(module):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[f"{prefix}.{name}" if prefix else name] = tensor
        for name, tensor in self.tensors.items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found[name] = tensor
        return found

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the tensors among its inputs by name: ``input[0]``, ``input['mask']``."""
        return _inputs(self.args, self.kwargs)

    def fresh(
        self, copy: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return its inputs with each tensor copied, one that comes twice once."""
        copies: dict[int, torch.Tensor] = {}

        def again(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) not in copies:
                copies[id(leaf)] = copy(leaf).requires_grad_(leaf.requires_grad)
            return copies[id(leaf)]

        args, kwargs = pytree.tree_map(again, (self.args, dict(self.kwargs)))
        return args, kwargs

    @contextmanager
    def moved(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """Put copies of its modules' parameters and buffers in their place for a block."""
        copies: dict[int, torch.Tensor] = {}

        def again(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in copies:
                made = copy(tensor)
                if isinstance(tensor, torch.nn.Parameter):
                    made = torch.nn.Parameter(made, tensor.requires_grad)
                copies[id(tensor)] = made
            return copies[id(tensor)]

        held: list[dict[str, Any]] = [
            table
            for module in self._submodules()
            for table in (module._parameters, module._buffers)
        ]
        before = [dict(table) for table in held]
        try:
            for table in held:
                for name, tensor in table.items():
                    if tensor is not None:
                        table[name] = again(tensor)
            yield
        finally:
            for table, saved in zip(held, before, strict=True):
                table.clear()
                table.update(saved)

    def kept(self) -> Kept:
        """Return a copy of all state, to be put back."""
        return Kept(self)

    def _submodules(self) -> list[torch.nn.Module]:
        return list(dict.fromkeys(m for module in self.modules.values() for m in module.modules()))


class Kept:
    """All state that a call may change, as it was."""

    def __init__(self, subject: Subject) -> None:
        self._tensors = [
            (t, t.detach().clone(), t.grad, t.requires_grad) for t in subject.state().values()
        ]
        self._attributes = [(m, dict(m.__dict__)) for m in subject._submodules()]
        self._containers = [
            (value, value.copy())
            for _, attributes in self._attributes
            for value in attributes.values()
            if isinstance(value, (dict, list, set))
        ]
        self._random = (torch.get_rng_state(), random.getstate(), np.random.get_state())  # noqa: NPY002
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def begin(self, seed: int) -> None:
        """Start a call: no gradients yet, and every generator from the seed."""
        for tensor, *_ in self._tensors:
            tensor.grad = None
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002

    def restore(self) -> None:
        """Put everything back as it was."""
        for module, attributes in self._attributes:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        for container, content in self._containers:
            container.clear()
            if isinstance(container, list):
                container.extend(content)
            else:
                container.update(content)
        with torch.no_grad():
            for tensor, values, grad, requires_grad in self._tensors:
                tensor.requires_grad_(requires_grad)
                tensor.data.copy_(values)
                tensor.grad = grad
        state, python, numpy = self._random
        torch.set_rng_state(state)
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)


def leaves_of(tree: Any) -> list[tuple[str, Any]]:
    """Return what a tree of inputs or outputs holds, with the path to each: ``['loss']``, ``[0]``.

    What `torch.utils._pytree` knows is a tree, and dataclasses are.
    """
    found: list[tuple[str, Any]] = []
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        where = pytree.keystr(path)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for item in dataclasses.fields(leaf):
                inner = leaves_of(getattr(leaf, item.name))
                found += [(f"{where}.{item.name}{more}", value) for more, value in inner]
        else:
            found.append((where, leaf))
    return found


def _inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for tree in (tuple(args), dict(kwargs)):
        for path, leaf in leaves_of(tree):
            if isinstance(leaf, torch.Tensor) and not any(leaf is t for t in found.values()):
                found[f"input{path}"] = leaf
    return found


def _members(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _check(function: object) -> None:
    if isinstance(function, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        raise CheckError("the callable is TorchScript already: give the Python that it came from")
    if hasattr(function, "_torchdynamo_orig_callable") or hasattr(function, "_orig_mod"):
        raise CheckError(
            "the callable is compiled already: give it as it was before torch.compile, which "
            "backends=['compile[...]'] calls"
        )
    if not callable(function):
        raise CheckError(f"{function!r} is not callable: give a function or a torch.nn.Module")


def _gather(
    function: Any, modules: dict[str, torch.nn.Module], tensors: dict[str, torch.Tensor]
) -> None:
    """Find the modules and tensors that a function holds: bound, partial, in a closure, global."""
    if isinstance(function, functools.partial):
        for path, leaf in leaves_of((function.args, function.keywords)):
            _take(f"partial{path}", leaf, modules, tensors)
        _gather(function.func, modules, tensors)
        return
    owner = getattr(function, "__self__", None)
    if owner is not None:
        _take("self", owner, modules, tensors)
    inner = inspect.unwrap(getattr(function, "__func__", function))
    if not inspect.isfunction(inner):
        if not isinstance(inner, type) and hasattr(inner, "__dict__"):
            for name, value in vars(inner).items():
                _take(name, value, modules, tensors)
        return
    held = inspect.getclosurevars(inner)
    for name, value in {**held.globals, **held.nonlocals}.items():
        _take(name, value, modules, tensors)


def _take(
    name: str,
    value: Any,
    modules: dict[str, torch.nn.Module],
    tensors: dict[str, torch.Tensor],
) -> None:
    if isinstance(value, torch.nn.Module):
        _check(value)
        modules[name] = value
    elif isinstance(value, torch.Tensor):
        tensors[name] = value
    elif isinstance(value, (list, tuple, dict)):
        for path, leaf in leaves_of(value):
            if isinstance(leaf, (torch.nn.Module, torch.Tensor)):
                _take(f"{name}{path}", leaf, modules, tensors)
