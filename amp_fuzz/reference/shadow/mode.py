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

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from amp_fuzz.reference.shadow.band import REAL, UNIT_ROUNDOFF, Band
from amp_fuzz.reference.shadow.call import Call
from amp_fuzz.reference.shadow.copies import (
    WIDE,
    Memory,
    ended_at,
    equals,
    is_far,
    is_short,
    no_modes,
    resolved,
    rounded_to,
    seen_as,
    tensors_in,
    window_of,
    with_numbers,
)
from amp_fuzz.reference.shadow.ops import CONVERTING, NORMS
from amp_fuzz.reference.shadow.products import Products
from amp_fuzz.reference.shadow.schemas import bound
from amp_fuzz.reference.shadow.sums import lost
from amp_fuzz.reference.shadow.written import SIXTEEN, written

__all__ = ["Promise", "Reach", "Shadow"]

_aten = torch.ops.aten

Reach: TypeAlias = Literal["nominal", "unbounded", "bounded"]


Promise: TypeAlias = Literal["none", "written", "all"]
"""Which roundings to 16 bits an implementation may not leave out: see `Shadow`."""


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
        products: tells of an op how an implementation may round the inputs of its products; None:
            it does not.
        adding: tells of an op and its dtype whether it adds in the dtype of its result, in any
            order, as the atomic additions of a GPU do. Then its inputs are off by up to
            ``4 u(nominal)``. Of a product of which some terms leave the range nothing is known.
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
        products: Callable[[Any], Products | None] | None = None,
        adding: Callable[[Any, torch.dtype], bool] | None = None,
        promise: Promise = "none",
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.samples, self.reach, self.promise = samples, reach, promise
        self.flushes, self.reorders, self.in_turn = flushes, reorders, in_turn
        self.products = products
        self.adding = adding
        self._seed, self._calls = seed, 0  # `_begin` seeds both generators, for each op
        self._generator = torch.Generator()
        # For what only a bounded run draws: results of one op stay in step with one that is not.
        self._coins = torch.Generator()
        self._memories: dict[int, dict[torch.dtype, Memory]] = {}
        self.refused: dict[str, str] = {}

    # -- what was found ---------------------------------------------------------------------------

    def band(self, tensor: torch.Tensor) -> Band:
        """Return the band of a tensor that the block has met (else: of what it is, exactly)."""
        with torch.no_grad(), no_modes():
            tensor = tensor.detach()
            memory, copies = self._copies(tensor)
            copies = copies.clone()
            return Band(tensor.clone(), copies[0], copies[1:], memory.known, memory.left)

    def forget(self, tensor: torch.Tensor) -> None:
        """Say of a tensor, and of what is computed from it, that nothing is known."""
        with torch.no_grad(), no_modes():
            self._raw(tensor)[0].known = False

    def either(self, tensor: torch.Tensor, other: torch.Tensor) -> None:
        """Let elements of a tensor be those of another one of its shape, any of them or all."""
        with torch.no_grad(), no_modes():
            (memory, window), (theirs, copies) = self._raw(tensor), self._copies(other)
            memory.known = memory.known and theirs.known
            self._begin()
            coin = torch.rand(window.shape, generator=self._generator) < 0.5
            coin[0], coin[1::2] = False, True
            window.copy_(torch.where(coin, seen_as(copies, tensor).to(window.dtype), window))

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
        call = Call(func, args, kwargs)
        if not call.follows:
            return func(*args, **kwargs)
        self._begin()
        # What is written in place must be known as it was before.
        before = [self._copies(t) for t in call.tensors] if call.targets else []
        exact = self._rounds_nothing(call) if call.targets else None
        out = func(*args, **kwargs)
        results = tensors_in(out)
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

    def _counts(self, call: Call, results: Sequence[torch.Tensor]) -> bool:
        """Return whether an op makes numbers without rounding of such that nothing has followed.

        What is met for the first time is exact, so there is nothing to keep.
        """
        return all(t.dtype not in UNIT_ROUNDOFF for t in results) and all(
            t.dtype not in UNIT_ROUNDOFF and t.untyped_storage()._cdata not in self._memories
            for t in call.tensors
        )

    def _follow(
        self,
        call: Call,
        before: Sequence[tuple[Memory, torch.Tensor]],
        out: Any,
        *,
        exact: torch.Tensor | None,
    ) -> None:
        """Run an op on every copy and keep what comes out."""
        results, given = tensors_in(out), [copies for _, copies in before]
        known = all(memory.known for memory, _ in before)
        known = known and not (self.flushes and call.factors and any(map(is_far, call.tensors)))
        left = tuple(dict.fromkeys(name for memory, _ in before for name in memory.left))
        quiet = exact is not None and equals(exact, results[0])
        quiet = quiet and (call.moves or all(map(is_short, [results[0], *call.tensors])))
        rounds, rough = self._promised(call), self._rough(call)
        still = quiet or (rounds and (call.moves or call.func in CONVERTING))
        inputs = self._inputs(call, given, still=still, rough=rough)
        if call.integral(results):
            inputs = call.widened(inputs)
        made, beyond = self._results(call, given, inputs, results)
        written = call.written(results)
        if len(made) != len(written):  # a kernel may give gradients that nobody asked for
            made = []
        none = [None] * len(written)
        gain = call.gain(results) if self.flushes else 1
        for t, copies, end in zip(written, made or none, beyond or none, strict=True):
            terms = call.terms(t) * gain
            if rounds and copies is not None and t.dtype in SIXTEEN:
                copies, quiet = rounded_to(copies, t.dtype), True
            if copies is None or copies.shape[1:] != t.shape:
                self._store(t, None, known=False, left=left)
            elif self._store(t, copies, known=known, left=left, quiet=quiet, terms=terms, ends=end):
                memory = self._copies(t)[0]
                name = str(call.func).removeprefix("aten.")
                memory.left = tuple(dict.fromkeys((*memory.left, name)))
                if rough and call.factor is not None:  # infinite where a part of the sum is
                    memory.known = False

    def _inputs(
        self, call: Call, given: Sequence[torch.Tensor], *, still: bool, rough: bool
    ) -> list[torch.Tensor]:
        """Return the copies of an op's tensors as an implementation may read them.

        still: nothing was rounded on the way. rough: it adds in the dtype of its first tensor.
        """
        inputs = [
            self._flushed(
                copies if still else self._perturbed(copies, t, call.narrow, rough),
                t,
            )
            for t, copies in zip(call.tensors, given, strict=True)
        ]
        if self.products is None or (factor := call.factor) is None:
            return inputs
        rounded = self.products(call.func)
        return [
            rounded.of(copies, t, self._noise)
            if rounded is not None and multiplied and rounded.rounds(t.dtype)
            else copies
            for t, copies, multiplied in zip(call.tensors, inputs, factor, strict=True)
        ]

    def _results(
        self,
        call: Call,
        given: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Return what an op makes of the copies, and where each result may leave the range.

        Nothing at all where the op refuses the copies.
        """
        state = torch.get_rng_state() if call.draws else None
        try:
            made = self._made(call, given, inputs)
            beyond = self._leaving(call, inputs, results)
            if beyond and self.reach == "unbounded" and (call.crosses or call.func in NORMS):
                made = [with_numbers(copies, inputs) for copies in made]  # nor may float64 hold it
            return made, beyond
        except Exception as error:
            self.refused[str(call.func)] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            return [], []
        finally:
            if state is not None:
                torch.set_rng_state(state)

    def _made(
        self, call: Call, given: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Return what an op makes of the copies, with the liberties of an implementation."""
        made = self._run(call, inputs)
        if self.flushes and call.divides and len(inputs) > 1:
            made = [self._divided(made[0], inputs[1], call.tensors[1])]
        if self.flushes and call.bounds and made[0] is not None:
            made = [self._kept(made[0], given[0], call.tensors[0]), *made[1:]]
        activates = call.func is _aten._addmm_activation.default
        if self.flushes and activates and made[0] is not None:
            made = [self._activated(made[0], call.tensors[0])]
        if self.in_turn and made[0] is not None:
            in_turn = self._added_in_turn(made[0], lost(call.func, call.args, call.kwargs))
            made = [in_turn, *made[1:]]
        if self.reach == "unbounded" and self.reorders and call.expands:
            made = [with_numbers(copies, inputs) for copies in made]
        return made

    def _leaving(
        self, call: Call, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Return for each result where a part of it may leave the range, or nothing."""
        if call.crosses:
            return self._crossed_beyond(call, inputs)
        if call.func in NORMS:
            return self._squared_beyond(call, inputs[0][0], results)
        if self.reorders and call.scales:
            return self._scaled_beyond(call, results)
        if self.reorders and (call.adds or call.transforms or call.averages > 1):
            return self._beyond(call, inputs, results)
        return []

    def _rough(self, call: Call) -> bool:
        """Return whether an op may add in the dtype of its first tensor."""
        return self.adding is not None and any(
            self.adding(call.func, t.dtype) for t in call.tensors[:1]
        )

    def _promised(self, call: Call) -> bool:
        """Return whether an implementation may not leave out the rounding of an op's results."""
        if self.promise == "all":
            return True
        return self.promise == "written" and call.func in CONVERTING and written()

    def _run(self, call: Call, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
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

    def _unread(self, call: Call) -> list[list[torch.Tensor]]:
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

    def _equated(self, call: Call, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return whether two tensors are equal; some copies are, where the samples' order varies.

        As their difference may cancel: noise alone makes no two sums equal.
        """
        made, (one, other) = call.at_once(inputs)[0], call.aligned(inputs)
        same = self._cancelled(one - other) == 0
        return made & ~same if call.func is _aten.ne.Tensor else made | same

    def _sorted(self, call: Call, copies: torch.Tensor) -> list[torch.Tensor]:
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
        self, call: Call, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
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
        self, call: Call, inputs: Sequence[torch.Tensor]
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
        call: Call, x: torch.Tensor, results: Sequence[torch.Tensor]
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

    def _limit(self, call: Call) -> float:
        """Return the largest number of the precision that an op computes in."""
        if call.factor is not None and self._rough(call):
            return torch.finfo(call.tensors[0].dtype).max
        dtypes = [t.dtype for t in call.tensors if t.dtype in UNIT_ROUNDOFF]
        wide = all(REAL.get(d, d) is torch.float64 for d in dtypes)
        return torch.finfo(torch.float64 if wide else torch.float32).max

    def _scaled_beyond(
        self, call: Call, results: Sequence[torch.Tensor]
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
        self, call: Call, results: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor | None:
        """Return what a pointwise op makes of the nominal values in float64; None: nothing."""
        if not call.pointwise or call.draws:
            return None
        try:
            wide = [t.detach().to(WIDE[t.dtype]) if t.dtype in WIDE else t for t in call.tensors]
            wide = call.widened(wide) if call.integral(results) else wide
            found = call.on(wide)  # which writes into copies
        except Exception:
            return None
        return found[0] if found else None

    def _perturbed(
        self,
        copies: torch.Tensor,
        nominal: torch.Tensor,
        narrow: float = 0.0,
        rough: bool = False,
    ) -> torch.Tensor:
        """Return copies of an input, all but the clean one off by up to 4 u(compute).

        narrow: the roundoff of a dtype that the op may cast them to before. rough: off by up to
        4 u(nominal) instead, since the op rounds to that dtype again and again.
        """
        if nominal.dtype not in UNIT_ROUNDOFF:
            return copies
        compute = torch.float64 if nominal.dtype in (torch.float64, torch.complex128) else None
        u = 4 * UNIT_ROUNDOFF[nominal.dtype if rough else compute or torch.float32]
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

    def _activated(self, made: torch.Tensor, nominal: torch.Tensor) -> torch.Tensor:
        """Return the relu of a sum, a little over 0 where it is 0.

        A negative term inside the kernel may be taken for 0.
        """
        wide = nominal.dtype is torch.float64
        limit = torch.finfo(torch.float64 if wide else torch.float32).tiny
        some = torch.rand(made.shape, generator=self._generator, dtype=made.dtype) * limit
        some[0] = 0
        return torch.where(made == 0, some, made)

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
        value = resolved(nominal).detach().to(window.dtype)
        if copies is None:
            window.copy_(seen_as(value, nominal).unsqueeze(0).expand(window.shape))
            memory.known = known
            return False
        copies = copies.to(window.dtype)
        if nominal.dtype in UNIT_ROUNDOFF:
            u = 0.0 if quiet else UNIT_ROUNDOFF[nominal.dtype]
            limits = torch.finfo(REAL.get(nominal.dtype, nominal.dtype))
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
                copies = ended_at(copies, limits.max / 4)
                copies = self._fused(copies, whole) if self.reorders else copies
                if ends is not None:
                    unlike = torch.full_like(copies, torch.nan)
                    unlike[1::2] = torch.inf
                    copies = torch.where(ends, unlike, copies)
            leaves |= ends is not None
        window.copy_(seen_as(copies, nominal))
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

    def _copies(self, tensor: torch.Tensor) -> tuple[Memory, torch.Tensor]:
        """Return the memory of a tensor and its copies ``[K + 1, *shape]``."""
        memory, window = self._raw(tensor)
        return memory, seen_as(window, tensor)

    def _raw(self, tensor: torch.Tensor, *, written: bool = False) -> tuple[Memory, torch.Tensor]:
        """Return the memory of a tensor and the window ``[K + 1, *shape]`` of its copies.

        Of what the memory holds, whether or not the tensor negates or conjugates it. A tensor that
        is met for the first time is exact: all copies are what it is. written: all of the window is
        written next.
        """
        if tensor._is_zerotensor():  # autograd's zeros without memory
            zeros = torch.zeros(self.samples + 1, *tensor.shape, dtype=WIDE.get(tensor.dtype))
            return Memory(torch.UntypedStorage(0), zeros, tensor.dtype), zeros
        storage = tensor.untyped_storage()
        views = self._memories.setdefault(storage._cdata, {})
        memory = views.get(tensor.dtype)
        count = storage.nbytes() // tensor.element_size()
        if memory is None or memory.count != count:
            # Bits seen as another dtype (view_as_real, view(dtype)): their copies are not followed.
            known = not views if memory is None else memory.known
            dtype = WIDE.get(tensor.dtype, tensor.dtype)
            copies = torch.empty(self.samples + 1, count, dtype=dtype)
            if not (written and tensor.numel() == count and tensor.is_contiguous()):
                plain = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (count,), (1,))
                copies.copy_(plain)
            memory = Memory(storage, copies, tensor.dtype, known, count=count)
            views[tensor.dtype] = memory
        return memory, window_of(memory.copies, tensor)


_MANY = 16
"""Of more copies than these some cancel exactly where they can."""
