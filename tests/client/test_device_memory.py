"""`DeviceMemory` with a real daemon that restarts, evicts blocks and plans moves."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from forged.client import ForgedClient, device_memory
from forged.client.device_memory import DeviceMemory
from forged.elastic.messages import JoinJob, LeaveJob
from forged.elastic.model import WorkerId
from forged.errors import RequestRefused, Unavailable
from forged.memory.book.device import first_version
from forged.memory.messages import HeldBlock, Move, Wanted
from forged.memory.model import AllocationRequest, BlockStatus, GpuDevice
from tests.client.daemon_runner import SOON, DaemonRunner

JOB = "run"
GPU = "w0/gpu0"
HANGS_S = 60.0
INCARNATIONS = {name: os.urandom(16) for name in ("w0", "w1")}
SIZE = 1 << 10
BLOCKS = 4
TOTAL = BLOCKS * SIZE
DEVICE = GpuDevice("gpu0", TOTAL)


@pytest.fixture
async def client(runner: DaemonRunner) -> AsyncIterator[ForgedClient]:
    async with ForgedClient(runner.endpoint, reconnect=SOON) as client, asyncio.timeout(HANGS_S):
        for name, incarnation in INCARNATIONS.items():
            await client.request(JoinJob(JOB, WorkerId(name, "127.0.0.1", 1), incarnation, os.getpid()))
        yield client


def wanted(name: str, blocks: int = 1, *, cached: bool = False) -> Wanted:
    return Wanted(name, AllocationRequest(f"tensor {name}", blocks * SIZE), cached=cached)


async def held(client: ForgedClient) -> dict[str, HeldBlock]:
    """What the daemon has."""
    try:
        return {one.handle.name: one async for one in client.memory_blocks(JOB, GPU) if one.worker_id}
    except RequestRefused:
        return {}


def places(blocks: dict[str, HeldBlock]) -> dict[str, tuple[int, int, BlockStatus]]:
    return {name: (one.block.offset, one.handle.version, one.block.status) for name, one in blocks.items()}


def memory_of(client: ForgedClient, **more: object) -> DeviceMemory:
    return DeviceMemory(client, JOB, "w0", INCARNATIONS["w0"], DEVICE, **more)  # type: ignore[arg-type]


async def test_blocks_in_use_are_there_again_after_a_restart_and_cached_ones_have_given_way(
    runner: DaemonRunner, client: ForgedClient
) -> None:
    told: asyncio.Queue[str] = asyncio.Queue()
    async with memory_of(client, evicted=lambda block: told.put_nowait(block.handle.name)) as memory:
        await memory.allocate(wanted("a"), wanted("b"), wanted("c"), wanted("d", cached=True))
        await memory.change("pin", "a")
        await memory.free("c")
        before = places(await held(client))
        assert places(dict(memory.blocks)) == before
        assert set(before) == {"a", "b", "d"}
        await runner.reopen()
        assert await told.get() == "d"
        del before["d"]
        while places(await held(client)) != before:
            await asyncio.sleep(0)
        assert places(dict(memory.blocks)) == before


async def test_requests_that_meet_a_restarted_daemon_wait_for_the_assertion(
    runner: DaemonRunner, client: ForgedClient
) -> None:
    other = DeviceMemory(client, JOB, "w1", INCARNATIONS["w1"], DEVICE)
    async with memory_of(client) as memory, other:
        await memory.allocate(wanted("a"), wanted("b"))
        await runner.close()
        allocating = asyncio.create_task(memory.allocate(wanted("c"), wait_s=HANGS_S))
        freeing = asyncio.create_task(memory.free("a"))
        await runner.open()
        (reply,) = await allocating
        await freeing
        assert reply.handle is not None
        assert set(memory.blocks) == {"b", "c"}
        assert places(await held(client)) == places(dict(memory.blocks))


async def test_owner_is_told_of_evicted_blocks(client: ForgedClient) -> None:
    told: asyncio.Queue[str] = asyncio.Queue()
    async with memory_of(client, evicted=lambda block: told.put_nowait(block.handle.name)) as memory:
        await memory.allocate(*(wanted(name, cached=True) for name in "abcd"))
        # By a request of its own.
        await memory.allocate(wanted("large", 2))
        assert {await told.get(), await told.get()} == {"a", "b"}
        assert set(memory.blocks) == {"c", "d", "large"}
        # By a request of another worker.
        await client.allocate_memory(JOB, "w1", INCARNATIONS["w1"], GPU, [wanted("theirs", 2)])
        assert {await told.get(), await told.get()} == {"c", "d"}
        assert set(memory.blocks) == {"large"}
        with pytest.raises(RequestRefused, match="there is no block 'c'"):
            await memory.change("use", "c")


async def test_blocks_are_copied_to_make_room_for_a_request_that_waits(client: ForgedClient) -> None:
    content = bytearray(TOTAL)

    async def copy(move: Move) -> None:
        content[move.destination : move.destination + move.size] = content[move.source : move.source + move.size]

    async with memory_of(client, copy=copy) as memory:
        for name in "abcd":
            (reply,) = await memory.allocate(wanted(name))
            content[reply.offset : reply.offset + SIZE] = name.encode() * SIZE
        await memory.free("a", "c")
        (large,) = await memory.allocate(wanted("large", 2), wait_s=HANGS_S)
        assert large.handle is not None
        assert places(await held(client)) == places(dict(memory.blocks))
        for name in "bd":
            offset = memory.blocks[name].block.offset
            assert content[offset : offset + SIZE] == name.encode() * SIZE
        first = first_version(INCARNATIONS["w0"])
        assert sum(memory.blocks[name].handle.version - first for name in "bd") == 1
        await memory.free("b", "d", "large")
        assert await held(client) == {}


async def test_commit_is_repeated_until_it_is_answered(client: ForgedClient, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = client.commit_move
    answers = 0

    async def unanswered(*arguments: Any) -> Any:
        nonlocal answers
        handle = await commit(*arguments)
        answers += 1
        if answers == 1:
            raise Unavailable("reloading", "state was reloaded from the store in between", "try again")
        return handle

    async def copy(move: Move) -> None:
        """There is no content."""

    monkeypatch.setattr(client, "commit_move", unanswered)
    async with memory_of(client, copy=copy) as memory:
        await memory.allocate(*map(wanted, "abcd"))
        await memory.free("a", "c")
        await memory.allocate(wanted("large", 2), wait_s=HANGS_S)
        while places(await held(client)) != places(dict(memory.blocks)):
            await asyncio.sleep(0)
        assert answers == 2


async def test_block_whose_commit_met_a_restart_is_lost(
    runner: DaemonRunner, client: ForgedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = client.commit_move

    async def restarted(*arguments: Any) -> Any:
        await commit(*arguments)
        monkeypatch.setattr(client, "commit_move", commit)
        await runner.reopen()
        raise Unavailable("connection_lost", "the daemon did not answer", "try again")

    async def copy(move: Move) -> None:
        """There is no content."""

    monkeypatch.setattr(client, "commit_move", restarted)
    told: asyncio.Queue[str] = asyncio.Queue()
    async with memory_of(client, copy=copy, evicted=lambda block: told.put_nowait(block.handle.name)) as memory:
        await memory.allocate(*map(wanted, "abcd"))
        await memory.free("a", "c")
        await memory.allocate(wanted("large", 2), wait_s=HANGS_S)
        lost = await told.get()
        assert set(memory.blocks) == {"b", "d", "large"} - {lost}
        while places(await held(client)) != places(dict(memory.blocks)):
            await asyncio.sleep(0)


async def test_block_is_known_as_cached_before_the_daemon_answers(
    client: ForgedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unanswered(*request: object, **more: object) -> None:
        raise Unavailable("connection_lost", "the daemon did not answer", "try again")

    async with memory_of(client) as memory:
        await memory.allocate(wanted("a"), Wanted("b", AllocationRequest("b", SIZE, pinned=True)))
        with pytest.raises(RequestRefused):
            await memory.change("cache", "b")
        assert memory.blocks["b"].block.status is BlockStatus.PINNED
        monkeypatch.setattr(client, "change_blocks", unanswered)
        with pytest.raises(Unavailable):
            await memory.change("cache", "a")
        assert memory.blocks["a"].block.status is BlockStatus.CACHED


async def test_failed_copy_leaves_the_block_where_it_is(client: ForgedClient) -> None:
    failed = asyncio.Event()

    async def copy(move: Move) -> None:
        failed.set()
        raise OSError("the device is gone")

    async with memory_of(client, copy=copy) as memory:
        await memory.allocate(*map(wanted, "abcd"))
        await memory.free("a", "c")
        waiting = asyncio.create_task(memory.allocate(wanted("large", 2), wait_s=HANGS_S))
        await failed.wait()
        waiting.cancel()
        assert {memory.blocks[name].handle.version for name in "bd"} == {first_version(INCARNATIONS["w0"])}


async def test_unknown_block_is_refused_without_a_request(client: ForgedClient) -> None:
    async with memory_of(client) as memory:
        await memory.allocate(wanted("a"))
        for attempt in (memory.free("a", "b"), memory.change("pin", "b")):
            with pytest.raises(RequestRefused, match="there is no block 'b'"):
                await attempt
        assert set(await held(client)) == {"a"}


async def test_blocks_are_allocated_and_freed_in_batches(client: ForgedClient) -> None:
    many = GpuDevice("gpu0", 300 * SIZE)
    async with DeviceMemory(client, JOB, "w0", INCARNATIONS["w0"], many) as memory:
        names = [f"block {number}" for number in range(300)]
        replies = await memory.allocate(*map(wanted, names))
        assert [one.name for one in replies if one.handle is not None] == names
        await memory.free(*names)
        assert await held(client) == {}


async def test_blocks_that_could_not_be_freed_are_still_held(
    client: ForgedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*request: object) -> None:
        raise Unavailable("daemon_away", "the daemon is away")

    monkeypatch.setattr(device_memory, "BATCH_MAX", 2)
    async with memory_of(client) as memory:
        await memory.allocate(*map(wanted, "abcd"))
        with monkeypatch.context() as patch:
            patch.setattr(client, "free_memory", fail)
            with pytest.raises(Unavailable):
                await memory.free(*"abcd")
        assert sorted(memory.blocks) == list("abcd")
        await memory.free(*"abcd")
        assert await held(client) == {}


async def test_blocks_that_are_freed_without_an_answer_are_told(
    client: ForgedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = client.free_memory
    told: asyncio.Queue[str] = asyncio.Queue()

    async def unanswered(*arguments: Any) -> None:
        await free(*arguments)
        raise Unavailable("store_full", "the disk of the store is full", "try again")

    async with memory_of(client, evicted=lambda block: told.put_nowait(block.handle.name)) as memory:
        await memory.allocate(*map(wanted, "abc"))
        monkeypatch.setattr(client, "free_memory", unanswered)
        with pytest.raises(Unavailable):
            await memory.free("a", "b")
        assert {await told.get(), await told.get()} == {"a", "b"}
        assert places(dict(memory.blocks)) == places(await held(client))
        assert set(memory.blocks) == {"c"}


async def test_blocks_after_one_that_could_not_be_freed_are_still_held(
    client: ForgedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = client.free_memory

    async def fail_one_by_one(*arguments: Any) -> None:
        if [handle.name for handle in arguments[-1]] == ["b"]:
            raise Unavailable("daemon_away", "the daemon is away")
        await free(*arguments)

    told: asyncio.Queue[str] = asyncio.Queue()
    async with memory_of(client, evicted=lambda block: told.put_nowait(block.handle.name)) as memory:
        await memory.allocate(*map(wanted, "abc"))
        # So that the blocks are freed one by one.
        await free(JOB, "w0", INCARNATIONS["w0"], GPU, [memory.blocks["a"].handle])
        monkeypatch.setattr(client, "free_memory", fail_one_by_one)
        with pytest.raises(Unavailable):
            await memory.free(*"abc")
        assert await told.get() == "a"
        assert set(memory.blocks) == set(await held(client)) == {"b", "c"}


async def test_memory_closes_after_its_client(runner: DaemonRunner, client: ForgedClient) -> None:
    async with ForgedClient(runner.endpoint, reconnect=SOON) as other:
        memory = memory_of(other)
        await memory.__aenter__()
        await memory.allocate(wanted("a"))
    with pytest.raises(Unavailable, match="the client was closed"):
        await memory.allocate(wanted("b"))
    await memory.__aexit__(None, None, None)
    assert set(await held(client)) == {"a"}


async def test_pinned_block_is_known_as_pinned(client: ForgedClient) -> None:
    async with memory_of(client) as memory:
        request = AllocationRequest("tensor", SIZE, pinned=True)
        await memory.allocate(Wanted("a", request, cached=True), Wanted("b", request))
        await memory.change("use", "b")
        assert places(dict(memory.blocks)) == places(await held(client))
        assert {one.block.status for one in memory.blocks.values()} == {BlockStatus.PINNED}


async def test_block_that_gave_way_without_a_fact_is_known_at_its_new_place(
    client: ForgedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forged.memory.service.FACTS_PER_S", 1e-9)
    monkeypatch.setattr("forged.memory.service.FACTS_BURST", 0.0)
    other = JOB, "w1", INCARNATIONS["w1"], GPU
    told: list[str] = []
    async with memory_of(client, evicted=lambda block: told.append(block.handle.name)) as memory:
        await memory.allocate(wanted("a", cached=True))
        (large,) = await client.allocate_memory(*other, [wanted("large", BLOCKS)])
        assert large.handle is not None
        await client.free_memory(*other, [large.handle])
        await client.allocate_memory(*other, [wanted("theirs")])
        (reply,) = await memory.allocate(wanted("a", cached=True))
        assert memory.blocks["a"].block.offset == reply.offset == SIZE
        assert told == ["a"]


async def test_device_of_a_worker_that_is_not_registered_is_refused(client: ForgedClient) -> None:
    memory = DeviceMemory(client, JOB, "none", INCARNATIONS["w0"], DEVICE)
    with pytest.raises(RequestRefused, match="not registered"):
        await memory.__aenter__()


async def test_daemon_that_restarts_between_registration_and_assertion_gets_both(
    runner: DaemonRunner, client: ForgedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = client.register_device
    registrations = 0

    async def interrupted(*arguments: Any) -> Any:
        nonlocal registrations
        registrations += 1
        view = await register(*arguments)
        if registrations == 2:
            await runner.reopen()
        return view

    monkeypatch.setattr(client, "register_device", interrupted)
    async with memory_of(client) as memory:
        await memory.allocate(wanted("a"))
        await runner.reopen()
        while set(await held(client)) != {"a"}:
            await asyncio.sleep(0)


async def test_planned_offsets_are_served_also_after_a_restart(
    runner: DaemonRunner, client: ForgedClient, tmp_path: Path
) -> None:
    offsets = [{"id": name, "offset": place * SIZE, "size": SIZE} for name, place in (("a", 2), ("b", 0), ("c", 1))]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"offsets": offsets}))
    names: dict[str, Any] = {}
    page = (Path(__file__).parents[2] / "docs" / "memory-traces.md").read_text()
    [example] = [
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "import DeviceMemory" in block
    ]
    exec(example, names)
    other = DeviceMemory(client, JOB, "w1", INCARNATIONS["w1"], DEVICE)
    async with memory_of(client) as memory, other:
        await names["serve"](memory, file)
        (first,) = await memory.allocate(wanted("a"))
        await runner.reopen()
        replies = await memory.allocate(wanted("b"), wanted("c"), wanted("other"), wait_s=HANGS_S)
        assert [one.offset for one in (first, *replies)] == [2 * SIZE, 0, SIZE, 3 * SIZE]
        assert (await memory.plan_offsets([])).blocks == 0


async def test_worker_that_is_gone_cannot_restore_its_blocks(client: ForgedClient) -> None:
    async with memory_of(client) as memory:
        await memory.allocate(wanted("a"))
        await client.request(LeaveJob(JOB, "w0", INCARNATIONS["w0"]))
        with pytest.raises(RequestRefused, match="not registered"):
            await memory.allocate(wanted("b"))


async def test_example_of_the_page_runs(client: ForgedClient, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    [example] = [
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "import DeviceMemory" in block
    ]
    names: dict[str, Any] = {}
    exec(example, names)
    await names["compute"](client, JOB, "w0", INCARNATIONS["w0"])
    assert capsys.readouterr().out == "cache has to be computed again\n600064 ['batch', 'weights']\n"
    assert set(await held(client)) == set()
