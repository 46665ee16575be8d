"""The policy tables against torch's own behaviour, and what the loader says of bad ones.

The policy of every op on every device is found out by calling it, not by reading torch's source.
Below the autocast keys the dispatcher has `Tracer`, which a thread can switch on: kernels put there
see what autocast hands on, before any real kernel looks at it. So arguments need not make sense,
only fit the schema, and no device is needed: fake tensors carry its dispatch keys.
"""

import itertools
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_fuzz import reference
from amp_fuzz.policies.tables import (
    DEVICES,
    Does,
    Policy,
    PolicyTableError,
    Rule,
    all_overloads,
    load_table,
    load_table_file,
    tabled_devices,
)
from tests.helpers import brief


@pytest.fixture(autouse=True)
def stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the custom ops of other tests of this process."""
    monkeypatch.setattr("amp_fuzz.policies.tables._declared", {})


TORCH = Version(torch.__version__).release[:2]
TABLED = tabled_devices()  # maia has its kernels since torch 2.8
EVERY_DTYPE = (
    None,
    *sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str),
)
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def find_op(overload: str) -> torch._ops.OpOverload:
    name, _, suffix = overload.partition(".")
    return getattr(getattr(torch.ops.aten, name), suffix or "default")


@contextmanager
def key_included(key: str) -> Iterator[None]:
    torch._C._dispatch_tls_set_dispatch_key_included(key, True)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(key, False)


@contextmanager
def autocast(device: str, dtype: torch.dtype = BF16) -> Iterator[None]:
    """Do what torch.autocast does, which refuses devices that this build of torch lacks.

    FakeTensorMode gives MAIA tensors no backend key and so no AutocastMAIA: it is switched on here.
    """
    before = torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    torch.autocast_increment_nesting()
    try:
        with key_included("AutocastMAIA") if device == "maia" else nullcontext():
            yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_dtype(device, before)
        torch.set_autocast_enabled(device, False)


def tensors_of(device: str) -> Any:
    return nullcontext() if device == "cpu" else FakeTensorMode()


class Handed(Exception):
    """What autocast handed on: to which overload, with which floating dtypes, and which dtype."""

    def __init__(self, overload: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        schema = find_op(overload)._schema.arguments
        named = {argument.name: value for argument, value in zip(schema, args, strict=False)}
        named |= kwargs
        self.overload = overload
        self.dtype = named.get("dtype")
        self.dtypes = {
            name: tuple(t.dtype for t in torch.utils._pytree.tree_leaves(value) if is_float(t))
            for name, value in named.items()
        }
        super().__init__(overload, self.dtypes, self.dtype)

    @property
    def seen(self) -> frozenset[torch.dtype]:
        return frozenset(itertools.chain.from_iterable(self.dtypes.values()))

    @property
    def tensors(self) -> int:
        return sum(map(len, self.dtypes.values()))


def is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


@pytest.fixture(scope="module", autouse=True)
def handing_on() -> Iterator[None]:
    """Put kernels on the Tracer key which raise `Handed`; nobody sees them but `handed`."""
    tables = [load_table(device) for device in TABLED]
    overloads = {rule.overload for table in tables for rule in table.rules.values()}
    overloads |= {rule.redispatch for table in tables for rule in table.rules.values()} - {None}
    overloads = {name for name in overloads if "::" not in name}  # custom ops of other tests

    def hand(overload: str) -> Callable[..., None]:
        def kernel(*args: Any, **kwargs: Any) -> None:
            raise Handed(overload, args, kwargs)

        return kernel

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Overriding a previously registered kernel"
        for overload in (*overloads, "maximum"):
            library.impl(overload, hand(overload), "Tracer")
    yield
    library._destroy()


def handed(
    device: str,
    overload: str,
    *dtypes: torch.dtype,
    autocast_dtype: torch.dtype = BF16,
    **kwargs: Any,
) -> Handed:
    """Call an op under autocast, its tensors of these dtypes in turn, the last one for the rest."""
    following = itertools.chain(dtypes, itertools.repeat(dtypes[-1]))

    def tensor() -> torch.Tensor:
        return torch.empty(2, 2, dtype=next(following), device=device)

    def value(kind: str) -> Any:
        match kind:
            case "Tensor" | "Optional[Tensor]":
                return tensor()
            case "List[Tensor]":
                return [tensor(), tensor()]
            case "List[Optional[Tensor]]":
                return [torch.empty(2, dtype=torch.int64, device=device)]
            case "int" | "number" | "float" | "bool" | "str":
                return {"float": 1.0, "bool": False, "str": "fro"}.get(kind, 1)
            case "List[int]" | "List[bool]" | "List[float]":
                return [value(kind[5:-1])] * 3
            case _ if kind.startswith("Optional["):
                return None
        raise AssertionError(f"{overload}: write what to pass for an argument of type {kind}")

    with tensors_of(device):
        for argument in find_op(overload)._schema.arguments:
            kind = str(argument.type)
            if "Tensor" in kind or not argument.has_default_value():
                kwargs.setdefault(argument.name, value(kind))
        try:
            with autocast(device, autocast_dtype), key_included("Tracer"):
                find_op(overload)(**kwargs)
        except Handed as answer:
            return answer
    raise AssertionError(f"{overload} on {device}: autocast called an overload nobody watches")


def behaviour(device: str, overload: str) -> Policy | None:
    """Name the policy that explains what is done with bfloat16, float32 and mixed arguments."""
    try:
        low = handed(device, overload, BF16)
        full = handed(device, overload, F32)
        mixed = handed(device, overload, F32, BF16)
    except RuntimeError as error:
        if "unsafe to autocast" in str(error):
            return Policy.BANNED
        raise
    one, other = frozenset({BF16}), frozenset({F32})
    match low.seen, full.seen, mixed.seen:
        case seen if seen == (one, one, one):
            return Policy.LOWER_PRECISION_FP
        case seen if seen == (other, other, other):
            return Policy.FP32
        case seen if seen[:2] == (one, other) and low.dtype is full.dtype is F32:
            return (
                Policy.FP32_SET_OPT_DTYPE if low.overload == overload else Policy.FP32_APPEND_DTYPE
            )
        case seen if seen == (one, other, other) and mixed.tensors > 1:
            return Policy.PROMOTE
        case seen if seen[:2] == (one, other):
            return None
    raise AssertionError(f"{overload} on {device}: no policy does {low}, {full}, {mixed}")


def rules_of(device: str) -> dict[str, Rule]:
    """Return the rules of this torch's table, without kernels of named dimensions (before 2.13).

    Their names are strings like any other in a schema, and no program reaches them.
    """
    rules = load_table(device).rules
    found = {o: rule for o, rule in rules.items() if not re.search("dimname|names", o, re.I)}
    assert TORCH < (2, 13) or found == rules
    return found


def with_policy(device: str, *policies: Policy) -> list[str]:
    return [o for o, rule in rules_of(device).items() if rule.policy in policies]


def all_but(*policies: Policy) -> set[Policy]:
    return set(Policy) - set(policies)


# --- the tables against the installed torch


@pytest.mark.skipif(TORCH != (2, 13), reason="the lists of other versions are not at hand")
@pytest.mark.parametrize("device", TABLED)
def test_a_table_names_the_ops_that_the_dispatcher_has_kernels_for(device):
    table = load_table(device)
    registered = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")  # tests before this one may have ops of their own
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, table.dispatch_key)
    }
    if device == "cuda":  # a torch with cuDNN has one more, which fake CUDA leaves out
        registered.discard("_cudnn_rnn")
    missing, extra = registered - table.rules.keys(), table.rules.keys() - registered
    assert (missing, extra) == (set(), set())


@pytest.mark.parametrize("device", brief(TABLED, "cpu", "cuda"))
def test_every_op_behaves_as_its_policy_says(device):
    rules = rules_of(device)
    assert {op: behaviour(device, op) for op in rules} == {
        op: rule.policy for op, rule in rules.items()
    }


def test_the_probe_of_behaviour_sees_that_an_op_without_a_rule_is_left_alone():
    assert [behaviour(device, "maximum") for device in TABLED] == [None] * len(TABLED)
    assert behaviour("cpu", "exp") is None
    assert behaviour("cuda", "cat") is None


@pytest.mark.parametrize("device", TABLED)
def test_ops_with_an_appended_dtype_are_handed_to_the_overload_of_the_table(device):
    appending = with_policy(device, Policy.FP32_APPEND_DTYPE)
    rules = load_table(device).rules
    assert {op: handed(device, op, BF16).overload for op in appending} == {
        op: rules[op].redispatch for op in appending
    }


@pytest.mark.parametrize("device", TABLED)
def test_float64_is_never_cast_and_sets_no_dtype(device):
    for op in with_policy(device, *all_but(Policy.BANNED)):
        answer = handed(device, op, F64)
        appends = load_table(device).rules[op].policy is Policy.FP32_APPEND_DTYPE
        assert answer.seen == {F64}, op
        assert answer.dtype is (F64 if appends else None), op


@pytest.mark.parametrize("device", TABLED)
def test_a_dtype_that_the_caller_gives_is_respected(device):
    for op in with_policy(device, Policy.FP32_SET_OPT_DTYPE):
        assert handed(device, op, F32, dtype=F16).dtype is F16, op


@pytest.mark.parametrize("device", TABLED)
def test_float16_under_a_bfloat16_context_is_cast_by_all_but_promote(device):
    for op in with_policy(device, Policy.LOWER_PRECISION_FP):
        assert handed(device, op, F16).seen == {BF16}, op
    for op in with_policy(device, Policy.FP32):
        assert handed(device, op, F16).seen == {F32}, op
    for op in with_policy(device, Policy.PROMOTE):
        assert handed(device, op, F32, F16).seen == {F32}, op  # after a float32 it is not looked at
        with pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
            handed(device, op, F16, F32)


@pytest.mark.parametrize("device", [d for d in TABLED if d != "cpu"])
def test_promote_casts_an_optional_tensor_but_does_not_ask_it(device):
    answer = handed(device, "bilinear", BF16, BF16, BF16, F32)
    assert answer.dtypes["bias"] == (BF16,)


@pytest.mark.thorough
def test_the_default_dtypes_are_torchs():
    program = f"import torch; print([torch.get_autocast_dtype(d) for d in {TABLED}])"
    answer = subprocess.run(  # a fresh process: the dtype is thread state that a test can leave
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    promised = [f"torch.{load_table(device).default_dtype}" for device in TABLED]
    assert answer.stdout.strip() == str(promised).replace("'", "")


def done(context: Callable[..., Any], device: str, **more: Any) -> dict[torch.dtype | None, str]:
    """Return what contexts of every dtype do: ``on``, ``off`` without a word, or else in words."""
    found = {}
    for dtype in EVERY_DTYPE:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                made = context(device, dtype=dtype, **more)
            except Exception as error:
                found[dtype] = f"raises {type(error).__name__}"
                continue
        on = made._enabled if isinstance(made, torch.autocast) else made.enabled
        found[dtype] = "on" if on else "warns, off" if said else "off"
    return found


IN_WORDS = {Does.ON: "on", Does.OFF: "warns, off", Does.RAISES: "raises RuntimeError"}
ASKED = {  # by torch, for bfloat16
    "cuda": ("torch.cuda.is_available", "torch.cuda.is_bf16_supported"),
    "mps": ("torch.backends.mps.is_available", "torch.backends.mps.is_macos_or_newer"),
}


@pytest.mark.parametrize("has", [True, False], ids=["with bfloat16", "without bfloat16"])
@pytest.mark.parametrize("device", TABLED)
def test_a_context_does_with_each_dtype_what_the_table_and_the_reference_say(
    device: str, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that has the device."""
    for name, answer in zip(ASKED.get(device, ()), (True, has), strict=False):
        monkeypatch.setattr(name, lambda *args, _answer=answer: _answer)
    theirs = done(torch.autocast, device)
    assert done(reference.autocast, device) == theirs
    table = load_table(device)
    for dtype, words in theirs.items():
        rule = table.context(str(dtype).removeprefix("torch.") if dtype else table.default_dtype)
        lacking = rule.lacking if not has else None
        assert words == IN_WORDS[lacking or rule.does], dtype


@pytest.mark.parametrize("device", TABLED)
def test_a_context_that_is_not_enabled_takes_every_dtype(device: str) -> None:
    if TORCH < (2, 10) and device == "mps":
        pytest.skip("torch 2.7 to 2.9 ask for the macOS, also where there is no mps")
    theirs = done(torch.autocast, device, enabled=False)
    assert {words.removeprefix("warns, ") for words in theirs.values()} == {
        "off"
    }  # older ones warn
    assert set(done(reference.autocast, device, enabled=False).values()) == {"off"}


def test_float64_as_the_dtype_of_cuda_autocast_makes_every_promote_op_raise():
    for op in with_policy("cuda", Policy.PROMOTE):
        with pytest.raises(RuntimeError, match="promote type is double"):
            handed("cuda", op, F32, autocast_dtype=F64)


# --- the same from outside, by calls that make sense

PLAIN_CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mm": torch.mm,
    "matmul": torch.matmul,
    "linear": torch.nn.functional.linear,
    "addmm": lambda x, y: torch.addmm(x, x, y),
    "bmm": lambda x, y: torch.bmm(x.unsqueeze(0), y.unsqueeze(0)),
    "conv1d": lambda x, y: torch.conv1d(x.unsqueeze(0), y.unsqueeze(2)),
    "prelu": lambda x, y: torch.prelu(x, y.select(0, 0)),
    "mv": lambda x, y: torch.mv(x, y.select(0, 0)),
    "einsum": lambda x, y: torch.einsum("ij,jk->ik", x, y),
    "linalg_vecdot": torch.linalg.vecdot,
    "exp": lambda x, y: torch.exp(x),
    "log1p": lambda x, y: torch.log1p(x),
    "pow.Tensor_Scalar": lambda x, y: torch.pow(x, 3),
    "pow.Tensor_Tensor": torch.pow,
    "layer_norm": lambda x, y: torch.layer_norm(x, (4,), y.select(0, 0)),
    "rms_norm": lambda x, y: torch.rms_norm(x, (4,), y.select(0, 0)),
    "group_norm": lambda x, y: torch.group_norm(x, 2, y.select(0, 0)),
    "mse_loss": torch.nn.functional.mse_loss,
    "kl_div": torch.kl_div,
    "cdist": torch.cdist,
    "logsumexp": lambda x, y: torch.logsumexp(x, 0),
    "trace": lambda x, y: torch.trace(x),
    "linalg_qr": lambda x, y: torch.linalg.qr(x).R,
    "linalg_solve": torch.linalg.solve,
    "quantile.scalar": lambda x, y: torch.quantile(x, 0.5),
    "prod": lambda x, y: torch.prod(x),
    "sum": lambda x, y: torch.sum(x),
    "sum.dim_IntList": lambda x, y: torch.sum(x, (0,)),
    "softmax.int": lambda x, y: torch.softmax(x, 0),
    "cumsum": lambda x, y: torch.cumsum(x, 0),
    "norm.Scalar": lambda x, y: torch.ops.aten.norm.Scalar(x, 2),
    "norm.ScalarOpt_dim": lambda x, y: torch.ops.aten.norm.ScalarOpt_dim(x, 2, [0]),
    "atan2": torch.atan2,
    "addcmul": lambda x, y: torch.addcmul(x, y, y),
    "dot": lambda x, y: torch.dot(x.select(0, 0), y.select(0, 0)),
    "cross": lambda x, y: torch.cross(x.narrow(1, 0, 3), y.narrow(1, 0, 3), 1),
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([x, y]),
}
NOT_WITHOUT_THE_DEVICE = {  # kernels that ask which device is current
    ("maia", "softmax.int"),
    ("maia", "rms_norm"),
}
RESULT: dict[Policy, Callable[[torch.dtype, torch.dtype], torch.dtype]] = {
    Policy.LOWER_PRECISION_FP: lambda x, y: BF16,
    Policy.FP32: lambda x, y: F32,
    Policy.FP32_SET_OPT_DTYPE: lambda x, y: F32,
    Policy.FP32_APPEND_DTYPE: lambda x, y: F32,
    Policy.PROMOTE: lambda x, y: F32 if F32 in (x, y) else BF16,
}


@pytest.mark.parametrize("device", TABLED)
@pytest.mark.parametrize("dtypes", list(itertools.product((BF16, F32), repeat=2)), ids=str)
def test_plain_calls_give_the_dtype_of_the_policy(device, dtypes):
    rules = load_table(device).rules
    found, promised = {}, {}
    with tensors_of(device):
        x, y = (torch.full((4, 4), 0.5, device=device) + torch.eye(4, device=device) for _ in "xy")
        x, y = x.to(dtypes[0]), y.to(dtypes[1])
        for op in PLAIN_CALLS.keys() & rules.keys():
            if (device, op) in NOT_WITHOUT_THE_DEVICE:
                continue
            try:
                with autocast(device):
                    found[op] = PLAIN_CALLS[op](x, y).dtype
            except RuntimeError as error:
                # Before torch 2.13, kernels of mtia ask for the device.
                lacks = TORCH < (2, 13) and device == "mtia"
                if not lacks or "not linked with support for mtia devices" not in str(error):
                    raise
                continue
            promised[op] = RESULT[rules[op].policy](*dtypes)
    assert found == promised
    assert len(found) > 15


@pytest.mark.parametrize("device", [d for d in TABLED if with_policy(d, Policy.BANNED)])
def test_a_banned_op_raises_and_says_what_to_use_instead(device):
    with tensors_of(device):
        x = torch.full((4, 4), 0.5, device=device)
        with (
            autocast(device),
            pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"),
        ):
            torch.nn.functional.binary_cross_entropy(x, x)


# --- versions


@pytest.mark.parametrize(
    ("version", "counts"),
    [  # counted in the wheels
        ("2.7.1", {"cpu": 129, "cuda": 125, "mps": 99, "mtia": 123, "xpu": 123}),
        ("2.8.0", {"cpu": 129, "cuda": 125, "maia": 123, "mps": 99, "mtia": 123, "xpu": 123}),
        ("2.9.0", {"cpu": 129, "cuda": 125, "maia": 123, "mps": 101, "mtia": 123, "xpu": 123}),
        ("2.12.1", {"cpu": 129, "cuda": 126, "maia": 124, "mps": 101, "mtia": 124, "xpu": 124}),
        ("2.13.0", {"cpu": 127, "cuda": 119, "maia": 117, "mps": 95, "mtia": 117, "xpu": 117}),
        ("2.15.0", {"cpu": 126, "cuda": 120, "maia": 117, "mps": 95, "mtia": 117, "xpu": 117}),
    ],
)
def test_a_table_holds_as_many_rules_as_that_torch_has_kernels(version, counts):
    assert {d: len(load_table(d, torch_version=version).rules) for d in counts} == counts


def test_local_and_development_parts_of_a_version_do_not_count():
    nightly = load_table("cuda", torch_version="2.14.0.dev20260501+cu130")
    assert nightly == load_table("cuda", torch_version="2.14.0")
    assert nightly.torch_version == "2.14.0"


def test_the_installed_torch_is_the_default():
    assert load_table("cpu") == load_table("cpu", torch_version=torch.__version__)


def test_all_overloads_is_the_union_of_the_tables():
    union = set().union(*(load_table(device, torch_version="2.13.0").rules for device in DEVICES))
    assert all_overloads(torch_version="2.13.0") == union
    assert len(union) == 209
    assert "rms_norm" not in all_overloads(
        torch_version="2.7"
    )  # and maia, with no rule, is no error


def test_a_device_without_a_rule_for_this_torch_is_not_tabled():
    assert tabled_devices(torch_version="2.13.0") == DEVICES
    assert set(DEVICES) - set(tabled_devices(torch_version="2.7.1")) == {"maia"}


# --- a table that is not well formed

GOOD = """
device = "npu"
dispatch_key = "AutocastPrivateUse1"
default_dtype = "bfloat16"
source = "vendor handbook, chapter 3"

[[context]]
dtypes = ["bfloat16"]
does = "on"
versions = ">=2.6"
source = "chapter 2"

[[context]]
dtypes = ["*"]
does = "off"
versions = ">=2.6"
source = "chapter 2"

[[group]]
policy = "fp32"
versions = ">=2.7"
source = "chapter 3.1"
ops = ["exp", "torchvision::roi_align"]

[[group]]
policy = "fp32_append_dtype"
versions = ">=2.7"
source = "chapter 3.2"
ops = ["norm.Scalar"]
redispatch = { "norm.Scalar" = "norm.ScalarOpt_dtype" }
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "npu.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_table_of_ones_own_is_read_from_a_file(tmp_path):
    table = load_table_file(write(tmp_path, GOOD))
    assert (table.device, table.supported_dtypes) == ("npu", ("bfloat16",))
    assert table.rules["exp"].policy is Policy.FP32
    assert table.rules["norm.Scalar"].redispatch == "norm.ScalarOpt_dtype"


def test_a_table_cannot_be_changed(tmp_path):
    table = load_table_file(write(tmp_path, GOOD))
    with pytest.raises(TypeError):
        table.rules["exp"] = table.rules["norm.Scalar"]
    with pytest.raises(AttributeError):
        table.device = "cuda"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"fp32"', '"fp23"', "group 1: unknown policy 'fp23'; did you mean 'fp32'?"),
        ('"fp32"', '"zzz"', "group 1: unknown policy 'zzz'; known: lower_precision_fp, fp32,"),
        ('"fp32"', '"cast_inputs"', "group 1: unknown policy 'cast_inputs'; known: lower_prec"),
        ('"exp"', '"exp", "exp"', "group 1 (fp32, >=2.7): op 'exp' is named twice; delete one"),
        (
            '"exp"',
            '"norm.Scalar"',
            "group 2 (fp32_append_dtype, >=2.7): op 'norm.Scalar' has a rule for torch 2.13.0 alr",
        ),
        (
            '">=2.7"\nsource = "chapter 3.1"',
            '"2.7+"\nsource = "chapter 3.1"',
            "group 1 (fp32, 2.7+): versions '2.7+' is no PEP 440 range; write '>=2.7,<2.13'",
        ),
        ("redispatch", "redispach", "group 2: unknown key 'redispach'; did you mean 'redispatch'?"),
        ("device", "devise", "top level: unknown key 'devise'; did you mean 'device'?"),
        ('source = "chapter 3.1"\n', "", "group 1: Object missing required field `source`"),
        ('["exp", "torchvision::roi_align"]', '"exp"', "group 1: Expected `array`, got `str`"),
        ('["exp", "torchvision::roi_align"]', "[]", "group 1 (fp32, >=2.7): ops is empty: name"),
        ('"exp"', '"aten::exp"', "op 'aten::exp' is not written as an overload name; write 'exp'"),
        ('"exp"', '"sum.default"', "'sum.default' is not written as an overload name; write 'sum'"),
        ('"exp"', '"exp("', "op 'exp(' is not an overload name, such as 'sum' or"),
        ('{ "norm.Scalar"', '{ "norm"', "redispatch names 'norm', which is no op of the group"),
        (
            'redispatch = { "norm.Scalar" = "norm.ScalarOpt_dtype" }',
            "",
            "redispatch does not say which overload takes the dtype for 'norm.Scalar'",
        ),
        ('= "bfloat16"', '= "bfloat61"', "top level: unknown dtype 'bfloat61'; did you mean"),
        ('["bfloat16"]', '["bfloat61"]', "context 1: unknown dtype 'bfloat61'; did you mean"),
        ('["bfloat16"]', '["float16"]', "default_dtype 'bfloat16' is not taken: its context is no"),
        ('"on"', '"in"', "context 1: unknown word 'in'; known: on, off, raises"),
        ('"on"', '"on"\nlacking = "rises"', "unknown word 'rises'; did you mean 'raises'?"),
        ('">=2.6"', '"2.6+"', "context 1: versions '2.6+' is no PEP 440 range; write"),
        ('["*"]', '["float16"]', "context: dtype '*' has 0 contexts for torch 2.13.0; give each"),
        ('["*"]', '["*", "bfloat16"]', "dtype 'bfloat16' has 2 contexts for torch 2.13.0"),
        ("[[group]]", "[[group]", "not TOML: "),
        ('">=2.7"', '">=3"', "no rule holds for torch 2.13.0; its ranges are >=3"),
    ],
)
def test_a_bad_table_is_refused_with_the_file_the_place_and_the_way_out(
    tmp_path, old, new, problem
):
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new))
    with pytest.raises(PolicyTableError) as caught:
        load_table_file(path, torch_version="2.13.0")
    assert problem in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_policy_may_change_from_one_version_to_the_next(tmp_path):
    text = GOOD.replace('">=2.7"\nsource = "chapter 3.1"', '"<2.13"\nsource = "chapter 3.1"')
    text = text.replace("fp32_append_dtype", "promote").replace('"norm.Scalar"]', '"exp"]')
    path = write(tmp_path, text.replace("redispatch =", "# redispatch ="))
    policies = [
        load_table_file(path, torch_version=v).rules["exp"].policy for v in ("2.6", "2.13.0")
    ]
    assert policies == [Policy.FP32, Policy.PROMOTE]


def test_an_unknown_device_is_refused_with_the_nearest_name():
    with pytest.raises(PolicyTableError, match="device='mtai': no policy table; did you mean 'mt"):
        load_table("mtai")
    with pytest.raises(PolicyTableError, match=r"known: cpu, cuda, .*load_table_file"):
        load_table("toaster")


def test_a_version_that_is_none_or_too_old_is_refused():
    with pytest.raises(PolicyTableError, match="torch_version='latest': not a version; write it"):
        load_table("cpu", torch_version="latest")
    with pytest.raises(PolicyTableError, match=r"no rule holds for torch 2\.7\.0; its ranges are"):
        load_table("maia", torch_version="2.7.0")


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(PolicyTableError, match=r"gone\.toml: cannot be read \(No such file"):
        load_table_file(tmp_path / "gone.toml")
