"""The pytest plugin: ``pytest --amp-fuzz`` fuzzes autocast beside a project's own tests.

Every pytest run in every project that has amp_fuzz installed loads this module, so it imports
nothing but pytest and the standard library. What it takes to fuzz stands in
`amp_fuzz.interfaces.plugin.session` and `amp_fuzz.interfaces.plugin.items`, imported once
``--amp-fuzz`` is given.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest

__all__ = ["OPTIONS"]

# name -> metavar, help. The options of `amp_fuzz.config` that mean something under pytest, written
# out, because importing that module would cost every pytest run 10 ms; tests/plugin/test_options.py
# holds the two together. Left out: `workers` is xdist's -n, and `fail-fast` is -x.
OPTIONS = {
    "backends": ("NAME,...", "Backends to test; * and all stand for those that are ready here."),
    "ops": ("PATTERN,...", "Ops to draw from: names, families, globs over names."),
    "cases": ("N", "Cases to draw for each backend, at most, aimed ones included."),
    "aimed": (
        "PERCENT",
        "Share of the cases to aim, at most, at autocast kernels not yet reached; 0: none.",
    ),
    "seed": ("N", "What the cases depend on; drawn, and printed, unless given."),
    "profile": (
        "NAME",
        "A set of options: dev, ci, nightly, or one of the configuration file.",
    ),
    "seconds": ("S", "Stop after S seconds of drawing, judging and minimising; 0: never."),
    "floor": ("N", "Cases of each backend and family to judge even when the time is up."),
    "relations": ("none|one|all", "Metamorphic relations that each case is put to."),
    "store": ("FOLDER", "Where records and findings are kept."),
    "report": ("FOLDER", "Where the report goes, over the last one."),
    "known": ("FILE", "A list of explained divergences, beside the one that comes along."),
    "plugins": ("MODULE,...", "Modules to import first: those that register ops of yours."),
    "device": (
        "NAME",
        "A device that you have installed, for the backends eager-NAME and eager-NAME[shadow].",
    ),
    "policies": (
        "TABLE",
        "What autocast promises on it: cuda, cpu, xpu, ..., or a TOML file; cuda unless given.",
    ),
    "baseline": ("FILE", "The findings that the project knows of; looked for upward unless given."),
    "corpus": ("FOLDER", "Case files that every run judges first: a regression suite."),
    "max-statements": ("N", "The most statements of a program."),
    "timeout": ("S", "CPU seconds that a case may take; by the clock it may take 5 times as long."),
    "memory": ("GIB", "Memory that the process of a case may hold, in GiB."),
    "isolate": (
        "auto|always|never",
        "Run cases in worker processes: always, never, or (auto) but under pytest's --pdb.",
    ),
    "minimize": (
        "S",
        "Seconds of work for making each new finding smaller; 0: keep it as it was drawn.",
    ),
    "notes": (
        "KIND,...",
        "Notes to look for, beside divergences: precision, autocast-raises, portability.",
    ),
    "fail-on": (
        "KIND,...",
        "What else fails a run: precision, autocast-raises, portability, incident.",
    ),
    "require": ("NAME,...", "Backends that must be ready, or exit with code 4."),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare ``--amp-fuzz`` and what goes with it.

    Each option takes a value, always: one that may stand without would swallow a path after it.
    """
    group = parser.getgroup("amp-fuzz", "fuzzing of PyTorch's autocast (amp-fuzz)")
    group.addoption(
        "--amp-fuzz",
        action="store_true",
        dest="amp_fuzz",
        help="Fuzz autocast, beside the tests: one item for each backend and family of ops.",
    )
    for name, (metavar, text) in OPTIONS.items():
        group.addoption(
            f"--amp-fuzz-{name}",
            action="append" if name in ("known", "corpus") else "store",
            dest=dest(name),
            metavar=metavar,
            help=text,
        )
    group.addoption(
        "--amp-fuzz-replay",
        action="append",
        default=[],
        dest="amp_fuzz_replay",
        metavar="ID|PATH",
        help="Judge this finding or case file again, and fuzz nothing; implies --amp-fuzz.",
    )
    parser.addini(
        "amp_fuzz_corpus",
        "Folders of case files that --amp-fuzz judges first, beside those of [tool.amp-fuzz].",
        type="paths",
        default=[],
    )


def dest(name: str) -> str:
    """Return the name under which pytest keeps an option."""
    return f"amp_fuzz_{name.replace('-', '_')}"


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker; get ready to fuzz if ``--amp-fuzz`` was given."""
    config.addinivalue_line(
        "markers",
        "amp_fuzz(**defaults): a test of autocast: the items that --amp-fuzz makes, and tests of "
        "yours that use the fixture amp_check, whose defaults the keywords are: "
        "@pytest.mark.amp_fuzz(backends=['compile[inductor]'])",
    )
    config.option.amp_fuzz = config.option.amp_fuzz or bool(config.option.amp_fuzz_replay)
    if config.option.amp_fuzz and not (config.option.help or config.option.version):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch warns of on import is not the project's
            from amp_fuzz.interfaces.plugin.session import activate

            activate(config)


@pytest.fixture
def amp_check(request: pytest.FixtureRequest) -> Any:
    """Compare what a callable does under autocast on real backends with the reference.

    ``amp_check(model, inputs)`` fails the test unless they agree; arguments as `amp_fuzz.check`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch warns of on import is not the project's
        from amp_fuzz.interfaces.plugin import fixture

    return fixture.amp_check(request)


# Those that mean something to the fixture, with or without --amp-fuzz.
_OF_THE_FIXTURE = ("backends", "known", "plugins", "seed", "store")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say so when options of amp-fuzz have no effect."""
    given = [name for name in OPTIONS if getattr(config.option, dest(name)) is not None]
    if config.option.amp_fuzz or not given:
        return None
    given.sort(key=lambda name: name in _OF_THE_FIXTURE)
    if given[0] in _OF_THE_FIXTURE:
        return (
            f"amp-fuzz: off, --amp-fuzz-{given[0]} is for the fixture amp_check alone: add "
            "--amp-fuzz to fuzz"
        )
    return f"amp-fuzz: off, --amp-fuzz-{given[0]} has no effect: add --amp-fuzz"
