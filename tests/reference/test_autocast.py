"""What the reference's autocast guarantees, one by one, and that torch's own does the same.

Every `same(...)` runs a program under both and compares all it returns bit for bit. Where torch has
a bug the reference follows the documentation, and imitates torch only on request.
"""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from packaging.version import Version
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten

from amp_fuzz import reference
from amp_fuzz.backends.flips import deciding
from amp_fuzz.backends.prelude import forward_ad
from amp_fuzz.policies.tables import tabled_devices
from amp_fuzz.reference import Cast, KernelCall, Policy, dispatch, load_table
from amp_fuzz.reference.autocast import reset, state, torch_answers
from amp_fuzz.reference.calls import Call
from amp_fuzz.reference.state import here
from amp_fuzz.reference.treatments import of_table
from amp_fuzz.upstream import quirks

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


# --- two sides, and how they are compared


@dataclasses.dataclass(frozen=True)
class Side:
    """One implementation of autocast for the CPU."""

    autocast: Callable[..., Any]
    checkpoint: Callable[..., Any]
    custom_fwd: Callable[[Any], Any]
    custom_bwd: Callable[[Any], Any]
    casting_fwd: Callable[[Any], Any]

    def bf16(self, **kwargs: Any) -> Any:
        return self.autocast("cpu", BF16, **kwargs)


TORCH = Side(
    torch.autocast,
    torch.utils.checkpoint.checkpoint,
    torch.amp.custom_fwd(device_type="cpu"),
    torch.amp.custom_bwd(device_type="cpu"),
    torch.amp.custom_fwd(device_type="cpu", cast_inputs=F32),
)
REFERENCE = Side(
    reference.autocast,
    reference.checkpoint("cpu"),
    reference.custom_fwd(device_type="cpu"),
    reference.custom_bwd(device_type="cpu"),
    reference.custom_fwd(device_type="cpu", cast_inputs=F32),
)
SIDES = pytest.mark.parametrize("side", [TORCH, REFERENCE], ids=["torch", "reference"])

# Until torch 2.10 the cache keeps a cast that a pass without gradients made: the known bug
# cache-ignores-grad-mode, which tests/upstream holds to its record.
KEEPS_NO_GRAD = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.11"), reason="torch has the bug cache-ignores-grad-mode"
)

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same(program: Callable[[Side], Any]) -> Any:
    """Run a program on both sides, require the same bits, and return torch's result."""
    torchs, ours = program(TORCH), program(REFERENCE)
    (xs, form), (ys, our_form) = tree_flatten(torchs), tree_flatten(ours)
    assert form == our_form
    for x, y in zip(xs, ys, strict=True):
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            integers = INTEGERS[x.element_size()]
            assert torch.equal(x.detach().view(integers), y.detach().view(integers))
        else:
            assert x == y
    return torchs


def random(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight(seed: int = 1) -> torch.Tensor:
    return random(4, 4, seed=seed).requires_grad_()


X = random(4, 4)


def backward(*outputs: torch.Tensor) -> None:
    """Run a backward pass whose cotangents round when they are added in 16 bits."""
    torch.autograd.backward(outputs, [random(*y.shape, seed=9).to(y.dtype) for y in outputs])


@pytest.fixture(autouse=True)
def everything_is_restored() -> Iterator[None]:
    def states() -> tuple[object, ...]:
        return (
            *state(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        )

    before = states()
    yield
    after = states()
    torch.set_autocast_enabled("cpu", False)  # lest one failure be that of all tests after it
    assert after == before


# --- the weight cache


def used_twice(side: Side, w: torch.Tensor, **kwargs: Any) -> torch.Tensor | None:
    with side.bf16(**kwargs):
        y = torch.mm(X, w) + 0.3 * torch.mm(X.t(), w)
    backward(y)
    return w.grad


def test_the_gradient_of_a_weight_used_twice_accumulates_in_the_autocast_dtype() -> None:
    gradient = same(lambda side: used_twice(side, weight()))
    assert torch.equal(gradient, gradient.to(BF16).float())


def test_without_cache_it_accumulates_in_float32() -> None:
    gradient = same(lambda side: used_twice(side, weight(), cache_enabled=False))
    assert not torch.equal(gradient, gradient.to(BF16).float())


def test_a_leaf_that_is_a_view_is_not_cached() -> None:
    def program(side: Side) -> torch.Tensor | None:
        w = random(4, 4, seed=1).view(16).view(4, 4).requires_grad_()
        assert w.is_leaf
        assert w._is_view()
        return used_twice(side, w)

    gradient = same(program)
    assert not torch.equal(gradient, gradient.to(BF16).float())


@pytest.mark.parametrize("dtype", [F16, F64])
def test_a_leaf_of_another_dtype_is_not_cached(dtype: torch.dtype) -> None:
    def program(side: Side) -> torch.Tensor | None:
        w = random(4, 4, seed=1).to(dtype).requires_grad_()
        with side.bf16():
            y = torch.mm(X.to(w.dtype), w) + 0.3 * torch.mm(X.t().to(w.dtype), w)
        backward(y)
        return w.grad

    same(program)


def test_a_cast_to_float32_is_not_cached() -> None:
    def program(side: Side) -> tuple[Any, ...]:
        w = random(4, 4, seed=1, dtype=BF16).requires_grad_()
        with side.bf16():
            y = torch.trace(w) + 0.3 * torch.trace(w)
        y.backward()
        return y, w.grad

    assert same(program)[0].dtype is F32
    assert not cached_casts(lambda: torch.trace(weight().to(BF16).detach().requires_grad_()))


def cached_casts(function: Callable[[], Any], **kwargs: Any) -> list[Cast]:
    with REFERENCE.bf16(**kwargs), reference.log_kernels() as calls:
        function()
    return [cast for call in calls for cast in call.casts if cast.cached]


def test_what_is_cached() -> None:
    w, x = weight(), X.clone()
    assert len(cached_casts(lambda: torch.mm(x, w))) == 1
    assert not cached_casts(lambda: torch.mm(x, x))
    assert not cached_casts(lambda: torch.mm(x, w * 1))
    assert not cached_casts(lambda: torch.mm(x, w), cache_enabled=False)
    with torch.inference_mode():
        assert not cached_casts(lambda: torch.mm(x, w))


def test_a_view_written_in_inference_mode_is_cast_as_any_other() -> None:
    """`is_leaf` would make its grad_fn anew, and torch 2.13 fails at that."""
    with FakeTensorMode():
        v = (weight() * 2).view(4, 4)
        with torch.inference_mode(), REFERENCE.bf16():
            v.add_(1)
            assert torch.mm(weight(), v).dtype is BF16


def updated_in_place(side: Side, *, outer: Any) -> list[float]:
    w, results = torch.ones(2, 2, requires_grad=True), []
    with outer(side):
        for _ in range(2):
            with side.bf16():
                results.append(torch.mm(torch.ones(2, 2), w)[0, 0].item())
            with torch.no_grad():
                w.add_(1)
    return results


def test_the_cache_is_cleared_when_the_outermost_context_ends() -> None:
    assert same(partial(updated_in_place, outer=lambda side: nullcontext())) == [2.0, 4.0]
    assert same(partial(updated_in_place, outer=lambda side: side.bf16())) == [2.0, 2.0]
    # Any context counts, even one that disables.
    outer = partial(updated_in_place, outer=lambda side: side.bf16(enabled=False))
    assert same(outer) == [2.0, 2.0]


def test_clear_cache_forgets() -> None:
    w = torch.ones(2, 2, requires_grad=True)
    with REFERENCE.bf16():
        torch.mm(w, w)
        with torch.no_grad():
            w.add_(1)
        reference.clear_cache()
        assert torch.mm(w, w)[0, 0].item() == 8.0


def test_torchs_own_way_to_clear_the_cache_clears_the_references() -> None:
    def program(side: Side) -> float:
        w = torch.ones(2, 2, requires_grad=True)
        with side.bf16():
            torch.mm(w, w)
            with torch.no_grad():
                w.add_(1)
            torch.clear_autocast_cache()
            return torch.mm(w, w)[0, 0].item()

    clear = torch.clear_autocast_cache
    assert same(program) == 8.0
    assert torch.clear_autocast_cache is clear


def test_a_context_of_torchs_inside_leaves_the_references_cache() -> None:
    def uses() -> float:
        w = torch.ones(2, 2, requires_grad=True)
        with REFERENCE.bf16():
            torch.mm(w, w)
            with torch.no_grad():
                w.add_(1)
            with torch.autocast("cpu"):
                pass
            return torch.mm(w, w)[0, 0].item()

    assert uses() == 2.0


def trains_after_a_use_in_an_op_of_torchs(side: Side) -> bool:
    """Return whether a weight trains that was used before in the body of a custom op."""
    op = torch.library.custom_op("cached::product", mutates_args=())(_product)
    w = weight()
    with side.bf16():
        op(X, w)
        return torch.mm(X, w).requires_grad


def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, w)


def test_a_cast_in_the_body_of_torchs_custom_op_is_not_kept() -> None:
    """Eager keeps it, and the weight trains no longer: custom-op-weight-cache."""
    assert trains_after_a_use_in_an_op_of_torchs(REFERENCE)
    assert not trains_after_a_use_in_an_op_of_torchs(TORCH)
    with quirks(["custom-op-weight-cache"]):
        assert not trains_after_a_use_in_an_op_of_torchs(REFERENCE)


@KEEPS_NO_GRAD
@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_a_first_pass_without_gradients_does_not_keep_the_second_from_training(first: Any) -> None:
    def program(side: Side) -> Any:
        w = weight()
        with side.bf16():
            with first():
                evaluated = torch.mm(X, w)
            trained = torch.mm(X, w)
        backward(trained)
        return evaluated.clone(), trained, w.grad

    assert same(program)[2] is not None


def test_a_dead_weights_place_in_the_cache_is_not_inherited() -> None:
    def program(side: Side) -> list[float]:
        found = []
        with side.bf16():
            for n in range(50):  # CPython and the allocator reuse addresses
                w = torch.full((2, 2), float(n), requires_grad=True)
                found.append(torch.mm(torch.ones(2, 2), w)[0, 0].item())
                del w
        return found

    assert program(REFERENCE) == [2.0 * n for n in range(50)]
    same(program)


def test_the_cache_setting_is_inherited_where_the_context_is_made() -> None:
    def program(side: Side) -> Any:
        ours = "cache_enabled" if side is REFERENCE else "_cache_enabled"
        made_before = side.bf16()
        with side.bf16(cache_enabled=False):
            made_inside = side.bf16()
            with side.bf16(cache_enabled=True):
                made_innermost = side.bf16()
        contexts = made_before, made_inside, made_innermost, side.bf16()
        return [getattr(context, ours) for context in contexts]

    assert same(program) == [True, False, True, True]


# --- contexts


def dtypes(*contexts: Any) -> list[torch.dtype]:
    """Enter contexts one by one; return the dtype of a product in each, on the way in and out."""
    if not contexts:
        return [torch.mm(X, X).dtype]
    here = torch.mm(X, X).dtype
    with contexts[0]:
        inner = dtypes(*contexts[1:])
    return [here, *inner, torch.mm(X, X).dtype]


def test_contexts_nest_and_unwind() -> None:
    def program(side: Side) -> list[torch.dtype]:
        a = side.autocast
        return dtypes(a("cpu", BF16), a("cpu", F16), a("cpu", enabled=False), a("cpu", F16))

    assert same(program) == [F32, BF16, F16, F32, F16, F32, F16, BF16, F32]


def test_disabled_is_as_if_there_were_none_but_for_the_nesting() -> None:
    def program(side: Side) -> Any:
        w = weight()
        with side.bf16(enabled=False):
            y = torch.mm(X, w) + torch.mm(X, w)
        backward(y)
        return y, w.grad

    assert same(program)[0].dtype is F32


@SIDES
def test_an_exception_restores_the_state(side: Side) -> None:
    with pytest.raises(ZeroDivisionError), side.bf16(), side.autocast("cpu", F16):
        raise ZeroDivisionError
    assert torch.mm(X, X).dtype is F32


@SIDES
def test_an_op_that_raises_leaves_autocast_on(side: Side) -> None:
    with side.bf16():
        with pytest.raises(RuntimeError):
            torch.mm(X, torch.ones(3, 3))
        assert torch.mm(X, X).dtype is BF16


def test_a_decorator_runs_each_call_inside() -> None:
    def program(side: Side) -> Any:
        @side.bf16()
        def product(x: torch.Tensor) -> torch.Tensor:
            """Multiply."""
            return torch.mm(x, x)

        assert (product.__name__, product.__doc__) == ("product", "Multiply.")
        return product(X), torch.mm(X, X), product(X), torch.mm(X, X)

    assert [y.dtype for y in same(program)] == [BF16, F32, BF16, F32]


def test_a_decorated_function_may_call_itself() -> None:
    @REFERENCE.bf16()
    def product(x: torch.Tensor, depth: int) -> torch.Tensor:
        return product(x, depth - 1) if depth else torch.mm(x, x)

    # torch's context keeps one saved state, and is still on afterwards.
    assert product(X, 3).dtype is BF16
    assert torch.mm(X, X).dtype is F32


def test_a_decorator_restores_after_an_exception() -> None:
    @REFERENCE.bf16()
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.mm(X, X).dtype is F32


def test_one_context_can_be_entered_again_inside_itself() -> None:
    context = REFERENCE.bf16()
    assert dtypes(context, context) == [F32, BF16, BF16, BF16, F32]


@SIDES
@pytest.mark.parametrize("dtype", [F32, F64, torch.int8])
def test_an_unsupported_dtype_warns_and_disables(side: Side, dtype: torch.dtype) -> None:
    with pytest.warns(UserWarning, match=r"(?s)cpu|CPU.*supports"):
        context = side.autocast("cpu", dtype)
    with context:
        assert torch.mm(X, X).dtype is F32
    with side.bf16():
        with pytest.warns(UserWarning, match="isabl"):
            context = side.autocast("cpu", dtype)
        assert dtypes(context) == [BF16, F32, BF16]


@SIDES
def test_an_unsupported_dtype_that_is_not_enabled_does_not_warn(side: Side) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        side.autocast("cpu", F64, enabled=False)


@pytest.mark.parametrize("device", tabled_devices())
def test_the_default_dtype_is_torchs(device: str) -> None:
    assert reference.autocast(device).dtype is torch.get_autocast_dtype(device)


def test_without_a_dtype_the_current_one_is_taken_where_the_context_is_made() -> None:
    def program(side: Side) -> list[torch.dtype]:
        made_outside = side.autocast("cpu")
        with side.autocast("cpu", F16):
            made_inside = side.autocast("cpu")
        return [*dtypes(made_outside), *dtypes(made_inside), *dtypes(side.autocast("cpu"))]

    assert same(program) == [F32, BF16, F32, F32, F16, F32, F32, BF16, F32]


def test_a_device_without_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="device_type='npu' has no policy table: use one of cpu,"):
        reference.autocast("npu")


def test_a_table_of_ones_own_is_followed() -> None:
    with products_in_float32():
        assert torch.mm(X.to(BF16), X.to(BF16)).dtype is F32
        assert torch.bmm(X[None], X[None]).dtype is F32
    with reference.autocast("cpu", BF16):
        assert torch.mm(X, X).dtype is BF16


def test_the_other_devices_autocast_leaves_cpu_tensors_alone() -> None:
    with reference.autocast("cuda", F16):
        assert torch.mm(X, X).dtype is F32
        with reference.autocast("cpu", BF16):
            assert torch.mm(X, X).dtype is BF16


def test_the_state_is_the_threads_own() -> None:
    def program(side: Side) -> Any:
        found = []

        def elsewhere() -> None:
            found.append(torch.mm(X, X).dtype)
            with side.autocast("cpu", F16):
                found.append(torch.mm(X, X).dtype)

        with side.bf16():
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            found.append(torch.mm(X, X).dtype)
        return found

    assert same(program) == [F32, F16, BF16]


def test_threads_may_share_a_context() -> None:
    """As they do when both call one decorated function; torch restores the wrong state there."""
    context, both_inside, found = REFERENCE.bf16(), threading.Barrier(2, timeout=600), {}

    def work(low: torch.dtype) -> None:
        with reference.autocast("cpu", low):
            with context:
                both_inside.wait()
                inside = torch.mm(X, X).dtype
                both_inside.wait()
            found[low] = inside, torch.mm(X, X).dtype

    threads = [threading.Thread(target=work, args=(low,)) for low in (BF16, F16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {BF16: (BF16, BF16), F16: (BF16, F16)}


def test_a_backward_pass_runs_under_the_context_it_is_called_in() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen.append(torch.mm(gradient, gradient).dtype)
            return gradient

    seen: list[torch.dtype] = []

    def program(side: Side) -> Any:
        seen.clear()
        with side.bf16():
            y = Product.apply(weight())
            backward(y)
        backward(Product.apply(weight()))
        return tuple(seen)

    assert same(program) == (BF16, F32)


def test_the_reference_is_inert_when_not_entered() -> None:
    torchs, ours = TORCH.bf16(), REFERENCE.bf16()
    with ours:
        pass
    with reference.log_kernels() as calls:
        assert torch.mm(X, X).dtype is F32
        with torchs:
            assert torch.mm(X, X).dtype is BF16
    assert calls == []
    assert not torch._C._dispatch_tls_is_dispatch_key_included("AutocastIPU")


def test_torch_is_asked_about_the_reference_inside_and_about_itself_outside() -> None:
    def answers() -> tuple[object, ...]:
        enabled = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
        return *enabled, torch.get_autocast_dtype("cpu")

    def program(side: Side) -> Any:
        with side.autocast("cpu", F16):
            inside = answers()
            with side.autocast("cpu", enabled=False):
                return inside, answers()

    functions = torch.is_autocast_enabled, torch.get_autocast_dtype
    assert same(program) == ((True, False, F16), (False, False, F16))
    assert functions == (torch.is_autocast_enabled, torch.get_autocast_dtype)


# --- what is cast


def test_each_policy_casts_what_it_says() -> None:
    x, low = X, X.to(BF16)
    programs: dict[torch.dtype, tuple[Callable[[], torch.Tensor], ...]] = {
        BF16: (
            lambda: torch.mm(x, low),
            lambda: torch.cat([low, low]),
            lambda: nn.functional.linear(x, x),
            lambda: torch.relu(low),
        ),
        F32: (
            lambda: torch.trace(low),
            lambda: torch.cat([low, x, low]),
            lambda: torch.stack([x, low]),
            lambda: torch.add(x, low),
            lambda: torch.relu(x),
        ),
    }
    for dtype, functions in programs.items():
        for function in functions:

            def program(side: Side, function: Any = function) -> torch.Tensor:
                with side.bf16():
                    return function()

            assert same(program).dtype is dtype


def test_in_place_ops_and_ops_with_out_are_not_cast() -> None:
    def program(side: Side) -> Any:
        x, out = X.clone(), torch.empty(4, 4)
        with side.bf16():
            torch.mm(X, X, out=out)
            torch.cat([X[:2], X[:2]], out=out[:4])
            x.addmm_(X, X)
            return x, out

    assert [y.dtype for y in same(program)] == [F32, F32]


@SIDES
def test_in_place_ops_and_ops_with_out_do_not_hide_a_mismatch(side: Side) -> None:
    with side.bf16():
        with pytest.raises(RuntimeError):
            torch.mm(X, X, out=torch.empty(4, 4, dtype=BF16))
        with pytest.raises(RuntimeError):
            X.clone().addmm_(X, X.to(BF16))


def test_float64_integer_and_complex_tensors_are_not_cast() -> None:
    def program(side: Side) -> Any:
        tensors = X.double(), torch.ones(4, 4, dtype=torch.int64), torch.complex(X, X)
        with side.bf16():
            return [torch.mm(x, x) for x in tensors], torch.trace(X.double())

    products, trace = same(program)
    assert [y.dtype for y in products] == [F64, torch.int64, torch.complex64]
    assert trace.dtype is F64


@SIDES
def test_a_float64_operand_does_not_meet_the_cast_ones(side: Side) -> None:
    with side.bf16(), pytest.raises(RuntimeError):
        torch.mm(X.double(), X)


def test_promotion_ignores_float64() -> None:
    def program(side: Side) -> Any:
        with side.bf16():
            return torch.cat([X.double(), X.to(BF16)]), torch.cat([X.double(), X])

    same(program)


@contextmanager
def torchs_cuda(dtype: torch.dtype) -> Iterator[None]:
    """Switch on what `torch.autocast("cuda")` would, which a build for CPUs refuses."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_dtype("cuda", before)
        torch.set_autocast_enabled("cuda", False)


def on_cuda(function: Callable[..., Any], *dtypes: torch.dtype) -> list[torch.dtype]:
    """Return the dtypes of a function's result under torch's autocast and under the reference's."""
    with FakeTensorMode():
        tensors = [torch.ones(4, 4, device="cuda", dtype=dtype) for dtype in dtypes]
        with torchs_cuda(F16):
            torchs = function(*tensors).dtype
        with reference.autocast("cuda", F16):
            return [torchs, function(*tensors).dtype]


def softmax(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.softmax(x, 0, dtype=dtype)


def test_ops_that_take_a_dtype_get_float32_unless_the_caller_gave_one() -> None:
    for dtype in (F16, BF16, F32):
        assert on_cuda(softmax, dtype) == [F32, F32]
        assert on_cuda(torch.sum, dtype) == [F32, F32]
        assert on_cuda(partial(softmax, dtype=F64), dtype) == [F64, F64]
        assert on_cuda(partial(softmax, dtype=BF16), dtype) == [BF16, BF16]
        assert on_cuda(partial(torch.sum, dtype=F16), dtype) == [F16, F16]
    assert on_cuda(softmax, F64) == [F64, F64]


def test_the_explicit_dtype_may_stand_by_position() -> None:
    assert on_cuda(lambda x: torch.ops.aten.softmax.int(x, 0, BF16), F16) == [BF16, BF16]
    assert on_cuda(lambda x: torch.ops.aten.softmax.int(x, 0, None), F16) == [F32, F32]


def test_norm_becomes_the_norm_that_takes_a_dtype() -> None:
    for dtype in (F16, F32):
        assert on_cuda(lambda x: torch.ops.aten.norm.Scalar(x, 2), dtype) == [F32, F32]
        assert on_cuda(lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, 2, [0]), dtype) == [F32, F32]
    assert on_cuda(lambda x: torch.ops.aten.norm.Scalar(x, 2), F64) == [F64, F64]


@pytest.mark.parametrize("autocast", [torchs_cuda, partial(reference.autocast, "cuda")])
def test_a_banned_op_raises_and_names_a_safe_one(autocast: Any) -> None:
    with FakeTensorMode():
        x = torch.ones(4, device="cuda")
        with (
            autocast(dtype=F16),
            pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"),
        ):
            nn.functional.binary_cross_entropy(x, x)


# --- where torch has a bug


def test_a_weight_under_two_dtypes_is_cast_to_each() -> None:
    def program(side: Side) -> Any:
        w = weight()
        with side.bf16():
            outer = torch.mm(X, w)
            with side.autocast("cpu", F16):
                inner = torch.mm(X, w)
        backward(outer, inner)
        return outer, inner, w.grad

    assert [y.dtype for y in program(REFERENCE)] == [BF16, F16, F32]
    for side in (TORCH, REFERENCE):
        with (
            quirks(["cache-ignores-dtype"]),
            pytest.raises(RuntimeError, match="to have the same dtype"),
        ):
            program(side)
        reference.clear_cache()
        torch.clear_autocast_cache()


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_a_cast_cached_in_its_grad_mode_is_imitated_and_trains_no_weight(first: Any) -> None:
    """As torch before 2.11, and only under the quirk."""

    def trains() -> bool:
        w = weight()
        with REFERENCE.bf16():
            with first():
                torch.mm(X, w)
            return torch.mm(X, w).requires_grad

    assert trains()
    with quirks(["cache-ignores-grad-mode"]):
        assert not trains()


@pytest.mark.parametrize(
    ("given", "expected"),
    [((F16, F16), F16), ((F16, BF16), F32), ((BF16, F16), F32), ((F16, F32), F32)],
    ids=str,
)
def test_promotion_of_the_other_sixteen_bit_dtype(given: Any, expected: torch.dtype) -> None:
    def program(side: Side) -> torch.Tensor:
        with side.bf16():
            return torch.cat([X.to(dtype) for dtype in given])

    assert program(REFERENCE).dtype is expected
    for side in (TORCH, REFERENCE):
        with quirks(["promote-foreign-half"]), pytest.raises(RuntimeError):
            program(side)


def test_promotion_is_decided_by_the_dtypes_and_not_by_their_order() -> None:
    def program(side: Side) -> torch.Tensor:
        with side.bf16():
            return torch.cat([X, X.half(), X.to(BF16)])

    same(program)
    with quirks(["promote-foreign-half"]):
        same(program)


def test_an_optional_tensor_has_a_say_in_promotion() -> None:
    def dtype(autocast: Any) -> torch.dtype:
        with FakeTensorMode():
            x, w = (torch.ones(s, device="cuda", dtype=F16) for s in ((2, 3), (4, 3, 3)))
            with autocast:
                return nn.functional.bilinear(x, x, w, torch.ones(4, device="cuda")).dtype

    assert dtype(reference.autocast("cuda", F16)) is F32
    with quirks(["promote-skips-optional"]):
        assert dtype(reference.autocast("cuda", F16)) is dtype(torchs_cuda(F16)) is F16


def test_an_unknown_quirk_is_refused() -> None:
    with pytest.raises(ValueError, match=r"quirks=\['cache'\] are unknown: use .*cache-ig"):
        quirks(["cache"]).__enter__()


# --- checkpoint and custom functions


@pytest.mark.parametrize("use_reentrant", [pytest.param(True, marks=KEEPS_NO_GRAD), False])
@pytest.mark.parametrize("inside", [True, False], ids=["backward_inside", "backward_outside"])
def test_a_checkpoint_recomputes_under_the_state_of_the_forward_pass(
    use_reentrant: bool, inside: bool
) -> None:
    seen: list[torch.dtype] = []

    def program(side: Side) -> Any:
        seen.clear()
        x, w, v = X.clone().requires_grad_(), weight(1), weight(2)

        def body(x: torch.Tensor) -> torch.Tensor:
            y = torch.mm(x, w).relu()
            seen.append(y.dtype)
            return torch.mm(y, w) + 0.3 * torch.mm(y, v)

        with side.bf16():
            y = torch.mm(side.checkpoint(body, torch.mm(x, v), use_reentrant=use_reentrant), v)
            if inside:
                backward(y)
        if not inside:
            backward(y)
        return y, x.grad, w.grad, v.grad, tuple(seen)

    assert same(program)[-1] == (BF16, BF16)


def test_a_recomputed_checkpoint_leaves_the_autocast_of_torch_off() -> None:
    """A backward pass inside autocast goes on after a recomputation, under the reference alone."""
    seen = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            assert len(ctx.saved_tensors) == 1  # here it is recomputed
            with torch_answers():
                seen.append(torch.is_autocast_enabled("cpu"))
            return grad

    with REFERENCE.bf16():
        y = REFERENCE.checkpoint(Asks.apply, weight(), use_reentrant=False)
        y.sum().backward()
    assert seen == [False]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_made_outside_recomputes_outside(use_reentrant: bool) -> None:
    def program(side: Side) -> Any:
        w = weight()
        y = side.checkpoint(lambda w: torch.mm(w, w).sin(), w, use_reentrant=use_reentrant)
        with side.bf16():
            backward(y)
        return y, w.grad

    same(program)


def test_a_checkpoint_keeps_dropout() -> None:
    def program(side: Side) -> Any:
        torch.manual_seed(0)
        w = weight()
        with side.bf16():
            y = side.checkpoint(
                lambda w: nn.functional.dropout(torch.mm(X, w), 0.5), w, use_reentrant=False
            )
        backward(y)
        return y, w.grad

    same(program)


def custom_product(side: Side) -> Any:
    class Product(torch.autograd.Function):
        @staticmethod
        @side.custom_fwd
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a, b)
            return torch.mm(a, b)

        @staticmethod
        @side.custom_bwd
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = ctx.saved_tensors
            return torch.mm(gradient, b.t()), torch.mm(a.t(), gradient)

    return Product.apply


@pytest.mark.parametrize("forward_inside", [True, False])
@pytest.mark.parametrize("backward_inside", [True, False])
def test_a_custom_backward_runs_under_the_state_of_its_forward(
    forward_inside: bool, backward_inside: bool
) -> None:
    def program(side: Side) -> Any:
        a, b = weight(1), weight(2)
        with side.bf16() if forward_inside else nullcontext():
            y = custom_product(side)(a, b)
        with side.autocast("cpu", F16) if backward_inside else nullcontext():
            backward(y)
        return y, a.grad, b.grad

    assert same(program)[0].dtype is (BF16 if forward_inside else F32)


@pytest.mark.parametrize("forward_inside", [True, False])
@pytest.mark.parametrize("backward_inside", [True, False])
@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64])
def test_inputs_that_are_cast_meet_no_autocast(
    forward_inside: bool, backward_inside: bool, dtype: torch.dtype
) -> None:
    def program(side: Side) -> Any:
        seen: list[torch.dtype] = []

        class Product(torch.autograd.Function):
            @staticmethod
            @side.casting_fwd
            def forward(ctx: Any, a: torch.Tensor, b: list[torch.Tensor], n: Any) -> torch.Tensor:
                ctx.save_for_backward(a, b[0])
                seen.extend((a.dtype, b[0].dtype, n.dtype))
                return torch.mm(a, b[0])

            @staticmethod
            @side.custom_bwd
            def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
                _, b = ctx.saved_tensors
                return torch.mm(gradient, b.t()), None, None

        a = weight().to(dtype).detach().requires_grad_()
        with side.bf16() if forward_inside else nullcontext():
            y = Product.apply(a, [X.to(dtype)], torch.ones(2, dtype=torch.int64))
        with side.autocast("cpu", F16) if backward_inside else nullcontext():
            backward(y)
        return y, a.grad, seen

    cast = forward_inside and dtype is not F64
    assert same(program)[0].dtype is (F32 if cast else dtype)


@SIDES
def test_a_function_with_a_setup_context_has_the_state_of_its_forward(side: Side) -> None:
    seen: list[torch.dtype] = []

    class Square(torch.autograd.Function):
        @staticmethod
        @side.custom_fwd
        def forward(a: torch.Tensor) -> torch.Tensor:
            return torch.mm(a, a)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        @side.custom_bwd
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (a,) = ctx.saved_tensors
            seen.append(torch.mm(a, a).dtype)
            return gradient.float()

    imitated = quirks(["custom-fwd-setup-context"])
    with side.bf16():
        y = Square.apply(weight())
    assert y.dtype is BF16
    with imitated, pytest.raises(AttributeError):  # what torch does, and the reference on request
        backward(y)
    if side is REFERENCE:
        with side.bf16():
            y = Square.apply(weight())
        backward(y)
        assert seen == [BF16]


# --- function transforms


def test_under_vmap_autocast_decides_about_the_op_that_was_called() -> None:
    w, b = weight().detach(), weight().detach()[0]

    def outputs() -> torch.Tensor:
        mapped = reference.transforms("cpu")["vmap"](lambda x: nn.functional.linear(x, w, b))
        with reference.autocast("cpu", BF16):
            return mapped(torch.stack([X, X]))  # type: ignore[no-any-return]

    assert outputs().dtype is BF16
    with quirks(["transform-before-autocast"]):
        assert outputs().dtype is F32  # as in torch


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, in jvp
def test_under_jvp_a_tangent_is_computed_in_the_dtype_of_its_op() -> None:
    """The policy of an inverse is float32: so are the products of its tangent."""
    jvp = reference.transforms("cpu")["jvp"]
    a, tangent = torch.eye(4) + random(4, 4, seed=3) / 8, random(4, 4, seed=4)

    def pushed() -> Any:
        return jvp(torch.linalg.inv, (a,), (tangent,))[1]

    expected = pushed()
    with reference.autocast("cpu", BF16):
        assert torch.equal(pushed(), expected)
        with quirks(["transform-before-autocast"]):
            assert not torch.equal(pushed(), expected)  # as in torch


def test_under_vmap_an_op_without_a_policy_keeps_its_dtype() -> None:
    mapped = reference.transforms("cpu")["vmap"](lambda x: torch.mv(x, X[0]))
    with reference.autocast("cpu", BF16):
        assert mapped(torch.stack([X, X])).dtype is F32
        with quirks(["transform-before-autocast"]):
            assert mapped(torch.stack([X, X])).dtype is BF16  # as in torch


def sums(region: Callable[[], Any], w: torch.Tensor) -> torch.Tensor:
    """Multiply twice with a weight in one region: its gradient is added in 16 bits."""
    with region():
        return (torch.mm(X, w) + 0.3 * torch.mm(X.t(), w)).float()


def one_region(region: Callable[[], Any], w: torch.Tensor) -> torch.Tensor:
    return sums(region, w)


def sibling_regions(region: Callable[[], Any], w: torch.Tensor) -> torch.Tensor:
    with region():
        first = torch.mm(X, w)
    with region():
        return (first + 0.3 * torch.mm(X.t(), w)).float()


def nested_regions(region: Callable[[], Any], w: torch.Tensor) -> torch.Tensor:
    with region():
        return 0.7 * sibling_regions(region, w) + sums(region, w)


def a_region_that_raised(region: Callable[[], Any], w: torch.Tensor) -> torch.Tensor:
    kept = []
    with suppress(ZeroDivisionError), region():
        kept.append(torch.mm(X, w))
        raise ZeroDivisionError
    return kept[0].float() + sums(region, w)


REGIONS = [one_region, sibling_regions, nested_regions, a_region_that_raised]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, in jvp
@pytest.mark.parametrize("way", ["grad", "vmap", "vjp", "jvp"])
def test_a_rule_of_another_table_does_nothing_once_its_region_has_ended(way: str) -> None:
    """Inside a transform, torch hands no Python number on to a kernel."""
    rules = load_table("cpu").rules
    rule = dataclasses.replace(rules["mm"], overload="mul.Tensor")
    table = dataclasses.replace(load_table("cpu"), rules={**rules, "mul.Tensor": rule})
    with reference.autocast("cpu", BF16, table=table):
        assert (weight() * weight()).dtype is BF16
    assert (weight() * 2).dtype is torch.float32

    def product(w: torch.Tensor, region: Callable[[], Any]) -> torch.Tensor:
        with region():
            return (w @ w.T) * 2

    def gradients(side: Side) -> Any:
        region = partial(side.autocast, "cpu", BF16)
        return WAYS[way](side, partial(product, region=region), weight().detach())

    same(gradients)


def test_an_op_of_another_table_is_asked_nothing_once_its_region_has_ended() -> None:
    rules = load_table("cpu").rules
    rule = dataclasses.replace(rules["mm"], overload="abs")
    table = dataclasses.replace(load_table("cpu"), rules={**rules, "abs": rule})
    with reference.autocast("cpu", BF16, table=table):
        assert weight().abs().dtype is BF16
    with deciding() as made, reference.autocast("cpu", BF16):
        weight().abs()
    assert made.decisions == []


def by_backward(side: Side, function: Callable[..., torch.Tensor], w: torch.Tensor) -> Any:
    loss = function(w.requires_grad_()).square().sum()
    loss.backward()
    return w.grad


def by_checkpoint(
    side: Side, function: Callable[..., torch.Tensor], w: torch.Tensor, use_reentrant: bool
) -> Any:
    kept = partial(side.checkpoint, function, use_reentrant=use_reentrant)
    return by_backward(side, kept, w)


def by_grad(side: Side, function: Callable[..., torch.Tensor], w: torch.Tensor) -> Any:
    made = torch.func.grad if side is TORCH else reference.transforms("cpu")["grad"]
    return made(lambda w: function(w).square().sum())(w)


def by_vmap_of_grad(side: Side, function: Callable[..., torch.Tensor], w: torch.Tensor) -> Any:
    made = torch.func.grad if side is TORCH else reference.transforms("cpu")["grad"]
    mapped = torch.func.vmap if side is TORCH else reference.transforms("cpu")["vmap"]
    return mapped(made(lambda w: function(w).square().sum()))(torch.stack([w, w + 1]))


def by_vjp(side: Side, function: Callable[..., torch.Tensor], w: torch.Tensor) -> Any:
    value, pullback = torch.func.vjp(function, w)
    return value, pullback(random(*value.shape, seed=9))


def by_jvp(side: Side, function: Callable[..., torch.Tensor], w: torch.Tensor) -> Any:
    made = torch.func.jvp if side is TORCH else reference.transforms("cpu")["jvp"]
    return made(function, (w,), (random(*w.shape, seed=9),))


def by_forward_ad(side: Side, function: Callable[..., torch.Tensor], w: torch.Tensor) -> Any:
    outputs, tangents = forward_ad(lambda w: (function(w),), (w,), (random(*w.shape, seed=9),))
    return outputs[0], tangents[0]


def by_jacobian(
    side: Side, function: Callable[..., torch.Tensor], w: torch.Tensor, name: str
) -> Any:
    made = getattr(torch.func, name) if side is TORCH else reference.transforms("cpu")[name]
    return made(lambda w: function(w).square().sum(1))(w)


def by_functionalize(side: Side, function: Callable[..., torch.Tensor], w: torch.Tensor) -> Any:
    made = (
        torch.func.functionalize if side is TORCH else reference.transforms("cpu")["functionalize"]
    )
    return by_backward(side, made(function), w)


WAYS = {
    "backward": by_backward,
    "checkpoint": partial(by_checkpoint, use_reentrant=False),
    "reentrant": partial(by_checkpoint, use_reentrant=True),
    "grad": by_grad,
    "vmap": by_vmap_of_grad,
    "vjp": by_vjp,
    "jvp": by_jvp,
    "forward_ad": by_forward_ad,
    "jacrev": partial(by_jacobian, name="jacrev"),
    "jacfwd": partial(by_jacobian, name="jacfwd"),
    "functionalize": by_functionalize,
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, in jvp
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("regions", REGIONS)
@pytest.mark.parametrize("way", WAYS)
def test_regions_share_a_cast_where_torchs_do_however_gradients_are_taken(
    way: str, regions: Callable[..., torch.Tensor], dtype: torch.dtype
) -> None:
    def gradients(side: Side) -> Any:
        region = partial(side.autocast, "cpu", dtype)
        return WAYS[way](side, partial(regions, region), weight().detach())

    same(gradients)


def test_sibling_regions_add_a_gradient_in_float32_and_one_region_in_16_bits() -> None:
    def gradient(regions: Callable[..., torch.Tensor]) -> torch.Tensor:
        region = partial(reference.autocast, "cpu", BF16)
        found: torch.Tensor = by_grad(REFERENCE, partial(regions, region), weight().detach())
        return found

    one, two = gradient(one_region), gradient(sibling_regions)
    assert torch.equal(one, one.to(BF16).float())
    assert not torch.equal(two, two.to(BF16).float())


@pytest.mark.parametrize("maps", [True, False])
def test_func_grad_gives_what_it_gives_with_the_context_inside(maps: bool) -> None:
    """The context around the transform is for the function, not for its backward ops."""

    def loss(w: torch.Tensor) -> torch.Tensor:
        with reference.autocast("cpu", enabled=False):
            return torch.mm(X, w).square().sum()

    def gradient() -> torch.Tensor:
        derivative = reference.transforms("cpu")["grad"](loss)
        if maps:
            derivative = reference.transforms("cpu")["vmap"](derivative)
        w = weight().detach()
        return derivative(torch.stack([w, w]) if maps else w)  # type: ignore[no-any-return]

    outside = gradient()
    with reference.autocast("cpu", BF16):
        assert torch.equal(gradient(), outside)
        with quirks(["func-grad-ambient-backward"]):
            assert not torch.equal(gradient(), outside)  # as in torch


def products_in_float32() -> Any:
    """Return a context whose table has one rule: products run in float32."""
    table = load_table("cpu")
    rule = dataclasses.replace(table.rules["mm"], policy=Policy.FP32)
    table = dataclasses.replace(table, rules={"mm": rule})
    return reference.autocast("cpu", BF16, table=table)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_table_of_ones_own_holds_in_the_recomputation(use_reentrant: bool) -> None:
    seen = []

    def body(w: torch.Tensor) -> torch.Tensor:
        y = torch.mm(w, w)
        seen.append(y.dtype)
        return y.sin()  # needs y: the recomputation does not stop before

    with products_in_float32():
        y = REFERENCE.checkpoint(body, weight(), use_reentrant=use_reentrant)
    backward(y)
    assert seen == [F32, F32]


def test_a_table_of_ones_own_holds_in_a_custom_backward() -> None:
    with products_in_float32():
        y = custom_product(REFERENCE)(weight(1), weight(2))
    with REFERENCE.bf16(), reference.log_kernels() as calls:
        backward(y)
    assert [(call.overload, call.policy) for call in calls] == [("mm", Policy.FP32)] * 2


# --- whole modules


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layer = kind(16, 8, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 4, 2),
        nn.GroupNorm(2, 4),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.LazyLinear(5),
        nn.LogSoftmax(1),
    )


MODULES: dict[str, Callable[[], nn.Module]] = {
    "transformer": Attention,
    "lstm": partial(Recurrent, nn.LSTM),
    "gru": partial(Recurrent, nn.GRU),
    "rnn": partial(Recurrent, nn.RNN),
    "convolutional": convolutional,
    "tied": lambda: nn.Sequential(*[nn.Linear(16, 16)] * 3, nn.LayerNorm(16), nn.PReLU()),
}


@pytest.mark.parametrize("low", [BF16, F16], ids=str)
@pytest.mark.parametrize("mode", ["train", "eval", "inference"])
@pytest.mark.parametrize("name", MODULES)
def test_a_module_gives_torchs_outputs_and_gradients(
    name: str, mode: str, low: torch.dtype
) -> None:
    def program(side: Side) -> Any:
        torch.manual_seed(0)
        module = MODULES[name]()
        module(random(3, 6, 16))
        module.zero_grad()
        module.train(mode == "train")
        x = random(3, 6, 16, seed=5).requires_grad_(mode != "inference")
        with torch.inference_mode() if mode == "inference" else nullcontext():
            with side.autocast("cpu", low):
                try:
                    y = module(x)
                except RuntimeError as error:  # oneDNN has no float16 LSTM for most CPUs
                    return str(error)
            if mode == "inference":
                return y.clone()
        backward(y)
        return y, x.grad, [p.grad for p in module.parameters()], list(module.buffers())

    # An encoder layer asks whether autocast is on before it takes its fast path in inference, but
    # asks about CUDA: the reference imitates that here.
    with quirks(["query-asks-cuda"]):
        same(program)


def test_a_question_about_autocast_in_general_is_answered_for_every_device() -> None:
    def program(side: Side) -> torch.dtype:
        layer = Attention().eval()
        with torch.inference_mode(), side.bf16():
            return layer(random(3, 6, 16)).dtype

    assert program(REFERENCE) is F32  # of its layer norm: each op by itself
    with quirks(["query-asks-cuda"]):
        assert same(program) is BF16  # of the fused op


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_take_inputs_of_another_dtype_under_autocast(kind: Any) -> None:
    def program(side: Side) -> Any:
        torch.manual_seed(0)
        module, x = Recurrent(kind), random(3, 6, 16, dtype=BF16).requires_grad_()
        with side.bf16():
            y = module(x)
        backward(y)
        return y, x.grad, [p.grad for p in module.parameters()]

    same(program)


def test_three_steps_of_training_stay_equal() -> None:
    def program(side: Side) -> Any:
        torch.manual_seed(0)
        module = Attention()
        optimizer = torch.optim.Adam(module.parameters(), 1e-2)
        losses = []
        for step in range(3):
            optimizer.zero_grad()
            with side.bf16():
                x = random(3, 6, 16, seed=step)
                loss = nn.functional.mse_loss(module(x), x)
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, list(module.parameters())

    same(program)


# --- the log


def test_the_log_holds_every_call_with_its_casts() -> None:
    w, x = weight(), X.clone()
    with REFERENCE.bf16(), reference.log_kernels() as calls:
        y = torch.mm(x, w)
        torch.trace(y)
        torch.relu(x)  # has no rule
        torch.mm(y, w)
        torch.cat([y, y])
    mm, cat, fp32 = Policy.LOWER_PRECISION_FP, Policy.PROMOTE, Policy.FP32
    cached = Cast(id(w), F32, BF16, cached=True)
    assert calls == [
        KernelCall("cpu", "mm", mm, (F32, F32), (Cast(id(x), F32, BF16), cached)),
        KernelCall("cpu", "trace", fp32, (BF16,), (Cast(id(y), BF16, F32),)),
        KernelCall("cpu", "mm", mm, (BF16, F32), (cached,)),
        KernelCall("cpu", "cat", cat, (BF16, BF16), ()),
    ]


def test_the_log_says_where_a_dtype_was_set_instead_of_casting() -> None:
    with FakeTensorMode(), reference.autocast("cuda", F16), reference.log_kernels() as calls:
        torch.softmax(torch.ones(4, device="cuda"), 0)
        torch.softmax(torch.ones(4, device="cuda", dtype=F64), 0)
    policy = Policy.FP32_SET_OPT_DTYPE
    assert calls == [
        KernelCall("cuda", "softmax.int", policy, (F32,), (), sets_dtype=True),
        KernelCall("cuda", "softmax.int", policy, (F64,), ()),
    ]


def test_a_composite_op_is_logged_as_the_ops_it_decomposes_into() -> None:
    with REFERENCE.bf16(), reference.log_kernels() as calls:
        torch.einsum("ij,jk->ik", X, X)
        torch.linalg.multi_dot([X, X, X])
    assert [call.overload for call in calls] == ["bmm", "mm", "mm"]


def test_logs_nest_and_stop() -> None:
    with REFERENCE.bf16(), reference.log_kernels() as outer:
        torch.mm(X, X)
        with reference.log_kernels() as inner:
            torch.mm(X, X)
        torch.bmm(X[None], X[None])
    with REFERENCE.bf16():
        torch.mm(X, X)
    assert [call.overload for call in outer] == ["mm", "bmm"]
    assert [call.overload for call in inner] == ["mm"]


def test_snapshot_restores_the_state_elsewhere() -> None:
    with reference.autocast("cpu", F16, cache_enabled=False):
        taken, inside = reference.snapshot("cpu"), state()
    with taken.restored():
        assert torch.mm(X, X).dtype is F16
        assert state() == inside
    assert torch.mm(X, X).dtype is F32


def test_what_one_quirk_imitates_is_gone_with_it() -> None:
    """Ops without a policy have no kernel of the reference; some could not be called through it."""
    x = torch.ones(2)
    with quirks(["torchax-float64", "torchax-composites"]), reference.intercepting():
        assert torch.ops.aten.remainder.Tensor(x, x).sum() == 0
    with reference.autocast("cpu", dtype=torch.bfloat16), reference.log_kernels() as calls:
        assert (2 % x).sum() == 0
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert [call.overload for call in calls] == ["mm"]


def test_a_reset_gives_torch_its_queries_back_whoever_leaves_a_context_after_it() -> None:
    """What is checked may enter a context and not leave it, or only when it is collected."""
    asked = torch.get_autocast_dtype
    left = reference.autocast("cpu", dtype=torch.float16)
    left.__enter__()
    with reference.autocast("cpu", enabled=False):
        assert torch.get_autocast_dtype is not asked
        reset()
        assert torch.get_autocast_dtype is asked
    fresh = state()
    left.__exit__(None, None, None)
    assert state() == fresh
    with reference.autocast("cpu", dtype=torch.float16):
        assert torch.get_autocast_dtype("cpu") is torch.float16
    assert torch.get_autocast_dtype is asked


def test_a_context_from_before_a_reset_ends_nothing_that_was_entered_after_it() -> None:
    left = reference.autocast("cpu", dtype=torch.float16)
    left.__enter__()
    reset()
    with reference.autocast("cpu", dtype=torch.bfloat16):
        inside = state()
        left.__exit__(None, None, None)
        assert state() == inside
        assert torch.mm(X, X).dtype is torch.bfloat16
    assert torch.mm(X, X).dtype is F32


@pytest.mark.parametrize(
    ("op", "first", "then"),
    [("mm", "cuda", "cpu"), ("polar", "cpu", None), ("pow.Tensor_Tensor", "cuda", None)],
)
def test_a_call_of_two_devices_is_the_first_ones_that_has_a_rule(
    op: str, first: str, then: str | None
) -> None:
    """As in torch, where a device without a kernel for an op hands the call on."""
    with FakeTensorMode():
        tensors = [torch.ones(2, device="cuda"), torch.ones(())]
    with reference.autocast("cpu"), reference.autocast("cuda"):
        nothing: Any = None
        call = Call(op, None, nothing, (), {}, tensors, here(), nothing, None)
        found = of_table(call)
        assert found is not None
        assert found.device == first
        with dispatch.excluding(first):  # its kernel is under way
            rest = of_table(call)
        assert (rest and rest.device) == then
