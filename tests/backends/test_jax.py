"""JAX: recordings, lowerings, the process that they run in, and what is found there."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from amp_fuzz.backends.harness import Observation, quiet
from amp_fuzz.backends.jax.backend import JaxBackend, backends, record
from amp_fuzz.backends.jax.lowerings.missing import NOT_LOWERED
from amp_fuzz.backends.jax.platforms import Platform
from amp_fuzz.backends.process import Apart
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import DType, InferenceMode, NoGrad
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.oracle.trial import Trial
from amp_fuzz.upstream import quirks, shipped
from amp_fuzz.upstream.explain import Explainer, judge_of
from tests.faults.lowerings import FAULTS
from tests.helpers import BF16, F16, call, case, drawn, stored, under, x

pytestmark = pytest.mark.thorough

BACKENDS = {b.name: b for b in backends() if isinstance(b, JaxBackend)}
JAX = BACKENDS["jax"]
READY = JAX.availability().status == "ready"
needs_jax = pytest.mark.skipif(not READY, reason="needs JAX: pip install 'amp-fuzz[jax]'")

CASES = stored("jax_faults")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[JaxBackend, Path]]:
    """Return JAX op by op, and the file that says which fault it has."""
    file = tmp_path_factory.mktemp("jax") / "fault"
    file.write_text("")
    process = Apart("tests.faults.lowerings:Faulty", str(file), "cuda", False, False)
    yield JaxBackend(process=process), file
    process.close()


@pytest.fixture(scope="module")
def jitted() -> Iterator[JaxBackend]:
    yield BACKENDS["jax[jit]"]
    BACKENDS["jax[jit]"].process.close()


# -- what is recorded: needs no JAX -------------------------------------------------------------


def recorded(one: Case) -> list[str]:
    seen, recorder = record(JAX.fit(one), JAX.reference())
    assert (seen.raised, recorder.failed) == (None, None)
    return [step.op for step in recorder.recording.steps]


def test_casts_are_written_out_once_for_a_weight() -> None:
    """The reference's cache keeps the cast: the gradient of its uses is summed in 16 bits."""
    one = case(
        [x("x0", 2, 2), x("w1", 2, 2)], call("mm", "x0", "w1"), call("mm", "w1", "x0", to="v1")
    )
    steps = [op for op in recorded(one) if op in ("_to_copy.default", "mm.default")]
    assert Counter(steps) == {"_to_copy.default": 3, "mm.default": 2}


def test_the_policies_are_those_of_the_device() -> None:
    one = case([x("x0", 2, dtype="bfloat16")], call("exp", "x0"), backward="none")
    dtypes = {}
    for name in ("jax", "jax[cpu]"):
        value = BACKENDS[name].reference().run(one).values["v0"]
        assert value is not None
        dtypes[name] = value.dtype
    assert dtypes == {"jax": torch.float32, "jax[cpu]": torch.bfloat16}


def test_what_is_random_is_taken_from_the_reference() -> None:
    one = case([x("x0", 8)], call("dropout", "x0", p=0.5, training=True), backward="none")
    _, recorder = record(one, JAX.reference())
    (drawn_,) = [s for s in recorder.recording.steps if s.drawn is not None]
    assert drawn_.op.startswith("bernoulli")


def test_the_plan_is_what_jax_can_be_asked_for() -> None:
    one = case(
        [x("x0", 2, 2), x("w1", 2, 2)],
        under(InferenceMode(), call("mm", "x0", "w1")),
        backward="inside",
        contexts=(BF16,),
        steps=2,
        loop="inside",
    )
    fitted = JAX.fit(one)
    assert (fitted.plan.backward, fitted.plan.steps) == ("outside", 1)
    assert fitted.program.body == (under(NoGrad(), call("mm", "x0", "w1")),)


class Here:
    """A process that is none: what it answers was made before."""

    def __init__(self, seen: Observation) -> None:
        self.seen = seen

    def run(self, case: Case) -> Observation:
        return self.seen

    def said(self) -> Platform:
        return Platform("cpu", "cpu")


def test_a_nan_that_a_sum_loses_is_not_of_range() -> None:
    """No order of adding loses it, so that it is no `xla-range`."""
    one = JAX.fit(case([x("x0", 2, values=f"7fc00000{INF}")], call("sum", "x0"), contexts=()))
    seen = JAX.reference().run(one)
    seen.values["v0"] = torch.tensor(3.0)
    with quiet():
        honest = dataclasses.replace(BACKENDS["jax[jit]"], process=Here(seen))
        verdict = judge_of(honest, shipped()).judge(one)
    assert verdict.divergence is not None
    assert (verdict.outcome, verdict.divergence.kind) == ("backend", "nonfinite")


@pytest.mark.parametrize(
    ("jit", "factor", "outcome"),
    [
        (True, 1 + 2e-7, "agreed"),
        (False, 1 + 2e-7, "backend"),
        (True, 1.01, "backend"),
        (False, 1.01, "backend"),
    ],
)
def test_two_calls_of_one_compiled_program_may_round_otherwise(
    jit: bool, factor: float, outcome: str
) -> None:
    """Each is judged by rounding all the same; op by op they are equal bit for bit."""
    one = case([x("x0", 8, 8)], call("softmax", "x0", -1), backward="none", calls=2)
    fitted = JAX.fit(one)
    assert fitted.plan.calls == 2
    seen = JAX.reference().run(fitted)
    second = seen.values["call1.v0"]
    assert second is not None
    seen.values["call1.v0"] = second * factor
    assert not torch.equal(second, second * factor)
    honest = BACKENDS["jax[jit]" if jit else "jax"]
    assert honest.repeats == (not jit)
    with quiet():
        verdict = judge_of(dataclasses.replace(honest, process=Here(seen))).judge(one)
    assert verdict.outcome == outcome
    if not jit and factor < 1.01:
        assert verdict.divergence is not None
        assert verdict.divergence.where == "second call: call1.v0"


@needs_jax
def test_what_is_not_lowered_is_said_and_not_drawn() -> None:
    assert set(NOT_LOWERED) < set(CATALOGUE)
    assert all(len(why) > 10 for why in NOT_LOWERED.values())
    assert not JAX.supports("topk", "function")
    assert JAX.supports("mm", "function")


def test_it_says_how_to_get_jax() -> None:
    if READY:
        detail = JAX.availability().detail
        assert f"{len(CATALOGUE) - len(NOT_LOWERED)} of {len(CATALOGUE)} ops lowered" in detail
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "import importlib.metadata as m\n"
        "plain = m.version\n"
        "def version(name):\n"
        "    if name == 'jax': raise m.PackageNotFoundError(name)\n"
        "    return plain(name)\n"
        "m.version = version\n"
        "from amp_fuzz.backends.jax.backend import backends\n"
        "print(backends()[0].availability())\n"
        "print([n for n in sys.modules if n.partition('.')[0] in ('jax', 'jaxlib')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "Availability(status='missing', detail=\"pip install 'amp-fuzz[jax]'\")",
        "['jax']",
    ]


# -- honest -------------------------------------------------------------------------------------

# One of each file of lowerings, and where torch's conventions are not JAX's.
SAMPLE = ("add", "mm", "addmm", "conv2d", "layer_norm", "softmax", "sum.dim", "index_select")
SAMPLE += ("max_pool2d", "clamp", "interpolate", "linalg.inv", "huber_loss", "where", "cat")


@needs_jax
def test_lowerings_do_as_torch_does(faulty: tuple[JaxBackend, Path]) -> None:
    """Shapes, dtypes and values, forward and backward, as a run judges them."""
    assert conformance(faulty[0], [op for op in SAMPLE if op in CATALOGUE]) > 12


@needs_jax
@pytest.mark.parametrize("heads", [(), (2,)], ids=["math", "flash"])
@pytest.mark.parametrize(
    ("dtype", "mask"),
    [("bool", "000000010101000100"), ("float32", "ff800000" * 3 + "00000000" * 3 + "ff800000" * 3)],
)
def test_rows_that_a_mask_takes_out_are_zeros(
    jitted: JaxBackend, heads: tuple[int, ...], dtype: DType, mask: str
) -> None:
    shape = (1, *heads, 3, 4)
    inputs = [*(x(f"w{i}", *shape) for i in range(3)), x("x3", 3, 3, dtype=dtype, values=mask)]
    attention = call("scaled_dot_product_attention", "w0", "w1", "w2", attn_mask="x3")
    with quiet():
        verdict = judge_of(jitted, shipped()).judge(case(inputs, attention, contexts=()))
    assert verdict.outcome == "agreed", verdict.divergence


@needs_jax
@pytest.mark.slow
def test_all_lowerings_do_as_torch_does(faulty: tuple[JaxBackend, Path]) -> None:
    usable = (op for op in CATALOGUE.values() if op.devices is None or "cuda" in op.devices)
    assert conformance(faulty[0], [op.name for op in usable if op.name not in NOT_LOWERED]) > 450


def conformance(backend: JaxBackend, ops: list[str]) -> int:
    """Judge a draw of each op; return how many agree."""
    judge, agreed = judge_of(backend, shipped()), 0
    with quiet():
        for name in ops:
            for one in drawn(1, "cuda", ops=[name], seed=f"jax/{name}", statements=1):
                verdict = judge.judge(one)
                assert verdict.outcome != "diverged", f"{name}: {verdict.divergence}\n{one}"
                agreed += verdict.outcome == "agreed"
    return agreed


@needs_jax
def test_a_compiled_program_agrees(jitted: JaxBackend) -> None:
    one = case(
        [x("x0", 4, 3), x("w1", 3, 5), x("w2", 5)],
        call("mm", "x0", "w1"),
        under(F16, call("add", "v0", "w2", to="v1")),
        under(NoGrad(), call("softmax", "v1", -1, to="v2")),
        contexts=(BF16,),
    )
    with quiet():
        verdict = judge_of(jitted, shipped()).judge(one)
    assert (verdict.outcome, verdict.platform) == ("agreed", "cpu")


HEADS = x("w0", 1, 2, 3, 4)


@needs_jax
@pytest.mark.parametrize(
    "one",
    [
        case([x("w0", 4)], call("rrelu", "w0")),
        case([HEADS], call("scaled_dot_product_attention", "w0", "w0", "w0")),
        case([x("w0", 4)], call("dropout", "w0", p=0.0, training=True)),
        case([x("w0", 4)], call("dropout", "w0", p=0.5, training=True)),
    ],
    ids=["rrelu", "attention", "no-dropout", "dropout"],
)
def test_what_may_draw_has_a_gradient(faulty: tuple[JaxBackend, Path], one: Case) -> None:
    """The kernels of the first two draw only where something is trained, or dropped."""
    with quiet():
        assert judge_of(faulty[0]).judge(one).outcome == "agreed"


@needs_jax
def test_gradients_are_torch_s_where_jax_has_another_convention(
    faulty: tuple[JaxBackend, Path],
) -> None:
    """At a bound of a clamp JAX shares a gradient, and the norm of zeros has NaN."""
    one = case(
        [x("w0", 4, domain="integers"), x("w1", 3, domain="zeros")],
        call("clamp", "w0", -1.0, 1.0),
        call("linalg.vector_norm", "w1", to="v1"),
        call("relu", "w1", to="v2"),
        contexts=(),
    )
    with quiet():
        assert judge_of(faulty[0]).judge(one).outcome == "agreed"


INF, ZEROS, BIG = "7f800000", "00000000", "7f0000007e8000007f000000"
SMOOTH, BIG_GRAD = ("silu", "mish", "gelu"), "5f0ac723" * 4  # 1e19, which times 1e38 is beyond it
SQUARED = "71c9f2ca7149f2caf2177617"  # 2e30, 1e30, -3e30: their squares leave the range


@needs_jax
@pytest.mark.parametrize(
    "one",
    [
        case(
            [x("w0", 1, values="3f000000"), x("x1", 2, values=f"{INF}bf800000")],
            call("prelu", "x1", "w0"),
            contexts=(),
        ),
        case([x("w0", 2, values=f"{ZEROS}{INF}")], call("min", "w0"), contexts=()),
        case(
            [x("x0", 3, 3, dtype="float16"), x("x1", 3), x("x2", 3)],
            call("addr", "x0", "x1", "x2", beta=0.5),
            contexts=(),
        ),
        case(
            [x("x0", dtype="float64"), x("x1", 3, dtype="bfloat16"), x("x2", 3, dtype="bfloat16")],
            call("addr", "x0", "x1", "x2"),
            contexts=(),
        ),
        case(
            [x("x0", 1, 1, 3, values=BIG), x("x1", 1), x("x2", 1)],
            call("batch_norm", "x0", "x1", "x2", None, None, True, momentum=0.5, eps=0.5),
            contexts=(),
        ),
        case(
            [x("x0", 3, 2, values=SQUARED * 2, layout="transposed"), x("x1", 2), x("x2", 2)],
            call("batch_norm", "x0", "x1", "x2", None, None, True, momentum=0.5, eps=0.5),
            contexts=(),
        ),
        case(
            [
                x("x0", 4, 3, 2, dtype="bfloat16"),
                *(x(f"x{i}", 3, dtype="bfloat16") for i in (1, 2)),
            ],
            call(
                "_native_batch_norm_legit_functional",
                *("x0", "x1", "x1", "x1", "x2", True, 0.5, 0.5),
                form="overload",
                to="v0 v1 v2 v3 v4",
            ),
            backward="none",
            contexts=(),
        ),
        case(
            [x("x0", 3, values=f"ff800000{INF}40800000")],
            call("pow.Tensor_Scalar", "x0", -0.5),
            call("pow.Tensor_Scalar", "x0", 0.5, to="v1"),
            contexts=(),
        ),
        case(
            [x("x0", 2, 2, values=f"7fc00000{ZEROS * 2}40800000")],
            call("pdist", "x0", p=math.inf),
            call("cdist", "x0", "x0", math.inf, to="v1"),
            contexts=(),
        ),
        case(
            [x("x0", 3, 3, values=f"7f000000{ZEROS * 3}7f000000{ZEROS * 3}ff000000")],
            call("trace", "x0"),
            contexts=(),
        ),
        case(
            [x("x0", 2, 2, domain="positive"), x("x1", 2, 2, dtype="float64")],
            call("linalg.solve_triangular", "x0", "x1", upper=True),
            contexts=(),
        ),
        case(
            [x("w0", 4, values=f"7fc00000{INF}3f800000{ZEROS}")],
            call("clamp", "w0", 0, 6.0),
            call("clamp_min", "w0", 0.5, to="v1"),
            call("clamp_max", "w0", 0.5, to="v2"),
            contexts=(),
        ),
        case(
            [x("w0", 4, values="fe967699fe967699fe9676997e967699"), x("x1", 4, values=BIG_GRAD)],
            *(call(op, "w0", to=f"v{2 * i}") for i, op in enumerate(SMOOTH)),
            *(call("mul", f"v{2 * i}", "x1", to=f"v{2 * i + 1}") for i in range(len(SMOOTH))),
            contexts=(),
        ),
        case(
            [x("w0", 3, domain="zeros"), x("x1", 3, domain="unit")],
            *(call(op, "w0", to=f"v{i}") for i, op in enumerate(("abs", "logsigmoid"))),
            call("binary_cross_entropy_with_logits", "w0", "x1", reduction="none", to="v2"),
            contexts=(),
        ),
        case(
            [x("w0", 2, 3, domain="zeros")],
            *(
                call("linalg.vector_norm", "w0", p, to=f"v{i}")
                for i, p in enumerate((1, math.inf, -math.inf))
            ),
            contexts=(),
        ),
        case(
            [x("w0", 3, 3, dtype="float64", domain="psd")],
            call("linalg.cholesky", "w0", upper=True),
            call("linalg.cholesky_ex", "w0", to="v1 v2"),
            contexts=(),
        ),
        case(
            [x("w0", 1, values="bf800000")],
            call("sqrt", "w0"),
            call("pow.Tensor_Scalar", "v0", 0, to="v1"),
            contexts=(),
        ),
        case(
            [x("w4", 8, 3, dtype="float16", domain="subnormal", layout="strided")],
            call("pdist", "w4", p=math.inf),
            seed=33460,
        ),
        case(
            [
                x("w0", 3, 2, 2, 2, dtype="bfloat16", domain="overflow"),
                x("x1", 2, values="7f61b1e6" * 2),
            ],
            call("batch_norm.batch_statistics", "w0", None, None, "x1", "x1", True),
            contexts=(),
        ),
        case(
            [x("w0", 3, 3, domain="zeros"), x("x1", 3, 1), x("x2", 3, 3)],
            call("linalg.solve_ex", "w0", "x1", to="v0 v1"),
            call("linalg.inv_ex", "x2", to="v2 v3"),
            backward="none",
            contexts=(),
        ),
        case(
            [x("x0", 2, values="c09f5c29c0800000")],  # -4.98, -4
            call("gelu", "x0"),
            contexts=(),
            backward="none",
        ),
        case(
            [x("w0", 2, values=f"{ZEROS}{INF}"), x("x1", 2, domain="zeros")],
            call("pow.Tensor_Scalar", "w0", 0),
            call("div", "v0", "x1", to="v1"),
            contexts=(),
        ),
        case([x("w0", 3, 3)], call("linalg.eigvalsh", "w0"), contexts=()),
        case([x("w0", 3, 3)], call("linalg.eigvalsh", "w0", UPLO="U"), contexts=()),
        case(
            [x("w0", 1, 1, 5, 1, 4), x("w1", 1, 1, 1, 1, 3, values=BIG)],
            call("grid_sampler_3d", "w0", "w1", 0, 0, False, form="overload"),
            contexts=(),
        ),
    ],
    ids=[
        *("prelu-infinity", "min-infinity", "addr-promotes", "addr-scalar", "batch-norm-range"),
        *(
            "batch-norm-strided",
            "batch-norm-statistics",
            "pow-infinity",
            "pdist-nan",
            "trace-range",
            "solve-mixed",
            "clamp-nan",
            "large-activations",
            "slopes-at-0",
            "norms-at-0",
            "cholesky",
            "power-0",
            "equal-distances",
            *("norm-large-weight", "singular", "gelu-tail", "power-0-infinite"),
            "eigenvalues-lower",
            "eigenvalues-upper",
            "grid-far-outside",
        ),
    ],
)
def test_lowerings_do_as_torch_where_it_is_easy_to_miss(jitted: JaxBackend, one: Case) -> None:
    """Each was a mistake of a lowering that a hunt found."""
    with quiet():
        assert judge_of(jitted).judge(one).outcome == "agreed"


MENDED = stored("jax_mended")


@needs_jax
@pytest.mark.parametrize("name", MENDED)
def test_programs_that_a_mistake_was_found_with_agree(jitted: JaxBackend, name: str) -> None:
    with quiet():
        verdict = judge_of(jitted, shipped()).judge(MENDED[name])
    assert verdict.outcome == "agreed", verdict.divergence


# -- faults -------------------------------------------------------------------------------------


def test_there_is_a_case_for_each_fault() -> None:
    assert len(FAULTS) > 6
    assert set(CASES) == set(FAULTS)


@needs_jax
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(faulty: tuple[JaxBackend, Path], name: str) -> None:
    backend, file = faulty
    judge = judge_of(backend, shipped())
    with quiet():
        file.write_text(name)
        assert judge.judge(CASES[name]).outcome == "backend"
        file.write_text("")
        assert judge.judge(CASES[name]).outcome in ("agreed", "known")


@needs_jax
def test_what_cannot_be_lowered_is_told(faulty: tuple[JaxBackend, Path]) -> None:
    """Never silently: an op that a program reaches and that is not in the table."""
    one = case([x("x0", 4)], call("topk", "x0", 2, to="v0 v1"), backward="none")
    seen = faulty[0].run([one])[0]
    assert seen.raised is not None
    assert (seen.raised.kind, seen.raised.message) == (
        "LoweringError",
        "aten::topk.default has no lowering",
    )


# -- what the numerics of XLA allow ---------------------------------------------------------------


def assert_allowed(backend: JaxBackend, one: Case) -> None:
    """Check that what differs is what the numerics of the backend allow."""
    trial = Trial.of(one, backend)
    assert trial.compare() is not None
    assert trial.settled().compare() is None
    assert judge_of(backend).judge(one).outcome == "agreed"


@needs_jax
def test_subnormal_numbers_may_count_as_0(faulty: tuple[JaxBackend, Path]) -> None:
    one = case([x("x0", 8, domain="subnormal")], call("mul.scalar", "x0", 0.5), backward="none")
    with quiet():
        assert_allowed(faulty[0], one)


@needs_jax
@pytest.mark.parametrize("form", ["function", "inplace"])
@pytest.mark.parametrize(("op", "bounds"), [("clamp", (0, 6.0)), ("clamp_min", (0,))])
def test_a_clamp_may_keep_subnormal_numbers(
    faulty: tuple[JaxBackend, Path], op: str, bounds: tuple[float, ...], form: str
) -> None:
    """Op by op it compares them as 0, and moves what they are."""
    one = case(
        [x("x0", 4, dtype="float64", values="8000000000000400" * 4)],
        call(op, "x0", *bounds, form=form),
        backward="none",
        contexts=(),
    )
    with quiet():
        assert_allowed(faulty[0], one)


@needs_jax
def test_a_term_before_an_activation_may_count_as_0(faulty: tuple[JaxBackend, Path]) -> None:
    """The sum is under 0 by a subnormal term, and relu of what is left is not."""
    one = case(
        [
            x("x0", 1, 2, values="bf0000003f000000"),  # -0.5, 0.5
            x("x1", 2, 1, values="00c0000001000000"),  # 1.76e-38, 2.35e-38
            x("x2", values="80e00000"),  # -2.06e-38
        ],
        call("_addmm_activation", "x2", "x0", "x1", beta=0.5),
        backward="none",
        contexts=(),
    )
    with quiet():
        assert_allowed(faulty[0], one)


@needs_jax
def test_a_quotient_by_a_number_whose_reciprocal_is_subnormal_may_be_0(jitted: JaxBackend) -> None:
    one = case(
        [x("x0", 4, 1, values="7f61b1e6" * 4), x("x1", 1, values="7f61b1e6")],  # 3e38
        call("div", "x0", "x1"),
        backward="none",
        contexts=(),
    )
    with quiet():
        assert_allowed(jitted, one)


@needs_jax
def test_a_sum_of_equal_terms_is_known(jitted: JaxBackend) -> None:
    one = case(
        [x("x0", 33, 8, values="3f800000" * 264)],
        call("softmax", "x0", 0),
        call("mean", "v0", to="v1"),
        backward="none",
        contexts=(),
    )
    with quiet():
        assert_allowed(jitted, one)


@needs_jax
@pytest.mark.parametrize(
    "one",
    [
        case(
            [x("x0", 4, 3, dtype="float64", domain="subnormal"), x("x1", 3, dtype="float64")],
            call("float_power", "x0", -1.5),
            call("log", "x0", to="v1"),
            call("sqrt", "x0", to="v2"),
            contexts=(),
        ),
        case(
            [x("w0", 4, 6, 3, domain="subnormal"), x("w1", 6, domain="subnormal")],
            call("group_norm", "w0", 3, "w1", "w1"),
            call("batch_norm.batch_statistics", "w0", None, None, "w1", "w1", True, to="v1"),
            contexts=(),
        ),
        case(
            [x("x0", 6, 17, domain="subnormal"), x("x1", 6, 17, domain="subnormal")],
            call("add", "x0", "x1"),
            call("amax", "v0", 1, True, to="v1"),
            call("eq", "v1", "x0", to="v2"),
            contexts=(),
        ),
        case(
            [x("x0", 2, 1, values="7f61b1e6" * 2)],
            call("renorm", "x0", 1, 0, 2.0),
            contexts=(),
            backward="none",
        ),
    ],
    ids=["not-finite", "norms", "equal", "renorm"],
)
def test_what_comes_of_subnormal_numbers_is_allowed(jitted: JaxBackend, one: Case) -> None:
    with quiet():
        assert_allowed(jitted, one)


@needs_jax
def test_a_write_under_no_grad_keeps_the_derivative(faulty: tuple[JaxBackend, Path]) -> None:
    one = case(
        [x("w0", 3), x("w1", 3)],
        call("mul.scalar", "w0", 2.0),
        under(NoGrad(), call("add", "v0", "w1", form="inplace", to="v1")),
        call("add", "v0", "w0", to="v2"),
        contexts=(),
    )
    with quiet():
        assert judge_of(faulty[0]).judge(one).outcome == "agreed"


@pytest.fixture(scope="module")
def loose() -> Iterator[JaxBackend]:
    yield BACKENDS["jax[jit+excess]"]
    BACKENDS["jax[jit+excess]"].process.close()


PRODUCT = case(
    [x("x0", 8, 8, dtype="bfloat16"), x("x1", 8, 8, dtype="bfloat16"), x("x2", 8, 8)],
    call("mm", "x0", "x1"),
    call("float", "v0", form="method", to="v1"),
    call("add", "v1", "x2", to="v2"),
    backward="none",
    contexts=(),
)


@needs_jax
def test_excess_precision_is_reported_as_what_it_is(loose: JaxBackend) -> None:
    """Nearer to the exact value: the shadow alone has nothing against it."""
    with quiet():
        verdict = judge_of(loose, shipped()).judge(PRODUCT)
        assert (verdict.outcome, verdict.known) == ("known", "xla-excess-precision")
        assert verdict.divergence is not None
        assert (verdict.divergence.kind, verdict.divergence.where) == ("value", "v1")
        assert verdict.divergence.expected.endswith(", with the rounding after mm")
        assert verdict.divergence.observed.endswith(
            ": the rounding after mm is left out (excess precision)"
        )
        assert judge_of(loose).judge(PRODUCT).outcome == "diverged"


@needs_jax
def test_without_excess_precision_the_rounding_is_there(jitted: JaxBackend) -> None:
    with quiet():
        assert judge_of(jitted).judge(PRODUCT).outcome == "agreed"
        assert jitted.run([PRODUCT])[0].elided == ()


@needs_jax
def test_where_no_rounding_is_asked_for_none_is_left_out(loose: JaxBackend) -> None:
    one = case([x("x0", 8, 8), x("x1", 8, 8)], call("mm", "x0", "x1"), contexts=())
    with quiet():
        assert judge_of(loose).judge(one).outcome == "agreed"


@needs_jax
def test_a_rounding_that_is_there_is_not_taken_for_one_left_out() -> None:
    """A value that only says it changed, and is the rounded one, is no such divergence."""
    explainer = Explainer(shipped())
    seen = JAX.reference().run(PRODUCT)
    claimed = dataclasses.replace(seen, elided=("v1", "v2"))
    with quiet():
        assert explainer.left_out(Trial(PRODUCT, JAX, seen, claimed)).divergence is None
        with quirks(["xla-excess-precision"]):
            wide = JAX.reference().run(PRODUCT)
        left_out = dataclasses.replace(wide, elided=("v1", "v2"))
        assert explainer.left_out(Trial(PRODUCT, JAX, seen, left_out)).divergence is not None
        elsewhere = dataclasses.replace(wide, elided=("v2",))  # the value that differs is v1
        assert explainer.left_out(Trial(PRODUCT, JAX, seen, elsewhere)).divergence is None
