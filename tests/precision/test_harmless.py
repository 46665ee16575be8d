"""`amp_fuzz.precision` says of honest code that it is harmless: no statement of harm is false."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from amp_fuzz.interfaces.precision import precision
from tests.helpers import brief


class Model(nn.Module):
    """A linear layer, parts, and a function of both."""

    def __init__(self, function: Callable[..., Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.linear, self.parts = function, nn.Linear(16, 16), nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x), *self.parts)


def again(h: Tensor, *parts: nn.Module) -> Tensor:
    for part in parts:
        h = part(h)
    return h


def recomputed(h: Tensor, *parts: nn.Module) -> Tensor:
    return checkpoint(again, h, *parts, use_reentrant=False)


def recomputed_reentrantly(h: Tensor, *parts: nn.Module) -> Tensor:
    return checkpoint(again, h, *parts, use_reentrant=True)


def centred(h: Tensor, norm: nn.Module) -> Tensor:
    h = norm(h)  # the result does not depend on its bias: a gradient of 0, up to rounding
    return h - h.mean(0)


def shifted(h: Tensor, linear: nn.Linear) -> Tensor:
    # Nor on what all logits share.
    return (h + linear.bias.sum()).softmax(-1)


def balanced(h: Tensor) -> Tensor:
    # The gradients add up to 0 exactly; rounded to 16 bits, they do not.
    weights = torch.tensor([1 + 2**-12, -1, -(2**-12), 0])
    return (h * weights.repeat(2)[:, None]).sum()


def causal(h: Tensor) -> Tensor:
    mask = torch.ones(8, 8, dtype=torch.bool).triu(1)
    return (h @ h.T).masked_fill(mask, float("-inf")).softmax(-1) @ h


def infinite(h: Tensor) -> Tensor:
    return torch.log(F.relu(h))  # in float32 too


MODELS: dict[str, tuple[Callable[..., Tensor], Callable[[], list[nn.Module]]]] = {
    "a bias whose gradient is 0": (centred, lambda: [nn.LayerNorm(16)]),
    "a shift of a softmax": (shifted, lambda: [nn.Linear(16, 16)]),
    "gradients that add up to 0": (balanced, list),
    "dropout": (again, lambda: [nn.Dropout(0.3), nn.Linear(16, 16), nn.Dropout(0.1)]),
    "batch norm": (again, lambda: [nn.BatchNorm1d(16), nn.SiLU(), nn.Linear(16, 16)]),
    "checkpoint": (recomputed, lambda: [nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 16)]),
    "reentrant checkpoint": (recomputed_reentrantly, lambda: [nn.GELU(), nn.Linear(16, 16)]),
    "attention": (lambda h, part: part(h, h, h)[0], lambda: [nn.MultiheadAttention(16, 2, 0.1)]),
    "a causal mask": (causal, list),
    "infinite in float32 too": (infinite, list),
    "GRU": (lambda h, part: part(h)[0], lambda: [nn.GRU(16, 16)]),
    "cross entropy": (lambda h: F.cross_entropy(h, torch.arange(8)), list),
    "a cast by hand": (lambda h: h.bfloat16().float() * 2, list),
}


@pytest.mark.parametrize("device", brief(["cpu", "cuda"], "cuda"))
@pytest.mark.parametrize("dtype", brief([torch.bfloat16, torch.float16], torch.float16))
@pytest.mark.parametrize("name", MODELS)
def test_honest_code_is_harmless(name: str, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    function, parts = MODELS[name]
    model, x = Model(function, *parts()), torch.randn(8, 16)
    result = precision(model, x, autocast=dtype, device=device, seconds=0)
    assert result.verdict == "harmless", str(result)
    assert not result.events


def test_a_recurrent_layer_of_a_simulated_device_casts() -> None:
    """One op of cuDNN does it there; on a CPU, oneDNN's op casts nothing."""
    torch.manual_seed(0)
    result = precision(nn.LSTM(8, 8), torch.randn(3, 2, 8), autocast=torch.float16, device="cuda")
    assert result.verdict == "harmless"


def test_no_remedy_is_searched_in_no_time() -> None:
    model = Model(lambda h: h * 1e5)
    result = precision(model, torch.randn(8, 16), autocast=torch.float16, seconds=0)
    assert result.verdict == "breaks"
    assert result.remedy is None
    assert result.skipped == ("the search: seconds=0",)
