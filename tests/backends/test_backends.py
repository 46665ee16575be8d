"""One suite over every backend that is ready here."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from amp_fuzz.backends import BackendError, backends, choose, harness
from amp_fuzz.backends.base import Quantises
from amp_fuzz.backends.dispatcher import has_autocast
from amp_fuzz.backends.harness import DRIVER, PROGRAM, changes, compiled, quiet
from amp_fuzz.backends.torch_state import torch_state
from amp_fuzz.cases.program import Autocast
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from tests.helpers import BF16, F16, call, case, drawn, one_line, under, x

READY = [n for n, b in backends().items() if b.availability().status == "ready"]
# Compilers wrap errors, and have findings of their own: tests/backends/test_compiled.py.
# The device of PrivateUse1 is one for all tables; each would begin a process of its own.
EXACT = [n for n in READY if backends()[n].exact and not n.startswith("privateuse1[")]


@pytest.fixture(params=EXACT)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def state() -> Iterator[None]:
    """Whatever a test does, it leaves torch's own autocast state as it was."""
    before = torch_state("cpu")
    yield
    assert torch_state("cpu") == before


def test_a_backend_has_the_name_it_is_known_by(name: str) -> None:
    assert backends()[name].name == name
    own = not isinstance(backends()[name], Quantises) and name != "privateuse1"
    assert name.endswith(f"-{backends()[name].device}") or not own


@pytest.mark.slow
def test_honest_draws_agree_or_are_known(name: str) -> None:
    backend = backends()[name]
    judge = judge_of(backend, shipped())
    outcomes: Counter[str] = Counter()
    with quiet():
        for one in drawn(60, backend.device, trains=backend.trains, seed=name, statements=8):
            verdict = judge.judge(one)
            outcomes[verdict.outcome] += 1
            assert verdict.outcome != "diverged", f"{verdict.divergence}\n{one}"
    assert outcomes["agreed"] > 30


def test_calls_in_a_new_thread_round_alike() -> None:
    """A thread that never asked has MKL's own number of threads until torch tells MKL (2 cores)."""
    transform = call("fft.ifft", "x0", dim=-2)
    one = case([x("x0", 5, 5, 17, dtype="int64")], transform, contexts=(), calls=2, thread="whole")
    with quiet():
        assert judge_of(backends()["eager-cpu"]).judge(one).outcome == "agreed"


def test_one_observation_a_case_in_their_order(name: str) -> None:
    sizes = (2, 3, 4)
    cases = [case([x("x0", n, n)], call("mm", "x0", "x0"), backward="none") for n in sizes]
    seen = backends()[name].run(cases)
    assert [o.values["v0"].shape[0] for o in seen if o.values["v0"] is not None] == list(sizes)


def test_autocast_casts(name: str) -> None:
    one = case(
        [x("x0", 2, 2)],
        call("mm", "x0", "x0"),
        under(F16, call("mm", "x0", "x0", to="v1")),
        backward="none",
        contexts=(BF16,),
    )
    backend = backends()[name]
    for seen in (backend.run([one])[0], backend.reference().run(one)):
        assert [str(t.dtype) for t in seen.values.values() if t is not None] == [
            "torch.bfloat16",
            "torch.float16",
        ]


def test_an_error_is_an_observation_at_its_line(name: str) -> None:
    one = case([x("x0", 2, 3)], call("relu", "x0"), call("mm", "x0", "x0", to="v1"))
    seen = backends()[name].run([one])[0]
    assert seen.raised is not None
    assert seen.raised.text == "v1 = torch.mm(x0, x0)"
    assert seen.raised.line == 3


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("no \ud800"), "no \\ud800"),
        (type("Mute", (ValueError,), {"__str__": lambda _: None})(), "(TypeError in the text of"),
    ],
)
def test_the_text_of_an_error_can_always_be_written(error: Exception, said: str) -> None:
    seen = harness._raised(error, harness.compiled(case([x("x0")], call("relu", "x0"))))
    assert seen.message.startswith(said)
    seen.message.encode()


def test_the_state_is_as_before_even_after_an_error(name: str) -> None:
    one = case([x("x0", 2, 3)], call("mm", "x0", "x0"), contexts=(BF16, F16))
    backend = backends()[name]
    before = torch_state(backend.device)
    assert backend.run([one])[0].leaked is None
    assert torch_state(backend.device) == before


def test_weights_that_require_grad_run_forward(name: str) -> None:
    one = case([x("x0", 2, 2), x("w1", 2, 2)], call("mm", "x0", "w1"), backward="none")
    assert backends()[name].run([one])[0].raised is None


def test_the_reference_says_which_kernels_it_reached(name: str) -> None:
    one = case([x("x0", 2, 2)], call("mm", "x0", "x0"), backward="none")
    kernels = backends()[name].reference().run(one).kernels
    assert [(k.overload, k.policy.value) for k in kernels] == [("mm", "lower_precision_fp")]


# -- availability and choice ---------------------------------------------------------------------


def test_every_backend_says_whether_it_can_be_used() -> None:
    """One that is broken would be left out of these tests."""
    for backend in backends().values():
        state = backend.availability()
        assert state.status in ("ready", "missing"), f"{backend.name}: {state.detail}"
        assert len(state.detail) > 5
        assert "\n" not in state.detail


@pytest.mark.thorough
def test_a_library_whose_import_warns_is_ready(tmp_path: Path) -> None:
    """As where a session makes errors of warnings, and its bytecode is not there yet."""
    program = f"""
        import sys, warnings
        from amp_fuzz.backends import backends
        sys.pycache_prefix = {str(tmp_path)!r}
        warnings.simplefilter("error")
        print({{b.availability().status for b in backends().values() if "torchao" in b.name}})
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "broken" not in done.stdout


def test_the_cpu_is_ready_and_says_which_torch() -> None:
    state = backends()["eager-cpu"].availability()
    assert (state.status, state.detail) == ("ready", f"torch {torch.__version__}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_what_may_add_in_another_order_is_named() -> None:
    """Its shadows allow more: of any other backend they would hide a fault."""
    known = [backend for backend in backends().values() if has_autocast(backend.device)]
    references = {backend.name: backend.reference() for backend in known}
    asked = {name.partition("[")[0] for name, own in references.items() if own.found}
    assert asked == {"jax", "torchax"}  # of the platform that JAX finds
    numerics = {name: own.numerics for name, own in references.items() if own.found is None}
    assert {name.partition("[")[0] for name, own in numerics.items() if own.reorders} <= {"compile"}
    assert not any(own.loose for own in numerics.values())
    compiled = [name for name, own in numerics.items() if own.reorders and "compile" in name]
    assert compiled
    assert all(n.startswith("compile[inductor") or n.endswith("@cuda") for n in compiled)


def test_a_device_that_is_not_here_is_missing() -> None:
    state = backends()["eager-cuda"].availability()
    assert (state.status, state.detail) == ("missing", "no cuda device is visible to torch here")


def test_all_chooses_what_is_ready() -> None:
    assert [b.name for b in choose(["all"])] == READY


def test_a_backend_is_chosen_once() -> None:
    assert [b.name for b in choose(["eager-cpu", "eager-cpu"])] == ["eager-cpu"]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("eager-cpy", "did you mean 'eager-cpu'?"),
        ("fake_cuda", "did you mean 'fake-cuda'?"),
        ("zzz", "use compile[eager], "),
        ("zzz*", "no backend matches 'zzz*'"),
        ("", "unknown backend ''"),
    ],
)
def test_an_unknown_name_says_what_to_write(word: str, said: str) -> None:
    with pytest.raises(BackendError) as caught:
        choose([word])
    assert said in str(caught.value)
    assert one_line(caught.value)


@contextmanager
def included(key: str) -> Iterator[None]:
    """Include a dispatch key that no kernel of torch has."""
    torch._C._dispatch_tls_set_dispatch_key_included(key, True)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(key, False)


STATES: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast on cpu": lambda: torch.autocast("cpu"),
    "its dtype on cpu": lambda: torch.autocast("cpu", dtype=torch.float16, enabled=True),
    "weight cache": lambda: torch.autocast("cpu", cache_enabled=False),
    "nesting": lambda: torch.autocast("cpu", enabled=False),
    "grad mode": torch.no_grad,
    "inference mode": torch.inference_mode,
    "dispatch modes": TorchDispatchMode,
    "dispatch keys": lambda: included("AutocastIPU"),
}


@pytest.mark.parametrize("name", STATES)
def test_each_part_of_a_state_is_read(name: str) -> None:
    before = torch_state("cpu")
    with STATES[name]():
        inside = torch_state("cpu")
    assert inside[name] != before[name]
    assert f"{name}: {before[name]} became {inside[name]}" in str(changes(before, inside))
    assert torch_state("cpu") == before
    assert set(STATES) == set(before)


def test_a_function_with_cast_inputs_enters_autocast_of_mps_without_mps() -> None:
    """Until torch 2.9, `torch.autocast` asks a torch without mps for the version of macOS."""
    one = case((x("x0", 2),), call("sin", "x0"), contexts=(BF16,), entry="cast_inputs")
    verdict = judge_of(backends()["fake-mps"], []).judge(one.with_plan(backward="none"))
    assert verdict.outcome == "agreed"


def test_attention_on_a_fake_device_asks_no_driver() -> None:
    """Until torch 2.10, attention asks CUDA's driver which kernel to take."""
    heads = [x("x0", 2, 2, 4, 8)]
    one = case(heads, call("scaled_dot_product_attention", "x0", "x0", "x0"), contexts=(BF16,))
    verdict = judge_of(backends()["fake-cuda"], []).judge(one.with_plan(backward="none"))
    assert verdict.outcome == "agreed"


def test_a_line_that_a_source_does_not_have_is_none() -> None:
    """Dynamo of torch 2.7 makes code with the program's name and lines of other files."""
    source = compiled(case((x("x0", 2),), call("sin", "x0")))
    for name, text in ((PROGRAM, source.program), (DRIVER, source.driver)):
        count = len(text.splitlines())
        found = source.line(name, count)
        assert found is not None
        assert found[1] == text.splitlines()[-1].strip()
        assert source.line(name, count + 150) is None
        assert source.line(name, 0) is None


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_context_of_a_wide_dtype_casts_up_on_cuda(dtype: str) -> None:
    body = call("mm", "x0", "x0"), call("exp", "x0", to="v1"), call("mm", "x1", "x1", to="v2")
    own = [x("x0", 2, 2, dtype="float16"), x("x1", 2, 2)]
    one = case(own, *body, contexts=(Autocast(dtype=dtype),)).with_plan(backward="none")
    verdict = judge_of(backends()["fake-cuda"], []).judge(one)
    assert verdict.outcome == "agreed"
    assert verdict.seen is not None
    made = {label: str(t.dtype) for label, t in verdict.seen.values.items() if t is not None}
    assert made == {"v0": f"torch.{dtype}", "v1": "torch.float32", "v2": f"torch.{dtype}"}


def test_a_promote_op_that_raises_under_float64_is_known() -> None:
    body = call("addcmul", "x0", "x0", "x0")
    one = case([x("x0", 2)], body, contexts=(Autocast(dtype="float64"),))
    verdict = judge_of(backends()["fake-cuda"], shipped()).judge(one.with_plan(backward="none"))
    assert verdict.known == "promote-foreign-half"
