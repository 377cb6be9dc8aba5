"""Delivery of signals to one handler.

Invariants:
- Of the signals of one client with the same type, job and key only the latest waits. No client replaces what another
  has sent. At most `KEYS_MAX` wait in all, and beyond that the job with most of them loses its oldest.
- Signals are not journalled; a failure is counted only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from forged.errors import ForgedError
from forged.kernel.bus.cancellation import is_cancelled
from forged.kernel.bus.statistics import HandlerStatistics
from forged.kernel.messages import Call, Signal

KEYS_MAX = 10_000
"""The maximum number of waiting signals per handler."""

SignalHandler = Callable[[Any, Call], Awaitable[None] | None]


class SignalSlot:
    """The waiting signals of one handler, one per client, type, job and key."""

    def __init__(
        self,
        name: str,
        handler: SignalHandler,
        now: Callable[[], float],
        on_bug: Callable[[str, BaseException], None] = lambda owner, error: None,
    ) -> None:
        self.name = name
        self.handler = handler
        self.statistics = HandlerStatistics()
        self._now = now
        self._on_bug = on_bug
        self._latest: dict[str | None, dict[tuple[bytes, str, str], tuple[Signal, Call]]] = {}
        """By job, and then by client, type and key."""
        self._waiting = 0
        self._wanted: asyncio.Future[None] | None = None

    def put(self, signal: Signal, call: Call) -> None:
        """Add the signal, replacing a waiting one of the same client with the same type, job and key."""
        key = (call.client, type(signal).__name__, signal.key)
        of_job = self._latest.setdefault(signal.about, {})
        if key in of_job:
            self.statistics.coalesced += 1
        elif self._waiting < KEYS_MAX:
            self._waiting += 1
        else:
            largest = max(self._latest.values(), key=len)
            del largest[next(iter(largest))]
            self.statistics.dropped += 1
        of_job[key] = (signal, call)
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)

    async def run(self) -> None:
        """Call the handler with waiting signals until cancelled."""
        while True:
            if self._latest:
                # New signals came during the handler calls: let other tasks run before the next ones.
                await asyncio.sleep(0)
            else:
                self._wanted = asyncio.get_running_loop().create_future()
                await self._wanted
            taken, self._latest, self._waiting = self._latest, {}, 0
            for of_job in taken.values():
                for signal, call in of_job.values():
                    await self._handle(signal, call)

    async def _handle(self, signal: Signal, call: Call) -> None:
        started = self._now()
        try:
            result = self.handler(signal, call)
            if result is not None:
                await result
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            self.statistics.failed += 1
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a handler's failure must not end the task
            self.statistics.failed += 1
            if not isinstance(error, ForgedError):
                self._on_bug(self.name, error)
        self.statistics.latency.observe(self._now() - started)
