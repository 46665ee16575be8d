"""Small models whose source a seed writes: some modules lose digits in 16 bits, by plan.

This file needs torch alone: a fresh process runs it to judge a remedy that was pasted.
"""

from __future__ import annotations

import json
import linecache
import random
import re
import sys
import textwrap
from dataclasses import dataclass
from typing import Any

import torch

WIDTH = 8
_MODULE = """
class {name}(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn({width}, {width}) / {width} ** 0.5)
        self.register_buffer("places", torch.arange(4.0)[:, None] * 700 + 3000)
        self.register_buffer("turns", torch.logspace(0, -1, {width})[None])
{inner}
    def forward(self, x):
{body}
        return x + 0.5 * torch.tanh(y)
"""
BODIES = {
    "honest": "y = F.linear(x, self.weight)",
    "far": "y = F.linear(x, self.weight) + 1000\ny = y - 1000",
    "turned": "y = torch.cos(self.places @ self.turns)\ny = F.linear(x * y, self.weight)",
    "near": "y = F.linear(x, self.weight * 1.002) - F.linear(x, self.weight)\ny = 500 * y",
}


@dataclass(frozen=True)
class Small:
    """A model: its source, the paths of its modules, and of those that lose digits."""

    source: str
    modules: tuple[str, ...]
    harmed: tuple[str, ...]


def written(seed: int) -> Small:
    """Write a model of 2 to 10 modules, of which 1 to 3 lose digits; some hold others."""
    draw = random.Random(seed)
    count = draw.randint(2, 10)
    bad = set(draw.sample(range(count), min(draw.randint(1, 3), count)))
    classes, paths, top = [], {}, []
    parent: dict[int, int] = {}
    for i in range(1, count):
        if draw.random() < 0.3:
            parent[i] = draw.randrange(i)
    for i in range(count):
        own, up = f"m{i}", i
        while up in parent:
            up = parent[up]
            own = f"m{up}.{own}"
        paths[i] = own
        held = [j for j in range(count) if parent.get(j) == i]
        kind = draw.choice(["far", "turned", "near"]) if i in bad else "honest"
        body = [*(f"x = self.m{j}(x)" for j in held), *BODIES[kind].split("\n")]
        inner = [f"self.m{j} = M{j}()" for j in held]
        text = _MODULE.format(
            name=f"M{i}",
            width=WIDTH,
            inner=textwrap.indent("\n".join(inner), " " * 8),
            body=textwrap.indent("\n".join(body), " " * 8),
        )
        classes.insert(0, text)
        if i not in parent:
            top.append(i)
    made = ["super().__init__()", *(f"self.m{i} = M{i}()" for i in top)]
    ran = [*(f"x = self.m{i}(x)" for i in top), "return x"]
    model = [
        "class Model(torch.nn.Module):",
        "    def __init__(self):",
        textwrap.indent("\n".join(made), " " * 8),
        "    def forward(self, x):",
        textwrap.indent("\n".join(ran), " " * 8),
    ]
    head = "import torch\nfrom torch.nn import functional as F\n"
    source = head + "\n".join([*classes, *model]) + "\n"
    return Small(source, tuple(paths.values()), tuple(paths[i] for i in sorted(bad)))


def built(source: str, file: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """Return the model of a source, which tracebacks and reports call `file`, and an input."""
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    space: dict[str, Any] = {"__name__": "small"}
    exec(compile(source, file, "exec"), space)
    torch.manual_seed(0)
    return space["Model"](), torch.randn(4, WIDTH)


def pasted(source: str, code: str) -> tuple[str, str]:
    """Return a source with the printed blocks in it, and what is to run once it is imported."""
    blocks, found, call = code.partition("def run_in_float32")
    lines = source.splitlines()
    for block in filter(str.strip, blocks.split("\n\n")):
        numbers = [int(n) for n in re.findall(r"# \S+?:(\d+)", block)]
        assert len(numbers) == 1, block
        old = lines[numbers[0] - 1]
        indent = old[: len(old) - len(old.lstrip())]
        lines[numbers[0] - 1] = textwrap.indent(block.strip("\n"), indent).replace("\n", "\0")
    return "\n".join(lines).replace("\0", "\n"), found + call


def digits(source: str, code: str, dtype: str) -> list[float]:
    """Return the digits of the result and of each gradient under autocast, with a remedy."""
    text, call = pasted(source, code)
    model, x = built(text, "pasted.py")
    if call:
        exec(call, {"model": model})
    honest, exact = built(source, "honest.py")[0].double(), x.double()
    ran = []
    for one, given in ((model, x), (honest, exact)):
        with torch.autocast("cpu", dtype=getattr(torch, dtype), enabled=one is model):
            out = one(given)
        out.backward((torch.arange(out.numel()) % 7 - 3).view_as(out).to(out.dtype))
        ran.append([out.detach(), *(p.grad for p in one.parameters())])
    return [
        float(-torch.log10((low.double() - wide).norm() / wide.norm()))
        for low, wide in zip(*ran, strict=True)
    ]


if __name__ == "__main__":
    json.dump([digits(*given) for given in json.load(sys.stdin)], sys.stdout)
