"""What holds for all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.helpers import Run

# A shell starts background jobs (CI in one, say) with Ctrl-C ignored, and so would be every process
# that a test starts and then interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Imports once what takes long, then runs each script that it is told of in a process of its own, in
# which amp_fuzz cannot be imported, and answers with the exit code and what was printed.
RUNNER = """
import json, os, runpy, sys, warnings
import torch, torch._dynamo, torch._inductor.compile_fx, torch._subclasses.fake_tensor

sys.modules["amp_fuzz"] = None
for line in sys.stdin:
    path = line.strip()
    child = os.fork()
    if child == 0:
        out = os.open(path + ".out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1), os.dup2(out, 2)
        code = 0
        try:
            sys.argv = [path]
            runpy.run_path(path, run_name="__main__")
        except SystemExit as error:
            code = int(error.code or 0)
        except BaseException as error:
            print(repr(error))
            code = 99
        sys.stdout.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps([code, open(path + ".out").read()]), flush=True)
"""


@pytest.fixture(scope="session")
def run_script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Return a function from the text of a script to its exit code and what it printed.

    Each runs in a process of its own, which has imported torch but cannot import `amp_fuzz`.
    """
    from tests.helpers import runner

    with runner(RUNNER, tmp_path_factory.mktemp("scripts"), "script") as run:
        yield run


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the workers that a test starts be forks of a process that has imported all."""
    from tests.forks import fork_workers

    fork_workers(monkeypatch.setattr)
