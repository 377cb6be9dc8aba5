"""Real workers that die, hang and come, and a real daemon that does so too: the state of all who live stays exact.

`FORGED_KILLS` says how many workers are killed at random moments, `FORGED_SEED` which and when; both are printed.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import pytest

from forged.client import EARLIEST, ForgedClient
from forged.elastic.messages import (
    JobAborted,
    JobWaiting,
    RescaleCompleted,
    WorkerFailed,
    WorkerLeft,
    WorkerRecovered,
    WorkerStalled,
)
from forged.jobs.model import ChangeJob, ShowJob
from forged.kernel.messages import Fact, Record
from tests.processes.nursery import WarmProcess
from tests.processes.trainee import JOB
from tests.processes.troupe import PATIENCE_S, Troupe, troupe_on

KILLS = int(os.environ.get("FORGED_KILLS", "12"))
SEED = int(os.environ.get("FORGED_SEED") or SystemRandom().getrandbits(32))
BIG = 1 << 20
"""So many elements take a while on their way."""
IMPATIENT = {"worker_heartbeat_timeout_ms": 1500, "stall_timeout_ms": 500}


@pytest.fixture
async def troupe(stage: WarmProcess, tmp_path: Path) -> AsyncIterator[Troupe]:
    async with troupe_on(stage, tmp_path) as troupe:
        yield troupe


async def heard(client: ForgedClient, kind: type[Fact], worker: str) -> None:
    """Wait until the daemon has told that of a worker, or find that it has."""
    async with asyncio.timeout(PATIENCE_S), client.facts(kind, since=EARLIEST, jobs=[JOB]) as facts:
        async for item in facts:
            if isinstance(item, Record) and getattr(item.fact, "worker_id", "") == worker:
                return


class TestDeaths:
    @pytest.mark.parametrize("synchronous", [True, False], ids=["synchronous", "asynchronous"])
    async def test_at_random_moments_they_cost_no_step_and_repeat_none(
        self, synchronous: bool, stage: WarmProcess, tmp_path: Path
    ) -> None:
        print(f"FORGED_KILLS={KILLS} FORGED_SEED={SEED}")
        async with troupe_on(stage, tmp_path, use_synchronous_rescaling=synchronous) as troupe:
            await self._at_random_moments(troupe, Random(SEED))

    async def _at_random_moments(self, troupe: Troupe, random: Random) -> None:
        living = ["w0", "w1", "w2", "w3"]
        await troupe.together(*living)
        for number in range(4, 4 + KILLS):
            await troupe.more_steps(*living, steps=random.randrange(8))
            await asyncio.sleep(random.random() * 0.01)
            victim = living.pop(random.randrange(len(living)))
            troupe[victim].kill()
            await troupe.dead(victim)
            if random.random() < 0.5:
                await troupe.world_of(*living)
            living.append(f"w{number}")
            await troupe.start(living[-1])
            await troupe.world_of(*living)
        assert len(await troupe.facts(WorkerFailed)) == KILLS
        await troupe.finish(*living)

    @pytest.mark.parametrize("victim", ["a", "b"], ids=["hub", "member"])
    @pytest.mark.parametrize("point", ["in all_reduce", "in end_step"])
    async def test_inside_a_step(self, point: str, victim: str, troupe: Troupe) -> None:
        await self._of_one_of_three(troupe, point, victim)

    async def test_of_a_hub_that_has_told_one_member_alone_of_a_commit(self, troupe: Troupe) -> None:
        await self._of_one_of_three(troupe, "having told some", "a")

    async def _of_one_of_three(self, troupe: Troupe, point: str, victim: str) -> None:
        await troupe.one_after_the_other("a", "b", "c", victim=victim, at=point, nth=5)
        troupe.arm()
        await troupe.dead(victim)
        survivors = [name for name in "abc" if name != victim]
        await troupe.world_of(*survivors)
        (failed,) = await troupe.facts(WorkerFailed)
        assert failed.worker_id == victim
        assert failed.reason.startswith(("its process ", "neither the daemon nor "))
        await troupe.finish(*survivors)

    @pytest.mark.parametrize(
        "point",
        ["joined", "stopping", "stopped", "taking", "having the state", "ready", "entering", "entered"],
    )
    async def test_of_one_that_joins(self, point: str, troupe: Troupe) -> None:
        await troupe.start("a", "b", ballast=BIG)
        await troupe.world_of("a", "b")
        troupe.arm()
        await troupe.start("c", at=point, ballast=BIG)
        await troupe.dead("c")
        await troupe.more_steps("a", "b")
        await troupe.world_of("a", "b")
        await troupe.finish("a", "b")

    @pytest.mark.parametrize(
        ("point", "victim"),
        [
            ("giving", "a"),
            *((point, victim) for point in ("stopping", "stopped", "entering", "entered") for victim in "ab"),
        ],
    )
    async def test_in_a_rescale_that_takes_another_in(self, point: str, victim: str, troupe: Troupe) -> None:
        await troupe.one_after_the_other("a", "b", victim=victim, at=point, ballast=BIG)
        troupe.arm()
        await troupe.start("c", ballast=BIG)
        await troupe.dead(victim)
        (survivor,) = {"a", "b"} - {victim}
        await troupe.world_of(survivor, "c")
        await troupe.finish(survivor, "c")

    @pytest.mark.parametrize("victims", ["ab", "bc", "abc"], ids=["with the hub", "members", "all but one"])
    async def test_of_several_at_once(self, victims: str, troupe: Troupe) -> None:
        await troupe.together("a", "b", "c", "d")
        for victim in victims:
            troupe[victim].kill()
        await troupe.dead(*victims)
        survivors = [name for name in "abcd" if name not in victims]
        await troupe.world_of(*survivors)
        await troupe.finish(*survivors)

    async def test_they_leave_no_descriptor_with_who_survives(self, troupe: Troupe) -> None:
        await troupe.together("a", "b", "c0")
        before: list[int] = []
        for number in range(6):
            troupe[f"c{number}"].kill()
            await troupe.start(f"c{number + 1}")
            await troupe.world_of("a", "b", f"c{number + 1}")
            # From the first death on none but these two can be rank 0, to whom the others are connected.
            before = before or [troupe[name].descriptors() for name in "ab"]
        await troupe.until(lambda: sum(troupe[name].descriptors() for name in "ab") <= sum(before))
        await troupe.finish("a", "b", "c6")


class TestTheDeathOfAll:
    async def test_the_job_waits_and_whoever_comes_begins_anew_which_is_told(self, troupe: Troupe) -> None:
        await troupe.together("a", "b")
        async with troupe.client() as client, client.facts(JobWaiting, jobs=[JOB]) as facts:
            troupe["a"].kill()
            troupe["b"].kill()
            waiting = await asyncio.wait_for(anext(facts), PATIENCE_S)
            assert isinstance(waiting, Record)
            assert waiting.fact == JobWaiting(0, 1)
        await troupe.start("c")
        await troupe.world_of("c")
        told = (await troupe.facts(RescaleCompleted))[-1]
        assert (told.step, troupe["c"].entered[-1], troupe["c"].steps[0].step) == (0, (told.delta.epoch, 0), 0)
        assert "nobody of world" in told.reason

    async def test_where_that_is_more_than_is_tolerated_the_job_is_given_up(
        self, stage: WarmProcess, tmp_path: Path
    ) -> None:
        async with troupe_on(stage, tmp_path, failure_tolerance_percentage=20) as troupe:
            await troupe.together("a", "b", "c")
            async with troupe.client() as client, client.facts(JobAborted, jobs=[JOB]) as facts:
                for name in "abc":
                    troupe[name].kill()
                aborted = await asyncio.wait_for(anext(facts), PATIENCE_S)
            assert isinstance(aborted, Record)
            assert isinstance(aborted.fact, JobAborted)
            assert "workers failed, and 1 may" in aborted.fact.reason
            await troupe.start("d")
            await troupe.until(lambda: troupe["d"].code is not None)
            assert troupe["d"].code == 1
            assert "job run is aborted" in troupe["d"].said


class TestADaemonThatIsKilled:
    @pytest.mark.parametrize("who", ["a", "c"], ids=["who was there", "who joins"])
    @pytest.mark.parametrize("point", ["stopping", "stopped", "entering"])
    async def test_at_each_stage_of_a_rescale(self, point: str, who: str, troupe: Troupe) -> None:
        await self._killed_at(troupe, point, who)

    @pytest.mark.parametrize("point", ["joining", "joined", "having the state", "ready"])
    async def test_at_each_word_of_one_that_joins(self, point: str, troupe: Troupe) -> None:
        await self._killed_at(troupe, point, "c")

    async def _killed_at(self, troupe: Troupe, point: str, who: str) -> None:
        await troupe.one_after_the_other("a", "b", victim=who, at=point, act="hold")
        troupe.arm()
        await troupe.start("c", at=point if who == "c" else "", act="hold")
        await troupe.until(lambda: troupe[who].held == 1)
        await troupe.daemon.kill()
        troupe[who].let_go()
        await troupe.daemon.start()
        await troupe.world_of("a", "b", "c")
        assert await troupe.facts(WorkerFailed) == []
        await troupe.finish("a", "b", "c")

    async def test_training_goes_on_without_it_and_nobody_is_missed_when_it_is_back(self, troupe: Troupe) -> None:
        await troupe.together("a", "b", "c")
        generation = troupe["a"].steps[-1].generation
        await troupe.daemon.kill()
        await troupe.more_steps("a", "b", "c", steps=100)
        await troupe.daemon.start()
        await troupe.more_steps("a", "b", "c")
        assert {troupe[name].steps[-1].generation for name in "abc"} == {generation}
        assert await troupe.facts(WorkerFailed) == []
        await troupe.finish("a", "b", "c")

    @pytest.mark.parametrize("victim", ["a", "b"], ids=["hub", "member"])
    @pytest.mark.parametrize("first", ["worker", "daemon"])
    async def test_while_a_worker_dies(self, first: str, victim: str, troupe: Troupe) -> None:
        await troupe.together("a", "b", "c")
        if first == "worker":
            troupe[victim].kill()
            await troupe.daemon.kill()
        else:
            await troupe.daemon.kill()
            troupe[victim].kill()
        await troupe.dead(victim)
        await troupe.daemon.start()
        survivors = [name for name in "abc" if name != victim]
        await troupe.world_of(*survivors)
        (failed,) = await troupe.facts(WorkerFailed)
        assert failed.worker_id == victim
        await troupe.finish(*survivors)


class TestStandingStill:
    @pytest.mark.parametrize("way", ["stopped", "holding the GIL"])
    async def test_for_longer_than_the_timeouts_is_told_and_is_no_death(
        self, way: str, stage: WarmProcess, tmp_path: Path
    ) -> None:
        """The pulse speaks for who cannot."""
        async with troupe_on(stage, tmp_path, **IMPATIENT) as troupe, troupe.client() as client:
            await troupe.start("a", "c")
            await troupe.start("b", gil_s=3 if way == "holding the GIL" else 0)
            await troupe.world_of("a", "b", "c")
            troupe.arm()
            if way == "stopped":
                troupe["b"].kill(signal.SIGSTOP)
            await heard(client, WorkerStalled, "b")
            if way == "stopped":
                await asyncio.sleep(2 * IMPATIENT["worker_heartbeat_timeout_ms"] / 1000)
                troupe["b"].kill(signal.SIGCONT)
            await heard(client, WorkerRecovered, "b")
            await troupe.more_steps("a", "b", "c")
            assert {fact.worker_id for fact in await troupe.facts(WorkerStalled)} == {"b"}
            assert await troupe.facts(WorkerFailed) == []
            assert len({troupe[name].steps[-1].generation for name in "abc"}) == 1
            await troupe.finish("a", "b", "c")

    async def test_for_longer_than_a_timeout_that_was_made_short_meanwhile_is_no_death(
        self, stage: WarmProcess, tmp_path: Path
    ) -> None:
        """Neither for who has yet to hear of it, nor for whom its pulse has to speak more often then."""
        async with troupe_on(stage, tmp_path, stall_timeout_ms=500) as troupe, troupe.client() as client:
            await troupe.start("a", "c")
            await troupe.start("b", gil_s=2)
            await troupe.world_of("a", "b", "c")
            troupe["a"].kill(signal.SIGSTOP)
            job = await client.request(ShowJob(JOB))
            settings = {**job.settings, "worker_heartbeat_timeout_ms": 400}
            await client.request(ChangeJob(JOB, settings, job.version))
            await asyncio.sleep(2)
            troupe["a"].kill(signal.SIGCONT)
            await troupe.more_steps("a", "b", "c")
            troupe.arm()
            await heard(client, WorkerRecovered, "b")
            await troupe.more_steps("a", "b", "c")
            assert await troupe.facts(WorkerFailed) == []
            await troupe.finish("a", "b", "c")

    async def test_for_less_than_the_timeouts_is_nothing_at_all(self, troupe: Troupe) -> None:
        await troupe.together("a", "b", "c")
        generation = troupe["a"].steps[-1].generation
        for name in "abc":
            troupe[name].kill(signal.SIGSTOP)
            await asyncio.sleep(0.3)
            troupe[name].kill(signal.SIGCONT)
            await troupe.more_steps("a", "b", "c")
        assert {troupe[name].steps[-1].generation for name in "abc"} == {generation}
        assert await troupe.facts(WorkerStalled, WorkerFailed) == []
        await troupe.finish("a", "b", "c")

    @pytest.mark.parametrize("victim", ["a", "b"], ids=["hub", "member"])
    async def test_with_its_pulse_for_longer_than_the_timeout_it_counts_as_dead_and_is_told_so_later(
        self, victim: str, stage: WarmProcess, tmp_path: Path
    ) -> None:
        async with troupe_on(stage, tmp_path, **IMPATIENT) as troupe, troupe.client() as client:
            await troupe.together("a", "b", "c")
            pulse = troupe[victim].pulse
            os.kill(pulse, signal.SIGSTOP)
            troupe[victim].kill(signal.SIGSTOP)
            await heard(client, WorkerFailed, victim)
            survivors = [name for name in "abc" if name != victim]
            await troupe.world_of(*survivors)
            os.kill(pulse, signal.SIGCONT)
            troupe[victim].kill(signal.SIGCONT)
            await troupe.until(lambda: troupe[victim].code is not None)
            assert troupe[victim].code == 1
            assert "WorkerEvicted" in troupe[victim].said
            (failed,) = await troupe.facts(WorkerFailed)
            assert failed.reason.startswith("neither its library nor its pulse was heard for")
            await troupe.finish(*survivors)

    async def test_where_the_settings_say_so_who_stands_still_has_to_go(
        self, stage: WarmProcess, tmp_path: Path
    ) -> None:
        settings = {"evict_stalled": True, **IMPATIENT, "stall_timeout_ms": 2_000}
        async with troupe_on(stage, tmp_path, **settings) as troupe, troupe.client() as client:
            await troupe.together("a", "b", "c")
            troupe["b"].kill(signal.SIGSTOP)
            await heard(client, WorkerFailed, "b")
            await troupe.world_of("a", "c")
            troupe["b"].kill(signal.SIGCONT)
            await troupe.until(lambda: troupe["b"].code is not None)
            assert "it lives and made no progress" in troupe["b"].said
            await troupe.finish("a", "c")


class TestAScriptWithAnEventLoop:
    """Its worker is no less than that of a script without one. All of them have forked a child, which lives on."""

    async def _together(self, troupe: Troupe, **options: Any) -> None:
        await troupe.start("a")
        await troupe.start("b", script="async_trainee", **options)
        await troupe.world_of("a", "b")

    async def test_that_holds_the_gil_for_longer_than_the_timeout_has_not_failed(
        self, stage: WarmProcess, tmp_path: Path
    ) -> None:
        async with troupe_on(stage, tmp_path, **IMPATIENT) as troupe, troupe.client() as client:
            await self._together(troupe, gil_s=3)
            troupe.arm()
            await heard(client, WorkerStalled, "b")
            await heard(client, WorkerRecovered, "b")
            await troupe.more_steps("a", "b")
            assert await troupe.facts(WorkerFailed) == []
            troupe["b"].let_child_go()
            await troupe.finish("a", "b")

    async def test_that_is_killed_counts_as_dead_at_once_though_its_child_lives(self, troupe: Troupe) -> None:
        """Its pulse says so, or the daemon finds its port closed, whichever is sooner; no grace has to pass."""
        async with troupe.client() as client:
            await troupe.start("b", script="async_trainee")
            await troupe.world_of("b")
            troupe["b"].kill()
            await heard(client, WorkerFailed, "b")
        (failed,) = await troupe.facts(WorkerFailed)
        assert failed.reason.startswith(("its process ", "nobody listens at "))
        assert troupe["b"].child is not None
        os.kill(troupe["b"].child, 0)
        troupe["b"].let_child_go()
        await troupe.dead("b")

    async def test_that_is_told_to_end_finishes_its_step_and_leaves(self, troupe: Troupe) -> None:
        await self._together(troupe)
        troupe["b"].let_child_go()
        troupe["b"].kill(signal.SIGTERM)
        await troupe.until(lambda: troupe["b"].code is not None)
        assert (troupe["b"].code, troupe["b"].finished) == (0, troupe["b"].steps[-1].step + 1)
        await troupe.world_of("a")
        assert [fact.reason for fact in await troupe.facts(WorkerLeft)] == ["it was told to end, by SIGTERM"]
        assert await troupe.facts(WorkerFailed) == []
        await troupe.finish("a")
