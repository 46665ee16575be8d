"""Autocast regions in an exported program.

## export-region-cache: a region of an exported program has no weight cache

```python
import torch


class Module(torch.nn.Module):
    def forward(self, x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.mm(x, w)


x, w = torch.ones(1, 1), torch.ones(1, 1, requires_grad=True)
for m in Module(), torch.export.export(Module(), (x, w)).module():
    with torch.no_grad():
        w.fill_(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        m(x, w)
        with torch.no_grad():
            w.mul_(2)
        print(m(x, w).item())  # 1.0, which was cached; then 2.0
```

**What torch does** (2.9.1 to 2.15.0, CPU; 2.7.1 is right). While an export traces, the weight cache is
off (`disable_autocast_cache` of `torch.fx.experimental.proxy_tensor`). A region without
``cache_enabled`` takes what is on around it, and the graph keeps that: `wrap_with_autocast` with
``cache_enabled=False``. Each use of a weight is a cast of its own. It costs time, a weight's gradients
are added in float32 and not in 16 bits, and a weight that changes inside an outer context has its new
value. A region with ``cache_enabled=True`` keeps it.

**What the documentation says.** An exported program "is a sound representation of the original
program" (https://docs.pytorch.org/docs/stable/export.html).

**What the reference does.** Its regions without ``cache_enabled`` have the cache off.

**Upstream.** Not reported that we know of.

## export-saved-regions: an exported program with a no_grad region in a region is saved, and cannot be loaded

```python
import io

import torch


class Module(torch.nn.Module):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                return torch.neg(x)


buffer = io.BytesIO()
torch.export.save(torch.export.export(Module(), (torch.ones(2),)), buffer)
buffer.seek(0)
torch.export.load(buffer)  # SpecViolationError: Node.meta wrap_with_autocast is missing val field.
```

**What torch does** (2.7.1 to 2.15.0, CPU). It saves the program and raises where it loads it. The inner
region is a submodule of the outer one. A region with an autocast region inside, or with none, is
loaded. So is a decomposed program: it has no regions. A `no_grad` region inside another one raises
as well, without autocast.

**What the documentation says.** `torch.export.save` is for what is loaded "using torch.export.load"
(https://docs.pytorch.org/docs/stable/export.html).

**What the reference does.** It saves nothing.

**Upstream.** Not reported that we know of.
"""

from __future__ import annotations

import msgspec

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import BF16, call, case, under, x
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import Autocast, Node, NoGrad, Region
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]


def _uncached(case: Case) -> Case:
    return case.with_program(body=_body(case.program.body, cached=False))


def _body(body: tuple[Node, ...], *, cached: bool) -> tuple[Node, ...]:
    """Return a body. cached: whether the cache is on around it while it is traced."""
    return tuple(_region(n, cached=cached) if isinstance(n, Region) else n for n in body)


def _region(node: Region, *, cached: bool) -> Region:
    context = node.context
    if isinstance(context, Autocast):
        if context.cache_enabled is not None:
            cached = context.cache_enabled
        context = msgspec.structs.replace(context, cache_enabled=cached)
    return Region(context, _body(node.body, cached=cached))


BUGS = (
    Bug(
        id="export-region-cache",
        what="an autocast region of an exported program casts a weight at each use, where eager has the cast in its cache",
        why="the cache is off while the program is traced, and the graph's region keeps that",
        torch=">=2.9",
        seen="2.15.0",
        harm="silent value",
        backends=("export",),
        imitation=Imitation(rewrite=_uncached, applies=lambda case: _uncached(case) != case),
        examples=(
            Example(
                "export",
                case(
                    [x("x0", 1), x("w1", 1, 1)],
                    under(BF16, call("linear", "x0", "w1")),
                    steps=2,
                    loop="inside",
                ),
            ),
        ),
    ),
    Bug(
        id="export-saved-regions",
        what="an exported program with a no_grad region in an autocast region can be saved, but not loaded",
        why="what is loaded has no metadata of a region with a submodule, and is checked for it",
        torch=">=2.7",
        seen="2.15.0",
        harm="raises",
        backends=("export", "export[strict]"),
        kinds=("raise",),
        ops=("*",),
        expected="^no error$",
        observed=r"^SpecViolationError: Node.meta wrap_with_\w+ is missing val field",
        examples=(
            Example(
                "export",
                case(
                    [x("x0", 2)],
                    under(BF16, under(NoGrad(), call("neg", "x0"))),
                    backward="none",
                    saved=True,
                ),
            ),
        ),
    ),
)
