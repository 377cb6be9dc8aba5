from __future__ import annotations

from math import inf

from forged.catalog.files.work_queue import PAUSE_S_MAX, FileTask, FileTaskKind, WorkQueue

A, B = (FileTask(FileTaskKind.DELETE, name) for name in "ab")


def queue(folders_max: int = 8, of_storage_max: int = 8, **tasks: FileTask) -> WorkQueue:
    made = WorkQueue(folders_max, of_storage_max)
    for folder, task in tasks.items():
        made.add(folder, "disk", task)
    return made


def test_folder_is_worked_in_once_at_a_time() -> None:
    one = queue(x=A)
    one.add("x", "disk", B)
    one.add("x", "disk", A)
    assert len(one) == 2
    assert list(one.begin(0.0)) == ["x"]
    assert (list(one.begin(0.0)), one.next_at()) == ([], inf)
    assert one.next("x") == A
    one.done("x", A)
    assert one.next("x") == B
    one.done("x", B)
    assert one.next("x") is None
    assert (len(one), list(one.begin(0.0))) == (0, [])


def test_only_so_many_folders_are_worked_in() -> None:
    one = queue(2, x=A, y=A, z=A)
    assert list(one.begin(0.0)) == ["x", "y"]
    assert one.next_at() == inf, "nothing can begin before one of them ends"
    one.done("x", A)
    assert one.next("x") is None
    assert list(one.begin(0.0)) == ["z"]


def test_folder_that_fails_waits_for_longer_each_time() -> None:
    one = queue(x=A)
    one.add("x", "disk", B)
    now, pauses = 0.0, list[float]()
    for number in range(12):
        assert list(one.begin(now)) == ["x"]
        assert one.next("x") == (A, B)[number % 2], "the task that failed comes last"
        one.failed("x", (A, B)[number % 2], now)
        assert list(one.begin(now)) == []
        pauses.append(one.next_at() - now)
        now = one.next_at()
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (1.0, PAUSE_S_MAX)
    assert list(one.begin(now)) == ["x"]
    one.done("x", A)
    assert one.failed("x", B, now) == 0.0


def test_task_that_has_to_wait_delays_no_other() -> None:
    one = queue(x=A)
    one.add("x", "disk", B)
    assert list(one.begin(0.0)) == ["x"]
    assert one.next("x") == A
    one.postpone("x", A, 0.0, 60.0)
    one.add("x", "disk", A)
    assert one.next("x") == B
    one.done("x", B)
    assert one.next("x") is None
    assert (len(one), one.next_at(), list(one.begin(0.0))) == (1, 60.0, [])
    assert list(one.begin(60.0)) == ["x"]
    assert one.next("x") == A
    one.done("x", A)
    assert one.next("x") is None
    assert len(one) == 0


def test_cleared_queue_lets_running_work_end() -> None:
    one = queue(x=A)
    assert list(one.begin(0.0)) == ["x"]
    one.clear()
    one.add("x", "disk", B)
    assert list(one.begin(0.0)) == []
    assert one.next("x") == B
    one.done("x", A)
    one.done("x", B)
    assert one.next("x") is None


def test_only_so_many_folders_of_a_storage_are_worked_in() -> None:
    one = queue(of_storage_max=2, x=A, y=A, z=A)
    one.add("other", "other disk", A)
    assert list(one.begin(0.0)) == ["x", "y", "other"]
    assert one.next_at() == inf
    one.done("x", A)
    assert one.next("x") is None
    assert list(one.begin(0.0)) == ["z"]


def test_all_folders_of_a_storage_that_hangs_wait_and_then_one_is_tried() -> None:
    one = queue(x=A, y=A, z=A)
    one.add("other", "other disk", A)
    assert list(one.begin(0.0)) == ["x", "y", "z", "other"]
    assert [one.failed(folder, A, 0.0, is_hung=True) for folder in "xy"] == [0.0, 0.0]
    one.done("other", A)
    assert one.next("other") is None
    one.add("other", "other disk", B)
    assert list(one.begin(0.0)) == ["other"]
    # One task of the storage has not returned yet.
    assert list(one.begin(2.0)) == []
    assert one.failed("z", A, 5.0, is_hung=True) == 5.0
    assert list(one.begin(5.0)) == []
    assert len(list(one.begin(9.0))) == 1


def test_storage_that_answers_again_is_worked_in_as_before() -> None:
    one = queue(x=A, y=A, z=A)
    assert list(one.begin(0.0)) == ["x", "y", "z"]
    for folder in "xyz":
        one.failed(folder, A, 0.0, is_hung=True)
    now = one.next_at()
    (first,) = one.begin(now)
    one.done(first, A)
    assert one.next(first) is None
    assert len(list(one.begin(now))) == 2


def test_urgent_task_comes_first() -> None:
    one = queue(x=A)
    one.add("x", "disk", B, is_urgent=True)
    assert list(one.begin(0.0)) == ["x"]
    assert one.next("x") == B
