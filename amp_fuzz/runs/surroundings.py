"""Where a run happens: the machine, the commits, the options. The head of the run has them."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import psutil

from amp_fuzz.config import OPTIONS, Options

__all__ = ["branch", "commit_of", "commits", "configuration", "cpu", "machine"]

_PACKAGE = Path(__file__).resolve().parents[1]


def machine() -> dict[str, str]:
    """Return the processor, the number of its cores, and the memory.

    An accelerator is named by its backend: asking for it here would start it before a fork.
    """
    memory = psutil.virtual_memory().total / 2**30
    return {"cpu": cpu(), "cores": str(os.cpu_count()), "memory": f"{memory:.1f} GiB"}


def cpu() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def commits() -> dict[str, str]:
    """Return the commits of amp-fuzz's checkout and of the one here; not those that are unknown."""
    found = {"project": commit_of(Path.cwd())}
    if (_PACKAGE.parent / ".git").exists():  # else a user's repository may have our environment
        found["amp-fuzz"] = commit_of(_PACKAGE)
    return {name: commit for name, commit in sorted(found.items()) if commit}


def branch() -> str:
    """Return the branch of the checkout here, or "".

    CI checks out a commit, and names the branch in a variable: the source of a pull request first.
    """
    named = (os.environ.get(name, "") for name in _BRANCHES)
    return next(filter(None, named), "") or _git(Path.cwd(), "branch", "--show-current")


_BRANCHES = (
    "GITHUB_HEAD_REF",
    "GITHUB_REF_NAME",
    "CI_MERGE_REQUEST_SOURCE_BRANCH_NAME",
    "CI_COMMIT_REF_NAME",
)


def commit_of(folder: Path) -> str:
    """Return the commit of a checkout, or ""."""
    return _git(folder, "rev-parse", "--verify", "HEAD")


def _git(folder: Path, *arguments: str) -> str:
    words = ("git", "-C", str(folder), *arguments)
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return ""
    return "" if done.returncode else done.stdout.strip()


def configuration(options: Options) -> dict[str, str]:
    """Return the options that are not at their default, as they are written."""
    values = {name: getattr(options, option.field) for name, option in OPTIONS.items()}
    return {
        name: ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for name, value in values.items()
        if value != OPTIONS[name].default
    }
