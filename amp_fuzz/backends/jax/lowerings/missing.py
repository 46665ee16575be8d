"""The ops of the catalogue without a lowering, and why. All others have one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from amp_fuzz.catalogue import CATALOGUE, select

__all__ = ["NOT_LOWERED"]

_REASONS: Mapping[str, tuple[str, ...]] = {
    "it does not promise which of several equal elements it takes": (
        "kthvalue",
        "median",
        "median.dim",
        "mode",
        "nanmedian",
        "nanmedian.dim",
        "topk",
    ),
    "the sign or phase of each vector is free": (
        "linalg.eig",
        "linalg.eigh",
        "linalg.svd",
        "svd",
    ),
    "JAX has no such function, or a different one": (
        "_upsample_bicubic2d_aa",
        "_upsample_bilinear2d_aa",
        "ctc_loss",
        "ctc_loss.lists",
        "embedding_bag",
        "embedding_bag.weights",
        "fake_quantize_per_tensor_affine",
        "fractional_max_pool2d",
        "fractional_max_pool3d",
        "geqrf",
        "grouped_mm",
        "grouped_mm.batched",
        "istft",
        "linalg.eigvals",
        "linalg.householder_product",
        "linalg.ldl_factor",
        "linalg.lstsq",
        "linalg.lu_solve",
        "linalg.pinv",
        "linalg.pinv.hermitian",
        "linear.fake_quantised",
        "linear.fake_quantised_channels",
        "lu_solve",
        "lu_unpack",
        "max_unpool1d",
        "max_unpool2d",
        "max_unpool3d",
        "orgqr",
        "ormqr",
        "pinverse",
        "scatter_reduce",
    ),
    "one CPU kernel is the whole layer": (
        "linear_cross_entropy.chunked",
        "lstm",
        "mkldnn_rnn_layer",
    ),
    "its kernel calls ops that autocast casts again, which a recording does not see": (
        "_native_multi_head_attention",
        "linalg.matrix_exp",
    ),
    "the CPU has no kernel for it, so the reference cannot run it": (
        "_scaled_dot_product_flash_attention",
        "_thnn_fused_gru_cell",
        "_thnn_fused_lstm_cell",
        "cudnn_convolution",
        "cudnn_convolution_transpose",
    ),
}

_CUSTOM = {
    name: "it is Python, made before the program" for name, op in CATALOGUE.items() if op.setup
}

_SPARSE = {op.name: "JAX's sparse arrays are no arrays" for op in select(["sparse"])}

NOT_LOWERED: Mapping[str, str] = MappingProxyType(
    {name: why for why, names in _REASONS.items() for name in names} | _CUSTOM | _SPARSE
)
"""The reason by catalogue name."""
