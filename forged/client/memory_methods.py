"""The requests of the memory service as typed methods.

Each method is one request, one per page of a list, or one per batch. Types of the service are imported only by the
methods that use them, so that clients start faster.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from forged.client.methods import DaemonMethods

if TYPE_CHECKING:
    from forged.memory.messages import (
        Allocated,
        CompactionPlan,
        DeviceView,
        FitPlace,
        Handle,
        HeldBlock,
        OffsetPlanView,
        Wanted,
    )
    from forged.memory.model import GpuDevice, PlannedBlock

ANSWER_S = 30.0
"""How long the answer may take after the wait for memory."""


class MemoryMethods(DaemonMethods):
    """What clients ask the memory service. A device is named `WORKER/DEVICE`."""

    async def register_device(self, job: str, worker_id: str, incarnation: bytes, device: GpuDevice) -> DeviceView:
        """Register a device of a worker; the same again is no error."""
        from forged.memory.messages import RegisterDevice

        return await self.request(RegisterDevice(job, worker_id, incarnation, device))

    async def plan_offsets(
        self, job: str, worker_id: str, incarnation: bytes, device: str, blocks: Sequence[PlannedBlock]
    ) -> OffsetPlanView:
        """Plan the offsets of the worker's blocks on its own device, in place of an earlier plan; none ends it."""
        from forged.memory.messages import PLAN_PAGE_MAX, PlanOffsets

        start = 0
        while True:
            page = list(blocks[start : start + PLAN_PAGE_MAX])
            view = await self.request(PlanOffsets(job, worker_id, incarnation, device, page, start))
            start += len(page)
            if start >= len(blocks):
                return view

    async def allocate_memory(
        self,
        job: str,
        worker_id: str,
        incarnation: bytes,
        device: str,
        wanted: Sequence[Wanted],
        *,
        all_or_none: bool = False,
        evict: bool = True,
        wait_s: float = 0.0,
    ) -> list[Allocated]:
        """Allocate blocks, and wait up to `wait_s` for those that do not fit; a name that exists gets its block."""
        from forged.memory.messages import AllocateMemory

        request = AllocateMemory(
            job, worker_id, incarnation, device, list(wanted), all_or_none=all_or_none, evict=evict, wait_s=wait_s
        )
        return await self.request(request, timeout_s=wait_s + ANSWER_S if wait_s else None)

    async def free_memory(
        self, job: str, worker_id: str, incarnation: bytes, device: str, handles: Sequence[Handle]
    ) -> None:
        """Free blocks: all or none."""
        from forged.memory.messages import FreeMemory

        await self.request(FreeMemory(job, worker_id, incarnation, device, list(handles)))

    async def change_blocks(
        self,
        job: str,
        worker_id: str,
        incarnation: bytes,
        device: str,
        handles: Sequence[Handle],
        change: str,
        *,
        content: str | None = None,
    ) -> None:
        """Change blocks by `pin`, `unpin`, `cache`, `use` or `touch`: all or none."""
        from forged.memory.messages import ChangeBlocks

        await self.request(ChangeBlocks(job, worker_id, incarnation, device, list(handles), change, content))

    async def assert_blocks(
        self,
        job: str,
        worker_id: str,
        incarnation: bytes,
        device: str,
        blocks: Sequence[HeldBlock],
        *,
        elsewhere: Sequence[str] = (),
    ) -> list[Handle]:
        """Assert all blocks that a worker holds on a device, after the daemon has restarted.

        The handles of those that it has from now on. `elsewhere`: the devices of other workers on which it has still to
        assert its blocks after it has on its own ones.
        """
        from forged.memory.messages import BATCH_MAX, AssertBlocks

        handles: list[Handle] = []
        for start in range(0, max(len(blocks), 1), BATCH_MAX):
            page = list(blocks[start : start + BATCH_MAX])
            more = start + BATCH_MAX < len(blocks)
            handles += await self.request(AssertBlocks(job, worker_id, incarnation, device, page, more, [*elsewhere]))
        return handles

    async def plan_compaction(
        self,
        job: str,
        device: str,
        *,
        hole: int = 0,
        bytes_max: int = 1 << 30,
        moves_max: int = 64,
        dry_run: bool = False,
    ) -> CompactionPlan:
        """Plan moves that open a hole of so many bytes (0: the largest); an open plan is returned as it is."""
        from forged.memory.messages import PlanCompaction

        return await self.request(PlanCompaction(job, device, hole, bytes_max, moves_max, dry_run))

    async def commit_move(
        self, job: str, worker_id: str, incarnation: bytes, device: str, epoch: int, number: int
    ) -> Handle:
        """Tell that a block is copied; its new handle."""
        from forged.memory.messages import CommitMove

        return await self.request(CommitMove(job, worker_id, incarnation, device, epoch, number))

    async def memory_devices(self, job: str) -> AsyncIterator[DeviceView]:
        """The devices of a job, by name."""
        from forged.memory.messages import ListDevices

        after, more = "", True
        while more:
            page = await self.request(ListDevices(job, after))
            for one in page.devices:
                yield one
                after = one.name
            more = page.more

    async def memory_blocks(self, job: str, device: str, start: int = 0) -> AsyncIterator[HeldBlock]:
        """The blocks of a device by offset, free ones too, from the one that has the byte at `start` on."""
        from forged.memory.messages import ListBlocks

        more = True
        while more:
            page = await self.request(ListBlocks(job, device, start))
            for one in page.blocks:
                yield one
                start = one.block.offset + one.block.size
            more = page.more

    async def find_fit(self, job: str, size: int, alignment: int = 256, *, limit: int = 20) -> list[FitPlace]:
        """Where in the job's devices a block would go, the cheapest first."""
        from forged.memory.messages import FindFit

        return await self.request(FindFit(job, size, alignment, limit))
