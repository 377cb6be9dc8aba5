"""Whole worlds on virtual time, over a network that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from random import Random

import anyio
import numpy as np
import pytest

from forged.elastic.model import ClusterTopology, WorkerId
from forged.errors import ForgedError
from forged.worker.collectives.world import World
from forged.worker.errors import CollectiveAborted
from forged.worker.mesh import Mesh
from forged.worker.transport.bulk_channel import LoopBulkTransport
from tests.simulation.environment.links import Faults
from tests.simulation.environment.loop import VirtualClock, run
from tests.simulation.environment.network import HostNetwork, SimulatedNetwork
from tests.worker.meshes import JOB, KEY, buffers, incarnation, random_parts

PORT = 7000
PATIENCE_S = 60.0
SEEDS = range(20)


class Cluster:
    """Meshes on hosts of their own."""

    def __init__(self, size: int, seed: int) -> None:
        loop = asyncio.get_running_loop()
        self.trace: list[str] = []
        self.network = SimulatedNetwork(loop, Random(seed), trace=self.trace.append)
        self.hosts: list[HostNetwork] = [self.network.host(f"h{number}") for number in range(size)]
        self.meshes = [
            Mesh(
                f"w{number}",
                incarnation(number),
                JOB,
                host,
                VirtualClock(loop),
                key=KEY,
                source=Random(f"{seed} {number}"),
                carrier=LoopBulkTransport(),
            )
            for number, host in enumerate(self.hosts)
        ]
        self.workers = [WorkerId(f"w{number}", f"h{number}", PORT) for number in range(size)]
        self.topology = ClusterTopology(tuple(self.workers))

    async def open(self, stack: AsyncExitStack) -> None:
        """Open all doors."""
        for mesh, host in zip(self.meshes, self.hosts, strict=True):
            await stack.enter_async_context(mesh.open(host.name, PORT))

    async def enter(self, generation: int, topology: ClusterTopology | None = None) -> list[World]:
        """Let those of a topology meet."""
        world = topology or self.topology
        members = [self.meshes[self.workers.index(worker)] for worker in world.workers]
        return list(await asyncio.gather(*(mesh.enter(generation, world, PATIENCE_S) for mesh in members)))


def simulate(size: int, story: Callable[[Cluster], Awaitable[None]], seed: int = 1) -> list[str]:
    """Live through a story; returns what the network saw."""
    traces: list[list[str]] = []

    async def main() -> None:
        async with AsyncExitStack() as stack:
            cluster = Cluster(size, seed)
            traces.append(cluster.trace)
            await cluster.open(stack)
            await story(cluster)

    run(main, seed)
    return traces[0]


async def training(cluster: Cluster) -> None:
    """Ten steps with a collective each."""

    async def train(world: World) -> None:
        for step in range(10):
            assert await world.all_reduce(np.array([world.rank, step])) is not None
            assert await world.end_step(step) == 0

    await asyncio.gather(*(train(world) for world in await cluster.enter(1)))


def test_simulated_world_is_deterministic() -> None:
    assert simulate(4, training, 3) == simulate(4, training, 3)


def test_state_is_transferred_over_a_simulated_network() -> None:
    sizes = (0, 10, 300_000)
    parts, got = random_parts(*sizes), buffers(*sizes)

    async def story(cluster: Cluster) -> None:
        with cluster.meshes[0].state_server.offering(1, b"head", parts):
            await cluster.meshes[1].state_fetch.fetch(cluster.workers[0], 1, lambda _: got)

    simulate(2, story)
    assert got == parts


@pytest.mark.parametrize("seed", SEEDS)
def test_process_killed_at_any_moment_is_named_and_the_survivors_continue(seed: int) -> None:
    source = Random(seed)

    async def story(cluster: Cluster) -> None:
        worlds = await cluster.enter(1)
        killed = source.randrange(len(worlds))
        committed: dict[int, int] = {}
        blamed: list[str] = []

        async def train(world: World) -> None:
            for step in range(1000):
                try:
                    await world.all_reduce(np.ones(2))
                    await world.end_step(step)
                except CollectiveAborted as error:
                    blamed.append(error.peer)
                    return
                committed[world.rank] = step

        async with anyio.create_task_group() as tasks:
            for world in worlds:
                if world.rank != killed:
                    tasks.start_soon(train, world)
            with anyio.move_on_after(source.random() * 0.05):
                await train(worlds[killed])
            cluster.network.kill(cluster.hosts[killed])
        # A cancelled call of the killed worker may have been heard before its end was.
        assert set(blamed) <= {f"w{killed}", ""}
        assert len(blamed) >= len(worlds) - 1
        survivors = [step for rank, step in committed.items() if rank != killed]
        assert max(survivors, default=0) - min(survivors, default=0) <= 1
        rest = [worker for rank, worker in enumerate(cluster.workers) if rank != killed]
        again = await cluster.enter(2, ClusterTopology(tuple(rest)))
        assert await asyncio.gather(*(world.all_reduce(1) for world in again)) == [3] * 3

    simulate(4, story, seed)


def test_lost_host_ends_the_world_when_the_kernel_times_out() -> None:
    async def story(cluster: Cluster) -> None:
        cluster.network.links.faults = Faults(keepalive_s=(1.0, 3.0))
        worlds = await cluster.enter(1)
        cluster.network.crash("h2", host_gone=True)
        errors = await asyncio.gather(*(world.barrier() for world in worlds[:2]), return_exceptions=True)
        assert all(isinstance(error, CollectiveAborted) and error.peer == "w2" for error in errors), errors

    simulate(3, story)


def test_collective_with_a_gone_host_ends_at_the_callers_timeout() -> None:
    """The calm network has no keepalive."""

    async def story(cluster: Cluster) -> None:
        worlds = await cluster.enter(1)
        cluster.network.crash("h2", host_gone=True)
        errors = await asyncio.gather(*(world.barrier(timeout_s=5.0) for world in worlds[:2]), return_exceptions=True)
        assert all(isinstance(error, CollectiveAborted) and error.peer == "" for error in errors), errors
        assert asyncio.get_running_loop().time() < 6.0

    simulate(3, story)


def test_members_that_cannot_reach_the_hub_enter_when_they_can() -> None:
    async def story(cluster: Cluster) -> None:
        cluster.network.partition(["h0"], ["h1", "h2"])
        entering = asyncio.ensure_future(cluster.enter(1))
        await asyncio.sleep(8.0)
        assert not entering.done()
        cluster.network.heal()
        await asyncio.gather(*(world.barrier() for world in await entering))

    simulate(3, story)


def test_world_that_cannot_form_fails_at_all_members_in_time() -> None:
    async def story(cluster: Cluster) -> None:
        cluster.network.partition(["h0"], ["h1"])
        outcomes = await asyncio.gather(
            *(mesh.enter(1, cluster.topology, 10.0) for mesh in cluster.meshes), return_exceptions=True
        )
        assert all(isinstance(outcome, ForgedError) for outcome in outcomes), outcomes
        assert asyncio.get_running_loop().time() < 15.0

    simulate(3, story)
