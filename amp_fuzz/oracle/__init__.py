"""Compare expectations with observations and return divergences. There is no tolerance to tune."""

from amp_fuzz.oracle.compare import Divergence, Judgement, Kind, compare, describe, differ
from amp_fuzz.oracle.relations import RELATIONS, Relation, check_relation, within
from amp_fuzz.oracle.rounding import Rounding

__all__ = [
    "RELATIONS",
    "Divergence",
    "Judgement",
    "Kind",
    "Relation",
    "Rounding",
    "check_relation",
    "compare",
    "describe",
    "differ",
    "within",
]
