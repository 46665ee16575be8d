"""Rules of the FP8 reference against Transformer Engine's own in Python, in another process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from amp_fuzz.backends import backends
from amp_fuzz.backends.te import backend, stub

pytestmark = pytest.mark.thorough

_START = """
import itertools
import torch
from amp_fuzz.backends.te.stub import install
from amp_fuzz.reference.fp8 import E4M3, E5M2, Delayed, Region, scaling

te = install()
torch.manual_seed(0)

def matrices(count):
    for i in range(count):
        x = torch.randn(48, 64) * 10.0 ** (i % 40 - 20)
        x = x.bfloat16() if i % 3 == 0 else x
        yield x
    for value in (0.0, torch.inf, torch.nan, 1e-38):
        x = torch.ones(48, 64)
        x[0, 0] = value
        yield x
    yield torch.zeros(48, 64)

def same(a, b):
    assert torch.equal(a.isnan(), b.isnan()), (a, b)
    assert torch.equal(a.nan_to_num(), b.nan_to_num()), (a, b)
"""


def run(code: str) -> None:
    """Run code in a process where Transformer Engine takes the CPU for CUDA."""
    if backends()["te-python"].availability().status != "ready":
        pytest.skip("the code of te-python is not here")
    text = _START + textwrap.dedent(code)
    command = [sys.executable, "-c", text]
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}  # it compiles rules of one line
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr


def test_current_scaling() -> None:
    run(
        """
        from transformer_engine.pytorch.custom_recipes import reference_current_scaling as ref

        for to, x in itertools.product((E4M3, E5M2), matrices(120)):
            theirs = ref.CurrentScalingQuantizerRef(to.dtype).quantize(x)
            ours = scaling.current(x, to)
            same(theirs.scale, ours.inverse)
            if x.isfinite().all():
                same(theirs.data.float(), ours.values)
        """
    )


def test_nvfp4() -> None:
    run(
        """
        from transformer_engine.pytorch.custom_recipes import reference_nvfp4 as ref
        from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats

        for square, x in itertools.product((False, True), matrices(120)):
            if not x.isfinite().all():
                continue
            tile = (16, 16) if square else (1, 16)
            made = ref.NVFP4QuantizerRef(Fp4Formats.E2M1, quant_tile_shape=tile).quantize(x)
            for codes, dim in ((made.data, 1), (made.data_t, 0)):
                theirs = ref.cast_from_fp4x2(codes, torch.float32)
                ours = scaling.nvfp4(x, dim, square=square).values
                same(theirs, ours if dim else ours.t())
        """
    )


def test_delayed_scaling() -> None:
    """Histories of all lengths and algorithms, with magnitudes of 0, infinity and NaN."""
    run(
        """
        from transformer_engine.common.recipe import DelayedScaling, Format
        from transformer_engine.pytorch import quantization

        special = (0.0, torch.inf, torch.nan, 1e-40, 1.0)
        choices = itertools.product((1, 2, 3, 5), ("max", "most_recent"), (0, 1, -2), (E4M3, E5M2))
        for length, algorithm, margin, to in choices:
            region = Region("delayed", history=length, algorithm=algorithm, margin=margin)
            recipe = DelayedScaling(
                amax_history_len=length, amax_compute_algo=algorithm, margin=margin
            )
            ours = Delayed(region, to)
            history, scale = torch.zeros(length, 1), torch.ones(1)
            for step in range(40):
                x = torch.rand(4) * 10.0 ** torch.randint(-8, 8, ()).item()
                x[0] = special[step // 5 % 5] if step % 5 == 0 else x[0]
                ours.record(x)
                history[0] = torch.maximum(history[0], x.abs().max())
                ours.update()
                quantization._amax_and_scale_update(history, scale, to.max, recipe)
                same(history[:, 0], ours.history)
                same(scale[0], ours.scale)
        """
    )


# -- the folder of the code -----------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]


def test_the_code_is_not_what_others_import() -> None:
    """peft, and diffusers through it, raise where they find the code without its kernels."""
    assert str(stub.folder()) not in sys.path
    spec = find_spec("transformer_engine")
    assert spec is None or not Path(spec.origin or "").is_relative_to(stub.folder())


def test_no_extra_installs_the_code_without_its_kernels() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    needs = [re.split(r"[^\w.-]", need)[0] for extra in extras.values() for need in extra]
    assert "torchao" in needs
    assert "transformer-engine" not in {need.replace("_", "-") for need in needs}


def test_the_version_of_the_code_is_pinned() -> None:
    assert f"transformer_engine=={stub.VERSION}\n" in (ROOT / "constraints/shared.txt").read_text()


def test_without_the_code_the_command_for_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stub, "folder", lambda: tmp_path / "a b")
    monkeypatch.setattr(backend, "folder", stub.folder)
    monkeypatch.setattr(backend, "find_spec", lambda name: object())
    command = f"pip install --no-deps '--target={tmp_path}/a b' transformer-engine=={stub.VERSION}"
    found = backends()["te-python"].availability()
    assert (found.status, found.detail) == ("missing", command)
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    assert backends()["te-python"].availability().detail == (
        f"pip install 'amp-fuzz[fp8]' && {command}"
    )
    with pytest.raises(ImportError, match=re.escape(command)):
        stub.install()
