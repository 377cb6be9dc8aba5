"""How far a job is, by what its workers say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forged.elastic.coordinator.step_witnesses import StepWitnesses, state_after, state_at
from forged.elastic.model import GlobalTrainingState
from forged.elastic.rescale.attempt import StopReport


def test_one_alone_is_believed_where_there_is_no_other() -> None:
    assert StepWitnesses().hear("a", 7, 1) == 7


def test_step_counts_when_a_second_witness_confirms_it() -> None:
    witnesses = StepWitnesses()
    assert [witnesses.hear("a", 7, 2), witnesses.hear("a", 8, 2)] == [0, 0]
    assert witnesses.hear("b", 7, 2) == 7
    assert witnesses.hear("b", 9, 2) == 8


def test_reset_drops_the_reports_of_the_previous_world() -> None:
    witnesses = StepWitnesses()
    witnesses.hear("a", 7, 2)
    witnesses.reset()
    assert witnesses.hear("b", 7, 2) == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), max_size=40))
def test_one_liar_never_makes_more_believed_than_an_honest_one_has_said(words: list[tuple[str, int]]) -> None:
    """Worker "a" reports another step than the rest every time."""
    witnesses, honest = StepWitnesses(), 0
    for worker, step in words:
        lies = worker == "a"
        honest = honest if lies else max(honest, step)
        assert witnesses.hear(worker, step + 1_000_000 * lies, 3) <= honest


KNOWN = GlobalTrainingState(1, 40, 0.5, 64, 3, 10.0)


def test_state_after_changes_only_step_and_time() -> None:
    assert state_after(KNOWN, 41, 11.0) == GlobalTrainingState(1, 41, 0.5, 64, 3, 11.0)


def test_state_at_a_source_includes_its_finished_step() -> None:
    stop = StopReport(41, holds_state=True, finished=True, epoch=2, learning_rate=0.25, global_batch_size=32)
    assert state_at(KNOWN, stop, 11.0) == GlobalTrainingState(2, 42, 0.25, 32, 3, 11.0)


def test_a_source_that_knows_no_rate_and_no_batch_leaves_those_that_are_known() -> None:
    assert state_at(KNOWN, StopReport(41, holds_state=True), 11.0) == GlobalTrainingState(0, 41, 0.5, 64, 3, 11.0)
