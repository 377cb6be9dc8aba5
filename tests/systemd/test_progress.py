from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forged.systemd.progress import Progress, WorkQueue


def looked(*looks: WorkQueue) -> list[list[str]]:
    """What is stuck at each of the looks at one queue."""
    progress = Progress()
    return [progress.stuck([queue]) for queue in looks]


def test_one_check_finds_nothing_stuck() -> None:
    assert looked(WorkQueue("a", waiting=True, done=0)) == [[]]


def test_queue_is_stuck_after_two_checks_without_progress() -> None:
    stuck, moved = WorkQueue("a", waiting=True, done=3), WorkQueue("a", waiting=True, done=4)
    assert looked(stuck, stuck, stuck, moved, moved) == [[], ["a"], ["a"], [], ["a"]]


def test_empty_queue_is_not_stuck() -> None:
    idle, busy = WorkQueue("a", waiting=False, done=3), WorkQueue("a", waiting=True, done=3)
    assert looked(idle, idle, busy, idle, busy) == [[], [], [], [], []]


def test_each_queue_is_judged_alone() -> None:
    progress = Progress()
    progress.stuck([WorkQueue("a", waiting=True, done=0), WorkQueue("b", waiting=True, done=0)])
    assert progress.stuck([WorkQueue("a", waiting=True, done=1), WorkQueue("b", waiting=True, done=0)]) == ["b"]
    assert progress.stuck([WorkQueue("c", waiting=True, done=0)]) == []
    assert progress.stuck([]) == []


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=20))
def test_queue_is_stuck_only_if_two_checks_saw_the_same_waiting_work(steps: list[tuple[bool, int]]) -> None:
    queues, done = [], 0
    for waiting, more in steps:
        done += more
        queues.append(WorkQueue("a", waiting=waiting, done=done))
    expected = [
        ["a"] if before is not None and before.waiting and queue.waiting and before.done == queue.done else []
        for before, queue in zip([None, *queues], queues, strict=False)
    ]
    assert looked(*queues) == expected
