"""The exact copies of a `Twin` are what float64 gives, gradients included; a faulty one is not."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from amp_fuzz import reference
from amp_fuzz.reference.shadow.twin import Redraw, Step, Twin, TwinError


class Given:
    """What a case computes from: the same numbers in either dtype, and the leaves among them."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.complex = torch.complex64 if dtype is torch.float32 else torch.complex128
        self.leaves: list[torch.Tensor] = []
        self.others: list[torch.Tensor] = []  # what else is to be compared
        torch.manual_seed(0)

    def __call__(self, *shape: int) -> torch.Tensor:
        leaf = torch.randn(shape).to(self.dtype).requires_grad_()
        self.leaves.append(leaf)
        return leaf

    def module(self, kind: type[torch.nn.Module], *args: Any, **kwargs: Any) -> Any:
        made = kind(*args, **kwargs).to(self.dtype)
        self.leaves += made.parameters()
        return made


Case = Callable[[Given], torch.Tensor]


def linear(g: Given) -> torch.Tensor:
    first, last = g.module(torch.nn.Linear, 6, 5), g.module(torch.nn.Linear, 5, 3)
    return last(torch.tanh(first(g(4, 6))))


def products(g: Given) -> torch.Tensor:
    a, b = g(2, 3, 4), g(2, 4, 5)
    made = torch.baddbmm(g(2, 3, 5), a, b, beta=0.5) + torch.einsum("bij,bjk->bik", a, b)
    return made + torch.addmm(g(3, 5), a[0], b[1], alpha=3) @ g(5, 5)


def convolutions(g: Given) -> torch.Tensor:
    x = g.module(torch.nn.Conv2d, 3, 4, 3, padding=1, stride=2)(g(2, 3, 8, 8))
    x = g.module(torch.nn.ConvTranspose2d, 4, 2, 2, bias=False)(F.silu(x))
    return g.module(torch.nn.Conv2d, 2, 2, 3)(x.contiguous(memory_format=torch.channels_last))


def norms(g: Given) -> torch.Tensor:
    x = g.module(torch.nn.Linear, 6, 6)(g(4, 5, 6))
    x = g.module(torch.nn.LayerNorm, 6)(x) + g.module(torch.nn.RMSNorm, 6, eps=1e-6)(x.to(g.dtype))
    x = x.transpose(1, 2) + g.module(torch.nn.GroupNorm, 3, 6)(x.transpose(1, 2))
    batch = g.module(torch.nn.BatchNorm1d, 6)
    g.others += [batch.running_mean, batch.running_var]
    return batch(x) + x  # type: ignore[no-any-return]


def attention(g: Given) -> torch.Tensor:
    q, k, v = g(2, 2, 5, 4), g(2, 2, 5, 4), g(2, 2, 5, 4)
    made = F.scaled_dot_product_attention(q @ g(4, 4), k, v, is_causal=True)
    scores = (q @ k.transpose(-1, -2)).masked_fill(torch.ones(5, 5).triu(1).bool(), -1e4)
    return made + scores.softmax(-1, dtype=g.dtype) @ v


def encoder(g: Given) -> torch.Tensor:
    layer = g.module(torch.nn.TransformerEncoderLayer, 8, 2, 16, dropout=0, activation="gelu")
    return layer(g(5, 2, 8))


def recurrent(g: Given) -> torch.Tensor:
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # its LSTM has no float64
    try:
        out, (last, _) = g.module(torch.nn.LSTM, 4, 5)(g(3, 2, 4))
        return g.module(torch.nn.GRU, 5, 5)(out)[0] + last  # type: ignore[no-any-return]
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def embeddings(g: Given) -> torch.Tensor:
    table = g.module(torch.nn.Embedding, 7, 4, padding_idx=0)
    x = table(torch.tensor([[1, 2, 0], [2, 2, 6]]))
    return F.linear(x, table.weight).log_softmax(-1)[:, 1:]


def losses(g: Given) -> torch.Tensor:
    x = g.module(torch.nn.Linear, 6, 4)(g(5, 6))
    made = F.cross_entropy(x, torch.tensor([0, 3, 1, 1, 2]), label_smoothing=0.1)
    target = torch.full((5, 4), 0.3, dtype=g.dtype)
    return made + F.mse_loss(x.to(g.dtype), target) + F.binary_cross_entropy_with_logits(x, target)


def in_place(g: Given) -> torch.Tensor:
    x = g.module(torch.nn.Linear, 6, 6)(g(6, 6)).clone()
    x.mul_(0.3)
    x[1:3].add_(x[0])
    x.t().div_(3)
    x[4] = g(6)
    x.relu_()
    y = x * 1
    made = torch.zeros(6, 6, dtype=x.dtype)
    made.index_add_(0, torch.tensor([5, 0, 0]), y[:3])
    made.index_put_((torch.tensor([1, 2]), torch.tensor([1, 1])), y[3, :2], accumulate=True)
    made[2].copy_(y[5])
    z = x * y
    z[:1].exp_()
    return made.transpose_(0, 1) + z


def views(g: Given) -> torch.Tensor:
    x = g.module(torch.nn.Linear, 6, 8)(g(4, 6))
    a, b = x.view(2, 2, 8).unbind(1)[0].chunk(2, dim=-1)
    made = torch.stack([a, b.flip(0)], dim=1).reshape(4, 4).t().expand(3, 4, 4)
    return torch.cat([made[..., ::2], made.roll(1, 0)[..., 1:2]], dim=-1).permute(2, 0, 1)


def complexes(g: Given) -> torch.Tensor:
    x = g.module(torch.nn.Linear, 4, 4)(g(3, 4)).to(g.dtype)
    z = torch.view_as_complex(x.view(3, 2, 2)) * torch.complex(g(2), g(2)).conj()
    z = z + torch.tensor([1 + 2j, 1j]).to(g.complex)
    spectrum = torch.fft.rfft(x)
    return torch.view_as_real(z).flatten(1) @ g(4, 4) + spectrum.abs().sum() + z.imag.neg().sum()


def dropouts(g: Given) -> torch.Tensor:
    x = F.dropout(g.module(torch.nn.Linear, 6, 6)(g(4, 6)), 0.4)
    x = F.alpha_dropout(x, 0.3) @ g(6, 6)
    x = F.dropout1d(x.unsqueeze(0), 0.5)[0] * F.dropout(g(4, 6), 1.0)
    return x + torch.rand(4, 6) + F.dropout(x, 0.5, training=False)


def checkpointed(g: Given) -> torch.Tensor:
    layer = g.module(torch.nn.Linear, 6, 6)
    inner = checkpoint(lambda x: F.dropout(F.gelu(layer(x)), 0.5), g(4, 6), use_reentrant=False)
    return layer(inner)


def integers(g: Given) -> torch.Tensor:
    number = torch.arange(1, 7)
    made = (number / 7).to(g.dtype) if g.dtype is torch.float32 else number.double() / 7
    x = g(4, 6) * number + made * (number > 2) + torch.arange(6, dtype=g.dtype) / 10
    return F.linear(x, g(6, 6)) / number.sum() + number.to(g.dtype).mean()


def reductions(g: Given) -> torch.Tensor:
    x = g.module(torch.nn.Linear, 6, 6)(g(4, 6))
    made = [x.sum(0), x.mean(0), x.logsumexp(0), x.std(0), x.cumsum(0)[-1], x.norm(dim=0)]
    made += [x.prod(0), x.amax(0), x.square().sum(0).sqrt(), torch.linalg.vector_norm(x, 3, 0)]
    return torch.stack([m.to(g.dtype) for m in made])


def picked(g: Given) -> torch.Tensor:
    x = F.linear(g(4, 6), g(6, 6))
    high, at = x.topk(3, dim=-1)
    made = high.sum(-1) + x.max(dim=1).values + x.sort(dim=0).values[2:3, :4]
    pooled = F.max_pool2d(x.view(1, 4, 2, 3), 2, 1)
    return (
        made + x.gather(1, at).sum(-1) + pooled.sum() + x.median(dim=-1, keepdim=True).values.sum()
    )


def chosen(g: Given) -> torch.Tensor:
    x = F.linear(g(4, 6), g(6, 6))
    made = torch.where(x > 0, x, 0.1 * x.exp()).clamp(-1, 2)
    return torch.maximum(made, x / 3) + x.abs().minimum(torch.tensor(0.5)) + F.hardtanh(x)


def optimised(g: Given) -> torch.Tensor:
    """Two steps of foreach optimizers under the mode: the parameters are compared."""
    layers = [g.module(torch.nn.Linear, 4, 4) for _ in range(2)]
    steps = [
        torch.optim.AdamW(layers[0].parameters(), 0.1, foreach=True),
        torch.optim.SGD(layers[1].parameters(), 0.1, momentum=0.9, foreach=True),
    ]
    x = g(3, 4)
    for _ in range(2):
        layers[1](layers[0](x)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(layers[0].parameters(), 0.01, foreach=True)
        for step in steps:
            step.step()
            step.zero_grad()
    g.others += [p for layer in layers for p in layer.parameters()]
    return layers[1](layers[0](x))


CASES: tuple[Case, ...] = (
    linear,
    products,
    convolutions,
    norms,
    attention,
    encoder,
    recurrent,
    embeddings,
    losses,
    in_place,
    views,
    complexes,
    dropouts,
    checkpointed,
    integers,
    reductions,
    picked,
    chosen,
    optimised,
)


def cotangent(tensor: torch.Tensor) -> torch.Tensor:
    """Return small whole numbers, which every dtype has."""
    numbers = torch.arange(tensor.numel()) % 7 - 3
    return numbers.view(tensor.shape).to(tensor.dtype)


def results(case: Case, given: Given, contexts: list[Any]) -> list[torch.Tensor]:
    """Run a case, forward and backward; return its result, gradients, and what it names."""
    for context in contexts:
        context.__enter__()
    try:
        out = case(given)
    finally:
        for context in reversed(contexts):
            context.__exit__(None, None, None)
    out.backward(cotangent(out))
    return [out, *(leaf.grad for leaf in given.leaves if leaf.grad is not None), *given.others]


def deviation(case: Case, kind: type[Twin], contexts: list[Any]) -> float:
    """Return by how much exact copies differ from float64, relative to the largest element.

    Infinity where one is NaN: a fault may leave memory as it was found.
    """
    with kind() as twin:
        exact = [twin.exact(t) for t in results(case, Given(torch.float32), contexts)]
    assert not twin.refused
    with Redraw(twin.drawn):
        wide = results(case, Given(torch.float64), [])
    assert [t.shape for t in exact] == [t.shape for t in wide]
    pairs = [(e, w.detach()) for e, w in zip(exact, wide, strict=True)]
    found = [(e - w).abs().max() / w.abs().max().clamp(1e-3) for e, w in pairs]
    return max(float(d.nan_to_num(nan=math.inf)) for d in found)


def under(name: str) -> list[Any]:
    # Without the cache: `optimised` changes weights in the context.
    if name == "torch":
        return [torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)]
    if name == "reference":
        return [reference.autocast("cpu", dtype=torch.float16, cache_enabled=False)]
    return []


@pytest.mark.parametrize("name", ["torch", "reference", "none"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_exact_copies_are_what_float64_gives(case: Case, name: str) -> None:
    assert deviation(case, Twin, under(name)) < 1e-11


def test_an_op_without_float64_is_followed_in_float32() -> None:
    def fused(g: Given) -> torch.Tensor:
        layer = torch.nn.LSTM(4, 5)
        return layer.to(g.dtype)(g(3, 2, 4))[0]  # type: ignore[no-any-return]

    assert 1e-10 < deviation(fused, Twin, []) < 1e-6


# -- seeded faults ------------------------------------------------------------------------------


class RoundsAtCasts(Twin):
    def _share(self, tensor: torch.Tensor, source: torch.Tensor) -> bool:
        shared = super()._share(tensor, source)
        if shared:
            self._memory(tensor).flat = tensor.double().flatten()
        return shared


class ForgetsWrites(Twin):
    def _write(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        self._memory(tensor)


class WritesToAll(Twin):
    """Forgets that a cast shares its copy with what was cast."""

    def _share(self, tensor: torch.Tensor, source: torch.Tensor) -> bool:
        shared = super()._share(tensor, source)
        self._memory(source).shared = self._memory(tensor).shared = False
        return shared


class TakesResultsAsExact(Twin):
    def _remember(self, storage: Any, flat: torch.Tensor, real: torch.dtype) -> Any:
        return super()._remember(storage, flat.to(real).to(flat.dtype), real)


class DrawsAgain(Twin):
    def _drawn(self, *args: Any) -> Any:
        found = super()._drawn(*args)
        return [None if m is None else m[torch.arange(len(m)).flip(0)] for m in found]


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        (RoundsAtCasts, linear),
        (ForgetsWrites, in_place),
        (WritesToAll, None),
        (TakesResultsAsExact, chosen),
        (DrawsAgain, dropouts),
    ],
    ids=lambda value: value.__name__ if value else "cast",
)
def test_a_faulty_twin_differs_from_float64(kind: type[Twin], case: Case | None) -> None:
    def cast_then_written(g: Given) -> torch.Tensor:
        x = g(4, 6) * 1.5
        low = x.to(torch.bfloat16) if g.dtype is torch.float32 else x.clone()
        x[1:].add_(1)
        return low + x

    found = deviation(case or cast_then_written, kind, under("torch"))
    assert found > 1e-6
    assert deviation(case or cast_then_written, Twin, under("torch")) < 1e-11


# -- memory -------------------------------------------------------------------------------------


def numbers_met(kind: type[Twin], count: int) -> list[bool]:
    """Meet new tensors of one size, whose addresses are used again; return which are right."""
    found = []
    with kind() as twin:
        for number in range(count):
            met = torch.tensor([float(number)] * 4)
            made = met * 2
            found.append(bool((twin.exact(made) == 2 * number).all()))
            del met, made
    return found


class ForgetsTheDead(Twin):
    """Does not notice that a storage was freed and its address used again."""

    def _remember(self, storage: Any, flat: torch.Tensor, real: torch.dtype) -> Any:
        made = super()._remember(storage, flat, real)
        made.keep = None  # type: ignore[assignment]
        return made


def test_an_address_that_is_used_again_is_not_mixed_up() -> None:
    assert all(numbers_met(Twin, 200))
    assert not all(numbers_met(ForgetsTheDead, 200))


def test_nothing_is_kept_of_the_dead() -> None:
    with Twin() as twin:
        x = torch.ones(64)
        for _ in range(3000):
            x = x * 1.0
        big = torch.ones(2**18)
        for _ in range(100):
            big = big + 1
        assert twin.exact(big)[0] == 101
    kept = list(twin._memories.values())
    assert len(kept) < 1100
    assert sum(memory.flat.nbytes for memory in kept) < 2**25
    twin.forget()
    assert not twin._memories


def test_an_exact_copy_that_was_asked_for_stays_what_it_was() -> None:
    with Twin() as twin:
        x = torch.full((4,), 0.1).bfloat16() * 1
        before = twin.exact(x)
        x[0] = 7
        x.add_(1)
        assert before.tolist() == [0.1] * 4 or before[1:].tolist() == before[:3].tolist()
        assert twin.exact(x)[0] == 8


# -- what else a program does to memory -----------------------------------------------------------


def test_memory_that_is_resized_keeps_its_exact_copy() -> None:
    with Twin() as twin:
        x = torch.full((4,), 1.0) / 3
        x.resize_(8)
        x[4:].fill_(2)
        assert twin.exact(x).tolist() == [1 / 3] * 4 + [2.0] * 4
        x.resize_(2)
        assert twin.exact(x).tolist() == [1 / 3] * 2


def test_memory_seen_as_another_dtype_counts_as_it_is() -> None:
    with Twin() as twin:
        x = torch.full((4,), 1.0) / 3
        x.view(torch.int32).bitwise_and_(-65536)
        assert twin.exact(x).tolist() == x.double().tolist()
        y = torch.full((4,), 1.0) / 3
        low = y.view(torch.bfloat16)
        assert twin.exact(low).tolist() == low.double().tolist()
        assert (twin.exact(low * 2) == low.double() * 2).all()


def test_what_is_float64_already_is_not_written_to() -> None:
    x = torch.full((4,), 1.0, dtype=torch.float64)
    with Twin() as twin:
        third = torch.full((3,), 1.0) / 3
        x[1:].copy_(third)
        assert twin.exact(x).tolist() == [1.0, 1 / 3, 1 / 3, 1 / 3]
    assert x.tolist() == [1.0, *third.double().tolist()]


def test_integers_written_beside_floats_are_written_once() -> None:
    values, order = torch.zeros(4), torch.zeros(4, dtype=torch.int64)
    x = torch.tensor([0.3, 0.1, 0.2, 0.0]) / 3
    with Twin():
        torch.sort(x + 0, out=(values, order))
        scale, tracker = torch.tensor(4.0), torch.tensor(0, dtype=torch.int32)
        torch._amp_update_scale_(scale, tracker, torch.tensor(0.0), 2.0, 0.5, 10)
    assert order.tolist() == [3, 1, 2, 0]
    assert int(tracker) == 1


def test_results_that_share_memory_are_both_kept() -> None:
    library = torch.library.Library("amp_fuzz_twin", "FRAGMENT")
    library.define("halves(Tensor x) -> (Tensor, Tensor)")

    def halves(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple((x * 1).chunk(2))

    library.impl("halves", halves, "CompositeExplicitAutograd")
    try:
        with torch.no_grad(), Twin() as twin:
            a, b = torch.ops.amp_fuzz_twin.halves(torch.ones(4) / torch.tensor([3.0, 3, 7, 7]))
            assert twin.exact(a).tolist() == [1 / 3] * 2
            assert twin.exact(b).tolist() == [1 / 7] * 2
    finally:
        library._destroy()


def test_inference_mode_is_followed() -> None:
    with torch.inference_mode(), Twin() as twin:
        x = torch.full((4, 2), 1.0) / 3
        low = x.to(torch.bfloat16).contiguous().reshape(2, 4)
        assert (twin.exact(low) == 1 / 3).all()
        assert (twin.exact(F.linear(low, low)) - 4 / 9).abs().max() < 1e-15


def test_elements_are_those_that_the_run_picked() -> None:
    with Twin() as twin:
        x = torch.tensor([1.0, 1.001, 1.002]).bfloat16()
        high, at = x.max(dim=0)
        assert twin.exact(high) == twin.exact(x)[at]


@pytest.mark.parametrize(
    "draw",
    [
        lambda p: torch.bernoulli(p),
        lambda p: torch.poisson(p * 5),
        lambda p: torch.multinomial(p, 2).float(),
        lambda p: torch.empty_like(p).bernoulli_(p),
        lambda p: torch.empty_like(p).normal_(),
    ],
    ids=["bernoulli", "poisson", "multinomial", "bernoulli_", "normal_"],
)
def test_what_is_drawn_is_exact(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with Twin() as twin:
        made = draw(torch.full((4, 4), 1.0) / 3)
        assert torch.equal(twin.exact(made), made.double())
    assert not twin.refused
    with Redraw(twin.drawn):
        torch.manual_seed(7)
        assert torch.equal(draw(torch.full((4, 4), 1.0) / 3), made)


def test_dropout_is_drawn_again_in_float32() -> None:
    x = torch.randn(64, 64)
    with Twin() as twin:
        low = F.dropout(x.bfloat16(), 0.5)
    with Redraw(twin.drawn):
        again = F.dropout(x, 0.5)
    assert torch.equal(again == 0, low == 0)
    assert torch.equal(again, torch.where(low == 0, 0, x * 2))


def test_products_of_16_bits_are_rounded_once() -> None:
    a, b = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    steps: list[Step] = []
    once = (a.float() @ b.float()).bfloat16()
    with Twin(steps.append):
        assert torch.equal(a @ b, once)
    with Redraw(()):
        assert torch.equal(a @ b, once)
    assert steps[-1].single is not None
    assert torch.equal(steps[-1].single[0], a.float() @ b.float())


# -- notes --------------------------------------------------------------------------------------


def test_a_note_gets_what_was_there_before() -> None:
    steps: list[tuple[list[float], list[float], list[float]]] = []

    def note(step: Step) -> None:
        (t, exact), *_ = step.given
        assert exact is not None
        again = step.again([t.float() for t, _ in step.given])
        assert again is not None
        steps.append((t.tolist(), exact.tolist(), again[0].tolist()))

    x = torch.tensor([1.0, 2.0]).bfloat16()
    with Twin(note):
        x.add_(0.001)
        x[:1].mul_(2)
    assert steps[0] == ([1.0, 2.0], [1.0, 2.0], [1.0010000467300415, 2.000999927520752])
    assert steps[1] == ([1.0], [1.001], [2.0])


def test_a_fault_of_a_note_is_no_error_of_the_callable() -> None:
    def note(step: Step) -> None:
        raise ValueError("a fault")

    with pytest.raises(TwinError, match=r"aten.ones.default .* report"), Twin(note):
        torch.ones(2) + 1


def test_a_tensor_that_dies_frees_its_exact_copy_at_the_next_sweep() -> None:
    with Twin() as twin:
        held = torch.ones(8) * 1
        del held
        gc.collect()
        twin._sweep()
        assert not twin._memories


@pytest.mark.thorough
def test_a_first_run_does_not_import_dynamo() -> None:
    script = """
import sys, torch
from amp_fuzz.reference.shadow.twin import Redraw, Twin
with Twin() as twin: torch.ones(3) * 2
with Redraw(()): torch.ones(3) * 2
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_compiler_that_the_program_has_imported_traces_no_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    assert not hasattr(type(Twin()).__torch_dispatch__, "__wrapped__")
    monkeypatch.setitem(sys.modules, "torch._dynamo", torch)
    assert hasattr(type(Twin()).__torch_dispatch__, "__wrapped__")
    assert isinstance(Twin(), Twin)
