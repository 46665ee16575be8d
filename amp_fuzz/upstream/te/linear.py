"""The linear layer of Transformer Engine.

Seen with the Python code of Transformer Engine 2.20.2 on the CPU, over a stub of its extension:
[FP8](../../guide/fp8.md). None depends on a kernel; the scripts below were not run on a GPU.

## te-dtype-check: a layer does not check the dtype of its parameters if the last result had it

```python
import torch
import transformer_engine.pytorch as te

layer = te.Linear(16, 16)
x = torch.randn(16, 16, device="cuda", dtype=torch.bfloat16)
with te.autocast(enabled=True), torch.autocast("cuda", torch.bfloat16):
    layer(x)
with te.autocast(enabled=True):
    layer(x)  # no error; without the first call a TypeError
```

**What Transformer Engine does.** `set_activation_dtype` returns early where ``activation_dtype`` is
that of the input: "All checks after this have already been performed once, thus skip". Under
autocast it sets ``activation_dtype`` without them.

**What the documentation says.** The error says it: "Data types for parameters must match when
outside of autocasted region".

**What the reference does.** It raises in each such call.

**Upstream.** Not reported.

## te-history-length: a region with another length of history raises

```python
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

layer = te.Linear(16, 16)
x = torch.randn(16, 16, device="cuda")
for length in 16, 4:
    with te.autocast(enabled=True, recipe=DelayedScaling(amax_history_len=length)):
        layer(x)  # RuntimeError at the end of the second region
```

**What Transformer Engine does.** `adjust_amax_history_length` is called for the forward history,
then for the backward one. Each time it puts that history into both places of
`FP8GlobalStateManager`, ``for pos, buffer_key in zip((fwd_pos, bwd_pos), (fwd_key, bwd_key))``. So
the place of the forward history ends with the backward one, which is of two tensors, not three. The
end of the region then updates three scales from two columns. With ``NVTE_UNFUSED_FP8_UPDATE=1``, as
over our stub: "The size of tensor a (2) must match the size of tensor b (3)". The fused kernel,
which we did not run, checks their number: "Expected 2 elements, Found 3".

**What the documentation says.** ``amax_history_len`` is "the length of the amax history window used
for scaling factor computation". The method is there to "increase or decrease size of amax history".

**What the reference does.** The layer's scales in a region with another history are its own.

**Upstream.** Not reported. [#2044](https://github.com/NVIDIA/TransformerEngine/pull/2044) mended
pointers to reallocated histories in the fusible operations.

## te-inference-state: a layer that was first called in inference mode cannot be trained

```python
import torch
import transformer_engine.pytorch as te

layer = te.Linear(16, 16)
x = torch.randn(16, 16, device="cuda")
with torch.inference_mode(), te.autocast(enabled=True):  # a check before training, say
    layer(x)
with te.autocast(enabled=True):
    layer(x).sum().backward()
# RuntimeError: Inplace update to inference tensor outside InferenceMode is not allowed
```

**What Transformer Engine does.** The first call makes the scales and the histories of delayed
scaling. In inference mode these are inference tensors, and the end of a later region updates them
in place. A kept weight (``is_first_microbatch=True``) of inference mode raises too: "Inference
tensors cannot be saved for backward".

**What the documentation says.** Inference mode is "analogous to `torch.no_grad`", under which both
work. Transformer Engine's names no such limit.

**What the reference does.** The same as under `torch.no_grad()`.

**Upstream.** Not reported.

## te-kept-custom: a kept weight of a custom recipe is lost after its first use

```python
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe
from transformer_engine.pytorch.custom_recipes import reference_current_scaling as reference

recipe = CustomRecipe(qfactory=reference.current_scaling_ref_factory)
layer = te.Linear(16, 16)
x = torch.randn(16, 16, device="cuda")
with te.autocast(enabled=True, recipe=recipe):
    layer(x, is_first_microbatch=True)
    layer(x, is_first_microbatch=False)
# RuntimeError: Cannot generate FP8 data, even from FP8 data transpose
```

**What Transformer Engine does.** `quantize_weight` sets ``quantizer.internal = False``, which gives
a `torch.Tensor` that outlives its use: "Setting internal=True would cause the data to be removed in
prepare_for_saving(...)". The quantisers of its references, in the folder ``custom_recipes``, return
the same class all the same, and `prepare_for_saving` takes the data out of the kept weight, until
the backward pass puts it back. The largest magnitude of a weight of NVFP4 stays: if the weight was
quantised anew since (``is_first_microbatch=True``), the backward pass multiplies the old values by
the new magnitude, and gradients are wrong. A weight of NVFP4 that was kept where no gradient of the
input was needed is transposed later, as packed pairs: "K dimension mismatch between qx and qw". It
keeps the quantiser of its first recipe object, so quantising it anew does not help under another
one.

**What the documentation says.** ``is_first_microbatch`` "allows caching of the FP8 versions of the
weights". A custom recipe is no exception.

**What the reference does.** Later microbatches use the kept weight. It is quantised anew in place.

**Upstream.** Not reported.

## te-nested-update: after a nested region, backward scales are updated twice

```python
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

inner, outer = te.Linear(16, 16), te.Linear(16, 16)
x = torch.randn(16, 16, device="cuda")
with te.autocast(enabled=True, recipe=DelayedScaling(amax_history_len=4)):
    with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
        y = inner(x)
    z = outer(x)
(y.sum() + z.sum()).backward()  # both layers update the scales of gradients at their end
```

**What Transformer Engine does.** The first layer of an outermost region clears
``is_first_fp8_module``, and updates the backward scales at the end of its backward pass. The end of
a nested region puts the flag back as it was at its beginning (`set_autocast_state`). So the next
layer counts as the first, too. Histories are rolled twice a step, and forgotten sooner.

**What the documentation says.** `is_first_fp8_module` "returns `True` only the first time when
called multiple times". ``amax_history_len`` is "the length of the amax history window".

**What the reference does.** One layer of an outermost region updates them, once a step.

**Upstream.** Not reported.

## te-recipe-change: a layer ignores a change of its recipe

```python
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling, Format

layer = te.Linear(16, 16)
x = torch.randn(16, 16, device="cuda")
with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
    layer(x)
with te.autocast(enabled=True, recipe=Float8CurrentScaling(fp8_format=Format.E4M3)):
    layer(x).sum().backward()  # quantises the gradient to E5M2
```

**What Transformer Engine does.** `set_meta_tensor` keeps the quantisers of a layer if the new
recipe is of the class of the old one: the format, the margin and the algorithm stay those of the
first region, only the length of a history follows. If the class changes, there and back, delayed
scaling starts with new scales of 1, but the end of a region updates the old ones: the new ones stay
1.

**What the documentation says.** ``recipe`` is the "recipe used for low precision quantization" in
the region. Nested regions are allowed. A comment there: "Match built-in recipes by full config, not
just RecipeState type, so same-class mid-training changes rebuild quantizers/workspaces correctly".
If the class changes, a warning says that "this may affect model behavior".

**What the reference does.** The innermost region's recipe counts. Delayed scales of a layer in one
region stay what they were while it is called in another.

**Upstream.** [#3157](https://github.com/NVIDIA/TransformerEngine/issues/3157), named in that comment.

## te-retained-graph: a second backward pass over a retained graph raises

```python
import torch
import transformer_engine.pytorch as te

layer = te.Linear(16, 16)
with te.autocast(enabled=True):
    y = layer(torch.randn(16, 16, device="cuda"))
y.sum().backward(retain_graph=True)
y.sum().backward()  # AttributeError: 'NoneType' object has no attribute 'grad_output'
```

**What Transformer Engine does.** `_Linear.backward` sets ``ctx.backward_objects = None`` and
`restore_from_func_ctx` sets ``ctx.tensor_objects = None``, which frees memory before the graph
dies. It came with [#2967](https://github.com/NVIDIA/TransformerEngine/pull/2967), "Prepare linear
for torch compile". The second backward pass finds nothing.

**What the documentation says.** torch's: with ``retain_graph=True`` "the graph used to compute the
grads" is not freed. Transformer Engine's names no such limit.

**What the reference does.** The second backward pass gives what the first gave.

**Upstream.** [#990](https://github.com/NVIDIA/TransformerEngine/issues/990) reports it for an older
version.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from amp_fuzz.cases.build import BF16, call, case, under, x
from amp_fuzz.cases.program import FP8, Checkpoint
from amp_fuzz.reference.fp8.layers import Delayed, Layers, Module, Region, Workspace
from amp_fuzz.reference.fp8.linear import Convention, Quantiser, autocast_dtype
from amp_fuzz.reference.fp8.recipes import Role
from amp_fuzz.reference.fp8.scaling import Quantised
from amp_fuzz.upstream.bug import Example
from amp_fuzz.upstream.layers import remembering, te_bug


class _Unchanged(Delayed):
    """The delayed scale of a tensor that nobody updates."""

    def update(self) -> None:
        pass


class _Keeping(Layers):
    """Layers with the region in which they first had a recipe.

    If a layer has delayed scaling again after another recipe, nobody updates its new scales.
    """

    def __init__(self, convention: Convention) -> None:
        super().__init__(convention)
        self.stuck: set[Module] = set()

    def _entered(self, module: Module, region: Region) -> Region:
        before = self.entered.get(module)
        if before is not None and before.recipe != region.recipe:
            old = [key for key in self.delayed if key[0] == module]
            for key in old:
                del self.delayed[key]
            self.stuck |= {module} if old else set()
        super()._entered(module, region)
        first = self.entered[module]
        for state in self.delayed.get((module, first), {}).values():
            more = region.history - len(state.history)
            state.history = torch.nn.functional.pad(state.history, (0, more))
        return first

    def _fresh(self, module: Module, region: Region) -> dict[Role, Delayed]:
        states = super()._fresh(module, region)
        if module not in self.stuck:
            return states
        return {role: _Unchanged(region, state.format) for role, state in states.items()}


class _Nesting(Layers):
    """Layers of which the next one after a region counts as it would have before it."""

    @contextmanager
    def fp8(self, recipe: str = "tensorwise", **options: Any) -> Iterator[None]:
        first = self.first
        try:
            with super().fp8(recipe, **options):
                yield
        finally:
            self.first = first


class _Lengthening(Layers):
    """Layers that cannot update their scales after another length of history."""

    def __init__(self, convention: Convention) -> None:
        super().__init__(convention)
        self.lengths: dict[Module, int] = {}
        self.mixed = False  # whether a backward history is in the place of a forward one

    def _entered(self, module: Module, region: Region) -> Region:
        length = region.history if region.recipe == "delayed" else None
        before = self.lengths.pop(module, length)
        if length is not None:
            self.mixed |= before != length
            self.lengths[module] = length
        return super()._entered(module, region)

    def _update(self, *roles: Role) -> None:
        if self.mixed and "input" in roles:
            raise RuntimeError("three scales are updated from two columns")
        super()._update(*roles)


class _Trusting(Layers):
    """Layers that do not check parameters if the last result had the dtype of the input."""

    def __init__(self, convention: Convention) -> None:
        super().__init__(convention)
        self.trusted: dict[Module, torch.dtype] = {}

    def _dtype(self, module: Module, x: Any) -> torch.dtype | None:
        low = autocast_dtype(x)
        dtype = super()._dtype(module, x)
        if low is None and self.trusted.get(module) == x.dtype:
            dtype = dtype or x.dtype
        if not self.again:
            self.trusted[module] = low or x.dtype
        return dtype


@dataclass(slots=True, eq=False)
class _Usage:
    """A weight's quantiser: it lives as long as its layer stays in one region, or is recomputed.

    both: whether it last quantised for the gradient of the input, too.
    """

    region: Region
    both: bool = False


@dataclass(slots=True, kw_only=True)
class _Lent(Workspace):
    """A kept weight that gives its data away in a forward pass, and has it back in the backward.

    usage: its first quantiser, which it keeps. here: whether it has its data.
    """

    usage: _Usage
    here: bool = True


class _Losing(Layers):
    """Layers whose kept weights of NVFP4 are empty between a forward and its backward."""

    def __init__(self, convention: Convention) -> None:
        super().__init__(convention)
        self.usages: dict[Module, _Usage] = {}

    def _usage(self, module: Module, x: Any) -> _Usage:
        """Return the quantiser of a module, and note what the call uses it for."""
        checkpointed = self.kept is not None and not self.again
        usage = self.usages.get(module)
        if usage is None or not (self.again or usage.region is self.regions[-1]):
            usage = self.usages[module] = _Usage(self.regions[-1])
        usage.both = checkpointed or (torch.is_grad_enabled() and x.requires_grad)
        return usage

    def _wrapped(
        self, module: Module, quantise: Quantiser, x: Any, weight: Any, first: bool | None
    ) -> Quantiser:
        if self.entered[module].recipe != "nvfp4":
            return super()._wrapped(module, quantise, x, weight, first)
        usage = self._usage(module, x)
        if first is None:
            return quantise
        held = self.workspaces.get(module)
        if not isinstance(held, _Lent):
            held, first = _Lent(both=False, usage=usage), True
            self.workspaces[module] = held
        if first:
            held.copies = {}  # not in place: earlier passes have saved what was there
            held.refresh(quantise, weight)
            held.both = held.usage.both
        elif not held.here:
            raise RuntimeError("the data of the kept weight was taken out")
        copies = held.copies
        both, wanted = held.both, x.requires_grad
        held.here = not torch.is_grad_enabled()

        def lent(value: torch.Tensor, dim: int, role: Role) -> Quantised:
            if role != "weight":
                return quantise(value, dim, role)
            if dim == 1:  # the backward pass
                whole = held.copies[1].whole
                held.copies = {at: replace(copy, whole=whole) for at, copy in copies.items()}
                held.here, held.both = True, both
                if wanted and not both:
                    raise ValueError("packed pairs were transposed")
                return replace(copies[1], whole=whole)
            return copies[dim]

        return lent


BUGS = (
    te_bug(
        id="te-recipe-change",
        what="a te.Linear keeps the format of its first region when the recipe changes",
        why="set_meta_tensor compares the classes of recipes, and updates go to the first scales",
        link="https://github.com/NVIDIA/TransformerEngine/issues/3157",
        harm="silent value",
        imitation=remembering(_Keeping),
        examples=(
            Example(
                "te-python",
                case(
                    [x("x0", 16, 16), x("w1", 16, 16)],
                    under(FP8("current"), call("fp8_linear", "x0", "w1")),
                    under(FP8("current", format="E4M3"), call("fp8_linear", "x0", "w1", to="v1")),
                    contexts=(),
                ),
            ),
            Example(
                "te-python",
                case(
                    [x("x0", 16, 16), x("w1", 16, 16)],
                    under(FP8("delayed", history=4), call("fp8_linear", "x0", "w1")),
                    under(FP8("current"), call("fp8_linear", "x0", "w1", to="v1")),
                    under(FP8("delayed", history=4), call("fp8_linear", "x0", "w1", to="v2")),
                    contexts=(),
                    steps=3,
                ),
            ),
        ),
    ),
    te_bug(
        id="te-inference-state",
        what="a te.Linear that was first called in inference mode raises in training",
        why="its scales, histories and kept weight are then inference tensors",
        harm="raises",
        kinds=("raise", "relation"),
        observed="RuntimeError: Inplace update to inference tensor outside InferenceMode|RuntimeError: Inference tensors cannot be saved for backward",
        examples=(
            Example(
                "te-python",
                case(
                    [x("x0", 16, 16), x("w1", 16, 16)],
                    under(FP8("delayed", history=4), call("fp8_linear", "x0", "w1")),
                    contexts=(),
                    first_pass="inference_mode",
                ),
                wrong="",
            ),
        ),
    ),
    te_bug(
        id="te-kept-custom",
        what="a kept weight of te.Linear with a quantiser in Python raises later, or gives wrong gradients",
        why="that quantiser ignores internal=False, and prepare_for_saving takes the data out",
        backends=("te-python",),
        harm="silent gradient",
        imitation=remembering(_Losing),
        examples=(
            Example(
                "te-python",
                case(
                    [x("x0", 32, 32), x("w1", 32, 32)],
                    under(
                        FP8("nvfp4"),
                        call("fp8_linear", "x0", "w1", is_first_microbatch=False),
                        call("fp8_linear", "x0", "w1", to="v1", is_first_microbatch=False),
                    ),
                    contexts=(),
                ),
                wrong="",
            ),
            Example(
                "te-python",
                case(
                    [x("w0", 32, 32), x("w1", 32, 32), x("w2", 32, 32)],
                    under(
                        FP8("nvfp4"),
                        call("fp8_linear", "w0", "w1", is_first_microbatch=True),
                        call("fp8_linear", "w0", "w2", to="v1", is_first_microbatch=True),
                    ),
                    contexts=(),
                ),
                wrong="",
            ),
            Example(
                "te-python",
                case(
                    [x("w0", 32, 32), x("x1", 32, 32)],
                    under(FP8("nvfp4"), call("fp8_linear", "w0", "x1", is_first_microbatch=True)),
                    contexts=(),
                    first_pass="inference_mode",
                ),
                wrong="",
            ),
            Example(
                "te-python",
                case(
                    [x("w0", 32, 32), x("x1", 32, 32)],
                    under(
                        FP8("nvfp4"),
                        call("fp8_linear", "w0", "w0", is_first_microbatch=False),
                        call("fp8_linear", "x1", "w0", to="v1", is_first_microbatch=True),
                    ),
                    contexts=(),
                    returns=("v0",),
                    checkpoint="reentrant",
                    steps=2,
                ),
                wrong="",
            ),
            Example(
                "te-python",
                case(
                    [x("w0", 32, 32), x("x1", 32, 32)],
                    under(
                        Checkpoint(True),
                        under(
                            FP8("nvfp4"), call("fp8_linear", "w0", "x1", is_first_microbatch=False)
                        ),
                    ),
                    entry="custom_fwd",
                ),
                wrong="",
            ),
        ),
    ),
    te_bug(
        id="te-dtype-check",
        what="a te.Linear takes parameters of another dtype than its input if its last result had that",
        why="set_activation_dtype returns early, although autocast set the dtype without the check",
        harm="refuses",
        imitation=remembering(_Trusting),
        examples=(
            Example(
                "te-python",
                case(
                    [x("x0", 16, 16, dtype="bfloat16"), x("x1", 16, 16)],
                    under(
                        FP8("current"),
                        under(BF16, call("fp8_linear", "x0", "x1")),
                        call("fp8_linear", "x0", "x1", to="v1"),
                    ),
                    contexts=(),
                    backward="none",
                ),
                wrong="",
            ),
        ),
    ),
    te_bug(
        id="te-history-length",
        what="a te.Linear raises in a region whose delayed scaling has another length of history",
        why="adjust_amax_history_length puts the backward history in the place of the forward one",
        harm="raises",
        imitation=remembering(_Lengthening),
        examples=(
            Example(
                "te-python",
                case(
                    [x("x0", 16, 16), x("w1", 16, 16)],
                    under(FP8("delayed", history=4), call("fp8_linear", "x0", "w1")),
                    under(FP8("delayed", history=2), call("fp8_linear", "x0", "w1", to="v1")),
                    contexts=(),
                ),
                wrong="",
            ),
        ),
    ),
    te_bug(
        id="te-nested-update",
        what="after a nested region a te.Linear updates the backward scales once more",
        why="the end of the region restores is_first_fp8_module, which its first layer had cleared",
        harm="silent gradient",
        imitation=remembering(_Nesting),
        examples=(
            Example(
                "te-python",
                case(
                    [x("w0", 16, 16), x("w1", 16, 16), x("w2", 16, 16)],
                    under(
                        FP8("delayed", history=2),
                        under(FP8("current"), call("fp8_linear", "w0", "w0")),
                        call("fp8_linear", "w0", "w1", to="v1", layer=1),
                        call("fp8_linear", "v1", "w2", to="v2", layer=2),
                    ),
                    contexts=(),
                    steps=3,
                ),
            ),
        ),
    ),
    te_bug(
        id="te-retained-graph",
        what="a second backward pass over a retained graph through te.Linear raises",
        why="its backward sets the objects that it saved on ctx to None",
        link="https://github.com/NVIDIA/TransformerEngine/issues/990",
        harm="raises",
        kinds=("raise",),
        observed="AttributeError: 'NoneType' object has no attribute 'grad_output'",
        examples=(
            Example(
                "te-python",
                case(
                    [x("x0", 16, 16), x("w1", 16, 16)],
                    under(FP8("current"), call("fp8_linear", "x0", "w1")),
                    contexts=(),
                    second="retain",
                ),
            ),
        ),
    ),
)
