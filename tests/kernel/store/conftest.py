"""Fixtures for the tests of the durable store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeAlias

import pytest

from forged.kernel.store.sqlite import SqliteStore
from tests.kernel.store.disk import Disk

OpenSqlite: TypeAlias = Callable[..., Awaitable[SqliteStore]]


@pytest.fixture
async def open_sqlite() -> AsyncIterator[OpenSqlite]:
    """`SqliteStore.open`; stores that are still open are closed after the test."""
    opened: list[SqliteStore] = []

    async def open_one(*args: Any, **options: Any) -> SqliteStore:
        opened.append(await SqliteStore.open(*args, **options))
        return opened[-1]

    yield open_one
    for store in opened:
        await store.close()


@pytest.fixture
def disk(request: pytest.FixtureRequest) -> Iterator[Disk]:
    """A disk that records operations and can fail."""
    disk = Disk(f"disk of {request.node.name}")
    yield disk
    disk.unregister()
