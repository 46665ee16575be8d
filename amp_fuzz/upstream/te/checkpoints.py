"""Checkpoints of Transformer Engine.

Seen with the Python code of Transformer Engine 2.20.2 on the CPU, over a stub of its extension:
[FP8](../../guide/fp8.md). None depends on a kernel; the scripts below were not run on a GPU.

## te-checkpoint-freed: a second backward pass over a non-reentrant checkpoint raises

```python
import torch
from torch.utils.checkpoint import _StopRecomputationError
import transformer_engine.pytorch as te

x = torch.randn(16, 16, device="cuda", requires_grad=True)
with te.autocast(enabled=True):
    y = te.checkpoint(torch.cosh, x, use_reentrant=False)
y.sum().backward(retain_graph=True)
y.sum().backward()  # TypeError: Output of saved tensor unpack_hook expected to be a Tensor
```

**What Transformer Engine does.** `_checkpoint_hook` keeps the recomputed tensors, and puts None in
the place of one that it has given away. A second backward pass gets None.

**What the documentation says.** torch's: with ``retain_graph=True`` "the graph used to compute the
grads" is not freed. `torch.utils.checkpoint` recomputes again.

**What the reference does.** The second backward pass gives what the first gave.

**Upstream.** Not reported.

## te-checkpoint-index: a non-reentrant checkpoint raises if the input needs no gradient

```python
import torch
from torch.utils.checkpoint import _StopRecomputationError
import transformer_engine.pytorch as te

layer = te.Linear(16, 16)
with te.autocast(enabled=True):
    y = te.checkpoint(layer, torch.randn(16, 16, device="cuda"), use_reentrant=False)
y.sum().backward()  # IndexError: list index out of range
```

**What Transformer Engine does.** In the first forward pass of a checkpoint, a layer also makes the
transposed copy of its weight, whether the gradient of the input is needed or not. In the
recomputation it makes that copy only if it is. So fewer tensors are saved the second time, and
`_checkpoint_hook` looks for a tensor beyond the last. A GPU whose FP8 products need transposed
copies shows it: compute capability 8.9 or 9.0.

**What the documentation says.** The first layer of a model has such an input. ``te.checkpoint``
names no limit.

**What the reference does.** It gives the gradients that it gives without a checkpoint.

**Upstream.** Not reported.

## te-checkpoint-shift: a non-reentrant checkpoint takes one saved tensor for another

```python
import torch
import transformer_engine.pytorch as te

first, second = te.Linear(16, 16), te.Linear(16, 16)
x = torch.randn(16, 16, device="cuda")
with te.autocast(enabled=True):
    y, _ = te.checkpoint(lambda x: (first(x), second(x)), x, use_reentrant=False)
y.sum().backward()  # RuntimeError: Only Tensors of floating point and complex dtype can require gradients
```

**What Transformer Engine does.** As in `te-checkpoint-index`, the recomputation saves fewer tensors
than the first run. Here the backward pass asks for none beyond the last, but each number now stands
for a later tensor: the data of a weight, say, instead of a bias.

**What the documentation says.** As in `te-checkpoint-index`.

**What the reference does.** It gives the gradients that it gives without a checkpoint.

**Upstream.** Not reported.

## te-checkpoint-state: a checkpoint recomputes with the state of another call

```python
import torch
from torch.utils.checkpoint import _StopRecomputationError
import transformer_engine.pytorch as te

layer = te.Linear(16, 16)
x = torch.randn(16, 16, device="cuda", requires_grad=True)
with te.autocast(enabled=True):
    te.checkpoint(layer, x)  # no backward pass follows
with te.autocast(enabled=True):
    y = te.checkpoint(layer, x)
y.sum().backward()  # the recomputation uses the scales of the first call
```

**What Transformer Engine does.** A checkpoint puts the scales of its layers, and whether its layers
are the first of their region, into queues of the process or of the layer. A recomputation takes
what has waited longest, whichever checkpoint put it there. After a forward pass without a backward
pass, and where checkpoints of one layer are recomputed last to first, that is another's: values and
gradients then come from different scales. A recomputation calls `prepare_forward`, which then
leaves out `init_fp8_metadata`: the layer quantises by the recipe of its last call, whatever region
the recomputation is in, and raises if that has another length of history. Its result has the dtype
of its last call. The end of a checkpoint in a checkpoint ends both, for what follows. A
recomputation also enters the region once more: its end updates the forward scales again, each of
its layers counts as the first one and updates the backward ones, and so histories are forgotten
sooner. A region inside of a reentrant checkpoint ends under `torch.no_grad`: its forward scales are
never updated. A second backward pass over a retained graph finds the queues empty: "IndexError: pop
from empty list". That error leaves the flag of the recomputation set, and later calls of the layer
raise an IndexError, those of another layer a KeyError.

**What the documentation says.** The scales are copied "to ensure both forward steps are numerically
same".

**What the reference does.** A recomputation uses the scales of its own first run, and updates
nothing. A region in a checkpoint updates its scales once.

**Upstream.** Not reported.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import _StopRecomputationError

from amp_fuzz.cases.build import BF16, call, case, under, x
from amp_fuzz.cases.program import FP8, Checkpoint
from amp_fuzz.reference.fp8.layers import Checkpointed, Layers, Module, Region, Scales
from amp_fuzz.reference.fp8.linear import Convention, autocast_dtype
from amp_fuzz.upstream.bug import Example
from amp_fuzz.upstream.layers import remembering, te_bug

_DELAYED = FP8("delayed", history=4)


class _Queued(Layers):
    """Layers whose checkpoints take their state from queues, and update it once more."""

    def __init__(self, convention: Convention) -> None:
        super().__init__(convention)
        self.firsts: deque[bool] = deque()
        self.queues: dict[Module, deque[tuple[int, Scales]]] = defaultdict(deque)
        # Of each layer's last call that was no recomputation.
        self.last: dict[Module, Region] = {}
        self.dtypes: dict[Module, torch.dtype] = {}
        # Of each checkpoint around: takes the scales of its next layer.
        self.notes: list[Callable[[Scales], None]] = []

    @contextmanager
    def _run(self, held: Checkpointed, *, again: bool) -> Iterator[None]:
        if again:
            held.first = self.firsts.popleft()
        else:
            self.firsts.append(held.first)
        outside = not self.regions
        self.notes.append(_rewriting(held.scales) if again else held.scales.append)
        try:
            with super()._run(held, again=again):
                self.trains = False
                self.first |= again and outside  # it enters an outermost region
                if again and not self.regions:
                    self.regions.append(Region(enabled=False))
                yield
        finally:
            self.notes.pop()
            self.kept, self.again = None, False  # of a checkpoint around it, too
            if again:
                self.first = held.first
            if again and outside and held.regions and held.regions[-1].enabled:
                self._update("input", "weight")

    def _entered(self, module: Module, region: Region) -> Region:
        if not self.again:
            self.last[module] = super()._entered(module, region)
        return self.last[module]

    def _finished(self, *tensors: Any) -> Callable[[], None] | None:
        first = self.first
        finished = super()._finished(*tensors)
        if self.again:
            self.first = first
        return finished

    def _dtype(self, module: Module, x: Any) -> torch.dtype | None:
        if self.again:
            return self.dtypes[module]
        self.dtypes[module] = autocast_dtype(x) or x.dtype
        return super()._dtype(module, x)

    def _scales(self, module: Module, region: Region) -> Scales:
        states, queue = self.delayed[module, region], self.queues[module]
        length = len(states["input"].history)
        if self.again:
            noted, used = queue.popleft()
            if noted != length:
                raise RuntimeError("a history of another length was kept")
        else:
            used = {role: states[role].scale for role in ("input", "weight")}
            if self.kept is not None:
                queue.append((length, dict(used)))
        if self.notes:
            self.notes[-1](used)
        return used


def _rewriting(scales: list[Scales]) -> Callable[[Scales], None]:
    """Return what puts the scales of a recomputation in the place of those of the first run.

    What it saves is what the backward pass of the first run reads.
    """
    left = iter(scales)
    return lambda used: next(left, {}).update(used)


class _Shrinking(Layers):
    """Layers whose inputs need gradients, or else a checkpoint without reentrance fails."""

    def __init__(self, convention: Convention) -> None:
        super().__init__(convention)
        self.shrunk = False

    def linear(self, x: Any, *given: Any, **options: Any) -> torch.Tensor:
        region = self.regions[-1] if self.regions else None
        if region is not None and region.enabled:
            # The quantiser of a kept weight still makes both copies, but for that of NVFP4.
            fresh = options.get("is_first_microbatch") is None or region.recipe == "nvfp4"
            self.shrunk |= fresh and not x.requires_grad
        return super().linear(x, *given, **options)

    @contextmanager
    def _run(self, held: Checkpointed, *, again: bool) -> Iterator[None]:
        around, self.shrunk = self.shrunk, False
        fewer = IndexError("the recomputation saved fewer tensors than the first run")
        fails = False
        try:
            with super()._run(held, again=again):
                yield
                fails = again and not held.reentrant and self.shrunk
        except _StopRecomputationError:  # it has saved as much as the first run did
            if again and self.shrunk:
                raise fewer from None
            raise
        finally:
            self.shrunk = around
        if fails:
            raise fewer


BUGS = (
    te_bug(
        id="te-checkpoint-freed",
        what="a second backward pass over te.checkpoint without reentrance raises",
        why="its unpack hook gives each recomputed tensor away once, and None after that",
        harm="raises",
        kinds=("raise",),
        observed="TypeError: Output of saved tensor unpack_hook expected to be a Tensor",
        examples=(
            Example(
                "te-python",
                case(
                    [x("w0", 16, 16), x("x1", 16, 16)],
                    under(
                        FP8("current"), call("cosh", "w0"), call("fp8_linear", "x1", "x1", to="v1")
                    ),
                    contexts=(),
                    second="retain",
                    checkpoint="non_reentrant",
                ),
                wrong="",
            ),
        ),
    ),
    te_bug(
        id="te-checkpoint-shift",
        what="te.checkpoint without reentrance takes the data of a weight for another tensor, and raises",
        why="the recomputation saves fewer tensors than the first run, which numbered them",
        harm="raises",
        kinds=("raise",),
        observed="RuntimeError: Only Tensors of floating point and complex dtype can require gradients",
        examples=(
            Example(
                "te-python",
                case(
                    [x("x0", 16, 16), x("x1", 16, 16), x("w2", 16), x("w3", 16)],
                    under(
                        FP8("current"),
                        under(
                            Checkpoint(),
                            call("fp8_linear", "x0", "x1", "w2"),
                            call("fp8_linear", "x0", "x1", "w3", to="v1"),
                        ),
                    ),
                    contexts=(),
                    returns=("v0",),
                ),
                wrong="",
            ),
        ),
    ),
    te_bug(
        id="te-checkpoint-state",
        what="te.checkpoint recomputes with the scales, recipe or dtype of another call, and updates scales again",
        why="scales wait in queues of all checkpoints, and a recomputation skips what begins a layer's call",
        harm="silent value",
        imitation=remembering(_Queued),
        examples=(
            Example(
                "te-python",
                case(
                    [x("w0", 16, 16), x("w1", 16, 16)],
                    under(Checkpoint(True), under(_DELAYED, call("fp8_linear", "w0", "w1"))),
                    contexts=(),
                    steps=2,
                ),
            ),
            Example(
                "te-python",
                case(
                    [x("w0", 16, 16), x("w1", 16, 16)],
                    under(_DELAYED, under(Checkpoint(True), call("fp8_linear", "w0", "w1"))),
                    contexts=(),
                    second="retain",
                ),
                wrong="",
            ),
            Example(
                "te-python",
                case(
                    [x("x0", 16, 16), x("w1", 16, 16)],
                    under(_DELAYED, call("fp8_linear", "x0", "w1", is_first_microbatch=False)),
                    contexts=(),
                    calls=2,
                    checkpoint="non_reentrant",
                ),
            ),
            Example(
                "te-python",
                case(
                    [x("x0", 16, 16), x("w1", 16, 16)],
                    under(FP8("current"), call("fp8_linear", "x0", "w1")),
                    under(_DELAYED, call("fp8_linear", "x0", "w1", to="v1")),
                    contexts=(),
                    checkpoint="reentrant",
                ),
                wrong="",
            ),
            Example(
                "te-python",
                case(
                    [x("x0", 16, 16), x("w1", 16, 16)],
                    under(
                        _DELAYED,
                        call("fp8_linear", "x0", "w1"),
                        under(FP8("delayed", history=2), call("fp8_linear", "x0", "w1", to="v1")),
                    ),
                    contexts=(),
                    checkpoint="reentrant",
                ),
                wrong="",
            ),
            Example(
                "te-python",
                case(
                    [x("w0", 16, 16), x("x1", 16, 16), x("x2", 16, 16), x("w3", 16, 16)],
                    under(
                        _DELAYED,
                        call("fp8_linear", "w0", "x1"),
                        under(Checkpoint(True), call("fp8_linear", "x2", "w3", to="v1")),
                    ),
                    contexts=(),
                    returns=("v1",),
                    steps=2,
                ),
            ),
            Example(
                "te-python",
                case(
                    [x("x0", 16, 16), x("w1", 16, 16), x("x2", 16, 16)],
                    under(
                        _DELAYED,
                        under(Checkpoint(), call("fp8_linear", "x0", "x0")),
                        call("fp8_linear", "w1", "x2", to="v1"),
                    ),
                    contexts=(),
                    returns=("v1",),
                    checkpoint="non_reentrant",
                ),
            ),
            Example(
                "te-python",
                case(
                    [x("w0", 16, 16), x("x1", 16, 16)],
                    under(
                        FP8("current"),
                        call("fp8_linear", "w0", "x1"),
                        under(BF16, call("fp8_linear", "w0", "x1", to="v1")),
                    ),
                    contexts=(),
                    returns=("v0",),
                    checkpoint="reentrant",
                ),
            ),
            Example(
                "te-python",
                case(
                    [x("w0", 16, 16), x("w1", 16, 16), x("w2", 16, 16)],
                    under(
                        FP8("delayed", history=2),
                        under(
                            Checkpoint(True),
                            call("fp8_linear", "w0", "w1"),
                            call("fp8_linear", "v0", "w2", to="v1", layer=1),
                        ),
                    ),
                    contexts=(),
                    steps=3,
                ),
            ),
        ),
    ),
    te_bug(
        id="te-checkpoint-index",
        what="te.checkpoint without reentrance raises where the input of a layer needs no gradient",
        why="the recomputation makes no transposed copy of the weight, which the first pass saved",
        harm="raises",
        imitation=remembering(_Shrinking),
        examples=(
            Example(
                "te-python",
                case(
                    [x("x0", 16, 16), x("w1", 16, 16)],
                    under(FP8("current"), under(Checkpoint(), call("fp8_linear", "x0", "w1"))),
                    contexts=(),
                ),
                wrong="",
            ),
            Example(
                "te-python",
                case(
                    [x("x0", 16, 16), x("w1", 16, 16)],
                    under(
                        FP8("current"),
                        call("fp8_linear", "x0", "w1"),
                        under(Checkpoint(True), call("neg", "v0", to="v1")),
                    ),
                    contexts=(),
                    checkpoint="non_reentrant",
                ),
                wrong="",
            ),
        ),
    ),
)
