"""Casts that a program writes and Inductor leaves out where it fuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from amp_fuzz.backends.imitations.xla import flat, place
from amp_fuzz.reference import dispatch
from amp_fuzz.reference.shadow.written import CASTING, SIXTEEN, in_method, used_once

__all__ = ["Elided"]

_CAST = torch.ops.aten._to_copy.default
# Ops that Inductor calls a kernel for: it stores their inputs first, in the dtype that they have.
_KERNELS = (
    *("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "vdot", "addbmm", "_addmm_activation"),
    *("convolution", "_convolution", "mkldnn", "_scaled_dot_product", "_fft", "linalg", "_linalg"),
    *("sort", "topk", "kthvalue", "median", "nanmedian", "mode", "cumsum", "cumprod", "logcumsum"),
    *("_cdist", "_pdist", "searchsorted", "bucketize", "histc", "unique", "_unique", "nonzero"),
    *("_embedding_bag", "_ctc", "_thnn", "lstm", "gru", "rnn", "_trilinear", "grid_sampler"),
)


class Elided(TorchDispatchMode):
    """Leave out the rounding of casts that a program writes, where Inductor fuses.

    Beside the 16-bit result of such a cast of float32 stands what was cast, and what is computed
    from the result takes that: Inductor keeps it in a register. An op that is a kernel by itself
    takes the result, which is stored for it, and so does float64, since the register holds float32.
    A cast to the other 16-bit dtype takes the result too, unless nothing else does: then both are
    one cast (``pointless_convert`` in torch/_inductor/fx_passes/joint_graph.py).

    Of code whose lines nobody knows it is not known either what else takes a result, nor where
    Inductor ends a kernel and stores it. What is computed from one is then told to `either`, from
    the float32 and from the result: shadows may have any of both.
    """

    def __init__(self, either: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._either, self._unsure = either, False
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
                    self._either(out, func(*wide[0], **wide[1]))
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
                self._either(other, own)
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
                self._either(own, rounded)
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
