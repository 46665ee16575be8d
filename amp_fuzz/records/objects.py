"""Files at a URL: an object store, or anything else that fsspec writes (``s3://``, ``gs://``).

An object store has no append, no rename and no locks. It writes a file whole or not at all, and
lists what was written before.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from amp_fuzz.records.outputs import StoreError

__all__ = ["Gone", "Objects", "Stat"]

_T = TypeVar("_T")


class Gone(StoreError):
    """A file that was listed and is no longer there: list again."""


class Stat(NamedTuple):
    """The size of a file in bytes, and when it was saved, in seconds since the epoch, or 0."""

    size: int
    saved: float


# What file systems call the time of the last change.
_SAVED = ("LastModified", "last_modified", "mtime", "updated", "created")


class Objects:
    """The files below a URL. Their names are relative to it, with slashes.

    Raises `StoreError` for everything that fails, with the URL and what the file system said.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/") if not url.endswith("://") else url
        try:
            import fsspec
        except ImportError as error:
            raise StoreError(f"{url}: reading URLs needs fsspec: pip install fsspec") from error
        try:
            files, root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise StoreError(f"{url}: a package is missing: {error}") from error
        except Exception as error:  # each file system has errors of its own
            raise StoreError(f"{url}: cannot be read ({_said(error)})") from error
        self._files: Any = files
        self._root: str = root.rstrip("/")

    @property
    def name(self) -> str:
        """The last part of the URL's path, or ""."""
        return self._root.rpartition("/")[2]

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if self._root else name

    def _tried(self, what: str, name: str, act: Callable[[], _T]) -> _T:
        where = f"{self.url}/{name}" if name else self.url
        try:
            return act()
        except FileNotFoundError as error:
            raise Gone(f"{where}: {what} ({_said(error)})") from error
        except Exception as error:  # each file system has errors of its own
            raise StoreError(f"{where}: {what} ({_said(error)})") from error

    def names(self, folder: str = "") -> dict[str, Stat]:
        """Return the files below a folder, in order; none if there is no such folder."""

        def found() -> Mapping[str, Any]:
            self._files.invalidate_cache()  # others write here
            listed: Mapping[str, Any] = self._files.find(
                self._path(folder) if folder else self._root, detail=True
            )
            return listed

        listed = self._tried("cannot be read", folder, found)
        inside = {path[len(self._root) :].lstrip("/"): about for path, about in listed.items()}
        return {name: _stat(about) for name, about in sorted(inside.items()) if name}

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises `Gone` if there is none."""

        def content() -> bytes:
            data: bytes = self._files.cat_file(self._path(name))
            return data

        return self._tried("cannot be read", name, content)

    def fetch(self, names: Iterable[str], folder: Path, stats: Mapping[str, Stat]) -> None:
        """Copy files to a folder of this machine, under their names, with their times.

        A reader of the folder sees each of them whole. Raises `Gone` if one is no longer there.
        """
        wanted = list(names)
        if not wanted:
            return
        with tempfile.TemporaryDirectory(prefix=".amp-fuzz-", dir=folder) as spare:
            copies = {name: Path(spare) / str(i) for i, name in enumerate(wanted)}
            there, here = map(self._path, wanted), map(str, copies.values())
            self._tried(
                "cannot be read",
                wanted[0] if len(wanted) == 1 else "",
                lambda: self._files.get(list(there), list(here)),  # several at a time, if it can
            )
            for name, copy in copies.items():
                if name in stats:
                    saved = stats[name].saved
                    os.utime(copy, (saved, saved))
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                copy.replace(folder / name)

    def write(self, name: str, data: bytes) -> None:
        """Write a file, whole."""
        self._tried("cannot write", name, lambda: self._made(name, data))

    def put(self, name: str, path: Path) -> None:
        """Write a file from one of this machine."""
        self._tried("cannot write", name, lambda: self._made(name, path))

    def _made(self, name: str, what: bytes | Path) -> None:
        path = self._path(name)

        def act() -> None:
            if isinstance(what, bytes):
                self._files.pipe_file(path, what)
            else:
                self._files.put_file(str(what), path)

        try:
            act()
        except FileNotFoundError:
            # A file system with folders wants them made. In an object store the bucket is missing,
            # and making folders would make it.
            if not self._files.exists(self._root):
                raise
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            act()

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, those that are there."""
        for name in names:
            with suppress(Gone):
                self._tried("cannot remove", name, partial(self._files.rm_file, self._path(name)))

    def check(self) -> None:
        """Write a small file, read it back, and remove it. Raises `StoreError` if that fails."""
        name, data = f".amp-fuzz-{secrets.token_hex(8)}", str(time.time()).encode()
        self.write(name, data)
        if self.read(name) != data:
            raise StoreError(f"{self.url}: what was written reads back as something else")
        self.remove([name])


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _stat(about: Mapping[str, Any]) -> Stat:
    size = about.get("size")
    saved = next((about[key] for key in _SAVED if about.get(key)), 0.0)
    if isinstance(saved, str):
        with suppress(ValueError):
            saved = datetime.fromisoformat(saved)
    if isinstance(saved, datetime):
        saved = saved.timestamp()
    return Stat(int(size or 0), float(saved) if isinstance(saved, int | float) else 0.0)
