from __future__ import annotations

import asyncio
from typing import Any, cast

import anyio

from forged.data.messages import ReportUsage, UsageTaken
from forged.data.sampling.sampler import ElasticSampler
from forged.data.sampling.usage import Run
from forged.elastic.model import ClusterTopology, WorkerId
from forged.errors import RequestRefused
from forged.log import SILENT
from forged.worker.data.usage_report import COMPARED_MAX, INTERVAL_S, OTHERS_INTERVAL_S, UsageReport
from forged.worker.registration import Registration
from forged.worker.worker_state.progress import TrainingProgress
from forged.worker.worker_state.session_state import SessionState
from tests.kernel_fixture import on_virtual_time, task_group
from tests.simulation.environment.loop import VirtualClock

FIRST, OTHER = WorkerId("first", "host", 1), WorkerId("other", "host", 2)
STEPS = 3


class UsageFixture:
    """A worker that has done some steps in generation 4, and a daemon that accepts or refuses its reports."""

    job = "run"

    def __init__(self, worker: WorkerId = FIRST, samples: int = 100) -> None:
        self.worker = worker
        self.incarnation = bytes(16)
        self.said: list[ReportUsage] = []
        self.refuses = False
        self.known_to = 0
        self.progress = TrainingProgress(0.1, 0, ElasticSampler(samples, 10, 1))
        self.state = SessionState(worker, self.progress)
        self.state.current_world.topology = ClusterTopology((FIRST, OTHER), 4)
        assert self.progress.usage is not None
        self.progress.usage.enter(4, 0)
        self.report = UsageReport(
            self.state,
            cast("Registration", self),
            VirtualClock(asyncio.get_running_loop()),
            SILENT,
        )

    async def send(self, request: Any) -> UsageTaken:
        if self.refuses:
            raise RequestRefused("usage_full", "not now")
        self.said.append(request)
        return UsageTaken(self.known_to)

    def make_steps(self) -> None:
        for _ in range(STEPS):
            self.progress.finish_step()
            self.progress.commit_step()

    def told(self) -> list[tuple[int, int, int]]:
        """Of each report: the generation, its first step, and the step after the last one."""
        return [(said.generation, said.begins_at, max(run.end_step for run in said.runs)) for said in self.said]


@on_virtual_time
async def test_rank_zero_reports_soon_and_once() -> None:
    fixture = UsageFixture()
    fixture.make_steps()
    async with task_group() as tasks:
        tasks.start_soon(fixture.report.run)
        await anyio.sleep(1.5 * INTERVAL_S)
        assert fixture.told() == [(4, 0, STEPS)]
        await anyio.sleep(10 * INTERVAL_S)
        assert len(fixture.said) == 1
        fixture.make_steps()
        await anyio.sleep(1.5 * INTERVAL_S)
    assert fixture.told() == [(4, 0, STEPS), (4, 0, 2 * STEPS)]


@on_virtual_time
async def test_ranks_above_zero_report_now_and_then() -> None:
    fixture = UsageFixture(OTHER)
    fixture.make_steps()
    async with task_group() as tasks:
        tasks.start_soon(fixture.report.run)
        await anyio.sleep(OTHERS_INTERVAL_S - INTERVAL_S)
        assert fixture.said == []
        await anyio.sleep(3 * INTERVAL_S)
    assert fixture.told() == [(4, 0, STEPS)]


@on_virtual_time
async def test_worker_in_no_world_reports_like_ranks_above_zero() -> None:
    fixture = UsageFixture(OTHER)
    fixture.state.current_world.topology = ClusterTopology()
    fixture.make_steps()
    async with task_group() as tasks:
        tasks.start_soon(fixture.report.run)
        await anyio.sleep(OTHERS_INTERVAL_S + 2 * INTERVAL_S)
    assert fixture.told() == [(4, 0, STEPS)]


def crowd(before: int) -> ClusterTopology:
    """A world with more ranks than are compared at once; so many are before this one."""
    others = [WorkerId(f"w{number}", "host", number) for number in range(2, 3 * COMPARED_MAX)]
    return ClusterTopology((FIRST, *others[:before], OTHER, *others[before:]), 4)


@on_virtual_time
async def test_other_ranks_report_only_steps_unknown_to_the_daemon() -> None:
    fixture = UsageFixture(OTHER)
    fixture.state.current_world.topology = crowd(2)
    fixture.make_steps()
    fixture.known_to = STEPS - 1
    async with task_group() as tasks:
        tasks.start_soon(fixture.report.run)
        await anyio.sleep(OTHERS_INTERVAL_S + 3 * INTERVAL_S)
        assert [said.runs for said in fixture.said] == [[], [Run(STEPS - 1, 0, 10 * (STEPS - 1), 10)]]
        fixture.known_to = 2 * STEPS
        fixture.make_steps()
        await anyio.sleep(OTHERS_INTERVAL_S)
        assert [said.runs for said in fixture.said[2:]] == [[]]


@on_virtual_time
async def test_some_ranks_above_zero_report_everything_in_turns() -> None:
    turns = []
    for before in range(6):
        fixture = UsageFixture(OTHER)
        fixture.state.current_world.topology = crowd(before)
        async with task_group() as tasks:
            tasks.start_soon(fixture.report.run)
            for turn in range(3):
                fixture.make_steps()
                fixture.known_to = (turn + 1) * STEPS
                await anyio.sleep(OTHERS_INTERVAL_S + INTERVAL_S)
        turns.append([number for number, said in enumerate(fixture.said) if said.runs])
    assert sorted(turns) == [[0], [0], [1], [1], [2], [2]]


@on_virtual_time
async def test_refused_report_is_kept_and_repeated() -> None:
    fixture = UsageFixture()
    fixture.make_steps()
    fixture.refuses = True
    async with task_group() as tasks:
        tasks.start_soon(fixture.report.run)
        await anyio.sleep(5 * INTERVAL_S)
        fixture.refuses = False
        await anyio.sleep(2 * INTERVAL_S)
    assert fixture.told() == [(4, 0, STEPS)]


@on_virtual_time
async def test_empty_usage_is_reported_once_per_world() -> None:
    fixture = UsageFixture(samples=0)
    for _ in range(2):
        await fixture.report.tell()
    fixture.state.current_world.topology = ClusterTopology((FIRST,), 5)
    await fixture.report.tell()
    assert [(said.generation, said.samples, said.runs) for said in fixture.said] == [(4, 0, []), (5, 0, [])]
