"""Make JAX compile less: compiled programs kept on the disk, and one MLIR context for many.

Op by op a case is some 50 compilations of a few milliseconds each, and nearly all of its time. Both
things here leave the module that XLA is given, its flags and its passes as they are.

**The disk.** JAX's persistent cache is keyed by a hash of the module, the flags, the versions and
the machine, so what it finds is what would have been compiled. The folder is that of
``JAX_COMPILATION_CACHE_DIR``, or `folder`; whatever JAX is told about its cache by the environment
stands. JAX's own bound (``JAX_COMPILATION_CACHE_MAX_SIZE``) reads every file of the folder for each
new entry; here the folder is trimmed when a process begins, and now and then. A disk that is full
or read-only costs speed: JAX warns, and compiles.

**The context.** JAX makes an MLIR context for each module that it lowers. That takes some 5 ms, and
1.2 MiB for as long as the compiled op lives. Modules may share one: it interns their types,
attributes and locations. It is JAX's internal function that is replaced; where it is not there,
nothing is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["KEPT", "folder", "frugal", "shared", "tidy", "trim"]

KEPT = 256 * 2**20
"""Bytes that the folder may hold when it is trimmed: some 60,000 ops, or 7,000 programs."""

_MODULES = 1000  # that share a context: what it interned is given back after them


def frugal() -> None:
    """Let JAX compile less in this process. Call it before JAX first computes."""
    import jax

    if path := _own():
        with suppress(OSError):  # JAX tries again, and warns
            path.mkdir(parents=True, exist_ok=True, mode=0o700)  # who may write, may run code
        tidy()
        jax.config.update("jax_compilation_cache_dir", str(path))
    for name, value in (("MIN_COMPILE_TIME_SECS", 0), ("MIN_ENTRY_SIZE_BYTES", -1)):
        if f"JAX_PERSISTENT_CACHE_{name}" not in os.environ:
            jax.config.update(f"jax_persistent_cache_{name.lower()}", value)
    with suppress(ImportError, AttributeError):
        from jax._src.interpreters import mlir

        mlir.make_ir_context = shared(mlir.make_ir_context)


def tidy() -> None:
    """Trim the folder, unless it is the user's: call it now and then."""
    if path := _own():
        with suppress(OSError):
            trim(path)


def _own() -> Path | None:
    """Return `folder`; None: the user named another, or what names it is not installed."""
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return None
    with suppress(ImportError):
        return folder()
    return None


def folder() -> Path:
    """Return where compiled programs are kept: ``amp-fuzz/jax`` in the user's folder of caches."""
    from platformdirs import user_cache_path

    return user_cache_path("amp-fuzz", appauthor=False) / "jax"


def trim(path: Path, kept: int = KEPT) -> None:
    """Delete the oldest files of a folder that holds more than `kept` bytes, to 3/4 of that.

    Other processes may read, write and trim it meanwhile. Raises OSError if it cannot be read.
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
    """Return a function that makes a context once, and another after so many modules."""
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
