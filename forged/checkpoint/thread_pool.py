"""Threads that work off one list together.

Law: the first error stops all of them and is the one that is raised, when none of them works any more; so does a halt.
Nobody is left behind in a thread that the caller does not know of. It works as well while the interpreter is ending,
when the pools of the standard library take nothing more.
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
    """How many threads work together where a process may use so many processors."""
    return min(max(THREADS_MIN, processors), THREADS_MAX)


THREADS = threads_for(len(os.sched_getaffinity(0)))


def run_all(act: Callable[[T], object], items: Iterable[T], token: CancelToken, threads: int = THREADS) -> None:
    """Call `act` for every item; several at a time, begun in their order. The caller's thread is one of them."""
    source, lock, failures = iter(items), threading.Lock(), list[BaseException]()

    def work() -> None:
        try:
            for item in _taken(source, lock):
                if failures:
                    return
                token.check()
                act(item)
        except BaseException as error:  # noqa: BLE001 - it is raised where all of them have ended
            failures.append(error)

    others: list[_Other] = []
    try:
        # Where the system has no more threads to give, those that there are do it all.
        with suppress(RuntimeError):
            others.extend(_Other(work) for _ in range(threads - 1))
        work()
    finally:
        for other in others:
            other.see_the_end(failures)
    if failures:
        raise failures[0]


def _taken(source: Iterator[T], lock: threading.Lock) -> Iterator[T]:
    """The items that this thread gets."""
    while True:
        with lock:
            try:
                item = next(source)
            except StopIteration:
                return
        yield item


class _Other:
    """Another thread that works."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoint-pool")
        self._thread.start()

    def see_the_end(self, failures: list[BaseException]) -> None:
        """Wait for it; whatever interrupts that stops all of them.

        Python takes a thread for ended when an interrupt comes while it is joined, so it is joined when it has.
        """
        while not self._has_ended.is_set():
            try:
                self._has_ended.wait()
            except BaseException as error:  # noqa: BLE001 - it is raised where all of them have ended
                failures.insert(0, error)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._has_ended.set()
