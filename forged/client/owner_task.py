"""An async context manager in a task of its own, so that any task may open and close it.

A context manager with a task group must be exited in the task that entered it, and before those that the task has
entered earlier. Objects with `connect` and `close` methods cannot ask that of their callers.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

import anyio

T = TypeVar("T")


class OwnerTask(Generic[T]):
    """Enters a context manager and exits it, both in one task. It can be opened once."""

    def __init__(self, manager: AbstractAsyncContextManager[T]) -> None:
        self._manager = manager
        self._has_to_close = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> T:
        """Enter the context manager and return its value. If the caller is cancelled, it is exited again."""
        opened: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        task = self._task = asyncio.create_task(self._own(opened))
        either: list[asyncio.Future[Any]] = [opened, task]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([task])
            raise
        if not opened.done():
            # Raises the error of entering.
            task.result()
        return opened.result()

    async def close(self) -> None:
        """Exit the context manager, and raise the error with which it ended. Idempotent; every caller waits."""
        self._has_to_close.set()
        if self._task is not None:
            await asyncio.wait([self._task])
            self._task.result()

    async def _own(self, opened: asyncio.Future[T]) -> None:
        async with self._manager as value:
            opened.set_result(value)
            await self._has_to_close.wait()
