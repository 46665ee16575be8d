"""Higher-order ops with a body that autocast casts: `torch.cond`, loops and scans.

`PLAIN` is their documentation as Python, which the reference runs. `of_torch` returns torch's own,
which compile their bodies even in eager. The makers are plain torch, so a repro can contain them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = [
    "carried",
    "make_associative_scan_mm",
    "make_cond_mm",
    "make_map_mm",
    "make_scan_mm",
    "make_while_mm",
    "product_in",
]


def product_in(autocast: Any, device: Any) -> Any:
    """Return a product, which may be an island: in a region without autocast.

    dtype: what its operands are cast to. The explicit program gives it.
    """

    def product(x: Any, y: Any, island: bool, dtype: Any) -> Any:
        if dtype is not None:
            x, y = x.to(dtype), y.to(dtype)
        if not island:
            return torch.mm(x, y)
        with autocast(device, enabled=False):
            return torch.mm(x, y)

    return product


def carried(x: Any) -> Any:
    """Return a copy with the strides of a product, as a loop must carry. It is no weight."""
    return x.clone(memory_format=torch.contiguous_format)


def make_cond_mm(cond: Any, autocast: Any, device: Any) -> Any:
    """Return a product in both branches of `torch.cond`."""
    product = product_in(autocast, device)

    def cond_mm(x: Any, y: Any, island: bool, dtype: Any = None) -> Any:
        def body(x: Any, y: Any) -> Any:
            return product(x, y, island, dtype)

        return cond(x.sum() > 0, lambda x, y: body(x, y), lambda x, y: body(x, y), (x, y))

    return cond_mm


def make_map_mm(hop_map: Any, autocast: Any, device: Any) -> Any:
    """Return a product for each pair of matrices."""
    product = product_in(autocast, device)

    def map_mm(xs: Any, ys: Any, island: bool, dtype: Any = None) -> Any:
        return hop_map(lambda pair: product(pair[0], pair[1], island, dtype), (xs, ys))

    return map_mm


def make_while_mm(while_loop: Any, autocast: Any, device: Any) -> Any:
    """Return a square matrix to the power of four."""
    product = product_in(autocast, device)

    def while_mm(x: Any, island: bool, dtype: Any = None) -> Any:
        def again(i: Any, x: Any) -> Any:
            return i + 1, product(x, x, island, dtype).to(x.dtype)

        start = torch.zeros((), dtype=torch.int64, device=x.device)
        return while_loop(lambda i, x: i < 2, again, (start, carried(x)))[1]

    return while_mm


def make_scan_mm(scan: Any, autocast: Any, device: Any) -> Any:
    """Return the last of the products of square matrices, and the double of each."""
    product = product_in(autocast, device)

    def scan_mm(x: Any, ys: Any, island: bool, dtype: Any = None) -> Any:
        def step(x: Any, y: Any) -> Any:
            made = product(x, y, island, dtype).to(x.dtype)
            return made, made * 2

        return scan(step, carried(x), ys)

    return scan_mm


def make_associative_scan_mm(associative_scan: Any, autocast: Any, device: Any) -> Any:
    """Return the products of square matrices."""
    product = product_in(autocast, device)

    def associative_scan_mm(xs: Any, island: bool, dtype: Any = None) -> Any:
        def combine(x: Any, y: Any) -> Any:
            return product(x, y, island, dtype).to(x.dtype)

        return associative_scan(combine, xs, 0, combine_mode="generic")

    return associative_scan_mm


# -- what the documentation says that they do -------------------------------------------------


def _cond(pred: Any, yes: Callable[..., Any], no: Callable[..., Any], operands: Any) -> Any:
    return yes(*operands) if pred else no(*operands)


def _map(function: Callable[..., Any], xs: Any) -> Any:
    return torch.stack([function(x) for x in zip(*xs, strict=True)])


def _while_loop(holds: Callable[..., Any], body: Callable[..., Any], carried: Any) -> Any:
    while holds(*carried):
        carried = body(*carried)
    return carried


def _scan(step: Callable[..., Any], carry: Any, xs: Any) -> Any:
    made = []
    for x in xs:
        carry, y = step(carry, x)
        made.append(y)
    return carry, torch.stack(made)


def _associative_scan(combine: Callable[..., Any], xs: Any, dim: int, combine_mode: str) -> Any:
    made = [xs[0]]
    for x in xs[1:]:
        made.append(combine(made[-1], x))
    return torch.stack(made, dim)


PLAIN: Mapping[str, Any] = {
    "cond": _cond,
    "hop_map": _map,
    "while_loop": _while_loop,
    "scan": _scan,
    "associative_scan": _associative_scan,
}


def of_torch() -> Mapping[str, Any]:
    """Return torch's own, by the same names."""
    from torch._higher_order_ops.associative_scan import associative_scan
    from torch._higher_order_ops.map import map as hop_map
    from torch._higher_order_ops.scan import scan
    from torch._higher_order_ops.while_loop import while_loop

    return {
        "cond": torch.cond,
        "hop_map": hop_map,
        "while_loop": while_loop,
        "scan": scan,
        "associative_scan": associative_scan,
    }
