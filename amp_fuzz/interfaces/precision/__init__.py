"""`amp_fuzz.precision`: see `amp_fuzz.interfaces.precision.api`."""

from amp_fuzz.interfaces.precision.api import precision
from amp_fuzz.interfaces.precision.result import PrecisionLost, PrecisionResult

__all__ = ["PrecisionLost", "PrecisionResult", "precision"]
