"""Contracts of an op's outputs and of what its call leaves: memory, fake tensors, state."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import TorchDispatchMode

from amp_fuzz.backends.harness import changes
from amp_fuzz.backends.torch_state import torch_state
from amp_fuzz.interfaces.check import messages
from amp_fuzz.interfaces.check.trees import leaves_of
from amp_fuzz.interfaces.check_op.target import Target
from amp_fuzz.interfaces.check_op.tried import Broken, Skipped, Tried, Unjudged
from amp_fuzz.oracle.compare import describe
from amp_fuzz.reports.printable import plural

__all__ = ["aliased", "faked", "leaks"]


def leaks(tried: Tried) -> str:
    """Judge the thread's state after the call and after its backward pass: as before."""
    with tried.passes.calling() as one:
        device = tried.passes.runtime.device
        before = torch_state(device)
        seen = one.forward()
        if seen.raised is not None:
            raise Unjudged(f"it raises: {messages.raised(seen.raised)}")
        left = one.state or changes(before, torch_state(device))
        if left:
            raise Broken(f"after the call, {left}")
        one.backward()
        left = one.state or changes(before, torch_state(device))
        if left:
            raise Broken(f"after its backward pass, {left}")
    return "unchanged after the call and after its backward pass"


_FOUND = "torch raises: an output is an input, or shares memory with one or with another output"


class _Aliases(TorchDispatchMode):
    """Watches the calls of an op: which outputs share memory, in spite of its schema."""

    def __init__(self, target: Target) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.target, self.calls, self.found = target, 0, ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.target.owns(func):
            self.calls += 1
            self.found = self.found or self._shared(func, args, kwargs or {}, result)
        return result

    def _shared(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> str:
        schema = func._schema
        given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | dict(kwargs)
        owners = {
            place: f"its input {name}" for name, value in given.items() for place in _places(value)
        }
        results = result if isinstance(result, tuple) and len(schema.returns) > 1 else (result,)
        for number, (value, declared) in enumerate(zip(results, schema.returns, strict=False)):
            if declared.alias_info is not None:
                continue
            for place in _places(value):
                if place in owners:
                    return f"output {number} shares memory with {owners[place]}"
                owners[place] = f"output {number}"
        return ""


def _places(value: Any) -> set[int]:
    """Return the addresses of the memory of the tensors in a value."""
    tensors = [t for _, t in leaves_of(value) if isinstance(t, torch.Tensor)]
    return {
        t.untyped_storage().data_ptr() for t in tensors if t.layout is torch.strided and t.numel()
    }


def aliased(tried: Tried) -> str:
    """Judge the memory of the outputs: shared only where the schema says so."""
    watch = _Aliases(tried.target)
    with tried.passes.calling() as one, watch:
        seen = one.forward()
    if seen.raised is not None:
        if "alias" in seen.raised.message:  # custom_op looks itself
            raise Broken(_FOUND, seen.raised.text)
        raise Unjudged(f"it raises: {messages.raised(seen.raised)}")
    if watch.found:
        raise Broken(f"{watch.found}, and its schema does not say so")
    if not watch.calls:
        raise Skipped("the dispatcher takes it apart: it is made of other ops")
    return "no output shares memory with an input or another output"


_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    GuardOnDataDependentSymNode,
)


def faked(tried: Tried) -> str:
    """Judge the outputs on fake tensors: the dtypes, shapes and strides of the real call."""
    with tried.passes.calling() as one:
        want = one.forward()
        outputs = dict(one.outputs)
    if want.raised is not None:
        raise Unjudged(f"it raises: {messages.raised(want.raised)}")
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return mode.from_tensor(tensor.detach())

    with tried.passes.calling(copied=copied) as one, mode:
        got = one.forward()
    if got.raised is not None:
        said = messages.raised(got.raised)
        if got.raised.kind in {kind.__name__ for kind in _VALUES}:
            raise Skipped(f"its results depend on values: {said}")
        if tried.target.dispatched:
            raise Broken(f"it raises on fake tensors: {said}", got.raised.text)
        raise Skipped(f"it needs values: {said}")
    for name, tensor in outputs.items():
        fake = one.outputs.get(name)
        shown = _layout(tensor), "nothing" if fake is None else _layout(fake)
        if shown[0] != shown[1]:
            raise Broken(f"{name} is {shown[0]}, and {shown[1]} on fake tensors", name)
    if not outputs:
        raise Skipped("it returns no tensor")
    return f"{plural(len(outputs), 'output')}: dtype, shape and strides"


def _layout(tensor: torch.Tensor) -> str:
    """Return dtype, shape and the strides that address more than one element."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    strides = [stride for size, stride in pairs if size > 1] if tensor.numel() else []
    return f"{describe(tensor)} on {tensor.device.type} with strides {strides}"
