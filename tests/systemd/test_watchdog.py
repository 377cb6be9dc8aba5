from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from forged.errors import ConfigError, Unavailable
from forged.kernel.messages import Call, Decision, Nothing, Record, Request
from forged.status.model import PingDaemon
from forged.systemd.watchdog import BusProbe, feed_watchdog, watchdog_interval_s
from tests.faulty_store import FaultyStore, full
from tests.kernel_fixture import Added, Echoed, Kernel, on_virtual_time, running
from tests.systemd.service_manager import FakeServiceManager

INTERVAL_S = 10.0
FED = ["WATCHDOG=1"]


class TestTheInterval:
    def test_is_a_third_of_the_timeout(self) -> None:
        assert watchdog_interval_s({"WATCHDOG_USEC": "30000000"}, 7) == 10
        assert watchdog_interval_s({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}, 7) == 10

    @pytest.mark.parametrize(
        "environment",
        [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_PID": "7"}, {"WATCHDOG_USEC": "3000", "WATCHDOG_PID": "8"}],
    )
    def test_is_none_without_a_timeout_for_this_process(self, environment: dict[str, str]) -> None:
        assert watchdog_interval_s(environment, 7) is None
        assert environment == {}

    @pytest.mark.parametrize("name", ["WATCHDOG_USEC", "WATCHDOG_PID"])
    def test_that_is_invalid_is_a_config_error(self, name: str) -> None:
        environment = {"WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"} | {name: "soon"}
        with pytest.raises(ConfigError, match=f"{name} must be a whole number, got 'soon'"):
            watchdog_interval_s(environment, 1)
        assert environment == {}


@asynccontextmanager
async def fed(
    manager: FakeServiceManager,
    store: FaultyStore | None = None,
    register: Callable[[Kernel], object] = lambda kernel: None,
) -> AsyncIterator[Kernel]:
    """A kernel with a running watchdog feed."""

    def serve(kernel: Kernel) -> None:
        kernel.bus.serve(PingDaemon, lambda *_: Nothing(), owner="status")
        register(kernel)

    async with running(store, serve) as kernel, anyio.create_task_group() as tasks:
        tasks.start_soon(feed_watchdog, manager.notifier, INTERVAL_S, BusProbe(kernel.bus, INTERVAL_S))
        # Between two feeds, so that nothing that is counted falls on the border.
        await anyio.sleep(INTERVAL_S / 2)
        yield kernel
        tasks.cancel_scope.cancel()


async def feeds(manager: FakeServiceManager, *, intervals: int = 6) -> int:
    """How often the watchdog is fed from now on, in so many intervals."""
    manager.received()
    await anyio.sleep(intervals * INTERVAL_S)
    messages = manager.received()
    assert all(message == FED for message in messages)
    return len(messages)


@on_virtual_time
async def test_watchdog_is_fed_every_interval_while_the_bus_is_idle(manager: FakeServiceManager) -> None:
    async with fed(manager):
        assert await feeds(manager) == 6


@on_virtual_time
async def test_watchdog_is_fed_while_busy_queues_progress(manager: FakeServiceManager) -> None:
    async def slow(record: Record) -> None:
        await anyio.sleep(INTERVAL_S / 2)

    async with fed(manager, register=lambda kernel: kernel.bus.on(Added, slow, name="slow")) as kernel:
        for _ in range(100):
            await kernel.add()
        assert await feeds(manager) == 6
        assert kernel.bus.backlog > 50


@on_virtual_time
async def test_watchdog_is_not_fed_while_a_built_in_handler_hangs(manager: FakeServiceManager) -> None:
    release = anyio.Event()

    async def stuck(record: Record) -> None:
        await release.wait()

    async with fed(manager, register=lambda kernel: kernel.bus.on(Added, stuck, name="stuck")) as kernel:
        assert await feeds(manager) == 6
        await kernel.add()
        assert await feeds(manager, intervals=2) <= 1
        assert await feeds(manager) == 0
        release.set()
        await anyio.sleep(INTERVAL_S)
        assert await feeds(manager) == 6


@on_virtual_time
async def test_stuck_queue_is_logged(manager: FakeServiceManager) -> None:
    async with fed(manager, register=lambda kernel: kernel.bus.on(Added, forever, name="stuck")) as kernel:
        await kernel.add()
        probe = BusProbe(kernel.bus, INTERVAL_S)
        await probe()
        assert await probe() == ["handler stuck"]
        store = kernel.store
        assert isinstance(store, FaultyStore)
        store.block()
        kernel.submit()
        with anyio.move_on_after(INTERVAL_S) as scope:
            await probe()
        assert scope.cancelled_caught


async def forever(record: Record) -> None:
    await anyio.sleep_forever()


@on_virtual_time
async def test_watchdog_is_fed_while_a_plugin_handler_hangs(manager: FakeServiceManager) -> None:
    def register(kernel: Kernel) -> None:
        kernel.bus.on(Added, forever, name="plugin", lossless=False)

    async with fed(manager, register=register) as kernel:
        for _ in range(5):
            await kernel.add()
        assert await feeds(manager) == 6


@on_virtual_time
async def test_watchdog_is_not_fed_while_a_commit_hangs(manager: FakeServiceManager) -> None:
    store = FaultyStore()
    async with fed(manager, store) as kernel:
        store.block()
        kernel.submit()
        await store.entered.wait()
        assert await feeds(manager, intervals=2) <= 1
        assert await feeds(manager) == 0
        store.unblock()
        await anyio.sleep(INTERVAL_S)
        assert await feeds(manager) == 6


async def hang(request: Request[Any], call: Call, proceed: Callable[[Request[Any]], Any]) -> Any:
    await anyio.sleep_forever()


@on_virtual_time
async def test_watchdog_is_fed_while_a_plugin_wrapper_of_ping_hangs(manager: FakeServiceManager) -> None:
    async with fed(manager, register=lambda kernel: kernel.bus.wrap(PingDaemon, hang, owner="plugin")):
        await anyio.sleep(INTERVAL_S)
        assert await feeds(manager) == 6


@on_virtual_time
async def test_hanging_plugin_wrapper_does_not_hide_a_hanging_commit(manager: FakeServiceManager) -> None:
    store = FaultyStore()
    async with fed(manager, store, lambda kernel: kernel.bus.wrap(PingDaemon, hang, owner="plugin")) as kernel:
        store.block()
        kernel.submit()
        await store.entered.wait()
        await anyio.sleep(2 * INTERVAL_S)
        assert await feeds(manager) == 0


@on_virtual_time
async def test_watchdog_is_fed_when_the_probe_request_is_refused(manager: FakeServiceManager) -> None:
    def refuse(request: PingDaemon, call: Call) -> Nothing:
        raise Unavailable("busy", "not now", "try again")

    async with fed(manager, register=lambda kernel: kernel.bus.replace(PingDaemon, refuse, owner="plugin")):
        assert await feeds(manager) == 6


@on_virtual_time
async def test_watchdog_is_fed_while_the_disk_is_full(manager: FakeServiceManager) -> None:
    async def echo(record: Record) -> Decision[None]:
        return Decision(None, (Echoed(record.id),))

    store = FaultyStore()
    async with fed(manager, store, lambda kernel: kernel.bus.on(Added, echo, name="echo", durable=True)) as kernel:
        for _ in range(5):
            await kernel.add()
        store.commit_error = full()
        with pytest.raises(Unavailable):
            await kernel.add()
        await anyio.sleep(INTERVAL_S)
        assert not kernel.ledger.writable_now
        assert await feeds(manager) == 6


@on_virtual_time
async def test_late_probe_is_repeated_at_once(manager: FakeServiceManager) -> None:
    asked = []

    async def probe() -> list[str]:
        asked.append(anyio.current_time())
        if len(asked) == 1:
            await anyio.sleep_forever()
        return []

    async with anyio.create_task_group() as tasks:
        began = anyio.current_time()
        tasks.start_soon(feed_watchdog, manager.notifier, INTERVAL_S, probe)
        await anyio.sleep(INTERVAL_S * 1.5)
        tasks.cancel_scope.cancel()
    assert [at - began for at in asked] == [0, INTERVAL_S]
    assert manager.received() == [FED]
