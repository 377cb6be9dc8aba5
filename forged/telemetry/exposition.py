"""What scrapers are sent.

Law: however many scrape, the numbers are read and put into words once for all of them, and the event loop is free
between one family of metrics and the next. What is sent is of one moment, and no older than `EXPOSITION_AGE_MAX_S`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

EXPOSITION_AGE_MAX_S = 1.0


class Exposition:
    """The text, made when somebody asks for it."""

    def __init__(self, collector: Collector, now: Callable[[], float]) -> None:
        self.made = 0
        """How many times."""
        self._collector = collector
        self._now = now
        self._making = asyncio.Lock()
        self._text = b""
        self._read_at: float | None = None

    async def text(self) -> bytes:
        """As it was made for somebody a moment ago, or anew."""
        async with self._making:
            if self._read_at is None or self._now() - self._read_at > EXPOSITION_AGE_MAX_S:
                await self._make()
            return self._text

    async def _make(self) -> None:
        read_at, families = self._now(), list(self._collector.collect())
        parts: list[bytes] = []
        for family in families:
            parts.append(generate_latest(_Alone(family)))
            await asyncio.sleep(0)
        self._text, self._read_at = b"".join(parts), read_at
        self.made += 1


class _Alone(Collector):
    """One family, as the library wants it."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return (self._family,)
