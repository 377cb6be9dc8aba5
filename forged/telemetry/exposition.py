"""The Prometheus text that `/metrics` returns.

Invariants:
- Concurrent scrapes share one text; it is at most `EXPOSITION_AGE_MAX_S` old and describes one moment.
- Rendering yields to the event loop between metric families.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

EXPOSITION_AGE_MAX_S = 1.0


class Exposition:
    """Renders the metrics on demand and caches the text."""

    def __init__(self, collector: Collector, now: Callable[[], float]) -> None:
        self.made = 0
        """How often the text was rendered."""
        self._collector = collector
        self._now = now
        self._making = asyncio.Lock()
        self._text = b""
        self._read_at: float | None = None

    async def text(self) -> bytes:
        async with self._making:
            if self._read_at is None or self._now() - self._read_at > EXPOSITION_AGE_MAX_S:
                await self._make()
            return self._text

    async def _make(self) -> None:
        read_at, families = self._now(), list(self._collector.collect())
        parts: list[bytes] = []
        for family in families:
            parts.append(generate_latest(_SingleFamily(family)))
            await asyncio.sleep(0)
        self._text, self._read_at = b"".join(parts), read_at
        self.made += 1


class _SingleFamily(Collector):
    """A collector of one family, because `generate_latest` takes collectors."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return (self._family,)
