"""Composite ops in an exported program: they are kept whole, and lose their autocast.

## export-composites: a composite op loses its region when it is decomposed

The export keeps composite ops whole. `run_decompositions` takes them apart below autocast, and
the ops that they are made of are not cast. An op in autocast's own lists (`linear`, `matmul`) is
cast first, and right. `einsum`, `chain_matmul`, `tensordot`, `matrix_power`, recurrent layers and
their cells are not: the result is float32, or two dtypes meet and raise, or a later `.float()`
finds another dtype than it was exported with (`Tensor dtype mismatch!`). The reference calls such
an op with autocast off, and asserts the dtypes before each conversion.

```python
import torch


class Module(torch.nn.Module):
    def forward(self, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.einsum("ij,jk->ik", x, y)


inputs = torch.ones(2, 2), torch.ones(2, 2)
program = torch.export.export(Module(), inputs)
print(program.module()(*inputs).dtype)  # torch.bfloat16
print(program.run_decompositions().module()(*inputs).dtype)  # torch.float32
```

## export-inference-composites: composite ops in inference mode

In inference mode composite ops reach the modes of the export whole, below autocast. The graph is
right, but the fake tensors that go through it while it is made are not cast. If two dtypes meet
in the op, it cannot be exported.

```python
class Product(torch.nn.Module):
    def forward(self, x, y):
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.einsum("ij,j", x, y)


inputs = torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2)
print(Product()(*inputs).dtype)  # torch.bfloat16
torch.export.export(Product(), inputs)
# RuntimeError: expected scalar type torch.bfloat16 but found torch.float32
```

## export-asserted-dtypes: an exported program raises where it converts what an LSTM returned

```python
class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(2, 2)

    def forward(self, x):
        return self.lstm(x)[0].float()


x = torch.ones(1, 2)
with torch.autocast("cpu", dtype=torch.bfloat16):
    program = torch.export.export(Module(), (x,)).module()
    program(x)
# RuntimeError: Tensor dtype mismatch! Expected: Float, Got: c10::BFloat16
```

**What torch does** (2.9.1 to 2.15.0, CPU). An export writes an assertion before each conversion: the dtype that it saw. It
saw fake tensors. Autocast does not cast what is inside an LSTM, a sparse product, `pinv`, or in inference mode any
composite op, for fake tensors; it does when the program runs. Without the conversion the program is right. With
it, the export may also return the converted value in place of the other one.

**What the documentation says.** An exported program "is a sound representation of the original
program" (https://docs.pytorch.org/docs/stable/export.html).

**What the entry explains.** This error in a program with one of these ops, unless it comes without autocast too.

**Upstream.** Not reported that we know of.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from amp_fuzz import reference
from amp_fuzz.backends import imitation
from amp_fuzz.backends.imitation import Imitation, Program
from amp_fuzz.cases.build import BF16, call, case, under, x
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import InferenceMode
from amp_fuzz.reference import dispatch
from amp_fuzz.reference.cache import own_cache
from amp_fuzz.reference.calls import Call, Treatment
from amp_fuzz.reference.semantics import Semantics
from amp_fuzz.upstream.bug import Bug, Example
from amp_fuzz.versions import holds

__all__ = ["BUGS"]


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


def _asserting(program: Program, case: Case) -> Program:
    """Return a program whose conversions assert the dtypes that they were exported with.

    It is exported at its first call, from copies, before anything is decomposed. A function of a
    user's is not called twice.
    """
    of_user = "__name__" in inspect.unwrap(program).__globals__  # of a module (`amp_fuzz.check`)
    if of_user or holds("<2.9"):  # an export of 2.7.1 asserts nothing
        return program
    exported: list[torch.dtype] = []
    called: list[bool] = []

    @functools.wraps(program)
    def run(*inputs: torch.Tensor) -> Any:
        if not called:
            called.append(True)
            exported.extend(_exported(program, inputs))
        with _Conversions(exported):
            return program(*inputs)

    return run


def _exported(program: Program, inputs: Sequence[torch.Tensor]) -> Sequence[torch.dtype]:
    """Return the dtypes that a program converts; nobody else is to notice the call."""
    whole = imitation.current().without("export-composites")
    random, noted = torch.get_rng_state(), _Conversions()
    with (
        suppress(Exception),
        imitation.imitating(whole),
        reference.log_kernels(),
        own_cache(),
        _disable_current_modes(),
        noted,
    ):
        program(*(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs))
    torch.set_rng_state(random)
    return noted.dtypes


class _Conversions(TorchFunctionMode):
    """Notes the dtype of what is converted to another, or asserts that it is what it was.

    An export asserts so before each conversion, and says so where it is decomposed.
    """

    def __init__(self, exported: Sequence[torch.dtype] | None = None) -> None:
        self.exported = exported
        self.dtypes: list[torch.dtype] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _CONVERSIONS:
            got, n = args[0].dtype, len(self.dtypes)
            self.dtypes.append(got)
            expected = self.exported[n] if self.exported and n < len(self.exported) else got
            if got != expected:
                raise AssertionError(f"Tensor dtype mismatch! Expected: {expected}, Got: {got}")
        return func(*args, **(kwargs or {}))


_CONVERTING = ["bfloat16", "bool", "byte", "char", "double", "float", "half", "int", "long", "to"]
_CONVERSIONS = {getattr(torch.Tensor, name) for name in _CONVERTING}


# Ops that autocast casts inside, and not for the fake tensors of an export: of 2,800 drawn calls of
# all ops, each with its result converted; in inference mode, those of export-inference-composites.
_ASSERTED = (
    *("linalg.pinv*", "lstm", "mv.coo", "sparse.addmm", "sparse.mm"),
    *("bilinear", "chain_matmul", "einsum", "linalg.multi_dot", "matrix_power*", "rnn_*"),
    *("gru", "tensordot"),
)

BUGS = (
    Bug(
        id="export-composites",
        what="a composite op of an exported program loses its autocast region where the export is decomposed",
        why="it is kept whole, and taken apart below autocast: what it is made of is not cast",
        link="https://github.com/pytorch/pytorch/issues/137274",
        torch=">=2.7",
        seen="2.15.0",
        harm="silent dtype",
        backends=("export[decomposed]",),
        imitation=Imitation(semantics=_without_autocast(lambda: True), wrap=_asserting),
        examples=(
            Example(
                "export[decomposed]",
                case(
                    [x("x0", 2, 2), x("x1", 2, 2)],
                    call("einsum", "ij,jk->ik", "x0", "x1"),
                    backward="none",
                ),
            ),
            Example(
                "export[decomposed]",
                case(
                    [
                        x("x0", 3, 2, 2),
                        x("x1", 1, 2, 3),
                        *(x(f"w{i}", 3, 2 + (i == 3)) for i in (2, 3)),
                    ],
                    under(
                        BF16,
                        call(
                            "rnn_tanh",
                            *("x0", "x1", ["w2", "w3"], False, 1, 0.0, False, False, False),
                            to="v0 v1",
                        ),
                    ),
                    contexts=(),
                    backward="none",
                ),
            ),
            *(
                # A later conversion finds another dtype than it was exported with.
                Example(
                    "export[decomposed]",
                    case(
                        [x("x0", 2, 3), x("x1", 3, 2)],
                        call("einsum", "ij,jk->ik", "x0", "x1"),
                        call(op, "v0", form="method", to="v1"),
                        backward="none",
                    ),
                    wrong,
                    torch=since,
                )
                for op, wrong, since in (("float", "", ">=2.9"), ("neg", "neg", ""))
            ),
        ),
    ),
    Bug(
        id="export-inference-composites",
        what="composite ops in an inference_mode and an autocast region raise while they are exported",
        why="in inference mode they reach the modes of the export whole, below autocast: what they are made of is not cast, and meets two dtypes",
        torch=">=2.13",
        seen="2.15.0",
        harm="raises",
        backends=("export*",),
        imitation=Imitation(semantics=_without_autocast(torch.is_inference_mode_enabled)),
        examples=(
            Example(
                "export",
                case(
                    [x("x0", 1, 2, dtype="bfloat16"), x("x1", 2)],
                    under(InferenceMode(), call("einsum", "ij,j", "x0", "x1")),
                    backward="none",
                ),
            ),
        ),
    ),
    Bug(
        id="export-asserted-dtypes",
        what="an exported program raises where it converts what an LSTM or a sparse product computed under autocast",
        why="it asserts the dtypes of the fake tensors of the export, and inside those ops autocast casts only real ones",
        torch=">=2.9",
        seen="2.15.0",
        harm="raises",
        backends=("export", "export[strict]"),
        kinds=("raise",),
        ops=_ASSERTED,
        expected="^no error$",
        observed="Tensor dtype mismatch!",
        examples=(
            Example(
                "export",
                case(
                    [x("x0", 2, 2)],
                    call("sparse.mm", "x0", "x0"),
                    call("float", "v0", form="method", to="v1"),
                    backward="none",
                    returns=["v1"],
                ),
                wrong="",
            ),
        ),
    ),
)
