"""The platform that JAX finds, and what its documentation says of the arithmetic there.

JAX takes the best platform that its plugins offer, or what ``JAX_PLATFORMS`` says. Products (matrix
products and convolutions) of float32 may round their inputs, as `jax.lax.Precision` documents:

======== =========================== ====================== ===========
platform ``default``                 ``high``               ``highest``
======== =========================== ====================== ===========
cpu      float32                     float32                float32
gpu      TensorFloat-32 if available TensorFloat-32         float32
tpu      bfloat16, one pass          bfloat16, three passes six passes
======== =========================== ====================== ===========

This file imports only the standard library, so that `found` may run it as a script.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from typing import Literal

__all__ = ["PRECISIONS", "Platform", "PlatformError", "configure", "found", "here", "multiplying"]

PRECISIONS: dict[str, Literal["default", "high", "highest"]] = {
    "default": "default",
    "bfloat16": "default",
    "high": "high",
    "tensorfloat32": "high",
    "highest": "highest",
    "float32": "highest",
}
"""The names of ``jax_default_matmul_precision`` that are levels, and the level of each."""

_SECONDS = 120.0


class PlatformError(RuntimeError):
    """JAX finds no platform, or one that cannot be used. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Platform:
    """A platform of JAX.

    name: ``cpu``, ``gpu`` or ``tpu``. kind: of its devices, as in "TPU v5e". devices: how many.
    precision: the level of ``jax_default_matmul_precision``. capability: the compute capability of
    an NVIDIA GPU, or "". versions: "jax 0.10.2, jaxlib 0.10.2". flags: ``XLA_FLAGS``.
    """

    name: str
    kind: str
    devices: int = 1
    precision: Literal["default", "high", "highest"] = "default"
    capability: str = ""
    versions: str = ""
    flags: str = ""

    def __str__(self) -> str:
        many = f"{self.devices} x " if self.devices > 1 else ""
        kind = f" ({many}{self.kind})" if many or self.kind != self.name else ""
        words = [f"{self.versions} on {self.name}{kind}"]
        if self.precision != "default":
            words.append(f"matmul precision {self.precision}")
        if self.flags:
            words.append(f"XLA_FLAGS={self.flags}")
        if self.exclusive:
            words.append("one process at a time")
        return ", ".join(words)

    @property
    def exclusive(self) -> bool:
        """Whether only one process can use it: libtpu locks a TPU."""
        return self.name == "tpu"

    @property
    def has_tf32(self) -> bool:
        """Whether its products may be TensorFloat-32: on NVIDIA's GPUs from Ampere on.

        Of a GPU without a compute capability (AMD's), it is unknown, so they may.
        """
        if self.name != "gpu":
            return False
        number = self.capability.partition(".")[0]
        return not number.isdecimal() or int(number) >= 8


def configure(flags: str = "") -> None:
    """Set the environment of a process before it imports JAX. flags: XLA's, after the user's.

    Workers share a GPU, so none takes most of its memory at the start, unless the user says so.
    """
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def here() -> Platform:
    """Return the platform of this process, which it takes. Imports JAX.

    Raises `PlatformError`.
    """
    import jax
    import jaxlib

    name = jax.config.jax_default_matmul_precision or "default"
    if name not in PRECISIONS:
        raise PlatformError(
            f"JAX_DEFAULT_MATMUL_PRECISION={name}: an algorithm is not supported: use one of "
            f"{', '.join(PRECISIONS)}"
        )
    try:
        devices = jax.devices()
    except (AssertionError, RuntimeError) as error:  # jax 0.10.2 asserts that a plugin is there
        first = str(error).partition("\n")[0] or "no plugin"
        asked = os.environ.get("JAX_PLATFORMS", "")
        way = f"JAX_PLATFORMS={asked}: install its plugin, or set" if asked else "set"
        raise PlatformError(f"JAX finds no device ({first}): {way} JAX_PLATFORMS=cpu") from error
    return Platform(
        jax.default_backend(),
        devices[0].device_kind,
        len(devices),
        PRECISIONS[name],
        str(getattr(devices[0], "compute_capability", "") or ""),
        f"jax {jax.__version__}, jaxlib {jaxlib.__version__}",
        os.environ.get("XLA_FLAGS", ""),
    )


@contextmanager
def multiplying(precision: str) -> Iterator[None]:
    """Set the precision of products for a block, in every thread; ``default`` changes nothing."""
    import jax

    before = jax.config.jax_default_matmul_precision
    if precision != "default":
        jax.config.update("jax_default_matmul_precision", precision)
    try:
        yield
    finally:
        jax.config.update("jax_default_matmul_precision", before)


_CACHE = ("JAX_COMPILATION_CACHE", "JAX_ENABLE_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE")


def found() -> Platform:
    """Return the platform that a process would find, without taking it.

    A short process asks JAX, once for each environment: it takes seconds, and is left out where
    only the CPU can be found. Settings of JAX's compilation cache do not choose a platform. Raises
    `PlatformError`.
    """
    settings = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("JAX_", "XLA_", "TPU_")) and not name.startswith(_CACHE)
    }
    if not settings and not _plugins():
        return _cpu()
    state = _asked(tuple(sorted(settings.items())))
    if isinstance(state, str):
        raise PlatformError(state)
    return state


@cache
def _plugins() -> bool:
    """Return whether a package is installed in which JAX looks for other platforms."""
    named = importlib.metadata.entry_points(group="jax_plugins")
    return bool(named) or any(map(importlib.util.find_spec, ("jax_plugins", "libtpu")))


@cache
def _cpu() -> Platform:
    """Return what JAX finds without plugins and settings."""
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib"))
    return Platform("cpu", "cpu", versions=", ".join(versions))


@cache
def _asked(settings: tuple[tuple[str, str], ...]) -> Platform | str:
    # -P: beside this file are modules with the names of others.
    command = [sys.executable, "-P", __file__]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return f"JAX finds no device within {_SECONDS:.0f} s: set JAX_PLATFORMS=cpu"
    lines = done.stdout.splitlines()
    try:
        answer = json.loads(lines[-1])
        return str(answer["error"]) if "error" in answer else Platform(**answer)
    except (IndexError, TypeError, ValueError):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return f"JAX does not start ({last}): mend JAX_* and XLA_FLAGS, or reinstall amp-fuzz[jax]"


def _main() -> None:
    configure()
    try:
        answer = asdict(here())
    except PlatformError as error:
        answer = {"error": str(error)}
    sys.stdout.write(f"{json.dumps(answer)}\n")


if __name__ == "__main__":
    _main()
