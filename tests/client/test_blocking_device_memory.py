"""`BlockingDeviceMemory` with a real daemon: callbacks in threads, and the example of the page."""

from __future__ import annotations

import os
import queue
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forged.client import BlockingClient, BlockingDeviceMemory, DeviceMemory
from forged.elastic.messages import JoinJob
from forged.elastic.model import WorkerId
from forged.errors import RequestRefused
from forged.memory.messages import HeldBlock, Move, Wanted
from forged.memory.model import AllocationRequest, GpuDevice
from tests.client.threaded_daemon import ThreadedDaemon
from tests.telemetry.recording_log import RecordingLog

JOB = "run"
GPU = "w0/gpu0"
INCARNATION = os.urandom(16)
SIZE = 1 << 10
DEVICE = GpuDevice("gpu0", 4 * SIZE)
HANGS_S = 60.0


@pytest.fixture
def client(threaded_daemon: ThreadedDaemon) -> Iterator[BlockingClient]:
    with threaded_daemon.client() as client:
        client.request(JoinJob(JOB, WorkerId("w0", "127.0.0.1", 1), INCARNATION, os.getpid()))
        yield client


def wanted(name: str, blocks: int = 1, *, cached: bool = False) -> Wanted:
    return Wanted(name, AllocationRequest(f"tensor {name}", blocks * SIZE), cached=cached)


def memory_of(client: BlockingClient, **more: Any) -> BlockingDeviceMemory:
    return BlockingDeviceMemory(client, JOB, "w0", INCARNATION, DEVICE, **more)


def test_blocks_are_allocated_changed_and_freed(client: BlockingClient) -> None:
    with memory_of(client) as memory:
        assert memory.name == GPU
        first, second = memory.allocate(wanted("a"), wanted("b"))
        assert (first.offset, second.offset) == (0, SIZE)
        memory.change("pin", "a")
        memory.free("b")
        assert {name: held.block.status for name, held in memory.blocks.items()} == {"a": "pinned"}
        with pytest.raises(RequestRefused, match="there is no block 'b'"):
            memory.free("b")
    assert [one.handle.name for one in client.memory_blocks(JOB, GPU) if one.worker_id] == ["a"]


def test_methods_are_those_of_the_asynchronous_class() -> None:
    for name in ("allocate", "free", "change"):
        assert getattr(BlockingDeviceMemory, name).__doc__ == getattr(DeviceMemory, name).__doc__


def test_callback_for_evicted_blocks_may_use_the_memory(client: BlockingClient) -> None:
    told: queue.SimpleQueue[tuple[str, bool, set[str]]] = queue.SimpleQueue()
    here = threading.get_ident()

    def evicted(held: HeldBlock) -> None:
        told.put((held.handle.name, threading.get_ident() == here, set(memory.blocks)))

    with memory_of(client, evicted=evicted) as memory:
        memory.allocate(*(wanted(name, cached=True) for name in "abcd"))
        memory.allocate(wanted("large", 2))
        found = [told.get(timeout=HANGS_S) for _ in range(2)]
    assert [(name, is_here) for name, is_here, _ in found] == [("a", False), ("b", False)]
    assert found[-1][2] >= {"c", "d"}


def test_blocks_are_copied_in_a_thread_and_none_after_the_end(client: BlockingClient) -> None:
    content = bytearray(DEVICE.total_memory)
    threads: set[int] = set()

    def copy(move: Move) -> None:
        threads.add(threading.get_ident())
        content[move.destination : move.destination + move.size] = content[move.source : move.source + move.size]

    with memory_of(client, copy=copy) as memory:
        for name in "abcd":
            (reply,) = memory.allocate(wanted(name))
            content[reply.offset : reply.offset + SIZE] = name.encode() * SIZE
        memory.free("a", "c")
        (large,) = memory.allocate(wanted("large", 2), wait_s=HANGS_S)
        assert large.handle is not None
        for name in "bd":
            offset = memory.blocks[name].block.offset
            assert content[offset : offset + SIZE] == name.encode() * SIZE
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


def test_failed_callback_is_logged(client: BlockingClient) -> None:
    log = RecordingLog()

    def evicted(held: HeldBlock) -> None:
        raise OSError("no room for the copy")

    with memory_of(client, evicted=evicted, log=log) as memory:
        memory.allocate(wanted("a", 4, cached=True))
        memory.allocate(wanted("b"))
    [logged] = log.of("the callback for an evicted block failed")
    assert logged["block"] == "a"


def test_memory_is_opened_once(client: BlockingClient) -> None:
    memory = memory_of(client)
    with memory:
        pass
    with pytest.raises(RequestRefused, match="only once"):
        memory.__enter__()


def test_memory_of_an_unregistered_worker_is_refused(client: BlockingClient) -> None:
    with (
        pytest.raises(RequestRefused, match="not registered"),
        BlockingDeviceMemory(client, JOB, "w9", INCARNATION, DEVICE),
    ):
        pass


def test_example_of_the_page_runs(client: BlockingClient, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    [example] = [one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "BlockingDeviceMemory" in one]
    names: dict[str, Any] = {}
    exec(example, names)
    names["compute"](client, JOB, "w0", INCARNATION)
    assert capsys.readouterr().out == "0 600064\n"
