"""Planned offsets of a device: what is foreseen gets its place, and the rest stays out of the way."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest

from forged.errors import ForgedError
from forged.memory.book.device_table import MemoryLimits
from forged.memory.messages import Allocated, AllocateMemory, OffsetPlanView, PlanOffsets
from forged.memory.model import PlannedBlock
from forged.memory.traces import Buffer, events, plan, planned_blocks
from tests.kernel_fixture import on_virtual_time
from tests.memory.memory_fixture import GPU, INCARNATION, JOB, KIB, MemoryDaemon, memory_daemon, wanted


def random_buffers(count: int) -> list[Buffer]:
    source = random.Random(7)
    lives = ((lower := source.randrange(100), lower + source.randint(1, 30)) for _ in range(count))
    return [Buffer(number, *life, source.randint(1, 4000)) for number, life in enumerate(lives)]


async def plan_offsets(
    memory: MemoryDaemon, blocks: Iterable[PlannedBlock], start: int = 0, worker: str = "w0", device: str = GPU
) -> OffsetPlanView:
    view: OffsetPlanView = await memory.ask(PlanOffsets(JOB, worker, INCARNATION, device, list(blocks), start))
    return view


async def refused(code: str, memory: MemoryDaemon, *blocks: PlannedBlock, start: int = 0, worker: str = "w0") -> None:
    with pytest.raises(ForgedError) as caught:
        await plan_offsets(memory, blocks, start, worker)
    assert caught.value.code == code


async def run_trace(memory: MemoryDaemon, buffers: Sequence[Buffer]) -> dict[int | str, Allocated]:
    """The blocks that the buffers get, each freed at the end of its life."""
    got: dict[int | str, Allocated] = {}
    for event in events(buffers):
        if event.is_allocation:
            got[event.buffer.id] = await memory.take(f"{event.buffer.id}", event.buffer.size)
        else:
            handle = got[event.buffer.id].handle
            assert handle is not None
            await memory.free(handle)
    return got


@on_virtual_time
async def test_every_block_of_a_planned_trace_gets_its_offset_again_and_again() -> None:
    buffers = random_buffers(200)
    packing = plan(buffers, alignment=256)
    async with memory_daemon() as memory:
        await memory.register(total=packing.height)
        await plan_offsets(memory, planned_blocks(buffers, packing))
        for _ in range(2):
            got = await run_trace(memory, buffers)
            assert {name: one.offset for name, one in got.items()} == packing.offsets
        view = (await memory.view()).offset_plan
        assert view is not None
        assert (view.blocks, view.placed, view.missed) == (200, 400, 0)


@on_virtual_time
async def test_blocks_that_are_not_foreseen_stay_above_the_plan_while_there_is_room() -> None:
    async with memory_daemon() as memory:
        await memory.register()
        await plan_offsets(memory, [PlannedBlock("a", 0, 8 * KIB), PlannedBlock("b", 8 * KIB, 8 * KIB)])
        assert (await memory.take("other", 4 * KIB)).offset == 16 * KIB
        assert (await memory.take("theirs", 4 * KIB, worker="w1")).offset == 20 * KIB
        assert (await memory.take("b", 8 * KIB)).offset == 8 * KIB
        assert (await memory.take("large", 40 * KIB)).offset == 24 * KIB
        assert (await memory.take("below", 4 * KIB)).offset == 0
        # Its place is taken, and nothing else is free above the plan.
        (missed,) = await memory.allocate(wanted("a", 4 * KIB))
        assert missed.offset == 4 * KIB
        view = (await memory.view()).offset_plan
        assert view is not None
        assert (view.placed, view.missed) == (1, 1)


@on_virtual_time
async def test_a_block_that_differs_from_its_plan_goes_elsewhere() -> None:
    async with memory_daemon() as memory:
        await memory.register()
        await plan_offsets(memory, [PlannedBlock("large", 0, 4 * KIB), PlannedBlock("odd", 4 * KIB + 1, 4 * KIB)])
        assert (await memory.take("large", 5 * KIB)).offset == 8 * KIB + 256
        odd = await memory.take("odd", KIB)
        assert odd.offset % 256 == 0
        # The names of another worker are its own.
        assert (await memory.take("large", KIB, worker="w1")).offset > 4 * KIB
        # A smaller one has room in its place.
        handle = (await memory.blocks())[0].handle
        await memory.free(handle)
        assert (await memory.take("large", 2 * KIB)).offset == 0


@on_virtual_time
async def test_batches_waits_and_cached_blocks_follow_the_plan() -> None:
    async with memory_daemon() as memory:
        await memory.register()
        await plan_offsets(memory, [PlannedBlock(f"b{n}", (3 - n) * 16 * KIB, 16 * KIB) for n in range(4)])
        replies = await memory.allocate(*(wanted(f"b{n}", 16 * KIB, cached=True) for n in range(4)))
        assert [one.offset for one in replies] == [48 * KIB, 32 * KIB, 16 * KIB, 0]
        (evicting,) = await memory.allocate(wanted("new", 16 * KIB))
        assert evicting.evicted == ["w0:b3"]
        assert evicting.handle is not None
        await memory.free(evicting.handle)
        (again,) = await memory.allocate(wanted("b3", 16 * KIB))
        assert again.offset == 0


@on_virtual_time
async def test_a_plan_in_pages_counts_as_blocks_until_it_is_replaced() -> None:
    async with memory_daemon(limits=MemoryLimits(blocks_max=8, principal_blocks_max=8)) as memory:
        table = memory.service.table
        await memory.register()
        blocks = [PlannedBlock(f"b{n}", n * KIB, KIB) for n in range(6)]
        assert (await plan_offsets(memory, blocks[:3])).blocks == 3
        assert (await plan_offsets(memory, blocks[3:], 3)).blocks == 6
        # A page that is repeated changes nothing.
        assert (await plan_offsets(memory, blocks[3:], 3)).blocks == 6
        assert table.block_shares.used == 6
        await refused("memory_argument_invalid", memory, blocks[0], start=9)
        await refused("memory_blocks_full", memory, *(PlannedBlock(f"c{n}", 0, 1) for n in range(9)))
        assert table.block_shares.used == 6
        assert (await plan_offsets(memory, blocks[:2])).blocks == 2
        assert table.block_shares.used == 2
        assert (await plan_offsets(memory, [])).blocks == 0
        assert (await memory.view()).offset_plan is None
        await plan_offsets(memory, blocks)
        await memory.fail("w0")
        assert table.block_shares.used == 0


@on_virtual_time
async def test_a_plan_that_cannot_be_is_refused_and_changes_nothing() -> None:
    async with memory_daemon() as memory:
        await memory.register()
        await plan_offsets(memory, [PlannedBlock("a", 0, KIB)])
        for block in (
            PlannedBlock("", 0, 1),
            PlannedBlock("b", 0, 0),
            PlannedBlock("b", -1, 1),
            PlannedBlock("b", 64 * KIB, 1),
            PlannedBlock("b", 1, 64 * KIB),
            PlannedBlock("b", (1 << 63) - 1, (1 << 63) - 1),
        ):
            await refused("memory_argument_invalid", memory, PlannedBlock("c", 0, 1), block)
        await refused("memory_device_of_another", memory, PlannedBlock("b", 0, 1), worker="w1")
        assert (await memory.view()).offset_plan == OffsetPlanView(1, KIB, 0, 0)


@on_virtual_time
async def test_a_device_of_another_size_has_no_plan() -> None:
    async with memory_daemon() as memory:
        await memory.register()
        await plan_offsets(memory, [PlannedBlock("a", 60 * KIB, KIB)])
        await memory.register(total=32 * KIB)
        assert (await memory.take("a", KIB)).offset == 0
        assert memory.service.table.block_shares.used == 1


@on_virtual_time
async def test_the_work_for_a_planned_block_is_bounded() -> None:
    """A place behind many blocks that no plan foresees is not found, and the block goes elsewhere."""
    async with memory_daemon() as memory:
        await memory.register(total=128 * KIB)
        for start in (0, 200):
            await memory.allocate(*(wanted(f"x{start + n}", 256) for n in range(200)))
        await plan_offsets(memory, [PlannedBlock("a", 101 * KIB, KIB)])
        request = AllocateMemory(JOB, "w0", INCARNATION, GPU, [wanted("a", KIB)])
        (reply,) = await memory.ask(request)
        assert reply.offset == 102 * KIB
