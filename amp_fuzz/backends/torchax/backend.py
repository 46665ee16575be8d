"""torchax: PyTorch's ops on JAX, compiled by XLA, with its own autocast.

The plan runs in torch on CPU tensors. The program runs on JAX, and its backward pass is that of
`jax.vjp` (`amp_fuzz.backends.torchax.bridge`). torchax renames PrivateUse1 permanently, so it runs
in a separate process, on whatever platform JAX finds there.

The reference follows torchax's list of policies with the CPU's kernels, without a weight cache,
which torchax does not have. XLA's kernels round differently, so shadow arithmetic judges values.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any, get_args

import msgspec
import torch
import torch.utils.checkpoint

from amp_fuzz import reference
from amp_fuzz.backends import harness
from amp_fuzz.backends.base import Availability, Backend, Facts
from amp_fuzz.backends.harness import Observation
from amp_fuzz.backends.imitated import active_quirks
from amp_fuzz.backends.imitations.functions import handed_on
from amp_fuzz.backends.imitations.torchax import Cutting, Unlisted, inside, torchs_derivatives
from amp_fuzz.backends.process import REFUSES, Apart
from amp_fuzz.backends.reference import Numerics, ReferenceRuntime, reference_runtime
from amp_fuzz.backends.reproducing import TorchRepros
from amp_fuzz.backends.source import program_source
from amp_fuzz.backends.torch_base import TorchBackend
from amp_fuzz.backends.torch_state import reset_state, torch_state
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import (
    Autocast,
    Checkpoint,
    Context,
    Node,
    NoGrad,
    Program,
    Ref,
    Region,
    Statement,
    refs,
    returning_all,
    statements,
    substituted,
    transform,
    unwrapped,
    uses,
)
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.patching import patched
from amp_fuzz.reference.autocast import Snapshot, snapshot
from amp_fuzz.reference.tables import Policy, PolicyTable, load_table

__all__ = ["Mode", "Torchax", "TorchaxBackend", "backends", "lacking"]

INSTALL = "pip install 'amp-fuzz[jax]'"


def installed() -> bool:
    """Return whether JAX and torchax are installed, without importing them."""
    return all(importlib.util.find_spec(name) is not None for name in ("jax", "torchax"))


@cache
def lacking(*, backward: bool = False) -> Mapping[str, str]:
    """Return what torchax lacks, ``op`` or ``op:form``, with the reason.

    backward: including what torch's own autograd cannot differentiate there.
    """
    text = (resources.files("amp_fuzz.backends.torchax") / "lacks.toml").read_text("utf-8")
    tables = tomllib.loads(text)
    groups = [*tables["lacks"], *(tables["lacks_backward"] if backward else ())]
    return {name: group["why"] for group in groups for name in group["ops"]}


@dataclass(frozen=True, slots=True)
class Mode:
    """How programs run on torchax.

    jitted: by `jax.jit`, not op by op. excess: whether XLA may keep more precision than a dtype has
    (its default). torch_autocast: whether contexts are ``torch.autocast("jax")``. autograd: whether
    gradients come from torch's own autograd, not from `jax.vjp`.
    """

    jitted: bool = False
    excess: bool = False
    torch_autocast: bool = False
    autograd: bool = False

    @property
    def name(self) -> str:
        """``torchax``, with any settings: ``torchax[jit+excess]``, ``torchax[autograd]``."""
        words = ["jit"] * self.jitted + ["excess"] * self.excess
        words += ["torch.autocast"] * self.torch_autocast + ["autograd"] * self.autograd
        return f"torchax[{'+'.join(words)}]" if words else "torchax"

    @property
    def flags(self) -> str:
        """XLA's, as in ``XLA_FLAGS``."""
        return f"--xla_allow_excess_precision={str(self.excess).lower()}"


@dataclass(frozen=True, slots=True)
class TorchaxBackend(TorchRepros, TorchBackend):
    """``torchax.amp.autocast`` on JAX's platform. process: the process with torchax."""

    mode: Mode
    process: Apart = field(compare=False)
    exact: bool = field(default=False, kw_only=True)

    @property
    def name(self) -> str:
        """That of the mode."""
        return self.mode.name

    def availability(self) -> Availability:
        """Return whether JAX and torchax are installed, and how much of the catalogue they lack."""
        if not installed():
            return Availability("missing", INSTALL)
        versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "torchax")]
        whole = [op for op in CATALOGUE if op in self._lacks()]
        forms = len(self._lacks()) - len(whole)
        left = f"without {len(whole)} of {len(CATALOGUE)} ops and {forms} forms, which it lacks"
        return Availability("ready", ", ".join([*versions, left]))

    def supports(self, op: str, form: str) -> bool:
        """Return whether torchax has a lowering for that form of an op, and its gradient."""
        lacks = self._lacks()
        return op not in lacks and f"{op}:{form}" not in lacks

    def _lacks(self) -> Mapping[str, str]:
        return lacking(backward=self.mode.autograd)

    def fit(self, case: Case) -> Case:
        """Return the case without what `jax.vjp` does not support.

        These are torch's grad modes inside the program, autocast around a backward pass, double
        backward passes, and entries other than a plain call. torch's own autograd supports the
        first two, except `inference_mode`. Op by op, where nothing is fused, every value is
        returned, so a divergence shows where it begins.
        """
        plan = case.plan
        plan = msgspec.structs.replace(
            plan,
            entry=plan.entry if plan.entry == "decorator" else "context",
            second="retain" if plan.second == "double" else plan.second,
            transform="none",
        )
        kept: tuple[type, ...] = (Autocast, Checkpoint, NoGrad)
        if not self.mode.autograd:
            kept = (Autocast, Checkpoint)
            plan = msgspec.structs.replace(
                plan,
                backward="outside" if plan.backward != "none" else "none",
                backward_context=None,
                loop="outside",
                checkpoint="none",
            )
        left_out = tuple(kind for kind in get_args(Context) if kind not in kept)
        body = unwrapped(case.program.body, left_out)
        program = msgspec.structs.replace(case.program, body=body)
        program = program if self.mode.jitted else returning_all(program)
        return msgspec.structs.replace(case, plan=plan, program=program)

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Run cases in the torchax process."""
        found = [self.process.run(case) for case in cases]
        for seen in found if self.mode.autograd else ():
            seen.elided = tuple(label for label in seen.values if label.endswith(".grad"))
        return found

    def facts(self) -> Facts:
        """Return the promise that torchax must keep."""
        return Facts(
            promise=(
                "[torchax](https://google.github.io/torchax/): a program on JAX computes what "
                "eager computes."
            )
        )

    def refuses(self, modules: Mapping[str, torch.nn.Module]) -> str:
        """Return the reason: callables stay in their process."""
        return REFUSES

    def source(self, case: Case) -> str:
        """Return the source of the program and of how it runs on JAX, for a repro."""
        run = f"on_jax(program{', jitted=True' if self.mode.jitted else ''})"
        run = "on_torchax(program)" if self.mode.autograd else run
        return f"{program_source(case.program).rstrip()}\n\n\nprogram = {run}\n"

    def setup(self, names: Set[str]) -> list[str]:
        """Return the source that sets torchax up, and of what a program uses of it, for a repro."""
        device = TorchRepros.setup(self, names)
        return [*device, _SETUP.format(flags=self.mode.flags), *self.helpers(names)]

    def helpers(self, names: Set[str]) -> list[str]:
        """Return the source of what a program under these names uses, for a repro."""
        renamed = {} if self.mode.autograd else {"recomputed": "checkpoint"}
        renamed["TorchAutocast" if self.mode.torch_autocast else "Autocast"] = "autocast"
        text = (resources.files("amp_fuzz.backends.torchax") / "bridge.py").read_text("utf-8")
        text = re.sub(r"  # type: ignore\[[^]]*\]", "", text)
        nodes = [n for n in ast.parse(text).body if isinstance(n, ast.ClassDef | ast.FunctionDef)]
        found = []
        for node in reversed(nodes):  # each uses what stands before it
            name = renamed.get(node.name, node.name)
            if name in names:
                names = names | {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                source = ast.get_source_segment(text, node) or ""
                found.append(source.replace(node.name, name, 1))
        return found[::-1]

    def reference(self) -> ReferenceRuntime:
        """Return the reference with torchax's policies on CPU tensors."""
        runtime = reference_runtime(self.device).runtime
        runtime = replace(runtime, autocast=_documented)
        if self.mode.autograd:
            runtime = replace(
                runtime,
                driver=_imitating_autograd,
                checkpoint=_checkpointed,
            )
            wider = ("torchax-backward-dtypes", "torchax-checkpoint")
            return _Reference(runtime, numerics=_NUMERICS, wider=wider)
        runtime = replace(runtime, checkpoint=_recomputed, driver=_imitating)
        return _Reference(runtime, numerics=_NUMERICS)


# XLA's kernels for the CPU run with flush-to-zero and denormals-are-zero on.
_NUMERICS = Numerics(reorders=True, flushes=True)

_SETUP = """\
warnings.filterwarnings("ignore", message=".*not writable")
os.environ["XLA_FLAGS"] = "{flags}"
plain = torch._ops.OpOverloadPacket.__getattr__


def get(packet, name):
    try:
        return plain(packet, name)
    except AttributeError:
        if "imname" in name or "names" in name:
            return object()  # torch 2.13 has no named tensors any more (google/torchax#101)
        raise


torch._ops.OpOverloadPacket.__getattr__ = get
import jax
import numpy
import torchax
import torchax.interop

torchax.default_env()
torch._ops.OpOverloadPacket.__getattr__ = plain
torchax.enable_accuracy_mode()
"""


@cache
def _table() -> PolicyTable:
    return load_table("torchax")


def _documented(
    device: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> reference.autocast:
    """Return what `torchax.amp.autocast` promises: bfloat16 by default, and no weight cache."""
    return reference.autocast(
        device, dtype or torch.bfloat16, enabled, cache_enabled=False, table=_table()
    )


def _recomputed(function: Callable[..., Any], *args: Any, use_reentrant: bool | None = None) -> Any:
    """Call a function as a checkpoint that is not reentrant: `jax.checkpoint` knows no other.

    A reentrant one starts backward passes of its own from zeros, which make NaN of an infinity.
    """
    return reference.checkpoint("cpu")(function, *args, use_reentrant=False)


class _Reference(ReferenceRuntime):
    """The reference, which takes writes for what torchax makes of them, if that is asked for."""

    __slots__ = ()

    def meant(self, case: Case) -> Case:
        """Return the case as torchax has it, where that is another program."""
        program = case.program
        if "torchax-type-as" in active_quirks():
            program = msgspec.structs.replace(program, body=_typed_in_place(program))
        if "torchax-out" in active_quirks():
            program = msgspec.structs.replace(program, body=_writing_out(program))
        # Later calls of a jitted program take the trace of the first, wherever they are.
        traced = case.plan.first_pass == "inference_mode"
        if traced and "torchax-softmax-dtype" in active_quirks():
            program = msgspec.structs.replace(program, body=_without_dtype(program))
        return msgspec.structs.replace(case, program=program)


def _typed_in_place(program: Program) -> tuple[Node, ...]:
    """Return a body in which ``y = x.type_as(z)`` leaves x another name of y.

    Until then x goes by another name; after it comes ``x = y.type_as(y)``, which is y itself. What
    a checkpoint changes that was given to it is changed in it alone.
    """
    given = {spec.name for spec in program.inputs}
    body = program.body
    free = 1 + max(int(name[1:]) for s in statements(body) for name in s.outputs if name != "_")
    calls = [s for s in statements(body) if s.op == "type_as" and s.form == "method"]
    for number, call in enumerate(calls):
        old, new = next(uses(call)), call.outputs[0]
        scopes = _checkpoints(body)
        if old in given or scopes[old] is not scopes[new]:
            body = _around(body, call, {}, {old: new}, until=scopes[new])
        else:
            again = Statement("type_as", "method", (Ref(new), Ref(new)), (), (old,))
            body = _around(body, call, {old: f"v{free + number}"}, {}, again)
    return body


def _checkpoints(body: tuple[Node, ...]) -> dict[str, Region | None]:
    """Return the innermost checkpoint in which each name is made."""
    found: dict[str, Region | None] = {}

    def walk(nodes: tuple[Node, ...], scope: Region | None) -> None:
        for node in nodes:
            if isinstance(node, Region):
                walk(node.body, node if isinstance(node.context, Checkpoint) else scope)
            else:
                found.update(dict.fromkeys(node.outputs, scope))

    walk(body, None)
    return found


def _without_dtype(program: Program) -> tuple[Node, ...]:
    """Return a body in which softmax knows no ``dtype=``."""
    body = program.body
    for call in statements(body):
        kwargs = tuple(item for item in call.kwargs if item[0] != "dtype")
        if call.op in ("softmax", "softmin") and kwargs != call.kwargs:
            plain = msgspec.structs.replace(call, kwargs=kwargs)
            body = _around(body, call, {}, {}, instead=plain)
    return body


# torchax/ops/jaten.py, _out_variant_to_functional.
_REPLACES_OUT = (
    *("add", "sub", "mul", "div", "relu", "sqrt", "clamp", "clamp_min", "sigmoid", "tanh", "ceil"),
    *("logical_not", "scatter_add", "bitwise_not", "floor_divide", "masked_scatter"),
)
# Made by torch's decompositions, which write to a copy.
_KEEPS_OUT = (
    *("copysign", "cumprod", "digamma", "kron", "lgamma", "linalg.matrix_rank", "linalg.qr"),
    *("polar", "qr", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d"),
    *("replication_pad1d", "replication_pad2d", "replication_pad3d"),
)


def _writing_out(program: Program) -> tuple[Node, ...]:
    """Return a body in which ``y = op(x, out=z)`` makes z another name of y, or y of z.

    The one where torchax takes the new array for z, the other where it leaves z as it is.
    """
    body = program.body
    for call in [s for s in statements(body) if s.form == "out"]:
        name, kwargs = _family(call.op), dict(call.kwargs)
        out = kwargs.pop("out", None)
        written = list(refs(out))
        if name in _REPLACES_OUT and len(written) == 1:
            plain = Statement(call.op, "function", call.args, tuple(kwargs.items()), call.outputs)
            until = _checkpoints(body)[call.outputs[0]]
            renamed = {written[0]: call.outputs[0]}
            body = _around(body, call, {}, renamed, instead=plain, until=until)
        elif name in _KEEPS_OUT and len(written) == len(call.outputs) in (1, 2):
            kept = [
                Statement("type_as", "method", (Ref(old), Ref(old)), (), (new,))
                for old, new in zip(written, call.outputs, strict=True)
            ]
            body = _around(body, call, {}, {}, *kept[1:], instead=kept[0])
    return body


def _family(op: str) -> str:
    """Return ``linalg.matrix_rank`` for ``linalg.matrix_rank.tol_tensor``."""
    kept = (name for name in _KEEPS_OUT if op == name or op.startswith(f"{name}."))
    return next(kept, op.partition(".")[0])


def _around(
    body: tuple[Node, ...],
    call: Statement,
    before: Mapping[str, str],
    after: Mapping[str, str],
    more: Statement | None = None,
    *,
    instead: Statement | None = None,
    until: Region | None = None,
) -> tuple[Node, ...]:
    """Return a body with other names before and after a call, and one more, or another, there.

    until: the region after which names are what they were.
    """
    names = before

    def region(node: Region, inner: tuple[Node, ...]) -> Iterator[Node]:
        nonlocal names
        yield Region(node.context, inner)
        names = {} if node is until else names

    def statement(node: Statement) -> Iterator[Node]:
        nonlocal names
        found = node.outputs == call.outputs
        node = instead if found and instead is not None else node
        outputs = tuple(names.get(n, n) if names is before else n for n in node.outputs)
        yield msgspec.structs.replace(substituted(node, names), outputs=outputs)
        if found and names is before:
            names = after
            if more is not None:
                yield more

    return transform(body, region=region, statement=statement)


@contextmanager
def _functions() -> Iterator[None]:
    """Call torch's Python functions again from what they hand on, if that is to be imitated."""
    if "compile-functions" not in active_quirks():
        yield
        return
    with handed_on():
        yield


@contextmanager
def _called_inside() -> Iterator[None]:
    """Let attention call what is no torch function to torchax, if that is to be imitated.

    Its mode hands `multi_head_attention_forward` back, and is off while that runs.
    """
    if "torchax-composites" not in active_quirks():
        yield
        return
    functional = torch.nn.functional
    plain = functional.multi_head_attention_forward

    @functools.wraps(plain)
    def called(*args: Any, **kwargs: Any) -> Any:
        with inside():
            return plain(*args, **kwargs)

    with patched(functional, "multi_head_attention_forward", called):
        yield


def _unlisted() -> AbstractContextManager[Any]:
    """Call ops that are named without an overload without a policy, if that is to be imitated."""
    if "torchax-composites" not in active_quirks():
        return nullcontext()
    return Unlisted(lambda: reference.autocast("cpu", enabled=False))


def _imitating(names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the program with what is wrong on torchax, if that is to be imitated.

    What is jitted once runs under the autocast of its first call.
    """
    program = names["program"]
    first: list[Snapshot] = []

    def imitating(*inputs: torch.Tensor) -> Any:
        with reference.intercepting(), _functions(), _called_inside(), _unlisted():
            if "torchax-stale-jit" not in active_quirks():
                return program(*inputs)
            first.append(snapshot("cpu"))
            with first[0].restored():
                return program(*inputs)

    return {"program": imitating if active_quirks() else program}


def _cast_to(overload: str) -> torch.dtype | None:
    """Return the dtype to which the autocast around a call casts the arguments of an overload."""
    ((_, low, enabled, _, table),) = snapshot("cpu").contexts
    rule = table.rules.get(overload) if enabled and table is not None else None
    if rule is None:
        return None
    return {Policy.LOWER_PRECISION_FP: low, Policy.FP32: torch.float32}.get(rule.policy)


@contextmanager
def _imitated() -> Iterator[None]:
    """Imitate for a block, with the derivatives of torch's own formulas, and cut graphs."""
    cutting = Cutting(_cast_to) if "torchax-cut-graph" in active_quirks() else nullcontext()
    with (
        torchs_derivatives(),
        cutting,
        reference.intercepting(),
        _functions(),
        _called_inside(),
        _unlisted(),
    ):
        yield


def _imitating_autograd(names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the program with what is wrong on torchax, where torch's own autograd follows it."""
    program = names["program"]

    def imitating(*inputs: Any) -> Any:
        with _imitated():
            return program(*inputs)

    return {"program": imitating if active_quirks() else program}


_unseen: ContextVar[bool] = ContextVar("unseen", default=False)


@contextmanager
def _functions_unseen() -> Iterator[None]:
    """Imitate for a block what torchax does where its mode for torch functions is off.

    It is in a backward pass, which is a torch function that torchax hands back. So nothing is
    computed above autograd, and nothing is cut.
    """
    token = _unseen.set(True)
    try:
        with torchs_derivatives(), inside(), reference.intercepting():
            yield
    finally:
        _unseen.reset(token)


def _checkpointed(function: Callable[..., Any], *args: Any, use_reentrant: bool) -> Any:
    """Call a function as a checkpoint that imitates when it is recomputed, too.

    A checkpoint in it is called again then, with no function seen from the start.
    """
    first = [True]

    def imitating(*inputs: Any) -> Any:
        unseen = not first or _unseen.get()
        first.clear()
        off = unseen and "torchax-checkpoint-functions" in active_quirks()
        with _functions_unseen() if off else _imitated():
            return function(*inputs)

    again = imitating if active_quirks() else function
    return reference.checkpoint("cpu")(again, *args, use_reentrant=use_reentrant)


class Torchax:
    """torchax in this process, set to a mode.

    XLA reads its flags once, when JAX first computes. The user's flags come after ours.
    """

    def __init__(self, mode: Mode) -> None:
        os.environ["XLA_FLAGS"] = f"{mode.flags} {os.environ.get('XLA_FLAGS', '')}".strip()
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # workers share a GPU
        from amp_fuzz.backends.torchax import compat

        self.torchax = compat.load()
        # JAX has no 64-bit dtypes otherwise, and on TPUs multiplies in less than float32.
        self.torchax.enable_accuracy_mode()
        import jax

        from amp_fuzz.backends.jax import compiling
        from amp_fuzz.backends.torchax import bridge

        compiling.frugal()
        self.platform: str = jax.default_backend()
        self._mode, self._bridge = mode, bridge
        self._runtime = TorchBackend().runtime(
            autocast=bridge.TorchAutocast if mode.torch_autocast else bridge.Autocast,
            checkpoint=torch.utils.checkpoint.checkpoint if mode.autograd else bridge.recomputed,
            driver=self._driver,
            state=self._state,
            reset=self._reset,
        )

    def observe(self, case: Case) -> Observation:
        """Run a case under torchax's autocast."""
        seen = harness.run(case, self._runtime)
        seen.platform = self.platform
        return seen

    def expect(self, case: Case) -> Observation:
        """Run a case under the reference."""
        return TorchaxBackend(self._mode, Apart("")).reference().run(case)

    def _driver(self, names: Mapping[str, Any]) -> dict[str, Any]:
        program = names["program"]
        if self._mode.autograd:
            return {"program": self._bridge.on_torchax(program)}
        return {"program": self._bridge.on_jax(program, self._mode.jitted)}

    def _state(self) -> dict[str, object]:
        env = self.torchax.default_env()
        return {"autocast of torchax": str(env.param.autocast_dtype), **torch_state("cpu")}

    def _reset(self) -> None:
        env = self.torchax.default_env()
        env.param.autocast_dtype = None
        reset_state("cpu")


# XLA's code for a case takes 6 MiB op by op, 40 without shared contexts, and JAX frees none of it:
# 1,265 MiB in the end (docs/speed.md).
_LIVES = 120

MODES = (
    Mode(),
    Mode(jitted=True),
    Mode(jitted=True, excess=True),
    Mode(torch_autocast=True),
    Mode(autograd=True),
)


def backends() -> list[Backend]:
    """Return a backend for each mode, each with a separate process."""
    entry = f"{__name__}:Torchax"
    return [TorchaxBackend(mode, Apart(entry, mode, lives=_LIVES)) for mode in MODES]
