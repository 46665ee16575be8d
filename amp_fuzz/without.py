"""Run torch without a part of it: what goes away then is that part's fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

__all__ = ["WITHOUT"]


def _without_mkldnn() -> AbstractContextManager[None]:
    import torch

    flags: AbstractContextManager[None] = torch.backends.mkldnn.flags(enabled=False)
    return flags


@contextmanager
def _without_mutations_in_graphs() -> Iterator[None]:
    import torch._dynamo.backends.common

    common: Any = torch._dynamo.backends.common
    honest = common.aot_module_simplified

    def without(*args: Any, **options: Any) -> Any:
        return honest(*args, **{**options, "keep_inference_input_mutations": False})

    common.aot_module_simplified = without
    try:
        yield
    finally:
        common.aot_module_simplified = honest


WITHOUT: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    "mkldnn": _without_mkldnn,
    "mutations-in-graphs": _without_mutations_in_graphs,
}
"""How to run torch without what a known entry blames."""
