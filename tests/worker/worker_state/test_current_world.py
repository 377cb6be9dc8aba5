"""A worker in a world, between real meshes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import numpy as np
import pytest

from forged.elastic.membership.member import COLLECTIVES_PER_WORLD
from forged.elastic.messages import JobPaused, JobResumed
from forged.elastic.model import WorkerId, WorkerStatus, WorldOver
from forged.errors import RequestRefused
from forged.kernel.messages import Record
from forged.worker.collectives.endpoints import MemberEndpoint
from forged.worker.errors import CollectiveMismatch, StepAborted, WorkerEvicted, WorldIncomplete
from forged.worker.process.counters import Counters
from forged.worker.worker_state.job_view import JobView
from forged.worker.worker_state.progress import TrainingProgress
from forged.worker.worker_state.session_state import CurrentWorld, PeerReport, SessionState, peer_of
from tests.worker.meshes import PATIENCE_S, each, open_meshes, until

GENERATION = 4


class Watched(CurrentWorld):
    """One that notes when its world is over."""

    def __init__(self, name: str) -> None:
        self.overs: list[WorldOver] = []
        super().__init__(JobView(name), None, on_over=self.overs.append)


@asynccontextmanager
async def together(count: int) -> AsyncIterator[list[Watched]]:
    """Workers in one world."""
    async with open_meshes(count) as made, asyncio.timeout(PATIENCE_S):
        current_worlds = [Watched(worker.id) for worker in made.workers]
        for current_world, world in zip(current_worlds, await made.enter(GENERATION), strict=True):
            current_world.take_rank(made.topology)
            current_world.enter(world)
        yield current_worlds


async def barrier(current_world: CurrentWorld) -> None:
    with current_world.collective() as world:
        await world.barrier()


async def sum_of_ones(current_world: CurrentWorld) -> Any:
    with current_world.collective() as world:
        return await world.all_reduce(np.ones(2))


def hear(current_world: CurrentWorld, *records: Record) -> None:
    for record in records:
        current_world._view.hear(record)


PAUSED = Record.of(JobPaused("lunch"), fact_id=7, at=0.0)
RESUMED = Record.of(JobResumed("coffee"), fact_id=8, at=0.0)


async def test_worker_in_no_world_may_not_step_and_its_step_is_void() -> None:
    current_world = CurrentWorld(JobView("me"), None)
    assert not current_world.may_step
    assert current_world.status is WorkerStatus.JOINING
    with pytest.raises(StepAborted, match="no world"):
        await barrier(current_world)
    assert current_world.is_void
    assert not await current_world.end_step(1)
    await current_world.leave()
    assert current_world.peer_report is None


async def test_a_step_counts_when_all_have_ended_it() -> None:
    async with together(3) as current_worlds:
        sums = await each(current_worlds, sum_of_ones)
        assert [list(total) for total in sums] == [[3, 3]] * 3
        assert await each(current_worlds, lambda one: one.end_step(1)) == [True] * 3
        assert all(current_world.may_step for current_world in current_worlds)


async def test_paused_world_stops_after_one_step_until_all_members_receive_the_resume() -> None:
    async with together(2) as (one, other):
        hear(one, PAUSED)
        assert one.may_step, "the world stops as a whole"
        assert await each([one, other], lambda current_world: current_world.end_step(1)) == [True, True]
        assert (one.is_stopped, other.is_stopped) == (True, True)
        hear(other, PAUSED)
        assert other.is_stopped
        hear(one, RESUMED)
        hear(other, RESUMED)
        assert (one.may_step, other.may_step) == (True, True)


async def test_a_collective_that_is_broken_off_voids_the_step_and_loses_the_world() -> None:
    async with together(2) as (one, other):
        waiting = asyncio.create_task(barrier(one))
        await asyncio.sleep(0)
        assert other.world is not None
        other.world.abort("it was unplugged", "w1")
        with pytest.raises(StepAborted):
            await waiting
        assert one.is_void
        assert one.world is None
        assert one.peer_report is not None
        assert (one.peer_report.generation, one.peer_report.peer) == (GENERATION, "w1")
        with pytest.raises(StepAborted, match="no world"):
            await barrier(one)


async def test_a_step_that_cannot_end_does_not_count_and_loses_the_world() -> None:
    async with together(2) as (one, other):
        ending = asyncio.create_task(one.end_step(1))
        await asyncio.sleep(0)
        assert other.world is not None
        other.world.abort("it was unplugged")
        assert not await ending
        assert one.world is None
        assert not one.is_void, "what it did to the state is that of a finished step"


@pytest.mark.parametrize("known", ["lost", "rescaling"])
async def test_loss_known_to_the_daemon_is_not_a_peer_report(known: str) -> None:
    async with together(2) as (one, _):
        setattr(one._view, known, "w1" if known == "lost" else True)
        one.lose(WorldIncomplete("no peer connected", "w1"))
        assert one.world is None
        assert one.peer_report is None


async def test_first_loss_of_a_world_is_kept_as_peer_report() -> None:
    async with together(2) as (one, _):
        one.lose(WorldIncomplete("no peer connected", "w1"))
        reported = one.peer_report
        one.lose(WorldIncomplete("no peer connected", "w0"))
        assert one.peer_report is reported
        assert reported == PeerReport(GENERATION, "w1", reported.why if reported else "")


async def test_only_a_collective_that_the_script_waits_in_can_be_aborted() -> None:
    async with together(2) as (one, other):
        one.begin_step()
        one.abort_collective("it is to go")
        await each([one, other], barrier)
        assert one.meeting is None
        waits = asyncio.ensure_future(one.end_step(1))
        await until(lambda: one.meeting is not None)
        one.abort_collective("it is to go")
        assert (await waits, one.meeting) == (False, None)
        with pytest.raises(StepAborted, match="it is to go"):
            await barrier(other)


async def test_rank_that_leaves_ends_the_world_for_the_other_ranks() -> None:
    async with together(2) as (one, other):
        world = other.world
        assert world is not None
        await one.leave()
        await one.leave()
        await until(lambda: world.ending is not None)
        assert not other.may_step
        assert one.peer_report is None


async def test_marks_begin_anew_with_each_world_and_are_shown_to_the_pulse() -> None:
    with closing(Counters.create()) as counters:
        current_world = CurrentWorld(JobView("me"), counters)
        async with open_meshes(1) as made:
            topology = made.topology
        current_world.take_rank(topology)
        current_world.mark()
        current_world.mark()
        assert current_world.marks == counters.marks == topology.epoch * COLLECTIVES_PER_WORLD + 2
        current_world.come_to(topology)
        assert current_world.marks == topology.epoch * COLLECTIVES_PER_WORLD
        assert current_world.topology is topology


class TestCommit:
    async def test_step_is_committed_when_all_have_voted(self) -> None:
        async with together(3) as current_worlds:
            for one in current_worlds:
                one.begin_step()
            first, *others = current_worlds
            voting = asyncio.ensure_future(first.commit_step(1))
            await until(lambda: first.meeting is not None)
            assert not first.is_committed
            await each(others, lambda one: one.commit_step(1))
            await voting
            assert [one.is_committed for one in current_worlds] == [True] * 3
            with pytest.raises(RequestRefused, match="before the commit"):
                await barrier(first)
            assert not first.is_void
            assert await each(current_worlds, lambda one: one.end_step(1)) == [True] * 3
            assert [one.is_committed for one in current_worlds] == [False] * 3

    async def test_rank_that_ends_its_step_without_a_vote_is_an_error_at_all_ranks(self) -> None:
        async with together(2) as (one, other):
            one.begin_step()
            ending = asyncio.ensure_future(other.end_step(1))
            with pytest.raises(CollectiveMismatch, match=r"commit\(step=1\)"):
                await one.commit_step(1)
            with pytest.raises(CollectiveMismatch):
                await ending

    async def test_vote_in_a_world_that_ends_before_raises(self) -> None:
        async with together(2) as (one, other):
            one.begin_step()
            voting = asyncio.ensure_future(one.commit_step(1))
            await until(lambda: one.meeting is not None)
            other.void_step("the batch is damaged")
            with pytest.raises(StepAborted, match="damaged"):
                await voting
            assert (one.is_committed, one.is_void) == (False, True)


class TestNamedMeetings:
    async def test_meeting_is_marked_and_may_contain_a_collective(self) -> None:
        async with together(2) as current_worlds:
            one = current_worlds[0]
            marks = one.marks
            with one.named_meeting("backward"):
                assert (one.marks, one.meeting, one.meeting_name) == (marks + 1, marks + 1, "backward")
                await each(current_worlds, barrier)
                assert one.meeting == marks + 2
            assert one.meeting is None
            assert one.meeting_name == ""

    async def test_meeting_in_a_meeting_is_refused_also_in_another_thread(self) -> None:
        async with together(1) as (one,):

            def begin() -> None:
                with one.named_meeting("forward"):
                    raise AssertionError("it has begun")

            with one.named_meeting("backward"):
                with pytest.raises(RequestRefused, match="'forward' was begun within meeting 'backward'"):
                    begin()
                with pytest.raises(RequestRefused, match="'forward' was begun within meeting 'backward'"):
                    await asyncio.to_thread(begin)
            with one.named_meeting("forward"):
                pass

    async def test_meeting_in_a_world_that_is_over_aborts_the_step(self) -> None:
        async with together(2) as (one, other):
            one.begin_step()
            await other.leave()
            await until(lambda: bool(one.overs))
            with pytest.raises(StepAborted, match="in good order"), one.named_meeting("backward"):
                raise AssertionError("it has begun")
            await one.leave()
            with pytest.raises(StepAborted), one.named_meeting("backward"):
                raise AssertionError("it has begun")

    async def test_drain_aborts_a_meeting_in_which_the_script_waits(self) -> None:
        async with together(2) as (one, other):
            with one.named_meeting("backward"):
                one.abort_collective("it is to go")
                await until(lambda: bool(other.overs))
            assert [over.reason for over in one.overs + other.overs] == ["it is to go"] * 2

    async def test_meeting_of_a_lone_worker_is_not_aborted(self) -> None:
        async with together(1) as (one,):
            with one.named_meeting("backward"):
                one.abort_collective("it is to go")
            assert (one.overs, one.may_step) == ([], True)


class TestWorldOver:
    async def test_voided_step_ends_the_world_once_at_every_rank_also_between_two_collectives(self) -> None:
        async with together(3) as current_worlds:
            for one in current_worlds:
                one.begin_step()
            current_worlds[1].void_step("the batch is damaged")
            await until(lambda: all(one.overs for one in current_worlds))
            await each(current_worlds, lambda one: one.leave())
            assert [one.overs for one in current_worlds] == [[WorldOver(GENERATION, "the batch is damaged")]] * 3

    async def test_lost_member_is_named(self) -> None:
        async with together(3) as (one, other, lost):
            assert lost.world is not None
            assert isinstance(lost.world.endpoint, MemberEndpoint)
            assert lost.world.endpoint.link is not None
            lost.world.endpoint.link.abort()
            await until(lambda: bool(one.overs and other.overs))
            assert [(over.peer, over.is_orderly) for over in one.overs + other.overs] == [("w2", False)] * 2

    @pytest.mark.parametrize("is_stepping", [False, True])
    async def test_departure_is_orderly_unless_a_step_is_under_way(self, is_stepping: bool) -> None:
        async with together(2) as (one, other):
            if is_stepping:
                one.begin_step()
            await other.leave()
            await until(lambda: bool(one.overs))
            assert one.overs == [WorldOver(GENERATION, "w1 (rank 1) left the world in good order", "", not is_stepping)]
            assert other.overs == [WorldOver(GENERATION, "this worker left the world in good order", "", True)]
            assert one.world is not None
            assert one.world.ending is None, "what all ranks have called before it left may still complete"

    async def test_departure_of_the_hub_is_orderly_too(self) -> None:
        async with together(2) as (one, other):
            await one.leave()
            await until(lambda: bool(other.overs))
            assert other.overs == [WorldOver(GENERATION, "w0 (rank 0) left the world in good order", "", True)]

    async def test_lone_worker_that_leaves_and_keeps_its_world_is_over(self) -> None:
        async with together(1) as (one,):
            assert await one.leave_for_good() is not None
            assert one.overs == [WorldOver(GENERATION, "this worker leaves", "", True)]

    async def test_world_that_ends_before_it_is_entered_is_over_when_it_is(self) -> None:
        async with together(2) as (one, other):
            assert (one.world is not None, other.world is not None) == (True, True)
            world, again = one.world, Watched("w0")
            assert world is not None
            world.abort("it was unplugged", "w1")
            again.enter(world)
            assert again.overs == [WorldOver(GENERATION, "it was unplugged", "w1")]

    async def test_end_of_the_job_and_eviction_are_told_at_once(self) -> None:
        overs: list[WorldOver] = []
        state = SessionState(WorkerId("me", "", 0), TrainingProgress(None, 0), on_world_over=overs.append)
        state.fail(WorkerEvicted("stalled"))
        assert overs == [], "no world was entered"
        async with open_meshes(1) as made:
            state.view.end = None
            (world,) = await made.enter(GENERATION)
            state.current_world.enter(world)
            state.fail(WorkerEvicted("stalled"))
            state.wake()
        (over,) = overs
        assert (over.generation, over.is_orderly) == (GENERATION, False)
        assert "stalled" in over.reason


def test_script_error_blames_no_worker() -> None:
    assert peer_of(RequestRefused("no", "no")) == ""
    assert peer_of(CollectiveMismatch("differ", "they differ")) == ""
    assert peer_of(WorldIncomplete("no peer connected", "w3")) == "w3"
