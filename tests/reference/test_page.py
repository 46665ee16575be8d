"""The autocast of docs/internals/reference.md is torch's, bit for bit, as far as its tables go."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.forks import forked

pytestmark = pytest.mark.thorough

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "reference.md"
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Autocast = Callable[..., AbstractContextManager[Any]]
Program = Callable[[Autocast], list[torch.Tensor]]


def page() -> str:
    """Return the code of the page."""
    return "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))


# -- programs -----------------------------------------------------------------------------------


def random(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def trained(module: nn.Module, autocast: Autocast, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return what a module computes under autocast, and all gradients."""
    for seed, parameter in enumerate(module.parameters(), start=10):
        parameter.data = random(*parameter.shape, seed=seed)
    leaves = [x.requires_grad_() for x in inputs] + list(module.parameters())
    with autocast("cpu"):
        y = module(*inputs)
    y.backward(random(*y.shape, seed=9).to(y.dtype))
    return [y, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


class Mixed(nn.Module):
    """An MLP with a softmax, and a `cat` of float32 and bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.cat([x, self.first(x).relu()], -1)).softmax(-1)


class Twice(nn.Module):
    """One weight, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(self.shared(x).tanh())


class Nested(nn.Module):
    """Losses, products and copies of a weight, in nested contexts."""

    def __init__(self, autocast: Autocast) -> None:
        super().__init__()
        self.autocast, self.layer = autocast, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.layer.weight
        with torch.no_grad():
            shift = self.layer.bias.to(BF16)
        y = self.layer(x)
        with self.autocast("cpu", enabled=False):
            y = y + x.mm(w) + shift
            with self.autocast("cpu"):
                z = x.mm(w)
        with self.autocast("cpu", cache_enabled=False):
            y = y + x.mm(w) + x.t().mm(w) + x.mm(w)
        return nn.functional.mse_loss(y + x.mm(w.t()) + z, x) * x.prod()


def nested(autocast: Autocast) -> list[torch.Tensor]:
    return trained(Nested(autocast), autocast, random(4, 4))


def attention(autocast: Autocast) -> list[torch.Tensor]:
    """Composite ops and views of one weight."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return trained(layer, autocast, random(2, 3, 8))


def dtypes(autocast: Autocast) -> list[torch.Tensor]:
    """Each op on each dtype."""
    made = []
    for dtype in (F16, BF16, F32, F64):
        a, b = random(4, 4, dtype=dtype), random(4, 4, seed=1, dtype=dtype)
        with autocast("cpu", BF16):
            made += [torch.mm(a, b), torch.einsum("ij,kj->ik", a, b), a.prod(), a.softmax(0)]
            made += [nn.functional.mse_loss(a, b), a.cos()]
            if dtype is not F16:  # torch raises, against its documentation
                made += [torch.stack([a, b]), torch.cat([a, random(4, 4)])]
        with autocast("cpu", F16):
            made += [torch.mm(a, b), torch.mm(a.cfloat(), b.cfloat())]
    return made


def grown(autocast: Autocast) -> list[torch.Tensor]:
    """Tensors that change: the cast of a weight does not, until the outermost context ends."""
    w, x, made = random(4, 4).requires_grad_(), random(4, 4, seed=1), []
    view, copy = w.detach()[:].requires_grad_(), w * 1
    for _ in range(2):
        with autocast("cpu"):
            made += [x.mm(w), x.mm(view), x.mm(copy)]
            with autocast("cpu"):
                pass
            with torch.no_grad():
                w += 1
                copy += 1
            made += [x.mm(w), x.mm(view), x.mm(copy)]
    return made


@contextmanager
def fake_cuda(autocast: Autocast) -> Iterator[None]:
    """Enable a cuda autocast without the device: `torch.autocast` would refuse."""
    if autocast is not torch.autocast:
        with autocast("cuda"):
            yield
        return
    torch.set_autocast_enabled("cuda", True)
    yield
    torch.set_autocast_enabled("cuda", False)


def cuda(autocast: Autocast) -> list[torch.Tensor]:
    """Dtypes alone, of tensors without values."""
    with FakeTensorMode(), fake_cuda(autocast):
        a, h = (torch.empty(4, 4, device="cuda", dtype=dtype) for dtype in (F32, F16))
        made = [a.mm(h), h.softmax(0), h.softmax(0, dtype=F16), torch.cat([a, h]), h.relu()]
        made += [torch.ops.aten.chain_matmul([a, a]), h.double().softmax(0)]
    return [torch.zeros((), dtype=x.dtype) for x in made]


PROGRAMS: dict[str, Program] = {
    "linear": lambda a: trained(nn.Linear(4, 3), a, random(2, 4)),
    "convolution": lambda a: trained(nn.Conv2d(2, 3, 3), a, random(1, 2, 5, 5)),
    "mixed": lambda a: trained(Mixed(), a, random(5, 4)),
    "twice": lambda a: trained(Twice(), a, random(5, 4)),
    "uncached": lambda a: trained(Twice(), lambda d: a(d, cache_enabled=False), random(5, 4)),
    "off": lambda a: trained(Twice(), lambda d: nullcontext(), random(5, 4)),
    **{f.__name__: f for f in (nested, attention, dtypes, grown, cuda)},
}


def same(xs: list[torch.Tensor], ys: list[torch.Tensor]) -> bool:
    forms = [[(x.dtype, x.shape) for x in side] for side in (xs, ys)]
    return forms[0] == forms[1] and all(map(torch.equal, map(bits, xs), map(bits, ys)))


def bits(x: torch.Tensor) -> torch.Tensor:
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.detach().contiguous().view(INTEGERS[x.element_size()])


# -- comparing, in a process in which the reference has put no kernels on the key -----------------


def compare(replaced: list[str]) -> int:
    """Write the programs that differ when one text of the page is replaced by another."""
    code = page()
    for old, new in zip(replaced[::2], replaced[1::2], strict=True):
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    built: dict[str, Any] = {}
    exec(compile(code, PAGE.name, "exec", optimize=1 if replaced else 0), built)
    for name, program in PROGRAMS.items():
        try:
            agrees = same(program(torch.autocast), program(built["autocast"]))
        except RuntimeError:
            agrees = False
        if not agrees:
            sys.stdout.write(f"{name}\n")
    return 0


@pytest.fixture
def differing(tmp_path: Path) -> Callable[..., set[str]]:
    def run(*replaced: str) -> set[str]:
        place: Any = {"folder": tmp_path, "environment": dict(os.environ), "files": tmp_path}
        done = forked(compare, replaced, **place)
        assert done.code == 0, done.err
        return set(done.out.split())

    return run


def test_the_page_holds_and_agrees_with_torch(differing: Callable[..., set[str]]) -> None:
    assert differing() == set()


def test_the_page_is_about_150_lines() -> None:
    assert len(page().splitlines()) < 180


# What is wrong -> the text of the page, what replaces it, and the programs that notice.
FAULTS = {
    "a loss has no policy": ('"mse_loss": FP32, "prod"', '"prod"', "dtypes"),
    "prod has the policy of products": ('"prod": FP32', '"prod": LOW', "dtypes nested"),
    "float64 is cast": ("and x.dtype is not torch.float64", "", "dtypes cuda"),
    "promote takes the context's dtype": (
        "functools.reduce(torch.promote_types, dtypes) if dtypes else ",
        "",
        "mixed dtypes cuda",
    ),
    "tensors in lists are not cast": ("if isinstance(x, (list, tuple)):\n", "if False:\n", "cuda"),
    "the caller's dtype is ignored": (' and given.get("dtype") is None', "", "cuda"),
    "a context cannot disable": ("ENABLED.pop(device, None)\n", "pass\n", "nested"),
    "an inner context clears the cache": (
        "        if not STATE",
        "        if True or STATE",
        "nested grown",
    ),
    "nothing clears the cache": ("            CACHE.clear()\n", "            pass\n", "grown"),
    "nothing is cached": ("not weight or to", "True or to", "twice nested grown"),
    "no leaf is needed to be cached": ("and x.is_leaf", "", "grown"),
    "a view is cached": ("and not x._is_view()", "", "grown"),
    "cache_enabled has no effect": ('not STATE["cache"] or ', "", "uncached nested"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_rule_is_noticed(differing: Callable[..., set[str]], name: str) -> None:
    old, new, programs = FAULTS[name]
    assert differing(old, new) == set(programs.split())
