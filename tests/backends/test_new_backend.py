"""A new backend is one file: announced as a third party does it, it works with every command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amp_fuzz
from amp_fuzz.backends import backends
from amp_fuzz.interfaces.cli import main
from tests.forks import Done, forked
from tests.helpers import brief, call, case, x

# ``toy`` has all that is optional, ``bare`` has none of it. Both take every dtype for float16.
FILE = '''
"""An autocast that does not listen."""

from dataclasses import dataclass

import torch

from amp_fuzz.backends import harness
from amp_fuzz.backends import Availability, Facts
from amp_fuzz.backends.reproducing import TorchRepros, source_of
from amp_fuzz.backends.torch_base import TorchBackend


class Half(torch.autocast):
    """Autocast to float16, whatever the dtype."""

    def __init__(self, device, dtype=None, enabled=True, cache_enabled=None):
        super().__init__(device, torch.float16, enabled, cache_enabled)


@dataclass(frozen=True, slots=True)
class Toy(TorchRepros, TorchBackend):
    name: str = "toy"

    def runtime(self, **more):
        return TorchBackend.runtime(self, **{"autocast": Half, **more})

    def facts(self):
        promise = "[toy](https://toy.example): a program computes what eager computes."
        return Facts(area="toy", made="run by the toy", promise=promise)

    def setup(self, names):
        text = source_of(Half).replace("class Half", "class autocast")
        return [*TorchRepros.setup(self, names), text]


class Bare:
    name = "bare"
    device = "cpu"
    trains = values = exact = repeats = True

    def availability(self):
        return Availability("ready", "always")

    def supports(self, op, form):
        return True

    def fit(self, case):
        return case

    def run(self, cases):
        return [harness.run(case, TorchBackend().runtime(autocast=Half)) for case in cases]

    def ladder(self):
        return ()

    def reference(self):
        return TorchBackend().reference()


def backends():
    return [Toy(), Bare()]
'''

MM = case([x("x0", 2, 2, domain="zeros")], call("mm", "x0", "x0"), backward="none")
DIVERGES = "dtype at v0\n  expected  bfloat16\n  observed  float16\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install the file, and write the case beside it."""
    info = tmp_path / "toy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[amp_fuzz.backends]\ntoy = toy_backend:backends\n")
    (tmp_path / "toy_backend.py").write_text(FILE)
    (tmp_path / "mm.json").write_bytes(MM.json())
    monkeypatch.syspath_prepend(tmp_path)
    backends.cache_clear()
    yield tmp_path
    backends.cache_clear()
    sys.modules.pop("toy_backend", None)


@pytest.fixture
def environment(site: Path) -> dict[str, str]:
    ours = {k: v for k, v in os.environ.items() if not k.startswith("AMP_FUZZ_")}
    before = filter(None, [os.environ.get("PYTHONPATH")])
    return ours | {"PYTHONPATH": os.pathsep.join([str(site), *before])}


@pytest.fixture
def command(
    site: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Done]:
    files = tmp_path_factory.mktemp("outputs")

    def run(*words: str) -> Done:
        return forked(main, words, folder=site, environment=environment, files=files, limit=0)

    return run


def test_both_are_listed_without_a_change_elsewhere(site: Path) -> None:
    assert {"toy", "bare"} <= backends().keys()


@pytest.mark.thorough
@pytest.mark.parametrize("name", brief(["toy", "bare"], "bare"))
def test_run_finds_what_is_wrong(command: Callable[..., Done], name: str) -> None:
    done = command("run", f"--backends={name}", "--ops=mm", "--cases=4", "--seed=1", "--workers=1")
    assert done.code == 1, done.err
    assert "dtype" in done.out


@pytest.mark.parametrize("name", ["toy", "bare"])
def test_explain(command: Callable[..., Done], name: str) -> None:
    done = command("explain", "mm.json", f"--backend={name}")
    assert f"{MM.id} on {name}: DIVERGES: {DIVERGES}" in done.out, done.err


@pytest.mark.thorough
def test_a_repro_imports_only_torch(command: Callable[..., Done], site: Path) -> None:
    done = command("repro", "mm.json", "--backend=toy")
    assert (
        done.out
        == f"""\
# found by amp-fuzz 0.1.0, case {MM.id} on toy
# dtype: v0
# expected: bfloat16
# observed: float16
import sys

# `git bisect run` skips what exits with 125: another error than the finding's.
sys.excepthook = lambda t, *e: sys.__excepthook__(t, *e) or sys.exit(\
130 if t is KeyboardInterrupt else 125)

import torch


# Autocast to float16, whatever the dtype.
class autocast(torch.autocast):
    def __init__(self, device, dtype=None, enabled=True, cache_enabled=None):
        super().__init__(device, torch.float16, enabled, cache_enabled)


x0 = torch.ones(2, 2)

with autocast("cpu", dtype=torch.bfloat16):
    v0 = torch.mm(x0, x0)
print("torch", torch.__version__, "expected:", torch.bfloat16, "observed:", v0.dtype)
sys.exit(v0.dtype != torch.bfloat16)
"""
    )
    script = site / "repro.py"
    script.write_text(done.out)
    assert subprocess.run([sys.executable, script], check=False, timeout=600).returncode == 1


@pytest.mark.thorough
def test_a_pytest_form(command: Callable[..., Done]) -> None:
    text = command("repro", "mm.json", "--backend=toy", "--format=pytest").out
    assert "class autocast(torch.autocast)" in text
    assert "assert observed == expected" in text


@pytest.mark.thorough
def test_without_pieces_of_source_the_script_judges(
    command: Callable[..., Done], site: Path, environment: dict[str, str]
) -> None:
    text = command("repro", "mm.json", "--backend=bare").out
    assert "# needs: amp-fuzz, and the package of bare\n" in text
    script = site / "repro.py"
    script.write_text(text)
    words = [sys.executable, str(script)]
    done = subprocess.run(words, check=False, timeout=600, env=environment, capture_output=True)
    assert done.returncode == 1, done.stderr
    refused = command("repro", "mm.json", "--backend=bare", "--format=pytest")
    assert "only amp-fuzz can run bare: use --format=script" in refused.err


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "heading", "said"),
    [
        (
            "toy",
            "# [toy] torch.mm(x0, x0): result is float16, not bfloat16\n",
            "a program computes what eager computes. Eager gives the expected result here.",
        ),
        (
            "bare",
            "# [amp, cpu] torch.mm(x0, x0): result is float16, not bfloat16\n",
            "`aten::mm` has the policy `lower_precision_fp` on cpu",
        ),
    ],
)
def test_an_issue(command: Callable[..., Done], name: str, heading: str, said: str) -> None:
    done = command("repro", "mm.json", f"--backend={name}", "--format=issue")
    assert done.out.startswith(heading), done.err
    assert said in done.out
    assert ("The program, run by the toy and run under" in done.out) == (name == "toy")


def test_check_calls_a_backend_that_can_be_called(site: Path) -> None:
    model, given = nn.Linear(4, 4), torch.ones(2, 4)
    options: dict[str, Any] = {"store": None, "isolate": False}
    (run,) = amp_fuzz.check(model, given, backends=["toy"], **options).runs
    assert (run.status, run.detail) == ("diverged", "dtype")
    (run,) = amp_fuzz.check(model, given, backends=["toy"], autocast=torch.float16, **options).runs
    assert run.status == "agreed"
    (run,) = amp_fuzz.check(model, given, backends=["bare"], **options).runs
    assert (run.status, run.detail.partition(":")[0]) == (
        "skipped",
        "it runs cases, not callables",
    )


def test_a_file_that_fails_breaks_its_own_backend_alone(
    site: Path, command: Callable[..., Done]
) -> None:
    (site / "toy_backend.py").write_text("raise RuntimeError('no driver\\nfound')\n")
    why = "toy_backend:backends raises RuntimeError: no driver: mend or remove toy"
    done = command("run", "--backends=eager-cpu", "--ops=mm", "--cases=4", "--workers=1")
    assert done.code == 0, done.err
    done = command("doctor")
    assert done.code == 0, done.err
    assert "note  backend toy" in done.out
    assert why in " ".join(done.out.split())
    done = command("run", "--backends=toy", "--ops=mm", "--cases=4")
    assert done.code == 4
    assert f"backend toy is broken here: {why}" in " ".join(done.err.split())
