"""Fetchers that are killed with SIGKILL, and what the next one makes of what they leave."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from forged.data.store.directory import DirectoryShardStore
from tests.data.transfer_cluster import TamperingProxy, content_of, open_cluster
from tests.worker.meshes import PATIENCE_S, until

SIZE = 8_000_000
NOT_ON_DISK_BYTES = 10_000
"""Of what has passed: what was said before the shard, and what stood still on its way."""


def bytes_begun(directory: Path) -> int:
    """How many bytes lie in files that are not whole."""
    return sum(path.stat().st_size for path in directory.glob("*.part"))


async def kill_fetcher_at(proxy: TamperingProxy, directory: Path, at_byte: int) -> None:
    """Let a process fetch shard 7 until so many bytes have come, and kill it."""
    before = bytes_begun(directory)
    proxy.hold_at = at_byte
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.data.fetcher_process", str(proxy.worker), str(directory), "7"
    )
    async with asyncio.timeout(PATIENCE_S):
        await proxy.held.wait()
    await until(lambda: bytes_begun(directory) >= before + at_byte - NOT_ON_DISK_BYTES)
    process.kill()
    await process.wait()
    proxy.held.clear()


@pytest.mark.parametrize("percent", [1, 50, 99])
async def test_a_killed_fetchers_successor_goes_on_where_it_stopped(percent: int, tmp_path: Path) -> None:
    directory = tmp_path / "w0"
    async with open_cluster(2, lambda number: DirectoryShardStore(tmp_path / f"w{number}")) as cluster:
        cluster.stores[1].put(7, [content_of(7, SIZE)])
        proxy = TamperingProxy(cluster.workers[1])
        async with proxy.open():
            await kill_fetcher_at(proxy, directory, SIZE * percent // 100)
        found = DirectoryShardStore(directory)
        assert not found.holds(7)
        begun = found.partial(7)
        assert begun is not None
        assert begun.offset <= SIZE * percent // 100
        cluster.stores[0] = found
        moved = await cluster.move(cluster.manager(), 7, 1)
        assert moved is not None
        assert moved.resumed_from == begun.offset
        assert found.path_of(7).read_bytes() == content_of(7, SIZE)
        assert [path.name for path in directory.iterdir()] == [found.path_of(7).name]


async def test_however_often_fetchers_are_killed_the_shard_arrives(tmp_path: Path) -> None:
    directory = tmp_path / "w0"
    async with open_cluster(2, lambda number: DirectoryShardStore(tmp_path / f"w{number}")) as cluster:
        cluster.stores[1].put(7, [content_of(7, SIZE)])
        offsets = []
        for _ in range(3):
            proxy = TamperingProxy(cluster.workers[1])
            async with proxy.open():
                await kill_fetcher_at(proxy, directory, SIZE // 5)
            begun = DirectoryShardStore(directory).partial(7)
            offsets.append(0 if begun is None else begun.offset)
        assert offsets == sorted(offsets)
        assert offsets[-1] > SIZE // 5
        cluster.stores[0] = DirectoryShardStore(directory)
        moved = await cluster.move(cluster.manager(), 7, 1)
        assert moved is not None
        assert moved.resumed_from == offsets[-1]
