"""The kernels that torch documents as nondeterministic, and which results of a case they reach.

`nondeterministic.toml` has the documentation of `torch.use_deterministic_algorithms` as data. On a
device of such kernels, another run may give other bits: that is no finding. A `Trace` follows one
run and says which values were computed from the result of such a kernel; all others stay exact.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal, TypeAlias

import msgspec
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amp_fuzz.reference import dispatch
from amp_fuzz.reference.shadow.schemas import bound, draws

__all__ = [
    "DRAWN",
    "EXACT",
    "Documented",
    "Kernels",
    "Spread",
    "Trace",
    "algorithms",
    "applying",
    "listed",
    "prepare_cuda",
    "sentences",
]

Spread: TypeAlias = Literal["rounding", "any"]
"""How far runs may differ: by rounding, or arbitrarily, since another element was written."""


class Documented(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sentences of the documentation, and the kernels that they are about."""

    says: tuple[str, ...]
    devices: tuple[str, ...]
    on: Literal["deterministic", "raises"]
    how: Literal["adds", "algorithm", "chooses"]
    kernels: tuple[str, ...]
    torch: str = ""
    when: dict[str, tuple[bool | int | str, ...]] = {}
    results: tuple[int, ...] = ()
    floating: bool = False

    def about(self, device: str) -> bool:
        """Return whether the sentences are about a device type and the installed torch."""
        version = Version(Version(torch.__version__).base_version)
        return (not self.devices or device in self.devices) and version in SpecifierSet(self.torch)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kernels: tuple[Documented, ...]


@cache
def sentences() -> tuple[Documented, ...]:
    """Return everything documented, of all devices and versions."""
    text = files(__package__).joinpath("nondeterministic.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), _File).kernels


@dataclass(frozen=True, slots=True)
class Kernels:
    """The documented kernels of one device type, by the name of an op or of an overload.

    draws: whether each kernel that draws random numbers is one too: the backend has a generator of
    its own.
    """

    by_name: Mapping[str, tuple[Documented, ...]]
    draws: bool = False

    def __bool__(self) -> bool:
        return bool(self.by_name) or self.draws

    def of(self, func: Any) -> tuple[Documented, ...]:
        """Return what is documented of an overload."""
        op, overload = _name(func)
        return self.by_name.get(op, ()) + self.by_name.get(f"{op}.{overload}", ())

    def adding(self, func: Any) -> bool:
        """Return whether an overload adds in the dtype of its result, in any order."""
        return any(found.how == "adds" for found in self.of(func))


EXACT = Kernels({})
DRAWN = Kernels({}, draws=True)


@cache
def listed(device: str) -> Kernels:
    """Return the documented kernels of a device type: none of one that torch does not document."""
    found: dict[str, tuple[Documented, ...]] = {}
    for one in sentences():
        if one.about(device) and any(device in other.devices for other in sentences()):
            for name in one.kernels:
                found[name] = (*found.get(name, ()), one)
    return Kernels(found)


@cache
def _name(func: Any) -> tuple[str, str]:
    """Return an op without its in-place or ``out=`` form, and the overload: ``scatter``, ``src``.

    Only of torch's own ops.
    """
    if func.namespace != "aten":
        return "", ""
    op, _, overload = func.__name__.partition(".")
    op = op if op == "_index_put_impl_" else op.removesuffix("_")
    for form in ("_out", "_values"):
        overload = overload.removesuffix(form)
    return op, "default" if overload in ("out", "grad_input", "output") else overload


@contextmanager
def algorithms(deterministic: bool) -> Iterator[None]:
    """Ask torch for deterministic algorithms, or for any, during a block.

    With them, memory that is not initialised is filled, so that a kernel that reads it repeats.
    """
    fills: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if before == deterministic and not (deterministic and warns):
        yield
        return
    filled = fills.fill_uninitialized_memory
    torch.use_deterministic_algorithms(deterministic)
    fills.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        fills.fill_uninitialized_memory = filled


WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def prepare_cuda() -> None:
    """Give cuBLAS the workspace that deterministic algorithms need, unless the user chose one.

    torch and cuBLAS read it once, before the first product of matrices. Without it, torch raises
    for each product under deterministic algorithms (at::Context::alertCuBLASConfigNotDeterministic)
    and documents products of CUDA as nondeterministic.
    """
    os.environ.setdefault(WORKSPACE, ":4096:8")


# -- which results vary ---------------------------------------------------------------------------

# Their results depend on the shape and dtype of their arguments, not on their values.
_SHAPED = frozenset(
    f"{name}_like" for name in ("empty", "full", "ones", "rand", "randint", "randn", "zeros")
) | frozenset(("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"))


class Trace(TorchDispatchMode):
    """Follows what is computed from the results of documented kernels, by the memory of tensors.

    spread: label -> how far runs may differ there. noted: all labels that were met. ran: the
    kernels that ran, as ``op.overload``.
    """

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = kernels
        self.ran: set[str] = set()
        self.spread: dict[str, Spread] = {}
        self.noted: set[str] = set()
        self._memories: dict[int, tuple[Any, Spread]] = {}  # holding them, so none is used again

    def note(self, label: str, tensor: torch.Tensor) -> None:
        """Take down whether the value of a label varies."""
        self.noted.add(label)
        if (spread := self._of([tensor])) is not None:
            self.spread[label] = spread

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op, and mark what it makes of marked tensors."""
        kwargs = kwargs or {}
        with dispatch.kept():
            found = self.kernels.of(func)
            if not found and dispatch.is_composite(func):  # whole, in inference mode
                with self:
                    return func.decompose(*args, **kwargs)
            read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            before = None if _name(func)[0] in _SHAPED else self._of(read)
            ways = applying(self.kernels, func, args, kwargs) if found else []
            out = func(*args, **kwargs)
        results = out if isinstance(out, (tuple, list)) else (out,)
        for one in ways:
            self.ran.add(func.__name__)
            which = [results[i] for i in one.results] if one.results else results
            self._mark(which, "any" if one.how == "chooses" else "rounding")
        if self.kernels.draws and draws(func, args, kwargs):
            before = "any"
        if before is not None:
            written = (a.name for a in func._schema.arguments if a.is_write)
            own = bound(func, args, kwargs)
            self._mark([out, *(own.get(name) for name in written)], before)
        return out

    def _of(self, tensors: Sequence[torch.Tensor]) -> Spread | None:
        marks = [self._memories.get(_memory(t)._cdata) for t in tensors] if self._memories else []
        spreads = {mark[1] for mark in marks if mark is not None}
        return "any" if "any" in spreads else "rounding" if spreads else None

    def _mark(self, values: Any, spread: Spread) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, torch.Tensor):
                memory = _memory(tensor)
                _, old = self._memories.get(memory._cdata, (None, spread))
                both: Spread = "any" if "any" in (old, spread) else "rounding"
                self._memories[memory._cdata] = memory, both


def _memory(tensor: torch.Tensor) -> Any:
    """Return the memory of a tensor; of a device in Python that of the tensor that it holds."""
    held = getattr(tensor, "held", None)
    return (held if isinstance(held, torch.Tensor) else tensor).untyped_storage()


def applying(
    kernels: Kernels, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Documented]:
    """Return what is documented of a call of an op, with these arguments."""
    given = bound(func, args, kwargs)
    return [one for one in kernels.of(func) if _applies(one, func, given)]


def _applies(one: Documented, func: Any, given: Mapping[str, Any]) -> bool:
    if any(given.get(name) not in values for name, values in one.when.items()):
        return False
    if one.floating and not _floats(given):
        return False
    return one.how != "chooses" or bool(one.results) or _collides(_name(func)[0], given)


def _floats(given: Mapping[str, Any]) -> bool:
    """Return whether a call adds floating numbers: weights, or elements of some dtype."""
    if "weights" in given:
        return given["weights"] is not None
    dtype = given.get("dtype") or given["self"].dtype
    return bool(dtype.is_floating_point or dtype.is_complex)


def _collides(op: str, given: Mapping[str, Any]) -> bool:
    """Return whether a call writes an element twice: else there is nothing to choose from."""
    own = given["self"]

    def on_cpu(index: torch.Tensor) -> torch.Tensor:
        return index.detach().cpu()

    with torch.no_grad(), dispatch.exclude():
        hits = torch.zeros(own.shape, dtype=torch.int64)
        one = torch.ones((), dtype=torch.int64)
        if "index_put" in op:
            indices = [None if i is None else on_cpu(i) for i in given["indices"]]
            hits.index_put_(indices, one, accumulate=True)
        elif op == "put":
            index = on_cpu(given["index"])
            hits.put_(index, torch.ones_like(index), accumulate=True)
        elif op == "index_copy":
            index = on_cpu(given["index"]).reshape(-1)
            hits = torch.bincount(index % max(own.shape[given["dim"]] if own.dim() else 1, 1))
        elif op == "scatter":
            index = on_cpu(given["index"])
            hits.scatter_add_(given["dim"], index, torch.ones_like(index))
        else:  # max_unpool: of each plane
            planes = 2 if op == "max_unpool2d" else 3
            index = on_cpu(given["indices"]).flatten(-planes)
            hits = index.sort(-1).values.diff(dim=-1).eq(0).to(torch.int64) * 2
        return bool((hits > 1).any())
