"""``amp-fuzz policies``: what autocast casts in several versions of torch, and what that costs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import click

from amp_fuzz.interfaces.cli.common import Exit, Stopped, say, table, waiting
from amp_fuzz.records.outputs import write_whole

__all__ = ["policies"]


@click.command(short_help="Compare autocast's policies between torches, or say what they cost.")
@click.argument("target", metavar="[FILE.py:NAME]", required=False)
@click.option(
    "--with",
    "others",
    metavar="ENV",
    multiple=True,
    help="Ask this Python too, or the Python of this environment. Give it once for each.",
)
@click.option("--cost", is_flag=True, help="Say how many digits ops keep, lowered and in float32.")
@click.option(
    "--device",
    "devices",
    metavar="TYPE",
    multiple=True,
    help="Of --cost: a device type, or a TOML file with its table; by default each that has one.",
)
@click.option(
    "--draws",
    type=click.IntRange(1),
    metavar="N",
    help="Of --cost: how many calls of each op to draw; by default 8.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    metavar="N",
    help="Of --cost: what the calls are drawn from; by default 0.",
)
@click.option("-o", "--output", metavar="FILE", help="Write a page of it, as Markdown.")
def policies(
    target: str | None,
    others: tuple[str, ...],
    cost: bool,
    devices: tuple[str, ...],
    draws: int | None,
    seed: int | None,
    output: str | None,
) -> int:
    """Ask the installed torch, and those of other environments, what autocast casts on each device.

    Calls every autocast kernel and looks at the dtypes that arrive below autocast. It needs no
    accelerator, and in the other environments nothing but torch. Shows what changed between the
    versions, and checks the version ranges of the policy tables.

    With --cost: draws calls of each op that has a policy, and says what the policy loses. It names
    the ops that are lowered though they amplify errors, those kept in float32 without need, and
    those that only some devices keep in float32. NAME is a function without arguments, as for
    precision: then the calls are those that its callable makes.

    Exit codes: 0 the tables agree with every torch, or --cost is done; 1 a table disagrees, and its
    ops are named; 2 an environment has no torch, or the file cannot be used.
    """
    if cost:
        if others:
            raise Stopped("--cost measures the installed torch: leave out --with")
        if target is not None and draws is not None:
            raise Stopped("--draws is for drawn calls: leave it out, or leave out the file")
        from amp_fuzz.interfaces.cli.policy_costs import costs

        return costs(target, devices, draws or 8, seed or 0, output)
    for name, given in (("a file", target), ("--device", devices), ("--draws", draws)):
        if given:
            raise Stopped(f"{name} needs --cost")
    if seed is not None:
        raise Stopped("--seed needs --cost")
    from amp_fuzz.runs import policies as core

    measured: dict[str, core.Measured] = {}
    try:
        with waiting("asking torch"):
            for found in (*map(core.measure, others), core.measure()):
                measured.setdefault(found.version, found)
    except core.InterpreterError as error:
        raise Stopped(str(error)) from error
    torches = sorted(measured.values(), key=core.order)
    table(
        ("torch", "kernels"),
        [
            (m.torch, ", ".join(f"{name} {len(rows)}" for name, rows in m.devices.items()))
            for m in torches
        ],
    )
    for one, other in pairwise(torches):
        say()
        say(f"from {one.version} to {other.version}:")
        for line in core.steps(one, other) or ["nothing changed"]:
            say(f"  {line}")
    wrong = [line for m in torches for line in core.disagreements(m)]
    say()
    for line in wrong:
        say(f"DISAGREES: {line}")
    say(f"the policy tables {'disagree: mend their ranges' if wrong else 'agree with every torch'}")
    if output is not None:
        write_whole(Path(output), core.page(torches).encode())
        say(f"wrote {output}")
    return Exit.DIVERGED if wrong else Exit.OK
