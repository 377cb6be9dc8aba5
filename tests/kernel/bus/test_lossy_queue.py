from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forged.jobs.model import NoteAdded
from forged.kernel.bus.lossy_queue import LossyQueue
from forged.kernel.messages import Record


def facts(jobs: str, first: int = 1) -> list[Record]:
    """A fact of each of these jobs, with ascending ids."""
    return [Record.of(NoteAdded("x"), fact_id=first + n, at=0.0, job=job) for n, job in enumerate(jobs)]


def taken(queue: LossyQueue) -> list[int | tuple[int, int]]:
    """All that the queue gives: ids, and gaps before them."""
    given: list[int | tuple[int, int]] = []
    while len(queue):
        if (gap := queue.take_gap()) is not None:
            given.append(gap)
        given.append(queue.popleft().id)
    return given


def test_facts_within_the_limit_leave_in_order() -> None:
    queue = LossyQueue(3)
    assert queue.extend(facts("aba")) == 0
    assert taken(queue) == [1, 2, 3]


def test_job_with_most_facts_loses_its_oldest_and_the_gap_is_told_in_its_place() -> None:
    queue = LossyQueue(4)
    assert queue.extend(facts("baaaaab")) == 3
    assert [record.id for record in queue] == [1, 5, 6, 7]
    assert len(queue) == 4
    assert taken(queue) == [1, (2, 4), 5, 6, 7]


def test_flood_of_one_job_takes_no_fact_of_a_job_within_its_part() -> None:
    queue = LossyQueue(10)
    queue.extend(facts("vvv"))
    queue.extend(facts("h" * 10_000, 4))
    assert [record.id for record in queue if record.job == "v"] == [1, 2, 3]
    assert len(queue) == 10


def test_dropped_facts_behind_a_waiting_one_take_no_memory() -> None:
    queue = LossyQueue(10)
    queue.extend(facts("v"))
    for number in range(1000):
        queue.extend(facts("h" * 10, 2 + 10 * number))
    assert len(queue._records) <= 30
    assert len(queue._dropped) <= 20
    assert taken(queue) == [1, (2, 9992), *range(9993, 10_002)]


def test_cleared_queue_has_neither_facts_nor_gaps() -> None:
    queue = LossyQueue(1)
    queue.extend(facts("aaa"))
    queue.clear()
    assert (len(queue), queue.take_gap(), list(queue)) == (0, None, [])
    queue.extend(facts("a", 4))
    assert taken(queue) == [4]


@given(st.lists(st.one_of(st.text("abc", min_size=1, max_size=8), st.integers(1, 5))), st.integers(1, 6))
def test_each_fact_is_taken_once_or_lies_in_a_gap_before_a_later_one(steps: list[str | int], facts_max: int) -> None:
    queue, last, dropped = LossyQueue(facts_max), 0, 0
    given: list[int] = []
    told: list[int] = []

    def take() -> None:
        if (gap := queue.take_gap()) is not None:
            told.extend(range(gap[0], gap[1] + 1))
            given.extend(range(gap[0], gap[1] + 1))
        given.append(queue.popleft().id)

    for step in steps:
        if isinstance(step, str):
            dropped += queue.extend(facts(step, last + 1))
            last += len(step)
        else:
            for _ in range(min(step, len(queue))):
                take()
        assert len(queue) == len(list(queue)) <= facts_max
    while len(queue):
        take()
    assert given == list(range(1, last + 1))
    assert len(told) == dropped
