"""Check the contracts of a custom op.

The public function is `amp_fuzz.check_op`; this package implements it.
"""

from amp_fuzz.interfaces.check_op.api import CONTRACTS, check_op
from amp_fuzz.interfaces.check_op.result import Contract, OpResult

__all__ = ["CONTRACTS", "Contract", "OpResult", "check_op"]
