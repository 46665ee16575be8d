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
"""

from __future__ import annotations

import msgspec

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.cases.build import BF16, call, case, under, x
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import Autocast, Node, Region
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
)
