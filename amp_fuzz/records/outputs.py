"""Write the files that a command is told to write, and change nothing else about them.

The path is the user's: a new file, an old one, a symlink, a device, a FIFO.
"""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

__all__ = ["StoreError", "write_whole"]


class StoreError(RuntimeError):
    """A file that cannot be read or written. The message names it and says what to do."""


def write_whole(path: Path, data: bytes) -> None:
    """Write a file. A reader sees all of it, or the old one.

    Only a regular file is replaced, at the end of its symlinks, by one with its owner and mode.
    What is none (a device, a FIFO) is written as it is, and so is a file whose folder or whose
    mount allows no other. Raises `StoreError`; a regular file is then unchanged.
    """
    target = Path(os.path.realpath(path))
    # ``/dev/stdout`` may lead to a regular file, but that one is open elsewhere: it must stay.
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
    beside = path.with_name(f".amp-fuzz-{os.getpid()}")
    try:
        beside.write_bytes(data)
        if path.exists():
            os.close(os.open(path, os.O_WRONLY))  # a file that is read-only stays as it is
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
    """Write what is there already. Linux refuses O_CREAT for the FIFO of somebody else."""
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags & ~os.O_CREAT)) as file:
        file.write(data)
