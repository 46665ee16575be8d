"""What a catalogue entry is: an op, the forms in which it may be called, and how to draw a call.

A catalogue file registers ops with the `op` decorator. The decorated function draws one call from
a `Builder` and says what comes out; it is the same for every form. Forms are templates of Python
source, so that the catalogue is also the one place where an op name becomes code.

No file in this package knows an autocast policy.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, Unpack

from amp_fuzz.cases.program import Statement

__all__ = ["Builder", "Call", "Kind", "Op", "Out", "Value", "broadcasts", "op", "out"]

Shape: TypeAlias = tuple[int, ...]
Kind: TypeAlias = Literal["float", "real", "int", "index", "bool", "complex", "any"]
Form: TypeAlias = Literal["function", "method", "operator", "inplace", "out", "overload", "module"]
FORMS: tuple[Form, ...] = (
    "function",
    "method",
    "operator",
    "inplace",
    "out",
    "overload",
    "module",
)


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor at hand while a program is drawn: its shape, and the dtype it is expected to have.

    `writable` says that an in-place op may write it; see `amp_fuzz.catalogue.writes`.
    """

    name: str
    shape: Shape
    dtype: str
    writable: bool = False
    requires_grad: bool = False

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)


@dataclass(frozen=True, slots=True)
class Out:
    """An output of a call: its shape and dtype.

    `dtype` None is the floating dtype that the op computes in. `keep` False is an output that
    programs do not use, such as a workspace.
    """

    shape: Shape
    dtype: str | None = None
    keep: bool = True


def out(*shapes: Shape, dtype: str | None = None) -> tuple[Out, ...]:
    """Return one `Out` for each shape, all of that dtype."""
    return tuple(Out(tuple(shape), dtype) for shape in shapes)


def broadcasts(shape: Shape, to: Shape) -> bool:
    """Return whether a shape is another one than `to` and broadcasts to it."""
    return (
        shape != to
        and len(shape) <= len(to)
        and all(s in (1, t) for s, t in zip(reversed(shape), reversed(to), strict=False))
    )


@dataclass(frozen=True, slots=True)
class Call:
    """One drawn call: positional arguments, keyword arguments, outputs.

    Arguments are values, Python literals, or lists of these. `outputs` may be given as one shape.
    """

    args: tuple[Any, ...]
    outputs: tuple[Out, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class Builder(Protocol):
    """What a catalogue entry may draw. `strategies.builder` implements it.

    Every choice shrinks towards its first option, its lower bound, or a fresh small input.
    """

    form: str
    """The form that is being drawn; an entry seldom needs it."""

    @property
    def block(self) -> builtins.int:
        """The number that the sizes of an FP8 layer are multiples of."""

    @property
    def caches(self) -> bool:
        """Whether an FP8 layer may keep its quantised weight."""

    def int(self, low: builtins.int, high: builtins.int) -> builtins.int:
        """Draw an integer from `low` to `high`, both included."""

    def choice(self, options: Sequence[Any]) -> Any:
        """Draw one of the options."""

    def flag(self) -> bool:
        """Draw a boolean, shrinking to False."""

    def digits(self, *sizes: builtins.int) -> list[builtins.int]:
        """Draw several independent integers at once, each in [0, size)."""

    def dim(self) -> builtins.int:
        """Draw the size of a dimension, 1 or more; small most of the time."""

    def shape(self, low: builtins.int = 0, high: builtins.int = 3, *, empty: bool = True) -> Shape:
        """Draw a shape of `low` to `high` dimensions; with `empty`, seldom one with a 0 in it."""

    def tensor(
        self,
        shape: Shape | None = None,
        *,
        rank: builtins.int | tuple[builtins.int, builtins.int] | None = None,
        kind: Kind = "float",
        dtype: str | None = None,
        domain: str | None = None,
        bound: builtins.int = 0,
        empty: bool = False,
        weight: bool = False,
        grad: bool = True,
    ) -> Value:
        """Draw a tensor: a value that the program already has and that fits, or a fresh input.

        `shape` None draws any of `rank` (an exact rank or inclusive bounds; default 0 to 3).
        `domain` asks for a fresh input of that value domain; ``kind="index"`` for int64 in
        ``[0, bound)``. `empty` allows a dimension of size 0 where the shape is drawn. `weight`
        prefers a leaf that requires grad. `grad` False: a tensor that does not require grad.
        Without `dtype` the dtype follows `kind`, and the op's `mixed` rule: an op with
        ``mixed="raises"`` gets tensors of one dtype most of the time.
        """

    def receiver(self, shape: Shape | None = None, **options: Any) -> Value:
        """Draw the tensor that a method is called on: writable if the form is in-place."""

    def broadcastable(self, shape: Shape, *, kind: Kind = "float", either: bool = False) -> Value:
        """Draw a tensor that broadcasts to `shape`, itself of that shape most of the time.

        `either` also takes one at hand that `shape` broadcasts to.
        """

    def scalar(self, kind: Literal["float", "int"] = "float") -> Any:
        """Draw a Python number."""

    def dimension(self, rank: builtins.int) -> builtins.int:
        """Draw a dimension of a tensor of `rank`, counted from either end."""

    def options(self, **options: Sequence[Any]) -> dict[str, Any]:
        """Draw keyword arguments; one whose first option is drawn is left out: the default."""


Build: TypeAlias = Callable[[Any], Call]
ViewIf: TypeAlias = Callable[[Statement, Mapping[str, Shape]], bool]
"""Takes a call and the shapes of values by name, as far as they are known."""


@dataclass(frozen=True, slots=True)
class Op:
    """An op of the catalogue.

    name: the key in a case file. family: the catalogue file. overloads: the ATen overloads whose
    autocast kernels the forms reach on some device, the first one deciding what dtype is expected;
    empty for an op that no table lists. forms: form -> template. mixed: whether floating inputs of
    several dtypes promote or raise where autocast does not cast. floats: the floating dtypes that
    kernels take. devices: device types where it can run; None is all. view: the output may share
    memory with the first argument. view_if: the calls for which that holds, if not for all.
    read_only: an output must not be written in place, because its elements share memory or because
    autograd forbids it for one of several views. unpacks: it returns a sequence even when that
    holds one tensor. imports: the modules that a script must import before it can call the op;
    torch aside. torch: the versions of torch that have it, as pip writes them; empty is all.
    cpu_scalars, cpu_tensors: the arguments, by position, that may be on the CPU beside tensors of
    another device: one of the former, if it has no dimensions; all of the latter, of any shape.
    setup: a line of source before the program, which makes what the form calls.
    fp8: it quantises in an FP8 region, so only a backend that has recipes can run it.
    random: it draws random numbers.
    """

    name: str
    family: str
    overloads: tuple[str, ...]
    forms: Mapping[str, str]
    build: Build
    mixed: Literal["promotes", "raises"] = "promotes"
    floats: tuple[str, ...] = ("float32", "bfloat16", "float16", "float64")
    devices: tuple[str, ...] | None = None
    view: bool = False
    unpacks: bool = False
    imports: tuple[str, ...] = ()
    torch: str = ""
    cpu_scalars: tuple[int, ...] = ()
    cpu_tensors: tuple[int, ...] = ()
    setup: str = ""
    fp8: bool = False
    view_if: ViewIf | None = None
    read_only: bool = False
    random: bool = False

    def render(self, form: str, args: Sequence[str], kwargs: Sequence[tuple[str, str]]) -> str:
        """Return the Python expression of a call, from the source text of its arguments."""
        template = self.forms[form]
        words = [*args, *(f"{name}={text}" for name, text in kwargs)]

        def fill(match: re.Match[str]) -> str:
            key = match[1]
            if key == "args":
                return ", ".join(words)
            if key.startswith("args"):  # {args1}: all but the first
                return ", ".join(words[int(key[4:]) :])
            return args[int(key)] if key.isdigit() else dict(kwargs)[key]

        return _HOLE.sub(fill, template)

    def holes(self, form: str) -> tuple[tuple[str, bool], ...]:
        """Return what a form needs: each position or keyword, and whether it must be a tensor.

        A literal is not Python before a dot (``5.abs()``), and raises a warning before a bracket.
        """
        return _holes(self.forms[form])


_HOLE = re.compile(r"\{([a-z]*\d*)\}")
_NEEDED = re.compile(r"\{(\d+|(?!args\d*\})[a-z]+\d*)\}(\.|\[| is )?")


@lru_cache(maxsize=4096)
def _holes(template: str) -> tuple[tuple[str, bool], ...]:
    return tuple((hole[1], hole[2] is not None) for hole in _NEEDED.finditer(template))


class Traits(TypedDict, total=False):
    """The fields of `Op` that have a default."""

    mixed: Literal["promotes", "raises"]
    floats: tuple[str, ...]
    devices: tuple[str, ...] | None
    view: bool
    unpacks: bool
    imports: tuple[str, ...]
    torch: str
    cpu_scalars: tuple[int, ...]
    cpu_tensors: tuple[int, ...]
    setup: str
    fp8: bool
    view_if: ViewIf | None
    read_only: bool
    random: bool


REGISTRY: dict[str, Op] = {}


def op(
    name: str,
    *overloads: str,
    function: str | None = None,
    method: str | None = None,
    operator: str | None = None,
    inplace: str | None = None,
    out: str | None = None,
    overload: str | None = None,
    module: str | None = None,
    family: str | None = None,
    **traits: Unpack[Traits],
) -> Callable[[Build], Build]:
    """Register an op whose calls the decorated function draws.

    `overloads` are written ``"aten::addmm"``. Forms: `function` and `out` are a callable
    (``"torch.addmm"``), `method` and `inplace` a method name, `operator` a template
    (``"{0} @ {1}"``), `overload` a callable under ``torch.ops.aten``, `module` a template for
    what none of these says. A template has holes ``{0}``, ``{1}`` for positional arguments,
    ``{args}`` for all, ``{args1}`` for all but the first, ``{name}`` for a keyword's value. Any
    form may be given as a template: text with a hole is taken as one. `family` is by default the
    catalogue file. The other arguments are fields of `Op`.
    """

    def template(text: str, plain: str) -> str:
        return text if "{" in text else plain.format(text)

    def register(build: Build) -> Build:
        given: list[tuple[str, str | None, str]] = [
            ("function", function, "{}({{args}})"),
            ("method", method, "{{0}}.{}({{args1}})"),
            ("operator", operator, "{}"),
            ("inplace", inplace, "{{0}}.{}({{args1}})"),
            ("out", out, "{}({{args}})"),
            ("overload", overload, "torch.ops.aten.{}({{args}})"),
            ("module", module, "{}({{args}})"),
        ]
        forms = {form: template(text, plain) for form, text, plain in given if text is not None}
        if not forms:
            raise ValueError(
                f"op {name!r} has no form: give at least one, as in function='torch.mm'"
            )
        if name in REGISTRY:
            raise ValueError(f"op {name!r} is registered twice")
        family_ = family or build.__module__.rpartition(".")[2]
        REGISTRY[name] = Op(name, family_, tuple(overloads), forms, build, **traits)
        return build

    return register
