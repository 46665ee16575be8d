"""A TPU's products on the CPU: `lax.Precision` as documented, by explicit roundings to bfloat16.

The lowerings of JAX's two products round their inputs: ``default`` once, ``high`` in three passes
of high and low parts, ``highest`` not at all. Everything else is the CPU. JAX is in a process apart
that puts on the fault whose name stands in a file, none if it is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from amp_fuzz.backends.harness import Observation
from amp_fuzz.backends.jax.platforms import Platform
from amp_fuzz.cases.case import Case
from tests.faults.lowerings import FAULTS as LOWERINGS

__all__ = ["FAULTS", "Exclusive", "Simulated", "simulate"]

Bind = Callable[[Any, Any], Any]
Multiply = Callable[[Bind, Any, Any], Any]

_current: dict[str, Multiply] = {}


def _bfloat16(x: Any) -> Any:
    from jax import lax

    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def _parts(x: Any) -> tuple[Any, Any]:
    import jax.numpy as jnp

    high = _bfloat16(x)
    return high, jnp.where(jnp.isfinite(high), _bfloat16(x - high), 0)


def _one(bind: Bind, a: Any, b: Any) -> Any:
    return bind(_bfloat16(a), _bfloat16(b))


def _three(bind: Bind, a: Any, b: Any) -> Any:
    (a, a_low), (b, b_low) = _parts(a), _parts(b)
    return bind(a, b) + (bind(a, b_low) + bind(a_low, b))


def _six(bind: Bind, a: Any, b: Any) -> Any:
    return bind(a, b)


def _narrowly(multiply: Multiply) -> Multiply:
    """Accumulate in bfloat16: the sum is rounded to it."""
    return lambda bind, a, b: _bfloat16(multiply(bind, a, b))


def _two(bind: Bind, a: Any, b: Any) -> Any:
    """Leave out the pass of the low part of the second input."""
    (a, a_low), (b, _) = _parts(a), _parts(b)
    return bind(a, b) + bind(a_low, b)


def _eight(bind: Bind, a: Any, b: Any) -> Any:
    """Round the inputs to four digits, as float8_e4m3 has."""
    from jax import lax

    a, b = (lax.reduce_precision(x, exponent_bits=8, mantissa_bits=3) for x in (a, b))
    return bind(a, b)


def _larger(multiply: Multiply) -> Multiply:
    return lambda bind, a, b: multiply(bind, a, b) * 1.01


_LEVELS: Mapping[str, Multiply] = {"default": _one, "high": _three, "highest": _six}

# By name: what is wrong, and the products, by level, that take the place of the honest ones.
_PRODUCTS: Mapping[str, tuple[str, Mapping[str, Multiply]]] = {
    "missing-pass": ("high makes two passes of three", {"high": _two}),
    "one-pass": ("high makes one pass of three", {"high": _one}),
    "highest-one-pass": ("highest rounds its inputs to bfloat16", {"highest": _one}),
    "float8": ("default rounds its inputs to four digits", {"default": _eight}),
    "narrow-high": ("high is accumulated in bfloat16", {"high": _narrowly(_three)}),
    "gain": ("default is 1 % too large", {"default": _larger(_one)}),
}
# Faults of the lowerings, beside a TPU's rounding.
_BESIDE = ("narrow-softmax", "dropped-bias", "missing-cast", "gradient-sign", "element")

FAULTS: Mapping[str, str] = {
    **{name: what for name, (what, _) in _PRODUCTS.items()},
    **{name: LOWERINGS[name][0] for name in _BESIDE},
}
"""By name: what is wrong, in one line."""


def simulate() -> None:
    """Let the products of this process round as a TPU's do. Call it before JAX computes."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.interpreters import mlir

    _current.update(_LEVELS)

    def rounding(primitive: Any) -> None:
        plain = _lowering(primitive)

        def lowered(a: Any, b: Any, **how: Any) -> Any:
            dtype = how["preferred_element_type"] or a.dtype
            given = how.pop("precision")
            level = given[0] if isinstance(given, tuple) else given
            own = _current[(level or lax.Precision.DEFAULT).name.lower()]
            # float16 is multiplied as float32.
            how["preferred_element_type"] = jnp.float32

            def bind(a: Any, b: Any) -> Any:
                return primitive.bind(a, b, precision=_DONE, **how)

            made = own(bind, a.astype(jnp.float32), b.astype(jnp.float32))
            return made.astype(dtype)

        multiple = mlir.lower_fun(lowered, multiple_results=False)

        def rule(ctx: Any, a: Any, b: Any, **how: Any) -> Any:
            dtypes = {str(x.dtype) for x in ctx.avals_in}
            if how["precision"] == _DONE or not dtypes & {"float32", "float16"}:
                how["precision"] = None if how["precision"] == _DONE else how["precision"]
                return plain(ctx, a, b, **how)
            return multiple(ctx, a, b, **how)

        mlir.register_lowering(primitive, rule, platform="cpu")

    _DONE = (lax.Precision.HIGHEST, lax.Precision.DEFAULT)  # which nobody asks for
    for primitive in (lax.dot_general_p, lax.conv_general_dilated_p):
        rounding(primitive)
    # Compiled programs of the CPU itself are on disk under the keys of their modules: those with
    # roundings are other modules.
    jax.clear_caches()


def _lowering(primitive: Any) -> Any:
    from jax._src.interpreters import mlir

    entry = mlir._platform_specific_lowerings["cpu"].get(primitive) or mlir._lowerings[primitive]
    return entry.rule


@contextmanager
def _faulty(name: str) -> Iterator[None]:
    import jax

    if name in _PRODUCTS:
        before = dict(_current)
        _current.update(_PRODUCTS[name][1])
        jax.clear_caches()
        try:
            yield
        finally:
            _current.update(before)
            jax.clear_caches()
        return
    with LOWERINGS[name][1]():
        yield


class Simulated:
    """A backend's process on a simulated TPU.

    entry: `amp_fuzz.backends.jax.backend:Program` or that of torchax, which gets the other
    arguments.
    """

    exclusive = False

    def __init__(self, file: str, kind: str, *args: Any) -> None:
        if kind == "torchax":
            from amp_fuzz.backends.torchax.backend import Torchax as Sides
        else:
            from amp_fuzz.backends.jax.backend import Program as Sides  # type: ignore[assignment]
        self.file, self.honest = Path(file), Sides(*args)
        simulate()
        said = self.honest.said
        assert isinstance(said, Platform)
        self.said = replace(said, name="tpu", kind="simulated")

    def observe(self, case: Case) -> Observation:
        """Run a case."""
        name = self.file.read_text()
        with ExitStack() as stack:
            if name:
                stack.enter_context(_faulty(name))
            seen = self.honest.observe(case)
        seen.platform = self.said.name
        return seen

    def expect(self, case: Case) -> Observation:
        """Run a case under the reference."""
        return self.honest.expect(case)


class Exclusive:
    """A device, without JAX, that takes one process."""

    said = "exclusive"
    exclusive = True

    def observe(self, case: Case) -> Observation:
        """Return nothing."""
        return Observation()

    expect = observe
