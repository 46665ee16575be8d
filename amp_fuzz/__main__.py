"""``python -m amp_fuzz``: the command, where it was not installed."""

from __future__ import annotations

import sys

from amp_fuzz.interfaces.cli import main

if __name__ == "__main__":
    sys.exit(main())
