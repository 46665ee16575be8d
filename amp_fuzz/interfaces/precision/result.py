"""What `amp_fuzz.precision` returns, as data and as text."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from amp_fuzz.interfaces.precision.pasting import grouped
from amp_fuzz.interfaces.precision.remedy import Proof
from amp_fuzz.interfaces.precision.sites import Place
from amp_fuzz.interfaces.precision.watch import Event
from amp_fuzz.records.outputs import write_whole
from amp_fuzz.reports.printable import clean, plural

__all__ = ["Harm", "PrecisionLost", "PrecisionResult", "Remedy", "Statement", "Value", "Verdict"]

Verdict: TypeAlias = Literal["harmless", "loses digits", "breaks", "casts nothing"]
Harm: TypeAlias = Literal["", "digits", "not finite", "vanishes", "raises"]


class PrecisionLost(AssertionError):
    """Autocast is not harmless. The message is the text of `result`."""

    def __init__(self, result: PrecisionResult) -> None:
        super().__init__(f"\n{result}")
        self.result = result


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
    or NaN, and 0, though they exactly are neither; of: of how many.
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
    code: str = ""


@dataclass(frozen=True, slots=True)
class PrecisionResult:
    """What autocast, as documented, does to a callable.

    verdict: ``harmless``; ``loses digits``; ``breaks`` (NaN, infinity, a value or gradient that
    vanishes, an update that does not move its target, an error); or ``casts nothing``. values: of
    the call. statements: where digits were lost, the worst first. events: what statements did:
    overflow, values that vanish or become equal, constants that are 0 in 16 bits, operands that
    were float32 by hand and were cast again. remedy: None if nothing is to mend, or if nothing was
    found. skipped: what was not done, and why. contexts: the device types whose autocast the call
    turns on. refused: dtypes of contexts that the device turns off with a warning.
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
    contexts: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether autocast does no harm."""
        return self.verdict == "harmless"

    def __bool__(self) -> bool:
        return self.ok

    def raise_if_failed(self) -> None:
        """Raise `PrecisionLost` with the whole text unless it is harmless."""
        __tracebackhide__ = True
        if not self.ok:
            raise PrecisionLost(self)

    @property
    def harmed(self) -> tuple[Value, ...]:
        """The values that autocast harms, the worst first."""
        return tuple(sorted((v for v in self.values if v.harm), key=lambda v: v.digits))

    @property
    def culprits(self) -> tuple[Place, ...]:
        """The statements to look at first.

        Those of the remedy; then that of the first event; then of the remedy's submodules those
        with an event, and the one where most digits are lost; then those of the other events, and
        where values fall below what is asked.
        """
        remedy = self.remedy or Remedy()
        told = [e.place for e in self.events if e.kind != "lowered" and e.place.file]
        own = [s for s in self.statements if s.place.file]
        lost = sorted(own, key=_drop)
        found = dict.fromkeys((*remedy.lines, *told[:1]))
        found |= dict.fromkeys(p for p in told if p.module in remedy.modules)
        for module in remedy.modules:
            places = [s.place for s in lost if s.place.module == module]
            found |= dict.fromkeys([*places, Place(module)][:1])
        found |= dict.fromkeys(told)
        if self.harmed:
            found |= dict.fromkeys(s.place for s in lost if s.result < self.digits <= s.given)
        return tuple(found)

    @property
    def advice(self) -> str:
        """The least remedy in one sentence, or "" if there is none."""
        remedy = self.remedy
        if remedy is None:
            return ""
        if remedy.scale:
            return f"Scale the loss by {remedy.scale:g} (torch.amp.GradScaler)."
        names = [*(p.text for p in remedy.lines), *(m or self.name for m in remedy.modules)]
        if names:
            return f"Run {', '.join(names)} in float32 with autocast off."
        return f"Autocast to {remedy.dtype}." if remedy.dtype else ""

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data; infinities as strings."""
        return json.loads(json.dumps(_plain(asdict(self))))  # type: ignore[no-any-return]

    @property
    def context(self) -> str:
        """The autocast in words, as ``bfloat16 autocast on cuda``."""
        return f"{self.dtype} autocast on {self.device}"

    def write_html(self, path: Path | str) -> None:
        """Write everything as one HTML page that needs no network.

        Raises `amp_fuzz.records.outputs.StoreError` if the file cannot be written.
        """
        from amp_fuzz.interfaces.precision.page import page

        write_whole(Path(path), page(self).encode())

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

_WIDTH, _MOST = 96, 4
_LABEL = "  {:<10}"


def _lines(result: PrecisionResult) -> Iterator[str]:
    verdict = result.verdict if result.ok else result.verdict.upper()
    yield f"amp_fuzz.precision of {result.name}, {result.context}: {verdict}"
    stuck = result.verdict == "breaks" and not (result.harmed or result.raised)
    parts = (_happened, _kept) if stuck else (_kept, _happened)
    for part in (*parts, _remedies):
        yield from part(result)
    others = [device for device in result.contexts if device != result.device]
    if others and result.verdict != "casts nothing":
        where = f"the tensors of the call are on {result.device}, where it changes nothing"
        yield from _labelled("note", [f"a context is for {' and '.join(others)}; {where}"])
    for text in result.skipped:
        yield from _labelled("skipped", [text])
    if result.remedy is not None and result.remedy.code:
        yield from ["", *textwrap.indent(result.remedy.code, "    ").splitlines()]


def _labelled(label: str, texts: Sequence[str]) -> Iterator[str]:
    """Yield texts with a label before the first, wrapped."""
    for text in texts:
        start = _LABEL.format(label)
        yield from textwrap.wrap(
            clean(text),
            _WIDTH,
            initial_indent=start,
            subsequent_indent=" " * len(start),
            break_long_words=False,
            break_on_hyphens=False,
        )
        label = ""


def _few(texts: Sequence[str]) -> list[str]:
    more = len(texts) - _MOST
    return [*texts[:_MOST], *([f"and {more:,} more"] if more > 0 else [])]


def _kept(result: PrecisionResult) -> Iterator[str]:
    if result.verdict == "casts nothing":
        yield from _labelled("because", [_idle(result)])
        if result.device not in result.contexts:
            text = f'Open torch.autocast("{result.device}") around the call.'
            text = "Give it torch.bfloat16 or torch.float16." if result.refused else text
            yield from _labelled("to do", [text])
    elif result.raised:
        yield from _labelled("raises", [f"{result.raised}; it runs without autocast"])
    elif harmed := result.harmed:
        yield from _labelled("harmed", _few([said_of(v, result.digits) for v in harmed]))
    else:
        worst = [said_of(v, result.digits) for v in _worst(result.values)]
        yield from _labelled("keeps", worst)


def _idle(result: PrecisionResult) -> str:
    """Return why autocast casts nothing."""
    where = f"the tensors of the call are on {result.device}"
    if result.refused and result.device not in result.contexts:
        names = " and ".join(result.refused)
        return f"{where}, where a context of {names} warns and is off"
    if not result.contexts:
        return f"{where}, and the call opens no autocast"
    if result.device not in result.contexts:
        return f"{where}, and autocast is on for {' and '.join(result.contexts)} only"
    return f"no op of the call gets an operand that autocast on {result.device} would cast"


def _worst(values: Sequence[Value]) -> list[Value]:
    """Return the worst output and the worst gradient."""
    outputs = [v for v in values if not v.name.endswith(".grad")]
    gradients = [v for v in values if v.name.endswith(".grad")]
    return [min(some, key=lambda v: v.digits) for some in (outputs, gradients) if some]


_HARMS = {"not finite": "is not finite", "vanishes": "is 0 everywhere", "raises": "raises"}


def said_of(value: Value, asked: float) -> str:
    """Return what became of a value, in words."""
    without = f"float32 keeps {min(value.without, digits_in(torch.float32)):.1f}"
    if value.harm in _HARMS:
        return f"{value.name} {_HARMS[value.harm]}; {without} digits"
    keeps = f"{value.name} keeps {min(value.digits, value.of):.1f} of {value.of:.1f} digits"
    return f"{keeps}; {asked:.1f} are asked, {without}" if value.harm else f"{keeps}; {without}"


def _happened(result: PrecisionResult) -> Iterator[str]:
    yield from _labelled("because", _few(reasons(result)))
    if any(e.kind == "stuck" for e in result.events):
        text = "Keep what is updated in float32, and cast a copy of it where 16 bits are needed."
        yield from _labelled("to do", [text])


def reasons(result: PrecisionResult) -> list[str]:
    """Return what happened, in order; a statement without an event says what it lost."""
    if result.ok:
        return []
    culprits = set(result.culprits)
    told = [e for e in result.events if e.kind != "lowered" or e.place in culprits]
    texts = [f"{_where(e)}: {e.text}{_times(e.count)}" for e in told]
    places = {e.place for e in told}
    for place in result.culprits:
        if place not in places:
            own = [s for s in result.statements if s.place == place and _loses(s, result)]
            texts += [_loss(min(own, key=_drop))] if own else []
    return texts


def _loses(s: Statement, result: PrecisionResult) -> bool:
    return s.result < min(s.given, result.digits)


def _drop(s: Statement) -> float:
    return s.result - min(s.given, 8.0)


def _loss(s: Statement) -> str:
    given = "exact operands" if math.isinf(s.given) else f"operands with {s.given:.1f}"
    ops = f"{', '.join(s.ops[:3])} leave{'s' if len(s.ops) == 1 else ''}"
    return f"{_where(s)}: {ops} {s.result:.1f} digits of {given}"


def _where(found: Statement | Event) -> str:
    return f"{found.place.text}{', backward' if found.backward else ''}"


def _times(count: int) -> str:
    return "" if count == 1 else f" ({count:,} times)"


def _remedies(result: PrecisionResult) -> Iterator[str]:
    yield from _labelled("remedy", remedies(result))


def remedies(result: PrecisionResult) -> list[str]:
    """Return each remedy that is enough alone, in words."""
    remedy, texts = result.remedy, []
    if remedy is None:
        return []
    if remedy.scale:
        texts.append(f"Scale the loss by {remedy.scale:g} (torch.amp.GradScaler).")
    if remedy.dtype:
        texts.append(f"Autocast to {remedy.dtype}.")
    names = _few([*grouped(remedy.lines), *(m or result.name for m in remedy.modules)])
    if names:
        proof = {
            "least": f"no smaller set is enough ({plural(remedy.tried, 'set')} tried)",
            "minimal": f"none of it can be left out ({plural(remedy.tried, 'set')} tried)",
            "unproven": f"the best of {plural(remedy.tried, 'set')} when the time ended",
        }[remedy.proof]
        texts.append(
            f"Run {', '.join(names)} in float32, as below: {proof}; {100 * remedy.share:.1f} % "
            "of the 16-bit products."
        )
    return [
        f"{'Or ' if i else ''}{t[0].lower() if i else t[0]}{t[1:]}" for i, t in enumerate(texts)
    ]
