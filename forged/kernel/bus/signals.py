"""Signals: what was so a moment ago.

Law: of signals with the same job and key only the latest waits, and of those only so many; a handler that is slow sees
fewer, newer ones. Nothing is recorded and a failure is only counted.
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
"""How many signals may wait for one handler; beyond that the key that was new longest ago is let go."""

SignalHandler = Callable[[Any, Call], Awaitable[None] | None]


class SignalSlot:
    """The latest signals that one handler has not seen yet, one per job and key."""

    def __init__(
        self,
        name: str,
        handler: SignalHandler,
        now: Callable[[], float],
        broken: Callable[[str, BaseException], None] = lambda owner, error: None,
    ) -> None:
        self.name = name
        self.handler = handler
        self.statistics = HandlerStatistics()
        self._now = now
        self._broken = broken
        self._latest: dict[tuple[str, str | None, str], tuple[Signal, Call]] = {}
        self._wanted: asyncio.Future[None] | None = None

    def put(self, signal: Signal, call: Call) -> None:
        """Replace what waits under the signal's job and key."""
        key = (type(signal).__name__, signal.about, signal.key)
        if key in self._latest:
            self.statistics.coalesced += 1
        elif len(self._latest) >= KEYS_MAX:
            del self._latest[next(iter(self._latest))]
            self.statistics.dropped += 1
        self._latest[key] = (signal, call)
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)

    async def run(self) -> None:
        """Hand signals to the handler for ever."""
        while True:
            if self._latest:
                # They came while a handler was at work, or because of it, and others have their turns, too.
                await asyncio.sleep(0)
            else:
                self._wanted = asyncio.get_running_loop().create_future()
                await self._wanted
            taken, self._latest = self._latest, {}
            for signal, call in taken.values():
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
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a signal that fails is a signal that was lost
            self.statistics.failed += 1
            if not isinstance(error, ForgedError):
                self._broken(self.name, error)
        self.statistics.latency.observe(self._now() - started)
