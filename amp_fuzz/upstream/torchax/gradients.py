"""torch's own backward pass, and GradScaler, on torchax tensors.

Seen with torchax 0.0.13 and jax 0.10.2 on the CPU. The scripts start with the lines that
[torchax](../torchax.md) shows.

## torchax-checkpoint: a checkpoint is recomputed without autocast, by other ops

When `torch.utils.checkpoint.checkpoint` recomputes, it restores torch's autocast state, but not
torchax's. Modes for torch functions are also off in a backward pass
([#147995](https://github.com/pytorch/pytorch/issues/147995)), and torchax uses one. So other ops
run, in other dtypes, and a checkpoint that is not reentrant raises CheckpointError. The entry
matches the text of this error. If the saved tensors happen to have the same shapes and dtypes, no
error is raised and the gradients are wrong. amp-fuzz reports such gradients as new.

```python
from torch.utils.checkpoint import checkpoint

with env:
    w = torch.ones(2, 2).to("jax").requires_grad_()
    with torchax.amp.autocast("jax", torch.bfloat16):
        y = checkpoint(lambda a: (a @ a).exp(), w, use_reentrant=False)
    y.sum().backward()  # CheckpointError: ... saved metadata: bfloat16, recomputed: float32
```
"""

from __future__ import annotations

from amp_fuzz.cases.build import call, case, under, x
from amp_fuzz.cases.program import Checkpoint
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]

BUGS = (
    Bug(
        id="torchax-checkpoint",
        what="torch.utils.checkpoint raises CheckpointError when torch's own backward pass recomputes on torchax",
        why="torchax's autocast and its mode for torch functions are off there: other ops run, in other dtypes",
        torch=">=2.7",
        seen="2.13.0",
        harm="raises",
        backends=("torchax[autograd]",),
        ops=("*",),
        kinds=("raise",),
        where="if starts: torch.autograd.backward(*",
        expected="^no error$",
        observed="^CheckpointError: torch.utils.checkpoint: ",
        examples=(
            Example(
                "torchax[autograd]",
                case(
                    [x("x0", 2, 2), x("w1", 2, 2)],
                    under(Checkpoint(), call("mm", "x0", "w1"), call("exp", "v0", to="v1")),
                ),
                wrong="",
            ),
        ),
    ),
)
