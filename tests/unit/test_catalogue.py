"""Every catalogue entry draws calls that run, and says truly what comes out of them."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from amp_fuzz.backends.eager import EagerBackend
from amp_fuzz.backends.source import statement_source
from amp_fuzz.cases.inputs import tensor
from amp_fuzz.cases.program import ProgramError, TensorSpec
from amp_fuzz.catalogue import CATALOGUE, adopt, check, core, select
from amp_fuzz.reference.fp8 import TORCHAO, Layers
from amp_fuzz.strategies.builder import Palette, ProgramBuilder
from amp_fuzz.versions import installed
from tests.helpers import call, case, leading, x

DRAWS = 15
CASES = [(name, form) for name, op in CATALOGUE.items() for form in op.forms]


def draw(name: str, form: str, seed: int):
    rng = random.Random(f"{name}/{form}/{seed}")
    palette = Palette(floats=("float32",))
    builder = ProgramBuilder(rng.randbytes, {}, palette)
    return builder, builder.statement(CATALOGUE[name], form)


def materialise(specs: list[TensorSpec], device: str = "cpu"):
    made = {s.name: tensor(s, seed=0) for s in specs}
    return {
        s.name: made[s.name].requires_grad_() if s.requires_grad else made[s.name] for s in specs
    }


def memory(made: torch.Tensor) -> set[int]:
    """Return where a tensor's elements stand, if it has any."""
    return {made.untyped_storage().data_ptr()} if made.numel() else set()


@pytest.mark.parametrize("draws", leading([5, DRAWS]))
@pytest.mark.parametrize(("name", "form"), CASES)
def test_calls_run_and_outputs_are_as_declared(name: str, form: str, draws: int) -> None:
    op = CATALOGUE[name]
    if op.devices is not None and "cpu" not in op.devices:
        pytest.skip(f"only on {', '.join(op.devices)}")
    errors: Counter[str] = Counter()
    for seed in range(draws):
        builder, statement = draw(name, form, seed)
        runtime = EagerBackend("cpu").runtime()
        layers = Layers(TORCHAO).names()
        names = {**runtime.names(), **layers, **materialise(builder.inputs)}
        exec(op.setup, names)
        text = statement_source(statement)
        before = {place for spec in builder.inputs for place in memory(names[spec.name])}
        try:
            with torch.random.fork_rng():
                exec(text, names)
        except Exception as error:
            errors[f"{text}: {type(error).__name__}: {str(error)[:150]}"] += 1
            continue
        declared = {v.name: v for v in builder.values}
        for output in statement.outputs:
            if output == "_":
                continue
            got, want = names[output], declared[output]
            assert isinstance(got, torch.Tensor), text
            assert tuple(got.shape) == want.shape, text
            assert str(got.dtype).removeprefix("torch.") == want.dtype, text
            if want.writable and form not in ("inplace", "out"):  # a write must reach no input
                assert memory(got).isdisjoint(before), f"{text}: a view"
    # float32 everywhere: nearly every drawn call must be legal on an honest torch
    assert sum(errors.values()) <= DRAWS // 5, "\n".join(errors)


# -- ops that only some versions of torch have ----------------------------------------------------


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register an op that the installed torch does not have yet."""
    with monkeypatch.context() as patch:
        patch.setitem(core.REGISTRY, "newer", replace(CATALOGUE["exp"], name="newer", torch=">=99"))
        adopt()
        yield
    adopt()


@pytest.mark.usefixtures("newer")
def test_an_op_that_the_installed_torch_lacks_is_not_drawn_and_says_which_torch_has_it() -> None:
    said = f"newer needs torch >=99, and {installed()} is installed"
    assert "newer" not in CATALOGUE
    assert "newer" not in {op.name for op in select(["pointwise", "n*"])}
    with pytest.raises(ProgramError, match=re.escape(f"$.body[0].op: {said}")):
        check(case([x("x0", 2)], call("newer", "x0")).program)
    with pytest.raises(ProgramError, match=f"^{re.escape(said)}$"):
        select(["newer"])
