"""Start and stop of the daemon on virtual time; the test sends the frames of the clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from forged import daemon as daemon_module
from forged.auth.model import Role
from forged.config import Config
from forged.config.reload import LIVE
from forged.daemon import CLOSE_S, REQUESTS, Daemon, Ports
from forged.errors import ConfigError, ForgedError
from forged.jobs.model import CreateJob
from forged.kernel.ledger import FACT_PREFIX, read_all
from forged.kernel.messages import Call, Fact, Record, Request
from forged.kernel.store.port import Store, StoreCorrupt
from forged.kernel.store.sqlite import SqliteStore
from forged.metrics.stacks import DumpStacks
from forged.net.transport.port import Address, ProtocolFactory
from forged.net.transport.sockets import SystemNetwork
from forged.plugins.host.plugin_host import PluginSource
from forged.status.backup import NAME
from forged.status.model import DaemonStarted
from tests.client.daemon_runner import ReusableStore
from tests.faulty_store import FaultyStore, full
from tests.kernel_fixture import on_virtual_time
from tests.net.manual_daemon import (
    BYE,
    FAILURE,
    REPLY,
    REQUEST,
    ManualClock,
    ManualDaemon,
    ManualListener,
    ManualNetwork,
    frame,
    until,
)
from tests.plugins.plugin_fixture import source

DRAIN_TIMEOUT_S = 5.0
LONG_S = 10.0


class Linger(Request[str], frozen=True):
    """A request that is answered when the test allows it."""

    needs: ClassVar[Role] = Role.VIEWER
    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = None


class Unserved(Request[str], frozen=True):
    """A request without a handler."""


class Host:
    """A slow handler that records its calls and its release."""

    def __init__(self) -> None:
        self.busy = asyncio.Event()
        self.free = asyncio.Event()

    def extend(self, daemon: Daemon) -> None:
        daemon.bus.serve(Linger, self._answer, owner="test")

    async def _answer(self, request: Linger, call: Call) -> str:
        self.busy.set()
        await self.free.wait()
        return "done"


def a_store() -> FaultyStore:
    """A store that can be read after its daemon has stopped."""
    return FaultyStore(ReusableStore("h"))


@asynccontextmanager
async def a_daemon(
    store: Store | None = None,
    extend: Callable[[Daemon], None] = lambda daemon: None,
    network: ManualNetwork | None = None,
    plugins: Sequence[PluginSource] = (),
    **settings: Any,
) -> AsyncIterator[ManualDaemon]:
    async def open_store() -> Store:
        return store or a_store()

    network, clock = network or ManualNetwork(), ManualClock()
    config = replace(Config(socket="s", listen=(), drain_timeout_s=DRAIN_TIMEOUT_S), **settings)
    ports = Ports(clock, network, 1, 0, open_store, plugins=plugins)
    async with Daemon.running(config, ports, extend=extend) as daemon:
        yield ManualDaemon(daemon, network, clock)


class SlowNetwork(ManualNetwork):
    """A network whose listeners open slowly, or fail with a given error."""

    def __init__(self, error: ForgedError | None = None) -> None:
        super().__init__()
        self.opened: list[str] = []
        self._error = error

    async def listen(self, address: Address, factory: ProtocolFactory) -> ManualListener:
        await asyncio.sleep(LONG_S)
        if self._error is not None:
            raise self._error
        self.opened.append(str(address))
        return await super().listen(address, factory)


async def kinds_on_record(store: Store) -> list[str]:
    return [Record.read(entry.value).type for entry in await read_all(store, FACT_PREFIX)]


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


# Starting.


def test_daemon_checks_every_request_type_for_a_handler() -> None:
    declared = {request for request in Request.__subclasses__() if request.__module__.startswith("forged.")}
    # The daemon sends it itself, to pulses.
    assert declared == {*REQUESTS, DumpStacks}


@on_virtual_time
async def test_start_refuses_a_request_type_without_handler_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_module, "REQUESTS", (*REQUESTS, Unserved))
    with pytest.raises(ConfigError, match="Unserved") as refused:
        async with a_daemon():
            """Not reached."""
    assert refused.value.code == "requests_unsettled"


@on_virtual_time
async def test_start_refuses_a_request_type_with_two_handlers_by_name() -> None:
    def answer_too(daemon: Daemon) -> None:
        daemon.bus.serve(CreateJob, lambda request, call: None, owner="a plugin")

    with pytest.raises(ConfigError, match=r"a plugin.*CreateJob") as refused:
        async with a_daemon(extend=answer_too):
            """Not reached."""
    assert refused.value.code == "requests_unsettled"


@on_virtual_time
async def test_start_fails_with_the_error_of_an_unreadable_store() -> None:
    store = a_store()
    store.read_error = StoreCorrupt("store_corrupt", "it is damaged", "restore a backup")
    with pytest.raises(StoreCorrupt):
        async with a_daemon(store):
            """Not reached."""


@on_virtual_time
async def test_periodic_plugin_work_begins_when_all_listeners_are_open() -> None:
    network, began = SlowNetwork(), asyncio.Event()
    opened: list[list[str]] = []

    async def note_listeners() -> None:
        opened.append(list(network.opened))
        began.set()

    watching = source(lambda context: context.every(0.1, note_listeners))
    async with a_daemon(network=network, plugins=[watching], listen=("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")):
        await began.wait()
    assert opened[0] == ["unix://s", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]


@on_virtual_time
async def test_start_is_recorded_when_all_listeners_are_open() -> None:
    store, network = a_store(), SlowNetwork()
    seen: list[list[str]] = []

    def extend(daemon: Daemon) -> None:
        daemon.bus.on(DaemonStarted, see, name="test")

    async def see(record: Record) -> None:
        seen.append(list(network.opened))

    async with a_daemon(store, extend, network, listen=("tcp://127.0.0.1:1",)):
        await until(lambda: bool(seen))
    assert seen == [["unix://s", "tcp://127.0.0.1:1"]]
    assert await kinds_on_record(store) == ["DaemonStarted", "DaemonStopping"]


@on_virtual_time
async def test_daemon_that_cannot_listen_records_neither_start_nor_stop() -> None:
    store = a_store()
    in_use = ConfigError("address_in_use", "another process has it", "stop it")
    with pytest.raises(ConfigError) as refused:
        async with a_daemon(store, network=SlowNetwork(in_use)):
            """Not reached."""
    assert refused.value is in_use
    assert await kinds_on_record(store) == []


async def test_start_deletes_the_leftovers_of_an_interrupted_backup(tmp_path: Path) -> None:
    for name in (NAME, f"{NAME}.0123.new"):
        (tmp_path / name).write_bytes(b"half a copy")
    (tmp_path / "notes").write_bytes(b"somebody else's")

    async def open_store() -> SqliteStore:
        return await SqliteStore.open(tmp_path / "forged.sqlite3")

    config = Config(data_dir=str(tmp_path), socket=str(tmp_path / "s"), listen=())
    async with Daemon.running(config, Ports(ManualClock(), SystemNetwork(), 1, 0, open_store)):
        left = names_in(tmp_path)
    assert left >= {"forged.sqlite3", "notes"}
    assert not [name for name in left if name.startswith(NAME)]


# Settings that change.


def limits_in_force(daemon: Daemon) -> list[Any]:
    """What the daemon's parts go by of the settings that may change while it runs."""
    admitted, memory = daemon.server._table, daemon.memory.table
    shares = (
        admitted._connections,
        admitted._handshakes,
        daemon.server.memory._shares,
        daemon.catalog.book.table._shares,
        daemon.registry.state.shares,
        daemon.slots.table.shares,
        daemon.slots.table._numbers,
        memory.block_shares,
        memory.device_shares,
        memory.waiting_shares,
    )
    return [
        *((one._limit, one._reserve, one._each_max) for one in shares),
        (daemon.journal.facts_max, daemon.journal.bytes_max, daemon.bus.backlog_max, memory.default_eviction),
        (daemon.server.limits, daemon.server.memory._limits, daemon.data.limits, daemon.tokens._policy),
        (daemon.catalog.book.table.roots, daemon.catalog.work.scrub_bytes_per_s),
        (daemon.catalog.book.policies._defaults, daemon.plugins._caller.limits, daemon.reporter.facts._per_s_max),
    ]


def changed(key: str) -> Any:
    """Another value of a setting."""
    value = getattr(Config(), key)
    if isinstance(value, str):
        return {"checkpoint_metric": "accuracy", "memory_eviction": "cost"}.get(key, "viewer")
    if isinstance(value, bool):
        return not value
    if key == "certificate_roles":
        return {"a.example": "viewer"}
    return ("/data",) if isinstance(value, tuple) else value + 1


@on_virtual_time
@pytest.mark.parametrize("key", sorted(LIVE - {"drain_timeout_s", "log_level"}))
async def test_reloaded_setting_is_in_force_as_after_a_restart(key: str) -> None:
    async with a_daemon() as reloaded, a_daemon(**{key: changed(key)}) as restarted:
        before, wanted = limits_in_force(reloaded.daemon), limits_in_force(restarted.daemon)
        assert before != wanted
        reloaded.daemon._apply(restarted.daemon.config)
        assert limits_in_force(reloaded.daemon) == wanted


# Stopping.


@on_virtual_time
async def test_stop_answers_running_requests_before_goodbye_and_starts_no_new_ones() -> None:
    host = Host()
    async with a_daemon(extend=host.extend) as here:
        client = await here.greeted()
        client.request(1, "Linger")
        await host.busy.wait()
        stopping = asyncio.create_task(here.daemon._stop())
        await until(lambda: not client.transport.reading)
        # It was in flight already.
        client.protocol.data_received(frame([REQUEST, 2, 0, "PingDaemon", {}]))
        host.free.set()
        await stopping
        assert [message[:3] for message in client.heard()] == [[REPLY, 1, "done"], [BYE, 0, "the daemon is stopping"]]


@on_virtual_time
async def test_drain_over_its_timeout_is_cancelled_and_the_stop_is_recorded() -> None:
    host, store = Host(), a_store()
    async with a_daemon(store, host.extend) as here:
        client = await here.greeted()
        client.request(1, "Linger")
        await host.busy.wait()
        began = asyncio.get_running_loop().time()
    assert DRAIN_TIMEOUT_S <= asyncio.get_running_loop().time() - began <= DRAIN_TIMEOUT_S + CLOSE_S
    assert (await client.next(BYE))[2] == "the daemon is stopping"
    assert (await kinds_on_record(store))[-1] == "DaemonStopping"


@on_virtual_time
async def test_positions_of_durable_handlers_are_saved_after_a_cancelled_drain() -> None:
    host, store = Host(), a_store()

    async def watch(record: Record) -> None:
        """Handles all facts."""

    def extend(daemon: Daemon) -> None:
        host.extend(daemon)
        daemon.bus.on(Fact, watch, name="watcher", durable=True)

    async with a_daemon(store, extend, drain_timeout_s=0.0) as here:
        client = await here.greeted()
        await here.ask(client, "CreateJob", job="a")
        client.request(2, "Linger", acknowledged=1)
        await host.busy.wait()
        seen = here.daemon.bus.mailboxes["watcher"].position
    cursor = await store.get("cursor/watcher")
    assert cursor is not None
    assert int(cursor.value) >= seen > 0


@on_virtual_time
async def test_stop_time_is_bounded_by_drain_and_goodbye_timeouts() -> None:
    host, store = Host(), a_store()
    async with a_daemon(store, host.extend) as here:
        stuck = await here.greeted()
        stuck.transport.stop_reading()
        stuck.request(1, "Linger")
        stuck.request(2, "PingDaemon")
        await host.busy.wait()
        store.block()
        began = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - began <= DRAIN_TIMEOUT_S + CLOSE_S
    assert stuck.transport.aborted


@pytest.mark.parametrize("error", [full(), StoreCorrupt("store_corrupt", "it is damaged", "restore a backup")])
@on_virtual_time
async def test_clients_receive_goodbye_when_the_store_refuses_writes(error: ForgedError) -> None:
    store = a_store()
    async with a_daemon(store) as here:
        client = await here.greeted()
        store.commit_error = error
        client.request(1, "CreateJob", job="a")
        assert (await client.next(FAILURE))[3] == error.code
    assert (await client.next(BYE))[2] == "the daemon is stopping"


@on_virtual_time
async def test_exception_in_the_block_is_raised_even_if_the_store_fails() -> None:
    async def make_a_mistake() -> None:
        store = a_store()
        async with a_daemon(store) as here:
            client = await here.greeted()
            store.commit_error = StoreCorrupt("store_corrupt", "it is damaged", "restore a backup")
            client.request(1, "CreateJob", job="a")
            await client.next(FAILURE)
            raise ConfigError("mistaken", "a mistake", "mend it")

    with pytest.raises(ConfigError, match="a mistake"):
        await make_a_mistake()
