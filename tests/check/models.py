"""Small models from their papers and of standard parts: what people train under autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

__all__ = ["MODELS", "training_step"]


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


class CNN(nn.Module):
    """LeCun et al. 1998, with batch normalisation (Ioffe and Szegedy 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


class GRUTagger(nn.Module):
    """Cho et al. 2014: a GRU over embeddings, a label for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 12)
        self.gru = nn.GRU(12, 16, batch_first=True)
        self.out = nn.Linear(16, 5)

    def forward(self, words: Tensor, tags: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.out(self.gru(self.embed(words))[0])
        return scores, F.cross_entropy(scores.transpose(1, 2), tags)


class EncoderDecoder(nn.Module):
    """Vaswani et al. 2017, with torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.transformer = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 20)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        length = target.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        made = self.transformer(
            self.embed(source), self.embed(target), tgt_mask=future, tgt_is_causal=True
        )
        return self.head(made)


class MoE(nn.Module):
    """Zhou et al. 2022, "Expert choice routing": each expert takes its best tokens."""

    def __init__(self, width: int = 16, experts: int = 3, capacity: int = 4) -> None:
        super().__init__()
        self.capacity = capacity
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):  # Fedus et al. 2021, section 2.4
            scores = self.router(x.float()).softmax(-1)
        weights, tokens = scores.t().topk(self.capacity)
        out = torch.zeros_like(x)
        for expert, weight, index in zip(self.experts, weights, tokens, strict=True):
            made = expert(x[index]) * weight[:, None]
            out = out.index_add(0, index, made)
        return out


class GatedConvolution(nn.Module):
    """Van den Oord et al. 2016, WaveNet, with weight norm (Salimans and Kingma 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = parametrizations.weight_norm(nn.Conv1d(4, 16, 3, padding=1))
        self.out = parametrizations.weight_norm(nn.Conv1d(8, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.conv(x).chunk(2, 1)
        return x + self.out(torch.tanh(value) * torch.sigmoid(gate))


class Checkpointed(nn.Module):
    """Chen et al. 2016: residual blocks that are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return x


class _SquaredReLU(torch.autograd.Function):
    """So et al. 2021, Primer, keeping its input alone."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.mm(x, w).relu().square()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        inner = grad * 2 * torch.mm(x, w).relu()
        return torch.mm(inner, w.t()), torch.mm(x.t(), inner)


class CustomFunction(nn.Module):
    """A layer with a backward pass of its own, as PyTorch's notes on autocast ask for it."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 16)
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)
        self.leave = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(_SquaredReLU.apply(self.enter(x), self.weight))


def training_step(dtype: torch.dtype) -> tuple[Callable[..., Any], list[Any]]:
    """Return two steps of training with a gradient scaler (Micikevicius et al. 2018)."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(6, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> list[Tensor]:
        scaler, losses = torch.amp.GradScaler(x.device.type, init_scale=2.0**8), []
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast(x.device.type, dtype=dtype):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
        return losses

    return step, [x]


def _made(
    model: Callable[[], nn.Module], *inputs: Callable[[], Any]
) -> Callable[[], tuple[nn.Module, list[Any]]]:
    def make() -> tuple[nn.Module, list[Any]]:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return model(), [one() for one in inputs]

    return make


MODELS: dict[str, Callable[[], tuple[nn.Module, list[Any]]]] = {
    "checkpoint": _made(Checkpointed, lambda: torch.randn(4, 16)),
    "cnn": _made(CNN, lambda: torch.randn(2, 3, 8, 8)),
    "custom-function": _made(CustomFunction, lambda: torch.randn(5, 8)),
    "encoder-decoder": _made(EncoderDecoder, *[lambda: torch.randint(0, 20, (2, 6))] * 2),
    "gpt": _made(GPT, *[lambda: torch.randint(0, 40, (2, 12))] * 2),
    "gru-tagger": _made(
        GRUTagger, lambda: torch.randint(0, 30, (3, 9)), lambda: torch.randint(0, 5, (3, 9))
    ),
    "moe": _made(MoE, lambda: torch.randn(12, 16)),
    "resnet": _made(ResNet, lambda: torch.randn(3, 3, 12, 12)),
    "tagger": _made(
        Tagger, lambda: torch.randint(0, 30, (3, 9)), lambda: torch.randint(-1, 5, (3, 9))
    ),
    "unet": _made(UNet, lambda: torch.randn(2, 3, 12, 12, requires_grad=True)),
    "vit": _made(ViT, lambda: torch.randn(3, 3, 8, 8)),
    "weight-norm": _made(GatedConvolution, lambda: torch.randn(2, 4, 10)),
}
