"""Real processes: workers and daemon die, hang and start, and the state of the live workers stays exact.

`FORGED_KILLS` sets the number of random kills, `FORGED_SEED` their order; both are printed.
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
    WorkerStoodStill,
)
from forged.jobs.model import ChangeJob, ShowJob
from forged.kernel.messages import Fact, Record
from tests.processes.fork_server import ForkServer
from tests.processes.training_cluster import TIMEOUT_S, TrainingCluster, cluster_on
from tests.processes.worker_script import JOB

KILLS = int(os.environ.get("FORGED_KILLS", "12"))
SEED = int(os.environ.get("FORGED_SEED") or SystemRandom().getrandbits(32))
BIG = 1 << 20
"""The elements of a state whose transfer takes a while."""
SHORT_TIMEOUTS = {"worker_heartbeat_timeout_ms": 1500, "stall_timeout_ms": 500}


@pytest.fixture
async def cluster(fork_server: ForkServer, tmp_path: Path) -> AsyncIterator[TrainingCluster]:
    async with cluster_on(fork_server, tmp_path) as cluster:
        yield cluster


async def wait_for_fact(client: ForgedClient, kind: type[Fact], worker: str) -> None:
    """Wait for a fact about a worker, which may exist already."""
    async with asyncio.timeout(TIMEOUT_S), client.facts(kind, since=EARLIEST, jobs=[JOB]) as facts:
        async for item in facts:
            if isinstance(item, Record) and getattr(item.fact, "worker_id", "") == worker:
                return


class TestWorkerDeaths:
    @pytest.mark.parametrize("synchronous", [True, False], ids=["synchronous", "asynchronous"])
    async def test_deaths_at_random_moments_lose_and_repeat_no_step(
        self, synchronous: bool, fork_server: ForkServer, tmp_path: Path
    ) -> None:
        print(f"FORGED_KILLS={KILLS} FORGED_SEED={SEED}")
        async with cluster_on(fork_server, tmp_path, use_synchronous_rescaling=synchronous) as cluster:
            await self._kill_at_random(cluster, Random(SEED))

    async def _kill_at_random(self, cluster: TrainingCluster, random: Random) -> None:
        running = ["w0", "w1", "w2", "w3"]
        await cluster.start_together(*running)
        for number in range(4, 4 + KILLS):
            await cluster.wait_for_steps(*running, steps=random.randrange(8))
            await asyncio.sleep(random.random() * 0.01)
            victim = running.pop(random.randrange(len(running)))
            cluster[victim].kill()
            await cluster.wait_until_killed(victim)
            if random.random() < 0.5:
                await cluster.wait_for_world(*running)
            running.append(f"w{number}")
            await cluster.start(running[-1])
            await cluster.wait_for_world(*running)
        assert len(await cluster.facts(WorkerFailed)) == KILLS
        await cluster.finish(*running)

    @pytest.mark.parametrize("victim", ["a", "b"], ids=["hub", "member"])
    @pytest.mark.parametrize("point", ["in all_reduce", "in end_step"])
    async def test_death_inside_a_step_leaves_a_world_of_survivors(
        self, point: str, victim: str, cluster: TrainingCluster
    ) -> None:
        await self._kill_one_of_three(cluster, point, victim)

    async def test_death_of_the_hub_during_a_partial_commit_is_survived(self, cluster: TrainingCluster) -> None:
        await self._kill_one_of_three(cluster, "after a partial commit", "a")

    async def _kill_one_of_three(self, cluster: TrainingCluster, point: str, victim: str) -> None:
        await cluster.start_in_order("a", "b", "c", victim=victim, at=point, nth=5)
        cluster.arm()
        await cluster.wait_until_killed(victim)
        survivors = [name for name in "abc" if name != victim]
        await cluster.wait_for_world(*survivors)
        (failed,) = await cluster.facts(WorkerFailed)
        assert failed.worker_id == victim
        assert failed.reason.startswith(("its process ", "unreachable from the daemon and from "))
        await cluster.finish(*survivors)

    @pytest.mark.parametrize(
        "point",
        ["joined", "stopping", "stopped", "receiving the state", "having the state", "ready", "entering", "entered"],
    )
    async def test_death_of_a_joiner_leaves_the_world_training(self, point: str, cluster: TrainingCluster) -> None:
        await cluster.start("a", "b", ballast=BIG)
        await cluster.wait_for_world("a", "b")
        cluster.arm()
        await cluster.start("c", at=point, ballast=BIG)
        await cluster.wait_until_killed("c")
        await cluster.wait_for_steps("a", "b")
        await cluster.wait_for_world("a", "b")
        await cluster.finish("a", "b")

    @pytest.mark.parametrize(
        ("point", "victim"),
        [
            ("sending the state", "a"),
            *((point, victim) for point in ("stopping", "stopped", "entering", "entered") for victim in "ab"),
        ],
    )
    async def test_death_during_a_rescale_still_admits_the_joiner(
        self, point: str, victim: str, cluster: TrainingCluster
    ) -> None:
        await cluster.start_in_order("a", "b", victim=victim, at=point, ballast=BIG)
        cluster.arm()
        await cluster.start("c", ballast=BIG)
        await cluster.wait_until_killed(victim)
        (survivor,) = {"a", "b"} - {victim}
        await cluster.wait_for_world(survivor, "c")
        await cluster.finish(survivor, "c")

    @pytest.mark.parametrize("victims", ["ab", "bc", "abc"], ids=["with the hub", "members", "all but one"])
    async def test_simultaneous_deaths_leave_a_world_of_survivors(self, victims: str, cluster: TrainingCluster) -> None:
        await cluster.start_together("a", "b", "c", "d")
        for victim in victims:
            cluster[victim].kill()
        await cluster.wait_until_killed(*victims)
        survivors = [name for name in "abcd" if name not in victims]
        await cluster.wait_for_world(*survivors)
        await cluster.finish(*survivors)

    async def test_dead_workers_leave_no_descriptor_in_survivors(self, cluster: TrainingCluster) -> None:
        await cluster.start_together("a", "b", "c0")
        before: list[int] = []
        for number in range(6):
            cluster[f"c{number}"].kill()
            await cluster.start(f"c{number + 1}")
            await cluster.wait_for_world("a", "b", f"c{number + 1}")
            # After the first death only these two can be rank 0, the hub.
            before = before or [cluster[name].descriptors() for name in "ab"]
        await cluster.until(lambda: sum(cluster[name].descriptors() for name in "ab") <= sum(before))
        await cluster.finish("a", "b", "c6")


class TestDeathOfAllWorkers:
    async def test_new_worker_restarts_training_at_step_0(self, cluster: TrainingCluster) -> None:
        await cluster.start_together("a", "b")
        async with cluster.client() as client, client.facts(JobWaiting, jobs=[JOB]) as facts:
            cluster["a"].kill()
            cluster["b"].kill()
            waiting = await asyncio.wait_for(anext(facts), TIMEOUT_S)
            assert isinstance(waiting, Record)
            assert waiting.fact == JobWaiting(0, 1)
        await cluster.start("c")
        await cluster.wait_for_world("c")
        completed = (await cluster.facts(RescaleCompleted))[-1]
        assert (completed.step, cluster["c"].entered[-1], cluster["c"].steps[0].step) == (
            0,
            (completed.delta.generation, 0),
            0,
        )
        assert "no worker of world" in completed.reason

    async def test_deaths_beyond_the_failure_budget_abort_the_job(
        self, fork_server: ForkServer, tmp_path: Path
    ) -> None:
        async with cluster_on(fork_server, tmp_path, failure_tolerance_percentage=20) as cluster:
            await cluster.start_together("a", "b", "c")
            async with cluster.client() as client, client.facts(JobAborted, jobs=[JOB]) as facts:
                for name in "abc":
                    cluster[name].kill()
                aborted = await asyncio.wait_for(anext(facts), TIMEOUT_S)
            assert isinstance(aborted, Record)
            assert isinstance(aborted.fact, JobAborted)
            assert "workers failed; limit 1" in aborted.fact.reason
            await cluster.start("d")
            await cluster.until(lambda: cluster["d"].code is not None)
            assert cluster["d"].code == 1
            assert "job run is aborted" in cluster["d"].output


class TestKilledDaemon:
    @pytest.mark.parametrize("victim_name", ["a", "c"], ids=["member", "joiner"])
    @pytest.mark.parametrize("point", ["stopping", "stopped", "entering"])
    async def test_rescale_completes_after_the_daemon_dies_at_any_stage(
        self, point: str, victim_name: str, cluster: TrainingCluster
    ) -> None:
        await self._killed_at(cluster, point, victim_name)

    @pytest.mark.parametrize("point", ["joining", "joined", "having the state", "ready"])
    async def test_join_completes_after_the_daemon_dies_at_any_request(
        self, point: str, cluster: TrainingCluster
    ) -> None:
        await self._killed_at(cluster, point, "c")

    async def _killed_at(self, cluster: TrainingCluster, point: str, victim_name: str) -> None:
        await cluster.start_in_order("a", "b", victim=victim_name, at=point, action="hold")
        cluster.arm()
        await cluster.start("c", at=point if victim_name == "c" else "", action="hold")
        await cluster.until(lambda: cluster[victim_name].held == 1)
        await cluster.daemon.kill()
        cluster[victim_name].release()
        await cluster.daemon.start()
        await cluster.wait_for_world("a", "b", "c")
        assert await cluster.facts(WorkerFailed) == []
        await cluster.finish("a", "b", "c")

    async def test_training_continues_without_the_daemon_and_no_worker_fails_after_its_restart(
        self, cluster: TrainingCluster
    ) -> None:
        await cluster.start_together("a", "b", "c")
        generation = cluster["a"].steps[-1].generation
        await cluster.daemon.kill()
        await cluster.wait_for_steps("a", "b", "c", steps=100)
        await cluster.daemon.start()
        await cluster.wait_for_steps("a", "b", "c")
        assert {cluster[name].steps[-1].generation for name in "abc"} == {generation}
        assert await cluster.facts(WorkerFailed) == []
        await cluster.finish("a", "b", "c")

    @pytest.mark.parametrize("victim", ["a", "b"], ids=["hub", "member"])
    @pytest.mark.parametrize("first", ["worker", "daemon"])
    async def test_worker_that_dies_with_the_daemon_is_reported_failed(
        self, first: str, victim: str, cluster: TrainingCluster
    ) -> None:
        await cluster.start_together("a", "b", "c")
        if first == "worker":
            cluster[victim].kill()
            await cluster.daemon.kill()
        else:
            await cluster.daemon.kill()
            cluster[victim].kill()
        await cluster.wait_until_killed(victim)
        await cluster.daemon.start()
        survivors = [name for name in "abc" if name != victim]
        await cluster.wait_for_world(*survivors)
        (failed,) = await cluster.facts(WorkerFailed)
        assert failed.worker_id == victim
        await cluster.finish(*survivors)


class TestStandstill:
    """A worker dies while the daemon is away."""

    @pytest.mark.parametrize("victim", ["a", "b"], ids=["hub", "member"])
    async def test_survivors_report_the_standstill_and_train_on_when_the_daemon_is_back(
        self, victim: str, cluster: TrainingCluster
    ) -> None:
        await cluster.start("a", "b")
        await cluster.start("c", script="async_worker_script")
        await cluster.wait_for_world("a", "b", "c")
        cluster["c"].end_child()
        survivors = [name for name in "abc" if name != victim]
        await cluster.daemon.kill()
        await cluster.wait_for_steps("a", "b", "c")
        assert not any(cluster[name].standstills for name in "abc"), "a world trains without the daemon"
        cluster[victim].kill()
        await cluster.wait_until_killed(victim)
        await cluster.until(lambda: all(cluster[name].standstills == [(victim, None)] for name in survivors))
        await cluster.daemon.start()
        await cluster.wait_for_world(*survivors)
        await self._check_reports(cluster, victim, *survivors)
        await cluster.finish(*survivors)

    async def test_last_survivor_reports_the_standstill(self, cluster: TrainingCluster) -> None:
        await cluster.start_together("a", "b")
        await cluster.daemon.kill()
        cluster["a"].kill()
        await cluster.until(lambda: cluster["b"].standstills == [("a", None)])
        await cluster.daemon.start()
        await cluster.wait_for_world("b")
        await self._check_reports(cluster, "a", "b")
        await cluster.finish("b")

    async def test_daemon_that_dies_after_the_world_has_broken_is_reported(self, cluster: TrainingCluster) -> None:
        await cluster.start_in_order("a", "b", "c", victim="a", at="stopping", action="hold")
        cluster.arm()
        cluster["b"].kill()
        await cluster.until(lambda: cluster["a"].held == 1)
        assert not cluster["a"].standstills
        await cluster.daemon.kill()
        await cluster.until(lambda: all(cluster[name].standstills == [("b", None)] for name in "ac"))
        cluster["a"].release()
        await cluster.daemon.start()
        await cluster.wait_for_world("a", "c")
        await self._check_reports(cluster, "b", "a", "c")
        await cluster.finish("a", "c")

    async def _check_reports(self, cluster: TrainingCluster, victim: str, *survivors: str) -> None:
        """Each survivor has said twice what happens to it, and the daemon has recorded it once."""
        async with cluster.client() as client:
            for name in survivors:
                await wait_for_fact(client, WorkerStoodStill, name)
        facts = {fact.worker_id: fact for fact in await cluster.facts(WorkerStoodStill)}
        assert len(await cluster.facts(WorkerStoodStill)) == len(survivors)
        for name in survivors:
            begin, (peer, lasted_s) = cluster[name].standstills
            assert (begin, peer, facts[name].peer) == ((victim, None), victim, victim)
            assert lasted_s is not None
            assert facts[name].for_s == round(lasted_s, 1)
            begins, ends = (line for line in cluster[name].output.splitlines() if "stand" in line)
            assert "training stands still until the daemon is back" in begins
            assert f"no committed step is lost (lost_peer={victim}, daemon_away_since=" in begins
            assert f"the standstill is over (lasted_s={round(lasted_s, 1)}, reason=the daemon is back)" in ends


class TestStalledWorker:
    @pytest.mark.parametrize("way", ["stopped", "holding the GIL"])
    async def test_worker_stalled_beyond_the_timeouts_is_reported_and_has_not_failed(
        self, way: str, fork_server: ForkServer, tmp_path: Path
    ) -> None:
        """The pulse reports for a worker that holds the GIL."""
        async with cluster_on(fork_server, tmp_path, **SHORT_TIMEOUTS) as cluster, cluster.client() as client:
            await cluster.start("a", "c")
            await cluster.start("b", gil_s=3 if way == "holding the GIL" else 0)
            await cluster.wait_for_world("a", "b", "c")
            cluster.arm()
            if way == "stopped":
                cluster["b"].kill(signal.SIGSTOP)
            await wait_for_fact(client, WorkerStalled, "b")
            if way == "stopped":
                await asyncio.sleep(2 * SHORT_TIMEOUTS["worker_heartbeat_timeout_ms"] / 1000)
                cluster["b"].kill(signal.SIGCONT)
            await wait_for_fact(client, WorkerRecovered, "b")
            await cluster.wait_for_steps("a", "b", "c")
            assert {fact.worker_id for fact in await cluster.facts(WorkerStalled)} == {"b"}
            assert await cluster.facts(WorkerFailed) == []
            assert len({cluster[name].steps[-1].generation for name in "abc"}) == 1
            await cluster.finish("a", "b", "c")

    async def test_worker_stalled_beyond_a_shortened_timeout_has_not_failed(
        self, fork_server: ForkServer, tmp_path: Path
    ) -> None:
        """Also for a worker that has not received the change yet, and for one whose pulse must report more often."""
        async with cluster_on(fork_server, tmp_path, stall_timeout_ms=500) as cluster, cluster.client() as client:
            await cluster.start("a", "c")
            await cluster.start("b", gil_s=2)
            await cluster.wait_for_world("a", "b", "c")
            cluster["a"].kill(signal.SIGSTOP)
            job = await client.request(ShowJob(JOB))
            settings = {**job.settings, "worker_heartbeat_timeout_ms": 400}
            await client.request(ChangeJob(JOB, settings, job.version))
            await asyncio.sleep(2)
            cluster["a"].kill(signal.SIGCONT)
            await cluster.wait_for_steps("a", "b", "c")
            cluster.arm()
            await wait_for_fact(client, WorkerRecovered, "b")
            await cluster.wait_for_steps("a", "b", "c")
            assert await cluster.facts(WorkerFailed) == []
            await cluster.finish("a", "b", "c")

    async def test_stall_below_the_timeouts_is_not_reported(self, cluster: TrainingCluster) -> None:
        await cluster.start_together("a", "b", "c")
        generation = cluster["a"].steps[-1].generation
        for name in "abc":
            cluster[name].kill(signal.SIGSTOP)
            await asyncio.sleep(0.3)
            cluster[name].kill(signal.SIGCONT)
            await cluster.wait_for_steps("a", "b", "c")
        assert {cluster[name].steps[-1].generation for name in "abc"} == {generation}
        assert await cluster.facts(WorkerStalled, WorkerFailed) == []
        await cluster.finish("a", "b", "c")

    @pytest.mark.parametrize("victim", ["a", "b"], ids=["hub", "member"])
    async def test_worker_stopped_with_its_pulse_fails_and_ends_when_resumed(
        self, victim: str, fork_server: ForkServer, tmp_path: Path
    ) -> None:
        async with cluster_on(fork_server, tmp_path, **SHORT_TIMEOUTS) as cluster, cluster.client() as client:
            await cluster.start_together("a", "b", "c")
            pulse = cluster[victim].pulse
            os.kill(pulse, signal.SIGSTOP)
            cluster[victim].kill(signal.SIGSTOP)
            await wait_for_fact(client, WorkerFailed, victim)
            survivors = [name for name in "abc" if name != victim]
            await cluster.wait_for_world(*survivors)
            os.kill(pulse, signal.SIGCONT)
            cluster[victim].kill(signal.SIGCONT)
            await cluster.until(lambda: cluster[victim].code is not None)
            assert cluster[victim].code == 1
            assert "WorkerEvicted" in cluster[victim].output
            (failed,) = await cluster.facts(WorkerFailed)
            assert failed.reason.startswith("no heartbeat and no pulse for")
            await cluster.finish(*survivors)

    async def test_a_stalled_worker_is_evicted_if_configured(self, fork_server: ForkServer, tmp_path: Path) -> None:
        settings = {"evict_stalled": True, **SHORT_TIMEOUTS, "stall_timeout_ms": 2_000}
        async with cluster_on(fork_server, tmp_path, **settings) as cluster, cluster.client() as client:
            await cluster.start_together("a", "b", "c")
            cluster["b"].kill(signal.SIGSTOP)
            await wait_for_fact(client, WorkerFailed, "b")
            await cluster.wait_for_world("a", "c")
            cluster["b"].kill(signal.SIGCONT)
            await cluster.until(lambda: cluster["b"].code is not None)
            assert "alive, but no progress for" in cluster["b"].output
            await cluster.finish("a", "c")


class TestAsyncScript:
    """Workers in scripts with an event loop; each script has forked a child that outlives it."""

    async def _start_with_async_worker(self, cluster: TrainingCluster, **options: Any) -> None:
        await cluster.start("a")
        await cluster.start("b", script="async_worker_script", **options)
        await cluster.wait_for_world("a", "b")

    async def test_async_worker_that_holds_the_gil_has_not_failed(
        self, fork_server: ForkServer, tmp_path: Path
    ) -> None:
        async with cluster_on(fork_server, tmp_path, **SHORT_TIMEOUTS) as cluster, cluster.client() as client:
            await self._start_with_async_worker(cluster, gil_s=3)
            cluster.arm()
            await wait_for_fact(client, WorkerStalled, "b")
            await wait_for_fact(client, WorkerRecovered, "b")
            await cluster.wait_for_steps("a", "b")
            assert await cluster.facts(WorkerFailed) == []
            cluster["b"].end_child()
            await cluster.finish("a", "b")

    async def test_killed_async_worker_fails_at_once_while_its_child_lives(self, cluster: TrainingCluster) -> None:
        """The pulse reports the end or the probe is refused, so no grace period passes."""
        async with cluster.client() as client:
            await cluster.start("b", script="async_worker_script")
            await cluster.wait_for_world("b")
            cluster["b"].kill()
            await wait_for_fact(client, WorkerFailed, "b")
        (failed,) = await cluster.facts(WorkerFailed)
        assert failed.reason.startswith("its process ") or failed.reason.endswith(" refuses connections")
        assert cluster["b"].child is not None
        os.kill(cluster["b"].child, 0)
        cluster["b"].end_child()
        await cluster.wait_until_killed("b")

    async def test_async_worker_leaves_after_its_step_on_sigterm(self, cluster: TrainingCluster) -> None:
        await self._start_with_async_worker(cluster)
        cluster["b"].end_child()
        cluster["b"].kill(signal.SIGTERM)
        await cluster.until(lambda: cluster["b"].code is not None)
        assert (cluster["b"].code, cluster["b"].finished) == (0, cluster["b"].steps[-1].step + 1)
        await cluster.wait_for_world("a")
        assert [fact.reason for fact in await cluster.facts(WorkerLeft)] == ["it received SIGTERM"]
        assert await cluster.facts(WorkerFailed) == []
        await cluster.finish("a")
