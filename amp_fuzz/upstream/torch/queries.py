"""What torch answers to questions about autocast.

Each bug has a page of its own name in docs/findings/.

query-asks-cuda: ``torch.is_autocast_enabled()`` without a device is about cuda. Modules that ask so
    take their fast path under the autocast of any other device
    (https://github.com/pytorch/pytorch/issues/191796).
any-query-misses-devices: the question whether any autocast is on, which recurrent modules ask
    before they compare dtypes, leaves out mps and maia.
"""

from __future__ import annotations

from dataclasses import replace

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.reference.semantics import Semantics
from amp_fuzz.reference.state import State

__all__ = ["IMITATIONS"]

_MISSED = ("mps", "maia")


def _asks_cuda(semantics: Semantics) -> Semantics:
    return replace(
        semantics, enabled=lambda state, device: semantics.enabled(state, device or "cuda")
    )


def _any_enabled(state: State) -> bool:
    return any(on for device, on in state.enabled.items() if device not in _MISSED)


def _misses_devices(semantics: Semantics) -> Semantics:
    return replace(semantics, any_enabled=_any_enabled)


IMITATIONS = {
    "any-query-misses-devices": Imitation(semantics=_misses_devices),
    "query-asks-cuda": Imitation(semantics=_asks_cuda),
}
