"""Meshes of several workers in one process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from forged.elastic.model import ClusterTopology, WorkerId
from forged.worker.collectives.world import World
from forged.worker.mesh import Mesh

T = TypeVar("T")

KEY = b"the job's key, as long as a hash"
JOB = "run"
PATIENCE_S = 30.0


def incarnation(number: int) -> bytes:
    """The incarnation of the worker of that number."""
    return number.to_bytes(16, "big")


@dataclass
class Meshes:
    """Open meshes and their worker ids."""

    meshes: list[Mesh]
    workers: list[WorkerId]

    @property
    def topology(self) -> ClusterTopology:
        """All of them, in their order."""
        return ClusterTopology(tuple(self.workers))

    def of(self, *numbers: int) -> ClusterTopology:
        """Some of them."""
        return ClusterTopology(tuple(self.workers[number] for number in numbers))

    async def enter(self, generation: int, *numbers: int) -> list[World]:
        """The world of some, or of all; in the order of ranks."""
        chosen = numbers or tuple(range(len(self.meshes)))
        return await each(
            [self.meshes[number] for number in chosen],
            lambda mesh: mesh.enter(generation, self.of(*chosen), PATIENCE_S),
        )


@asynccontextmanager
async def open_meshes(count: int, **options: Any) -> AsyncIterator[Meshes]:
    """So many meshes on loopback."""
    async with AsyncExitStack() as stack:
        made = Meshes([], [])
        for number in range(count):
            mesh = Mesh(f"w{number}", incarnation(number), JOB, key=KEY, **options)
            address = await stack.enter_async_context(mesh.open())
            made.meshes.append(mesh)
            made.workers.append(WorkerId(f"w{number}", address.host, address.port))
        yield made


@asynccontextmanager
async def open_world(count: int) -> AsyncIterator[list[World]]:
    """One world of so many."""
    async with open_meshes(count) as made:
        yield await made.enter(1)


async def each(things: Sequence[Any], act: Callable[[Any], Awaitable[T]]) -> list[T]:
    """Do the same with all of them at once."""
    return list(await asyncio.gather(*(act(thing) for thing in things)))


async def failures(*acts: Awaitable[Any]) -> list[BaseException]:
    """What several things at once raise; all of them have to."""
    async with asyncio.timeout(PATIENCE_S):
        outcomes = await asyncio.gather(*acts, return_exceptions=True)
    for outcome in outcomes:
        assert isinstance(outcome, BaseException), outcome
    return [outcome for outcome in outcomes if isinstance(outcome, BaseException)]


async def until(true: Callable[[], bool]) -> None:
    """Let the loop turn until something holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not true():
            await asyncio.sleep(0)


def buffers(*sizes: int) -> list[memoryview]:
    """Room for parts."""
    return [memoryview(bytearray(size)) for size in sizes]


def random_parts(*sizes: int) -> list[memoryview]:
    """Parts with something in them."""
    import random

    source = random.Random(1)
    return [memoryview(bytearray(source.randbytes(size))) for size in sizes]


class Gate:
    """Something that a thread waits for."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def open(self) -> None:
        """Let it go on."""
        self._event.set()

    def wait(self) -> None:
        """Wait until it may."""
        assert self._event.wait(PATIENCE_S)
