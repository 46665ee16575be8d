"""``amp-fuzz policies --cost``: how many digits ops keep, lowered and in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from amp_fuzz.interfaces.cli.common import Exit, Stopped, command_line, say, table
from amp_fuzz.interfaces.cli.precision import made_by, progress_bar, target_of
from amp_fuzz.records.outputs import write_whole
from amp_fuzz.reports.printable import plural

if TYPE_CHECKING:
    from amp_fuzz.interfaces.policy_costs import Costs
    from amp_fuzz.interfaces.policy_costs.view import Loss, View
    from amp_fuzz.policies.tables import PolicyTable

__all__ = ["costs"]

_MOST = 12


def costs(
    target: str | None, devices: Sequence[str], draws: int, seed: int, output: str | None
) -> int:
    """Measure, print what stands out, and write the page if a file is given."""
    file = None if target is None else target_of(target)
    tables = _tables(devices)
    import torch

    from amp_fuzz.interfaces.policy_costs import costs_of_draws
    from amp_fuzz.interfaces.policy_costs.view import View, page

    if target is None or file is None:
        with progress_bar() as progress:
            found = costs_of_draws(tables, draws=draws, seed=seed, progress=progress)
        view, what = View(drawn=found), f"drawn, {draws} an op, with seed {seed}"
    else:
        torch.manual_seed(seed)
        found = _met(tables, target, made_by(*file), seed)
        view, what = View(met=found), f"made by {target}"
    judged = plural(sum(count > 0 for count in found.calls.values()), "op")
    said = f"torch {torch.__version__}: {plural(found.calls.total(), 'call')} of {judged}, {what}"
    say(said)
    _summary(view)
    if output is not None:
        words = [*([target] if target else []), *(f"--device={d}" for d in devices)]
        words += [f"--seed={seed}"] if target else [f"--draws={draws}", f"--seed={seed}"]
        command = command_line("policies", "--cost", *words)
        head = f"# What a policy costs\n\n<!-- Written by `{command}`. -->\n\n{said}.\n"
        write_whole(Path(output), page(view, head).encode())
        say(f"\nwrote {output}")
    return Exit.OK


def _tables(devices: Sequence[str]) -> dict[str, PolicyTable]:
    """Return the tables of devices and files, by device."""
    from amp_fuzz.policies.tables import (
        PolicyTableError,
        load_table,
        load_table_file,
        tabled_devices,
    )

    try:
        found = [
            load_table_file(name) if name.endswith(".toml") else load_table(name)
            for name in devices or tabled_devices()
        ]
    except PolicyTableError as error:
        raise Stopped(str(error)) from error
    return {one.device: one for one in found}


def _met(tables: dict[str, PolicyTable], target: str, made: tuple[object, ...], seed: int) -> Costs:
    from amp_fuzz.interfaces.policy_costs import costs_of_callable

    function, *inputs = made
    try:
        return costs_of_callable(tables, function, inputs, seed=seed)  # type: ignore[arg-type]
    except Exception as error:  # the user's code may raise anything
        first = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise Stopped(f"{target}: the call raises {first}") from error


def _summary(view: View) -> None:
    from amp_fuzz.interfaces.policy_costs.view import BY_DEVICE

    differing, others = view.differing()
    _losses("lowered, though they amplify", view.lowered(), view)
    _losses("in float32 on some devices only, and amplify in 16 bits", differing, view)
    if others:
        say(f"differ so without amplifying: {plural(others, 'op')}")
    say()
    table(("devices", "dtype", *BY_DEVICE), view.by_device())
    unneeded = view.unneeded()
    say(f"\nkept in float32, and would amplify: {plural(len(view.needed()), 'op')}")
    say(f"\nkept in float32 without need: {plural(len(unneeded), 'op')}")
    for dtypes in sorted(set(map(tuple, unneeded.values())), key=len, reverse=True):
        ops = [op for op, mine in unneeded.items() if tuple(mine) == dtypes]
        say(f"  {', '.join(dtypes)}: {', '.join(ops)}")
    if view.met is not None:
        say("\nevery op: digits that it keeps lowered, by autocast dtype and operands")
        table(*view.every())
    unjudged = view.unjudged()
    say(f"\nnot judged: {plural(sum(map(len, unjudged.values())), 'op')}")
    for reason, ops in unjudged.items():
        few = f"{', '.join(ops[:4])}{', ...' if len(ops) > 4 else ''}"
        say(f"  {plural(len(ops), 'op')}: {reason}: {few}")


def _losses(title: str, losses: Sequence[Loss], view: View) -> None:
    say(f"\n{title}: {plural(len(losses), 'op')}")
    if losses:
        table(view.columns(), map(view.row, losses[:_MOST]))
    if len(losses) > _MOST:
        say(f"and {len(losses) - _MOST:,} more: -o FILE writes all of them")
