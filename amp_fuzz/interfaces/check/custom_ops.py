"""Declare to the reference what custom ops ask of autocast, so code that calls them can be checked.

`torch.library.custom_op` creates ops from Python. With `register_autocast`, the inputs are cast;
otherwise the body runs under the surrounding autocast. Other kinds of ops need
`amp_fuzz.register_op`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch._library.custom_ops

from amp_fuzz.backends.custom_op import definitions
from amp_fuzz.policies.tables import DEVICES, Policy, Rule, declared
from amp_fuzz.reference.kernels import declare_op

__all__ = ["declare_custom_ops", "definition_of"]


def declare_custom_ops() -> None:
    """Declare every custom op of this process that the reference does not know yet."""
    for name, op in definitions().items():
        casts = _casts(op)
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
        # register_op takes precedence.
        if not any(declared(device, name) for device in DEVICES):
            declare_op(name, rules)


def _casts(op: Any) -> Mapping[str, torch.dtype | None]:
    """Return the dtype that an op registered for each device type; until 2.11 two attributes."""
    older = {device: getattr(op, f"_autocast_{device}_dtype", None) for device in ("cpu", "cuda")}
    found: Mapping[str, torch.dtype | None] = getattr(op, "_autocast_dtype", older)
    return found


def definition_of(op: Any) -> Any:
    """Return the `torch.library.custom_op` definition of an op of the dispatcher, or None."""
    if isinstance(op, torch._library.custom_ops.CustomOpDef):
        return op
    name = str(getattr(op, "_qualified_op_name", "") or getattr(op, "name", lambda: "")())
    return definitions().get(name.partition(".")[0])
