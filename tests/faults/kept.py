"""Faults of the state that compilers keep between calls, graphs and processes: a part is missing.

A guard that forgets a part of the state; a part that a cache's key lacks; a field of a context that
is lost at a graph break, in a recomputation or in a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from amp_fuzz.backends import Backend
from amp_fuzz.backends.eager import EagerBackend
from tests.faults.cached import CACHED, SeededCache
from tests.faults.compiled import AOT, COMPILED, backend_of
from tests.faults.corrupted import Corrupted, Patches, Seeded
from tests.faults.fault import patched

__all__ = ["GUARDED", "GUARDS", "KEPT", "Kept"]


class Kept(NamedTuple):
    """A fault. place: the backend of the run, by name. wrong: the same with the fault.

    honest: the same without it. own: whether autocast has no part in it.
    """

    what: str
    place: str
    wrong: Backend
    honest: Backend
    own: bool = False


_STATE: Mapping[str, Callable[[], Any]] = {
    "autocast-enabled": lambda: torch.is_autocast_enabled("cpu"),
    "autocast-dtype": lambda: torch.get_autocast_dtype("cpu"),
    "grad-mode": torch.is_grad_enabled,
    "inference-mode": torch.is_inference_mode_enabled,
    "default-dtype": torch.get_default_dtype,
}
"""A tensor's own guard has the dispatch keys of the state too: none is made, fault or not."""


def _forgetting(part: str) -> Patches:
    """Return a fault of guards: a graph is used again under another state of that part.

    Of no part, all is right but what is guarded beside the state.
    """
    asked = [ask for name, ask in _STATE.items() if name != part]

    @contextmanager
    def corrupt() -> Iterator[None]:
        from torch._dynamo.guards import GuardBuilder

        def guard(self: Any, guard: Any) -> None:
            made = [ask() for ask in asked]
            manager = self.check_fn_manager
            manager.global_state = manager.output_graph.global_state_guard
            self.guard_manager.root.add_lambda_guard(
                lambda _: [ask() for ask in asked] == made, ["the state"], guard.user_stack
            )

        with patched(GuardBuilder, GLOBAL_STATE=guard, TENSOR_MATCH=lambda self, *of, **how: None):
            yield

    return corrupt


GUARDS: Mapping[str, Patches] = {
    part: _forgetting(part) for part in ("autocast-enabled", "autocast-dtype", "grad-mode")
}
GUARDED = Seeded(AOT, patches=_forgetting(""))
"""Forgets no part."""


@contextmanager
def _drawing_anew() -> Iterator[None]:
    """Leave random numbers as they are where a checkpoint would put them back."""
    with patched(torch, set_rng_state=lambda state: None):
        yield


_LOST = (
    "guards-forget",
    "first-call-only",
    "break-ends-region",
    "break-loses-dtype",
    "break-enables",
    "ambient-ignored",
    "ambient-dtype",
    "ambient-dtype-inductor",
    "backward-as-forward",
    "backward-off",
    "backward-dtype",
    "cast-again",
    "checkpoint-off",
    "checkpoint-ambient",
    "checkpoint-dtype",
    "custom-fwd-off",
    "custom-fwd-forgets",
    "custom-bwd-ambient",
    "cache-cleared",
    "cache-of-all",
    "thread-inherits",
    "never-left",
    "off-afterwards",
)

KEPT: Mapping[str, Kept] = {
    **{
        f"guard-{part}": Kept(
            f"a graph is used again under another {part.replace('-', ' ')}",
            f"compile[{AOT}]",
            Seeded(AOT, patches=patches),
            GUARDED,
            own=part == "grad-mode",
        )
        for part, patches in GUARDS.items()
    },
    **{
        f"key-{part}": Kept(
            f"the key of a cache lacks the {part.replace('-', ' ')}",
            "compile[inductor+cached]",
            SeededCache(patches=patches),
            SeededCache(),
            own=part == "grad-mode",
        )
        for part, (patches, _) in CACHED.items()
    },
    **{
        name: Kept(
            COMPILED[name].what,
            f"compile[{COMPILED[name].place}]",
            backend_of(COMPILED[name], COMPILED[name].place),
            backend_of(None, COMPILED[name].place),
        )
        for name in _LOST
    },
    "checkpoint-random": Kept(
        "a checkpoint draws other random numbers when it computes again",
        "eager-cpu",
        Corrupted(exact=True, patches=_drawing_anew),
        EagerBackend("cpu"),
        own=True,
    ),
}
