"""Find weights that change inside a context, and are then used through the cast from before.

Autocast keeps the cast of a weight until the outermost context ends, as documented, and eager and
the reference agree on it. A compiler casts at each use. So a difference between the two may come
from the program, not from the compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from amp_fuzz.backends.harness import Runtime, quiet
from amp_fuzz.backends.reference import within
from amp_fuzz.cases.case import Plan
from amp_fuzz.interfaces.check.call import Names, call, user_line
from amp_fuzz.interfaces.check.subject import Subject
from amp_fuzz.interfaces.check.trees import leaves_of
from amp_fuzz.oracle.compare import same
from amp_fuzz.reference import dispatch, under
from amp_fuzz.reference.state import here

__all__ = ["ADVICE", "Stale", "casting_again", "noticing", "stale_casts"]

ADVICE = (
    "Change the weight after the autocast context, call torch.clear_autocast_cache() after the "
    "change, or give the context cache_enabled=False."
)

_Serves = Callable[[torch.Tensor, torch.Tensor], bool]


@dataclass(frozen=True, slots=True)
class Stale:
    """Weights that one line changed, whose old casts were used then.

    weights: their names. changed, used: lines of the user's code, ``model.py:12``, or "".
    """

    weights: tuple[str, ...]
    changed: str
    used: str

    def __str__(self) -> str:
        more = f" and {len(self.weights) - 3} more" if len(self.weights) > 3 else ""
        names = ", ".join(self.weights[:3]) + more
        change = "change" if len(self.weights) > 1 else "changes"
        at = f" at {self.changed}" if self.changed else ""
        user = f"{self.used} uses" if self.used else "a later call uses"
        old = "their casts" if len(self.weights) > 1 else "its cast"
        return f"{names} {change}{at} inside an autocast context, and {user} {old} from before"


@contextmanager
def noticing() -> Iterator[list[bool]]:
    """Collect a True for each cast that the reference uses after its weight changed."""
    found: list[bool] = []

    def serves(weight: torch.Tensor, cast: torch.Tensor) -> bool:
        if not _current(weight, cast):
            found.append(True)
        return True

    with _serving(serves):
        yield found


def casting_again(runtime: Runtime) -> Runtime:
    """Return a runtime of the reference that casts a weight again after it changed."""
    return within(runtime, partial(_serving, _current))


def stale_casts(subject: Subject, runtime: Runtime, plan: Plan) -> tuple[Stale, ...]:
    """Call a subject under the reference; return what changes in a context and is used then."""
    watch = _Watch(subject)
    watched = within(runtime, lambda: _Writes(watch))
    with quiet(), _serving(watch.serves):
        call(subject, watched, plan, Names(), invoke=watch.invoke, redirect=True)
    order = list(watch.names.values()).index
    return tuple(
        Stale(tuple(sorted(weights, key=order)), changed, used)
        for changed, (used, weights) in watch.found.items()
    )


def _current(weight: torch.Tensor, cast: torch.Tensor) -> bool:
    """Return whether a cast has the bits of its weight.

    Not its version: a write to ``weight.data`` does not count there. In a function transform values
    may be batched, and nothing is said.
    """
    if dispatch.transform_depth():
        return True
    with torch.no_grad():
        return same(weight.detach().to(cast.dtype), cast.detach())


@contextmanager
def _serving(serves: _Serves) -> Iterator[None]:
    with under(replace(here().semantics, serves=serves)):
        yield


@dataclass(slots=True)
class _Watch:
    """Knows the last line that wrote to each storage, and where a stale cast was used.

    found: by the line of the change, the first line of use, and the weights.
    """

    subject: Subject
    names: dict[int, str] = field(default_factory=dict)
    written: dict[int, str] = field(default_factory=dict)
    found: dict[str, tuple[str, dict[str, None]]] = field(default_factory=dict)

    def invoke(self, *args: Any, **kwargs: Any) -> Any:
        given = Subject(self.subject.function, args, kwargs).inputs()
        self.names = {id(t): name for name, t in {**given, **self.subject.state()}.items()}
        with _Assignments(self):
            return self.subject.function(*args, **kwargs)

    def wrote(self, tensor: torch.Tensor) -> None:
        self.written[_place(tensor)] = user_line()

    def serves(self, weight: torch.Tensor, cast: torch.Tensor) -> bool:
        if not _current(weight, cast):
            changed = self.written.get(_place(weight), "")
            _, weights = self.found.setdefault(changed, (user_line(), {}))
            weights[self.names.setdefault(id(weight), "a weight")] = None
        return True


class _Writes(TorchDispatchMode):
    """Notes each tensor that an op writes."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with dispatch.kept():
            made = func(*args, **kwargs)
        parameters = func._schema.arguments
        given = {**dict(zip((p.name for p in parameters), args, strict=False)), **kwargs}
        for parameter in parameters:
            if parameter.alias_info is not None and parameter.alias_info.is_write:
                for _, leaf in leaves_of(given.get(parameter.name)):
                    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                        self.watch.wrote(leaf)
        return made


class _Assignments(TorchFunctionMode):
    """Notes each tensor whose ``data`` is assigned: no op does that."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "__set__" and args[0].layout is torch.strided:
            self.watch.wrote(args[0])
        return made


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
