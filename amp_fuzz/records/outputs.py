"""Write output files without changing anything else about them.

The path is the user's: a new file, an old one, a symlink, a device, a FIFO.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

__all__ = ["StoreError", "write_whole"]


class StoreError(RuntimeError):
    """A file that cannot be read or written. The message names it and says what to do."""


def write_whole(path: Path, data: bytes) -> None:
    """Write a file. A reader sees either the whole new file or the old one.

    A regular file, behind any symlinks, is replaced by one with its owner and mode. A device or a
    FIFO is written to, and so is a file that its folder or mount does not let us replace. Raises
    `StoreError`; a regular file is then unchanged.
    """
    target = Path(os.path.realpath(path))
    # ``/dev/stdout`` may lead to a regular file, but it is open elsewhere and must stay.
    opened = path.absolute().parts[1:2] in (("dev",), ("proc",))
    try:
        if opened or (os.path.lexists(target) and not target.is_file()):
            _write(path, data)
        else:
            _replace(target, data)
    except OSError as error:
        raise StoreError(f"{path}: cannot write ({error.strerror or error})") from error


_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV)


def _replace(path: Path, data: bytes) -> None:
    """Write beside a file and rename. If that is refused, write an old file in place."""
    # Not by process: two machines or containers that share the folder may have the same number.
    beside = path.with_name(f".amp-fuzz-{secrets.token_hex(8)}")
    try:
        beside.write_bytes(data)
        if path.exists():
            os.close(os.open(path, os.O_WRONLY))  # a read-only file stays unchanged
            shutil.copystat(path, beside)
            os.utime(beside)
            old = path.stat()
            os.chown(beside, old.st_uid, old.st_gid)
        beside.replace(path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        if error.errno not in _REFUSED or not path.exists():
            raise
        old_data = path.read_bytes()
        try:
            _write(path, data)
        except OSError:
            _write(path, old_data)
            raise


def _write(path: Path, data: bytes) -> None:
    """Write to an existing path. Linux refuses O_CREAT for another user's FIFO."""
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags & ~os.O_CREAT)) as file:
        file.write(data)
