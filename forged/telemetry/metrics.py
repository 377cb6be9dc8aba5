"""The daemon's Prometheus metrics.

Invariants:
- Metrics are read from the components' own counters at scrape time; between scrapes they cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    StateSetMetricFamily,
)
from prometheus_client.registry import Collector

from forged.kernel.bus import Bus
from forged.kernel.bus.statistics import EXPONENT_MAX, EXPONENT_MIN, HandlerStatistics, Latency
from forged.kernel.ledger import Ledger
from forged.net.server import Server
from forged.plugins.model import PluginState, PluginView
from forged.version import VERSION

SHOWN_EXPONENTS = range(-20, 6)
"""Buckets from a microsecond to half a minute; the first and the last also count values outside."""
SHOWN_SIZES = range(11)
"""Buckets from one decision to the limit of one commit."""

_Handler = tuple[str, str, HandlerStatistics]


class Commits:
    """Duration and size of the ledger's commits."""

    def __init__(self) -> None:
        self.took = Latency()
        self.took_s = 0.0
        self.sizes = Latency()
        self.decisions = 0

    def observe(self, seconds: float, decisions: int) -> None:
        self.took.observe(seconds)
        self.took_s += seconds
        # A bucket excludes its bound; subtracting half a decision counts 2**n in the bucket bounded by 2**n.
        self.sizes.observe(decisions - 0.5)
        self.decisions += decisions


class DaemonCollector(Collector):
    """Collects the metrics of one daemon."""

    def __init__(
        self,
        bus: Bus,
        ledger: Ledger,
        server: Server,
        log_lines_lost: Callable[[], int],
        plugins: Callable[[], Iterable[PluginView]],
        further: Sequence[Collector] = (),
    ) -> None:
        self._bus = bus
        self._ledger = ledger
        self._server = server
        self._log_lines_lost = log_lines_lost
        self._plugins = plugins
        self._further = further
        """Collectors of parts of the daemon."""
        self._process = ProcessCollector(registry=None)
        self._commits = Commits()
        ledger.on_commit = self._commits.observe

    def collect(self) -> Iterable[Metric]:
        yield InfoMetricFamily("forged_build", "The running version", value={"version": VERSION})
        yield _counter("forged_log_lines_lost", "Log lines that could not be written", self._log_lines_lost())
        yield from self._process.collect()
        yield from self._store_metrics()
        yield from self._commit_metrics()
        yield from self._connection_metrics()
        yield from self._handler_metrics()
        yield from self._plugin_metrics()
        for collector in self._further:
            yield from collector.collect()

    def _store_metrics(self) -> Iterator[Metric]:
        ledger = self._ledger
        yield _counter("forged_decisions", "Decisions taken", ledger.decisions)
        yield _counter("forged_store_commits", "Batches of decisions made durable", ledger.batches)
        yield _counter("forged_store_failures", "Times that state was reloaded after a failed commit", ledger.failures)
        yield _gauge("forged_store_writable", "1 if the store accepts decisions", ledger.writable_now)
        yield _gauge("forged_revision", "The last durable revision", ledger.durable)
        yield _gauge("forged_pending_revisions", "Revisions not yet durable", ledger.revision - ledger.durable)
        yield _gauge("forged_term", "The number of the daemon's run", ledger.term)
        yield _gauge("forged_journal_facts", "Facts in the journal", len(ledger.journal))
        yield _gauge(
            "forged_remembered_replies", "Replies kept until the client acknowledges them", len(ledger.replies)
        )

    def _commit_metrics(self) -> Iterator[Metric]:
        commits = self._commits
        took = HistogramMetricFamily("forged_store_commit_seconds", "Seconds to make a batch durable")
        took.add_metric([], _buckets(commits.took, SHOWN_EXPONENTS), commits.took_s)
        sizes = HistogramMetricFamily("forged_store_commit_decisions", "Decisions per commit")
        sizes.add_metric([], _buckets(commits.sizes, SHOWN_SIZES), commits.decisions)
        yield from (took, sizes)

    def _connection_metrics(self) -> Iterator[Metric]:
        bus, sessions = self._bus, self._server.sessions
        yield _gauge("forged_connections", "Open connections", len(sessions))
        yield _gauge("forged_requests_in_flight", "Requests whose handlers have not finished", bus.dispatcher.in_flight)
        yield _gauge("forged_backlog", "Facts queued for built-in handlers", bus.backlog)
        yield _gauge("forged_congested", "1 while admission is closed to new requests", bus.congested)
        yield _counter("forged_facts_published", "Facts published", bus.published)

    def _handler_metrics(self) -> Iterator[Metric]:
        failed = CounterMetricFamily("forged_handler_failures", "Messages on which the handler failed", labels=_LABELS)
        dropped = CounterMetricFamily(
            "forged_handler_drops", "Facts dropped from the handler's mailbox", labels=_LABELS
        )
        took = HistogramMetricFamily(
            "forged_handler_seconds", "Seconds that the handler took per message", labels=_LABELS
        )
        for kind, name, statistics in self._handlers():
            labels = [kind, name]
            failed.add_metric(labels, statistics.failed)
            dropped.add_metric(labels, statistics.dropped)
            took.add_metric(labels, _buckets(statistics.latency, SHOWN_EXPONENTS), sum_value=None)
        queued = GaugeMetricFamily("forged_mailbox_facts", "Facts queued for the handler", labels=["handler"])
        quarantined = GaugeMetricFamily(
            "forged_handler_quarantined", "1 if the handler is quarantined", labels=["handler"]
        )
        for mailbox in self._bus.mailboxes.values():
            queued.add_metric([mailbox.name], len(mailbox.queue))
            quarantined.add_metric([mailbox.name], mailbox.quarantined)
        for follower in self._bus.followers.values():
            queued.add_metric([follower.name], follower.behind)
            quarantined.add_metric([follower.name], follower.paused)
        yield from (failed, dropped, took, queued, quarantined)

    def _plugin_metrics(self) -> Iterator[Metric]:
        states = StateSetMetricFamily("forged_plugin_state", "The state of the plugin", labels=["plugin"])
        failed = CounterMetricFamily("forged_plugin_failures", "Failures of the plugin", labels=["plugin"])
        published = CounterMetricFamily("forged_plugin_facts", "Facts published by the plugin", labels=["plugin"])
        for plugin in self._plugins():
            states.add_metric([plugin.name], {state.value: state is plugin.state for state in PluginState})
            failed.add_metric([plugin.name], plugin.failed)
            published.add_metric([plugin.name], plugin.published)
        yield from (states, failed, published)

    def _handlers(self) -> Iterator[_Handler]:
        for mailbox in self._bus.mailboxes.values():
            yield "fact", mailbox.name, mailbox.statistics
        for follower in self._bus.followers.values():
            yield "fact", follower.name, follower.statistics
        for slot in self._bus.slots.values():
            yield "signal", slot.name, slot.statistics
        for request, route in self._bus.requests.routes.items():
            yield "request", request.__name__, route.statistics


_LABELS = ["kind", "handler"]


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _buckets(latency: Latency, shown: range) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound; the last bound is infinite."""
    total = 0
    buckets: list[tuple[str, float]] = []
    for exponent in range(EXPONENT_MIN, EXPONENT_MAX + 1):
        total += latency.counts[exponent]
        if exponent in shown:
            buckets.append((f"{2.0**exponent:.9g}", total))
    return [*buckets, ("+Inf", total)]
