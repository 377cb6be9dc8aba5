"""The worker's side of elastic training.

Law: the training script owns its state between two step boundaries, the library at them. A step counts when every
member of the world has finished it; one that was broken off is done again from the state before it. The daemon is asked
when the world has to change and at no other time, so training goes on while it is away.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from random import Random, SystemRandom
from typing import Any, Self, TypeVar

import anyio
from anyio.abc import TaskGroup

from forged.client.client import ForgedClient
from forged.clock import Clock, SystemClock
from forged.data.messages import CorruptShardFound
from forged.data.outcome import TransferReport
from forged.data.plan import DataRedistributionPlan
from forged.data.sampler import ElasticSampler
from forged.data.shards import Indices
from forged.data.training import TrainingData, check_same_samples, common_of
from forged.data.transfers import DataTransferManager
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.members import pulse_interval_s
from forged.elastic.messages import (
    INCARNATION_BYTES,
    JobWaiting,
    Joined,
    RescaleAborted,
    RescaleCompleted,
    RescaleStarted,
    RescaleSynchronising,
    ShowCluster,
    WorkerDraining,
    WorkerFailed,
    WorkerLeft,
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
from forged.errors import ForgedError, RequestRefused, Unavailable
from forged.jobs.model import JobChanged, SettingValue
from forged.log import Log
from forged.messages import Gap, Record
from forged.net.network import Network
from forged.retry import REJOINING
from forged.worker import amounts
from forged.worker.carriers import Carrier, LoopCarrier
from forged.worker.collectives import World
from forged.worker.consumption import Consumption
from forged.worker.counters import Counters
from forged.worker.custodian import Custodian
from forged.worker.departure import Departure, Ties
from forged.worker.errors import JobEnded, WorkerEvicted
from forged.worker.events import Event
from forged.worker.exchange import StateExchange
from forged.worker.farewell import Farewell, Goodbye, farewell
from forged.worker.hearing import Hearing
from forged.worker.heartbeat import Heartbeat
from forged.worker.mesh import Mesh
from forged.worker.own_host import own_host
from forged.worker.own_process import OwnProcess, WorkerProcess
from forged.worker.parting import Parting, Withdrawal
from forged.worker.passage import Means, Passage
from forged.worker.peer_tls import PeerTls
from forged.worker.place import Place
from forged.worker.presence import Presence
from forged.worker.registration import LEAVE_TIMEOUT_S, Registration
from forged.worker.script_log import SCRIPT_LOG
from forged.worker.standing import FOLLOWED, Standing
from forged.worker.state import pack
from forged.worker.step import Step
from forged.worker.supply import Supply
from forged.worker.termination import TOLD
from forged.worker.usage_report import UsageReport
from forged.worker.waiting import Waiting

R = TypeVar("R")

JOB = "default"
RESHAPING = (RescaleStarted, RescaleCompleted)
"""What may make others need a worker."""
RELEASING = (RescaleSynchronising, RescaleAborted, JobWaiting, WorkerDraining, WorkerFailed, WorkerLeft)
"""What may end that."""
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
        self._local_world_size = amounts.count("local_world_size", local_world_size, at_least=1)
        self._network = network
        self._clock = clock or SystemClock()
        self._random = random or SystemRandom()
        self._carrier = carrier
        self._peer_tls = peer_tls
        check_same_samples(data, sampler)
        self._data = data
        self.sampler = sampler
        """What tells which samples a step takes."""
        self._log = log
        self.incarnation = incarnation or self._random.randbytes(INCARNATION_BYTES)
        """What tells this worker from any other of its name, before it and behind it."""
        self.process: WorkerProcess = process or OwnProcess(log)
        """What it has of the process that it lives in."""
        self._place = Place(learning_rate, global_batch_size, sampler, None)
        self._joined_at = self._heartbeat_at = self._clock.wall()
        self._client: ForgedClient | None = None
        self._mesh: Mesh | None = None
        self._line: Registration | None = None
        self._tasks: TaskGroup | None = None
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
        self._standing = Standing(self._worker_id.id)
        self._departure = Departure(self._standing, self._ties(), self._wake, self._random.random, self._log)
        self._presence = Presence(self._standing, counters)
        self._withdrawal = Withdrawal(self._standing, self._presence, self._departure, self._beat_now, self._log)
        self._place.counters = counters
        self._place.begin_anew()
        self._hearing: Hearing | None = None
        self._heartbeat: Heartbeat | None = None
        self._passage: Passage | None = None
        self._supply: Supply | None = None
        self._term = 0
        self._usage: UsageReport | None = None
        self._waiting = Waiting(self._what_stands_still, self._log)
        self._registered = False
        self._goodbye = Goodbye(self._say_goodbye)

    # What it is.

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
        return self._term

    @property
    def current_topology(self) -> ClusterTopology | None:
        """The world; None before the first."""
        topology = self._presence.topology
        return topology if topology.workers else None

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
        """Whether a new world is being agreed on, or this worker is on its way into it."""
        return self._awaits_world or self._presence.status is WorkerStatus.RESCALING

    @property
    def _awaits_world(self) -> bool:
        return self._standing.rescaling or self._standing.committed is not None

    @property
    def is_registered(self) -> bool:
        """Whether the world waits for it."""
        return self._registered and not self._goodbye.is_begun

    @property
    def is_void(self) -> bool:
        """Whether the present step was broken off, so that what it does to the state does not count."""
        return self._presence.is_void

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
            self._presence.status,
            self._joined_at,
            self._heartbeat_at,
            self.rank,
            self._local_world_size,
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
        if goes_back or (step != self.step and self._presence.world is not None):
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
            self._client = self._mesh = self._line = self._tasks = self._presence.world = None
            self._presence.counters = self._place.counters = None
            self._presence.topology = ClusterTopology(epoch=self.generation)
            self._is_open = self._registered = False

    @asynccontextmanager
    async def _at(self, endpoints: tuple[str, ...]) -> AsyncIterator[None]:
        """Have connections, and tasks that go on beside the script."""
        failure: Exception | None = None
        async with self._reach(endpoints) as client, self._open_door(client), anyio.create_task_group() as tasks:
            self._client, self._tasks = client, tasks
            self._line = Registration(client, self.job, self._worker_id, self.incarnation, self._random, self._log)
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
    async def _open_door(self, client: ForgedClient) -> AsyncIterator[None]:
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
            self._worker_id, self._mesh = WorkerId(name, host, address.port), mesh
            yield

    async def register(self) -> None:
        """Become a worker of the job; from now on the world waits for this worker."""
        self.process.check()
        if self._tasks is None or self._client is None or self._line is None:
            raise _unconnected()
        if self._registered:
            return
        # Said at once, and not when somebody needs the state.
        pack(self._whole_state)
        # The stream stands before the worker is known, so that nothing is missed in between.
        facts = await self._client.facts(*FOLLOWED, CorruptShardFound, jobs=[self.job]).__aenter__()
        try:
            hearing = self._hearing = self._hearing_of(self._client, self._tasks)
            self._tasks.start_soon(hearing.listen, facts)
            self._learn(await self._join())
            await self._begin_pulse(self._client, self._line)
        except BaseException:
            facts.close()
            raise
        self._joined_at, self._registered = self._clock.wall(), True
        self._heartbeat = Heartbeat(self._beat, self._config_now.heartbeat_interval_s)
        self._tasks.start_soon(self._heartbeat.go_on)
        if self._place.consumption is not None:
            self._usage = self._report_of(self._place.consumption)
            self._tasks.start_soon(self._usage.keep_telling)
        hearing.begin_to_ask()

    async def _begin_pulse(self, client: ForgedClient, line: Registration) -> None:
        endpoints = [str(address) for address in client.endpoints]
        try:
            self.process.begin_pulse(endpoints, self.job, self._worker_id.id, self.incarnation, client.token)
        except Unavailable as error:
            # It is no worker without one, and may register again.
            await line.leave(error.message, self.step, LEAVE_TIMEOUT_S, done=False, failed=False)
            raise

    def _hearing_of(self, client: ForgedClient, tasks: TaskGroup) -> Hearing:
        return Hearing(
            client,
            self.job,
            self._standing,
            ask=self._learn_what_was_missed,
            heard=self._heard,
            wake=self._wake,
            tasks=tasks,
            source=self._random,
            log=self._log,
        )

    def _report_of(self, consumption: Consumption) -> UsageReport:
        assert self._line is not None
        presence = self._presence
        return UsageReport(self._place, consumption, lambda: presence.topology, self._line, self._clock, self._log)

    async def _join(self, *, again: bool = False) -> Joined:
        assert self._line is not None
        return await self._line.join(
            os.getpid(),
            self._attributes,
            # They may have been changed since.
            None if again else self._settings,
            again=again,
            with_data=self._data is not None,
            local_world_size=self._local_world_size,
            common=common_of(self._data, self.sampler),
        )

    async def _learn_what_was_missed(self) -> None:
        self._learn(await self._join(again=True))
        if self._withdrawal.is_under_way:
            # It may be another daemon, which counts on this worker otherwise.
            self._beat_now()

    def _learn(self, joined: Joined) -> None:
        """Take what the daemon has told of the job."""
        assert self._mesh is not None
        self._mesh.trust(joined.peer_key)
        self._term = joined.fence.term
        self._standing.catch_up(joined)
        config = self._go_by(self._standing.settings)
        if self._passage is None:
            self._supply = None if self._data is None else self._supply_of(self._data, config)
            self._passage = self._passage_with(self._supply)
        self._prepare_to_leave()
        self._see_to_data()

    def _go_by(self, settings: Mapping[str, SettingValue]) -> ElasticTrainingConfig:
        """Keep to the settings of the job."""
        config = self._config = ElasticTrainingConfig.from_settings(settings)
        if self._place.counters is not None:
            # Before this worker says that it goes by them: its pulse looks here.
            self._place.counters.pulse_interval_s = pulse_interval_s(config)
        if self._heartbeat is not None:
            self._heartbeat.go_by(config.heartbeat_interval_s)
        return config

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

    def _passage_with(self, supply: Supply | None) -> Passage:
        assert self._line is not None
        assert self._mesh is not None
        assert self._tasks is not None
        means = Means(
            line=self._line,
            mesh=self._mesh,
            exchange=StateExchange(self._mesh, self._line, lambda: self._whole_state, self._tasks, self._log),
            supply=supply,
            departure=self._departure,
            rescale_timeout_s=lambda: self._config_now.rescale_timeout_s,
            arrive=self._arrive,
            clock=self._clock,
            log=self._log,
        )
        return Passage(self._standing, self._presence, self._place, means)

    @property
    def _config_now(self) -> ElasticTrainingConfig:
        """The settings of the job, as far as it has heard."""
        assert self._config is not None
        return self._config

    @property
    def _whole_state(self) -> Any:
        """What a new worker takes from the others."""
        if self._place.consumption is None:
            return self.state
        return {"state": self.state, "sampler": self._place.consumption.sampler, "usage": self._place.consumption}

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
        if self._registered and not self.process.is_forked:
            await self._goodbye.say(Farewell(reason, failed, done))

    async def _say_goodbye(self, last: Farewell) -> None:
        assert self._line is not None
        self._presence.status = WorkerStatus.LEAVING
        # That all is done may be known to nobody else, so it is said for as long as the daemon waits for this worker.
        grace_s = self._config.reconnect_grace_s if last.done and self._config else 0.0
        ends_at = anyio.current_time() + max(LEAVE_TIMEOUT_S, grace_s)
        try:
            # Who is cancelled says it all the same, unless nobody listens.
            with anyio.move_on_after(LEAVE_TIMEOUT_S, shield=True) as moment:
                await self._presence.leave()
                await self._tell_usage()
            if moment.cancelled_caught:
                with anyio.move_on_after(ends_at - anyio.current_time()):
                    await self._tell_usage()
        finally:
            left_s = max(LEAVE_TIMEOUT_S, ends_at - anyio.current_time())
            await self._line.leave(last.reason, self.step, left_s, done=last.done, failed=last.failed)

    async def _tell_usage(self) -> None:
        if self._usage is not None:
            await self._usage.tell()

    def drain(self, reason: str) -> None:
        """Finish the present step, and go."""
        self.process.check()
        self._standing.draining = self._standing.draining or reason
        self._prepare_to_leave()
        self._wake()

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
        goes = await self._withdrawal.end()
        if goes:
            await self.leave(self._departure.reason)
        return goes

    async def come_to_step(self, total: int | None = None) -> int | Parting | None:
        """Like `begin_step`; but who gets a `Parting` has to tell the subscribers of `leaving`, and to `part`."""
        try:
            return await self._come_to_step(total)
        finally:
            self._waiting.end()

    async def _come_to_step(self, total: int | None) -> int | Parting | None:
        self.process.check()
        if not self._registered:
            await self.register()
        assert self._passage is not None
        assert self._tasks is not None
        while not self._goodbye.is_begun:
            if self._standing.end is not None:
                await self._fall_out(self._standing.end)
            if self._standing.completed is not None:
                await self._come_to_an_end(self._standing.completed)
            elif total is not None and self.step >= total and self._presence.may_step:
                # Known to the world alone: who is told to go in the last step says so first.
                await self.leave("the training is done", done=True)
            elif self._departure.is_due:
                return await self._withdrawal.begin(self.step, self._passage, self._tasks)
            elif not self._presence.may_step:
                self._waiting.begin(self._tasks)
                await self._passage.come_along()
            else:
                self._presence.begin_step()
                self._place.begin_step()
                self.process.look_after_pulse()
                await self.resume_training()
                return self.step
        return None

    async def _what_stands_still(self) -> str:
        """In the daemon's words, for which this worker waits."""
        assert self._client is not None
        try:
            shown = await self._client.request(ShowCluster(self.job))
        except ForgedError as error:
            return f"the daemon does not say: {error.message}"
        return shown.standing or f"the job is {shown.phase}"

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

    async def _come_to_an_end(self, step: int) -> None:
        """Others say that the training is done."""
        if self._has_gone_out:
            # The others may have done again, with other shares, what it had finished.
            await self.leave(self._departure.reason)
            return
        if self._place.has_finished and step > self.step:
            # They know that all have finished it.
            self._place.count_step()
        if self._place.holds_state and self.step >= step:
            await self.leave("the training is done", done=True)
            return
        why = "the training was done before this worker was taken in"
        await self.leave(why)
        await self._fall_out(JobEnded("job_completed", why, "take the result from a worker that was there"))

    @property
    def _has_gone_out(self) -> bool:
        """Whether it was told to go, and the world goes on without it."""
        standing = self._standing
        return standing.draining is not None and self._place.holds_state and self._worker_id not in standing.topology

    def _ties(self) -> Ties:
        return Ties(
            is_bound=self._is_bound,
            is_waited_for=self._is_waited_for,
            has_given=lambda: self._mesh is not None and self._mesh.has_given(),
            has_daemon=lambda: self._client is not None and self._client.connected,
            announce=self._announce_leave,
            ask=self._ask_to_leave,
            leave=self._leave_if_it_may,
        )

    def _is_bound(self) -> bool:
        standing = self._standing
        takes_part = standing.is_under_way and standing.goes
        return takes_part or self._worker_id in standing.topology or standing.committed is not None

    def _is_waited_for(self) -> bool:
        standing = self._standing
        is_stopping = standing.is_under_way and standing.synchronising is None and not standing.moving
        return is_stopping or (self._presence.is_stepping and standing.stop_wanted > 0)

    async def _announce_leave(self, reason: str) -> bool:
        assert self._line is not None
        return await self._line.announce_leave(reason)

    async def _ask_to_leave(self) -> bool:
        assert self._line is not None
        return await self._line.may_leave()

    async def _leave_if_it_may(self) -> bool:
        assert self._line is not None
        await self._tell_usage()
        return await self._line.leave_if_it_may(self._departure.reason, self.step)

    def _prepare_to_leave(self) -> None:
        """Once it is told to go, have others take over what it holds; that has an end."""
        tasks = self._tasks
        if self._config is not None and tasks is not None and not tasks.cancel_scope.cancel_called:
            self._departure.begin(lambda: self._config_now, tasks)

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
        if not self.is_connected:
            raise _unconnected()
        if not self._withdrawal.is_under_way:
            return await self._presence.together(act)
        if self._withdrawal.alone is None:
            raise RequestRefused(
                "worker_leaving",
                "this worker is on its way out, and the others do not meet it any more",
                "save what it has by itself, without the other workers",
            )
        return await act(self._withdrawal.alone)

    # What a rescale consists of, for this worker; the events are fired here.

    async def _arrive(self, event: RescalingEvent, state: GlobalTrainingState) -> None:
        await self.on_rescaling_event(event)
        await self.synchronize_state(state)
        # The first mark of a world: all of it have met, and have the state.
        self._presence.mark()
        if not self._config_now.use_synchronous_rescaling:
            # The daemon learns so from nobody else.
            self._beat_now()

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
        if self._supply is None:
            raise RequestRefused(
                "data_missing", "the worker has no training data, or is not registered", "give it `data`, and register"
            )
        return self._supply.custodian.transfers

    async def resume_training(self) -> None:
        """Train again behind a rescale, unless this worker is out of it."""
        if self.rank != RANK_NONE and self._presence.status not in OUT:
            self._presence.status = WorkerStatus.ACTIVE

    # The daemon.

    def _heard(self, item: Record | Gap) -> None:
        """Act on what cannot wait for the next step boundary."""
        if isinstance(item, Record) and isinstance(item.fact, JobChanged):
            self._go_by(item.fact.settings)
        self._prepare_to_leave()
        if isinstance(item, Gap) or isinstance(item.fact, RESHAPING):
            self._departure.reconsider(is_needed_anew=True)
        elif isinstance(item.fact, RELEASING):
            self._departure.reconsider(is_needed_anew=False)
        if isinstance(item, Record) and self._supply is not None:
            self._supply.hear(item.fact)
        self._see_to_data()
        if self._standing.lost and self._presence.world is not None:
            self._presence.world.abort(f"{self._standing.lost} is gone")

    def _see_to_data(self) -> None:
        """Let training data come while training goes on, if it is to."""
        if self._supply is not None:
            self._supply.follow(self._standing.moving)

    def _beat_now(self) -> None:
        self._beat(self._config_now.heartbeat_interval_s)

    def _beat(self, every_s: float) -> None:
        """Say that this worker lives."""
        # The session may be over before this hears of it.
        if self._line is not None:
            self._line.beat(self.step, self._presence.marks, every_s, parting=self._withdrawal.is_under_way)
            self._heartbeat_at = self._clock.wall()

    def _wake(self) -> None:
        if self._passage is not None:
            self._passage.wake()

    def _give_up(self, error: Exception) -> None:
        """Training cannot go on here."""
        self._standing.end = error
        self._wake()


def _unconnected() -> RequestRefused:
    return RequestRefused("worker_unconnected", "the worker is not connected to a cluster", "connect it")
