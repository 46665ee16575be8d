"""A pytest session that fuzzes: what it starts from, what its workers share, and what it says.

Without xdist one process does everything. With it, the controller draws the seed and names the run,
each worker runs items and writes records of its own, and the controller alone prints and writes the
report. A process that dies leaves the case that it was running in the store: the controller takes
it from there, and where nobody watched, the next session does.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import shlex
import sys
import time
import warnings
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from amp_fuzz import config as configuration
from amp_fuzz.backends import BackendError, backends, matching
from amp_fuzz.baseline import BaselineError
from amp_fuzz.config import ConfigError, Options, did_you_mean, resolve
from amp_fuzz.corpus import FINDINGS, CorpusError, Kept, fixed_lines, kept_findings
from amp_fuzz.devices import with_device
from amp_fuzz.known import KnownError
from amp_fuzz.plugins import load_plugins
from amp_fuzz.program import ProgramError
from amp_fuzz.pytest_corpus import corpus, replayed
from amp_fuzz.pytest_items import ROOT, AnyJob, Root, jobs, show_finding, store_option
from amp_fuzz.pytest_plugin import OPTIONS, dest
from amp_fuzz.pytest_run import Run, lock_of, recover, take
from amp_fuzz.records import DivergenceRecord
from amp_fuzz.reports import Report, read
from amp_fuzz.session import MissingBackend, prepare
from amp_fuzz.store import Store, StoreError

__all__ = ["FuzzSession", "activate", "given_options", "start_folder"]

_KEY = "amp_fuzz"  # of xdist's workerinput and workeroutput
_PREFIX = "--amp-fuzz-"
_DEATHS = 2  # of workers after which an item goes on, and for each process
_REFUSED = (
    BackendError,
    BaselineError,
    ConfigError,
    CorpusError,
    KnownError,
    MissingBackend,
    ProgramError,
    StoreError,
)


def activate(config: pytest.Config) -> None:
    """Get a session ready. Raises `pytest.UsageError`, one line, for options that do not fit."""
    try:
        session = _session(config)
    except _REFUSED as error:
        # The options that messages name are the command's; here they have a prefix.
        text = re.sub(r"(?<![\w-])--(?!amp-fuzz)(?=[a-z])", _PREFIX, str(error))
        raise pytest.UsageError(f"amp-fuzz: {text}") from error
    config.pluginmanager.register(session, "amp-fuzz-session")


def _session(config: pytest.Config) -> FuzzSession:
    resolved = resolve(given_options(config), start=start_folder(config), prefix=_PREFIX)
    options = resolved.options
    load_plugins(options.plugins, resolved.sources["plugins"], start_folder(config))
    options = with_device(resolved, start_folder(config))
    folder = config.invocation_params.dir / options.store
    sent: dict[str, Any] | None = None
    if hasattr(config, "workerinput"):
        sent = json.loads(config.workerinput[_KEY])
        folder = Path(sent["store"])
        options = dataclasses.replace(options, seed=sent["seed"])
    elif options.seed is None:
        options = dataclasses.replace(options, seed=secrets.randbelow(2**32))
    if options.report.exists() and not options.report.is_dir():
        raise ConfigError(f"{_PREFIX}report: {options.report} is a file: give a folder")
    again = list(replayed(Store(folder), config.option.amp_fuzz_replay))
    if again:
        named_backends = dict.fromkeys(job.kept.backend for job in again)
        options = dataclasses.replace(options, backends=tuple(named_backends))
    prepared = prepare(options, command=_again(config, options))
    record = prepared.record
    if sent is not None:
        record = msgspec.structs.replace(record, id=sent["run"], started=sent["started"])
    settings = prepared.settings
    if config.getoption("maxfail") == 1:
        settings = dataclasses.replace(settings, fail_fast=True)
    began = time.time() if sent is None else sent["began"]
    named = resolved.sources["store"].startswith(_PREFIX)
    run = Run(
        settings,
        Store(folder),
        record,
        worker="main" if sent is None else sent["worker"],
        store_option=store_option(str(options.store) if named else ""),
        deadline=began + settings.seconds if settings.seconds else float("inf"),
        timeout=0.0 if config.option.usepdb else options.timeout,
    )
    if sent is None:
        run.hung = partial(_say_hung, config, run)
    states = {name: backend.availability() for name, backend in backends().items()}
    wanted = {b.name for b in matching(options.backends)}
    missing = {n: s for n, s in states.items() if s.status != "ready" and n in wanted}
    kept: list[AnyJob] = [*again]
    findings: list[Kept] = []
    trouble: list[str] = []
    if not again:
        # Every worker must collect the same, whatever others have found by then.
        ids = None if sent is None else sent["findings"]
        findings, trouble = kept_findings(Store(folder), prepared.chosen, ids)
        cases = tuple((k.backend, FINDINGS, k.case) for k in findings)
        settings = run.settings = dataclasses.replace(settings, kept=cases)
        folders = [*options.corpus, *config.getini("amp_fuzz_corpus")]
        kept += corpus(folders, prepared.chosen)
        kept += jobs(settings, prepared.chosen, missing)
    found = _selected(config, kept)
    lost = []
    if sent is None and not config.option.collectonly:
        run.store.create()  # better now than after the first item
        lost = recover(run.store)
    return FuzzSession(
        run, found, options, began, lost, in_worker=sent is not None, kept=findings, unused=trouble
    )


def _say_hung(config: pytest.Config, run: Run, record: DivergenceRecord) -> None:
    """Say why the session ends, and keep the finding: nobody else is there to do it."""
    take(run.store, run.record.id, run.current, record.observed)
    Path(lock_of(run.current).lock_file).unlink(missing_ok=True)
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)
    why = "amp-fuzz: a case does not end, and so the session does; with -n 1, only the case would"
    sys.stderr.write("\n".join(["", *show_finding(record, run.store_option), why, ""]))
    sys.stderr.flush()


def given_options(config: pytest.Config) -> dict[str, object]:
    """Return the options of the command line as values."""
    given: dict[str, object] = {}
    for name in OPTIONS:
        text = getattr(config.option, dest(name))
        if text is None:
            continue
        option = configuration.OPTIONS[name]
        try:
            if option.kind == "paths":
                given[name] = tuple(path for part in text for path in option.parse(part))
            else:
                given[name] = option.parse(text)
        except ConfigError as error:
            raise ConfigError(f"{_PREFIX}{name}: {error}") from error
    return given


def _again(config: pytest.Config, options: Options) -> str:
    """Return the command that runs the same again."""
    args = [str(arg) for arg in config.invocation_params.args]
    seed = f"{_PREFIX}seed={options.seed}"
    return shlex.join(["pytest", *args, *([] if getattr(config.option, dest("seed")) else [seed])])


def start_folder(config: pytest.Config) -> Path:
    """Return the folder to look for configuration from: the current one, if it is the project's."""
    here, root = config.invocation_params.dir, config.rootpath
    return here if here.is_relative_to(root) else root


def _selected(config: pytest.Config, found: list[AnyJob]) -> list[AnyJob]:
    """Return the jobs that the command line names by their ids, or all if it names none.

    pytest prints these ids, so they must be good for a command line; but it would look for a folder
    ``amp-fuzz``, so they are taken out of its arguments. Raises `ConfigError` for one that is none.
    """
    ids, others = [], []
    for arg in config.args:
        path, _, rest = arg.partition("::")
        ours = Path(path).name == ROOT and not (config.invocation_params.dir / path).exists()
        if ours:
            ids.append("::".join([ROOT, rest] if rest else [ROOT]))
        else:
            others.append(arg)
    known = [job.nodeid for job in found]
    for wanted in ids:
        if not any(f"{nodeid}::".startswith(f"{wanted}::") for nodeid in known):
            hint = did_you_mean(wanted, known) or ": pytest --amp-fuzz --collect-only -q lists them"
            raise ConfigError(f"no item is called {wanted!r}{hint}")
    if not ids:
        return found
    config.args[:] = others
    return [j for j in found if any(f"{j.nodeid}::".startswith(f"{w}::") for w in ids)]


# -- the session ----------------------------------------------------------------------------------


@dataclass(eq=False)
class FuzzSession:
    """The hooks of a session.

    lost: what earlier sessions died of. crashed: what workers of this one did. put_back: how often
    an item was given to another worker. workers: what each worker had to say at its end. kept: the
    store's findings, which are judged first; unused: why others are not. trouble: why the report or
    a record could not be written.
    """

    run: Run
    jobs: list[AnyJob]
    options: Options
    began: float
    lost: list[DivergenceRecord]
    in_worker: bool
    kept: list[Kept] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    crashed: dict[str, DivergenceRecord] = field(default_factory=dict)
    put_back: Counter[str] = field(default_factory=Counter)
    workers: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    reports: tuple[Path, ...] = ()
    seen: Report | None = None
    trouble: list[str] = field(default_factory=list)

    def pytest_report_header(self) -> list[str]:
        run, settings = self.run, self.run.settings
        names = [f"{b.name} ({b.detail})" for b in run.record.backends]
        words = [f"seed {settings.seed}", f"profile {settings.profile}"]
        words += [f"{settings.cases} cases a backend", f"store {self.options.store}"]
        about = [f"amp-fuzz: {', '.join(words)}", f"amp-fuzz: {', '.join(names)}"]
        if self.kept:
            count = f"{len(self.kept)} finding{'s' * (len(self.kept) != 1)}"
            about.append(f"amp-fuzz: judged first: {count} of the store")
        about += [f"amp-fuzz: not judged again: {text}" for text in self.unused]
        return about + self._lost_lines()

    def _lost_lines(self) -> list[str]:
        return [
            f"amp-fuzz: an earlier session died of a case on {record.backend}: "
            f"amp-fuzz replay {record.id}{self.run.store_option}"
            for record in self.lost
        ]

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Add our root to what the session collects, beside the project's files."""
        report = yield
        if isinstance(collector, pytest.Session) and report.passed and self.jobs:
            about = {"name": ROOT, "nodeid": ROOT, "run": self.run, "jobs": self.jobs}
            report.result.append(Root.from_parent(collector, **about))
        return report

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell an xdist worker which run it is part of."""
        node.workerinput[_KEY] = json.dumps(
            {
                "run": self.run.record.id,
                "seed": self.run.settings.seed,
                "started": self.run.record.started,
                "began": self.began,
                "store": str(self.run.store.root.absolute()),
                "findings": [kept.name for kept in self.kept],
                "worker": node.workerinput["workerid"],
            }
        )

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object | None) -> None:
        """Take what a worker has to say, or what it left if it died."""
        name = node.gateway.id
        output = getattr(node, "workeroutput", {}).get(_KEY)
        if output is not None:
            self.workers[name] = json.loads(output)
        if error is None:
            return
        path = self.run.store.run_path(self.run.record.id) / f"current-{name}.json"
        record = None
        with self._kept_going():
            record = take(self.run.store, self.run.record.id, path, f"worker {name} died")
        Path(lock_of(path).lock_file).unlink(missing_ok=True)
        if record is not None:
            self.crashed[name] = record

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: Any, sched: Any) -> None:
        """Add the case to what xdist says of an item; a worker that lives does the rest of it."""
        record = self.crashed.get(report.node.gateway.id)
        if record is None or not crashitem.startswith(f"{ROOT}::"):
            return
        lines = [str(report.longrepr), "", *show_finding(record, self.run.store_option)]
        if crashitem.startswith(f"{ROOT}::{record.backend}::"):
            again = self._put_back(crashitem, report.node.config, sched)
            rest = "are for another worker" if again else "did not run"
            lines.append(f"The item's other cases {rest}.")
        report.longrepr = "\n".join(lines)
        report.location = (".", None, crashitem)  # for the headline

    def _put_back(self, nodeid: str, config: pytest.Config, sched: Any) -> bool:
        """Give an item to another worker, unless it is at fault for too many.

        After 4 for each process, xdist ends the session; other items may need them.
        """
        limit = _DEATHS * (config.getoption("numprocesses", None) or 1)
        if self.put_back[nodeid] >= _DEATHS or self.put_back.total() >= limit:
            return False
        try:
            sched.mark_test_pending(nodeid)
        except NotImplementedError:  # where --dist keeps tests together
            return False
        self.put_back[nodeid] += 1
        return True

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send what this worker did to the controller; in the controller, write the report."""
        self.run.close()
        if self.in_worker:
            output = {"cases": self.run.cases, "findings": [r.id for r in self.run.findings]}
            session.config.workeroutput[_KEY] = json.dumps(output)  # type: ignore[attr-defined]
            return
        # Workers that an interrupt ended left their files: no case killed them.
        for path in self.run.store.run_path(self.run.record.id).glob("current-*"):
            with suppress(OSError):
                path.unlink()
        if self._ran():
            with self._kept_going():
                run, known = self.run.record.id, self.run.settings.known
                self.seen = read(self.run.store, run, known=known)
                self.reports = self.seen.write(self.options.report)

    @contextmanager
    def _kept_going(self) -> Iterator[None]:
        """Note what goes wrong in a summary or report, so that pytest's own still come.

        The records are in the store by then. What they show must not be lost to a full disk, nor to
        a mistake of ours.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except StoreError as error:
            self.trouble.append(str(error))
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            self.trouble.append(f"internal error, please report it: {what}")

    def _ran(self) -> bool:
        return (self.run.store.run_path(self.run.record.id) / "run.json").exists()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if terminalreporter.config.option.collectonly:
            return
        terminalreporter.section("amp-fuzz")
        for line in self.summary():
            terminalreporter.write_line(line)

    def summary(self) -> list[str]:
        """Return what there is to say at the end, as lines."""
        lines = self._lost_lines()
        if self._ran():
            with self._kept_going():
                run, known = self.run.record.id, self.run.settings.known
                seen = self.seen or read(self.run.store, run, known=known)
                lines += seen.terminal().splitlines()
                lines += [f"fixed: {text}" for text in fixed_lines(self.run.store, run, self.kept)]
        else:
            lines.append("amp-fuzz: no case ran")
        return [*lines, *self._worker_lines(), *self._last_lines()]

    def _worker_lines(self) -> list[str]:
        """Say what each worker did; and where a worker's records are not in this store, that."""
        if not self.workers and not self.crashed:
            return []
        parts = [f"{name} {said['cases']} cases" for name, said in sorted(self.workers.items())]
        parts += [f"{name} died of case {r.id}" for name, r in sorted(self.crashed.items())]
        lines = [f"workers: {', '.join(parts)}"]
        for name, said in sorted(self.workers.items()):
            records = self.run.store.run_path(self.run.record.id) / f"records-{name}.jsonl"
            if said["cases"] and not records.exists():
                found = ", ".join(said["findings"]) or "none"
                lines.append(f"the records of {name} are in a store elsewhere (findings: {found})")
        return lines

    def _last_lines(self) -> list[str]:
        lines = [f"report: {', '.join(map(str, self.reports))}"] if self.reports else []
        lines += [f"amp-fuzz: {trouble}" for trouble in self.trouble]
        return [*lines, f"again: {self.run.record.command}"]
