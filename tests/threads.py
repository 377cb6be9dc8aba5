"""Runs work in several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

THREADS = 8


def in_threads(work: Callable[[int], T]) -> list[T]:
    """The results of the work, which all threads begin together; each has a number."""
    barrier = threading.Barrier(THREADS)

    def begin(number: int) -> T:
        barrier.wait(60)
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return [done.result(60) for done in [pool.submit(begin, number) for number in range(THREADS)]]
