"""A `MemoryStore` that can be told to block, to fail, or to hang like a process that is killed during a commit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from forged.errors import ForgedError
from forged.kernel.store.memory import MemoryStore
from forged.kernel.store.port import PAGE_ENTRIES_MAX, Change, Conflict, Entry, StoreUnavailable, Transaction


def full() -> StoreUnavailable:
    """What a store says on a full disk."""
    return StoreUnavailable("store_full", "the store cannot write: no space left", "make room")


class FaultyStore:
    """The port `forged.kernel.store.port.Store` over a `MemoryStore`, with all that can go wrong."""

    def __init__(self, memory: MemoryStore | None = None) -> None:
        self.memory = memory or MemoryStore("a history")
        self.batches: list[Sequence[Transaction]] = []
        """What was committed, batch by batch."""
        self.attempts = 0
        self.commit_error: ForgedError | None = None
        """What commits raise, changing nothing."""
        self.read_error: ForgedError | None = None
        """What reads raise."""
        self.dies = ""
        """`before` or `after`: the next commit never returns, and has changed nothing or everything."""
        self._open = asyncio.Event()
        self._open.set()
        self.entered = asyncio.Event()
        """A commit has begun since this was cleared."""

    @property
    def revision(self) -> int:
        return self.memory.revision

    @property
    def history(self) -> str:
        return self.memory.history

    def block(self) -> None:
        """Let commits wait until `unblock`."""
        self._open.clear()
        self.entered.clear()

    def unblock(self) -> None:
        """Let the commits go on."""
        self._open.set()

    async def get(self, key: str) -> Entry | None:
        self._check_reads()
        return await self.memory.get(key)

    async def list(self, prefix: str, *, after: str = "", limit: int = PAGE_ENTRIES_MAX) -> Sequence[Entry]:
        self._check_reads()
        # A real store gives others their turn here, and so this one.
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
