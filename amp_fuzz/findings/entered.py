"""Record the op in which a process dies or hangs, since it cannot report it afterwards."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amp_fuzz.backends.harness import PROGRAM
from amp_fuzz.backends.source import program_source, statement_source
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import statements

__all__ = ["LONGEST", "Entered", "inside", "op_of", "statement_op", "told"]

LONGEST = 128
"""Bytes for the name of an op in shared memory."""


_CPU: Any = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def inside(mode: TorchDispatchMode, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call a kernel from a mode, so the mode also sees the kernels that it calls.

    Only kernels that compute new tensors from plain CPU tensors are looked into, and with torch 2.7
    none: it has no `torch.library.get_kernel`, and `redispatch` calls the mode again.
    """
    schema = func._schema
    tensors = [a for a in tree_leaves((args, dict(kwargs))) if isinstance(a, torch.Tensor)]
    pairs = zip(args, schema.arguments, strict=False)
    get_kernel = getattr(torch.library, "get_kernel", None)
    if (
        get_kernel is None
        or any(r.alias_info is not None for r in schema.returns)
        or not all(
            type(t) in _PLAIN and t.device.type == "cpu" and t.layout is torch.strided
            for t in tensors
        )
        # A boxed kernel does not accept a number for a tensor.
        or any(isinstance(a, (int, float)) and str(p.type) == "Tensor" for a, p in pairs)
    ):
        return func(*args, **kwargs)
    kernel = get_kernel(func.name(), "CPU")
    # As in torch's own call: below autograd and autocast, which a mode re-enables.
    with mode, torch._C._DisableAutocast(), torch._C._AutoDispatchBelowAutograd():
        return kernel.call_boxed(_CPU, *args, **kwargs)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Entered(TorchDispatchMode):
    """Writes the name of the innermost running kernel to shared memory, or "" if none runs.

    One object serves one thread.
    """

    def __init__(self, shared: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shared = shared

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        outer = self.shared.value
        self.shared.value = func._schema.name.removeprefix("aten::").encode()[: LONGEST - 1]
        try:
            return inside(self, func, args, kwargs or {})
        finally:
            self.shared.value = outer


@contextmanager
def told(shared: Any) -> Iterator[None]:
    """Record the kernels that this thread, and threads started meanwhile, enter."""
    run = threading.Thread.run

    def telling(thread: threading.Thread) -> None:
        with Entered(shared):
            run(thread)

    threading.Thread.run = telling  # type: ignore[method-assign, assignment]
    try:
        with Entered(shared):
            yield
    finally:
        threading.Thread.run = run  # type: ignore[method-assign]


def op_of(shared: Any) -> str:
    """Return the op whose kernel is running, or was when its process died; "" if none."""
    return bytes(shared.value).decode(errors="replace")


_LINE = re.compile(rf'^\s*File "{re.escape(PROGRAM)}", line (\d+) in ', re.MULTILINE)


def statement_op(case: Case, traceback: str) -> str:
    """Return the op of the program's statement in a traceback, innermost call first; or ""."""
    hit = _LINE.search(traceback)
    if hit is None:
        return ""
    lines = program_source(case.program).splitlines()
    said = lines[int(hit[1]) - 1].strip() if int(hit[1]) <= len(lines) else ""
    return {statement_source(s): s.op for s in statements(case.program.body)}.get(said, "")
