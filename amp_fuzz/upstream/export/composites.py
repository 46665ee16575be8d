"""What an export makes of ops that are made of others; the page is docs/findings/export.md.

export-composites: a composite op without a policy loses its autocast region where the export is
    decomposed. It is kept whole, and taken apart below autocast: what it is made of is not cast
    (https://github.com/pytorch/pytorch/issues/137274).
export-inference-composites: the same in inference mode, where any program is exported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from amp_fuzz.backends.imitation import Imitation
from amp_fuzz.reference import dispatch
from amp_fuzz.reference.calls import Call, Treatment
from amp_fuzz.reference.semantics import Semantics

__all__ = ["IMITATIONS"]


@functools.cache
def _functional_composites() -> frozenset[str]:
    """Return the ops of others that write nothing and return no view, as ``einsum``.

    Those that an exported program may have whole (``torch._export.utils``).
    """
    schemas: Any = torch._C._jit_get_all_schemas()
    found = []
    for schema in schemas:
        namespace, _, base = schema.name.partition("::")
        name = f"{base}.{schema.overload_name}" if schema.overload_name else base
        returns = any("Tensor" in str(r.type) for r in schema.returns)
        functional = all(a.alias_info is None for a in (*schema.arguments, *schema.returns))
        usual = namespace == "aten" and returns and functional
        overload = dispatch.overload_of(name) if usual else None
        if overload is None or torch.Tag.maybe_aliasing_or_mutating in overload.tags:
            continue
        with suppress(RuntimeError):  # TorchScript has some of its own, of which no kernel is known
            found += [name] * dispatch.is_composite(overload)
    return frozenset(found)


def _without_autocast(where: Callable[[], bool]) -> Callable[[Semantics], Semantics]:
    def changed(semantics: Semantics) -> Semantics:
        def call(one: Call, found: Treatment | None) -> Any:
            if found is not None or one.name not in _functional_composites() or not where():
                return semantics.call(one, found)
            with dispatch.exclude():
                return one.function(*one.args, **one.kwargs)

        def extra() -> tuple[str, ...]:
            return (*semantics.extra(), *_functional_composites())

        return replace(semantics, call=call, extra=extra)

    return changed


IMITATIONS = {
    "export-composites": Imitation(semantics=_without_autocast(lambda: True)),
    "export-inference-composites": Imitation(
        semantics=_without_autocast(torch.is_inference_mode_enabled)
    ),
}
