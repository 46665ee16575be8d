"""Tell the reference what custom ops ask of autocast, so that code which calls them is checked.

`torch.library.custom_op` makes ops from Python. One with `register_autocast` has its inputs cast;
the body of another runs under the autocast around it. An op that was made otherwise is for
`amp_fuzz.register_op`.
"""

from __future__ import annotations

from typing import Any

import torch._library.custom_ops

from amp_fuzz.reference.kernels import declare_op
from amp_fuzz.reference.tables import DEVICES, Policy, Rule, declared

__all__ = ["declare_custom_ops"]


def declare_custom_ops() -> None:
    """Declare every custom op of this process that the reference does not know yet."""
    known: Any = getattr(torch._library.custom_ops, "OPDEFS", {})
    for name, op in list(known.items()):
        casts = getattr(op, "_autocast_dtype", {})
        rules = {
            device: Rule(
                name,
                Policy.CAST_INPUTS,
                ">=2.7",
                "torch.library.register_autocast",
                cast_inputs=str(dtype).removeprefix("torch."),
            )
            for device, dtype in casts.items()
            if dtype is not None and device in DEVICES
        }
        # What register_op was told stands.
        if not any(declared(device, name) for device in DEVICES):
            declare_op(name, rules)
