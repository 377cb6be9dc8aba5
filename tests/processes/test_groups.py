"""Replica groups in real processes: a killed process, a killed group, and replacements that take their parts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from forged.elastic.messages import GroupBroken, ProgressLost, RescaleCompleted
from forged.elastic.model import ClusterTopology
from tests.processes.fork_server import ForkServer
from tests.processes.training_cluster import TrainingCluster, WorkerProcess, cluster_on

GROUP_SIZE = 2


@pytest.fixture
async def cluster(fork_server: ForkServer, tmp_path: Path) -> AsyncIterator[TrainingCluster]:
    async with cluster_on(fork_server, tmp_path) as cluster:
        yield cluster


async def start(cluster: TrainingCluster, *names: str) -> None:
    """Start workers; `a1` is rank 1 of group `a`, and so is `a1-2`."""
    for name in names:
        place = {"group": name[0], "group_rank": int(name[1]), "group_size": GROUP_SIZE}
        words = (cluster.endpoint, name, str(cluster.directory), json.dumps(place | {"config": cluster.settings}))
        worker = cluster.workers[name] = WorkerProcess(name, cluster.directory)
        await cluster.start_process(worker, "group_worker_script", *words)


async def worlds(cluster: TrainingCluster) -> list[list[str]]:
    """The members of all worlds, by rank."""
    topology, found = ClusterTopology(), []
    for completed in await cluster.facts(RescaleCompleted):
        topology = topology.apply(completed.delta)
        found.append([worker.id for worker in topology.workers])
    return found


async def test_killed_process_takes_its_group_out_until_another_takes_its_place(cluster: TrainingCluster) -> None:
    await start(cluster, "a0", "a1", "b0", "b1")
    await cluster.wait_for_world("a0", "a1", "b0", "b1")
    cluster["a1"].kill()
    await cluster.wait_until_killed("a1")
    await cluster.wait_for_world("b0", "b1")
    [broken] = await cluster.facts(GroupBroken)
    assert broken == GroupBroken("a", "a1", ["a0"])
    await start(cluster, "a1-2")
    await cluster.wait_for_world("a0", "a1-2", "b0", "b1")
    await cluster.finish("a0", "a1-2", "b0", "b1")
    assert not await cluster.facts(ProgressLost)
    assert all(
        [(name[0], int(name[1])) for name in world[at : at + 2]] == [(world[at][0], 0), (world[at][0], 1)]
        for world in await worlds(cluster)
        for at in range(0, len(world), GROUP_SIZE)
    )


async def test_killed_group_is_replaced_by_a_new_one(cluster: TrainingCluster) -> None:
    await start(cluster, "a0", "a1", "b0", "b1")
    await cluster.wait_for_world("a0", "a1", "b0", "b1")
    await start(cluster, "c0")
    for name in ("a0", "a1"):
        cluster[name].kill()
    await cluster.wait_until_killed("a0", "a1")
    await cluster.wait_for_world("b0", "b1")
    await start(cluster, "c1")
    await cluster.wait_for_world("b0", "b1", "c0", "c1")
    await cluster.finish("b0", "b1", "c0", "c1")
    assert not await cluster.facts(ProgressLost)
