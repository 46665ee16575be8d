"""`amp_fuzz.precision`: what autocast, as documented, does to a callable, and the least remedy."""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from amp_fuzz.backends.reference import (
    Numerics,
    ReferenceRuntime,
    reference_on_cpu,
    reference_runtime,
)
from amp_fuzz.cases.program import Autocast
from amp_fuzz.interfaces.check.arguments import (
    Context,
    check_arguments,
    check_surroundings,
    context_list,
)
from amp_fuzz.interfaces.check.messages import REPEAT
from amp_fuzz.interfaces.check.subject import CheckError, Subject
from amp_fuzz.interfaces.precision.pasting import code_of
from amp_fuzz.interfaces.precision.remedy import Found, least
from amp_fuzz.interfaces.precision.result import (
    Harm,
    PrecisionResult,
    Remedy,
    Statement,
    Value,
    Verdict,
    digits_in,
    digits_of,
)
from amp_fuzz.interfaces.precision.runs import Exempt, Loss, Runs, Seen, is_compared
from amp_fuzz.interfaces.precision.sites import Place, is_library
from amp_fuzz.interfaces.precision.watch import Event, EventKind, error_of
from amp_fuzz.reference import load_table, tabled_devices
from amp_fuzz.reference.shadow.copies import WIDE
from amp_fuzz.reference.state import default_dtype, table_of
from amp_fuzz.reports.printable import plural

__all__ = ["diagnose", "precision"]

Progress: TypeAlias = Callable[[str, float], None]

_SCALES = (2.0**16, 2.0**12, 2.0**8, 2.0**4)
_BREAKING: tuple[EventKind, ...] = ("stuck",)
_HALVES = (torch.bfloat16, torch.float16)
_NONE = Exempt()
_NO_KERNEL = re.compile(r"not implemented for .*(Half|BFloat16)|Unsupported dtype (Half|BFloat16)")


def precision(
    function: Callable[..., Any],
    /,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    autocast: Context = torch.bfloat16,
    device: str | torch.device | None = None,
    backward: bool = True,
    loss: Loss | None = None,
    digits: float | None = None,
    seconds: float = 60.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> PrecisionResult:
    """Say what autocast, as documented, does to a callable, where, and the least to exempt.

    The callable runs once under the reference, with an exact copy (float64) of each tensor beside
    it, and once in float32: without autocast, and without casts to 16 bits that its code writes. A
    value is harmed if autocast leaves it fewer digits than asked, makes it infinite, NaN or 0, and
    float32 does not. Parts of the callable are then exempted from autocast, in runs without exact
    copies, until the least set is found that leaves nothing harmed.

    Args:
        function: a `torch.nn.Module`, or any callable, as `check` takes it. All that a call changes
            is restored.
        inputs: its arguments; tensors are copied. kwargs: its keyword arguments.
        autocast: the dtype of the context around the call, or the keyword arguments of
            `torch.autocast` as a mapping, without its device; None for a callable that opens its
            own.
        device: the device type whose policies hold; None is the device of the tensors. Another
            one than theirs is simulated: ``device="cuda"`` on a CPU casts what CUDA would cast, and
            computes with the kernels of the CPU.
        backward: whether a backward pass follows.
        loss: makes of the result of the callable the scalar that the backward pass starts from.
            None: the scalar outputs that require grad, or, without any, every output, with small
            numbers as gradients.
        digits: how many decimal digits each output and gradient has to keep; None is half of those
            of the autocast dtype (1.2 for bfloat16, 1.7 for float16).
        seconds: how long to search for the remedy; 0 for no search.
        seed: of the random generators, set before each call. Draws are the same in every run.
        progress: is told what is being done, and which share of `seconds` is spent.

    Returns the result; ``str(result)`` is the report.

    Raises:
        CheckError: the callable or an argument cannot be used, it raises without autocast too, or
            the CPU cannot simulate the device: it has no kernel of 16 bits for an op.
    """
    check_arguments(kwargs=kwargs, backward=backward, seed=seed)
    check_surroundings(backward=backward)
    _check(seconds=seconds, digits=digits, loss=loss)
    subject = Subject.of(function, inputs, kwargs, seed)
    (contexts,) = context_list([autocast])
    return diagnose(
        subject,
        device,
        contexts,
        backward=backward,
        loss=loss,
        digits=digits,
        seconds=seconds,
        progress=progress,
    )


def _check(*, seconds: Any, digits: Any, loss: Any) -> None:
    """Raise `CheckError` for an argument of a wrong type or range."""
    if not (isinstance(seconds, int | float) and seconds >= 0):
        raise CheckError(f"seconds={seconds!r}: use a number from 0")
    if digits is not None and not (isinstance(digits, int | float) and 0 < digits < 8):
        raise CheckError(f"digits={digits!r}: use a number of decimal digits between 0 and 8")
    if loss is not None and not callable(loss):
        raise CheckError(f"loss={loss!r}: use a function of what the callable returns")


def diagnose(
    subject: Subject,
    device: str | torch.device | None,
    contexts: tuple[Autocast, ...],
    *,
    backward: bool,
    loss: Loss | None = None,
    digits: float | None = None,
    seconds: float,
    progress: Progress | None = None,
) -> PrecisionResult:
    """Say what autocast does to a subject: see `precision`."""
    start = time.monotonic()
    reference = _reference(subject, device)
    name = reference.runtime.device
    asked = _dtype(contexts, name) if contexts else None
    runs = Runs(subject, reference.runtime, contexts, backward, loss)
    told = progress or (lambda text, share: None)
    return _Diagnosis(runs, asked, digits, seconds, start, told).result(name)


def _reference(subject: Subject, device: str | torch.device | None) -> ReferenceRuntime:
    devices = {t.device.type for t in (subject.inputs() | subject.state()).values()} or {"cpu"}
    if device is None:
        if len(devices) > 1:
            raise CheckError(f"tensors are on {', '.join(sorted(devices))}: name one with device=")
        (device,) = devices
    device = str(device).partition(":")[0]  # autocast is for a type of device
    if device not in tabled_devices():
        raise CheckError(
            f"device={device!r} has no policy table: use one of {', '.join(tabled_devices())}"
        )
    if devices != {device}:
        if devices != {"cpu"}:
            raise CheckError(f"device={device!r} is simulated for tensors of the CPU only")
        return reference_on_cpu(device, load_table(device), Numerics())
    return reference_runtime(device)


def _dtype(contexts: Sequence[Autocast], device: str) -> torch.dtype:
    """Return the first dtype of 16 bits that contexts of a device name, or the device's default.

    Raises `CheckError` if they name others alone.
    """
    named = [c.dtype for c in contexts if c.enabled and c.dtype and c.device in (None, device)]
    names = [getattr(torch, name) for name in named] or [default_dtype(table_of(device))]
    found: torch.dtype | None = next((dtype for dtype in names if dtype in _HALVES), None)
    if found is None:
        raise CheckError(
            f"autocast to {names[0]} loses nothing: use torch.bfloat16 or torch.float16"
        )
    return found


class _Diagnosis:
    """The runs of one call of `precision`, and what they say."""

    def __init__(
        self,
        runs: Runs,
        asked: torch.dtype | None,
        digits: float | None,
        seconds: float,
        start: float,
        progress: Progress,
    ) -> None:
        self.runs = runs
        self.seconds, self.start, self.progress = seconds, start, progress
        self.searching, self.tries = math.inf, 0
        progress("running under autocast beside exact copies", 0.0)
        self.seen, self.exact, self.watch = runs.watched()
        self.refuse_missing_kernel()
        self.low = asked or _dtype(self.taken(self.seen.contexts), runs.runtime.device)
        self.digits = digits or digits_in(self.low) / 2
        progress("running without autocast", 0.0)
        self.plain = runs.plain(written=bool(self.watch.written))
        if self.plain.raised is not None:
            error = self.plain.raised
            raise CheckError(
                f"{runs.subject.name} raises without autocast too: {type(error).__name__}: {error}"
            ) from error
        self.parted = False
        if any(map(self.may_part, self.plain.values)):
            followed, self.exact = self.exact, {}
            self.refuse_another(runs.plain(written=bool(self.watch.written), exact=self.exact))
            self.parted = any(self.parts(name, exact) for name, exact in followed.items())

    def result(self, device: str) -> PrecisionResult:
        values = self.values(self.seen)
        if any(abs(v.digits - self.digits) < _NEAR for v in values) and self.seen.raised is None:
            self.runs.native = True  # its search too
            near = self.runs.tried()
            self.runs.native = near.raised is None  # the CPU may have no kernel of 16 bits
            values = self.values(near) if near.raised is None else values
        events = self.events(values)
        verdict = self.verdict(values, events)
        remedy, skipped = None, self.skipped(values)
        if verdict in ("breaks", "loses digits") and any(v.harm for v in values):
            remedy, why = self.remedy() if self.seconds else (None, ("the search: seconds=0",))
            skipped += why
        raised = self.seen.raised
        return PrecisionResult(
            self.runs.subject.name,
            device,
            str(self.low).removeprefix("torch."),
            verdict,
            self.digits,
            tuple(values),
            self.statements(),
            tuple(events),
            remedy,
            skipped,
            f"{type(raised).__name__}: {raised}" if raised is not None else "",
            time.monotonic() - self.start,
            self.contexts(device),
            self.refused(),
        )

    def refuse_missing_kernel(self) -> None:
        """Raise `CheckError` if the CPU, which simulates a device, has no kernel of 16 bits."""
        subject, device = self.runs.subject, self.runs.runtime.device
        tensors = (subject.inputs() | subject.state()).values()
        simulated = device != "cpu" and not any(t.device.type == device for t in tensors)
        error = self.seen.raised
        if simulated and error is not None and _NO_KERNEL.search(str(error)):
            raise CheckError(
                f"{device} cannot be simulated: the CPU has no kernel for {subject.name}: {error}"
            ) from error

    def refuse_another(self, again: Seen) -> None:
        """Raise `CheckError` if a second run in float32 came to something else than the first.

        Not where float32 has no digits: a sum in another order is another one there.
        """
        for name, value in again.values.items():
            plain, exact = self.plain.values.get(name), self.exact.get(name)
            if plain is None or exact is None or plain.shape != value.shape:
                continue
            found = [digits_of(error_of(one, exact)[0]) for one in (value, plain)]
            if found[0] >= _HALF > found[1]:
                raise CheckError(f"{name} is another in each call, without autocast too. {REPEAT}")

    # -- values -----------------------------------------------------------------------------------

    def values(self, seen: Seen) -> list[Value]:
        """Return what became of each value of a run, beside float32."""
        if seen.raised is not None:
            dtype = str(self.low).removeprefix("torch.")
            return [Value("the call", dtype, 0.0, digits_in(self.low), math.inf, "raises")]
        return [
            self.value(name, value, self.plain.values[name])
            for name, value in seen.values.items()
            if name in self.plain.values and is_compared(value)
        ]

    def may_part(self, name: str) -> bool:
        """Return whether float32 is far from the exact copy of a value under autocast.

        That copy takes the way of the run under autocast: its indices, its masks, and the casts of
        weights that it keeps while the weights change. Or float32 has no digits of the value.
        """
        exact, plain = self.exact.get(name), self.plain.values[name]
        if exact is None:
            return False
        if exact.shape != plain.shape:
            return True
        without, lost = error_of(plain, exact)
        return digits_of(without) < _HALF or lost > 0

    def parts(self, name: str, exact: torch.Tensor) -> bool:
        """Return whether the way of autocast leads further off than float32's own rounding."""
        plain, own = self.plain.values.get(name), self.exact.get(name)
        if plain is None or own is None:
            return False
        if exact.shape != own.shape:
            return True
        off, lost = error_of(exact, own)
        return lost > 0 or off > error_of(plain, own)[0]

    def value(self, name: str, value: torch.Tensor, plain: torch.Tensor) -> Value:
        """Return what became of one value."""
        dtype, of = str(value.dtype).removeprefix("torch."), digits_in(self.low)
        if value.shape != plain.shape:
            return Value(name, dtype, 0.0, of, digits_in(torch.float32), "digits")
        exact = self.exact.get(name)
        if exact is None or exact.shape != value.shape:
            exact = plain.to(WIDE.get(plain.dtype, torch.float64))
        if exact.numel() and not bool(torch.isfinite(exact).any()):
            return Value(name, dtype, 0.0, of, 0.0)
        without, lost = error_of(plain, exact)
        without = math.inf if lost else without
        error, gone = error_of(value, exact)
        harm: Harm = ""
        if bool((torch.isfinite(plain) & ~torch.isfinite(value)).any()):
            harm = "not finite"
        elif digits_of(without) < _HALF or not exact.any():
            harm = ""  # float32 has no digits either, or there are none: it is exactly 0
        elif value.numel() and not value.any() and plain.any():
            harm = "vanishes"
        elif digits_of(error) < self.digits:
            harm = "digits"
        digits = 0.0 if gone else digits_of(error)
        return Value(name, dtype, digits, of, digits_of(without), harm)

    def verdict(self, values: Sequence[Value], events: Sequence[Event]) -> Verdict:
        """Return the verdict."""
        if any(v.harm not in ("", "digits") for v in values):
            return "breaks"
        if any(e.kind in _BREAKING for e in events):
            return "breaks"
        if any(v.harm for v in values):
            return "loses digits"
        return "harmless" if self.watch.casts else "casts nothing"

    def events(self, values: Sequence[Value]) -> list[Event]:
        """Return the events that matter: all where a value is harmed, else what stays behind."""
        if not any(v.harm for v in values):
            return list(self.watch.told(*_BREAKING))
        return [e for e in self.watch.told() if e.kind != "choice" or self.parted]

    def taken(self, contexts: Sequence[Autocast]) -> list[Autocast]:
        """Return the contexts that are on: the device may turn one off because of its dtype."""
        device = self.runs.runtime.device
        names = table_of(device).supported_dtypes
        own = (None, device)
        return [
            c for c in contexts if c.enabled and (c.device not in own or c.dtype in (None, *names))
        ]

    def contexts(self, device: str) -> tuple[str, ...]:
        """Return the device types whose autocast the call turns on."""
        found = self.taken((*self.runs.contexts, *self.seen.contexts))
        return tuple(sorted({c.device or device for c in found}))

    def refused(self) -> tuple[str, ...]:
        """Return the dtypes of contexts that the device turns off."""
        enabled = [c for c in self.seen.contexts if c.enabled]
        taken = self.taken(enabled)
        return tuple(sorted({c.dtype for c in enabled if c.dtype and c not in taken}))

    def statements(self) -> tuple[Statement, ...]:
        """Return the statements, those that lost most first."""
        found = [
            Statement(
                place,
                backward,
                tuple(tally.ops),
                digits_of(tally.given),
                digits_of(tally.made),
                digits_of(tally.result),
                tally.overflowed,
                tally.flushed,
                tally.of,
            )
            for (place, backward), tally in self.watch.tallies.items()
            if tally.of
        ]
        return tuple(sorted(found, key=lambda s: (s.result, s.made)))

    def skipped(self, values: Sequence[Value]) -> tuple[str, ...]:
        """Return what could not be followed, or compared."""
        found = []
        if refused := sorted(self.watch.twin.refused):
            found += [f"no exact copy of what {', '.join(refused)} made: counted as exact"]
        if not values:
            found += ["nothing to compare: the call gives no floating output and no gradient"]
        return tuple(found)

    # -- remedies ---------------------------------------------------------------------------------

    def good(self, exempt: Exempt = _NONE, **other: Any) -> bool:
        """Return whether a run harms nothing; see `Runs.tried`."""
        spent = max(time.monotonic() - self.searching, 0.0) / max(self.seconds, 1e-9)
        self.progress(f"looking for a remedy: {plural(self.tries, 'run')}", min(spent, 1.0))
        self.tries += 1
        return not any(v.harm for v in self.values(self.runs.tried(exempt, **other)))

    def natively(self, exempt: Exempt = _NONE, **other: Any) -> bool:
        """Return whether a run with torch's own products of 16 bits harms nothing either.

        They may add in another order. Where the CPU has none, nothing speaks against it.
        """
        if self.runs.native:
            return True
        self.runs.native = True
        seen = self.runs.tried(exempt, **other)
        self.runs.native = False
        return seen.raised is not None or not any(v.harm for v in self.values(seen))

    def remedy(self) -> tuple[Remedy | None, tuple[str, ...]]:
        """Return the least that is enough, and what was left out of the search."""
        self.searching = time.monotonic()
        other = torch.float16 if self.low is torch.bfloat16 else torch.bfloat16
        dtype = str(other).removeprefix("torch.") if self._other(other) else ""
        scale = 0.0
        if self.low is torch.float16 and self.runs.backward:
            scales = (s for s in _SCALES if self.good(scale=s) and self.natively(scale=s))
            scale = next(scales, 0.0)
        deadline = time.monotonic() + self.seconds
        units = self.units()
        whole = sum(n for (_, low), n in self.watch.products.items() if low) or 1

        def cost(unit: Place) -> float:
            return self.products(unit) / whole

        found, parts = self.searched(units, cost, deadline)
        if found is not None and not self.natively(_exempt(parts)):
            self.runs.native = True
            found, parts = self.searched(units, cost, deadline)
        if found is None:
            text = "no set of its parts is enough in float32"
            if where := ", ".join(place.text for place in self.watch.written):
                text += f": the code itself asks for 16 bits at {where}"
            alone = Remedy(dtype=dtype, scale=scale)
            return (alone, ()) if dtype or scale else (None, (text,))
        lines = tuple(p for p in parts if p.file)
        modules = tuple(p.module for p in parts if not p.file)
        share = sum(map(self.products, parts)) / whole
        device, roots = self.runs.runtime.device, self.runs.subject.modules
        code = code_of(lines, modules, device, self.runs.names, roots)
        return Remedy(modules, lines, found.proof, found.tried, share, dtype, scale, code), ()

    def searched(
        self, units: Sequence[Place], cost: Callable[[Place], float], deadline: float
    ) -> tuple[Found[Place] | None, list[Place]]:
        """Return the least set of units that is enough, and what is exempted of these."""
        found = least(units, lambda some: self.good(_exempt(some)), cost, deadline)
        return found, [] if found is None else self.refined(found.parts, deadline)

    def products(self, unit: Place) -> int:
        """Return the operations of the products in 16 bits of a statement, or of a submodule."""
        found = self.watch.products.items()
        return sum(
            n
            for (p, low), n in found
            if low and (p == unit if unit.file else p.module == unit.module)
        )

    def _other(self, dtype: torch.dtype) -> bool:
        names = table_of(self.runs.runtime.device).supported_dtypes
        supported = str(dtype).removeprefix("torch.") in names and bool(self.runs.contexts)
        return supported and self.good(dtype=dtype) and self.natively(dtype=dtype)

    def units(self) -> list[Place]:
        """Return what can be exempted, the most suspicious first: modules, or lines without one."""
        modules = set(self.runs.subject.paths().values())
        events = {e.place for e in self.watch.told() if e.kind not in ("lowered", "choice")}
        worst: dict[Place, tuple[bool, float]] = defaultdict(lambda: (False, 0.0))
        for (place, _), tally in self.watch.tallies.items():
            if not tally.low:
                continue
            unit = Place(place.module) if place.module in modules else place
            if unit.file or unit.module in modules:
                before = worst[unit]
                worst[unit] = before[0] or place in events, max(before[1], tally.made)
        return sorted(worst, key=lambda unit: worst[unit], reverse=True)

    def refined(self, parts: frozenset[Place], deadline: float) -> list[Place]:
        """Return the same parts, with lines in place of modules where fewer lines are enough."""
        found = sorted(parts, key=lambda p: p.text)
        for unit in list(found):
            lines = self.lines(unit)
            if unit.file or not lines:
                continue
            rest = [p for p in found if p is not unit]

            def enough(some: frozenset[Place], rest: list[Place] = rest) -> bool:
                return self.good(_exempt([*rest, *some]))

            fewer = least(lines, enough, lambda line: 0.0, deadline)
            if fewer is not None and len(fewer.parts) < max(len(lines), 2):
                found = [*rest, *sorted(fewer.parts, key=lambda p: p.line)]
        return found

    def lines(self, unit: Place) -> list[Place]:
        """Return the statements of a module of the user's own, the most suspicious first."""
        if not self.is_own(unit):
            return []
        events = {e.place for e in self.watch.told()}
        tallies = self.watch.tallies.items()
        places = {p: t.made for (p, back), t in tallies if p.module == unit.module and not back}
        own = [p for p in places if p.is_own]
        return sorted(own, key=lambda p: (p in events, places[p]), reverse=True)

    def is_own(self, unit: Place) -> bool:
        """Return whether the code of a submodule is the user's; a torch module's line is not."""
        modules = {path: module for module, path in self.runs.subject.paths().items()}
        forward = getattr(type(modules.get(unit.module)), "forward", None)
        return forward is None or not is_library(forward.__code__.co_filename)


_HALF = digits_in(torch.float32) / 2
# So near to what is asked, the order in which a kernel adds may decide.
_NEAR = 0.1


def _exempt(parts: Any) -> Exempt:
    parts = list(parts)
    return Exempt(
        frozenset(p.module for p in parts if not p.file), frozenset(p for p in parts if p.file)
    )
