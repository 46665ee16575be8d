"""FP8 layers that are broken on purpose: mistakes of scales, formats, passes, regions and history.

The implementation under test is our own layers (`Own`), with one thing replaced while it runs and
not while the reference runs: so every recipe can be broken, also those for which no other
implementation runs here. `hunt` draws cases until one diverges, and minimises it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from amp_fuzz.backends import harness
from amp_fuzz.backends.harness import Observation, Runtime
from amp_fuzz.backends.quantising import QuantisingBackend
from amp_fuzz.backends.torch_base import TorchBackend
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import FP8, statements
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.findings.minimize.target import Target, asker, shrink, working
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.reference import fp8
from amp_fuzz.reference.fp8 import (
    E4M3,
    E5M2,
    Convention,
    Layers,
    Quantised,
    formats,
    layers,
    scaling,
)
from amp_fuzz.reference.fp8 import recipes as recipes_module
from amp_fuzz.reference.fp8.layers import Delayed, Region, Workspace
from amp_fuzz.strategies.drawing import draw_case, usable
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from tests.faults.fault import Fault, patched

__all__ = ["FAULTS", "Own", "Seeded", "hunt", "measured"]

Corrupt = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Seeded(Fault):
    """A fault of FP8 layers, and the regions in which it acts.

    caches: whether it needs layers that keep their quantised weights.
    """

    regions: tuple[FP8, ...] = ()
    caches: bool = False


@dataclass(frozen=True, slots=True)
class Own(QuantisingBackend):
    """Our own layers as an implementation, wrong while a case runs."""

    contexts: tuple[FP8, ...] = (FP8(),)
    corrupt: Corrupt = field(default=lambda: patched(fp8), compare=False)
    made: Convention = fp8.TORCHAO
    name: str = "own"

    @property
    def recipes(self) -> Sequence[FP8]:
        return self.contexts

    @property
    def caches(self) -> bool:
        return True

    def convention(self) -> Convention:
        return self.made

    def runtime(self, **more: Any) -> Runtime:
        found = self.reference().runtime
        return replace(TorchBackend.runtime(self, **more), fp8=found.fp8)

    def observe(self, case: Case) -> Observation:
        # Under the reference's autocast, whose state the layers ask for.
        with self.corrupt():
            return harness.run(case, self.reference().runtime)


TENSORWISE, ROWWISE, CURRENT = FP8(), FP8("rowwise", format="E4M3"), FP8("current")
DELAYED = FP8("delayed", history=3)
LATEST = FP8("delayed", history=2, algorithm="most_recent", margin=1)
BLOCKWISE, MXFP8, NVFP4 = FP8("blockwise", format="E4M3"), FP8("mxfp8", format="E4M3"), FP8("nvfp4")
ALL = (TENSORWISE, ROWWISE, CURRENT, DELAYED, BLOCKWISE, MXFP8, NVFP4)


def _scale(change: Callable[[Quantised, torch.Tensor], torch.Tensor]) -> Corrupt:
    """Quantise with another scale than the right one, in recipes of float32 scales."""
    plain = scaling._scaled

    def scaled(x: torch.Tensor, scale: torch.Tensor, to: Any) -> Quantised:
        return plain(x, change(plain(x, scale, to), x), to)

    return lambda: patched(scaling, _scaled=scaled)


def _quantise(change: Callable[..., Any]) -> Corrupt:
    """Replace the arguments of a recipe's quantisation: x, dim, role, format."""

    def corrupt() -> AbstractContextManager[None]:
        wrong = {}
        for name, recipe in recipes_module.RECIPES.items():
            plain = recipe.quantise
            wrong[name] = replace(recipe, quantise=lambda *a, p=plain: p(*change(*a)))
        return patched(layers, RECIPES=wrong)

    return corrupt


def _product(change: Callable[..., Any]) -> Corrupt:
    """Replace a product, by ``change(product, a, b, dtype, which, bias)``."""
    plain = layers.linear

    def wrong(x: Any, w: Any, b: Any, quantise: Any, made: Convention, *more: Any) -> Any:
        product = partial(change, made.product)
        return plain(x, w, b, quantise, replace(made, product=product), *more)

    return lambda: patched(layers, linear=wrong)


def _linear(change: Callable[..., Any]) -> Corrupt:
    """Replace the layer, by ``change(linear, x, weight, bias, quantise, convention, ...)``."""
    plain = layers.linear
    return lambda: patched(layers, linear=partial(change, plain))


# -- scales and rounding --------------------------------------------------------------------------


def _rounded(change: Callable[[torch.Tensor, Any], torch.Tensor]) -> Corrupt:
    return lambda: patched(scaling, rounded=change)


def _away(x: torch.Tensor, to: Any) -> torch.Tensor:
    up = fp8.rounded(torch.nextafter(x.float(), x.float() * 2), to)
    return torch.where(x.isfinite(), up, fp8.rounded(x, to))


def _flushed(x: torch.Tensor, to: Any) -> torch.Tensor:
    found = fp8.rounded(x, to)
    return torch.where(found.abs() < 2.0**to.lowest, 0.0, found)


def _overflowing(x: torch.Tensor, to: Any) -> torch.Tensor:
    found = fp8.rounded(x, to)
    return torch.where(x.abs() > to.max * 1.04, torch.nan, found)


def _no_abs(x: torch.Tensor, *dims: int) -> torch.Tensor:
    return x.amax(dims, keepdim=True).float() if dims else x.max().float()


def _narrow_amax(x: torch.Tensor, *dims: int) -> torch.Tensor:
    found = x.abs().amax(dims, keepdim=True) if dims else x.abs().max()
    return found.bfloat16().float()


# -- passes ---------------------------------------------------------------------------------------


def _swapped(x: Any, dim: int, role: str, to: Any) -> Any:
    return x, 1 - dim, role, to


def _other_format(wrong: Any, role: str) -> Callable[..., Any]:
    return lambda x, dim, r, to: (x, dim, r, wrong if r == role else to)


def _same_copy(role: str) -> Callable[..., Any]:
    """Return a quantisation that ignores the dimension for one role: the copy of the forward."""
    return lambda x, dim, r, to: (x, (0 if r == "weight" else 1) if r == role else dim, r, to)


def _narrow(product: Any, a: Any, b: Any, dtype: Any, which: Any, bias: Any) -> Any:
    return product(a, b, torch.bfloat16, which, bias).to(dtype)


def _unscaled(product: Any, a: Any, b: Any, dtype: Any, which: Any, bias: Any) -> Any:
    one = torch.ones(())
    if which.name == "wgrad":
        b = replace(b, scale=one, inverse=one)
    return product(a, b, dtype, which, bias)


def _crossed(product: Any, a: Any, b: Any, dtype: Any, which: Any, bias: Any) -> Any:
    if a.scale.shape == b.scale.shape:
        a, b = (replace(m, scale=o.scale, inverse=o.inverse) for m, o in ((a, b), (b, a)))
        a = replace(a, values=a.values, scale=a.scale * 2, inverse=a.inverse / 2)
    return product(a, b, dtype, which, bias)


def _high_wgrad(product: Any, a: Any, b: Any, dtype: Any, which: Any, bias: Any) -> Any:
    if which.name != "wgrad":
        return product(a, b, dtype, which, bias)
    wide = [replace(m, values=m.values * (1 + 2.0**-6)) for m in (a, b)]
    return product(*wide, dtype, which, bias)


def _bias_of_quantised(
    plain: Any, x: Any, w: Any, b: Any, quantise: Any, made: Any, *more: Any
) -> Any:
    y = plain(x, w, None, quantise, made, *more)
    if b is None:
        return y

    class Add(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Any, b: Any) -> Any:
            ctx.dtype = b.dtype
            return y + b.to(y.dtype)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            flat = grad.reshape(-1, grad.shape[-1])
            return grad, quantise(flat, 0, "grad_output").dequantised().sum(0).to(ctx.dtype)

    return Add.apply(y, b)


def _fused(plain: Any, x: Any, w: Any, b: Any, quantise: Any, made: Any, *more: Any) -> Any:
    return plain(x, w, b, quantise, replace(made, fuses=True), *more)


def _uncast(plain: Any, x: Any, w: Any, b: Any, quantise: Any, made: Any, *more: Any) -> Any:
    return plain(x, w, b, quantise, replace(made, casts=False), *more)


@contextmanager
def _kept_weight() -> Iterator[None]:
    """Quantise a weight once, and never again: as if each microbatch were not the first."""
    kept: dict[Any, Quantised] = {}
    plain = layers.linear

    def wrong(x: Any, w: Any, b: Any, quantise: Any, made: Any, *more: Any) -> Any:
        def cached(value: torch.Tensor, dim: int, role: str) -> Quantised:
            if role != "weight":
                return quantise(value, dim, role)  # type: ignore[no-any-return]
            return kept.setdefault((w.data_ptr(), dim), quantise(value, dim, role))

        return plain(x, w, b, cached, made, *more)

    with patched(layers, linear=wrong):
        yield


@contextmanager
def _kept_scale() -> Iterator[None]:
    """Take the scale of a tensor's first step for all later ones."""
    kept: dict[Any, torch.Tensor] = {}
    plain = scaling._scaled

    def scaled(x: torch.Tensor, scale: torch.Tensor, to: Any) -> Quantised:
        return plain(x, kept.setdefault((x.shape, to.name), scale), to)

    with patched(scaling, _scaled=scaled):
        yield


# -- history --------------------------------------------------------------------------------------


def _updating(change: Callable[[Delayed], None]) -> Corrupt:
    return lambda: patched(Delayed, update=change)


_update = Delayed.update


def _not_cleared(state: Delayed) -> None:
    newest = state.history[0].clone()
    _update(state)
    state.history[0] = newest


def _not_rolled(state: Delayed) -> None:
    _update(state)
    state.history = torch.zeros_like(state.history)


def _margin(state: Delayed) -> None:
    before = state.region
    state.region = replace(before, margin=-before.margin)
    _update(state)
    state.region = before


def _zero(state: Delayed) -> None:
    amax = state.history.max()
    _update(state)
    if amax == 0:
        state.scale = torch.full((), torch.finfo(torch.float32).max)


def _infinite(state: Delayed) -> None:
    amax = state.history.max()
    _update(state)
    if not amax.isfinite():
        state.scale = torch.zeros(())


def _never(state: Delayed) -> None:
    pass


def _at_once(self: Delayed, x: torch.Tensor) -> None:
    self.history[0] = torch.maximum(self.history[0], x.abs().max().float())
    self.scale = torch.full((), self.format.max) / self.history[0].clamp(min=1e-12)


def _overwritten(self: Delayed, x: torch.Tensor) -> None:
    self.history[1 % len(self.history)] = x.abs().max().float()


def _roles(*left_out: str) -> Corrupt:
    plain = Layers._update

    def update(self: Layers, *roles: Any) -> None:
        plain(self, *(role for role in roles if role not in left_out))

    return lambda: patched(Layers, _update=update)


# -- kept weights --------------------------------------------------------------------------------


_refresh, _wrapped = Workspace.refresh, Layers._wrapped


def _once(self: Workspace, *arguments: Any) -> None:
    if not self.copies:
        _refresh(self, *arguments)


def _scale_alone(self: Workspace, *arguments: Any) -> None:
    before = dict(self.copies)
    _refresh(self, *arguments)
    for dim, old in before.items():
        self.copies[dim] = replace(self.copies[dim], values=old.values)


def _unkept(self: Layers, module: Any, quantise: Any, *more: Any) -> Any:
    return quantise


def _shared(self: Layers, module: Any, *more: Any) -> Any:
    return _wrapped(self, (0, *module[1:]), *more)


def _one_copy(self: Workspace, *arguments: Any) -> None:
    old = self.copies.get(1)
    _refresh(self, *arguments)
    self.copies[1] = old or self.copies[1]


# -- regions --------------------------------------------------------------------------------------


def _entering(change: Callable[[Layers, Region], Region]) -> Corrupt:
    plain = Layers.fp8

    @contextmanager
    def enter(self: Layers, recipe: str = "tensorwise", **options: Any) -> Iterator[None]:
        region = change(self, Region(recipe, **options))
        more = {name: getattr(region, name) for name in Region.__slots__ if name != "recipe"}
        with plain(self, region.recipe, **more):
            yield

    return lambda: patched(Layers, fp8=enter)


def _outer(self: Layers, region: Region) -> Region:
    return self.regions[0] if self.regions else region


def _left_on() -> AbstractContextManager[None]:
    plain = Layers.fp8

    @contextmanager
    def enter(self: Layers, recipe: str = "tensorwise", **options: Any) -> Iterator[None]:
        with plain(self, recipe, **options):
            yield
        if not self.regions:
            self.regions.append(Region(recipe, **options))

    return patched(Layers, fp8=enter)


def _forgetting() -> AbstractContextManager[None]:
    return patched(Layers, checkpoint=lambda self, checkpoint: checkpoint)


KEEPING: tuple[Seeded, ...] = tuple(
    Seeded(name, what, (), corrupt, regions=(CURRENT, DELAYED), caches=True)
    for name, what, corrupt in (
        (
            "kept-never-refreshed",
            "the first microbatch of a later step does not refresh the kept weight",
            lambda: patched(Workspace, refresh=_once),
        ),
        (
            "kept-ignored",
            "each microbatch quantises the weight",
            lambda: patched(Layers, _wrapped=_unkept),
        ),
        (
            "kept-scale-alone",
            "the scale of a kept weight is refreshed, its data is not",
            lambda: patched(Workspace, refresh=_scale_alone),
        ),
        (
            "kept-for-all-layers",
            "layers of one size share the kept weight",
            lambda: patched(Layers, _wrapped=_shared),
        ),
        (
            "kept-for-dgrad",
            "the copy for the gradient of the input is kept over steps",
            lambda: patched(Workspace, refresh=_one_copy),
        ),
    )
)

FAULTS: tuple[Seeded, ...] = KEEPING + tuple(
    Seeded(name, what, (), corrupt, regions=regions)
    for name, what, regions, corrupt in (
        # scales
        (
            "amax-axis",
            "the largest magnitude is taken along the other axis",
            (ROWWISE, MXFP8),
            _quantise(_swapped),
        ),
        (
            "amax-sign",
            "the largest value, not magnitude, decides",
            (TENSORWISE, ROWWISE, CURRENT),
            lambda: patched(scaling, _amax=_no_abs),
        ),
        (
            "amax-bfloat16",
            "the magnitude is rounded to bfloat16",
            (TENSORWISE, CURRENT),
            lambda: patched(scaling, _amax=_narrow_amax),
        ),
        (
            "scale-inverted",
            "the scale is its reciprocal",
            (TENSORWISE, ROWWISE, CURRENT),
            _scale(lambda q, x: q.scale.reciprocal()),
        ),
        (
            "scale-stale",
            "the scale of the first step is used again",
            (TENSORWISE, CURRENT),
            _kept_scale,
        ),
        (
            "scale-doubled",
            "the scale is twice as large: half of the range saturates",
            ALL[:5],
            _scale(lambda q, x: q.scale * 2),
        ),
        (
            "scale-of-tensor",
            "one scale for all rows",
            (ROWWISE, BLOCKWISE),
            _scale(lambda q, x: q.scale.min().expand(q.scale.shape)),
        ),
        (
            "power-up",
            "scales are rounded up to powers of two, not down",
            (ROWWISE, BLOCKWISE),
            lambda: patched(scaling, power_below=formats.power_up),
        ),
        (
            "e8m0-down",
            "E8M0 scales are rounded down, not up",
            (MXFP8,),
            lambda: patched(scaling, power_up=formats.power_below),
        ),
        (
            "block-of-16",
            "blocks of 16 where 32 are meant",
            (MXFP8,),
            lambda: patched(
                scaling, _tiles=lambda dim, n, square: (1, n // 2) if dim else (n // 2, 1)
            ),
        ),
        (
            "weights-in-rows",
            "weights are not quantised in squares",
            (NVFP4,),
            lambda: patched(scaling, _tiles=lambda dim, n, square: (1, n) if dim else (n, 1)),
        ),
        # rounding
        (
            "no-saturation",
            "what is out of range becomes NaN: the clamp is missing",
            (DELAYED, LATEST),
            _rounded(_overflowing),
        ),
        ("ties-away", "ties are rounded away from zero", ALL, _rounded(_away)),
        ("subnormals", "subnormal codes are flushed to zero", ALL, _rounded(_flushed)),
        # formats and passes
        (
            "gradients-e4m3",
            "gradients are E4M3 under HYBRID",
            (TENSORWISE, CURRENT),
            _quantise(_other_format(E4M3, "grad_output")),
        ),
        (
            "inputs-e5m2",
            "the input is E5M2 under HYBRID",
            (TENSORWISE, CURRENT),
            _quantise(_other_format(E5M2, "input")),
        ),
        (
            "weights-e5m2",
            "the weight is E5M2 under HYBRID",
            (TENSORWISE, CURRENT),
            _quantise(_other_format(E5M2, "weight")),
        ),
        (
            "dgrad-rowwise-copy",
            "dgrad uses the weight's copy of the forward pass",
            (ROWWISE, MXFP8),
            _quantise(_same_copy("weight")),
        ),
        (
            "wgrad-rowwise-copy",
            "wgrad uses the input's copy of the forward pass",
            (ROWWISE, MXFP8),
            _quantise(_same_copy("input")),
        ),
        (
            "wgrad-gradient-copy",
            "wgrad uses dgrad's copy of the gradient",
            (ROWWISE, MXFP8),
            _quantise(_same_copy("grad_output")),
        ),
        (
            "wgrad-unscaled",
            "wgrad leaves out the scale of the input",
            (TENSORWISE, CURRENT),
            _product(_unscaled),
        ),
        (
            "scales-crossed",
            "the scales of both operands are exchanged, and one doubled",
            (TENSORWISE, CURRENT),
            _product(_crossed),
        ),
        ("product-bfloat16", "products of float32 are rounded to bfloat16", ALL, _product(_narrow)),
        (
            "wgrad-precision",
            "wgrad is computed from other values than the quantised ones",
            ALL,
            _product(_high_wgrad),
        ),
        (
            "bias-gradient",
            "the gradient of the bias is that of the quantised gradient",
            (TENSORWISE, CURRENT),
            _linear(_bias_of_quantised),
        ),
        (
            "bias-fused",
            "the bias is added before the product is rounded",
            (TENSORWISE, CURRENT),
            _linear(_fused),
        ),
        (
            "input-uncast",
            "autocast does not cast the input",
            (TENSORWISE, ROWWISE),
            _linear(_uncast),
        ),
        (
            "weight-kept",
            "the cached weight is not refreshed after an update",
            (TENSORWISE, ROWWISE),
            _kept_weight,
        ),
        # history
        (
            "history-not-cleared",
            "slot 0 of the history keeps the last magnitude",
            (DELAYED, LATEST),
            _updating(_not_cleared),
        ),
        (
            "history-forgotten",
            "only the newest magnitude counts: the history is lost",
            (DELAYED,),
            _updating(_not_rolled),
        ),
        (
            "history-slot",
            "the magnitude is recorded in slot 1",
            (LATEST,),
            lambda: patched(Delayed, record=_overwritten),
        ),
        (
            "scale-at-once",
            "a new scale takes effect in the step that records it",
            (DELAYED,),
            lambda: patched(Delayed, record=_at_once),
        ),
        ("margin-sign", "the margin makes scales larger", (LATEST,), _updating(_margin)),
        ("amax-zero", "a magnitude of zero makes the scale infinite", (DELAYED,), _updating(_zero)),
        (
            "amax-infinite",
            "an infinite or NaN magnitude makes the scale zero",
            (DELAYED,),
            _updating(_infinite),
        ),
        ("scale-never", "scales are never updated", (DELAYED,), _updating(_never)),
        (
            "scale-forward-only",
            "the scale of gradients is never updated",
            (DELAYED,),
            _roles("grad_output"),
        ),
        (
            "scale-backward-only",
            "the scales of the forward pass are never updated",
            (DELAYED,),
            _roles("input", "weight"),
        ),
        # regions
        (
            "region-outer",
            "the outer region's recipe holds in an inner one",
            (TENSORWISE, ROWWISE),
            _entering(_outer),
        ),
        (
            "region-disabled",
            "a disabled region quantises",
            (TENSORWISE, ROWWISE),
            _entering(lambda _, r: replace(r, enabled=True)),
        ),
        ("region-left-on", "the region stays on after its end", (TENSORWISE,), _left_on),
        (
            "checkpoint-region",
            "a checkpoint is recomputed outside of its region",
            (TENSORWISE, DELAYED),
            _forgetting,
        ),
    )
)


def drawn(contexts: Sequence[FP8], seed: int, *, caches: bool = False) -> Iterator[Case]:
    """Yield cases of these regions, as a run draws them."""
    ops = usable(CATALOGUE.values(), "cpu", fp8=True)
    source = random.Random(f"fp8/{seed}").randbytes
    while True:
        yield draw_case(source, "cpu", ops=ops, recipes=contexts, caches=caches, statements=6)


def hunt(
    fault: Seeded, seed: int = 0, cases: int = 2000, seconds: float = 30.0
) -> Mapping[str, Any]:
    """Return after how many cases a fault is found, and how many statements are left."""
    backend = Own(contexts=fault.regions, corrupt=fault.corrupt)
    honest = judge_of(replace(backend, corrupt=lambda: patched(fp8)), shipped(), "none")
    judge = Judge(backend, relations="none")
    start = time.perf_counter()
    for number, case in enumerate(drawn(fault.regions, seed, caches=fault.caches), 1):
        verdict = judge.judge(case)
        if verdict.divergence is not None:
            without = honest.judge(case)
            assert without.outcome != "diverged", case
            if without.divergence is None:  # not memory that nobody wrote
                break
        if number == cases:
            return {"found": False, "cases": number}
    target = Target.of(verdict)
    found = time.perf_counter() - start
    ask = asker(judge, target), backend.reference()
    *_, last = shrink(verdict.case, target, *ask, seconds=seconds, clock=working())
    return {
        "found": True,
        "cases": number,
        "seconds": round(found, 1),
        "kind": target.kind,
        "statements": len(list(statements(last.case.program.body))),
        "case": str(last.case),
    }


def measured(seed: int) -> dict[str, Any]:
    """Hunt every fault."""
    torch.set_num_threads(1)
    return {fault.name: hunt(fault, seed) for fault in FAULTS}
