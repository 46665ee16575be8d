"""Recurrent layers and cells: the functions, the modules, and the fused kernels inside them."""

from __future__ import annotations

from typing import Any

from amp_fuzz.catalogue.core import Builder, Call, Out, Value, op, out

# Gates of each kind of layer: how many times the hidden size its weights are tall.
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_MODULES = {
    "lstm": ("LSTM", ""),
    "gru": ("GRU", ""),
    "rnn_tanh": ("RNN", ", nonlinearity='tanh'"),
    "rnn_relu": ("RNN", ", nonlinearity='relu'"),
}
# What the layers reach. Where a fused cell or oneDNN's layer is not listed, or not used, it is the
# products inside that cast, and the joining of the steps and directions that promotes.
_REACHES = {
    "lstm": ("aten::mkldnn_rnn_layer", "aten::_thnn_fused_lstm_cell", "aten::matmul"),
    "gru": ("aten::_thnn_fused_gru_cell", "aten::matmul"),
    "rnn_tanh": (),
    "rnn_relu": (),
}
_INSIDE = ("aten::linear", "aten::stack", "aten::cat")


def _weights(
    g: Builder, gates: int, inputs: int, hidden: int, layers: int, directions: int, bias: bool
) -> tuple[list[str], list[Value]]:
    """Draw the weights of a layer, with their names, in the order in which torch takes them.

    All layers share one pair of biases: it saves draws, and a leaf that is used twice is what
    autocast's weight cache is for.
    """
    names: list[str] = []
    values: list[Value] = []
    tall = gates * hidden
    biases = [g.tensor((tall,), weight=True), g.tensor((tall,), weight=True)] if bias else []
    for layer in range(layers):
        width = inputs if layer == 0 else hidden * directions
        for suffix in ("", "_reverse")[:directions]:
            shapes = ((tall, width), (tall, hidden))
            values += [*(g.tensor(shape, weight=True) for shape in shapes), *biases]
            kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")[: 4 if bias else 2]
            names += [f"{kind}_l{layer}{suffix}" for kind in kinds]
    return names, values


def _module(name: str) -> str:
    kind, extra = _MODULES[name]
    call = (
        f"torch.func.functional_call(torch.nn.{kind}({{inputs}}, {{hidden}}, {{layers}}{extra}, "
        "bias={bias}, batch_first={first}, bidirectional={bidirectional}, device='meta'), "
        "dict(zip({names}, {weights})), ({0}, {state}))"
    )
    # An LSTM returns its state as a pair.
    return f"(lambda y, state: (y, *state))(*{call})" if name == "lstm" else call


def _register_layer(name: str) -> None:
    pair = name == "lstm"

    @op(
        name,
        *_REACHES[name],
        *_INSIDE,
        function=f"torch.{name}",
        module=_module(name),
        mixed="raises",
    )
    def _layer(g: Builder) -> Call:
        is_module = g.form == "module"
        x = g.tensor(rank=(2, 3) if is_module else 3)
        hidden = g.choice((2, 3, 5))
        layers, directions = g.choice(((1, 1), (2, 1), (1, 2), (2, 2)))
        bias = not g.flag()
        first = x.rank == 3 and g.flag()
        names, weights = _weights(g, _GATES[name], x.shape[-1], hidden, layers, directions, bias)
        batch = x.shape[1 - first : 2 - first] if x.rank == 3 else ()
        shape = (layers * directions, *batch, hidden)
        outputs = out((*x.shape[:-1], directions * hidden), *[shape] * (1 + pair))
        if is_module and g.flag():
            state = None
        else:
            state = [g.tensor(shape), g.tensor(shape)] if pair else g.tensor(shape)
        if not is_module:
            # The numbers are dropout and whether it trains.
            flags = (bias, layers, 0.0, False, directions == 2, first)
            return Call((x, state, weights, *flags), outputs)
        options = {
            "inputs": x.shape[-1],
            "hidden": hidden,
            "layers": layers,
            "bias": bias,
            "first": first,
            "bidirectional": directions == 2,
            "names": names,
            "weights": weights,
            "state": state,
        }
        return Call((x,), outputs, options)


_CELLS = {
    "lstm": ("LSTMCell", ""),
    "gru": ("GRUCell", ""),
    "rnn_tanh": ("RNNCell", ", nonlinearity='tanh'"),
    "rnn_relu": ("RNNCell", ", nonlinearity='relu'"),
}


def _register_cell(name: str) -> None:
    kind, extra = _CELLS[name]

    @op(
        f"{name}_cell",
        f"aten::{name}_cell",
        "aten::linear",
        function=f"torch.{name}_cell",
        module=f"torch.func.functional_call(torch.nn.{kind}({{2}}.shape[1], {{3}}.shape[1], "
        f"bias={{4}} is not None{extra}, device='meta'), "
        "dict(weight_ih={2}, weight_hh={3}, bias_ih={4}, bias_hh={5}), ({0}, {1}))",
        mixed="raises",
    )
    def _cell(g: Builder) -> Call:
        x = g.tensor(rank=(1, 2) if g.form == "module" else 2)
        hidden = g.choice((2, 3, 5))
        tall = _GATES[name] * hidden
        shape = (*x.shape[:-1], hidden)
        state = [g.tensor(shape) for _ in range(2)] if name == "lstm" else g.tensor(shape)
        w_ih = g.tensor((tall, x.shape[-1]), weight=True)
        w_hh = g.tensor((tall, hidden), weight=True)
        biases = [None, None] if g.flag() else [g.tensor((tall,), weight=True) for _ in range(2)]
        return Call((x, state, w_ih, w_hh, *biases), out(*[shape] * (1 + (name == "lstm"))))


for _name in _GATES:
    _register_layer(_name)
    _register_cell(_name)


@op(
    "mkldnn_rnn_layer",
    "aten::mkldnn_rnn_layer",
    function="torch.mkldnn_rnn_layer",
    overload="mkldnn_rnn_layer.default",
    mixed="raises",
    floats=("float32", "bfloat16"),
    devices=("cpu",),
)
def _mkldnn(g: Builder) -> Call:
    x = g.tensor(rank=3)
    hidden = g.choice((2, 3, 5))
    # Only the training primitive keeps the workspace that the backward reads.
    train, tall = g.flag(), 4 * hidden
    shapes = ((tall, x.shape[2]), (tall, hidden), (tall,), (tall,))
    weights = [g.tensor(s, weight=train, grad=train) for s in shapes]
    shape = (x.shape[1], hidden)
    state = [g.tensor(shape, grad=train) for _ in range(2)]
    # Mode 2 is LSTM, the only one that oneDNN's layer has here.
    flags: tuple[Any, ...] = (g.flag(), [], 2, hidden, 1, True, False, False, train)
    outputs = (*out((*x.shape[:2], hidden), shape, shape), Out((0,), "uint8", keep=False))
    return Call((x, *weights, *state, *flags), outputs)


# The CPU has no kernel for the fused cells; MPS has one, and does not list it.
_FUSED = ("cuda", "xpu", "mtia", "maia")


def _fused(g: Builder, gates: int, workspace: int) -> tuple[list[Value], Value, Out]:
    """Draw the arguments of a fused cell; return them, the state, and the workspace."""
    state = g.tensor(rank=2)
    rows, hidden = state.shape
    products = [g.tensor((rows, gates * hidden)) for _ in range(2)]
    # Without biases the shape function of the LSTM cell reads the device of None.
    biases = [g.tensor((gates * hidden,), weight=True) for _ in range(2)]
    kept = Out((rows, workspace * hidden), keep=False)
    return [*products, state, *biases], state, kept


@op(
    "_thnn_fused_lstm_cell",
    "aten::_thnn_fused_lstm_cell",
    overload="_thnn_fused_lstm_cell.default",
    mixed="raises",
    devices=_FUSED,
)
def _fused_lstm(g: Builder) -> Call:
    args, state, workspace = _fused(g, 4, workspace=4)
    return Call(tuple(args), (*out(state.shape, state.shape), workspace))


@op(
    "_thnn_fused_gru_cell",
    "aten::_thnn_fused_gru_cell",
    overload="_thnn_fused_gru_cell.default",
    mixed="raises",
    devices=_FUSED,
)
def _fused_gru(g: Builder) -> Call:
    args, state, workspace = _fused(g, 3, workspace=5)
    return Call(tuple(args), (*out(state.shape), workspace))
