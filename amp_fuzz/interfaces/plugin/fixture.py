"""The fixture `amp_check`: `amp_fuzz.check` with the project's defaults."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from amp_fuzz.backends.devices import with_device
from amp_fuzz.config import ConfigError, resolve
from amp_fuzz.interfaces.check import CheckResult, check
from amp_fuzz.interfaces.plugin.session import given_options, start_folder
from amp_fuzz.plugins import load_plugins

__all__ = ["AmpCheck", "amp_check"]

_PREFIX = "--amp-fuzz-"
_KEYWORDS = tuple(
    name
    for name, parameter in inspect.signature(check).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name != "kwargs"
)


class AmpCheck:
    """Calls `amp_fuzz.check`, and fails the test unless the result is ok.

    defaults: keyword arguments of `check`; a call overrides them.
    """

    def __init__(self, defaults: dict[str, Any]) -> None:
        self.defaults = defaults

    def __call__(self, function: Any, /, *inputs: Any, **options: Any) -> CheckResult:
        """Check a callable and return the result. Raises `CheckFailed` with the whole text."""
        __tracebackhide__ = True
        result = check(function, *inputs, **{**self.defaults, **options})
        result.raise_if_failed()
        return result


def amp_check(request: pytest.FixtureRequest) -> AmpCheck:
    """Return the fixture of a test: defaults from its marker, then from options.

    Raises `pytest.UsageError` for an invalid marker or option.
    """
    config = request.config
    try:
        folder = start_folder(config)
        resolved = resolve(given_options(config), start=folder, prefix=_PREFIX)
        options = resolved.options
        load_plugins(options.plugins, resolved.sources["plugins"], folder)
        options = with_device(resolved, folder)
    except ConfigError as error:
        raise pytest.UsageError(f"amp-fuzz: {error}") from error
    defaults: dict[str, Any] = {"store": config.invocation_params.dir / options.store}
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
    return AmpCheck(defaults | _marked(request))


def _marked(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the keyword arguments of a test's markers; the nearest marker wins."""
    found: dict[str, Any] = {}
    for marker in request.node.iter_markers("amp_fuzz"):
        unknown = [name for name in marker.kwargs if name not in _KEYWORDS]
        if marker.args or unknown:
            wrong = ", ".join([*map(repr, marker.args), *unknown])
            raise pytest.UsageError(
                f"amp-fuzz: {request.node.nodeid}: pytest.mark.amp_fuzz takes "
                f"{', '.join(_KEYWORDS)}, by name, not {wrong}"
            )
        found = {**marker.kwargs, **found}
    return found
