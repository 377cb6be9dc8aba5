"""Long computations about the data of jobs: one at a time for each job, and few in all.

Invariants:
- A job that asks for many computations delays only its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio

AT_ONCE_MAX = 4
"""Each computation takes some fifty bytes per shard."""

Compute = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a computation where it does not block the event loop."""


class Computations:
    """The queue of computations of each job."""

    def __init__(self, compute: Compute, at_once_max: int = AT_ONCE_MAX) -> None:
        self._compute = compute
        self._slots = anyio.Semaphore(at_once_max, fast_acquire=True)
        self._turns: dict[str, anyio.Lock] = {}

    async def run(self, job: str, work: Callable[[], Any]) -> Any:
        """Run the computation when it is this job's turn."""
        turn = self._turns.setdefault(job, anyio.Lock(fast_acquire=True))
        try:
            async with turn, self._slots:
                return await self._compute(work)
        finally:
            if not turn.statistics().locked and not turn.statistics().tasks_waiting:
                self._turns.pop(job, None)
