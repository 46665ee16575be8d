"""``amp-fuzz precision``: what autocast, as documented, does to a model in a file."""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from amp_fuzz.interfaces.cli.common import Exit, Stopped, command_line, say
from amp_fuzz.records.outputs import write_whole

__all__ = ["made_by", "precision", "progress_bar", "target_of"]


@click.command(short_help="Say what autocast costs a model, and the least to exempt.")
@click.argument("target", metavar="FILE.py:NAME")
@click.option(
    "--autocast",
    type=click.Choice(["bfloat16", "float16", "none"]),
    default="bfloat16",
    show_default=True,
    help="The dtype of autocast around the call; none: the callable opens its own.",
)
@click.option(
    "--device",
    metavar="TYPE",
    help="Cast what autocast casts on this device type; by default that of the tensors.",
)
@click.option(
    "--digits",
    type=click.FloatRange(0, 8, min_open=True, max_open=True),
    metavar="N",
    help="Decimal digits that every value has to keep; by default half of those of the dtype.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0),
    metavar="S",
    default=60.0,
    show_default=True,
    help="How long to look for a remedy.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    metavar="N",
    default=0,
    show_default=True,
    help="Of the random generators, set before NAME is called and before each run.",
)
@click.option("--no-backward", is_flag=True, help="Run no backward pass.")
@click.option("--json", "data", metavar="FILE", help="Write the result as JSON.")
@click.option("--html", metavar="FILE", help="Write the report as a page in HTML.")
def precision(
    target: str,
    autocast: str,
    device: str | None,
    digits: float | None,
    seconds: float,
    seed: int,
    no_backward: bool,
    data: str | None,
    html: str | None,
) -> int:
    """Say how many digits each output and gradient of a model keeps under autocast.

    NAME is a function without arguments, which returns the callable and its inputs as a tuple:
    ``return model, x, mask``. Keyword arguments go into a functools.partial. Where digits are lost,
    the report says at which line and why, and which lines or submodules have to run in float32,
    with the code to paste.

    Exit codes: 0 autocast is harmless; 1 it is not, or it casts nothing; 2 the file or the model
    cannot be used.
    """
    path, name = target_of(target)
    import torch

    import amp_fuzz

    torch.manual_seed(seed)
    function, *inputs = made_by(path, name)
    with progress_bar() as progress:
        try:
            result = amp_fuzz.precision(
                function,
                *inputs,
                autocast=None if autocast == "none" else getattr(torch, autocast),
                device=device,
                backward=not no_backward,
                digits=digits,
                seconds=seconds,
                seed=seed,
                progress=progress,
            )
        except amp_fuzz.CheckError as error:
            cause = error.__cause__
            place = _place(cause, path) if cause else ""
            raise Stopped(f"{target}: {_first(str(error))}{place}") from error
    say(str(result))
    if data is not None:
        write_whole(Path(data), f"{json.dumps(result.as_dict(), indent=1)}\n".encode())
        say(f"\nwrote {data}")
    if html is not None:
        result.write_html(html)
        say(f"\nwrote {html}")
    return Exit.OK if result.ok else Exit.DIVERGED


def target_of(target: str) -> tuple[Path, str]:
    """Return the file and the name of the function in it."""
    file, _, name = target.rpartition(":")
    path = Path(file)
    if path.suffix != ".py" or not name.isidentifier():
        example = command_line("precision", "model.py:make")
        raise Stopped(f"{target}: give a Python file and the name of a function: {example}")
    if not path.is_file():
        raise Stopped(f"{path}: no such file")
    return path, name


def made_by(path: Path, name: str) -> tuple[Any, ...]:
    """Return what the user's function returns: a callable and its inputs."""
    module = _called(path, lambda: _imported(path), "cannot be imported")
    make = getattr(module, name, None)
    if not callable(make):
        has = "is no function" if hasattr(module, name) else "is not there"
        names = [n for n, v in vars(module).items() if callable(v) and n[0] != "_"]
        own = [n for n in names if getattr(vars(module)[n], "__module__", "") == module.__name__]
        raise Stopped(f"{path}: {name} {has}{': it has ' + ', '.join(own[:8]) if own else ''}")
    found = _called(path, make, f"{name}() raises")
    if not (isinstance(found, tuple) and found and callable(found[0])):
        first = f" of {type(found[0]).__name__}" if isinstance(found, tuple) and found else ""
        raise Stopped(
            f"{path}: {name}() returns {type(found).__name__}{first}: return a tuple of a callable "
            "and its inputs"
        )
    return found


def _imported(path: Path) -> Any:
    # As `python FILE` does: modules beside it can be imported, and linecache finds its lines.
    sys.path.insert(0, str(path.absolute().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path.absolute())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _called(path: Path, call: Callable[[], Any], what: str) -> Any:
    try:
        return call()
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        text = f"{type(error).__name__}: {_first(message)}".removesuffix(": ")
        raise Stopped(f"{path}: {what}: {text}{_place(error, path)}") from error


def _place(error: BaseException, path: Path) -> str:
    """Return the line of the user's file that an error comes from, in brackets."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if Path(f.filename).absolute() == path.absolute()]
    return f" ({path}:{lines[-1]})" if lines else ""


def _first(text: str) -> str:
    return text.strip().partition("\n")[0]


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """Show in a terminal what is being done, with a bar of the time for the search."""
    if not sys.stderr.isatty():
        yield lambda text, share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda text, share: bar.update(task, description=text, completed=share)
