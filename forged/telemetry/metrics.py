"""The daemon's numbers, as Prometheus reads them.

Law: nothing is counted twice. What the parts count for themselves is read when somebody scrapes, so being watched costs
nothing in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from forged.bus import Bus
from forged.bus.statistics import EXPONENT_MAX, EXPONENT_MIN, HandlerStatistics, Latency
from forged.ledger import Ledger
from forged.net.server import Server

SHOWN_EXPONENTS = range(-20, 6)
"""Buckets from a microsecond to half a minute; what is outside is counted in the first and the last."""

_Handler = tuple[str, str, HandlerStatistics]


class DaemonCollector(Collector):
    """Reads the parts of a daemon when it is scraped."""

    def __init__(self, bus: Bus, ledger: Ledger, server: Server) -> None:
        self._bus = bus
        self._ledger = ledger
        self._server = server

    def collect(self) -> Iterable[Metric]:
        """All families."""
        yield from self._of_the_store()
        yield from self._of_the_edges()
        yield from self._of_the_handlers()

    def _of_the_store(self) -> Iterator[Metric]:
        ledger = self._ledger
        yield _counter("forged_decisions", "Decisions taken", ledger.decisions)
        yield _counter("forged_store_commits", "Batches of decisions made durable", ledger.batches)
        yield _counter("forged_store_failures", "Times that state had to be read anew", ledger.failures)
        yield _gauge("forged_store_writable", "Whether decisions can be written now", ledger.writable_now)
        yield _gauge("forged_revision", "The last durable revision", ledger.durable)
        yield _gauge("forged_pending_revisions", "Revisions that are not durable yet", ledger.revision - ledger.durable)
        yield _gauge("forged_term", "How many times the store was taken over", ledger.term)
        yield _gauge("forged_journal_facts", "Facts that are kept", len(ledger.journal))
        yield _gauge("forged_remembered_replies", "Replies that wait for their acknowledgement", len(ledger.replies))

    def _of_the_edges(self) -> Iterator[Metric]:
        bus, sessions = self._bus, self._server.sessions
        yield _gauge("forged_connections", "Open connections", len(sessions))
        yield _gauge("forged_requests_in_flight", "Requests whose handlers await something", bus.desk.in_flight)
        yield _gauge("forged_backlog", "Facts that wait for built-in handlers", bus.backlog)
        yield _gauge("forged_congested", "Whether requests have to wait at the edges", bus.congested)
        yield _counter("forged_facts_published", "Facts published", bus.published)

    def _of_the_handlers(self) -> Iterator[Metric]:
        failed = CounterMetricFamily("forged_handler_failures", "Messages that a handler failed on", labels=_LABELS)
        dropped = CounterMetricFamily("forged_handler_drops", "Facts that a handler missed", labels=_LABELS)
        took = HistogramMetricFamily("forged_handler_seconds", "How long a handler took per message", labels=_LABELS)
        for kind, name, statistics in self._handlers():
            labels = [kind, name]
            failed.add_metric(labels, statistics.failed)
            dropped.add_metric(labels, statistics.dropped)
            took.add_metric(labels, _buckets(statistics.latency), sum_value=None)
        queued = GaugeMetricFamily("forged_mailbox_facts", "Facts that wait for a handler", labels=["handler"])
        quarantined = GaugeMetricFamily("forged_handler_quarantined", "Whether it was given up", labels=["handler"])
        for mailbox in self._bus.mailboxes.values():
            queued.add_metric([mailbox.name], len(mailbox.queue))
            quarantined.add_metric([mailbox.name], mailbox.quarantined)
        yield from (failed, dropped, took, queued, quarantined)

    def _handlers(self) -> Iterator[_Handler]:
        for mailbox in self._bus.mailboxes.values():
            yield "fact", mailbox.name, mailbox.statistics
        for slot in self._bus.slots.values():
            yield "signal", slot.name, slot.statistics
        for request, route in self._bus.requests.routes.items():
            yield "request", request.__name__, route.statistics


_LABELS = ["kind", "handler"]


def exposition(collector: Collector) -> bytes:
    """What a scraper is sent."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _buckets(latency: Latency) -> list[tuple[str, float]]:
    """Counts of all durations up to each bound, the last without one."""
    total = 0
    buckets: list[tuple[str, float]] = []
    for exponent in range(EXPONENT_MIN, EXPONENT_MAX + 1):
        total += latency.counts[exponent]
        if exponent in SHOWN_EXPONENTS:
            buckets.append((f"{2.0**exponent:.9g}", total))
    return [*buckets, ("+Inf", total)]
