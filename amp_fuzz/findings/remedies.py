"""What makes a program run that raises only under autocast. Each remedy is run before it is told.

A case stands for the program. In `amp_fuzz.check` the reference calls the user's callable, and the
case has no statements.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from amp_fuzz.backends.custom_op import definitions
from amp_fuzz.backends.harness import Observation, Runtime
from amp_fuzz.backends.reference import ReferenceRuntime
from amp_fuzz.cases.case import Case, bare, map_autocast, single
from amp_fuzz.patching import patched

__all__ = ["Remedy", "lacking", "remedy"]

Kind: TypeAlias = Literal["decorate", "backward", "dtype", "off", "float32"]
Function: TypeAlias = type[torch.autograd.Function]


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change with which a program runs. advice: a sentence without its full stop."""

    kind: Kind
    advice: str


def remedy(case: Case, runtime: ReferenceRuntime) -> Remedy | None:
    """Return the first change with which a case runs that raises only under autocast, or None.

    The most particular is tried first: the decorators of torch.amp on the autograd Functions that
    lack them, autocast in a backward that they cannot decorate, the other 16-bit dtype, autocast
    off, and autocast off with inputs in float32.
    """
    for found, run in _changes(case, runtime):
        if run().raised is None:
            return found
    return None


def _changes(
    case: Case, runtime: ReferenceRuntime
) -> Iterator[tuple[Remedy, Callable[[], Observation]]]:
    functions = _functions_of(case, runtime)
    for some in [*([one] for one in functions), *([functions] if len(functions) > 1 else [])]:
        for cast in (None, torch.float32):
            advice = _decorate(some, cast)
            yield Remedy("decorate", advice), partial(_decorated, some, cast, case, runtime)
    for owner, name in _backwards_of(case, runtime).items():
        advice = f"Enter torch.autocast in the backward of {name}, as around its forward"
        yield Remedy("backward", advice), partial(_entering, owner, case, runtime)
    for dtype in ("bfloat16", "float16"):
        advice = f"Use {dtype} as autocast's dtype"
        yield Remedy("dtype", advice), partial(runtime.run, map_autocast(case, dtype=dtype))
    off = "Run this part under autocast(enabled=False)"
    yield Remedy("off", off), partial(runtime.run, bare(case))
    single_precision = "Call it under autocast(enabled=False) on inputs cast to float32"
    yield Remedy("float32", single_precision), partial(runtime.run, single(bare(case)))


# -- autograd Functions that lack the decorators of torch.amp -------------------------------------

# The names that torch.amp's decorators give to what replaces a method.
_DECORATORS: Mapping[str, str] = {"forward": "decorate_fwd", "backward": "decorate_bwd"}
_TORCH = str(Path(torch.__file__).parent) + os.sep


def lacking(function: Function) -> tuple[str, ...]:
    """Return the decorators of torch.amp that an autograd Function lacks: ``custom_fwd``, ..."""
    missing = (m for m, name in _DECORATORS.items() if not _wears(getattr(function, m), name))
    return tuple(f"custom_{method[0]}wd" for method in missing)


def _wears(method: Any, decorator: str) -> bool:
    """Return whether a decorator is on a method, possibly beneath others."""
    while method is not None:
        code = getattr(method, "__code__", None)
        if code and code.co_name == decorator and code.co_filename.startswith(_TORCH):
            return True
        method = getattr(method, "__wrapped__", None)
    return False


def _functions_of(case: Case, runtime: ReferenceRuntime) -> list[Function]:
    """Return the Functions of the user's code that a case calls and that lack a decorator."""
    found: dict[Function, None] = {}

    def noting(function: Function) -> Any:
        forward = function.forward

        @functools.wraps(forward)
        def noted(*args: Any, **kwargs: Any) -> Any:
            found[function] = None
            return forward(*args, **kwargs)

        return staticmethod(noted)

    with ExitStack() as stack:
        for function in _theirs():
            if not _apart(function) and lacking(function):
                # Not its `apply`: code may have kept that bound method.
                stack.enter_context(patched(function, "forward", noting(function)))
        runtime.run(case)
    return list(found)


def _theirs() -> Iterator[Function]:
    """Yield the autograd Functions outside torch, each before the class that it extends."""

    def below(base: Function) -> Iterator[Function]:
        for function in base.__subclasses__():
            yield from below(function)
            if function.__module__.partition(".")[0] != "torch":
                yield function

    return below(torch.autograd.Function)


def _apart(function: Function) -> bool:
    """Return whether a forward gets no ``ctx``, on which `torch.amp.custom_fwd` keeps the state."""
    return function.setup_context is not torch.autograd.Function.setup_context


def _decorate(functions: Sequence[Function], cast: torch.dtype | None) -> str:
    """Return what to do with Functions that lack a decorator."""
    names = " and ".join(function.__qualname__.rpartition(".")[2] for function in functions)
    also = "" if cast is None else f"(cast_inputs={cast})"
    return (
        f"Decorate the forward of {names} with torch.amp.custom_fwd{also} and its backward with "
        "torch.amp.custom_bwd"
    )


def _decorated(
    functions: Sequence[Function],
    cast: torch.dtype | None,
    case: Case,
    runtime: ReferenceRuntime,
) -> Observation:
    """Run a case while Functions have the decorators that they lack."""
    with _wearing(functions, cast, runtime.runtime):
        return runtime.run(case)


@contextmanager
def _wearing(
    functions: Sequence[Function], cast: torch.dtype | None, runtime: Runtime
) -> Iterator[None]:
    device = runtime.device
    makers = {
        "custom_fwd": ("forward", runtime.custom_fwd(device_type=device, cast_inputs=cast)),
        "custom_bwd": ("backward", runtime.custom_bwd(device_type=device)),
    }
    with ExitStack() as stack:
        for function in functions:
            for method, decorator in makers.values():
                made = staticmethod(decorator(getattr(function, method)))
                stack.enter_context(patched(function, method, made))
        yield


# -- a backward that the decorators cannot have: of a custom op, or beside a setup_context --------

_Wrapper: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


def _wrapped(owner: Any, wrapper: _Wrapper) -> AbstractContextManager[None]:
    """Replace the backward of a custom op's definition, or of an autograd Function, for a block."""
    if isinstance(owner, type):
        return patched(owner, "backward", staticmethod(wrapper(owner.backward)))  # type: ignore[attr-defined]
    return patched(owner, _BACKWARD, wrapper(getattr(owner, _BACKWARD)))


_BACKWARD = "_backward_fn"  # of a torch.library.custom_op


def _backwards_of(case: Case, runtime: ReferenceRuntime) -> dict[Any, str]:
    """Return what has such a backward, and a case reaches it, with its name."""
    found: dict[Any, str] = {}
    names: dict[Any, str] = {
        op: name for name, op in definitions().items() if getattr(op, _BACKWARD, None) is not None
    }
    names |= {f: f.__qualname__.rpartition(".")[2] for f in _theirs() if _apart(f)}

    def noting(owner: Any, name: str) -> _Wrapper:
        def wrapper(backward: Callable[..., Any]) -> Callable[..., Any]:
            def noted(*args: Any) -> Any:
                found[owner] = name
                return backward(*args)

            return noted

        return wrapper

    with ExitStack() as stack:
        for owner, name in names.items():
            stack.enter_context(_wrapped(owner, noting(owner, name)))
        runtime.run(case)
    return found


def _entering(owner: Any, case: Case, runtime: ReferenceRuntime) -> Observation:
    """Run a case with a backward under the contexts of the case's plan."""

    def wrapper(backward: Callable[..., Any]) -> Callable[..., Any]:
        def entered(*args: Any) -> Any:
            with ExitStack() as stack:
                for c in case.plan.contexts:
                    dtype = None if c.dtype is None else getattr(torch, c.dtype)
                    device = c.device or runtime.runtime.device
                    stack.enter_context(runtime.runtime.autocast(device, dtype, c.enabled))
                return backward(*args)

        return entered

    with _wrapped(owner, wrapper):
        return runtime.run(case)
