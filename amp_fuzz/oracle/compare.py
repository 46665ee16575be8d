"""Compare a backend with the reference: exactly, except for explained rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from amp_fuzz.backends.harness import Observation, Raised, bits

__all__ = ["Divergence", "Judgement", "Kind", "compare", "describe", "differ"]

Kind: TypeAlias = Literal[
    "raise",
    "dtype",
    "shape",
    "device",
    "bitwise",
    "nonfinite",
    "grad-missing",
    "grad-dtype",
    "grad-shape",
    "grad-device",
    "grad-bitwise",
    "grad-nonfinite",
    "value",
    "grad-value",
    "precision",
    "range",
    "state",
    "nondeterminism",
    "relation",
    "crash",
    "timeout",
]


Judgement: TypeAlias = "Callable[[str, torch.Tensor, torch.Tensor], Divergence | None]"


@dataclass(frozen=True, slots=True)
class Divergence:
    """A difference between expected and observed that no oracle allows.

    kind: what differs. where: the label of the value (``v3``, ``w1.grad``), the source line that
    raised, or the relation's name. expected, observed: both sides in short.
    """

    kind: Kind
    where: str
    expected: str
    observed: str


def compare(
    expected: Observation,
    observed: Observation,
    *,
    values: bool = True,
    rounding: Judgement | None = None,
    varied: Judgement | None = None,
    skip: Callable[[str], bool] = lambda label: False,
    devices: bool = False,
) -> Divergence | None:
    """Return the first divergence in the order of execution, or None.

    Later ones are mostly consequences of the first. `values` False compares only dtypes, shapes and
    errors (fake devices). A case that raises the same error at the same line on both sides
    agrees; the text of the message may differ.

    rounding: for a backend with kernels of its own: decides on values that differ in a bit. Such a
    backend may also raise a different error, or raise elsewhere, since compilers wrap errors. And
    a missing gradient may be zeros, as in AOTAutograd.
    varied: for a backend with kernels that vary from call to call: decides on values that differ in
    a bit, instead of `rounding`. skip: the labels to leave out. devices: whether both sides work on
    the same devices, so that each value must be on the same one.
    """
    for label, want in expected.values.items():
        if label not in observed.values:
            break  # the backend raised before this label
        if skip(label):
            continue
        got = observed.values[label]
        found = _type(label, want, got, rounding=rounding)
        if found is None and devices:
            found = _place(label, expected.devices.get(label), observed.devices.get(label))
        if found is None and values and want is not None and got is not None:
            found = None if same(want, got) else (varied or rounding or differ)(label, want, got)
        if found is not None:
            return found
    both = expected.raised is not None and observed.raised is not None
    alike = _signature(expected.raised) == _signature(observed.raised)
    if not (alike or (both and rounding is not None)):
        return Divergence(
            "raise",
            (observed.raised or expected.raised or _NOTHING).text,
            _show_raised(expected.raised),
            _show_raised(observed.raised),
        )
    if observed.leaked is not None and expected.leaked in (None, _GRAD_OFF):
        left = [part for part in observed.leaked.split("; ") if part != expected.leaked]
        where = "after the case" if observed.raised is None else "after an error"
        if left:
            return Divergence("state", where, "state as before", "; ".join(left))
    return None


# State that the reference may also leave changed. It has other names for autocast's state.
_GRAD_OFF = "grad mode: True became False"


_NOTHING = Raised("", "", 0, "")


def _signature(raised: Raised | None) -> tuple[str, int] | None:
    return None if raised is None else (raised.kind, raised.line)


def _show_raised(raised: Raised | None) -> str:
    if raised is None:
        return "no error"
    lines = [line.strip() for line in raised.message.splitlines() if line.strip()]
    first = lines[0] if lines else ""
    if (
        raised.kind in _WRAPPERS and len(lines) > 1
    ):  # compilers quote the wrapped error further down
        first = f"{first} {lines[1]}"
    if first == _INTERPRETER:  # its traceback comes in between
        first = lines[-1].removeprefix(f"{raised.kind}: ")
    return f"{raised.kind}: {first[:300]}"


_WRAPPERS = ("BackendCompilerFailed", "InductorError", "TorchRuntimeError", "Unsupported")
_INTERPRETER = "The following operation failed in the TorchScript interpreter."


def _zeros(gradient: torch.Tensor | None) -> bool:
    """Return whether a gradient is all zeros, as AOTAutograd's missing gradients are."""
    return gradient is not None and not bool(gradient.any())


def _type(
    label: str,
    want: torch.Tensor | None,
    got: torch.Tensor | None,
    *,
    rounding: Judgement | None,
) -> Divergence | None:
    """Return how two values differ in whether there is one, in dtype or in shape, or None."""
    grad = label.endswith(".grad")
    if want is None or got is None:
        if want is got or (grad and want is None and rounding is not None and _zeros(got)):
            return None
        kind: Kind = "grad-missing" if grad else "shape"
        return Divergence(kind, label, describe(want), describe(got))
    if want.dtype != got.dtype:
        return Divergence("grad-dtype" if grad else "dtype", label, _dtype(want), _dtype(got))
    if want.shape != got.shape:
        shapes = str(list(want.shape)), str(list(got.shape))
        return Divergence("grad-shape" if grad else "shape", label, *shapes)
    return None


def _place(label: str, want: str | None, got: str | None) -> Divergence | None:
    """Return the divergence of two values that are on devices of two types, or None."""
    if want is None or got is None or want == got:
        return None
    return Divergence("grad-device" if label.endswith(".grad") else "device", label, want, got)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype and shape are equal bit for bit.

    -0 differs from 0. NaN equals NaN with any payload, which hardware and libraries choose.
    """
    x, y = bits(a), bits(b)
    if torch.equal(x, y):
        return True
    a, b = real(a), real(b)
    if not a.is_floating_point():
        return False
    differs = x != y
    return bool(torch.isnan(a[differs]).all() and torch.isnan(b[differs]).all())


def real(t: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as pairs, any other unchanged."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def nonfinite_differs(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether NaN or infinities are at other places, or have another sign."""
    a, b = real(a), real(b)
    if not a.is_floating_point():
        return False
    if not torch.equal(torch.isnan(a), torch.isnan(b)):
        return True
    infinite = torch.isinf(a) | torch.isinf(b)
    return not torch.equal(a[infinite], b[infinite])


def differ(label: str, want: torch.Tensor, got: torch.Tensor) -> Divergence:
    """Return the divergence of two values that differ in a bit."""
    grad = label.endswith(".grad")
    if nonfinite_differs(want, got):
        kind: Kind = "grad-nonfinite" if grad else "nonfinite"
    else:
        kind = "grad-bitwise" if grad else "bitwise"
    return Divergence(kind, label, *_first_difference(want, got))


def _first_difference(want: torch.Tensor, got: torch.Tensor) -> tuple[str, str]:
    a, b = real(want), real(got)
    differs = bits(want) != bits(got)
    if a.is_floating_point():
        differs &= ~(torch.isnan(a) & torch.isnan(b))
    n = int(differs.sum())
    index = tuple(int(i) for i in torch.nonzero(differs)[0]) if a.dim() else ()
    x, y = a[index].item(), b[index].item()
    place = f" at {list(index)}, {n} of {a.numel()} differ, {_dtype(want)}"
    return f"{x!r}{place}", f"{y!r}{place}"


def _dtype(t: torch.Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def describe(t: torch.Tensor | None) -> str:
    """Return the type of a value in short: ``bfloat16[2, 3]``."""
    return "None" if t is None else f"{_dtype(t)}{list(t.shape)}"
