from __future__ import annotations

from math import inf

from forged.catalog.files.work_queue import PAUSE_S_MAX, POSTPONED_S, FileTask, FileTaskKind, WorkQueue

A, B = (FileTask(FileTaskKind.DELETE, name) for name in "ab")


def queue(**tasks: FileTask) -> WorkQueue:
    made = WorkQueue()
    for folder, task in tasks.items():
        made.add(folder, task)
    return made


def test_folder_is_worked_in_once_at_a_time() -> None:
    one = queue(x=A)
    one.add("x", B)
    one.add("x", A)
    assert len(one) == 2
    assert list(one.begin(0.0, 8)) == ["x"]
    assert (list(one.begin(0.0, 8)), one.next_at()) == ([], inf)
    assert one.next("x") == A
    one.done("x", A)
    assert one.next("x") == B
    one.done("x", B)
    assert one.next("x") is None
    assert (len(one), list(one.begin(0.0, 8))) == (0, [])


def test_only_so_many_folders_are_worked_in() -> None:
    one = queue(x=A, y=A, z=A)
    assert list(one.begin(0.0, 2)) == ["x", "y"]
    one.done("x", A)
    assert one.next("x") is None
    assert list(one.begin(0.0, 2)) == ["z"]


def test_folder_that_fails_waits_for_longer_each_time() -> None:
    one = queue(x=A)
    one.add("x", B)
    now, pauses = 0.0, list[float]()
    for number in range(12):
        assert list(one.begin(now, 8)) == ["x"]
        assert one.next("x") == (A, B)[number % 2], "the task that failed comes last"
        one.failed("x", (A, B)[number % 2], now)
        assert list(one.begin(now, 8)) == []
        pauses.append(one.next_at() - now)
        now = one.next_at()
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (1.0, PAUSE_S_MAX)
    assert list(one.begin(now, 8)) == ["x"]
    one.done("x", A)
    assert one.failed("x", B, now) == 0.0


def test_task_that_has_to_wait_delays_no_other() -> None:
    one = queue(x=A)
    one.add("x", B)
    assert list(one.begin(0.0, 8)) == ["x"]
    assert one.next("x") == A
    one.postpone("x", A, 0.0)
    one.add("x", A)
    assert one.next("x") == B
    one.done("x", B)
    assert one.next("x") is None
    assert (len(one), one.next_at(), list(one.begin(0.0, 8))) == (1, POSTPONED_S, [])
    assert list(one.begin(POSTPONED_S, 8)) == ["x"]
    assert one.next("x") == A
    one.done("x", A)
    assert one.next("x") is None
    assert len(one) == 0


def test_cleared_queue_lets_running_work_end() -> None:
    one = queue(x=A)
    assert list(one.begin(0.0, 8)) == ["x"]
    one.clear()
    one.add("x", B)
    assert list(one.begin(0.0, 8)) == []
    assert one.next("x") == B
    one.done("x", A)
    one.done("x", B)
    assert one.next("x") is None
