"""``amp-fuzz policies``: what autocast casts in several versions of torch, and our tables of it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import click

from amp_fuzz.interfaces.cli.common import Exit, Stopped, say, table, waiting
from amp_fuzz.records.outputs import write_whole

__all__ = ["policies"]


@click.command(short_help="Compare autocast's policies between versions of torch.")
@click.option(
    "--with",
    "others",
    metavar="ENV",
    multiple=True,
    help="Ask this Python too, or the Python of this environment. Give it once for each.",
)
@click.option("-o", "--output", metavar="FILE", help="Write the page of changes, as Markdown.")
def policies(others: tuple[str, ...], output: str | None) -> int:
    """Ask the installed torch, and those of other environments, what autocast casts on each device.

    Calls every autocast kernel and looks at the dtypes that arrive below autocast. It needs no
    accelerator, and in the other environments nothing but torch. Shows what changed between the
    versions, and checks the version ranges of the policy tables.

    Exit codes: 0 the tables agree with every torch; 1 a table disagrees, and its ops are named;
    2 an environment has no torch.
    """
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
