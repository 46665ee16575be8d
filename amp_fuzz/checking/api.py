"""`amp_fuzz.check`: a callable under the reference and under real backends, compared."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from amp_fuzz.backends import Backend, BackendError
from amp_fuzz.backends.exported import ExportBackend
from amp_fuzz.case import Case, Plan
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.checking import telling
from amp_fuzz.checking.apart import Died, apart
from amp_fuzz.checking.customops import declare_custom_ops
from amp_fuzz.checking.judging import Judged, judged, others
from amp_fuzz.checking.locate import Place, locate
from amp_fuzz.checking.noted import notes_of
from amp_fuzz.checking.owncasts import merged, own_casts
from amp_fuzz.checking.result import CheckResult, Diverged, OwnCast, Ran
from amp_fuzz.checking.subject import CheckError, Subject
from amp_fuzz.checking.ways import Checked, refusal
from amp_fuzz.config import Options
from amp_fuzz.devices import judging_options
from amp_fuzz.explicit import explicit_form
from amp_fuzz.judge import quiet
from amp_fuzz.known import Known
from amp_fuzz.processes import unforkable
from amp_fuzz.program import FLOAT_DTYPES, Autocast, Program
from amp_fuzz.reference import load_table
from amp_fuzz.session import MissingBackend, choose_backends, known_of
from amp_fuzz.store import Store
from amp_fuzz.triage import fingerprint

__all__ = ["BACKENDS", "check"]

BACKENDS = ("eager-cpu", "fake-cuda", "compile[aot_eager]")
"""What `check` calls a callable on unless it is told: on any machine, in seconds."""

Call = Callable[..., Any]
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
            that crashes ends that; False calls it here, for a debugger. None: where forks are safe.

    Returns what it found; it is true if all is well, and `raise_if_failed` raises if not.

    Raises:
        CheckError: the callable cannot be checked as it is, or it is checked within a context.
        BackendError, MissingBackend: a backend is unknown, or named and cannot be used here.
    """
    _check_arguments(kwargs=kwargs, backward=backward, seed=seed)
    _check_surroundings(backward=backward)
    subject = Subject.of(function, inputs, kwargs, seed)
    declare_custom_ops()
    call = _caller(isolate)
    chosen = _chosen(backends)
    contexts = _contexts(autocast)
    entries = known_of(Options(known=tuple(map(Path, known))))
    threads, kept = torch.get_num_threads(), subject.kept()
    torch.set_num_threads(1)  # as in a run: some kernels sum in another order on several threads
    try:
        runs = [
            _survived(call, subject, backend, context, entries, backward, seconds, store)
            for backend in chosen
            for context in contexts
        ]
        notes = _noted(call, subject, chosen, contexts)
    finally:
        torch.set_num_threads(threads)
        kept.restore()  # the cases that were cut out seed torch too
    return CheckResult(subject.name, tuple(runs), seed, merged(notes))


def _caller(isolate: bool | None) -> Call:
    """Return what calls a function with arguments: in a fork, or here. Raises `CheckError`."""
    reason = unforkable()
    if isolate and reason:
        raise CheckError(f"isolate=True: {reason}")
    if reason or isolate is False:
        return lambda function, *args: function(*args)
    # What torch imports at the first checkpoint, custom op or compiler, here once for all forks.
    with quiet():
        importlib.import_module("torch._dynamo")
    return apart


def _noted(
    call: Call,
    subject: Subject,
    chosen: Sequence[Backend],
    contexts: Sequence[tuple[Autocast, ...]],
) -> list[OwnCast]:
    try:
        found: list[OwnCast] = call(_notes, subject, chosen, contexts)
    except Died:  # as a run did, under the reference too
        return []
    return found


def _notes(
    subject: Subject, chosen: Sequence[Backend], contexts: Sequence[tuple[Autocast, ...]]
) -> list[OwnCast]:
    """Return what the callable does by itself, under the tables of all devices in question."""
    devices = {b.device: b for b in reversed(chosen) if not refusal(b, subject)}
    return [
        note
        for backend in reversed(devices.values())
        for context in contexts
        if not _unsupported(backend, context)
        for note in own_casts(
            subject,
            Checked(subject, backend).reference(),
            msgspec.structs.replace(Plan(), contexts=context),
        )
    ]


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


# -- one backend under one autocast ---------------------------------------------------------------


def _survived(
    call: Call,
    subject: Subject,
    backend: Backend,
    contexts: tuple[Autocast, ...],
    known: Sequence[Known],
    backward: bool,
    *more: Any,
) -> Ran:
    """Return what a backend came to, or that the process died of it."""
    try:
        ran: Ran = call(_run, subject, backend, contexts, known, backward, *more)
        return ran
    except Died as died:
        how, line, shown = str(died), died.line, _shown(contexts)
    ran_as = partial(Ran, backend=backend.name, autocast=shown)
    try:
        call(_refer, subject, backend, contexts, backward)
    except Died:
        at = f" at {line}" if line else ""
        return ran_as(status="raised", detail=f"{how}{at}, {telling.TOO}", advice=telling.DIES)
    found = Diverged(
        backend=backend.name,
        autocast=shown,
        kind="crash",
        where=line,
        expected="an answer",
        observed=how,
        notes=(telling.DIED,),
    )
    return ran_as(status="diverged", detail="crash", divergence=found)


def _refer(
    subject: Subject, backend: Backend, contexts: tuple[Autocast, ...], backward: bool
) -> None:
    """Call the callable under the reference alone."""
    checked, plan = Checked(subject, backend), _plan(contexts, backward)
    with quiet():
        checked.reference().run(checked.fit(Case(Program((), (), ()), plan, subject.seed)))


def _run(
    subject: Subject,
    backend: Backend,
    contexts: tuple[Autocast, ...],
    known: Sequence[Known],
    backward: bool,
    seconds: float,
    store: str | Path | None,
) -> Ran:
    shown = _shown(contexts)

    def ran(status: Any, detail: str = "", **more: Any) -> Ran:
        return Ran(backend=backend.name, autocast=shown, status=status, detail=detail, **more)

    reason = refusal(backend, subject) or _unsupported(backend, contexts)
    if reason:
        return ran("skipped", reason)
    checked = Checked(subject, backend)
    plan = _plan(contexts, backward)
    found = judged(checked, plan, known)
    if found.verdict.divergence is None:
        ran = partial(ran, notes=notes_of(checked, found))
    verdict, raised = found.verdict, found.expected.raised
    if raised is not None and found.observed.raised is not None and verdict.divergence is None:
        said = f"{raised.kind}: {telling.first_line(raised.message)}"
        bare = _raises_bare(checked, plan)
        if not backend.values and bare:
            return ran("skipped", telling.without_values(subject, said))
        at = f" ({raised.text})" if raised.text else ""
        where, advice = telling.raises(bare=bare, contexts=bool(contexts))
        return ran("raised", f"{said}{at}, {where}", advice=advice)
    if found.expected.leaked is not None and verdict.divergence is None:
        return ran("leaked", telling.left(found), advice=telling.LEAVE)
    # A gradient that neither side has was not compared.
    labels = [label for label, value in found.expected.values.items() if value is not None]
    gradients = sum(label.endswith(".grad") for label in labels)
    values = sum(label[0] == "v" for label in labels)
    counts = {"values": values, "gradients": gradients}
    if verdict.divergence is None:
        if verdict.uncompiled:
            why = f": {checked.refused[0]}" if checked.refused else ""
            return ran("skipped", f"the compiler made no graph of it, and ran it as eager{why}")
        written = telling.written(checked, found)
        told = [found.expected.values[label] for label in labels if label[0] in "vw"]
        void = sum(map(telling.void, told)) if backend.values else 0
        if values + gradients + written - verdict.unjudged - void <= 0:
            return ran("nothing", telling.nothing(found, void), advice=telling.RETURN, **counts)
        text = telling.agreement(checked, found, values, gradients, written)
        text += f"; {void} of them empty, NaN or infinite throughout" if void else ""
        return ran("agreed", text, **counts)
    if verdict.known:
        divergence = _diverged(checked, found, shown)
        entries = tuple(telling.listed(k) for k in known if k.id in verdict.known.split("+"))
        return ran("known", verdict.known, divergence=replace(divergence, told=entries), **counts)
    divergence = _diverged(checked, found, shown)
    if isinstance(backend, ExportBackend) and (said := _unexportable(checked, found, known)):
        return ran("skipped", f"torch.export raises without autocast, too: {said}")
    if divergence.kind not in ("state", "nondeterminism"):
        place = locate(checked, found.case.plan, known, divergence.kind, seconds)
        divergence = _placed(divergence, place, checked, found, store)
    return ran("diverged", divergence.kind, divergence=divergence, **counts)


def _plan(contexts: tuple[Autocast, ...], backward: bool) -> Plan:
    return msgspec.structs.replace(
        Plan(), contexts=contexts, backward="outside" if backward else "none"
    )


def _raises_bare(checked: Checked, plan: Plan) -> bool:
    """Return whether the callable raises without autocast, too: then it is not autocast's doing."""
    bare = msgspec.structs.replace(plan, contexts=(), backward="none")
    with quiet():
        return checked.reference().run(Case(Program((), (), ()), bare)).raised is not None


def _unexportable(checked: Checked, found: Judged, known: Sequence[Known]) -> str:
    """Return the error of a callable that cannot be exported with or without autocast, or ""."""
    raised = found.observed.raised
    if found.expected.raised is not None or raised is None:
        return ""
    plan = msgspec.structs.replace(found.case.plan, contexts=())
    bare = judged(Checked(checked.subject, checked.inner), plan, known, confirm=False)
    return telling.first_line(raised.message) if bare.observed.raised is not None else ""


def _shown(contexts: tuple[Autocast, ...]) -> str:
    if not contexts:
        return "no context"
    (context,) = contexts
    words = [context.dtype or "default dtype"]
    words += [] if context.enabled else ["enabled=False"]
    words += [] if context.cache_enabled is None else [f"cache_enabled={context.cache_enabled}"]
    return " ".join(words)


def _unsupported(backend: Backend, contexts: tuple[Autocast, ...]) -> str:
    supported = load_table(backend.device).supported_dtypes
    for context in contexts:
        if context.enabled and context.dtype is not None and context.dtype not in supported:
            return f"autocast for {backend.device} does not take {context.dtype}"
    return ""


def _diverged(checked: Checked, found: Judged, shown: str) -> Diverged:
    divergence = found.verdict.divergence
    assert divergence is not None
    every = [] if found.verdict.known else others(checked, found)
    also = [checked.names(d.where) for d in every if d.where != divergence.where]
    return Diverged(
        backend=checked.name,
        autocast=shown,
        kind=divergence.kind,
        where=checked.names(divergence.where),
        expected=divergence.expected,
        observed=divergence.observed,
        also=tuple(also),
        known=found.verdict.known,
    )


def _placed(
    divergence: Diverged,
    place: Place,
    checked: Checked,
    found: Judged,
    store: str | Path | None,
) -> Diverged:
    """Return a divergence with where it comes from, its case kept."""
    notes = list(place.notes)
    case, path, policy = None, None, ""
    commands: tuple[str, ...] = ()
    op = place.op
    if place.verdict is not None:
        record = place.verdict.finding("check", op=op)
        explicit = _explicit(checked, place.verdict.case)
        record = msgspec.structs.replace(record, stage=place.stage, explicit=explicit)
        record = msgspec.structs.replace(record, fingerprint=fingerprint(record).hash)
        case, policy = place.verdict.case, record.policy
        if store is not None:
            kept = Store(store)
            path = kept.save(record)
            store_option = [] if kept.root == Path(".amp-fuzz") else [f"--store={kept.root}"]
            more = shlex.join([record.id, *judging_options(), *store_option])
            commands = (f"amp-fuzz minimize {more}", f"amp-fuzz repro {more} > repro.py")
    elif op and op not in CATALOGUE:
        notes.append(f"{op} is not in the catalogue (amp_fuzz.register_op adds ops of yours)")
    return replace(
        divergence,
        module=place.module,
        module_type=place.kind,
        op=op,
        policy="" if policy == "none" else policy,
        dtypes=place.dtypes,
        stage=place.stage,
        case=case,
        path=path,
        commands=commands,
        notes=tuple(notes),
    )


def _explicit(checked: Checked, case: Any) -> str:
    try:
        with quiet():
            return explicit_form(case, checked.inner.reference())
    except Exception as error:  # it explains; it must not cost the finding
        return f"# no explicit form: {type(error).__name__}: {error}"
