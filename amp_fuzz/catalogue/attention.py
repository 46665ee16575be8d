"""Attention: the function, the modules and their fast paths, and the fused overloads."""

from __future__ import annotations

from typing import Any

from amp_fuzz.catalogue.core import Builder, Call, Out, Value, op, out

# (embedding, heads); the fast paths need an even number of heads.
_SIZES = ((4, 2), (8, 2), (6, 3), (4, 1), (8, 4))


def _mask(g: Builder, *shape: int) -> Value | None:
    """Draw no mask, a boolean one, or one that is added."""
    kind = g.choice((None, "bool", "float"))
    return None if kind is None else g.tensor(shape, kind=kind, grad=False)


@op(
    "scaled_dot_product_attention",
    "aten::scaled_dot_product_attention",
    function="torch.nn.functional.scaled_dot_product_attention",
    mixed="raises",
)
def _sdpa(g: Builder) -> Call:
    q = g.tensor(rank=(2, 4))
    *batch, length, embedding = q.shape
    keys = g.choice((length, 3, 5))
    grouped = len(batch) == 2 and batch[1] > 1 and g.int(0, 3) == 3
    heads = [batch[0], 1] if grouped else batch
    k = g.tensor((*heads, keys, embedding))
    v = g.tensor((*heads, keys, g.choice((embedding, 4))))
    options = g.options(is_causal=(False, True), scale=(None, 0.5))
    if grouped:
        options["enable_gqa"] = True
    # Causal attention takes no mask.
    mask = None if "is_causal" in options else _mask(g, *g.choice(((), tuple(batch))), length, keys)
    if mask is not None:
        options["attn_mask"] = mask
    return Call((q, k, v), out((*batch, length, v.shape[-1])), options)


@op(
    "_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention",
    function="torch._scaled_dot_product_flash_attention",
    overload="_scaled_dot_product_flash_attention.default",
    mixed="raises",
    floats=("bfloat16", "float16"),
    devices=("cuda", "xpu", "mtia", "maia"),
)
def _flash(g: Builder) -> Call:
    # The head size is a multiple of 8 here: only the public call pads it.
    batch, heads, length = g.choice((1, 2)), g.choice((2, 1)), g.choice((3, 8))
    q = g.tensor((batch, heads, length, 8))
    k = g.tensor((batch, heads, g.choice((length, 5)), 8))
    v = g.tensor(k.shape)
    # Log-sum-exp is float32 by definition; the other seven are bookkeeping.
    statistics = Out(q.shape[:3], "float32")
    unused = [Out((), "int64", keep=False)] * 7
    return Call((q, k, v, 0.0, g.flag()), (*out(q.shape), statistics, *unused))


def _projections(
    g: Builder, embedding: int, *, trained: bool, bias: bool = True, prefix: str = ""
) -> dict[str, Value]:
    """Draw the weights of `MultiheadAttention` by name."""
    shapes = {
        "in_proj_weight": (3 * embedding, embedding),
        "in_proj_bias": (3 * embedding,),
        "out_proj.weight": (embedding, embedding),
        "out_proj.bias": (embedding,),
    }
    return {
        prefix + name: g.tensor(shape, weight=trained, grad=trained)
        for name, shape in shapes.items()
        if bias or not name.endswith("bias")
    }


def _weights_shape(x: Value, keys: int, heads: int, *, first: bool) -> tuple[int, ...]:
    """Return the shape of the weights that attention returns, not averaged over heads."""
    length, batch = (x.shape[1], x.shape[0]) if first else (x.shape[0], x.shape[1])
    return batch, heads, length, keys


def _attended(shape: tuple[int, ...], weights: tuple[int, ...], need: bool, average: bool) -> Any:
    """Return the outputs of multi-head attention; the second is None unless it is needed."""
    if average:
        weights = (weights[0], *weights[2:])
    return (*out(shape), Out(weights, keep=need))


@op(
    "_native_multi_head_attention",
    "aten::_native_multi_head_attention",
    function="torch._native_multi_head_attention",
    overload="_native_multi_head_attention.default",
    mixed="raises",
)
def _native(g: Builder) -> Call:
    # It has no backward, and takes no mask but a boolean one.
    embedding, heads = g.choice(_SIZES)
    x = g.tensor((g.choice((2, 1)), g.choice((3, 5)), embedding), grad=False)
    k, v = (x, x) if g.flag() else (g.tensor(x.shape, grad=False), g.tensor(x.shape, grad=False))
    weights = _projections(g, embedding, trained=False)
    need, average = g.choice(((True, True), (True, False), (False, True)))
    # Mask type 0 masks (query, key) pairs, 1 the keys of each batch.
    kind = g.choice((None, 0, 1))
    length = x.shape[1]
    shape = (length, length) if kind == 0 else x.shape[:2]
    mask = None if kind is None else g.tensor(shape, kind="bool")
    args = (x, k, v, embedding, heads, *weights.values(), mask, need, average, kind)
    kept = _weights_shape(x, length, heads, first=True)
    return Call(args, _attended(x.shape, kept, need, average))


# What multi-head attention reaches: the first two where nobody asks for its weights, else the rest.
_INSIDE = (
    "aten::linear",
    "aten::scaled_dot_product_attention",
    "aten::bmm",
    "aten::baddbmm",
    "aten::softmax.int",
)


@op(
    "multi_head_attention_forward",
    *_INSIDE,
    "aten::cat",
    function="torch.nn.functional.multi_head_attention_forward",
    mixed="raises",
)
def _forward(g: Builder) -> Call:
    embedding, heads = g.choice(_SIZES)
    batch, length, keys = g.choice((2, 1)), g.choice((3, 5)), g.choice((3, 4))
    zero = g.int(0, 3) == 3
    q = g.tensor((length, batch, embedding))
    k = g.tensor((keys, batch, embedding))
    v = g.tensor(k.shape)
    weights = _projections(g, embedding, trained=True)
    need, average = g.choice(((True, True), (True, False), (False, True)))
    options: dict[str, Any] = {"need_weights": need, "average_attn_weights": average}
    mask = _mask(g, *g.choice(((), (batch * heads,))), length, keys)
    if mask is not None:
        options["attn_mask"] = mask
    # Between the projections stand the biases of key and value, a zero key, and dropout.
    a, b, c, d = weights.values()
    args = (q, k, v, embedding, heads, a, b, None, None, zero, 0.0, c, d)
    kept = _weights_shape(q, keys + zero, heads, first=False)
    return Call(args, _attended(q.shape, kept, need, average), options)


@op(
    "MultiheadAttention",
    *_INSIDE,
    "aten::_native_multi_head_attention",
    module="torch.func.functional_call(torch.nn.MultiheadAttention({embedding}, {heads}, "
    "bias={bias}, batch_first={first}, device='meta').train({training}), "
    "dict(zip({names}, {weights})), ({0}, {1}, {2}), "
    "dict(need_weights={need}, average_attn_weights={average}, attn_mask={mask}))",
    mixed="raises",
)
def _module(g: Builder) -> Call:
    # In eval mode, where no weight requires grad, self-attention takes the fast path.
    training = not g.flag()
    embedding, heads = g.choice(_SIZES)
    first, bias = not g.flag(), g.int(0, 3) < 3
    x = g.tensor((g.choice((2, 3)), g.choice((3, 2)), embedding), grad=training)
    k, v = (x, x) if not g.flag() else (g.tensor(x.shape), g.tensor(x.shape))
    weights = _projections(g, embedding, trained=training, bias=bias)
    need, average = g.choice(((True, True), (True, False), (False, True)))
    length = x.shape[1 if first else 0]
    options = {
        "embedding": embedding,
        "heads": heads,
        "bias": bias,
        "first": first,
        "training": training,
        "names": list(weights),
        "weights": list(weights.values()),
        "need": need,
        "average": average,
        "mask": _mask(g, length, length),
    }
    kept = _weights_shape(x, length, heads, first=first)
    return Call((x, k, v), _attended(x.shape, kept, need, average), options)


def _register_layer(kind: str, attentions: tuple[str, ...], call: str, *fused: str) -> None:
    """Register a transformer layer: its attentions, a feed-forward pair, a norm for each of them.

    The norms share one pair of weights: it saves draws, and a leaf that is used twice is what
    autocast's weight cache is for.
    """

    @op(
        kind,
        "aten::layer_norm",
        "aten::linear",
        "aten::scaled_dot_product_attention",
        "aten::_native_multi_head_attention",
        *fused,
        module=f"torch.func.functional_call(torch.nn.{kind}({{embedding}}, {{heads}}, {{wide}}, "
        "dropout=0.0, activation={activation}, batch_first=True, norm_first={first}, "
        f"device='meta').train({{training}}), dict(zip({{names}}, {{weights}})), {call})",
        mixed="raises",
    )
    def _layer(g: Builder) -> Call:
        training = not g.flag()
        embedding, heads = g.choice(_SIZES)
        wide = g.choice((3, 8))
        x = g.tensor((g.choice((2, 1)), g.choice((3, 5)), embedding), grad=training)
        weights: dict[str, Value] = {}
        for attention in attentions:
            weights |= _projections(g, embedding, trained=training, prefix=f"{attention}.")
        for name, shape in (
            ("linear1.weight", (wide, embedding)),
            ("linear1.bias", (wide,)),
            ("linear2.weight", (embedding, wide)),
            ("linear2.bias", (embedding,)),
            ("norm1.weight", (embedding,)),
            ("norm1.bias", (embedding,)),
        ):
            weights[name] = g.tensor(shape, weight=training, grad=training)
        for i in range(2, len(attentions) + 2):
            for name in ("weight", "bias"):
                weights[f"norm{i}.{name}"] = weights[f"norm1.{name}"]
        memory = [g.tensor(x.shape, grad=training) for _ in attentions[1:]]
        options = {
            "embedding": embedding,
            "heads": heads,
            "wide": wide,
            "activation": g.choice(("relu", "gelu")),
            "first": g.flag(),
            "training": training,
            "names": list(weights),
            "weights": list(weights.values()),
            "mask": _mask(g, x.shape[1], x.shape[1]),
        }
        return Call((x, *memory), out(x.shape), options)


_register_layer(
    "TransformerEncoderLayer",
    ("self_attn",),
    "({0}, {mask})",
    *("aten::_addmm_activation", "aten::addmm"),  # inside its fast path
)
_register_layer("TransformerDecoderLayer", ("self_attn", "multihead_attn"), "({0}, {1}, {mask})")
