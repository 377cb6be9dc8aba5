"""The faults of a simulated world: hosts, networks, clocks and processes that fail, and workers that lie.

Invariants:
- Every draw comes from the world's seed. The oracle is told what makes a network bad or a script late, so that it can
  check the daemon's reasons.
- The faults end, and with them those that were prepared for later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import anyio

from forged.client import ForgedClient
from forged.elastic.messages import (
    AbortJob,
    DrainWorker,
    EvictWorker,
    GroupBroken,
    Heartbeat,
    JobAborted,
    LeaveJob,
    PauseJob,
    Pulse,
    ReopenJob,
    ReportReady,
    ReportStopped,
    ReportUnreachablePeer,
    RescaleCompleted,
    RescaleJob,
    RescaleStarted,
    RescaleSynchronising,
    ResumeJob,
    WorkerFailed,
    WorkerJoined,
)
from forged.errors import RequestRefused, Unavailable
from forged.kernel.messages import Fact, Request
from tests.simulation.base import SERVER
from tests.simulation.data.simulation import FULL_S, Disk
from tests.simulation.elastic.process import Job, Process
from tests.simulation.elastic.truth import IMPOSSIBLE_STEP, PAUSE, WAITS_S, Promise
from tests.simulation.oracle import broken

if TYPE_CHECKING:
    from tests.simulation.elastic.simulation import ElasticWorld

FAULTS_S = 30.0
HELD_S = (0.5, 14.0)
SUSPENDED_S = (0.5, 30.0)
DAEMON_SUSPENDED_S = (0.2, 3.0)
CLOCK_JUMP_S = 1e5
FLAPS_S = (3.0, 8.0)
FLAP_LIVES_S = (0.0, 1.0)
SLOW_BYTES_PER_S = (10_000, 60_000)
PAUSES_S = (0.5, 12.0)
CORRUPTIONS = 0.3
"""How often a disk spoils a shard when something else happens."""
FALSE_STEPS = 10**6
FALSE_WORDS = 0.1
"""How often a member lies about its steps or the end of the training when something else happens."""
STEPS_AHEAD = (0, 1, 5, 500, FALSE_STEPS)
"""How far ahead of the committed steps it says that it is."""
LIVES_ON_S = (0.0, 5.0)
"""How long its process goes on after that."""
REOPENED = 0.5
"""How often an operator reopens a job that is aborted."""
ENDED_AFTER_S = (0.0, 1.0)
"""How soon a launcher ends the rest of a broken group."""
REOPENED_AFTER_S = (0.0, 0.5, 5.0)
STALE_MESSAGES_MAX = 5
VALID_REFUSALS = frozenset({"job_untrained", "worker_unknown", "job_over", "workers_none", "job_unknown"})
"""What an operator may be told at any time."""
STALE_REFUSALS = VALID_REFUSALS | {"attempt_over", "step_impossible"}
MOMENTS = (WorkerJoined, RescaleStarted, RescaleSynchronising, RescaleCompleted, WorkerFailed)
"""The facts at which a prepared fault may strike."""


class FaultInjector:
    """Injects faults into one simulated world."""

    def __init__(self, world: ElasticWorld, *, kills: bool, steady: bool) -> None:
        self._world = world
        self._random = world.random
        self._kills = kills
        """Whether processes and hosts die in this world; in the rest only the network fails."""
        self._steady = steady
        """Whether the daemon lives on and every network is good, so that only a worker's end may count as such."""
        self._ambushes = kills and self._random.random() < 0.5
        self._relieves = self._random.random() < 0.25
        """Whether whole worlds are drained when a joiner comes."""
        self._rotting = Random(f"rot {world.seed}")
        self._lying = Random(f"lies {world.seed}")
        self._reopening = Random(f"reopenings {world.seed}")
        self._grouping = Random(f"groups {world.seed}")
        self._liars: dict[str, Process] = {}
        self._flapping: dict[tuple[str, int], float] = {}
        """Until when processes of a slot die early."""
        if not steady and self._random.random() < 0.3:
            self._slow_down()

    # From outside.

    async def make(self) -> None:
        """Until it ends."""
        world = self._world
        ends_at = world.loop.time() + FAULTS_S
        source = Random(f"interference {world.seed}")
        async with world.client(world.network.host("operator"), source) as operator:
            while world.loop.time() < ends_at:
                await anyio.sleep(self._random.uniform(0.1, 4.0))
                if self._rotting.random() < CORRUPTIONS:
                    self._corrupt_shard()
                if self._lying.random() < FALSE_WORDS:
                    world.start(partial(self._lie, operator))
                if self._random.random() < 0.3:
                    await self._send_operator_requests(operator)
                else:
                    self._random.choice(self._possible_faults(operator))()
        world.end_faults()
        for process in world.living():
            process.resume()
        world.resume_daemon()
        world.link_quality.repair()
        for disk in self._disks():
            disk.is_full = False
        for cause in ("hostile", "partition", "host", "slow", "link_quality"):
            world.oracle.disturbances.end(cause)

    def _possible_faults(self, operator: ForgedClient) -> list[Callable[[], None]]:
        deeds: list[Callable[[], None]] = [
            self._hold,
            self._suspend,
            self._suspend_daemon,
            self._jump,
            partial(self._report_false_step, operator),
            partial(self._hang_script_in_rescale, operator),
        ]
        if not self._steady:
            deeds += [self._fill_shards] if self._disks() else []
            deeds += [
                self._cut_off,
                self._partition,
                self._partition,
                self._heal,
                self._heal,
                self._fill,
                self._pause_all,
            ]
        if self._kills:
            deeds += [self._kill, self._kill, self._kill_both, self._lose_host, self._kill_all, self._kill_first]
            deeds += [self._flap]
            if any(job.group_size > 1 for job in self._world.jobs):
                deeds += [self._kill_group, self._kill_group, self._break_groups, self._break_groups]
        return deeds

    def fact_published(self, fact: Fact, job: str) -> None:
        """Inject the fault that waits for this fact."""
        world = self._world
        if self._relieves and isinstance(fact, WorkerJoined) and world.faults_active and self._random.random() < 0.5:
            world.start(partial(self._drain_world, job))
        if isinstance(fact, GroupBroken):
            self._end_group(fact, job)
        if isinstance(fact, JobAborted) and world.faults_active and self._reopening.random() < REOPENED:
            world.start(partial(self._reopen, job, self._reopening.choice(REOPENED_AFTER_S)))
        if not (self._ambushes and world.faults_active and isinstance(fact, MOMENTS) and self._random.random() < 0.25):
            return
        victim = self._affected(fact, job)
        if victim is None:
            return
        act = self._random.choice((victim.kill, victim.kill, victim.vanish, partial(self._suspend_one, victim)))
        later_s = self._random.choice((0.0, 0.0, 0.01, 0.1, 0.5))
        world.note(f"a fault waits for {victim.simulated.name}")
        world.loop.call_later(later_s, self._inject, victim, act, context=world.network.links.context.copy())

    def _end_group(self, fact: GroupBroken, job: str) -> None:
        """Some launchers end the other processes of a group that has lost one."""
        world = self._world
        for process in world.living():
            if process.job.name == job and process.job.ends_broken_groups and process.simulated.name in fact.waiting:
                world.met["a launcher ends a broken group"] += 1
                later_s = self._grouping.uniform(*ENDED_AFTER_S)
                world.loop.call_later(later_s, _kill_if_alive, process, context=world.network.links.context.copy())

    def _inject(self, victim: Process, act: Callable[[], None]) -> None:
        if victim.alive and self._world.faults_active:
            act()

    def _affected(self, fact: Fact, job: str) -> Process | None:
        living = [process for process in self._world.living() if process.job.name == job]
        names = {process.simulated.name: process for process in living}
        match fact:
            case RescaleStarted(added=[name, *_]) if self._random.random() < 0.5:
                return names.get(name)
            case RescaleSynchronising(source=source) if self._random.random() < 0.5:
                return names.get(source.id)
            case WorkerJoined(worker=worker):
                return names.get(worker.id)
        return self._random.choice(living) if living else None

    def starts_mute(self, job: Job, slot: int) -> bool:
        """Whether the next process of a slot is one that never becomes ready.

        In asynchronous mode no worker fails for not answering, because none must answer before the commit.
        """
        answers = job.config.use_synchronous_rescaling
        return answers and self._world.faults_active and self._kills and self._random.random() < 0.06

    def is_flapping(self, job: Job, slot: int) -> bool:
        """Whether processes of this slot die early now."""
        return self._world.faults_active and self._world.loop.time() < self._flapping.get((job.name, slot), 0.0)

    def process_started(self, process: Process, job: Job, slot: int) -> None:
        """Make a process that has just started die early, if its slot is flapping."""
        if not self.is_flapping(job, slot):
            return
        self._world.met["a worker flaps"] += 1
        lives_s = self._random.uniform(*FLAP_LIVES_S)
        self._world.loop.call_later(lives_s, self._inject, process, process.kill)

    def send_stale_messages(self, process: Process) -> None:
        """Keep sending messages of a process that is gone."""
        if self._world.faults_active and self._random.random() < 0.3:
            self._world.start(partial(self._send_stale_messages, process))

    # Networks.

    def _cut_off(self) -> None:
        world = self._world
        cut_off = self._random.sample(world.hosts, self._random.randint(1, len(world.hosts)))
        world.network.partition(cut_off, [SERVER], one_way=self._random.random() < 0.3)
        world.oracle.disturbances.begin("partition", cut_off)
        world.met["some do not reach the daemon"] += 1

    def _partition(self) -> None:
        """A partition in the middle: some of the workers here, some there, and the daemon with all, some or none."""
        world, random = self._world, self._random
        here = random.sample(world.hosts, random.randint(1, len(world.hosts) - 1))
        there = [host for host in world.hosts if host not in here]
        world.network.partition(here, there, one_way=random.random() < 0.2)
        reach = random.choice(("all", "all", "some", "none"))
        without = {"all": [], "some": here, "none": world.hosts}[reach]
        if without:
            world.network.partition(without, [SERVER])
        world.oracle.disturbances.begin("partition", world.hosts)
        world.met[f"workers are parted, {reach} reach the daemon"] += 1

    def _pause_all(self) -> None:
        """A switch restarts: nothing passes between any two hosts for a while, and no worker may fail for it."""
        world = self._world
        for number, host in enumerate(world.hosts):
            world.network.partition([host], [SERVER, *world.hosts[number + 1 :]])
        world.oracle.disturbances.begin(PAUSE, world.hosts)
        world.met["the whole network pauses"] += 1
        world.loop.call_later(self._random.uniform(*PAUSES_S), self._heal, context=world.network.links.context.copy())

    def _heal(self) -> None:
        self._world.heal()
        self._world.oracle.disturbances.end("partition")
        self._world.oracle.disturbances.end(PAUSE)

    def _slow_down(self) -> None:
        """Between workers little passes in this world."""
        world, links = self._world, self._world.network.links
        slow = replace(links.faults, bytes_per_s=self._random.uniform(*SLOW_BYTES_PER_S))
        links.special |= {(one, other): slow for one in world.hosts for other in world.hosts if one != other}
        world.oracle.disturbances.begin("slow", world.hosts)

    def _fill(self) -> None:
        self._world.fill_disk()
        # A daemon that cannot write cannot take back lost workers.
        self._world.oracle.disturbances.begin("partition", self._world.hosts)

    def _disks(self) -> list[Disk]:
        return [process.disk for process in self._world.living() if process.disk is not None]

    def _fill_shards(self) -> None:
        """Leave no room for shards somewhere, for a while."""
        if not (disks := self._disks()):
            return
        disk = self._random.choice(disks)
        disk.is_full = True
        self._world.loop.call_later(self._random.uniform(*FULL_S), setattr, disk, "is_full", False)

    def _corrupt_shard(self) -> None:
        """Corrupt a shard of a dataset that can be read again."""
        disks = [disk for disk in self._disks() if disk.can_be_mended and disk.held()]
        if disks:
            disk = self._rotting.choice(disks)
            disk.corrupt(self._rotting.choice(sorted(disk.held())))
            self._world.met["a disk spoils a shard"] += 1

    # Processes, hosts and their clocks.

    def _pick(self) -> Process | None:
        living = self._world.living()
        return self._random.choice(living) if living else None

    def _hold(self) -> None:
        if (process := self._pick()) is not None:
            process.hold(self._random.uniform(*HELD_S))
            self._world.met["a script hangs"] += 1

    def _hang_script_in_rescale(self, operator: ForgedClient) -> None:
        """One script hangs, and all other workers wait for it at the end of the step."""
        if (process := self._pick()) is not None:
            process.hold(self._random.uniform(*HELD_S))
            self._world.start(partial(self._rescale, operator, process.job.name))
            self._world.met["a script hangs when a rescale is wanted"] += 1

    def _suspend(self) -> None:
        if (process := self._pick()) is not None:
            self._suspend_one(process)

    def _suspend_one(self, process: Process) -> None:
        if process.suspended:
            return
        process.suspend(self._random.uniform(*SUSPENDED_S))
        self._world.met["a worker is suspended"] += 1
        if self._world.oracle.truths[process.job.name].in_attempt:
            self._world.met["a worker is suspended within an attempt"] += 1

    def _suspend_daemon(self) -> None:
        if self._world.suspend_daemon(self._random.uniform(*DAEMON_SUSPENDED_S)):
            self._world.met["the daemon is suspended"] += 1

    def _jump(self) -> None:
        process = self._pick()
        clock = self._world.server_clock if process is None or self._random.random() < 0.3 else process.clock
        clock.jump(self._random.uniform(-CLOCK_JUMP_S, CLOCK_JUMP_S))
        self._world.met["a wall clock jumps"] += 1

    def _kill(self) -> None:
        if (process := self._pick()) is not None:
            process.kill()

    def _kill_first(self) -> None:
        job = self._random.choice(self._world.jobs)
        world = self._world.oracle.truths[job.name].world
        for process in self._world.living(job):
            if process.simulated.me is not None and world.rank_of(process.simulated.me) == 0:
                process.kill()

    def _kill_all(self) -> None:
        living = self._world.living(self._random.choice(self._world.jobs))
        vanish = self._random.random() < 0.5
        self._world.met["all die at once"] += len(living) > 1
        for process in living:
            (process.vanish if vanish else process.kill)()

    def _groups(self, job: Job) -> list[list[Process]]:
        groups: dict[str, list[Process]] = {}
        for process in self._world.living(job):
            groups.setdefault(process.simulated.group, []).append(process)
        return list(groups.values())

    def _kill_group(self) -> None:
        groups = self._groups(self._random.choice(self._world.jobs))
        for process in self._random.choice(groups) if groups else ():
            process.kill()
            self._world.met["a group is killed"] += 1

    def _break_groups(self) -> None:
        """Kill one process of several groups, now and then of different group ranks."""
        groups = self._groups(self._random.choice(self._world.jobs))
        for group in groups[: self._random.randint(1, 3)]:
            self._random.choice(group).kill()
            self._world.met["several groups lose a process at once"] += len(groups) > 1

    def _kill_both(self) -> None:
        if (process := self._pick()) is not None:
            process.vanish()

    def _lose_host(self) -> None:
        if (process := self._pick()) is not None:
            host = process.simulated.host
            self._world.oracle.disturbances.begin("host", [host])
            for other in self._world.living():
                if other.simulated.host == host:
                    other.vanish()
            self._world.network.crash(host, host_gone=True)
            for job in self._world.jobs:
                if job.data is not None:
                    job.data.lose_host(host)
            self._world.met["a host is gone"] += 1

    def _flap(self) -> None:
        job = self._random.choice(self._world.jobs)
        slot = self._random.randrange(job.slots)
        self._flapping[job.name, slot] = self._world.loop.time() + self._random.uniform(*FLAPS_S)
        for process in self._world.living(job):
            if process.slot == slot:
                self.process_started(process, job, slot)

    # Words.

    def _report_false_step(self, operator: ForgedClient) -> None:
        """A worker's library says that it is much further than it is. No two of a job do."""
        process = self._pick()
        if process is None or self._liars.setdefault(process.job.name, process) is not process:
            return
        simulated = process.simulated
        if self._world.oracle.truths[simulated.job].world.world_size > 1:
            step = process.worker.step + FALSE_STEPS
            self._world.note(f"a heartbeat of {simulated.name} lies")
            simulated.lies = True
            operator.signal(Heartbeat(simulated.job, simulated.name, simulated.incarnation, step, 0))
            self._world.met["a heartbeat lies"] += 1

    async def _lie(self, operator: ForgedClient) -> None:
        """One of several members says what is not so."""
        truths = self._world.oracle.truths
        members = [
            process
            for process in self._world.living()
            if (truth := truths[process.job.name]).world.world_size > 1 and process.simulated.me in truth.world
        ]
        if not members:
            return
        process = self._lying.choice(members)
        if truths[process.job.name].in_attempt:
            await self._claim_impossible_stop(operator, process)
        elif self._kills:
            await self._claim_end(operator, process)

    async def _claim_impossible_stop(self, operator: ForgedClient, process: Process) -> None:
        """It says that it has stopped after a step that its world cannot have reached."""
        simulated = process.simulated
        self._world.note(f"{simulated.name} says that it has stopped after step {IMPOSSIBLE_STEP}")
        attempt = self._world.oracle.truths[simulated.job].attempt
        report = ReportStopped(simulated.job, simulated.name, simulated.incarnation, attempt, IMPOSSIBLE_STEP)
        await self._ask(operator, report, STALE_REFUSALS)
        self._world.met["a member says that it has stopped after an impossible step"] += 1

    async def _claim_end(self, operator: ForgedClient, process: Process) -> None:
        """It leaves because training is complete, it says; no other member says so. Then it dies."""
        world, simulated = self._world, process.simulated
        truth = world.oracle.truths[simulated.job]
        assert simulated.me is not None
        step = truth.steps_committed + self._lying.choice(STEPS_AHEAD)
        world.note(f"{simulated.name} says that training is complete after step {step}")
        truth.claims[simulated.me] = max(step, truth.claims.get(simulated.me, 0))
        who = simulated.job, simulated.name, simulated.incarnation
        reason = "it says that training is complete"
        await self._ask(operator, LeaveJob(*who, reason, done=True, step=step), STALE_REFUSALS)
        world.met["a member says that training is complete"] += 1
        await anyio.sleep(self._lying.uniform(*LIVES_ON_S))
        if process.alive:
            process.kill()

    async def _send_stale_messages(self, process: Process) -> None:
        """A gone worker keeps sending requests and signals under its old incarnation."""
        world = self._world
        source = Random(world.random.getrandbits(64))
        try:
            async with world.client(world.network.host("elsewhere"), source) as client:
                await self._send_all(client, process)
        except Unavailable as error:
            world.note(f"a gone worker was told {error.code}")

    async def _send_all(self, client: ForgedClient, process: Process) -> None:
        world = self._world
        for _ in range(STALE_MESSAGES_MAX):
            if not world.faults_active:
                return
            if world.oracle.is_gone(process.simulated):
                await self._send_one(client, process)
            await anyio.sleep(self._random.uniform(0.1, 2.0))

    async def _send_one(self, client: ForgedClient, process: Process) -> None:
        simulated = process.simulated
        who = simulated.job, simulated.name, simulated.incarnation
        truth = self._world.oracle.truths[simulated.job]
        step, generation = truth.steps_committed + FALSE_STEPS, truth.generation
        self._world.met["a gone worker keeps talking"] += 1
        client.signal(Heartbeat(*who, step, 1 << 60))
        client.signal(Pulse(*who, 1.0, step, 1 << 60))
        requests: tuple[Request[Any], ...] = (
            ReportStopped(*who, truth.attempt, step, 0, 0.0, 0, holds_state=True, finished=False),
            ReportReady(*who, truth.attempt),
            ReportUnreachablePeer(*who, generation, reason="it does not like it"),
            LeaveJob(*who, done=True, step=step),
        )
        await self._ask(client, self._random.choice(requests), STALE_REFUSALS)

    async def _send_operator_requests(self, operator: ForgedClient) -> None:
        job = self._random.choice(self._world.jobs)
        process = self._pick()
        name = process.simulated.name if process is not None and process.job is job else "nobody"
        choices: tuple[Request[Any], ...] = (
            PauseJob(job.name),
            ResumeJob(job.name),
            ResumeJob(job.name),
            RescaleJob(job.name),
            RescaleJob(job.name),
            DrainWorker(job.name, name),
            EvictWorker(job.name, name),
            *([AbortJob(job.name)] if self._random.random() < 0.2 else []),
        )
        request = self._random.choice(choices)
        self._world.oracle.truths[job.name].abort_wanted |= isinstance(request, AbortJob)
        if isinstance(request, EvictWorker):
            self._world.oracle.truths[job.name].evictions_wanted.add(name)
        await self.request(operator, request)

    async def _rescale(self, operator: ForgedClient, job: str) -> None:
        await self.request(operator, RescaleJob(job))

    async def _drain_world(self, job: str) -> None:
        """Drain all of a world, because joiners are there."""
        world = self._world
        await anyio.sleep(2 * WAITS_S)
        world.met["a whole world is told to go"] += 1
        source = Random(world.random.getrandbits(64))
        try:
            async with world.client(world.network.host("operator"), source) as operator:
                for worker in world.oracle.truths[job].world.workers:
                    await self.request(operator, DrainWorker(job, worker.id))
        except Unavailable as error:
            world.note(f"a drain of all workers was answered with {error.code}")

    async def _reopen(self, job: str, after_s: float) -> None:
        """Reopen an aborted job, before or after its workers have ended."""
        world = self._world
        await anyio.sleep(after_s)
        source = Random(self._reopening.getrandbits(64))
        world.note(f"the operator reopens {job}")
        world.oracle.truths[job].reopening_wanted = True
        try:
            async with world.client(world.network.host("operator"), source) as operator:
                await self._ask(operator, ReopenJob(job), VALID_REFUSALS | {"job_not_aborted"})
        except Unavailable as error:
            world.note(f"a reopening was answered with {error.code}")

    async def request(self, operator: ForgedClient, request: Request[Any]) -> bool:
        """Ask for something as an operator; tells whether it was answered."""
        self._world.note(f"the operator wants {request!r}")
        return await self._ask(operator, request, VALID_REFUSALS)

    async def _ask(self, client: ForgedClient, request: Request[Any], in_order: frozenset[str]) -> bool:
        try:
            await client.request(request, timeout_s=5.0)
        except RequestRefused as error:
            if error.code not in in_order:
                raise broken(Promise.ANSWERS, f"{request!r} was refused: {error}") from error
            self._world.note(f"a request was refused: {error.code}")
        except Unavailable as error:
            self._world.note(f"a caller was told {error.code}")
            return False
        return True


def _kill_if_alive(process: Process) -> None:
    if process.alive:
        process.kill()
