"""Make JAX compile less: keep compiled programs on disk, and share MLIR contexts.

Op by op, a case needs some 50 compilations of a few milliseconds each, nearly all of its time. Both
measures leave XLA's module, flags and passes unchanged.

**The disk.** JAX's persistent cache is keyed by a hash of the module, the flags, the versions and
the machine, so a cached program equals the compiled one. The folder is
``JAX_COMPILATION_CACHE_DIR`` or `folder`; settings of JAX's cache in the environment take
precedence. JAX's own size limit (``JAX_COMPILATION_CACHE_MAX_SIZE``) reads every file of the folder
for each new entry. Here the folder is trimmed at the start of a process, and now and then. A full
or read-only disk costs only speed: JAX warns, and compiles.

**The context.** JAX creates an MLIR context for each module that it lowers. This takes some 5 ms,
and 1.2 MiB while the compiled op lives. Modules may share a context, which interns their types,
attributes and locations. An internal function of JAX is replaced; if it is missing, nothing is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from amp_fuzz.config import cache_folder

__all__ = ["KEPT", "folder", "frugal", "shared", "tidy", "trim"]

KEPT = 256 * 2**20
"""Bytes that the folder may hold after trimming: some 60,000 ops, or 7,000 programs."""

_MODULES = 1000  # modules that share a context, whose interned data is then freed


def frugal() -> None:
    """Make JAX compile less in this process. Call it before JAX first computes."""
    import jax

    if path := _own():
        with suppress(OSError):  # JAX tries again, and warns
            path.mkdir(
                parents=True, exist_ok=True, mode=0o700
            )  # whoever can write here can run code
        tidy()
        jax.config.update("jax_compilation_cache_dir", str(path))
    for name, value in (("MIN_COMPILE_TIME_SECS", 0), ("MIN_ENTRY_SIZE_BYTES", -1)):
        if f"JAX_PERSISTENT_CACHE_{name}" not in os.environ:
            jax.config.update(f"jax_persistent_cache_{name.lower()}", value)
    with suppress(ImportError, AttributeError):
        from jax._src.interpreters import mlir

        mlir.make_ir_context = shared(mlir.make_ir_context)


def tidy() -> None:
    """Trim the folder, unless it is the user's. Call it now and then."""
    if path := _own():
        with suppress(OSError):
            trim(path)


def _own() -> Path | None:
    """Return `folder`, or None if the user named another."""
    return None if os.environ.get("JAX_COMPILATION_CACHE_DIR") else folder()


def folder() -> Path:
    """Return the folder of compiled programs."""
    return cache_folder() / "jax"


def trim(path: Path, kept: int = KEPT) -> None:
    """Delete the oldest files of a folder that holds more than `kept` bytes, to 3/4 of that.

    Other processes may use it at the same time. Raises OSError if it cannot be read.
    """
    found = []
    with os.scandir(path) as entries:
        for entry in entries:
            with suppress(OSError):  # another process was first
                if entry.is_file(follow_symlinks=False):
                    stat = entry.stat()
                    found.append((stat.st_mtime, stat.st_size, entry.path))
    size = sum(size for _, size, _ in found)
    if size <= kept:
        return
    for _, one, name in sorted(found):
        if size <= kept * 3 // 4:
            return
        with suppress(OSError):
            Path(name).unlink()
        size -= one


def shared(make: Callable[[], Any], modules: int = _MODULES) -> Callable[[], Any]:
    """Return a function that returns a shared context, and a new one after a number of modules."""
    if hasattr(make, "made_by"):
        return make
    held: Any = None
    asked = 0

    def context() -> Any:
        nonlocal held, asked
        if asked % modules == 0:
            held = make()
        asked += 1
        return held

    context.made_by = make  # type: ignore[attr-defined]
    return context
