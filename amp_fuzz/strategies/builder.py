"""Draw one program, statement by statement, from a source of bytes.

Every choice is a number, and lower is simpler: a fresh contiguous float32 input of normal values is
simpler than reuse, and reuse is simpler than an odd layout. The builder follows the dtypes that the
device's policy table promises, so most programs run to their end. A wrong guess costs one case that
raises on both sides, never a false alarm.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from amp_fuzz.cases.program import (
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
from amp_fuzz.catalogue.core import Kind, Op, Out, Value, broadcasts
from amp_fuzz.catalogue.writes import shares
from amp_fuzz.strategies.choices import Bytes, digits, integer

__all__ = ["FORMS", "Frame", "Palette", "ProgramBuilder", "policy_of"]

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
# Small sizes find most bugs; 17 and 33 exceed the 16 and 32 lanes of vectorised kernels.
_DIMS = (2, 3, 4, 1, 5, 8, 2, 3, 4, 6, 17, 33)
_FLOAT_SCALARS = (0.5, 2.0, 1.0, -1.5, 0.1, 0.0, 3.0, 1e-3, 300.0, 65536.0)
_INT_SCALARS = (1, 2, 0, -1, 3)
_CANDIDATES = 6
FORMS = 256
_TRAITS = (12, 6, 8, 40, 40, 256)  # the number of options for each of `_Traits`


@dataclass(frozen=True, slots=True)
class Palette:
    """What a program draws its inputs from: dtypes, value domains, layouts.

    `sizes` are those of dimensions; a shape of more than `most` elements gets dimensions of at most
    `least`. `mixes` lets ops that need one dtype meet several, where no policy casts for them. With
    `chains`, most calls begin with the last result that they accept. `plain` of eight inputs are
    not leaves that require grad.
    """

    floats: tuple[str, ...] = ("float32",)
    domains: tuple[Domain, ...] = ("normal",)
    layouts: tuple[Layout, ...] = ("contiguous",)
    mixes: bool = False
    chains: bool = False
    plain: int = 7
    sizes: tuple[int, ...] = _DIMS
    most: int = 4096
    least: int = 4


@dataclass(frozen=True, slots=True)
class Frame:
    """The contexts around the next statement, as far as the builder follows them.

    block: of the sizes that an FP8 recipe takes.
    """

    autocast: bool = False
    dtype: str = "bfloat16"
    grad: bool = True
    checkpoint: bool = False
    block: int = 16


@dataclass(frozen=True, slots=True)
class _Traits:
    """The traits drawn for a tensor: a shape, and numbers below those of `_TRAITS`, 0 simplest."""

    shape: Shape
    dtype: int
    other_dtype: int
    other_role: int
    layout: int
    domain: int
    at_hand: int

    def pick(self, found: Sequence[Value], *, last: Value | None = None) -> Value | None:
        """Return an existing tensor, or None for a fresh one; mostly `last`."""
        if last is not None and self.at_hand % 8:
            return last
        i = self.at_hand // 8 % (len(found) + 1)
        return found[i - 1] if i else None


def policy_of(op: Op, policies: Mapping[str, str]) -> str | None:
    """Return the policy of an op, from those of overloads; None if autocast does not know it."""
    names = (name.removeprefix("aten::") for name in op.overloads)
    return next((policies[name] for name in names if name in policies), None)


@dataclass(slots=True)
class ProgramBuilder:
    """Draws calls for catalogue ops; implements `catalogue.core.Builder`.

    source: draws bytes. policies: overload -> policy name on the device
    that the program is meant for.
    """

    source: Bytes
    policies: Mapping[str, str]
    palette: Palette = field(default_factory=Palette)
    frame: Frame = field(default_factory=Frame)
    inputs: list[TensorSpec] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    form: str = "function"
    caches: bool = False
    _op: Op | None = None
    _same: str | None = None
    _first: str = ""
    _names: builtins.int = 0

    # -- statements ---------------------------------------------------------------------------

    def statement(self, op: Op, form: str | None = None, number: builtins.int = 0) -> Statement:
        """Draw one call of `op` and make its outputs available to later statements.

        form: a name, or a number below `FORMS` that chooses one.
        """
        if form is None:
            forms = self.forms(op)
            if self.palette.chains and number % 4:
                # Writing to given memory ends a chain: the value is rounded there.
                forms = [f for f in forms if f not in ("inplace", "out")] or forms
            form = forms[number * len(forms) // FORMS]
        self.form = form
        self._op, self._same, self._first = op, None, ""
        call = op.build(self)
        kwargs = dict(call.kwargs)
        arguments = [v for v in _flat((*call.args, *kwargs.values())) if isinstance(v, Value)]
        dtype = self._result(op, arguments)
        outputs = [replace(o, dtype=o.dtype or dtype) for o in call.outputs]
        if self.form == "inplace":
            outputs[0] = replace(outputs[0], dtype=arguments[0].dtype)
        if self.form == "out":
            buffers = [
                self._fresh(o.shape, o.dtype or dtype, self._traits(o.shape), role="buffer")
                for o in outputs
            ]
            kwargs["out"] = buffers[0] if len(buffers) == 1 else buffers
        grad = self.frame.grad and any(v.requires_grad for v in arguments)
        made = Statement(
            op.name,
            self.form,
            tuple(_arg(a) for a in call.args),
            tuple((name, _arg(a)) for name, a in kwargs.items()),
        )
        aliases = shares(made, op, {v.name: v.shape for v in arguments})
        writable = not op.read_only and (not aliases or arguments[0].writable)
        grad_out = grad and self.form != "out"
        names = tuple(self._define(o, grad=grad_out, writable=writable) for o in outputs)
        if self.form == "inplace" and grad:
            self._mark(arguments[0].name)
        return msgspec.structs.replace(made, outputs=names)

    def forms(self, op: Op) -> list[str]:
        """Return the forms in which `op` may be called here.

        A checkpoint runs its body twice, but an in-place write must happen only once.
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
        if not self.frame.autocast or self.form in ("inplace", "out"):
            return None
        return policy_of(op, self.policies)

    def _result(self, op: Op, arguments: Sequence[Value]) -> str:
        """Return the floating dtype that the call computes in, according to the policy table."""
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
        return low + integer(self.source, high - low + 1)

    def choice(self, options: Sequence[Any]) -> Any:
        """Draw one of the options."""
        return options[0] if len(options) == 1 else options[integer(self.source, len(options))]

    def flag(self) -> bool:
        """Draw a boolean."""
        return integer(self.source, 2) == 1

    @property
    def block(self) -> builtins.int:
        """The sizes of FP8 layers are multiples of it."""
        return self.frame.block

    def digits(self, *sizes: builtins.int) -> list[builtins.int]:
        """Draw several independent choices, each in [0, size), at once."""
        return digits(self.source, *sizes)

    def dim(self) -> builtins.int:
        """Draw the size of a dimension."""
        sizes = self.palette.sizes
        return sizes[integer(self.source, len(sizes))]

    def shape(self, low: builtins.int = 0, high: builtins.int = 3, *, empty: bool = True) -> Shape:
        """Draw a shape."""
        drawn = self.digits(*_shape_sizes(low, high))
        return _shape(drawn, low, high, self.palette, empty=empty)

    def scalar(self, kind: Literal["float", "int"] = "float") -> Any:
        """Draw a Python number."""
        return self.choice(_INT_SCALARS if kind == "int" else _FLOAT_SCALARS)

    def dimension(self, rank: builtins.int) -> builtins.int:
        """Draw a dimension of a tensor of `rank`."""
        return integer(self.source, 2 * rank) - rank if rank else self.choice((0, -1))

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
        rank, empty = options.get("rank"), bool(options.get("empty"))
        drawn = self._traits(shape, rank, empty=empty)
        found = self._pick(drawn, self._existing(shape, rank, options, writable=True))
        if found is None:
            dtype = options.get("dtype") or self._dtype(options.get("kind", "float"), drawn.dtype)
            shape = drawn.shape
            domain, bound = options.get("domain"), options.get("bound", 0)
            found = self._fresh(shape, dtype, drawn, role="buffer", domain=domain, bound=bound)
        return self._took(found)

    def broadcastable(self, shape: Shape, *, kind: Kind = "float", either: bool = False) -> Value:
        """Draw a tensor that broadcasts to `shape`. With `either`, `shape` may broadcast to it."""
        how, bits, *drawn = self.digits(12, 2 ** max(len(shape), 1), *_TRAITS)
        chains = self.palette.chains
        if 2 <= how < 6 or (chains and how >= 6 and how % 2):
            near = self._existing(shape, None, {"kind": kind}, near="either" if either else "to")
            if chains:  # a value with itself tests less than a value with its operands
                near = [v for v in near if v.name != self._first] or near
            if near:
                return self._took(near[bits % len(near)])
        elif how in (6, 7):
            shape = shape[bits % (len(shape) + 1) :]
        elif how in (8, 9):
            shape = tuple(1 if bits >> i & 1 else s for i, s in enumerate(shape))
        elif how in (10, 11):
            shape = ()
        return self._tensor(_Traits(shape, *drawn), {"kind": kind}, given=shape)

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
        """Draw a tensor: an existing one that fits, or a fresh input."""
        options = {
            "rank": rank,
            "kind": kind,
            "dtype": dtype,
            "domain": domain,
            "bound": bound,
            "empty": empty,
            "weight": weight,
            "grad": grad,
        }
        # One draw, whether the tensor exists or is fresh: when shrinking removes a statement, the
        # draws of later statements must keep their meaning. And a statement has few draws:
        # shrinking removes up to five at once.
        drawn = self._traits(shape, rank, empty=empty)
        return self._tensor(drawn, options, given=shape)

    def _tensor(self, drawn: _Traits, options: Mapping[str, Any], given: Shape | None) -> Value:
        kind, domain = options["kind"], options.get("domain")
        if domain is None and kind != "index":
            found = self._pick(drawn, self._existing(given, options.get("rank"), options))
            if found is not None:
                return self._took(found)
        weight = options.get("weight", False)
        can_train = options.get("grad", True) and self._may_require_grad()
        plain = weight and can_train and drawn.other_dtype < 5
        dtype = options.get("dtype") or self._dtype(kind, drawn.dtype, plain=plain)
        role: Role = "input"
        trains = dtype in _FLOATS or dtype.startswith("complex")
        if can_train and trains and (drawn.other_role >= self.palette.plain) != weight:
            role = "weight"
        wanted: Any = "index" if kind == "index" else domain
        bound = options.get("bound", 0)
        return self._took(
            self._fresh(drawn.shape, dtype, drawn, role=role, domain=wanted, bound=bound)
        )

    def _leads(self) -> bool:
        """Return whether the next tensor is the first operand of a call in a chain."""
        return self.palette.chains and not self._first

    def _pick(self, drawn: _Traits, found: Sequence[Value]) -> Value | None:
        if not self._leads():
            return drawn.pick(found)
        # Several elements: a value reduced to one element only leads to more of these.
        results = (v for v in found if v.name.startswith("v") and _size(v.shape) > 1)
        return drawn.pick(found, last=next(results, None))

    def _may_require_grad(self) -> bool:
        return not (self.form == "out" and self.frame.grad)

    def _took(self, value: Value) -> Value:
        self._first = self._first or value.name
        if self._same is None and value.dtype in _FLOATS:
            self._same = value.dtype
        return value

    def _allowed(self, kind: Kind) -> frozenset[str]:
        """Return the dtypes that an argument of that kind should usually have here."""
        dtypes = _KINDS[kind]
        op = self._op
        if op is None or kind not in ("float", "real"):
            return dtypes
        policy = self._policy(op)
        if policy is None or policy == "promote":
            if self.palette.mixes:
                return dtypes
            # An argument that is not cast must have a dtype that the kernel accepts.
            dtypes -= _FLOATS - set(op.floats)
        if op.mixed == "raises" and self._same is not None:
            if policy is None:
                return (dtypes - _FLOATS) | {self._same}
            # Autocast does not cast float64: an op that needs one dtype gets only float64 or none.
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
        near: Literal["", "to", "either"] = "",
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
            elif near:
                narrower = broadcasts(value.shape, shape)
                if not (narrower or (near == "either" and broadcasts(shape, value.shape))):
                    continue
            elif value.shape != shape:
                continue
            found.append(value)
            if len(found) == _CANDIDATES:
                break
        return found

    def _traits(self, shape: Shape | None, rank: Rank = None, *, empty: bool = False) -> _Traits:
        """Draw the traits of a tensor, with that shape if one is given."""
        if shape is not None:
            return _Traits(shape, *self.digits(*_TRAITS))
        low, high = _ranks(rank)
        high = min(high, max(low, 4))
        drawn = self.digits(*_TRAITS, *_shape_sizes(low, high))
        n = len(_TRAITS)
        if self._leads():
            low = max(low, min(1, high))  # an extreme or a sum of one element tests nothing
        return _Traits(_shape(drawn[n:], low, high, self.palette, empty=empty), *drawn[:n])

    def _dtype(self, kind: Kind, i: builtins.int, *, plain: bool = False) -> str:
        """Choose a dtype by number, 0 to 11; `plain` prefers float32, the dtype of weights."""
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
        drawn: _Traits,
        *,
        role: Role,
        domain: Domain | None = None,
        bound: builtins.int = 0,
    ) -> Value:
        letter = {"input": "x", "weight": "w", "buffer": "b"}[role]
        name = f"{letter}{len(self.inputs)}"
        domains, layouts = self.palette.domains, self.palette.layouts
        domain = domain or domains[drawn.domain % len(domains)]
        layout: Layout = "contiguous" if _size(shape) < 2 else layouts[drawn.layout % len(layouts)]
        spec = TensorSpec(name, shape, dtype, domain, layout, role, bound)
        self.inputs.append(spec)
        value = Value(name, shape, dtype, role == "buffer", role == "weight")
        self.values.append(value)
        return value


def _ranks(rank: int | tuple[int, int] | None) -> tuple[int, int]:
    if rank is None:
        return 0, 3
    return (rank, rank) if isinstance(rank, int) else rank


def _shape_sizes(low: int, high: int) -> list[int]:
    return [high - low + 1, 24, *[len(_DIMS)] * high]


def _shape(drawn: Sequence[int], low: int, high: int, palette: Palette, *, empty: bool) -> Shape:
    """Return the shape for choices of `_shape_sizes`."""
    how, none, *dims = drawn
    rank = _near(how, 2 - low, high - low) + low
    sizes = palette.sizes
    shape = tuple(sizes[i % len(sizes)] for i in dims[:rank])
    if empty and rank and none == 23:
        i = sum(dims) % rank
        shape = (*shape[:i], 0, *shape[i + 1 :])
    return shape if _size(shape) <= palette.most else tuple(min(s, palette.least) for s in shape)


def _near(i: int, first: int, high: int) -> int:
    """Map 0, 1, 2... to `first` and then the rest, so the usual rank is the simplest."""
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
    """Convert an argument of a catalogue entry to an argument of a program."""
    if isinstance(value, Value):
        return Ref(value.name)
    if isinstance(value, float):
        return Float(value.hex())
    if isinstance(value, (list, tuple)):
        return Items(tuple(_arg(v) for v in value))
    if value is None or isinstance(value, (bool, int, str, DType)):
        return value
    raise TypeError(f"a catalogue entry passed {value!r}: pass values, literals or lists of these")
