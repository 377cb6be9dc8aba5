"""A worker's mesh in a process of its own, to be killed.

The process follows the lines of JSON on its input, and answers each line before it waits for another peer. It
ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

import numpy as np

from forged.elastic.model import ClusterTopology, WorkerId
from forged.worker.collectives.world import World
from forged.worker.mesh import Mesh
from tests.worker.meshes import JOB, KEY, PATIENCE_S, buffers, random_parts

ACTS: dict[str, Callable[[World], Awaitable[Any]]] = {
    "barrier": lambda world: world.barrier(),
    "gather": lambda world: world.gather(b"x", 1),
    "broadcast": lambda world: world.broadcast(b"x", 1),
    "all_gather": lambda world: world.all_gather(np.arange(3)),
    "all_reduce": lambda world: world.all_reduce(np.ones(1 << 20)),
    "end_step": lambda world: world.end_step(1),
}
STATE_SIZES = (4_000_000,) * 50


class PeerProcess:
    """The other end: starts it, orders, and kills."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.worker: WorkerId

    async def __aenter__(self) -> Self:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, self.worker_id, stdin=pipe, stdout=pipe
        )
        self.worker = WorkerId(self.worker_id, "127.0.0.1", await self.answer())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.communicate()

    async def order(self, **order: Any) -> None:
        """Have it do something; returns when it is about to."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        assert await self.answer() == "doing"

    async def enter(self, generation: int, topology: ClusterTopology) -> None:
        """Have it enter a world."""
        await self.order(enter=[[one.id, one.hostname, one.port] for one in topology.workers], generation=generation)

    async def answer(self) -> Any:
        """The next line of what it says."""
        assert self._process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            return json.loads(await self._process.stdout.readline())

    def kill(self) -> None:
        """End it as the kernel does when memory is short."""
        os.kill(self._process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Let it stand still."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self._process.pid, signal.SIGCONT)


def say(line: Any) -> None:
    """Answer."""
    print(json.dumps(line), flush=True)


async def obey(mesh: Mesh, order: dict[str, Any], worlds: list[World]) -> None:
    """Do what an order says."""
    say("doing")
    if "enter" in order:
        topology = ClusterTopology(tuple(WorkerId(*one) for one in order["enter"]))
        worlds.append(await mesh.enter(order["generation"], topology, PATIENCE_S))
        say("entered")
    elif "call" in order:
        await ACTS[order["call"]](worlds[-1])
        say("called")
    elif "offer" in order:
        with mesh.state_server.offering(order["offer"], b"", random_parts(*STATE_SIZES)):
            say("offering")
            await asyncio.Event().wait()
    elif "fetch" in order:
        await mesh.state_fetch.fetch(WorkerId(*order["fetch"]), order["attempt"], lambda _: buffers(*STATE_SIZES))
        say("fetched")


async def main(worker_id: str) -> None:
    """Serve orders until there are no more."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    mesh = Mesh(worker_id, os.urandom(16), JOB, key=KEY)
    worlds: list[World] = []
    async with mesh.open() as address, asyncio.TaskGroup() as tasks:
        say(address.port)
        running = []
        while line := await reader.readline():
            running.append(tasks.create_task(obey(mesh, json.loads(line), worlds)))
        for task in running:
            task.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
