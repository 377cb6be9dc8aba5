"""The catalogue's simulation: jobs save and restore, a daemon collects, and both of them and the storage fail.

Invariants:
- A run is a function of its seed.
- Faults end after `FAULTS_S`; then everything is settled within `RECOVERY_MAX_S`.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from random import Random
from typing import Any, cast
from unittest.mock import patch

import anyio

from forged.auth.messages import CreateToken
from forged.auth.model import Role
from forged.auth.tokens import encode_token
from forged.catalog.messages import CollectCheckpoints
from forged.catalog.records import PREFIX, CheckpointRecord, decoded
from forged.client import ForgedClient
from forged.config import Config
from forged.daemon import Daemon, Ports
from forged.elastic.messages import ConfirmWorker, ProgressLost
from forged.errors import ForgedError, RequestRefused, Unavailable
from forged.jobs.model import CreateJob
from forged.kernel.bus.requests import Proceed
from forged.kernel.ledger import FACT_PREFIX, read_all
from forged.kernel.messages import Call, Decision, Fact, Nothing, Record, Request
from forged.kernel.store.port import Conflict, Store, Transaction
from forged.net.transport.connection import ConnectionLimits
from forged.retry import RetryPolicy
from tests.simulation.base import ENDPOINT, FOUND_WITHIN_S, PORT, SERVER, SOCKET, OpenStore, Simulation
from tests.simulation.catalog.callers import HostileTenant, ModelMaker, OperatorActor, ReaderActor, drawn_settings
from tests.simulation.catalog.oracle import HOSTILE, CatalogOracle, Promise
from tests.simulation.catalog.slot_oracle import LEFT_S
from tests.simulation.catalog.slots import HostMemory, HostWatch, RivalHost, SimulatedHost
from tests.simulation.catalog.stagers import StagingWorld
from tests.simulation.catalog.storage import SimulatedFiles, SimulatedStorage
from tests.simulation.catalog.workers import JobPlan, Trainer, ask
from tests.simulation.environment.disk import SimulatedDisk
from tests.simulation.environment.loop import SimulationError, VirtualClock, VirtualLoop, run
from tests.simulation.environment.store import LogStore

FAULTS_S = 17.0
RECOVERY_MAX_S = 120.0
HOSTILE_SEEDS = 0.4
RIVAL_SEEDS = 0.25
RIVAL = "rival"
RIVAL_BEGINS_S_MAX = 9.0
RIVAL_LIVES_S = (0.2, 3.0)
WRITER_GONE_S = 4.0
WRITING_S_MAX = 12.0
SHORTER = {
    "forged.catalog.files.file_work.TICK_S": 1.0,
    "forged.catalog.files.file_work.SCRUB_PAUSE_S": 3.0,
    "forged.catalog.files.file_work.SCRUB_AGAIN_S": 6.0,
    "forged.catalog.files.file_work.NOT_VERIFIED_S": 6.0,
    "forged.catalog.files.file_work.NOT_DELETED_S": 3.0,
    "forged.catalog.book.saves.WRITER_GONE_S": WRITER_GONE_S,
    "forged.catalog.book.saves.WRITING_S_MAX": WRITING_S_MAX,
    "forged.catalog.book.saves.FAILED_KEPT_S": 6.0,
    "forged.catalog.files.file_work.COMPACTION_PAUSE_S": 1.0,
    "forged.catalog.files.work_queue.PAUSE_S_MAX": 4.0,
    "forged.host.service.LOOK_AFTER_S": 1.0,
    "forged.host.slot_saves.RETRYING": RetryPolicy(attempts=None, delay_s=0.5, exponential=True, delay_max_s=2.0),
    "forged.host.service.LOCAL_HOSTS": ("",),
    "forged.host.slot_saves.HELD_S": 6.0,
    "forged.host.slot_table.LEFT_S": LEFT_S,
}
"""The catalogue's times in simulations, so that all of them pass while there are faults; and all hosts are one."""
RECORDED_WITHIN_S = 5.0
DIE_TOGETHER, HOST_GONE = 0.3, 0.08
"""How often the workers with slots die together with the daemon, and how often their memory is lost then."""
SCRUB_BYTES_PER_S = 1 << 40
PLANS = (
    JobPlan("own", "/data/own", is_trusted=True),
    JobPlan("rooted", "/roots/rooted", is_trusted=False),
    JobPlan("foreign", "/home/foreign", is_trusted=False, is_managed=False),
    JobPlan("staged", "/data/staged", is_trusted=True, has_slots=True),
)
CLEANS_MAX = 10
ROOTS = ("/roots/{job}",)
MUST_HAPPEN = (
    "a checkpoint goes: surplus",
    "a checkpoint is compacted",
    "a checkpoint is repaired, or was not damaged",
    "a checkpoint goes: old",
    "a checkpoint goes: failed",
    "a checkpoint goes: requested",
    "a completion is reported late",
    "a hostile tenant claims a path",
    "a checkpoint goes as its script keeps them",
    "a hostile tenant is refused",
    "a model refers to a checkpoint",
    "a hostile tenant lies about deletions",
    "a job continues from a checkpoint",
    "a job is removed",
    "a checkpoint is reinstated",
    "a reader finds damage",
    "a reader reads a checkpoint as a whole",
    "a report is repeated",
    "a save fails",
    "a save is given up",
    "a storage is gone",
    "a worker deletes what the daemon may not",
    "a worker that counts as failed goes on",
    "a host loses its memory",
    "a save from slots fails",
    "a worker dies in the middle of a copy",
    "an emergency checkpoint is saved",
    "the daemon dies while it saves from slots",
    "the daemon saves what workers have staged",
    "two daemons use one store",
    "workers and daemon are killed together",
    "workers resume from slots",
    "an operator deletes a checkpoint",
    "checkpoints are abandoned",
    "checkpoints are adopted",
    "the clock goes back",
    "the daemon deletes files",
    "the daemon dies while it deletes files",
)
"""What happens somewhere in the first few hundred seeds."""


class WatchedStore(LogStore):
    """Tells the oracle of each transaction that is durable."""

    simulation: CatalogSimulation

    async def _commit(self, batch: Sequence[Transaction]) -> Sequence[Conflict | None]:
        conflicts = await super()._commit(batch)
        if self._disk is self.simulation.disk:
            for transaction, conflict in zip(batch, conflicts, strict=True):
                if conflict is None:
                    self.simulation.oracle.committed(transaction)
        return conflicts


class SharedStore:
    """The store of another daemon, which alone closes it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def close(self) -> None:
        """The other daemon uses it."""


class Loading:
    """An owner without state: what a new daemon reads from the store is history."""

    def __init__(self, oracle: CatalogOracle) -> None:
        self._oracle = oracle

    async def load(self, store: Store) -> None:
        facts = [Record.read(entry.value) for entry in await read_all(store, FACT_PREFIX)]
        self._oracle.loaded(facts, [decoded(entry.value) for entry in await read_all(store, PREFIX)])


class CatalogSimulation(Simulation):
    """One seed of the catalogue's simulation."""

    daemon_lives_s = (0.5, 12.0)

    def __init__(self, seed: int, loop: VirtualLoop, random: Random) -> None:
        super().__init__(seed, loop, random)
        self.met: Counter[str] = Counter()
        self.plans = random.sample(PLANS, 2)
        self.storage, self.memory = SimulatedStorage(random), HostMemory()
        self.oracle = CatalogOracle(
            loop.time, self.storage, self.memory, self.meet, self.is_managed, WRITER_GONE_S, WRITING_S_MAX
        )
        self.trainers = [Trainer(self, plan) for plan in self.plans if not plan.has_slots]
        self.stagers = [StagingWorld(self, plan) for plan in self.plans if plan.has_slots]
        self._is_hostile = random.random() < HOSTILE_SEEDS
        self._is_superseded = anyio.Event()
        """A second daemon has taken the store: the first one can record nothing until it restarts."""
        self._has_rival = random.random() < RIVAL_SEEDS
        self._scrubs = random.random() < 0.5
        self._tokens: dict[str, str] = {}
        self._files: SimulatedFiles | None = None
        self._host: SimulatedHost | None = None

    async def daemon_lives(self) -> None:
        self._is_superseded = anyio.Event()
        with anyio.move_on_after(self.random.uniform(*self.daemon_lives_s)):
            await self._is_superseded.wait()

    def meet(self, what: str) -> None:
        """Count an event."""
        self.met[what] += 1

    def is_managed(self, record: CheckpointRecord) -> bool:
        """Whether the daemon may touch the files of a checkpoint."""
        return record.is_trusted or record.path.startswith(f"/roots/{record.job}/")

    # From Simulation.

    def open_store_of(self, disk: SimulatedDisk) -> OpenStore:
        async def open_store() -> LogStore:
            store = await WatchedStore.open(disk, self.random)
            assert isinstance(store, WatchedStore)
            store.simulation = self
            return store

        return open_store

    def ports(self, clock: VirtualClock, number: int) -> Ports:
        """Ports with the simulated storage."""
        self._files = SimulatedFiles(self.storage, self.oracle.deletes)
        slots = self.oracle.slots
        watch = HostWatch(slots.freed, slots.published, slots.failed_saves.add, slots.began, slots.ended)
        self._host = SimulatedHost(self.memory, self.storage, Random(f"host {number} {self.seed}"), watch)
        return Ports(
            clock,
            self.network.host(SERVER),
            number,
            0,
            self.open_store_of(self.disk),
            random=Random(f"daemon {number} {self.seed}"),
            checkpoint_files=self._files,
            host=self._host,
        )

    async def _run_rival(self) -> None:
        """Start a second daemon on the store of the first one, which can record nothing any more until it restarts."""
        await anyio.sleep(self.random.uniform(1.0, RIVAL_BEGINS_S_MAX))
        if self.daemon is None:
            return
        first, shared = self.daemon, SharedStore(self.daemon.store)
        clock = VirtualClock(self.loop, offset_s=self.random.uniform(0, 1e6))

        async def open_store() -> Store:
            return cast("Store", shared)

        ports = Ports(
            clock,
            self.network.host(RIVAL),
            0,
            0,
            open_store,
            random=Random(f"rival {self.seed}"),
            checkpoint_files=SimulatedFiles(self.storage, self.oracle.deletes),
            host=RivalHost(),
        )
        config = replace(self.config(), socket="/run/rival.sock", listen=(f"tcp://{RIVAL}:{PORT}",))
        self.oracle.superseded = self.loop.time(), math.inf
        with anyio.move_on_after(self.random.uniform(*RIVAL_LIVES_S)):
            try:
                async with Daemon.running(config, ports, extend=self._stand_in):
                    self.meet("two daemons use one store")
                    await anyio.sleep_forever()
            except ForgedError as error:
                self.note(f"the second daemon has ended: {error.code}")
        if self.daemon is first:
            self._is_superseded.set()

    def config(self) -> Config:
        return Config(
            data_dir="/",
            socket=SOCKET,
            listen=(ENDPOINT,),
            anonymous_loopback_role="none",
            unix_other_role="operator",
            checkpoint_roots=ROOTS,
            scrub_bytes_per_s=SCRUB_BYTES_PER_S if self._scrubs else 0,
        )

    def extend(self, daemon: Daemon) -> None:
        """Answer for the workers, whose training is not simulated here."""
        daemon.ledger.register(Loading(self.oracle))
        self._stand_in(daemon)

    def _stand_in(self, daemon: Daemon) -> None:
        daemon.bus.on_handler_bug = self._tell_broken
        daemon.catalog.work._is_registered = self._is_registered
        port = replace(daemon.slots._port, is_registered=self._is_registered)
        daemon.slots._port = daemon.slots._saves._port = port

        async def confirm(request: Any, call: Call, proceed: Proceed) -> Any:
            if not self._is_registered(request.job, request.worker_id, request.incarnation):
                raise RequestRefused("worker_gone", f"worker {request.worker_id} is not registered", "")
            return Nothing()

        daemon.bus.wrap(ConfirmWorker, confirm, owner="simulation")

    def _tell_broken(self, owner: str, error: BaseException) -> None:
        raise SimulationError(f"{owner} broke") from error

    def _is_registered(self, job: str, worker_id: str, incarnation: bytes) -> bool:
        writer = self.oracle.writers.get((job, worker_id, incarnation))
        return writer is not None and self.loop.time() < writer.gone_at

    def daemon_started(self, daemon: Daemon) -> None:
        """It runs until it is killed."""

    def daemon_stopped(self) -> None:
        began, ended = self.oracle.superseded
        self.oracle.superseded = began, min(ended, max(began, self.loop.time()))
        if self._files is not None and self._files.deleting:
            self.meet("the daemon dies while it deletes files")
        if self._host is not None:
            if self._host.saving:
                self.meet("the daemon dies while it saves from slots")
            self._host.is_dead = True
        self._kill_stagers()

    def _kill_stagers(self) -> None:
        """Workers die together with the daemon, or the host loses its memory too."""
        chance = self.random.random()
        for world in self.stagers:
            if chance < DIE_TOGETHER:
                self.meet("workers and daemon are killed together")
                world.kill()
            if chance < HOST_GONE:
                self.meet("a host loses its memory")
                self.oracle.slots.forget()

    def daemon_failed_to_start(self, code: str) -> None:
        """Only a store error may prevent the start."""
        if not code.startswith("store_"):
            self.oracle.violated(Promise.RECORDED, f"a daemon failed to start with {code}")

    # Callers.

    def client(self, host: str, job: str) -> ForgedClient:
        """A client of an operator, or with the token of a job."""
        return ForgedClient(
            ENDPOINT,
            token=self._tokens.get(job, self.token),
            timeout_s=20.0,
            connect_timeout_s=FOUND_WITHIN_S,
            network=self.network.host(host),
            clock=VirtualClock(self.loop, offset_s=self.random.uniform(0, 1e6)),
            source=Random(f"{host} {self.loop.time()} {self.seed}"),
            limits=ConnectionLimits(ping_after_s=4.0, silence_max_s=10.0),
        )

    async def recorded(self, job: str, fact: Fact) -> bool:
        """Have the daemon record a fact about a job; returns whether it is durable, or the job is gone."""
        daemon = self.daemon
        if job in self.oracle.removed_jobs:
            return True
        if daemon is None or not daemon.ledger.writable_now:
            return False
        with anyio.move_on_after(RECORDED_WITHIN_S):
            try:
                await daemon.ledger.append(Decision(None, (fact,), job=job), origin="simulation").wait()
            except ForgedError:
                return False
            return True
        return False

    def lose_progress(self, job: str, steps: int, step: int) -> bool:
        """Have the daemon record that a job goes back; returns whether it could."""
        daemon = self.daemon
        if daemon is None or not daemon.ledger.writable_now:
            return False
        fact = ProgressLost(steps, step, "its workers failed")
        daemon.ledger.append(Decision(None, (fact,), job=job), origin="simulation")
        return True

    async def _prepare(self) -> None:
        """Create the jobs and the tokens of their workers."""
        async with self.client("registrar", "") as operator:
            for job in [*(plan.name for plan in self.plans), HOSTILE]:
                await self._until_done(operator, CreateJob(job, drawn_settings(self.random)))
            for job in [*(plan.name for plan in self.plans if not plan.is_trusted), HOSTILE]:
                secret = self.random.randbytes(32)
                await self._until_done(operator, CreateToken(job, Role.WORKER, secret, jobs=(job,)))
                self._tokens[job] = encode_token(secret)[1]

    async def _until_done(self, operator: ForgedClient, request: Request[Any]) -> None:
        while True:
            try:
                await operator.request(request)
            except Unavailable:
                await anyio.sleep(0.1)
            else:
                return

    # Faults.

    async def make_faults(self) -> None:
        """Break the network, the disk, the storage and the clock until the faults end."""
        faults = (
            self._partition,
            self.fill_disk,
            self.heal,
            self.heal,
            self._lose_storage,
            self._slow_storage,
            self._return_storage,
            self._set_clock_back,
            self._harm,
        )
        ends_at = self.loop.time() + FAULTS_S
        while self.loop.time() < ends_at:
            await anyio.sleep(self.random.uniform(0.1, 2.0))
            self.random.choice(faults)()
        self._return_storage()
        self.end_faults()
        self.network.heal()

    def _partition(self) -> None:
        hosts = ["reader", "operator", *(f"{plan.name}-{number}" for plan in self.plans for number in range(2))]
        cut_off = self.random.sample(hosts, self.random.randint(1, len(hosts)))
        self.network.partition(cut_off, [SERVER], one_way=self.random.random() < 0.3)

    def _lose_storage(self) -> None:
        self.meet("a storage is gone")
        self.storage.gone.add(self.random.choice(self.plans).folder)

    def _slow_storage(self) -> None:
        self.storage.slow_s = self.random.choice((0.2, 0.6))

    def _return_storage(self) -> None:
        self.storage.gone.clear()
        self.storage.slow_s = 0.0

    def _set_clock_back(self) -> None:
        self.meet("the clock goes back")
        assert isinstance(self.server_clock, VirtualClock)
        self.server_clock.jump(-self.random.uniform(1.0, 20.0))

    def _harm(self) -> None:
        """Damage or delete a file."""
        names = sorted(self.storage.files)
        if names and self.random.random() < 0.5:
            name = self.random.choice(names)
            self.note(f"{name} is harmed")
            self.storage.harm(name, is_deleted=self.random.random() < 0.5)

    # The whole.

    async def run(self) -> None:
        """Run the simulation from the first start to the final checks."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.keep_daemon, tasks)
            await self.make_token()
            await self._prepare()
            self.prepared.set()
            tasks.start_soon(self._check)
            await self._live()
            await self._settle()
            await self._finish()
            self.oracle.check()
            tasks.cancel_scope.cancel()

    async def _check(self) -> None:
        while True:
            await anyio.sleep(1.0)
            self.oracle.check()

    async def _live(self) -> None:
        """Everybody acts until the faults end."""
        async with anyio.create_task_group() as actors:
            actors.start_soon(self.make_faults)
            for trainer in self.trainers:
                actors.start_soon(trainer.run)
            for stager in self.stagers:
                actors.start_soon(stager.run)
            actors.start_soon(ReaderActor(self).run)
            actors.start_soon(OperatorActor(self).run)
            if self.seed % 4 == 2:
                actors.start_soon(ModelMaker(self).run)
            if self._has_rival:
                actors.start_soon(self._run_rival)
            if self._is_hostile:
                actors.start_soon(HostileTenant(self).run)

    async def _settle(self) -> None:
        """Wait until the daemon has nothing more to do with any checkpoint."""
        with anyio.move_on_after(RECOVERY_MAX_S):
            while self.oracle.unsettled():
                await anyio.sleep(0.5)
            return
        what = "; ".join(self.oracle.unsettled())
        self.oracle.broken(Promise.ENDS, f"{RECOVERY_MAX_S} s after the faults: {what}")

    async def _finish(self) -> None:
        """The final checks; the daemon runs, and nobody saves any more."""
        async with self.client("auditor", "") as auditor:
            jobs = [plan.name for plan in self.plans]
            for trainer in self.trainers:
                if trainer.plan.name not in self.oracle.removed_jobs and not trainer.plan.is_managed:
                    await self._clean(trainer)
            for job in jobs:
                if job not in self.oracle.removed_jobs:
                    await self._collect_twice(auditor, job)
            await self._settle()
            for job in jobs:
                asked_at = -1.0
                while asked_at <= self.oracle.changed_at(job):
                    asked_at = self.loop.time()
                    listed = await auditor.checkpoints(job)
                self.oracle.check_list(job, listed)
            self.oracle.check_end()

    async def _clean(self, trainer: Trainer) -> None:
        """A worker that saves is told what to delete, and deletes the end of each chain.

        The save may fail or be refused, as the first of its life.
        """
        for _ in range(CLEANS_MAX):
            if await trainer.clean():
                return
        self.oracle.broken(Promise.ORPHANS, f"the workers of {trainer.plan.name} do not delete what is collected")

    async def _collect_twice(self, auditor: ForgedClient, job: str) -> None:
        """An operator makes room: keeps one checkpoint, collects, and collects again."""
        if self.oracle.is_clock_behind(job, self.server_clock.wall()):
            return
        known = await auditor.job(job)
        await auditor.change_job(job, {"checkpoint_keep": 1}, known.version)
        await ask(self, auditor, CollectCheckpoints(job))
        again = await ask(self, auditor, CollectCheckpoints(job))
        if again is not None and again.collected:
            self.oracle.broken(Promise.SETTLED, f"a second collection of {job} deletes {again.collected}")


def simulate(seed: int, watch: Callable[[CatalogSimulation], None] = lambda simulation: None) -> CatalogSimulation:
    """Run one seed; raises `InvariantViolated`."""

    async def main() -> CatalogSimulation:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        simulation = CatalogSimulation(seed, loop, Random(f"catalogue {seed}"))
        watch(simulation)
        await simulation.run()
        return simulation

    with ExitStack() as patches:
        for name, value in SHORTER.items():
            patches.enter_context(patch(name, value))
        return run(main, seed)
