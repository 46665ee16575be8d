"""Find faults of autocast's contexts themselves.

A context that does not restore the state shows as a changed state after the case. Inside another
context it shows as wrong values and gradients of the following statements. If the case agrees once
each context restores the state, that is the cause. A context that is not entered by ``with`` may
act as if it had other settings. Then the reference with those settings does what torch did on the
whole case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from amp_fuzz.backends.base import Watches
from amp_fuzz.backends.harness import Observation
from amp_fuzz.backends.torch_state import restoring, torch_state
from amp_fuzz.cases.case import Case
from amp_fuzz.findings.wrong_rule import RULES, broken_rules, without
from amp_fuzz.oracle.attribution import NONE, Own
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.records.fingerprint import special
from amp_fuzz.upstream.supposed import agrees_with

__all__ = ["acts", "acts_as", "alike", "like", "saying", "unrestored"]

# The settings that a context may act as, in the order in which they are tried.
_SAID: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("dtype", ("bfloat16", "float16", "float32")),
    ("enabled", (False, True)),
    ("cache_enabled", (False, True)),
)


def unrestored(judge: Judge, case: Case) -> tuple[str, ...]:
    """Return the parts of the state that contexts leave changed, if nothing else is wrong.

    Nothing else is wrong if the case agrees once each context restores the state. Otherwise, and
    for backends that do not take our contexts, return ().
    """
    backend = judge.backend
    if not isinstance(backend, Watches):
        return ()
    left: dict[str, None] = {}

    def watched(autocast: Any) -> Any:
        return _restoring(autocast, backend.device, left.setdefault)

    careful = replace(judge, backend=backend.watching(watched), relations="none")
    if careful.judge(case).outcome not in ("agreed", "raised"):
        return ()
    return tuple(left)


def _restoring(autocast: Any, device: str, note: Callable[[str], None]) -> Any:
    """Return an autocast that also restores the state, and notes what was left changed."""

    class Restoring(autocast):  # type: ignore[misc]
        def __enter__(self) -> Any:
            before = self.__dict__.setdefault("_before", [])
            before.append((torch_state(device), restoring()))
            return super().__enter__()

        def __exit__(self, *error: Any) -> Any:
            answer = super().__exit__(*error)
            before, restore = self.__dict__["_before"].pop()
            after = torch_state(device)
            for name in before:
                if before[name] != after[name]:
                    note(name)
            restore()
            return answer

    return Restoring


def acts_as(judge: Judge, case: Case, observed: Observation, own: Own = NONE) -> tuple[str, ...]:
    """Return the settings that the innermost context of a plan acts as: ``dtype=bfloat16``.

    With any of these settings the reference does what was observed. A plan with only contexts and
    a backward pass is not examined: there an op's policy may be wrong instead. What a compiler
    makes of a program may break a rule as well: see `amp_fuzz.findings.wrong_rule`. own: how the
    backend differs without autocast too.
    """
    settings = _sayable(case) if special(case) else ()
    names = (*broken_rules(judge.backend, case), *settings)
    return tuple(name for name in names if acts(judge, case, observed, name, own))


def acts(judge: Judge, case: Case, observed: Observation, name: str, own: Own = NONE) -> bool:
    """Return whether the reference with one setting, or without a rule, does what was observed."""
    return agrees_with(judge.backend, saying(case, name), observed, {}, own=own)


def _sayable(case: Case) -> Iterator[str]:
    contexts = case.plan.contexts
    if not contexts:
        return
    for field, values in _SAID:
        for value in values:
            if getattr(contexts[-1], field) == value:
                continue
            # On devices without float32 this equals enabled=False, unless a context around it sets
            # it.
            if value == "float32" and all(c.dtype != value for c in contexts[:-1]):
                continue
            yield f"{field}={value}"


def like(case: Case, name: str) -> tuple[str, ...]:
    """Return the settings to try if a context acted as one elsewhere: that first, then similar.

    The dtype of a context that loses its own depends on the contexts around it.
    """
    others = [other for other in _sayable(case) if other != name]
    return name, *alike([name, *others])[1:]


def saying(case: Case, name: str) -> Case:
    """Return a case whose plan's innermost context has the setting that `acts_as` names.

    Or one that does what the case does without the rule of that name.
    """
    if name in RULES:
        return without(case, name)
    field, _, text = name.partition("=")
    value = dict(_SAID)[field][[str(v) for v in dict(_SAID)[field]].index(text)]
    said = msgspec.structs.replace(case.plan.contexts[-1], **{field: value})
    return case.with_plan(contexts=(*case.plan.contexts[:-1], said))


def alike(names: Sequence[str]) -> tuple[str, ...]:
    """Return those of a context's settings that are about the same as the first."""
    about = names[0].partition("=")[0] if names else ""
    return tuple(name for name in names if name.partition("=")[0] == about)
