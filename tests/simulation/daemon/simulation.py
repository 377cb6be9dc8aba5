"""The service simulation: a daemon that is killed and restarted, reconnecting clients, and plugins, with faults.

Invariants:
- A run is a function of its seed: time is virtual, every random draw comes from the seed, and the trace is identical in
  every process.
- Faults end after `FAULTS_S`; then the cluster must recover within `RECOVERY_MAX_S`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import anyio
from anyio.abc import TaskGroup

from forged.client import ForgedClient
from forged.config import Config
from forged.daemon import Daemon, Ports
from forged.errors import ForgedError, RequestRefused, Unavailable
from forged.jobs.model import AddNote, NoteAdded, ShowJob
from forged.kernel.bus.requests import Proceed
from forged.kernel.ledger import FACT_PREFIX, read_all
from forged.kernel.messages import Call, Decision, Fact, Gap, Record
from forged.kernel.store.port import Store
from forged.net.transport.connection import ConnectionLimits
from forged.plugins.model import DisablePlugin, EnablePlugin, ListPlugins, PluginState, RunPluginCommand
from tests.simulation.base import ENDPOINT, FOUND_WITHIN_S, Simulation, simulated
from tests.simulation.daemon.oracle import Oracle
from tests.simulation.daemon.plugin_oracle import Lifetime
from tests.simulation.daemon.plugins import DaemonRun, PluginSet
from tests.simulation.daemon.tenants import HOSTILE, OPERATOR, QUIET, Tenants
from tests.simulation.environment.loop import VirtualClock, VirtualLoop
from tests.simulation.environment.store import LogStore
from tests.simulation.oracle import InvariantViolated

CLIENTS = 4
FAULTS_S = 30.0
RECOVERY_MAX_S = 300.0
CLIENT_TIMEOUT_S = 20.0
LATE_REQUESTS_S = 20.0
EXPECTED_REFUSALS = frozenset({"job_changed", "gate_closed", "plugin_unknown", "plugin_not_loaded", "command_unknown"})
"""Refusals that a correct client may get at any time."""


Operation = Callable[[str, ForgedClient, str, str], Awaitable[Any]]


class NoteSeen(Fact, frozen=True):
    """The durable handler has handled a note."""

    text: str


class ReloadObserver:
    """A state owner without state that reports every reload to the oracle."""

    def __init__(self, oracle: Oracle, life: Lifetime) -> None:
        self._oracle = oracle
        self._life = life

    async def load(self, store: Store) -> None:
        """Count the reload. Facts in the store at the first load are history, even if they were never published."""
        assert isinstance(store, LogStore)
        if not self._life.loads:
            for entry in await read_all(store, FACT_PREFIX):
                self._oracle.is_history(Record.read(entry.value), "the store")
        self._oracle.plugins.state_read(self._life, store.failed_commits)


class ServiceSimulation(Simulation):
    """One seed of the service simulation."""

    def __init__(self, seed: int, loop: VirtualLoop, random: Random) -> None:
        super().__init__(seed, loop, random)
        self.oracle = Oracle()
        self.working = 0
        """Clients that still send requests."""
        self.watching = 0
        """Clients that have not received all facts."""
        self._small_journal = random.random() < 0.3
        self._slow_handlers = random.random() < 0.4
        self._plugins = PluginSet(random, self.oracle.plugins, self.note)
        self._life: DaemonRun | None = None
        self._tenants = Tenants(seed, loop, self.network, self.oracle)

    # From Simulation.

    def ports(self, clock: VirtualClock, number: int) -> Ports:
        """Ports with plugins, some of which misbehave."""
        return replace(super().ports(clock, number), plugins=self._plugins.sources(self._present_life))

    def config(self) -> Config:
        """A configuration with small limits."""
        return replace(
            super().config(),
            journal_facts_max=100 if self._small_journal else 50_000,
            in_flight_max=self.random.choice((2, 1024)),
            plugin_failures_max=self.random.choice((1, 5)),
            plugin_facts_per_s_max=self.random.choice((1.0, 20.0)),
            **self._tenants.settings(),
        )

    def daemon_started(self, daemon: Daemon) -> None:
        """Check that the plugins are loaded."""
        super().daemon_started(daemon)
        self._plugins.check_taken_in(daemon)

    def daemon_stopped(self) -> None:
        """Ignore what its plugins still do."""
        if self._life is not None:
            self._life.alive = False

    def daemon_failed_to_start(self, code: str) -> None:
        self.oracle.daemon_failed_to_start(code)

    def _present_life(self) -> DaemonRun:
        assert self._life is not None, "plugins are loaded into a daemon"
        return self._life

    def extend(self, daemon: Daemon) -> None:
        """Register handlers that report their facts to the oracle."""
        last = [0]
        self._tenants.extend(daemon)
        seen = self.oracle.plugins.life_began(daemon.store.revision)
        self._life = DaemonRun(daemon, seen)
        daemon.ledger.register(ReloadObserver(self.oracle, seen))

        async def in_order(record: Record) -> None:
            self.oracle.handled("handler", last[0], record)
            last[0] = record.id
            if self.random.random() < 0.1:
                await anyio.sleep(self.random.uniform(0, 0.01))

        def react(record: Record) -> Decision[None]:
            assert isinstance(record.fact, NoteAdded)
            return Decision(None, (NoteSeen(record.fact.text),), job=record.job)

        async def dawdle(request: Any, call: Call, proceed: Proceed) -> Any:
            if self.random.random() < 0.2:
                await anyio.sleep(self.random.uniform(0, 2.0))
            reply = await proceed(request)
            if self.random.random() < 0.2:
                await anyio.sleep(self.random.uniform(0, 0.5))
            return reply

        if self._slow_handlers:
            daemon.bus.wrap(AddNote, dawdle, owner="simulation")
            daemon.bus.wrap(ShowJob, dawdle, owner="simulation")
        daemon.bus.on(Fact, in_order, name="order")
        daemon.bus.on(NoteAdded, react, name="reaction", durable=True)

    # Clients.

    def client(self, name: str) -> ForgedClient:
        """A client on its own host."""
        return ForgedClient(
            ENDPOINT,
            token=self.token,
            timeout_s=CLIENT_TIMEOUT_S,
            connect_timeout_s=FOUND_WITHIN_S,
            network=self.network.host(name),
            clock=VirtualClock(self.loop, offset_s=self.random.uniform(0, 1e6)),
            source=Random(f"{name} {self.seed}"),
            limits=ConnectionLimits(ping_after_s=2.0, silence_max_s=6.0),
        )

    async def work(self, name: str) -> None:
        """Run one client; its token was acknowledged before."""
        try:
            await self._work(name)
        except RequestRefused as error:
            raise InvariantViolated(f"client {name} got an unexpected refusal: {error}") from error
        except BaseExceptionGroup as errors:
            if errors.subgroup(lambda error: isinstance(error, RequestRefused) and error.code == "token_unknown"):
                raise InvariantViolated(f"the acknowledged token of client {name} is lost") from errors
            raise

    async def _work(self, name: str) -> None:
        """Write, read and observe until the faults have ended, and a little longer."""
        async with self.client(name) as client, anyio.create_task_group() as observing:
            observing.start_soon(self._observe, name, client)
            operations = 0
            while self.faults_active or operations < 5:
                operations += 1
                await self._operate(name, client, operations)
                if self.random.random() < 0.3:
                    await anyio.sleep(self.random.uniform(0, 0.5))
            while not await self._all_is_answered(name, client, operations := operations + 1):
                await anyio.sleep(0.5)
            self.working -= 1
            await self._until_caught_up(name)
            self.watching -= 1
            observing.cancel_scope.cancel()

    async def _operate(self, name: str, client: ForgedClient, count: int) -> None:
        operations: tuple[Operation, ...] = (self._note, self._note, self._change, self._read)
        if self._plugins.names and self.random.random() < 0.15:
            operations = (self._manage, self._manage, self._tell)
        await self._try(self.random.choice(operations), name, client, count)

    async def _try(self, operation: Operation, name: str, client: ForgedClient, count: int) -> bool:
        """Execute an operation; returns whether it succeeded."""
        job = f"job{self.random.randrange(3)}"
        try:
            await operation(name, client, job, f"{name}-{count}")
        except RequestRefused as error:
            if error.code == "job_unknown":
                await self._quietly(client.create_job(job))
            elif error.code not in EXPECTED_REFUSALS:
                raise
        except ForgedError as error:
            if not isinstance(error, Unavailable) and error.code != "plugin_broken":
                raise
            self.note(f"{name} got error {error.code}")
            await anyio.sleep(0.1)
        else:
            return True
        return False

    async def _all_is_answered(self, name: str, client: ForgedClient, count: int) -> bool:
        """Whether wrapped and unwrapped requests succeed, as they must some time after the faults."""
        return await self._try(self._note, name, client, count) and await self._try(self._read, name, client, count)

    async def _quietly(self, creating: Any) -> None:
        try:
            await creating
        except Unavailable as error:
            self.note(f"creating a job: {error.code}")

    async def _note(self, name: str, client: ForgedClient, job: str, text: str) -> None:
        self.oracle.attempted.add(text)
        await client.note(job, text)
        self.note(f"{name} noted {text}")
        self.oracle.acknowledged.add(text)

    async def _change(self, name: str, client: ForgedClient, job: str, text: str) -> None:
        version = await self._read(name, client, job, text)
        changed = await client.change_job(job, {"by": text}, version)
        self.note(f"{name} changed {job} to {changed.version}")
        self.oracle.told_version(job, changed.version, version + 1)

    async def _read(self, name: str, client: ForgedClient, job: str, text: str) -> int:
        before = self.oracle.versions.get(job, 0)
        found = await client.job(job)
        self.note(f"{name} reads {job} at {found.version}, at least {before}")
        self.oracle.told_version(job, found.version, before)
        return found.version

    async def _manage(self, name: str, client: ForgedClient, job: str, text: str) -> None:
        plugin = self.random.choice(self._plugins.names)
        await client.request(self.random.choice((EnablePlugin, EnablePlugin, DisablePlugin))(plugin))
        self.note(f"{name} has managed {plugin}")

    async def _tell(self, name: str, client: ForgedClient, job: str, text: str) -> None:
        said = await client.request(RunPluginCommand("publisher", "tell"))
        self.note(f"{name} heard that it is {said}")

    async def _observe(self, name: str, client: ForgedClient) -> None:
        slow = self.random.random() < 0.3
        async with client.facts(since=0) as stream:
            async for item in stream:
                self.note(f"{name} saw {f'a gap to {item.last}' if isinstance(item, Gap) else item.id}")
                self.oracle.saw(name, item)
                if slow and self.faults_active:
                    await anyio.sleep(self.random.uniform(0, 0.2))

    async def _until_caught_up(self, name: str) -> None:
        while self.working:
            await anyio.sleep(0.2)
        # Requests that a client gave up may still arrive and be executed.
        await anyio.sleep(LATE_REQUESTS_S)
        while True:
            daemon = self.daemon
            observer = self.oracle.observers.get(name)
            if daemon is not None and observer is not None and self._all_seen(daemon, observer.last):
                return
            await anyio.sleep(0.2)

    def _all_seen(self, daemon: Daemon, seen: int) -> bool:
        """Whether a client at this position has received all facts, and the daemon is idle."""
        idle = all(mailbox.idle for mailbox in daemon.bus.mailboxes.values())
        quiet = idle and daemon.ledger.revision == daemon.ledger.durable and self._plugins.all_active(daemon)
        return quiet and seen >= daemon.journal.last

    # Faults.

    async def make_faults(self) -> None:
        """Cause partitions and full disks until the faults end."""
        partition = partial(self.partition, [f"c{index}" for index in range(CLIENTS)])
        faults = (partition, self.fill_disk, self.heal, self._change_limits, self._change_the_receiver)
        await self.cause_faults(faults, FAULTS_S, pause_s_max=4.0)
        self.end_faults()
        self._plugins.behave()

    def _change_limits(self) -> None:
        if self.daemon is not None:
            self.note("plugin limits change")
            self.daemon.plugins.set_limits(self._plugins.limits())

    def _change_the_receiver(self) -> None:
        self.note("the receiver changes")
        self._plugins.change_the_receiver()

    async def _enable_plugins(self) -> None:
        """After the faults an operator enables all plugins."""
        while self.faults_active:
            await anyio.sleep(1.0)
        async with self.client("tender") as client:
            while self.watching:
                try:
                    await self._enable_all(client)
                except (Unavailable, RequestRefused) as error:
                    self.note(f"the operator got error {error.code}")
                await anyio.sleep(1.0)

    async def _enable_all(self, client: ForgedClient) -> None:
        for plugin in await client.request(ListPlugins()):
            if plugin.state in (PluginState.QUARANTINED, PluginState.DISABLED):
                self.note(f"the operator enables {plugin.name}: {plugin.reason}")
                await client.request(EnablePlugin(plugin.name))

    # The whole.

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.keep_daemon, tasks)
            await self.make_token()
            if self._tenants.are_hostile:
                async with self.client("registrar") as operator:
                    await self._tenants.prepare(operator, self.token)
            self.prepared.set()
            self.working = self.watching = CLIENTS
            async with anyio.create_task_group() as clients:
                clients.start_soon(self.make_faults)
                for index in range(CLIENTS):
                    clients.start_soon(self.work, f"c{index}")
                if self._plugins.names:
                    clients.start_soon(self._enable_plugins)
                if self._tenants.are_hostile:
                    self._start_tenants(clients)
                await self._bounded(clients)
            assert self.daemon is not None
            self.oracle.check_end(self.daemon.journal)
            tasks.cancel_scope.cancel()

    def _start_tenants(self, tasks: TaskGroup) -> None:
        self.working += 2
        for job in HOSTILE:
            tasks.start_soon(self._tenants.flood, job, lambda: not self.working)
        for name, job in ((OPERATOR, HOSTILE[0]), (QUIET, QUIET)):
            tasks.start_soon(self._probe, name, job)

    async def _probe(self, name: str, job: str) -> None:
        await self._tenants.probe(name, job, lambda: self.faults_active)
        self.working -= 1

    async def _bounded(self, clients: TaskGroup) -> None:
        """After the faults all clients must finish within `RECOVERY_MAX_S`."""
        while self.faults_active:
            await anyio.sleep(1.0)
            self.oracle.check()
        with anyio.move_on_after(RECOVERY_MAX_S):
            while self.watching:
                await anyio.sleep(0.5)
                self.oracle.check()
        if self.watching:
            raise InvariantViolated(f"{self.watching} clients lacked facts {RECOVERY_MAX_S} s after the faults ended")


def simulate(seed: int, watch: Callable[[ServiceSimulation], None] = lambda simulation: None) -> ServiceSimulation:
    """Run one seed; raises `InvariantViolated`."""
    return simulated(ServiceSimulation, "world", seed, watch)
