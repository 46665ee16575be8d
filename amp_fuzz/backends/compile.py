"""``torch.compile`` on every rung of its ladder: dynamo, AOTAutograd, decompositions, Inductor.

The program is compiled, the plan is not: its contexts are around the compiled callable. With the
``decorator`` entry, the innermost one is compiled too. With the entry ``custom_op``, a call of the
op is compiled; its body is Python that the graph only knows by name. Nothing is cached between
cases, so no artefact of another case can hide a bug. ``compile[inductor+cached]`` fills torch's
caches for each case anew.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import msgspec
import torch

from amp_fuzz.backends import bisection, control_flow, harness, prelude
from amp_fuzz.backends.base import Availability, Backend, Call, Facts, documentation
from amp_fuzz.backends.determinism import DRAWN, EXACT, Kernels
from amp_fuzz.backends.eager import has_device
from amp_fuzz.backends.export import DATA_DEPENDENT, HOOKED
from amp_fuzz.backends.harness import Observation
from amp_fuzz.backends.numerics import numerics
from amp_fuzz.backends.reference import ReferenceRuntime, within
from amp_fuzz.backends.reproducing import TorchRepros, opaque, source_of
from amp_fuzz.backends.source import program_source
from amp_fuzz.backends.torch_base import TorchBackend, numbers, under
from amp_fuzz.backends.torch_state import in_compiling_thread, in_thread_alike, torch_state
from amp_fuzz.cases.case import (
    CUSTOM_OPS,
    FUNCTIONS,
    Case,
    Plan,
    breaks_graphs,
    inferring,
    opened,
    unbroken,
)
from amp_fuzz.cases.program import (
    Autocast,
    AutocastDType,
    Checkpoint,
    InferenceMode,
    Node,
    NoGrad,
    Region,
    regions,
    statements,
    transform,
)
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.patching import patched
from amp_fuzz.reference import as_device, load_table
from amp_fuzz.reference.shadow.band import Band
from amp_fuzz.reference.shadow.mode import Promise
from amp_fuzz.versions import holds

__all__ = ["LADDER", "CompileBackend", "backends"]

# Each does more than the one before it: the first that diverges has the bug.
LADDER = ("eager", "aot_eager", "aot_eager_decomp_partition", "inductor")

# The roots of what torch 2.13 imports at the first compilation. All of AOTAutograd's rungs import
# Inductor's lowerings, for a helper of `fx_graph_cse`.
_DYNAMO = ("torch._dynamo.repro.after_dynamo", "torch.export._trace")
_AOT = (*_DYNAMO, "torch._inductor.pattern_matcher")
_IMPORTS = {"eager": _DYNAMO, "inductor": (*_AOT, "torch._inductor.compile_fx")}


@dataclass(frozen=True, slots=True)
class CompileBackend(TorchRepros, TorchBackend):
    """``torch.compile(program, backend=rung)``, on the CPU or another device of torch's own.

    label: distinguishes it from others of its rung. dynamic, options: arguments of
    `torch.compile`. told: ``backward_pass_autocast`` tells torch which autocast will surround the
    backward pass; otherwise all is as torch has it by default: it takes the forward's, and Inductor
    draws random numbers of its own. freezing: the program is
    a module that holds its weights and only infers, so Inductor may treat them as constants. (As an
    option of `torch.compile` it would have no effect: dynamo reads Inductor's configuration.)
    cached: the caches of AOTAutograd and Inductor are on, as users have them. Before a case is
    observed, it is compiled under another state, then as it is: see `_fill`.
    """

    rung: str
    label: str = ""
    dynamic: bool | None = False
    options: tuple[tuple[str, bool], ...] = ()
    told: bool = True
    freezing: bool = False
    cached: bool = False
    exact: bool = field(default=False, kw_only=True)

    @property
    def name(self) -> str:
        """``compile[inductor]``, ``compile[inductor+dynamic]``, ``compile[inductor]@cuda``, ..."""
        name = f"compile[{self.rung}{'+' + self.label if self.label else ''}]"
        return name if self.device == "cpu" else f"{name}@{self.device}"

    def availability(self) -> Availability:
        """Return whether this torch can compile here."""
        if not has_device(self.device):
            return Availability("missing", f"no {self.device} device is visible to torch here")
        if self.rung == "inductor" and _compiler() is None:
            return Availability("missing", "a C++ compiler: install g++, or set CXX")
        if self.rung == "inductor" and self.device != "cpu" and find_spec("triton") is None:
            return Availability("missing", "pip install triton")
        emulates = self.rung == "inductor" and self.promise == "all"
        if emulates and self.device == "cpu" and holds("<2.13"):
            return Availability("missing", "needs torch 2.13: before, nothing is emulated on a CPU")
        return TorchBackend.availability(self)

    def supports(self, op: str, form: str) -> bool:
        """Return whether an op can be in a graph: dynamo takes no sparse tensors."""
        return CATALOGUE[op].family != "sparse"

    def fit(self, case: Case) -> Case:
        """Return the case without what AOTAutograd documents as unsupported.

        Double backward raises there ("does not currently support double backward"), so a retained
        graph replaces it. Function transforms of compiled functions are left out. The fake kernel
        of a custom op must not look at values, and its backward must be traceable, which that of a
        reentrant checkpoint is not (`torch.library.register_fake`, `register_autograd`). Torch
        caches a custom op by its name (pytorch#144344), so with caches there is none. A frozen
        program only infers, and calls no custom op: its weights would be the op's arguments. Nested
        regions need AOTAutograd, no hook, and a graph without a break. A custom op's body is in no
        graph. A context may keep the first default dtype in a graph, but not after it, so a program
        whose default changes has no break. If AOTAutograd is told nothing, each backward graph has
        the autocast of its forward, and one backward pass of several graphs has several: it is left
        out.
        """
        if (self.freezing or self.cached) and case.plan.entry in CUSTOM_OPS:
            case = case.with_plan(entry="context")
        if self.freezing:
            case = under(inferring(case), NoGrad())
        if case.plan.entry in CUSTOM_OPS:
            case = _opaque(case)
        if self.rung != "eager" and case.plan.second == "double":
            case = case.with_plan(second="retain")
        nests = self.rung != "eager" and hasattr(torch.compiler, "nested_compile_region")
        nests &= not any(s.op in HOOKED for s in statements(case.program.body))
        if case.plan.reuse == "region" and not nests:
            case = case.with_plan(reuse="graph")
        if self.freezing:
            case = case.with_plan(reuse="calls")
        if case.plan.reuse == "region" or _changes_default(case.plan):
            case = unbroken(case)
        untold = self.rung != "eager" and (not self.told or holds("<2.9"))
        several = case.plan.later and case.plan.reuse == "calls"
        if untold and (several or breaks_graphs(case)):
            case = inferring(case)
        return case.with_plan(transform="none")

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Compile and run cases one by one.

        Each runs in a separate thread: a failed compilation can leave fake tensor modes and
        dispatch keys in its thread, which break later calls of torch there.
        """
        return [in_compiling_thread(self.observe, case) for case in cases]

    def observe(self, case: Case) -> Observation:
        """Compile and run one case."""
        with self._caches():
            if self.cached:
                self._fill(case)
            return self._observed(case)

    def _caches(self) -> AbstractContextManager[None]:
        return private_cache() if self.cached else nullcontext()

    def _fill(self, case: Case) -> None:
        """Compile a case under another state, then as it is. Both stay in the caches alone.

        If a cache's key forgets the state, the case meets what was compiled under the other one.
        """
        state, other = another_state(case, self.device)
        with state():
            self._observed(other)
        self._observed(case)

    def _observed(self, case: Case) -> Observation:
        import torch._dynamo

        forget()
        plan = self.configuring(case.plan)
        runtime = self.runtime(
            uncompiled=torch.compiler.disable(prelude.uncompiled),
            control=control_flow.of_torch(),
            driver=lambda names: self._driver(case, names),
            # The configuration of torch.compile is thread-local.
            follow=lambda function: partial(self.configured, plan, function),
        )
        before, hits = graphs(), _hits()
        try:
            seen: Observation = self.configured(plan, harness.run, case, runtime)
            seen.graphs, seen.hits = graphs() - before, _hits() - hits
            if seen.raised is not None and _infers(case):
                undone = self.undone()
                seen.leaked = "; ".join(filter(None, (seen.leaked, undone))) or None
            return seen
        finally:
            torch._dynamo.reset()

    def refuses(self, modules: Mapping[str, torch.nn.Module]) -> str:
        """Return why a callable cannot be called, or "": only modules can be frozen."""
        if self.device != "cpu":
            return "callables are compiled on the CPU only: use eager on that device"
        return "only modules can be frozen" if self.freezing and not modules else ""

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers of its own, as Inductor does unless it is told not to."""
        return self.rung == "inductor" and not self.told

    def kernels(self) -> Kernels:
        """Return the kernels whose results need not be eager's: those that draw, if it `draws`."""
        return DRAWN if self.draws else EXACT

    def shadows(self) -> ReferenceRuntime:
        """Return the reference."""
        return self.reference()

    def infers(self, function: Callable[..., Any]) -> bool:
        """Return whether no backward pass runs: a frozen module only infers."""
        return self.freezing

    def called(self, function: Callable[..., Any], plan: Plan, call: Call) -> Observation:
        """Compile a callable and call it, in a separate thread as in `run`."""
        with self._caches():
            return in_thread_alike(self._called, function, plan, call)  # type: ignore[no-any-return]

    def _called(self, function: Callable[..., Any], plan: Plan, call: Call) -> Observation:
        import torch._dynamo

        forget()
        try:
            invoke = self.compiled(function)
            if self.freezing:
                invoke = torch.no_grad()(invoke)
            most, refused = 0, _breaks()

            def counted(*args: Any, **kwargs: Any) -> Any:
                nonlocal most
                before = graphs()
                try:
                    return invoke(*args, **kwargs)
                finally:
                    most = max(most, graphs() - before)

            seen: Observation = self.configured(
                self.configuring(plan), call, self.runtime(), counted
            )
            seen.graphs = most  # of one call: graphs of an earlier one may serve a later one
            if seen.raised is not None:
                seen.leaked = "; ".join(filter(None, (seen.leaked, self.undone()))) or None
            # Only of this call: dynamo's counter continues from call to call.
            new = (text.partition("\n")[0] for text in _breaks() - refused)
            seen.breaks = tuple(dict.fromkeys(new))
            return seen
        finally:
            torch._dynamo.reset()

    def facts(self) -> Facts:
        """Return what `torch.compile` promises."""
        link = documentation("generated/torch.compile.html")
        return Facts(
            area=f"torch.compile, {self.rung}",
            made="compiled with `torch.compile`",
            promise=f"[`torch.compile`]({link}): a compiled program computes what eager computes.",
            compiles=True,
            reenters=True,
            cached=self.cached,
            scripts=not self.cached,
            imports=_IMPORTS.get(self.rung, _AOT),
            implements=("backend=compile", "told" if self.told else "untold"),
        )

    def blame(self, agrees: Callable[[], bool]) -> str:
        """Return the part of the rung without which a case agrees, by torch's own bisector."""
        return bisection.blame(self.rung, agrees) if self.rung in bisection.BISECTED else ""

    def configured(self, plan: Plan, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function with torch configured for a plan, without logs."""
        import torch._dynamo
        import torch._functorch.config
        import torch._inductor.config

        functorch = {"donated_buffer": False, "enable_autograd_cache": self.cached}
        functorch["enable_remote_autograd_cache"] = False
        if hasattr(torch._functorch.config, "backward_pass_autocast"):
            functorch["backward_pass_autocast"] = _backward_context(plan, self.device)
        # Beyond its limit dynamo runs eager, and nothing would be tested.
        dynamo = {"recompile_limit": 128, "fail_on_recompile_limit_hit": True}
        inductor = {
            "fx_graph_cache": self.cached,
            "fx_graph_remote_cache": False,
            "compile_threads": 1,
            "freezing": self.freezing,
            "fallback_random": not self.draws,  # dropout draws from torch's generator, as in eager
        }
        disabled = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        # If somebody listens to it (pytest does), the structured trace raises for a dtype in
        # backward_pass_autocast: "Object of type <class 'torch.dtype'> is not JSON serializable".
        trace = logging.getLogger("torch.__trace")
        try:
            with (
                patched(trace, "handlers", []),
                torch._functorch.config.patch(functorch),
                torch._inductor.config.patch(inductor),
                torch._dynamo.config.patch(dynamo),
                untimed(),
                unwritten(),
            ):
                return function(*args)
        finally:
            logging.disable(disabled)

    def undone(self) -> str | None:
        """Return how a garbage collection changes this thread's state, if at all.

        The graph's guard of an inference_mode region is an object. If a compilation fails in the
        region, the frames of the error keep the guard in a cycle. The thread that collects it gets
        the state that the guard saw. Here this is always the thread of the case.
        """
        before = torch_state(self.device)
        gc.collect()
        return harness.changes(before, torch_state(self.device), " by a garbage collection")

    def configuring(self, plan: Plan) -> Plan:
        """Return the plan for which torch is configured."""
        return plan if self.told else msgspec.structs.replace(plan, backward="inside")

    def _driver(self, case: Case, names: Mapping[str, Any]) -> dict[str, Any]:
        """Return the driver's names: the compiled program."""
        program, weights = names["program"], numbers(case, "weight")

        def made(function: Callable[..., Any]) -> Any:
            if not self.freezing:
                return self.compiled(function)
            return prelude.holding(function, weights, self.compiled)

        class around(torch.autocast):
            """A context; as a decorator of the program it is compiled with it."""

            def __call__(decorator, function: Callable[..., Any]) -> Any:
                if function is compiled:
                    inside: Any = decorator._plain()
                    return made(inside(program))
                outside: Any = super()
                return outside.__call__(function)

            def _plain(self) -> torch.autocast:
                return torch.autocast(
                    self.device,
                    dtype=self.fast_dtype,
                    enabled=self._enabled,
                    cache_enabled=self._cache_enabled,
                )

        def opaque(_: Callable[..., Any], *how: Any) -> Any:
            return made(prelude.as_custom_op(program, *how))

        if case.plan.reuse != "calls":
            nested = getattr(torch.compiler, "nested_compile_region", None)  # since torch 2.8
            return {"graph": made, "region": nested}
        compiled = made(program)
        return {"program": compiled, "autocast": around, "as_custom_op": opaque}

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function, or module, compiled by `torch.compile` on this rung."""
        options: Any = dict(self.options) if self.options else None
        compiled: Callable[..., Any] = torch.compile(
            function, backend=self.rung, dynamic=self.dynamic, options=options
        )
        return compiled

    def expression(self, function: str, case: Case) -> str:
        """Return the source that compiles a function, for a repro."""
        options = f", options={dict(self.options)}" if self.options else ""
        how = f'backend="{self.rung}", dynamic={self.dynamic}{options}'
        if self.freezing:
            return (
                f"holding({function}, {numbers(case, 'weight')}, lambda f: torch.compile(f, {how}))"
            )
        return f"torch.compile({function}, {how})"

    def source(self, case: Case) -> str:
        """Return the source of the program and of its compilation, for a repro."""
        text = program_source(case.program).rstrip()
        if "uncompiled(" in text:
            helper = f"@torch.compiler.disable\n{source_of(prelude.uncompiled)}"
            text = f"{helper}\n\n\n{text}"
        if case.plan.reuse != "calls":
            return f"{text}\n"
        again = "plain = program\n" if case.plan.entry in ("decorator", *CUSTOM_OPS) else ""
        compiled = f"program = {self.expression('program', case)}"
        return f"{text}\n\n\n{again}{compiled}\n"

    def driver(self, text: str, case: Case) -> str:
        """Return the source of the driver, for a repro.

        The decorator's context is compiled with the program, the others are around it. For a
        custom op, the call is compiled.
        """

        def compiled(match: re.Match[str]) -> str:
            return f"entered = {self.expression(f'{match[1]}(plain)', case)}"

        text = re.sub(r"entered = (autocast\(.*\))\(program\)", compiled, text)
        text = text.replace("region(program)", "torch.compiler.nested_compile_region(program)")
        text = text.replace("graph(calls)", self.expression("calls", case))
        return opaque(text, lambda function: self.expression(function, case))

    def cleanup(self) -> list[str]:
        """Return the line that removes compiled code, for a test."""
        return ["torch._dynamo.reset()"]

    def configuration(self, case: Case) -> str:
        """Return the source that configures torch as `run` does, for a repro."""
        import torch._functorch.config

        if self.rung == "eager":
            return ""
        lines = ["import torch._functorch.config"]
        context = _backward_context(self.configuring(case.plan), self.device)
        # An older torch refuses the line. So leave it out where it changes nothing: it is the
        # default, or there is no backward pass to trace.
        if (
            hasattr(torch._functorch.config, "backward_pass_autocast")
            and context != "same_as_forward"
            and any(spec.requires_grad for spec in case.program.inputs)
        ):
            lines.append(f"torch._functorch.config.backward_pass_autocast = {context!r}")
        if case.plan.second != "none":
            lines.append("torch._functorch.config.donated_buffer = False")
        if self.rung == "inductor" and not self.draws and _is_random(case):
            lines.append("import torch._inductor.config")
            lines.append("torch._inductor.config.fallback_random = True")
        if self.freezing:
            lines += ["import torch._inductor.config", "torch._inductor.config.freezing = True"]
        if case.plan.entry in CUSTOM_OPS:  # a custom op is cached by its name (pytorch#144344)
            lines.append("torch._functorch.config.enable_autograd_cache = False")
            lines.append("import torch._inductor.config")
            lines.append("torch._inductor.config.fx_graph_cache = False")
        return "\n".join(lines) if len(lines) > 1 else ""

    def ladder(self) -> Sequence[Backend]:
        """Return the rungs below this one; for a variant of a rung, that rung too."""
        rungs = LADDER[: LADDER.index(self.rung) + bool(self.label)]
        return [CompileBackend(rung, device=self.device) for rung in rungs]

    @property
    def promise(self) -> Promise:
        """The roundings that it makes: Inductor those of written casts, or all if asked.

        Below it a graph runs op by op.
        """
        emulates = ("emulate_precision_casts", True) in self.options
        return "all" if emulates or self.rung in ("eager", "aot_eager") else "written"

    def reference(self) -> ReferenceRuntime:
        """Return the reference on the same device.

        Inductor sums in its own loops, and passes channels-last tensors to torch's convolutions.
        Other devices than the CPU have kernels that sum in another order on every rung.
        """
        runtime = TorchBackend.reference(self).runtime
        away = self.device != "cpu"
        kind = ShadowedOnCPU if away else ReferenceRuntime
        how = numerics(self.device, reorders=self.rung == "inductor" or away)
        return kind(runtime, numerics=how, promise=self.promise)


@dataclass(frozen=True, slots=True)
class ShadowedOnCPU(ReferenceRuntime):
    """The reference on an accelerator. Its shadows are on the CPU, where their arithmetic is."""

    def shadowed(self, case: Case, *args: Any, **how: Any) -> tuple[Observation, dict[str, Band]]:
        """Run one case with shadows, on CPU tensors that are cast as the device's."""
        device = self.runtime.device
        scope = partial(as_device, device, load_table(device), tensors="cpu")
        runtime = replace(within(self.runtime, scope), place=lambda tensor: tensor)
        # Named explicitly: a class with slots is not the class that `super` was compiled for.
        return ReferenceRuntime.shadowed(replace(self, runtime=runtime), case, *args, **how)


def _opaque(case: Case) -> Case:
    """Return a case whose program can be the body of a custom op in a graph, or is none."""
    ops = {s.op for s in statements(case.program.body)}
    if any(op in DATA_DEPENDENT or CATALOGUE[op].family == "control_flow" for op in ops):
        return case.with_plan(entry="context")
    return unbroken(case.with_program(body=transform(case.program.body, region=_unreentrant)))


def _changes_default(plan: Plan) -> bool:
    return any(isinstance(context, AutocastDType) for call in plan.later for context in call)


def _unreentrant(node: Region, body: tuple[Node, ...]) -> tuple[Region]:
    """Return a region; a checkpoint is none that is reentrant."""
    checkpoint = isinstance(node.context, Checkpoint)
    return (Region(Checkpoint(use_reentrant=False) if checkpoint else node.context, body),)


def _infers(case: Case) -> bool:
    return any(isinstance(context, InferenceMode) for context in regions(case.program.body))


def forget() -> None:
    """Forget what torch has compiled in this process, and what fake tensors came out as.

    The cache of `FakeTensorMode` outlives a reset of dynamo, and forgets which results are views:
    a region that returns one, as ``channel_shuffle(x, 1)`` does, raises only when it is first seen.
    """
    import torch._dynamo
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch._dynamo.reset()
    FakeTensorMode.cache_clear()


def untimed() -> AbstractContextManager[None]:
    """Stop dynamo from timing the guards of compiled code, in every thread.

    For a number in its log it flushes the processor's caches, 40 ms for each graph (torch 2.13).
    The guards themselves are checked before that, and at each call of the graph.
    """
    import torch._dynamo.guards as guards

    return patched(guards, "profile_guard_manager", lambda *of: 0.0)


def unwritten() -> AbstractContextManager[None]:
    """Stop AOTAutograd from writing files to the working folder if it cannot partition a graph.

    It writes the graph there under a new name each time, and quotes the name in the error (torch
    2.13).
    """
    import torch._functorch.partitioners as partitioners

    return patched(partitioners, "_get_unique_path", lambda *of: os.devnull)


def graphs() -> int:
    """Return how many graphs dynamo has passed to a compiler in this process."""
    count: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return count


def _breaks() -> Counter[str]:
    """Return why dynamo left code to eager in this process, and how often."""
    counters = torch._dynamo.utils.counters
    return Counter(counters["unimplemented"]) + Counter(counters["graph_break"])


def _hits() -> int:
    """Return how many artefacts were loaded from the caches in this process."""
    counters = torch._dynamo.utils.counters
    autograd = counters["aot_autograd"]["autograd_cache_hit"]
    return int(autograd + counters["inductor"]["fxgraph_cache_hit"])


@contextmanager
def private_cache() -> Iterator[None]:
    """Let torch's caches of graphs be empty for a block, in a folder of its own.

    What the C++ compiler made is where it always is: it is stored by its source.
    """
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
    from torch._inductor.codecache import FxGraphCache

    with tempfile.TemporaryDirectory(prefix="amp-fuzz-", ignore_cleanup_errors=True) as folder:
        name, where = "_get_tmp_dir", staticmethod(lambda: folder)
        with patched(AOTAutogradCache, name, where), patched(FxGraphCache, name, where):
            yield


def another_state(
    case: Case, device: str
) -> tuple[Callable[[], AbstractContextManager[Any]], Case]:
    """Return a case under another state, and a context that is around all of it.

    Four states: another dtype of the innermost context, autocast turned off or on, another default
    dtype, no gradients. The seed chooses the first, and one that the program does not have is
    passed over. A program that has none of them is the same. So the program without autocast meets
    the same other state, and autocast has no part in a cache that is wrong there too.
    """
    *outer, inner = case.plan.contexts or (None,)
    half = "float16" if inner is None or inner.dtype != "float16" else "bfloat16"
    default = torch.get_autocast_dtype(device)
    other = torch.bfloat16 if default is torch.float16 else torch.float16

    def changed(**fields: Any) -> Callable[[], Case]:
        if inner is None:
            return lambda: case
        innermost = msgspec.structs.replace(inner, **fields)
        return lambda: case.with_plan(contexts=(*outer, innermost))

    states: list[tuple[bool, Callable[[], AbstractContextManager[Any]], Callable[[], Case]]] = [
        (inner is not None, nullcontext, changed(dtype=half)),
        (inner is not None, nullcontext, changed(enabled=inner is not None and not inner.enabled)),
        (_asks_default(case, device), lambda: prelude.autocast_dtype(device, other), lambda: case),
        (_trains(case), torch.no_grad, lambda: inferring(case)),
    ]
    first = case.seed % len(states)
    for has, state, made in states[first:] + states[:first]:
        if has:
            return state, made()
    return nullcontext, case


def _trains(case: Case) -> bool:
    return case.plan.backward != "none" and bool(numbers(case, "weight"))


def _asks_default(case: Case, device: str) -> bool:
    """Return whether an autocast context takes the default dtype of a device."""
    return any(
        context.enabled and context.dtype is None and not inherits
        for context, inherits in opened(case, device)
        if context.device in (None, device)
    )


def _is_random(case: Case) -> bool:
    """Return whether a program draws random numbers."""
    return any(CATALOGUE[s.op].random for s in statements(case.program.body))


def _backward_context(plan: Plan, device: str) -> Any:
    """Return the ``backward_pass_autocast`` that makes AOTAutograd equivalent to the plan.

    AOTAutograd traces the backward pass during the forward, and must be told which autocast context
    will surround it. What the forward of a graph runs under is something else in another thread, or
    after a break of the graph in a decorated function. A function of one's own runs the graph again
    in its backward, and back from there.
    """
    if plan.entry in FUNCTIONS:
        return "same_as_forward"
    if plan.backward == "inside":
        if plan.thread != "inside" and plan.entry != "decorator":
            return "same_as_forward"
        around = plan.contexts[:-1] if plan.entry == "decorator" else plan.contexts
        return list(_keywords(around, device)) or "off"
    if plan.backward == "under" and isinstance(plan.backward_context, Autocast):
        return list(_keywords([plan.backward_context], device))
    return "off"


def _keywords(contexts: Iterable[Autocast], device: str) -> Iterator[dict[str, Any]]:
    """Yield the arguments of ``torch.autocast`` of each context.

    One that names no dtype has that of the context around it, here as in eager, and not that of the
    forward's.
    """
    inherited: dict[str, torch.dtype] = {}
    for context in contexts:
        kind = context.device or device
        dtype = getattr(torch, context.dtype) if context.dtype else inherited.get(kind)
        inherited[kind] = dtype or torch.get_autocast_dtype(kind)
        keywords = {"device_type": kind, "enabled": context.enabled, "dtype": inherited[kind]}
        if context.cache_enabled is not None:
            keywords["cache_enabled"] = context.cache_enabled
        yield keywords


def _compiler() -> str | None:
    # Asking Inductor would import it, which takes longer than importing torch.
    return shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))


def backends() -> list[Backend]:
    """Return the ladder and Inductor's variants on the CPU, and the ladder on CUDA."""
    return [
        *(CompileBackend(rung) for rung in LADDER),
        CompileBackend("inductor", "dynamic", dynamic=True),
        CompileBackend("aot_eager", "default", told=False),
        CompileBackend("inductor", "default", told=False),
        CompileBackend("inductor", "casts", options=(("emulate_precision_casts", True),)),
        CompileBackend("inductor", "freezing", freezing=True),
        CompileBackend("inductor", "cached", cached=True),
        *(CompileBackend(rung, device="cuda") for rung in LADDER),
    ]
