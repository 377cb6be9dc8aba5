"""A training process and the pulse that speaks for it, on one simulated host.

Invariants:
- They are two processes: each can be killed alone, both end with the host, and a suspended worker has a live pulse.
- What a killed process still does has no effect and is not checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from random import Random
from typing import Any, Protocol

import anyio
import msgspec
import numpy as np

from forged.client import ForgedClient
from forged.elastic.config import PULSE_INTERVAL_S, ElasticTrainingConfig
from forged.elastic.messages import LeaveJob, Pulse, ReportDeath
from forged.elastic.model import ClusterTopology, GlobalTrainingState, Standstill, WorkerId
from forged.errors import ForgedError, Unavailable
from forged.log import SILENT
from forged.worker.errors import StepAborted
from forged.worker.process.counters import Counters
from forged.worker.process.worker_process import SharedProcess
from forged.worker.transport.bulk_channel import LoopBulkTransport
from forged.worker.worker import ElasticWorker
from tests.simulation.base import ENDPOINT
from tests.simulation.data.simulation import JobData
from tests.simulation.elastic.oracle import ElasticOracle
from tests.simulation.elastic.script_hooks import BEFORE_A_MEETING, BEHIND_THE_CHANGE, ScriptHooks
from tests.simulation.elastic.step_errors import (
    BEFORE_OWN_COLLECTIVE_S,
    LOOK_S,
    VOIDED_STEPS,
    WAITS_LONG_S,
    OwnCollective,
    PeerGone,
    StepErrors,
)
from tests.simulation.elastic.truth import BATCH, Promise, SimulatedWorker, advance, samples, share_of
from tests.simulation.environment.loop import VirtualClock, VirtualLoop
from tests.simulation.environment.network import HostNetwork, SimulatedNetwork
from tests.simulation.oracle import broken

REPORT_S_MAX = 60.0
MUTE_S = 300.0
"""How long a worker that never becomes ready hangs."""
WARM_UP_STEPS = 3
RESCALE_SILENCES_MS = {5000: 5000, 20_000: 6000, 30_000: 15_000}
"""By the timeout of a rescale. With the second one, a script that hangs may fail long before the rescale is overdue."""
SAVING_S = (0.0, 0.0, 0.5, 8.0)
"""How long a draining worker may save its state before it leaves."""
ENDS_IN_ORDER = frozenset(
    {
        "worker_evicted",
        "job_aborted",
        "job_completed",
        "worker_exists",
        "job_over",
        "worker_undecided",
        "group_rank_taken",
    }
)
"""What a training process may be told that has done nothing wrong."""


class SimulationPort(Protocol):
    """What a process needs of its world."""

    loop: VirtualLoop
    random: Random
    network: SimulatedNetwork
    oracle: ElasticOracle
    token: str
    faults_active: bool

    @property
    def met(self) -> Counter[str]:
        """How often what has happened."""
        ...

    def note(self, text: str) -> None:
        """Write a line of the trace."""
        ...

    def look(self) -> None:
        """Take the facts that have been told since."""
        ...

    def start(self, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have something happen beside."""
        ...

    def client(self, network: HostNetwork, source: Random) -> ForgedClient:
        """The client of a worker or pulse."""
        ...

    def dies(self, simulated: SimulatedWorker) -> None:
        """A process is killed."""
        ...


def rate_after(steps: int) -> float:
    """The learning rate of a job with a schedule: a warm-up from 0."""
    return 0.0 if steps < WARM_UP_STEPS else 0.1 / steps


class Job:
    """What trains, and how."""

    data: JobData | None = None

    def __init__(
        self, name: str, random: Random, step_errors: StepErrors, *, has_hooks: bool, has_meetings: bool
    ) -> None:
        self.name = name
        self.has_hooks = has_hooks
        """Whether its scripts use the hooks of their worlds."""
        self.has_own_collectives = step_errors.has_own_collectives or (has_hooks and has_meetings)
        self.step_errors = step_errors
        self.total: int | None = None
        """How many steps it has; None while that is open."""
        self.group_size = 1
        self.ends_broken_groups = False
        """Whether a launcher ends the other processes of a group that has lost one."""
        self.slots = random.randint(1, 4)
        self.pace_s = random.choice((0.1, 0.3, 0.8))
        self.ballast = random.choice((0, 1000, 30_000))
        self.has_schedule = self.ballast > 0
        """Whether the scripts change the learning rate after each step, beginning with a rate of 0."""
        least = random.choice((1, random.randint(1, self.slots)))
        self.config = ElasticTrainingConfig(
            min_workers=least,
            max_workers=random.choice((least, self.slots, 100)),
            rescale_timeout_ms=(timeout_ms := random.choice(tuple(RESCALE_SILENCES_MS))),
            rescale_silence_ms=RESCALE_SILENCES_MS[timeout_ms],
            max_consecutive_failures=random.choice((2, 3, 50, 50)),
            use_synchronous_rescaling=random.random() < 0.75,
            stability_window_ms=random.choice((0, 500, 3000)),
            worker_heartbeat_timeout_ms=random.choice((4000, 8000)),
            failure_tolerance_percentage=random.choice((0, 20, 50, 100, 100, 100)),
            failure_window_ms=random.choice((0, 50, 500)),
            reconnect_grace_ms=random.choice((8000, 12_000)),
            leave_timeout_ms=random.choice((500, 8000, 8000)),
            min_workers_timeout_ms=random.choice((8000, 20_000, None, None)),
            stall_timeout_ms=random.choice((6000, 10_000)),
            evict_stalled=random.random() < 0.3,
        )

    def train_with(self, data: JobData, *, steady: bool) -> None:
        """Sample a dataset."""
        self.data, self.config = data, data.configured(self.config, steady=steady)

    def train_in_groups(self, source: Random) -> None:
        """Have processes train in groups, each on a slot of its own; some groups end when they have lost a process."""
        self.group_size = source.choice((2, 2, 2, 4))
        self.slots = self.group_size * source.randint(
            1 if self.group_size == 2 else 2, 3 if self.group_size == 2 else 2
        )
        least = source.choice((1, self.group_size, self.slots))
        most = source.choice((max(least, self.group_size), self.slots, self.slots + 1, 100))
        self.config = msgspec.structs.replace(self.config, min_workers=least, max_workers=most)
        self.ends_broken_groups = source.random() < 0.4

    def group_of(self, slot: int) -> tuple[str, int]:
        """The group of the processes of a slot, and their position in it."""
        return ("", 0) if self.group_size == 1 else (f"g{slot // self.group_size}", slot % self.group_size)

    @property
    def world_size_max(self) -> int:
        """How many train when all are there."""
        return min(self.slots, self.config.max_workers) // self.group_size * self.group_size


class SimulatedPulse:
    """The process that speaks for another."""

    def __init__(self, world: SimulationPort, process: Process, about: tuple[str, str, bytes]) -> None:
        self.network = world.network.host(process.simulated.host)
        self.over = anyio.Event()
        self.death = ""
        self.leave: dict[str, Any] = {}
        self._world = world
        self._about = about
        self._counters = process.counters
        self._scope = anyio.CancelScope()
        self._source = Random(world.random.getrandbits(64))

    async def speak(self) -> None:
        """Speak for the worker until it is gone, and then of its end."""
        self.network.execution.enter()
        with self._scope:
            while not self.over.is_set() or self.death or self.leave:
                try:
                    async with self._world.client(self.network, self._source) as client:
                        await self._beat(client)
                        if self.leave:
                            await client.request(LeaveJob(*self._about, **self.leave), timeout_s=REPORT_S_MAX)
                            self._world.met["a pulse says what its worker could not"] += 1
                        elif self.death:
                            await client.request(ReportDeath(*self._about, self.death), timeout_s=REPORT_S_MAX)
                        return
                except Unavailable as error:
                    self._world.note(f"the pulse of {self._about[1]} was told {error.code}")
                    await anyio.sleep(self._interval_s)

    async def _beat(self, client: ForgedClient) -> None:
        while not self.over.is_set():
            interval_s = self._interval_s
            client.signal(Pulse(*self._about, 0.0, self._counters.step, self._counters.marks, interval_s))
            with anyio.move_on_after(interval_s):
                await self.over.wait()

    @property
    def _interval_s(self) -> float:
        return self._counters.pulse_interval_s or PULSE_INTERVAL_S

    def tell(self, death: str = "") -> None:
        """The worker has gone: in good order, or so."""
        self.death = death
        self.over.set()

    def kill(self) -> None:
        """It goes without a word."""
        self._world.network.kill(self.network)
        self._scope.cancel()


class SimulatedWorkerProcess(SharedProcess):
    """What a simulated worker has of its process: one that speaks for it."""

    def __init__(self, process: Process) -> None:
        super().__init__(process.counters)
        self._process = process

    def leave_through_pulse(self, leave: Mapping[str, Any]) -> None:
        """Leave it to the pulse to tell with what the worker has left."""
        if self._process.alive and self._process.pulse is not None:
            self._process.pulse.leave = dict(leave)


class Process:
    """A training process. One that is `mute` registers and never becomes ready."""

    def __init__(self, world: SimulationPort, job: Job, slot: int, name: str, host: str, *, mute: bool = False) -> None:
        self.job = job
        self.slot = slot
        self.ended = anyio.Event()
        self.counters = Counters.create()
        self.pulse: SimulatedPulse | None = None
        self.mute = mute
        self._suspended_at = 0.0
        self._held_s = 0.0
        """For how long its script hangs in its next step."""
        self._world = world
        self._random = Random(world.random.getrandbits(64))
        self._network = world.network.host(host)
        self.clock = VirtualClock(world.loop, offset_s=self._random.uniform(0, 1e6))
        self._scope = anyio.CancelScope()
        data = job.data
        self.disk = data.disk(slot, host, job.slots) if data is not None and data.has_shards else None
        given = None if data is None or self.disk is None else data.training_data(self.disk)
        group, group_rank = job.group_of(slot)
        # Each group rank has a part of the state that differs from all others.
        part = 1 + group_rank
        self._state: dict[str, Any] = {"chain": np.full(1, part), "ballast": np.full(job.ballast, part)}
        self.worker = ElasticWorker(
            WorkerId(name, host, 0),
            job.config,
            job=job.name,
            state=self._state,
            token=world.token,
            network=self._network,
            clock=self.clock,
            process=SimulatedWorkerProcess(self),
            log=SILENT,
            random=self._random,
            carrier=LoopBulkTransport() if data is None else data.carrier(),
            data=given,
            sampler=None if data is None else data.sampler(),
            learning_rate=Random(name).choice((None, 0.0, 0.1)),
            global_batch_size=Random(name).choice((0, BATCH)) if data is None else 0,
            group=group,
            group_rank=group_rank,
            group_size=job.group_size,
        )
        self.worker.state_synchronized.subscribe(self._enter)
        self.worker.standstill.subscribe(self._stand_still)
        self.worker.leaving.subscribe(self._save)
        self._voiding = Random(b"voids " + self.worker.incarnation)
        self.simulated = SimulatedWorker(job.name, name, host, self.worker.incarnation, group, group_rank)
        self.hooks = ScriptHooks(
            self.worker,
            self.simulated,
            world.oracle,
            self._meet,
            self.kill,
            lambda: world.faults_active,
            is_used=job.has_hooks,
        )
        if self.disk is not None and given is not None:
            world.oracle.data.moves_in(self.simulated, self.disk, given.weight)

    async def _save(self, reason: str) -> None:
        """Some take their time before they go."""
        await anyio.sleep(Random(self.worker.incarnation).choice(SAVING_S))

    def _meet(self, what: str) -> None:
        self._world.met[what] += 1

    def _stand_still(self, standstill: Standstill) -> None:
        self.simulated.stands_still = standstill.lasted_s is None
        self._world.met["a worker stands still without a daemon"] += self.simulated.stands_still

    @property
    def alive(self) -> bool:
        return self.simulated.alive

    @property
    def suspended(self) -> bool:
        return self._network.execution.suspended

    @property
    def waits_for_daemon(self) -> bool:
        """Whether it has no connection, and knows of nothing else that keeps it from training."""
        view, session = self.worker._state.view, self.worker._session
        if session is None or session.is_over or self.suspended:
            return False
        is_stopped = view.paused or view.waiting or view.draining is not None or view.committed is not None
        is_over = view.end is not None or view.completed is not None
        return not (session._client.connected or is_stopped or is_over)

    async def live(self) -> None:
        """From its start to its end."""
        self._network.execution.enter()
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
            self._world.note(f"{self.simulated.name} was told {error}")
            if not isinstance(error, Unavailable) and error.code not in ENDS_IN_ORDER:
                raise broken(Promise.ANSWERS, f"{self.simulated.name} was told {error}") from error

    # Faults.

    def kill(self, *, unwritten: float = 0.0) -> None:
        """As kill -9 does; its pulse sees it. `unwritten`: how many connections have not got what it wrote last."""
        self._world.note(f"{self.simulated.name} is killed")
        self._world.dies(self.simulated)
        self._world.network.kill(self._network, unwritten=unwritten)
        self._scope.cancel()
        self._finish("its process was killed by SIGKILL")

    def vanish(self) -> None:
        """Its host is gone, or its pulse is killed with it."""
        self.simulated.alive = False
        if self.pulse is not None:
            self.pulse.kill()
        self.kill()

    def hold(self, seconds: float) -> None:
        """Let its script hang for a while, from its next step on."""
        self._held_s = seconds

    def suspend(self, seconds: float) -> None:
        """As SIGSTOP does, and SIGCONT so much later; its pulse goes on."""
        self._world.note(f"{self.simulated.name} is suspended for {seconds:.1f} s")
        self._network.execution.suspend()
        self._suspended_at = self._world.loop.time()
        self.simulated.hold(self._suspended_at, seconds)

        async def resume_later() -> None:
            await anyio.sleep(seconds)
            self.resume()

        self._world.start(resume_later)

    def resume(self) -> None:
        """Let it go on."""
        if self.suspended:
            self._world.note(f"{self.simulated.name} goes on")
            self._network.execution.resume()
            self.simulated.let_go(self._world.loop.time(), self._suspended_at)

    def _finish(self, death: str) -> None:
        self.simulated.alive = False
        if not self.ended.is_set():
            self.ended.set()
            if self.pulse is not None:
                self.pulse.tell(death)

    # Its script.

    async def _train(self) -> None:
        worker, simulated = self.worker, self.simulated
        async with worker.session(ENDPOINT):
            simulated.me = worker.worker_id
            self._world.note(f"{simulated.me} has started")
            self._start_pulse()
            if self.mute:
                simulated.hold(self._world.loop.time(), MUTE_S)
                await worker.register()
                self._world.note(f"{simulated.me} has registered, and is mute")
                await self._until_put_out()
                return
            while (step := await worker.begin_step(self.job.total)) is not None:
                if not await self._step(step):
                    return
            simulated.alive, simulated.has_left = False, True
            self._world.note(f"{simulated.me} has left behind step {worker.step}")

    async def _until_put_out(self) -> None:
        """Do nothing until the other workers continue without this one."""
        gone = self._world.oracle.is_gone
        with anyio.move_on_after(MUTE_S):
            while not gone(self.simulated):
                await anyio.sleep(0.5)

    def _start_pulse(self) -> None:
        about = (self.job.name, self.simulated.name, self.worker.incarnation)
        self.pulse = SimulatedPulse(self._world, self, about)
        self._world.start(self.pulse.speak)

    def _enter(self, state: GlobalTrainingState) -> None:
        self._world.look()
        known = self.worker.current_topology
        if self.alive and known is not None:
            self._world.oracle.enters(self.simulated, known, state.current_step)

    async def _step(self, step: int) -> bool:
        """Do a step; false where its exception was taken for one of the script's own, so that the worker leaves."""
        worker, simulated, world = self.worker, self.simulated, self._world
        world.look()
        if simulated.alive:
            world.oracle.begins(simulated, step, self._steps_in_state())
            if worker.sampler is not None:
                world.oracle.data.begins(simulated, step, worker.sampler)
        own = self.job.step_errors.collectives[simulated.generation, step]
        try:
            await self._do(step, own)
        except (StepAborted, PeerGone) as error:
            own.left_by = own.left_by or simulated.name
            if not await worker.repeats_step(step, error):
                await self._fail(error)
                return False
        counts = await worker.finish_step()
        world.look()
        if simulated.alive:
            world.oracle.ends(simulated, self._steps_in_state(), counts=counts)
            if counts and worker.sampler is not None:
                world.oracle.data.counts(simulated, step)
            if counts:
                world.note(f"{simulated.name} has committed step {step} in world {simulated.generation}")
        return True

    async def _do(self, step: int, own: OwnCollective) -> None:
        has_own = self.job.has_own_collectives
        await self._work(BEFORE_OWN_COLLECTIVE_S if has_own else self.job.pace_s)
        voids = self.job.step_errors.voids and self._voiding.random() < VOIDED_STEPS
        voids_first = voids and self._voiding.random() < 0.5
        if voids_first:
            self._void(step)
        if has_own:
            await self.worker.barrier()
            self.hooks.may_die(BEFORE_A_MEETING)
            with self.hooks.meeting():
                await self._meet_peers(own)
        total = await self._exchange(step)
        if voids:
            self._void(step)
        await self.hooks.vote()
        if self.job.group_size > 1 and not self.job.has_hooks:
            # A group cannot go back behind a step that one of its ranks has applied, so all agree before.
            await self.worker.barrier()
        await self._work(0.05)
        self._apply(total)
        self.hooks.may_die(BEHIND_THE_CHANGE)

    def _void(self, step: int) -> None:
        self._world.note(f"the script of {self.simulated.name} voids step {step}")
        self._world.met["a script voids a step"] += 1
        raise StepAborted("the batch is damaged")

    async def _meet_peers(self, own: OwnCollective) -> None:
        """A collective of the script's own."""
        simulated, world = self.simulated, self._world
        topology = self.worker.current_topology
        assert topology is not None
        own.here.add(simulated.name)
        came_at = world.loop.time()
        await self._work(self.job.pace_s)
        while True:
            if self.hooks.is_used:
                self._look_for_release(topology)
            elif gone := own.left_by or world.oracle.gone_from(simulated, topology):
                world.note(f"{simulated.name} has lost {gone} in a collective of its own")
                world.met["a collective of the scripts' own loses a peer"] += 1
                raise PeerGone(f"connection closed by peer {gone}")
            if len(own.here) == topology.world_size:
                return
            waited_s = world.loop.time() - came_at
            if waited_s > WAITS_LONG_S and not self.hooks.is_used:
                simulated.hold(came_at, waited_s + LOOK_S)
            await anyio.sleep(LOOK_S)

    def _look_for_release(self, topology: ClusterTopology) -> None:
        """Raise once the script has been told that its world is over."""
        if self.hooks.is_released:
            self._world.met["a collective of the scripts' own is released"] += 1
            raise PeerGone("the sockets are shut down")
        if self.alive and not self.suspended:
            self._world.oracle.must_be_released(self.simulated, topology)

    async def _fail(self, error: Exception) -> None:
        """Leave as a worker whose script has failed."""
        self._world.note(f"the script of {self.simulated.name} has failed: {error}")
        self._world.look()
        if self.simulated.alive:
            self._world.oracle.fails(self.simulated, error)
        self.simulated.alive = False
        await self.worker.leave_because(error)

    async def _exchange(self, step: int) -> int:
        worker, simulated = self.worker, self.simulated
        self._world.look()
        rank, share = worker.rank, share_of(worker.rank, worker.world_size)
        if simulated.alive:
            pace = (worker.learning_rate, worker.global_batch_size)
            self._world.oracle.contributes(simulated, rank, share, pace)
            if worker.sampler is not None:
                self._world.oracle.data.draws(simulated, step, rank, worker.batch().tolist())
        own = np.array([samples(self.job.name, step, share)], np.int64)
        if step % 3 == 0:
            await worker.barrier()
        total = await worker.all_reduce(own)
        if step % 4 == 0:
            heard = await worker.broadcast(total, root=step % worker.world_size)
            if not np.array_equal(heard, total):
                raise broken(Promise.STATE, f"{simulated.me} has {total} in step {step}, and another has {heard}")
        return int(total[0])

    def _apply(self, total: int) -> None:
        if self.simulated.alive:
            self._world.oracle.finishes(self.simulated)
        if self.job.has_schedule:
            worker = self.worker
            worker.update_training_state(worker.epoch, worker.step, rate_after(worker.step + 1))
        self._state["chain"][0] = advance(int(self._state["chain"][0]), total)
        self._state["ballast"][:] = self._state["chain"][0]

    async def _work(self, about_s: float) -> None:
        held_s, self._held_s = self._held_s, 0.0
        if held_s:
            self._world.note(f"{self.simulated.name} is held up for {held_s:.1f} s")
            self.simulated.hold(self._world.loop.time(), held_s)
        await anyio.sleep(held_s + self._random.uniform(0.2, 1.0) * about_s)

    def _steps_in_state(self) -> int:
        """The chain, if all of the state is of one piece."""
        chain = int(self._state["chain"][0])
        return chain if bool((self._state["ballast"] == chain).all()) else -1


def _leaves(errors: BaseExceptionGroup[ForgedError]) -> list[ForgedError]:
    found: list[ForgedError] = []
    for error in errors.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
