"""An object store on the loopback interface, and a file system of fsspec's for it.

``objects://127.0.0.1:PORT/BUCKET/NAME``. As S3 does, it writes a file whole or not at all. It has
no append, no rename, no folders and no locks, and a bucket must exist. The file system works in any
process that finds what `install` writes. The server is a thread of the test's process.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from fsspec import AbstractFileSystem


class ObjectFiles(AbstractFileSystem):
    """The file system, over HTTP. As that of S3 does, it remembers what it listed."""

    protocol = "objects"

    def _asked(self, method: str, path: str, data: bytes | None = None, query: str = "") -> bytes:
        url = f"http://{quote(self._strip_protocol(path), safe='/:')}{query}"
        request = urllib.request.Request(url, data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                content: bytes = answer.read()
                return content
        except urllib.error.HTTPError as error:
            said = error.read().decode()
            if error.code == 404:
                raise FileNotFoundError(said) from error
            raise OSError(said) from error

    def find(self, path: str, *_: Any, detail: bool = False, **__: Any) -> Any:
        found = self.dircache.get(path)
        if found is None:
            host, bucket, *inside = self._strip_protocol(path).split("/", 2)
            prefix = quote("".join(inside))
            told = json.loads(self._asked("GET", f"{host}/{bucket}", query=f"?list={prefix}"))
            found = self.dircache[path] = {
                f"{host}/{bucket}/{name}": {"name": name, "size": size, "mtime": at, "type": "file"}
                for name, size, at in told
            }
        return found if detail else list(found)

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        return self.find(path, detail=detail)

    def exists(self, path: str, **_: Any) -> bool:
        try:
            return bool(self.find(path))
        except FileNotFoundError:
            return False

    def isdir(self, path: str) -> bool:
        return False

    def cat_file(self, path: str, *_: Any, **__: Any) -> bytes:
        return self._asked("GET", path)

    def get_file(self, path: str, here: str, *_: Any, **__: Any) -> None:
        Path(here).write_bytes(self.cat_file(path))

    def pipe_file(self, path: str, value: bytes, *_: Any, **__: Any) -> None:
        self._asked("PUT", path, value)
        self.invalidate_cache()

    def put_file(self, here: str, path: str, *_: Any, **__: Any) -> None:
        self.pipe_file(path, Path(here).read_bytes())

    def rm_file(self, path: str) -> None:
        self._asked("DELETE", path)
        self.invalidate_cache()

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()


def _fine(name: str) -> str:
    return ""


@dataclass
class Bucket:
    """The bucket ``b`` of a server: names with their contents and times.

    fails: says of a file why it cannot be written now, or "". puts: how often each was written.
    """

    url: str
    files: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    fails: Callable[[str], str] = _fine
    puts: dict[str, int] = field(default_factory=dict)

    def names(self, ending: str = "") -> list[str]:
        return sorted(name for name in self.files if name.endswith(ending))


@contextmanager
def served() -> Iterator[Bucket]:
    """Serve a bucket for the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    bucket = Bucket(f"objects://127.0.0.1:{server.server_port}/b")
    server.bucket = bucket  # type: ignore[attr-defined]
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield bucket
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    def _answer(self, code: int, content: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass

    def _named(self) -> str | None:
        bucket, _, name = unquote(urlsplit(self.path).path).lstrip("/").partition("/")
        if bucket == "b":
            return name
        self._answer(404, b"there is no such bucket")
        return None

    def do_GET(self) -> None:
        files = self.server.bucket.files  # type: ignore[attr-defined]
        if (name := self._named()) is None:
            return
        asked = parse_qs(urlsplit(self.path).query, keep_blank_values=True).get("list")
        if asked is not None:
            folder = f"{asked[0].rstrip('/')}/" if asked[0] else ""
            all_files = sorted(files.items())
            found = [[n, len(c), at] for n, (c, at) in all_files if n.startswith(folder)]
            self._answer(200, json.dumps(found).encode())
        elif name in files:
            self._answer(200, files[name][0])
        else:
            self._answer(404, name.encode())

    def do_PUT(self) -> None:
        bucket: Bucket = self.server.bucket  # type: ignore[attr-defined]
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if (name := self._named()) is None:
            return
        if why := bucket.fails(name):
            self._answer(507, why.encode())
            return
        bucket.files[name] = content, time.time()
        bucket.puts[name] = bucket.puts.get(name, 0) + 1
        self._answer(200)

    def do_DELETE(self) -> None:
        if (name := self._named()) is not None:
            self.server.bucket.files.pop(name, None)  # type: ignore[attr-defined]
            self._answer(200)


def install(folder: Path) -> dict[str, str]:
    """Write what lets another process use `objects://`; return the variables that it needs."""
    (folder / "objects_of_tests.py").write_text(Path(__file__).read_text("utf-8"), "utf-8")
    about = folder / "objects_of_tests-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: objects-of-tests\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[fsspec.specs]\nobjects = objects_of_tests:ObjectFiles\n"
    )
    before = filter(None, [os.environ.get("PYTHONPATH")])
    return {
        "PYTHONPATH": os.pathsep.join([str(folder), *before]),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
