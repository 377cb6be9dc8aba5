"""The public object of a worker: what the training script sees of it and asks of it.

The work is done by `forged.worker.session` (connections, registration, leaving) and `forged.worker.steps` (steps).

Invariants:
- Between two step boundaries the training script owns its state; at step boundaries the library does.
- The daemon is needed when the world has to change, and at no other time: training continues while it is away.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial
from random import Random, SystemRandom
from typing import Any, Self, SupportsFloat

import anyio
import msgspec

from forged.client.owner_task import OwnerTask
from forged.clock import Clock, SystemClock
from forged.data.model import Indices
from forged.data.placement.plan import DataRedistributionPlan
from forged.data.sampling.sampler import ElasticSampler
from forged.data.training import TrainingData, check_same_samples
from forged.data.transfer.manager import DataTransferManager
from forged.data.transfer.outcome import TransferReport
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.messages import INCARNATION_BYTES
from forged.elastic.model import (
    RANK_NONE,
    ClusterTopology,
    GlobalTrainingState,
    RescalingEvent,
    Standstill,
    WorkerId,
    WorkerMetadata,
    WorkerStatus,
    WorldOver,
)
from forged.errors import RequestRefused
from forged.logger_adapter import SCRIPT_LOG, as_log
from forged.net.transport.port import Network
from forged.worker import arguments
from forged.worker.catalog.worker_catalog import WorkerCatalog
from forged.worker.data.shard_holder import ShardHolder
from forged.worker.drain import Leaving
from forged.worker.errors import JobEnded, WorkerEvicted
from forged.worker.events import Event, WorkerEvents
from forged.worker.host_slots import SlotUser, WorkerSlots
from forged.worker.metrics_report import LoggedValues
from forged.worker.process.sigterm import SIGTERM_REASON
from forged.worker.process.worker_process import OwnProcess, WorkerProcess
from forged.worker.session import WorkerSession, open_session, reason_of
from forged.worker.steps.step_loop import Entering, Step, StepLoop
from forged.worker.steps.world_store import WorldStore
from forged.worker.transport.bulk_channel import BulkTransport
from forged.worker.transport.peer_tls import PeerTls
from forged.worker.worker_state.progress import TrainingProgress
from forged.worker.worker_state.session_state import SessionState, WorkerSpec
from forged.worker.worker_state.step_clock import StepClock

JOB = "default"


class ElasticWorker:
    """A worker of a job; asynchronous. `forged.join` is the same for scripts without an event loop.

    `state` is a dict of arrays and plain values, or an object with `state_dict` and `load_state_dict`. A joiner takes
    it from another worker, so it must change only after the last collective of a step.

    The process is this worker's alone: it has a pulse, forked children keep none of its connections, and SIGTERM drains
    the worker. Where several workers live in one process, each is given a `SharedProcess()`. `local_world_size` is
    the number of processes that the worker stands for on its host. `log` is a logger of `logging` or structlog.

    The `group_size` workers of one `group` train one replica of the model, each with a part of the state by its
    `group_rank`; a world consists of whole groups.
    """

    def __init__(
        self,
        worker_id: WorkerId | str,
        config: ElasticTrainingConfig | None = None,
        *,
        job: str = JOB,
        state: Any = None,
        token: str | None = None,
        learning_rate: float | None = None,
        global_batch_size: int = 0,
        attributes: Mapping[str, str] | None = None,
        local_world_size: int = 1,
        group: str = "",
        group_rank: int = 0,
        group_size: int = 1,
        network: Network | None = None,
        clock: Clock | None = None,
        incarnation: bytes | None = None,
        process: WorkerProcess | None = None,
        log: Any = SCRIPT_LOG,
        random: Random | None = None,
        carrier: BulkTransport | None = None,
        peer_tls: PeerTls | None = None,
        data: TrainingData | None = None,
        sampler: ElasticSampler | None = None,
    ) -> None:
        if config is not None:
            config.validate()
        check_same_samples(data, sampler)
        log = as_log(log)
        self.process: WorkerProcess = process or OwnProcess(log)
        self._spec = WorkerSpec(
            job=job,
            settings=None if config is None else config.to_settings(),
            attributes=dict(attributes or {}),
            local_world_size=arguments.count("local_world_size", local_world_size, at_least=1),
            group=group,
            group_rank=arguments.count("group_rank", group_rank),
            group_size=arguments.count("group_size", group_size, at_least=1),
            token=token,
            data=data,
            sampler=sampler,
            process=self.process,
            network=network,
            peer_tls=peer_tls,
            carrier=carrier,
            clock=clock or SystemClock(),
            random=random or SystemRandom(),
            log=log,
        )
        self.incarnation = incarnation or self._spec.random.randbytes(INCARNATION_BYTES)
        """Differs from every other worker's of the same name, and from session to session."""
        self._wanted = WorkerId(worker_id, "", 0) if isinstance(worker_id, str) else worker_id
        self._progress = TrainingProgress(learning_rate, global_batch_size, sampler, state)
        self._state = SessionState(self._wanted, self._progress, now=self._spec.clock.wall())
        self._events = WorkerEvents(log)
        self._catalog = WorkerCatalog(self._spec.clock, log)
        self._logged = LoggedValues()
        self._session: WorkerSession | None = None
        self._steps: StepLoop | None = None
        """Both are None while the worker is not connected."""
        self._connection: OwnerTask[ElasticWorker] | None = None
        """The session that `connect` has opened."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sessions = 0
        self._endpoints: tuple[str, ...] = ()
        self._slots = WorkerSlots(job, self._slot_user, self._daemon_endpoints, token, network, log)

    # Identity and progress.

    @property
    def job(self) -> str:
        """The name of the job."""
        return self._spec.job

    @property
    def sampler(self) -> ElasticSampler | None:
        """Decides which samples a step uses."""
        return self._spec.sampler

    def use_sampler(self, sampler: ElasticSampler) -> None:
        """Draw the samples of the steps from this sampler. Refused once the worker has registered."""
        if self.is_registered:
            raise RequestRefused(
                "worker_registered",
                "the worker has registered with the job, which knows its sampler",
                "set the sampler before the first step",
            )
        check_same_samples(self._spec.data, sampler)
        self._spec.sampler = sampler
        self._progress.use_sampler(sampler)

    @property
    def state(self) -> Any:
        """What the script trains, as it was given."""
        return self._progress.script_state

    @state.setter
    def state(self, state: Any) -> None:
        self._progress.script_state = state

    @property
    def worker_id(self) -> WorkerId:
        """The worker's id; with the port at which peers reach it, once it is connected."""
        return self._state.worker

    @property
    def rank(self) -> int:
        """The worker's position in its world; -1 outside a world."""
        return self._state.current_world.topology.rank_of(self.worker_id)

    @property
    def world_size(self) -> int:
        return self._state.current_world.topology.world_size

    @property
    def group(self) -> str:
        """The name of the worker's group; empty for a group of one."""
        return self._spec.group

    @property
    def group_rank(self) -> int:
        """The worker's position in its group."""
        return self._spec.group_rank

    @property
    def group_size(self) -> int:
        """How many workers a group has."""
        return self._spec.group_size

    @property
    def replica_rank(self) -> int:
        """The position of the worker's group among the groups of its world; -1 outside a world."""
        return RANK_NONE if self.rank == RANK_NONE else self.rank // self.group_size

    @property
    def replica_count(self) -> int:
        """How many groups the world has."""
        return self.world_size // self.group_size

    @property
    def generation(self) -> int:
        """The generation of the world; after a session, of the last world."""
        return self._state.current_world.topology.generation

    @property
    def term(self) -> int:
        """The term of the daemon that has last told the state of the job; 0 before."""
        return self._state.view.term

    @property
    def current_topology(self) -> ClusterTopology | None:
        """The world; None before the first."""
        topology = self._state.current_world.topology
        return topology if topology.workers else None

    @property
    def step(self) -> int:
        """Committed steps; of a worker that is leaving, the steps applied to its state.

        The other workers may repeat the last step that a leaving worker has finished, with other samples.
        """
        return self._progress.steps_applied if self._state.drain.is_leaving else self._progress.step

    @property
    def epoch(self) -> int:
        """The epoch that the sampler is in, or that the script has named."""
        return self._progress.epoch

    @property
    def learning_rate(self) -> float:
        """The same at all ranks of a world; 0 where no worker was given one."""
        return self._progress.learning_rate or 0.0

    @property
    def global_batch_size(self) -> int:
        """The samples of one step, of all workers together; 0 where it was never set."""
        return self._progress.global_batch_size

    @property
    def current_state(self) -> GlobalTrainingState | None:
        """The training progress; None before the first world."""
        state = self._progress.training_state(self.world_size, self._spec.clock.wall())
        return None if state is None else msgspec.structs.replace(state, current_step=self.step)

    @property
    def is_rescaling(self) -> bool:
        """Whether a new world is being formed, or this worker is crossing into it."""
        view = self._state.view
        return view.rescaling or view.committed is not None or self._status is WorkerStatus.RESCALING

    @property
    def is_registered(self) -> bool:
        """Whether the world waits for this worker."""
        return self._session is not None and self._session.is_active

    @property
    def is_void(self) -> bool:
        """Whether the present step was aborted, so that what it does to the state does not count."""
        return self._state.current_world.is_void

    @property
    def is_connected(self) -> bool:
        """Whether the worker has a session."""
        return self._session is not None

    @property
    def endpoint(self) -> str:
        """The daemon that the worker is connected to."""
        return "" if self._session is None else self._session.endpoint

    def descriptors(self) -> list[int]:
        """The file descriptors of all connections, which a forked child must not keep."""
        return [] if self._session is None else self._session.descriptors()

    @property
    def _status(self) -> WorkerStatus:
        return self._state.current_world.status

    def get_metadata(self) -> WorkerMetadata:
        """The worker's metadata, as a copy."""
        current_world = self._state.current_world
        return WorkerMetadata(
            self.worker_id,
            current_world.status,
            current_world.joined_at,
            current_world.heartbeat_at,
            self.rank,
            self._spec.local_world_size,
            dict(self._spec.attributes),
        )

    def update_training_state(self, epoch: int, step: int, learning_rate: float) -> None:
        """Set the training progress. In a world, the steps count themselves; before it, the script sets the number.

        Between two worlds the number of steps does not go back: the daemon has recorded that they are committed. By
        this call a script that has left a step after its commit says that it has restored its state.
        """
        epoch, step = arguments.count("epoch", epoch), arguments.count("step", step)
        goes_back = self._progress.holds_state and step < self.step
        if goes_back or (step != self.step and self._state.current_world.world is not None):
            raise RequestRefused(
                "step_counted",
                f"step must be {self.step}, the number of steps that the worker has counted, got {step}",
                "set the step only before the first world; `worker.steps()` counts from then on",
            )
        self._progress.learning_rate = arguments.rate("learning_rate", learning_rate)
        self._progress.epoch, self._progress.step, self._progress.is_half_changed = epoch, step, False

    @property
    def slots(self) -> WorkerSlots:
        """Memory of this host that outlives this process, into which checkpoints are staged."""
        return self._slots

    def _slot_user(self) -> SlotUser | None:
        """This worker, if it is registered and connected to a daemon."""
        session = self._session
        if session is None or not session.is_active or not session.endpoint or self.process.is_forked:
            return None
        return SlotUser(self.job, self.worker_id.id, self.incarnation, self._endpoints)

    def _daemon_endpoints(self) -> tuple[str, ...] | None:
        """The daemon's endpoints while there is a session."""
        return None if self._session is None or self.process.is_forked else self._endpoints

    # Events.

    @property
    def rescaling_requested(self) -> Event[RescalingEvent]:
        """Happens when this worker has entered another world."""
        return self._events.rescaling_requested

    @property
    def state_synchronized(self) -> Event[GlobalTrainingState]:
        """Happens when this worker has the training state of the world that it has entered."""
        return self._events.state_synchronized

    @property
    def world_over(self) -> Event[WorldOver]:
        """Happens once for each world that was entered, at once when no further collective of it will complete, and
        before `world_entered` of the next one. Subscribers are plain functions, which must not wait for the worker."""
        return self._events.world_over

    @property
    def world_entered(self) -> Event[ClusterTopology]:
        """Happens before the first step of each world, with its state. Subscribers may be asynchronous, and use its
        collectives.

        If a subscriber raises `StepAborted`, or any exception while the world is over, the worker goes over to the next
        world, where the event happens again. Another exception is raised by `steps`.
        """
        return self._events.world_entered

    @property
    def standstill(self) -> Event[Standstill]:
        """Happens when training stands still here because the daemon is away, and again when that is over; `lasted_s`
        is None the first time."""
        return self._events.standstill

    @property
    def leaving(self) -> Event[str]:
        """Happens when this worker leaves, after its last step: the moment to save. Subscribers may be asynchronous.

        It happens again if the worker is kept meanwhile and does further steps.
        """
        return self._events.leaving

    # Connecting and leaving.

    async def connect(self, *endpoints: str) -> None:
        """Connect to a daemon and register. Any task may disconnect."""
        self.process.check()
        connection = OwnerTask(self.session(*endpoints))
        await connection.open()
        self._connection = connection
        try:
            await self.register()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.disconnect()
            raise

    @asynccontextmanager
    async def session(self, *endpoints: str) -> AsyncIterator[ElasticWorker]:
        """Be connected inside the block, reachable for peers; `register` makes this a worker of the job.

        Unlike `connect`, it ends in the task in which it began.
        """
        self.process.check()
        if self._loop is not None:
            raise RequestRefused(
                "worker_connected", "the worker is already connected to a daemon", "call `disconnect` first"
            )
        self._loop, self._endpoints = asyncio.get_running_loop(), endpoints
        try:
            with self.process.inhabited(self.descriptors, self.told_to_end) as counters:
                if self._sessions:
                    # To the daemon and the peers this is another worker, whose state is not trusted.
                    self.incarnation = self._spec.random.randbytes(INCARNATION_BYTES)
                self._sessions += 1
                self._progress.begin_session(counters)
                state = self._state = SessionState(
                    self.worker_id,
                    self._progress,
                    counters,
                    self._spec.clock.wall(),
                    self._events.world_over.fire,
                    StepClock(self._spec.clock.monotonic),
                )
                async with open_session(
                    self._spec, state, self, self.incarnation, self._wanted, endpoints, self._catalog, self._logged
                ) as session:
                    self._session, self._steps = session, StepLoop(session, self.process)
                    self._logged.wake = partial(self._loop.call_soon_threadsafe, session.metrics.wake)
                    yield self
        finally:
            # After the end of all tasks, which may use these in their last turn.
            self._logged.wake = lambda: None
            current_world = self._state.current_world
            self._session = self._steps = current_world.world = current_world.counters = None
            self._progress.end_session()
            current_world.topology = ClusterTopology(epoch=self.generation)
            self._loop = None

    @property
    def _connected(self) -> WorkerSession:
        if self._session is None:
            raise _unconnected()
        return self._session

    async def register(self) -> None:
        """Become a worker of the job: from now on the world waits for this worker."""
        self.process.check()
        await self._connected.register()

    async def disconnect(self) -> None:
        """Leave. No effect for a worker that is not connected."""
        connection = self._connection
        if connection is not None and not self.process.is_forked:
            try:
                await connection.close()
            finally:
                if self._connection is connection:
                    self._connection = None

    async def close(self) -> None:
        """Leave. Idempotent."""
        await self.disconnect()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        await self.leave_because(error)
        await self.disconnect()

    async def leave_because(self, error: BaseException | None) -> None:
        """Leave, because the script has ended with this exception, or with none."""
        end = self._state.view.end
        # An evicted worker, or one of a job that is over, leaves for that reason, whatever its script raises then.
        last = reason_of(end if isinstance(end, JobEnded | WorkerEvicted) else error)
        with anyio.CancelScope(shield=True):
            await self.leave(last.reason, failed=last.failed)

    async def leave(self, reason: str, *, done: bool = False, failed: bool = False) -> None:
        """Tell the daemon that this worker leaves, if it answers in time."""
        if self._session is not None:
            await self._session.leave(reason, done=done, failed=failed)

    def drain(self, reason: str) -> None:
        """Drain this worker: it leaves after a step, when it is not needed any more.

        While the worker connects, the drain begins once it is registered.
        """
        self.process.check()
        if self._session is not None:
            self._session.drain_because(reason)
        else:
            self._state.view.draining = self._state.view.draining or reason

    def told_to_end(self) -> bool:
        """Drain because of SIGTERM; returns whether there is a worker to drain. Callable from any thread and signal
        handler."""
        loop = self._loop
        if loop is None or not self.is_registered:
            return False
        loop.call_soon_threadsafe(self.drain, SIGTERM_REASON)
        return True

    # Steps.

    @property
    def step_loop(self) -> StepLoop:
        """The steps of the present session."""
        if self._steps is None:
            raise _unconnected()
        return self._steps

    async def steps(self, total: int | None = None) -> AsyncIterator[Step]:
        """Yield one step after the other, over all rescales; an aborted step again.

        A collective of an aborted step raises `StepAborted`, which ends a `with step:` or `async with step:` block.
        The latter also waits, after another exception, for evidence that the world of the step is over.
        """
        while (step := await self.begin_step(total)) is not None:
            yield step
            await self.finish_step()

    async def repeats_step(self, step: int, error: Exception) -> bool:
        """Whether a step that this exception has left is void and is repeated. Waits for evidence of a lost worker."""
        return await self.step_loop.errors.decide_in_time(step, error)

    async def begin_step(self, total: int | None = None) -> Step | None:
        """Wait until a step may begin; None when there are no more. For loops that cannot iterate over `steps`."""
        while isinstance(coming := await self.come_to_step(total), Leaving | Entering):
            if isinstance(coming, Entering):
                await self._tell_entered(coming)
                continue
            if coming.is_news:
                await self._events.leaving.fire_and_wait(coming.reason)
            if await self.finish_leaving():
                return None
        return None if coming is None else self.step_loop.step_numbered(coming)

    async def _tell_entered(self, entering: Entering) -> None:
        try:
            await self._events.world_entered.fire_and_wait(entering.topology)
        except Exception as error:
            if not await self.repeats_step(entering.step, error):
                raise
        else:
            self.finish_entering()

    async def come_to_step(self, total: int | None = None) -> int | Leaving | Entering | None:
        """As `begin_step`, for a caller that tells the subscribers of `leaving` and `world_entered` itself, and then
        calls `finish_leaving` or `finish_entering`."""
        coming = await self.step_loop.come_to_step(total)
        if isinstance(coming, int):
            await self.resume_training()
        return coming

    def finish_entering(self) -> None:
        """Begin the steps of the world, now that the subscribers of `world_entered` have been told."""
        self.step_loop.finish_entering()

    async def finish_leaving(self) -> bool:
        """Leave, now that the subscribers of `leaving` have been told; false if the worker is needed after all."""
        return await self.step_loop.finish_leaving()

    async def commit_step(self) -> None:
        """Wait until all ranks have come here, and change the state after that (see `Step.commit`)."""
        await self.step_loop.commit_step()

    async def finish_step(self) -> bool:
        """Tell the other ranks that the step is finished; returns whether it is committed."""
        return await self.step_loop.finish_step()

    def meeting(self, name: str) -> AbstractContextManager[None]:
        """Run collectives that are not the library's inside the block, at all ranks in the same order.

        A rank that does not come is told by the stall report, with this name, and evicted by `evict_stalled`. Raises
        `StepAborted` if the world is over already. Waits for nothing itself.
        """
        return self.step_loop.meeting(name)

    def batch(self) -> Indices:
        """This worker's samples of the present step."""
        if self.sampler is None:
            raise RequestRefused("sampler_missing", "the worker has no sampler", "pass `sampler=` to the worker")
        return self.sampler.batch(self.rank, self.world_size)

    # Metrics.

    def log(self, step: int | None = None, **values: SupportsFloat) -> None:
        """Log values of a step for operators and sinks; by default of the present one. Any thread may call it.

        Nothing waits for it: the daemon gets the newest value of each name once a second. Names have at most 64
        characters, and there are at most 64. A value that is not finite is told at once.
        """
        self._logged.log(self.step if step is None else step, values)

    def measure_saving(self) -> AbstractContextManager[None]:
        """Count the time inside the block as the saving of a checkpoint. `Checkpoints` does so by itself."""
        return self._state.current_world.step_clock.saving()

    # Collectives.

    async def barrier(self) -> None:
        """Wait for all ranks."""
        with self.step_loop.collective() as world:
            await world.barrier()

    async def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        """The values of all ranks in rank order, at the root; None at the other ranks."""
        with self.step_loop.collective() as world:
            return await world.gather(value, root)

    async def broadcast(self, value: Any, root: int = 0) -> Any:
        """The root's value."""
        with self.step_loop.collective() as world:
            return await world.broadcast(value, root)

    async def all_reduce(self, array: Any, op: str = "sum") -> Any:
        """The sum, mean, minimum or maximum over all ranks."""
        with self.step_loop.collective() as world:
            return await world.all_reduce(array, op)

    @property
    def world_store(self) -> WorldStore:
        """Small values that the workers of the present world share."""
        return WorldStore(lambda: self._state.current_world)

    # A rescale and a standstill call these methods (`forged.worker.events.RescaleHooks`), and each step the last one; a
    # subclass may override them.

    async def on_rescaling_event(self, event: RescalingEvent) -> None:
        """Take the rank of the event's world, and tell the subscribers."""
        self._state.current_world.status = WorkerStatus.RESCALING
        await self.update_topology(event.new_topology)
        self._events.rescaling_requested.fire(event)

    async def update_topology(self, topology: ClusterTopology) -> None:
        """Take the rank that this worker has in the world."""
        self._state.current_world.take_rank(topology)

    async def synchronize_state(self, state: GlobalTrainingState) -> None:
        """Take over this training progress, and tell the subscribers."""
        self._progress.apply(state)
        self._catalog.enter_world(self.rank, state.current_step)
        self._events.state_synchronized.fire(state)

    def on_standstill(self, standstill: Standstill) -> None:
        """Tell the subscribers."""
        self._events.standstill.fire(standstill)

    async def resume_training(self) -> None:
        """Train again after a rescale, unless this worker is in no world or has left. Called before each step."""
        self._state.current_world.activate(self.worker_id)

    # Checkpoints.

    @property
    def checkpoint_catalog(self) -> WorkerCatalog:
        """The catalogue of the job's checkpoints, which `DistributedCheckpoint` and `Checkpoints` use by themselves."""
        return self._catalog

    # Data.

    def should_handle_shard(self, shard_index: int, total_shards: int) -> bool:
        """Whether this worker owns a shard: by the committed assignment of its dataset, else by the remainder."""
        if self.rank == RANK_NONE or not 0 <= shard_index < total_shards:
            return False
        data, shards = self._spec.data, self._shards
        if data is not None and shards is not None and total_shards == data.shards:
            return shards.owns(shard_index)
        return shard_index % self.world_size == self.rank

    async def redistribute_data(self, plan: DataRedistributionPlan) -> TransferReport:
        """Fetch the shards that a plan gives this worker. A rescale fetches those of its own plan by itself."""
        # The address of a worker is known only when it has registered.
        mine = [plan.for_worker(worker) for worker in plan.workers if worker.id == self.worker_id.id]
        if self._shards is None and not any(mine):
            return TransferReport()
        return await self.transfers.execute_plan(plan)

    @property
    def transfers(self) -> DataTransferManager:
        """Moves shards to this worker. The next rescale may drop shards that were moved by hand."""
        if self._shards is None:
            raise RequestRefused(
                "data_missing",
                "the worker has no training data, or is not registered",
                "pass `data=` to the worker, and begin its steps",
            )
        return self._shards.transfers

    @property
    def _shards(self) -> ShardHolder | None:
        return None if self._session is None else self._session.shards


def _unconnected() -> RequestRefused:
    return RequestRefused("worker_unconnected", "the worker is not connected to a daemon", "call `connect` first")
