"""A patch is gone when the last block is left, in whatever order blocks of several threads end."""

from __future__ import annotations

from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from amp_fuzz import patching
from amp_fuzz.patching import patched


def test_an_attribute_is_replaced_and_comes_back() -> None:
    owner = SimpleNamespace(f=1)
    with patched(owner, "f", 2):
        assert owner.f == 2
    assert owner.f == 1
    with pytest.raises(ZeroDivisionError), patched(owner, "f", 2):
        raise ZeroDivisionError
    assert owner.f == 1


def test_blocks_nest() -> None:
    owner = SimpleNamespace(f=1)
    with patched(owner, "f", 2):
        with patched(owner, "f", 3):
            assert owner.f == 3
        assert owner.f == 2
    assert owner.f == 1


@pytest.mark.parametrize("values", [(2, 3), (2, 2)])
def test_blocks_of_two_threads_overlap(values: tuple[int, int]) -> None:
    """Neither ends the other's, and nothing is left of either."""
    owner = SimpleNamespace(f=1)
    first, second = (patched(owner, "f", value) for value in values)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert owner.f == values[1]
    second.__exit__(None, None, None)
    assert owner.f == 1
    assert not patching._entered


def test_the_naive_pattern_fails() -> None:
    """The test above fails for the pattern that this replaces."""

    @contextmanager
    def naive(owner: Any, name: str, value: Any) -> Any:
        before = getattr(owner, name)
        setattr(owner, name, value)
        try:
            yield
        finally:
            setattr(owner, name, before)

    owner = SimpleNamespace(f=1)
    first, second = naive(owner, "f", 2), naive(owner, "f", 3)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert owner.f == 2


def test_an_inherited_attribute_is_inherited_again() -> None:
    class Base:
        @staticmethod
        def f() -> int:
            return 1

    class Derived(Base):
        pass

    with patched(Derived, "f", lambda: 2):
        assert (Base.f(), Derived.f()) == (1, 2)
    assert "f" not in vars(Derived)
    with patched(Base, "f", lambda: 2):
        assert Derived.f() == 2
    assert isinstance(vars(Base)["f"], staticmethod)


def test_a_name_that_is_not_there_stays_so() -> None:
    owner = ModuleType("owner")
    with patched(owner, "f", 2):
        assert not hasattr(owner, "f")
    assert not hasattr(owner, "f")
