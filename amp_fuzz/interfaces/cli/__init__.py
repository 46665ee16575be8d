"""The command line: ``amp-fuzz run``, ``audit``, ``replay``, ``minimize``, ``repro``, and more.

Starting it imports neither torch nor pandas nor rich; each command imports what it needs.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from amp_fuzz.config import did_you_mean
from amp_fuzz.interfaces.cli.audit import audit
from amp_fuzz.interfaces.cli.baseline import baseline
from amp_fuzz.interfaces.cli.bisect import bisect
from amp_fuzz.interfaces.cli.common import Exit, Internal, Stopped, version
from amp_fuzz.interfaces.cli.compare import compare
from amp_fuzz.interfaces.cli.doctor import doctor
from amp_fuzz.interfaces.cli.explain import explain
from amp_fuzz.interfaces.cli.known import known
from amp_fuzz.interfaces.cli.listing import listing, report
from amp_fuzz.interfaces.cli.minimize import minimize
from amp_fuzz.interfaces.cli.policies import policies
from amp_fuzz.interfaces.cli.precision import precision
from amp_fuzz.interfaces.cli.replay import replay
from amp_fuzz.interfaces.cli.repro import repro
from amp_fuzz.interfaces.cli.run import run
from amp_fuzz.interfaces.cli.store import store
from amp_fuzz.interfaces.cli.sweep import sweep
from amp_fuzz.interfaces.signals import ending_imports
from amp_fuzz.reports.printable import clean_lines

__all__ = ["main"]

# Since click 8.2; earlier ones print the help themselves.
_HELP_ERROR: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())
_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class _Group(click.Group):
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None:
            names = self.list_commands(ctx)
            hint = did_you_mean(args[0], names) or f": use {', '.join(names)}"
            ctx.fail(f"unknown command {args[0]!r}{hint}")
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Group,
    context_settings=_HELP,
    invoke_without_command=True,
    epilog="Exit codes: 0 nothing new, 1 a new divergence, 2 usage or configuration, 3 internal "
    "error, 4 a required backend is missing, 5 nothing ran, 6 a run did not end (report, sweep) or "
    "has records that cannot be read (report), 130 interrupted.",
)
@click.version_option(version(), message="amp-fuzz %(version)s")
@click.pass_context
def _commands(ctx: click.Context) -> int:
    """Test whether autocast does what its documentation says.

    amp-fuzz runs random programs under an independent reference implementation of autocast and
    under the real one. It shrinks the differences and reports them.

    Start with: amp-fuzz run
    """
    if ctx.invoked_subcommand is None:
        _say(ctx.get_help())
        return Exit.USAGE
    return Exit.OK


for _command in (
    *(run, sweep, audit, replay, explain, minimize, repro, bisect),
    *(precision, baseline, known, policies, report, compare, listing, store, doctor),
):
    _commands.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; ``arguments`` in place of ``sys.argv``."""
    try:
        with ending_imports():
            ended = _commands.main(arguments, prog_name="amp-fuzz", standalone_mode=False)
        sys.stdout.flush()
        code = int(ended or 0)
        if code > 128:
            # A second Ctrl-C would kill the process while Python shuts down, and the code that says
            # why it ended would be lost. Only SIG_IGN outlives Python's own handlers.
            signal.signal(code - 128, signal.SIG_IGN)
        return code
    except _HELP_ERROR as error:  # a group without its command
        _say(error.message)
        return Exit.USAGE
    except click.ClickException as error:
        _say(_usage(error))
        return Exit.USAGE
    except (click.Abort, KeyboardInterrupt):
        _say("amp-fuzz: interrupted")
        return 130
    except Stopped as error:
        _say(f"amp-fuzz: {error.message}")
        return error.code
    except BrokenPipeError:
        # The reader of our output went away (`amp-fuzz list | head`), which is its right. Python
        # would complain at exit when it flushes what is left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.OK
    except Exception as error:
        known = _code_of(error)
        if known is not None:
            _say(f"amp-fuzz: {error}")
            return known
        _say(str(error) if isinstance(error, Internal) else traceback.format_exc())
        _say(
            f"amp-fuzz {version()}: internal error: please report it, with the lines above and the "
            "output of: amp-fuzz doctor"
        )
        return Exit.INTERNAL


def _say(text: str) -> None:
    click.echo(clean_lines(text.rstrip()), err=True)


def _usage(error: click.ClickException) -> str:
    """Return click's error as one line that names the command and the option."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "amp-fuzz"
    message = " ".join(error.format_message().split()).rstrip(".")
    if isinstance(error, click.NoSuchOption):
        names = [name for p in context.command.params for name in p.opts] if context else []
        message = f"unknown option {error.option_name!r}{did_you_mean(error.option_name, names)}"
    elif isinstance(error, click.MissingParameter) and isinstance(error.param, click.Argument):
        message = f"missing argument {error.param.metavar}"
    elif isinstance(error, click.BadParameter) and error.param is not None and error.param.opts:
        message = f"{error.param.opts[0]}: {error.message}"
    return f"{command}: {message} (see {command} --help)"


def _code_of(error: Exception) -> Exit | None:
    """Return the exit code of an error that says what the user can do about it, or None."""
    from amp_fuzz.cases.case import CaseError
    from amp_fuzz.cases.program import ProgramError
    from amp_fuzz.config import ConfigError
    from amp_fuzz.records.baseline import BaselineError
    from amp_fuzz.records.store import StoreError
    from amp_fuzz.upstream.known import KnownError

    kinds: tuple[type[Exception], ...]
    kinds = (BaselineError, CaseError, ConfigError, KnownError, ProgramError, StoreError)
    if "amp_fuzz.backends.base" in sys.modules:  # it imports torch: not only to ask this
        from amp_fuzz.backends.accelerator import DeviceFailure
        from amp_fuzz.backends.base import BackendError
        from amp_fuzz.backends.registry import MissingBackend

        kinds = (*kinds, BackendError, DeviceFailure)
        if isinstance(error, MissingBackend):
            return Exit.MISSING
    return Exit.USAGE if isinstance(error, kinds) else None
