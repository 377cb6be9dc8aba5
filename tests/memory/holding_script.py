"""A worker process that registers a device, holds blocks on it and on another device, and waits to be killed."""

from __future__ import annotations

import asyncio
import os
import socket
import sys

from forged.client import ForgedClient
from forged.elastic.messages import JoinJob
from forged.elastic.model import WorkerId
from forged.memory.messages import Wanted
from forged.memory.model import AllocationRequest, GpuDevice

TOTAL = 1 << 20
SIZE = 1 << 18


async def hold(endpoint: str, job: str, name: str, other: str) -> None:
    incarnation = os.urandom(16)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        worker = WorkerId(name, "127.0.0.1", listening.getsockname()[1])
        async with ForgedClient(endpoint) as client:
            await client.request(JoinJob(job, worker, incarnation, os.getpid()))
            await client.register_device(job, name, incarnation, GpuDevice("gpu0", TOTAL))
            for device in (f"{name}/gpu0", other):
                wanted = [Wanted("held", AllocationRequest("weights", SIZE))]
                await client.allocate_memory(job, name, incarnation, device, wanted)
            print("holds", flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(hold(*sys.argv[1:5]))
