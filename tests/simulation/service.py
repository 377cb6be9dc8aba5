"""A whole cluster in one process: a daemon that dies and comes back, clients that go on, plugins, and much that fails.

Law: a world is a function of its seed. Time is virtual, every draw comes from the seed, and what happens is written to
a trace that is the same byte for byte in every process. Trouble ends after a while; then everything must come right
within a bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
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
from tests.simulation.base import ENDPOINT, FOUND_WITHIN_S, SERVER, SOCKET, Simulation
from tests.simulation.loop import VirtualClock, VirtualLoop, run
from tests.simulation.oracle import InvariantViolated, Oracle
from tests.simulation.plugin_oracle import Lifetime
from tests.simulation.plugins import Cast, Life
from tests.simulation.store import LogStore

CLIENTS = 4
TROUBLE_S = 30.0
RECOVERY_MAX_S = 300.0
CLIENT_TIMEOUT_S = 20.0
STRAGGLERS_S = 20.0
REFUSALS_IN_ORDER = frozenset({"job_changed", "gate_closed", "plugin_unknown", "plugin_not_loaded", "command_unknown"})
"""What a client may be told at any time that has done nothing wrong."""


Operation = Callable[[str, ForgedClient, str, str], Awaitable[Any]]


class NoteSeen(Fact, frozen=True):
    """The durable handler has seen a note."""

    text: str


class Reader:
    """An owner of no state, which notices that everybody's is read from the store."""

    def __init__(self, oracle: Oracle, life: Lifetime) -> None:
        self._oracle = oracle
        self._life = life

    async def load(self, store: Store) -> None:
        """Count it. What a daemon finds when it starts is history, also if the one before told nobody any more."""
        assert isinstance(store, LogStore)
        if not self._life.loads:
            for entry in await read_all(store, FACT_PREFIX):
                self._oracle.is_history(Record.read(entry.value), "the store")
        self._oracle.plugins.state_read(self._life, store.failed_commits)


class ServiceSimulation(Simulation):
    """What one seed makes of it all."""

    def __init__(self, seed: int, loop: VirtualLoop, random: Random) -> None:
        super().__init__(seed, loop, random)
        self.oracle = Oracle()
        self.working = 0
        """Clients that still ask for things."""
        self.watching = 0
        """Clients that have not seen everything yet."""
        self._small_journal = random.random() < 0.3
        self._slow_handlers = random.random() < 0.4
        self._cast = Cast(random, self.oracle.plugins, self.note)
        self._life: Life | None = None

    # What the stage asks of it.

    def ports(self, clock: VirtualClock, number: int) -> Ports:
        """With plugins, some of which misbehave."""
        return Ports(
            clock,
            self.network.host(SERVER),
            number,
            0,
            self.open_store_of(self.disk),
            random=Random(f"daemon {number} {self.seed}"),
            plugins=self._cast.sources(self._present_life),
        )

    def config(self) -> Config:
        """With small limits."""
        return Config(
            data_dir="/",
            socket=SOCKET,
            listen=(ENDPOINT,),
            anonymous_loopback_role="none",
            unix_other_role="operator",
            journal_facts_max=100 if self._small_journal else 50_000,
            in_flight_max=self.random.choice((2, 1024)),
            plugin_failures_max=self.random.choice((1, 5)),
            plugin_facts_per_s_max=self.random.choice((1.0, 20.0)),
        )

    def daemon_started(self, daemon: Daemon) -> None:
        """Its plugins must be there."""
        self._cast.check_taken_in(daemon)

    def daemon_stopped(self) -> None:
        """What its plugins still do reaches nobody."""
        if self._life is not None:
            self._life.alive = False

    def daemon_failed_to_start(self, code: str) -> None:
        """Only its store may be a reason."""
        self.oracle.daemon_failed_to_start(code)

    def _present_life(self) -> Life:
        assert self._life is not None, "plugins are loaded into a daemon"
        return self._life

    def extend(self, daemon: Daemon) -> None:
        """Handlers inside the daemon that tell the oracle what they are given."""
        last = [0]
        seen = self.oracle.plugins.life_began(daemon.store.revision)
        self._life = Life(daemon, seen)
        daemon.ledger.register(Reader(self.oracle, seen))

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
        """A client on a host of its own."""
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
        """One client's life; its token was acknowledged before it began."""
        try:
            await self._work(name)
        except RequestRefused as error:
            raise InvariantViolated(f"{name} was refused: {error}") from error
        except BaseExceptionGroup as errors:
            if errors.subgroup(lambda error: isinstance(error, RequestRefused) and error.code == "token_unknown"):
                raise InvariantViolated(f"the token of {name} was acknowledged and is lost") from errors
            raise

    async def _work(self, name: str) -> None:
        """It writes, reads and observes until the trouble is over, and a little longer."""
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
        if self._cast.names and self.random.random() < 0.15:
            operations = (self._manage, self._manage, self._recite)
        await self._try(self.random.choice(operations), name, client, count)

    async def _try(self, operation: Operation, name: str, client: ForgedClient, count: int) -> bool:
        """Do something; tells whether it was answered."""
        job = f"job{self.random.randrange(3)}"
        try:
            await operation(name, client, job, f"{name}-{count}")
        except RequestRefused as error:
            if error.code == "job_unknown":
                await self._quietly(client.create_job(job))
            elif error.code not in REFUSALS_IN_ORDER:
                raise
        except ForgedError as error:
            if not isinstance(error, Unavailable) and error.code != "plugin_broken":
                raise
            self.note(f"{name} was told {error.code}")
            await anyio.sleep(0.1)
        else:
            return True
        return False

    async def _all_is_answered(self, name: str, client: ForgedClient, count: int) -> bool:
        """Whether what is asked is answered, wrapped or not, as it has to be a while after the trouble."""
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
        plugin = self.random.choice(self._cast.names)
        await client.request(self.random.choice((EnablePlugin, EnablePlugin, DisablePlugin))(plugin))
        self.note(f"{name} has managed {plugin}")

    async def _recite(self, name: str, client: ForgedClient, job: str, text: str) -> None:
        said = await client.request(RunPluginCommand("herald", "recite"))
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
        # What somebody gave up waiting for may still arrive and be done.
        await anyio.sleep(STRAGGLERS_S)
        while True:
            daemon = self.daemon
            observer = self.oracle.observers.get(name)
            if daemon is not None and observer is not None and self._all_seen(daemon, observer.last):
                return
            await anyio.sleep(0.2)

    def _all_seen(self, daemon: Daemon, seen: int) -> bool:
        """Whether somebody who has seen that much has seen all, and nothing more is coming."""
        idle = all(mailbox.idle for mailbox in daemon.bus.mailboxes.values())
        quiet = idle and daemon.ledger.revision == daemon.ledger.durable and self._cast.all_active(daemon)
        return quiet and seen >= daemon.journal.last

    # Trouble.

    async def make_trouble(self) -> None:
        """Partitions, full disks and bad disks, until it ends."""
        names = [f"c{index}" for index in range(CLIENTS)]
        ends_at = self.loop.time() + TROUBLE_S
        while self.loop.time() < ends_at:
            await anyio.sleep(self.random.uniform(0.1, 4.0))
            troubles = (self._partition, self._full_disk, self._heal, self._change_limits, self._change_the_receiver)
            self.random.choice(troubles)(names)
        self.end_faults()
        self._cast.behave()

    def _partition(self, names: list[str]) -> None:
        cut_off = self.random.sample(names, self.random.randint(1, len(names)))
        self.network.partition(cut_off, [SERVER], one_way=self.random.random() < 0.3)

    def _full_disk(self, names: list[str]) -> None:
        self.fill_disk()

    def _heal(self, names: list[str]) -> None:
        self.heal()

    def _change_limits(self, names: list[str]) -> None:
        if self.daemon is not None:
            self.note("the limits of plugins change")
            self.daemon.plugins.set_limits(self._cast.limits())

    def _change_the_receiver(self, names: list[str]) -> None:
        self.note("the receiver changes")
        self._cast.change_the_receiver()

    async def _enable_plugins(self) -> None:
        """When the trouble is over an operator sees to it that every plugin takes part again."""
        while self.faults_active:
            await anyio.sleep(1.0)
        async with self.client("tender") as client:
            while self.watching:
                try:
                    await self._enable_all(client)
                except (Unavailable, RequestRefused) as error:
                    self.note(f"the operator was told {error.code}")
                await anyio.sleep(1.0)

    async def _enable_all(self, client: ForgedClient) -> None:
        for plugin in await client.request(ListPlugins()):
            if plugin.state in (PluginState.QUARANTINED, PluginState.DISABLED):
                self.note(f"the operator enables {plugin.name}: {plugin.reason}")
                await client.request(EnablePlugin(plugin.name))

    # The whole.

    async def live(self) -> None:
        """From the first start to the last check."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.keep_daemon, tasks)
            await self.make_token()
            self.prepared.set()
            self.working = self.watching = CLIENTS
            async with anyio.create_task_group() as clients:
                clients.start_soon(self.make_trouble)
                for index in range(CLIENTS):
                    clients.start_soon(self.work, f"c{index}")
                if self._cast.names:
                    clients.start_soon(self._enable_plugins)
                await self._bounded(clients)
            assert self.daemon is not None
            journal = self.daemon.journal
            self.oracle.check_end(journal.after(0, len(journal)), journal.floor)
            tasks.cancel_scope.cancel()

    async def _bounded(self, clients: TaskGroup) -> None:
        """After the trouble everything must come right within a bound."""
        while self.faults_active:
            await anyio.sleep(1.0)
            self.oracle.check()
        with anyio.move_on_after(RECOVERY_MAX_S):
            while self.watching:
                await anyio.sleep(0.5)
                self.oracle.check()
        if self.watching:
            raise InvariantViolated(f"{self.watching} clients are not done {RECOVERY_MAX_S} s after the trouble ended")


def simulate(seed: int, watch: Callable[[ServiceSimulation], None] = lambda world: None) -> ServiceSimulation:
    """Live through a world; raises what was broken in it."""

    async def main() -> ServiceSimulation:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        world = ServiceSimulation(seed, loop, Random(f"world {seed}"))
        watch(world)
        await world.live()
        return world

    return run(main, seed)
