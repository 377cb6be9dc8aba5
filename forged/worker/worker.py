"""The worker's side of elastic training.

Law: the training script owns its state between two step boundaries, the library at them. A step counts when every
member of the world has finished it; one that was broken off is done again from the state before it. The daemon is
asked when the world has to change and at no other time, so training goes on while it is away.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from random import Random, SystemRandom
from typing import Any, Self, TypeVar

import anyio
from anyio.abc import TaskGroup, TaskStatus

from forged.client.client import ForgedClient
from forged.clock import Clock, SystemClock
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.messages import (
    INCARNATION_BYTES,
    Heartbeat,
    Joined,
    JoinJob,
    LeaveJob,
    ReadTopology,
    ReportPaused,
    ReportReady,
    ReportTrouble,
)
from forged.elastic.model import (
    RANK_NONE,
    ClusterTopology,
    GlobalTrainingState,
    RescalingEvent,
    WorkerId,
    WorkerMetadata,
    WorkerStatus,
)
from forged.errors import ForgedError, PeerError, RequestRefused, Unavailable
from forged.jobs.model import SettingValue
from forged.log import SILENT, Log
from forged.messages import Gap, Record, Request
from forged.net.network import Address, Network
from forged.worker.carriers import Carrier
from forged.worker.collectives import CollectiveAborted, World
from forged.worker.counters import Counters
from forged.worker.errors import StepAborted
from forged.worker.events import Event
from forged.worker.mesh import Mesh
from forged.worker.standing import FOLLOWED, Standing
from forged.worker.state import Arriving, pack
from forged.worker.step import Step

R = TypeVar("R")

JOB = "default"
TROUBLE_PAUSE_S = 0.2
"""How long a worker rests before it tries again what a peer or the daemon did not let it do."""
LEAVE_TIMEOUT_S = 2.0
"""How long it tries to say goodbye."""
LOOPBACK = "127.0.0.1"
MARKS_BITS = 32
"""So many bits of the marks count within a world; the ones above are its generation."""


class ElasticWorker:
    """One member of a job's world; asynchronous. `forged.join` is the same for scripts without an event loop.

    `state` is a dict of arrays and plain values, or an object with `state_dict` and `load_state_dict`; it is what a new
    worker takes from the others, and must change only behind the last collective of a step.
    """

    def __init__(
        self,
        worker_id: WorkerId | str,
        config: ElasticTrainingConfig | None = None,
        *,
        job: str = JOB,
        state: Any = None,
        token: str | None = None,
        learning_rate: float = 0.0,
        global_batch_size: int = 0,
        attributes: Mapping[str, str] | None = None,
        network: Network | None = None,
        clock: Clock | None = None,
        incarnation: bytes | None = None,
        counters: Counters | None = None,
        random: Random | None = None,
        carrier: Carrier | None = None,
        log: Log = SILENT,
    ) -> None:
        if config is not None:
            config.validate()
        self.job = job
        self.state: Any = {} if state is None else state
        self.step = 0
        """How many steps are committed."""
        self.epoch = 0
        self.learning_rate = learning_rate
        self.global_batch_size = global_batch_size
        self.generation = 0
        self.rescaling_requested: Event[RescalingEvent] = Event("rescaling_requested", log)
        self.state_synchronized: Event[GlobalTrainingState] = Event("state_synchronized", log)
        self.leaving: Event[str] = Event("leaving", log)
        self._worker_id = WorkerId(worker_id, "", 0) if isinstance(worker_id, str) else worker_id
        self._config = config
        self._token = token
        self._attributes = dict(attributes or {})
        self._network = network
        self._clock = clock or SystemClock()
        self._log = log
        self._random = random or SystemRandom()
        self._carrier = carrier
        self.incarnation = incarnation or self._random.randbytes(INCARNATION_BYTES)
        """What tells this worker from any other of its name, before it and behind it."""
        self._counters = counters
        self._standing = Standing(self._worker_id.id)
        self._status = WorkerStatus.JOINING
        self._joined_at = self._heartbeat_at = self._clock.wall()
        self._marks = 0
        self._world_before = ClusterTopology()
        """The world that it has entered last."""
        self._entering = anyio.CancelScope()
        self._holds_state = False
        self._finished = False
        """Whether it has finished a step that may not be committed."""
        self._void = False
        """Whether a collective of the present step was broken off."""
        self._settled = 0
        """The attempt that this worker has answered last."""
        self._registered = False
        self._left = False
        self._news = asyncio.Event()
        self._client: ForgedClient | None = None
        self._mesh: Mesh | None = None
        self._world: World | None = None
        self._tasks: TaskGroup | None = None
        self._session: AbstractAsyncContextManager[ElasticWorker] | None = None

    # What it is.

    @property
    def worker_id(self) -> WorkerId:
        """Who it is; with the port at which peers reach it, once it is connected."""
        return self._worker_id

    @property
    def rank(self) -> int:
        """Its rank; -1 while it has none."""
        return self._world_before.rank_of(self._worker_id) if self._holds_state else RANK_NONE

    @property
    def world_size(self) -> int:
        """How many workers there are in the world that it has entered; that does not change within a step."""
        return self._world_before.world_size

    @property
    def current_topology(self) -> ClusterTopology | None:
        """The committed world; None before the first."""
        return self._standing.topology if self._standing.topology.workers else None

    @property
    def current_state(self) -> GlobalTrainingState | None:
        """How far the training is; None before the first world."""
        if not self._holds_state:
            return None
        return GlobalTrainingState(
            self.epoch, self.step, self.learning_rate, self.global_batch_size, self.world_size, self._clock.wall()
        )

    @property
    def is_rescaling(self) -> bool:
        """Whether a new world is being agreed on."""
        return self._standing.wants_stop and not self._standing.paused

    @property
    def is_registered(self) -> bool:
        """Whether the world waits for it."""
        return self._registered

    @property
    def is_void(self) -> bool:
        """Whether the present step was broken off, so that what it does to the state does not count."""
        return self._void

    @property
    def endpoint(self) -> str:
        """The daemon that it is connected to."""
        return (self._client.endpoint if self._client else None) or ""

    def descriptors(self) -> list[int]:
        """The file descriptors of its connections, which forked children must not keep."""
        of_client = [] if self._client is None else self._client.descriptors()
        return of_client + ([] if self._mesh is None else self._mesh.descriptors())

    @property
    def is_connected(self) -> bool:
        """Whether it takes part in a cluster."""
        return self._client is not None

    def get_metadata(self) -> WorkerMetadata:
        """What is known of it, as a copy."""
        return WorkerMetadata(
            self._worker_id,
            self._status,
            self._joined_at,
            self._heartbeat_at,
            self.rank,
            1,
            dict(self._attributes),
        )

    def should_handle_shard(self, shard_index: int, total_shards: int) -> bool:
        """Whether a shard is this worker's: the rule is shard modulo world size."""
        return self.rank >= 0 and 0 <= shard_index < total_shards and shard_index % self.world_size == self.rank

    def update_training_state(self, epoch: int, step: int, learning_rate: float) -> None:
        """Say how far the training is, where the script counts for itself."""
        self.epoch, self.step, self.learning_rate = epoch, step, learning_rate

    # Coming and going.

    async def connect(self, *endpoints: str) -> None:
        """Connect to the cluster and register. Disconnect in the same task."""
        session = self.session(*endpoints)
        await session.__aenter__()
        self._session = session
        await self.register()

    @asynccontextmanager
    async def session(self, *endpoints: str) -> AsyncIterator[ElasticWorker]:
        """Be connected inside the block, with the door open for peers; `register` makes it a worker."""
        if self._client is not None:
            raise RequestRefused("worker_connected", "the worker is already connected to the cluster", "disconnect it")
        reached = ForgedClient(
            *endpoints, token=self._token, network=self._network, clock=self._clock, source=self._random
        )
        async with reached as client:
            host = self._worker_id.hostname or _own_host(client.endpoint)
            mesh = Mesh(
                self._worker_id.id,
                self.incarnation,
                self.job,
                self._network,
                self._clock,
                self._log,
                source=self._random,
                carrier=self._carrier,
            )
            async with mesh.open(host, self._worker_id.port) as address, anyio.create_task_group() as tasks:
                self._worker_id = WorkerId(self._worker_id.id, host, address.port)
                self._client, self._mesh, self._tasks = client, mesh, tasks
                try:
                    yield self
                finally:
                    with anyio.CancelScope(shield=True):
                        await self.leave("it was disconnected")
                    tasks.cancel_scope.cancel()
                    self._client = self._mesh = self._tasks = self._world = None
                    self._registered = False

    async def register(self) -> None:
        """Become a worker of the job; from now on the world waits for this worker."""
        if self._tasks is None or self._mesh is None:
            raise RequestRefused("worker_unconnected", "the worker is not connected to a cluster", "connect it")
        if self._registered:
            return
        # The stream stands before the worker is known, so that nothing is missed in between.
        await self._tasks.start(self._follow)
        joined = await self._join()
        self._mesh.trust(joined.peer_key)
        self._standing.topology = joined.topology
        self._adopt_settings(joined)
        self._registered = True
        self._tasks.start_soon(self._beat)

    async def disconnect(self) -> None:
        """Leave in good order; no error for who is not connected."""
        session, self._session = self._session, None
        if session is not None:
            await session.__aexit__(None, None, None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.disconnect()

    async def leave(self, reason: str, *, done: bool = False, failed: bool = False) -> None:
        """Tell the daemon that this worker goes, if that can be told in time."""
        if self._left or not self._registered:
            return
        self._left, self._status = True, WorkerStatus.LEAVING
        if self._world is not None:
            await self._world.leave()
        request = LeaveJob(self.job, self._worker_id.id, self.incarnation, reason, done, failed, self.step)
        with anyio.move_on_after(LEAVE_TIMEOUT_S, shield=True):
            try:
                await self._ask(request)
            except ForgedError as error:
                self._log.warning("could not say goodbye", why=str(error))

    def drain(self, reason: str) -> None:
        """Finish the present step, and go."""
        self._standing.draining = self._standing.draining or reason
        self._wake()

    # Steps.

    async def steps(self, total: int | None = None) -> AsyncIterator[Step]:
        """The steps to be done, one after the other, over all rescales; the same one again if it was broken off.

        A collective that cannot end raises `StepAborted`, which `with step:` takes care of.
        """
        while (number := await self.begin_step(total)) is not None:
            yield Step.numbered(number, lambda: None)
            await self.finish_step()

    async def begin_step(self, total: int | None = None) -> int | None:
        """Wait until a step may begin; returns its number, or None when there are no more."""
        if not self._registered:
            await self.register()
        while True:
            if self._standing.end is not None:
                await self._fall_out()
                raise self._standing.end
            if self._standing.draining is not None:
                self.leaving.fire(self._standing.draining)
                await self.leave(self._standing.draining)
                return None
            if self._standing.completed or (self._is_training and total is not None and self.step >= total):
                await self.leave("the training is done", done=True)
                return None
            if self._is_training and not self._standing.paused:
                self._status = WorkerStatus.ACTIVE
                self._void = self._finished = False
                return self.step
            await self._come_along()

    async def finish_step(self) -> bool:
        """Tell the others that the step is done; returns whether it counts."""
        world = self._world
        if self._void or world is None:
            return False
        self._mark()
        self._finished = True
        try:
            verdict = await world.end_step(self.step, stop_wanted=self._stop_wanted)
        except CollectiveAborted as error:
            await self._lose_world(error)
            return False
        self._finished = False
        self.step += 1
        self._count()
        if verdict.stop_wanted > self._standing.allowed_at:
            self._standing.asked_at = max(self._standing.asked_at, verdict.stop_wanted)
        return True

    @property
    def _stop_wanted(self) -> int:
        """The fact that asks for a stop; 0 for none."""
        return self._standing.asked_at if self._standing.wants_stop else 0

    @property
    def _is_training(self) -> bool:
        """Whether it is in a world that goes on."""
        return self._world is not None and not self._standing.wants_stop and self._standing.committed is None

    # Collectives.

    async def barrier(self) -> None:
        """Wait for all."""
        await self._together(lambda world: world.barrier())

    async def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        """Everybody's value, in the order of ranks, at the root; None elsewhere."""
        return await self._together(lambda world: world.gather(value, root))

    async def broadcast(self, value: Any, root: int = 0) -> Any:
        """The root's value."""
        return await self._together(lambda world: world.broadcast(value, root))

    async def all_reduce(self, array: Any, op: str = "sum") -> Any:
        """The sum, mean, minimum or maximum over all."""
        return await self._together(lambda world: world.all_reduce(array, op))

    async def _together(self, act: Callable[[World], Awaitable[R]]) -> R:
        world = self._world
        if world is None or self._void:
            self._void = True
            raise StepAborted("there is no world now")
        self._mark()
        try:
            return await act(world)
        except CollectiveAborted as error:
            self._void = True
            await self._lose_world(error)
            raise StepAborted(error.message) from error

    def _mark(self) -> None:
        """Show that it has come to where workers meet."""
        self._marks += 1
        if self._counters is not None:
            self._counters.marks = self._marks

    def _count(self) -> None:
        """Show how many steps are committed."""
        if self._counters is not None:
            self._counters.step = self.step

    # Between two worlds.

    async def _come_along(self) -> None:
        """Do the next thing that leads to a world, or wait for news."""
        self._news = asyncio.Event()
        standing = self._standing
        if standing.outdated:
            await self._ask_again()
        elif standing.committed is not None and not self._is_superseded:
            await self._enter()
        elif standing.synchronising is not None and standing.synchronising.attempt == self._settled:
            await self._synchronise(standing.synchronising.attempt)
        elif standing.attempt > self._settled:
            await self._report(standing.attempt)
        else:
            await self._news.wait()

    async def _report(self, attempt: int) -> None:
        """Say where this worker has stopped."""
        self._status = WorkerStatus.RESCALING
        if self._is_superseded:
            self._standing.committed = None
        if self._world is not None:
            world, self._world = self._world, None
            await world.leave()
        request = ReportPaused(
            self.job,
            self._worker_id.id,
            self.incarnation,
            attempt,
            self.step,
            self.epoch,
            self.learning_rate,
            self.global_batch_size,
            self._holds_state,
            self._finished and self._holds_state,
        )
        if await self._told(request):
            self._settled = max(self._settled, attempt)

    async def _synchronise(self, attempt: int) -> None:
        """Give the state to others, or take it from the source, as it was settled."""
        assert self._mesh is not None
        fact = self._standing.synchronising
        assert fact is not None
        position = self.step + 1 if self._finished else self.step
        if fact.source.id == self._worker_id.id:
            packed = pack(self.state)
            with self._mesh.offering(attempt, packed.head, packed.parts):
                await self._superseded(attempt)
        elif self._holds_state and position == fact.step:
            await self._superseded(attempt)
        elif await self._take_state(attempt, fact.source):
            self.step, self._finished, self._holds_state = fact.step, False, True
            await self._told(ReportReady(self.job, self._worker_id.id, self.incarnation, attempt))
            await self._superseded(attempt)

    async def _take_state(self, attempt: int, source: WorkerId) -> bool:
        """Fetch the source's state; false when the attempt is over before that has succeeded."""
        assert self._mesh is not None
        arrived: list[Arriving] = []

        def into(head: bytes) -> list[memoryview]:
            arrived.append(Arriving(head))
            return arrived[-1].parts

        while self._is_attempt(attempt):
            try:
                await self._mesh.fetch_state(source, attempt, into)
            except (Unavailable, PeerError) as error:
                self._log.warning("the state could not be fetched", source=str(source), why=str(error))
                await anyio.sleep(TROUBLE_PAUSE_S)
            else:
                arrived[-1].adopt(self.state)
                return True
        return False

    async def _superseded(self, attempt: int) -> None:
        """Wait until the attempt has succeeded or is over."""
        while self._is_attempt(attempt):
            self._news = asyncio.Event()
            await self._news.wait()

    def _is_attempt(self, attempt: int) -> bool:
        standing = self._standing
        fact = standing.synchronising
        return standing.end is None and standing.committed is None and fact is not None and fact.attempt == attempt

    async def _enter(self) -> None:
        """Meet the others of the new world."""
        assert self._mesh is not None
        standing = self._standing
        fact, topology = standing.committed, standing.topology
        assert fact is not None
        if topology.rank_of(self._worker_id) == RANK_NONE:
            standing.committed = None
            self._world = None
            return
        # All members of a world have its state when it is committed, whether they meet or not.
        self.step, self.epoch, self._holds_state, self._finished = fact.step, fact.epoch, True, False
        self.learning_rate = fact.learning_rate or self.learning_rate
        self.global_batch_size = fact.global_batch_size or self.global_batch_size
        world = await self._meet(topology)
        if world is None:
            return
        if standing.committed is not fact:
            await world.leave()
            return
        old, standing.committed = self._standing_before(fact.delta.base_epoch), None
        self._world, self.generation = world, topology.epoch
        # Who has come further within a world is compared within it: nobody brings marks along.
        self._marks = topology.epoch << MARKS_BITS
        self._count()
        self._tell(RescalingEvent.between(old, topology, self._clock.wall(), fact.reason))

    async def _meet(self, topology: ClusterTopology) -> World | None:
        """Be let into the world with all others; None when they do not come, or have something else to do."""
        assert self._mesh is not None
        timeout_s = (self._config or ElasticTrainingConfig()).rescale_timeout_s or None
        try:
            with anyio.CancelScope() as self._entering:
                return await self._mesh.enter(topology.epoch, topology, timeout_s)
        except (Unavailable, PeerError) as error:
            await self._complain(topology.epoch, error)
            await anyio.sleep(TROUBLE_PAUSE_S)
        return None

    @property
    def _is_superseded(self) -> bool:
        """Whether the world that was committed has to change already, so that nobody need enter it."""
        standing = self._standing
        return standing.committed is not None and standing.attempt > standing.committed.attempt

    def _standing_before(self, epoch: int) -> ClusterTopology:
        """The world before this one, as far as this worker knew it."""
        return self._world_before if self._world_before.epoch == epoch else ClusterTopology(epoch=epoch)

    def _tell(self, event: RescalingEvent) -> None:
        self._world_before = event.new_topology
        self.rescaling_requested.fire(event)
        state = self.current_state
        if state is not None:
            self.state_synchronized.fire(state)

    async def _lose_world(self, error: CollectiveAborted) -> None:
        """The world cannot go on; the daemon may not know it yet."""
        world, self._world = self._world, None
        if world is None:
            return
        await world.leave()
        if not self._standing.wants_stop:
            await self._complain(world.generation, error)

    async def _complain(self, generation: int, error: ForgedError) -> None:
        peer = getattr(error, "peer", "") or ""
        request = ReportTrouble(self.job, self._worker_id.id, self.incarnation, generation, peer, error.message)
        await self._told(request)

    async def _fall_out(self) -> None:
        """The others go on without this worker."""
        self._status = WorkerStatus.FAILED
        if self._world is not None:
            world, self._world = self._world, None
            await world.leave()

    # The daemon.

    async def _join(self) -> Joined:
        settings: dict[str, SettingValue] | None = None if self._config is None else self._config.to_settings()
        request = JoinJob(
            self.job,
            self._worker_id,
            self.incarnation,
            os.getpid(),
            attributes=self._attributes,
            settings=settings,
        )
        while True:
            try:
                return await self._ask(request)
            except Unavailable as error:
                if error.code != "worker_undecided":
                    raise
                await anyio.sleep(TROUBLE_PAUSE_S)

    def _adopt_settings(self, joined: Joined) -> None:
        if self._config is None:
            self._config = ElasticTrainingConfig.from_settings(joined.settings)
        self._standing.paused = joined.paused

    async def _ask_again(self) -> None:
        """Learn what was missed."""
        joined = await self._persevere(lambda: self._join())
        topology = await self._persevere(lambda: self._ask(ReadTopology(self.job)))
        self._standing.outdated = False
        self._standing.topology = topology
        if joined.attempt > self._standing.attempt and self._worker_id in topology:
            self._standing.attempt = joined.attempt

    async def _follow(self, *, task_status: TaskStatus[None]) -> None:
        """Hear what happens to the job, for ever."""
        assert self._client is not None, "it is connected while it follows"
        try:
            async with self._client.facts(*FOLLOWED, jobs=[self.job]) as facts:
                task_status.started()
                async for item in facts:
                    self._hear(item)
        except ForgedError as error:
            self._standing.end = error
            self._wake()

    def _hear(self, item: Record | Gap) -> None:
        if isinstance(item, Gap):
            self._standing.outdated = True
        else:
            self._standing.hear(item)
        if self._standing.lost and self._world is not None:
            self._world.abort(f"{self._standing.lost} is gone")
        if self._is_superseded or self._standing.end is not None or self._standing.completed:
            self._entering.cancel()
        self._wake()

    async def _beat(self) -> None:
        """Say that this worker lives, for ever."""
        assert self._config is not None
        while True:
            if self._client is not None:
                self._client.signal(Heartbeat(self.job, self._worker_id.id, self.incarnation, self.step, self._marks))
                self._heartbeat_at = self._clock.wall()
            await anyio.sleep(self._config.heartbeat_interval_s)

    async def _told(self, request: Request[Any]) -> bool:
        """Tell the daemon, however long it is away; false when it does not want to hear it any more."""
        try:
            await self._persevere(lambda: self._ask(request))
        except RequestRefused as error:
            self._log.info("the daemon refused a report", code=error.code, why=error.message)
            return error.code == "attempt_over"
        return True

    async def _persevere(self, act: Callable[[], Awaitable[R]]) -> R:
        while True:
            try:
                return await act()
            except Unavailable as error:
                self._log.info("the daemon does not answer", why=str(error))
                await anyio.sleep(TROUBLE_PAUSE_S)

    async def _ask(self, request: Request[R]) -> R:
        assert self._client is not None
        return await self._client.request(request)

    def _wake(self) -> None:
        self._news.set()


def _own_host(endpoint: str | None) -> str:
    """The address of this host that somebody at the daemon's would use."""
    address = Address.parse(endpoint) if endpoint else Address("unix", path="")
    if address.scheme == "unix":
        return LOOPBACK
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Nothing is sent: the system only says which of its addresses it would use.
            probe.connect((address.host, address.port))
            return str(probe.getsockname()[0])
    except OSError:
        return LOOPBACK
