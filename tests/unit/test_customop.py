"""An op that is defined again under its name takes nothing with it when it goes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._library.custom_ops import OPDEF_TO_LIB
from torch.utils._python_dispatch import TorchDispatchMode

from amp_fuzz.backends.custom_op import custom_op
from amp_fuzz.versions import holds


class Seen(TorchDispatchMode):
    """Notes the ops that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return args[0]


@pytest.fixture
def collected_late() -> Iterator[None]:
    """Collect nothing but on request."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def is_its_own(define: Callable[..., Any], name: str) -> bool:
    """Return whether a mode sees the op that was defined last, once an earlier one is collected."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def define_it() -> Any:
        return define(name, double, mutates_args=())

    earlier, last = define_it(), define_it()
    x = torch.ones(2)
    assert last(x).tolist() == [2, 2]
    del earlier
    gc.collect()
    with Seen() as seen:
        last(x)
    same = seen.ops == [last._opoverload] and seen.ops[0] is last._opoverload
    OPDEF_TO_LIB.pop(name)._destroy()
    return same


@pytest.mark.thorough
@pytest.mark.usefixtures("collected_late")
def test_an_op_that_is_defined_again_stays_what_the_dispatcher_points_to() -> None:
    assert is_its_own(custom_op, "amp_fuzz_test::again")


@pytest.mark.thorough
@pytest.mark.usefixtures("collected_late")
def test_with_torchs_own_definition_it_does_not() -> None:
    """The OpOverload that it points to is another, which nothing holds but a cache."""
    right = is_its_own(torch.library.custom_op, "amp_fuzz_test::torchs")
    # Right on 2.7.1, 2.9.1 and 2.11.0, wrong on 2.13.0 and 2.15.0.
    assert right is holds("<2.12"), "if torch is mended, take amp_fuzz/backends/custom_op.py out"


@pytest.mark.usefixtures("collected_late")
def test_what_the_dispatcher_points_to_lives_while_a_kernel_of_the_op_stays() -> None:
    """It keeps the pointer through the next definition; the reference's kernels stay, too."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def define() -> Any:
        return custom_op("amp_fuzz_test::stays", double, mutates_args=())

    op, x = define(), torch.ones(2)
    library = torch.library.Library("amp_fuzz_test", "IMPL")
    library.impl("stays", torch.library.fallthrough_kernel, "AutocastXPU")
    try:
        with Seen() as seen:
            op(x)
        first = weakref.ref(seen.ops[0])
        del seen, op
        last = define()
        gc.collect()
        assert first() is not None, "the next line would read freed memory"
        with Seen() as seen:
            last(x)
        assert seen.ops == [first()]
    finally:
        OPDEF_TO_LIB.pop("amp_fuzz_test::stays")._destroy()
        library._destroy()
