"""What `amp_fuzz.precision` returns, as data and as text."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

import torch

from amp_fuzz.interfaces.precision import in_float32
from amp_fuzz.interfaces.precision.remedy import Proof
from amp_fuzz.interfaces.precision.sites import Place, is_library
from amp_fuzz.interfaces.precision.watch import Event

__all__ = ["Harm", "PrecisionLost", "PrecisionResult", "Remedy", "Statement", "Value", "Verdict"]

Verdict: TypeAlias = Literal["harmless", "loses digits", "breaks", "casts nothing"]
Harm: TypeAlias = Literal["", "digits", "not finite", "vanishes", "raises"]


class PrecisionLost(AssertionError):
    """Autocast costs more than the test allows."""


@dataclass(frozen=True, slots=True)
class Value:
    """An output, a gradient or a buffer: how many decimal digits of it are right.

    digits: under autocast. of: those that the autocast dtype has. without: in float32 without
    autocast. All are ``-log10`` of the relative error in the Euclidean norm. harm: what autocast
    does to it, or "". dtype: that of the value under autocast.
    """

    name: str
    dtype: str
    digits: float
    of: float
    without: float
    harm: Harm = ""


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement of the code, forward or backward: what its ops lost at most.

    given, made, result: the digits that are right in what it was given, in what it adds itself, and
    in its results; `math.inf` for an error of 0. overflowed, flushed: elements that became infinite
    or NaN, and 0, though they exactly are neither; of: of how many. share: of the products (by
    floating-point operations) of the whole run that are of its module and in 16 bits.
    """

    place: Place
    backward: bool
    ops: tuple[str, ...]
    given: float
    made: float
    result: float
    overflowed: int
    flushed: int
    of: int


@dataclass(frozen=True, slots=True)
class Remedy:
    """What is enough for harmless: the least set of submodules or lines to run in float32.

    proof: see `Proof`. tried: how many sets. share: of the products in 16 bits that leave them, by
    floating-point operations. dtype: another autocast dtype that is enough alone, or "". scale: of
    the loss, that is enough alone, or 0.
    """

    modules: tuple[str, ...] = ()
    lines: tuple[Place, ...] = ()
    proof: Proof = "least"
    tried: int = 0
    share: float = 0.0
    dtype: str = ""
    scale: float = 0.0


@dataclass(frozen=True, slots=True)
class PrecisionResult:
    """What autocast, as documented, does to a callable.

    verdict: ``harmless``; ``loses digits``; ``breaks`` (NaN, infinity, a value or gradient that
    vanishes, an update that does not move its target, an error); or ``casts nothing``. values: of
    the call. statements: where digits were lost, the worst first. events: what statements did:
    overflow, values that vanish or become equal, constants that are 0 in 16 bits, operands that
    were float32 by hand and were cast again. remedy: None if nothing is to mend, or if nothing was
    found. skipped: what was not done, and why.
    """

    name: str
    device: str
    dtype: str
    verdict: Verdict
    digits: float
    values: tuple[Value, ...]
    statements: tuple[Statement, ...] = ()
    events: tuple[Event, ...] = ()
    remedy: Remedy | None = None
    skipped: tuple[str, ...] = ()
    raised: str = ""
    seconds: float = 0.0
    prefixes: tuple[str, ...] = field(default=("",))

    @property
    def ok(self) -> bool:
        """Whether autocast does no harm."""
        return self.verdict == "harmless"

    def raise_if_failed(self) -> None:
        """Raise `PrecisionLost` with the whole text unless it is harmless."""
        __tracebackhide__ = True
        if not self.ok:
            raise PrecisionLost(str(self))

    @property
    def harmed(self) -> tuple[Value, ...]:
        """The values that autocast harms, the worst first."""
        return tuple(sorted((v for v in self.values if v.harm), key=lambda v: v.digits))

    @property
    def culprits(self) -> tuple[Place, ...]:
        """The statements to look at first: those of the remedy, then those of the events."""
        found: dict[Place, None] = {}
        if self.remedy is not None:
            found |= dict.fromkeys(self.remedy.lines)
            for module in self.remedy.modules:
                places = [s.place for s in self.statements if s.place.module == module]
                found |= dict.fromkeys(places or [Place(module)])
        found |= dict.fromkeys(e.place for e in self.events if e.kind != "lowered")
        return tuple(found)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data; infinities as strings."""
        return json.loads(json.dumps(_plain(asdict(self))))  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def digits_of(error: float) -> float:
    """Return how many decimal digits are right."""
    if error == 0:
        return math.inf
    return max(0.0, -math.log10(error)) if math.isfinite(error) else 0.0


def digits_in(dtype: torch.dtype) -> float:
    """Return how many decimal digits a dtype has: ``-log10`` of its unit roundoff."""
    return -math.log10(torch.finfo(dtype).eps / 2)


def _plain(tree: Any) -> Any:
    if isinstance(tree, float) and not math.isfinite(tree):
        return repr(tree)
    if isinstance(tree, Mapping):
        return {key: _plain(value) for key, value in tree.items()}
    if isinstance(tree, Sequence) and not isinstance(tree, str):
        return [_plain(value) for value in tree]
    return tree


# -- as text --------------------------------------------------------------------------------------

_MOST = 6
_HARMS = {
    "not finite": "is not finite",
    "vanishes": "is 0 everywhere",
    "raises": "raises",
}


def _lines(result: PrecisionResult) -> list[str]:
    head = f"{result.name} under {result.dtype} autocast on {result.device}: {result.verdict}"
    lines = [head, *_values(result), *_places(result), *_remedies(result)]
    return [*lines, *(f"not done: {text}" for text in result.skipped)]


def _values(result: PrecisionResult) -> list[str]:
    if result.verdict == "casts nothing":
        return [
            f"  no tensor of the call is on {result.device}, so autocast for it casts nothing: "
            "name the device where the tensors are"
        ]
    if result.raised:
        return [f"  it raises under autocast only: {result.raised}"]
    shown = result.harmed or _worst(result.values)
    lines = [f"  {_value(v)}" for v in shown[:_MOST]]
    more = len(shown) - _MOST
    return [*lines, f"  and {more} more"] if more > 0 else lines


def _worst(values: Sequence[Value]) -> list[Value]:
    """Return the worst output and the worst gradient."""
    outputs = [v for v in values if not v.name.endswith(".grad")]
    gradients = [v for v in values if v.name.endswith(".grad")]
    return [min(some, key=lambda v: v.digits) for some in (outputs, gradients) if some]


def _value(value: Value) -> str:
    without = f"{min(value.without, value_digits('float32')):.1f} without autocast"
    if value.harm in _HARMS:
        return f"{value.name} {_HARMS[value.harm]} ({without})"
    return (
        f"{value.name} has {min(value.digits, value.of):.1f} of {value.of:.1f} digits ({without})"
    )


def value_digits(dtype: str) -> float:
    """Return how many decimal digits a dtype has, by its name."""
    return digits_in(getattr(torch, dtype))


def _places(result: PrecisionResult) -> list[str]:
    if result.ok:
        return []
    lines = []
    culprits = set(result.culprits[:_MOST])
    for event in result.events:
        if event.kind == "lowered" and event.place not in culprits:
            continue
        where = f"{event.place.text}{', backward' if event.backward else ''}"
        lines.append(f"  {where}: {event.text}{_times(event.count)}")
    return ["What happens", *lines[:_MOST]] if lines else []


def _times(count: int) -> str:
    return "" if count == 1 else f" ({count} times)"


def _remedies(result: PrecisionResult) -> list[str]:
    remedy = result.remedy
    if remedy is None:
        return []
    lines = []
    if remedy.scale:
        lines.append(f"Scale the loss by {remedy.scale:g} (torch.amp.GradScaler): that is enough.")
    if remedy.dtype:
        lines.append(f"Autocast to {remedy.dtype}: that is enough.")
    if not (remedy.modules or remedy.lines):
        return lines
    proofs = {
        "least": f"no smaller set is enough ({remedy.tried} tried)",
        "minimal": f"none of it can be left out ({remedy.tried} sets tried)",
        "unproven": f"the best of {remedy.tried} sets when the time ended",
    }
    start = "Or run" if lines else "Run"
    names = [*(p.text for p in remedy.lines), *(m or "the module itself" for m in remedy.modules)]
    lines.append(
        f"{start} in float32: {', '.join(names)}; {proofs[remedy.proof]}; "
        f"{remedy.share:.1%} of the products in 16 bits"
    )
    return [*lines, "", *code_of(result)]


def code_of(result: PrecisionResult) -> list[str]:
    """Return the code that applies a remedy, as lines to paste."""
    remedy = result.remedy
    lines: list[str] = []
    if remedy is None:
        return lines
    for place in remedy.lines:
        lines += [
            f"    # {place.short}, with its 16-bit operands as x.float()",
            f'    with torch.autocast("{result.device}", enabled=False):',
            f"        {place.source}",
        ]
    if remedy.modules:
        names = ", ".join(map(repr, remedy.modules))
        text = inspect.getsource(in_float32)
        body = text[text.index("def run_in_float32") :].replace(
            "  # type: ignore[no-untyped-def]", ""
        )
        lines += [f"    {line}".rstrip() for line in body.strip().splitlines()]
        lines += ["", f'    run_in_float32(model, {{{names}}}, "{result.device}")']
    return lines


def is_own(place: Place) -> bool:
    """Return whether a statement is in a file of the user's own, which can be changed."""
    return bool(place.file) and not is_library(place.file)
