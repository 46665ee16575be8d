"""The fixtures: `check`, `check_op` and `precision` with the project's defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import pytest

from amp_fuzz.backends.devices import with_device
from amp_fuzz.config import ConfigError, folder_of, resolve
from amp_fuzz.interfaces.check import CheckResult, check
from amp_fuzz.interfaces.check_op import OpResult, check_op
from amp_fuzz.interfaces.plugin.session import given_options, start_folder
from amp_fuzz.interfaces.precision import PrecisionResult, precision
from amp_fuzz.plugins import load_plugins

__all__ = ["AmpCheck", "amp_check", "amp_check_op", "amp_precision"]

_PREFIX = "--amp-fuzz-"

Result = TypeVar("Result", bound=CheckResult | OpResult | PrecisionResult)


def _keywords(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the options of a function that a marker may give."""
    parameters = inspect.signature(function).parameters.items()
    return tuple(n for n, p in parameters if p.kind is p.KEYWORD_ONLY and n not in _OF_CALL)


_OF_CALL = ("kwargs", "progress")


class AmpCheck(Generic[Result]):
    """Calls `amp_fuzz.check` or a like function, and fails the test unless the result is ok.

    defaults: keyword arguments of the function; a call overrides them.
    """

    def __init__(self, function: Callable[..., Result], defaults: dict[str, Any]) -> None:
        self.function, self.defaults = function, defaults

    def __call__(self, function: Any, /, *inputs: Any, **options: Any) -> Result:
        """Check a callable and return the result.

        Raises `CheckFailed`, or `PrecisionLost`, with the whole text.
        """
        __tracebackhide__ = True
        result = self.function(function, *inputs, **{**self.defaults, **options})
        result.raise_if_failed()
        return result


def amp_check(request: pytest.FixtureRequest) -> AmpCheck[CheckResult]:
    """Return the fixture of a test: defaults from its marker, then from options.

    Raises `pytest.UsageError` for an invalid marker or option.
    """
    return AmpCheck(check, _defaults(request, check))


def amp_check_op(request: pytest.FixtureRequest) -> AmpCheck[OpResult]:
    """Return the fixture for ops, as `amp_check`."""
    return AmpCheck(check_op, _defaults(request, check_op))


def amp_precision(request: pytest.FixtureRequest) -> AmpCheck[PrecisionResult]:
    """Return the fixture that measures: of the options only the seed is one of its own."""
    keywords = _keywords(precision)
    defaults = _defaults(request, precision)
    return AmpCheck(precision, {n: v for n, v in defaults.items() if n in keywords})


def _defaults(request: pytest.FixtureRequest, function: Callable[..., Any]) -> dict[str, Any]:
    config = request.config
    try:
        folder = start_folder(config)
        resolved = resolve(given_options(config), start=folder, prefix=_PREFIX)
        options = resolved.options
        load_plugins(options.plugins, resolved.sources["plugins"], folder)
        options = with_device(resolved, folder)
        store = config.invocation_params.dir / folder_of(options.store, "amp_check")
    except ConfigError as error:
        raise pytest.UsageError(f"amp-fuzz: {error}") from error
    defaults: dict[str, Any] = {"store": store}
    if options.device or resolved.sources["backends"] != "default":
        defaults["backends"] = options.backends
    if resolved.sources["known"] != "default":
        defaults["known"] = options.known
    if options.seed is not None:
        defaults["seed"] = options.seed
    if options.isolate != "auto":
        defaults["isolate"] = options.isolate == "always"
    elif config.option.usepdb:
        defaults["isolate"] = False
    return defaults | _marked(request, _keywords(function))


def _marked(request: pytest.FixtureRequest, keywords: tuple[str, ...]) -> dict[str, Any]:
    """Return the keyword arguments of a test's markers; the nearest marker wins."""
    found: dict[str, Any] = {}
    for marker in request.node.iter_markers("amp_fuzz"):
        unknown = [name for name in marker.kwargs if name not in keywords]
        if marker.args or unknown:
            wrong = ", ".join([*map(repr, marker.args), *unknown])
            raise pytest.UsageError(
                f"amp-fuzz: {request.node.nodeid}: pytest.mark.amp_fuzz takes "
                f"{', '.join(keywords)}, by name, not {wrong}"
            )
        found = {**marker.kwargs, **found}
    return found
