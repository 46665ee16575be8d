"""Autocast by version: which kernels several torches register, what they cast, and our tables.

`amp_fuzz.runs.probe` runs in each interpreter and measures. Here its answers are compared with the
policy tables and with each other.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TypeAlias

import msgspec
from packaging.version import Version

from amp_fuzz.policies.tables import DEVICES, PolicyTable, PolicyTableError, load_table

__all__ = [
    "BUILDS",
    "InterpreterError",
    "Measured",
    "changes",
    "disagreements",
    "measure",
    "order",
    "page",
    "python_of",
    "steps",
]

BUILDS: Mapping[str, Mapping[str, str]] = {
    "cuda": {"_cudnn_rnn": "has a kernel only in builds with cuDNN, which casts inputs and weights"}
}
"""Kernels that only some builds of torch register, by device: the tables leave them out."""

_SECONDS = 600
_PYTHON = "Scripts/python.exe" if sys.platform == "win32" else "bin/python"


class InterpreterError(ValueError):
    """An interpreter that cannot be asked. The message names it and says what to do."""


class Measured(msgspec.Struct, frozen=True):
    """What one torch has: for each device the policy of each overload, ``?`` and why if unknown."""

    torch: str
    devices: dict[str, dict[str, str]]

    @property
    def version(self) -> str:
        """The version without the build."""
        return self.torch.partition("+")[0]


def python_of(name: str) -> Path:
    """Return the interpreter of a path: itself, or that of an environment's folder."""
    path = Path(name).expanduser()
    return path / _PYTHON if path.is_dir() else path


def measure(python: str = sys.executable) -> Measured:
    """Ask an interpreter, or that of an environment's folder. Raises `InterpreterError`."""
    path = python_of(python)
    probe = resources.files("amp_fuzz.runs").joinpath("probe.py").read_text("utf-8")
    try:
        done = subprocess.run(
            [str(path), "-c", probe], capture_output=True, check=False, text=True, timeout=_SECONDS
        )
    except OSError as error:
        raise InterpreterError(
            f"{path}: cannot run ({error.strerror}): give a Python that has torch, "
            "or the folder of its environment"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise InterpreterError(f"{path}: no answer after {_SECONDS} s") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise InterpreterError(f"{path}: {last}: give a Python that has torch 2.7 or newer")
    try:
        return msgspec.json.decode(done.stdout, type=Measured)
    except msgspec.MsgspecError as error:
        raise InterpreterError(f"{path}: its answer cannot be read ({error})") from error


Tables: TypeAlias = Callable[[str, str], PolicyTable]


def _stock(device: str, version: str) -> PolicyTable:
    """Return our table, without the custom ops that were declared in this process."""
    table = load_table(device, torch_version=version)
    return replace(table, rules={n: r for n, r in table.rules.items() if "::" not in n})


def disagreements(measured: Measured, tables: Tables = _stock) -> Iterator[str]:
    """Yield a line for each overload on which a torch and our table of that version disagree.

    tables: returns the table of a device for a version.
    """
    for device in sorted({*DEVICES, *measured.devices}):
        found = measured.devices.get(device, {})
        where = f"torch {measured.torch}, {device}"
        try:
            rules = tables(device, measured.version).rules
        except PolicyTableError as error:
            if found:
                yield f"{where}: {len(found)} kernels, and no table: {error}"
            continue
        for op in sorted({*rules, *found} - set(BUILDS.get(device, ()))):
            if op not in found:
                yield f"{where}: {op}: our table says {rules[op].policy}, torch has no kernel"
            elif op not in rules:
                yield f"{where}: {op}: torch has a kernel ({found[op]}), our table has no rule"
            elif not found[op].startswith("?") and found[op] != rules[op].policy:
                yield f"{where}: {op}: our table says {rules[op].policy}, torch does {found[op]}"


def unobserved(measured: Measured) -> Iterator[str]:
    """Yield a line for each kernel whose policy the probe could not see."""
    for device, rows in measured.devices.items():
        for op, policy in rows.items():
            if policy.startswith("?") and op not in BUILDS.get(device, ()):
                yield f"torch {measured.torch}, {device}: {op}: {policy.removeprefix('? ')}"


Row: TypeAlias = tuple[str, ...]


def changes(measured: Sequence[Measured], device: str) -> dict[Row, list[str]]:
    """Return the overloads whose policy changed, by their policies in each torch; "" is none."""
    tables = [_kernels(m, device) for m in measured]
    found: dict[Row, list[str]] = defaultdict(list)
    for op in sorted(set().union(*tables)):
        row = tuple(table.get(op, "") for table in tables)
        if len(set(row)) > 1:
            found[row].append(op)
    return found


def steps(one: Measured, other: Measured) -> list[str]:
    """Return a line for each way in which a policy changed from one torch to another."""
    lines = []
    devices: dict[tuple[Row, tuple[str, ...]], list[str]] = defaultdict(list)
    for device in _devices([one, other]):
        if device not in one.devices or device not in other.devices:
            where = one if device in one.devices else other
            what = "no longer a device" if where is one else "a new device"
            lines.append(f"{device}: {what}, with {len(_kernels(where, device))} kernels")
            continue
        for row, changed in changes([one, other], device).items():
            devices[row, tuple(changed)].append(device)
    for ((before, after), ops), names in devices.items():
        step = f"{before or 'no kernel'} -> {after or 'no kernel'}"
        lines.append(f"{', '.join(names)}: {step}: {', '.join(ops)}")
    return lines


def order(measured: Measured) -> Version:
    """Return what to sort by: the version."""
    return Version(measured.version)


def _kernels(measured: Measured, device: str) -> dict[str, str]:
    """Return the policies of a device's kernels, without those that only some builds have."""
    left = BUILDS.get(device, {})
    return {op: p for op, p in measured.devices.get(device, {}).items() if op not in left}


def _devices(measured: Sequence[Measured]) -> list[str]:
    return list(dict.fromkeys(name for m in measured for name in m.devices))


# -- the page -------------------------------------------------------------------------------------

_HEAD = """\
# Autocast by version of torch

<!-- Written by `amp-fuzz policies --with=ENV... -o docs/evidence/autocast-by-version.md`. -->

This page shows which ops have an autocast kernel on which device, what the kernel casts, and what
changed from torch {first} to {last}.

`amp-fuzz policies` asked these builds: {builds}.
In each it called every autocast kernel of every device, and looked at the dtypes that arrive below
autocast. So the policies are observed, not copied from a list; {hidden}. This needs no accelerator.
The last column is from the [policy tables](../../amp_fuzz/policies);
{agree}.

The policies have their names from `aten/src/ATen/autocast_mode.h`:

- `lower_precision_fp` casts to the autocast dtype, `fp32` to float32.
- `promote` casts to float32 if an input is float32, and else to the autocast dtype.
- `fp32_set_opt_dtype` and `fp32_append_dtype` pass `dtype=torch.float32` if the caller gives none.
- `banned` raises.
- A dash is no kernel: autocast passes the call on unchanged.

hpu, ipu, xla and privateuse1 have autocast keys too, but torch has no kernels for them. Their
packages register their own.
"""


def page(measured: Sequence[Measured], tables: Tables = _stock) -> str:
    """Return docs/evidence/autocast-by-version.md."""
    measured = sorted(measured, key=order)
    wrong = [line for m in measured for line in disagreements(m, tables)]
    hidden = [line for m in measured for line in unobserved(m)]
    head = _HEAD.format(
        first=measured[0].version,
        last=measured[-1].version,
        builds=", ".join(m.torch for m in measured),
        hidden=f"{len(hidden)} could not be observed" if hidden else "none is left out",
        agree=f"they disagree with {len(wrong)} kernels" if wrong else "they agree with each build",
    )
    parts = [head, _counts(measured)]
    parts += [_device(measured, device, tables) for device in _devices(measured)]
    parts += _listed("The tables disagree", wrong) + _listed("Not observed", hidden)
    return "\n".join(parts)


def _having(measured: Sequence[Measured], device: str) -> list[Measured]:
    return [m for m in measured if device in m.devices]


def _counts(measured: Sequence[Measured]) -> str:
    rows = []
    for device in _devices(measured):
        having = _having(measured, device)
        counts = [str(len(_kernels(m, device)) or "–") for m in measured]
        changed = sum(map(len, changes(having, device).values()))
        rows.append(
            (f"[{device}](#{device})", *counts, str(len(_same(having, device))), str(changed))
        )
    versions = [m.version for m in measured]
    return _table(("kernels of", *versions, "stayed the same", "changed"), rows)


def _same(having: Sequence[Measured], device: str) -> dict[str, str]:
    """Return the policies of the overloads that did not change."""
    changed = {op for ops in changes(having, device).values() for op in ops}
    return {op: p for op, p in _kernels(having[0], device).items() if op not in changed}


def _device(measured: Sequence[Measured], device: str, tables: Tables) -> str:
    having = _having(measured, device)
    parts = [f"## {device}\n"]
    if without := [m.version for m in measured if m not in having]:
        parts.append(f"torch {', '.join(without)} has no autocast for it.\n")
    rows = [
        (_code(ops), *(p or "–" for p in row), _code(_ranges(having, device, ops, tables)))
        for row, ops in changes(having, device).items()
    ]
    if rows:
        parts.append(_table(("op", *(m.version for m in having), "holds for torch"), rows))
    counts = Counter(_same(having, device).values())
    same = ", ".join(f"{count} `{policy}`" for policy, count in sorted(counts.items()))
    parts.append(f"{counts.total()} ops stayed the same: {same}.\n")
    for op, what in BUILDS.get(device, {}).items():
        if builds := [m.torch for m in having if op in m.devices[device]]:
            parts.append(f"`{op}` {what}: {', '.join(builds)}. It is not counted.\n")
    return "\n".join(parts)


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _ranges(
    having: Sequence[Measured], device: str, ops: Sequence[str], tables: Tables
) -> list[str]:
    """Return the ranges that the tables give the rules of these ops."""
    held = [tables(device, m.version).rules for m in having]
    return list(dict.fromkeys(rules[op].versions for rules in held for op in ops if op in rules))


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _listed(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}\n", "\n".join(f"- {line}" for line in lines) + "\n"] if lines else []
