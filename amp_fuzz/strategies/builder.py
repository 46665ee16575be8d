"""Draw one program, statement by statement, from a source of integers.

Every choice is one bounded integer that shrinks towards its lower bound, and lower is simpler: a
fresh contiguous float32 input of normal values is simpler than reuse, and reuse than an odd layout.
The builder follows the dtypes that the policy table of the device promises, so that most programs
run to their end; a wrong guess costs one case that raises on both sides, never a false alarm.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from amp_fuzz.catalogue.core import Kind, Op, Out, Value
from amp_fuzz.program import (
    FLOAT_DTYPES,
    Arg,
    Domain,
    DType,
    Float,
    Items,
    Layout,
    Ref,
    Role,
    Statement,
    TensorSpec,
)

__all__ = ["Frame", "Palette", "ProgramBuilder"]

Shape = tuple[int, ...]
Rank = int | tuple[int, int] | None

_FLOATS = frozenset(FLOAT_DTYPES)
_KINDS: Mapping[str, frozenset[str]] = {
    "float": _FLOATS,
    "real": _FLOATS | {"int64", "int32", "uint8"},
    "int": frozenset({"int64", "int32"}),
    "index": frozenset({"int64"}),
    "bool": frozenset({"bool"}),
    "complex": frozenset({"complex64", "complex128"}),
    "any": _FLOATS | {"int64", "int32", "uint8", "bool", "complex64"},
}
# Small sizes find most bugs; 17 and 33 step over the 8, 16 and 32 lanes of vectorised kernels.
_DIMS = (2, 3, 4, 1, 5, 8, 2, 3, 4, 6, 17, 33)
_FLOAT_SCALARS = (0.5, 2.0, 1.0, -1.5, 0.1, 0.0, 3.0, 1e-3, 300.0)
_INT_SCALARS = (1, 2, 0, -1, 3)
_CANDIDATES = 6


@dataclass(frozen=True, slots=True)
class Palette:
    """What a program draws its inputs from: dtypes, value domains, layouts.

    `mixes` lets ops that need one dtype meet several where no policy casts for them.
    """

    floats: tuple[str, ...] = ("float32",)
    domains: tuple[Domain, ...] = ("normal",)
    layouts: tuple[Layout, ...] = ("contiguous",)
    mixes: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """The contexts around the next statement, as far as the builder follows them."""

    autocast: bool = False
    dtype: str = "bfloat16"
    grad: bool = True
    checkpoint: bool = False


@dataclass(slots=True)
class ProgramBuilder:
    """Draws calls for catalogue ops; implements `catalogue.core.Builder`.

    integer: draws an integer between two bounds. policies: overload -> policy name on the device
    that the program is meant for.
    """

    integer: Callable[[builtins.int, builtins.int], builtins.int]
    policies: Mapping[str, str]
    palette: Palette = field(default_factory=Palette)
    frame: Frame = field(default_factory=Frame)
    inputs: list[TensorSpec] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    form: str = "function"
    _op: Op | None = None
    _same: str | None = None
    _names: builtins.int = 0

    # -- statements ---------------------------------------------------------------------------

    def statement(self, op: Op, form: str | None = None) -> Statement:
        """Draw one call of `op` and make its outputs available to later statements."""
        self.form = form or self.choice(self.forms(op))
        self._op, self._same = op, None
        call = op.build(self)
        kwargs = dict(call.kwargs)
        arguments = [v for v in _flat((*call.args, *kwargs.values())) if isinstance(v, Value)]
        dtype = self._result(op, arguments)
        outputs = [replace(o, dtype=o.dtype or dtype) for o in call.outputs]
        if self.form == "inplace":
            outputs[0] = replace(outputs[0], dtype=arguments[0].dtype)
        if self.form == "out":
            buffers = [self._fresh(o.shape, o.dtype or dtype, role="buffer") for o in outputs]
            kwargs["out"] = buffers[0] if len(buffers) == 1 else buffers
        grad = self.frame.grad and any(v.requires_grad for v in arguments)
        views = op.view or self.form in ("inplace", "out")
        names = tuple(
            self._define(
                o,
                grad=grad and self.form != "out",
                writable=(not views) or self.form == "out" or arguments[0].writable,
            )
            for o in outputs
        )
        if self.form == "inplace" and grad:
            self._mark(arguments[0].name)
        return Statement(
            op.name,
            self.form,
            tuple(_arg(a) for a in call.args),
            tuple((name, _arg(a)) for name, a in kwargs.items()),
            names,
        )

    def forms(self, op: Op) -> list[str]:
        """Return the forms in which `op` may be called here.

        A checkpoint runs its body twice, and an in-place write must not happen twice.
        """
        writes = ("inplace", "out") if self.frame.checkpoint else ()
        return [form for form in op.forms if form not in writes]

    def _define(self, o: Out, *, grad: bool, writable: bool) -> str:
        if not o.keep:
            return "_"
        name = f"v{self._names}"
        self._names += 1
        dtype = o.dtype or "float32"
        grad = grad and (dtype in _FLOATS or dtype.startswith("complex"))
        self.values.append(Value(name, o.shape, dtype, writable, grad))
        return name

    def _mark(self, name: str) -> None:
        # An in-place write of something that requires grad makes the written value require grad.
        self.values = [replace(v, requires_grad=True) if v.name == name else v for v in self.values]

    def _policy(self, op: Op) -> str | None:
        if not (self.frame.autocast and op.overloads) or self.form in ("inplace", "out"):
            return None
        names = (name.removeprefix("aten::") for name in op.overloads)
        return next((self.policies[name] for name in names if name in self.policies), None)

    def _result(self, op: Op, arguments: Sequence[Value]) -> str:
        """Return the floating dtype that the call computes in, as the policy table promises it."""
        floats = [v.dtype for v in arguments if v.dtype in _FLOATS]
        policy = self._policy(op)
        if "float64" in floats:
            return "float64"
        if policy == "lower_precision_fp":
            return self.frame.dtype
        if policy is not None and policy.startswith("fp32"):
            return "float32"
        if not floats:
            return "float32"
        if op.mixed == "raises" and policy is None:
            return floats[0]
        return floats[0] if len(set(floats)) == 1 else "float32"

    # -- choices ------------------------------------------------------------------------------

    def int(self, low: builtins.int, high: builtins.int) -> builtins.int:
        """Draw an integer from `low` to `high`."""
        return self.integer(low, high)

    def choice(self, options: Sequence[Any]) -> Any:
        """Draw one of the options."""
        return options[0] if len(options) == 1 else options[self.integer(0, len(options) - 1)]

    def flag(self) -> bool:
        """Draw a boolean."""
        return self.integer(0, 1) == 1

    def digits(self, *sizes: builtins.int) -> list[builtins.int]:
        """Draw several independent choices as one integer, each in [0, size).

        A draw costs more than what is done with it, so choices that belong together share one.
        """
        number = self.integer(0, math.prod(sizes) - 1)
        drawn = []
        for size in sizes:
            number, digit = divmod(number, size)
            drawn.append(digit)
        return drawn

    def seldom(self, n: builtins.int) -> bool:
        """Draw a boolean that is True once in `n` times."""
        return self.integer(0, n - 1) == n - 1

    def dim(self) -> builtins.int:
        """Draw the size of a dimension."""
        return _DIMS[self.integer(0, len(_DIMS) - 1)]

    def shape(self, low: builtins.int = 0, high: builtins.int = 3, *, empty: bool = True) -> Shape:
        """Draw a shape."""
        span, n = high - low, len(_DIMS)
        how, *digits = self.digits(span + 1, *[n] * min(high, 4))
        rank = _near(how, 2 - low, span) + low
        digits += [self.integer(0, n - 1) for _ in range(rank - len(digits))]
        shape = tuple(_DIMS[i] for i in digits[:rank])
        if empty and rank and self.seldom(24):
            i = self.integer(0, rank - 1)
            shape = (*shape[:i], 0, *shape[i + 1 :])
        return shape if _size(shape) <= 4096 else tuple(min(s, 4) for s in shape)

    def scalar(self, kind: Literal["float", "int"] = "float") -> Any:
        """Draw a Python number."""
        return self.choice(_INT_SCALARS if kind == "int" else _FLOAT_SCALARS)

    def dimension(self, rank: builtins.int) -> builtins.int:
        """Draw a dimension of a tensor of `rank`."""
        return self.integer(-rank, rank - 1) if rank else self.choice((0, -1))

    def options(self, **options: Sequence[Any]) -> dict[str, Any]:
        """Draw keyword arguments, leaving out those whose first option is drawn."""
        drawn = self.digits(*(len(values) for values in options.values()))
        pairs = zip(options.items(), drawn, strict=True)
        return {name: values[i] for (name, values), i in pairs if i}

    # -- tensors ------------------------------------------------------------------------------

    def receiver(self, shape: Shape | None = None, **options: Any) -> Value:
        """Draw the tensor that a method is called on."""
        if self.form != "inplace":
            return self.tensor(shape, **options)
        found = self._existing(shape, options.get("rank"), options, writable=True)
        drawn = self._pick(found)
        if drawn is None:
            kind: Kind = options.get("kind", "float")
            dtype = options.get("dtype") or self._dtype(kind, self.integer(0, 11))
            shape = self._shape(options.get("rank"), options) if shape is None else shape
            domain, bound = options.get("domain"), options.get("bound", 0)
            drawn = self._fresh(shape, dtype, role="buffer", domain=domain, bound=bound)
        return self._took(drawn)

    def broadcastable(self, shape: Shape, *, kind: Kind = "float") -> Value:
        """Draw a tensor that broadcasts to `shape`."""
        how, bits = self.digits(6, 2 ** max(len(shape), 1))
        if how == 3:
            shape = shape[bits % (len(shape) + 1) :]
        elif how == 4:
            shape = tuple(1 if bits >> i & 1 else s for i, s in enumerate(shape))
        elif how == 5:
            shape = ()
        return self.tensor(shape, kind=kind)

    def tensor(
        self,
        shape: Shape | None = None,
        *,
        rank: Rank = None,
        kind: Kind = "float",
        dtype: str | None = None,
        domain: str | None = None,
        bound: builtins.int = 0,
        empty: bool = False,
        weight: bool = False,
        grad: bool = True,
    ) -> Value:
        """Draw a tensor: one at hand that fits, or a fresh input."""
        options = {"kind": kind, "dtype": dtype, "grad": grad, "empty": empty}
        if domain is None and kind != "index":
            drawn = self._pick(self._existing(shape, rank, options))
            if drawn is not None:
                return self._took(drawn)
        if shape is None:
            shape = self._shape(rank, options)
        can_train = grad and self._may_require_grad()
        # One draw for the dtype and for the role.
        i, other_role, other_dtype = self.digits(12, 8, 6)
        dtype = dtype or self._dtype(kind, i, plain=weight and can_train and other_dtype < 5)
        role: Role = "input"
        trains = dtype in _FLOATS or dtype.startswith("complex")
        if can_train and trains and (other_role == 7) != weight:
            role = "weight"
        wanted: Any = "index" if kind == "index" else domain
        return self._took(self._fresh(shape, dtype, role=role, domain=wanted, bound=bound))

    def _may_require_grad(self) -> bool:
        return not (self.form == "out" and self.frame.grad)

    def _took(self, value: Value) -> Value:
        if self._same is None and value.dtype in _FLOATS:
            self._same = value.dtype
        return value

    def _allowed(self, kind: Kind) -> frozenset[str]:
        """Return the dtypes that an argument of that kind may have here, most of the time."""
        dtypes = _KINDS[kind]
        op = self._op
        if op is None or kind not in ("float", "real"):
            return dtypes
        policy = self._policy(op)
        if policy is None or policy == "promote":
            if self.palette.mixes:
                return dtypes
            # What is not cast, or stays in the dtype it has, must be what the kernel takes.
            dtypes -= _FLOATS - set(op.floats)
        if op.mixed == "raises" and self._same is not None:
            if policy is None:
                return (dtypes - _FLOATS) | {self._same}
            # Autocast leaves float64 alone: an op that needs one dtype gets all of it or none.
            is_double = self._same == "float64"
            return frozenset({"float64"}) if is_double else dtypes - {"float64"}
        return dtypes

    def _existing(
        self,
        shape: Shape | None,
        rank: Rank,
        options: Mapping[str, Any],
        *,
        writable: bool = False,
    ) -> list[Value]:
        dtype = options.get("dtype")
        dtypes = {dtype} if dtype else self._allowed(options.get("kind", "float"))
        grad = options.get("grad", True) and self._may_require_grad()
        low, high = _ranks(rank)
        found: list[Value] = []
        for value in reversed(self.values):
            if value.dtype not in dtypes or (value.requires_grad and not grad):
                continue
            if writable and not value.writable:
                continue
            if shape is None:
                if not low <= value.rank <= high:
                    continue
                if not options.get("empty") and 0 in value.shape:
                    continue
            elif value.shape != shape:
                continue
            found.append(value)
            if len(found) == _CANDIDATES:
                break
        return found

    def _pick(self, found: Sequence[Value]) -> Value | None:
        i = self.integer(0, len(found)) if found else 0
        return found[i - 1] if i else None

    def _shape(
        self,
        rank: Rank,
        options: Mapping[str, Any],
    ) -> Shape:
        low, high = _ranks(rank)
        return self.shape(low, min(high, max(low, 4)), empty=bool(options.get("empty")))

    def _dtype(self, kind: Kind, i: builtins.int, *, plain: bool = False) -> str:
        """Choose a dtype by number, 0 to 11; `plain` prefers float32, as weights have it."""
        if kind in ("float", "real"):
            allowed = self._allowed(kind)
            floats = [d for d in self.palette.floats if d in allowed]
            if not floats:
                floats = [d for d in ("float32", "bfloat16", "float16", "float64") if d in allowed]
            if plain and "float32" in floats:
                return "float32"
            if kind == "real" and i >= 10:
                return "int64"
            return floats[i % len(floats)]
        order: tuple[str, ...] = {
            "int": ("int64", "int32"),
            "index": ("int64",),
            "bool": ("bool",),
            "complex": ("complex64", "complex128"),
            "any": (*self.palette.floats, "int64", "bool", "complex64", "uint8"),
        }[kind]
        return order[i % len(order)]

    def _fresh(
        self,
        shape: Shape,
        dtype: str,
        *,
        role: Role,
        domain: Domain | None = None,
        bound: builtins.int = 0,
    ) -> Value:
        letter = {"input": "x", "weight": "w", "buffer": "b"}[role]
        name = f"{letter}{len(self.inputs)}"
        domains, layouts = self.palette.domains, self.palette.layouts
        i, j = (
            self.digits(len(domains), len(layouts)) if len(domains) * len(layouts) > 1 else (0, 0)
        )
        domain = domain or domains[i]
        layout: Layout = "contiguous" if _size(shape) < 2 else layouts[j]
        spec = TensorSpec(name, shape, dtype, domain, layout, role, bound)
        self.inputs.append(spec)
        value = Value(name, shape, dtype, role == "buffer", role == "weight")
        self.values.append(value)
        return value


def _ranks(rank: int | tuple[int, int] | None) -> tuple[int, int]:
    if rank is None:
        return 0, 3
    return (rank, rank) if isinstance(rank, int) else rank


def _near(i: int, first: int, high: int) -> int:
    """Map 0, 1, 2... to `first` and then the rest, so that the usual rank is the simplest."""
    first = min(max(first, 0), high)
    return first if i == 0 else i - 1 if i <= first else i


def _size(shape: Shape) -> int:
    n = 1
    for s in shape:
        n *= s
    return n


def _flat(args: Sequence[Any]) -> list[Any]:
    flat = []
    for a in args:
        if isinstance(a, (list, tuple)):
            flat += _flat(a)
        else:
            flat.append(a)
    return flat


def _arg(value: Any) -> Arg:
    """Turn what a catalogue entry passes into what a program holds."""
    if isinstance(value, Value):
        return Ref(value.name)
    if isinstance(value, float):
        return Float(value.hex())
    if isinstance(value, (list, tuple)):
        return Items(tuple(_arg(v) for v in value))
    if value is None or isinstance(value, (bool, int, str, DType)):
        return value
    raise TypeError(f"a catalogue entry passed {value!r}: pass values, literals or lists of these")
