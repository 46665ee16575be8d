"""Torch's promises are data: well formed, complete, and in agreement with our policy tables."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from importlib import resources
from typing import Any, get_args

import pytest
import torch
from packaging.version import Version

from amp_fuzz.backends import backends
from amp_fuzz.backends.base import facts_of
from amp_fuzz.backends.harness import Observation
from amp_fuzz.cases.case import Case, Plan
from amp_fuzz.cases.program import FP8Recipe, Program
from amp_fuzz.interfaces.check_op.contracts import RULES
from amp_fuzz.oracle.relations import RELATIONS, WITHIN, _repeated
from amp_fuzz.policies.tables import DEVICES, Policy, load_table
from amp_fuzz.records.facts import FACTS
from amp_fuzz.records.fingerprint import plan_words
from amp_fuzz.records.promises import Kernels, OpList, Promise, parsed, promises
from amp_fuzz.reference.semantics import PROMISED, Semantics

TORCH = "2.13.0"  # whose documents were read
POLICIES = {
    "lower": {"lower_precision_fp"},
    "float32": {"fp32", "fp32_set_opt_dtype", "fp32_append_dtype"},
    "widest": {"promote"},
}
TEXT = resources.files("amp_fuzz").joinpath("reference/promises.toml").read_text("utf-8")
ALL = tuple(promises().by_id.values())


def vocabulary() -> set[str]:
    """Return every fact that a case may have."""
    return {
        *FACTS,
        *plan_words(),
        "entry=context",
        *promises().by_id,
        *(fact for backend in backends().values() for fact in facts_of(backend).implements),
        *(f"device={device}" for device in DEVICES),
        *(f"policy={policy}" for policy in Policy),
        *(f"fp8={recipe}" for recipe in get_args(FP8Recipe)),
    }


def unknown(every: tuple[Promise, ...]) -> list[str]:
    known = vocabulary()
    return [f"{p.id}: {fact}" for p in every for w in p.when for fact in w if fact not in known]


def test_there_are_enough_promises_of_each_kind() -> None:
    listed = [p for p in ALL if p.op]
    assert len(ALL) >= 150
    assert len(ALL) - len(listed) >= 150  # the prose alone
    assert {p.document for p in ALL} == {*promises().documents}


def test_a_promise_says_which_cases_falsify_it_or_why_none_does() -> None:
    assert [p.id for p in ALL if bool(p.when) == bool(p.never)] == []
    assert [p.id for p in ALL if not (p.at and p.says.endswith("."))] == []
    assert [p.id for p in ALL if not {*p.devices} <= {*DEVICES}] == []
    for promise in ALL:
        assert not promise.since or Version(promise.since)


def test_each_fact_that_a_promise_names_can_be_found() -> None:
    assert unknown(ALL) == []


def test_a_fact_that_no_case_can_have_is_noticed() -> None:
    """A seeded fault: a misspelt fact would make a promise unfalsifiable without a word."""
    wrong = Promise("x.y", "x", "at", "says.", when=(frozenset({"entry=decorater"}),))
    assert unknown((wrong,)) == ["x.y: entry=decorater"]


def test_each_fact_belongs_to_a_promise() -> None:
    named = {fact for p in ALL for words in p.when for fact in words}
    assert {*FACTS} - named <= {"cast=float32", "form=operator", "form=overload"}


def test_a_reason_for_few_cases_is_about_a_promise() -> None:
    rare = promises().rare
    assert {*rare} <= {*promises().by_id}
    assert [name for name in rare if promises().by_id[name].never] == []


def test_two_promises_cannot_share_an_id() -> None:
    twice = TEXT.replace('id = "decorator"', 'id = "context"')
    with pytest.raises(ValueError, match=r"id='autocast\.context' is given twice"):
        parsed(twice)


# -- the lists of ops -----------------------------------------------------------------------------


def kernels(op: str) -> Kernels:
    return promises().kernels.get(op, Kernels((op,)))


def disagreements(lists: tuple[OpList, ...], device: str) -> set[str]:
    """Return the names in lists that our table has not, or otherwise, and the overloads beside."""
    table = load_table(device, torch_version=TORCH).rules
    rules = {op: rule for op, rule in table.items() if "::" not in op}  # without ops of other tests
    found, covered = set(), set()
    for one in (one for one in lists if one.device == device):
        for op in one.ops:
            names = kernels(op).reaches
            hit = [o for o in rules if {o, o.partition(".")[0]} & {*names}]
            if not hit or any(rules[o].policy.value not in POLICIES[one.to] for o in hit):
                found.add(op)
            covered.update(hit if not kernels(op).by else ())
    return found | ({*rules} - covered)


LISTED = sorted({one.device for one in promises().lists})


@pytest.mark.parametrize("device", LISTED)
def test_the_lists_and_our_table_differ_where_the_data_says(device: str) -> None:
    named = {op for d in promises().differs if d.device == device for op in d.ops}
    assert disagreements(tuple(promises().lists), device) == named


def test_a_device_without_a_list_is_named() -> None:
    without = {d.device for d in promises().differs if d.ops == ("*",)}
    assert without == {*DEVICES} - {*LISTED}


def test_a_table_with_another_policy_is_noticed() -> None:
    """A seeded fault: the document would say that exp runs in the low dtype."""
    lists = tuple(
        OpList(one.document, one.at, one.device, "lower" if "exp" in one.ops else one.to, one.ops)
        for one in promises().lists
    )
    assert "exp" in disagreements(lists, "cuda")


def test_an_op_that_left_a_list_is_noticed() -> None:
    """A seeded fault: the document would not list mm."""
    lists = tuple(
        OpList(one.document, one.at, one.device, one.to, tuple(op for op in one.ops if op != "mm"))
        for one in promises().lists
    )
    assert "mm" in disagreements(lists, "cpu")


def test_every_name_in_the_lists_is_one_promise() -> None:
    count = sum(len(one.ops) for one in promises().lists)
    assert len([p for p in ALL if p.op]) == count == 22 + 51 + 10 + 20 + 29 + 6 + 20 + 89 + 3


def _leaves(raw: Any) -> Iterator[str]:
    if isinstance(raw, str):
        yield raw
    elif isinstance(raw, dict | list):
        for item in raw.values() if isinstance(raw, dict) else raw:
            yield from _leaves(item)


def test_no_sentence_of_torch_is_copied() -> None:
    """Eight words in a row that torch's docstring has, too, would be a copy."""
    docs = " ".join(
        (
            torch.autocast.__doc__ or "",
            torch.amp.custom_fwd.__doc__ or "",
            torch.amp.GradScaler.__doc__ or "",
            torch.library.register_autocast.__doc__ or "",
        )
    )
    theirs = " ".join(docs.replace("`", "").split())
    for leaf in _leaves(tomllib.loads(TEXT)["document"]):
        words = leaf.replace("`", "").split()
        runs = (" ".join(words[i : i + 8]) for i in range(len(words) - 7))
        assert not [run for run in runs if run in theirs], leaf


def test_each_file_that_was_read_has_its_version() -> None:
    for document in promises().documents.values():
        assert document.path.count("; ") == document.read.count("; "), document.title


# -- who follows them -----------------------------------------------------------------------------


def followers() -> dict[str, tuple[str, ...]]:
    """Return what names its promises: the rules, the relations and the contracts."""
    return {
        **{f"rule {field.name}": PROMISED[field.name] for field in fields(Semantics)},
        **{f"relation {name}": relation.promises for name, relation in RELATIONS.items()},
        **{f"relation {name}": named for name, named in WITHIN.items()},
        **{f"contract {name}": rule.promises for name, rule in RULES.items()},
    }


def strays(found: Mapping[str, tuple[str, ...]]) -> list[str]:
    known = promises().by_id
    return [f"{who}: {name}" for who, named in found.items() for name in named if name not in known]


def test_each_rule_relation_and_contract_names_promises_that_exist() -> None:
    found = followers()
    assert [who for who, named in found.items() if not named] == []
    assert strays(found) == []
    assert {*PROMISED} == {field.name for field in fields(Semantics)}


def test_a_promise_that_nobody_gives_is_noticed() -> None:
    """A seeded fault: a rule follows a sentence that no document has."""
    assert strays({"rule serves": ("autocast.cash",)}) == ["rule serves: autocast.cash"]


def test_the_relations_inside_one_observation_are_those_that_are_checked() -> None:
    case = Case(Program((), (), ()), Plan(calls=2, second="retain"))
    labels = ("call0.v0", "call1.v0", "w0.grad", "again.w0.grad")
    seen = Observation(values=dict.fromkeys(labels, torch.zeros(1)))
    assert {name for name, *_ in _repeated(case, seen)} == {*WITHIN}
