"""Check any callable, on any backend, against the reference.

The public function is `amp_fuzz.check`; this package implements it.
"""

from amp_fuzz.interfaces.check.api import BACKENDS, check
from amp_fuzz.interfaces.check.result import CheckFailed, CheckResult, Diverged, Ran
from amp_fuzz.interfaces.check.subject import CheckError

__all__ = ["BACKENDS", "CheckError", "CheckFailed", "CheckResult", "Diverged", "Ran", "check"]
