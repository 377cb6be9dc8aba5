from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forged.elastic.rescale.ranks import assign_ranks, moves


@st.composite
def changes(draw: st.DrawFn, most: int = 30) -> tuple[list[str], set[str], list[str]]:
    """A world, its survivors and the joiners; a former member may join again as another process."""
    old = [f"w{number}" for number in range(draw(st.integers(0, most)))]
    staying = {worker for worker in old if draw(st.booleans())}
    fresh = [f"n{number}" for number in range(draw(st.integers(0, most)))]
    back = [worker for worker in old if worker not in staying and draw(st.booleans())]
    return old, staying, draw(st.permutations(fresh + back))


@pytest.mark.parametrize(
    ("old", "staying", "joining", "new"),
    [
        ("", "", "", ""),
        ("", "", "ab", "ab"),
        ("abc", "abc", "", "abc"),
        ("abc", "abc", "de", "abcde"),
        ("abc", "ac", "", "ac"),
        ("abc", "ac", "d", "adc"),
        ("abc", "bc", "d", "dbc"),
        ("abcde", "bd", "f", "fbd"),
        ("abcde", "bd", "fgh", "fbgdh"),
        ("abcde", "bd", "fghi", "fbgdhi"),
        ("abcde", "e", "f", "fe"),
        ("abc", "", "de", "de"),
        ("abc", "", "", ""),
        ("abc", "ab", "c", "abc"),
    ],
)
def test_survivors_keep_their_order_and_joiners_fill_the_gaps_from_below(
    old: str, staying: str, joining: str, new: str
) -> None:
    assert "".join(assign_ranks(old, set(staying), joining)) == new


@given(changes())
def test_every_worker_survivor_or_joins_is_there_once_and_no_other_worker(
    change: tuple[list[str], set[str], list[str]],
) -> None:
    old, staying, joining = change
    assert sorted(assign_ranks(old, staying, joining)) == sorted([*staying, *joining])


@given(changes())
def test_survivors_keep_their_order(change: tuple[list[str], set[str], list[str]]) -> None:
    old, staying, joining = change
    new = assign_ranks(old, staying, joining)
    assert [worker for worker in new if worker in staying] == [worker for worker in old if worker in staying]


@given(changes())
def test_joiners_keep_the_order_in_which_they_came(change: tuple[list[str], set[str], list[str]]) -> None:
    old, staying, joining = change
    assert [worker for worker in assign_ranks(old, staying, joining) if worker not in staying] == joining


@given(changes())
def test_worker_that_has_rank_0_keeps_it(change: tuple[list[str], set[str], list[str]]) -> None:
    old, staying, joining = change
    if old and old[0] in staying:
        assert assign_ranks(old, staying, joining)[0] == old[0]


@given(changes())
def test_with_no_fewer_joiners_than_gaps_no_worker_moves(change: tuple[list[str], set[str], list[str]]) -> None:
    old, staying, joining = change
    if len(joining) >= len(old) - len(staying):
        new = assign_ranks(old, staying, joining)
        assert all(new[rank] == worker for rank, worker in enumerate(old) if worker in staying)


@given(changes(most=5))
@example((list("abcde"), set("bd"), ["x"]))
def test_no_order_that_keeps_that_of_the_survivors_moves_fewer(change: tuple[list[str], set[str], list[str]]) -> None:
    """Against every way to put the survivors, in their order, on the ranks that there are."""
    old, staying, joining = change
    survivors = [worker for worker in old if worker in staying]
    rank = {worker: number for number, worker in enumerate(old)}
    size = len(survivors) + len(joining)
    least = min(
        sum(rank[worker] != place for worker, place in zip(survivors, places, strict=True))
        for places in itertools.combinations(range(size), len(survivors))
    )
    new = assign_ranks(old, staying, joining)
    assert sum(new.index(worker) != rank[worker] for worker in survivors) == least


def test_moves_are_counted_among_workers_that_are_in_both() -> None:
    assert moves("abc", "abc") == 0
    assert moves("abc", "bc") == 2
    assert moves("abc", "axc") == 0
    assert moves("", "abc") == 0
    assert moves("abc", "") == 0
    assert moves("ab", "ba") == 2
