"""State is restored whatever its class allows; what cannot be restored is noted, never raised."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import amp_fuzz
from amp_fuzz.interfaces.check.trees import leaves_of, mapped
from tests.helpers import brief, leading

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Frozen(OrderedDict[str, Any]):
    """As diffusers' FrozenDict: refuses every write, and has its keys as attributes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for key, value in self.items():
            setattr(self, key, value)
        self.__frozen = True

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise Exception("You cannot use this on a FrozenDict instance.")

    pop = update = setdefault = __delitem__ = clear = _refuse

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, "__frozen"):
            self._refuse()
        super().__setattr__(name, value)

    def __setitem__(self, name: str, value: Any) -> None:
        if "_Frozen__frozen" in vars(self):
            self._refuse()
        super().__setitem__(name, value)


class Refusing(list[Any]):
    def _refuse(self, *args: Any) -> Any:
        raise TypeError("no")

    extend = clear = append = __setitem__ = __delitem__ = copy = __iter__ = _refuse  # type: ignore[assignment]


class Grudging(set[Any]):
    def update(self, *args: Any) -> Any:
        raise TypeError("no")

    clear = copy = update


@dataclasses.dataclass(frozen=True)
class Settings:
    count: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    count: int = 0


class Hidden:
    """Slots, a property that raises, and attributes for every name."""

    __slots__ = ("count", "other")

    def __init__(self) -> None:
        self.count = 0

    @property
    def broken(self) -> Any:
        raise RuntimeError("not ready")

    def __eq__(self, other: object) -> Any:
        raise RuntimeError("not comparable")

    __hash__ = None  # type: ignore[assignment]


class Anything:
    """Answers every attribute, and compares like an array."""

    def __init__(self) -> None:
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        return self

    def __eq__(self, other: object) -> Any:
        return np.zeros(3) == 0

    __hash__ = object.__hash__


class Table(MutableMapping[str, Any]):
    """A mapping with items of its own that counts its reads."""

    def __init__(self) -> None:
        self.items_: dict[str, Any] = {"count": 0}

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_[key] = value

    def __delitem__(self, key: str) -> None:
        raise TypeError("no")

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


def _circular() -> list[Any]:
    items: list[Any] = [0]
    items.append(items)
    return items


def _count(owner: Any) -> int:
    object.__setattr__(owner, "count", owner.count + 1)
    return int(owner.count)


def _counted(items: Any) -> int:
    items["count"] = items["count"] + 1
    return int(items["count"])


def _frozen(items: Any) -> int:
    OrderedDict.__setitem__(items, "count", items["count"] + 1)
    return int(items["count"])


def _appended(items: Any) -> int:
    list.append(items, 1)
    return len(items)


def _added(items: Any) -> int:
    set.add(items, len(items))
    return len(items)


def _queued(items: Any) -> int:
    items.append(1)
    return sum(items)


STATES: dict[str, tuple[Callable[[], Any], Callable[[Any], int]]] = {
    "frozen mapping": (lambda: Frozen(count=0), _frozen),
    "list that refuses": (lambda: Refusing([0]), _appended),
    "set that refuses": (lambda: Grudging({0}), _added),
    "frozen dataclass": (Settings, _count),
    "slotted dataclass": (Slotted, _count),
    "slots": (Hidden, _count),
    "any attribute": (Anything, _count),
    "own mapping": (Table, _counted),
    "counter": (lambda: Counter(count=0), _counted),
    "default dict": (lambda: defaultdict(int, count=0), _counted),
    "deque": (lambda: deque([1, 1], maxlen=4), _queued),
    "list in a dict": (lambda: {"inner": [0]}, lambda items: _appended(items["inner"])),
    "circular list": (_circular, _appended),
}


class Holding(nn.Module):
    def __init__(self, state: Any, change: Callable[[Any], int]) -> None:
        super().__init__()
        self.state, self.change = state, change

    def forward(self, x: Tensor) -> Tensor:
        return x @ x.t() * self.change(self.state)


@pytest.mark.parametrize("name", leading(STATES, 4))
@pytest.mark.parametrize("isolate", brief([None, False], None), ids=["fork", "here"])
def test_a_change_of_state_is_undone_after_each_call(name: str, isolate: bool | None) -> None:
    """Otherwise a later call would give another result."""
    made, change = STATES[name]
    model = Holding(made(), change)
    first, fresh = change(model.state), Holding(made(), change)
    result = amp_fuzz.check(fresh, X, backends=["eager-cpu"], store=None, isolate=isolate)
    assert result.verdict == "agrees", str(result)
    assert result.notes == ()
    assert change(fresh.state) == first


def test_what_did_not_change_is_not_written(tmp_path: Path) -> None:
    """A write to read-only memory kills the process."""
    path = tmp_path / "weights"
    np.arange(32, dtype=np.float32).tofile(path)
    with pytest.warns(UserWarning, match="not writable"):
        table = torch.from_numpy(np.memmap(path, dtype=np.float32, mode="r", shape=(8, 4)))
    result = amp_fuzz.check(lambda x: x @ table, X, backends=["eager-cpu"], store=None)
    assert result.ok, str(result)


def test_what_cannot_be_restored_is_noted_and_not_raised() -> None:
    class Stuck(torch.Generator):
        def get_state(self) -> Any:
            raise RuntimeError("no state")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.stuck = nn.Linear(8, 8), Stuck()

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)  # type: ignore[no-any-return]

    result = amp_fuzz.check(Model(), X, backends=["eager-cpu", "fake-cuda"], store=None)
    assert result.ok, str(result)
    assert {(note.kind, note.where) for note in result.notes} == {("not-restored", "stuck")}
    assert "RuntimeError: no state" in result.notes[0].message
    assert str(result).count("note, not-restored") == 1


@pytest.mark.parametrize(
    "make", [lambda x: Frozen(x=x), lambda x: Refusing([x]), Settings], ids=["dict", "list", "data"]
)
def test_an_input_that_refuses_writes_is_copied(make: Callable[[Any], Any]) -> None:
    given = make(X)
    again = mapped(lambda leaf: leaf * 2 if isinstance(leaf, Tensor) else leaf, given)
    assert type(again) is type(given)
    (_, value), *_ = leaves_of(again)
    assert torch.equal(value, X * 2)
    (_, value), *_ = leaves_of(given)
    assert value is X


def test_a_tree_that_contains_itself_has_leaves() -> None:
    items = _circular()
    (first, zero), (second, itself) = leaves_of(items)
    assert (first, zero, second) == ("[0]", 0, "[1]")
    assert itself is items
    assert mapped(lambda leaf: leaf, items)[0] == 0


def test_a_mapping_that_pytrees_know_without_names_has_its_keys_as_names() -> None:
    class Output(OrderedDict[str, Tensor]):
        """As the outputs of diffusers."""

    pytree.register_pytree_node(
        Output,
        lambda tree: (list(tree.values()), list(tree)),
        lambda items, keys: Output(zip(keys, items, strict=True)),
    )
    assert [name for name, _ in leaves_of(Output(sample=X))] == ["['sample']"]


def test_a_function_that_wraps_itself_is_followed_once() -> None:
    @functools.lru_cache
    def product(x: Tensor) -> Tensor:
        return x @ x.t()

    product.__wrapped__.__wrapped__ = product  # type: ignore[attr-defined]
    assert amp_fuzz.check(lambda x: product(x), X, backends=["eager-cpu"], store=None)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what a check stores out of the repository."""
    monkeypatch.chdir(tmp_path)
