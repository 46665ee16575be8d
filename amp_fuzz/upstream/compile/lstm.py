"""LSTMs in a compiled program.

## compile-lstm: an LSTM whose input is trained has another dtype

Stage aot_eager. Under autocast, eager's `torch.lstm` of a float32 or bfloat16 input is oneDNN's
layer. Autocast casts it: all results are bfloat16. The decomposition takes that layer only if no
tensor has another dtype than these two and the input requires no grad
(`select_one_layer_lstm_function` in `torch/_decomp/decompositions.py`). Else it computes cells,
whose gates are bfloat16 and are multiplied with the state. A state of float32 or float16 makes the
result float32:

```python
x = torch.ones(2, 3, 4, requires_grad=True)
state, weights = [torch.zeros(1, 3, 2)] * 2, [torch.ones(8, 4), torch.ones(8, 2)]


def f(x):
    with torch.autocast("cpu", torch.bfloat16):
        return torch.lstm(x, state, weights, False, 1, 0.0, False, False, False)[0]


f(x).dtype, torch.compile(f, backend="aot_eager")(x).dtype  # bfloat16, float32
```

A processor with AVX2 and without AVX-512 has no bfloat16 layer. There, eager raises "could not
create a primitive descriptor for the LSTM"
([#88136](https://github.com/pytorch/pytorch/issues/88136)), and the compiled program computes.

Modules run in eager: dynamo refuses `torch.nn.LSTM`. We found no report.

Before 2.13 the cells also leave a dimension of length 1 in the last states
([#151200](https://github.com/pytorch/pytorch/issues/151200), mended by
[#185716](https://github.com/pytorch/pytorch/pull/185716)).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from amp_fuzz.backends.imitation import Imitation, inside
from amp_fuzz.cases.build import call, case, x
from amp_fuzz.patching import patched
from amp_fuzz.upstream.bug import Bug, Example
from amp_fuzz.versions import holds

__all__ = ["BUGS"]

AOT = "compile[aot_eager]"
_ADDED = 1 if holds("<2.13") else 0  # the dimension that the decomposition takes for its own


@contextmanager
def _layers() -> Iterator[None]:
    """Compute ``torch.lstm`` cell by cell where its decomposition does and eager's kernel does not.

    Eager asks about the dtype of the input alone before it takes oneDNN's layer.
    """
    honest: Callable[..., Any] = torch.lstm

    def lstm(*args: Any) -> Any:
        x, state, weights, _, _, dropout, *_ = args
        if not isinstance(state, (list, tuple)) or dropout or state[0].shape != state[1].shape:
            return honest(*args)
        dtypes = {t.dtype for t in (x, *state, *weights)}
        fused = dtypes <= {torch.float32, torch.bfloat16} and not x.requires_grad
        return honest(*args) if fused else _by_cells(*args)

    with patched(torch, "lstm", lstm):
        yield


def _by_cells(
    x: torch.Tensor,
    state: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    bias: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    first: bool,
) -> tuple[torch.Tensor, ...]:
    """Return the results of ``torch.lstm``, of its arguments, by products and pointwise ops."""
    x = x.transpose(0, 1) if first else x
    size, directions = 4 if bias else 2, 1 + bidirectional
    last: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in range(layers):
        made: list[torch.Tensor] = []
        for k in range(layer * directions, (layer + 1) * directions):
            own = weights[k * size : (k + 1) * size]
            steps, kept = _steps(x, state[0][k], state[1][k], *own, reverse=len(made) == 1)
            made.append(steps)
            last.append(kept)
        x = torch.cat(made, -1) if bidirectional else made[0]
    hidden, cells = zip(*last, strict=True)
    return x.transpose(0, 1) if first else x, torch.stack(hidden), torch.stack(cells)


def _steps(
    x: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor,
    of_input: torch.Tensor,
    of_hidden: torch.Tensor,
    *biases: torch.Tensor,
    reverse: bool,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Return the steps of one direction of one layer, and the states after the last of them."""
    linear = torch.nn.functional.linear
    hidden, cell = hidden.unsqueeze(0), cell.unsqueeze(0)
    given = linear(x, of_input, *biases[:1])
    steps = []
    for step in given.flip(0) if reverse else given:
        gates = linear(hidden, of_hidden, *biases[1:]) + step
        enter, forget, new, leave = gates.chunk(4, 2)
        cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
        hidden = leave.sigmoid() * cell.tanh()
        steps.append(hidden)
    if reverse:
        steps.reverse()
    return torch.cat(steps, 0), (hidden.squeeze(_ADDED), cell.squeeze(_ADDED))


BUGS = (
    Bug(
        id="compile-lstm",
        what="torch.lstm under autocast has the wider dtype of its states when compiled, where its input requires grad or a tensor is of float16",
        why="eager runs oneDNN's layer, which autocast casts; the decomposition then computes cells, whose products promote",
        torch=">=2.7",
        seen="2.15.0",
        harm="silent dtype",
        backends=(
            "compile[aot_*",
            "compile[inductor*",
        ),
        ops=("lstm",),
        imitation=Imitation(wrap=inside(_layers)),
        examples=(
            Example(
                AOT,
                case(
                    [
                        x("x0", 2),
                        x("x1", 2, 3, 4),
                        *(x(name, 1, 3, 2, dtype="float16") for name in ("x2", "x3")),
                        *(x("w4", 8, 4), x("w5", 8, 2)),
                    ],
                    call(
                        "lstm",
                        "x1",
                        ["x2", "x3"],
                        ["w4", "w5"],
                        False,
                        1,
                        0.0,
                        False,
                        False,
                        False,
                        to="v0 v1 v2",
                    ),
                ),
            ),
        ),
    ),
)
