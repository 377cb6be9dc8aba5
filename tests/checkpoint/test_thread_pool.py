"""Threads that work off one list: all of it, or an error when none of them works any more."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.ports import CancelToken
from forged.checkpoint.thread_pool import run_all, threads_for

NEVER = CancelToken()
PATIENCE_S = 30.0


@pytest.mark.parametrize(("processors", "threads"), [(1, 2), (2, 2), (3, 3), (8, 8), (9, 8), (256, 8)])
def test_there_are_as_many_threads_as_processors_within_bounds(processors: int, threads: int) -> None:
    assert threads_for(processors) == threads


def test_only_the_processors_that_the_process_may_use_count() -> None:
    """The machine may have more."""
    program = """
import os
os.sched_getaffinity = lambda pid: {1, 5, 6}
os.cpu_count = lambda: 64
from forged.checkpoint.thread_pool import THREADS
print(THREADS)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.stdout, done.stderr) == ("3\n", "")


@pytest.mark.parametrize("threads", [0, 1, 2, 7])
@pytest.mark.parametrize("count", [0, 1, 100])
def test_everything_is_done_once(threads: int, count: int) -> None:
    done: list[int] = []
    run_all(done.append, range(count), NEVER, threads)
    assert sorted(done) == list(range(count))


def test_several_are_at_it_at_the_same_time() -> None:
    both = threading.Barrier(2)
    run_all(lambda item: both.wait(PATIENCE_S), range(2), NEVER, 2)
    assert not both.broken


def test_caller_is_one_of_the_threads() -> None:
    found: set[threading.Thread] = set()
    run_all(lambda item: found.add(threading.current_thread()), range(5), NEVER, 1)
    assert found == {threading.current_thread()}


def test_where_the_system_has_no_threads_left_the_caller_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    run_all(done.append, range(10), NEVER, 3)
    assert done == list(range(10))


@pytest.mark.parametrize("threads", [1, 2])
def test_first_error_stops_all_threads_and_is_raised_when_they_have_ended(threads: int) -> None:
    began, done = threading.Event(), list[int]()

    def act(item: int) -> None:
        if item == 0 and threads == 2:
            assert began.wait(PATIENCE_S)
            done.append(item)
        elif item <= 1:
            began.set()
            raise ValueError(item)
        else:
            done.append(item)

    with pytest.raises(ValueError, match="1" if threads == 2 else "0"):
        run_all(act, range(1000), NEVER, threads)
    assert len(done) < 999
    assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint-pool"]


def test_a_list_that_fails_is_an_error_like_any_other() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError("no more")

    with pytest.raises(KeyError):
        run_all(lambda item: None, items(), NEVER)


def test_cancelled_token_stops_all_threads_between_items() -> None:
    token, done = CancelToken(), list[int]()

    def act(item: int) -> None:
        done.append(item)
        if item == 5:
            token.cancel()

    with pytest.raises(CheckpointException, match="cancelled"):
        run_all(act, range(100), token, 1)
    assert done == [0, 1, 2, 3, 4, 5]


def test_interrupted_caller_still_waits_for_the_threads() -> None:
    script = """
import os, signal, threading
from forged.checkpoint.thread_pool import run_all
from forged.checkpoint.ports import CancelToken

ended = []
waits = threading.Event()

def act(item):
    if threading.current_thread() is not threading.main_thread():
        waits.wait(30)
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(0.1)
        ended.append(item)
    else:
        waits.set()

try:
    while not ended:
        waits.clear()
        run_all(act, range(2), CancelToken(), 2)
except KeyboardInterrupt:
    print("interrupted", len(ended))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "interrupted 1\n", done.stderr


def test_it_works_while_the_interpreter_is_ending() -> None:
    script = """
import threading
from forged.checkpoint.thread_pool import run_all
from forged.checkpoint.ports import CancelToken

def late():
    threading.main_thread().join()
    done = []
    run_all(done.append, range(5), CancelToken(), 2)
    print(sorted(done))

threading.Thread(target=late).start()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("[0, 1, 2, 3, 4]\n", "")
