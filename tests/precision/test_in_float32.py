"""The code that a report prints for submodules: it works alone, on any module, and is undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from amp_fuzz.interfaces.precision.pasting import code_of

Seen = list[tuple[str, torch.dtype, bool]]


@pytest.fixture(params=["imported", "pasted"])
def run_in_float32(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Give the function of the package, and the one that is printed, in a namespace of its own."""
    if request.param == "imported":
        from amp_fuzz.interfaces.precision import in_float32

        return in_float32.run_in_float32
    code = code_of((), ("a",), "cpu", {})
    head, _, call = code.rpartition("\n\n")
    assert call == "run_in_float32(model, {'a'}, \"cpu\")"
    space: dict[str, Any] = {}
    exec(head, space)
    return space["run_in_float32"]  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def autocast() -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield
    assert not torch.is_autocast_enabled("cpu")


class Noted(torch.nn.Module):
    """Notes what it is given, and whether autocast is on; then calls what it holds."""

    def __init__(self, name: str, seen: Seen, *held: torch.nn.Module) -> None:
        super().__init__()
        self.name, self.seen = name, seen
        self.held = torch.nn.ModuleList(held)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor | None = None) -> torch.Tensor:
        self.seen.append((self.name, x.dtype, torch.is_autocast_enabled("cpu")))
        if scale is not None:
            self.seen.append((f"{self.name}.scale", scale.dtype, True))
        for module in self.held:
            x = module(x)
        return x.mm(torch.ones(2, 2))


LOW = torch.ones(2, 2, dtype=torch.bfloat16)
F32, B16 = torch.float32, torch.bfloat16


def test_only_the_own_statements_of_a_module_are_meant(run_in_float32: Any) -> None:
    seen: Seen = []
    model = Noted("top", seen, Noted("a", seen, Noted("b", seen)))
    undo = run_in_float32(model, {"held.0"}, "cpu")
    assert model(LOW).dtype is B16
    assert seen == [("top", B16, True), ("a", F32, False), ("b", F32, True)]
    undo()
    seen.clear()
    model(LOW)
    assert seen == [("top", B16, True), ("a", B16, True), ("b", B16, True)]
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_callable_itself_is_named_by_nothing(run_in_float32: Any) -> None:
    seen: Seen = []
    model = Noted("top", seen, Noted("a", seen))
    run_in_float32(model, {""}, "cpu")
    assert model(LOW).dtype is F32
    assert seen == [("top", F32, False), ("a", F32, True)]


def test_nested_modules_are_exempt_together(run_in_float32: Any) -> None:
    seen: Seen = []
    model = Noted("top", seen, Noted("a", seen, Noted("b", seen, Noted("c", seen))))
    run_in_float32(model, {"held.0", "held.0.held.0"}, "cpu")
    model(LOW)
    assert seen == [("top", B16, True), ("a", F32, False), ("b", F32, False), ("c", F32, True)]


def test_keyword_arguments_and_nested_results_are_widened(run_in_float32: Any) -> None:
    class Pairs(Noted):
        def forward(self, x: torch.Tensor, **given: Any) -> Any:
            return {"made": (super().forward(x, **given).bfloat16(), 3)}

    seen: Seen = []
    model = Pairs("top", seen)
    run_in_float32(model, {""}, "cpu")
    made = model(LOW, scale=LOW)
    assert made["made"][0].dtype is F32
    assert made["made"][1] == 3
    assert seen == [("top", F32, False), ("top.scale", F32, True)]


def test_a_module_that_is_called_from_two_places_is_exempt_in_both(run_in_float32: Any) -> None:
    seen: Seen = []
    shared = Noted("shared", seen)
    model = Noted("top", seen, Noted("a", seen, shared), Noted("b", seen, shared))
    run_in_float32(model, {"held.0.held.0"}, "cpu")
    model(LOW)
    assert [s for s in seen if s[0] == "shared"] == [("shared", F32, False)] * 2


def test_a_shared_child_keeps_autocast_wherever_it_is_called(run_in_float32: Any) -> None:
    seen: Seen = []
    shared = Noted("shared", seen)
    model = Noted("top", seen, Noted("a", seen, shared), Noted("b", seen, shared))
    for names in ({"held.0"}, {"held.1"}):
        seen.clear()
        undo = run_in_float32(model, names, "cpu")
        model(LOW)
        assert [on for name, _, on in seen if name == "shared"] == [True, True]
        undo()


def test_a_forward_of_the_instance_is_wrapped_and_comes_back(run_in_float32: Any) -> None:
    seen: Seen = []
    model = Noted("top", seen, Noted("a", seen))

    def own(x: torch.Tensor) -> torch.Tensor:
        seen.append(("own", x.dtype, torch.is_autocast_enabled("cpu")))
        return x

    model.held[0].forward = own
    undo = run_in_float32(model, {"held.0"}, "cpu")
    model(LOW)
    assert seen[1:] == [("own", F32, False)]
    undo()
    assert model.held[0].forward is own


def test_an_error_inside_leaves_the_next_call_as_it_was(run_in_float32: Any) -> None:
    class Fails(torch.nn.Module):
        fails = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.fails:
                raise ValueError("once")
            return x

    seen: Seen = []
    failing = Fails()
    model = Noted("top", seen, Noted("a", seen, failing, Noted("b", seen)))
    run_in_float32(model, {"held.0"}, "cpu")
    with pytest.raises(ValueError, match="once"):
        model(LOW)
    assert torch.is_autocast_enabled("cpu")
    failing.fails = False
    seen.clear()
    model(LOW)
    assert seen == [("top", B16, True), ("a", F32, False), ("b", F32, True)]


def test_without_autocast_nothing_is_switched_on(run_in_float32: Any) -> None:
    seen: Seen = []
    model = Noted("top", seen, Noted("a", seen, Noted("b", seen)))
    run_in_float32(model, {"held.0"}, "cpu")
    with torch.autocast("cpu", enabled=False):
        model(torch.ones(2, 2))
    assert not any(on for _, _, on in seen)


def test_a_child_called_from_elsewhere_runs_as_it_would(run_in_float32: Any) -> None:
    """A method of another module calls the child of an exempt one: no exempt call is under way."""

    class Borrows(torch.nn.Module):
        def __init__(self, seen: Seen) -> None:
            super().__init__()
            self.owner = Noted("owner", seen, Noted("child", seen))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.owner.held[0](x)  # type: ignore[no-any-return]

    seen: Seen = []
    model = Borrows(seen)
    run_in_float32(model, {"owner"}, "cpu")
    assert model(LOW).dtype is B16
    assert seen == [("child", B16, True)]


def test_a_dict_of_modules_is_looked_through(run_in_float32: Any) -> None:
    class Holds(torch.nn.Module):
        def __init__(self, seen: Seen) -> None:
            super().__init__()
            self.inside = torch.nn.ModuleDict({"a": torch.nn.ModuleList([Noted("child", seen)])})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inside["a"][0](x)  # type: ignore[no-any-return]

    seen: Seen = []
    model = torch.nn.Sequential(Holds(seen))
    run_in_float32(model, {"0"}, "cpu")
    model(LOW)
    assert seen == [("child", F32, True)]


def test_a_checkpoint_calls_it_again_in_the_backward_pass(run_in_float32: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(torch.nn.Module):
        def __init__(self, seen: Seen) -> None:
            super().__init__()
            self.a = Noted("a", seen, Noted("b", seen))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.a, x, use_reentrant=False)  # type: ignore[no-any-return]

    seen: Seen = []
    model = Checkpointed(seen)
    run_in_float32(model, {"a"}, "cpu")
    model(torch.ones(2, 2, requires_grad=True)).sum().backward()
    assert seen == [("a", F32, False), ("b", F32, True)] * 2
