"""A context manager in a task of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from forged.client.owner_task import OwnerTask


class Resource:
    """A context manager with a task group. Records the tasks that have entered and exited it."""

    def __init__(self) -> None:
        self.entered_by: object = None
        self.exited_by: object = None
        self.may_enter = asyncio.Event()
        self.may_enter.set()
        self.may_exit = asyncio.Event()
        self.may_exit.set()
        self.fails = asyncio.Event()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[int]:
        self.entered_by = asyncio.current_task()
        try:
            async with anyio.create_task_group() as tasks:
                await self.may_enter.wait()
                tasks.start_soon(self._fail)
                yield 7
                await self.may_exit.wait()
                tasks.cancel_scope.cancel()
        finally:
            self.exited_by = asyncio.current_task()

    async def _fail(self) -> None:
        await self.fails.wait()
        raise ValueError("broken")


async def test_it_is_entered_and_exited_in_one_task_that_is_not_the_callers() -> None:
    resource = Resource()
    owner = OwnerTask(resource.held())
    assert await asyncio.create_task(owner.open()) == 7
    assert resource.exited_by is None
    await owner.close()
    assert resource.entered_by is resource.exited_by is not None
    assert resource.entered_by is not asyncio.current_task()


async def test_two_close_in_the_order_in_which_they_were_opened() -> None:
    first, second = Resource(), Resource()
    owners = [OwnerTask(first.held()), OwnerTask(second.held())]
    for owner in owners:
        await owner.open()
    await owners[0].close()
    assert first.exited_by is not None
    assert second.exited_by is None
    await owners[1].close()
    assert second.exited_by is not None


async def test_cancelled_opening_exits_the_context_manager_before_it_returns() -> None:
    resource = Resource()
    resource.may_enter.clear()
    owner = OwnerTask(resource.held())
    opening = asyncio.create_task(owner.open())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert resource.entered_by is not None
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert resource.exited_by is resource.entered_by


async def test_every_caller_of_close_waits_for_the_end() -> None:
    resource = Resource()
    resource.may_exit.clear()
    owner = OwnerTask(resource.held())
    await owner.open()
    closing = [asyncio.create_task(owner.close()) for _ in range(2)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert not any(task.done() for task in closing)
    resource.may_exit.set()
    await asyncio.gather(*closing)
    assert resource.exited_by is not None


async def test_close_raises_the_error_that_ended_it() -> None:
    resource = Resource()
    owner = OwnerTask(resource.held())
    await owner.open()
    resource.fails.set()
    with pytest.raises(ExceptionGroup) as raised:
        await owner.close()
    assert raised.group_contains(ValueError, match="broken")


async def test_open_raises_the_error_of_entering() -> None:
    @asynccontextmanager
    async def refusing() -> AsyncIterator[None]:
        raise ValueError("refused")
        yield

    with pytest.raises(ValueError, match="refused"):
        await OwnerTask(refusing()).open()


async def test_close_without_open_has_no_effect() -> None:
    resource = Resource()
    manager = resource.held()
    await OwnerTask(manager).close()
    assert resource.entered_by is None
