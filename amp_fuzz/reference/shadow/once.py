"""16-bit arithmetic that no device's kernels decide."""

from __future__ import annotations

from typing import Any

import torch

from amp_fuzz.reference import dispatch
from amp_fuzz.reference.shadow.call import facts_of
from amp_fuzz.reference.shadow.copies import WIDE, tensors_in, with_tensors
from amp_fuzz.reference.shadow.schemas import targets_of
from amp_fuzz.reference.shadow.twin import Step
from amp_fuzz.reference.shadow.written import SIXTEEN

__all__ = ["Once"]

_aten = torch.ops.aten


class Once(dispatch.Mode):
    """Compute each op of 16-bit tensors in float32, and round what it returns once.

    That is what kernels are meant to do, and what no kernel does worse than another. The dtypes of
    results are those of torch's own kernel; if it has none of 16 bits, that of the operands. Ops of
    a composite one are ops of their own, and so are those of a backward pass.

    emulated: whether torch has no kernel of 16 bits for one of the ops.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.emulated = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an op."""
        kwargs = kwargs or {}
        tensors, facts = tensors_in((args, kwargs)), facts_of(func)
        exact = facts.view or facts.moves or facts.uninitialised or func in _CASTS
        if exact or not any(t.dtype in SIXTEEN for t in tensors):
            with dispatch.kept():
                return func(*args, **kwargs)
        targets = targets_of(func, args, kwargs) if facts.writes else []
        single = [t.float() if t.dtype in SIXTEEN else t for t in tensors]
        single = [t.clone() if i in targets else t for i, t in enumerate(single)]
        try:
            with dispatch.kept():
                out = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError):
            if targets:
                raise
            return self._without_kernel(func, args, kwargs, single, tensors)
        own = {t.untyped_storage()._cdata for t in tensors}
        fresh = [t for t in tensors_in(out) if t.untyped_storage()._cdata not in own]
        made = [t for t in (*(tensors[i] for i in targets), *fresh) if t.dtype in WIDE]
        step = Step(func, args, kwargs, facts, (), [(t, None) for t in made], ())
        for t, found in zip(made, step.again(single) or made, strict=True):
            if t.dtype in SIXTEEN:
                t.copy_(found)
        return out

    def _without_kernel(self, func: Any, args: Any, kwargs: Any, single: Any, tensors: Any) -> Any:
        self.emulated = True
        floats = {t.dtype for t in tensors if t.is_floating_point()}
        turn = iter(single)
        args = [with_tensors(a, turn) for a in args]
        kwargs = {name: with_tensors(a, turn) for name, a in kwargs.items()}
        with dispatch.kept():
            out = func(*args, **kwargs)
        return _rounded(out, floats.pop()) if len(floats) == 1 else out


_CASTS = (_aten._to_copy.default, _aten.clone.default)


def _rounded(tree: Any, dtype: torch.dtype) -> Any:
    """Return the float32 results of an op in the dtype of its operands."""
    if isinstance(tree, (tuple, list)):
        return type(tree)(_rounded(part, dtype) for part in tree)
    is_single = isinstance(tree, torch.Tensor) and tree.dtype is torch.float32
    return tree.to(dtype) if is_single else tree
