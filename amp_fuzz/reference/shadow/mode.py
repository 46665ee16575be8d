"""Shadow arithmetic: how far rounding alone can move a result.

A `Shadow` is a dispatch mode. Beside each tensor of a computation it keeps a clean copy in float64
and several that are perturbed at every op, by as much as an honest kernel may round (Monte Carlo
arithmetic: Parker 1997; Denis, de Oliveira Castro and Petit 2016). The spread of the perturbed
copies about the clean one is the *band* of a value: another implementation may be a few spreads
away from the clean value, and no more, if it differs by rounding only.

One rule for all ops. Floating inputs are perturbed by a relative error of up to ``4 u(compute)``
and outputs by up to ``u(nominal)``, where ``u`` is the unit roundoff (2^-8 bfloat16, 2^-11 float16,
2^-24 float32, 2^-53 float64) and ``compute`` is float32 for the 16-bit types: each kernel is taken
to be backward stable. Views, copies and the largest and smallest of some values are not perturbed,
and nor is a pointwise op that rounded nothing, as far as float64 shows it. Where an op's result is
not finite, the copies take that result.

Tensors are followed by their memory, so that views, in-place ops and what autograd saves are the
same value as what they were made from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amp_fuzz.reference.schemas import bound, draws
from amp_fuzz.reference.shadow.exact import EXACT
from amp_fuzz.reference.shadow.sums import lost
from amp_fuzz.reference.shadow.written import CASTING, SIXTEEN, written

__all__ = [
    "THRESHOLD",
    "UNIT_ROUNDOFF",
    "Band",
    "Distance",
    "Promise",
    "Reach",
    "Shadow",
    "Shadowed",
    "distance",
    "either",
    "forget",
    "shadow",
    "unit",
]

UNIT_ROUNDOFF: dict[torch.dtype, float] = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
    torch.complex32: 2.0**-11,
    torch.complex64: 2.0**-24,
    torch.complex128: 2.0**-53,
}
_WIDE: dict[torch.dtype, torch.dtype] = {
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.float32: torch.float64,
    torch.float64: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
    torch.complex128: torch.complex128,
}
_REAL: dict[torch.dtype, torch.dtype] = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


Reach: TypeAlias = Literal["nominal", "unbounded", "bounded"]
Promise: TypeAlias = Literal["none", "written", "all"]
"""Which roundings to 16 bits an implementation may not leave out: see `Shadow`."""

THRESHOLD = 4.0
"""How many units a value may be off: see `amp_fuzz.oracle.rounding`."""


@dataclass(frozen=True, slots=True)
class Band:
    """What rounding can make of one tensor.

    nominal: the value itself, in its own dtype. clean: float64 (complex128; the dtype itself for
    integers and bool), same shape. samples: ``[K, *shape]``, the perturbed copies. known: False
    where an op could not be followed, so that nothing can be said. left: the ops before it whose
    results their dtype could not hold; an implementation that keeps float32 in between may.
    """

    nominal: torch.Tensor
    clean: torch.Tensor
    samples: torch.Tensor
    known: bool
    left: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a value is from a band.

    excess: the largest distance of an element from the clean value, in units of what rounding
    explains there. bias: the mean signed distance over the tensor, in units of what the samples
    have. index: the worst element; expected, observed, scale: the clean value there, the value, and
    one unit.
    """

    excess: float
    bias: float
    index: tuple[int, ...] = ()
    expected: float = 0.0
    observed: float = 0.0
    scale: float = 0.0


@dataclass(slots=True)
class _Memory:
    """The copies of one storage: ``[K + 1, elements]``, the clean one first."""

    keep: torch.UntypedStorage
    copies: torch.Tensor
    dtype: torch.dtype
    known: bool = True
    left: tuple[str, ...] = ()
    count: int = 0


class Shadow(TorchDispatchMode):
    """Follow every op of a block on a clean and on `samples` perturbed copies.

    Args:
        samples: how many perturbed copies.
        seed: of the perturbations; the nominal computation does not see it.
        flushes: the copies take numbers below the smallest normal one of the precision that is
            computed with, of an op's inputs and of its results, for 0: all, or some.
        reorders: an implementation may add in another order, so that a ``bounded`` copy also ends
            where the sum of the absolute values leaves the range.
        in_turn: the copies of sums lose what one loses that adds one term after the other.
        reach: what the copies do where the nominal value leaves the range of its dtype. They take
            that value (``nominal``), stay what they are in float64 (``unbounded``), or take it and
            leave the range at a quarter of it too (``bounded``). An implementation that keeps
            another precision in between comes to what is between the last two. What is unbounded
            and beyond float64 itself is some number, in sums and products of numbers.
        promise: which roundings to 16 bits are made: of the casts that the program writes, or
            ``all`` of them. Each copy is rounded there, where it would else be off by up to half a
            unit: of a number that is known exactly nothing but its rounding is explained.

    Of more than 16 copies, each fourth has 0 where the others have both signs, as after a sum whose
    digits all cancel.

    Use it inside `reference.autocast` or around it, then ask `band` for any tensor of the block,
    gradients included. Works on strided tensors of the CPU.
    """

    def __init__(
        self,
        samples: int = 8,
        seed: int = 0,
        reach: Reach = "nominal",
        *,
        flushes: bool = False,
        reorders: bool = False,
        in_turn: bool = False,
        promise: Promise = "none",
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.samples, self.reach, self.promise = samples, reach, promise
        self.flushes, self.reorders, self.in_turn = flushes, reorders, in_turn
        self._seed, self._calls = seed, 0  # `_begin` seeds both generators, for each op
        self._generator = torch.Generator()
        # For what only a bounded run draws: results of one op stay in step with one that is not.
        self._coins = torch.Generator()
        self._memories: dict[int, dict[torch.dtype, _Memory]] = {}
        self.refused: dict[str, str] = {}

    # -- what was found ---------------------------------------------------------------------------

    def band(self, tensor: torch.Tensor) -> Band:
        """Return the band of a tensor that the block has met (else: of what it is, exactly)."""
        with torch.no_grad(), _off():
            tensor = tensor.detach()
            memory, copies = self._copies(tensor)
            copies = copies.clone()
            return Band(tensor.clone(), copies[0], copies[1:], memory.known, memory.left)

    def forget(self, tensor: torch.Tensor) -> None:
        """Say of a tensor, and of what is computed from it, that nothing is known."""
        with torch.no_grad(), _off():
            self._raw(tensor)[0].known = False

    def either(self, tensor: torch.Tensor, other: torch.Tensor) -> None:
        """Let elements of a tensor be those of another one of its shape, any of them or all."""
        with torch.no_grad(), _off():
            (memory, window), (theirs, copies) = self._raw(tensor), self._copies(other)
            memory.known = memory.known and theirs.known
            self._begin()
            coin = torch.rand(window.shape, generator=self._generator) < 0.5
            coin[0], coin[1::2] = False, True
            window.copy_(torch.where(coin, _seen(copies, tensor).to(window.dtype), window))

    # -- following --------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Seed what is drawn for one op, or for one choice, by its number.

        Runs of one seed are compared copy by copy. An op that draws more in one of them, or that
        raises there, must not change what is drawn for the ops after it.
        """
        self._calls += 1
        number = (self._seed * 1_000_003 + self._calls) % 2**64
        self._generator.manual_seed(number)
        self._coins.manual_seed(number)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an op, then run it on every copy."""
        kwargs = kwargs or {}
        if func in (torch.ops.aten.equal.default, torch.ops.aten._local_scalar_dense.default):
            # TorchScript reads its constants: numbers that are tensors come as Python's.
            args = tuple(a if isinstance(a, torch.Tensor) else torch.tensor(a) for a in args)
        call = _Call(func, args, kwargs)
        if not call.follows:
            return func(*args, **kwargs)
        self._begin()
        # What is written in place must be known as it was before.
        before = [self._copies(t) for t in call.tensors] if call.targets else []
        exact = self._rounds_nothing(call) if call.targets else None
        out = func(*args, **kwargs)
        results = _tensors(out)
        if call.views(results) or any(t._is_zerotensor() or t.is_meta for t in results):
            return out  # the same memory, or none
        if not call.targets:
            if self._counts(call, results):
                return out
            before = [self._copies(t) for t in call.tensors]
            exact = self._rounds_nothing(call, results)
        if call.uninitialised:
            for t in call.written(results):
                self._store(t, None, known=True, left=())
            return out
        if call.random:
            # The copies take what was drawn; what came into it inexact is lost.
            known = all(m.known and bool(((c == c[:1]) | (c != c)).all()) for m, c in before)
            left = tuple(dict.fromkeys(name for memory, _ in before for name in memory.left))
            for t in call.written(results):
                self._store(t, None, known=known, left=left)
            return out
        self._follow(call, before, out, exact=exact)
        return out

    def _counts(self, call: _Call, results: Sequence[torch.Tensor]) -> bool:
        """Return whether an op makes numbers without rounding of such that nothing has followed.

        What is met for the first time is exact, so there is nothing to keep.
        """
        return all(t.dtype not in UNIT_ROUNDOFF for t in results) and all(
            t.dtype not in UNIT_ROUNDOFF and t.untyped_storage()._cdata not in self._memories
            for t in call.tensors
        )

    def _follow(
        self,
        call: _Call,
        before: Sequence[tuple[_Memory, torch.Tensor]],
        out: Any,
        *,
        exact: torch.Tensor | None,
    ) -> None:
        """Run an op on every copy and keep what comes out."""
        results = _tensors(out)
        known = all(memory.known for memory, _ in before)
        known = known and not (self.flushes and call.factors and any(map(_far, call.tensors)))
        left = tuple(dict.fromkeys(name for memory, _ in before for name in memory.left))
        quiet = exact is not None and _equals(exact, results[0])
        quiet = quiet and (call.moves or all(map(_short, [results[0], *call.tensors])))
        rounds = self._promised(call)
        narrow, still = call.narrow, quiet or (rounds and (call.moves or call.func in _CONVERTING))
        inputs = [
            self._flushed(copies if still else self._perturbed(copies, t, narrow), t)
            for t, (_, copies) in zip(call.tensors, before, strict=True)
        ]
        if call.integral(results):
            inputs = call.widened(inputs)
        state = torch.get_rng_state() if call.draws else None
        beyond: list[torch.Tensor | None] = []
        try:
            made = self._run(call, inputs)
            if self.flushes and call.divides and len(inputs) > 1:
                made = [self._divided(made[0], inputs[1], call.tensors[1])]
            if self.flushes and call.bounds and made[0] is not None:
                made = [self._kept(made[0], before[0][1], call.tensors[0]), *made[1:]]
            if self.in_turn and made[0] is not None:
                made = [
                    self._added_in_turn(made[0], lost(call.func, call.args, call.kwargs)),
                    *made[1:],
                ]
            if self.reach == "unbounded" and self.reorders and call.expands:
                made = [_held(copies, inputs) for copies in made]
            if call.crosses:
                beyond = self._crossed_beyond(call, inputs)
            elif call.func in _NORMS:
                beyond = self._squared_beyond(call, inputs[0][0], results)
            elif self.reorders and call.scales:
                beyond = self._scaled_beyond(call, results)
            elif self.reorders and (call.adds or call.transforms or call.averages > 1):
                beyond = self._beyond(call, inputs, results)
            if beyond and self.reach == "unbounded" and (call.crosses or call.func in _NORMS):
                made = [_held(copies, inputs) for copies in made]  # nor may float64 hold it
        except Exception as error:
            self.refused[str(call.func)] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            made = []
        finally:
            if state is not None:
                torch.set_rng_state(state)
        written = call.written(results)
        if len(made) != len(written):  # a kernel may give gradients that nobody asked for
            made = []
        none = [None] * len(written)
        gain = call.gain(results) if self.flushes else 1
        for t, copies, end in zip(written, made or none, beyond or none, strict=True):
            terms = call.terms(t) * gain
            if rounds and copies is not None and t.dtype in SIXTEEN:
                copies, quiet = _rounded(copies, t.dtype), True
            if copies is None or copies.shape[1:] != t.shape:
                self._store(t, None, known=False, left=left)
            elif self._store(t, copies, known=known, left=left, quiet=quiet, terms=terms, ends=end):
                memory = self._copies(t)[0]
                name = str(call.func).removeprefix("aten.")
                memory.left = tuple(dict.fromkeys((*memory.left, name)))

    def _promised(self, call: _Call) -> bool:
        """Return whether an implementation may not leave out the rounding of an op's results."""
        if self.promise == "all":
            return True
        return self.promise == "written" and call.func in _CONVERTING and written()

    def _run(self, call: _Call, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Run an op on every copy; ``[K + 1, *shape]`` for each tensor that it writes.

        None where the copies came to different shapes, as those of `nonzero` may.
        """
        if call.equates and len(inputs[0]) > _MANY:
            return [self._equated(call, inputs)]
        if call.func is _aten.pow.Tensor_Scalar and call.tensors[0].dtype is torch.float32:
            return [self._raised(inputs[0], call.args[1])]
        if call.elementwise:
            return [*call.at_once(inputs)]
        if call.unstable:
            return [*self._sorted(call, inputs[0])]
        one_by_one = zip(*(i.unbind() for i in inputs), strict=True)
        made = [call.on(copy) for copy in one_by_one] if inputs else self._unread(call)
        return [
            torch.stack(copies) if len({c.shape for c in copies}) == 1 else None
            for copies in zip(*made, strict=True)
        ]

    def _unread(self, call: _Call) -> list[list[torch.Tensor]]:
        """Return what an op makes of no tensors, once for each copy."""
        return [call.on([]) for _ in range(self.samples + 1)]

    def _raised(self, copies: torch.Tensor, exponent: float) -> torch.Tensor:
        """Return powers to a number, which every second copy has in float32.

        torch's kernel rounds it for the elements that it computes as a vector, and not for the
        last few; at 1e19 that is 35 units of a result.
        """
        exponents = torch.full((len(copies),), exponent, dtype=torch.float64)
        exponents[1::2] = exponents[1::2].float().double()
        return torch.pow(copies, exponents.reshape(-1, *[1] * (copies.dim() - 1)))

    def _equated(self, call: _Call, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return whether two tensors are equal; some copies are, where the samples' order varies.

        As their difference may cancel: noise alone makes no two sums equal.
        """
        made, (one, other) = call.at_once(inputs)[0], call.aligned(inputs)
        same = self._cancelled(one - other) == 0
        return made & ~same if call.func is _aten.ne.Tensor else made | same

    def _sorted(self, call: _Call, copies: torch.Tensor) -> list[torch.Tensor]:
        """Return sorted copies and their indices, with zeros in any order.

        Every second copy has them in the order that they came in, the clean one in torch's. Noise
        parts all other numbers that are equal.
        """
        given = bound(call.func, call.args, call.kwargs)
        dim, descending = int(given.get("dim", -1)), bool(given.get("descending", False))
        dim = dim % max(copies.dim() - 1, 1) + 1
        order = torch.rand(copies.shape, generator=self._generator).argsort(dim)
        size = [1] * copies.dim()
        size[dim] = -1
        order[1::2] = torch.arange(copies.shape[dim]).reshape(size)
        mixed = copies.gather(dim, order)
        found = torch.sort(mixed, stable=True, dim=dim, descending=descending)
        index = order.gather(dim, found.indices)
        values, index[0] = found.values, call.on([copies[0]])[-1]
        return [values, index]

    def _beyond(
        self, call: _Call, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Return for each result where a sum of some of its terms may leave the range, if any."""
        sizes = [c[0].abs() if c.dtype in UNIT_ROUNDOFF else c[0] for c in inputs]
        if call.transforms:  # which may divide last; of a Hermitian tensor half is given
            dims = bound(call.func, call.args, call.kwargs)["dim"]
            whole = [2 * sizes[0].sum(dims, keepdim=True).expand(results[0].shape)]
        else:
            try:
                whole = call.on(sizes)
            except RuntimeError:  # no such op of real numbers
                return []
        limit = self._limit(call)
        whole = [size * call.averages for size in whole] if call.averages > 1 else whole
        found = [size.abs() > limit if size.is_floating_point() else None for size in whole]
        return [b if b is not None and b.any() else None for b in found]

    def _crossed_beyond(
        self, call: _Call, inputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Return where one of the two products of a cross product leaves the range.

        The kernel rounds one of them only (a fused multiply-add): of two that are infinite it comes
        to an infinity, where a decomposition, which rounds both, comes to NaN.
        """
        if any(t.dtype not in UNIT_ROUNDOFF for t in call.tensors):
            return []
        a, b = torch.broadcast_tensors(*(copies[0].abs() for copies in inputs))
        dim = bound(call.func, call.args, call.kwargs)["dim"]
        products = [a.roll(i, dim) * b.roll(j, dim) for i, j in ((1, 2), (2, 1))]
        found = torch.maximum(*products) > self._limit(call)
        return [found] if found.any() else []

    @staticmethod
    def _squared_beyond(
        call: _Call, x: torch.Tensor, results: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Return what a norm computes of elements whose variance leaves the range.

        A kernel that sums the squares of float32 in float64, or keeps a running mean, comes to
        another deviation than a decomposition: to a number, infinity, or NaN.
        """
        given = bound(call.func, call.args, call.kwargs)
        if given.get("training") is False or not x.numel():
            return []
        channels = "momentum" in given
        if channels:
            rows = x.transpose(0, 1).reshape(x.shape[1], -1)
        elif "group" in given:
            rows = x.reshape(given["N"], given["group"], -1)
        else:
            rows = x.flatten(-len(given["normalized_shape"]))
        squares = (rows - rows.mean(-1, keepdim=True)).square().sum(-1)
        limit = torch.finfo(
            torch.float64 if call.tensors[0].dtype is torch.float64 else torch.float32
        ).max
        finite = torch.isfinite(rows).all(-1)
        lost = finite & ~(squares <= limit)
        mean = finite & ~(rows.abs().sum(-1) <= limit)
        if not (lost | mean).any():
            return []
        whole = (lost | mean).unsqueeze(-1).expand(rows.shape)
        if channels:
            whole = whole.reshape(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1)
        returned = [whole.reshape(x.shape), mean, lost | mean]
        names = [r.name for r in call.func._schema.returns[3:]]
        kept = {"running_mean_out": mean, "running_var_out": lost | mean}
        found = [*(mean, lost | mean)[: len(call.targets)], *returned, *map(kept.get, names)]
        shapes = [t.shape for t in call.written(results)]
        return [f if f is None else f.reshape(s) for f, s in zip(found, shapes, strict=True)]

    @staticmethod
    def _limit(call: _Call) -> float:
        """Return the largest number of the precision that an op computes in."""
        dtypes = [t.dtype for t in call.tensors if t.dtype in UNIT_ROUNDOFF]
        wide = all(_REAL.get(d, d) is torch.float64 for d in dtypes)
        return torch.finfo(torch.float64 if wide else torch.float32).max

    def _scaled_beyond(
        self, call: _Call, results: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Return where ``alpha * other`` leaves the range, which a fused kernel does not round."""
        given = bound(call.func, call.args, call.kwargs)
        scaled = given["other"].detach() * given["alpha"]
        found = torch.isfinite(given["other"]) & ~torch.isfinite(scaled)
        return [found.expand(results[0].shape)] if found.any() else []

    def _added_in_turn(self, made: torch.Tensor, off: torch.Tensor | None) -> torch.Tensor:
        """Return copies of a sum with what is lost: every second with all of it, others with less.

        A compiler may add some of the terms by themselves.
        """
        if off is None or off.shape != made.shape[1:]:
            return made
        part = torch.rand(made.shape, generator=self._coins, dtype=torch.float64)
        part[0], part[1::2] = 0, 1
        return made + part * off

    def _rounds_nothing(
        self, call: _Call, results: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor | None:
        """Return what a pointwise op makes of the nominal values in float64; None: nothing."""
        if not call.pointwise or call.draws:
            return None
        try:
            wide = [t.detach().to(_WIDE[t.dtype]) if t.dtype in _WIDE else t for t in call.tensors]
            wide = call.widened(wide) if call.integral(results) else wide
            found = call.on(wide)  # which writes into copies
        except Exception:
            return None
        return found[0] if found else None

    def _perturbed(
        self, copies: torch.Tensor, nominal: torch.Tensor, narrow: float = 0.0
    ) -> torch.Tensor:
        """Return copies of an input, all but the clean one off by up to 4 u(compute).

        narrow: the roundoff of a dtype that the op may cast them to before.
        """
        if nominal.dtype not in UNIT_ROUNDOFF:
            return copies
        compute = torch.float64 if nominal.dtype in (torch.float64, torch.complex128) else None
        u = 4 * UNIT_ROUNDOFF[compute or torch.float32]
        if narrow > UNIT_ROUNDOFF[nominal.dtype]:
            u += narrow
        off = copies.clone(memory_format=torch.contiguous_format)
        off[1:].mul_(self._noise(copies[1:]).mul_(u).add_(1))
        return off

    def _flushed(
        self, copies: torch.Tensor, nominal: torch.Tensor, terms: float = 0
    ) -> torch.Tensor:
        """Return copies with 0 for subnormal numbers.

        Every second copy has 0 for all of them, the others for half, the clean one for none.
        terms: of how many an element is the sum: inside a kernel each may have been taken for 0.
        """
        if not self.flushes or nominal.dtype not in UNIT_ROUNDOFF:
            return copies
        if copies.is_complex():
            parts = torch.view_as_real(copies), torch.view_as_real(nominal)
            return torch.view_as_complex(self._flushed(*parts, terms))
        limits = torch.finfo(torch.float64 if nominal.dtype is torch.float64 else torch.float32)
        size = copies.abs()
        coin = torch.rand(copies.shape, generator=self._generator) < 0.5
        coin[1::2] = True
        found = torch.where(coin & (size < limits.tiny), copies * 0, copies)
        if terms:
            lost = limits.tiny * terms
            some = copies + lost * self._noise(copies)
            some[1::2] = copies[1::2].sign() * (size[1::2] - lost).clamp(min=0)
            found = torch.where((size == 0) | ~torch.isfinite(size), found, some)
        found[0] = copies[0]
        return found

    def _cancelled(self, copies: torch.Tensor) -> torch.Tensor:
        """Return many copies, each fourth with 0 where the others have both signs.

        Where all digits cancel, an implementation may come to 0 exactly, which no noise does, and
        what is computed from it is far from what any other number would give: a sigmoid is not flat
        there. Half of these copies have 0 wherever they can, the others in half of the places; none
        where one is infinite already, as the reciprocal of such a 0.
        """
        if len(copies) <= _MANY:
            return copies
        if copies.is_complex():
            return torch.view_as_complex(self._cancelled(torch.view_as_real(copies)))
        # Drawn whether or not it is needed: two runs of one seed are compared element by element,
        # and would be out of step from where only one of them has something to cancel.
        zeros = torch.zeros(copies.shape, dtype=torch.bool)
        zeros[4::8] = True
        zeros[8::8] = torch.rand(copies[8::8].shape, generator=self._generator) < 0.5
        number = torch.arange(len(copies))
        others = copies[(number % 4 > 0) | (number == 0)]
        both = (others.amin(0) < 0) & (others.amax(0) > 0) & torch.isfinite(copies).all(0)
        return torch.where(both & zeros, 0.0, copies) if both.any() else copies

    def _divided(
        self, made: torch.Tensor | None, divisor: torch.Tensor, nominal: torch.Tensor
    ) -> torch.Tensor | None:
        """Return quotients with 0 where the reciprocal of the divisor may be taken for 0.

        A compiler that divides many numbers by one multiplies them with its reciprocal.
        """
        if made is None or made.is_complex() or divisor.is_complex():
            return made
        limits = torch.finfo(torch.float64 if nominal.dtype is torch.float64 else torch.float32)
        small = divisor.abs() * limits.tiny > 1
        small = small.reshape(len(small), *[1] * (made.dim() - small.dim()), *small.shape[1:])
        coin = torch.rand(made.shape, generator=self._generator) < 0.5
        coin[0], coin[1::2] = False, True
        return torch.where(coin & small, made * 0, made)

    def _kept(
        self, made: torch.Tensor, copies: torch.Tensor, nominal: torch.Tensor
    ) -> torch.Tensor:
        """Return what a clamp comes to, some subnormal inputs as they are.

        It compares them with a bound as if they were 0, and a move keeps what it moves.
        """
        if copies.shape != made.shape or nominal.dtype not in UNIT_ROUNDOFF:
            return made
        wide = nominal.dtype is torch.float64
        small = copies.abs() < torch.finfo(torch.float64 if wide else torch.float32).tiny
        coin = torch.rand(made.shape, generator=self._generator) < 0.5
        coin[0], coin[2::4] = False, True
        return torch.where(coin & small, copies, made)

    def _noise(self, like: torch.Tensor) -> torch.Tensor:
        """Return numbers in [-1, 1]; complex ones in that square, since errors turn the phase."""
        if like.is_complex():
            noise = torch.rand(like.shape, generator=self._generator, dtype=like.dtype)
            return noise.mul_(2).sub_(1 + 1j)
        noise = torch.empty(like.shape, dtype=like.dtype)
        return noise.uniform_(-1, 1, generator=self._generator)

    def _store(
        self,
        nominal: torch.Tensor,
        copies: torch.Tensor | None,
        *,
        known: bool,
        left: tuple[str, ...],
        quiet: bool = False,
        terms: float = 0,
        ends: torch.Tensor | None = None,
    ) -> bool:
        """Keep the copies of a tensor; None makes them what the tensor is.

        ends: where some order of adding, or another rounding of a product, leaves the range: every
        second ``bounded`` copy is infinite there, and the others are not a number.

        Returns whether an element left the range of its dtype here, though float64 holds it.
        """
        memory, window = self._raw(nominal, written=copies is not None)
        known = memory.known and known
        memory.known = False  # until all of it is written
        for other in self._memories.get(memory.keep._cdata, {}).values():
            if other is not memory:  # the same bits as another dtype: written behind its back
                other.known = False
        memory.left = tuple(dict.fromkeys((*memory.left, *left)))
        leaves = False
        value = _resolved(nominal).detach().to(window.dtype)
        if copies is None:
            window.copy_(_seen(value, nominal).unsqueeze(0).expand(window.shape))
            memory.known = known
            return False
        copies = copies.to(window.dtype)
        if nominal.dtype in UNIT_ROUNDOFF:
            u = 0.0 if quiet else UNIT_ROUNDOFF[nominal.dtype]
            limits = torch.finfo(_REAL.get(nominal.dtype, nominal.dtype))
            if not quiet:
                # Below the smallest normal number rounding is absolute; 0 is exact.
                copies = copies.clone(memory_format=torch.contiguous_format)
                size = copies[1:].abs().nan_to_num_(0, 0, 0)  # infinity is no NaN
                nothing = size == 0
                step = size.clamp_(min=limits.tiny).mul_(u).masked_fill_(nothing, 0)
                copies[1:].add_(self._noise(copies[1:]).mul_(step))
            copies = whole = self._cancelled(self._flushed(copies, nominal, terms))
            finite = torch.isfinite(value)
            beyond = finite.logical_not() | (copies[0].abs() > limits.max)
            if beyond.any():
                leaves = bool((beyond & torch.isfinite(copies[0])).any())
                if self.reach != "unbounded":
                    # Of a number that is taken for 0 the logarithm is infinite, and no NaN.
                    own = finite | ~torch.isfinite(copies[0]) if self.flushes else finite
                    if self.reach == "bounded" and self.reorders:
                        own = own | ~torch.isfinite(copies)  # it left the range before
                    copies = torch.where(own, copies, value)
            if self.reach == "bounded":
                # A kernel may add two products, each beyond the range where their sum is not.
                copies = _ended(copies, limits.max / 4)
                copies = self._fused(copies, whole) if self.reorders else copies
                if ends is not None:
                    unlike = torch.full_like(copies, torch.nan)
                    unlike[1::2] = torch.inf
                    copies = torch.where(ends, unlike, copies)
            leaves |= ends is not None
        window.copy_(_seen(copies, nominal))
        memory.known = known
        return leaves

    def _fused(self, ended: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """Return copies of which half hold, at some elements, what is beyond the range.

        A compiler that fuses a product with the sum it goes into rounds some of the terms and not
        others: ``a * b + c * d`` is infinite where one product of two is.
        """
        if ended.is_complex():
            parts = torch.view_as_real(ended), torch.view_as_real(whole)
            return torch.view_as_complex(self._fused(*parts))
        coin = torch.rand(ended.shape, generator=self._coins) < 0.5
        found = torch.where(coin & torch.isfinite(whole) & torch.isinf(ended), ended, whole)
        found[::2] = ended[::2]
        return found

    def _copies(self, tensor: torch.Tensor) -> tuple[_Memory, torch.Tensor]:
        """Return the memory of a tensor and its copies ``[K + 1, *shape]``."""
        memory, window = self._raw(tensor)
        return memory, _seen(window, tensor)

    def _raw(self, tensor: torch.Tensor, *, written: bool = False) -> tuple[_Memory, torch.Tensor]:
        """Return the memory of a tensor and the window ``[K + 1, *shape]`` of its copies.

        Of what the memory holds, whether or not the tensor negates or conjugates it. A tensor that
        is met for the first time is exact: all copies are what it is. written: all of the window is
        written next.
        """
        if tensor._is_zerotensor():  # autograd's zeros without memory
            zeros = torch.zeros(self.samples + 1, *tensor.shape, dtype=_WIDE.get(tensor.dtype))
            return _Memory(torch.UntypedStorage(0), zeros, tensor.dtype), zeros
        storage = tensor.untyped_storage()
        views = self._memories.setdefault(storage._cdata, {})
        memory = views.get(tensor.dtype)
        count = storage.nbytes() // tensor.element_size()
        if memory is None or memory.count != count:
            # Bits seen as another dtype (view_as_real, view(dtype)): their copies are not followed.
            known = not views if memory is None else memory.known
            dtype = _WIDE.get(tensor.dtype, tensor.dtype)
            copies = torch.empty(self.samples + 1, count, dtype=dtype)
            if not (written and tensor.numel() == count and tensor.is_contiguous()):
                plain = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (count,), (1,))
                copies.copy_(plain)
            memory = _Memory(storage, copies, tensor.dtype, known, count=count)
            views[tensor.dtype] = memory
        return memory, _window(memory.copies, tensor)


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the schema and the name of an op say of it.

    batched: it works element by element and writes nothing, so that all copies go in one call.
    """

    writes: bool
    view: bool
    draws: bool
    uninitialised: bool
    moves: bool
    pointwise: bool
    batched: bool
    factors: bool
    adds: bool
    expands: bool
    casts: bool
    divides: bool
    normalises: bool


@cache
def _facts(func: Any) -> _Facts:
    aliases = [a.alias_info for a in func._schema.arguments if a.alias_info is not None]
    writes = any(alias.is_write for alias in aliases) or func in _UPDATING
    name, moves = func.__name__, func in _COPIES
    pointwise = torch.Tag.pointwise in func.tags
    return _Facts(
        writes=writes,
        view=not writes and bool(aliases),
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        uninitialised=name.partition(".")[0] in _UNINITIALISED,
        moves=moves,
        pointwise=pointwise or moves,
        batched=pointwise and not moves and not writes,
        factors=name.startswith(_FACTORING),
        adds=name.partition(".")[0] in _ADDING,
        expands=name.partition(".")[0] in _EXPANDING,
        casts=name.partition(".")[0] in _CASTING,
        divides=name in ("div.Tensor", "div_.Tensor"),
        normalises=any(part in name for part in ("batch_norm", "group_norm", "layer_norm")),
    )


class _Call:
    """One call of an op: which arguments are tensors, and which of them it writes."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.tensors = _tensors((args, kwargs))
        facts = _facts(func)
        self.view, self.draws, self.uninitialised = facts.view, facts.draws, facts.uninitialised
        self.moves, self.pointwise = facts.moves, facts.pointwise
        self.factors, self.adds, self.divides = facts.factors, facts.adds, facts.divides
        self.expands = facts.expands and all(
            math.isfinite(abs(n))
            for n in tree_leaves((args, kwargs))
            if isinstance(n, float | complex)
        )
        self.normalises = facts.normalises
        self.averages = _AVERAGING.get(func, 1)
        self.bounds = func in _BOUNDING
        self.scales = func in _SCALING and bound(func, args, kwargs)["alpha"] != 1
        self.narrow = self._narrow() if facts.casts else 0.0
        self.transforms = func in _TRANSFORMS
        self.crosses = func is _aten.linalg_cross.default
        self.random = facts.draws and draws(func, args, kwargs)
        self.unstable = func in _SORTING and self.tensors[0].dim() > 0
        self.unstable = self.unstable and not bound(func, args, kwargs).get("stable")
        self.equates = (
            func in _EQUATING
            and len(self.tensors) == 2
            and all(t.dtype.is_floating_point for t in self.tensors)
        )
        copies = func in (_aten.clone.default, _aten._to_copy.default)
        copies = copies and kwargs.get("memory_format") in (None, torch.preserve_format)
        self.elementwise = bool(self.tensors) and (facts.batched or copies)
        self.targets = self._targets(func._schema) if facts.writes else []
        self.follows = all(_plain(t) for t in self.tensors)

    def _narrow(self) -> float:
        """Return the roundoff of the dtype that a reduction is told; it may cast to it first."""
        dtype = bound(self.func, self.args, self.kwargs).get("dtype")
        return 0.0 if dtype is None else UNIT_ROUNDOFF.get(dtype, 0.0)

    def integral(self, results: Sequence[torch.Tensor]) -> bool:
        """Return whether the op computes a floating result of integers: float64 shows its rounding.

        Not all that do take floats in their place: a condition is a bool.
        """
        written = [self.tensors[i] for i in self.targets] or list(results)
        floats = (torch.bfloat16, torch.float16, torch.float32)
        if self.moves or not self.pointwise or not written or written[0].dtype not in floats:
            return False
        read = [t for i, t in enumerate(self.tensors) if i not in self.targets]
        if not read or any(t.dtype in UNIT_ROUNDOFF for t in read):
            return False
        try:
            found = self.on(
                self.widened([t.detach()[..., :1] if t.dim() else t.detach() for t in self.tensors])
            )
        except Exception:
            return False
        return bool(found) and found[0].dtype is torch.float64

    def widened(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return integers that are read as float64, and what is written too."""
        return [t.double() for t in tensors]

    def views(self, results: Sequence[torch.Tensor]) -> bool:
        """Return whether the results are the arguments' own memory, unwritten."""
        if self.targets or not results:
            return self.view
        # Some views do not say so (_unsafe_view), and some that say so copy: inference_mode brings
        # composite ops here whole, `to` and `reshape` among them.
        own = {t.untyped_storage()._cdata for t in self.tensors if not t._is_zerotensor()}
        return all(t.untyped_storage()._cdata in own for t in results if not t._is_zerotensor())

    def terms(self, result: torch.Tensor) -> int:
        """Return of how many elements one of a result is made, at most: none that is only moved."""
        if self.moves:
            return 0
        return max([4, *(t.numel() // max(result.numel(), 1) for t in self.tensors)])

    def gain(self, results: Sequence[torch.Tensor]) -> float:
        """Return how much larger a number may come out than it was inside of a kernel.

        A norm multiplies what is left of a mean by the reciprocal of a deviation, which is told
        beside it: one over the root of `eps`, where all elements are small.
        """
        if self.func is _aten.renorm.default:  # what it multiplies by may be as small
            return max(1.0, float(self.tensors[0].detach().nan_to_num().abs().amax()))
        if not self.normalises:
            return 1.0
        given = bound(self.func, self.args, self.kwargs)
        told = [given[name] for name in ("rstd", "save_invstd") if name in given]
        sizes = [t for t in (*told, *results[2:3]) if isinstance(t, torch.Tensor) and t.numel()]
        if given.get("eps"):
            return 1 / math.sqrt(given["eps"])
        return max([1.0, *(float(t.detach().nan_to_num().abs().amax()) for t in sizes)])

    def _targets(self, schema: Any) -> list[int]:
        """Return the numbers, among the tensors, of those that the op writes.

        By position: an argument that is also read elsewhere (``x.mul_(x)``) is written here only.
        """
        names = [parameter.name for parameter in schema.arguments]
        writes = {p.name for p in schema.arguments if p.alias_info and p.alias_info.is_write}
        given = [*zip(names, self.args, strict=False), *self.kwargs.items()]
        if self.func in _UPDATING and dict(given).get("training"):
            writes |= {"running_mean", "running_var"}
        found: list[int] = []
        number = 0
        for name, argument in given:
            count = len(_tensors(argument))
            if name in writes:
                found += range(number, number + count)
            number += count
        return found

    def on(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the op on other tensors and return what `written` returns, as new tensors."""
        own = list(tensors)
        for i in self.targets:
            own[i] = own[i].clone()
        turn = iter(own)
        args = [_with(a, turn) for a in self.args]
        kwargs = {name: _with(a, turn) for name, a in self.kwargs.items()}
        func = self.func
        if own and all(t.dtype is torch.float64 for t in own):
            func = EXACT.get(func, func)
        out = func(*args, **kwargs)
        return [_resolved(t) for t in [*(own[i] for i in self.targets), *self._fresh(out, own)]]

    def at_once(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run an elementwise op on all copies ``[K + 1, *shape]`` in one call."""
        return self.on(self.aligned(tensors))

    def aligned(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of one rank, so that they broadcast."""
        rank = max(t.dim() for t in tensors)
        return [t.reshape(len(t), *[1] * (rank - t.dim()), *t.shape[1:]) for t in tensors]

    def written(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what the op wrote: arguments in place, then the results that are new."""
        return [self.tensors[i] for i in self.targets] + self._fresh(results, self.tensors)

    def _fresh(self, out: Any, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if not self.targets:
            return _tensors(out)
        targets = [given[i] for i in self.targets]
        return [t for t in _tensors(out) if not any(t is g for g in targets)]


_aten = torch.ops.aten
# Ops that move or choose values and compute nothing, so that float64 shows whether a dtype rounded
# them. The largest of some values is one of them: a compiler that compares it with these before
# they were rounded is wrong, and finds it nowhere (pytorch/pytorch#195214). Ops that also return
# indices are no part of the list: which of two equal values is first is not always promised.
_COPIES = frozenset(
    getattr(getattr(_aten, name), overload)
    for name, overload in (
        ("_to_copy", "default"),
        ("clone", "default"),
        ("copy_", "default"),
        ("cat", "default"),
        ("stack", "default"),
        ("index_select", "default"),
        ("index", "Tensor"),
        ("gather", "default"),
        ("embedding", "default"),
        ("fill_", "Scalar"),
        ("zero_", "default"),
        ("amax", "default"),
        ("amin", "default"),
        ("aminmax", "default"),
        ("max", "default"),
        ("min", "default"),
    )
)

# Ops that casts are made of.
_CONVERTING = frozenset((_aten._to_copy.default, _aten.copy_.default, *CASTING))

# Ops that promise nothing of the order of equal elements, unless they are asked to be stable.
_SORTING = frozenset((_aten.sort.default, _aten.sort.stable))

_EQUATING = frozenset((_aten.eq.Tensor, _aten.ne.Tensor))

# Ops whose results are sums of many terms, in the order that a kernel likes.
_ADDING = frozenset(
    [
        *(
            "_addmm_activation",
            "_convolution",
            "_trilinear",
            "addbmm",
            "addmm",
            "addmm_",
            "addmv",
            "addmv_",
            "baddbmm",
        ),
        *(
            "baddbmm_",
            "bmm",
            "convolution",
            "convolution_backward",
            "cumsum",
            "dot",
            "mean",
            "mm",
            "mv",
            "nansum",
        ),
        *("linalg_cross", "sum", "vdot"),
    ]
)

# Sums and products: of numbers they are numbers, if there is room.
_EXPANDING = _ADDING | {
    f"{name}{place}" for name in ("add", "addcmul", "mul", "square", "sub") for place in ("", "_")
}

# Reductions that promise to cast to the dtype which they are told, and where that is narrower need
# not: torch's sum over dimensions that are not neighbours does not (`should_use_acc_buffer`,
# aten/src/ATen/native/ReduceOps.cpp), and its other sums do.
_CASTING = frozenset(("cumprod", "cumsum", "mean", "nansum", "prod", "sum"))

_BOUNDING = frozenset(
    (_aten.clamp.default, _aten.clamp.Tensor, _aten.clamp_min.default, _aten.clamp_max.default)
)

_NORMS = frozenset(
    (
        _aten.native_layer_norm.default,
        _aten.native_group_norm.default,
        _aten.native_batch_norm.default,
        _aten._native_batch_norm_legit.default,
        _aten._native_batch_norm_legit.no_stats,
        _aten._native_batch_norm_legit_functional.default,
        _aten._batch_norm_with_update.default,
        _aten._batch_norm_with_update_functional.default,
    )
)

# These write running statistics in training, which their schemas do not say.
_UPDATING = frozenset(
    (
        _aten.native_batch_norm.default,
        _aten.cudnn_batch_norm.default,
        _aten.miopen_batch_norm.default,
    )
)

_SCALING = frozenset((_aten.add.Tensor, _aten.add_.Tensor, _aten.sub.Tensor, _aten.sub_.Tensor))

# Ops whose results are means of so many elements: a compiler may add these before it divides.
_AVERAGING = {
    _aten.upsample_linear1d.default: 2,
    _aten.upsample_bilinear2d.default: 4,
    _aten.upsample_trilinear3d.default: 8,
}

_TRANSFORMS = frozenset((_aten._fft_c2c.default, _aten._fft_r2c.default, _aten._fft_c2r.default))

# Kernels that choose among rows and divide by what they chose: with numbers taken for 0, theirs or
# their reciprocals, they choose others.
_FACTORING = ("_linalg_", "linalg_", "lu_", "cholesky", "triangular_solve", "_cholesky")

_MANY = 16
"""Of more copies than these some cancel exactly where they can."""


def _far(tensor: torch.Tensor) -> bool:
    """Return whether a number, or its reciprocal, is below the smallest normal one."""
    if tensor.dtype not in UNIT_ROUNDOFF:
        return False
    tiny = torch.finfo(_REAL.get(tensor.dtype, tensor.dtype)).tiny
    size = tensor.detach().abs()
    return bool((((size < tiny) & (size > 0)) | (size > 1 / (4 * tiny))).any())


# What was in the memory before: not a result, and what it holds is no overflow.
_UNINITIALISED = frozenset(
    ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
)


def _plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    )


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in what a dispatcher passes or returns, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, (tuple, list)):
        return [t for part in tree for t in _tensors(part)]
    if isinstance(tree, dict):
        return [t for part in tree.values() for t in _tensors(part)]
    return []


def _with(tree: Any, turn: Iterator[torch.Tensor]) -> Any:
    """Return an argument with other tensors, and with wide dtypes."""
    if isinstance(tree, torch.Tensor):
        return next(turn)
    if isinstance(tree, (tuple, list)):
        return [_with(part, turn) for part in tree]
    if isinstance(tree, torch.dtype):
        return _WIDE.get(tree, tree)
    return tree


def _window(copies: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of ``[n, elements]`` copies that a tensor of that memory covers."""
    offset = copies.storage_offset() + tensor.storage_offset()
    size, stride = (len(copies), *tensor.shape), (copies.stride(0), *tensor.stride())
    return copies.as_strided(size, stride, offset)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return what the memory of a tensor holds, without its lazy negation and conjugation."""
    storage, plain = tensor.untyped_storage(), torch.empty(0, dtype=tensor.dtype)
    return plain.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without lazy negation and conjugation, which `_seen` tells of."""
    return _seen(_bits(tensor), tensor) if tensor.is_conj() or tensor.is_neg() else tensor


def _seen(held: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return what a tensor makes of what its memory holds, or the other way: both are involutions.

    Computed at once: a lazy conjugate loses its bit where a dispatch key is excluded, as it is for
    composite ops that inference_mode brings here whole.
    """
    if tensor.is_conj():
        held = held.conj_physical()
    return held.neg() if tensor.is_neg() else held


def _equals(wide: torch.Tensor, nominal: torch.Tensor) -> bool:
    if wide.shape != nominal.shape:
        return False
    value = nominal.detach().to(wide.dtype)
    return bool(((wide == value) | (wide != wide) & (value != value)).all())


def _short(tensor: torch.Tensor) -> bool:
    """Return whether float64 shows what an op rounds: not if it rounds to float64 itself.

    What has no more digits than float32, and came of such numbers, was hardly rounded to it.
    """
    if tensor.dtype not in (torch.float64, torch.complex128):
        return True
    shorter = tensor.to(torch.complex64 if tensor.is_complex() else torch.float32)
    return _equals(shorter.to(tensor.dtype), tensor)


def _ended(copies: torch.Tensor, end: float) -> torch.Tensor:
    """Return the copies with infinities in place of what is beyond an end."""
    if copies.is_complex():
        return torch.view_as_complex(_ended(torch.view_as_real(copies), end))
    return torch.where(copies.abs() > end, torch.inf * copies.sign(), copies)


def _rounded(copies: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return copies that are rounded to a dtype, all that it has numbers for.

    Where they differ, every second one is rounded from as far out as the oracle lets a value be,
    but no further than to the next number: what may be there before a rounding may be there after.
    """
    off = copies - copies[:1]
    far = torch.minimum(off.abs() * THRESHOLD, copies.abs() * UNIT_ROUNDOFF[dtype])
    out = copies.clone(memory_format=torch.contiguous_format)
    out[1::2] += (torch.maximum(far, off.abs()) * off.sign() - off)[1::2]
    made = out.to(dtype).to(copies.dtype)
    return torch.where(torch.isfinite(made), made, copies)


def _held(copies: torch.Tensor | None, inputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return copies with numbers in place of what is none, if all that it was made of are."""
    if copies is None or not all(i.numel() and bool(torch.isfinite(i).all()) for i in inputs):
        return copies
    if copies.is_complex():
        parts = _held(torch.view_as_real(copies), ())
        assert parts is not None
        return torch.view_as_complex(parts)
    high = torch.finfo(torch.float64).max / 2  # it is rounded up later
    return copies.nan_to_num(high, high, -high) if copies.is_floating_point() else copies


def _bias(own: torch.Tensor, theirs: torch.Tensor, sign: Any, few: float) -> float:
    """Return the mean of the distances, each times a sign, in units of what the samples come to.

    Distances that have the sign of what they are added to are a gain.
    """
    lean = (theirs * sign).mean(1).abs().amax()
    return float((own * sign).mean().abs() / (lean + few))


def fewness(clean: torch.Tensor) -> float:
    """Return how large a mean over such elements is of itself, beside one of them.

    One over the square root of their number, where they differ; a kernel rounds equal elements
    alike, so these are as one (Kish's effective sample size).
    """
    _, counts = torch.unique(clean, return_counts=True)
    return float((counts / clean.numel()).square().sum().sqrt())


def _off() -> Any:
    return torch.utils._python_dispatch._disable_current_modes()


def forget(tensor: torch.Tensor) -> None:
    """Tell the shadows around, if there are any, that nothing is known of a tensor."""
    for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        if isinstance(mode, Shadow):
            mode.forget(tensor)


def either(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Tell the shadows around that elements may also be another tensor's; return the first."""
    for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        if isinstance(mode, Shadow):
            mode.either(tensor, other)
    return tensor


def unit(band: Band, *, own: bool = True) -> torch.Tensor:
    """Return what rounding explains of each element, as `distance` counts it.

    Same shape as the band, float64; complex tensors as pairs. own: with what the nominal value is
    off by.
    """
    clean, samples, nominal = band.clean, band.samples, band.nominal.to(band.clean.dtype)
    if clean.is_complex():
        clean, samples = torch.view_as_real(clean), torch.view_as_real(samples)
        nominal = torch.view_as_real(nominal)
    limits = torch.finfo(_REAL.get(band.nominal.dtype, band.nominal.dtype))
    u = UNIT_ROUNDOFF[band.nominal.dtype]
    spread = (samples - clean).abs().amax(0)
    finite = torch.isfinite(clean) & torch.isfinite(spread)
    floor = 0.1 * _usual(spread[finite])
    # Among float64's subnormal numbers u of one is nothing: the smallest number is their unit.
    least = (u * clean.abs().clamp(min=limits.tiny)).clamp(min=math.ulp(0.0))
    scale = spread.clamp(min=floor) + least
    if own:
        off = (nominal - clean).abs()
        scale = scale + torch.where(torch.isfinite(off), off, 0.0)
    return scale


def _usual(spread: torch.Tensor) -> float:
    """Return what the samples of an element usually spread by, for those whose samples agree.

    The mean, or the median of those that spread at all, whichever is less: one large element would
    be a licence for all small ones beside it, and a few that spread at all for many that are known,
    such as the zeros of a mask, or the gradients of rows that nothing looked up.
    """
    some = spread[spread > 0]
    return float(torch.minimum(spread.mean(), some.median())) if some.numel() else 0.0


def leans(band: Band) -> tuple[float, float]:
    """Return what `distance` divides a bias by, without and with the sign of the clean value."""
    clean, samples = band.clean, band.samples
    if clean.is_complex():
        clean, samples = torch.view_as_real(clean), torch.view_as_real(samples)
    off = samples - clean
    finite = torch.isfinite(clean) & torch.isfinite(off).all(0)
    theirs = torch.where(finite & (off != 0), off / unit(band), 0.0).reshape(len(off), -1)
    plain, signed = theirs.mean(1), (theirs * clean.sign().flatten()).mean(1)
    return float(plain.abs().amax()), float(signed.abs().amax())


def distance(band: Band, value: torch.Tensor, among: torch.Tensor | None = None) -> Distance:
    """Return how far a value is from a band; both of one dtype and shape.

    among: bool, of that shape (complex numbers as pairs): the elements that are looked at.

    What the nominal value is off by is allowed to others too: some kernels are not backward stable
    (gelu far from 0, interpolation), and no other implementation need be better than torch's own.
    `Band.nominal` itself is measured without that allowance.

    Elements whose clean value or whose samples are not finite have no distance: `oracle` compares
    these exactly. A value that is not finite where these and the nominal value are is infinitely
    far. Where the band is not known, excess and bias are nan.

    Raises:
        ValueError: another dtype or shape than the band's.
    """
    if (value.dtype, value.shape) != (band.nominal.dtype, band.nominal.shape):
        raise ValueError(
            f"value is {value.dtype}{list(value.shape)}, the band of "
            f"{band.nominal.dtype}{list(band.nominal.shape)}"
        )
    if not band.known:
        return Distance(float("nan"), float("nan"))
    if not value.numel():
        return Distance(0.0, 0.0)
    clean, samples, given = band.clean, band.samples, value
    value = value.detach().to(clean.dtype)
    if band.nominal.dtype not in UNIT_ROUNDOFF:
        # Integers and bool: one of the values that the samples came to, or torch itself.
        unlike = (value != clean) & (samples != value).all(0)
        if band.nominal is not given:
            unlike &= value != band.nominal
        if among is not None:
            unlike &= among
        if not unlike.any():
            return Distance(0.0, 0.0)
        index = tuple(int(i) for i in torch.nonzero(unlike)[0])
        return Distance(float("inf"), 0.0, index, float(clean[index]), float(value[index]), 0.0)
    if clean.is_complex():
        clean, samples = torch.view_as_real(clean), torch.view_as_real(samples)
        value = torch.view_as_real(value)
    nominal = band.nominal.detach().to(band.clean.dtype)
    nominal = torch.view_as_real(nominal) if nominal.is_complex() else nominal
    off = samples - clean
    finite = torch.isfinite(clean) & torch.isfinite(off).all(0)
    if among is not None:
        finite &= among
    lost = finite & torch.isfinite(nominal) & ~torch.isfinite(value)
    if lost.any():
        where = tuple(int(i) for i in torch.nonzero(lost)[0])
        return Distance(float("inf"), 0.0, where, float(clean[where]), float(value[where]))
    finite &= torch.isfinite(value)
    if not finite.any():
        return Distance(0.0, 0.0)
    scale = unit(band, own=band.nominal is not given)
    away = torch.where(finite & (value != clean), (value - clean) / scale, 0.0)
    worst = int(away.abs().argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), away.shape))
    theirs = torch.where(finite & (off != 0), off / scale, 0.0).reshape(len(off), -1)
    few, signs = fewness(clean), (1.0, clean.sign().flatten())
    bias = max(_bias(away.flatten(), theirs, sign, few) for sign in signs)
    return Distance(
        float(away.abs().max()),
        bias,
        index,
        float(clean[index]),
        float(value[index]),
        float(scale[index]),
    )


@dataclass(frozen=True, slots=True)
class Shadowed:
    """What `shadow` returns: the result of the call, and the mode that followed it."""

    result: Any
    mode: Shadow

    def band(self, tensor: torch.Tensor) -> Band:
        """Return the band of a tensor of the call: a result, an input, a gradient."""
        return self.mode.band(tensor)


def shadow(
    function: Callable[..., Any], *args: Any, samples: int = 8, seed: int = 0, **kwargs: Any
) -> Shadowed:
    """Call any function with shadows: ``shadow(module, x).band(result)``.

    The call may hold contexts of autocast (`reference.autocast`, or torch's) and backward passes.

    Args:
        function: what to call with the other arguments.
        samples: how many perturbed copies, at least 2.
        seed: of the perturbations.

    Raises:
        ValueError: fewer than 2 samples.
    """
    if samples < 2:
        raise ValueError(f"samples={samples!r} must be at least 2: a spread needs them")
    mode = Shadow(samples, seed)
    with mode:
        result = function(*args, **kwargs)
    return Shadowed(result, mode)
