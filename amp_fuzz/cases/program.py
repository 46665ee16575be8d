"""Programs: random op graphs with the contexts that surround them, as frozen data.

A program is typed inputs, a body of statements and regions, and outputs. It contains only names and
literals; the catalogue says what a call means. So reading a program never runs anything in it. This
module imports neither torch nor Hypothesis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, TypeAlias, get_args

import msgspec

from amp_fuzz.cases.literals import check_bits, numbers

__all__ = [
    "DTYPES",
    "FLOAT_DTYPES",
    "FP8",
    "Arg",
    "Autocast",
    "AutocastDType",
    "Branch",
    "Checkpoint",
    "DType",
    "Float",
    "InferenceMode",
    "Items",
    "NoGrad",
    "Node",
    "Program",
    "ProgramError",
    "Ref",
    "Region",
    "Statement",
    "TensorSpec",
    "Uncompiled",
    "refs",
    "regions",
    "returning_all",
    "returning_last",
    "statements",
    "substituted",
    "transform",
    "unwrapped",
    "uses",
]

FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")
DTYPES = (*FLOAT_DTYPES, "complex64", "complex128", "int64", "int32", "uint8", "bool")

Domain: TypeAlias = Literal[
    "normal",
    "uniform",
    "integers",
    "positive",
    "unit",
    "overflow",
    "subnormal",
    "ties",
    "cancelling",
    "zeros",
    "index",
    "psd",
]
Layout: TypeAlias = Literal["contiguous", "transposed", "strided", "offset"]
Role: TypeAlias = Literal["input", "weight", "buffer"]
Place: TypeAlias = Literal["", "cpu"]


class ProgramError(ValueError):
    """A program that is not well formed. The message names the place, its value and the way out."""


class Ref(msgspec.Struct, frozen=True, tag="ref", forbid_unknown_fields=True):
    """The value of that name: an input or the output of an earlier statement."""

    name: str


class Float(msgspec.Struct, frozen=True, tag="float", forbid_unknown_fields=True):
    """A float literal, as ``float.hex()`` writes it: NaN, -0.0 and every bit survive JSON."""

    hex: str

    @property
    def value(self) -> float:
        """The float itself."""
        return float.fromhex(self.hex)


class DType(msgspec.Struct, frozen=True, tag="dtype", forbid_unknown_fields=True):
    """A torch dtype by name, one of `DTYPES`."""

    name: str


class Items(msgspec.Struct, frozen=True, tag="items", forbid_unknown_fields=True):
    """A list of arguments: tensors for ``cat``, sizes, dims."""

    items: tuple[Arg, ...]


Arg: TypeAlias = "Ref | Float | DType | Items | int | bool | str | None"


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An input tensor: its type, and which values it draws.

    `role` says how the program uses it: an ``input`` carries no gradient, a ``weight`` is a leaf
    that requires grad (a candidate for autocast's weight cache), a ``buffer`` may be written in
    place. `bound` is the exclusive upper limit of the ``index`` domain. `layout` is the layout of
    the values in memory: ``transposed`` and ``strided`` have other strides than a fresh tensor of
    that shape, and ``offset`` is a view into a larger tensor. `values` are the elements, as
    `amp_fuzz.cases.literals` writes them; then nothing is drawn, and `domain` is ignored. `device`
    is where it is: "" on the device under test, "cpu" on the CPU.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    domain: Domain = "normal"
    layout: Layout = "contiguous"
    role: Role = "input"
    bound: int = 0
    values: str = ""
    device: Place = ""

    @property
    def requires_grad(self) -> bool:
        """Whether it is a leaf that collects a gradient."""
        return self.role == "weight"


class Statement(msgspec.Struct, frozen=True, tag="statement", forbid_unknown_fields=True):
    """One call of a catalogue op in one of its forms; ``_`` in `outputs` is a discarded value."""

    op: str
    form: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()
    outputs: tuple[str, ...] = ()


class Autocast(msgspec.Struct, frozen=True, tag="autocast", forbid_unknown_fields=True):
    """``autocast(device, dtype=..., enabled=..., cache_enabled=...)``.

    `device` None is the device under test; a name is always that device. `dtype` None is the
    device's default.
    """

    device: str | None = None
    dtype: str | None = None
    enabled: bool = True
    cache_enabled: bool | None = None


class NoGrad(msgspec.Struct, frozen=True, tag="no_grad", forbid_unknown_fields=True):
    """``torch.no_grad()``."""


class InferenceMode(msgspec.Struct, frozen=True, tag="inference_mode", forbid_unknown_fields=True):
    """``torch.inference_mode()``."""


class Checkpoint(msgspec.Struct, frozen=True, tag="checkpoint", forbid_unknown_fields=True):
    """``torch.utils.checkpoint.checkpoint`` over the region's body, which becomes a function.

    selective: whether it saves the results of products, and computes only the rest again.
    """

    use_reentrant: bool = False
    selective: bool = False


class Uncompiled(msgspec.Struct, frozen=True, tag="uncompiled", forbid_unknown_fields=True):
    """``torch.compiler.disable`` over the region's body, which becomes a function.

    A compiler ends its graph before the body, and starts another after it.
    """


class Branch(msgspec.Struct, frozen=True, tag="branch", forbid_unknown_fields=True):
    """A branch that depends on data, in a function with the region's body.

    Both sides have the body's last statement, and return from inside its region. A compiler inlines
    the call, and ends its graph at the branch.
    """


FP8Recipe: TypeAlias = Literal[
    "tensorwise", "rowwise", "current", "delayed", "blockwise", "mxfp8", "nvfp4"
]


class FP8(msgspec.Struct, frozen=True, tag="fp8", forbid_unknown_fields=True):
    """``fp8(recipe, ...)``: how the calls of ``fp8_linear`` in the region quantise.

    recipe: a published one: see `amp_fuzz.reference.fp8.scaling`. format: of all tensors; HYBRID is
    E5M2 for gradients, and E4M3 for the rest; nvfp4 has a format of its own. history, algorithm,
    margin: of delayed scaling.
    """

    recipe: FP8Recipe = "tensorwise"
    format: Literal["HYBRID", "E4M3", "E5M2"] = "HYBRID"
    enabled: bool = True
    history: int = 16
    algorithm: Literal["max", "most_recent"] = "max"
    margin: int = 0


Context: TypeAlias = Autocast | NoGrad | InferenceMode | Checkpoint | FP8 | Uncompiled | Branch


class AutocastDType(msgspec.Struct, frozen=True, tag="autocast_dtype", forbid_unknown_fields=True):
    """``torch.set_autocast_dtype(device, dtype)``, and back: of contexts that name no dtype."""

    dtype: Literal["bfloat16", "float16"]


Around: TypeAlias = Autocast | NoGrad | AutocastDType
"""What may be around a later call of a program."""


class Region(msgspec.Struct, frozen=True, tag="region", forbid_unknown_fields=True):
    """A block under a context. Its values outlive it, as in Python."""

    context: Context
    body: tuple[Node, ...]


Node: TypeAlias = "Statement | Region"


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Typed inputs, a body, and the names of the values that it returns."""

    inputs: tuple[TensorSpec, ...]
    body: tuple[Node, ...]
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        return pretty(self)

    @property
    def mixed(self) -> bool:
        """Whether some inputs are on the CPU, whatever the device under test."""
        return any(spec.device for spec in self.inputs)

    def check(self) -> None:
        """Raise `ProgramError` unless every name is defined once, before its use, and well formed.

        It checks everything that needs no catalogue: names, dtypes, shapes, the nesting.
        `amp_fuzz.catalogue.check` also looks up each op, form and number of outputs.
        """
        defined: set[str] = set()
        for i, spec in enumerate(self.inputs):
            _check_spec(spec, f"$.inputs[{i}]")
            _define(spec.name, defined, f"$.inputs[{i}].name")
        _check_body(self.body, defined, "$.body")
        if not self.outputs:
            raise ProgramError("$.outputs is empty: a program returns at least one value")
        for i, name in enumerate(self.outputs):
            if name not in defined:
                raise ProgramError(f"$.outputs[{i}]={name!r} is not defined in the program")


def statements(body: tuple[Node, ...]) -> Iterator[Statement]:
    """Yield every statement of a body, in the order of execution, regions included."""
    for node in body:
        if isinstance(node, Statement):
            yield node
        else:
            yield from statements(node.body)


def regions(body: tuple[Node, ...]) -> Iterator[Context]:
    """Yield the contexts of every region of a body, outer before inner."""
    for node in body:
        if isinstance(node, Region):
            yield node.context
            yield from regions(node.body)


def transform(
    body: tuple[Node, ...],
    *,
    region: Callable[[Region, tuple[Node, ...]], Iterable[Node]] = lambda node, body: (
        Region(node.context, body),
    ),
    statement: Callable[[Statement], Iterable[Node]] = lambda node: (node,),
) -> tuple[Node, ...]:
    """Return a body with its nodes replaced, in the order of execution.

    region: takes a region and its body, already transformed, and returns the replacement.
    statement: takes a statement and returns the replacement.
    """
    nodes: list[Node] = []
    for node in body:
        if isinstance(node, Region):
            nodes += region(node, transform(node.body, region=region, statement=statement))
        else:
            nodes += statement(node)
    return tuple(nodes)


def unwrapped(body: tuple[Node, ...], kinds: tuple[type, ...]) -> tuple[Node, ...]:
    """Return a body without the regions of some kinds, but with their statements."""
    return transform(
        body,
        region=lambda node, inner: (
            inner if isinstance(node.context, kinds) else (Region(node.context, inner),)
        ),
    )


def refs(arg: Arg) -> Iterator[str]:
    """Yield the names that an argument refers to."""
    if isinstance(arg, Ref):
        yield arg.name
    elif isinstance(arg, Items):
        for item in arg.items:
            yield from refs(item)


def uses(statement: Statement) -> Iterator[str]:
    """Yield the names that a statement reads, in the order of its arguments."""
    for arg in (*statement.args, *(arg for _, arg in statement.kwargs)):
        if isinstance(arg, Ref):
            yield arg.name
        elif isinstance(arg, Items):
            yield from refs(arg)


def substituted(statement: Statement, names: Mapping[str, str]) -> Statement:
    """Return a statement with some of the values that it reads replaced."""

    def change(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(names.get(arg.name, arg.name))
        if isinstance(arg, Items):
            return Items(tuple(change(a) for a in arg.items))
        return arg

    return msgspec.structs.replace(
        statement,
        args=tuple(change(a) for a in statement.args),
        kwargs=tuple((k, change(a)) for k, a in statement.kwargs),
    )


def downstream(program: Program, name: str) -> frozenset[str]:
    """Return the names of the values that may be computed from a value, itself included.

    If a program writes in place, memory is shared, and any statement that touches a name may change
    it. Then every connected name counts.
    """
    calls = list(statements(program.body))
    written = any(s.form in ("inplace", "out") for s in calls)
    reached, before = {name}, 0
    while len(reached) > before:
        before = len(reached)
        for call in calls:
            read = set(uses(call))
            if written and reached.intersection({*read, *call.outputs}):
                reached |= {*read, *call.outputs}
            elif reached & read:
                reached |= set(call.outputs)
    return frozenset(reached)


def returning_all(program: Program) -> Program:
    """Return the program with every value as an output."""
    made = (n for s in statements(program.body) for n in s.outputs if n != "_")
    return msgspec.structs.replace(program, outputs=tuple(made))


def returning_last(program: Program) -> Program:
    """Return the program with only the outputs that no statement reads, or with all if none."""
    read = {n for s in statements(program.body) for n in uses(s)}
    last = tuple(n for n in program.outputs if n not in read)
    return msgspec.structs.replace(program, outputs=last or program.outputs)


def pretty(program: Program) -> str:
    """Return the one canonical listing of a program; for reading, not for running."""
    lines = [f"{s.name}: {_type_of(s)}" for s in program.inputs]
    lines += _pretty_body(program.body, 0)
    lines.append("return " + ", ".join(program.outputs))
    return "\n".join(lines)


def _pretty_body(body: tuple[Node, ...], depth: int) -> list[str]:
    pad = "    " * depth
    lines = []
    for node in body:
        if isinstance(node, Region):
            lines.append(f"{pad}{show_context(node.context)}:")
            lines += _pretty_body(node.body, depth + 1)
        else:
            args = [show_arg(a) for a in node.args] + [f"{k}={show_arg(a)}" for k, a in node.kwargs]
            form = "" if node.form == "function" else f"[{node.form}]"
            lines.append(f"{pad}{', '.join(node.outputs)} = {node.op}{form}({', '.join(args)})")
    return lines


def show_arg(arg: Arg) -> str:
    """Return an argument as in the listing."""
    if isinstance(arg, Ref):
        return arg.name
    if isinstance(arg, Float):
        return repr(arg.value)
    if isinstance(arg, DType):
        return arg.name
    if isinstance(arg, Items):
        return "[" + ", ".join(show_arg(a) for a in arg.items) + "]"
    return repr(arg)


def show_context(context: Context | Around) -> str:
    """Return a context as in the listing."""
    if isinstance(context, AutocastDType):
        return f"autocast_dtype({context.dtype})"
    if isinstance(context, FP8):
        return f"fp8({', '.join(fp8_words(context))})"
    if isinstance(context, Checkpoint) and (context.use_reentrant or context.selective):
        return f"checkpoint({'reentrant' if context.use_reentrant else 'selective'})"
    if not isinstance(context, Autocast):
        return str(context.__struct_config__.tag)
    parts = [context.device or "device"]
    parts += [context.dtype] if context.dtype else []
    parts += [] if context.enabled else ["enabled=False"]
    parts += [] if context.cache_enabled is None else [f"cache_enabled={context.cache_enabled}"]
    return f"autocast({', '.join(parts)})"


def fp8_words(context: FP8) -> list[str]:
    """Return the arguments of an FP8 context, as source."""
    words = [repr(context.recipe)]
    for field in msgspec.structs.fields(context)[1:]:
        value = getattr(context, field.name)
        words += [f"{field.name}={value!r}"] if value != field.default else []
    return words


def _type_of(spec: TensorSpec) -> str:
    words = [spec.dtype + str(list(spec.shape)), _values_of(spec)]
    words += [] if spec.layout == "contiguous" else [spec.layout]
    words += [] if spec.role == "input" else [spec.role]
    words += [f"on the {spec.device.upper()}"] if spec.device else []
    return " ".join(words)


def _values_of(spec: TensorSpec) -> str:
    if not spec.values:
        return spec.domain
    shown = numbers(spec.values, spec.dtype)
    return f"[{', '.join(map(repr, shown[:8]))}{', ...' if len(shown) > 8 else ''}]"


MAX_ELEMENTS = 1 << 22
MAX_RANK = 32
# CPython compiles at most 20 nested blocks, and 200 nested brackets.
MAX_DEPTH = 16
MAX_ITEMS_DEPTH = 8
_LONGEST_NAME = 9


def _check_spec(spec: TensorSpec, where: str) -> None:
    if spec.dtype not in DTYPES:
        raise ProgramError(
            f"{where}.dtype={spec.dtype!r} is unknown: use one of {', '.join(DTYPES)}"
        )
    if len(spec.shape) > MAX_RANK:
        raise ProgramError(
            f"{where}.shape has {len(spec.shape)} dimensions: use {MAX_RANK} at most"
        )
    elements = 1
    for size in spec.shape:
        if size < 0:
            raise ProgramError(f"{where}.shape={list(spec.shape)} has a negative size")
        elements *= max(size, 1)  # [0, 2**70] has no elements, but is not a valid shape either
    if elements > MAX_ELEMENTS:
        raise ProgramError(
            f"{where}.shape={list(spec.shape)} has more than {MAX_ELEMENTS} elements"
        )
    if spec.requires_grad and spec.dtype not in (*FLOAT_DTYPES, "complex64", "complex128"):
        raise ProgramError(f"{where}.role='weight' needs a floating or complex dtype")
    if spec.domain == "index" and not 1 <= spec.bound <= MAX_ELEMENTS:
        raise ProgramError(
            f"{where}.bound={spec.bound}: use 1 to {MAX_ELEMENTS} for the index domain"
        )
    if spec.values and (wrong := check_bits(spec.values, spec.dtype, math.prod(spec.shape))):
        raise ProgramError(f"{where}.values {wrong}")


def _define(name: str, defined: set[str], where: str) -> None:
    # Names become Python identifiers in the generated source: nothing else may pass.
    if len(name) > _LONGEST_NAME:
        raise ProgramError(f"{where} has {len(name)} characters: use {_LONGEST_NAME} at most")
    if not (name.isascii() and name[:1].isalpha() and name.isalnum()):
        raise ProgramError(f"{where}={name!r} is not a name: use a letter, then letters and digits")
    if name[0] not in "xwbv" or not name[1:].isdigit():
        raise ProgramError(f"{where}={name!r} must be x, w, b or v followed by a number, as in v3")
    if name in defined:
        raise ProgramError(f"{where}={name!r} is defined twice")
    defined.add(name)


def _check_body(body: tuple[Node, ...], defined: set[str], where: str, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise ProgramError(f"{where} nests more than {MAX_DEPTH} regions")
    for i, node in enumerate(body):
        here = f"{where}[{i}]"
        if isinstance(node, Region):
            check_context(node.context, f"{here}.context")
            if not node.body:
                raise ProgramError(f"{here}.body is empty: a region holds at least one statement")
            _check_body(node.body, defined, f"{here}.body", depth + 1)
            continue
        for name in uses(node):
            if name not in defined:
                raise ProgramError(f"{here} uses {name!r}, which is not defined before it")
        for arg in (*node.args, *(a for _, a in node.kwargs)):
            _check_literal(arg, here)
        for j, name in enumerate(node.outputs):
            if name != "_":
                _define(name, defined, f"{here}.outputs[{j}]")


def _check_literal(arg: Arg, where: str, depth: int = 0) -> None:
    if isinstance(arg, int) and not -(2**63) <= arg < 2**63:
        raise ProgramError(f"{where} has an integer of more than 64 bits")
    if isinstance(arg, DType) and arg.name not in DTYPES:
        raise ProgramError(f"{where} has dtype {arg.name!r}: use one of {', '.join(DTYPES)}")
    if isinstance(arg, Float):
        try:
            float.fromhex(arg.hex)
        except (ValueError, OverflowError):
            raise ProgramError(
                f"{where} has float {arg.hex!r}: write it as float.hex() does, as in '0x1.8p+0'"
            ) from None
    if isinstance(arg, Items):
        if depth == MAX_ITEMS_DEPTH:
            raise ProgramError(f"{where} nests more than {MAX_ITEMS_DEPTH} lists")
        for item in arg.items:
            _check_literal(item, where, depth + 1)


DEVICES = ("cpu", "cuda", "xpu", "mps", "mtia", "maia")


MAX_HISTORY = 1024


def check_context(context: Context | Around, where: str) -> None:
    if isinstance(context, FP8):
        _check_fp8(context, where)
    if isinstance(context, Checkpoint) and context.use_reentrant and context.selective:
        raise ProgramError(f"{where}.selective=True needs use_reentrant=False")
    if not isinstance(context, Autocast):
        return
    if context.dtype is not None and context.dtype not in FLOAT_DTYPES:
        raise ProgramError(f"{where}.dtype={context.dtype!r}: use one of {', '.join(FLOAT_DTYPES)}")
    if context.device is not None and context.device not in DEVICES:
        raise ProgramError(f"{where}.device={context.device!r}: use one of {', '.join(DEVICES)}")


def _check_fp8(context: FP8, where: str) -> None:
    for name, low, high in (("history", 1, MAX_HISTORY), ("margin", -16, 16)):
        if not low <= getattr(context, name) <= high:
            raise ProgramError(f"{where}.{name}={getattr(context, name)}: use {low} to {high}")
    only = {"history": "delayed", "algorithm": "delayed", "margin": "delayed"}
    for field in msgspec.structs.fields(context):
        changed = getattr(context, field.name) != field.default
        if changed and context.recipe != only.get(field.name, context.recipe):
            raise ProgramError(f"{where}.{field.name} belongs to the recipe {only[field.name]!r}")
    if context.recipe == "nvfp4" and context.format != "HYBRID":
        raise ProgramError(f"{where}.format={context.format!r}: nvfp4 has its own: leave it out")


DOMAINS: tuple[str, ...] = get_args(Domain)
LAYOUTS: tuple[str, ...] = get_args(Layout)
