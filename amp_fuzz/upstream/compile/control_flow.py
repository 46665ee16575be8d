"""Higher-order ops, whose body is a function: `cond`, `map`, `while_loop`, `scan`.

## compile-body-island: a region in the body of a loop or a scan is lost

```python
import torch
from torch._higher_order_ops.scan import scan


def step(carry, x):
    with torch.autocast("cpu", enabled=False):  # a float32 island
        return carry + 1, torch.mm(x, x)


carry, xs = torch.zeros(2), torch.ones(3, 2, 2)
with torch.autocast("cpu", dtype=torch.bfloat16):
    print(scan(step, carry, xs)[1].dtype)  # float32
    print(scan(step, carry, xs.requires_grad_())[1].dtype)  # bfloat16; right is float32
```

**What torch does** (CPU). Such an op traces its body once more, to compile it or for its gradient. That trace has the
ops and not the region, and the autocast around the call casts them. `scan` does so if it needs gradients (2.11.0 to
2.15.0); at stage `eager` nothing is said. `while_loop` does so from stage `aot_eager` on, and where an export is
decomposed (2.7.1 to 2.15.0). From there on both raise if the body returns another dtype than it carries: "Expected
carried_inputs and body_output to have same metadata". On 2.7.1 `map` always loses its regions, and `cond` if it needs
gradients.

**What the documentation says.** "``autocast(enabled=False)`` subregions can be nested in autocast-enabled regions"; that
"gives you explicit control over the execution type" (https://docs.pytorch.org/docs/stable/amp.html).

**What the entry explains.** A program with such an op and an island in its body, if both sides agree once the island's
product is an op that autocast does not know, without a region.

**Upstream.** Not reported that we know of.

## export-body-gradient: an island in the body of an exported cond or loop has its gradient in 16 bits

```python
import torch


class Module(torch.nn.Module):
    def forward(self, x, w):
        def product(x, w):
            with torch.autocast("cpu", enabled=False):
                return torch.mm(x, w)

        return torch.cond(
            x.sum() > 0, lambda x, w: product(x, w), lambda x, w: product(x, w), (x, w)
        )


x, w = torch.full((2, 2), 1.001), torch.ones(2, 2, requires_grad=True)
with torch.autocast("cpu", dtype=torch.bfloat16):
    y = torch.export.export(Module(), (x, w)).module()(x, w)
y.sum().backward()
print(w.grad[0, 0])  # 2.0000; right is 2.0020
```

**What torch does** (2.9.1 to 2.15.0, CPU). `cond`, `map` and `while_loop` trace their backward pass while the forward
runs, under the autocast around it: `torch._functorch.config.backward_pass_autocast` is `"same_as_forward"` by
default. With `"off"` the gradient is right. An exported program with such an op has compiled parts, although nothing in
it was compiled. `torch.cond` in eager does the same.

**What the documentation says.** An exported program "is a sound representation of the original
program" (https://docs.pytorch.org/docs/stable/export.html).

**What the entry explains.** A gradient, where [compile-body-island] explains the rest.

**Upstream.** [#157104](https://github.com/pytorch/pytorch/issues/157104) is the same of compiled programs
([compile-backward-autocast]).

## export-body-leak: an exported program with such an op leaves autocast on if it raises in a region

```python
import torch


class Module(torch.nn.Module):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = torch.cond(x.sum() > 1, lambda x: x + 1, lambda x: x + 2, (x,))
            return y, torch.linalg.inv(x)


program = torch.export.export(Module(), (torch.eye(2),)).module()
try:
    program(torch.ones(2, 2))
except torch.linalg.LinAlgError:
    print(torch.is_autocast_enabled("cpu"))  # True; right is False
```

**What torch does** (2.7.1 to 2.15.0, CPU). An export puts a region into a submodule, which `wrap_with_autocast` calls in a
context. If the program has a higher-order op, it leaves `_enter_autocast` and `_exit_autocast` in the graph, and an error
between them skips the second. Without `cond`, autocast is off after the error.

**What the documentation says.** `torch.autocast` is a context manager: its state ends with its block.

**What the entry explains.** A state of autocast after an error, in a program with such an op.

**Upstream.** [#195488](https://github.com/pytorch/pytorch/issues/195488) is the same of compiled programs
([compile-context-leak]).

## compile-loop-foreign-half: while_loop raises for a carry in the other 16-bit dtype

```python
import torch
from torch._higher_order_ops.while_loop import while_loop


@torch.compile(backend="eager")
def program(x):
    start = torch.zeros((), dtype=torch.int64)
    return while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, x * 2), (start, x.clone()))


x = torch.ones(2, dtype=torch.float16)
with torch.autocast("cpu", dtype=torch.bfloat16):
    program(x)
    program(x.requires_grad_())
# RuntimeError: Unexpected floating ScalarType in at::autocast::prioritize
```

**What torch does** (2.9.1 to 2.15.0, CPU; 2.7.1 has no gradient of `while_loop`). For the gradient, the carries of all
steps are kept: `while_loop_dense` calls `torch.stack` of them, under the autocast of the program. `stack` promotes,
and raises for float16 under bfloat16 ([promote-foreign-half]).

**What the documentation says.** No op of the program is in the list of those that promote, and none of its inputs has
two dtypes.

**What the entry explains.** This error, at `while_loop`.

**Upstream.** [#132715](https://github.com/pytorch/pytorch/issues/132715) is about `stack`.
"""

from __future__ import annotations

from amp_fuzz.cases.build import BF16, call, case, under, x
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]

_SQUARE, _STACK = x("w0", 3, 3), x("w1", 3, 3, 3)
_SCAN = case([_SQUARE, _STACK], call("scan_mm", "w0", "w1", True, to="v0 v1"))
_LOOP = case([_SQUARE], call("while_mm", "w0", True))

_OPS = ("cond_mm", "map_mm", "while_mm", "scan_mm", "associative_scan_mm")

BUGS = (
    Bug(
        id="compile-body-island",
        what="an autocast region in the body of a scan, a loop, map or cond is lost",
        why="the body is traced once more, to compile it or for its gradient, and the region is not in that trace",
        torch=">=2.7",
        seen="2.15.0",
        harm="silent dtype",
        backends=("compile[*", "export*"),
        kinds=("raise", "dtype", "value"),
        ops=_OPS,
        without="islands",
        examples=(
            Example("compile[eager]", _SCAN, torch=">=2.11"),
            Example("compile[aot_eager]", _LOOP, torch=">=2.9"),
            Example("export", _SCAN, torch=">=2.11"),
            Example("export[decomposed]", _LOOP.with_plan(backward="none"), torch=">=2.9"),
        ),
    ),
    Bug(
        id="export-body-gradient",
        what="the gradient of an island in the body of an exported cond, map or loop is computed under the forward's autocast",
        why="its backward pass is traced while the forward runs; documented: torch._functorch.config.backward_pass_autocast is 'same_as_forward' by default",
        link="https://github.com/pytorch/pytorch/issues/157104",
        torch=">=2.9",
        seen="2.15.0",
        harm="silent gradient",
        backends=("export",),
        kinds=("grad-value", "grad-dtype"),
        ops=("cond_mm", "map_mm", "while_mm"),
        without="islands",
        examples=(
            Example(
                "export", case([x("x0", 2, 3), x("w1", 3, 4)], call("cond_mm", "x0", "w1", True))
            ),
            Example("export", _LOOP),
        ),
    ),
    Bug(
        id="export-body-leak",
        what="an exported program with cond, map, a loop or a scan that raises in an autocast region leaves autocast on",
        why="its graph enters the region by one call and leaves it by another, which an error skips",
        link="https://github.com/pytorch/pytorch/issues/195488",
        torch=">=2.7",
        seen="2.15.0",
        harm="state",
        backends=("export",),
        kinds=("state",),
        ops=_OPS,
        where="after an error",
        observed=r"^(autocast on \w+|its dtype on \w+|weight cache|nesting): \S+ became \S+$",
        examples=(
            Example(
                "export",
                case(
                    [x("x0", 2, 2), x("x1", 2, 2, dtype="float16")],
                    under(BF16, call("cond_mm", "x0", "x1", True)),
                    contexts=(),
                    backward="none",
                ),
                torch=">=2.9",
            ),
        ),
    ),
    Bug(
        id="compile-loop-foreign-half",
        what="while_loop raises for a 16-bit carry that needs gradients and is not of the autocast dtype",
        why="the carries of all steps are stacked under the autocast of the program, and stack promotes",
        link="https://github.com/pytorch/pytorch/issues/132715",
        torch=">=2.9",
        seen="2.15.0",
        harm="raises",
        backends=("compile[*", "export"),
        kinds=("raise",),
        ops=("while_mm",),
        expected="^no error$",
        observed="Unexpected floating ScalarType in at::autocast::prioritize",
        examples=(
            Example(
                "compile[eager]",
                case([x("w0", 3, 3, dtype="float16")], call("while_mm", "w0", False)),
            ),
        ),
    ),
)
