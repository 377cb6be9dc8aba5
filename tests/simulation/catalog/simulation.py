"""The catalogue's simulation: jobs save and restore, a daemon collects, and both of them and the storage fail.

Invariants:
- A run is a function of its seed.
- Faults end after `FAULTS_S`; then everything is settled within `RECOVERY_MAX_S`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, cast
from unittest.mock import patch

import anyio
from anyio.abc import TaskGroup

from forged.auth.model import Role
from forged.catalog.messages import CollectCheckpoints
from forged.catalog.records import CheckpointRecord
from forged.client import ForgedClient
from forged.config import Config
from forged.daemon import Daemon, Ports
from forged.elastic.messages import ConfirmWorker, ProgressLost
from forged.errors import ForgedError, RequestRefused
from forged.jobs.model import CreateJob
from forged.kernel.bus.requests import Proceed
from forged.kernel.messages import Call, Decision, Fact, Nothing
from forged.kernel.store.port import Store
from forged.retry import RetryPolicy
from tests.simulation.base import PORT, simulated, until_done
from tests.simulation.catalog.callers import HostileTenant, ModelMaker, OperatorActor, ReaderActor, drawn_settings
from tests.simulation.catalog.oracle import HOSTILE, CatalogOracle, Promise
from tests.simulation.catalog.slot_oracle import LEFT_S
from tests.simulation.catalog.slots import HostMemory, HostWatch, RivalHost, SimulatedHost
from tests.simulation.catalog.stagers import StagingWorld
from tests.simulation.catalog.storage import SimulatedFiles, SimulatedStorage
from tests.simulation.catalog.workers import JobPlan, Trainer, ask
from tests.simulation.environment.loop import VirtualClock, VirtualLoop
from tests.simulation.watched import WatchedSimulation

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


class SharedStore:
    """The store of another daemon, which alone closes it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def close(self) -> None:
        """The other daemon uses it."""


class CatalogSimulation(WatchedSimulation):
    """One seed of the catalogue's simulation."""

    oracle: CatalogOracle
    kept, settled = Promise.RECORDED, Promise.ENDS
    recovery_max_s = RECOVERY_MAX_S
    daemon_lives_s = (0.5, 12.0)

    def __init__(self, seed: int, loop: VirtualLoop, random: Random) -> None:
        super().__init__(seed, loop, random)
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
        self._files: SimulatedFiles | None = None
        self._host: SimulatedHost | None = None

    async def daemon_lives(self) -> None:
        self._is_superseded = anyio.Event()
        with anyio.move_on_after(self.random.uniform(*self.daemon_lives_s)):
            await self._is_superseded.wait()

    def is_managed(self, record: CheckpointRecord) -> bool:
        """Whether the daemon may touch the files of a checkpoint."""
        return record.is_trusted or record.path.startswith(f"/roots/{record.job}/")

    # From Simulation.

    def ports(self, clock: VirtualClock, number: int) -> Ports:
        """Ports with the simulated storage."""
        self._files = SimulatedFiles(self.storage, self.oracle.deletes)
        slots = self.oracle.slots
        watch = HostWatch(slots.freed, slots.published, slots.failed_saves.add, slots.began, slots.ended)
        self._host = SimulatedHost(self.memory, self.storage, Random(f"host {number} {self.seed}"), watch)
        return replace(super().ports(clock, number), checkpoint_files=self._files, host=self._host)

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
        scrub_bytes_per_s = SCRUB_BYTES_PER_S if self._scrubs else 0
        return replace(super().config(), checkpoint_roots=ROOTS, scrub_bytes_per_s=scrub_bytes_per_s)

    def extend(self, daemon: Daemon) -> None:
        """Answer for the workers, whose training is not simulated here."""
        super().extend(daemon)
        self._stand_in(daemon)

    def _stand_in(self, daemon: Daemon) -> None:
        daemon.bus.on_handler_bug = self.handler_failed
        daemon.catalog.work._is_registered = self._is_registered
        port = replace(daemon.slots._port, is_registered=self._is_registered)
        daemon.slots._port = daemon.slots._saves._port = port

        async def confirm(request: Any, call: Call, proceed: Proceed) -> Any:
            if not self._is_registered(request.job, request.worker_id, request.incarnation):
                raise RequestRefused("worker_gone", f"worker {request.worker_id} is not registered", "")
            return Nothing()

        daemon.bus.wrap(ConfirmWorker, confirm, owner="simulation")

    def _is_registered(self, job: str, worker_id: str, incarnation: bytes) -> bool:
        writer = self.oracle.writers.get((job, worker_id, incarnation))
        return writer is not None and self.loop.time() < writer.gone_at

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

    # Callers.

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

    async def prepare(self) -> None:
        async with self.client("registrar") as operator:
            for job in [*(plan.name for plan in self.plans), HOSTILE]:
                await until_done(operator, CreateJob(job, drawn_settings(self.random)))
            for job in [*(plan.name for plan in self.plans if not plan.is_trusted), HOSTILE]:
                await self.add_token(operator, job, Role.WORKER, (job,))

    # Faults.

    async def make_faults(self) -> None:
        """Break the network, the disk, the storage and the clock until the faults end."""
        hosts = ["reader", "operator", *(f"{plan.name}-{number}" for plan in self.plans for number in range(2))]
        faults = (
            partial(self.partition, hosts),
            self.fill_disk,
            self.heal,
            self.heal,
            self._lose_storage,
            self._slow_storage,
            self._return_storage,
            self._set_clock_back,
            self._harm,
        )
        await self.cause_faults(faults, FAULTS_S, pause_s_max=2.0)
        self._return_storage()
        self.end_faults()
        self.network.heal()

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

    def start_actors(self, actors: TaskGroup) -> None:
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

    async def finish(self) -> None:
        async with self.client("auditor") as auditor:
            jobs = [plan.name for plan in self.plans]
            for trainer in self.trainers:
                if trainer.plan.name not in self.oracle.removed_jobs and not trainer.plan.is_managed:
                    await self._clean(trainer)
            for job in jobs:
                if job not in self.oracle.removed_jobs:
                    await self._collect_twice(auditor, job)
            await self.settle()
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
    with ExitStack() as patches:
        for name, value in SHORTER.items():
            patches.enter_context(patch(name, value))
        return simulated(CatalogSimulation, "catalogue", seed, watch)
