"""Expectation and observation in, divergences out. No tolerance anywhere."""

from amp_fuzz.oracle.compare import Divergence, Kind, compare, describe
from amp_fuzz.oracle.relations import RELATIONS, Relation, check_relation, within

__all__ = [
    "RELATIONS",
    "Divergence",
    "Kind",
    "Relation",
    "check_relation",
    "compare",
    "describe",
    "within",
]
