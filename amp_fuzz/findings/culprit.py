"""Find the one kernel inside an op that produces a wrong result.

An experiment names it. The backend runs the case once more, and each kernel below autograd is
recorded. A kernel is suspected if it gives another result on the same arguments here, where the
reference runs. It is guilty if the whole case agrees once its results are replaced by those from
here. A case with a second cause does not agree then, and no kernel is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from amp_fuzz.backends.determinism import algorithms
from amp_fuzz.backends.settings import applied
from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.inputs import bits_text
from amp_fuzz.cases.program import (
    DTYPES,
    MAX_ELEMENTS,
    Arg,
    DType,
    Float,
    Items,
    Program,
    ProgramError,
    Ref,
    Statement,
    TensorSpec,
)
from amp_fuzz.catalogue import CATALOGUE, check
from amp_fuzz.findings.entered import inside
from amp_fuzz.oracle.compare import same
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.upstream.supposed import agrees_with

__all__ = ["Culprit", "culprit"]

_SUSPECTS = 3  # kernels that are tried, in the order of their calls
_CALLS = 24  # calls of one kernel; each costs a run of the case


@dataclass(frozen=True, slots=True)
class Culprit:
    """A guilty kernel. name: ``bmm``, ``sum.dim_IntList``. case: one call that shows it, if any."""

    name: str
    case: Case | None


@dataclass(frozen=True, slots=True)
class _Call:
    kernel: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any = None

    def here(self) -> Any:
        """Return what the kernel gives here, with torch as it is outside the backend."""
        copies = _copied(self.args), _copied(dict(self.kwargs))
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return self.kernel(*copies[0], **copies[1])

    def differs(self) -> bool:
        """Return whether it gives another result here."""
        try:
            pairs = zip(tree_leaves(self.result), tree_leaves(self.here()), strict=True)
            return any(_differs(a, b) for a, b in pairs)
        except Exception:  # it raises here: its result cannot be compared
            return False


class _Told(TorchDispatchMode):
    """Records the calls of computing kernels; replaces results of one kernel by those in `right`.

    A kernel is recorded after those that it calls. Of the replaced kernel, only the first call
    beyond those in `right` is recorded.
    """

    def __init__(self, kernel: Any = None, right: Sequence[Any] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernel, self.right = kernel, list(right)
        self.calls: list[_Call] = []
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _computes(func, args):
            return func(*args, **kwargs)
        if self.kernel not in (None, func):
            return inside(self, func, args, kwargs)
        self.count += 1
        if self.count <= len(self.right):
            return _copied(self.right[self.count - 1])
        given = _copied(args), _copied(dict(kwargs))
        result = inside(self, func, args, kwargs)
        if self.kernel is None or not self.calls:
            self.calls.append(_Call(func, *given, _copied(result)))
        return result


def culprit(judge: Judge, case: Case) -> Culprit | None:
    """Return the kernel whose results alone make a case diverge, or None."""
    if case.plan.thread != "none":  # a mode works in one thread only
        return None
    with algorithms(case.plan.deterministic), applied(case.plan.settings):
        return _culprit(judge, case)


def _culprit(judge: Judge, case: Case) -> Culprit | None:
    with _Told() as told:
        judge.backend.run([case])
    wrong: dict[Any, _Call] = {}
    for call in told.calls:
        if call.kernel not in wrong and len(wrong) < _SUSPECTS and call.differs():
            wrong[call.kernel] = call
    for kernel, call in wrong.items():
        if _mended(judge, case, kernel):
            name = str(kernel).removeprefix("aten.").removesuffix(".default")
            return Culprit(name, _case(call, case))
    return None


def _mended(judge: Judge, case: Case, kernel: Any) -> bool:
    """Return whether a case agrees once all calls of a kernel return the results from here."""
    right: list[Any] = []
    while len(right) <= _CALLS:
        with _Told(kernel, right) as told:
            (observed,) = judge.backend.run([case])
        if not told.calls:
            return agrees_with(judge.backend, case, observed, {})
        right.append(told.calls[0].here())
    return False


def _computes(kernel: Any, args: Any) -> bool:
    """Return whether a kernel computes new tensors from others: no view, no random numbers."""
    schema = kernel._schema
    writes = any(a.alias_info is not None for a in (*schema.arguments, *schema.returns))
    random = torch.Tag.nondeterministic_seeded in kernel.tags
    return not writes and not random and any(isinstance(a, torch.Tensor) for a in tree_leaves(args))


def _copied(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t.detach().clone(), value)


def _differs(a: Any, b: Any) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return bool(a != b)
    return a.dtype != b.dtype or a.shape != b.shape or not same(a, b)


# -- one call as a case ---------------------------------------------------------------------------


def _case(call: _Call, whole: Case) -> Case | None:
    """Return a call as a case, if the catalogue has an op of the kernel's name."""
    name = call.kernel.overloadpacket.__name__
    if name not in CATALOGUE or "function" not in CATALOGUE[name].forms:
        return None
    specs: list[TensorSpec] = []
    try:
        args = tuple(_argument(a, specs) for a in call.args)
        kwargs = tuple((k, _argument(a, specs)) for k, a in call.kwargs.items())
        outputs = tuple(f"v{i}" for i, _ in enumerate(tree_leaves(call.result)))
        program = Program(
            tuple(specs), (Statement(name, "function", args, kwargs, outputs),), outputs
        )
        check(program)
    except ProgramError:
        return None
    plan = Plan(contexts=(), backward="none", settings=whole.plan.settings)
    return Case(program, plan, whole.seed)


def _argument(value: Any, specs: list[TensorSpec]) -> Arg:
    """Return an argument as a case holds it. Raises `ProgramError`."""
    if isinstance(value, torch.Tensor):
        dtype, name = str(value.dtype).removeprefix("torch."), f"x{len(specs)}"
        if dtype not in DTYPES or not 0 < value.numel() <= MAX_ELEMENTS:
            raise ProgramError(f"no input is {dtype}{list(value.shape)}")
        specs.append(TensorSpec(name, tuple(value.shape), dtype, values=bits_text(value)))
        return Ref(name)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return Float(value.hex())
    if isinstance(value, torch.dtype):
        return DType(str(value).removeprefix("torch."))
    if isinstance(value, (tuple, list)):
        return Items(tuple(_argument(item, specs) for item in value))
    raise ProgramError(f"a case cannot hold {type(value).__name__}")
