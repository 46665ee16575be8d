"""`amp_fuzz.check`: a callable under the reference and under real backends, compared."""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from amp_fuzz.backends import Backend, BackendError
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import Plan
from amp_fuzz.cases.program import FLOAT_DTYPES, Autocast
from amp_fuzz.config import Options
from amp_fuzz.findings.supervision.processes import unforkable
from amp_fuzz.interfaces.check.adapters import Checked, refusal
from amp_fuzz.interfaces.check.custom_ops import declare_custom_ops
from amp_fuzz.interfaces.check.fork import Apart, Died
from amp_fuzz.interfaces.check.own_casts import merged, own_casts
from amp_fuzz.interfaces.check.result import CheckResult, OwnCast
from amp_fuzz.interfaces.check.steps import Asked, Call, survived, unsupported
from amp_fuzz.interfaces.check.subject import CheckError, Subject
from amp_fuzz.runs.setup import MissingBackend, choose_backends, known_of

__all__ = ["BACKENDS", "check"]

BACKENDS = ("eager-cpu", "fake-cuda", "compile[aot_eager]")
"""What `check` calls a callable on unless it is told: on any machine, in seconds."""

Context = torch.dtype | str | Mapping[str, Any] | None


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
    """Compare what a callable does under autocast on real backends with what the reference says.

    Eager must agree bit for bit, a fake device in dtypes and shapes, and a compiler within the
    rounding that shadow arithmetic measures in the call itself: outputs, gradients of parameters
    and inputs, and buffers. Parameters, buffers, gradients, attributes, train or eval mode and
    random generators are put back; dropout draws the same on both sides.

    Args:
        function: a `torch.nn.Module`, or any callable. Modules and tensors that it is bound to,
            closes over or finds among its globals belong to it.
        inputs: what it is called with; tensors are copied. kwargs: keyword arguments.
        backends: names as in ``amp-fuzz run --backends``, or backends; * stands for those that are
            ready here.
        autocast: the dtype of the context around the call, ``torch.bfloat16`` or ``"bfloat16"``;
            or the keyword arguments of `torch.autocast` as a mapping; or None for no context, as
            for a callable that opens its own. Several, as a list, are checked one by one.
        backward: whether a backward pass follows, from every output that requires grad, after the
            context.
        seed: of torch's, Python's and NumPy's generators, before each call.
        known: files of known findings, beside the list that comes with the package.
        seconds: how long to look for the submodule and op of a divergence, for each.
        store: the folder where the case of a divergence is kept; None keeps none.
        isolate: whether each backend has a fork of this process, so that a kernel or a compiler
            that crashes ends that; False calls it here, for a debugger, or where it needs threads
            that this process has started. None: where forks are safe.

    Returns what it found; it is true if all is well, and `raise_if_failed` raises if not.

    Raises:
        CheckError: the callable cannot be checked as it is, or it is checked within a context.
        BackendError, MissingBackend: a backend is unknown, or named and cannot be used here.
    """
    _check_arguments(kwargs=kwargs, backward=backward, seed=seed)
    _check_surroundings(backward=backward)
    subject = Subject.of(function, inputs, kwargs, seed)
    declare_custom_ops()
    call, remarks = _caller(isolate)
    chosen = _chosen(backends)
    contexts = _contexts(autocast)
    entries = known_of(Options(known=tuple(map(Path, known))))
    threads, kept = torch.get_num_threads(), subject.kept()
    torch.set_num_threads(1)  # as in a run: some kernels sum in another order on several threads
    try:
        runs = [
            survived(call, Asked(subject, backend, context, entries, backward, seconds, store))
            for backend in chosen
            for context in contexts
        ]
        casts, cut = _casts(call, subject, chosen, contexts)
    finally:
        torch.set_num_threads(threads)
        kept.restore()  # the cases that were cut out seed torch too
    return CheckResult(subject.name, tuple(runs), seed, merged(casts), (*remarks, *cut))


def _caller(isolate: bool | None) -> tuple[Call, tuple[str, ...]]:
    """Return what runs a generator with arguments, in a fork or here, and what to say of that.

    Raises `CheckError`.
    """
    reason = unforkable()
    if not reason and multiprocessing.current_process().daemon:
        reason = "a daemonic process may start no other"
    if isolate and reason:
        raise CheckError(f"isolate=True: {reason}")
    if reason or isolate is False:
        said = f"It was called in this process, which a crash would have ended: {reason}."
        return _here, ((said,) if isolate is None else ())
    # What torch imports at the first checkpoint, custom op or compiler, here once for all forks.
    with quiet():
        importlib.import_module("torch._dynamo")
    return Apart(), ()


def _here(function: Callable[..., Iterator[Any]], *args: object) -> Iterator[Any]:
    return function(*args)


def _casts(
    call: Call,
    subject: Subject,
    chosen: Sequence[Backend],
    contexts: Sequence[tuple[Autocast, ...]],
) -> tuple[list[OwnCast], tuple[str, ...]]:
    """Return what the callable does by itself, and why some of that is not known."""
    found: list[OwnCast] = []
    try:
        found.extend(call(_notes, subject, chosen, contexts))
    except Died as died:
        return found, (f"Its own casts are not known in full: {died}.",)
    return found, ()


def _notes(
    subject: Subject, chosen: Sequence[Backend], contexts: Sequence[tuple[Autocast, ...]]
) -> Iterator[OwnCast]:
    """Yield what the callable does by itself, under the tables of all devices in question."""
    devices = {b.device: b for b in reversed(chosen) if not refusal(b, subject)}
    for backend in reversed(devices.values()):
        for context in contexts:
            if not unsupported(backend, context):
                plan = msgspec.structs.replace(Plan(), contexts=context)
                yield from own_casts(subject, Checked(subject, backend).reference(), plan)


def _check_arguments(*, kwargs: Any, backward: Any, seed: Any) -> None:
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise CheckError(f"kwargs={kwargs!r}: use a mapping from names to arguments")
    if not isinstance(backward, bool):
        raise CheckError(f"backward={backward!r}: use True or False")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise CheckError(f"seed={seed!r}: use a whole number from 0 to 2**32 - 1, as NumPy takes")


def _check_surroundings(*, backward: bool) -> None:
    devices = ("cpu", "cuda", "xpu", "mps", "mtia", "maia")
    if any(torch.is_autocast_enabled(d) for d in devices if torch.amp.is_autocast_available(d)):
        raise CheckError("autocast is on around check: call it outside, and say autocast=")
    if backward and (not torch.is_grad_enabled() or torch.is_inference_mode_enabled()):
        raise CheckError("gradients are off around check: call it outside, or say backward=False")


def _chosen(backends: Iterable[str | Backend] | str | Backend) -> list[Backend]:
    if isinstance(backends, str) or not isinstance(backends, Iterable):
        backends = [backends]
    found: dict[str, Backend] = {}
    for one in backends:
        for backend in choose_backends([one]) if isinstance(one, str) else [one]:
            state = backend.availability()
            if state.status != "ready":
                raise MissingBackend(
                    f"backend {backend.name} is {state.status} here: {state.detail}"
                )
            found[backend.name] = backend
    if not found:
        raise BackendError(f"backends={backends!r} names none that is ready here")
    return list(found.values())


def _contexts(autocast: Context | Sequence[Context]) -> list[tuple[Autocast, ...]]:
    several = autocast if isinstance(autocast, (list, tuple)) else [autocast]
    if not several:
        raise CheckError("autocast=[] has nothing to check: give a dtype, or None for no context")
    return [_context(one) for one in several]


def _context(one: Any) -> tuple[Autocast, ...]:
    if one is None:
        return ()
    options = dict(one) if isinstance(one, Mapping) else {"dtype": one}
    dtype = options.pop("dtype", None)
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    if name not in (None, *FLOAT_DTYPES):
        raise CheckError(f"autocast={one!r} is no floating dtype: use torch.bfloat16 or float16")
    unknown = set(options) - {"enabled", "cache_enabled"}
    if unknown:
        raise CheckError(
            f"autocast has {sorted(unknown)}: it takes dtype, enabled and cache_enabled; each "
            "backend has its own device"
        )
    for option, value in options.items():
        if not isinstance(value, bool) and (option, value) != ("cache_enabled", None):
            raise CheckError(f"autocast has {option}={value!r}: use True or False")
    return (Autocast(dtype=name, **options),)
