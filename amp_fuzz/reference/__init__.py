"""Autocast, written again: policy tables as data, the rules of casting, and the context manager.

``with reference.autocast("cpu", dtype=torch.bfloat16): ...`` casts as `torch.autocast` should, and
``reference.shadow(function, *args)`` says how far rounding can move each value of a call.
"""

from amp_fuzz.policies.tables import (
    DEVICES,
    Policy,
    PolicyTable,
    PolicyTableError,
    Rule,
    all_overloads,
    load_table,
    load_table_file,
    since,
    tabled_devices,
)
from amp_fuzz.reference.autocast import autocast, snapshot
from amp_fuzz.reference.cache import clear_cache
from amp_fuzz.reference.calls import Call, Cast, KernelCall, Supposed, Treatment
from amp_fuzz.reference.custom_ops import CustomOp, custom_op
from amp_fuzz.reference.functions import checkpoint, custom_bwd, custom_fwd
from amp_fuzz.reference.semantics import DOCUMENTED, Semantics
from amp_fuzz.reference.shadow.band import Band, Distance, distance
from amp_fuzz.reference.shadow.mode import Shadow
from amp_fuzz.reference.shadow.run import Shadowed, shadow
from amp_fuzz.reference.state import as_device, log_kernels
from amp_fuzz.reference.suppositions import inherited, intercepting, supposing, under
from amp_fuzz.reference.transforms import transforms

__all__ = [
    "DEVICES",
    "DOCUMENTED",
    "Band",
    "Call",
    "Cast",
    "CustomOp",
    "Distance",
    "KernelCall",
    "Policy",
    "PolicyTable",
    "PolicyTableError",
    "Rule",
    "Semantics",
    "Shadow",
    "Shadowed",
    "Supposed",
    "Treatment",
    "all_overloads",
    "as_device",
    "autocast",
    "checkpoint",
    "clear_cache",
    "custom_bwd",
    "custom_fwd",
    "custom_op",
    "distance",
    "inherited",
    "intercepting",
    "load_table",
    "load_table_file",
    "log_kernels",
    "shadow",
    "since",
    "snapshot",
    "supposing",
    "tabled_devices",
    "transforms",
    "under",
]
