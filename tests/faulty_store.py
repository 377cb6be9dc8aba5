"""A `MemoryStore` that can be told to block, to fail, or to hang like a process that is killed during a commit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from forged.errors import ForgedError
from forged.kernel.store.memory import MemoryStore
from forged.kernel.store.port import PAGE_ENTRIES_MAX, Change, Conflict, Entry, StoreUnavailable, Transaction


def full() -> StoreUnavailable:
    """The error of a full disk."""
    return StoreUnavailable("store_full", "the store cannot write: no space left", "make room")


class FaultyStore:
    """A `MemoryStore` with faults."""

    def __init__(self, memory: MemoryStore | None = None) -> None:
        self.memory = memory or MemoryStore("a history")
        self.batches: list[Sequence[Transaction]] = []
        """The committed batches."""
        self.attempts = 0
        self.commit_error: ForgedError | None = None
        """The error that commits raise."""
        self.read_error: ForgedError | None = None
        """The error that reads raise."""
        self.dies = ""
        """`before` or `after`: the next commit hangs before or after it was applied."""
        self._open = asyncio.Event()
        self._open.set()
        self.entered = asyncio.Event()
        """Set when a commit begins."""

    @property
    def revision(self) -> int:
        return self.memory.revision

    @property
    def history(self) -> str:
        return self.memory.history

    def block(self) -> None:
        """Block commits until `unblock`."""
        self._open.clear()
        self.entered.clear()

    def unblock(self) -> None:
        """Unblock commits."""
        self._open.set()

    async def get(self, key: str) -> Entry | None:
        self._check_reads()
        return await self.memory.get(key)

    async def list(self, prefix: str, *, after: str = "", limit: int = PAGE_ENTRIES_MAX) -> Sequence[Entry]:
        self._check_reads()
        # A real store yields to the event loop here.
        await asyncio.sleep(0)
        return await self.memory.list(prefix, after=after, limit=limit)

    async def commit(self, batch: Sequence[Transaction]) -> Sequence[Conflict | None]:
        self.attempts += 1
        self.entered.set()
        await self._open.wait()
        if self.commit_error is not None:
            raise self.commit_error
        if self.dies == "before":
            await asyncio.Event().wait()
        conflicts = await self.memory.commit(batch)
        self.batches.append(batch)
        if self.dies == "after":
            await asyncio.Event().wait()
        return conflicts

    def watch(self, prefix: str, after: int) -> AsyncIterator[Change]:
        return self.memory.watch(prefix, after)

    async def close(self) -> None:
        await self.memory.close()

    def _check_reads(self) -> None:
        if self.read_error is not None:
            raise self.read_error
