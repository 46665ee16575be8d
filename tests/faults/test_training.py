"""What happens to gradients after a backward pass: faults that one ingredient of training meets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from amp_fuzz.backends import backends
from amp_fuzz.backends.eager import EagerBackend
from amp_fuzz.backends.harness import Runtime, quiet
from amp_fuzz.backends.prelude import half_by_product
from amp_fuzz.cases.case import Case
from amp_fuzz.cases.program import Checkpoint
from amp_fuzz.findings.minimize.plans import plans
from amp_fuzz.oracle import RELATIONS
from amp_fuzz.oracle.judge import Judge
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.explain import judge_of
from tests.faults.fault import patched
from tests.helpers import call, case, drawn, eager, needs_torch, under, x

_CASE = [x("x0", 6, 8), x("w1", 8, 6)], call("mm", "x0", "w1"), call("exp", "v0", to="v1")
_OTHERS: tuple[dict[str, Any], ...] = (
    {},
    {"backward": "inside"},
    {"second": "retain"},
    {"second": "double"},
    {"steps": 2},
    {"steps": 2, "loop": "inside", "backward": "inside"},
    {"calls": 2},
    {"scaler": True},
    {"checkpoint": "reentrant"},
    {"checkpoint": "non_reentrant"},
    {"first_pass": "no_grad"},
    {"interrupted": True},
    {"thread": "whole"},
    {"transform": "grad"},
    {"later": ((),)},
)


class Watching(EagerBackend):
    """Eager, but weights that a program gets under autocast are changed before it runs."""

    change: Callable[[torch.Tensor], None]

    def runtime(self, **more: Any) -> Runtime:
        """Return torch's autocast."""

        def driver(names: Mapping[str, Any]) -> dict[str, Any]:
            seen = set[int]()

            def program(*inputs: torch.Tensor) -> Any:
                for leaf in inputs if torch.is_autocast_enabled("cpu") else ():
                    if leaf.requires_grad and leaf.is_leaf and id(leaf) not in seen:
                        seen.add(id(leaf))
                        type(self).change(leaf)
                return names["program"](*inputs)

            return {"program": program}

        return EagerBackend.runtime(self, **{"driver": driver, **more})


class Accumulating(Watching):
    """Adds a gradient to an earlier one in bfloat16."""

    @staticmethod
    def change(leaf: torch.Tensor) -> None:
        """Round each sum."""
        earlier: list[bool] = []

        def rounded(leaf: torch.Tensor) -> None:
            if leaf.grad is not None and earlier.pop():
                leaf.grad = leaf.grad.bfloat16().to(leaf.dtype)

        leaf.register_hook(lambda grad: earlier.append(leaf.grad is not None))
        leaf.register_post_accumulate_grad_hook(rounded)


@pytest.mark.parametrize("loop", ["outside", "inside"])
def test_gradients_of_micro_batches_that_are_added_in_16_bits_are_found(loop: str) -> None:
    batches = {"micro_batches": 2, "loop": loop, "backward": loop}
    with quiet():
        found = Judge(Accumulating("cpu")).judge(case(*_CASE, **batches))
    assert found.outcome == "diverged"
    assert found.divergence is not None
    assert (found.divergence.kind, found.divergence.where) == ("grad-bitwise", "batch1.w1.grad")


@pytest.mark.parametrize("plan", _OTHERS, ids=str)
def test_only_micro_batches_add_a_gradient_to_an_earlier_one(plan: dict[str, Any]) -> None:
    with quiet():
        assert Judge(Accumulating("cpu")).judge(case(*_CASE, **plan)).outcome == "agreed"


# -- hooks ---------------------------------------------------------------------------------------

_FLOAT32 = [x("w0", 4, 3)], call("exp", "w0")  # a gradient that 16 bits do not hold
_HOOKED = [x("w0", 4, 3)], call("hooked", "w0"), call("exp", "v0", to="v1")


@contextmanager
def _hooks_without_autocast() -> Iterator[None]:
    """Turn autocast off in hooks."""
    names = ("register_hook", "register_post_accumulate_grad_hook")
    honest = {name: getattr(torch.Tensor, name) for name in names}

    def registering(name: str) -> Any:
        off = torch.autocast("cpu", enabled=False)
        return lambda self, hook: honest[name](self, off(hook))

    with patched(torch.Tensor, **{name: registering(name) for name in names}):
        yield


@pytest.mark.parametrize("hook", ["tensor", "accumulated"])
def test_a_hook_of_a_weight_that_runs_without_autocast_is_found(hook: str) -> None:
    one = case(*_FLOAT32, hook=hook, backward="inside")
    with quiet(), _hooks_without_autocast():
        found = Judge(eager()).judge(one)
    assert found.outcome == "diverged"
    assert found.divergence is not None
    assert (found.divergence.kind, found.divergence.where) == ("grad-bitwise", "w0.grad")


def test_a_hook_of_a_value_that_runs_without_autocast_is_found() -> None:
    with quiet(), _hooks_without_autocast():
        found = Judge(eager()).judge(case(*_HOOKED, backward="inside"))
    assert found.outcome == "diverged"
    assert found.divergence is not None
    assert (found.divergence.kind, found.divergence.where) == ("grad-bitwise", "w0.grad")


def test_compilers_are_given_no_hook_in_a_nested_region() -> None:
    later = case(*_HOOKED, later=((),), reuse="region", backward="none")
    assert backends()["compile[aot_eager]"].fit(later).plan.reuse == "graph"


def test_a_hook_may_get_no_gradient() -> None:
    """As of a compiled function, for a weight that has none."""
    assert half_by_product(None) is None


@pytest.mark.parametrize("plan", _OTHERS, ids=str)
def test_only_hooks_run_without_autocast(plan: dict[str, Any]) -> None:
    with quiet(), _hooks_without_autocast():
        assert Judge(eager()).judge(case(*_FLOAT32, **plan)).outcome == "agreed"


@pytest.mark.parametrize(
    ("backend", "known"),
    [("compile[aot_eager]", ""), ("compile[aot_eager+default]", "compile-backward-autocast")],
)
def test_a_compiled_hook_runs_under_the_autocast_of_the_backward_pass(
    backend: str, known: str
) -> None:
    """By default it is traced under that of the forward, as all of the backward pass is."""
    needs_torch(">=2.13")  # before, the graph breaks at a hook
    with quiet():
        found = judge_of(backends()[backend], shipped()).judge(case(*_HOOKED))
    assert found.known == known
    assert found.outcome == ("known" if known else "agreed")


# -- selective checkpoints -----------------------------------------------------------------------


class _Doubling(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        with _disable_current_modes():  # the checkpoint counts ops
            return made * 2 if func is torch.ops.aten.mm.default else made


class Doubling(EagerBackend):
    """Eager, but under autocast a selective checkpoint finds twice the product that it saved."""

    def runtime(self, **more: Any) -> Runtime:
        """Return torch's autocast."""

        @contextmanager
        def doubled(context: Any) -> Iterator[None]:
            with context, _Doubling():
                yield

        def checkpoint(function: Any, *args: Any, **how: Any) -> Any:
            contexts = how.get("context_fn")
            if contexts is not None and torch.is_autocast_enabled("cpu"):

                def wrong() -> Any:
                    first, again = contexts()
                    return first, doubled(again)

                how["context_fn"] = wrong
            return torch.utils.checkpoint.checkpoint(function, *args, **how)

        return EagerBackend.runtime(self, **{"checkpoint": checkpoint, **more})


_SELECTIVE = Checkpoint(selective=True)


@pytest.mark.parametrize(
    "one",
    [
        case(*_CASE, checkpoint="selective"),
        case(_CASE[0], under(_SELECTIVE, *_CASE[1:])),
        case(_CASE[0], under(Checkpoint(), under(_SELECTIVE, *_CASE[1:]))),
    ],
    ids=["plan", "region", "nested"],
)
def test_a_selective_checkpoint_that_saves_a_wrong_product_is_found(one: Case) -> None:
    with quiet():
        assert Judge(eager()).judge(one).outcome == "agreed"
        found = Judge(Doubling("cpu")).judge(one)
    assert found.outcome == "diverged"
    assert found.divergence is not None
    assert (found.divergence.kind, found.divergence.where) == ("grad-bitwise", "w1.grad")


@pytest.mark.parametrize("name", ["privateuse1", "export", "torchax", "te-python"])
def test_other_backends_are_given_plain_checkpoints(name: str) -> None:
    one = case(_CASE[0], under(_SELECTIVE, *_CASE[1:]), checkpoint="selective")
    fitted = backends()[name].fit(one)
    assert "selective" not in str(fitted)


def test_a_selective_checkpoint_is_in_no_other_one() -> None:
    """It may be computed again only in the forward's own context, so no relation is asked."""
    assert RELATIONS["checkpoint"].pair(case(*_CASE)) is not None
    assert RELATIONS["checkpoint"].pair(case(_CASE[0], under(_SELECTIVE, *_CASE[1:]))) is None


def test_a_selective_checkpoint_is_drawn_with_no_retained_graph() -> None:
    made = [one.plan for one in drawn(2000)]
    assert any(plan.checkpoint == "selective" for plan in made)
    assert not any((p.checkpoint, p.second) == ("selective", "retain") for p in made)


@pytest.mark.parametrize("plan", _OTHERS, ids=str)
def test_only_a_selective_checkpoint_saves_products(plan: dict[str, Any]) -> None:
    with quiet():
        assert Judge(Doubling("cpu")).judge(case(*_CASE, **plan)).outcome == "agreed"


def test_the_minimiser_tries_a_checkpoint_that_saves_nothing() -> None:
    one = case(*_CASE, checkpoint="selective")
    assert "non_reentrant" in {smaller.plan.checkpoint for smaller in plans(one)}
