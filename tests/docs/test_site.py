"""The site builds without a warning, is readable on a phone, and passes axe-core."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.precision.test_text import result

pytestmark = pytest.mark.slow

MODULES = ROOT / "docs" / "node_modules"  # npm ci --prefix docs
SECTIONS = (
    "index.html",
    "guide/first-run.html",
    "reference/options.html",
    "reference/api.html",
    "internals/shadow.html",
    "evidence/known-by-version.html",
    "findings/torch/cache.html",
    "search.html",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("pydata_sphinx_theme") is None:
        pytest.skip("needs the extra docs: make docs")
    folder = tmp_path_factory.mktemp("site")
    argv = [sys.executable, "-m", "sphinx", "--nitpicky", "--fail-on-warning", "--keep-going"]
    argv += ["--quiet", "-d", str(folder / "doctrees"), str(ROOT / "docs"), str(folder / "html")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "html"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def served(site: Path) -> Iterator[str]:
    """Return the address of the site, on the loopback interface."""
    handler = functools.partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def faults(root: str, *pages: str) -> list[str]:
    """Return what is wrong with pages, in light and dark, at 1280 and 390 pixels."""
    node, chromium = shutil.which("node"), shutil.which("chromium")
    if not node or not chromium or not (MODULES / "axe-core").exists():
        pytest.skip("needs node, chromium, and axe-core: npm ci --prefix docs")
    argv = [node, str(Path(__file__).with_name("axe.mjs")), str(MODULES), chromium, root, *pages]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


def test_axe_finds_nothing_on_a_page_of_each_section(served: str) -> None:
    assert faults(served, *SECTIONS) == []


def test_axe_finds_nothing_on_the_page_of_precision(served: str, site: Path) -> None:
    result().write_html(site / "precision.html")
    assert faults(served, "precision.html") == []


def test_a_fault_of_a_page_is_noticed(served: str, site: Path) -> None:
    (site / "broken.html").write_text(
        "<html><body><img src='https://example.invalid/x.png'>"
        "<p style='width: 2000px; color: #999; background: #aaa'>text</p></body></html>"
    )
    found = " ".join(faults(served, "broken.html"))
    for fault in ("image-alt", "color-contrast", "html-has-lang", "wider than", "asks for"):
        assert fault in found


def test_the_search_index_has_each_page(site: Path) -> None:
    index = (site / "searchindex.js").read_text()
    pages = [p for p in (ROOT / "docs").rglob("*.md") if "node_modules" not in p.parts]
    assert len(pages) > 80
    for page in pages:
        assert f'"{page.relative_to(ROOT / "docs").with_suffix("").as_posix()}"' in index
