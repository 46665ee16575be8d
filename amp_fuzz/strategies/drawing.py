"""Draw plans and programs from a source of bytes; `strategies` wraps these for Hypothesis."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Literal, TypeAlias, get_args

import msgspec
import torch

from amp_fuzz.cases.case import Case, Plan, Precision, Reuse, Update
from amp_fuzz.cases.program import (
    FP8,
    Around,
    Autocast,
    AutocastDType,
    Branch,
    Checkpoint,
    Context,
    Domain,
    InferenceMode,
    Layout,
    Node,
    NoGrad,
    Program,
    Ref,
    Region,
    Statement,
    TensorSpec,
    Uncompiled,
    regions,
    returning_all,
    returning_last,
    statements,
    transform,
)
from amp_fuzz.cases.settings import SETTINGS
from amp_fuzz.catalogue import CATALOGUE, Op
from amp_fuzz.policies.tables import PolicyTable, load_table
from amp_fuzz.strategies.builder import FORMS, Frame, Palette, ProgramBuilder, policy_of
from amp_fuzz.strategies.choices import Bytes, digits, integer
from amp_fuzz.strategies.idioms import IDIOMS, Idiom, stages
from amp_fuzz.strategies.placing import Values, with_cpu_tensors

__all__ = ["draw_case", "draw_plan", "draw_program", "forget_tables", "usable"]

_PALETTES: tuple[tuple[str, ...], ...] = (
    ("float32",),
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("float32", "bfloat16", "float16"),
    ("bfloat16",),
    ("float16",),
    ("float64", "float32"),
    ("float32", "bfloat16", "float16", "float64"),
)
_DOMAINS: tuple[tuple[Domain, ...], ...] = (
    ("normal",),
    ("integers",),
    ("uniform", "normal"),
    ("normal", "ties"),
    ("normal", "overflow"),
    ("normal", "subnormal"),
    ("cancelling", "zeros", "normal"),
    ("uniform", "ties", "cancelling", "integers"),
)
_LAYOUTS: tuple[tuple[Layout, ...], ...] = (
    ("contiguous",),
    ("contiguous", "contiguous", "transposed", "strided", "offset"),
)
_ENTRIES = (
    "decorator",
    "custom_fwd",
    "cast_inputs",
    "setup_context",
    "custom_op",
    "register_autocast",
)
_FUNCTIONS = _ENTRIES[1:]
# Under function transforms these kernels access foreign memory and crash
# (docs/findings/README.md).
_UNTRANSFORMABLE = frozenset({"mkldnn_rnn_layer", "_native_multi_head_attention"})
_SWARM = 8
_STYLES = 24
_FREE, _FREE_FUSED = 12, 6  # the programs that draw from all ops; the others use idioms
_STATEMENTS = 12
_MAX_DEPTH = 3


@lru_cache(maxsize=32)
def _table(device: str) -> PolicyTable:
    return load_table(device)


def forget_tables() -> None:
    """Read policy tables anew, after a user's op was given a rule."""
    _table.cache_clear()
    _policies.cache_clear()


@lru_cache(maxsize=32)
def _policies(device: str) -> Mapping[str, str]:
    return {name: rule.policy.value for name, rule in _table(device).rules.items()}


def usable(ops: Iterable[Op], device: str, *, fp8: bool = False) -> tuple[Op, ...]:
    """Return the ops that can run on a device type and that this torch has in all forms.

    fp8: those of a backend with FP8 recipes.
    """
    return tuple(
        op
        for op in ops
        if (fp8 or not op.fp8)
        and (op.devices is None or device in op.devices)
        and all(map(_torch_has, op.forms.values()))
    )


@cache
def _torch_has(form: str) -> bool:
    """Return whether torch has every name in the source of a form."""
    for name in re.findall(r"\btorch\.([a-zA-Z_][\w.]*\w)", form):
        try:
            operator.attrgetter(name)(torch)
        except AttributeError:
            return False
    return True


def _dtypes(device: str) -> tuple[str, ...]:
    """Return the 16-bit autocast dtypes of a device, bfloat16 first."""
    table = _table(device)
    low = [d for d in ("bfloat16", "float16") if d in table.supported_dtypes]
    return tuple(sorted(low, key=lambda d: d != "bfloat16"))


def draw_autocast(source: Bytes, device: str) -> Autocast:
    """Draw an autocast context for the device under test, rarely for another device."""
    dtypes = _dtypes(device)
    i, how = digits(source, 16, 12)
    dtype = dtypes[0] if i < 9 else dtypes[-1] if i < 14 else None if i == 14 else "float32"
    other = "cpu" if device != "cpu" else None
    return Autocast(
        device=other if how == 11 else None,
        dtype="bfloat16" if how == 11 and other else dtype,
        enabled=how not in (7, 8, 9),
        cache_enabled=False if how == 10 else True if how == 6 else None,
    )


def draw_plan(source: Bytes, device: str, *, trains: bool = True, transforms: bool = True) -> Plan:
    """Draw a plan. The simplest: one bfloat16 context around the forward, backward after it.

    transforms: of functions; without them the context is entered in other ways as often.
    """
    dtypes = _dtypes(device)
    low, outer, backward = digits(source, 8, 12, 10)
    # The last one uses the device's default dtype, as most callers do.
    contexts = [Autocast(dtype=dtypes[0] if low < 4 else dtypes[-1] if low < 7 else None)]
    if outer == 11:
        contexts = []
    elif outer >= 7:
        depth = max(outer - 7, 1)
        contexts = [draw_autocast(source, device) for _ in range(depth)] + contexts
    plan = Plan(contexts=tuple(contexts), backward="outside" if trains else "none")
    changes: dict[str, object] = {}
    if trains and backward >= 7:
        changes["backward"] = ("inside", "under", "none")[backward - 7]
        if backward == 8:
            changes["backward_context"] = draw_autocast(source, device)
    # Most cases have at most one or two of the rest, so a finding shows which one matters.
    entering = _COMPILED if trains else _FROZEN
    table = entering if not transforms else _TRAINING if trains else _INFERRING
    for i in digits(source, len(table), len(table)):
        changes |= table[i][integer(source, len(table[i]))]
    return _updating(source, _consistent(plan, changes))


_Options: TypeAlias = Sequence[Mapping[str, object]]
"""The fields of a plan that an ingredient changes; one of them is drawn."""

_NOTHING: _Options = ({},)


_ENTERING: _Options = tuple({"entry": entry} for entry in _ENTRIES)


def _ingredients(transform: _Options, again: _Options) -> Sequence[_Options]:
    """Return the ingredients of a plan, each as often as its weight says.

    transform: of the program's function. again: what only a backward pass has.
    """
    weighted: Sequence[tuple[int, _Options]] = (
        (9, _NOTHING),
        (1, transform),
        (1, _ENTERING),
        (1, ({"first_pass": "no_grad"},)),
        (1, ({"first_pass": "inference_mode"},)),
        (1, ({"calls": 2},)),
        (1, ({"interrupted": True},)),
        (1, ({"thread": "inside"},)),
        (1, ({"thread": "whole"},)),
        (4, again),
        (1, transform),
    )
    return [options for weight, options in weighted for _ in range(weight)]


_AGAIN: _Options = (
    {"second": "retain"},
    {"second": "double"},
    *({"steps": 2}, {"steps": 2, "loop": "inside"}) * 2,
    {"micro_batches": 2},
    {"micro_batches": 2, "loop": "inside"},
    {"hook": "tensor"},
    {"hook": "accumulated"},
    {"checkpoint": "reentrant"},
    {"checkpoint": "non_reentrant"},
    {"checkpoint": "selective"},
    {"scaler": True},
    {"scaler": True, "steps": 2},
)
# Per-sample gradients involve the most rules: of batching, of backward ops, of both.
_GRADIENTS = tuple(
    {"transform": name}
    for name in (
        *("vmap", "grad", "vmap_grad", "vmap_grad") * 3,
        *("functionalize", "jvp", "forward_ad", "jacrev", "jacfwd"),
    )
)

_TRAINING = _ingredients(_GRADIENTS, _AGAIN)
_INFERRING = _ingredients(
    tuple({"transform": name} for name in ("vmap", "vmap", "vmap", "functionalize")), _NOTHING
)
_COMPILED, _FROZEN = _ingredients(_ENTERING, _AGAIN), _ingredients(_ENTERING, _NOTHING)


def _consistent(plan: Plan, changes: dict[str, object]) -> Plan:
    """Apply changes, and drop combinations without meaning."""
    plan = msgspec.structs.replace(plan, **changes)
    drop: dict[str, object] = {}
    if plan.backward == "none":
        drop |= {"second": "none", "steps": 1, "loop": "outside", "scaler": False}
        drop |= {"micro_batches": 1, "hook": "none"}
    if plan.entry != "context" and not plan.contexts:
        drop["entry"] = "context"
    if plan.passes == 1 or not plan.contexts:
        drop["loop"] = "outside"
    if plan.micro_batches > 1:
        drop["second"] = "none"
    plan = msgspec.structs.replace(plan, **drop)
    if plan.loop == "inside":
        plan = msgspec.structs.replace(
            plan, entry="context", backward="inside", backward_context=None
        )
    if plan.checkpoint != "none" and (plan.entry != "context" or plan.thread == "inside"):
        plan = msgspec.structs.replace(plan, checkpoint="none")
    if plan.checkpoint == "selective" and plan.second == "retain":  # torch refuses it
        plan = msgspec.structs.replace(plan, second="none")
    if plan.checkpoint != "none" and plan.second == "double":
        plan = msgspec.structs.replace(plan, second="none")
    if plan.scaler and plan.second != "none":
        plan = msgspec.structs.replace(plan, second="none")
    return plan if plan.transform == "none" else _alone(plan)


_UPDATES: Sequence[Update] = get_args(Update)


def _updating(source: Bytes, plan: Plan) -> Plan:
    """Return a plan of several steps with another update of weights; half stay."""
    if plan.steps == 1 or plan.scaler or plan.hook != "none":
        return plan
    which, more = digits(source, 2 * len(_UPDATES), 2)
    update = _UPDATES[max(which - len(_UPDATES), 0)]
    second = "none" if update == "frozen" and plan.second == "double" else plan.second
    steps = 2 if update == "in_place" else 2 + more
    return msgspec.structs.replace(plan, steps=steps, update=update, second=second)


def _alone(plan: Plan) -> Plan:
    """Return a plan with only its transform and its contexts."""
    backward = "inside" if plan.backward == "under" else plan.backward
    alone = Plan(contexts=plan.contexts, backward=backward, transform=plan.transform)
    if alone.differentiates and backward == "none":
        return msgspec.structs.replace(alone, transform="vmap")
    return alone


def draw_program(
    source: Bytes,
    device: str,
    *,
    plan: Plan | None = None,
    ops: Sequence[Op] | None = None,
    focus: Sequence[Op] = (),
    forms: str | None = None,
    statements: int = _STATEMENTS,
    fused: bool = False,
) -> Program:
    """Draw a program whose statements come from a random few of `ops`, and from `focus`.

    ops: what to draw from (`usable` on the device); None is all of these. focus: the program has
    at least one of these ops, in its first statements. forms: the form of that statement. fused:
    for a backend that fuses ops: more chains, and more programs that return only their last values.
    """
    return _drawn(source, device, plan, ops, focus, forms, statements, fused)[0]


def _drawn(
    source: Bytes,
    device: str,
    plan: Plan | None,
    ops: Sequence[Op] | None,
    focus: Sequence[Op],
    forms: str | None,
    statements: int,
    fused: bool,
    recipes: Sequence[FP8] = (),
    caches: bool = False,
) -> tuple[Program, Values]:
    """Draw a program; return it with its values, by name."""
    pool = usable(CATALOGUE.values(), device) if ops is None else ops
    if plan is not None and plan.transform != "none":
        pool, focus = _transformable(pool) or pool, _transformable(focus)
    if not pool and not focus:
        raise ValueError(f"ops={ops!r} leaves nothing that can run on {device}")
    drawing = _ProgramDrawing(source, device, pool or focus, focus, forms, statements, fused)
    if recipes:
        drawing.quantise(recipes, caches)
    program = drawing.draw(plan)
    return program, {value.name: value for value in drawing.build.values}


def _transformable(ops: Sequence[Op]) -> tuple[Op, ...]:
    return tuple(op for op in ops if op.name not in _UNTRANSFORMABLE and not op.setup)


class _ProgramDrawing:
    def __init__(
        self,
        source: Bytes,
        device: str,
        pool: Sequence[Op],
        focus: Sequence[Op],
        form: str | None,
        limit: int,
        fused: bool,
    ) -> None:
        self.source, self.device, self.limit, self.form = source, device, limit, form
        i, j, k, rare, style = digits(source, len(_PALETTES), len(_DOMAINS), 2, 16, _STYLES)
        free = _FREE_FUSED if fused else _FREE
        path = stages(pool, style % len(IDIOMS)) if style >= free else []
        idiom = IDIOMS[style % len(IDIOMS)] if path else Idiom(())
        floats, domains = idiom.floats or _PALETTES, idiom.domains or _DOMAINS
        self.islands = idiom.islands
        palette = Palette(
            *(floats[i % len(floats)], domains[j % len(domains)], _LAYOUTS[k]),
            mixes=rare == 15,
            chains=bool(path),
            plain=4 if path else 7,
        )
        self.keeps = rare < (7 if fused else 11)
        self.build = ProgramBuilder(source, _policies(device), palette)
        # Swarm testing (Groce et al. 2012): a program of few ops repeats them and lets rare ones
        # meet; over many programs every pair comes up.
        start = self.start = integer(source, 0x10000)
        self.recipes: Sequence[FP8] = ()
        swarm = [_few(ops, start + i, _SWARM // len(path)) for i, ops in enumerate(path)]
        self.swarm = swarm or [_few(pool, start, min(_SWARM, len(pool)))]
        self.focus = [focus[integer(source, len(focus))]] if focus else []
        self.pool = pool
        self.count = self.step = 0

    def quantise(self, recipes: Sequence[FP8], caches: bool) -> None:
        """Give the program FP8 regions of these, and FP8 layers to half of its statements.

        caches: whether layers may keep their quantised weights.
        """
        layers = [op for op in self.pool if op.fp8]
        if not layers:
            return
        self.recipes, self.build.caches = recipes, caches
        others = [op for op in self.pool if not op.fp8] or layers
        self.swarm = [[*(layers * _SWARM)[: _SWARM // 2], *_few(others, self.start, _SWARM // 2)]]
        self.build.palette = replace(self.build.palette, chains=True, mixes=False)

    def draw(self, plan: Plan | None) -> Program:
        self.build.frame = _frame(plan, self.device)
        # Transforms of functions do not support checkpoints.
        self.checkpoints = plan is None or (plan.backward != "none" and plan.transform == "none")
        whole = None
        if self.recipes and (how := integer(self.source, 8)) != 7:
            # Mostly the whole program is in one region, as users enter it.
            whole = self.recipes[how * len(self.recipes) // 7]
            self.build.frame = _inner(self.build.frame, whole, self.device)
        body = self.body(0)
        if whole is not None:
            body = [Region(whole, tuple(body))]
        program = returning_all(Program(tuple(self.build.inputs), tuple(body), ()))
        # A returned value is rounded in memory. A compiler may keep other values unrounded.
        return program if self.keeps else returning_last(program)

    def body(self, depth: int) -> list[Node]:
        nodes: list[Node] = []
        while True:
            # One draw decides whether there is another node, and which: 0 is the end. It is drawn
            # even if no other may follow, so shrinking still finds it after removing a node.
            end, which, region, form = digits(self.source, 10 - 2 * depth, _SWARM, 10, FORMS)
            if self.count >= self.limit:
                break
            if nodes and end == 0 and not (self.focus and depth == 0):
                break
            if depth < _MAX_DEPTH and region >= (8 if self.islands else 9):
                nodes.append(self.region(depth))
            else:
                nodes.append(self.statement(which, form))
        return nodes

    def statement(self, which: int, number: int) -> Statement:
        swarm = self.swarm[self.step % len(self.swarm)]
        self.count, self.step = self.count + 1, self.step + 1
        form = None
        if self.focus and (self.count >= min(3, self.limit) or which % 3 == 0):
            op, form = self.focus.pop(), self.form
        else:
            op = swarm[which * len(swarm) // _SWARM]
        if form is None and not self.build.forms(op):
            op = next((o for o in swarm if self.build.forms(o)), CATALOGUE["mm"])
        return self.build.statement(op, form, number)

    def region(self, depth: int) -> Region:
        context = self.context()
        outer = self.build.frame
        self.build.frame = _inner(outer, context, self.device)
        enters = self.island() if isinstance(context, Autocast) and not context.enabled else []
        body = self.body(depth + 1)
        self.build.frame = outer
        if enters:
            self.step = len(self.swarm) - 1
        return Region(context, (*enters, *body))

    def island(self) -> list[Node]:
        """Draw how a program enters a region without autocast: mostly with a cast to float32.

        An idiom restarts there and ends after it: a float32 part has layers of its own and extends
        to the loss.
        """
        cast = CATALOGUE["float"]
        if not (self.build.palette.chains and cast in self.pool):
            return []
        how, number = digits(self.source, 4, FORMS)
        if not how:
            return []
        self.count, self.step = self.count + 1, 0
        return [self.build.statement(cast, None, number)]

    def context(self) -> Context:
        if self.recipes:
            how, which = digits(self.source, 8, len(self.recipes))
            if how < 4:
                return msgspec.structs.replace(self.recipes[which], enabled=how < 3)
        i = integer(self.source, 10)
        if i < 6 or (i < 8 and not self.checkpoints):
            context = draw_autocast(self.source, self.device)
            if self.islands and i % 2 and context.device is None:
                context = msgspec.structs.replace(context, enabled=False)
            return context
        if i < 8:
            selective = i == 6 and integer(self.source, 3) == 2
            return Checkpoint(use_reentrant=i == 7, selective=selective)
        return NoGrad() if i == 8 else InferenceMode()


def _few(ops: Sequence[Op], start: int, count: int) -> list[Op]:
    return [ops[_spread(start, i) % len(ops)] for i in range(count)]


def _spread(start: int, i: int) -> int:
    """Return the i-th number of a well-spread sequence: an integer hash, as in splitmix."""
    z = (start * 0x9E3779B9 + (i + 1) * 0x85EBCA6B) & 0xFFFFFFFF
    z = ((z ^ z >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    z = ((z ^ z >> 15) * 0x846CA68B) & 0xFFFFFFFF
    return z ^ z >> 16


def _frame(plan: Plan | None, device: str) -> Frame:
    frame = Frame(dtype=_table(device).default_dtype)
    if plan is None:
        return frame
    for context in plan.contexts if plan.thread != "inside" else ():
        frame = _inner(frame, context, device)
    return replace(
        frame,
        checkpoint=plan.checkpoint != "none"
        or plan.entry in _FUNCTIONS
        or plan.transform != "none",
        autocast=frame.autocast and plan.entry not in ("cast_inputs", "register_autocast"),
    )


def _inner(frame: Frame, context: Context, device: str) -> Frame:
    if isinstance(context, Autocast):
        if context.device not in (None, device):
            return frame
        dtype = context.dtype or frame.dtype
        supported = dtype in _table(device).supported_dtypes
        return replace(frame, autocast=context.enabled and supported, dtype=dtype)
    if isinstance(context, Checkpoint):
        return replace(frame, checkpoint=True)
    if isinstance(context, FP8):
        return replace(frame, block=32) if context.recipe in ("mxfp8", "nvfp4") else frame
    return replace(frame, grad=False)


def draw_case(
    source: Bytes,
    device: str = "cpu",
    *,
    trains: bool = True,
    ops: Sequence[Op] | None = None,
    focus: Sequence[Op] = (),
    form: str | None = None,
    statements: int = _STATEMENTS,
    fused: bool = False,
    precisions: Sequence[Precision] = (),
    varies: bool = False,
    settings: Sequence[str] = (),
    mixed: int = 0,
    recipes: Sequence[FP8] = (),
    caches: bool = False,
    again: int = 8,
    breaks: int = 0,
    lowers: bool = False,
    saves: int = 0,
) -> Case:
    """Draw a case for a device type.

    lowers: whether three programs of four have an op that autocast runs in 16 bits. recipes: the
    FP8 regions that programs may have. caches: whether FP8 layers may keep their quantised weights.
    again: of so many cases, one calls its program again under other contexts; 0: none does.

    What else is asked for is drawn last, so that the rest stays the same. precisions: of products.
    varies: for a device with nondeterministic kernels: some plans ask for deterministic algorithms.
    settings: that a plan may have; one plan in eight has one or two. mixed: of so many cases, one
    gets CPU tensors beside those of the device, if its program can have any; 0: none does. breaks:
    of so many cases, one has a part that compilers leave to eager; then, where a context is around
    the backward pass, half of the programs have a part without autocast, and half a layer, and no
    function is transformed. 0: none of that. saves: of so many cases, one saves its program and
    loads it; 0: none does.
    """
    plan = draw_plan(source, device, trains=trains, transforms=not breaks)
    if plan.transform != "none" and ops is not None and not _transformable(ops):
        plan = msgspec.structs.replace(plan, transform="none")
    if caches or any(context.recipe == "delayed" for context in recipes):
        plan = _several(source, plan)
    islands = breaks and plan.backward in ("inside", "under")
    if (lowers or islands) and not focus and integer(source, 4):
        focus = _lowered(ops, device)
    program, values = _drawn(
        source, device, plan, ops, focus, form, statements, fused, recipes, caches
    )
    plan = _sized(plan, program)
    case = Case(program, plan, integer(source, 0x10000))
    if again and not recipes and integer(source, again) == again - 1:
        if not focus and (lowered := _lowered(ops, device)):  # what shows the state of a call
            program, values = _drawn(source, device, plan, ops, lowered, None, statements, fused)
            case = msgspec.structs.replace(case, program=program)
        case = _again(source, case, device)
    if precisions:
        case = case.with_plan(precision=precisions[integer(source, len(precisions))])
    if varies and integer(source, 4) == 3:
        case = case.with_plan(deterministic=True)
    if settings:
        case = case.with_plan(settings=_settings(source, settings))
    if mixed and integer(source, mixed) == mixed - 1:
        plan, program = with_cpu_tensors(source, case.plan, case.program, values)
        case = msgspec.structs.replace(case, plan=plan, program=program)
    if islands and not case.plan.later and integer(source, 2):
        body = _wrapped(source, case.program.body, Autocast(enabled=False))
        case = case.with_program(body=body)
    whole = ops is None or any(op.name == _LAYER for op in ops)
    if islands and whole and not case.plan.later and integer(source, 2):
        case = msgspec.structs.replace(case, program=_head(source, case.program))
    if breaks and integer(source, breaks) == breaks - 1:
        case = case.with_program(body=_wrapped(source, case.program.body, Uncompiled()))
    if breaks and integer(source, 2 * breaks) == 2 * breaks - 1:
        case = case.with_program(body=_branching(source, case.program.body))
    if saves and integer(source, saves) == saves - 1:
        case = case.with_plan(saved=True)
    return case


def _sized(plan: Plan, program: Program) -> Plan:
    """Return a plan that does not push forward too many tangents."""
    trained = sum(math.prod(s.shape) for s in program.inputs if s.requires_grad)
    if plan.transform != "jacfwd" or trained <= _TANGENTS:
        return plan
    return msgspec.structs.replace(plan, transform="jvp")


_TANGENTS = 64


_LAYER = "mm"


def _head(source: Bytes, program: Program) -> Program:
    """Return a program with a float32 layer in a region without autocast, first or last.

    Its backward pass is cast where autocast is on around that.
    """
    last, rows, inner, columns = digits(source, 2, 4, 4, 4)
    count = len(program.inputs)
    x, w = f"x{count}", f"w{count + 1}"
    given = (
        TensorSpec(x, (rows + 1, inner + 1), "float32"),
        TensorSpec(w, (inner + 1, columns + 1), "float32", role="weight"),
    )
    made = f"v{sum(len(node.outputs) for node in statements(program.body))}"
    layer = Region(
        Autocast(enabled=False), (Statement(_LAYER, "function", (Ref(x), Ref(w)), outputs=(made,)),)
    )
    body = (*program.body, layer) if last else (layer, *program.body)
    return Program((*program.inputs, *given), body, (*program.outputs, made))


def _wrapped(source: Bytes, body: tuple[Node, ...], context: Context) -> tuple[Node, ...]:
    """Return a body with some nodes in a context, mostly inside a region."""
    inner = [(i, node) for i, node in enumerate(body) if isinstance(node, Region)]
    where, start, count = digits(source, len(inner) * 4 + 1, len(body), len(body))
    if where:
        i, node = inner[(where - 1) // 4]
        return (
            *body[:i],
            Region(node.context, _wrapped(source, node.body, context)),
            *body[i + 1 :],
        )
    end = start + 1 + count % (len(body) - start)
    return (*body[:start], Region(context, body[start:end]), *body[end:])


def _branching(source: Bytes, body: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return a body with a branch: half of the time in a function that opens a region."""
    opened = [i for i, node in enumerate(body) if isinstance(node, Region)]
    if not opened or integer(source, 2):
        return _wrapped(source, body, Branch())
    i = opened[integer(source, len(opened))]
    return (*body[:i], Region(Branch(), (body[i],)), *body[i + 1 :])


Low: TypeAlias = Literal["bfloat16", "float16"]
_REUSES: tuple[Reuse, ...] = ("calls", "graph", "region", "region")


def _lowered(ops: Sequence[Op] | None, device: str) -> list[Op]:
    """Return the ops that autocast runs in 16 bits on a device type."""
    pool = usable(CATALOGUE.values(), device) if ops is None else ops
    return [op for op in pool if policy_of(op, _policies(device)) == "lower_precision_fp"]


def _again(source: Bytes, case: Case, device: str) -> Case:
    """Return the case with one or two later calls in place of other ingredients."""
    plan, body = case.plan, case.program.body
    kind, which, more = digits(source, 4, _CALLS + 2, 3)
    sets = which >= _CALLS
    if sets:  # the default dtype, for contexts of the program that name none
        plan = msgspec.structs.replace(plan, contexts=())
        other: Low = "bfloat16" if _table(device).default_dtype == "float16" else "float16"
        around: list[tuple[Around, ...]] = [(AutocastDType(other),)]
        body = transform(body, region=_without_dtype)
        if not any(isinstance(context, Autocast) for context in regions(body)):
            body = (Region(Autocast(), body),)
    else:
        around = [_around(plan, which)]
        if more == 2:
            around.append(_around(plan, integer(source, _CALLS)))
    reuse: Reuse = "calls" if sets else _REUSES[kind]
    program = case.with_program(body=body).program
    if reuse == "region":  # whose results are no views of each other or of inputs
        program = returning_last(program)
        reuse = "graph" if any(spec.role == "buffer" for spec in program.inputs) else reuse
    made = Plan(
        contexts=plan.contexts,
        backward="none" if plan.backward == "none" else "outside",
        later=tuple(around),
        reuse=reuse,
    )
    return msgspec.structs.replace(case, plan=made, program=program)


_CALLS = 5


def _around(plan: Plan, which: int) -> tuple[Around, ...]:
    """Return what is around a later call: something else than around the first."""
    first = plan.contexts[-1].dtype if plan.contexts else None
    other = "float16" if first in (None, "bfloat16") else "bfloat16"
    if which < 2:
        return (Autocast(dtype=other),)
    choices: Sequence[tuple[Around, ...]] = (
        (Autocast(enabled=False),),
        (),
        (NoGrad(), *plan.contexts),
    )
    return choices[which - 2]


def _without_dtype(node: Region, body: tuple[Node, ...]) -> tuple[Region]:
    context = node.context
    if isinstance(context, Autocast):
        context = msgspec.structs.replace(context, dtype=None)
    return (Region(context, body),)


def _several(source: Bytes, plan: Plan) -> Plan:
    """Return a plan of more steps, for what comes from earlier ones; a quarter stay."""
    more = (1, 3, 4, 6)[integer(source, 4)]
    if plan.backward == "none" or plan.transform != "none":
        return plan
    return msgspec.structs.replace(plan, steps=max(plan.steps, more))


def _settings(source: Bytes, lines: Sequence[str]) -> tuple[str, ...]:
    """Draw none of some settings, one, or two that set different things."""
    if integer(source, 8) < 7:
        return ()
    first, second = (lines[integer(source, len(lines))] for _ in range(2))
    two = integer(source, 4) == 3 and SETTINGS[first].get != SETTINGS[second].get
    return (first, second) if two else (first,)
