"""Runs of the reference in which one decision of autocast comes out otherwise.

Which one makes it agree with an implementation says what that implementation did: it left a cast
out, made one more, or treated an op by another policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

from amp_fuzz.policies.tables import Policy, Rule
from amp_fuzz.reference.calls import Call, Treatment
from amp_fuzz.reference.state import here
from amp_fuzz.reference.treatments import asked_device

__all__ = ["UNCACHED", "Decision", "Flip", "Flips", "current", "deciding", "flips"]

Other: TypeAlias = Literal[Policy.LOWER_PRECISION_FP, Policy.FP32] | None


@dataclass(frozen=True, slots=True)
class Decision:
    """One kernel call under autocast: its overload, its policy (None: none), and its casts."""

    overload: str
    policy: Policy | None
    casts: tuple[tuple[torch.dtype, torch.dtype], ...] = ()


@dataclass(frozen=True, slots=True)
class Flip:
    """What is decided otherwise, in the call of that number.

    cast: the number of the cast that is left out; -1: the whole call is treated by `policy`, which
    is None for no cast at all. other: it is treated as it should, but casts to the 16-bit dtype
    that is not its context's. cached: False, of no one call: no cast of a weight is used twice.
    """

    call: int
    cast: int = -1
    policy: Other = None
    other: bool = False
    cached: bool = True


UNCACHED = Flip(-1, cached=False)
"""The weight cache is off."""


@dataclass(slots=True)
class Flips:
    """The decisions of one run so far, and the one that is flipped, if any."""

    flip: Flip | None = None
    decisions: list[Decision] = field(default_factory=list)

    def treatment(self, call: Call, found: Treatment | None) -> Treatment | None:
        """Return how a call is treated; that of an op without a rule may be, too."""
        device = found.device if found else asked_device(call)
        if device is None:
            return None
        own = found.rule.policy if found else None
        policy = self.policy(call.name, own)
        if policy is own:
            return found
        return None if policy is None else Treatment(device, Rule(call.name, policy, "", "a flip"))

    def policy(self, overload: str, own: Policy | None) -> Policy | None:
        """Take down a call, and return the policy that it is treated by."""
        self.decisions.append(Decision(overload, own))
        flip = self.flip
        if flip is None or flip.other or flip.cast >= 0 or flip.call != len(self.decisions) - 1:
            return own
        return flip.policy

    def low(self, dtype: torch.dtype) -> torch.dtype:
        """Return what the last call takes for the autocast dtype."""
        if self.flip != Flip(len(self.decisions) - 1, other=True):
            return dtype
        return torch.float16 if dtype is torch.bfloat16 else torch.bfloat16

    def leaves_out(self, old: torch.dtype, new: torch.dtype) -> bool:
        """Take down a cast of the last call, and return whether it is left out."""
        last = self.decisions[-1]
        self.decisions[-1] = Decision(last.overload, last.policy, (*last.casts, (old, new)))
        wanted = Flip(len(self.decisions) - 1, len(last.casts))
        return self.flip == wanted

    def caches(self) -> bool:
        """Return whether casts of weights are kept."""
        return self.flip is None or self.flip.cached


def current() -> Flips | None:
    """Return what `deciding` is under way in this thread, if any."""
    found: Flips | None = here().flips
    return found


@contextmanager
def deciding(flip: Flip | None = None) -> Iterator[Flips]:
    """Take down what autocast decides in the block, and flip one of its decisions."""
    made = Flips(flip)
    with here().having(flips=made):
        yield made


def flips(decisions: list[Decision]) -> Iterator[Flip]:
    """Yield every flip of these decisions: each cast left out, each call by another policy."""
    for call, decision in enumerate(decisions):
        if len(decision.casts) > 1:
            for cast in range(len(decision.casts)):
                yield Flip(call, cast)
        if decision.casts and any(new is not torch.float32 for _, new in decision.casts):
            yield Flip(call, other=True)
        for policy in (None, Policy.LOWER_PRECISION_FP, Policy.FP32):
            if policy is not decision.policy:
                yield Flip(call, policy=policy)
