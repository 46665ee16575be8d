"""Settings of torch that change numbers. A plan has those that are not as torch sets them.

A setting is in a plan as the line that a program would have:
``torch.backends.cuda.matmul.allow_tf32 = True``. What each does is documented in
https://docs.pytorch.org/docs/stable/backends.html and
https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["SETTINGS", "Setting", "drawn_on"]


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting at a value that torch does not give it.

    get: an expression with its value. put: a line that sets it, with ``{}`` for the value. usual:
    what torch sets. value: something else. devices: those on which it changes numbers.
    """

    get: str
    put: str
    usual: bool | str
    value: bool | str
    devices: tuple[str, ...]

    @property
    def line(self) -> str:
        """The line that sets it."""
        return self.put.format(repr(self.value))


def _flag(name: str, usual: bool, *devices: str) -> Setting:
    name = f"torch.backends.{name}"
    return Setting(name, f"{name} = {{}}", usual, not usual, devices)


def _attention(kernels: str, *devices: str) -> Setting:
    """Return a setting without some kernels of `scaled_dot_product_attention`."""
    cuda = "torch.backends.cuda"
    get, put = f"{cuda}.{kernels}_sdp_enabled()", f"{cuda}.enable_{kernels}_sdp({{}})"
    return Setting(get, put, True, False, devices)


def _multiplying(precision: str) -> Setting:
    put = "torch.set_float32_matmul_precision({})"
    name = "torch.get_float32_matmul_precision()"
    return Setting(name, put, "highest", precision, ("cpu", "cuda"))


_ALL = (
    _multiplying("high"),
    _multiplying("medium"),
    _flag("mkldnn.enabled", True, "cpu"),
    _flag("cuda.matmul.allow_fp16_accumulation", False, "cuda"),
    _flag("cuda.matmul.allow_fp16_reduced_precision_reduction", True, "cuda"),
    _flag("cuda.matmul.allow_bf16_reduced_precision_reduction", True, "cuda"),
    _flag("cudnn.allow_tf32", True, "cuda"),
    _flag("cudnn.enabled", True, "cuda"),
    _attention("flash", "cpu", "cuda"),
    _attention("mem_efficient", "cuda"),
    _attention("cudnn", "cuda"),
)

SETTINGS = MappingProxyType({setting.line: setting for setting in _ALL})
"""By their lines."""


def drawn_on(device: str) -> tuple[str, ...]:
    """Return the lines of the settings that change numbers on a device type."""
    return tuple(line for line, setting in SETTINGS.items() if device in setting.devices)
