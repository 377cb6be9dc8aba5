"""Concurrent scrapes share one text."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

import anyio
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from forged.telemetry.exposition import EXPOSITION_AGE_MAX_S, Exposition
from tests.net.manual_daemon import ManualClock


class Numbers(Collector):
    """Many families, and how often they were read."""

    def __init__(self, families: int = 50) -> None:
        self.reads = 0
        self._families = families

    def collect(self) -> Iterable[Metric]:
        self.reads += 1
        return list(self._all())

    def _all(self) -> Iterator[Metric]:
        for number in range(self._families):
            yield GaugeMetricFamily(f"family_{number}", "Some number", value=self.reads)


async def test_concurrent_scrapes_share_one_rendered_text() -> None:
    numbers, clock = Numbers(), ManualClock()
    exposition = Exposition(numbers, clock.monotonic)
    texts = await asyncio.gather(*(exposition.text() for _ in range(100)))
    assert numbers.reads == exposition.made == 1
    assert len(set(texts)) == 1
    families = list(text_string_to_metric_families(texts[0].decode()))
    assert [family.name for family in families] == [f"family_{number}" for number in range(50)]


async def test_expired_text_is_rendered_again() -> None:
    numbers, clock = Numbers(1), ManualClock()
    exposition = Exposition(numbers, clock.monotonic)
    first = await exposition.text()
    clock.now += EXPOSITION_AGE_MAX_S
    assert await exposition.text() is first
    clock.now += 0.01
    assert b"family_0 2.0" in await exposition.text()


async def test_rendering_yields_between_metric_families() -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    await Exposition(Numbers(50), ManualClock().monotonic).text()
    counting.cancel()
    assert turns >= 50


async def test_cancelled_scrape_fails_no_other_scrape() -> None:
    numbers = Numbers()
    exposition = Exposition(numbers, ManualClock().monotonic)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await exposition.text()
    assert b"family_49 2.0" in await exposition.text()
