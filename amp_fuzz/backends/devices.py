"""The user's installed device: its name and its policies.

Processes started from here inherit both, like plugins, through the options' environment variables.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from amp_fuzz.config import OPTIONS, ConfigError, Options, Resolved, as_path, did_you_mean

if TYPE_CHECKING:
    from amp_fuzz.policies.tables import PolicyTable

__all__ = ["check_ops", "policies_of", "with_device"]

DEFAULT = "cuda"
_OWN = ("cpu", "cuda", "xpu", "mps")  # devices that are backends anyway
_NAME = re.compile(r"[a-z_][a-z0-9_]*", re.ASCII)


def with_device(resolved: Resolved, folder: Path | None = None) -> Options:
    """Return the options with the backends of the device that they name, if any.

    Sets the device for this process and those started from here. folder: the folder that a file of
    policies is relative to, by default the current one; a file named in a configuration is relative
    to that. Raises `ConfigError` with one line.
    """
    options, sources = resolved.options, resolved.sources
    if not options.device:
        if options.policies:
            _check(_found(options.policies, sources["policies"], folder), sources["policies"])
            raise ConfigError(f"{sources['policies']}: policies of which device? add device=NAME")
        return options
    if options.device in _OWN:
        raise ConfigError(
            f"{sources['device']}: {options.device!r} is one of torch's own devices: choose "
            f"--backends=eager-{options.device}"
        )
    if not _NAME.fullmatch(options.device):
        raise ConfigError(
            f"{sources['device']}: {options.device!r} is not a device name: write it as in "
            f"torch.device('npu'), without a number"
        )
    policies = _found(options.policies or "", sources["policies"], folder)
    _check(policies, sources["policies"], options.device)
    os.environ[OPTIONS["device"].variable] = options.device
    os.environ[OPTIONS["policies"].variable] = policies
    if sources["backends"] == "default":
        own = f"eager-{options.device}"
        options = dataclasses.replace(options, backends=(own, f"{own}[shadow]"))
    return options


def _found(policies: str, source: str, folder: Path | None) -> str:
    """Return the name of a table, or the full path of a table's file."""
    from amp_fuzz.policies.tables import DEVICES

    if not policies or policies in DEVICES:
        return policies
    of_file = Path(source.rpartition(" in ")[2])
    near = of_file.parent if of_file.suffix == ".toml" else folder or Path.cwd()
    try:
        return os.fspath((near / as_path(policies)).absolute())
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def _check(policies: str, source: str, device: str = DEFAULT) -> None:
    """Raise `ConfigError` if there is no such table, or if a file is none."""
    try:
        policies_of(device, policies)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from error


def policies_of(device: str, policies: str) -> PolicyTable:
    """Return the policies for a device: the table of another device, or of a file.

    "" is CUDA's. Raises `PolicyTableError`, a ValueError, also if a file names an op that torch
    does not have.
    """
    from amp_fuzz.policies.tables import DEVICES, PolicyTableError, load_table, load_table_file

    name = policies or DEFAULT
    if name in DEVICES:
        return dataclasses.replace(load_table(name), device=device, source=name)
    path = Path(name)
    if path.suffix != ".toml" and not path.exists():
        ways = f": use one of {', '.join(DEVICES)}, or the path of a TOML file"
        problem = f"no such table or file{did_you_mean(path.name, DEVICES) or ways}"
        raise PolicyTableError("", path.name, problem)
    table = load_table_file(path)
    check_ops(table, name)
    return dataclasses.replace(table, device=device, source=path.name)


def check_ops(table: PolicyTable, file: str) -> None:
    """Raise `PolicyTableError` for an op of a table that this torch does not have.

    Only of torch's own: a library of a vendor's may not be loaded yet. file: where the table is.
    """
    from amp_fuzz.policies.tables import PolicyTableError, all_overloads

    for rule in table.rules.values():
        for op in filter(None, (rule.overload, rule.redispatch)):
            name, _, overload = op.partition(".")
            there = [o.removeprefix("default") for o in _overloads(name)]
            if "::" in op or overload in there:
                continue
            others = [f"{name}.{o}".removesuffix(".") for o in there]
            others = others or sorted(all_overloads())
            near = difflib.get_close_matches(op, others, n=1)
            way_out = f"did you mean {near[0]!r}?" if near else "write it as in 'sum.dim_IntList'"
            place = f"{rule.policy}, {rule.versions}"
            problem = f"torch {table.torch_version} has no op {op!r}; {way_out}"
            raise PolicyTableError(file, place, problem)


def _overloads(name: str) -> Sequence[str]:
    """Return the overloads of one of torch's ops, or () if there is none of the name."""
    import torch

    try:
        packet = getattr(torch.ops.aten, name)
    except AttributeError:
        return ()
    found: Sequence[str] = packet.overloads()
    return found
