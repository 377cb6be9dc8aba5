"""The copies in this worker's shard store: listing, verifying and dropping them.

Invariants:
- A suspect copy is read back in full, and dropped when it does not match its stamp or cannot be read.
- The store may block, so it is called in a thread, except in simulations.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Container, Generator
from contextlib import closing
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import xxhash
from anyio import to_thread

from forged.data.messages import mark_of
from forged.data.model import Indices
from forged.data.store.port import OpenShard, ShardStore, Stamp
from forged.errors import RequestRefused

T = TypeVar("T")

PIECE_BYTES = 1 << 20


class Inventory(NamedTuple):
    """The held shards, their total size in bytes, and the checksum mark of each."""

    ids: Indices
    size: int
    marks: bytes


class LocalShards:
    """The copies of the shards `0` to `shards - 1` in one store."""

    def __init__(self, store: ShardStore, shards: int, *, uses_threads: bool) -> None:
        self._store = store
        self._shards = shards
        self._uses_threads = uses_threads
        self.suspects: set[int] = set()
        """Copies that are to be verified before they are offered again."""
        self.verified: set[int] = set()
        """Suspect copies that were verified and not yet reported, whether they were bad or not."""

    async def inventory(self) -> Inventory:
        return await self._in_thread(partial(_inventory, self._store, self._shards))

    async def verify_suspects(self) -> AsyncIterator[None]:
        """Verify all suspect copies and drop the bad ones. Yields after each piece that was read."""
        while self.suspects:
            shard = min(self.suspects)
            with closing(_drop_if_bad(self._store, shard)) as verification:
                while await self._in_thread(partial(next, verification, None)):
                    yield
            self.suspects.discard(shard)
            self.verified.add(shard)

    async def drop(self, shard: int) -> None:
        await self._in_thread(partial(self._store.drop, shard))

    async def drop_all_except(self, keep: Container[int]) -> None:
        await self._in_thread(partial(_drop_all_except, self._store, keep))

    async def _in_thread(self, act: Callable[[], T]) -> T:
        return await to_thread.run_sync(act) if self._uses_threads else act()


def _inventory(store: ShardStore, shards: int) -> Inventory:
    held: dict[int, Stamp] = dict(store.held())
    ids = sorted(shard for shard in held if shard < shards)
    marks = b"".join(mark_of(held[shard].checksum) for shard in ids)
    return Inventory(np.array(ids, "<i8"), sum(held[shard].size for shard in ids), marks)


def _drop_if_bad(store: ShardStore, shard: int) -> Generator[bool]:
    """Yields True after each piece, so that the caller can report progress."""
    try:
        with store.open(shard) as opened:
            is_intact = yield from _is_intact(opened)
    except RequestRefused:
        # The copy is no longer held.
        return
    if not is_intact:
        store.drop(shard)


def _is_intact(opened: OpenShard) -> Generator[bool, None, bool]:
    checksum, size = xxhash.xxh3_128(), 0
    try:
        while piece := os.pread(opened.fd, PIECE_BYTES, size):
            checksum.update(piece)
            size += len(piece)
            yield True
    except OSError:
        # A copy that the disk cannot read is a bad copy.
        return False
    return opened.stamp == Stamp(size, checksum.digest())


def _drop_all_except(store: ShardStore, keep: Container[int]) -> None:
    for shard in [shard for shard in store.held() if shard not in keep]:
        store.drop(shard)
