"""Threads that work off one list together.

Law: the first error stops all of them and is the one that is raised, when none of them works any more; so does a halt.
Nobody is left behind in a thread that the caller does not know of. It works as well while the interpreter is ending,
when the pools of the standard library take nothing more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

from forged.checkpoint.ports import Halt

T = TypeVar("T")

THREADS = 2


def work_off(act: Callable[[T], object], items: Iterable[T], halt: Halt, threads: int = THREADS) -> None:
    """Call `act` for every item; several at a time, begun in their order. The caller's thread is one of them."""
    source, lock, failures = iter(items), threading.Lock(), list[BaseException]()

    def work() -> None:
        try:
            for item in _taken(source, lock):
                if failures:
                    return
                halt.check()
                act(item)
        except BaseException as error:  # noqa: BLE001 - it is raised where all of them have ended
            failures.append(error)

    others = [threading.Thread(target=work, name="checkpoint-crew") for _ in range(threads - 1)]
    begun = []
    try:
        # Where the system has no more threads to give, those that there are do it all.
        with suppress(RuntimeError):
            for thread in others:
                thread.start()
                begun.append(thread)
        work()
    finally:
        _wait_for(begun, failures)
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


def _wait_for(threads: list[threading.Thread], failures: list[BaseException]) -> None:
    """See the end of all of them; who is interrupted meanwhile stops them."""
    for thread in threads:
        while thread.is_alive():
            try:
                thread.join()
            except BaseException as error:  # noqa: BLE001 - it is raised where all of them have ended
                failures.insert(0, error)
