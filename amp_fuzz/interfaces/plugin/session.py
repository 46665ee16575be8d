"""A pytest session that fuzzes: its start, its xdist workers, its summary.

Without xdist one process does everything. With it, the controller draws the seed and names the run,
each worker runs items and writes its records, and only the controller prints and writes the report.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import shlex
import time
import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import pytest

from amp_fuzz import config as configuration
from amp_fuzz.backends import BackendError, matching
from amp_fuzz.backends.devices import with_device
from amp_fuzz.backends.registry import MissingBackend
from amp_fuzz.cases.program import ProgramError
from amp_fuzz.config import ConfigError, Options, did_you_mean, folder_of, resolve
from amp_fuzz.interfaces.plugin.corpus import corpus, replayed
from amp_fuzz.interfaces.plugin.items import ROOT, AnyJob, Root, jobs, store_option
from amp_fuzz.interfaces.plugin.options import OPTIONS, dest
from amp_fuzz.interfaces.plugin.run import Run
from amp_fuzz.plugins import load_plugins
from amp_fuzz.records.baseline import BaselineError
from amp_fuzz.records.schema import EndRecord
from amp_fuzz.records.store import Store, StoreError, find_run
from amp_fuzz.reports import Report, read, written
from amp_fuzz.reports.compare import compare
from amp_fuzz.reports.compare_text import render
from amp_fuzz.runs.corpus import FINDINGS, CorpusError, Kept, fixed_lines, kept_findings
from amp_fuzz.runs.engine import limits
from amp_fuzz.runs.setup import Session, prepare
from amp_fuzz.runs.workers import unshared
from amp_fuzz.upstream.known import KnownError

__all__ = ["FuzzSession", "activate", "given_options", "start_folder"]

_KEY = "amp_fuzz"  # in xdist's workerinput and workeroutput
_PREFIX = "--amp-fuzz-"
_UNREACHED = "changes to torch do not reach the processes of cases"
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
    """Prepare a session. Raises `pytest.UsageError` with one line for invalid options."""
    try:
        session = _session(config)
    except _REFUSED as error:
        # Messages name the command's options; here these have a prefix.
        text = re.sub(r"(?<![\w-])--(?!amp-fuzz)(?=[a-z])", _PREFIX, str(error))
        raise pytest.UsageError(f"amp-fuzz: {text}") from error
    config.pluginmanager.register(session, "amp-fuzz-session")


def _session(config: pytest.Config) -> FuzzSession:
    given = _given(config)
    options, folder, sent = given.options, given.folder, given.sent
    again = list(replayed(Store(folder), config.option.amp_fuzz_replay))
    if again:
        named = dict.fromkeys(job.kept.backend for job in again)
        options = dataclasses.replace(options, backends=tuple(named))
    prepared = prepare(options, command=_again(config, options))
    run = _run(config, prepared, given)
    kept: list[AnyJob] = [*again]
    findings: list[Kept] = []
    trouble: list[str] = []
    if not again:
        # Every worker must collect the same items, whatever others have found.
        ids = None if sent is None else sent["findings"]
        findings, trouble = kept_findings(Store(folder), prepared.chosen, ids)
        cases = tuple((k.backend, FINDINGS, k.case) for k in findings)
        run.settings = dataclasses.replace(run.settings, kept=cases)
        kept += corpus([*options.corpus, *config.getini("amp_fuzz_corpus")], prepared.chosen)
        states = {b.name: b.availability() for b in matching(options.backends)}
        missing = {name: state for name, state in states.items() if state.status != "ready"}
        kept += jobs(run.settings, prepared.chosen, missing)
    found = _selected(config, kept)
    if sent is None and not config.option.collectonly:
        run.store.create()  # fail now, not after the first item
    worker = sent is not None
    against = None if worker else _against(config, folder)
    return FuzzSession(run, found, options, worker, kept=findings, unused=trouble, against=against)


class _Given(NamedTuple):
    """The options of a session. sent: what a worker of xdist was sent, or None.

    folder: of the store. store: the option that names it, or "".
    """

    options: Options
    folder: Path
    store: str
    sent: Mapping[str, Any] | None


def _given(config: pytest.Config) -> _Given:
    resolved = resolve(given_options(config), start=start_folder(config), prefix=_PREFIX)
    options = resolved.options
    load_plugins(options.plugins, resolved.sources["plugins"], start_folder(config))
    options = with_device(resolved, start_folder(config))
    folder = config.invocation_params.dir / folder_of(options.store, "a session")
    sent = None
    if hasattr(config, "workerinput"):
        sent = json.loads(config.workerinput[_KEY])
        folder = Path(sent["store"])
        options = dataclasses.replace(options, seed=sent["seed"])
    elif options.seed is None:
        options = dataclasses.replace(options, seed=secrets.randbelow(2**32))
    if options.report.exists() and not options.report.is_dir():
        raise ConfigError(f"{_PREFIX}report: {options.report} is a file: give a folder")
    named = resolved.sources["store"].startswith(_PREFIX)
    return _Given(options, folder, store_option(str(options.store) if named else ""), sent)


def _run(config: pytest.Config, prepared: Session, given: _Given) -> Run:
    """Return the state that the items of this process share."""
    record, sent, settings = prepared.record, given.sent, prepared.settings
    if sent is not None:
        record = msgspec.structs.replace(record, id=sent["run"], started=sent["started"])
    if config.getoption("maxfail") == 1:
        settings = dataclasses.replace(settings, fail_fast=True)
    if given.options.isolate == "auto" and config.option.usepdb:
        settings = dataclasses.replace(settings, isolate=False)
    return Run(
        dataclasses.replace(settings, workers=1),
        Store(given.folder),
        record,
        label="main" if sent is None else sent["worker"],
        store_option=given.store,
        processes=getattr(config, "workerinput", {}).get("workercount", 1),
    )


def _against(config: pytest.Config, folder: Path) -> tuple[Store, str] | None:
    """Return the run that this one is compared with."""
    if not (before := getattr(config.option, dest("compare"))):
        return None
    try:
        return find_run(Store(folder), before)
    except StoreError as error:
        raise pytest.UsageError(f"{_PREFIX}compare: {error}") from error


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
    """Return the command that repeats the session."""
    args = [str(arg) for arg in config.invocation_params.args]
    seed = f"{_PREFIX}seed={options.seed}"
    return shlex.join(["pytest", *args, *([] if getattr(config.option, dest("seed")) else [seed])])


def start_folder(config: pytest.Config) -> Path:
    """Return the folder where the search for configuration starts: this one, if in the project."""
    here, root = config.invocation_params.dir, config.rootpath
    return here if here.is_relative_to(root) else root


def _selected(config: pytest.Config, found: list[AnyJob]) -> list[AnyJob]:
    """Return the jobs that the command line names by their ids, or all if it names none.

    pytest prints these ids, so they must work on a command line. But pytest would look for a folder
    ``amp-fuzz``, so they are removed from its arguments. Raises `ConfigError` for an unknown id.
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
            raise ConfigError(f"unknown item {wanted!r}{hint}")
    if not ids:
        return found
    config.args[:] = others
    return [j for j in found if any(f"{j.nodeid}::".startswith(f"{w}::") for w in ids)]


# -- the session ----------------------------------------------------------------------------------


@dataclass(eq=False)
class FuzzSession:
    """The hooks of a session.

    workers: the reports of xdist's workers at their end. kept: the store's findings, which are
    judged first. unused: why others are not. against: the run to compare with. trouble: why the
    report or a record could not be written. verbose: whether the summary has all its tables.
    """

    run: Run
    jobs: list[AnyJob]
    options: Options
    in_worker: bool
    kept: list[Kept] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    against: tuple[Store, str] | None = None
    workers: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    reports: tuple[Path, ...] = ()
    seen: Report | None = None
    trouble: list[str] = field(default_factory=list)
    verbose: bool = False
    began: float = field(default_factory=time.time)

    def pytest_report_header(self) -> list[str]:
        run, settings = self.run, self.run.settings
        names = [f"{b.name} ({b.detail})" for b in run.record.backends]
        words = [f"seed {settings.seed}", f"profile {settings.profile}"]
        words += [f"{settings.cases:,} cases a backend", *limits(settings)]
        words += [f"store {self.options.store}"]
        about = [f"amp-fuzz: {', '.join(words)}", f"amp-fuzz: {', '.join(names)}"]
        if self.kept:
            count = f"{len(self.kept)} finding{'s' * (len(self.kept) != 1)}"
            about.append(f"amp-fuzz: judged first: {count} of the store")
        about += [f"amp-fuzz: not judged again: {text}" for text in self.unused]
        return about + self._isolation_lines()

    def _isolation_lines(self) -> list[str]:
        if not self.run.settings.isolate:
            return ["amp-fuzz: cases run in this process, which a crash ends"]
        why = unshared(self.run.settings)
        if not why:
            return []
        plugins = f"put them into a module and name it with {_PREFIX}plugins"
        return [f"amp-fuzz: {_UNREACHED}: {why}; {plugins}"]

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Add our root to the collected nodes, beside the project's files."""
        report = yield
        if isinstance(collector, pytest.Session) and report.passed and self.jobs:
            about = {"name": ROOT, "nodeid": ROOT, "run": self.run, "jobs": self.jobs}
            report.result.append(Root.from_parent(collector, **about))
        return report

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell an xdist worker which run it belongs to."""
        node.workerinput[_KEY] = json.dumps(
            {
                "run": self.run.record.id,
                "seed": self.run.settings.seed,
                "started": self.run.record.started,
                "store": str(self.run.store.root.absolute()),
                "findings": [kept.name for kept in self.kept],
                "worker": node.workerinput["workerid"],
            }
        )

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object | None) -> None:
        """Take the report of an xdist worker."""
        output = getattr(node, "workeroutput", {}).get(_KEY)
        if output is not None:
            self.workers[node.gateway.id] = json.loads(output)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send this worker's report to the controller, or write the run's report there."""
        self.run.close()
        if self.in_worker:
            did, found = self.run, [record.id for record in self.run.findings]
            output = {"cases": did.cases, "planned": did.planned, "cut": did.cut, "findings": found}
            output |= {"apart": did.apart}
            session.config.workeroutput[_KEY] = json.dumps(output)  # type: ignore[attr-defined]
            return
        if self._ran():
            with self._kept_going():
                run, known = self.run.record.id, self.run.settings.known
                self._end(session)
                self.seen = read(self.run.store, run, known=known)
                if self.seen.view.verdict.kind == "new" and not session.exitstatus:
                    session.exitstatus = pytest.ExitCode.TESTS_FAILED
                self.reports = self.seen.write(self.options.report)

    def _end(self, session: pytest.Session) -> None:
        """Record that the run ended, and how."""
        workers = self.workers.values()
        reason: Literal["done", "stopped", "interrupted"] = "done"
        if session.exitstatus == pytest.ExitCode.INTERRUPTED:
            reason = "interrupted"
        elif (
            self.run.cut
            or any(said["cut"] for said in workers)
            or session.shouldstop
            or session.shouldfail
        ):
            reason = "stopped"
        cases = self.run.cases + sum(said["cases"] for said in workers)
        planned = self.run.planned + sum(said["planned"] for said in workers)
        took = round(time.time() - self.began, 3)
        with closing(self.run.store.writer(self.run.record.id, "run")) as writer:
            writer.write(EndRecord("", "", cases, took, reason, planned))

    @contextmanager
    def _kept_going(self) -> Iterator[None]:
        """Catch errors of a summary or report, so pytest's own summary still appears.

        The records are in the store by then. A full disk or an internal error must not hide them.
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
        self.verbose = terminalreporter.config.get_verbosity() > 0
        for line in self.summary():
            terminalreporter.write_line(line)

    def summary(self) -> list[str]:
        """Return the lines of the summary."""
        lines: list[str] = []
        if self._ran():
            with self._kept_going():
                run, known = self.run.record.id, self.run.settings.known
                seen = self.seen or read(self.run.store, run, known=known)
                lines += seen.terminal(verbose=self.verbose).splitlines()
                lines += [f"fixed: {text}" for text in fixed_lines(self.run.store, run, self.kept)]
                if self.against is not None:
                    before = read(*self.against)
                    lines += ["", *render(compare(before, seen), before, seen), ""]
        else:
            lines.append("amp-fuzz: no case ran")
        apart = {self.run.apart, *(said["apart"] for said in self.workers.values())} - {""}
        lines += [f"amp-fuzz: {_UNREACHED}: {why}" for why in sorted(apart)]
        return [*lines, *self._worker_lines(), *self._last_lines()]

    def _worker_lines(self) -> list[str]:
        """Yield a line for each worker, and say so if its records are not in this store."""
        if not self.workers:
            return []
        parts = [f"{name} {said['cases']} cases" for name, said in sorted(self.workers.items())]
        lines = [f"workers: {', '.join(parts)}"]
        for name, said in sorted(self.workers.items()):
            lock = self.run.store.run_path(self.run.record.id) / f"running-{name}.lock"
            if said["cases"] and not lock.exists():
                found = ", ".join(said["findings"]) or "none"
                lines.append(f"the records of {name} are in another store (findings: {found})")
        return lines

    def _last_lines(self) -> list[str]:
        lines = [written(self.reports)] if self.reports else []
        lines += [f"amp-fuzz: {trouble}" for trouble in self.trouble]
        return [*lines, f"again: {self.run.record.command}"]
