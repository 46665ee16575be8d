"""Worker processes: forks where safe, supervised, and ended with everything that they started.

A fork keeps everything that this process did to torch: patched functions, registered kernels and
ops. A spawned process starts anew and keeps only what `amp_fuzz.plugins` imports.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

import psutil

__all__ = [
    "Usage",
    "death",
    "end",
    "expendable",
    "few_primitives",
    "greedy",
    "is_runnable",
    "no_interrupts",
    "start",
    "unforkable",
    "usage",
]

_GROUPS = hasattr(os, "killpg")
_ACCELERATORS = ("cuda", "xpu", "mtia")


def unforkable() -> str:
    """Return why a fork of this process could not run cases, or "".

    A fork has one thread. The runtimes of accelerators and JAX do not survive this. torch's own CPU
    threads are no problem: a worker computes in one thread and never needs the others. Autograd's
    threads are. Where torch sees an accelerator, the first backward pass starts them, even for CPU
    tensors, and every backward pass of a fork raises then.
    """
    if sys.platform != "linux":
        return f"a fork is not safe on {sys.platform}"
    if "jaxlib" in sys.modules:
        return "JAX is imported, and its threads do not survive a fork"
    torch = sys.modules.get("torch")
    for name in _ACCELERATORS if torch is not None else ():
        if getattr(torch, name).is_initialized():
            return f"torch.{name} is in use, and does not survive a fork"
    if any(name.startswith(_AUTOGRAD) for name in _threads()):
        return "autograd has started threads, which do not survive a fork"
    return ""


_AUTOGRAD = "pt_autograd_"  # torch's name for them, followed by a device number


def _threads() -> Iterator[str]:
    """Yield the system's names of this process's threads."""
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has ended
            yield path.read_text().strip()


def start(
    entry: Callable[..., object],
    *args: object,
    fork: bool | None = None,
    stands_in: bool = False,
    environment: Mapping[str, str] | None = None,
) -> BaseProcess:
    """Start ``entry(*args)`` in a new process that leads a new process group.

    It ends with its group when its parent ends. fork: whether to fork this process; by default if
    that is safe. stands_in: whether it acts for this process: it keeps the signal handlers, and may
    start processes in this way too. environment: variables that it has beside those of this one.
    """
    fork = not unforkable() if fork is None else fork
    context = get_context("fork" if fork else "spawn")
    process: BaseProcess = context.Process(  # type: ignore[attr-defined]
        target=_lead, args=(fork, stands_in, entry, *args), daemon=not stands_in
    )
    with no_interrupts(signal.SIGTERM), warnings.catch_warnings(), _having(environment or {}):
        # Python 3.12 warns about forking with threads, such as xdist's; the fork needs none of
        # them.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    return process


@contextmanager
def _having(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _lead(fork: bool, stands_in: bool, entry: Callable[..., object], *args: object) -> None:
    if fork:
        _leave_behind(handlers=not stands_in)
    parent = parent_process()
    assert parent is not None
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if _GROUPS:
        os.setpgid(0, 0)
        threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    entry(*args)


def _leave_behind(*, handlers: bool) -> None:
    """Drop inherited state that a fork must not act on: hooks, tracing, garbage, maybe handlers.

    The fork must not finalise garbage of its parent, such as a temporary folder.
    """
    gc.freeze()
    faulthandler.disable()  # it would write to the parent's terminal
    for number in signal.valid_signals() if handlers else ():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    sys.settrace(None)
    sys.setprofile(None)
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__


def _follow(parent: BaseProcess) -> None:
    """Wait for the end of the parent: the hangup of a terminal does not reach this group."""
    parent.join()
    os.killpg(0, signal.SIGKILL)


def end(process: BaseProcess, patience: float = 0.0) -> None:
    """Kill a process of `start` and its group, after giving it some seconds to end."""
    process.join(patience)
    if _GROUPS and process.pid is not None:
        with suppress(ProcessLookupError, PermissionError):  # all ended, or not yet a leader
            os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():
        process.kill()
    process.join(5)


def expendable() -> None:
    """Make the system kill this process first when memory runs out, without a core file.

    A replay of the case leaves a core file, if the shell allows it.
    """
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    with suppress(ImportError):  # not on Windows
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def few_primitives() -> None:
    """Make oneDNN and ideep keep 16 primitives, not 1,024. Call it before importing torch.

    Shapes hardly ever repeat, so in a long run these caches are what grows.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "16")


def death(process: BaseProcess) -> str:
    """Return how a process died: "of SIGSEGV", "with exit code 3"."""
    process.join(5)
    code = process.exitcode or 0
    return f"of {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process and its descendants used: CPU seconds, and resident memory in bytes.

    A process that has ended counts with the process that waited for it.
    """

    cpu: float = 0.0
    memory: int = 0


def usage(pid: int) -> Usage:
    """Return what a process and its descendants have used so far; zero if it has ended."""
    cpu, memory = 0.0, 0
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return Usage()
    for member in family:
        with suppress(psutil.Error), member.oneshot():
            cpu += sum(member.cpu_times()[:4])  # user, system, and those of children that ended
            memory += member.memory_info().rss
    return Usage(cpu, memory)


def is_runnable(pid: int) -> bool:
    """Return whether a thread of a process or of a descendant has work to do.

    On a busy machine it may wait long for a processor, and use next to no CPU time. False where the
    system does not say (it has no ``/proc``).
    """
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return False
    for member in family:
        for path in Path(f"/proc/{member.pid}/task").glob("*/stat"):
            with suppress(OSError):  # it has ended
                if path.read_text().rpartition(")")[2].split()[0] == "R":
                    return True
    return False


def greedy(held: int, limit: float) -> str:
    """Return how a process exceeded a memory limit in GiB, or ""."""
    return f"it held more than --memory={limit:.15g} GiB" if held > limit * 2**30 else ""


@contextmanager
def no_interrupts(*others: signal.Signals) -> Iterator[None]:
    """Block Ctrl-C: in this thread for the block, and permanently in processes started in it.

    A terminal sends it to all processes, and a worker that is still importing would print a
    traceback. Ending a worker is up to its parent. others: signals to block too: Python ignores an
    exception that a signal handler raises in a hook that runs after a fork (`os.register_at_fork`;
    logging has one), so the signal would be lost.
    """
    resource_tracker.ensure_running()  # starting it with the first process would unblock
    numbers = {signal.SIGINT, *others}
    with ExitStack() as handlers:
        # Python calls handlers in the main thread, whichever thread takes the signal.
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                if callable(handler := signal.getsignal(number)):
                    handlers.callback(signal.signal, number, handler)
                    signal.signal(number, _unless_blocked(handler))
        before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


_Handler = Callable[[int, FrameType | None], object]


def _unless_blocked(handler: _Handler) -> _Handler:
    """Return a signal handler that waits until the main thread unblocks the signal.

    It may stay: another handler may raise before it is removed, and a fork keeps it.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if number in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
            signal.raise_signal(number)  # for this thread alone, where it is pending
        else:
            handler(number, frame)

    return handle
