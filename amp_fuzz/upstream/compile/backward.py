"""What torch.compile makes of backward passes; the page is docs/findings/compile.md.

compile-checkpoint-zeros: a weight that goes into a reentrant checkpoint, but into none of its used
    results, has no gradient. In eager all results of the checkpoint require grad, and zeros come
    back; dynamo makes every checkpoint one that is not reentrant.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.reference.semantics import Semantics

__all__ = ["IMITATIONS"]


def _never_reentrant(semantics: Semantics) -> Semantics:
    def checkpoint(function: Any, *args: Any, use_reentrant: bool) -> Any:
        return semantics.checkpoint(function, *args, use_reentrant=False)

    return replace(semantics, checkpoint=checkpoint)


IMITATIONS = {"compile-checkpoint-zeros": Imitation(semantics=_never_reentrant)}
