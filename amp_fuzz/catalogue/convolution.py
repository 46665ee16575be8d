"""Convolutions: the public calls, the modules, and the overloads that backends are called by."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from amp_fuzz.catalogue.core import Builder, Call, Value, op, out

# (stride, padding, dilation); a pair is spread over the spatial dimensions in turn.
_WINDOWS: tuple[tuple[Any, Any, Any], ...] = (
    (1, 0, 1),
    (2, 0, 1),
    (1, 1, 1),
    (2, 1, 1),
    (1, 0, 2),
    ((2, 1), (0, 1), 1),
    (1, (2, 0), (1, 2)),
    (3, 2, 1),
)


@dataclass(frozen=True, slots=True)
class _Axis:
    """What a convolution does along one spatial dimension."""

    size: int
    kernel: int
    stride: int
    padding: int
    dilation: int
    output_padding: int = 0

    @property
    def convolved(self) -> int:
        return (self.size + 2 * self.padding - self.reach) // self.stride + 1

    @property
    def transposed(self) -> int:
        grown = (self.size - 1) * self.stride + self.reach
        return grown - 2 * self.padding + self.output_padding

    @property
    def reach(self) -> int:
        """How many elements the dilated kernel spans."""
        return self.dilation * (self.kernel - 1) + 1


@dataclass(frozen=True, slots=True)
class _Convolution:
    """A drawn convolution, or its transpose."""

    input: Value
    weight: Value
    bias: Value | None
    shape: tuple[int, ...]
    axes: tuple[_Axis, ...]
    groups: int

    @property
    def tensors(self) -> tuple[Value, Value, Value | None]:
        return self.input, self.weight, self.bias

    def all(self, name: str) -> list[int]:
        """Return an option as a list with one number a spatial dimension."""
        return [getattr(axis, name) for axis in self.axes]

    def options(self, *names: str) -> dict[str, Any]:
        """Return those options as the public calls take them, leaving out the defaults."""
        given: dict[str, Any] = {}
        for name in names:
            values = self.all(name)
            if set(values) != {int(name in ("stride", "dilation"))}:
                given[name] = values if len(set(values)) > 1 else values[0]
        return given | ({"groups": self.groups} if self.groups > 1 else {})

    def every(self, *names: str) -> dict[str, Any]:
        """Return those options, and what else a module is made with."""
        # A hole of a template has no underscore in its name.
        channels = {"inner": self.input.shape[-len(self.axes) - 1], "made": self.made}
        return {n.replace("_", ""): self.all(n) for n in names} | channels | {"groups": self.groups}

    @property
    def made(self) -> int:
        return self.shape[-len(self.axes) - 1]


Padding = Literal["number", "same", "valid"]


def _convolution(
    g: Builder,
    n: int,
    *,
    transposed: bool = False,
    batched: bool = False,
    padding: Padding = "number",
    bias: bool = True,
) -> _Convolution:
    """Draw a legal convolution over `n` dimensions of whatever input is drawn."""
    x = g.tensor(rank=n + 2 if batched else (n + 1, n + 2))
    *batch, channels = x.shape[:-n]
    stride, pad, dilation = g.choice(_WINDOWS)
    kernel = g.choice((2, 3, 1, (3, 1)))
    extra = int(transposed and g.flag())
    axes = tuple(
        _legal(
            _Axis(size, _at(kernel, i), _at(stride, i), _at(pad, i), _at(dilation, i), extra),
            transposed=transposed,
            padding=padding,
        )
        for i, size in enumerate(x.shape[-n:])
    )
    groups = g.choice((1, channels))
    made = groups * g.choice((2, 1, 3))
    pair = (channels, made // groups) if transposed else (made, channels // groups)
    weight = g.tensor((*pair, *(axis.kernel for axis in axes)), weight=True)
    spatial = [
        axis.transposed if transposed else axis.size if padding == "same" else axis.convolved
        for axis in axes
    ]
    shape = (*batch, made, *spatial)
    added = g.tensor((made,), weight=True) if bias and g.flag() else None
    return _Convolution(x, weight, added, shape, axes, groups)


def _at(value: int | tuple[int, ...], i: int) -> int:
    return value if isinstance(value, int) else value[i % len(value)]


def _legal(axis: _Axis, *, transposed: bool, padding: Padding) -> _Axis:
    """Return an axis along which at least one element comes out."""
    if padding == "same":  # takes no stride, pads by itself, and warns where the kernel is even
        return replace(axis, stride=1, padding=0, kernel=axis.kernel | 1)
    if padding == "valid":
        axis = replace(axis, padding=0)
    if transposed:
        # Padding takes away from the output here; output_padding must be less than the stride.
        reached = (axis.size - 1) * axis.stride + axis.reach
        extra = axis.output_padding if axis.stride > 1 else 0
        return replace(axis, padding=min(axis.padding, (reached - 1) // 2), output_padding=extra)
    fits = (axis.size + 2 * axis.padding - 1) // axis.dilation + 1
    return replace(axis, kernel=min(axis.kernel, fits))


_OPTIONS = ("stride", "padding", "dilation")
_MODULE = (
    "torch.func.functional_call(torch.nn.{}({{inner}}, {{made}}, {{1}}.shape[2:], "
    "stride={{stride}}, padding={{padding}}, dilation={{dilation}}, groups={{groups}}, {}, "
    "bias={{2}} is not None, device='meta'), dict(weight={{1}}, bias={{2}}), ({{0}},))"
)


def _register(n: int) -> None:
    @op(f"conv{n}d", f"aten::conv{n}d", function=f"torch.conv{n}d", mixed="raises")
    def _conv(g: Builder) -> Call:
        c = _convolution(g, n)
        return Call(c.tensors, out(c.shape), c.options(*_OPTIONS))

    # Only the CPU table lists conv1d.padding; elsewhere it is the convolution inside that casts.
    @op(
        f"conv{n}d.padding",
        f"aten::conv{n}d.padding",
        "aten::convolution",
        function=f"torch.conv{n}d",
        mixed="raises",
    )
    def _conv_padding(g: Builder) -> Call:
        padding: Padding = g.choice(("same", "valid"))
        c = _convolution(g, n, padding=padding)
        options = c.options("dilation") if padding == "same" else c.options("stride", "dilation")
        return Call(c.tensors, out(c.shape), {"padding": padding} | options)

    # Padding modes other than zeros call `pad`, which the CPU table lists in pieces.
    listed = {1: ("reflection_pad1d", "replication_pad1d"), 3: ("replication_pad3d",)}
    pads = listed.get(n, (f"reflection_pad{n}d", f"replication_pad{n}d"))

    @op(
        f"Conv{n}d",
        f"aten::conv{n}d",
        *(f"aten::{pad}" for pad in pads),
        module=_MODULE.format(f"Conv{n}d", "padding_mode={mode}"),
        mixed="raises",
    )
    def _module(g: Builder) -> Call:
        c = _convolution(g, n)
        # A reflected or circular pad is less than what it pads.
        fits = all(axis.padding < axis.size for axis in c.axes)
        modes = ("zeros", "replicate", *(("reflect", "circular") if fits else ()))
        mode = g.choice(modes if any(c.all("padding")) else modes[:1])
        return Call(c.tensors, out(c.shape), c.every(*_OPTIONS) | {"mode": mode})

    transpose = f"aten::conv_transpose{n}d" + ("" if n == 1 else ".input")

    @op(f"conv_transpose{n}d", transpose, function=f"torch.conv_transpose{n}d", mixed="raises")
    def _transpose(g: Builder) -> Call:
        c = _convolution(g, n, transposed=True)
        return Call(c.tensors, out(c.shape), c.options(*_OPTIONS, "output_padding"))

    @op(
        f"ConvTranspose{n}d",
        transpose,
        module=_MODULE.format(f"ConvTranspose{n}d", "output_padding={outputpadding}"),
        mixed="raises",
    )
    def _transpose_module(g: Builder) -> Call:
        c = _convolution(g, n, transposed=True)
        return Call(c.tensors, out(c.shape), c.every(*_OPTIONS, "output_padding"))


for _n in (1, 2, 3):
    _register(_n)


# The flags that backends read: benchmark, deterministic, cudnn_enabled, allow_tf32.
_FLAGS = (False, True, True, False)


def _raw(g: Builder, *flags: bool) -> Call:
    # Where a table does not list the call, groups may be joined by `cat`, which it does list.
    transposed = g.flag()
    c = _convolution(g, g.choice((2, 1, 3)), transposed=transposed, batched=True)
    window = (c.all("stride"), c.all("padding"), c.all("dilation"))
    rest = (transposed, c.all("output_padding"), c.groups, *flags)
    return Call((*c.tensors, *window, *rest), out(c.shape))


@op(
    "convolution",
    "aten::convolution",
    "aten::cat",
    function="torch.convolution",
    overload="convolution.default",
    mixed="raises",
)
def _raw_convolution(g: Builder) -> Call:
    return _raw(g)


@op(
    "_convolution",
    "aten::_convolution",
    "aten::cat",
    function="torch._convolution",
    overload="_convolution.default",
    mixed="raises",
)
def _raw_private(g: Builder) -> Call:
    return _raw(g, *_FLAGS)


@op(
    "_convolution.deprecated",
    "aten::_convolution.deprecated",
    function="torch._convolution",
    overload="_convolution.deprecated",
    mixed="raises",
)
def _raw_deprecated(g: Builder) -> Call:
    return _raw(g, *_FLAGS[:3])


@op(
    "cudnn_convolution",
    "aten::cudnn_convolution",
    function="torch.cudnn_convolution",
    overload="cudnn_convolution.default",
    mixed="raises",
    devices=("cuda",),
)
def _cudnn(g: Builder) -> Call:
    c = _convolution(g, g.choice((2, 3)), batched=True, bias=False)
    window = (c.all("padding"), c.all("stride"), c.all("dilation"))
    return Call((c.input, c.weight, *window, c.groups, False, True, False), out(c.shape))


@op(
    "cudnn_convolution_transpose",
    "aten::cudnn_convolution_transpose",
    function="torch.cudnn_convolution_transpose",
    overload="cudnn_convolution_transpose.default",
    mixed="raises",
    devices=("cuda",),
)
def _cudnn_transpose(g: Builder) -> Call:
    c = _convolution(g, g.choice((2, 3)), transposed=True, batched=True, bias=False)
    window = (c.all("padding"), c.all("output_padding"), c.all("stride"), c.all("dilation"))
    return Call((c.input, c.weight, *window, c.groups, False, True, False), out(c.shape))


@op(
    "_mps_convolution",
    "aten::_mps_convolution",
    overload="_mps_convolution.default",
    mixed="raises",
    devices=("mps",),
)
def _mps(g: Builder) -> Call:
    c = _convolution(g, 2, batched=True)
    window = (c.all("padding"), c.all("stride"), c.all("dilation"))
    return Call((*c.tensors, *window, c.groups), out(c.shape))


@op("conv_tbc", "aten::conv_tbc", function="torch.conv_tbc", mixed="raises")
def _conv_tbc(g: Builder) -> Call:
    # Time, batch, channels: weight is (kernel, in, out), and the bias is not optional.
    x = g.tensor(rank=3)
    time, batch, channels = x.shape
    pad = g.int(0, 2)
    kernel = min(g.int(1, 3), time + 2 * pad)
    n = g.dim()
    weight, bias = g.tensor((kernel, channels, n), weight=True), g.tensor((n,), weight=True)
    return Call((x, weight, bias, pad), out((time + 2 * pad - kernel + 1, batch, n)))
