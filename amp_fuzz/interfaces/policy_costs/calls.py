"""Where the calls come from: drawn programs, and callables."""

from __future__ import annotations

import math
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch

from amp_fuzz import reference
from amp_fuzz.backends import harness
from amp_fuzz.backends.harness import quiet
from amp_fuzz.backends.reference import Numerics, reference_on_cpu
from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.program import Autocast, Program, returning_all
from amp_fuzz.catalogue import CATALOGUE, Op
from amp_fuzz.interfaces.check.call import outputs_of
from amp_fuzz.interfaces.check.redirect import contexts_of
from amp_fuzz.interfaces.policy_costs.measure import Unjudged, measured
from amp_fuzz.interfaces.policy_costs.tally import Costs
from amp_fuzz.policies.tables import PolicyTable, load_table
from amp_fuzz.reference import dispatch
from amp_fuzz.reference.calls import Call, Treatment
from amp_fuzz.reference.shadow.copies import no_modes, tensors_in, with_tensors
from amp_fuzz.strategies.builder import Palette, ProgramBuilder
from amp_fuzz.strategies.drawing import usable

__all__ = ["costs_of_callable", "costs_of_draws"]

_CPU = (Autocast(dtype="bfloat16", device="cpu"),)
_PALETTE = Palette(
    domains=("normal", "uniform", "positive", "unit"),
    chains=True,
    sizes=(8, 16, 12, 8, 24, 32, 8, 16, 9, 12, 17, 33),
    most=2**14,
    least=8,
)
_ORDINARY = 16.0
_TRIES = 8
_SAME, _PER_OP = 4, 32
"""Calls of an op with the same shapes, and of an op, that are judged in one callable."""


@dataclass(slots=True)
class _Recorder:
    """Judges calls where autocast would meet them, while they are made in float32.

    largest: what no operand may exceed. only: the ops to judge; None: all. most: how many calls, of
    an op with the same shapes and of an op. waits: whether a call is judged with the gradient that
    its result gets.
    """

    tables: Mapping[str, PolicyTable]
    seed: int
    largest: float = math.inf
    costs: Costs = field(init=False)
    only: frozenset[str] | None = None
    most: tuple[int, int] | None = None
    waits: bool = False
    busy: bool = False
    met: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    waiting: dict[int, Call] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.costs = Costs.of(self.tables)

    @property
    def table(self) -> PolicyTable:
        """A table of the CPU's with a rule for each op that has one on a device."""
        rules = {n: rule for table in self.tables.values() for n, rule in table.rules.items()}
        return replace(load_table("cpu"), rules=rules)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Judge the calls of a block that runs under the reference's autocast of `table`."""
        with reference.under(replace(reference.DOCUMENTED, call=self._call)):
            yield
        for call in [self.waiting.pop(key) for key in list(self.waiting)]:
            self._judge(call, None)

    def _call(self, call: Call, found: Treatment | None) -> Any:
        if self.busy or found is None:
            return call.onward(call)
        asked = self.only is None or call.name in self.only
        if asked and not self._is_ordinary(call):  # LAPACK prints what it makes of NaN
            reason = f"an operand beyond {self.largest:g}"
            self.costs.left[call.name][reason] += 1
            raise Unjudged(reason)
        with dispatch.exclude():  # autocast sees nothing of what is inside
            out = call.function(*call.args, **call.kwargs)
        if asked and self._is_new(call):
            results = [t for t in tensors_in(out) if t.is_floating_point()]
            kept = self._copied(call)
            if self.waits and results and results[0].requires_grad:
                self._wait(kept, results[0])
            else:
                self._judge(kept, None)
        return out

    def _is_new(self, call: Call) -> bool:
        if self.most is None:
            return True
        key = call.name, *(tuple(t.shape) for t in call.tensors)
        self.met[key] += 1
        self.met[(call.name,)] += self.met[key] <= self.most[0]
        return self.met[key] <= self.most[0] and self.met[(call.name,)] <= self.most[1]

    def _copied(self, call: Call) -> Call:
        """Return a call with copies of its tensors: what is written to them later is not seen."""
        with torch.inference_mode(False), dispatch.exclude(), no_modes():
            turn = iter([t.detach().clone() for t in tensors_in((call.args, call.kwargs))])
            args = tuple(with_tensors(a, turn, {}) for a in call.args)
            kwargs = {name: with_tensors(a, turn, {}) for name, a in call.kwargs.items()}
        return replace(call, args=args, kwargs=kwargs)

    def _wait(self, call: Call, result: torch.Tensor) -> None:
        key = id(call)
        self.waiting[key] = call

        def arrived(gradient: torch.Tensor) -> None:
            if self.waiting.pop(key, None) is not None:
                self._judge(call, gradient.detach())

        result.register_hook(arrived)

    def _judge(self, call: Call, cotangent: torch.Tensor | None) -> None:
        self.busy = True
        tried = self.costs.calls[call.name] + self.costs.left[call.name].total()
        drawn = zlib.crc32(f"{self.seed}/{call.name}/{tried}".encode())
        without = {d: t for d, t in self.tables.items() if call.name not in t.rules}
        given = call.overload, call.args, call.kwargs, without
        try:
            with no_modes(), quiet():
                found = list(measured(*given, seed=drawn, cotangent=cotangent))
        except Unjudged as reason:
            self.costs.left[call.name][str(reason)] += 1
            return
        finally:
            self.busy = False
        self.costs.calls[call.name] += 1
        for way, kept in found:
            self.costs.add(call.name, way, kept)

    def _is_ordinary(self, call: Call) -> bool:
        """Return whether no operand is too large, or no number."""
        if self.largest == math.inf:
            return True
        with dispatch.exclude():
            floats = [t.detach() for t in call.tensors if t.is_floating_point() and t.numel()]
            return all(float(t.abs().max()) <= self.largest for t in floats)


# -- drawn programs -------------------------------------------------------------------------------


def costs_of_draws(
    tables: Mapping[str, PolicyTable],
    *,
    draws: int,
    seed: int,
    progress: Callable[[str, float], None] = lambda text, share: None,
) -> Costs:
    """Draw so many calls of each op that has a rule on a device, and judge each.

    A call stands at the end of a program of up to three statements in float32, of ordinary numbers:
    normal, or uniform in a range. Calls with an operand beyond 16 are drawn again. The programs
    depend on the seed alone.
    """
    recorder = _Recorder(tables, seed, _ORDINARY)
    names = set(recorder.costs.policies)
    runtime = reference_on_cpu("cpu", recorder.table, Numerics()).runtime
    here = usable(CATALOGUE.values(), "cpu")
    ops = [(op, reached) for op in here if (reached := _reached(op) & names) and _forms(op)]
    first = [op for op in here if op.family in _BEFORE]
    plan = Plan(contexts=_CPU, backward="none")
    with recorder.recording(), quiet(), _one_thread():
        for number, (op, reached) in enumerate(ops):
            progress(op.name, number / len(ops))
            recorder.only = reached
            for draw in range(draws):
                before = recorder.costs.calls.total()
                for again in range(_TRIES):
                    rng = random.Random(f"{op.name}/{seed}/{draw}/{again}")
                    case = Case(_program(op, first, rng), plan, rng.getrandbits(16))
                    harness.run(case, runtime)
                    if recorder.costs.calls.total() > before:
                        break
                else:
                    break
    return recorder.costs


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute in one thread: small tensors take longer in several, and add in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_BEFORE = ("pointwise", "arithmetic")


def _reached(op: Op) -> frozenset[str]:
    """Return the overloads that an op may reach."""
    packet = getattr(torch.ops.aten, op.name, None)
    own = [] if packet is None or op.overloads else packet.overloads()
    named = {name.removeprefix("aten::") for name in op.overloads}
    return frozenset(named | {op.name if o == "default" else f"{op.name}.{o}" for o in own})


def _forms(op: Op) -> list[str]:
    return [form for form in op.forms if form not in ("inplace", "out")]


def _program(op: Op, first: Sequence[Op], rng: random.Random) -> Program:
    builder = ProgramBuilder(rng.randbytes, {}, _PALETTE)
    made = [builder.statement(o, _forms(o)[0]) for o in rng.sample(first, rng.randrange(3))]
    made.append(builder.statement(op, rng.choice(_forms(op))))
    inputs = [msgspec.structs.replace(i, layout="contiguous") for i in builder.inputs]
    return returning_all(Program(tuple(inputs), tuple(made), ()))


# -- callables ------------------------------------------------------------------------------------


def costs_of_callable(
    tables: Mapping[str, PolicyTable],
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] = {},
    *,
    seed: int,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Costs:
    """Call a callable in float32, with a backward pass, and judge the calls of its ops.

    Those that a table has, where autocast would meet them: not where the code turns it off. Of each
    op four calls with the same shapes are judged, and 32 in all, with the gradient that the result
    gets. loss: makes of what the callable returns what the backward pass starts from; by default
    the sum of its outputs. Errors of the callable pass through.
    """
    recorder = _Recorder(tables, seed, most=(_SAME, _PER_OP), waits=True)
    runtime = reference_on_cpu("cpu", recorder.table, Numerics()).runtime
    with recorder.recording(), contexts_of(runtime.autocast, asked=True), runtime.scope():
        with runtime.autocast("cpu", torch.bfloat16):
            result = function(*args, **kwargs)
        outputs = [t for _, t in outputs_of(result, numbers=False) if t.requires_grad]
        if loss is not None:
            loss(result).backward()
        elif outputs:
            torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    return recorder.costs
