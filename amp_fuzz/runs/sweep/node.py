"""The part of a sweep that runs on a node: it starts a shard in its environment, and waits.

The environment needs torch and what amp-fuzz needs, but neither Ray nor amp-fuzz: it imports the
package of the node's Ray.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import amp_fuzz
from amp_fuzz.config import is_url
from amp_fuzz.records.objects import Objects
from amp_fuzz.records.parts import Superseded
from amp_fuzz.records.store import Store, StoreError
from amp_fuzz.runs.policies import python_of
from amp_fuzz.runs.sweep.log import ShardEnd
from amp_fuzz.runs.sweep.places import Away, Here

__all__ = ["Died", "Job", "attempt", "probe"]


class Died(RuntimeError):
    """The process of a shard was killed: Ray runs the shard again, on another node if it can."""


@dataclass(frozen=True, slots=True)
class Job:
    """A shard as its node gets it.

    store: a folder or a URL. folder: of the sweep's file, in which the run starts. log: the path or
    URL of the file of its output. until: when the sweep ends, in seconds since the epoch; 0 is
    never. variables: those that the driver was given for amp-fuzz. first: it judges the findings
    of the store.
    """

    number: int
    run: str
    python: str
    words: tuple[str, ...]
    store: str
    folder: str
    log: str
    until: float
    variables: Mapping[str, str]
    first: bool = True


# A node that loses its Ray, or a worker that Ray kills, must not leave a run behind that goes on.
# The run ends as after Ctrl-C.
_RUN = """\
import signal, sys
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
from amp_fuzz.interfaces.cli import main
sys.exit(main())
"""

_PATIENCE = 120.0  # seconds for the process of an earlier attempt to end
_LOOK = 0.2  # seconds between two looks at a run
_GRACE = 30.0  # seconds for a run to end its workers
_SECONDS = 600  # for a probe, on a machine that may be busy


def attempt(job: Job) -> ShardEnd:
    """Run a shard, or the rest of it after an earlier attempt; return how it ended.

    Cases on record are not run again. Raises `Died` if the process was killed.
    """
    if 0 < job.until <= time.time():
        return ShardEnd(job.number, -1, "the time was up before it began")
    try:
        place = Away(job.store, job.run, job.log) if is_url(job.store) else Here(job.store, job.log)
        _wait(place.store, job.run)
        with place.taken(findings=job.first):
            code = _run(job, place)
    except Superseded as error:
        return ShardEnd(job.number, -1, str(error))
    except StoreError as error:
        return ShardEnd(job.number, 2, str(error))
    if code < 0 or code > 128:
        raise Died(f"the process of run {job.run} died of signal {abs(code) % 128}")
    why = f"an internal error: see {job.log}" if code == 3 else place.last
    return ShardEnd(job.number, code, "" if code in (0, 1) else why)


def _run(job: Job, place: Here | Away) -> int:
    """Run the process of a shard, and return its exit code."""
    words = [*job.words, f"--store={place.store.root}", f"--shard={job.run}"]
    words += [f"--until={job.until}"] if job.until else []
    with _path(job) as environment, place.output.open("ab") as log:
        process = subprocess.Popen(
            [str(python_of(job.python)), "-P", "-c", _RUN, "run", *words],
            cwd=job.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            # When Ray cancels the task, Python raises KeyboardInterrupt here, but not in `wait`.
            while process.poll() is None:
                time.sleep(_LOOK)
                place.look()
            return process.returncode
        finally:
            if process.poll() is None:
                _end(process)


def probe(job: Job) -> ShardEnd:
    """Return whether a node and an environment can run shards: code 0, or that of the error."""
    for path in (job.folder, *([] if is_url(job.store) else [job.store])):
        if not Path(path).is_dir():
            why = f"{path} is not there: every node must see this folder under this path"
            return ShardEnd(job.number, 2, why)
    if is_url(job.store):
        try:
            Objects(job.store).check()
        except StoreError as error:
            return ShardEnd(job.number, 2, str(error))
    try:
        with _path(job) as environment, tempfile.TemporaryDirectory(prefix="amp-fuzz-") as spare:
            store = f"--store={spare if is_url(job.store) else job.store}"
            done = subprocess.run(
                [str(python_of(job.python)), "-P", "-c", _RUN, "run", *job.words, store, "--ready"],
                cwd=job.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=_SECONDS,
            )
    except OSError as error:
        return ShardEnd(job.number, 2, f"{job.python}: cannot run ({error.strerror})")
    except subprocess.TimeoutExpired:
        return ShardEnd(job.number, 2, f"{job.python}: no answer after {_SECONDS} s")
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    why = f"{job.python}: {said[-1].removeprefix('amp-fuzz: ')}" if done.returncode else ""
    return ShardEnd(job.number, 2 if done.returncode == 1 else done.returncode, why)


def _wait(store: Store, run: str) -> None:
    """Wait until the process of an earlier attempt on this machine has ended."""
    since = time.monotonic()
    while store.is_running(run):
        if time.monotonic() - since > _PATIENCE:
            raise Died(f"run {run} is still running, after {_PATIENCE:.0f} s")
        time.sleep(0.5)


@contextmanager
def _path(job: Job) -> Iterator[dict[str, str]]:
    """Give the variables with which another interpreter finds amp-fuzz, and nothing else of here.

    A folder of site-packages has torch too. So this is one with links to the package and to its
    metadata, which name the backends.
    """
    found = distribution("amp-fuzz")
    about = next(f for f in found.files or () if f.name == "METADATA")
    linked = (Path(amp_fuzz.__file__).parent, Path(str(found.locate_file(about))).parent)
    with tempfile.TemporaryDirectory(prefix="amp-fuzz-") as folder:
        for path in linked:
            (Path(folder) / path.name).symlink_to(path)
        own = {k: v for k, v in os.environ.items() if not k.startswith("AMP_FUZZ_")}
        given = filter(None, [job.variables.get("PYTHONPATH", "")])
        yield {**own, **job.variables, "PYTHONPATH": os.pathsep.join([folder, *given])}


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
