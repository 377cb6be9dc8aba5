"""The blocks of a worker's device when the daemon is killed."""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack
from pathlib import Path

from forged.client import DeviceMemory, ForgedClient
from forged.elastic.messages import JoinJob
from forged.elastic.model import WorkerId
from forged.memory.messages import Wanted
from forged.memory.model import AllocationRequest, GpuDevice
from tests.client.daemon_runner import SOON
from tests.processes.daemon import DaemonProcess

JOB = "run"
HANGS_S = 60.0
SIZE = 1 << 20


async def test_blocks_outlive_a_daemon_that_is_killed_again_and_again(tmp_path: Path) -> None:
    incarnation = os.urandom(16)
    with ExitStack() as daemons:
        daemon = daemons.enter_context(DaemonProcess(tmp_path))
        async with (
            ForgedClient(f"unix://{daemon.socket}", reconnect=SOON, timeout_s=HANGS_S) as client,
            asyncio.timeout(HANGS_S),
        ):
            await client.request(JoinJob(JOB, WorkerId("w0", "127.0.0.1", 1), incarnation, os.getpid()))
            async with DeviceMemory(client, JOB, "w0", incarnation, GpuDevice("gpu0", 64 * SIZE)) as memory:
                for number in range(3):
                    wanted = Wanted(f"block {number}", AllocationRequest("tensor", SIZE))
                    (reply,) = await memory.allocate(wanted, wait_s=HANGS_S)
                    assert reply.handle is not None
                    known = {one.handle: one.block.offset async for one in client.memory_blocks(JOB, memory.name)}
                    own = {one.handle: one.block.offset for one in memory.blocks.values()}
                    assert len(own) == number + 1
                    assert own.items() <= known.items()
                    # SIGKILL.
                    daemons.close()
                    daemons.enter_context(DaemonProcess(tmp_path))
