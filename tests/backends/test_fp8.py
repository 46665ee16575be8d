"""FP8 layers: drawn only where there are recipes, judged, replayed, and shown by a script."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

from amp_fuzz.backends import BackendError, backends, unsupported
from amp_fuzz.backends.base import Quantises, caches, recipes_of
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.build import BF16, call, case, under, x
from amp_fuzz.cases.case import Case, CaseError, loads
from amp_fuzz.cases.program import FP8, Autocast, Checkpoint, Region, regions, statements
from amp_fuzz.catalogue import CATALOGUE
from amp_fuzz.findings.repro.script import repro
from amp_fuzz.oracle.compare import Divergence
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.oracle.verdict import Verdict
from amp_fuzz.runs.engine import Settings, Task, draw
from amp_fuzz.strategies.drawing import draw_case, usable
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of

pytestmark = pytest.mark.thorough

READY = [
    name
    for name, backend in backends().items()
    if isinstance(backend, Quantises) and backend.availability().status == "ready"
]
every = pytest.mark.parametrize("name", READY)
caching = pytest.mark.parametrize("name", [n for n in READY if caches(backends()[n])])
INPUTS = [x("x0", 32, 32), x("w1", 32, 32), x("w2", 32)]
LINEAR = call("fp8_linear", "x0", "w1", "w2")


def region(name: str) -> FP8:
    return recipes_of(backends()[name])[0]


def judged(name: str, one: Case) -> Verdict:
    with quiet():
        return judge_of(backends()[name], shipped(), "all").judge(one)


def drawn(count: int, seed: int = 0) -> list[Case]:
    recipes = (FP8(), FP8("rowwise", format="E4M3"))
    ops = usable(CATALOGUE.values(), "cpu", fp8=True)
    source = random.Random(seed).randbytes
    return [draw_case(source, "cpu", ops=ops, recipes=recipes) for _ in range(count)]


# -- what is drawn --------------------------------------------------------------------------------


def test_programs_have_layers_and_regions_of_all_kinds() -> None:
    cases = drawn(400)
    layers = [c for c in cases if any(s.op == "fp8_linear" for s in statements(c.program.body))]
    contexts = [list(regions(c.program.body)) for c in cases]
    assert len(layers) > 350
    assert any(isinstance(c, FP8) and not c.enabled for found in contexts for c in found)
    assert sum(any(isinstance(c, FP8) for c in found) for found in contexts) > 300
    assert any(_nests(c, FP8, Autocast) for c in cases)
    assert any(_nests(c, FP8, FP8) for c in cases)
    assert any(_nests(c, FP8, Checkpoint) for c in cases)


def _nests(one: Case, outer: type, inner: type) -> bool:
    found = [n for n in one.program.body if isinstance(n, Region) and isinstance(n.context, outer)]
    return any(isinstance(c, inner) for n in found for c in regions(n.body))


def test_without_recipes_no_layer_is_drawn() -> None:
    task = Task("eager-cpu", "all", (), 300, 0)
    for one in islice(draw(task, Settings(("eager-cpu",))), 300):
        assert not any(CATALOGUE[s.op].fp8 for s in statements(one.program.body))
        assert not any(isinstance(c, FP8) for c in regions(one.program.body))


def test_a_case_file_keeps_its_regions() -> None:
    delayed = FP8("delayed", history=4, algorithm="most_recent", margin=1)
    one = case(INPUTS, under(delayed, LINEAR))
    assert loads(one.json()) == one
    assert "fp8('delayed', history=4, algorithm='most_recent', margin=1):" in str(one)


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (FP8(history=4), "$.body[0].context.history belongs to the recipe 'delayed'"),
        (FP8("delayed", history=0), "$.body[0].context.history=0: use 1 to 1024"),
        (FP8("nvfp4", format="E4M3"), "nvfp4 has its own: leave it out"),
    ],
)
def test_a_region_that_means_nothing_is_refused(context: FP8, message: str) -> None:
    with pytest.raises(CaseError) as error:
        loads(case(INPUTS, under(context, LINEAR)).json())
    assert message in str(error.value)


@pytest.mark.parametrize("body", [LINEAR, under(FP8(), call("neg", "x0"))])
def test_a_backend_without_recipes_says_so(body: object) -> None:
    one = case(INPUTS, body)  # type: ignore[arg-type]
    assert unsupported(one, backends()["eager-cpu"])
    with pytest.raises(BackendError, match=r"eager-cpu cannot express .*fp8.*: choose another"):
        Judge(backends()["eager-cpu"]).judge(one)


def test_layers_in_mxfp8_have_whole_blocks() -> None:
    """A fresh input of a program in an MXFP8 region has sizes that are multiples of 32."""
    ops = [op for op in usable(CATALOGUE.values(), "cpu", fp8=True) if op.fp8]
    source = random.Random(0).randbytes
    recipes = (FP8("mxfp8", format="E4M3"),)
    for _ in range(40):
        one = draw_case(source, "cpu", ops=ops, recipes=recipes)
        if all(isinstance(n, Region) and n.context in recipes for n in one.program.body):
            sizes = {size for spec in one.program.inputs for size in spec.shape[-1:]}
            assert all(size % 32 == 0 for size in sizes), one


def test_float16_is_not_asked_of_mxfp8() -> None:
    inputs = [x("x0", 32, 32, dtype="float16"), x("w1", 32, 32), x("w2", 32)]
    fitted = backends()["torchao[mxfp8]"].fit(case(inputs, LINEAR))
    assert [spec.dtype for spec in fitted.program.inputs] == ["bfloat16", "float32", "float32"]


def kept(first: bool) -> Case:
    """Return three steps of a layer that keeps its weight; each step changes the weight."""
    layer = call("fp8_linear", "x0", "w1", is_first_microbatch=first)
    return case(INPUTS, under(FP8("current"), layer), contexts=(), steps=3)


@pytest.mark.parametrize("name", [n for n in READY if not caches(backends()[n])])
def test_a_backend_that_keeps_no_weight_says_so(name: str) -> None:
    layer = call("fp8_linear", "x0", "w1", "w2", is_first_microbatch=True)
    one = case(INPUTS, under(region(name), layer))
    assert unsupported(one, backends()[name]) == "fp8_linear with is_first_microbatch"


def test_a_kept_weight_is_drawn_only_where_it_can_be_kept() -> None:
    for may in (False, True):
        ops = [op for op in usable(CATALOGUE.values(), "cpu", fp8=True) if op.fp8]
        source = random.Random(0).randbytes
        cases = [draw_case(source, "cpu", ops=ops, recipes=(FP8(),), caches=may) for _ in range(40)]
        calls = [s for c in cases for s in statements(c.program.body)]
        said = {dict(s.kwargs).get("is_first_microbatch") for s in calls}
        assert said == ({None, True, False} if may else {None})


# -- what is judged -------------------------------------------------------------------------------


@every
@pytest.mark.parametrize(
    "plan",
    [
        {"contexts": ()},
        {"contexts": (), "second": "retain"},
        {"contexts": (), "steps": 3},
        {"contexts": (), "checkpoint": "non_reentrant"},
        {"contexts": (), "checkpoint": "reentrant"},
        {"contexts": (), "scaler": True},
        {"contexts": (), "first_pass": "no_grad"},
        {"backward": "inside"},
        {"thread": "inside"},
    ],
    ids=str,
)
def test_it_agrees_or_is_known(name: str, plan: dict[str, object]) -> None:
    for context in dict.fromkeys(recipes_of(backends()[name])):
        body = under(context, LINEAR, call("gelu", "v0", to="v1"))
        verdict = judged(name, case(INPUTS, body, **plan))
        assert verdict.outcome in ("agreed", "known"), (context, verdict.divergence)


@every
def test_regions_nest(name: str) -> None:
    inner = under(FP8(region(name).recipe, enabled=False), call("fp8_linear", "v0", "w1", to="v1"))
    autocast = under(BF16, call("fp8_linear", "v1", "w1", to="v2"))
    last = under(Checkpoint(), call("fp8_linear", "v1", "w1", "w2", to="v3", layer=3))
    one = case(INPUTS, under(region(name), LINEAR, inner, autocast, last), contexts=())
    assert judged(name, one).outcome in ("agreed", "known")


@every
def test_a_layer_draws_no_random_number(name: str) -> None:
    draws = call("rand_like", "v0", to="v1")
    one = case(INPUTS, under(region(name), LINEAR), draws, contexts=(), backward="none")
    assert judged(name, one).outcome in ("agreed", "known")


@every
def test_outside_of_regions_it_is_linear(name: str) -> None:
    one = case(INPUTS, LINEAR, call("linear", "x0", "w1", "w2", to="v1"), contexts=())
    (seen,) = backends()[name].run([one])
    assert torch.equal(*(v for v in map(seen.values.get, ("v0", "v1")) if v is not None))


@every
def test_a_region_changes_the_result(name: str) -> None:
    both = under(region(name), LINEAR), call("fp8_linear", "x0", "w1", "w2", to="v1")
    (seen,) = backends()[name].run([case(INPUTS, *both, contexts=())])
    first, second = seen.values["v0"], seen.values["v1"]
    assert first is not None
    assert second is not None
    assert not torch.equal(first, second)
    assert torch.allclose(first, second, rtol=0.1, atol=1.0)


@caching
@pytest.mark.parametrize("first", [True, False])
def test_a_kept_weight_is_used_again(name: str, first: bool) -> None:
    """The first microbatch of each step quantises the weight; the others use what is kept."""
    assert judged(name, kept(first)).outcome == "agreed"
    (seen,) = backends()[name].run([kept(first)])
    before, after = seen.values["step0.v0"], seen.values["step1.v0"]
    assert before is not None
    assert after is not None
    assert torch.equal(before, after) != first


@caching
def test_a_kept_weight_of_another_recipe_is_dropped(name: str) -> None:
    keeps = under(FP8("current"), call("fp8_linear", "x0", "w1", is_first_microbatch=True))
    uses = call("fp8_linear", "x0", "w1", to="v1", is_first_microbatch=False)
    scaled = under(FP8("delayed", history=4), uses)
    assert judged(name, case(INPUTS, keeps, scaled, contexts=())).outcome == "agreed"


@caching
def test_the_largest_magnitude_of_a_step_is_that_of_all_calls(name: str) -> None:
    inputs = [x("w0", 32, 32), x("w1", 32, 32), x("w2", 32, 32, domain="zeros")]
    calls = call("fp8_linear", "w0", "w1"), call("fp8_linear", "w2", "w1", to="v1")
    one = case(inputs, under(FP8("delayed", history=4), *calls), contexts=(), steps=3)
    assert judged(name, one).outcome == "agreed"


@caching
def test_a_weight_is_kept_for_both_uses_only_where_it_is_recomputed(name: str) -> None:
    """Nothing of the checkpoint needs a gradient, so the second call makes the kept weight anew."""
    first = call("fp8_linear", "x0", "x1", is_first_microbatch=False)
    second = call("fp8_linear", "w2", "x3", to="v1", is_first_microbatch=False)
    inputs = [x(name, 32, 32) for name in ("x0", "x1", "w2", "x3")]
    one = case(inputs, under(FP8("current"), under(Checkpoint(True), first), second), contexts=())
    assert judged(name, one).outcome == "agreed"


@caching
def test_a_layer_of_any_recipe_may_be_the_first_of_a_region(name: str) -> None:
    """It updates the scales of gradients, in its backward pass, which is not run here."""
    inner = under(FP8("delayed", history=4), call("fp8_linear", "w0", "w1", to="v1", layer=1))
    body = under(FP8("current"), call("fp8_linear", "w2", "w1"), inner)
    inputs = [x(name, 32, 32) for name in ("w0", "w1", "w2")]
    one = case(inputs, body, contexts=(), steps=3, returns=("v1",))
    assert judged(name, one).outcome == "agreed"


# -- scripts --------------------------------------------------------------------------------------


@every
def test_a_script_shows_a_divergence_without_amp_fuzz(name: str, tmp_path: Path) -> None:
    """A fault is put before the program; without it the script finds nothing."""
    found = {}
    one = case(INPUTS, under(region(name), LINEAR), contexts=(), backward="none")
    for fault in ("", "_linear = fp8_linear\ndef fp8_linear(*a, **k): return _linear(*a, **k) + 1"):
        finding = Divergence("bitwise", "v0", "", "")
        text = repro(one, backends()[name], finding, prefix=fault)
        ours = [line for line in text.splitlines() if re.match("(import|from) amp_fuzz", line)]
        stub = ["from amp_fuzz.backends.te.stub import install"]
        assert ours == (stub if name == "te-python" else [])
        path = tmp_path / "repro.py"
        path.write_text(text)
        done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
        found[bool(fault)] = done.returncode
        assert done.returncode in (0, 1), done.stderr
    assert found == {False: 0, True: 1}
