"""The search for the fewest bugs that explain, on predicates that hypothesis draws."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from amp_fuzz.upstream.search import smallest

ITEMS = tuple(range(7))
SUBSETS = st.frozensets(st.sampled_from(ITEMS), min_size=1)
Explains = Callable[[Collection[int]], bool]


@st.composite
def predicates(draw: st.DrawFn) -> Explains:
    """Draw a predicate: any one, or one that holds of a set if it holds of a part of it."""
    if draw(st.booleans()):
        seed = draw(st.integers(0, 999))
        return lambda chosen: Random(f"{seed} {sorted(chosen)}").random() < 0.5
    enough = draw(st.frozensets(SUBSETS))
    return lambda chosen: any(frozenset(chosen) >= one for one in enough)


CANDIDATES = st.lists(st.lists(st.sampled_from(ITEMS), min_size=1, unique=True), max_size=5)


class Asked:
    """A predicate that notes what it is asked."""

    def __init__(self, explains: Explains) -> None:
        self.explains = explains
        self.sets: list[frozenset[int]] = []

    def __call__(self, chosen: tuple[int, ...]) -> bool:
        self.sets.append(frozenset(chosen))
        return self.explains(chosen)


@given(CANDIDATES, predicates())
def test_the_answer_explains_and_there_is_one_if_a_candidate_does(
    candidates: list[list[int]], explains: Explains
) -> None:
    answer = smallest(candidates, explains)
    assert (answer is None) == (not any(map(explains, candidates)))
    assert answer is None or explains(answer)


@given(CANDIDATES, predicates())
def test_no_item_of_the_answer_can_be_left_out(
    candidates: list[list[int]], explains: Explains
) -> None:
    answer = smallest(candidates, explains) or ()
    for item in answer:
        fewer = [other for other in answer if other != item]
        assert not fewer or not explains(fewer)


@given(CANDIDATES, predicates())
def test_the_answer_is_of_the_first_candidate_that_explains_in_its_order(
    candidates: list[list[int]], explains: Explains
) -> None:
    answer = smallest(candidates, explains)
    first: Sequence[int] = next(filter(explains, candidates), ())
    assert list(answer or ()) == [item for item in first if item in (answer or ())]


@given(CANDIDATES, predicates())
def test_each_set_is_asked_about_once_and_never_the_empty_one(
    candidates: list[list[int]], explains: Explains
) -> None:
    asked = Asked(explains)
    smallest(candidates, asked)
    assert len(asked.sets) == len(set(asked.sets))
    assert frozenset() not in asked.sets


@given(st.integers(1, 40), st.integers(1, 40))
def test_the_questions_are_few_where_more_items_explain_what_fewer_do(n: int, least: int) -> None:
    asked = Asked(lambda chosen: len(chosen) >= min(least, n))
    smallest([range(n)], asked)
    assert len(asked.sets) <= 3 * n + 8


@given(st.integers(1, 30), st.integers())
def test_the_questions_are_bounded_for_any_predicate(n: int, seed: int) -> None:
    asked = Asked(lambda chosen: len(chosen) == n or Random(f"{seed} {chosen}").random() < 0.5)
    smallest([range(n)], asked)
    assert len(asked.sets) <= (n + 2) ** 2


def test_candidates_are_drawn_one_after_the_other() -> None:
    """A candidate may depend on what came of those before it."""
    asked = Asked(lambda chosen: len(chosen) > 1)

    def candidates() -> Iterator[list[int]]:
        yield [0]
        assert asked.sets == [frozenset({0})]
        yield [0, 1]
        raise AssertionError("the last candidate explains")

    assert smallest(candidates(), asked) == (0, 1)


def test_later_items_are_left_out_first() -> None:
    assert smallest([range(9)], lambda chosen: len(chosen) >= 3) == (0, 1, 2)


def test_an_item_that_another_one_needed_is_left_out_with_it() -> None:
    """2 can be left out only when 1 is gone, and is tried before it."""
    enough = ({0, 1, 2, 3}, {0, 1, 2}, {0, 2}, {0})
    assert smallest([[0, 1, 2, 3]], lambda chosen: set(chosen) in enough) == (0,)
