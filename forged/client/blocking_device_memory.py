"""`DeviceMemory` for programs without an event loop.

Invariants:
- The callbacks run one at a time, in a thread of their own, and may use the client. After the block none runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Self, TypeVar

from forged.blocking.facade import BlockingFacade, blocking
from forged.client.blocking import BlockingClient
from forged.client.device_memory import DeviceMemory
from forged.errors import RequestRefused, describe
from forged.log import SILENT, Log
from forged.memory.messages import HeldBlock, Move
from forged.memory.model import GpuDevice

R = TypeVar("R")


class BlockingDeviceMemory(BlockingFacade[DeviceMemory]):
    """A device of a registered worker, and the worker's blocks in it; a context manager within that of the client.

    `copy` moves the bytes of a block from `move.source` to `move.destination`; without it no block moves. `evicted` is
    called for each block that is lost, and `elsewhere` says where else the worker has blocks, as for `DeviceMemory`.
    """

    def __init__(
        self,
        client: BlockingClient,
        job: str,
        worker_id: str,
        incarnation: bytes,
        device: GpuDevice,
        *,
        copy: Callable[[Move], object] | None = None,
        evicted: Callable[[HeldBlock], object] = lambda held: None,
        elsewhere: Sequence[str] = (),
        log: Log = SILENT,
    ) -> None:
        self._loop = client.loop
        self._callbacks = ThreadPoolExecutor(1, "forged-device-memory")
        self._copy = copy
        self._evicted = evicted
        self._log = log
        self._open = ExitStack()
        self._is_open = False
        # Made in the loop's thread: it belongs to the client's loop.
        self._memory = self._loop.call(
            lambda: DeviceMemory(
                client.aio,
                job,
                worker_id,
                incarnation,
                device,
                copy=None if copy is None else self._copied,
                evicted=lambda held: self._callbacks.submit(self._tell_evicted, held),
                elsewhere=elsewhere,
                log=log,
            )
        )
        self.name = self._memory.name

    def __enter__(self) -> Self:
        if self._is_open:
            raise RequestRefused(
                "device_memory_reopened", "the memory of a device can be opened only once", "create another one"
            )
        self._is_open = True
        with ExitStack() as opened:
            opened.enter_context(self._callbacks)
            opened.enter_context(self._loop.holding(self._memory))
            self._open = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    @property
    def blocks(self) -> Mapping[str, HeldBlock]:
        """The worker's blocks in this device, by name, as they are now."""
        return self._loop.call(lambda: dict(self._memory.blocks))

    plan_offsets = blocking(DeviceMemory.plan_offsets)
    allocate = blocking(DeviceMemory.allocate)
    free = blocking(DeviceMemory.free)
    change = blocking(DeviceMemory.change)

    def _run(self, call: Callable[[DeviceMemory], Awaitable[R]]) -> R:
        return self._loop.run(call, self._memory)

    async def _copied(self, move: Move) -> None:
        assert self._copy is not None
        await asyncio.get_running_loop().run_in_executor(self._callbacks, self._copy, move)

    def _tell_evicted(self, held: HeldBlock) -> None:
        try:
            self._evicted(held)
        except Exception as error:  # noqa: BLE001 - it is the program's own, and the block is gone anyway
            self._log.error("the callback for an evicted block failed", block=held.handle.name, error=describe(error))
