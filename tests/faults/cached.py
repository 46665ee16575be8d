"""Faults of the keys of torch's caches: a part of the state is missing. And a case for each.

Each case has the seed with which `amp_fuzz.backends.compile.another_state` chooses that part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from amp_fuzz.backends import Backend
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import Autocast
from tests.faults.corrupted import Patches, Seeded
from tests.faults.fault import patched
from tests.helpers import call, case, under, x

__all__ = ["CACHED", "SeededCache"]


@dataclass(frozen=True)
class SeededCache(Seeded):
    """Inductor with its caches, in a torch that is patched while it runs."""

    rung: str = "inductor"
    label: str = "cached"
    cached: bool = True

    def ladder(self) -> Sequence[Backend]:
        """Return no rungs: only the caches are wrong."""
        return ()


def _recorded(name: str, value: Any) -> Patches:
    """Return a fault of what AOTAutograd's key records of the state."""

    @contextmanager
    def corrupt() -> Iterator[None]:
        from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCacheDetails

        honest = AOTAutogradCacheDetails._record_runtime_state

        def record(self: Any, gm: Any) -> None:
            honest(self, gm)
            setattr(self, name, value)

        with patched(AOTAutogradCacheDetails, _record_runtime_state=record):
            yield

    return corrupt


@contextmanager
def _without_dtypes() -> Iterator[None]:
    """Let the key of Inductor's graphs have one name for both 16-bit dtypes."""
    from torch._inductor.codecache import FxGraphCachePickler

    init: Any = FxGraphCachePickler.__init__
    reduce: Any = FxGraphCachePickler._reduce_graph_module

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if type(self) is FxGraphCachePickler:  # not AOTAutograd's
            self.dispatch_table[torch.dtype] = lambda dtype: (_half, (str(dtype)[-2:],))

    def _reduce_graph_module(self: Any, module: Any) -> Any:
        made, (data, imports) = reduce(self, module)
        data["_code"] = data["_code"].replace("bfloat16", "float16")
        return made, (data, imports)

    with patched(FxGraphCachePickler, __init__=__init__, _reduce_graph_module=_reduce_graph_module):
        yield


def _half(digits: str) -> str:
    return digits


@contextmanager
def _contexts_cached() -> Iterator[None]:
    """Let AOTAutograd cache graphs with contexts, whose default dtype its key does not have."""
    from torch._functorch._aot_autograd import autograd_cache

    with patched(autograd_cache, check_cacheable=lambda gm: None):
        yield


_INPUTS = [x("x0", 3, 8), x("w1", 8, 8)]
_mm = call("mm", "x0", "w1")


def _seeded(made: Case, seed: int) -> Case:
    return msgspec.structs.replace(made, seed=seed)


CACHED: dict[str, tuple[Patches, Case]] = {
    "autocast-dtype": (_recorded("autocast_state", {}), _seeded(case(_INPUTS, _mm), 0)),
    "autocast-enabled": (_recorded("autocast_state", {}), _seeded(case(_INPUTS, _mm), 1)),
    "default-dtype": (
        _contexts_cached,
        _seeded(case(_INPUTS, under(Autocast(), _mm), contexts=()), 0),
    ),
    "grad-mode": (_recorded("grad_enabled", True), _seeded(case(_INPUTS, _mm), 2)),
    "graph-dtypes": (_without_dtypes, _seeded(case(_INPUTS, _mm), 0)),
}
"""By what is missing in a key. Autocast has no part in the fault of the grad mode."""
