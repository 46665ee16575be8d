"""The pytest plugin: ``pytest --amp-fuzz`` fuzzes autocast beside a project's own tests.

Every pytest run in every project that has amp_fuzz installed loads this module, so it imports
only pytest and the standard library. The fuzzing is in `amp_fuzz.interfaces.plugin.session` and
`amp_fuzz.interfaces.plugin.items`, which are imported if ``--amp-fuzz`` is given.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from amp_fuzz.interfaces.plugin.options import OPTIONS, dest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare ``--amp-fuzz`` and its options.

    Every option requires a value: an optional value would swallow a path that follows.
    """
    group = parser.getgroup("amp-fuzz", "fuzzing of PyTorch's autocast (amp-fuzz)")
    group.addoption(
        "--amp-fuzz",
        action="store_true",
        dest="amp_fuzz",
        help="Fuzz autocast in addition to the tests: one item for each backend and family of ops.",
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
    group.addoption(
        "--amp-fuzz-compare",
        dest=dest("compare"),
        metavar="RUN",
        help="Show what changed since this run: an id, latest (the last one before this), "
        "latest:main (of a branch), or the path of a run or of a store.",
    )
    parser.addini(
        "amp_fuzz_corpus",
        "Folders of case files that --amp-fuzz judges first, in addition to [tool.amp-fuzz]'s.",
        type="paths",
        default=[],
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker; prepare to fuzz if ``--amp-fuzz`` was given."""
    config.addinivalue_line(
        "markers",
        "amp_fuzz(**defaults): a test of autocast. Marks the items of --amp-fuzz, and sets "
        "defaults of the fixtures amp_check, amp_check_op and amp_precision in your own tests: "
        "@pytest.mark.amp_fuzz(backends=['compile[inductor]'])",
    )
    config.option.amp_fuzz = config.option.amp_fuzz or bool(config.option.amp_fuzz_replay)
    if config.option.amp_fuzz and not (config.option.help or config.option.version):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's warnings on import are not the project's
            from amp_fuzz.interfaces.plugin.session import activate

            activate(config)


@pytest.fixture
def amp_check(request: pytest.FixtureRequest) -> Any:
    """Compare a callable under autocast on real backends with the reference.

    ``amp_check(model, inputs)`` fails the test unless they agree. It takes the arguments of
    `amp_fuzz.check`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warnings on import are not the project's
        from amp_fuzz.interfaces.plugin import fixture

    return fixture.amp_check(request)


@pytest.fixture
def amp_check_op(request: pytest.FixtureRequest) -> Any:
    """Check the contracts of a custom op under autocast.

    ``amp_check_op(op, *inputs)`` fails the test unless it keeps them. It takes the arguments of
    `amp_fuzz.check_op`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warnings on import are not the project's
        from amp_fuzz.interfaces.plugin import fixture

    return fixture.amp_check_op(request)


@pytest.fixture
def amp_precision(request: pytest.FixtureRequest) -> Any:
    """Measure what autocast, as documented, does to a callable.

    ``amp_precision(model, inputs, digits=2)`` fails the test unless autocast is harmless. It takes
    the arguments of `amp_fuzz.precision`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warnings on import are not the project's
        from amp_fuzz.interfaces.plugin import fixture

    return fixture.amp_precision(request)


# The options that the fixture uses, with or without --amp-fuzz.
_OF_THE_FIXTURE = ("backends", "known", "plugins", "seed", "store")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Return a header line if options of amp-fuzz have no effect."""
    names = (*OPTIONS, "compare")
    given = [name for name in names if getattr(config.option, dest(name)) is not None]
    if config.option.amp_fuzz or not given:
        return None
    given.sort(key=lambda name: name in _OF_THE_FIXTURE)
    if given[0] in _OF_THE_FIXTURE:
        return (
            f"amp-fuzz: off, --amp-fuzz-{given[0]} affects only the fixture amp_check: add "
            "--amp-fuzz to fuzz"
        )
    return f"amp-fuzz: off, --amp-fuzz-{given[0]} has no effect: add --amp-fuzz"
