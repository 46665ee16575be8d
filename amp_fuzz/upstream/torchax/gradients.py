"""torch's own backward pass, and GradScaler, on torchax tensors.

Seen with torchax 0.0.13 and jax 0.10.2 on the CPU. The scripts start with the lines that
[torchax](../torchax.md) shows.

## torchax-cut-graph: linear, einsum, indexing and casts have no gradient

torchax computes the torch functions that it knows in JAX as soon as they are called, above
autograd, and wraps the result in a new tensor. That tensor does not require grad, and there is no
warning. Tensors before it get the gradient None, or only the gradient of other paths. The
functions are `torch.nn.functional.linear` (and so `torch.nn.Linear`), `pad`, `max_pool2d`,
`one_hot`, `torch.angle`, `argsort`, `cdist`, `corrcoef`, `diag`, `einsum`, `logdet`, `lu`,
`lu_solve`, `svd`, `tensor_split`, `linalg.det`, `linalg.matrix_power`, `linalg.slogdet`,
`linalg.solve`, `linalg.solve_ex`, `linalg.svd`, `linalg.tensorsolve`, and the methods `x[...]`,
`x.flatten()`, `x.repeat_interleave()` and `x.to(dtype)`. `x.float()`, `torch.flatten(x)` and
`x.det()` do not cut the graph.

```python
with env:
    w = torch.ones(2, 2).to("jax").requires_grad_()
    print(torch.nn.functional.linear(x.to("jax"), w).requires_grad)  # False
    print((x.to("jax") @ w.T).requires_grad)  # True
    loss = (w[0] + w.sum()).sum()
    loss.backward()
    print(w.grad.cpu())  # 2 everywhere; torch: 3 in the first row
```

The reference detaches the results of these functions (`torchax-cut-graph`). It does so in a mode
for torch functions, so functions called inside another function are not detached. A test compares
the list with torchax's own.

## torchax-layer-norm-backward: the backward pass of layer_norm raises

`_aten_native_layer_norm_backward` takes six arguments, but the op has eight. Its body calls
`jax.lax.native_layer_norm_backward`, which does not exist in JAX. So `torch.nn.LayerNorm` and all
transformer layers have no backward pass.

```python
with env:
    w = torch.ones(2, 4).to("jax").requires_grad_()
    torch.nn.functional.layer_norm(w, [4]).sum().backward()  # TypeError
```

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

## torchax-backward-sizes: autograd does not see changed shapes

`x.squeeze_()`, `x.transpose_()` and similar methods change the array of a torchax tensor, but not
the tensor's sizes ([torchax-sizes]). torch's C++ calls them: `matmul` of a vector and a matrix
calls `squeeze_` last; recurrent modules with `batch_first=True`, `stft` and `quantile` call
others. The backward pass then raises. It also raises after `copy_` from a source that must be
broadcast.

```python
with env:
    a, w = torch.ones(3).to("jax"), torch.ones(3, 4).to("jax").requires_grad_()
    y = a @ w
    y.backward(torch.ones(4).to("jax"))  # RuntimeError: invalid gradient at index 0 - got [4] ...
```

## torchax-backward-raises: derivatives of single ops

The entry does not cover wrong gradients, because it would explain every wrong gradient behind
these ops. Each wrong gradient is reported as new.

| op | its derivative by torch's own autograd | entry |
|---|---|---|
| `div(rounding_mode=)` | TypeError: `_aten_fill() got an unexpected keyword argument 'layout'` | `torchax-backward-raises` |
| `linalg.eig`, `linalg.eigh` | ValueError: `diagonal` of negative dimensions | the same |
| `linalg.eigvals`, and `linalg.eig` if only one result has a gradient | RuntimeError: `Expected Tensor but got None` | the same |
| `max_unpool1d`, `max_unpool2d` | IndexError, ValueError | the same |
| `native_dropout` with a p of 0 | RuntimeError: `leaf variable has been moved into the graph interior`: the lowering returns its argument | the same |
| `linalg.eigvals` of a batch | ValueError: `Incompatible shapes for broadcasting` | none |
| `take` of an index that occurs twice | only the last occurrence counts: `put(accumulate=True)` does not accumulate | none |
| `diagonal(dim1=1, dim2=0)` with an offset | is written to the transposed place, or nowhere | none |
| `max_pool1d`, `max_pool1d_with_indices`, `max_pool2d_with_indices` | the whole window gets it, and rows and columns are mistaken for batch and channel | none |
| `qr`, `linalg.qr`, `linalg.householder_product`, `orgqr`, `linalg.cond`, `cholesky_inverse`, `svd` as a method | wrong; NaN | none |
| `smooth_l1_loss(beta=0)` | NaN: 0 / 0 | none |

```python
with env:
    w = torch.ones(4).to("jax").requires_grad_()
    torch.take(w, torch.tensor([1, 1, 2]).to("jax")).sum().backward()
    print(w.grad.cpu())  # [0, 1, 1, 0]; torch: [0, 2, 1, 0]
```

## torchax-zero-gradients: zeros instead of no gradient

`jax.vjp` gives zeros for an input that no output depends on. torch gives None. So
`GradScaler.unscale_` finds a float16 gradient, and raises. In the comparison, zeros and None count
as equal; the entry covers the error.
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
