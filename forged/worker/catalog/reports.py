"""Reports of a worker to the checkpoint catalogue: sent in order, kept while the daemon is away.

Invariants:
- Adding a report neither waits nor raises, in any thread. A save does not notice that it is reported.
- Reports are sent in their order, each until the daemon has answered it. They may be sent again: a checkpoint is
  recognised by its path and its save id.
- At most `REPORTS_MAX` reports wait; then the oldest are dropped, with one warning.
- The reports outlive a session: what one could not deliver, the next one does.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import anyio

from forged.errors import ForgedError
from forged.log import Log
from forged.worker.registration import Registration

REPORTS_MAX = 1000

Send = Callable[[Registration], Awaitable[None]]


@dataclass(frozen=True, eq=False, slots=True)
class Report:
    """Something that the catalogue is to learn."""

    what: str
    """In words, for the log."""
    send: Send
    storage_path: str = ""
    """The checkpoint that it is about, if the catalogue may not know that yet."""


class CheckpointReports:
    """The reports of one worker."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._process = os.getpid()
        self._waiting: deque[Report] = deque(maxlen=REPORTS_MAX)
        self._current: Report | None = None
        """The report that is being sent; it stays here if that is interrupted."""
        self._has_dropped = False
        self._refusals: set[str] = set()
        """The codes of refusals that were logged."""
        self._wake: Callable[[], object] = lambda: None
        self._turn = anyio.Lock()

    def add(self, report: Report) -> None:
        """Send a report when the daemon is there. Callable from any thread; no effect in a forked child."""
        if os.getpid() != self._process:
            return
        if len(self._waiting) == REPORTS_MAX and not self._has_dropped:
            self._has_dropped = True
            why = "the daemon does not answer"
            self._log.warning("the oldest reports about checkpoints are dropped", reason=why, limit=REPORTS_MAX)
        self._waiting.append(report)
        self._wake()

    def withdraw(self, storage_path: str) -> bool | None:
        """Drop the reports about a checkpoint; false if one of them is being sent, None if there are none.

        Called on the session's loop.
        """
        if self._current is not None and self._current.storage_path == storage_path:
            return False
        waiting = [report for report in self._waiting.copy() if report.storage_path == storage_path]
        for report in waiting:
            with suppress(ValueError):
                self._waiting.remove(report)
        return True if waiting else None

    async def run(self, registration: Registration) -> None:
        """Send the reports of one session as they come."""
        loop, has_news = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            # The loop may be closed already.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(has_news.set)

        self._wake = wake
        while True:
            has_news.clear()
            await self.deliver(registration)
            await has_news.wait()

    async def deliver(self, registration: Registration) -> None:
        """Send all reports; returns when none is left, or the session is over."""
        async with self._turn:
            while self._current is not None or self._waiting:
                self._current = self._current or self._waiting.popleft()
                if not await self._is_sent(self._current, registration):
                    return
                self._current = None
        self._has_dropped = False

    async def _is_sent(self, report: Report, registration: Registration) -> bool:
        """Send a report; false if there is no daemon to send it to any more."""
        try:
            await report.send(registration)
        except ForgedError as error:
            if error.code == "client_closed":
                return False
            log = self._log.info if error.code in self._refusals else self._log.warning
            self._refusals.add(error.code)
            log("the daemon does not take a report about a checkpoint", report=report.what, reason=str(error))
        return True
