"""The options of ``pytest --amp-fuzz``.

These are the options of `amp_fuzz.config` that apply under pytest, written out because importing
that module would cost every pytest run 10 ms. tests/plugin/test_options.py compares the two. Two
are missing: xdist's -n replaces `workers`, and -x replaces `fail-fast`.
"""

from __future__ import annotations

__all__ = ["OPTIONS", "dest"]

# name -> metavar, help
OPTIONS = {
    "backends": ("NAME,...", "Backends to test; * and all mean every backend that is ready here."),
    "ops": ("PATTERN,...", "Ops to draw from: names, families, globs over names."),
    "cases": ("N", "Draw at most N cases for each backend, including aimed ones."),
    "aimed": (
        "PERCENT",
        "Aim at most this share of the cases at autocast kernels not yet reached; 0: none.",
    ),
    "seed": ("N", "Seed of the cases; by default random, and printed."),
    "profile": (
        "NAME",
        "A set of options: dev, ci, nightly, or one from the configuration file.",
    ),
    "seconds": (
        "S",
        "End all cases and all minimising after S seconds, then report; 0 means never.",
    ),
    "relations": ("none|one|all", "Metamorphic relations to check on each case."),
    "store": ("FOLDER", "Where records and findings are kept."),
    "report": ("FOLDER", "Where the report goes; it replaces the last one."),
    "known": ("FILE", "A list of explained divergences, in addition to the one in the package."),
    "plugins": ("MODULE,...", "Modules to import first, such as those that register your own ops."),
    "device": (
        "NAME",
        "An installed device, for the backends eager-NAME and eager-NAME[shadow].",
    ),
    "policies": (
        "TABLE",
        "The device's policy table: cuda (the default), cpu, xpu, ..., or a TOML file.",
    ),
    "baseline": (
        "FILE",
        "The findings that the project accepts; by default found here or in a parent folder.",
    ),
    "corpus": ("FOLDER", "Case files that every run judges first: a regression suite."),
    "max-statements": ("N", "Draw programs of at most N statements."),
    "timeout": ("S", "CPU seconds that a case may take; the wall-clock limit is 5 times that."),
    "memory": ("GIB", "Memory limit for the process of a case, in GiB."),
    "isolate": (
        "auto|always|never",
        "Run cases in worker processes: always, never, or auto (not under pytest's --pdb).",
    ),
    "minimize": (
        "S",
        "Seconds of work to shrink each new finding; 0 keeps it as drawn.",
    ),
    "notes": (
        "KIND,...",
        "Kinds of notes to look for: precision, autocast-raises, portability, context.",
    ),
    "fail-on": (
        "KIND,...",
        (
            "What else fails a run: precision, autocast-raises, portability, context, incident, "
            "backend."
        ),
    ),
    "require": ("NAME,...", "Backends that must be ready; otherwise exit with code 4."),
    "require-coverage": (
        "PERCENT",
        "Fail if a backend reached less of its device's autocast kernels; 0: never.",
    ),
}


def dest(name: str) -> str:
    """Return the name under which pytest stores an option."""
    return f"amp_fuzz_{name.replace('-', '_')}"
