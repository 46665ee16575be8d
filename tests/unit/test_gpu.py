"""`make gpu`: what a machine lacks is said in words, and wheels that were brought are found."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks import gpu

pytestmark = pytest.mark.thorough


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of wheels: of a package ``absent``, which needs one called ``remote``."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setattr(gpu, "WHEELS", folder)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    _wheel(folder / "absent-1.0-py3-none-any.whl", "absent", "remote>=2; extra != 'docs'")
    return folder


def _wheel(path: Path, name: str, *needs: str) -> None:
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 2.0"]
    lines += [f"Requires-Dist: {need}" for need in needs]
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", "")
        file.writestr(f"{name}-2.0.dist-info/METADATA", "\n".join(lines) + "\n")


def test_what_is_lacking_is_named_with_the_command_that_fetches_it(
    wheels: Path, tmp_path: Path
) -> None:
    with pytest.raises(gpu.Missing, match="lacks remote>=2") as raised:
        gpu.provide(["absent>=1", "pytest>=8"], tmp_path / "site")
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert f'make gpu-bundle GPU_PYTHON={here} GPU_PACKAGES="remote"' in str(raised.value)


def test_wheels_that_were_brought_are_unpacked_with_what_they_need(
    wheels: Path, tmp_path: Path
) -> None:
    _wheel(wheels / "remote-2.0-py3-none-any.whl", "remote")
    gpu.provide(["absent>=1", "pytest>=8"], tmp_path / "site")
    found = {path.name for path in (tmp_path / "site").glob("*.py")}
    assert found == {"absent.py", "remote.py"}  # not pytest, which stands here


def test_a_wheel_of_another_interpreter_is_none(wheels: Path) -> None:
    assert gpu.wheel_of("absent>=1") == wheels / "absent-1.0-py3-none-any.whl"
    _wheel(wheels / "remote-2.0-cp27-cp27mu-manylinux_2_17_x86_64.whl", "remote")
    _wheel(wheels / "remote-2.0-cp311-abi3-win_amd64.whl", "remote")
    assert gpu.wheel_of("remote") is None


def test_without_torch_another_interpreter_is_asked_for(wheels: Path, tmp_path: Path) -> None:
    with pytest.raises(gpu.Missing, match="make gpu PYTHON=/path/to/python"):
        gpu.provide(["torch>=999"], tmp_path / "site")


def test_cells_are_compared_by_their_calls(tmp_path: Path) -> None:
    rows = [
        ("eager-x", "mm", "bfloat16"),
        ("fake-x", "mm", "bfloat16"),
        ("eager-x", "exp", "float32"),
        ("fake-x", "exp", "bfloat16"),
        ("eager-x", "det", "raises RuntimeError"),
        ("fake-x", "det", "float32"),
        ("eager-x", "cdist", "float32"),  # the other was not reached
    ]
    head = "backend,op,call,shapes,autocast_dtype,inputs,observed,status\n"
    body = [f"{b},{op},{op}(x),x,bfloat16,float32,{seen},agree\n" for b, op, seen in rows]
    (tmp_path / "audit.csv").write_text(head + "".join(body))
    found = gpu.cells(tmp_path / "audit.csv", "eager-x")
    assert found["status"] == {"eager-x": {"agree": 4}, "fake-x": {"agree": 3}}
    pair = found["pairs"]["eager-x | fake-x"]
    assert pair["cells"] == {"equal": 1, "dtypes differ": 1, "only the device raises": 1}
    assert pair["ops"]["exp"] == {"dtypes differ: float32 | bfloat16": 1}


def test_a_step_that_hangs_is_stopped_and_told(tmp_path: Path) -> None:
    step = gpu.Step("slow", "sleeps", 1, ("-c", "import time; print('on'); time.sleep(60)"))
    done = gpu.performed(step, 3.0, {"PYTHONUNBUFFERED": "1"}, tmp_path)
    assert done["stopped"]
    assert done["seconds"] < 30
    assert "on" in done["said"]
    assert json.dumps(done)
