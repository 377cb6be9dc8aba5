"""Workers and a real daemon on one loop."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forged.client import ForgedClient
from forged.client.connection import Link
from forged.data.model import Dataset
from forged.data.placement.plan import DataRedistributionPlan
from forged.data.placement.planner import DataRedistributor
from forged.data.store.memory import MemoryShardStore
from forged.data.training import TrainingData
from forged.data.transfer.outcome import TransferReport
from forged.elastic.config import PULSE_INTERVAL_S
from forged.elastic.failure_detector.detector import SCAN_INTERVAL_S
from forged.elastic.messages import (
    JobCompleted,
    JobWaiting,
    LeaveJob,
    RescaleStarted,
    WorkerFailed,
    WorkerJoined,
    WorkerLeft,
)
from forged.elastic.model import (
    ClusterTopology,
    GlobalTrainingState,
    RescaleType,
    RescalingEvent,
    WorkerId,
    WorkerStatus,
)
from forged.errors import ConfigError, RequestRefused, Unavailable
from forged.jobs.model import ChangeJob, ShowJob
from forged.kernel.messages import Gap
from forged.net.transport.port import Address
from forged.worker import registration as registrations
from forged.worker import session as sessions
from forged.worker.errors import CollectiveMismatch, JobEnded, StepAborted, WorkerEvicted
from forged.worker.mesh import Mesh
from forged.worker.process.counters import Counters
from forged.worker.process.worker_process import SharedProcess
from forged.worker.registration import LEAVE_TIMEOUT_S, HeartbeatSender, Registration
from forged.worker.rescaler import Rescaler
from forged.worker.state_transfer.transfer import StateExchange
from forged.worker.worker import ElasticWorker
from forged.worker.worker_state.session_state import CurrentWorld
from tests.client.daemon_runner import SOON, DaemonRunner
from tests.telemetry.recording_log import RecordingLog
from tests.worker.meshes import until
from tests.worker.trainers import (
    JOB,
    PATIENCE_S,
    TrainerGroup,
    all_connected,
    chain_after,
    config,
    group_at,
    past,
    shared_worker,
)


class Pulsing(SharedProcess):
    """A process that records the pulses to be started, or fails to start one."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Unavailable | None = None
        self.tokens: list[str | None] = []

    def begin_pulse(
        self, endpoints: Sequence[str], job: str, worker_id: str, incarnation: bytes, token: str | None
    ) -> None:
        if self.error is not None:
            raise self.error
        self.tokens.append(token)


def anonymously(link: Callable[..., Link], *parts: Any) -> Link:
    """A link without a token."""
    return link(*parts[:-1], None)


TOPOLOGY = ClusterTopology((WorkerId("a", "host", 1), WorkerId("me", "host", 2), WorkerId("b", "host", 3)), 4, 1.0)


class TestTheValueOfIt:
    """A worker that is not connected."""

    def test_it_has_an_id_and_no_rank_and_joins(self) -> None:
        worker = ElasticWorker(WorkerId("me", "host", 2), config())
        assert worker.worker_id == WorkerId("me", "host", 2)
        assert (worker.rank, worker.world_size, worker.generation) == (-1, 0, 0)
        assert (worker.current_topology, worker.current_state) == (None, None)
        assert [worker.is_rescaling, worker.is_connected, worker.is_registered] == [False] * 3
        metadata = worker.get_metadata()
        assert (metadata.status, metadata.rank, metadata.local_world_size) == (WorkerStatus.JOINING, -1, 1)
        assert metadata.join_time == metadata.last_heartbeat > 0

    def test_settings_that_are_wrong_are_refused(self) -> None:
        with pytest.raises(ConfigError):
            ElasticWorker("me", config(min_workers=0))

    def test_metadata_are_a_copy(self) -> None:
        attributes = {"gpu": "none"}
        worker = ElasticWorker("me", attributes=attributes)
        attributes["gpu"] = "many"
        metadata = worker.get_metadata()
        assert metadata.custom_attributes == {"gpu": "none"}
        assert isinstance(metadata.custom_attributes, dict)
        metadata.custom_attributes["gpu"] = "some"
        assert worker.get_metadata().custom_attributes == {"gpu": "none"}

    def test_it_tells_how_many_processes_it_stands_for(self) -> None:
        assert ElasticWorker("me", local_world_size=8).get_metadata().local_world_size == 8
        with pytest.raises(RequestRefused, match=r"local_world_size must be an integer from 1 .*, got 0"):
            ElasticWorker("me", local_world_size=0)

    async def test_its_rank_is_its_place_in_the_topology(self) -> None:
        worker = ElasticWorker(WorkerId("me", "host", 2))
        await worker.update_topology(TOPOLOGY)
        assert (worker.rank, worker.world_size, worker.get_metadata().rank) == (1, 3, 1)
        assert worker.current_topology == TOPOLOGY
        await worker.update_topology(ClusterTopology((WorkerId("a", "host", 1),), 5))
        assert worker.rank == -1

    async def test_a_shard_is_its_own_if_the_remainder_is_its_rank(self) -> None:
        worker = ElasticWorker(WorkerId("me", "host", 2))
        assert not worker.should_handle_shard(1, 10)
        await worker.update_topology(TOPOLOGY)
        assert [shard for shard in range(-3, 12) if worker.should_handle_shard(shard, 10)] == [1, 4, 7]

    async def test_a_rescaling_event_tells_all_subscribers_and_leads_to_its_topology(self) -> None:
        worker = ElasticWorker(WorkerId("me", "host", 2))
        heard: list[tuple[str, Any, int, bool]] = []
        for name in ("one", "other"):
            worker.rescaling_requested.subscribe(
                lambda event, name=name: heard.append((name, event, worker.rank, worker.is_rescaling))  # type: ignore[misc]
            )
        event = RescalingEvent(RescaleType.SCALE_UP, ClusterTopology(), TOPOLOGY)
        await worker.on_rescaling_event(event)
        assert heard == [("one", event, 1, True), ("other", event, 1, True)]
        assert worker.get_metadata().status is WorkerStatus.RESCALING
        await worker.resume_training()
        assert worker.get_metadata().status is WorkerStatus.ACTIVE
        assert not worker.is_rescaling

    @pytest.mark.parametrize("event", ["rescaling_requested", "state_synchronized"])
    async def test_asynchronous_subscriber_of_an_event_that_is_not_awaited_is_refused(self, event: str) -> None:
        async def hear(value: object) -> None:
            raise AssertionError("never awaited")

        with pytest.raises(RequestRefused) as raised:
            getattr(ElasticWorker("me"), event).subscribe(hear)
        assert raised.value.code == "subscriber_asynchronous"

    async def test_worker_in_no_world_does_not_resume(self) -> None:
        worker = ElasticWorker("me")
        await worker.resume_training()
        assert worker.get_metadata().status is WorkerStatus.JOINING

    async def test_synchronised_state_reaches_subscribers_and_current_state(self) -> None:
        worker = ElasticWorker("me", learning_rate=0.1, global_batch_size=32)
        heard: list[GlobalTrainingState] = []
        worker.state_synchronized.subscribe(heard.append)
        state = GlobalTrainingState(2, 50, 0.0, 64)
        await worker.synchronize_state(state)
        assert heard == [state]
        now = worker.current_state
        assert now is not None
        assert (now.current_epoch, now.current_step, now.learning_rate, now.global_batch_size) == (2, 50, 0.0, 64)

    async def test_number_of_workers_is_that_of_the_synchronised_state_until_a_world_is_entered(self) -> None:
        worker = ElasticWorker("me")
        await worker.synchronize_state(GlobalTrainingState(2, 50, 0.5, 64, active_worker_count=4))
        assert worker.current_state is not None
        assert worker.current_state.active_worker_count == 4

    def test_how_far_the_training_is_can_be_said_before_there_is_a_world(self) -> None:
        worker = ElasticWorker("me")
        worker.update_training_state(2, 50, 0.5)
        assert (worker.epoch, worker.step, worker.learning_rate) == (2, 50, 0.5)

    async def test_committed_step_cannot_be_lowered_between_worlds(self) -> None:
        worker = ElasticWorker("me")
        await worker.synchronize_state(GlobalTrainingState(2, 50, 0.5, 64))
        with pytest.raises(RequestRefused) as raised:
            worker.update_training_state(2, 49, 0.5)
        assert (raised.value.code, worker.step) == ("step_counted", 50)
        worker.update_training_state(3, 50, 0.25)
        assert (worker.epoch, worker.step, worker.learning_rate) == (3, 50, 0.25)

    def test_numbers_become_pythons_own_and_invalid_ones_are_refused_by_name(self) -> None:
        size, place = np.int64(32), (np.int64(2), np.int64(50), np.float32(0.5))
        worker = ElasticWorker("me", learning_rate=np.float64(0.1), global_batch_size=size)  # type: ignore[arg-type]
        worker.update_training_state(*place)  # type: ignore[arg-type]
        numbers = (worker.epoch, worker.step, worker.learning_rate, worker.global_batch_size)
        assert numbers == (2, 50, 0.5, 32)
        assert [type(number) for number in numbers] == [int, int, float, int]
        with pytest.raises(RequestRefused, match="learning_rate"):
            worker.update_training_state(3, 60, math.nan)
        assert (worker.epoch, worker.step, worker.learning_rate) == (2, 50, 0.5)
        with pytest.raises(RequestRefused, match="global_batch_size"):
            ElasticWorker("me", global_batch_size=0.5)  # type: ignore[arg-type]

    async def test_collectives_need_a_connection(self) -> None:
        worker = ElasticWorker("me")
        for collective in (worker.barrier, partial(worker.all_reduce, 1), partial(worker.broadcast, 1)):
            with pytest.raises(RequestRefused, match="not connected") as raised:
                await collective()
            assert raised.value.code == "worker_unconnected"

    async def test_disconnect_and_close_without_a_connection_are_no_errors(self) -> None:
        worker = ElasticWorker("me")
        await worker.disconnect()
        await worker.close()
        await worker.leave("for no reason")
        with pytest.raises(RequestRefused) as raised:
            await worker.begin_step()
        assert raised.value.code == "worker_unconnected"


class TestComingAndGoing:
    async def test_close_disconnects_the_worker(self, runner: DaemonRunner, client: ForgedClient) -> None:
        worker = shared_worker("me", config(), job=JOB)
        await worker.connect(runner.endpoint)
        for _ in range(2):
            await worker.close()
            assert not worker.is_connected
        assert await client.workers(JOB) == []

    async def test_it_connects_registers_beats_and_disconnects(
        self, runner: DaemonRunner, client: ForgedClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run, ended = HeartbeatSender.run, list[HeartbeatSender]()

        async def run_and_note(sender: HeartbeatSender) -> None:
            try:
                await run(sender)
            finally:
                ended.append(sender)

        monkeypatch.setattr(HeartbeatSender, "run", run_and_note)
        worker = shared_worker("me", config(worker_heartbeat_timeout_ms=3_000), job=JOB, attributes={"gpu": "none"})
        await worker.connect(runner.endpoint)
        assert worker.is_connected
        assert worker.is_registered
        (view,) = await client.workers(JOB)
        assert (view.id, view.attributes, view.address) == ("me", {"gpu": "none"}, str(worker.worker_id).split("@")[1])
        first = worker.get_metadata().last_heartbeat
        async with asyncio.timeout(PATIENCE_S):
            while worker.get_metadata().last_heartbeat == first:
                await asyncio.sleep(0.001)
        await worker.disconnect()
        assert not worker.is_connected
        assert len(ended) == 1
        assert await client.workers(JOB) == []
        await worker.disconnect()
        assert [fact.reason for fact in await past(client, WorkerLeft)] == ["it was disconnected"]

    async def test_it_beats_every_third_of_the_timeout(
        self, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[float] = []
        beaten = asyncio.Event()
        beat = Registration.beat

        def note(line: Registration, step: int, marks: int, every_s: float, **more: Any) -> None:
            beat(line, step, marks, every_s, **more)
            told.append(every_s)
            beaten.set()

        monkeypatch.setattr(Registration, "beat", note)
        async with shared_worker("me", config(worker_heartbeat_timeout_ms=9_000), job=JOB) as worker:
            await worker.connect(runner.endpoint)
            await asyncio.wait_for(beaten.wait(), PATIENCE_S)
            metadata = worker.get_metadata()
            assert metadata.last_heartbeat >= metadata.join_time
        assert told == [3.0]

    async def test_changed_settings_apply_when_received(self, runner: DaemonRunner, client: ForgedClient) -> None:
        counters = Counters.create()
        process = SharedProcess(counters)
        worker = ElasticWorker("me", config(worker_heartbeat_timeout_ms=600_000), job=JOB, process=process)
        await worker.connect(runner.endpoint)
        assert counters.pulse_interval_s == PULSE_INTERVAL_S
        job = await client.request(ShowJob(JOB))
        before = worker.get_metadata().last_heartbeat
        # It is in the middle of two hundred seconds of sleep.
        shorter = {**job.settings, "worker_heartbeat_timeout_ms": 300, "rescale_timeout_ms": 77_000}
        await client.request(ChangeJob(JOB, shorter, job.version))
        async with asyncio.timeout(PATIENCE_S):
            while worker.get_metadata().last_heartbeat == before:
                await asyncio.sleep(0.001)
        assert counters.pulse_interval_s == pytest.approx(0.1)
        # The daemon looks at it several times, and goes by the new settings, too.
        await asyncio.sleep(2 * SCAN_INTERVAL_S)
        assert [view.id for view in await client.workers(JOB)] == ["me"]
        await worker.disconnect()
        assert await past(client, WorkerFailed) == []
        counters.close()

    async def test_worker_whose_pulse_fails_to_start_is_not_registered_and_may_try_again(
        self, runner: DaemonRunner, client: ForgedClient
    ) -> None:
        process = Pulsing()
        process.error = Unavailable("pulse_not_started", "the pulse could not be started")
        worker = ElasticWorker("me", config(), job=JOB, process=process)
        async with worker.session(runner.endpoint):
            with pytest.raises(Unavailable, match="the pulse could not be started"):
                await worker.begin_step()
            assert not worker.is_registered
            assert await client.workers(JOB) == []
            process.error = None
            assert await worker.begin_step(1) == 0
            assert await worker.finish_step()
            assert await worker.begin_step(1) is None
        assert [type(fact) for fact in await past(client, WorkerLeft, JobCompleted)] == [
            WorkerLeft,
            WorkerLeft,
            JobCompleted,
        ]

    @pytest.mark.parametrize(("given", "shown"), [(None, "of the environment"), ("given", "given"), ("", None)])
    async def test_its_pulse_shows_the_token_that_it_shows(
        self, given: str | None, shown: str | None, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FORGED_TOKEN", "of the environment")
        process = Pulsing()
        worker = ElasticWorker("me", config(), job=JOB, process=process, token=given)
        # The daemon has no tokens, and accepts workers without one.
        monkeypatch.setattr("forged.client.client.Link", partial(anonymously, Link))
        async with worker.session(runner.endpoint):
            await worker.register()
        assert process.tokens == [shown]

    async def test_cancelled_leave_report_is_still_delivered(
        self, runner: DaemonRunner, client: ForgedClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        leave, leaves = CurrentWorld.leave, asyncio.Event()

        async def leave_slowly(current_world: CurrentWorld) -> None:
            leaves.set()
            await asyncio.sleep(0.1)
            await leave(current_world)

        worker = shared_worker("me", config(), job=JOB)

        async def train() -> None:
            async for _ in worker.steps(3):
                if worker.step == 2:
                    monkeypatch.setattr(CurrentWorld, "leave", leave_slowly)

        async with worker:
            await worker.connect(runner.endpoint)
            task = asyncio.create_task(train())
            await leaves.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        said = await past(client, WorkerLeft, JobCompleted, WorkerFailed)
        assert said == [WorkerLeft("me", "training completed"), JobCompleted(3)]

    async def test_interrupted_leave_report_does_not_wait_for_an_absent_daemon(
        self, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        patience: list[float] = []
        says = asyncio.Event()

        async def leave(line: Registration, reason: str, step: int, patience_s: float, **_: bool) -> None:
            patience.append(patience_s)
            says.set()
            if len(patience) == 1:
                await asyncio.Event().wait()

        monkeypatch.setattr(Registration, "leave", leave)
        async with group_at(runner.endpoint) as group:
            group.total = 3
            (a,) = group.start("a")
            await says.wait()
            assert a.task is not None
            a.task.cancel()
            await asyncio.wait([a.task])
        first, *others = patience
        assert first > LEAVE_TIMEOUT_S
        assert [patience_s <= LEAVE_TIMEOUT_S for patience_s in others] == [True]

    @pytest.mark.parametrize("is_cancelled", [True, False])
    async def test_worker_interrupted_while_registering_has_left_and_may_register_again(
        self, is_cancelled: bool, runner: DaemonRunner, client: ForgedClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        join, joined = Registration.join, asyncio.Event()

        async def join_slowly(line: Registration, *arguments: Any, **options: Any) -> None:
            await join(line, *arguments, **options)
            joined.set()
            await asyncio.Event().wait()

        worker = shared_worker("me", config(), job=JOB)
        async with worker.session(runner.endpoint):
            with monkeypatch.context() as patch:
                patch.setattr(Registration, "join", join_slowly)
                registering = asyncio.create_task(worker.register())
                await joined.wait()
                if not is_cancelled:
                    await worker.leave("it was disconnected")
                registering.cancel()
                await asyncio.wait([registering])
            assert await client.workers(JOB) == []
            await worker.register()
        reasons = [fact.reason for fact in await past(client, WorkerFailed, WorkerLeft)]
        assert reasons == [
            "its script was interrupted" if is_cancelled else "it was disconnected",
            "it was disconnected",
        ]

    async def test_worker_drained_in_the_last_step_reports_that_the_training_is_done(
        self, group: TrainerGroup, client: ForgedClient
    ) -> None:
        async def drain(step: int) -> None:
            if step == 4:
                group["a"].worker.drain("the night")
                await until(lambda: group["a"].member.state.is_leave_due)

        group.total = 5
        (a,) = group.make("a")
        a.before_step = drain
        group.start("a")
        assert await group.over("a") == [None]
        said = await past(client, WorkerLeft, JobCompleted)
        assert said == [WorkerLeft("a", "training completed"), JobCompleted(5)]

    async def test_worker_that_has_left_has_no_rank_and_does_not_resume(self, runner: DaemonRunner) -> None:
        worker = shared_worker("me", config(), job=JOB)
        await worker.connect(runner.endpoint)
        await worker.begin_step()
        await worker.leave("enough of it")
        assert worker.rank == 0
        await worker.resume_training()
        assert worker.get_metadata().status is WorkerStatus.LEAVING
        await worker.disconnect()
        assert (worker.rank, worker.world_size, worker.current_topology) == (-1, 0, None)

    async def test_the_daemon_knows_how_many_processes_it_stands_for(
        self, runner: DaemonRunner, client: ForgedClient
    ) -> None:
        async with shared_worker("me", config(), job=JOB, local_world_size=8) as worker:
            await worker.connect(runner.endpoint)
            (view,) = await client.workers(JOB)
            assert view.local_world_size == 8

    async def test_connected_worker_cannot_connect_again(self, runner: DaemonRunner) -> None:
        async with shared_worker("me", config(), job=JOB) as worker:
            await worker.connect(runner.endpoint)
            with pytest.raises(RequestRefused) as raised:
                await worker.connect(runner.endpoint)
            assert raised.value.code == "worker_connected"
            assert worker.is_connected
        assert not worker.is_connected

    async def test_it_may_come_back_and_is_another_worker_then(
        self, runner: DaemonRunner, client: ForgedClient
    ) -> None:
        worker = shared_worker("me", config(), job=JOB)
        incarnations = set()
        for _ in range(3):
            await worker.connect(runner.endpoint)
            incarnations.add(worker.incarnation)
            assert await worker.begin_step() == 0
            await worker.disconnect()
        assert len(incarnations) == 3
        assert len(await past(client, WorkerJoined)) == 3

    async def test_an_id_that_is_alive_is_refused_and_leaves_nothing_behind(
        self, runner: DaemonRunner, client: ForgedClient
    ) -> None:
        async with shared_worker("me", config(), job=JOB) as first:
            await first.connect(runner.endpoint)
            second = shared_worker("me", config(), job=JOB)
            with pytest.raises(RequestRefused) as raised:
                await second.connect(runner.endpoint)
            assert raised.value.code == "worker_exists"
            assert not second.is_connected
            assert [view.id for view in await client.workers(JOB)] == ["me"]

    async def test_state_that_cannot_be_transferred_is_refused_before_the_worker_joins(
        self, runner: DaemonRunner, client: ForgedClient
    ) -> None:
        worker = shared_worker("me", config(), job=JOB, state={"w": object()})
        with pytest.raises(RequestRefused) as raised:
            await worker.connect(runner.endpoint)
        assert raised.value.code == "state_unfit"
        assert await past(client, WorkerJoined) == []

    async def test_a_cluster_that_is_not_there_is_unavailable(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            sessions, "ForgedClient", lambda *where, **options: ForgedClient(*where, connect_timeout_s=0.05, **options)
        )
        worker = shared_worker("me", config(), job=JOB)
        with pytest.raises(Unavailable):
            await worker.connect(f"unix://{tmp_path}/nobody")
        assert not worker.is_connected

    async def test_when_its_daemon_is_away_it_does_not_wait_long_between_two_knocks(
        self, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given: dict[str, Any] = {}

        def reach(*where: str, **options: Any) -> ForgedClient:
            given.update(options)
            return ForgedClient(*where, **options)

        monkeypatch.setattr(sessions, "ForgedClient", reach)
        async with shared_worker("me", config(), job=JOB) as worker:
            await worker.connect(runner.endpoint)
        assert given["reconnect"].delay_max_s <= 0.5

    async def test_the_job_settings_are_those_of_the_job(self, runner: DaemonRunner, group: TrainerGroup) -> None:
        group.start("a")
        await group.world_of("a")
        async with shared_worker("b", None, job=JOB) as worker:
            await worker.connect(runner.endpoint)
            assert worker._connected.state.config == group.config

    async def test_a_script_that_fails_says_so(self, runner: DaemonRunner, client: ForgedClient) -> None:
        async def script() -> None:
            async with shared_worker("me", config(), job=JOB) as worker:
                await worker.connect(runner.endpoint)
                raise ValueError("a mistake")

        with pytest.raises(ValueError, match="a mistake"):
            await script()
        assert [fact.reason for fact in await past(client, WorkerFailed)] == [
            "its script failed: ValueError: a mistake"
        ]

    async def test_a_script_that_is_cancelled_says_so(self, runner: DaemonRunner, client: ForgedClient) -> None:
        connected = asyncio.Event()

        async def script() -> None:
            async with shared_worker("me", config(), job=JOB) as worker:
                await worker.connect(runner.endpoint)
                connected.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(script())
        await connected.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [fact.reason for fact in await past(client, WorkerLeft)] == ["its script was interrupted"]

    async def test_a_script_that_breaks_out_of_its_loop_says_so(
        self, runner: DaemonRunner, client: ForgedClient
    ) -> None:
        async with shared_worker("me", config(), job=JOB) as worker:
            await worker.connect(runner.endpoint)
            async for step in worker.steps():
                if step == 2:
                    break
        assert [fact.reason for fact in await past(client, WorkerLeft)] == ["its script left the step loop"]

    async def test_script_of_an_aborted_job_leaves_for_that_reason_despite_its_own_error(
        self, runner: DaemonRunner, client: ForgedClient
    ) -> None:
        async def script() -> None:
            async with shared_worker("me", config(), job=JOB) as worker:
                await worker.connect(runner.endpoint)
                try:
                    async for step in worker.steps():
                        if step == 2:
                            await client.abort_job(JOB, "enough of it")
                except JobEnded as error:
                    raise RuntimeError("nothing comes of it") from error

        with pytest.raises(RuntimeError):
            await script()
        assert [fact.reason for fact in await past(client, WorkerLeft)] == ["the job was aborted"]
        assert await past(client, WorkerFailed) == []


class TestTraining:
    async def test_step_tells_after_its_block_that_it_was_aborted(self, runner: DaemonRunner) -> None:
        done: list[int] = []
        aborted: list[int] = []
        async with shared_worker("me", config(), job=JOB) as worker:
            await worker.connect(runner.endpoint)
            async for step in worker.steps(3):
                with step:
                    if step == 1 and not aborted:
                        assert worker._state.current_world.world is not None
                        worker._state.current_world.world.abort("a member is gone")
                    await worker.barrier()
                    done.append(int(step))
                if step.aborted:
                    aborted.append(int(step))
        assert (done, aborted) == ([0, 1, 2], [1])

    async def test_one_trains_alone(self, group: TrainerGroup, client: ForgedClient) -> None:
        group.start("a")
        await group.world_of("a")
        await group.finish("a")
        assert [fact.step for fact in await past(client, JobCompleted)] == [group.total]

    async def test_joiners_take_step_rate_and_state_from_the_first_worker(self, group: TrainerGroup) -> None:
        group.make("a", learning_rate=0.25, global_batch_size=64)
        group["a"].state["ballast"][:] = 7.0
        group.start("a")
        await group.world_of("a", steps=5)
        group.start("b")
        await group.world_of("a", "b")
        b = group["b"]
        assert b.committed_steps[0].step >= 5
        assert (b.worker.learning_rate, b.worker.global_batch_size) == (0.25, 64)
        assert (b.state["ballast"] == 7.0).all()
        group.start("c", "d")
        await group.world_of("a", "b", "c", "d")
        await group.finish("a", "b", "c", "d")

    async def test_no_step_is_repeated_when_a_worker_joins(self, group: TrainerGroup) -> None:
        """All stop after the same step: each step that a worker finishes is committed."""
        repeated: list[int] = []
        end_step = CurrentWorld.end_step

        async def note(current_world: CurrentWorld, step: int) -> bool:
            if not (committed := await end_step(current_world, step)):
                repeated.append(step)
            return committed

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CurrentWorld, "end_step", note)
            group.start("a", "b")
            await group.world_of("a", "b")
            for name in ("c", "d"):
                group.start(name)
                await group.world_of(*group.trainers)
            assert repeated == []
        await group.finish(*group.trainers)

    async def test_events_tell_of_every_world_with_the_rank_in_it(self, group: TrainerGroup) -> None:
        synchronised: list[GlobalTrainingState] = []
        group.make("a")[0].worker.state_synchronized.subscribe(synchronised.append)
        group.start("a")
        await group.world_of("a")
        group.start("b")
        await group.world_of("a", "b")
        first, second = group["a"].rescales
        assert (first.type, first.new_topology.world_size, first.old_topology.world_size) == ("scale_up", 1, 0)
        assert [worker.id for worker in second.added_workers] == ["b"]
        assert second.old_topology == first.new_topology
        assert second.trigger_reason == "b joined"
        (joined,) = group["b"].rescales
        assert joined.new_topology == second.new_topology
        assert joined.old_topology == first.new_topology
        assert [state.active_worker_count for state in synchronised] == [1, 2]
        assert synchronised[1].current_step >= 2

    async def test_rescale_calls_the_methods_that_a_subclass_overrides(self, runner: DaemonRunner) -> None:
        called: list[object] = []

        class Recording(ElasticWorker):
            async def on_rescaling_event(self, event: RescalingEvent) -> None:
                called.append(("event", event.new_topology.world_size))
                await super().on_rescaling_event(event)

            async def update_topology(self, topology: ClusterTopology) -> None:
                called.append(("topology", topology.world_size))
                await super().update_topology(topology)

            async def synchronize_state(self, state: GlobalTrainingState) -> None:
                called.append(("state", state.active_worker_count))
                await super().synchronize_state(state)

            async def resume_training(self) -> None:
                await super().resume_training()
                called.append(self.get_metadata().status)

        worker = Recording("me", config(), job=JOB, process=SharedProcess())
        async with worker.session(runner.endpoint):
            assert [int(step) async for step in worker.steps(2)] == [0, 1]
        world = [("event", 1), ("topology", 1), ("state", 1)]
        assert called == [*world, WorkerStatus.ACTIVE, WorkerStatus.ACTIVE]

    async def test_rank_and_size_are_those_of_the_world_that_was_entered(self, group: TrainerGroup) -> None:
        group.start("a")
        await group.world_of("a")
        group.start("b", "c")
        await group.world_of("a", "b", "c")
        for trainer in group.trainers.values():
            topology = trainer.worker.current_topology
            assert topology is not None
            assert topology.workers[trainer.worker.rank] == trainer.worker.worker_id
            state = trainer.worker.current_state
            assert state is not None
            assert (state.active_worker_count, trainer.worker.get_metadata().status) == (3, WorkerStatus.ACTIVE)

    async def test_it_says_that_it_rescales_until_it_is_in_the_new_world(self, group: TrainerGroup) -> None:
        group.start("a")
        await group.world_of("a")
        assert not group["a"].worker.is_rescaling
        seen: list[bool] = []
        leave = CurrentWorld.leave

        async def look(current_world: CurrentWorld) -> None:
            (worker,) = (
                one.worker for one in group.trainers.values() if one.worker._state.current_world is current_world
            )
            seen.append(worker.is_rescaling)
            await leave(current_world)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CurrentWorld, "leave", look)
            group.start("b")
            await group.world_of("a", "b")
        assert len(seen) >= 2
        assert all(seen)
        assert not any(trainer.worker.is_rescaling for trainer in group.trainers.values())
        await group.finish("a", "b")

    async def test_a_script_begins_where_it_says(self, group: TrainerGroup) -> None:
        trainer = group.make("a")[0]
        trainer.worker.update_training_state(3, 40, 0.5)
        trainer.state["chain"][0] = chain_after(40)
        group.start("a")
        group.start("b")
        await group.world_of("a", "b")
        assert group["b"].worker.epoch == 3
        assert group["b"].committed_steps[0].step >= 40
        await group.finish("a", "b")

    async def test_the_world_counts_its_steps_and_the_script_its_epochs(self, group: TrainerGroup) -> None:
        group.start("a")
        await group.world_of("a")
        worker = group["a"].worker
        with pytest.raises(RequestRefused) as raised:
            worker.update_training_state(1, worker.step + 5, 0.5)
        assert raised.value.code == "step_counted"
        worker.update_training_state(1, worker.step, 0.5)
        group.start("b")
        await group.world_of("a", "b")
        assert (group["b"].worker.epoch, group["b"].worker.learning_rate) == (1, 0.5)

    @pytest.mark.parametrize("synchronous", [False, True])
    async def test_the_rate_and_the_batch_follow_the_world_where_they_shall(
        self, synchronous: bool, runner: DaemonRunner
    ) -> None:
        settings = {"use_synchronous_rescaling": synchronous, "scale_batch_with_world": True}
        async with group_at(runner.endpoint, **settings) as group:
            group.make("a", learning_rate=0.1, global_batch_size=32)
            group.start("a")
            await group.world_of("a")
            group.start("b")
            await group.world_of("a", "b")
            for name in ("a", "b"):
                worker = group[name].worker
                assert worker.learning_rate == pytest.approx(0.2)
                assert worker.global_batch_size == 64

    @pytest.mark.parametrize("synchronous", [False, True])
    async def test_subscriber_of_a_rescale_sees_the_new_rate_and_batch(
        self, synchronous: bool, runner: DaemonRunner
    ) -> None:
        settings = {"use_synchronous_rescaling": synchronous, "scale_batch_with_world": True}
        async with group_at(runner.endpoint, **settings) as group:
            heard: dict[str, list[tuple[int, float, int, int]]] = {"a": [], "b": []}

            def note(name: str, event: RescalingEvent) -> None:
                worker = group[name].worker
                paces = worker.learning_rate, worker.global_batch_size
                heard[name].append((event.new_topology.world_size, *paces, worker.epoch))

            for trainer in group.make("a", "b", learning_rate=0.1, global_batch_size=32):
                trainer.worker.rescaling_requested.subscribe(partial(note, trainer.name))
            group["a"].worker.update_training_state(3, 0, 0.1)
            group.start("a")
            await group.world_of("a")
            group.start("b")
            await group.world_of("a", "b")
            assert heard == {"a": [(1, 0.1, 32, 3), (2, 0.2, 64, 3)], "b": [(2, 0.2, 64, 3)]}

    @pytest.mark.parametrize("synchronous", [False, True])
    async def test_a_rate_that_the_script_has_changed_is_that_of_the_next_world(
        self, synchronous: bool, runner: DaemonRunner
    ) -> None:
        settings = {"use_synchronous_rescaling": synchronous, "base_learning_rate": 0.5}
        async with group_at(runner.endpoint, **settings) as group:
            group.make("a", learning_rate=0.25)
            group.start("a")
            await group.world_of("a")
            worker = group["a"].worker
            worker.update_training_state(1, worker.step, 0.125)
            group.start("b")
            await group.world_of("a", "b")
            assert [group[name].worker.learning_rate for name in ("a", "b")] == [0.125, 0.125]
            assert [group[name].worker.epoch for name in ("a", "b")] == [1, 1]

    async def test_collectives_are_those_of_the_world(self, group: TrainerGroup) -> None:
        group.start("a", "b")
        await group.world_of("a", "b")
        found: dict[str, list[Any]] = {}
        # No worker is more than one step ahead of another.
        begins_at = group["a"].worker.step + 2

        async def all_of_them(worker: ElasticWorker) -> None:
            await worker.barrier()
            gathered = await worker.gather(worker.rank)
            largest = await worker.all_reduce(worker.rank, "max")
            found[worker.worker_id.id] = [worker.rank, gathered, await worker.broadcast(worker.rank + 5, 1), largest]

        def at_that_step(worker: ElasticWorker) -> Callable[[int], Awaitable[None]]:
            async def do(step: int) -> None:
                if step == begins_at:
                    await all_of_them(worker)

            return do

        for trainer in group.trainers.values():
            trainer.before_step = at_that_step(trainer.worker)
        await group.until(lambda: len(found) == 2)
        assert sorted(found.values(), key=lambda one: int(one[0])) == [[0, [0, 1], 6, 1], [1, None, 6, 1]]
        await group.finish("a", "b")

    async def test_different_collectives_raise_mismatch_on_all_ranks(self, group: TrainerGroup) -> None:
        group.start("a", "b")
        await group.world_of("a", "b")

        async def something_else(step: int) -> None:
            await group["b"].worker.broadcast(1)

        group["b"].before_step = something_else
        outcomes = await group.over("a", "b")
        assert all(isinstance(error, CollectiveMismatch) for error in outcomes), outcomes

    async def test_step_that_the_script_voids_is_repeated(self, runner: DaemonRunner, group: TrainerGroup) -> None:
        numbers: list[int] = []
        async with shared_worker("me", group.config, job=JOB) as worker:
            await worker.connect(runner.endpoint)
            async for step in worker.steps(5):
                with step:
                    numbers.append(int(step))
                    await worker.all_reduce(1)
                    if len(numbers) == 2:
                        raise StepAborted("the samples were damaged")
        assert numbers == [0, 1, 1, 2, 3, 4]


class TestWaiting:
    async def test_absent_daemon_is_logged_with_endpoint_error_and_limit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sessions, "ABSENCE_LOGGED_AFTER_S", 0.01)
        log, endpoint = RecordingLog(), f"unix://{tmp_path}/none"

        async def connect() -> None:
            await shared_worker("a", log=log).connect(endpoint)

        connecting = asyncio.create_task(connect())
        async with asyncio.timeout(PATIENCE_S):
            while not log.of("no connection to a daemon yet"):
                await asyncio.sleep(0.01)
        connecting.cancel()
        await asyncio.wait([connecting])
        (said,) = log.of("no connection to a daemon yet")
        assert (said["endpoints"], said["gives_up_in_s"]) == (endpoint, 9.99)
        assert said["reason"] in (f"cannot connect to {endpoint}: No such file or directory", "no answer")
        assert said["fix"].startswith("start one with `forged run`")
        assert log.levels("no connection to a daemon yet") == {"warning"}

    async def test_waiting_worker_logs_the_reason(self, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(registrations, "LOGGED_AFTER_S", 0.01)
        log = RecordingLog()
        async with group_at(runner.endpoint, min_workers=2) as group:
            group.start("a", log=log)
            async with asyncio.timeout(PATIENCE_S):
                while not log.of("this worker is waiting"):
                    await asyncio.sleep(0.01)
            group.start("b")
            await group.world_of("a", "b")
            told = len(log.of("this worker is waiting"))
            await group.more_steps("a", "b")
            await group.finish("a", "b")
        assert log.of("this worker is waiting")[0]["reason"].startswith(
            "1 worker waits for 1 more to join: min_workers is 2"
        )
        assert len(log.of("this worker is waiting")) == told


class TestLeaving:
    async def test_it_waits_for_asynchronous_subscribers_before_it_goes(
        self, runner: DaemonRunner, client: ForgedClient
    ) -> None:
        left: list[Any] = []

        async def save(reason: str) -> None:
            await worker.barrier()
            left.append(await past(client, WorkerLeft))

        async with shared_worker("me", config(), job=JOB) as worker:
            worker.leaving.subscribe(save)
            await worker.connect(runner.endpoint)
            async for step in worker.steps():
                if step == 2:
                    worker.drain("it is enough")
        assert left == [[]]
        assert [fact.reason for fact in await past(client, WorkerLeft)] == ["it is enough"]

    async def test_other_workers_train_in_another_world_while_one_saves(
        self, group: TrainerGroup, client: ForgedClient
    ) -> None:
        group.start("a", "b", "c")
        await group.world_of("a", "b", "c")
        saves, saved = asyncio.Event(), asyncio.Event()

        async def save(reason: str) -> None:
            saves.set()
            await saved.wait()

        group["b"].worker.leaving.subscribe(save)
        group["b"].worker.drain("the night")
        await saves.wait()
        await client.evict_worker(JOB, "c", "it is slow")
        assert isinstance((await group.over("c"))[0], WorkerEvicted)
        await group.world_of("a")
        assert await past(client, WorkerLeft) == []
        saved.set()
        assert await group.over("b") == [None]
        await group.finish("a")

    @pytest.mark.parametrize("is_needed", [False, True])
    async def test_leaving_subscriber_runs_again_after_a_cancelled_save(
        self, is_needed: bool, group: TrainerGroup
    ) -> None:
        (a,) = group.make("a")
        saves, saved = asyncio.Event(), list[str]()

        async def save(reason: str) -> None:
            if not saves.is_set():
                saves.set()
                await asyncio.Event().wait()
            saved.append(reason)

        a.worker.leaving.subscribe(save)
        async with a.worker.session(*group.endpoints):
            assert await a.worker.begin_step() == 0
            a.worker.drain("the night")
            a.state["chain"][0] = chain_after(1)
            await a.worker.finish_step()
            await until(lambda: a.member.state.is_leave_due)
            interrupted = asyncio.create_task(a.worker.begin_step())
            await saves.wait()
            interrupted.cancel()
            await asyncio.wait([interrupted])
            if is_needed:
                group.start("b")
                await until(lambda: not a.member.state.is_leave_due)
            assert await a.worker.begin_step() is None
        assert saved == ["the night"]
        if is_needed:
            await group.world_of("b")
            assert group["b"].committed_steps[0].step == 1

    async def test_state_that_fails_to_pack_does_not_keep_the_script_from_saving(self, group: TrainerGroup) -> None:
        """Another comes for it meanwhile, and has it when it can be had again."""

        class Saved:
            is_locked = False
            chain = np.full(1, chain_after(1))

            def state_dict(self) -> dict[str, Any]:
                if self.is_locked:
                    asked.set()
                    raise ValueError("it is being saved")
                return {"chain": self.chain, "ballast": 0}

            def load_state_dict(self, state: Any) -> None:
                raise AssertionError("no worker is ahead")

        asked, state = asyncio.Event(), Saved()

        async def save(reason: str) -> None:
            state.is_locked = True
            group.start("b")
            await asked.wait()
            state.is_locked = False

        worker = shared_worker("a", config(), job=JOB, state=state)
        worker.leaving.subscribe(save)
        async with worker.session(*group.endpoints), asyncio.timeout(PATIENCE_S):
            assert await worker.begin_step() == 0
            await worker.finish_step()
            worker.drain("the night")
            await until(lambda: worker._connected.state.is_leave_due)
            assert await worker.begin_step() is None
        await group.world_of("b")
        assert group["b"].committed_steps[0].step == 1

    async def test_operator_drains_one_worker_and_the_world_trains_on(
        self, group: TrainerGroup, client: ForgedClient
    ) -> None:
        group.start("a", "b", "c")
        await group.world_of("a", "b", "c")
        why: list[str] = []
        group["a"].worker.leaving.subscribe(why.append)
        await client.drain_worker(JOB, "a", "its host is needed")
        assert await group.over("a") == [None]
        assert why == ["its host is needed"]
        await group.world_of("b", "c")
        assert [fact.reason for fact in await past(client, WorkerLeft)] == ["its host is needed"]
        assert await past(client, WorkerFailed) == []
        await group.finish("b", "c")

    async def test_draining_worker_in_a_stuck_collective_leaves_after_the_timeout(
        self, runner: DaemonRunner, client: ForgedClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("forged.worker.drain.LOOK_INTERVAL_S", 0.02)
        holds, goes_on = asyncio.Event(), asyncio.Event()

        async def hold(step: int) -> None:
            holds.set()
            await goes_on.wait()

        async with group_at(runner.endpoint, leave_timeout_ms=100) as group:
            group.start("a", "b")
            await group.world_of("a", "b")
            group["b"].before_exchange = hold
            await holds.wait()
            group["a"].worker.drain("the night")
            assert await group.over("a") == [None]
            goes_on.set()
            await group.world_of("b")
            await group.finish("b")
        (left,) = [fact for fact in await past(client, WorkerLeft) if fact.worker_id == "a"]
        assert left.reason.startswith("the night; ")
        assert await past(client, WorkerFailed) == []

    async def test_leaving_names_the_steps_applied_to_the_state_also_where_the_last_does_not_count(
        self, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("forged.worker.drain.LOOK_INTERVAL_S", 0.02)
        holds, goes_on = asyncio.Event(), asyncio.Event()
        told: list[tuple[int, int]] = []
        async with group_at(runner.endpoint, leave_timeout_ms=100) as group:
            a, b = group.start("a", "b")
            a.worker.leaving.subscribe(lambda _: told.append((a.worker.step, a.chain)))
            await group.world_of("a", "b")
            finish_step = b.worker.finish_step

            async def hold() -> bool:
                holds.set()
                await goes_on.wait()
                return await finish_step()

            monkeypatch.setattr(b.worker, "finish_step", hold)
            await holds.wait()
            a.worker.drain("the night")
            assert await group.over("a") == [None]
            goes_on.set()
            ((step, chain),) = told
            assert (step, chain) == (a.committed_steps[-1].step + 2, chain_after(step))
            assert a.worker.step == step, "behind the end, too"

    async def test_a_script_drains_itself(self, group: TrainerGroup) -> None:
        group.start("a", "b")
        await group.world_of("a", "b")
        group["b"].worker.drain("it has an appointment")
        assert await group.over("b") == [None]
        await group.world_of("a")
        await group.finish("a")

    async def test_one_that_waits_drains_too(self, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        async with group_at(runner.endpoint, min_workers=2) as group:
            waits = asyncio.Event()
            advance = Rescaler.advance

            async def come(rescaler: Rescaler) -> None:
                waits.set()
                await advance(rescaler)

            monkeypatch.setattr(Rescaler, "advance", come)
            group.start("a")
            await waits.wait()
            group["a"].worker.drain("no other worker joins")
            assert await group.over("a") == [None]

    async def test_the_last_one_with_the_state_gives_it_away_before_it_goes(
        self, group: TrainerGroup, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        group.start("a")
        await group.world_of("a", steps=5)
        fetch = StateExchange.fetch

        async def drain_first(exchange: StateExchange, *arguments: Any) -> None:
            group["a"].worker.drain("in the middle of it")
            await fetch(exchange, *arguments)

        monkeypatch.setattr(StateExchange, "fetch", drain_first)
        group.start("b")
        assert await group.over("a") == [None]
        await group.world_of("b")
        assert group["b"].committed_steps[0].step >= 5
        await group.finish("b")

    @pytest.mark.parametrize("synchronous", [True, False])
    async def test_only_state_holder_gives_its_state_to_a_waiting_joiner_before_it_leaves(
        self, synchronous: bool, runner: DaemonRunner, client: ForgedClient
    ) -> None:
        settings = {"stability_window_ms": 600_000, "use_synchronous_rescaling": synchronous}
        async with group_at(runner.endpoint, **settings) as group, client.facts(WorkerJoined, jobs=[JOB]) as joined:
            group.start("a")
            await anext(joined)
            await client.rescale_job(JOB)
            await group.world_of("a", steps=5)
            group.start("b")
            await anext(joined)
            group["a"].worker.drain("its host is needed")
            assert await group.over("a") == [None]
            await group.world_of("b")
            assert group["b"].committed_steps[0].step >= 5
            await group.finish("b")

    @pytest.mark.parametrize(("synchronous", "moment"), [(True, "_report"), (False, "_cross")])
    async def test_only_state_holder_gives_its_state_to_a_joiner_of_a_running_attempt_before_it_leaves(
        self, synchronous: bool, moment: str, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with group_at(runner.endpoint, use_synchronous_rescaling=synchronous) as group:
            group.start("a")
            await group.world_of("a", steps=5)
            worker = group["a"].worker
            rescaler = group["a"].member.rescaler
            go_on = getattr(rescaler, moment)

            async def drain_first(*arguments: Any) -> None:
                worker.drain("in the middle of it")
                await go_on(*arguments)

            monkeypatch.setattr(rescaler, moment, drain_first)
            group.start("b")
            assert await group.over("a") == [None]
            await group.world_of("b")
            assert group["b"].committed_steps[0].step >= 5
            await group.finish("b")

    async def test_worker_drained_while_it_connects_leaves_once_it_is_registered(
        self, runner: DaemonRunner, client: ForgedClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        worker = shared_worker("me", config(), job=JOB)
        open_mesh = Mesh.open

        @asynccontextmanager
        async def drain_first(mesh: Mesh, *address: Any) -> AsyncIterator[Address]:
            worker.drain("its host is needed")
            async with open_mesh(mesh, *address) as opened:
                yield opened

        monkeypatch.setattr(Mesh, "open", drain_first)
        async with worker.session(runner.endpoint):
            async for step in worker.steps(100):
                assert step < 99, "it has not drained"
        assert [fact.reason for fact in await past(client, WorkerLeft)] == ["its host is needed"]

    async def test_worker_drained_while_its_session_ends_ends(
        self, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        worker = shared_worker("me", config(), job=JOB)
        open_mesh = Mesh.open

        @asynccontextmanager
        async def drain_at_the_end(mesh: Mesh, *address: Any) -> AsyncIterator[Address]:
            async with open_mesh(mesh, *address) as opened:
                yield opened
                worker.drain("SIGTERM")

        monkeypatch.setattr(Mesh, "open", drain_at_the_end)
        async with worker.session(runner.endpoint):
            await worker.register()

    async def test_evicted_worker_raises_and_the_world_trains_on(
        self, group: TrainerGroup, client: ForgedClient
    ) -> None:
        group.start("a", "b", "c")
        await group.world_of("a", "b", "c")
        await client.evict_worker(JOB, "a", "it is slow")
        (error,) = await group.over("a")
        assert isinstance(error, WorkerEvicted)
        assert "it is slow" in error.message
        await group.world_of("b", "c")
        await group.finish("b", "c")

    async def test_worker_that_reaches_the_total_completes_the_job_for_all(
        self, group: TrainerGroup, client: ForgedClient
    ) -> None:
        group.start("a", "b", "c")
        await group.world_of("a", "b", "c")
        await group.finish("a", "b", "c")
        (completed,) = await past(client, JobCompleted)
        assert completed.step == group.total
        late = shared_worker("late", config(), job=JOB)
        with pytest.raises(RequestRefused) as raised:
            await late.connect(*group.endpoints)
        assert raised.value.code == "job_over"

    async def test_worker_that_was_never_taken_in_learns_that_the_job_is_complete(self, runner: DaemonRunner) -> None:
        async with group_at(runner.endpoint, max_workers=1) as group:
            group.start("a")
            await group.world_of("a")
            group.start("b")
            await group.until(lambda: group["b"].worker.is_registered)
            group.total = group["a"].worker.step + 3
            of_a, of_b = await group.over("a", "b")
            assert of_a is None
            assert isinstance(of_b, JobEnded)
            assert of_b.code == "job_completed"
            assert group["b"].committed_steps == []

    async def test_state_source_trains_on_after_a_gap_in_the_facts(
        self, group: TrainerGroup, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held, go = asyncio.Event(), asyncio.Event()
        group.start("a")
        await group.world_of("a")
        fetch = StateExchange.fetch

        async def slowly(exchange: StateExchange, source: WorkerId, attempt: int) -> None:
            held.set()
            await go.wait()
            await fetch(exchange, source, attempt)

        monkeypatch.setattr(StateExchange, "fetch", slowly)
        group.start("b")
        await held.wait()
        a = group["a"].member
        heard_at = a.state.view.newest_fact_id
        a.listener.hear(Gap(heard_at + 1, heard_at + 2, "the journal has moved on"))
        go.set()
        await group.world_of("a", "b")
        await group.finish("a", "b")

    async def test_that_the_training_is_done_is_said_for_as_long_as_the_daemon_waits(
        self, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where other leave reports are given up at once."""
        tried = 0
        send = Registration.send

        async def later(line: Registration, request: Any) -> Any:
            nonlocal tried
            if isinstance(request, LeaveJob):
                tried += 1
                if tried == 1:
                    await asyncio.Event().wait()
            return await send(line, request)

        monkeypatch.setattr(Registration, "send", later)
        monkeypatch.setattr(registrations, "LEAVE_TIMEOUT_S", 0.01)
        monkeypatch.setattr("forged.worker.session.LEAVE_TIMEOUT_S", 0.01)
        async with group_at(runner.endpoint) as group:
            group.total = 3
            group.start("a")
            assert await group.over("a") == [None]
        assert tried == 2
        async with ForgedClient(runner.endpoint, reconnect=SOON) as client:
            assert [fact.step for fact in await past(client, JobCompleted)] == [3]

    async def test_a_plan_of_the_scripts_own_brings_its_shards_from_worker_to_worker(
        self, runner: DaemonRunner
    ) -> None:
        stores = [MemoryShardStore(), MemoryShardStore()]
        for shard in range(4):
            stores[1].put(shard, [b"%d" % shard * 100])
        a, b = (
            shared_worker(name, config(), job=JOB, data=TrainingData(8, 4, store))
            for name, store in zip("ab", stores, strict=True)
        )
        await a.connect(runner.endpoint)
        await b.connect(runner.endpoint)
        plan = DataRedistributor(config()).calculate_plan(
            ClusterTopology((b.worker_id,)),
            ClusterTopology((a.worker_id,)),
            8,
            shards=4,
            draining=[b.worker_id],
        )
        report = await a.redistribute_data(plan)
        assert report.is_complete
        assert {one.source for one in report.moved} == {b.worker_id}
        assert stores[0].held() == stores[1].held()
        await b.disconnect()
        await a.disconnect()

    async def test_its_transfers_bring_a_shard_from_another_worker(self, runner: DaemonRunner) -> None:
        stores = [MemoryShardStore(), MemoryShardStore()]
        stores[1].put(2, [b"2" * 100])
        a, b = (
            ElasticWorker(name, config(), job=JOB, data=TrainingData(8, 4, store))
            for name, store in zip("ab", stores, strict=True)
        )
        await a.connect(runner.endpoint)
        await b.connect(runner.endpoint)
        moved = await a.transfers.transfer_data_shards(b.worker_id, a.worker_id, Dataset(8, 4).shard(2))
        assert moved is not None
        assert (moved.shard_id, moved.source) == (2, b.worker_id)
        assert stores[0].held() == stores[1].held()
        await b.disconnect()
        await a.disconnect()

    async def test_worker_without_data_redistributes_none(self) -> None:
        plan = DataRedistributor(config()).calculate_plan(ClusterTopology(), TOPOLOGY, 8, shards=4)
        with pytest.raises(RequestRefused) as raised:
            await ElasticWorker("me").redistribute_data(plan)
        assert raised.value.code == "data_missing"

    async def test_plan_without_transfers_to_a_worker_is_done_at_once(self) -> None:
        others = DataRedistributor(config()).calculate_plan(ClusterTopology(), TOPOLOGY, 8, shards=4)
        for plan in (DataRedistributionPlan(), others):
            assert await ElasticWorker("c").redistribute_data(plan) == TransferReport()

    async def test_a_script_that_fails_is_gone_at_once(self, group: TrainerGroup, client: ForgedClient) -> None:
        group.start("a", "b")
        await group.world_of("a", "b")

        async def fail(step: int) -> None:
            await group["b"].worker.leave("its script failed", failed=True)
            raise ValueError("a mistake")

        group["b"].before_step = fail
        (error,) = await group.over("b")
        assert isinstance(error, ValueError)
        await group.world_of("a")
        assert [(fact.worker_id, fact.rank) for fact in await past(client, WorkerFailed)] == [("b", 1)]


class TestWishesOfOperators:
    async def test_a_pause_lasts_until_it_is_over(self, group: TrainerGroup, client: ForgedClient) -> None:
        group.start("a", "b")
        await group.world_of("a", "b")
        await client.pause_job(JOB)
        await group.until(
            lambda: all(trainer.worker._state.current_world.is_stopped for trainer in group.trainers.values())
        )
        steps = [trainer.worker.step for trainer in group.trainers.values()]
        assert steps[0] == steps[1]
        await client.resume_job(JOB)
        await group.more_steps("a", "b")
        await group.finish("a", "b")

    async def test_a_rescale_within_a_pause_is_done_and_the_pause_goes_on(
        self, group: TrainerGroup, client: ForgedClient
    ) -> None:
        group.start("a", "b")
        await group.world_of("a", "b")
        await client.pause_job(JOB)
        await group.until(
            lambda: all(trainer.worker._state.current_world.is_stopped for trainer in group.trainers.values())
        )
        step = group["a"].worker.step
        entered = asyncio.Event()
        (late,) = group.make("c")
        late.worker.state_synchronized.subscribe(lambda _: entered.set())
        group.start("c")
        await entered.wait()
        assert late.worker.world_size == 3
        assert late.worker._state.current_world.is_stopped
        await client.resume_job(JOB)
        await group.world_of("a", "b", "c")
        assert late.committed_steps[0].step == step
        await group.finish("a", "b", "c")

    async def test_a_pause_that_is_over_while_a_rescale_is_wanted_does_not_call_it_off(
        self, group: TrainerGroup, client: ForgedClient
    ) -> None:
        """All is heard within one step."""
        group.start("a")
        await group.world_of("a")
        heard, go_on = asyncio.Event(), asyncio.Event()

        async def hold(step: int) -> None:
            heard.set()
            await go_on.wait()

        group["a"].before_step = hold
        await heard.wait()
        await client.pause_job(JOB)
        async with client.facts(RescaleStarted) as facts:
            group.start("b")
            await anext(facts)
        await client.resume_job(JOB)
        async with asyncio.timeout(PATIENCE_S):
            while group["a"].worker._state.view.paused or not group["a"].worker._state.view.attempt:
                await asyncio.sleep(0.001)
        group["a"].before_step = None
        go_on.set()
        await group.world_of("a", "b")

    async def test_a_job_that_is_aborted_ends_for_all(self, group: TrainerGroup, client: ForgedClient) -> None:
        group.start("a", "b")
        await group.world_of("a", "b")
        await client.abort_job(JOB, "a mistake in the data")
        for error in await group.over("a", "b"):
            assert isinstance(error, JobEnded)
            assert "a mistake in the data" in error.message

    async def test_a_job_that_is_removed_ends_for_all(self, group: TrainerGroup, client: ForgedClient) -> None:
        group.start("a", "b")
        await group.world_of("a", "b")
        await client.remove_job(JOB, force=True)
        for error in await group.over("a", "b"):
            assert isinstance(error, RequestRefused)
            assert error.code in ("job_removed", "job_unknown")

    async def test_a_rescale_for_no_reason_changes_nothing(self, group: TrainerGroup, client: ForgedClient) -> None:
        group.start("a", "b")
        await group.world_of("a", "b")
        async with group.rescaled("a", "b"):
            await client.rescale_job(JOB)
        await group.finish("a", "b")

    async def test_two_hundred_rescales_leave_nothing_behind(self, group: TrainerGroup, client: ForgedClient) -> None:
        group.start("a", "b")
        await group.world_of("a", "b")

        async def rescale(times: int) -> tuple[int, int]:
            for _ in range(times):
                async with group.rescaled("a", "b"):
                    await client.rescale_job(JOB)
            await group.more_steps("a", "b")
            gc.collect()
            return len(asyncio.all_tasks()), sum(
                len(trainer.worker.descriptors()) for trainer in group.trainers.values()
            )

        before = await rescale(20)
        assert await rescale(180) == before
        await group.finish("a", "b")


class TestWhoTakesPart:
    async def test_fetchers_beyond_the_limit_wait_for_a_turn(self, runner: DaemonRunner) -> None:
        async with group_at(runner.endpoint, max_workers=2) as group:
            group.start("a", "b")
            await group.world_of("a", "b")
            group.start("c")
            await group.until(lambda: group["c"].worker.is_registered)
            await group.more_steps("a", "b")
            assert group["c"].worker.rank == -1
            group["a"].worker.drain("make room")
            await group.world_of("b", "c")
            await group.finish("b", "c")

    async def test_worker_waits_while_there_are_fewer_than_min_workers(
        self, runner: DaemonRunner, client: ForgedClient
    ) -> None:
        async with group_at(runner.endpoint, min_workers=2) as group:
            group.start("a")
            group.start("b")
            await group.world_of("a", "b")
            async with client.facts(JobWaiting) as facts:
                group["a"].worker.drain("it goes")
                await anext(facts)
            step = group["b"].worker.step
            group.start("c")
            await group.world_of("b", "c")
            assert group["c"].committed_steps[0].step in (step, step + 1)
            await group.finish("b", "c")

    async def test_many_at_once_are_one_world_soon(self, runner: DaemonRunner) -> None:
        names = [f"w{number}" for number in range(12)]
        async with group_at(runner.endpoint, min_workers=12) as group:
            group.start(*names)
            await group.world_of(*names)
            assert {trainer.worker.generation for trainer in group.trainers.values()} == {1}
            await group.finish(*names)


class TestADaemonThatIsAway:
    async def test_training_goes_on_and_nothing_is_rescaled(self, runner: DaemonRunner, group: TrainerGroup) -> None:
        group.start("a", "b")
        await group.world_of("a", "b")
        generation = group["a"].worker.generation
        await runner.close()
        await group.more_steps("a", "b", steps=20)
        await runner.open()
        async with ForgedClient(runner.endpoint, reconnect=SOON) as client:
            await all_connected(client, "a", "b")
            await group.more_steps("a", "b")
            assert group["a"].worker.generation == generation
            assert await past(client, WorkerFailed) == []
            group.start("c")
            await group.world_of("a", "b", "c")
        await group.finish("a", "b", "c")

    @pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
    @pytest.mark.parametrize("word", ["join", "stopped", "ready", "leave"])
    async def test_it_may_go_at_every_word_of_a_rescale(
        self, word: str, after: bool, runner: DaemonRunner, group: TrainerGroup, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        group.start("a", "b")
        await group.world_of("a", "b")
        said = getattr(Registration, word)
        absences: list[asyncio.Task[Any]] = []

        async def be_away() -> None:
            # The worker may lose its interest in the word meanwhile.
            absences.append(asyncio.create_task(runner.reopen()))
            await asyncio.shield(absences[0])

        async def go_at_it(line: Registration, *arguments: Any, **options: Any) -> Any:
            if not (absences or after):
                await be_away()
            outcome = await said(line, *arguments, **options)
            if not absences:
                await be_away()
            return outcome

        monkeypatch.setattr(Registration, word, go_at_it)
        if word == "leave":
            group["b"].worker.drain("it has to")
            await group.over("b")
            await group.world_of("a")
            await group.finish("a")
        else:
            group.start("c")
            await group.world_of("a", "b", "c")
            await group.finish("a", "b", "c")
        await absences[0]

    async def test_disconnected_worker_learns_of_a_departure_when_it_is_back(
        self, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("forged.worker.registration.LEAVE_TIMEOUT_S", 0.05)
        async with group_at(runner.endpoint, reconnect_grace_ms=1_000) as group:
            group.start("a", "b", "c")
            await group.world_of("a", "b", "c")
            await runner.close()
            group["a"].worker.drain("without a word")
            assert await group.over("a") == [None]
            await runner.open()
            await group.world_of("b", "c")
            await group.finish("b", "c")


async def test_joiner_takes_the_survivors_learning_rate_of_zero(group: TrainerGroup) -> None:
    group.start("a", learning_rate=0.0, global_batch_size=8)
    await group.world_of("a")
    group.start("b", learning_rate=0.1, global_batch_size=16)
    await group.world_of("a", "b")
    workers = [group[name].worker for name in "ab"]
    assert [(worker.learning_rate, worker.global_batch_size) for worker in workers] == [(0.0, 8)] * 2
