"""Autocast, written again: policy tables as data, the rules of casting, and the context manager.

from amp_fuzz import reference

with reference.autocast("cpu", dtype=torch.bfloat16):
output = model(input)
"""

from amp_fuzz.reference.autocast import (
    QUIRKS,
    Cast,
    KernelCall,
    autocast,
    checkpoint,
    clear_cache,
    custom_bwd,
    custom_fwd,
    log_kernels,
    quirks,
    snapshot,
)
from amp_fuzz.reference.tables import (
    DEVICES,
    Policy,
    PolicyTable,
    PolicyTableError,
    Rule,
    all_overloads,
    load_table,
    load_table_file,
)

__all__ = [
    "DEVICES",
    "QUIRKS",
    "Cast",
    "KernelCall",
    "Policy",
    "PolicyTable",
    "PolicyTableError",
    "Rule",
    "all_overloads",
    "autocast",
    "checkpoint",
    "clear_cache",
    "custom_bwd",
    "custom_fwd",
    "load_table",
    "load_table_file",
    "log_kernels",
    "quirks",
    "snapshot",
]
