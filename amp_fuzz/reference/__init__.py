"""Autocast, written again: policy tables as data, the rules of casting, and the context manager.

``with reference.autocast("cpu", dtype=torch.bfloat16): ...`` casts as `torch.autocast` should, and
``reference.shadow(function, *args)`` says how far rounding can move each value of a call.
"""

from amp_fuzz.reference.autocast import (
    QUIRKS,
    Cast,
    KernelCall,
    as_device,
    autocast,
    checkpoint,
    clear_cache,
    custom_bwd,
    custom_fwd,
    grad,
    imitating,
    log_kernels,
    quirks,
    snapshot,
    supposing,
    vmap,
)
from amp_fuzz.reference.customop import CustomOp, custom_op
from amp_fuzz.reference.shadows import Band, Distance, Shadow, Shadowed, distance, shadow
from amp_fuzz.reference.tables import (
    DEVICES,
    Policy,
    PolicyTable,
    PolicyTableError,
    Rule,
    all_overloads,
    load_table,
    load_table_file,
    tabled_devices,
)

__all__ = [
    "DEVICES",
    "QUIRKS",
    "Band",
    "Cast",
    "CustomOp",
    "Distance",
    "KernelCall",
    "Policy",
    "PolicyTable",
    "PolicyTableError",
    "Rule",
    "Shadow",
    "Shadowed",
    "all_overloads",
    "as_device",
    "autocast",
    "checkpoint",
    "clear_cache",
    "custom_bwd",
    "custom_fwd",
    "custom_op",
    "distance",
    "grad",
    "imitating",
    "load_table",
    "load_table_file",
    "log_kernels",
    "quirks",
    "shadow",
    "snapshot",
    "supposing",
    "tabled_devices",
    "vmap",
]
