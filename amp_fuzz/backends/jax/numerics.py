"""The arithmetic of XLA on a platform, as documented: see `platforms` and docs/guide/jax.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from amp_fuzz.backends.jax.platforms import Platform
from amp_fuzz.backends.process import Apart
from amp_fuzz.backends.reference import Numerics
from amp_fuzz.cases.case import Precision
from amp_fuzz.reference.shadow.products import BFLOAT16, TF32, Products

__all__ = ["DRAWN", "numerics", "numerics_of"]

DRAWN: tuple[Precision, ...] = ("default", "default", "default", "default", "high", "highest")
"""The precisions of products, each as often as a case draws it."""

_BFLOAT16_3X = replace(BFLOAT16, passes=3)


def numerics(platform: Platform) -> Numerics:
    """Return the arithmetic of a platform."""
    levels = _products(platform)
    return Numerics(
        reorders=True,
        # XLA's kernels for the CPU run with flush-to-zero and denormals-are-zero on. A TPU has no
        # subnormal numbers of bfloat16 (https://cloud.google.com/tpu/docs/bfloat16). xla_gpu_ftz is
        # off by default.
        flushes=platform.name != "gpu",
        in_turn=True,  # in the CPU's loops; nothing promises another order elsewhere
        products=lambda precision, func: levels.get(precision),
    )


def numerics_of(process: Apart) -> Numerics:
    """Return the arithmetic of the platform that a process with JAX found; starts it."""
    platform = process.said()
    assert isinstance(platform, Platform), platform
    return numerics(platform)


def _products(platform: Platform) -> Mapping[Precision, Products]:
    levels: dict[Precision, Products] = {}
    if platform.name == "tpu":
        levels = {"default": BFLOAT16, "high": _BFLOAT16_3X}
    elif platform.has_tf32:
        levels = {"default": TF32, "high": TF32}
    default = levels.pop("default", None) if platform.precision == "default" else None
    default = default or levels.get(platform.precision)
    levels.pop("default", None)
    return levels if default is None else {**levels, "default": default}
