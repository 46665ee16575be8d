"""The library of faults: ways to corrupt torch's autocast, each a context manager over real torch.

`POLICY` gives every op of the device's table every other policy that its schema allows. `CUT` lets
no gradient through to one tensor argument of one op that has a 16-bit policy. `SEMANTIC` gets one
rule of autocast wrong each: casts and the weight cache (`casts`), contexts, threads,
checkpoints and backward passes (`contexts`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from tests.faults import casts, contexts
from tests.faults.fault import Fault
from tests.faults.wrapper import (
    DEVICE,
    POLICIES,
    Kernel,
    Value,
    Wrapper,
    installed,
    overload_of,
    twin_of,
)

__all__ = ["CONTROLS", "CUT", "EQUIVALENT", "FAULTS", "POLICY", "SEMANTIC", "Fault"]

_ALWAYS = ("lower_precision_fp", "fp32", "promote", "none", "banned")


def _sensible(name: str) -> tuple[str, ...]:
    """Return the policies that an op could have been given, its own among them.

    ``fp32_set_opt_dtype`` needs an optional ``dtype`` to set, ``fp32_append_dtype`` a twin overload
    that takes the same arguments and then a dtype: no op of the CPU table has one.
    """
    own = overload_of(name)._schema.arguments  # type: ignore[union-attr]
    sets = any(a.name == "dtype" and isinstance(a.type, torch.OptionalType) for a in own)
    appends = twin_of(name) is not None
    more = ["fp32_set_opt_dtype"] * sets + ["fp32_append_dtype"] * appends
    return (*_ALWAYS, *more)


def _policy_fault(name: str, own: str, policy: str) -> Fault:
    title = f"{name}:{policy}"

    def corrupt() -> AbstractContextManager[None]:
        return installed(Wrapper(), {name: policy})

    what = f"{name} has policy {policy} instead of {own}"
    return Fault(title, what, (), corrupt, op=name, equivalent=_PROOFS.get(title, ""))


def _policy_faults() -> list[Fault]:
    return [
        _policy_fault(name, own, policy)
        for name, own in POLICIES.items()
        if overload_of(name) is not None  # else a rule for another version of torch
        for policy in _sensible(name)
        if policy != own
    ]


class _Cut(Wrapper):
    """No gradient reaches one argument of one op."""

    def __init__(self, op: str, argument: str) -> None:
        self.op, self.argument = op, argument

    def invoke(self, kernel: Kernel, given: Sequence[tuple[Any, Value]], positional: int) -> Value:
        if kernel.name == self.op:
            given = [(p, v.detach() if p.name == self.argument else v) for p, v in given]
        return super().invoke(kernel, given, positional)


def _cut_faults() -> Iterator[Fault]:
    """Yield the faults; `_native_multi_head_attention` has no gradient that could be cut."""
    for name, policy in POLICIES.items():
        low = policy == "lower_precision_fp" and name != "_native_multi_head_attention"
        overload = overload_of(name) if low else None
        for parameter in overload._schema.arguments if overload else ():
            if str(parameter.type) == "Tensor" and not parameter.has_default_value():
                cut = partial(installed, _Cut(name, parameter.name))
                what = f"no gradient reaches {parameter.name} of {name}"
                yield Fault(f"{name}:cut-{parameter.name}", what, (), cut, op=name)


_PARTS = (
    "{} is composite and passes all its arguments on to {}, which the table casts to float32 too, "
    "so a cast at either place is the same cast"
)
_TWICE = (
    "under both policies the op computes in float32 from the same values. They differ only if the "
    "caller passes dtype=float64: then a gradient is rounded twice, to float32 and to 16 bits, "
    "instead of once. That rarely shows: in one element of 2^13, or if a double backward pass sums "
    "in another order."
)

_REPAIRED = (
    "{} itself promotes its tensors to their widest dtype, as the policy does, but raises no error "
    "for a 16-bit dtype that is not the autocast dtype. So this fault repairs promote-foreign-half "
    "(a known finding). It changes only one other thing: a rounding of a gradient if float64 and "
    "16-bit tensors meet."
)

# Faults that no program can distinguish from honest autocast, each with its proof. "Passes on" was
# read in aten/src/ATen/native, and checked by recording the kernels that the op reaches under the
# fault.
EQUIVALENT: Mapping[str, str] = {
    "cat:none": _REPAIRED.format("cat"),
    "grid_sampler:none": _PARTS.format("grid_sampler", "grid_sampler_2d or grid_sampler_3d"),
    "inverse:none": _PARTS.format("inverse", "linalg_inv"),
    "linalg_cholesky:none": _PARTS.format("linalg_cholesky", "linalg_cholesky_ex"),
    "linalg_inv:none": _PARTS.format("linalg_inv", "linalg_inv_ex"),
    "linalg_matrix_rank:none": (
        "it compares the result of linalg_svdvals or linalg_eigvalsh with a number, and the table "
        "casts these two to float32 too; its own result is an integer without a gradient"
    ),
    "linalg_matrix_rank.tol_tensor:none": (
        "as linalg_matrix_rank, with a tensor instead of the number: that tensor is not cast, but "
        "it is compared with float32, to which every 16-bit value converts exactly"
    ),
    "linalg_tensorinv:none": (
        "it reshapes its argument and passes it on to linalg_inv_ex, which the table casts to "
        "float32 too; a cast and a reshape commute, and so do their gradients"
    ),
    "linalg_tensorsolve:none": (
        "it reshapes its arguments and passes them on to linalg_solve, which the table casts to "
        "float32 too; a cast and a reshape commute, and so do their gradients"
    ),
    "multilabel_margin_loss:none": _PARTS.format(
        "multilabel_margin_loss", "multilabel_margin_loss_forward"
    ),
    "orgqr:none": _PARTS.format("orgqr", "linalg_householder_product"),
    "prod:fp32_set_opt_dtype": _TWICE,
    "prod.dim_int:fp32_set_opt_dtype": _TWICE,
    "qr:none": _PARTS.format("qr", "linalg_qr"),
    "stack:none": _REPAIRED.format("stack"),
    "stft:none": _PARTS.format("stft", "stft.center"),
}

_PROOFS = EQUIVALENT if DEVICE == "cpu" else {}  # they are about the CPU's table

SEMANTIC: Mapping[str, Fault] = {f.name: f for f in (*casts.FAULTS, *contexts.FAULTS)}
POLICY: Mapping[str, Fault] = {f.name: f for f in _policy_faults()}
CUT: Mapping[str, Fault] = {f.name: f for f in _cut_faults()}
FAULTS: Mapping[str, Fault] = {**SEMANTIC, **POLICY}
# Honest kernels in Python: whatever is found under one of these is a mistake of the faults.
CONTROLS: Mapping[str, Fault] = {f.name: f for f in casts.CONTROLS}
