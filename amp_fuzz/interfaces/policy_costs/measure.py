"""One call of an op, treated as policies have it: how many digits it keeps each way."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from amp_fuzz import reference
from amp_fuzz.interfaces.precision.result import digits_in, digits_of
from amp_fuzz.interfaces.precision.watch import error_of
from amp_fuzz.policies.tables import PolicyTable, load_table
from amp_fuzz.reference import dispatch
from amp_fuzz.reference.shadow.copies import tensors_in, with_tensors
from amp_fuzz.reference.shadow.once import Once
from amp_fuzz.reference.shadow.written import SIXTEEN

__all__ = ["DTYPES", "FLOAT32", "LOWER", "Arrival", "Kept", "Unjudged", "Way", "measured", "parts"]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
Arrival: TypeAlias = Literal["float32", "16 bits"]
LOWER, FLOAT32 = "lower", "float32"
_SINGLE = digits_in(torch.float32)
_MOST = 2**22
"""Elements of a call's tensors: a larger call is not judged."""


class Unjudged(Exception):
    """A call that cannot be judged; the message is the reason."""


class Way(NamedTuple):
    """How a call is made.

    dtype: the autocast dtype. arrival: whether its floating tensors are float32, or arrive in the
    autocast dtype from an op before it. treated: `LOWER` casts them to the autocast dtype,
    `FLOAT32` to float32; ``parts of cuda`` makes the ops that a composite op consists of, each by
    that device's table.
    """

    dtype: str
    arrival: Arrival
    treated: str


@dataclass(frozen=True, slots=True)
class Kept:
    """What became of one call: digits as in `amp_fuzz.interfaces.precision.result.Value`.

    results, gradients: of the worst floating result, and of the worst gradient of an operand, at
    most those of float32; None: there is none that float32 keeps half of its digits of.
    overflowed, vanished: whether elements became infinite or NaN, or all of a result 0. emulated:
    whether the CPU lacks a kernel of 16 bits for it.
    """

    results: float | None
    gradients: float | None
    overflowed: bool
    vanished: bool
    emulated: bool = False


def parts(device: str) -> str:
    """Return the treatment of an op that is made of others, on a device without a rule for it."""
    return f"parts of {device}"


def measured(
    overload: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tables: Mapping[str, PolicyTable] = {},
    *,
    seed: int = 0,
    cotangent: torch.Tensor | None = None,
) -> Iterator[tuple[Way, Kept]]:
    """Make one call of an op in each way, and yield what each keeps.

    Everything is compared with the result in float64 of the operands as they arrive. They arrive as
    they are, if they are float32, and rounded to each dtype of `DTYPES`. tables: of devices that
    have no rule for the op; yields nothing for one that treats no part of it. cotangent: of the
    first result; by default normal numbers drawn from the seed. It is rounded to bfloat16, and
    scaled to about 1 by a power of two, as `torch.amp.GradScaler` would.

    Ops run on the CPU by `Once`. Raises `Unjudged`.
    """
    call = _Call(overload, args, kwargs, seed, cotangent)
    with dispatch.exclude():
        call.check()
    single = None
    for name, dtype in DTYPES.items():
        for arrival in ("float32", "16 bits"):
            given = call.arriving(None if arrival == "float32" else dtype)
            if given is None:
                continue
            low = dtype if arrival == "16 bits" else None
            if arrival == "float32" and single is not None:
                exact, float32 = single
            else:
                exact = call.made(given, torch.float64)
                float32 = call.made(given, torch.float32)
            if arrival == "float32":
                single = exact, float32
            with dispatch.exclude():  # nothing below is the callable's
                judged = [_judged(f, e) for f, e in zip(float32, exact, strict=True)]
            if not any(judged[0]):
                raise Unjudged("float32 keeps less than half of its digits")
            yield Way(name, arrival, FLOAT32), _kept(float32, exact, judged)
            yield Way(name, arrival, LOWER), _kept(call.made(given, dtype), exact, judged)
            alike: dict[frozenset[Any], Kept | None] = {}
            for device, table in tables.items():
                rules = frozenset((r.overload, r.policy) for r in table.rules.values())
                if rules not in alike:
                    made = call.in_parts(given, low, dtype, table)
                    alike[rules] = None if made is None else _kept(made, exact, judged)
                if (kept := alike[rules]) is not None:
                    yield Way(name, arrival, parts(device)), kept


@dataclass(frozen=True, slots=True)
class _Made:
    """What a call makes: its floating results, the gradients of its operands, None for none."""

    results: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    emulated: bool

    def __iter__(self) -> Iterator[Sequence[torch.Tensor | None]]:
        return iter((self.results, self.gradients))


@dataclass(slots=True)
class _Call:
    overload: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    seed: int
    cotangent: torch.Tensor | None
    derives: bool = True

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [t.detach() for t in tensors_in((list(self.args), dict(self.kwargs)))]

    def check(self) -> None:
        """Raise `Unjudged` unless autocast decides what this call is computed in."""
        tensors = self.tensors
        floats = [t for t in tensors if t.is_floating_point()]
        if not floats:
            raise Unjudged("no floating operand")
        if any(t.dtype is torch.float64 or t.is_complex() for t in tensors):
            raise Unjudged("an operand that autocast does not cast")
        if any(isinstance(a, torch.dtype) for a in (*self.args, *self.kwargs.values())):
            raise Unjudged("the call names its dtype")
        if self.overload._schema.is_mutable:
            raise Unjudged("writes in place")
        if sum(t.numel() for t in tensors) > _MOST:
            raise Unjudged(f"more than {_MOST:,} elements")
        if not all(bool(torch.isfinite(t).all()) for t in floats):
            raise Unjudged("an operand that is not finite")

    def arriving(self, dtype: torch.dtype | None) -> list[torch.Tensor] | None:
        """Return the tensors as they arrive in a dtype, or as they are; None: they do not.

        All are float32, whose gradients are not rounded to 16 bits after all.
        """
        tensors = self.tensors
        if dtype is None:
            single = all(t.dtype is torch.float32 for t in tensors if t.is_floating_point())
            return tensors if single else None
        given = [t.to(dtype).float() if t.is_floating_point() else t for t in tensors]
        finite = all(bool(torch.isfinite(t).all()) for t in given if t.is_floating_point())
        return given if finite else None

    def made(self, given: Sequence[torch.Tensor], dtype: torch.dtype) -> _Made:
        """Return results and gradients of the call with its tensors cast to a dtype."""
        before = torch.get_rng_state()
        try:
            with dispatch.exclude():
                found = self._run(given, dtype)
        except Exception as error:
            name = str(dtype).removeprefix("torch.")
            raise Unjudged(f"refuses {name} on the CPU") from error
        if not torch.equal(before, torch.get_rng_state()):
            raise Unjudged("draws at random")
        if any(t.is_complex() for t in found.results):
            raise Unjudged("complex results, which have no 16 bits")
        return found

    def in_parts(
        self,
        given: Sequence[torch.Tensor],
        arriving: torch.dtype | None,
        low: torch.dtype,
        table: PolicyTable,
    ) -> _Made | None:
        """Return what the call makes under a table that has no rule for it; None: it casts none."""
        if not dispatch.is_composite(self.overload):
            return None
        with ExitStack() as stack:
            stack.enter_context(reference.under(reference.DOCUMENTED))
            stack.enter_context(reference.autocast("cpu", enabled=False))  # in the backward pass
            log = stack.enter_context(reference.log_kernels())
            own = replace(load_table("cpu"), rules=table.rules)
            context = reference.autocast("cpu", low, table=own)
            try:
                found = self._run(given, arriving, context)
            except Exception:
                return None
        return found if log else None

    def _run(
        self,
        given: Sequence[torch.Tensor],
        dtype: torch.dtype | None,
        context: AbstractContextManager[Any] | None = None,
    ) -> _Made:
        wide, once = dtype is torch.float64, Once()
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            if dtype in SIXTEEN or context is not None:
                stack.enter_context(once)
            leaves = [t.double() if wide and t.is_floating_point() else t.detach() for t in given]
            written = self._written()
            leaves = [t.clone() if i in written else t for i, t in enumerate(leaves)]
            floats = [t for i, t in enumerate(leaves) if t.is_floating_point() and i not in written]
            for t in floats:
                t.requires_grad_(self.derives)
            turn = iter(t.to(dtype) if dtype and t.is_floating_point() else t for t in leaves)
            args = [with_tensors(a, turn) for a in self.args]
            kwargs = {name: with_tensors(a, turn) for name, a in self.kwargs.items()}
            with context or nullcontext():
                out = self.overload(*args, **kwargs)
            results = [t for t in tensors_in(out) if t.is_floating_point() or t.is_complex()]
            grads = self._gradients([t for t in results if t.requires_grad], floats)
        return _Made([t.detach() for t in results], grads, once.emulated)

    def _written(self) -> set[int]:
        """Return the numbers of the tensors that the op writes though its schema says no such."""
        names = [a.name for a in self.overload._schema.arguments]
        found, number = set(), 0
        for name, value in [*zip(names, self.args, strict=False), *self.kwargs.items()]:
            count = len(tensors_in(value))
            if name in ("running_mean", "running_var"):
                found |= set(range(number, number + count))
            number += count
        return found

    def _gradients(
        self, starts: Sequence[torch.Tensor], floats: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the operands; none from the first time on that there are none."""
        if starts and self.derives:
            try:
                given = self._cotangents(starts)
                return list(torch.autograd.grad(starts, floats, given, allow_unused=True))
            except (NotImplementedError, RuntimeError):
                self.derives = False
        return [None] * len(floats)

    def _cotangents(self, starts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        drawn = [torch.randn(t.shape, generator=generator) for t in starts]
        if self.cotangent is not None and self.cotangent.shape == starts[0].shape:
            size = float(self.cotangent.abs().max()) if self.cotangent.numel() else 0.0
            if 0 < size < math.inf:
                drawn[0] = self.cotangent.double() * 2.0 ** -math.floor(math.log2(size))
        return [d.to(torch.bfloat16).to(t.dtype) for d, t in zip(drawn, starts, strict=True)]


def _judged(
    float32: Sequence[torch.Tensor | None], exact: Sequence[torch.Tensor | None]
) -> list[bool]:
    """Return which values say something: not 0, and float32 keeps half of its digits of them."""
    found = []
    for value, exactly in zip(float32, exact, strict=True):
        if value is None or exactly is None or not exactly.numel():
            found.append(False)
            continue
        error, lost = error_of(value, exactly)
        says = bool(torch.isfinite(exactly).all()) and bool((exactly != 0).any())
        found.append(says and not lost and digits_of(error) >= _SINGLE / 2)
    return found


def _kept(made: _Made, exact: _Made, judged: Sequence[Sequence[bool]]) -> Kept:
    """Return what a way keeps, among the values that are judged."""
    with dispatch.exclude():
        return _worst(made, exact, judged)


def _worst(made: _Made, exact: _Made, judged: Sequence[Sequence[bool]]) -> Kept:
    overflowed = vanished = False
    worst: list[float | None] = []
    for values, exactly, says in zip(made, exact, judged, strict=True):
        digits = []
        for value, e, said in zip(values, exactly, says, strict=True):
            if not said or value is None or e is None:
                continue
            error, lost = error_of(value, e)
            overflowed |= lost > 0
            vanished |= not lost and not bool(value.any())
            if not lost:
                digits.append(min(digits_of(error), _SINGLE))
        worst.append(min(digits, default=None))
    return Kept(worst[0], worst[1], overflowed, vanished, made.emulated)
