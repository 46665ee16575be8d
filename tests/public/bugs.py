"""Public bugs of torch 2.13 on the CPU: how to tell that a divergence is one of them.

Each has an example, written by hand after the report, and near misses: cases that lack one
ingredient. A recogniser looks at a verdict, never at how the case came about; nothing here is told
to the strategies. `benchmarks/rediscovery.py` asks how soon these meet each bug.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from amp_fuzz.backends import backends
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import (
    Autocast,
    AutocastDType,
    DType,
    Node,
    Region,
    Statement,
    refs,
    regions,
    statements,
    uses,
)
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.oracle.labels import guilty_op
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.policies.tables import load_table
from amp_fuzz.records.schema import OWN
from amp_fuzz.upstream.explain import judge_of
from tests.helpers import BF16, F16, call, case, under, x

__all__ = ["BUGS", "Bug"]

OFF = Autocast(enabled=False)
LOW = ("bfloat16", "float16")
Recogniser = Callable[[Verdict], bool]


@dataclass(frozen=True)
class Bug:
    """One report. kind: of the example's divergence. near: cases that the recogniser refuses."""

    name: str
    what: str
    backend: str
    kind: str
    recognise: Recogniser
    example: Case
    near: tuple[Case, ...]


# -- what a verdict says ---------------------------------------------------------------------------


def known(verdict: Verdict, name: str) -> bool:
    return name in verdict.known.split("+")


def saw(verdict: Verdict, kinds: str) -> bool:
    """Return whether there is a divergence of one of these kinds; globs, one space apart."""
    found = verdict.divergence
    return found is not None and any(fnmatch.fnmatchcase(found.kind, k) for k in kinds.split())


def op_of(verdict: Verdict) -> str:
    assert verdict.divergence is not None
    return guilty_op(verdict.case, verdict.divergence)


def statement_of(verdict: Verdict) -> Statement | None:
    """Return the statement that made the value where the divergence shows."""
    assert verdict.divergence is not None
    label = verdict.divergence.where.rpartition(".")[2]
    body = statements(verdict.case.program.body)
    return next((s for s in body if label in s.outputs), None)


def widened(verdict: Verdict) -> bool:
    """Return whether a value is float32 where autocast says 16 bits."""
    found = verdict.divergence
    return saw(verdict, "dtype") and found.expected in LOW and found.observed == "float32"  # type: ignore[union-attr]


def islands(body: Sequence[Node]) -> Iterator[Region]:
    """Yield the regions in which autocast is off."""
    for node in body:
        if isinstance(node, Region):
            if isinstance(node.context, Autocast) and not node.context.enabled:
                yield node
            else:
                yield from islands(node.body)


def policy_of(op: str) -> str:
    """Return what the CPU's table says of an op, "" for nothing."""
    names = [o.removeprefix("aten::") for o in CATALOGUE[op].overloads]
    rules = load_table("cpu").rules
    return next((rules[n].policy.value for n in names if n in rules), "")


def agrees(verdict: Verdict, backend: str) -> bool:
    """Return whether the case agrees on another backend."""
    return judge_of(backends()[backend]).judge(verdict.case).divergence is None


def raises(verdict: Verdict) -> bool:
    """Return whether the case is to raise."""
    return backends()[verdict.backend].reference().run(verdict.case).raised is not None


def made_from(verdict: Verdict, names: Sequence[str]) -> list[Statement]:
    """Return the statements that these values come from, however far back."""
    made = {n: s for s in statements(verdict.case.program.body) for n in s.outputs}
    found: list[Statement] = []
    left = list(names)
    while left:
        statement = made.pop(left.pop(), None)
        if statement is not None:
            found.append(statement)
            left += uses(statement)
    return found


def sources(verdict: Verdict, names: Sequence[str]) -> set[str]:
    """Return the ops that these values come from, however far back."""
    return {statement.op for statement in made_from(verdict, names)}


# -- torch.compile ---------------------------------------------------------------------------------


def backward_under_forward(verdict: Verdict) -> bool:
    outside = verdict.case.plan.backward == "outside"
    return known(verdict, "compile-backward-autocast") and outside and saw(verdict, "grad-*")


def island_gradient(dtype: str) -> Recogniser:
    """Recognise the gradient of a float32 island that is computed in 16 bits."""

    def recognise(verdict: Verdict) -> bool:
        contexts = verdict.case.plan.contexts
        return (
            backward_under_forward(verdict)
            and bool(contexts)
            and contexts[-1].enabled
            and (contexts[-1].dtype or load_table("cpu").default_dtype) == dtype
            and in_island(verdict)
        )

    return recognise


def in_island(verdict: Verdict) -> bool:
    """Return whether the gradient that diverges is of a leaf that an island uses."""
    assert verdict.divergence is not None
    leaf = verdict.divergence.where.split(".")[-2]
    body = verdict.case.program.body
    return any(leaf in uses(s) for island in islands(body) for s in statements(island.body))


def leaks(verdict: Verdict) -> bool:
    case = verdict.case
    inside = case.plan.entry == "decorator" or any(
        isinstance(context, Autocast) for context in regions(case.program.body)
    )
    return saw(verdict, "state") and inside and raises(verdict)


def accepts_improbable(verdict: Verdict) -> bool:
    found = verdict.divergence
    return (
        saw(verdict, "raise")
        and op_of(verdict) == "binary_cross_entropy"
        and "should be between 0 and 1" in found.expected  # type: ignore[union-attr]
        and found.observed == "no error"  # type: ignore[union-attr]
    )


FACTORIES = ("ones_like", "zeros_like", "full_like", "new_full", "new_ones", "new_zeros")


def forgets_dtype(verdict: Verdict) -> bool:
    """Recognise a dtype that is another from a counted constant on, in Inductor alone."""
    statement = statement_of(verdict) if saw(verdict, "dtype") else None
    if statement is None:
        return False
    made = {n: s for s in statements(verdict.case.program.body) for n in s.outputs}
    come = made_from(verdict, statement.outputs)
    counted = [s for s in come if s.op == "cumsum" and "dtype" in dict(s.kwargs)]
    summed = [made.get(name) for s in counted for name in refs(s.args[0])]
    met = any(s is not None and s.op in FACTORIES for s in summed)
    return met and agrees(verdict, "compile[aot_eager_decomp_partition]")


EXTREMES = ("amax", "amin", "aminmax", "max", "min")


def rounds_twice(verdict: Verdict) -> bool:
    """Recognise that the largest of rounded values is compared with them before they were rounded.

    A compiler told to keep every rounding (``emulate_precision_casts``) finds it.
    """
    found = verdict.divergence
    if not saw(verdict, "value nonfinite grad-value grad-nonfinite"):
        return False
    ops = {s.op for s in statements(verdict.case.program.body)}
    if found.kind.startswith("grad"):  # type: ignore[union-attr]
        met = bool(ops & set(EXTREMES)) and "0 not finite" in found.expected  # type: ignore[union-attr]
    else:
        statement = statement_of(verdict)
        come = sources(verdict, [*uses(statement), *statement.outputs]) if statement else set()
        met = bool(come & set(EXTREMES)) and bool(come & {"eq", "ne", "lt", "le", "gt", "ge"})
    return met and agrees(verdict, "compile[inductor+casts]")


def keeps_overflow(verdict: Verdict) -> bool:
    """Recognise that eager overflows where the compiled program has a finite value."""
    found = verdict.divergence
    if not saw(verdict, "range") or "not finite" not in found.expected:  # type: ignore[union-attr]
        return False
    eager, compiled = (int(s.split()[0]) for s in (found.expected, found.observed))  # type: ignore[union-attr]
    return eager > compiled and "left the range" in found.expected  # type: ignore[union-attr]


# -- TorchScript and export ------------------------------------------------------------------------


def constant_weight(error: str) -> Recogniser:
    def recognise(verdict: Verdict) -> bool:
        found = verdict.divergence
        return known(verdict, "trace-weight-cache") and found.observed.startswith(error)  # type: ignore[union-attr]

    return recognise


def loses_region(verdict: Verdict) -> bool:
    """Recognise an op that is cast where it is exported whole, and not where it is taken apart."""
    if not saw(verdict, "dtype raise"):
        return False
    at = op_of(verdict)  # an error of the exported graph names no statement
    ops = [at] if at else [s.op for s in statements(verdict.case.program.body)]
    if not any(policy_of(op) for op in ops):
        return False
    mixed = "same dtype" in verdict.divergence.observed  # type: ignore[union-attr]
    return (widened(verdict) or mixed) and agrees(verdict, "export")


# -- transforms and functions ----------------------------------------------------------------------


def ambient_backward(verdict: Verdict) -> bool:
    return known(verdict, "func-grad-ambient-backward")


def other_dtype_backward(verdict: Verdict) -> bool:
    """Recognise backward ops in the dtype of the context around them, not of their forward ops."""
    contexts = verdict.case.plan.contexts
    dtypes = {
        context.dtype
        for context in regions(verdict.case.program.body)
        if isinstance(context, Autocast) and context.enabled and context.dtype in LOW
    }
    return (
        ambient_backward(verdict)
        and bool(contexts)
        and contexts[-1].enabled
        and bool(dtypes - {contexts[-1].dtype or load_table("cpu").default_dtype})
        and saw(verdict, "grad-bitwise")
    )


def norm_batching(verdict: Verdict) -> bool:
    if not known(verdict, OWN):
        return False
    norms = ("*layer_norm*", "*batch_norm*", "*group_norm*", "*instance_norm*")
    norm = any(fnmatch.fnmatchcase(op_of(verdict), pattern) for pattern in norms)
    return norm and verdict.case.plan.transform == "vmap_grad"


def bias_in_float32(verdict: Verdict) -> bool:
    if not (known(verdict, "transform-before-autocast") and widened(verdict)):
        return False
    statement = statement_of(verdict)
    if statement is None or statement.op != "linear":
        return False
    tensors = [n for arg in statement.args for n in refs(arg)]
    return len(tensors) == 3 and verdict.case.plan.transform.startswith("vmap")


def apart(verdict: Verdict) -> bool:
    return known(verdict, "custom-fwd-setup-context")


def foreign_half(verdict: Verdict) -> bool:
    return known(verdict, "promote-foreign-half") and saw(verdict, "raise")


def bias_not_asked(verdict: Verdict) -> bool:
    return known(verdict, "promote-skips-optional") and op_of(verdict) == "bilinear"


# -- the list --------------------------------------------------------------------------------------


def only(example: Case, *outputs: str) -> Case:
    """Return the case with these outputs: what is not returned need not exist in memory."""
    program = msgspec.structs.replace(example.program, outputs=outputs)
    return msgspec.structs.replace(example, program=program)


def bare(*args: object, **plan: object) -> Case:
    return case(*args, contexts=(), **plan)  # type: ignore[arg-type]


INPUTS = [x("x0", 8, 8), x("w1", 8, 8)]
MM = call("mm", "x0", "w1")
ISLAND = under(OFF, MM)
CONSTANT = "RuntimeError: Cannot insert a Tensor that requires grad as a constant"
NORMED = [x("x0", 3, 4), x("w1", 5, 4), x("w2", 5)]
NORM = (call("linear", "x0", "w1"), call("layer_norm", "v0", [5], "w2", to="v1"))
TWO_HALVES = [x("x0", 2, 3, dtype="bfloat16"), x("x1", 2, 3, dtype="float16")]
ARGUMENTS = ("x0", "x1", "x2", "x3")
BILINEAR = [
    x("x0", 2, 3, dtype="bfloat16"),
    x("x1", 2, 4, dtype="bfloat16"),
    x("x2", 5, 3, 4, dtype="bfloat16"),
]
HALVES = [x("x0", 4, 64, dtype="bfloat16")]
MASK = (
    call("mul", "x0", 0.3),
    call("amax", "v0", -1, True, to="v1"),
    call("eq", "v0", "v1", to="v2"),
)
TWO = [x("x0", 4, 4, domain="unit"), x("x1", 4, 4, domain="positive")]
UNITS = [x("x0", 4, 4, domain="unit"), x("x1", 4, 4, domain="unit")]
BCE = call("binary_cross_entropy", "x0", "x1")
HUGE = [x("x0", 8, 8, dtype="float16", domain="overflow")]
SQUARED = (call("mul", "x0", "x0"), call("float", "v0", form="method", to="v1"))


DEFAULT = (AutocastDType("float16"),)
MASKED = call("ones_like", "x0", dtype=DType("bool"))


BUGS = (
    Bug(
        "pytorch#157104",
        "the backward pass is traced under the forward's autocast",
        "compile[aot_eager+default]",
        "grad-value",
        backward_under_forward,
        case([x("w1", 8, 8)], call("linalg.inv", "w1")),
        (case([x("w1", 8, 8)], call("linalg.inv", "w1"), backward="inside"), case(INPUTS, MM)),
    ),
    Bug(
        "pytorch#153044",
        "the gradient of a float32 island is computed in float16",
        "compile[aot_eager+default]",
        "grad-value",
        island_gradient("float16"),
        case(INPUTS, ISLAND, contexts=(F16,)),
        (case(INPUTS, ISLAND), case(INPUTS, MM, contexts=(F16,))),
    ),
    Bug(
        "pytorch#179804",
        "the gradient of a float32 island is computed in bfloat16",
        "compile[aot_eager+default]",
        "grad-value",
        island_gradient("bfloat16"),
        case(
            [x("x0", 4, 8, dtype="bfloat16"), x("w1", 8, 8)],
            under(OFF, call("float", "x0", form="method"), call("mm", "v0", "w1", to="v1")),
        ),
        (case(INPUTS, ISLAND, contexts=(F16,)), case([x("w1", 8, 8)], call("linalg.inv", "w1"))),
    ),
    Bug(
        "pytorch#191110",
        "a context without a dtype keeps the default of its first call",
        "compile[aot_eager]",
        "dtype",
        partial(known, name="compile-default-dtype"),
        case(INPUTS, under(Autocast(), MM), contexts=(), later=(DEFAULT,)),
        (
            case(INPUTS, under(F16, MM), contexts=(), later=(DEFAULT,)),
            case(INPUTS, under(Autocast(), MM), contexts=(), later=((F16,),)),
        ),
    ),
    Bug(
        "compile-region-state",
        "a nested region runs under the state of another of its calls",
        "compile[aot_eager]",
        "dtype",
        partial(known, name="compile-region-state"),
        case(INPUTS, MM, later=((OFF,),), reuse="region"),
        (
            case(INPUTS, MM, later=((OFF,),), reuse="graph"),
            case(INPUTS, MM, later=((BF16,),), reuse="region"),
        ),
    ),
    Bug(
        "pytorch#195488",
        "an error inside a compiled region leaves autocast's nesting behind",
        "compile[eager]",
        "state",
        leaks,
        case(TWO, under(BF16, BCE), contexts=()),
        (case(TWO, BCE), case(UNITS, under(BF16, BCE), contexts=())),
    ),
    Bug(
        "pytorch#193757",
        "a compiled binary_cross_entropy accepts what is no probability",
        "compile[aot_eager_decomp_partition]",
        "raise",
        accepts_improbable,
        bare(TWO, BCE),
        (bare(UNITS, BCE),),
    ),
    Bug(
        "pytorch#189518",
        "cumsum of a constant forgets its dtype",
        "compile[inductor]",
        "dtype",
        forgets_dtype,
        bare([x("x0", 4, 4)], MASKED, call("cumsum", "v0", 1, dtype=DType("bfloat16"), to="v1")),
        (
            bare([x("x0", 4, 4)], MASKED, call("cumsum", "v0", 1, to="v1")),
            bare([x("x0", 4, 4, dtype="bool")], call("cumsum", "x0", 1, dtype=DType("bfloat16"))),
        ),
    ),
    Bug(
        "pytorch#195214",
        "a value equals its own largest element nowhere",
        "compile[inductor]",
        "value",
        rounds_twice,
        only(bare(HALVES, *MASK, call("sum.dim", "v2", -1, to="v3")), "v3"),
        (bare(HALVES, *MASK), only(bare([x("x0", 4, 64)], *MASK), "v2")),
    ),
    Bug(
        "pytorch#183607",
        "eager overflows float16 where the compiled program keeps float32",
        "compile[inductor]",
        "range",
        keeps_overflow,
        bare(HUGE, *SQUARED),
        (bare([x("x0", 8, 8, dtype="float16")], *SQUARED),),
    ),
    Bug(
        "pytorch#84092",
        "a weight that autocast has cached cannot be a constant of a trace",
        "trace[check]",
        "raise",
        constant_weight(CONSTANT),
        case(INPUTS, MM, call("mm", "v0", "w1", to="v1")),
        (case(INPUTS, MM, contexts=(Autocast(dtype="bfloat16", cache_enabled=False),)),),
    ),
    Bug(
        "pytorch#63552",
        "a trace fails its own check where autocast has cached a weight",
        "trace[check]",
        "raise",
        constant_weight(""),
        case(INPUTS, MM),
        (case(INPUTS, under(BF16, MM), contexts=()),),
    ),
    Bug(
        "pytorch#137274",
        "a composite op that is decomposed after the export has lost its region",
        "export[decomposed]",
        "dtype",
        loses_region,
        case([x("x0", 3, 4), x("x1", 4, 3)], call("einsum", "ij,jk->ik", "x0", "x1")),
        (case([x("x0", 3, 4), x("x1", 4, 3)], call("mm", "x0", "x1")),),
    ),
    Bug(
        "functorch#305",
        "backward ops of a transform run under the autocast around it",
        "eager-cpu",
        "grad-bitwise",
        ambient_backward,
        case(INPUTS, ISLAND, transform="grad", backward="inside"),
        (
            case(INPUTS, ISLAND, transform="grad", backward="outside"),
            case(INPUTS, ISLAND, backward="inside"),
        ),
    ),
    Bug(
        "pytorch#105682",
        "backward ops run in another 16-bit dtype than their forward ops",
        "eager-cpu",
        "grad-bitwise",
        other_dtype_backward,
        case(INPUTS, under(F16, MM), transform="grad", backward="inside"),
        (
            case(INPUTS, ISLAND, transform="grad", backward="inside"),
            case(INPUTS, under(BF16, MM), transform="grad", backward="inside"),
        ),
    ),
    Bug(
        "pytorch#184890",
        "norms raise in vmap of grad under autocast",
        "eager-cpu",
        "relation",
        norm_batching,
        case(NORMED, *NORM, transform="vmap_grad"),
        (case(NORMED, *NORM, transform="vmap"), case(NORMED, *NORM, transform="grad")),
    ),
    Bug(
        "pytorch#192617",
        "under vmap linear adds its bias in float32",
        "eager-cpu",
        "dtype",
        bias_in_float32,
        case(NORMED, call("linear", "x0", "w1", "w2"), transform="vmap"),
        (
            case(NORMED[:2], call("linear", "x0", "w1"), transform="vmap"),
            case(NORMED, call("linear", "x0", "w1", "w2"), transform="grad"),
        ),
    ),
    Bug(
        "pytorch#132388",
        "custom_bwd raises in a function with a setup_context",
        "eager-cpu",
        "raise",
        apart,
        case(INPUTS, MM, entry="setup_context"),
        (case(INPUTS, MM, entry="custom_fwd"),),
    ),
    Bug(
        "pytorch#132715",
        "an op that promotes raises for the other 16-bit dtype",
        "eager-cpu",
        "raise",
        foreign_half,
        case(TWO_HALVES, call("cat", ["x0", "x1"], 0)),
        (case([x("x0", 2, 3, dtype="bfloat16"), x("x1", 2, 3)], call("cat", ["x0", "x1"], 0)),),
    ),
    Bug(
        "pytorch#191125",
        "bilinear's bias is not asked, and is cast to what the other arguments decide",
        "fake-cuda",
        "dtype",
        bias_not_asked,
        case([*BILINEAR, x("x3", 5)], call("bilinear", *ARGUMENTS)),
        (
            case([*BILINEAR, x("x3", 5, dtype="bfloat16")], call("bilinear", *ARGUMENTS)),
            case([x("x0", 2, 3), *BILINEAR[1:], x("x3", 5)], call("bilinear", *ARGUMENTS)),
        ),
    ),
)
