"""How far a job is, by what its workers say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forged.elastic.progress import Witnesses


def test_one_alone_is_believed_where_there_is_no_other() -> None:
    assert Witnesses().hear("a", 7, 1) == 7


def test_what_one_of_several_says_is_not_believed_until_another_says_as_much() -> None:
    witnesses = Witnesses()
    assert [witnesses.hear("a", 7, 2), witnesses.hear("a", 8, 2)] == [0, 0]
    assert witnesses.hear("b", 7, 2) == 7
    assert witnesses.hear("b", 9, 2) == 8


def test_another_world_has_heard_nothing() -> None:
    witnesses = Witnesses()
    witnesses.hear("a", 7, 2)
    witnesses.begin_anew()
    assert witnesses.hear("b", 7, 2) == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), max_size=40))
def test_one_liar_never_makes_more_believed_than_an_honest_one_has_said(words: list[tuple[str, int]]) -> None:
    """ "a" lies with every word; the others say what is so."""
    witnesses, honest = Witnesses(), 0
    for worker, step in words:
        lies = worker == "a"
        honest = honest if lies else max(honest, step)
        assert witnesses.hear(worker, step + 1_000_000 * lies, 3) <= honest
