from __future__ import annotations

import sys
from collections.abc import Callable
from math import inf
from types import FrameType
from typing import Any

import pytest

from forged.catalog.files import work_queue
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
    assert one.begin(0.0) == ["x"]
    assert (one.begin(0.0), one.next_at()) == ([], inf)
    assert one.next("x") == A
    one.done("x", A)
    assert one.next("x") == B
    one.done("x", B)
    assert one.next("x") is None
    assert (len(one), one.begin(0.0)) == (0, [])


def test_only_so_many_folders_are_worked_in() -> None:
    one = queue(2, x=A, y=A, z=A)
    assert one.begin(0.0) == ["x", "y"]
    assert one.next_at() == inf, "nothing can begin before one of them ends"
    one.done("x", A)
    assert one.next("x") is None
    assert one.begin(0.0) == ["z"]


def test_folder_that_fails_waits_for_longer_each_time() -> None:
    one = queue(x=A)
    one.add("x", "disk", B)
    now, pauses = 0.0, list[float]()
    for number in range(12):
        assert one.begin(now) == ["x"]
        assert one.next("x") == (A, B)[number % 2], "the task that failed comes last"
        one.failed("x", (A, B)[number % 2], now)
        assert one.begin(now) == []
        pauses.append(one.next_at() - now)
        now = one.next_at()
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (1.0, PAUSE_S_MAX)
    assert one.begin(now) == ["x"]
    one.done("x", A)
    assert one.failed("x", B, now) == 0.0


def test_task_that_has_to_wait_delays_no_other() -> None:
    one = queue(x=A)
    one.add("x", "disk", B)
    assert one.begin(0.0) == ["x"]
    assert one.next("x") == A
    one.postpone("x", A, 0.0, 60.0)
    one.add("x", "disk", A)
    assert one.next("x") == B
    one.done("x", B)
    assert one.next("x") is None
    assert (len(one), one.next_at(), one.begin(0.0)) == (1, 60.0, [])
    assert one.begin(60.0) == ["x"]
    assert one.next("x") == A
    one.done("x", A)
    assert one.next("x") is None
    assert len(one) == 0


def test_cleared_queue_lets_running_work_end() -> None:
    one = queue(x=A)
    assert one.begin(0.0) == ["x"]
    one.clear()
    one.add("x", "disk", B)
    assert one.begin(0.0) == []
    assert one.next("x") == B
    one.done("x", A)
    one.done("x", B)
    assert one.next("x") is None


def test_only_so_many_folders_of_a_storage_are_worked_in() -> None:
    one = queue(of_storage_max=2, x=A, y=A, z=A)
    one.add("other", "other disk", A)
    assert one.begin(0.0) == ["x", "y", "other"]
    assert one.next_at() == inf
    one.done("x", A)
    assert one.next("x") is None
    assert one.begin(0.0) == ["z"]


def test_all_folders_of_a_storage_that_hangs_wait_and_then_one_is_tried() -> None:
    one = queue(x=A, y=A, z=A)
    one.add("other", "other disk", A)
    assert one.begin(0.0) == ["x", "y", "z", "other"]
    assert [one.failed(folder, A, 0.0, is_hung=True) for folder in "xy"] == [0.0, 0.0]
    one.done("other", A)
    assert one.next("other") is None
    one.add("other", "other disk", B)
    assert one.begin(0.0) == ["other"]
    # One task of the storage has not returned yet.
    assert one.begin(2.0) == []
    assert one.failed("z", A, 5.0, is_hung=True) == 5.0
    assert one.begin(5.0) == []
    assert len(one.begin(9.0)) == 1


def test_storage_that_answers_again_is_worked_in_as_before() -> None:
    one = queue(x=A, y=A, z=A)
    assert one.begin(0.0) == ["x", "y", "z"]
    for folder in "xyz":
        one.failed(folder, A, 0.0, is_hung=True)
    now = one.next_at()
    (first,) = one.begin(now)
    one.done(first, A)
    assert one.next(first) is None
    assert len(one.begin(now)) == 2


def test_urgent_task_comes_first() -> None:
    one = queue(x=A)
    one.add("x", "disk", B, is_urgent=True)
    assert one.begin(0.0) == ["x"]
    assert one.next("x") == B


def test_storage_with_many_folders_delays_no_other() -> None:
    one = queue(1, x=A, y=A)
    one.add("other", "other disk", A)
    begun = []
    for number in range(3):
        (folder,) = one.begin(0.0)
        begun.append(folder)
        one.add(f"new {number}", "disk", A)
        one.done(folder, A)
        assert one.next(folder) is None
    assert begun == ["x", "other", "y"]


def test_folder_with_a_new_task_does_not_wait_for_its_postponed_ones() -> None:
    one = queue(x=A)
    assert one.begin(0.0) == ["x"]
    one.postpone("x", A, 0.0, 60.0)
    assert one.next("x") is None
    one.add("x", "disk", B)
    assert one.begin(1.0) == ["x"]
    assert one.next("x") == B
    one.done("x", B)
    assert one.next("x") is None
    assert (one.next_at(), one.begin(59.0), one.begin(60.0)) == (60.0, [], ["x"])


def one_task_in_each_folder(size: int) -> None:
    one = WorkQueue(16, 4)
    for number in range(size):
        one.add(f"folder {number}", f"disk {number % 2}", A)
    begun: list[str] = []
    while one._folders:
        is_due = one.next_at() <= 0.0
        started = one.begin(0.0)
        assert bool(started) is is_due
        begun += started
        folder = begun.pop(0)
        one.done(folder, A)
        assert one.next(folder) is None


def all_tasks_of_a_folder_postponed(size: int) -> None:
    one, now = WorkQueue(16, 4), 0.0
    for number in range(size):
        one.add("x", "disk", FileTask(FileTaskKind.DELETE, f"{number:08}"), is_urgent=True)
    while now < inf:
        for folder in one.begin(now):
            while (task := one.next(folder)) is not None:
                if now < 1.0:
                    one.postpone(folder, task, now, 1.0 + int(task.checkpoint_id))
                else:
                    one.done(folder, task)
        now = one.next_at()


def all_folders_failing(size: int) -> None:
    one = WorkQueue(16, 4)
    for number in range(size):
        one.add(f"folder {number}", "disk", A)
    for now in range(size):
        for folder in one.begin(now / size):
            one.failed(folder, A, now / size)
        one.next_at()


@pytest.mark.parametrize("work", [one_task_in_each_folder, all_tasks_of_a_folder_postponed, all_folders_failing])
def test_work_grows_no_faster_than_the_number_of_tasks(work: Callable[[int], None]) -> None:
    few, many = (instructions(work, size) / size for size in (100, 1600))
    assert many < 2 * few, "each task takes as many instructions of the queue as before, but for a logarithm"


def instructions(act: Callable[[int], None], size: int) -> int:
    """How many instructions of Python the queue executes."""
    executed = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal executed
        if frame.f_code.co_filename != work_queue.__file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        executed += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act(size)
    finally:
        sys.settrace(before)
    return executed
