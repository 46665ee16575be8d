"""A device whose kernels add in another order at each call, as torch documents of CUDA.

It is the device in Python under the name ``atomics``, with CUDA's policies. Each kernel that
nondeterministic.toml lists for CUDA gives other bits at each call; with deterministic algorithms it
repeats, or raises where CUDA's does. All other kernels are the CPU's. Import it as a plugin:
``--device=atomics --plugins=tests.atomics``.

Within `faulty`, a kernel is wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from amp_fuzz.backends.determinism import applying, listed
from amp_fuzz.reference.shadow.schemas import bound
from tests.devices import install

__all__ = ["DEVICE", "FAULTS", "faulty", "seed"]

DEVICE = "atomics"
CUDA = listed("cuda")
Called = dict[str, Any]

_random = random.Random(0)


def seed(number: int) -> None:
    """Seed the order of additions, so that a run can be repeated."""
    _random.seed(number)


def _order(count: int) -> torch.Tensor:
    """Return numbers below a count in random order."""
    numbers = list(range(count))
    _random.shuffle(numbers)
    return torch.tensor(numbers, dtype=torch.int64)


def _mask(like: torch.Tensor) -> torch.Tensor:
    bits = [_random.random() < 0.5 for _ in range(like.numel())]
    return torch.tensor(bits, dtype=torch.bool).reshape(like.shape)


def _run(func: Any, given: Called, **changed: Any) -> Any:
    """Call an op with its arguments by name, some of them changed."""
    given = {**given, **changed}
    parameters = func._schema.arguments
    args = [given[p.name] for p in parameters if not p.kwarg_only and p.name in given]
    return func(*args, **{p.name: given[p.name] for p in parameters if p.kwarg_only})


def _scattered(func: Any, given: Called) -> Any:
    """Add along a dimension in another order: the same one for each line of it."""
    index, dim = given["index"], given["dim"]
    name = "source" if "source" in given else "src"
    if index.dim() == 0 or not index.numel():
        return _run(func, given)
    along = 0 if index.dim() == 1 and name == "source" else dim
    order = _order(index.shape[along])
    source = given[name]
    if name == "src":  # it may be larger than the index
        source = source[tuple(slice(n) for n in index.shape)]
    if source.dim():
        source = source.index_select(dim, order)
    return _run(func, given, index=index.index_select(along, order), **{name: source})


def _put(func: Any, given: Called) -> Any:
    """Put elements in another order."""
    if "indices" not in given:
        order = _order(given["index"].numel())
        index, source = given["index"].reshape(-1)[order], given["source"].reshape(-1)[order]
        return _run(func, given, index=index, source=source)
    indices, values = given["indices"], given["values"]
    if any(i is None or i.dtype in (torch.bool, torch.uint8) for i in indices):
        return _run(func, given)
    shape = torch.broadcast_shapes(*(i.shape for i in indices))
    rest = given["self"].shape[len(indices) :]
    order = _order(shape.numel())
    flat = [i.expand(shape).reshape(-1)[order] for i in indices]
    values = values.expand(shape + rest).reshape(shape.numel(), *rest)[order]
    return _run(func, given, indices=flat, values=values)


def _cumulated(func: Any, given: Called) -> Any:
    """Add up to some place, then from there on, then both: as a scan of several blocks."""
    own, dim = given["self"], given["dim"]
    if own.dim() == 0 or own.shape[dim] < 3:
        return _run(func, given)
    dtype = given.get("dtype") or own.dtype
    own = own.to(dtype)
    at = _random.randrange(1, own.shape[dim] - 1)
    first, second = own.split([at, own.shape[dim] - at], dim)
    first, second = first.cumsum(dim), second.cumsum(dim)
    found = torch.cat([first, second + first.select(dim, -1).unsqueeze(dim)], dim)
    return _given_back(func, given, found)


def _counted(func: Any, given: Called) -> Any:
    weights = given.get("weights")
    if weights is None or not weights.numel():
        return _run(func, given)
    order = _order(weights.numel())
    return _run(func, given, self=given["self"][order], weights=weights[order])


def _chosen(func: Any, given: Called) -> Any:
    """Name any index of the value that was found."""
    values, indices = _run(func, given)
    own, dim = given["self"], given["dim"]
    if own.dim() == 0:
        return values, indices
    line = values if given.get("keepdim") else values.unsqueeze(dim)
    equal = (own == line) | (own.isnan() & line.isnan())
    any_ = (equal * (1 + _mask(equal))).argmax(dim, keepdim=bool(given["keepdim"]))
    indices.copy_(any_)
    return values, indices


def _split(name: str) -> Callable[[Any, Called], Any]:
    """Return a kernel that is linear in an argument as the sum of two, each of some elements.

    Each is rounded to the dtype of the result, so their sum is another one each time.
    """

    def kernel(func: Any, given: Called) -> Any:
        whole = given[name]
        mask = _mask(whole)
        alone = {"bias": None} if "bias" in given and name == "input" else {}
        zero = torch.zeros((), dtype=whole.dtype)
        one = _run(func, given, **{name: torch.where(mask, whole, zero)})
        two = _run(func, given, **{name: torch.where(mask, zero, whole)}, **alone)
        return _added(one, two)

    return kernel


def _wide(kernel: Callable[[Any, Called], Any]) -> Callable[[Any, Called], Any]:
    """Return a kernel that adds in float32 and rounds once, as convolutions do."""

    def wide(func: Any, given: Called) -> Any:
        narrow = (torch.bfloat16, torch.float16)
        dtypes = {v.dtype for v in given.values() if isinstance(v, torch.Tensor)}
        if not dtypes or not dtypes <= {*narrow} or len(dtypes) > 1:
            return kernel(func, given)
        low = dtypes.pop()
        cast = {n: v.float() if isinstance(v, torch.Tensor) else v for n, v in given.items()}
        found = kernel(func, cast)
        if isinstance(found, torch.Tensor):
            return found.to(low)
        return tuple(t if t is None else t.to(low) for t in found)

    return wide


def _added(one: Any, two: Any) -> Any:
    if isinstance(one, (tuple, list)):
        return type(one)(_added(a, b) for a, b in zip(one, two, strict=True))
    return one if one is None else one.add(two)


def _lost(func: Any, given: Called) -> Any:
    """Add the terms of a loss in another order: those of some samples, then the others."""
    own, target = given["self"], given["target"]
    if given["reduction"] == 0 or own.dim() < 2 or not target.numel():
        return _run(func, given)
    ignore = given["ignore_index"]
    mask = _mask(target)
    sums = [
        _run(func, given, target=torch.where(half, target, ignore), reduction=2)
        for half in (mask, ~mask)
    ]
    total, weight = sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]
    return (total / weight if given["reduction"] == 1 else total), weight


def _given_back(func: Any, given: Called, found: torch.Tensor) -> Any:
    """Return a result the way that the op does: in place, in ``out=``, or new."""
    if func.__name__.partition(".")[0].endswith("_"):
        return given["self"].copy_(found)
    if "out" in given:
        given["out"].resize_(found.shape)
        return given["out"].copy_(found)
    return found


_KERNELS: dict[str, Callable[[Any, Called], Any]] = {
    "index_add": _scattered,
    "scatter_add": _scattered,
    "scatter_reduce": _scattered,
    "scatter": _scattered,
    "index_copy": _scattered,
    "put": _put,
    "index_put": _put,
    "_index_put_impl_": _put,
    "_unsafe_index_put": _put,
    "cumsum": _cumulated,
    "bincount": _counted,
    "median": _chosen,
    "nanmedian": _chosen,
    "nll_loss_forward": _lost,
    "nll_loss2d_forward": _lost,
    "convolution": _wide(_split("input")),
    "_convolution": _wide(_split("input")),
    "convolution_backward": _wide(_split("grad_output")),
    "_ctc_loss_backward": _split("grad"),
    "_embedding_bag_dense_backward": _split("grad"),
}
_BACKWARD = _split("grad_output")  # of pooling, padding, interpolation, grid_sample
_WHOLE = ("histc", "max_unpool2d", "max_unpool3d")  # sums of ones; scatters of maxima


def kernel_of(func: Any) -> Callable[[Any, Called], Any] | None:
    """Return the kernel of an op that adds in another order each time, or None."""
    op = func.__name__.partition(".")[0]
    op = op if op == "_index_put_impl_" else op.removesuffix("_")
    if op in _KERNELS:
        return _KERNELS[op]
    return _BACKWARD if op.endswith("_backward") and op not in _WHOLE else None


# -- faults ---------------------------------------------------------------------------------------


def _first(found: Any) -> torch.Tensor:
    tensors = found if isinstance(found, (tuple, list)) else (found,)
    return next(t for t in tensors if isinstance(t, torch.Tensor) and t.is_floating_point())


def _gain(found: Any) -> Any:
    """Make results a quarter too large."""
    _first(found).mul_(1.25)
    return found


def _missing(found: Any) -> Any:
    """Leave out the last element."""
    own = _first(found)
    if own.numel():
        own.view(-1)[-1:].zero_() if own.is_contiguous() else own[..., -1:].zero_()
    return found


def _shifted(found: Any) -> Any:
    """Give each element its neighbour's value."""
    own = _first(found)
    own.copy_(own.roll(1))
    return found


FAULTS: dict[str, Callable[[Any], Any]] = {"gain": _gain, "missing": _missing, "shifted": _shifted}
"""Ways in which a kernel may be wrong."""

_wrong: list[tuple[str, str]] = []


@contextmanager
def faulty(op: str, way: str) -> Iterator[None]:
    """Make all forms of an op wrong in one of the ways, for a block."""
    _wrong.append((op, way))
    try:
        yield
    finally:
        _wrong.pop()


# -- the device -----------------------------------------------------------------------------------


def call(func: Any, args: Sequence[Any], kwargs: Called) -> Any:
    """Run a kernel of the device on CPU tensors."""
    found = _call(func, args, kwargs)
    name = func.__name__.partition(".")[0]
    for op, way in _wrong:
        if op in (name, name.removesuffix("_")):
            FAULTS[way](found)
    return found


def _call(func: Any, args: Sequence[Any], kwargs: Called) -> Any:
    found = applying(CUDA, func, args, kwargs) if CUDA.of(func) else []
    if not found:
        return func(*args, **kwargs)
    if torch.are_deterministic_algorithms_enabled():
        if any(one.on == "raises" for one in found):
            raise RuntimeError(f"{func} does not have a deterministic implementation")
        return func(*args, **kwargs)
    kernel = kernel_of(func)
    return func(*args, **kwargs) if kernel is None else kernel(func, bound(func, args, kwargs))


install(DEVICE, call)
