"""The command ``amp-fuzz``, and ``python -m amp_fuzz`` where it was not installed."""

from __future__ import annotations

import sys

from amp_fuzz.interfaces.signals import ending_imports


def main() -> int:
    """Import the command line and run it. Ctrl-C ends both with one line, not with a traceback."""
    with ending_imports():
        from amp_fuzz.interfaces.cli import main as command

        return command()


if __name__ == "__main__":
    sys.exit(main())
