"""The contracts of an op under autocast, by name.

Where the same kernels run, a contract compares bit for bit; otherwise shadow arithmetic decides, as
in `amp_fuzz.check`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from amp_fuzz.interfaces.check import messages
from amp_fuzz.interfaces.check_op.backward import double, modified, needed, retained
from amp_fuzz.interfaces.check_op.batches import vectorised
from amp_fuzz.interfaces.check_op.gradcheck import gradchecked
from amp_fuzz.interfaces.check_op.outputs import aliased, faked, leaks
from amp_fuzz.interfaces.check_op.placement import placed
from amp_fuzz.interfaces.check_op.target import Target
from amp_fuzz.interfaces.check_op.tried import Broken, Tried

__all__ = ["RULES", "Rule"]


def _opchecked(tried: Tried) -> str:
    with tried.passes.calling() as one:
        found: Mapping[str, Any] = torch.library.opcheck(
            tried.target.op, one.args, one.kwargs, raise_exception=False
        )
    for name, result in found.items():
        if result != "SUCCESS":
            lines = [line.strip() for line in str(result).splitlines() if line.strip()]
            raise Broken(f"{name}: {' '.join(lines)[:400]}", name)
    return ", ".join(found)


@dataclass(frozen=True, slots=True)
class Rule:
    """One contract.

    judge: see this module. promises: the ids of those that it asks about, in
    `amp_fuzz/reference/promises.toml`. advice: what to do if it is broken. everywhere: whether the
    context matters. lacks: why it does not apply to a target, or "".
    """

    judge: Callable[[Tried], str]
    promises: tuple[str, ...]
    advice: str
    everywhere: bool = True
    lacks: Callable[[Target], str] = lambda target: ""


def _undispatched(target: Target) -> str:
    return "" if target.dispatched else "for ops with a schema"


def _unmapped(target: Target) -> str:
    return "" if target.maps else "it declares no rule; in_dims= asks for one"


def _unlisted(target: Target) -> str:
    if not target.dispatched:
        return _undispatched(target)
    return "torch's own op" if str(target.name).partition(".")[0] in ("aten", "prims") else ""


RULES: Mapping[str, Rule] = {
    "retain": Rule(
        retained,
        ("autograd.saved",),
        "Leave what backward needs on ctx, in ctx.save_for_backward: autograd frees it itself "
        "after the last pass.",
    ),
    "modified": Rule(
        modified,
        ("autograd.modified",),
        "Save tensors with ctx.save_for_backward, which notices a later write, not as attributes "
        "of ctx or with .data.",
    ),
    "needs": Rule(
        needed,
        ("autograd.needs",),
        "Return a gradient for each input whose entry of ctx.needs_input_grad is true, whatever "
        "the other entries are.",
    ),
    "gradcheck": Rule(
        gradchecked,
        ("autograd.gradient", "library.autograd"),
        "Correct the backward. If its gradient differs from its forward on purpose, as that of a "
        "straight-through estimator, pass contracts='-gradcheck'.",
        everywhere=False,
    ),
    "double": Rule(
        double,
        ("autograd.double",),
        "Compute gradients with differentiable ops on saved tensors, or decorate backward with "
        "torch.autograd.function.once_differentiable, so a second derivative is an error.",
        everywhere=False,
    ),
    "placement": Rule(
        placed,
        ("custom.backward", "examples.bwd-state"),
        "Decorate forward with torch.amp.custom_fwd and backward with torch.amp.custom_bwd; in a "
        "custom op, enter torch.autocast in the backward, with the state that its forward had.",
    ),
    "state": Rule(leaks, ("autocast-code.restored",), messages.LEAVE),
    "alias": Rule(
        aliased,
        ("library.alias",),
        "Return a copy (.clone()), or declare the alias in the schema.",
        lacks=_undispatched,
    ),
    "fake": Rule(
        faked,
        ("library.fake",),
        "Have the fake kernel return tensors of the dtype, shape and strides of the real kernel, "
        "under autocast too.",
    ),
    "vmap": Rule(
        vectorised,
        ("autograd.vmap", "library.vmap"),
        "Correct the vmap rule: it must give what one call after another gives.",
        lacks=_unmapped,
    ),
    "opcheck": Rule(
        _opchecked,
        ("library.opcheck", "library.mutates"),
        "Correct what torch.library.opcheck names; it can be called alone with the same inputs.",
        everywhere=False,
        lacks=_unlisted,
    ),
}
