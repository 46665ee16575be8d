"""Record what a subject calls under the reference: its submodules, or the functions of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from amp_fuzz.backends.reference import ReferenceRuntime, following
from amp_fuzz.cases.case import Plan
from amp_fuzz.cases.program import Autocast
from amp_fuzz.interfaces.check.call import Names, call
from amp_fuzz.interfaces.check.subject import Subject
from amp_fuzz.interfaces.check.trees import leaves_of, mapped
from amp_fuzz.reference import dispatch, log_kernels, snapshot
from amp_fuzz.reference.state import enabled_devices

__all__ = [
    "FunctionCall",
    "ModuleCall",
    "followed",
    "function_calls",
    "in_backward",
    "module_calls",
    "names_called",
]


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a submodule: its path, and copies of its arguments.

    contexts: contexts that recreate the autocast state around it.
    """

    path: str
    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    contexts: tuple[Autocast, ...]
    grad: bool


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """One call of a function of torch.

    given, result: its tensors before and after; their identity distinguishes values. args, kwargs:
    copies of its arguments. kernels: the overloads that autocast saw in it. path: of the calling
    submodule. raised: whether it raised; then it has no result.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    given: tuple[torch.Tensor, ...]
    result: Any
    contexts: tuple[Autocast, ...]
    grad: bool
    kernels: tuple[str, ...] = ()
    path: str = ""
    raised: bool = False

    @property
    def name(self) -> str:
        """The function's name: ``torch.nn.functional.linear``, ``torch.Tensor.add``."""
        return resolve_name(self.function) or str(getattr(self.function, "__name__", "?"))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The copies of its input tensors."""
        return _tensors((self.args, dict(self.kwargs)))


def module_calls(subject: Subject, reference: ReferenceRuntime, plan: Plan) -> list[ModuleCall]:
    """Call a subject under the reference; return the outermost calls of its submodules in order."""
    found: list[ModuleCall] = []
    device = reference.runtime.device

    def enter(path: str, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if len(stack) == 1 and not in_backward():  # a recomputation is not a separate call
            given, named = _copied((args, kwargs))
            around, grad = _around(device), torch.is_grad_enabled()
            found.append(ModuleCall(path, module, given, named, around, grad))

    with followed(subject, enter) as stack:
        _call(subject, reference, plan)
    return found


@contextmanager
def followed(
    subject: Subject, enter: Callable[[str, torch.nn.Module, Any, Any], None]
) -> Iterator[list[str]]:
    """Keep the paths of the submodules being called in a list, outermost first.

    enter: called with the path and arguments of each call, after its path is in the list.
    """
    stack: list[str] = []
    paths = {m: path for m, path in subject.paths().items() if m is not subject.function}

    def before(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if module in paths:  # a copy made by the subject has these hooks, but no path
            stack.append(paths[module])
            enter(paths[module], module, args, kwargs)

    def after(module: torch.nn.Module, args: Any, result: Any) -> None:
        if module in paths:
            stack.pop()

    hooks = [m.register_forward_pre_hook(before, with_kwargs=True, prepend=True) for m in paths]
    hooks += [m.register_forward_hook(after, always_call=True) for m in paths]
    try:
        yield stack
    finally:
        for hook in hooks:
            hook.remove()


def in_backward() -> bool:
    """Return whether a backward pass runs in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def function_calls(subject: Subject, reference: ReferenceRuntime, plan: Plan) -> list[FunctionCall]:
    """Call a subject under the reference; return its calls of torch, with tensors."""
    found: list[FunctionCall] = []
    device = reference.runtime.device

    class Recording(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            given = _tensors((args, kwargs))
            if (
                not given
                or in_backward()
                or getattr(func, "__name__", "") in ("__get__", "__set__")
            ):
                return func(*args, **kwargs)
            said, *words = _plain(func, args, kwargs)
            copies, named = _copied(words)
            around, grad = _around(device), torch.is_grad_enabled()
            path, result, raised = stack[-1] if stack else "", None, True
            with log_kernels() as log:
                try:
                    result = func(*args, **kwargs)
                    raised = False
                finally:
                    if raised or _tensors(result):
                        kernels = tuple(dict.fromkeys(k.overload for k in log))
                        found.append(
                            FunctionCall(
                                said,
                                copies,
                                named,
                                tuple(given),
                                result,
                                around,
                                grad,
                                kernels,
                                path,
                                raised,
                            )
                        )
            return result

    def invoke(*args: Any, **kwargs: Any) -> Any:
        with Recording():
            return subject.function(*args, **kwargs)

    with followed(subject, lambda *call: None) as stack:
        _call(subject, reference, plan, invoke)
    return found


_PLAIN = {
    functional.relu: (torch.relu, torch.Tensor.relu_),
    functional.relu_: (torch.Tensor.relu_, torch.Tensor.relu_),
    functional.selu: (torch.selu, torch.selu_),
    functional.sigmoid: (torch.sigmoid, torch.Tensor.sigmoid_),
    functional.tanh: (torch.tanh, torch.Tensor.tanh_),
}


def _plain(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return a call under the catalogue's name, if that is different."""
    try:
        plain, inplace = _PLAIN[func]
    except (KeyError, TypeError):  # not hashable
        return func, args, kwargs

    def unary(input: Any, inplace: bool = False) -> tuple[Any, bool]:  # noqa: A002 (torch's name)
        return input, inplace

    tensor, writes = unary(*args, **kwargs)
    return inplace if writes else plain, (tensor,), {}


def names_called(subject: Subject, reference: ReferenceRuntime, plan: Plan) -> set[str]:
    """Call a subject under the reference; return the names of the functions and ops it calls.

    These are functions of torch as Python calls them (``layer_norm``), and ops as they reach the
    dispatcher below autograd (``native_layer_norm``), including those of the backward pass.
    """
    found: set[str] = set()

    class Functions(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found.add(str(getattr(func, "__name__", "")))
            return func(*args, **(kwargs or {}))

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found.add(func.__name__.partition(".")[0])
            with dispatch.kept():
                return func(*args, **(kwargs or {}))

    def invoke(*args: Any, **kwargs: Any) -> Any:
        with Functions():
            return subject.function(*args, **kwargs)

    @contextmanager
    def scope() -> Iterator[None]:
        with reference.runtime.scope(), Ops():  # type: ignore[no-untyped-call]
            yield

    runtime = replace(reference.runtime, scope=scope, follow=following(scope))
    call(subject, runtime, plan, Names(), invoke=invoke, redirect=True)
    return found


def _call(subject: Subject, reference: ReferenceRuntime, plan: Plan, invoke: Any = None) -> None:
    call(subject, reference.runtime, plan, Names(), invoke=invoke, redirect=True)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for _, leaf in leaves_of(tree) if isinstance(leaf, torch.Tensor)]


def _copied(tree: Any) -> Any:
    """Return a tree with each tensor copied, without history; a repeated tensor once."""
    copies: dict[int, torch.Tensor] = {}

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in copies:
            with torch.no_grad():
                made = torch.empty_strided(
                    leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device
                )
                made.copy_(leaf.detach())
            copies[id(leaf)] = made.requires_grad_(leaf.requires_grad)
        return copies[id(leaf)]

    with torch._C.DisableTorchFunctionSubclass(), _off():
        return mapped(copy, tree)


def _off() -> Any:
    """Return a context in which autocast casts nothing: copies are not recorded."""
    return dispatch.exclude()


def _around(device: str) -> tuple[Autocast, ...]:
    """Return contexts that recreate the current autocast state; none if autocast is off."""
    if not enabled_devices():
        return ()
    return tuple(
        Autocast(
            device=None if name == device else name,
            dtype=str(dtype).removeprefix("torch."),
            enabled=enabled,
            cache_enabled=None if cache else False,
        )
        for name, dtype, enabled, cache, _ in snapshot(device).contexts
        if enabled
    )
