"""Small models from their papers and of standard parts: what people train under autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MODELS"]


class CausalAttention(nn.Module):
    """Vaswani et al. 2017, with one projection for all three, as in GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class GatedMLP(nn.Module):
    """Shazeer 2020, "GLU Variants Improve Transformer": SwiGLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(F.silu(self.gate(x)) * self.up(x)))


class GPTBlock(nn.Module):
    """Pre-norm, with RMSNorm (Zhang and Sennrich 2019)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width)
        self.attn = CausalAttention(width, heads)
        self.norm2 = nn.RMSNorm(width)
        self.mlp = GatedMLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Radford et al. 2019, with its embedding tied to its head."""

    def __init__(self, words: int = 40, width: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tok = nn.Embedding(words, width)
        self.pos = nn.Embedding(16, width)
        self.layers = nn.ModuleList(GPTBlock(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return {
            "logits": logits,
            "loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
        }


class ResNetBlock(nn.Module):
    """He et al. 2016: two convolutions, a projection beside them."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.down = nn.Sequential(
            nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.down(x))


class ResNet(nn.Module):
    """A stem, two blocks, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        )
        self.stages = nn.Sequential(ResNetBlock(8, 8, 1), ResNetBlock(8, 16, 2))
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.adaptive_avg_pool2d(self.stages(self.stem(x)), 1).flatten(1))


class Tagger(nn.Module):
    """Huang et al. 2015: a bidirectional LSTM over embeddings, a label for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 12, padding_idx=0)
        self.lstm = nn.LSTM(12, 16, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(32, 5)

    def forward(self, words: Tensor, tags: Tensor) -> tuple[Tensor, Tensor]:
        hidden, _ = self.lstm(self.embed(words))
        scores = self.out(hidden)
        return scores, F.cross_entropy(scores.transpose(1, 2), tags, ignore_index=-1)


class DoubleConv(nn.Module):
    """Ronneberger et al. 2015, with group normalisation."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, padding=1),
            nn.GroupNorm(4, outside),
            nn.SiLU(),
            nn.Conv2d(outside, outside, 3, padding=1),
            nn.GroupNorm(4, outside),
            nn.SiLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class UNet(nn.Module):
    """Ronneberger et al. 2015: one level down and up again, joined."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = DoubleConv(3, 8)
        self.deep = DoubleConv(8, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.leave = DoubleConv(16, 8)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.enter(x)
        deep = self.deep(F.max_pool2d(wide, 2))
        return self.head(self.leave(torch.cat([wide, self.up(deep)], 1)))


class ViT(nn.Module):
    """Dosovitskiy et al. 2021: patches, a class token, torch's own encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 4, stride=4)
        self.cls = nn.Parameter(torch.zeros(1, 1, 32))
        self.pos = nn.Parameter(torch.randn(1, 5, 32) * 0.02)
        layer = nn.TransformerEncoderLayer(
            32, 4, 64, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls.expand(len(x), -1, -1), patches], 1) + self.pos
        return self.head(self.norm(self.encoder(tokens))[:, 0])


def _made(
    model: Callable[[], nn.Module], *inputs: Callable[[], Any]
) -> Callable[[], tuple[nn.Module, list[Any]]]:
    def make() -> tuple[nn.Module, list[Any]]:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return model(), [one() for one in inputs]

    return make


MODELS: dict[str, Callable[[], tuple[nn.Module, list[Any]]]] = {
    "gpt": _made(GPT, *[lambda: torch.randint(0, 40, (2, 12))] * 2),
    "resnet": _made(ResNet, lambda: torch.randn(3, 3, 12, 12)),
    "tagger": _made(
        Tagger, lambda: torch.randint(0, 30, (3, 9)), lambda: torch.randint(-1, 5, (3, 9))
    ),
    "unet": _made(UNet, lambda: torch.randn(2, 3, 12, 12, requires_grad=True)),
    "vit": _made(ViT, lambda: torch.randn(3, 3, 8, 8)),
}
