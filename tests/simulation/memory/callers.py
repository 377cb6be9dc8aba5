"""Callers of the memory service that hold nothing: viewers, and a hostile tenant."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import anyio

from forged.errors import RequestRefused, Unavailable
from forged.kernel.messages import Request
from forged.memory.messages import (
    AllocateMemory,
    AssertBlocks,
    ChangeBlocks,
    CommitMove,
    FindFit,
    FreeMemory,
    Handle,
    ListBlocks,
    ListDevices,
    PlanCompaction,
    RegisterDevice,
    Wanted,
)
from forged.memory.model import AllocationRequest, GpuDevice
from tests.simulation.memory.promises import Promise

if TYPE_CHECKING:
    from tests.simulation.memory.simulation import MemorySimulation

PAUSE_S = (0.1, 1.0)
SIZE = 1024


class Viewer:
    """Lists devices and blocks of a job; the oracle judges what it is told."""

    def __init__(self, simulation: MemorySimulation, job: str) -> None:
        self._simulation = simulation
        self._job = job
        self._random = Random(f"viewer {job} {simulation.seed}")

    async def run(self) -> None:
        simulation, random = self._simulation, self._random
        async with simulation.client(f"viewer of {self._job}", self._job) as client:
            while simulation.faults_active:
                await anyio.sleep(random.uniform(*PAUSE_S))
                device = random.choice(simulation.devices_of(self._job))
                requests: tuple[Request[Any], ...] = (
                    ListDevices(self._job),
                    ListBlocks(self._job, device),
                    FindFit(self._job, SIZE * random.randint(1, 6), random.choice((256, 1024))),
                )
                try:
                    await client.request(random.choice(requests))
                except (RequestRefused, Unavailable) as error:
                    simulation.note(f"a viewer got error {error.code}")


class HostileTenant:
    """Has the token of one job, and names the devices and workers of another one."""

    def __init__(self, simulation: MemorySimulation, job: str) -> None:
        self._simulation = simulation
        self._job = job
        self._random = Random(f"hostile tenant {simulation.seed}")

    async def run(self) -> None:
        simulation = self._simulation
        other = next(one.seat.job for one in simulation.workers if one.seat.job != self._job)
        async with simulation.client("hostile", self._job) as client:
            while simulation.faults_active:
                await anyio.sleep(self._random.uniform(*PAUSE_S))
                request = self._random.choice(self._requests(other))
                try:
                    await client.request(request)
                except RequestRefused as error:
                    simulation.meet("a hostile tenant is refused")
                    if error.code != "forbidden":
                        simulation.oracle.broken(Promise.REFUSED, f"a hostile tenant learns {error.code} by {request}")
                except Unavailable as error:
                    simulation.note(f"a hostile tenant got error {error.code}")
                else:
                    simulation.oracle.broken(Promise.REFUSED, f"a hostile tenant may send {request}")

    def _requests(self, job: str) -> tuple[Request[Any], ...]:
        me, device = (job, "w0", self._simulation.incarnation_of(job, "w0")), "w0/gpu0"
        handle = Handle("b1", 1)
        return (
            RegisterDevice(*me, GpuDevice("gpu0", SIZE)),
            AllocateMemory(*me, device, [Wanted("b1", AllocationRequest("tensor", SIZE))]),
            FreeMemory(*me, device, [handle]),
            ChangeBlocks(*me, device, [handle], "pin"),
            AssertBlocks(*me, device, []),
            PlanCompaction(job, device),
            CommitMove(*me, device, 1, 0),
            ListDevices(job),
            ListBlocks(job, device),
            FindFit(job, SIZE),
        )
