"""What an imitation may change, and how several are one."""

import inspect
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from amp_fuzz import reference, upstream
from amp_fuzz.backends import imitation
from amp_fuzz.backends.harness import Observation
from amp_fuzz.backends.imitation import NOTHING, Imitation, compose, imitating
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import InferenceMode, NoGrad
from amp_fuzz.reference import DOCUMENTED, Semantics
from amp_fuzz.upstream.registry import IMITATIONS, may
from tests.helpers import call, case, eager, under, x

PRODUCT = case([x("x0", 2, 2), x("w1", 2, 2)], call("mm", "x0", "w1"), backward="none")
THREADED = msgspec.structs.replace(
    PRODUCT, plan=msgspec.structs.replace(PRODUCT.plan, thread="whole")
)


def run(one: Case, *imitations: Imitation) -> Observation:
    parts = {f"bug{number}": each for number, each in enumerate(imitations)}
    with imitating(compose(parts)):
        return eager().reference().run(one)


def result(one: Case, *imitations: Imitation) -> torch.Tensor:
    value = run(one, *imitations).values["v0"]
    assert value is not None
    return value


def times(factor: int) -> Any:
    """Return a kernel that multiplies what another one computes."""
    return lambda plain, *args, **kwargs: plain(*args, **kwargs) * factor


@pytest.mark.parametrize("one", [PRODUCT, THREADED], ids=["here", "in another thread"])
def test_each_hook_changes_a_run(one: Case) -> None:
    honest = result(one)
    assert honest.dtype is torch.bfloat16
    entered = []

    @contextmanager
    def around() -> Iterator[None]:
        entered.append(None)
        yield

    def uncast(semantics: Semantics) -> Semantics:
        return replace(semantics, rule=lambda call: None)

    def negated(program: Any, one: Case) -> Any:
        return lambda *inputs: tuple(-output for output in program(*inputs))

    def plain(one: Case) -> Case:
        plan = msgspec.structs.replace(one.plan, contexts=())
        return msgspec.structs.replace(one, plan=plan)

    mm = torch.ops.aten.mm.default
    assert result(one, Imitation(semantics=uncast)).dtype is torch.float32
    assert torch.equal(result(one, Imitation(kernels={mm: times(2)})), 2 * honest)
    assert torch.equal(result(one, Imitation(wrap=negated)), -honest)
    assert result(one, Imitation(rewrite=plain)).dtype is torch.float32
    assert torch.equal(result(one, Imitation(around=around)), honest)
    assert entered
    assert torch.equal(result(one), honest)  # no hook stays behind


@pytest.mark.parametrize("region", [InferenceMode(), NoGrad()], ids=["inference", "no_grad"])
def test_a_kernel_is_found_below_an_op_that_is_made_of_others(region: Any) -> None:
    """In inference mode such an op comes to a mode whole."""
    one = case(
        [x("x0", 2, 2), x("x1", 2, 2)], under(region, call("matmul", "x0", "x1")), backward="none"
    )
    mm = torch.ops.aten.mm.default
    assert torch.equal(result(one, Imitation(kernels={mm: times(2)})), 2 * result(one))


def test_what_is_around_a_run_stands_above_the_kernels() -> None:
    seen = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    mm, neg = torch.ops.aten.mm.default, torch.ops.aten.neg.default
    negated = Imitation(kernels={mm: lambda plain, *args: neg(plain(*args))})
    assert torch.equal(result(PRODUCT, Imitation(around=Noting), negated), -result(PRODUCT))
    assert mm in seen
    assert neg not in seen


def test_shadows_see_what_is_imitated() -> None:
    mm = torch.ops.aten.mm.default
    runtime = eager().reference()
    with imitating(compose({"bug": Imitation(kernels={mm: times(2)})})):
        seen, bands = runtime.shadowed(PRODUCT, 2, 0)
    value = seen.values["v0"]
    assert value is not None
    assert torch.equal(value, 2 * result(PRODUCT))
    assert set(bands) == set(seen.values)


def test_shadows_follow_if_each_imitation_lets_them() -> None:
    runtime = eager().reference()
    assert runtime.follows()
    with imitating(compose({"a": Imitation(), "b": Imitation(follows=False)})):
        assert not runtime.follows()


def test_an_imitation_says_where_it_cannot_act(monkeypatch: pytest.MonkeyPatch) -> None:
    known: Any = IMITATIONS
    monkeypatch.setitem(known, "bug", Imitation(applies=lambda one: one.seed == 7))
    assert not may("bug", PRODUCT)
    assert may("bug", msgspec.structs.replace(PRODUCT, seed=7))
    assert may("another bug", PRODUCT)


def test_asking_names_a_bug_that_does_more_than_replace_rules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    acts = Imitation(around=nullcontext, rewrite=lambda one: one)
    monkeypatch.setitem(imitation.KNOWN, "acts", acts)
    monkeypatch.setitem(imitation.KNOWN, "nothing", Imitation())
    with imitation.asking() as asked:
        pass
    assert "acts" in asked
    assert "nothing" not in asked


def test_asking_names_the_bugs_whose_rules_decide() -> None:
    """The weight of a product is cached; nothing is promoted, and no module asks a question."""
    with imitation.asking() as asked:
        eager().reference().run(PRODUCT)
    assert "cache-ignores-dtype" in asked
    assert asked.isdisjoint({"promote-skips-optional", "query-asks-cuda"})
    assert asked <= set(upstream.QUIRKS)


@pytest.mark.parametrize("name", sorted(IMITATIONS))
def test_an_imitation_replaces_a_rule_or_does_more(name: str) -> None:
    assert IMITATIONS[name].replaces() or IMITATIONS[name].acts()


def test_another_process_gets_the_same_imitation() -> None:
    names = frozenset({"cache-ignores-dtype", "promote-skips-optional"})
    made = upstream.composed(names)
    assert pickle.loads(pickle.dumps(made)) is made
    assert made.without("cache-ignores-dtype").names == {"promote-skips-optional"}
    assert pickle.loads(pickle.dumps(NOTHING)) is NOTHING


def test_rules_are_of_a_thread_and_of_those_that_inherit_them() -> None:
    from amp_fuzz.backends.prelude import in_thread

    def dtype() -> torch.dtype:
        with reference.autocast("cpu"):
            return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    uncast = replace(DOCUMENTED, rule=lambda call: None)
    with reference.under(uncast):
        inherited = reference.inherited()

        def inside() -> torch.dtype:
            with inherited():
                return dtype()

        assert dtype() is in_thread(inside) is torch.float32
        assert in_thread(dtype) is torch.bfloat16
    assert dtype() is torch.bfloat16


def test_a_program_that_was_wrapped_leads_to_the_one_below() -> None:
    """Some imitations look at the names that it knows."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x,)

    def wrap(inner: Any, case: Case) -> Any:
        return lambda *inputs: inner(*inputs)

    twice = compose({"one": Imitation(wrap=wrap), "other": Imitation(wrap=wrap)})
    made = twice.wrap(program, PRODUCT)
    assert made is not program
    assert inspect.unwrap(made) is program
