"""The subject of a check: a callable, its inputs, and all state that a call may change.

Each call gets fresh copies of its inputs and starts from the same state: parameters, buffers,
gradients, attributes of modules, train or eval mode, random generators. Afterwards all state is
restored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from amp_fuzz.interfaces.check.discovered_state import Held, hold, made_by_compiler
from amp_fuzz.interfaces.check.saved_state import Kept
from amp_fuzz.interfaces.check.storage import content, put_back
from amp_fuzz.interfaces.check.trees import leaves_of, mapped

__all__ = ["CheckError", "Subject"]


class CheckError(ValueError):
    """The callable or an argument cannot be checked. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A callable with its inputs.

    modules: those that it holds, by the prefix of their parameters' names. tensors: those that it
    holds besides parameters and buffers. The names are for reports. objects, containers, computed,
    stateful, caches: see `Held`.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    modules: Mapping[str, torch.nn.Module] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    computed: Sequence[torch.Tensor] = ()
    objects: Mapping[str, Any] = field(default_factory=dict)
    containers: Mapping[str, Any] = field(default_factory=dict)
    stateful: Mapping[str, Any] = field(default_factory=dict)
    caches: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> Subject:
        """Return the subject.

        Raises `CheckError` if it is compiled already, or lazy, or if an input is an iterator.
        """
        _check(function)
        held = Held()
        hold(function, held)
        kwargs = dict(kwargs or {})
        _check_used_up(tuple(args), kwargs)
        for path, leaf in leaves_of((tuple(args), kwargs)):
            if not isinstance(leaf, torch.Tensor):  # those are copied
                hold(leaf, held, f"input{path}")
        if held.compiled:
            raise CheckError(
                f"{held.compiled[0]} is already compiled: build the callable without torch.compile "
                "or TorchScript inside; backends=['compile[...]'] compiles all of it"
            )
        modules = held.modules
        # Some modules keep a separate list of their parameters.
        members = {id(t) for module in modules.values() for _, t in _members(module)}
        tensors = {name: t for name, t in held.tensors.items() if id(t) not in members}
        for name, module in modules.items():
            lazy = [n for n, t in _members(module) if torch.nn.parameter.is_lazy(t)]
            if lazy:
                raise CheckError(
                    f"{name or type(module).__name__}.{lazy[0]} has no shape yet: call the lazy "
                    "module once before it is checked"
                )
        made = cls(
            function,
            tuple(args),
            kwargs,
            seed,
            modules,
            tensors,
            tuple(held.computed.values()),
            held.objects,
            held.containers,
            held.stateful,
            held.caches,
        )
        for name, tensor in (made.inputs() | made.state()).items():
            if tensor.is_meta:
                raise CheckError(
                    f"{name} is on the meta device, where tensors have no values: make it on the "
                    "CPU (module.to_empty(device='cpu'), then load or initialise its weights)"
                )
        return made

    @property
    def name(self) -> str:
        """Its name in reports."""
        if isinstance(self.function, torch.nn.Module):
            return type(self.function).__name__
        inner = self.function
        while isinstance(inner, functools.partial):
            inner = inner.func
        return str(getattr(inner, "__qualname__", type(inner).__name__))

    def paths(self) -> dict[torch.nn.Module, str]:
        """Return the path of every module that it holds; that of the callable itself is "".

        A module that is held in several ways has the first of its paths.
        """
        found: dict[torch.nn.Module, str] = {}
        for prefix, root in self.modules.items():
            for name, module in root.named_modules():
                found.setdefault(module, ".".join(filter(None, (prefix, name))))
        return found

    def state(self) -> dict[str, torch.Tensor]:
        """Return every parameter, buffer and tensor that it holds, once each, by name."""
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
        """Return its inputs with each tensor copied; a repeated tensor is copied once."""
        copies: dict[int, torch.Tensor] = {}

        def again(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) not in copies:
                copies[id(leaf)] = copy(leaf).requires_grad_(leaf.requires_grad)
            return copies[id(leaf)]

        args, kwargs = mapped(again, (self.args, dict(self.kwargs)))
        return args, kwargs

    @contextmanager
    def moved(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """Replace its modules' parameters and buffers by copies for a block."""
        copies: dict[int, torch.Tensor] = {}

        def again(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in copies:
                made = copy(tensor)
                if isinstance(tensor, torch.nn.Parameter):
                    made = torch.nn.Parameter(made, tensor.requires_grad)
                copies[id(tensor)] = made
            return copies[id(tensor)]

        tables: list[Any] = [
            table
            for _, module in self._submodules()
            for table in (module._parameters, module._buffers)
        ]
        before = [content(table) for table in tables]
        try:
            for table, items in zip(tables, before, strict=True):
                put_back(table, [again(t) if isinstance(t, torch.Tensor) else t for t in items])
            yield
        finally:
            for table, items in zip(tables, before, strict=True):
                put_back(table, items)

    def kept(self) -> Kept:
        """Return a copy of all state, to restore later."""
        return Kept(
            self.state().items(),
            [*self._submodules(), *self.objects.items()],
            self.containers.items(),
            self.stateful.items(),
            self.caches.items(),
        )

    def _submodules(self) -> list[tuple[str, torch.nn.Module]]:
        """Return every module that it holds, once each, with its name."""
        found: dict[torch.nn.Module, str] = {}
        for prefix, root in self.modules.items():
            for name, module in root.named_modules():
                found.setdefault(module, ".".join(filter(None, (prefix, name))))
        return [(name, module) for module, name in found.items()]


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
    maker = made_by_compiler(function)
    if maker == "TorchScript":
        raise CheckError("the callable is already TorchScript: pass the Python that it came from")
    if maker:
        raise CheckError(
            "the callable is already compiled: pass it as it was before torch.compile, which "
            "backends=['compile[...]'] calls"
        )
    if not callable(function):
        raise CheckError(f"{function!r} is not callable: pass a function or a torch.nn.Module")


def _check_used_up(*trees: Any) -> None:
    for tree in trees:
        for path, leaf in leaves_of(tree):
            if isinstance(leaf, Iterator) and not hasattr(leaf, "__dict__"):
                raise CheckError(
                    f"input{path} is a {type(leaf).__name__}, which one call uses up: pass a list"
                )
