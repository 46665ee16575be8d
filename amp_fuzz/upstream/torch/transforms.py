"""What torch does in function transforms.

Each bug has a page of its own name in docs/findings/.

func-grad-ambient-backward: under autocast `torch.func.grad` runs the backward ops under autocast
    too. The transform runs its backward pass where it is called, inside the context
    (https://github.com/pytorch/functorch/issues/305).
transform-before-autocast: inside `torch.func.grad` and `vmap` autocast is not asked about the op
    that was called, but about those that the transform makes of it, at each level again
    (https://github.com/pytorch/pytorch/issues/192617).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.reference.semantics import Semantics

__all__ = ["IMITATIONS"]


def _ambient_backward(semantics: Semantics) -> Semantics:
    return replace(semantics, around_grad=lambda ambient: nullcontext())


def _transform_first(semantics: Semantics) -> Semantics:
    return replace(semantics, ahead=nullcontext)


IMITATIONS = {
    "func-grad-ambient-backward": Imitation(semantics=_ambient_backward),
    "transform-before-autocast": Imitation(semantics=_transform_first),
}
