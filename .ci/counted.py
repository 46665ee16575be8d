"""Print how many tests passed, failed and were skipped, in all of several JUnit files of pytest.

Exit 1 if one is missing or has failures. A test that passes and then fails in its teardown counts
as failed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree


def counted(path: Path) -> tuple[int, int, int]:
    """Return how many tests passed, failed, and were skipped. A missing file has failed."""
    if not path.exists():
        return 0, 1, 0
    (suite,) = ElementTree.parse(path).getroot().iter("testsuite")
    tests, failures, errors, skipped = (
        int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    return max(tests - failed - skipped, 0), failed, skipped


def main(paths: list[str]) -> int:
    """Print the line, and return the exit code."""
    passed, failed, skipped = map(sum, zip(*(counted(Path(path)) for path in paths), strict=True))
    sys.stdout.write(f"{passed} passed, {failed} failed, {skipped} skipped\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
