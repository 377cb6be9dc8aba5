"""Runs one function over many items in several threads.

Invariants:
- The first error, or a cancelled token, stops all threads; it is raised when all of them have ended.
- No thread outlives the call.
- It also works at the interpreter's exit, when the executors of the standard library refuse work.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

from forged.checkpoint.ports import CancelToken

T = TypeVar("T")

THREADS_MIN = 2
THREADS_MAX = 8


def threads_for(processors: int) -> int:
    """The number of threads for a process that may use this many processors."""
    return min(max(THREADS_MIN, processors), THREADS_MAX)


THREADS = threads_for(len(os.sched_getaffinity(0)))


def run_all(act: Callable[[T], object], items: Iterable[T], token: CancelToken, threads: int = THREADS) -> None:
    """Call `act` for every item, in order, on several threads; the caller's thread is one of them."""
    source, lock, failures = iter(items), threading.Lock(), list[BaseException]()

    def work() -> None:
        try:
            for item in _taken(source, lock):
                if failures:
                    return
                token.check()
                act(item)
        except BaseException as error:  # noqa: BLE001 - raised when all threads have ended
            failures.append(error)

    threads_started: list[_PoolThread] = []
    try:
        # If the system refuses a new thread, the existing ones do all the work.
        with suppress(RuntimeError):
            threads_started.extend(_PoolThread(work) for _ in range(threads - 1))
        work()
    finally:
        for thread in threads_started:
            thread.wait(failures)
    if failures:
        raise failures[0]


def _taken(source: Iterator[T], lock: threading.Lock) -> Iterator[T]:
    """The items that are left for this thread."""
    while True:
        with lock:
            try:
                item = next(source)
            except StopIteration:
                return
        yield item


class _PoolThread:
    """A thread of the pool."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoint-pool")
        self._thread.start()

    def wait(self, failures: list[BaseException]) -> None:
        """Wait for the thread; an interrupt stops all threads.

        An interrupted `Thread.join` marks the thread as ended, so the event is awaited first.
        """
        while not self._has_ended.is_set():
            try:
                self._has_ended.wait()
            except BaseException as error:  # noqa: BLE001 - raised when all threads have ended
                failures.insert(0, error)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._has_ended.set()
