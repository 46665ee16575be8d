"""Notes of contexts that do something else on another device, or nothing: once a check."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_fuzz
from amp_fuzz.interfaces.check.result import CheckResult
from amp_fuzz.records.schema import Note
from amp_fuzz.reference import tabled_devices

EVERY = ["eager-cpu", "fake-cuda", "compile[aot_eager]"]
CHEAP = ["eager-cpu", "fake-cuda"]
# The devices that take dtypes of 16 bits only, and that have such a default: 2.7 has no maia.
NARROW = [device for device in tabled_devices() if device != "cuda"]
HALF = [device for device in tabled_devices() if device not in ("cpu", "maia")]
BRAIN = [device for device in tabled_devices() if device in ("cpu", "maia")]
X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))

# torch itself says so too, at the line of the context.
pytestmark = pytest.mark.filterwarnings("ignore:.*isabling autocast", "ignore:.*Disabling")


def checked(function: Callable[..., Any], backends: Any = CHEAP, **more: Any) -> CheckResult:
    result = amp_fuzz.check(function, X, backends=backends, store=None, **more)
    assert result.ok, str(result)
    return result


def notes(function: Callable[..., Any], backends: Any = CHEAP, **more: Any) -> tuple[Note, ...]:
    return tuple(n for n in checked(function, backends, **more).notes if n.kind == "context")


def line(function: Any, more: int = 1) -> str:
    """Return the line of a function, from that of its ``def``."""
    return f"{Path(__file__).name}:{function.__code__.co_firstlineno + more}"


# -- for a device that no tensor is on ------------------------------------------------------------


def _for_cuda(x: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.float16):
        return x @ x


def _off_for_cuda(x: Tensor) -> Tensor:
    with torch.autocast("cuda", enabled=False):
        return x @ x


def test_a_context_for_a_device_without_tensors_is_noted_once_a_check() -> None:
    dtypes = [torch.bfloat16, torch.float16]
    (note,) = notes(_for_cuda, EVERY, autocast=dtypes)
    assert note == Note(
        "context",
        "eager-cpu",
        "autocast",
        line(_for_cuda),
        "a context for cuda changes nothing: every tensor in it is on cpu",
        "Give it the device of the tensors: torch.autocast(x.device.type).",
    )


@pytest.mark.thorough
def test_autocast_that_stays_on_is_noted() -> None:
    (note,) = notes(_off_for_cuda)
    assert (note.where, note.backend) == (line(_off_for_cuda), "eager-cpu")
    assert notes(_off_for_cuda, autocast=None) == ()  # none is on


class Decorated(nn.Module):
    @torch.autocast("xpu", enabled=False)
    def forward(self, x: Tensor) -> Tensor:
        return x @ x


def test_a_decorating_context_has_the_line_of_the_function() -> None:
    (note,) = notes(Decorated(), ["eager-cpu"])
    assert note.message == "a context for xpu changes nothing: every tensor in it is on cpu"
    assert note.where == line(Decorated.forward.__wrapped__, 0)  # type: ignore[attr-defined]


def test_a_decorating_context_is_noted_where_no_autocast_is_on() -> None:
    @torch.autocast("cuda", torch.float16)
    def product(x: Tensor) -> Tensor:
        return x @ x

    (note,) = notes(product, ["eager-cpu"], autocast=None)
    assert note.where == line(product.__wrapped__, 0)  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_a_context_of_cudas_own_class_is_noted() -> None:
    def old(x: Tensor) -> Tensor:
        with torch.cuda.amp.autocast():
            return x @ x

    (note,) = notes(old)
    assert note.message == "a context for cuda changes nothing: every tensor in it is on cpu"
    assert (note.where, note.backend) == (line(old), "eager-cpu")


def test_contexts_of_generators_may_be_left_in_any_order() -> None:
    def generator(device: str) -> Generator[None]:
        with torch.autocast(device):
            yield

    def mixed(x: Tensor) -> Tensor:
        first, second = generator("xpu"), generator("cuda")
        next(first)
        next(second)
        first.close()
        second.close()
        return x @ x  # in none of them

    assert notes(mixed, ["eager-cpu"]) == ()


def test_a_context_is_left_in_the_thread_that_entered_it() -> None:
    shared = torch.autocast("xpu")

    def enter() -> None:
        with shared:
            pass

    def threaded(x: Tensor) -> Tensor:
        with shared:
            other = threading.Thread(target=enter)
            other.start()
            other.join()
            return x @ x

    (note,) = notes(threaded, ["eager-cpu"])
    assert note.where == line(threaded)


def test_the_lines_of_a_fact_are_in_one_note() -> None:
    def many(x: Tensor) -> Tensor:
        for _ in range(2):
            with torch.autocast("xpu"):
                x = x @ x
        with torch.autocast("xpu"):
            x = x @ x
        with torch.autocast("xpu"):
            x = x @ x
        with torch.autocast("xpu"):
            return x @ x

    (note,) = notes(many, ["eager-cpu"])
    assert note.where == ", ".join(line(many, n) for n in (2, 4, 6)) + " and 1 more"


def _here(x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return x @ x


def _made_inside(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.ones(4, 4)
        return x.sum() + float((y @ y).shape[0])


def _without_tensors(x: Tensor) -> Tensor:
    with torch.autocast("xpu"):
        pass
    return x @ x


@pytest.mark.thorough
@pytest.mark.parametrize("function", [_here, _made_inside, _without_tensors])
def test_a_context_that_meets_tensors_of_its_device_is_not_noted(
    function: Callable[..., Any],
) -> None:
    assert notes(function, autocast=None) == ()


# -- of a dtype that only some devices take -------------------------------------------------------


def _region(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    def region(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype):
            return x @ x

    return region


@pytest.mark.thorough
def test_a_region_of_float32_says_what_each_device_makes_of_it() -> None:
    region = _region(torch.float32)
    for backends in (CHEAP, ["fake-cuda"], ["eager-cpu"]):
        (note,) = notes(region, backends, autocast=None)
        assert (note.where, note.backend) == (line(region), backends[0])
        assert note.message == (
            "a context of float32: on cuda it casts 16-bit operands of products up to float32; on "
            f"{', '.join(NARROW)} it warns and is off, so 16-bit operands stay"
        )
        assert note.device == ("cuda" if backends[0] == "eager-cpu" else ",".join(NARROW))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn], ids=str)
def test_a_dtype_that_one_device_takes_is_noted(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    (note,) = notes(_region(dtype), ["fake-cuda"], autocast=None, backward=False)
    assert note.message == (
        f"a context of {name}: on cuda it is on; on {', '.join(NARROW)} it warns and is off"
    )


@pytest.mark.thorough
def test_the_context_around_the_call_is_noted_on_the_backend_that_runs() -> None:
    def found(backends: list[str]) -> tuple[Note, ...]:
        model = nn.Linear(4, 4)
        options: Any = {"autocast": torch.float32, "store": None}
        return amp_fuzz.check(model, X, backends=backends, **options).notes

    (note,) = found(CHEAP)
    assert (note.where, note.backend) == ("the context around the call", "fake-cuda")
    assert found(["eager-cpu"]) == ()  # none runs


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_dtype_that_every_device_takes_is_not_noted(dtype: torch.dtype) -> None:
    assert notes(_region(dtype), autocast=None) == ()


@pytest.mark.thorough
def test_a_context_that_is_off_may_ask_for_any_dtype() -> None:
    def region(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.float32, enabled=False):
            return x @ x

    assert notes(region) == ()


# -- without a dtype ------------------------------------------------------------------------------


def _default(x: Tensor) -> Tensor:
    with torch.autocast(x.device.type):
        return x @ x


DEFAULTS = (
    f"a context without a dtype is bfloat16 on {', '.join(BRAIN)}; float16 on {', '.join(HALF)}"
)


@pytest.mark.thorough
def test_a_default_dtype_is_noted_once_a_check() -> None:
    (note,) = notes(_default, EVERY, autocast=None)
    assert (note.where, note.message) == (line(_default), DEFAULTS)
    assert (note.backend, note.device) == ("eager-cpu", ",".join(HALF))


@pytest.mark.thorough
def test_a_default_dtype_around_the_call_is_noted_where_it_differs_in_the_check() -> None:
    (note,) = checked(nn.Linear(4, 4), autocast={}).notes
    assert (note.where, note.message) == ("the context around the call", DEFAULTS)
    assert notes(nn.Linear(4, 4), ["eager-cpu"], autocast={}) == ()


@pytest.mark.thorough
def test_a_context_in_one_with_a_dtype_has_no_default() -> None:
    assert notes(_default) == ()  # the context around the call

    def nested(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16), torch.autocast(x.device.type):
            return x @ x

    assert notes(nested, autocast=None) == ()


@pytest.mark.thorough
def test_a_dtype_that_was_set_is_no_default() -> None:
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        assert notes(_default, ["eager-cpu"], autocast=None) == ()
        # Nor do the policies of other devices round to another dtype.
        assert checked(nn.Linear(4, 4), ["eager-cpu"], autocast={}).notes == ()
        assert notes(nn.Linear(4, 4), CHEAP, autocast={}) == ()  # float16 on both
    finally:
        torch.set_autocast_dtype("cpu", before)


def test_a_dtype_that_the_code_itself_sets_is_no_default() -> None:
    def sets(x: Tensor) -> Tensor:
        before = torch.get_autocast_dtype("cpu")
        torch.set_autocast_dtype("cpu", torch.float16)
        try:
            return _default(x)
        finally:
            torch.set_autocast_dtype("cpu", before)

    assert notes(sets, ["eager-cpu"], autocast=None) == ()


def test_a_context_that_an_earlier_run_made_hides_no_note() -> None:
    made: list[Any] = []

    def keeps(x: Tensor) -> Tensor:
        made.extend([] if made else [torch.autocast("cpu")])
        with made[0]:
            x = x @ x
        with torch.autocast("xpu"):
            return x @ x

    (note,) = notes(keeps, ["eager-cpu"], autocast=None, isolate=False)
    assert note.where == line(keeps, 4)


# -- as people see it -----------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_model_without_contexts_has_no_notes() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    assert checked(layer).notes == ()


def test_the_text_of_a_note() -> None:
    text = re.sub(r"test_contexts\.py:\d+", "FILE", str(checked(_for_cuda, autocast=None)))
    assert text.splitlines()[4:] == [
        "eager-cpu, no context: note, context",
        "  where     FILE",
        "  what      a context for cuda changes nothing: every tensor in it is on cpu",
        "  next      Give it the device of the tensors: torch.autocast(x.device.type).",
    ]
