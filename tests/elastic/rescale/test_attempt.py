from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.elastic.model import RescaleType
from forged.elastic.rescale.attempt import Attempt, Stage, StopReport, choose_sources, initial_state_remark


def attempt(target: str, added: str = "") -> Attempt:
    return Attempt(1, RescaleType.REPLACE, tuple(target), tuple(added), (), "a test", 0.0)


def at(step: int, *, finished: bool = False) -> StopReport:
    return StopReport(step, holds_state=True, finished=finished)


NOTHING = StopReport(0, holds_state=False)


def settled(stops: dict[str, StopReport], added: str = "") -> Attempt:
    found = attempt("".join(stops), added)
    found.stops.update(stops)
    assert found.all_stopped
    found.synchronise()
    return found


def test_all_have_to_stop() -> None:
    found = attempt("abc")
    assert (found.stage, found.waiting_for, found.all_stopped) == (Stage.STOPPING, ["a", "b", "c"], False)
    found.stops["c"] = found.stops["a"] = at(5)
    assert (found.waiting_for, found.all_stopped) == (["b"], False)
    found.stops["b"] = at(5)
    assert (found.waiting_for, found.all_stopped) == ([], True)


@pytest.mark.parametrize(
    ("stops", "source", "step", "behind"),
    [
        pytest.param({"a": at(5), "b": at(5)}, "a", 5, set(), id="all at the same step: no worker is behind"),
        pytest.param({"a": at(4), "b": at(5)}, "b", 5, {"a"}, id="the highest committed step counts"),
        pytest.param({"a": at(5), "b": at(5), "c": at(4)}, "a", 5, {"c"}, id="the lowest rank among several"),
        pytest.param({"a": NOTHING, "b": at(0)}, "b", 0, {"a"}, id="a state holder before a worker without a state"),
        pytest.param(
            {"a": NOTHING, "b": NOTHING}, "a", 0, {"b"}, id="no state holder: what the first worker starts with"
        ),
        pytest.param(
            {"a": NOTHING, "b": StopReport(500, holds_state=False), "c": StopReport(500, holds_state=False)},
            "b",
            500,
            {"a", "c"},
            id="no state holder: the first of the workers that are furthest",
        ),
        pytest.param({"a": NOTHING}, "a", 0, set(), id="a single worker waits for no other"),
        pytest.param(
            {"a": at(4, finished=True), "b": at(4, finished=True)}, "a", 5, set(), id="finished by all: it counts"
        ),
        pytest.param(
            {"a": at(4, finished=True), "b": at(4)}, "b", 4, {"a"}, id="finished by some: it is done again by all"
        ),
        pytest.param(
            {"a": at(4, finished=True), "b": at(5)},
            "a",
            5,
            set(),
            id="a worker that finished it is where it was committed",
        ),
        pytest.param(
            {"a": at(5, finished=True), "b": at(5), "c": at(4)}, "b", 5, {"a", "c"}, id="ahead is behind as well"
        ),
        pytest.param(
            {"a": at(4, finished=True), "b": NOTHING},
            "a",
            5,
            {"b"},
            id="a worker without a state has not failed to finish",
        ),
    ],
)
def test_the_source_is_where_the_training_goes_on(
    stops: dict[str, StopReport], source: str, step: int, behind: set[str]
) -> None:
    found = settled(stops)
    assert (found.source, found.step, found.unready) == (source, step, behind)
    assert found.stage is Stage.SYNCHRONISING
    assert found.waiting_for == sorted(behind)


def test_state_of_a_joiner_does_not_count_beside_a_survivor() -> None:
    found = settled({"a": at(900), "b": at(5), "c": NOTHING}, added="ac")
    assert (found.source, found.step, found.unready) == ("b", 5, {"a", "c"})


def test_state_of_a_joiner_counts_without_a_survivor() -> None:
    found = settled({"a": NOTHING, "b": at(900), "c": at(800)}, added="abc")
    assert (found.source, found.step, found.unready) == ("b", 900, {"a", "c"})
    found = settled({"a": NOTHING, "b": at(900)}, added="b")
    assert found.source == "b"


STOPS = st.builds(StopReport, st.integers(0, 3), st.booleans(), st.booleans())


@given(st.lists(STOPS, min_size=1, max_size=6))
def test_no_committed_step_of_a_holder_is_taken_back(stops: list[StopReport]) -> None:
    found = settled({chr(ord("a") + number): stop for number, stop in enumerate(stops)})
    assert found.step >= max((stop.step for stop in stops if stop.holds_state), default=0)


@given(st.lists(STOPS, min_size=1, max_size=6))
def test_members_that_need_no_state_are_at_the_position_of_the_source(stops: list[StopReport]) -> None:
    by_worker = {chr(ord("a") + number): stop for number, stop in enumerate(stops)}
    found = settled(by_worker)
    assert found.source not in found.unready
    for worker in by_worker.keys() - found.unready - {found.source}:
        assert by_worker[worker].holds_state
        assert by_worker[worker].position == found.step


@given(st.lists(STOPS, min_size=1, max_size=6))
def test_the_choice_is_the_same_for_every_worker_that_knows_the_stops(stops: list[StopReport]) -> None:
    target = tuple(chr(ord("a") + number) for number in range(len(stops)))
    by_worker = dict(zip(target, stops, strict=True))
    backwards = dict(reversed(by_worker.items()))
    assert choose_sources(target, by_worker) == choose_sources(target, backwards)


def test_the_source_is_named_if_no_worker_held_a_state_and_they_start_differently() -> None:
    further = StopReport(1500, holds_state=False)
    said = "state taken from b, which starts with the most steps (1,500)"
    assert initial_state_remark("b", {"a": NOTHING, "b": further}) == said
    assert initial_state_remark("a", {"a": further, "b": further}) == ""
    assert initial_state_remark("b", {"a": NOTHING, "b": at(1500)}) == "", "the joiners take the state of the training"
