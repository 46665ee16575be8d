"""Cases: a program, the plan that drives it, and a seed. Everything needed to run it again.

A case is canonical JSON, and its id a hash of that JSON: the same on every machine and version.
This module imports neither torch nor Hypothesis, and nothing that it reads is ever executed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from amp_fuzz.cases.literals import bits_of, numbers
from amp_fuzz.cases.program import (
    Arg,
    Around,
    Autocast,
    AutocastDType,
    Branch,
    Checkpoint,
    DType,
    Items,
    Node,
    NoGrad,
    Program,
    ProgramError,
    Region,
    Statement,
    TensorSpec,
    Uncompiled,
    check_context,
    regions,
    show_context,
    statements,
    substituted,
    transform,
    unwrapped,
)
from amp_fuzz.cases.settings import SETTINGS

__all__ = [
    "CUSTOM_OPS",
    "FORMAT",
    "FUNCTIONS",
    "Case",
    "CaseError",
    "Entry",
    "Plan",
    "Precision",
    "Reuse",
    "Transform",
    "Update",
    "load",
    "loads",
]

FORMAT = 1
MAX_CONTEXTS = 16  # like regions: CPython compiles at most 20 nested blocks
MAX_CALLS = 7

Entry: TypeAlias = Literal[
    "context",
    "decorator",
    "custom_fwd",
    "cast_inputs",
    "setup_context",
    "custom_op",
    "register_autocast",
    "function",
    "function_apart",
]
FUNCTIONS: tuple[Entry, ...] = (
    *("custom_fwd", "cast_inputs", "setup_context"),
    *("function", "function_apart"),
)
"""The entries with an ``autograd.Function`` whose backward runs the program again."""
CUSTOM_OPS: tuple[Entry, ...] = ("custom_op", "register_autocast")
Backward: TypeAlias = Literal["none", "outside", "inside", "under"]
Transform: TypeAlias = Literal[
    "none",
    "grad",
    "vmap",
    "vmap_grad",
    "functionalize",
    "jvp",
    "forward_ad",
    "jacrev",
    "jacfwd",
]
Precision: TypeAlias = Literal["default", "high", "highest"]
Reuse: TypeAlias = Literal["calls", "graph", "region"]
Update: TypeAlias = Literal["in_place", "copied", "data", "cast", "replaced", "frozen"]


class CaseError(ValueError):
    """A case that cannot be read. The message names the file, the place and the way out."""


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a program is driven.

    contexts: the autocast contexts around it, outermost first; none runs it bare.
    entry: how the innermost context is entered: a ``with`` block, autocast as a decorator, or an
        ``autograd.Function`` with ``custom_fwd`` and ``custom_bwd`` (its backward recomputes the
        program under the autocast state of its forward). ``cast_inputs`` is the same with
        ``cast_inputs=torch.float32``; ``setup_context`` is one whose forward gets no ``ctx``.
        ``custom_op`` makes the program the body of a `torch.library.custom_op`, whose backward
        recomputes it under the contexts around the backward pass; ``register_autocast`` is the
        same, but casts its inputs to float32. ``function`` and ``function_apart`` are
        ``custom_fwd`` and ``setup_context`` without the decorators: they need no autocast.
    backward: where the backward pass runs; ``under`` means under `backward_context`.
    second: what follows: another backward over the retained graph, or a double backward.
    steps: training steps with an update of the weights after each; `loop` says whether the steps
        and micro-batches share one context or enter it anew.
    first_pass: a forward pass in the same context first, under that mode.
    calls: how often the program is called in the context; the later calls are observed too. A
        custom op is called once, then the program itself, so weights are used inside and outside.
    later: what is around each further call of the program, outermost first, after the contexts are
        left. The backward pass is of all calls. It excludes every other ingredient.
    reuse: what a compiler is given of them: ``calls`` is the program, which is called again;
        ``graph`` is one function with all calls and the contexts around them; in ``region`` the
        program is a `torch.compiler.nested_compile_region` of that function.
    checkpoint: whether the whole program is one checkpoint. ``selective`` is one that is not
        reentrant, saves the results of products, and computes only the rest again.
    thread: ``inside`` calls the program in another thread within the context (autocast state is
        thread-local, so it runs bare); ``whole`` does everything in another thread.
    interrupted: an earlier pass ends in an exception inside the context, then weights change.
    scaler: the backward pass goes through a ``GradScaler`` and an optimiser step.
    transform: ``vmap`` calls the program on two copies of its inputs at once, its weights shared.
        ``grad`` takes gradients by ``torch.func.grad`` instead of a backward pass, ``vmap_grad``
        for each copy. ``jvp`` pushes tangents of the weights forward by `torch.func.jvp`,
        ``forward_ad`` by dual tensors of `torch.autograd.forward_ad`. ``jacrev`` and ``jacfwd``
        differentiate one sum of each output. Of all these, `backward` ``inside`` puts the contexts
        around the transform, ``outside`` into the transformed function.
        ``functionalize`` is the program without its in-place writes, before any backward pass. A
        transform excludes every other ingredient.
    precision: of products (matrix products and convolutions) of float32, on a backend that has a
        choice: `jax.default_matmul_precision`. ``default`` is what the environment says.
    deterministic: whether torch must use deterministic algorithms
        (`torch.use_deterministic_algorithms`); an op that has none then raises.
    settings: the lines that set what changes numbers: see `settings`.
    micro_batches: how many forward and backward passes a step has, each on inputs of half the
        values of the one before. Their gradients accumulate in the leaves.
    hook: of each weight. ``tensor`` is given the gradient before it is accumulated
        (`torch.Tensor.register_hook`), ``accumulated`` after that
        (`register_post_accumulate_grad_hook`). Each replaces it by half of it, computed by a
        product, which the autocast around the backward pass casts.
    update: how a step halves the weights. ``in_place`` multiplies them; ``copied`` copies into
        ``weight.data``, which no version counter sees. ``data`` sets ``weight.data`` to other
        memory, and ``cast`` to that of another dtype, as ``Module.to`` does. ``replaced`` has new
        leaves in place of the old ones, as ``load_state_dict(assign=True)`` has. ``frozen`` also
        turns ``requires_grad`` of every other weight off, or on again.
    saved: whether a program of TorchScript or `torch.export` is saved to a buffer, and what is
        loaded from it is called.
    """

    contexts: tuple[Autocast, ...] = (Autocast(dtype="bfloat16"),)
    entry: Entry = "context"
    backward: Backward = "outside"
    backward_context: Autocast | None = None
    second: Literal["none", "retain", "double"] = "none"
    steps: int = 1
    loop: Literal["outside", "inside"] = "outside"
    first_pass: Literal["none", "no_grad", "inference_mode"] = "none"
    calls: int = 1
    later: tuple[tuple[Around, ...], ...] = ()
    reuse: Reuse = "calls"
    checkpoint: Literal["none", "reentrant", "non_reentrant", "selective"] = "none"
    thread: Literal["none", "inside", "whole"] = "none"
    interrupted: bool = False
    scaler: bool = False
    transform: Transform = "none"
    precision: Precision = "default"
    deterministic: bool = False
    settings: tuple[str, ...] = ()
    micro_batches: int = 1
    hook: Literal["none", "tensor", "accumulated"] = "none"
    update: Update = "in_place"
    saved: bool = False

    def __str__(self) -> str:
        contexts = _shown(self.contexts)
        words = []
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if field.name != "contexts" and value != field.default:
                shown = show_context(value) if isinstance(value, Autocast) else value
                shown = f"({'; '.join(value)})" if field.name == "settings" else shown
                shown = f"({'; '.join(map(_shown, value))})" if field.name == "later" else shown
                words.append(f"{field.name}={shown}")
        return ", ".join([contexts, *words])

    def check(self) -> None:
        """Raise `ProgramError` unless the plan can be driven."""
        around = {"contexts": self.contexts, **self._later()}
        for name, contexts in around.items():
            if len(contexts) > MAX_CONTEXTS:
                raise ProgramError(f"$.{name} has {len(contexts)}: use {MAX_CONTEXTS} at most")
            for i, context in enumerate(contexts):
                check_context(context, f"$.{name}[{i}]")
        if self.backward_context is not None:
            check_context(self.backward_context, "$.backward_context")
        if (self.backward == "under") != (self.backward_context is not None):
            raise ProgramError("$.backward_context belongs to backward='under', and only to it")
        for name in ("steps", "calls", "micro_batches"):
            if not 1 <= getattr(self, name) <= 8:
                raise ProgramError(f"$.{name}={getattr(self, name)}: use 1 to 8")
        more = self.second != "none" or self.passes > 1 or self.scaler or self.hook != "none"
        if self.backward == "none" and more:
            raise ProgramError(
                "$.backward='none' leaves nothing for second, steps, scaler, micro_batches or hook"
            )
        if self.micro_batches > 1 and self.second != "none":
            raise ProgramError(f"$.micro_batches={self.micro_batches} needs second='none'")
        if self.update != "in_place" and (self.steps == 1 or self.scaler or self.hook != "none"):
            raise ProgramError(f"$.update={self.update!r} needs steps, and no scaler or hook")
        if self.entry not in _BARE and not self.contexts:
            raise ProgramError(f"$.entry={self.entry!r} needs a context")
        if unknown := [line for line in self.settings if line not in SETTINGS]:
            raise ProgramError(f"$.settings has {unknown[0]!r}: use {', '.join(SETTINGS)}")
        if self.transform != "none":
            self._check_alone("transform", "backward", "backward_context")
        if self.differentiates and self.backward not in ("outside", "inside"):
            raise ProgramError(f"$.transform={self.transform!r} needs backward outside or inside")
        if self.later:
            self._check_alone("later", "reuse", "backward")
            if self.backward not in ("none", "outside"):
                raise ProgramError("$.later needs backward='none' or 'outside'")
        elif self.reuse != "calls":
            raise ProgramError(f"$.reuse={self.reuse!r} belongs to $.later, and only to it")

    def _later(self) -> dict[str, tuple[Around, ...]]:
        if len(self.later) > MAX_CALLS:
            raise ProgramError(f"$.later has {len(self.later)} calls: use {MAX_CALLS} at most")
        return {f"later[{i}]": contexts for i, contexts in enumerate(self.later)}

    def _check_alone(self, name: str, *with_it: str) -> None:
        """Raise `ProgramError` unless an ingredient stands alone, but for what may be with it."""
        free = (name, *with_it, "contexts", "precision", "deterministic", "settings", "saved")
        others = [f for f in msgspec.structs.fields(self) if f.name not in free]
        if wrong := [f.name for f in others if getattr(self, f.name) != f.default]:
            value = getattr(self, name)
            shown = f"={value!r}" if isinstance(value, str) else ""
            raise ProgramError(f"$.{name}{shown} stands alone: leave out {', '.join(wrong)}")

    @property
    def passes(self) -> int:
        """How many forward and backward passes all steps have."""
        return self.steps * self.micro_batches

    @property
    def differentiates(self) -> bool:
        """Whether derivatives are those of a transform, and no backward pass follows."""
        return self.transform not in ("none", "vmap", "functionalize")


def _shown(contexts: Sequence[Around]) -> str:
    return " > ".join(map(show_context, contexts)) or "bare"


# The entries that need no autocast context.
_BARE = ("context", "custom_op", "function", "function_apart")

# The fields that were added later, at their defaults.
_LATER = (
    b',"later":[],"reuse":"calls"',
    b',"transform":"none"',
    b',"precision":"default"',
    b',"deterministic":false',
    b',"settings":[]',
    b',"micro_batches":1',
    b',"hook":"none"',
    b',"update":"in_place"',
    b',"saved":false',
    b',"selective":false',
    b',"values":""',
    b',"device":""',
)


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """A program, its plan, and the seed of its input values. `version` is the format's."""

    program: Program
    plan: Plan = Plan()
    seed: int = 0
    version: int = FORMAT

    @cached_property
    def id(self) -> str:
        """Sixteen hex digits of a hash of the canonical JSON."""
        return hashlib.blake2b(self.json(), digest_size=8).hexdigest()

    def json(self) -> bytes:
        """Return the canonical JSON: every field, in order, without spaces.

        A field that was added later is left out at its default, so older cases keep their ids.
        """
        text = msgspec.json.encode(self)
        # Quotes inside a string are escaped: these bytes can only be the fields of these names.
        for default in _LATER:
            text = text.replace(default, b"")
        return text

    def with_plan(self, **fields: object) -> Case:
        """Return the case with other fields of its plan."""
        return msgspec.structs.replace(self, plan=msgspec.structs.replace(self.plan, **fields))

    def with_program(self, **fields: object) -> Case:
        """Return the case with other fields of its program."""
        program = msgspec.structs.replace(self.program, **fields)
        return msgspec.structs.replace(self, program=program)

    def __str__(self) -> str:
        return f"case {self.id} seed={self.seed}\nplan: {self.plan}\n{self.program}"


def loads(text: bytes | str, where: str = "case") -> Case:
    """Read a case from JSON and check all that can be checked without the catalogue.

    Raises `CaseError` with one line that names the place: ``case: $.program.body[2].op: ...``.
    """
    try:
        head = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CaseError(
            f"{where}: not JSON, or cut short ({error}): write the file again, or restore it"
        ) from error
    version = head.get("version", FORMAT) if isinstance(head, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise CaseError(
            f"{where}: $.version={version} was written by a newer amp-fuzz (this one reads up to "
            f"{FORMAT}): upgrade amp-fuzz"
        )
    try:
        case = msgspec.convert(head, Case)
        case.program.check()
        case.plan.check()
        _check_writes(case)
        if not 0 <= case.seed < 2**32:
            raise ProgramError(f"$.seed={case.seed}: use 0 to {2**32 - 1}")
    except (msgspec.ValidationError, ProgramError, RecursionError) as error:
        raise CaseError(f"{where}: {error}") from error
    return case


def _check_writes(case: Case) -> None:
    """Raise `ProgramError` for a custom op that writes its inputs: it declares that it does not."""
    written = [spec.name for spec in case.program.inputs if spec.role == "buffer"]
    if written and case.plan.entry in CUSTOM_OPS:
        raise ProgramError(
            f"$.plan.entry={case.plan.entry!r} takes no inputs that are written: {written[0]}"
        )


def load(path: Path | str) -> Case:
    """Read a case file. Raises `CaseError` for what cannot be read, naming the file."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise CaseError(f"{path}: {error.strerror}: give the path of a case file") from error
    return loads(text, str(path))


def bare(case: Case) -> Case:
    """Return the case without autocast contexts, which is what enabled=False means."""
    bare = case.with_program(body=unwrapped(case.program.body, (Autocast,)))
    backward = "outside" if case.plan.backward == "under" else case.plan.backward
    plain = (Autocast, AutocastDType)
    later = tuple(tuple(c for c in call if not isinstance(c, plain)) for call in case.plan.later)
    return bare.with_plan(
        contexts=(), later=later, entry="context", backward_context=None, backward=backward
    )


def unentered(case: Case) -> Case:
    """Return the case without autocast contexts, its program entered as it is with them."""
    return bare(case).with_plan(entry=_UNENTERED.get(case.plan.entry, case.plan.entry))


_UNENTERED: Mapping[Entry, Entry] = {
    "decorator": "context",
    "custom_fwd": "function",
    "cast_inputs": "function",
    "setup_context": "function_apart",
    "register_autocast": "custom_op",
}


def each_call(case: Case) -> dict[str, Case]:
    """Return each call of a case with later ones alone, by the prefix of its labels."""
    around: dict[str, tuple[Around, ...]] = {"": case.plan.contexts}
    around |= {f"later{i}.": contexts for i, contexts in enumerate(case.plan.later)}
    return {prefix: _call(case, contexts) for prefix, contexts in around.items()}


def in_a_row(case: Case) -> tuple[Case, dict[str, str]]:
    """Return a case whose program makes each call of a case, and the name there of each label.

    Raises `ProgramError` if contexts are in too many others.
    """
    body: list[Node] = []
    outputs: list[str] = []
    names: dict[str, str] = {}
    for i, (prefix, call) in enumerate(each_call(case).items()):
        made = [n for s in statements(call.program.body) for n in s.outputs if n != "_"]
        here = {n: f"v{70 + i}{n[1:]:0>4}" for n in made}

        def renamed(node: Statement, here: dict[str, str] = here) -> tuple[Statement]:
            outputs = tuple(here.get(n, n) for n in node.outputs)
            return (msgspec.structs.replace(substituted(node, here), outputs=outputs),)

        part = transform(call.program.body, statement=renamed)
        for context in reversed(call.plan.contexts):
            part = (Region(context, part),)
        body += part
        outputs += [here.get(n, n) for n in call.program.outputs]
        names |= {prefix + n: here[n] for n in made}
    row = case.with_program(body=tuple(body), outputs=tuple(outputs))
    row = row.with_plan(contexts=(), later=(), reuse="calls")
    row.program.check()
    return row, names


def _call(case: Case, around: tuple[Around, ...]) -> Case:
    dtypes = [c.dtype for c in around if isinstance(c, AutocastDType)]
    contexts = tuple(c for c in around if isinstance(c, Autocast))
    body = case.program.body
    if any(isinstance(c, NoGrad) for c in around):
        body = (Region(NoGrad(), body),)
    alone = case.with_program(body=body).with_plan(contexts=contexts, later=(), reuse="calls")
    return _named(alone, dtypes[-1]) if dtypes else alone


def _named(case: Case, dtype: str) -> Case:
    """Return the case with a dtype for each context of the device under test that names none."""

    def named(context: Autocast) -> Autocast:
        other = context.dtype or context.device
        return context if other else msgspec.structs.replace(context, dtype=dtype)

    return _changed(case, named)


def uses_autocast(case: Case) -> bool:
    """Return whether a case enters an autocast context anywhere."""
    later = any(isinstance(c, Autocast) for call in case.plan.later for c in call)
    around = later or any((*case.plan.contexts, case.plan.backward_context))
    return around or has_context(case.program.body, Autocast)


def inferring(case: Case) -> Case:
    """Return a case that never asks for a gradient or changes a weight."""
    return case.with_plan(
        backward="none",
        backward_context=None,
        second="none",
        steps=1,
        loop="outside",
        scaler=False,
        interrupted=False,
        micro_batches=1,
        hook="none",
        update="in_place",
    )


_BREAKS = (Uncompiled, Branch)


def breaks_graphs(case: Case) -> bool:
    """Return whether compilers end a graph in the middle of the program."""
    return any(isinstance(context, _BREAKS) for context in regions(case.program.body))


def unbroken(case: Case) -> Case:
    """Return a case in which compilers have no reason to end a graph."""
    return case.with_program(body=unwrapped(case.program.body, _BREAKS))


def unselective(case: Case) -> Case:
    """Return a case whose selective checkpoints compute everything again."""

    def region(node: Region, body: tuple[Node, ...]) -> tuple[Region]:
        selective = isinstance(node.context, Checkpoint) and node.context.selective
        return (Region(Checkpoint() if selective else node.context, body),)

    whole = case.plan.checkpoint
    plain = case.with_plan(checkpoint="non_reentrant" if whole == "selective" else whole)
    return plain.with_program(body=transform(case.program.body, region=region))


def retyped(spec: TensorSpec, dtype: str) -> TensorSpec:
    """Return a floating input in another dtype, with the elements that it holds, rounded."""
    values = bits_of(numbers(spec.values, spec.dtype), dtype) if spec.values else ""
    return msgspec.structs.replace(spec, dtype=dtype, values=values)


def single(case: Case) -> Case:
    """Return the case with float32 for each 16-bit floating dtype that it names.

    A program whose operands agree only through autocast's casts can then run without them. Values
    keep their domain, or the elements that the case holds.
    """

    def tensor(spec: TensorSpec) -> TensorSpec:
        return retyped(spec, "float32") if spec.dtype in _NARROW else spec

    def argument(arg: Arg) -> Arg:
        if isinstance(arg, Items):
            return Items(tuple(map(argument, arg.items)))
        return DType("float32") if isinstance(arg, DType) and arg.name in _NARROW else arg

    def call(node: Statement) -> tuple[Statement]:
        args = tuple(map(argument, node.args))
        kwargs = tuple((name, argument(a)) for name, a in node.kwargs)
        return (msgspec.structs.replace(node, args=args, kwargs=kwargs),)

    inputs = tuple(map(tensor, case.program.inputs))
    return case.with_program(inputs=inputs, body=transform(case.program.body, statement=call))


_NARROW = ("bfloat16", "float16")


def map_autocast(case: Case, **changes: object) -> Case:
    """Return the case with these fields changed in each of its autocast contexts."""
    return _changed(case, lambda context: msgspec.structs.replace(context, **changes))


def _changed(case: Case, change: Callable[[Autocast], Autocast]) -> Case:
    def region(node: Region, body: tuple[Node, ...]) -> tuple[Region]:
        context = node.context
        return (Region(change(context) if isinstance(context, Autocast) else context, body),)

    under = case.plan.backward_context
    changed = case.with_program(body=transform(case.program.body, region=region))
    return changed.with_plan(
        contexts=tuple(change(c) for c in case.plan.contexts),
        later=tuple(
            tuple(change(c) if isinstance(c, Autocast) else c for c in call)
            for call in case.plan.later
        ),
        backward_context=None if under is None else change(under),
    )


def opened(case: Case, device: str) -> Iterator[tuple[Autocast, bool]]:
    """Yield the contexts of a case, and whether one around it sets the dtype of the device."""

    def sets(context: Autocast) -> bool:
        return context.dtype is not None and context.device in (None, device)

    def walk(body: tuple[Node, ...], inherits: bool) -> Iterator[tuple[Autocast, bool]]:
        for node in body:
            if isinstance(node, Statement):
                continue
            inner = inherits
            if isinstance(node.context, Autocast):
                yield node.context, inherits
                inner |= sets(node.context)
            yield from walk(node.body, inner)

    inherits = False
    for context in case.plan.contexts:
        yield context, inherits
        inherits |= sets(context)
    yield from walk(case.program.body, inherits)
    if case.plan.backward_context is not None:
        yield case.plan.backward_context, False


def has_context(body: tuple[Node, ...], kind: type[Checkpoint] | type[Autocast]) -> bool:
    """Return whether a body contains a region of that kind."""
    return any(
        isinstance(n, Region) and (isinstance(n.context, kind) or has_context(n.body, kind))
        for n in body
    )
