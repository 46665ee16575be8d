"""`amp_fuzz.check`: compare a callable under the reference and under real backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from amp_fuzz.backends import Backend
from amp_fuzz.cases.case import Plan
from amp_fuzz.cases.program import Autocast
from amp_fuzz.config import Options
from amp_fuzz.interfaces.check.adapters import Checked, refusal
from amp_fuzz.interfaces.check.arguments import (
    Context,
    caller_of,
    check_arguments,
    check_surroundings,
    chosen_backends,
    context_list,
)
from amp_fuzz.interfaces.check.contexts import Opened, around, noted
from amp_fuzz.interfaces.check.custom_ops import declare_custom_ops
from amp_fuzz.interfaces.check.fork import Died
from amp_fuzz.interfaces.check.own_casts import merged, own_casts
from amp_fuzz.interfaces.check.redirect import forget_warnings
from amp_fuzz.interfaces.check.result import CheckResult, OwnCast
from amp_fuzz.interfaces.check.steps import Asked, Call, survived, unsupported
from amp_fuzz.interfaces.check.subject import Subject
from amp_fuzz.runs.setup import known_of

__all__ = ["BACKENDS", "check"]

BACKENDS = ("eager-cpu", "fake-cuda", "compile[aot_eager]")
"""The default backends of `check`: they run on any machine, in seconds."""


def check(
    function: Callable[..., Any],
    /,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    backends: Iterable[str | Backend] | str | Backend = BACKENDS,
    autocast: Context | Sequence[Context] = torch.bfloat16,
    backward: bool = True,
    seed: int = 0,
    known: Iterable[str | Path] = (),
    seconds: float = 60.0,
    store: str | Path | None = ".amp-fuzz",
    isolate: bool | None = None,
) -> CheckResult:
    """Compare a callable under autocast on real backends with the reference.

    Eager must agree bit for bit, a fake device in dtypes and shapes, and a compiler within the
    rounding that shadow arithmetic measures in the same call: outputs, gradients of parameters and
    inputs, and buffers. Parameters, buffers, gradients, attributes, train or eval mode and random
    generators are restored; dropout draws the same on both sides.

    Args:
        function: a `torch.nn.Module`, or any callable. Modules and tensors that it is bound to,
            closes over or finds among its globals belong to it.
        inputs: its arguments; tensors are copied. kwargs: its keyword arguments.
        backends: names as in ``amp-fuzz run --backends``, or backends; * means every backend that
            is ready here.
        autocast: the dtype of the context around the call, ``torch.bfloat16`` or ``"bfloat16"``;
            or the keyword arguments of `torch.autocast` as a mapping; or None for no context, for
            a callable that opens its own. The items of a list are checked one by one.
        backward: whether a backward pass follows after the context, from every output that requires
            grad.
        seed: of torch's, Python's and NumPy's generators, set before each call.
        known: files of known findings, in addition to the package's list.
        seconds: how long to search for the submodule and op of each divergence.
        store: the folder where the case of a divergence is kept; None keeps none.
        isolate: whether each backend runs in a fork of this process, which a crash then kills.
            False calls in this process, for a debugger, or if the callable needs threads of this
            process. None: if forks are safe.

    Returns the result. It is true if `ok`, and its `raise_if_failed` raises otherwise.

    Raises:
        CheckError: the callable cannot be checked, or check is called within a context.
        BackendError, MissingBackend: a backend is unknown, or a named one cannot be used here.
    """
    check_arguments(kwargs=kwargs, backward=backward, seed=seed)
    check_surroundings(backward=backward)
    subject = Subject.of(function, inputs, kwargs, seed)
    declare_custom_ops()
    chosen = chosen_backends(backends)
    call, remarks = caller_of(isolate, chosen)
    contexts = context_list(autocast)
    entries = known_of(Options(known=tuple(map(Path, known))))
    forget_warnings()
    threads, kept = torch.get_num_threads(), subject.kept()
    torch.set_num_threads(1)  # as in a run: some kernels sum in another order on several threads
    try:
        runs = [
            survived(call, Asked(subject, backend, context, entries, backward, seconds, store))
            for backend in chosen
            for context in contexts
        ]
        casts, opened, cut = _observed(call, subject, chosen, contexts)
    finally:
        torch.set_num_threads(threads)
        kept.restore()  # extracted cases seed torch too
    told = noted(runs, chosen, opened)
    return CheckResult(subject.name, told, seed, merged(casts), (*remarks, *cut))


def _observed(
    call: Call,
    subject: Subject,
    chosen: Sequence[Backend],
    contexts: Sequence[tuple[Autocast, ...]],
) -> tuple[list[OwnCast], list[Opened], tuple[str, ...]]:
    """Return the callable's own casts, facts of the contexts, and why some are unknown."""
    casts: list[OwnCast] = []
    opened: list[Opened] = []
    cut: tuple[str, ...] = ()
    try:
        for some, facts in call(_notes, subject, chosen, contexts):
            casts += some
            opened += facts
    except Died as died:
        cut = (f"Some of its own casts are unknown: {died}.",)
    return casts, opened, cut


def _notes(
    subject: Subject, chosen: Sequence[Backend], contexts: Sequence[tuple[Autocast, ...]]
) -> Iterator[tuple[list[OwnCast], list[Opened]]]:
    """Yield the callable's own casts, and facts of contexts, under the tables of all devices."""
    devices = {b.device: b for b in reversed(chosen) if not refusal(b, subject)}
    for context in contexts:
        able = [b.device for b in reversed(devices.values()) if not unsupported(b, context)]
        for one in context:
            yield [], list(around(one, able))
    for backend in reversed(devices.values()):
        for context in contexts:
            if not unsupported(backend, context):
                plan = msgspec.structs.replace(Plan(), contexts=context)
                yield own_casts(subject, Checked(subject, backend).reference(), plan)
