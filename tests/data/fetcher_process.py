"""A worker that fetches one shard, in a process of its own, to be killed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from forged.data.store.directory import DirectoryShardStore
from forged.data.transfer.manager import DataTransferManager
from forged.elastic.model import WorkerId
from forged.worker.mesh import Mesh
from tests.data.transfer_cluster import shard
from tests.worker.meshes import JOB, KEY


async def fetch(source: WorkerId, directory: Path, number: int) -> None:
    """Fetch the shard, and end."""
    mesh = Mesh("victim", bytes(16), JOB, key=KEY)
    async with mesh.open() as address:
        me = WorkerId("victim", address.host, address.port)
        manager = DataTransferManager(worker=me, store=DirectoryShardStore(directory), connect=mesh.connect_for_shards)
        await manager.transfer_data_shards(source, me, shard(number))


if __name__ == "__main__":
    asyncio.run(fetch(WorkerId.parse(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
