"""Dynamo is imported while torch's own functions are there: it keeps those that it meets."""

from __future__ import annotations

import subprocess
import sys

import pytest

IMPORTED = """
import sys
import torch
from amp_fuzz.backends import backends
from amp_fuzz.cases.build import call, case, x

seen = set()


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.startswith("torch._dynamo."):
            asked = torch.is_autocast_enabled, torch.get_autocast_dtype, torch.clear_autocast_cache
            inner = torch._C._is_any_autocast_enabled
            seen.update((f.__module__ or "torch").partition(".")[0] for f in (*asked, inner))


one = case([x("x0", 2, 3), x("w1", 3, 2)], call("mm", "x0", "w1"), PLAN)
assert "torch._dynamo" not in sys.modules
sys.meta_path.insert(0, Finder)
seen_at_once = backends()["eager-cpu"].reference().run(one)
assert seen_at_once.raised is None, seen_at_once.raised
assert torch.is_autocast_enabled.__module__ != "amp_fuzz.reference.queries"
print(sorted(seen))
"""


@pytest.mark.parametrize("plan", ["checkpoint='non_reentrant'", "checkpoint='reentrant'"])
def test_a_checkpoint_imports_it_with_functions_of_torch(plan: str) -> None:
    """It is torch's own decorator that imports it, at the first checkpoint of a process."""
    code = IMPORTED.replace("PLAN", plan)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "['torch']\n", done.stderr
