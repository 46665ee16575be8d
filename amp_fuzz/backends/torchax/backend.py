"""torchax: PyTorch's ops on JAX, compiled by XLA, with its own autocast.

The plan runs in torch on CPU tensors. The program runs on JAX, and its backward pass is that of
`jax.vjp` (`amp_fuzz.backends.torchax.bridge`). torchax renames PrivateUse1 permanently, so it runs
in a separate process, on whatever platform JAX finds there.

The reference follows torchax's list of policies with the CPU's kernels, without a weight cache,
which torchax does not have. XLA's kernels round differently, so shadow arithmetic judges values.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import resources
from typing import Any, get_args

import msgspec
import torch
import torch.utils.checkpoint

from amp_fuzz import reference
from amp_fuzz.backends import harness, imitation
from amp_fuzz.backends.base import Availability, Backend, Facts
from amp_fuzz.backends.harness import Observation, Runtime
from amp_fuzz.backends.jax.numerics import DRAWN, numerics_of
from amp_fuzz.backends.jax.platforms import PlatformError, configure, found, here, multiplying
from amp_fuzz.backends.process import REFUSES, Apart
from amp_fuzz.backends.reference import ReferenceRuntime, reference_runtime
from amp_fuzz.backends.reproducing import TorchRepros
from amp_fuzz.backends.source import program_source
from amp_fuzz.backends.torch_base import TorchBackend
from amp_fuzz.backends.torch_state import reset_state, torch_state
from amp_fuzz.cases.case import Case, Precision, unselective
from amp_fuzz.cases.program import (
    Autocast,
    Checkpoint,
    Context,
    NoGrad,
    returning_all,
    unwrapped,
)
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.policies.tables import PolicyTable, load_table

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
        """Return whether JAX and torchax are installed, the platform, and which ops they lack."""
        if not installed():
            return Availability("missing", INSTALL)
        try:
            platform = found()
        except PlatformError as error:
            return Availability("broken", str(error))
        version = importlib.metadata.version("torchax")
        whole = [op for op in CATALOGUE if op in self._lacks()]
        forms = len(self._lacks()) - len(whole)
        left = f"without {len(whole)} of {len(CATALOGUE)} ops and {forms} forms, which it lacks"
        return Availability("ready", f"{platform}; torchax {version}, {left}")

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """The precisions of products, each as often as it is drawn."""
        return DRAWN

    @property
    def settings(self) -> tuple[str, ...]:
        """None: torch's settings are not JAX's."""
        return ()

    def alone(self) -> bool:
        """Return whether the platform takes only one process."""
        return found().exclusive

    def supports(self, op: str, form: str) -> bool:
        """Return whether torchax has a lowering for that form of an op, and its gradient.

        A custom function is Python. What draws random numbers has a generator of its own there.
        """
        if CATALOGUE[op].setup or CATALOGUE[op].random:
            return False
        lacks = self._lacks()
        return op not in lacks and f"{op}:{form}" not in lacks

    def _lacks(self) -> Mapping[str, str]:
        return lacking(backward=self.mode.autograd)

    def fit(self, case: Case) -> Case:
        """Return the case without what `jax.vjp` does not support.

        These are torch's grad modes inside the program, autocast around a backward pass, double
        backward passes, selective checkpoints, and entries other than a plain call. torch's own
        autograd supports the first two, except `inference_mode`. Op by op, where nothing is fused,
        every value is returned, so a divergence shows where it begins.
        """
        case = unselective(case)
        plan = case.plan
        plan = msgspec.structs.replace(
            plan,
            entry=plan.entry if plan.entry == "decorator" else "context",
            second="retain" if plan.second == "double" else plan.second,
            transform="none",
            later=(),
            reuse="calls",
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
        return [self.process.run(case) for case in cases]

    def facts(self) -> Facts:
        """Return the promise that torchax must keep."""
        return Facts(
            promise=(
                "[torchax](https://google.github.io/torchax/): a program on JAX computes what "
                "eager computes."
            ),
            library="torchax",
            implements=(),
        )

    def refuses(self, modules: Mapping[str, torch.nn.Module]) -> str:
        """Return the reason: callables stay in their process."""
        return REFUSES

    def source(self, case: Case) -> str:
        """Return the source of the program and of how it runs on JAX, for a repro."""
        run = f"on_jax(program{', jitted=True' if self.mode.jitted else ''})"
        run = "on_torchax(program)" if self.mode.autograd else run
        chosen = case.plan.precision
        precise = f'jax.config.update("jax_default_matmul_precision", "{chosen}")\n'
        precise = "" if chosen == "default" else precise
        return f"{program_source(case.program).rstrip()}\n\n\n{precise}program = {run}\n"

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

    def short(self, code: str) -> str:
        """Return a script on tensors of torchax, if no gradient is asked for; see `Shortens`."""
        if "on_jax(program)" not in code or ".backward(" in code:
            return code
        return _on_tensors(code)

    def reference(self) -> ReferenceRuntime:
        """Return the reference with torchax's policies on CPU tensors."""
        runtime = reference_runtime(self.device).runtime
        runtime = replace(runtime, autocast=_documented)
        if self.mode.autograd:
            return _Differentiating(runtime, found=partial(numerics_of, self.process))
        runtime = replace(runtime, checkpoint=_recomputed)
        return ReferenceRuntime(runtime, found=partial(numerics_of, self.process))


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
jax.config.update("jax_default_matmul_precision", None)  # which that mode sets to "highest"
"""


_PACKET = """\
plain = torch._ops.OpOverloadPacket.__getattr__
# torch 2.13 has no named tensors any more (google/torchax#101).
torch._ops.OpOverloadPacket.__getattr__ = lambda packet, name: (
    object() if "imname" in name or "names" in name else plain(packet, name))
import torchax
torchax.enable_globally()
"""
_NUMERIC = "torchax.enable_accuracy_mode()\n"


def _on_tensors(code: str) -> str:
    """Return a script whose program runs on torchax's own tensors, under its own autocast."""
    start, end = code.index('warnings.filterwarnings("ignore"'), code.index("def program(")
    inputs = code[code.index("\n\n\n", code.index("return OnJax.apply")) : end]
    inputs = re.sub(r"^(x\d+|w\d+|b\d+) = ((?:.*\n)(?:    .*\n)*)", _moved, inputs, flags=re.M)
    rest = code[end:].replace("program = on_jax(program)\n", "")
    rest = re.sub(r"autocast\((?:device|\"\w+\")(, )?", r'torchax.amp.autocast("jax"\1', rest)
    rest = re.sub(r"(dtype=[\w.]+, )?enabled=False", "dtype=None", rest)
    return f"{code[:start]}{_PACKET}\n{inputs}{rest}"


def _moved(match: re.Match[str]) -> str:
    return f'{match[1]} = {match[2].rstrip()}.to("jax")\n'


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


class _Differentiating(ReferenceRuntime):
    """The reference where torch's own autograd recomputes checkpoints."""

    __slots__ = ()

    def of(self, case: Case) -> Runtime:
        """Return the runtime for a case: what a checkpoint calls is imitated again there."""
        plain = reference.checkpoint("cpu")

        def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool) -> Any:
            again = imitation.current().wrap(function, case)
            return plain(again, *args, use_reentrant=use_reentrant)

        return replace(self.runtime, checkpoint=checkpoint)


class Torchax:
    """torchax in this process, set to a mode.

    XLA reads its flags once, when JAX first computes.
    """

    def __init__(self, mode: Mode) -> None:
        configure(mode.flags)
        from amp_fuzz.backends.torchax import compat

        self.torchax = compat.load()
        import jax

        precision = jax.config.jax_default_matmul_precision
        self.torchax.enable_accuracy_mode()  # JAX has no 64-bit dtypes otherwise
        # It also asks for products of float32. Here the case does, or the environment.
        jax.config.update("jax_default_matmul_precision", precision)

        from amp_fuzz.backends.jax import compiling
        from amp_fuzz.backends.torchax import bridge

        compiling.frugal()
        self.said = here()
        self.exclusive = self.said.exclusive
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
        with multiplying(case.plan.precision):
            seen = harness.run(case, self._runtime)
        seen.platform = self.said.name
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
# 1,265 MiB in the end (docs/evidence/speed.md).
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
