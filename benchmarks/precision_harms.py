"""Diagnose 25 architectures of other people with `amp_fuzz.precision`, honest and with 40 harms.

    make models                          # the environment, then all of benchmarks/real_models.py
    .venvs/models/bin/python benchmarks/precision_harms.py --models=bert,vit
    .venvs/models/bin/python benchmarks/precision_harms.py --planted

Each model has a process of its own; benchmarks/precision_harms.json has a row for each diagnosis,
which is not made again (`--again`). All run without dropout, since a float64 model would draw other
numbers. Batch norms keep to batches.

Honest: a plain loop computes the same digits, from a model in float64 and one under autocast:
torch's own on the CPU, that of the reference for a simulated device. A harm that it does not
confirm is false. The exit code is 1 if there is one. With `--planted`, a statement of
tests/precision/kinds.py is put behind a layer. It is named if it is among the first three places of
`PrecisionResult.culprits`. The exit code is 1 unless 38 are. With `--pasted`, the code that a
remedy of an honest model prints has run before the plain loop, which must find the digits asked for
in each value that was harmed. A value that float32 has no digits of must be finite.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from amp_fuzz.backends.reference import Numerics, reference_on_cpu
from amp_fuzz.interfaces.check.call import outputs_of
from amp_fuzz.interfaces.check.redirect import contexts_of
from amp_fuzz.interfaces.precision import precision
from amp_fuzz.interfaces.precision.result import digits_in, digits_of
from amp_fuzz.reference import load_table
from benchmarks.architectures import ARCHITECTURES
from benchmarks.common import Row, arguments, read, rows_apart, write
from tests.precision.kinds import KINDS, harmful_lines

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = ("cpu", "cuda")
FILE = Path(__file__).with_suffix(".json")
FIRST = 3
SEARCH = 20  # seconds, for a remedy whose code is run

LAYERS: Mapping[str, Sequence[str]] = {
    "gpt2": ["transformer.h.0.mlp", "transformer.h.1.mlp"],
    "llama": ["model.layers.0.mlp", "model.layers.1.self_attn.o_proj"],
    "qwen3": ["model.layers.0.self_attn.o_proj", "model.layers.1.mlp"],
    "gemma2": ["model.layers.0.mlp", "model.layers.1.mlp"],
    "mixtral": ["model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"],
    "mamba": ["backbone.layers.0.mixer.out_proj", "backbone.layers.1.mixer.out_proj"],
    "wav2vec2": [
        "wav2vec2.encoder.layers.0.feed_forward",
        "wav2vec2.encoder.layers.1.feed_forward",
    ],
    "lora-gpt2": ["base_model.model.transformer.h.1.mlp"],
    "timm-vit": ["blocks.0.mlp", "blocks.1.attn.proj"],
    "dit": ["transformer_blocks.0.ff", "transformer_blocks.1.ff"],
    "sd-unet": ["down_blocks.0.attentions.0.transformer_blocks.0.attn1"],
}
"""Layers whose result has the shape ``[batch, length, width]``, of models that are harmless."""


def planted() -> dict[str, list[tuple[str, str]]]:
    """Return what is planted: by model, a kind and the layer behind which it stands."""
    places = [(name, layer) for name, layers in LAYERS.items() for layer in layers]
    found: dict[str, list[tuple[str, str]]] = {}
    for number in range(40):
        kind = list(KINDS)[number % len(KINDS)]
        name, layer = places[number * 7 % len(places)]
        found.setdefault(name, []).append((kind, layer))
    return found


# -- models ---------------------------------------------------------------------------------------


class Behind(nn.Module):
    """A layer, and a module that its result goes through."""

    def __init__(self, layer: nn.Module, harm: nn.Module) -> None:
        super().__init__()
        self.layer, self.harm = layer, harm

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.harm(self.layer(*args, **kwargs))


def made(name: str) -> tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]:
    """Return a model without draws, and the arguments of a call, the same each time."""
    torch.manual_seed(0)
    given = ARCHITECTURES[name]
    model, (args, kwargs) = given.model(), given.inputs()
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train()
    return model, args, kwargs


def loss_of(result: Any) -> Tensor:
    """Return the loss of a model, or a mean of squares of its first output."""
    loss = getattr(result, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    first = next(t for _, t in outputs_of(result, numbers=False) if t.requires_grad)
    return first.float().square().mean() if first.dtype != torch.float64 else first.square().mean()


# -- honest models --------------------------------------------------------------------------------


def computed(
    name: str, dtype: torch.dtype | None, device: str, wide: bool = False, code: str = ""
) -> dict[str, Tensor]:
    """Return the outputs and gradients of a model, by name: in a plain loop. code: run before."""
    model, args, kwargs = made(name)
    exec(code, {"model": model, "torch": torch})
    if wide:
        if hasattr(model, "set_experts_implementation"):  # a grouped product has no float64
            model.set_experts_implementation("eager")  # type: ignore[operator]
        model = model.double()
        args, kwargs = tree_map(_double, (args, kwargs))
    with ExitStack() as stack:
        if dtype is not None and device == "cpu":
            stack.enter_context(torch.autocast("cpu", dtype=dtype))
        elif dtype is not None:
            runtime = reference_on_cpu(device, load_table(device), Numerics()).runtime
            stack.enter_context(runtime.scope())
            stack.enter_context(contexts_of(runtime.autocast, asked=True))  # those of the code
            stack.enter_context(runtime.autocast(device, dtype=dtype))
        result = model(*args, **kwargs)
    loss_of(result).backward()
    found = {n: t.detach() for n, t in outputs_of(result, numbers=False)}
    grads = {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: t for n, t in (found | grads).items() if t.is_floating_point()}


def _double(leaf: Any) -> Any:
    floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.double() if floating else leaf


def digits(value: Tensor, exact: Tensor) -> float:
    """Return how many decimal digits of a value are right: 0 if one element is not finite."""
    if not bool(torch.isfinite(value).all()):
        return 0.0
    off, size = (value.double() - exact).norm(), exact.norm()
    return digits_of(float(off / size) if size else float(bool(off)))


def honest(name: str, check: str) -> Row:
    """Return the row of an honest diagnosis."""
    device, dtype = check.split(", ")
    model, args, kwargs = made(name)
    start = time.perf_counter()
    result = precision(
        model,
        *args,
        kwargs=kwargs,
        autocast=DTYPES[dtype],
        device=device,
        loss=loss_of,
        seconds=0,
    )
    taken = round(time.perf_counter() - start, 1)
    exact = computed(name, None, device, wide=True)
    low, single = computed(name, DTYPES[dtype], device), computed(name, None, device)
    asked, half = result.digits, digits_in(torch.float32) / 2
    true = {n: round(digits(low[n], exact[n]), 2) for n in exact}
    harmed = {v.name: round(v.digits, 2) for v in result.harmed if v.name in true}
    fine = [n for n in exact if digits(single[n], exact[n]) >= half]
    missed = [n for n in fine if true[n] < asked and n not in harmed]
    false = {n: [said, true[n]] for n, said in harmed.items() if true[n] >= asked}
    return {
        "verdict": result.verdict,
        "seconds": taken,
        "values": len(true),
        "harmed": len(result.harmed),
        "false": false,
        "missed": {n: true[n] for n in missed},
        "worst": min(harmed.items(), key=lambda item: item[1]) if harmed else None,
    }


def pasted(name: str, check: str) -> Row:
    """Return the row of an honest model that is harmed, once its remedy's code has run."""
    device, dtype = check.split(", ")
    model, args, kwargs = made(name)
    options: dict[str, Any] = {"kwargs": kwargs, "autocast": DTYPES[dtype], "device": device}
    result = precision(model, *args, loss=loss_of, seconds=SEARCH, **options)
    remedy = result.remedy
    row: Row = {"verdict": result.verdict, "harmed": len(result.harmed)}
    if remedy is None or not remedy.modules:
        return {**row, "remedy": None if remedy is None else remedy.dtype or f"{remedy.scale:g}"}
    exact = computed(name, None, device, wide=True)
    low = computed(name, DTYPES[dtype], device, code=remedy.code)
    single, half = computed(name, None, device), digits_in(torch.float32) / 2
    left = {v.name: round(digits(low[v.name], exact[v.name]), 2) for v in result.harmed}
    # Some gradients are exactly 0, so that float32 has no digits of them: those have to be finite.
    has = {n: digits(single[n], exact[n]) >= half for n in left}
    finite = {n: bool(torch.isfinite(low[n]).all()) for n in left}
    return {
        **row,
        "remedy": f"{len(remedy.modules)} modules, {remedy.proof}",
        "asked": round(result.digits, 3),
        "false": {
            n: found
            for n, found in left.items()
            if not finite[n] or (has[n] and found < result.digits)
        },
        "no digits in float32": sum(not known for known in has.values()),
        "worst": min((item for item in left.items() if has[item[0]]), key=lambda item: item[1]),
    }


# -- planted harms --------------------------------------------------------------------------------


def harmed(name: str, check: str) -> Row:
    """Return the row of a model with a harm behind a layer."""
    kind_name, layer = check.split(" behind ")
    kind = KINDS[kind_name]
    model, args, kwargs = made(name)
    inner = model.get_submodule(layer)
    width: list[int] = []
    with inner.register_forward_hook(lambda *called: width.append(called[2].shape[-1])):
        copy.deepcopy(model)(*args, **kwargs)
    torch.manual_seed(0)
    model.set_submodule(layer, Behind(inner, kind.module(width[0])))
    start = time.perf_counter()
    result = precision(
        model,
        *args,
        kwargs=kwargs,
        autocast=DTYPES[kind.dtype],
        device=kind.device,
        loss=loss_of,
        seconds=10,
    )
    lines = harmful_lines(kind.module)
    named = [p.module == f"{layer}.harm" and p.line in lines for p in result.culprits[:FIRST]]
    remedy = result.remedy
    return {
        "context": f"{kind.dtype}, {kind.device}",
        "verdict": result.verdict,
        "right": any(named),
        "rank": named.index(True) + 1 if any(named) else 0,
        "culprits": [p.text for p in result.culprits[:FIRST]],
        "events": sorted({e.kind for e in result.events if e.place.line in lines}),
        "remedy": remedy and [*(p.text for p in remedy.lines), *remedy.modules],
        "seconds": round(time.perf_counter() - start, 1),
    }


# -- all of them ----------------------------------------------------------------------------------


def serve(name: str, kind: str, checks: Sequence[str]) -> None:
    """Print a row for each check of one model, as JSON."""
    torch.set_num_threads(1)
    ARCHITECTURES[name].model()  # what is imported for the first model draws numbers too
    for check in checks:
        try:
            row = {"honest": honest, "planted": harmed, "pasted": pasted}[kind](name, check)
        except Exception as error:  # an exception is a result here
            row = {"verdict": f"{type(error).__name__}: {error}", "right": False}
        print("row", json.dumps([check, row]), flush=True)


def table(data: Row, kind: str) -> str:
    """Return the diagnoses of honest models, or what their remedies do, as a table, in Markdown."""
    lines = [
        "| model | context | verdict | harmed | false | seconds |",
        "|---|---|---|---|---|---:|",
    ]
    for name, rows in data[kind].items():
        for check, row in rows.items():
            share = f"{row.get('harmed')} of {row.get('values')}"
            false = len(row.get("false", ()))
            cells = [name, check, row["verdict"], share, str(false), str(row.get("seconds"))]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def planted_table(data: Row) -> str:
    """Return the planted harms as a table, in Markdown."""
    lines = ["| model | harm | context | verdict | named | remedy |", "|---|---|---|---|---|---|"]
    for name, rows in data["planted"].items():
        for check, row in rows.items():
            rank = str(row.get("rank") or "no")
            remedy = ", ".join(row.get("remedy") or ["none"])
            cells = [name, check, row.get("context", ""), row["verdict"], rank, remedy[:80]]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--models", default=",".join(ARCHITECTURES))
    parser.add_argument("--planted", action="store_true")
    parser.add_argument("--pasted", action="store_true")
    parser.add_argument("--again", action="store_true", help="make checks that the file has again")
    parser.add_argument("--output", type=Path, default=FILE)
    parser.add_argument("--serve", help="(a process of its own)")
    parser.add_argument("--kind", default="honest", help="(a process of its own)")
    parser.add_argument("checks", nargs="*", help="(a process of its own)")
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.kind, given.checks)
        return 0
    data = {
        "torch": torch.__version__,
        "honest": {},
        "planted": {},
        "pasted": {},
        **read(given.output),
    }
    kind = "planted" if given.planted else "pasted" if given.pasted else "honest"
    harms = planted()
    wanted: list[Row] = []
    for name in given.models.split(","):
        checks = [f"{device}, {dtype}" for device in DEVICES for dtype in DTYPES]
        if given.planted:
            checks = [f"{harm} behind {layer}" for harm, layer in harms.get(name, ())]
        if given.pasted:
            checks = [c for c in checks if data["honest"].get(name, {}).get(c, {}).get("harmed")]
        rows = data[kind].setdefault(name, {}) if checks else {}
        todo = [check for check in checks if given.again or check not in rows]
        for check, row in rows_apart(__file__, name, kind, todo) if todo else ():
            rows[check] = row
            write(given.output, data)
            print(name, check, json.dumps(row), flush=True)
        wanted += [
            rows.get(check, {"verdict": "the process ended", "false": 1}) for check in checks
        ]
    print(planted_table(data) if given.planted else table(data, kind))
    if given.planted:
        good = sum(bool(row.get("right")) for row in wanted)
        print(f"{good} of {len(wanted)} named among the first {FIRST}")
        return 0 if good >= len(wanted) - 2 else 1
    false = sum(len(row.get("false", "?")) for row in wanted)
    print(f"{sum(row.get('harmed', 0) for row in wanted)} harms, {false} false")
    return 1 if false else 0


if __name__ == "__main__":
    sys.exit(main())
