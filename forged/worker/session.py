"""One worker's membership in a job: what it is made of while it is connected, from its registration to its goodbye.

Law: the parts are made once for a session and end with it; what the script sees of the worker outlives them. What is
heard and cannot wait for the next step boundary is acted on at once.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import anyio
from anyio.abc import TaskGroup

from forged.client.client import ForgedClient
from forged.clock import Clock
from forged.data.messages import CorruptShardFound
from forged.data.sampling.sampler import ElasticSampler
from forged.data.training import TrainingData, common_of
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.membership.member import pulse_interval_s
from forged.elastic.messages import (
    JobWaiting,
    JoinReply,
    RescaleAborted,
    RescaleCompleted,
    RescaleStarted,
    RescaleSynchronising,
    ShowCluster,
    WorkerDraining,
    WorkerFailed,
    WorkerLeft,
)
from forged.elastic.model import GlobalTrainingState, RescalingEvent, WorkerId, WorkerStatus
from forged.errors import ForgedError
from forged.jobs.model import JobChanged, SettingValue
from forged.kernel.messages import Gap, Record
from forged.log import Log
from forged.worker.daemon.goodbye import Goodbye, LeaveReason, farewell
from forged.worker.daemon.heartbeat import Heartbeat
from forged.worker.daemon.registration import LEAVE_TIMEOUT_S, Registration
from forged.worker.daemon.wait_reporter import WaitReporter
from forged.worker.data.sample_usage import SampleUsage
from forged.worker.data.shard_holder import ShardHolder
from forged.worker.drain.drain import Drain, Ties
from forged.worker.drain.withdrawal import Withdrawal
from forged.worker.fact_listener import FactListener
from forged.worker.mesh import Mesh
from forged.worker.process.worker_process import WorkerProcess
from forged.worker.rescale.rescaler import Means, Rescaler
from forged.worker.state_transfer.encoding import pack
from forged.worker.state_transfer.exchange import StateExchange
from forged.worker.transport.bulk_channel import BulkTransport, LoopBulkTransport
from forged.worker.usage_report import UsageReport
from forged.worker.worker_state.current_world import CurrentWorld
from forged.worker.worker_state.job_view import FOLLOWED, JobView
from forged.worker.worker_state.progress import TrainingProgress

RESHAPING = (RescaleStarted, RescaleCompleted)
"""What may make others need a worker."""
RELEASING = (RescaleSynchronising, RescaleAborted, JobWaiting, WorkerDraining, WorkerFailed, WorkerLeft)
"""What may end that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """What a worker is, whatever it connects to."""

    job: str
    settings: dict[str, SettingValue] | None
    """What its script wants the job's to be; None where it takes them as they are."""
    attributes: Mapping[str, str]
    local_world_size: int
    data: TrainingData | None
    sampler: ElasticSampler | None
    process: WorkerProcess
    carrier: BulkTransport | None
    clock: Clock
    random: Random
    log: Log


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """What a worker has for as long as it is connected."""

    worker: WorkerId
    """Who it is, with the port at which peers reach it."""
    incarnation: bytes
    client: ForgedClient
    mesh: Mesh
    tasks: TaskGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Whereabouts:
    """Where a worker is: by what it has heard, in its world, and in the training."""

    standing: JobView
    presence: CurrentWorld
    place: TrainingProgress


class WorkerSession:
    """Makes a worker a member of its job. `state` is what the script trains; `arrive` is told of each world entered."""

    def __init__(
        self,
        profile: WorkerSpec,
        session: Connection,
        whereabouts: Whereabouts,
        state: Callable[[], Any],
        arrive: Callable[[RescalingEvent, GlobalTrainingState], Awaitable[None]],
    ) -> None:
        self._profile = profile
        self._client = session.client
        self._mesh = session.mesh
        self._tasks = session.tasks
        self._standing = whereabouts.standing
        self._presence = whereabouts.presence
        self._place = whereabouts.place
        self._state = state
        self._arrive = arrive
        self._line = Registration(
            session.client, profile.job, session.worker, session.incarnation, profile.random, profile.log
        )
        self.departure = Drain(self._standing, self._ties(), self.wake, profile.random.random, profile.log)
        self.withdrawal = Withdrawal(
            self._standing, self._presence, self.departure, self.beat_now, self._tasks, profile.log
        )
        self.waiting = WaitReporter(self._what_stands_still, self._tasks, profile.log)
        self.passage: Rescaler | None = None
        """How it comes from world to world; None before the daemon has taken it in."""
        self.shards: ShardHolder | None = None
        """None before the registration, and without training data."""
        self._is_registered = False
        self._may_be_known = False
        """Whether the daemon may take it for a worker that is not registered yet."""
        self._going_out = anyio.Lock()
        self._config: ElasticTrainingConfig | None = None
        self._hearing = FactListener(
            self._client,
            profile.job,
            self._standing,
            ask=self._learn_what_was_missed,
            heard=self._heard,
            wake=self.wake,
            tasks=self._tasks,
            source=profile.random,
            log=profile.log,
        )
        self._goodbye = Goodbye(self._say_goodbye)
        self._heartbeat: Heartbeat | None = None
        self._usage: UsageReport | None = None

    @property
    def is_active(self) -> bool:
        """Whether the world waits for it."""
        return self._is_registered and not self._goodbye.is_begun

    @property
    def is_over(self) -> bool:
        """Whether it has said that it goes."""
        return self._goodbye.is_begun

    @property
    def config(self) -> ElasticTrainingConfig:
        """The settings of the job, as far as it has heard."""
        assert self._config is not None
        return self._config

    @property
    def endpoint(self) -> str:
        """The daemon that it is connected to."""
        return self._client.endpoint or ""

    def descriptors(self) -> list[int]:
        """The file descriptors of its connections, which forked children must not keep."""
        return self._client.descriptors() + self._mesh.descriptors()

    # Coming.

    async def register(self) -> Rescaler:
        """Become a worker of the job; from now on the world waits for this worker. No more than once."""
        if self._is_registered:
            assert self.passage is not None
            return self.passage
        # Said at once, and not when somebody needs the state.
        pack(self._whole_state)
        # The stream stands before the worker is known, so that nothing is missed in between.
        facts = await self._client.facts(*FOLLOWED, CorruptShardFound, jobs=[self._line.job]).__aenter__()
        try:
            self._tasks.start_soon(self._hearing.listen, facts)
            passage = self._learn(await self._come_in())
            self._begin_pulse()
        except BaseException as error:
            facts.close()
            await self._go_out(error.message if isinstance(error, ForgedError) else farewell(error).reason)
            raise
        self._presence.joined_at, self._is_registered, self._may_be_known = self._profile.clock.wall(), True, False
        self._heartbeat = Heartbeat(self._beat, self.config.heartbeat_interval_s)
        self._tasks.start_soon(self._heartbeat.go_on)
        if self._place.consumption is not None:
            self._usage = self._report_of(self._place.consumption)
            self._tasks.start_soon(self._usage.keep_telling)
        self._hearing.begin_to_ask()
        return passage

    async def _come_in(self) -> JoinReply:
        """Ask to be taken in. Whoever is interrupted in that may be known to the daemon all the same."""
        self._may_be_known = True
        try:
            return await self._join()
        except ForgedError:
            self._may_be_known = False
            raise

    async def _go_out(self, reason: str) -> None:
        """Say goodbye for who did not become a worker, if the daemon may take it for one. It may register again."""
        with anyio.CancelScope(shield=True):
            async with self._going_out:
                if self._may_be_known:
                    await self._line.leave(reason, self._place.step, LEAVE_TIMEOUT_S, done=False, failed=False)
                self._may_be_known = False

    def _begin_pulse(self) -> None:
        line, client = self._line, self._client
        endpoints = [str(address) for address in client.endpoints]
        self._profile.process.begin_pulse(endpoints, line.job, line.worker.id, line.incarnation, client.token)

    def _report_of(self, consumption: SampleUsage) -> UsageReport:
        presence, profile = self._presence, self._profile
        return UsageReport(self._place, consumption, lambda: presence.topology, self._line, profile.clock, profile.log)

    async def _join(self, *, again: bool = False) -> JoinReply:
        profile = self._profile
        return await self._line.join(
            os.getpid(),
            profile.attributes,
            # They may have been changed since.
            None if again else profile.settings,
            again=again,
            with_data=profile.data is not None,
            local_world_size=profile.local_world_size,
            common=common_of(profile.data, profile.sampler),
        )

    async def _learn_what_was_missed(self) -> None:
        self._learn(await self._join(again=True))
        if self.withdrawal.is_under_way:
            # It may be another daemon, which counts on this worker otherwise.
            self.beat_now()

    def _learn(self, joined: JoinReply) -> Rescaler:
        """Take what the daemon has told of the job."""
        self._mesh.trust(joined.peer_key)
        self._standing.catch_up(joined)
        config = self._go_by(self._standing.settings)
        if self.passage is None:
            data = self._profile.data
            self.shards = None if data is None else self._shard_holder(data, config)
            self.passage = self._passage_with(self.shards)
        self.prepare_to_leave()
        self._see_to_data()
        return self.passage

    def _go_by(self, settings: Mapping[str, SettingValue]) -> ElasticTrainingConfig:
        """Keep to the settings of the job."""
        config = self._config = ElasticTrainingConfig.from_settings(settings)
        if self._place.counters is not None:
            # Before this worker says that it goes by them: its pulse looks here.
            self._place.counters.pulse_interval_s = pulse_interval_s(config)
        if self._heartbeat is not None:
            self._heartbeat.go_by(config.heartbeat_interval_s)
        return config

    def _shard_holder(self, data: TrainingData, config: ElasticTrainingConfig) -> ShardHolder:
        profile = self._profile
        return ShardHolder(
            data,
            config,
            profile.sampler,
            self._line,
            self._client.signal,
            self._mesh,
            self._tasks,
            self._give_up,
            profile.clock,
            profile.random.random,
            uses_threads=not isinstance(profile.carrier, LoopBulkTransport),
            log=profile.log,
        )

    def _passage_with(self, shards: ShardHolder | None) -> Rescaler:
        log = self._profile.log
        means = Means(
            line=self._line,
            mesh=self._mesh,
            exchange=StateExchange(self._mesh, self._line, lambda: self._whole_state, self._tasks, log),
            shards=shards,
            departure=self.departure,
            rescale_timeout_s=lambda: self.config.rescale_timeout_s,
            arrive=self._arrive,
            clock=self._profile.clock,
            log=log,
        )
        return Rescaler(self._standing, self._presence, self._place, means)

    @property
    def _whole_state(self) -> Any:
        """What a new worker takes from the others."""
        consumption = self._place.consumption
        if consumption is None:
            return self._state()
        return {"state": self._state(), "sampler": consumption.sampler, "usage": consumption}

    # What is heard, and said.

    def _heard(self, item: Record | Gap) -> None:
        """Act on what cannot wait for the next step boundary."""
        if isinstance(item, Record) and isinstance(item.fact, JobChanged):
            self._go_by(item.fact.settings)
        self.prepare_to_leave()
        if isinstance(item, Gap) or isinstance(item.fact, RESHAPING):
            self.departure.reconsider(is_needed_anew=True)
        elif isinstance(item.fact, RELEASING):
            self.departure.reconsider(is_needed_anew=False)
        if isinstance(item, Record) and self.shards is not None:
            self.shards.on_fact(item.fact)
        self._see_to_data()
        if self._standing.lost and self._presence.world is not None:
            self._presence.world.abort(f"{self._standing.lost} is gone")

    def _see_to_data(self) -> None:
        """Let training data come while training goes on, if it is to."""
        if self.shards is not None:
            self.shards.obtain_in_background(self._standing.moving)

    def beat_now(self) -> None:
        """Say at once that this worker lives, and how far it is."""
        self._beat(self.config.heartbeat_interval_s)

    def _beat(self, every_s: float) -> None:
        is_parting = self.withdrawal.is_under_way
        self._line.beat(self._place.step, self._presence.marks, every_s, parting=is_parting)
        self._presence.heartbeat_at = self._profile.clock.wall()

    def wake(self) -> None:
        """Something has changed."""
        if self.passage is not None:
            self.passage.wake()

    def _give_up(self, error: Exception) -> None:
        """Training cannot go on here."""
        self._standing.end = error
        self.wake()

    async def _what_stands_still(self) -> str:
        """In the daemon's words, for which this worker waits."""
        try:
            shown = await self._client.request(ShowCluster(self._line.job))
        except ForgedError as error:
            return f"the daemon does not say: {error.message}"
        return shown.stall_report or f"the job is {shown.phase}"

    # Going.

    def prepare_to_leave(self) -> None:
        """Once it is told to go, have others take over what it holds; that has an end."""
        if self._config is not None and not self._tasks.cancel_scope.cancel_called:
            self.departure.begin(lambda: self.config, self._tasks)

    def _ties(self) -> Ties:
        return Ties(
            is_bound=self._is_bound,
            is_waited_for=self._is_waited_for,
            meeting=lambda: self._presence.meeting,
            break_off=self._break_off,
            has_given=self._mesh.has_given,
            has_daemon=lambda: self._client.connected,
            announce=self._line.announce_leave,
            ask=self._line.may_leave,
            leave=self._leave_if_it_may,
        )

    def _is_bound(self) -> bool:
        standing = self._standing
        takes_part = standing.is_under_way and standing.goes
        return takes_part or self._line.worker in standing.topology or standing.committed is not None

    def _is_waited_for(self) -> bool:
        standing = self._standing
        if self._presence.meeting is not None:
            return False
        is_stopping = standing.is_under_way and standing.synchronising is None and not standing.moving
        return is_stopping or (self._presence.is_stepping and standing.stop_wanted > 0)

    def _break_off(self, why: str) -> None:
        self._presence.break_off(f"{self._line.worker.id} does not wait any longer: {why}")

    async def _leave_if_it_may(self) -> bool:
        await self._tell_usage()
        return await self._line.leave_if_it_may(self.departure.reason, self._place.step)

    async def leave(self, reason: str, *, done: bool = False, failed: bool = False) -> None:
        """Tell the daemon that this worker goes, if that can be told in time."""
        if self._profile.process.is_forked:
            return
        if self._is_registered:
            await self._goodbye.say(LeaveReason(reason, failed, done))
        else:
            # Its script may have been interrupted while it registered, and be saying so at this moment.
            await self._go_out(reason)

    async def _say_goodbye(self, last: LeaveReason, *, is_again: bool) -> None:
        self._presence.status = WorkerStatus.LEAVING
        # That all is done may be known to nobody else, so it is said for as long as the daemon waits for this worker,
        # unless somebody does not want to wait for that.
        grace_s = self.config.reconnect_grace_s if last.done and not is_again else 0.0
        moment_s = LEAVE_TIMEOUT_S / 2 if is_again else LEAVE_TIMEOUT_S
        ends_at = anyio.current_time() + max(LEAVE_TIMEOUT_S, grace_s)
        try:
            # Who is cancelled says it all the same, unless nobody listens.
            with anyio.move_on_after(moment_s, shield=True) as moment:
                await self._presence.leave()
                await self._tell_usage()
            if moment.cancelled_caught:
                with anyio.move_on_after(ends_at - anyio.current_time() - moment_s):
                    await self._tell_usage()
        finally:
            left_s = max(moment_s, ends_at - anyio.current_time())
            is_said = False
            try:
                is_said = await self._line.leave(
                    last.reason, self._place.step, left_s, done=last.done, failed=last.failed
                )
            finally:
                if not is_said:
                    self._profile.process.bequeath({**last._asdict(), "step": self._place.step})

    async def _tell_usage(self) -> None:
        if self._usage is not None:
            await self._usage.tell()
