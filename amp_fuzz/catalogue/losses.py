"""Loss functions: where autocast asks for float32, and where CUDA refuses one of them.

``torch.nn.functional`` takes the reduction as a word. The `overload` and `out` forms skip its
Python and take a number; where ``torch`` has a function of its own, that is the `overload` form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from amp_fuzz.catalogue.core import Builder, Call, Out, Shape, Value, op, out

F = "torch.nn.functional"
FLOATS = ("float32", "float64")
Build = Callable[[Builder], Call]

_WORDS = ("mean", "none", "sum")
_NUMBERS = (1, 0, 2)
_NONE: Mapping[str, Any] = {}


def _reduction(g: Builder) -> str:
    # Into out= the elementwise losses write their terms first: a reduction warns of a resize, and
    # binary_cross_entropy on CPU even returns the first term.
    return "none" if g.form == "out" else g.choice(_WORDS)


def _spelled(g: Builder, reduction: str) -> Any:
    return _NUMBERS[_WORDS.index(reduction)] if g.form in ("overload", "out") else reduction


def _reduced(
    g: Builder, args: Sequence[Any], unreduced: Shape, kwargs: Mapping[str, Any] = _NONE
) -> Call:
    """Draw a reduction; `unreduced` is the shape of the loss without one."""
    reduction = _reduction(g)
    # The functions of `torch` do not reduce by default, against their schemas: never leave it out.
    spelled = {"reduction": _spelled(g, reduction)}
    return Call(tuple(args), out(unreduced if reduction == "none" else ()), {**kwargs, **spelled})


# -- elementwise losses ---------------------------------------------------------------------------


def _elementwise(**options: Sequence[Any]) -> Build:
    def build(g: Builder) -> Call:
        x = g.tensor(empty=True)
        return _reduced(g, (x, g.tensor(x.shape)), x.shape, g.options(**options))

    return build


# name, whether it has an out= overload, options. Huber's delta and smooth L1's beta switch between
# the quadratic and the linear part; smooth L1 at beta 0 is the L1 kernel.
for _name, _has_out, _options in (
    ("l1_loss", False, {}),
    ("mse_loss", True, {}),
    ("huber_loss", True, {"delta": (1.0, 0.5, 3.0)}),
    ("smooth_l1_loss", True, {"beta": (1.0, 0.0, 0.5)}),
    ("soft_margin_loss", True, {}),
):
    op(
        _name,
        f"aten::{_name}",
        *(("aten::l1_loss",) if _name == "smooth_l1_loss" else ()),
        function=f"{F}.{_name}",
        overload=f"{_name}.default",
        out=f"torch.ops.aten.{_name}.out" if _has_out else None,
    )(_elementwise(**_options))


# With a weight these are Python over other kernels.
for _name, _overloads in (
    ("l1_loss", ("aten::sum",)),
    ("mse_loss", ("aten::pow.Tensor_Scalar", "aten::sum")),
    ("huber_loss", ("aten::huber_loss", "aten::sum")),
):

    @op(f"{_name}.weight", *_overloads, function=f"{F}.{_name}")
    def _weighted(g: Builder) -> Call:
        x = g.tensor()
        return _reduced(
            g, (x, g.tensor(x.shape)), x.shape, {"weight": g.tensor(x.shape, grad=False)}
        )


# 0 and 1 are as good as -1 and 1: they reach the branch for 1 and the branch for neither.
def _sign(g: Builder, shape: Shape) -> Value:
    if g.flag():
        return g.tensor(shape, domain="integers", grad=False)
    return g.tensor(shape, kind="index", bound=2)


@op(
    "hinge_embedding_loss",
    "aten::hinge_embedding_loss",
    function=f"{F}.hinge_embedding_loss",
    overload="torch.hinge_embedding_loss({args})",
)
def _hinge_embedding_loss(g: Builder) -> Call:
    x = g.tensor(empty=True)
    return _reduced(g, (x, _sign(g, x.shape)), x.shape, g.options(margin=(1.0, 0.5)))


@op(
    "margin_ranking_loss",
    "aten::margin_ranking_loss",
    function=f"{F}.margin_ranking_loss",
    overload="torch.margin_ranking_loss({args})",
)
def _margin_ranking_loss(g: Builder) -> Call:
    x = g.tensor(empty=True)
    args = (x, g.tensor(x.shape), _sign(g, x.shape))
    return _reduced(g, args, x.shape, g.options(margin=(0.0, 0.5)))


@op(
    "cosine_embedding_loss",
    "aten::cosine_embedding_loss",
    function=f"{F}.cosine_embedding_loss",
    overload="torch.cosine_embedding_loss({args})",
)
def _cosine_embedding_loss(g: Builder) -> Call:
    x = g.tensor(rank=(1, 2))
    args = (x, g.tensor(x.shape), _sign(g, x.shape[:-1]))
    return _reduced(g, args, x.shape[:-1], g.options(margin=(0.0, 0.5)))


def _triplet(**options: Sequence[Any]) -> Build:
    def build(g: Builder) -> Call:
        x = g.tensor(rank=(1, 2))
        args = (x, g.tensor(x.shape), g.tensor(x.shape))
        return _reduced(g, args, x.shape[:-1], g.options(**options))

    return build


op(
    "triplet_margin_loss",
    "aten::triplet_margin_loss",
    function=f"{F}.triplet_margin_loss",
    overload="torch.triplet_margin_loss({args})",
)(_triplet(margin=(1.0, 0.1), p=(2.0, 1.0, 3.0), swap=(False, True)))
op(
    "triplet_margin_with_distance_loss",
    "aten::norm.ScalarOpt_dim",
    "aten::sum",
    function=f"{F}.triplet_margin_with_distance_loss",
)(_triplet(margin=(1.0, 0.1), swap=(False, True)))


# -- probabilities --------------------------------------------------------------------------------


# The `module` form takes logits that the program has: the pair of calls that CUDA refuses.
@op(
    "binary_cross_entropy",
    "aten::binary_cross_entropy",
    function=f"{F}.binary_cross_entropy",
    overload="binary_cross_entropy.default",
    out="torch.ops.aten.binary_cross_entropy.out",
    module=f"{F}.binary_cross_entropy(torch.sigmoid({{0}}), {{args1}})",
    mixed="raises",
)
def _binary_cross_entropy(g: Builder) -> Call:
    shape = g.shape()
    # It raises for what is no probability, when it sees the values: a compiler cannot know before.
    wrong = g.int(0, 15)
    domain = None if g.form == "module" else "positive" if wrong == 14 else "unit"
    x = g.tensor(shape, domain=domain)
    target = g.tensor(shape, domain="positive" if wrong == 15 else "unit", grad=False)
    kwargs = {"weight": g.tensor(shape, grad=False)} if g.flag() else {}
    return _reduced(g, (x, target), shape, kwargs)


@op(
    "binary_cross_entropy_with_logits",
    "aten::binary_cross_entropy_with_logits",
    function=f"{F}.binary_cross_entropy_with_logits",
    overload="torch.binary_cross_entropy_with_logits({args})",
    out="torch.ops.aten.binary_cross_entropy_with_logits.out",
)
def _binary_cross_entropy_with_logits(g: Builder) -> Call:
    x = g.tensor(empty=True)
    target = g.tensor(x.shape, domain="unit")
    kwargs: dict[str, Any] = {}
    if g.flag():
        kwargs["weight"] = g.broadcastable(x.shape)
    if g.flag():
        kwargs["pos_weight"] = g.tensor(x.shape[-1:], grad=False)
    return _reduced(g, (x, target), x.shape, kwargs)


@op(
    "kl_div",
    "aten::kl_div",
    function=f"{F}.kl_div",
    overload="torch.kl_div({args})",
    cpu_scalars=(1,),
)
def _kl_div(g: Builder) -> Call:
    x = g.tensor(rank=(1, 3))
    # F.kl_div warns at each "mean"; torch.kl_div has it, and has no "batchmean".
    words = _WORDS if g.form == "overload" else ("batchmean", "none", "sum")
    reduction = g.choice(words)
    kwargs = g.options(log_target=(False, True))
    kwargs["reduction"] = reduction if reduction == "batchmean" else _spelled(g, reduction)
    y = g.broadcastable(x.shape)
    return Call((x, y), out(x.shape if reduction == "none" else ()), kwargs)


@op(
    "poisson_nll_loss",
    "aten::poisson_nll_loss",
    function=f"{F}.poisson_nll_loss",
    overload="torch.poisson_nll_loss({args})",
    cpu_scalars=(1,),
)
def _poisson_nll_loss(g: Builder) -> Call:
    x = g.tensor(empty=True)
    target = g.tensor(x.shape)
    if g.form == "function":
        options = g.options(log_input=(True, False), full=(False, True), eps=(1e-8, 1e-3))
        return _reduced(g, (x, target), x.shape, options)
    reduction = _reduction(g)
    args = (x, target, not g.flag(), g.flag(), 1e-8, _spelled(g, reduction))
    return Call(args, out(x.shape if reduction == "none" else ()))


# Its first kernel that a table lists is the logarithm of the variance.
@op(
    "gaussian_nll_loss",
    "aten::log",
    "aten::pow.Tensor_Scalar",
    "aten::sum",
    function=f"{F}.gaussian_nll_loss",
)
def _gaussian_nll_loss(g: Builder) -> Call:
    x = g.tensor(rank=(1, 3))
    target = g.tensor(x.shape)
    var = g.tensor(g.choice((x.shape, x.shape[:-1])), domain="positive")
    return _reduced(g, (x, target, var), x.shape, g.options(full=(False, True), eps=(1e-6, 0.5)))


# -- classes --------------------------------------------------------------------------------------


def _classes(g: Builder, *ranks: int) -> tuple[Value, int, Shape]:
    """Scores of one of `ranks`, the number of classes, and the shape of the target."""
    classes, rank = g.int(2, 5), g.choice(ranks)
    rest = tuple(g.int(1, 4) for _ in range(rank - 1))
    shape = (classes,) if not rest else (rest[0], classes, *rest[1:])
    return g.tensor(shape), classes, rest


def _class_weight(g: Builder, classes: int) -> dict[str, Any]:
    return {"weight": g.tensor((classes,), grad=False)} if g.flag() else {}


# -100 is the default; of the others, 0 is always among the classes.
_IGNORED = (-100, 0, 1)


def _nll(*ranks: int) -> Build:
    def build(g: Builder) -> Call:
        # Below torch.nn.functional each kernel takes one rank, batched.
        x, classes, rest = _classes(g, *(ranks if g.form == "function" else (ranks[0],)))
        kwargs = _class_weight(g, classes) | g.options(ignore_index=_IGNORED)
        return _reduced(g, (x, g.tensor(rest, kind="index", bound=classes)), rest, kwargs)

    return build


op(
    "nll_loss",
    "aten::nll_loss",
    function=f"{F}.nll_loss",
    overload="nll_loss.default",
    out="torch.ops.aten.nll_loss.out",
    mixed="raises",
)(_nll(2, 1))
op(
    "nll_loss2d",
    "aten::nll_loss2d",
    function=f"{F}.nll_loss",
    overload="nll_loss2d.default",
    out="torch.ops.aten.nll_loss2d.out",
    mixed="raises",
)(_nll(4, 3))


# The kernels where cross_entropy_loss itself is not listed; the sums are those of label smoothing.
_CROSS_ENTROPY = (
    "aten::cross_entropy_loss",
    "aten::log_softmax.int",
    "aten::sum.dim_IntList",
    "aten::sum",
)


@op(
    "cross_entropy",
    *_CROSS_ENTROPY,
    "aten::nll_loss",
    "aten::nll_loss2d",
    function=f"{F}.cross_entropy",
    overload="cross_entropy_loss.default",
    mixed="raises",
)
def _cross_entropy(g: Builder) -> Call:
    x, classes, rest = _classes(g, 2, 1, 3, 4)
    kwargs = _class_weight(g, classes)
    kwargs |= g.options(ignore_index=_IGNORED, label_smoothing=(0.0, 0.1))
    return _reduced(g, (x, g.tensor(rest, kind="index", bound=classes)), rest, kwargs)


# A target of probabilities never meets nll_loss.
@op(
    "cross_entropy.probabilities",
    *_CROSS_ENTROPY,
    function=f"{F}.cross_entropy",
    overload="cross_entropy_loss.default",
)
def _cross_entropy_probabilities(g: Builder) -> Call:
    x, classes, rest = _classes(g, 2, 1, 3, 4)
    kwargs = _class_weight(g, classes) | g.options(label_smoothing=(0.0, 0.1))
    return _reduced(g, (x, g.tensor(x.shape, domain="unit")), rest, kwargs)


# A Python function over linear and cross_entropy.
@op(
    "linear_cross_entropy",
    *_CROSS_ENTROPY,
    "aten::nll_loss",
    "aten::linear",
    function=f"{F}.linear_cross_entropy",
    mixed="raises",
    torch=">=2.13",
)
# With options it is a custom op, which works in chunks of the batch and meets no autocast kernel.
@op(
    "linear_cross_entropy.chunked",
    module=f"{F}.linear_cross_entropy({{args}}, options=torch.nn.LinearCrossEntropyOptions())",
    mixed="raises",
    torch=">=2.13",
)
def _linear_cross_entropy(g: Builder) -> Call:
    x = g.tensor(rank=(1, 2))
    classes, rest = g.int(2, 5), x.shape[:-1]
    weight = g.tensor((classes, x.shape[-1]), weight=True)
    kwargs = _class_weight(g, classes)
    if g.flag():
        kwargs["linear_bias"] = g.tensor((classes,), weight=True)
    target = g.tensor(rest, kind="index", bound=classes)
    return _reduced(g, (x, weight, target), rest, kwargs)


@op(
    "multi_margin_loss",
    "aten::multi_margin_loss",
    function=f"{F}.multi_margin_loss",
    overload="multi_margin_loss.default",
    out="torch.ops.aten.multi_margin_loss.out",
    mixed="raises",
    floats=FLOATS,
)
def _multi_margin_loss(g: Builder) -> Call:
    x, classes, rest = _classes(g, 2, 1)
    kwargs = _class_weight(g, classes) | g.options(p=(1, 2), margin=(1.0, 0.5))
    return _reduced(g, (x, g.tensor(rest, kind="index", bound=classes)), rest, kwargs)


@op(
    "multilabel_margin_loss",
    "aten::multilabel_margin_loss",
    function=f"{F}.multilabel_margin_loss",
    overload="multilabel_margin_loss.default",
    out="torch.ops.aten.multilabel_margin_loss.out",
    floats=FLOATS,
)
def _multilabel_margin_loss(g: Builder) -> Call:
    x, classes, rest = _classes(g, 2, 1)
    return _reduced(g, (x, g.tensor(x.shape, kind="index", bound=classes)), rest)


@op(
    "multilabel_margin_loss_forward",
    "aten::multilabel_margin_loss_forward",
    overload="multilabel_margin_loss_forward.default",
    floats=FLOATS,
)
def _multilabel_margin_loss_forward(g: Builder) -> Call:
    x, classes, rest = _classes(g, 2, 1)
    target, reduction = g.tensor(x.shape, kind="index", bound=classes), _reduction(g)
    loss = rest if reduction == "none" else ()
    return Call((x, target, _spelled(g, reduction)), (Out(loss), Out(x.shape)))


@op(
    "multilabel_soft_margin_loss",
    "aten::sum.dim_IntList",
    "aten::sum",
    function=f"{F}.multilabel_soft_margin_loss",
)
def _multilabel_soft_margin_loss(g: Builder) -> Call:
    x = g.tensor(rank=(1, 3))
    kwargs = {"weight": g.tensor(x.shape[-1:], grad=False)} if g.flag() else {}
    return _reduced(g, (x, g.tensor(x.shape, domain="unit")), x.shape[:-1], kwargs)


# -- sequences ------------------------------------------------------------------------------------


def _ctc(g: Builder, lengths_as: Literal["list", "tensor"]) -> Call:
    steps, batch, symbols, longest = g.int(3, 8), g.int(1, 3), g.int(2, 4), g.int(1, 3)
    # The last class is the blank, so that no drawn target is one.
    x = g.tensor((steps, batch, symbols + 1))
    targets = g.tensor((batch, longest), kind="index", bound=symbols)
    lengths: list[Any]
    if lengths_as == "tensor":
        lengths = [g.tensor((batch,), kind="index", bound=n + 1) for n in (steps, longest)]
    else:
        lengths = [[g.int(1, n) for _ in range(batch)] for n in (steps, longest)]
    kwargs = {"blank": symbols, **g.options(zero_infinity=(False, True))}
    return _reduced(g, (x, targets, *lengths), (batch,), kwargs)


op(
    "ctc_loss",
    "aten::ctc_loss.Tensor",
    function=f"{F}.ctc_loss",
    overload="torch.ctc_loss({args})",
    floats=FLOATS,
)(lambda g: _ctc(g, "tensor"))
op(
    "ctc_loss.lists",
    "aten::ctc_loss.IntList",
    function=f"{F}.ctc_loss",
    overload="torch.ctc_loss({args})",
    floats=FLOATS,
)(lambda g: _ctc(g, "list"))
