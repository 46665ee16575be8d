"""The library of numeric faults: kernels, graphs, decompositions and code that are slightly wrong.

Each gets one thing wrong of what real bugs get wrong: the type that an op computes in, a term, a
gain, one element, what backward was given, a sign, a cast in one direction, the max-subtraction.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.faults.fault import NumericFault
from tests.faults.numeric_compiled import COMPILED
from tests.faults.numeric_eager import EAGER

__all__ = ["COMPILED", "EAGER", "NUMERIC", "NumericFault"]

NUMERIC: Mapping[str, NumericFault] = {f.name: f for f in (*EAGER, *COMPILED)}
