"""``amp-fuzz bisect``: since which torch a finding is there, and until which."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from amp_fuzz.config import cache_folder
from amp_fuzz.interfaces.cli.common import Exit, Stopped, options, resolve_options, say, waiting
from amp_fuzz.interfaces.cli.replay import job_of
from amp_fuzz.interfaces.cli.repro import scripts_of
from amp_fuzz.records.remote import store_at

if TYPE_CHECKING:
    from amp_fuzz.runs.bisect import Environment, Range, Step

__all__ = ["bisect"]


@click.command(short_help="Show in which versions of torch a finding is there.")
@click.argument("case", metavar="ID|PATH")
@click.option(
    "--with",
    "others",
    metavar="ENV",
    multiple=True,
    required=True,
    help="Another Python with torch, the folder of its environment, or requirements to install, "
    'such as "torch==2.9.1". Give it once for each.',
)
@click.option(
    "--backend", metavar="NAME", help="Use this backend, not the one that found the case."
)
@click.option(
    "--repeat",
    metavar="N",
    type=click.IntRange(1, 100),
    default=2,
    help="Run the script at least so often in each environment.  [default: 2]",
)
@click.option(
    "--package",
    metavar="NAME",
    default="torch",
    help="Sort environments by the version of this package, such as jax.  [default: torch]",
)
@click.option(
    "--cache",
    metavar="FOLDER",
    help="Where environments of requirements are kept.  [default: ~/.cache/amp-fuzz/envs]",
)
@options("store", "known", "timeout", "memory", "plugins", "device", "policies")
def bisect(
    case: str,
    others: tuple[str, ...],
    backend: str | None,
    repeat: int,
    package: str,
    cache: str | None,
    **given: Any,
) -> int:
    """Say in which torch a finding began, and in which it was mended.

    Runs the script of `amp-fuzz repro` in this environment and in others, which need nothing but
    torch: first at both ends, then by binary search. Where the script cannot tell (exit code
    125), the environment is skipped. Requirements are installed once, by uv or else by pip.
    Reports show the answer beside a finding of the store.

    Exit codes: 0 the finding is there in some torch; 5 in none; 2 an ENV is no interpreter.
    """
    from amp_fuzz.runs import bisect as core

    environ = dict(os.environ)  # as the reader's: backends may change ours
    chosen = resolve_options(given).options
    job = job_of(case, store_at(chosen.store), backend)
    from amp_fuzz.findings.repro.script import BITS

    with waiting("writing the script"):
        script, eager = scripts_of(job, chosen)
    found = _environments(others, Path(cache) if cache else cache_folder() / "envs", package)
    say(f"{job.case.id} on {job.backend}")
    if BITS in script:
        say(f"  {_BITS}")
    width = max(len(one.version) for one in found)
    told = set[str]()

    def said(one: Environment, step: Step) -> None:
        told.add(step.state)
        say(f"  {package} {one.version:<{width}}  {_told(step)}  ({one.name})")

    with waiting("running the script"):
        ranged = core.bisect(
            script,
            found,
            next(one for one in found if one.name == sys.executable),
            environ=environ,
            least=repeat,
            timeout=chosen.timeout,
            memory=chosen.memory,
            said=said,
            eager=eager,
        )
    if ranged is None:
        say("it reproduces in none of them" if "gone" in told else "none of them can tell")
        return Exit.NOTHING
    summary = _summary(found, ranged)
    say(summary)
    if job.finding is not None:
        store_at(chosen.store).keep_range(job.finding, f"{package}: {summary}")
    return Exit.OK


_BITS = "the script compares bits: a torch whose kernels round differently reproduces it too"


def _environments(others: tuple[str, ...], cache: Path, package: str) -> list[Environment]:
    """Return the environments, this one too, oldest first; one for each version."""
    from amp_fuzz.runs import bisect as core
    from amp_fuzz.runs.policies import InterpreterError

    found: dict[str, Environment] = {}
    for name in (sys.executable, *others):
        try:
            with waiting(f"preparing {name}"):
                one = core.environment(name, cache, package)
        except InterpreterError as error:
            raise Stopped(str(error)) from error
        except core.EnvironmentMissing as error:
            say(f"skipped: {error}")
            continue
        other = found.setdefault(one.version.partition("+")[0], one)
        if other is not one:
            say(f"skipped: {name}: {package} {one.version}, and {other.name} has {other.version}")
    return sorted(found.values(), key=lambda one: one.order)


def _told(step: Step) -> str:
    if step.state == "cannot tell":
        return f"cannot tell: {step.detail}"
    if 0 < step.bad < step.runs:
        return f"reproduces in {step.bad} of {step.runs} runs"
    agrees = f"agrees: {step.detail}" if step.detail else "agrees"
    return "reproduces" if step.bad else agrees


def _summary(found: list[Environment], ranged: Range) -> str:
    """Return in words what the search says."""
    first, last = found[ranged.first].version, found[ranged.last].version
    if ranged.before is None:
        began = f"there since {first} or earlier"
    else:
        began = f"began after {found[ranged.before].version}, at the latest in {first}"
    if ranged.after is None:
        ended = f"still there in {last}"
    else:
        ended = f"mended after {last}, at the latest in {found[ranged.after].version}"
    return f"{began}; {ended}"
