"""The look of a divergence, its traits and its signature: keys under which findings count as one.

A *look* is what a divergence is before it is minimised: kind, op, how it is called, dtypes, plan.
*Traits* are the fields of a fingerprint.
"""

from __future__ import annotations

import re
from typing import TypeAlias

from amp_fuzz.cases.program import Items, Ref, show_arg, statements, uses
from amp_fuzz.findings.minimize.target import (
    answer_of,
)
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.records.fingerprint import fingerprint, ingredient
from amp_fuzz.records.schema import OWN, DivergenceRecord, listed

__all__ = ["Look", "look_of", "signature_of", "traits_of"]

Look: TypeAlias = tuple[str, ...]


def look_of(verdict: Verdict, *, quick: bool) -> Look:
    """Return the look of a divergence before it is minimised.

    It distinguishes more than the fingerprint. On a compiler, where minimising every look is too
    expensive, only op and kind count.
    """
    record, case = verdict.finding(""), verdict.case
    if not quick:
        return signature_of(record)
    answer = answer_of(verdict)
    specs = {s.name: s for s in case.program.inputs}
    calls = list(statements(case.program.body))
    said: list[str] = [answer.errors, ingredient(case)]
    if len(calls) == 1:
        (call,) = calls
        given = [specs[name] for name in uses(call) if name in specs]
        said += [call.form, *(f"{s.role} {s.dtype} {s.layout} {len(s.shape)}" for s in given)]
        said += [_argument(a) for a in call.args] + [k for k, a in call.kwargs if a is not None]
    if record.kind == "state":
        said.append(record.observed)
    return (*signature_of(record), record.policy, record.dtypes, *said)


def traits_of(verdict: Verdict) -> Look:
    """Return the fields that the fingerprint would have if the divergence were minimised."""
    record = fingerprint(verdict.finding(""))
    dtypes = sorted(set(record.dtypes))
    names = record.kind, record.backend, record.op, record.policy, record.ingredient
    return ("traits", *names, *dtypes)


def _argument(arg: object) -> str:
    if isinstance(arg, Ref):
        return "tensor"
    if isinstance(arg, Items):
        return f"list of {len(arg.items)}"
    return type(arg).__name__ if not isinstance(arg, str) else show_arg(arg)


def signature_of(record: DivergenceRecord) -> Look:
    """Return the key under which findings that are not minimised count as one.

    A known finding is kept once for each backend and kind, a new one once for each op at which it
    shows, an error without an op once for each text, one that autocast has no part in for each op
    and dtypes.
    """
    sort = (record.backend, record.kind, record.known)
    if listed(record.known):
        return (*sort, "")
    about = record.op
    if record.kind == "raise" and not about:
        raised = f"{record.expected} -> {record.observed}"
        about = re.sub(r"[\d.]+|\[.*?\]|'.*?'", "#", raised)[:160]
    return (*sort, about, record.dtypes) if record.known == OWN else (*sort, about)
