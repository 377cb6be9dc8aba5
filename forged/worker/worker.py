"""The worker's side of elastic training.

Law: the training script owns its state between two step boundaries, the library at them. A step counts when every
member of the world has finished it; one that was broken off is done again from the state before it. All stop behind the
same step, because the world says so and nobody by himself. The daemon is asked when the world has to change and at no
other time, so training goes on while it is away.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext
from functools import partial
from random import Random, SystemRandom
from typing import Any, NamedTuple, Self, TypeVar

import anyio
from anyio.abc import TaskGroup

from forged.client.client import ForgedClient
from forged.client.stream import FactStream
from forged.clock import Clock, SystemClock
from forged.data.messages import CorruptShardFound
from forged.data.outcome import TransferReport
from forged.data.plan import DataRedistributionPlan
from forged.data.sampler import ElasticSampler
from forged.data.shards import Indices
from forged.data.training import TrainingData
from forged.elastic.attempt import Stop
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.members import MARKS_PER_WORLD
from forged.elastic.messages import INCARNATION_BYTES, Joined, RescaleSynchronising, ShowCluster
from forged.elastic.model import (
    RANK_NONE,
    ClusterTopology,
    GlobalTrainingState,
    RescalingEvent,
    WorkerId,
    WorkerMetadata,
    WorkerStatus,
)
from forged.elastic.phases import Phase
from forged.errors import ForgedError, RequestRefused, Unavailable
from forged.jobs.model import SettingValue
from forged.log import SILENT, Log
from forged.messages import Gap, Record
from forged.net.network import Address, Network
from forged.net.tls import TLS_FAILED
from forged.worker import amounts
from forged.worker.agreement import Agreement, agree
from forged.worker.carriers import Carrier, LoopCarrier
from forged.worker.collectives import CollectiveAborted, World
from forged.worker.consumption import Consumption
from forged.worker.counters import Counters
from forged.worker.custodian import Custodian
from forged.worker.departure import Departure
from forged.worker.errors import JobEnded, StepAborted, WorkerEvicted, passes
from forged.worker.events import Event
from forged.worker.exchange import StateExchange
from forged.worker.farewell import farewell
from forged.worker.mesh import Mesh, WorldIncomplete
from forged.worker.peer_tls import PeerTls
from forged.worker.place import Place
from forged.worker.registration import LEAVE_TIMEOUT_S, Registration, persevere
from forged.worker.standing import FOLLOWED, Commit, Standing
from forged.worker.state import pack
from forged.worker.step import Step
from forged.worker.supply import Supply
from forged.worker.usage_report import UsageReport

R = TypeVar("R")

JOB = "default"
TROUBLE_PAUSE_S = 0.2
"""How long a worker rests before it tries again to follow an attempt."""
LOOPBACK = "127.0.0.1"


class Trouble(NamedTuple):
    """What the daemon has to be told: a world cannot go on."""

    generation: int
    peer: str
    why: str


class ElasticWorker:
    """One member of a job's world; asynchronous. `forged.join` is the same for scripts without an event loop.

    `state` is a dict of arrays and plain values, or an object with `state_dict` and `load_state_dict`; it is what a new
    worker takes from the others, and must change only behind the last collective of a step.
    """

    rescaling_requested: Event[RescalingEvent]
    """Happens when this worker has gone over into another world."""
    state_synchronized: Event[GlobalTrainingState]
    """Happens when this worker is where the others are."""
    leaving: Event[str]
    """Happens when this worker is to go, behind its last step."""

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
        log: Log = SILENT,
        random: Random | None = None,
        carrier: Carrier | None = None,
        peer_tls: PeerTls | None = None,
        data: TrainingData | None = None,
        sampler: ElasticSampler | None = None,
    ) -> None:
        if config is not None:
            config.validate()
        self.job = job
        self.state: Any = {} if state is None else state
        self.rescaling_requested = Event("rescaling_requested", log)
        self.state_synchronized = Event("state_synchronized", log)
        self.leaving = Event("leaving", log)
        self._wanted_id = WorkerId(worker_id, "", 0) if isinstance(worker_id, str) else worker_id
        self._worker_id = self._wanted_id
        self._config = config
        self._settings: dict[str, SettingValue] | None = None if config is None else config.to_settings()
        self._token = token
        self._attributes = dict(attributes or {})
        self._network = network
        self._clock = clock or SystemClock()
        self._random = random or SystemRandom()
        self._carrier = carrier
        self._peer_tls = peer_tls
        _check_same_samples(data, sampler)
        self._data = data
        self.sampler = sampler
        """What tells which samples a step takes."""
        self._log = log
        self.incarnation = incarnation or self._random.randbytes(INCARNATION_BYTES)
        """What tells this worker from any other of its name, before it and behind it."""
        self._counters = counters
        self._place = Place(learning_rate, global_batch_size, sampler, counters)
        self._joined_at = self._heartbeat_at = self._clock.wall()
        self._marks = 0
        self._client: ForgedClient | None = None
        self._mesh: Mesh | None = None
        self._line: Registration | None = None
        self._exchange: StateExchange | None = None
        self._tasks: TaskGroup | None = None
        self._session: AbstractAsyncContextManager[ElasticWorker] | None = None
        self._is_open = False
        self._sessions = 0
        self._begin_anew()

    def _begin_anew(self) -> None:
        """What a session begins with."""
        if self._sessions:
            # To the daemon and the others it is another worker, which comes with its state and is not believed it.
            self.incarnation = self._random.randbytes(INCARNATION_BYTES)
        self._standing = Standing(self._worker_id.id)
        self._departure = Departure(self._standing, self._is_needed, self._wake, self._log)
        self._topology = ClusterTopology()
        """The world that it has entered last."""
        self._world: World | None = None
        self._status = WorkerStatus.JOINING
        self._place.begin_anew()
        self._void = False
        """Whether a collective of the present step was broken off."""
        self._rest_at = 0
        """The fact for which the world has stopped behind its last step; 0 when it has not."""
        self._settled = 0
        """The attempt that this worker has answered last."""
        self._answered = 0
        """The last one that has taken its answer."""
        self._trouble: Trouble | None = None
        self._supply: Supply | None = None
        self._term = 0
        self._usage: UsageReport | None = None
        self._has_announced = False
        """Whether it says, or has said, that it is to go and that others have to take over what it holds."""
        self._is_dismissed = False
        """Whether the daemon has heard that."""
        self._is_catching_up = False
        self._registered = False
        self._left = False
        self._news = asyncio.Event()
        self._undertaking: tuple[anyio.CancelScope, Callable[[], bool]] | None = None

    # What it is.

    @property
    def worker_id(self) -> WorkerId:
        """Who it is; with the port at which peers reach it, once it is connected."""
        return self._worker_id

    @property
    def rank(self) -> int:
        """Its rank; -1 while it has none."""
        return self._topology.rank_of(self._worker_id)

    @property
    def world_size(self) -> int:
        """How many workers there are in the world."""
        return self._topology.world_size

    @property
    def generation(self) -> int:
        """The number of the world."""
        return self._topology.epoch

    @property
    def term(self) -> int:
        """The term of the daemon's in which it has learnt last where the job is; 0 before."""
        return self._term

    @property
    def current_topology(self) -> ClusterTopology | None:
        """The world; None before the first."""
        return self._topology if self._topology.workers else None

    @property
    def step(self) -> int:
        """How many steps are committed."""
        return self._place.step

    @property
    def epoch(self) -> int:
        """How often the training has gone through its data: as the script says, or its sampler."""
        return self._place.epoch

    @property
    def learning_rate(self) -> float:
        return self._place.learning_rate

    @property
    def global_batch_size(self) -> int:
        """How many samples a step takes, of all workers together; 0 where nobody has said."""
        return self._place.global_batch_size

    @property
    def current_state(self) -> GlobalTrainingState | None:
        """How far the training is; None before the first world."""
        return self._place.state(self.world_size, self._clock.wall())

    @property
    def is_rescaling(self) -> bool:
        """Whether a new world is being agreed on."""
        return self._standing.rescaling or self._standing.committed is not None

    @property
    def is_registered(self) -> bool:
        """Whether the world waits for it."""
        return self._registered and not self._left

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
        """Whether a shard is this worker's: as it was committed for the shards of its data, else by the remainder."""
        if self.rank == RANK_NONE or not 0 <= shard_index < total_shards:
            return False
        if self._supply is not None and self._data is not None and total_shards == self._data.shards:
            return self._supply.custodian.owns(shard_index)
        return shard_index % self.world_size == self.rank

    def update_training_state(self, epoch: int, step: int, learning_rate: float) -> None:
        """Say how far the training is. The steps of a world are counted by the world; before it, by the script.

        Between two worlds nobody takes back what was committed: the daemon has been told that it counts.
        """
        epoch, step = amounts.count("epoch", epoch), amounts.count("step", step)
        goes_back = self._place.holds_state and step < self.step
        if goes_back or (step != self.step and self._world is not None):
            raise RequestRefused(
                "step_counted", f"{self.step} steps are committed, and not {step}", "leave the counting to the steps"
            )
        self._place.learning_rate = amounts.rate("learning_rate", learning_rate)
        self._place.epoch, self._place.step = epoch, step

    # Coming and going.

    async def connect(self, *endpoints: str) -> None:
        """Connect to the cluster and register. Disconnect in the same task."""
        session = self.session(*endpoints)
        await session.__aenter__()
        self._session = session
        try:
            await self.register()
        except BaseException:
            await self.disconnect()
            raise

    @asynccontextmanager
    async def session(self, *endpoints: str) -> AsyncIterator[ElasticWorker]:
        """Be connected inside the block, with the door open for peers; `register` makes it a worker."""
        if self._is_open:
            raise RequestRefused("worker_connected", "the worker is already connected to the cluster", "disconnect it")
        self._is_open = True
        failure: Exception | None = None
        try:
            self._begin_anew()
            self._sessions += 1
            async with self._reach(endpoints) as client, self._open_door(client), anyio.create_task_group() as tasks:
                self._client, self._tasks = client, tasks
                self._line = Registration(client, self.job, self._worker_id, self.incarnation, self._random, self._log)
                assert self._mesh is not None
                self._exchange = StateExchange(self._mesh, self._line, lambda: self._whole_state, tasks, self._log)
                try:
                    yield self
                except Exception as error:  # noqa: BLE001 - raised below, so that it does not come out in a group
                    failure = error
                finally:
                    with anyio.CancelScope(shield=True):
                        await self.leave("it was disconnected")
                    tasks.cancel_scope.cancel()
        finally:
            # Behind the end of all tasks, which may have a last turn in which they use them.
            self._client = self._mesh = self._line = self._exchange = self._tasks = self._world = None
            self._is_open = self._registered = False
        if failure is not None:
            raise failure

    def _reach(self, endpoints: tuple[str, ...]) -> ForgedClient:
        return ForgedClient(
            *endpoints, token=self._token, network=self._network, clock=self._clock, source=self._random
        )

    @asynccontextmanager
    async def _open_door(self, client: ForgedClient) -> AsyncIterator[None]:
        """Let peers come in."""
        name, host = self._wanted_id.id, self._wanted_id.hostname or _own_host(client.endpoint)
        mesh = Mesh(
            name,
            self.incarnation,
            self.job,
            self._network if self._peer_tls is None else self._peer_tls.network(),
            self._clock,
            self._log,
            source=self._random,
            carrier=self._carrier,
            scheme="tcp" if self._peer_tls is None else "tls",
        )
        async with mesh.open(host, self._wanted_id.port) as address:
            self._worker_id, self._mesh = WorkerId(name, host, address.port), mesh
            yield

    async def register(self) -> None:
        """Become a worker of the job; from now on the world waits for this worker."""
        if self._tasks is None or self._client is None or self._line is None:
            raise RequestRefused("worker_unconnected", "the worker is not connected to a cluster", "connect it")
        if self._registered:
            return
        # Said at once, and not when somebody needs the state.
        pack(self._whole_state)
        # The stream stands before the worker is known, so that nothing is missed in between.
        facts = await self._client.facts(*FOLLOWED, CorruptShardFound, jobs=[self.job]).__aenter__()
        try:
            self._tasks.start_soon(self._listen, facts)
            self._learn(await self._join())
        except BaseException:
            facts.close()
            raise
        self._joined_at, self._registered = self._clock.wall(), True
        self._tasks.start_soon(self._beat)
        if self._place.consumption is not None:
            self._usage = self._report_of(self._place.consumption)
            self._tasks.start_soon(self._usage.keep_telling)
        self._catch_up_if_outdated()

    def _report_of(self, consumption: Consumption) -> UsageReport:
        assert self._line is not None
        return UsageReport(self._place, consumption, lambda: self._topology, self._line, self._clock, self._log)

    async def _join(self, *, again: bool = False) -> Joined:
        assert self._line is not None
        return await self._line.join(
            os.getpid(), self._attributes, self._settings, again=again, with_data=self._data is not None
        )

    def _learn(self, joined: Joined) -> None:
        """Take what the daemon has told of the job."""
        assert self._mesh is not None
        self._mesh.trust(joined.peer_key)
        self._term = joined.fence.term
        self._config = ElasticTrainingConfig.from_settings(joined.settings)
        if self._data is not None and self._supply is None:
            self._supply = self._supply_of(self._data, self._config)
        self._standing.catch_up(joined)
        self._limit_departure()
        self._see_to_data()

    def _supply_of(self, data: TrainingData, config: ElasticTrainingConfig) -> Supply:
        assert self._line is not None
        assert self._client is not None
        assert self._mesh is not None
        assert self._tasks is not None
        custodian = Custodian(
            data,
            config,
            self._line,
            self._client.signal,
            self._mesh,
            self._clock,
            self._random.random,
            uses_threads=not isinstance(self._carrier, LoopCarrier),
            log=self._log,
        )
        return Supply(custodian, self.sampler, self._line, self._tasks, self._give_up, self._log)

    @property
    def _whole_state(self) -> Any:
        """What a new worker takes from the others."""
        if self._place.consumption is None:
            return self.state
        return {"state": self.state, "sampler": self._place.consumption.sampler, "usage": self._place.consumption}

    async def disconnect(self) -> None:
        """Leave in good order; no error for who is not connected."""
        session, self._session = self._session, None
        if session is not None:
            await session.__aexit__(None, None, None)

    async def close(self) -> None:
        """Leave in good order. Idempotent."""
        await self.disconnect()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        await self.leave_because(error)
        await self.disconnect()

    async def leave_because(self, error: BaseException | None) -> None:
        """Tell the daemon that this worker goes, because its script has ended with this error, or with none."""
        end = self._standing.end
        # Whatever the script makes of it: who is wanted no more goes for that reason.
        reason, failed = farewell(end if isinstance(end, JobEnded | WorkerEvicted) else error)
        with anyio.CancelScope(shield=True):
            await self.leave(reason, failed=failed)

    async def leave(self, reason: str, *, done: bool = False, failed: bool = False) -> None:
        """Tell the daemon that this worker goes, if that can be told in time."""
        if self._left or not self._registered or self._line is None:
            return
        self._left, self._status = True, WorkerStatus.LEAVING
        await self._leave_world()
        # That all is done may be known to nobody else, so it is said for as long as the daemon waits for this worker.
        patience_s = max(LEAVE_TIMEOUT_S, self._config.reconnect_grace_s) if done and self._config else LEAVE_TIMEOUT_S
        with anyio.move_on_after(patience_s) as scope:
            if self._usage is not None:
                await self._usage.tell()
        left_s = max(LEAVE_TIMEOUT_S, scope.deadline - anyio.current_time())
        await self._line.leave(reason, self.step, left_s, done=done, failed=failed)

    def drain(self, reason: str) -> None:
        """Finish the present step, and go."""
        self._standing.draining = self._standing.draining or reason
        self._limit_departure()
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
        while not self._left:
            if self._standing.end is not None:
                await self._fall_out(self._standing.end)
            if self._standing.completed is not None:
                await self._come_to_an_end(self._standing.completed)
            elif self._departure.is_due:
                self.leaving.fire(self._departure.reason)
                await self.leave(self._departure.reason)
            elif self._standing.draining is not None and not self._has_announced:
                self._announce(self._standing.draining)
            elif not self._may_step:
                await self._come_along()
            elif total is not None and self.step >= total:
                await self.leave("the training is done", done=True)
            else:
                self._void = False
                self._place.begin_step()
                await self.resume_training()
                return self.step
        return None

    async def finish_step(self) -> bool:
        """Tell the others that the step is done; returns whether it counts."""
        if self._void:
            return False
        self._mark()
        self._place.finish_step()
        if self._world is None:
            return False
        try:
            verdict = await self._world.end_step(self.step, stop_wanted=self._standing.stop_wanted)
        except CollectiveAborted as error:
            self._lose_world(error)
            return False
        self._place.count_step()
        self._rest_at = verdict.stop_wanted
        return True

    @property
    def _may_step(self) -> bool:
        """Whether it is in a world that goes on."""
        return self._world is not None and self._world.ending is None and not self._rests

    @property
    def _rests(self) -> bool:
        """Whether the world has stopped, and the reason for it holds still, or has not been heard here yet."""
        standing = self._standing
        return self._rest_at > 0 and (standing.heard_at < self._rest_at or standing.stop_wanted > 0)

    async def _come_to_an_end(self, step: int) -> None:
        """Others say that the training is done."""
        if self._place.has_finished and step > self.step:
            # They know that all have finished it.
            self._place.count_step()
        if self._place.holds_state and self.step >= step:
            await self.leave("the training is done", done=True)
            return
        why = "the training was done before this worker was taken in"
        await self.leave(why)
        await self._fall_out(JobEnded("job_completed", why, "take the result from a worker that was there"))

    def _is_needed(self) -> bool:
        """Whether others have yet to take over what it holds."""
        if self._worker_id not in self._topology:
            return False
        if self._supply is not None and not self._supply.custodian.is_released:
            return True
        # Who is alone has what nobody else has, and somebody may have come for it.
        may_be_joined = self.is_rescaling or (not self._is_dismissed and self._has_daemon())
        return self.world_size == 1 and self.step > 0 and may_be_joined

    def _limit_departure(self) -> None:
        """Once it is told to go, it waits for others for so long and no longer."""
        tasks, mesh = self._tasks, self._mesh
        if self._config is not None and mesh is not None and tasks is not None and not tasks.cancel_scope.cancel_called:
            self._departure.limit(self._config, self._has_daemon, mesh.has_given, tasks)

    def _has_daemon(self) -> bool:
        return self._client is not None and self._client.connected

    def _announce(self, reason: str) -> None:
        """Have others take over what this worker holds before it goes, if there are any; it trains until they can."""
        assert self._line is not None
        assert self._tasks is not None
        self._has_announced = True
        self._tasks.start_soon(self._tell_leaving, self._line, reason)

    async def _tell_leaving(self, line: Registration, reason: str) -> None:
        try:
            await line.announce_leave(reason)
        except ForgedError as error:
            self._log.warning("the daemon was not told that this worker is to go", why=str(error))
        # What follows from it was decided with the answer, and is told before it.
        self._is_dismissed = True
        self._wake()

    async def _fall_out(self, error: Exception) -> None:
        """The others go on without this worker, or nobody goes on."""
        self._status = WorkerStatus.FAILED
        await self._leave_world()
        raise error

    def batch(self) -> Indices:
        """The samples that are this worker's in the present step."""
        if self.sampler is None:
            raise RequestRefused("sampler_missing", "the worker has no sampler", "give it one")
        return self.sampler.batch(self.rank, self.world_size)

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
            self._lose_world(error)
            raise StepAborted(error.message) from error

    def _mark(self) -> None:
        """Show that it has come to where workers meet."""
        self._marks += 1
        if self._counters is not None:
            self._counters.marks = self._marks

    def _lose_world(self, error: ForgedError) -> None:
        """The world cannot go on. The daemon is told, unless it has told so itself."""
        world, self._world = self._world, None
        if world is not None and not (self._standing.lost or self._standing.rescaling):
            self._trouble = Trouble(world.generation, _peer_of(error), error.message)

    async def _leave_world(self) -> None:
        world, self._world = self._world, None
        if world is not None:
            await world.leave()

    # Between two worlds.

    async def _come_along(self) -> None:
        """Do the next thing that leads to a world, or wait for news."""
        self._news.clear()
        standing, world = self._standing, self._world
        if world is not None and world.ending is not None:
            self._see_the_end(world.ending.error())
        elif standing.outdated:
            await self._news.wait()
        elif standing.committed is not None:
            await self._cross(standing.committed)
        elif self._trouble is not None:
            await self._undertake(partial(self._complain, self._trouble))
        elif standing.synchronising is not None and standing.synchronising.attempt == self._settled:
            await self._synchronise(standing.synchronising)
        elif standing.rescaling and standing.attempt > self._settled:
            await self._report(standing.attempt)
        else:
            await self._news.wait()

    def _see_the_end(self, error: ForgedError) -> None:
        """The world has ended between two steps."""
        self._lose_world(error)
        if not isinstance(error, CollectiveAborted):
            # The ranks do not do the same, which is the script's mistake.
            raise error

    async def _undertake(self, act: Callable[[], Awaitable[object]], still: Callable[[], bool] = lambda: True) -> None:
        """Do something that takes its time, for as long as it makes sense."""

        def makes_sense() -> bool:
            standing = self._standing
            return standing.end is None and standing.completed is None and not self._departure.is_due and still()

        with anyio.CancelScope() as scope:
            self._undertaking = scope, makes_sense
            try:
                await act()
            finally:
                self._undertaking = None

    async def _until(self, over: Callable[[], bool]) -> None:
        """Wait for the news with which something is over."""
        while not over():
            self._news.clear()
            await self._news.wait()

    async def _complain(self, trouble: Trouble) -> None:
        """Say that the world is no more."""
        assert self._line is not None
        await self._line.complain(*trouble)
        self._trouble = None

    async def _report(self, attempt: int) -> None:
        """Say where this worker has stopped."""
        assert self._line is not None
        self._status = WorkerStatus.RESCALING
        await self._leave_world()
        self._trouble = None
        tell = partial(self._line.stopped, attempt, self._stop())

        async def report() -> None:
            if await tell():
                self._answered = attempt
            self._settled = attempt

        standing = self._standing
        # A world for which nobody has to stop may be committed before this is heard.
        await self._undertake(report, still=lambda: standing.rescaling and standing.attempt == attempt)

    def _stop(self) -> Stop:
        """Where this worker has stopped."""
        return self._place.stop

    # The state goes from worker to worker.

    async def _synchronise(self, settled: RescaleSynchronising) -> None:
        """Do this worker's part of what was settled; what does not work now may work a moment later."""

        def still() -> bool:
            return self._is_synchronising(settled.attempt)

        try:
            await self._give_or_take(settled, still)
        except ForgedError as error:
            if not passes(error) or error.code == TLS_FAILED:
                raise
            self._log.warning("the attempt could not be followed", attempt=settled.attempt, why=str(error))
            await self._undertake(partial(anyio.sleep, TROUBLE_PAUSE_S), still)

    async def _give_or_take(self, settled: RescaleSynchronising, still: Callable[[], bool]) -> None:
        """Give the state to others, or take it from the source, as it was settled; then see to the training data."""
        attempt = settled.attempt
        # Who goes gives its state away first: nobody else may have it.
        is_source = settled.source.id == self._worker_id.id
        with self._offering(attempt) if is_source else nullcontext():
            if not (is_source or (self._place.holds_state and self._stop().position == settled.step)):
                await self._undertake(partial(self._take, settled), still)
            if self._supply is not None and still():
                await self._undertake(partial(self._supply.take, attempt), still)
            departure = self._departure
            # Where no step is committed all have what there is to be given.
            keeps = is_source and settled.step > 0
            await self._until(lambda: not still() or (departure.is_overdue if keeps else departure.is_due))

    async def _take(self, settled: RescaleSynchronising) -> None:
        """Become what the source is."""
        assert self._exchange is not None
        assert self._line is not None
        await self._exchange.take(settled)
        self._place.become(settled.step)
        if self._supply is None:
            await self._line.ready(settled.attempt)

    def _offering(self, attempt: int) -> AbstractContextManager[None]:
        assert self._exchange is not None
        offering = self._exchange.offering(attempt)
        self._place.holds_state = True
        return offering

    def _is_synchronising(self, attempt: int) -> bool:
        standing, settled = self._standing, self._standing.synchronising
        is_over = standing.end is not None or standing.completed is not None or standing.committed is not None
        return not is_over and settled is not None and settled.attempt == attempt

    # Into the next world.

    async def _cross(self, commit: Commit) -> None:
        """Go over into a world that was committed, unless it is known already that it does not hold."""
        standing = self._standing

        def holds() -> bool:
            return standing.committed is commit and not (standing.rescaling or standing.lost)

        if commit.attempt and commit.attempt == self._answered:
            # Another world may be told of under this attempt, if its own was missed.
            self._answered = 0
            self._place.adopt(commit)
        await self._leave_world()
        self._trouble = None
        if holds() and self._worker_id in commit.topology:
            await self._undertake(partial(self._enter, commit), holds)
        if standing.committed is commit:
            standing.committed = None

    async def _enter(self, commit: Commit) -> None:
        """Meet the others of the new world."""
        assert self._mesh is not None
        assert self._config is not None
        topology = commit.topology
        # Who waits here for others has come further than they have.
        self._marks = topology.epoch * MARKS_PER_WORLD
        try:
            world = await self._mesh.enter(topology.epoch, topology, self._config.rescale_timeout_s or None)
            try:
                agreement = await self._agree(world, commit)
                if self._supply is not None:
                    await self._supply.settle(commit)
            except BaseException:
                world.abort(f"{self._worker_id.id} does not go on with it")
                raise
        except ForgedError as error:
            if not passes(error):
                raise
            hub = topology.workers[0].id if error.code == TLS_FAILED else ""
            self._trouble = Trouble(topology.epoch, _peer_of(error) or hub, error.message)
            return
        state = self._state_of(agreement, commit)
        self._place.take_up(state)
        self._world = world
        if self._standing.committed is commit:
            # Where nobody has to stop, the next one may have been committed meanwhile.
            self._standing.committed = None
        self._rest_at = self._standing.stop_wanted
        if self._place.consumption is not None:
            self._place.consumption.enter(topology.epoch, self.step)
        await self.on_rescaling_event(
            RescalingEvent.between(commit.before, topology, self._clock.wall(), commit.reason)
        )
        await self.synchronize_state(state)

    async def _agree(self, world: World, commit: Commit) -> Agreement:
        """Have the state that holds in the new world, or give it to who has not."""
        agreement = await agree(world, self._stop())
        if not agreement.behind:
            return agreement
        # Who has learnt of this world from the daemon's answer does not know under which attempt the others have it.
        attempt = await world.broadcast(commit.attempt, agreement.source)
        if agreement.source == world.rank:
            with self._offering(attempt):
                await world.barrier()
        else:
            if world.rank in agreement.behind:
                await self._fetch_agreed(commit.topology.workers[agreement.source], attempt)
                self._place.become(agreement.step)
            await world.barrier()
        return agreement

    async def _fetch_agreed(self, source: WorkerId, attempt: int) -> None:
        """Take the state that the world has agreed on; whose fault it is if that fails, only the daemon can tell."""
        assert self._exchange is not None
        try:
            await self._exchange.fetch(source, attempt)
        except Unavailable as error:
            raise WorldIncomplete(f"the state of {source} could not be had: {error.message}", source.id) from error

    def _state_of(self, agreement: Agreement, commit: Commit) -> GlobalTrainingState:
        stop = agreement.stop
        return GlobalTrainingState(
            stop.epoch,
            agreement.step,
            commit.learning_rate or stop.learning_rate,
            commit.global_batch_size or stop.global_batch_size,
            commit.topology.world_size,
            self._clock.wall(),
        )

    # What a rescale consists of, for this worker; the events are fired here.

    async def on_rescaling_event(self, event: RescalingEvent) -> None:
        """Go over into the world of a rescale, and tell the subscribers."""
        self._status = WorkerStatus.RESCALING
        await self.update_topology(event.new_topology)
        self.rescaling_requested.fire(event)

    async def update_topology(self, topology: ClusterTopology) -> None:
        """Go by this world: the rank is this worker's place in it."""
        self._topology = topology
        # Who has come further within a world is compared within it: nobody brings marks along.
        self._marks = topology.epoch * MARKS_PER_WORLD

    async def synchronize_state(self, state: GlobalTrainingState) -> None:
        """Be where the training is, and tell the subscribers."""
        self._place.take_up(state)
        self._place.show()
        self.state_synchronized.fire(state)

    async def redistribute_data(self, plan: DataRedistributionPlan) -> TransferReport:
        """Fetch what a plan gives this worker, from the other workers. Rescales see to their own plans."""
        if self._supply is None:
            raise RequestRefused(
                "data_missing", "the worker has no training data, or is not registered", "give it `data`, and register"
            )
        return await self._supply.custodian.redistribute(plan)

    async def resume_training(self) -> None:
        """Train again behind a rescale."""
        if self.rank != RANK_NONE:
            self._status = WorkerStatus.ACTIVE

    # The daemon.

    def _catch_up_if_outdated(self) -> None:
        if self._standing.outdated and self._registered and not self._is_catching_up:
            assert self._tasks is not None
            self._is_catching_up = True
            self._tasks.start_soon(self._catch_up)

    async def _catch_up(self) -> None:
        """Learn what was missed; training goes on meanwhile."""
        try:
            while self._standing.outdated:
                await self._ask_again()
        except ForgedError as error:
            self._standing.end = error
        finally:
            self._is_catching_up = False
        self._wake()

    async def _ask_again(self) -> None:
        """Learn what was missed."""
        assert self._line is not None
        try:
            self._learn(await self._join(again=True))
        except RequestRefused as error:
            self._standing.outdated = False
            await self._learn_the_end(error)

    async def _learn_the_end(self, error: RequestRefused) -> None:
        """Find out why the daemon does not want this worker any more."""
        standing = self._standing
        if error.code == "job_over":
            assert self._client is not None
            client = self._client
            shown = await persevere(lambda: client.request(ShowCluster(self.job)), self._random, self._log)
            if shown.phase is Phase.COMPLETED:
                standing.completed = shown.state.current_step
            else:
                see = f"see `forgectl events --job {self.job}`"
                standing.end = JobEnded("job_aborted", f"the job was aborted: {shown.reason}", see)
        elif error.code == "worker_gone":
            standing.end = WorkerEvicted(error.message)
        else:
            standing.end = error

    async def _listen(self, facts: FactStream) -> None:
        """Hear what happens to the job, for ever."""
        try:
            async for item in facts:
                self._hear(item)
        except ForgedError as error:
            self._give_up(error)
        finally:
            facts.close()

    def _give_up(self, error: Exception) -> None:
        """Training cannot go on here."""
        self._standing.end = error
        self._wake()

    def _hear(self, item: Record | Gap) -> None:
        if isinstance(item, Gap):
            self._standing.miss(item)
        else:
            self._standing.hear(item)
        self._limit_departure()
        self._catch_up_if_outdated()
        if isinstance(item, Record) and self._supply is not None:
            self._supply.hear(item.fact)
        self._see_to_data()
        if self._standing.lost and self._world is not None:
            self._world.abort(f"{self._standing.lost} is gone")
        self._wake()

    def _see_to_data(self) -> None:
        """Let training data come while training goes on, if it is to."""
        if self._supply is not None:
            self._supply.follow(self._standing.moving)

    async def _beat(self) -> None:
        """Say that this worker lives, for ever."""
        assert self._config is not None
        # Once more may be said when the session is over, before this hears of it.
        line = self._line
        assert line is not None
        while True:
            line.beat(self.step, self._marks)
            self._heartbeat_at = self._clock.wall()
            await anyio.sleep(self._config.heartbeat_interval_s)

    def _wake(self) -> None:
        self._news.set()
        if self._undertaking is not None:
            scope, makes_sense = self._undertaking
            if not makes_sense():
                scope.cancel()


def _check_same_samples(data: TrainingData | None, sampler: ElasticSampler | None) -> None:
    if data is not None and sampler is not None and data.samples != sampler.total:
        text = f"the data has {data.samples} samples, and the sampler {sampler.total}"
        raise RequestRefused("sampler_differs", text, "give both the same dataset")


def _peer_of(error: ForgedError) -> str:
    """Whom a broken world is blamed on; empty for nobody."""
    return error.peer if isinstance(error, CollectiveAborted | WorldIncomplete) else ""


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
