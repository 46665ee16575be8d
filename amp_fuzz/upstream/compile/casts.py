"""Casts that a program writes and Inductor leaves out where it fuses.

## compile-written-casts: a cast that the program writes is left out

Stage inductor, without autocast too. A cast of float32 to 16 bits asks for a rounding. Where
Inductor fuses, ops take the float32 before the cast:

```python
import torch


def f(x):
    return (x == x.half().float()).sum(-1)


x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
print(f(x), torch.compile(f)(x))  # tensor([0, 0]) tensor([64, 64])
torch._inductor.config.emulate_precision_casts = True
torch.compiler.reset()
print(torch.compile(f)(x))  # tensor([0, 0])
```

Two-part numbers lose their second part (`hi = x.half(); lo = (x - hi.float()).half()` has `lo` 0).
Upstream calls it intended by default and gives the option
([#185337](https://github.com/pytorch/pytorch/issues/185337),
[#183761](https://github.com/pytorch/pytorch/issues/183761),
[#176565](https://github.com/pytorch/pytorch/issues/176565),
[#181568](https://github.com/pytorch/pytorch/issues/181568)). With it torch 2.13 rounds, on the CPU
too ([#182882](https://github.com/pytorch/pytorch/pull/182882)). The entry leaves out
`compile[inductor+casts]`.

The imitation leaves out the rounding of each written cast of float32. It keeps it for float64, and
for ops that are kernels by themselves (products, convolutions, sorts, scans): their inputs are
stored. A cast to the other 16-bit dtype takes the rounded value, unless nothing else uses the first
cast: then Inductor makes one cast of both. If the rounding of one cast is kept at one use and left
out at another of the same kind, that is a new finding.

In a callable that is checked it is not known which ops use a cast, nor where Inductor stores it.
There each element may be computed from either the float32 or the rounded value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import call, case, x
from amp_fuzz.reference import dispatch
from amp_fuzz.reference.shadow.run import either
from amp_fuzz.reference.shadow.written import CASTING, SIXTEEN, in_method, used_once
from amp_fuzz.upstream.bug import Bug, Example
from amp_fuzz.upstream.xla.excess import flat, place

__all__ = ["BUGS"]

INDUCTOR = "compile[inductor]"

_CAST = torch.ops.aten._to_copy.default
# Ops that Inductor calls a kernel for: it stores their inputs first, in the dtype that they have.
_KERNELS = (
    *("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "vdot", "addbmm", "_addmm_activation"),
    *("convolution", "_convolution", "mkldnn", "_scaled_dot_product", "_fft", "linalg", "_linalg"),
    *("sort", "topk", "kthvalue", "median", "nanmedian", "mode", "cumsum", "cumprod", "logcumsum"),
    *("_cdist", "_pdist", "searchsorted", "bucketize", "histc", "unique", "_unique", "nonzero"),
    *("_embedding_bag", "_ctc", "_thnn", "lstm", "gru", "rnn", "_trilinear", "grid_sampler"),
)


class _Elided(TorchDispatchMode):
    """Leave out the rounding of casts that a program writes, where Inductor fuses.

    It keeps the float32 of such a cast beside its 16-bit result, as Inductor does in a register,
    and gives the float32 to the ops that take the result. A kernel by itself takes the result,
    which is stored for it. So does float64, since the register holds float32. A cast to the other
    16-bit dtype takes the result too, unless nothing else does: then both are one cast
    (``pointless_convert`` in torch/_inductor/fx_passes/joint_graph.py).

    In code whose lines nobody knows, it is not known either which ops take a result, nor where
    Inductor ends a kernel and stores it. `either` is then told of both values, and shadows may
    have any of them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unsure = False
        self._wide: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self._once: dict[Any, torch.Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op on what its inputs were before they were rounded."""
        kwargs = kwargs or {}
        if func in CASTING:  # inference mode brings these here whole
            with self:
                return func.decompose(*args, **kwargs)
        if func._schema.is_mutable:
            if self._unsure and self._in_place(func, args, kwargs):
                return args[0]
            for tensor in flat((args, kwargs)):
                self._forget(tensor)
            return _plain(func, args, kwargs)
        given = (args, kwargs)
        double = torch.float64 in (kwargs.get("dtype"), *(t.dtype for t in flat(given)))
        stored = double or func.__name__.startswith(_KERNELS)
        wide = given if stored else tree_map(self._widened, given)
        changed = any(a is not b for a, b in zip(flat(given), flat(wide), strict=True))
        out = _plain(func, args, kwargs)
        if func is _CAST and out.dtype in SIXTEEN and out.dtype is not args[0].dtype:
            self._unsure |= in_method()
            once = in_method() or used_once()
            source = self._once.get(place(args[0]), args[0])
            if source.dtype is torch.float32 and once is not None:
                if self._unsure:
                    with dispatch.exclude():
                        source = source.clone()
                self._wide[place(out)] = (out, source)
                if once:
                    self._once[place(out)] = source
            if changed and self._unsure:
                with dispatch.exclude():
                    either(out, func(*wide[0], **wide[1]))
            return out
        if not changed:
            return out
        with dispatch.exclude():
            made = func(*wide[0], **wide[1])
        if any(r.alias_info is not None for r in func._schema.returns):
            for own, other in zip(flat(out), flat(made), strict=True):
                self._wide[place(own)] = (own, other)
            return out
        pairs = list(zip(flat(out), flat(made), strict=True))
        narrow = [_as(other, own) for own, other in pairs]
        if self._unsure:
            for (own, _), other in zip(pairs, narrow, strict=True):
                either(other, own)
        each = iter(narrow)
        return tree_map(lambda a: next(each) if isinstance(a, torch.Tensor) else a, out)

    def _in_place(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
        """Run an op that writes its first argument alone, as what it is in a graph; return if so.

        A cast that is written to is written as it was before it was rounded, too.
        """
        wide = tree_map(self._widened, (args, kwargs))
        pairs = zip(flat((args, kwargs)), flat(wide), strict=True)
        inplace = func.__name__.partition(".")[0].endswith("_")
        random = torch.Tag.nondeterministic_seeded in func.tags
        if not inplace or random or all(a is b for a, b in pairs):
            return False
        own, target = args[0], wide[0][0]
        with dispatch.exclude():
            before = own.clone()
        _plain(func, args, kwargs)
        with dispatch.exclude():
            rounded = own.clone()
            if target is own:
                own.copy_(before)
            func(*wide[0], **wide[1])
            if target is own:
                either(own, rounded)
        return True

    def _widened(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype not in SIXTEEN:
            return value
        found = self._wide.get(place(value))
        return value if found is None else found[1]

    def _forget(self, tensor: torch.Tensor) -> None:
        memory = tensor.untyped_storage()._cdata
        self._wide = {key: kept for key, kept in self._wide.items() if key[0] != memory}
        self._once = {key: kept for key, kept in self._once.items() if key[0] != memory}


def _plain(func: Any, args: Any, kwargs: Any) -> Any:
    with dispatch.kept():
        return func(*args, **kwargs)


def _as(made: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    with dispatch.exclude():
        return made if made.dtype is like.dtype else made.to(like.dtype)


BUGS = (
    Bug(
        id="compile-written-casts",
        what="the rounding of a cast to 16 bits that the program writes is left out where Inductor fuses",
        why="a fused kernel computes with the float32 that was cast; emulate_precision_casts rounds it",
        link="https://github.com/pytorch/pytorch/issues/185337",
        torch=">=2.7",
        seen="2.15.0",
        backends=(
            "compile[inductor*",
            "!compile[inductor+casts]",
        ),
        imitation=Imitation(around=_Elided),
        examples=(
            Example(
                INDUCTOR,
                case(
                    [x("x0", 4)],
                    call("half", "x0", form="method", to="v0"),
                    call("float", "v0", form="method", to="v1"),
                    contexts=(),
                    backward="none",
                ),
            ),
        ),
    ),
)
