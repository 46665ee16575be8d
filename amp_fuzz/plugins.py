"""Import the user's plugin modules, here and in every process started from here.

The option ``plugins`` names them. Processes inherit them through its environment variable.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from amp_fuzz.config import OPTIONS, ConfigError

__all__ = ["inherited", "load_plugins", "loaded"]


def load_plugins(
    modules: Sequence[str], source: str = "plugins", folder: Path | None = None
) -> None:
    """Import modules, also from a folder, by default the current one.

    source: where they were named, for messages. Raises `ConfigError` with one line.
    """
    if not modules:
        return
    here = str((folder or Path.cwd()).absolute())
    if here not in sys.path:
        sys.path.insert(0, here)
    for module in modules:
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            first = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"{source}: {module!r} cannot be imported: {type(error).__name__}: {first}"
            ) from error
    os.environ[OPTIONS["plugins"].variable] = ",".join(modules)


def loaded() -> tuple[str, ...]:
    """Return the names of the modules that were imported."""
    return tuple(filter(None, os.environ.get(OPTIONS["plugins"].variable, "").split(",")))


def inherited() -> None:
    """Import the plugins that the parent process imported."""
    for module in loaded():
        importlib.import_module(module)
