"""What functionalisation makes of ``out=``: a copy of a result.

## compile-out: composite ops with out= are cast, and out= may have any dtype

```python
import torch

x, b = torch.full((1, 1), 1.001), torch.empty(1, 1)
for matmul in torch.matmul, torch.compile(torch.matmul, backend="aot_eager"):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        print(matmul(x, x, out=b).item())  # 1.002; then 1.0
```

Stage aot_eager. Autocast leaves `out=` variants alone: `torch.matmul(x, y, out=b)` of float32 is
exact in eager. Functionalisation calls `matmul` instead, which is cast, and copies the result into
`b`. `torch.linalg.matrix_power(x, 3, out=b)`, which raises under eager's autocast, runs. Without
autocast too, an `out=` of another dtype than the result's raises in eager
(`torch.linalg.cross(x, x, out=b)`), and runs compiled: the copy converts. Of the 309 ops of the
catalogue that take an `out=`, 75 do so on aot_eager. The imitation explained each of 502 such
calls. A kernel that overlooks the strides of its `out=` ([avg-pool3d-out](../avg-pool3d-out.md))
does not when compiled. The imitation refuses memory that overlaps, as the kernels do.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from amp_fuzz.backends.imitation import Imitation, inside
from amp_fuzz.cases.build import call, case, x
from amp_fuzz.reference import dispatch
from amp_fuzz.reference.calls import Call, Treatment
from amp_fuzz.reference.semantics import Semantics
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS", "without_out"]

AOT = "compile[aot_eager]"


class _Copied(TorchDispatchMode):
    """Copy a result into an ``out=`` of whatever dtype and strides.

    Kernels refuse other dtypes, which is no error here, and memory that overlaps, which is one.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = dict(kwargs or {})
        functional, names = without_out(func)
        if functional is None:
            with dispatch.kept():
                return func(*args, **given)
        outs = [given.pop(name) for name in names]
        made = functional(*args, **given)
        results = [made] if len(names) == 1 else made
        if all(o.dtype == r.dtype for o, r in zip(outs, results, strict=True)):
            with dispatch.kept():
                func(*args, **(kwargs or {}))  # it refuses memory that overlaps
        copies = [o.resize_(r.shape).copy_(r) for o, r in zip(outs, results, strict=True)]
        return copies[0] if len(names) == 1 else tuple(copies)


@functools.cache
def without_out(overload: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the overload of the same arguments but ``out=``, and the names of those.

    None: it has none that are tensors, or may be called once only: it writes something else, or
    draws random numbers.
    """
    arguments = overload._schema.arguments
    written = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    outs = tuple(a.name for a in written if a.is_out and str(a.type) == "Tensor")
    random = torch.Tag.nondeterministic_seeded in overload.tags
    if not outs or len(outs) < len(written) or random:
        return None, ()
    kept = [(a.name, str(a.type)) for a in arguments if not a.is_out]
    packet = overload._overloadpacket
    for name in packet.overloads():
        found = getattr(packet, name)
        if [(a.name, str(a.type)) for a in found._schema.arguments] == kept:
            return found, outs
    return None, ()


def _casting(semantics: Semantics) -> Semantics:
    """Call a composite op without its ``out=``, which autocast casts, and copy the result."""

    def call(one: Call, found: Treatment | None) -> Any:
        if one.name not in _composite_outs():
            return semantics.call(one, found)
        given = dict(one.kwargs)
        out = given.pop("out")
        result = dispatch.overload_of(one.name.removesuffix(".out"))(*one.args, **given)  # type: ignore[misc]
        with torch.no_grad():
            return out.resize_(result.shape).copy_(result)

    return replace(semantics, call=call, extra=lambda: (*semantics.extra(), *_composite_outs()))


@functools.cache
def _composite_outs() -> frozenset[str]:
    """Return the composite ops that have one ``out=``, as ``matmul.out``, but for FFTs.

    A fake FFT refuses 16 bits before autocast has a say, and ``ihfftn`` does not write its ``out=``.
    """
    schemas: Any = torch._C._jit_get_all_schemas()
    names = [s.name[6:] for s in schemas if s.name[:6] == "aten::" and s.overload_name == "out"]
    overloads = {f"{n}.out": dispatch.overload_of(f"{n}.out") for n in names}
    return frozenset(
        name
        for name, overload in overloads.items()
        if overload is not None
        and not name.startswith("fft_")
        and dispatch.is_composite(overload)
        and len(overload._schema.returns) == 1
    )


BUGS = (
    Bug(
        id="compile-out",
        what="ops with an out= are cast in a compiled program if they are composite, and take an out= of any dtype",
        why="functionalisation calls the op without out=, on which autocast has a say, and copies the result, which converts",
        torch=">=2.7",
        seen="2.15.0",
        harm="silent value",
        backends=(
            "compile[aot_*",
            "compile[inductor*",
            "export[decomposed]",
        ),
        imitation=Imitation(semantics=_casting, wrap=inside(_Copied)),
        examples=(
            Example(
                AOT,
                case(
                    [x("x0", 4, 4), x("x1", 4, 4), x("b2", 4, 4)],
                    call("matmul", "x0", "x1", form="out", out="b2"),
                    backward="none",
                ),
            ),
        ),
    ),
)
