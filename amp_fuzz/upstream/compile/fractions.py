"""Functions that dynamo writes as several ops.

## compile-addcdiv: rounded on the way

Stage eager, that is dynamo; without autocast too. `torch.addcdiv(x, a, b, value=-2)` becomes
`x + (a / b) * -2`. Under autocast `x` often comes from a float32 op while `a` and `b` are bfloat16.
The quotient is then rounded to bfloat16 and loses 2^-9 of itself. Eager's kernel computes in
float32.

```python
import torch


def f(x, a, b):
    return torch.addcdiv(x, a, b, value=-2)


args = torch.zeros(1), torch.tensor([1.0]).bfloat16(), torch.tensor([3.0]).bfloat16()
print(f(*args), torch.compile(f, backend="eager")(*args))  # -0.6667, -0.6680
```

The methods `x.addcdiv_(a, b, value=v)` and `x.addcmul_(a, b, value=v)` are written so, too, and the
sum is copied into `x`. Torch's comment on `torch._dynamo.config.enable_dynamo_decompositions` says:
"This can affect numerics for non-inductor backends". `1 + 0.5 * 300 * 400` of float16 is 60000 in
eager and on Inductor, which keeps float32, and inf on the rungs before it.

We ran 864 mixes of six dtypes and two values, each with the gradient. The imitation had the bits
and the errors of aot_eager in all results. In 38 gradients it differed: those of a wider `x` are
rounded once more. We know of no report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch

from amp_fuzz.backends.imitation import Imitation, inside
from amp_fuzz.cases.build import call, case, x
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.literals import bits_of
from amp_fuzz.patching import patched
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]


@contextmanager
def _fractions() -> Iterator[None]:
    """Compute ``addcdiv(x, a, b, value=v)`` as ``x + (a / b) * v``, each step rounded.

    Dynamo writes the function and the methods in place so, only where they are given a `value`.
    """
    honest: Callable[..., torch.Tensor] = torch.addcdiv

    def addcdiv(*args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) != 3 or kwargs.keys() != {"value"}:
            return honest(*args, **kwargs)
        x, a, b = args
        return torch.add(x, torch.mul(torch.div(a, b), kwargs["value"]))

    with ExitStack() as stack:
        for name, first in (("addcdiv_", torch.div), ("addcmul_", torch.mul)):
            stack.enter_context(patched(torch.Tensor, name, _in_place(name, first)))
        stack.enter_context(patched(torch, "addcdiv", addcdiv))
        yield


def _in_place(name: str, first: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    honest = getattr(torch.Tensor, name)

    def method(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) != 2 or kwargs.keys() != {"value"}:
            return cast(torch.Tensor, honest(x, *args, **kwargs))
        return x.copy_(first(*args) * kwargs["value"] + x)

    return method


def _rounded(op: str, other: float) -> Case:
    """Call an op in place: 0.4 of the product, or quotient, is in float16's range, and it is not."""
    given = [1.0, 300.0], [1.0, other]
    inputs = [x("b0", 2, dtype="float16")]
    inputs += [
        x(name, 2, dtype="float16", values=bits_of(values, "float16"))
        for name, values in zip(("x1", "x2"), given, strict=True)
    ]
    body = call(op, "b0", "x1", "x2", form="inplace", value=0.4)
    return case(inputs, body, contexts=(), backward="none")


BUGS = (
    Bug(
        id="compile-addcdiv",
        what="addcdiv, addcdiv_ and addcmul_ with a value round each of their steps, in the dtype of these, when compiled",
        why="dynamo writes them as a division or product, a product and a sum; the kernel computes in one dtype and rounds once",
        torch=">=2.7",
        seen="2.15.0",
        backends=("compile[*",),
        ops=(
            "addcdiv",
            "addcmul",
        ),
        imitation=Imitation(wrap=inside(_fractions)),
        examples=(
            Example(
                "compile[eager]",
                case(
                    [x("x0", 2), x("x1", 2, dtype="bfloat16"), x("x2", 2, dtype="bfloat16")],
                    call("addcdiv", "x0", "x1", "x2", value=-2),
                    contexts=(),
                    backward="none",
                ),
            ),
            Example("compile[eager]", _rounded("addcmul", 400.0)),
            Example("compile[eager]", _rounded("addcdiv", 2.0**-9)),
        ),
    ),
)
