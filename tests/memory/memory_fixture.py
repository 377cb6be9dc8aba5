"""A daemon's kernel with the memory service on virtual time; the workers of jobs are given by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio

from forged.auth.model import Principal, Role
from forged.elastic.messages import WorkerFailed
from forged.jobs.model import SettingValue
from forged.kernel.messages import Call, Decision, Fact, Fence, Request
from forged.log import SILENT, Log
from forged.memory.book.device import Device
from forged.memory.book.device_table import MemoryLimits
from forged.memory.messages import (
    Allocated,
    AllocateMemory,
    AssertBlocks,
    BlockPage,
    ChangeBlocks,
    CommitMove,
    DeviceView,
    FreeMemory,
    Handle,
    HeldBlock,
    ListBlocks,
    ListDevices,
    RegisterDevice,
    Wanted,
)
from forged.memory.model import AllocationRequest, GpuDevice
from forged.memory.pool.validation import validate
from forged.memory.ports import EvictionPort, WorkersPort
from forged.memory.service import MemoryService
from tests.kernel_fixture import Kernel, running

F = TypeVar("F", bound=Fact)

JOB = "run"
TENANT = Principal("a trainer", Role.WORKER, frozenset({JOB}))
INCARNATION = b"1" * 16
GPU = "w0/gpu0"
KIB = 1 << 10
WORKERS = ("w0", "w1", "w2")


class MemoryDaemon:
    """The kernel, the memory service, and the workers that it takes for registered."""

    def __init__(self, kernel: Kernel, at_start: Sequence[str], limits: MemoryLimits | None, log: Log) -> None:
        self.kernel = kernel
        self.at_start = {JOB: [(worker, INCARNATION) for worker in at_start]}
        self.workers = {(JOB, worker): INCARNATION for worker in WORKERS}
        port = WorkersPort(
            lambda job, worker_id, incarnation: self.workers.get((job, worker_id)) == incarnation,
            lambda: self.at_start,
        )
        self.settings: dict[str, SettingValue] = {}
        """Of the job."""
        self.saved: set[str] = set()
        """The checkpoints of the job that are complete."""
        eviction = EvictionPort(lambda job: self.settings, lambda job, content: content in self.saved)
        self.service = MemoryService(kernel.bus, kernel.clock, port, eviction, limits=limits, log=log)
        kernel.ledger.register(self.service)
        kernel.bus.dispatcher.fence_of = lambda job: Fence(1, 0) if job == JOB else None

    @property
    def devices(self) -> list[Device]:
        return list(self.service.table.devices())

    def device(self, name: str = GPU) -> Device:
        return self.service.table.device(JOB, name)

    async def ask(self, request: Request[Any], by: Principal = TENANT) -> Any:
        answer = await self.kernel.bus.ask(request, Call(by, "a test"))
        self.check()
        return answer

    def check(self) -> None:
        """All pools are consistent, and what is counted is what there is."""
        table = self.service.table
        for device in self.devices:
            validate(device.core)
        ids = {
            device.name: {one.block_id for one in device.core.stretches() if one.block_id} for device in self.devices
        }
        counted = {
            (device.name, one) for owner in table.owners.values() for device, of in owner.blocks.items() for one in of
        }
        assert counted == {(name, one) for name, found in ids.items() for one in found}
        planned = sum(len(device.offset_plan.places) for device in self.devices if device.offset_plan is not None)
        assert table.block_shares.used == len(counted) + planned
        assert table.device_shares.used == len(self.devices)

    async def register(self, worker: str = "w0", device: str = "gpu0", total: int = 64 * KIB) -> DeviceView:
        view: DeviceView = await self.ask(RegisterDevice(JOB, worker, INCARNATION, GpuDevice(device, total)))
        return view

    async def allocate(self, *blocks: Wanted, worker: str = "w0", device: str = GPU, **more: Any) -> list[Allocated]:
        request = AllocateMemory(JOB, worker, INCARNATION, device, list(blocks), **more)
        allocated: list[Allocated] = await self.ask(request)
        return allocated

    async def take(self, name: str, size: int, worker: str = "w0", **more: Any) -> Allocated:
        (allocated,) = await self.allocate(wanted(name, size, **more), worker=worker)
        assert allocated.handle is not None, allocated.shortage
        return allocated

    async def free(self, *handles: Handle, worker: str = "w0", device: str = GPU) -> None:
        await self.ask(FreeMemory(JOB, worker, INCARNATION, device, list(handles)))

    async def change(self, change: str, *handles: Handle, worker: str = "w0", **more: Any) -> None:
        await self.ask(ChangeBlocks(JOB, worker, INCARNATION, GPU, list(handles), change, **more))

    async def commit(self, epoch: int, number: int, worker: str = "w0") -> Handle:
        handle: Handle = await self.ask(CommitMove(JOB, worker, INCARNATION, GPU, epoch, number))
        return handle

    async def assert_blocks(self, *blocks: HeldBlock, worker: str = "w0", device: str = GPU, **more: Any) -> Any:
        return await self.ask(AssertBlocks(JOB, worker, INCARNATION, device, list(blocks), **more))

    async def blocks(self, device: str = GPU) -> list[HeldBlock]:
        """All blocks that are held."""
        page: BlockPage = await self.ask(ListBlocks(JOB, device))
        return [held for held in page.blocks if held.worker_id]

    async def names(self, device: str = GPU) -> list[str]:
        return [held.block.block_id for held in await self.blocks(device)]

    async def view(self) -> DeviceView:
        page = await self.ask(ListDevices(JOB))
        view: DeviceView = page.devices[0]
        return view

    async def fail(self, worker: str) -> None:
        """The worker fails: it is registered no more, and its fact is handled."""
        del self.workers[JOB, worker]
        await self.tell(WorkerFailed(worker, 0, "killed"))

    async def tell(self, fact: Fact) -> None:
        await self.kernel.ledger.append(Decision(None, (fact,), job=JOB), origin="a test").wait()
        await self.kernel.settle()
        self.check()

    async def facts(self, kind: type[F]) -> list[F]:
        await self.kernel.settle()
        return self.kernel.facts(kind)


def wanted(
    name: str, size: int, alignment: int = 256, *, pinned: bool = False, priority: int = 0, **more: Any
) -> Wanted:
    return Wanted(name, AllocationRequest(f"tensor of {name}", size, alignment, pinned, priority), **more)


@asynccontextmanager
async def memory_daemon(
    at_start: Sequence[str] = (),
    limits: MemoryLimits | None = None,
    *,
    log: Log = SILENT,
    extend: Callable[[Kernel], object] = lambda kernel: None,
) -> AsyncIterator[MemoryDaemon]:
    """A running memory service; the workers `at_start` were registered before it started."""
    made: list[MemoryDaemon] = []

    def register(kernel: Kernel) -> None:
        made.append(MemoryDaemon(kernel, at_start, limits, log))
        extend(kernel)

    async with running(None, register), anyio.create_task_group() as tasks:
        await tasks.start(made[0].service.run)
        yield made[0]
        made[0].check()
        tasks.cancel_scope.cancel()
