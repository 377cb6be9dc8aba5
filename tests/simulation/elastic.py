"""Whole jobs that train: the real daemon and the real workers, on hosts that fail, with operators who interfere.

Law: a world is a function of its seed, as in `world`. A training process and its pulse are two processes on one host:
each can be killed alone, both go with the host. Whatever a killed process still does has no effect and is not watched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import anyio
import numpy as np
from anyio.abc import TaskGroup

from forged.client import ForgedClient
from forged.config import Config
from forged.daemon import Daemon, Ports
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.members import PULSE_INTERVAL_S
from forged.elastic.messages import (
    AbortJob,
    DrainWorker,
    EvictWorker,
    PauseJob,
    Pulse,
    ReportDeath,
    RescaleJob,
    ResumeJob,
)
from forged.elastic.model import WorkerId
from forged.elastic.phases import OVER, Phase
from forged.errors import ForgedError, RequestRefused, Unavailable
from forged.ledger import FACT_PREFIX, read_all
from forged.messages import Record, Request
from forged.store.port import Store
from forged.worker.carriers import LoopCarrier
from forged.worker.counters import Counters
from forged.worker.errors import StepAborted
from forged.worker.worker import ElasticWorker
from tests.simulation.elastic_oracle import ElasticOracle, Trainee, Truth, advance, samples, share_of
from tests.simulation.loop import VirtualClock, VirtualLoop, run
from tests.simulation.network import HostNetwork
from tests.simulation.oracle import Broken
from tests.simulation.stage import ENDPOINT, SERVER, SOCKET, Stage

TROUBLE_S = 30.0
RECOVERY_MAX_S = 90.0
"""How long after the trouble every job must have trained again."""
STEPS_MORE = 3
"""So many steps show that a job trains again, and so many more end it."""
REPORT_S_MAX = 60.0
HELD_S = (0.5, 14.0)
PORT = 7000
OUTSIDE = ("operator",)
FACTS_MAX = 50_000
REFUSALS_IN_ORDER = frozenset({"job_untrained", "worker_unknown", "job_over", "workers_none", "job_unknown"})
"""What an operator may be told at any time."""
ENDS_IN_ORDER = frozenset({"worker_evicted", "job_aborted", "worker_exists", "job_over", "worker_undecided"})
"""What a training process may be told that has done nothing wrong."""


class Reader:
    """An owner of no state, which notices that everybody's is read from the store."""

    def __init__(self, oracle: ElasticOracle) -> None:
        self._oracle = oracle

    async def load(self, store: Store) -> None:
        """What a daemon finds is history, also if the one before told nobody any more."""
        self._oracle.heard([Record.read(entry.value) for entry in await read_all(store, FACT_PREFIX)])
        self._oracle.reloaded()


class Job:
    """What trains, and how."""

    def __init__(self, name: str, random: Random) -> None:
        self.name = name
        self.total: int | None = None
        """How many steps it has; None while that is open."""
        self.slots = random.randint(1, 4)
        self.pace_s = random.choice((0.1, 0.3, 0.8))
        self.ballast = random.choice((0, 1000, 30_000))
        least = random.randint(1, self.slots)
        self.config = ElasticTrainingConfig(
            min_workers=least,
            max_workers=random.choice((least, self.slots, 100)),
            rescale_timeout_ms=random.choice((20_000, 30_000)),
            max_consecutive_failures=random.choice((2, 3, 50)),
            stability_window_ms=random.choice((0, 500, 3000)),
            worker_heartbeat_timeout_ms=random.choice((4000, 8000)),
            failure_tolerance_percentage=random.choice((20, 50, 100, 100)),
            failure_window_ms=random.choice((0, 50, 500)),
            reconnect_grace_ms=random.choice((8000, 12_000)),
            min_workers_timeout_ms=random.choice((20_000, None, None)),
            stall_timeout_ms=random.choice((3000, 8000)),
            evict_stalled=random.random() < 0.3,
        )

    @property
    def world_size_max(self) -> int:
        """How many train when all are there."""
        return min(self.slots, self.config.max_workers)


class SimulatedPulse:
    """The process that speaks for another."""

    def __init__(self, world: ElasticWorld, process: Process, about: tuple[str, str, bytes]) -> None:
        self.network = world.network.host(process.trainee.host)
        self.over = anyio.Event()
        self.death = ""
        self._world = world
        self._about = about
        self._counters = process.counters
        self._scope = anyio.CancelScope()
        self._source = Random(world.random.getrandbits(64))

    async def speak(self) -> None:
        """Speak for the worker until it is gone, and then of its end."""
        with self._scope:
            while not self.over.is_set() or self.death:
                try:
                    async with self._world.client(self.network, self._source) as client:
                        await self._beat(client)
                        if self.death:
                            await client.request(ReportDeath(*self._about, self.death), timeout_s=REPORT_S_MAX)
                        return
                except Unavailable as error:
                    self._world.note(f"the pulse of {self._about[1]} was told {error.code}")
        self._counters.close()

    async def _beat(self, client: ForgedClient) -> None:
        while not self.over.is_set():
            client.signal(Pulse(*self._about, 0.0, self._counters.step, self._counters.marks))
            with anyio.move_on_after(PULSE_INTERVAL_S):
                await self.over.wait()

    def tell(self, death: str = "") -> None:
        """The worker has gone: in good order, or so."""
        self.death = death
        self.over.set()

    def kill(self) -> None:
        """It goes without a word."""
        self._world.network.kill(self.network)
        self._scope.cancel()


class Process:
    """A training process."""

    def __init__(self, world: ElasticWorld, job: Job, name: str, host: str) -> None:
        self.job = job
        self.trainee = Trainee(job.name, name, host)
        self.ended = anyio.Event()
        self.counters = Counters.create()
        self.pulse: SimulatedPulse | None = None
        self._held_s = 0.0
        """For how long its script hangs in its next step."""
        self._world = world
        self._random = Random(world.random.getrandbits(64))
        self._network: HostNetwork = world.network.host(host)
        self._scope = anyio.CancelScope()
        self._state: dict[str, Any] = {"chain": np.ones(1, np.int64), "ballast": np.ones(job.ballast, np.int64)}
        self.worker = ElasticWorker(
            WorkerId(name, host, 0),
            job.config,
            job=job.name,
            state=self._state,
            token=world.token,
            network=self._network,
            clock=VirtualClock(world.loop, offset_s=self._random.uniform(0, 1e6)),
            counters=self.counters,
            random=self._random,
            carrier=LoopCarrier(),
        )

    @property
    def alive(self) -> bool:
        return self.trainee.alive

    async def live(self) -> None:
        """From its start to its end."""
        try:
            with self._scope:
                await self._train()
        except* ForgedError as errors:
            self._told(errors)
        finally:
            self._finish("")

    def _told(self, errors: BaseExceptionGroup[ForgedError]) -> None:
        if not self.alive:
            return
        for error in _leaves(errors):
            self._world.note(f"{self.trainee.name} was told {error}")
            if not isinstance(error, Unavailable) and error.code not in ENDS_IN_ORDER:
                raise Broken(f"{self.trainee.name} was told {error}") from error

    def kill(self) -> None:
        """As kill -9 does; its pulse sees it."""
        self._world.note(f"{self.trainee.name} is killed")
        self._world.network.kill(self._network)
        self._scope.cancel()
        self._finish("its process was killed by SIGKILL")

    def vanish(self) -> None:
        """Its host is gone, or whoever ends it ends its pulse, too."""
        self.trainee.alive = False
        if self.pulse is not None:
            self.pulse.kill()
        self.kill()

    def hold(self, seconds: float) -> None:
        """Let its script hang for a while, from its next step on."""
        self._held_s = seconds

    def _finish(self, death: str) -> None:
        self.trainee.alive = False
        if not self.ended.is_set():
            self.ended.set()
            if self.pulse is not None:
                self.pulse.tell(death)

    async def _train(self) -> None:
        worker, trainee = self.worker, self.trainee
        async with worker.session(ENDPOINT):
            trainee.me = worker.worker_id
            self._world.note(f"{trainee.me} has started")
            self._start_pulse()
            while (step := await worker.begin_step(self.job.total)) is not None:
                await self._step(step)
            trainee.alive = False
            self._world.note(f"{trainee.me} has left behind step {worker.step}")

    def _start_pulse(self) -> None:
        about = (self.job.name, self.trainee.name, self.worker.incarnation)
        self.pulse = SimulatedPulse(self._world, self, about)
        self._world.start(self.pulse.speak)

    async def _step(self, step: int) -> None:
        worker, trainee, world = self.worker, self.trainee, self._world
        world.look()
        trainee.generation = worker.generation
        world.oracle.begins(trainee, worker.current_topology, step, self._steps_in_state())
        await self._work(self.job.pace_s)
        try:
            total = await self._exchange(step)
        except StepAborted:
            total = None
        if total is not None:
            await self._work(0.05)
            self._apply(total)
        counts = await worker.finish_step()
        world.look()
        if trainee.alive:
            world.oracle.ends(trainee, self._steps_in_state(), counts=counts)
            if counts:
                world.note(f"{trainee.name} has committed step {step} in world {trainee.generation}")

    async def _exchange(self, step: int) -> int:
        worker, trainee = self.worker, self.trainee
        self._world.look()
        rank, share = worker.rank, share_of(worker.rank, worker.world_size)
        if trainee.alive:
            self._world.oracle.contributes(trainee, rank, share)
        own = np.array([samples(self.job.name, step, share)], np.int64)
        if step % 3 == 0:
            await worker.barrier()
        total = await worker.all_reduce(own)
        if step % 4 == 0:
            heard = await worker.broadcast(total, root=step % worker.world_size)
            if not np.array_equal(heard, total):
                raise Broken(f"{trainee.me} has {total} in step {step}, and another has {heard}")
        return int(total[0])

    def _apply(self, total: int) -> None:
        if self.trainee.alive:
            self._world.oracle.finishes(self.trainee)
        self._state["chain"][0] = advance(int(self._state["chain"][0]), total)
        self._state["ballast"][:] = self._state["chain"][0]

    async def _work(self, about_s: float) -> None:
        held_s, self._held_s = self._held_s, 0.0
        if held_s:
            now = self._world.loop.time()
            self._world.note(f"{self.trainee.name} is held up for {held_s:.1f} s")
            self.trainee.held_since, self.trainee.held_until = now, now + held_s
        await anyio.sleep(held_s + self._random.uniform(0.2, 1.0) * about_s)

    def _steps_in_state(self) -> int:
        """The chain, if all of the state is of one piece."""
        chain = int(self._state["chain"][0])
        return chain if bool((self._state["ballast"] == chain).all()) else -1


class ElasticWorld(Stage):
    """What one seed makes of it all."""

    daemon_lives_s = (0.1, 20.0)

    def __init__(self, seed: int, loop: VirtualLoop, random: Random) -> None:
        super().__init__(seed, loop, random)
        self.oracle = ElasticOracle(loop.time)
        self.jobs = [Job(f"job{number}", random) for number in range(random.choice((1, 1, 2)))]
        self.hosts = [f"{job.name}-{slot}" for job in self.jobs for slot in range(job.slots)]
        self.processes: list[Process] = []
        self.over = False
        self._tasks: TaskGroup | None = None
        self._position = 0
        self._small_journal = random.random() < 0.2
        self._grim = random.random() < 0.7
        """Whether processes and hosts die in this world; in others only what is between them fails."""
        for job in self.jobs:
            self.oracle.truths[job.name] = Truth(job.name, job.config)
        if self.network.links.faults.reset or self.network.links.faults.drop or self.network.links.faults.duplicate:
            self.oracle.disturbances.begin("hostile", self.hosts)
        self.oracle.disturbances.begin("daemon", self.hosts)

    # What the stage asks of it.

    def ports(self, clock: VirtualClock, number: int) -> Ports:
        """No plugins, and secrets that the seed knows."""
        return Ports(
            clock,
            self.network.host(SERVER),
            number,
            0,
            self.open_store_of(self.disk),
            token_bytes=Random(f"secrets {number} {self.seed}").randbytes,
            random=Random(f"daemon {number} {self.seed}"),
        )

    def config(self) -> Config:
        """In some worlds facts are forgotten soon, so that workers who were away have to ask."""
        return Config(
            data_dir="/",
            socket=SOCKET,
            listen=(ENDPOINT,),
            anonymous_loopback_role="none",
            unix_other_role="operator",
            journal_facts_max=100 if self._small_journal else FACTS_MAX,
            silence_max_s=6.0,
        )

    def extend(self, daemon: Daemon) -> None:
        """Look at what it loads."""
        daemon.ledger.join(Reader(self.oracle))

    def daemon_ready(self, daemon: Daemon) -> None:
        """Its facts are watched from now on."""
        self._position = daemon.journal.last
        self.oracle.disturbances.end("daemon")

    def daemon_over(self) -> None:
        """Take what it has told, before it is gone."""
        self.look()
        self.oracle.disturbances.begin("daemon", self.hosts)

    def did_not_start(self, code: str) -> None:
        """Only its store may be a reason."""
        if not code.startswith("store_"):
            self.oracle.breach(f"a daemon did not start: {code}")

    # Looking on.

    def look(self) -> None:
        """Take the facts that have been told since."""
        if self.daemon is None:
            return
        journal = self.daemon.journal
        records = journal.after(self._position, len(journal))
        if records:
            self._position = records[-1].id
            self.oracle.heard(records)
            for record in records:
                self.note(f"fact {record.id} {record.job} {record.fact!r}"[:400])

    def start(self, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have something happen beside."""
        assert self._tasks is not None
        self._tasks.start_soon(act)

    def client(self, network: HostNetwork, source: Random) -> ForgedClient:
        """A client of somebody's."""
        clock = VirtualClock(self.loop, offset_s=source.uniform(0, 1e6))
        return ForgedClient(ENDPOINT, token=self.token, network=network, clock=clock, source=source)

    # Those who train.

    async def keep(self, job: Job, slot: int) -> None:
        """See to it that somebody trains here, with breaks."""
        truth, life = self.oracle.truths[job.name], 0
        await anyio.sleep(self.random.choice((0.0, 0.5, 10.0)) * self.random.random())
        while truth.phase not in OVER and not self.over:
            life += 1
            name = f"w{slot}" if self.random.random() < 0.5 else f"w{slot}-{life}"
            process = Process(self, job, name, f"{job.name}-{slot}")
            self.processes.append(process)
            self.oracle.trainees.append(process.trainee)
            self.start(process.live)
            await process.ended.wait()
            await anyio.sleep(self.random.choice((0.0, 0.3, 2.0, 8.0)) if self.trouble else 0.5)
            self.look()

    def living(self, job: Job | None = None) -> list[Process]:
        """The processes that live, of one job or of all."""
        return [process for process in self.processes if process.alive and job in (None, process.job)]

    # Trouble.

    async def make_trouble(self) -> None:
        """Until it ends."""
        ends_at = self.loop.time() + TROUBLE_S
        async with self.client(self.network.host("operator"), Random(f"interference {self.seed}")) as operator:
            while self.loop.time() < ends_at:
                await anyio.sleep(self.random.uniform(0.1, 4.0))
                deeds = [self._partition, self._part_workers, self._heal, self._heal, self._hold, self._fill]
                if self._grim:
                    deeds += [self._kill, self._kill, self._kill_both, self._lose_host]
                if self.random.random() < 0.3:
                    await self._interfere(operator)
                else:
                    self.random.choice(deeds)()
        self.end_trouble()
        for cause in ("hostile", "partition", "host"):
            self.oracle.disturbances.end(cause)

    def _pick(self) -> Process | None:
        living = self.living()
        return self.random.choice(living) if living else None

    def _partition(self) -> None:
        cut_off = self.random.sample(self.hosts, self.random.randint(1, len(self.hosts)))
        self.network.partition(cut_off, [SERVER], one_way=self.random.random() < 0.3)
        self.oracle.disturbances.begin("partition", cut_off)

    def _part_workers(self) -> None:
        one, *others = self.random.sample(self.hosts, len(self.hosts))
        self.network.partition([one], others, one_way=self.random.random() < 0.3)
        self.oracle.disturbances.begin("partition", self.hosts)

    def _heal(self) -> None:
        self.heal()
        self.oracle.disturbances.end("partition")

    def _fill(self) -> None:
        self.fill_disk()
        # A daemon that cannot write cannot take back whom it has lost.
        self.oracle.disturbances.begin("partition", self.hosts)

    def _hold(self) -> None:
        if (process := self._pick()) is not None:
            process.hold(self.random.uniform(*HELD_S))

    def _kill(self) -> None:
        if (process := self._pick()) is not None:
            process.kill()

    def _kill_both(self) -> None:
        if (process := self._pick()) is not None:
            process.vanish()

    def _lose_host(self) -> None:
        if (process := self._pick()) is not None:
            self.oracle.disturbances.begin("host", [process.trainee.host])
            process.vanish()
            self.network.crash(process.trainee.host, host_gone=True)

    async def _interfere(self, operator: ForgedClient) -> None:
        job = self.random.choice(self.jobs)
        process = self._pick()
        name = process.trainee.name if process is not None and process.job is job else "nobody"
        choices: tuple[Request[Any], ...] = (
            PauseJob(job.name),
            ResumeJob(job.name),
            ResumeJob(job.name),
            RescaleJob(job.name),
            RescaleJob(job.name),
            DrainWorker(job.name, name),
            EvictWorker(job.name, name),
            *([AbortJob(job.name)] if self.random.random() < 0.2 else []),
        )
        request = self.random.choice(choices)
        self.oracle.truths[job.name].abort_wanted |= isinstance(request, AbortJob)
        if isinstance(request, EvictWorker):
            for trainee in self.oracle.trainees:
                trainee.evicted |= (trainee.job, trainee.name) == (job.name, name)
        await self._ask(operator, request)

    async def _ask(self, operator: ForgedClient, request: Request[Any]) -> bool:
        self.note(f"the operator wants {request!r}")
        try:
            await operator.request(request, timeout_s=5.0)
        except RequestRefused as error:
            if error.code not in REFUSALS_IN_ORDER:
                raise Broken(f"the operator was refused {request!r}: {error}") from error
            self.note(f"the operator was refused: {error.code}")
        except Unavailable as error:
            self.note(f"the operator was told {error.code}")
            return False
        return True

    # The whole.

    async def live(self) -> None:
        """From the first start to the last check."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            tasks.start_soon(self.keep_daemon, tasks)
            await self.make_token()
            self.prepared.set()
            for job in self.jobs:
                for slot in range(job.slots):
                    tasks.start_soon(self.keep, job, slot)
            tasks.start_soon(self._watch)
            await self.make_trouble()
            await self._recover()
            await self._finish()
            self.oracle.check()
            tasks.cancel_scope.cancel()

    async def _watch(self) -> None:
        while True:
            await anyio.sleep(0.1)
            self.look()
            self.oracle.check()

    async def _recover(self) -> None:
        """After the trouble every job trains again, with all who are there, or was given up for a reason."""
        async with self.client(self.network.host("operator"), Random(f"recovery {self.seed}")) as operator:
            for job in self.jobs:
                while not await self._ask(operator, ResumeJob(job.name)):
                    await anyio.sleep(0.5)
        marks = {job.name: self._committed(job) for job in self.jobs}
        await self._until(lambda: all(self._trains(job, marks[job.name]) for job in self.jobs), "train again")

    async def _finish(self) -> None:
        """What trains comes to its end."""
        for job in self.jobs:
            job.total = self._committed(job) + STEPS_MORE
        truths = self.oracle.truths.values()
        await self._until(lambda: all(truth.phase in OVER for truth in truths), "come to their ends")
        for job in self.jobs:
            if self.oracle.truths[job.name].phase is Phase.COMPLETED and self._committed(job) != job.total:
                raise Broken(f"{job.name} was completed behind {self._committed(job)} of {job.total} steps")
        self.over = True
        await self._until(lambda: not self.living(), "end their processes")

    async def _until(self, true: Callable[[], bool], what: str) -> None:
        with anyio.move_on_after(RECOVERY_MAX_S):
            while not true():
                await anyio.sleep(0.2)
            return
        raise Broken(f"{RECOVERY_MAX_S:g} s later the jobs do not {what}: {'; '.join(map(self._standing, self.jobs))}")

    def _committed(self, job: Job) -> int:
        truth = self.oracle.truths[job.name]
        return truth.committed.get(truth.generation, 0)

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


def _leaves(errors: BaseExceptionGroup[ForgedError]) -> list[ForgedError]:
    found: list[ForgedError] = []
    for error in errors.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


def simulate(seed: int, watch: Callable[[ElasticWorld], None] = lambda world: None) -> ElasticWorld:
    """Live through a world; raises what was broken in it."""

    async def main() -> ElasticWorld:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        world = ElasticWorld(seed, loop, Random(f"elastic {seed}"))
        watch(world)
        await world.live()
        return world

    # What a worker knows of its process is not of the seed.
    with patch("forged.worker.worker.os", SimpleNamespace(getpid=lambda: 1)):
        return run(main, seed)
