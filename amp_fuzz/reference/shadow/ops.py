"""Ops of which shadow arithmetic knows something: what they round, add, choose or promise."""

from __future__ import annotations

import torch

from amp_fuzz.reference.shadow.written import CASTING

__all__ = [
    "ADDING",
    "AVERAGING",
    "BOUNDING",
    "CASTING_REDUCTIONS",
    "CONVERTING",
    "COPIES",
    "EQUATING",
    "EXPANDING",
    "FACTORING",
    "NORMS",
    "SCALING",
    "SORTING",
    "TRANSFORMS",
    "UNINITIALISED",
    "UPDATING",
]

_aten = torch.ops.aten

# Ops that move or choose values and compute nothing, so that float64 shows whether a dtype rounded
# them. The largest of some values is one of them: a compiler that compares it with these before
# they were rounded is wrong, and finds it nowhere (pytorch/pytorch#195214). Ops that also return
# indices are no part of the list: which of two equal values is first is not always promised.
COPIES = frozenset(
    getattr(getattr(_aten, name), overload)
    for name, overload in (
        ("_to_copy", "default"),
        ("clone", "default"),
        ("copy_", "default"),
        ("cat", "default"),
        ("stack", "default"),
        ("index_select", "default"),
        ("index", "Tensor"),
        ("gather", "default"),
        ("embedding", "default"),
        ("fill_", "Scalar"),
        ("zero_", "default"),
        ("amax", "default"),
        ("amin", "default"),
        ("aminmax", "default"),
        ("max", "default"),
        ("min", "default"),
    )
)


# Ops that casts are made of.
CONVERTING = frozenset((_aten._to_copy.default, _aten.copy_.default, *CASTING))


# Ops that promise nothing of the order of equal elements, unless they are asked to be stable.
SORTING = frozenset((_aten.sort.default, _aten.sort.stable))


EQUATING = frozenset((_aten.eq.Tensor, _aten.ne.Tensor))


# Ops whose results are sums of many terms, in the order that a kernel likes.
ADDING = frozenset(
    [
        *(
            "_addmm_activation",
            "_convolution",
            "_trilinear",
            "addbmm",
            "addmm",
            "addmm_",
            "addmv",
            "addmv_",
            "baddbmm",
        ),
        *(
            "baddbmm_",
            "bmm",
            "convolution",
            "convolution_backward",
            "cumsum",
            "dot",
            "mean",
            "mm",
            "mv",
            "nansum",
        ),
        *("linalg_cross", "sum", "vdot"),
    ]
)


# Sums and products: of numbers they are numbers, if there is room.
EXPANDING = ADDING | {
    f"{name}{place}" for name in ("add", "addcmul", "mul", "square", "sub") for place in ("", "_")
}


# Reductions that promise to cast to the dtype which they are told, and where that is narrower need
# not: torch's sum over dimensions that are not neighbours does not (`should_use_acc_buffer`,
# aten/src/ATen/native/ReduceOps.cpp), and its other sums do.
CASTING_REDUCTIONS = frozenset(("cumprod", "cumsum", "mean", "nansum", "prod", "sum"))


BOUNDING = frozenset(
    getattr(packet, overload)
    for name in ("clamp", "clamp_min", "clamp_max")
    for packet in (getattr(_aten, name), getattr(_aten, f"{name}_"))
    for overload in packet.overloads()
)


NORMS = frozenset(
    (
        _aten.native_layer_norm.default,
        _aten.native_group_norm.default,
        _aten.native_batch_norm.default,
        _aten._native_batch_norm_legit.default,
        _aten._native_batch_norm_legit.no_stats,
        _aten._native_batch_norm_legit_functional.default,
        _aten._batch_norm_with_update.default,
        _aten._batch_norm_with_update_functional.default,
    )
)


# These write running statistics in training, which their schemas do not say.
UPDATING = frozenset(
    (
        _aten.native_batch_norm.default,
        _aten.cudnn_batch_norm.default,
        _aten.miopen_batch_norm.default,
    )
)


SCALING = frozenset((_aten.add.Tensor, _aten.add_.Tensor, _aten.sub.Tensor, _aten.sub_.Tensor))


# Ops whose results are means of so many elements: a compiler may add these before it divides.
AVERAGING = {
    _aten.upsample_linear1d.default: 2,
    _aten.upsample_bilinear2d.default: 4,
    _aten.upsample_trilinear3d.default: 8,
}


TRANSFORMS = frozenset((_aten._fft_c2c.default, _aten._fft_r2c.default, _aten._fft_c2r.default))


# Kernels that choose among rows and divide by what they chose: with numbers taken for 0, theirs or
# their reciprocals, they choose others.
FACTORING = ("_linalg_", "linalg_", "lu_", "cholesky", "triangular_solve", "_cholesky")


# What was in the memory before: not a result, and what it holds is no overflow.
UNINITIALISED = frozenset(
    ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
)
