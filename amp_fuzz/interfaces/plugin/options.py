"""The options of ``pytest --amp-fuzz``.

They are the options of `amp_fuzz.config` that mean something under pytest, written out: importing
that module would cost every pytest run 10 ms. tests/plugin/test_options.py holds the two together.
Two are missing: xdist's -n stands for `workers`, and -x for `fail-fast`.
"""

from __future__ import annotations

__all__ = ["OPTIONS", "dest"]

# name -> metavar, help
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


def dest(name: str) -> str:
    """Return the name under which pytest keeps an option."""
    return f"amp_fuzz_{name.replace('-', '_')}"
