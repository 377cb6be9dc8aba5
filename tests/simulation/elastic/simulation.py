"""Simulates whole jobs: the real daemon and the real workers, on hosts that fail, with operators that interfere.

Invariants:
- A simulated world is a function of its seed.
- After the faults every job trains again within a bound, with all live workers, or was aborted for a reason; then it
  completes.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import anyio
from anyio.abc import TaskGroup

from forged.client import ForgedClient
from forged.config import Config
from forged.daemon import Daemon, Ports
from forged.data.messages import AuditData, ReadOwners, ReadTransfers
from forged.elastic.messages import ReportReady, ReportStopped, ResumeJob
from forged.elastic.phases import OVER, Phase
from forged.errors import RequestRefused
from forged.kernel.bus.requests import Proceed
from forged.kernel.ledger import FACT_PREFIX, read_all
from forged.kernel.messages import Call, Fact, Record
from forged.kernel.store.port import Store
from tests.simulation.base import ENDPOINT, SERVER, Simulation, simulated
from tests.simulation.data.simulation import JobData, LinkQuality, has_data
from tests.simulation.elastic.faults import FaultInjector
from tests.simulation.elastic.oracle import ElasticOracle
from tests.simulation.elastic.process import Job, Process
from tests.simulation.elastic.script_hooks import has_hooks, has_meetings
from tests.simulation.elastic.step_errors import StepErrors
from tests.simulation.elastic.tally import Tally
from tests.simulation.elastic.truth import Promise, SimulatedWorker, Truth
from tests.simulation.environment.loop import VirtualClock, VirtualLoop
from tests.simulation.environment.network import HostNetwork
from tests.simulation.oracle import broken

RECOVERY_MAX_S = 90.0
"""How long after the last fault every job must have trained again."""
RESCALES_IN_A_ROW = 3
"""So many may follow each other before a job trains again, each with all of its data."""
STEPS_MORE = 3
"""So many steps show that a job trains again, and so many more end it."""
STEADY_LIFE_S = (1000.0, 1000.0)
FACTS_MAX = 50_000


class Reader:
    """An owner without state, which notices that all state is loaded from the store."""

    def __init__(self, oracle: ElasticOracle) -> None:
        self._oracle = oracle

    async def load(self, store: Store) -> None:
        """Stored facts are history, also if the previous run of the daemon did not publish them any more."""
        self._oracle.heard([Record.read(entry.value) for entry in await read_all(store, FACT_PREFIX)])
        self._oracle.reloaded()


class ElasticWorld(Simulation):
    """What one seed makes of it all."""

    daemon_lives_s = (0.1, 20.0)

    def __init__(self, seed: int, loop: VirtualLoop, random: Random, *, in_groups: bool = False) -> None:
        super().__init__(seed, loop, random)
        self.met = Tally()
        self.oracle = ElasticOracle(loop.time, self.look, self._meet)
        names = [f"job{number}" for number in range(random.choice((1, 1, 2)))]
        self.jobs = [
            Job(
                name,
                random,
                StepErrors(Random(f"step errors of {name} in {seed}")),
                has_hooks=has_hooks(name, f"{seed}"),
                has_meetings=has_meetings(name, f"{seed}"),
            )
            for name in names
        ]
        if in_groups:
            for job in self.jobs:
                job.train_in_groups(Random(f"groups of {job.name} in {seed}"))
        self.hosts = [f"{job.name}-{slot}" for job in self.jobs for slot in range(job.slots + 1)]
        self.processes: list[Process] = []
        self.over = False
        self._tasks: TaskGroup | None = None
        self._position = 0
        self._small_journal = random.random() < 0.2
        steady = random.random() < 0.3
        self.link_quality = LinkQuality()
        if has_data(seed):
            self._bring_data(Random(f"data of {seed}"), steady=steady)
        for job in self.jobs:
            truth = self.oracle.truths[job.name] = Truth(job.name, job.config, group_size=job.group_size)
            if job.data is not None:
                self.oracle.data.follow(job.data, truth)
        if steady:
            self.daemon_lives_s = STEADY_LIFE_S
            self.network.links.faults = replace(self.network.links.faults, reset=0.0, drop=0.0, duplicate=0.0)
        elif self.network.links.faults.reset or self.network.links.faults.drop or self.network.links.faults.duplicate:
            self.oracle.disturbances.begin("hostile", self.hosts)
        self._faults = FaultInjector(self, kills=random.random() < 0.7, steady=steady)
        self._server = self.network.host(SERVER)

    def _bring_data(self, source: Random, *, steady: bool) -> None:
        """Have the jobs sample datasets."""
        if not steady:
            self.link_quality = LinkQuality.drawn(source, Random(f"hanging in {self.seed}"))
            self.oracle.disturbances.begin("link_quality", self.hosts)
        for job in self.jobs:
            data = JobData.drawn(job.name, source, job.config, job.slots, self.link_quality, self._meet)
            job.train_with(data, steady=steady)

    def _meet(self, what: str) -> None:
        self.met[what] += 1

    # What the stage asks of it.

    def ports(self, clock: VirtualClock, number: int) -> Ports:
        """No plugins, and secrets that the seed knows."""
        ports = super().ports(clock, number)
        assert isinstance(ports.network, HostNetwork)
        self._server = ports.network
        self._server.execution.enter()
        return replace(ports, token_bytes=Random(f"secrets {number} {self.seed}").randbytes)

    def config(self) -> Config:
        """In some worlds the journal is short, so that disconnected workers miss facts."""
        facts_max = 100 if self._small_journal else FACTS_MAX
        return replace(super().config(), journal_facts_max=facts_max, silence_max_s=6.0)

    def extend(self, daemon: Daemon) -> None:
        """Look at what it loads, at what it is told and at what becomes of it."""
        daemon.ledger.register(Reader(self.oracle))
        daemon.bus.on_handler_bug = self.handler_failed

        async def stopped(request: Any, call: Call, proceed: Proceed) -> Any:
            self.oracle.stopped(request)
            return await proceed(request)

        async def ready(request: Any, call: Call, proceed: Proceed) -> Any:
            self.oracle.has_state(request)
            return await proceed(request)

        async def told_part(request: Any, call: Call, proceed: Proceed) -> Any:
            part = await proceed(request)
            is_crowded = bool(daemon.data.jobs[request.job].full)
            self.oracle.data.told_part(request, part, is_crowded=is_crowded)
            return part

        async def told_owners(request: Any, call: Call, proceed: Proceed) -> Any:
            page = await proceed(request)
            self.look()
            self.oracle.data.told_owners(request, page)
            return page

        async def happens(record: Record) -> None:
            if self.daemon is daemon and isinstance(record.fact, Fact):
                self.look()
                self._faults.fact_published(record.fact, record.job)

        daemon.bus.wrap(ReportStopped, stopped, owner="simulation")
        daemon.bus.wrap(ReportReady, ready, owner="simulation")
        daemon.bus.wrap(ReadTransfers, told_part, owner="simulation")
        daemon.bus.wrap(ReadOwners, told_owners, owner="simulation")
        daemon.bus.on(Fact, happens, name="moments")

    def daemon_started(self, daemon: Daemon) -> None:
        """Its facts are watched from now on."""
        super().daemon_started(daemon)
        self._position = daemon.journal.last
        self.oracle.disturbances.end("daemon")

    def daemon_stopped(self) -> None:
        """Take what it has told, before it is gone."""
        self.look()
        self.oracle.disturbances.begin("daemon", self.hosts)

    def daemon_failed_to_start(self, code: str) -> None:
        self.oracle.breach(Promise.RUNS_AGAIN, f"a daemon did not start: {code}")

    # Looking on.

    def look(self) -> None:
        """Take the facts that have been told since."""
        if self.daemon is None:
            return
        journal = self.daemon.journal
        records = journal.after(self._position, len(journal))
        if records:
            self._position = records[-1].id
            for record in records:
                self.note(f"fact {record.id} {record.job} {record.fact!r}"[:400])
                truth = self.oracle.truths.get(record.job)
                if truth is not None and isinstance(record.fact, Fact):
                    self.met.fact(record.fact, truth)
                self.oracle.heard([record])

    def dies(self, simulated: SimulatedWorker) -> None:
        """Note where it was."""
        self.look()
        self.met.death(simulated, self.oracle.truths[simulated.job])

    def start(self, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have something happen beside, as a part of no process."""

        async def take_part() -> None:
            with self._letting_go():
                await act()

        assert self._tasks is not None
        self.network.links.context.copy().run(self._tasks.start_soon, take_part)

    def client(self, network: HostNetwork, source: Random) -> ForgedClient:
        """The client of a worker or operator."""
        clock = VirtualClock(self.loop, offset_s=source.uniform(0, 1e6))
        return ForgedClient(ENDPOINT, token=self.token, network=network, clock=clock, source=source)

    # The daemon.

    def suspend_daemon(self, seconds: float) -> bool:
        """As SIGSTOP does, and SIGCONT so much later; tells whether there is one to be suspended."""
        execution = self._server.execution
        if self.daemon is None or execution.suspended:
            return False
        self.note(f"the daemon is suspended for {seconds:.1f} s")
        execution.suspend()
        self.loop.call_later(seconds, execution.resume)
        return True

    def resume_daemon(self) -> None:
        """Let it go on."""
        self._server.execution.resume()

    # Workers.

    async def keep(self, job: Job, slot: int) -> None:
        """Keep a worker running here, with breaks."""
        truth, life = self.oracle.truths[job.name], 0
        await anyio.sleep(self.random.choice((0.0, 0.5, 10.0)) * self.random.random())
        while not self.over:
            if truth.phase in OVER:
                # It may be reopened.
                await anyio.sleep(0.5)
                continue
            life += 1
            process = self._process(job, slot, life)
            self.processes.append(process)
            self.oracle.simulated_workers.append(process.simulated)
            self.start(process.live)
            self._faults.process_started(process, job, slot)
            await process.ended.wait()
            self._faults.send_stale_messages(process)
            await anyio.sleep(self._break_s(job, slot))
            self.look()

    def _process(self, job: Job, slot: int, life: int) -> Process:
        """Now and then an id comes back, and now and then it does so on the host that is there for this."""
        name = f"w{slot}" if self.random.random() < 0.5 else f"w{slot}-{life}"
        host = self._hosts_of(job, slot)[self.random.random() >= 0.8]
        return Process(self, job, slot, name, host, mute=self._faults.starts_mute(job, slot))

    def _break_s(self, job: Job, slot: int) -> float:
        if not self.faults_active:
            return 0.5
        return 0.1 if self._faults.is_flapping(job, slot) else self.random.choice((0.0, 0.3, 2.0, 8.0))

    def living(self, job: Job | None = None) -> list[Process]:
        """The processes that live, of one job or of all."""
        return [process for process in self.processes if process.alive and job in (None, process.job)]

    # The whole.

    async def run(self) -> None:
        try:
            await self._live()
        finally:
            for process in self.processes:
                process.counters.close()

    async def _live(self) -> None:
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            self.start(partial(self.keep_daemon, tasks))
            with self._letting_go():
                await self.make_token()
                self.prepared.set()
                for job in self.jobs:
                    for slot in range(job.slots):
                        self.start(partial(self.keep, job, slot))
                self.start(self._watch)
                await self._faults.make()
                await self._recover()
                await self._finish()
                self.oracle.check()
            tasks.cancel_scope.cancel()

    @contextmanager
    def _letting_go(self) -> Iterator[None]:
        """An error ends everything, and a suspended process could not be ended."""
        try:
            yield
        except BaseException:
            self.resume_daemon()
            for process in self.processes:
                process.resume()
            raise

    async def _watch(self) -> None:
        while True:
            await anyio.sleep(0.1)
            self.look()
            self.oracle.check()
            for process in self.living():
                self.oracle.waits(process.simulated, for_daemon=process.waits_for_daemon)

    async def _recover(self) -> None:
        """After the faults every job trains again, with all live workers, or was aborted for a reason."""
        async with self.client(self.network.host("operator"), Random(f"recovery {self.seed}")) as operator:
            for job in self.jobs:
                while not await self._faults.request(operator, ResumeJob(job.name)):
                    await anyio.sleep(0.5)
        marks = {job.name: self._committed(job) for job in self.jobs}
        starve = self.oracle.data.starves
        await self._until(
            lambda: all(starve(job.name) or self._trains(job, marks[job.name]) for job in self.jobs), "train again"
        )
        for job in self.jobs:
            if starve(job.name):
                self._restock(job)
        await self._until(lambda: all(self._trains(job, marks[job.name]) for job in self.jobs), "train again")

    def _restock(self, job: Job) -> None:
        """Start a worker that has the shards that were lost."""
        self.note(f"{job.name} waits for shards")
        self._meet("a job waits for shards, and they come")
        truth, data = self.oracle.truths[job.name], job.data
        assert data is not None
        wanted = {worker.id for worker in truth.world.workers} | set(truth.added)
        process = next((process for process in self.living(job) if process.simulated.name in wanted), None)
        is_one_enough = process is not None and job.slots <= job.config.max_workers
        for slot in [process.slot] if process is not None and is_one_enough else range(job.slots):
            data.restock(slot, self._hosts_of(job, slot), job.slots)
        if process is not None:
            process.kill()

    def _hosts_of(self, job: Job, slot: int) -> tuple[str, str]:
        """Where processes of a slot are, and where they are now and then."""
        return f"{job.name}-{slot}", f"{job.name}-{job.slots}"

    async def _finish(self) -> None:
        """Running jobs complete, and the workers that complete them have reported everything."""
        there = {process.simulated for process in self.living()}
        for job in self.jobs:
            job.total = self._committed(job) + STEPS_MORE
        truths = self.oracle.truths.values()
        await self._until(lambda: all(truth.phase in OVER for truth in truths), "come to their ends")
        for job in self.jobs:
            truth = self.oracle.truths[job.name]
            is_early = self._committed(job) != job.total and not truth.lone_liar
            if truth.phase is Phase.COMPLETED and is_early:
                raise broken(Promise.STEPS, f"{job.name} was completed behind {self._committed(job)} of {job.total}")
        self.over = True
        await self._until(lambda: not self.living(), "end their processes")
        for job in self.jobs:
            if job.data is not None:
                await self._audit(job, {simulated for simulated in there if simulated.has_left})

    async def _audit(self, job: Job, tellers: set[SimulatedWorker]) -> None:
        """Hold what the daemon proves against what was."""
        data = self.oracle.data
        data.check_epochs(job.name)
        async with self.client(self.network.host("auditor"), Random(f"audit {self.seed}")) as auditor:
            for epoch in data.epochs(job.name):
                try:
                    view = await auditor.request(AuditData(job.name, epoch))
                except RequestRefused as error:
                    if error.code != "usage_none":
                        raise
                    view = None
                data.check_audit(job.name, epoch, view, tellers)

    async def _until(self, true: Callable[[], bool], what: str) -> None:
        fetching_s = max((job.data.fetching_s for job in self.jobs if job.data is not None), default=0.0)
        patience_s = RECOVERY_MAX_S + RESCALES_IN_A_ROW * fetching_s
        with anyio.move_on_after(patience_s):
            while not true():
                await anyio.sleep(0.2)
            return
        standing = "; ".join(map(self._standing, self.jobs))
        raise broken(Promise.RUNS_AGAIN, f"{patience_s:g} s later the jobs do not {what}: {standing}")

    def _committed(self, job: Job) -> int:
        return self.oracle.truths[job.name].steps_committed

    def _trains(self, job: Job, since: int) -> bool:
        truth = self.oracle.truths[job.name]
        if truth.phase in OVER:
            return True
        complete = truth.world.world_size == job.world_size_max
        return complete and truth.phase is Phase.RUNNING and self._committed(job) >= since + STEPS_MORE

    def _standing(self, job: Job) -> str:
        truth = self.oracle.truths[job.name]
        return (
            f"{job.name} is {truth.phase}, attempt {truth.attempt}, world {truth.world}, {self._committed(job)} steps"
        )


def simulate(
    seed: int, watch: Callable[[ElasticWorld], None] = lambda world: None, *, in_groups: bool = False
) -> ElasticWorld:
    """Live through a world; raises what was broken in it."""
    # What a worker knows of its process is not of the seed.
    with patch("forged.worker.registration.os", SimpleNamespace(getpid=lambda: 1)):
        return simulated(partial(ElasticWorld, in_groups=in_groups), "elastic", seed, watch)
