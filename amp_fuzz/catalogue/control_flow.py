"""Higher-order ops, whose body runs under the autocast around the call, or turns it off.

`amp_fuzz.backends.control_flow` has their source. A body casts what it returns to the dtype that it
was given, where it is carried on.
"""

from __future__ import annotations

from collections.abc import Callable

from amp_fuzz.catalogue.core import Build, Builder, Call, Shape, Value, op, out


def _made(name: str, of: str) -> Callable[[Build], Build]:
    """Register what ``make_NAME`` makes of a higher-order op."""
    setup = f"{name} = make_{name}({of}, autocast, device)"
    return op(name, "aten::mm", function=name, setup=setup, mixed="raises", torch=">=2.9")


@_made("cond_mm", "cond")
def _cond(g: Builder) -> Call:
    x = g.tensor(rank=2)
    y = g.tensor((x.shape[1], g.dim()), weight=True)
    return _product((x.shape[0], y.shape[1]), x, y, g.flag())


@_made("map_mm", "hop_map")
def _map(g: Builder) -> Call:
    x = g.tensor(rank=3)
    y = g.tensor((x.shape[0], x.shape[2], g.dim()), weight=True)
    return _product((*x.shape[:2], y.shape[2]), x, y, g.flag())


def _product(shape: Shape, x: Value, y: Value, island: bool) -> Call:
    return Call((x, y, island), out(shape, dtype=x.dtype if island else None))


@_made("while_mm", "while_loop")
def _while(g: Builder) -> Call:
    n = g.dim()
    x = g.tensor((n, n))
    return Call((x, g.flag()), out(x.shape, dtype=x.dtype))


@_made("scan_mm", "scan")
def _scan(g: Builder) -> Call:
    n = g.dim()
    x, ys = g.tensor((n, n)), g.tensor((g.int(1, 3), n, n), weight=True)
    return Call((x, ys, g.flag()), out(x.shape, ys.shape, dtype=x.dtype))


@_made("associative_scan_mm", "associative_scan")
def _associative_scan(g: Builder) -> Call:
    n = g.dim()
    # Three or fewer are combined in turn.
    xs = g.tensor((g.int(1, 3), n, n))
    return Call((xs, g.flag()), out(xs.shape, dtype=xs.dtype))
