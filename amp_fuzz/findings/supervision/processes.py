"""Worker processes: forks where that is safe, watched, and ended with all that they started.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

__all__ = [
    "Usage",
    "death",
    "end",
    "expendable",
    "few_primitives",
    "greedy",
    "no_interrupts",
    "start",
    "unforkable",
    "usage",
]

_GROUPS = hasattr(os, "killpg")
_ACCELERATORS = ("cuda", "xpu", "mtia")


def unforkable() -> str:
    """Return why a fork of this process could not run cases, or "".

    A fork has one thread. The runtimes of accelerators and JAX do not survive that. torch's own
    threads on a CPU do: a worker computes in one thread and never asks for the others. Autograd's
    do not. Where torch sees an accelerator, the first backward pass of all starts them, one of a
    CPU's tensors too, and each backward pass of a fork raises then.
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


_AUTOGRAD = "pt_autograd_"  # how torch names them, with the number of a device


def _threads() -> Iterator[str]:
    """Yield the names of this process's threads, as the system knows them."""
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has ended
            yield path.read_text().strip()


def start(
    entry: Callable[..., object],
    *args: object,
    fork: bool | None = None,
    stands_in: bool = False,
) -> BaseProcess:
    """Start ``entry(*args)`` in a new process, the leader of a group of its own.

    It ends with its group when the process that started it ends. fork: whether it is a fork of this
    process; by default if that is safe. stands_in: whether it does what this process would have
    done: it keeps the handlers of signals, and may start processes this way, too.
    """
    fork = not unforkable() if fork is None else fork
    context = get_context("fork" if fork else "spawn")
    process: BaseProcess = context.Process(  # type: ignore[attr-defined]
        target=_lead, args=(fork, stands_in, entry, *args), daemon=not stands_in
    )
    with no_interrupts(), warnings.catch_warnings():
        # Python 3.12 warns of a fork beside threads, such as xdist's: the fork needs none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    return process


def _lead(fork: bool, stands_in: bool, entry: Callable[..., object], *args: object) -> None:
    if fork:
        _leave_behind(handlers=not stands_in)
    parent = parent_process()
    assert parent is not None
    if _GROUPS:
        os.setpgid(0, 0)
        threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    entry(*args)


def _leave_behind(*, handlers: bool) -> None:
    """Drop what a fork inherits and must not act on: hooks, tracing, garbage, handlers if asked.

    Garbage of the process that forked, such as a temporary folder, is not this one's to finalise.
    """
    gc.freeze()
    faulthandler.disable()  # it would write to the terminal of the process that forked
    for number in signal.valid_signals() if handlers else ():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    sys.settrace(None)
    sys.setprofile(None)
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__


def _follow(parent: BaseProcess) -> None:
    """Wait for the end of the parent; a terminal that closes does not reach this group."""
    parent.join()
    os.killpg(0, signal.SIGKILL)


def end(process: BaseProcess, patience: float = 0.0) -> None:
    """Kill a process of `start`, if it has not ended after so many seconds, and its group."""
    process.join(patience)
    if _GROUPS and process.pid is not None:
        with suppress(ProcessLookupError, PermissionError):  # all ended, or not yet a leader
            os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():
        process.kill()
    process.join(5)


def expendable() -> None:
    """Have the system end this process, not the user's, when memory runs out; it leaves no core.

    A replay of the case makes one, if the shell allows it.
    """
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    with suppress(ImportError):  # not on Windows
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def few_primitives() -> None:
    """Have oneDNN and ideep keep 16 primitives, not 1,024; call it before torch is imported.

    Hardly a shape comes twice, so that their caches are what grows in a long run.
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
    """What a process and all that it started used: CPU time in seconds, resident memory in bytes.

    What has ended and was waited for counts with who waited for it.
    """

    cpu: float = 0.0
    memory: int = 0


def usage(pid: int) -> Usage:
    """Return what a process and its descendants have used so far; nothing of one that ended."""
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


def greedy(held: int, limit: float) -> str:
    """Return how a process that held so many bytes went over a limit in GiB, or ""."""
    return f"it held more than --memory={limit:.15g} GiB" if held > limit * 2**30 else ""


@contextmanager
def no_interrupts() -> Iterator[None]:
    """Block Ctrl-C: for this thread while it is here, and for good in a process that it starts.

    A terminal sends it to all processes, and a worker that is still importing would answer with a
    traceback. It is for whoever started the worker to end it.
    """
    resource_tracker.ensure_running()  # starting it, as the first process does, would unblock
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
