"""Saying again and again that a worker lives.

Law: it is said with how soon it will be said again, so that nobody is taken for silent who goes by older settings. Who
is to say it more often does so at once.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio


class Heartbeat:
    """What is said again and again; `beat` says it, and is told how soon it will be said again."""

    def __init__(self, beat: Callable[[float], None], interval_s: float) -> None:
        self._beat = beat
        self._interval_s = interval_s
        self._changed = anyio.Event()

    def go_by(self, interval_s: float) -> None:
        """Say it so often from now on."""
        if interval_s != self._interval_s:
            self._interval_s = interval_s
            self._changed.set()

    async def go_on(self) -> None:
        """Say it for ever."""
        while True:
            self._changed = anyio.Event()
            self._beat(self._interval_s)
            with anyio.move_on_after(self._interval_s):
                await self._changed.wait()
