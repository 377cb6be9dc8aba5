"""The composition root: builds the daemon from its components, starts and stops it.

Invariants:
- Every dependency is an argument; modules below this one do not know how it was created.
- Components start from the inside out (store, ledger, bus, listeners) and stop in reverse, so that no client connects
  before it can be served and nothing acknowledged is lost.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import anyio
from anyio.abc import TaskGroup, TaskStatus

from forged.auth.access import AccessPolicy
from forged.auth.messages import REQUESTS as TOKEN_REQUESTS
from forged.auth.model import Role
from forged.auth.service import TokenService
from forged.catalog.messages import REQUESTS as CATALOG_REQUESTS
from forged.catalog.ports import CheckpointFiles, JobsPort
from forged.catalog.service import CatalogService
from forged.catalog.settings import RULES as CATALOG_SETTINGS
from forged.catalog.settings import require_valid
from forged.clock import Clock
from forged.config import Config
from forged.config.messages import REQUESTS as CONFIG_REQUESTS
from forged.config.service import ConfigService, SettingsPort
from forged.data.audit.service import AuditService
from forged.data.computations import Compute
from forged.data.limits import ShardLimits
from forged.data.messages import REQUESTS as DATA_REQUESTS
from forged.data.service import DataService
from forged.elastic.config import require_meant
from forged.elastic.messages import REQUESTS as ELASTIC_REQUESTS
from forged.elastic.model import WorkerId
from forged.elastic.service import ElasticService
from forged.errors import ForgedError
from forged.host.agent import HostAgent, NoHost
from forged.host.messages import REQUESTS as SLOT_REQUESTS
from forged.host.ports import SlotsPort
from forged.host.service import SlotService
from forged.host.slot_table import SlotLimits
from forged.jobs.core import JobBook
from forged.jobs.model import REQUESTS as JOB_REQUESTS
from forged.jobs.model import SettingValue
from forged.jobs.service import JobService, TrainingPort
from forged.kernel.bus import Bus
from forged.kernel.journal import Journal
from forged.kernel.ledger import Ledger
from forged.kernel.messages import Decision, Request
from forged.kernel.store.port import BackedUp, Store
from forged.log import SILENT, Log
from forged.memory.book.device_table import MemoryLimits as DeviceMemoryLimits
from forged.memory.messages import REQUESTS as MEMORY_REQUESTS
from forged.memory.ports import EvictionPort, WorkersPort
from forged.memory.service import MemoryService
from forged.memory.settings import require_valid as require_valid_memory
from forged.metrics.messages import REQUESTS as METRICS_REQUESTS
from forged.metrics.service import MembersPort, MetricsService
from forged.metrics.stacks import StackService
from forged.net.server import Server
from forged.net.tickets import SideConnections, TicketRegistry
from forged.net.transport.connection import ConnectionLimits
from forged.net.transport.memory import MemoryLimits
from forged.net.transport.port import Address, Network
from forged.plugins.alarm_guard import Guard, Unguarded
from forged.plugins.host.call_limits import GRACE_S
from forged.plugins.host.plugin import PluginLimits
from forged.plugins.host.plugin_host import STOP_TIMEOUT_S, PluginHost, PluginSource
from forged.plugins.model import REQUESTS as PLUGIN_REQUESTS
from forged.registry.messages import REQUESTS as REGISTRY_REQUESTS
from forged.registry.ports import OriginsPort
from forged.registry.service import RegistryService
from forged.status.backup import BackupService
from forged.status.model import REQUESTS as STATUS_REQUESTS
from forged.status.model import DaemonStarted, DaemonStopping, Status
from forged.status.service import StatusService
from forged.telemetry.report import Reporter
from forged.version import VERSION

WRITE_BUFFER_BYTES_MAX = 64 << 10
"""Unread bytes up to this size are not counted against the limits of memory."""
CLOSE_S = 2.0
"""The time at the end of a stop: half to record it, half to close the sessions."""
STOP_BEYOND_DRAIN_S = STOP_TIMEOUT_S + GRACE_S + CLOSE_S
"""The time that a stop may take after the drain: stop actions of plugins, then `CLOSE_S`."""

REQUESTS: Sequence[type[Request[Any]]] = (
    *STATUS_REQUESTS,
    *CONFIG_REQUESTS,
    *JOB_REQUESTS,
    *TOKEN_REQUESTS,
    *ELASTIC_REQUESTS,
    *METRICS_REQUESTS,
    *DATA_REQUESTS,
    *CATALOG_REQUESTS,
    *REGISTRY_REQUESTS,
    *SLOT_REQUESTS,
    *MEMORY_REQUESTS,
    *PLUGIN_REQUESTS,
)


async def inline(act: Callable[[], Any]) -> Any:
    """Runs a computation in the event loop; for simulations, which have no threads."""
    return act()


@dataclass(frozen=True, slots=True)
class Ports:
    """The daemon's dependencies outside the process. No other process may have the store open."""

    clock: Clock
    network: Network
    pid: int
    uid: int
    open_store: Callable[[], Awaitable[Store]]
    token_bytes: Callable[[int], bytes] = secrets.token_bytes
    random: Random = field(default_factory=Random)
    log: Log = SILENT
    log_lines_lost: Callable[[], int] = lambda: 0
    settings: SettingsPort = field(default_factory=SettingsPort)
    plugins: Sequence[PluginSource] = ()
    guard: Guard = field(default_factory=Unguarded)
    compute: Compute = inline
    """Runs long computations."""
    checkpoint_files: CheckpointFiles | None = None
    """The files of checkpoints; without it the daemon touches none."""
    host: HostAgent = field(default_factory=NoHost)
    """The host of the daemon, with its memory for slots."""


class Daemon:
    """The control plane; created by `Daemon.running`."""

    def __init__(self, config: Config, ports: Ports, store: Store) -> None:
        self.config = config
        self.store = store
        self.started_at = ports.clock.monotonic()
        self.http: str | None = None
        """The URL of health and metrics, if they are served."""
        self._ports = ports
        self._has_started = False
        self._make_kernel()
        self._make_services()
        self._make_training()
        self._make_catalog_services()
        self._make_memory_services()
        # The order in which they are loaded from the store.
        training = (self.jobs, self.elastic, self.metrics, self.data, self.audit)
        for owner in (*training, self.catalog, self.registry, self.slots, self.memory, self.tokens):
            self.ledger.register(owner)
        self.server = self._make_server()
        self.server.on_client_connected.append(self.elastic.arrived)
        self.server.on_client_gone.append(self.elastic.connection_lost)
        self.plugins = self._make_plugin_host()

    def _make_kernel(self) -> None:
        config, clock = self.config, self._ports.clock
        self.journal = Journal(config.journal_facts_max, config.journal_bytes_max)
        self.bus = Bus(clock, backlog_max=config.backlog_max, source=self._ports.random)
        self.ledger = Ledger(self.store, self.journal, clock, self.bus)
        self.reporter = Reporter(
            self._ports.log, self.bus, self.ledger, clock, facts_per_s_max=config.log_facts_per_s_max
        )

    def _make_services(self) -> None:
        config, ports, clock = self.config, self._ports, self._ports.clock
        training = TrainingPort(
            generation=lambda job: self.elastic.generation(job),
            workers=lambda job: self.elastic.workers_at_work(job),
            require=_require_settings,
        )
        copy = self.store.backup if isinstance(self.store, BackedUp) else None
        self.settings = ConfigService(self.bus, ports.settings, self._apply, config)
        self.jobs = JobService(self.bus, clock, JobBook(), training)
        self.tokens = TokenService(self.bus, clock, _policy(config, ports.uid), self._check_rights)
        self.status = StatusService(self.bus, self.journal, self._read_status)
        self.tickets = TicketRegistry(clock, ports.token_bytes)
        self.sides = SideConnections(self.tickets)
        self.backup = BackupService(self.bus, self.tickets, copy, Path(config.data_dir))

    def _make_training(self) -> None:
        config, ports, clock = self.config, self._ports, self._ports.clock
        self.elastic = ElasticService(self.bus, clock, self._is_refused, ports.token_bytes)
        self.metrics = MetricsService(
            self.bus,
            clock,
            MembersPort(
                rank=self.elastic.registered_rank,
                generation=self.elastic.generation,
                registered=self.elastic.registered_workers,
            ),
        )
        self.stacks = StackService(
            self.bus,
            self.elastic.registered_rank,
            lambda client, request, timeout_s: self.server.ask(client, request, timeout_s),
        )
        self.data = DataService(self.bus, clock, ports.compute, ports.log, limits=_shard_limits(config))
        self.audit = AuditService(self.bus, ports.log)

    def _make_catalog_services(self) -> None:
        """Make the checkpoint catalogue and the model registry, which ask each other."""
        config, ports, clock = self.config, self._ports, self._ports.clock
        self.catalog = CatalogService(
            self.bus,
            clock,
            JobsPort(
                settings=self.jobs.settings,
                step=self.elastic.committed_step,
                generation=self.elastic.generation,
                is_registered=self.elastic.is_registered,
            ),
            uid=ports.uid,
            defaults=_retention_defaults(config),
            roots=config.checkpoint_roots,
            bytes_max=config.catalog_bytes_max,
            models_of=lambda record: self.registry.state.models_of(record),
            files=ports.checkpoint_files,
            scrub_bytes_per_s=config.scrub_bytes_per_s,
            log=ports.log,
        )
        self.registry = RegistryService(
            self.bus,
            clock,
            OriginsPort(
                settings=self.jobs.settings, checkpoint=self.catalog.book.table.record_at, audit=self.audit.summary
            ),
            bytes_max=config.registry_bytes_max,
            log=ports.log,
        )

    def _make_memory_services(self) -> None:
        """Make the services for memory of hosts (slots) and of GPUs."""
        config, ports, clock = self.config, self._ports, self._ports.clock
        self.slots = SlotService(
            self.bus,
            clock,
            ports.host,
            self.tickets,
            SlotsPort(
                is_registered=self.elastic.is_registered,
                is_trusted=self.catalog.is_trusted,
                is_managed=self.catalog.is_root,
                checkpoint_at=self.catalog.book.table.checkpoint_at,
                verify_again=self.catalog.verify_again,
            ),
            ports.token_bytes,
            ports.random,
            history=self.store.history,
            limits=_slot_limits(config),
            log=ports.log,
        )
        self.memory = MemoryService(
            self.bus,
            clock,
            WorkersPort(
                is_registered=self.elastic.is_registered,
                registered=self.elastic.registered_workers,
                generation=self.elastic.generation,
            ),
            EvictionPort(settings=self.jobs.settings, is_saved=self.catalog.book.table.has_complete),
            limits=_device_memory_limits(config),
            default_eviction=config.memory_eviction,
            log=ports.log,
        )

    def _make_server(self) -> Server:
        config = self.config
        return Server(
            self._ports.network,
            self.bus,
            self.journal,
            self._ports.clock,
            history=self.store.history,
            identify=self.tokens.identify,
            limits=_limits(config),
            connections_max=config.connections_max,
            handshakes_max=config.handshakes_max,
            memory=_memory_limits(config),
            side_connection=self.sides.accept,
            log=self._ports.log,
        )

    def _make_plugin_host(self) -> PluginHost:
        return PluginHost(
            self.bus,
            self._ports.clock,
            self._ports.log,
            self._ports.guard,
            settings=self.config.plugins,
            directory=Path(self.config.data_dir) / "plugins",
            limits=_plugin_limits(self.config),
        )

    @classmethod
    @asynccontextmanager
    async def running(
        cls, config: Config, ports: Ports, *, extend: Callable[[Daemon], None] = lambda daemon: None
    ) -> AsyncIterator[Daemon]:
        """Run a daemon inside the block and stop it in order at the end.

        `extend` may register handlers on the bus before it is sealed.
        """
        store = await ports.open_store()
        failure: ForgedError | None = None
        try:
            daemon = cls(config, ports, store)
            extend(daemon)
            # After all handlers that plugins may observe, wrap or replace.
            daemon.plugins.load(ports.plugins)
            # Before anything has started, so that nothing has to be stopped if it raises.
            daemon.bus.seal(REQUESTS, daemon.ledger)
            async with anyio.create_task_group() as tasks:
                try:
                    await daemon._start(tasks)
                    yield daemon
                except ForgedError as error:
                    # Raised outside the task group, which would wrap it in an exception group.
                    failure = error
                finally:
                    with anyio.CancelScope(shield=True):
                        await daemon._stop()
                    tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await store.close()
        if failure is not None:
            raise failure

    @property
    def listening(self) -> list[str]:
        """The addresses for workers and clients, without the Unix socket."""
        return [str(address) for address in self.server.addresses if address.scheme != "unix"]

    async def _start(self, tasks: TaskGroup) -> None:
        self.backup.clear()
        await self.ledger.start()
        tasks.start_soon(self.ledger.run)
        await tasks.start(self.bus.run)
        if self._ports.log.hears("error"):
            tasks.start_soon(self.reporter.run)
        await tasks.start(self.sides.run)
        await tasks.start(self.elastic.run)
        await tasks.start(self.catalog.work.run)
        await tasks.start(self.slots.run)
        await tasks.start(self.memory.run)
        tasks.start_soon(self.server.run)
        await self.server.listen(Address("unix", path=self.config.socket))
        for address in self.config.listen:
            await self.server.listen(Address.parse(address))
        if self.config.http:
            await tasks.start(self._serve_http, Address.parse(self.config.http))
        # Only now: a daemon that cannot listen has not started.
        self._has_started = True
        tasks.start_soon(self._announce)
        await tasks.start(self.plugins.run)

    async def _serve_http(self, address: Address, *, task_status: TaskStatus[None]) -> None:
        """Serve health checks and metrics until cancelled."""
        # aiohttp takes longer to import than the rest of the daemon.
        from forged.telemetry.checkpoint_metrics import CheckpointCollector
        from forged.telemetry.http import HttpServer
        from forged.telemetry.memory_metrics import MemoryCollector
        from forged.telemetry.model_metrics import ModelCollector
        from forged.telemetry.training_metrics import TrainingCollector

        table = self.slots.table
        checkpoints = CheckpointCollector(
            self.bus,
            self.catalog.book.table.index,
            lambda job: self.elastic.workers_at_work(job) > 0,
            lambda: (table.shares.used, table.limits.bytes_max),
            self._ports.clock.wall,
        )
        server = HttpServer(
            self.bus,
            self.ledger,
            self.server,
            self.tokens.identify,
            self._ports.log_lines_lost,
            lambda: self.plugins.views,
            (
                checkpoints,
                ModelCollector(self.bus, self.registry.state),
                MemoryCollector(self.memory.table),
                TrainingCollector(self.metrics.table, self._ports.clock),
            ),
        )
        async with server.open(address) as listening:
            self.http = f"http://{listening.host}:{listening.port}"
            task_status.started()
            await anyio.sleep_forever()

    async def _announce(self) -> None:
        """Record the start as soon as the store accepts writes."""
        await self.ledger.writable()
        fact = DaemonStarted(VERSION, self._ports.pid, self.ledger.term)
        self.ledger.append(Decision(None, (fact,)), origin="start")

    async def _stop(self) -> None:
        await self.server.stop_listening()
        self.server.stop_admitting()
        self.memory.stop_waiting()
        with anyio.move_on_after(self.config.drain_timeout_s):
            await self.bus.drain()
        await self.plugins.stop()
        with anyio.move_on_after(CLOSE_S / 2):
            await self._record_stop()
        await self.server.close_sessions(CLOSE_S / 2)

    async def _record_stop(self) -> None:
        """Store the positions of the followers and the orderly stop."""
        try:
            self.ledger.require_writable()
            self.bus.save_cursors()
            facts = (DaemonStopping(self._ports.pid, "stop requested"),) if self._has_started else ()
            await self.ledger.append(Decision(None, facts), origin="stop").wait()
        except ForgedError:
            # A full or broken disk does not delay the stop: acknowledged decisions are durable already.
            return

    def _apply(self, config: Config) -> None:
        """Apply settings that may change while the daemon runs."""
        self.config = config
        self.journal.facts_max = config.journal_facts_max
        self.journal.bytes_max = config.journal_bytes_max
        self.bus.backlog_max = config.backlog_max
        self.reporter.set_limits(facts_per_s_max=config.log_facts_per_s_max)
        self.server.set_limits(_limits(config), config.connections_max, config.handshakes_max, _memory_limits(config))
        self.data.limits = _shard_limits(config)
        self.tokens.set_policy(_policy(config, self._ports.uid))
        self.catalog.book.policies.set_defaults(_retention_defaults(config))
        self.catalog.set_roots(config.checkpoint_roots)
        self.catalog.work.scrub_bytes_per_s = config.scrub_bytes_per_s
        self.catalog.book.table.set_bytes_max(config.catalog_bytes_max)
        self.registry.state.set_bytes_max(config.registry_bytes_max)
        self.slots.table.set_limits(_slot_limits(config))
        self.memory.table.set_limits(_device_memory_limits(config))
        self.memory.table.default_eviction = config.memory_eviction
        self.plugins.set_limits(_plugin_limits(config))

    async def _is_refused(self, worker: WorkerId, seen_at: str) -> bool:
        """Whether the worker's host refuses connections to its port; asks only the host that the worker was seen at."""
        return await self._ports.network.refuses(Address("tcp", host=worker.hostname, port=worker.port), seen_at)

    def _check_rights(self) -> None:
        self.server.check_rights()

    def _read_status(self) -> Status:
        ledger = self.ledger
        write_error = ledger.unavailable or ledger.read_only
        return Status(
            version=VERSION,
            pid=self._ports.pid,
            uptime_s=round(self._ports.clock.monotonic() - self.started_at, 3),
            listen=self.listening,
            http=self.http,
            socket=self.config.socket,
            data_dir=self.config.data_dir,
            jobs=len(self.jobs.book),
            workers=self.elastic.workers,
            checkpoints=self.catalog.book.table.index.total_count(),
            plugins=[plugin.name for plugin in self.plugins.plugins.values() if plugin.active],
            connections=len(self.server.sessions),
            facts=len(self.journal),
            last_fact=self.journal.last,
            revision=ledger.durable,
            term=ledger.term,
            history=self.store.history,
            decisions=ledger.decisions,
            batches=ledger.batches,
            write_error=str(write_error) if write_error else None,
        )


def _require_settings(job: str, settings: Mapping[str, SettingValue]) -> None:
    """Refuse invalid settings of a job."""
    require_meant(job, settings)
    require_valid(job, settings)
    require_valid_memory(job, settings)


def _retention_defaults(config: Config) -> Mapping[str, SettingValue]:
    """The settings of the catalogue that jobs have without their own."""
    values = {key: getattr(config, key) for key in CATALOG_SETTINGS}
    # In the configuration, 0 stands for no limit.
    return {key: value for key, value in values.items() if isinstance(value, bool) or value}


def _policy(config: Config, uid: int) -> AccessPolicy:
    roles: Mapping[str, str] = config.certificate_roles
    return AccessPolicy(
        daemon_uid=uid,
        unix_other_role=_role(config.unix_other_role),
        certificate_roles={name: Role(role) for name, role in roles.items()},
        own_user_loopback_role=_role(config.own_user_loopback_role),
        anonymous_loopback_role=_role(config.anonymous_loopback_role),
    )


def _plugin_limits(config: Config) -> PluginLimits:
    return PluginLimits(
        failures_max=config.plugin_failures_max,
        facts_per_s_max=config.plugin_facts_per_s_max,
        block_max_s=config.plugin_block_max_s,
        load_timeout_s=config.plugin_load_timeout_s,
    )


def _role(name: str) -> Role | None:
    return None if name == "none" else Role(name)


def _limits(config: Config) -> ConnectionLimits:
    return ConnectionLimits(
        frame_bytes_max=config.frame_bytes_max,
        in_flight_max=config.in_flight_max,
        hello_timeout_s=config.hello_timeout_s,
        frame_timeout_s=config.frame_timeout_s,
        silence_max_s=config.silence_max_s,
        ping_after_s=config.silence_max_s / 3,
        write_buffer_bytes_max=WRITE_BUFFER_BYTES_MAX,
    )


def _slot_limits(config: Config) -> SlotLimits:
    return SlotLimits(
        config.slot_bytes_max, config.principal_slot_bytes_max, config.slots_max, config.principal_slots_max
    )


def _device_memory_limits(config: Config) -> DeviceMemoryLimits:
    return DeviceMemoryLimits(
        config.memory_devices_max,
        config.principal_memory_devices_max,
        config.memory_blocks_max,
        config.principal_memory_blocks_max,
        config.memory_waiting_max,
        config.principal_memory_waiting_max,
    )


def _shard_limits(config: Config) -> ShardLimits:
    return ShardLimits(config.job_shards_max, config.daemon_shards_max)


def _memory_limits(config: Config) -> MemoryLimits:
    return MemoryLimits(config.daemon_bytes_max, config.principal_bytes_max, config.connection_bytes_max)
