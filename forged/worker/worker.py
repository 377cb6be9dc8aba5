"""The worker's side of elastic training.

Law: the training script owns its state between two step boundaries, the library at them. A step counts when every
member of the world has finished it; one that was broken off is done again from the state before it. The daemon is asked
when the world has to change and at no other time, so training goes on while it is away.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from random import Random, SystemRandom
from typing import Any, Self, TypeVar

import anyio
import msgspec

from forged.client.client import ForgedClient
from forged.clock import Clock, SystemClock
from forged.data.dataset import Indices
from forged.data.placement.plan import DataRedistributionPlan
from forged.data.sampling.sampler import ElasticSampler
from forged.data.training import TrainingData, check_same_samples
from forged.data.transfer.manager import DataTransferManager
from forged.data.transfer.outcome import TransferReport
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.messages import (
    INCARNATION_BYTES,
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
from forged.errors import RequestRefused
from forged.log import Log
from forged.net.transport.port import Network
from forged.retry import REJOINING
from forged.worker import arguments
from forged.worker.collectives.world import World
from forged.worker.daemon.goodbye import farewell
from forged.worker.drain.withdrawal import Parting
from forged.worker.errors import JobEnded, WorkerEvicted
from forged.worker.events import Event
from forged.worker.mesh import Mesh
from forged.worker.process.counters import Counters
from forged.worker.process.own_host import own_host
from forged.worker.process.sigterm import TOLD
from forged.worker.process.worker_process import OwnProcess, WorkerProcess
from forged.worker.rescale.rescaler import Rescaler
from forged.worker.script_log import SCRIPT_LOG
from forged.worker.session import Connection, Whereabouts, WorkerSession, WorkerSpec
from forged.worker.step import Step
from forged.worker.transport.bulk_channel import BulkTransport
from forged.worker.transport.peer_tls import PeerTls
from forged.worker.worker_state.current_world import CurrentWorld
from forged.worker.worker_state.job_view import JobView
from forged.worker.worker_state.progress import TrainingProgress

R = TypeVar("R")

JOB = "default"
OUT = (WorkerStatus.LEAVING, WorkerStatus.FAILED)


class ElasticWorker:
    """One member of a job's world; asynchronous. `forged.join` is the same for scripts without an event loop.

    `state` is a dict of arrays and plain values, or an object with `state_dict` and `load_state_dict`; it is what a new
    worker takes from the others, and must change only behind the last collective of a step.

    The process is this worker's alone: a pulse speaks for it, forked children keep none of its connections, and SIGTERM
    lets it finish its step and leave. Where several workers live in one process, each is given a `SharedProcess()`.
    `local_world_size` tells others how many processes it stands for on its host.
    """

    rescaling_requested: Event[RescalingEvent]
    """Happens when this worker has gone over into another world."""
    state_synchronized: Event[GlobalTrainingState]
    """Happens when this worker is where the others are."""
    leaving: Event[str]
    """Happens when this worker is to go, behind its last step: the moment to save something. It waits for subscribers,
    asynchronous ones too. Where others have come to need this worker meanwhile, so that it has done further steps, it
    happens again."""

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
        local_world_size: int = 1,
        network: Network | None = None,
        clock: Clock | None = None,
        incarnation: bytes | None = None,
        process: WorkerProcess | None = None,
        log: Log = SCRIPT_LOG,
        random: Random | None = None,
        carrier: BulkTransport | None = None,
        peer_tls: PeerTls | None = None,
        data: TrainingData | None = None,
        sampler: ElasticSampler | None = None,
    ) -> None:
        if config is not None:
            config.validate()
        self.state: Any = {} if state is None else state
        self.rescaling_requested = Event("rescaling_requested", log)
        self.state_synchronized = Event("state_synchronized", log)
        self.leaving = Event("leaving", log, is_awaited=True)
        self._wanted_id = WorkerId(worker_id, "", 0) if isinstance(worker_id, str) else worker_id
        self._worker_id = self._wanted_id
        self._token = token
        self._network = network
        self._clock = clock or SystemClock()
        self._random = random or SystemRandom()
        self._carrier = carrier
        self._peer_tls = peer_tls
        check_same_samples(data, sampler)
        self._log = log
        self.incarnation = incarnation or self._random.randbytes(INCARNATION_BYTES)
        """What tells this worker from any other of its name, before it and behind it."""
        self.process: WorkerProcess = process or OwnProcess(log)
        """What it has of the process that it lives in."""
        self._profile = WorkerSpec(
            job=job,
            settings=None if config is None else config.to_settings(),
            attributes=dict(attributes or {}),
            local_world_size=arguments.count("local_world_size", local_world_size, at_least=1),
            data=data,
            sampler=sampler,
            process=self.process,
            carrier=carrier,
            clock=self._clock,
            random=self._random,
            log=log,
        )
        self._place = TrainingProgress(learning_rate, global_batch_size, sampler, None)
        self._membership: WorkerSession | None = None
        """What it has while it is connected."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: AbstractAsyncContextManager[ElasticWorker] | None = None
        self._is_open = False
        self._sessions = 0
        self._begin_anew(None)

    def _begin_anew(self, counters: Counters | None) -> None:
        """What a session begins with."""
        if self._sessions:
            # To the daemon and the others it is another worker, which comes with its state and is not believed it.
            self.incarnation = self._random.randbytes(INCARNATION_BYTES)
        self._standing = JobView(self._worker_id.id)
        self._presence = CurrentWorld(self._standing, counters, self._clock.wall())
        self._place.counters = counters
        self._place.begin_anew()

    # What it is.

    @property
    def job(self) -> str:
        """The name of the job."""
        return self._profile.job

    @property
    def sampler(self) -> ElasticSampler | None:
        """What tells which samples a step takes."""
        return self._profile.sampler

    @property
    def worker_id(self) -> WorkerId:
        """Who it is; with the port at which peers reach it, once it is connected."""
        return self._worker_id

    @property
    def rank(self) -> int:
        """Its rank; -1 while it has none."""
        return self._presence.topology.rank_of(self._worker_id)

    @property
    def world_size(self) -> int:
        """How many workers there are in the world."""
        return self._presence.topology.world_size

    @property
    def generation(self) -> int:
        """The number of the world; behind the end, of the last one."""
        return self._presence.topology.epoch

    @property
    def term(self) -> int:
        """The term of the daemon's in which it has learnt last where the job is; 0 before."""
        return self._standing.term

    @property
    def current_topology(self) -> ClusterTopology | None:
        """The world; None before the first."""
        topology = self._presence.topology
        return topology if topology.workers else None

    @property
    def step(self) -> int:
        """How many steps are committed; of a worker on its way out, how many its state has behind it.

        The others may do again, with other shares, the last one that it has finished.
        """
        is_on_its_way_out = self._membership is not None and self._membership.withdrawal.is_under_way
        return self._place.behind if is_on_its_way_out else self._place.step

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
        state = self._place.state(self.world_size, self._clock.wall())
        return None if state is None else msgspec.structs.replace(state, current_step=self.step)

    @property
    def is_rescaling(self) -> bool:
        """Whether a new world is being agreed on, or this worker is on its way into it."""
        return self._awaits_world or self._presence.status is WorkerStatus.RESCALING

    @property
    def _awaits_world(self) -> bool:
        return self._standing.rescaling or self._standing.committed is not None

    @property
    def is_registered(self) -> bool:
        """Whether the world waits for it."""
        return self._membership is not None and self._membership.is_active

    @property
    def is_void(self) -> bool:
        """Whether the present step was broken off, so that what it does to the state does not count."""
        return self._presence.is_void

    @property
    def endpoint(self) -> str:
        """The daemon that it is connected to."""
        return "" if self._membership is None else self._membership.endpoint

    def descriptors(self) -> list[int]:
        """The file descriptors of its connections, which forked children must not keep."""
        return [] if self._membership is None else self._membership.descriptors()

    @property
    def is_connected(self) -> bool:
        """Whether it takes part in a cluster."""
        return self._membership is not None

    def get_metadata(self) -> WorkerMetadata:
        """What is known of it, as a copy."""
        return WorkerMetadata(
            self._worker_id,
            self._presence.status,
            self._presence.joined_at,
            self._presence.heartbeat_at,
            self.rank,
            self._profile.local_world_size,
            dict(self._profile.attributes),
        )

    def should_handle_shard(self, shard_index: int, total_shards: int) -> bool:
        """Whether a shard is this worker's: as it was committed for the shards of its data, else by the remainder."""
        if self.rank == RANK_NONE or not 0 <= shard_index < total_shards:
            return False
        data, shards = self._profile.data, None if self._membership is None else self._membership.shards
        if data is not None and shards is not None and total_shards == data.shards:
            return shards.owns(shard_index)
        return shard_index % self.world_size == self.rank

    def update_training_state(self, epoch: int, step: int, learning_rate: float) -> None:
        """Say how far the training is. The steps of a world are counted by the world; before it, by the script.

        Between two worlds nobody takes back what was committed: the daemon has been told that it counts.
        """
        epoch, step = arguments.count("epoch", epoch), arguments.count("step", step)
        goes_back = self._place.holds_state and step < self.step
        if goes_back or (step != self.step and self._presence.world is not None):
            raise RequestRefused(
                "step_counted", f"{self.step} steps are committed, and not {step}", "leave the counting to the steps"
            )
        self._place.learning_rate = arguments.rate("learning_rate", learning_rate)
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
        self.process.check()
        if self._is_open:
            raise RequestRefused("worker_connected", "the worker is already connected to the cluster", "disconnect it")
        self._is_open, self._loop = True, asyncio.get_running_loop()
        try:
            with self.process.inhabited(self.descriptors, self.told_to_end) as counters:
                self._begin_anew(counters)
                self._sessions += 1
                async with self._at(endpoints):
                    yield self
        finally:
            # Behind the end of all tasks, which may have a last turn in which they use them.
            self._membership = self._presence.world = None
            self._place.close()
            self._presence.counters = self._place.counters = None
            self._presence.topology = ClusterTopology(epoch=self.generation)
            self._is_open = False

    @asynccontextmanager
    async def _at(self, endpoints: tuple[str, ...]) -> AsyncIterator[None]:
        """Have connections, and tasks that go on beside the script."""
        failure: Exception | None = None
        async with (
            self._reach(endpoints) as client,
            self._open_door(client) as mesh,
            anyio.create_task_group() as tasks,
        ):
            self._membership = WorkerSession(
                self._profile,
                Connection(worker=self._worker_id, incarnation=self.incarnation, client=client, mesh=mesh, tasks=tasks),
                Whereabouts(standing=self._standing, presence=self._presence, place=self._place),
                lambda: self.state,
                self._arrive,
            )
            try:
                yield
            except Exception as error:  # noqa: BLE001 - raised below, so that it does not come out in a group
                failure = error
            finally:
                with anyio.CancelScope(shield=True):
                    await self.leave("it was disconnected")
                tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    def _reach(self, endpoints: tuple[str, ...]) -> ForgedClient:
        return ForgedClient(
            *endpoints,
            token=self._token,
            reconnect=REJOINING,
            network=self._network,
            clock=self._clock,
            source=self._random,
        )

    @asynccontextmanager
    async def _open_door(self, client: ForgedClient) -> AsyncIterator[Mesh]:
        """Let peers come in."""
        name, host = self._wanted_id.id, self._wanted_id.hostname or own_host(client.endpoint)
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
            self._worker_id = WorkerId(name, host, address.port)
            yield mesh

    async def register(self) -> None:
        """Become a worker of the job; from now on the world waits for this worker."""
        self.process.check()
        await self._member.register()

    @property
    def _member(self) -> WorkerSession:
        if self._membership is None:
            raise RequestRefused("worker_unconnected", "the worker is not connected to a cluster", "connect it")
        return self._membership

    async def disconnect(self) -> None:
        """Leave in good order; no error for who is not connected."""
        session, self._session = self._session, None
        if session is not None and not self.process.is_forked:
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
        last = farewell(end if isinstance(end, JobEnded | WorkerEvicted) else error)
        with anyio.CancelScope(shield=True):
            await self.leave(last.reason, failed=last.failed)

    async def leave(self, reason: str, *, done: bool = False, failed: bool = False) -> None:
        """Tell the daemon that this worker goes, if that can be told in time."""
        if self._membership is not None:
            await self._membership.leave(reason, done=done, failed=failed)

    def drain(self, reason: str) -> None:
        """Finish the present step, and go."""
        self.process.check()
        self._standing.draining = self._standing.draining or reason
        if self._membership is not None:
            self._membership.prepare_to_leave()
            self._membership.wake()

    def told_to_end(self) -> bool:
        """Finish the present step and go, because of SIGTERM; tells whether there is anything to be finished.

        To be called in any thread, also where a signal has interrupted it.
        """
        loop = self._loop
        if loop is None or not self.is_registered:
            return False
        loop.call_soon_threadsafe(self.drain, TOLD)
        return True

    # Steps.

    async def steps(self, total: int | None = None) -> AsyncIterator[Step]:
        """The steps to be done, one after the other, over all rescales; the same one again if it was broken off.

        A collective that cannot end raises `StepAborted`, which `with step:` takes care of.
        """
        while (number := await self.begin_step(total)) is not None:
            step = Step.numbered(number, lambda: None, lambda: self.is_void)
            yield step
            step.end()
            await self.finish_step()

    async def begin_step(self, total: int | None = None) -> int | None:
        """Wait until a step may begin; returns its number, or None when there are no more."""
        while isinstance(coming := await self.come_to_step(total), Parting):
            if coming.is_news:
                await self.leaving.fire_and_wait(coming.reason)
            if await self.part():
                return None
        return coming

    async def part(self) -> bool:
        """Leave, now that the subscribers of `leaving` are told; false where that took long and others need it now."""
        member = self._member
        goes = await member.withdrawal.end()
        if goes:
            await member.leave(member.departure.reason)
        return goes

    async def come_to_step(self, total: int | None = None) -> int | Parting | None:
        """Like `begin_step`; but who gets a `Parting` has to tell the subscribers of `leaving`, and to `part`."""
        self.process.check()
        member = self._member
        passage = await member.register()
        if not member.departure.is_due:
            # Its script was interrupted on its way out, and others have come to need it.
            await member.withdrawal.call_off()
        try:
            return await self._come_along(member, passage, total)
        finally:
            member.waiting.end()

    async def _come_along(self, member: WorkerSession, passage: Rescaler, total: int | None) -> int | Parting | None:
        while not member.is_over:
            if self._standing.end is not None:
                await self._fall_out(self._standing.end)
            if self._standing.completed is not None:
                await self._come_to_an_end(member, self._standing.completed)
            elif total is not None and self.step >= total and self._presence.may_step:
                # Known to the world alone: who is told to go in the last step says so first.
                await member.leave("the training is done", done=True)
            elif member.departure.is_due:
                return await member.withdrawal.begin(self._place.behind, passage)
            elif not self._presence.may_step:
                member.waiting.begin()
                await passage.come_along()
            else:
                self._presence.begin_step()
                self._place.begin_step()
                self.process.look_after_pulse()
                await self.resume_training()
                return self.step
        return None

    async def finish_step(self) -> bool:
        """Tell the others that the step is done; returns whether it counts."""
        self.process.check()
        if not self._presence.is_void:
            self._presence.mark()
            self._place.finish_step()
        if not await self._presence.end_step(self.step):
            return False
        self._place.count_step()
        return True

    async def _come_to_an_end(self, member: WorkerSession, step: int) -> None:
        """Others say that the training is done."""
        if self._has_gone_out:
            # The others may have done again, with other shares, what it had finished.
            await member.leave(member.departure.reason)
            return
        if self._place.has_finished and step > self._place.step:
            # They know that all have finished it.
            self._place.count_step()
        if self._place.holds_state and self._place.step >= step:
            await member.leave("the training is done", done=True)
            return
        why = "the training was done before this worker was taken in"
        await member.leave(why)
        await self._fall_out(JobEnded("job_completed", why, "take the result from a worker that was there"))

    @property
    def _has_gone_out(self) -> bool:
        """Whether it was told to go, and the world goes on without it."""
        standing = self._standing
        return standing.draining is not None and self._place.holds_state and self._worker_id not in standing.topology

    async def _fall_out(self, error: Exception) -> None:
        """The others go on without this worker, or nobody goes on."""
        self._presence.status = WorkerStatus.FAILED
        await self._presence.leave()
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
        self.process.check()
        withdrawal = self._member.withdrawal
        if not withdrawal.is_under_way:
            return await self._presence.together(act)
        if withdrawal.alone is None:
            raise RequestRefused(
                "worker_leaving",
                "this worker is on its way out, and the others do not meet it any more",
                "save what it has by itself, without the other workers",
            )
        return await act(withdrawal.alone)

    # What a rescale consists of, for this worker; the events are fired here.

    async def _arrive(self, event: RescalingEvent, state: GlobalTrainingState) -> None:
        await self.on_rescaling_event(event)
        await self.synchronize_state(state)
        # The first mark of a world: all of it have met, and have the state.
        self._presence.mark()
        member = self._member
        if not member.config.use_synchronous_rescaling:
            # The daemon learns so from nobody else.
            member.beat_now()

    async def on_rescaling_event(self, event: RescalingEvent) -> None:
        """Go over into the world of a rescale, and tell the subscribers."""
        self._presence.status = WorkerStatus.RESCALING
        await self.update_topology(event.new_topology)
        self.rescaling_requested.fire(event)

    async def update_topology(self, topology: ClusterTopology) -> None:
        """Go by this world: the rank is this worker's place in it."""
        self._presence.go_by(topology)

    async def synchronize_state(self, state: GlobalTrainingState) -> None:
        """Be where the training is, and tell the subscribers."""
        self._place.take_up(state)
        self._place.show()
        self.state_synchronized.fire(state)

    async def redistribute_data(self, plan: DataRedistributionPlan) -> TransferReport:
        """Fetch what a plan gives this worker, from the other workers. Rescales see to their own plans."""
        return await self.transfers.execute_plan(plan)

    @property
    def transfers(self) -> DataTransferManager:
        """What moves shards to this worker. What comes besides rescales, the next one may drop again."""
        shards = None if self._membership is None else self._membership.shards
        if shards is None:
            raise RequestRefused(
                "data_missing", "the worker has no training data, or is not registered", "give it `data`, and register"
            )
        return shards.transfers

    async def resume_training(self) -> None:
        """Train again behind a rescale, unless this worker is out of it."""
        if self.rank != RANK_NONE and self._presence.status not in OUT:
            self._presence.status = WorkerStatus.ACTIVE
