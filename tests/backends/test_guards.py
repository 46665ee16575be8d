"""The stand-in device guards: what they rely on is there, and fake tensors work with them."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_fuzz.backends import device_guards

FAKE = ("cuda", "xpu", "mps", "mtia", "maia")


@pytest.fixture(params=FAKE)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_libc10_has_the_registry_and_the_registrar() -> None:
    found = device_guards._c10()
    assert found is not None, (
        "fake devices are broken on this torch: see amp_fuzz/backends/device_guards.py"
    )
    library, _ = found
    assert ctypes.cast(library[device_guards._REGISTRAR], ctypes.c_void_p).value


def test_the_devices_have_the_numbers_that_we_know() -> None:
    for name, number in device_guards._TYPES.items():
        assert torch.device(name, 0).type == name
        # DeviceType's own numbering, as torch exposes it to nobody but its serialised models.
        assert 0 <= number < 20


def test_the_cpu_and_the_meta_device_have_guards_of_their_own() -> None:
    assert device_guards.has_guard("cpu")
    assert device_guards.has_guard("meta")


@pytest.mark.thorough
def test_a_device_without_a_guard_gets_one_in_a_fresh_process() -> None:
    code = (
        "from amp_fuzz.backends.device_guards import has_guard, register_guard\n"
        "before = [has_guard(d) for d in ('mtia', 'maia')]\n"
        "made = [register_guard(d) for d in ('mtia', 'maia', 'maia')]\n"
        "print(before, made, [has_guard(d) for d in ('mtia', 'maia')])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600
    )
    assert done.stdout.strip() == "[False, False] [True, True, True] [True, True]"


@pytest.fixture
def fake(device: str) -> Iterator[str]:
    with device_guards.stand_in(device), FakeTensorMode():
        yield device


def test_in_place_ops_work(fake: str) -> None:
    t = torch.empty(2, 3, device=fake)
    t.add_(1).mul_(2)
    t[0] = 5
    torch.add(t, t, out=torch.empty(2, 3, device=fake))
    assert t.device.type == fake


def test_indexing_works(fake: str) -> None:
    t = torch.empty(4, 3, device=fake)
    index = torch.zeros(2, dtype=torch.int64, device=fake)
    assert t[0].shape == (3,)
    assert t[index].shape == (2, 3)
    assert t[..., 1:].shape == (4, 2)
    assert t.index_select(0, index).shape == (2, 3)


def test_weights_that_require_grad_work_forward(fake: str) -> None:
    weight = torch.empty(3, 3, device=fake).requires_grad_()
    made = (torch.empty(2, 3, device=fake) @ weight).relu()
    assert made.requires_grad
    assert made.device.type == fake


def test_what_is_not_known_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    device_guards._c10.cache_clear()
    monkeypatch.setattr(device_guards, "_REGISTRAR", "_ZN3c104impl7nothingE")
    try:
        assert device_guards._c10() is None
        assert not device_guards.register_guard("maia")
        assert not device_guards.has_guard("cpu")
    finally:
        device_guards._c10.cache_clear()


def test_a_registry_of_another_layout_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots that every torch fills tell whether the numbers are what we think."""
    device_guards._c10.cache_clear()
    monkeypatch.setitem(device_guards._TYPES, "meta", 2)  # MKLDNN, which has no guard
    try:
        assert device_guards._c10() is None
    finally:
        device_guards._c10.cache_clear()


@pytest.mark.parametrize("here", [True, False])
def test_a_guard_of_a_device_that_is_not_here_is_replaced_for_a_block(
    here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch built for a device has a guard that raises where no driver is."""
    found = device_guards._c10()
    assert found is not None
    registry, number = found[1], device_guards._TYPES["mtia"]
    own, nothing = registry[device_guards._TYPES["cpu"]], registry[device_guards._TYPES["meta"]]
    before = registry[number]
    monkeypatch.setattr(device_guards, "_is_here", lambda device: here)
    registry[number] = own
    try:
        with device_guards.stand_in("mtia"):
            assert registry[number] == (own if here else nothing)
        assert registry[number] == own
    finally:
        registry[number] = before
