"""Write the pages of known bugs, docs/findings/*/*.md, and the parts of its README, from records.

    python docs/findings.py [--check]

Also write docs/evidence/known-by-version.md, from benchmarks/known/*.json: what
`amp-fuzz known check` saw.

The page of a file of `amp_fuzz.upstream` is its docstring, with a table of facts and the smallest
case below the section of each bug. In a docstring ``[some-bug]`` is a link to that bug. A bug that
is a backend's own is written by hand, on the page that its record in `amp_fuzz/upstream/own` names.
If that is the page of a file, what is written by hand follows the line `HAND`.
--check writes nothing, names what is not as it would be written, and exits with 1.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from packaging.version import Version

from amp_fuzz.upstream.bug import Bug, Example
from amp_fuzz.upstream.harm import gravest
from amp_fuzz.upstream.registry import BUGS, FILES

FOLDER = Path(__file__).parent / "findings"
NOTE = "<!-- Written by `make pages` from {source}. Edit that. -->"
MEASURED = FOLDER.parents[1] / "benchmarks" / "known"
TESTS = FOLDER.parents[1] / "benchmarks" / "unit_tests.json"
VERSIONS = FOLDER.parent / "evidence" / "known-by-version.md"
HAND = "<!-- Written by hand from here on: what the backend does without autocast too. -->"
START, END = "<!-- {}: written by `make pages` -->", "<!-- end of the {} -->"


def main() -> None:
    """Write the pages, or check them."""
    check = "--check" in sys.argv[1:]
    wanted = {path_of(file): page(file) for file in FILES}
    readme = FOLDER / "README.md"
    wanted[readme] = index(readme.read_text())
    wanted[VERSIONS] = by_version(measured())
    stale = [p for p, text in wanted.items() if not p.exists() or p.read_text() != text]
    kept = {FOLDER / bug.page for bug in BUGS.values() if bug.own}
    left = [p for p in FOLDER.glob("*/*.md") if p not in wanted and p not in kept]
    for path in [*stale, *left]:
        sys.stdout.write(f"{path.relative_to(FOLDER.parents[1])}\n")
        if check:
            continue
        if path in left:
            path.unlink()
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted[path])
    sys.exit(1 if check and (stale or left) else 0)


def path_of(file: ModuleType) -> Path:
    """Return where the page of a file stands."""
    *_, family, name = file.__name__.split(".")
    return FOLDER / family / f"{name}.md"


def page(file: ModuleType) -> str:
    """Return the page of a file: its docstring, and what its records say."""
    head, *sections = re.split(r"(?m)^(?=## )", (file.__doc__ or "").strip("\n"))
    title, _, intro = head.strip().partition("\n")
    parts = [f"# {title.replace('``', '`').removesuffix('.')}"]
    parts.append(NOTE.format(source=file.__name__.replace(".", "/") + ".py"))
    if intro.strip():
        parts.append(linked(intro.strip(), file))
    for section in sections:
        heading, _, text = section.partition("\n")
        bugs = [BUGS[name] for name in ids(heading)]
        anchors = "".join(f'<a id="{bug.id}"></a>' for bug in bugs)
        parts += [*([anchors] if anchors else []), heading, linked(text.strip(), file)]
        parts += [part for bug in bugs for part in facts(bug)]
    return "\n\n".join(parts) + "\n" + by_hand(path_of(file))


def by_hand(path: Path) -> str:
    """Return what is written by hand at the end of a page."""
    _, found, text = path.read_text().partition(f"\n{HAND}") if path.exists() else ("", "", "")
    return found + text


def ids(heading: str) -> list[str]:
    """Return the ids of the bugs that a section is about: ``## one, another: a title``."""
    names = [name.strip() for name in heading.removeprefix("## ").partition(": ")[0].split(",")]
    return names if all(name in BUGS for name in names) else []


def linked(text: str, file: ModuleType) -> str:
    """Return a text whose ``[some-bug]`` are links."""

    def link(match: re.Match[str]) -> str:
        name = match[1]
        return f"[{name}]({target(name, path_of(file))})" if name in BUGS else match[0]

    return re.sub(r"\[([a-z0-9-]+)\](?!\()", link, text)


def target(name: str, page: Path) -> str:
    """Return the link from a page to a bug."""
    home = home_of(BUGS[name])
    where = "" if home == page else f"{home.relative_to(FOLDER)}"
    up = "" if home == page or page.parent == FOLDER else "../"
    return f"{up}{where}#{name}"


def home_of(bug: Bug) -> Path:
    """Return the page of a bug."""
    if bug.own:
        return FOLDER / bug.page
    (home,) = (path_of(file) for file in FILES if bug in file.BUGS)
    return home


def facts(bug: Bug) -> Iterator[str]:
    """Yield what the record of a bug says of it."""
    versions = "any" if bug.torch == ">=2.7" else bug.torch
    rows = {
        "what": bug.what,
        "why": bug.why,
        "torch": f"{versions}, last seen on {bug.seen}",
        "backends": ", ".join(f"`{name}`" for name in bug.backends),
        "told by": told(bug),
        "upstream": f"<{bug.link}>" if bug.link else "not reported that we know of",
    }
    yield "\n".join(
        [f"| bug | {bug.id} |", "|---|---|", *(f"| {k} | {cell(v)} |" for k, v in rows.items())]
    )
    for example in bug.examples[:1]:
        yield shown(example)


def cell(text: str) -> str:
    """Return a text as a cell of a table."""
    return text.replace("|", "\\|")


def told(bug: Bug) -> str:
    """Return how a divergence is known to be this bug."""
    if bug.imitation is not None:
        return "the reference that imitates it agrees on the whole case"
    kinds = ", ".join(bug.kinds)
    if bug.without:
        return f"{kinds}: gone without {bug.without}"
    texts = [
        f"`{text}`" for text in (bug.where, bug.expected, bug.observed) if text not in ("", "*")
    ]
    says = f" that says {' and '.join(texts)}" if texts else ""
    return f"{kinds}{says}"


def shown(example: Example) -> str:
    """Return the smallest case as the tool prints it."""
    return f"Smallest case, on `{example.backend}`:\n\n```\n{example.case}\n```"


def index(text: str) -> str:
    """Return the README with the gravest bugs and the table of all."""
    for name, part in (("gravest", "\n\n".join(worst())), ("table", table())):
        start, end = START.format(name), END.format(name)
        before, _, rest = text.partition(start)
        text = f"{before}{start}\n{part}\n{end}{rest.partition(end)[2]}"
    return text


def worst() -> Iterator[str]:
    """Yield the ten gravest bugs of the last torch that was measured, each with its program."""
    last, found = list(measured().items())[-1]
    rows = found["bugs"]
    there = (bug for bug in every() if rows.get(bug.id, NOT_MEASURED)["state"] == "there")
    yield (
        f"These were seen on torch {last}. `amp-fuzz known check --top` runs the ten gravest of "
        "your torch, in a minute."
    )
    for place, bug in enumerate(gravest(there)[:10], 1):
        at = target(bug.id, FOLDER / "README.md")
        yield f"{place}. **{bug.harm}**, [{bug.id}]({at}): {bug.what}."
        yield indented(program(bug) or shown(bug.examples[0]))


def program(bug: Bug) -> str:
    """Return the program of a person in the section of a bug, or ""."""
    files = {path_of(file): file for file in FILES}
    home = home_of(bug)
    text = home.read_text() if bug.own else page(files[home])
    text = text.partition(f'<a id="{bug.id}"></a>')[2]
    section = re.split(r"(?m)^## ", text)[1]
    found = re.search(r"(?ms)^```python\n.*?^```$", section)
    return found[0] if found else ""


def indented(text: str) -> str:
    """Return a text as part of an item of a list."""
    return "\n".join(f"   {line}".rstrip() for line in text.splitlines())


def table() -> str:
    """Return the table of all bugs."""
    rows = ["| bug | what | torch | upstream |", "|---|---|---|---|"]
    for bug in every():
        link = f"[{number(bug.link)}]({bug.link})" if bug.link else ""
        at = target(bug.id, FOLDER / "README.md")
        rows.append(f"| [{bug.id}]({at}) | {cell(bug.what)} | {bug.torch} | {link} |")
    return "\n".join(rows)


def every() -> Iterator[Bug]:
    """Yield every bug: those of autocast first, by file."""
    yield from (bug for file in FILES for bug in file.BUGS)
    yield from (bug for bug in BUGS.values() if bug.own)


FAMILIES = {
    "torch": "Autocast, autograd and eager kernels",
    "compile": "torch.compile",
    "export": "torch.export",
    "torchscript": "TorchScript",
    "xla": "XLA",
    "torchax": "torchax",
}

BY_VERSION = """\
# Known bugs by version of torch

<!-- Written by `make pages` from benchmarks/known/*.json. -->

This page shows which torch, from {first} to {last}, has which bugs of autocast and of the
compilers that run programs under it. On each, `amp-fuzz known check` ran the smallest cases of each
bug. To ask your own torch:

```
amp-fuzz known check                          # every known bug
amp-fuzz known check 'compile-*' cache-ignores-dtype
```

- **there**: the case diverges, and the bug's record explains it.
- **gone**: both sides agree on all cases, again and again, and the reference that imitates the
  bug disagrees. A plain script of each was also run by hand, here and on a torch with the bug.
- **?**: it cannot be told. The [last section](#not-told) says why.

The builds were {builds}, on a CPU. torchax and JAX were measured with {last_jax} only.

{counts}"""


def measured() -> dict[str, dict[str, Any]]:
    """Return what `amp-fuzz known check` wrote, by version, the oldest first."""
    found = {path.stem: json.loads(path.read_text()) for path in MEASURED.glob("*.json")}
    return dict(sorted(found.items(), key=lambda item: Version(item[0])))


def by_version(found: Mapping[str, dict[str, Any]]) -> str:
    """Return the page of what each version has."""
    rows: list[tuple[str, ...]] = []
    for state in ("there", "gone", "cannot tell"):
        counts = [Counter(row["state"] for row in one["bugs"].values()) for one in found.values()]
        rows.append((SHOWN[state], *(str(count[state]) for count in counts)))
    jax = [v for v, one in found.items() if told_on(one, "torchax") + told_on(one, "xla")]
    parts = [
        BY_VERSION.format(
            first=min(found, key=Version),
            last=max(found, key=Version),
            builds=", ".join(one["torch"] for one in found.values()),
            last_jax=" and ".join(jax),
            counts=grid(("bugs", *found), rows),
        )
    ]
    for family, title in FAMILIES.items():
        rows = []
        for bug in (bug for bug in every() if home_of(bug).parent.name == family):
            at = f"../findings/{target(bug.id, FOLDER / 'README.md')}"
            link = f"[{number(bug.link)}]({bug.link})" if bug.link else ""
            rows_of = (one["bugs"].get(bug.id, NOT_MEASURED) for one in found.values())
            states = (SHOWN[row["state"]] for row in rows_of)
            rows.append((f"[{bug.id}]({at})", cell(bug.what), *states, link))
        parts.append(f"## {title}\n\n" + grid(("bug", "what", *found, "upstream"), rows))
    parts.append(as_tests(json.loads(TESTS.read_text())))
    parts.append("## Not told\n\n" + grid(("bug", "torch", "why"), sorted(untold(found))))
    return "\n".join(parts)


AS_TESTS = """\
## As PyTorch's unit tests

[tests_for_pytorch](../../tests_for_pytorch/README.md), which needs torch alone, told on each torch:

{counts}
Bugs that the tests call gone and `known check` does not, or the other way round:

{other}"""


def as_tests(told: Mapping[str, dict[str, Any]]) -> str:
    """Return how the tests for PyTorch ended on each torch."""
    versions = sorted(told, key=Version)
    names = {
        "there": "fail as expected",
        "gone": "succeed",
        "cannot tell": "skipped",
    }
    rows = [(text, *(str(told[v][state]) for v in versions)) for state, text in names.items()]
    other = [
        (name, v, one["tests"], one["known check"])
        for v in versions
        for name, one in sorted(told[v]["otherwise"].items())
        if one["tests"] == "gone" or set(one.values()) == {"there", "gone"}
    ]
    columns = ("bug", "torch", "tests", "known check")
    return AS_TESTS.format(counts=grid(("tests", *versions), rows), other=grid(columns, other))


SHOWN = {"there": "there", "gone": "**gone**", "cannot tell": "?", "": ""}
NOT_MEASURED = {"state": ""}  # a new record


def told_on(one: Mapping[str, Any], family: str) -> int:
    """Return how many bugs of a family a torch told of."""
    ids = [bug.id for bug in every() if home_of(bug).parent.name == family]
    states = (one["bugs"].get(name, NOT_MEASURED)["state"] for name in ids)
    return sum(state in ("there", "gone") for state in states)


def untold(found: Mapping[str, dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Yield each bug, the versions that cannot tell for one reason, and the reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for version, one in found.items():
        for name, row in one["bugs"].items():
            if row["state"] == "cannot tell":
                reasons.setdefault((name, row["detail"]), []).append(version)
    for (name, detail), versions in reasons.items():
        yield name, ", ".join(versions), cell(clean(detail))


def clean(detail: str) -> str:
    """Return a reason in one line of Markdown, without what changes from run to run."""
    text = re.sub(r"0x[0-9a-f]+", "0x...", " ".join(detail.split()))
    return text.replace("<", "\\<").replace("*", "\\*")


def grid(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [columns, ("---",) * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def number(link: str) -> str:
    """Return the short name of an upstream link: ``#123``."""
    found = re.search(r"/(?:issues|pull)/(\d+)", link)
    return f"#{found[1]}" if found else "documented"


if __name__ == "__main__":
    main()
