"""Kernels that give another result each time, or raise in their backward pass.

## native-attention-bias: `_native_multi_head_attention` reads a bias of another dtype out of bounds

```python
import torch

torch._transform_bias_rescale_qkv(torch.zeros(1, 2, 12, dtype=torch.float64), torch.ones(12), 2)
# garbage instead of an error: 12 float32 values read as 12 float64 values
```

**What torch does** (2.13.0, CPU). The fused attention kernel takes the data pointer of `qkv_bias`
without asking its dtype. With float64 tensors, which autocast leaves alone, and a bias of another
dtype it reads past the end of the bias. The result changes from run to run.

**What the documentation says.** The op is internal; `torch.nn.MultiheadAttention` stays off this
path when the bias has another dtype than the query
([#76879](https://github.com/pytorch/pytorch/pull/76879)). Every other op raises for such a mix.

**How it is known.** The result is not a function of the inputs, so no quirk of the reference can
imitate it: the entry covers differing values of this op on eager-cpu, and on
privateuse1, which has the CPU's kernels. Found by `amp-fuzz audit`.

## onednn-conv-gap: bfloat16 convolutions return memory that nobody wrote

```python
import torch

torch.manual_seed(0)
conv = torch.nn.Conv3d(3, 8, 3, padding=1)
x = torch.randn(1, 3, 1, 8, 8)  # one frame of a video
with torch.no_grad():
    right = conv(x)
    with torch.autocast("cpu", torch.bfloat16):
        seen = conv(x)
off = (seen.float() - right).abs()
print((~(off < 0.05)).sum().item(), "of", off.numel(), "are wrong, by up to", off.max().item())
# 447 of 512 are wrong, by up to 0.95 (an Intel Xeon with AMX; other numbers in a longer process)
```

**What torch does** (x86-64). Some of oneDNN's bfloat16 kernels return what was in memory: zeros,
1e25, NaN. With AMX (2.7.1 to 2.15.0, but where it says otherwise):

- `conv3d`, where the first dimension of its input is 1 and padded, and its kernel is more than 1
  there: with 1, 3, 5, 7, 9, 11, 13 or 15 input channels, and for kernel 3 also 12 and 14.
- `conv2d` and `conv3d`, where the last dimension of the output is 1 and its stride is more; not at
  all sizes.
- `conv_transpose3d`, where `output_padding` extends the first dimension and its kernel is more than
  1 there, as `torch.nn.ConvTranspose3d(16, 8, 2, stride=2, output_padding=1)` (seen on 2.7.1,
  2.13.0 and 2.15.0).
- The gradient of a weight, where the last dimension (of the output, if transposed) is padded and
  smaller than its stride (2.13.0). With AVX512-BF16 alone, only for width 1 and 16 or more
  channels.

Of 3,336 small `conv3d` with kernels of 1 to 3 and strides of 1 and 2, 103 were wrong; of 2,844
small `conv2d` with strides of 1 to 3, 127, but none with the sizes of a ResNet; of 2,475 small
transposed convolutions with kernels and strides of 1 to 3 and `output_padding` of 0 or 1, 361 were
wrong or not the same twice. Kernel 3 with stride 2, as 3-D U-Nets have it, was right with 16 and 8
channels. float32 and float16 are right, and so is bfloat16 under
`torch.backends.mkldnn.flags(enabled=False)`; `ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16` avoids the first
three. `ONEDNN_VERBOSE=1` names the kernels: `jit_bf16:avx512_core_bf16,backward_weights`,
`brg_conv_fwd:avx10_1_512_amx`, `brg_deconv:avx10_1_512_amx+brgconv_strided:avx10_1_512_amx`.

**What the documentation says.** CPU autocast runs convolutions and their transposes in bfloat16 by
[default](https://docs.pytorch.org/docs/stable/amp.html#cpu-ops-that-can-autocast-to-bfloat16), so
a float32 model computes with such numbers without asking for them.

**What amp-fuzz does.** The reference calls the same kernel, so the two sides differ only by what
malloc returned. The known entry explains a case only if it has a convolution and both sides agree
once torch runs without oneDNN; after nondeterminism, again and again.

**Upstream.** [#169688](https://github.com/pytorch/pytorch/issues/169688) is the second, and
[#188426](https://github.com/pytorch/pytorch/pull/188426), open, is to mend it; it calls a stride of
1 right. Of the others, no issue that we know of; [oneDNN #542](https://github.com/uxlfoundation/oneDNN/issues/542) (2019) was
a wrong float32 gradient of the same kind.

## linalg-cond-backward: the backward pass of `linalg.cond` raises

```python
import torch

w = torch.randn(3, 3, requires_grad=True)
torch.linalg.cond(w, p=1).backward()
# RuntimeError: one of the variables needed for gradient computation has been modified by an inplace
# operation: [torch.FloatTensor [3, 3]], which is output 0 of LinalgInvEx, is at version 1
```

**What torch does** (2.13.0, CPU; no autocast needed). For `p` of 1, -1, inf, -inf and 'fro',
`linalg.cond` saves the inverse of its input and writes over it afterwards, so that its own
backward pass refuses. Inside a non-reentrant checkpoint the same program runs: there the inverse
is computed again.

**What the documentation says.** Nothing of gradients that some norms lack.

**How it is found.** The relation `checkpoint`: a checkpointed program gives what the program
gives without one. The entry explains that error at that op, and nothing else.

## median-expanded: the median over an expanded dimension is uninitialised memory

```python
import torch

x = torch.tensor([7.0, 8.0])
print(torch.median(x.expand(8, 2), 0).values)
# tensor([ 4.5695e-41, -1.8818e+06]), other numbers in every process; [7, 8] is right
print(torch.median(x.expand(8, 2).contiguous(), 0).values)
# tensor([7., 8.])
```

**What torch does** (2.13.0, CPU; no autocast needed). `torch.median(x, dim)` and
`torch.nanmedian(x, dim)` of a tensor whose dimension `dim` has stride 0 return numbers that are
not in `x`: float32, int64 and others, even for `x.expand(2, 2)`. Over another dimension of the
same tensor, without `dim`, and for `kthvalue`, `sort` and `mode` the results are right.

**What the documentation says.** "Returns a namedtuple (values, indices) where values contains the
median of each row of input in the dimension dim".

**How it is found.** Two runs differ: the kind is nondeterminism. The entry explains that kind at
these two ops.

**Upstream.** Not reported that we know of.
([#46814](https://github.com/pytorch/pytorch/issues/46814) was about discontiguous tensors on
CUDA, and is closed.)

## weight-norm-second: second derivatives of a weight norm are wrong

```python
import torch

v = torch.arange(1.0, 7.0).view(2, 3).requires_grad_()
g = torch.ones(2, 1, requires_grad=True)


def formula(v, g, dim):
    return v * (g / v.norm(2, 1, keepdim=True))


for norm in (torch._weight_norm, formula):
    grads = torch.autograd.grad(norm(v, g, 0).abs().sum(), (v, g), create_graph=True)
    second = torch.autograd.grad(sum(x.sum() for x in grads), (v, g))
    print([x.flatten().tolist() for x in second])
```

**What torch does** (2.13.0, CPU; no autocast needed). `torch._weight_norm`, which
`torch.nn.utils.weight_norm` and the parametrization of that name call, has other second
derivatives than its formula. By `v` they are wrong in every run: `torch.autograd.gradgradcheck`
of it in float64 fails, of the formula it passes. By `g`, in which it is linear, they are memory
that nobody wrote where nothing after it has a second derivative (`abs`, a norm of order 1).
Gradient penalties meet both.

**What the documentation says.** Nothing of it.

**How it is found.** Memory that nobody wrote differs between two runs: the kind is
nondeterminism, and the entry explains that kind in second derivatives of what `_weight_norm`
reads first. The wrong numbers no backend shows that runs eager's formulas, since the reference
runs them too. `amp_fuzz.check_op(torch._weight_norm, v, g, 0)` shows them: the contract `double`.

**Upstream.** Not reported that we know of.
"""

from __future__ import annotations

from amp_fuzz.cases.build import call, case, x
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]


BUGS = (
    Bug(
        id="native-attention-bias",
        what="_native_multi_head_attention reads the memory of a bias of another dtype as its own",
        why="the CPU kernel takes data pointers without checking dtypes, and reads out of bounds",
        link="https://github.com/pytorch/pytorch/pull/76879",
        torch=">=2.7",
        seen="2.13.0",
        backends=("eager-cpu", "privateuse1"),
        ops=("_native_multi_head_attention",),
        kinds=(
            "nondeterminism",
            "bitwise",
            "nonfinite",
        ),
        unshown="the result is memory that nobody wrote: it changes from run to run",
    ),
    Bug(
        id="onednn-conv-gap",
        what="a bfloat16 convolution, or its weight's gradient, is memory that nobody wrote at some shapes",
        why="oneDNN's kernels for AVX512-BF16 and AMX leave out parts of what they should write",
        link="https://github.com/pytorch/pytorch/issues/169688",
        torch=">=2.7",
        seen="2.15.0",
        ops=(
            "conv*",
            "Conv*",
            "mkldnn_convolution*",
            "_convolution*",
            "convolution*",
            "thnn_conv*",
            "slow_conv*",
        ),
        kinds=(
            "nondeterminism",
            "bitwise",
            "nonfinite",
            "grad-bitwise",
            "grad-nonfinite",
            "relation",
        ),
        without="mkldnn",
        unshown="the result is memory that nobody wrote: it changes from run to run",
    ),
    Bug(
        id="linalg-cond-backward",
        what="the backward pass of linalg.cond raises for p of 1, -1, inf, -inf and fro, but not in a checkpoint",
        why="it writes over the inverse that it has saved; a checkpoint computes it again and never asks",
        torch=">=2.7",
        seen="2.15.0",
        backends=("eager-*",),
        ops=("linalg.cond*",),
        kinds=("relation",),
        where="checkpoint: *",
        observed="modified by an inplace operation.*output 0 of LinalgInvEx",
        examples=(
            Example(
                "eager-cpu",
                case(
                    [x("w0", 3, 3)],
                    call("linalg.cond.p", "w0", p=-1),
                    call("sin", "v0", to="v1"),
                    checkpoint="non_reentrant",
                ),
                wrong="",
            ),
        ),
    ),
    Bug(
        id="median-expanded",
        what="torch.median and nanmedian over an expanded dimension return uninitialised memory",
        why="seen where the dimension has stride 0; kthvalue, sort and mode of the same tensor are right",
        torch=">=2.7",
        seen="2.13.0",
        ops=(
            "median.dim",
            "nanmedian.dim",
        ),
        kinds=("nondeterminism",),
        unshown="the result is memory that nobody wrote: it changes from run to run",
    ),
    Bug(
        id="weight-norm-second",
        what="the second derivative of a weight norm is uninitialised memory where nothing after it has one",
        why="seen of _weight_norm alone, by g, in which it is linear; by v its second derivatives are wrong, as gradgradcheck says",
        torch=">=2.7",
        seen="2.13.0",
        ops=("_weight_norm",),
        kinds=("nondeterminism",),
        where="*second.*.grad",
        unshown="the result is memory that nobody wrote: it changes from run to run",
    ),
)
