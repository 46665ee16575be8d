"""What each imitation of torchax pays: how many cases of a hunt its entry, and its part, explain.

    python benchmarks/torchax_pays.py --records=DIR [--output=FILE]

DIR holds what `torchax_hunt.py` kept. Each case that was explained is explained again without one
part at a time: a function that is called in the place of an op, or a list of functions. A part pays
for a case that the same entries do not explain without it. DIR keeps a line for each case, so a run
that was cut short goes on where it stood. Writes torchax_pays.json beside it. That file is of the
version that imitated more: the parts with 0 went after it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_fuzz.backends import backends
from amp_fuzz.backends.harness import quiet
from amp_fuzz.cases.case import loads
from amp_fuzz.oracle.trial import Trial
from amp_fuzz.patching import patched
from amp_fuzz.upstream import shipped
from amp_fuzz.upstream.evidence import Imitated, Listed
from amp_fuzz.upstream.torchax import functions as torchax
from benchmarks.common import Row, arguments, show, versions


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--records", type=Path, default=Path(".amp-fuzz/torchax-hunt"))
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    cases: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    entries: Counter[str] = Counter()
    parts: Counter[str] = Counter()
    for path in sorted(given.records.glob("*.jsonl")):
        lines = [json.loads(text) for text in path.read_text().splitlines()]
        kept = path.with_suffix(".parts")
        done = dict(map(json.loads, kept.read_text().splitlines())) if kept.exists() else {}
        for line in lines:
            cases[line["backend"]] += 1
            outcomes[line["outcome"]] += 1
            if not line["known"]:
                continue
            entries.update(ids := line["known"].split("+"))
            if line["id"] not in done:
                done[line["id"]] = paying(line["backend"], line["case"], ids)
                with kept.open("a") as file:
                    print(json.dumps([line["id"], done[line["id"]]]), file=file)
            parts.update(done[line["id"]])
    named = [k for k in shipped() if any(b.startswith("torchax") for b in k.backends)]
    result: Row = {
        "cases": sum(cases.values()),
        "backends": dict(cases),
        "outcomes": dict(outcomes),
        "entries": {k.id: entries[k.id] for k in sorted(named, key=lambda k: -entries[k.id])},
        "others": {i: n for i, n in entries.most_common() if i not in {k.id for k in named}},
        "parts": {part: parts[part] for part in sorted(removals(), key=lambda p: (-parts[p], p))},
        "versions": versions("torch", "torchax", "jax"),
    }
    show(given.output, result)


def paying(name: str, case: Any, ids: list[str]) -> list[str]:
    """Return the parts without which these entries do not explain a case."""
    entries = [k for k in shipped() if k.id in ids]
    imitated = frozenset(k.quirk for k in entries if k.quirk)
    if not imitated & {part.partition(":")[0] for part in removals()}:
        return []
    listed = Listed(shipped())
    with quiet():
        trial = Trial.of(loads(json.dumps(case)), backends()[name])
        found = trial.compare()
        assert found is not None
        called = set[str]()

        def explained() -> bool:
            return Imitated(imitated, listed).left(trial, found).divergence is None

        plain = torchax.made

        def noting(op: str, names: frozenset[str]) -> Any:
            called.add(torchax._IN_PLACE.get(op, op))
            return plain(op, names)

        with patched(torchax, "made", noting):
            assert explained(), (name, trial.case.id, ids)
        needed = []
        for part, without in removals().items():
            quirk, _, op = part.partition(":")
            if quirk not in imitated or (quirk in torchax.QUIRKS and op not in called):
                continue
            trial._kept.shadows.clear()
            with without():
                if not explained():
                    needed.append(part)
        trial._kept.shadows.clear()
    return needed


def removals() -> Mapping[str, Callable[[], AbstractContextManager[None]]]:
    """Return the parts, ``entry:op``, each with a context in which it is missing."""
    found: dict[str, Callable[[], AbstractContextManager[None]]] = {}
    for quirk, table in torchax.QUIRKS.items():
        for op in table:
            found[f"{quirk}:{op}"] = _without(quirk, op)
    for op in torchax.OPAQUE:
        rest = tuple(name for name in torchax.OPAQUE if name != op)
        found[f"torchax-composites:{op}"] = _patched(torchax, "OPAQUE", rest)
    found["torchax-cut-graph:functions"] = _patched(torchax, "CUTS", ())
    found["torchax-cut-graph:overloads"] = _patched(torchax, "CUT_OVERLOADS", ())
    return found


def _patched(module: Any, name: str, value: Any) -> Callable[[], AbstractContextManager[None]]:
    def without() -> AbstractContextManager[None]:
        return _cleared(patched(module, name, value))

    return without


def _without(quirk: str, op: str) -> Callable[[], AbstractContextManager[None]]:
    rest = {name: f for name, f in torchax.QUIRKS[quirk].items() if name != op}
    return _patched(torchax, "QUIRKS", {**torchax.QUIRKS, quirk: rest})


@contextmanager
def _cleared(inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Forget what was made of the tables, before and after."""
    cached = torchax.names, torchax.made
    for function in cached:
        function.cache_clear()
    try:
        with inner:
            yield
    finally:
        for function in cached:
            function.cache_clear()


if __name__ == "__main__":
    main()
