"""What a worker says while it waits for a daemon to commit its next world, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import anyio
import pytest
from anyio.abc import TaskGroup

from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.messages import JobPaused, JobWaiting, RescaleStarted
from forged.elastic.model import ClusterTopology, RescaleType, Standstill, WorkerId, WorkerStatus
from forged.errors import RequestRefused
from forged.kernel.messages import Fact, Record
from forged.worker.collectives.world import World
from forged.worker.errors import CollectiveAborted
from forged.worker.events import RescaleHooks
from forged.worker.registration import Registration
from forged.worker.standstill import StandstillReporter
from forged.worker.worker_state.job_view import Commit
from forged.worker.worker_state.progress import TrainingProgress
from forged.worker.worker_state.session_state import SessionState
from tests.kernel_fixture import on_virtual_time, task_group
from tests.simulation.environment.loop import VirtualClock
from tests.telemetry.recording_log import RecordingLog
from tests.worker.trainers import shared_worker

ME, PEER, THIRD = WorkerId("me", "host", 1), WorkerId("peer", "host", 2), WorkerId("third", "host", 3)
GENERATION = 4
BEGINS = "training stands still until the daemon is back, and then continues; no committed step is lost"
ENDS = "the standstill is over"
LOST = CollectiveAborted("peer (rank 1) was lost", "peer")
STARTED = RescaleStarted(2, RescaleType.SCALE_UP, 3, ["new"], [], "new joined")


class EndlessWorld:
    """A world of this generation that has not ended."""

    generation = GENERATION
    ending = None

    def watch(self, on_over: object) -> None:
        return

    async def leave(self) -> None:
        return


class StandstillFixture:
    """A worker in a world, its connection, and what it has said."""

    def __init__(self, tasks: TaskGroup, *members: WorkerId) -> None:
        self.state = SessionState(ME, TrainingProgress(0.1, 0))
        self.state.follow_settings(ElasticTrainingConfig().to_settings())
        topology = self.state.view.topology = ClusterTopology(members, GENERATION)
        self.state.view.known = True
        self.state.current_world.take_rank(topology)
        self.state.current_world.enter(cast("World", EndlessWorld()))
        self.state.current_world.status = WorkerStatus.ACTIVE
        self.is_connected = True
        self.refusal: RequestRefused | None = None
        self.hook_error: Exception | None = None
        self.clock = VirtualClock(asyncio.get_running_loop())
        self.log = RecordingLog()
        self.told: list[Standstill] = []
        self.reports: list[tuple[int, str, float]] = []
        reporter = StandstillReporter(
            self.state, cast("Registration", self), cast("RescaleHooks", self), tasks, self.clock, self.log
        )
        tasks.start_soon(reporter.run)

    def on_standstill(self, standstill: Standstill) -> None:
        self.told.append(standstill)
        if self.hook_error is not None:
            raise self.hook_error

    async def report_standstill(self, generation: int, peer: str, for_s: float) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.reports.append((generation, peer, for_s))

    async def lose_daemon(self) -> None:
        await self._connection(is_there=False)

    async def regain_daemon(self) -> None:
        await self._connection(is_there=True)

    async def _connection(self, *, is_there: bool) -> None:
        self.is_connected = is_there
        self.state.wake()
        await settle()

    async def lose_world(self) -> None:
        self.state.current_world.lose(LOST)
        await settle()

    async def hear(self, fact: Fact) -> None:
        self.state.view.hear(Record.of(fact, fact_id=self.state.view.newest_fact_id + 1, at=0.0))
        self.state.wake()
        await settle()


async def settle() -> None:
    """Let all other tasks run; no time passes."""
    await anyio.wait_all_tasks_blocked()


@asynccontextmanager
async def worker(*members: WorkerId) -> AsyncIterator[StandstillFixture]:
    async with task_group() as tasks:
        fixture = StandstillFixture(tasks, *(members or (ME, PEER, THIRD)))
        await settle()
        yield fixture


@pytest.mark.parametrize("members", [(ME, PEER, THIRD), (PEER, ME)], ids=["several survivors", "last survivor"])
def test_broken_world_without_a_daemon_is_reported_at_once_and_once(members: tuple[WorkerId, ...]) -> None:
    @on_virtual_time
    async def story() -> None:
        async with worker(*members) as fixture:
            await fixture.lose_daemon()
            away_since = fixture.clock.wall()
            await anyio.sleep(5.0)
            began_at = fixture.clock.wall()
            await fixture.lose_world()
            assert fixture.clock.wall() == began_at
            standstill = Standstill(GENERATION, "peer", "peer (rank 1) was lost", began_at, away_since)
            assert fixture.told == [standstill]
            for _ in range(100):
                await anyio.sleep(1.0)
                fixture.state.wake()
            (said,) = fixture.log.of(BEGINS)
            assert fixture.log.levels(BEGINS) == {"warning"}
            assert said["lost_peer"] == "peer"
            assert said["reason"] == "peer (rank 1) was lost"
            assert said["daemon_away_since"].endswith("+00:00")
            assert fixture.told == [standstill]
            assert fixture.reports == []

    story()


@on_virtual_time
async def test_end_is_reported_with_its_duration_to_script_log_and_daemon() -> None:
    async with worker() as fixture:
        await fixture.lose_daemon()
        await anyio.sleep(1.0)
        await fixture.lose_world()
        await anyio.sleep(12.34)
        await fixture.regain_daemon()
        begin, end = fixture.told
        assert end.lasted_s is not None
        assert (begin.lasted_s, round(end.lasted_s, 6)) == (None, 12.34)
        assert fixture.log.of(ENDS) == [{"lasted_s": 12.3, "reason": "the daemon is back"}]
        assert fixture.log.levels(ENDS) == {"warning"}
        assert fixture.reports == [(GENERATION, "peer", end.lasted_s)]
        await anyio.sleep(60.0)
        assert len(fixture.told) == 2


@on_virtual_time
async def test_daemon_that_goes_away_after_the_world_has_broken_is_reported() -> None:
    async with worker() as fixture:
        await fixture.lose_world()
        # The daemon has taken the report.
        fixture.state.current_world.peer_report = None
        await anyio.sleep(3.0)
        assert fixture.told == []
        await fixture.lose_daemon()
        (standstill,) = fixture.told
        assert (standstill.peer, standstill.began_at) == ("peer", standstill.daemon_away_since)


@on_virtual_time
async def test_daemon_that_goes_away_within_a_rescale_is_reported_without_a_lost_peer() -> None:
    async with worker() as fixture:
        await fixture.hear(STARTED)
        await fixture.state.current_world.leave()
        await fixture.lose_daemon()
        assert [(one.peer, one.reason) for one in fixture.told] == [("", "the job is rescaling")]
        assert "lost_peer" not in fixture.log.of(BEGINS)[0]


@on_virtual_time
async def test_world_that_is_left_for_a_rescale_after_the_daemon_has_gone_is_reported() -> None:
    """A fact may be taken after the end of the connection that has brought it."""
    async with worker() as fixture:
        await fixture.lose_daemon()
        await fixture.hear(STARTED)
        assert fixture.told == []
        await fixture.state.current_world.leave()
        await settle()
        assert len(fixture.told) == 1


@on_virtual_time
async def test_peer_that_the_daemon_has_named_before_it_went_away_is_reported() -> None:
    async with worker() as fixture:
        fixture.state.view.lost = "peer"
        fixture.state.current_world.lose(CollectiveAborted("peer failed or left"))
        await fixture.lose_daemon()
        assert [one.peer for one in fixture.told] == ["peer"]


@on_virtual_time
async def test_world_that_trains_on_without_the_daemon_does_not_stand_still() -> None:
    async with worker() as fixture:
        await fixture.lose_daemon()
        await anyio.sleep(60.0)
        await fixture.regain_daemon()
        assert (fixture.told, fixture.log.lines, fixture.reports) == ([], [], [])


@on_virtual_time
async def test_broken_world_with_a_daemon_does_not_stand_still() -> None:
    async with worker() as fixture:
        await fixture.lose_world()
        await anyio.sleep(60.0)
        assert (fixture.told, fixture.log.lines) == ([], [])


@on_virtual_time
async def test_committed_world_is_entered_without_a_standstill_and_reported_if_that_fails() -> None:
    async with worker() as fixture:
        next_world = ClusterTopology((ME, THIRD), GENERATION + 1)
        view = fixture.state.view
        view.committed = Commit(2, view.topology, next_world, 7, 0, 0.1, 0, "peer failed")
        view.topology = next_world
        await fixture.lose_world()
        await fixture.lose_daemon()
        assert fixture.told == []
        fixture.state.current_world.fail_to_enter(GENERATION + 1, LOST, "")
        view.committed = None
        fixture.state.wake()
        await settle()
        assert [(one.generation, one.peer) for one in fixture.told] == [(GENERATION + 1, "peer")]


def _leave(state: SessionState) -> None:
    state.current_world.status = WorkerStatus.LEAVING


def _complete(state: SessionState) -> None:
    state.view.completed = 7


def _drain(state: SessionState) -> None:
    state.view.draining, state.drain.is_overdue = "the host is taken away", True


def _end(state: SessionState) -> None:
    state.view.end = RequestRefused("job_aborted", "the job was aborted")


def _exclude(state: SessionState) -> None:
    state.view.topology = ClusterTopology((THIRD,), GENERATION + 1)


def _pause(state: SessionState) -> None:
    state.view.hear(Record.of(JobPaused("lunch"), fact_id=1, at=0.0))


def _wait_for_workers(state: SessionState) -> None:
    state.view.hear(Record.of(JobWaiting(1, 2), fact_id=1, at=0.0))


OTHER_REASONS = [_leave, _complete, _drain, _end, _exclude, _pause, _wait_for_workers]


@pytest.mark.parametrize("why", OTHER_REASONS)
def test_worker_that_would_not_train_with_a_daemon_does_not_stand_still(why: Callable[[SessionState], None]) -> None:
    @on_virtual_time
    async def story() -> None:
        async with worker() as fixture:
            why(fixture.state)
            await fixture.lose_world()
            await fixture.lose_daemon()
            assert (fixture.told, fixture.log.lines) == ([], [])

    story()


@on_virtual_time
async def test_worker_that_stops_waiting_without_a_daemon_says_so() -> None:
    async with worker() as fixture:
        await fixture.lose_daemon()
        await fixture.lose_world()
        await anyio.sleep(2.0)
        _drain(fixture.state)
        fixture.state.wake()
        await settle()
        assert fixture.log.of(ENDS) == [{"lasted_s": 2.0, "reason": "this worker no longer waits for it"}]


@on_virtual_time
async def test_rescale_that_starts_ends_the_wait_for_workers() -> None:
    async with worker() as fixture:
        await fixture.lose_world()
        await fixture.hear(JobWaiting(1, 2))
        await fixture.hear(STARTED)
        await fixture.lose_daemon()
        assert len(fixture.told) == 1


@on_virtual_time
async def test_second_absence_of_the_daemon_is_a_standstill_of_its_own() -> None:
    async with worker() as fixture:
        await fixture.lose_world()
        for seconds in (3.0, 5.0):
            await fixture.lose_daemon()
            await anyio.sleep(seconds)
            await fixture.regain_daemon()
            await anyio.sleep(1.0)
        assert [round(for_s, 6) for _, _, for_s in fixture.reports] == [3.0, 5.0]
        assert len(fixture.log.of(BEGINS)) == len(fixture.log.of(ENDS)) == 2


@on_virtual_time
async def test_refused_report_is_logged_and_changes_nothing() -> None:
    async with worker() as fixture:
        fixture.refusal = RequestRefused("request_unknown", "there is no request ReportStandstill")
        await fixture.lose_world()
        await fixture.lose_daemon()
        await fixture.regain_daemon()
        (said,) = fixture.log.of("the daemon has not recorded the standstill")
        assert "ReportStandstill" in said["reason"]
        await fixture.lose_daemon()
        assert len(fixture.log.of(BEGINS)) == 2


@on_virtual_time
async def test_hook_that_raises_is_logged_and_ends_nothing() -> None:
    async with worker() as fixture:
        fixture.hook_error = ValueError("the pager does not answer")
        await fixture.lose_world()
        await fixture.lose_daemon()
        await fixture.regain_daemon()
        assert [each.lasted_s is None for each in fixture.told] == [True, False]
        assert len(fixture.reports) == 1
        said = fixture.log.of("`on_standstill` failed")
        assert [line["reason"] for line in said] == ["ValueError: the pager does not answer"] * 2


def test_subscribers_of_a_worker_are_told() -> None:
    heard: list[Any] = []
    subject = shared_worker("me")
    subject.standstill.subscribe(heard.append)
    standstill = Standstill(1, "peer", "lost", 1.0, 0.0)
    subject.on_standstill(standstill)
    assert heard == [standstill]
