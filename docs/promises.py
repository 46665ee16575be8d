"""Write docs/reference/promises.md: what torch's documents promise, and who follows it.

    python docs/promises.py [--check]

From ``amp_fuzz/reference/promises.toml``, from what rules, relations and contracts name, and from
``benchmarks/promises.json``, which a run wrote. --check writes nothing, and exits with 1 if the
page is not as it would be written.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from amp_fuzz.interfaces.check_op.contracts import RULES
from amp_fuzz.oracle.relations import RELATIONS, WITHIN
from amp_fuzz.records.facts import FACTS, within_reach
from amp_fuzz.records.promises import Promise, promises
from amp_fuzz.reference.semantics import PROMISED, Semantics
from amp_fuzz.reports.promised import ENOUGH

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "promises.md"
MEASURED = ROOT / "benchmarks" / "promises.json"

TEXT = """\
# Promises of torch's documents

<!-- Written by `make pages` from amp_fuzz/reference/promises.toml and benchmarks/promises.json. -->

The reference is written from torch's documents. Here is each sentence of them that promises
something about autocast, in our words, with the place where it stands: check the reference against
the documents from this page. A rule is a field of `Semantics` (`amp_fuzz/reference/semantics.py`),
a [relation](../internals/relations.md) is a check of torch against itself, and a contract is what
[`check_op`](../guide/your-op.md) asks of an op.

{numbers}

{documents}
## Who follows which promises

{followers}
## How a run counts

A case counts for a promise if it could have falsified it: if it has all facts that the promise
names, such as `cast`, a cast that mattered and whose result was compared, or `entry=decorator` of
its plan. `when` in `amp_fuzz/reference/promises.toml` names them; [below](#facts) is what they
mean. If both sides raised, only promises about errors count; if they diverged, only the op at which
they did. A [report](reports.md) shows the numbers of its run.

Do the counts hold? 1,000 drawn cases of `eager-cpu` count for 323 ops. If the op runs in the other
dtype, 316 of these cases notice it (98 %; torch 2.13, seed 9, `tests/oracle/test_promised.py`).

{measured}
{sections}
## Lists of ops

Each op of a list is one promise, with the id `DEVICE:OP`. In parentheses: how many cases of the
runs above could have falsified it.

{lists}
## Where lists and tables disagree

The policy tables in `amp_fuzz/policies/` have every op of the lists, with the policy that the lists
say. They also have these, of torch 2.13, though the page says that an op which is not listed is not
cast.

{differs}
## Facts

The words of plans and regions are those of [the store](store.md), such as `checkpoint=reentrant`.
`backend=`, `device=`, `policy=` and `fp8=` say where a case ran, how a call was cast, and by which
recipe.

{facts}"""


def main() -> None:
    """Write the page, or check it."""
    text = page()
    stale = not PAGE.exists() or PAGE.read_text() != text
    if stale:
        sys.stdout.write(f"{PAGE.relative_to(ROOT)}\n")
    if "--check" in sys.argv[1:]:
        sys.exit(stale)
    PAGE.write_text(text)


def page() -> str:
    """Return the page."""
    found: dict[str, Any] = json.loads(MEASURED.read_text())
    counts = {name: sum(cases.values()) for name, cases in found["promises"].items()}
    every = promises()
    prose = [p for p in every.by_id.values() if not p.op]
    never = sum(bool(p.never) for p in prose)
    listed = len(every.by_id) - len(prose)
    return TEXT.format(
        numbers=(
            f"There are {len(every.by_id)} promises: {len(prose)} of prose, of which no case of a "
            f"run can falsify {never}, and\n{listed} of lists, one for each op and device type."
        ),
        documents=table(("document", "read", "prose", "lists"), documents()),
        followers=table(("who", "promises"), ((who, coded(ids)) for who, ids in followers())),
        measured=measured(found, counts),
        sections="\n".join(section(name, counts) for name in every.documents),
        lists="\n".join(lists(counts)),
        differs=table(("device", "why", "ops"), differs()),
        facts=table(("fact", "meaning"), ((f"`{fact}`", what) for fact, what in FACTS.items())),
    )


def documents() -> Iterator[tuple[str, ...]]:
    """Yield a row for each document."""
    for name, document in promises().documents.items():
        own = [p for p in promises().by_id.values() if p.document == name]
        prose = sum(not p.op for p in own)
        paths, read = document.path.split("; "), document.read.split("; ")
        where = ", ".join(file(path, at) for path, at in zip(paths, read, strict=True))
        yield f"[{document.title}](#{anchor(name)})", where, str(prose), str(len(own) - prose)


def file(path: str, read: str) -> str:
    """Return a file of a document as a link to the version that was read."""
    at = f"v{read}" if "." in read else read
    shown = f"`{path}` ({read[:10]})"
    if not path.startswith(("torch/", "aten/", "docs/")):
        return shown
    return f"[{shown}](https://github.com/pytorch/pytorch/blob/{at}/{path})"


def anchor(document: str) -> str:
    """Return the anchor of a document's section."""
    return f"promises-{document}"


def followers() -> Iterator[tuple[str, Sequence[str]]]:
    """Yield what follows promises, and which."""
    for field in fields(Semantics):
        yield f"rule `{field.name}`", PROMISED[field.name]
    for name, relation in RELATIONS.items():
        yield f"relation {name}", relation.promises
    for name, ids in WITHIN.items():
        yield f"relation {name}", ids
    for name, rule in RULES.items():
        yield f"contract `{name}`", rule.promises


def coded(names: Iterable[str]) -> str:
    """Return names as code."""
    return ", ".join(f"`{name}`" for name in names)


def plain(text: str) -> str:
    """Return text in which names such as ``__enter__`` are code, not bold."""
    return re.sub(r"(?<!\w)_\w+", r"`\g<0>`", text)


def measured(found: dict[str, Any], counts: dict[str, int]) -> str:
    """Return what runs measured: how many promises they tested, and the rest by name."""
    backends = found["backends"]
    places = [one["place"] for one in backends.values()]
    about = [p for p in promises().by_id.values() if within_reach(p, places)]
    enough = [p for p in about if counts.get(p.id, 0) >= ENOUGH]
    rest = [p for p in about if 0 < counts.get(p.id, 0) < ENOUGH]
    none = [p for p in about if p.id not in counts]
    nightly = {p.id: expected(found, p) for p in about}
    rare = [p for p in about if nightly[p.id] < ENOUGH]
    ran = ", ".join(f"{one['cases']:,} cases of `{name}`" for name, one in backends.items())
    elsewhere = [p for p in promises().by_id.values() if p not in about and not p.never]
    seeds = ", ".join(map(str, found["seeds"]))
    short = (
        f"Runs of torch {found['torch']} ({ran}; seeds {seeds}; `benchmarks/promises.py` wrote "
        f"[promises.json](../../benchmarks/promises.json)) could test {len(about)} promises. "
        f"{ENOUGH} cases or more could have falsified {len(enough)} of them "
        f"({share(enough, about)}), fewer {len(rest)}, none {len(none)}. The other "
        f"{len(elsewhere)} that a case can falsify are about other backends and device types."
    )
    often = [p for p in about if p not in rare]
    long = (
        f"A nightly run has {NIGHTLY:,} cases a backend. At the same rates it has {ENOUGH} or more "
        f"for {len(often)} ({share(often, about)}). The others:"
    )
    rows = ((f"`{p.id}`", f"{nightly[p.id]:.0f}", promises().rare.get(p.id, _OP)) for p in rare)
    filled = "\n\n".join(textwrap.fill(text, 100, **_WHOLE) for text in (short, long))
    return f"{filled}\n\n{table(('promise', 'cases', 'why'), rows)}"


_OP = "one of some 580 ops: few calls of it have inputs that are cast"
_WHOLE: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
NIGHTLY = 20_000


def expected(found: dict[str, Any], promise: Promise) -> float:
    """Return how many cases of a nightly run could falsify a promise, at the measured rates."""
    counts = found["promises"].get(promise.id, {})
    return sum(NIGHTLY * n / found["backends"][name]["cases"] for name, n in counts.items())


def share(part: Sequence[Promise], whole: Sequence[Promise]) -> str:
    """Return a share in per cent."""
    return f"{100 * len(part) / len(whole):.0f} %"


def section(name: str, counts: dict[str, int]) -> str:
    """Return the prose of a document as a table."""
    who = dict[str, list[str]]()
    for follower, ids in followers():
        for one in ids:
            who.setdefault(one, []).append(follower)
    own = [p for p in promises().by_id.values() if p.document == name and not p.op]
    rows = (
        (
            f"`{p.id}`",
            plain(p.at),
            plain(p.says) + (f" Since {p.since}." if p.since else ""),
            ", ".join(p.devices) or "all",
            ", ".join(who.get(p.id, ())),
            p.never or f"{counts.get(p.id, 0):,}",
        )
        for p in own
    )
    header = ("id", "where", "promise", "devices", "followed by", "cases, or why none")
    title = promises().documents[name].title
    return f'<a id="{anchor(name)}"></a>\n\n## {title}\n\n{table(header, rows)}'


def lists(counts: dict[str, int]) -> Iterator[str]:
    """Yield each list of ops with the numbers of cases."""
    for one in promises().lists:
        ops = ", ".join(f"`{op}` ({counts.get(f'{one.device}:{op}', 0):,})" for op in one.ops)
        yield f"- **{one.at}**, {len(one.ops)}: {ops}"


def differs() -> Iterator[tuple[str, ...]]:
    """Yield a row for each reason."""
    for one in promises().differs:
        yield one.device, one.why, coded(one.ops) if one.ops != ("*",) else "all"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in r)} |\n" for r in lines
    )


if __name__ == "__main__":
    main()
