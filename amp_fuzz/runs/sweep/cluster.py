"""A Ray cluster: connect to one or start one, ask what its nodes have, and run shards on it.

Ray places the tasks, runs them again if a worker or a node dies, and says how it died.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from amp_fuzz.runs.sweep.log import ShardEnd
from amp_fuzz.runs.sweep.node import Died, Job

__all__ = ["ClusterError", "Nodes", "connected", "described", "has", "nodes", "work"]

Nodes = Sequence[Mapping[str, Any]]


class ClusterError(RuntimeError):
    """A cluster that cannot be reached or started. The message says what to do."""


_STORE = 80 * 2**20  # bytes of Ray's object store, of which a sweep uses next to nothing
_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU"}
_REACH = 10.0  # seconds for a cluster's address to answer
_LOOK = 1.0  # seconds between two looks at the records


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connect to a cluster for the block; without an address, start one on this machine.

    It listens on the loopback interface only, has no dashboard, and reports no usage statistics
    unless the user wants them. Raises `ClusterError`.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A shard sees no accelerator that it did not ask for: also Ray's default, for now.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    more: dict[str, Any] = {}
    if address is None:
        # Ray's own switch, although of another system: its nodes are at 127.0.0.1 then.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        more = {"object_store_memory": _STORE, "include_dashboard": False}
    import ray

    before = signal.getsignal(signal.SIGTERM)
    try:
        try:
            _reach(address or "")
            at = address or "local"
            ray.init(address=at, log_to_driver=False, logging_level="critical", **more)
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            what = f"no Ray cluster at {address}" if address else "Ray does not start"
            first = str(error).strip().partition("\n")[0]
            raise ClusterError(
                f"{what}: {first}: see `ray status`, or docs/guide/sweep.md"
            ) from error
        # Ray prints a trace of its own at a SIGTERM, and ends the process there and then.
        signal.signal(signal.SIGTERM, before)
        yield
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Raise `OSError` if nothing listens at HOST:PORT, which Ray says only after minutes."""
    host, _, port = address.rpartition(":")
    if host and "/" not in host and port.isdecimal():
        socket.create_connection((host, int(port)), _REACH).close()


def nodes() -> Nodes:
    """Return the nodes that are alive."""
    import ray

    found: Nodes = ray.nodes()
    return [node for node in found if node["Alive"]]


def has(node: Mapping[str, Any], needs: Mapping[str, float]) -> bool:
    """Return whether a node has what a shard needs."""
    own = node["Resources"]
    return all(own.get(_NAMES.get(name, name), 0) >= amount for name, amount in needs.items())


def described(node: Mapping[str, Any]) -> str:
    """Return what a node has, in words: ``10.0.0.7: 16 CPU, 2 GPU``."""
    own = {k: v for k, v in node["Resources"].items() if not k.startswith(("node:", "accelerator"))}
    kinds = sorted(own.keys() - {"memory", "object_store_memory"})
    return f"{node['NodeManagerAddress']}: {', '.join(f'{own[k]:g} {k}' for k in kinds)}"


def work(
    function: Callable[..., ShardEnd],
    jobs: Iterable[tuple[Job, Mapping[str, float]]],
    *,
    retries: int,
    looked: Callable[[], None] = lambda: None,
) -> Generator[ShardEnd]:
    """Run a function for each job on a node that has what it needs; yield the ends as they come.

    retries: how often Ray runs a job again whose worker, node or process died. looked: called at
    least once a second. Closing the iterator cancels the jobs and waits for them to end.
    """
    import ray

    remote = ray.remote(function)
    tasks: dict[Any, Job] = {}
    for job, needs in jobs:
        custom = {name: amount for name, amount in needs.items() if name not in _NAMES}
        told = remote.options(
            num_cpus=needs.get("num_cpus", 1),
            num_gpus=needs.get("num_gpus", 0),
            resources=custom,
            max_retries=retries,
            retry_exceptions=[Died],
            name=job.run,
        )
        tasks[told.remote(job)] = job
    try:
        while tasks:
            done, _ = ray.wait(list(tasks), num_returns=1, timeout=_LOOK)
            looked()
            for task in done:
                yield _ended(task, tasks.pop(task))
    finally:
        for task in tasks:
            ray.cancel(task)
        if tasks:
            ray.wait(list(tasks), num_returns=len(tasks), timeout=60)


def _ended(task: Any, job: Job) -> ShardEnd:
    import ray

    try:
        end: ShardEnd = ray.get(task)
    except ray.exceptions.RayTaskError as error:
        return ShardEnd(job.number, -1 if isinstance(error.cause, Died) else 3, str(error.cause))
    except ray.exceptions.RayError as error:
        lines = str(error).strip().splitlines()
        return ShardEnd(job.number, -1, f"{type(error).__name__}: {lines[0] if lines else ''}")
    return end
