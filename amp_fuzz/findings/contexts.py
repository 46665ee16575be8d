"""What an autocast context does on other devices, and where it does nothing: for notes.

All of it is what the policy tables say, in one sentence that does not depend on the device at hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from amp_fuzz.policies.tables import Does, PolicyTable
from amp_fuzz.records.schema import Note
from amp_fuzz.reference import load_table, tabled_devices

__all__ = ["Fact", "by_dtype", "without_dtype", "without_tensors"]


class Fact(NamedTuple):
    """What is to be known of a context. devices: the others, where it does something else."""

    message: str
    advice: str
    devices: tuple[str, ...] = ()

    def note(self, backend: str, where: str) -> Note:
        """Return it as a note."""
        devices = ",".join(self.devices)
        return Note("context", backend, "autocast", where, self.message, self.advice, devices)


def by_dtype(device: str, dtype: str) -> Fact | None:
    """Return a fact of an enabled context that asks for a dtype, if devices differ about it.

    That the hardware of some machines lacks a dtype does not count.
    """
    does = {name: table.context(dtype).does for name, table in _tables(device).items()}
    others = tuple(name for name, one in does.items() if one is not does[device])
    if not others:
        return None
    wide = dtype == "float32"
    said = {
        Does.ON: "casts 16-bit operands of products up to float32" if wide else "is on",
        Does.OFF: "warns and is off" + (", so 16-bit operands stay" if wide else ""),
        Does.RAISES: "raises",
    }
    sides = [
        f"on {_joined(name for name in does if does[name] is one)} it {words}"
        for one, words in said.items()
        if one in does.values()
    ]
    advice = "Give it bfloat16 or float16, which every device takes."
    if wide:
        advice = (
            "For float32 on every device, write autocast(enabled=False) and cast the operands "
            "with .float()."
        )
    return Fact(f"a context of {dtype}: {'; '.join(sides)}", advice, others)


def without_dtype(device: str) -> Fact | None:
    """Return a fact of an enabled context of the device's default dtype, if others differ."""
    defaults = {name: table.default_dtype for name, table in _tables(device).items()}
    others = tuple(name for name, dtype in defaults.items() if dtype != defaults[device])
    if not others:
        return None
    sides = [
        f"{dtype} on {_joined(name for name in defaults if defaults[name] == dtype)}"
        for dtype in sorted({*defaults.values()})
    ]
    advice = "Give it a dtype: float16 has more digits, bfloat16 has the range of float32."
    return Fact(f"a context without a dtype is {'; '.join(sides)}", advice, others)


def without_tensors(device: str, tensors: str) -> Fact:
    """Return the fact of a context for a device that none of its tensors is on."""
    return Fact(
        f"a context for {device} changes nothing: every tensor in it is on {tensors}",
        "Give it the device of the tensors: torch.autocast(x.device.type).",
    )


def _tables(device: str) -> dict[str, PolicyTable]:
    return {name: load_table(name) for name in sorted({*tabled_devices(), device})}


def _joined(names: Iterable[str]) -> str:
    return ", ".join(names)
