"""Measure what `amp_fuzz.precision` costs, beside a plain float32 step of the same model.

    python benchmarks/precision_cost.py [--sizes=small,large] [--threads=1,2] [--rounds=3]

The models are stacks of Llama's blocks: rotary positions, attention, gated layers, RMS norms, and a
cross entropy over tied embeddings. A step is the forward and the backward pass, without an
optimizer. A diagnosis is a call of `precision` on a model that it finds harmless, so that no remedy
is searched. Each size and number of threads has a process, in which steps and diagnoses alternate;
the seconds are those of the CPU. A step under torch's own autocast runs once: it is
slow where the processor has no instructions for bfloat16. Memory has a process for each side: the
peak of what is resident, above what is so before the model is built.
benchmarks/precision_cost.json has the medians and the ratios to the step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.nn import functional as F

from amp_fuzz.interfaces.precision import precision
from benchmarks.common import Row, arguments, machine, read, versions, write

FILE = Path(__file__).with_suffix(".json")
SIZES: dict[str, dict[str, int]] = {
    "small": {"width": 128, "inner": 344, "heads": 4, "layers": 4, "words": 2048, "batch": 8},
    "large": {"width": 768, "inner": 2048, "heads": 12, "layers": 12, "words": 16384, "batch": 2},
}
LENGTH = 128
SIDES = ("step", "autocast step", "diagnosis")


class Norm(torch.nn.Module):
    """Llama's: the mean of squares in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * scaled.to(x.dtype)


class Attention(torch.nn.Module):
    """Causal, with rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (
            torch.nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (
            layer(x).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        q, k = (t * cos.to(t.dtype) + _turned(t) * sin.to(t.dtype) for t in (q, k))
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(made.transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]


def _turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


class Block(torch.nn.Module):
    """Attention, then a gated layer, each beside what it was given."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.before, self.after = Norm(width), Norm(width)
        self.attention = Attention(width, heads)
        self.gate, self.up = (torch.nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x), cos, sin)
        y = self.after(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


class Llama(torch.nn.Module):
    """Returns the loss of predicting the next token of ``[batch, length]`` tokens."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, width: int, inner: int, heads: int, layers: int, words: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(words, width)
        torch.nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = torch.nn.ModuleList(Block(width, inner, heads) for _ in range(layers))
        self.norm = Norm(width)
        half = width // heads // 2
        angles = torch.arange(LENGTH)[:, None] / 10000 ** (torch.arange(half) / half)
        angles = torch.cat([angles, angles], dim=-1)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        scores = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(scores[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def subject(size: str) -> tuple[Llama, torch.Tensor]:
    """Return a model and tokens for it."""
    torch.manual_seed(0)
    given = dict(SIZES[size])
    batch = given.pop("batch")
    return Llama(**given), torch.randint(given["words"], (batch, LENGTH))


def runs(size: str) -> tuple[int, dict[str, Callable[[], None]]]:
    """Return the number of parameters, and what to run for each side."""
    model, tokens = subject(size)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(tokens).backward()

    def under_autocast() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(tokens)
        loss.backward()

    def diagnosis() -> None:
        model.zero_grad(set_to_none=True)
        found = precision(model, tokens, digits=0.3)
        if found.verdict != "harmless":
            raise SystemExit(f"a remedy was searched:\n{found}")

    sides = dict(zip(SIDES, (step, under_autocast, diagnosis), strict=True))
    return sum(p.numel() for p in model.parameters()), sides


def seconds(size: str, rounds: int) -> Row:
    """Return the CPU seconds of each side: the median over rounds in which they take turns."""
    parameters, sides = runs(size)
    taken: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    for turn in range(rounds + 1):
        for side, run in sides.items():
            if side == "autocast step" and turn != rounds:
                continue  # once: without instructions for 16 bits, it takes longest
            before = time.process_time(), time.perf_counter()
            run()
            spent = time.process_time() - before[0], time.perf_counter() - before[1]
            if turn:  # the first imports and allocates
                taken[side].append(spent)
    middle = {side: median(cpu for cpu, _ in some) for side, some in taken.items()}
    pairs = list(zip(taken["diagnosis"], taken["step"], strict=True))
    return {
        "parameters": parameters,
        "CPU seconds": {side: round(value, 4) for side, value in middle.items()},
        "diagnosis / step": round(median(d[0] / s[0] for d, s in pairs), 2),
        "diagnosis / step, elapsed": round(median(d[1] / s[1] for d, s in pairs), 2),
        "autocast step / step": round(middle["autocast step"] / middle["step"], 2),
    }


def memory(size: str, side: str) -> Row:
    """Return the peak of one side in this process, in MiB above what the imports take."""
    runs("small")[1][side]()  # what is imported, and compiled, at the first call
    before = _resident()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    runs(size)[1][side]()
    return {"MiB": round(_peak() - before, 1)}


def _resident() -> float:
    return _status("VmRSS")


def _peak() -> float:
    return _status("VmHWM")


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def ask(*given: str, threads: int) -> Any:
    """Run this script in a process, and return what it prints."""
    done = subprocess.run(
        [sys.executable, __file__, f"--threads={threads}", *given],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=FILE)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        torch.set_num_threads(int(given.threads))
        size, side = given.child, given.side
        print(json.dumps(memory(size, side) if side else seconds(size, given.rounds)))
        return
    result = read(given.output)
    for size in given.sizes.split(","):
        for threads in map(int, given.threads.split(",")):
            found = ask(f"--child={size}", f"--rounds={given.rounds}", threads=threads)
            sides = {
                side: ask(f"--child={size}", f"--side={side}", threads=threads)["MiB"]
                for side in ("step", "diagnosis")
            }
            found["peak MiB"] = sides
            found["memory, diagnosis / step"] = round(sides["diagnosis"] / sides["step"], 2)
            result.setdefault("measured", {})[f"{size}, {threads} threads"] = found
            print(size, threads, json.dumps(found), flush=True)
            result |= {"versions": versions("torch", "amp-fuzz"), "machine": machine("two cores")}
            write(given.output, result)


if __name__ == "__main__":
    main()
