"""The code that a report prints, pasted over the statement that it is for, mends the model."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from amp_fuzz import PrecisionResult, precision
from amp_fuzz.interfaces.precision.pasting import statement_at
from tests.precision import kinds
from tests.precision.kinds import KINDS


def pasted(result: PrecisionResult, folder: Path) -> ModuleType:
    """Return the module of `kinds` with the remedy's code in place of its statement."""
    assert result.remedy is not None
    (place,) = result.remedy.lines
    node = statement_at(place.file, place.line)
    assert node is not None
    lines = Path(place.file).read_text().splitlines()
    code = textwrap.indent(result.remedy.code, " " * node.col_offset)
    lines[node.lineno - 1 : node.end_lineno] = code.splitlines()
    path = folder / "mended.py"
    path.write_text("\n".join(lines))
    spec = importlib.util.spec_from_file_location("mended", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mended"] = module  # for its dataclasses
    spec.loader.exec_module(module)
    return module


def diagnosed(module: type[nn.Module], kind: kinds.Kind) -> PrecisionResult:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = module(16), torch.randn(2, 6, 16)
    return precision(model, x, autocast=getattr(torch, kind.dtype), device=kind.device)


@pytest.mark.parametrize("name", ["AddedMask", "Product", "RunningSum", "SoftmaxByHand"])
def test_the_pasted_code_mends_the_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mended", ModuleType("mended"))  # and gone afterwards
    kind = KINDS[name]
    result = diagnosed(kind.module, kind)
    assert not result.ok
    mended = getattr(pasted(result, tmp_path), name)
    assert diagnosed(mended, kind).verdict == "harmless"
