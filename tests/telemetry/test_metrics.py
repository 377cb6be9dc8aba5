"""The metrics, read from the parts of a daemon."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_open_metrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as strictly_parsed
from prometheus_client.parser import text_string_to_metric_families

from forged.net.server import Server
from forged.plugins.model import PluginState, PluginView
from forged.telemetry.metrics import Commits, DaemonCollector, _buckets
from forged.version import VERSION
from tests.faulty_store import FaultyStore
from tests.kernel_fixture import Added, Kernel, on_virtual_time, running
from tests.net.manual_daemon import ManualClock, ManualNetwork


def registry_of(kernel: Kernel, lost: int = 0, plugins: Sequence[PluginView] = ()) -> CollectorRegistry:
    server = Server(ManualNetwork(), kernel.bus, kernel.journal, ManualClock(), history="h", identify=refuse)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(DaemonCollector(kernel.bus, kernel.ledger, server, lambda: lost, lambda: plugins))
    return registry


def refuse(*_: object) -> Any:
    raise AssertionError("it has no client")


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


@on_virtual_time
async def test_commits_are_counted_with_their_size_and_duration() -> None:
    store = FaultyStore()
    async with running(store) as kernel:
        registry = registry_of(kernel)
        await kernel.add()
        store.block()
        first = kernel.submit()
        await store.entered.wait()
        pending = [kernel.submit() for _ in range(5)]
        store.unblock()
        for one in (first, *pending):
            await one.wait()
        assert value(registry, "forged_store_commits_total") == 3
        assert value(registry, "forged_store_commit_seconds_count") == 3
        assert value(registry, "forged_store_commit_decisions_count") == 3
        assert value(registry, "forged_store_commit_decisions_sum") == 7
        assert value(registry, "forged_store_commit_decisions_bucket", le="1") == 2
        assert value(registry, "forged_store_commit_decisions_bucket", le="4") == 2
        assert value(registry, "forged_store_commit_decisions_bucket", le="8") == 3


def test_each_size_is_in_the_bucket_whose_bound_it_does_not_exceed() -> None:
    for size in (1, 2, 3, 4, 5, 8, 9, 512, 513, 1024):
        commits = Commits()
        commits.observe(0.01, size)
        for bound, count in _buckets(commits.sizes, range(11)):
            assert count == (size <= float(bound))


@on_virtual_time
async def test_queue_lengths_and_failures_of_handlers_are_shown() -> None:
    def fail(record: object) -> None:
        raise ZeroDivisionError

    def register(kernel: Kernel) -> None:
        kernel.bus.on(Added, fail, name="plugin", failures_max=1, lossless=False)

    async with running(register=register) as kernel:
        registry = registry_of(kernel)
        await kernel.add()
        await kernel.settle()
        assert value(registry, "forged_handler_failures_total", kind="fact", handler="plugin") == 1
        assert value(registry, "forged_handler_quarantined", handler="plugin") == 1
        assert value(registry, "forged_mailbox_facts", handler="plugin") == 0
        assert value(registry, "forged_handler_seconds_bucket", kind="request", handler="Add", le="+Inf") == 1
        assert value(registry, "forged_decisions_total") == kernel.ledger.decisions


@on_virtual_time
async def test_followers_are_shown_as_handlers() -> None:
    async def deliver(records: object) -> None:
        """Takes all."""

    async with running(register=lambda kernel: kernel.bus.follow(Added, deliver, name="follower")) as kernel:
        registry = registry_of(kernel)
        await kernel.add()
        await kernel.settle()
        assert value(registry, "forged_mailbox_facts", handler="follower") is not None
        assert value(registry, "forged_handler_quarantined", handler="follower") == 0


@on_virtual_time
async def test_the_build_the_process_and_the_log_are_shown() -> None:
    async with running() as kernel:
        registry = registry_of(kernel, lost=7)
        assert value(registry, "forged_build_info", version=VERSION) == 1
        assert value(registry, "forged_log_lines_lost_total") == 7
        for name in ("process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"):
            found = value(registry, name)
            assert found is not None
            assert found > 0


@on_virtual_time
async def test_metrics_are_valid_in_both_formats_and_have_help() -> None:
    async with running() as kernel:
        registry = registry_of(kernel)
        await kernel.add()
        families = list(text_string_to_metric_families(generate_latest(registry).decode()))
        assert len(families) > 20
        assert all(family.documentation for family in families)
        assert len({family.name for family in families}) == len(families)
        assert list(strictly_parsed(generate_open_metrics(registry).decode()))  # type: ignore[no-untyped-call]


@on_virtual_time
async def test_plugin_metrics_show_state_and_counts() -> None:
    plugin = PluginView(
        name="noisy",
        version="1",
        origin="here",
        state=PluginState.QUARANTINED,
        reason="it failed",
        parts=[],
        commands=[],
        handled=7,
        failed=5,
        published=3,
    )
    async with running() as kernel:
        registry = registry_of(kernel, plugins=[plugin])
        states = {
            state: value(registry, "forged_plugin_state", plugin="noisy", forged_plugin_state=state)
            for state in PluginState
        }
        assert states == {state: float(state is PluginState.QUARANTINED) for state in PluginState}
        assert value(registry, "forged_plugin_failures_total", plugin="noisy") == 5
        assert value(registry, "forged_plugin_facts_total", plugin="noisy") == 3
