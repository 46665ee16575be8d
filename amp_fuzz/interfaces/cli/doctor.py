"""``amp-fuzz doctor``: check what this installation can do, and what is broken."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import click

from amp_fuzz.config import ConfigError, Options, Resolved, is_url, shown_value
from amp_fuzz.interfaces.cli.common import (
    Exit,
    options,
    resolve_options,
    say,
    table,
    version,
    waiting,
)
from amp_fuzz.records.remote import store_at
from amp_fuzz.records.store import StoreError
from amp_fuzz.reports.printable import plural

__all__ = ["doctor"]

_PACKAGES = (
    "torch",
    "hypothesis",
    "numpy",
    "pandas",
    "pytest",
    "msgspec",
    "click",
    "rich",
    "jinja2",
)


@dataclass(frozen=True, slots=True)
class _Check:
    """The result of one check. `code` is the exit code if it is not ok."""

    state: Literal["ok", "note", "BROKEN"]
    what: str
    detail: str
    code: int = Exit.OK


@click.command(short_help="Check the installation.")
@options("backends", "require", "store", "workers", "plugins", "device", "policies")
def doctor(**given: Any) -> int:
    """Check the installation: versions, backends, the store, configuration, autocast's kernels.

    Exits with 0 unless something that a run needs is broken.
    """
    checks = list(_versions())
    chosen = Options()
    try:
        resolved = resolve_options(given)
        chosen = resolved.options
        checks += _configuration(resolved)
    except ConfigError as error:
        checks.append(_Check("BROKEN", "configuration", str(error), Exit.USAGE))
    except ImportError as error:  # the policies of a device need torch
        checks.append(_Check("BROKEN", "configuration", str(error), Exit.MISSING))
    checks.append(_store(chosen))
    with waiting("importing torch"):
        checks += _torch(chosen)
    table(("", "check", "detail"), [(c.state, c.what, c.detail) for c in checks])
    broken = [c for c in checks if c.state == "BROKEN"]
    say()
    if broken:
        say(f"{len(broken)} broken: {', '.join(c.what for c in broken)}")
        return max(c.code for c in broken)
    say("ready; start with: amp-fuzz run")
    return Exit.OK


def _versions() -> Iterator[_Check]:
    yield _Check("ok", "amp-fuzz", f"{version()}, Python {platform.python_version()}")
    yield _Check("ok", "platform", f"{platform.platform()}, {os.cpu_count()} CPUs")
    yield _Check("ok", "packages", ", ".join(f"{name} {version(name)}" for name in _PACKAGES))


def _configuration(resolved: Resolved) -> Iterator[_Check]:
    files = ", ".join(map(str, resolved.files)) or "no file: no amp-fuzz.toml, no [tool.amp-fuzz]"
    yield _Check("ok", "configuration", files)
    for name, source in resolved.sources.items():
        if source != "default":
            value = getattr(resolved.options, name.replace("-", "_"))
            yield _Check("ok", f"option {name}", f"{shown_value(value)}, from {source}")


def _store(chosen: Options) -> _Check:
    try:
        store = store_at(chosen.store)
    except StoreError as error:
        return _Check("BROKEN", "store", str(error), Exit.USAGE)
    try:
        store.create()
        held = f"{plural(len(store.runs()), 'run')}, {plural(len(store.findings()), 'finding')}"
        if is_url(str(chosen.store)):
            return _Check("ok", "store", f"{store.place}: {held}, can be written")
        with tempfile.NamedTemporaryFile(dir=store.root) as file:
            file.write(b"0" * 4096)
            file.flush()
    except StoreError as error:
        return _Check("BROKEN", "store", str(error), Exit.USAGE)
    except OSError as error:
        detail = f"{store.root}: cannot write ({error.strerror}): give another with --store"
        return _Check("BROKEN", "store", detail, Exit.USAGE)
    free = shutil.disk_usage(store.root).free / 2**30
    return _Check("ok", "store", f"{store.root}: {held}, {free:.1f} GiB free")


def _torch(chosen: Options) -> Iterator[_Check]:
    try:
        import torch
    except Exception as error:  # a broken installation fails in many ways
        yield _Check("BROKEN", "torch", f"{type(error).__name__}: {error}", Exit.MISSING)
        return
    threads = f"a worker uses 1 thread; torch here would use {torch.get_num_threads()}"
    yield _Check("ok", "workers", f"{chosen.workers} processes; {threads}")
    yield from _backends(chosen)
    yield from _kernels()


def _backends(chosen: Options) -> Iterator[_Check]:
    from amp_fuzz.backends import BackendError, backends, choose, is_pattern

    try:
        needed = {
            b.name
            for b in choose(n for n in (*chosen.backends, *chosen.require) if not is_pattern(n))
        }
    except BackendError as error:
        yield _Check("BROKEN", "backends", str(error), Exit.USAGE)
        needed = set()
    for name, backend in backends().items():
        state = backend.availability()
        what = f"backend {name}"
        if state.status == "ready":
            yield _Check("ok", what, state.detail)
        elif name in needed:
            yield _Check("BROKEN", what, f"{state.status}: {state.detail}", Exit.MISSING)
        else:
            yield _Check("note", what, f"{state.status}: {state.detail}")


def _kernels() -> Iterator[_Check]:
    """Compare what torch's dispatcher lists for each device with our table for this torch."""
    from amp_fuzz.backends.dispatcher import has_autocast, kernels
    from amp_fuzz.catalogue import CATALOGUE
    from amp_fuzz.reference import DEVICES, PolicyTableError, load_table, since

    callable_ = {o.removeprefix("aten::") for op in CATALOGUE.values() for o in op.overloads}
    yield _Check("ok", "catalogue", f"{len(CATALOGUE)} ops")
    for device in DEVICES:
        what = f"kernels of {device}"
        if not has_autocast(device):
            yield _Check("note", what, f"needs torch >={since(device)}")
            continue
        listed = kernels(device)
        names = {*listed.reachable, *listed.unreachable}
        try:
            rules = set(load_table(device).rules)
        except PolicyTableError as error:
            yield _Check("BROKEN", what, str(error), Exit.USAGE)
            continue
        text = f"{len(names)} listed by the dispatcher, {len(rules)} in our table"
        text += (
            f", {len(listed.unreachable)} that no caller can reach" if listed.unreachable else ""
        )
        problems = [
            f"{title}: {_some(found)}"
            for title, found in (
                ("only in the dispatcher", names - rules),
                ("only in our table", rules - names),
                ("no catalogue entry calls", set(listed.reachable) - callable_),
            )
            if found
        ]
        yield _Check("note" if problems else "ok", what, "; ".join([text, *problems]))


def _some(names: set[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "")
