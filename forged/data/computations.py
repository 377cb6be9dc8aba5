"""Long computations about the data of jobs: few at once, shared out by principal and job.

Invariants:
- Of one principal, or of the principals of one job, at most one computation about a job runs at once.
- A free place goes to the principal or job that uses the fewest, and of equal ones to the one served longest ago.
- Tenants use at most `at_once_max` places; `OPERATOR_RESERVE` more are left to operators.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import anyio

from forged.shares import Holder, Shares

AT_ONCE_MAX = 4
"""Each computation takes some fifty bytes per shard."""
OPERATOR_RESERVE = 1

Compute = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a computation where it does not block the event loop."""

_Line: TypeAlias = tuple[str, str]
"""A group of principals and a job, whose computations take turns."""


class Computations:
    """The computations that run and those that wait."""

    def __init__(self, compute: Compute, at_once_max: int = AT_ONCE_MAX) -> None:
        self._compute = compute
        self._places = Shares("computations", at_once_max + OPERATOR_RESERVE, OPERATOR_RESERVE)
        self._running: set[_Line] = set()
        self._waiting: dict[_Line, dict[anyio.Event, Holder]] = {}
        """The line that was served last is the last one."""

    async def run(self, holder: Holder, job: str, work: Callable[[], Any]) -> Any:
        """Run the computation for this principal when a place is free and it is its turn."""
        line, granted = (holder.group, job), anyio.Event()
        self._waiting.setdefault(line, {})[granted] = holder
        self._serve_waiting()
        try:
            if not granted.is_set():
                await granted.wait()
            return await self._compute(work)
        finally:
            if granted.is_set():
                self._running.discard(line)
                self._places.give_back(holder)
                self._serve_waiting()
            else:
                self._take(line, granted)

    def _serve_waiting(self) -> None:
        while lines := [line for line in self._waiting if self._may_run(line)]:
            line = min(lines, key=lambda line: self._places.of_group(line[0]))
            granted = next(iter(self._waiting[line]))
            self._places.charge(self._take(line, granted), 1)
            self._running.add(line)
            granted.set()

    def _may_run(self, line: _Line) -> bool:
        return line not in self._running and self._places.fits(next(iter(self._waiting[line].values())))

    def _take(self, line: _Line, granted: anyio.Event) -> Holder:
        """Take a computation out of its line, which becomes the last one."""
        waiting = self._waiting.pop(line)
        holder = waiting.pop(granted)
        if waiting:
            self._waiting[line] = waiting
        return holder
