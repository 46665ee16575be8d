"""More of TorchScript's gradient formulas: they raise, or leave the range.

The formulas stand in `torch/csrc/jit/runtime/symbolic_script.cpp`; no autocast is needed. They
take the place of autograd's from the second call on. Not listed is
`v = w @ w; torch.dropout(v, 0.0, True).sigmoid_()` of a weight: in eager `dropout` with `p=0.0`
returns its input, and `v` is written; scripted it is a copy.

## torchscript-mixed-gradients: a gradient that is not converted

Autograd converts each gradient to the dtype of its operand. The formulas do not: `add` of a
float32 and a bfloat16 tensor hands a float32 gradient to both, and the backward kernel of a norm
refuses it.

```python
import torch


@torch.jit.script
def program(x, w):
    return torch.layer_norm(w, [2]) + x


x, w = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True)
for _ in range(2):
    program(x, w).sum().backward()  # the second: expected scalar type BFloat16 but found Float
```

The kernels of `mm` ("expected m1 and m2 to have the same dtype") and of `softmax`
(`torch.softmax(w * w, 0) + x` of a float16 `w`: "expected scalar type Float but found Half")
refuse it too. The entry explains these errors in a backward pass of a program with such an op,
where they are raised without autocast too.

## torchscript-mixed-vectors: the same of mv

"addmv input tensors must have the same dtype, but got Double, Half, and Double":
`softmax(mv(x, w), 0, dtype=float64)` of float16 raises it in a backward pass.

## torchscript-linear-vector: linear takes its weight for a matrix

`linear` allows a weight of one dimension. The backward pass then raises "shape '[-1, 4]' is
invalid for input of size 1", "list index out of range", "both arguments to matmul need to be at
least 1D", or "size mismatch, got input (2), mat (2x17), vec (8)".

## torchscript-linear-inplace: a result that cannot be written

```python
@torch.jit.script
def program(w, x):
    y = torch.tanh(w)
    return torch.nn.functional.linear(y, x, w).exp_()


w, x = torch.zeros(1, requires_grad=True), torch.zeros(1, 1)
for _ in range(2):
    program(w, x)
    # the second: a view of a leaf Variable that requires grad is being used in an in-place operation.
```

## torchscript-cat-empty: the gradient of an empty tensor that cat leaves out

`cat` takes a tensor of the shape `[0]` whatever the shapes of the others, and leaves it out. The
formula cuts the gradient at its size, 0, in the joined dimension. The part has all the others'
dimensions.

```python
@torch.jit.script
def program(w, v):
    return torch.cat([w, v], -2) * 2


w, v = torch.ones(4, 17, requires_grad=True), torch.ones(0, requires_grad=True)
for _ in range(2):
    program(w, v).sum().backward()
    # the second: DifferentiableGraphBackward returned an invalid gradient at index 1 - got [0, 17]
    # but expected shape compatible with [0]
```

## torchscript-saved: a saved value that was written to

The formula for `type_as` saves the tensor itself, of which it needs the dtype alone. If the
program writes to it afterwards, the backward pass refuses.

```python
@torch.jit.script
def program(x, w):
    return torch.clamp(w * x, None, 1.0).type_as(x).cumsum_(-1)


x, w = torch.ones(2), torch.ones(2, requires_grad=True)
for _ in range(2):
    program(x, w).sum().backward()  # the second: ... has been modified by an inplace operation
```

## torchscript-range: other infinities

The formulas multiply gradients by masks, divide by squares, and add in another order. Their
intermediate values may leave the range of the dtype where eager's do not, or the other way round;
in float16 that is common. The entry explains only elements that depend on values which leave the
range, as the [shadows](../../internals/shadow.md) say, in a program that differs without autocast too and
agrees where graphs are not optimised. A NaN that a mask makes of infinity in a certain element is
[torchscript-formulas] or a new finding: the reference does not know which of the formulas an
optimised graph uses.

```python
import torch


@torch.jit.script
def program(x, w):
    y = x * w
    return y, y * w


x, w = torch.full((2,), 1e38), torch.tensor([1.0, 2.0], dtype=torch.float16, requires_grad=True)
for _ in range(2):
    a, b = program(x, w)
    print(torch.autograd.grad([a, b], w, [-5 * torch.ones(2), torch.ones(2)]))  # nan, then -inf
```
"""

from __future__ import annotations

from amp_fuzz.cases.build import call, case, x
from amp_fuzz.cases.program import DType
from amp_fuzz.upstream.bug import Bug, Example

__all__ = ["BUGS"]

HALVES = [x("w0", 2, 2, dtype="float16"), x("w1", 2, 2, dtype="float16"), x("x2", 2, 2)]

BUGS = (
    Bug(
        id="torchscript-range",
        what="values that leave the range of their dtype on the way make other infinities and NaN in an optimised scripted program",
        why="its formulas multiply by masks, divide by squares, and add in another order",
        torch=">=2.7",
        seen="2.15.0",
        backends=("script*", "trace*"),
        ops=("*",),
        kinds=("range",),
        expected="left the range",
        observed="not finite",
        without="optimised-graphs",
        bare="diverges",
        examples=(
            Example(
                "script",
                case(
                    [x("w0", 1, 3, 8, dtype="float16"), x("x1", 1, 3, 8, domain="overflow")],
                    call("mul", "x1", "w0", form="operator"),
                    call("mul", "v0", "w0", to="v1"),
                    contexts=(),
                ),
            ),
        ),
    ),
    Bug(
        id="torchscript-linear-inplace",
        what="writing to the result of linear of a vector raises in a scripted program, from its second call on",
        why="what a differentiable graph returns is a view, of what counts as a leaf there",
        torch=">=2.7,<2.15",
        seen="2.13.0",
        backends=("script*", "trace*"),
        ops=("linear",),
        kinds=("raise",),
        expected="^no error$",
        observed="^RuntimeError: a view of a leaf Variable that requires grad is being used in an in-place operation",
        without="optimised-graphs",
        bare="diverges",
        examples=(
            Example(
                "script",
                case(
                    [x("w0", 1), x("x1", 1, 1)],
                    call("tanh", "w0"),
                    call("linear", "v0", "x1", "w0", to="v1"),
                    call("exp", "v1", to="v2", form="inplace"),
                    backward="none",
                    contexts=(),
                ),
                wrong="",
            ),
        ),
    ),
    Bug(
        id="torchscript-saved",
        what="a backward pass raises for a value that was written to, which only an optimised scripted program has saved",
        why="TorchScript's formulas save what they ask for a size or a dtype alone, as type_as does",
        torch=">=2.7",
        seen="2.15.0",
        backends=("script*", "trace*"),
        ops=("*",),
        kinds=("raise",),
        where="*torch.autograd.*",
        expected="^no error$",
        observed="^RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation: .* of torch::jit::.*DifferentiableGraph",
        without="optimised-graphs",
        bare="diverges",
        examples=(
            Example(
                "script",
                case(
                    [x("w0", 2), x("x1", 2)],
                    call("mul", "w0", "x1"),
                    call("clamp", "v0", None, 1.0, to="v1"),
                    call("type_as", "v1", "x1", to="v2", form="method"),
                    call("cumsum", "v2", -1, to="v3", form="inplace"),
                    contexts=(),
                ),
            ),
        ),
    ),
    Bug(
        id="torchscript-cat-empty",
        what="the backward pass of cat raises for a weight of the shape [0] in an optimised scripted program",
        why="its formula cuts the gradient into parts as long as the tensors; that of one which cat leaves out has more dimensions",
        torch=">=2.7",
        seen="2.15.0",
        backends=("script*", "trace*"),
        ops=("cat",),
        kinds=("raise",),
        where="*torch.autograd.*",
        expected="^no error$",
        observed="^RuntimeError: Function torch::jit::.*DifferentiableGraphBackward returned an invalid gradient at index \\d+ - got \\[.*\\] but expected shape compatible with \\[0\\]$",
        without="optimised-graphs",
        bare="diverges",
        examples=(
            Example(
                "script",
                case(
                    [x("w0", 4, 17), x("w1", 0)],
                    call("cat", ["w0", "w1"], -2),
                    call("mul.scalar", "v0", 2.0, to="v1"),
                    contexts=(),
                ),
            ),
        ),
    ),
    Bug(
        id="torchscript-linear-vector",
        what="the gradient of linear with a weight of one dimension raises in a scripted program, from its second call on",
        why="TorchScript's formula for linear takes the weight for a matrix",
        torch=">=2.7",
        seen="2.15.0",
        backends=("script*", "trace*"),
        ops=("linear",),
        kinds=("raise",),
        where="*torch.autograd.*",
        expected="^no error$",
        observed="^RuntimeError: (shape '\\[-1, \\d+\\]' is invalid for input of size|both arguments to matmul need to be at least 1D|list index out of range$|size mismatch, got input \\(\\d+\\), mat \\(\\d+x\\d+\\), vec \\(\\d+\\)$|inconsistent tensor size, expected tensor \\[\\d+\\] and src \\[\\d+\\] to have the same number of elements)",
        without="optimised-graphs",
        bare="diverges",
        examples=tuple(
            Example(
                "script",
                case(
                    [x("x0", *shape), x("w1", 4)],
                    call("mul", "x0", "x0"),
                    call("linear", "v0", "w1", None, to="v1"),
                    contexts=(),
                    second=second,
                ),
            )
            for shape, second in (((4,), "none"), ((4,), "double"), ((2, 3, 4), "none"))
        ),
    ),
    Bug(
        id="torchscript-mixed-gradients",
        what="the gradient of a norm, mm, linear or softmax raises for two dtypes in a scripted program that adds or multiplies a wider value",
        why="TorchScript's formulas hand a gradient on in the dtype of the result; autograd converts it to the operand's",
        torch=">=2.7",
        seen="2.15.0",
        backends=("script*", "trace*"),
        ops=(
            "*batch_norm*",
            "instance_norm*",
            "layer_norm*",
            "linear",
            "matmul",
            "mm",
            "softmax",
        ),
        kinds=("raise",),
        where="if * torch.autograd.backward(*",
        expected="^no error$",
        observed="^RuntimeError: (expected scalar type \\w+ but found \\w+|expected m1 and m2 to have the same dtype, but got: \\S+ != \\S+)$",
        without="optimised-graphs",
        bare="diverges",
        examples=(
            Example(
                "script",
                case(
                    [
                        x("x0", 3, 4),
                        x("w1", 3, 4, dtype="bfloat16"),
                        x("x2", 4),
                        x("x3", 4, domain="positive"),
                    ],
                    call("batch_norm", "w1", "x2", "x3"),
                    call("add", "x0", "v0", to="v1"),
                    contexts=(),
                ),
            ),
            *(
                Example(
                    "script",
                    case(
                        HALVES,
                        call("mul", "w0", "w1"),
                        made,
                        call("mul", "v1", "x2", to="v2"),
                        contexts=(),
                    ),
                )
                for made in (call("mm", "w0", "w1", to="v1"), call("softmax", "v0", 0, to="v1"))
            ),
        ),
    ),
    Bug(
        id="torchscript-mixed-vectors",
        what="the gradient of mv raises for two dtypes in a scripted program, behind a softmax with a wider dtype or the like",
        why="as torchscript-mixed-gradients; in a second backward pass, too",
        torch=">=2.7",
        seen="2.15.0",
        backends=("script*", "trace*"),
        ops=("mv",),
        kinds=("raise",),
        where="*torch.autograd.*",
        expected="^no error$",
        # The latter until 2.11.
        observed=(
            r"^RuntimeError: (addmv input tensors must have the same dtype, but got \w+, \w+, and \w+"
            r"|expected scalar type \w+ but found \w+)$"
        ),
        without="optimised-graphs",
        bare="diverges",
        examples=tuple(
            Example(
                "script",
                case(
                    [x("x0", 3, 4, dtype="float16"), x("w1", 4, dtype="float16")],
                    call("mv", "x0", "w1"),
                    call("softmax", "v0", 0, dtype=DType("float64"), to="v1"),
                    contexts=(),
                    second=second,
                ),
                torch=since,
            )
            for second, since in (("none", ">=2.13"), ("double", ""))
        ),
    ),
)
