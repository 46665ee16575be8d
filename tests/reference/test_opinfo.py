"""The reference against torch's autocast, bit for bit, over PyTorch's own operator database.

On the CPU values and gradients are compared, by their bits. The kernels of the other devices run on
fake tensors, which need no device: there dtypes, shapes and strides are compared. Whether an op
raises, and what, is compared everywhere.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import set_rng_seed
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from amp_fuzz import reference
from amp_fuzz.policies.tables import tabled_devices
from amp_fuzz.reference import Policy, load_table
from amp_fuzz.upstream import quirks

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
C64, I64 = torch.complex64, torch.int64
FAKE_DEVICES = tuple(d for d in tabled_devices() if d != "cpu")

UNINITIALISED = "returns uninitialised memory: only its dtype, shape and strides mean anything"
GELSY = "driver='gelsy' reads its pivots uninitialised, autocast or not: pytorch#71222, #187411"
EXCEPTIONS = {
    "empty": UNINITIALISED,
    "empty_like": UNINITIALISED,
    "empty_permuted": UNINITIALISED,
    "empty_strided": UNINITIALISED,
    "linalg_lstsq": GELSY,
    "linalg_lstsq_grad_oriented": GELSY,
    "new_empty": UNINITIALISED,
    "new_empty_strided": UNINITIALISED,
}
"""Ops whose values are not compared, and why."""

# An upstream bug that the samples meet, where one 16-bit dtype is the input's and the other
# autocast's: torch raises, the reference only if it is asked to imitate that (pytorch#132715).
PROMOTE_RAISES = "Unexpected floating ScalarType in at::autocast::prioritize"
PROMOTE_QUIRK = "promote-foreign-half"

thoroughly = pytest.mark.parametrize(
    "thorough", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["brief", "thorough"]
)
every_op = pytest.mark.parametrize("op", op_db, ids=lambda op: op.formatted_name)
Autocast = Callable[[str, torch.dtype], AbstractContextManager[Any]]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Reductions that several threads share need not add in the same order twice."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- outcomes, and how they differ


@dataclasses.dataclass(frozen=True, slots=True)
class Raised:
    """An exception as an outcome: its text is for people."""

    kind: type[Exception]
    text: str = dataclasses.field(compare=False)


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*args, **kwargs)
    except Exception as error:
        return Raised(type(error), str(error)[:200])


def parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the strided tensors that a tensor of another layout is made of."""
    if tensor.is_nested:
        return tuple(tensor.unbind())
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as integers: the same for every NaN, others for -0 than for 0."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point():
        return tensor
    nan = tensor.double().isnan()
    quiet = torch.full((), math.nan, dtype=tensor.dtype)
    return torch.where(nan, quiet, tensor).view(BITS[tensor.element_size()])


def same_bits(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        pairs = zip(parts(a), parts(b), strict=True)
        return all(torch.equal(bits(x), bits(y)) for x, y in pairs)
    return a == b if isinstance(a, Raised) else repr(a) == repr(b)


def no_values(a: object, b: object) -> bool:
    return True


def same_values(op: OpInfo) -> Callable[[object, object], bool]:
    return no_values if op.formatted_name in EXCEPTIONS else same_bits


def metadata(value: object) -> tuple[object, ...]:
    """Return what a fake tensor knows of itself; of anything else, its type."""
    if not isinstance(value, torch.Tensor):
        return (value,) if isinstance(value, Raised) else (type(value),)
    plain = value.layout is torch.strided and not value.is_nested
    shape = (value.shape, value.stride()) if plain else tuple(part.shape for part in parts(value))
    return value.dtype, value.device, value.layout, shape


def difference(torchs: Any, ours: Any, same_value: Callable[[Any, Any], bool]) -> str | None:
    """Return what differs between torch's outcome and the reference's, or None."""
    if isinstance(torchs, Raised) or isinstance(ours, Raised):
        return None if torchs == ours else f"torch: {torchs}\nreference: {ours}"
    (xs, form), (ys, our_form) = tree_flatten(torchs), tree_flatten(ours)
    if form != our_form:
        return f"torch: {form}\nreference: {our_form}"
    for x, y in zip(xs, ys, strict=True):
        if metadata(x) != metadata(y):
            return f"torch: {metadata(x)}\nreference: {metadata(y)}"
        if not same_value(x, y):
            return f"torch: {x!r}\nreference: {y!r}"
    return None


# --- samples, and running them


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A call of the operator database under an autocast dtype; its `repr` says how to find it."""

    sample: SampleInput = dataclasses.field(repr=False)
    dtype: torch.dtype
    number: int
    low: torch.dtype


def cases(op: OpInfo, samples: dict[torch.dtype, int]) -> Iterator[Case]:
    """Yield so many samples of each dtype that the op takes, under both autocast dtypes.

    Not by `OpInfo.sample_inputs`: it searches the whole stack for a unittest at each call, which
    took as long as all the rest.
    """
    set_rng_seed(0)
    for dtype, count in samples.items():
        if op.supports_dtype(dtype, "cpu"):
            requires_grad = op.supports_autograd and dtype is not I64
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                drawn = op.sample_inputs_func(op, "cpu", dtype, requires_grad)
                drawn = list(itertools.islice(drawn, count))
            for number, sample in enumerate(drawn):
                for low in (BF16, F16):
                    yield Case(sample, dtype, number, low)


def copied(
    sample: SampleInput, copy: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[list[Any], dict[str, Any]]:
    everything = ([sample.input, *sample.args], sample.kwargs)
    return tree_map_only(torch.Tensor, copy, everything)


def check(
    run: Callable[[Autocast], Any],
    where: str,
    same: Callable[[Any, Any], bool],
    *,
    torchs: Autocast = torch.autocast,
    ours: Autocast = reference.autocast,
) -> bool:
    """Fail if torch and the reference differ in an outcome; return whether the op ran at all."""
    wanted, found = run(torchs), run(ours)
    raised = [value for value in tree_leaves(wanted) if isinstance(value, Raised)]
    if any(error.text.startswith(PROMOTE_RAISES) for error in raised):
        with quirks((PROMOTE_QUIRK,)):
            found = run(ours)
    problem = difference(wanted, found, same)
    assert problem is None, f"{where}:\n{problem}"
    return not isinstance(wanted, Raised)


# --- the CPU: values and gradients


def forward_and_gradients(
    op: Callable[..., Any], case: Case, autocast: Autocast, *, backward_inside: bool = False
) -> Any:
    """Run a sample; the gradients are those of its tensors for random ones of its results."""
    args, kwargs = copied(case.sample, lambda t: t.detach().clone().requires_grad_(t.requires_grad))
    leaves = [t for t in tree_leaves((args, kwargs)) if is_tensor(t) and t.requires_grad]

    def gradients() -> tuple[torch.Tensor | None, ...]:
        torch.default_generator.manual_seed(2)
        ends = [t for t in tree_leaves(out) if is_tensor(t) and t.requires_grad]
        seeds = [torch.randn(t.shape, dtype=torch.promote_types(t.dtype, F32)) for t in ends]
        seeds = [seed.to(t.dtype) for seed, t in zip(seeds, ends, strict=True)]
        return torch.autograd.grad(ends, leaves, seeds, allow_unused=True) if ends else ()

    torch.default_generator.manual_seed(1)
    with autocast("cpu", case.low):
        out = outcome(op, *args, **kwargs)
        if isinstance(out, Raised):
            return out
        if backward_inside:
            return out, outcome(gradients)
    return out, outcome(gradients)


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


CUDA_ONLY = "has kernels for CUDA only"
FLOAT8_ONLY = "takes 8-bit floats only, which no autocast casts"
NEVER_RUNS_ON_CPU = {
    "jiterator_2inputs_2outputs": CUDA_ONLY,
    "jiterator_4inputs_with_extra_args": CUDA_ONLY,
    "jiterator_binary": CUDA_ONLY,
    "jiterator_binary_return_by_ref": CUDA_ONLY,
    "jiterator_unary": CUDA_ONLY,
    "nn_functional_batch_norm_without_cudnn": CUDA_ONLY,
    "torch_ops_aten__efficient_attention_forward": CUDA_ONLY,
    "torch_ops_aten__flash_attention_forward": CUDA_ONLY,
    "torch__scaled_mm": FLOAT8_ONLY,
    "torch__scaled_mm_v2": FLOAT8_ONLY,
}

BRIEF = {F32: 6, BF16: 4, F16: 4, F64: 2, C64: 1, I64: 1}
THOROUGH = {F32: 30, BF16: 30, F16: 30, F64: 10, C64: 10, I64: 10}


@every_op
@thoroughly
def test_on_cpu_values_and_gradients_are_torchs_bit_for_bit(op: OpInfo, thorough: bool) -> None:
    ran = False
    for case in cases(op, THOROUGH if thorough else BRIEF):
        for inside in (False, True) if thorough else (False,):

            def run(autocast: Autocast, case: Case = case, inside: bool = inside) -> Any:
                return forward_and_gradients(op, case, autocast, backward_inside=inside)

            ran |= check(run, f"{op.name}, {case}, backward {inside=}", same_values(op))
    assert ran == (op.formatted_name not in NEVER_RUNS_ON_CPU)


@every_op
@pytest.mark.slow
def test_in_place_variants_leave_what_torchs_leave(op: OpInfo) -> None:
    if op.inplace_variant is None:
        pytest.skip("has no in-place variant")
    for case in cases(op, THOROUGH):

        def run(autocast: Autocast, case: Case = case) -> Any:
            args, kwargs = copied(case.sample, lambda t: t.detach().clone())
            torch.default_generator.manual_seed(1)
            with autocast("cpu", case.low):
                out = outcome(op.inplace_variant, *args, **kwargs)
            return out if isinstance(out, Raised) else (out, args, kwargs)

        check(run, f"{op.name}, in place, {case}", same_values(op))


# --- the other devices, on fake tensors


@contextmanager
def torchs_autocast(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Do what torch.autocast does, which refuses devices that this build of torch lacks.

    FakeTensorMode gives MAIA tensors no backend key and so no AutocastMAIA: it is switched on here.
    """
    enabled, before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    torch.autocast_increment_nesting()
    try:
        with key_included("AutocastMAIA") if device == "maia" else nullcontext():
            yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, before)


@contextmanager
def key_included(key: str) -> Iterator[None]:
    torch._C._dispatch_tls_set_dispatch_key_included(key, True)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(key, False)


def on_fake_device(op: OpInfo, case: Case, autocast: Autocast, device: str) -> Any:
    """Run a sample, its tensors made fake; none requires grad, which would abort the process."""
    mode = FakeTensorMode()

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach().resolve_conj().resolve_neg()
        shaped = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
        )
        return FakeTensor(mode, shaped, torch.device(device))

    args, kwargs = copied(case.sample, fake)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": device}
    torch.default_generator.manual_seed(1)
    with mode, autocast(device, case.low):
        return outcome(op, *args, **kwargs)


def has_plain_tensors(sample: SampleInput) -> bool:
    tensors = filter(is_tensor, tree_leaves((sample.input, sample.args, sample.kwargs)))
    return all(t.layout is torch.strided and not t.is_nested for t in tensors)


def fake_cases(op: OpInfo, thorough: bool) -> Iterator[Case]:
    """Yield a few cases: fake tensors are slow, and most of a sample's variety is in its values."""
    samples = {F32: 6, BF16: 4, F16: 4, F64: 2} if thorough else {F32: 2, BF16: 1}
    for n, case in enumerate(cases(op, samples)):
        # Briefly, the two samples of float32 run under one autocast dtype each.
        if has_plain_tensors(case.sample) and (thorough or n in (0, 3, 4)):
            yield case


@every_op
@pytest.mark.parametrize(
    ("devices", "thorough"),
    [
        (("cuda",), False),
        pytest.param([d for d in FAKE_DEVICES if d != "cuda"], False, marks=pytest.mark.thorough),
        pytest.param(FAKE_DEVICES, True, marks=pytest.mark.slow),
    ],
    ids=["cuda", "others", "thorough"],
)
def test_on_fake_devices_dtypes_and_shapes_are_torchs(
    op: OpInfo, devices: Sequence[str], thorough: bool
) -> None:
    for case in fake_cases(op, thorough):
        for device in devices:

            def run(autocast: Autocast, case: Case = case, device: str = device) -> Any:
                return on_fake_device(op, case, autocast, device)

            check(run, f"{op.name} on {device}, {case}", no_values, torchs=torchs_autocast)


# --- the comparison itself


def find(name: str) -> OpInfo:
    return next(op for op in op_db if op.formatted_name == name)


def wrong(device: str, overload: str, policy: Policy) -> Autocast:
    """Return the reference's autocast with another policy for one op."""
    table = load_table(device)
    rule = dataclasses.replace(table.rules[overload], policy=policy)
    table = dataclasses.replace(table, rules={**table.rules, overload: rule})
    return lambda device, dtype: reference.autocast(device, dtype, table=table)


@pytest.mark.parametrize(
    ("overload", "policy"),
    [("mm", Policy.FP32), ("mm", Policy.PROMOTE), ("trace", Policy.LOWER_PRECISION_FP)],
)
def test_a_wrong_rule_is_noticed_on_cpu(overload: str, policy: Policy) -> None:
    op = find(overload)
    case = next(cases(op, {F32: 1}))

    def run(autocast: Autocast) -> Any:
        return forward_and_gradients(op, case, autocast)

    check(run, "here", same_bits)
    with pytest.raises(AssertionError, match=r"(?s)here:.*torch:.*reference:"):
        check(run, "here", same_bits, ours=wrong("cpu", overload, policy))


@pytest.mark.parametrize("device", FAKE_DEVICES)
def test_a_wrong_rule_is_noticed_on_fake_devices(device: str) -> None:
    case = next(cases(find("mm"), {F32: 1}))

    def run(autocast: Autocast) -> Any:
        return on_fake_device(find("mm"), case, autocast, device)

    check(run, "here", no_values, torchs=torchs_autocast)
    with pytest.raises(AssertionError, match=r"(?s)here:.*torch:.*reference:"):
        check(run, "here", no_values, torchs=torchs_autocast, ours=wrong(device, "mm", Policy.FP32))


def test_a_wrong_gradient_alone_is_noticed() -> None:
    op = find("nn_functional_linear")
    case = next(cases(op, {F32: 1}))

    def twice(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs) + 0.3 * op(*args, **kwargs)

    def uncached(device: str, dtype: torch.dtype) -> reference.autocast:
        return reference.autocast(device, dtype, cache_enabled=False)

    torchs = forward_and_gradients(twice, case, torch.autocast)
    ours = forward_and_gradients(twice, case, uncached)
    assert not difference(torchs[0], ours[0], same_bits)
    assert difference(torchs, ours, same_bits)


@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64, C64, torch.float8_e5m2], ids=str)
def test_bits_tell_zeros_apart_and_nans_not(dtype: torch.dtype) -> None:
    def made(*values: float) -> torch.Tensor:
        return torch.tensor(values).to(dtype)

    assert same_bits(made(math.nan, 1), made(-math.nan, 1))
    assert not same_bits(made(0.0), made(-0.0))
    assert not same_bits(made(math.nan), made(0.0))
    assert same_bits(made(0.0, math.inf), made(0.0, math.inf))


def test_the_payload_of_a_nan_does_not_count() -> None:
    payloads = torch.tensor([0x7F800001, 0x7FC00000, -1], dtype=torch.int32).view(F32)
    assert same_bits(payloads, torch.full((3,), math.nan))


@pytest.mark.parametrize(
    ("torchs", "ours"),
    [
        (Raised(RuntimeError, ""), torch.ones(1)),
        (torch.ones(1), Raised(RuntimeError, "")),
        (Raised(RuntimeError, ""), Raised(TypeError, "")),
        (torch.ones(1), torch.ones(1, dtype=BF16)),
        (torch.ones(1), torch.ones(1, 1)),
        (torch.ones(2, 2), torch.ones(2, 2).t().contiguous().t()),
        (torch.ones(1), (torch.ones(1),)),
        (torch.ones(1), None),
        (1, 1.0),
        (1.0, -1.0),
        (torch.eye(2).to_sparse(), torch.eye(2)),
        (torch.eye(2).to_sparse(), -torch.eye(2).to_sparse()),
    ],
)
def test_whatever_differs_is_a_difference(torchs: object, ours: object) -> None:
    assert difference(torchs, ours, same_bits) is not None
    assert difference(torchs, torchs, same_bits) is None
    assert difference(ours, ours, same_bits) is None


def test_the_text_of_an_exception_may_differ() -> None:
    assert difference(Raised(ValueError, "no"), Raised(ValueError, "never"), same_bits) is None


def test_where_torchs_promotion_raises_only_the_imitated_bug_is_an_excuse() -> None:
    def run(autocast: Autocast) -> Any:
        with autocast("cpu", BF16):
            return outcome(torch.stack, [torch.ones(2, dtype=F16)])

    check(run, "here", same_bits)
    with pytest.raises(AssertionError, match="prioritize"):
        check(run, "here", same_bits, ours=wrong("cpu", "stack", Policy.LOWER_PRECISION_FP))


@pytest.mark.parametrize("names", [EXCEPTIONS, NEVER_RUNS_ON_CPU], ids=["values", "runs"])
def test_every_exception_is_still_an_op_of_the_database(names: dict[str, str]) -> None:
    here = {op.formatted_name for op in op_db}
    if Version(torch.__version__) < Version("2.10"):
        here.add("torch__scaled_mm_v2")
    assert names.keys() <= here


def test_torchs_autocast_on_a_fake_device_leaves_no_trace() -> None:
    def state() -> tuple[object, ...]:
        maia = "maia" in FAKE_DEVICES
        key = maia and torch._C._dispatch_tls_is_dispatch_key_included("AutocastMAIA")
        return key, *(
            (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in FAKE_DEVICES
        )

    before = state()
    for device, dtype in itertools.product(FAKE_DEVICES, (BF16, F16)):
        with torchs_autocast(device, dtype):
            assert torch.is_autocast_enabled(device)
            assert torch.get_autocast_dtype(device) is dtype
        assert state() == before
