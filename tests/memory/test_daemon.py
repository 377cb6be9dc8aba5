"""The memory service of a real daemon over sockets: killed workers, restarts, and a worker that lies."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from forged.catalog.messages import CompleteCheckpoint, StartCheckpoint
from forged.client import ForgedClient
from forged.client.client import EARLIEST
from forged.elastic.messages import JoinJob
from forged.elastic.model import WorkerId
from forged.errors import ForgedError
from forged.jobs.model import SettingValue
from forged.kernel.messages import Record
from forged.memory.messages import Allocated, BlocksFreed, DeviceRemoved, HeldBlock, Wanted
from forged.memory.model import AllocationRequest, GpuDevice
from tests.client.daemon_runner import SOON, DaemonRunner, config_in
from tests.memory.holding_script import SIZE, TOTAL

JOB = "run"
GPU = "w0/gpu0"
HANGS_S = 60.0
HEARTBEAT_MS = 600_000
"""The workers send no heartbeats, and are not failed by a busy machine."""
INCARNATIONS = {name: os.urandom(16) for name in ("w0", "w1")}


@pytest.fixture
async def runner(tmp_path: Path) -> AsyncIterator[DaemonRunner]:
    runner = DaemonRunner(config_in(tmp_path))
    await runner.open()
    yield runner
    await runner.close()


def client_of(runner: DaemonRunner) -> ForgedClient:
    return ForgedClient(runner.endpoint, reconnect=SOON)


async def join(client: ForgedClient, name: str, **more: SettingValue) -> None:
    settings: dict[str, SettingValue] = {
        "worker_heartbeat_timeout_ms": HEARTBEAT_MS,
        "reconnect_grace_ms": HEARTBEAT_MS,
        **more,
    }
    worker = WorkerId(name, "127.0.0.1", 1)
    await client.request(JoinJob(JOB, worker, INCARNATIONS[name], os.getpid(), settings=settings))


async def register(client: ForgedClient, name: str = "w0", total: int = TOTAL) -> bool:
    """Whether the device waits for the owners of blocks."""
    view = await client.register_device(JOB, name, INCARNATIONS[name], GpuDevice("gpu0", total))
    return view.is_asserting


async def allocate(
    client: ForgedClient, name: str, *blocks: str, worker: str = "w0", wait_s: float = 0.0
) -> list[Allocated]:
    wanted = [Wanted(block, AllocationRequest("weights", SIZE)) for block in (name, *blocks)]
    return await client.allocate_memory(JOB, worker, INCARNATIONS[worker], GPU, wanted, wait_s=wait_s)


async def held(client: ForgedClient, device: str = GPU) -> list[HeldBlock]:
    return [block async for block in client.memory_blocks(JOB, device) if block.worker_id]


async def test_death_of_a_worker_frees_its_blocks_for_those_that_wait(runner: DaemonRunner) -> None:
    async with client_of(runner) as client, asyncio.timeout(HANGS_S):
        await join(client, "w0")
        await register(client)
        words = (sys.executable, "-m", "tests.memory.holding_script", runner.endpoint, JOB, "doomed", GPU)
        process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"holds\n"
        replies = await allocate(client, "a", "b", "c")
        assert all(one.handle is not None for one in replies)
        assert [block.handle.name for block in await held(client, "doomed/gpu0")] == ["held"]
        waiting = asyncio.create_task(allocate(client, "d", wait_s=HANGS_S))
        async with client.facts(DeviceRemoved, BlocksFreed, since=EARLIEST) as stream:
            process.kill()
            await process.wait()
            found = []
            async for record in stream:
                assert isinstance(record, Record)
                found.append(record.fact)
                if len(found) == 2:
                    break
        removed, freed = found
        assert isinstance(removed, DeviceRemoved)
        assert isinstance(freed, BlocksFreed)
        assert (removed.device, removed.blocks, removed.bytes) == ("doomed/gpu0", 1, SIZE)
        assert (freed.device, freed.worker_id, freed.blocks, freed.bytes) == (GPU, "doomed", 1, SIZE)
        (reply,) = await waiting
        assert reply.handle is not None
        assert [device.name async for device in client.memory_devices(JOB)] == [GPU]


async def test_blocks_are_asserted_after_a_restart_and_a_liar_is_refused(runner: DaemonRunner) -> None:
    async with client_of(runner) as client, asyncio.timeout(HANGS_S):
        for name in ("w0", "w1"):
            await join(client, name)
        assert not await register(client)
        await allocate(client, "a", "b")
        await allocate(client, "c", worker="w1")
        before = await held(client)

        await runner.reopen()
        assert await register(client)
        with pytest.raises(ForgedError, match="has restarted"):
            await allocate(client, "new")
        waiting = asyncio.create_task(allocate(client, "new", wait_s=HANGS_S))
        own = [block for block in before if block.worker_id == "w0"]
        lie = replace(own[0], worker_id="w1")
        handles = await client.assert_blocks(JOB, "w0", INCARNATIONS["w0"], GPU, own)
        assert handles == [block.handle for block in own]
        with pytest.raises(ForgedError, match="a: block 'w1:a' cannot be at 0"):
            await client.assert_blocks(JOB, "w1", INCARNATIONS["w1"], GPU, [before[2], lie])
        assert await held(client) == own
        await client.assert_blocks(JOB, "w1", INCARNATIONS["w1"], GPU, [before[2]])
        (reply,) = await waiting
        assert reply.handle is not None
        assert await held(client) == [*before, *(one for one in await held(client) if one.handle.name == "new")]
        # Another process cannot speak for the worker.
        with pytest.raises(ForgedError, match="not registered"):
            await client.free_memory(JOB, "w0", os.urandom(16), GPU, handles)


async def test_blocks_of_a_complete_checkpoint_give_way_first_by_cost(runner: DaemonRunner) -> None:
    async with client_of(runner) as client, asyncio.timeout(HANGS_S):
        await join(client, "w0", memory_eviction="cost")
        await register(client)
        me = JOB, "w0", INCARNATIONS["w0"]
        started = [
            await client.request(
                StartCheckpoint(*me, epoch=0, step=step, storage_path=f"/c/{step}", save_id=f"{step:08}")
            )
            for step in range(2)
        ]
        await client.request(CompleteCheckpoint(*me, started[1].checkpoint_id, SIZE, 1.0))
        names = "computed", "unsaved", "by id", "by path"
        contents = "", started[0].checkpoint_id, started[1].checkpoint_id, "/c/1"
        wanted = [
            Wanted(name, AllocationRequest(name, SIZE), content=content, cached=True)
            for name, content in zip(names, contents, strict=True)
        ]
        await client.allocate_memory(*me, GPU, wanted)
        for name, victim in (("a", "by id"), ("b", "by path"), ("c", "computed")):
            (reply,) = await allocate(client, name)
            assert reply.evicted == [f"w0:{victim}"]
        with pytest.raises(ForgedError, match="memory_eviction"):
            await client.create_job("other", {"memory_eviction": "fifo"})


async def test_owners_move_blocks_by_a_plan_of_the_daemon(runner: DaemonRunner) -> None:
    async with client_of(runner) as client, asyncio.timeout(HANGS_S):
        await join(client, "w0")
        await register(client)
        blocks = await allocate(client, "a", "b", "c", "d")
        freed = [one.handle for one in blocks[::2] if one.handle is not None]
        await client.free_memory(JOB, "w0", INCARNATIONS["w0"], GPU, freed)
        (place,) = await client.find_fit(JOB, 2 * SIZE)
        assert (place.device, place.moved_bytes) == (GPU, SIZE)
        waiting = asyncio.create_task(
            client.allocate_memory(
                JOB,
                "w0",
                INCARNATIONS["w0"],
                GPU,
                [Wanted("large", AllocationRequest("activations", 2 * SIZE))],
                wait_s=HANGS_S,
            )
        )
        while not (plan := await client.plan_compaction(JOB, GPU, hole=2 * SIZE)).moves:
            await asyncio.sleep(0)
        for move in plan.moves:
            handle = await client.commit_move(JOB, "w0", INCARNATIONS["w0"], GPU, plan.epoch, move.number)
            assert handle.version == move.handle.version + 1
            await client.change_blocks(JOB, "w0", INCARNATIONS["w0"], GPU, [handle], "pin")
        (reply,) = await waiting
        assert reply.handle is not None
