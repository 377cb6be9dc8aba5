from __future__ import annotations

from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from forged.auth.model import Principal, Role
from forged.elastic.messages import WorkerLeft
from forged.errors import ForgedError, RequestRefused, Unavailable
from forged.jobs.model import JobRemoved
from forged.memory.book import allocation, compactions, device, device_table, questions
from forged.memory.book.allocation import SEARCHES_MAX
from forged.memory.book.compactions import PLAN_S
from forged.memory.book.device_table import ASSERT_S, MemoryLimits
from forged.memory.messages import (
    Allocated,
    AllocateMemory,
    BlockEvicted,
    BlocksFreed,
    CompactionEnded,
    CompactionPlanned,
    DeviceRegistered,
    DeviceRemoved,
    FindFit,
    Handle,
    ListBlocks,
    ListDevices,
    MemoryPressure,
    OutOfMemory,
    PlanCompaction,
    RegisterDevice,
)
from forged.memory.model import BlockStatus, GpuDevice
from forged.memory.pool import eviction
from forged.memory.pool.core import PoolCore
from forged.memory.pool.eviction import RoomPlan
from forged.memory.waiting import PASSED_S
from tests.kernel_fixture import Kernel, on_virtual_time
from tests.memory.memory_fixture import GPU, INCARNATION, JOB, KIB, MemoryDaemon, memory_daemon, wanted
from tests.telemetry.recording_log import RecordingLog


async def refused(code: str, awaited: Any) -> ForgedError:
    with pytest.raises(ForgedError) as caught:
        await awaited
    assert caught.value.code == code
    return caught.value


async def filled(memory: MemoryDaemon, count: int = 4, worker: str = "w0") -> list[Allocated]:
    """Blocks of equal size that fill the device, by name `b0` and so on."""
    await memory.register()
    size = 64 * KIB // count
    return await memory.allocate(*(wanted(f"b{number}", size) for number in range(count)), worker=worker)


def handles(allocated: list[Allocated]) -> list[Handle]:
    found = [one.handle for one in allocated if one.handle is not None]
    assert len(found) == len(allocated)
    return found


# Devices.


@on_virtual_time
async def test_a_device_is_registered_once() -> None:
    async with memory_daemon() as memory:
        view = await memory.register()
        assert (view.name, view.worker_id, view.is_asserting) == (GPU, "w0", False)
        assert view == await memory.register()
        assert await memory.facts(DeviceRegistered) == [DeviceRegistered(GPU, 64 * KIB)]
        assert (await memory.register(total=128 * KIB)).stats.total_bytes == 128 * KIB
        await memory.take("a", 1)
        await refused("memory_device_changed", memory.register(total=64 * KIB))


@on_virtual_time
async def test_requests_of_others_than_the_registered_worker_are_refused() -> None:
    async with memory_daemon() as memory:
        await memory.register()
        request = AllocateMemory(JOB, "w0", b"2" * 16, GPU, [wanted("a", 1)])
        await refused("worker_gone", memory.ask(request))
        await refused("job_unknown", memory.ask(replace(request, job="other"), Principal("all", Role.OPERATOR)))
        await refused("memory_device_unknown", memory.allocate(wanted("a", 1), device="w0/none"))


@pytest.mark.parametrize(
    "device", [GpuDevice("", 1), GpuDevice("a\n", 1), GpuDevice("gpu", 0), GpuDevice("gpu", 1 << 63)]
)
def test_a_senseless_device_is_refused(device: GpuDevice) -> None:
    @on_virtual_time
    async def check() -> None:
        async with memory_daemon() as memory:
            request = RegisterDevice(JOB, "w0", INCARNATION, device)
            await refused("memory_argument_invalid", memory.ask(request))
            assert not memory.devices

    check()


@on_virtual_time
async def test_a_device_near_2_to_the_63_is_exact() -> None:
    async with memory_daemon() as memory:
        total = (1 << 63) - 1
        await memory.register(total=total)
        allocated = await memory.take("a", total - 1, alignment=1)
        assert allocated.actual_size == total - 1
        assert (await memory.take("b", 1, alignment=1)).offset == total - 1


@on_virtual_time
async def test_limits_of_devices_and_blocks_are_kept() -> None:
    limits = MemoryLimits(8, 1, 80, 2, 80, 1)
    async with memory_daemon(limits=limits) as memory:
        await memory.register()
        await refused("memory_devices_full", memory.register("w1"))
        await refused("memory_blocks_full", memory.allocate(*(wanted(name, 1) for name in "abc")))
        first, _ = await memory.allocate(wanted("a", 1), wanted("b", 1))
        await refused("memory_blocks_full", memory.allocate(wanted("c", 1)))
        assert first.handle is not None
        await memory.free(first.handle)
        await memory.take("c", 1)


# Allocating and freeing.


@on_virtual_time
async def test_the_same_name_gets_the_same_block_and_another_worker_another_one() -> None:
    async with memory_daemon() as memory:
        await memory.register()
        first = await memory.take("a", 1000)
        assert first == await memory.take("a", 1000)
        assert first.actual_size == 1024
        assert (await memory.take("a", 1000, worker="w1")).offset != first.offset
        await refused("memory_name_taken", memory.take("a", 5000))
        assert await memory.names() == ["w0:a", "w1:a"]


@on_virtual_time
async def test_blocks_are_freed_all_or_none() -> None:
    async with memory_daemon() as memory:
        held = handles(await filled(memory))
        await refused("memory_block_unknown", memory.free(held[0], Handle("nobody", 1)))
        await refused("memory_handle_stale", memory.free(held[0], Handle("b1", 7)))
        await refused("memory_argument_invalid", memory.free(held[0], held[0]))
        await refused("memory_block_unknown", memory.free(held[0], worker="w1"))
        assert len(await memory.names()) == 4
        await memory.free(*held)
        await refused("memory_block_unknown", memory.free(held[0]))
        assert await memory.names() == []


@on_virtual_time
async def test_of_a_batch_what_fits_is_allocated_and_the_rest_explained() -> None:
    async with memory_daemon() as memory:
        await memory.register()
        small, large = await memory.allocate(wanted("small", 10 * KIB), wanted("large", 60 * KIB))
        assert small.handle is not None
        assert large.handle is None
        assert large.shortage is not None
        assert (large.shortage.total_free, large.shortage.largest_hole) == (54 * KIB, 54 * KIB)
        assert large.shortage.blocking == ["w0:small"]
        (told,) = await memory.facts(OutOfMemory)
        assert (told.device, told.worker_id, told.tensor_id, told.size) == (GPU, "w0", "tensor of large", 60 * KIB)


@on_virtual_time
async def test_all_or_none_evicts_nothing_if_not_all_fit() -> None:
    async with memory_daemon() as memory:
        await memory.register()
        await memory.take("cached", 32 * KIB, cached=True)
        before = await memory.blocks()
        batch = (wanted("a", 40 * KIB), wanted("b", 40 * KIB))
        replies = await memory.allocate(*batch, all_or_none=True)
        assert [one.handle for one in replies] == [None, None]
        assert await memory.blocks() == before
        assert await memory.facts(BlockEvicted) == []


@on_virtual_time
async def test_of_many_blocks_that_do_not_fit_the_first_are_explained_in_detail() -> None:
    async with memory_daemon() as memory:
        await filled(memory)
        replies = await memory.allocate(*(wanted(f"x{number}", KIB) for number in range(6)))
        shortages = [one.shortage for one in replies if one.shortage is not None]
        assert len(shortages) == 6
        assert [bool(one.blocking) for one in shortages] == [True] * SEARCHES_MAX + [False] * 2
        assert all(one.total_free == 0 for one in shortages)


@on_virtual_time
async def test_cached_blocks_give_way() -> None:
    async with memory_daemon() as memory:
        held = handles(await filled(memory, worker="w1"))
        await memory.change("cache", *held[1:3], worker="w1", content="/checkpoints/1")
        allocated = await memory.take("new", 20 * KIB)
        assert allocated.evicted == ["w1:b1", "w1:b2"]
        assert await memory.facts(BlockEvicted) == [
            BlockEvicted(GPU, ["w1:b1", "w1:b2"], 2, 32 * KIB, "tensor of new", "w0")
        ]
        await refused("memory_block_unknown", memory.free(held[1], worker="w1"))


@on_virtual_time
async def test_the_setting_of_the_job_chooses_what_gives_way() -> None:
    async with memory_daemon() as memory:
        await memory.register()
        assert (await memory.view()).eviction == "lru"
        memory.service.table.default_eviction = "cost"
        assert (await memory.view()).eviction == "cost"
        memory.settings["memory_eviction"] = "lru"
        assert (await memory.view()).eviction == "lru"
        memory.settings["memory_eviction"] = "cost"
        for name, reload_s in (("oldest", 60.0), ("cheap", 0.1), ("newest", 60.0)):
            await memory.take(name, 16 * KIB, cached=True, reload_s=reload_s)
            await anyio.sleep(1.0)
        await memory.take("held", 16 * KIB)
        (place,) = await memory.ask(FindFit(JOB, 16 * KIB))
        assert (place.offset, place.reload_s) == (16 * KIB, 0.1)
        assert (await memory.take("large", 16 * KIB)).evicted == ["w0:cheap"]
        memory.settings["memory_eviction"] = "lru"
        assert (await memory.take("larger", 16 * KIB)).evicted == ["w0:oldest"]


@on_virtual_time
async def test_content_is_cheap_to_evict_while_the_catalogue_has_its_checkpoint() -> None:
    async with memory_daemon() as memory:
        memory.settings["memory_eviction"] = "cost"
        await memory.register()
        for name in ("computed", "unknown", "saved", "held"):
            await memory.take(name, 16 * KIB, cached=name != "held", content="" if name == "computed" else name)
        memory.saved.add("saved")
        assert (await memory.take("first", 16 * KIB)).evicted == ["w0:saved"]
        assert (await memory.take("second", 16 * KIB)).evicted == ["w0:computed"]


@on_virtual_time
async def test_compaction_evicts_by_the_policy_of_the_job() -> None:
    async with memory_daemon() as memory:
        memory.settings["memory_eviction"] = "cost"
        held = await filled(memory, 8)
        assert held[0].handle is not None
        await memory.free(handles(held)[0])
        for name, content in ((2, ""), (4, ""), (6, "saved")):
            await memory.change("cache", handles(held)[name], content=content)
        memory.saved.add("saved")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: memory.allocate(wanted("large", 16 * KIB), worker="w1", wait_s=60.0))
            await anyio.sleep(1.0)
            (evicted,) = memory.kernel.facts(BlockEvicted)
            assert evicted.blocks == ["w0:b6"]
            tasks.cancel_scope.cancel()


@on_virtual_time
async def test_blocks_of_one_request_do_not_evict_each_other() -> None:
    async with memory_daemon() as memory:
        await memory.register()
        first, second = await memory.allocate(wanted("a", 40 * KIB, cached=True), wanted("b", 40 * KIB))
        assert first.handle is not None
        assert second.handle is None


@on_virtual_time
async def test_changes_are_made_to_all_blocks_or_none() -> None:
    async with memory_daemon() as memory:
        held = handles(await filled(memory))
        await memory.change("pin", held[1])
        await refused("memory_status_refused", memory.change("cache", held[0], held[1]))
        await refused("memory_argument_invalid", memory.change("melt", held[0]))
        statuses = [one.block.status for one in await memory.blocks()]
        assert statuses == [BlockStatus.ALLOCATED, BlockStatus.PINNED, *[BlockStatus.ALLOCATED] * 2]
        await memory.change("unpin", held[1])
        await memory.change("cache", *held)
        await refused("memory_status_refused", memory.change("unpin", held[0]))
        await memory.change("use", *held)
        await memory.change("touch", *held)


@on_virtual_time
async def test_a_plugin_may_replace_the_allocation() -> None:
    def extend(kernel: Kernel) -> None:
        answer = [Allocated("a", Handle("a", 7), 512, 256)]
        kernel.bus.replace(AllocateMemory, lambda request, call: answer, owner="a plugin")

    async with memory_daemon(extend=extend) as memory:
        await memory.register()
        assert (await memory.take("a", 1)).handle == Handle("a", 7)
        assert await memory.names() == []


# Waiting.


@on_virtual_time
async def test_requests_wait_by_priority_and_are_served_when_there_is_room() -> None:
    async with memory_daemon() as memory:
        held = handles(await filled(memory))
        served: list[str] = []

        async def wait(name: str, priority: int) -> None:
            await memory.allocate(wanted(name, 16 * KIB, priority=priority), wait_s=60.0)
            served.append(name)

        async with anyio.create_task_group() as tasks:
            for name, priority in (("low", 0), ("high", 5), ("low too", 0)):
                tasks.start_soon(wait, name, priority)
                await anyio.sleep(0.1)
            assert (await memory.view()).waiting == 3
            for handle in held[:3]:
                await memory.free(handle)
                await anyio.sleep(0.1)
        assert served == ["high", "low", "low too"]
        assert await memory.facts(OutOfMemory) == []


@on_virtual_time
async def test_request_that_is_repeated_while_it_waits_gets_the_same_block() -> None:
    async with memory_daemon() as memory:
        held = handles(await filled(memory, count=2))
        got: list[list[Allocated]] = []

        async def wait() -> None:
            got.append(await memory.allocate(wanted("a", 32 * KIB), wait_s=60.0))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            tasks.start_soon(wait)
            tasks.start_soon(refused, "memory_name_taken", memory.allocate(wanted("a", 16 * KIB), wait_s=60.0))
            await anyio.sleep(0.1)
            await memory.free(held[0])
        assert len(got) == 2
        assert got[0] == got[1]
        assert await memory.names() == ["w0:a", "w0:b1"]


@on_virtual_time
async def test_batch_that_waits_is_told_of_its_first_blocks_as_they_are_at_the_end() -> None:
    async with memory_daemon() as memory:
        held = handles(await filled(memory))
        got: list[Allocated] = []

        async def wait() -> None:
            blocks = wanted("moved", 8 * KIB), wanted("evicted", 8 * KIB, cached=True), wanted("late", 32 * KIB)
            got.extend(await memory.allocate(*blocks, evict=False, wait_s=60.0))

        async with anyio.create_task_group() as tasks:
            await memory.free(held[1])
            tasks.start_soon(wait)
            await anyio.sleep(0.1)
            assert await memory.names() == ["w0:b0", "w0:moved", "w0:evicted", "w0:b2", "w0:b3"]
            await memory.take("other", 8 * KIB)
            assert await memory.names() == ["w0:b0", "w0:moved", "w0:other", "w0:b2", "w0:b3"]
            await memory.free(held[0])
            plan = await memory.ask(PlanCompaction(JOB, GPU))
            assert plan.moves[0].handle.name == "moved"
            await memory.commit(plan.epoch, 0)
            assert not got
            await memory.free(*held[2:])
        found = {one.handle: one.block.offset for one in await memory.blocks()}
        assert [found.get(handle) for handle in handles(got)] == [one.offset for one in got]
        assert got[0].handle == Handle("moved", plan.moves[0].handle.version + 1)


@on_virtual_time
async def test_a_wait_ends_at_its_deadline_with_an_explanation() -> None:
    async with memory_daemon() as memory:
        await filled(memory)
        await refused("memory_argument_invalid", memory.allocate(wanted("late", 16 * KIB), wait_s=601.0))
        (reply,) = await memory.allocate(wanted("late", 16 * KIB), wait_s=5.0)
        assert reply.shortage is not None
        assert "free or cache" in reply.shortage.fix
        assert len(await memory.facts(OutOfMemory)) == 1
        assert (await memory.view()).waiting == 0
        assert memory.service.table.waiting_shares.used == 0


@on_virtual_time
async def test_requests_whose_waits_end_at_the_same_instant_all_end() -> None:
    async with memory_daemon() as memory:
        held = handles(await filled(memory))
        await memory.free(held[0])
        replies: dict[str, Allocated] = {}

        async def wait(name: str, size: int) -> None:
            (replies[name],) = await memory.allocate(wanted(name, size), wait_s=5.0)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, "large", 64 * KIB)
            # It waits behind the large one, whose end may serve it at the last moment.
            tasks.start_soon(wait, "small", KIB)
        assert replies["large"].shortage is not None
        assert ("w0:small" in await memory.names()) == (replies["small"].shortage is None)
        assert (await memory.view()).waiting == 0
        assert memory.service.table.waiting_shares.used == 0


@on_virtual_time
async def test_batch_that_waits_in_vain_is_told_which_of_its_first_blocks_gave_way() -> None:
    async with memory_daemon() as memory:
        held = handles(await filled(memory))
        await memory.free(held[1])
        got: list[Allocated] = []

        async def wait() -> None:
            blocks = wanted("kept", 8 * KIB), wanted("evicted", 8 * KIB, cached=True), wanted("late", 32 * KIB)
            got.extend(await memory.allocate(*blocks, evict=False, wait_s=5.0))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.sleep(0.1)
            await memory.take("other", 8 * KIB)
        assert [one.name for one in got if one.handle is None] == ["evicted", "late"]
        assert all(one.shortage is not None for one in got[1:])


@on_virtual_time
async def test_small_requests_do_not_pass_a_large_one_for_ever() -> None:
    async with memory_daemon() as memory:
        held = handles(await filled(memory))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: memory.allocate(wanted("large", 64 * KIB), wait_s=60.0))
            await memory.free(held[0])
            await anyio.sleep(1.0)
            passed = await memory.take("passes", 1 * KIB)
            await anyio.sleep(PASSED_S)
            (reply,) = await memory.allocate(wanted("comes late", 1 * KIB))
            assert reply.shortage is not None
            assert "come first" in reply.shortage.reason
            assert passed.handle is not None
            await memory.free(passed.handle, *held[1:])
        assert await memory.names() == ["w0:large"]


@on_virtual_time
async def test_waiting_requests_of_a_failed_worker_and_of_its_device_end() -> None:
    async with memory_daemon() as memory:
        await filled(memory, worker="w1")
        errors: dict[str, str] = {}

        async def wait(worker: str) -> None:
            try:
                await memory.allocate(wanted("a", 16 * KIB), worker=worker, wait_s=60.0)
            except RequestRefused as error:
                errors[worker] = error.code

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, "w1")
            tasks.start_soon(wait, "w2")
            await anyio.sleep(1.0)
            # The blocks of w1 are free then, and serve w2.
            await memory.fail("w1")
        assert errors == {"w1": "worker_gone"}
        assert await memory.names() == ["w2:a"]
        async with anyio.create_task_group() as tasks:
            await memory.take("b", 48 * KIB, worker="w2")
            tasks.start_soon(wait, "w2")
            tasks.start_soon(
                lambda: refused(
                    "memory_device_unknown", memory.allocate(wanted("c", 64 * KIB), worker="w2", wait_s=9.0)
                )
            )
            await anyio.sleep(1.0)
            await memory.fail("w0")
        assert memory.devices == []


@on_virtual_time
async def test_waiting_requests_end_when_the_daemon_stops() -> None:
    async with memory_daemon() as memory:
        await filled(memory)
        async with anyio.create_task_group() as tasks:
            waits = memory.allocate(wanted("a", KIB), wait_s=60.0)
            tasks.start_soon(lambda: refused("memory_stopping", waits))
            await anyio.sleep(0.1)
            memory.service.stop_waiting()


@on_virtual_time
async def test_requests_that_wait_are_bounded() -> None:
    async with memory_daemon(limits=MemoryLimits(waiting_max=80, principal_waiting_max=1)) as memory:
        await filled(memory)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: memory.allocate(wanted("a", KIB), wait_s=5.0))
            await anyio.sleep(0.1)
            await refused("memory_waiting_full", memory.allocate(wanted("b", KIB), wait_s=5.0))


@on_virtual_time
async def test_searches_in_vain_take_a_bounded_share_of_time_and_a_short_one_is_always_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[int | None] = []

    def find_room(core: PoolCore, size: int, *more: Any) -> RoomPlan | None:
        searched.append(more[-1])
        return eviction.find_room(core, size, *more)

    monkeypatch.setattr(device_table, "find_room", find_room)
    monkeypatch.setattr(allocation, "SEARCHED_AT_LEAST", 2)
    monkeypatch.setattr(allocation, "SEARCHED_BLOCKS_MAX", 8)
    monkeypatch.setattr(allocation, "SEARCHED_BLOCKS_PER_S", 1)
    async with memory_daemon() as memory:
        held = handles(await filled(memory, 8))
        await memory.change("cache", *held[1::2])
        for _ in range(4):
            (reply,) = await memory.allocate(wanted("large", 24 * KIB))
            assert reply.handle is None
        # Four cached blocks: the budget is for two searches of all of them.
        assert searched == [2, None, 2, None, 2, 2]
        # One block fits among the first two in the order of eviction.
        assert (await memory.take("small", 8 * KIB)).evicted == ["w0:b1"]
        memory.settings["memory_eviction"] = "cost"
        assert (await memory.take("cheap", 8 * KIB)).evicted == ["w0:b3"]
        await anyio.sleep(8.0)
        searched.clear()
        await memory.change("cache", *held[2:3])
        await memory.allocate(wanted("large", 16 * KIB))
        assert searched == [None]


@on_virtual_time
async def test_where_a_block_would_go_is_searched_for_a_bounded_share_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "FIT_BLOCKS_MAX", 16)
    monkeypatch.setattr(questions, "FIT_BLOCKS_PER_S", 1)
    async with memory_daemon() as memory:
        held = handles(await filled(memory, 8))
        await memory.change("cache", held[0])
        for _ in range(2):
            (place,) = await memory.ask(FindFit(JOB, 8 * KIB))
            assert place.evicted_bytes == 8 * KIB
        await refused("memory_fit_busy", memory.ask(FindFit(JOB, 8 * KIB)))
        await memory.free(held[1])
        # A hole takes no search.
        (place,) = await memory.ask(FindFit(JOB, 8 * KIB))
        assert (place.offset, place.evicted_bytes) == (8 * KIB, 0)


@on_virtual_time
async def test_what_can_be_obtained_of_many_blocks_is_looked_for_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "OBTAINABLE_BLOCKS", 1)
    async with memory_daemon() as memory:
        held = handles(await filled(memory, 8))
        await memory.change("pin", held[0])
        await anyio.sleep(1.0)
        assert (await memory.view()).forecast.obtainable_bytes == 0
        await memory.free(held[1])
        assert (await memory.view()).forecast.obtainable_bytes == 0
        await anyio.sleep(1.0)
        assert (await memory.view()).forecast.obtainable_bytes == 8 * KIB


@on_virtual_time
async def test_searches_for_a_request_that_waits_take_a_bounded_share_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []

    def find_room(core: PoolCore, size: int, *more: Any) -> RoomPlan | None:
        *_, blocks_max = more
        if blocks_max is None:
            searched.append(size)
        return eviction.find_room(core, size, *more)

    monkeypatch.setattr(device_table, "find_room", find_room)
    monkeypatch.setattr(allocation, "SEARCHED_AT_LEAST", 0)
    monkeypatch.setattr(allocation, "SEARCHED_BLOCKS_MAX", 8)
    monkeypatch.setattr(allocation, "SEARCHED_BLOCKS_PER_S", 1)
    monkeypatch.setattr(compactions, "PLAN_BLOCKS_MAX", 0)
    async with memory_daemon() as memory:
        held = handles(await filled(memory, 8))
        await memory.change("cache", *held[:7:2])
        replies: list[Allocated] = []

        async def wait() -> None:
            replies.extend(await memory.allocate(wanted("large", 24 * KIB), wait_s=60.0))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.sleep(0.1)
            assert len(searched) == 1
            # There is time for the first of these searches only, although there is room after the second one.
            await memory.free(held[7])
            await memory.free(held[1])
            assert len(searched) == 2
            assert not replies
            await anyio.sleep(5.0)
            assert len(searched) == 3
            assert len(replies) == 1
        assert replies[0].evicted == ["w0:b0", "w0:b2"]


# Workers that are gone.


@on_virtual_time
async def test_a_failed_worker_loses_its_devices_and_its_blocks_elsewhere() -> None:
    async with memory_daemon() as memory:
        await filled(memory)
        await memory.register("w1")
        await memory.allocate(wanted("a", KIB), wanted("b", KIB), worker="w0", device="w1/gpu0")
        await memory.fail("w0")
        assert await memory.facts(DeviceRemoved) == [DeviceRemoved(GPU, "killed", 4, 64 * KIB)]
        assert await memory.facts(BlocksFreed) == [BlocksFreed("w1/gpu0", "w0", 2, 2 * KIB, "killed")]
        assert await memory.names("w1/gpu0") == []


@on_virtual_time
async def test_another_process_of_the_same_name_begins_anew() -> None:
    async with memory_daemon() as memory:
        await filled(memory)
        memory.workers[JOB, "w0"] = b"2" * 16
        view = await memory.ask(RegisterDevice(JOB, "w0", b"2" * 16, GpuDevice("gpu0", KIB)))
        assert view.stats.allocation_count == 0
        # The fact about the earlier process comes late.
        await memory.tell(WorkerLeft("w0", "done"))
        assert len(memory.devices) == 1


@on_virtual_time
async def test_a_removed_job_has_no_devices() -> None:
    async with memory_daemon() as memory:
        await filled(memory)
        await memory.tell(JobRemoved(JOB))
        assert (memory.devices, memory.service.table.owners) == ([], {})


# Compaction.


async def with_gaps(memory: MemoryDaemon) -> list[Handle]:
    """Eight blocks of 8 KiB, of which every other one is free."""
    held = handles(await filled(memory, 8))
    await memory.free(*held[::2])
    return held[1::2]


@on_virtual_time
async def test_owners_commit_the_moves_of_a_plan() -> None:
    async with memory_daemon() as memory:
        await with_gaps(memory)
        dry = await memory.ask(PlanCompaction(JOB, GPU, 16 * KIB, dry_run=True))
        assert (dry.bytes, dry.expires_in_s) == (8 * KIB, 0.0)
        plan = await memory.ask(PlanCompaction(JOB, GPU, 16 * KIB))
        assert plan == await memory.ask(PlanCompaction(JOB, GPU))
        (move,) = plan.moves
        await refused("memory_move_of_another", memory.commit(plan.epoch, 0, worker="w1"))
        await refused("memory_plan_unknown", memory.commit(plan.epoch - 1, 0))
        handle = await memory.commit(plan.epoch, 0)
        assert handle == Handle(move.handle.name, move.handle.version + 1)
        # A client repeats a request whose answer it has not got.
        assert await memory.commit(plan.epoch, 0) == handle
        await refused("memory_plan_unknown", memory.commit(plan.epoch, 0, worker="w1"))
        await refused("memory_handle_stale", memory.free(move.handle))
        assert await memory.facts(CompactionPlanned) == [
            CompactionPlanned(GPU, plan.epoch, 1, 8 * KIB, 16 * KIB, "asked for")
        ]
        assert await memory.facts(CompactionEnded) == [CompactionEnded(GPU, plan.epoch, 1, 0)]
        assert (await memory.view()).stats.largest_free_block >= 16 * KIB
        await memory.free(handle)
        await refused("memory_plan_unknown", memory.commit(plan.epoch, 0))
        await memory.take(handle.name, KIB)
        await refused("memory_plan_unknown", memory.commit(plan.epoch, 0))


@on_virtual_time
async def test_moves_that_are_not_committed_expire() -> None:
    async with memory_daemon() as memory:
        await with_gaps(memory)
        before = await memory.blocks()
        plan = await memory.ask(PlanCompaction(JOB, GPU))
        await anyio.sleep(PLAN_S + 1)
        assert await memory.facts(CompactionEnded) == [CompactionEnded(GPU, plan.epoch, 0, len(plan.moves))]
        await refused("memory_plan_unknown", memory.commit(plan.epoch, 0))
        assert await memory.blocks() == before


@on_virtual_time
async def test_a_compaction_makes_room_for_the_request_that_waits() -> None:
    async with memory_daemon() as memory:
        await with_gaps(memory)
        replies: list[Allocated] = []

        async def wait() -> None:
            replies.extend(await memory.allocate(wanted("large", 16 * KIB), worker="w1", wait_s=60.0))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.sleep(1.0)
            # Without settling, which would wait for the request.
            (planned,) = memory.kernel.facts(CompactionPlanned)
            assert planned.reason == "w1 waits for 16384 bytes"
            plan = await memory.ask(PlanCompaction(JOB, GPU))
            for move in plan.moves:
                await memory.commit(plan.epoch, move.number)
        assert replies[0].actual_size == 16 * KIB


@on_virtual_time
async def test_a_request_that_waits_does_not_evict_its_own_blocks_for_a_compaction() -> None:
    async with memory_daemon() as memory:
        held = handles(await filled(memory))
        await memory.change("cache", held[1])
        await memory.free(held[3])
        known, new = await memory.allocate(wanted("b1", 16 * KIB), wanted("new", 32 * KIB), wait_s=5.0)
        assert known.handle == held[1]
        assert new.handle is None
        assert await memory.facts(BlockEvicted) == []
        assert "w0:b1" in await memory.names()


@on_virtual_time
async def test_a_plan_ends_when_the_last_of_its_blocks_is_freed() -> None:
    async with memory_daemon() as memory:
        await with_gaps(memory)
        plan = await memory.ask(PlanCompaction(JOB, GPU, 16 * KIB))
        await memory.free(plan.moves[0].handle)
        assert await memory.facts(CompactionEnded) == [CompactionEnded(GPU, plan.epoch, 0, 0)]


@on_virtual_time
async def test_an_impossible_hole_is_refused() -> None:
    async with memory_daemon() as memory:
        held = await with_gaps(memory)
        await memory.change("pin", *held)
        await refused("memory_plan_impossible", memory.ask(PlanCompaction(JOB, GPU, 16 * KIB)))


@on_virtual_time
async def test_plans_take_a_bounded_share_of_the_daemons_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compactions, "PLAN_BLOCKS_MAX", 10)
    monkeypatch.setattr(compactions, "PLAN_BLOCKS_PER_S", 10)
    async with memory_daemon() as memory:
        await with_gaps(memory)
        plan = PlanCompaction(JOB, GPU, dry_run=True)
        await memory.ask(plan)
        await memory.ask(plan)
        await refused("memory_planning_busy", memory.ask(plan))
        await anyio.sleep(1.0)
        await memory.ask(plan)
        await memory.allocate(*(wanted(f"more{number}", 256) for number in range(7)))
        await refused("memory_plan_too_large", memory.ask(plan))


# After a restart.


@on_virtual_time
async def test_blocks_are_asserted_after_a_restart() -> None:
    async with memory_daemon() as memory:
        await memory.register()
        await memory.allocate(wanted("a", KIB), wanted("b", 2 * KIB, pinned=True))
        await memory.take("c", KIB, worker="w1")
        known = await memory.blocks()
    async with memory_daemon(at_start=("w0", "w1")) as memory:
        assert (await memory.register()).is_asserting
        error = await refused("memory_asserting", memory.take("new", KIB))
        assert isinstance(error, Unavailable)
        waited: list[Allocated] = []

        async def wait() -> None:
            waited.extend(await memory.allocate(wanted("new", KIB), wait_s=20.0))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.sleep(0.5)
            await memory.assert_blocks(*(one for one in known if one.worker_id == "w1"), worker="w1")
            own = [one for one in known if one.worker_id == "w0"]
            assert await memory.assert_blocks(own[0], more=True) == [own[0].handle]
            assert await memory.assert_blocks(own[1]) == [own[1].handle]
        assert waited[0].handle is not None
        assert [one for one in await memory.blocks() if one.handle.name != "new"] == known
        assert not (await memory.view()).is_asserting


@on_virtual_time
async def test_each_device_of_a_worker_waits_for_its_own_assertion() -> None:
    async with memory_daemon() as memory:
        await memory.register()
        await memory.register(device="gpu1")
        await memory.allocate(wanted("a", KIB), device="w0/gpu1")
        (held,) = await memory.blocks("w0/gpu1")
    async with memory_daemon(at_start=("w0",)) as memory:
        await memory.register()
        await memory.assert_blocks()
        await memory.take("new", KIB)
        assert (await memory.register(device="gpu1")).is_asserting
        await refused("memory_asserting", memory.allocate(wanted("new", KIB), device="w0/gpu1"))
        await memory.assert_blocks(held, device="w0/gpu1")
        (new,) = await memory.allocate(wanted("new", KIB), device="w0/gpu1")
        assert new.offset == KIB


@on_virtual_time
async def test_the_time_to_assert_ends() -> None:
    async with memory_daemon(at_start=("w0", "w1")) as memory:
        await memory.register()
        await memory.assert_blocks()
        assert (await memory.view()).is_asserting
        await anyio.sleep(ASSERT_S + 1)
        await memory.take("new", KIB)


@on_virtual_time
async def test_what_others_may_have_used_meanwhile_cannot_be_asserted_late() -> None:
    async with memory_daemon() as memory:
        await memory.register()
        await memory.allocate(wanted("a", KIB), wanted("b", KIB))
        held = await memory.blocks()
    async with memory_daemon(at_start=("w0", "w1")) as memory:
        await memory.register()
        await memory.assert_blocks(worker="w1")
        await anyio.sleep(ASSERT_S + 1)
        # Nothing was allocated since, so all that the worker has is as it was.
        await memory.assert_blocks(held[0], more=True)
        taken = await memory.take("of another", KIB, worker="w1")
        assert taken.offset == held[1].block.offset
        assert taken.handle is not None
        await memory.free(taken.handle, worker="w1")
        error = await refused("memory_assertion_refused", memory.assert_blocks(*held))
        assert "b: " in error.message
        assert await memory.names() == ["w0:a"]


@on_virtual_time
async def test_no_block_is_older_than_the_process_that_has_the_device() -> None:
    async with memory_daemon() as memory:
        await memory.register()
        await memory.take("a", KIB, worker="w1")
        (held,) = await memory.blocks()
    # The daemon is not there when another process takes the name of w0.
    async with memory_daemon(at_start=("w1",)) as memory:
        assert not (await memory.register()).is_asserting
        await refused("memory_assertion_refused", memory.assert_blocks(held, worker="w1"))
        await memory.take("new", KIB)


@on_virtual_time
async def test_block_of_an_earlier_process_of_the_device_is_refused() -> None:
    async with memory_daemon() as memory:
        await memory.register()
        await memory.take("a", KIB, worker="w1")
        (held,) = await memory.blocks()
    # Another process took the name of w0 before the daemon restarted, and w1 has not heard of it.
    async with memory_daemon(at_start=("w0", "w1")) as memory:
        other = memory.workers[JOB, "w0"] = b"2" * 16
        memory.service.table.begin({JOB: [("w0", other), ("w1", INCARNATION)]})
        await memory.ask(RegisterDevice(JOB, "w0", other, GpuDevice("gpu0", 64 * KIB)))
        error = await refused("memory_assertion_refused", memory.assert_blocks(held, worker="w1"))
        assert "of the process that has the device" in error.message


@on_virtual_time
async def test_cached_block_has_given_way_when_the_daemon_restarts() -> None:
    async with memory_daemon() as memory:
        await memory.register()
        a, _ = await memory.allocate(wanted("a", KIB, cached=True), wanted("b", KIB))
        held = await memory.blocks()
    async with memory_daemon(at_start=("w0", "w1")) as memory:
        await memory.register()
        assert await memory.assert_blocks(*held) == [held[1].handle]
        # A block in use is entered, whatever was cached there.
        in_use = replace(held[0], handle=Handle("c", held[0].handle.version), worker_id="w1")
        in_use = replace(in_use, block=replace(in_use.block, status=BlockStatus.ALLOCATED))
        await memory.assert_blocks(in_use, worker="w1")
        assert a.handle is not None
        await refused("memory_block_unknown", memory.change("use", a.handle))
        await memory.free(in_use.handle, worker="w1")
        again = await memory.take("a", KIB)
        assert again.offset == a.offset
        assert again.handle != a.handle
        await refused("memory_handle_stale", memory.change("use", a.handle))


@on_virtual_time
async def test_block_that_gave_way_and_is_allocated_again_has_another_handle() -> None:
    async with memory_daemon() as memory:
        await memory.register()
        (before,) = await memory.allocate(wanted("a", KIB, cached=True))
        large = await memory.take("large", 64 * KIB, worker="w1")
        assert large.handle is not None
        await memory.free(large.handle, worker="w1")
        again = await memory.take("a", KIB)
        assert again.offset == before.offset
        assert before.handle is not None
        await refused("memory_handle_stale", memory.change("use", before.handle))


@on_virtual_time
async def test_device_waits_for_a_worker_that_names_it_when_it_asserts_on_its_own() -> None:
    async with memory_daemon() as memory:
        await memory.register()
        await memory.take("a", KIB, worker="w1")
        (held,) = await memory.blocks()
    async with memory_daemon(at_start=("w0", "w1")) as memory:
        await memory.register()
        await memory.assert_blocks()
        await memory.register("w1")
        await memory.assert_blocks(worker="w1", device="w1/gpu0", elsewhere=[GPU])
        assert [device.assert_until is None for device in memory.devices] == [False, True]
        await memory.assert_blocks(held, worker="w1")
        assert [device.assert_until is None for device in memory.devices] == [True, True]


@on_virtual_time
async def test_nothing_is_moved_before_all_blocks_are_asserted() -> None:
    async with memory_daemon() as memory:
        await memory.register()
        await memory.allocate(wanted("a", KIB), worker="w1")
        await memory.allocate(wanted("b", KIB))
        held = await memory.blocks()
    async with memory_daemon(at_start=("w0", "w1")) as memory:
        await memory.register()
        await memory.assert_blocks(held[1])
        await refused("memory_asserting", memory.ask(PlanCompaction(JOB, GPU)))
        await memory.assert_blocks(held[0], worker="w1")
        assert not (await memory.ask(PlanCompaction(JOB, GPU))).moves


@on_virtual_time
async def test_a_worker_that_fails_is_not_waited_for() -> None:
    async with memory_daemon(at_start=("w0", "w1")) as memory:
        await memory.register()
        await memory.assert_blocks()
        await memory.fail("w1")
        await memory.take("new", KIB)


@on_virtual_time
async def test_lies_are_refused_by_name_and_change_nothing() -> None:
    async with memory_daemon() as memory:
        await memory.register()
        await memory.allocate(wanted("a", KIB), wanted("b", KIB))
        own, other = await memory.blocks()
    async with memory_daemon(at_start=("w0", "w1")) as memory:
        await memory.register()
        await memory.assert_blocks(own)
        overlapping = replace(other, worker_id="w1", block=replace(other.block, offset=512))
        version = own.handle.version
        outside = replace(overlapping, handle=Handle("far", version), block=replace(other.block, offset=1 << 62))
        of_another = replace(other, handle=Handle("theirs", version), worker_id="w0")
        true = replace(other, worker_id="w1")
        error = await refused(
            "memory_assertion_refused",
            memory.assert_blocks(true, overlapping, outside, of_another, worker="w1", more=True),
        )
        assert all(name in error.message for name in ("b:", "far:", "theirs:"))
        assert await memory.blocks() == [own]
        await memory.assert_blocks(true, worker="w1")
        # Once it has asserted, the daemon knows better.
        more = replace(true, handle=Handle("more", version), block=replace(true.block, offset=8 * KIB))
        await refused("memory_assertion_refused", memory.assert_blocks(more, worker="w1"))
        moved = replace(true, handle=Handle("b", version + 1))
        await refused("memory_assertion_refused", memory.assert_blocks(moved, worker="w1"))
        # A worker that came after the start has no blocks to assert.
        await refused("memory_assertion_refused", memory.assert_blocks(replace(more, worker_id=""), worker="w2"))
        assert await memory.assert_blocks(true, worker="w1") == [true.handle]


# Questions and forecasts.


@on_virtual_time
async def test_a_fit_is_found_on_all_devices_the_cheapest_first() -> None:
    async with memory_daemon() as memory:
        await with_gaps(memory)
        await memory.register("w1")
        held = handles(await memory.allocate(wanted("x", 60 * KIB, cached=True), device="w1/gpu0"))
        await memory.register("w2", total=32 * KIB)
        await memory.register("w2", "small", total=KIB)
        places = await memory.ask(FindFit(JOB, 16 * KIB))
        assert [(one.device, one.evicted_bytes, one.moved_bytes) for one in places] == [
            ("w2/gpu0", 0, 0),
            (GPU, 0, 8 * KIB),
            ("w1/gpu0", 60 * KIB, 0),
        ]
        assert len(await memory.ask(FindFit(JOB, 16 * KIB, limit=1))) == 1
        assert held


@on_virtual_time
async def test_devices_are_listed_in_pages() -> None:
    async with memory_daemon() as memory:
        for number in range(3):
            await memory.register(device=f"gpu{number}")
        page = await memory.ask(ListDevices(JOB, limit=2))
        assert ([one.name for one in page.devices], page.more) == (["w0/gpu0", "w0/gpu1"], True)
        page = await memory.ask(ListDevices(JOB, page.devices[-1].name, 2))
        assert ([one.name for one in page.devices], page.more) == (["w0/gpu2"], False)


@on_virtual_time
async def test_blocks_are_listed_in_pages_while_they_change() -> None:
    async with memory_daemon() as memory:
        held = handles(await filled(memory, 8))
        page = await memory.ask(ListBlocks(JOB, GPU, 0, 3))
        assert ([one.handle.name for one in page.blocks], page.more) == (["b0", "b1", "b2"], True)
        # The next page begins at b3, whatever is left of the first one.
        await memory.free(*held[1:3])
        page = await memory.ask(ListBlocks(JOB, GPU, 24 * KIB, 3))
        assert [one.handle.name for one in page.blocks] == ["b3", "b4", "b5"]
        page = await memory.ask(ListBlocks(JOB, GPU, 0, 3))
        assert [(one.handle.name, one.block.offset) for one in page.blocks] == [
            ("b0", 0),
            ("", 8 * KIB),
            ("b3", 24 * KIB),
        ]


@on_virtual_time
async def test_growth_is_forecast_and_pressure_told_once() -> None:
    async with memory_daemon() as memory:
        await memory.register()
        held = []
        for number in range(14):
            held.append((await memory.take(f"b{number}", 4 * KIB)).handle)
            await anyio.sleep(5.0)
        forecast = (await memory.view()).forecast
        assert forecast.rate_bytes_per_s == pytest.approx(4 * KIB / 5, rel=0.1)
        assert forecast.seconds == pytest.approx(8 * KIB / (4 * KIB / 5), rel=0.1)
        (told,) = await memory.facts(MemoryPressure)
        assert (told.threshold, told.rising) == (0.8, True)
        assert told.seconds_to_oom is not None
        await memory.free(*(one for one in held if one is not None))
        await anyio.sleep(1.0)
        assert [one.rising for one in await memory.facts(MemoryPressure)] == [True, False]


@on_virtual_time
async def test_facts_of_shortages_are_limited_and_the_log_counts_the_others() -> None:
    log = RecordingLog()
    async with memory_daemon(log=log) as memory:
        await filled(memory)
        for number in range(50):
            await memory.allocate(wanted(f"more{number}", KIB))
        assert len(await memory.facts(OutOfMemory)) == 20
        await anyio.sleep(60.0)
        assert log.of("evictions and shortages of memory were not recorded") == [{"job": JOB, "count": 30}]
