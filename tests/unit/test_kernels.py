"""Every autocast kernel that torch's dispatcher lists is in the catalogue, or is said why not.

This asks the installed torch, so that a new release which adds a kernel fails here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
import torch

from amp_fuzz.backends.dispatcher import kernels
from amp_fuzz.catalogue import CATALOGUE, Op
from amp_fuzz.catalogue.unreachable import LISTED, UNREACHABLE, unreachable
from amp_fuzz.reference import tabled_devices
from amp_fuzz.strategies.drawing import usable
from amp_fuzz.versions import holds

DEVICES = tabled_devices()


def listed(device: str) -> set[str]:
    """Return the overloads that have a kernel of their own on the device's autocast key."""
    key = f"Autocast{device.upper()}"
    return {
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")  # tests before this one may have ops of their own
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    }


def missing(device: str, ops: Iterable[Op], reasons: Mapping[str, str]) -> list[str]:
    """Return the kernels of a device that no op usable there claims and that no reason excuses."""
    claimed = {overload for op in usable(ops, device) for overload in op.overloads}
    excused = {f"aten::{name}" for name, why in reasons.items() if why.strip()}
    return sorted(listed(device) - claimed - excused)


@pytest.mark.parametrize("device", DEVICES)
def test_every_kernel_of_a_device_is_in_the_catalogue_or_excused(device: str) -> None:
    left_out = missing(device, CATALOGUE.values(), UNREACHABLE)
    assert not left_out, f"add to amp_fuzz/catalogue, or to unreachable.py: {', '.join(left_out)}"


@pytest.mark.parametrize("device", DEVICES)
def test_the_dispatcher_lists_kernels_for_each_device(device: str) -> None:
    assert len(listed(device)) > 80


@pytest.mark.parametrize("device", DEVICES)
def test_coverage_is_measured_against_the_same_list(device: str) -> None:
    counted = kernels(device)
    assert {f"aten::{n}" for n in (*counted.reachable, *counted.unreachable)} == listed(device)


def test_kernels_of_other_libraries_ops_are_not_counted() -> None:
    """Torchvision has some; nothing that is drawn can reach them."""
    library = torch.library.Library("amp_fuzz_test", "FRAGMENT")
    library.define("kernel(Tensor x) -> Tensor")
    library.impl("kernel", lambda x: x, "AutocastCPU")
    try:
        assert "aten::mm" in listed("cpu")
        counted = kernels.__wrapped__("cpu")
        assert counted == kernels("cpu")
        assert "mm" in counted.reachable
        assert not [name for name in counted.reachable if "::" in name]
    finally:
        library._destroy()


def test_no_excuse_is_stale() -> None:
    everything = set().union(*map(listed, DEVICES))
    claimed = {overload for op in CATALOGUE.values() for overload in op.overloads}
    for entry in LISTED:
        for name in entry.overloads:
            listed_here = f"aten::{name}" in everything
            expected = holds(entry.torch) and (entry.everywhere or listed_here)
            assert listed_here is expected, f"{name}: torch={entry.torch!r} is wrong"
            assert f"aten::{name}" not in claimed, f"{name} is reached after all"


def test_an_excuse_holds_for_its_versions_of_torch_alone() -> None:
    assert "softmax.Dimname" in dict(unreachable("2.12.1"))
    assert "softmax.Dimname" not in dict(unreachable("2.13.0"))


def test_a_kernel_that_is_missing_is_named() -> None:
    without = [op for op in CATALOGUE.values() if "aten::addmm" not in op.overloads]
    assert "aten::addmm" in missing("cpu", without, {})
    assert "aten::addmm" in missing("cpu", without, {"addmm": " "})
    assert "aten::addmm" not in missing("cpu", without, {"addmm": "for a reason"})


def test_an_op_of_other_devices_covers_nothing_here() -> None:
    only_there = [op for op in CATALOGUE.values() if op.devices and "cpu" not in op.devices]
    assert missing("cpu", only_there, {}) == sorted(listed("cpu"))
