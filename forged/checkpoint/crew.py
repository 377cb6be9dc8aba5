"""Threads that work off one list together.

Law: the first error stops all of them and is the one that is raised, when none of them works any more; so does a halt.
Nobody is left behind in a thread that the caller does not know of.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from forged.checkpoint.ports import Halt

T = TypeVar("T")

THREADS = 2


def work_off(act: Callable[[T], object], items: Iterable[T], halt: Halt, threads: int = THREADS) -> None:
    """Call `act` for every item; several at a time, begun in their order."""
    source, lock, stopped = iter(items), threading.Lock(), threading.Event()

    def work() -> None:
        for item in _taken(source, lock):
            if stopped.is_set():
                return
            try:
                halt.check()
                act(item)
            except BaseException:
                stopped.set()
                raise

    if threads <= 1:
        work()
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint") as pool:
        _raise_first([pool.submit(work) for _ in range(threads)])


def _taken(source: Iterator[T], lock: threading.Lock) -> Iterator[T]:
    """The items that this thread gets."""
    while True:
        with lock:
            try:
                item = next(source)
            except StopIteration:
                return
        yield item


def _raise_first(futures: list[Future[None]]) -> None:
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    wait(futures)
    for future in [*(one for one in futures if one in done), *futures]:
        future.result()
