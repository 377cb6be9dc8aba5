from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forged.memory.waiting import AGING_S, PASSED_S, PRIORITY_MAX, WaitingQueue

PRIORITIES = st.integers(-(1 << 62), 1 << 62)


def test_the_more_important_request_is_served_first_and_the_earlier_one_of_equals() -> None:
    queue = WaitingQueue[str]()
    queue.add("late", 0, 2.0)
    queue.add("early", 0, 1.0)
    queue.add("important", 1, 3.0)
    queue.add("early too", 0, 1.0)
    assert [one.request for one in queue] == ["important", "early", "early too", "late"]


def test_a_request_that_does_not_wait_passes_for_a_while_only() -> None:
    queue = WaitingQueue[str]()
    assert not queue.has_right_of_way(0, 0.0, waits=True)
    queue.add("large", 0, 0.0)
    assert queue.has_right_of_way(0, 1.0, waits=True)
    assert not queue.has_right_of_way(0, 1.0, waits=False)
    assert queue.has_right_of_way(0, PASSED_S, waits=False)
    assert not queue.has_right_of_way(2, PASSED_S, waits=False)


@given(st.lists(st.tuples(PRIORITIES, st.floats(0, 1000)), min_size=1, max_size=30), st.data())
def test_removal_keeps_the_order_of_service(requests: list[tuple[int, float]], data: st.DataObject) -> None:
    queue = WaitingQueue[int]()
    entries = [queue.add(number, priority, since) for number, (priority, since) in enumerate(requests)]
    gone = data.draw(st.sets(st.sampled_from(range(len(entries)))))
    for number in gone:
        queue.remove(entries[number])
        queue.remove(entries[number])
    left = sorted((entry.place, entry.request) for entry in entries if entry.request not in gone)
    assert [one.request for one in queue] == [number for _, number in left]
    assert len(queue) == len(left)


@given(PRIORITIES, PRIORITIES, st.floats(0, 1e6))
def test_a_request_is_served_before_all_that_come_much_later(mine: int, other: int, since: float) -> None:
    queue = WaitingQueue[str]()
    queue.add("mine", mine, since)
    queue.add("other", other, since + 2 * PRIORITY_MAX * AGING_S + 1.0)
    first = queue.first()
    assert first is not None
    assert first.request == "mine"
