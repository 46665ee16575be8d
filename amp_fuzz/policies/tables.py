"""Policy tables: what autocast does with each op, one table a device type, read from TOML.

The tables of the stock devices stand beside this module, one file each; a vendor's own is read with
`load_table_file`. A table is data: this module imports neither torch nor Hypothesis, and reads
nothing from torch's own registrations (a test compares the two).
"""

from __future__ import annotations

import difflib
import importlib.metadata
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from amp_fuzz.cases.program import FLOAT_DTYPES

__all__ = [
    "DEVICES",
    "FRAMEWORKS",
    "ContextRule",
    "Does",
    "Policy",
    "PolicyTable",
    "PolicyTableError",
    "Rule",
    "adopt",
    "all_overloads",
    "load_table",
    "load_table_file",
    "since",
    "tabled_devices",
]

_POLICIES = resources.files("amp_fuzz.policies")

FRAMEWORKS = ("torchax",)
"""What has a table and an autocast of its own, and is no device type of torch."""

DEVICES = tuple(
    sorted(
        {
            entry.name.removesuffix(".toml")
            for entry in _POLICIES.iterdir()
            if entry.name.endswith(".toml")
        }.difference(FRAMEWORKS)
    )
)
"""The device types that have a table: the files beside this module. A new one is one file."""

# A schema name with its overload, in a namespace other than aten if it says so: a vendor's table
# may hold "torchvision::roi_align".
_OVERLOAD = re.compile(r"(?:[A-Za-z_]\w*::)?[A-Za-z_]\w*(?:\.\w+)?", re.ASCII)

_ANY = "*"

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class Policy(StrEnum):
    """What autocast does with an op's inputs, named as in aten/src/ATen/autocast_mode.h.

    An argument is *eligible* if it is a floating-point tensor of the table's device type and not
    float64. All else (integers, complex, float64, other devices' tensors) passes unchanged.
    """

    LOWER_PRECISION_FP = "lower_precision_fp"
    """Cast every eligible argument to the autocast dtype."""
    FP32 = "fp32"
    """Cast every eligible argument to float32."""
    FP32_SET_OPT_DTYPE = "fp32_set_opt_dtype"
    """Cast nothing; if the first argument is eligible and ``dtype`` is None, pass float32."""
    FP32_APPEND_DTYPE = "fp32_append_dtype"
    """Cast nothing; call another overload, with float32 (or an ineligible argument's own dtype)."""
    PROMOTE = "promote"
    """Cast every eligible argument to float32 if one is float32, to the autocast dtype if none is.

    Upstream, only ``Tensor`` and ``Tensor[]`` arguments are asked; a ``Tensor?`` is cast to what
    the others decide. A dtype that is neither (float16 under a bfloat16 context) raises, unless an
    argument before it is float32.
    """
    BANNED = "banned"
    """Raise RuntimeError, which names a safe op to use instead."""
    CAST_INPUTS = "cast_inputs"
    """Cast every eligible argument to one dtype whatever the autocast dtype is, and never cache.

    `torch.library.register_autocast` does this to a custom op.
    """


class Does(StrEnum):
    """What ``torch.autocast(device, dtype=...)`` does with a dtype, if it is enabled."""

    ON = "on"
    """Take it: autocast is on."""
    OFF = "off"
    """Warn, and leave autocast off in the block."""
    RAISES = "raises"
    """Raise RuntimeError."""


class PolicyTableError(ValueError):
    """A policy table that cannot be had. The message names the file, the place and the way out."""

    def __init__(self, file: str, place: str, problem: str) -> None:
        super().__init__(": ".join(filter(None, (file, place, problem))))
        self.file = file
        self.place = place
        self.problem = problem

    def __reduce__(self) -> tuple[type[PolicyTableError], tuple[str, str, str]]:
        """Pickle by the parts: `Exception` would call the class with the finished message."""
        return type(self), (self.file, self.place, self.problem)


@dataclass(frozen=True, slots=True)
class Rule:
    """The policy of one op.

    overload: the schema name without ``aten::``, and without ``.default`` (``sum``,
        ``sum.dim_IntList``).
    versions: the torch versions for which the rule holds, a PEP 440 range.
    source: the upstream file, documentation section or pull request that says so.
    redispatch: the overload that is called instead, with a dtype appended; None unless the
        policy is `Policy.FP32_APPEND_DTYPE`.
    cast_inputs: the dtype of `Policy.CAST_INPUTS`.
    """

    overload: str
    policy: Policy
    versions: str
    source: str
    redispatch: str | None = None
    cast_inputs: str | None = None


@dataclass(frozen=True, slots=True)
class ContextRule:
    """What a context does with some dtypes.

    dtypes: their names; ``*`` is every dtype that no other rule names.
    does: what the context does with them.
    versions: the torch versions for which the rule holds, a PEP 440 range.
    source: the upstream file and function that says so.
    lacking: what the context does instead if the device or its system lacks the dtype, or None.
    """

    dtypes: tuple[str, ...]
    does: Does
    versions: str
    source: str
    lacking: Does | None = None


@dataclass(frozen=True, slots=True)
class PolicyTable:
    """The rules of one device type for one torch version.

    default_dtype: what ``torch.get_autocast_dtype(device)`` answers in a fresh process.
    contexts: what ``torch.autocast(device, dtype=...)`` does with each dtype.
    rules: overload -> rule; an op that has none passes through autocast untouched.
    """

    device: str
    dispatch_key: str
    default_dtype: str
    source: str
    torch_version: str
    contexts: tuple[ContextRule, ...]
    rules: Mapping[str, Rule] = field(hash=False)

    def context(self, dtype: str) -> ContextRule:
        """Return the rule of a context of a dtype, any of torch's."""
        named = (rule for rule in self.contexts if dtype in rule.dtypes)
        return next(named, None) or next(rule for rule in self.contexts if _ANY in rule.dtypes)

    @property
    def supported_dtypes(self) -> tuple[str, ...]:
        """The floating dtypes that a context takes, where the device has them."""
        return tuple(dtype for dtype in FLOAT_DTYPES if self.context(dtype).does is Does.ON)


def load_table(device: str, *, torch_version: str | None = None) -> PolicyTable:
    """Read the table of one of `DEVICES` or `FRAMEWORKS`.

    ``torch_version`` chooses the rules that hold; None means the installed torch, whose version is
    read from its metadata. Local and pre-release parts do not count: ``2.14.0.dev20260501+cpu``
    is 2.14.0, since nightlies carry what that release will have.

    Raises `PolicyTableError` if there is no such table, if it is not well formed, or if none of its
    rules holds for that version.
    """
    if device in _adopted:
        return _adopted[device]
    if device not in (*DEVICES, *FRAMEWORKS):
        way_out = _did_you_mean(device, DEVICES) or f"known: {', '.join(DEVICES)}"
        raise PolicyTableError(
            "", f"device={device!r}", f"no policy table; {way_out}; load_table_file() reads others"
        )
    table = _stock(device, torch_version)
    declared = _declared.get(device)
    if declared is None:
        return table
    return replace(table, rules=MappingProxyType({**table.rules, **declared}))


@cache  # a search for a cause asks hundreds of times
def _stock(device: str, torch_version: str | None) -> PolicyTable:
    name = f"{device}.toml"
    text = _POLICIES.joinpath(name).read_text(encoding="utf-8")
    return _read(text, f"policies/{name}", torch_version)


# Tables of devices of the user's, by name.
_adopted: dict[str, PolicyTable] = {}


def adopt(table: PolicyTable) -> None:
    """Make `load_table` return a table of the user's for its device, from now on."""
    _adopted[table.device] = table


# device -> overload -> the rule of an op that is the user's own.
_declared: dict[str, dict[str, Rule]] = {}


def declare(device: str, rule: Rule) -> None:
    """Add the rule of an op of the user's to the tables that `load_table` returns from now on."""
    _declared.setdefault(device, {})[rule.overload] = rule


def declared(device: str, overload: str) -> Rule | None:
    """Return the rule of an op of the user's, or None."""
    return _declared.get(device, {}).get(overload)


def declared_overloads() -> frozenset[str]:
    """Return the ops of the user's that have a rule on some device."""
    return frozenset(name for rules in _declared.values() for name in rules)


def load_table_file(path: str | Path, *, torch_version: str | None = None) -> PolicyTable:
    """Read a table from a TOML file of the user's, in the format of ``policies/*.toml``.

    Otherwise as `load_table`; a file that cannot be read or decoded is a `PolicyTableError` too.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PolicyTableError(str(path), "", f"cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise PolicyTableError(str(path), "", f"is not UTF-8 text: {error}") from error
    return _read(text, str(path), torch_version)


def all_overloads(*, torch_version: str | None = None) -> frozenset[str]:
    """Every overload that has a rule on some device, for one torch version, as in `load_table`."""
    held = _held(torch_version).values()
    return frozenset(rule.overload for rules in held for rule in rules)


def tabled_devices(*, torch_version: str | None = None) -> tuple[str, ...]:
    """Return the `DEVICES` that `load_table` has rules of, for one torch version.

    torch before 2.8 has no autocast for maia.
    """
    return tuple(device for device, rules in _held(torch_version).items() if rules)


def since(device: str) -> str:
    """Return the first torch whose rules the table of one of `DEVICES` has: ``2.8`` for maia."""
    name = f"{device}.toml"
    *_, groups = _parse(_POLICIES.joinpath(name).read_text(encoding="utf-8"), f"policies/{name}")
    bounds = (b for group in groups for b in group.versions if b.operator == ">=")
    return min((bound.version for bound in bounds), key=Version)


@cache
def _held(torch_version: str | None) -> Mapping[str, tuple[Rule, ...]]:
    version = _version(torch_version)
    held: dict[str, tuple[Rule, ...]] = {}
    for device in DEVICES:
        name = f"{device}.toml"
        text = _POLICIES.joinpath(name).read_text(encoding="utf-8")
        *_, groups = _parse(text, f"policies/{name}")
        held[device] = tuple(_holding(groups, version))
    return held


class _File(msgspec.Struct, frozen=True):
    device: str
    dispatch_key: str
    default_dtype: str
    source: str
    context: tuple[dict[str, Any], ...]
    group: tuple[dict[str, Any], ...]


class _Context(msgspec.Struct, frozen=True):
    dtypes: tuple[str, ...]
    does: str
    versions: str
    source: str
    lacking: str = ""


class _Group(msgspec.Struct, frozen=True):
    policy: str
    versions: str
    source: str
    ops: tuple[str, ...]
    redispatch: dict[str, str] = {}  # msgspec copies it for each struct


@dataclass(frozen=True, slots=True)
class _Rules:
    """A group that has passed its checks, with the place to name if it meets another's op."""

    place: str
    versions: SpecifierSet
    rules: tuple[Rule, ...]


def _read(text: str, file: str, torch_version: str | None) -> PolicyTable:
    version = _version(torch_version)
    head, contexts, groups = _parse(text, file)
    rules: dict[str, Rule] = {}
    for group in groups:
        for rule in _holding((group,), version):
            if other := rules.get(rule.overload):
                raise PolicyTableError(
                    file,
                    group.place,
                    f"op {rule.overload!r} has a rule for torch {version} already, {other.policy} "
                    f"({other.versions}); delete one, or give them ranges that do not overlap",
                )
            rules[rule.overload] = rule
    if not rules:
        ranges = ", ".join(sorted({str(group.versions) for group in groups}))
        raise PolicyTableError(
            file, "", f"no rule holds for torch {version}; its ranges are {ranges}"
        )
    table = PolicyTable(
        device=head.device,
        dispatch_key=head.dispatch_key,
        default_dtype=head.default_dtype,
        source=head.source,
        torch_version=str(version),
        contexts=_holding_contexts(contexts, file, version),
        rules=MappingProxyType(rules),
    )
    if table.context(head.default_dtype).does is not Does.ON:
        problem = f"default_dtype {head.default_dtype!r} is not taken: its context is not 'on'"
        raise PolicyTableError(file, "top level", problem)
    return table


def _holding_contexts(
    contexts: Iterable[ContextRule], file: str, version: Version
) -> tuple[ContextRule, ...]:
    """Return the rules of contexts that hold for a version: one for each dtype."""
    held = tuple(rule for rule in contexts if version in SpecifierSet(rule.versions))
    named = [dtype for rule in held for dtype in rule.dtypes]
    for dtype in (_ANY, *named):
        if named.count(dtype) != 1:
            raise PolicyTableError(
                file,
                "context",
                f"dtype {dtype!r} has {named.count(dtype)} contexts for torch {version}; give each "
                f"dtype one, and all others one of {_ANY!r}",
            )
    return held


def _version(torch_version: str | None) -> Version:
    if torch_version is None:
        try:
            torch_version = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError as error:
            raise PolicyTableError(
                "", "torch_version=None", "torch is not installed; say which version you mean"
            ) from error
    try:
        return Version(Version(torch_version).base_version)
    except InvalidVersion as error:
        raise PolicyTableError(
            "", f"torch_version={torch_version!r}", "not a version; write it as '2.13.0'"
        ) from error


def _holding(groups: Iterable[_Rules], version: Version) -> Iterator[Rule]:
    for group in groups:
        if version in group.versions:
            yield from group.rules


def _parse(text: str, file: str) -> tuple[_File, tuple[ContextRule, ...], tuple[_Rules, ...]]:
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PolicyTableError(file, "", f"not TOML: {error}") from error
    head = _convert(raw, _File, file, "top level")
    _one_of(head.default_dtype, FLOAT_DTYPES, "dtype", file, "top level")
    contexts = tuple(
        _context_rule(_convert(context, _Context, file, place), file, place)
        for place, context in ((f"context {n}", raw) for n, raw in enumerate(head.context, 1))
    )
    return (
        head,
        contexts,
        tuple(
            _rules(_convert(group, _Group, file, place), file, place)
            for place, group in ((f"group {n}", group) for n, group in enumerate(head.group, 1))
        ),
    )


def _context_rule(context: _Context, file: str, place: str) -> ContextRule:
    for word in filter(None, (context.does, context.lacking)):
        _one_of(word, map(str, Does), "word", file, place)
    for dtype in context.dtypes:
        _one_of(dtype, (*FLOAT_DTYPES, _ANY), "dtype", file, place)
    _range(context.versions, file, place)
    return ContextRule(
        context.dtypes,
        Does(context.does),
        context.versions,
        context.source,
        Does(context.lacking) if context.lacking else None,
    )


def _range(versions: str, file: str, place: str) -> SpecifierSet:
    try:
        return SpecifierSet(versions)
    except InvalidSpecifier as error:
        raise PolicyTableError(
            file, place, f"versions {versions!r} is no PEP 440 range; write '>=2.7,<2.13'"
        ) from error


def _rules(group: _Group, file: str, place: str) -> _Rules:
    # The dtype of `Policy.CAST_INPUTS` is what a custom op is registered with: no table has it.
    policies = [str(policy) for policy in Policy if policy is not Policy.CAST_INPUTS]
    _one_of(group.policy, policies, "policy", file, place)
    policy = Policy(group.policy)
    place = f"{place} ({policy}, {group.versions})"
    versions = _range(group.versions, file, place)
    if not group.ops:
        raise PolicyTableError(file, place, "ops is empty: name an op, or delete the group")
    for op in (*group.ops, *group.redispatch.values()):
        _check_overload(op, file, place)
    for op in group.ops:
        if group.ops.count(op) > 1:
            raise PolicyTableError(file, place, f"op {op!r} is named twice; delete one")
    wanted = set(group.ops) if policy is Policy.FP32_APPEND_DTYPE else set()
    for op in sorted(wanted ^ set(group.redispatch)):
        raise PolicyTableError(
            file,
            place,
            f"redispatch does not say which overload takes the dtype for {op!r}"
            if op in wanted
            else f"redispatch names {op!r}, which is no op of the group or has no need of it",
        )
    return _Rules(
        place,
        versions,
        tuple(
            Rule(op, policy, group.versions, group.source, group.redispatch.get(op))
            for op in group.ops
        ),
    )


def _check_overload(op: str, file: str, place: str) -> None:
    plain = op.removeprefix("aten::").removesuffix(".default")
    if op != plain or not _OVERLOAD.fullmatch(op):
        raise PolicyTableError(
            file,
            place,
            f"op {op!r} is not written as an overload name; write {plain!r}"
            if _OVERLOAD.fullmatch(plain)
            else f"op {op!r} is not an overload name, such as 'sum' or 'sum.dim_IntList'",
        )


def _convert(raw: dict[str, Any], kind: type[_Struct], file: str, place: str) -> _Struct:
    known = [item.encode_name for item in msgspec.structs.fields(kind)]
    for key in raw:
        _one_of(key, known, "key", file, place)
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise PolicyTableError(file, place, str(error)) from error


def _one_of(word: str, known: Iterable[str], what: str, file: str, place: str) -> None:
    known = list(known)
    if word not in known:
        way_out = _did_you_mean(word, known) or f"known: {', '.join(known)}"
        raise PolicyTableError(file, place, f"unknown {what} {word!r}; {way_out}")


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else ""
