"""Where the process of a shard writes: the store itself, or a folder that is sent to a URL."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from amp_fuzz.config import cache_folder
from amp_fuzz.records.objects import Gone, Objects
from amp_fuzz.records.parts import Shipper, Superseded
from amp_fuzz.records.store import Store, StoreError, backend_name, load_finding

__all__ = ["Away", "Here"]


class Here:
    """A store in a folder that all nodes see: the process writes to it."""

    def __init__(self, store: str, log: str) -> None:
        self.store, self.output = Store(store), Path(log)

    @contextmanager
    def taken(self, *, findings: bool) -> Iterator[None]:
        """Have the run for the block. findings: it judges those of the store."""
        yield

    def look(self) -> None:
        """Do what is due while the process runs."""

    @property
    def last(self) -> str:
        """The last line of the output."""
        return _last(self.output)


_OFTEN, _SELDOM = 2.0, 60.0  # seconds between two parts: at first, and after an hour
_PATIENCE = 120.0  # seconds for an earlier attempt to send the rest
_AGAIN = (1.0, 5.0, 20.0)  # seconds to wait before the last part is sent again


class Away:
    """A store at a URL: the process writes to a folder of this machine, which is sent in parts.

    The folder is removed after all of it was sent. It stays if this fails: the next attempt on
    this machine sends the rest, unless another machine has taken the run over.
    """

    def __init__(self, url: str, run: str, log: str) -> None:
        self.objects = Objects(url)
        self.run, self.log = run, log.removeprefix(f"{self.objects.url}/")
        root = cache_folder() / "sweeps" / run
        self.store, self.output = Store(root), root / "output.log"
        here = self.store.run_path(run)
        self._shipper = Shipper(self.objects, f"runs/{run}", here, root / "mark")
        self._sent: dict[str, tuple[int, int]] = {}
        self.last = "no output"
        self._began = self._shipped = time.monotonic()

    @contextmanager
    def taken(self, *, findings: bool) -> Iterator[None]:
        with self._locked():
            self.store.create()
            self._shipper.begin()
            self._fetch(findings=findings)
            try:
                yield
            finally:
                self._conclude()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep another attempt on this machine from the folder. Raises `StoreError`."""
        path = cache_folder() / "locks" / f"{self.run}.lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(path, timeout=_PATIENCE):
                yield
        except Timeout:
            raise StoreError(f"{path}: an earlier attempt still sends: try again") from None
        except OSError as error:  # the disk of this machine
            raise StoreError(f"{cache_folder()}: cannot write ({error.strerror})") from error

    def _fetch(self, *, findings: bool) -> None:
        """Bring what earlier attempts printed, and the findings of the store, if wanted."""
        stats = self.objects.names("findings") if findings else {}
        self.objects.fetch(stats, self.store.root, stats)
        self._sent = {
            path.name: _state(path) for path in self._findings() if f"findings/{path.name}" in stats
        }
        if not self.output.exists():
            with suppress(Gone):
                self.output.write_bytes(self.objects.read(self.log))

    def _findings(self) -> list[Path]:
        return sorted((self.store.root / "findings").glob("*.json"))

    def look(self) -> None:
        """Send what was recorded, from time to time.

        Raises `Superseded` if another process continues the run. Other failures may pass: the next
        look sends the same again.
        """
        now = time.monotonic()
        if now - self._shipped < min(max(_OFTEN, (now - self._began) / 60), _SELDOM):
            return
        self._shipped = now
        try:
            self._ship(ended=False)
        except Superseded:
            raise
        except StoreError:
            pass

    def _ship(self, *, ended: bool) -> None:
        for path in self._findings():
            if self._sent.get(path.name) != (state := _state(path)):
                name = backend_name(load_finding(path))  # no other process has one of this name
                self.objects.put(f"findings/{name}.json", path)
                self._sent[path.name] = state
        self._shipper.ship(ended=ended)

    def _conclude(self) -> None:
        """Send the rest. Raises `StoreError`, which says where the records are, if that fails."""
        for wait in (*_AGAIN, None):
            try:
                if self.output.exists():
                    self.objects.put(self.log, self.output)
                self._ship(ended=True)
                break
            except Superseded:  # its cases run there
                shutil.rmtree(self.store.root, ignore_errors=True)
                raise
            except StoreError as error:
                if wait is None:
                    raise StoreError(
                        f"{error}: the records are kept: amp-fuzz report {self.run} "
                        f"--store={self.store.root}"
                    ) from error
                time.sleep(wait)
        if self.output.exists():
            self.last = _last(self.output)
        shutil.rmtree(self.store.root, ignore_errors=True)


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size


def _last(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("amp-fuzz: ") if lines else "no output"
