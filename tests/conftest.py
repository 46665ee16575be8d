"""What holds for all tests."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from tests.helpers import Run
    from tests.objects import Bucket

# A shell starts background jobs (CI in one, say) with Ctrl-C ignored, and so would be every process
# that a test starts and then interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Runs a script as Python does.
RUNNER = """
import runpy, sys
import torch, torch._dynamo, torch._inductor.compile_fx, torch._subclasses.fake_tensor


def run(path):
    sys.argv = [path]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
            return 1
        return int(error.code or 0)
    except BaseException as error:
        if sys.excepthook is sys.__excepthook__:
            print(repr(error), file=sys.stderr)
            return 99
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as ended:
            return ended.code
    return 0
"""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs an accelerator where torch sees none."""
    if item.get_closest_marker("gpu") is not None:
        from tests.helpers import accelerator

        if not accelerator():
            pytest.skip("needs an accelerator that torch can use")


@pytest.fixture(scope="session", autouse=True)
def autograd() -> None:
    """Run the first backward pass of the process, for which autograd starts its threads.

    A torch with CUDA and no GPU has eight fake ones once `torch.compile` has seen a `torch.cond`. A
    first pass after that starts a thread for each, and nothing here can be forked any more.
    """
    torch.ones(1, requires_grad=True).sum().backward()


@pytest.fixture(scope="session", autouse=True)
def kept_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have JAX keep what it compiles where these tests do, not with the user's.

    The workers of a session share it.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(shared / "jax"))
        yield


@pytest.fixture(scope="session", autouse=True)
def forked_devices() -> Iterator[None]:
    """Have the processes of devices be forks of one that has imported torch and all."""
    from tests.forks import fork_devices

    with pytest.MonkeyPatch.context() as patch:
        fork_devices(patch.setattr)
        yield


@pytest.fixture(autouse=True)
def same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each test draw the numbers that it draws anywhere, alone or after others.

    A command without a seed draws one: that too, in this process and its forks.
    """
    # Without an accelerator, `torch.manual_seed` costs a millisecond.
    (torch if torch.accelerator.is_available() else torch.default_generator).manual_seed(0)
    monkeypatch.setattr(secrets, "randbelow", lambda limit: 1)


@pytest.fixture(scope="session")
def run_script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Return a function from the text of a script to how it ended.

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


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    """Serve an object store that this process can read and write."""
    import fsspec

    from tests.objects import ObjectFiles, served

    fsspec.register_implementation("objects", ObjectFiles, clobber=True)
    with served() as found:
        yield found
