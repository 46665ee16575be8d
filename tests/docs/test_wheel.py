"""What the README and the guide say holds for the wheel, installed alone, in an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, WITH_PYTHON, program
from tests.docs.test_lines import SMALL
from tests.unit.test_reports import small_run, store_of

pytestmark = pytest.mark.slow

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment with the wheel; its dependencies are those of this interpreter."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    home = folder / "venv"
    venv.create(home, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python")]
    install = [*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    (site,) = home.glob("lib/python*/site-packages")
    fallback = [path for path in sys.path if path.endswith("site-packages")]
    (site / "zz_dependencies.pth").write_text("\n".join(fallback))
    return home


@pytest.fixture
def run(installed: Path, tmp_path: Path) -> Run:
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    variables |= {f"AMP_FUZZ_{name}": value for name, value in SMALL.items()}

    def run(command: str, *words: str) -> subprocess.CompletedProcess[str]:
        argv = [str(installed / "bin" / command), *words]
        return subprocess.run(
            argv, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=1500
        )

    return run


def test_the_package_is_that_of_the_wheel(run: Run, installed: Path) -> None:
    done = run("python", "-c", "import amp_fuzz; print(amp_fuzz.__file__)")
    assert done.stdout.startswith(str(installed))


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.stem)
def test_the_python_of_a_page_runs(run: Run, page: Path, tmp_path: Path) -> None:
    store_of(tmp_path, small_run())
    (tmp_path / "page.py").write_text(program(page))
    done = run("python", "page.py")
    assert done.returncode == 0, done.stderr


def test_the_commands_of_the_readme_run(run: Run) -> None:
    found = (0, 1)  # 1: something new, which is not this test's matter
    assert run("amp-fuzz", "doctor").returncode in (0, 4)
    assert run("amp-fuzz", "run").returncode in found
    fuzzed = run("python", "-m", "pytest", "--amp-fuzz")
    assert fuzzed.returncode in found, fuzzed.stdout
    assert "amp-fuzz::eager-cpu" in fuzzed.stdout or "passed" in fuzzed.stdout


def test_a_module_that_the_wheel_lacks_is_noticed(run: Run) -> None:
    assert run("python", "-c", "import tests.docs.blocks").returncode == 1
