"""Detects work queues that make no progress.

Invariants:
- A queue is stuck if work waited at two consecutive checks and nothing was completed in between. A long queue that
  moves is not stuck.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkQueue:
    """A queue: whether work is waiting or running, and how much was completed so far."""

    name: str
    waiting: bool
    done: int


class Progress:
    """The state of the queues at the last check."""

    def __init__(self) -> None:
        self._before: Mapping[str, WorkQueue] = {}

    def stuck(self, queues: Iterable[WorkQueue]) -> list[str]:
        """The names of the queues without progress since the last check."""
        now = {queue.name: queue for queue in queues}
        before, self._before = self._before, now
        return [name for name, queue in now.items() if queue.waiting and before.get(name) == queue]
