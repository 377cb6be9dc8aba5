from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forged.systemd.progress import Lane, Progress


def looked(*looks: Lane) -> list[list[str]]:
    """What is stuck at each of the looks at one lane."""
    progress = Progress()
    return [progress.stuck([lane]) for lane in looks]


def test_one_look_proves_nothing() -> None:
    assert looked(Lane("a", waiting=True, done=0)) == [[]]


def test_waiting_twice_with_nothing_done_is_stuck_until_something_is() -> None:
    stuck, moved = Lane("a", waiting=True, done=3), Lane("a", waiting=True, done=4)
    assert looked(stuck, stuck, stuck, moved, moved) == [[], ["a"], ["a"], [], ["a"]]


def test_nothing_that_waits_is_no_fault() -> None:
    idle, busy = Lane("a", waiting=False, done=3), Lane("a", waiting=True, done=3)
    assert looked(idle, idle, busy, idle, busy) == [[], [], [], [], []]


def test_each_lane_is_judged_by_itself() -> None:
    progress = Progress()
    progress.stuck([Lane("a", waiting=True, done=0), Lane("b", waiting=True, done=0)])
    assert progress.stuck([Lane("a", waiting=True, done=1), Lane("b", waiting=True, done=0)]) == ["b"]
    assert progress.stuck([Lane("c", waiting=True, done=0)]) == []
    assert progress.stuck([]) == []


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=20))
def test_stuck_means_that_two_looks_saw_the_same_wait(steps: list[tuple[bool, int]]) -> None:
    lanes, done = [], 0
    for waiting, more in steps:
        done += more
        lanes.append(Lane("a", waiting=waiting, done=done))
    expected = [
        ["a"] if before is not None and before.waiting and lane.waiting and before.done == lane.done else []
        for before, lane in zip([None, *lanes], lanes, strict=False)
    ]
    assert looked(*lanes) == expected
