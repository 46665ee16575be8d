"""What is wrong with autocast's contexts themselves, whatever a case shows it as.

A context that does not put back what it found shows as state after the case, or, inside another
context, as values and gradients of whatever comes next. If the case agrees once each context puts
the state back, that is the cause. A context that is entered otherwise than by ``with`` may act as
if it said something else; then the reference, with that said, does what torch did on the whole.
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
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.records.fingerprint import special
from amp_fuzz.upstream.supposed import agrees_with

__all__ = ["acts_as", "alike", "like", "saying", "unrestored"]

# What a context may be taken to say, in the order in which it is tried.
_SAID: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("dtype", ("bfloat16", "float16", "float32")),
    ("enabled", (False, True)),
    ("cache_enabled", (False, True)),
)


def unrestored(judge: Judge, case: Case) -> tuple[str, ...]:
    """Return which parts of the state contexts leave changed, if that is all that is wrong.

    So it is where the case agrees once each context puts back what it found. () otherwise, and for
    backends that are not given contexts of ours.
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
    """Return autocast as it is, but that it puts the state back, and notes what was not."""

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


def acts_as(judge: Judge, case: Case, observed: Observation) -> tuple[str, ...]:
    """Return what the innermost context of a plan acts as if it said: ``dtype=bfloat16``.

    With any of these said there the reference does what was observed. Nothing is asked of a plan
    that has nothing but contexts and a backward pass: there, whatever a context says, an op's
    policy may be what is wrong.
    """
    if not case.plan.contexts or not special(case):
        return ()
    return tuple(
        name
        for name in _sayable(case)
        if agrees_with(judge.backend, saying(case, name), observed, {})
    )


def _sayable(case: Case) -> Iterator[str]:
    contexts = case.plan.contexts
    for field, values in _SAID:
        for value in values:
            if getattr(contexts[-1], field) == value:
                continue
            # On devices without float32 that is enabled=False, unless it is said around it.
            if value == "float32" and all(c.dtype != value for c in contexts[:-1]):
                continue
            yield f"{field}={value}"


def like(case: Case, name: str) -> tuple[str, ...]:
    """Return what a case's context may act as if one did so elsewhere: of the same, that first.

    Which dtype a context takes that loses its own depends on what surrounds it.
    """
    others = [other for other in _sayable(case) if other != name]
    return name, *alike([name, *others])[1:]


def saying(case: Case, name: str) -> Case:
    """Return a case whose innermost context of the plan says what `acts_as` names."""
    field, _, text = name.partition("=")
    value = dict(_SAID)[field][[str(v) for v in dict(_SAID)[field]].index(text)]
    said = msgspec.structs.replace(case.plan.contexts[-1], **{field: value})
    return case.with_plan(contexts=(*case.plan.contexts[:-1], said))


def alike(names: Sequence[str]) -> tuple[str, ...]:
    """Return of what a context acts as those that speak of the same as the first."""
    about = names[0].partition("=")[0] if names else ""
    return tuple(name for name in names if name.partition("=")[0] == about)
