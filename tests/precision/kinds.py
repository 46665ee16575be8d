"""Kinds of harm that autocast does, each in one statement of a small module: the line ``# harm``.

Each module takes ``[..., length, width]``, computes with a 16-bit copy of it, of about its size,
and returns the same shape. Each is fine in float32.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from amp_fuzz.interfaces.precision.watch import EventKind

__all__ = ["KINDS", "Harmful", "Kind", "harmful_lines"]


class Harmful(nn.Module):
    """Adds to its input what a statement makes of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.linear = nn.Linear(width, width)
        self.register_buffer("freqs", 1 / 1000 ** (torch.arange(width).float() / width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.made(self.linear(self.norm(x)))

    def made(self, h: Tensor) -> Tensor:
        """Return a tensor of the shape of ``h``, which is 16 bits wide under autocast."""
        raise NotImplementedError


class Variance(Harmful):
    """The mean of squares minus the square of a large mean."""

    def made(self, h: Tensor) -> Tensor:
        variance = (h + 8).square().mean(-1, True) - (h + 8).mean(-1, True).square()  # harm
        return h * variance.abs()


class SoftmaxByHand(Harmful):
    """A softmax without the largest subtracted."""

    def made(self, h: Tensor) -> Tensor:
        powers = torch.exp2(h * 20)  # harm
        return powers / powers.sum(-1, keepdim=True)


class Logits(Harmful):
    """Attention logits that leave the range."""

    def made(self, h: Tensor) -> Tensor:
        scores = (h * 200) @ h.transpose(-1, -2) * 100  # harm
        return scores.softmax(-1) @ h


class Rotary(Harmful):
    """Rotary positions, float32 by hand, that a product casts again."""

    def made(self, h: Tensor) -> Tensor:
        positions = torch.arange(h.shape[-2]).float() + 1000
        angles = positions[:, None] @ self.freqs[None, :].float()  # harm
        return h * angles.cos()


class Epsilon(Harmful):
    """An epsilon that is 0, below a fraction."""

    def made(self, h: Tensor) -> Tensor:
        h = torch.relu(h - 50)
        return h / (h.mean(-1, keepdim=True) + 1e-8)  # harm


class LogEpsilon(Harmful):
    """An epsilon that is 0, in a logarithm."""

    def made(self, h: Tensor) -> Tensor:
        return torch.log(torch.relu(h) + 1e-8) / 20  # harm


class Recurrence(Harmful):
    """A long recurrence, whose steps become smaller than the last place of its state."""

    def made(self, h: Tensor) -> Tensor:
        state = torch.full_like(h, 16)
        for _ in range(40):
            state = state + h / 40  # harm
        return state - 16


class Average(Harmful):
    """An averaged weight in 16 bits, whose updates are smaller than its last place."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("average", torch.randn(width, width).bfloat16())

    def made(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.lerp_(self.linear.weight.bfloat16(), 0.001)  # harm
        return h


class Loss(Harmful):
    """A loss summed in 16 bits."""

    def made(self, h: Tensor) -> Tensor:
        loss = (h * 40).square().sum()  # harm
        return h * (loss / 1e6)


class Gradient(Harmful):
    """A gradient that underflows."""

    def made(self, h: Tensor) -> Tensor:
        return h * 16384 / 16384  # harm


class TimeStep(Harmful):
    """Time steps in the dtype of the activations."""

    def made(self, h: Tensor) -> Tensor:
        steps = (torch.arange(h.shape[-2]) + 990).to(h.dtype)  # harm
        return h * (steps[:, None] * self.freqs).cos()


class Index(Harmful):
    """Indices computed in the dtype of the activations."""

    def made(self, h: Tensor) -> Tensor:
        rows = (torch.arange(h.shape[-2]) + 300).to(h.dtype)  # harm
        return h[..., rows.long() - 300, :]


class AddedMask(Harmful):
    """A mask value beyond the range, added, in a row that is masked as a whole."""

    def made(self, h: Tensor) -> Tensor:
        keep = torch.ones(h.shape[-2], h.shape[-2]).tril(-1).to(h.dtype)
        scores = h[..., :4] @ h[..., :4].transpose(-1, -2) + (1 - keep) * -1e9  # harm
        return h * scores.softmax(-1)[..., :1]


class FilledMask(Harmful):
    """A mask value beyond the range, filled in: torch raises."""

    def made(self, h: Tensor) -> Tensor:
        mask = torch.ones(h.shape[-2], h.shape[-2], dtype=torch.bool).triu(1)
        scores = (h[..., :4] @ h[..., :4].transpose(-1, -2)).masked_fill(mask, -1e9)  # harm
        return h * scores.softmax(-1)[..., :1]


class NormByHand(Harmful):
    """A norm whose squares leave the range."""

    def made(self, h: Tensor) -> Tensor:
        return h * 1000 * torch.rsqrt((h * h * 1e6).mean(-1, keepdim=True) + 1e-6)  # harm


class RunningSum(Harmful):
    """Sums of windows as differences of a cumulative sum."""

    def made(self, h: Tensor) -> Tensor:
        sums = (h + 20).cumsum(-2)  # harm
        return torch.cat([h[..., :1, :], sums.diff(dim=-2) - 20], -2)


class MeanByProduct(Harmful):
    """A mean as a product with ones, divided afterwards."""

    def made(self, h: Tensor) -> Tensor:
        total = (h.abs() * 20000) @ torch.ones(h.shape[-1], 1)  # harm
        return h * (total / (20000 * h.shape[-1]))


class Routing(Harmful):
    """A choice between scores that become equal."""

    def made(self, h: Tensor) -> Tensor:
        chosen = (h / 1000 + 1).argmax(-1, keepdim=True)  # harm
        return h.gather(-1, chosen).expand_as(h)


class Threshold(Harmful):
    """A comparison of values that become equal."""

    def made(self, h: Tensor) -> Tensor:
        return h * ((h / 1000 + 1) > 1.0001)  # harm


class Distances(Harmful):
    """Distances as squares minus twice the products, float32 by hand, that the product casts."""

    def made(self, h: Tensor) -> Tensor:
        points = h.float() + 10
        squares = points.pow(2).sum(-1)
        both = points @ points.transpose(-1, -2)  # harm
        distances = squares[..., None] + squares[..., None, :] - 2 * both
        return torch.exp(-distances / 32) @ h


class Cancelling(Harmful):
    """The difference of close numbers."""

    def made(self, h: Tensor) -> Tensor:
        return (h + 100) - 100  # harm


class LogSigmoid(Harmful):
    """The logarithm of a sigmoid that is 0."""

    def made(self, h: Tensor) -> Tensor:
        return torch.log(torch.sigmoid(h * 40)) / 20  # harm


class Product(Harmful):
    """A product of many probabilities."""

    def made(self, h: Tensor) -> Tensor:
        chance = torch.ones_like(h[..., :1])
        for i in range(h.shape[-1]):
            chance = chance * torch.sigmoid(h[..., i : i + 1] - 1)  # harm
        return h * torch.exp(chance.float().log() / h.shape[-1] + 1.3)


class ExpMinusOne(Harmful):
    """The exponential of small numbers, minus one."""

    def made(self, h: Tensor) -> Tensor:
        return (torch.exp(h / 1000) - 1) * 1000  # harm


class Complement(Harmful):
    """One minus a probability near one."""

    def made(self, h: Tensor) -> Tensor:
        return (1 - torch.sigmoid(h + 9)) * 8000  # harm


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of harm: its module, the context in which it is done, and what is said of it.

    event: the kind of the event on its line, or "". remedy: what has to run in float32: that line,
    the module (the line itself casts), or nothing that would help.
    """

    module: type[Harmful]
    dtype: str = "bfloat16"
    device: str = "cuda"
    verdict: str = "loses digits"
    event: EventKind | str = ""
    remedy: Literal["line", "module", ""] = "line"


KINDS: Mapping[str, Kind] = {
    kind.module.__name__: kind
    for kind in (
        Kind(Variance),
        Kind(SoftmaxByHand, "float16", verdict="breaks", event="overflow"),
        Kind(Logits, "float16", verdict="breaks", event="overflow"),
        Kind(Rotary, event="collapse"),
        Kind(Epsilon, "float16", verdict="breaks", event="constant"),
        Kind(LogEpsilon, "float16", verdict="breaks", event="constant"),
        Kind(Recurrence),
        Kind(Average, verdict="breaks", event="stuck", remedy=""),
        Kind(Loss, "float16", "cpu", verdict="breaks", event="overflow"),
        Kind(Gradient, "float16", verdict="breaks", event="vanish"),
        Kind(TimeStep, event="collapse", remedy="module"),
        Kind(Index, event="collapse", remedy="module"),
        Kind(AddedMask, "float16", verdict="breaks", event="overflow"),
        Kind(FilledMask, "float16", verdict="breaks", event="raises"),
        Kind(NormByHand, "float16", verdict="breaks", event="overflow"),
        Kind(RunningSum, device="cpu"),
        Kind(MeanByProduct, "float16", verdict="breaks", event="overflow"),
        Kind(Routing, event="choice"),
        Kind(Threshold, verdict="breaks", event="choice"),
        Kind(Distances, event="lowered"),
        Kind(Cancelling),
        Kind(LogSigmoid, "float16", verdict="breaks", event="overflow"),
        Kind(Product, "float16", verdict="breaks", event="vanish"),
        Kind(ExpMinusOne, device="cpu"),
        Kind(Complement, verdict="breaks"),
    )
}


def harmful_lines(module: type[nn.Module]) -> Sequence[int]:
    """Return the numbers of the lines of a module that do harm."""
    lines, start = inspect.getsourcelines(module)
    return [start + i for i, line in enumerate(lines) if line.rstrip().endswith("# harm")]
