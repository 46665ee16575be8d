"""Hold an issue's text against the rules of PyTorch's template for reports of fuzzers.

The form for bugs of `torch.compile` asks of fuzzers: default tolerances, the verdict of
``torch._dynamo.utils.same`` with an fp64 reference, no comparison of indices of max and min, equal
random state with ``fallback_random``, an ablation over backends, a trace for tlparse, the
environment, and the label "topic: fuzzer". PyTorch's policy on AI asks that generated text is
disclosed and comes with a person's own words.

Nothing here runs a case: an `Issue` has what the command saw.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

__all__ = ["LABEL", "OWN_WORDS", "RULES", "Issue", "Rule", "broken", "told"]

LABEL = "topic: fuzzer"
OWN_WORDS = "### In my own words"
DISCLOSURE = "This text was generated"
INDEXING = (
    *("aminmax", "argmax", "argmin", "argsort", "cummax", "cummin", "kthvalue", "max", "median"),
    *("min", "mode", "msort", "nanmedian", "sort", "topk"),
)
"""Ops with a result that counts where a value is: which of equal values is not promised."""


@dataclass(frozen=True, slots=True)
class Issue:
    """What a checker looks at.

    text: the issue's Markdown. script: the repro in it. compiled: `torch.compile` makes the
    program. values: the finding is a wrong value. op, dtype: the op that gives the wrong result,
    and what the result's dtype must be. draws: the program draws random numbers. inductor: Inductor
    compiles it. same: what ``same`` returned, None if it was not asked. rungs: the names of the
    backends on the ladder. traced: how many files the script's trace has, None if it was not
    traced. shown: whether the script showed the finding when it was run.
    """

    text: str
    script: str
    compiled: bool = False
    values: bool = False
    op: str = ""
    dtype: str = ""
    draws: bool = False
    inductor: bool = False
    same: bool | None = None
    rungs: tuple[str, ...] = ()
    traced: int | None = None
    shown: bool = True


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of the template. says: what it asks. fix: what to do where it does not hold."""

    name: str
    says: str
    fix: str
    holds: Callable[[Issue], bool]


def broken(issue: Issue) -> tuple[Rule, ...]:
    """Return the rules that an issue does not keep."""
    return tuple(rule for rule in RULES if not rule.holds(issue))


def told(rules: Iterable[Rule]) -> str:
    """Return a line for each rule that does not hold: its name, what it asks, and what to do."""
    return "".join(f"{rule.name}: {rule.says}; {rule.fix}\n" for rule in rules)


# -- what a rule looks at -------------------------------------------------------------------------


def _words(script: str) -> set[str]:
    """Return the keywords of all calls in a script."""
    calls = (node for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Call))
    return {word.arg for call in calls for word in call.keywords if word.arg}


def _section(text: str, heading: str) -> str:
    """Return the text under a heading, up to the next one."""
    match = re.search(rf"^{re.escape(heading)}\n(.*?)(?=^#+ |\Z)", text, re.DOTALL | re.MULTILINE)
    return match[1].strip() if match else ""


def _default_tolerances(issue: Issue) -> bool:
    return not _words(issue.script) & {"rtol", "atol", "tol"}


def _asked_torch(issue: Issue) -> bool:
    asked = "`torch._dynamo.utils.same(" in issue.text and "fp64_ref" in issue.text
    return asked if issue.compiled and issue.values else True


def _says_why(issue: Issue) -> bool:
    """Where torch's verdict is another than ours, the text gives the reason."""
    return issue.same is not True or "**Why it is wrong all the same.**" in issue.text


def _no_indices(issue: Issue) -> bool:
    integer = issue.dtype.startswith("int")
    return not (issue.values and integer and issue.op.rpartition(".")[2] in INDEXING)


def _random_state(issue: Issue) -> bool:
    if not issue.draws:
        return True
    seeded = "manual_seed(" in issue.script
    return seeded and ("fallback_random = True" in issue.script or not issue.inductor)


def _ablated(issue: Issue) -> bool:
    rows = re.findall(r"^\| `([^`]+)` \|", issue.text, re.MULTILINE)
    return set(issue.rungs) <= set(rows)


def _traced(issue: Issue) -> bool:
    if not issue.compiled:
        return True
    return "TORCH_TRACE=" in issue.text and "tlparse" in issue.text and issue.traced != 0


def _environment(issue: Issue) -> bool:
    found = _section(issue.text, "### Versions")
    return "PyTorch version: " in found and "CPU: " in found and "[pip3] torch==" in found


def _first_bad(issue: Issue) -> bool:
    match = re.search(r"First bad: ([\w.+]+)[^.]*?; last good: (.+)", issue.text)
    return match is not None and "not measured" not in match[2]


def _own_words(issue: Issue) -> bool:
    return "<!--" in _section(issue.text, OWN_WORDS) and DISCLOSURE in issue.text


def _labelled(issue: Issue) -> bool:
    return f'"{LABEL}"' in issue.text


def _stands_alone(issue: Issue) -> bool:
    tree = ast.walk(ast.parse(issue.script))
    modules = {n.module or "" for n in tree if isinstance(n, ast.ImportFrom)}
    return not any(module.partition(".")[0] == "amp_fuzz" for module in modules)


RULES: tuple[Rule, ...] = (
    Rule(
        "shown",
        "the script shows the finding",
        "do not report it before a script does",
        lambda issue: issue.shown,
    ),
    Rule(
        "tolerances",
        "a report of a fuzzer compares with default tolerances",
        "take rtol=, atol= and tol= out of the script",
        _default_tolerances,
    ),
    Rule(
        "same",
        "the verdict of torch._dynamo.utils.same with an fp64_ref stands beside ours",
        "write the issue again where the backend's values can be compared with eager's",
        _asked_torch,
    ),
    Rule(
        "disagreement",
        "where torch's same accepts the result, the text says why it is wrong",
        "do not report it, unless you can say what promise it breaks",
        _says_why,
    ),
    Rule(
        "indices",
        "which index of equal maxima or minima is given is not compared",
        "do not report it",
        _no_indices,
    ),
    Rule(
        "random",
        "both sides draw from one random state, with fallback_random",
        "seed torch, and set torch._inductor.config.fallback_random = True",
        _random_state,
    ),
    Rule(
        "ablation",
        "the text says which backends of torch.compile show it and which do not",
        "write the issue again; a rung that cannot run is named too",
        _ablated,
    ),
    Rule(
        "trace",
        "the text says how to make a trace for tlparse, and the script makes one",
        "run the script with TORCH_TRACE=folder and look at what it writes",
        _traced,
    ),
    Rule(
        "environment",
        "the essentials of torch.utils.collect_env stand under Versions",
        "write the issue again on a machine where collect_env runs",
        _environment,
    ),
    Rule(
        "versions",
        "the text names the first bad and the last good version",
        "run amp-fuzz bisect, then give --last-good=VERSION, or none",
        _first_bad,
    ),
    Rule(
        "own words",
        "a block for a person's own words stands there, and the disclosure of generated text",
        "write the issue again",
        _own_words,
    ),
    Rule("label", f'the label "{LABEL}" is asked for', "write the issue again", _labelled),
    Rule(
        "alone",
        "the script needs no amp-fuzz",
        "write a script for the maintainers of that library by hand",
        _stands_alone,
    ),
)
