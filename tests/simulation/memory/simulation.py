"""The simulation of GPU memory: workers of two jobs share devices, against a daemon that is killed at any point.

Invariants:
- A run is a function of its seed.
- Faults end after `FAULTS_S`; then every worker that is left has what it knows of.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch

import anyio
from anyio.abc import TaskGroup

from forged.auth.model import Role
from forged.daemon import Daemon
from forged.errors import ForgedError
from forged.jobs.model import CreateJob
from forged.kernel.messages import Call, Decision, Fact
from forged.memory.messages import REQUESTS, AllocateMemory, CommitMove, FreeMemory, ListBlocks, ListDevices
from forged.memory.ports import WorkersPort
from forged.memory.service import OWNER
from tests.simulation.base import simulated, until_done
from tests.simulation.environment.loop import VirtualClock, VirtualLoop
from tests.simulation.memory.callers import HostileTenant, Viewer
from tests.simulation.memory.known_device import Key
from tests.simulation.memory.oracle import MemoryOracle
from tests.simulation.memory.promises import Promise
from tests.simulation.memory.times import SHORTER
from tests.simulation.memory.workers import UNIT, DeviceContent, DeviceProcess, Seat, Worker
from tests.simulation.watched import WatchedSimulation

FAULTS_S = 14.0
RECOVERY_MAX_S = 30.0
SETTLED_AFTER_S = 8.0
"""After the faults: clients are connected again, and assertions have ended."""
HOSTILE_SEEDS, LIAR_SEEDS, LIMITED_SEEDS = 0.3, 0.3, 0.2
RECORDED_WITHIN_S = 5.0
LOST_ANSWERS: Mapping[type[Any], float] = {CommitMove: 0.2, AllocateMemory: 0.03, FreeMemory: 0.03}
"""How often the answers to these requests are lost with their connections, besides the network's faults."""
TRAIN, SERVE = JOBS = ("train", "serve")
AUDITOR = "auditor"
MUST_HAPPEN = (
    "a block has its content",
    "a block is asserted",
    "a cached block has given way when the daemon restarts",
    "a compaction is planned for a request that waits",
    "a copy fails",
    "a device is removed",
    "a device runs out of memory by its forecast",
    "a device waits for assertions",
    "a gone worker's blocks are freed",
    "a hostile tenant is refused",
    "a lie about free memory is accepted",
    "a lie is refused",
    "a move is committed",
    "a move is committed again",
    "a plan expires",
    "a plan is executed",
    "a process takes the name of one that is gone",
    "a repeated request gets the same block",
    "a request has no room",
    "a request passes one that waits",
    "a request that waits is refused: memory_device_unknown",
    "a request that waits is refused: worker_gone",
    "a request waits in vain",
    "a worker that counts as failed goes on",
    "an answer is lost: CommitMove",
    "an owner hears that its block gave way",
    "blocks give way",
    "refused: memory_asserting",
    "refused: memory_handle_stale",
    "refused: worker_gone",
    "the clock of the daemon jumps",
    "the pressure falls",
    "the pressure rises",
)
"""What happens somewhere in the first few dozen seeds."""


class MemorySimulation(WatchedSimulation):
    """One seed of the memory simulation."""

    oracle: MemoryOracle
    kept, settled = Promise.KEPT, Promise.DEADLINE
    recovery_max_s = RECOVERY_MAX_S
    daemon_lives_s = (0.5, 7.0)

    def __init__(self, seed: int, loop: VirtualLoop, random: Random) -> None:
        super().__init__(seed, loop, random)
        self.content = DeviceContent()
        self.has_liar = random.random() < LIAR_SEEDS
        self.facts_are_limited = random.random() < LIMITED_SEEDS
        self._registered: dict[tuple[str, str], bytes] = {}
        """The incarnation of each worker of a job."""
        self._ending: set[Key] = set()
        """Workers whose end is not durable yet: a daemon that restarts has them again."""
        self._present: Daemon | None = None
        """That which runs; what a killed one still does is not judged."""
        self._has_daemon = anyio.Event()
        self.oracle = MemoryOracle(
            self.meet, self.note, loop.time, self.is_registered, facts_are_limited=self.facts_are_limited
        )
        self.workers = [Worker(self, seat) for seat in _seats(random)]
        self.callers: list[Viewer | HostileTenant] = [Viewer(self, job) for job in JOBS]
        if random.random() < HOSTILE_SEEDS:
            self.callers.append(HostileTenant(self, SERVE))

    # From Simulation.

    def extend(self, daemon: Daemon) -> None:
        """Answer for the workers, whose training is not simulated here, and show the oracle all answers and facts."""
        super().extend(daemon)
        self._present, memory = daemon, daemon.memory
        memory._workers = WorkersPort(self.is_registered, self._workers_at_start)
        for request in REQUESTS:
            route = daemon.bus.requests.routes[request]
            route.handler = self._observed(daemon, route.handler)
        record_later = daemon.bus.record_later

        def observed(decision: Decision[None], **more: Any) -> None:
            if self._present is daemon and more.get("origin") == OWNER:
                for fact in decision.facts:
                    self.oracle.told_fact(decision.job, fact)
            record_later(decision, **more)

        daemon.bus.record_later = observed  # type: ignore[method-assign]

    def _observed(self, daemon: Daemon, handler: Callable[[Any, Call], Any]) -> Callable[[Any, Call], Any]:
        oracle = self.oracle

        def handle(request: Any, call: Call) -> Any:
            if self._present is not daemon:
                return handler(request, call)
            oracle.asked(request)
            try:
                reply = handler(request, call)
            except ForgedError as error:
                oracle.refused(request, error)
                raise
            self._lose_answers(request)
            if isinstance(reply, Awaitable):
                return wait(request, reply)
            oracle.handled(request, reply)
            return reply

        async def wait(request: Any, reply: Awaitable[Any]) -> Any:
            waiter = oracle.begins_to_wait(request)
            replies, refused = None, None
            try:
                replies = await reply
            except ForgedError as error:
                refused = error
                raise
            finally:
                if self._present is daemon:
                    oracle.waited(waiter, replies, refused)
            return replies

        return handle

    def _lose_answers(self, request: Any) -> None:
        """Reset the connection of a worker that is just answered, now and then."""
        share = LOST_ANSWERS.get(type(request), 0.0)
        if share and self.faults_active and self.random.random() < share:
            self.meet(f"an answer is lost: {type(request).__name__}")
            host = f"{request.job}-{request.worker_id}"
            self.loop.call_soon(self._reset, host)

    def _reset(self, host: str) -> None:
        for connection in [one for one in self.network.connections if one.client_host == host]:
            connection.reset()

    def daemon_started(self, daemon: Daemon) -> None:
        super().daemon_started(daemon)
        self._has_daemon.set()

    def daemon_stopped(self) -> None:
        self._ending.clear()
        self._present = None
        self.oracle.stopped()
        if self._has_daemon.is_set():
            self._has_daemon = anyio.Event()

    # Workers.

    def is_registered(self, job: str, worker_id: str, incarnation: bytes) -> bool:
        key = job, worker_id, incarnation
        return self._registered.get(key[:2]) == incarnation and key not in self._ending

    def _workers_at_start(self) -> Mapping[str, Iterable[tuple[str, bytes]]]:
        """Asked by a daemon that starts."""
        workers: dict[str, list[tuple[str, bytes]]] = {}
        for (job, worker_id), incarnation in self._registered.items():
            workers.setdefault(job, []).append((worker_id, incarnation))
        self.oracle.started(workers)
        return workers

    async def join(self, seat: Seat, incarnation: bytes) -> None:
        """Register a process; an earlier one of its name is registered no more."""
        await self._has_daemon.wait()
        self._registered[seat.job, seat.worker_id] = incarnation
        self.content.end(seat.job, seat.device_name)
        self.note(f"{seat.host} joins as {incarnation.hex()[:4]}")

    async def end_worker(self, seat: Seat, incarnation: bytes, end: Fact) -> None:
        """Have the daemon record why a worker is registered no more."""
        name, key = (seat.job, seat.worker_id), (seat.job, seat.worker_id, incarnation)
        while not await self._is_recorded(seat.job, end, key):
            await anyio.sleep(0.2)
        if self._registered.get(name) == incarnation:
            del self._registered[name]
            self.content.end(seat.job, seat.device_name)
        self._ending.discard(key)

    async def _is_recorded(self, job: str, end: Fact, key: Key) -> bool:
        """Whether the end of a worker is durable; until it is, a daemon that restarts has the worker again."""
        await self._has_daemon.wait()
        daemon = self.daemon
        if daemon is None or not daemon.ledger.writable_now:
            return False
        self._ending.add(key)
        with anyio.move_on_after(RECORDED_WITHIN_S):
            try:
                await daemon.ledger.append(Decision(None, (end,), job=job), origin="simulation").wait()
            except ForgedError:
                self._ending.discard(key)
            else:
                return True
        return False

    def incarnation_of(self, job: str, worker_id: str) -> bytes:
        return self._registered.get((job, worker_id), bytes(16))

    def devices_of(self, job: str) -> list[str]:
        return [f"{one.seat.worker_id}/gpu0" for one in self.workers if one.seat.job == job and one.seat.units]

    def total_of(self, job: str, device: str) -> int:
        worker_id = device.partition("/")[0]
        return next(
            UNIT * one.seat.units for one in self.workers if (one.seat.job, one.seat.worker_id) == (job, worker_id)
        )

    async def prepare(self) -> None:
        async with self.client(AUDITOR) as operator:
            for job in JOBS:
                await until_done(operator, CreateJob(job))
                await self.add_token(operator, job, Role.WORKER, (job,))

    # Faults.

    async def make_faults(self) -> None:
        """Break the network, the disk and the clock until the faults end."""
        partition = partial(self.partition, [worker.seat.host for worker in self.workers])
        faults = (partition, self.fill_disk, self.heal, self.heal, self._set_clock)
        await self.cause_faults(faults, FAULTS_S, pause_s_max=2.0)
        self.end_faults()
        self.network.heal()

    def _set_clock(self) -> None:
        self.meet("the clock of the daemon jumps")
        assert isinstance(self.server_clock, VirtualClock)
        self.server_clock.jump(self.random.choice((-20.0, -3.0, 3.0, 10.0)))

    # The whole.

    async def run(self) -> None:
        async with anyio.create_task_group() as self._processes:
            await super().run()
            self._processes.cancel_scope.cancel()

    def start_actors(self, actors: TaskGroup) -> None:
        for worker in self.workers:
            self._processes.start_soon(worker.run)
        for caller in self.callers:
            actors.start_soon(caller.run)

    async def finish(self) -> None:
        """Compare the whole book with what workers know."""
        await anyio.sleep(SETTLED_AFTER_S)
        async with self.client(AUDITOR) as auditor:
            for job in JOBS:
                for view in (await auditor.request(ListDevices(job))).devices:
                    page = await auditor.request(ListBlocks(job, view.name))
                    self.oracle.check_end(job, view, page)
        for worker in self.workers:
            process = worker.process
            if process is not None and self.is_registered(*process.me):
                held = {place: one for place, one in process.held().items() if process.is_there(place)}
                self.oracle.check_held(process.me, held, hears_facts=isinstance(process, DeviceProcess))


def _seats(random: Random) -> list[Seat]:
    def units() -> int:
        return random.choice((12, 24, 40))

    return [
        Seat(TRAIN, "w0", units()),
        Seat(TRAIN, "w1", units(), is_guest=True),
        Seat(TRAIN, "w2", 0, is_guest=True),
        Seat(SERVE, "w0", units()),
        Seat(SERVE, "w1", 0, is_guest=True),
    ]


def simulate(seed: int, watch: Callable[[MemorySimulation], None] = lambda simulation: None) -> MemorySimulation:
    """Run one seed; raises `InvariantViolated`."""

    def begin(simulation: MemorySimulation) -> None:
        if not simulation.facts_are_limited:
            patches.enter_context(patch("forged.memory.service.FACTS_BURST", 1e9))
        watch(simulation)

    with ExitStack() as patches:
        for name, value in SHORTER.items():
            patches.enter_context(patch(name, value))
        return simulated(MemorySimulation, "memory", seed, begin)
